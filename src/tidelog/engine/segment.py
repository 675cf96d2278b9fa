"""Segments on disk, and what they share with memtables as the parts of a topic, ordered by seq.

    seg 1..10000 sealed │ seg 10001..14200 on disk │ memtable 14201..14950 │
                        └──────────── one segment, still growing ─────────┘

Both kinds of part (`Part`) have the same interface: their seqs, which of them are deleted, their index, and the
records of a range as columns. Neither keeps a Python object per record. Memtables are in `memtable`.
"""

from __future__ import annotations

import errno
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tidelog.commitlog.codec import Chunk, Fault, SegmentContent
from tidelog.commitlog.codecs.tide import TideCodec
from tidelog.commitlog.segment import LruCache, MmapReader, map_file
from tidelog.config import LogConfig
from tidelog.disk.durability import read_file
from tidelog.disk.interface import Disk, join
from tidelog.disk.process import is_resident
from tidelog.engine.cold_reader import ColdFile, ColdReader
from tidelog.engine.manifest import ColdRow, SegmentRow
from tidelog.errors import Corrupt, Damaged, NewerFormat, Unavailable
from tidelog.formats import frame, scan, sealed_segment, segment_index
from tidelog.formats.rows import empty_rows
from tidelog.formats.sealed_segment import DeletionVector
from tidelog.types import Buffer, Ints

if TYPE_CHECKING:
    from tidelog.engine.memtable import MemTable

CODEC: Final = TideCodec(LogConfig())
Tier: TypeAlias = Literal["hot", "cold", "both"]  # both: copied to the cold tier, and the file is not removed yet
T = TypeVar("T")
SEGMENT_SUFFIXES: Final = (".data", ".idx", ".foot", ".tag", ".key", ".siz", ".del")  # data first
_FILE_NAME_PATTERN: Final = re.compile(
    r"seg-(\d{16,20})(?:\.g([1-9]\d{0,8}))?(\.data|\.idx|\.foot|\.tag|\.key|\.siz|\.del)(\.tmp|\.rebuilding)?"
)
_NO_DESCRIPTORS: Final = frozenset((errno.EMFILE, errno.ENFILE))


class SegmentFileName(NamedTuple):
    """The parts of a segment file's name."""

    base: int
    generation: int
    suffix: str
    is_temporary: bool


def format_file_name(base: int, generation: int, suffix: str) -> str:
    """Return the name of a segment file. Generation 0 is not in the name."""
    return f"{CODEC.name_format.format(base)}{f'.g{generation}' if generation else ''}{suffix}"


def parse_file_name(name: str) -> SegmentFileName | None:
    """Return the parts of a segment file's name; None if it is the name of another file."""
    match = _FILE_NAME_PATTERN.fullmatch(name)
    return match and SegmentFileName(int(match[1]), int(match[2] or 0), match[3], match[4] is not None)


class MmapCache:
    """Mapped files of all topics, bounded by their number: descriptors and address space, not memory."""

    def __init__(self, capacity: int) -> None:
        self._mapped: LruCache[tuple[MmapReader, Buffer]] = LruCache(capacity)
        self._lock = Lock()

    def get(self, key: int, load: Callable[[], tuple[MmapReader, Buffer]]) -> tuple[MmapReader, Buffer]:
        with self._lock:
            return self._mapped.get(key, load)

    def get_mapped(self, key: int) -> tuple[MmapReader, Buffer] | None:
        """Return the mapping if it is cached; it counts as used."""
        with self._lock:
            return self._mapped.find(key)

    def drop(self, key: int) -> None:
        with self._lock:
            self._mapped.drop(key)

    def clear(self) -> None:
        with self._lock:
            self._mapped.clear()

    def clear_without_lock(self) -> None:
        """`clear` in a forked child, where a thread of the parent may hold the lock."""
        self._mapped.clear()


class RemoteFile(MmapReader):
    """A data file in an object store: each access fetches its bytes."""

    is_remote = True

    def __init__(self, fetch: Callable[[int, int], bytes], size: int) -> None:
        super().__init__(memoryview(b""))
        self._read_range, self.size = fetch, size

    def fetch(self, lo: int, hi: int) -> memoryview:
        lo, hi = max(lo, 0), min(hi, self.size)
        return memoryview(self._read_range(lo, hi) if lo < hi else b"")


def _read_range(lo: int, hi: int, disk: Disk, path: str) -> bytes:
    file = disk.open(path)
    try:
        return file.read(lo, hi - lo)
    finally:
        file.close()


class SegmentFiles:
    """Paths and mappings of the segment files of one topic. A rewrite gives a segment files of a new generation beside
    the old ones, so every file is named by the base and the generation of its segment."""

    def __init__(
        self, disk: Disk, directory: str, topic_id: int, maps: MmapCache, cold: ColdReader | None = None
    ) -> None:
        """`cold` reads segments of the cold tier."""
        self.disk, self.directory, self.topic_id, self._maps = disk, directory, topic_id, maps
        self.cold = cold or ColdReader(None, 0)

    def path(self, base: int, generation: int, suffix: str) -> str:
        return join(self.directory, format_file_name(base, generation, suffix))

    def open(self, base: int, generation: int, cold: ColdRow | None = None, size: int = 0) -> tuple[MmapReader, Buffer]:
        """Return the mapped data and index of a segment; a missing file reads as an empty one. A segment with an object
        in the cold tier (`cold`) and `size` bytes of data is read from there once its file is gone."""
        return self._maps.get(self._key(base, generation), lambda: self._open(base, generation, cold, size))

    def is_mapped(self, base: int, generation: int) -> bool:
        """Whether `open` needs no disk access."""
        return self.get_mapped(base, generation) is not None

    def get_mapped(self, base: int, generation: int) -> tuple[MmapReader, Buffer] | None:
        """`open`, if it needs no disk access."""
        return self._maps.get_mapped(self._key(base, generation))

    def _open(self, base: int, generation: int, cold: ColdRow | None, size: int) -> tuple[MmapReader, Buffer]:
        index = self._read_or_raise(self.path(base, generation, ".idx"), map_file) or b""
        path = self.path(base, generation, ".data")
        if getattr(self.disk, "fetches", False):  # fetch byte ranges instead of mapping the file
            stat = self.disk.stat(path)
            if stat is None and cold is not None and cold.key:
                return ColdFile(self.cold, cold, size), index
            return RemoteFile(
                lambda lo, hi: self._read_or_raise(path, partial(_read_range, lo, hi)), stat.size if stat else 0
            ), index
        data = self._read_or_raise(path, map_file)
        if cold is not None and cold.key and len(data or b"") < size:
            return ColdFile(self.cold, cold, size), index
        return MmapReader(data or memoryview(b"")), index

    def read_range(self, base: int, generation: int, suffix: str, lo: int, hi: int) -> bytes:
        """Read bytes [lo, hi) of a file beside the data."""
        return self._read_or_raise(self.path(base, generation, suffix), partial(_read_range, lo, hi))

    def read_side_file(self, base: int, generation: int, suffix: str) -> bytes | None:
        """Read a small file beside the data; None if there is none."""
        return self._read_or_raise(self.path(base, generation, suffix), read_file)

    def _read_or_raise(self, path: str, read: Callable[[Disk, str], T]) -> T:
        try:
            return read(self.disk, path)
        except OSError as error:
            step = "close some files and retry" if error.errno in _NO_DESCRIPTORS else "repair the disk and retry"
            kind = Unavailable if error.errno in _NO_DESCRIPTORS else Damaged
            raise kind(f"{path} cannot be read: {error}; nothing was changed, {step}") from error

    def truncate(self, base: int, generation: int, data_bytes: int, records: int, *, sync: bool) -> None:
        """Truncate data and index of a segment to these lengths if they are longer."""
        for suffix, size in ((".data", data_bytes), (".idx", records * segment_index.ENTRY_BYTES)):
            path = self.path(base, generation, suffix)
            stat = self.disk.stat(path)
            if stat is None or stat.size <= size:
                continue
            file = self.disk.open(path, "write")
            try:
                file.truncate(size)
                if sync:
                    file.sync()
            finally:
                file.close()

    def unmap(self, base: int, generation: int) -> None:
        self._maps.drop(self._key(base, generation))

    def _key(self, base: int, generation: int) -> int:
        return (self.topic_id << 32 | generation) << 64 | base


def _required(row: ColdRow | None) -> ColdRow:
    assert row is not None, "checked by the caller"
    return row


BoolArray = NDArray[np.bool_]
_BITMAP_MIN: Final = 1024


class DeletionBitmap:
    """Deleted records of a part: flags set in place, in a buffer that doubles.

        buffer │ 1 1 0 1 0 0 0 … │ 0 0 0 0 0 0 0 0 │       readers get a view of the first `size` flags
               └ records of the part ┘└ later ones ┘

    A queue deletes one job at a time; copying the flags of the whole segment for each would cost more than the rest of
    an ack. So a view is valid under the topic's lock only; take a copy to keep it.
    """

    __slots__ = ("_flags",)

    def __init__(self, flags: BoolArray | None = None) -> None:
        self._flags: BoolArray = np.zeros(_BITMAP_MIN, bool) if flags is None else flags

    def view(self, size: int) -> BoolArray:
        """Return the first `size` flags; unset ones are not deleted."""
        if size > len(self._flags):
            self._grow(size)
        return self._flags[:size]

    def set(self, index: int) -> bool:
        """Set one flag; False if it was set before."""
        if index >= len(self._flags):
            self._grow(index + 1)
        if self._flags[index]:
            return False
        self._flags[index] = True
        return True

    def has(self, index: int) -> bool:
        return index < len(self._flags) and bool(self._flags[index])

    def set_many(self, which: Ints) -> None:
        last = int(which.max()) if len(which) else -1
        if last >= len(self._flags):
            self._grow(last + 1)
        self._flags[which] = True

    def _grow(self, size: int) -> None:
        flags = np.zeros(max(2 * size, _BITMAP_MIN), bool)
        flags[: len(self._flags)] = self._flags
        self._flags = flags


INDEXED_FRAMES_MAX: Final = 128  # 2 KB a segment
PAGE_FRAMES_MAX: Final = 16  # of a page that is encoded directly from its batches


class FrameOffsets:
    """Where the frames of a sealed segment begin, if all records are plain JSON data in few frames.

        seqs    1      1001     2001   …        first seq of each frame
        pos     0      104 062  208 124 …  end  its first byte

    The index has an entry per record; a page needs two numbers of it. Found once, when the whole index is resident and
    verified, and kept with the segment: a page is then located without the index.
    """

    __slots__ = ("_pos", "_seqs")

    def __init__(self, seqs: list[int], pos: list[int]) -> None:
        self._seqs, self._pos = seqs, pos

    def byte_range(self, first: int, stop: int, bytes_max: int) -> tuple[int, int] | None:
        """Return the bytes of the frames of [first, stop); None if there are too many."""
        first_frame, stop_frame = bisect_right(self._seqs, first) - 1, bisect_left(self._seqs, stop)
        low, high = self._pos[first_frame], self._pos[stop_frame]
        return None if stop_frame - first_frame > PAGE_FRAMES_MAX or high - low > bytes_max else (low, high)


def find_frame_offsets(base: int, entries: NDArray[np.void], size: int) -> FrameOffsets | None:
    """Find the frames of a segment that begins with `base`, from its index and the size of its data. None if it has too
    many frames, or one that is not a batch of plain JSON records."""
    offsets = np.ascontiguousarray(entries["frame_offset"])
    starts = np.flatnonzero(offsets[1:] > offsets[:-1]) + 1
    if (
        len(starts) >= INDEXED_FRAMES_MAX
        or not len(offsets)
        or not (entries["flags"] == segment_index.BATCH | segment_index.JSON).all()
    ):
        return None
    return FrameOffsets([base, *(starts + base).tolist()], [int(offsets[0]), *offsets[starts].tolist(), size])


FrameLocations: TypeAlias = list[tuple[Buffer, int]]
"""Buffers of adjacent frames, and where in each the first frame begins."""
RESIDENT_READ_BYTES_MAX = 2 << 20  # copying them takes 0.15 ms if no page is missing
_RESIDENCY_CHUNK_BYTES = 1 << 20  # residency is queried for this many bytes at once
_RESIDENCY_TTL_US = 50_000  # how long the answer is used; a page evicted meanwhile costs a disk read


class SizeCount(NamedTuple):
    """Live records of a range of seqs."""

    records: int
    bytes: int  # of data and meta


class Part(Protocol):
    base: int
    stop: int
    live_records: int
    live_bytes: int
    first_ts: int
    last_ts: int

    def entries(self) -> NDArray[np.void]:
        """The index: one entry per seq."""
        ...

    def deleted_mask(self) -> BoolArray | None:
        """One flag per seq; None: none is deleted. Valid while the topic's lock is held: take a copy to keep it."""
        ...

    def plain_frames(
        self, first: int, stop: int, bytes_max: int, resident_at_us: int | None
    ) -> Callable[[], FrameLocations | None] | None:
        """Return a function that locates the frames of these records, called without the topic's lock, in bytes that
        need no verification. None if one of them was deleted or a scan is better. `resident_at_us`, the current time,
        is given by a caller that must not block: then also None unless the frames are resident."""
        ...

    def mark_deleted(self, which: Ints, weights: Ints | None = None) -> SizeCount:
        """Delete the records at these positions, whose sizes may be given; return what was removed."""
        ...

    def mark_deleted_one(self, at: int) -> int | None:
        """`mark_deleted` of one position: its bytes, or None if it was deleted before."""
        ...

    def reader(self, first: int, stop: int, bytes_max: int) -> Callable[[], Chunk]:
        """Return a function that reads these seqs. Create it under the topic's lock, call it without: a long read
        blocks no writer."""
        ...


def record_sizes(part: Part, lo: int, hi: int) -> Ints:
    """Return the bytes of data and meta of the records at positions [lo, hi)."""
    return record_sizes_reader(part, lo, hi)()


def record_sizes_reader(part: Part, lo: int, hi: int) -> Callable[[], Ints]:
    """Return a function for `record_sizes`. Create it under the topic's lock, call it without: it reads records with
    metas."""
    if isinstance(part, Segment) and (stored := part.stored_sizes()) is not None:
        return lambda: stored[lo:hi]
    entries = part.entries()[lo:hi]
    sizes: Ints = entries["data_len"].astype(np.int64)
    if not (entries["flags"] & segment_index.HAS_META).any():
        return lambda: sizes
    base, read_chunk = part.base, part.reader(part.base + lo, part.base + hi, 1 << 62)

    def read() -> Ints:
        rows = read_chunk().rows
        if rows.meta is not None:
            sizes[rows.seq - base - lo] += rows.meta.size
        return sizes

    return read


def measure_part(part: Part, lo: int, hi: int) -> SizeCount:
    """Return the live records at positions [lo, hi) of a part."""
    if lo >= hi:
        return SizeCount(0, 0)
    if lo == 0 and hi == part.stop - part.base:
        return SizeCount(part.live_records, part.live_bytes)
    sizes, deleted = record_sizes(part, lo, hi), part.deleted_mask()
    if deleted is None:
        return SizeCount(hi - lo, int(sizes.sum()))
    live = ~deleted[lo:hi]
    return SizeCount(int(live.sum()), int(sizes[live].sum()))


def mark_deleted(part: Part, mask: DeletionBitmap, positions: Ints, weights: Ints | None = None) -> SizeCount:
    """Set these positions in the bitmap of a part; return what was removed."""
    new = ~mask.view(part.stop - part.base)[positions]
    added = positions[new]
    if not len(added):
        return SizeCount(0, 0)
    if weights is None:
        lo, hi = int(added.min()), int(added.max()) + 1
        size = int(record_sizes(part, lo, hi)[added - lo].sum())
    else:
        size = int(weights[new].sum())
    mask.set_many(added)
    return SizeCount(len(added), size)


def mark_deleted_one(part: Part, mask: DeletionBitmap, position: int) -> int | None:
    """`mark_deleted` of one position, without arrays: the bytes removed; None if it was deleted before."""
    if mask.has(position):
        return None
    entries = part.entries()
    size = (
        int(record_sizes(part, position, position + 1)[0])
        if entries["flags"][position] & segment_index.HAS_META
        else int(entries["data_len"][position])
    )
    mask.set(position)
    return size


def _locate_frames(shape: SegmentContent, first: int, stop: int, bytes_max: int) -> FrameLocations | None:
    window = CODEC.verified_range(shape, first, stop, bytes_max)
    return None if window is None else [(shape.data.fetch(*window), 0)]


def encode_deletions(base: int, records: int, deleted: BoolArray | None) -> bytes:
    """Encode a `.del` file."""
    vector = DeletionVector(base, records)
    if deleted is not None:
        vector.mark(np.flatnonzero(deleted) + base)
    return sealed_segment.encode_deletion_vector(vector)


class TruncatedView:
    """A mapped data file up to the length in the manifest."""

    def __init__(self, mapped: MmapReader, size: int) -> None:
        self._mapped, self.size = mapped, min(size, mapped.size)

    def fetch(self, lo: int, hi: int) -> Buffer:
        return self._mapped.fetch(lo, min(hi, self.size))


class Segment:
    """A segment on disk; the last one of a topic may still grow, by checkpoints."""

    def __init__(
        self,
        files: SegmentFiles,
        base: int,
        stop: int,
        size: int,
        *,
        live: int = 0,
        live_bytes: int = 0,
        first_ts: int = 0,
        last_ts: int = 0,
        sealed: bool = False,
        unproven: bool = False,
        generation: int = 0,
        removed: int = 0,
        cold: ColdRow | None = None,
    ) -> None:
        self.files, self.base, self.stop, self.size = files, base, stop, size
        self.generation, self.removed = generation, removed
        self.cold = cold  # its object in the cold tier; the data file may still be there, and is read then
        self._stored_sizes: Ints | None = None
        self.live_records, self.live_bytes = live, live_bytes
        self.first_ts, self.last_ts, self.is_sealed = first_ts, last_ts, sealed
        self.lacks_footer = unproven  # sealed without a footer: not all of its frames verified
        self.has_unsaved_deletions = False  # not written to the `.del` file yet
        self._footer_bytes: bytes | None = None
        self._verified_chunks: set[int] = set()
        self._deleted: DeletionBitmap | None = None
        self._deletions_loaded = False  # whether `.del` was read
        self._deleted_min = stop - base - live  # deletions that the `.del` file must have at least
        self._frame_offsets: FrameOffsets | None = None  # of a sealed segment with few frames
        self.has_tags: bool | None = None  # of a sealed segment, once a search has checked
        self._resident_until_us: dict[int, int] = {}  # chunk → time until which it counts as resident
        self._chunk_bytes = 1  # per footer checksum, if `_frame_offsets` is known
        self.rebuilt_index: bytes | None = None  # replaces a damaged or missing index file

    @classmethod
    def from_row(cls, files: SegmentFiles, row: SegmentRow) -> Segment:
        return cls(
            files,
            row.base,
            row.stop,
            row.size,
            live=row.live,
            live_bytes=row.live_bytes,
            first_ts=row.first_ts,
            last_ts=row.last_ts,
            sealed=row.sealed,
            unproven=row.unproven,
            generation=row.generation,
            removed=row.removed,
            cold=row.cold,
        )

    def to_row(self) -> SegmentRow:
        return SegmentRow(
            self.base,
            self.stop,
            self.size,
            self.live_records,
            self.live_bytes,
            self.first_ts,
            self.last_ts,
            self.is_sealed,
            self.lacks_footer,
            self.generation,
            self.removed,
            self.cold,
        )

    @property
    def has_cold_copy(self) -> bool:
        """Whether the cold tier has its data. The file on the disk may be there as well."""
        return self.cold is not None and self.cold.key != ""

    def is_remote(self) -> bool:
        """Whether its data is read from the cold tier, and no longer from the disk."""
        return self.has_cold_copy and self._open()[0].is_remote

    def tier(self) -> Tier:
        """Return where its data is. Reads none."""
        if not self.has_cold_copy:
            return "hot"
        return "cold" if self.is_remote() else "both"

    def _open(self) -> tuple[MmapReader, Buffer]:
        return self.files.open(self.base, self.generation, self.cold, self.size)

    def stored_sizes(self) -> Ints | None:
        """Return the bytes of data and meta of each record, if a file has them: that of a segment whose data may be in
        the cold tier. Reads no data."""
        if not self.has_cold_copy:
            return None
        if self._stored_sizes is None:
            content = self.read_side_file(".siz")
            if content is None:  # no record has a meta
                return None
            count = self.stop - self.base
            self._stored_sizes = sealed_segment.decode_record_sizes(content, self.base, count, self.path(".siz"))
        return self._stored_sizes

    def path(self, suffix: str) -> str:
        """Return the path of one of its files."""
        return self.files.path(self.base, self.generation, suffix)

    def read_side_file(self, suffix: str) -> bytes | None:
        """Read a small file beside its data; None if there is none."""
        return self.files.read_side_file(self.base, self.generation, suffix)

    def unmap(self) -> None:
        """Forget the mapping of its files: they have changed."""
        self.files.unmap(self.base, self.generation)

    def shape(self) -> SegmentContent:
        data, index = self._open()
        if self.rebuilt_index is not None:
            index = self.rebuilt_index
        if self.is_sealed and self._footer_bytes is None and not self.lacks_footer:
            self._footer_bytes = self.read_side_file(".foot")
        index = memoryview(index)[: (self.stop - self.base) * segment_index.ENTRY_BYTES]
        foot = self._footer_bytes if self.is_sealed else None
        # What comes from a store is verified with every read: it may not be what came before.
        verified = self._verified_chunks & {CODEC.INDEX_VERIFIED} if data.is_remote else self._verified_chunks
        return SegmentContent(self.base, self.stop, TruncatedView(data, self.size), index, [index], foot, verified)

    def read_footer(self) -> bytes | None:
        """Return the bytes of its footer, if it is sealed and has a valid one."""
        content = self.shape().footer
        if content is None:
            return None
        try:
            sealed_segment.decode_footer(content)
        except (Corrupt, NewerFormat):
            return None
        return bytes(content)

    @property
    def is_index_verified(self) -> bool:
        """Whether its index matches the footer."""
        return self.is_sealed and CODEC.INDEX_VERIFIED in self._verified_chunks

    def skip_verification(self) -> None:
        """Trust its sealed bytes without checksums, for a reader that asks for that."""
        foot = self.read_side_file(".foot") if self.is_sealed else None
        if foot is not None:
            self._verified_chunks |= {CODEC.INDEX_VERIFIED, *range(len(sealed_segment.decode_footer(foot).chunks))}

    def rebuild_index(self) -> bool:
        """Rebuild the index from the data, in memory; False if the data is incomplete."""
        data, _ = self._open()
        scanned = scan.scan_records(data.fetch(0, min(self.size, data.size)), above=self.base - 1)
        if scanned.end != self.size or len(scanned.rows) != self.stop - self.base:
            return False
        self.rebuilt_index = segment_index.build_entries(scanned.rows, self.base, self.stop, self.size).tobytes()
        return True

    def entries(self) -> NDArray[np.void]:
        shape = self.shape()
        if self.has_cold_copy and self.rebuilt_index is None and not self.is_index_verified:
            self._verify_index(shape)
            shape = self.shape()
        entries = CODEC.read_index(shape)
        if len(entries) < self.stop - self.base:
            path = self.path(".idx")
            raise Corrupt(
                path, pos=len(entries) * segment_index.ENTRY_BYTES, reason="the index is shorter than its segment"
            )
        return entries

    def _verify_index(self, shape: SegmentContent) -> None:
        """Verify the index of a segment in the cold tier against its footer: it cannot be rebuilt without a read of the
        store, for which the caller may not wait. Raises Corrupt."""
        if shape.footer is None:
            return
        fault = sealed_segment.find_index_fault(sealed_segment.decode_footer(shape.footer), shape.index)
        if fault is not None:
            raise Corrupt(self.path(".idx"), pos=0, reason=fault, next_step="`tidelog tier recall` rebuilds it")
        self._verified_chunks.add(CODEC.INDEX_VERIFIED)

    def recount_live(self) -> None:
        """Count live records if there are deletions: the `.del` file may be newer than the manifest."""
        deleted = self.deleted_mask()
        if deleted is not None:
            live, size = ~deleted, record_sizes(self, 0, self.stop - self.base)
            self.live_records, self.live_bytes = int(live.sum()), int(size[live].sum())

    def deleted_mask(self) -> BoolArray | None:
        if not self._deletions_loaded:
            path = self.path(".del")
            content = self.read_side_file(".del")
            count, mask, deleted_count = self.stop - self.base, None, 0
            if content is not None:
                mask = DeletionBitmap()
                vector = sealed_segment.decode_deletion_vector(content, path)
                positions = vector.seqs() - self.base
                mask.set_many(positions[positions < count])
                deleted_count = int(mask.view(count).sum())
                # Written by an unfinished checkpoint: flags of seqs that this segment does not have yet must not
                # apply to them later.
                self.has_unsaved_deletions |= vector.size > count
            if deleted_count < self._deleted_min:
                # Records missing from the file would become visible again.
                raise Corrupt(path, pos=0, reason=f"{self._deleted_min} records were deleted, it names {deleted_count}")
            self._deleted, self._deletions_loaded = mask, True
        return None if self._deleted is None else self._deleted.view(self.stop - self.base)

    def set_deleted(self, deleted: BoolArray | None) -> None:
        """Replace the deletions, whatever the file says."""
        self._deleted, self._deletions_loaded, self.has_unsaved_deletions = (
            None if deleted is None else DeletionBitmap(deleted),
            True,
            deleted is not None,
        )

    def _bitmap(self) -> DeletionBitmap:
        """Return the bitmap to set deletions in."""
        if self.deleted_mask() is None:
            self._deleted = DeletionBitmap()
        assert self._deleted is not None, "set above"
        return self._deleted

    def mark_deleted(self, positions: Ints, weights: Ints | None = None) -> SizeCount:
        removed = mark_deleted(self, self._bitmap(), positions, weights)
        self._subtract_live(*removed)
        return removed

    def mark_deleted_one(self, position: int) -> int | None:
        size = mark_deleted_one(self, self._bitmap(), position)
        if size is not None:
            self._subtract_live(1, size)
        return size

    def _subtract_live(self, records: int, size: int) -> None:
        self.live_records, self.live_bytes = self.live_records - records, self.live_bytes - size
        self.has_unsaved_deletions |= records > 0

    def encode_deletions(self) -> bytes:
        """Encode the content of its `.del` file."""
        return encode_deletions(self.base, self.stop - self.base, self.deleted_mask())

    def absorb(self, memtable: MemTable) -> None:
        """Take over a memtable whose records the files have now."""
        assert (memtable.base, memtable.origin) == (self.stop, self.size), "a memtable continues its segment"
        self.deleted_mask()  # load the file before it refers to new seqs
        deleted = memtable.deleted_mask()
        if deleted is not None:
            self._bitmap().set_many(np.flatnonzero(deleted) + self.stop - self.base)
            self.has_unsaved_deletions = True
        self.live_records, self.live_bytes = (
            self.live_records + memtable.live_records,
            self.live_bytes + memtable.live_bytes,
        )
        self.stop, self.size, self.last_ts = memtable.stop, self.size + memtable.size, memtable.last_ts
        self.unmap()

    def is_resident(self, first: int, stop: int, bytes_max: int) -> bool:
        """Whether these seqs can be read without blocking: sealed, mapped, verified, none deleted, small, and in memory
        now."""
        files, entries_bytes = self.files, (self.stop - self.base) * segment_index.ENTRY_BYTES
        is_loaded = (
            self.is_sealed and self._deletions_loaded and self._footer_bytes is not None and self.rebuilt_index is None
        )
        is_dense = self.live_records == self.stop - self.base
        if (
            not is_loaded
            or not is_dense
            or entries_bytes > RESIDENT_READ_BYTES_MAX
            or not files.is_mapped(self.base, self.generation)
        ):
            return False
        shape = self.shape()
        if self.is_remote():
            return False
        window = None if self._frame_offsets is None else self._frame_offsets.byte_range(first, stop, bytes_max)
        if window is None or not self._is_verified(shape.data.size, *window):
            index = memoryview(shape.index)
            if len(index) < entries_bytes or not is_resident(index):
                return False
            if (
                self._frame_offsets is None
                and CODEC.INDEX_VERIFIED in shape.verified_chunks
                and self._footer_bytes is not None
            ):
                self._frame_offsets = find_frame_offsets(self.base, segment_index.read_entries(index), self.size)
                self._chunk_bytes = sealed_segment.decode_footer(self._footer_bytes).chunk_bytes
            window = CODEC.verified_range(shape, first, stop, bytes_max)
        if window is None or window[1] - window[0] > RESIDENT_READ_BYTES_MAX:
            return False
        return is_resident(memoryview(shape.data.fetch(*window)))

    def plain_frames(
        self, first: int, stop: int, bytes_max: int, resident_at_us: int | None
    ) -> Callable[[], FrameLocations | None] | None:
        if (
            not self.is_sealed
            or not self._deletions_loaded
            or self._footer_bytes is None
            or self.rebuilt_index is not None
        ):
            return None
        deleted = self.deleted_mask()
        if deleted is not None and deleted[first - self.base : stop - self.base].any():
            return None
        mapped = self.files.get_mapped(self.base, self.generation)
        if mapped is not None and mapped[0].is_remote:
            return None
        if mapped is not None and self._frame_offsets is not None:
            window = self._frame_offsets.byte_range(first, stop, bytes_max)
            if window is not None and self._is_verified(min(mapped[0].size, self.size), *window):
                if resident_at_us is not None and not self._is_recently_resident(mapped[0], *window, resident_at_us):
                    return None
                locations: FrameLocations = [(mapped[0].fetch(*window), 0)]
                return lambda: locations
        return None if resident_at_us is not None else partial(_locate_frames, self.shape(), first, stop, bytes_max)

    def _is_verified(self, size: int, low: int, high: int) -> bool:
        """Whether these bytes of `size` bytes of data were verified against the footer. `_frame_offsets` implies a
        verified index."""
        chunk = self._chunk_bytes
        return high <= size and self._verified_chunks.issuperset(range(low // chunk, -(-high // chunk)))

    def _is_recently_resident(self, data: MmapReader, low: int, high: int, now_us: int) -> bool:
        """Whether these bytes are in memory, or were a moment ago with their chunk: readers go on from page to page,
        and a query for each costs a tenth of the page."""
        if high - low > RESIDENT_READ_BYTES_MAX:
            return False
        for chunk in range(low // _RESIDENCY_CHUNK_BYTES, -(-high // _RESIDENCY_CHUNK_BYTES)):
            if self._resident_until_us.get(chunk, -1) < now_us:
                if not is_resident(data.fetch(chunk * _RESIDENCY_CHUNK_BYTES, (chunk + 1) * _RESIDENCY_CHUNK_BYTES)):
                    return is_resident(data.fetch(low, high))
                self._resident_until_us[chunk] = now_us + _RESIDENCY_TTL_US
        return True

    def reader(self, first: int, stop: int, bytes_max: int) -> Callable[[], Chunk]:
        return partial(self._read, self.shape(), first, stop, bytes_max)

    def _read(self, shape: SegmentContent, first: int, stop: int, bytes_max: int) -> Chunk:
        if len(shape.index) < (shape.stop - shape.base) * segment_index.ENTRY_BYTES and not self.rebuild_index():
            return Chunk(
                empty_rows(), first, Fault(first, shape.stop, 0, "its index is missing and its data is not whole")
            )
        current = self.shape() if self.rebuilt_index else shape
        chunk = self._check_topic(CODEC.read(current, first, stop, bytes_max))
        if chunk.fault is not None and self.has_cold_copy and not self.is_remote():
            # The file on the disk is damaged and its copy in the cold tier was verified.
            cold = ColdFile(self.files.cold, _required(self.cold), self.size)
            from_cold = SegmentContent(shape.base, shape.stop, cold, shape.index, shape.sides, shape.footer, set())
            copied = self._check_topic(CODEC.read(from_cold, first, stop, bytes_max))
            if copied.fault is None:
                return copied
        if chunk.fault is None or self.rebuilt_index is not None or shape.stop != self.stop or not self.rebuild_index():
            return chunk
        # The index was wrong, not the data.
        return self._check_topic(CODEC.read(self.shape(), first, stop, bytes_max))

    def _check_topic(self, chunk: Chunk) -> Chunk:
        """Return the chunk if its frames belong to this topic: a file of another topic counts as damaged."""
        rows = chunk.rows
        if not len(rows):
            return chunk
        starts = rows.frame_starts()
        if (frame.read_headers(rows.buf, starts)["topic_id"] == self.files.topic_id).all():
            return chunk
        first = int(rows.seq[0])
        return Chunk(empty_rows(), first, Fault(first, self.stop, int(starts[0]), "its frames are another topic's"))
