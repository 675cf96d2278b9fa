"""The footer of a sealed segment: it covers every byte, and parts by their chunks."""

from __future__ import annotations

import struct
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.frames import encode_batch

from tidelog.errors import BadInput, Corrupt, NewerFormat
from tidelog.formats import frame, scan, sealed_segment, segment_index, small_files
from tidelog.formats.rows import empty_rows
from tidelog.formats.sealed_segment import Footer

TS = 1_700_000_000_000
quick = settings(max_examples=150, deadline=None, database=None)


def segment(count: int = 9, size: int = 40) -> tuple[bytes, bytes]:
    """Seqs 5 and 7 up; an index of [4, …) that starts and ends with a hole."""
    data = frame.encode(frame.APPEND, topic_id=1, seq=5, ts_ms=TS, data=b"first")
    data += encode_batch(1, 7, TS + 3, [bytes([i]) * size for i in range(count)])
    walk = scan.scan_records(data)
    return data, segment_index.build_entries(walk.rows, 4, 7 + count + 1, len(data)).tobytes()


def test_a_footer_counts_what_the_segment_holds() -> None:
    data, index = segment()
    made = sealed_segment.build_footer(data, index, first_seq=4, chunk_bytes=100)
    assert (made.first_seq, made.last_seq, made.stop_seq, made.records) == (4, 15, 17, 10)
    assert (made.ts_first_ms, made.ts_last_ms) == (TS, TS + 3)
    assert (made.data_bytes, made.idx_bytes) == (len(data), len(index)) == (len(data), 13 * 20)
    assert len(made.chunks) == -(-len(data) // 100)
    assert sealed_segment.decode_footer(sealed_segment.encode_footer(made)) == made
    assert sealed_segment.build_footer(data, index, first_seq=4).chunk_bytes == 1 << 20


def test_a_segment_of_holes_only_has_no_last_record() -> None:
    index = segment_index.build_entries(empty_rows(), 4, 6, 0).tobytes()
    made = sealed_segment.build_footer(b"", index, first_seq=4)
    assert (made.last_seq, made.stop_seq, made.records, made.chunks) == (None, 6, 0, ())
    assert sealed_segment.decode_footer(sealed_segment.encode_footer(made)) == made
    assert sealed_segment.find_bad_ranges(made, b"") == []
    nothing = sealed_segment.build_footer(b"", b"", first_seq=0)
    assert sealed_segment.decode_footer(sealed_segment.encode_footer(nothing)) == nothing


def test_half_an_entry_is_refused() -> None:
    with pytest.raises(BadInput, match="middle of an entry"):
        sealed_segment.build_footer(b"", bytes(19), first_seq=1)


@pytest.mark.parametrize("seed", range(30))
def test_a_damaged_byte_is_found_in_its_chunk_and_in_no_other(seed: int) -> None:
    random = Random(seed)
    data = random.randbytes(random.randrange(1, 400))
    made = sealed_segment.build_footer(data, b"", first_seq=1, chunk_bytes=64)
    assert sealed_segment.find_bad_ranges(made, data) == []
    at = random.randrange(len(data))
    broken = data[:at] + bytes((data[at] ^ random.randrange(1, 256),)) + data[at + 1 :]
    chunk = (at - at % 64, min(at - at % 64 + 64, len(data)))
    assert sealed_segment.find_bad_ranges(made, broken) == [chunk]
    for _ in range(20):
        pos = random.randrange(len(data) + 1)
        end = random.randrange(pos, len(data) + 1)
        touched = pos < end and pos - pos % 64 <= at < end + -end % 64
        assert sealed_segment.find_bad_ranges(made, broken, pos=pos, end=end) == ([chunk] if touched else []), (
            seed,
            pos,
            end,
        )


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 128, 199])
def test_missing_bytes_and_bytes_too_many_are_found(size: int) -> None:
    data = bytes(range(200))
    made = sealed_segment.build_footer(data, b"", first_seq=1, chunk_bytes=64)
    bad = sealed_segment.find_bad_ranges(made, data[:size])
    assert bad == [(at, min(at + 64, 200)) for at in range(size - size % 64, 200, 64)]
    assert sealed_segment.find_bad_ranges(made, data + bytes(5)) == [(200, 205)]
    assert sealed_segment.find_bad_ranges(made, data + bytes(5), pos=0, end=200) == []
    assert sealed_segment.find_bad_ranges(made, data[:size], pos=0, end=size - size % 64) == []


def test_the_index_is_verified_by_its_checksum() -> None:
    data, index = segment()
    made = sealed_segment.build_footer(data, index, first_seq=4)
    assert sealed_segment.find_index_fault(made, index) is None
    assert "260 were sealed" in (sealed_segment.find_index_fault(made, index[:-1]) or "")
    assert "checksum" in (sealed_segment.find_index_fault(made, index[:-1] + b"x") or "")


GOOD = sealed_segment.build_footer(*segment(), first_seq=4, chunk_bytes=100)


@pytest.mark.parametrize(
    "lie",
    [
        replace(GOOD, stop_seq=3),
        replace(GOOD, stop_seq=18),
        replace(GOOD, last_seq=17),
        replace(GOOD, last_seq=3),
        replace(GOOD, last_seq=None),
        replace(GOOD, records=0),
        replace(GOOD, records=13),
        replace(GOOD, ts_first_ms=TS + 4),
        replace(GOOD, ts_last_ms=frame.TS_MS_MAX + 1),
        replace(GOOD, idx_bytes=261),
        replace(GOOD, data_bytes=1),
        replace(GOOD, chunk_bytes=0),
        replace(GOOD, chunks=GOOD.chunks[1:]),
        replace(GOOD, chunks=(*GOOD.chunks, 0)),
        replace(GOOD, first_seq=(1 << 63) - 1, last_seq=(1 << 63) - 1, stop_seq=(1 << 63) + 12, records=1),
    ],
)
def test_a_footer_that_contradicts_itself_is_corrupt(lie: Footer) -> None:
    with pytest.raises(Corrupt):
        sealed_segment.decode_footer(sealed_segment.encode_footer(lie), "seg-4.foot")


def test_a_body_with_bytes_left_over_or_missing_is_corrupt() -> None:
    body = sealed_segment.encode_footer(GOOD)[small_files.FILE_HEADER_BYTES :]
    for size in (0, 79, 80, len(body) - 1):
        with pytest.raises(Corrupt):
            sealed_segment.decode_footer(
                small_files.wrap_file(sealed_segment.FOOTER_MAGIC, sealed_segment.FOOTER_VERSION, body[:size])
            )
    with pytest.raises(Corrupt):
        sealed_segment.decode_footer(
            small_files.wrap_file(sealed_segment.FOOTER_MAGIC, sealed_segment.FOOTER_VERSION, body + bytes(8))
        )


def test_a_chunk_count_without_its_bytes_is_corrupt() -> None:
    body = struct.pack("<9Q2I", 1, (1 << 64) - 1, 1, 0, 0, 0, (1 << 32) - 1, 0, 0, 1, (1 << 32) - 1)
    with pytest.raises(Corrupt, match="chunks"):
        sealed_segment.decode_footer(
            small_files.wrap_file(sealed_segment.FOOTER_MAGIC, sealed_segment.FOOTER_VERSION, body)
        )


@quick
@given(st.binary(max_size=130), st.booleans())
def test_random_bytes_are_a_footer_or_a_typed_error(buf: bytes, wrapped: bool) -> None:
    if wrapped:
        buf = small_files.wrap_file(sealed_segment.FOOTER_MAGIC, sealed_segment.FOOTER_VERSION, buf)
    try:
        made = sealed_segment.decode_footer(buf)
    except (Corrupt, NewerFormat):
        return
    assert sealed_segment.encode_footer(made) == buf
