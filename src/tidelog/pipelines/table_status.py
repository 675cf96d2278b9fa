"""Where tables stand beside their topics: how many records they lack, and for how long. Reads no rows, needs no Spark
session."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from tidelog.clock import Clock
from tidelog.pipelines.table_formats.interface import Format, Table
from tidelog.spark.backends.interface import Backend

State: TypeAlias = Literal["current", "lagging", "lost", "no topic", "recreated", "no export"]


class TableStatus(NamedTuple):
    """The position of a table. `state`: `lost` where retention has removed records before their export."""

    table: str
    format: Format
    state: State
    topic: str | None
    next_seq: int  # where the next export begins
    head_seq: int | None  # of the topic
    lag_records: int | None
    lag_ms: int | None  # age of the first record that is not exported
    committed_ms: int | None  # time of the last commit


def table_status(backend: Backend, table: Table, clock: Clock) -> TableStatus:
    last = table.last_commit()
    if last is None:
        return TableStatus(table.path, table.format, "no export", None, 1, None, None, None, None)
    known = TableStatus(table.path, table.format, "no topic", last.topic, last.stop, None, None, None, last.ts_ms)
    snapshot = backend.snapshot(last.topic)
    if snapshot is None:
        return known
    known = known._replace(head_seq=snapshot.next_seq - 1)
    if snapshot.epoch != last.epoch:
        return known._replace(state="recreated")
    lag = max(snapshot.next_seq - last.stop, 0)
    oldest_ms = backend.time_of(last.topic, last.stop) if lag else None
    waits_ms = 0 if oldest_ms is None else max(clock.now_us() // 1000 - oldest_ms, 0)
    state: State = "lost" if last.stop < snapshot.evict_floor else "lagging" if lag else "current"
    return known._replace(state=state, lag_records=lag, lag_ms=waits_ms)
