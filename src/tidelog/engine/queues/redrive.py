"""[shell] Redrive: what went to a dead-letter topic goes back to the queue it came from.

Batch by batch: first the queue has the jobs again, synced whatever its class is, then they are deleted from the
dead-letter topic under that topic's class. A crash between the two may leave one batch in both places; none is ever in
neither. An ephemeral queue is the exception: what is given back to it lasts as long as its other jobs, until a restart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from threading import Event
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from tidelog.clock import Clock
from tidelog.engine import delete, encode
from tidelog.engine.core import Core
from tidelog.engine.encode import check_number
from tidelog.engine.queues.burial import FROM, KEYS, names
from tidelog.engine.read import Scan, Stretch, records_of
from tidelog.engine.results import Record
from tidelog.errors import BadInput, NotAQueue, TopicNotFound
from tidelog.formats.bodies import Match, MatchOp
from tidelog.formats.frame import SEQ_MAX
from tidelog.formats.rows import values

if TYPE_CHECKING:
    from tidelog.engine.topic import Topic

Where = Callable[[Record], bool]
_BATCH: Final = 256
_BATCH_BYTES: Final = 1 << 20
_PAUSE_S: Final = 0.05  # at most, between two looks at the clock


class Redriven(NamedTuple):
    count: int  # type: ignore[assignment]  # hides a method that nobody misses
    queues: dict[str, int]  # how many went where
    skipped: int  # of those that were meant: nobody knows where they came from, or somebody holds them


class _Chosen(NamedTuple):
    stretch: Stretch
    records: list[Record]
    at: list[int]  # which of them


def redrive(
    core: Core,
    *,
    to: str | None,
    match: object,
    where: Where | None,
    rate: float | None,
    limit: int | None,
) -> Redriven:
    if rate is not None and not rate > 0:
        raise BadInput(f"a rate is a number of jobs a second above 0, not {rate!r}; nothing was moved")
    if limit is not None:
        check_number("limit", limit, 0, SEQ_MAX)
    if to is not None:
        _queue(core, to)
    selector = delete.parse(match)
    batch = _BATCH if rate is None else max(min(int(rate), _BATCH), 1)
    pace = None if rate is None else _Pace(core.shared.clock, rate)
    queues: Counter[str] = Counter()
    skipped = 0
    for chosen in _batches(core, selector, where, SEQ_MAX if limit is None else limit, batch):
        by_queue, homeless = _homes(core, chosen, to)
        skipped += homeless
        for name, at in by_queue.items():
            if pace is not None:
                pace.wait(len(at))
            _move(core, _queue(core, name), chosen, at)
            queues[name] += len(at)
    return Redriven(sum(queues.values()), dict(queues), skipped)


def _batches(core: Core, match: Match | None, where: Where | None, limit: int, batch: int) -> Iterator[_Chosen]:
    """What is meant, a batch at a time, of what is there now."""
    scan = Scan(core, 0, frozenset())
    while limit > 0:
        stretch = next(scan.stretches(batch, _BATCH_BYTES), None)
        if stretch is None:
            return
        records = records_of(stretch)
        meant = [at for at, record in enumerate(records) if _meant(record, match) and (where is None or where(record))][
            :limit
        ]
        limit -= len(meant)
        if meant:
            yield _Chosen(stretch, records, meant)


def _meant(record: Record, match: Match | None) -> bool:
    if match is None:
        return True
    if not record.tag:
        return False
    return record.tag == match.value if match.op is MatchOp.EXACT else record.tag.startswith(match.value)


def _homes(core: Core, chosen: _Chosen, to: str | None) -> tuple[dict[str, list[int]], int]:
    """Where each goes, and how many go nowhere."""
    homes: dict[str, list[int]] = {}
    held = _held(core, [chosen.records[at].seq for at in chosen.at])
    left = 0
    for at in chosen.at:
        record = chosen.records[at]
        name: Any = to if to is not None else (record.meta or {}).get(FROM)
        if record.seq in held or not isinstance(name, str) or (to is None and not _is_queue(core, name)):
            left += 1
        else:
            homes.setdefault(name, []).append(at)
    return homes, left


def _held(core: Core, seqs: list[int]) -> set[int]:
    with core.lock:
        if core.queue is None:
            return set()
        core.queue.refresh(core.shared.now_ms())
        leases = core.queue.leases
        return {seq for seq in seqs if seq in leases.held or seq in leases.settling}


def _is_queue(core: Core, name: str) -> bool:
    topic = None if core.shared.doors is None else core.shared.doors.find(name)
    return topic is not None and topic.config.type == "queue" and topic.id != core.id


def _queue(core: Core, name: str) -> Topic:
    topic = None if core.shared.doors is None else core.shared.doors.find(name)
    if topic is None:
        raise TopicNotFound(name)
    if not _is_queue(core, name):
        raise (
            NotAQueue(name)
            if topic.id != core.id
            else BadInput(f"{name} is the topic that is being emptied; nothing was moved, name another queue")
        )
    return topic


def _move(core: Core, queue: Topic, chosen: _Chosen, at: list[int]) -> None:
    rows = chosen.stretch.rows.pick(np.array(at, np.int64))
    json = chosen.stretch.json[at].tolist()
    metas = [{key: value for key, value in (chosen.records[i].meta or {}).items() if key not in KEYS} for i in at]
    batch = encode.from_texts(
        core.shared.limits,
        values(rows.buf, rows.data),
        json[0] if len(set(json)) == 1 else json,
        names(rows, rows.tag),
        names(rows, rows.node),
        [meta or None for meta in metas],
    )
    queue.queue().take_in(batch, synced=not core.ephemeral)
    delete.delete(core, None, None, rows.seq.tolist())


class _Pace:
    """So many a second, by the clock."""

    def __init__(self, clock: Clock, rate: float) -> None:
        self._clock, self._rate = clock, rate
        self._next_ms = float(clock.monotonic_ms())

    def wait(self, count: int) -> None:
        """Return when these may go; the next ones may a while after."""
        pause = Event()
        while (left_ms := self._next_ms - self._clock.monotonic_ms()) > 0:
            pause.wait(min(left_ms / 1000, _PAUSE_S))
        self._next_ms = max(self._next_ms, float(self._clock.monotonic_ms())) + count * 1000 / self._rate
