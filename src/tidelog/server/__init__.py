"""The server: the `/v0` contract over HTTP/1.1, h2c, SSE and WebSocket."""
