"""Tidelog's own formats, frozen. Every future version reads and writes exactly these bytes.

`tide/manifest.json` says what each `.hex` file holds. The vectors marked `spec` were published with
the layout; the others were made by a second encoder written from the drawings, never by the code under test.

Each vector is compared both ways, and then broken in every way one byte can be: cut at every length,
and every byte replaced by every other value. A broken vector is *detected* (a typed error or a fault),
or it still says the same, or it is a shorter log that ends cleanly between two frames. Anything else
would be content changed in silence, and there is none.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray
from tests.frames import FrameReader, encode_batch, record_kinds

from tidelog.engine.key_index import encode_key_index
from tidelog.engine.manifest import (
    Base,
    Change,
    Delta,
    GroupRow,
    Manifest,
    Positions,
    SegmentRow,
    TopicEntry,
    TopicRow,
)
from tidelog.errors import Corrupt, NewerFormat
from tidelog.formats import (
    batch,
    control_frames,
    frame,
    key_index,
    large_record,
    scan,
    sealed_segment,
    segment_index,
    small_files,
    tag_index,
)
from tidelog.formats.control_frames import Match, MatchOp, TopicMark
from tidelog.formats.rows import ScanStop, iter_records
from tidelog.types import Record

TS = 1_700_000_000_000
FOLDER = Path(__file__).parent / "tide"
MANIFEST: list[dict[str, Any]] = json.loads((FOLDER / "manifest.json").read_text())["vectors"]
GOLDEN = {row["name"]: bytes.fromhex("".join((FOLDER / f"{row['name']}.hex").read_text().split())) for row in MANIFEST}


POSITIONS = Positions((GroupRow("shard-00", 2, 640),), 12, (), (), 8)
ENTRY = TopicEntry(7, "events", 3, 42, b"the row of 7", (), 9)
BASE = Base(9, 0x1122334455667788, POSITIONS, (ENTRY,))
CHANGE = Change(10, 0x1122334455667788, POSITIONS, (ENTRY,), (5,))
DELTA = Delta(msgspec.msgpack.encode(CHANGE), b"the change before")
REWRITTEN_SEGMENT = SegmentRow(1, 10, 300, 3, 42, TS, TS + 8, True, generation=2, removed=6)
REWRITTEN = Manifest(
    (TopicRow(7, "events", b"{}", 9, 9, 1, 0, 0, TS + 8, (REWRITTEN_SEGMENT,)),),
    (GroupRow("", 3, 128),),
    next_topic_id=8,
)


class Meta(msgspec.Struct):
    topics: dict[str, int]
    next_id: int


class Detected(Exception):
    """The bytes were not believed."""


class Vector(NamedTuple):
    content: object  # what the bytes say
    write: Callable[[], bytes]
    read: Callable[[bytes], object]  # Detected where they say nothing


def read_frame(buf: bytes) -> frame.Frame | None:
    found = frame.read_frame(buf, 0, len(buf))
    if isinstance(found, frame.Fault):
        if found.stop is ScanStop.END:
            return None
        raise Detected(found.reason)
    if found.end != len(buf):
        raise Detected("bytes are left over")
    return found


def read_control(buf: bytes) -> object:
    found = read_frame(buf)
    if found is None:
        return None
    body = control_frames.decode(found.kind, buf[found.data_pos : found.data_end])
    return found.kind, found.flags, found.topic_id, found.seq, found.ts_ms, body


def read_append(buf: bytes) -> object:
    found = read_frame(buf)
    if found is None:
        return None
    named = buf[found.node_pos : found.tag_pos], buf[found.tag_pos : found.data_pos]
    return found.flags, found.topic_id, found.seq, found.ts_ms, *named, buf[found.data_pos : found.data_end]


def read_batch(buf: bytes) -> object:
    found = read_frame(buf)
    if found is None:
        return None
    rows = batch.decode(buf, found)
    if isinstance(rows, frame.Fault):
        raise Detected(rows.reason)
    return found.flags, found.topic_id, list(iter_records(rows)), record_kinds(rows)


def read_log(buf: bytes) -> object:
    found = scan.scan_records(buf)
    if found.stop is not ScanStop.END:
        raise Detected(found.reason)
    return list(iter_records(found.rows))


def read_segment(buf: bytes) -> object:
    sealed = sealed_segment.decode_footer(GOLDEN["segment_foot"])
    if bad := sealed_segment.find_bad_ranges(sealed, buf):
        raise Detected(f"chunks {bad}")
    return list(
        iter_records(scan.scan_indexed(buf, segment_index.read_entries(GOLDEN["segment_idx"]), 0, 9, 1, check=False))
    )


def read_idx(buf: bytes) -> object:
    if reason := sealed_segment.find_index_fault(sealed_segment.decode_footer(GOLDEN["segment_foot"]), buf):
        raise Detected(reason)
    return plain(segment_index.read_entries(buf))


def plain(entries: NDArray[np.void]) -> list[object]:
    return [(*entry[:4], entry[4].tolist()) for entry in entries.tolist()]


def read_deletions(buf: bytes) -> object:
    vector = sealed_segment.decode_deletion_vector(buf)
    return vector.base, vector.size, vector.seqs().tolist()


def make_tags() -> bytes:
    """Tag a in rows 0 and 3, bc in row 1."""
    index = tag_index.TagBlock(b"abc", np.array([0, 1, 3]), np.array([0, 3, 1], np.uint32), np.array([0, 2, 3]))
    return tag_index.encode(1, xxhash.xxh3_64_intdigest(GOLDEN["segment_foot"]), 9, index)


def make_keys() -> bytes:
    rows = scan.scan_records(GOLDEN["segment_data"]).rows
    return encode_key_index("latest_by_tag", 1, 10, GOLDEN["segment_foot"], rows)


def read_keys(buf: bytes) -> object:
    foot, selector = (xxhash.xxh3_64_intdigest(part) for part in (GOLDEN["segment_foot"], b"latest_by_tag"))
    found = key_index.decode(buf, base=1, foot=foot, selector=selector, seqs=9)
    return tuple(column.tolist() for column in found[2:])


def read_tags(buf: bytes) -> object:
    found = tag_index.decode_directory(buf, len(buf))
    return found.base, found.footer_xxh3, found.records, tag_index.decode(buf)


def control(body: control_frames.Body, *, topic_id: int = 0, seq: int = 0) -> Vector:
    def write() -> bytes:
        data = control_frames.encode(body)
        return frame.encode(body.KIND, topic_id=topic_id, seq=seq, ts_ms=TS, data=data, flags=frame.DURABLE)

    return Vector((body.KIND, frame.DURABLE, topic_id, seq, TS, body), write, read_control)


def record(seq: int, data: bytes, *, ms: int = 0, node: bytes = b"", tag: bytes = b"", meta: bytes = b"") -> Record:
    return Record(seq, (TS + ms) * 1000, data, node, tag, meta)


def make_vector() -> sealed_segment.DeletionVector:
    vector = sealed_segment.DeletionVector(1, 9)
    vector.mark([2, 6, 9])
    return vector


def append(seq: int, data: bytes, *, ms: int = 0, **named: Any) -> bytes:
    return frame.encode(frame.APPEND, topic_id=10, seq=seq, ts_ms=TS + ms, data=data, **named)


def segment() -> bytes:
    return b"".join(
        (
            append(1, b"one"),
            append(2, b"two", node=b"n1", tag=b"t", flags=frame.DURABLE),
            encode_batch(10, 3, TS + 1, [b"three", b"four", b"", b"six!"], kinds=b"\0\1\xff\0", tag=b"t"),
            append(8, b"eight", ms=2),
        )
    )


SEGMENT = [
    record(1, b"one"),
    record(2, b"two", node=b"n1", tag=b"t"),
    record(3, b"three", ms=1, tag=b"t"),
    record(4, b"four", ms=1, tag=b"t"),
    record(6, b"six!", ms=1, tag=b"t"),
    record(8, b"eight", ms=2),
]

SYNC_MARK = control_frames.CheckpointMark(wal_first=7, wal_pos=9900)
LARGE_REF = large_record.BlobRef(
    5,
    7,
    xxhash.xxh3_64_intdigest(b"large"),
    xxhash.xxh3_64_intdigest(GOLDEN["blob"][:16] + GOLDEN["blob"][21:]),
)
LARGE_REFERENCE = b'{"$large":{"bytes":5,"xxh3":"%016x","href":"records/42/data"}}' % LARGE_REF.digest


def read_large_record(buf: bytes) -> object:
    found = scan.scan_records(buf)
    if found.stop is not ScanStop.END or len(found.rows) != 1:
        raise Corrupt("frame", pos=found.end, reason=found.reason or "not one record")
    rows = found.rows
    assert rows.blob_bytes is not None
    header = frame.read_headers(buf, rows.frame_pos)[0]
    (only,) = iter_records(rows)
    ref = large_record.read_ref(buf, 0)
    return int(header["flags"]), int(header["topic_id"]), only, int(rows.blob_bytes[0]), ref


def make_blob() -> bytes:
    hasher = large_record.BlobHasher()
    hasher.update(b"lar")
    hasher.update(b"ge")
    return large_record.encode_blob_header() + b"large" + hasher.finish(7)[1]


def read_blob(buf: bytes) -> bytes:
    if len(buf) != LARGE_REF.file_bytes:
        raise Corrupt("blob", pos=len(buf), reason="another size")
    (checksum,) = large_record.decode_sums(LARGE_REF, buf[:16], buf[21:], "blob")
    if xxhash.xxh3_64_intdigest(buf[16:21]) != checksum:
        raise Corrupt("blob", pos=16, reason="checksum mismatch")
    return buf[16:21]


VECTORS: dict[str, Vector] = {
    "append": Vector(
        (7, 10, 1, TS, b"n1", b"t", b'{"d":1}'),
        lambda: append(1, b'{"d":1}', node=b"n1", tag=b"t", flags=frame.DURABLE),
        read_append,
    ),
    "append_smallest": Vector(
        (0, 1, 1, TS, b"", b"", b""),
        lambda: frame.encode(frame.APPEND, topic_id=1, seq=1, ts_ms=TS),
        read_append,
    ),
    "append_json": Vector(
        (frame.JSON | frame.DURABLE | frame.HAS_NODE, 10, 4, TS, b"n1", b"", b'{"d":1}'),
        lambda: append(4, b'{"d":1}', node=b"n1", flags=frame.JSON | frame.DURABLE),
        read_append,
    ),
    "topic_create": control(control_frames.TopicCreate("orders", b"{}"), topic_id=10),
    "topic_delete": control(control_frames.TopicDelete("orders"), topic_id=10),
    "config_update": control(control_frames.ConfigUpdate("orders", b'{"ttl_ms":1}'), topic_id=10),
    "router_create": control(
        control_frames.RouterCreate(
            name="r",
            source="a",
            dest="b",
            preserve_node=True,
            preserve_tag=True,
            create_dest=True,
            match=Match(MatchOp.PREFIX, "x"),
            initial_cursor=5,
        )
    ),
    "router_delete": control(control_frames.RouterDelete("r")),
    "delete_before": control(control_frames.Delete(before_seq=5, bound_head=8), topic_id=10),
    "delete_match": control(control_frames.Delete(match=Match(MatchOp.EXACT, "t"), bound_head=8), topic_id=10),
    "delete_seqs": control(control_frames.Delete(seqs=(3, 4)), topic_id=10),
    "evict_watermark": control(
        control_frames.EvictWatermark(evict_floor=3, earliest_seq=6, expiry_floor=5), topic_id=10
    ),
    "checkpoint_barrier": control(control_frames.CheckpointBarrier(0)),
    "checkpoint_mark": control(
        control_frames.CheckpointMark(
            wal_first=7,
            wal_pos=4096,
            topics=(TopicMark(1, 100, 3, 6, 5, 1, 9000), TopicMark(10, 257, 0, 1, 0, 200, 46)),
        )
    ),
    "sync_mark": Vector(
        (frame.CHECKPOINT_MARK, 0, 0, 10_000, 0, SYNC_MARK),
        lambda: frame.encode(frame.CHECKPOINT_MARK, seq=10_000, ts_ms=0, data=control_frames.encode(SYNC_MARK)),
        read_control,
    ),
    "lease": control(
        control_frames.Lease(
            event=control_frames.LeaseEvent.CLAIMED, lease_id=7, deadline_ms=TS + 30_000, deliveries=1, node="w1"
        ),
        topic_id=10,
        seq=3,
    ),
    "head_watermark": control(control_frames.HeadWatermark(257), topic_id=10),
    "forward": control(
        control_frames.Forward(event=control_frames.ForwardEvent.TRIMMED, source_id=9, first=3, last=5, dest_head=7),
        topic_id=10,
    ),
    "forward_copied": control(
        control_frames.Forward(
            event=control_frames.ForwardEvent.COPIED,
            source_id=9,
            first=3,
            last=5,
            dest_head=7,
            counts=(3, 1),
            hops=(3, 1, 1, 2),
        ),
        topic_id=10,
        seq=6,
    ),
    "forward_lost": control(
        control_frames.Forward(
            event=control_frames.ForwardEvent.LOST,
            source_id=9,
            first=6,
            last=6,
            dest_head=8,
            counts=(1, 0),
            hops=(1, 1),
        ),
        topic_id=10,
        seq=7,
    ),
    "numbered_batch": control(
        control_frames.NumberedBatch(writer="etl", number=7, first=43, last=142, sum=(1, (1 << 64) - 1)), topic_id=10
    ),
    "write_key": control(control_frames.WriteKey(key="order-7", first=43, last=44), topic_id=10),
    "large_record": Vector(
        (7, 10, record(42, LARGE_REFERENCE, node=b"n1", tag=b"t", meta=b'{"h":1}'), 5, LARGE_REF),
        lambda: large_record.encode_frame(
            10, 42, TS, LARGE_REF, tag=b"t", node=b"n1", meta=b'{"h":1}', flags=frame.DURABLE
        ),
        read_large_record,
    ),
    "blob": Vector(b"large", make_blob, read_blob),
    "compaction": control(
        control_frames.Compaction(
            selector=xxhash.xxh3_64_intdigest(b"latest_by_tag"), compacted_to=42, tombstone_ms=TS, seqs=(40, 41)
        ),
        topic_id=10,
        seq=7,
    ),
    "group_cursor": control(control_frames.GroupCursor(group="spark", seq=42, hold_bytes=1 << 20), topic_id=10),
    "batch_plain": Vector(
        (0, 10, [record(1, b'{"d":1}'), record(2, b""), record(3, b"xyz")], [0, 0, 0]),
        lambda: encode_batch(10, 1, TS, [b'{"d":1}', b"", b"xyz"]),
        read_batch,
    ),
    "batch_common": Vector(
        (15, 10, [record(4, b"a", node=b"n1", tag=b"t"), record(5, b"bc", node=b"n1", tag=b"t")], [0, 0]),
        lambda: encode_batch(10, 4, TS, [b"a", b"bc"], node=b"n1", tag=b"t", flags=frame.DURABLE | frame.MORE),
        read_batch,
    ),
    "batch_columns": Vector(
        (
            0,
            10,
            [
                record(1, b'{"d":1}', tag="é".encode(), node=b"n1"),
                record(2, b"\x00\xff", node=b"n2", meta=b'{"h":1}'),
                record(3, b"", tag=b"t3", meta=b"m"),
            ],
            [1, 0, 0],
        ),
        lambda: encode_batch(
            10,
            1,
            TS,
            [b'{"d":1}', b"\x00\xff", b""],
            tags=["é".encode(), b"", b"t3"],
            nodes=[b"n1", b"n2", b""],
            metas=[b"", b'{"h":1}', b"m"],
            kinds=b"\1\0\0",
        ),
        read_batch,
    ),
    "batch_tags_metas": Vector(
        (
            2,
            10,
            [record(7, b"one", node=b"n1", tag=b"a", meta=b"m1"), record(8, b"two", node=b"n1", tag=b"b")],
            [0, 0],
        ),
        lambda: encode_batch(10, 7, TS, [b"one", b"two"], tags=[b"a", b"b"], metas=[b"m1", b""], node=b"n1"),
        read_batch,
    ),
    "batch_holes": Vector(
        (0, 10, [record(21, b"kept", tag=b"t"), record(23, b"also")], [0, 1]),
        lambda: encode_batch(
            10, 20, TS, [b"", b"kept", b"", b"also"], tags=[b"", b"t", b"", b""], kinds=b"\xff\0\xff\1"
        ),
        read_batch,
    ),
    "batch_json": Vector(
        (frame.JSON, 10, [record(11, b'{"d":1}', meta=b'{"h":1}'), record(12, b"[2]")], [1, 1]),
        lambda: encode_batch(10, 11, TS, [b'{"d":1}', b"[2]"], metas=[b'{"h":1}', b""], flags=frame.JSON),
        read_batch,
    ),
    "batch_json_holes": Vector(
        (
            frame.JSON | frame.HAS_TAG,
            10,
            [record(13, b'{"d":1}', tag=b"t"), record(15, b"[2]", tag=b"t", meta=b'{"h":1}')],
            [1, 1],
        ),
        lambda: encode_batch(
            10,
            13,
            TS,
            [b'{"d":1}', b"", b"[2]"],
            metas=[b"", b"", b'{"h":1}'],
            kinds=b"\1\xff\1",
            tag=b"t",
            flags=frame.JSON,
        ),
        read_batch,
    ),
    "log": Vector(
        [
            record(1, b"one"),
            record(2, b"two", node=b"n1", tag=b"t"),
            record(3, b"three"),
            record(4, b"four"),
            record(5, b"five", tag=b"u"),
            record(8, b"eight", ms=1),
        ],
        lambda: b"".join(
            (
                append(1, b"one"),
                append(2, b"two", node=b"n1", tag=b"t", flags=frame.DURABLE),
                VECTORS["head_watermark"].write(),
                encode_batch(10, 3, TS, [b"three", b"four"], flags=frame.MORE),
                encode_batch(10, 5, TS, [b"five"], tags=[b"u"]),
                append(8, b"eight", ms=1),
                bytes(64),
            )
        ),
        read_log,
    ),
    "segment_data": Vector(SEGMENT, segment, read_segment),
    "segment_idx": Vector(
        [
            (0, 3, TS, 0, [0, 0, 0]),
            (49, 3, TS, segment_index.HAS_TAG | segment_index.HAS_NODE, [0, 0, 0]),
            (101, 5, TS + 1, segment_index.BATCH | segment_index.HAS_TAG, [0, 0, 0]),
            (101, 4, TS + 1, segment_index.BATCH | segment_index.HAS_TAG | segment_index.JSON, [0, 0, 0]),
            (101, 0, TS + 1, segment_index.HOLE, [0, 0, 0]),
            (101, 4, TS + 1, segment_index.BATCH | segment_index.HAS_TAG, [0, 0, 0]),
            (189, 0, TS + 1, segment_index.HOLE, [0, 0, 0]),
            (189, 5, TS + 2, 0, [0, 0, 0]),
            (240, 0, TS + 2, segment_index.HOLE, [0, 0, 0]),
        ],
        lambda: segment_index.build_entries(scan.scan_records(GOLDEN["segment_data"]).rows, 1, 10, 240).tobytes(),
        read_idx,
    ),
    "segment_foot": Vector(
        sealed_segment.build_footer(GOLDEN["segment_data"], GOLDEN["segment_idx"], first_seq=1, chunk_bytes=64),
        lambda: sealed_segment.encode_footer(
            sealed_segment.build_footer(GOLDEN["segment_data"], GOLDEN["segment_idx"], first_seq=1, chunk_bytes=64)
        ),
        sealed_segment.decode_footer,
    ),
    "segment_tag": Vector(
        (1, xxhash.xxh3_64_intdigest(GOLDEN["segment_foot"]), 9, {b"a": [0, 3], b"bc": [1]}), make_tags, read_tags
    ),
    "segment_key": Vector(([5], [False], [1, 2, 3], [0, 0, 0]), make_keys, read_keys),
    "segment_del": Vector(
        (1, 9, [2, 6, 9]), lambda: sealed_segment.encode_deletion_vector(make_vector()), read_deletions
    ),
    "snapshot": Vector(
        Meta({"events": 2, "orders": 10}, 11),
        lambda: small_files.encode_snapshot(Meta({"events": 2, "orders": 10}, 11)),
        lambda buf: small_files.decode_snapshot(Meta, buf),
    ),
    "snapshot_rewritten": Vector(
        REWRITTEN,
        lambda: small_files.encode_snapshot(REWRITTEN, version=101),
        lambda buf: small_files.decode_snapshot(Manifest, buf),
    ),
    "manifest_base": Vector(
        BASE,
        lambda: small_files.wrap_snapshot(msgspec.msgpack.encode(BASE), version=102),
        lambda buf: small_files.decode_msgpack(Base, small_files.unwrap_snapshot(buf, version=102), "base"),
    ),
    "manifest_delta": Vector(
        DELTA,
        lambda: small_files.wrap_snapshot(msgspec.msgpack.encode(DELTA), version=102),
        lambda buf: small_files.decode_msgpack(Delta, small_files.unwrap_snapshot(buf, version=102), "delta"),
    ),
    "snapshot_header": Vector(
        b"\x00",
        lambda: small_files.wrap_snapshot(b"\x00", version=3),
        lambda buf: small_files.unwrap_snapshot(buf, version=3),
    ),
    "idx_layout": Vector(
        [(0, 48, TS, 3, [0, 0, 0]), (48, 45, TS + 1, 0, [0, 0, 0])],
        lambda: np.array([(0, 48, TS, 3, (0, 0, 0)), (48, 45, TS + 1, 0, (0, 0, 0))], segment_index.ENTRY).tobytes(),
        lambda buf: plain(segment_index.read_entries(buf)),
    ),
}
# A layout alone: its two entries name frames of another kind, and it has no footer that vouches for it.
UNCHECKED = {"idx_layout"}


def test_the_manifest_lists_every_vector_and_every_vector_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.hex")} == set(GOLDEN)
    assert set(GOLDEN) == set(VECTORS)
    assert {row["name"]: row["bytes"] for row in MANIFEST} == {name: len(buf) for name, buf in GOLDEN.items()}


@pytest.mark.parametrize("name", VECTORS)
def test_the_bytes_written_are_the_frozen_ones(name: str) -> None:
    assert VECTORS[name].write().hex() == GOLDEN[name].hex()


@pytest.mark.parametrize("name", VECTORS)
def test_the_frozen_bytes_say_what_they_always_said(name: str) -> None:
    assert VECTORS[name].read(GOLDEN[name]) == VECTORS[name].content


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_bytes_bytearrays_and_mapped_files_read_alike(wrap: Callable[[bytes], Any]) -> None:
    log = GOLDEN["log"]
    assert list(iter_records(scan.scan_records(wrap(log)).rows)) == VECTORS["log"].content
    assert [found.kind for found in FrameReader(wrap(log))] == [1, 1, 11, 12, 12, 1]
    assert scan.scan_headers(wrap(log)).headers["kind"].tolist() == [1, 1, 11, 12, 12, 1]
    assert sealed_segment.decode_footer(wrap(GOLDEN["segment_foot"])) == VECTORS["segment_foot"].content
    assert small_files.decode_snapshot(Meta, wrap(GOLDEN["snapshot"])) == VECTORS["snapshot"].content
    assert sealed_segment.decode_deletion_vector(wrap(GOLDEN["segment_del"])).seqs().tolist() == [2, 6, 9]


def outcome(name: str, broken: bytes) -> str:
    vector = VECTORS[name]
    try:
        content = vector.read(broken)
    except (Detected, Corrupt, NewerFormat):
        return "detected"
    if content == vector.content:
        return "the same"
    if content is None:
        return "nothing there"
    if isinstance(vector.content, list) and content == vector.content[: len(content)]:  # type: ignore[arg-type]
        return "a shorter log"
    return "SILENT"


def cuts(buf: bytes) -> Iterator[bytes]:
    return (buf[:size] for size in range(len(buf)))


EVERY = tuple(range(1, 256))
SOME = (1, 2, 4, 8, 16, 32, 64, 128, 255)  # each bit, and all of them


def changes(buf: bytes, masks: tuple[int, ...] = EVERY) -> Iterator[bytes]:
    for pos, byte in enumerate(buf):
        before, after = buf[:pos], buf[pos + 1 :]
        yield from (before + bytes((byte ^ mask,)) + after for mask in masks)


@pytest.mark.parametrize("masks", [SOME, pytest.param(EVERY, marks=pytest.mark.sweep)], ids=["bits", "every"])
@pytest.mark.parametrize("name", sorted(set(VECTORS) - UNCHECKED - {"log"}))
def test_no_byte_of_a_vector_can_change_in_silence(name: str, masks: tuple[int, ...]) -> None:
    buf = GOLDEN[name]
    assert Counter(outcome(name, broken) for broken in changes(buf, masks)) == {"detected": len(masks) * len(buf)}


@pytest.mark.parametrize("name", sorted(set(VECTORS) - UNCHECKED - {"log"}))
def test_no_vector_can_lose_its_end_in_silence(name: str) -> None:
    """A frame that was never written is the one cut that cannot be told: there is nothing there."""
    buf = GOLDEN[name]
    one_frame = VECTORS[name].read in (read_control, read_append, read_batch)
    expected = {"detected": len(buf) - 1, "nothing there": 1} if one_frame else {"detected": len(buf)}
    assert Counter(outcome(name, broken) for broken in cuts(buf)) == expected


def test_no_byte_of_a_log_can_change_in_silence() -> None:
    """The preallocated tail says nothing, so a change in it is either seen or says nothing either."""
    buf = GOLDEN["log"]
    tail = len(buf) - 64
    written = Counter(outcome("log", broken + bytes(64)) for broken in changes(buf[:tail], SOME))
    assert written == {"detected": len(SOME) * tail}
    # A header has 38 bytes: so many have to be zero for the log to end there.
    behind = Counter(outcome("log", buf[:tail] + broken) for broken in changes(bytes(64), SOME))
    assert behind == {"detected": len(SOME) * 38, "the same": len(SOME) * 26}


def surveyed(buf: bytes) -> tuple[object, ...]:
    at, heads, *rest = scan.scan_headers(buf)
    return at.tolist(), heads.tobytes(), *rest


def framed(buf: bytes) -> tuple[object, ...]:
    """What `surveyed` should say, frame by frame."""
    scanner = FrameReader(buf)
    seen = [found.pos for found in scanner]
    kept = [pos for pos in seen if pos < scanner.whole_end]
    heads = b"".join(buf[pos : pos + frame.HEADER_BYTES] for pos in kept)
    return kept, heads, scanner.end, scanner.whole_end, scanner.stop, scanner.reason


def test_a_survey_of_a_broken_log_says_what_its_frames_say_one_by_one() -> None:
    """G52, G58. Method: the golden log and the JSON frames behind it, cut at every length, changed at every byte."""
    buf = GOLDEN["log"][:-64] + GOLDEN["batch_json"] + GOLDEN["append_json"] + GOLDEN["batch_json_holes"] + bytes(9)
    assert scan.scan_headers(buf).whole_end == len(buf) - 9
    for broken in (*cuts(buf), *changes(buf, SOME)):
        assert surveyed(broken) == framed(broken), broken.hex()


def test_a_log_cut_anywhere_is_a_shorter_log_or_a_detected_one() -> None:
    buf = GOLDEN["log"]
    tail = len(buf) - 64
    ends = [found.end for found in FrameReader(buf)]
    clean = {size for size in range(len(buf)) if outcome("log", buf[:size]) != "detected"}
    # Whole frames and nothing else, or whole frames and some of the zeros behind the last one. The fourth
    # frame opens a batch that the fifth completes, so the log never ends between the two.
    assert clean == {0, *ends[:3], *ends[4:]} | set(range(tail, len(buf)))
    assert {outcome("log", buf[:size]) for size in clean} == {"a shorter log", "the same"}


def test_what_an_index_cannot_see_without_its_footer() -> None:
    """`idx.fault` holds entries against each other; a change that keeps them in order passes it.

    The footer's checksum sees all of these (tested above), and so does a read through the changed
    entry, which has to agree with its frame.
    """
    buf, data = GOLDEN["segment_idx"], GOLDEN["segment_data"]
    unseen: Counter[str] = Counter()
    misread: Counter[str] = Counter()
    for at, broken in enumerate(changes(buf)):
        entries = segment_index.read_entries(broken)
        if segment_index.find_index_fault(entries, len(data)) is not None:
            continue
        within = at // len(EVERY) % segment_index.ENTRY_BYTES
        starts = {"flags": 16, "ts": 8, "data_len": 4, "frame_offset": 0}
        field = next(name for name, start in starts.items() if within >= start)
        unseen[field] += 1
        try:
            found = list(iter_records(scan.scan_indexed(data, entries, 0, 9, 1, check=True)))
        except Corrupt:
            continue
        if found != SEGMENT:
            misread[field] += 1
    assert set(unseen) == {"flags", "ts", "data_len", "frame_offset"}
    assert not misread


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0x2D06800538D394C2),
        (b"a", 0xE6C632B61E964E1F),
        (b"abc", 0x78AF5F94892F3950),
        (b"123456789", 0x72DCB18B67A17DFF),
        (bytes(range(256)), 0x9408A4433B952D71),
        (bytes(1024), 0xDE5F15AB6DAF7941),
    ],
)
def test_the_hash_is_the_one_the_format_was_made_with(data: bytes, expected: int) -> None:
    assert xxhash.xxh3_64_intdigest(data) == expected
    streamed = xxhash.xxh3_64()
    for byte in data:
        streamed.update(bytes((byte,)))
    assert streamed.intdigest() == expected
