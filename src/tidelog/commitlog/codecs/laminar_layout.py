"""[hot] The laminar layout: a store of contents and a dense index. No other module knows its files.

    <base>.store   │ content │ content │ dead │ content │ …  where each begins is the index's word

    content        0          4              4+L
                   ┌──────────┬──────────────┬──────┐
                   │ L, u32   │ metadata     │ data │        metadata of a record without headers:
                   └──────────┴──────────────┴──────┘        01, then its seq in 4 or 8 bytes

    <base>.index   0          8          16
                   ┌──────────┬──────────┬──────────┬────────┬──────────┐
                   │   base   │   zero   │ checksum │ length │ position │   entry i is for seq base + i
                   └──────────┴──────────┴──────────┴────────┴──────────┘

Little-endian. Only the index knows where a content begins and ends, so the store cannot be read
without it, and an entry's position is the truth: contents usually lie back to back, but a program
that was killed and went on leaves dead bytes between them or at the end. They belong to no record.
The checksum is the CRC-32 of the whole content in eight bytes; a flipped bit in the store or in an
entry shows as a mismatch. An entry of length 0 is a hole: its record was compacted away. An index
file is empty until its first record comes; the marker is written with it. There are no times:
`<base>.created` is ours, and its age is the segment's.

The laminarmq program leaves two things open that its files do not record: how wide the seq in a
content is, 4 or 8 bytes, at the end of metadata of any type (`seq_support`); and which hash function
makes the checksum (`Hasher`). A truncate at a segment's base makes it write the marker twice
(`has_second_marker`).
"""

from __future__ import annotations

import re
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
"""`hasher(buf, at, ends)`: the checksum of each stretch of a store."""
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
_HEAD_BYTES = 1 << 16  # of a content, looked at for its metadata
_SIGNED_MAX = (1 << 63) - 1  # columns are int64, so the upper half of u64 is refused
_NAME = re.compile(r"(0|[1-9][0-9]{0,18})\.store")


def data_name(base: int) -> str:
    return f"{base}.store"


def index_name(base: int) -> str:
    return f"{base}.index"


def created_name(base: int) -> str:
    return f"{base}.created"


def base_of(name: str) -> int | None:
    """The base a store's name carries, or None for any other name."""
    match = _NAME.fullmatch(name)
    base = int(match[1]) if match else -1
    return base if 0 <= base <= _SIGNED_MAX else None


def encode_content_header(seq: int, width: int = 4) -> bytes:
    """What a content without headers of its own begins with: its metadata, and the length of that."""
    _check_seqs(seq, 1, width)
    return _UNIT[width].pack(1 + width, 1, seq)


def encode(first_seq: int, datas: Sequence[bytes], position: int, width: int = 4) -> tuple[bytes, bytes]:
    """The bytes to append to the store, which ends at `position`, and those to append to the index."""
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
    """What an index file begins with, written together with its first entry."""
    _check_seqs(base, 1, 8)
    return MARKER.pack(base)


def read_index(buf: Buffer) -> tuple[int | None, NDArray[np.void]]:
    """The base and the whole entries, borrowing `buf`; no base while not even the marker is whole."""
    if len(buf) < MARKER_BYTES:
        return None, np.empty(0, INDEX)
    count = (len(buf) - MARKER_BYTES) // INDEX_ENTRY_BYTES
    return MARKER.unpack_from(buf)[0], np.frombuffer(buf, INDEX, count, MARKER_BYTES)


def has_second_marker(buf: Buffer, store: Callable[[slice], Buffer], base: int) -> bool:
    """Whether an index file begins with its marker twice, so that every record has the entry after its own.

    As an entry the second marker would be a hole. The record after it tells: it carries the segment's own base.
    """
    if len(buf) < 2 * MARKER_BYTES + INDEX_ENTRY_BYTES or bytes(buf[:MARKER_BYTES]) != MARKER.pack(base):
        return False
    if bytes(buf[MARKER_BYTES : 2 * MARKER_BYTES]) != MARKER.pack(base):
        return False
    _, length, position = _ENTRY.unpack_from(buf, 2 * MARKER_BYTES)
    content = store(slice(position, position + min(length, _HEAD_BYTES)))
    return any(count_stored_seqs(content, np.zeros(1, np.int64), np.array([base], np.int64)))


def count_stored_seqs(buf: Buffer, at: Ints, seqs: Ints) -> tuple[int, int]:
    """How many of the contents at these positions end their metadata with their seq in 4 bytes, and how many in 8."""
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
    """Why these bytes are no index of a store with `store_size` bytes and this base, or None."""
    found, entries = read_index(buf)
    if found is None and len(buf):
        return f"the base marker ends after {len(buf)} bytes"
    if found is not None and found != base:
        return f"the base marker says {found}, the file's name says {base}"
    if found is not None and any(buf[MARKER_BYTES // 2 : MARKER_BYTES]):
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
    """One past the last byte of the store that these entries name. Holes name none."""
    pos, ends = _entry_ranges(entries)
    return int(np.max(ends, where=ends > pos, initial=0))


def count_dead_bytes(entries: NDArray[np.void], store_size: int) -> int:
    """How many bytes of a store no entry names, inside it and at its end; for entries without a fault."""
    return max(store_size - int(entries["length"].sum(dtype=np.int64)), 0)


def _entry_ranges(entries: NDArray[np.void]) -> tuple[Ints, Ints]:
    pos: Ints = entries["position"].astype(np.int64)
    return pos, pos + entries["length"]


def _is_ordered(pos: Ints, ends: Ints) -> Bools:
    """Whether each begins at or after the end of all that come before it. Holes take no bytes and are always right."""
    held = ends > pos
    reach = np.maximum.accumulate(np.where(held, ends, 0))
    ordered: Bools = ~held
    ordered[:1] = True
    ordered[1:] |= pos[1:] >= reach[:-1]
    return ordered


class _CheckedEntries(NamedTuple):
    """What was found of each entry; the columns are of the entries that are no holes."""

    good: Bools
    reason_for: Callable[[int], str]  # of an entry that is not good
    meta: Ints
    data_size: Ints
    own: Bools  # metadata that is more than the plain seq


def _sizes(buf: Buffer, pos: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """The length of the metadata and of the data of each entry; the second is negative where the first is too long."""
    meta = ends - pos  # where even its length does not fit, or the content is not there, it is too long
    long = np.flatnonzero((ends - pos >= _META_AT) & (ends <= len(buf)) & (pos >= 0))
    meta[long] = vectorized.read_at(buf, pos[long], _LENGTH)["length"]
    return meta, ends - pos - _META_AT - meta


def _check_entries(
    buf: Buffer, entries: NDArray[np.void], first: int, width: int | None, hasher: Hasher
) -> _CheckedEntries:
    """Hold every entry by itself to its checksum and to what a content must look like; the first is for seq `first`."""
    pos, ends = _entry_ranges(entries)
    held, inside = ends > pos, (ends <= len(buf)) & (pos >= 0)
    meta, data_size = _sizes(buf, pos, ends)
    # The checksum of nothing is 0, so a length that rotted to 0 shows.
    same = ~held & (entries["checksum"] == 0)
    look = np.flatnonzero(held & inside)
    same[look] = hasher(buf, pos[look], ends[look]) == entries["checksum"][look]
    fits = ~held | (data_size >= 0)
    own, right = np.zeros(len(pos), np.bool_), np.ones(len(pos), np.bool_)
    look = np.flatnonzero(held & same & fits)
    own[look], right[look] = _stored_seqs(buf, pos[look], meta[look], first + look, width)
    sound = same & fits & right
    ordered = np.ones(len(pos), np.bool_)
    which = np.flatnonzero(held & sound)
    ordered[which] = _is_ordered(pos[which], ends[which])

    def why(entry: int) -> str:
        if held[entry] and not inside[entry]:
            return "the content runs past the end of the store"
        if not same[entry]:
            return "checksum"
        if not fits[entry]:
            return "metadata is longer than the content"
        if not right[entry]:
            return "another seq is stored with the record"
        return "position is before the end of the record before it"

    return _CheckedEntries(sound & ordered, why, meta, data_size, own)


def find_faults(
    buf: Buffer,
    entries: NDArray[np.void],
    base: int,
    *,
    width: int | None = None,
    hasher: Hasher = vectorized.crc32_checksums,
) -> list[tuple[int, str]]:
    """Every entry that is not good, and why."""
    if not 0 <= base <= _SIGNED_MAX - len(entries):
        return [(entry, f"base {base} is out of range") for entry in range(len(entries))]
    judged = _check_entries(buf, entries, base, width, hasher)
    return [(int(entry), judged.reason_for(int(entry))) for entry in np.flatnonzero(~judged.good)]


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
    """The records with first <= seq < stop from the store `buf`, each checked. Bad bytes never raise.

    The walk ends early, and cleanly, before the record that would bring the data over `bytes_max`,
    but never before the first. Holes are left out. `meta` is there only if some metadata is not
    the plain seq. `width` is the one that seqs are stored in; where it is not known, metadata of
    either length must hold the right seq.
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
        held = np.flatnonzero(ends > pos)
        used = np.cumsum(np.maximum(_sizes(buf, pos[held], ends[held])[1], 0))
        if (fit := max(int(np.searchsorted(used, bytes_max, "right")), 1)) < len(held):
            part = part[: int(held[fit])]
    judged = _check_entries(buf, part, base + lo, width, hasher)
    good, halt, reason = vectorized.count_leading_true(judged.good), ScanStop.END, ""
    if good < len(part):
        reason = judged.reason_for(good)
        halt = ScanStop.TORN if ends[good] > max(len(buf), int(pos[good])) else ScanStop.BAD
    held = np.flatnonzero(ends[:good] > pos[:good])
    at, meta, own = pos[held], judged.meta[held], judged.own[held]
    rows = Rows(
        buf,
        base + lo + held,
        np.zeros(len(held), np.int64),
        at,
        Span(at + _META_AT + meta, judged.data_size[held]),
        meta=Span(at + _META_AT, np.where(own, meta, 0)) if own.any() else None,
    )
    return ScanResult(rows, int(ends[good - 1]) if good else start, halt, reason)


def _entry_start(entries: NDArray[np.void], i: int) -> int:
    """Where entry `i` begins in the store, or would if there were one more."""
    if i == 0:
        return 0
    return int(entries["position"][i]) if i < len(entries) else int(_entry_ranges(entries[-1:])[1][0])


def _stored_seqs(buf: Buffer, at: Ints, meta: Ints, seq: Ints, width: int | None) -> tuple[Bools, Bools]:
    """For each content: is its metadata more than the plain seq, and if not, is that the right seq."""
    own, right = np.ones(len(at), np.bool_), np.ones(len(at), np.bool_)
    for each, heads in _HEADS.items():
        which = np.flatnonzero(meta == 1 + each)
        if not len(which):
            continue
        stored = vectorized.read_at(buf, at[which], heads)
        same = (stored["some"] == 1) & (stored["seq"].astype(np.int64) == seq[which])
        own[which] = ~same
        if width in (None, each):
            # Metadata of this length that begins like a seq is one, so another seq is wrong. Of the other width's
            # length it may be anything: a store of 4-byte seqs can have metadata of 9 bytes.
            own[which] = stored["some"] != 1
            right[which] = same | own[which]
    return own, right
