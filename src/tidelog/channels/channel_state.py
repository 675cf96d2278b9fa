"""[shell] One channel in memory: who listens, what was accepted, and the order in which both happen.

The life of a message:

    1  submit   under the shard's lock: may this user publish; seq, time, append; a place in the queue
    2  commit   the first thread takes all that is queued; one sync for all of it, without the lock
    3           under the lock again: fan-out in seq order; acks

So a message is never delivered, nor shown in the history, before it is as durable as its ack says, and
publishers of one channel share syncs. A commit that fails delivers nothing of what it took; its seqs
stay used. Every method wants the shard's lock held, but for `commit`.

A thread commits once. What was queued meanwhile is committed by a thread that waits for it, or, where none waits, by
the same thread. While a change of the channel is asked for (`asked`) no commit begins: it waits for one at most, and
its thread goes on with what is queued.

[shell] A caller's handle on what becomes of its messages.

[shell] Fifo channels: the owner pushes, readers pop, a durable cursor says what is next.

    first ≤ cursor ≤ last + 1         what the log has from the cursor on waits

A pop is at most once: the message is on disk before the cursor passes it, the cursor is on disk before
the message is handed out. A crash in between loses that message and never gives it twice. A cursor
that cannot be read, or that contradicts the log, is not guessed: the channel says CursorLost until its
owner clears it. Seqs that a power cut took before their sync are not given again and never wait: a pop passes over
them, logs their range and counts them (`fifo_seqs_passed_over`). Every function wants the shard's lock held, and waits
for the disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Condition, Event, Lock
from typing import NamedTuple

from tidelog.channels import rules as lists
from tidelog.channels.message_log import Message, MessageLog
from tidelog.channels.metrics import SUCCESS, ChannelMetrics
from tidelog.channels.store import CURSOR_FILE
from tidelog.channels.subscription import ChannelEvent, EndReason, Presence, PresenceKind, Subscription
from tidelog.clock import Clock
from tidelog.disk.durability import DISK_FULL_ERRNOS, read_file, replace_file
from tidelog.disk.interface import Disk, join
from tidelog.disk.interrupts import defer_signals
from tidelog.errors import (
    ChannelNotFound,
    CursorLost,
    Damaged,
    DiskFull,
    Error,
    FifoEmpty,
    FifoFull,
    InDoubt,
    Latched,
    WriteFailed,
)
from tidelog.formats.channel_meta import ChannelMeta, decode_cursor, encode_cursor


class Ack(NamedTuple):
    """What was promised about a publish, and nothing more than that."""

    channel: str
    seq: int  # of the last message of the call
    messages: int  # of the call
    ts_ms: int  # the same for every receiver
    qos: int  # 0: accepted; 1: appended, synced as the channel says, and handed to every receiver's queue
    durable: bool  # whether a power cut now would leave it
    receivers: int | None  # subscriptions it was handed to; None: not known yet


class PublishFuture:
    """Messages that were accepted. `wait` where waiting is fine, `add_callback` on an event loop."""

    __slots__ = (
        "_callbacks",
        "_commit",
        "_done_event",
        "_lock",
        "_outcome",
        "_waiting_threads",
        "log",
        "messages",
        "qos",
        "sender_source",
        "sync",
    )

    def __init__(
        self,
        messages: list[Message],
        *,
        qos: int,
        sync: bool,
        source: object,
        commit: Callable[[], object],
        log: MessageLog | None = None,
    ) -> None:
        self.messages, self.qos, self.sync, self.sender_source = messages, qos, sync, source
        self.log = log  # where they were appended; None: the channel keeps no messages
        self._commit = commit
        self._outcome: Ack | Error | None = None
        self._lock = Lock()
        self._done_event: Event | None = None
        self._waiting_threads = 0  # threads in `wait`
        self._callbacks: list[Callable[[PublishFuture], object]] = []

    @property
    def seq(self) -> int:
        return self.messages[-1].seq

    @property
    def payload_bytes(self) -> int:
        """Bytes of all payloads."""
        return sum(len(message.payload) for message in self.messages)

    @property
    def done(self) -> bool:
        return self._outcome is not None

    def ack(self, *, durable: bool, receivers: int | None) -> Ack:
        last = self.messages[-1]
        return Ack(last.channel, last.seq, len(self.messages), last.ts_ms, self.qos, durable, receivers)

    def set_outcome(self, outcome: Ack | Error) -> None:
        """Tell the outcome; the first one counts. A message of qos 0 has its ack before it is delivered."""
        with self._lock:
            if self._outcome is not None:
                return
            self._outcome = outcome
            bell, callbacks, self._callbacks = self._done_event, self._callbacks, []
        if bell is not None:
            bell.set()
        for callback in callbacks:
            # Whoever is called may be gone by now, with its event loop; that must not stop the committer.
            with suppress(Exception):
                callback(self)

    def add_done_callback(self, callback: Callable[[PublishFuture], object]) -> None:
        """Have `callback(pending)` called once the outcome is known: now if it is, else by whoever commits. It must be
        short and must not wait."""
        with self._lock:
            if self._outcome is None:
                self._callbacks.append(callback)
                return
        callback(self)

    def deliver(self) -> None:
        """Commit by itself what nobody is committing yet."""
        self._commit()

    def hand_over_commit(self) -> bool:
        """Have a thread that waits for this commit what is queued; False where none waits."""
        with self._lock:
            if self._outcome is not None or not self._waiting_threads or self._done_event is None:
                return False
            self._done_event.set()
            return True

    def result(self) -> Ack:
        """The ack, or the error raised; only once it is `done`."""
        assert self._outcome is not None, "asked once it is done"
        if isinstance(self._outcome, Error):
            raise self._outcome.with_traceback(None)
        return self._outcome

    def wait(self, timeout: float | None = None) -> Ack:
        """The ack, or the error raised. Commits by itself what nobody is committing yet, and when the thread that does
        has done its one commit and passes that on."""
        while not self.done:
            self._commit()
            with self._lock:
                if self._outcome is not None:
                    break
                bell = self._done_event = self._done_event or Event()
                self._waiting_threads += 1
            try:
                bell.wait(timeout)
            except BaseException:
                if self._end_wait(bell):
                    self._commit()  # it was passed on to this thread, which ends
                raise
            if not self._end_wait(bell) and not self.done:
                raise InDoubt(
                    f"{self.messages[0].channel}: no outcome within {timeout} s; the message may still be delivered, "
                    "look into the history before it is sent again"
                )
        return self.result()

    def _end_wait(self, event: Event) -> bool:
        """This thread waits no more: whether it is to commit what is queued, or has its outcome."""
        with self._lock:
            self._waiting_threads -= 1
            woken = event.is_set()
            if self._outcome is None:
                event.clear()
            return woken


_log = logging.getLogger("tidelog.channels")


class ChannelState:
    def __init__(
        self,
        meta: ChannelMeta,
        lock: Condition,
        clock: Clock,
        metrics: ChannelMetrics,
        open_log: Callable[[ChannelState], MessageLog],
        *,
        has_waiting_change: Callable[[], bool] = lambda: False,
        uncommitted: dict[str, ChannelState] | None = None,
    ) -> None:
        self.meta, self.lock, self._clock, self._metrics = meta, lock, clock, metrics
        self._open_log = open_log
        self.has_waiting_change = has_waiting_change  # whether a change of the channel waits for its turn
        self._uncommitted = {} if uncommitted is None else uncommitted  # rooms with something queued, by name
        self.commit_count = 0  # syncs for messages, and deliveries that needed none
        self.log: MessageLog | None = None  # open, or not yet, or not any more
        self.is_verified = False  # its log was read whole once: opened again it need not be
        self.next_seq = 1  # of a channel whose log is not open; a persistent one asks its log
        self.delivered_seq = 0  # the last seq that was delivered: nobody is shown more
        self.last_ts_ms = 0
        self.subscriptions: list[Subscription] = []
        self.queued: list[PublishFuture] = []
        self.committing = False
        self.readers = 0  # readers of the log that do not hold the lock
        self.is_deleted = False
        self.dirty_since_ms: int | None = None  # since when something waits for its flush
        self.fifo_cursor: int | str | None = None  # fifo: the next seq, or why nobody knows; None: not read yet

    @property
    def handler(self) -> str:
        return self.meta.handler

    @property
    def is_idle(self) -> bool:
        """Whether its log may be closed: nobody uses it, and nothing would be promised by closing."""
        log = self.log
        busy = self.committing or self.readers or self.queued
        return log is not None and not busy and log.is_synced and not log.is_latched

    def message_log(self) -> MessageLog:
        """The open log of a persistent channel."""
        log = self.log
        if log is None:
            log = self.log = self._open_log(self)
            self.is_verified = True
            self.delivered_seq = log.last_seq
        return log

    def wait_idle(self) -> None:
        """Wait until nobody commits and nobody reads. The lock is let go meanwhile."""
        while self.committing or self.readers:
            self.lock.wait()

    # ── publish ───────────────────────────────────────────────────────────────────────────────

    def submit(self, payloads: list[bytes], sender: str, *, qos: int, source: object) -> PublishFuture:
        """Take messages that were checked: they have their seqs and their place in the order."""
        persist = self.meta.config.persist
        log = self.message_log() if persist else None
        if log is not None:
            first, ts_ms = log.append(payloads, sender.encode())
            if self.dirty_since_ms is None:
                self.dirty_since_ms = self._clock.monotonic_ms()
        else:
            first, self.next_seq = self.next_seq, self.next_seq + len(payloads)
            ts_ms = max(self._clock.now_us() // 1000, self.last_ts_ms)
        self.last_ts_ms = ts_ms
        handler = self.handler
        made = [Message(handler, seq, ts_ms, sender, payload) for seq, payload in enumerate(payloads, first)]
        sync = persist and qos == 1 and self.meta.config.message_flush_interval == 0
        pending = PublishFuture(made, qos=qos, sync=sync, source=source, commit=self.commit, log=log)
        self.queued.append(pending)
        self._uncommitted[handler] = self
        if qos == 0:
            pending.set_outcome(pending.ack(durable=False, receivers=None))
        return pending

    @defer_signals
    def commit(self, *, last: bool = False) -> None:
        """Sync and deliver all that is queued, unless another thread is at it, which passes on what it does not take,
        or a change is asked for, whose thread calls this afterwards. Called without the lock; outcomes are told by the
        acks. `last`: the channel is closed, and no change can come in between."""
        while True:
            with self.lock:
                if self.committing or not self.queued or (not last and self.has_waiting_change()):
                    return
                self.commit_count += 1
                taken, log = self.queued[:], self.log
                # A log that was removed since, with what was in it, has nothing to sync.
                durable = log is not None and any(pending.sync and pending.log is log for pending in taken)
                self.committing = durable
                counts = [] if durable else self._deliver(taken)
            try:
                if durable and log is not None:
                    self._commit_synced(taken, log)
                else:
                    self._resolve_futures(taken, counts, None)
            except BaseException:
                self._finish_commit(durable=durable)
                raise
            if self._finish_commit(durable=durable):
                return

    def _finish_commit(self, *, durable: bool) -> bool:
        """One commit is over; whether a thread that waits for what was queued meanwhile goes on with it."""
        with self.lock:
            if durable:
                self._end_commit()
            left = list(self.queued)
        return any(pending.hand_over_commit() for pending in left)

    def _commit_synced(self, futures: list[PublishFuture], log: MessageLog) -> None:
        """One sync, then fan-out and acks."""
        try:
            log.sync()
        except Error as error:
            with self.lock:
                self._remove_queued(futures)
            self._metrics.add("broadcasts", error.code, by=len(futures))
            for pending in futures:
                pending.set_outcome(error)
            return
        with self.lock:
            counts = self._deliver(futures)
            self._mark_flushed(log)
        self._resolve_futures(futures, counts, log)

    def _end_commit(self) -> None:
        self.committing = False
        self.lock.notify_all()

    def _mark_flushed(self, log: MessageLog) -> None:
        self.dirty_since_ms = None if log.is_synced else self._clock.monotonic_ms()

    def _deliver(self, futures: list[PublishFuture]) -> list[int]:
        """Hand out what was taken from the head of the queue; how many receivers each had."""
        self._remove_queued(futures)
        counts = []
        for pending in futures:
            self.delivered_seq = pending.seq
            counts.append(self._fan_out(pending.messages, pending.sender_source, readers_only=True))
        self._enforce_cap()
        return counts

    def _remove_queued(self, futures: list[PublishFuture]) -> None:
        """Take the head of the queue out of it."""
        del self.queued[: len(futures)]
        if not self.queued:
            self._uncommitted.pop(self.handler, None)

    def _resolve_futures(self, futures: list[PublishFuture], counts: list[int], synced_log: MessageLog | None) -> None:
        handed = sum(len(pending.messages) * count for pending, count in zip(futures, counts, strict=True))
        self._metrics.add_all(
            ("broadcasts", SUCCESS, len(futures)),
            ("deliveries", "", handed),
            ("broadcast_payload_bytes", "", sum(pending.payload_bytes for pending in futures)),
        )
        for pending, count in zip(futures, counts, strict=True):
            pending.set_outcome(
                pending.ack(durable=synced_log is not None and pending.log is synced_log, receivers=count)
            )

    def _fan_out(self, events: Sequence[ChannelEvent], source: object, *, readers_only: bool) -> int:
        """Hand events to everybody but their source; with `reading` only to those who may read."""
        count = 0
        newest = events[-1].seq if readers_only and isinstance(events[-1], Message) else 0
        ended: list[tuple[Subscription, EndReason]] = []
        for subscription in self.subscriptions:
            if (subscription.source is source and source is not None) or (readers_only and not subscription.can_read):
                continue
            if (trouble := subscription.enqueue(events)) is not None:
                ended.append((subscription, trouble))
                continue
            count += 1
            if newest:
                subscription.last_seq = newest
        for subscription, trouble in ended:
            self._metrics.add("outbound_queue_full", trouble)
            self.remove_subscription(subscription, trouble)
        return count

    def flush(self) -> None:
        """Sync what an interval has waiting. Called without the lock, by one who has pinned the log."""
        log = self.log
        if log is not None and not log.is_latched:
            log.sync()
            with self.lock:
                self._mark_flushed(log)

    def run_maintenance(self, work: Callable[[], None]) -> None:
        """Do something that nothing acknowledged hangs on: an error is counted and is nobody's answer."""
        try:
            work()
        except Error as error:
            _log.warning("%s: %s", self.handler, error)
            self._metrics.add("message_log_upkeep", error.code)

    def _enforce_cap(self) -> None:
        log, config = self.log, self.meta.config
        if log is not None and not log.is_latched and config.persist:
            self.run_maintenance(lambda: log.keep_newest(config.max_persist_messages))

    # ── listeners ─────────────────────────────────────────────────────────────────────────────

    def publish_presence(self, kind: PresenceKind, user: str, *, owner: bool, source: object) -> None:
        """Tell the listeners, but for whoever did it, what happened to the channel."""
        ts_ms = max(self._clock.now_us() // 1000, 0)
        self._fan_out([Presence(kind, self.handler, user, owner, ts_ms)], source, readers_only=False)

    def add_subscription(self, subscription: Subscription) -> None:
        self.subscriptions.append(subscription)

    def remove_subscription(self, subscription: Subscription, reason: EndReason = "closed") -> None:
        if subscription in self.subscriptions:
            self.subscriptions.remove(subscription)
        subscription.end(reason)

    def remove_user_subscriptions(self, user: str, reason: EndReason) -> None:
        for subscription in [each for each in self.subscriptions if each.user == user]:
            self.remove_subscription(subscription, reason)

    def apply(self, meta: ChannelMeta) -> None:
        """Put a change that was saved into force."""
        if meta.acl.read != self.meta.acl.read:
            for subscription in self.subscriptions:
                subscription.can_read = lists.is_allowed(meta.acl.read, subscription.user)
        self.meta = meta

    # ── the end ───────────────────────────────────────────────────────────────────────────────

    def shut_down(self, reason: EndReason) -> None:
        """Nobody listens any more, and what was not committed never will be."""
        self.is_deleted = reason == "deleted"
        for pending in self.queued:
            pending.set_outcome(ChannelNotFound(self.handler))
        self.queued.clear()
        self._uncommitted.pop(self.handler, None)
        for subscription in list(self.subscriptions):
            self.remove_subscription(subscription, reason)

    def close_log(self) -> None:
        """Let go of the log; what it holds is synced first, unless it is latched."""
        log, self.log = self.log, None
        self.dirty_since_ms = None
        if log is not None:
            if not self.meta.config.persist or self.meta.config.type == "pubsub":
                self.next_seq = log.last_seq + 1
            log.close()


_log = logging.getLogger("tidelog.channels")


class FifoQueue:
    """The queue in a channel's directory."""

    def __init__(self, state: ChannelState, disk: Disk, directory: str, metrics: ChannelMetrics) -> None:
        self._state, self._disk, self._path, self._metrics = state, disk, join(directory, CURSOR_FILE), metrics

    def reset_to(self, next_seq: int) -> None:
        """Make an empty queue of a channel: what was published before is out of reach."""
        self._save_cursor(next_seq)

    def push(self, payload: bytes, sender: str, *, sync: bool) -> Message:
        """Put one message at the end. When it raises, nothing was pushed (`written` of the error is False), except that
        a sync may fail (Latched) when the message is written already: `written` is None, and whether it was pushed
        shows after a restart."""
        room, log = self._state, self._state.message_log()
        limit = room.meta.config.max_persist_messages
        if log.count_from(self._next_seq()) >= limit:
            raise FifoFull(room.handler, limit=limit)
        seq, ts_ms = log.append([payload], sender.encode())
        if sync:
            try:
                log.sync()
            except Latched as error:
                raise Latched(
                    f"{room.handler}: message {seq} was written and its sync failed ({error}); whether it was pushed "
                    "shows when the directory is opened again, look for it before it is pushed again"
                ) from error
        return Message(room.handler, seq, ts_ms, sender, payload)

    def pop(self) -> Message:
        """Take the oldest message. It is gone for everybody, also after a crash."""
        room, log = self._state, self._state.message_log()
        cursor = self._next_seq()
        seq = log.skip_hole(cursor)
        if seq > log.last_seq:
            raise FifoEmpty(room.handler)
        if not log.is_synced:
            log.sync()  # a cursor must never stand past what a power cut leaves
        found = log.read(seq, limit=1, bytes_max=1)
        if not found or found[0].seq != seq:
            raise Damaged(f"{room.handler}: message {seq} is not there; nothing was popped, its owner can clear it")
        self._save_cursor(seq + 1)
        self._report_skipped(cursor, seq)
        return found[0]

    def _report_skipped(self, first: int, stop: int) -> None:
        """Count and log the seqs of [first, stop) that the cursor went past without a message."""
        missing = self._state.message_log().count_hole_seqs(first, stop)
        if missing:
            self._metrics.add("fifo_seqs_passed_over", by=missing)
            _log.warning(
                "%s: the cursor passed over %d of the seqs %d to %d, which a power cut took before their sync; push "
                "these messages again where they are still wanted",
                *(self._state.handler, missing, first, stop - 1),
            )

    def trim(self) -> None:
        """Drop sealed segments that were popped whole, and start another where one has grown."""
        log = self._state.message_log()
        if not log.is_latched:
            log.keep_from_seq(self._next_seq(), self._state.meta.config.max_persist_messages)

    def clear(self) -> int:
        """Pass over all that waits; return how many that were, 0 where nobody knows. Mends a lost cursor."""
        log = self._state.message_log()
        if not log.is_synced:
            log.sync()
        first, stop = log.last_seq + 1, log.last_seq + 1
        try:
            first, waiting = self._next_seq(), self.length()
        except CursorLost:
            waiting = 0
        self._save_cursor(stop)
        self._report_skipped(first, stop)
        return waiting

    def length(self) -> int:
        return self._state.message_log().count_from(self._next_seq())

    def _next_seq(self) -> int:
        """The next seq to pop, held against the log."""
        if self._state.fifo_cursor is None:
            self._state.fifo_cursor = self._read_cursor()
        cursor, log = self._state.fifo_cursor, self._state.message_log()
        if isinstance(cursor, int) and cursor > log.last_seq + 1:
            cursor = f"cursor.bin says {cursor} and the log ends at {log.last_seq}"
        if isinstance(cursor, int) and cursor < log.first_seq:
            cursor = f"cursor.bin says {cursor} and the log begins at {log.first_seq}"
        if isinstance(cursor, str):
            raise CursorLost(self._state.handler, reason=cursor)
        return cursor

    def _read_cursor(self) -> int | str:
        try:
            content = read_file(self._disk, self._path)
        except OSError as error:
            raise Damaged(
                f"{self._path} cannot be read: {error}; nothing was changed, mend the disk and retry"
            ) from error
        if content is None:
            return "there is no cursor.bin"
        found = decode_cursor(content)
        return "cursor.bin is damaged" if found is None else found

    def _save_cursor(self, next_seq: int) -> None:
        before = self._state.fifo_cursor
        try:
            with self._metrics.timed("fifo_cursor_duration"):
                replace_file(self._disk, self._path, encode_cursor(next_seq))
        except OSError as error:
            self._state.fifo_cursor = self._restore_cursor(before)
            if error.errno in DISK_FULL_ERRNOS:
                raise DiskFull(
                    f"{self._path}: no room for the cursor; nothing was popped, free space and retry"
                ) from error
            raise WriteFailed(f"{self._path}: {error}; nothing was handed out, mend the disk and retry") from error
        self._state.fifo_cursor = next_seq

    def _restore_cursor(self, previous: int | str | None) -> int | str | None:
        """The cursor after a failed move: as before where that could be made sure, else to be read from the file, so
        that no message is handed out by two pops, one before a restart and one after."""
        if not isinstance(previous, int):
            return previous
        try:
            if read_file(self._disk, self._path) != encode_cursor(previous):
                replace_file(self._disk, self._path, encode_cursor(previous))
        except OSError:
            return None
        return previous
