"""The `laminar` codec: record bytes in a store, and an index with the position and checksum of each.

The store has no record boundaries, so the index is authoritative: a record exists when its index entry does. The store
is synced before an entry is written, and an entry is never rebuilt. A compacted record is an entry of length zero.

A segment without a `.created` file was written by another program. Bytes that its index does not name stay in its
store, and records are appended after them. The width of its seqs and its hash function are detected from its records
(`detect_layout`), and appends use the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

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
from tidelog.commitlog.codecs import laminar_layout
from tidelog.commitlog.vectorized import count_leading_true, siphash
from tidelog.config import LogConfig
from tidelog.errors import BadInput, UnknownLayout
from tidelog.formats.rows import Rows, ScanStop, Span, concat_rows, empty_rows
from tidelog.types import Buffer, Ints

_SEQ_META_BYTES = (5, 9)  # length of metadata that is only the record's seq
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
        self._hasher = laminar_layout.HASHERS["CRC-32"]
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
        pos = entries["position"].astype(np.int64)
        ends, matching = pos + entries["length"], np.zeros(0, np.int64)
        for hasher in laminar_layout.HASHERS.values():
            matching = np.flatnonzero(hasher(store, pos, ends) == entries["checksum"])
            if len(matching):
                self._hasher = hasher
                pos, seqs = pos[matching], seqs[matching]
                break
        narrow, wide = laminar_layout.count_stored_seqs(store, pos, seqs)
        # All records of a segment of ours may be torn; those of a segment that another program closed are not.
        if (
            foreign
            and not len(matching)
            and len(pos) > 1
            and (len(pos) in (narrow, wide) or (entries["checksum"] >> np.uint64(32)).all())
        ):
            raise UnknownLayout(
                f"none of the first {len(pos)} checksums of {name} is the {' or the '.join(laminar_layout.HASHERS)} "
                "of its record: the store was written with another hash function; nothing was changed. Copy it with "
                "the program that wrote it, into a store with CRC-32"
            )
        if narrow == wide:
            return  # metadata without a seq, or no good record: unknown
        width: Literal[4, 8] = 8 if wide > narrow else 4
        if self._requested_width not in (None, width):
            raise BadInput(
                f"the records of {name} have seqs of {width} bytes, not {self._requested_width}; nothing was changed, "
                "leave index_width out or convert the log"
            )
        self._width = width

    def is_foreign(self, suffixes: Collection[str], /) -> bool:
        return ".created" not in suffixes

    def checksum(self, pieces: Iterable[Buffer], /) -> int:
        if self._hasher is laminar_layout.HASHERS["CRC-32"]:
            return super().checksum(pieces)
        return siphash(b"".join(pieces))

    def _parse_entries(self, index: Buffer, store: Callable[[slice], Buffer], base: int) -> NDArray[np.void]:
        """Return the entries of an index file, the first of them for seq `base`."""
        _, entries = laminar_layout.read_index(index)
        if laminar_layout.has_second_marker(index, store, base):
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
        if _reads_as_seq(meta, seq, self._width):
            raise BadInput(f"a meta of {len(meta)} bytes that begins with 01 reads as a seq; nothing was written")
        if meta:
            return len(meta).to_bytes(4, "little") + meta
        return laminar_layout.encode_content_header(seq, self._width)

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
        entries = np.zeros(stop - side_state, laminar_layout.INDEX)
        where = rows.seq - side_state
        entries["checksum"][where] = self._checksums(rows) if crcs is None else crcs
        entries["length"][where] = ends - rows.frame_pos
        entries["position"][where] = rows.frame_pos + file_pos
        # A hole has length 0 and the position of the next record, so that positions stay contiguous.
        holes = np.setdiff1d(np.arange(stop - side_state), where, assume_unique=True)
        entries["position"][holes] = (rows.frame_pos + file_pos)[np.searchsorted(where, holes)]
        head = laminar_layout.encode_marker(base) if side_state == base else b""
        return (head + entries.tobytes(),), stop

    def _checksums(self, rows: Rows) -> NDArray[np.integer[Any]]:
        return self._hasher(rows.buf, rows.frame_pos, rows.data.pos + rows.data.size)

    def fill_holes(self, sides: tuple[bytes, ...], base: int, stop: int, size: int, /) -> tuple[bytes, ...]:
        index = sides[0] or laminar_layout.encode_marker(base)
        _, entries = laminar_layout.read_index(index)
        holes = np.zeros(stop - base - len(entries), laminar_layout.INDEX)
        holes["position"] = size
        return (index + holes.tobytes(),)

    def truncate_sides(self, sides: list[bytes | None], base: int, seq: int, /) -> list[bytes | None]:
        # Holes have no bytes in the store, so cutting the store does not remove them.
        keep = (
            laminar_layout.MARKER.size
            + (seq - base + (base in self._double_marker_bases)) * laminar_layout.INDEX.itemsize
        )
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
        end = laminar_layout.find_data_end(np.delete(kept, [entry for entry, _ in bad]))
        content = laminar_layout.encode_marker(base) + kept.tobytes() if keep else b""
        recovered = RecoveredSegment(end, (content,), base + keep, 0, 0, keep, base + keep, ScanStop.END, "", faults)
        if end == len(data):
            dead = 0 if faults else laminar_layout.count_dead_bytes(kept, end)
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
        return laminar_layout.find_faults(data, entries, base, width=self._width, hasher=self._hasher)

    def _repair_positions(
        self, data: Buffer, entries: NDArray[np.void], bad: list[tuple[int, str]], base: int
    ) -> tuple[NDArray[np.void], list[tuple[int, str]]]:
        """Correct damaged positions where the content directly follows the one before it, or precedes the next."""
        for after in (True, False):
            moved = entries.copy()
            for entry, _ in bad if after else reversed(bad):
                pos = (
                    laminar_layout.find_data_end(moved[entry - 1 : entry])
                    if after
                    else _start_before_next(moved, entry, len(data))
                )
                if 0 <= pos <= laminar_layout.STORE_BYTES_MAX:
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
            laminar_layout.scan_records(
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
            laminar_layout.encode_marker(segment.base) + entries.tobytes()
            if segment.base in self._double_marker_bases
            else segment.index
        )
        fault = laminar_layout.index_fault(index, segment.base, segment.data.size)
        if fault is None:
            return None, None
        past = np.flatnonzero(entries["position"].astype(np.int64) + entries["length"] > segment.data.size)
        if len(past):
            return None, Fault(segment.base + int(past[0]), segment.stop, segment.data.size, fault)
        return fault, None

    def count_dead_bytes(self, segment: SegmentContent, /) -> int:
        return laminar_layout.count_dead_bytes(self._read_entries(segment), segment.data.size)

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
        high = max(min(laminar_layout.find_data_end(part), segment.data.size), start)
        part["position"] = np.maximum(part["position"], start) - np.uint32(start)
        result = laminar_layout.scan_records(
            segment.data.fetch(start, high), part, first, width=self._width, hasher=self._hasher
        )
        if result.stop is ScanStop.END:
            return Chunk(result.rows, first + len(part))
        bad = first + int(self._find_faults(segment.data.fetch(start, high), part, first)[0][0])
        if bad > first:
            return Chunk(result.rows, bad)
        return Chunk(empty_rows(), first, Fault(first, first + 1, int(pos[0]), result.reason))

    def find_split(self, segment: SegmentContent, seq: int, /) -> tuple[int, Rows | None]:
        entries, entry = self._read_entries(segment), seq - segment.base
        return (laminar_layout.find_data_end(entries[:entry]) if entry < len(entries) else segment.data.size), None


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
