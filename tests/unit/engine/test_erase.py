"""Erasure: records are deleted and their bytes removed from every file, with a receipt (D3, E6)."""

from __future__ import annotations

import hashlib
from random import Random
from typing import Any

import msgspec
import pytest
from tests.unit.engine.harness import PATH, EngineHarness
from tests.unit.engine.test_rewrite import SMALL, no_damage, rows_of

from tidelog.engine import Engine, Topic
from tidelog.engine.erase import ErasedFile, ErasureIncomplete, ErasureReceipt, verify_chain
from tidelog.engine.segment import Segment
from tidelog.errors import BadInput, ReadOnly, TopicNotFound
from tidelog.testing import SimDisk

NEEDLE = b"needle"


def holds_needle(disk: SimDisk) -> list[str]:
    return [path for path, content in disk.tree().items() if NEEDLE in content]


def write_needles(topic: Topic) -> list[int]:
    """Records of every form with the needle in data, tag, node and meta, among others that stay; return their seqs."""
    gone = topic.append(b"needle-1", tag="needle-tag", node="needle-node", meta={"needle": "needle-meta"}).first_seq
    topic.append({"stays": 1}, tag="t")
    batch = topic.append(
        [b"stays", {"needle": 3}, b"stays too", b"needle-4"],
        tag=["t", "needle-tag", None, "needle-x"],
        node=["n", "needle-node", None, None],
        meta=[None, {"m": "needle-meta"}, {"k": 1}, None],
    )
    whole = topic.append([b"needle-5", b"needle-6"], tag="needle-tag", node="needle-node")
    topic.append(b"stays as well")
    return [gone, batch.first_seq + 1, batch.first_seq + 3, *whole.seqs]


PLACES = ("only in the WAL", "in the active segment", "in a sealed segment")


def move_to(place: str, log: Engine, topic: Topic) -> None:
    if place == "in a sealed segment":
        topic.seal()
        topic.append(b"next")
    if place != "only in the WAL":
        log.checkpoint()


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("durability", ["fsync", "disk", "memory"])
@pytest.mark.parametrize("place", PLACES)
def test_no_byte_of_an_erased_record_is_in_any_file(place: str, durability: str, shards: int) -> None:
    world = EngineHarness(wal_shards=shards)
    topic = world.log.topic("t", durability=durability)
    other = world.log.topic("other", durability=durability)
    other.append([b"of another topic"] * 3)
    seqs = write_needles(topic)
    move_to(place, world.log, topic)
    kept = [row for row in rows_of(topic) if row[0] not in seqs]
    assert holds_needle(world.disk)
    receipt = topic.erase(match="needle-*", actor="alice")
    assert holds_needle(world.disk) == []
    assert (receipt.records, receipt.records_before) == (len(seqs), 0)
    assert (receipt.first, receipt.last, receipt.actor) == (seqs[0], seqs[-1], "alice")
    assert rows_of(topic) == kept
    no_damage(world.disk)
    for how in ("kill", "reopen"):
        log = world.restart(how)
        assert rows_of(log.topic("t")) == kept
        assert len(rows_of(log.topic("other"))) == 3
        assert holds_needle(world.disk) == []
        assert log.erasures() == [receipt]
        assert log.verify_erasures(receipt).ok


def test_records_that_were_deleted_before_are_erased_as_well() -> None:
    world = EngineHarness(**SMALL)
    topic = world.log.topic("t")
    seqs = write_needles(topic)
    topic.seal()
    world.log.checkpoint()
    topic.delete(seqs=seqs[:3])
    world.log.checkpoint()
    receipt = topic.erase(seqs=seqs)
    assert (receipt.records, receipt.records_before, receipt.selected_by) == (2, 3, "seqs")
    assert holds_needle(world.disk) == []
    assert topic.erase(seqs=seqs).records == 0, "a second time finds nothing to delete"


def test_queue_jobs_and_dead_letters_and_copies_of_routers() -> None:
    world = EngineHarness()
    log = world.log
    log.topic("copies")
    log.topic("dead")
    queue = log.queue("q", max_deliveries=1, dead_letter="dead", lease_ms=100)
    topic = log.topic("q")
    log.router("r", "q", "copies")
    topic.append([b"needle-1", b"stays", b"needle-2"], tag=["needle-a", "t", "needle-b"])
    jobs = queue.claim("worker")
    assert jobs
    world.clock.tick(1000)
    assert queue.claim("worker", 5) is not None
    log.tick()
    receipt = topic.erase(match="needle-*")
    assert any("copies in 1 topic that routers" in text for text in receipt.not_reached)
    assert any("dead letters in the topic" in text for text in receipt.not_reached)
    for name in ("copies", "dead"):
        log.topic(name).erase(match="needle-*")
    assert holds_needle(world.disk) == []


@pytest.mark.parametrize("checkpoints", [0, 1, 3])
def test_idempotency_key_of_an_erased_write_is_forgotten(checkpoints: int) -> None:
    world = EngineHarness()
    topic = world.log.topic("t", durability="fsync")
    topic.append(b"needle", key="needle-key")
    for _ in range(checkpoints):  # the key is in a file of the manifest
        topic.append(b"stays")
        world.log.checkpoint()
    topic.append(b"stays", key="other-key")
    topic.erase(seqs=[1])
    assert holds_needle(world.disk) == []
    assert topic.append(b"stays", key="other-key").deduped


def test_blob_of_an_erased_large_record_is_removed_and_named() -> None:
    world = EngineHarness()
    topic = world.log.topic("t", durability="fsync")
    topic.append_stream([b"needle" * 60_000], tag="needle-tag")
    topic.append_stream([b"stays" * 60_000], tag="t")
    assert holds_needle(world.disk)
    receipt = topic.erase(match="needle-*")
    assert holds_needle(world.disk) == []
    assert [file.action for file in receipt.files if "/blobs/" in file.path] == ["removed"]
    assert [record.seq for record in topic.read().records] == [2]


def test_quarantine_is_removed_and_named() -> None:
    world = EngineHarness()
    topic = world.log.topic("t")
    topic.append(b"needle")
    world.disk.make_dir(f"{PATH}/quarantine")
    world.disk.write_file(f"{PATH}/quarantine/wal.1", b"needle that was cut")
    receipt = topic.erase(seqs=[1])
    assert holds_needle(world.disk) == []
    assert "quarantine/wal.1" in {file.path for file in receipt.files}


def test_receipt_names_every_file_with_both_checksums() -> None:
    world = EngineHarness(**SMALL)
    topic = world.log.topic("t")
    write_needles(topic)
    topic.seal()
    world.log.checkpoint()
    before = world.disk.tree()
    receipt = topic.erase(match="needle-*")
    files = {file.path: file for file in receipt.files}
    data = files[f"topics/00000001/seg-{1:016d}.data"]
    assert data.action == "rewritten"
    assert data.new_path == f"topics/00000001/seg-{1:016d}.g1.data"
    assert data.bytes == len(before[f"{PATH}/{data.path}"])
    assert data.new_bytes == len(world.disk.tree()[f"{PATH}/{data.new_path}"])
    assert data.new_xxh3 is not None
    assert data.xxh3 != data.new_xxh3
    assert {file.action for path, file in files.items() if path.startswith("wal/")} == {"removed"}
    assert {f"topics/00000001/seg-{1:016d}{suffix}" for suffix in (".data", ".idx", ".foot", ".tag")} <= set(files)
    assert receipt.selection_sha256 == hashlib.sha256(b"needle-*").hexdigest()
    assert msgspec.json.decode(receipt.to_json(), type=ErasureReceipt) == receipt
    (row,) = (entry for entry in world.log.gaps("t") if entry.cause == "erase")
    assert (row.records, row.about) == (0, receipt.to_json().decode())


def test_nothing_is_erased_for_bad_input() -> None:
    world = EngineHarness()
    topic = world.log.topic("t")
    topic.append(b"x", tag="a")
    for arguments in ({}, {"match": "a", "seqs": [1]}, {"match": 3}, {"seqs": ["1"]}):
        with pytest.raises(BadInput, match="nothing was"):
            topic.erase(**arguments)
    with pytest.raises(TopicNotFound):
        world.log.erase("none", match="a")
    with pytest.raises(ReadOnly):
        world.reader().topic("t", create=False).erase(match="a")
    assert len(rows_of(topic)) == 1


def test_damaged_segment_makes_an_erasure_incomplete() -> None:
    world = EngineHarness(**SMALL)
    topic = world.log.topic("t")
    write_needles(topic)
    topic.seal()
    world.log.checkpoint()
    (segment,) = (part for part in topic._state.index.parts if isinstance(part, Segment))
    world.disk.flip_bit(segment.path(".data"), segment.size - 20, 1)
    segment.unmap()
    for _ in range(2):
        with pytest.raises(ErasureIncomplete, match="no receipt was written"):
            topic.erase(match="needle-*")
    assert world.log.erasures() == []
    assert not world.log.health().ok


# ── the chain ─────────────────────────────────────────────────────────────────────────────────────


def three_receipts() -> tuple[EngineHarness, list[Any]]:
    world = EngineHarness()
    for name in ("a", "b", "a"):
        topic = world.log.topic(name)
        topic.append([b"x", b"y"], tag="t")
        world.clock.tick(5)
        topic.erase(match="t", actor="bob")
    return world, list(world.log._gap_log.read_erasures())


def test_chain_of_receipts_verifies() -> None:
    world, entries = three_receipts()
    assert verify_chain(entries) == (3, ())
    assert verify_chain(entries[1:]).ok, "the oldest may have been dropped by the cap"
    assert [receipt.number for receipt in world.log.erasures()] == [1, 2, 3]
    assert verify_chain([]).ok


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("field", ["records", "actor", "files", "previous", "ts_ms", "not_reached"])
def test_changed_receipt_is_found(field: str, number: int) -> None:
    _, entries = three_receipts()
    receipt = msgspec.json.decode(entries[number].about, type=ErasureReceipt)
    changes: dict[str, Any] = {"records": 0, "actor": "mallory", "previous": "0" * 64, "ts_ms": 1, "not_reached": ()}
    value = changes.get(field, (ErasedFile("x", "removed", 0, "0"),))
    changed = msgspec.structs.replace(receipt, **{field: value})
    for forged in (changed, msgspec.structs.replace(changed, hash=changed.computed_hash())):
        row = entries[number]._replace(about=forged.to_json().decode())
        found = verify_chain([*entries[:number], row, *entries[number + 1 :]], receipt)
        assert not found.ok, f"{field} of receipt {number + 1}"


def test_removed_and_swapped_rows_are_found() -> None:
    _, entries = three_receipts()
    first, second, third = entries
    assert not verify_chain([first, third]).ok
    assert not verify_chain([second, first, third]).ok
    assert not verify_chain([first, second._replace(topic="b2"), third]).ok
    assert not verify_chain([first, second._replace(about="{}"), third]).ok
    kept = msgspec.json.decode(third.about, type=ErasureReceipt)
    assert not verify_chain([first, second], kept).ok


# ── power cuts ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shards", [1, 2])
def test_erasure_survives_a_power_cut_at_every_disk_call(shards: int) -> None:
    """The records are there or all gone; others stay. After the recovery, which is cut short as well, repeating the
    erasure leaves no byte."""
    world = EngineHarness(**SMALL, wal_shards=shards)
    topic = world.log.topic("t", durability="fsync")
    seqs = write_needles(topic)
    world.log.checkpoint()
    seqs += write_needles(topic)
    before = rows_of(topic)
    after = [row for row in before if row[0] not in seqs]
    failed: list[str] = []
    seen: set[bytes] = set()

    def look(op: int) -> None:
        world.disk.on_op = None
        for keep in ("none", "all", Random(op)):
            disk = world.disk.crash_image(keep)
            if failed or disk.digest() in seen:
                continue
            seen.add(disk.digest())
            if op % 3 == 0:
                cut_again(disk, op)
            log = world.open(disk)
            found = rows_of(log.topic("t"))
            if log.report.damage or found not in (before, after):
                failed.append(f"before operation {op}: {log.report.damage} {[row[0] for row in found]}")
            elif log.erasures() and holds_needle(disk):
                failed.append(f"before operation {op}: there is a receipt, and bytes in {holds_needle(disk)}")
            elif op % 4 == 0:
                log.topic("t").erase(match="needle-*")
                if rows_of(log.topic("t")) != after or not log.verify_erasures().ok or holds_needle(disk):
                    failed.append(f"before operation {op}: repeated, something else is there: {holds_needle(disk)}")
        world.disk.on_op = look

    def cut_again(disk: SimDisk, op: int) -> None:
        """Cut the recovery short at one of its operations."""
        image = disk.reboot()

        def look_again(number: int) -> None:
            if number % 7 == op % 7:
                image.on_op = None
                rows = rows_of(world.open(image.crash_image("none")).topic("t"))
                if rows not in (before, after):
                    failed.append(f"before operation {op} and in the recovery before {number}")
                image.on_op = look_again

        image.on_op = look_again
        world.open(image)

    world.disk.on_op = look
    topic.erase(match="needle-*")
    world.disk.on_op = None
    assert not failed, failed[0]
    assert len(seen) > 40
    assert rows_of(topic) == after
