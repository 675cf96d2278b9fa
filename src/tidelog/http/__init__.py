"""The front end: bytes between sockets and an application. It knows nothing of topics.

listener   accepts, tells the two protocols apart, ends in good order
h1  h2  ws HTTP/1.1, HTTP/2 and WebSocket connections
asgi       the same application inside somebody else's server
exchange   one request from its head to the end of its answer, whatever carries it
compress   content codings, as an application around the application
seam       what the front end and the application say to each other
"""
