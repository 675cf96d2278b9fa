"""[hot] Requests with one known head that came in one turn of the loop: they are taken together and answered together.

    gate ─┐                                                       ┌─ answer ──► every connection its own
    gate ─┼─► Lobby ──(the turn ends, or it is full)──► Crowd ──► ┼─ respond ──► one of them something else
    gate ─┘                                                       └─ without ──► some come by the parser, as any other

Nothing is done for one of them that can be done for all.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

from tidelog.server.http import gate, reply
from tidelog.server.http.seam import UNREAD, Ids, Response, Together

if TYPE_CHECKING:
    from tidelog.server.http.house import House
    from tidelog.server.http.passing import Ticketed

try:
    from tidelog.kernel import answer as _compiled
except ImportError:  # built where there was no compiler
    _compiled = gate.answer

_BYTES_MAX: Final = 1 << 20  # more than that does not wait for the turn's end
_COUNT_MAX: Final = 1024


class Lobby:
    """On the loop's thread. Gates put themselves, their bodies and the time into its lists, which stay the same."""

    def __init__(self, house: House, way: Together) -> None:
        self.house, self._way = house, way
        self.passes: list[Any] = []  # `Ticketed`, each with its gate
        self.bodies: list[bytes] = []
        self.since_us: list[int] = []
        self.now_us = way.now_us

    def begin(self) -> None:
        """Somebody is about to be the first."""
        self._way.soon(self.flush)

    def look(self) -> None:
        """Go on at once where too much is held."""
        if len(self.bodies) >= _COUNT_MAX or sum(map(len, self.bodies)) > _BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        if not self.passes:
            return
        crowd = Crowd(self.house, self.passes[:], self.bodies[:], self.since_us[:])
        self.passes.clear()
        self.bodies.clear()
        self.since_us.clear()
        try:
            self._way.take(crowd)
        except Exception as error:
            self.house.report("requests that came together were not taken", error)
            app = self.house.app
            crowd.respond([app.malformed(UNREAD, 500, "the server made a mistake") for _ in crowd.bodies])


class Crowd:
    def __init__(self, house: House, passes: list[Ticketed], bodies: list[bytes], since_us: list[int]) -> None:
        self._house, self.passes, self.bodies, self.since_us = house, passes, bodies, since_us

    def __len__(self) -> int:
        return len(self.passes)

    def without(self, odd: Collection[int]) -> Crowd:
        """Those that are not in these places, which come by the parser."""
        kept = [at for at in range(len(self)) if at not in odd]
        for at in odd:
            self.passes[at].back(self.bodies[at])
        return Crowd(
            self._house,
            [self.passes[at] for at in kept],
            [self.bodies[at] for at in kept],
            [self.since_us[at] for at in kept],
        )

    def answer(self, bodies: list[bytes], ids: Ids) -> None:
        """200 and a JSON body for each."""
        house = self._house
        first, second, third = reply.json_parts(house.dates.refresh().line)
        if house.draining:
            for number, (each, body) in enumerate(zip(self.passes, bodies, strict=True), ids.first):
                each.answer(body, b"%b%x" % (ids.prefix, number))
        elif house.kernel:
            _compiled(self.passes, bodies, first, second, third, ids.prefix, ids.first)
        else:
            gate.answer(self.passes, bodies, first, second, third, ids.prefix, ids.first)

    def respond(self, responses: list[Response]) -> None:
        """Anything else, for each."""
        for each, response in zip(self.passes, responses, strict=True):
            each.respond(response)
