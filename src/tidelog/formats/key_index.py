"""The key index of a sealed segment of a topic with compaction, `seg-<first>.key`. No other module knows its bytes.

    0       4         5      8      16     24         32        36     40      44     48     56
    ┌───────┬─────────┬──────┬──────┬──────┬──────────┬─────────┬──────┬───────┬──────┬──────┬──────┐
    │ magic │ version │ zero │ base │ foot │ selector │  seqs   │ keys │ older │ zero │ xxh3 │ body │
    │ TLKI  │   u8    │ 3 B  │ u64  │ u64  │   u64    │   u32   │ u32  │  u32  │ u32  │ u64  │      │
    └───────┴─────────┴──────┴──────┴──────┴──────────┴─────────┴──────┴───────┴──────┴──────┴──────┘
    └──────────────────────────────── covered ───────────────────────────────────────┘      └ covered

    body    digest 16 B × keys │ row u32 × keys │ tombstone bits, ⌈keys / 8⌉ B │ row u32 × older │ key u32 × older

`seqs` counts the seqs from `base` to the end of the segment. A digest is the BLAKE2b of a key, 16 bytes; digests ascend
as bytes, each once. `row` is the newest record of the key in this segment (seq − base), and its bit says whether that
record is a tombstone. `older` lists the other records with a key: their rows, ascending, and the position of their key
among the digests. `foot` is the XXH3-64 of the segment's `.foot`, `selector` that of the topic's rule for keys: an
index beside another footer or rule is built again. The file is derived from `.data`.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from tidelog.errors import Corrupt, NewerFormat
from tidelog.types import Buffer

MAGIC: Final = b"TLKI"
VERSION: Final = 1
DIGEST_BYTES: Final = 16
_HEAD = Struct("<4sB3sQQQIIII")
_SUM = Struct("<Q")
HEAD_BYTES: Final = 56
assert _HEAD.size + _SUM.size == HEAD_BYTES, "drawn above, frozen by tests/golden; changing it is a new format"

Words = NDArray[np.uint64]


class SegmentKeys(NamedTuple):
    """The keys of a range of records. Rows count from its first seq."""

    high: Words  # of each digest, as two big-endian numbers; ascending by (high, low)
    low: Words
    rows: NDArray[np.uint32]  # the newest record of each key
    tombstones: NDArray[np.bool_]  # whether that is one
    older_rows: NDArray[np.uint32]  # all other records with a key, ascending
    older_keys: NDArray[np.uint32]  # the position of the key of each


def encode(base: int, foot: int, selector: int, seqs: int, index: SegmentKeys) -> bytes:
    """Encode the file of the segment that begins with `base`."""
    digests = np.empty((len(index.high), 2), ">u8")
    digests[:, 0], digests[:, 1] = index.high, index.low
    body = b"".join(
        (
            digests.tobytes(),
            index.rows.astype("<u4").tobytes(),
            np.packbits(index.tombstones, bitorder="little").tobytes(),
            index.older_rows.astype("<u4").tobytes(),
            index.older_keys.astype("<u4").tobytes(),
        )
    )
    head = _HEAD.pack(MAGIC, VERSION, bytes(3), base, foot, selector, seqs, len(index.rows), len(index.older_rows), 0)
    return b"".join((head, _SUM.pack(_checksum(head, body)), body))


def decode(buf: Buffer, *, base: int, foot: int, selector: int, seqs: int, what: str = "key index") -> SegmentKeys:
    """Decode the index of this segment. NewerFormat for a later version whose checksum holds, Corrupt for anything
    else, also for the index of another segment or of another rule for keys."""
    if len(buf) < HEAD_BYTES:
        raise Corrupt(what, pos=0, reason=f"{len(buf)} bytes are too few for its head")
    magic, version, pad, *found, keys, older, zero = _HEAD.unpack_from(buf, 0)
    if magic != MAGIC:
        raise Corrupt(what, pos=0, reason=f"it starts with {magic!r} and not with {MAGIC!r}")
    view = memoryview(buf)
    is_valid = _SUM.unpack_from(buf, _HEAD.size)[0] == _checksum(bytes(view[: _HEAD.size]), bytes(view[HEAD_BYTES:]))
    if not is_valid:
        raise Corrupt(what, pos=_HEAD.size, reason="checksum mismatch")
    if version > VERSION:
        raise NewerFormat(what, found=version, known=VERSION)
    if version != VERSION or pad != bytes(3) or zero:
        raise Corrupt(what, pos=4, reason=f"version {version} was never written")
    if found != [base, foot, selector, seqs]:
        raise Corrupt(what, pos=8, reason="it is the index of another segment, or of another rule for keys")
    sizes = (DIGEST_BYTES * keys, 4 * keys, -(-keys // 8), 4 * older, 4 * older)
    if HEAD_BYTES + sum(sizes) != len(buf):
        raise Corrupt(what, pos=36, reason=f"{keys} keys and {older} older records do not add up to {len(buf)} bytes")
    pieces, pos = [], HEAD_BYTES
    for size in sizes:
        pieces.append(view[pos : pos + size])
        pos += size
    digests = np.frombuffer(pieces[0], ">u8").reshape(-1, 2)
    index = SegmentKeys(
        digests[:, 0].astype(np.uint64),
        digests[:, 1].astype(np.uint64),
        np.frombuffer(pieces[1], "<u4").astype(np.uint32),
        np.unpackbits(np.frombuffer(pieces[2], np.uint8), bitorder="little")[:keys].astype(bool),
        np.frombuffer(pieces[3], "<u4").astype(np.uint32),
        np.frombuffer(pieces[4], "<u4").astype(np.uint32),
    )
    if max(int(index.rows.max(initial=0)), int(index.older_rows.max(initial=0))) >= max(seqs, 1):
        raise Corrupt(what, pos=HEAD_BYTES, reason="it names a row that the segment does not have")
    if older and int(index.older_keys.max()) >= keys:
        raise Corrupt(what, pos=HEAD_BYTES, reason="it names a key that it does not have")
    return index


def stored_selector(buf: Buffer) -> int | None:
    """Return the rule for keys of a file; None if it does not verify."""
    view = memoryview(buf)
    if len(buf) < HEAD_BYTES or _SUM.unpack_from(buf, _HEAD.size)[0] != _checksum(
        bytes(view[: _HEAD.size]), bytes(view[HEAD_BYTES:])
    ):
        return None
    return int(_HEAD.unpack_from(buf, 0)[5])


def _checksum(head: bytes, body: bytes) -> int:
    digest = xxh3_64(head)
    digest.update(body)
    return digest.intdigest()
