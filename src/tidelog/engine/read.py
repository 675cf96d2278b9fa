"""Reading a topic: pages of records or of columns, waiting for new ones, and strong consistency.

A page is read part by part. What is needed of a part is taken under the topic's lock; reading and decoding happen
without it, so a long read blocks no writer. Every seq of a page's range is accounted for: delivered, deleted, expired,
evicted, filtered, or a hole.

A read-only engine beside a writer replays the WAL to see new records. A waiting read does so only after `WalWatch`
found that names, sizes or times of the WAL files changed: everything a writer does is a frame in the WAL.

A strong reader sees nothing that a power cut could take back:

    append ──► published: acked under its class, seen by eventual readers
                  └──► synced, by the interval or because a strong reader asks ──► seen by strong readers

A topic is strong by its config, for all its readers; a watch session can be strong for itself. A strong read first
makes the published records durable, with one sync for all waiting readers, and delivers up to there. If the disk
refuses, it delivers what was durable before. A record of class `fsync` is durable when it is published. Copies made by
routers are records of their target topic, logged in its shard, and follow the same rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from threading import Event
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec
import numpy as np
import pyarrow as pa

from tidelog.commitlog.codec import Chunk
from tidelog.disk.interface import Disk, Stat, join
from tidelog.engine import retention, topic_index
from tidelog.engine.batch_encoder import check_int, from_json, is_utf8_text
from tidelog.engine.config import Durability
from tidelog.engine.context import WAL_DIR, EngineContext
from tidelog.engine.large_read import RecordReader, large_data, open_blob
from tidelog.engine.manifest import ColdRow
from tidelog.engine.results import Counts, Page, Record
from tidelog.engine.segment import BoolArray, Part, Segment
from tidelog.engine.topic_index import Gap
from tidelog.engine.topic_state import TopicState
from tidelog.engine.topic_table import TopicTable
from tidelog.errors import BadInput, Corrupt, Error, RecordNotFound, Unavailable
from tidelog.formats import large_record, segment_index
from tidelog.formats import lazy_compute as pc
from tidelog.formats import rows as columns_of
from tidelog.formats.frame import SEQ_MAX
from tidelog.formats.rows import Rows, Span, copy_values, empty_rows, to_binary_array, to_column
from tidelog.times import Seconds, seconds
from tidelog.wal import Shard, paths

# ── strong consistency ────────────────────────────────────────────────────────────────────────

Consistency: TypeAlias = Literal["eventual", "strong"]


def needs_durable_records(topic: TopicState, strong: bool = False) -> bool:
    """Whether a reader gets durable records only: by its own request or by the topic's config."""
    return strong or topic.config.consistency == "strong"


def check_strong_durability(name: str, durability: Durability) -> None:
    """Raise BadInput for a strong reader of a topic whose class does not survive a power cut."""
    if durability in ("memory", "ephemeral"):
        raise BadInput(
            f"{name} has the class {durability}, which promises nothing after a power cut: strong readers cannot be "
            "served; nothing was read, use the class disk or fsync, or consistency eventual"
        )


def is_durable_to_head(topic: TopicState, strong: bool = False) -> bool:
    """Whether a read needs no sync first."""
    return (
        not needs_durable_records(topic, strong) or topic.durable_seq >= topic.index.head or _is_durable_by_class(topic)
    )


def make_durable(topic: TopicState) -> int:
    """Sync published records and return the last seq that a strong reader may see. Blocks on the disk. Raises BadInput
    where the topic's class rules it out."""
    check_strong_durability(topic.name, topic.config.durability)
    topic.context.strong_topics.add(topic)
    head = topic.index.head
    if topic.durable_seq < head and _is_durable_by_class(topic):
        topic.durable_seq = head
    if topic.durable_seq >= head:
        return topic.durable_seq
    with topic.sync_lock:
        head, context = topic.index.head, topic.context
        if topic.durable_seq < head and (_sync(topic.shard) if context.shards else _sync_files(context)):
            topic.durable_seq = max(topic.durable_seq, head)
    return topic.durable_seq


def heads_before_sync(context: EngineContext) -> list[tuple[TopicState, int]]:
    """Return the heads of topics with strong readers, before an interval sync."""
    for topic in [topic for topic in tuple(context.strong_topics) if topic.is_dropped]:
        context.strong_topics.discard(topic)
    return [(topic, topic.index.head) for topic in tuple(context.strong_topics)]


def on_interval_synced(heads: Sequence[tuple[TopicState, int]]) -> None:
    """Mark what was published before an interval sync as durable, where the shard did not fail."""
    for topic, head in heads:
        if not topic.shard.is_latched:
            topic.durable_seq = max(topic.durable_seq, head)


def require_durable(topic: TopicState, seqs: Sequence[int]) -> None:
    """Make these records durable before they are delivered. Raises where the disk refuses."""
    if seqs and max(seqs) > make_durable(topic):
        raise not_durable_error(topic)


def not_durable_error(topic: TopicState) -> Error:
    """The error for published records that cannot be shown to a strong reader."""
    try:
        if topic.context.shards:
            topic.shard.check_writable()
    except Error as error:
        return error
    return Unavailable(
        f"{topic.name}: records after {topic.durable_seq} could not be made durable, and its readers are strong; "
        "nothing was read, retry later"
    )


def _is_durable_by_class(topic: TopicState) -> bool:
    """Whether every published record is durable because its ack waited for a sync."""
    return topic.is_durable and bool(topic.context.shards)


def _sync(shard: Shard) -> bool:
    with suppress(Error):  # durable records stay readable on a failing disk
        return shard.sync() and not shard.is_latched
    return False


def _sync_files(context: EngineContext) -> bool:
    """Sync the WAL files for a read-only engine beside the writer, so that what it replayed is durable. Once is enough:
    such an engine sees the state at open time."""
    if not context.wal_files_synced:
        wal = join(context.root, WAL_DIR)
        try:
            for key in paths.list_shard_keys(context.disk, wal):
                directory = paths.shard_directory(wal, key)
                for number in paths.list_file_numbers(context.disk, directory):
                    with suppress(FileNotFoundError):  # removed: a checkpoint has its records
                        file = context.disk.open(paths.file_path(directory, number))
                        try:
                            file.sync()
                        finally:
                            file.close()
        except OSError:
            return False
        context.wal_files_synced = True
    return True


# ── reading ───────────────────────────────────────────────────────────────────────────────────


def iter_wal_files(disk: Disk, root: str) -> Iterator[tuple[str, Stat | None]]:
    """Yield every WAL file of a data directory with its stat; None: removed meanwhile."""
    wal = join(root, WAL_DIR)
    for directory in (paths.shard_directory(wal, key) for key in paths.list_shard_keys(disk, wal)):
        for file in (paths.file_path(directory, number) for number in paths.list_file_numbers(disk, directory)):
            yield file, disk.stat(file)


class WalWatch:
    """Detects changes of the WAL files by their names, sizes and times, without reading them."""

    def __init__(self, disk: Disk, root: str) -> None:
        self._disk, self._root = disk, root
        self._seen = self._list_files()
        self._is_stable = False

    def changed(self) -> bool:
        """Return whether the writer did something since the last call.

        True at the first call, and once more after the last change: file times are coarser than writes.
        """
        now = self._list_files()
        moved = now != self._seen
        changed = moved or not self._is_stable
        self._seen, self._is_stable = now, not moved
        return changed

    def report_change_again(self) -> None:
        """Let the next call return True: the change could not be read."""
        self._is_stable = False

    def _list_files(self) -> list[tuple[str, Stat | None]]:
        return list(iter_wal_files(self._disk, self._root))


OnGap: TypeAlias = Literal["fail", "emit", "skip"]
ExcludedNodes: TypeAlias = frozenset[bytes]  # nodes whose records a reader excludes
_CHUNK_BYTES = 8 << 20
_NO_LIMIT = 1 << 62
READER_POLL_S = 0.2
_RELOAD_TRIES = 8  # while a writer changes the directory
SCHEMA = columns_of.SCHEMA.append(pa.field("json", pa.bool_()))


class RecordChunk(NamedTuple):
    """Live records of one part, and the counts of the seqs passed."""

    rows: Rows
    json: BoolArray
    counts: Counts
    next_from_seq: int
    is_full: bool  # the next record exceeds the budget


class TopicScan:
    """One pass over a topic from a cursor to the head at the start.

    It ends before seqs of records that a router's source lost; the next pass starts with that gap. With `pass_gaps` it
    continues after them: `gap` is the first of them and `gaps` are all.
    """

    chunk_bytes = _CHUNK_BYTES  # frame bytes per read

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
        durable = make_durable(topic) if needs_durable_records(topic, strong) else SEQ_MAX
        if to_seq is not None and durable < min(to_seq, topic.index.head):
            raise not_durable_error(topic)  # a range is read completely or not at all
        self._topic = topic
        self._nodes = nodes if topic.config.dedupe_node else frozenset()
        with topic.lock:
            topic.check_open()
            index = topic.index
            self.earliest, self.watermarks = index.earliest, index.watermarks
            # A strong reader's head is the last durable record; a cursor beyond it is still valid.
            self.head = min(index.head, max(durable, from_seq, index.earliest - 1))
            start = topic_index.find_read_start(
                from_seq, self.head, self.earliest, self.watermarks, index.trimmed_ranges
            )
            self.gap = self._start_gap = start.gap
            self.cursor = max(start.cursor, 0)
            self.head = max(self.head, self.cursor)  # also if a gap reaches beyond the durable records
            self.counts = self._count_below_start(
                0 if self.gap and self.gap.reason == "recreated" else from_seq, self.cursor
            )
            next_trim = topic_index.next_trimmed_range(self.cursor, index.trimmed_ranges)
            trims = topic_index.trimmed_ranges_after(self.cursor, index.trimmed_ranges) if pass_gaps else []
        self.last = self.head if to_seq is None else min(to_seq, self.head)
        self._trims = [span for span in trims if span[0] <= self.last]
        if self._trims and self.gap is None:
            self.gap = self._trim_gap(*self._trims[0])
        if next_trim is not None and not pass_gaps:
            self.last = max(min(self.last, next_trim[0] - 1), self.cursor)

    @property
    def gaps(self) -> list[Gap]:
        """Losses among the seqs passed so far, in order."""
        gaps = [] if self._start_gap is None else [self._start_gap]
        return gaps + [self._trim_gap(*span) for span in self._trims if span[0] <= self.cursor]

    def _trim_gap(self, lo: int, hi: int) -> Gap:
        return Gap(lo, hi - 1, "source_trim", hi - lo, hi, self.head)

    def _count_below_start(self, lo: int, hi: int) -> Counts:
        """Count the seqs (lo, hi] below the first live one by their cause."""
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
        """Count the unreadable seqs [first, stop): deleted, lost at the source, or holes."""
        if first >= stop:
            return Counts()
        assigned = self._topic.index.count_assigned(first, stop)
        lost = sum(max(min(hi, stop) - max(lo, first), 0) for lo, hi in self._topic.index.trimmed_ranges)
        return Counts(deleted=assigned, evicted=lost, holes=stop - first - assigned - lost)

    def iter_chunks(self, count_max: int = _NO_LIMIT, bytes_max: int = _NO_LIMIT) -> Iterator[RecordChunk]:
        """Yield chunks until the end, or until this many records or bytes were found."""
        count_min = 1  # at least one record, however large
        while self.cursor < self.last and count_max > 0 and bytes_max > 0:
            chunk = self._read_chunk(count_max, bytes_max, count_min)
            if chunk is None:
                return
            count_max -= len(chunk.rows)
            bytes_max = 0 if chunk.is_full else bytes_max - int(chunk.rows.record_bytes().sum())
            count_min = 0 if len(chunk.rows) else count_min
            self.cursor = chunk.next_from_seq
            self.counts = self.counts + chunk.counts
            last = [chunk]
            del chunk  # only the reader refers to it: a slow one may keep this pass for long
            yield last.pop()

    def _read_chunk(
        self, count_max: int, bytes_max: int, count_min: int, *, tries_left: int = _RELOAD_TRIES
    ) -> RecordChunk | None:
        first = self.cursor + 1
        topic = self._topic
        with topic.lock:
            index = topic.index
            if index.evict_floor > max(first, self.watermarks.evict_floor):
                return None  # overtaken by eviction: the next page has the gap
            live = min(max(index.earliest, first), self.last + 1)  # records below it were deleted
            found = next(index.slices(live, self.last + 1), None)
            deleted: BoolArray | None = None
            read: Callable[[], Chunk] | None = None
            cold: ColdRow | None = None
            base, start, stop = 0, self.last + 1, self.last + 1
            if found is not None:
                part, start, stop = found
                base = part.base
                stop = min(stop, start + max(count_max, 64))
                mask = found._replace(stop=stop).deleted()
                deleted = None if mask is None else mask.copy()
                cold = part.cold if isinstance(part, Segment) else None
                read = part.reader(start, stop, min(bytes_max, self.chunk_bytes))
            counts = self._count_missing(first, start)
        if read is None:
            return RecordChunk(empty_rows(), np.zeros(0, bool), counts, self.last, is_full=False)
        try:
            chunk = read()
        except Corrupt as bad:
            is_stale = found is not None and (
                _was_replaced(topic, found.part, cold) or _reload_if_removed(topic, found.part)
            )
            if tries_left and is_stale:
                return self._read_chunk(count_max, bytes_max, count_min, tries_left=tries_left - 1)
            topic.report_corruption(f"{bad.where}, byte {bad.pos}", bad.reason)
            raise
        if chunk.fault is not None and tries_left and found is not None and _reload_if_removed(topic, found[0]):
            return self._read_chunk(count_max, bytes_max, count_min, tries_left=tries_left - 1)
        if chunk.fault is not None and not len(chunk.rows):
            fault = chunk.fault
            topic.report_corruption(f"segment {base}, byte {fault.pos}", fault.reason)
            error = Corrupt(f"{topic.name}: segment {base}", pos=fault.pos, reason=fault.reason)
            error.seq, error.resume = fault.seq, fault.resume
            raise error
        rows, stop = chunk.rows, min(chunk.next_seq, stop)
        if chunk.fault is not None:
            stop = min(stop, chunk.fault.seq)
        return self._select_rows(rows, deleted, start, stop, counts, count_max, bytes_max, count_min)

    def _select_rows(
        self,
        rows: Rows,
        deleted: BoolArray | None,
        start: int,
        stop: int,
        counts: Counts,
        count_max: int,
        bytes_max: int,
        count_min: int,
    ) -> RecordChunk:
        """Select the rows that a reader gets, and how far that reaches."""
        if (
            deleted is None
            and not (self._nodes and rows.node is not None)
            and _fits_limits(rows, start, stop, count_max, bytes_max)
        ):
            # The common case: no row is left out.
            return RecordChunk(
                rows,
                (segment_index.record_flags(rows) & segment_index.JSON) != 0,
                counts + Counts(rows=len(rows)),
                stop - 1,
                is_full=False,
            )
        seqs = rows.seq - start
        keep: BoolArray = np.ones(len(rows), bool) if deleted is None else ~deleted[seqs]
        filtered: BoolArray = np.zeros(len(rows), bool)
        if self._nodes and rows.node is not None:
            filtered = keep & _rows_of_nodes(rows, self._nodes)
            keep &= ~filtered
        which = np.flatnonzero(keep)
        fits = max(int(np.searchsorted(np.cumsum(rows.record_bytes()[which]), bytes_max, "right")), count_min)
        taken = min(fits, count_max)
        full = fits < len(which)
        if taken < len(which) or 0 < count_max == len(which):  # skipped seqs after the last row belong to the next page
            stop = start + (int(seqs[which[taken - 1]]) + 1 if taken else int(seqs[which[0]]))
            which = which[:taken]
        inside = seqs < stop - start
        if int(inside.sum()) != stop - start:
            raise Corrupt(
                self._topic.name, pos=0, reason=f"seqs {start} to {stop - 1} are not all where the index says"
            )
        filtered_count = int(filtered[inside].sum())
        deleted_count = stop - start - len(which) - filtered_count
        picked = rows if len(which) == len(rows) else rows.take(which)
        return RecordChunk(
            picked,
            (segment_index.record_flags(picked) & segment_index.JSON) != 0,
            counts + Counts(rows=len(which), deleted=deleted_count, filtered=filtered_count),
            stop - 1,
            full,
        )


def _was_replaced(topic: TopicState, part: Part, cold: ColdRow | None) -> bool:
    """Whether a rewrite or a recall has given a segment, which was in the cold tier, other files since: its object may
    be deleted."""
    if not isinstance(part, Segment) or cold is None:
        return False
    with topic.lock:
        return part not in topic.index.parts or part.cold is not cold


def _reload_if_removed(topic: TopicState, part: Part) -> bool:
    """In a read-only engine: reload the topic from disk if files of this part are gone. The writer removed them, or a
    second read finds them missing as well."""
    reload, disk = topic.context.reload_topics, topic.context.disk
    if reload is None or not isinstance(part, Segment):
        return False
    if all(disk.stat(part.path(suffix)) is not None for suffix in (".data", ".idx")):
        return False
    if part.cold is not None and disk.stat(part.path(".idx")) is not None and _has_object(topic, part.cold):
        return False
    _adopt_reloaded(topic, reload())
    return True


def _has_object(topic: TopicState, row: ColdRow) -> bool:
    store = topic.context.cold.store
    return bool(row.key) and store is not None and store.exists(row.key)


def _adopt_reloaded(topic_state: TopicState, topics: TopicTable) -> None:
    """Replace a read-only topic by its reloaded state."""
    reloaded = topics.get(topic_state.name)
    if reloaded is not None and reloaded.id != topic_state.id:
        reloaded = None
    with topic_state.lock:
        topic_state.context.wal_files_synced = False
        if reloaded is None:
            topic_state.is_dropped = True
        else:
            topic_state.index, topic_state.config = reloaded.index, reloaded.config
    topic_state.check_open()


def _fits_limits(rows: Rows, start: int, stop: int, count_max: int, bytes_max: int) -> bool:
    """Whether these rows are all seqs of [start, stop) and within the limits."""
    count = len(rows)
    if not 0 < count == stop - start <= count_max or int(rows.record_bytes().sum()) > bytes_max:
        return False
    return bool(rows.seq[0] == start) and bool(rows.seq[-1] == stop - 1)


def _rows_of_nodes(rows: Rows, nodes: ExcludedNodes) -> BoolArray:
    assert rows.node is not None, "only for rows with nodes"
    matches = pc.is_in(to_binary_array(rows.buf, rows.node), pa.array(sorted(nodes), pa.binary()))
    mask: BoolArray = matches.to_numpy(zero_copy_only=False).astype(bool)
    return mask & (rows.node.size > 0)


def parse_nodes(node: str | Sequence[str] | None) -> frozenset[bytes]:
    """Return the nodes whose records a reader excludes, usually its own."""
    if node is None:
        return frozenset()
    names = [node] if isinstance(node, str) else node
    if not isinstance(names, list | tuple | set | frozenset) or not all(map(is_utf8_text, names)):
        raise BadInput("a node is text, or a list of texts; nothing was read")
    return frozenset(name.encode() for name in names if name)


def read_page(
    topic: TopicState,
    from_seq: int,
    limit: int,
    nodes: ExcludedNodes,
    bytes_max: int,
    *,
    to_seq: int | None = None,
    strong: bool = False,
) -> Page:
    """Read the records after `from_seq`, up to `to_seq`: at most `limit` and about `bytes_max`, at least one if there
    is one."""
    check_int("limit", limit, 1, SEQ_MAX)
    check_int("bytes_max", bytes_max, 1, SEQ_MAX)
    scan = TopicScan(topic, from_seq, nodes, to_seq, strong=strong)
    records = [record for chunk in scan.iter_chunks(limit, bytes_max) for record in chunk_records(topic, chunk)]
    retention.persist_gap_floor(topic, scan.gap, scan.watermarks.evict_floor)
    return Page(records, scan.gap, scan.cursor, scan.head, scan.earliest, scan.counts)


def chunk_records(topic: TopicState, chunk: RecordChunk) -> list[Record]:
    """Return the records of a chunk as objects; the data of a large one is a LargeData."""
    rows, json = chunk.rows, chunk.json
    if not len(rows):
        return []
    datas: list[Any] = copy_values(rows.buf, rows.data)
    try:
        if json.all():
            datas = list(map(from_json, datas))
        elif json.any():
            datas = [from_json(data) if is_json else data for data, is_json in zip(datas, json.tolist(), strict=True)]
    except msgspec.DecodeError as error:
        raise Corrupt("a record", pos=0, reason=f"its checksum is valid, but it is not JSON: {error}") from None
    for place in () if rows.blob_bytes is None else np.flatnonzero(rows.blob_bytes).tolist():
        ref = large_record.read_ref(rows.buf, int(rows.frame_pos[place]))
        datas[place] = large_data(topic, int(rows.seq[place]), ref)
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
    """Return the values of an optional column."""
    return [None] * len(rows) if span is None else [decode(v) if v else None for v in copy_values(rows.buf, span)]


def find_record(topic: TopicState, seq: int, *, strong: bool = False) -> RecordChunk:
    """Return one record as a chunk. Raises RecordNotFound."""
    check_int("seq", seq, 1, SEQ_MAX)
    scan = TopicScan(topic, seq - 1, frozenset(), strong=strong)
    if scan.cursor == seq - 1:
        for chunk in scan.iter_chunks(1):
            if len(chunk.rows) and int(chunk.rows.seq[0]) == seq:
                return chunk
            break
    retention.persist_gap_floor(topic, scan.gap, scan.watermarks.evict_floor)
    raise RecordNotFound(topic.name, seq=seq, earliest_seq=scan.earliest, head_seq=scan.head)


def open_record(topic: TopicState, seq: int, *, strong: bool = False) -> RecordReader:
    """Open the data of a record as a file: from its blob, or from memory where it is not large."""
    rows = find_record(topic, seq, strong=strong).rows
    if rows.blob_bytes is not None and rows.blob_bytes[0]:
        return open_blob(topic, seq, large_record.read_ref(rows.buf, int(rows.frame_pos[0])))
    return RecordReader.from_bytes(copy_values(rows.buf, rows.data)[0])


def stored_batch(chunk: RecordChunk, columns: Sequence[str] | None = None) -> pa.RecordBatch:
    """Return a chunk as an Arrow batch of `SCHEMA`, or of these columns of it."""
    schema = SCHEMA if columns is None else pa.schema([SCHEMA.field(name) for name in columns])
    arrays = [pa.array(chunk.json) if name == "json" else to_column(chunk.rows, name) for name in schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def read_stored_data(topic: TopicState) -> list[bytes]:
    """Return the data of all records of an internal topic."""
    chunks = TopicScan(topic, 0, frozenset()).iter_chunks()
    return [data for chunk in chunks for data in copy_values(chunk.rows.buf, chunk.rows.data)]


def table_metadata(gaps: Sequence[Gap], counts: Counts) -> dict[bytes, bytes]:
    """The metadata of a table of records: what its range lacks, as JSON."""
    return {
        b"gap": msgspec.json.encode(gaps[0]._asdict() if gaps else None),
        b"gaps": msgspec.json.encode([gap._asdict() for gap in gaps]),
        b"counts": msgspec.json.encode(counts._asdict()),
    }


def wait_for_page(
    topic: TopicState,
    from_seq: int,
    limit: int,
    nodes: ExcludedNodes,
    bytes_max: int,
    timeout: Seconds | None,
    *,
    strong: bool = False,
) -> Page:
    """`read_page`, and if there is nothing yet, wait up to `timeout` seconds; None: forever.

    A writer in this process wakes the reader. A read-only engine checks the WAL files every `READER_POLL_S` and reloads
    the directory if they changed.
    """
    timeout = seconds("timeout", timeout)
    if timeout == 0:
        return read_page(topic, from_seq, limit, nodes, bytes_max, strong=strong)
    woken, remaining = Event(), timeout
    topic.add_listener(woken.set)  # before the first read: a record between read and wait must not be missed
    try:
        while True:
            woken.clear()
            page = read_page(topic, from_seq, limit, nodes, bytes_max, strong=strong)
            if page.records or page.gap or not page.caught_up or page.next_from_seq > from_seq:
                return page
            if topic.context.reload_topics is None:
                if not woken.wait(timeout):
                    return page
                continue
            if remaining is not None and remaining <= 0:
                return page
            pause = READER_POLL_S if remaining is None else min(remaining, READER_POLL_S)
            woken.wait(pause)
            remaining = None if remaining is None else remaining - pause
            _reload_if_changed(topic)
    finally:
        topic.remove_listener(woken.set)


def _reload_if_changed(topic: TopicState) -> None:
    """Reload a read-only topic if the writer changed the WAL since the last check."""
    context = topic.context
    assert context.reload_topics is not None, "only in a read-only engine"
    topic.check_open()
    if topic.wal_watch is None:
        topic.wal_watch = WalWatch(context.disk, context.root)
    if topic.wal_watch.changed():
        try:
            topics = context.reload_topics()
        except Unavailable:  # the writer was faster than the reload
            topic.wal_watch.report_change_again()
            return
        _adopt_reloaded(topic, topics)


def check_on_gap(on_gap: OnGap) -> None:
    if on_gap not in get_args(OnGap):
        raise BadInput(f"on_gap is fail, emit or skip, not {on_gap!r}")
