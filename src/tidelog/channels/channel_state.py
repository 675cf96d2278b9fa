"""One channel in memory: subscriptions, accepted messages, group commit, and the queue of a fifo channel.

    1  submit   with the shard's lock: check permission; assign seq and time, append, enqueue
    2  commit   one thread takes the whole queue; one sync for all of it, without the lock
    3  publish  with the lock again: fan-out in seq order; acks

A message is neither delivered nor visible in the history before it is as durable as its ack states. Publishers of
one channel share syncs (`wal.group_commit`). A failed commit delivers none of its messages; their seqs stay used.

A subscription is the interface of one subscriber to an event loop: a bounded event queue. It never calls a transport
and never waits for one:

    publisher                                   event loop
    enqueue(events), then `wake()` if the       take(): all queued events in order, without blocking
    subscriber is idle                          an empty list means idle: `wake` will be called

`wake` runs in the publisher's thread with the lock of the channel's shard. It must be short, must not call channels,
and usually is `partial(loop.call_soon_threadsafe, callback)`. If it raises, the subscription ends. A program without
an event loop calls `wait`.

A subscription whose queue is full ends: the subscriber still gets the queued events, then one `SubscriptionEnded`.
Other subscribers are unaffected. The missed messages are in the history, after the last seq it saw.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition, Event
from typing import Literal, NamedTuple, Self, TypeAlias

from tidelog.channels import rules
from tidelog.channels.metrics import SUCCESS, ChannelMetrics
from tidelog.channels.store import CURSOR_FILE, Message, MessageLog
from tidelog.clock import Clock
from tidelog.disk.durability import DISK_FULL_ERRNOS, read_file, replace_file
from tidelog.disk.interface import Disk, join
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
from tidelog.formats.small_files import ChannelMeta, decode_cursor, encode_cursor
from tidelog.times import Seconds, seconds
from tidelog.wal import CommitFuture, GroupCommit

PresenceKind: TypeAlias = Literal["joined", "left", "deleted", "reconfigured"]
EndReason: TypeAlias = Literal["slow", "left", "deleted", "broken", "closed"]


class Presence(NamedTuple):
    """A change of the channel itself."""

    kind: PresenceKind
    channel: str
    user: str  # who joined, left, deleted or reconfigured
    owner: bool  # whether that user owns, or owned, the channel
    ts_ms: int


class SubscriptionEnded(NamedTuple):
    """The last event of a subscription, with the reason."""

    channel: str
    reason: EndReason
    last_seq: int  # the newest message delivered before it; 0: none


ChannelEvent: TypeAlias = Message | Presence | SubscriptionEnded


class Subscription:
    """The events of one channel for one subscriber, which calls `take`, `wait` and `close`."""

    __slots__ = (
        "_event",
        "_needs_wake",
        "_on_close",
        "_queue",
        "_queue_max",
        "_wake",
        "can_read",
        "channel",
        "closed",
        "last_seq",
        "source",
        "user",
    )  # fmt: skip

    def __init__(
        self,
        channel: str,
        user: str,
        *,
        queue_max: int,
        wake: Callable[[], object] | None,
        source: object,
        can_read: bool,
        on_close: Callable[[Subscription], None],
    ) -> None:
        self.channel, self.user, self.source = channel, user, source
        self.can_read = can_read  # whether the read list allows the user; updated by the channel
        self.closed = False
        self.last_seq = 0
        self._queue: deque[ChannelEvent] = deque()
        self._queue_max, self._wake, self._on_close = queue_max, wake, on_close
        self._needs_wake = True
        self._event: Event | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<subscription of channel {self.channel!r}{', closed' if self.closed else ''}>"

    # ── called by the channel with its lock ───────────────────────────────────────────────────

    def enqueue(self, events: Sequence[ChannelEvent]) -> EndReason | None:
        """Queue events; return why the subscription must end if the queue is full or `wake` raises."""
        queue = self._queue
        if len(queue) + len(events) > self._queue_max:
            return "slow"
        queue.extend(events)
        return None if self._wake_owner() else "broken"

    def end(self, reason: EndReason) -> None:
        """Queue the last event, also if the queue is full."""
        if not self.closed:
            self.closed = True
            self._queue.append(SubscriptionEnded(self.channel, reason, self.last_seq))
            self._needs_wake = True  # also wake a subscriber that was woken and has not called `take`
            self._wake_owner()

    def _wake_owner(self) -> bool:
        # The event is queued before the flag is read; `take` sets the flag before it looks at the queue again. So
        # either this thread sees the flag or `take` sees the event.
        if not self._needs_wake:
            return True
        self._needs_wake = False
        if self._event is not None:
            self._event.set()
        if self._wake is not None:
            try:
                self._wake()
            except Exception:
                return False  # a closed event loop or a bug of the transport: only its own subscription ends
        return True

    # ── called by the subscriber ──────────────────────────────────────────────────────────────

    def take(self, limit: int | None = None) -> list[ChannelEvent]:
        """Return queued events, oldest first, at most `limit`, without blocking."""
        events: list[ChannelEvent] = []
        queue = self._queue
        while limit is None or len(events) < limit:
            try:
                events.append(queue.popleft())
            except IndexError:
                if events or self._needs_wake:
                    break
                self._needs_wake = True
                if not queue:
                    break
                self._needs_wake = False
        return events

    def wait(self, timeout: Seconds | None = None) -> list[ChannelEvent]:
        """Wait for events and return them; return an empty list after `timeout` seconds, or at once after the end."""
        timeout = seconds("timeout", timeout)
        event = self._event = self._event or Event()
        while True:
            event.clear()
            events = self.take()
            if events or self.closed:
                return events
            if self._queue:
                continue
            if not event.wait(timeout):
                return self.take()

    @property
    def pending(self) -> int:
        """The number of events that were not taken yet."""
        return len(self._queue)

    def close(self) -> None:
        """End the subscription. The membership stays."""
        self._on_close(self)

    def __iter__(self) -> Iterator[ChannelEvent]:
        """Yield events until the subscription ends."""
        while events := self.wait():
            yield from events


class Ack(NamedTuple):
    """The guarantee given for one publish call."""

    channel: str
    seq: int  # of the last message of the call
    messages: int  # of the call
    ts_ms: int  # the same for every receiver
    qos: int  # 0: accepted; 1: appended, synced as the channel is configured, and in every subscriber's queue
    durable: bool  # whether the messages survive a power cut now
    receivers: int | None  # subscriptions they were delivered to; None: not known yet


class PublishFuture(CommitFuture[Ack]):
    """The outcome of accepted messages. Threads call `wait`; an event loop calls `add_done_callback`."""

    __slots__ = ("log", "messages", "qos", "sender_source", "size", "sync")

    def __init__(
        self,
        messages: list[Message],
        *,
        qos: int,
        sync: bool,
        source: object,
        commits: GroupCommit[PublishFuture],
        log: MessageLog | None = None,
    ) -> None:
        super().__init__(commits)
        self.messages, self.qos, self.sync, self.sender_source = messages, qos, sync, source
        self.log = log  # where they were appended; None: the channel is not persistent
        self.size = sum(len(message.payload) for message in messages)

    @property
    def seq(self) -> int:
        return self.messages[-1].seq

    @property
    def frames(self) -> int:
        return len(self.messages)

    @property
    def future(self) -> PublishFuture:
        return self

    def ack(self, *, durable: bool, receivers: int | None) -> Ack:
        last = self.messages[-1]
        return Ack(last.channel, last.seq, len(self.messages), last.ts_ms, self.qos, durable, receivers)

    def set_outcome(self, outcome: Ack | Error) -> None:
        """Resolve the future; only the first outcome counts. A qos 0 publish is resolved before its delivery."""
        if not self.done:
            self.set_result(outcome)

    def on_done(self, error: Error | None) -> None:
        if error is not None:
            self.set_outcome(error)

    def deliver(self) -> None:
        """Commit the queue of the channel unless another thread is committing it."""
        self.try_commit()

    def result(self) -> Ack:
        """Return the ack or raise the error; only once it is `done`."""
        assert self.done, "called before it is done"
        return self.wait()


_log = logging.getLogger("tidelog.channels")


class ChannelState:
    """One open channel: the store of its group commit. Messages are appended when they are accepted and share only the
    sync. Every method needs the shard's lock, except `exclusive`, `flush` and those that the group commit calls."""

    def __init__(
        self,
        meta: ChannelMeta,
        lock: Condition,
        clock: Clock,
        metrics: ChannelMetrics,
        open_log: Callable[[ChannelState], MessageLog],
        *,
        uncommitted: dict[str, ChannelState] | None = None,
    ) -> None:
        self.meta, self.lock, self._clock, self._metrics = meta, lock, clock, metrics
        self._open_log = open_log
        self.commits: GroupCommit[PublishFuture] = GroupCommit(self)
        self._uncommitted = {} if uncommitted is None else uncommitted  # the shard's channels for the next tick
        self.commit_count = 0  # commits, with or without a sync
        self._synced_log: MessageLog | None = None  # the log that the running commit has synced
        self.log: MessageLog | None = None  # None while it is closed
        self.is_verified = False  # its log was verified once and is not verified again when it is reopened
        self.next_seq = 1  # of a channel whose log is not open; a persistent channel asks its log
        self.delivered_seq = 0  # the newest delivered seq: readers see nothing after it
        self.last_ts_ms = 0
        self.subscriptions: list[Subscription] = []
        self.readers = 0  # readers of the log that do not hold the lock
        self.is_deleted = False
        self.dirty_since_ms: int | None = None  # when the oldest unsynced message was appended
        self.fifo_cursor: int | str | None = None  # fifo: the next seq, or why it is unknown; None: not read yet

    @property
    def handler(self) -> str:
        return self.meta.handler

    @property
    def is_idle(self) -> bool:
        """Whether its log may be closed: open, unused, synced and not latched."""
        log = self.log
        is_unused = self.commits.is_idle and not self.readers
        return log is not None and is_unused and log.is_synced and not log.is_latched

    def message_log(self) -> MessageLog:
        """Return the log of a persistent channel; open it if necessary."""
        log = self.log
        if log is None:
            log = self.log = self._open_log(self)
            self.is_verified = True
            self.delivered_seq = log.last_seq
        return log

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Run a change: at most one commit comes before it, and no commit and no read of the log starts until it is
        done. Called without the shard's lock. Messages queued meanwhile are committed afterwards."""
        try:
            with self.commits.exclusive():
                yield
        finally:
            with self.lock:
                self.lock.notify_all()  # readers wait for the end of the change
            self.commits.commit_all()

    def wait_for_readers(self) -> None:
        """Wait until no thread reads the log. The lock is released meanwhile."""
        while self.readers:
            self.lock.wait()

    # ── publish ───────────────────────────────────────────────────────────────────────────────

    def submit(self, payloads: list[bytes], sender: str, *, qos: int, source: object) -> PublishFuture:
        """Accept messages that were checked: assign seqs and a time, append them, and queue them for the commit."""
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
        messages = [Message(handler, seq, ts_ms, sender, payload) for seq, payload in enumerate(payloads, first)]
        sync = persist and qos == 1 and self.meta.config.message_flush_interval == 0
        future = PublishFuture(messages, qos=qos, sync=sync, source=source, commits=self.commits, log=log)
        self.commits.submit(future)
        self._uncommitted[handler] = self
        if qos == 0:
            future.set_outcome(future.ack(durable=False, receivers=None))
        return future

    def commit_batch(self, batch: list[PublishFuture], _gathered_us: int) -> None:
        """One sync for the batch, if a message of it asks for one."""
        self.commit_count += 1
        log, outcome = self.log, None
        # A log that was removed since needs no sync.
        needs_sync = log is not None and any(future.sync and future.log is log for future in batch)
        self._synced_log = log if needs_sync else None
        try:
            if log is not None and needs_sync:
                log.sync()
        except BaseException as error:
            outcome = error
        self.commits.finish_batch(batch, outcome)

    def publish(self, batch: list[PublishFuture], error: Error | None) -> None:
        """Fan-out and acks; a batch whose sync failed is not delivered."""
        try:
            if error is None:
                self._deliver(batch, self._synced_log)
            else:
                self._metrics.add("broadcasts", error.code, by=len(batch))
                for future in batch:
                    future.set_outcome(error)
        except BaseException as failure:
            self.commits.fail_all(batch, failure)
            raise

    def fail(self, cause: BaseException) -> Error:
        """The outcome of messages whose commit raised an unexpected exception."""
        return InDoubt(
            f"{self.handler}: committing failed unexpectedly ({cause!r}); the message may have been delivered, check "
            "the history before you publish it again"
        )

    def in_doubt(self, timeout: Seconds | None) -> InDoubt:
        """The error of a publisher that stops waiting."""
        return InDoubt(
            f"{self.handler}: no outcome within {timeout} s; the message may still be delivered, check the history "
            "before you publish it again"
        )

    def _mark_flushed(self, log: MessageLog) -> None:
        self.dirty_since_ms = None if log.is_synced else self._clock.monotonic_ms()

    def _deliver(self, futures: list[PublishFuture], synced_log: MessageLog | None) -> None:
        """Queue messages for the subscribers, then resolve the futures."""
        counts = []
        with self.lock:
            for future in futures:
                self.delivered_seq = future.seq
                counts.append(self._fan_out(future.messages, future.sender_source, readers_only=True))
            self._enforce_cap()
            if synced_log is not None:
                self._mark_flushed(synced_log)
        self._metrics.add_all(
            ("broadcasts", SUCCESS, len(futures)),
            ("deliveries", "", sum(future.frames * count for future, count in zip(futures, counts, strict=True))),
            ("broadcast_payload_bytes", "", sum(future.size for future in futures)),
        )
        for future, count in zip(futures, counts, strict=True):
            future.set_outcome(future.ack(durable=synced_log is not None and future.log is synced_log, receivers=count))

    def _fan_out(self, events: Sequence[ChannelEvent], source: object, *, readers_only: bool) -> int:
        """Queue events for every subscription except those of `source`; return their number. `readers_only` leaves out
        users who may not read."""
        count = 0
        newest = events[-1].seq if readers_only and isinstance(events[-1], Message) else 0
        ended: list[tuple[Subscription, EndReason]] = []
        for subscription in self.subscriptions:
            if (subscription.source is source and source is not None) or (readers_only and not subscription.can_read):
                continue
            if (reason := subscription.enqueue(events)) is not None:
                ended.append((subscription, reason))
                continue
            count += 1
            if newest:
                subscription.last_seq = newest
        for subscription, reason in ended:
            self._metrics.add("outbound_queue_full", reason)
            self.remove_subscription(subscription, reason)
        return count

    def flush(self) -> None:
        """Sync messages of a flush interval. Called without the lock, with the log pinned (`readers`)."""
        log = self.log
        if log is not None and not log.is_latched:
            log.sync()
            with self.lock:
                self._mark_flushed(log)

    def run_maintenance(self, work: Callable[[], None]) -> None:
        """Run work that no acknowledgement depends on; an error is logged and counted, not raised."""
        try:
            work()
        except Error as error:
            _log.warning("%s: %s", self.handler, error)
            self._metrics.add("message_log_upkeep", error.code)

    def _enforce_cap(self) -> None:
        log, config = self.log, self.meta.config
        if log is not None and not log.is_latched and config.persist:
            self.run_maintenance(lambda: log.keep_newest(config.max_persist_messages))

    # ── subscriptions ─────────────────────────────────────────────────────────────────────────

    def publish_presence(self, kind: PresenceKind, user: str, *, owner: bool, source: object) -> None:
        """Send a presence event to every subscription except those of `source`."""
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
        """Apply metadata that was saved."""
        if meta.acl.read != self.meta.acl.read:
            for subscription in self.subscriptions:
                subscription.can_read = rules.is_allowed(meta.acl.read, subscription.user)
        self.meta = meta

    # ── close ─────────────────────────────────────────────────────────────────────────────────

    def shut_down(self, reason: EndReason) -> None:
        """End every subscription and fail every message that was not committed."""
        self.is_deleted = reason == "deleted"
        for future in self.commits.drain():
            future.set_outcome(ChannelNotFound(self.handler))
        for subscription in list(self.subscriptions):
            self.remove_subscription(subscription, reason)

    def close_log(self) -> None:
        """Close the log; unsynced messages are synced first, unless the log is latched."""
        log, self.log = self.log, None
        self.dirty_since_ms = None
        if log is not None:
            if not self.meta.config.persist or self.meta.config.type == "pubsub":
                self.next_seq = log.last_seq + 1
            log.close()


class FifoQueue:
    """The queue of a fifo channel: the owner pushes, readers pop, a durable cursor holds the next seq.

        first ≤ cursor ≤ last + 1         messages from the cursor on are waiting

    A pop is at most once: the message is on disk before the cursor passes it, and the cursor is on disk before the
    message is returned. A crash in between loses that message and never returns it twice. A cursor that cannot be read
    or that contradicts the log raises CursorLost until the owner clears the channel. Seqs that a power cut lost before
    their sync are not assigned again and never wait: a pop skips them, logs their range and counts them
    (`fifo_seqs_passed_over`). Every method needs the shard's lock and may block on the disk.
    """

    def __init__(self, state: ChannelState, disk: Disk, directory: str, metrics: ChannelMetrics) -> None:
        self._state, self._disk, self._path, self._metrics = state, disk, join(directory, CURSOR_FILE), metrics

    def reset_to(self, next_seq: int) -> None:
        """Make the queue empty: messages below `next_seq` are never popped."""
        self._save_cursor(next_seq)

    def push(self, payload: bytes, sender: str, *, sync: bool) -> Message:
        """Append one message. When this raises, nothing was pushed (`written` of the error is False), with one
        exception: a failed sync (Latched) of a message that is already written has `written` None, and only a restart
        shows whether it was pushed."""
        state, log = self._state, self._state.message_log()
        limit = state.meta.config.max_persist_messages
        if log.count_from(self._next_seq()) >= limit:
            raise FifoFull(state.handler, limit=limit)
        seq, ts_ms = log.append([payload], sender.encode())
        if sync:
            try:
                log.sync()
            except Latched as error:
                raise Latched(
                    f"{state.handler}: message {seq} was written and its sync failed ({error}); only reopening the "
                    "directory shows whether it was pushed, check that before you push it again"
                ) from error
        return Message(state.handler, seq, ts_ms, sender, payload)

    def pop(self) -> Message:
        """Remove and return the oldest message. No other pop returns it, also after a crash."""
        state, log = self._state, self._state.message_log()
        cursor = self._next_seq()
        seq = log.skip_hole(cursor)
        if seq > log.last_seq:
            raise FifoEmpty(state.handler)
        if not log.is_synced:
            log.sync()  # the cursor must never pass a message that a power cut can lose
        messages = log.read(seq, limit=1, bytes_max=1)
        if not messages or messages[0].seq != seq:
            raise Damaged(f"{state.handler}: message {seq} is missing; nothing was popped, its owner can clear it")
        self._save_cursor(seq + 1)
        self._report_skipped(cursor, seq)
        return messages[0]

    def _report_skipped(self, first: int, stop: int) -> None:
        """Count and log the seqs of [first, stop) that have no message."""
        missing = self._state.message_log().count_hole_seqs(first, stop)
        if missing:
            self._metrics.add("fifo_seqs_passed_over", by=missing)
            _log.warning(
                "%s: the cursor skipped %d of the seqs %d to %d, which a power cut lost before their sync; push these "
                "messages again if they are still needed",
                *(self._state.handler, missing, first, stop - 1),
            )

    def trim(self) -> None:
        """Drop sealed segments whose messages were all popped; seal the active one if it is large."""
        log = self._state.message_log()
        if not log.is_latched:
            log.keep_from_seq(self._next_seq(), self._state.meta.config.max_persist_messages)

    def clear(self) -> int:
        """Drop every waiting message and repair a lost cursor; return the number of messages, 0 if it is unknown."""
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
        """Return the next seq to pop; raise CursorLost if it contradicts the log."""
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
                f"{self._path} cannot be read: {error}; nothing was changed, repair the disk and retry"
            ) from error
        if content is None:
            return "there is no cursor.bin"
        cursor = decode_cursor(content)
        return "cursor.bin is damaged" if cursor is None else cursor

    def _save_cursor(self, next_seq: int) -> None:
        before = self._state.fifo_cursor
        try:
            with self._metrics.timed("fifo_cursor_duration"):
                replace_file(self._disk, self._path, encode_cursor(next_seq))
        except OSError as error:
            self._state.fifo_cursor = self._restore_cursor(before)
            if error.errno in DISK_FULL_ERRNOS:
                raise DiskFull(
                    f"{self._path}: no space for the cursor; nothing was popped, free space and retry"
                ) from error
            raise WriteFailed(f"{self._path}: {error}; nothing was popped, repair the disk and retry") from error
        self._state.fifo_cursor = next_seq

    def _restore_cursor(self, previous: int | str | None) -> int | str | None:
        """Return the cursor after a failed move: the previous one if the file holds it, else None to read the file
        again, so that two pops, before and after a restart, never return the same message."""
        if not isinstance(previous, int):
            return previous
        try:
            if read_file(self._disk, self._path) != encode_cursor(previous):
                replace_file(self._disk, self._path, encode_cursor(previous))
        except OSError:
            return None
        return previous
