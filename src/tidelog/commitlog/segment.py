"""[shell] The files of one segment: sealed ones are mapped, the active one is written and read by file.

What is true when `Active.write` returns: the rows lie in the data file, every side file names
them, and with `durable` both survive a power cut. When it raises, none of that is visible and
the next write starts at the same byte.

A small least-recently-used cache. What the log keeps open or in memory is bounded here and nowhere else.

[shell] Birth and sealing of segments. The order of syncs here is what recovery relies on.

    seal    sync data and sides → write the footer (atomic) → the segment is complete
    birth   write the birth file → create data and sides → sync the directory
    roll    seal, then birth; a crash in between leaves a complete last segment, which simply goes on growing

So a later segment exists on disk only after the one before it is whole.

[shell] Putting new bytes in the place of a segment, so that a crash shows the old ones or the new ones.

`prepare` writes every new file beside the old one and changes nothing; a full disk or a failed
write is noticed there, and `abandon` takes the new files away again. `commit` only renames:

    remove the sides that can be derived → rename the data (commit) → rename the new sides

An old index beside new data would point at the wrong bytes, so where a side can be derived it
goes first, and a crash leaves it missing: it is rebuilt. A side that cannot be derived (the index of
laminar, the checksums of rustlog) stays until its new form takes its place. That is written after the new
data, so a side.compacted without a data.compacted says "committed, finish it"; with it, "not committed,
forget both". `settle` does the one or the other, and readers look at it the same way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from errno import ENOENT
from itertools import product
from threading import Lock
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tidelog.commitlog.codec import (
    Batch,
    Chunk,
    Codec,
    EncodedAppend,
    Fault,
    RecoveredSegment,
    Salvage,
    SegmentContent,
    SidePiece,
    build_append,
)
from tidelog.commitlog.storage import Storage
from tidelog.disk.durability import (
    DISK_FULL_ERRNOS,
    SyncFailed,
    WriteLatch,
    read_file,
    remove_if_exists,
    replace_file,
    sync_directory,
    sync_file,
    write_temporary,
)
from tidelog.disk.interface import Disk, File, join
from tidelog.errors import DiskFull, Error, WriteFailed
from tidelog.formats import segment_index
from tidelog.formats.log_manifest import UNKNOWN, Entry
from tidelog.formats.rows import Rows, ScanStop, empty_rows
from tidelog.types import Buffer, Ints

V = TypeVar("V")


class LruCache(Generic[V]):
    """Keeps `capacity` values: None all of them, 0 none."""

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._values: OrderedDict[int, V] = OrderedDict()

    def get(self, key: int, load: Callable[[], V]) -> V:
        """The value of `key`, loaded at most once while it stays in the cache."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        value = load()
        if self._capacity != 0:
            self._values[key] = value
            if self._capacity is not None and len(self._values) > self._capacity:
                self._values.popitem(last=False)
        return value

    def find(self, key: int) -> V | None:
        """The value of `key` if it is there; it counts as used."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key]

    def drop(self, key: int) -> None:
        self._values.pop(key, None)

    def clear(self) -> None:
        self._values.clear()

    def __len__(self) -> int:
        return len(self._values)


REPLACEMENT_SUFFIX = ".compacted"  # behind the name of what is about to take the place of a file


class MmapReader:
    """A sealed data file, seen through its mapping."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.size = len(view)

    def fetch(self, lo: int, hi: int) -> memoryview:
        return self._view[lo:hi]


class FileReader:
    """The committed bytes of a growing data file."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self.size = storage, storage.size

    def fetch(self, lo: int, hi: int) -> bytes:
        return self._storage.read(lo, min(hi, self.size) - lo)


def map_file(disk: Disk, path: str) -> memoryview | None:
    """A whole file without copying, or None where there is none."""
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        return file.map()
    finally:
        file.close()


@dataclass(slots=True)
class LogFiles:
    """Where the segments of one log lie and how many of them stay open."""

    disk: Disk
    directory: str
    codec: Codec
    mapped_data: LruCache[MmapReader]
    cached_sides: LruCache[list[Buffer | None]]

    def data_path(self, base: int) -> str:
        return join(self.directory, self.codec.data_name(base))

    def side_path(self, base: int, suffix: str) -> str:
        return join(self.directory, self.codec.side_name(base, suffix))

    def side_read_path(self, base: int, suffix: str) -> str:
        """Where to read a side file. An interrupted swap has the new data in place and a new side that cannot be
        derived still beside the old one: the new one belongs to the data."""
        path = self.side_path(base, suffix)
        if (
            suffix in self.codec.side_suffixes
            and self.codec.side_suffixes.index(suffix) in self.codec.authoritative_sides
        ):
            fresh = path + REPLACEMENT_SUFFIX
            if self.disk.stat(fresh) is not None and self.disk.stat(self.data_path(base) + REPLACEMENT_SUFFIX) is None:
                return fresh
        return path

    def segment_paths(self, base: int) -> list[str]:
        """Every file a segment may have, in the order in which they may be removed: what makes the segment
        count as one goes first, so that a half-removed segment is swept and never served."""
        codec = self.codec
        extras = [suffix for suffix in (codec.footer_suffix, codec.created_suffix) if suffix]
        sides = [self.side_path(base, suffix) for suffix in (*codec.side_suffixes, *codec.stale_suffixes, *extras)]
        return (
            [*sides[:1], self.data_path(base), *sides[1:]]
            if codec.syncs_data_first and 0 in codec.authoritative_sides
            else [self.data_path(base), *sides]
        )

    def remove_segment(self, base: int) -> None:
        """Remove a segment; gone after a power cut too when this returns."""
        self.drop_cached(base)
        for path in self.segment_paths(base):
            remove_if_exists(self.disk, path)
        self.disk.sync_dir(self.directory)

    def drop_cached(self, base: int) -> None:
        self.mapped_data.drop(base)
        self.cached_sides.drop(base)


@dataclass(slots=True)
class SealedSegment:
    """An immutable segment. Its bytes never change; its `stop` is where the next segment begins."""

    files: LogFiles
    base: int
    stop: int
    size: int  # bytes of data
    side_bytes: int
    footer: bytes | None = None
    rebuilt_sides: tuple[bytes, ...] | None = None  # sides rebuilt in memory, when the log may not write
    verified_chunks: set[int] = field(default_factory=set)
    complete_bytes: int = UNKNOWN  # how long the data was when it was last known to be whole
    authoritative_side_bits: int = 0  # a bit for each side file that it had and that its data does not give
    lost_reason: str = ""  # why none of it can be read, where that is so
    salvage: Salvage | None = None  # what can be read, once damage was met
    _time_range: tuple[int, int] | None = None

    def content(self) -> SegmentContent:
        """The segment as its codec reads it: mapped data, mapped or cached index."""
        files = self.files
        data = files.mapped_data.get(self.base, self._map_data)
        sides: Sequence[Buffer | None] = self.rebuilt_sides or files.cached_sides.get(self.base, self._load_sides)
        return SegmentContent(self.base, self.stop, data, sides[0] or b"", sides, self.footer, self.verified_chunks)

    def manifest_entry(self) -> Entry:
        """What the manifest says of it."""
        return Entry(self.base, self.complete_bytes, self.authoritative_side_bits)

    def read(self, shape: SegmentContent, first: int, stop: int, bytes_max: int) -> Chunk:
        """Records of [first, stop), as the codec reads them. Where it meets damage the segment is read once without its
        index, so that exactly what is damaged is reported and everything else is served."""
        if self.salvage is None and not self.lost_reason:
            chunk = self.files.codec.read(shape, first, stop, bytes_max)
            if chunk.fault is None:
                return chunk
        found = self.salvage
        if found is None:
            found = self.salvage = self.read_salvage(shape)
        end = stop
        for fault in found.faults:
            if fault.seq <= first < fault.resume:
                return Chunk(empty_rows(), first, fault._replace(seq=first))
            if fault.resume > fault.seq > first:
                end = min(end, fault.seq)
        rows = found.rows.between(first, end)
        count = max(int(np.searchsorted(np.cumsum(rows.data.size), bytes_max, "right")), 1)
        if count < len(rows):
            return Chunk(rows.slice(0, count), int(rows.seq[count]))
        return Chunk(rows, end)

    def read_salvage(self, shape: SegmentContent) -> Salvage:
        """Everything that can be read of the segment by its records alone, and what cannot."""
        if self.lost_reason:
            return Salvage(empty_rows(), [Fault(self.base, self.stop, 0, self.lost_reason)])
        size = shape.data.size
        found = self.files.codec.salvage(shape.data.fetch(0, size), shape.sides, self.base, self.stop)
        last = found.faults[-1] if found.faults else None
        if size < self.complete_bytes and (last is None or last.resume < self.stop):
            after = int(found.rows.seq[-1]) + 1 if len(found.rows) else self.base
            reason = f"the data has {size} bytes, {self.complete_bytes} were written"
            return Salvage(found.rows, [*found.faults, Fault(after, max(self.stop, after), size, reason)])
        return found

    def reset(self) -> None:
        """Look at the files anew when it is read next."""
        self.files.drop_cached(self.base)
        self.salvage, self.verified_chunks, self._time_range = None, set(), None

    def _map_data(self) -> MmapReader:
        # A missing file reads as an empty one: the codec then reports each record that should be there.
        return MmapReader(map_file(self.files.disk, self.files.data_path(self.base)) or memoryview(b""))

    def _load_sides(self) -> list[Buffer | None]:
        files = self.files
        return [map_file(files.disk, files.side_read_path(self.base, suffix)) for suffix in files.codec.side_suffixes]

    def reset_times(self) -> None:
        self._time_range = None

    def time_range(self) -> tuple[int, int] | None:
        """First and last record time in microseconds; None where the layout keeps none."""
        if self._time_range is None:
            self._time_range = self.files.codec.time_range(self.content())
        return self._time_range


class AppendBuffer:
    """The index of the active segment in memory: pieces as they come, laid together when somebody looks."""

    def __init__(self, initial: bytes) -> None:
        self._pending: list[SidePiece] = [initial]
        self._used_bytes = 0
        self._buffer: NDArray[np.uint8] = np.empty(max(1024, 2 * len(initial)), np.uint8)

    def append(self, piece: SidePiece) -> None:
        self._pending.append(piece)

    def view(self) -> memoryview:
        """All of it. What was handed out earlier stays as it was: room is replaced when it grows, never resized."""
        if not self._pending:
            return self._buffer[: self._used_bytes].data
        fresh = segment_index.encode_entries(self._pending)
        need = self._used_bytes + len(fresh)
        if need > len(self._buffer):
            room = np.empty(2 * need, np.uint8)
            room[: self._used_bytes] = self._buffer[: self._used_bytes]
            self._buffer = room
        self._buffer[self._used_bytes : need] = np.frombuffer(fresh, np.uint8)
        self._used_bytes, self._pending = need, []
        return self._buffer[: self._used_bytes].data


def _piece_bytes(piece: SidePiece) -> int:
    return piece.size if isinstance(piece, segment_index.EntryRun) else len(piece)


class ActiveSegment:
    """The one segment that grows."""

    def __init__(
        self,
        files: LogFiles,
        latch: WriteLatch,
        base: int,
        found: RecoveredSegment,
        *,
        data: File,
        sides: list[File | None],
        created_us: int,
        last_write_us: int,
    ) -> None:
        self._files, self._latch = files, latch
        self.base = base
        self.data, self._sides = Storage(data, found.end), sides
        self._side_sizes = [len(side) for side in found.sides]
        self._index_bytes_written = self._side_sizes[0]  # bytes of the index that its file has
        self._side_state = found.side_state
        self.next_seq = found.next_seq
        self.last_ts_us = found.last_ts_us
        self.created_us = created_us
        self.last_write_us = last_write_us
        self._index = AppendBuffer(found.sides[0])
        self._fd_lock = Lock()  # held by whoever syncs beside the writer, so that no descriptor is closed under it
        self._closed = False

    @property
    def size(self) -> int:
        """Bytes of data that records are made of."""
        return self.data.size

    @property
    def index_bytes(self) -> int:
        return self._side_sizes[0]

    @property
    def side_bytes(self) -> int:
        return sum(self._side_sizes)

    def content(self) -> SegmentContent:
        index = self._index.view()
        return SegmentContent(
            self.base, self.next_seq, FileReader(self.data), index, [index, *self._read_other_sides()]
        )

    def _read_other_sides(self) -> list[Buffer | None]:
        sizes = self._side_sizes[1:]
        return [None if file is None else file.read(0, size) for file, size in zip(self._sides[1:], sizes, strict=True)]

    def encode_append(self, ts_us: int, batch: Batch) -> EncodedAppend:
        """A batch as it will be after the last record. Nothing is written; raises where the layout refuses it."""
        return self._files.codec.encode_append(self.next_seq, ts_us, batch, self.size, self.base, self._side_state)

    def append_rows(self, rows: Rows, *, durable: bool) -> None:
        """Write rows that are encoded for this codec, seqs and times as they are."""
        self.write(build_append(self._files.codec, rows, self.size, self.base, self._side_state), durable=durable)

    def write(self, encoded: EncodedAppend, *, durable: bool) -> None:
        """Write what was placed after the last record."""
        self.roll_back_interrupted()
        try:
            for make in encoded.writes:
                self.data.stage_buffers(make())  # forgotten before the next is made
        except OSError as error:
            raise self.roll_back_after(error) from error
        self._commit(encoded, durable=durable)

    def commit_stream(self, rows: Rows, crcs: Ints, *, durable: bool) -> None:
        """Name a record whose bytes are staged."""
        made = build_append(self._files.codec, rows, self.size, self.base, self._side_state, crcs)
        self._commit(made, durable=durable)

    def _commit(self, encoded: EncodedAppend, *, durable: bool) -> None:
        """Write the sides of what is staged, make it durable if asked, and publish it."""
        codec, latch = self._files.codec, self._latch
        # The index must never name bytes that a power cut can take away.
        if durable and codec.syncs_data_first:
            latch.sync_or_trip(self.data)
        try:
            for file, size, piece in zip(self._sides, self._side_sizes, encoded.sides, strict=True):
                if piece and file is not None and isinstance(piece, bytes) and not self._is_deferred_index(file):
                    file.write(size, piece)
        except OSError as error:
            raise self.roll_back_after(error) from error
        if durable:
            self.sync(data=not codec.syncs_data_first)
        self._side_sizes = [
            size + (_piece_bytes(piece) if file is not None else 0)
            for file, size, piece in zip(self._sides, self._side_sizes, encoded.sides, strict=True)
        ]
        self._index.append(encoded.sides[0])
        if not self._files.codec.writes_index_on_seal:
            self._index_bytes_written = self._side_sizes[0]
        if self.size == 0 and self._files.codec.created_suffix is None:
            self.created_us = encoded.first_ts_us  # what a restart would find
        self.data.commit()
        self._side_state, self.next_seq, self.last_ts_us = encoded.side_state, encoded.next_seq, encoded.last_ts_us

    def _is_deferred_index(self, side: File) -> bool:
        return side is self._sides[0] and self._files.codec.writes_index_on_seal

    def write_index(self) -> None:
        """Bring the index file up to date. Nothing hangs on it: what it lacks is made again from the data."""
        file, size = self._sides[0], self._side_sizes[0]
        if file is not None and self._index_bytes_written < size:
            file.write(self._index_bytes_written, self._index.view()[self._index_bytes_written :])
            self._index_bytes_written = size

    def roll_back_interrupted(self) -> None:
        """Cut what an interrupted write left behind, so that it can never be read as a record."""
        if self.data.has_uncommitted_bytes:
            try:
                self.truncate_to_committed()
            except OSError as error:
                raise self._latch.trip(error, "rolling back an interrupted write") from error

    def sync(self, *, data: bool = True) -> None:
        """Make everything written so far survive a power cut: the data and the sides that cannot be derived from it."""
        with self._fd_lock:
            self._sync(data=data)

    def _sync(self, *, data: bool = True) -> None:
        # The kernel tells of a failed sync once per descriptor: whoever comes second must hear it from the latch.
        self._latch.check_before_sync()
        if data:
            self._latch.sync_or_trip(self.data)
        for number, file in enumerate(self._sides):
            if number in self._files.codec.authoritative_sides and file is not None:
                self._latch.sync_or_trip(file)

    def sync_concurrently(self) -> bool:
        """`sync` without the log's lock, beside appends; False where the segment was closed before it could begin."""
        with self._fd_lock:
            if self._closed:
                return False
            self._sync()
            return True

    def sync_all(self, *, derived_only: bool) -> None:
        """Sync every file of the segment, derivable or not: what sealing needs."""
        with self._fd_lock:
            self._latch.check_before_sync()
            if not derived_only:
                self._latch.sync_or_trip(self.data)
            for number, file in enumerate(self._sides):
                if file is not None and not (derived_only and number in self._files.codec.authoritative_sides):
                    self._latch.sync_or_trip(file)

    def trim_sides(self) -> None:
        """Side files of exactly their size, before the segment is sealed: all written, nothing preallocated."""
        self.write_index()
        for file, size in zip(self._sides, self._side_sizes, strict=True):
            if file is not None and file.size() != size:
                file.truncate(size)

    def truncate_to_committed(self) -> None:
        """Back to the last published byte, durably."""
        self.data.roll_back()
        for file, size in zip(self._sides, [self._index_bytes_written, *self._side_sizes[1:]], strict=True):
            if file is not None and file.size() > size:
                file.truncate(size)
        self.data.sync()
        for number, file in enumerate(self._sides):
            if number in self._files.codec.authoritative_sides and file is not None:
                file.sync()

    def roll_back_after(self, error: OSError) -> Error:
        """Roll back what is staged; return the error to raise."""
        try:
            self.truncate_to_committed()
        except OSError as second:
            return self._latch.trip(second, f"rolling back after {error}")
        if error.errno in DISK_FULL_ERRNOS:
            return DiskFull(f"{self.data.path}: no room on the device; the write was rolled back, free space and retry")
        if self._files.codec.latches_on_write_error:
            return self._latch.trip(error, "writing")
        return WriteFailed(f"{self.data.path}: {error}; the write was rolled back and nothing is visible, retry")

    def close(self) -> None:
        with self._fd_lock:
            self._closed = True
            self.data.close()
            for file in self._sides:
                if file is not None:
                    file.close()

    @property
    def authoritative_side_bits(self) -> int:
        """A bit for each side file that it has and that its data does not give."""
        return sum(
            1 << number
            for number, file in enumerate(self._sides)
            if number in self._files.codec.authoritative_sides and file is not None
        )

    def to_sealed(self, footer: bytes | None) -> SealedSegment:
        return SealedSegment(
            self._files,
            self.base,
            self.next_seq,
            self.size,
            self.side_bytes,
            footer,
            complete_bytes=self.size,
            authoritative_side_bits=self.authoritative_side_bits,
        )


class MissingFile:
    """The data file of an active segment that is not there, for a log that may not make one."""

    descriptor = None

    def __init__(self, path: str) -> None:
        self.path = path

    def size(self) -> int:
        return 0

    def read(self, _pos: int, _size: int, /) -> bytes:
        return b""

    def write(self, _pos: int, _data: Buffer, /) -> None:
        self._raise_missing()

    def writev(self, _pos: int, _pieces: Sequence[Buffer], /) -> None:
        self._raise_missing()

    def truncate(self, _size: int, /) -> None:
        self._raise_missing()

    def allocate(self, _size: int, /) -> None:
        self._raise_missing()

    def sync(self) -> None:
        self._raise_missing()

    def _raise_missing(self) -> None:
        raise FileNotFoundError(ENOENT, "the file is missing", self.path)

    def map(self) -> memoryview:
        return memoryview(b"")

    def close(self) -> None:
        """Nothing is open."""


def created_us(files: LogFiles, base: int) -> int | None:
    """When a segment was created, as persisted; None where the codec keeps no such file."""
    suffix = files.codec.created_suffix
    if suffix is None:
        return None
    text = read_file(files.disk, files.side_path(base, suffix))
    if text is not None and text.strip().isdigit():
        return int(text)
    # A log written elsewhere has no birth file: the index was last touched when its last record came.
    found = files.disk.stat(files.side_path(base, files.codec.side_suffixes[0]))
    return found.modified_ms * 1000 if found else None


def empty_segment(base: int, sides: int) -> RecoveredSegment:
    return RecoveredSegment(0, (b"",) * sides, base, 0, 0, 0, 0, ScanStop.END, "", [])


def create_segment(
    files: LogFiles, latch: WriteLatch, base: int, *, now_us: int, last_ts_us: int, lenient: bool = False
) -> ActiveSegment:
    """Create an empty active segment at `base`; its names survive a power cut on return."""
    codec, disk = files.codec, files.disk
    opened: list[File] = []
    try:
        if codec.created_suffix:
            born = _create_file(disk, files.side_path(base, codec.created_suffix))
            opened.append(born)
            born.write(0, b"%d\n" % now_us)
            sync_file(born)
            opened.pop().close()
        opened.append(_create_file(disk, files.data_path(base)))
        for suffix in codec.side_suffixes:
            side = _create_file(disk, files.side_path(base, suffix))
            opened.append(side)
        if codec.index_prealloc_bytes:
            opened[1].allocate(codec.index_prealloc_bytes)
        sync_directory(disk, files.directory)
    except OSError as error:
        for file in opened:
            file.close()
        fatal = not lenient and (codec.latches_on_write_error or isinstance(error, SyncFailed))
        raise (latch.write_error if fatal else latch.retryable_error)(error, f"creating segment {base}") from error
    found = empty_segment(base, len(codec.side_suffixes))._replace(
        last_ts_us=last_ts_us, side_state=codec.initial_side_state(base)
    )
    data, *sides = opened
    return ActiveSegment(
        files, latch, base, found, data=data, sides=list(sides), created_us=now_us, last_write_us=now_us
    )


def missing_active_segment(files: LogFiles, latch: WriteLatch, base: int) -> ActiveSegment:
    """The active segment of a log that has none and may not make one: an empty one that has no files."""
    count = len(files.codec.side_suffixes)
    found = empty_segment(base, count)._replace(side_state=files.codec.initial_side_state(base))
    data = MissingFile(files.data_path(base))
    return ActiveSegment(files, latch, base, found, data=data, sides=[None] * count, created_us=0, last_write_us=0)


def _create_file(disk: Disk, path: str) -> File:
    """A new, empty file, also where an attempt that ran out of room left one."""
    remove_if_exists(disk, path)
    return disk.open(path, "create")


def seal_segment(files: LogFiles, latch: WriteLatch, active: ActiveSegment, *, synced: bool) -> SealedSegment:
    """Make a segment complete and immutable. It stays the active one until another is born. `synced`: everything in it
    is known to be on disk, but for what can be derived."""
    active.roll_back_interrupted()
    try:
        active.trim_sides()
    except OSError as error:
        raise latch.write_error(error, f"sealing segment {active.base}") from error
    active.sync_all(derived_only=synced)
    # Mapped, not read: the bytes are synced and will not change, and a whole segment need not be copied to be hashed.
    shape = active.content()
    shape.data = MmapReader(map_file(files.disk, files.data_path(active.base)) or memoryview(b""))
    # The codec verifies what it seals: bytes that rotted since they were written must not become good ones.
    extra = files.codec.build_footer(shape)
    if extra is not None and files.codec.footer_suffix:
        try:
            replace_file(files.disk, files.side_path(active.base, files.codec.footer_suffix), extra)
        except OSError as error:
            raise latch.write_error(error, f"sealing segment {active.base}") from error
    return active.to_sealed(extra)


_REBUILDING_SUFFIX = ".rebuilding"


def prepare_replacement(files: LogFiles, base: int, data: Buffer, sides: Sequence[bytes], footer: bytes | None) -> None:
    """Write the new files of a segment, durably, under names that the sweep knows. On an error none of them stays."""
    codec, disk = files.codec, files.disk
    finish_replacements(files, [base])  # one that failed half-way must not be taken for this one
    try:
        write_temporary(disk, files.data_path(base) + REPLACEMENT_SUFFIX, data)
        sync_directory(disk, files.directory)
        for suffix, content in zip(codec.side_suffixes, sides, strict=True):
            write_temporary(disk, _replacement_side(files, base, suffix), content)
        if footer is not None and codec.footer_suffix:
            write_temporary(disk, _replacement_footer(files, base), footer)
        sync_directory(disk, files.directory)
    except OSError:
        abandon_replacement(files, base)
        raise


def abandon_replacement(files: LogFiles, base: int) -> None:
    """Forget what was prepared."""
    new = [_replacement_side(files, base, suffix) for suffix in files.codec.side_suffixes]
    # The data last: an index of the truth kind without its data would read as committed.
    for path in (*new, _replacement_footer(files, base), files.data_path(base) + REPLACEMENT_SUFFIX):
        with suppress(OSError):
            remove_if_exists(files.disk, path)
    with suppress(OSError):
        files.disk.sync_dir(files.directory)


def commit_replacement(files: LogFiles, base: int) -> None:
    """Put what was prepared in place; durable on return."""
    codec, disk, directory = files.codec, files.disk, files.directory
    files.drop_cached(base)
    target = files.data_path(base)
    derived = [suffix for number, suffix in enumerate(codec.side_suffixes) if number not in codec.authoritative_sides]
    gone = [*derived, *codec.stale_suffixes, *([codec.footer_suffix] if codec.footer_suffix else [])]
    if gone:
        for suffix in gone:
            remove_if_exists(disk, files.side_path(base, suffix))
        disk.sync_dir(directory)
    disk.rename(target + REPLACEMENT_SUFFIX, target)
    disk.sync_dir(directory)
    for suffix in codec.side_suffixes:
        disk.rename(_replacement_side(files, base, suffix), files.side_path(base, suffix))
    if codec.footer_suffix and disk.stat(_replacement_footer(files, base)) is not None:
        disk.rename(_replacement_footer(files, base), files.side_path(base, codec.footer_suffix))
    disk.sync_dir(directory)


def finish_replacements(files: LogFiles, bases: Sequence[int]) -> list[str]:
    """Finish or forget interrupted swaps of sides that cannot be derived; the names that were dealt with."""
    codec, disk = files.codec, files.disk
    done: list[str] = []
    truths = [codec.side_suffixes[number] for number in sorted(codec.authoritative_sides)]
    for base, suffix in product(bases, truths):
        fresh = _replacement_side(files, base, suffix)
        if disk.stat(fresh) is None:
            continue
        if disk.stat(files.data_path(base) + REPLACEMENT_SUFFIX) is None:
            disk.sync_dir(files.directory)  # the new data must not vanish again when its side is there
            disk.rename(fresh, files.side_path(base, suffix))
        else:
            disk.remove(fresh)
        disk.sync_dir(files.directory)
        done.append(codec.side_name(base, suffix) + REPLACEMENT_SUFFIX)
    return done


def _replacement_side(files: LogFiles, base: int, suffix: str) -> str:
    truth = files.codec.side_suffixes.index(suffix) in files.codec.authoritative_sides
    return files.side_path(base, suffix) + (REPLACEMENT_SUFFIX if truth else _REBUILDING_SUFFIX)


def _replacement_footer(files: LogFiles, base: int) -> str:
    return f"{files.side_path(base, files.codec.footer_suffix or '')}.tmp"
