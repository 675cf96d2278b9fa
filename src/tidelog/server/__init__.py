"""The server: the `/v0` contract over HTTP/1.1, h2c, SSE and WebSocket, or inside another application by ASGI.

    lifecycle        start, recovery, stop: as a process, or inside an ASGI server
    config           settings of a process
    app              from a request to its handler: route, key, scope, name, body
    request, errors  what a handler gets, and the error responses
    auth             keys, scopes, limits, origins, CORS; `read_tokens` for pages
    service          the state that all handlers share
    handlers/        one module for each group of endpoints
    write_pipeline   every write from a handler to its outcome
    push/            delivery to waiting readers, and its policy
    metrics          metrics and health, with their endpoints; `access_log` one line for each request
    openapi          the description of the API

Read `app` first, then a handler, then `write_pipeline`. `tidelog.http` parses requests and knows no topics.
"""

from tidelog.server.config import ServerConfig
from tidelog.server.lifecycle import AsgiApp, asgi

__all__ = ["AsgiApp", "ServerConfig", "asgi"]
