"""A thread that runs fdatasync for an event loop.

    request ──descriptor──► pipe ──► fdatasync ──► pipe ──errno, or 0──► result
                                                    ▲
                                           watched by the event loop

The compiled thread never takes the interpreter lock, so it does not wait for a busy event loop before or after the
sync.
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
    """Runs one sync at a time. Only the holder of the commit lock calls `request` and `close`; any thread may call
    `result`."""

    def __init__(self, name: str) -> None:
        request_reader, self._request_fd = os.pipe()
        self.descriptor, result_writer = os.pipe()
        self._thread_fds = (request_reader, result_writer)
        os.set_blocking(self.descriptor, False)
        # A daemon: a sync whose result was not read has acknowledged nothing, so the process may exit.
        self._thread = Thread(target=native.fsync_loop, args=self._thread_fds, name=name, daemon=True)
        self._thread.start()
        fork.register(self)

    def on_fork(self, pid: int) -> None:  # noqa: ARG002
        # Writing to these pipes could stop the parent's thread, and reading would steal its results.
        self._close_pipes()

    def request(self, descriptor: int) -> None:
        """Start a sync of this descriptor."""
        os.write(self._request_fd, _MESSAGE.pack(descriptor))

    def result(self) -> OSError | None:
        """The result of the requested sync: its error, or None. Raises BlockingIOError while it is running, and if
        another thread has read the result."""
        (code,) = _MESSAGE.unpack(os.read(self.descriptor, _MESSAGE.size))
        return OSError(code, os.strerror(code)) if code else None

    def wait(self, seconds: float) -> None:
        """Return when a result can be read, or after `seconds`."""
        waiter = poll()  # `select` cannot watch descriptors above 1023
        waiter.register(self.descriptor, POLLIN)
        waiter.poll(seconds * 1000)

    def close(self) -> None:
        """Stop the thread after the running sync. By a message, not by end of file: a forked child may hold the pipe
        open."""
        if self._request_fd < 0:
            return
        self.request(-1)
        self._thread.join()
        self._close_pipes()

    def _close_pipes(self) -> None:
        descriptors = (*self._thread_fds, self._request_fd, self.descriptor)
        # Cleared before closing: the numbers are reused as soon as they are closed.
        self._thread_fds, self._request_fd, self.descriptor = (-1, -1), -1, -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)
