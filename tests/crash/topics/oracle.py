"""What a crashed engine may and must hold. Shares no code with the engine it judges.

A topic is a list of states: every write, delete and change of its config adds one.

    created ── +1,2 ── +3 ── −1 ── config ── +4..8 ┄┄ in flight
                                   │         │
                                   hard      acked

After a power cut the topic is exactly one of its states from `hard` on, after a kill exactly one
from `acked` on, and what is in flight counts or does not. So a batch is whole or absent, what was
acked is there, what was deleted stays away, and what survives of a topic of class `disk` is a
prefix: each of these is a state that is not in the list.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple


class Row(NamedTuple):
    """A record as a reader must see it, values as text so that 1 is not True."""

    ts_ms: int
    data: bytes
    tag: str | None
    node: str | None
    meta: bytes
    size: int


def row(ts_ms: int, data: object, tag: str | None, node: str | None, meta: object) -> Row:
    text = data if isinstance(data, bytes) else _json(data)
    headers = b"" if meta is None else _json(meta)
    mark = b"bytes " if isinstance(data, bytes) else b"json "
    return Row(ts_ms, mark + text, tag, node, headers, len(text) + len(headers))


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class TopicView(NamedTuple):
    """One topic as an engine shows it."""

    id: int
    config: Mapping[str, object]
    head: int
    earliest: int
    floor: int
    live: int
    size: int
    rows: dict[int, Row] | None  # None: only the figures were looked at


@dataclass(frozen=True, slots=True)
class State:
    """A topic between two operations. Nothing in it ever changes; an operation makes the next one."""

    config: Mapping[str, object]
    rows: Mapping[int, Row] = field(default_factory=dict)
    head: int = 0
    floor: int = 1  # the first seq that was not lost to a cap or to age
    last_ts: int = 0

    @property
    def durability(self) -> str:
        return str(self.config.get("durability", "disk"))

    @property
    def size(self) -> int:
        return sum(kept.size for kept in self.rows.values())

    def number(self, name: str) -> int:
        value = self.config.get(name, 0)
        assert isinstance(value, int)
        return value

    def configured(self, fields: Mapping[str, object]) -> State:
        """Caps follow from the records at once; age is another matter, and is seen when somebody looks."""
        return replace(self, config={**self.config, **fields}).retained(None)

    def appended(self, first: int, batch: Sequence[Row], now_ms: int) -> State:
        rows = {**self.rows, **dict(enumerate(batch, first))}
        last = first + len(batch) - 1
        return replace(self, rows=rows, head=last, last_ts=batch[-1].ts_ms).retained(now_ms)

    def without(self, seqs: Iterable[int]) -> State:
        gone = set(seqs)
        return replace(self, rows={seq: kept for seq, kept in self.rows.items() if seq not in gone})

    def retained(self, now_ms: int | None) -> State:
        """This state once its age and its caps were looked at: the oldest go until it is within all of them.
        None: only its caps were."""
        ttl, cap, cap_bytes = (self.number(name) for name in ("ttl_ms", "cap_records", "cap_bytes"))
        count, size, floor = len(self.rows), self.size, self.floor
        for seq in sorted(self.rows):
            kept = self.rows[seq]
            expired = ttl and now_ms is not None and now_ms - kept.ts_ms > ttl
            if not expired and not (cap and count > cap) and not (cap_bytes and size > cap_bytes):
                break
            count, size, floor = count - 1, size - kept.size, seq + 1
        return self.raised(floor)

    def raised(self, floor: int) -> State:
        """This state where everything below `floor` is known to be lost."""
        if floor <= self.floor:
            return self
        return replace(self, floor=floor, rows={seq: kept for seq, kept in self.rows.items() if seq >= floor})

    def selected(self, before_seq: int | None, match: str | None, seqs: Sequence[int] | None) -> list[int]:
        """The seqs that a delete with these words takes."""
        found = []
        for seq, kept in self.rows.items():
            tag = kept.tag
            if match is not None and match.endswith("*"):
                matched = tag is not None and tag.startswith(match[:-1])
            else:
                matched = match is None or tag == match
            below = before_seq is None or seq < before_seq
            if matched and below and (seqs is None or seq in seqs):
                found.append(seq)
        return found


@dataclass(slots=True)
class TopicLife:
    """One topic from its creation to its drop. A name may lead several, one after the other."""

    name: str
    states: list[State]
    id: int | None = None  # None while it is being created
    synced_index: int = 0
    acked: int = 0
    in_flight: State | list[Row] | None = None  # a write's first seq is the engine's choice, so its rows are kept
    dropping: bool = False
    forgotten: bool = False  # a failed sync took from the page cache what was not durable: any restart is a power cut
    top: int = 0  # the highest seq that was promised to one record for good
    bottom: int = 1  # the highest evict floor that a reader was shown and no power cut may take back
    stamp: int = 0  # the time of its last record, as the running engine knows it

    @property
    def now(self) -> State:
        return self.states[-1]

    @property
    def promises(self) -> bool:
        """Whether an ack of its class means anything after a restart."""
        return self.now.durability in ("fsync", "disk")

    def ack(self, state: State, *, hard: bool) -> None:
        """An operation returned: this is the topic now."""
        self.states.append(state)
        self.in_flight = None
        if self.promises:
            self.acked, self.top = len(self.states) - 1, max(self.top, state.head)
        if hard:
            self.mark_synced()

    def mark_synced(self) -> None:
        """All that was acked has been synced."""
        self.synced_index = self.acked = len(self.states) - 1
        self.on_floor_shown(self.now.floor)

    def on_floor_shown(self, floor: int) -> None:
        """A reader was told that everything below is lost."""
        if self.promises:
            self.bottom = max(self.bottom, floor)

    def check(self, seen: TopicView, now_ms: int, *, cut: bool) -> list[State] | str:
        """The states up to the one that this is, which comes last and as it was found; or what is wrong with it."""
        if self.id is not None and seen.id != self.id:
            return f"it has id {seen.id} and was created as {self.id}"
        if self.now.durability == "ephemeral":
            if seen.live or seen.head < self.top:
                return f"it is ephemeral and has {seen.live} records, its head is {seen.head}, {self.top} was kept"
            return [replace(self.now, rows={}, head=seen.head, floor=seen.floor)]
        wrongs: list[tuple[int, str]] = []
        candidates = self._candidates(seen, now_ms)
        numbers = range(len(candidates) - 1, -1 if cut or self.forgotten else self.acked - self.synced_index - 1, -1)
        for early, number in product((False, True), numbers):
            expected = candidates[number].retained(now_ms).raised(self.bottom)
            if early:
                expected = self._deleted_early(expected, seen, self.states[self.synced_index + number + 1 :])
            distance, wrong = self.differs(expected, seen)
            if wrong is None:
                return [*candidates[:number], replace(expected, head=seen.head, floor=seen.floor)]
            wrongs.append((distance, wrong))
        return min(wrongs)[1]

    def _deleted_early(self, expected: State, seen: TopicView, later: Sequence[State]) -> State:
        """A deletion may reach the disk before the writes ahead of it (G3: a prefix, apart from deletes)."""
        missing = set() if seen.rows is None else set(expected.rows) - set(seen.rows)
        return expected.without(seq for seq in missing if any(seq not in state.rows for state in later))

    def _candidates(self, seen: TopicView, now_ms: int) -> list[State]:
        found = self.states[self.synced_index :]
        if isinstance(self.in_flight, State):
            found.append(self.in_flight)
        elif self.in_flight is not None:
            assert seen.rows is not None, "a topic that is being written to is read"
            new = [seq for seq in seen.rows if seq > self.now.head]
            first = max(new) - len(self.in_flight) + 1 if new else self.now.head + 1
            if first > self.now.head:
                found.append(self.now.appended(first, self.in_flight, now_ms))
        return found

    def differs(self, expected: State, seen: TopicView) -> tuple[int, str | None]:
        """How far this is from what was expected, and the first thing that is wrong."""
        if seen.rows is None:
            figures = (seen.live, seen.size, seen.earliest)
            known = (len(expected.rows), expected.size, min(expected.rows, default=seen.head + 1))
            distance = abs(figures[0] - known[0])
            if figures != known:
                return (
                    distance,
                    f"count, bytes and earliest are {figures}, the records that should be there say {known}",
                )
        elif seen.rows != expected.rows:
            return _difference(expected.rows, seen.rows)
        if not expected.floor <= seen.floor <= seen.earliest:
            return 0, f"the evict floor is {seen.floor}, between {expected.floor} and {seen.earliest} was expected"
        if seen.head < max(expected.head, self.top):
            return 0, f"the head is {seen.head}, but {max(expected.head, self.top)} was handed out already"
        flying = len(self.in_flight) if isinstance(self.in_flight, list) else 0
        most = max(state.head for state in self.states) + flying
        reserved = self.top or any(state.durability == "disk" for state in self.states)
        if seen.head > most and not reserved:
            return 0, f"the head is {seen.head}, nobody was ever given more than {most}"
        for name, value in expected.config.items():
            if seen.config[name] != value:
                return 0, f"{name} is {seen.config[name]!r} and was set to {value!r}"
        return 0, None

    def continue_from(self, states: list[State], *, cut: bool) -> None:
        """A restart found the last of these states: what is not in it is over, and what readers of it saw stays.

        After a power cut all of it is on the disk. After a kill only a topic of class `fsync` must not show what a
        power cut could still take back.
        """
        cut, self.forgotten = cut or self.forgotten, False
        self.in_flight = None
        self.states = states
        self.stamp = self.now.last_ts
        self.synced_index, self.acked = 0, len(states) - 1
        if self.promises:
            self.top = max(self.top, max(self.now.rows, default=0))
        if cut or self.now.durability == "fsync":
            self.mark_synced()


def _difference(expected: Mapping[int, Row], seen: Mapping[int, Row]) -> tuple[int, str]:
    lost, extra = sorted(set(expected) - set(seen)), sorted(set(seen) - set(expected))
    other = [seq for seq, kept in seen.items() if seq in expected and expected[seq] != kept]
    distance = len(lost) + len(extra) + len(other)
    if other:
        return distance, f"seq {other[0]} reads {seen[other[0]]} and was {expected[other[0]]}"
    return distance, f"seqs {lost} are lost" if lost else f"seqs {extra} are there and should not be"


@dataclass(slots=True)
class Oracle:
    lives: dict[str, TopicLife] = field(default_factory=dict)
    ids: set[int] = field(default_factory=set)  # none of them is ever given again
    touched: set[str] = field(default_factory=set)  # topics that something was done to
    version: int = 0  # another one whenever another answer may be right

    def report_removals(self) -> None:
        self.version += 1

    def create(self, name: str, config: Mapping[str, object]) -> TopicLife:
        """Said before a topic is created: from now on it may be there."""
        assert name not in self.lives, f"{name} lives already"
        life = self.lives[name] = TopicLife(name, [State(config)])
        self.touched.add(name)
        self.report_removals()
        return life

    def created(self, name: str, topic_id: int) -> None:
        """Said after: from now on it must be."""
        self.lives[name].id = topic_id
        assert topic_id not in self.ids, f"id {topic_id} of {name} was given before"
        self.ids.add(topic_id)
        self.report_removals()

    def dropped(self, name: str) -> None:
        """Said after a drop: from now on it must be gone."""
        del self.lives[name]
        self.report_removals()

    def mark_synced(self, *, checkpoint: bool, but: Collection[str] = ()) -> None:
        """Said after all was synced `but` these topics. A checkpoint also keeps the head of what is in no WAL (G11)."""
        for name, life in self.lives.items():
            if life.in_flight is None and name not in but:
                life.mark_synced()
            if checkpoint and life.now.durability == "ephemeral":
                life.top = life.now.head
        self.report_removals()

    def check(self, found: Mapping[str, TopicView], now_ms: int, *, cut: bool = True) -> str | None:
        """What is wrong with these topics after a power cut (or, not `cut`, after a kill), or None."""
        for name, seen in found.items():
            life = self.lives.get(name)
            if life is None:
                return f"topic {name} is there, which was dropped or never created"
            if life.id is None and seen.id in self.ids:
                return f"topic {name} is new and has the id {seen.id} of another"
            states = life.check(seen, now_ms, cut=cut)
            if isinstance(states, str):
                return f"topic {name}: {states}"
        for name, life in self.lives.items():
            if name not in found and life.id is not None and not life.dropping:
                return f"topic {name} was created and is gone"
        return None

    def continue_from(self, found: Mapping[str, TopicView], now_ms: int, *, cut: bool) -> None:
        """Go on from what a restart found, which was judged before."""
        for name, life in list(self.lives.items()):
            if name not in found:
                del self.lives[name]
                continue
            states = life.check(found[name], now_ms, cut=cut)
            assert not isinstance(states, str), states
            life.continue_from(states, cut=cut)
            life.id, life.dropping = found[name].id, False
            self.ids.add(found[name].id)
        self.report_removals()
