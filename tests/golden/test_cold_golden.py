"""The object of a segment in the cold tier, frozen. `cold/object.hex` was made by a second encoder, written from the
drawing: its zstd frames hold raw blocks, because the bytes of a compressor differ from version to version."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from xxhash import xxh3_64_intdigest

from tidelog.errors import Corrupt, NewerFormat
from tidelog.formats import cold_object, sealed_segment

GOLDEN = bytes.fromhex("".join((Path(__file__).parent / "cold" / "object.hex").read_text().split()))
DATA = b"Every byte of a segment, as it was."


def decode(content: bytes) -> bytes:
    return b"".join(cold_object.decode_object(content, "golden"))


def test_the_golden_object_is_read() -> None:
    assert decode(GOLDEN) == DATA
    index = cold_object.decode_index(GOLDEN[-cold_object.tail_bytes(len(DATA), 16) :], len(GOLDEN), "golden")
    assert (index.data_bytes, index.block_bytes, len(index)) == (len(DATA), 16, 3)


def test_the_golden_object_is_written_around_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    index = cold_object.decode_index(GOLDEN, len(GOLDEN), "golden")
    packed = {
        DATA[number * 16 : number * 16 + 16]: GOLDEN[slice(*index.byte_range(number, number + 1))]
        for number in range(3)
    }

    class GoldenCodec:
        def __init__(self, *_: object, **__: object) -> None: ...

        def compress(self, block: pa.Buffer, *, asbytes: bool) -> bytes:
            assert asbytes
            return packed[block.to_pybytes()]

    with monkeypatch.context() as patch:
        patch.setattr(pa, "Codec", GoldenCodec)
        blocks = [DATA[pos : pos + 16] for pos in range(0, len(DATA), 16)]
        assert b"".join(cold_object.encode_blocks(blocks, 16)) == GOLDEN


def test_every_changed_byte_and_every_cut_is_found() -> None:
    for size in range(len(GOLDEN)):
        with pytest.raises(Corrupt):
            decode(GOLDEN[:size])
    for pos in range(len(GOLDEN)):
        for value in {GOLDEN[pos] ^ 1, GOLDEN[pos] ^ 0x80, 0, 255} - {GOLDEN[pos]}:
            broken = bytearray(GOLDEN)
            broken[pos] = value
            with pytest.raises(Corrupt):
                decode(bytes(broken))


def test_a_newer_version_is_refused() -> None:
    newer = bytearray(GOLDEN)
    newer[4] = newer[-4] = 2
    covered = newer[:8] + newer[-80:-32] + newer[-32:-16]
    newer[-16:-8] = xxh3_64_intdigest(covered).to_bytes(8, "little")
    with pytest.raises(NewerFormat):
        decode(bytes(newer))


SIZES = bytes.fromhex((Path(__file__).parent / "cold" / "sizes.hex").read_text().strip())


def test_the_golden_sizes_are_read_and_written() -> None:
    sizes = sealed_segment.decode_record_sizes(SIZES, 5, 3)
    assert sizes.tolist() == [7, 130, 65536]
    assert sealed_segment.encode_record_sizes(5, sizes) == SIZES
    for base, count in ((4, 3), (5, 2), (5, 4)):
        with pytest.raises(Corrupt):
            sealed_segment.decode_record_sizes(SIZES, base, count)
    for pos in range(len(SIZES)):
        broken = bytearray(SIZES)
        broken[pos] ^= 1
        with pytest.raises(Corrupt):
            sealed_segment.decode_record_sizes(bytes(broken), 5, 3)
        with pytest.raises(Corrupt):
            sealed_segment.decode_record_sizes(SIZES[:pos], 5, 3)
