"""The server: the `/v0` contract over HTTP/1.1, h2c, SSE and WebSocket, or inside another application by ASGI."""

from tidelog.server.config import ServerConfig
from tidelog.server.mount import Mounted, asgi

__all__ = ["Mounted", "ServerConfig", "asgi"]
