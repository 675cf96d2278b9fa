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
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from threading import Condition

from tidelog.channels import acl as lists
from tidelog.channels.delivery import Event, Presence, Presences, Reason, Subscription
from tidelog.channels.messages import Message, MessageLog
from tidelog.channels.metrics import SUCCESS, Metrics
from tidelog.channels.pending import Pending
from tidelog.clock import Clock
from tidelog.disk.interrupts import deferred
from tidelog.errors import ChannelNotFound, Error
from tidelog.formats.channel import Meta

_log = logging.getLogger("tidelog.channels")


class Room:
    def __init__(
        self,
        meta: Meta,
        lock: Condition,
        clock: Clock,
        metrics: Metrics,
        open_log: Callable[[Room], MessageLog],
        *,
        asked: Callable[[], bool] = lambda: False,
        stirred: dict[str, Room] | None = None,
    ) -> None:
        self.meta, self.lock, self._clock, self._metrics = meta, lock, clock, metrics
        self._open_log = open_log
        self.asked = asked  # whether a change of the channel waits for its turn
        self._stirred = {} if stirred is None else stirred  # rooms with something queued, by name
        self.commits = 0  # syncs for messages, and deliveries that needed none
        self.log: MessageLog | None = None  # open, or not yet, or not any more
        self.verified = False  # its log was read whole once: opened again it need not be
        self.next_seq = 1  # of a channel whose log is not open; a persistent one asks its log
        self.shown = 0  # the last seq that was delivered: nobody is shown more
        self.last_ts_ms = 0
        self.subscriptions: list[Subscription] = []
        self.queued: list[Pending] = []
        self.committing = False
        self.pins = 0  # readers of the log that do not hold the lock
        self.gone = False
        self.dirty_ms: int | None = None  # since when something waits for its flush
        self.cursor: int | str | None = None  # fifo: the next seq, or why nobody knows; None: not read yet

    @property
    def handler(self) -> str:
        return self.meta.handler

    @property
    def idle(self) -> bool:
        """Whether its log may be closed: nobody uses it, and nothing would be promised by closing."""
        log = self.log
        busy = self.committing or self.pins or self.queued
        return log is not None and not busy and log.synced and not log.latched

    def messages(self) -> MessageLog:
        """The open log of a persistent channel."""
        log = self.log
        if log is None:
            log = self.log = self._open_log(self)
            self.verified = True
            self.shown = log.last_seq
        return log

    def quiet(self) -> None:
        """Wait until nobody commits and nobody reads. The lock is let go meanwhile."""
        while self.committing or self.pins:
            self.lock.wait()

    # ── publish ───────────────────────────────────────────────────────────────────────────────

    def submit(self, payloads: list[bytes], sender: str, *, qos: int, source: object) -> Pending:
        """Take messages that were checked: they have their seqs and their place in the order."""
        persist = self.meta.config.persist
        log = self.messages() if persist else None
        if log is not None:
            first, ts_ms = log.append(payloads, sender.encode())
            if self.dirty_ms is None:
                self.dirty_ms = self._clock.monotonic_ms()
        else:
            first, self.next_seq = self.next_seq, self.next_seq + len(payloads)
            ts_ms = max(self._clock.now_us() // 1000, self.last_ts_ms)
        self.last_ts_ms = ts_ms
        handler = self.handler
        made = [Message(handler, seq, ts_ms, sender, payload) for seq, payload in enumerate(payloads, first)]
        sync = persist and qos == 1 and self.meta.config.message_flush_interval == 0
        pending = Pending(made, qos=qos, sync=sync, source=source, pump=self.commit, log=log)
        self.queued.append(pending)
        self._stirred[handler] = self
        if qos == 0:
            pending.set(pending.ack(durable=False, receivers=None))
        return pending

    @deferred
    def commit(self, *, last: bool = False) -> None:
        """Sync and deliver all that is queued, unless another thread is at it, which passes on what it does not take,
        or a change is asked for, whose thread calls this afterwards. Called without the lock; outcomes are told by the
        acks. `last`: the channel is closed, and no change can come in between."""
        while True:
            with self.lock:
                if self.committing or not self.queued or (not last and self.asked()):
                    return
                self.commits += 1
                taken, log = self.queued[:], self.log
                # A log that was removed since, with what was in it, has nothing to sync.
                durable = log is not None and any(pending.sync and pending.log is log for pending in taken)
                self.committing = durable
                counts = [] if durable else self._delivered(taken)
            try:
                if durable and log is not None:
                    self._commit_synced(taken, log)
                else:
                    self._tell(taken, counts, None)
            except BaseException:
                self._passed_on(durable=durable)
                raise
            if self._passed_on(durable=durable):
                return

    def _passed_on(self, *, durable: bool) -> bool:
        """One commit is over; whether a thread that waits for what was queued meanwhile goes on with it."""
        with self.lock:
            if durable:
                self._done()
            left = list(self.queued)
        return any(pending.take_over() for pending in left)

    def _commit_synced(self, taken: list[Pending], log: MessageLog) -> None:
        """One sync, then fan-out and acks."""
        try:
            log.sync()
        except Error as error:
            with self.lock:
                self._taken(taken)
            self._metrics.add("broadcasts", error.code, by=len(taken))
            for pending in taken:
                pending.set(error)
            return
        with self.lock:
            counts = self._delivered(taken)
            self._flushed(log)
        self._tell(taken, counts, log)

    def _done(self) -> None:
        self.committing = False
        self.lock.notify_all()

    def _flushed(self, log: MessageLog) -> None:
        self.dirty_ms = None if log.synced else self._clock.monotonic_ms()

    def _delivered(self, taken: list[Pending]) -> list[int]:
        """Hand out what was taken from the head of the queue; how many receivers each had."""
        self._taken(taken)
        counts = []
        for pending in taken:
            self.shown = pending.seq
            counts.append(self._spread(pending.messages, pending.sender_source, reading=True))
        self._keep_small()
        return counts

    def _taken(self, taken: list[Pending]) -> None:
        """Take the head of the queue out of it."""
        del self.queued[: len(taken)]
        if not self.queued:
            self._stirred.pop(self.handler, None)

    def _tell(self, taken: list[Pending], counts: list[int], synced: MessageLog | None) -> None:
        handed = sum(len(pending.messages) * count for pending, count in zip(taken, counts, strict=True))
        self._metrics.add_all(
            ("broadcasts", SUCCESS, len(taken)),
            ("deliveries", "", handed),
            ("broadcast_payload_bytes", "", sum(pending.size for pending in taken)),
        )
        for pending, count in zip(taken, counts, strict=True):
            pending.set(pending.ack(durable=synced is not None and pending.log is synced, receivers=count))

    def _spread(self, events: Sequence[Event], source: object, *, reading: bool) -> int:
        """Hand events to everybody but their source; with `reading` only to those who may read."""
        count = 0
        newest = events[-1].seq if reading and isinstance(events[-1], Message) else 0
        ended: list[tuple[Subscription, Reason]] = []
        for subscription in self.subscriptions:
            if (subscription.source is source and source is not None) or (reading and not subscription.readable):
                continue
            if (trouble := subscription.put(events)) is not None:
                ended.append((subscription, trouble))
                continue
            count += 1
            if newest:
                subscription.last_seq = newest
        for subscription, trouble in ended:
            self._metrics.add("outbound_queue_full", trouble)
            self.forget(subscription, trouble)
        return count

    def flush(self) -> None:
        """Sync what an interval has waiting. Called without the lock, by one who has pinned the log."""
        log = self.log
        if log is not None and not log.latched:
            log.sync()
            with self.lock:
                self._flushed(log)

    def upkeep(self, work: Callable[[], None]) -> None:
        """Do something that nothing acknowledged hangs on: an error is counted and is nobody's answer."""
        try:
            work()
        except Error as error:
            _log.warning("%s: %s", self.handler, error)
            self._metrics.add("message_log_upkeep", error.code)

    def _keep_small(self) -> None:
        log, config = self.log, self.meta.config
        if log is not None and not log.latched and config.persist:
            self.upkeep(lambda: log.keep(config.max_persist_messages))

    # ── listeners ─────────────────────────────────────────────────────────────────────────────

    def tell(self, kind: Presences, user: str, *, owner: bool, source: object) -> None:
        """Tell the listeners, but for whoever did it, what happened to the channel."""
        ts_ms = max(self._clock.now_us() // 1000, 0)
        self._spread([Presence(kind, self.handler, user, owner, ts_ms)], source, reading=False)

    def listen(self, subscription: Subscription) -> None:
        self.subscriptions.append(subscription)

    def forget(self, subscription: Subscription, reason: Reason = "closed") -> None:
        if subscription in self.subscriptions:
            self.subscriptions.remove(subscription)
        subscription.cut(reason)

    def forget_user(self, user: str, reason: Reason) -> None:
        for subscription in [each for each in self.subscriptions if each.user == user]:
            self.forget(subscription, reason)

    def apply(self, meta: Meta) -> None:
        """Put a change that was saved into force."""
        if meta.acl.read != self.meta.acl.read:
            for subscription in self.subscriptions:
                subscription.readable = lists.allows(meta.acl.read, subscription.user)
        self.meta = meta

    # ── the end ───────────────────────────────────────────────────────────────────────────────

    def end(self, reason: Reason) -> None:
        """Nobody listens any more, and what was not committed never will be."""
        self.gone = reason == "deleted"
        for pending in self.queued:
            pending.set(ChannelNotFound(self.handler))
        self.queued.clear()
        self._stirred.pop(self.handler, None)
        for subscription in list(self.subscriptions):
            self.forget(subscription, reason)

    def close_log(self) -> None:
        """Let go of the log; what it holds is synced first, unless it is latched."""
        log, self.log = self.log, None
        self.dirty_ms = None
        if log is not None:
            if not self.meta.config.persist or self.meta.config.type == "pubsub":
                self.next_seq = log.last_seq + 1
            log.close()
