"""The ledger of gaps: what was removed of a topic, or of all that a key is for, and why."""

from __future__ import annotations

from typing import Any, Final

from tidelog.engine import Gaps
from tidelog.errors import TopicNotFound
from tidelog.server.api.call import Call, ok
from tidelog.server.api.problem import Problem
from tidelog.server.http.seam import Response
from tidelog.wire import cursor

LIMIT: Final = 100
LIMIT_MAX: Final = 1_000


async def of_topic(call: Call) -> Response:
    """Also of a topic that is gone, as long as the ledger knows its name."""
    said = await _rows(call, call.topic)
    if not said["gaps"] and call.query.text("cursor") is None and call.service.engine.find(call.topic) is None:
        raise TopicNotFound(call.topic)
    return ok({"topic": call.topic, **said, "performance": call.performance()})


async def of_all(call: Call) -> Response:
    return ok({**await _rows(call, None), "performance": call.performance()})


async def _rows(call: Call, topic: str | None) -> dict[str, Any]:
    service, query, owns = call.service, call.query, call.principal.owns
    engine, behind = service.engine, _behind(query.text("cursor"))
    limit = min(max(query.number("limit", LIMIT), 1), LIMIT_MAX)
    from_ms = min(query.number("from", 0), (1 << 48) - 1)

    def work() -> tuple[Gaps, int | None]:
        """Pages are cut before names are looked at, so that one costs no more than its rows, whoever asks."""
        found = engine.gaps(topic, from_ms, limit, behind=behind)
        last = found[-1].seq if len(found) == limit else 0
        return Gaps(row for row in found if owns(row.topic)), last or None

    found, last = await service.work(work)
    said: dict[str, Any] = {"gaps": [row._asdict() for row in found]}
    if last is not None:
        said["next_cursor"] = cursor.page(str(last))
    return said


def _behind(text: str | None) -> int:
    try:
        given = cursor.unpage(text) if text else "0"
    except cursor.BadCursor:
        given = ""
    if not (given.isascii() and given.isdecimal() and len(given) <= 19):
        raise Problem("invalid_request", "the cursor is not one of ours; nothing was done, read from the start")
    return int(given)
