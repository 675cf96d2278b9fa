"""Compressed objects of the cold tier: any data, read back whole and by ranges, within bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.errors import Corrupt
from tidelog.formats import cold_object


def blocks_of(data: bytes, size: int) -> list[bytes]:
    return [data[pos : pos + size] for pos in range(0, len(data), size)]


def encode(data: bytes, size: int) -> bytes:
    return b"".join(cold_object.encode_blocks(blocks_of(data, size), size))


@given(st.binary(max_size=2000), st.integers(1, 500), st.data())
def test_any_data_is_read_back_whole_and_by_ranges(data: bytes, size: int, draw: st.DataObject) -> None:
    content = encode(data, size)
    assert b"".join(cold_object.decode_object(content, "x")) == data
    tail = content[-cold_object.tail_bytes(len(data), size) :]
    index = cold_object.decode_index(tail, len(content), "x")
    if not len(index):
        return
    first = draw.draw(st.integers(0, len(index) - 1))
    stop = draw.draw(st.integers(first + 1, len(index)))
    lo, hi = index.byte_range(first, stop)
    fetched, pos = content[lo:hi], lo
    for number in range(first, stop):
        begin, end = index.byte_range(number, number + 1)
        assert begin == pos, "blocks are adjacent: one read fetches any run of them"
        block = index.decode_block(number, fetched[begin - lo : end - lo], "x")
        assert block == data[number * size : number * size + size]
        pos = end


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_flipped_bit_is_found(data: bytes, draw: st.DataObject) -> None:
    content = bytearray(encode(data, 100))
    content[draw.draw(st.integers(0, len(content) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    with pytest.raises(Corrupt):
        b"".join(cold_object.decode_object(bytes(content), "x"))


def test_a_block_that_claims_to_be_longer_is_refused() -> None:
    bomb = encode(bytes(1 << 20), 1 << 20)
    index = cold_object.decode_index(bomb, len(bomb), "x")
    shorter = cold_object.BlockIndex(100, 100, index.stops, index.sums)
    with pytest.raises(Corrupt, match="does not decompress"):
        shorter.decode_block(0, bomb[slice(*index.byte_range(0, 1))], "x")


@pytest.mark.parametrize("size", [0, 1, 8, 39])
def test_too_few_bytes_are_refused(size: int) -> None:
    with pytest.raises(Corrupt):
        cold_object.decode_index(bytes(size), size, "x")


def test_compression_needs_memory_of_one_block() -> None:
    pieces = cold_object.encode_blocks((bytes(1 << 16) for _ in range(1000)), 1 << 16)
    assert max(map(len, pieces)) < 1 << 16
