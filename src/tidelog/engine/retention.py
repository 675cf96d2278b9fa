"""[shell] Age: records older than `ttl_ms` are lost, and the floor says so before anybody is told.

A floor that replay cannot work out again is made durable first (EvictWatermark) and moves after:
a reader that was shown a gap is shown it again after any crash. Caps follow from the records and
need that only where records themselves may be lost, which is the disk class, and where a group holds
them up: how far it did is not in the records.

A reader that is not below the floor is shown no gap, and nothing has to be durable for it. Floors that moved are
written with the interval sync (`write_floors`), which costs no sync of its own, so that a reader which comes
from below later does not wait for one either (docs/decisions/0025).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from tidelog.engine.agenda import HELD_MS, STEP_MS
from tidelog.engine.core import Core, Shared
from tidelog.engine.floors import Gap
from tidelog.engine.routing import lane as lanes
from tidelog.errors import Corrupt, Damaged, Error, Refused, Unavailable
from tidelog.formats import bodies, frame
from tidelog.wal import Commit, Token


class Floor(Commit):
    """An advance of the evict floor on its way through the WAL."""

    __slots__ = ("core", "expiry", "floor", "token")

    def __init__(self, core: Core, floor: int, expiry: int) -> None:
        self.core, self.floor, self.expiry = core, floor, expiry
        body = bodies.EvictWatermark(
            # What was lost at the source is on record by itself, and is not lost to a cap.
            evict_floor=max(core.index.marks.cap + 1, expiry),
            earliest_seq=max(floor, core.index.earliest),
            expiry_floor=expiry,
        )
        made = frame.encode(frame.EVICT_WATERMARK, topic_id=core.id, ts_ms=core.stamp(), data=bodies.encode(body))
        super().__init__([made], frames=1, durable=core.config.durability != "memory")
        self.token: Token[int] = Token(core.shard)

    def done(self, error: Error | None) -> None:
        core = self.core
        with core.lock:
            core.flooring = None
            if error is None:
                core.hardened = max(core.hardened, self.floor)
                try:
                    core.evict(min(self.expiry, core.index.head + 1), "ttl")
                except Error as damage:
                    error = damage
        if error is None:
            self.token.set(self.floor)
        else:
            self.token.fail(error)


def expire(core: Core) -> None:
    """Bring the floor to where age puts it now. Where that cannot be made durable nothing moves and nothing is lost:
    the error is the writer's to hear, a reader goes on with what is there (`observe`)."""
    if not core.config.ttl_ms:
        return
    expiry = 0
    while True:
        with core.lock:
            expiry = expiry or _expiry(core)  # as of the first look: what expires while this waits is for the next one
            token = _expiring(core, expiry)
        if token is None:
            return
        token.wait()  # it may have been on its way before, and lower: then there is another one


def _expiring(core: Core, expiry: int) -> Token[int] | None:
    """Begin to bring the floor there; None where it is. With the lock held."""
    if core.dropped or expiry <= core.index.evict_floor:
        return None
    if core.ephemeral or not core.shared.shards:  # a reader's own view is nobody else's
        core.evict(expiry, "ttl")
        return None
    return _begin(core, expiry)


def keep(shared: Shared, most: int = 1_000) -> dict[Core, Exception]:
    """Expire records and seal segments of all topics that are due; return those where that failed. One sync a shard
    makes their floors durable."""
    now_ms, failed = shared.now_ms(), dict[Core, Exception]()
    due = shared.agenda.take(now_ms, most)
    left: dict[Core, int | None] = dict.fromkeys((core for core in due if core.config.ttl_ms), None)
    while left:
        waiting: dict[Core, tuple[int, Token[int]]] = {}
        for core, floor in left.items():
            try:
                with core.lock:
                    expiry = _expiry(core) if floor is None else floor
                    token = _expiring(core, expiry)
                if token is not None:
                    waiting[core] = expiry, token
            except Exception as error:
                failed[core] = error
        left = {}
        for core, (expiry, token) in waiting.items():
            try:
                token.wait()
                left[core] = expiry  # it may have been another one's, and lower
            except Exception as error:
                failed[core] = error
    for core in due:
        with core.lock:
            core.age()
            _release(core)
            behind = core in failed or (core.config.ttl_ms and _age_floor(core) > core.index.evict_floor)
            core.plan(now_ms + (HELD_MS if behind else STEP_MS))
    return failed


def _age_floor(core: Core) -> int:
    """How far age would go if no group held it up; 0 where it cannot be found out."""
    try:
        return core.index.expired(core.shared.now_ms() - core.config.ttl_ms)
    except Corrupt:
        return 0


def _release(core: Core) -> None:
    """Let a segment of which everything has expired be removed: the next record starts another one. With the lock
    held."""
    index = core.index
    if index.count or core.dropped or index.segment() is None or not core.config.ttl_ms:
        return
    index.roll()
    if core.ephemeral:
        index.shed()
    else:
        core.shared.rolled = True


def is_due(core: Core) -> bool:
    """Whether `expire` would have to wait for the disk."""
    if not core.config.ttl_ms or core.ephemeral:
        return False
    with core.lock:
        return _expiry(core) > core.index.evict_floor


def _expiry(core: Core) -> int:
    """How far age may go now. Records whose age does not read do not expire, and stop no write."""
    try:
        expiry = core.index.expired(core.shared.now_ms() - core.config.ttl_ms)
    except Corrupt as error:
        core.spoiled(f"{error.where}, byte {error.pos}", error.reason)
        return 0
    return core.held(expiry) if expiry > core.index.evict_floor else expiry


def is_settled(core: Core, from_seq: int = 0) -> bool:
    """Whether a reader with this cursor does not have to wait until a floor is durable. One that is not below the
    floor is shown no gap; 0 asks for the floor itself."""
    if is_behind(core) or is_due(core):
        return False
    return not core.hardens or core.hardened >= core.index.evict_floor or from_seq + 1 >= core.index.evict_floor


def bring(core: Core) -> None:
    """Have routers bring what they have yet to. Where they cannot, what is there is there."""
    if core.lane is not None:
        with suppress(Damaged, Unavailable, Refused):
            lanes.catch_up(core)


def is_behind(core: Core) -> bool:
    """Whether routers have yet to bring something."""
    return core.lane is not None and lanes.is_behind(core)


def observe(core: Core) -> None:
    """`expire` for a reader, behind what routers have yet to bring: a shard that cannot write keeps its records
    readable."""
    bring(core)
    with suppress(Damaged, Unavailable, Refused):
        expire(core)


def harden(core: Core, floor: int, *, always: bool = False) -> None:
    """Make a floor that a reader is about to be told of survive a power cut, where the records above it might not;
    `always`: also where replay would find it by the records."""
    needed = core.hardens or (always and not core.ephemeral)
    if not needed or core.hardened >= floor or not core.shared.shards:
        return
    with suppress(Damaged, Unavailable, Refused):  # a failing disk keeps nobody from reading
        while core.hardened < floor:
            with core.lock:
                token = _begin(core, core.index.marks.ttl + 1)
            token.wait()


def harden_gap(core: Core, gap: Gap | None, floor: int) -> None:
    """`harden` for a page that was read below this floor. Where it shows no gap there is nothing to take back."""
    if gap is not None:
        harden(core, floor)


def write_floors(shared: Shared) -> None:
    """Queue the floors that moved since the last call, for the interval sync that follows. Nothing waits for them; a
    shard that refuses them keeps them in memory, and `harden` tries again for a reader that needs one."""
    moved = shared.moved_floors
    for _ in range(len(moved)):  # other threads add to it meanwhile: those are the next call's
        core = moved.pop()
        with core.lock, suppress(Error):
            if core.hardens and not core.dropped and core.hardened < core.index.evict_floor:
                _begin(core, core.index.marks.ttl + 1)


def harden_all(cores: Sequence[Core]) -> None:
    """Make the floors of all topics durable, as they are now, with one sync a shard."""
    due = {core: core.index.evict_floor for core in cores if not core.ephemeral}
    while True:
        tokens = []
        for core, floor in due.items():
            with core.lock:
                if not core.dropped and core.hardened < floor:
                    tokens.append(_begin(core, core.index.marks.ttl + 1))
        if not tokens:
            return
        for token in tokens:
            token.wait()  # it may have been on its way before, and lower: then there is another one


def _begin(core: Core, expiry: int) -> Token[int]:
    """One floor is on its way at a time; whoever comes meanwhile waits for it and looks again."""
    if core.flooring is None:
        commit = Floor(core, max(core.index.evict_floor, expiry), expiry)
        core.submit(commit)
        core.flooring = commit.token
    return core.flooring
