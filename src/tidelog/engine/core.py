"""[shell] One topic inside the engine: its index, the lock that guards it, and who waits for its records.

A write is staged under the lock (seqs, frames, its place in the shard's queue) and published by the
committer when the WAL has it. Between the two it is counted but not visible. Nobody waits for a
commit while holding the lock: the committer needs it to publish.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

from tidelog.clock import Clock
from tidelog.disk import fork
from tidelog.disk.seam import Disk, join
from tidelog.engine.agenda import Agenda
from tidelog.engine.block import Block, Told
from tidelog.engine.config import OWN, EngineConfig, TopicConfig
from tidelog.engine.floors import Marks
from tidelog.engine.health import TASKS, Health
from tidelog.engine.holds import Cursor, broken_by, limit
from tidelog.engine.home import Home, Maps
from tidelog.engine.idempotency import Window
from tidelog.engine.index import TopicIndex
from tidelog.engine.notes import Cause, Notes
from tidelog.engine.numbers import Numbers
from tidelog.engine.quota import Quota
from tidelog.engine.recency import effective_priority
from tidelog.engine.results import Appended, TopicState
from tidelog.engine.routing.hops import Hops
from tidelog.engine.scratch import Scratch
from tidelog.engine.tags import TagCache
from tidelog.errors import Closed, Corrupt, Damaged, Forked, ReadOnly, TopicNotFound, Unavailable
from tidelog.wal import Shard, Stored, Token, shard_of
from tidelog.wal.spare import Reserve

if TYPE_CHECKING:
    from tidelog.engine.ledger import Ledger
    from tidelog.engine.queues.doors import Doors
    from tidelog.engine.queues.history import Journal
    from tidelog.engine.queues.projection import Projection
    from tidelog.engine.queues.state import State
    from tidelog.engine.reserve import Booked
    from tidelog.engine.routing.holding import Frozen
    from tidelog.engine.routing.lane import Lane
    from tidelog.engine.routing.restore import Wires
    from tidelog.engine.watch import WalWatch
    from tidelog.wal import Commit

_log = logging.getLogger("tidelog.engine")
TOPICS = "topics"
WAL = "wal"


@dataclass(slots=True)
class Shared:
    """What all topics of an engine have in common."""

    disk: Disk
    clock: Clock
    root: str
    limits: EngineConfig
    quota: Quota
    tags: TagCache
    maps: Maps
    shards: list[Shard]  # none: opened for reading
    closing: bool = False  # no new writes
    closed: bool = False
    listener_failures: int = 0  # how often a listener raised
    opener: int | None = None  # in a forked child: the process that opened it
    rolled: bool = False  # a segment was completed, or copies were made, that no checkpoint has seen
    doors: Doors | None = None  # the engine, for those of its parts that need other topics
    journals: set[Journal] = field(default_factory=set)  # those with something to write down
    queues: set[Core] = field(default_factory=set)  # topics of type queue
    scratch: Scratch = field(default_factory=Scratch)
    strong: set[Core] = field(default_factory=set)  # topics with strong readers
    files_synced: bool = False  # a reader beside the writer has synced the WAL for its strong readers
    moved_floors: set[Core] = field(default_factory=set)  # topics whose floor the next interval sync makes durable
    look_again: Callable[[], dict[str, Core]] | None = None  # of a reader: the topics as they are on disk now
    replaying: bool = False  # frames are being applied: what they say is not yet all
    agenda: Agenda = field(default_factory=Agenda)
    reserve: Reserve = field(init=False)
    notes: Notes = field(init=False)
    health: Health = field(init=False)
    ledger: Ledger = field(init=False)  # once it is an engine

    def __post_init__(self) -> None:
        self.notes = Notes(wanted=self.limits.ledger_records > 0)
        self.health = Health(self.root, self.now_ms, TASKS)
        self.reserve = Reserve(self.disk, join(self.root, WAL))

    def gone(self, undone: str) -> Closed | Forked:
        """The error for a use after `closed` was set: by a close, or in a forked child."""
        if self.opener is not None:
            return Forked(self.root, pid=self.opener)
        return Closed(f"{self.root} was closed; {undone}, open it again")

    def notify(self, topic: str, listeners: Iterable[Callable[[], None]]) -> None:
        """Call the listeners of a topic. What one raises is logged and counted, and is no concern of the write that it
        is told of, nor of the other listeners."""
        for listener in listeners:
            try:
                listener()
            except BaseException:
                self.listener_failures += 1
                _log.exception("a listener of topic %r raised; the write it was told of is done", topic)

    def now_ms(self) -> int:
        return self.clock.now_us() // 1000

    def home(self, topic_id: int) -> Home:
        return Home(self.disk, directory(self.root, topic_id), topic_id, self.maps)

    def shard(self, topic_id: int) -> Shard:
        if self.closed:
            raise self.gone("nothing was written")
        if not self.shards:
            raise ReadOnly(f"{self.root} was opened for reading; nothing was written")
        return self.shards[shard_of(topic_id, len(self.shards))]


def directory(root: str, topic_id: int) -> str:
    return join(join(root, TOPICS), f"{topic_id:08X}")


class Core:
    def __init__(self, shared: Shared, topic_id: int, name: str, config: TopicConfig) -> None:
        self.shared, self.id, self.name, self.config = shared, topic_id, name, config
        self.lock = Lock()
        self.index = TopicIndex()
        self.quota = Quota(0) if name.startswith(OWN) else shared.quota  # what is the engine's own costs nobody
        self.groups: dict[str, Cursor] = {}
        self.moving: dict[str, Token[None]] = {}  # cursors on their way to the WAL
        self.numbered: Numbers = {}  # batches by writer and number
        self.numbering: dict[str, Token[Appended]] = {}  # and those on their way to the WAL
        self.guarded = False  # a group of it has had a hold: its cap floors do not follow from its records alone
        self.guarding = False  # floors that are shown are made durable first; set before `guarded`, and never unset
        self.removals = 0  # deletes so far: each has a number
        self.tail = 0  # the last seq that was assigned
        self.staged_records = self.staged_bytes = 0  # assigned and not published yet
        self.reserved = 0  # disk class: seqs up to here are known, durably, to be taken
        self.reserving = 0  # as `reserved`, with what the commit that is being written adds
        self.reserved_ms, self.ahead = 0, 0
        self.booked: Booked | None = None  # those behind them, once the disk has the mark
        self.hardened = 1  # the evict floor that a power cut cannot take back
        self.flooring: Token[int] | None = None
        self.synced = 0  # records up to here survive a power cut, as far as a strong reader asked
        self.settling = Lock()  # one strong reader syncs for all
        self.window: Window[Token[Appended], Appended] = Window()
        self.dropped = False
        self.due_ms: int | None = None  # when the agenda has it looked at
        self._shard: Shard | None = None
        self.last_write_ms: int | None = None
        self.last_read_ms: int | None = None  # wall time, for people
        self.consumed_ms: int | None = None  # monotonic, for priorities
        self.damage: list[str] = []  # what replay found about it
        self.lost: list[tuple[int, int]] = []  # seqs, both ends, of records that were lost with damaged frames
        self.unsure = False  # a change of its settings may be lost: replay evicts nothing on account of its caps
        self.floors = Marks()  # the highest that replay was told of
        self.found: int | None = None  # its head when it was opened; None: it was made since
        self.projection: Projection | None = None  # what was found of a queue, until its first use
        self.queue: State | None = None  # from then on
        self.told = 0  # jobs up to here are in the history of their queue, or were another process's to tell
        self.lane: Lane | None = None  # what routers bring to it
        self.lanes: list[Lane] = []  # what routers take from it
        self.wired = 0  # the number of the last router frame that was applied
        self.wiring = 0  # and of the last one that was staged
        self.wires: Wires | None = None  # what replay found of its routers, until they are linked
        self.hops = Hops()
        self.frozen: Frozen | None = None  # for the checkpoint that is being made
        self.discarded: list[int] = []  # segments that the index has forgotten and a manifest may still name
        self.watch: WalWatch | None = None  # of a reader beside a writer, once it waits
        self._waiters: set[Callable[[], None]] = set()

    @property
    def shard(self) -> Shard:
        """Where its frames go. Raises where nothing can be written."""
        if self._shard is None or self.shared.closed:
            self._shard = self.shared.shard(self.id)
        return self._shard

    # ── what it is ────────────────────────────────────────────────────────────────────────────

    @property
    def ephemeral(self) -> bool:
        return self.config.durability == "ephemeral"

    @property
    def durable(self) -> bool:
        return self.config.durability == "fsync"

    @property
    def evicts(self) -> bool:
        """Whether the old gives way to the new. One that rejects loses records only when its caps are lowered."""
        return self.config.discard == "old"

    @property
    def hardens(self) -> bool:
        """Whether a floor has to be made durable before a reader is told of it."""
        return self.config.durability == "disk" or (self.guarding and not self.ephemeral)

    @property
    def ceiling(self) -> int:
        """Seqs up to here may be taken for given out by whoever replays what was written."""
        booked = self.booked
        return max(self.reserved, self.reserving, 0 if booked is None else booked.ceiling)

    def state(self) -> TopicState:
        with self.lock:
            index = self.index
            return TopicState(
                self.name,
                self.id,
                self.id,
                index.head,
                index.earliest,
                index.evict_floor,
                index.count,
                index.bytes,
                self.last_write_ms,
                self.last_read_ms,
                self.priority(),
                self.config,
            )

    def version(self) -> tuple[int, int, int, Marks]:
        """While this stands still the same records are there."""
        with self.lock:
            index = self.index
            return self.id, index.head, index.count, index.marks

    def priority(self) -> int:
        """How urgent it is to tell of its records."""
        idle_ms = None if self.consumed_ms is None else self.shared.clock.monotonic_ms() - self.consumed_ms
        return effective_priority(self.config, idle_ms)

    def touch(self, *, read: bool = True) -> None:
        """Somebody looked: as a reader of its records, or only at what it is."""
        self.consumed_ms = self.shared.clock.monotonic_ms()
        if read:
            self.last_read_ms = self.shared.now_ms()

    def check(self) -> None:
        if self.shared.closed:
            raise self.shared.gone("nothing was done")
        if self.dropped:
            raise TopicNotFound(self.name)

    def check_writable(self) -> None:
        self.check()
        if self.shared.closing and not self.name.startswith(OWN):  # its own it keeps to the last moment
            raise Closed(f"{self.shared.root} is being closed; nothing was written, open it again")

    def stamp(self) -> int:
        """The time for the next record: now, or the last record's when the clock went back."""
        return max(self.shared.now_ms(), self.index.last_ts)

    # ── publishing, by the committer ──────────────────────────────────────────────────────────

    def publish(
        self,
        first: int,
        frames: list[bytes],
        count: int,
        weight: int,
        ts_ms: int,
        *,
        kept: bool,
        told: Told | None = None,
    ) -> None:
        """Make a committed batch visible and keep the caps. With the lock held; `wake` follows without it."""
        self._published(self.index.publish(first, frames, count, weight, ts_ms, kept=kept, told=told), kept=kept)

    def publish_stored(self, first: int, pieces: list[Stored], told: Told, weight: int, ts_ms: int) -> None:
        """`publish` of a large batch, which is read where the WAL has it."""
        self._published(self.index.publish_stored(first, pieces, told, weight, ts_ms), kept=True)

    def _published(self, block: Block, *, kept: bool) -> None:
        limits = self.shared.limits
        full = block.stop - block.segment >= limits.segment_events_max
        if full or block.origin + block.size >= limits.segment_bytes_max:
            self.index.roll()
            if not kept:
                self.index.shed()
        self.last_write_ms = self.shared.now_ms()
        self.keep_caps()
        if self.due_ms is None:
            self.plan()

    def keep_caps(self, head: int | None = None) -> None:
        """Evict what is over the caps. A topic that rejects is only over them when its caps were lowered. `head`: as if
        this were the last record, for a replay that has later ones already."""
        try:
            if self.shared.replaying and (self.guarded or self.unsure):
                return  # frames say how far that went, or nothing does
            floor = self.index.over(self.config.cap_records, self.config.cap_bytes, head)
            if floor:
                self.evict(self.held(floor), "cap")
        except (Corrupt, Damaged, Unavailable) as error:
            # Records that cannot be counted cannot be evicted either; the write itself is good.
            self.damage[:] = [*self.damage, f"{self.name}: its caps are not kept: {error}"][-10:]
            self.spoiled("caps", f"they are not kept: {error}")

    def held(self, floor: int) -> int:
        """How far of what caps or age ask for eviction may go, for the groups that hold it up."""
        return limit(self.index, self.groups.values(), floor) if self.guarded and self.evicts else floor

    def evict(self, floor: int, cause: Cause) -> None:
        """Records below `floor` are lost. With the lock held."""
        before = self.index.evict_floor
        gone = self.index.evict(floor, cause)
        self.quota.give(gone.size)
        if self.index.evict_floor > before:
            broken = broken_by(self.groups, before, floor) if self.guarded else []
            self.shared.notes.evicted(self, before, cause, gone, broken)
            if self.hardens:
                self.shared.moved_floors.add(self)

    def spoiled(self, where: str, reason: str) -> None:
        """Stored bytes of it do not verify."""
        self.shared.health.corrupt(self.name, self.id, where, reason)

    def age(self) -> None:
        """Seal what has been open for long. With the lock held."""
        limit = self.shared.limits.segment_age_ms_max
        born_ms = self.index.born_ms()
        if limit and born_ms is not None and self.shared.now_ms() - born_ms >= limit:
            self.index.roll()
            self.shared.rolled = True

    def plan(self, least_ms: int = 0) -> None:
        """Put down when records expire or its segment is to be sealed, not before `least_ms`. With the lock held."""
        if self.dropped or not self.shared.shards:
            return
        limit, ttl_ms, due = self.shared.limits.segment_age_ms_max, self.config.ttl_ms, list[int]()
        if limit and (born_ms := self.index.born_ms()) is not None:
            due.append(born_ms + limit)
        if ttl_ms and (oldest_ms := self.index.oldest_ms()) is not None:
            due.append(oldest_ms + ttl_ms + 1)
        if due:
            self.shared.agenda.plan(self, max(min(due), least_ms))

    # ── waiting ───────────────────────────────────────────────────────────────────────────────

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` after every publish, delete of the topic and close, from whichever thread did it."""
        with self.lock:
            self._waiters.add(wake)

    def unlisten(self, wake: Callable[[], None]) -> None:
        with suppress(Forked), self.lock:  # in a forked child nothing is told of anyway
            self._waiters.discard(wake)

    def forked(self, pid: int) -> None:
        """Give up in a forked child: every lock of the topic raises Forked."""
        state = self.queue
        beside = () if state is None else (state, state.journal, state.gate)
        fork.poison(self.shared.root, pid, self, *beside, *self.lanes, self.lane)

    def wake(self) -> None:
        if self._waiters:
            with self.lock:
                waiters = list(self._waiters)
            self.shared.notify(self.name, waiters)

    def submit(self, commit: Commit) -> None:
        self.shard.submit(commit)
