"""[hot] What a queue answers: jobs as columns until somebody asks for objects or for text, and small results.

[hot] What jobs say of when they want to run and how urgently: `$run_at_ms` and `$priority` in their meta.

Nothing is done when a job is written. Before somebody claims or counts, what has come since is looked
at once: the index tells which records have a meta at all, one search over those finds the few that
name either word, and only they are parsed. A restart begins from the first job and finds the same.

[hot] Jobs by their seqs: which of them live, the next that do, and their records. No step of Python per seq.

What needs the topic's lock is `living`, `fresh` and `plan`; `fetch` reads what `plan` has found, without it.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from tidelog.commitlog.codec import Chunk
from tidelog.engine.json_codec import from_json
from tidelog.engine.memtable import MemTable
from tidelog.engine.read import RecordChunk, chunk_records
from tidelog.engine.results import Counts
from tidelog.engine.segment import BoolArray, Part
from tidelog.engine.topic_index import TopicIndex
from tidelog.errors import BadInput, Corrupt, Damaged, Unavailable
from tidelog.formats import lazy_compute as pc
from tidelog.formats import segment_index
from tidelog.formats.rows import Rows, copy_values, to_binary_array
from tidelog.types import Ints

_LEASE_TOKEN_PREFIX = "lease_"
_quote = msgspec.json.Encoder().encode


def lease_token(lease_id: int) -> str:
    """A lease's id as it is shown outside."""
    return f"{_LEASE_TOKEN_PREFIX}{lease_id:x}"


def parse_lease_token(text: str) -> int | None:
    """The id that a token stands for; None for the empty one, which stands for none."""
    if not text:
        return None
    digits = text.removeprefix(_LEASE_TOKEN_PREFIX)
    try:
        if digits == text or len(digits) > 16 or not digits.isascii() or not digits.isalnum():  # int takes more
            raise ValueError
        return int(digits, 16)
    except ValueError:
        raise BadInput(f"{text!r:.80} is no lease token; nothing was done, send what the claim answered") from None


class Job(NamedTuple):
    """A job that somebody holds."""

    seq: int
    lease_id: int
    deadline_ms: int  # it is theirs up to and with this time
    ts_ms: int  # when it was enqueued
    deliveries: int  # how often it was handed out, with this time
    data: Any
    tag: str | None = None
    meta: dict[str, Any] | None = None

    @property
    def lease_token(self) -> str:
        return lease_token(self.lease_id)


class AckResult(NamedTuple):
    """What an ack or a nack came to, and the queue behind it."""

    count: int  # type: ignore[assignment]  # hides a method that nobody misses
    skipped: list[int]  # not held by that node, or not under that lease; in the order they were given
    ready: int
    in_flight: int


class ExtendResult(NamedTuple):
    count: int  # type: ignore[assignment]  # hides a method that nobody misses
    skipped: list[int]
    deadlines: dict[int, int]


class QueueCounts(NamedTuple):
    ready: int  # can be claimed now
    in_flight: int  # held under a lease
    dead_lettered: int  # since the queue was made


class JobChunk(NamedTuple):
    """Records that lie in one buffer."""

    rows: Rows
    json: BoolArray


class JobTexts(NamedTuple):
    """JSON records without tags and metas, taken out of their buffers already: mostly a few."""

    times_ms: list[int]
    datas: list[bytes]


class ClaimResult:
    """What one claimer got, ascending by seq. There is no object per job until `jobs`."""

    __slots__ = ("_chunks", "deadlines", "deliveries", "lease_ids", "ready", "seqs")

    def __init__(
        self,
        seqs: list[int],
        lease_ids: list[int],
        deadlines: list[int],
        deliveries: list[int],
        pieces: Sequence[JobChunk] | JobTexts,
        ready: int = 0,
    ) -> None:
        self.seqs, self.lease_ids, self.deadlines, self.deliveries = seqs, lease_ids, deadlines, deliveries
        self._chunks = pieces
        self.ready = ready  # what could be claimed behind it

    @property
    def count(self) -> int:
        return len(self.seqs)

    def jobs(self) -> list[Job]:
        if isinstance(self._chunks, JobTexts):
            datas = map(from_json, self._chunks.datas)
            columns = (self.seqs, self.lease_ids, self.deadlines, self._chunks.times_ms, self.deliveries)
            return list(map(Job, *columns, datas))
        stretches = (RecordChunk(piece.rows, piece.json, Counts(), 0, is_full=False) for piece in self._chunks)
        records = [record for stretch in stretches for record in chunk_records(stretch)]
        return [
            Job(record.seq, lease_id, deadline, record.ts_ms, count, record.data, record.tag, record.meta)
            for record, lease_id, deadline, count in zip(
                records, self.lease_ids, self.deadlines, self.deliveries, strict=True
            )
        ]

    def to_json_texts(self) -> list[bytes]:
        """Each job as the JSON object of the wire contract. Stored JSON goes out as the text that came in."""
        if isinstance(self._chunks, JobTexts):
            times_ms, datas = self._chunks
            plain = zip(self.seqs, self.lease_ids, self.deadlines, times_ms, self.deliveries, datas, strict=True)
            return [
                b'{"$seq":%d,"lease_id":"lease_%x","deadline":%d,"$ts":%d,"deliveries":%d,"data":%b}' % each
                for each in plain
            ]
        columns = zip(self.seqs, self.lease_ids, self.deadlines, self.enqueued_at_ms(), strict=True)
        heads = [b'{"$seq":%d,"lease_id":"lease_%x","deadline":%d,"$ts":%d' % each for each in columns]
        tails = [tail for piece in self._chunks for tail in _encode_tails(piece)]
        return [
            b'%b%b,"deliveries":%d%b}' % (head, tag, count, rest)
            for head, count, (tag, rest) in zip(heads, self.deliveries, tails, strict=True)
        ]

    def enqueued_at_ms(self) -> list[int]:
        """When each was enqueued."""
        if isinstance(self._chunks, JobTexts):
            return self._chunks.times_ms
        return [ts_ms for piece in self._chunks for ts_ms in (piece.rows.ts_us // 1000).tolist()]


def _encode_tails(piece: JobChunk) -> list[tuple[bytes, bytes]]:
    """Tag, and data with meta, of each record as JSON."""
    rows, json = piece
    datas = copy_values(rows.buf, rows.data)
    if json.all():
        rests = [b',"data":' + data for data in datas]
    else:
        shown = zip(datas, json.tolist(), strict=True)
        rests = [
            b',"data":' + data if is_json else b',"data":"%b","$encoding":"base64"' % b64encode(data)
            for data, is_json in shown
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
    """What these records ask for; those that ask for nothing are not among them."""
    if rows.meta is None or not len(rows):
        return []
    some = rows.take(np.flatnonzero(rows.meta.size > 0))
    assert some.meta is not None, "asked of rows with metas"
    if not len(some):
        return []
    hits = np.flatnonzero(
        pc.match_substring_regex(to_binary_array(some.buf, some.meta), _SCHEDULE_PATTERN).to_numpy(zero_copy_only=False)
    )
    found = []
    for seq, text in zip(some.seq[hits].tolist(), copy_values(some.buf, some.meta.take(hits)), strict=True):
        wish = _read_schedule(seq, text)
        if wish is not None:
            found.append(wish)
    return found


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
    """The meta of a write with what its jobs ask for: for all of them, or for each."""
    more: dict[str, int] = {} if run_at_ms is None else {RUN_AT_KEY: run_at_ms}
    if priority:
        more[PRIORITY_KEY] = priority
    if not more:
        return meta
    if meta is None or isinstance(meta, dict):
        return {**(meta or {}), **more}
    if not isinstance(meta, list | tuple) or len(meta) != count or not all(isinstance(m, dict | None) for m in meta):
        raise BadInput("a meta is a dict, or a list with one for each record; nothing was written")
    return [{**(each or {}), **more} for each in meta]


_READ_TOGETHER_SEQS = 32  # seqs that lie closer than this are read in one go
_LIVE_WINDOW_SEQS = 256
_READ_AHEAD_CLAIM_MAX = 16  # who claims so few reads ahead
_READ_AHEAD_RECORDS = 256
_READ_AHEAD_BYTES = 1 << 16
_NO_LIMIT = 1 << 62
_LOCKED_COPY_BYTES_MAX = 1 << 18  # more than that is not copied while the lock is held


def live_mask(index: TopicIndex, seqs: Sequence[int]) -> BoolArray:
    """Which of these seqs, rising, have a record that lives."""
    asked: Ints = np.array(seqs, np.int64)
    found: BoolArray = np.zeros(len(asked), bool)
    if len(asked):
        for part, first, stop in index.slices(max(int(asked[0]), index.earliest), int(asked[-1]) + 1):
            lo, hi = np.searchsorted(asked, (first, stop))
            if lo < hi:
                dead = part.deleted_mask()
                found[lo:hi] = True if dead is None else ~dead[asked[lo:hi] - part.base]
    return found


def next_live_seqs(index: TopicIndex, cursor: int, stop: int, count_max: int) -> tuple[list[int], int]:
    """The next live seqs of [cursor, stop), at most so many, and where to look from then on."""
    found: list[int] = []
    for part, lo, end in index.slices(max(cursor, index.earliest), stop):
        dead = part.deleted_mask()
        if dead is not None and count_max == 1:
            flags = dead[lo - part.base : end - part.base]
            first = int(flags.argmin())  # which looks no further than the first
            if not flags[first]:
                return [lo + first], lo + first + 1
            continue
        step = _LIVE_WINDOW_SEQS
        while lo < end:
            left = count_max - len(found)
            if dead is None:
                hi = min(end, lo + left)
                found += range(lo, hi)
            else:
                # A window at a time: what was acked lies in long runs, and the cursor is mostly behind them.
                hi = min(end, lo + step)
                alive = np.flatnonzero(~dead[lo - part.base : hi - part.base])[:left]
                found += (alive + lo).tolist()
                step *= 4
            if len(found) >= count_max:
                return found, found[-1] + 1
            lo = hi
    return found, max(cursor, stop)


def count_fitting(index: TopicIndex, seqs: Sequence[int], bytes_max: int) -> int:
    """How many of these jobs, in this order, have no more data than that together; one in any case. One whose index
    does not read counts as none."""
    left = bytes_max
    for count, seq in enumerate(seqs):
        part = index.find_part(seq)
        with suppress(Damaged, Unavailable):
            left -= 0 if part is None else int(part.entries()["data_len"][seq - part.base])
        if left < 0:
            return max(count, 1)
    return len(seqs)


def read_job_texts(index: TopicIndex, seqs: Sequence[int]) -> JobTexts | None:
    """The records of these seqs, rising, where all of them are plain and in memory; else they are read by a `plan`."""
    if not seqs or (
        index.bytes > _LOCKED_COPY_BYTES_MAX and index.bytes // index.count * len(seqs) > _LOCKED_COPY_BYTES_MAX
    ):
        return None
    found = JobTexts([], [])
    at, last = 0, seqs[-1]
    while at < len(seqs):
        first = seqs[at]
        part = index.find_part(first)
        if not isinstance(part, MemTable):
            return None
        stop = last + 1 if last - first == len(seqs) - at - 1 else first + 1  # all the rest, or one by one
        stop = min(stop, part.stop)
        some = part.read_texts(first, stop)
        if some is None:
            return None
        found.times_ms.extend(some[0])
        found.datas.extend(some[1])
        at += stop - first
    return found


class JobRead(NamedTuple):
    """Seqs of one part that lie close to each other, and what reads them."""

    seqs: Ints
    reader: Callable[[], Chunk] | None  # None: its index does not read
    cached: JobChunk | None = None  # they were read already
    read_ahead: ReadAhead | None = None  # `look` reads more than them


class ReadAhead:
    """Records behind the last claim, read with it: who claims one job at a time reads once for many. Records never
    change, so what is here is right as long as it is asked for."""

    def __init__(self) -> None:
        self._chunk: JobChunk | None = None

    def find(self, seqs: Ints) -> JobChunk | None:
        """The records of these seqs, rising, if all of them are here."""
        piece = self._chunk
        if piece is None:
            return None
        first, last = int(piece.rows.seq[0]), int(piece.rows.seq[-1])
        lo, hi = int(seqs[0]), int(seqs[-1])
        if lo < first or hi > last:
            return None
        if hi - lo + 1 == len(seqs):
            return JobChunk(piece.rows.slice(lo - first, hi - first + 1), piece.json[lo - first : hi - first + 1])
        return JobChunk(piece.rows.take(seqs - first), piece.json[seqs - first])

    def keep(self, piece: JobChunk) -> None:
        rows = piece.rows
        if int(rows.seq[-1]) - int(rows.seq[0]) + 1 == len(rows):
            self._chunk = piece


def plan_reads(index: TopicIndex, seqs: Sequence[int], read_ahead: ReadAhead) -> list[JobRead]:
    """How to read these seqs, rising, all of which live."""
    asked: Ints = np.array(seqs, np.int64)
    runs: list[JobRead] = []
    if not len(asked):
        return runs
    few = len(asked) <= _READ_AHEAD_CLAIM_MAX
    known = read_ahead.find(asked) if few else None
    if known is not None:
        return [JobRead(asked, None, known)]
    for part, first, stop in index.slices(int(asked[0]), int(asked[-1]) + 1):
        lo, hi = np.searchsorted(asked, (first, stop))
        mine = asked[lo:hi]
        for group in np.split(mine, np.flatnonzero(np.diff(mine) > _READ_TOGETHER_SEQS) + 1) if lo < hi else ():
            try:
                end = _read_ahead_stop(part, group) if few else int(group[-1]) + 1
                runs.append(
                    JobRead(group, part.reader(int(group[0]), end, _NO_LIMIT), None, read_ahead if few else None)
                )
            except (Damaged, Unavailable):
                runs.append(JobRead(group, None))
    return runs


def _read_ahead_stop(part: Part, group: Ints) -> int:
    """How far to read for these seqs: some records further, while they are small."""
    first, least = int(group[0]) - part.base, int(group[-1]) + 1
    sizes = np.cumsum(part.entries()["data_len"][first : first + _READ_AHEAD_RECORDS], dtype=np.int64)
    return max(least, part.base + first + int(np.searchsorted(sizes, _READ_AHEAD_BYTES, "right")))


def read_jobs(runs: Sequence[JobRead]) -> tuple[list[JobChunk], list[int]]:
    """The records of a plan, and the seqs of those that do not read."""
    pieces: list[JobChunk] = []
    lost: list[int] = []
    for seqs, look, known, ahead in runs:
        if known is not None:
            pieces.append(known)
            continue
        try:
            rows = None if look is None else look().rows
        except (Corrupt, Damaged, Unavailable):
            rows = None
        if rows is None or not len(rows):
            lost += seqs.tolist()
            continue
        json = (segment_index.record_flags(rows) & segment_index.JSON) != 0
        if ahead is not None:
            ahead.keep(JobChunk(rows, json))
        at = np.minimum(np.searchsorted(rows.seq, seqs), len(rows) - 1)
        there = rows.seq[at] == seqs
        lost += seqs[~there].tolist()
        which = at[there]
        pieces.append(JobChunk(rows, json) if len(which) == len(rows) else JobChunk(rows.take(which), json[which]))
    return pieces, lost


def select_jobs(pieces: Sequence[JobChunk], seqs: Sequence[int]) -> list[JobChunk]:
    """The records with these seqs, rising."""
    wanted: Ints = np.array(seqs, np.int64)
    found = []
    for rows, json in pieces:
        which = np.flatnonzero(np.isin(rows.seq, wanted))
        if len(which) == len(rows):
            found.append(JobChunk(rows, json))
        elif len(which):
            found.append(JobChunk(rows.take(which), json[which]))
    return found
