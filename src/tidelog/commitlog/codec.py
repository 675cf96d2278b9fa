"""What a codec owes the log: names, record bytes, index bytes, and how to read them back.

    a segment on disk                     written                      durable before an ack
    data file                             first                        always
    side files (index, checksums)         after the data they describe those in `truths`
    extra file (footer, birth)            when sealed / when born      before the next segment exists

The log owns order, syncs, roll-over, recovery and removal and knows no layout; a codec owns one
layout and does no I/O. It sees a data file through a `Source`, so that the same code reads a
mapped sealed segment and a growing one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from re import Pattern
from typing import Final, NamedTuple, Protocol, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from tidelog.errors import BadInput, TooLarge
from tidelog.formats import batch_writer as all_values
from tidelog.formats import segment_index
from tidelog.formats.frame import U32_MAX
from tidelog.formats.rows import Rows, ScanResult, ScanStop, concat_rows, copy_values
from tidelog.types import Buffer, Ints


@dataclass(frozen=True)
class Batch:
    """What a caller appends, as columns. A bytes value is common to all records, a list is one value each."""

    datas: Sequence[bytes]
    node: bytes | Sequence[bytes] = b""
    tag: bytes | Sequence[bytes] = b""
    meta: bytes | Sequence[bytes] = b""

    def __post_init__(self) -> None:
        for name in ("node", "tag", "meta"):
            column = getattr(self, name)
            if not isinstance(column, bytes) and len(column) != len(self.datas):
                raise BadInput(
                    f"{len(self.datas)} records came with {len(column)} values of {name}; nothing was written"
                )

    @cached_property
    def data_lengths(self) -> NDArray[np.uint32]:
        """How long each record's data is, asked of every record once."""
        found, _ = all_values.value_lengths(self.datas)
        if isinstance(found, list):
            raise TooLarge("a record", size=max(found), limit=U32_MAX)
        return np.asarray(found, "<u4")

    def slice(self, lo: int, hi: int) -> Batch:
        columns = (c if isinstance(c, bytes) else c[lo:hi] for c in (self.node, self.tag, self.meta))
        return Batch(self.datas[lo:hi], *columns)


OPTIONAL_COLUMNS: Final = ("node", "tag", "meta")


def check_columns_supported(batch: Batch, codec: str, *unsupported: str) -> None:
    """Raise when a batch carries columns that this layout has no room for."""
    for name in unsupported:
        column = getattr(batch, name)
        if column if isinstance(column, bytes) else any(column):
            raise BadInput(f"the {codec} layout has no room for a {name}; nothing was written, use the tide codec")


class Fault(NamedTuple):
    """Records that cannot be read, and where reading may go on."""

    seq: int  # first seq that is affected
    resume: int  # first seq behind the damage
    pos: int  # byte in the data file
    reason: str

    @property
    def seqs_text(self) -> str:
        """The seqs in words, for a message; nothing where no record is affected."""
        return f", seqs {self.seq} to {self.resume - 1}" if self.resume > self.seq else ""


class Chunk(NamedTuple):
    """One read: rows in order, the seq to go on from, and what stopped it early."""

    rows: Rows
    next_seq: int
    fault: Fault | None = None


SidePiece: TypeAlias = bytes | segment_index.EntryRun  # of a side file


class EncodedAppend(NamedTuple):
    """Records on their way into a segment: what to write behind the data and behind each side file."""

    writes: Sequence[Callable[[], Sequence[Buffer]]]  # each makes the pieces of one gathered write
    sides: tuple[SidePiece, ...]
    side_state: int
    next_seq: int
    first_ts_us: int
    last_ts_us: int


class RecoveredSegment(NamedTuple):
    """What a full scan of a data file found, and what its files must look like."""

    end: int  # bytes of good data; what follows is cut
    sides: tuple[bytes, ...]  # the exact content each side file must have
    next_seq: int
    first_ts_us: int
    last_ts_us: int
    records: int
    side_state: int  # the codec's own running state for `sides`
    stop: ScanStop
    reason: str
    faults: list[Fault]  # damage that stays in place because good records follow it
    has_unexplained_tail: bool = False  # what follows `end` may be records of another program: cut only on request
    notes: tuple[str, ...] = ()  # what is unusual and harmless


class Salvage(NamedTuple):
    """What can be read of a damaged segment, found by its records alone, and exactly what cannot."""

    rows: Rows
    faults: list[Fault]  # in order; one whose range is empty names bytes that no record needs


class DataSource(Protocol):
    """Bytes of a data file: mapped when sealed, read when growing."""

    @property
    def size(self) -> int: ...
    def fetch(self, lo: int, hi: int) -> Buffer: ...


@dataclass(slots=True)
class SegmentContent:
    """A segment as its codec sees it."""

    base: int
    stop: int  # one past its last seq, as far as the log knows
    data: DataSource
    index: Buffer  # the first side file
    sides: Sequence[Buffer | None]  # all side files; None: not there
    footer: bytes | None = None  # footer; only of sealed segments
    verified_chunks: set[int] = field(default_factory=set)  # chunks already checked against the footer


class Codec(Protocol):
    name: str
    name_format: str  # how a segment's files are called, with room for its base
    data_suffix: str
    name_pattern: Pattern[str]  # its files: the base, then the suffix
    temporary_pattern: Pattern[str]
    first_seq: int
    record_bytes_max: int
    segment_bytes_limit: int  # positions must fit the index
    side_suffixes: tuple[str, ...]
    stale_suffixes: tuple[str, ...] = ()  # sides that this log does not keep up: removed where they would age
    authoritative_sides: frozenset[
        int
    ]  # sides that cannot be derived from the data: synced before an ack, never rebuilt silently
    syncs_data_first: bool  # the data must be durable before a side names it
    latches_on_write_error: bool  # whether EIO on write ends writing until reopened
    verifies_on_open: bool
    supported_columns: frozenset[str]  # which of node, tag and meta the layout can hold
    footer_suffix: str | None  # written when a segment is sealed
    created_suffix: str | None  # written when a segment is born, by layouts whose records carry no time
    writes_index_on_seal: bool = (
        False  # the index of the active segment is written when it is sealed or closed, not before
    )
    index_prealloc_bytes: int  # how far the index file of the active segment is preallocated

    def data_name(self, base: int, /) -> str:
        return f"{self.name_format.format(base)}{self.data_suffix}"

    def side_name(self, base: int, suffix: str, /) -> str:
        return f"{self.name_format.format(base)}{suffix}"

    def is_temporary(self, name: str, /) -> bool:
        """Whether an interrupted rebuild, compaction or save of a segment leaves this name behind."""
        return self.temporary_pattern.fullmatch(name) is not None

    def parse_file_name(self, name: str, /) -> tuple[int, str] | None:
        """Which segment a file belongs to, and as what ("" for data, else its suffix); None: not ours."""
        found = self.name_pattern.fullmatch(name)
        return None if found is None else (int(found[1]), "" if found[2] == self.data_suffix else found[2])

    def detect_layout(self, names: Sequence[str], read: Callable[[str], Buffer | None], /) -> None:
        """Find out which variant of the layout the files in a directory have, before anything is read or changed.

        `read` gives a file's bytes, or None where it is gone. Raises UnknownLayout where no variant explains them.
        """
        return

    def is_foreign(self, suffixes: Collection[str], /) -> bool:
        """Whether a segment that has these files ("" is the data file) was written by another program."""
        return False

    def checksum(self, pieces: Iterable[Buffer], /) -> int:
        """The checksum that a side file keeps of a record, from the record's bytes piece by piece."""
        total = 0
        for piece in pieces:
            total = crc32(piece, total)
        return total

    def count_dead_bytes(self, segment: SegmentContent, /) -> int:
        """Bytes of the data file that belong to no record and are not damage. Skipped by readers, and kept."""
        return 0

    def is_index_usable(self, segment: SegmentContent, /) -> bool:
        """Whether the index of a sealed segment is right, although it is not the one this codec would write."""
        return False

    def initial_side_state(self, base: int, /) -> int:
        """The running state of `sides` for a segment without records."""
        ...

    def encode(self, seq: int, ts_us: int, batch: Batch, /) -> Rows:
        """The bytes to append, as rows over a fresh buffer. Raises a Refused error on what cannot be stored."""
        ...

    def encode_append(
        self, seq: int, ts_us: int, batch: Batch, file_pos: int, base: int, side_state: int, /
    ) -> EncodedAppend:
        """`encode` and `sides` in one step. A codec that can do it with fewer copies does it its own way."""
        return build_append(self, self.encode(seq, ts_us, batch), file_pos, base, side_state)

    def encode_stream_header(self, seq: int, ts_us: int, batch: Batch, size: int, /) -> bytes:
        """The bytes before a streamed record's data once its size is known; `size` -1: a head of the same
        length that no reader takes for a record."""
        ...

    def encode_stream_trailer(self, header: bytes, data: Iterable[Buffer], /) -> bytes:
        """The bytes behind a streamed record's data: its checksum, where the layout has one there."""
        ...

    def encode_sides(
        self, rows: Rows, file_pos: int, base: int, side_state: int, crcs: Ints | None = None, /
    ) -> tuple[tuple[bytes, ...], int]:
        """What to append to each side file for rows whose buffer starts at `shift` in the data file. With `crcs`,
        the CRC-32 of each record's bytes, the buffer need not hold more than the records' heads."""
        ...

    def fill_holes(self, sides: tuple[bytes, ...], base: int, stop: int, size: int, /) -> tuple[bytes, ...]:
        """Side files of a compacted segment, with holes up to `stop` where the index is dense."""
        ...

    def truncate_sides(self, sides: list[bytes | None], base: int, seq: int, /) -> list[bytes | None]:
        """Side files without what they say of `seq` and behind, where that does not follow from the data."""
        return sides

    def recover(self, data: Buffer, sides: Sequence[bytes | None], base: int, /) -> RecoveredSegment: ...

    def salvage(self, data: Buffer, sides: Sequence[Buffer | None], base: int, stop: int, /) -> Salvage:
        """Every record of [base, stop) whose bytes hold, read without the help of a derivable index. A damaged record
        is stepped over by its length, or, where that is damaged too, by looking for the next good one."""
        ...

    def end_seq(self, segment: SegmentContent, /) -> int:
        """One past the last seq that the files of a sealed segment know of."""
        ...

    def check_sealed(self, segment: SegmentContent, /) -> tuple[str | None, Fault | None]:
        """A cheap look at a sealed segment: what is wrong with its index, what is wrong with its tail."""
        ...

    def read(self, segment: SegmentContent, first: int, stop: int, bytes_max: int, /) -> Chunk:
        """Records of [first, stop), about `bytes_max` of data but at least one record where there is one."""
        ...

    def find_split(self, segment: SegmentContent, seq: int, /) -> tuple[int, Rows | None]:
        """The byte where records at or behind `seq` begin; and, where a frame holds records on both sides of
        it, the frame's start and those records of it that come before `seq`."""
        ...

    def build_footer(self, segment: SegmentContent, /) -> bytes | None:
        """The extra file of a segment that is being sealed."""
        ...

    def time_range(self, segment: SegmentContent, /) -> tuple[int, int] | None:
        """First and last record time; None: the layout keeps none, or there is no record."""
        ...


def build_append(
    codec: Codec, rows: Rows, file_pos: int, base: int, side_state: int, crcs: Ints | None = None
) -> EncodedAppend:
    """Rows that are encoded already, or whose bytes are staged already (`crcs`), as something to place."""
    sides, side_state = codec.encode_sides(rows, file_pos, base, side_state, crcs)
    return EncodedAppend(
        [lambda: [rows.buf]], sides, side_state, int(rows.seq[-1]) + 1, int(rows.ts_us[0]), int(rows.ts_us[-1])
    )


def recovered_from_scan(scan: ScanResult, base: int, sides: tuple[bytes, ...], side_state: int) -> RecoveredSegment:
    """What a walk over a whole data file found, for layouts whose records say all there is to say."""
    rows = scan.rows
    times = (int(rows.ts_us[0]), int(rows.ts_us.max())) if len(rows) else (0, 0)
    next_seq = int(rows.seq[-1]) + 1 if len(rows) else base
    return RecoveredSegment(scan.end, sides, next_seq, *times, len(rows), side_state, scan.stop, scan.reason, [])


def salvage_records(
    buf: Buffer,
    base: int,
    stop: int,
    scan: Callable[[int, int], ScanResult],
    find_next: Callable[[int, int], int],
    *,
    seqs_are_known: bool = True,
) -> Salvage:
    """`Codec.salvage` for layouts whose records say what they are. `walk(pos, above)` gives the good records from a
    byte on; `resync(pos, above)` the byte where reading may go on after a bad one, or the end. Not `sure`: a record
    has no checksum, so where two of them contradict each other in order the first one is as doubtful as the second."""
    size, pos, last = len(buf), 0, base - 1
    parts: list[Rows] = []
    faults: list[Fault] = []
    bad: tuple[int, str] | None = None  # where the damage began that no good record follows yet
    while pos < size:
        found = scan(pos, last)
        rows = found.rows.between(base, stop)
        if len(rows) < len(found.rows):
            outside = int(found.rows.frame_pos[len(rows)])
            found = ScanResult(rows, outside, ScanStop.BAD, "its number lies outside its segment")
        if len(rows):
            if bad is not None:
                faults.append(_fault_between(last, int(rows.seq[0]), bad, base=base, seqs_are_known=seqs_are_known))
                bad = None
            parts.append(rows)
            last = int(rows.seq[-1])
        if found.end >= size and found.stop is ScanStop.END:
            break
        bad = bad or (found.end, found.reason or "bytes that are no record")
        pos = find_next(found.end, last)
        assert pos > found.end, "a search moves on"
    if bad is not None:
        faults.append(_fault_between(last, max(stop, last + 1), bad, base=base, seqs_are_known=seqs_are_known))
    return Salvage(concat_rows(buf, parts), faults)


def _fault_between(last: int, resume: int, bad: tuple[int, str], *, base: int, seqs_are_known: bool) -> Fault:
    seq = last + 1
    return Fault(seq if seqs_are_known or seq < resume else max(last, base), resume, *bad)


def encodable_runs(rows: Rows) -> list[tuple[int, int]]:
    """Stretches of rows with consecutive seqs and one time: what one `encode` call can write."""
    if not len(rows):
        return []
    breaks = np.flatnonzero((np.diff(rows.seq) != 1) | (np.diff(rows.ts_us) != 0)) + 1
    edges = [0, *breaks.tolist(), len(rows)]
    return list(pairwise(edges))


def reencode(codec: Codec, rows: Rows) -> Rows:
    """The same records in this codec's layout, seqs and times kept.

    Raises BadInput where a record carries something that the layout has no room for.
    """
    parts = []
    for lo, hi in encodable_runs(rows):
        part = rows.slice(lo, hi)
        columns = (b"" if span is None else copy_values(part.buf, span) for span in (part.node, part.tag, part.meta))
        batch = Batch(copy_values(part.buf, part.data), *columns)
        parts.append(codec.encode(int(part.seq[0]), int(part.ts_us[0]), batch))
    return concat_buffers(parts)


def concat_buffers(parts: Sequence[Rows]) -> Rows:
    """Rows of several buffers as rows of one: the buffers are joined, the positions shifted."""
    if len(parts) == 1:
        return parts[0]
    shifts = [0, *accumulate(len(part.buf) for part in parts)][: len(parts)]
    return concat_rows(b"".join(part.buf for part in parts), parts, shifts)
