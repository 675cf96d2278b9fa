"""[hot] Reads whose heads are known: from the bytes of a body to the bytes of its answer.

    body ──► nothing to wait for, and all of it at hand? ──► a page as text ──► answer, in three pieces

As with writes (`express.py`): what would have to wait, or to be refused, is not taken and comes again by the ordinary
way, which finds the words for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from tidelog.server.api import diff
from tidelog.server.api.auth import Principal
from tidelog.server.http.seam import Alone, Ticket
from tidelog.server.service import Service
from tidelog.wire import requests

_PATH: Final = "/v0/topics/{topic}/diff"
_ANY_BYTES: Final = 1 << 16  # who allows so many lets an answer be as long as it is: it would not be compressed
_decoder = requests.decoder(requests.Diff)


class ExpressReads:
    """On the event loop's thread."""

    def __init__(self, service: Service, next_id: Callable[[], bytes]) -> None:
        self._service, self._next_id = service, next_id
        self._now_us = service.clock.monotonic_us

    def diffs(self, name: str, principal: Principal, answer_bytes_max: int) -> Alone | None:
        """Who takes reads of this principal from this topic."""
        return (
            partial(self._diff, name, principal, self._service.generation) if answer_bytes_max >= _ANY_BYTES else None
        )

    def _diff(self, name: str, principal: Principal, admitted: int, body: bytes, ticket: Ticket) -> bool:
        service = self._service
        if not service.is_ready or admitted != service.generation:
            return False
        began_us = self._now_us()
        try:
            asked = requests.decode(_decoder, body)
            topic = service.engine.find(name)
            if topic is None or asked.wait_ms:
                return False
            service.inflight.check(principal)
            from_seq = diff.seq(asked.from_seq)
            page = topic.at_hand(from_seq, *diff.budget(asked.limit, asked.max_batch_bytes))
            if page is None and (look := diff.look_of(topic, from_seq, asked)).is_quick:
                page = look.page()
        except Exception:  # whatever it is comes again the ordinary way: nothing was done
            return False
        if page is None:
            return False
        topic.touch()
        service.metrics.read(name, page.counts.rows, gap=page.gap is not None)
        took_us = self._now_us() - began_us
        service.metrics.answered(_PATH, "POST", 200, took_us / 1e6)
        ticket.answer_in(diff.pieces(name, page, took_us / 1000), self._next_id())
        return True
