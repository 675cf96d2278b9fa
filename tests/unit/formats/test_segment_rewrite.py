"""Frames without the bytes of removed records, compiled and in Python; and the checksums of frames, compiled."""

from __future__ import annotations

from random import Random
from struct import pack
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.implementations import BOTH, implementation
from xxhash import xxh3_64_intdigest

from tidelog import _native, _pure_python
from tidelog.formats import batch, scan
from tidelog.formats import segment_rewrite as rewrite
from tidelog.formats.frame import DURABLE, JSON, encode_append
from tidelog.formats.rows import Rows, iter_records

TOPIC = 7


def batch_of(random: Random, seq: int, ts_ms: int, count: int) -> list[bytes]:
    """A caller's batch with random columns, in one frame or a few."""
    datas = [random.randbytes(random.choice([0, 1, 9, 200])) for _ in range(count)]
    columns: dict[str, Any] = {}
    if random.random() < 0.4:
        columns["tags"] = [random.choice([b"", b"a", "é".encode()]) for _ in datas]
    elif random.random() < 0.3:
        columns["tag"] = b"common"
    if random.random() < 0.3:
        columns["nodes"] = [random.choice([b"", b"node"]) for _ in datas]
    if random.random() < 0.4:
        columns["metas"] = [random.choice([b"", b'{"a":1}']) for _ in datas]
    if random.random() < 0.4:
        columns["kinds"] = bytes(random.choice([batch.KIND_BYTES, batch.KIND_JSON]) for _ in datas)
    elif random.random() < 0.5:
        columns["flags"] = JSON | DURABLE
    return batch.encode_many(TOPIC, seq, ts_ms, datas, **columns)


def segment_of(random: Random, frames: int) -> Rows:
    pieces, seq, ts_ms = list[bytes](), 1, 1000
    for _ in range(frames):
        ts_ms += random.choice([0, 0, 5, 990, 1500])
        count = random.choice([1, 1, 1, 2, 7, 40])
        if count == 1 and random.random() < 0.8:
            tag = random.choice([b"", b"t"])
            pieces.append(encode_append(TOPIC, seq, ts_ms, random.randbytes(20), tag=tag, flags=JSON))
        else:
            pieces += batch_of(random, seq, ts_ms, count)
        seq += count
    found = scan.scan_records(b"".join(pieces), above=0)
    assert len(found.rows) == seq - 1
    return found.rows


@BOTH
@given(seed=st.integers(0, 1 << 32), frames=st.integers(1, 40), share=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
@settings(max_examples=60, deadline=None)
def test_kept_records_stay_and_removed_ones_are_empty(compiled: bool, seed: int, frames: int, share: float) -> None:
    random = Random(seed)
    rows = segment_of(random, frames)
    removed = np.array([random.random() < share for _ in range(len(rows))])
    with implementation(compiled=compiled), pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewrite, "_GROUP_BYTES", random.choice([100, 1 << 20]))
        made = b"".join(bytes(piece) for piece in rewrite.encode_without(rows, removed))
        after = scan.scan_records(made, above=0)
        assert after.end == len(made)
        assert len(made) <= len(rows.buf) or not compiled
        assert rewrite.find_difference(rows, after.rows, removed) is None
    for one, other, is_gone in zip(iter_records(rows), iter_records(after.rows), removed.tolist(), strict=True):
        if is_gone:
            assert (other.data, other.meta) == (b"", b"")
            assert other.tag in (b"", one.tag)  # that of a batch stays with it
            assert other.node == b""
            assert 0 <= one.ts_us - other.ts_us < rewrite.TIME_STEP_MS * 1000
        else:
            assert one == other


def test_the_compiled_function_writes_what_the_python_functions_write() -> None:
    """Byte for byte, where all frames have the same columns: else Python writes columns of zeros."""
    random, datas = Random(3), [bytes([n % 251]) * (n % 90) for n in range(500)]
    frames = [encode_append(TOPIC, n + 1, 1000 + 40 * n, datas[n]) for n in range(100)]
    for lo in range(100, 500, 25):
        frames += batch.encode_many(TOPIC, lo + 1, 9000 + 10 * lo, datas[lo : lo + 25])
    rows = scan.scan_records(b"".join(frames), above=0).rows
    for share in (0.02, 0.5, 0.97):
        removed = np.array([random.random() < share for _ in range(len(rows))])
        removed[120:260] = True
        made = []
        for compiled in (True, False):
            with implementation(compiled=compiled):
                made.append(b"".join(bytes(piece) for piece in rewrite.encode_without(rows, removed)))
        assert made[0] == made[1]


def test_the_compiled_function_serves_the_usual_frames() -> None:
    rows = segment_of(Random(1), 30)
    removed = np.arange(len(rows)) % 3 == 0
    target = bytearray(len(rows.buf))
    size = _native.remove_records(target, rows.buf, rows.frame_pos, removed, len(rows.buf), 1000, 4096)
    assert 0 < size < len(rows.buf)


@BOTH
def test_a_changed_value_is_found(compiled: bool) -> None:
    rows = segment_of(Random(5), 20)
    kept = np.zeros(len(rows), bool)
    changed = bytearray(rows.buf)
    which = int(np.flatnonzero(rows.data.size > 3)[-1])
    changed[int(rows.data.pos[which]) + 2] ^= 1
    other = Rows(
        bytes(changed), *(getattr(rows, name) for name in ("seq", "ts_us", "frame_pos", "data", "node", "tag", "meta"))
    )
    with implementation(compiled=compiled):
        assert rewrite.find_difference(rows, rows, kept) is None
        assert "data of a record" in (rewrite.find_difference(rows, other, kept) or "")
        kept[which] = True
        assert rewrite.find_difference(rows, other, kept) == "a removed record is not empty"


# ── checksums ─────────────────────────────────────────────────────────────────────────────────────


def summed(content: bytes) -> bytes:
    return bytes(4) + content + pack("<Q", xxh3_64_intdigest(content))


def test_compiled_checksum_is_xxh3_at_every_length() -> None:
    random = Random(2)
    for size in (*range(1200), 2047, 2048, 2049, 4096, 65_537, 1 << 20):
        frame = summed(random.randbytes(size))
        starts, ends = np.array([0]), np.array([size + 4])
        assert _native.count_valid_checksums(frame, starts, ends) == 1, size
        if size:
            broken = bytearray(frame)
            broken[4 + random.randrange(size)] ^= 1 << random.randrange(8)
            assert _native.count_valid_checksums(bytes(broken), starts, ends) == 0, size


@BOTH
def test_frames_before_the_first_wrong_checksum_are_counted(compiled: bool) -> None:
    module = _native if compiled else _pure_python
    frames = [summed(bytes([n]) * (n * 37 % 500)) for n in range(60)]
    ends = np.cumsum([len(frame) for frame in frames]) - 8
    starts = np.append(0, ends[:-1] + 8)
    assert module.count_valid_checksums(b"".join(frames), starts, ends) == 60
    assert module.count_valid_checksums(b"", starts[:0], ends[:0]) == 0
    for wrong in (0, 31, 59):
        broken = bytearray(b"".join(frames))
        broken[int(ends[wrong])] ^= 1
        for kind in (bytes, memoryview):
            assert module.count_valid_checksums(kind(broken), starts, ends) == wrong
    for lows, highs in (([-1], [9]), ([0], [3]), ([0], [len(frames[0])]), ([1 << 62], [1 << 62])):
        with pytest.raises(ValueError, match="outside"):
            module.count_valid_checksums(frames[0], np.array(lows), np.array(highs))
