"""All of the storage at once: any interleaving of writes, removals, rewrites, erasures, moves between tiers, backups,
restores, restarts and power cuts leaves what lists of states say.

A topic is a list of states, as in `test_topics.py`. The running engine shows the last one; after a power cut, between
two calls, within a call or within the recovery, a topic is one of its states from the last durable one on. A backup
keeps the states of its instant, and the history may go on in a directory restored from it.

    states    created ── +1,2 ── −1 ── +3 ── compacted ┄┄ the call that was cut off
                         durable            now

After every step: reads, counts, floors and `latest` agree with the model; `check` reads every file and cold object and
finds no damage; every segment has a copy; of erased records no byte is in the directory or the cold store. At the end
of some histories one bit is flipped or one file is lost, hot, cold or in the backup.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from random import Random
from typing import Any, Final, Literal, NamedTuple

import pytest
from tests.crash.topics.large_records import chunks, small_limits
from tests.kit.sampling import SEED
from tests.model.test_topics import Life, Row, State, marks, meant, row
from tests.unit.engine.harness import TopicContents, read_topic

import tidelog
from tidelog.database import engine_of
from tidelog.engine import Engine, Record, Topic, recovery
from tidelog.engine.backup import create_backup
from tidelog.engine.backup_target import verify_backup
from tidelog.engine.check import check_directory
from tidelog.engine.large_read import LargeData
from tidelog.engine.restore import restore_backup
from tidelog.errors import Error
from tidelog.formats import cold_object
from tidelog.testing import ManualClock, PowerOff, SimDisk, SimStore

TAGS: Final = (None, "a", "b", "c", "d")
TOKEN: Final = re.compile(rb"tok[0-9a-f]{16}")
WINDOW_MS: Final = 100_000
SETTINGS: Final[dict[str, Any]] = {
    "threads": False,
    "wal_file_bytes": 1 << 12,
    "segment_events_max": 4,
    "segment_bytes_max": 900,
    "head_reserve": 3,
    "tags_cache_bytes": 4_000,
    "key_index_bytes": 1 << 10,
    "maps_max": 2,
    "compaction_interval_ms": 1,
    "rewrite_dead_percent": 40,
    "rewrite_dead_bytes_min": 60,
    "rewrite_bytes_per_second": 0,
    "hot_retain_segments": 1,
    "cold_timeout_ms": 3_600_000,  # a store of tests answers, however busy the machine is
}
LIMITS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {},
    {"cap_records": 9},
    {"cap_bytes": 1_200},
    {"ttl_ms": 3_000},
    {"cap_records": 12, "ttl_ms": 6_000},
)


class Keyed(NamedTuple):
    """A write with an idempotency key."""

    name: str
    seqs: range
    data: Any
    at_ms: int


class Taken(NamedTuple):
    """A backup, and what it must restore."""

    id: str
    now_ms: int
    states: dict[str, State]
    tags: dict[str, dict[int, str | None]]
    erased: frozenset[bytes]


@dataclass
class StoredTopic:
    life: Life
    keyed: bool  # of the records with a tag only the newest stays
    tags: dict[int, str | None] = field(default_factory=dict)  # of every record that was written, by seq
    doubts: list[State] = field(default_factory=list)  # what the call under way may leave
    tokens: dict[int, list[bytes]] = field(default_factory=dict)  # what was ever written as this seq
    compacting: bool = False  # whether the call under way may delete replaced records alone
    written: dict[int, set[Row]] = field(default_factory=dict)  # what was ever written as this seq

    @property
    def now(self) -> State:
        return self.life.now

    def newest(self, upto: int) -> dict[str, int]:
        return {tag: seq for seq, tag in sorted(self.tags.items()) if tag is not None and seq <= upto}

    def replaced(self, state: State) -> set[int]:
        """Records that a newer one of their key has replaced."""
        if not self.keyed:
            return set()
        newest = self.newest(state.head)
        return {seq for seq, kept in state.rows.items() if kept.tag is not None and newest[kept.tag] != seq}

    def without(self, seqs: set[int]) -> State:
        """The newest record of a key takes the older ones with it."""
        gone = seqs & self.now.rows.keys()
        if self.keyed:
            newest = self.newest(self.now.head)
            keys = {self.now.rows[seq].tag for seq in gone if newest.get(self.now.rows[seq].tag or "") == seq}
            gone |= {seq for seq, kept in self.now.rows.items() if kept.tag is not None and kept.tag in keys}
        return self.now.without(gone)


def content(record: Record) -> Any:
    return record.data.read() if isinstance(record.data, LargeData) else record.data


def rows_of(records: list[Record]) -> dict[int, Row]:
    return {each.seq: row(each.ts_ms, content(each), each.tag, each.node, each.meta) for each in records}


class StorageHistory:
    def __init__(self, seed: object) -> None:
        self.random = Random(f"storage {seed}")
        self.random_bytes = Random(f"ids of {seed}").randbytes  # a history is the same every time it runs
        self.clock = ManualClock()
        self.disk = SimDisk(clock=self.clock)
        self.shards = self.random.choice((1, 2))
        self.compression = self.random.choice(("none", "zstd"))
        self.path, self.store, self.target = "data", SimStore(), "backups"
        self.numbers, self.starts = count(1), count(1)
        self.trace: list[str] = []
        self.log = self.open()
        self.topics: dict[str, StoredTopic] = {}
        for name, durability in zip(
            "tuvw", [*self.random.sample(["fsync", "disk", "memory"], 3), "fsync"], strict=True
        ):
            self.create(name, durability)
        self.writes: list[Keyed] = []
        self.backups: list[Taken] = []
        self.erased: set[bytes] = set()

    def create(self, name: str, durability: str) -> None:
        keyed = name in "uw"
        limits = {"cap_records": 0, "cap_bytes": 0, "ttl_ms": 0, "discard": "old", **self.random.choice(LIMITS)}
        config = {"durability": durability, "idempotency_window_ms": WINDOW_MS, **limits}
        compaction = "latest_by_tag" if keyed else None
        topic = self.log.topic(name, max_record_bytes=1 << 16, compaction=compaction, **config)
        self.topics[name] = StoredTopic(Life(topic.id, [State(config)], reserves=durability == "disk"), keyed)

    def open(self, disk: SimDisk | None = None, path: str | None = None, **settings: Any) -> Engine:
        settings = {**SETTINGS, "wal_shards": self.shards, "cold_compression": self.compression, **settings}
        settings.setdefault("cold_store", self.store)
        settings.setdefault("clock", self.clock)
        return engine_of(tidelog.open(path or self.path, disk=disk or self.disk, **settings))

    @property
    def now_ms(self) -> int:
        return self.clock.now_us() // 1000

    def topic(self, name: str) -> Topic:
        return self.log.topic(name, create=False)

    def any_topic(self) -> tuple[str, StoredTopic]:
        return self.random.choice(list(self.topics.items()))

    def any_seqs(self, kept: StoredTopic) -> set[int]:
        if not kept.now.head:
            return set()
        pool = sorted(kept.now.rows) if kept.now.rows and self.random.random() < 0.7 else range(1, kept.now.head + 1)
        return set(self.random.sample(pool, min(len(pool), self.random.randint(1, 5))))

    def _token(self) -> str:
        return f"tok{self.random.getrandbits(64):016x}"

    # ── what is done ──────────────────────────────────────────────────────────────────────────

    def append(self) -> None:
        size = self.random.choice((1, 1, 1, 3, 6))
        name, kept = self.any_topic()
        datas = [self.random.choice((self._token().encode(), {"v": self._token()})) for _ in range(size)]
        self._write(name, kept, datas, [self.random.choice(TAGS) for _ in range(size)])

    def append_with_key(self) -> None:
        name, kept = self.any_topic()
        key, data = f"key {next(self.numbers)} {self._token()}", {"v": self._token(), "n": next(self.numbers)}
        seqs = self._write(name, kept, [data], [self.random.choice(TAGS)], key)
        if kept.now.durability == "fsync":
            self.writes.append(Keyed(key, seqs, (name, data), self.now_ms))

    def repeat_write(self) -> None:
        """A write whose key is known writes nothing, whatever became of the record's file."""
        if self.writes:
            key, seqs, (name, data), at_ms = self.random.choice(self.writes)
            if self.now_ms - at_ms < WINDOW_MS:
                done = self.topic(name).append([data], key=key)
                assert (done.deduped, done.seqs) == (True, seqs), (name, key, done)

    def append_large(self) -> None:
        """Records around the threshold above which a streamed one is a file of its own."""
        name, kept = self.any_topic()
        data = self._token().encode()
        data = data.ljust(self.random.choice((64, 65, 400, 1_100)), b"x")
        tag = self.random.choice(TAGS)
        self._write(name, kept, [data], [tag], stream=True)

    def _write(
        self,
        name: str,
        kept: StoredTopic,
        datas: list[Any],
        tags: list[str | None],
        key: str | None = None,
        *,
        stream: bool = False,
    ) -> range:
        topic, meta = self.topic(name), self.random.choice((None, {"m": 1}))
        kept.life.become(kept.now.aged(self.now_ms))  # a write expires first what is too old
        first = topic.head_seq + 1
        rows = [row(self.now_ms, data, tag, None, meta) for data, tag in zip(datas, tags, strict=True)]
        kept.tags |= dict(enumerate(tags, first))
        for seq, data in enumerate(datas, first):
            text = data if isinstance(data, bytes) else repr(data).encode()
            kept.tokens.setdefault(seq, []).extend(TOKEN.findall(text + (key or "").encode()))
        for seq, each in enumerate(rows, first):
            kept.written.setdefault(seq, set()).add(each)
        after = kept.now.grown(first, rows)
        kept.doubts.append(after)
        if stream:
            done = topic.append_stream(chunks(datas[0], 100), tag=tags[0], meta=meta)
        else:
            done = topic.append(datas, tag=tags, meta=meta, key=key)
        assert (done.first_seq, done.count, done.deduped) == (first, len(datas), False)
        assert first > max(kept.now.head, kept.life.top), f"{name}: seq {first} is given again"
        kept.life.become(after)
        return done.seqs

    def delete(self) -> None:
        name, kept = self.any_topic()
        kept.life.become(kept.now.aged(self.now_ms))
        words = self._selection(kept)
        if words is not None:
            after = kept.without({seq for seq, each in kept.now.rows.items() if meant(seq, each, words)})
            kept.doubts.append(after)
            kept.compacting = kept.keyed  # what the deleted records replaced is deleted first, in a frame of its own
            self.topic(name).delete(**words)
            kept.life.become(after)

    def _selection(self, kept: StoredTopic) -> dict[str, Any] | None:
        if self.random.random() < 0.3:
            return {"match": self.random.choice("abcd")}
        seqs = self.any_seqs(kept)
        return {"seqs": sorted(seqs)} if seqs else None

    def erase(self) -> None:
        name, kept = self.any_topic()
        kept.life.become(kept.now.aged(self.now_ms))
        words = self._selection(kept)
        if words is None:
            return
        chosen = {seq for seq, each in kept.now.rows.items() if meant(seq, each, words)}
        after = kept.without(chosen)
        kept.doubts.append(after)
        kept.compacting = kept.keyed
        # Records that were deleted before are erased as well, with their key, which may be all that is left of them.
        named = {*words.get("seqs", ()), *(seq for seq, tag in kept.tags.items() if tag and tag == words.get("match"))}
        gone = chosen | named | (kept.now.rows.keys() - after.rows.keys())
        self.writes = [each for each in self.writes if each.data[0] != name or not gone & set(each.seqs)]
        receipt = self.topic(name).erase(**words)
        kept.life.become(after)
        self.harden()
        assert self.log.verify_erasures(receipt).ok
        for seq in chosen | set(words.get("seqs", ())):
            self.erased.update(kept.tokens.get(seq, ()))
        self.check_erased(self.disk)
        self.check_erased(self.disk.crash_image("none"))

    def compact(self) -> None:
        name, kept = self.random.choice([each for each in self.topics.items() if each[1].keyed])
        kept.life.become(kept.now.aged(self.now_ms))
        kept.compacting = True
        after = kept.now.without(kept.replaced(kept.now))
        done = self.topic(name).compact()
        assert done.records == len(kept.now.rows) - len(after.rows)
        kept.life.become(after)

    def rewrite(self) -> None:
        name, _ = self.any_topic()
        assert self.topic(name).rewrite(force=self.random.random() < 0.8).skipped == ()

    def relocate(self) -> None:
        self.log.relocate(keep_segments=self.random.choice((None, 0, 1)))
        self.harden()

    def recall(self) -> None:
        name, kept = self.any_topic()
        first = self.random.randint(0, kept.now.head)
        self.log.recall(name, first_seq=first, last_seq=self.random.choice((None, first + 4)))

    def backup(self) -> None:
        self.check()
        states = {name: kept.now for name, kept in self.topics.items()}
        tags = {name: dict(kept.tags) for name, kept in self.topics.items()}
        taken = create_backup(
            self.log,
            self.target,
            incremental=self.random.random() < 0.6,
            link=self.random.random() < 0.7,
            random_bytes=self.random_bytes,
        )
        self.backups.append(Taken(taken.id, self.now_ms, states, tags, frozenset(self.erased)))

    def restore(self) -> None:
        """Every backup restores what was there at its time, on a copy of the disk."""
        if self.backups:
            taken = self.random.choice(self.backups)
            disk = self.disk.reboot()
            assert not verify_backup(self.target, taken.id, disk=disk).problems
            restore_backup(self.target, "restored", backup_id=taken.id, disk=disk, random_bytes=self.random_bytes)
            clock = ManualClock(taken.now_ms * 1000)
            log = self.open(disk, "restored", clock=clock, cold_store=SimStore())
            self.check_restored(log, taken)
            assert self.find_damage(disk, "restored", SimStore()) == []
            log.close()

    def check_restored(self, log: Engine, taken: Taken) -> None:
        assert not log.report.damage, log.report.damage
        assert set(log.names()) == set(taken.states)
        for name, state in taken.states.items():
            topic = log.topic(name, create=False)
            found = read_topic(topic, weighed=False)
            assert rows_of(found.records) == state.rows, f"{name}: restored as {found}, it was {state}"
            assert (found.evict_floor, found.gap.reason if found.gap else None) == (state.floor, state.reason())
            assert found.head_seq >= state.head

    def move(self) -> None:
        """The history goes on in a directory restored from a backup."""
        if not self.backups:
            return
        taken = self.random.choice(self.backups)
        path = f"data{next(self.numbers)}"
        restore_backup(self.target, path, backup_id=taken.id, disk=self.disk, random_bytes=self.random_bytes)
        self.log.close()
        self.path, self.target, self.store = path, f"backups of {path}", SimStore()
        self.log = self.open()
        for name, state in taken.states.items():
            kept = self.topics[name]
            head = self.topic(name).head_seq
            assert head >= state.head
            kept.life.states, kept.life.hard, kept.life.top = [replace(state, head=head)], 0, state.head
            kept.life.shown, kept.tags = state.floor, taken.tags[name]
        self.erased, self.backups, self.writes = set(taken.erased), [], []

    def seal(self) -> None:
        self.topic(self.any_topic()[0]).seal()

    def checkpoint(self) -> None:
        self.log.checkpoint()
        self.harden()

    def tick(self) -> None:
        """Background work: syncs, expiry, checkpoints, compactions, rewrites and moves that are due."""
        for kept in self.topics.values():
            kept.compacting = kept.keyed
        self.clock.tick(self.random.choice((2, 20_000)))
        self.log.tick()
        self.harden()  # what a compaction of this tick removes is synced by the next one
        for name, kept in self.topics.items():
            if kept.keyed:
                aged, found = kept.now.aged(self.now_ms), rows_of(list(self.topic(name).read(0, 10_000).records))
                assert aged.rows.keys() - found.keys() <= kept.replaced(aged), f"{name}: {found} of {aged}"
                kept.life.become(aged.without(aged.rows.keys() - found.keys()))

    def wait(self) -> None:
        self.clock.tick(self.random.choice((1, 500, 2_000)))

    def harden(self) -> None:
        for kept in self.topics.values():
            kept.life.harden()

    # ── restarts ──────────────────────────────────────────────────────────────────────────────

    def reopen(self) -> None:
        self.log.close()
        self.harden()
        self.shards = self.random.choice((1, 2))
        self.log = self.open()
        assert self.log.report.clean, self.log.report.lines()
        self.settle("reopen")

    def kill(self) -> None:
        self.disk = self.disk.reboot()
        self.log = self.open()
        self.settle("kill")

    def cut(self) -> None:
        """The power fails, and perhaps again during the recovery."""
        keep: tuple[Any, ...] = ("none", "all", self.random)
        self.disk = self.disk.crash_image(self.random.choice(keep))
        if self.random.random() < 0.4:
            self.disk.cut_power_at(self.disk.op_count + self.random.randint(1, 40))
            with suppress(PowerOff):
                self.log = self.open()
                self.log.checkpoint()
            self.disk = self.disk.crash_image(self.random.choice(keep))
        self.log = self.open()
        assert not self.log.report.damage, self.log.report.lines()
        self.settle("cut")

    def settle(self, how: Literal["reopen", "kill", "cut"]) -> None:
        """Find out in which of its states each topic is, and go on from there."""
        assert set(self.log.names()) == set(self.topics)
        for name, kept in self.topics.items():
            life, seen = kept.life, read_topic(self.topic(name), weighed=False)
            is_sure = how == "reopen" or (how == "kill" and life.promises)
            states = [*life.states[len(life.states) - 1 if is_sure else life.hard :], *kept.doubts]
            number, state = self._find_state(name, kept, states, seen)
            assert seen.head_seq >= max(state.head, life.top), f"{name}: the head fell to {seen.head_seq}, {life.top}"
            assert seen.evict_floor >= (life.shown if life.promises else 1), f"{name}: the floor fell"
            if seen.evict_floor > state.floor:
                state = state.lost(**marks(seen))
            kept.tags = {seq: tag for seq, tag in kept.tags.items() if seq <= state.head}
            state = replace(state, head=seen.head_seq)
            life.states, life.hard = [state], 0
            if life.promises:
                life.top = max([life.top, *state.rows])
            else:
                life.shown, life.top = 1, 0
            if how == "kill" and state.durability != "fsync":
                life.states = [*states[:number], state]  # another cut may still take it
            kept.doubts, kept.compacting = [], False

    def _find_state(self, name: str, kept: StoredTopic, states: list[State], seen: TopicContents) -> tuple[int, State]:
        found = rows_of(seen.records)
        for number in range(len(states) - 1, -1, -1):
            state = states[number].aged(self.now_ms)
            if kept.compacting:
                gone = state.rows.keys() - found.keys()
                state = state.without(gone) if gone <= kept.replaced(state) else state
            if state.rows == found and state.floor <= seen.evict_floor and state.head <= seen.head_seq:
                return number, state
        raise AssertionError(f"{name} is in none of {len(states)} states: {seen}; the last: {states[-1]}")

    def cut_within(self, operation: Callable[[StorageHistory], None]) -> None:
        """Power fails at a disk operation of a call."""
        self.disk.cut_power_at(self.disk.op_count + self.random.choice((1, 3, 9, 30, 90)))
        with suppress(PowerOff):
            operation(self)
            self.disk.power_off()
        self.cut()

    # ── what must hold ────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        for name, kept in self.topics.items():
            topic, life = self.topic(name), kept.life
            seen, aged = read_topic(topic, weighed=False), life.now.aged(self.now_ms)
            assert rows_of(seen.records) == aged.rows, f"{name}: {seen}; expected {aged}"
            if aged.ttl and seen.evict_floor > aged.floor:
                # Age takes whole segments: deleted records after the last one that expired count as well.
                assert seen.evict_floor <= min([*aged.rows, aged.head + 1])
                aged = aged.lost(ttl=seen.evict_floor - 1)
            assert (seen.head_seq, seen.evict_floor) == (aged.head, aged.floor), f"{name}: {seen}; expected {aged}"
            assert (seen.gap.reason if seen.gap else None) == aged.reason()
            assert seen.bytes == sum(each.size for each in aged.rows.values())
            life.become(aged)
            if life.promises:
                life.shown = max(life.shown, seen.evict_floor)
            kept.doubts, kept.compacting = [], False
            if kept.keyed:
                table = {each.key: each.record.seq for each in topic.latest()}
                newest = kept.newest(aged.head).items()
                assert table == {tag: seq for tag, seq in newest if seq in aged.rows}, f"{name}: {table}, {newest}"
        self.check_places()

    def check_places(self) -> None:
        """Every segment has its copy, where the engine says that it is."""
        tree = self.disk.tree()
        for place in self.log.segment_places():
            state = self.topic(place.topic)._state if place.topic in self.topics else None
            if state is None:
                continue
            if place.object is not None:
                key = place.object.removeprefix(f"{self.store.address}/")
                assert len(self.store.objects.get(key, b"")) == place.object_bytes, place
            else:
                names = [path for path in tree if path.startswith(f"{state.directory}/seg-{place.first_seq:016d}")]
                assert any(path.endswith(".data") for path in names), (place, names)

    def find_damage(self, disk: SimDisk, path: str, store: SimStore) -> list[Any]:
        return [each for each in check_directory(path, disk=disk, full=True, cold_store=store) if each.damage]

    def check_files(self) -> None:
        damage = self.find_damage(self.disk.reboot(), self.path, self.store)
        assert damage == [], damage

    def check_erased(self, disk: SimDisk) -> None:
        for path, data in self._contents(disk):
            found = self.erased.intersection(TOKEN.findall(data))
            assert not found, f"{found} of erased records are in {path}"

    def _contents(self, disk: SimDisk) -> Iterator[tuple[str, bytes]]:
        for path, data in disk.tree().items():
            if path.startswith(f"{self.path}/"):
                yield path, data
        for key, data in self.store.objects.items():
            is_packed = data.startswith(cold_object.MAGIC)
            yield f"store {key}", b"".join(map(bytes, cold_object.decode_object(data, key))) if is_packed else data


Operation = Callable[[StorageHistory], None]
H = StorageHistory
WITHIN: Final[dict[Operation, int]] = {
    H.append: 14,
    H.append_with_key: 3,
    H.append_large: 5,
    H.delete: 6,
    H.erase: 2,
    H.compact: 3,
    H.rewrite: 4,
    H.relocate: 4,
    H.recall: 2,
    H.checkpoint: 4,
    H.seal: 2,
    H.tick: 3,
    H.backup: 3,
}
BETWEEN: Final[dict[Operation, int]] = {
    H.repeat_write: 2,
    H.restore: 2,
    H.move: 1,
    H.wait: 2,
    H.reopen: 3,
    H.kill: 2,
    H.cut: 3,
}
ALL: Final = WITHIN | BETWEEN


def run(seed: int, steps: int) -> StorageHistory:
    """Run a history; a failure says its seed and its steps."""
    with pytest.MonkeyPatch.context() as patch:
        small_limits(patch)
        if seed % 3:
            patch.setattr(recovery, "IDLE_TOPICS_MIN", seed % 3 - 1)
        history = StorageHistory(seed)
        try:
            for number in range(steps):
                step(history, number)
        except Exception as error:
            error.add_note(f"seed {seed}, {len(history.trace)} steps: {' '.join(history.trace)}")
            raise
        return history


def step(history: StorageHistory, number: int) -> None:
    random = history.random
    if random.random() < 0.1:
        operation = random.choices(list(WITHIN), list(WITHIN.values()))[0]
        history.trace.append(f"cut({operation.__name__})")
        history.cut_within(operation)
    else:
        operation = random.choices(list(ALL), list(ALL.values()))[0]
        history.trace.append(operation.__name__)
        operation(history)
    history.check()
    history.check_erased(history.disk)
    if number % 3 == 0:
        history.check_files()


# ── damage ────────────────────────────────────────────────────────────────────────────────────


class Harm(NamedTuple):
    """One flipped bit, or one lost file."""

    path: str
    is_lost: bool
    pos: int = 0
    bit: int = 0

    def apply(self, disk: SimDisk, store: SimStore) -> None:
        key = self.path.removeprefix("store:")
        if key == self.path and self.is_lost:
            disk.remove(self.path)
            disk.sync_dir(self.path.rpartition("/")[0])
        elif key == self.path:
            disk.flip_bit(self.path, self.pos, self.bit)
        elif self.is_lost:
            store.lose(key)
        else:
            store.damage(key, self.pos)


def harms(history: StorageHistory, disk: SimDisk, count: int) -> Iterator[Harm]:
    """Some of each: files of the directory, objects of the cold store, files of the backup."""
    random, files = history.random, {path: data for path, data in disk.tree().items() if data.strip(b"\0")}
    hot = [path for path in files if path.startswith(f"{history.path}/") and not path.endswith("LOCK")]
    kept = [path for path in files if path.startswith(f"{history.target}/")]
    cold = [f"store:{key}" for key in history.store.objects]
    contents = files | {f"store:{key}": data for key, data in history.store.objects.items()}
    for paths in (hot, hot, cold, kept):
        for path in random.sample(paths, min(count, len(paths))):
            used = len(contents[path].rstrip(b"\0"))
            yield Harm(path, random.random() < 0.4, random.randrange(used), random.randrange(8))


def judge_harm(history: StorageHistory, base: SimDisk, harm: Harm) -> str:
    """Open a damaged copy, read everything, go on, and restore every backup. Returns what came of it."""
    disk, store = base.reboot(), SimStore(history.store.address)
    store.objects = dict(history.store.objects)
    harm.apply(disk, store)
    reported = bool(find_any(lambda: history.find_damage(disk.reboot(), history.path, store)))
    outcome = judge_backups(history, disk)
    try:
        log = history.open(disk, cold_store=store)
    except Error:
        reported = True
        try:
            log = history.open(disk, cold_store=store, accept_loss=True)
        except Error:
            return "refused"
    reported |= not log.report.clean
    for name, kept in history.topics.items():
        found, failed = read_damaged(log, name)
        reported |= failed or not log.health().ok
        expected = kept.now.aged(history.now_ms).rows
        wrong = {seq for seq, each in found.items() if each not in kept.written.get(seq, ())}
        assert not wrong, f"{name}: {sorted(wrong)} are not what was written: {[found[seq] for seq in wrong]}"
        assert reported or found == expected, f"{name}: {sorted(found.keys() ^ expected.keys())}, not reported"
        with suppress(Error):
            first = log.topic(name, create=False).append(b"after the damage").first_seq
            assert first > kept.now.head, f"{name}: seq {first} is given again"
    with suppress(Error):
        log.close()
    return "reported" if reported else outcome


def judge_backups(history: StorageHistory, disk: SimDisk) -> str:
    outcome = "harmless"
    for taken in history.backups:
        copy = disk.reboot()
        problems = find_any(partial(find_problems, history.target, taken.id, copy))
        try:
            restore_backup(history.target, "restored", backup_id=taken.id, disk=copy, random_bytes=history.random_bytes)
        except Error:
            assert problems, "a backup that verifies is not restored"
            outcome = "backup refused"
            continue
        log = history.open(copy, "restored", clock=ManualClock(taken.now_ms * 1000), cold_store=SimStore())
        history.check_restored(log, taken)
        log.close()
    return outcome


def find_problems(target: str, backup_id: str, disk: SimDisk) -> list[str]:
    return verify_backup(target, backup_id, disk=disk).problems


def find_any(look: Callable[[], list[Any]]) -> list[Any]:
    """What a check finds; its error, where it raises one."""
    try:
        return look()
    except Error as error:
        return [error]


def read_damaged(log: Engine, name: str) -> tuple[dict[int, Row], bool]:
    """Every record that can be read, and whether some could not."""
    try:
        topic = log.topic(name, create=False)
        return rows_of(list(topic.read(0, 10_000).records)), False
    except Error:
        pass
    rows: dict[int, Row] = {}
    topic_or_none, cursor = log.find(name), 0
    while topic_or_none is not None and cursor < topic_or_none.head_seq:
        cursor += 1
        with suppress(Error):
            rows |= rows_of(list(topic_or_none.read(cursor - 1, 1).records))
    return rows, True


def run_damaged(seed: int, steps: int, count: int) -> list[str]:
    """Run a history and judge damage at its end."""
    with pytest.MonkeyPatch.context() as patch:
        small_limits(patch)
        history = run(seed, steps)
        history.backup()
        history.check()
        if history.random.random() < 0.5:
            history.reopen()
        else:
            history.log.tick()
            history.tick()
        history.check()
        base, outcomes = history.disk.reboot(), []
        for harm in harms(history, base, count):
            try:
                outcomes.append(judge_harm(history, base, harm))
            except Exception as error:
                error.add_note(f"seed {seed}, {harm}, after {' '.join(history.trace)}")
                raise
        return outcomes


@pytest.mark.parametrize("seed", range(6 * SEED, 6 * SEED + 6))
def test_any_interleaving_leaves_what_the_model_has(seed: int) -> None:
    run(seed, 40)


@pytest.mark.parametrize("seed", range(500 + 3 * SEED, 503 + 3 * SEED))
def test_damage_at_the_end_is_reported_refused_or_harmless(seed: int) -> None:
    assert "reported" in run_damaged(seed, 30, 3)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(2_000, 2_200))
def test_damage_after_long_histories_is_reported_refused_or_harmless(seed: int) -> None:
    assert "reported" in run_damaged(seed, 80, 20)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1_000, 1_400))
def test_long_interleavings_leave_what_the_model_has(seed: int) -> None:
    run(seed, 150)
