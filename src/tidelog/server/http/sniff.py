"""[shell] The first bytes of a connection: HTTP/2 begins with 24 that no other protocol begins with.

    PRI * HTTP/2.0␍␊␍␊SM␍␊␍␊

They may come one at a time; the first that differs means HTTP/1.1, which is then given all of them.
"""

from __future__ import annotations

from typing import Final

from tidelog.server.http.connection import Connection
from tidelog.server.http.h1 import H1
from tidelog.server.http.h2 import H2

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Sniff(Connection):
    _seen = b""

    def received(self, data: memoryview) -> None:
        self._seen += data
        if self._seen.startswith(PREFACE):
            h2 = H2(self.house)
            self.become(h2)
            h2.open(self._seen)
        elif not PREFACE.startswith(self._seen):
            h1 = H1(self.house)
            self.become(h1)
            h1.received(memoryview(self._seen))

    def refuse(self, status: int, reason: str) -> None:
        """Answer before anything was said. Whatever it speaks, a status line is what it is most likely to show."""
        h1 = H1(self.house)
        self.become(h1)
        h1.refuse(status, reason)

    def watch(self, now: float) -> None:
        if now - self._opened > self.house.limits.header_timeout_s:
            self.finish()
