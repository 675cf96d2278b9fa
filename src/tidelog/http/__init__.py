"""The HTTP front end: bytes between sockets and an application. It knows nothing of topics.

    listener      accepts connections, detects HTTP/1.1 or HTTP/2, shuts down in order
    connection    what every connection does, and what the connections of a listener share
    h1  h2  websocket   the protocols; h1_encoder has the bytes of HTTP/1.1 responses
    fast_path     small repeated HTTP/1.1 requests without the parser, with the compiled `_fast_path`
    exchange      one request from its head to the end of its response, for every protocol
    asgi          the same application inside another server
    compression   content codings, as an application around the application
    limits        what a client may cost: work of a turn, memory, time

Start with `interface`: it defines what the front end and the application call on each other. Then `exchange` and `h1`.
"""
