"""[shell] The hook that the settings name: found and imported once, before the server listens.

[shell] What all handlers share: the engine, who may do what, who waits for what, and the threads for slow work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from tidelog.channels import Hook
from tidelog.clock import Clock
from tidelog.engine import Engine
from tidelog.engine.health import HealthMonitor
from tidelog.errors import BadInput, Busy
from tidelog.http.limits import LimitCounters
from tidelog.server.auth import ConcurrencyLimit, Keyring, OriginPolicy, Principal
from tidelog.server.config import RELOADABLE_SETTINGS, ServerConfig, check_config
from tidelog.server.decoding import DecodeBudget
from tidelog.server.errors import ApiError
from tidelog.server.metrics import ServerMetrics
from tidelog.server.push.channel_stream import ChannelService
from tidelog.server.push.claim_queue import ClaimQueues
from tidelog.server.push.notifier import Notifiers, NotifyScheduler
from tidelog.server.push.watch_sessions import WatchSessions
from tidelog.server.scheduling.governor import Governor
from tidelog.server.write_pipeline import WritePipeline


def load_hook(spec: str | None) -> Hook | None:
    """The callable `module:function`; BadInput where there is none. None where none is named."""
    if not spec:
        return None
    module, _, rest = spec.partition(":")
    if not module or not rest:
        raise BadInput(f"hook is {spec!r}, it must be module:function; the server was not started")
    try:
        found: object = import_module(module)
    except Exception as error:  # somebody else's module: whatever keeps it from being imported is told
        raise BadInput(
            f"hook {spec!r}: {module} cannot be imported ({type(error).__name__}: {error}); the server was not "
            "started, put it where Python finds it"
        ) from error
    for name in rest.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        raise BadInput(f"hook {spec!r}: {module} has no callable {rest}; the server was not started")
    return found


T = TypeVar("T")
_POOL_THREADS = 2  # more would fight over the interpreter: what they do is mostly Python
_BEHIND_S = 0.02  # between two looks at an engine that is behind
_LARGE_WAIT_S = 10.0  # for which a large write waits for a checkpoint before it is refused
_NOTIFY_WORKERS = 1  # that tell topics' readers


def _origin_policy(config: ServerConfig, keys: Keyring) -> OriginPolicy:
    return OriginPolicy(config.host, config.allowed_hosts, config.allowed_origins, keys=not keys.is_empty)


class Revocable(Protocol):
    """A stream or socket of a key."""

    principal: Principal

    def revoke(self) -> None: ...


class Service:
    """Made on the loop's thread. It serves probes from the start, and everything else once it has an engine."""

    def __init__(self, config: ServerConfig, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        self.keys = Keyring(config.api_keys)
        self.origins = _origin_policy(config, self.keys)
        self.auth_generation = 0  # of keys, hosts and origins; a head that an older one admitted is looked at again
        config = replace(config, api_keys="")  # the keyring has their digests, and nobody needs more
        self.config, self.clock, self.loop = config, clock, loop
        self.inflight_limit = ConcurrencyLimit("requests in flight", 0, config.max_inflight_per_key)
        self.stream_limit = ConcurrencyLimit(
            "streams and sockets", config.max_sse_connections, config.max_sse_connections_per_key
        )
        self.watch_sessions = WatchSessions(config.max_watch_sessions, clock, config.max_watch_sessions_per_key)
        self.stream_slots: WeakSet[Revocable] = WeakSet()  # of the streams and sockets that are open
        self.governor = Governor(workers=_NOTIFY_WORKERS, threads=_POOL_THREADS)
        self.health = HealthMonitor("server", self.now_ms)  # of what runs on the loop; the engine has its own
        self.notify_scheduler = NotifyScheduler(loop, clock.monotonic_us, self.governor, self._load, self.health)
        self.notifiers = Notifiers(loop, self.notify_scheduler)
        self.claim_queues = ClaimQueues(self)
        self.channels = ChannelService(loop, config, keys=not self.keys.is_empty, hook=load_hook(config.hook))
        self.decoding = DecodeBudget(config.max_decoded_bytes)
        self.limit_counters = LimitCounters(loop.time)  # limits of the transport that peers met
        self.metrics = ServerMetrics(self)
        self.stopping = asyncio.Event()
        self.recovery_progress = 0.0  # of recovery
        self.started_ms = clock.monotonic_ms()
        self._engine: Engine | None = None
        self._recovery_done = asyncio.Event()
        self._writes: WritePipeline | None = None
        self._pool_calls = 0  # calls in the pool
        self._pool = ThreadPoolExecutor(_POOL_THREADS, thread_name_prefix="tidelog work")
        self._tasks: set[asyncio.Task[Any]] = set()

    def reload(self, config: ServerConfig) -> None:
        """Take over the settings of `RELOADED`. Raises where they cannot be, and has taken none then."""
        check_config(config)
        keys = Keyring(config.api_keys)
        if keys.is_empty != self.keys.is_empty:
            raise BadInput(
                "keys cannot be added to a server without any, nor all be removed, while it runs; restart it"
            )
        origins = _origin_policy(config, keys)
        self.keys, self.origins = keys, origins
        self.auth_generation += 1
        taken = {name: getattr(config, name) for name in RELOADABLE_SETTINGS if name != "api_keys"}
        self.config = replace(self.config, **taken)
        for slot in list(self.stream_slots):
            if not keys.contains(slot.principal):
                slot.revoke()

    def on_recovered(self, engine: Engine) -> None:
        """Recovery is done."""
        self._writes = WritePipeline(
            self.loop,
            engine.shards,
            self.config.commit,
            self.clock.monotonic_us,
            self.notify_scheduler,
            self.health,
        )
        for shard in engine.shards:
            shard.window_ms = lambda: self.governor.commit_delay_ms
        self._engine, self.recovery_progress = engine, 1.0
        self._recovery_done.set()

    async def wait_recovered(self, seconds: float) -> None:
        """Wait until recovery is done, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._recovery_done.wait()

    @property
    def is_ready(self) -> bool:
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise ApiError(
                "not_ready",
                "the log is being recovered; nothing was done, retry",
                {"replay_progress": round(self.recovery_progress, 4)},
            )
        return self._engine

    @property
    def writes(self) -> WritePipeline:
        assert self._writes is not None, "used after `engine`, which raises before recovery is done"
        return self._writes

    def now_ms(self) -> int:
        """Wall time, as records and leases have it."""
        return self.clock.now_us() // 1000

    async def run_blocking(self, call: Callable[[], T]) -> T:
        """Run what may wait for a disk, off the loop."""
        self._pool_calls += 1
        self.notify_scheduler.start_sampling()
        try:
            return await self.loop.run_in_executor(self._pool, call)
        finally:
            self._pool_calls -= 1

    async def caught_up(self) -> None:
        """Return when the engine is not behind with moving records from memory to segments."""
        while self.engine.is_behind and not self.stopping.is_set():
            self.notify_scheduler.start_sampling()
            await asyncio.sleep(_BEHIND_S)

    async def admit_large(self) -> bool:
        """Wait a while for an engine that is behind, before a large body takes more memory. False: it still is, and
        the write is refused by `refuse_behind` unless it would rather wait."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LARGE_WAIT_S):
                await self.caught_up()
        return not self.engine.is_behind or self.stopping.is_set()

    async def refuse_behind(self, *, insists: bool) -> None:
        """For a large write that `admit_large` did not admit. `insists`: it would rather wait than be refused."""
        if not insists:
            self.writes.admission.rejected_total += 1
            raise Busy(
                f"records in memory have waited {_LARGE_WAIT_S:g} s for a checkpoint that is slower than the writers; "
                "nothing was written, retry later or set disable_backpressure to wait"
            )
        await self.caught_up()

    def _load(self) -> tuple[int, float]:
        """What the governor is told: calls in the pool, and how full the fullest WAL queue is."""
        return self._pool_calls, 0.0 if self._engine is None else self.writes.admission.fill_ratio(self._engine.shards)

    def spawn(self, running: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(running)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.health.failed("tasks", error)
        else:
            self.health.recovered("tasks")

    def stop(self) -> None:
        """Tell everybody who waits that there will be no more."""
        self.stopping.set()
        self.notifiers.notify_all()
        self.claim_queues.stop()
        self.channels.stop()

    async def wait_streams_closed(self, seconds: float) -> None:
        """Wait until every stream and socket has ended, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stream_limit.wait_empty()

    async def finish_tasks(self, seconds: float = 1.0) -> None:
        """Wait for what still runs by itself; what does not end in time is cancelled."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=seconds)
            for task in late:
                task.cancel()

    def close(self) -> None:
        self.notify_scheduler.stop()
        self.channels.close()
        self._pool.shutdown(wait=True)
