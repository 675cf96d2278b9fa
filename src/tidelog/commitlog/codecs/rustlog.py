"""The `rustlog` codec: 20-byte big-endian headers, a sparse index, and a file of checksums.

RustLog's layout has no checksum, so after a power cut a record can have its header and not its data, unnoticed. Our
`<base>.crc` closes this: it is synced with the data before an ack, and records without a checksum in it were never
acked. Readers of RustLog's layout do not need it, and a segment without one is read as RustLog does.

Logs of the RustLog program are detected by their bytes: records with 12-byte headers and no time, file names of 20 or
12 digits. They are read and continued in their variant; the creation time of a segment is then stored beside it, as in
the laminar layout (`<base>.created`).

The layout; the only module that knows its bytes:

    <base>.log      0        4                12               20
                    ┌────────┬────────────────┬────────────────┬──────┐
                    │ length │     offset     │   ts, in µs    │ data │  then the next record
                    └────────┴────────────────┴────────────────┴──────┘
    <base>.index    │     offset     │    position    │                   of every 100th record
    <base>.crc      │  crc32  │                                           of every record, optional

Big-endian, except the checksum file, which is ours and little-endian. `length` counts the data only. `offset` is
RustLog's name for a seq. Seqs strictly increase but may leave holes. Times do not have to rise: those of our writer
never fall, another program's clock may have stepped back.

Two header sizes exist. The design (drawn above) has 20 bytes; the RustLog program leaves the time out and writes 12.
`LAYOUTS` has both; `detect_header_bytes` finds the one of a file. Records with 12-byte headers have time 0.

A record has no checksum: its length is checked against the limit and its seq against the order, but changed data or a
changed time is not noticed. The checksum file adds this: a CRC-32 of header and data per record. It is optional.

The cleaner checkpoint of a rustlog partition stores the progress of retention and compaction:

    {
      "last_cleaned_offset": 1000,
      "retention_horizon_ms": 1700000000000,
      "compaction_state": "Idle",            or {"Running": {"segment": 2000, "phase": "copy"}}
      "created_at": {
        "secs_since_epoch": 1700000600,
        "nanos_since_epoch": 0
      }
    }

Text has no checksum, so the reader is strict: exactly four members of the right kind, or the file is corrupt. A second
form has 16 bytes, big-endian: the last cleaned seq and the ms of that run. It is read, never written; it has no
horizon, and 0 stands for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from re import Match
from struct import Struct
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidelog.commitlog import vectorized
from tidelog.commitlog.codec import (
    Batch,
    RecoveredSegment,
    Salvage,
    SegmentContent,
    check_columns_supported,
    iter_chunks,
)
from tidelog.commitlog.codecs.sparse_index import Checksums, SparseCodec, SparseIndex, WindowScanner
from tidelog.commitlog.vectorized import SIGNED_MAX, RecordLayout, scan_records, scan_runs
from tidelog.config import LogConfig
from tidelog.errors import BadInput, Corrupt, TooLarge, UnknownLayout
from tidelog.formats.rows import Rows, ScanResult, ScanStop
from tidelog.types import Buffer, Ints

HEADER = Struct(">IQQ")  # length, offset, ts
_LEAD = Struct(">IQ")  # length, offset
_HEADS = {
    20: np.dtype([("data", ">u4"), ("seq", ">u8"), ("ts", ">u8")]),
    12: np.dtype([("data", ">u4"), ("seq", ">u8")]),
}
_LENGTH = np.dtype([("data", ">u4")])
_CRC = np.dtype("<u4")
INDEX = np.dtype([("offset", ">u8"), ("position", ">u8")])
HEADER_BYTES = HEADER.size
SHORT_HEADER_BYTES = _LEAD.size
INDEX_ENTRY_BYTES = INDEX.itemsize
RECORD_BYTES_MAX = 10 << 20
INDEX_EVERY = 100
STREAMING = (1 << 32) - 1  # the length in the header of a record that is still being streamed
assert HEADER_BYTES == _HEADS[20].itemsize == 20, "drawn above, frozen by tests/golden; changing it is a new format"
assert INDEX_ENTRY_BYTES == 16, "drawn above, frozen by tests/golden; changing it is a new format"

_DETECT_BYTES = 256 << 10  # bytes of a file that are read to detect the header size
_DETECT_STEP_OFFSETS = 64  # how many seqs compaction may have removed between two records
_DETECT_OFFSETS = 1 << 40  # how far above its segment's base a seq is still likely
_PLAUSIBLE_TIMES_US = (978_307_200_000_000, 4_102_444_800_000_000)  # the years 2001 to 2099


def _make_layout(header: int) -> RecordLayout:
    lead = _LEAD.unpack_from

    def measure(buf: Buffer, pos: int) -> int:
        length: int = lead(buf, pos)[0]
        return length + header if length <= RECORD_BYTES_MAX else -(length + header)

    limits = {"data": RECORD_BYTES_MAX}
    return RecordLayout(_HEADS[header], _LENGTH, 0, 0, 1, limits, has_checksum=False, measure=measure)


LAYOUTS = {header: _make_layout(header) for header in _HEADS}
LAYOUT = LAYOUTS[HEADER_BYTES]


def _check(first_seq: int, count: int, ts_us: int) -> None:
    if first_seq < 0 or first_seq + count - 1 > SIGNED_MAX:
        raise BadInput(f"offsets run from 0 to 2**63 - 1, not from {first_seq} for {count} records")
    if not 0 <= ts_us <= SIGNED_MAX:
        raise BadInput(f"a time is between 0 and 2**63 - 1 microseconds, not {ts_us}")


def encode_header(seq: int, ts_us: int, size: int, header: int = HEADER_BYTES) -> bytes:
    """Encode the header of `size` bytes of data. No scan accepts one with a size over the limit."""
    _check(seq, 1, ts_us)
    return HEADER.pack(size, seq, ts_us)[:header]


def encode(first_seq: int, ts_us: int, datas: Sequence[bytes], header: int = HEADER_BYTES) -> bytes:
    """Encode consecutive records, numbered from `first_seq`, all with the same time."""
    _check(first_seq, len(datas), ts_us)
    pack, parts, offset = HEADER.pack, list[bytes](), first_seq
    put = parts.append
    for data in datas:
        size = len(data)
        if size > RECORD_BYTES_MAX:
            raise TooLarge(f"the record for offset {offset}", size=size, limit=RECORD_BYTES_MAX)
        put(pack(size, offset, ts_us)[:header])
        put(data)
        offset += 1
    return b"".join(parts)


def detect_header_bytes(buf: Buffer, base: int) -> int | None:
    """Return the header size of the records in a data file; None where both sizes fit equally well, or neither.

    Length and seq are at the same place in both, but the next record begins elsewhere: the size that leads from more
    records to another one is the right one. Every byte of the first 256 KiB is tried as the start of a record, so that
    damage to one record does not hide the others.
    """
    links = {header: _count_links(buf, base, header) for header in _HEADS}
    best = max(links, key=lambda header: links[header])
    if links[best] == 0 or len(set(links.values())) == 1:
        return None
    if best == SHORT_HEADER_BYTES and links[best] == 1 and len(buf) >= HEADER_BYTES:
        # A single record: a 20-byte header whose data lost its last 8 bytes has the same length.
        ts_us = int.from_bytes(bytes(buf[SHORT_HEADER_BYTES:HEADER_BYTES]), "big")
        if _PLAUSIBLE_TIMES_US[0] <= ts_us <= _PLAUSIBLE_TIMES_US[1]:
            return HEADER_BYTES
    return best


def _count_links(buf: Buffer, base: int, header: int) -> int:
    """Count the positions that could be records followed by one with a higher seq, or by the end of the file."""
    every = vectorized.view_at_every_byte(buf, _HEADS[SHORT_HEADER_BYTES])
    last = len(buf) - header

    def read_heads(positions: Ints) -> tuple[Ints, Ints]:
        heads = every[positions].view(_HEADS[SHORT_HEADER_BYTES])
        return heads["data"].astype(np.int64), heads["seq"].astype(np.int64)

    positions = np.arange(min(last + 1, _DETECT_BYTES), dtype=np.int64)
    length, seq = read_heads(positions)
    likely = (length <= RECORD_BYTES_MAX) & (seq >= base) & (seq < base + _DETECT_OFFSETS)
    positions, length, seq = positions[likely], length[likely], seq[likely]
    after = positions + header + length
    count = int(np.sum(after == len(buf)))
    inside = after <= last
    after_length, after_seq = read_heads(after[inside])
    step = after_seq - seq[inside]
    follows = (step > 0) & (step <= _DETECT_STEP_OFFSETS)
    return count + int(np.sum(follows & (after_length <= RECORD_BYTES_MAX)))


def is_unfinished(buf: Buffer, pos: int, seq: int, header: int = HEADER_BYTES) -> bool:
    """Whether the bytes from `pos` on are plainly one unfinished write.

    That is: preallocated zeros, a streamed record without its length, or a record that runs past the end or lost its
    header and is not followed by another. `seq` is its expected seq; a later record with the next seq shows that its
    length was damaged.
    """
    rest = bytes(memoryview(buf)[pos:])
    if len(rest) < header or not rest.strip(b"\0"):
        return True
    length = int(_LEAD.unpack_from(rest)[0])
    if length == STREAMING:
        return True
    is_header_lost = not rest[:header].strip(b"\0")  # the sector of the header was not written
    if not is_header_lost and (length > RECORD_BYTES_MAX or header + length <= len(rest)):
        return False
    pos, next_seq = 4, (seq + 1).to_bytes(8, "big")
    while (pos := rest.find(next_seq, pos + 1)) >= 0:
        if scan_records(LAYOUTS[header], rest, pos - 4, above=seq).stop is ScanStop.END:
            return False
    return True


def encode_index(seqs: Ints, ats: Ints, ordinal: int, every: int = INDEX_EVERY) -> bytes:
    """Encode the index entries of consecutive records, the first of which is record number `ordinal` of its segment.

    Encoded in pieces or at once, the bytes are the same.
    """
    picked = slice(-ordinal % every, None, every)
    out = np.empty(len(seqs[picked]), INDEX)
    out["offset"], out["position"] = seqs[picked], ats[picked]
    return out.tobytes()


def read_index(buf: Buffer) -> NDArray[np.void] | None:
    """Return the entries as a view of `buf`; None when it ends inside one."""
    return None if len(buf) % INDEX_ENTRY_BYTES else np.frombuffer(buf, INDEX)


def index_fault(
    index: NDArray[np.void], data_size: int, base: int, stop: int, header: int = HEADER_BYTES
) -> str | None:
    """Return why this is no index of a segment with `data_size` bytes and seqs in [base, stop), or None."""
    if not len(index):
        return "the log has records, the index has none" if data_size else None
    seqs, positions = index["offset"], index["position"]
    if int(positions[0]) != 0:
        return f"the first entry is for byte {positions[0]}, not for the first record"
    fault = vectorized.find_entry_fault(LAYOUTS[header], seqs, positions, data_size)
    if fault is None and (int(seqs[0]) < base or int(seqs[-1]) >= stop):
        return f"seqs {seqs[0]} to {seqs[-1]} are not all in [{base}, {stop})"
    return fault


def index_mismatch(index: NDArray[np.void], buf: Buffer, header: int = HEADER_BYTES) -> str | None:
    """Describe the first entry that points at a record of another seq or outside `buf`; None where all are right."""
    return vectorized.find_entry_mismatch(LAYOUTS[header], index["offset"], index["position"], buf)


def read_times(buf: Buffer, at: Ints) -> Ints | None:
    """Return the times of the records with 20-byte headers at these positions; None where a header does not fit."""
    if len(at) and (int(at.min()) < 0 or int(at.max()) > len(buf) - HEADER_BYTES):
        return None
    times: Ints = vectorized.read_at(buf, at, _HEADS[HEADER_BYTES])["ts"].astype(np.int64)
    return times


def encode_crcs(buf: Buffer, rows: Rows) -> bytes:
    """Encode the checksums of these records, whose positions are positions in `buf`."""
    return vectorized.crc32_checksums(buf, rows.frame_pos, rows.data.pos + rows.data.size).astype(_CRC).tobytes()


def read_crcs(buf: Buffer) -> NDArray[np.uint32]:
    """Return the checksums as a view of `buf`, without an incomplete last one."""
    return np.frombuffer(buf, _CRC, len(buf) // _CRC.itemsize)


CLEANER_CHECKPOINT_NAME = ".cleaner_checkpoint"

_BINARY = Struct(">QQ")  # last cleaned seq, ms of the run
_NEXT_STEP = "remove the file and the next cleaning starts from the beginning"
_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=SIGNED_MAX)]
_Seconds: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=SIGNED_MAX // 1_000_000 - 1)]
_Nanos: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1_000_000_000)]


@dataclass(frozen=True, slots=True)
class CleanerCheckpoint:
    last_cleaned_seq: int
    retention_horizon_ms: int
    running: tuple[int, str] | None  # the base of the segment being compacted, and its phase: copy or swap
    created_at_us: int


class _Time(msgspec.Struct, forbid_unknown_fields=True):
    secs_since_epoch: _Seconds
    nanos_since_epoch: _Nanos


class _Step(msgspec.Struct, forbid_unknown_fields=True):
    segment: _Number
    phase: Literal["copy", "swap"]


class _Running(msgspec.Struct, forbid_unknown_fields=True, rename={"step": "Running"}):
    step: _Step


class _File(msgspec.Struct, forbid_unknown_fields=True):
    last_cleaned_offset: _Number
    retention_horizon_ms: _Number
    compaction_state: Literal["Idle"] | _Running
    created_at: _Time


def encode_cleaner_checkpoint(checkpoint: CleanerCheckpoint) -> bytes:
    """Encode a checkpoint. Raises BadInput for values that the decoder would refuse."""
    seconds, micros = divmod(checkpoint.created_at_us, 1_000_000)
    state: object = "Idle"
    if checkpoint.running is not None:
        state = {"Running": dict(zip(("segment", "phase"), checkpoint.running, strict=True))}
    content = {
        "last_cleaned_offset": checkpoint.last_cleaned_seq,
        "retention_horizon_ms": checkpoint.retention_horizon_ms,
        "compaction_state": state,
        "created_at": {"secs_since_epoch": seconds, "nanos_since_epoch": micros * 1000},
    }
    try:
        return msgspec.json.format(msgspec.json.encode(msgspec.convert(content, _File)), indent=2)
    except msgspec.ValidationError as error:
        raise BadInput(f"no checkpoint can be written from {checkpoint}: {error}") from error


def decode_cleaner_checkpoint(data: bytes, *, where: str = CLEANER_CHECKPOINT_NAME) -> CleanerCheckpoint:
    """Decode a checkpoint; raise Corrupt, naming `where`, for bytes that the encoder cannot have written."""
    if len(data) == _BINARY.size and not data.startswith(b"{"):
        return _decode_binary_checkpoint(data, where)
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        # UnicodeDecodeError: msgspec names an unknown member that is not UTF-8.
        raise Corrupt(where, pos=0, reason=str(error), next_step=_NEXT_STEP) from error
    state, time = file.compaction_state, file.created_at
    return CleanerCheckpoint(
        file.last_cleaned_offset,
        file.retention_horizon_ms,
        (state.step.segment, state.step.phase) if isinstance(state, _Running) else None,
        time.secs_since_epoch * 1_000_000 + time.nanos_since_epoch // 1000,
    )


def _decode_binary_checkpoint(data: bytes, where: str) -> CleanerCheckpoint:
    last_cleaned, run_ms = _BINARY.unpack(data)
    if last_cleaned > SIGNED_MAX or run_ms > SIGNED_MAX // 1000:
        raise Corrupt(where, pos=0, reason="a number is out of range", next_step=_NEXT_STEP)
    return CleanerCheckpoint(last_cleaned, 0, None, run_ms * 1000)


_NAME_PATTERN = re.compile(r"([0-9]{20}|[0-9]{12})(\.log|\.index|\.crc|\.created)")
_TEMPORARY_PATTERN = re.compile(
    r"(?:[0-9]{20}|[0-9]{12})(\.index\.rebuilding|\.crc\.rebuilding|\.log\.compacted|\.crc\.compacted)"
)
_TIMES_CHUNK_BYTES = 8 << 20


class RustlogCodec(SparseCodec):
    name = "rustlog"
    name_format = "{:020d}"
    data_suffix = ".log"
    name_pattern, temporary_pattern = _NAME_PATTERN, _TEMPORARY_PATTERN
    first_seq = 0
    record_bytes_max = RECORD_BYTES_MAX
    segment_bytes_limit = 1 << 62
    side_suffixes: tuple[str, ...] = (".index", ".crc")
    authoritative_sides: frozenset[int] = frozenset((1,))
    syncs_data_first = False
    latches_on_write_error = True
    verifies_on_open = False
    supported_columns: frozenset[str] = frozenset()

    def __init__(self, config: LogConfig) -> None:
        self._index_every = config.index_every
        self._requested_header_bytes = config.header_bytes
        self._set_header_bytes(config.header_bytes or HEADER_BYTES)
        if not config.checksums:
            self.side_suffixes, self.stale_suffixes = (".index",), (".crc",)
            self.authoritative_sides = frozenset()

    @property
    def _layout(self) -> RecordLayout:
        return LAYOUTS[self._header_bytes]

    def _set_header_bytes(self, size: int) -> None:
        self._header_bytes = size
        # Without times in the records, a file beside the segment stores its creation time.
        self.created_suffix = None if size == HEADER_BYTES else ".created"

    def detect_layout(self, names: Sequence[str], read: Callable[[str], Buffer | None], /) -> None:
        matches = [match for name in sorted(names) if (match := self.name_pattern.fullmatch(name)) is not None]
        digits = {len(match[1]) for match in matches}
        if len(digits) > 1:
            raise UnknownLayout(
                "segment files have names of 12 and of 20 digits, which one program does not write; nothing was "
                "changed, keep the segments of one log in a directory"
            )
        if digits:
            self.name_format = f"{{:0{digits.pop()}d}}"
        detected = self._detect_header_bytes([match for match in matches if match[2] == self.data_suffix], read)
        if detected is not None and self._requested_header_bytes not in (None, detected):
            raise BadInput(
                f"the records have headers of {detected} bytes, not {self._requested_header_bytes}; nothing was changed"
            )
        if detected is not None:
            self._set_header_bytes(detected)

    def _detect_header_bytes(self, matches: Sequence[Match[str]], read: Callable[[str], Buffer | None]) -> int | None:
        """Return the header size of the first data file that shows it; None where none does."""
        unknown = ""
        for match in matches:
            data, base = read(match[0]), int(match[1])
            if not data:
                continue
            side = read(f"{match[1]}.crc")
            crcs = read_crcs(side) if side else None
            for header, layout in LAYOUTS.items():
                if crcs is not None and len(scan_records(layout, data, count_max=1, crcs=crcs).rows):
                    return header
            if (header_bytes := detect_header_bytes(data, base)) is not None:
                return header_bytes
            result = scan_records(LAYOUT, data, above=base - 1, count_max=1)
            if side is not None or len(result.rows) or is_unfinished(data, 0, base):
                continue
            unknown = unknown or f"{match[0]} begins with no record of the rustlog layout ({result.reason})"
        if unknown and self._requested_header_bytes is None:
            raise UnknownLayout(
                f"{unknown}, neither with headers of 20 bytes nor of 12; nothing was changed. If it is a damaged log "
                "of this layout, name the header size (header_bytes)"
            )
        return None

    def variant_settings(self) -> dict[str, Any]:
        return {"header_bytes": self._header_bytes}

    def is_foreign(self, suffixes: Collection[str], /) -> bool:
        # Without the checksums that this codec writes, the acked records are unknown.
        return ".crc" in self.side_suffixes and ".crc" not in suffixes

    def initial_side_state(self, base: int, /) -> int:
        return 0

    def encode(self, seq: int, ts_us: int, batch: Batch, /) -> Rows:
        check_columns_supported(batch, self.name, "node", "tag", "meta")
        ts_us = ts_us if self._header_bytes == HEADER_BYTES else 0
        return self._build_rows(encode(seq, ts_us, batch.datas, self._header_bytes), seq, ts_us, batch)

    def encode_stream_header(self, seq: int, ts_us: int, batch: Batch, size: int, /) -> bytes:
        check_columns_supported(batch, self.name, "node", "tag", "meta")
        # No record is this long, so no reader takes an incomplete header for one.
        return encode_header(seq, ts_us, STREAMING if size < 0 else size, self._header_bytes)

    def encode_sides(
        self, rows: Rows, file_pos: int, base: int, side_state: int, crcs: Ints | None = None, /
    ) -> tuple[tuple[bytes, ...], int]:
        index = encode_index(rows.seq, rows.frame_pos + file_pos, side_state, self._index_every)
        if len(self.side_suffixes) == 1:
            return (index,), side_state + len(rows)
        crc = encode_crcs(rows.buf, rows) if crcs is None else crcs.astype("<u4").tobytes()
        return (index, crc), side_state + len(rows)

    def recover(self, data: Buffer, sides: Sequence[bytes | None], base: int, /) -> RecoveredSegment:
        crcs = _read_crcs(sides)
        recovered = self._recover(data, base, crcs)
        if recovered.stop is ScanStop.END or crcs is not None or len(self.side_suffixes) == 1:
            return recovered
        if is_unfinished(data, recovered.end, recovered.next_seq, self._header_bytes):
            return recovered
        return recovered._replace(stop=ScanStop.BAD, has_unexplained_tail=True)

    def recover_continued(
        self, data: Buffer, sides: Sequence[bytes | None], base: int, start: int, /
    ) -> RecoveredSegment:
        recovered, crcs = self.recover(data, sides, base), _read_crcs(sides)
        is_covered = crcs is not None and recovered.records == len(crcs) and recovered.end >= start
        if recovered.stop is ScanStop.END or crcs is None or not is_covered:
            return recovered
        # The other program keeps no checksums: from here on its records are covered like our own.
        tail = scan_records(self._layout, data, recovered.end, above=recovered.next_seq - 1).rows
        if not len(tail) and not self._finds_record(data, recovered.end, recovered.next_seq):
            return recovered  # not one record of another program
        more = read_crcs(encode_crcs(data, tail))
        continued = self._recover(data, base, np.concatenate((crcs, more)))
        if continued.stop is ScanStop.END:
            return continued
        if is_unfinished(data, continued.end, continued.next_seq, self._header_bytes):
            return continued
        return continued._replace(stop=ScanStop.BAD, has_unexplained_tail=True)

    def _finds_record(self, data: Buffer, pos: int, seq: int) -> bool:
        """Whether records with higher seqs follow somewhere after this byte."""
        found, _ = vectorized.find_next_record(self._layout, data, pos, seq - 1, SIGNED_MAX, None)
        return found < len(data)

    def salvage(self, data: Buffer, sides: Sequence[Buffer | None], base: int, stop: int, /) -> Salvage:
        return self._salvage(data, base, stop, _read_crcs(sides))

    def _index_fault(self, segment: SegmentContent) -> str | None:
        index = read_index(segment.index)
        if index is None:
            return "its size is not a multiple of an entry"
        fault = index_fault(index, segment.data.size, segment.base, segment.stop, self._header_bytes)
        crcs = _read_crcs(segment.sides)
        if fault is None and len(index) and crcs is not None and len(index) != -(-len(crcs) // self._index_every):
            return f"it does not have an entry for every {self._index_every} records"
        return fault

    def _last_entry_mismatch(self, segment: SegmentContent) -> str | None:
        index = read_index(segment.index)
        return None if index is None else self._find_misdirected_entry(index[-1:], segment)

    def _lacks_entries(self, tail: Rows, base: int) -> bool:
        return len(tail) > self._index_every

    def _find_misdirected_entry(self, index: NDArray[np.void], segment: SegmentContent) -> str | None:
        return index_mismatch(index, segment.data.fetch(0, segment.data.size), self._header_bytes)

    def is_index_usable(self, segment: SegmentContent, /) -> bool:
        # Entries may have another distance. Only checksums need the number of an indexed record.
        index = read_index(segment.index)
        if index is None or _read_crcs(segment.sides) is not None:
            return False
        fault = index_fault(index, segment.data.size, segment.base, segment.stop, self._header_bytes)
        return fault is None and self._find_misdirected_entry(index, segment) is None

    def _read_index(self, segment: SegmentContent) -> SparseIndex:
        index = read_index(segment.index)
        if index is None:
            index = np.zeros(0, INDEX)
        return SparseIndex(index["offset"].astype(np.int64), index["position"].astype(np.int64), self._index_every)

    def _make_scanner(self, segment: SegmentContent) -> WindowScanner:
        crcs, layout = _read_crcs(segment.sides), self._layout

        def scan(buf: Buffer, starts: Ints, ordinal: int) -> ScanResult:
            return scan_runs(layout, buf, starts, crcs=None if crcs is None else crcs[ordinal:])

        return scan

    def time_range(self, segment: SegmentContent, /) -> tuple[int, int] | None:
        index = read_index(segment.index)
        if self.created_suffix is not None or index is None or not len(index):
            return None
        if _read_crcs(segment.sides) is not None and self._are_times_increasing(segment, index):
            return super().time_range(segment)
        # Another program's clock may have stepped back: the newest record need not be the last.
        first = last = None
        for chunk in iter_chunks(partial(self.read, segment), segment.base, segment.stop, _TIMES_CHUNK_BYTES):
            if len(chunk.rows):
                first = int(chunk.rows.ts_us[0]) if first is None else first
                last = max(last or 0, int(chunk.rows.ts_us.max()))
        return None if first is None or last is None else (first, last)

    def _are_times_increasing(self, segment: SegmentContent, index: NDArray[np.void]) -> bool:
        """Whether the times of the indexed records rise, as those of our writer do."""
        times = read_times(segment.data.fetch(0, segment.data.size), index["position"].astype(np.int64))
        return times is not None and not bool((np.diff(times) < 0).any())


def _read_crcs(sides: Sequence[Buffer | None]) -> Checksums | None:
    """Return the checksums of a segment's records; None where they are missing or not written."""
    side = sides[1] if len(sides) > 1 else None
    return None if side is None else read_crcs(side)
