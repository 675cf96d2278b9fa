"""Append: admission, seqs, frames, and one place in the shard's queue.

What an ack means depends on the topic's class: `fsync` survives a power cut; `disk` survives kill -9, and after a power
cut its seqs are never assigned to other records; `memory` promises nothing; `ephemeral` never leaves memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from msgspec.structs import replace

from tidelog.engine import batch_encoder, retention
from tidelog.engine.batch_encoder import ArrowBatch, Batch, LargeBatch, MultiBatch
from tidelog.engine.config import OWN, TopicConfig
from tidelog.engine.context import EngineContext
from tidelog.engine.idempotency import PendingWrite
from tidelog.engine.memtable import LARGE_WRITE_BYTES, BatchStats
from tidelog.engine.results import Appended
from tidelog.engine.topic_state import PendingReservation, TopicState
from tidelog.errors import BadInput, Error, TooLarge, TopicFull
from tidelog.formats import batch as batches
from tidelog.formats import control_frames, frame, segment_index
from tidelog.formats.batch import FrameBuffers
from tidelog.types import Buffer
from tidelog.wal import Commit, CommitFuture, WalRange

_KEY_BYTES_MAX = 256
Records: TypeAlias = Batch | ArrowBatch | MultiBatch | LargeBatch


class Append(Commit):
    """A staged batch on its way through the WAL."""

    __slots__ = (
        "blob_id",
        "count",
        "data_bytes",
        "first",
        "frame_buffers",
        "frames_in_memory",
        "key",
        "needs_reservation",
        "pending_reservation",
        "reserved_ceiling",
        "shard",
        "stats",
        "topic",
        "ts_ms",
    )
    future: CommitFuture[Appended]

    def __init__(self, topic: TopicState, first: int, ts_ms: int, batch: Records, key: str | None) -> None:
        self.frames_in_memory: list[bytes] = []  # frames that stay in memory
        self.frame_buffers: FrameBuffers | None = None  # large frames, read from the WAL once written
        flags = common_index_flags(batch)
        if isinstance(batch, Batch) and flags is not None and len(batch) > 1 and batch.weight >= LARGE_WRITE_BYTES:
            self.frame_buffers = buffers = batch_encoder.encode_into_buffer(
                topic.context.buffer_pool.acquire, topic.id, first, ts_ms, batch, durable=topic.is_durable
            )
            self.stats: BatchStats | None = BatchStats(buffers.counts, batch.lengths, flags)
            frames: Sequence[Buffer] = buffers.frames
        else:
            self.frames_in_memory = frames = batch_encoder.encode_frames(
                topic.id, first, ts_ms, batch, durable=topic.is_durable
            )
            self.stats = batch_stats(batch, frames)
        self.shard = topic.shard
        super().__init__(frames, frames=len(frames), durable=topic.is_durable, future=CommitFuture(self.shard))
        if key is not None:  # first: a torn write may leave the key without its records, and replay then ignores it
            body = control_frames.WriteKey(key=key, first=first, last=first + len(batch) - 1)
            self.prepend(topic.encode_control(body, ts_ms=ts_ms))
        self.may_use_reserve = topic.name.startswith(OWN)
        self.topic, self.first, self.count, self.ts_ms = topic, first, len(batch), ts_ms
        self.data_bytes, self.key = batch.weight, key
        self.blob_id = batch.ref.blob_id if isinstance(batch, LargeBatch) else None
        self.needs_reservation = topic.config.durability == "disk"
        self.reserved_ceiling = 0  # the reservation that the ack makes durable
        self.pending_reservation: PendingReservation | None = None  # the one that a later sync completes

    @property
    def needs_sync(self) -> bool:
        return self.durable or (
            self.needs_reservation and self.topic.reservation.is_needed(self.first + self.count - 1)
        )

    def before_write(self) -> None:
        """Class `disk`: reserve seqs first, for many writes ahead."""
        if not self.needs_reservation:
            return
        last = self.first + self.count - 1
        self.reserved_ceiling, self.pending_reservation = self.topic.reservation.prepare(
            self, self.shard, self.first, last, self.ts_ms
        )

    def apply(self, error: Error | None) -> Appended:
        topic = self.topic
        last = self.first + self.count - 1
        with topic.lock:
            topic.staged_records -= self.count
            topic.staged_bytes -= self.data_bytes
            topic.reservation.on_done(self, self.reserved_ceiling, self.pending_reservation, ok=error is None)
            if error is None:
                if topic.is_dropped:
                    topic.quota.release(self.data_bytes)
                else:
                    if self.blob_id is not None:
                        topic.blobs.add(self.first, self.blob_id)
                    self._publish()
            else:
                topic.quota.release(self.data_bytes)
                if self.blob_id is not None:  # the frame may be on disk all the same
                    topic.dropped_blobs.append(self.blob_id)
                    topic.mark_dirty()
            appended = Appended(
                self.first,
                last,
                topic.index.head,
                False,
                self.shard.write_us,
                self.shard.sync_us if self.topic.is_durable else 0,
                self.delayed_us,
            )
            if self.key is not None and error is not None:
                topic.producers.keys.abort(self.key)
            elif self.key is not None:
                topic.producers.keys.complete(self.key, appended, topic.context.clock.monotonic_ms())
        self._release_buffer()
        return appended

    def on_done(self, error: Error | None) -> None:
        super().on_done(error)
        if error is None:
            self.topic.notify_listeners()

    def _publish(self) -> None:
        topic, stats, buffers = self.topic, self.stats, self.frame_buffers
        if buffers is None or stats is None or self.file is None:
            topic.publish(
                self.first, self.frames_in_memory, self.count, self.data_bytes, self.ts_ms, persistent=True, stats=stats
            )
            return
        pos = self.offset + self.size - sum(map(len, buffers.frames))  # after the frames that `before_write` prepended
        pieces = []
        for frame_bytes in buffers.frames:
            pieces.append(WalRange(self.file, pos, len(frame_bytes)))
            pos += len(frame_bytes)
        topic.publish_stored(self.first, pieces, stats, self.data_bytes, self.ts_ms)

    def _release_buffer(self) -> None:
        """Return the frame buffer to the pool: the WAL has the frames, or the write failed."""
        buffers, self.frame_buffers, self.pieces = self.frame_buffers, None, ()
        if buffers is not None:
            self.topic.context.buffer_pool.release(buffers.buffer)


def common_index_flags(batch: Records) -> int | None:
    """Return the index flags that all records of a batch share; None where they differ."""
    if not isinstance(batch, Batch) or batch.metas is not None:
        return None
    tag, node, json = batch.tag, batch.node, batch.json
    if not (isinstance(json, bool) and isinstance(tag, bytes) and isinstance(node, bytes)):
        return None
    flags = (
        (segment_index.JSON if json else 0)
        | (segment_index.HAS_TAG if tag else 0)
        | (segment_index.HAS_NODE if node else 0)
    )
    return flags | (segment_index.BATCH if len(batch) > 1 else 0)


def batch_stats(batch: Records, frames: list[bytes]) -> BatchStats | None:
    """Return index data of a batch without parsing its frames; None where its records differ."""
    flags = common_index_flags(batch)
    if not isinstance(batch, Batch) or flags is None:
        return None
    counts = [len(batch)] if len(frames) == 1 else [_count_records(encoded) for encoded in frames]
    return BatchStats(counts, batch.lengths, flags)


def _count_records(encoded: bytes) -> int:
    header = frame.read_frame(encoded, 0, len(encoded), check=False)
    assert isinstance(header, frame.Frame), "the frame was encoded above"
    return batches.record_count(encoded, header) if header.kind == frame.APPEND_BATCH else 1


class DurableAppend(Append):
    """A batch that is durable when it is acknowledged, in any class but `ephemeral`."""

    __slots__ = ()

    def __init__(self, topic: TopicState, first: int, ts_ms: int, batch: Records, key: str | None) -> None:
        super().__init__(topic, first, ts_ms, batch, key)
        self.durable = True


def submit_write(
    topic: TopicState, batch: Batch | ArrowBatch | LargeBatch, key: str | None = None, *, durable: bool = False
) -> CommitFuture[Appended]:
    """Expire records that are due, then stage a batch and return its future. The caller commits it, or wakes the writer
    thread. `durable`: the future completes when the batch is synced, in every class but `ephemeral`."""
    retention.expire_records(topic)
    future = submit_append(topic, batch, key, durable=durable)
    if topic.is_ephemeral:
        topic.notify_listeners()
    return future


def submit_append(
    topic: TopicState, batch: Batch | ArrowBatch | LargeBatch, key: str | None, *, durable: bool = False
) -> CommitFuture[Appended]:
    """Stage a batch and return its future. Raises before any seq is assigned."""
    check_idempotency_key(key)
    with topic.lock:
        topic.check_writable()
        shard = topic.shard
        if key is not None:
            now_ms, window_ms = topic.context.clock.monotonic_ms(), topic.config.idempotency_window_ms
            known = topic.producers.keys.lookup(key, now_ms, window_ms)
            if isinstance(known, PendingWrite):
                return _follow_pending_write(topic, known.future)
            if known is not None:
                return CommitFuture.completed(shard, replace(known.outcome, deduped=True))
            topic.producers.keys.forget_expired(now_ms, window_ms)
        return submit_batch(topic, batch, key, DurableAppend if durable else Append)


def submit_batch(
    topic: TopicState, batch: Records, key: str | None, make_commit: Callable[..., Append] = Append
) -> CommitFuture[Appended]:
    """Admit a batch, assign its seqs and queue it. With the lock held, after `check_writable`."""
    _check_topic_caps(topic, len(batch), batch.weight)
    topic.quota.acquire(batch.weight)
    try:
        first, ts_ms = topic.last_assigned_seq + 1, topic.next_timestamp_ms()
        if topic.is_ephemeral and isinstance(batch, LargeBatch):
            raise BadInput(f"{topic.name} is ephemeral and keeps no large records; nothing was written")
        if topic.is_ephemeral:
            return _append_ephemeral(topic, first, ts_ms, batch, key)
        commit = make_commit(topic, first, ts_ms, batch, key)
        topic.submit(commit)
        if isinstance(batch, LargeBatch):
            batch.is_staged = True
    except BaseException:
        topic.quota.release(batch.weight)
        raise
    count = len(batch)
    topic.last_assigned_seq = first + count - 1
    topic.index.last_ts = ts_ms
    topic.staged_records += count
    topic.staged_bytes += batch.weight
    if key is not None:
        topic.producers.keys.begin(key, commit.future)
    return commit.future


def check_idempotency_key(key: object) -> None:
    """Raise BadInput unless `key` is None or text of 1 to 256 bytes."""
    if key is not None and not (batch_encoder.is_utf8_text(key) and 0 < len(str(key).encode()) <= _KEY_BYTES_MAX):
        raise BadInput(
            f"an idempotency key is text of 1 to {_KEY_BYTES_MAX} bytes, not {key!r:.80}; nothing was written"
        )


def _follow_pending_write(topic: TopicState, first: CommitFuture[Appended]) -> CommitFuture[Appended]:
    """Return a future with the outcome of a pending write, for a second write with its key."""
    future: CommitFuture[Appended] = CommitFuture(topic.shard)

    def complete(done: CommitFuture[Appended]) -> None:
        try:
            future.set_result(replace(done.wait(), deduped=True))
        except Error as error:
            future.set_exception(error)

    first.add_done_callback(complete)
    return future


def check_capacity(topic: TopicState, weight: int) -> None:
    """Raise what a record of this many bytes would raise now, before its data is read."""
    with topic.lock:
        topic.check_writable()
        _check_topic_caps(topic, 1, weight)
        topic.quota.acquire(weight)
        topic.quota.release(weight)


def check_first_write(context: EngineContext, name: str, config: TopicConfig, batch: Records) -> None:
    """Raise what the first write to a topic that does not exist yet would raise."""
    _check_caps(name, config, len(batch), batch.weight)
    context.quota.acquire(batch.weight)
    context.quota.release(batch.weight)


def _check_caps(name: str, config: TopicConfig, records: int, weight: int) -> None:
    """Raise TooLarge for a write that would not fit an empty topic."""
    if config.discard == "reject":
        for cap, amount, unit in (
            (config.cap_records, records, "records"),
            (config.cap_bytes, weight, "bytes"),
        ):
            if cap and amount > cap:
                raise TooLarge(f"{name}: a write", size=amount, limit=cap, unit=unit)


def _check_topic_caps(topic: TopicState, records: int, weight: int) -> None:
    """Raise TopicFull before a seq is assigned, for a topic that rejects writes above its caps."""
    config, index = topic.config, topic.index
    if config.discard != "reject":
        return
    _check_caps(topic.name, config, records, weight)
    for cap, used, amount in (
        (config.cap_records, index.count + topic.staged_records, records),
        (config.cap_bytes, index.bytes + topic.staged_bytes, weight),
    ):
        if cap and used + amount > cap:
            raise TopicFull(
                topic.name,
                cap_records=config.cap_records,
                cap_bytes=config.cap_bytes,
                head_seq=index.head,
                earliest_seq=index.earliest,
            )


def _append_ephemeral(
    topic: TopicState, first: int, ts_ms: int, batch: Records, key: str | None
) -> CommitFuture[Appended]:
    """Publish a batch of an ephemeral topic at once; it is written to no file."""
    frames = batch_encoder.encode_frames(topic.id, first, ts_ms, batch, durable=False)
    topic.publish(first, frames, len(batch), batch.weight, ts_ms, persistent=False, stats=batch_stats(batch, frames))
    topic.last_assigned_seq = topic.index.head
    appended = Appended(first, topic.last_assigned_seq, topic.last_assigned_seq)
    if key is not None:
        future: CommitFuture[Appended] = CommitFuture.completed(topic.shard, appended)
        topic.producers.keys.begin(key, future)
        topic.producers.keys.complete(key, appended, topic.context.clock.monotonic_ms(), persistent=False)
    return CommitFuture.completed(topic.shard, appended)
