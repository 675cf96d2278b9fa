"""Segments move to a cold store and back: every record stays readable, and the disk holds what it should."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import tidelog
from tidelog import Database
from tidelog.backup import restore
from tidelog.database import engine_of
from tidelog.disk.segment_store import MARKER_KEY, DirectoryStore
from tidelog.engine.check import check_directory
from tidelog.engine.erase import ErasureIncomplete
from tidelog.engine.tiers import Moved
from tidelog.errors import BadInput, Corrupt, Error, StoreDenied, StoreUnavailable, WrongStore
from tidelog.testing import DiskCall, ManualClock, SimDisk, SimStore, SyncMode

RECORDS = 10  # of a segment


class Machine:
    """A database without threads on a simulated disk, with a simulated store."""

    def __init__(self, **settings: object) -> None:
        self.disk, self.clock, self.store = SimDisk(), ManualClock(), SimStore()
        self.settings: dict[str, object] = {"segment_events_max": RECORDS, "wal_shards": 1, **settings}

    def open(self, **settings: object) -> Database:
        given: dict[str, object] = {"cold_store": self.store, **self.settings, **settings}
        return tidelog.open("/data", disk=self.disk, clock=self.clock, threads=False, **given)  # type: ignore[arg-type]

    def fill(self, log: Database, segments: int, topic: str = "orders", **fields: object) -> None:
        """Write whole segments, and one record more, so that the last one is sealed."""
        for number in range(segments):
            values = [{"n": number * RECORDS + i, "text": "x" * 50} for i in range(RECORDS)]
            log.topic(topic, durability="fsync").append(values, **fields)  # type: ignore[arg-type]
        log.checkpoint()

    def data_files(self) -> list[str]:
        return sorted(path for path in self.disk.tree() if path.endswith(".data"))

    def objects(self) -> list[str]:
        return sorted(key for key in self.store.objects if key != MARKER_KEY)


@pytest.fixture(params=["none", "zstd"])
def machine(request: pytest.FixtureRequest) -> Machine:
    return Machine(cold_compression=request.param, hot_retain_segments=1)


def values(log: Database, topic: str = "orders") -> list[int]:
    return [record.data["n"] for record in log.topic(topic).read(limit=100_000).records]


def test_old_segments_move_and_are_read(machine: Machine) -> None:
    with machine.open() as log:
        machine.fill(log, 5)
        moved = log.relocate()
        assert (moved.segments, moved.failed) == (4, ())
        assert len(machine.data_files()) == 1
        assert len(machine.objects()) == 4
        assert [place.tier for place in log.segment_places("orders")] == ["cold"] * 4 + ["hot"]
        assert values(log) == list(range(50))
        status = log.tier_status()
        assert (status.store, status.cold_segments, status.hot_segments) == ("sim://store", 4, 1)
    with machine.open() as log:
        assert values(log) == list(range(50))
    with machine.open(read_only=True) as log:
        assert values(log) == list(range(50))
        assert log.topic("orders", create=False).to_arrow().num_rows == 50


@pytest.mark.parametrize("whole", [False, True])
def test_erasure_reaches_objects_of_the_cold_store(machine: Machine, whole: bool) -> None:
    with machine.open() as log:
        machine.fill(log, 3, tag="t")
        log.topic("orders").append([{"n": 1000 + i, "text": "needle"} for i in range(RECORDS)], tag="secret")
        machine.fill(log, 2, tag="t")
        log.relocate()
        before = machine.objects()
        seqs = range(31, 41) if whole else range(33, 36)
        receipt = log.erase("orders", seqs=list(seqs))
        gone = set(before) - set(machine.objects())
        assert len(gone) == 1
        named = {file.path.removeprefix("sim://store/") for file in receipt.files}
        assert gone == named & set(before)
        assert not set(values(log)) & {1000 + seq - 31 for seq in seqs}
        assert len(values(log)) == 60 - len(seqs)
        held = b"".join([*machine.disk.tree().values(), *machine.store.objects.values()])
        assert (b'{"n":1003,' in held) is False
    with machine.open() as log:
        assert len(values(log)) == 60 - len(seqs)
        assert log.verify_erasures(receipt).ok


def test_an_object_that_is_not_compressed_is_the_data_file() -> None:
    machine = Machine(hot_retain_segments=0)
    with machine.open() as log:
        machine.fill(log, 2)
        files = [machine.disk.tree()[path] for path in machine.data_files()]
        log.relocate()
    assert [machine.store.objects[key] for key in machine.objects()] == files


def test_the_file_stays_until_two_manifests_name_the_object(machine: Machine) -> None:
    with machine.open() as log:
        machine.fill(log, 3)
        engine_of(log)._tiers.relocate(engine_of(log)._list_topics())
        assert len(machine.objects()) == 2
        for _ in range(2):
            assert [place.tier for place in log.segment_places("orders")] == ["both", "both", "hot"]
            assert len(machine.data_files()) == 3
            log.checkpoint()
        assert len(machine.data_files()) == 1


def test_relocation_resumes_after_a_restart_between_two_manifests(machine: Machine) -> None:
    with machine.open() as log:
        machine.fill(log, 3)
        engine_of(log)._tiers.relocate(engine_of(log)._list_topics())
        log.checkpoint()
    with machine.open() as log:
        assert len(machine.data_files()) == 3
        assert values(log) == list(range(30))
        log.checkpoint()
        log.checkpoint()
        assert len(machine.data_files()) == 1
        assert values(log) == list(range(30))


def test_recall_brings_segments_back_for_good(machine: Machine) -> None:
    with machine.open() as log:
        machine.fill(log, 5)
        log.relocate()
        assert log.recall("orders", first_seq=11, last_seq=20).segments == 1
        assert [place.tier for place in log.segment_places("orders")] == ["cold", "hot", "cold", "cold", "hot"]
        assert values(log) == list(range(50))
        machine.clock.tick(10_000)
        engine_of(log)._context.sealed_topics.add(engine_of(log)._list_topics()[0])
        engine_of(log)._tiers.run()
        assert len(machine.objects()) == 3, "the object that is not needed is deleted, and the segment stays"
    with machine.open() as log:
        assert [place.is_recalled for place in log.segment_places("orders")] == [False, True, False, False, False]
        assert values(log) == list(range(50))
        assert log.relocate().segments == 1
        assert [place.tier for place in log.segment_places("orders")] == ["cold"] * 4 + ["hot"]
        assert values(log) == list(range(50))
        assert log.recall().segments == 4
        assert len(machine.data_files()) == 5
        assert values(log) == list(range(50))


def test_a_recall_before_the_file_is_removed_keeps_it(machine: Machine) -> None:
    with machine.open() as log:
        machine.fill(log, 3)
        engine_of(log)._tiers.relocate(engine_of(log)._list_topics())
        log.checkpoint()
        log.recall()
        for _ in range(3):
            log.checkpoint()
        assert len(machine.data_files()) == 3
        assert values(log) == list(range(30))
        engine_of(log)._tiers.relocate([], keep_segments=0)
        assert machine.objects() == []


def test_what_is_read_after_a_recall_is_what_is_on_the_disk(machine: Machine) -> None:
    """No block of the object is served from a cache once the segment is back."""
    with machine.open() as log:
        machine.fill(log, 3)
        log.relocate()
        assert values(log) == list(range(30))
        log.recall()
        machine.store.objects.clear()
        assert values(log) == list(range(30))


def test_a_recall_that_the_store_ends_keeps_what_came_back(machine: Machine) -> None:
    """The manifests are saved for the segments that were recalled before."""
    with machine.open() as log:
        machine.fill(log, 5)
        log.relocate()
        reads: list[str] = []

        def fail_at_the_third(call: str, key: str, when: str) -> None:
            if (call, when) == ("read", "before") and key not in reads:
                reads.append(key)
                if len(reads) == 3:
                    machine.store.fail("read")

        machine.store.on_op = fail_at_the_third
        with pytest.raises(StoreUnavailable):
            log.recall("orders")
        machine.store.on_op = None
        assert log.tier_status().recalled == 2
        machine.store.heal()
        crashed = machine.disk.crash_image()
    machine.disk = crashed
    with machine.open() as log:
        assert [place.is_recalled for place in log.segment_places("orders")] == [True, True, False, False, False]
        assert [place.tier for place in log.segment_places("orders")] == ["hot", "hot", "cold", "cold", "hot"]
        assert values(log) == list(range(50))


def test_a_relocation_that_the_store_ends_keeps_what_it_moved(machine: Machine) -> None:
    with machine.open() as log:
        machine.fill(log, 5)
        puts: list[str] = []

        def fail_at_the_third(call: str, key: str, when: str) -> None:
            if (call, when) == ("put", "before") and key != MARKER_KEY:
                puts.append(key)
                if len(puts) == 3:
                    machine.store.fail("put", times=1)

        machine.store.on_op = fail_at_the_third
        with pytest.raises(StoreUnavailable):
            log.relocate("orders")
        assert [place.tier for place in log.segment_places("orders")] == ["cold", "cold", "hot", "hot", "hot"]
        assert len(machine.data_files()) == 3
        assert values(log) == list(range(50))


def test_reads_of_the_cold_tier_fail_without_the_store_and_nothing_else_does(machine: Machine) -> None:
    with machine.open() as log:
        topic = log.topic("orders", cap_records=45)
        machine.fill(log, 4, meta={"kind": "order"}, tag="t1")
        log.relocate()
        machine.store.fail()
        with pytest.raises(StoreUnavailable, match=r"connection was reset.*retry"):
            topic.read()
        assert [record.data["n"] for record in topic.read(30).records] == list(range(30, 40))
        machine.fill(log, 1, meta={"kind": "order"}, tag="t2")  # evicts from the cold tier, measured by `.siz`
        assert topic.count == 45
        assert topic.delete(seqs=[12, 13]).deleted == 2
        assert topic.delete(match="t1").deleted == 33
        log.checkpoint()
        assert topic.seek(0) == 41
        assert topic.bytes == 10 * (len('{"n":4,"text":""}') + 50 + len('{"kind":"order"}'))
    with machine.open() as log:
        assert log.topic("orders").count == 10
        assert values(log) == list(range(10))


def test_deletes_before_and_after_relocation_are_effective(machine: Machine) -> None:
    with machine.open() as log:
        machine.fill(log, 3, tag=[f"t{i}" for i in range(RECORDS)])
        log.topic("orders").delete(seqs=[1, 15])
        log.relocate()
        log.topic("orders").delete(seqs=[2, 16])
        log.topic("orders").delete(match="t9")
        expected = [n for n in range(30) if n + 1 not in (1, 2, 15, 16) and n % 10 != 9]
        assert values(log) == expected
        log.checkpoint()
    with machine.open() as log:
        assert values(log) == expected
        log.recall()
        assert values(log) == expected


def test_a_damaged_object_loses_what_is_damaged_and_says_so() -> None:
    machine = Machine(hot_retain_segments=0)
    with machine.open() as log:
        for n in range(RECORDS):
            log.topic("orders", durability="fsync").append({"n": n})
        log.topic("orders").seal()
        log.topic("orders").append({"n": RECORDS})
        log.relocate()
        [key] = machine.objects()
        machine.store.damage(key, len(machine.store.objects[key]) // 2)
        with pytest.raises(Corrupt) as raised:
            log.topic("orders").read()
        bad = raised.value.seq
        assert bad is not None
        assert len(log.topic("orders").read(0, bad - 1).records) == bad - 1
        assert [record.data["n"] for record in log.topic("orders").read(bad).records] == list(range(bad, RECORDS + 1))
        assert log.health().corruptions


@pytest.mark.parametrize("harm", ["lose", "truncate", "damage"])
def test_a_bad_object_is_an_error_of_its_records(machine: Machine, harm: str) -> None:
    with machine.open() as log:
        machine.fill(log, 4)
        log.relocate()
        key = machine.objects()[1]
        {
            "lose": lambda: machine.store.lose(key),
            "truncate": lambda: machine.store.truncate(key, 20),
            "damage": lambda: machine.store.damage(key, 30),
        }[harm]()
        assert len(log.topic("orders").read(0, 10).records) == 10
        with pytest.raises(Corrupt):
            log.topic("orders").read(10)
        assert len(log.topic("orders").read(20).records) == 20
        failed = log.recall("orders").failed
        assert [(name, base) for name, base, _ in failed] == [("orders", 11)]
        with pytest.raises(Corrupt):
            log.topic("orders").read(10)


def test_a_damaged_file_is_read_from_its_object(machine: Machine) -> None:
    with machine.open() as log:
        machine.fill(log, 3)
        engine_of(log)._tiers.relocate(engine_of(log)._list_topics())
        log.checkpoint()
        path = machine.data_files()[0]
    damaged = bytearray(machine.disk.tree()[path])
    damaged[60] ^= 1
    machine.disk.write_file(path, bytes(damaged))
    with machine.open() as log:
        assert values(log) == list(range(30))


def test_an_object_that_does_not_verify_is_never_named(machine: Machine) -> None:
    with machine.open() as log:
        machine.fill(log, 3)

        def damage(call: str, key: str, when: str) -> None:
            if (call, when) == ("put", "after") and key != MARKER_KEY:
                machine.store.damage(key, 9)

        machine.store.on_op = damage
        moved = log.relocate()
        machine.store.on_op = None
        assert moved.segments == 0
        assert [base for _, base, _ in moved.failed] == [1, 11]
        assert len(machine.data_files()) == 3
        assert values(log) == list(range(30))
        assert log.relocate().segments == 2
        assert len(machine.objects()) == 2, "what did not verify is deleted"


def test_a_damaged_segment_stays_and_the_others_move(machine: Machine) -> None:
    with machine.open() as log:
        machine.fill(log, 3, "bad")
        machine.fill(log, 3, "good")
        path = machine.data_files()[0]
        damaged = bytearray(machine.disk.tree()[path])
        damaged[60] ^= 1
        machine.disk.write_file(path, bytes(damaged))
        engine_of(log)._context.mmap_cache.clear()
        machine.clock.tick(10_000)
        with pytest.raises(Corrupt):
            engine_of(log)._tiers.run()
        log.checkpoint()
        log.checkpoint()
        assert [place.tier for place in log.segment_places()] == ["hot", "cold", "hot", "cold", "cold", "hot"]
        assert log.tier_status().failures == 1


def test_what_retention_drops_is_deleted_from_the_store(machine: Machine) -> None:
    with machine.open() as log:
        machine.fill(log, 5)
        machine.fill(log, 3, "other")
        log.relocate()
        assert len(machine.objects()) == 6
        log.topic("orders").delete(before_seq=21)
        log.checkpoint()
        assert len(machine.objects()) == 6, "the manifest before still names them"
        log.checkpoint()
        log.relocate()
        assert len(machine.objects()) == 4
        log.drop("other")
        log.relocate()
        assert len(machine.objects()) == 2
    with machine.open() as log:
        assert values(log) == list(range(20, 50))


def test_objects_that_a_crash_left_are_deleted_at_the_next_start(machine: Machine) -> None:
    with machine.open() as log:
        machine.fill(log, 3)
        log.relocate()
        orphan = machine.objects()[0] + "0"
    machine.store.objects |= {orphan: b"left over", "topics/readme.txt": b"not ours", "notes/x": b"not ours"}
    with machine.open() as log:
        machine.clock.tick(10_000)
        engine_of(log)._tiers.run()
        assert orphan not in machine.store.objects
        assert len([key for key in machine.objects() if key.startswith("topics/00")]) == 2
        assert {"topics/readme.txt", "notes/x"} <= set(machine.store.objects)
        assert values(log) == list(range(30))


def test_copies_keep_to_their_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relocation reads what it wrote, so it takes twice the time of a recall. 0.125 s follow each segment."""
    machine = Machine(hot_retain_segments=0, cold_rate_bytes=1_000)
    with machine.open() as log:
        machine.fill(log, 3)
        tiers, topics = engine_of(log)._tiers, engine_of(log)._list_topics()
        monkeypatch.setattr(tiers._stopped, "wait", lambda seconds: machine.clock.tick(round(seconds * 1000)))

        def seconds(move: Callable[[], Moved]) -> float:
            started_us = machine.clock.monotonic_us()
            done = move()
            assert done.segments == 3
            passed_s = (machine.clock.monotonic_us() - started_us) / 1e6
            return (passed_s and passed_s - 3 * 0.125) / (done.bytes / 1_000)

        assert seconds(lambda: tiers.relocate(topics, throttled=True)) == pytest.approx(2, rel=0.01)
        for _ in range(3):  # until no manifest needs the files
            log.topic("orders").append({"n": 0})
            log.checkpoint()
        assert seconds(lambda: tiers.recall(topics, throttled=True)) == pytest.approx(1, rel=0.01)
        assert seconds(lambda: tiers.relocate(topics)) == 0


def test_the_data_of_a_large_record_stays_on_the_disk(machine: Machine) -> None:
    with machine.open(hot_retain_segments=0) as log:
        large = log.topic("orders", max_record_bytes=1 << 20, durability="fsync")
        large.append_stream([b"x" * 300_000])
        machine.fill(log, 3)
        assert log.relocate().segments == 3
        assert [path for path in machine.disk.tree() if path.endswith(".blob")]
        assert sum(map(len, machine.store.objects.values())) < 10_000
    with machine.open() as log:
        machine.store.fail()
        with pytest.raises(StoreUnavailable):  # where the frame is that names the blob
            log.topic("orders").open_record(1)
        machine.store.heal()
        with log.topic("orders").open_record(1) as data:
            machine.store.fail()
            assert data.read() == b"x" * 300_000


def test_queues_and_records_before_a_router_stay() -> None:
    machine = Machine(hot_retain_segments=0)
    with machine.open() as log:
        log.queue("jobs")
        log.topic("jobs").append([{"n": n} for n in range(30)])
        log.topic("jobs").seal()
        machine.fill(log, 3)
        assert {place.topic for place in log.segment_places() if place.tier == "hot"} >= {"jobs"}
        log.relocate()
        assert all(place.tier == "hot" for place in log.segment_places("jobs"))
        assert {place.tier for place in log.segment_places("orders")} == {"cold"}
        assert not any(place.object for place in log.segment_places() if place.topic.startswith("_tidelog."))


@pytest.mark.parametrize(
    ("segments", "size", "expected"),
    [(0, 0, 5), (2, 0, 3), (9, 0, 0), (9, 1, 5), (9, 1700, 3), (1, 1700, 4)],
)
def test_the_newest_segments_stay_on_the_disk(segments: int, size: int, expected: int) -> None:
    machine = Machine(hot_retain_segments=segments, hot_retain_bytes=size)
    with machine.open() as log:
        machine.fill(log, 5)
        assert log.relocate().segments == expected
    machine = Machine()
    with machine.open() as log:
        log.topic("orders", hot_retain_segments=segments, hot_retain_bytes=size)
        machine.fill(log, 5)
        assert log.relocate().segments == expected


def test_without_a_store_nothing_moves() -> None:
    machine = Machine(hot_retain_segments=0)
    with machine.open(cold_store=None) as log:
        machine.fill(log, 3)
        with pytest.raises(BadInput, match="no cold store is configured"):
            log.relocate()
        with pytest.raises(BadInput, match="no cold store is configured"):
            log.recall()
        machine.clock.tick(10_000)
        log.tick()
        assert len(machine.data_files()) == 3
        assert log.tier_status().store is None


# Which store --------------------------------------------------------------------------------------------


def test_a_store_of_another_database_is_refused(machine: Machine) -> None:
    other = Machine()
    other.store = machine.store
    with other.open() as log:
        other.fill(log, 2)
    before = dict(machine.store.objects)
    with pytest.raises(WrongStore, match="belongs to another database"):
        machine.open()
    assert machine.store.objects == before
    with machine.open(cold_store=None) as log:
        machine.fill(log, 1)


def test_a_copy_of_a_database_reads_the_store_and_does_not_change_it(machine: Machine) -> None:
    with machine.open() as log:
        machine.fill(log, 3)
        log.relocate()
    copy = Machine(**machine.settings)
    copy.store = machine.store
    for path, content in machine.disk.tree().items():
        copy.disk.write_file(path, content)
    with machine.open() as log:
        log.relocate()  # takes a new claim
    objects = dict(machine.store.objects)
    with copy.open() as log:
        assert values(log) == list(range(30))
        log.topic("orders").delete(before_seq=100)
        for _ in range(3):
            log.checkpoint()
        with pytest.raises(WrongStore, match="taken over by another copy"):
            log.relocate()
        assert machine.store.objects == objects
        log.claim_cold_store()
        log.relocate()
        assert machine.objects() == [] or set(machine.objects()) < set(objects)
    with machine.open() as log, pytest.raises(WrongStore, match="taken over by another copy"):
        log.relocate()


def test_a_store_that_does_not_answer_is_refused_at_first_and_waited_for_later(machine: Machine) -> None:
    machine.store.fail(times=1, denied=True)
    with pytest.raises(StoreDenied, match="credentials are refused"):
        machine.open()
    machine.store.fail(times=1)
    with pytest.raises(StoreUnavailable, match="connection was reset"):
        machine.open()
    assert machine.store.objects == {}
    with machine.open() as log:
        machine.fill(log, 3)
        log.relocate()
    machine.store.fail()
    with machine.open() as log:
        machine.fill(log, 1)
        with pytest.raises(StoreUnavailable):
            log.relocate()
        machine.store.heal()
        assert log.relocate().segments == 1


def test_a_store_without_its_marker_is_refused(machine: Machine) -> None:
    with machine.open() as log:
        machine.fill(log, 3)
        log.relocate()
    machine.store.lose(MARKER_KEY)
    with machine.open() as log:
        with pytest.raises(WrongStore, match="has no marker, and 2 segments"):
            log.relocate()
        assert values(log) == list(range(30))
        log.claim_cold_store()
        log.relocate()


@pytest.mark.parametrize("address", ["ftp://host/x", "http://host/x", "nosuch://x"])
def test_an_address_of_no_store_is_refused(address: str) -> None:
    machine = Machine()
    with pytest.raises(BadInput):
        machine.open(cold_store=None, cold=address)
    assert machine.disk.tree() == {}


def test_a_reader_finds_the_store_by_itself(tmp_path: Path) -> None:
    data, cold = str(tmp_path / "data"), str(tmp_path / "cold")
    with tidelog.open(data, cold=cold, segment_events_max=10, hot_retain_segments=0) as log:
        for _ in range(3):
            log.topic("orders").append([{"n": n} for n in range(10)])
        log.relocate()
    assert len(list((tmp_path / "cold" / "topics").rglob("seg-*"))) == 3
    with tidelog.open(data, read_only=True) as log:
        assert len(log.topic("orders", create=False).read().records) == 30
        assert log.tier_status().store == cold
    with tidelog.open(data) as log:  # without the setting nothing moves, and everything reads
        assert len(log.topic("orders").read().records) == 30
        assert not log.tier_status().enabled


def test_a_reader_with_the_address_of_another_store_is_refused(tmp_path: Path) -> None:
    data, cold, other = (str(tmp_path / name) for name in ("data", "cold", "other"))
    for path, store in ((data, cold), (str(tmp_path / "theirs"), other)):
        with tidelog.open(path, cold=store, segment_events_max=10, hot_retain_segments=0) as log:
            log.topic("orders").append([{"n": n} for n in range(10)])
            log.relocate()
    for wrong, reason in ((str(tmp_path / "nothing"), "no marker"), (other, "another database")):
        with pytest.raises(WrongStore, match=rf"does not have the segments.*{reason}.*{cold}"):
            tidelog.open(data, read_only=True, cold=wrong)
        assert not (tmp_path / "nothing").exists()
    with tidelog.open(str(tmp_path / "plain")) as log:
        log.topic("orders").append(b"1")
    with tidelog.open(str(tmp_path / "plain"), read_only=True, cold=other) as log:
        assert log.tier_status().cold_segments == 0, "it never had a store"
    shutil.move(cold, tmp_path / "moved")
    with tidelog.open(data, read_only=True, cold=str(tmp_path / "moved")) as log:
        assert len(log.topic("orders", create=False).read().records) == 10


# A manifest that names objects is refused by versions that do not know them -------------------------------


def test_a_manifest_with_objects_has_a_higher_version(machine: Machine) -> None:
    def versions() -> set[int]:
        tree = machine.disk.tree()
        return {int.from_bytes(tree[path][4:8], "little") for path in tree if "snapshot." in path or "delta." in path}

    with machine.open() as log:
        machine.fill(log, 3)
        log.relocate()
        assert min(versions()) > 101, "which know nothing of objects"


# Rows T12 to T14 of the fault matrix: errors of the disks ---------------------------------------------------


@pytest.mark.parametrize("place", ["cold/", "data/topics", "data/meta"])
@pytest.mark.parametrize("call", ["create", "write", "sync", "rename", "sync_dir", "remove"])
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_an_error_of_a_disk_changes_nothing_and_a_retry_succeeds(
    place: str, call: DiskCall, at: int, error: int
) -> None:
    machine = Machine(hot_retain_segments=1)
    store = DirectoryStore(machine.disk, "/cold")
    with machine.open(cold_store=store) as log:
        machine.fill(log, 3, meta={"k": 1}, tag="t")
        machine.disk.fail(call, at=at, error=error, path=place)
        with suppress(Error, OSError):
            log.relocate()
        assert values(log) == list(range(30))
        log.topic("orders").append({"n": 30})
        machine.disk.clear_faults()
        log.relocate()
        assert [place.tier for place in log.segment_places("orders")] == ["cold", "cold", "hot"]
        assert values(log) == list(range(31))
    with machine.open(cold_store=store) as log:
        assert values(log) == list(range(31))


@pytest.mark.parametrize("mode", ["dropped", "reverted", "kept"])
def test_a_failed_sync_of_an_object_leaves_the_file(mode: SyncMode) -> None:
    machine = Machine(hot_retain_segments=1)
    store = DirectoryStore(machine.disk, "/cold")
    with machine.open(cold_store=store) as log:
        machine.fill(log, 3)
        machine.disk.fail_sync(mode, path="cold/", times=None)
        with pytest.raises(StoreUnavailable):
            log.relocate()
        assert len(machine.data_files()) >= 3
        assert values(log) == list(range(30))
    for image in machine.disk.images():
        with tidelog.open("/data", disk=image.disk, threads=False) as log:
            assert values(log) == list(range(30))


@pytest.mark.parametrize("full", [False, True])
def test_check_verifies_objects(full: bool, machine: Machine) -> None:
    with machine.open() as log:
        machine.fill(log, 5, meta={"k": 1})
        log.relocate()

    def findings() -> list[tuple[str, bool]]:
        found = check_directory("/data", disk=machine.disk, full=full, cold_store=machine.store)
        return [(finding.kind, finding.damage) for finding in found]

    assert findings() == []
    first, second, third, _ = machine.objects()
    machine.store.damage(first, 20)
    assert findings() == ([("cold", True)] if full else [])
    machine.store.lose(second)
    machine.store.truncate(third, 30)
    assert findings() == [("cold", True)] * (3 if full else 2)
    machine.store.fail()
    assert findings() == [("cold", False)] * 4, "not verified is not damaged"


# Beside the other work on segments ------------------------------------------------------------------------


def test_an_erasure_reaches_the_store(machine: Machine) -> None:
    with machine.open() as log:
        topic = log.topic("orders", durability="fsync")
        for _ in range(4):
            tags = ["gone" if i % 5 == 0 else "kept" for i in range(RECORDS)]
            topic.append([{"n": i, "text": "secret" if i % 5 == 0 else "open"} for i in range(RECORDS)], tag=tags)
        log.checkpoint()
        log.relocate()
        old = machine.objects()
        receipt = log.erase("orders", match="gone")
        assert {file.path for file in receipt.files} >= {f"sim://store/{key}" for key in old}
        assert not set(old) & set(machine.objects())
        log.relocate()
        assert len(topic.read().records) == 32
        if machine.settings["cold_compression"] == "none":
            assert not any(b"secret" in content for content in machine.store.objects.values())
        machine.store.fail()
        with pytest.raises(ErasureIncomplete, match=r"cold store|cannot be"):
            log.erase("orders", match="kept")


def test_a_rewrite_of_a_segment_in_the_store_deletes_its_object(machine: Machine) -> None:
    machine.settings |= {"rewrite_dead_bytes_min": 0, "rewrite_dead_percent": 1}
    with machine.open() as log:
        machine.fill(log, 3)
        log.relocate()
        log.topic("orders").delete(seqs=list(range(2, 9)))
        assert len(log.rewrite("orders").files) == 1
        for _ in range(2):
            log.checkpoint()
        log.relocate()
        assert [place.tier for place in log.segment_places("orders")] == ["cold", "cold", "hot"]
        assert len(machine.objects()) == 2
        assert [record.seq for record in log.topic("orders").read().records] == [1, *range(9, 31)]


def test_a_backup_has_the_data_of_segments_in_the_store(tmp_path: Path) -> None:
    data, cold, target, restored = (str(tmp_path / name) for name in ("data", "cold", "backup", "restored"))
    with tidelog.open(data, cold=cold, segment_events_max=10, hot_retain_segments=0) as log:
        for _ in range(3):
            log.topic("orders").append([{"n": n} for n in range(10)])
        log.relocate()
        log.backup(target)
    shutil.rmtree(cold)
    restore(target, restored)
    with tidelog.open(restored) as log:
        assert len(log.topic("orders").read().records) == 30
        assert log.tier_status().cold_segments == 0
