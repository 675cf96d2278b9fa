"""[shell] Syncs beside an event loop: a thread that does nothing else, and needs no interpreter for it.

    ask ──descriptor──► a pipe ──► fdatasync ──► a pipe ──its errno, or 0──► outcome
                                                   ▲
                                          what an event loop listens to

The compiled thread never holds the interpreter's lock, which a busy loop would make it wait for, before the sync and
behind it.
"""

from __future__ import annotations

import os
import struct
from select import POLLIN, poll
from threading import Thread
from typing import Final

from tidelog import native
from tidelog.disk import fork

_MESSAGE: Final = struct.Struct("=i")


class FsyncThread:
    """One sync at a time. `ask` and `close` by whoever has the turn, `outcome` by anybody."""

    def __init__(self, name: str) -> None:
        asks, self._request_fd = os.pipe()
        self.descriptor, tells = os.pipe()
        self._thread_fds = (asks, tells)
        os.set_blocking(self.descriptor, False)
        # It does not keep a process alive: what was asked for and never heard of was never acknowledged either.
        self._thread = Thread(target=native.fsync_loop, args=self._thread_fds, name=name, daemon=True)
        self._thread.start()
        fork.register(self)

    def on_fork(self, pid: int) -> None:  # noqa: ARG002
        # A word written to these pipes would end the parent's thread, and one read from them would never reach it.
        self._close_pipes()

    def request(self, descriptor: int) -> None:
        """Have this synced."""
        os.write(self._request_fd, _MESSAGE.pack(descriptor))

    def result(self) -> OSError | None:
        """What came of it. Raises BlockingIOError while it is under way, and where somebody else has heard of it."""
        (code,) = _MESSAGE.unpack(os.read(self.descriptor, _MESSAGE.size))
        return OSError(code, os.strerror(code)) if code else None

    def wait(self, seconds: float) -> None:
        """Return when there is something to hear, and in any case after so long."""
        waiter = poll()  # `select` knows no descriptor above 1023
        waiter.register(self.descriptor, POLLIN)
        waiter.poll(seconds * 1000)

    def close(self) -> None:
        """End the thread, once what was asked for is done. By a word: a forked child may hold the pipe open."""
        if self._request_fd < 0:
            return
        self.request(-1)
        self._thread.join()
        self._close_pipes()

    def _close_pipes(self) -> None:
        ends = (*self._thread_fds, self._request_fd, self.descriptor)
        self._thread_fds, self._request_fd, self.descriptor = (
            (-1, -1),
            -1,
            -1,
        )  # first: a number is used again once it is closed
        for descriptor in ends:
            if descriptor >= 0:
                os.close(descriptor)
