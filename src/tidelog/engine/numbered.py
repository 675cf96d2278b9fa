"""[shell] Appending a numbered batch: any number of tables as one atomic range, with its number in the same commit.

    ┌───────────────┬─────────────┬─────────────┬─────────────┐
    │ NumberedBatch │ AppendBatch │ AppendBatch │ AppendBatch │     one commit: one write into one file, one sync
    └───────────────┴─────────────┴─────────────┴─────────────┘
                     └────── chained: all or none ───────────┘

The number lies in front. A write that breaks off may leave it alone there, and replay then does not count it, because
no record follows; the other way round the records would be there and nobody would know whose they are. It is synced
whatever the topic's class is: whoever numbers batches forgets them once they are acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Final

import pyarrow as pa

from tidelog.engine import append, encode, numbers, retention
from tidelog.engine.append import Append
from tidelog.engine.config import EngineConfig
from tidelog.engine.core import Core
from tidelog.engine.encode import Parts
from tidelog.engine.results import Appended
from tidelog.errors import BadInput, Error, TooLarge
from tidelog.formats import bodies, frame
from tidelog.formats.bodies import NumberedBatch
from tidelog.wal import Token

BYTES_MAX: Final = 1 << 30  # a segment's positions have 32 bits, and the whole of it is in memory once
RECORD_BYTES: Final = 8  # that a record takes beside its data: else empty ones would be free


class Numbered(Append):
    """A batch with its number, on its way through the WAL."""

    __slots__ = ("body",)

    def __init__(
        self,
        core: Core,
        first: int,
        ts_ms: int,
        batch: Parts,
        key: str | None,
        *,
        writer: str,
        number: int,
        total: tuple[int, int],
        query_id: str,
    ) -> None:
        super().__init__(core, first, ts_ms, batch, key)
        last = first + len(batch) - 1
        self.body = NumberedBatch(writer=writer, number=number, first=first, last=last, sum=total, query_id=query_id)
        self.lead(frame.encode(self.body.KIND, topic_id=core.id, ts_ms=ts_ms, data=bodies.encode(self.body)))

    def _publish(self) -> None:
        """Visible, known and no longer under way, at one moment: whoever repeats it finds one or the other."""
        super()._publish()
        numbers.apply(self.core.numbered, self.body)
        self.core.numbering.pop(self.body.writer, None)

    def done(self, error: Error | None) -> None:
        super().done(error)
        with self.core.lock:
            if self.core.numbering.get(self.body.writer) is self.token:
                del self.core.numbering[self.body.writer]


def prepared(limits: EngineConfig, tables: Iterable[pa.Table | pa.RecordBatch]) -> Parts:
    """The tables as one batch, checked; those without rows are left out."""
    parts, weight = [], 0
    for table in tables:
        if not table.num_rows:
            continue
        part = encode.from_table(limits, table)
        weight += part.weight + RECORD_BYTES * len(part)
        if weight > BYTES_MAX:
            raise TooLarge("a numbered batch", size=weight, limit=BYTES_MAX)
        parts.append(part)
    if not parts:
        raise BadInput("a numbered batch has at least one record; nothing was written")
    return Parts(parts)


def append_numbered(
    core: Core, batch: Parts, writer: str, number: int, total: tuple[int, int], query_id: str = ""
) -> Appended:
    """Write a batch, or say where it was written before (`deduped`). Durable on return."""
    retention.expire(core)
    make = partial(Numbered, writer=writer, number=number, total=total, query_id=query_id)
    while True:
        with core.lock:
            core.check_writable()
            numbers.check(core.numbered, writer, number, total, query_id)
            token, mine = core.numbering.get(writer), False
            if token is None:
                before = numbers.known(core.numbered, core.name, writer, number, total, query_id)
                if before is not None:
                    return Appended(before.first, before.last, core.index.head, True)
                token, mine = append.staged(core, batch, None, make), True
                if core.ephemeral:
                    done = token.wait()
                    body = NumberedBatch(
                        writer=writer,
                        number=number,
                        first=done.first_seq,
                        last=done.last_seq,
                        sum=total,
                        query_id=query_id,
                    )
                    numbers.apply(core.numbered, body)
                else:
                    core.numbering[writer] = token
        if mine:
            return _acknowledged(core, token)
        with suppress(Error):  # what became of another one is its caller's to hear
            token.wait()


def _acknowledged(core: Core, token: Token[Appended]) -> Appended:
    done = token.wait()
    if core.ephemeral:
        core.wake()
    return done
