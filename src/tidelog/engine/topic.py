"""The public handle of a topic, and the internal operations that the server uses beside it. Every method may be called
from any thread."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Coroutine, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

import pyarrow as pa

from tidelog import frames
from tidelog.disk.process import DEFER_SIGNALS, defer_signals_in
from tidelog.engine import (
    append,
    batch_encoder,
    blobs,
    compaction,
    delete,
    json_pages,
    large_append,
    producer_batches,
    read,
    retention,
    segment_listing,
    tables,
)
from tidelog.engine import follow as loops
from tidelog.engine.batch_encoder import ArrowBatch, Batch, MultiBatch, check_int, check_text
from tidelog.engine.blobs import BlobFile
from tidelog.engine.compaction import Compacted, FoundRecords, FoundRemoved, SearchRange
from tidelog.engine.config import EngineConfig, TopicConfig
from tidelog.engine.erase import ErasureReceipt
from tidelog.engine.gap_log import GAPS_LIMIT_DEFAULT, GapEntries
from tidelog.engine.groups import Group, GroupList
from tidelog.engine.idempotency import BatchRange
from tidelog.engine.json_pages import BulkScan, JsonPage
from tidelog.engine.large_append import StreamedAppend
from tidelog.engine.large_read import RecordReader
from tidelog.engine.latest import LatestTable
from tidelog.engine.producer import Producer
from tidelog.engine.producer_queue import LINGER_MS, MAX_BYTES, OnError, ProducerBatch
from tidelog.engine.queues.dead_letter import RecordFilter, RedriveResult, redrive_records
from tidelog.engine.queues.queue import Queue
from tidelog.engine.queues.queue_state import get_queue_state
from tidelog.engine.read import ExcludedNodes
from tidelog.engine.results import Appended, Deleted, Page, Record, TopicInfo
from tidelog.engine.retention_preview import RetentionPreview, preview_retention
from tidelog.engine.rewrite import RewriteResult
from tidelog.engine.segment import Segment
from tidelog.engine.segment_listing import SegmentFile, SegmentList, SegmentTableList
from tidelog.engine.topic_index import Gap
from tidelog.engine.topic_state import TopicState
from tidelog.engine.typed import TypedTopic
from tidelog.errors import BadInput, NotAQueue
from tidelog.formats.frame import SEQ_MAX
from tidelog.formats.json_rows import FieldSelection
from tidelog.times import Duration, Seconds, Time, duration_ms, time_ms
from tidelog.types import Buffer
from tidelog.wal import CommitFuture, Shard

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

    from tidelog.datasets import TopicDataset


T = TypeVar("T")


class TopicSize(NamedTuple):
    records: int
    bytes: int
    removals: int


@defer_signals_in("remove_found", "submit")
class TopicOperations:
    """Operations on a topic that are not part of its public API: for an event loop, which must not block, and for a
    caller that drives the commits. The server uses them; `topic_operations` returns those of a topic."""

    __slots__ = ("_state",)

    def __init__(self, topic: TopicState) -> None:
        self._state = topic

    @property
    def shard(self) -> Shard:
        """The WAL shard of its writes."""
        return self._state.shard

    @property
    def is_dropped(self) -> bool:
        return self._state.is_dropped

    @property
    def is_read_only(self) -> bool:
        """Whether it belongs to a reader beside the writer: no listener is called then."""
        return self._state.context.reload_topics is not None

    def record_access(self, *, read: bool = True) -> None:
        """Record an access, to the records or only to the state. Priorities depend on it."""
        self._state.record_access(read=read)

    def size(self) -> TopicSize:
        """Its live records and their bytes, and how many removals there were since it was opened."""
        index = self._state.index
        return TopicSize(index.count, index.bytes, index.removal_count)

    def segment_table(self, *, strong: bool = False, from_seq: int = 0, limit: int | None = None) -> SegmentTableList:
        """`Topic.segments` as columns."""
        return segment_listing.list_segment_table(self._state, strong=strong, from_seq=from_seq, limit=limit)

    @property
    def limits(self) -> EngineConfig:
        """What a record and a write may have."""
        return self._state.context.limits

    def check_writable(self) -> None:
        """Raise why it takes no records, if it takes none."""
        with self._state.lock:
            self._state.check_writable()

    @property
    def has_upstream(self) -> bool:
        """Whether routers write to it."""
        return self._state.upstream is not None

    @property
    def has_routers(self) -> bool:
        """Whether routers write to it or read from it, so that an ack may have to wait for them."""
        return self._state.upstream is not None or bool(self._state.downstream)

    # ── writing ───────────────────────────────────────────────────────────────────────────────

    def submit(
        self, batch: Batch | ArrowBatch, key: str | None = None, *, durable: bool = False
    ) -> CommitFuture[Appended]:
        """`append` of a prepared batch, without waiting and without waking the writer thread. Blocks if records have
        to expire first (`needs_expiry`). `durable`: as for `append.submit_write`."""
        return append.submit_write(self._state, batch, key, durable=durable)

    def begin_stream(
        self,
        *,
        tag: str | None = None,
        node: str | None = None,
        meta: dict[str, Any] | None = None,
        key: str | None = None,
        length: int | None = None,
        durable: bool = False,
    ) -> StreamedAppend:
        """Begin a streamed record; `length`, if it is known, is checked at once. Its methods block on the disk."""
        return StreamedAppend(self._state, tag=tag, node=node, meta=meta, key=key, length=length, durable=durable)

    def begin_compaction_search(self) -> SearchRange:
        """Close the active segment and return what a search for replaced records outside of the engine has to read."""
        return compaction.begin_search(self._state)

    def remove_found(self, found: FoundRecords, *, actor: str | None = None) -> FoundRemoved:
        """Remove what such a search has found, by the rules of `Topic.compact`."""
        return compaction.remove_found(self._state, found, actor=actor)

    def blob_files(self) -> list[BlobFile]:
        """List the blob files of its live large records, by seq."""
        return blobs.list_blob_files(self._state)

    @property
    def needs_expiry(self) -> bool:
        """Whether a write would first have to make an expiry durable, which blocks on the disk."""
        return retention.needs_expiry(self._state)

    @property
    def has_no_write_limits(self) -> bool:
        """Whether a write is accepted regardless of the topic's size: no rejecting cap, no ttl, no quota."""
        config = self._state.config
        return config.discard == "old" and not config.ttl_ms and not self._state.context.limits.total_bytes_max

    # ── reading ───────────────────────────────────────────────────────────────────────────────

    def read_json(
        self,
        from_seq: int,
        limit: int,
        bytes_max: int,
        *,
        nodes: ExcludedNodes = frozenset(),
        show: FieldSelection,
        to_seq: int | None = None,
        strong: bool = False,
    ) -> JsonPage:
        """`read`, with records as JSON text that is ready to be sent."""
        return json_pages.read_json_page(
            self._state, from_seq, limit, nodes, bytes_max, show, to_seq=to_seq, strong=strong
        )

    def read_cached_json(self, from_seq: int, limit: int, bytes_max: int, *, strong: bool = False) -> JsonPage | None:
        """`read_json` with all fields, if the records are plain JSON data in memory. None decides nothing: ask
        `can_read_without_blocking`, or read."""
        return json_pages.read_cached_page(self._state, from_seq, limit, bytes_max, strong=strong)

    def can_read_without_blocking(
        self, from_seq: int, limit: int = 0, bytes_max: int = 0, *, strong: bool = False
    ) -> bool:
        """Whether `read_json` from here needs memory alone. Without a limit, or for a reader that excludes nodes:
        whether the records are in memtables."""
        return json_pages.can_read_without_blocking(self._state, from_seq, limit, bytes_max, strong=strong)

    def scan(
        self,
        from_seq: int = 0,
        to_seq: int | None = None,
        *,
        nodes: ExcludedNodes = frozenset(),
        limit: int = SEQ_MAX,
        bytes_max: int = SEQ_MAX,
        strong: bool = False,
        columns: Sequence[str] | None = None,
    ) -> BulkScan:
        """`Topic.scan` as lines of JSON, or in the types of the wire."""
        return BulkScan(
            self._state, from_seq, to_seq, nodes, limit, strong=strong, bytes_max=bytes_max, columns=columns
        )

    def may_read_cold(self, from_seq: int) -> bool:
        """Whether a read of the records after this seq may have to wait for the cold store."""
        with self._state.lock:
            index = self._state.index
            return any(
                isinstance(part, Segment) and part.has_cold_copy
                for part, _, _ in index.slices(max(from_seq + 1, index.earliest), index.head + 1)
            )

    @property
    def is_floor_durable(self) -> bool:
        """Whether `Topic.state` does not block on the disk."""
        return retention.is_floor_durable(self._state)

    def is_floor_durable_for(self, from_seq: int) -> bool:
        """Whether a read from this cursor does not have to make a floor durable first, which blocks on the disk."""
        return retention.is_floor_durable(self._state, from_seq)

    def is_durable_for(self, strong: bool) -> bool:
        """Whether a read needs no sync first."""
        return read.is_durable_to_head(self._state, strong)

    def check_strong_supported(self) -> None:
        """Raise BadInput where strong reads are impossible: the topic's class does not survive a power cut."""
        read.check_strong_durability(self._state.name, self._state.config.durability)


def _commit(future: CommitFuture[Appended]) -> Appended:
    with DEFER_SIGNALS:
        future.try_commit()
    return future.wait()


def topic_operations(topic: Topic) -> TopicOperations:
    """Return the internal operations of a topic."""
    return topic._operations


@defer_signals_in("append_nowait", "append_arrow", "compact", "delete", "seal")
class Topic:
    """A durable, numbered sequence of records. `Database.topic` returns one."""

    __slots__ = ("__weakref__", "_operations", "_state")

    def __init__(self, topic: TopicState) -> None:
        self._state = topic
        self._operations = TopicOperations(topic)

    def __repr__(self) -> str:
        return f"<topic {self.name!r}, head {self.head_seq}>"

    # ── state ────────────────────────────────────────────────────────────────────────────

    @property
    def name(self) -> str:
        """Its name in the database.

        >>> orders.name
        'orders'
        """
        return self._state.name

    @property
    def id(self) -> int:
        """Its number in the directory; another one after a drop.

        >>> orders.id == log.topic("orders").id
        True
        """
        return self._state.id

    @property
    def epoch(self) -> int:
        """Changes when a topic of this name is dropped and created again, and when it is restored from a backup.

        >>> orders.epoch == orders.state().epoch
        True
        """
        return self._state.epoch

    @property
    def config(self) -> TopicConfig:
        """Its settings, all of them.

        >>> orders.config.durability, orders.config.ttl_ms
        ('disk', 0)
        """
        return self._state.config

    @property
    def head_seq(self) -> int:
        """The last seq that can be read; 0 before the first write.

        >>> orders.head_seq
        3
        """
        return self._state.index.head

    @property
    def earliest_seq(self) -> int:
        """The first live record; one past the head if there is none.

        >>> orders.delete(before_seq=3).earliest_seq
        3
        >>> orders.earliest_seq
        3
        """
        return self.state().earliest_seq

    @property
    def evict_floor(self) -> int:
        """The first seq that was not lost to a cap or to age.

        >>> orders.evict_floor
        1
        """
        return self.state().evict_floor

    @property
    def count(self) -> int:
        """Number of live records.

        >>> orders.count
        3
        """
        return self.state().count

    @property
    def bytes(self) -> int:
        """Bytes of data and meta of live records.

        >>> orders.bytes
        33
        """
        return self.state().bytes

    @property
    def priority(self) -> int:
        """The rank of its records when readers compete: as configured, or by the time since the last read.

        >>> log.topic("orders", priority=7).priority
        7
        """
        return self._state.priority()

    def state(self) -> TopicInfo:
        """All of the above at one moment, after expiry.

        >>> state = orders.state()
        >>> state.head_seq, state.next_seq, state.count
        (3, 4, 3)
        """
        retention.refresh_for_read(self._state)
        state = self._state.info()
        retention.persist_floor(self._state, state.evict_floor)
        return state

    @property
    def version(self) -> Hashable:
        """Unchanged as long as a read from the same cursor finds the same records.

        >>> before = orders.version
        >>> orders.append(1).seqs
        range(4, 5)
        >>> orders.version == before
        False
        """
        return self._state.version()

    # ── writing ───────────────────────────────────────────────────────────────────────────────

    def append(
        self,
        records: object,
        *,
        tag: str | Sequence[str | None] | None = None,
        node: str | Sequence[str | None] | None = None,
        meta: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        key: str | None = None,
    ) -> Appended:
        """Write records and return their seqs once the topic's class acknowledges them.

        A list or a tuple is a batch of records, written completely or not at all; anything else is one record. A record
        is bytes or any JSON value. `tag` (to delete by), `node` (its origin) and `meta` apply to all records, or are
        lists with one value per record. A second write with the same `key` within the topic's window writes nothing and
        returns the first one's seqs.

        >>> orders.append({"sku": "D"}, tag="order-8", key="order-8").seqs
        range(4, 5)
        >>> orders.append([b"raw", "text", None]).seqs
        range(5, 8)
        """
        batch = batch_encoder.prepare_batch(self._state.context.limits, records, tag, node, meta)
        with DEFER_SIGNALS:
            future = append.submit_write(self._state, batch, key)
            future.try_commit()
        return future.wait()  # outside DEFER_SIGNALS: while another thread commits, this wait may be interrupted

    def append_nowait(
        self,
        records: object,
        *,
        tag: str | Sequence[str | None] | None = None,
        node: str | Sequence[str | None] | None = None,
        meta: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        key: str | None = None,
    ) -> CommitFuture[Appended]:
        """`append` without waiting: the future's `wait` returns or raises what `append` would.

        >>> future = orders.append_nowait({"sku": "D"})
        >>> future.wait().seqs
        range(4, 5)
        """
        batch = batch_encoder.prepare_batch(self._state.context.limits, records, tag, node, meta)
        future = append.submit_write(self._state, batch, key)
        self._state.shard.wake_writer()
        return future

    @overload
    def append_stream(
        self,
        chunks: Iterable[Buffer],
        *,
        tag: str | None = None,
        node: str | None = None,
        meta: dict[str, Any] | None = None,
        key: str | None = None,
    ) -> Appended: ...

    @overload
    def append_stream(
        self,
        chunks: AsyncIterable[Buffer],
        *,
        tag: str | None = None,
        node: str | None = None,
        meta: dict[str, Any] | None = None,
        key: str | None = None,
    ) -> Coroutine[Any, Any, Appended]: ...

    def append_stream(
        self,
        chunks: Iterable[Buffer] | AsyncIterable[Buffer],
        *,
        tag: str | None = None,
        node: str | None = None,
        meta: dict[str, Any] | None = None,
        key: str | None = None,
    ) -> Appended | Coroutine[Any, Any, Appended]:
        """Write one record of bytes from chunks, without keeping it in memory; from an async iterable, await the
        result.

        The record has at most `max_record_bytes` of the topic's config. A stream that is longer (TooLarge), breaks off
        (StreamBroken) or meets a disk error is rolled back: nothing is visible. What readers get in `data` of a record
        above 256 KiB is a LargeData, whose `open` returns the bytes as a file.

        >>> orders.append_stream(iter([b"first ", b"second"])).seqs
        range(4, 5)
        >>> orders.open_record(4).read()
        b'first second'
        """
        if not isinstance(chunks, AsyncIterable):
            if isinstance(chunks, bytes | bytearray | memoryview | str) or not isinstance(chunks, Iterable):
                raise BadInput(
                    f"append_stream takes an iterable of bytes, not {type(chunks).__name__}; nothing was written, "
                    "use append for a value that is in memory"
                )
            stream = StreamedAppend(self._state, tag=tag, node=node, meta=meta, key=key)
            return large_append.append_stream(stream, chunks, self.name).wait()
        stream = StreamedAppend(self._state, tag=tag, node=node, meta=meta, key=key)
        return large_append.append_stream_async(stream, chunks, self.name, _commit)

    def append_arrow(self, table: pa.Table | pa.RecordBatch, *, key: str | None = None) -> Appended:
        """Write the rows of a table as one batch: a column `data` (binary or text), and optionally `tag`, `node`,
        `meta` (JSON text) and `json` (whether data is JSON). `seq` and `ts` are ignored.

        >>> orders.append_arrow(pa.table({"data": ["x", "y"], "tag": ["a", None]})).seqs
        range(4, 6)
        """
        batch = batch_encoder.batch_from_table(self._state.context.limits, table)
        return append.submit_write(self._state, batch, key).wait()

    def append_pandas(self, frame: pd.DataFrame, *, key: str | None = None) -> Appended:
        """Write the rows of a pandas data frame as one batch. With a column `data` as `append_arrow` does; any other
        frame becomes one JSON object a row, missing values null. The index is not written.

        >>> orders.append_pandas(pd.DataFrame({"sku": ["D", "E"], "qty": [1, 2]})).seqs
        range(4, 6)
        >>> orders.read(4).records[0].data
        {'sku': 'E', 'qty': 2}
        """
        return self.append_arrow(frames.from_pandas(frame), key=key)

    def append_polars(self, frame: pl.DataFrame, *, key: str | None = None) -> Appended:
        """`append_pandas` for a polars data frame.

        >>> orders.append_polars(pl.DataFrame({"data": [b"raw"], "tag": ["order-8"]})).seqs
        range(4, 5)
        """
        return self.append_arrow(frames.from_polars(frame), key=key)

    def append_numbered(
        self,
        tables: Iterable[pa.Table | pa.RecordBatch] | MultiBatch,
        *,
        writer: str,
        number: int,
        sum: tuple[int, int],
        query_id: str = "",
    ) -> Appended:
        """Write the rows of all tables, as in `append_arrow`, as one batch of a producer that numbers its batches: one
        range of seqs, all or nothing, synced in every class.

        A batch that was written before, also before a restart, is not written again: its seqs are returned (`deduped`).
        `sum` is its checksum. The same number with another sum, and a number below a written one, raise BatchConflict.

        `query_id` distinguishes two queries that write under one name. Under the id that wrote the newest batch, that
        batch is a repetition whatever its sum: its source may have changed since. Under another id every batch raises
        BatchConflict, because the producer lost its checkpoint. "": unknown, only the sum decides.

        >>> table = pa.table({"data": ["x", "y"]})
        >>> orders.append_numbered([table], writer="etl", number=1, sum=(1, 2)).seqs
        range(4, 6)
        >>> orders.append_numbered([table], writer="etl", number=1, sum=(1, 2)).deduped
        True
        """
        parts = (
            tables
            if isinstance(tables, MultiBatch)
            else producer_batches.prepare_tables(self._state.context.limits, tables)
        )
        return producer_batches.append_producer_batch(self._state, parts, writer, number, sum, query_id)

    def producer(
        self, *, linger_ms: float = LINGER_MS, max_bytes: int = MAX_BYTES, on_error: OnError | None = None
    ) -> Producer:
        """Return a producer: `send` from many threads, written in batches. Use it in a `with` block.

        Args:
            linger_ms: how long the first record of a batch waits for others.
            max_bytes: how much may be without an outcome before `send` waits; records count 64 bytes more each.
            on_error: called with a FailedRecords for each batch that was refused, and the producer goes on. Without
                it the first such batch stops the producer. One whose outcome is unknown always does.

        >>> with orders.producer() as producer:
        ...     delivery = producer.send({"sku": "D"})
        >>> delivery.result()
        4
        """
        state = self._state
        self._operations.check_writable()

        def write(batch: ProducerBatch) -> Appended:
            return append.submit_write(state, batch.encode()).wait()

        limits = state.context.limits
        return Producer(
            self.name,
            write,
            limits,
            linger_ms=linger_ms,
            max_bytes=max_bytes,
            on_error=on_error,
            clock=state.context.clock,
        )

    def producer_batches(self, writer: str) -> dict[int, BatchRange]:
        """Return the last batches of this producer, by number.

        >>> orders.append_numbered([pa.table({"data": ["x"]})], writer="etl", number=1, sum=(1, 2)).seqs
        range(4, 5)
        >>> list(orders.producer_batches("etl"))
        [1]
        """
        check_text("writer", writer)
        return producer_batches.list_batches(self._state, writer)

    def delete(
        self,
        *,
        match: object = None,
        before_seq: int | None = None,
        seqs: Sequence[int] | None = None,
        actor: str | None = None,
    ) -> Deleted:
        """Delete records: below `before_seq`, by tag (`"order-7"` is that tag, `"order-*"` a prefix), both, or by
        `seqs`.

        Only records that exist now are deleted. Readers skip them without a gap; the gap log records `actor` and time.

        >>> orders.delete(match="order-*").deleted
        3
        """
        return delete.delete_records(self._state, match, before_seq, seqs, actor)

    def compact(self, *, actor: str | None = None) -> Compacted:
        """Remove the records that newer ones of their key replaced, and tombstones whose delay has passed, now.

        The active segment is closed first. Records that a group with a hold has not read, and that a router has not
        forwarded as of the last checkpoint, stay. Readers skip what is removed without a gap; the gap log records it.
        Raises BadInput where the topic has no compaction.

        >>> users = log.topic("users", compaction="/id")
        >>> users.append([{"id": 1, "n": 1}, {"id": 1, "n": 2}]).seqs
        range(1, 3)
        >>> users.compact().records
        1
        """
        return compaction.compact_topic(self._state, actor=actor, seal=True)

    def simulate_retention(
        self, *, cap_records: int | None = None, cap_bytes: int | None = None, ttl_ms: Duration | None = None
    ) -> RetentionPreview:
        """Return which records these limits would evict now, and which groups have not read them; None: as configured.
        Changes nothing.

        >>> preview = orders.simulate_retention(cap_records=2)
        >>> preview.records, orders.count
        (1, 3)
        """
        kept_ms = None if ttl_ms is None else duration_ms("ttl_ms", ttl_ms)
        return preview_retention(self._state, cap_records=cap_records, cap_bytes=cap_bytes, ttl_ms=kept_ms)

    def typed(self, kind: type[T]) -> TypedTopic[T]:
        """The same topic with records of one type: a dataclass, a `msgspec.Struct`, a TypedDict, a pydantic model. What
        is appended is validated, and what is read is returned as objects of the type.

        >>> @dataclass
        ... class Order:
        ...     sku: str
        >>> log.topic("orders").typed(Order).read().records[0].data
        Order(sku='A')
        """
        return TypedTopic(self, kind)

    def queue(self) -> Queue:
        """The same topic as a queue: its jobs, delivered under leases. Raises NotAQueue if it is a log.

        >>> log.topic("mails").queue()
        <queue 'mails', head 2>
        """
        if self._state.config.type != "queue":
            raise NotAQueue(self.name)
        return Queue(self, get_queue_state(self._state))

    def redrive(
        self,
        *,
        to: str | None = None,
        match: object = None,
        where: RecordFilter | None = None,
        rate: float | None = None,
        limit: int | None = None,
    ) -> RedriveResult:
        """Move dead letters back to the queue that each came from, or to the queue `to`, and delete them here.

        All of them, or those whose tag matches (as in `delete`) and for which `where(record)` is true; at most `limit`,
        at most `rate` per second. Each batch is written to its queue before it is deleted: a crash in between may
        duplicate one batch and never loses one.

        >>> mails.reject("worker", mails.claim("worker")).count
        1
        >>> log.topic("mails-dead").redrive().queues
        {'mails': 1}
        """
        return redrive_records(self._state, to=to, match=match, where=where, rate=rate, limit=limit)

    def seal(self) -> None:
        """Start another segment with the next record; the next checkpoint completes this one.

        >>> orders.seal()
        >>> log.checkpoint()
        >>> orders.segments().segments[0].sealed
        True
        """
        with self._state.lock:
            self._state.check_writable()
            self._state.index.roll_segment()
            self._state.mark_dirty()
            self._state.context.needs_checkpoint = True

    def rewrite(self, *, force: bool = False) -> RewriteResult:
        """Give sealed segments new files without the bytes of deleted records, and remove the old files: segments with
        enough such bytes, which is done in the background as well, or with `force` all that have any.

        Seqs and times stay. A segment with a frame that does not verify is left and listed in `skipped`.

        >>> orders.seal()
        >>> log.checkpoint()
        >>> orders.delete(seqs=[1, 2]).deleted
        2
        >>> orders.rewrite(force=True).records_removed
        2
        """
        context = self._state.context
        with self._state.lock:
            self._state.check_writable()
        assert context.topics is not None, "set by the engine"
        result: RewriteResult = context.topics.rewrite(self.name, force=force)
        return result

    def erase(
        self, *, match: object = None, seqs: Sequence[int] | None = None, actor: str | None = None
    ) -> ErasureReceipt:
        """Delete records by tag (as in `delete`) or by seq, and remove their bytes from every file of the directory:
        WAL, segments, tag indexes, manifests and quarantine. Records that were deleted before count as well.

        The receipt names every file with its checksums, and what cannot be reached. It is stored in the gap log as part
        of a chain. Raises ErasureIncomplete where bytes stay; repeating the call does the rest.

        >>> receipt = orders.erase(seqs=[2])
        >>> receipt.records, orders.count
        (1, 2)
        """
        with self._state.lock:
            self._state.check_writable()
        assert self._state.context.topics is not None, "set by the engine"
        receipt: ErasureReceipt = self._state.context.topics.erase(self.name, match=match, seqs=seqs, actor=actor)
        return receipt

    # ── reading ───────────────────────────────────────────────────────────────────────────────

    def read(
        self,
        from_seq: int = 0,
        limit: int = 256,
        *,
        node: str | Sequence[str] | None = None,
        bytes_max: int = 1 << 20,
        timeout: Seconds | None = 0.0,
        strong: bool = False,
    ) -> Page:
        """Return the records after `from_seq`, the last seq the reader has; 0 before the first.

        At most `limit` records and about `bytes_max` bytes; none of `node`, which is usually the reader's own. If there
        are none yet, wait up to `timeout` seconds. Continue from `page.next_from_seq`; `page.gap` reports records that
        were lost before they could be read. `strong`: only records that survive a power cut, whatever the topic's
        consistency is; the read syncs published records first.

        >>> page = orders.read(1, limit=1)
        >>> page.records[0].seq, page.records[0].data, page.next_from_seq
        (2, {'sku': 'B'}, 2)
        """
        return read.wait_for_page(
            self._state, from_seq, limit, read.parse_nodes(node), bytes_max, timeout, strong=strong
        )

    def open_record(self, seq: int, *, strong: bool = False) -> RecordReader:
        """Open the data of one record as a binary file: `read`, `readinto`, `seek`; bytes as they were written, or JSON
        text. Of a large record every chunk is verified as it is read. Raises RecordNotFound. `strong`: as for
        `read`.

        >>> with orders.open_record(1) as file:
        ...     file.read()
        b'{"sku":"A"}'
        """
        return read.open_record(self._state, seq, strong=strong)

    follow = loops.follow
    follow_arrow = loops.follow_arrow

    def __iter__(self) -> Iterator[Record | Gap]:
        """Yield all records that exist now."""
        return self.follow(timeout=0.0, on_gap="skip")

    def __contains__(self, seq: object) -> bool:
        """Whether there is a live record of this seq."""
        check_int("seq", seq, 1, SEQ_MAX)
        assert isinstance(seq, int), "checked"
        records = self.read(seq - 1, 1).records
        return bool(records) and records[0].seq == seq

    def scan(
        self,
        from_seq: int = 0,
        to_seq: int | None = None,
        *,
        nodes: ExcludedNodes = frozenset(),
        limit: int = SEQ_MAX,
        bytes_max: int = SEQ_MAX,
        strong: bool = False,
        columns: Sequence[str] | None = None,
    ) -> tables.Scan:
        """Scan many records in bounded memory, as Arrow batches: at most `limit`, and about `bytes_max` bytes, with
        these columns of `to_arrow`. `strong`: as for `read`.

        >>> [batch.num_rows for batch in orders.scan(columns=["seq"]).iter_arrow_batches()]
        [3]
        """
        scan = self._operations.scan(
            from_seq, to_seq, nodes=nodes, limit=limit, bytes_max=bytes_max, strong=strong, columns=columns
        )
        return tables.Scan(self.name, scan)

    @overload
    def latest(self, key: None = None, *, prefix: str = "") -> LatestTable: ...

    @overload
    def latest(self, key: str, *, prefix: str = "") -> Record | None: ...

    def latest(self, key: str | None = None, *, prefix: str = "") -> LatestTable | Record | None:
        """The topic as a table: the newest record of each key, found by an index.

        With a key: its newest record, or None. Without: a table to iterate over, to page through and to convert to
        Arrow, of the keys that begin with `prefix`, in an arbitrary order that is always the same. A key whose newest
        record was deleted, evicted or is a tombstone is not in the table. Raises BadInput where the topic has no
        compaction.

        >>> users = log.topic("users", compaction="/id")
        >>> users.append([{"id": 1, "n": 1}, {"id": 1, "n": 2}]).seqs
        range(1, 3)
        >>> users.latest("1").data
        {'id': 1, 'n': 2}
        """
        table = LatestTable(self._state, prefix)
        return table if key is None else table.get(key)

    def seek(self, ts_ms: Time) -> int:
        """Return the first record of this time (a datetime, or milliseconds since the epoch) or later; one past the
        head if there is none. To read from there, pass the seq before it.

        >>> orders.seek(datetime(2000, 1, 1, tzinfo=timezone.utc))
        1
        """
        return segment_listing.find_seq_by_time(self._state, time_ms("ts_ms", ts_ms))

    def group(self, name: str) -> Group:
        """A named, durable cursor for consumers that share their progress. Created by its first commit.

        >>> orders.group("readers").commit(2)
        2
        """
        return Group(self._state, name)

    def groups(self) -> GroupList[Group]:
        """Its groups, by name. `to_arrow` and the like return their states as a table.

        >>> orders.group("readers").commit(2)
        2
        >>> [(row["group"], row["lag_records"]) for row in orders.groups().to_dicts()]
        [('readers', 1)]
        """
        self._state.check_open()
        groups = [Group(self._state, name) for name in sorted(self._state.groups.copy())]
        return GroupList(groups, [group.state() for group in groups])

    def gaps(self, from_ms: Time | None = None, limit: int = GAPS_LIMIT_DEFAULT) -> GapEntries:
        """Return removals of its records and their causes, oldest first, since a time.

        >>> orders.delete(before_seq=3).deleted
        2
        >>> [(gap.cause, gap.first, gap.last) for gap in orders.gaps()]
        [('delete', 1, 2)]
        """
        since_ms = None if from_ms is None else time_ms("from_ms", from_ms)
        return self._state.context.gap_log.read(self.name, since_ms, limit, topic_id=self.id)

    def segments(self, *, strong: bool = False, from_seq: int = 0, limit: int | None = None) -> SegmentList:
        """List its segment files at this moment; newer records are the tail.

        Args:
            strong: as for `read`.
            from_seq: only segments with records from this seq on.
            limit: at most so many; `next_from_seq` is where to go on.

        >>> log.checkpoint()
        >>> [(segment.base, segment.stop) for segment in orders.segments().segments]
        [(1, 4)]
        """
        return segment_listing.list_segments(self._state, strong=strong, from_seq=from_seq, limit=limit)

    def segment(self, base: int, generation: int | None = None) -> SegmentFile | None:
        """Return the segment whose first seq is `base`, if it has files; None also if they are of another generation
        than this one.

        >>> log.checkpoint()
        >>> orders.segment(1).live_records
        3
        """
        check_int("base", base, 0, SEQ_MAX)
        if generation is not None:
            check_int("generation", generation, 0, SEQ_MAX)
        return segment_listing.find_segment(self._state, base, generation)

    def add_listener(self, wake: Callable[[], None]) -> None:
        """Call `wake` after every write, drop and close, on the thread that did it, until `remove_listener`. It must be
        short and must not block.

        >>> woken = threading.Event()
        >>> orders.add_listener(woken.set)
        >>> orders.append(1).seqs
        range(4, 5)
        >>> woken.is_set()
        True
        """
        self._state.add_listener(wake)

    def remove_listener(self, wake: Callable[[], None]) -> None:
        """Stop calling `wake`.

        >>> woken = threading.Event()
        >>> orders.add_listener(woken.set)
        >>> orders.remove_listener(woken.set)
        >>> orders.append(1).seqs
        range(4, 5)
        >>> woken.is_set()
        False
        """
        self._state.remove_listener(wake)

    def to_arrow(
        self,
        from_seq: int = 0,
        to_seq: int | None = None,
        *,
        since: Time | None = None,
        until: Time | None = None,
        columns: Sequence[str] | None = None,
        filter: object = None,
        node: str | Sequence[str] | None = None,
        strong: bool = False,
    ) -> pa.Table:
        """Return the records after `from_seq`, up to and including `to_seq`, as a table.

        The columns are `seq`, `ts`, `node`, `tag`, `meta` (JSON text), `data` (bytes) and `json`: whether data is JSON.
        The schema's metadata lists as JSON the seqs that are missing: `gap`, the first loss, `gaps`, all of them, and
        `counts`. With a filter that is about the segments that can have a match; no other is read.

        Args:
            since, until: only records of this time or later, and before that one.
            columns: only these are read and returned.
            filter: only records that match, such as `pyarrow.compute.field("tag") == "order-7"`.
            node: none of these nodes.
            strong: as for `read`.

        >>> orders.to_arrow(columns=["seq", "tag"]).to_pydict()
        {'seq': [1, 2, 3], 'tag': ['order-7', 'order-7', 'order-7']}
        """
        from_seq, to_seq = frames.time_range(self.seek, from_seq, to_seq, since, until)
        query = frames.TableQuery(from_seq, to_seq, columns, filter)
        return tables.read_table(self._state, query, read.parse_nodes(node), strong=strong)

    to_pandas = frames.PANDAS.of(to_arrow)
    to_polars = frames.POLARS.of(to_arrow)
    to_dicts = frames.DICTS.of(to_arrow)

    def to_dataset(
        self,
        from_seq: int = 0,
        to_seq: int | None = None,
        *,
        since: Time | None = None,
        until: Time | None = None,
        node: str | Sequence[str] | None = None,
        strong: bool = False,
    ) -> TopicDataset:
        """Return the records as a dataset of Arrow, which DuckDB, polars and Arrow query lazily: only the columns of
        the query are read, and only the segments that can match its conditions on `seq` and `ts`. Arguments as for
        `to_arrow`.

        >>> import duckdb
        >>> records = orders.to_dataset()
        >>> duckdb.sql("select max(seq) from records where tag = 'order-7'").fetchall()
        [(3,)]
        """
        from tidelog.datasets import TopicDataset

        nodes = read.parse_nodes(node)
        return TopicDataset(self, from_seq, to_seq, since=since, until=until, nodes=nodes, strong=strong)
