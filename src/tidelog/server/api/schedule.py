"""[policy] When a job may run and how urgent it is: fields of a record on the wire, kept in its meta.

    {"data":…,"delay_ms":5000,"priority":7}  ──►  {"data":…,"meta":{"$run_at_ms":1700000005000,"$priority":7}}

Meta is what a record has anyway, so a job needs no format of its own: it is copied, exported and read as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Raw
from msgspec.json import Encoder

from tidelog.engine.queues.schedule import PRIORITY, PRIORITY_MAX, RUN_AT
from tidelog.engine.texts import to_meta
from tidelog.errors import BadInput
from tidelog.wire.requests import Record

_encode = Encoder().encode
TIME_MS_MAX: Final = 253_402_300_799_999  # the year 9999


def is_scheduled(record: Record) -> bool:
    return record.run_at_ms is not None or record.delay_ms is not None or record.priority is not None


def schedule(records: Sequence[Record], now_ms: int) -> bool:
    """Move what says when into meta; whether any of them said so. Raises where it cannot be meant."""
    found = False
    for record in records:
        if is_scheduled(record):
            found = True
            record.meta = Raw(_encode({**(to_meta(bytes(record.meta)) or {}), **_fields(record, now_ms)}))
    return found


def _fields(record: Record, now_ms: int) -> dict[str, int]:
    run_at_ms, delay_ms, priority = record.run_at_ms, record.delay_ms, record.priority
    made: dict[str, int] = {}
    if run_at_ms is not None and delay_ms is not None:
        raise BadInput("a job has run_at_ms or delay_ms, not both; nothing was written, leave one out")
    if run_at_ms is not None:
        made[RUN_AT] = _within("run_at_ms", run_at_ms, 0, TIME_MS_MAX)
    if delay_ms is not None:
        made[RUN_AT] = now_ms + _within("delay_ms", delay_ms, 0, TIME_MS_MAX - now_ms)
    if priority is not None:
        made[PRIORITY] = _within("priority", priority, -PRIORITY_MAX, PRIORITY_MAX)
    return made


def _within(name: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise BadInput(f"{name} is a whole number from {least} to {most}, not {value!r:.40}; nothing was written")
    return value


def check_queue(topic: str, kind: str) -> None:
    """Refuse a schedule for what is no queue: a log hands nothing out, so nothing would come of it."""
    if kind != "queue":
        raise BadInput(
            f"{topic} is a log: run_at_ms, delay_ms and priority are for jobs of a queue; nothing was written, leave "
            "them out or write to a queue"
        )
