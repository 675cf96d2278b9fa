"""Which content coding a peer gets (RFC 9110, 12.5.3), and that what was coded comes out as it went in."""

from __future__ import annotations

import gzip
import zlib
from random import Random

import pyarrow as pa
import pytest

from tidelog.decompression import DECODE_STEP_BYTES
from tidelog.http import compression
from tidelog.http.compression import GZIP, ZSTD, BadCoding, BodyTooLarge, GzipDecompressor, NegotiatedCoding

TABLE: list[tuple[bytes, bytes | None, bool]] = [
    (b"", None, False),
    (b"gzip", GZIP, False),
    (b"x-gzip", GZIP, False),
    (b"zstd", ZSTD, False),
    (b"gzip, zstd", ZSTD, False),
    (b"GZIP;Q=1.0, br", GZIP, False),
    (b"gzip, deflate, br", GZIP, False),
    (b"deflate, br", None, False),
    (b"gzip;q=1, zstd;q=0.5", GZIP, False),
    (b"gzip;q=0.5, zstd;q=0.5", ZSTD, False),
    (b"gzip;q=0", None, False),
    (b"gzip;q=0, zstd;q=0.000", None, False),
    (b"gzip ; q = 0.8", GZIP, False),
    (b"*", ZSTD, False),
    (b"*;q=0.1, zstd;q=0", GZIP, False),
    (b"*;q=0", None, False),
    (b"gzip, *;q=0", GZIP, True),
    (b"gzip, identity;q=0", GZIP, True),
    (b"gzip, identity;q=0, *;q=0", GZIP, True),
    (b"identity", None, False),
    (b"identity;q=0", None, False),
    (b"identity, gzip;q=0.5", None, False),
    (b"identity;q=0.5, gzip", GZIP, False),
    (b"gzip;q=nonsense", None, False),
    (b",, ;q=1,gzip", GZIP, False),
]


@pytest.mark.parametrize(("accept", "coding", "must"), TABLE)
def test_the_choice(accept: bytes, coding: bytes | None, must: bool) -> None:
    assert compression.negotiate_coding(accept) == NegotiatedCoding(coding, must)


@pytest.mark.parametrize(
    ("header", "coding"),
    [
        (b"gzip", GZIP),
        (b" X-GZIP ", GZIP),
        (b"Zstd", ZSTD),
        (b"identity", b""),
        (b"", b""),
        (b"br", None),
        (b"gzip, zstd", None),
    ],
)
def test_content_encoding_header(header: bytes, coding: bytes | None) -> None:
    assert compression.parse_content_encoding(header) == coding


SAMPLES = (b"", b"x", b"abc" * 10_000, Random(7).randbytes(100_000))


@pytest.mark.parametrize("coding", compression.CODINGS)
def test_compressed_body_decodes_to_the_original(coding: bytes) -> None:
    """The other side is not ours: gzip of the standard library, zstd of another call."""
    for data in SAMPLES:
        packed = compression.compress_body(coding, data)
        if coding == GZIP:
            assert gzip.decompress(packed) == data
        else:
            assert pa.CompressedInputStream(pa.BufferReader(packed), "zstd").read() == data
        assert compression.decompress_body(coding, packed, len(data)) == data


def packed(coding: bytes, data: bytes) -> bytes:
    whole: bytes = gzip.compress(data) if coding == GZIP else pa.Codec("zstd").compress(data, asbytes=True)
    return whole


@pytest.mark.parametrize("coding", compression.CODINGS)
def test_limit_holds_for_the_decoded_body(coding: bytes) -> None:
    data = packed(coding, b"x" * 1_000_000)
    assert len(data) < 5000
    assert len(compression.decompress_body(coding, data, 1_000_000)) == 1_000_000
    with pytest.raises(BodyTooLarge):
        compression.decompress_body(coding, data, 999_999)
    with pytest.raises(BodyTooLarge):
        compression.decompress_body(coding, packed(coding, b"x"), 0)


@pytest.mark.parametrize("coding", compression.CODINGS)
def test_several_members_are_one_body(coding: bytes) -> None:
    assert compression.decompress_body(coding, packed(coding, b"abc") + packed(coding, b"def"), 6) == b"abcdef"
    with pytest.raises(BodyTooLarge):
        compression.decompress_body(coding, packed(coding, b"abc") + packed(coding, b"def"), 5)


@pytest.mark.parametrize("coding", compression.CODINGS)
def test_body_that_is_not_in_its_coding_is_refused(coding: bytes) -> None:
    whole = packed(coding, b"x" * 1000)
    for data in (b"plain text", whole[:-4], whole + b"more", whole[:5] + b"\xff" * 20):
        with pytest.raises(BadCoding):
            compression.decompress_body(coding, data, 10_000)


def test_pieces_of_any_size_give_the_same() -> None:
    data = bytes(range(256)) * 100
    whole = packed(GZIP, data[:9000]) + packed(GZIP, data[9000:])
    for size in (1, 7, 1000):
        unpacker = GzipDecompressor()
        parts = [part for at in range(0, len(whole), size) for part in unpacker.feed(whole[at : at + size])]
        unpacker.end()
        assert b"".join(parts) == data


def test_a_bomb_is_inflated_in_bounded_steps() -> None:
    """256 MiB of newlines in 261 KB came out of one call at once."""
    unpacker = GzipDecompressor()
    steps = unpacker.feed(packed(GZIP, b"\n" * (64 << 20)))
    sizes = [len(step) for step in steps]
    assert (sum(sizes), max(sizes)) == (64 << 20, DECODE_STEP_BYTES)
    unpacker.end()


def test_members_without_end_are_refused() -> None:
    """Each costs a decompressor, and the rest of the body was copied for each of them."""
    member = packed(GZIP, b"")
    with pytest.raises(BadCoding, match="1024 gzip members"):
        compression.decompress_body(GZIP, member * 200_000, 1 << 20)
    assert compression.decompress_body(GZIP, member * 1_000 + packed(GZIP, b"x"), 1 << 20) == b"x"
    many = packed(GZIP, bytes(range(256))) * 3_000
    assert compression.decompress_body(GZIP, many, 1 << 20) == bytes(range(256)) * 3_000


@pytest.mark.parametrize("coding", compression.CODINGS)
def test_a_flushed_stream_can_be_read_so_far(coding: bytes) -> None:
    packer = compression.create_compressor(coding)
    reader = zlib.decompressobj(wbits=31)
    so_far, plain = b"", b""
    for index in range(20):
        piece = b"record %d\n" % index
        plain += piece
        part = packer.compress(piece) + packer.flush()
        so_far += part
        if coding == GZIP:
            assert reader.decompress(part) == piece
        else:
            assert pa.CompressedInputStream(pa.BufferReader(so_far), "zstd").read(len(plain)) == plain
    so_far += packer.end()
    assert compression.decompress_body(coding, so_far, len(plain)) == plain
