"""All channels of one directory: shards, restore, lookup, background work, close; and the hook.

A shard is a lock and the channels that a stable hash of their names assigns to it. The membership index spans all
shards and has its own lock, which is taken last. Operations on a channel are in `membership` and `channel`.

Restore reads every `metadata.bin` and no message: a log is opened when it is first needed, and at most
`logs_open_max` stay open (docs/decisions/0013). A channel that cannot be read is skipped, counted and listed in
`report`; its name stays taken until the operator repairs or deletes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from threading import Condition, Lock
from typing import Final, NamedTuple, TypeAlias

from tidelog.channels import rules
from tidelog.channels.channel_state import ChannelState, FifoQueue
from tidelog.channels.metrics import ChannelMetrics
from tidelog.channels.rules import ChannelLimits, check_user
from tidelog.channels.store import ChannelStore, MessageLog
from tidelog.clock import Clock
from tidelog.disk import process
from tidelog.disk.interface import Disk
from tidelog.disk.process import defer_signals_in
from tidelog.engine.backup import SourceFile
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
from tidelog.formats.small_files import ChannelMeta


class MembershipIndex:
    """The channels of each user, and the limit on their number."""

    def __init__(self) -> None:
        self._channels_by_user: dict[str, set[str]] = {}
        self._lock = Lock()

    def restore(self, users: Iterable[str], channel: str) -> None:
        """Add restored memberships, regardless of the limit."""
        with self._lock:
            for user in users:
                self._channels_by_user.setdefault(user, set()).add(channel)

    def reserve(self, user: str, channel: str, limit: int) -> None:
        """Add a membership; raise Throttled if the user is at the limit."""
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
        """Return the channels of a user, sorted."""
        with self._lock:
            return sorted(self._channels_by_user.get(user, ()))


class Authenticate(NamedTuple):
    """Hook request: return the user's name, possibly another one, or None or False to refuse."""

    user: str
    token: str | None


class Validate(NamedTuple):
    """Hook request: return None or True to accept the payload, bytes to replace it, False to refuse it."""

    channel: str
    user: str
    payload: bytes


Hook: TypeAlias = Callable[[Authenticate | Validate], object]
"""A callable of the embedding program that authenticates users and validates payloads. An error of `tidelog.errors`
that it raises is the refusal; any other exception or answer raises HookFailed and nothing is accepted. It runs in the
caller's thread without a lock."""


def authenticate(hook: Hook, metrics: ChannelMetrics, user: str, token: str | None) -> str:
    """Return the user that the hook names; raise Forbidden if it refuses."""
    with metrics.counted("auth_attempts"):
        answer = _call_hook(hook, Authenticate(user, token))
        if answer is None or answer is False:
            raise Forbidden(f"{user} was not authenticated; nothing was done, check the name and the token")
        if answer is True:
            return user
        if not isinstance(answer, str):
            raise HookFailed(f"the hook returned {type(answer).__name__}, not a user; nothing was done, fix the hook")
        return check_user(answer)


def validate_payload(hook: Hook, metrics: ChannelMetrics, channel: str, user: str, payload: bytes) -> bytes:
    """Return the payload that the hook accepts; raise Rejected if it refuses."""
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
        f"{channel}: the hook returned {type(answer).__name__}; nothing was written, retry when the hook is fixed"
    )


def _call_hook(hook: Hook, request: Authenticate | Validate) -> object:
    try:
        return hook(request)
    except Error:
        raise
    except Exception as error:  # the hook is foreign code: any exception of it is reported, not propagated
        raise HookFailed(f"the hook raised {type(error).__name__}: {error}; nothing was done, retry") from error


_log = logging.getLogger("tidelog.channels")
_LOGGED_HOLES_MAX: Final = 10  # ranges in one line


@dataclass(slots=True)
class RestoreReport:
    """The result of restoring all channels."""

    restored: int = 0
    skipped: dict[str, str] = field(default_factory=dict)  # directory → why it could not be read
    swept: list[str] = field(default_factory=list)
    not_removed: list[str] = field(default_factory=list)  # stale directories that could not be removed


class ChannelShard:
    """Channels that share a lock."""

    def __init__(self, logs_open_max: int) -> None:
        self.lock = Condition()
        self.channels: dict[str, ChannelState] = {}
        self.open_logs: dict[str, ChannelState] = {}  # channels with an open log, least recently used first
        self.uncommitted: dict[str, ChannelState] = {}  # channels that accepted messages since the last tick
        self._open_logs_max = logs_open_max

    def track_open_log(self, state: ChannelState) -> None:
        """Mark a log as recently used; close idle logs above the limit, least recently used first."""
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
    """All channels of one directory."""

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
        process.register(self)
        if self.limits.auth:
            self._restore()

    def __repr__(self) -> str:
        return f"<channels of {self.store.root!r}>"

    def on_fork(self, pid: int) -> None:
        """Disable this object in a forked child: using a channel raises Forked; the parent keeps the files."""
        self._opener_pid, self._closed = pid, True
        states = [state for shard in self._shards for state in list(shard.channels.values())]
        commits = [state.commits for state in states]
        process.poison_locks(self.store.root, pid, self.memberships, self.metrics, *self._shards, *states, *commits)

    # ── restore ───────────────────────────────────────────────────────────────────────────────

    def _restore(self) -> None:
        try:
            listing = self.store.list_channels(sweep=not self.read_only)
        except OSError as error:
            raise Damaged(
                f"{self.store.root} cannot be read: {error}; nothing was changed, repair the disk and retry"
            ) from error
        self.report.swept, self.report.not_removed = listing.swept, listing.not_removed
        for name in listing.live:
            try:
                meta = self.store.load(name)
            except Error as error:
                # One unreadable channel must not make the others unavailable.
                _log.warning("a channel was skipped: %s", error)
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
        """Count and log the seqs that power cuts lost, once per start."""
        holes = log.holes
        if holes:
            seqs = sum(last - first + 1 for first, last in holes)
            self.metrics.add("message_log_hole_seqs", by=seqs)
            ranges = ", ".join(f"{first} to {last}" for first, last in holes[:_LOGGED_HOLES_MAX])
            _log.warning("%s: a power cut lost %d messages before their sync (seqs %s)", channel, seqs, ranges)

    # ── lookup ────────────────────────────────────────────────────────────────────────────────

    def shard(self, channel: str) -> ChannelShard:
        return self._shards[rules.shard_of(channel, len(self._shards))]

    def get_channel(self, channel: str) -> ChannelState:
        """Return the channel of this name. The shard's lock is held."""
        state = self.shard(channel).channels.get(channel)
        if state is not None:
            return state
        if (reason := self.report.skipped.get(rules.directory_name(channel))) is not None:
            raise ChannelOffline(channel, reason=reason)
        raise ChannelNotFound(channel)

    @contextmanager
    def exclusive(self, channel: str) -> Iterator[ChannelShard]:
        """Lock a channel and its shard for a change. At most one commit of the channel runs before it; publishers
        continue afterwards."""
        channels = self.shard(channel).channels
        while True:
            state = channels.get(channel)
            with nullcontext() if state is None else state.exclusive(), self.locked(channel) as shard:
                if channels.get(channel) is state:
                    yield shard
                    return

    @contextmanager
    def locked(self, channel: str, *, write: bool = True) -> Iterator[ChannelShard]:
        """Lock the shard of a channel; raise if this manager is closed."""
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
            raise ReadOnly(f"{self.store.root} was opened read-only; nothing was written")

    def channel_names(self) -> list[str]:
        """Return the names of all channels, sorted."""
        names: list[str] = []
        for shard in self._shards:
            with shard.lock:
                names += shard.channels
        return sorted(names)

    def meta(self, channel: str) -> ChannelMeta:
        """Return the current metadata of a channel."""
        with self.locked(rules.check_channel(channel), write=False):
            return self.get_channel(channel).meta

    def get_idle_channel(self, channel: str) -> ChannelState:
        """Return the channel of this name once no thread reads its log, inside `exclusive`. The shard's lock is
        released meanwhile."""
        state = self.get_channel(channel)
        state.wait_for_readers()
        self._check_open(write=True)
        return state

    def get_readable_channel(self, channel: str) -> ChannelState:
        """Return the channel of this name once no change of it waits: a stream of readers must not starve changes. The
        lock is released meanwhile."""
        while (state := self.get_channel(channel)).commits.has_waiting_change:
            state.lock.wait()
            self._check_open(write=False)
        return state

    def add_channel(self, shard: ChannelShard, state: ChannelState) -> None:
        shard.channels[state.handler] = state
        self.metrics.add("channels_active")

    def new_channel_state(self, meta: ChannelMeta) -> ChannelState:
        """Create the state of a channel that is not registered yet."""
        shard = self.shard(meta.handler)
        return ChannelState(
            meta,
            shard.lock,
            self.clock,
            self.metrics,
            self._open_log,
            uncommitted=shard.uncommitted,
        )

    def channel_count(self) -> int:
        return sum(len(shard.channels) for shard in self._shards)

    def fifo_queue(self, state: ChannelState) -> FifoQueue:
        """Return the queue of a fifo channel."""
        directory = self.store.directory(rules.directory_name(state.handler))
        return FifoQueue(state, self._disk, directory, self.metrics)

    # ── backup ────────────────────────────────────────────────────────────────────────────────

    def list_files(self) -> Iterator[list[SourceFile]]:
        """Yield the files of each persistent channel, as `kill -9` would leave them at one instant. Each channel is
        locked while its files are opened and the small ones are read; publishers of others continue. Files that are
        open are closed by the caller."""
        for channel in self.channel_names():
            files: list[SourceFile] = []
            with suppress(ChannelNotFound), self.exclusive(channel):
                if self.get_channel(channel).meta.config.persist:
                    files = self.store.open_files(rules.directory_name(channel))
            if files:
                yield files
        for name in self.report.skipped:  # nothing writes to them
            yield self.store.open_files(name)

    # ── background work and close ─────────────────────────────────────────────────────────────

    def tick(self) -> None:
        """Deliver accepted messages that no thread commits, sync logs whose flush interval has passed, and retry
        changes that a failing disk left undecided. Called by a background thread, or by the program if there is none.
        Raises the first error after all work is done."""
        now_ms, first_error = self.clock.monotonic_ms(), None
        for shard in self._shards:
            with shard.lock:
                if self._closed:
                    return
                due = [state for state in shard.open_logs.values() if self._needs_flush(state, now_ms)]
                uncommitted = list(shard.uncommitted.values())
                shard.uncommitted.clear()
            for state in uncommitted:
                state.commits.commit_all()  # qos 0 messages of a program that did not call `deliver`
            for state in due:
                with shard.lock:
                    log = state.log
                    if log is None or state.is_deleted:
                        continue
                    state.readers += 1
                try:
                    state.flush()
                except Error as error:
                    first_error = first_error or error
                finally:
                    with shard.lock:
                        state.readers -= 1
                        shard.lock.notify_all()
        for name, handler in list(self.store.undecided.items()):
            self._reconcile_directory(name, handler)
        if first_error is not None:
            raise first_error

    @staticmethod
    def _needs_flush(state: ChannelState, now_ms: int) -> bool:
        since = state.dirty_since_ms
        return since is not None and now_ms - since >= state.meta.config.message_flush_interval

    def _reconcile_directory(self, name: str, handler: str) -> None:
        """Make a directory match its channel in memory, with the shard's lock: a join may create the channel at any
        moment."""
        with self.shard(handler).lock:
            if self._closed or name not in self.store.undecided:
                return
            state = self.shard(handler).channels.get(handler)
            self.store.reconcile(name, handler, state.meta if state is not None and state.meta.config.persist else None)

    def close(self) -> None:
        """Deliver and sync every accepted message and close all logs. Closing twice has no effect."""
        if self._opener_pid is not None:
            return
        first_error: Error | None = None
        for shard in self._shards:
            with shard.lock:
                self._closed = True
                states = list(shard.channels.values())
            for state in states:
                while state.commits.commit_pending():
                    pass
                with shard.lock:
                    state.wait_for_readers()
                    state.shut_down("closed")
                    try:
                        state.close_log()
                    except Error as error:
                        first_error = first_error or error
            shard.open_logs.clear()
        if first_error is not None:
            raise first_error
