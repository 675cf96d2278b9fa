"""[hot] Reading a topic: pages of records or of columns, and who waits for the next ones.

A page is made part by part. What is needed of a part is taken under the topic's lock; reading and
decoding happen without it, so a long read stops no writer. Every seq of a page's range is accounted
for: delivered, deleted, expired, evicted, filtered, or a hole.

[shell] Notice that a writer beside a reader has done something, without reading what it was.

Everything a writer does is a frame in the WAL, so names, sizes and times of the WAL's files tell. Opening a directory
for reading replays the WAL; a reader that follows a topic does so only after this says that something changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Event
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from tidelog.commitlog.codec import Chunk
from tidelog.disk.interface import Disk, Stat, join
from tidelog.engine import consistency, retention, watermarks
from tidelog.engine.batch_encoder import check_int, is_utf8_text
from tidelog.engine.json_codec import from_json
from tidelog.engine.results import Counts, Page, Record
from tidelog.engine.segment import BoolArray, Part, Segment
from tidelog.engine.topic_state import WAL_DIR, TopicState
from tidelog.engine.watermarks import Gap
from tidelog.errors import BadInput, Corrupt, GapFound, Unavailable
from tidelog.formats import lazy_compute as pc
from tidelog.formats import rows as columns_of
from tidelog.formats import segment_index
from tidelog.formats.frame import SEQ_MAX
from tidelog.formats.rows import Rows, Span, copy_values, empty_rows, to_arrow, to_binary_array
from tidelog.types import Ints
from tidelog.wal import paths


def iter_wal_files(disk: Disk, root: str) -> Iterator[tuple[str, Stat | None]]:
    """Every WAL file of a data directory with what the disk says of it; None: it is gone again."""
    wal = join(root, WAL_DIR)
    for place in (paths.shard_directory(wal, key) for key in paths.list_shard_keys(disk, wal)):
        for file in (paths.file_path(place, first) for first in paths.list_file_numbers(disk, place)):
            yield file, disk.stat(file)


class WalWatch:
    def __init__(self, disk: Disk, root: str) -> None:
        self._disk, self._root = disk, root
        self._seen = self._list_files()
        self._is_stable = False

    def changed(self) -> bool:
        """Return whether the writer did something since the last call.

        True at the first call, and once more after the last change: times of files are coarser than writes.
        """
        now = self._list_files()
        moved = now != self._seen
        changed = moved or not self._is_stable
        self._seen, self._is_stable = now, not moved
        return changed

    def report_change_again(self) -> None:
        """Let the next call return True: what changed could not be read."""
        self._is_stable = False

    def _list_files(self) -> list[tuple[str, Stat | None]]:
        return list(iter_wal_files(self._disk, self._root))


OnGap: TypeAlias = Literal["fail", "emit", "skip"]
ExcludedNodes: TypeAlias = frozenset[bytes]  # whose records a reader does not want
_CHUNK_BYTES = 8 << 20
_NO_LIMIT = 1 << 62
READER_POLL_S = 0.2
_RELOAD_TRIES = 8  # at a directory that a writer changes
SCHEMA = columns_of.SCHEMA.append(pa.field("json", pa.bool_()))


class RecordChunk(NamedTuple):
    """Live records of one part, and where the seqs of the stretch went."""

    rows: Rows
    json: BoolArray
    counts: Counts
    next_from_seq: int
    is_full: bool  # the next record does not fit the budget any more


class TopicScan:
    """One pass over a topic from a cursor to the head as it was at the start. It ends before seqs that stand for
    records which a router's source lost: the next one begins with that gap. `through`: it goes on after them; `gap`
    is the first of them and `gaps` are all."""

    chunk_bytes = _CHUNK_BYTES  # of frames that are read at once

    def __init__(
        self,
        topic: TopicState,
        from_seq: int,
        nodes: ExcludedNodes,
        to_seq: int | None = None,
        *,
        pass_gaps: bool = False,
        strong: bool = False,
    ) -> None:
        check_int("from_seq", from_seq, 0, SEQ_MAX)
        if to_seq is not None:
            check_int("to_seq", to_seq, 0, SEQ_MAX)
        retention.refresh_for_read(topic)
        durable = consistency.make_durable(topic) if consistency.needs_durable_records(topic, strong) else SEQ_MAX
        if to_seq is not None and durable < min(to_seq, topic.index.head):
            raise consistency.not_durable_error(topic)  # a range is read whole or not at all
        self._core = topic
        self._nodes = nodes if topic.config.dedupe_node else frozenset()
        with topic.lock:
            topic.check_open()
            index = topic.index
            self.earliest, self.watermarks = index.earliest, index.watermarks
            # A strong reader's head is the last durable record. A cursor beyond it is not one of another topic.
            self.head = min(index.head, max(durable, from_seq, index.earliest - 1))
            begin = watermarks.find_read_start(
                from_seq, self.head, self.earliest, self.watermarks, index.trimmed_ranges
            )
            self.gap = self._start_gap = begin.gap
            self.cursor = max(begin.cursor, 0)
            self.head = max(self.head, self.cursor)  # also where a gap goes beyond what could be made durable
            self.counts = self._count_below_start(
                0 if self.gap and self.gap.reason == "recreated" else from_seq, self.cursor
            )
            ahead = watermarks.next_trimmed_range(self.cursor, index.trimmed_ranges)
            trims = watermarks.trimmed_ranges_after(self.cursor, index.trimmed_ranges) if pass_gaps else []
        self.last = self.head if to_seq is None else min(to_seq, self.head)
        self._trims = [span for span in trims if span[0] <= self.last]
        if self._trims and self.gap is None:
            self.gap = self._trim_gap(*self._trims[0])
        if ahead is not None and not pass_gaps:
            self.last = max(min(self.last, ahead[0] - 1), self.cursor)

    @property
    def gaps(self) -> list[Gap]:
        """What was lost of the seqs that were passed so far, in order."""
        found = [] if self._start_gap is None else [self._start_gap]
        return found + [self._trim_gap(*span) for span in self._trims if span[0] <= self.cursor]

    def _trim_gap(self, lo: int, hi: int) -> Gap:
        return Gap(lo, hi - 1, "source_trim", hi - lo, hi, self.head)

    def _count_below_start(self, lo: int, hi: int) -> Counts:
        """Where seqs (lo, hi] went that lie below the first live one."""
        if lo == hi:
            return Counts()
        evicted = max(min(hi, max(self.watermarks.cap, self.watermarks.source)) - lo, 0)
        lo += evicted
        expired = max(min(hi, self.watermarks.ttl) - lo, 0)
        lo += expired
        if self.gap is not None and self.gap.reason != "recreated":
            more = max(min(hi, self.gap.gap_to) - lo, 0)
            evicted, lo = evicted + more, lo + more
        return Counts(evicted=evicted, expired=expired) + self._count_missing(lo + 1, max(hi, lo) + 1)

    def _count_missing(self, first: int, stop: int) -> Counts:
        """Where seqs [first, stop) went, none of which can be read: deleted, or never there."""
        if first >= stop:
            return Counts()
        had = self._core.index.count_assigned(first, stop)
        lost = sum(max(min(hi, stop) - max(lo, first), 0) for lo, hi in self._core.index.trimmed_ranges)
        return Counts(deleted=had, evicted=lost, holes=stop - first - had - lost)

    def iter_chunks(self, count_max: int = _NO_LIMIT, bytes_max: int = _NO_LIMIT) -> Iterator[RecordChunk]:
        """Stretch by stretch, until the end or until these many records or bytes were found."""
        least = 1  # one record in any case, however large
        while self.cursor < self.last and count_max > 0 and bytes_max > 0:
            found = self._read_chunk(count_max, bytes_max, least)
            if found is None:
                return
            count_max -= len(found.rows)
            bytes_max = 0 if found.is_full else bytes_max - int(_row_sizes(found.rows).sum())
            least = 0 if len(found.rows) else least
            self.cursor = found.next_from_seq
            self.counts = self.counts + found.counts
            last = [found]
            del found  # it is the reader's alone: one that is slow may hold this pass for long
            yield last.pop()

    def _read_chunk(
        self, count_max: int, bytes_max: int, least: int, *, tries_left: int = _RELOAD_TRIES
    ) -> RecordChunk | None:
        first = self.cursor + 1
        core = self._core
        with core.lock:
            index = core.index
            if index.evict_floor > max(first, self.watermarks.evict_floor):
                return None  # overtaken by eviction: the next page tells of it
            live = min(max(index.earliest, first), self.last + 1)  # what lies below was deleted
            found = next(index.slices(live, self.last + 1), None)
            gone: BoolArray | None = None
            look: Callable[[], Chunk] | None = None
            base, start, stop = 0, self.last + 1, self.last + 1
            if found is not None:
                part, start, stop = found
                base = part.base
                stop = min(stop, start + max(count_max, 64))
                dead = part.deleted_mask()
                gone = None if dead is None else dead[start - part.base : stop - part.base].copy()
                look = part.reader(start, stop, min(bytes_max, self.chunk_bytes))
            counts = self._count_missing(first, start)
        if look is None:
            return RecordChunk(empty_rows(), np.zeros(0, bool), counts, self.last, is_full=False)
        try:
            chunk = look()
        except Corrupt as bad:
            if tries_left and found is not None and _reload_if_removed(core, found[0]):
                return self._read_chunk(count_max, bytes_max, least, tries_left=tries_left - 1)
            core.report_corruption(f"{bad.where}, byte {bad.pos}", bad.reason)
            raise
        if chunk.fault is not None and tries_left and found is not None and _reload_if_removed(core, found[0]):
            return self._read_chunk(count_max, bytes_max, least, tries_left=tries_left - 1)
        if chunk.fault is not None and not len(chunk.rows):
            fault = chunk.fault
            core.report_corruption(f"segment {base}, byte {fault.pos}", fault.reason)
            error = Corrupt(f"{core.name}: segment {base}", pos=fault.pos, reason=fault.reason)
            error.seq, error.resume = fault.seq, fault.resume
            raise error
        rows, stop = chunk.rows, min(chunk.next_seq, stop)
        if chunk.fault is not None:
            stop = min(stop, chunk.fault.seq)
        return self._select_rows(rows, gone, start, stop, counts, count_max, bytes_max, least)

    def _select_rows(
        self,
        rows: Rows,
        gone: BoolArray | None,
        start: int,
        stop: int,
        counts: Counts,
        count_max: int,
        bytes_max: int,
        least: int,
    ) -> RecordChunk:
        """The rows that a reader gets, and how far that is."""
        if (
            gone is None
            and not (self._nodes and rows.node is not None)
            and _fits_limits(rows, start, stop, count_max, bytes_max)
        ):
            # Nearly always: nothing has to be left out.
            return RecordChunk(
                rows,
                (segment_index.record_flags(rows) & segment_index.JSON) != 0,
                counts + Counts(rows=len(rows)),
                stop - 1,
                is_full=False,
            )
        seqs = rows.seq - start
        keep: BoolArray = np.ones(len(rows), bool) if gone is None else ~gone[seqs]
        filtered: BoolArray = np.zeros(len(rows), bool)
        if self._nodes and rows.node is not None:
            filtered = keep & _rows_of_nodes(rows, self._nodes)
            keep &= ~filtered
        which = np.flatnonzero(keep)
        fits = max(int(np.searchsorted(np.cumsum(_row_sizes(rows)[which]), bytes_max, "right")), least)
        most = min(fits, count_max)
        full = fits < len(which)
        if most < len(which) or 0 < count_max == len(which):  # what is passed over behind the last is the next page's
            stop = start + (int(seqs[which[most - 1]]) + 1 if most else int(seqs[which[0]]))
            which = which[:most]
        inside = seqs < stop - start
        if int(inside.sum()) != stop - start:
            raise Corrupt(
                self._core.name, pos=0, reason=f"seqs {start} to {stop - 1} are not all where their index says"
            )
        hidden = int(filtered[inside].sum())
        deleted = stop - start - len(which) - hidden
        picked = rows if len(which) == len(rows) else rows.take(which)
        return RecordChunk(
            picked,
            (segment_index.record_flags(picked) & segment_index.JSON) != 0,
            counts + Counts(rows=len(which), deleted=deleted, filtered=hidden),
            stop - 1,
            full,
        )


def _reload_if_removed(topic: TopicState, part: Part) -> bool:
    """For a reader beside a writer: take the topic as it is on disk now, if files of this part of it are gone. They
    were removed on purpose, or a second look finds them missing as well."""
    look, disk = topic.context.reload_topics, topic.context.disk
    if look is None or not isinstance(part, Segment):
        return False
    if all(disk.stat(part.files.path(part.base, suffix)) is not None for suffix in (".data", ".idx")):
        return False
    _adopt_reloaded(topic, look())
    return True


def _adopt_reloaded(topic_state: TopicState, topics: Mapping[str, TopicState]) -> None:
    """Make a reader's topic what a second look at the directory has found of it."""
    fresh = next((topic for topic in topics.values() if topic.id == topic_state.id), None)
    with topic_state.lock:
        topic_state.context.wal_files_synced = False
        if fresh is None:
            topic_state.is_dropped = True
        else:
            topic_state.index, topic_state.config = fresh.index, fresh.config
    topic_state.check_open()


def _fits_limits(rows: Rows, start: int, stop: int, count_max: int, bytes_max: int) -> bool:
    """Whether these are all seqs of [start, stop), and no more than asked for."""
    count = len(rows)
    if not 0 < count == stop - start <= count_max or int(_row_sizes(rows).sum()) > bytes_max:
        return False
    return bool(rows.seq[0] == start) and bool(rows.seq[-1] == stop - 1)


def _row_sizes(rows: Rows) -> Ints:
    """Bytes of data and meta."""
    return rows.data.size if rows.meta is None else rows.data.size + rows.meta.size


def _rows_of_nodes(rows: Rows, nodes: ExcludedNodes) -> BoolArray:
    assert rows.node is not None, "asked of rows with nodes"
    found = pc.is_in(to_binary_array(rows.buf, rows.node), pa.array(sorted(nodes), pa.binary()))
    mask: BoolArray = found.to_numpy(zero_copy_only=False).astype(bool)
    return mask & (rows.node.size > 0)


def parse_nodes(node: str | Sequence[str] | None) -> frozenset[bytes]:
    """The nodes whose records a reader does not want: its own, usually."""
    if node is None:
        return frozenset()
    names = [node] if isinstance(node, str) else node
    if not isinstance(names, list | tuple | set | frozenset) or not all(map(is_utf8_text, names)):
        raise BadInput("a node is text, or a list of texts; nothing was read")
    return frozenset(name.encode() for name in names if name)


def read_page(
    topic: TopicState, from_seq: int, limit: int, nodes: ExcludedNodes, bytes_max: int, *, strong: bool = False
) -> Page:
    """The next records behind `from_seq`, at most `limit` and about `bytes_max`, at least one where there is one."""
    check_int("limit", limit, 1, SEQ_MAX)
    check_int("bytes_max", bytes_max, 1, SEQ_MAX)
    scan = TopicScan(topic, from_seq, nodes, strong=strong)
    records = [record for stretch in scan.iter_chunks(limit, bytes_max) for record in chunk_records(stretch)]
    retention.persist_gap_floor(topic, scan.gap, scan.watermarks.evict_floor)
    return Page(records, scan.gap, scan.cursor, scan.head, scan.earliest, scan.counts)


def chunk_records(stretch: RecordChunk) -> list[Record]:
    rows, json = stretch.rows, stretch.json
    if not len(rows):
        return []
    datas: list[Any] = copy_values(rows.buf, rows.data)
    try:
        if json.all():
            datas = list(map(from_json, datas))
        elif json.any():
            datas = [from_json(data) if is_json else data for data, is_json in zip(datas, json.tolist(), strict=True)]
    except msgspec.DecodeError as error:
        raise Corrupt(
            "a record", pos=0, reason=f"its checksum holds and it is not the JSON it claims to be: {error}"
        ) from None
    columns = [rows.seq.tolist(), (rows.ts_us // 1000).tolist(), datas]
    if rows.node is None and rows.tag is None and rows.meta is None:
        return list(map(Record, *columns))
    metas = _optional_values(rows, rows.meta, from_json)
    return list(
        map(
            Record,
            *columns,
            _optional_values(rows, rows.tag, _decode_text),
            _optional_values(rows, rows.node, _decode_text),
            metas,
        )
    )


def _decode_text(name: bytes) -> str:
    return name.decode()


def _optional_values(rows: Rows, span: Span | None, decode: Callable[[bytes], Any]) -> list[Any]:
    """The values of a column that a record may lack."""
    return [None] * len(rows) if span is None else [decode(v) if v else None for v in copy_values(rows.buf, span)]


def read_table(
    topic: TopicState, from_seq: int, to_seq: int | None, nodes: ExcludedNodes, *, strong: bool = False
) -> pa.Table:
    """Everything behind `from_seq` up to `to_seq` as columns. What is missing is in the schema's metadata: `gap`, the
    first, `gaps`, all of them, and `counts`, as JSON."""
    scan = TopicScan(topic, from_seq, nodes, to_seq, pass_gaps=True, strong=strong)
    batches = []
    for stretch in scan.iter_chunks():
        if len(stretch.rows):
            batch = to_arrow(stretch.rows)
            batches.append(batch.append_column("json", pa.array(stretch.json)))
    retention.persist_gap_floor(topic, scan.gap, scan.watermarks.evict_floor)
    told = {
        b"gap": msgspec.json.encode(None if scan.gap is None else scan.gap._asdict()),
        b"gaps": msgspec.json.encode([gap._asdict() for gap in scan.gaps]),
        b"counts": msgspec.json.encode(scan.counts._asdict()),
    }
    return pa.Table.from_batches(batches, schema=SCHEMA).replace_schema_metadata(told)


def wait_for_page(
    topic: TopicState,
    from_seq: int,
    limit: int,
    nodes: ExcludedNodes,
    bytes_max: int,
    timeout: float | None,
    *,
    strong: bool = False,
) -> Page:
    """`page`, and where there is nothing yet, wait for it this many seconds; None: as long as it takes.

    A writer in this process wakes the reader. A reader beside another process's writer looks at the WAL's files every
    `BESIDE_POLL_S`, and at the directory where they have changed."""
    if timeout == 0:
        return read_page(topic, from_seq, limit, nodes, bytes_max, strong=strong)
    woken, left = Event(), timeout
    topic.add_listener(woken.set)  # before the first look: a record between look and wait must not be missed
    try:
        while True:
            woken.clear()
            found = read_page(topic, from_seq, limit, nodes, bytes_max, strong=strong)
            if found.records or found.gap or not found.caught_up or found.next_from_seq > from_seq:
                return found
            if topic.context.reload_topics is None:
                if not woken.wait(timeout):
                    return found
                continue
            if left is not None and left <= 0:
                return found
            pause = READER_POLL_S if left is None else min(left, READER_POLL_S)
            woken.wait(pause)
            left = None if left is None else left - pause
            _reload_if_changed(topic)
    finally:
        topic.remove_listener(woken.set)


def _reload_if_changed(topic: TopicState) -> None:
    """Take over what a writer of another process has done to a reader's topic since the last look."""
    shared = topic.context
    assert shared.reload_topics is not None, "asked of a reader"
    topic.check_open()
    if topic.wal_watch is None:
        topic.wal_watch = WalWatch(shared.disk, shared.root)
    if topic.wal_watch.changed():
        try:
            topics = shared.reload_topics()
        except Unavailable:  # the writer was faster than the look
            topic.wal_watch.report_change_again()
            return
        _adopt_reloaded(topic, topics)


def follow_records(
    topic: TopicState,
    from_seq: int,
    nodes: ExcludedNodes,
    timeout: float | None,
    on_gap: OnGap,
    *,
    strong: bool = False,
) -> Iterator[Record | Gap]:
    """Records as they come, for ever or until none came for `timeout` seconds."""
    if on_gap not in ("fail", "emit", "skip"):
        raise BadInput(f"on_gap is fail, emit or skip, not {on_gap!r}")
    while True:
        found = wait_for_page(topic, from_seq, 1000, nodes, 1 << 20, timeout, strong=strong)
        if found.gap is not None and on_gap == "fail":
            raise GapFound(topic.name, found.gap)
        if found.gap is not None and on_gap == "emit":
            yield found.gap
        if found.next_from_seq == from_seq and found.gap is None:
            return
        from_seq = found.next_from_seq
        yield from found.records
