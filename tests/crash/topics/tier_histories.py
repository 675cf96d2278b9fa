"""Relocation and recall under power cuts: a history on a simulated disk beside a simulated store, judged at every
operation of either.

    store   `directory`: a directory of the same simulated disk, so that unsynced writes of both are lost in any mix
            `objects`: a store whose puts are durable at once, as that of S3

At every instant a monitor checks that one complete copy of each sealed segment exists, and each image that a power cut
could leave is opened, read and compared with what was acknowledged; then the interrupted work is repeated, cut off once
more, and repeated to its end, which must be the same as without a cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from xxhash import xxh3_64_intdigest

import tidelog
from tidelog import Database
from tidelog.database import engine_of
from tidelog.disk.segment_store import MARKER_KEY, DirectoryStore, SegmentStore
from tidelog.formats import cold_object
from tidelog.testing import ManualClock, PowerOff, SimDisk, SimStore

RECORDS = 6  # of a segment
ROOT, COLD = "/data", "/cold"
TOPICS = ("a", "b")


@dataclass(frozen=True, slots=True)
class Arrangement:
    store: Literal["directory", "objects"] = "directory"
    compression: Literal["none", "zstd"] = "none"
    shards: int = 1
    restarts: bool = False  # between the steps


@dataclass(slots=True)
class Model:
    """What was acknowledged (`must`) and what may be there besides (`may`), by topic and seq."""

    must: dict[str, dict[int, str]] = field(default_factory=lambda: {name: {} for name in TOPICS})
    may: dict[str, dict[int, str]] = field(default_factory=lambda: {name: {} for name in TOPICS})
    sealed: dict[tuple[str, str], int] = field(default_factory=dict)  # topic directory and name → XXH3-64 of its data

    def copy(self) -> Model:
        copied = Model()
        copied.must = {name: dict(rows) for name, rows in self.must.items()}
        copied.may = {name: dict(rows) for name, rows in self.may.items()}
        return copied


class Violation(BaseException):
    """A guarantee does not hold. No except clause of the engine catches it."""


class TierHarness:
    def __init__(self, arrangement: Arrangement) -> None:
        self.arrangement, self.disk, self.clock = arrangement, SimDisk(), ManualClock()
        self.disk.make_dir(COLD)
        self.objects = SimStore()
        self.model = Model()
        self.log: Database | None = None
        self.is_watched = False  # whether instants are judged: from the first relocation on

    def open(self, disk: SimDisk | None = None, objects: SimStore | None = None) -> Database:
        arrangement = self.arrangement
        store: SegmentStore = objects or self.objects
        if arrangement.store == "directory":
            store = DirectoryStore(disk or self.disk, COLD)
        return tidelog.open(
            ROOT,
            disk=disk or self.disk,
            clock=self.clock if disk is None else ManualClock(self.clock.now_us() + 1_000_000),
            threads=False,
            cold_store=store,
            wal_shards=arrangement.shards,
            segment_events_max=RECORDS,
            hot_retain_segments=1,
            cold_compression=arrangement.compression,
        )

    # ── the history ───────────────────────────────────────────────────────────────────────────

    def append(self, name: str, count: int = RECORDS) -> None:
        assert self.log is not None
        topic = self.log.topic(name, durability="fsync")
        first = topic.head_seq + 1
        rows = {first + i: f"{name}{first + i}" + "x" * 40 for i in range(count)}
        self.model.may[name] |= rows
        topic.append(list(rows.values()), tag=[f"t{seq % 3}" for seq in rows], meta={"k": "v"})
        self.model.must[name] |= rows

    def delete(self, name: str, seqs: list[int]) -> None:
        assert self.log is not None
        for seq in seqs:
            self.model.must[name].pop(seq, None)
        self.log.topic(name).delete(seqs=seqs)
        for seq in seqs:
            self.model.may[name].pop(seq, None)

    def checkpoint(self) -> None:
        assert self.log is not None
        self.log.checkpoint()
        self.note_sealed()

    def note_sealed(self) -> None:
        """Remember the data of sealed segments, for the monitor; forget those that are gone."""
        assert self.log is not None
        tree = self.disk.tree()
        live = {
            (f"{topic.id:08X}", f"seg-{part.base:016d}")
            for topic in engine_of(self.log)._list_topics()
            for part in topic.index.parts
            if getattr(part, "is_sealed", False) and topic.name in TOPICS
        }
        for path in tree:
            directory, _, name = path.rpartition("/")
            place = directory.rpartition("/")[2], name.removesuffix(".data")
            if path.startswith(f"{ROOT.strip('/')}/topics/") and name.endswith(".data") and place in live:
                self.model.sealed.setdefault(place, xxh3_64_intdigest(tree[path]))
        self.model.sealed = {place: digest for place, digest in self.model.sealed.items() if place in live}

    def relocate(self, *, keep: int | None = None) -> None:
        """Relocate without the checkpoints that follow."""
        assert self.log is not None
        engine = engine_of(self.log)
        engine._tiers.relocate(engine._list_topics(), keep_segments=keep)

    def recall(self, first: int = 0, last: int | None = None) -> None:
        assert self.log is not None
        engine = engine_of(self.log)
        engine._tiers.recall(engine._list_topics(), first, last)

    def restart(self) -> None:
        if self.arrangement.restarts:
            assert self.log is not None
            self.log.close()
            self.log = self.open()

    def run(self) -> None:
        self.log = self.open()
        for _ in range(3):
            self.append("a")
        self.append("b", RECORDS + 1)
        self.delete("a", [2])
        self.checkpoint()
        self.is_watched = True
        self.relocate()
        self.delete("a", [3, 8])  # after the flip, before a manifest has it
        self.checkpoint()
        self.restart()
        self.append("a")
        self.checkpoint()
        self.checkpoint()
        self.relocate()
        self.recall(last=RECORDS)
        self.delete("a", [4])
        self.checkpoint()
        self.restart()
        self.checkpoint()
        self.relocate(keep=0)  # the recalled one too
        self.checkpoint()
        self.checkpoint()
        self.restart()
        self.delete("a", list(range(1, RECORDS + 1)))  # a whole segment
        self.checkpoint()
        self.checkpoint()
        self.relocate()  # deletes objects that are not named
        self.log.close()

    # ── what must hold ────────────────────────────────────────────────────────────────────────

    def check_copies(self) -> None:
        """The monitor: one complete copy of every sealed segment exists, as the process sees the disk and the store."""
        tree = self.disk.tree()
        objects = dict(self.objects.objects)
        if self.arrangement.store == "directory":
            prefix = f"{COLD.strip('/')}/"
            objects = {path.removeprefix(prefix): content for path, content in tree.items() if path.startswith(prefix)}
        for (directory, name), digest in self.model.sealed.items():
            hot = tree.get(f"{ROOT.strip('/')}/topics/{directory}/{name}.data")
            if hot is not None and xxh3_64_intdigest(hot) == digest:
                continue
            copies = [content for key, content in objects.items() if key.startswith(f"topics/{directory}/{name}.data")]
            if not any(digest in _digests(content) for content in copies):
                raise Violation(f"no complete copy of {directory}/{name}: {len(copies)} objects")

    def check_content(self, log: Database, model: Model, where: str) -> None:
        for name in TOPICS:
            topic = log.find(name)
            if topic is None and model.must[name]:
                raise Violation(f"{where}: topic {name} is gone")
            if topic is None:
                continue
            found: dict[int, str] = {}
            page = topic.read(limit=10_000)
            found.update({record.seq: record.data for record in page.records})
            missing = model.must[name].keys() - found.keys()
            if missing:
                raise Violation(f"{where}: {name} lost {sorted(missing)}")
            for seq, text in found.items():
                if model.may[name].get(seq) != text:
                    raise Violation(f"{where}: {name} has {seq}: {text[:20]}")

    def judge(self, disk: SimDisk, objects: SimStore, model: Model, where: str, random: Random, *, again: bool) -> None:
        """Open an image, read it, repeat the interrupted work and read it again."""
        log = self.open(disk, objects)
        self.check_content(log, model, f"{where}, opened")
        if again:  # cut off once more
            stop = disk.op_count + random.randrange(1, 60)
            disk.cut_power_at(stop)
            with suppress(PowerOff):
                log.relocate()
                log.close()
            del log
            survivors = list(disk.images(random=random))
            image = survivors[random.randrange(len(survivors))]
            log = self.open(image.disk, objects)
            disk = image.disk
            self.check_content(log, model, f"{where}, cut off again, {image.label}")
        log.relocate(keep_segments=0)
        for _ in range(2):  # the second manifest without an object lets it go
            log.checkpoint()
        engine_of(log)._tiers._due_ms = 0
        engine_of(log)._tiers.run()  # sweeps and deletes what is not needed
        self.check_content(log, model, f"{where}, relocated")
        named = {
            place.object.removeprefix(f"{log.tier_status().store}/") for place in log.segment_places() if place.object
        }
        store = engine_of(log)._tiers.store
        assert store is not None
        stored = {each.key for each in store.list()} - {MARKER_KEY}
        if stored != named:
            raise Violation(f"{where}: objects {sorted(stored ^ named)} are left over or missing")
        hot = [path for path in disk.tree() if path.startswith(f"{ROOT.strip('/')}/topics/") and path.endswith(".data")]
        sealed = [place for place in log.segment_places() if place.topic in TOPICS and place.tier != "cold"]
        if sealed:
            raise Violation(f"{where}: {sealed} are still on the disk: {hot}")
        log.close()


def _digests(content: bytes) -> Iterator[int]:
    yield xxh3_64_intdigest(content)
    if content.startswith(cold_object.MAGIC):
        with suppress(Exception):
            yield xxh3_64_intdigest(b"".join(cold_object.decode_object(content, "monitor")))


def sweep(arrangement: Arrangement, *, step: int, images: int, seed: int = 0) -> int:
    """Run the history and judge one instant in `step`, `images` of each. Returns the number of images. Raises Violation
    at the first that is wrong."""
    harness, random = TierHarness(arrangement), Random(seed)
    instants = judged = 0

    def examine() -> None:
        nonlocal instants, judged
        if not harness.is_watched:
            return
        harness.check_copies()
        instants += 1
        if instants % step != seed % step:
            return
        objects = SimStore()
        objects.objects = dict(harness.objects.objects)
        found = list(harness.disk.images(random=Random(instants)))
        for image in random.sample(found, min(images, len(found))):
            where = f"instant {instants}, {image.label}"
            copied = SimStore()
            copied.objects = dict(objects.objects)
            judged += 1
            harness.judge(image.disk, copied, harness.model.copy(), where, random, again=judged % 4 == 0)

    harness.disk.on_op = lambda _: examine()
    harness.objects.on_op = lambda _call, _key, _when: examine()
    harness.run()
    harness.disk.on_op = harness.objects.on_op = None
    examine()
    return judged
