"""The laminar layout: a store of contents and a dense index. The only module that knows its bytes.

    <base>.store   │ content │ content │ dead │ content │ …  the index has the position of each

    content        0          4              4+L
                   ┌──────────┬──────────────┬──────┐
                   │ L, u32   │ metadata     │ data │        metadata of a record without headers:
                   └──────────┴──────────────┴──────┘        01, then its seq in 4 or 8 bytes

    <base>.index   0          8          16
                   ┌──────────┬──────────┬──────────┬────────┬──────────┐
                   │   base   │   zero   │ checksum │ length │ position │   entry i is for seq base + i
                   └──────────┴──────────┴──────────┴────────┴──────────┘

Little-endian. Only the index has the position and length of a content, so the store cannot be read without it. Contents
usually follow each other without gaps; a program that was killed and restarted leaves dead bytes, which belong to no
record. The checksum is the CRC-32 of the whole content in eight bytes, so a flipped bit in the store or in an entry is
a mismatch. An entry of length 0 is a hole: its record was compacted. An index file is empty until the first record; the
marker is written with it. There are no times: `<base>.created` is ours and stores the age of the segment.

The files of laminarmq do not record two choices: the width of the seq in a content, 4 or 8 bytes, at the end of
metadata of any type (`count_stored_seqs`); and the hash function of the checksum (`Hasher`). After a truncate at a
segment's base laminarmq writes the marker twice (`has_second_marker`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from tidelog.commitlog import vectorized
from tidelog.errors import BadInput, TooLarge
from tidelog.formats.rows import Rows, ScanResult, ScanStop, Span, empty_rows
from tidelog.types import Buffer, Ints

Bools: TypeAlias = NDArray[np.bool_]
Hasher: TypeAlias = Callable[[Buffer, Ints, Ints], NDArray[np.integer[Any]]]
"""`hasher(buf, starts, ends)`: the checksum of each byte range of a store."""
HASHERS: dict[str, Hasher] = {"CRC-32": vectorized.crc32_checksums, "SipHash-1-3": vectorized.siphash_checksums}
MARKER = Struct("<Q8x")
INDEX = np.dtype([("checksum", "<u8"), ("length", "<u4"), ("position", "<u4")])
MARKER_BYTES = MARKER.size
INDEX_ENTRY_BYTES = INDEX.itemsize
STORE_BYTES_MAX = (1 << 32) - 1  # positions and lengths have four bytes
assert MARKER_BYTES == INDEX_ENTRY_BYTES == 16, "drawn above, frozen by tests/golden; changing it is a new format"

_ENTRY = Struct("<QII")  # checksum, length, position
_UNIT = {4: Struct("<IBI"), 8: Struct("<IBQ")}  # metadata length, 01, seq
_META_AT = 4
_LENGTH = np.dtype([("length", "<u4")])
_TAILS = {width: np.dtype([("some", "u1"), ("seq", f"<u{width}")]) for width in (4, 8)}
_HEADS = {width: np.dtype([("length", "<u4"), ("some", "u1"), ("seq", f"<u{width}")]) for width in _UNIT}
_HEAD_BYTES = 1 << 16  # of a content, read for its metadata
_SIGNED_MAX = (1 << 63) - 1  # columns are int64, so the upper half of u64 is refused


def encode_content_header(seq: int, width: int = 4) -> bytes:
    """Encode the metadata of a content without headers of its own, and its length."""
    _check_seqs(seq, 1, width)
    return _UNIT[width].pack(1 + width, 1, seq)


def encode(first_seq: int, datas: Sequence[bytes], position: int, width: int = 4) -> tuple[bytes, bytes]:
    """Encode records for a store that ends at `position`: the bytes for the store and those for the index."""
    _check_seqs(first_seq, len(datas), width)
    pack, pack_entry = _UNIT[width].pack, _ENTRY.pack
    contents, entries = list[bytes](), list[bytes]()
    put, put_entry = contents.append, entries.append
    seq, meta_size, head_size = first_seq, 1 + width, _UNIT[width].size
    for data in datas:
        size = head_size + len(data)
        if position + size > STORE_BYTES_MAX:
            if size > STORE_BYTES_MAX:
                raise TooLarge(f"the record for seq {seq}", size=size, limit=STORE_BYTES_MAX)
            raise BadInput(
                f"seq {seq} would end at byte {position + size} of its store, whose index can point at "
                f"{STORE_BYTES_MAX}; roll to a new segment first"
            )
        content = pack(meta_size, 1, seq) + data
        put(content)
        put_entry(pack_entry(crc32(content), size, position))
        position += size
        seq += 1
    return b"".join(contents), b"".join(entries)


def _check_seqs(first: int, count: int, width: int) -> None:
    if width not in _UNIT:
        raise BadInput(f"a seq is stored with width 4 or 8, not {width}")
    if first < 0 or first + count - 1 > _SIGNED_MAX:
        raise BadInput(f"seqs run from 0 to 2**63 - 1, not from {first} for {count} records")
    if width == 4 and first + count > 1 << 32:
        raise BadInput(f"seq {first + count - 1} does not fit into 4 bytes; convert the log to one with index_width=8")


def encode_marker(base: int) -> bytes:
    """Encode the first bytes of an index file, written with its first entry."""
    _check_seqs(base, 1, 8)
    return MARKER.pack(base)


def read_index(buf: Buffer) -> tuple[int | None, NDArray[np.void]]:
    """Return the base and the complete entries, as views of `buf`; no base where the marker is incomplete."""
    if len(buf) < MARKER_BYTES:
        return None, np.empty(0, INDEX)
    count = (len(buf) - MARKER_BYTES) // INDEX_ENTRY_BYTES
    return MARKER.unpack_from(buf)[0], np.frombuffer(buf, INDEX, count, MARKER_BYTES)


def has_second_marker(buf: Buffer, store: Callable[[slice], Buffer], base: int) -> bool:
    """Whether an index file begins with its marker twice, so that every record has the entry after its own.

    As an entry the second marker would be a hole. The record after it decides: it contains the segment's base.
    """
    if len(buf) < 2 * MARKER_BYTES + INDEX_ENTRY_BYTES or bytes(buf[:MARKER_BYTES]) != MARKER.pack(base):
        return False
    if bytes(buf[MARKER_BYTES : 2 * MARKER_BYTES]) != MARKER.pack(base):
        return False
    _, length, position = _ENTRY.unpack_from(buf, 2 * MARKER_BYTES)
    content = store(slice(position, position + min(length, _HEAD_BYTES)))
    return any(count_stored_seqs(content, np.zeros(1, np.int64), np.array([base], np.int64)))


def count_stored_seqs(buf: Buffer, at: Ints, seqs: Ints) -> tuple[int, int]:
    """Count the contents at these positions whose metadata ends with their seq in 4 bytes, and in 8 bytes."""
    count = {4: 0, 8: 0}
    inside = at <= len(buf) - _META_AT
    at, seqs = at[inside], seqs[inside]
    meta_end = at + _META_AT + vectorized.read_at(buf, at, _LENGTH)["length"]
    for width, tail in _TAILS.items():
        fits = (meta_end - at >= _META_AT + tail.itemsize) & (meta_end <= len(buf))
        stored = vectorized.read_at(buf, meta_end[fits] - tail.itemsize, tail)
        count[width] = int(np.sum((stored["some"] == 1) & (stored["seq"].astype(np.int64) == seqs[fits])))
    return count[4], count[8]


def index_fault(buf: Buffer, base: int, store_size: int) -> str | None:
    """Return why these bytes are no index of a store with `store_size` bytes and this base, or None."""
    marker, entries = read_index(buf)
    if marker is None and len(buf):
        return f"the base marker ends after {len(buf)} bytes"
    if marker is not None and marker != base:
        return f"the base marker is {marker}, the base in the file's name is {base}"
    if marker is not None and any(buf[MARKER_BYTES // 2 : MARKER_BYTES]):
        return "the padding of the base marker is not zero"
    if len(buf) % INDEX_ENTRY_BYTES:
        return f"the last entry has {len(buf) % INDEX_ENTRY_BYTES} bytes"
    pos, ends = _entry_ranges(entries)
    ordered = vectorized.count_leading_true(_is_ordered(pos, ends))
    if ordered < len(pos):
        return f"entry {ordered} is at byte {pos[ordered]} of the store, before the end of the one before it"
    last = find_data_end(entries)
    if last > store_size:
        return f"entries reach to byte {last}, the store ends at {store_size}"
    return None


def find_data_end(entries: NDArray[np.void]) -> int:
    """Return one past the last byte of the store that these entries name. Holes name none."""
    pos, ends = _entry_ranges(entries)
    return int(np.max(ends, where=ends > pos, initial=0))


def count_dead_bytes(entries: NDArray[np.void], store_size: int) -> int:
    """Count the bytes of a store that no entry names, inside it and at its end; for entries without a fault."""
    return max(store_size - int(entries["length"].sum(dtype=np.int64)), 0)


def _entry_ranges(entries: NDArray[np.void]) -> tuple[Ints, Ints]:
    pos: Ints = entries["position"].astype(np.int64)
    return pos, pos + entries["length"]


def _is_ordered(pos: Ints, ends: Ints) -> Bools:
    """Whether each begins at or after the end of all before it. Holes have no bytes and are always in order."""
    is_record = ends > pos
    reach = np.maximum.accumulate(np.where(is_record, ends, 0))
    ordered: Bools = ~is_record
    ordered[:1] = True
    ordered[1:] |= pos[1:] >= reach[:-1]
    return ordered


class _CheckedEntries(NamedTuple):
    """The check of each entry."""

    good: Bools
    reason_for: Callable[[int], str]  # of an entry that is not good
    meta_size: Ints
    data_size: Ints
    has_meta: Bools  # metadata that is more than the plain seq


def _sizes(buf: Buffer, pos: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Return the length of metadata and data of each entry; the second is negative where the first is too long."""
    meta_size = ends - pos  # too long where its length field does not fit or the content is missing
    readable = np.flatnonzero((ends - pos >= _META_AT) & (ends <= len(buf)) & (pos >= 0))
    meta_size[readable] = vectorized.read_at(buf, pos[readable], _LENGTH)["length"]
    return meta_size, ends - pos - _META_AT - meta_size


def _check_entries(
    buf: Buffer, entries: NDArray[np.void], first: int, width: int | None, hasher: Hasher
) -> _CheckedEntries:
    """Check every entry against its checksum and the form of a content; the first is for seq `first`."""
    pos, ends = _entry_ranges(entries)
    is_record, inside = ends > pos, (ends <= len(buf)) & (pos >= 0)
    meta_size, data_size = _sizes(buf, pos, ends)
    # The checksum of no bytes is 0, so a length that rotted to 0 is a mismatch.
    matches = ~is_record & (entries["checksum"] == 0)
    which = np.flatnonzero(is_record & inside)
    matches[which] = hasher(buf, pos[which], ends[which]) == entries["checksum"][which]
    fits = ~is_record | (data_size >= 0)
    has_meta, seq_matches = np.zeros(len(pos), np.bool_), np.ones(len(pos), np.bool_)
    which = np.flatnonzero(is_record & matches & fits)
    has_meta[which], seq_matches[which] = _stored_seqs(buf, pos[which], meta_size[which], first + which, width)
    valid = matches & fits & seq_matches
    ordered = np.ones(len(pos), np.bool_)
    which = np.flatnonzero(is_record & valid)
    ordered[which] = _is_ordered(pos[which], ends[which])

    def reason_for(entry: int) -> str:
        if is_record[entry] and not inside[entry]:
            return "the content runs past the end of the store"
        if not matches[entry]:
            return "checksum"
        if not fits[entry]:
            return "metadata is longer than the content"
        if not seq_matches[entry]:
            return "another seq is stored with the record"
        return "position is before the end of the record before it"

    return _CheckedEntries(valid & ordered, reason_for, meta_size, data_size, has_meta)


def find_faults(
    buf: Buffer,
    entries: NDArray[np.void],
    base: int,
    *,
    width: int | None = None,
    hasher: Hasher = vectorized.crc32_checksums,
) -> list[tuple[int, str]]:
    """Return every bad entry and the reason."""
    if not 0 <= base <= _SIGNED_MAX - len(entries):
        return [(entry, f"base {base} is out of range") for entry in range(len(entries))]
    checked = _check_entries(buf, entries, base, width, hasher)
    return [(int(entry), checked.reason_for(int(entry))) for entry in np.flatnonzero(~checked.good)]


def scan_records(
    buf: Buffer,
    entries: NDArray[np.void],
    base: int,
    *,
    first: int | None = None,
    stop: int | None = None,
    bytes_max: int | None = None,
    width: int | None = None,
    hasher: Hasher = vectorized.crc32_checksums,
) -> ScanResult:
    """Read and check the records with first <= seq < stop from the store `buf`. Bad bytes never raise.

    The scan ends early, with ScanStop.END, before the record that would bring the data over `bytes_max`, but never
    before the first. Holes are left out. `meta` is set only if some metadata is not the plain seq. `width` is the width
    of stored seqs; where it is None, metadata of either length must contain the right seq.
    """
    count = len(entries)
    lo = 0 if first is None else min(max(first - base, 0), count)
    hi = count if stop is None else min(max(stop - base, lo), count)
    start = _entry_start(entries, lo)
    if not 0 <= base <= _SIGNED_MAX - count:
        return ScanResult(empty_rows(buf), start, ScanStop.BAD, f"base {base} is out of range")
    part = entries[lo:hi]
    pos, ends = _entry_ranges(part)
    if bytes_max is not None:
        records = np.flatnonzero(ends > pos)
        used = np.cumsum(np.maximum(_sizes(buf, pos[records], ends[records])[1], 0))
        if (fit := max(int(np.searchsorted(used, bytes_max, "right")), 1)) < len(records):
            part = part[: int(records[fit])]
    checked = _check_entries(buf, part, base + lo, width, hasher)
    good, scan_stop, reason = vectorized.count_leading_true(checked.good), ScanStop.END, ""
    if good < len(part):
        reason = checked.reason_for(good)
        scan_stop = ScanStop.TORN if ends[good] > max(len(buf), int(pos[good])) else ScanStop.BAD
    records = np.flatnonzero(ends[:good] > pos[:good])
    starts, meta_size, has_meta = pos[records], checked.meta_size[records], checked.has_meta[records]
    rows = Rows(
        buf,
        base + lo + records,
        np.zeros(len(records), np.int64),
        starts,
        Span(starts + _META_AT + meta_size, checked.data_size[records]),
        meta=Span(starts + _META_AT, np.where(has_meta, meta_size, 0)) if has_meta.any() else None,
    )
    return ScanResult(rows, int(ends[good - 1]) if good else start, scan_stop, reason)


def _entry_start(entries: NDArray[np.void], i: int) -> int:
    """Return where entry `i` begins in the store; for `i` past the last one, where the next would begin."""
    if i == 0:
        return 0
    return int(entries["position"][i]) if i < len(entries) else int(_entry_ranges(entries[-1:])[1][0])


def _stored_seqs(buf: Buffer, pos: Ints, meta_size: Ints, seqs: Ints, width: int | None) -> tuple[Bools, Bools]:
    """Return for each content whether its metadata is more than the plain seq, and if not, whether the seq is right."""
    has_meta, seq_matches = np.ones(len(pos), np.bool_), np.ones(len(pos), np.bool_)
    for seq_bytes, heads in _HEADS.items():
        which = np.flatnonzero(meta_size == 1 + seq_bytes)
        if not len(which):
            continue
        stored = vectorized.read_at(buf, pos[which], heads)
        same = (stored["some"] == 1) & (stored["seq"].astype(np.int64) == seqs[which])
        has_meta[which] = ~same
        if width in (None, seq_bytes):
            # Metadata of this length that begins like a seq is one, so another seq is wrong. With the length of the
            # other width it may be any metadata: a store of 4-byte seqs can have metadata of 9 bytes.
            has_meta[which] = stored["some"] != 1
            seq_matches[which] = same | has_meta[which]
    return has_meta, seq_matches
