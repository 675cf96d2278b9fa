"""The server: the `/v0` contract over HTTP/1.1, h2c, SSE and WebSocket, or inside another application by ASGI.

    lifecycle, asgi_app  start, recovery, stop: as a process, or inside an ASGI server
    config               settings of a process
    app, routes          from a request to its handler: route, key, scope, name, body
    request, errors      what a handler gets, and the error responses
    auth                 keys, scopes, limits, origins
    service              the state that all handlers share
    handlers/            one module for each group of endpoints
    write_pipeline       every write from a handler to its outcome
    push/, scheduling/   delivery to waiting readers, and its policy
    metrics, openapi     metrics and the description of the API

Read `app` first, then a handler, then `write_pipeline`. `tidelog.http` parses requests and knows no topics.
"""

from tidelog.server.asgi_app import AsgiApp, asgi
from tidelog.server.config import ServerConfig

__all__ = ["AsgiApp", "ServerConfig", "asgi"]
