"""The files that complete a sealed segment: its footer, its deletion vector and, for a segment in the cold tier, the
sizes of its records. The only module that knows their bytes.

The footer of a sealed segment, `seg-<first>.foot`.

    file header "TLSF" 1
    ┌───────┬──────┬──────┬──────────┬─────────┬─────────┬──────┬─────┬──────────┬───────┬───┐
    │ first │ last │ stop │ ts_first │ ts_last │ records │ data │ idx │ idx_xxh3 │ chunk │ n │
    ├───────┴──────┴──────┴──────────┴─────────┴─────────┴──────┴─────┴──────────┴───────┴───┤
    │ xxh3 u64 × n          of each `chunk` bytes of `.data`, the last one shorter           │
    └────────────────────────────────────────────────────────────────────────────────────────┘
    nine u64, then chunk and n as u32; data and idx are sizes in bytes; times in milliseconds

The footer is written last, when a segment will never change again, and covers both `.data` and `.idx`. A whole scan
verifies at memory speed and a partial read verifies the chunks that it reads; the checksums of frames would cost a call
per record. The checksum of a chunk with a frame that did not verify when the segment was sealed is inverted: it never
matches, and readers verify frame by frame.

The deletion vector of a sealed segment, `seg-<first>.del`.

    file header "TLDV" 1
    ┌──────┬──────┬─────────┬─────────────────────┐
    │ base │ size │ deleted │ bitmap              │      u64, u32, u32, ⌈size / 8⌉ bytes
    └──────┴──────┴─────────┴─────────────────────┘
                              bit i % 8 of byte i / 8 is set: seq base + i is deleted

Data files never change, so that a segment can be kept in an object store; its deletions are stored here, and this file
is replaced as a whole. `deleted` is the number of set bits, and bits after `size` are zero: the same deletions always
give the same bytes.

The record sizes of a sealed segment, `seg-<first>.siz`.

    file header "TLRS" 1
    ┌──────┬───────┬──────┬───────────────┐
    │ base │ count │ zero │ sizes         │      u64, u32, u32, count × u64
    └──────┴───────┴──────┴───────────────┘
                            bytes of data and meta of seq base + i

Written before a segment with metas moves to the cold tier: the index has the length of the data only, and a cap or a
delete must know what a record counts without a read of the data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from tidelog.errors import BadInput, Corrupt
from tidelog.formats import segment_index, small_files
from tidelog.formats.frame import SEQ_MAX, TS_MS_MAX, U32_MAX
from tidelog.types import Buffer, Ints

FOOTER_MAGIC: Final = b"TLSF"
FOOTER_VERSION: Final = 1
CHUNK_BYTES: Final = 1 << 20
_FOOTER_HEAD = Struct("<9Q2I")
_NO_VALUE: Final = (1 << 64) - 1  # "no value" in a u64


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    first_seq: int  # of index entry 0, and of the file name
    last_seq: int | None  # of the last record; None where only holes are left
    stop_seq: int  # one past the range the segment stands for
    ts_first_ms: int  # of the first record; 0 where there is none
    ts_last_ms: int
    records: int  # holes not counted
    data_bytes: int
    idx_bytes: int
    idx_xxh3: int
    chunk_bytes: int = CHUNK_BYTES
    chunks: tuple[int, ...] = ()  # XXH3-64 of each chunk of the data


def build_footer(data: Buffer, index: Buffer, *, first_seq: int, chunk_bytes: int = CHUNK_BYTES) -> Footer:
    """Build the footer of a complete segment. The index is not verified: check it first if it was read from a file."""
    if len(index) % segment_index.ENTRY_BYTES:
        raise BadInput(f"an index of {len(index)} bytes ends in the middle of an entry")
    entries = segment_index.read_entries(index)
    live = np.flatnonzero((entries["flags"] & segment_index.HOLE) == 0)
    view = memoryview(data)
    return Footer(
        first_seq=first_seq,
        last_seq=first_seq + int(live[-1]) if len(live) else None,
        stop_seq=first_seq + len(entries),
        ts_first_ms=int(entries["ts"][live[0]]) if len(live) else 0,
        ts_last_ms=int(entries["ts"][live[-1]]) if len(live) else 0,
        records=len(live),
        data_bytes=len(view),
        idx_bytes=len(index),
        idx_xxh3=xxh3_64_intdigest(index),
        chunk_bytes=chunk_bytes,
        chunks=tuple(xxh3_64_intdigest(view[pos : pos + chunk_bytes]) for pos in range(0, len(view), chunk_bytes)),
    )


def exclude_ranges(footer: Footer, spans: Iterable[range]) -> Footer:
    """Return the footer with inverted checksums for the chunks that hold these bytes, so that no reader takes them for
    verified."""
    step, out = footer.chunk_bytes, set[int]()
    for span in spans:
        out.update(range(span.start // step, -(-span.stop // step)))
    chunks = tuple(checksum ^ _NO_VALUE if number in out else checksum for number, checksum in enumerate(footer.chunks))
    return replace(footer, chunks=chunks)


def encode_footer(footer: Footer) -> bytes:
    head = _FOOTER_HEAD.pack(
        footer.first_seq,
        _NO_VALUE if footer.last_seq is None else footer.last_seq,
        footer.stop_seq,
        footer.ts_first_ms,
        footer.ts_last_ms,
        footer.records,
        footer.data_bytes,
        footer.idx_bytes,
        footer.idx_xxh3,
        footer.chunk_bytes,
        len(footer.chunks),
    )
    return small_files.wrap_file(
        FOOTER_MAGIC, FOOTER_VERSION, head + Struct(f"<{len(footer.chunks)}Q").pack(*footer.chunks)
    )


def decode_footer(buf: Buffer, what: str = "segment footer") -> Footer:
    """Decode a footer; Corrupt or NewerFormat when it is not one, or contradicts itself."""
    body = small_files.unwrap_file(FOOTER_MAGIC, FOOTER_VERSION, buf, what)
    if len(body) < _FOOTER_HEAD.size:
        raise Corrupt(what, pos=small_files.FILE_HEADER_BYTES, reason=f"a body of {len(body)} bytes is too short")
    first, last, stop, ts_first, ts_last, records, data, index, index_sum, chunk, n = _FOOTER_HEAD.unpack_from(body)
    span = stop - first
    are_records_possible = (
        records == 0 if last == _NO_VALUE else first <= last < stop and 0 < records <= last - first + 1
    )
    if not (span >= 0 and stop - 1 <= SEQ_MAX and are_records_possible and index == span * segment_index.ENTRY_BYTES):
        raise Corrupt(
            what, pos=small_files.FILE_HEADER_BYTES, reason=f"{records} records in [{first}, {stop}) cannot be"
        )
    if not ts_first <= ts_last <= TS_MS_MAX:
        raise Corrupt(what, pos=small_files.FILE_HEADER_BYTES, reason=f"times {ts_first} to {ts_last} ms cannot be")
    if not chunk or n != -(-data // chunk) or len(body) != _FOOTER_HEAD.size + 8 * n:
        raise Corrupt(what, pos=small_files.FILE_HEADER_BYTES, reason=f"{n} chunks of {chunk} for {data} bytes of data")
    return Footer(
        first_seq=first,
        last_seq=None if last == _NO_VALUE else last,
        stop_seq=stop,
        ts_first_ms=ts_first,
        ts_last_ms=ts_last,
        records=records,
        data_bytes=data,
        idx_bytes=index,
        idx_xxh3=index_sum,
        chunk_bytes=chunk,
        chunks=Struct(f"<{n}Q").unpack_from(body, _FOOTER_HEAD.size),
    )


def is_chunk_valid(footer: Footer, number: int, content: Buffer) -> bool:
    """Whether these bytes are chunk `number` of the data."""
    return number < len(footer.chunks) and xxh3_64_intdigest(content) == footer.chunks[number]


def find_bad_ranges(footer: Footer, data: Buffer, *, pos: int = 0, end: int | None = None) -> list[tuple[int, int]]:
    """Return the byte ranges around [pos, end) of the data that differ from what was sealed; empty when none does.

    `data` is the whole file. Missing and extra bytes are bad ranges too.
    """
    view = memoryview(data)
    end = max(len(view), footer.data_bytes) if end is None else end
    if pos >= end:
        return []
    bad: list[tuple[int, int]] = []
    step = footer.chunk_bytes
    for start in range(pos - pos % step, min(end, footer.data_bytes), step):
        stop = min(start + step, footer.data_bytes)
        if xxh3_64_intdigest(view[start:stop]) != footer.chunks[start // step]:
            bad.append((start, stop))
    if end > footer.data_bytes and len(view) > footer.data_bytes:
        bad.append((footer.data_bytes, len(view)))
    return bad


def find_index_fault(footer: Footer, index: Buffer) -> str | None:
    """Return what is wrong with the bytes of the index, or None when they are the ones that were sealed."""
    if len(index) != footer.idx_bytes:
        return f"the index has {len(index)} bytes, {footer.idx_bytes} were sealed"
    return None if xxh3_64_intdigest(index) == footer.idx_xxh3 else "the index does not match its checksum"


DELETIONS_MAGIC: Final = b"TLDV"
DELETIONS_VERSION: Final = 1
_DELETIONS_HEAD = Struct("<QII")


class DeletionVector:
    """The deleted seqs among [base, base + size). A mark is never removed."""

    __slots__ = ("_bits", "base", "size")

    def __init__(self, base: int, size: int) -> None:
        if not (base >= 0 and 0 <= size <= U32_MAX and base + size - 1 <= SEQ_MAX):
            raise BadInput(f"a deletion vector of {size} seqs from {base} does not fit its file")
        self.base, self.size = base, size
        self._bits: NDArray[np.uint8] = np.zeros((size + 7) // 8, np.uint8)

    @property
    def count(self) -> int:
        """How many seqs are deleted."""
        return int(np.unpackbits(self._bits).sum())

    def mark(self, seqs: Ints | Iterable[int]) -> int:
        """Mark these seqs, all inside the vector, as deleted; return how many are new."""
        which = np.asarray(seqs if isinstance(seqs, np.ndarray) else list(seqs), np.int64) - self.base
        if len(which) and (int(which.min()) < 0 or int(which.max()) >= self.size):
            raise BadInput(f"a seq to delete is outside the segment's [{self.base}, {self.base + self.size})")
        before = self.count
        np.bitwise_or.at(self._bits, which >> 3, np.uint8(1) << (which & 7).astype(np.uint8))
        return self.count - before

    def seqs(self) -> Ints:
        """The deleted seqs, rising."""
        return np.flatnonzero(np.unpackbits(self._bits, bitorder="little")) + self.base


def encode_deletion_vector(vector: DeletionVector) -> bytes:
    head = _DELETIONS_HEAD.pack(vector.base, vector.size, vector.count)
    return small_files.wrap_file(DELETIONS_MAGIC, DELETIONS_VERSION, head + vector._bits.tobytes())


def decode_deletion_vector(buf: Buffer, what: str = "deletion vector") -> DeletionVector:
    """Decode the file of a vector; Corrupt or NewerFormat when it is not one."""
    body = small_files.unwrap_file(DELETIONS_MAGIC, DELETIONS_VERSION, buf, what)
    if len(body) < _DELETIONS_HEAD.size:
        raise Corrupt(what, pos=small_files.FILE_HEADER_BYTES, reason=f"a body of {len(body)} bytes is too short")
    base, size, deleted = _DELETIONS_HEAD.unpack_from(body)
    if (size + 7) // 8 != len(body) - _DELETIONS_HEAD.size or base + size - 1 > SEQ_MAX:
        raise Corrupt(what, pos=small_files.FILE_HEADER_BYTES, reason=f"{size} seqs from {base} do not fit its bitmap")
    vector = DeletionVector(base, size)
    vector._bits = np.frombuffer(body, np.uint8, offset=_DELETIONS_HEAD.size).copy()
    spare = len(vector._bits) * 8 - size
    if spare and int(vector._bits[-1]) >> (8 - spare):
        raise Corrupt(what, pos=len(buf) - 1, reason="bits after the last seq are set")
    if vector.count != deleted:
        reason = f"its head has {deleted} deletions, its bitmap {vector.count}"
        raise Corrupt(what, pos=small_files.FILE_HEADER_BYTES, reason=reason)
    return vector


SIZES_MAGIC: Final = b"TLRS"
SIZES_VERSION: Final = 1
_SIZES_HEAD = Struct("<QII")


def encode_record_sizes(base: int, sizes: Ints) -> bytes:
    """Encode a `.siz` file."""
    head = _SIZES_HEAD.pack(base, len(sizes), 0)
    return small_files.wrap_file(SIZES_MAGIC, SIZES_VERSION, head + sizes.astype("<u8").tobytes())


def decode_record_sizes(buf: Buffer, base: int, count: int, what: str = "record sizes") -> Ints:
    """Decode the sizes of `count` records from `base` on; Corrupt or NewerFormat when it is another file."""
    body = small_files.unwrap_file(SIZES_MAGIC, SIZES_VERSION, buf, what)
    start = small_files.FILE_HEADER_BYTES
    if len(body) != _SIZES_HEAD.size + 8 * count:
        raise Corrupt(what, pos=start, reason=f"a body of {len(body)} bytes for {count} records")
    if _SIZES_HEAD.unpack_from(body) != (base, count, 0):
        raise Corrupt(what, pos=start, reason=f"it is not about the {count} records from {base} on")
    return np.frombuffer(body, "<u8", offset=_SIZES_HEAD.size).astype(np.int64)
