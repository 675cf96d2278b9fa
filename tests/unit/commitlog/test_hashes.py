"""The hash functions of laminarmq stores: known answers, detection, and logs that go on with what they have."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from tidelog.commitlog import SegmentedLog, verify
from tidelog.commitlog.codecs import hashes
from tidelog.commitlog.codecs.hashes import HASHES, Hash
from tidelog.types import Buffer

KNOWN = {
    "CRC-32": (b"123456789", 0xCBF43926),
    "CRC-32C": (b"123456789", 0xE3069283),
    "XXH64": (b"", 0xEF46DB3751D8E999),
    "XXH3-64": (b"", 0x2D06800538D394C2),
    "XXH32": (b"", 0x02CC5D05),
    "FNV-1a": (b"a", 0xAF63DC4C8601EC8C),
    "SipHash-2-4": (b"", 0x1E924B9D737700D7),
    "SipHash-1-3": (b"\x05\0\0\0\x01\x01\0\0\0", 0),  # as the data of the program has it, below
}
every_hash = pytest.mark.parametrize("each", HASHES, ids=lambda each: each.name)


@every_hash
def test_known_answers(each: Hash) -> None:
    data, wanted = KNOWN[each.name]
    if wanted:
        assert each.digest((data,)) == wanted
    whole = bytes(range(256)) * 3
    pieces = (whole[:5], memoryview(whole)[5:300], whole[300:])
    assert each.digest(pieces) == each.digest((whole,)) < 1 << 64


def test_the_default_hasher_of_rust_is_that_of_the_store_that_laminarmq_wrote() -> None:
    store = Path(__file__).parents[2] / "golden/foreign/laminarmq/u32-siphash"
    index, data = (store / "0.index").read_bytes(), (store / "0.store").read_bytes()
    siphash = next(each for each in HASHES if each.name == "SipHash-1-3")
    for at in range(16, len(index), 16):
        checksum, length, position = struct.unpack_from("<QII", index, at)
        assert siphash.digest((data[position : position + length],)) == checksum


@every_hash
@pytest.mark.parametrize("width", [4, 8])
def test_a_store_of_every_hash_function_is_read_and_continued(each: Hash, width: int, tmp_path: Path) -> None:
    contents = [
        struct.pack("<IBI" if width == 4 else "<IBQ", 1 + width, 1, seq) + b"v" * (seq * 3 + 1) for seq in range(20)
    ]
    index, position = struct.pack("<Q8x", 0), 0
    for content in contents:
        index += struct.pack("<QII", each.digest((content,)), len(content), position)
        position += len(content)
    (tmp_path / "0.store").write_bytes(b"".join(contents))
    (tmp_path / "0.index").write_bytes(index)
    with SegmentedLog.open(str(tmp_path), "laminar", segment_age_ms_max=None) as log:
        assert [record.data for record in log] == [b"v" * (seq * 3 + 1) for seq in range(20)]
        assert log.append(b"new") == 20
        assert log.append_stream([b"str", b"eam"]) == 21
    assert verify(str(tmp_path)).ok
    data, entries = (tmp_path / "0.store").read_bytes(), (tmp_path / "0.index").read_bytes()
    for seq, value in ((20, b"new"), (21, b"stream")):
        checksum, length, position = struct.unpack_from("<QII", entries, 16 + 16 * seq)
        assert data[position : position + length].endswith(value)
        assert checksum == each.digest((data[position : position + length],))


def test_detection_hashes_few_bytes_with_slow_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: count the bytes. Stores with records of gigabytes must not be hashed in plain Python."""
    hashed = 0
    slow = next(each for each in HASHES if each.name == "FNV-1a")

    def counting(pieces: Iterable[Buffer]) -> int:
        nonlocal hashed
        hashed += sum(map(len, pieces))
        return 0

    monkeypatch.setattr(hashes, "HASHES", (slow._replace(digest=counting),))
    buf = bytes(4 << 20)
    starts = np.arange(0, 4 << 20, 1 << 17, dtype=np.int64)
    found, _ = hashes.detect(buf, starts, starts + (1 << 17), np.ones(len(starts), np.uint64))
    assert found is None
    assert hashed <= 1 << 20
