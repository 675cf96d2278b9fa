"""The server: the `/v0` contract over HTTP/1.1, h2c, SSE and WebSocket, or inside another application by ASGI."""

from tidelog.server.asgi_app import AsgiApp, asgi
from tidelog.server.config import ServerConfig

__all__ = ["AsgiApp", "ServerConfig", "asgi"]
