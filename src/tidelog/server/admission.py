"""[shell] The door of the WAL: a write is staged, waits in line, or is refused.

    room in the queue of its shard, nobody in line ──► staged at once
    no room, saturated                             ──► refused, unless it asked not to be: 429, nothing was written
    no room otherwise                              ──► in line, and staged in the order of arrival as commits get done

A line is as long as the queue it leads to; behind that a write is refused too. Nobody overtakes: while somebody
waits for a shard, whatever comes for it is behind them. What waits has no seq yet and is held by nobody else, so that
it gets its outcome here in any case: a token, or the error of staging it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from tidelog.engine import Appended, Batch, Shard, Token, Topic
from tidelog.engine.encode import Columns
from tidelog.engine.health import Health
from tidelog.errors import Busy, Error
from tidelog.sched.governor import Governor
from tidelog.server.commits import Commits
from tidelog.server.pages import Work

Staged = Callable[[Token[Appended] | Error, int], None]
"""Gets the token of a write, or why there is none, and for how many microseconds it was held back."""

_LOOK_S: Final = 0.01  # commits of others, a checkpoint's, make room as well and do not say so


class _Waiting:
    __slots__ = ("go", "since_us")

    def __init__(self, since_us: int, go: Callable[[int], None]) -> None:
        self.since_us, self.go = since_us, go


class Admission:
    """On the loop's thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        micros: Callable[[], int],
        commits: Commits,
        governor: Governor,
        stir: Callable[[], None],
        health: Health,
    ) -> None:
        """`stir` is called where a write has to wait, or not to; `health` is told of what broke while a line moved."""
        self._health = health
        self._loop, self._micros, self._commits, self._governor = loop, micros, commits, governor
        self._stir = stir
        self._lines: dict[Shard, deque[_Waiting]] = {}
        self._looking: asyncio.TimerHandle | None = None
        self.throttled = 0  # writes that were refused
        commits.eased = self._look

    @property
    def waiting(self) -> int:
        """Writes in line."""
        return sum(map(len, self._lines.values()))

    def stage(self, topic: Topic, batch: Batch, key: str | None, staged: Staged, *, insists: bool = False) -> None:
        """Stage a write now or later, and tell. Raises what staging it raises, where that is now, and Busy where it
        is refused. `insists`: it would rather wait than be refused."""
        shard = self._shard(topic)
        if shard is None or self._is_open(shard):
            staged(topic.stage(batch, key), 0)
            return

        def go(held_us: int) -> None:
            try:
                token: Token[Appended] | Error = topic.stage(batch, key)
            except Error as error:
                token = error
            staged(token, held_us)

        self._line_up(shard, go, insists=insists)

    async def staged(
        self, topic: Topic, batch: Batch | Columns, key: str | None, *, insists: bool = False, work: Work | None = None
    ) -> tuple[Token[Appended], int]:
        """`stage`, to be awaited: the token, and how long it was held back. With `work` it is staged off the loop.
        Whoever leaves before their turn has written nothing."""
        held_us = 0
        while True:
            shard = self._shard(topic)
            if shard is not None and not self._is_open(shard):
                held_us += await self._turn(shard, insists=insists)
            try:
                token = topic.stage(batch, key) if work is None else await work(lambda: topic.stage(batch, key))
            except Busy:  # it was let in, and another was quicker: it is not refused for that
                insists = True
            else:
                return token, held_us

    async def _turn(self, shard: Shard, *, insists: bool) -> int:
        turn: asyncio.Future[int] = self._loop.create_future()
        self._line_up(shard, lambda held_us: None if turn.done() else turn.set_result(held_us), insists=insists)
        return await turn

    def check(self, topic: Topic) -> None:
        """Raise Busy where a write that does not insist would be refused."""
        shard = self._shard(topic)
        if shard is not None and not self._is_open(shard):
            self._check(shard)

    # ── lines ─────────────────────────────────────────────────────────────────────────────────

    def _shard(self, topic: Topic) -> Shard | None:
        """None: its records lie in no file, so nothing has to wait."""
        return None if topic.config.durability == "ephemeral" else topic.shard

    def _is_open(self, shard: Shard) -> bool:
        return shard not in self._lines and shard.waiting < shard.queue_max

    def _check(self, shard: Shard) -> None:
        self._stir()
        waits = len(self._lines.get(shard, ()))
        if self._governor.is_saturated or waits >= shard.queue_max:
            self.throttled += 1
            raise Busy(
                f"{shard.waiting + waits} writes wait for the disk already and the server is saturated; nothing was "
                "written, retry later or set disable_backpressure to wait"
            )

    def _line_up(self, shard: Shard, go: Callable[[int], None], *, insists: bool) -> None:
        if not insists:
            self._check(shard)
        self._lines.setdefault(shard, deque()).append(_Waiting(self._micros(), go))
        self._stir()
        self._commits.hurry()
        self._watch()

    def _watch(self) -> None:
        if self._looking is None and self._lines:
            self._looking = self._loop.call_later(_LOOK_S, self._again)

    def _again(self) -> None:
        self._looking = None
        try:
            self._commits.hurry()
            self._look()
        except Exception as error:
            self._health.failed("admission", error)
        self._watch()

    def _look(self) -> None:
        """Let in as many as there is room for."""
        if not self._lines:
            return
        now_us = self._micros()
        for shard, line in list(self._lines.items()):
            while line and shard.waiting < shard.queue_max:
                waiting = line.popleft()
                try:
                    waiting.go(now_us - waiting.since_us)
                    self._health.recovered("admission")
                except Exception as error:  # of one write: those after it go on
                    self._health.failed("admission", error)
            if not line and self._lines.get(shard) is line:
                del self._lines[shard]

    def fill(self, shards: Sequence[Shard]) -> float:
        """How full the fullest queue is, 0 to 1."""
        return 1.0 if self._lines else max((shard.waiting / shard.queue_max for shard in shards), default=0.0)
