"""Topics against dicts: any order of verbs, faults, crashes and restarts gives what the dicts give.

A topic is a list of states, one for each thing that was done to it. It shares no code with the engine.

    created ── +1,2 ── config ── −1 ── +3 ┄┄ in doubt
               │                 │
               hard              now

The running engine shows `now`. After a power cut a topic is one of its states from `hard` on, after a
kill it is `now` where its class promises that; what is in doubt counts or does not. What is hard was
synced. Ephemeral topics keep their config and no record.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.unit.engine.harness import TopicContents, check_page, read_topic

import tidelog
from tidelog.database import engine_of
from tidelog.engine import Engine, Record, Topic
from tidelog.errors import Error, TooLarge, TopicFull
from tidelog.testing import ManualClock, SimDisk

PATH: Final = "data"
TINY: Final[dict[str, Any]] = {
    "wal_file_bytes": 1024,
    "segment_events_max": 4,
    "segment_bytes_max": 600,
    "head_reserve": 3,
    "tags_cache_bytes": 4_000,
    "maps_max": 2,
}
FAULTS_MAX: Final = 3
WINDOW_MS: Final = 1_000


class Row(NamedTuple):
    ts_ms: int
    data: str  # as text, so that 1 is not True and b"1" is neither
    tag: str | None
    node: str | None
    meta: str
    size: int


def row(ts_ms: int, data: object, tag: str | None, node: str | None, meta: object) -> Row:
    headers = "" if meta is None else _json(meta)
    size = len(data) if isinstance(data, bytes) else len(_json(data).encode())
    return Row(ts_ms, repr(data), tag, node, headers, size + len(headers.encode()))


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def row_of(record: Record) -> Row:
    return row(record.ts_ms, record.data, record.tag, record.node, record.meta)


def born(name: str) -> dict[str, Any]:
    """The config that a topic is made with."""
    durability = "ephemeral" if name == "e" else "disk"
    limits = {"cap_records": 0, "cap_bytes": 0, "ttl_ms": 0, "discard": "old"}
    return {"durability": durability, "idempotency_window_ms": WINDOW_MS, **limits}


@dataclass(frozen=True)
class State:
    config: Mapping[str, Any]
    rows: Mapping[int, Row] = field(default_factory=dict)
    head: int = 0
    cap: int = 0  # the highest seq lost to a cap
    ttl: int = 0  # and to age
    stamp: int = 0

    @property
    def floor(self) -> int:
        return max(self.cap, self.ttl) + 1

    @property
    def durability(self) -> str:
        return str(self.config["durability"])

    def aged(self, now_ms: int) -> State:
        ttl = self.config["ttl_ms"]
        old = [seq for seq, kept in self.rows.items() if ttl and now_ms - kept.ts_ms > ttl]
        return self.lost(ttl=max(old)) if old else self

    def capped(self) -> State:
        seqs, size, last = sorted(self.rows), sum(kept.size for kept in self.rows.values()), 0
        cap, cap_bytes = self.config["cap_records"], self.config["cap_bytes"]
        while seqs and ((cap and len(seqs) > cap) or (cap_bytes and size > cap_bytes)):
            last = seqs.pop(0)
            size -= self.rows[last].size
        return self.lost(cap=last) if last else self

    def lost(self, *, cap: int = 0, ttl: int = 0) -> State:
        after = replace(self, cap=max(self.cap, cap), ttl=max(self.ttl, ttl))
        return replace(after, rows={seq: kept for seq, kept in self.rows.items() if seq >= after.floor})

    def grown(self, first: int, batch: list[Row]) -> State:
        rows = {**self.rows, **dict(enumerate(batch, first))}
        return replace(self, rows=rows, head=first + len(batch) - 1, stamp=batch[-1].ts_ms).capped()

    def without(self, seqs: Iterable[int]) -> State:
        gone = set(seqs)
        return replace(self, rows={seq: kept for seq, kept in self.rows.items() if seq not in gone})

    def configured(self, fields: Mapping[str, Any]) -> State:
        return replace(self, config={**self.config, **fields}).capped()

    def reason(self) -> str | None:
        return "mixed" if self.cap and self.ttl else "cap" if self.cap else "ttl" if self.ttl else None


@dataclass
class Life:
    """A topic from its creation to its drop."""

    id: int
    states: list[State]
    hard: int = 0
    doubt: State | None = None  # a write or a change of which nobody was told what became
    dropping: bool = False  # so with its drop
    top: int = 0  # the highest seq that was promised to one record
    shown: int = 1  # the highest evict floor that a reader was promised
    reserves: bool = False  # was of class disk: seqs may have been set aside
    tried: int = 0  # the latest time of a write that failed, or that an ephemeral topic has lost
    keys: dict[str, tuple[range, int]] = field(default_factory=dict)

    @property
    def now(self) -> State:
        return self.states[-1]

    @property
    def promises(self) -> bool:
        return self.now.durability in ("disk", "fsync")

    def become(self, state: State) -> None:
        self.states.append(state)
        self.reserves |= state.durability == "disk"
        if self.promises:
            self.top = max(self.top, state.head)
        if state.durability == "fsync":
            self.harden()

    def harden(self) -> None:
        self.hard = len(self.states) - 1


def same(state: State, found: TopicContents) -> bool:
    rows = {record.seq: row_of(record) for record in found.records}
    return state.rows == rows and state.floor <= found.evict_floor


def marks(found: TopicContents) -> dict[str, int]:
    """How far records were lost, and to what, as a reader is told it."""
    if found.gap is None:
        return {}
    causes = ("cap", "ttl") if found.gap.reason == "mixed" else (found.gap.reason,)
    return dict.fromkeys(causes, found.evict_floor - 1)


# What is drawn ------------------------------------------------------------------------------------------

names = st.sampled_from(["a", "b", "e"])
tags = st.sampled_from([None, "x", "x:1", "x:2", "y"])
datas = st.binary(max_size=30) | st.integers(0, 99) | st.sampled_from(["ä", None, True, {"k": [1, None]}])
records = st.tuples(datas, tags, st.sampled_from([None, "n1", "n2"]), st.sampled_from([None, None, {"m": 1}, {}]))
selectors = st.one_of(
    st.builds(lambda seqs: {"seqs": seqs}, st.lists(st.integers(1, 40), min_size=1, max_size=5)),
    st.builds(lambda seq: {"before_seq": seq}, st.integers(0, 40)),
    st.builds(lambda match: {"match": match}, st.sampled_from(["x", "x:1", "x:*", "x*", "*", "y"])),
    st.builds(
        lambda match, seq: {"match": match, "before_seq": seq}, st.sampled_from(["x*", "y", "*"]), st.integers(0, 40)
    ),
)
limits = st.one_of(
    st.builds(lambda cap: {"cap_records": cap}, st.integers(0, 6)),
    st.builds(lambda cap: {"cap_bytes": cap}, st.sampled_from([0, 40, 90])),
    st.builds(lambda ttl: {"ttl_ms": ttl}, st.sampled_from([0, 50, 200])),
    st.builds(lambda discard: {"discard": discard}, st.sampled_from(["old", "reject"])),
)
classes = st.sampled_from(["memory", "disk", "fsync"])
shards = st.integers(1, 4)


def meant(seq: int, kept: Row, said: Mapping[str, Any]) -> bool:
    """Whether a delete in these words takes this record."""
    match, tag = said.get("match"), kept.tag
    if match is not None and match.endswith("*"):
        matched = tag is not None and tag.startswith(match[:-1])
    else:
        matched = match is None or tag == match
    return matched and seq < said.get("before_seq", 1 << 60) and seq in said.get("seqs", (seq,))


class TopicsMachine(RuleBasedStateMachine):
    starts = 0

    @initialize(count=shards)
    def begin(self, count: int) -> None:
        self.disk, self.clock = SimDisk(), ManualClock()
        self.lives: dict[str, Life] = {}
        self.ids: set[int] = set()
        self.maybe: set[str] = set()  # names whose creation is in doubt
        self.faults = 0
        self.faulty = False  # since the last restart
        self.checkpointed: dict[str, int] = {}
        self.open(count)

    def open(self, count: int) -> None:
        self.starts += 1
        self.log: Engine = engine_of(
            tidelog.open(PATH, disk=self.disk, clock=self.clock, threads=False, wal_shards=count, **TINY)
        )
        self.faulty = False

    @property
    def now_ms(self) -> int:
        return self.clock.now_us() // 1000

    def attempt(self, call: Callable[[], Any], doubt: Callable[[], None] = lambda: None) -> Any:
        """What a call returns; None where it failed, which only a disk that was told to fail excuses."""
        try:
            return call()
        except Error as error:
            if not self.faulty:
                raise
            if error.written is not False:
                doubt()
            return None

    def life(self, name: str) -> Life | None:
        """The topic of this name, made where there is none; None where that is not to be had."""
        known = self.lives.get(name)
        if known is not None:
            return None if known.dropping else known
        if name in self.maybe:
            return None
        config = born(name)
        topic = self.attempt(lambda: self.log.topic(name, **config), lambda: self.maybe.add(name))
        if topic is None:
            return None
        assert topic.id not in self.ids, "an id is given once"
        self.ids.add(topic.id)
        self.lives[name] = Life(topic.id, [State(config)], reserves=name != "e")
        return self.lives[name]

    def topic(self, name: str) -> Topic:
        return self.log.topic(name, create=False)

    # Writing.

    @rule(name=names, batch=st.lists(records, min_size=1, max_size=5), key=st.sampled_from([None, None, None, "k"]))
    def append(self, name: str, batch: list[tuple[Any, Any, Any, Any]], key: str | None) -> None:
        life = self.life(name)
        if life is None:
            return
        # Keys outlive restarts (tests/crash/topics/idempotency_keys.py); here each start has its own.
        key = key and f"{key} of start {self.starts}"
        state, stamp = life.now, max(self.now_ms, life.now.stamp, life.tried)
        data, tag, node, meta = (list(column) for column in zip(*batch, strict=True))
        rows = [row(stamp, *values) for values in batch]

        def call() -> Any:
            return self.topic(name).append(data, tag=tag, node=node, meta=meta, key=key)

        known = life.keys.get(key or "")
        if known is not None and self.clock.monotonic_ms() - known[1] <= WINDOW_MS:
            done = self.attempt(call)
            assert done is None or (done.deduped, done.seqs) == (True, known[0])
            return
        refusal = self.refusal(state, rows)
        if refusal is not None and not self.faulty:
            with pytest.raises(refusal):
                call()
            return
        if refusal is not None:
            with pytest.raises(Error):
                call()
            return
        first = state.head + 1
        done = self.attempt(call, lambda: setattr(life, "doubt", state.grown(first, rows)))
        if done is None:
            life.tried = stamp
            return
        assert life.doubt is None or name == "e", "nothing is written behind a write whose fate nobody knows"
        assert not done.deduped
        assert done.count == len(batch)
        assert done.first_seq > max(state.head, life.top), "a seq is given once"
        assert done.first_seq == state.head + 1 or self.faults or life.reserves
        kept = self.topic(name).read(done.first_seq - 1, 1).records
        if kept and kept[0].seq in done.seqs:
            ts_ms = kept[0].ts_ms
            assert max(self.now_ms, state.stamp) <= ts_ms <= stamp, "times do not fall"
            rows = [each._replace(ts_ms=ts_ms) for each in rows]
        life.become(state.grown(done.first_seq, rows))
        if key is not None:
            life.keys[key] = done.seqs, self.clock.monotonic_ms()
        self.clock.tick(1)

    @rule(name=names, batch=st.lists(records, min_size=1, max_size=4))
    def append_one_by_one(self, name: str, batch: list[tuple[Any, Any, Any, Any]]) -> None:
        for record in batch:
            self.append(name, [record], None)

    @rule(name=names, batch=st.lists(records, min_size=1, max_size=4), seed=st.integers(0, 1 << 32), count=shards)
    def append_and_crash(self, name: str, batch: list[tuple[Any, Any, Any, Any]], seed: int, count: int) -> None:
        self.append_one_by_one(name, batch)
        self.crash(seed, count)

    @staticmethod
    def refusal(state: State, rows: list[Row]) -> type[Error] | None:
        if state.config["discard"] != "reject":
            return None
        held = sum(kept.size for kept in state.rows.values())
        more = sum(kept.size for kept in rows)
        for cap, have, add in (
            (state.config["cap_records"], len(state.rows), len(rows)),
            (state.config["cap_bytes"], held, more),
        ):
            if cap and add > cap:
                return TooLarge
            if cap and have + add > cap:
                return TopicFull
        return None

    @rule(name=names, said=selectors)
    def delete(self, name: str, said: dict[str, Any]) -> None:
        life = self.life(name)
        if life is None:
            return
        gone = [seq for seq, kept in life.now.rows.items() if meant(seq, kept, said)]
        after = life.now.without(gone)
        done = self.attempt(lambda: self.topic(name).delete(**said), lambda: setattr(life, "doubt", after))
        if done is not None:
            assert (done.deleted, done.count) == (len(gone), len(after.rows))
            life.become(after)

    @rule(name=names, fields=limits)
    def configure(self, name: str, fields: dict[str, Any]) -> None:
        life = self.life(name)
        if life is None:
            return
        after = life.now.configured(fields)
        if after.config == life.now.config:
            self.log.topic(name, create=False, **fields)  # nothing to log, nothing to fail
            return
        doubt: Callable[[], None] = lambda: setattr(life, "doubt", after)  # noqa: E731
        if self.attempt(lambda: self.log.topic(name, create=False, **fields), doubt) is not None:
            life.become(after)
            life.harden()

    @rule(name=st.sampled_from(["a", "b"]), durability=classes)
    def change_class(self, name: str, durability: str) -> None:
        self.configure(name, {"durability": durability})

    @rule(name=names)
    def drop(self, name: str) -> None:
        life = self.lives.get(name)
        if life is None or life.dropping:
            return
        if self.attempt(lambda: self.log.drop(name), lambda: setattr(life, "dropping", True)) is not None:
            del self.lives[name]
            self.checkpointed.pop(name, None)

    @rule(name=names)
    def seal(self, name: str) -> None:
        if name in self.lives and not self.lives[name].dropping:
            self.topic(name).seal()

    @rule()
    def checkpoint(self) -> None:
        if self.attempt(lambda: (self.log.checkpoint(),)) is not None:  # type: ignore[func-returns-value]
            self.harden()

    @rule()
    def tick(self) -> None:
        # A latched shard has nothing to sync any more, and says so to its writers only.
        if self.attempt(lambda: (self.log.tick(),)) is not None and not self.faulty:  # type: ignore[func-returns-value]
            for life in self.lives.values():
                life.harden()

    @rule(count=shards)
    def let_the_wal_forget(self, count: int) -> None:
        """New files, and checkpoints until the old ones are gone: what was deleted is in vectors only."""
        for _ in range(2):
            self.reopen(count)
            self.checkpoint()

    def harden(self) -> None:
        for name, life in self.lives.items():
            life.harden()
            self.checkpointed[name] = life.now.head

    # Time and trouble.

    @rule(ms=st.sampled_from([1, 49, 50, 51, 200, 2_000]))
    def wait(self, ms: int) -> None:
        self.clock.tick(ms)

    @rule(ms=st.sampled_from([-3_600_000, -100, 3_600_000]))
    def jump(self, ms: int) -> None:
        self.clock.set_us(self.clock.now_us() + ms * 1000)

    @precondition(lambda self: self.faults < FAULTS_MAX)
    @rule(
        kind=st.sampled_from(["full", "full", "write", "sync"]),
        mode=st.sampled_from(["dropped", "reverted", "kept"]),
        at=st.integers(1, 5),
        partial=st.sampled_from([0, 30]),
    )
    def inject(self, kind: str, mode: Any, at: int, partial: int) -> None:
        self.faults += 1
        self.faulty = True
        if kind == "sync":
            self.disk.fail_sync(mode, at=at)
        else:
            self.disk.fail("write", at=at, error=errno.ENOSPC if kind == "full" else errno.EIO, partial=partial)

    # Restarts.

    @rule(count=shards)
    def reopen(self, count: int) -> None:
        try:
            self.log.close()
        except Error:
            if not self.faulty:
                raise
            self.disk.clear_faults()
            self.restart(self.disk.reboot(), count, cut=True)
            return
        if any(life.doubt is not None or life.dropping for life in self.lives.values()) or self.maybe or self.faulty:
            self.disk.clear_faults()
            self.restart(self.disk, count, cut=True)
        else:
            self.harden()
            self.restart(self.disk, count, cut=False, clean=True)
            assert not self.log.report.damage

    @rule(count=shards)
    def kill(self, count: int) -> None:
        # After a failed sync the page cache itself may have lost something.
        self.restart(self.disk.reboot(), count, cut=self.faulty)

    @rule(seed=st.integers(0, 1 << 32), count=shards)
    def crash(self, seed: int, count: int) -> None:
        self.restart(self.disk.crash_image(Random(seed)), count, cut=True)

    def restart(self, disk: SimDisk, count: int, *, cut: bool, clean: bool = False) -> None:
        self.disk = disk
        self.open(count)
        found = {state.topic: state for state in self.log.topics()}
        for name in set(found) - set(self.lives):
            assert name in self.maybe, f"{name} was dropped or never made"
            assert found[name].id not in self.ids
            self.ids.add(found[name].id)
            self.lives[name] = Life(found[name].id, [State(born(name))], reserves=name != "e")
        self.maybe.clear()
        for name, life in list(self.lives.items()):
            if name not in found:
                assert life.dropping, f"{name} is gone"
                del self.lives[name]
                continue
            assert found[name].id == life.id
            self.settle(name, life, cut=cut, clean=clean)

    def settle(self, name: str, life: Life, *, cut: bool, clean: bool) -> None:
        """Find out which of its states a topic is in, and go on from there."""
        seen = read_topic(self.topic(name))
        config = self.topic(name).config
        if name == "e":
            assert seen.records == []
            assert seen.head_seq >= self.checkpointed.get(name, 0)
            assert not clean or seen.head_seq == life.now.head
            said = {field: getattr(config, field) for field in life.now.config}
            assert said in (life.now.config, life.doubt.config if life.doubt else None)
            life.tried = max(life.now.stamp, life.tried)
            life.states = [State(said, {}, seen.head_seq, **marks(seen))]
            life.shown, life.top, life.keys = 1, 0, {}
            life.hard, life.doubt, life.dropping = 0, None, False
            return
        first = life.hard if cut or not life.promises else len(life.states) - 1
        candidates = life.states[first:]
        times: dict[int, int] = {}
        if life.doubt is not None:
            times = {record.seq: record.ts_ms for record in seen.records if record.seq > life.now.head}
            rows = {seq: kept._replace(ts_ms=times.get(seq, kept.ts_ms)) for seq, kept in life.doubt.rows.items()}
            candidates.append(replace(life.doubt, rows=rows))
        if life.doubt is not None and seen.records and seen.records[-1].seq > life.doubt.head:
            # The seqs of a failed write before it may have been passed over.
            ahead = seen.records[-1].seq - life.doubt.head
            rows = {
                seq + ahead: kept._replace(ts_ms=times.get(seq + ahead, kept.ts_ms))
                for seq, kept in life.doubt.rows.items()
                if seq > life.now.head
            }
            rows |= {seq: kept for seq, kept in life.doubt.rows.items() if seq <= life.now.head}
            candidates.append(replace(life.doubt, rows=rows, head=life.doubt.head + ahead))
        for number in range(len(candidates) - 1, -1, -1):
            state = candidates[number].aged(self.now_ms)
            said = {field: getattr(config, field) for field in state.config}
            if same(state, seen) and said == state.config:
                break
        else:
            raise AssertionError(f"{name} is in none of {len(candidates)} states: {seen}; the last: {candidates[-1]}")
        assert seen.head_seq >= max(state.head, life.top), "an acked seq is never given again"
        most = max(each.head for each in [*life.states, *candidates])
        assert life.reserves or self.faults or seen.head_seq <= most
        assert seen.evict_floor >= (life.shown if life.promises else 1), "a floor that was shown does not fall"
        if seen.evict_floor > state.floor:
            state = state.lost(**marks(seen))
        state = replace(state, head=seen.head_seq)
        life.states, life.hard, life.doubt, life.dropping, life.keys, life.tried = [state], 0, None, False, {}, 0
        if life.promises:
            life.top = max([life.top, *state.rows])
        else:
            life.shown, life.top = 1, 0
        if not cut and not clean and state.durability != "fsync":
            # Found in a page cache: another power cut may still take it.
            life.states, life.hard = [*candidates[:number], state], 0

    # Looking.

    @invariant()
    def shows_what_the_dicts_hold(self) -> None:
        if not hasattr(self, "log"):
            return
        assert {state.topic for state in self.log.topics()} == set(self.lives)
        for name, life in self.lives.items():
            seen, aged = read_topic(self.topic(name), 3), life.now.aged(self.now_ms)
            if self.faulty and aged is not life.now and same(life.now, seen) and not same(aged, seen):
                # The floor of age could not be made durable, so nothing went.
                if life.doubt is None:
                    life.doubt = aged
                continue
            assert same(aged, seen), f"{name}: {seen}; expected {aged}"
            assert seen.head_seq == aged.head
            assert seen.evict_floor == aged.floor
            assert (seen.gap.reason if seen.gap else None) == aged.reason()
            if aged is not life.now:
                if life.doubt == aged:
                    life.doubt = None
                life.become(aged)
            if life.promises:
                life.shown = max(life.shown, seen.evict_floor)

    @rule(name=names, at=st.floats(0, 1.2), limit=st.integers(1, 5), node=st.sampled_from([None, "n1", ["n1", "n2"]]))
    def read_a_page(self, name: str, at: float, limit: int, node: Any) -> None:
        life = self.lives.get(name)
        if life is None or life.dropping:
            return
        topic = self.topic(name)
        cursor = int(at * topic.head_seq)
        page = topic.read(cursor, limit, node=node)
        check_page(page, cursor)
        begin = 0 if cursor > topic.head_seq else cursor
        hidden = {node} if isinstance(node, str) else set(node or ())
        rows = life.now.aged(self.now_ms).rows if not self.faulty else None
        if rows is not None:
            inside = [seq for seq in sorted(rows) if begin < seq <= page.next_from_seq]
            shown = [seq for seq in inside if rows[seq].node not in hidden]
            assert [record.seq for record in page.records] == shown
            assert page.counts.filtered == len(inside) - len(shown)

    @rule()
    def read_beside(self) -> None:
        """Another process sees what the writer shows, apart from what is only now too old."""
        reader = tidelog.open(PATH, disk=self.disk, clock=self.clock, read_only=True)
        for name, life in self.lives.items():
            if name == "e" or self.faulty:
                continue
            there = {record.seq: row_of(record) for record in reader.topic(name).read(0, 1000).records}
            assert there == life.now.rows
        reader.close()

    @rule(name=names)
    def take_columns(self, name: str) -> None:
        if name in self.lives and not self.lives[name].dropping:
            table, topic = self.topic(name).to_arrow(), self.topic(name)
            assert table["seq"].to_pylist() == [record.seq for record in topic.read(0, 1000).records]

    def teardown(self) -> None:
        with suppress(AttributeError, Error):
            self.log.close()


def run(examples: int, steps: int, *, derandomize: bool) -> None:
    run_state_machine_as_test(
        TopicsMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=derandomize,
            database=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("examples", [24, pytest.param(120, marks=pytest.mark.sweep)])
def test_topics_are_dicts_that_survive(examples: int) -> None:
    """G1–G10, G12, G41, G47, G49, G59, G60, G70–G73, G77–G80, G85, G86, E5, E8."""
    run(examples, 40, derandomize=True)


@pytest.mark.sweep
def test_topics_are_dicts_that_survive_for_long() -> None:
    """The same for much longer, and with other choices each time; a failure prints how to see it again."""
    run(4_000, 80, derandomize=False)
