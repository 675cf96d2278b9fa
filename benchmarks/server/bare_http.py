"""The least that an HTTP server in Python does: read a request, answer the same few bytes. A limit, not a server.
Who GETs anything is told of every POST from then on.

python -m benchmarks.server.bare_http PORT_FILE
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

from httptools import HttpRequestParser

_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\nevent: caught-up\n\n"
EVENT = b"event: record\ndata: %b\n\n" % (b"x" * 150)  # as long as one of a record of 100 bytes

_watchers: set[asyncio.Transport] = set()


class BareHttp(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"GET":
            _watchers.add(self._transport)
            self._transport.write(_STREAM)
            return
        for watcher in _watchers:
            watcher.write(EVENT)
        self._transport.write(_ANSWER)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - gone is gone, whatever the reason
        _watchers.discard(self._transport)


async def serve(port_file: Path) -> None:
    server = await asyncio.get_running_loop().create_server(BareHttp, "127.0.0.1", 0)
    port_file.write_text(str(server.sockets[0].getsockname()[1]))
    await server.serve_forever()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.new_event_loop
    return new_event_loop


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(Path(sys.argv[1])))
