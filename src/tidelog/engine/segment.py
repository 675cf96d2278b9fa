"""[hot] The parts of a topic: segments on disk and blocks in memory, one after the other by seq.

    seg 1..10000 sealed │ seg 10001..14200 on disk │ block 14201..14950 in memory │
                        └──────────── one segment, still growing ───────────────┘

Both answer the same questions: which seqs, which of them are deleted, what their index says, and the
records of a range as columns. Neither keeps a Python object per record. Blocks are in `block`.

[shell] Where the files of topics lie, and how many of them are open.

[hot] Which places of a part are deleted: flags that are set in place, in room that doubles.

    room   │ 1 1 0 1 0 0 0 … │ 0 0 0 0 0 0 0 0 │       a view of the first `size` of them is what others see
           └ places of the part ┘└ those to come ┘

A queue deletes a job at a time, and to copy the flags of its whole segment for each would cost more than everything
else of an ack. So a view is good under the topic's lock; whoever keeps it for longer takes a copy.

[hot] Where the frames of a sealed segment begin, for those whose records are JSON data and nothing else.

    seqs    1      1001     2001   …        first seq of each frame
    pos     0      104 062  208 124 …  end  and its first byte

The index has an entry for every record; a page needs two numbers of it. Found once, when all of the index is in memory
and was checked, kept for as long as the segment is, for segments of few frames: then a page is found without the index,
and nobody has to ask whether that is in memory still.
"""

from __future__ import annotations

import errno
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tidelog.commitlog.codec import Chunk, Fault, SegmentContent
from tidelog.commitlog.codecs.tide import TideCodec
from tidelog.commitlog.segment import LruCache, MmapReader, map_file
from tidelog.config import LogConfig
from tidelog.disk.durability import read_file
from tidelog.disk.host import is_resident
from tidelog.disk.interface import Disk, join
from tidelog.errors import Corrupt, Damaged, NewerFormat, Unavailable
from tidelog.formats import deletion_vector, footer, frame, scan, segment_index
from tidelog.formats.deletion_vector import DeletionVector
from tidelog.formats.rows import empty_rows
from tidelog.types import Buffer, Ints

if TYPE_CHECKING:
    from tidelog.engine.memtable import MemTable

CODEC: Final = TideCodec(LogConfig())
T = TypeVar("T")
_NO_DESCRIPTORS: Final = frozenset((errno.EMFILE, errno.ENFILE))


class MmapCache:
    """What is mapped of all topics, bounded by number: descriptors and address space, not memory."""

    def __init__(self, capacity: int) -> None:
        self._mapped: LruCache[tuple[MmapReader, Buffer]] = LruCache(capacity)
        self._lock = Lock()

    def get(self, key: int, load: Callable[[], tuple[MmapReader, Buffer]]) -> tuple[MmapReader, Buffer]:
        with self._lock:
            return self._mapped.get(key, load)

    def get_mapped(self, key: int) -> tuple[MmapReader, Buffer] | None:
        """What is there; it counts as used."""
        with self._lock:
            return self._mapped.find(key)

    def drop(self, key: int) -> None:
        with self._lock:
            self._mapped.drop(key)

    def clear(self) -> None:
        with self._lock:
            self._mapped.clear()

    def clear_without_lock(self) -> None:
        """`clear` in a forked child, where a thread that is not there may hold the lock."""
        self._mapped.clear()


class RemoteFile(MmapReader):
    """A data file that is somewhere else: each look at it fetches what is looked at."""

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
    """Where the segment files of one topic lie, and what of them is open."""

    def __init__(self, disk: Disk, directory: str, topic_id: int, maps: MmapCache) -> None:
        self.disk, self.directory, self.topic_id, self._maps = disk, directory, topic_id, maps

    def path(self, base: int, suffix: str) -> str:
        return join(self.directory, f"{CODEC.name_format.format(base)}{suffix}")

    def open(self, base: int) -> tuple[MmapReader, Buffer]:
        """The mapped data and index of a segment; a missing file reads as an empty one."""
        return self._maps.get(self._key(base), lambda: self._open(base))

    def is_mapped(self, base: int) -> bool:
        """Whether `open` has nothing to do."""
        return self.get_mapped(base) is not None

    def get_mapped(self, base: int) -> tuple[MmapReader, Buffer] | None:
        """What `open` gives, where it has nothing to do."""
        return self._maps.get_mapped(self._key(base))

    def _open(self, base: int) -> tuple[MmapReader, Buffer]:
        index = self._read_or_raise(self.path(base, ".idx"), map_file) or b""
        path = self.path(base, ".data")
        if getattr(self.disk, "fetches", False):  # what is asked for costs a request, what is not costs nothing
            found = self.disk.stat(path)
            return RemoteFile(
                lambda lo, hi: self._read_or_raise(path, partial(_read_range, lo, hi)), found.size if found else 0
            ), index
        data = self._read_or_raise(path, map_file)
        return MmapReader(data or memoryview(b"")), index

    def read_range(self, base: int, suffix: str, lo: int, hi: int) -> bytes:
        """Bytes [lo, hi) of a file beside the data."""
        return self._read_or_raise(self.path(base, suffix), partial(_read_range, lo, hi))

    def read_side_file(self, base: int, suffix: str) -> bytes | None:
        """A small file beside the data, whole; None where there is none."""
        return self._read_or_raise(self.path(base, suffix), read_file)

    def _read_or_raise(self, path: str, read: Callable[[Disk, str], T]) -> T:
        try:
            return read(self.disk, path)
        except OSError as error:
            step = "close some files and retry" if error.errno in _NO_DESCRIPTORS else "mend the disk and retry"
            kind = Unavailable if error.errno in _NO_DESCRIPTORS else Damaged
            raise kind(f"{path} cannot be read: {error}; nothing was changed, {step}") from error

    def unmap(self, base: int) -> None:
        self._maps.drop(self._key(base))

    def _key(self, base: int) -> int:
        return self.topic_id << 64 | base


BoolArray = NDArray[np.bool_]
_BITMAP_MIN: Final = 1024


class DeletionBitmap:
    __slots__ = ("_flags",)

    def __init__(self, flags: BoolArray | None = None) -> None:
        self._flags: BoolArray = np.zeros(_BITMAP_MIN, bool) if flags is None else flags

    def view(self, size: int) -> BoolArray:
        """The flags of so many places; those that nobody has set are not deleted."""
        if size > len(self._flags):
            self._grow(size)
        return self._flags[:size]

    def set(self, at: int) -> bool:
        """Delete one place; False where it was deleted before."""
        if at >= len(self._flags):
            self._grow(at + 1)
        if self._flags[at]:
            return False
        self._flags[at] = True
        return True

    def has(self, at: int) -> bool:
        return at < len(self._flags) and bool(self._flags[at])

    def set_many(self, which: Ints) -> None:
        last = int(which.max()) if len(which) else -1
        if last >= len(self._flags):
            self._grow(last + 1)
        self._flags[which] = True

    def _grow(self, size: int) -> None:
        room = np.zeros(max(2 * size, _BITMAP_MIN), bool)
        room[: len(self._flags)] = self._flags
        self._flags = room


INDEXED_FRAMES_MAX: Final = 128  # 2 KB a segment
PAGE_FRAMES_MAX: Final = 16  # of a page that is told from its batches as they lie there


class FrameOffsets:
    __slots__ = ("_pos", "_seqs")

    def __init__(self, seqs: list[int], pos: list[int]) -> None:
        self._seqs, self._pos = seqs, pos

    def byte_range(self, first: int, stop: int, bytes_max: int) -> tuple[int, int] | None:
        """The bytes that hold the frames of [first, stop); None where they are many."""
        at, end = bisect_right(self._seqs, first) - 1, bisect_left(self._seqs, stop)
        low, high = self._pos[at], self._pos[end]
        return None if end - at > PAGE_FRAMES_MAX or high - low > bytes_max else (low, high)


def find_frame_offsets(base: int, entries: NDArray[np.void], size: int) -> FrameOffsets | None:
    """Of a segment that begins with `base`, by its index and the bytes of its data. None where it has many frames, and
    where one of them is not a batch of such records."""
    at = np.ascontiguousarray(entries["frame_offset"])
    starts = np.flatnonzero(at[1:] > at[:-1]) + 1
    if (
        len(starts) >= INDEXED_FRAMES_MAX
        or not len(at)
        or not (entries["flags"] == segment_index.BATCH | segment_index.JSON).all()
    ):
        return None
    return FrameOffsets([base, *(starts + base).tolist()], [int(at[0]), *at[starts].tolist(), size])


FrameLocations: TypeAlias = list[tuple[Buffer, int]]
"""Bytes that hold frames one behind the other, and where in them the first one begins."""
RESIDENT_READ_BYTES_MAX = 2 << 20  # bytes; to copy them once takes 0.15 ms where no page is missing
_RESIDENCY_CHUNK_BYTES = 1 << 20  # for which it is asked at once whether they are in memory
_RESIDENCY_TTL_US = 50_000  # for which the answer is believed; a page that goes meanwhile costs a wait for the disk


class SizeCount(NamedTuple):
    """How much a stretch of seqs holds that is not deleted."""

    records: int
    bytes: int  # bytes of data and meta


class Part(Protocol):
    base: int
    stop: int
    live_records: int
    live_bytes: int
    first_ts: int
    last_ts: int

    def entries(self) -> NDArray[np.void]:
        """The index: one entry a seq."""
        ...

    def deleted_mask(self) -> BoolArray | None:
        """Which seqs are deleted, one flag each; None: none is. Good while the topic's lock is held: keep a copy."""
        ...

    def plain_frames(
        self, first: int, stop: int, bytes_max: int, resident_at_us: int | None
    ) -> Callable[[], FrameLocations | None] | None:
        """Finds out, without the topic's lock, where the frames of these records lie, in bytes that need no check. None
        where one of them was deleted, and where they are better scanned. `near_us`, for somebody who may not wait, is
        the time: and where that takes a look at a file, or they are not in memory."""
        ...

    def mark_deleted(self, which: Ints, weights: Ints | None = None) -> SizeCount:
        """Delete the seqs at these places, whose bytes may be known; return what went."""
        ...

    def mark_deleted_one(self, at: int) -> int | None:
        """`bury` of one place: its bytes, or None where it was deleted before."""
        ...

    def reader(self, first: int, stop: int, bytes_max: int) -> Callable[[], Chunk]:
        """What reads these seqs. Made under the topic's lock, called without it: a long read stops no writer."""
        ...


def record_sizes(part: Part, lo: int, hi: int) -> Ints:
    """Bytes of data and meta of the records at places [lo, hi)."""
    return record_sizes_reader(part, lo, hi)()


def record_sizes_reader(part: Part, lo: int, hi: int) -> Callable[[], Ints]:
    """What tells `sizes`. Made under the topic's lock, called without it: it reads the records that have metas."""
    entries = part.entries()[lo:hi]
    found: Ints = entries["data_len"].astype(np.int64)
    if not (entries["flags"] & segment_index.HAS_META).any():
        return lambda: found
    base, look = part.base, part.reader(part.base + lo, part.base + hi, 1 << 62)

    def read() -> Ints:
        rows = look().rows
        if rows.meta is not None:
            found[rows.seq - base - lo] += rows.meta.size
        return found

    return read


def measure_part(part: Part, lo: int, hi: int) -> SizeCount:
    """What the places [lo, hi) of a part hold that is not deleted."""
    if lo >= hi:
        return SizeCount(0, 0)
    if lo == 0 and hi == part.stop - part.base:
        return SizeCount(part.live_records, part.live_bytes)
    found, dead = record_sizes(part, lo, hi), part.deleted_mask()
    if dead is None:
        return SizeCount(hi - lo, int(found.sum()))
    live = ~dead[lo:hi]
    return SizeCount(int(live.sum()), int(found[live].sum()))


def mark_deleted(part: Part, mask: DeletionBitmap, which: Ints, weights: Ints | None = None) -> SizeCount:
    """Delete these places of a part in its mask; what that takes away."""
    new = ~mask.view(part.stop - part.base)[which]
    fresh = which[new]
    if not len(fresh):
        return SizeCount(0, 0)
    if weights is None:
        lo, hi = int(fresh.min()), int(fresh.max()) + 1
        size = int(record_sizes(part, lo, hi)[fresh - lo].sum())
    else:
        size = int(weights[new].sum())
    mask.set_many(fresh)
    return SizeCount(len(fresh), size)


def mark_deleted_one(part: Part, mask: DeletionBitmap, at: int) -> int | None:
    """`bury` of one place, without arrays: how many bytes went; None where it was deleted before."""
    if mask.has(at):
        return None
    entries = part.entries()
    size = (
        int(record_sizes(part, at, at + 1)[0])
        if entries["flags"][at] & segment_index.HAS_META
        else int(entries["data_len"][at])
    )
    mask.set(at)
    return size


def _locate_frames(shape: SegmentContent, first: int, stop: int, bytes_max: int) -> FrameLocations | None:
    window = CODEC.verified_range(shape, first, stop, bytes_max)
    return None if window is None else [(shape.data.fetch(*window), 0)]


class TruncatedView:
    """The bytes of a mapped data file that the manifest vouches for."""

    def __init__(self, mapped: MmapReader, size: int) -> None:
        self._mapped, self.size = mapped, min(size, mapped.size)

    def fetch(self, lo: int, hi: int) -> Buffer:
        return self._mapped.fetch(lo, min(hi, self.size))


class Segment:
    """A segment on disk; the last one of a topic may still grow, by checkpoints."""

    def __init__(
        self,
        home: SegmentFiles,
        base: int,
        stop: int,
        size: int,
        *,
        live: int,
        live_bytes: int,
        first_ts: int,
        last_ts: int,
        sealed: bool,
        unproven: bool = False,
    ) -> None:
        self.files, self.base, self.stop, self.size = home, base, stop, size
        self.live_records, self.live_bytes = live, live_bytes
        self.first_ts, self.last_ts, self.is_sealed = first_ts, last_ts, sealed
        self.lacks_footer = unproven  # sealed without a footer: not all of its frames verified
        self.has_unsaved_deletions = False  # deletions that no `.del` file has yet
        self._footer_bytes: bytes | None = None
        self._verified_chunks: set[int] = set()
        self._deleted: DeletionBitmap | None = None
        self._deletions_loaded = False  # whether `.del` was read
        self._deleted_min = stop - base - live  # how many it must name at least
        self._frame_offsets: FrameOffsets | None = None  # of a sealed one, where they are few
        self.has_tags: bool | None = None  # of a sealed one: whether it has tags at all, once a search has looked
        self._resident_until_us: dict[int, int] = {}  # which of its bytes are taken to be in memory, and until when
        self._chunk_bytes = 1  # that a checksum of its footer is of, where the edges are known
        self.rebuilt_index: bytes | None = None  # an index that had to be made again; the file has another or none

    def shape(self) -> SegmentContent:
        data, index = self.files.open(self.base)
        if self.rebuilt_index is not None:
            index = self.rebuilt_index
        if self.is_sealed and self._footer_bytes is None and not self.lacks_footer:
            self._footer_bytes = self.files.read_side_file(self.base, ".foot")
        index = memoryview(index)[: (self.stop - self.base) * segment_index.ENTRY_BYTES]
        extra = self._footer_bytes if self.is_sealed else None
        return SegmentContent(
            self.base, self.stop, TruncatedView(data, self.size), index, [index], extra, self._verified_chunks
        )

    def read_footer(self) -> bytes | None:
        """The bytes of its footer, where it is sealed and has one that holds."""
        content = self.shape().footer
        if content is None:
            return None
        try:
            footer.decode(content)
        except (Corrupt, NewerFormat):
            return None
        return bytes(content)

    @property
    def is_index_verified(self) -> bool:
        """Whether its index is known to be the one that was sealed."""
        return self.is_sealed and CODEC.INDEX_VERIFIED in self._verified_chunks

    def skip_verification(self) -> None:
        """Believe its sealed bytes without looking at their checksums: for a reader that asks for that."""
        foot = self.files.read_side_file(self.base, ".foot") if self.is_sealed else None
        if foot is not None:
            self._verified_chunks |= {CODEC.INDEX_VERIFIED, *range(len(footer.decode(foot).chunks))}

    def rebuild_index(self) -> bool:
        """Make the index again from the data, in memory; False where the data does not hold all of it either."""
        data, _ = self.files.open(self.base)
        walk = scan.scan_records(data.fetch(0, min(self.size, data.size)), above=self.base - 1)
        if walk.end != self.size or len(walk.rows) != self.stop - self.base:
            return False
        self.rebuilt_index = segment_index.build_entries(walk.rows, self.base, self.stop, self.size).tobytes()
        return True

    def entries(self) -> NDArray[np.void]:
        found = CODEC.read_index(self.shape())
        if len(found) < self.stop - self.base:
            where = self.files.path(self.base, ".idx")
            raise Corrupt(
                where, pos=len(found) * segment_index.ENTRY_BYTES, reason="the index is shorter than its segment"
            )
        return found

    def recount_live(self) -> None:
        """Count what is live where there are deletions: the file may be newer than what the manifest says of it."""
        dead = self.deleted_mask()
        if dead is not None:
            live, size = ~dead, record_sizes(self, 0, self.stop - self.base)
            self.live_records, self.live_bytes = int(live.sum()), int(size[live].sum())

    def deleted_mask(self) -> BoolArray | None:
        if not self._deletions_loaded:
            path = self.files.path(self.base, ".del")
            content = self.files.read_side_file(self.base, ".del")
            count, mask, found = self.stop - self.base, None, 0
            if content is not None:
                mask = DeletionBitmap()
                vector = deletion_vector.decode(content, path)
                where = vector.seqs() - self.base
                mask.set_many(where[where < count])
                found = int(mask.view(count).sum())
                # Written by a checkpoint that was not finished: what it says of seqs that this segment does not have
                # yet must not meet them when it does.
                self.has_unsaved_deletions |= vector.size > count
            if found < self._deleted_min:
                # Serving what it lacks would bring deleted records back.
                raise Corrupt(path, pos=0, reason=f"{self._deleted_min} records were deleted, it names {found}")
            self._deleted, self._deletions_loaded = mask, True
        return None if self._deleted is None else self._deleted.view(self.stop - self.base)

    def set_deleted(self, dead: BoolArray | None) -> None:
        """These places are deleted, whatever the file says."""
        self._deleted, self._deletions_loaded, self.has_unsaved_deletions = (
            None if dead is None else DeletionBitmap(dead),
            True,
            dead is not None,
        )

    def _bitmap(self) -> DeletionBitmap:
        """Where to set what is deleted."""
        if self.deleted_mask() is None:
            self._deleted = DeletionBitmap()
        assert self._deleted is not None, "made above"
        return self._deleted

    def mark_deleted(self, which: Ints, weights: Ints | None = None) -> SizeCount:
        gone = mark_deleted(self, self._bitmap(), which, weights)
        self._subtract_live(*gone)
        return gone

    def mark_deleted_one(self, at: int) -> int | None:
        size = mark_deleted_one(self, self._bitmap(), at)
        if size is not None:
            self._subtract_live(1, size)
        return size

    def _subtract_live(self, records: int, size: int) -> None:
        self.live_records, self.live_bytes = self.live_records - records, self.live_bytes - size
        self.has_unsaved_deletions |= records > 0

    def encode_deletions(self) -> bytes:
        """The content of its `.del` file."""
        made = DeletionVector(self.base, self.stop - self.base)
        dead = self.deleted_mask()
        if dead is not None:
            made.mark(np.flatnonzero(dead) + self.base)
        return deletion_vector.encode(made)

    def absorb(self, block: MemTable) -> None:
        """Take over what a block held, now that the files have it."""
        assert (block.base, block.origin) == (self.stop, self.size), "a block goes on where its segment ends"
        self.deleted_mask()  # what the file says is about the seqs that it had until now
        theirs = block.deleted_mask()
        if theirs is not None:
            self._bitmap().set_many(np.flatnonzero(theirs) + self.stop - self.base)
            self.has_unsaved_deletions = True
        self.live_records, self.live_bytes = self.live_records + block.live_records, self.live_bytes + block.live_bytes
        self.stop, self.size, self.last_ts = block.stop, self.size + block.size, block.last_ts
        self.files.unmap(self.base)

    def is_resident(self, first: int, stop: int, bytes_max: int) -> bool:
        """Whether these seqs can be read where nobody may wait: sealed, mapped, checked before, all of them records,
        little, and in memory at this moment."""
        home, entries = self.files, (self.stop - self.base) * segment_index.ENTRY_BYTES
        known = (
            self.is_sealed and self._deletions_loaded and self._footer_bytes is not None and self.rebuilt_index is None
        )
        dense = self.live_records == self.stop - self.base
        if not known or not dense or entries > RESIDENT_READ_BYTES_MAX or not home.is_mapped(self.base):
            return False
        shape = self.shape()
        window = None if self._frame_offsets is None else self._frame_offsets.byte_range(first, stop, bytes_max)
        if window is None or not self._is_verified(shape.data.size, *window):
            index = memoryview(shape.index)
            if len(index) < entries or not is_resident(index):
                return False
            if (
                self._frame_offsets is None
                and CODEC.INDEX_VERIFIED in shape.verified_chunks
                and self._footer_bytes is not None
            ):
                self._frame_offsets = find_frame_offsets(self.base, segment_index.read_entries(index), self.size)
                self._chunk_bytes = footer.decode(self._footer_bytes).chunk_bytes
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
        dead = self.deleted_mask()
        if dead is not None and dead[first - self.base : stop - self.base].any():
            return None
        held = self.files.get_mapped(self.base)
        if held is not None and self._frame_offsets is not None:
            window = self._frame_offsets.byte_range(first, stop, bytes_max)
            if window is not None and self._is_verified(min(held[0].size, self.size), *window):
                if resident_at_us is not None and not self._is_recently_resident(held[0], *window, resident_at_us):
                    return None
                found: FrameLocations = [(held[0].fetch(*window), 0)]
                return lambda: found
        return None if resident_at_us is not None else partial(_locate_frames, self.shape(), first, stop, bytes_max)

    def _is_verified(self, size: int, low: int, high: int) -> bool:
        """Whether these of `size` bytes of data were held against the footer before. It is a segment whose edges are
        known, so its index was."""
        chunk = self._chunk_bytes
        return high <= size and self._verified_chunks.issuperset(range(low // chunk, -(-high // chunk)))

    def _is_recently_resident(self, data: MmapReader, low: int, high: int, now_us: int) -> bool:
        """Whether these bytes are in memory, as they and those around them were a moment ago: whoever reads goes on
        from page to page, and to ask for each costs a tenth of it."""
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
        shown = self.shape() if self.rebuilt_index else shape
        found = self._check_topic(CODEC.read(shown, first, stop, bytes_max))
        if found.fault is None or self.rebuilt_index is not None or shape.stop != self.stop or not self.rebuild_index():
            return found
        # It was the index that was wrong, not the data.
        return self._check_topic(CODEC.read(self.shape(), first, stop, bytes_max))

    def _check_topic(self, chunk: Chunk) -> Chunk:
        """The chunk, if its frames are this topic's: a file in another one's place is as good as damaged."""
        rows = chunk.rows
        if not len(rows):
            return chunk
        starts = rows.frame_pos[np.append(0, np.flatnonzero(rows.frame_pos[1:] != rows.frame_pos[:-1]) + 1)]
        if (frame.read_headers(rows.buf, starts)["topic_id"] == self.files.topic_id).all():
            return chunk
        first = int(rows.seq[0])
        return Chunk(empty_rows(), first, Fault(first, self.stop, int(starts[0]), "its frames are another topic's"))
