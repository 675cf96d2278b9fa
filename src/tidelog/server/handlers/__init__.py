"""HTTP handlers: one module per resource, each function one endpoint of `server/app.py`.

A handler takes a `RequestContext` and returns a response, a stream, or a coroutine of either. `@operation` and the
docstring describe it in the OpenAPI document. Read `topics` (with routers and groups) first; then `write` (the JSON
write path), `records` (reads) and `queues`. `bulk_write` takes a stream of JSON lines or Arrow; `spark` serves segment
files and numbered batches; `tiers` moves segments to the cold store and back, `backups` copies the whole database,
`admin` is about the whole server. `sse` and `websocket` push records, jobs and messages through
`server/push`; `events` is one topic for a browser, with its read tokens. `channels` has operations that HTTP and
WebSocket share. `fast_handlers` answers small requests with a known head without the normal path.
"""
