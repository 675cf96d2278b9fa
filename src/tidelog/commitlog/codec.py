"""The interface of a codec: file names, record bytes, index bytes, and how to read them back.

    a segment on disk                     written                      durable before an ack
    data file                             first                        always
    side files (index, checksums)         after the data they describe those in `authoritative_sides`
    footer, `.created`                    when sealed / when created   before the next segment exists

The log owns order, syncs, roll-over, recovery and removal and knows no layout; a codec owns one layout and does no
I/O. It reads a data file through a `DataSource`, so the same code reads a mapped sealed segment and a growing one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from re import Pattern
from typing import Any, Final, NamedTuple, Protocol, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from tidelog.errors import BadInput, TooLarge
from tidelog.formats import batch, segment_index
from tidelog.formats.frame import U32_MAX
from tidelog.formats.rows import Rows, ScanResult, ScanStop, concat_rows, copy_values
from tidelog.types import Buffer, Ints


@dataclass(frozen=True)
class Batch:
    """The columns of an append. A bytes value is common to all records, a list has one value each."""

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
        """The length of each record's data, computed once."""
        lengths, _ = batch.value_lengths(self.datas)
        if isinstance(lengths, list):
            raise TooLarge("a record", size=max(lengths), limit=U32_MAX)
        return np.asarray(lengths, "<u4")

    def slice(self, lo: int, hi: int) -> Batch:
        columns = (c if isinstance(c, bytes) else c[lo:hi] for c in (self.node, self.tag, self.meta))
        return Batch(self.datas[lo:hi], *columns)


OPTIONAL_COLUMNS: Final = ("node", "tag", "meta")
_SEQ_MAX: Final = (1 << 63) - 1  # seqs are int64


def check_columns_supported(batch: Batch, codec: str, *unsupported: str) -> None:
    """Raise when a batch has values in columns that this layout cannot store."""
    for name in unsupported:
        column = getattr(batch, name)
        if column if isinstance(column, bytes) else any(column):
            raise BadInput(f"the {codec} layout cannot store a {name}; nothing was written, use the tide codec")


class Fault(NamedTuple):
    """Records that cannot be read, and where reading continues."""

    seq: int  # first affected seq
    resume: int  # first seq after the damage
    pos: int  # byte in the data file
    reason: str

    @property
    def seqs_text(self) -> str:
        """The seqs as text for a message; empty where no record is affected."""
        return f", seqs {self.seq} to {self.resume - 1}" if self.resume > self.seq else ""


class Chunk(NamedTuple):
    """One read: rows in order, the seq of the next read, and the fault that stopped it early."""

    rows: Rows
    next_seq: int
    fault: Fault | None = None


SidePiece: TypeAlias = bytes | segment_index.EntryRun  # of a side file


class EncodedAppend(NamedTuple):
    """Encoded records: the bytes to append to the data file and to each side file."""

    writes: Sequence[Callable[[], Sequence[Buffer]]]  # each returns the pieces of one gathered write
    sides: tuple[SidePiece, ...]
    side_state: int
    next_seq: int
    first_ts_us: int
    last_ts_us: int


class RecoveredSegment(NamedTuple):
    """The result of a full scan of a data file, and the side files that belong to it."""

    end: int  # bytes of good data; the rest is cut
    sides: tuple[bytes, ...]  # the exact content each side file must have
    next_seq: int
    first_ts_us: int
    last_ts_us: int
    records: int
    side_state: int  # the codec's running state for `encode_sides`
    stop: ScanStop
    reason: str
    faults: list[Fault]  # damage that stays in place because good records follow it
    has_unexplained_tail: bool = False  # bytes after `end` may be records of another program: cut only on request
    notes: tuple[str, ...] = ()  # unusual and harmless


class Salvage(NamedTuple):
    """The readable records of a damaged segment, found without its index, and the faults between them."""

    rows: Rows
    faults: list[Fault]  # in order; an empty range names bytes that belong to no record


class DataSource(Protocol):
    """Bytes of a data file: mapped when sealed, read when growing."""

    @property
    def size(self) -> int: ...
    def fetch(self, lo: int, hi: int) -> Buffer: ...


@dataclass(slots=True)
class SegmentContent:
    """A segment as its codec reads it."""

    base: int
    stop: int  # one past its last seq, as far as the log knows
    data: DataSource
    index: Buffer  # the first side file
    sides: Sequence[Buffer | None]  # all side files; None: missing
    footer: bytes | None = None  # only of sealed segments
    verified_chunks: set[int] = field(default_factory=set)  # chunks already checked against the footer


class Codec(Protocol):
    name: str
    name_format: str  # file name without suffix, with a placeholder for the base
    data_suffix: str
    name_pattern: Pattern[str]  # its files: the base, then the suffix
    temporary_pattern: Pattern[str]
    first_seq: int
    record_bytes_max: int
    segment_bytes_limit: int  # positions must fit the index
    side_suffixes: tuple[str, ...]
    stale_suffixes: tuple[str, ...] = ()  # sides that this log does not write: removed when the segment grows
    authoritative_sides: frozenset[int]  # cannot be derived from the data: synced before an ack, never rebuilt silently
    syncs_data_first: bool  # the data must be durable before a side describes it
    latches_on_write_error: bool  # whether EIO on write ends writing until reopened
    verifies_on_open: bool
    supported_columns: frozenset[str]  # which of node, tag and meta the layout can store
    footer_suffix: str | None = None  # written when a segment is sealed
    created_suffix: str | None = None  # written when a segment is created, by layouts whose records have no time
    writes_index_on_seal: bool = False  # the index of the active segment is written at seal or close, not before
    index_prealloc_bytes: int = 0  # preallocated size of the active segment's index file

    def data_name(self, base: int, /) -> str:
        return f"{self.name_format.format(base)}{self.data_suffix}"

    def side_name(self, base: int, suffix: str, /) -> str:
        return f"{self.name_format.format(base)}{suffix}"

    def is_temporary(self, name: str, /) -> bool:
        """Whether this is the name of a temporary file of an interrupted rebuild, compaction or save."""
        return self.temporary_pattern.fullmatch(name) is not None

    def parse_file_name(self, name: str, /) -> tuple[int, str] | None:
        """Return the base of a file's segment and its suffix ("" for data); None for other files."""
        match = self.name_pattern.fullmatch(name)
        if match is None or int(match[1]) > _SEQ_MAX:
            return None
        return int(match[1]), "" if match[2] == self.data_suffix else match[2]

    def detect_layout(self, names: Sequence[str], read: Callable[[str], Buffer | None], /) -> None:
        """Detect the variant of the layout from the files of a directory, before anything is read or changed.

        `read` returns a file's bytes, or None where it is missing. Raises UnknownLayout where no variant matches.
        """
        return

    def variant_settings(self) -> dict[str, Any]:
        """Return the settings with which a new log has the same variant of the layout."""
        return {}

    def layout_notes(self) -> list[str]:
        """Return what a verification of this variant cannot do."""
        return []

    def is_foreign(self, suffixes: Collection[str], /) -> bool:
        """Whether a segment that has these files ("" is the data file) was written by another program."""
        return False

    def checksum(self, pieces: Iterable[Buffer], /) -> int:
        """Return the checksum of a record for its side file, from the pieces of its bytes."""
        total = 0
        for piece in pieces:
            total = crc32(piece, total)
        return total

    def count_dead_bytes(self, segment: SegmentContent, /) -> int:
        """Count the bytes of the data file that belong to no record and are not damage. Readers skip them."""
        return 0

    def is_index_usable(self, segment: SegmentContent, /) -> bool:
        """Whether the index of a sealed segment is valid, although this codec would write another one."""
        return False

    def initial_side_state(self, base: int, /) -> int:
        """Return the running state of `encode_sides` for a segment without records."""
        ...

    def encode(self, seq: int, ts_us: int, batch: Batch, /) -> Rows:
        """Encode a batch as rows over a new buffer. Raises a Refused error on values that cannot be stored."""
        ...

    def encode_append(
        self, seq: int, ts_us: int, batch: Batch, file_pos: int, base: int, side_state: int, /
    ) -> EncodedAppend:
        """`encode` and `encode_sides` in one step. A codec overrides it to save copies."""
        return build_append(self, self.encode(seq, ts_us, batch), file_pos, base, side_state)

    def encode_stream_header(self, seq: int, ts_us: int, batch: Batch, size: int, /) -> bytes:
        """Encode the header of a streamed record of known size; `size` -1: a header of the same length that no reader
        takes for a record."""
        ...

    def encode_stream_trailer(self, header: bytes, data: Iterable[Buffer], /) -> bytes:
        """Encode the bytes after a streamed record's data: its checksum, where the layout has one there."""
        return b""

    def encode_sides(
        self, rows: Rows, file_pos: int, base: int, side_state: int, crcs: Ints | None = None, /
    ) -> tuple[tuple[bytes, ...], int]:
        """Encode the entries of each side file for rows whose buffer starts at `file_pos` in the data file. With
        `crcs`, the checksum of each record's bytes, the buffer needs only the records' headers."""
        ...

    def fill_holes(self, sides: tuple[bytes, ...], base: int, stop: int, size: int, /) -> tuple[bytes, ...]:
        """Add holes up to `stop` to the side files of a compacted segment, where the index is dense."""
        return sides

    def truncate_sides(self, sides: list[bytes | None], base: int, seq: int, /) -> list[bytes | None]:
        """Remove the entries of `seq` and later, where truncating the data does not imply it."""
        return sides

    def recover(self, data: Buffer, sides: Sequence[bytes | None], base: int, /) -> RecoveredSegment:
        """Scan a whole data file up to the first bad record."""
        ...

    def recover_continued(
        self, data: Buffer, sides: Sequence[bytes | None], base: int, start: int, /
    ) -> RecoveredSegment:
        """`recover` a segment that another program has continued: this codec wrote the bytes before `start`, and none
        after them."""
        return self.recover(data, sides, base)

    def salvage(self, data: Buffer, sides: Sequence[Buffer | None], base: int, stop: int, /) -> Salvage:
        """Read every good record of [base, stop) without a derived index. A damaged record is skipped by its length,
        or, where that is damaged too, by a search for the next good one."""
        ...

    def end_seq(self, segment: SegmentContent, /) -> int:
        """Return one past the last seq in the files of a sealed segment."""
        ...

    def check_sealed(self, segment: SegmentContent, /) -> tuple[str | None, Fault | None]:
        """Check a sealed segment cheaply; return the fault of its index and the fault of its last records."""
        ...

    def read(self, segment: SegmentContent, first: int, stop: int, bytes_max: int, /) -> Chunk:
        """Read records of [first, stop): about `bytes_max` of data, at least one record where there is one."""
        ...

    def find_split(self, segment: SegmentContent, seq: int, /) -> tuple[int, Rows | None]:
        """Return the byte where records from `seq` on begin. Where a frame has records on both sides of `seq`, return
        the frame's start and its records before `seq`."""
        ...

    def build_footer(self, segment: SegmentContent, /) -> bytes | None:
        """Build the footer of a segment that is being sealed."""
        return None

    def time_range(self, segment: SegmentContent, /) -> tuple[int, int] | None:
        """Return the first and last record time; None where the layout stores none, or there is no record."""
        return None


def iter_chunks(read: Callable[[int, int, int], Chunk], first: int, stop: int, bytes_max: int) -> Iterator[Chunk]:
    """Call `read(seq, stop, bytes_max)` until all of [first, stop) is read. After a fault reading continues at its
    `resume`."""
    seq = first
    while seq < stop:
        chunk = read(seq, stop, bytes_max)
        yield chunk
        assert chunk.fault is not None or chunk.next_seq > seq, "a read makes progress"
        seq = chunk.next_seq if chunk.fault is None else max(chunk.fault.resume, seq + 1)


def build_append(
    codec: Codec, rows: Rows, file_pos: int, base: int, side_state: int, crcs: Ints | None = None
) -> EncodedAppend:
    """Build the append of rows that are encoded, or whose bytes are staged (`crcs`), already."""
    sides, side_state = codec.encode_sides(rows, file_pos, base, side_state, crcs)
    return EncodedAppend(
        [lambda: [rows.buf]], sides, side_state, int(rows.seq[-1]) + 1, int(rows.ts_us[0]), int(rows.ts_us[-1])
    )


def recovered_from_scan(scan: ScanResult, base: int, sides: tuple[bytes, ...], side_state: int) -> RecoveredSegment:
    """Build the result of `Codec.recover` from a scan, for layouts whose records are self-contained."""
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
    """`Codec.salvage` for layouts with self-contained records. `scan(pos, above)` returns the good records from a byte
    on; `find_next(pos, above)` the byte where reading continues after a bad one, or the end. Without `seqs_are_known`
    records have no checksum: where two contradict each other in order, the first is as doubtful as the second."""
    size, pos, last = len(buf), 0, base - 1
    parts: list[Rows] = []
    faults: list[Fault] = []
    bad: tuple[int, str] | None = None  # start of the damage that no good record follows yet
    while pos < size:
        result = scan(pos, last)
        rows = result.rows.between(base, stop)
        if len(rows) < len(result.rows):
            outside = int(result.rows.frame_pos[len(rows)])
            result = ScanResult(rows, outside, ScanStop.BAD, "its seq is outside its segment")
        if len(rows):
            if bad is not None:
                faults.append(_fault_between(last, int(rows.seq[0]), bad, base=base, seqs_are_known=seqs_are_known))
                bad = None
            parts.append(rows)
            last = int(rows.seq[-1])
        if result.end >= size and result.stop is ScanStop.END:
            break
        bad = bad or (result.end, result.reason or "bytes that are no record")
        pos = find_next(result.end, last)
        assert pos > result.end, "a search makes progress"
    if bad is not None:
        faults.append(_fault_between(last, max(stop, last + 1), bad, base=base, seqs_are_known=seqs_are_known))
    return Salvage(concat_rows(buf, parts), faults)


def _fault_between(last: int, resume: int, bad: tuple[int, str], *, base: int, seqs_are_known: bool) -> Fault:
    seq = last + 1
    return Fault(seq if seqs_are_known or seq < resume else max(last, base), resume, *bad)


def encodable_runs(rows: Rows) -> list[tuple[int, int]]:
    """Return the ranges of rows with consecutive seqs and one time: one `encode` call can write each."""
    if not len(rows):
        return []
    breaks = np.flatnonzero((np.diff(rows.seq) != 1) | (np.diff(rows.ts_us) != 0)) + 1
    edges = [0, *breaks.tolist(), len(rows)]
    return list(pairwise(edges))


def reencode(codec: Codec, rows: Rows) -> Rows:
    """Encode the same records in this codec's layout, with their seqs and times.

    Raises BadInput where a record has a column that the layout cannot store.
    """
    parts = []
    for lo, hi in encodable_runs(rows):
        part = rows.slice(lo, hi)
        columns = (b"" if span is None else copy_values(part.buf, span) for span in (part.node, part.tag, part.meta))
        batch = Batch(copy_values(part.buf, part.data), *columns)
        parts.append(codec.encode(int(part.seq[0]), int(part.ts_us[0]), batch))
    return concat_buffers(parts)


def concat_buffers(parts: Sequence[Rows]) -> Rows:
    """Join rows of several buffers into rows of one buffer."""
    if len(parts) == 1:
        return parts[0]
    shifts = [0, *accumulate(len(part.buf) for part in parts)][: len(parts)]
    return concat_rows(b"".join(part.buf for part in parts), parts, shifts)
