"""[shell] All channels of one directory: which shard each is pinned to, how they are found again, how they end.

A shard is a lock and the channels that a stable hash of their names pins to it. Two shards never touch the
same channel; memberships, which span them, have a lock of their own that is taken last. What is done to a
channel stands in `changes` (membership, lists, settings) and `talk` (messages).

Restoring reads every `metadata.bin` and no message: a log is opened when it is first needed, and at most
`logs_open_max` stay open. A channel that cannot be read is passed over, counted and named in `report`; its
name stays taken until somebody mends or deletes it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, Lock
from typing import Final

from tidelog.channels import names
from tidelog.channels.fifo import Fifo
from tidelog.channels.hook import Hook
from tidelog.channels.limits import ChannelLimits
from tidelog.channels.memberships import Memberships
from tidelog.channels.messages import MessageLog
from tidelog.channels.metrics import Metrics
from tidelog.channels.room import Room
from tidelog.channels.store import ChannelStore
from tidelog.clock import Clock
from tidelog.disk import fork
from tidelog.disk.interrupts import deferring
from tidelog.disk.seam import Disk
from tidelog.errors import ChannelNotFound, ChannelOffline, Closed, Damaged, Error, Forked, ReadOnly
from tidelog.formats.channel import Meta

_log = logging.getLogger("tidelog.channels")
_HOLES_LOGGED: Final = 10  # ranges in one line


class Operator:
    """Whoever has the files: may look at everything and change what an owner may, and is nobody's member."""

    def __repr__(self) -> str:
        return "OPERATOR"


OPERATOR: Final = Operator()


@dataclass(slots=True)
class Report:
    """What restoring found and did."""

    restored: int = 0
    skipped: dict[str, str] = field(default_factory=dict)  # directory → why it could not be read
    swept: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # stale, and still there


class Shard:
    """The channels that are pinned together, and their lock."""

    def __init__(self, logs_open_max: int) -> None:
        self.lock = Condition()
        self.rooms: dict[str, Room] = {}
        self.open: dict[str, Room] = {}  # rooms with an open log, the one used last at the end
        self.stirred: dict[str, Room] = {}  # rooms with messages that were accepted and not committed
        self._open_max = logs_open_max
        self._asking: dict[str, int] = {}  # changes of a channel that wait for their turn or have it
        self._asking_lock = Lock()  # its own: a change is asked for before it has the shard's

    def asked(self, channel: str) -> bool:
        """Whether a change of this channel waits for its turn or has it."""
        return channel in self._asking

    @contextmanager
    def turn(self, channel: str) -> Iterator[None]:
        """Ask for the next turn of a channel: no commit and no read of it begins until the body is done. Called without
        the shard's lock. What was queued meanwhile is committed afterwards."""
        with self._asking_lock:
            self._asking[channel] = self._asking.get(channel, 0) + 1
        try:
            yield
        finally:
            with self._asking_lock:
                self._asking[channel] -= 1
                if not self._asking[channel]:
                    del self._asking[channel]
            with self.lock:
                room = self.rooms.get(channel)
                self.lock.notify_all()
            if room is not None:
                room.commit()

    def opened(self, room: Room) -> None:
        """Remember an open log; close those that were used longest ago and are idle."""
        self.open.pop(room.handler, None)
        self.open[room.handler] = room
        for other in list(self.open.values()):
            if len(self.open) <= self._open_max:
                break
            if other is not room and other.idle:
                del self.open[other.handler]
                other.close_log()


@deferring("handlers", "meta", "tick", "close")
class ChannelManager:
    def __init__(
        self,
        disk: Disk,
        data: str,
        clock: Clock,
        *,
        limits: ChannelLimits | None = None,
        hook: Hook | None = None,
        read_only: bool = False,
    ) -> None:
        self.limits, self.hook, self.read_only = limits or ChannelLimits(), hook, read_only
        self.clock, self.metrics = clock, Metrics(clock)
        self.store = ChannelStore(disk, data, self.metrics)
        self.memberships = Memberships()
        self.report = Report()
        self._disk, self._closed = disk, False
        self._opener: int | None = None  # in a forked child: the process that opened it
        each = max(self.limits.logs_open_max // self.limits.shards, 1)
        self._shards = [Shard(each) for _ in range(self.limits.shards)]
        fork.guard(self)
        if self.limits.auth:
            self._restore()

    def forked(self, pid: int) -> None:
        """Give up in a forked child: using a channel raises Forked, and the files stay the parent's."""
        self._opener, self._closed = pid, True
        rooms = [room for shard in self._shards for room in list(shard.rooms.values())]
        queued = [pending for room in rooms for pending in list(room.queued)]
        fork.poison(self.store.root, pid, self.memberships, self.metrics, *self._shards, *rooms, *queued)

    # ── restore ───────────────────────────────────────────────────────────────────────────────

    def _restore(self) -> None:
        try:
            found = self.store.listed(sweep=not self.read_only)
        except OSError as error:
            raise Damaged(
                f"{self.store.root} cannot be read: {error}; nothing was changed, mend the disk and retry"
            ) from error
        self.report.swept, self.report.left = found.swept, found.left
        for name in found.live:
            try:
                meta = self.store.load(name)
            except Error as error:
                # One channel that cannot be read must not keep the others from being served.
                _log.warning("a channel was passed over: %s", error)
                self.report.skipped[name] = str(error)
                continue
            shard = self.shard(meta.handler)
            self.enter(shard, self.made(meta))
            self.memberships.restore(meta.members, meta.handler)
            self.report.restored += 1

    def _open_log(self, room: Room) -> MessageLog:
        log = MessageLog(
            room.handler,
            self.store.directory(names.directory_name(room.handler)),
            disk=self._disk,
            clock=self.clock,
            limits=self.limits,
            metrics=self.metrics,
            first_seq=room.next_seq,
            read_only=self.read_only,
            verify=not room.verified,
        )
        self.shard(room.handler).opened(room)
        if not room.verified:
            self._tell_holes(room.handler, log)
        return log

    def _tell_holes(self, channel: str, log: MessageLog) -> None:
        """Count and log what power cuts took from a log, once for each start."""
        holes = log.holes
        if holes:
            seqs = sum(last - first + 1 for first, last in holes)
            self.metrics.add("message_log_hole_seqs", by=seqs)
            told = ", ".join(f"{first} to {last}" for first, last in holes[:_HOLES_LOGGED])
            _log.warning("%s: a power cut took %d messages before their sync (seqs %s)", channel, seqs, told)

    # ── finding ───────────────────────────────────────────────────────────────────────────────

    def shard(self, channel: str) -> Shard:
        return self._shards[names.shard_of(channel, len(self._shards))]

    def room(self, channel: str) -> Room:
        """The channel of this name; the shard's lock is held."""
        found = self.shard(channel).rooms.get(channel)
        if found is not None:
            return found
        if (trouble := self.report.skipped.get(names.directory_name(channel))) is not None:
            raise ChannelOffline(channel, reason=trouble)
        raise ChannelNotFound(channel)

    @contextmanager
    def turn(self, channel: str) -> Iterator[Shard]:
        """The shard of a channel for a change, its lock held: publishers of the channel have one commit in between at
        most, and go on afterwards."""
        with self.shard(channel).turn(channel), self.locked(channel) as shard:
            yield shard

    @contextmanager
    def locked(self, channel: str, *, write: bool = True) -> Iterator[Shard]:
        """The shard of a channel, its lock held, while this manager is open."""
        shard = self.shard(channel)
        with shard.lock:
            self._check(write=write)
            yield shard

    def _check(self, *, write: bool) -> None:
        if self._opener is not None:
            raise Forked(self.store.root, pid=self._opener)
        if self._closed:
            raise Closed(f"{self.store.root} was closed; nothing was done, open it again")
        if write and self.read_only:
            raise ReadOnly(f"{self.store.root} was opened for reading; nothing was written")

    def handlers(self) -> list[str]:
        """The names of all channels, sorted."""
        found: list[str] = []
        for shard in self._shards:
            with shard.lock:
                found += shard.rooms
        return sorted(found)

    def meta(self, channel: str) -> Meta:
        """What a channel is now."""
        with self.locked(names.check_channel(channel), write=False):
            return self.room(channel).meta

    def settled_room(self, channel: str) -> Room:
        """The channel of this name once nobody commits or reads in it. The lock is let go while it waits."""
        while True:
            room = self.room(channel)
            room.quiet()
            self._check(write=True)
            if self.shard(channel).rooms.get(channel) is room:
                return room

    def readable_room(self, channel: str) -> Room:
        """The channel of this name once no change of it waits: readers come without end too. The lock is let go while
        it waits."""
        shard = self.shard(channel)
        while shard.asked(channel):
            shard.lock.wait()
            self._check(write=False)
        return self.room(channel)

    def enter(self, shard: Shard, room: Room) -> None:
        shard.rooms[room.handler] = room
        self.metrics.add("channels_active")

    def made(self, meta: Meta) -> Room:
        """A channel in memory that nobody can find yet."""
        shard, handler = self.shard(meta.handler), meta.handler
        return Room(
            meta,
            shard.lock,
            self.clock,
            self.metrics,
            self._open_log,
            asked=lambda: shard.asked(handler),
            stirred=shard.stirred,
        )

    def count(self) -> int:
        return sum(len(shard.rooms) for shard in self._shards)

    def queue(self, room: Room) -> Fifo:
        """The queue in a channel's directory."""
        directory = self.store.directory(names.directory_name(room.handler))
        return Fifo(room, self._disk, directory, self.metrics)

    # ── keeping ───────────────────────────────────────────────────────────────────────────────

    def tick(self) -> None:
        """Deliver what was accepted and that no thread commits, sync what an interval has waiting, and put right what a
        failing disk left undecided. A background thread of the engine does this; with an injected clock, the owner of
        the clock. The first error is raised, at the end."""
        now_ms, failed = self.clock.monotonic_ms(), None
        for shard in self._shards:
            with shard.lock:
                if self._closed:
                    return
                due = [room for room in shard.open.values() if self._is_due(room, now_ms)]
                stirred = list(shard.stirred.values())
            for room in stirred:
                room.commit()  # of qos 0, from a program that did not call `deliver`
            for room in due:
                with shard.lock:
                    log = room.log
                    if log is None or room.gone:
                        continue
                    room.pins += 1
                try:
                    room.flush()
                except Error as error:
                    failed = failed or error
                finally:
                    with shard.lock:
                        room.pins -= 1
                        shard.lock.notify_all()
        for name, handler in list(self.store.unsettled.items()):
            self._settle(name, handler)
        if failed is not None:
            raise failed

    @staticmethod
    def _is_due(room: Room, now_ms: int) -> bool:
        since = room.dirty_ms
        return since is not None and now_ms - since >= room.meta.config.message_flush_interval

    def _settle(self, name: str, handler: str) -> None:
        """Bring a directory to what is true of its channel, under its lock: a join may make it at any moment."""
        with self.shard(handler).lock:
            if self._closed or name not in self.store.unsettled:
                return
            room = self.shard(handler).rooms.get(handler)
            self.store.settle(name, handler, room.meta if room is not None and room.meta.config.persist else None)

    def close(self) -> None:
        """Deliver and sync all that was accepted, and let go. Closing twice is harmless."""
        if self._opener is not None:
            return
        failed: Error | None = None
        for shard in self._shards:
            with shard.lock:
                self._closed = True
                rooms = list(shard.rooms.values())
            for room in rooms:
                while True:
                    room.commit(last=True)
                    with shard.lock:
                        room.quiet()
                        if not room.queued:  # else another thread passed it on
                            break
                with shard.lock:
                    room.end("closed")
                    try:
                        room.close_log()
                    except Error as error:
                        failed = failed or error
            shard.open.clear()
        if failed is not None:
            raise failed
