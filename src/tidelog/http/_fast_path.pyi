"""The interface of the compiled fast path, used by `fast_path.py` alone; absent where the package was built without a
compiler."""

from collections.abc import Callable
from typing import Any

def match_body(data: bytes, head_before_length: bytes, head_after_length: bytes) -> bytes | None:
    """Return the body if `data` is one whole request with this head, else None.

    The length between the two parts of the head has one to five digits and no leading zero.
    """

class FastPathReader:
    """Receives the bytes of one connection and adds requests with the known head to a `RequestBatcher`.

    A subclass defines `send(*data)` for responses that `send_responses` may not write directly.
    """

    owner: Any  # the connection: has `current`, and `next_request(reader)` continues after a response
    write: Callable[[bytes], None]  # of the transport
    is_closing: Callable[[], bool]  # of the transport
    is_armed: bool  # the next input may be a request with the known head
    is_undisturbed: bool  # no other input and no pause since the request was added
    disconnected: bool  # the client has left
    was_served: bool  # a response was written since `check_timeouts` cleared this

    def __init__(self, owner: Any, buffer: memoryview, fallback: Callable[[int], None]) -> None:
        """`fallback(nbytes)` handles input that is no request with the known head."""

    def get_buffer(self, sizehint: int) -> memoryview: ...
    def buffer_updated(self, nbytes: int) -> None: ...
    def submit(
        self, head_before_length: bytes, head_after_length: bytes, batcher: Any, transport: Any, body: bytes
    ) -> None:
        """Add this body to the batch now, and from now on the bodies of requests with this head."""

def send_responses(
    requests: list[Any],
    bodies: list[bytes],
    before_length: bytes,
    after_length: bytes,
    before_body: bytes,
    id_prefix: bytes,
    id_number: int,
) -> None:
    """Write each request's response and arm its reader for the next request.

    A response is `before_length`, the length of the body, `after_length`, `id_prefix` and a number in base 16 (counted
    up from `id_number`), `before_body`, the body. Clients that have left are skipped. Raises ValueError where the
    lists differ in length.
    """
