"""Damage in the WAL, frame by frame, and the history goes on (D14, G4, G33, G52, G56–G58).

A history over topics of every class, in one shard or several, with deletes, caps, settings, a drop, a checkpoint and
rotations in between, ends with a kill. Then each frame of each WAL file is damaged in each way, one image a time:

    flips      of a bit in the length, the type, the flags, the topic, the seq, a section's length, the data, the
               checksum
    sectors    the one in which the frame begins is zeroed, or overwritten with rubbish
    pairs      a second frame is damaged as well

What is read is compared with the oracle: every record that was not in a damaged frame, or in the batch of one, is
there and is what was written; nothing else is, but for what a lost delete or a cap brings back; and what is lost is
told. Then the topics are written to until a segment is sealed, a checkpoint is made and the engine is opened again,
without `accept_loss`: the same records, no seq given twice, no damage. The frames of a file are found here without the
code under test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from random import Random
from typing import Any, NamedTuple

import pytest
from tests.crash.topics.oracle import Row, row
from tests.crash.topics.reader import read_engine
from tests.crash.topics.workloads import PATH, EngineHarness, batch, one, open_engine
from tests.kit.sampling import SEED
from xxhash import xxh3_64_intdigest

from tidelog.engine import Engine, recovery, startup
from tidelog.errors import Damaged
from tidelog.testing import ManualClock, SimDisk
from tidelog.wal import paths as wal_paths
from tidelog.wal import recovery as wal_replay

Tell = Callable[[str, int], None]
Rows = dict[str, dict[int, Row]]
SECTOR = 512
RECORDS = (1, 12)  # types of frames, as docs/format.md has them
MARK = 8
BRINGS_BACK = (3, 6, 7, 9)  # a drop, a delete, a floor, settings: without them records are there again
MORE = 8
HEADER_BITS = {"length": 0, "type": 4, "flags": 5, "topic": 6, "seq": 14, "time": 22, "tag_len": 32, "data_len": 34}


class At(NamedTuple):
    """A frame: where it is, and what it says."""

    path: str
    pos: int
    end: int
    kind: int
    flags: int
    topic_id: int
    seq: int
    records: int


class Image(NamedTuple):
    disk: SimDisk
    truth: Rows
    ever: Rows  # every record that was ever written, by the topic's name
    tops: dict[str, int]  # the highest seq that was given
    names: dict[int, str]
    capped: set[str]
    frames: list[At]
    newest: set[str]  # the newest file of each shard
    covered: dict[str, int]  # up to where segments hold the frames of a file
    shards: int


def frames_of(content: bytes, path: str) -> Iterator[At]:
    pos = 0
    while pos + 46 <= len(content):
        size = int.from_bytes(content[pos : pos + 4], "little") + 4
        if size < 46:
            return
        stored = int.from_bytes(content[pos + size - 8 : pos + size], "little")
        assert xxh3_64_intdigest(content[pos + 4 : pos + size - 8]) == stored, f"{path} is damaged before its time"
        kind, flags = content[pos + 4], content[pos + 5]
        topic_id, seq = (int.from_bytes(content[pos + at : pos + at + 8], "little") for at in (6, 14))
        names = sum(int.from_bytes(content[pos + at : pos + at + 2], "little") for at in (30, 32))
        body = pos + 38 + names
        count = int.from_bytes(content[body : body + 4], "little") if kind == 12 else int(kind == 1)
        yield At(path, pos, pos + size, kind, flags, topic_id, seq, count)
        pos += size


class Noting(EngineHarness):
    """A bench that remembers every record that was written."""

    def __init__(self, disk: SimDisk, *, shards: int) -> None:
        super().__init__(disk, shards=shards)
        self.ever: Rows = {}

    def append(
        self,
        name: str,
        records: Sequence[object],
        tags: Sequence[str | None] | None = None,
        nodes: Sequence[str | None] | None = None,
        metas: Sequence[dict[str, Any] | None] | None = None,
    ) -> None:
        super().append(name, records, tags, nodes, metas)
        life, none = self.oracle.lives[name], [None] * len(records)
        columns = zip(records, tags or none, nodes or none, metas or none, strict=True)
        written = [row(life.stamp, *values) for values in columns]
        self.ever.setdefault(name, {}).update(enumerate(written, life.now.head - len(written) + 1))


@cache
def image(shards: int, seed: int, is_idle: bool) -> Image:
    """A history, up to a kill. `is_idle`: a sync interval went by before it."""
    random = Random(f"{shards}/{seed}")
    bench = Noting(SimDisk(), shards=shards)
    bench.open()
    ever, names = bench.ever, dict[int, str]()
    capped, covered = {"capped"}, dict[str, int]()
    for name, durability in (("f", "fsync"), ("d", "disk"), ("m", "memory"), ("g", "fsync"), ("e", "disk")):
        bench.create(name, durability=durability)
    bench.create("capped", durability="fsync", cap_records=3)
    bench.create("gone", durability="fsync")

    def note() -> None:
        for name, life in bench.oracle.lives.items():
            assert life.id is not None
            names[life.id] = name

    def write(times: int) -> None:
        for _ in range(times):
            name = random.choice([name for name in bench.oracle.lives if name != "gone"])
            random.choice((one, one, batch))(bench, name, random)
            note()
            if random.random() < 0.3:
                bench.tick()

    write(8)
    if seed % 2:
        for each in _frames_of_files(bench.disk):
            covered[each.path] = each.end
        bench.checkpoint()
    write(6)
    bench.delete("f", before_seq=2)
    bench.delete("d", match="x:*")
    bench.append("gone", [b"of a topic that is dropped"])
    note()
    bench.drop("gone")
    bench.configure("g", cap_bytes=100_000)
    write(6)
    bench.delete("f", seqs=[bench.oracle.lives["f"].now.head])
    write(4)
    if is_idle:
        bench.tick()
    disk = bench.disk.reboot()
    truth = {name: dict(life.now.rows) for name, life in bench.oracle.lives.items()}
    tops = {name: life.now.head for name, life in bench.oracle.lives.items()}
    for name in truth:
        ever.setdefault(name, {})  # a topic to which nothing was written
    newest = set({path.rpartition("/")[0]: path for path in _wal_files(disk)}.values())
    return Image(disk, truth, ever, tops, names, capped, _frames_of_files(disk), newest, covered, shards)


def _wal_files(disk: SimDisk) -> list[str]:
    return sorted(path for path in disk.tree() if path.endswith(".log"))


def _frames_of_files(disk: SimDisk) -> list[At]:
    return [each for path in _wal_files(disk) for each in frames_of(disk.read_file(path), path)]


class Hurt(NamedTuple):
    """A damaged image, and which of its frames were touched."""

    what: str
    disk: SimDisk
    touched: list[At]
    is_blind: bool  # a header is gone: nothing says what was there


def hurts(base: Image, random: Random, share: float) -> Iterator[Hurt]:
    """Every damage, or a share of it by chance."""
    places = [*((name, at) for name, at in HEADER_BITS.items()), ("data", None), ("checksum", -1)]
    for number, each in enumerate(base.frames):
        for name, at in places:
            if random.random() < share:
                pos = each.end + at if at == -1 else each.pos + (38 if at is None else at)
                pos = min(pos, each.end - 1)
                disk = base.disk.reboot()
                bit = random.randrange(8)
                disk.flip_bit(each.path, pos, bit)
                yield Hurt(f"{each.path} frame at {each.pos}, {name}, bit {bit}", disk, [each], False)
        for rubbish in (False, True):
            if random.random() < share:
                disk, lo = base.disk.reboot(), each.pos // SECTOR * SECTOR
                content = bytearray(disk.read_file(each.path))
                content[lo : lo + SECTOR] = random.randbytes(SECTOR) if rubbish else bytes(SECTOR)
                disk.write_file(each.path, bytes(content))
                said = f"{each.path} sector at {lo}, {'rubbish' if rubbish else 'zeros'}"
                yield Hurt(said, disk, _in(base, each.path, lo, lo + SECTOR), True)
        for _ in range(2):
            other = random.choice(base.frames)
            if random.random() < share and other is not each:
                disk = base.disk.reboot()
                for bad in (each, other):
                    disk.flip_bit(bad.path, random.randrange(bad.pos, bad.end), random.randrange(8))
                said = f"{each.path} frame at {each.pos} and {other.path} frame at {other.pos}, number {number}"
                yield Hurt(said, disk, sorted([each, other]), False)


def _in(base: Image, path: str, lo: int, hi: int) -> list[At]:
    return [each for each in base.frames if each.path == path and each.pos < hi and each.end > lo]


def chain_of(base: Image, each: At) -> list[At]:
    """The frames of the caller's batch that a frame belongs to."""
    mine = [other for other in base.frames if other.path == each.path]
    at = lo = hi = mine.index(each)
    while lo and mine[lo - 1].flags & MORE and mine[lo - 1].kind in RECORDS:
        lo -= 1
    while mine[hi].flags & MORE and mine[hi].kind in RECORDS and hi + 1 < len(mine):
        hi += 1
    assert lo <= at <= hi
    return mine[lo : hi + 1]


def seqs_of(base: Image, frames: Iterable[At]) -> dict[str, set[int]]:
    """The seqs of the records in these frames, by the topic's name."""
    found: dict[str, set[int]] = {}
    for each in frames:
        if each.kind in RECORDS and each.topic_id in base.names:
            found.setdefault(base.names[each.topic_id], set()).update(range(each.seq, each.seq + each.records))
    return found


def may_miss(base: Image, hurt: Hurt, log: Engine) -> dict[str, set[int]]:
    """The seqs whose records may be lost."""
    gone = {each for touched in hurt.touched for each in chain_of(base, touched)}
    if hurt.is_blind:
        # Without a header nothing says whether the batch went on: the next one of a topic that lost records may count
        # as its rest.
        last = max(gone, key=lambda each: each.pos)
        after = [each for each in base.frames if each.path == last.path and each.pos >= last.end][:1]
        for each in after:
            if each.kind in RECORDS and each.topic_id in {lost.topic_id for lost in gone}:
                gone |= set(chain_of(base, each))
    return seqs_of(base, gone | cut_by(base, hurt, log))


def judge(base: Image, hurt: Hurt) -> str:
    """What came of it. Raises AssertionError where that is wrong."""
    now = ManualClock()
    try:
        log = open_engine(hurt.disk.reboot(), now, base.shards)
    except Damaged:
        pass
    else:
        return _unhurt(base, hurt, log)
    reader = open_engine(hurt.disk, now, base.shards, read_only=True)
    assert reader.report.lost
    hold_rows(base, hurt, reader)
    disk = hurt.disk
    # Before a checkpoint removes the file. A frame that a segment has is not lost, so nothing of it is kept.
    lost = [each for each in hurt.touched if each.end > base.covered.get(each.path, 0)]
    are_zeros = not any(any(_bytes(disk, each)) for each in lost)
    log = open_engine(disk, now, base.shards, accept_loss=True)
    assert log.report.lost
    assert log.report.quarantined or are_zeros, f"nothing is kept of what is lost: {log.report.lines()}"
    hold_rows(base, hurt, log)
    try:
        killed = open_engine(disk.reboot(), now, base.shards)
    except Damaged as again:
        raise AssertionError(f"a loss that was accepted is found again: {again}") from again
    assert not killed.report.damage, "a loss that was accepted is found again"
    go_on(base, hurt, log, disk, now)
    return "told"


def _bytes(disk: SimDisk, each: At) -> bytes:
    return disk.read_file(each.path)[each.pos : each.end]


def synced(base: Image, hurt: Hurt, path: str) -> int:
    """Up to where a mark that was not damaged, SYNCED, or the next file says that a file was synced."""
    content = base.disk.read_file(path)
    marks = [each for each in base.frames if each.path == path and each.kind == MARK and each not in hurt.touched]
    said = [int.from_bytes(content[each.pos + 50 : each.pos + 58], "little") for each in marks if each.seq]
    directory, _, name = path.rpartition("/")
    if f"{directory}/SYNCED" in base.disk.tree():
        first, second, _ = base.disk.read_file(f"{directory}/SYNCED").split(b"\n", 2)
        said += [int(second.removeprefix(b"synced="))] if first == name.encode() else []
    return max(said, default=0) if path in base.newest else len(content)


def first_unsynced(base: Image, hurt: Hurt) -> dict[str, int]:
    """Where the first damaged frame of each file is that nothing says was synced."""
    above = [each for each in hurt.touched if each.end > synced(base, hurt, each.path)]
    return {path: min(each.pos for each in above if each.path == path) for path in {each.path for each in above}}


def cut_by(base: Image, hurt: Hurt, log: Engine) -> set[At]:
    """The frames that an unfinished write takes with it, where the report tells of one: those from it on, and their
    batches."""
    first = first_unsynced(base, hurt) if log.report.cut else {}
    cut = {each for each in base.frames if each.pos >= first.get(each.path, 1 << 62)}
    return cut | {each for some in cut for each in chain_of(base, some)}


def _unhurt(base: Image, hurt: Hurt, log: Engine) -> str:
    """It opens as if nothing had happened: a snapshot covers the damage, or nothing left says it was synced."""
    assert not log.report.damage, log.report.lines()
    rows = {name: seen.rows or {} for name, seen in read_engine(log).items()}
    first = first_unsynced(base, hurt)
    if not log.report.cut:
        if rows != base.truth:
            hold_unused_space(base, hurt, log, rows)
            return "like unused space"
        return "covered"
    assert first, f"a frame that was synced is taken for an unfinished write: {log.report.cut}"
    lost = seqs_of(base, cut_by(base, hurt, log))
    for name, seen in base.truth.items():
        missing = set(seen) - set(rows.get(name, {})) - lost.get(name, set())
        assert not missing, f"{name}: {sorted(missing)} were synced and are gone"
    # Whole frames before the bad one are the beginning of a batch that is not complete.
    follow = [each for each in base.frames if each.pos > first.get(each.path, 1 << 62) and each not in hurt.touched]
    if any(each.kind in RECORDS for each in follow):
        assert log.report.quarantined, "whole frames were cut and not kept"
    return "cut"


def hold_unused_space(base: Image, hurt: Hurt, log: Engine, rows: Rows) -> None:
    """Zeros in place of the last frames of a file, which nothing says were synced, look like space that was never used
    (docs/guarantees.md). Only the records of those frames may be missing."""
    first = first_unsynced(base, hurt)
    gone = [each for each in base.frames if each.pos >= first.get(each.path, 1 << 62)]
    are_zeros = bool(gone) and not any(any(_bytes(hurt.disk, each)) for each in gone)
    assert are_zeros, f"{log.report.lines()}: {_differs(rows, base.truth)}"
    lost, brings_back = seqs_of(base, gone), any(each.kind in BRINGS_BACK for each in gone)
    for name, seen in base.truth.items():
        found = rows.get(name, {})
        missing = set(seen) - set(found) - lost.get(name, set())
        assert not missing, f"{name}: {sorted(missing)} are gone, which were in other frames"
        assert brings_back or set(found) <= set(seen), _differs(rows, base.truth)
        assert all(base.ever[name][seq] == kept for seq, kept in found.items()), f"{name} was falsified"


def hold_rows(base: Image, hurt: Hurt, log: Engine) -> None:
    found = {name: seen.rows or {} for name, seen in read_engine(log).items()}
    missing, kinds = may_miss(base, hurt, log), {each.kind for each in hurt.touched}
    made = {each.topic_id for each in hurt.touched if each.kind == 2 and each.topic_id in base.names}
    renamed = {f"recovered-{topic_id:08X}": base.names[topic_id] for topic_id in made}
    for each in hurt.touched:
        if each.kind == 2 and each.topic_id not in base.names:
            found.pop(f"recovered-{each.topic_id:08X}", None)  # one of the engine's own
    for name, rows in found.items():
        mine = renamed.get(name, name)
        assert mine in base.ever, f"{name} was made up"
        wrong = [seq for seq, kept in rows.items() if base.ever[mine].get(seq) != kept]
        assert not wrong, f"{name}: seqs {wrong} were never written like this"
        if mine not in base.truth:
            assert kinds & {3} or hurt.is_blind, f"{name} was dropped and is back"
            continue
        lost = set(base.truth[mine]) - set(rows) - missing.get(mine, set())
        assert not lost, f"{name}: seqs {sorted(lost)} are lost, and their frames are whole: {log.report.lines()}"
        for each in hurt.touched if mine not in base.capped else ():
            if base.names.get(each.topic_id) == mine and each.kind in RECORDS:
                whole = {seq for some in chain_of(base, each) for seq in range(some.seq, some.seq + some.records)}
                have, want = whole & set(rows), whole & set(base.truth[mine])
                assert not have or have >= want, f"{name}: seqs {sorted(have)} are a part of a batch"
        back = set(rows) - set(base.truth[mine])
        whose = {each.topic_id for each in hurt.touched if each.kind in BRINGS_BACK}
        allowed = mine in base.capped or mine in {base.names.get(topic_id) for topic_id in whose}
        assert not back or allowed, f"{name}: seqs {sorted(back)} are back"
    gone = set(base.truth) - {renamed.get(name, name) for name in found} - {base.names[topic_id] for topic_id in made}
    assert not gone, f"topics {gone} are gone"


def _differs(rows: Rows, truth: Rows) -> str:
    return "; ".join(
        f"{name}: lost {sorted(set(truth.get(name, {})) - set(rows.get(name, {})))}, "
        f"more {sorted(set(rows.get(name, {})) - set(truth.get(name, {})))}"
        for name in {*rows, *truth}
        if rows.get(name) != truth.get(name)
    )


def go_on(base: Image, hurt: Hurt, log: Engine, disk: SimDisk, clock: ManualClock) -> None:
    """Write until a segment is sealed, make a checkpoint, open again: the same records, no seq twice, no damage."""
    before = {name: seen.rows or {} for name, seen in read_engine(log).items()}
    written: dict[str, list[int]] = {}
    cut = seqs_of(base, cut_by(base, hurt, log))
    tops = {name: min([top + 1, *cut.get(name, ())]) - 1 for name, top in base.tops.items()}
    for name in before:
        topic = log.topic(name, create=False)
        given = [topic.append(b"after the damage %d" % number).first_seq for number in range(6)]
        assert given[0] > tops.get(name, 0), f"{name}: seq {given[0]} is given again, {tops[name]} was"
        written[name] = given
    log.checkpoint()
    extra = {name: log.topic(name, create=False).append(b"after the checkpoint").first_seq for name in before}
    disk = disk.reboot()
    again = open_engine(disk, clock, base.shards)
    assert not again.report.damage, again.report.lines()
    for name, seen in read_engine(again).items():
        kept = [seq for seq in before[name] if seq in (seen.rows or {})]
        expected = [*kept, *written[name], extra[name]]
        if name in base.capped:
            expected = expected[-3:]
        else:
            assert kept == list(before[name]), f"{name}: {set(before[name]) - set(kept)} vanished after a restart"
        assert list(seen.rows or {}) == expected, f"{name}: {list(seen.rows or {})}, {expected} were expected"
        assert all(seen.rows[seq] == before[name][seq] for seq in kept if seen.rows and seq in seen.rows)


def run(shards: int, seed: int, is_idle: bool, share: float, record_count: Tell) -> None:
    base, outcomes = image(shards, seed, is_idle), Counter[str]()
    for hurt in hurts(base, Random(f"{shards}/{seed}/{is_idle}"), share):
        try:
            outcomes[judge(base, hurt)] += 1
        except Exception as wrong:
            raise AssertionError(f"{shards} shards, seed {seed}, {hurt.what}: {wrong}") from wrong
    for outcome, count in outcomes.items():
        record_count(f"WAL damage {outcome}", count)
    assert outcomes["told"]
    assert not is_idle or outcomes["cut"] <= outcomes["told"]


@pytest.mark.slow
@pytest.mark.parametrize("is_idle", [True, False], ids=["after a sync interval", "at once"])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_damage_in_the_wal_takes_only_what_it_touches(shards: int, is_idle: bool, record_count: Tell) -> None:
    run(shards, shards + SEED, is_idle, 0.006, record_count)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_idle", [True, False], ids=["after a sync interval", "at once"])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_every_damage_of_every_frame(shards: int, seed: int, is_idle: bool, record_count: Tell) -> None:
    run(shards, seed, is_idle, 1.0, record_count)


def test_the_histories_have_every_kind_of_frame_and_several_files() -> None:
    found = Counter(each.kind for shards in (1, 2) for each in image(shards, 1, True).frames)
    assert {1, 2, 3, 6, 8, 9, 11, 12} <= set(found)
    for shards in (1, 2, 3):
        paths = [each.path for each in image(shards, 1, True).frames]
        assert len(set(paths)) > shards
        assert len({path.rpartition("/")[0] for path in paths}) == shards
        assert all(path.startswith(PATH) for path in paths)


# Bugs planted on purpose: each breaks one rule, and the sweep must find it.


def replay_ends_at_a_bad_frame(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wal_replay._Resync, "find_next_frame", lambda _self, _pos: (None, None))


def marks_prove_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wal_replay, "_find_sync_marks", lambda *_: iter(()))


def the_recorded_position_proves_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wal_paths, "read_synced", lambda *_: None)


def the_rest_of_a_batch_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wal_replay._Resync, "find_batch_end", lambda _self, pos: pos)
    patch.setattr(wal_replay._Resync, "count_batch_frames", lambda _self, _pos: 0)


def seqs_of_lost_records_are_given_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery.TopicReplayer, "_reserve_lost_seqs", lambda *_: None)


def a_loss_is_found_again_by_every_start(patch: pytest.MonkeyPatch) -> None:
    real = startup._try_open_writer

    def writer(*args: Any, **more: Any) -> startup.OpenedEngine:
        found = real(*args, **more)
        found.checkpoint_state.needs_checkpoint = False
        return found

    patch.setattr(startup, "_try_open_writer", writer)


def lost_bytes_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wal_replay, "_quarantine", lambda *_: [])


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        (a_loss_is_found_again_by_every_start, "a loss that was accepted is found again"),
        (lost_bytes_are_not_kept, "nothing is kept of what is lost"),
    ],
)
def test_the_damage_of_one_frame_shows(
    bug: Callable[[pytest.MonkeyPatch], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Method: the same damage of the newest file, judged without the planted bug and with it."""
    base = image(1, 1, True)

    def judged() -> str:
        every = hurts(base, Random(1), 0.4)
        return judge(base, next(hurt for hurt in every if all(each.path in base.newest for each in hurt.touched)))

    assert judged() == "told"
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=said):
        judged()


PLANTED = (
    replay_ends_at_a_bad_frame,
    marks_prove_nothing,
    the_recorded_position_proves_nothing,
    the_rest_of_a_batch_counts,
    seqs_of_lost_records_are_given_again,
    a_loss_is_found_again_by_every_start,
    lost_bytes_are_not_kept,
)


@pytest.mark.sweep
@pytest.mark.parametrize("bug", PLANTED, ids=[bug.__name__ for bug in PLANTED])
def test_the_sweep_catches(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    is_idle = bug is not marks_prove_nothing  # once a shard was idle, SYNCED proves as much as its marks
    image(1, 1, is_idle)  # the history is written by what is right
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        run(1, 1, is_idle, 0.4, lambda *_: None)
