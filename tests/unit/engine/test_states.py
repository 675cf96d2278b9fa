"""Small histories, each with the whole state that it leads to: disk operations in their order, WAL frames, manifest
rows, and what a restart finds, field by field (`state_text`).

The expected texts are in `states/`. After an intended change, write them again with `python -m
tests.unit.engine.test_states` and read the difference: every line of it is a decision that has changed.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
from tests.unit.engine.harness import CLASSES, TINY
from tests.unit.engine.state_text import Recorder

from tidelog.engine import Topic, checkpoint, recovery
from tidelog.testing import SimDisk

FOLDER: Final = Path(__file__).parent / "states"
ROOMY: Final[dict[str, Any]] = {**TINY, "wal_file_bytes": 1 << 14}  # the WAL stays in one file

History = Callable[[], Recorder]
HISTORIES: Final[dict[str, History]] = {}


def history(run: History) -> History:
    HISTORIES[run.__name__] = run
    return run


@contextmanager
def constants(module: Any, **values: object) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def files_of(disk: SimDisk, *parts: str) -> list[str]:
    return [path for path in disk.tree() if all(part in path for part in parts)]


def lose(disk: SimDisk, path: str) -> None:
    disk.remove(path)
    disk.sync_dir(path.rpartition("/")[0])


def flip(disk: SimDisk, content: bytes, *parts: str) -> None:
    """Turn one bit over in the first file that has these bytes."""
    path = next(path for path in files_of(disk, *parts) if content in disk.read_file(path))
    disk.flip_bit(path, disk.read_file(path).index(content), 1)


def append(run: Recorder, topic: Topic, *batches: object, **options: Any) -> None:
    """Append each batch, 10 ms apart."""
    for batch in batches:
        topic.append(batch, **options)
        run.world.clock.tick(10)


# ── checkpoints ───────────────────────────────────────────────────────────────────────────────────


@history
def one_topic() -> Recorder:
    """Segments fill, grow, are sealed and dropped; deletes before and after their records have files."""
    run = Recorder(**ROOMY)
    topic = run.log.topic("a", durability="fsync", cap_records=9)
    append(run, topic, [b"1", b"2", b"3"], [b"4", b"5"], b"6", tag="t")
    topic.delete(seqs=[2])
    run.step("first checkpoint", run.log.checkpoint)
    run.state()
    append(run, topic, b"7", [b"8", b"9"])
    topic.delete(seqs=[3, 6, 8])
    run.step("second checkpoint: the last segment grows", run.log.checkpoint)
    run.step("third checkpoint: nothing is new", run.log.checkpoint)
    append(run, topic, *([b"%d" % number] for number in range(10, 16)))
    topic.delete(before_seq=5)
    run.state()
    run.step("fourth checkpoint: the first segment is obsolete", run.log.checkpoint)
    run.step("fifth checkpoint: its files go", run.log.checkpoint)
    run.step("sixth checkpoint", run.log.checkpoint)
    run.restart("kill")
    append(run, run.log.topic("a"), b"16")
    run.restart("crash")
    run.restart("reopen")
    return run


@history
def all_classes() -> Recorder:
    """One topic of each durability class with caps, ages, jumps of seqs, and a drop."""
    run = Recorder(**ROOMY, wal_shards=2)
    topics = [run.log.topic(name, durability=name, cap_records=5, ttl_ms=1_000) for name in CLASSES]
    for topic in topics:
        append(run, topic, [b"1", b"2"], [b"3", b"4", b"5"], b"6", b"7")
    run.step("tick", run.log.tick)
    run.step("checkpoint", run.log.checkpoint)
    run.state()
    run.world.clock.tick(900)
    for topic in topics:
        append(run, topic, b"8")
    run.world.clock.tick(100)
    run.step("expire", run.log.tick)
    run.step("readers", lambda: [topic.read(0) for topic in topics])
    run.look("reader", run.disk, read_only=True)
    run.restart("kill")
    run.step("drop", lambda: run.log.drop("memory"))
    run.step("checkpoint", run.log.checkpoint)
    run.restart("crash")
    run.world.clock.tick(5_000)
    run.step("everything expires", run.log.tick)
    run.step("checkpoint", run.log.checkpoint)
    run.step("checkpoint", run.log.checkpoint)
    run.restart("reopen")
    return run


def fill_row(run: Recorder) -> None:
    """Everything that a manifest row can hold."""
    log = run.log
    topic = log.topic("a", durability="fsync", cap_records=8)
    append(run, topic, [b"1", b"2", b"3"])
    log.topic("b", durability="fsync", cap_records=3)
    log.router("r", "a", "b")
    log.queue("jobs", durability="fsync", leases_durable=True)
    append(run, topic, b"4")
    log.tick()
    log.topic("a", cap_bytes=5_000)
    topic.append_numbered([pa.table({"data": [b"x", b"y"]})], writer="etl", number=7, sum=(1, 2))
    append(run, topic, b"once", key="a key")
    append(run, topic, [b"z"] * 5)
    topic.delete(seqs=[10])
    topic.group("g").commit(9)
    topic.group("held").begin("earliest", hold_bytes=1_000)
    jobs = log.queue("jobs", create=False)
    jobs.put([b"one", b"two", b"three"])
    _, second = jobs.claim("node", 2)
    jobs.nack("node", [second.seq], delay_ms=60_000)
    append(run, topic, [b"w"] * 3)
    log.tick()


@history
def full_rows() -> Recorder:
    run = Recorder(**ROOMY)
    run.step("writes", lambda: fill_row(run))
    run.look("replayed from the WAL alone", run.disk.reboot())
    run.step("checkpoint", run.log.checkpoint)
    run.state()
    run.restart("kill")
    run.step("checkpoint", run.log.checkpoint)
    append(run, run.log.topic("a"), b"more", key="other key")
    run.look("reader", run.disk, read_only=True)
    run.restart("reopen")
    return run


@history
def topics_that_are_left_out() -> Recorder:
    """The files of one topic cannot be written: its row stays, and replay of its shard begins where it did."""
    run = Recorder(**ROOMY, wal_shards=2)
    log = run.log
    topics = {name: log.topic(name, durability="fsync", cap_records=6) for name in ("a", "b", "c")}
    log.router("r", "a", "b")
    for topic in topics.values():
        append(run, topic, [b"1", b"2", b"3"])
    place = f"topics/{topics['b'].id:08X}/"
    run.disk.fail("create", error=errno.EIO, path=place, times=None)
    run.step("first checkpoint: a new topic is left out", log.checkpoint)
    run.state()
    run.look("after that", run.disk.reboot())
    run.disk.clear_faults()
    run.step("second checkpoint", log.checkpoint)
    for topic in topics.values():
        append(run, topic, [b"4", b"5"], b"6", b"7", b"8")
        topic.delete(seqs=[topic.head_seq - 1])
    log.topic("c", cap_records=5)
    run.disk.fail("write", error=errno.EIO, path=place, times=None)
    run.step("third checkpoint: a known topic is left out", log.checkpoint)
    run.look("after that", run.disk.reboot())
    run.look("after a power cut", run.disk.crash_image("none"))
    append(run, topics["b"], b"9")
    append(run, topics["c"], b"9")
    run.step("fourth checkpoint: again", log.checkpoint)
    run.step("drop", lambda: log.drop("b"))
    run.step("fifth checkpoint", log.checkpoint)
    run.disk.clear_faults()
    run.disk.fail("create", error=errno.EIO, path="topics/", times=None)
    for name in ("a", "c"):
        append(run, topics[name], *([b"10"] * 6))
    run.step("sixth checkpoint: no topic can be written", log.checkpoint)
    run.disk.clear_faults()
    run.restart("kill")
    run.step("seventh checkpoint", run.log.checkpoint)
    return run


@history
def without_space_for_copies() -> Recorder:
    """`copy=False`: segments without live records go; topics of which replay needs increments are left out."""
    run = Recorder(**ROOMY)
    log = run.log
    names = ("plain", "source", "target", "held", "copied")
    topics = {name: log.topic(name, durability="fsync") for name in names}
    log.router("r", "source", "target")
    jobs = log.queue("jobs", durability="fsync")
    topics["held"].group("g").begin("earliest", hold_bytes=1_000)
    for topic in topics.values():
        append(run, topic, [b"1", b"2", b"3", b"4"], [b"5", b"6", b"7", b"8"])
    jobs.put([b"j"] * 8)
    log.tick()
    for _ in range(2):
        log.checkpoint()
    for topic in topics.values():
        topic.delete(before_seq=5)
        if topic is not topics["copied"]:
            append(run, topic, b"9")
    log.topic("plain", cap_records=100)
    jobs.put([b"j"])
    run.step("without copies", lambda: log._checkpoints._run(final=False, copy=False))
    run.state()
    run.step("without copies, the second time", lambda: log._checkpoints._run(final=True, copy=False))
    run.look("after that", run.disk.reboot())
    run.step("with copies", log.checkpoint)
    run.restart("crash")
    return run


@history
def damaged_segments() -> Recorder:
    """What a checkpoint makes of files that lost something since they were written."""
    run = Recorder(**{**ROOMY, "segment_events_max": 6})
    log = run.log
    names = ("data", "index", "both", "deletions", "footer", "fine")
    topics = {name: log.topic(name, durability="fsync") for name in names}
    for topic in topics.values():
        append(run, topic, [b"1", b"2"], [b"3"])
        topic.delete(seqs=[2])
    log.checkpoint()
    run.restart("kill")
    topics = {name: run.log.topic(name) for name in names}
    for topic in topics.values():
        append(run, topic, b"4")
    for name, suffixes in (
        ("data", [".data"]),
        ("index", [".idx"]),
        ("both", [".data", ".idx"]),
        ("deletions", [".del"]),
    ):
        for suffix in suffixes:
            path = files_of(run.disk, f"topics/{topics[name].id:08X}", suffix)[0]
            run.disk.write_file(path, run.disk.read_file(path)[:-1])
    flip(run.disk, b"3", f"topics/{topics['footer'].id:08X}", ".data")
    run.step("checkpoint", run.log.checkpoint)
    run.state()
    for topic in topics.values():
        append(run, topic, b"5", b"6", b"7", b"8")
    run.step("checkpoint: segments are sealed", run.log.checkpoint)
    run.state()
    run.restart("kill")
    return run


@history
def damaged_before_the_start() -> Recorder:
    """The same losses, which recovery finds; a deletion vector that does not read; then more records and a delete."""
    run = Recorder(**{**ROOMY, "segment_events_max": 4})
    names = ("data", "index", "deletions", "missing", "fine")
    ids = {}
    for name in names:
        topic = run.log.topic(name, durability="fsync")
        append(run, topic, [b"1", b"2"], [b"3", b"4"], b"5", b"6", b"7")
        topic.delete(seqs=[2, 6])
        ids[name] = f"topics/{topic.id:08X}"
    run.log.checkpoint()
    disk = run.disk.reboot()
    for name, suffix in (("data", ".data"), ("index", ".idx"), ("deletions", ".del")):
        for path in files_of(disk, ids[name], suffix):
            disk.write_file(path, disk.read_file(path)[:-1])
    for path in files_of(disk, ids["missing"], ".del"):
        lose(disk, path)
    run.look("reader", disk, read_only=True)
    run.world.disk = disk
    run.restart("kill")
    for name in names:
        append(run, run.log.topic(name), b"8")
        run.step(f"delete in {name}", lambda name=name: run.log.topic(name).delete(seqs=[1, 7]))  # type: ignore[misc]
    run.step("checkpoint", run.log.checkpoint)
    run.state()
    run.restart("crash")
    return run


@history
def sealed_again() -> Recorder:
    """Leftovers of an attempt that failed: bytes after the records, a footer; an index that does not fit the data."""
    run = Recorder(**ROOMY)
    topics = [
        run.log.topic(name, durability="fsync") for name in ("longer", "index", "footer", "foreign", "longer_index")
    ]
    for topic in topics:
        append(run, topic, b"1", [b"2", b"3"], tag="t")
    run.log.checkpoint()
    for topic in topics:
        append(run, topic, b"4", b"5")
    for topic, suffix in zip(topics, (".data", ".idx", ".foot"), strict=False):
        path = files_of(run.disk, f"topics/{topic.id:08X}", ".data")[0].removesuffix(".data") + suffix
        before = run.disk.tree().get(path, b"")
        changed = before[:21] + b"\xff" + before[22:] if suffix == ".idx" else before + b"leftover bytes" * 10
        run.disk.write_file(path, changed)
    path = files_of(run.disk, f"topics/{topics[4].id:08X}", ".idx")[0]
    run.disk.write_file(path, run.disk.read_file(path) + bytes(200))
    mine, others = (files_of(run.disk, f"topics/{topic.id:08X}", ".data")[0] for topic in topics[2:4])
    run.disk.write_file(others, run.disk.read_file(mine))
    with constants(checkpoint, _COPY_CHUNK_BYTES=30):
        run.step("checkpoint", run.log.checkpoint)
    run.state()
    run.restart("crash")
    return run


@history
def a_checkpoint_that_fails_late() -> Recorder:
    """Deletion vectors, the manifest or the removal of files fail: what is tried again."""
    run = Recorder(**ROOMY)
    topic = run.log.topic("a", durability="memory", cap_records=9)
    other = run.log.topic("b", durability="disk", ttl_ms=10_000)
    append(run, topic, *([b"1", b"2"] for _ in range(4)))
    append(run, other, *([b"1", b"2"] for _ in range(4)))
    run.log.checkpoint()
    topic.delete(seqs=[1, 2, 3, 4, 7])
    for call, place in (("rename", ".del"), ("sync", "snapshot"), ("rename", "snapshot")):
        append(run, topic, b"more")
        run.disk.fail(call, error=errno.EIO, path=place, times=1)  # type: ignore[arg-type]
        run.step(f"{call} of {place} fails", run.log.checkpoint)
        run.state()
        run.disk.clear_faults()
    run.step("checkpoint", run.log.checkpoint)
    run.disk.fail("remove", error=errno.EIO, path="seg-0000000000000001.idx", times=1)
    run.step("a file cannot be removed", run.log.checkpoint)
    run.state()
    run.step("the next one removes it", run.log.checkpoint)
    run.disk.fail("write", error=errno.EIO, path="/wal", times=1)
    run.step("marks cannot be written", run.log.checkpoint)
    run.disk.clear_faults()
    run.restart("crash")
    return run


@history
def routers() -> Recorder:
    """Rows of sources and targets: cursors, hops, trims, deletes that a router has not passed; a router that goes."""
    run = Recorder(**ROOMY)
    log = run.log
    source, target, last = (log.topic(name, durability="fsync", cap_records=5) for name in "sde")
    log.router("r", "s", "d")
    log.router("q", "d", "e")
    append(run, source, [b"1", b"2", b"3"])
    log.tick()
    append(run, source, [b"4", b"5", b"6", b"7", b"8", b"9", b"10"])
    run.step("checkpoint", log.checkpoint)
    append(run, source, [b"11", b"12", b"13", b"14", b"15", b"16", b"17"])
    source.delete(seqs=[15])
    run.look("before they ran", run.disk.reboot())
    run.step("tick", log.tick)
    append(run, target, b"direct")
    target.delete(seqs=[target.head_seq - 1])
    run.step("checkpoint", log.checkpoint)
    run.state()
    run.step("a router goes", lambda: log.drop_router("q"))
    append(run, source, b"18", b"19")
    last.delete(before_seq=last.head_seq)
    run.step("without copies", lambda: log._checkpoints._run(final=False, copy=False))
    run.restart("kill")
    run.step("checkpoint", run.log.checkpoint)
    run.restart("reopen")
    return run


@history
def damaged_wal_frames_are_copied() -> Recorder:
    """A frame that does not verify any more is copied as it is, in pieces, and reported."""
    run = Recorder(**{**ROOMY, "segment_events_max": 3})
    topic = run.log.topic("a", durability="fsync")
    append(run, topic, b"first", b"second", b"third", b"fourth", tag="t")
    append(run, run.log.topic("b", durability="fsync"), b"other", b"more")
    with constants(recovery, REPLAY_MEMORY_BYTES=0, _WAL_RANGE_BYTES_MIN=0, _PIECE_BYTES=64):
        run.restart("kill")
    flip(run.disk, b"second", "/wal")
    with constants(checkpoint, _COPY_CHUNK_BYTES=80):
        run.step("checkpoint", run.log.checkpoint)
    run.state()
    run.restart("kill")
    return run


@history
def a_full_disk() -> Recorder:
    """Partial copies are removed, whether their segment has files or not."""
    run = Recorder(**ROOMY)
    topic = run.log.topic("a", durability="fsync")
    append(run, topic, b"1", b"2", b"3")
    run.log.checkpoint()
    append(run, topic, b"4", b"5", b"6", b"7", b"8", b"9", tag="t")
    for at in range(1, 5):
        run.disk.clear_faults()
        run.disk.fail("sync_dir", error=errno.ENOSPC, path="topics/00000001", at=at)
        run.step(f"checkpoint: sync {at} of the directory fails", run.log.checkpoint)
        run.text.append("disk: " + " ".join(path for path in run.disk.tree() if "topics" in path))
    run.disk.clear_faults()
    run.step("checkpoint", run.log.checkpoint)
    run.restart("crash")
    return run


@history
def power_cuts_in_a_checkpoint() -> Recorder:
    """Before each operation: what a start finds there, in one line."""
    run = Recorder(**ROOMY)
    topic = run.log.topic("a", durability="fsync", cap_records=9)
    other = run.log.topic("b", durability="disk")
    for _ in range(2):
        append(run, topic, [b"1", b"2", b"3"], [b"4", b"5"], b"6", tag="t")
        append(run, other, b"1")
        topic.delete(seqs=[topic.head_seq - 1])
        run.log.checkpoint()
    images: list[SimDisk] = []
    run.disk.on_op = lambda _: images.append(run.disk.crash_image("all" if len(images) % 2 else "none"))
    run.step("checkpoint", run.log.checkpoint)
    run.disk.on_op = None
    for number, image in enumerate(images):
        before = len(image.tree())
        log = run.world.open(image)
        report, parts = log.report, [str(part.base) for part in log.topic("a")._state.index.parts]
        run.text.append(
            f"{number}: snapshot={report.snapshot} frames={report.frames} swept={len(report.swept)} "
            f"cut={len(report.cut)} files={before}→{len(image.tree())} parts={','.join(parts)} "
            f"count={log.topic('a').state().count}"
        )
    return run


# ── replay ────────────────────────────────────────────────────────────────────────────────────────


@history
def records_in_turns() -> Recorder:
    """Frames of two topics in turns, in segments that fill by records and by bytes, in memory and in the WAL."""
    run = Recorder(segment_events_max=5, segment_bytes_max=400, wal_file_bytes=1 << 14)
    topics = [run.log.topic(name, durability="fsync", cap_records=12) for name in "ab"]
    for number in range(12):
        append(run, topics[number % 3 % 2], [b"%d" % number * 10] * (1 + number % 4), tag="t" if number % 5 else None)
    topics[0].delete(seqs=[4, 9])
    append(run, topics[0], bytes(300), bytes(500), b"end")
    run.look("in memory", run.disk.reboot())
    with constants(recovery, REPLAY_MEMORY_BYTES=600, _WAL_RANGE_BYTES_MIN=100, _PIECE_BYTES=200):
        run.look("in memory and in the WAL", run.disk.reboot())
    with constants(recovery, REPLAY_MEMORY_BYTES=0, _WAL_RANGE_BYTES_MIN=0, _PIECE_BYTES=100):
        run.restart("kill")
    run.step("checkpoint", run.log.checkpoint)
    run.restart("crash")
    return run


@history
def shards_that_change() -> Recorder:
    run = Recorder(**TINY, wal_shards=2)
    for number in range(4):
        append(run, run.log.topic(f"t{number}", durability="fsync"), [b"1", b"2"], b"3")
    for shards in (1, 3, 3, 2):
        run.restart("kill", wal_shards=shards)
        for number in range(4):
            append(run, run.log.topic(f"t{number}"), bytes(100))
    run.disk.fail("create", error=errno.EIO, path="topics/00000002", times=None)
    run.step("a topic is left out", run.log.checkpoint)
    run.look("with one shard", run.disk.reboot(), wal_shards=1)
    run.disk.clear_faults()
    run.restart("reopen", wal_shards=1)
    return run


@history
def shards_that_change_while_a_topic_cannot_be_written() -> Recorder:
    """Old shards are kept until a checkpoint has everything."""
    run = Recorder(**ROOMY, wal_shards=2)
    for number in range(3):
        append(run, run.log.topic(f"t{number}", durability="fsync"), [b"1", b"2"], b"3")
    disk = run.disk.reboot()
    disk.fail("create", error=errno.EIO, path="topics/00000002", times=3)
    run.look("another number of shards", disk, wal_shards=1)
    disk.clear_faults()
    run.look("again", disk.reboot(), wal_shards=1)
    run.look("and with three", disk.reboot(), wal_shards=3)
    return run


@history
def lost_frames() -> Recorder:
    """One bit of one frame is wrong, later frames are there: what is served, reserved and reported."""
    run = Recorder(wal_file_bytes=1 << 14, head_reserve=4)
    log = run.log
    first = log.topic("first", durability="fsync", cap_records=5)
    second = log.topic("second", durability="disk")
    log.queue("jobs", durability="fsync", leases_durable=True).put([b"a job", b"another job"])
    append(run, first, b"record 1", b"record 2", [b"record 3", b"record 4"])
    append(run, second, b"other 1", b"other 2")
    log.queue("jobs", create=False).claim("a worker", 1)
    log.topic("first", cap_records=7)
    append(run, first, *(b"later %d" % number for number in range(5)))
    append(run, second, b"other 3")
    log.topic("third", durability="fsync").append(b"of the third")
    append(run, first, b"the end", b"after the end")
    for content in (
        b"record 2",
        b"record 4",
        b"other 2",
        b"a worker",
        b'"cap_records":7',
        b"later 0",
        b"third",
        b"the end",
    ):
        disk = run.disk.reboot()
        flip(disk, content, "/wal")
        run.look(f"lost: {content!r}", disk, read_only=True)
    disk = run.disk.reboot()
    for content in (b"record 2", b"other 2", b"later 3"):
        flip(disk, content, "/wal")
    run.look("three losses", disk.reboot(), read_only=True)
    run.look("a writer", disk.reboot())
    run.look("a writer that accepts it", disk, accept_loss=True)
    run.look("the next start", disk.reboot())
    return run


@history
def lost_files() -> Recorder:
    """Files of the WAL and of segments are missing."""
    run = Recorder(**TINY, wal_shards=2)
    for number in range(4):
        topic = run.log.topic(f"t{number}", durability="fsync")
        append(run, topic, *([bytes(200)] * 2 for _ in range(3)))
    for path in files_of(run.disk, "/wal", ".log")[:2]:
        disk = run.disk.reboot()
        lose(disk, path)
        run.look(f"without a manifest and {path.rpartition('/')[2]}", disk, read_only=True)
    run.step("checkpoint", run.log.checkpoint)
    for number in range(4):
        append(run, run.log.topic(f"t{number}"), *([bytes(200)] * 2 for _ in range(5)))
    paths = [*files_of(run.disk, "/wal", ".log"), *files_of(run.disk, "topics", "1.data"), *files_of(run.disk, "1.idx")]
    for path in paths:
        disk = run.disk.reboot()
        lose(disk, path)
        run.look(f"without {path.removeprefix('data/')}", disk, read_only=True)
    disk = run.disk.reboot()
    for path in files_of(disk, "/wal/shard-00"):
        lose(disk, path)
    run.look("without a shard", disk.reboot(), read_only=True)
    run.look("without a shard, for writing", disk, accept_loss=True)
    disk = run.disk.reboot()
    for path in files_of(disk, "snapshot"):
        disk.write_file(path, b"no manifest")
    run.look("no manifest reads", disk, read_only=True)
    return run


@history
def torn_tails() -> Recorder:
    """The last bytes of the WAL are missing: of a record, of a batch, of records with a key or a number, of copies."""
    run = Recorder(wal_file_bytes=1 << 14)
    log = run.log
    source, target = (log.topic(name, durability="memory") for name in ("a", "b"))
    log.router("r", "a", "b")
    append(run, source, b"1", [b"2", b"3"])
    append(run, source, b"with a key", key="k")
    source.append_numbered([pa.table({"data": [b"x", b"y"]})], writer="etl", number=1, sum=(1, 2))
    log.tick()
    append(run, target, b"end")
    (path,) = files_of(run.disk, "/wal/", ".log")
    content = run.disk.read_file(path)
    size = len(content.rstrip(b"\0"))
    for end in range(size - 20, 400, -45):
        disk = run.disk.reboot()
        disk.write_file(path, content[:end] + bytes(len(content) - end))
        for proof in files_of(disk, "/wal/SYNCED"):  # a power cut would have come before the sync
            lose(disk, proof)
        log = run.world.open(disk)
        run.text.append(f"── {end} bytes")
        run.text += [
            f"{name}: head={topic.index.head} batches={topic.producers.batches} "
            f"keys={topic.producers.keys.persistent_keys()}"
            for name, topic in ((topic.name, topic) for topic in log._topics.resident())
        ]
        run.text.append(f"frames={log.report.frames} cut={len(log.report.cut)} {log.report.damage}")
        run.text.append(f"routers={log.routers()}")
    return run


@pytest.mark.parametrize("name", HISTORIES)
def test_a_history_leads_to_the_expected_state(name: str) -> None:
    expected = (FOLDER / f"{name}.txt").read_text().splitlines()
    assert HISTORIES[name]().text == expected


def test_every_expected_state_has_a_history() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(HISTORIES)


if __name__ == "__main__":
    for name, run in HISTORIES.items():
        (FOLDER / f"{name}.txt").write_text("\n".join(run().text) + "\n")
