"""[shell] What all handlers share: the engine, who may do what, who waits for what, and the threads for slow work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from tidelog.clock import Clock
from tidelog.engine import Engine
from tidelog.engine.health import Health
from tidelog.errors import BadInput, Busy
from tidelog.sched.governor import Governor
from tidelog.server.admission import Admission
from tidelog.server.api.auth import Keyring, Principal
from tidelog.server.api.caps import Cap
from tidelog.server.api.origins import Origins
from tidelog.server.api.problem import Problem
from tidelog.server.bells import Bells
from tidelog.server.commits import Commits
from tidelog.server.config import RELOADED, ServerConfig, check
from tidelog.server.decoding import DecodeBudget
from tidelog.server.desks import Desks
from tidelog.server.gather import Gather
from tidelog.server.hooks import load
from tidelog.server.http.refusals import Refusals
from tidelog.server.metrics import Metrics
from tidelog.server.pump import Pump
from tidelog.server.rooms import Rooms
from tidelog.server.sessions import Sessions

T = TypeVar("T")
_THREADS = 2  # more would fight over the interpreter: what they do is mostly Python
_BEHIND_S = 0.02  # between two looks at an engine that is behind
_LARGE_WAIT_S = 10.0  # for which a large write waits for a checkpoint before it is refused
_LOOPS = 1  # that tell topics' readers


def _origins(config: ServerConfig, keys: Keyring) -> Origins:
    return Origins(config.host, config.allowed_hosts, config.allowed_origins, keys=not keys.open)


class Revocable(Protocol):
    """A stream or socket of a key."""

    principal: Principal

    def revoke(self) -> None: ...


class Service:
    """Made on the loop's thread. It serves probes from the start, and everything else once it has an engine."""

    def __init__(self, config: ServerConfig, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        self.keys = Keyring(config.api_keys)
        self.origins = _origins(config, self.keys)
        self.generation = 0  # of keys, hosts and origins; a head that an older one admitted is looked at again
        config = replace(config, api_keys="")  # the keyring has their digests, and nobody needs more
        self.config, self.clock, self.loop = config, clock, loop
        self.inflight = Cap("requests in flight", 0, config.max_inflight_per_key)
        self.streams = Cap("streams and sockets", config.max_sse_connections, config.max_sse_connections_per_key)
        self.sessions = Sessions(config.max_watch_sessions, clock, config.max_watch_sessions_per_key)
        self.slots: WeakSet[Revocable] = WeakSet()  # of the streams and sockets that are open
        self.governor = Governor(workers=_LOOPS, threads=_THREADS)
        self.health = Health("server", self.now_ms)  # of what runs on the loop; the engine has its own
        self.pump = Pump(loop, clock.monotonic_us, self.governor, self._load, self.health)
        self.bells = Bells(loop, self.pump)
        self.desks = Desks(self)
        self.rooms = Rooms(loop, config, keys=not self.keys.open, hook=load(config.hook))
        self.decoding = DecodeBudget(config.max_decoded_bytes)
        self.refusals = Refusals(loop.time)  # limits of the transport that peers met
        self.metrics = Metrics(self)
        self.stopping = asyncio.Event()
        self.progress = 0.0  # of recovery
        self.started_ms = clock.monotonic_ms()
        self._engine: Engine | None = None
        self._recovered = asyncio.Event()
        self._commits: Commits | None = None
        self._gather: Gather | None = None
        self._admission: Admission | None = None
        self._working = 0  # calls in the pool
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tidelog work")
        self._tasks: set[asyncio.Task[Any]] = set()

    def reload(self, config: ServerConfig) -> None:
        """Take over the settings of `RELOADED`. Raises where they cannot be, and has taken none then."""
        check(config)
        keys = Keyring(config.api_keys)
        if keys.open != self.keys.open:
            raise BadInput(
                "keys cannot be added to a server without any, nor all be removed, while it runs; restart it"
            )
        origins = _origins(config, keys)
        self.keys, self.origins = keys, origins
        self.generation += 1
        taken = {name: getattr(config, name) for name in RELOADED if name != "api_keys"}
        self.config = replace(self.config, **taken)
        for slot in list(self.slots):
            if not keys.knows(slot.principal):
                slot.revoke()

    def ready(self, engine: Engine) -> None:
        """Recovery is done."""
        governor = self.governor
        window_ms, kernel = (lambda: governor.commit_window_ms), self.config.kernel
        self._commits = Commits(self.loop, engine.shards, self.config.commit, window_ms, compiled=kernel)
        self._commits.first = self.pump.first
        micros, stir = self.clock.monotonic_us, self.pump.stir
        self._admission = Admission(self.loop, micros, self._commits, governor, stir, self.health)
        self._gather = Gather(self._commits, self._admission)
        for shard in engine.shards:
            shard.window_ms = window_ms
        self._engine, self.progress = engine, 1.0
        self._recovered.set()

    async def recovered(self, seconds: float) -> None:
        """Wait until recovery is done, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._recovered.wait()

    @property
    def is_ready(self) -> bool:
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise Problem(
                "not_ready",
                "the log is being recovered; nothing was done, retry",
                {"replay_progress": round(self.progress, 4)},
            )
        return self._engine

    @property
    def commits(self) -> Commits:
        assert self._commits is not None, "asked behind `engine`"
        return self._commits

    @property
    def gather(self) -> Gather:
        assert self._gather is not None, "asked behind `engine`"
        return self._gather

    def now_ms(self) -> int:
        """Wall time, as records and leases have it."""
        return self.clock.now_us() // 1000

    @property
    def admission(self) -> Admission:
        assert self._admission is not None, "asked behind `engine`"
        return self._admission

    async def work(self, call: Callable[[], T]) -> T:
        """Run what may wait for a disk, off the loop."""
        self._working += 1
        self.pump.stir()
        try:
            return await self.loop.run_in_executor(self._pool, call)
        finally:
            self._working -= 1

    async def caught_up(self) -> None:
        """Return when the engine is not behind with moving records from memory to segments."""
        while self.engine.is_behind and not self.stopping.is_set():
            self.pump.stir()
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
            self.admission.throttled += 1
            raise Busy(
                f"records in memory have waited {_LARGE_WAIT_S:g} s for a checkpoint that is slower than the writers; "
                "nothing was written, retry later or set disable_backpressure to wait"
            )
        await self.caught_up()

    def _load(self) -> tuple[int, float]:
        """What the governor is told: calls in the pool, and how full the fullest WAL queue is."""
        return self._working, 0.0 if self._engine is None else self.admission.fill(self._engine.shards)

    def spawn(self, running: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(running)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.health.failed("tasks", error)
        else:
            self.health.recovered("tasks")

    def stop(self) -> None:
        """Tell everybody who waits that there will be no more."""
        self.stopping.set()
        self.bells.ring_all()
        self.desks.stop()
        self.rooms.stop()

    async def streams_gone(self, seconds: float) -> None:
        """Wait until every stream and socket has ended, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.streams.empty()

    async def settle(self, seconds: float = 1.0) -> None:
        """Wait for what still runs by itself; what does not end in time is cancelled."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=seconds)
            for task in late:
                task.cancel()

    def close(self) -> None:
        self.pump.stop()
        self.rooms.close()
        self._pool.shutdown(wait=True)
