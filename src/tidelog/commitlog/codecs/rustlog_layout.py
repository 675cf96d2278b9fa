"""[hot] The rustlog layout. No other module knows what its files look like.

    <base>.log      0        4                12               20
                    ┌────────┬────────────────┬────────────────┬──────┐
                    │ length │     offset     │   ts, in µs    │ data │  then the next record
                    └────────┴────────────────┴────────────────┴──────┘
    <base>.index    │     offset     │    position    │                   of every 100th record
    <base>.crc      │  crc32  │                                           of every record, optional

Big-endian, except the side-car, which is ours and little-endian. `length` counts the data only.
`offset` is this layout's word for a seq. Offsets strictly increase but may leave holes. Times do
not have to rise: a writer of ours never lets them fall, another program's clock may have stepped.

Two header sizes exist. The design (drawn above) has 20 bytes; the RustLog program leaves the time
out and writes 12. Every function takes `header`, the size in use; `variant` tells which one a file
has. Records of 12-byte headers have time 0.

A record carries no checksum. A length is held to its bounds and an offset to its order, and that
is all: changed data or a changed time look like any other. The side-car closes this. Its CRC-32
covers header and data, so that damage to a header shows as well. Nothing needs it to be there.

The cleaner checkpoint of a rustlog partition: how far retention and compaction have come.

    {
      "last_cleaned_offset": 1000,
      "retention_horizon_ms": 1700000000000,
      "compaction_state": "Idle",            or {"Running": {"segment": 2000, "phase": "copy"}}
      "created_at": {
        "secs_since_epoch": 1700000600,
        "nanos_since_epoch": 0
      }
    }

Text has no checksum, so the reader is strict: four members of the right kind and nothing else, or
the file is corrupt. A changed digit still reads as another number. There is a second form, 16
bytes, big-endian: the last cleaned seq and the ms of that run. It is read, never written. It has
no horizon: 0 stands for it, which claims nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from struct import Struct
from typing import Annotated, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidelog.commitlog import vectorized
from tidelog.errors import BadInput, Corrupt, TooLarge
from tidelog.formats.rows import Rows, ScanResult, ScanStop, Span, empty_rows
from tidelog.types import Buffer, Ints

HEADER = Struct(">IQQ")  # length, offset, ts
_LEAD = Struct(">IQ")  # length, offset
_HEADS = {
    20: np.dtype([("length", ">u4"), ("offset", ">u8"), ("ts", ">u8")]),
    12: np.dtype([("length", ">u4"), ("offset", ">u8")]),
}
_LENGTH = np.dtype([("length", ">u4")])
_CRC = np.dtype("<u4")
INDEX = np.dtype([("offset", ">u8"), ("position", ">u8")])
HEADER_BYTES = HEADER.size
SHORT_HEADER_BYTES = _LEAD.size
INDEX_ENTRY_BYTES = INDEX.itemsize
RECORD_BYTES_MAX = 10 << 20
INDEX_EVERY = 100
STREAMING = (1 << 32) - 1  # the length in the head of a record that is still being streamed
_SEARCH_BYTES = 1 << 16  # of one look for a header
assert HEADER_BYTES == _HEADS[20].itemsize == 20, "drawn above, frozen by tests/golden; changing it is a new format"
assert INDEX_ENTRY_BYTES == 16, "drawn above, frozen by tests/golden; changing it is a new format"

_SIGNED_MAX = (1 << 63) - 1  # columns are int64, so the upper half of u64 is refused
_NAME = re.compile(r"([0-9]{20})\.log")
_DETECT_BYTES = 256 << 10  # of a file, looked at to tell the header size
_DETECT_STEP_OFFSETS = 64  # how many offsets compaction may have taken between two records
_DETECT_OFFSETS = 1 << 40  # how far above its segment's base an offset is still likely
_PLAUSIBLE_TIMES_US = (978_307_200_000_000, 4_102_444_800_000_000)  # the years 2001 to 2099


def data_name(base: int) -> str:
    return f"{base:020d}.log"


def index_name(base: int) -> str:
    return f"{base:020d}.index"


def crc_name(base: int) -> str:
    return f"{base:020d}.crc"


def base_of(name: str) -> int | None:
    """The base a data file's name carries, or None for any other name."""
    match = _NAME.fullmatch(name)
    base = int(match[1]) if match else -1
    return base if 0 <= base <= _SIGNED_MAX else None


def _check(first_seq: int, count: int, ts_us: int) -> None:
    if first_seq < 0 or first_seq + count - 1 > _SIGNED_MAX:
        raise BadInput(f"offsets run from 0 to 2**63 - 1, not from {first_seq} for {count} records")
    if not 0 <= ts_us <= _SIGNED_MAX:
        raise BadInput(f"a time lies between 0 and 2**63 - 1 microseconds, not at {ts_us}")


def encode_header(seq: int, ts_us: int, size: int, header: int = HEADER_BYTES) -> bytes:
    """What stands before `size` bytes of data. A size over the limit makes a head that no walk accepts."""
    _check(seq, 1, ts_us)
    return HEADER.pack(size, seq, ts_us)[:header]


def encode(first_seq: int, ts_us: int, datas: Sequence[bytes], header: int = HEADER_BYTES) -> bytes:
    """The records one after another, numbered from `first_seq`, all with the same time."""
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


def size_at(buf: Buffer, pos: int, header: int = HEADER_BYTES) -> int:
    """How long the record at `pos` claims to be, header included; 0 where there is no whole header."""
    return 0 if pos + header > len(buf) else int(_LEAD.unpack_from(buf, pos)[0] + header)


def detect_header_bytes(buf: Buffer, base: int) -> int | None:
    """The header size of the records in a data file; None where the bytes fit both sizes equally well, or neither.

    Length and offset are at the same place in both. Where the next record begins tells them apart, so the size that
    leads from more records to another one is the right one. Every byte of the first 256 KiB is tried as the start of a
    record: damage to one record does not hide the others.
    """
    links = {header: _count_links(buf, base, header) for header in _HEADS}
    best = max(links, key=lambda header: links[header])
    if links[best] == 0 or len(set(links.values())) == 1:
        return None
    if best == SHORT_HEADER_BYTES and links[best] == 1 and len(buf) >= HEADER_BYTES:
        # One record alone: a 20-byte header whose data lost its last 8 bytes has the same length.
        ts_us = int.from_bytes(bytes(buf[SHORT_HEADER_BYTES:HEADER_BYTES]), "big")
        if _PLAUSIBLE_TIMES_US[0] <= ts_us <= _PLAUSIBLE_TIMES_US[1]:
            return HEADER_BYTES
    return best


def _count_links(buf: Buffer, base: int, header: int) -> int:
    """How many places could be records that lead to another one with a higher offset, or to the end of the file."""
    whole = vectorized.view_at_every_byte(buf, _HEADS[SHORT_HEADER_BYTES])
    last = len(buf) - header

    def at(places: Ints) -> tuple[Ints, Ints]:
        heads = whole[places].view(_HEADS[SHORT_HEADER_BYTES])
        return heads["length"].astype(np.int64), heads["offset"].astype(np.int64)

    places = np.arange(min(last + 1, _DETECT_BYTES), dtype=np.int64)
    length, offset = at(places)
    likely = (length <= RECORD_BYTES_MAX) & (offset >= base) & (offset < base + _DETECT_OFFSETS)
    places, length, offset = places[likely], length[likely], offset[likely]
    after = places + header + length
    count = int(np.sum(after == len(buf)))
    inside = after <= last
    after_length, after_offset = at(after[inside])
    step = after_offset - offset[inside]
    follows = (step > 0) & (step <= _DETECT_STEP_OFFSETS)
    return count + int(np.sum(follows & (after_length <= RECORD_BYTES_MAX)))


def is_unfinished(buf: Buffer, pos: int, seq: int, header: int = HEADER_BYTES) -> bool:
    """Whether what begins at `pos` is plainly one write that did not finish.

    That is: preallocated zeros, a streamed record without its length, or a record that runs past the end or lost its
    header and is not followed by another. `seq` is the seq it should have; a record with the next one further on shows
    that its length was damaged.
    """
    rest = bytes(memoryview(buf)[pos:])
    if len(rest) < header or not rest.strip(b"\0"):
        return True
    length = int(_LEAD.unpack_from(rest)[0])
    if length == STREAMING:
        return True
    lost = not rest[:header].strip(b"\0")  # the sector of the header did not arrive
    if not lost and (length > RECORD_BYTES_MAX or header + length <= len(rest)):
        return False
    at, wanted = 4, (seq + 1).to_bytes(8, "big")
    while (at := rest.find(wanted, at + 1)) >= 0:
        if scan_records(rest, at - 4, above=seq, header=header).stop is ScanStop.END:
            return False
    return True


def scan_records(
    buf: Buffer,
    pos: int = 0,
    end: int | None = None,
    *,
    above: int = -1,
    count_max: int | None = None,
    bytes_max: int | None = None,
    stop_seq: int | None = None,
    crcs: NDArray[np.uint32] | None = None,
    header: int = HEADER_BYTES,
) -> ScanResult:
    """The records of [pos, end), the first of them above seq `above`. Bad bytes never raise.

    The walk ends early, and cleanly, before the record that would be one more than `count_max`,
    before the one that would bring the data over `bytes_max` (never before the first), and before
    the first with a seq of `stop_seq` or more. That last one is checked like the others before
    it is believed. `crcs` are those of the records from `pos` on.
    """
    last = len(buf) if end is None else min(end, len(buf))
    if not 0 <= pos <= last:
        return ScanResult(empty_rows(buf), pos, ScanStop.BAD, f"byte {pos} is outside the {last} bytes there are")
    room = _SIGNED_MAX if bytes_max is None else bytes_max
    limit = 1 << 64 if stop_seq is None else stop_seq
    stop, reason, peeked = ScanStop.END, "", False
    lead, at, header_last = _LEAD.unpack_from, list[int](), last - header
    put = at.append
    # The loop only follows lengths, 0.2 µs a record; every check that needs no chain is vectorised after it.
    for _ in repeat(None, _SIGNED_MAX if count_max is None else count_max):
        if pos > header_last:
            if pos < last:
                stop, reason = ScanStop.TORN, "the header runs past the end"
            break
        length, offset = lead(buf, pos)
        after = pos + header + length
        if length > RECORD_BYTES_MAX:
            stop, reason = ScanStop.BAD, "length is over the limit"
            break
        if after > last:
            stop, reason = ScanStop.TORN, "the data runs past the end"
            break
        room -= length
        if room < 0 and at:
            break
        put(pos)
        if offset >= limit:
            peeked = True
            break
        pos = after
    return _check_records(
        ScanResult(empty_rows(buf), pos, stop, reason), np.array(at, np.int64), above, crcs, peeked, header
    )


def scan_records_vectorized(
    buf: Buffer,
    starts: Ints,
    end: int | None = None,
    *,
    above: int = -1,
    crcs: NDArray[np.uint32] | None = None,
    header: int = HEADER_BYTES,
) -> ScanResult:
    """What `walk` answers from the first of `starts`, found quicker when they are where records start.

    Measured on 100-byte records with a start every 100: twice as quick at 10 000 records, 5 times at 100 000.
    """
    last = len(buf) if end is None else min(end, len(buf))
    lengths = vectorized.view_at_every_byte(buf, _LENGTH)

    def sizes(at: Ints) -> Ints | None:
        length: Ints = lengths[at].view(_LENGTH)["length"].astype(np.int64)
        return None if bool((length > RECORD_BYTES_MAX).any()) else length + header

    at = vectorized.locate_records(starts, last, header, sizes)
    if at is None:
        return scan_records(buf, int(starts[0]) if len(starts) else 0, last, above=above, crcs=crcs, header=header)
    return _check_records(ScanResult(empty_rows(buf), last, ScanStop.END), at, above, crcs, False, header)


def _check_records(
    found: ScanResult, at: Ints, above: int, crcs: NDArray[np.uint32] | None, peeked: bool, header: int = HEADER_BYTES
) -> ScanResult:
    """Check the records at these positions, all whole, and keep those before the first fault.

    `found` says how the chain of lengths ended; a `peeked` last record is checked, not kept.
    """
    buf, count = found.rows.buf, len(at)
    if not count:
        return found
    heads = vectorized.read_at(buf, at, _HEADS[header])
    size = heads["length"].astype(np.int64)
    # The upper half of u64 turns negative here, so it breaks the order like any other step back.
    seq = heads["offset"].astype(np.int64)
    ts = heads["ts"].astype(np.int64) if header == HEADER_BYTES else np.zeros(count, np.int64)
    rising = vectorized.is_increasing(seq, max(above, -1))
    good, keep, reason = vectorized.count_leading_true(rising & (ts >= 0)), count - peeked, ""
    if good < count:
        reason = "timestamp is out of range" if rising[good] else "offset does not increase"
    if crcs is not None:
        # One further than the order holds: where both fail, the checksum is the better explanation.
        seen = min(good + 1, count, len(crcs))
        same = vectorized.count_leading_true(
            vectorized.crc32_checksums(buf, at[:seen], at[:seen] + size[:seen] + header) == crcs[:seen]
        )
        if same < seen:
            good, reason = same, "checksum"
        elif len(crcs) < min(good, keep):
            good, reason = len(crcs), "no checksum for this record"
    if reason:
        keep, found = good, ScanResult(found.rows, int(at[good]), ScanStop.BAD, reason)
    at, size = at[:keep], size[:keep]
    return found._replace(rows=Rows(buf, seq[:keep], ts[:keep], at, Span(at + header, size)))


def find_next_record(
    buf: Buffer, pos: int, above: int, stop: int, crcs: NDArray[np.uint32] | None, header: int = HEADER_BYTES
) -> tuple[int, int]:
    """Where reading may go on after the bad record at `pos`, whose checksum is the first of `crcs`, and how many
    records are left out; the end of `buf` where no good record follows.

    First by the length that the bad record claims. Where nothing good is there, the length is damaged too: the next
    header with a seq between `above` and `stop` is looked for, and believed if its checksum is one that is expected,
    or, without checksums, if more good records follow it.
    """
    size = size_at(buf, pos, header)
    if size and pos + size <= len(buf):
        if pos + size == len(buf):
            return len(buf), 1
        rest = None if crcs is None else crcs[1:]
        after = scan_records(buf, pos + size, above=above, count_max=1, crcs=rest, header=header)
        if len(after.rows) and int(after.rows.seq[0]) < stop:
            return pos + size, 1
    every = vectorized.view_at_every_byte(buf, _HEADS[header])
    for low in range(pos + 1, len(every), _SEARCH_BYTES):
        heads = every[low : low + _SEARCH_BYTES].copy().view(_HEADS[header])
        length, seq = heads["length"].astype(np.int64), heads["offset"].astype(np.int64)
        ends = np.arange(low, low + len(heads)) + header + length
        likely = (length <= RECORD_BYTES_MAX) & (ends <= len(buf)) & (seq > above) & (seq < stop)
        for at in (low + np.flatnonzero(likely)).tolist():
            if crcs is None:
                after = scan_records(buf, at, above=above, count_max=3, header=header)
                if len(after.rows) == 3 or (len(after.rows) and after.stop is ScanStop.END):
                    return at, 1
                continue
            end = int(ends[at - low])
            named = np.flatnonzero(crcs[1:] == vectorized.crc32_checksums(buf, np.array([at]), np.array([end]))[0])
            if len(named):
                return at, int(named[0]) + 1
    return len(buf), 1


def encode_index(seqs: Ints, ats: Ints, ordinal: int, every: int = INDEX_EVERY) -> bytes:
    """The index entries of consecutive records, the first of which is the segment's record number `ordinal`.

    Written in pieces or at once, the bytes are the same.
    """
    picked = slice(-ordinal % every, None, every)
    out = np.empty(len(seqs[picked]), INDEX)
    out["offset"], out["position"] = seqs[picked], ats[picked]
    return out.tobytes()


def read_index(buf: Buffer) -> NDArray[np.void] | None:
    """The entries, borrowing `buf`; None when it ends inside one."""
    return None if len(buf) % INDEX_ENTRY_BYTES else np.frombuffer(buf, INDEX)


def index_fault(
    index: NDArray[np.void], data_size: int, base: int, stop: int, header: int = HEADER_BYTES
) -> str | None:
    """Why this is no index of a segment with `data_size` bytes and seqs in [base, stop), or None."""
    if not len(index):
        return "the log has records, the index has none" if data_size else None
    offsets, positions = index["offset"], index["position"]
    if bool((offsets[1:] <= offsets[:-1]).any()):
        return "offsets do not increase"
    if bool((positions[1:] <= positions[:-1]).any()):
        return "positions do not increase"
    if int(positions[0]) != 0:
        return f"the first entry is for byte {positions[0]}, not for the first record"
    if int(positions[-1]) + header > data_size:
        return f"position {positions[-1]} holds no record in a log of {data_size} bytes"
    if int(offsets[0]) < base or int(offsets[-1]) >= stop:
        return f"offsets {offsets[0]} to {offsets[-1]} are not all in [{base}, {stop})"
    return None


def index_mismatch(index: NDArray[np.void], buf: Buffer, header: int = HEADER_BYTES) -> str | None:
    """Which entry points at a record of another seq, or None. Also answers for positions outside `buf`."""
    # As int64 the upper half of u64 turns negative: one comparison at each end covers all of it.
    at = index["position"].astype(np.int64)
    inside = (at >= 0) & (at <= len(buf) - header)
    good = vectorized.count_leading_true(inside)
    held = vectorized.read_at(buf, at[:good], _HEADS[header])["offset"]
    same = vectorized.count_leading_true(held == index["offset"][:good])
    if same < good:
        entry = index[same]
        return f"offset {entry['offset']} is said to be at byte {at[same]}, where offset {held[same]} is"
    return None if good == len(at) else f"byte {index['position'][good]} holds no whole record header"


def read_times(buf: Buffer, at: Ints) -> Ints | None:
    """The times of the records with 20-byte headers at these positions; None where one of them holds no header."""
    if len(at) and (int(at.min()) < 0 or int(at.max()) > len(buf) - HEADER_BYTES):
        return None
    times: Ints = vectorized.read_at(buf, at, _HEADS[HEADER_BYTES])["ts"].astype(np.int64)
    return times


def encode_crcs(buf: Buffer, rows: Rows) -> bytes:
    """The side-car of these records, whose positions are positions in `buf`."""
    return vectorized.crc32_checksums(buf, rows.frame_pos, rows.data.pos + rows.data.size).astype(_CRC).tobytes()


def read_crcs(buf: Buffer) -> NDArray[np.uint32]:
    """The checksums, borrowing `buf`; a last one that is not whole is left out."""
    return np.frombuffer(buf, _CRC, len(buf) // _CRC.itemsize)


CLEANER_CHECKPOINT_NAME = ".cleaner_checkpoint"
CLEANER_CHECKPOINT_TEMPORARY_NAME = ".cleaner_checkpoint.tmp"

_BINARY = Struct(">QQ")  # last cleaned seq, ms of the run
_CHECKPOINT_SIGNED_MAX = (1 << 63) - 1
_NEXT_STEP = "remove the file and the next cleaning starts from the beginning"
_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_CHECKPOINT_SIGNED_MAX)]
_Seconds: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_CHECKPOINT_SIGNED_MAX // 1_000_000 - 1)]
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
    """The file's content. Whatever `decode` would refuse is refused here already."""
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
    """What `encode` was given; Corrupt, naming `where`, for anything it could not have written."""
    if len(data) == _BINARY.size and not data.startswith(b"{"):
        return _decode_binary_checkpoint(data, where)
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        # The second comes from naming a member that is no member and no UTF-8 either.
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
    if last_cleaned > _CHECKPOINT_SIGNED_MAX or run_ms > _CHECKPOINT_SIGNED_MAX // 1000:
        raise Corrupt(where, pos=0, reason="a number is out of range", next_step=_NEXT_STEP)
    return CleanerCheckpoint(last_cleaned, 0, None, run_ms * 1000)
