"""Jobs: results of claims and acks as columns, schedules in the meta of jobs, and reading of job records by seq.

Schedules (`$run_at_ms`, `$priority`) are not parsed when a job is written. Before a claim or a count the new records
are searched once: the index shows which have a meta, one search over these finds the few with either key, and only
those are parsed. After a restart the search starts at the first job.

`live_mask`, `next_live_seqs` and `plan_reads` need the topic's lock; `read_jobs` carries out a plan without it. They
work on arrays: no Python step per seq.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from tidelog.commitlog.codec import Chunk
from tidelog.engine.batch_encoder import from_json
from tidelog.engine.memtable import MemTable
from tidelog.engine.read import RecordChunk, chunk_records
from tidelog.engine.results import Counts
from tidelog.engine.segment import BoolArray, Part
from tidelog.engine.topic_index import TopicIndex
from tidelog.engine.topic_state import TopicState
from tidelog.errors import BadInput, Corrupt, Damaged, Unavailable
from tidelog.formats import lazy_compute as pc
from tidelog.formats import segment_index
from tidelog.formats.rows import Rows, copy_values, to_binary_array
from tidelog.types import Ints

_LEASE_TOKEN_PREFIX = "lease_"
_quote = msgspec.json.Encoder().encode


def lease_token(lease_id: int) -> str:
    """Encode a lease id for clients."""
    return f"{_LEASE_TOKEN_PREFIX}{lease_id:x}"


def parse_lease_token(text: str) -> int | None:
    """Return the lease id of a token; None for the empty token."""
    if not text:
        return None
    digits = text.removeprefix(_LEASE_TOKEN_PREFIX)
    try:
        if digits == text or len(digits) > 16 or not digits.isascii() or not digits.isalnum():  # int takes more
            raise ValueError
        return int(digits, 16)
    except ValueError:
        raise BadInput(f"{text!r:.80} is no lease token; nothing was done, send the lease_id of the claim") from None


class Job(NamedTuple):
    """A leased job."""

    seq: int
    lease_id: int
    deadline_ms: int  # the lease is valid up to and including this time
    ts_ms: int  # when it was enqueued
    deliveries: int  # number of claims, including this one
    data: Any
    tag: str | None = None
    meta: dict[str, Any] | None = None

    @property
    def lease_token(self) -> str:
        return lease_token(self.lease_id)


class JobFailure(NamedTuple):
    """Why a delivery of a job failed, as its worker reported it."""

    error: str
    error_type: str
    failed_ms: int


class AckResult(NamedTuple):
    """The result of an ack or a nack, and the counts of the queue after it."""

    count: int  # type: ignore[assignment]  # hides tuple.count
    skipped: list[int]  # not held by that node, or not under that lease; in the order given
    ready: int
    in_flight: int


class ExtendResult(NamedTuple):
    count: int  # type: ignore[assignment]  # hides tuple.count
    skipped: list[int]
    deadlines: dict[int, int]


class QueueCounts(NamedTuple):
    ready: int  # can be claimed now
    in_flight: int  # held under a lease
    dead_lettered: int  # since the queue was created


class JobChunk(NamedTuple):
    """Records in one buffer."""

    rows: Rows
    json: BoolArray


class JobTexts(NamedTuple):
    """A few JSON records without tags and metas, copied out of memory: the common case of small claims."""

    times_ms: list[int]
    datas: list[bytes]


class ClaimResult:
    """The jobs of one claimer as columns, ascending by seq. `jobs` creates an object for each."""

    __slots__ = ("_chunks", "_topic", "deadlines", "deliveries", "lease_ids", "ready", "seqs")

    def __init__(
        self,
        seqs: list[int],
        lease_ids: list[int],
        deadlines: list[int],
        deliveries: list[int],
        chunks: Sequence[JobChunk] | JobTexts,
        ready: int = 0,
        topic: TopicState | None = None,
    ) -> None:
        self.seqs, self.lease_ids, self.deadlines, self.deliveries = seqs, lease_ids, deadlines, deliveries
        self._chunks, self._topic = chunks, topic
        self.ready = ready  # number of claimable jobs after it

    @property
    def count(self) -> int:
        return len(self.seqs)

    def jobs(self) -> list[Job]:
        if isinstance(self._chunks, JobTexts):
            datas = map(from_json, self._chunks.datas)
            columns = (self.seqs, self.lease_ids, self.deadlines, self._chunks.times_ms, self.deliveries)
            return list(map(Job, *columns, datas))
        chunks = (RecordChunk(chunk.rows, chunk.json, Counts(), 0, is_full=False) for chunk in self._chunks)
        assert self._topic is not None or not self._chunks, "given with the records"
        records = [record for chunk in chunks for record in chunk_records(self._topic, chunk)]  # type: ignore[arg-type]
        return [
            Job(record.seq, lease_id, deadline, record.ts_ms, count, record.data, record.tag, record.meta)
            for record, lease_id, deadline, count in zip(
                records, self.lease_ids, self.deadlines, self.deliveries, strict=True
            )
        ]

    def to_json_texts(self) -> list[bytes]:
        """Encode each job as the JSON object of the HTTP API. Stored JSON data is copied unchanged."""
        if isinstance(self._chunks, JobTexts):
            times_ms, datas = self._chunks
            plain = zip(self.seqs, self.lease_ids, self.deadlines, times_ms, self.deliveries, datas, strict=True)
            return [
                b'{"$seq":%d,"lease_id":"lease_%x","deadline":%d,"$ts":%d,"deliveries":%d,"data":%b}' % each
                for each in plain
            ]
        columns = zip(self.seqs, self.lease_ids, self.deadlines, self.enqueued_at_ms(), strict=True)
        heads = [b'{"$seq":%d,"lease_id":"lease_%x","deadline":%d,"$ts":%d' % each for each in columns]
        tails = [tail for chunk in self._chunks for tail in _encode_tails(chunk)]
        return [
            b'%b%b,"deliveries":%d%b}' % (head, tag, count, rest)
            for head, count, (tag, rest) in zip(heads, self.deliveries, tails, strict=True)
        ]

    def enqueued_at_ms(self) -> list[int]:
        """Return the time each job was enqueued."""
        if isinstance(self._chunks, JobTexts):
            return self._chunks.times_ms
        return [ts_ms for chunk in self._chunks for ts_ms in (chunk.rows.ts_us // 1000).tolist()]


def _encode_tails(chunk: JobChunk) -> list[tuple[bytes, bytes]]:
    """Encode the tag, and the data with the meta, of each record as JSON."""
    rows, json = chunk
    datas = copy_values(rows.buf, rows.data)
    if json.all():
        rests = [b',"data":' + data for data in datas]
    else:
        rests = [
            b',"data":' + data if is_json else b',"data":"%b","$encoding":"base64"' % b64encode(data)
            for data, is_json in zip(datas, json.tolist(), strict=True)
        ]
    if rows.meta is not None:
        metas = copy_values(rows.buf, rows.meta)
        rests = [rest + b',"meta":' + meta if meta else rest for rest, meta in zip(rests, metas, strict=True)]
    if rows.tag is None:
        return [(b"", rest) for rest in rests]
    tags = [b',"$tag":' + _quote(tag.decode()) if tag else b"" for tag in copy_values(rows.buf, rows.tag)]
    return list(zip(tags, rests, strict=True))


RUN_AT_KEY: Final = "$run_at_ms"
PRIORITY_KEY: Final = "$priority"
PRIORITY_MAX: Final = 1_000
TIME_MS_MAX: Final = (1 << 63) - 1
_SCHEDULE_PATTERN: Final = r'"\$(run_at_ms|priority)"'


class JobSchedule(NamedTuple):
    seq: int
    run_at_ms: int | None
    priority: int


class _ScheduleMeta(msgspec.Struct):
    run_at_ms: Any = msgspec.field(default=None, name=RUN_AT_KEY)
    priority: Any = msgspec.field(default=None, name=PRIORITY_KEY)


_decode = msgspec.json.Decoder(_ScheduleMeta).decode


def read_schedules(rows: Rows) -> list[JobSchedule]:
    """Return the schedules in the meta of these records."""
    if rows.meta is None or not len(rows):
        return []
    some = rows.take(np.flatnonzero(rows.meta.size > 0))
    assert some.meta is not None, "rows with metas keep them"
    if not len(some):
        return []
    hits = np.flatnonzero(
        pc.match_substring_regex(to_binary_array(some.buf, some.meta), _SCHEDULE_PATTERN).to_numpy(zero_copy_only=False)
    )
    texts = copy_values(some.buf, some.meta.take(hits))
    schedules = map(_read_schedule, some.seq[hits].tolist(), texts)
    return [schedule for schedule in schedules if schedule is not None]


def _read_schedule(seq: int, text: bytes) -> JobSchedule | None:
    try:
        meta = _decode(text)
    except msgspec.MsgspecError:
        return None
    run_at = meta.run_at_ms if _is_int(meta.run_at_ms) else None
    priority = meta.priority if _is_int(meta.priority) else 0
    if run_at is None and not priority:
        return None
    run_at = None if run_at is None else min(run_at, TIME_MS_MAX)
    return JobSchedule(seq, run_at, max(min(priority, PRIORITY_MAX), -PRIORITY_MAX))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def add_schedule(meta: object, count: int, *, run_at_ms: int | None, priority: int) -> object:
    """Add a schedule to the meta of a write: one for all jobs, or one for each."""
    schedule: dict[str, int] = {} if run_at_ms is None else {RUN_AT_KEY: run_at_ms}
    if priority:
        schedule[PRIORITY_KEY] = priority
    if not schedule:
        return meta
    if meta is None or isinstance(meta, dict):
        return {**(meta or {}), **schedule}
    if not isinstance(meta, list | tuple) or len(meta) != count or not all(isinstance(m, dict | None) for m in meta):
        raise BadInput("meta must be a dict, or a list with one for each record; nothing was written")
    return [{**(each or {}), **schedule} for each in meta]


_READ_TOGETHER_SEQS = 32  # seqs closer than this are read together
_LIVE_WINDOW_SEQS = 256
_READ_AHEAD_CLAIM_MAX = 16  # claims of at most this many jobs read ahead
_READ_AHEAD_RECORDS = 256
_READ_AHEAD_BYTES = 1 << 16
_NO_LIMIT = 1 << 62
_LOCKED_COPY_BYTES_MAX = 1 << 18  # larger claims are not copied with the lock held


def live_mask(index: TopicIndex, seqs: Sequence[int]) -> BoolArray:
    """Return which of these ascending seqs have a live record."""
    wanted: Ints = np.array(seqs, np.int64)
    mask: BoolArray = np.zeros(len(wanted), bool)
    if len(wanted):
        for part, first, stop in index.slices(max(int(wanted[0]), index.earliest), int(wanted[-1]) + 1):
            lo, hi = np.searchsorted(wanted, (first, stop))
            if lo < hi:
                deleted = part.deleted_mask()
                mask[lo:hi] = True if deleted is None else ~deleted[wanted[lo:hi] - part.base]
    return mask


def next_live_seqs(index: TopicIndex, cursor: int, stop: int, count_max: int) -> tuple[list[int], int]:
    """Return the next live seqs of [cursor, stop), at most `count_max`, and the next cursor."""
    live: list[int] = []
    for part, lo, end in index.slices(max(cursor, index.earliest), stop):
        deleted = part.deleted_mask()
        if deleted is not None and count_max == 1:
            flags = deleted[lo - part.base : end - part.base]
            first = int(flags.argmin())  # stops at the first live record
            if not flags[first]:
                return [lo + first], lo + first + 1
            continue
        step = _LIVE_WINDOW_SEQS
        while lo < end:
            left = count_max - len(live)
            if deleted is None:
                hi = min(end, lo + left)
                live += range(lo, hi)
            else:
                # In growing windows: acked jobs form long runs, and the cursor is mostly after them.
                hi = min(end, lo + step)
                positions = np.flatnonzero(~deleted[lo - part.base : hi - part.base])[:left]
                live += (positions + lo).tolist()
                step *= 4
            if len(live) >= count_max:
                return live, live[-1] + 1
            lo = hi
    return live, max(cursor, stop)


def count_fitting(index: TopicIndex, seqs: Sequence[int], bytes_max: int) -> int:
    """Count the jobs, in this order, whose data fits into `bytes_max` together; at least one. A job whose index cannot
    be read counts as empty."""
    left = bytes_max
    for count, seq in enumerate(seqs):
        part = index.find_part(seq)
        with suppress(Damaged, Unavailable):
            left -= 0 if part is None else int(part.entries()["data_len"][seq - part.base])
        if left < 0:
            return max(count, 1)
    return len(seqs)


def read_job_texts(index: TopicIndex, seqs: Sequence[int]) -> JobTexts | None:
    """Return the records of these ascending seqs if all are plain JSON and in memory; else None, and `plan_reads`
    follows."""
    if not seqs or (
        index.bytes > _LOCKED_COPY_BYTES_MAX and index.bytes // index.count * len(seqs) > _LOCKED_COPY_BYTES_MAX
    ):
        return None
    texts = JobTexts([], [])
    done, last = 0, seqs[-1]
    while done < len(seqs):
        first = seqs[done]
        part = index.find_part(first)
        if not isinstance(part, MemTable):
            return None
        stop = last + 1 if last - first == len(seqs) - done - 1 else first + 1  # the rest if consecutive, else one
        stop = min(stop, part.stop)
        columns = part.read_texts(first, stop)
        if columns is None:
            return None
        texts.times_ms.extend(columns[0])
        texts.datas.extend(columns[1])
        done += stop - first
    return texts


class JobRead(NamedTuple):
    """Neighbouring seqs of one part, and how to read them."""

    seqs: Ints
    reader: Callable[[], Chunk] | None  # None: its index cannot be read
    cached: JobChunk | None = None  # they were read already
    read_ahead: ReadAhead | None = None  # keeps the further records that `reader` returns


class ReadAhead:
    """Records after the last claim, read with it, so that claims of one job share a read. Records never change, so the
    cache cannot be stale."""

    def __init__(self) -> None:
        self._chunk: JobChunk | None = None

    def find(self, seqs: Ints) -> JobChunk | None:
        """Return the records of these ascending seqs if all of them are cached."""
        chunk = self._chunk
        if chunk is None:
            return None
        first, last = int(chunk.rows.seq[0]), int(chunk.rows.seq[-1])
        lo, hi = int(seqs[0]), int(seqs[-1])
        if lo < first or hi > last:
            return None
        if hi - lo + 1 == len(seqs):
            return JobChunk(chunk.rows.slice(lo - first, hi - first + 1), chunk.json[lo - first : hi - first + 1])
        return JobChunk(chunk.rows.take(seqs - first), chunk.json[seqs - first])

    def keep(self, chunk: JobChunk) -> None:
        rows = chunk.rows
        if int(rows.seq[-1]) - int(rows.seq[0]) + 1 == len(rows):
            self._chunk = chunk


def plan_reads(index: TopicIndex, seqs: Sequence[int], read_ahead: ReadAhead) -> list[JobRead]:
    """Plan how to read these ascending seqs, all of which are live."""
    wanted: Ints = np.array(seqs, np.int64)
    runs: list[JobRead] = []
    if not len(wanted):
        return runs
    reads_ahead = len(wanted) <= _READ_AHEAD_CLAIM_MAX
    cached = read_ahead.find(wanted) if reads_ahead else None
    if cached is not None:
        return [JobRead(wanted, None, cached)]
    for part, first, stop in index.slices(int(wanted[0]), int(wanted[-1]) + 1):
        lo, hi = np.searchsorted(wanted, (first, stop))
        part_seqs = wanted[lo:hi]
        breaks = np.flatnonzero(np.diff(part_seqs) > _READ_TOGETHER_SEQS) + 1
        for group in np.split(part_seqs, breaks) if lo < hi else ():
            try:
                end = _read_ahead_stop(part, group) if reads_ahead else int(group[-1]) + 1
                reader = part.reader(int(group[0]), end, _NO_LIMIT)
                runs.append(JobRead(group, reader, None, read_ahead if reads_ahead else None))
            except (Damaged, Unavailable):
                runs.append(JobRead(group, None))
    return runs


def _read_ahead_stop(part: Part, group: Ints) -> int:
    """Return how far to read for these seqs: some records further while they are small."""
    first, least = int(group[0]) - part.base, int(group[-1]) + 1
    sizes = np.cumsum(part.entries()["data_len"][first : first + _READ_AHEAD_RECORDS], dtype=np.int64)
    return max(least, part.base + first + int(np.searchsorted(sizes, _READ_AHEAD_BYTES, "right")))


def read_jobs(runs: Sequence[JobRead]) -> tuple[list[JobChunk], list[int]]:
    """Carry out a plan; return the records, and the seqs that cannot be read."""
    chunks: list[JobChunk] = []
    lost: list[int] = []
    for seqs, reader, cached, read_ahead in runs:
        if cached is not None:
            chunks.append(cached)
            continue
        try:
            rows = None if reader is None else reader().rows
        except (Corrupt, Damaged, Unavailable):
            rows = None
        if rows is None or not len(rows):
            lost += seqs.tolist()
            continue
        json = (segment_index.record_flags(rows) & segment_index.JSON) != 0
        if read_ahead is not None:
            read_ahead.keep(JobChunk(rows, json))
        positions = np.minimum(np.searchsorted(rows.seq, seqs), len(rows) - 1)
        is_found = rows.seq[positions] == seqs
        lost += seqs[~is_found].tolist()
        kept = positions[is_found]
        chunks.append(JobChunk(rows, json) if len(kept) == len(rows) else JobChunk(rows.take(kept), json[kept]))
    return chunks, lost


def select_jobs(chunks: Sequence[JobChunk], seqs: Sequence[int]) -> list[JobChunk]:
    """Return the records with these seqs, ascending."""
    wanted: Ints = np.array(seqs, np.int64)
    selected = []
    for rows, json in chunks:
        positions = np.flatnonzero(np.isin(rows.seq, wanted))
        if len(positions) == len(rows):
            selected.append(JobChunk(rows, json))
        elif len(positions):
            selected.append(JobChunk(rows.take(positions), json[positions]))
    return selected
