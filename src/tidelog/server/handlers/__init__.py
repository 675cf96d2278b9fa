"""HTTP handlers: one module per resource, each function one endpoint of `server/app.py`.

A handler takes a `RequestContext` and returns a response, a stream, or a coroutine of either. `@operation` and the
docstring describe it in the OpenAPI document. Read `topics` first; then `write` (the JSON write path), `records`
(reads) and `queues`. `bulk_read` and `bulk_write` stream whole topics as JSON lines or Arrow; `batches` and
`segments` serve Spark. `sse` and `websocket` push records, jobs and messages through `server/push`;
`websocket_commands` has the types of the WebSocket messages. `channels` has operations that HTTP and WebSocket share.
`fast_handlers` answers small requests with a known head without the normal path.
"""
