"""LargeRecord: a record whose data is in a blob file. Only this module knows the frame's body and the blob's layout.

    body of the frame (type 17), one record; node and tag are in the frame's header
    0        8      16     24         32            36         40
    ┌────────┬──────┬──────┬──────────┬─────────────┬──────────┬──────┬───────────┐
    │ length │ blob │ xxh3 │ sums_xxh3│ chunk_bytes │ meta_len │ meta │ reference │
    │  u64   │ u64  │ u64  │   u64    │     u32     │   u32    │      │ JSON text │
    └────────┴──────┴──────┴──────────┴─────────────┴──────────┴──────┴───────────┘

    blob file
    0        4         5      8             12     16
    ┌────────┬─────────┬──────┬─────────────┬──────┬──────┬──────────────────────┐
    │ "TLBB" │ version │ zero │ chunk_bytes │ zero │ data │ xxh3 u64 × chunks    │
    │  4 B   │   u8    │ 3 B  │     u32     │ u32  │      │ of each chunk        │
    └────────┴─────────┴──────┴─────────────┴──────┴──────┴──────────────────────┘

Little-endian. `length` are the bytes of data, `blob` names the file, `xxh3` covers the data, `sums_xxh3` the header of
the blob and the checksums at its end: so the frame proves them and they prove every chunk, and any range is
verified by reading the chunks around it. A blob is exactly as long as its header, data and checksums.

The reference is what a reader gets in place of the data: an object with one key, `$large`. Its `href` is relative to
the URL of the topic. It is text in the frame, so that a reader that follows no references copies it like other JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from tidelog.errors import Corrupt, NewerFormat
from tidelog.formats.frame import LARGE_RECORD, U32_MAX, Fault, Frame, encode_parts, read_frame
from tidelog.formats.rows import Rows, ScanStop, Span
from tidelog.types import Buffer

REFERENCE_KEY: Final = "$large"
LENGTH_MAX: Final = U32_MAX  # an index entry has 32 bits for it
BLOB_MAGIC: Final = b"TLBB"
BLOB_VERSION: Final = 1
CHUNK_BYTES: Final = 1 << 20
_CHUNK_BYTES_MIN: Final = 1 << 10
_CHUNK_BYTES_MAX: Final = 64 << 20  # a reader allocates one
_BODY = Struct("<QQQQII")
_BLOB_HEADER = Struct("<4sB3sII")
BLOB_HEADER_BYTES: Final = 16
_SUM_BYTES: Final = 8
_PAD: Final = bytes(3)
assert (_BODY.size, _BLOB_HEADER.size) == (40, BLOB_HEADER_BYTES), (
    "drawn above, frozen by tests/golden; changing it is a new format"
)


class BlobRef(NamedTuple):
    """Which blob holds the data of a record, and what proves it."""

    length: int
    blob_id: int
    digest: int  # XXH3-64 of the data
    sums_digest: int  # XXH3-64 of the blob's header and of the checksums of its chunks
    chunk_bytes: int = CHUNK_BYTES

    @property
    def chunks(self) -> int:
        return -(-self.length // self.chunk_bytes)

    @property
    def file_bytes(self) -> int:
        """The size of the blob file."""
        return BLOB_HEADER_BYTES + self.length + _SUM_BYTES * self.chunks


def encode_reference(ref: BlobRef, seq: int) -> bytes:
    """Encode the JSON that readers get in place of the data."""
    return b'{"%s":{"bytes":%d,"xxh3":"%016x","href":"records/%d/data"}}' % (
        REFERENCE_KEY.encode(),
        ref.length,
        ref.digest,
        seq,
    )


def encode_frame(
    topic_id: int, seq: int, ts_ms: int, ref: BlobRef, *, tag: bytes, node: bytes, meta: bytes, flags: int = 0
) -> bytes:
    """Encode the frame of a record whose blob is complete; `flags` takes DURABLE and MORE."""
    assert 0 < ref.length <= LENGTH_MAX, "checked while the data was written"
    body = _BODY.pack(ref.length, ref.blob_id, ref.digest, ref.sums_digest, ref.chunk_bytes, len(meta))
    parts = [body, meta, encode_reference(ref, seq)]
    return encode_parts(LARGE_RECORD, topic_id, seq, seq, ts_ms, parts, node=node, tag=tag, flags=flags)


def decode(buf: Buffer, frames: Sequence[Frame]) -> tuple[Rows, tuple[int, Fault] | None]:
    """Decode these frames as rows whose data is the reference, up to the first that does not decode; also return its
    position and why."""
    numbers: list[tuple[int, ...]] = []
    bad: tuple[int, Fault] | None = None
    for frame in frames:
        fault = _find_fault(buf, frame)
        if fault is not None:
            bad = frame.pos, Fault(ScanStop.BAD, fault)
            break
        length, *_, meta_len = _BODY.unpack_from(buf, frame.data_pos)
        meta_pos = frame.data_pos + _BODY.size
        data_pos = meta_pos + meta_len
        numbers.append(
            (
                *(frame.seq, frame.ts_ms * 1000, frame.pos, data_pos, frame.data_end - data_pos),
                *(frame.node_pos, frame.tag_pos - frame.node_pos, frame.tag_pos, frame.data_pos - frame.tag_pos),
                *(meta_pos, meta_len, length),
            )
        )
    cells = np.array(numbers, np.int64).reshape(len(numbers), 12).T.copy()
    node, tag, meta = (Span(cells[at], cells[at + 1]) if cells[at + 1].any() else None for at in (5, 7, 9))
    rows = Rows(buf, cells[0], cells[1], cells[2], Span(cells[3], cells[4]), node, tag, meta, blob_bytes=cells[11])
    return rows, bad


def _find_fault(buf: Buffer, frame: Frame) -> str | None:
    size = frame.data_end - frame.data_pos
    if size < _BODY.size:
        return f"a body of {size} bytes is too short for a large record"
    length, _, _, _, chunk_bytes, meta_len = _BODY.unpack_from(buf, frame.data_pos)
    if not 0 < length <= LENGTH_MAX:
        return f"a large record of {length} bytes"
    if not _CHUNK_BYTES_MIN <= chunk_bytes <= _CHUNK_BYTES_MAX:
        return f"a large record with chunks of {chunk_bytes} bytes"
    if meta_len > size - _BODY.size:
        return f"a meta of {meta_len} bytes does not fit a body of {size}"
    return None


def read_ref(buf: Buffer, frame_pos: int) -> BlobRef:
    """Return the blob of the decoded frame at this position."""
    frame = read_frame(buf, frame_pos, len(buf), check=False)
    assert isinstance(frame, Frame) and frame.kind == LARGE_RECORD, "only for rows that `decode` returned"  # noqa: PT018
    return BlobRef(*_BODY.unpack_from(buf, frame.data_pos)[:5])


# ── blob files ────────────────────────────────────────────────────────────────────────────────────


def encode_blob_header(chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """Encode the bytes before the data of a blob."""
    return _BLOB_HEADER.pack(BLOB_MAGIC, BLOB_VERSION, _PAD, chunk_bytes, 0)


class BlobHasher:
    """Checksums of a blob whose data arrives in pieces of any size."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes, self._left = chunk_bytes, chunk_bytes
        self._whole, self._chunk, self._sums = xxh3_64(), xxh3_64(), list[int]()
        self.length = 0

    def update(self, data: Buffer) -> None:
        view = memoryview(data)
        self._whole.update(view)
        self.length += len(view)
        while len(view):
            piece = view[: self._left]
            self._chunk.update(piece)
            self._left -= len(piece)
            view = view[len(piece) :]
            if not self._left:
                self._end_chunk()

    def _end_chunk(self) -> None:
        self._sums.append(self._chunk.intdigest())
        self._chunk.reset()
        self._left = self._chunk_bytes

    def finish(self, blob_id: int) -> tuple[BlobRef, bytes]:
        """Return the reference to the blob, and the bytes after its data."""
        if self._left < self._chunk_bytes:
            self._end_chunk()
        sums = np.array(self._sums, "<u8").tobytes()
        digest = _digest_sums(self._chunk_bytes, sums)
        return BlobRef(self.length, blob_id, self._whole.intdigest(), digest, self._chunk_bytes), sums


def _digest_sums(chunk_bytes: int, sums: bytes) -> int:
    return xxh3_64_intdigest(encode_blob_header(chunk_bytes) + sums)


def decode_sums(ref: BlobRef, header: bytes, sums: bytes, what: str) -> list[int]:
    """Return the checksums of the chunks of a blob, from the bytes before and after its data. Raises Corrupt where they
    are not those of the reference."""
    if len(header) != BLOB_HEADER_BYTES or len(sums) != _SUM_BYTES * ref.chunks:
        raise Corrupt(what, pos=len(header), reason=f"the blob is shorter than its {ref.file_bytes} bytes")
    magic, version = header[:4], header[4]
    if magic != BLOB_MAGIC:
        raise Corrupt(what, pos=0, reason=f"it begins with {magic!r} and not with {BLOB_MAGIC!r}")
    if version > BLOB_VERSION:
        raise NewerFormat(what, found=version, known=BLOB_VERSION)
    if header != encode_blob_header(ref.chunk_bytes):
        raise Corrupt(what, pos=4, reason="its header is not the one that was written")
    if _digest_sums(ref.chunk_bytes, sums) != ref.sums_digest:
        raise Corrupt(what, pos=ref.file_bytes - len(sums), reason="its checksums are not those of the record")
    return [int(value) for value in np.frombuffer(sums, "<u8")]
