"""The key index of a topic with compaction: key → its newest record, and the records that newer ones replaced.

    records            1:a  2:b  3:a  4:b  5:c │ 6:a  7:d  8:a │ 9:e
    runs, by digest    a→3  b→4  c→5           │ a→8  d→7      │ e→9        a lookup asks the newest run first
    replaced           1 2                       3 6                         what compaction may remove

A run covers a range of seqs and is sorted by digest: 24 bytes a key in NumPy arrays, no Python object. A new run
absorbs older ones that are not more than twice its size, so a lookup asks a few runs and each key is merged a few
times. The index is extended when it is used (`KeyIndex.open`): a sealed segment by its `.key` file, which a checkpoint
writes beside the footer, other records by their bytes. So an append pays nothing, a use pays for the records since the
last one, and the first use after a start reads the `.key` files and no records. A file that is missing or does not
verify is built again from verified records.

Records that are deleted when they are indexed do not count. While compaction is configured, a delete of the newest
record of a key deletes the replaced ones with it (`find_replaced`), so a key whose newest record is gone is gone.

Memory is bounded: `KeyTables` holds the tables of all topics up to `key_index_bytes`, and a topic that needs more than
half of that is divided by the first bits of its digests into parts, of which one is needed at a time.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from tidelog.disk.durability import ParallelSyncs, remove_if_exists, write_temporary
from tidelog.engine.record_keys import Digest, KeySelector, selector_of
from tidelog.engine.segment import Part, Segment
from tidelog.errors import BadInput, Corrupt, Damaged, NewerFormat
from tidelog.formats import key_index
from tidelog.formats.key_index import SegmentKeys, Words
from tidelog.formats.rows import Rows
from tidelog.types import Ints

if TYPE_CHECKING:
    from tidelog.engine.segment import SegmentFiles
    from tidelog.engine.topic_state import TopicState

_log = logging.getLogger("tidelog.engine")
KEY_INDEX_SUFFIX: Final = ".key"
_ENTRY_BYTES: Final = 24
_READ_BYTES: Final = 8 << 20  # of records that are indexed at once
_PARTS_MAX: Final = 1 << 12
_UNNAMED_FILES_MAX: Final = 16
_LISTED_MIN: Final = 1 << 16  # replaced records that are listed without asking which of them are gone
_NO_SEQS: Final = np.zeros(0, np.int64)
_NO_WORDS: Final = np.zeros(0, np.uint64)


class Run(NamedTuple):
    """Keys and one record of each, sorted by digest."""

    high: Words
    low: Words
    seqs: Ints
    tombstones: NDArray[np.bool_]

    def take(self, which: NDArray[np.bool_] | Ints | slice) -> Run:
        return Run(self.high[which], self.low[which], self.seqs[which], self.tombstones[which])

    def find(self, high: Words, low: Words) -> Ints:
        """Return the position of each of these digests; -1: it is not here."""
        positions = np.searchsorted(self.high, high)
        found = np.full(len(high), -1, np.int64)
        candidates = np.flatnonzero(positions < len(self.high))
        while len(candidates):  # again only where two digests have the same first half
            at = positions[candidates]
            same_half = self.high[at] == high[candidates]
            hit = same_half & (self.low[at] == low[candidates])
            found[candidates[hit]] = at[hit]
            candidates = candidates[same_half & ~hit]
            positions[candidates] += 1
            candidates = candidates[positions[candidates] < len(self.high)]
        return found

    def after(self, digest: Digest | None) -> int:
        """Return the position of the first key after this digest."""
        if digest is None:
            return 0
        high, low = np.uint64(digest.high), np.uint64(digest.low)
        lo, hi = int(np.searchsorted(self.high, high)), int(np.searchsorted(self.high, high, "right"))
        return lo + int(np.searchsorted(self.low[lo:hi], low, "right"))


_NO_KEYS: Final = Run(_NO_WORDS, _NO_WORDS, _NO_SEQS, np.zeros(0, bool))


def _concat(runs: list[Run]) -> Run:
    return Run(*(np.concatenate(columns) for columns in zip(*runs, strict=True)))


def _newest_of(run: Run) -> Run:
    """Sort by digest and keep the newest record of each key."""
    # Runs follow each other, oldest first, and each is sorted: a stable sort by half a digest only merges them. That
    # takes a fifth of the time of a sort by all columns, which is right for any order.
    merged = run.take(np.argsort(run.high, kind="stable"))
    is_same = (merged.high[1:] == merged.high[:-1]) & (merged.low[1:] == merged.low[:-1])
    is_split = (merged.high[1:] == merged.high[:-1]) & ~is_same
    if is_split.any() or (merged.seqs[1:] < merged.seqs[:-1])[is_same].any():
        merged = run.take(np.lexsort((run.seqs, run.low, run.high)))
        is_same = (merged.high[1:] == merged.high[:-1]) & (merged.low[1:] == merged.low[:-1])
    return merged.take(np.append(~is_same, True)) if len(merged.seqs) else merged


class KeyTable:
    """The index of the keys of one topic, or of a part of them. Guarded by the lock of its `KeyIndex`."""

    def __init__(self) -> None:
        self.stop = 1  # one past the last indexed seq
        self.runs: list[Run] = []  # oldest and largest first
        self._replaced: list[Run] = []  # records that a newer one of their key replaced, as far as they were live
        self._tombstones: list[Ints] = []
        self._known_live = 0  # entries of the two lists when those that are gone were last forgotten

    @property
    def nbytes(self) -> int:
        """Approximate memory use."""
        entries = sum(len(run.seqs) for run in (*self.runs, *self._replaced))
        return _ENTRY_BYTES * entries + 8 * sum(map(len, self._tombstones)) + 1_024

    def add(self, keys: Run, older: Run, stop: int) -> None:
        """Add the records up to `stop`: the newest one of each key, and the others."""
        self._replaced += [older] if len(older.seqs) else []
        high, low = keys.high, keys.low
        for run in reversed(self.runs):
            found = run.find(high, low)
            hits = run.take(found[found >= 0])
            self._replaced += [hits] if len(hits.seqs) else []
            high, low = high[found < 0], low[found < 0]  # versions in older runs were replaced before
        if keys.tombstones.any():
            self._tombstones.append(keys.seqs[keys.tombstones])
        if len(keys.seqs):
            self.runs.append(keys)
        while len(self.runs) > 1 and len(self.runs[-2].seqs) <= 2 * len(self.runs[-1].seqs):
            newer, older_run = self.runs.pop(), self.runs.pop()
            self.runs.append(_newest_of(_concat([older_run, newer])))
        self.stop = stop

    def forget_gone(self, live: Callable[[Ints], Ints]) -> None:
        """Forget replaced records and tombstones that are gone, if many were added since this was last done."""
        entries = sum(len(run.seqs) for run in self._replaced) + sum(map(len, self._tombstones))
        if entries > 2 * self._known_live + _LISTED_MIN:
            self._known_live = len(self.replaced(live).seqs) + len(self.tombstones(live))

    def find(self, digest: Digest) -> tuple[int, bool] | None:
        """Return the newest record of a key and whether it is a tombstone."""
        high, low = np.array([digest.high], np.uint64), np.array([digest.low], np.uint64)
        for run in reversed(self.runs):
            (at,) = run.find(high, low).tolist()
            if at >= 0:
                return int(run.seqs[at]), bool(run.tombstones[at])
        return None

    def newest_among(self, seqs: Ints) -> Run:
        """Return the keys whose newest record is one of these, by digest."""
        hits = [_NO_KEYS]
        for number, run in enumerate(self.runs):
            found = run.take(np.isin(run.seqs, seqs))
            for newer in self.runs[number + 1 :]:
                found = found.take(newer.find(found.high, found.low) < 0)
            hits.append(found)
        return _newest_of(_concat(hits))

    def page(self, after: Digest | None, count: int) -> tuple[Run, bool]:
        """Return the newest records of at most `count` keys after a digest, by digest, and whether that is all."""
        pieces, bound = [_NO_KEYS], None
        for run in self.runs:
            start = run.after(after)
            pieces.append(run.take(slice(start, start + count)))
            if start + count < len(run.seqs):
                last = int(run.high[start + count - 1]), int(run.low[start + count - 1])
                bound = last if bound is None else min(bound, last)
        merged = _newest_of(_concat(pieces))
        if bound is not None:  # later keys of one run may be missing from the others' pieces
            high, low = np.uint64(bound[0]), np.uint64(bound[1])
            merged = merged.take((merged.high < high) | ((merged.high == high) & (merged.low <= low)))
        return merged.take(slice(0, count)), bound is None and len(merged.seqs) <= count

    def replaced(self, live: Callable[[Ints], Ints]) -> Run:
        """Return the live records that newer ones replaced, by seq. Those that are gone are forgotten."""
        run = _keep_live(_concat([_NO_KEYS, *self._replaced]), live)
        self._replaced = [run]
        return run

    def tombstones(self, live: Callable[[Ints], Ints]) -> Ints:
        """Return the live tombstones, ascending. Those that are gone are forgotten."""
        seqs = live(merge_seqs(*self._tombstones))
        self._tombstones = [seqs]
        return seqs


def merge_seqs(*parts: Ints) -> Ints:
    """Return the seqs of all parts, ascending, each once. For parts that ascend a tenth of the time of `np.unique`."""
    seqs = np.concatenate([_NO_SEQS, *parts])
    if (seqs[1:] <= seqs[:-1]).any():
        seqs.sort(kind="stable")
        seqs = seqs[np.append(True, seqs[1:] != seqs[:-1])]
    return seqs


def _keep_live(run: Run, live: Callable[[Ints], Ints]) -> Run:
    run = run.take(np.argsort(run.seqs, kind="stable"))
    run = run.take(np.append(True, run.seqs[1:] != run.seqs[:-1])) if len(run.seqs) else run
    alive = live(run.seqs)
    return run if len(alive) == len(run.seqs) else run.take(np.searchsorted(run.seqs, alive))


class KeyTables:
    """The tables of all topics, least recently used first, with a total of `bytes_max`. Thread-safe."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.rebuilt_count = 0  # key files that were missing or did not verify
        self._guard = Lock()
        self._tables: OrderedDict[tuple[int, int, int], KeyTable] = OrderedDict()

    @property
    def nbytes(self) -> int:
        with self._guard:
            return sum(table.nbytes for table in self._tables.values())

    def parts_for(self, records: int) -> int:
        """Return into how many parts a topic of this many records is divided: a power of two."""
        needed = -(-2 * _ENTRY_BYTES * records // self.bytes_max)
        return min(1 << max(needed - 1, 0).bit_length(), _PARTS_MAX)

    def get(self, topic_id: int, selector: int, part: int) -> KeyTable:
        with self._guard:
            key = (topic_id, selector, part)
            table = self._tables.setdefault(key, KeyTable())
            self._tables.move_to_end(key)
            return table

    def shrink(self, kept: KeyTable) -> None:
        """Drop the tables that were not used for longest, down to the limit; `kept` is in use."""
        with self._guard:
            used = sum(table.nbytes for table in self._tables.values())
            for key, table in list(self._tables.items()):
                if used <= self.bytes_max:
                    return
                if table is not kept:
                    used -= self._tables.pop(key).nbytes

    def drop(self, topic_id: int) -> None:
        with self._guard:
            for key in [key for key in self._tables if key[0] == topic_id]:
                del self._tables[key]


class KeyIndex:
    """The key index of one topic, created with its first use. `lock` is taken before the topic's lock, never under it,
    and held while tables are used."""

    def __init__(self, topic: TopicState) -> None:
        self.lock = Lock()
        self.compaction_lock = Lock()  # one compaction at a time; taken before `lock`
        self._topic = topic
        self._parts = 1
        self._rule = ""
        self._rebuilt = _RebuiltFiles(topic)

    def selector(self) -> KeySelector:
        """Return the topic's rule for keys. Raises BadInput where it has none."""
        rule = self._topic.config.compaction
        if rule is None:
            raise BadInput(
                f"{self._topic.name} has no compaction, so its records have no keys; configure compaction as "
                "latest_by_tag or as a JSON pointer"
            )
        return selector_of(rule)

    def parts(self) -> int:
        """Return into how many parts its keys are divided now. With `lock` held."""
        selector, tables = self.selector(), self._topic.context.key_tables
        parts = tables.parts_for(self._topic.index.count)
        if selector.rule != self._rule or parts > self._parts or 4 * parts < self._parts:
            tables.drop(self._topic.id)
            self._rule, self._parts = selector.rule, parts
        return self._parts

    def part_of(self, digest: Digest) -> int:
        """Return the part with this digest. With `lock` held, after `parts`."""
        return digest.high * self._parts >> 64

    def open(self, part: int, stop: int) -> KeyTable:
        """Return the table of a part with all records below `stop`. With `lock` held, after `parts`. Raises Corrupt
        where records cannot be read."""
        try:
            while self.extend(part, stop):
                pass
        finally:
            self.finish_files()
        return self._topic.context.key_tables.get(self._topic.id, self.selector().id, part)

    def extend(self, part: int, stop: int) -> int:
        """Extend the table of a part by one segment or less, up to `stop`; return the bytes that were read, 0 if it is
        there. With `lock` held, after `parts`."""
        topic, selector, read_bytes = self._topic, self.selector(), 0
        table = topic.context.key_tables.get(topic.id, selector.id, part)
        if table.stop < stop:
            with topic.lock:
                found = next(topic.index.slices(max(table.stop, topic.index.earliest), stop), None)
            if found is None:
                table.stop = stop
                return 0
            try:
                for keys, lo, hi, size in _keys_between(
                    topic, selector, found.part, found.first, found.stop, self._rebuilt
                ):
                    newest, older = self._live_runs(keys, lo)
                    table.add(self._of_part(newest, part), self._of_part(older, part), hi)
                    read_bytes += max(size, 1)
            except Corrupt as error:
                with topic.lock:
                    if found.part in topic.index.parts and not topic.is_dropped:
                        topic.report_corruption(f"{error.where}, byte {error.pos}", error.reason)
                        raise
                read_bytes += 1  # a checkpoint replaced it meanwhile: look again
            table.forget_gone(self.live)
            topic.context.key_tables.shrink(table)
        return read_bytes

    def finish_files(self) -> None:
        """Complete the key files that `extend` has built again. With `lock` held."""
        self._rebuilt.finish()

    def ensure_file(self, selector: KeySelector, segment: Segment, foot: bytes) -> None:
        """Write the key file of a sealed segment with this footer, if it has none. Raises Corrupt where its records do
        not read."""
        with self.lock:
            try:
                _load_or_rebuild(self._topic, selector, segment, foot, self._rebuilt)
            finally:
                self.finish_files()

    def live(self, seqs: Ints) -> Ints:
        """Return those of these ascending seqs that have a live record."""
        with self._topic.lock:
            return self._topic.index.live_seqs(seqs)

    def _of_part(self, run: Run, part: int) -> Run:
        if self._parts == 1:
            return run
        shift = np.uint64(64 - (self._parts.bit_length() - 1))
        return run.take((run.high >> shift) == part)

    def _live_runs(self, keys: SegmentKeys, base: int) -> tuple[Run, Run]:
        """Return the newest live record of each key of a range, and the others."""
        none = np.zeros(len(keys.older_rows), bool)
        newest = Run(keys.high, keys.low, keys.rows.astype(np.int64) + base, keys.tombstones)
        older = Run(
            keys.high[keys.older_keys], keys.low[keys.older_keys], keys.older_rows.astype(np.int64) + base, none
        )
        live = self.live(np.sort(np.concatenate([newest.seqs, older.seqs])))
        if len(live) == len(newest.seqs) + len(older.seqs):
            return newest, older
        is_live, older = _are_in(newest.seqs, live), older.take(_are_in(older.seqs, live))
        gone, newest = newest.take(~is_live), newest.take(is_live)
        # Where the newest record of a key is gone and an older one is not: the delete is from before compaction.
        orphans = older.take(gone.find(older.high, older.low) >= 0)
        if len(orphans.seqs):
            heirs = _newest_of(orphans)
            older = older.take(~np.isin(older.seqs, heirs.seqs))
            newest = _newest_of(_concat([newest, heirs]))
        return newest, older


def _are_in(seqs: Ints, ascending: Ints) -> NDArray[np.bool_]:
    at = np.searchsorted(ascending, seqs)
    inside = at < len(ascending)
    found = np.zeros(len(seqs), bool)
    found[inside] = ascending[at[inside]] == seqs[inside]
    return found


# ── deletes by callers ────────────────────────────────────────────────────────────────────────────


def find_replaced(topic: TopicState, seqs: Ints) -> Ints:
    """Return the records that go with these, ascending: where one of them is the newest record of its key, the live
    records that it replaced. Without them an older value of the key would be back."""
    keys = topic.key_index
    with keys.lock:
        with topic.lock:
            stop = topic.index.head + 1
            seqs = topic.index.live_seqs(np.unique(seqs))
        found = [seqs[:0]]
        for part in range(keys.parts()) if len(seqs) else ():
            table = keys.open(part, stop)
            newest = table.newest_among(seqs)
            if len(newest.seqs):
                replaced = table.replaced(keys.live)
                found.append(replaced.seqs[newest.find(replaced.high, replaced.low) >= 0])
        return np.setdiff1d(np.concatenate(found), seqs)


# ── the keys of a range of records ────────────────────────────────────────────────────────────────


def _keys_between(
    topic: TopicState, selector: KeySelector, part: Part, first: int, stop: int, rebuilt: _RebuiltFiles
) -> Iterator[tuple[SegmentKeys, int, int, int]]:
    """Yield the keys of [first, stop) of a part in pieces: each with its first seq, the seq after it, and the bytes
    that were read for it. Without the topic's lock."""
    if isinstance(part, Segment) and part.is_sealed and stop == part.stop:
        foot = part.read_footer()
        if foot is not None:
            keys, size = _load_or_rebuild(topic, selector, part, foot, rebuilt)
            if first > part.base:
                keys = _from_row(keys, first - part.base)
            yield keys, part.base, stop, size
            return
    while first < stop:
        rows, next_seq = _read_rows(topic, part, first, stop)
        yield selector.index(rows, first), first, next_seq, int(rows.record_bytes().sum())
        first = next_seq


def _from_row(keys: SegmentKeys, row: int) -> SegmentKeys:
    """Leave out the rows before this one."""
    is_newer, kept = keys.older_rows >= row, keys.rows >= row
    position = np.cumsum(kept) - 1  # a key with an older row that is kept is kept: its newest row is later
    return SegmentKeys(
        keys.high[kept],
        keys.low[kept],
        keys.rows[kept],
        keys.tombstones[kept],
        keys.older_rows[is_newer],
        position[keys.older_keys[is_newer]].astype(np.uint32),
    )


def _read_rows(topic: TopicState, part: Part, first: int, stop: int) -> tuple[Rows, int]:
    """Read verified records of a part from `first` on, about `_READ_BYTES`. Returns them and the seq after them."""
    with topic.lock:
        read = part.reader(first, stop, _READ_BYTES)
    chunk = read()
    if chunk.fault is not None:
        raise Corrupt(f"{topic.name}: segment {part.base}", pos=chunk.fault.pos, reason=chunk.fault.reason)
    rows = chunk.rows.between(first, stop)
    next_seq = min(chunk.next_seq, stop)
    assert next_seq > first, "a read makes progress"
    return rows, next_seq


class _RebuiltFiles:
    """Key files of one topic that are written again. Their syncs run while the next segment is read. A lost file is
    built again, so its name need not be durable. Guarded by the lock of the `KeyIndex`."""

    def __init__(self, topic: TopicState) -> None:
        self._topic = topic
        self._syncs = ParallelSyncs()
        self._unnamed: dict[str, tuple[Segment, Future[None]]] = {}  # by the path that each will have

    def __contains__(self, path: str) -> bool:
        return path in self._unnamed

    def add(self, segment: Segment, path: str, content: bytes) -> None:
        """Begin to write a file. An error is logged: without the file the next use after a start reads the records."""
        disk, temporary = segment.files.disk, f"{path}.tmp"
        try:
            remove_if_exists(disk, temporary)
            file = disk.open(temporary, "create")
            try:
                file.write(0, content)
            except OSError:
                file.close()
                raise
            self._unnamed[path] = segment, self._syncs.sync_and_close(file)
        except OSError as error:
            self._on_failed(segment, path, error)
        if len(self._unnamed) >= _UNNAMED_FILES_MAX:
            self.finish()

    def finish(self) -> None:
        """Wait for the syncs and give the files their names."""
        if not self._unnamed:
            return
        written, self._unnamed = self._unnamed, {}
        for path, (segment, synced) in written.items():
            try:
                synced.result()
                segment.files.disk.rename(f"{path}.tmp", path)
                with self._topic.lock:
                    is_removed = self._topic.is_dropped or segment not in self._topic.index.parts
                if is_removed:  # a checkpoint let go of it meanwhile
                    remove_if_exists(segment.files.disk, path)
            except OSError as error:
                self._on_failed(segment, path, error)
        self._syncs.__exit__()
        self._syncs = ParallelSyncs()

    def _on_failed(self, segment: Segment, path: str, error: OSError) -> None:
        _log.warning("%s: the key index of segment %d was not written: %s", self._topic.name, segment.base, error)
        with suppress(OSError):
            remove_if_exists(segment.files.disk, f"{path}.tmp")


def _load_or_rebuild(
    topic: TopicState, selector: KeySelector, segment: Segment, foot: bytes, rebuilt: _RebuiltFiles
) -> tuple[SegmentKeys, int]:
    """Return the keys of a sealed segment and the bytes that were read: from its file, or from its records."""
    base, seqs = segment.base, segment.stop - segment.base
    path, foot_xxh3 = segment.path(KEY_INDEX_SUFFIX), xxh3_64_intdigest(foot)
    reason = "there is no file"
    if path in rebuilt:
        rebuilt.finish()
    try:
        content = segment.read_side_file(KEY_INDEX_SUFFIX)
        if content is not None:
            keys = key_index.decode(content, base=base, foot=foot_xxh3, selector=selector.id, seqs=seqs, what=path)
            return keys, len(content)
    except (Corrupt, Damaged, NewerFormat) as error:
        reason = str(error)
    rows, next_seq = _read_whole(topic, segment)
    assert next_seq == segment.stop, "a whole segment was read"
    keys = selector.index(rows, base)
    topic.context.key_tables.rebuilt_count += 1
    _log.info("%s: segment %d was read for its keys: %s", topic.name, base, reason)
    if topic.context.shards and not topic.context.is_replaying:
        rebuilt.add(segment, path, key_index.encode(base, foot_xxh3, selector.id, seqs, keys))
    return keys, int(rows.record_bytes().sum())


def ensure_key_file(topic: TopicState, segment: Segment) -> None:
    """Write the key file of a sealed segment that has none of the topic's rule. Raises Corrupt where its records do not
    read."""
    rule, foot = topic.config.compaction, segment.read_footer()
    if rule is not None and foot is not None:
        topic.key_index.ensure_file(selector_of(rule), segment, foot)


def _read_whole(topic: TopicState, segment: Segment) -> tuple[Rows, int]:
    with topic.lock:
        read = segment.reader(segment.base, segment.stop, 1 << 62)
    chunk = read()
    if chunk.fault is not None:
        raise Corrupt(f"{topic.name}: segment {segment.base}", pos=chunk.fault.pos, reason=chunk.fault.reason)
    return chunk.rows, chunk.next_seq


def encode_key_index(compaction: str, base: int, stop: int, foot: bytes, rows: Rows) -> bytes:
    """Encode the key file of the segment [base, stop) with this footer and these rows."""
    selector = selector_of(compaction)
    return key_index.encode(base, xxh3_64_intdigest(foot), selector.id, stop - base, selector.index(rows, base))


def write_key_index(
    files: SegmentFiles, compaction: str, base: int, stop: int, generation: int, foot: bytes, rows: Rows
) -> None:
    """Write the key file of a segment that is being sealed, from verified rows. The file name becomes durable with the
    footer's, which follows."""
    path = files.path(base, generation, KEY_INDEX_SUFFIX)
    write_temporary(files.disk, f"{path}.tmp", encode_key_index(compaction, base, stop, foot, rows))
    files.disk.rename(f"{path}.tmp", path)
