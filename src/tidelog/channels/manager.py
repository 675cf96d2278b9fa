"""[shell] All channels of one directory: which shard each is pinned to, how they are found again, how they end.

A shard is a lock and the channels that a stable hash of their names pins to it. Two shards never touch the
same channel; memberships, which span them, have a lock of their own that is taken last. What is done to a
channel stands in `changes` (membership, lists, settings) and `talk` (messages).

Restoring reads every `metadata.bin` and no message: a log is opened when it is first needed, and at most
`logs_open_max` stay open. A channel that cannot be read is passed over, counted and named in `report`; its
name stays taken until somebody mends or deletes it.

[policy] Which channels each user is in, and whether one more is too many. Counts, touches nothing else.

[shell] The hook: one callable of the embedding program that may authenticate a user and look at a payload.

    hook(Authenticate(user, token))            the user's name, perhaps another one; None or False refuses
    hook(Validate(channel, user, payload))     None or True takes the payload as it is, bytes replace it, False refuses

A hook that raises an error of `tidelog.errors` has refused with it. Whatever else it raises, and any answer
that is none of these, is HookFailed: nothing was accepted. It runs in the caller's thread, without a lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, Lock
from typing import Final, NamedTuple, TypeAlias

from tidelog.channels import rules
from tidelog.channels.channel_state import ChannelState, FifoQueue
from tidelog.channels.message_log import MessageLog
from tidelog.channels.metrics import ChannelMetrics
from tidelog.channels.rules import ChannelLimits, check_user
from tidelog.channels.store import ChannelStore
from tidelog.clock import Clock
from tidelog.disk import fork
from tidelog.disk.interface import Disk
from tidelog.disk.interrupts import defer_signals_in
from tidelog.errors import (
    ChannelNotFound,
    ChannelOffline,
    Closed,
    Damaged,
    Error,
    Forbidden,
    Forked,
    HookFailed,
    ReadOnly,
    Rejected,
    Throttled,
)
from tidelog.formats.channel_meta import ChannelMeta


class MembershipIndex:
    def __init__(self) -> None:
        self._channels_by_user: dict[str, set[str]] = {}
        self._lock = Lock()

    def restore(self, users: Iterable[str], channel: str) -> None:
        """Take their places again for members that were there before, whatever the limit is now."""
        with self._lock:
            for user in users:
                self._channels_by_user.setdefault(user, set()).add(channel)

    def reserve(self, user: str, channel: str, limit: int) -> None:
        """Take a place for a user; Throttled where all are taken."""
        with self._lock:
            channels = self._channels_by_user.setdefault(user, set())
            if channel not in channels and len(channels) >= limit:
                if not channels:
                    del self._channels_by_user[user]
                raise Throttled("channels_per_client_max", max=limit, used=len(channels), asked=1)
            channels.add(channel)

    def release(self, user: str, channel: str) -> None:
        with self._lock:
            channels = self._channels_by_user.get(user, set())
            channels.discard(channel)
            if not channels:
                self._channels_by_user.pop(user, None)

    def channels_of(self, user: str) -> list[str]:
        """The channels of a user, sorted."""
        with self._lock:
            return sorted(self._channels_by_user.get(user, ()))

    def channels_by_user(self) -> dict[str, list[str]]:
        """All of it, for whoever wants to look."""
        with self._lock:
            return {user: sorted(channels) for user, channels in sorted(self._channels_by_user.items())}


class Authenticate(NamedTuple):
    user: str
    token: str | None


class Validate(NamedTuple):
    channel: str
    user: str
    payload: bytes


Hook: TypeAlias = Callable[[Authenticate | Validate], object]


def authenticate(hook: Hook, metrics: ChannelMetrics, user: str, token: str | None) -> str:
    """Who this is; Forbidden where the hook does not know."""
    with metrics.counted("auth_attempts"):
        answer = _call_hook(hook, Authenticate(user, token))
        if answer is None or answer is False:
            raise Forbidden(f"{user} was not authenticated; nothing was done, check the name and the token")
        if answer is True:
            return user
        if not isinstance(answer, str):
            raise HookFailed(f"the hook named no user but {type(answer).__name__}; nothing was done, mend it and retry")
        return check_user(answer)


def validate_payload(hook: Hook, metrics: ChannelMetrics, channel: str, user: str, payload: bytes) -> bytes:
    """The payload to take; Rejected where the hook takes none."""
    try:
        answer = _call_hook(hook, Validate(channel, user, payload))
    except HookFailed:
        metrics.add("hook_payloads", "error")
        raise
    except Error:
        metrics.add("hook_payloads", "invalid")
        raise
    if answer is None or answer is True:
        metrics.add("hook_payloads", "valid")
        return payload
    if isinstance(answer, bytes):
        metrics.add("hook_payloads", "valid_altered")
        return answer
    if answer is False:
        metrics.add("hook_payloads", "invalid")
        raise Rejected(f"{channel}: the payload was not accepted; nothing was written, send another")
    metrics.add("hook_payloads", "error")
    raise HookFailed(
        f"{channel}: the hook answered {type(answer).__name__}; nothing was written, retry when it is mended"
    )


def _call_hook(hook: Hook, request: Authenticate | Validate) -> object:
    try:
        return hook(request)
    except Error:
        raise
    except Exception as error:  # the rim of somebody else's code: whatever it is, it is not ours to die of
        raise HookFailed(f"the hook broke off ({type(error).__name__}: {error}); nothing was done, retry") from error


_log = logging.getLogger("tidelog.channels")
_LOGGED_HOLES_MAX: Final = 10  # ranges in one line


class Operator:
    """Whoever has the files: may look at everything and change what an owner may, and is nobody's member."""

    def __repr__(self) -> str:
        return "OPERATOR"


OPERATOR: Final = Operator()


@dataclass(slots=True)
class RestoreReport:
    """What restoring found and did."""

    restored: int = 0
    skipped: dict[str, str] = field(default_factory=dict)  # directory → why it could not be read
    swept: list[str] = field(default_factory=list)
    not_removed: list[str] = field(default_factory=list)  # stale, and still there


class ChannelShard:
    """The channels that are pinned together, and their lock."""

    def __init__(self, logs_open_max: int) -> None:
        self.lock = Condition()
        self.channels: dict[str, ChannelState] = {}
        self.open_logs: dict[str, ChannelState] = {}  # rooms with an open log, the one used last at the end
        self.uncommitted: dict[str, ChannelState] = {}  # rooms with messages that were accepted and not committed
        self._open_logs_max = logs_open_max
        self._waiting_changes: dict[str, int] = {}  # changes of a channel that wait for their turn or have it
        self._waiting_lock = Lock()  # its own: a change is asked for before it has the shard's

    def has_waiting_change(self, channel: str) -> bool:
        """Whether a change of this channel waits for its turn or has it."""
        return channel in self._waiting_changes

    @contextmanager
    def exclusive(self, channel: str) -> Iterator[None]:
        """Ask for the next turn of a channel: no commit and no read of it begins until the body is done. Called without
        the shard's lock. What was queued meanwhile is committed afterwards."""
        with self._waiting_lock:
            self._waiting_changes[channel] = self._waiting_changes.get(channel, 0) + 1
        try:
            yield
        finally:
            with self._waiting_lock:
                self._waiting_changes[channel] -= 1
                if not self._waiting_changes[channel]:
                    del self._waiting_changes[channel]
            with self.lock:
                room = self.channels.get(channel)
                self.lock.notify_all()
            if room is not None:
                room.commit()

    def track_open_log(self, state: ChannelState) -> None:
        """Remember an open log; close those that were used longest ago and are idle."""
        self.open_logs.pop(state.handler, None)
        self.open_logs[state.handler] = state
        for other in list(self.open_logs.values()):
            if len(self.open_logs) <= self._open_logs_max:
                break
            if other is not state and other.is_idle:
                del self.open_logs[other.handler]
                other.close_log()


@defer_signals_in("channel_names", "meta", "tick", "close")
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
        self.clock, self.metrics = clock, ChannelMetrics(clock)
        self.store = ChannelStore(disk, data, self.metrics)
        self.memberships = MembershipIndex()
        self.report = RestoreReport()
        self._disk, self._closed = disk, False
        self._opener_pid: int | None = None  # in a forked child: the process that opened it
        each = max(self.limits.logs_open_max // self.limits.shards, 1)
        self._shards = [ChannelShard(each) for _ in range(self.limits.shards)]
        fork.register(self)
        if self.limits.auth:
            self._restore()

    def on_fork(self, pid: int) -> None:
        """Give up in a forked child: using a channel raises Forked, and the files stay the parent's."""
        self._opener_pid, self._closed = pid, True
        rooms = [room for shard in self._shards for room in list(shard.channels.values())]
        queued = [pending for room in rooms for pending in list(room.queued)]
        fork.poison_locks(self.store.root, pid, self.memberships, self.metrics, *self._shards, *rooms, *queued)

    # ── restore ───────────────────────────────────────────────────────────────────────────────

    def _restore(self) -> None:
        try:
            found = self.store.list_channels(sweep=not self.read_only)
        except OSError as error:
            raise Damaged(
                f"{self.store.root} cannot be read: {error}; nothing was changed, mend the disk and retry"
            ) from error
        self.report.swept, self.report.not_removed = found.swept, found.not_removed
        for name in found.live:
            try:
                meta = self.store.load(name)
            except Error as error:
                # One channel that cannot be read must not keep the others from being served.
                _log.warning("a channel was passed over: %s", error)
                self.report.skipped[name] = str(error)
                continue
            shard = self.shard(meta.handler)
            self.add_channel(shard, self.new_channel_state(meta))
            self.memberships.restore(meta.members, meta.handler)
            self.report.restored += 1

    def _open_log(self, state: ChannelState) -> MessageLog:
        log = MessageLog(
            state.handler,
            self.store.directory(rules.directory_name(state.handler)),
            disk=self._disk,
            clock=self.clock,
            limits=self.limits,
            metrics=self.metrics,
            first_seq=state.next_seq,
            read_only=self.read_only,
            verify=not state.is_verified,
        )
        self.shard(state.handler).track_open_log(state)
        if not state.is_verified:
            self._report_holes(state.handler, log)
        return log

    def _report_holes(self, channel: str, log: MessageLog) -> None:
        """Count and log what power cuts took from a log, once for each start."""
        holes = log.holes
        if holes:
            seqs = sum(last - first + 1 for first, last in holes)
            self.metrics.add("message_log_hole_seqs", by=seqs)
            told = ", ".join(f"{first} to {last}" for first, last in holes[:_LOGGED_HOLES_MAX])
            _log.warning("%s: a power cut took %d messages before their sync (seqs %s)", channel, seqs, told)

    # ── finding ───────────────────────────────────────────────────────────────────────────────

    def shard(self, channel: str) -> ChannelShard:
        return self._shards[rules.shard_of(channel, len(self._shards))]

    def get_channel(self, channel: str) -> ChannelState:
        """The channel of this name; the shard's lock is held."""
        found = self.shard(channel).channels.get(channel)
        if found is not None:
            return found
        if (trouble := self.report.skipped.get(rules.directory_name(channel))) is not None:
            raise ChannelOffline(channel, reason=trouble)
        raise ChannelNotFound(channel)

    @contextmanager
    def exclusive(self, channel: str) -> Iterator[ChannelShard]:
        """The shard of a channel for a change, its lock held: publishers of the channel have one commit in between at
        most, and go on afterwards."""
        with self.shard(channel).exclusive(channel), self.locked(channel) as shard:
            yield shard

    @contextmanager
    def locked(self, channel: str, *, write: bool = True) -> Iterator[ChannelShard]:
        """The shard of a channel, its lock held, while this manager is open."""
        shard = self.shard(channel)
        with shard.lock:
            self._check_open(write=write)
            yield shard

    def _check_open(self, *, write: bool) -> None:
        if self._opener_pid is not None:
            raise Forked(self.store.root, pid=self._opener_pid)
        if self._closed:
            raise Closed(f"{self.store.root} was closed; nothing was done, open it again")
        if write and self.read_only:
            raise ReadOnly(f"{self.store.root} was opened for reading; nothing was written")

    def channel_names(self) -> list[str]:
        """The names of all channels, sorted."""
        found: list[str] = []
        for shard in self._shards:
            with shard.lock:
                found += shard.channels
        return sorted(found)

    def meta(self, channel: str) -> ChannelMeta:
        """What a channel is now."""
        with self.locked(rules.check_channel(channel), write=False):
            return self.get_channel(channel).meta

    def get_idle_channel(self, channel: str) -> ChannelState:
        """The channel of this name once nobody commits or reads in it. The lock is let go while it waits."""
        while True:
            room = self.get_channel(channel)
            room.wait_idle()
            self._check_open(write=True)
            if self.shard(channel).channels.get(channel) is room:
                return room

    def get_readable_channel(self, channel: str) -> ChannelState:
        """The channel of this name once no change of it waits: readers come without end too. The lock is let go while
        it waits."""
        shard = self.shard(channel)
        while shard.has_waiting_change(channel):
            shard.lock.wait()
            self._check_open(write=False)
        return self.get_channel(channel)

    def add_channel(self, shard: ChannelShard, state: ChannelState) -> None:
        shard.channels[state.handler] = state
        self.metrics.add("channels_active")

    def new_channel_state(self, meta: ChannelMeta) -> ChannelState:
        """A channel in memory that nobody can find yet."""
        shard, handler = self.shard(meta.handler), meta.handler
        return ChannelState(
            meta,
            shard.lock,
            self.clock,
            self.metrics,
            self._open_log,
            has_waiting_change=lambda: shard.has_waiting_change(handler),
            uncommitted=shard.uncommitted,
        )

    def channel_count(self) -> int:
        return sum(len(shard.channels) for shard in self._shards)

    def fifo_queue(self, state: ChannelState) -> FifoQueue:
        """The queue in a channel's directory."""
        directory = self.store.directory(rules.directory_name(state.handler))
        return FifoQueue(state, self._disk, directory, self.metrics)

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
                due = [room for room in shard.open_logs.values() if self._needs_flush(room, now_ms)]
                stirred = list(shard.uncommitted.values())
            for room in stirred:
                room.commit()  # of qos 0, from a program that did not call `deliver`
            for room in due:
                with shard.lock:
                    log = room.log
                    if log is None or room.is_deleted:
                        continue
                    room.readers += 1
                try:
                    room.flush()
                except Error as error:
                    failed = failed or error
                finally:
                    with shard.lock:
                        room.readers -= 1
                        shard.lock.notify_all()
        for name, handler in list(self.store.undecided.items()):
            self._reconcile_directory(name, handler)
        if failed is not None:
            raise failed

    @staticmethod
    def _needs_flush(state: ChannelState, now_ms: int) -> bool:
        since = state.dirty_since_ms
        return since is not None and now_ms - since >= state.meta.config.message_flush_interval

    def _reconcile_directory(self, name: str, handler: str) -> None:
        """Bring a directory to what is true of its channel, under its lock: a join may make it at any moment."""
        with self.shard(handler).lock:
            if self._closed or name not in self.store.undecided:
                return
            room = self.shard(handler).channels.get(handler)
            self.store.reconcile(name, handler, room.meta if room is not None and room.meta.config.persist else None)

    def close(self) -> None:
        """Deliver and sync all that was accepted, and let go. Closing twice is harmless."""
        if self._opener_pid is not None:
            return
        failed: Error | None = None
        for shard in self._shards:
            with shard.lock:
                self._closed = True
                rooms = list(shard.channels.values())
            for room in rooms:
                while True:
                    room.commit(last=True)
                    with shard.lock:
                        room.wait_idle()
                        if not room.queued:  # else another thread passed it on
                            break
                with shard.lock:
                    room.shut_down("closed")
                    try:
                        room.close_log()
                    except Error as error:
                        failed = failed or error
            shard.open_logs.clear()
        if failed is not None:
            raise failed
