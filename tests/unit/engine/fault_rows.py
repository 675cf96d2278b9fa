"""How each row of the fault matrix is provoked: what is done to which topics, and which of its calls are meant.

All of it happens on one small engine with two shards. `f` and `d` (and, where age matters, `old`)
lie on the first, `other` and the empty `far` on the second, so that one shard can fail and the other go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from tidelog.engine import Engine
from tidelog.errors import WriteFailed
from tidelog.testing import ManualClock, SimDisk

PATH: Final = "data"
SETTINGS: Final[dict[str, Any]] = {
    "wal_shards": 2,
    "wal_file_bytes": 4096,
    "segment_events_max": 6,
    "segment_bytes_max": 1024,
    "head_reserve": 4,
}
TTL_MS: Final = 5_000
BIG: Final = b"x" * 1_500  # three of them are more than a WAL file takes


class Step(NamedTuple):
    """One call that changed the disk."""

    call: str
    path: str
    size: int  # bytes of a write

    @classmethod
    def parse(cls, words: str) -> Step:
        call, path = words.split()[:2]
        if call != "write":
            return cls(call, path, 0)
        path, _, size = path.rpartition("+")
        return cls(call, path.rpartition("@")[0], int(size))


Act: TypeAlias = Callable[[Engine, ManualClock], object]
Picks: TypeAlias = Callable[[Sequence[Step]], Sequence[int]]  # of the steps of an act, those that a row is about


def nothing(log: Engine, clock: ManualClock) -> None:
    del log, clock


def everything(steps: Sequence[Step]) -> Sequence[int]:
    return range(len(steps))


def on(*paths: str, calls: str = "", most: int = 1 << 30) -> Picks:
    """Steps on paths that contain one of these, and of these kinds."""

    def picks(steps: Sequence[Step]) -> list[int]:
        return [
            number
            for number, step in enumerate(steps)
            if any(path in step.path for path in paths) and (not calls or step.call in calls.split())
        ][:most]

    return picks


def on_names_after(*paths: str, also: str = "") -> Picks:
    """Steps on these paths, and the sync of a directory that follows one of them; `also`: other calls below topics."""

    def picks(steps: Sequence[Step]) -> list[int]:
        found = []
        for number, step in enumerate(steps):
            before = steps[number - 1].path if number else ""
            syncs = step.call == "sync_dir" and any(path in before for path in paths)
            mine = any(path in step.path for path in paths)
            if mine or syncs or (step.call in also.split() and step.path.startswith(f"{PATH}/topics")):
                found.append(number)
        return found

    return picks


def _swapped(steps: Sequence[Step]) -> int:
    """The number of the step with which a new snapshot is durable: the one after its rename."""
    renamed = next(number for number, step in enumerate(steps) if step.call == "rename" and "/meta/" in step.path)
    assert steps[renamed + 1] == Step("sync_dir", f"{PATH}/meta", 0), "a snapshot's name is not synced"
    return renamed + 1


def in_snapshot(steps: Sequence[Step]) -> Sequence[int]:
    return [number for number in range(_swapped(steps) + 1) if f"{PATH}/meta" in steps[number].path]


def after_snapshot(steps: Sequence[Step]) -> Sequence[int]:
    return range(_swapped(steps) + 1, len(steps))


def in_data(steps: Sequence[Step]) -> Sequence[int]:
    """Data files, the directory of a new topic, and the names of new files; not what a seal does."""
    mine = on_names_after(".data", ".idx", also="mkdir")(steps)
    names = [number for number, step in enumerate(steps) if step == Step("sync_dir", f"{PATH}/topics", 0)]
    return sorted({*(number for number in mine if not steps[number].path.endswith(".idx")), *names})


def in_moving(steps: Sequence[Step]) -> Sequence[int]:
    """What an opening does after it created its first WAL file, except for removing an empty directory,
    which is optional."""
    made = next(number for number, step in enumerate(steps) if step.call == "reserve")
    return [
        number
        for number in range(made + 1, len(steps))
        if not any(step.call == "rmdir" and "/wal/" in step.path for step in steps[number - 1 : number + 1])
    ]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The stock is made, more is prepared, and the engine closed or killed. Then, as often as wanted: it is opened,
    led up to the moment, and something is done to it."""

    act: Act = nothing
    picks: Picks = everything
    lead: Act = nothing
    halfway: Act | None = None  # does a first part of the act, which may stay when the rest fails
    columns: str = ""  # only these; all, if empty
    prepare: Act = nothing
    spoil: Callable[[SimDisk], SimDisk] | None = None  # makes of a running engine's disk what is found
    opening: bool = False  # it is the opening that is looked at
    derived: bool = False  # copies what the WAL has: no client write depends on it
    settings: dict[str, Any] = field(default_factory=dict)

    def serves(self, column: str) -> bool:
        return not self.columns or column in self.columns.split()


# ── the stock ─────────────────────────────────────────────────────────────────────────────────────


def fill_engine(log: Engine) -> None:
    """Something in a segment that grows, something deleted, in every class that promises anything."""
    for name, durability in (("f", "fsync"), ("other", "fsync"), ("far", "disk"), ("d", "disk")):
        log.topic(name, durability=durability)
    for name in ("f", "other"):
        first = b"one of " + name[:1].encode()  # as long in both, and not the same
        log.topic(name).append([first, {"n": 2}, b"three"], tag=["x", "y", "x"], meta=[None, {"k": 1}, None])
    log.topic("d").append([b"alpha", b"beta"], tag="x")
    log.topic("f").delete(seqs=[2])
    log.checkpoint()
    for name in ("f", "other", "d"):
        log.topic(name).append([{"four": 4}, b"five"], tag=["x", "z"], node="n1")


def write_some(log: Engine, clock: ManualClock) -> None:
    """More for segments that grow, of which two are complete then; a topic that has no directory yet."""
    clock.tick(1)
    log.topic("f").append([b"six", b"seven"], tag=["x", "z"])
    log.topic("f").append([b"eight", b"nine", b"ten"])
    log.topic("d").append(b"gamma")
    log.topic("other").append({"six": 6})
    log.topic("fresh", durability="fsync").append([b"first", b"second"])


def seal_all(log: Engine, clock: ManualClock) -> None:
    del clock
    for state in log.topics():
        log.topic(state.topic).seal()


def checkpoint(log: Engine, clock: ManualClock) -> None:
    del clock
    log.checkpoint()


# ── T1 to T3, the WAL ─────────────────────────────────────────────────────────────────────────────


def reserve_some(log: Engine, clock: ManualClock) -> None:
    """From here on a write to `d` needs no sync: its seqs are on record."""
    del clock
    log.topic("d").append(b"reserves")


def append_disk(log: Engine, clock: ManualClock) -> None:
    del clock
    log.topic("d").append(b"gamma", tag="x")


def append_batch(log: Engine, clock: ManualClock) -> None:
    del clock
    log.topic("f").append([b"six", {"seven": 7}, b"eight"], tag=["x", "y", "z"])


def append_together(log: Engine, clock: ManualClock) -> None:
    """Two callers in one commit batch; when it breaks off half-way, the first one's frame is whole."""
    del clock
    tokens = [log.topic("f").append_nowait(b"six"), log.topic("d").append_nowait(b"gamma" * 60)]
    for token in tokens:
        token.wait()


def leave_unsynced(log: Engine, clock: ManualClock) -> None:
    reserve_some(log, clock)
    append_disk(log, clock)


def tick(log: Engine, clock: ManualClock) -> None:
    del clock
    log.tick()


def fill_the_file(log: Engine, clock: ManualClock) -> None:
    """The next big record goes into another file, and this one has something to sync before."""
    reserve_some(log, clock)
    for _ in range(2):
        log.topic("d").append(BIG)


def append_big(log: Engine, clock: ManualClock) -> None:
    del clock
    log.topic("f").append(BIG)


# ── T8, T11: what is removed ──────────────────────────────────────────────────────────────────────


def make_obsolete_files(log: Engine, clock: ManualClock) -> None:
    """A WAL file, a snapshot and a segment that the next checkpoint removes."""
    clock.tick(1)
    for _ in range(3):
        log.topic("f").append(BIG)
    log.topic("f").delete(before_seq=8)
    log.checkpoint()
    for _ in range(3):
        log.topic("f").append(BIG)


def make_old(log: Engine, clock: ManualClock) -> None:
    log.topic("old", durability="fsync", ttl_ms=TTL_MS).append([b"a", b"b", b"c"], tag="x")
    clock.tick(TTL_MS // 2)
    log.topic("old").append(b"d", tag="x")
    clock.tick(1)
    log.topic("old").append([b"e", b"f"])


def grow_old(log: Engine, clock: ManualClock) -> None:
    """The first three records of `old` are too old now."""
    del log
    clock.tick(TTL_MS // 2 + 1)


def read_old(log: Engine, clock: ManualClock) -> None:
    del clock
    log.topic("old").read()


def append_old(log: Engine, clock: ManualClock) -> None:
    del clock
    log.topic("old").append(b"young")


def expire_segments(log: Engine, clock: ManualClock) -> None:
    """Whole segments of `old` are below the floor, and a snapshot says so: the next checkpoint removes them."""
    clock.tick(3 * TTL_MS)
    log.topic("old").append(b"young")
    log.checkpoint()
    log.topic("f").append(b"six")


# ── T10, T15 ──────────────────────────────────────────────────────────────────────────────────────


def delete_seqs(log: Engine, clock: ManualClock) -> None:
    del clock
    log.topic("f").delete(seqs=[1, 4])


def delete_some(log: Engine, clock: ManualClock) -> None:
    """Deletes of records in segments, which the next checkpoint brings into vectors."""
    del clock
    log.topic("f").delete(seqs=[3])
    log.topic("other").delete(match="y")


def delete_tag(log: Engine, clock: ManualClock) -> None:
    del clock
    log.topic("f").delete(match="x")


def delete_below(log: Engine, clock: ManualClock) -> None:
    del clock
    log.topic("f").delete(before_seq=4)


def drop(log: Engine, clock: ManualClock) -> None:
    del clock
    log.drop("f")
    with suppress(WriteFailed):  # its files are removed in the background
        log._checkpoints.remove_dropped_topics(log._dropped)


# ── T5, T16, T17: what an opening finds ───────────────────────────────────────────────────────────


def index_path(topic: int, base: int) -> str:
    return f"{PATH}/topics/{topic:08X}/seg-{base:016d}.idx"


def lose_an_index(disk: SimDisk) -> SimDisk:
    disk.remove(index_path(1, 1))
    disk.sync_dir(f"{PATH}/topics/00000001")
    return disk.crash_image("all")


def leave_partial_checkpoint(log: Engine, clock: ManualClock) -> None:
    """A checkpoint that broke off before its snapshot, a topic whose files stayed, and a write after it all."""
    disk = log._context.disk
    assert isinstance(disk, SimDisk)
    log.topic("gone", durability="fsync").append([b"a", b"b"])
    log.checkpoint()  # what follows makes longer files of some
    disk.fail("rename", path="/topics/")
    log.drop("gone")
    write_some(log, clock)
    disk.fail("create", path="/meta/")
    with suppress(WriteFailed):
        log.checkpoint()
    disk.clear_faults()
    log.topic("f").append([b"after", b"the mark"])
    log.topic("d").append(b"delta")


def newest_wal(disk: SimDisk, shard: int) -> str:
    return max(path for path in disk.tree() if f"/shard-{shard:02d}/wal-" in path)


def used(content: bytes) -> int:
    return len(content.rstrip(b"\0"))


def tear_the_tail(disk: SimDisk) -> SimDisk:
    """What a killed machine left: an unfinished frame after the last one, an index that is gone, a stale temporary."""
    image = lose_an_index(disk)
    path = newest_wal(image, 0)
    content = image.read_file(path)
    end = used(content)
    image.write_file(path, content[:end] + content[:40] + bytes(len(content)))
    image.write_file(f"{PATH}/meta/snapshot.0099.bin.tmp", b"half a snapsh")
    return image


ROWS: Final[dict[str, tuple[Scenario, ...]]] = {
    "T1": (
        Scenario(lead=reserve_some, act=append_disk, picks=on("wal/", calls="write")),
        Scenario(act=append_batch, picks=on("wal/", calls="write")),
        Scenario(lead=reserve_some, act=append_together, picks=on("wal/", calls="write")),
    ),
    "T2": (
        Scenario(act=append_batch, picks=on("wal/", calls="sync")),
        Scenario(lead=leave_unsynced, act=tick, picks=on("wal/", calls="sync")),
        Scenario(lead=reserve_some, act=append_together, picks=on("wal/", calls="sync")),
    ),
    "T3": (Scenario(lead=fill_the_file, act=append_big, picks=lambda steps: range(len(steps) - 2)),),
    "T4": (Scenario(lead=write_some, act=checkpoint, picks=in_data, derived=True),),
    "T5": (
        Scenario(lead=write_some, act=checkpoint, picks=on_names_after(".idx"), derived=True),
        Scenario(spoil=lose_an_index, opening=True, picks=on_names_after(".idx")),
    ),
    "T6": (Scenario(lead=write_some, act=checkpoint, picks=on("wal/")),),
    "T7": (Scenario(lead=write_some, act=checkpoint, picks=in_snapshot, derived=True),),
    "T8": (Scenario(lead=make_obsolete_files, act=checkpoint, picks=after_snapshot, derived=True),),
    "T9": (Scenario(lead=write_some, act=checkpoint, picks=on_names_after(".foot"), derived=True),),
    "T10": (
        Scenario(act=delete_seqs, picks=on("wal/")),
        Scenario(lead=write_some, act=delete_tag, picks=on("wal/")),
        Scenario(act=delete_below, picks=on("wal/")),
    ),
    "T11": (
        Scenario(prepare=make_old, lead=grow_old, act=read_old, picks=on("wal/"), columns="TW SW C± BF LU CJ"),
        Scenario(
            prepare=make_old,
            lead=grow_old,
            act=append_old,
            picks=on("wal/", most=2),
            halfway=read_old,
            columns="NS EW EF SW CJ",
        ),
        Scenario(prepare=make_old, lead=expire_segments, act=checkpoint, picks=after_snapshot, columns="C± LU RR"),
    ),
    "T15": (
        Scenario(act=drop, picks=on("wal/"), columns="TW SW NS EW EF BF CJ"),
        Scenario(act=drop, columns="C± LU RR"),
    ),
    "T16": (Scenario(prepare=leave_partial_checkpoint, spoil=tear_the_tail, opening=True),),
    "T17": (
        Scenario(prepare=leave_partial_checkpoint, spoil=tear_the_tail, opening=True),
        Scenario(
            prepare=leave_partial_checkpoint,
            spoil=tear_the_tail,
            opening=True,
            settings={"wal_shards": 1},
            picks=in_moving,
        ),
    ),
}
