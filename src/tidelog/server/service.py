"""The state that all handlers share, grouped by owner.

    auth      keys, origins, limits of requests and streams; `read_tokens` of browsers
    writes    the write pipeline, once the log is recovered
    push      notification of readers: scheduler, notifiers, claim queues, watch sessions, page cache
    channels  channels and their threads
    metrics   counters and the registry
    decoding  the budget of bytes that streamed bodies are decoded into

A service also has the engine, a pool of threads for blocking work, and the tasks that it spawned.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import Any, Final, NamedTuple, TypeVar

from tidelog.channels import Hook
from tidelog.clock import Clock
from tidelog.database import Database, engine_of
from tidelog.engine import Engine, Topic
from tidelog.engine.health import HealthMonitor
from tidelog.engine.topic import topic_operations
from tidelog.errors import BadInput, Busy, StoreUnavailable
from tidelog.http.limits import LimitCounters
from tidelog.server.access_log import AccessLog
from tidelog.server.auth import AccessControl
from tidelog.server.config import RELOADABLE_SETTINGS, ServerConfig, check_config
from tidelog.server.errors import ApiError
from tidelog.server.metrics import ServerMetrics
from tidelog.server.push.channel_stream import ChannelService
from tidelog.server.push.claim_queue import ClaimQueues
from tidelog.server.push.notifier import Notifiers, NotifyScheduler
from tidelog.server.push.page_cache import PageCache
from tidelog.server.push.scheduling import Governor
from tidelog.server.push.topic_stream import WatchSessions
from tidelog.server.read_tokens import ReadTokens
from tidelog.server.write_pipeline import WritePipeline

T = TypeVar("T")
_POOL_THREADS: Final = 2  # more would compete for the interpreter: their work is mostly Python
_COLD_THREADS: Final = 8  # readers of the cold tier: they wait for a network
_COLD_CALLS_MAX: Final = 256  # that run or wait for one of these threads
_NOTIFY_WORKERS: Final = 1  # threads that notify readers: the loop
_LAG_RECHECK_S: Final = 0.02
_LARGE_WAIT_S: Final = 10.0  # a large write waits so long for a checkpoint before it is rejected


class PushState:
    """Everything that delivers records and jobs to waiting readers."""

    def __init__(self, service: Service) -> None:
        config, clock, loop = service.config, service.clock, service.loop
        self.governor = Governor(workers=_NOTIFY_WORKERS, threads=_POOL_THREADS)
        self.page_cache = PageCache()
        self.scheduler = NotifyScheduler(loop, clock.monotonic_us, self.governor, service.load, service.health)
        self.notifiers = Notifiers(loop, self.scheduler, self.page_cache)
        self.claim_queues = ClaimQueues(service)
        self.watch_sessions = WatchSessions(config.max_watch_sessions, clock, config.max_watch_sessions_per_key)

    def stop(self) -> None:
        """Wake every waiting reader: the server stops."""
        self.notifiers.notify_all()
        self.claim_queues.stop()


class Service:
    """Created on the loop's thread. Serves probes from the start, and everything else once it has an engine."""

    def __init__(self, config: ServerConfig, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        self.auth = AccessControl(config)
        self.config = replace(config, api_keys="", token_secret="")  # others have their digests
        self.clock, self.loop = clock, loop
        self.read_tokens = ReadTokens(self.now_ms, config.token_secret)
        self.health = HealthMonitor("server", self.now_ms)  # of work on the loop; the engine has its own
        self.push = PushState(self)
        hook = load_hook(config.hook)
        self.channels = ChannelService(loop, config, keys=not self.auth.keys.is_empty, hook=hook)
        self.decoding = DecodeBudget(config.max_decoded_bytes)
        self.limit_counters = LimitCounters(loop.time)  # limits of the transport that clients reached
        self.metrics = ServerMetrics(self)
        self.access_log: AccessLog | None = None  # set by the process, which has the output
        self.stopping = asyncio.Event()
        self.recovery_progress = 0.0  # to 1
        self.started_ms = clock.monotonic_ms()
        self._database: Database | None = None
        self._engine: Engine | None = None
        self._writes: WritePipeline | None = None
        self._recovery_done = asyncio.Event()
        self._pool_calls = 0
        self._pool = ThreadPoolExecutor(_POOL_THREADS, thread_name_prefix="tidelog work")
        self._cold_pool = ThreadPoolExecutor(_COLD_THREADS, thread_name_prefix="tidelog cold")
        self._cold_calls = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    def now_ms(self) -> int:
        """Wall time, as records and leases have it."""
        return self.clock.now_us() // 1000

    # ── life ──────────────────────────────────────────────────────────────────────────────────

    def reload(self, config: ServerConfig) -> None:
        """Apply `RELOADABLE_SETTINGS`. Raises where they are invalid, and has applied none then."""
        check_config(config)
        self.auth.reload(config)
        values = {name: getattr(config, name) for name in RELOADABLE_SETTINGS if name != "api_keys"}
        self.config = replace(self.config, **values)

    def on_recovered(self, database: Database) -> None:
        engine = engine_of(database)
        self._writes = WritePipeline(
            self.loop,
            engine.shards,
            self.config.commit,
            self.clock.monotonic_us,
            self.push.scheduler,
            self.health,
        )
        for shard in engine.shards:
            shard.window_ms = lambda: self.push.governor.commit_delay_ms
        self._database, self._engine, self.recovery_progress = database, engine, 1.0
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
    def database(self) -> Database:
        assert self._database is not None, "used after `engine`, which raises before recovery is done"
        return self._database

    @property
    def writes(self) -> WritePipeline:
        assert self._writes is not None, "used after `engine`, which raises before recovery is done"
        return self._writes

    def stop(self) -> None:
        """End every stream and every wait."""
        self.stopping.set()
        self.push.stop()
        self.channels.stop()

    async def wait_streams_closed(self, seconds: float) -> None:
        """Wait until every stream and socket has ended, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.auth.stream_limit.wait_empty()

    async def finish_tasks(self) -> None:
        """Wait 1 s for the spawned tasks; cancel those that do not end in time."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=1.0)
            for task in late:
                task.cancel()

    def close(self) -> None:
        self.push.scheduler.stop()
        if self.access_log is not None:
            self.access_log.close()
        self.channels.close()
        self._pool.shutdown(wait=True)
        self._cold_pool.shutdown(wait=True, cancel_futures=True)

    # ── work ──────────────────────────────────────────────────────────────────────────────────

    async def run_blocking(self, call: Callable[[], T]) -> T:
        """Run in a thread what may wait for a disk."""
        self._pool_calls += 1
        self.push.scheduler.start_sampling()
        try:
            return await self.loop.run_in_executor(self._pool, call)
        finally:
            self._pool_calls -= 1

    async def run_long(self, call: Callable[[], T]) -> T:
        """Run in a thread of its own kind what may take minutes: other work finds the pool's threads free."""
        return await self.loop.run_in_executor(None, call)

    async def run_read(self, topic: Topic, from_seq: int, call: Callable[[], T]) -> T:
        """`run_blocking` for a read of the records after `from_seq`: in a thread of its own kind where it may wait for
        the cold store. A store that hangs then delays no write and no other read."""
        if not topic_operations(topic).may_read_cold(from_seq):
            return await self.run_blocking(call)
        return await self.run_cold(call)

    async def run_cold(self, call: Callable[[], T]) -> T:
        """Run in a thread what may wait for the cold store. Raises StoreUnavailable where too many calls wait."""
        if self._cold_calls >= _COLD_CALLS_MAX:
            raise StoreUnavailable(
                self.engine.cold_address or "of this database", f"{_COLD_CALLS_MAX} reads are waiting for it"
            )
        self._cold_calls += 1
        try:
            return await self.loop.run_in_executor(self._cold_pool, call)
        finally:
            self._cold_calls -= 1

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

    # ── load ──────────────────────────────────────────────────────────────────────────────────

    def load(self) -> tuple[int, float]:
        """Return the calls in the pool and the fill level of the fullest WAL queue, for the governor."""
        return self._pool_calls, 0.0 if self._engine is None else self.writes.admission.fill_ratio(self._engine.shards)

    async def wait_caught_up(self) -> None:
        """Wait until the engine keeps up with moving records from memory to segments."""
        while self.engine.is_lagging and not self.stopping.is_set():
            self.push.scheduler.start_sampling()
            await asyncio.sleep(_LAG_RECHECK_S)

    async def admit_large(self) -> bool:
        """Wait a while for an engine that lags, before a large body takes more memory. False: it still lags, and
        `reject_large` rejects the write unless it asked to wait."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LARGE_WAIT_S):
                await self.wait_caught_up()
        return not self.engine.is_lagging or self.stopping.is_set()

    async def reject_large(self, *, wait_if_full: bool) -> None:
        """Raise Busy for a large write that `admit_large` did not admit; with `wait_if_full` wait instead."""
        if not wait_if_full:
            self.writes.admission.rejected_total += 1
            raise Busy(
                f"records in memory have waited {_LARGE_WAIT_S:g} s for a checkpoint that is slower than the writers; "
                "nothing was written, retry later or set disable_backpressure to wait"
            )
        await self.wait_caught_up()


def load_hook(spec: str | None) -> Hook | None:
    """Import the callable `module:function`, before the server listens. Raises BadInput where it does not exist."""
    if not spec:
        return None
    module, _, path = spec.partition(":")
    if not module or not path:
        raise BadInput(f"hook is {spec!r}, it must be module:function; the server was not started")
    try:
        value: object = import_module(module)
    except Exception as error:  # user code: it may raise anything
        raise BadInput(
            f"hook {spec!r}: {module} cannot be imported ({type(error).__name__}: {error}); the server was not "
            "started, put it where Python finds it"
        ) from error
    for name in path.split("."):
        value = getattr(value, name, None)
    if not callable(value):
        raise BadInput(f"hook {spec!r}: {module} has no callable {path}; the server was not started")
    return value


class _Waiter(NamedTuple):
    size: int
    admitted: asyncio.Future[None]


class DecodeBudget:
    """Budget of decoded bytes of streamed bodies, for the whole process. On the loop's thread. `bytes_max` 0: no limit.

    reserve ──► used + size ≤ bytes_max, or nothing is used ──► decode, stage every batch ──► release
       └──────► otherwise: wait, first come, first served

    The size of an Arrow message is known from its metadata before it is decoded. A stream that has decoded a message
    needs no more input to stage it, so a reservation always ends and waiting cannot deadlock. While a stream waits, its
    connection is not read.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used = 0
        self._waiters: deque[_Waiter] = deque()

    @property
    def waiting(self) -> int:
        """The number of waiting reservations."""
        return len(self._waiters)

    async def reserve(self, size: int) -> None:
        """Wait until `size` bytes may be decoded. A size over the limit waits until nothing else is reserved."""
        if not self._waiters and self._fits(size):
            self.used += size
            return
        waiter = _Waiter(size, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            if waiter.admitted.done() and not waiter.admitted.cancelled():
                self.release(size)  # admitted and cancelled in the same turn of the loop
            else:
                with suppress(ValueError):  # a release after the cancel has skipped it already
                    self._waiters.remove(waiter)
                self._admit()
            raise

    def release(self, size: int) -> None:
        """Release a reservation."""
        self.used -= size
        self._admit()

    def _fits(self, size: int) -> bool:
        return not self.bytes_max or not self.used or self.used + size <= self.bytes_max

    def _admit(self) -> None:
        while self._waiters and self._fits(self._waiters[0].size):
            waiter = self._waiters.popleft()
            if not waiter.admitted.done():
                self.used += waiter.size
                waiter.admitted.set_result(None)
