"""The stride index: dense over its seqs, in order, and honest about what it can prove."""

from __future__ import annotations

import struct
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.frames import encode_batch

from tidelog.errors import BadInput, Corrupt, TooLarge
from tidelog.formats import batch, frame, scan, segment_index
from tidelog.formats.rows import Rows, empty_rows

TS = 1_700_000_000_000


def append(seq: int, ts: int, data: bytes, *, node: bytes = b"", tag: bytes = b"", flags: int = 0) -> bytes:
    return frame.encode(frame.APPEND, topic_id=10, seq=seq, ts_ms=ts, data=data, node=node, tag=tag, flags=flags)


def walked(buf: bytes) -> Rows:
    walk = scan.scan_records(buf)
    assert walk.end == len(buf), walk.reason
    return walk.rows


ONE = append(3, TS, b"one", tag=b"t")
BATCH = encode_batch(10, 5, TS + 1, [b"five", b"", b"seven"], nodes=[b"", b"", b"n"], kinds=b"\0\xff\1")
LAST = append(9, TS + 2, b"")
LOG = ONE + BATCH + LAST


def naive(base: int, stop: int, present: dict[int, tuple[int, int, int, int]], size: int) -> bytes:
    """`present`: seq to (frame start, data length, ms, flags)."""
    out = b""
    for seq in range(base, stop):
        if seq in present:
            out += struct.pack("<IIQB3x", *present[seq])
        else:
            after = [present[later][0] for later in sorted(present) if later > seq]
            before = [present[earlier][2] for earlier in sorted(present) if earlier < seq]
            out += struct.pack("<IIQB3x", (after or [size])[0], 0, (before or [0])[-1], 0x80)
    return out


def test_entries_are_dense_and_holes_name_the_next_frame() -> None:
    b, c = len(ONE), len(ONE + BATCH)
    present = {
        3: (0, 3, TS, 1),
        5: (b, 4, TS + 1, 4),
        7: (b, 5, TS + 1, 4 | 2 | 8),
        9: (c, 0, TS + 2, 0),
    }
    entries = segment_index.build_entries(walked(LOG), 2, 12, len(LOG))
    assert entries.tobytes() == naive(2, 12, present, len(LOG))
    assert segment_index.find_index_fault(entries, len(LOG)) is None
    assert entries["frame_offset"][[0, 2, 4, 6, 8, 9]].tolist() == [0, b, b, c, len(LOG), len(LOG)]


@pytest.mark.parametrize("seed", range(60))
def test_an_index_equals_one_built_entry_by_entry(seed: int) -> None:
    """G66, G67: whichever way its flags are made, and of whichever part of the log."""
    random = Random(seed)
    pieces: list[bytes] = []
    present: dict[int, tuple[int, int, int, int]] = {}
    seq, ts, pos = 1, TS, 0
    for _ in range(random.choice((3, 9, 60))):
        seq += random.choice((0, 0, 2))
        ts += random.randrange(3)
        all_json = random.choice((0, 0, frame.JSON))
        if random.random() < 0.5:
            node, tag = random.choice((b"", b"n")), random.choice((b"", b"t"))
            data = random.randbytes(random.randrange(5))
            pieces.append(append(seq, ts, data, node=node, tag=tag, flags=all_json))
            present[seq] = (pos, len(data), ts, 2 * bool(node) + bool(tag) + 8 * bool(all_json))
            seq += 1
        else:
            datas = [random.randbytes(random.randrange(5)) for _ in range(random.randrange(1, 5))]
            named: dict[str, Any] = {"tag": random.choice((b"", b"t")), "node": random.choice((b"", b"node"))}
            kinds = bytes(random.choice((1, 1, 255) if all_json else (0, 1, 255)) for _ in datas)
            metas = [random.choice((b"", b"m")) for _ in datas]
            if random.random() < 0.3:
                kinds = (b"\1" if all_json else b"\0") * len(datas)
            datas, metas = (
                [b"" if kind == 255 else value for value, kind in zip(values, kinds, strict=True)]
                for values in (datas, metas)
            )
            plain = set(kinds) == {1 if all_json else 0}  # needs no column to say so
            said = None if plain and random.random() < 0.5 else kinds
            given = metas if random.random() < 0.5 else None
            pieces.append(encode_batch(10, seq, ts, datas, kinds=said, metas=given, **named, flags=all_json))
            for i, (data, kind, meta) in enumerate(zip(datas, kinds, given or [b""] * len(datas), strict=True)):
                if kind != 255:
                    whole = 4 | bool(named["tag"]) | 2 * bool(named["node"])
                    present[seq + i] = (pos, len(data), ts, whole | 8 * (kind == 1) | 16 * bool(meta))
            seq += len(datas)
        pos += len(pieces[-1])
    buf = b"".join(pieces)
    stop = seq + random.randrange(3)
    entries = segment_index.build_entries(walked(buf), 1, stop, len(buf))
    assert entries.tobytes() == naive(1, stop, present, len(buf)), seed
    assert segment_index.find_index_fault(entries, len(buf)) is None, seed
    live = entries[entries["flags"] != segment_index.HOLE]
    rows = walked(buf)
    for _ in range(9):
        lo = random.randrange(len(rows) + 1)
        hi = random.randrange(lo, len(rows) + 1)
        assert segment_index.record_flags(rows.slice(lo, hi)).tolist() == live["flags"][lo:hi].tolist(), (seed, lo, hi)
    for i in range(len(rows)):
        assert segment_index.build_entry(rows.slice(i, i + 1), 0) == live[i : i + 1].tobytes(), (seed, i)
    assert np.shares_memory(segment_index.read_entries(view := entries.tobytes()), np.frombuffer(view, np.uint8))


def test_a_continued_index_equals_one_built_at_once() -> None:
    whole = segment_index.build_entries(walked(LOG), 2, 12, len(LOG)).tobytes()
    first = segment_index.build_entries(walked(ONE), 2, 4, len(ONE))
    rest = segment_index.build_entries(
        walked(BATCH + LAST), 4, 12, len(LOG), origin=len(ONE), ts_before_ms=int(first["ts"][-1])
    )
    assert first.tobytes() + rest.tobytes() == whole


def test_an_index_without_holes_can_be_continued() -> None:
    first, second = append(1, TS, b"a"), append(2, TS, b"b") + append(3, TS, b"c")
    whole = segment_index.build_entries(walked(first + second), 1, 4, len(first + second)).tobytes()
    rest = segment_index.build_entries(walked(second), 2, 4, len(first + second), origin=len(first))
    assert whole[20:] == rest.tobytes()


def test_a_segment_without_records_is_all_holes() -> None:
    entries = segment_index.build_entries(empty_rows(), 5, 8, 0)
    assert entries.tobytes() == struct.pack("<IIQB3x", 0, 0, 0, 0x80) * 3
    assert segment_index.find_index_fault(entries, 0) is None
    assert segment_index.find_index_fault(segment_index.read_entries(b""), 0) is None


@pytest.mark.parametrize("base_stop", [(4, 12), (2, 9)])
def test_records_outside_the_index_are_refused(base_stop: tuple[int, int]) -> None:
    with pytest.raises(BadInput, match="outside the index"):
        segment_index.build_entries(walked(LOG), *base_stop, len(LOG))


def test_frames_outside_the_data_are_refused() -> None:
    with pytest.raises(BadInput, match="does not fit"):
        segment_index.build_entries(walked(LOG), 2, 12, len(LOG) - 1)
    with pytest.raises(BadInput, match="does not fit"):
        segment_index.build_entries(walked(LOG), 2, 12, len(LOG), origin=1)
    with pytest.raises(TooLarge):
        segment_index.build_entries(walked(LOG), 2, 12, 1 << 32)


def test_a_partial_entry_at_the_end_is_left_out() -> None:
    whole = segment_index.build_entries(walked(LOG), 2, 12, len(LOG)).tobytes()
    assert len(segment_index.read_entries(whole[:-1])) == 9
    assert len(segment_index.read_entries(whole[:19])) == 0


def changed(index: int, **fields: Any) -> NDArray[np.void]:
    entries = segment_index.build_entries(walked(LOG), 2, 12, len(LOG)).copy()
    for name, value in fields.items():
        entries[name][index] = value
    return entries


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (changed(1, pad=(0, 0, 1)), "padding"),
        (changed(1, flags=0x20), "flags"),
        (changed(1, flags=0x40), "flags"),
        (changed(1, flags=0x81), "flags"),
        (changed(3, frame_offset=0), "positions fall"),
        (changed(7, frame_offset=(1 << 32) - 1), "positions fall"),
        (changed(9, frame_offset=(1 << 32) - 1), "outside the data"),
        (changed(7, ts=TS), "times fall"),
        (changed(0, ts=(1 << 64) - 1), "times fall"),
        (changed(1, data_len=1000), "outside the data"),
        (changed(9, data_len=1), "a hole has data"),
        (changed(5, flags=2), "share a frame"),
        (changed(3, flags=0), "share a frame"),
        (changed(1, data_len=5), "runs into the next frame"),
        (changed(2, frame_offset=len(ONE) - 1), "frame after it"),
        (changed(6, frame_offset=len(ONE) + 1), "frame after it"),
        (changed(1, flags=0x80, data_len=0), "frame after it"),
    ],
)
def test_an_index_that_contradicts_itself_is_reported(entries: NDArray[np.void], words: str) -> None:
    found = segment_index.find_index_fault(entries, len(LOG))
    assert found is not None
    assert words in found


def test_a_segment_shorter_than_its_index_is_reported() -> None:
    entries = segment_index.build_entries(walked(LOG), 2, 12, len(LOG))
    for size in range(len(LOG)):
        assert segment_index.find_index_fault(entries, size) is not None, size
        if size < len(LOG) - len(LAST) + 46:
            with pytest.raises(Corrupt):
                scan.scan_indexed(LOG[:size], entries, 0, 10, 2, check=False)


def test_changes_that_only_the_footer_detects() -> None:
    """An empty record of a batch, its entry turned into a hole, leaves an index that agrees with itself.
    A read that meets another record of the batch disagrees; one that asks for that seq alone finds nothing,
    and only the footer's checksum of the index detects it."""
    buf = encode_batch(10, 1, TS, [b"a", b"", b"c"])
    entries = segment_index.build_entries(walked(buf), 1, 4, len(buf)).copy()
    entries["flags"][1] = segment_index.HOLE
    assert segment_index.find_index_fault(entries, len(buf)) is None
    for first, stop in ((0, 3), (0, 2), (1, 3)):
        with pytest.raises(Corrupt, match="different records"):
            scan.scan_indexed(buf, entries, first, stop, 1, check=False)
    assert not len(scan.scan_indexed(buf, entries, 1, 2, 1, check=True))


def test_runs_are_encoded_as_their_entries() -> None:
    datas = [[b"a" * n for n in range(1, 6)], [b"b"], [b"c" * 9] * 3]
    pieces: list[bytes | segment_index.EntryRun] = [b"\0" * segment_index.ENTRY_BYTES]
    expected, at, seq = [pieces[0]], 0, 1
    for number, chunk in enumerate(datas):
        lengths = np.array(list(map(len, chunk)), np.uint32)
        planned = batch.plan_frames(0, seq, 1_000 + number, chunk, lengths, start=at)
        pieces.append(
            segment_index.EntryRun(planned.starts, planned.counts, lengths, 1_000 + number, segment_index.BATCH)
        )
        buf = b"".join(bytes(piece) for make in planned.frames for piece in make())
        rows = scan.scan_records(buf).rows
        expected.append(segment_index.build_entries(rows, seq, seq + len(chunk), at + len(buf), origin=at).tobytes())
        at, seq = at + len(buf), seq + len(chunk)
    assert segment_index.encode_entries(pieces) == b"".join(expected)  # type: ignore[arg-type]
    assert segment_index.encode_entries([]) == b""
