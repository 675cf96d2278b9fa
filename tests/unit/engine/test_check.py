"""What the check of a data directory finds, and what it must not take for damage.

The directory under test holds every kind of file there is: two snapshots, two groups of the WAL with
frames after the newest snapshot, sealed and growing segments, indexes, footers, deletion vectors.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count, islice
from random import Random

import msgspec
import pytest
from tests.frames import FrameReader

import tidelog
from tidelog.database import engine_of
from tidelog.engine import Engine, EngineConfig, manifest
from tidelog.engine.check import Finding, ShardCheck, check_directory
from tidelog.errors import NotFound, Unavailable
from tidelog.formats import control_frames, frame, sealed_segment, small_files
from tidelog.formats.sealed_segment import DeletionVector
from tidelog.testing import ManualClock, SimDisk
from tidelog.wal import paths

ROOT = "data"
SEALED = "topics/00000001/seg-0000000000000001"
GROWING = "topics/00000001/seg-0000000000000010"
NEWEST = "meta/delta.0002.bin"


def opened(disk: SimDisk, clock: ManualClock | None = None, *, shards: int = 2) -> Engine:
    # Every byte of the WAL is looked at here, so nothing is in it that was not put there.
    config = EngineConfig(wal_shards=shards, wal_file_bytes=4096, segment_events_max=8, ledger_records=0)
    return engine_of(tidelog.open(ROOT, disk=disk, clock=clock or ManualClock(), threads=False, config=config))


@cache
def directory() -> SimDisk:
    disk, clock = SimDisk(), ManualClock()
    log = opened(disk, clock)
    orders, audit = log.topic("orders"), log.topic("audit", durability="fsync")
    for number in range(4):
        clock.tick(5)
        orders.append([b"line %d" % line for line in range(3)], tag=f"t{number % 3}")
        audit.append({"number": number}, meta={"k": 1})
    log.checkpoint()
    orders.delete(match="t1")
    orders.delete(seqs=[1, 2])
    audit.delete(seqs=[2])
    audit.append([{"number": 5}, b"raw"])
    log.checkpoint()
    orders.append(b"tail", node="n")
    audit.append(b"tail")
    log.tick()
    return disk.reboot()


@dataclass
class Bench:
    disk: SimDisk

    def look(self) -> list[Finding]:
        """What a check finds, having changed nothing."""
        before = self.disk.digest()
        found = list(check_directory(ROOT, disk=self.disk))
        assert self.disk.digest() == before, "a check changes nothing"
        return found

    def damage(self) -> list[Finding]:
        return [finding for finding in self.look() if finding.damage]

    def only(self) -> Finding:
        (finding,) = self.look()
        return finding

    def path(self, name: str) -> str:
        return f"{ROOT}/{name}"

    def read(self, name: str) -> bytes:
        return self.disk.read_file(self.path(name))

    def write(self, name: str, content: bytes) -> None:
        self.disk.write_file(self.path(name), content)

    def remove(self, name: str) -> None:
        self.disk.remove(self.path(name))

    def remake(self, change: Callable[[manifest.Manifest], manifest.Manifest]) -> None:
        """A newest snapshot that says something else, its checksum right."""
        loaded = manifest.load_newest(self.disk, ROOT)
        manifest.write_base(self.disk, ROOT, loaded.number, change(loaded.manifest))


@pytest.fixture
def harness() -> Bench:
    return Bench(directory().reboot())


def topic_changed(made: manifest.Manifest, **fields: object) -> manifest.Manifest:
    first, *others = made.topics
    return msgspec.structs.replace(made, topics=(msgspec.structs.replace(first, **fields), *others))


def segment_changed(made: manifest.Manifest, **fields: object) -> manifest.Manifest:
    first, *others = made.topics[0].segments
    return topic_changed(made, segments=(msgspec.structs.replace(first, **fields), *others))


# ── what is whole ─────────────────────────────────────────────────────────────────────────────────


def test_a_sound_directory_has_no_findings_and_is_counted(harness: Bench) -> None:
    before = harness.disk.digest()
    looked = check_directory(ROOT, disk=harness.disk)
    assert list(looked) == []
    assert harness.disk.digest() == before
    # 12 + 1 orders without 3 + 2, 4 + 2 + 1 records of audit without 1
    assert (looked.topics, looked.segments, looked.records, looked.damage_count) == (2, 3, 14, 0)
    wal = [content for path, content in harness.disk.tree().items() if path.endswith(".log")]
    assert looked.frames == sum(len(list(FrameReader(content))) for content in wal) > 15
    assert looked.bytes > 1000


def test_progress_rises_to_its_total(harness: Bench) -> None:
    reported: list[tuple[str, int, int]] = []
    list(check_directory(ROOT, disk=harness.disk, progress=lambda *said: reported.append(said)))
    assert reported == [
        ("WAL shard-00", 1, 5),
        ("WAL shard-01", 2, 5),
        ("orders", 3, 5),
        ("orders", 4, 5),
        ("audit", 5, 5),
    ]


@pytest.mark.parametrize("there", [[], ["data/letter"]])
def test_a_directory_without_topics_is_refused(there: list[str]) -> None:
    disk = SimDisk()
    for path in there:
        disk.write_file(path, b"dear")
    with pytest.raises(NotFound, match="there are no topics in data"):
        list(check_directory(ROOT, disk=disk))


def test_a_directory_that_was_closed_or_never_checkpointed_is_sound() -> None:
    disk = SimDisk()
    log = opened(disk)
    log.topic("a").append([b"x", b"y"])
    assert Bench(disk.reboot()).look() == [], "no snapshot yet"
    log.close()
    assert Bench(disk.reboot()).look() == []


# ── one byte of each kind of file (G42, G56, G65) ─────────────────────────────────────────────────

KINDS = {
    NEWEST: "snapshot",
    "meta/delta.0001.bin": "snapshot",
    "meta/snapshot.0000.bin": "snapshot",
    f"{SEALED}.data": "data",
    f"{SEALED}.idx": "index",
    f"{SEALED}.foot": "footer",
    f"{SEALED}.tag": "tags",
    f"{SEALED}.del": "deletions",
    f"{GROWING}.data": "data",
    f"{GROWING}.idx": "index",
}


def test_the_table_of_files_is_complete() -> None:
    others = ("CURRENT", "NEWEST-", "SYNCED", ".tidelog.lock", "wal-0000000000000001.log")
    tree = directory().tree()
    names = {path.removeprefix("data/") for path in tree if not path.rpartition("/")[2].startswith(others)}
    audit = {"topics/00000002/seg-0000000000000001" + suffix for suffix in (".data", ".idx", ".del")}
    assert names == KINDS.keys() | audit


@pytest.mark.parametrize("name", KINDS)
def test_a_flipped_bit_of_any_byte_is_found_in_its_file(name: str, harness: Bench) -> None:
    """G42, G65: and in no other file; a data file's finding names the frame and the records in it."""
    content = harness.read(name)
    for pos in range(0, len(content), 7 if KINDS[name] == "snapshot" else 3):
        harness.disk.flip_bit(harness.path(name), pos, pos % 8)
        found = harness.damage()
        assert {(finding.kind, finding.file) for finding in found} == {(KINDS[name], name)}, pos
        if KINDS[name] == "index":
            assert found[0].pos == pos
            assert f"seq {(10 if name.startswith(GROWING) else 1) + pos // 20} " in found[0].reason
        if KINDS[name] == "data":
            assert len(found) == 1
            assert found[0].pos is not None
            assert found[0].pos <= pos
            assert found[0].topic == "orders"
            assert len(found[0].seqs) == 3, "a batch of three is one frame"
        harness.disk.flip_bit(harness.path(name), pos, pos % 8)
    assert harness.look() == []


def last_mark(content: bytes) -> int:
    """The synced length of a WAL file by its last mark."""
    pos = said = 0
    while isinstance(found := frame.read_frame(content, pos, len(content)), frame.Frame):
        if found.kind == frame.CHECKPOINT_MARK:
            body = control_frames.decode(found.kind, content[found.data_pos : found.data_end])
            assert isinstance(body, control_frames.CheckpointMark)
            said = body.wal_pos
        pos = found.end
    return said


@pytest.mark.parametrize("is_recorded", [True, False], ids=["with SYNCED", "without SYNCED"])
@pytest.mark.parametrize("shard", [0, 1])
def test_a_flipped_bit_of_the_wal_is_found_at_its_frame(shard: int, is_recorded: bool, harness: Bench) -> None:
    """G56: damage below what was synced, an unfinished write above it; what a snapshot covers is said to be."""
    recorded = paths.read_synced(harness.disk, f"data/wal/shard-{shard:02d}")
    assert recorded is not None
    if not is_recorded:
        harness.disk.remove(f"data/wal/shard-{shard:02d}/SYNCED")
    name = f"wal/shard-{shard:02d}/wal-0000000000000001.log"
    made = manifest.load_newest(harness.disk, ROOT).manifest
    (position,) = (row.pos for row in made.groups if row.key == f"shard-{shard:02d}")
    used = len(harness.read(name).rstrip(b"\0"))
    synced = recorded.pos if is_recorded else last_mark(harness.read(name))
    assert 0 < position < synced <= used == recorded.pos
    for pos in range(0, len(harness.read(name)), 37):
        harness.disk.flip_bit(harness.path(name), pos, pos % 8)
        finding = harness.only()
        assert (finding.kind, finding.file, finding.damage) == ("wal", name, pos < synced), pos
        assert finding.pos is not None
        assert finding.pos <= pos
        assert ("a snapshot covers it" in finding.reason) == (pos < position)
        assert ("records may be lost with them" in finding.reason) == (position <= pos < synced)
        assert ("an unfinished write" in finding.reason) == (pos >= synced)
        harness.disk.flip_bit(harness.path(name), pos, pos % 8)


def test_damage_of_the_wal_that_no_snapshot_covers_says_that_records_may_be_lost() -> None:
    """G56: a mark after the bad bytes proves that they were synced."""
    disk = SimDisk()
    log = opened(disk, shards=1)
    topic = log.topic("a", durability="fsync")
    topic.append(b"x")
    disk.fail("create", path="meta/", times=None)  # the mark is written, the snapshot is not
    with pytest.raises(Unavailable):
        log.checkpoint()
    image = disk.reboot()
    image.flip_bit("data/wal/wal-0000000000000001.log", 5, 1)
    finding = next(finding for finding in Bench(image).look() if finding.damage)
    assert (finding.kind, finding.file, finding.pos) == ("wal", "wal/wal-0000000000000001.log", 0)
    assert "acknowledged records may be lost" in finding.reason


def test_frames_after_damage_that_a_snapshot_covers_are_checked(harness: Bench) -> None:
    sound = check_directory(ROOT, disk=harness.disk)
    assert list(sound) == []
    name = "wal/shard-00/wal-0000000000000001.log"
    last = len(harness.read(name).rstrip(b"\0")) - 1
    for pos in (5, last):
        harness.disk.flip_bit(harness.path(name), pos, 0)
    looked = check_directory(ROOT, disk=harness.disk)
    covered, synced = looked
    assert (covered.pos, covered.damage) == (0, True)
    assert synced.pos is not None
    assert (0 < synced.pos <= last, synced.damage) == (True, True)
    assert looked.frames < sound.frames, "what was looked at twice is counted once"


def test_a_directory_that_went_on_without_what_was_lost_is_sound_again() -> None:
    """Numbers of the WAL that were jumped over then are no damage later, and the quarantine is a note."""
    disk = SimDisk()
    log = opened(disk, shards=1)
    topic = log.topic("a", durability="fsync")
    for _ in range(60):
        topic.append(b"x" * 100)  # three files
    image = disk.reboot()
    image.flip_bit("data/wal/wal-0000000000000001.log", 200, 0)
    assert [finding.kind for finding in Bench(image).look() if finding.damage] == ["wal"]
    config = EngineConfig(wal_shards=1, wal_file_bytes=4096)
    tidelog.open(ROOT, disk=image, clock=ManualClock(), threads=False, config=config, accept_loss=True).close()
    found = Bench(image).look()
    assert {finding.file.partition("/")[0] for finding in found} == {"quarantine"}
    assert not any(finding.damage for finding in found)


@pytest.mark.parametrize("content", [b"garbage", b"wal-0000000000000099.log\n", None])
def test_a_wrong_pointer_of_the_wal_is_a_note(content: bytes | None, harness: Bench) -> None:
    """G33: nothing hangs on CURRENT."""
    name = "wal/shard-01/CURRENT"
    harness.remove(name) if content is None else harness.write(name, content)
    finding = harness.only()
    assert (finding.kind, finding.file, finding.damage) == ("wal", name, False)


@pytest.mark.parametrize("suffix", [".foot", ".del"])
def test_a_later_version_is_not_guessed_at(suffix: str, harness: Bench) -> None:
    content = harness.read(SEALED + suffix)
    harness.write(SEALED + suffix, small_files.wrap_file(content[:4], 9, content[small_files.FILE_HEADER_BYTES :]))
    (finding,) = harness.damage()
    assert (finding.file, finding.pos) == (SEALED + suffix, 4)
    assert finding.reason.startswith("version 9 is later than 1")


def test_each_damaged_frame_of_a_segment_is_found(harness: Bench) -> None:
    """G65: the index leads past the first."""
    data = harness.read(f"{SEALED}.data")
    first, third = data.index(b"line 0"), data.rindex(b"line 0")
    for pos in (first, third):
        harness.disk.flip_bit(harness.path(f"{SEALED}.data"), pos, 0)
    assert [finding.seqs for finding in harness.damage()] == [range(1, 4), range(7, 10)]


def test_without_a_sound_index_the_first_damaged_frame_and_all_after_it_are_named(harness: Bench) -> None:
    for suffix, pos in ((".data", 100), (".idx", 1)):
        harness.disk.flip_bit(harness.path(SEALED + suffix), pos, 0)
    data, index = harness.damage()
    assert (data.kind, data.seqs) == ("data", range(4, 10))
    assert index.kind == "index"
    harness = Bench(directory().reboot())
    harness.disk.flip_bit(harness.path(f"{GROWING}.data"), 60, 0)
    harness.write(f"{GROWING}.idx", b"\xff" * 60)
    (data,) = harness.damage()
    assert (data.file, data.seqs) == (f"{GROWING}.data", range(10, 13))


# ── what is missing, short or too long ────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (f"{SEALED}.data", "the file is missing"),
        (f"{SEALED}.idx", "it has 0 bytes, the snapshot says 180; no record is lost"),
        (f"{SEALED}.foot", "the file is missing; no record is lost"),
        (f"{SEALED}.del", "9 records of 54 bytes are live, the snapshot counts 4 of 24: what was deleted would"),
        ("wal/shard-00/wal-0000000000000001.log", "it is missing: what was written there after the snapshot is lost"),
    ],
)
def test_a_missing_file_is_found(name: str, said: str, harness: Bench) -> None:
    harness.remove(name)
    (finding,) = harness.damage()
    assert finding.file == name
    assert finding.reason.startswith(said)
    assert list(finding.seqs) == (list(range(1, 10)) if name.endswith(".data") else [])


@pytest.mark.parametrize("suffix", [".data", ".idx"])
def test_files_of_another_length_are_found(suffix: str, harness: Bench) -> None:
    """A growing one may be longer: a checkpoint that did not finish leaves it so (G44)."""
    kinds = {".data": "data", ".idx": "index"}
    for stem in (SEALED, GROWING):
        content = harness.read(stem + suffix)
        harness.write(stem + suffix, content[:-1])
        assert harness.damage()[0][:2] == (kinds[suffix], stem + suffix)
        harness.write(stem + suffix, content + b"\0")
        finding = harness.only()
        assert finding[:3] == (kinds[suffix], stem + suffix, len(content))
        assert finding.damage == (stem == SEALED)
        harness.write(stem + suffix, content)


# ── files that are whole in themselves and do not belong together ─────────────────────────────────


def alike() -> SimDisk:
    """A second directory whose first topic got other records, alike in number, length and time."""
    disk, clock = SimDisk(), ManualClock()
    log = opened(disk, clock)
    orders = log.topic("orders")
    for number in range(4):
        clock.tick(5)
        orders.append([b"LINE %d" % line for line in range(3)], tag=f"t{number % 3}")
    log.checkpoint()
    return disk


def test_records_that_are_not_those_that_were_sealed_are_found(harness: Bench) -> None:
    """Every frame holds and fits its index; the footer knows better."""
    harness.write(f"{SEALED}.data", alike().read_file(harness.path(f"{SEALED}.data")))
    (finding,) = harness.damage()
    assert (finding.kind, finding.file, finding.pos) == ("data", f"{SEALED}.data", 0)
    assert "are not those that were sealed" in finding.reason


def test_a_segment_of_another_topic_is_found(harness: Bench) -> None:
    """Its files are whole and fit its row; only the frames say whose they are."""
    for suffix in (".data", ".idx", ".del"):
        harness.write(SEALED + suffix, harness.read(f"topics/00000002/seg-0000000000000001{suffix}"))

    def taken_over(made: manifest.Manifest) -> manifest.Manifest:
        return topic_changed(made, segments=made.topics[1].segments, head=6, reserved=6, earliest=1)

    harness.remake(taken_over)
    (finding,) = harness.damage()
    assert (finding.kind, finding.file) == ("data", f"{SEALED}.data")
    assert finding.reason == "these are not the records of seqs 1 to 6"


def test_a_footer_and_deletions_of_another_segment_are_found(harness: Bench) -> None:
    log = opened(disk := SimDisk())
    log.topic("orders").append([b"x"] * 8)
    log.checkpoint()
    harness.write(f"{SEALED}.foot", disk.read_file(harness.path(f"{SEALED}.foot")))
    assert "it covers seqs [1, 9)" in harness.damage()[0].reason
    harness = Bench(directory().reboot())
    harness.write(f"{SEALED}.del", sealed_segment.encode_deletion_vector(DeletionVector(2, 9)))
    assert "it is about seqs [2, 11)" in harness.damage()[0].reason
    harness.write(f"{SEALED}.del", sealed_segment.encode_deletion_vector(DeletionVector(1, 10)))
    assert "it is about seqs [1, 11)" in harness.damage()[0].reason


def test_deletions_that_were_lost_are_damage_and_newer_ones_a_note(harness: Bench) -> None:
    """G80: a vector older than the snapshot would bring deleted records back."""
    vector = sealed_segment.decode_deletion_vector(harness.read(f"{SEALED}.del"))
    fewer = DeletionVector(vector.base, vector.size)
    fewer.mark(vector.seqs()[:-1])
    harness.write(f"{SEALED}.del", sealed_segment.encode_deletion_vector(fewer))
    (finding,) = harness.damage()
    assert (finding.kind, finding.file) == ("deletions", f"{SEALED}.del")
    vector.mark([9])
    harness.write(f"{SEALED}.del", sealed_segment.encode_deletion_vector(vector))
    longer = DeletionVector(10, 9)
    longer.mark([17])
    harness.write(f"{GROWING}.del", sealed_segment.encode_deletion_vector(longer))
    assert harness.damage() == []
    assert [finding.kind for finding in harness.look()] == ["deletions"]


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (lambda made: segment_changed(made, live_bytes=1), "counts", "the snapshot counts 4 of 1"),
        (lambda made: segment_changed(made, first_ts=1), "counts", "times are"),
        (lambda made: segment_changed(made, size=257), "data", "it has 258 bytes, the snapshot says 257"),
        (lambda made: segment_changed(made, stop=9), "data", "these are not the records of seqs 1 to 8"),
        (lambda made: segment_changed(made, sealed=False), "snapshot", "a segment of [1, 10) cannot be where it is"),
        (lambda made: topic_changed(made, earliest=99), "snapshot", "earliest 99"),
        (lambda made: topic_changed(made, cap_mark=50), "snapshot", "floor 51"),
        (lambda made: topic_changed(made, head=9), "snapshot", "a segment of [10, 13) cannot be"),
        (lambda made: topic_changed(made, name="audit"), "start", "two topics are called 'audit'"),
        (lambda made: topic_changed(made, config=b"[]"), "start", "a topic's config"),
    ],
)
def test_a_snapshot_that_contradicts_itself_or_the_files_is_found(
    change: Callable[[manifest.Manifest], manifest.Manifest], kind: str, said: str, harness: Bench
) -> None:
    harness.remake(change)
    assert any(finding.kind == kind and said in finding.reason for finding in harness.damage()), harness.look()


def test_without_its_newest_snapshot_a_directory_is_checked_against_the_one_before(harness: Bench) -> None:
    """G42: what was added since is no damage."""
    harness.disk.flip_bit(harness.path(NEWEST), 30, 0)
    harness.disk.flip_bit(harness.path(f"{SEALED}.data"), 60, 0)
    assert [finding.file for finding in harness.damage()] == [NEWEST, f"{SEALED}.data"]
    harness.disk.flip_bit(harness.path("meta/delta.0001.bin"), 30, 0)
    assert [finding.kind for finding in harness.look()] == ["snapshot", "snapshot"], "leftovers are unknown"


def test_a_file_that_cannot_be_read_is_a_finding(harness: Bench) -> None:
    """G57."""
    for name, kind in ((NEWEST, "snapshot"), (f"{SEALED}.data", "data"), ("shard-00/wal-", "wal")):
        harness.disk.fail("read", error=errno.EIO, times=None, path=name)
        found = [finding for finding in harness.damage() if "cannot be read" in finding.reason]
        assert [finding.kind for finding in found] == [kind]
        harness.disk.clear_faults()


# ── what is no damage ─────────────────────────────────────────────────────────────────────────────


def workload(disk: SimDisk) -> None:
    """Everything that changes files: checkpoints, seals, deletes, a drop, a start with another number of shards."""
    clock = ManualClock()
    log = opened(disk, clock)
    orders, audit = log.topic("orders"), log.topic("audit", durability="fsync")
    orders.append([b"a", b"b", b"c"], tag="t")
    audit.append([{"n": 1}, b"x"])
    log.checkpoint()
    orders.delete(seqs=[2])
    orders.seal()
    orders.append(b"d")
    audit.delete(before_seq=2)
    log.checkpoint()
    orders.delete(before_seq=4)
    log.drop("audit")
    log.checkpoint()
    log.close()
    log = opened(disk, clock, shards=1)
    log.topic("orders").append([b"e"] * 9)
    log.close()


def test_whatever_a_crash_leaves_is_no_damage(record_count: Callable[[str, int], None]) -> None:
    """G44–G47, G53: power cuts before every operation, any subset of what was not synced lost; also the bytes that a
    killed process leaves."""
    disk, states, notes = SimDisk(), 0, 0

    def examine(op: int) -> None:
        nonlocal states, notes
        images = [image.disk for image in disk.images(random=Random(op), limit=6)]
        for image in (disk.reboot(), *images):
            stat = image.stat(ROOT)
            if stat is None or not set(image.list_dir(ROOT)) & {"meta", "wal", "topics"}:
                continue
            found = list(check_directory(ROOT, disk=image))
            assert not [finding for finding in found if finding.damage], (op, found)
            states, notes = states + 1, notes + len(found)

    disk.on_op = examine
    workload(disk)
    assert states > 300
    assert notes > 50, "some crashes leave notes"
    record_count("crash states checked for false alarms", states)


def test_leftovers_and_quarantine_are_notes(harness: Bench) -> None:
    names = ["topics/00000001/seg-0000000000000099.data", f"{SEALED}.del.tmp", "quarantine/wal.1", f"{GROWING}.foot"]
    for name in names:
        harness.write(name, b"x")
    harness.write("topics/00000001/letter", b"dear")
    found = harness.look()
    assert not any(finding.damage for finding in found)
    assert {finding.file for finding in found} == set(names), "foreign names are ignored"


@pytest.mark.parametrize("begin", range(6))
def test_a_writer_at_work_is_not_taken_for_damage(begin: int, harness: Bench) -> None:
    """Topics are dropped, segments emptied and the WAL trimmed while the check is on its way."""
    log = opened(harness.disk)
    orders = log.topic("orders")
    steps: Iterator[Callable[[], object]] = iter(
        [
            lambda: orders.append([b"more"] * 9),
            log.checkpoint,
            lambda: orders.delete(before_seq=12),
            *[log.checkpoint] * 2,
            lambda: log.drop("audit"),
            *[log.checkpoint] * 2,
        ]
    )
    worked = 0

    def work(_what: str, done: int, _total: int) -> None:
        nonlocal worked
        for step in islice(steps, 3 if done > begin else 0):
            step()
            worked += 1

    looked = check_directory(ROOT, disk=harness.disk, progress=work)
    assert not [finding for finding in looked if finding.damage]
    assert (worked > 0) == (begin < 5)


def test_a_topic_whose_drop_came_after_the_wal_was_looked_at_is_gone_and_not_damaged(harness: Bench) -> None:
    """G85: no checkpoint in between, so the snapshot still names its files."""
    log = opened(harness.disk)

    def drop(_what: str, done: int, _total: int) -> None:
        if done == 2:
            log.drop("audit")

    assert list(check_directory(ROOT, disk=harness.disk, progress=drop)) == []


def test_a_wal_file_that_is_trimmed_under_the_check_is_looked_for_again(harness: Bench) -> None:
    harness.disk.fail("open", error=errno.ENOENT, path="wal-0000")
    assert harness.look() == []
    harness.disk.fail("open", error=errno.ENOENT, path="wal-0000", times=None)
    with pytest.raises(Unavailable):
        harness.look()


def test_damage_that_differs_at_every_attempt_is_not_reported(harness: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that is faster than the check: nothing is guessed."""
    looks = count()
    monkeypatch.setattr(ShardCheck, "_check_once", lambda *_: [Finding("wal", "wal", next(looks), "bad")])
    with pytest.raises(Unavailable, match="changes faster than it can be read"):
        list(check_directory(ROOT, disk=harness.disk))


def test_damage_that_is_gone_at_a_second_look_was_a_writer_at_work(
    harness: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([[Finding("wal", "wal", 7, "bad")], *[[]] * 5])
    monkeypatch.setattr(ShardCheck, "_check_once", lambda *_: next(looks))
    assert list(check_directory(ROOT, disk=harness.disk)) == []
