"""The `laminar` codec: record bytes in a store, and an index with the position and checksum of each.

The store has no record boundaries, so the index is authoritative: a record exists when its index entry does. The store
is synced before an entry is written, and an entry is never rebuilt. A compacted record is an entry of length zero.

A segment without a `.created` file was written by another program. Bytes that its index does not name stay in its
store, and records are appended after them. The width of its seqs and its hash function are detected from its records
(`detect_layout`), and appends use the same.

The layout, a store of contents and a dense index; the only module that knows its bytes:

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
metadata of any type (`count_stored_seqs`); and the hash function of the checksum (`codecs/hashes.py`). Where every
record has metadata of a type, an append needs it too: the program could not decode a record without. After a truncate
at a segment's base laminarmq writes the marker twice (`has_second_marker`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from struct import Struct
from typing import Any, Literal, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from tidelog.commitlog import vectorized
from tidelog.commitlog.codec import (
    Batch,
    Chunk,
    Codec,
    Fault,
    RecoveredSegment,
    Salvage,
    SegmentContent,
    check_columns_supported,
)
from tidelog.commitlog.codecs import hashes
from tidelog.commitlog.codecs.hashes import Hash
from tidelog.commitlog.vectorized import count_leading_true
from tidelog.config import LogConfig
from tidelog.errors import BadInput, TooLarge, UnknownLayout
from tidelog.formats.rows import Rows, ScanResult, ScanStop, Span, concat_rows, empty_rows
from tidelog.types import Buffer, Ints

Bools: TypeAlias = NDArray[np.bool_]
Hasher: TypeAlias = Callable[[Buffer, Ints, Ints], NDArray[np.integer[Any]]]
"""`hasher(buf, starts, ends)`: the checksum of each byte range of a store. None where it is unknown and unverified."""
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
    ordered = count_leading_true(_is_ordered(pos, ends))
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
    buf: Buffer, entries: NDArray[np.void], first: int, width: int | None, hasher: Hasher | None
) -> _CheckedEntries:
    """Check every entry against its checksum and the form of a content; the first is for seq `first`."""
    pos, ends = _entry_ranges(entries)
    is_record, inside = ends > pos, (ends <= len(buf)) & (pos >= 0)
    meta_size, data_size = _sizes(buf, pos, ends)
    # The checksum of no bytes is 0, so a length that rotted to 0 is a mismatch.
    matches = ~is_record & (entries["checksum"] == 0)
    which = np.flatnonzero(is_record & inside)
    matches[which] = True if hasher is None else hasher(buf, pos[which], ends[which]) == entries["checksum"][which]
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
    hasher: Hasher | None = vectorized.crc32_checksums,
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
    hasher: Hasher | None = vectorized.crc32_checksums,
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
    good, scan_stop, reason = count_leading_true(checked.good), ScanStop.END, ""
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


_SEQ_META_BYTES = (5, 9)  # length of metadata that is only the record's seq
_HOLES_MAX = 1 << 24  # seqs without a record in one append; 256 MiB of index
_DETECT_ENTRIES_MAX = 64  # entries read to detect hash function and width
_NAME_PATTERN = re.compile(r"(0|[1-9][0-9]*)(\.store|\.index|\.created)")
_TEMPORARY_PATTERN = re.compile(r"(0|[1-9][0-9]*)(\.index\.rebuilding|\.store\.compacted|\.index\.compacted)")


class LaminarCodec(Codec):
    name = "laminar"
    name_format = "{}"
    data_suffix = ".store"
    name_pattern, temporary_pattern = _NAME_PATTERN, _TEMPORARY_PATTERN
    first_seq = 0
    segment_bytes_limit = (1 << 32) - 1
    record_bytes_max = segment_bytes_limit - 16
    side_suffixes: tuple[str, ...] = (".index",)
    authoritative_sides: frozenset[int] = frozenset((0,))
    syncs_data_first = True
    latches_on_write_error = False  # as in laminarmq: a failed write is rolled back and writing continues
    verifies_on_open = False
    supported_columns: frozenset[str] = frozenset(("meta",))
    created_suffix: str | None = ".created"

    def __init__(self, config: LogConfig) -> None:
        self._requested_width = config.index_width
        self._width: Literal[4, 8] = config.index_width or 4
        self._hash: Hash | None = hashes.CRC32  # None: unknown, read without verification
        self._unverified = config.unverified
        self._has_typed_metadata = False  # metadata of every record is a value, then the seq
        self._foreign_bases: frozenset[int] = frozenset()  # segments that another program wrote
        self._double_marker_bases: set[int] = set()  # segments whose index begins with its marker twice

    def detect_layout(self, names: Sequence[str], read: Callable[[str], Buffer | None], /) -> None:
        segments: dict[int, set[str]] = {}
        for name in names:
            if (known := self.parse_file_name(name)) is not None:
                segments.setdefault(known[0], set()).add(known[1])
        self._foreign_bases = frozenset(base for base, suffixes in segments.items() if self.is_foreign(suffixes))
        # The newest segment with records decides: appends continue there.
        for base in sorted((base for base, suffixes in segments.items() if ".index" in suffixes), reverse=True):
            index, store = read(self.side_name(base, ".index")) or b"", read(self.data_name(base)) or b""
            view = memoryview(store)
            entries = self._parse_entries(index, view.__getitem__, base)[:_DETECT_ENTRIES_MAX]
            pos = entries["position"].astype(np.int64)
            inside = np.flatnonzero((entries["length"] > 0) & (pos + entries["length"] <= len(store)))
            if len(inside):
                foreign = base in self._foreign_bases
                self._adopt_layout(store, entries[inside], base + inside, self.data_name(base), foreign=foreign)
                return

    def _adopt_layout(self, store: Buffer, entries: NDArray[np.void], seqs: Ints, name: str, *, foreign: bool) -> None:
        """Set the hash function and the width of seqs that these entries and their contents use."""
        pos, ends = _entry_ranges(entries)
        found, matching = hashes.detect(store, pos, ends, entries["checksum"])
        if found is not None:
            self._hash = found
            pos, ends, seqs = pos[matching], ends[matching], seqs[matching]
        narrow, wide = count_stored_seqs(store, pos, seqs)
        # All records of a segment of ours may be torn; those of a segment that another program closed are not.
        if (
            foreign
            and found is None
            and len(pos) > 1
            and (len(pos) in (narrow, wide) or (entries["checksum"] >> np.uint64(32)).all())
        ):
            if not self._unverified:
                raise UnknownLayout(
                    f"none of the first {len(pos)} checksums of {name} is the {', '.join(hashes.HASH_NAMES)} of its "
                    "record: the store was written with another hash function; nothing was changed. Read it without "
                    "verification (unverified), or copy it with the program that wrote it, into a store with CRC-32"
                )
            self._hash = None
        if narrow == wide:
            return  # metadata without a seq, or no good record: unknown
        width: Literal[4, 8] = 8 if wide > narrow else 4
        if self._requested_width not in (None, width):
            raise BadInput(
                f"the records of {name} have seqs of {width} bytes, not {self._requested_width}; nothing was changed, "
                "leave index_width out or convert the log"
            )
        self._width = width
        meta_size, _ = _sizes(store, pos, ends)
        self._has_typed_metadata = max(narrow, wide) == len(pos) and bool((meta_size > 1 + width).all())

    def variant_settings(self) -> dict[str, Any]:
        return {"index_width": self._width}

    def layout_notes(self) -> list[str]:
        if self._hash is not None:
            return []
        return ["the hash function of this store is unknown: no checksum was verified"]

    @property
    def _hasher(self) -> Hasher | None:
        if self._hash is hashes.CRC32:
            return vectorized.crc32_checksums
        return None if self._hash is None else self._hash.checksums

    def is_foreign(self, suffixes: Collection[str], /) -> bool:
        return ".created" not in suffixes

    def checksum(self, pieces: Iterable[Buffer], /) -> int:
        assert self._hash is not None, "a log with an unknown hash function is opened for reading only"
        return self._hash.digest(pieces)

    def _parse_entries(self, index: Buffer, store: Callable[[slice], Buffer], base: int) -> NDArray[np.void]:
        """Return the entries of an index file, the first of them for seq `base`."""
        _, entries = read_index(index)
        if has_second_marker(index, store, base):
            self._double_marker_bases.add(base)
            return entries[1:]
        self._double_marker_bases.discard(base)
        return entries

    def _read_entries(self, segment: SegmentContent) -> NDArray[np.void]:
        data = segment.data

        def store(part: slice) -> Buffer:
            return data.fetch(min(part.start, data.size), min(part.stop, data.size))

        return self._parse_entries(segment.index, store, segment.base)

    def initial_side_state(self, base: int, /) -> int:
        return base

    def encode(self, seq: int, ts_us: int, batch: Batch, /) -> Rows:
        check_columns_supported(batch, self.name, "node", "tag")
        count = len(batch.datas)
        heads = [self._encode_header(seq + i, meta) for i, meta in enumerate(_column_values(batch.meta, count))]
        pieces = [piece for pair in zip(heads, batch.datas, strict=True) for piece in pair]
        head_size = np.fromiter(map(len, heads), np.int64, count)
        size = np.fromiter(map(len, batch.datas), np.int64, count)
        pos = np.zeros(count, np.int64)
        np.cumsum((head_size + size)[:-1], out=pos[1:])
        return Rows(
            b"".join(pieces),
            np.arange(seq, seq + count, dtype=np.int64),
            np.zeros(count, np.int64),
            pos,
            Span(pos + head_size, size),
        )

    def _encode_header(self, seq: int, meta: bytes) -> bytes:
        if self._has_typed_metadata:
            if not meta:
                raise BadInput(
                    "every record of this store has metadata, which its program decodes; nothing was written, give "
                    "the record's own (meta)"
                )
            _check_seqs(seq, 1, self._width)
            tail = b"\1" + seq.to_bytes(self._width, "little")
            meta = meta if meta.endswith(tail) else meta + tail
            return len(meta).to_bytes(4, "little") + meta
        if _reads_as_seq(meta, seq, self._width):
            raise BadInput(f"a meta of {len(meta)} bytes that begins with 01 reads as a seq; nothing was written")
        if meta:
            return len(meta).to_bytes(4, "little") + meta
        return encode_content_header(seq, self._width)

    def encode_stream_header(self, seq: int, ts_us: int, batch: Batch, size: int, /) -> bytes:
        check_columns_supported(batch, self.name, "node", "tag")
        return self._encode_header(seq, batch.meta if isinstance(batch.meta, bytes) else batch.meta[0])

    def encode_sides(
        self, rows: Rows, file_pos: int, base: int, side_state: int, crcs: Ints | None = None, /
    ) -> tuple[tuple[bytes, ...], int]:
        if not len(rows):
            return (b"",), side_state
        ends = rows.data.pos + rows.data.size
        stop = int(rows.seq[-1]) + 1
        if stop - side_state - len(rows) > _HOLES_MAX:
            raise BadInput(
                f"{stop - side_state - len(rows)} seqs up to {stop - 1} have no record, and the laminar index has an "
                "entry for each; nothing was written, convert to another layout"
            )
        entries = np.zeros(stop - side_state, INDEX)
        where = rows.seq - side_state
        entries["checksum"][where] = self._checksums(rows) if crcs is None else crcs
        entries["length"][where] = ends - rows.frame_pos
        entries["position"][where] = rows.frame_pos + file_pos
        # A hole has length 0 and the position of the next record, so that positions stay contiguous.
        holes = np.setdiff1d(np.arange(stop - side_state), where, assume_unique=True)
        entries["position"][holes] = (rows.frame_pos + file_pos)[np.searchsorted(where, holes)]
        head = encode_marker(base) if side_state == base else b""
        return (head + entries.tobytes(),), stop

    def _checksums(self, rows: Rows) -> NDArray[np.integer[Any]]:
        assert self._hasher is not None, "a log with an unknown hash function is opened for reading only"
        return self._hasher(rows.buf, rows.frame_pos, rows.data.pos + rows.data.size)

    def fill_holes(self, sides: tuple[bytes, ...], base: int, stop: int, size: int, /) -> tuple[bytes, ...]:
        index = sides[0] or encode_marker(base)
        _, entries = read_index(index)
        holes = np.zeros(stop - base - len(entries), INDEX)
        holes["position"] = size
        return (index + holes.tobytes(),)

    def truncate_sides(self, sides: list[bytes | None], base: int, seq: int, /) -> list[bytes | None]:
        # Holes have no bytes in the store, so cutting the store does not remove them.
        keep = MARKER.size + (seq - base + (base in self._double_marker_bases)) * INDEX.itemsize
        return [None if side is None else side[:keep] for side in sides]

    def recover(self, data: Buffer, sides: Sequence[bytes | None], base: int, /) -> RecoveredSegment:
        # The marker repeats the file's name, and a position usually repeats the lengths before it: where either is
        # damaged and the records match their checksums, only the index is written again.
        view = memoryview(data)
        entries = self._parse_entries(sides[0] or b"", view.__getitem__, base)
        bad = self._find_faults(data, entries, base)
        if bad:
            entries, bad = self._repair_positions(data, entries, bad, base)
        keep, reason, cut_inside = len(entries), "", False
        wrong = {entry for entry, _ in bad}
        good = [entry for entry in np.flatnonzero(entries["length"]).tolist() if entry not in wrong]
        # Bad entries at the very end are a torn write, before good records they are damage. A hole is not a record:
        # where a power cut lost a sector of the index, its zeros read as holes.
        while bad and bad[-1][0] > (good[-1] if good else -1):
            keep, reason = bad.pop()
            cut_inside |= int(entries["position"][keep]) + int(entries["length"][keep]) <= len(data)
        faults = [Fault(base + entry, base + entry + 1, int(entries["position"][entry]), why) for entry, why in bad]
        kept = entries[:keep]
        end = find_data_end(np.delete(kept, [entry for entry, _ in bad]))
        content = encode_marker(base) + kept.tobytes() if keep else b""
        recovered = RecoveredSegment(end, (content,), base + keep, 0, 0, keep, base + keep, ScanStop.END, "", faults)
        if end == len(data):
            dead = 0 if faults else count_dead_bytes(kept, end)
            return recovered._replace(
                notes=(f"{dead} bytes belong to no record; they are skipped and stay",) if dead else ()
            )
        if base in self._foreign_bases:
            # The other program appends after bytes that its index does not name, and so does this codec. Entries that
            # it wrote and that are wrong are unexplained.
            if cut_inside:
                return recovered._replace(stop=ScanStop.BAD, reason=reason, has_unexplained_tail=True)
            note = f"{len(data) - end} bytes at the end belong to no record; they stay, and appends go after them"
            return recovered._replace(end=len(data), notes=(note,))
        stop = ScanStop.BAD if reason else ScanStop.TORN  # with a reason, the cut records may have been acked
        return recovered._replace(stop=stop, reason=reason or "bytes that no good index entry names")

    def _find_faults(self, data: Buffer, entries: NDArray[np.void], base: int) -> list[tuple[int, str]]:
        return find_faults(data, entries, base, width=self._width, hasher=self._hasher)

    def _repair_positions(
        self, data: Buffer, entries: NDArray[np.void], bad: list[tuple[int, str]], base: int
    ) -> tuple[NDArray[np.void], list[tuple[int, str]]]:
        """Correct damaged positions where the content directly follows the one before it, or precedes the next."""
        for after in (True, False):
            moved = entries.copy()
            for entry, _ in bad if after else reversed(bad):
                pos = find_data_end(moved[entry - 1 : entry]) if after else _start_before_next(moved, entry, len(data))
                if 0 <= pos <= STORE_BYTES_MAX:
                    moved["position"][entry] = pos
            still_bad = {entry for entry, _ in self._find_faults(data, moved, base)}
            for entry, _ in bad:
                if entry not in still_bad:
                    entries = entries.copy() if entries.base is not None else entries
                    entries["position"][entry] = moved["position"][entry]
            bad = self._find_faults(data, entries, base)
        return entries, bad

    def salvage(self, data: Buffer, sides: Sequence[Buffer | None], base: int, stop: int, /) -> Salvage:
        index = sides[0] or b""
        entries = self._parse_entries(index, memoryview(data).__getitem__, base)[: max(stop - base, 0)]
        bad = self._find_faults(data, entries, base)
        if bad:
            entries, bad = self._repair_positions(data, entries, bad, base)
        good = np.ones(len(entries), np.bool_)
        good[[entry for entry, _ in bad]] = False
        parts = [
            scan_records(
                data, entries, base, first=base + lo, stop=base + hi, width=self._width, hasher=self._hasher
            ).rows
            for lo, hi in _true_ranges(good)
        ]
        reasons = dict(bad)
        faults = [
            Fault(base + lo, base + hi, int(entries["position"][lo]), reasons[lo]) for lo, hi in _true_ranges(~good)
        ]
        if base + len(entries) < stop:
            reason = "the index ends before the segment does" if len(index) else "the index is missing"
            faults.append(Fault(base + len(entries), stop, len(data), reason))
        return Salvage(concat_rows(data, parts), faults)

    def end_seq(self, segment: SegmentContent, /) -> int:
        return segment.base + len(self._read_entries(segment))

    def check_sealed(self, segment: SegmentContent, /) -> tuple[str | None, Fault | None]:
        if segment.sides[0] is None:
            return "the index is missing", None
        entries = self._read_entries(segment)
        index = (
            encode_marker(segment.base) + entries.tobytes()
            if segment.base in self._double_marker_bases
            else segment.index
        )
        fault = index_fault(index, segment.base, segment.data.size)
        if fault is None:
            return None, None
        past = np.flatnonzero(entries["position"].astype(np.int64) + entries["length"] > segment.data.size)
        if len(past):
            return None, Fault(segment.base + int(past[0]), segment.stop, segment.data.size, fault)
        return fault, None

    def count_dead_bytes(self, segment: SegmentContent, /) -> int:
        return count_dead_bytes(self._read_entries(segment), segment.data.size)

    def read(self, segment: SegmentContent, first: int, stop: int, bytes_max: int, /) -> Chunk:
        entries = self._read_entries(segment)
        stop = min(stop, segment.base + len(entries))
        if first >= stop:
            if first < segment.stop:
                return Chunk(
                    empty_rows(),
                    first,
                    Fault(first, segment.stop, segment.data.size, "the index ends before the segment does"),
                )
            return Chunk(empty_rows(), first)
        lo = first - segment.base
        part = entries[lo : stop - segment.base]
        pos = part["position"].astype(np.int64)
        ends, is_record = pos + part["length"], part["length"] > 0
        start = min(int(pos[is_record][0]), segment.data.size) if is_record.any() else 0
        # As many contents as are in order within `bytes_max`; one that is not is read on its own.
        fits = ~is_record | ((pos >= start) & (ends <= start + bytes_max))
        fits[: int(is_record.argmax()) + 1] = True
        part = part[: count_leading_true(fits)].copy()
        high = max(min(find_data_end(part), segment.data.size), start)
        part["position"] = np.maximum(part["position"], start) - np.uint32(start)
        result = scan_records(segment.data.fetch(start, high), part, first, width=self._width, hasher=self._hasher)
        if result.stop is ScanStop.END:
            return Chunk(result.rows, first + len(part))
        bad = first + int(self._find_faults(segment.data.fetch(start, high), part, first)[0][0])
        if bad > first:
            return Chunk(result.rows, bad)
        return Chunk(empty_rows(), first, Fault(first, first + 1, int(pos[0]), result.reason))

    def find_split(self, segment: SegmentContent, seq: int, /) -> tuple[int, Rows | None]:
        entries, entry = self._read_entries(segment), seq - segment.base
        return (find_data_end(entries[:entry]) if entry < len(entries) else segment.data.size), None


def _true_ranges(flags: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the ranges of set flags."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return [(int(lo), int(hi)) for lo, hi in edges.reshape(-1, 2)]


def _column_values(column: bytes | Sequence[bytes], count: int) -> Sequence[bytes]:
    return [column] * count if isinstance(column, bytes) else column


def _reads_as_seq(meta: bytes, seq: int, width: int) -> bool:
    """Whether a reader would take this metadata for a plain seq."""
    if len(meta) not in _SEQ_META_BYTES or meta[0] != 1:
        return False
    # Metadata of another program ends with the seq, which identifies it.
    return len(meta) == 1 + width or not meta.endswith(b"\1" + (seq % (1 << 8 * width)).to_bytes(width, "little"))


def _start_before_next(entries: NDArray[np.void], entry: int, size: int) -> int:
    """Return the start of a content that ends where the next one begins, or where the store ends."""
    end = int(entries["position"][entry + 1]) if entry + 1 < len(entries) else size
    return end - int(entries["length"][entry])
