"""The records of a producer between `send` and their outcome: batches, space, results. No I/O, no waiting, no locks.

    add ──► batches: [full] [full] [filling] ──take──► in flight ──► written: first seq
             └──────────── max_bytes ────────────────────────┘   └► failed:  error, or two halves, which are next

Both shells drive a queue in the same way (`engine.producer` for threads, `aio.producer` for tasks): they call `add` for
a caller, and `take`, `written` and `failed` for the one thread or task that writes.

**Order.** One batch is in flight. The next one is taken when its outcome is known, so a retry never overtakes.

**Interrupts.** `add` runs in the caller's thread, where a signal handler may raise between two bytecodes. A record is
accepted by one append to a list and a batch is closed by one append to a deque, so there is no half of either. The
weights may miss one record then; they are computed again whenever a batch is settled.

**Refused batches.** Where a batch is refused because of what is in it, the halves are written instead, down to the
record that is refused alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

from tidelog.clock import Clock
from tidelog.engine.batch_encoder import Batch, Column, encode_meta, encode_name, from_json, value_to_json
from tidelog.engine.config import EngineConfig
from tidelog.engine.results import Appended
from tidelog.errors import BadInput, BatchTooLarge, Closed, Error, InDoubt, NotAllWritten, TooLarge

LINGER_MS: Final = 5.0
MAX_BYTES: Final = 32 << 20
RECORD_OVERHEAD_BYTES: Final = 64  # counted per record: its Python objects, so that empty records are not free
BATCH_RECORDS_MAX: Final = 10_000  # what one write may have
BATCH_WEIGHT_MAX: Final = 2 << 20  # half of what the server writes as one batch
_KNOWN_NAMES_MAX: Final = 1_000
_LINGER_MS_MAX: Final = 60_000
_MAX_BYTES_LIMIT: Final = 1 << 40


class UnwrittenRecord(NamedTuple):
    """A record as it was sent; JSON data as it decodes."""

    data: Any
    tag: str | None = None
    node: str | None = None
    meta: dict[str, Any] | None = None


class FailedRecords(NamedTuple):
    """What `on_error` gets: records with one outcome, in the order in which they were sent. `error.written` says
    whether they were written: False, or None where that is unknown."""

    error: Error
    records: list[UnwrittenRecord]


class ProducerStats(NamedTuple):
    """Counts of one producer since it was created. `accepted` is the sum of the four after it."""

    accepted: int  # records that `send` took
    written: int
    refused: int  # not written, and known not to be
    in_doubt: int  # unknown whether they were written
    waiting: int  # without an outcome yet
    waiting_bytes: int  # with 64 bytes per record, as they count towards max_bytes
    batches: int  # batches written
    repeated_batches: int  # of these, found to be written when they were sent again: a response had been lost


OnError: TypeAlias = Callable[[FailedRecords], object]
RecordFields: TypeAlias = tuple[bytes, bool, bytes, bytes, bytes]  # data, json, tag, node, meta
EncodedRecord: TypeAlias = bytes | RecordFields  # bytes: data alone


class ProducerBatch:
    """Records that are written together. `parts`: its halves, once it was divided."""

    __slots__ = ("error", "first_ms", "first_seq", "is_plain", "middle", "name", "parts", "records", "weight")

    def __init__(self, records: list[EncodedRecord] | None = None, name: str = "") -> None:
        self.records: list[EncodedRecord] = [] if records is None else records
        self.name = name  # of no other batch of its producer
        self.weight = 0
        self.is_plain = True  # every record is bytes without other fields
        self.first_ms = 0  # when its first record was added
        self.first_seq = 0  # once it is written
        self.error: Error | None = None
        self.parts: tuple[ProducerBatch, ProducerBatch] | None = None
        self.middle = 0

    def outcome(self, index: int) -> int | Error | None:
        """The seq of a record, the error of its batch, or None while there is no outcome."""
        batch = self
        while batch.parts is not None:
            left, right = batch.parts
            batch, index = (left, index) if index < batch.middle else (right, index - batch.middle)
        return batch.error or (batch.first_seq + index if batch.first_seq else None)

    def encode(self) -> Batch:
        """The records as columns."""
        if self.is_plain:
            return Batch(self.records, False)  # type: ignore[arg-type]  # all of them are bytes
        rows: list[RecordFields] = [
            (record, False, b"", b"", b"") if isinstance(record, bytes) else record for record in self.records
        ]
        # Not `zip(*rows)`, which takes ten times as long: 0.5 µs a record.
        json, metas = [row[1] for row in rows], [row[4] for row in rows]
        return Batch(
            [row[0] for row in rows],
            json[0] if json.count(json[0]) == len(json) else json,
            _shared_column([row[2] for row in rows]),
            _shared_column([row[3] for row in rows]),
            metas if any(metas) else None,
        )

    def unwritten(self) -> list[UnwrittenRecord]:
        """The records as the caller sent them."""
        return [
            UnwrittenRecord(record)
            if isinstance(record, bytes)
            else UnwrittenRecord(
                from_json(record[0]) if record[1] else record[0],
                record[2].decode() or None,
                record[3].decode() or None,
                from_json(record[4]) if record[4] else None,  # type: ignore[arg-type]  # a meta is an object
            )
            for record in self.records
        ]


class _NameCache:
    """Encodes tags or nodes, of which most producers have few."""

    def __init__(self, what: str, limit: int) -> None:
        self._what, self._limit = what, limit
        self._known: dict[str, bytes] = {}

    def encode(self, name: object) -> bytes:
        if type(name) is not str:
            return encode_name(name, self._what, self._limit)
        known = self._known.get(name)
        if known is None:
            known = encode_name(name, self._what, self._limit)
            if len(self._known) >= _KNOWN_NAMES_MAX:
                self._known.clear()
            self._known[name] = known
        return known


def _shared_column(names: list[bytes]) -> Column:
    return names[0] if names.count(names[0]) == len(names) else names


class ProducerQueue:
    """The state of one producer of the topic `topic`."""

    def __init__(
        self, topic: str, limits: EngineConfig, clock: Clock, *, linger_ms: float, max_bytes: int, stop_on_error: bool
    ) -> None:
        _check_options(linger_ms, max_bytes)
        self._topic, self._limits, self._clock = topic, limits, clock
        self._linger_ms, self._stop_on_error = linger_ms, stop_on_error
        self.record_bytes_max = min(limits.record_bytes_max, max_bytes - RECORD_OVERHEAD_BYTES)
        self._max_bytes = max_bytes
        self._tags = _NameCache("tag", limits.tag_bytes_max)
        self._nodes = _NameCache("node", limits.node_bytes_max)
        self._space = max_bytes  # below any weight once the queue takes no records
        self._number = 0
        self._batches = deque([ProducerBatch()])  # the last one takes records
        self._in_flight: ProducerBatch | None = None
        self._closed_weight = 0  # of all batches but the last
        self._written = self._refused = self._in_doubt = self._batch_count = self._repeated = 0
        self.is_closed = False
        self.failure: NotAllWritten | None = None  # the error that stopped the producer
        self.needs_wake = False  # the writer has something to do, or to wait for, that it does not know

    # ── records ───────────────────────────────────────────────────────────────────────────────

    def encode(self, data: object, tag: object, node: object, meta: object) -> tuple[EncodedRecord, int]:
        """Check a record; return it as it is stored, with what it counts towards `max_bytes`."""
        is_json = False
        if type(data) is bytes:
            text = data
        elif isinstance(data, bytes | bytearray | memoryview):
            text = bytes(data)
        else:
            text, is_json = value_to_json(data), True
        tag_text = b"" if tag is None else self._tags.encode(tag)
        node_text = b"" if node is None else self._nodes.encode(node)
        meta_text = b"" if meta is None else encode_meta(meta, self._limits)
        size = len(text) + len(meta_text)
        if size > self.record_bytes_max:
            raise TooLarge("a record", size=size, limit=self.record_bytes_max)
        size += len(tag_text) + len(node_text) + RECORD_OVERHEAD_BYTES
        if size > self._max_bytes:
            raise TooLarge("a record with its fields", size=size, limit=self._max_bytes, next_step="raise max_bytes")
        return (text, is_json, tag_text, node_text, meta_text), size

    def add(self, record: EncodedRecord, size: int) -> ProducerBatch | None:
        """Accept a record and return its batch, where it is the last one. None: there is no space, or the queue takes
        no records (`check_open`)."""
        batches = self._batches
        batch = batches[-1]
        if self._closed_weight + batch.weight + size > self._space:
            return None
        if batch.weight + size > BATCH_WEIGHT_MAX and batch.records:
            batch = self._start_batch()
        if type(record) is not bytes:
            batch.is_plain = False
        records = batch.records
        if not records:
            batch.first_ms = self._clock.monotonic_ms()
            self.needs_wake = True
        records.append(record)
        batch.weight += size
        if len(records) == BATCH_RECORDS_MAX:
            self._start_batch()
        return batch

    def _start_batch(self) -> ProducerBatch:
        """Close the batch that takes records and start another one."""
        closed = self._batches[-1]
        self._batches.append(batch := ProducerBatch())
        self._closed_weight += closed.weight
        self.needs_wake = True
        return batch

    def check_open(self) -> None:
        """Raise why no more records are taken, if none are."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if self.is_closed:
            raise Closed(f"the producer of {self._topic} is closed; nothing was written, make another one")

    @property
    def used_bytes(self) -> int:
        return self._closed_weight + self._batches[-1].weight

    @property
    def max_bytes(self) -> int:
        return self._max_bytes

    # ── the writer ────────────────────────────────────────────────────────────────────────────

    def take(self) -> ProducerBatch | None:
        """The next batch to write, if one is due."""
        batch = self._batches[0]
        if self._in_flight is not None or not batch.records:
            return None
        if len(self._batches) == 1:
            if self.seconds_until_due() != 0.0:
                return None
            self._start_batch()
        self._batches.popleft()
        if not batch.name:
            self._number += 1
            batch.name = str(self._number)
        self._in_flight = batch
        return batch

    def seconds_until_due(self) -> float | None:
        """How long the writer has to wait for the next batch; None: until a record is added."""
        batch = self._batches[0]
        if self._in_flight is not None or not batch.records:
            return None
        if len(self._batches) > 1 or self.is_closed:
            return 0.0
        return max(batch.first_ms + self._linger_ms - self._clock.monotonic_ms(), 0.0) / 1000

    def written(self, batch: ProducerBatch, appended: Appended) -> None:
        """The batch in flight was written."""
        if batch is not self._in_flight:
            return  # it was given up before
        batch.first_seq = appended.first_seq
        self._written += len(batch.records)
        self._batch_count += 1
        self._repeated += appended.deduped
        self._settle(batch)

    def put_back(self, batch: ProducerBatch) -> None:
        """The batch in flight was not begun to be written: it is the next one again."""
        self._batches.appendleft(batch)
        self._in_flight = None

    def failed(self, batch: ProducerBatch, error: Error) -> list[FailedRecords]:
        """The batch in flight was not written, or may not have been; return what to report."""
        if batch is not self._in_flight:
            return []
        if error.written is False and len(batch.records) > 1 and isinstance(error, BadInput | TooLarge | BatchTooLarge):
            self._divide(batch)
            return []
        reports = [self._fail(batch, error)]
        self._settle(batch)
        if error.written is not False or self._stop_on_error:
            # A batch that may still arrive would be overtaken by the ones after it.
            reports += self._stop(error, reports)
        return reports

    def _divide(self, batch: ProducerBatch) -> None:
        """Write the halves of a batch next: it was refused because of what is in it, maybe of one record."""
        records, middle = batch.records, len(batch.records) // 2
        halves = ProducerBatch(records[:middle], f"{batch.name}a"), ProducerBatch(records[middle:], f"{batch.name}b")
        for half in halves:
            half.is_plain = batch.is_plain
            half.weight = batch.weight // 2
        batch.parts, batch.middle, batch.records = halves, middle, []
        self._in_flight = None
        self._batches.extendleft(reversed(halves))
        self._settle(batch)

    def _fail(self, batch: ProducerBatch, error: Error) -> FailedRecords:
        batch.error = error
        if error.written is False:
            self._refused += len(batch.records)
        else:
            self._in_doubt += len(batch.records)
        return FailedRecords(error, batch.unwritten())

    def _settle(self, batch: ProducerBatch) -> None:
        """Free what an outcome does not need, and its space."""
        batch.records = []
        self._in_flight = None
        self._closed_weight = sum(each.weight for each in self._batches) - self._batches[-1].weight

    def _stop(self, error: Error, reports: list[FailedRecords]) -> list[FailedRecords]:
        """Take no more records and give up those that wait, after these reports; return theirs."""
        given_up = Closed(f"the producer of {self._topic} stopped before it wrote this record: {error}")
        waiting = [batch for batch in self._batches if batch.records]
        rest = [self._fail(batch, given_up) for batch in waiting]
        self._batches = deque([ProducerBatch()])
        self._closed_weight, self._space, self.is_closed = 0, -1, True
        everything = [*reports, *rest]
        in_doubt = [record for report in everything if report.error.written is None for record in report.records]
        refused = [record for report in everything if report.error.written is False for record in report.records]
        self.failure = NotAllWritten(
            self._topic, count_written=self._written, records=refused, in_doubt=in_doubt, reason=str(error)
        )
        self.failure.__cause__ = error
        for batch in waiting:
            batch.records = []
        return rest

    # ── the end ───────────────────────────────────────────────────────────────────────────────

    def close_batch(self) -> None:
        """Make the records that were added so far due now."""
        if self._batches[-1].records:
            self._start_batch()

    def close(self) -> None:
        """Take no more records. Those that wait are due now."""
        self.is_closed, self._space = True, -1
        self.needs_wake = True

    def give_up(self, reason: str) -> None:
        """Stop without an outcome of the batch in flight, which is in doubt, and without the records that wait."""
        self.close()
        if not self.is_settled:
            batch, reports = self._in_flight, []
            if batch is not None:
                unknown = f"the producer of {self._topic} ended while a batch was on its way ({reason}); it is unknown "
                reports.append(
                    self._fail(batch, InDoubt(f"{unknown}whether it was written, check before you repeat it"))
                )
                self._settle(batch)
            error = reports[0].error if reports else Closed(f"the producer of {self._topic} was closed: {reason}")
            self._stop(error, reports)

    @property
    def is_settled(self) -> bool:
        """Whether every record has an outcome."""
        return self._in_flight is None and not any(batch.records for batch in self._batches)

    def last_record(self) -> tuple[ProducerBatch, int] | None:
        """The newest record without an outcome: its batch and its place there. Outcomes come in order, so all others
        have one when this one has."""
        waiting = [batch for batch in (self._in_flight, *self._batches) if batch is not None and batch.records]
        return (waiting[-1], len(waiting[-1].records) - 1) if waiting else None

    def stats(self) -> ProducerStats:
        in_flight = [] if self._in_flight is None else [self._in_flight]
        waiting = sum(len(batch.records) for batch in (*in_flight, *self._batches))
        accepted = self._written + self._refused + self._in_doubt + waiting
        return ProducerStats(
            accepted,
            self._written,
            self._refused,
            self._in_doubt,
            waiting,
            self.used_bytes,
            self._batch_count,
            self._repeated,
        )


def _check_options(linger_ms: object, max_bytes: object) -> None:
    is_number = isinstance(linger_ms, int | float) and not isinstance(linger_ms, bool)
    if not is_number or not 0 <= float(linger_ms) <= _LINGER_MS_MAX:  # type: ignore[arg-type]
        raise BadInput(f"linger_ms is a number from 0 to {_LINGER_MS_MAX}, not {linger_ms!r:.80}; nothing was done")
    minimum = 2 * RECORD_OVERHEAD_BYTES
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or not minimum <= max_bytes <= _MAX_BYTES_LIMIT:
        raise BadInput(
            f"max_bytes is a whole number from {minimum} to {_MAX_BYTES_LIMIT}, not {max_bytes!r:.80}; nothing was done"
        )
