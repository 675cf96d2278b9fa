"""Dead letters back into their queues, so many of them and so many a second that a request comes to its end."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from tidelog.engine import Record, Topic
from tidelog.engine.queues.burial import FROM
from tidelog.server.api.auth import Principal
from tidelog.server.api.call import Call, ok
from tidelog.server.api.problem import Problem
from tidelog.server.api.topics import found
from tidelog.server.http.seam import Response
from tidelog.wire import jobs, requests

LIMIT = 1_000
_decoder = requests.decoder(jobs.Redrive)


class _Chosen:
    """Which records are meant: behind those that were looked at before, and only for queues that the key is for."""

    def __init__(self, principal: Principal, to: str | None) -> None:
        self._owns, self._to = principal.owns, to
        self._passed = 0
        self.left = 0  # of this step

    def __call__(self, record: Record) -> bool:
        if record.seq <= self._passed or not self.left:
            return False
        self._passed = record.seq
        home: Any = self._to if self._to is not None else (record.meta or {}).get(FROM)
        if isinstance(home, str) and not self._owns(home):
            return False
        self.left -= 1
        return True


async def redrive(call: Call) -> Response:
    body = call.body(_decoder, empty=jobs.Redrive())
    if body.rate == 0:
        raise Problem("invalid_request", "rate is at least one record a second; nothing was moved, or leave it out")
    if body.to is not None:
        call.own(body.to)
    topic = found(call.service.engine, call.topic)
    left = min(body.limit or LIMIT, jobs.REDRIVE_MAX)
    if body.rate is not None:
        left = min(left, body.rate * jobs.REDRIVE_S_MAX)
    step = body.rate or left
    chosen = _Chosen(call.principal, body.to)
    queues: Counter[str] = Counter()
    skipped = 0
    while True:
        chosen.left = size = min(step, left)
        done = await call.service.work(lambda: _step(topic, body, chosen))
        queues.update(done.queues)
        skipped += done.skipped
        left -= size
        if left <= 0 or chosen.left or call.service.stopping.is_set():
            break
        await asyncio.sleep(1.0)
    return ok(
        {
            "topic": call.topic,
            "redriven": sum(queues.values()),
            "queues": dict(queues),
            "skipped": skipped,
            "performance": call.performance(),
        }
    )


def _step(topic: Topic, body: jobs.Redrive, chosen: _Chosen) -> Any:
    return topic.redrive(to=body.to, match=body.match, where=chosen)
