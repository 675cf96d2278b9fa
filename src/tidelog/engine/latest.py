"""The table of a topic with compaction: the newest record of each key.

A key is in the table as long as the newest record that was written for it is there and is not a tombstone. So the
answer does not depend on whether compaction has removed the older records yet. Keys come in the order of their digests:
arbitrary, and the same on every call, so a reader that goes from page to page meets every key that is there throughout
once. The newest record is found by the key index (`key_index.py`); no other record is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from tidelog import frames
from tidelog.engine import read, retention
from tidelog.engine.batch_encoder import check_int, is_utf8_text
from tidelog.engine.key_index import Run
from tidelog.engine.read import RecordChunk
from tidelog.engine.record_keys import Digest, digest_of
from tidelog.engine.results import Record
from tidelog.engine.topic_state import TopicState
from tidelog.errors import BadInput
from tidelog.formats.frame import SEQ_MAX
from tidelog.types import Ints

LATEST_LIMIT_DEFAULT: Final = 256
_EXAMINED_MAX: Final = 16_384  # keys that one page looks at: with a prefix, most of them may not match
_READ_TOGETHER_BYTES: Final = 1 << 18  # a read costs as much as these, so records closer than this are read together
_FIRST_KEYS: Final = 16  # read before their size is known
_ITERATION_KEYS: Final = 4_096
_ARROW_BYTES: Final = 16 << 20  # of one batch
_RETRIES_MAX: Final = 16  # for keys that are written again while they are read
_TABLE_SCHEMA: Final = pa.schema([pa.field("key", pa.binary(), nullable=False), *read.SCHEMA])


class LatestRecord(NamedTuple):
    """A key and its newest record."""

    key: str
    record: Record


class LatestPage(NamedTuple):
    """Keys and their newest records."""

    records: list[LatestRecord]
    next_after: str | None  # the cursor of the next page; None: that was all


class LatestTable:
    """The newest record of each key of a topic. `Topic.latest` returns one; it holds no records itself."""

    __slots__ = ("_prefix", "_topic")

    def __init__(self, topic: TopicState, prefix: str = "") -> None:
        if not is_utf8_text(prefix):
            raise BadInput("the prefix of a key is text; nothing was read")
        topic.key_index.selector()
        self._topic, self._prefix = topic, prefix.encode()

    def __repr__(self) -> str:
        return f"<latest records of {self._topic.name!r}>"

    def get(self, key: str) -> Record | None:
        """Return the newest record of a key; None if the key is not in the table."""
        wanted = _check_key(key)
        if not wanted.startswith(self._prefix):
            return None
        retention.refresh_for_read(self._topic)
        digest = digest_of(wanted)
        table = _read_newest(self._topic, _look_up(self._topic, [digest]))
        return next((record for chunk in table for record in read.chunk_records(self._topic, chunk.records)), None)

    def page(
        self, limit: int = LATEST_LIMIT_DEFAULT, after: str | None = None, *, bytes_max: int = 1 << 20
    ) -> LatestPage:
        """Return at most `limit` keys and about `bytes_max` bytes of their newest records, from the start or after the
        page whose `next_after` is given. A page may have fewer and not be the last."""
        check_int("bytes_max", bytes_max, 1, SEQ_MAX)
        chunks, next_after = self._read_page(limit, after, bytes_max)
        found: dict[int, LatestRecord] = {}
        for chunk in chunks:
            for key, record in zip(chunk.keys, read.chunk_records(self._topic, chunk.records), strict=True):
                found[chunk.order[record.seq]] = LatestRecord(key.decode(), record)
        return LatestPage([found[position] for position in sorted(found)], next_after)

    def __iter__(self) -> Iterator[LatestRecord]:
        """Yield every key and its newest record."""
        after: str | None = None
        while True:
            page = self.page(_ITERATION_KEYS, after)
            yield from page.records
            after = page.next_after
            if after is None:
                return

    def to_arrow(self) -> pa.Table:
        """Return the table: the columns of `Topic.to_arrow` after a column `key`, ordered by seq."""
        tables: list[pa.Table] = []
        after: str | None = None
        while True:
            table, after = self.arrow_page(after)
            tables.append(table)
            if after is None:
                return frames.typed_records(pa.concat_tables(tables).sort_by("seq"))

    to_pandas = frames.PANDAS.of(to_arrow)
    to_polars = frames.POLARS.of(to_arrow)
    to_dicts = frames.DICTS.of(to_arrow)

    def arrow_page(self, after: str | None = None) -> tuple[pa.Table, str | None]:
        """Return a part of `to_arrow`, without its order, and the cursor of the next part."""
        batches: list[pa.RecordBatch] = []
        chunks, next_after = self._read_page(_EXAMINED_MAX, after, _ARROW_BYTES)
        for chunk in chunks:
            columns = [pa.array(chunk.keys, pa.binary()), *read.stored_batch(chunk.records).columns]
            batches.append(pa.RecordBatch.from_arrays(columns, schema=_TABLE_SCHEMA))
        return pa.Table.from_batches(batches, schema=_TABLE_SCHEMA), next_after

    def _read_page(self, limit: int, after: str | None, bytes_max: int) -> tuple[list[_KeyedChunk], str | None]:
        """Return the records of a page, by seq, and the cursor of the next one."""
        check_int("limit", limit, 1, SEQ_MAX)
        start = None if after is None else _parse_cursor(after)
        retention.refresh_for_read(self._topic)
        chunks: list[_KeyedChunk] = []
        found = examined = size = 0
        while found < limit and examined < _EXAMINED_MAX and size < bytes_max:
            # The first records show how many of them fit.
            fit = _FIRST_KEYS if not examined else max((bytes_max - size) * examined // max(size, 1), 1)
            count = min(limit - found, _EXAMINED_MAX - examined, fit)
            candidates, is_all = _next_keys(self._topic, start, count)
            for chunk in _read_newest(self._topic, candidates, examined):
                kept = chunk.with_prefix(self._prefix)
                chunks += [kept] if kept.keys else []
                found += len(kept.keys)
                size += int(kept.records.rows.record_bytes().sum())
            if is_all:
                return chunks, None
            examined += len(candidates.seqs)
            start = Digest(int(candidates.high[-1]), int(candidates.low[-1]))
        assert start is not None, "a page looks at one key at least"
        return chunks, f"{start.high:016x}{start.low:016x}"


class _KeyedChunk(NamedTuple):
    """Records that are the newest of their keys, by seq."""

    keys: list[bytes]
    records: RecordChunk
    order: dict[int, int]  # seq → position on the page

    def with_prefix(self, prefix: bytes) -> _KeyedChunk:
        """Leave out the keys that do not begin with this."""
        which = [number for number, key in enumerate(self.keys) if key.startswith(prefix)] if prefix else None
        return self if which is None or len(which) == len(self.keys) else self.take(which)

    def take(self, which: list[int]) -> _KeyedChunk:
        records = self.records._replace(rows=self.records.rows.take(np.array(which, np.int64)))
        records = records._replace(json=self.records.json[np.array(which, np.int64)])
        return _KeyedChunk([self.keys[number] for number in which], records, self.order)


def _next_keys(topic: TopicState, after: Digest | None, count: int) -> tuple[Run, bool]:
    """Return the newest records of the next `count` keys, by digest, and whether that is all."""
    keys = topic.key_index
    with keys.lock:
        with topic.lock:
            topic.check_open()
            stop = topic.index.head + 1
        parts = keys.parts()
        part = 0 if after is None else keys.part_of(after)
        while True:
            run, is_end = keys.open(part, stop).page(after, count)
            if len(run.seqs) or part + 1 == parts:
                return run, is_end and part + 1 == parts
            part += 1


def _look_up(topic: TopicState, digests: list[Digest]) -> Run:
    """Return the newest records of these keys, in this order; those that have none are left out."""
    keys, found = topic.key_index, list[tuple[int, int, int, bool]]()
    with keys.lock:
        with topic.lock:
            topic.check_open()
            stop = topic.index.head + 1
        keys.parts()
        for digest in digests:
            newest = keys.open(keys.part_of(digest), stop).find(digest)
            if newest is not None:
                found.append((*digest, *newest))
    high, low, seqs, tombstones = zip(*found, strict=True) if found else ((), (), (), ())
    return Run(
        np.array(high, np.uint64), np.array(low, np.uint64), np.array(seqs, np.int64), np.array(tombstones, bool)
    )


def _read_newest(topic: TopicState, candidates: Run, first_position: int = 0) -> list[_KeyedChunk]:
    """Read these records, without tombstones. A key that was written again meanwhile gets its newer record."""
    selector = topic.key_index.selector()
    positions = {
        Digest(high, low): first_position + number
        for number, (high, low) in enumerate(zip(candidates.high.tolist(), candidates.low.tolist(), strict=True))
    }
    chunks: list[_KeyedChunk] = []
    for _ in range(_RETRIES_MAX):
        digests = list(map(Digest, candidates.high.tolist(), candidates.low.tolist()))
        by_seq = dict(zip(candidates.seqs.tolist(), digests, strict=True))
        for records in _read_records(topic, np.sort(candidates.seqs)):
            seqs = records.rows.seq.tolist()
            order = {seq: positions[by_seq[seq]] for seq in seqs}
            chunk = _KeyedChunk(selector.keys(records.rows).to_pylist(), records, order)
            is_tombstone = selector.tombstones(records.rows)
            chunks.append(chunk.take(np.flatnonzero(~is_tombstone).tolist()) if is_tombstone.any() else chunk)
            for seq in seqs:
                del by_seq[seq]
        # What was not found is gone, or compaction removed it because there is a newer one.
        newer = _look_up(topic, list(by_seq.values())) if by_seq else candidates.take(slice(0, 0))
        candidates = newer.take(~np.isin(newer.seqs, list(by_seq)))
        if not len(candidates.seqs):
            break
    return chunks


def _read_records(topic: TopicState, seqs: Ints) -> Iterator[RecordChunk]:
    """Yield the live ones of these ascending seqs."""
    if not len(seqs):
        return
    with topic.lock:
        record_bytes = topic.index.bytes // max(topic.index.count, 1)
    edges = np.flatnonzero(np.diff(seqs) > max(_READ_TOGETHER_BYTES // max(record_bytes, 1), 1))
    firsts, lasts = seqs[np.append(0, edges + 1)].tolist(), seqs[np.append(edges, len(seqs) - 1)].tolist()
    for first, last in zip(firsts, lasts, strict=True):
        for chunk in read.TopicScan(topic, first - 1, frozenset(), last, pass_gaps=True).iter_chunks():
            which = _positions(chunk.rows.seq, seqs)
            if len(which):
                yield chunk._replace(rows=chunk.rows.take(which), json=chunk.json[which])


def _positions(seqs: Ints, wanted: Ints) -> Ints:
    """Return where the wanted seqs are in others. Both ascend: a search costs what is wanted, not what was read."""
    if not len(seqs):
        return np.zeros(0, np.int64)
    lo, hi = np.searchsorted(wanted, (seqs[0], seqs[-1] + 1))
    inside = wanted[lo:hi]
    at = np.searchsorted(seqs, inside)
    found: Ints = at[seqs[at] == inside]
    return found


def _check_key(key: object) -> bytes:
    if not is_utf8_text(key) or not key:
        raise BadInput(f"a key is text, not {key!r:.80}; nothing was read")
    return str(key).encode()


def _parse_cursor(text: object) -> Digest:
    try:
        if isinstance(text, str) and len(text) == 32 and text.isascii():
            return Digest(int(text[:16], 16), int(text[16:], 16))
    except ValueError:
        pass
    raise BadInput("the cursor is not one of ours: give next_after of the page before; nothing was read")
