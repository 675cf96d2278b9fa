"""[hot] The turn of a request whose head is known. Two of a kind, by who keeps the gate: the kernel or its twin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidelog.server.http import gate, reply
from tidelog.server.http.seam import Response

if TYPE_CHECKING:
    from tidelog.server.http.h1 import H1

try:
    from tidelog.kernel import Gate
except ImportError:  # built where there was no compiler
    from tidelog.server.http.gate import Gate  # type: ignore[assignment]


class Ticketed:
    """A `Turn` that has nothing left to do but to answer. One a connection, because one is under way at a time."""

    complete = sound = keep = True
    held_bytes = 0
    owner: H1
    away: bool

    def answer(self, body: bytes, request_id: bytes) -> None:
        house = self.owner.house
        says = reply.CLOSE if house.draining else b""
        self.send(reply.json(body, request_id, house.dates.refresh().line, says))

    def answer_in(self, pieces: Sequence[bytes], request_id: bytes) -> None:
        house = self.owner.house
        says = reply.CLOSE if house.draining else b""
        head = reply.json_head(sum(map(len, pieces)), request_id, house.dates.refresh().line, says)
        self.send(head + pieces[0], *pieces[1:])

    def respond(self, response: Response) -> None:
        house = self.owner.house
        says = reply.CLOSE if house.draining else b""
        self.send(*reply.whole(response, house.dates.refresh().line, says, False))

    def send(self, *data: bytes) -> None:
        owner = self.owner
        if self.away or owner.turn is not self:
            return
        owner.write(*data)
        if owner.house.draining:
            owner.last(self)
        else:
            owner.next(self)

    def back(self, body: bytes) -> None:
        """It was in the lobby and comes by the parser."""
        if not self.away:
            self.owner.again(body)

    def leave(self) -> None:
        self.away = True


class PlainPass(Ticketed, gate.Gate):
    pass


class Pass(Ticketed, Gate):
    pass
