"""[shell] Append: admission, seqs, frames, and one place in the shard's queue.

What the ack means is the class's word: `fsync` survives a power cut; `disk` survives kill -9, and
after a power cut its seqs are at least never given to another record; `memory` promises nothing;
`ephemeral` never leaves memory.

[shell] Seqs of class `disk`, on record before they are given out: a crash may lose a record, never free its seq.

    head        reserving                booked
    ├──────────────┼────────────────────────┤
    │ may be used  │ once the disk has what says so: a mark that went along with a write
                     when a quarter of more than a few was used in no time, and for whose sync nobody waits

A write whose seqs lie behind `reserving` brings a mark of its own and waits until it is synced: the first one does, and
one that comes before the disk has the mark that was booked. How many are taken at a time: docs/decisions/0008.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec.structs import replace

from tidelog.engine import batch_encoder
from tidelog.engine.batch_encoder import ArrowBatch, Batch, MultiBatch
from tidelog.engine.config import OWN, TopicConfig
from tidelog.engine.idempotency import PendingWrite
from tidelog.engine.memtable import LARGE_WRITE_BYTES, BatchStats
from tidelog.engine.results import Appended
from tidelog.engine.topic_state import EngineContext, TopicState
from tidelog.errors import BadInput, Error, TooLarge, TopicFull
from tidelog.formats import batch as batches
from tidelog.formats import control_frames, frame, segment_index
from tidelog.formats.batch_writer import FrameBuffers
from tidelog.types import Buffer
from tidelog.wal import Commit, CommitFuture, WalRange

if TYPE_CHECKING:
    from tidelog.disk.interface import File
    from tidelog.wal import Shard

_SMALL_RESERVATION: Final = 256
RESERVATION_MAX: Final = 1 << 20  # at a time, but for a larger batch
_FAST_USE_MS: Final = 1000
_RESERVATION_GROWTH: Final = 8


@dataclass(slots=True)
class PendingReservation:
    """A mark on its way to the disk."""

    ceiling: int
    file: File | None = None  # where it was written; None: it is about to be
    end: int = 0


def needs_reservation(topic: TopicState, last: int) -> bool:
    """Whether a write of class `disk` up to `last` has to bring a mark of its own, and to wait until it is synced."""
    return last > topic.reserving_seq


def reserve_seqs(
    commit: Commit, topic: TopicState, shard: Shard, first: int, last: int, ts_ms: int
) -> tuple[int, PendingReservation | None]:
    """Put the marks in front of a write of seqs first to last that it needs. Returns the ceiling that its ack puts on
    record, and what a later sync does. In the committer's turn, from `prepare`."""
    apply_synced_reservation(topic, shard)
    if last > topic.reserving_seq:
        topic.reserving_seq = last + next_reservation_size(topic, last - first + 1)
        commit.prepend_durable(_encode_reservation(topic, topic.reserving_seq, ts_ms))
        return topic.reserving_seq, None
    if should_reserve_ahead(topic, last):
        topic.pending_reservation = PendingReservation(last + next_reservation_size(topic, last - first + 1))
        commit.prepend(_encode_reservation(topic, topic.pending_reservation.ceiling, ts_ms))
        shard.on_tick_needed()
        return 0, topic.pending_reservation
    return 0, None


def on_reservation_done(
    commit: Commit, topic: TopicState, ceiling: int, books: PendingReservation | None, *, good: bool
) -> None:
    """The write that `cover` prepared is done. With the topic's lock held."""
    if good:
        topic.reserved_seq = max(topic.reserved_seq, ceiling)
        if books is not None:
            books.file, books.end = commit.file, commit.offset + commit.size
        return
    topic.reserving_seq = topic.reserved_seq
    if books is not None:
        topic.pending_reservation = None


def _encode_reservation(topic: TopicState, ceiling: int, ts_ms: int) -> bytes:
    body = control_frames.encode(control_frames.HeadWatermark(ceiling))
    return frame.encode(frame.HEAD_WATERMARK, topic_id=topic.id, ts_ms=ts_ms, data=body)


def apply_synced_reservation(topic: TopicState, shard: Shard) -> None:
    """Let what was booked be used, where the disk has the mark by now. In the committer's turn."""
    booked = topic.pending_reservation
    if booked is None or booked.file is None or not shard.is_synced(booked.file, booked.end):
        return
    with topic.lock:
        topic.reserved_seq = max(topic.reserved_seq, booked.ceiling)
        topic.reserving_seq, topic.pending_reservation = max(topic.reserving_seq, topic.reserved_seq), None


def should_reserve_ahead(topic: TopicState, last: int) -> bool:
    """Whether a write up to `last` should take a mark along for those behind it: a quarter was used in no time. Not
    of a few: the head of who writes little jumps by no more than that (§4 of the contract)."""
    if topic.pending_reservation is not None or topic.reservation_size <= _SMALL_RESERVATION:
        return False
    return 4 * (topic.reserving_seq - last) < 3 * topic.reservation_size and _was_used_fast(topic, _FAST_USE_MS // 4)


def next_reservation_size(topic: TopicState, count: int) -> int:
    """How many seqs to reserve: more where the last reservation did not last, since each costs a sync."""
    least, quick = (
        max(topic.context.limits.head_reserve, 4 * count),
        topic.reservation_size and _was_used_fast(topic, _FAST_USE_MS),
    )
    topic.reservation_size = min(
        max(least, _RESERVATION_GROWTH * topic.reservation_size if quick else 0), max(RESERVATION_MAX, least)
    )
    topic.reserved_ms = topic.context.clock.monotonic_ms()
    return topic.reservation_size


def _was_used_fast(topic: TopicState, within_ms: int) -> bool:
    return topic.context.clock.monotonic_ms() - topic.reserved_ms < within_ms


_KEY_BYTES_MAX = 256
Records: TypeAlias = Batch | ArrowBatch | MultiBatch


class Append(Commit):
    """A staged batch on its way through the WAL."""

    __slots__ = (
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
        self.frames_in_memory: list[bytes] = []  # its frames, where they stay in memory
        self.frame_buffers: FrameBuffers | None = None  # and where they do not
        flags = common_index_flags(batch)
        if isinstance(batch, Batch) and flags is not None and len(batch) > 1 and batch.weight >= LARGE_WRITE_BYTES:
            self.frame_buffers = laid = batch_encoder.encode_into_buffer(
                topic.context.buffer_pool.acquire, topic.id, first, ts_ms, batch, durable=topic.is_durable
            )
            self.stats: BatchStats | None = BatchStats(laid.counts, batch.lengths, flags)
            frames: Sequence[Buffer] = laid.frames
        else:
            self.frames_in_memory = frames = batch_encoder.encode_frames(
                topic.id, first, ts_ms, batch, durable=topic.is_durable
            )
            self.stats = batch_stats(batch, frames)
        self.shard = topic.shard
        super().__init__(frames, frames=len(frames), durable=topic.is_durable, future=CommitFuture(self.shard))
        if key is not None:  # in front: a write that breaks off may leave it alone there, and it then does not count
            body = control_frames.WriteKey(key=key, first=first, last=first + len(batch) - 1)
            self.prepend(frame.encode(body.KIND, topic_id=topic.id, ts_ms=ts_ms, data=control_frames.encode(body)))
        self.may_use_reserve = topic.name.startswith(OWN)
        self.topic, self.first, self.count, self.ts_ms = topic, first, len(batch), ts_ms
        self.data_bytes, self.key = batch.weight, key
        self.needs_reservation = topic.config.durability == "disk"
        self.reserved_ceiling = 0  # what its ack puts on record
        self.pending_reservation: PendingReservation | None = None  # and what a later sync does

    @property
    def needs_sync(self) -> bool:
        return self.durable or (self.needs_reservation and needs_reservation(self.topic, self.first + self.count - 1))

    def before_write(self) -> None:
        """Disk class: seqs that a crash could give out again are first put on record, for many writes ahead."""
        if not self.needs_reservation:
            return
        last = self.first + self.count - 1
        self.reserved_ceiling, self.pending_reservation = reserve_seqs(
            self, self.topic, self.shard, self.first, last, self.ts_ms
        )

    def apply(self, error: Error | None) -> Appended:
        core = self.topic
        last = self.first + self.count - 1
        with core.lock:
            core.staged_records -= self.count
            core.staged_bytes -= self.data_bytes
            on_reservation_done(self, core, self.reserved_ceiling, self.pending_reservation, good=error is None)
            if error is None:
                if core.is_dropped:
                    core.quota.release(self.data_bytes)
                else:
                    self._publish()
            else:
                core.quota.release(self.data_bytes)
            appended = Appended(
                self.first,
                last,
                core.index.head,
                False,
                self.shard.write_us,
                self.shard.sync_us if self.topic.is_durable else 0,
                self.delayed_us,
            )
            if self.key is not None and error is not None:
                core.idempotency_window.abort(self.key)
            elif self.key is not None:
                core.idempotency_window.complete(self.key, appended, core.context.clock.monotonic_ms())
        self._release_buffer()
        return appended

    def on_done(self, error: Error | None) -> None:
        super().on_done(error)
        if error is None:
            self.topic.notify_listeners()

    def _publish(self) -> None:
        core, told, laid = self.topic, self.stats, self.frame_buffers
        if laid is None or told is None or self.file is None:
            core.publish(
                self.first, self.frames_in_memory, self.count, self.data_bytes, self.ts_ms, persistent=True, stats=told
            )
            return
        at = self.offset + self.size - sum(map(len, laid.frames))  # behind what `prepare` put in front
        pieces = []
        for made in laid.frames:
            pieces.append(WalRange(self.file, at, len(made)))
            at += len(made)
        core.publish_stored(self.first, pieces, told, self.data_bytes, self.ts_ms)

    def _release_buffer(self) -> None:
        """The WAL has its frames, or never will: the memory they lie in is the next one's."""
        laid, self.frame_buffers, self.pieces = self.frame_buffers, None, ()
        if laid is not None:
            self.topic.context.buffer_pool.release(laid.buffer)


def common_index_flags(batch: Records) -> int | None:
    """What the index says of every record of a batch; None where they differ."""
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
    """What the index says of a batch, without reading it again for that; None where its records differ."""
    flags = common_index_flags(batch)
    if not isinstance(batch, Batch) or flags is None:
        return None
    counts = [len(batch)] if len(frames) == 1 else [_count_records(made) for made in frames]
    return BatchStats(counts, batch.lengths, flags)


def _count_records(made: bytes) -> int:
    found = frame.read_frame(made, 0, len(made), check=False)
    assert isinstance(found, frame.Frame), "a frame that was just made is one"
    return batches.record_count(made, found) if found.kind == frame.APPEND_BATCH else 1


class DurableAppend(Append):
    """A batch that is durable when it is acknowledged, whatever the class of its topic is."""

    __slots__ = ()

    def __init__(self, topic: TopicState, first: int, ts_ms: int, batch: Records, key: str | None) -> None:
        super().__init__(topic, first, ts_ms, batch, key)
        self.durable = True


def submit_append(
    topic: TopicState, batch: Batch | ArrowBatch, key: str | None, *, durable: bool = False
) -> CommitFuture[Appended]:
    """Stage a batch; its token tells when it is acknowledged. Raises before anything was assigned."""
    check_idempotency_key(key)
    with topic.lock:
        topic.check_writable()
        shard = topic.shard
        if key is not None:
            now_ms, window_ms = topic.context.clock.monotonic_ms(), topic.config.idempotency_window_ms
            seen = topic.idempotency_window.lookup(key, now_ms, window_ms)
            if isinstance(seen, PendingWrite):
                return _follow_pending_write(topic, seen.future)
            if seen is not None:
                return CommitFuture.completed(shard, replace(seen.outcome, deduped=True))
            topic.idempotency_window.forget_expired(now_ms, window_ms)
        return submit_batch(topic, batch, key, DurableAppend if durable else Append)


def submit_batch(
    topic: TopicState, batch: Records, key: str | None, make_commit: Callable[..., Append] = Append
) -> CommitFuture[Appended]:
    """Admit a batch, give it seqs and put it in the queue. With the lock held and the topic found writable."""
    _check_topic_caps(topic, batch)
    topic.quota.acquire(batch.weight)
    try:
        first, ts_ms = topic.last_assigned_seq + 1, topic.next_timestamp_ms()
        if topic.is_ephemeral:
            return _append_ephemeral(topic, first, ts_ms, batch, key)
        commit = make_commit(topic, first, ts_ms, batch, key)
        topic.submit(commit)
    except BaseException:
        topic.quota.release(batch.weight)
        raise
    count = len(batch)
    topic.last_assigned_seq = first + count - 1
    topic.index.last_ts = ts_ms
    topic.staged_records += count
    topic.staged_bytes += batch.weight
    if key is not None:
        topic.idempotency_window.begin(key, commit.future)
    return commit.future


def check_idempotency_key(key: object) -> None:
    """Refuse what is no idempotency key."""
    if key is not None and not (batch_encoder.is_utf8_text(key) and 0 < len(str(key).encode()) <= _KEY_BYTES_MAX):
        raise BadInput(
            f"an idempotency key is text of 1 to {_KEY_BYTES_MAX} bytes, not {key!r:.80}; nothing was written"
        )


def _follow_pending_write(topic: TopicState, first: CommitFuture[Appended]) -> CommitFuture[Appended]:
    """The outcome of a write under way, for another one with its key."""
    token: CommitFuture[Appended] = CommitFuture(topic.shard)

    def tell(known: CommitFuture[Appended]) -> None:
        try:
            token.set_result(replace(known.wait(), deduped=True))
        except Error as error:
            token.set_exception(error)

    first.add_done_callback(tell)
    return token


def check_first_write(context: EngineContext, name: str, config: TopicConfig, batch: Records) -> None:
    """What the first write of a topic that does not exist yet would be refused for."""
    _check_caps(name, config, batch)
    context.quota.acquire(batch.weight)
    context.quota.release(batch.weight)


def _check_caps(name: str, config: TopicConfig, batch: Records) -> None:
    """A write that would not even fit an empty topic."""
    if config.discard == "reject":
        for cap, more, unit in ((config.cap_records, len(batch), "records"), (config.cap_bytes, batch.weight, "bytes")):
            if cap and more > cap:
                raise TooLarge(f"{name}: a write", size=more, limit=cap, unit=unit)


def _check_topic_caps(topic: TopicState, batch: Records) -> None:
    """A topic that rejects what it has no room for does so before a seq is taken."""
    config, index = topic.config, topic.index
    if config.discard != "reject":
        return
    _check_caps(topic.name, config, batch)
    for cap, held, more in (
        (config.cap_records, index.count + topic.staged_records, len(batch)),
        (config.cap_bytes, index.bytes + topic.staged_bytes, batch.weight),
    ):
        if cap and held + more > cap:
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
    """An ephemeral topic's record is visible at once and lies in no file."""
    frames = batch_encoder.encode_frames(topic.id, first, ts_ms, batch, durable=False)
    topic.publish(first, frames, len(batch), batch.weight, ts_ms, persistent=False, stats=batch_stats(batch, frames))
    topic.last_assigned_seq = topic.index.head
    appended = Appended(first, topic.last_assigned_seq, topic.last_assigned_seq)
    if key is not None:
        token: CommitFuture[Appended] = CommitFuture.completed(topic.shard, appended)
        topic.idempotency_window.begin(key, token)
        topic.idempotency_window.complete(key, appended, topic.context.clock.monotonic_ms(), persistent=False)
    return CommitFuture.completed(topic.shard, appended)
