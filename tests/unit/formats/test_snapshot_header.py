"""The snapshot's envelope and its MessagePack body."""

from __future__ import annotations

import struct

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelog.errors import Corrupt, NewerFormat
from tidelog.formats import small_files

quick = settings(max_examples=150, deadline=None, database=None)
u64 = st.integers(0, (1 << 64) - 1)


class Floors(msgspec.Struct, frozen=True):
    evict: int
    earliest: int


class Meta(msgspec.Struct, frozen=True):
    topics: dict[str, int]
    floors: dict[int, Floors]
    next_id: int


metas = st.builds(
    Meta,
    topics=st.dictionaries(st.text(max_size=5), u64, max_size=4),
    floors=st.dictionaries(u64, st.builds(Floors, u64, u64), max_size=4),
    next_id=u64,
)


def naive(body: bytes, version: int = 100) -> bytes:
    return b"SNP1" + struct.pack("<II", version, len(body)) + xxhash.xxh3_64(body).digest()[::-1] + body


@quick
@given(metas)
def test_a_snapshot_decodes_to_its_content(meta: Meta) -> None:
    made = small_files.encode_snapshot(meta)
    assert made == naive(made[20:])
    assert small_files.decode_snapshot(Meta, made) == meta
    assert small_files.decode_snapshot(Meta, memoryview(made)) == meta


def test_maps_keep_the_order_they_were_filled_in() -> None:
    assert small_files.encode_snapshot(Meta({"a": 1, "b": 2}, {}, 3)) != small_files.encode_snapshot(
        Meta({"b": 2, "a": 1}, {}, 3)
    )


GOOD = small_files.encode_snapshot(Meta({"orders": 10}, {10: Floors(1, 2)}, 11))


@pytest.mark.parametrize(
    ("buf", "words"),
    [
        (b"", "too few"),
        (GOOD[:19], "too few"),
        (b"SNP2" + GOOD[4:], "begins with"),
        (naive(b"\0", version=3), "version 3 was never written here"),
        (naive(b"\0", version=99), "version 99"),
        (GOOD[:-1], "bytes in its header, not"),
        (GOOD + b"\0", "bytes in its header, not"),
        (GOOD[:-1] + b"\0", "checksum"),
        (GOOD[:12] + bytes(8) + GOOD[20:], "checksum"),
        (naive(b""), "does not decode"),
        (naive(b"\x01"), "does not decode"),
        (naive(b"\x80"), "does not decode"),
        (naive(GOOD[20:] + b"\0"), "does not decode"),
        (naive(b"\x81\xa6topics\x81\xa1\xff\x01"), "does not decode"),
        (naive(b"\x91" * 100_000 + b"\x01"), "does not decode"),
        (naive(b"\x81\xa1x" * 100_000 + b"\x01"), "does not decode"),
        (naive(b"\xdf\xff\xff\xff\xff"), "does not decode"),
        (naive(b"\x81\xa6topics\xdf\xff\xff\xff\xff"), "does not decode"),
    ],
)
def test_anything_else_is_corrupt_with_a_reason(buf: bytes, words: str) -> None:
    with pytest.raises(Corrupt, match=words) as caught:
        small_files.decode_snapshot(Meta, buf, "snapshot.0007.bin")
    assert "snapshot.0007.bin" in str(caught.value)


def test_a_newer_snapshot_is_refused() -> None:
    with pytest.raises(NewerFormat) as caught:
        small_files.decode_snapshot(Meta, naive(GOOD[20:], version=102))
    assert (caught.value.found, caught.value.known) == (102, 101)


@quick
@given(st.binary(max_size=60))
def test_random_bodies_are_a_snapshot_or_a_typed_error(body: bytes) -> None:
    for buf in (body, naive(body)):
        try:
            small_files.decode_snapshot(Meta, buf)
        except (Corrupt, NewerFormat):
            continue
        assert buf != body, "bytes without the envelope are never a snapshot"
