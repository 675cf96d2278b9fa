"""[shell] Syncs beside an event loop: a thread that does nothing else, and needs no interpreter for it.

    ask ──descriptor──► a pipe ──► fdatasync ──► a pipe ──its errno, or 0──► outcome
                                                   ▲
                                          what an event loop listens to

The compiled thread never holds the interpreter's lock, which a busy loop would make it wait for, before the sync and
behind it. `synced` is its twin and says what is right.
"""

from __future__ import annotations

import os
import struct
from select import POLLIN, poll
from threading import Thread
from typing import Final

from tidelog.disk import fork

try:
    from tidelog import kernel
except ImportError:
    COMPILED = False
else:
    COMPILED = True

_WORD: Final = struct.Struct("=i")


def synced(asks: int, tells: int) -> None:
    """Sync each descriptor that can be read from `asks` and write what came of it, an errno or 0, to `tells`; until
    one is below 0, or there are none any more."""
    while word := os.read(asks, _WORD.size):
        (descriptor,) = _WORD.unpack(word)
        if descriptor < 0:
            return
        code = 0
        try:
            os.fdatasync(descriptor)
        except OSError as error:
            code = error.errno or -1
        os.write(tells, _WORD.pack(code))


class Beside:
    """One sync at a time. `ask` and `close` by whoever has the turn, `outcome` by anybody."""

    def __init__(self, name: str, *, compiled: bool = True) -> None:
        asks, self._asked = os.pipe()
        self.descriptor, tells = os.pipe()
        self._far = (asks, tells)
        os.set_blocking(self.descriptor, False)
        work = kernel.synced if COMPILED and compiled else synced
        # It does not keep a process alive: what was asked for and never heard of was never acknowledged either.
        self._thread = Thread(target=work, args=self._far, name=name, daemon=True)
        self._thread.start()
        fork.guard(self)

    def forked(self, pid: int) -> None:  # noqa: ARG002
        # A word written to these pipes would end the parent's thread, and one read from them would never reach it.
        self._give_up()

    def ask(self, descriptor: int) -> None:
        """Have this synced."""
        os.write(self._asked, _WORD.pack(descriptor))

    def outcome(self) -> OSError | None:
        """What came of it. Raises BlockingIOError while it is under way, and where somebody else has heard of it."""
        (code,) = _WORD.unpack(os.read(self.descriptor, _WORD.size))
        return OSError(code, os.strerror(code)) if code else None

    def wait(self, seconds: float) -> None:
        """Return when there is something to hear, and in any case after so long."""
        waiter = poll()  # `select` knows no descriptor above 1023
        waiter.register(self.descriptor, POLLIN)
        waiter.poll(seconds * 1000)

    def close(self) -> None:
        """End the thread, once what was asked for is done. By a word: a forked child may hold the pipe open."""
        if self._asked < 0:
            return
        self.ask(-1)
        self._thread.join()
        self._give_up()

    def _give_up(self) -> None:
        ends = (*self._far, self._asked, self.descriptor)
        self._far, self._asked, self.descriptor = (-1, -1), -1, -1  # first: a number is used again once it is closed
        for descriptor in ends:
            if descriptor >= 0:
                os.close(descriptor)
