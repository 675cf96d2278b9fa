"""The files of one segment: create, write, seal, replace, remove.

Sealed segments are mapped; the active one is written and read by file. When `ActiveSegment.write` returns, the rows are
in the data file, every side file covers them, and with `durable` both survive a power cut. When it raises, nothing of
it is visible and the next write starts at the same byte. Recovery relies on this order of syncs:

    seal     sync data and sides → write the footer (atomic) → the segment is complete
    create   write the `.created` file → create data and sides → sync the directory
    roll     seal, then create; a crash in between leaves a complete last segment, which keeps growing
    replace  remove the sides that can be derived → rename the data (commit) → rename the new sides

A later segment therefore exists on disk only after the one before it is complete. `prepare_replacement` writes new
files beside the old ones, where a full disk is noticed; `commit_replacement` only renames. An old index beside new data
would point at the wrong bytes, so a derived side is removed first and rebuilt after a crash. An authoritative side (the
index of laminar, the checksums of rustlog) stays until its new form replaces it. `<side>.compacted` without
`<data>.compacted` means committed: `finish_replacements` finishes it. With it, both are discarded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from errno import ENOENT
from functools import partial
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
    iter_chunks,
)
from tidelog.commitlog.metrics import LogCounters
from tidelog.commitlog.storage import Storage
from tidelog.disk.durability import (
    DISK_FULL_ERRNOS,
    Syncable,
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
from tidelog.formats.rows import Rows, ScanStop, empty_rows
from tidelog.formats.small_files import UNKNOWN_BYTES, ManifestEntry
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
        """Return the cached value of `key`, or None; it counts as used."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key]

    def drop(self, key: int) -> None:
        self._values.pop(key, None)

    def clear(self) -> None:
        self._values.clear()

    def values(self) -> list[V]:
        """Return the cached values; none of them counts as used."""
        return list(self._values.values())

    def __len__(self) -> int:
        return len(self._values)


REPLACEMENT_SUFFIX = ".compacted"  # after the name of the file to be replaced


class MmapReader:
    """A sealed data file, read through its mapping."""

    is_remote = False  # whether an access may wait for a network

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.size: int = len(view)

    def fetch(self, lo: int, hi: int) -> memoryview:
        return self._view[lo:hi]


class FileReader:
    """The committed bytes of a growing data file."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self.size = storage, storage.size

    def fetch(self, lo: int, hi: int) -> bytes:
        return self._storage.read(lo, min(hi, self.size) - lo)


def map_file(disk: Disk, path: str) -> memoryview | None:
    """Map a whole file without copying; None where there is none."""
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
    """Directory, disk and codec of a log, the caches that bound how many segments stay mapped or in memory, and the
    counters of its metrics."""

    disk: Disk
    directory: str
    codec: Codec
    mapped_data: LruCache[MmapReader]
    cached_sides: LruCache[list[Buffer | None]]
    counters: LogCounters = field(default_factory=LogCounters)

    def data_path(self, base: int) -> str:
        return join(self.directory, self.codec.data_name(base))

    def side_path(self, base: int, suffix: str) -> str:
        return join(self.directory, self.codec.side_name(base, suffix))

    def side_read_path(self, base: int, suffix: str) -> str:
        """Return the path to read a side file from. After an interrupted replacement the new data is in place while a
        new authoritative side is still beside the old one: the new one belongs to the data."""
        path = self.side_path(base, suffix)
        if (
            suffix in self.codec.side_suffixes
            and self.codec.side_suffixes.index(suffix) in self.codec.authoritative_sides
        ):
            new = path + REPLACEMENT_SUFFIX
            if self.disk.stat(new) is not None and self.disk.stat(self.data_path(base) + REPLACEMENT_SUFFIX) is None:
                return new
        return path

    def segment_paths(self, base: int) -> list[str]:
        """Return every file a segment may have, in removal order. The file that makes it count as a segment comes
        first, so a half-removed segment is swept and never served."""
        codec = self.codec
        extras = [suffix for suffix in (codec.footer_suffix, codec.created_suffix) if suffix]
        sides = [self.side_path(base, suffix) for suffix in (*codec.side_suffixes, *codec.stale_suffixes, *extras)]
        return (
            [*sides[:1], self.data_path(base), *sides[1:]]
            if codec.syncs_data_first and 0 in codec.authoritative_sides
            else [self.data_path(base), *sides]
        )

    def remove_segment(self, base: int) -> None:
        """Remove a segment durably."""
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
    complete_bytes: int = UNKNOWN_BYTES  # size of the data when it was last known to be complete
    authoritative_side_bits: int = 0  # a bit for each authoritative side file that the segment had
    lost_reason: str = ""  # why nothing of the segment can be read
    salvage: Salvage | None = None  # the readable records, once damage was found
    _time_range: tuple[int, int] | None = None

    def content(self) -> SegmentContent:
        """Return the segment as its codec reads it: mapped data, mapped or cached index."""
        files = self.files
        data = files.mapped_data.get(self.base, self._map_data)
        sides: Sequence[Buffer | None] = self.rebuilt_sides or files.cached_sides.get(self.base, self._load_sides)
        return SegmentContent(self.base, self.stop, data, sides[0] or b"", sides, self.footer, self.verified_chunks)

    def manifest_entry(self) -> ManifestEntry:
        """Describe the segment for the manifest."""
        return ManifestEntry(self.base, self.complete_bytes, self.authoritative_side_bits)

    def read(self, content: SegmentContent, first: int, stop: int, bytes_max: int) -> Chunk:
        """Read records of [first, stop) by the codec. After the first damage the segment is read once without its
        index, so that exactly the damaged records are reported and all others are served."""
        if self.salvage is None and not self.lost_reason:
            chunk = self.files.codec.read(content, first, stop, bytes_max)
            if chunk.fault is None:
                return chunk
        salvage = self.salvage
        if salvage is None:
            salvage = self.salvage = self.read_salvage(content)
        end = stop
        for fault in salvage.faults:
            if fault.seq <= first < fault.resume:
                return Chunk(empty_rows(), first, fault._replace(seq=first))
            if fault.resume > fault.seq > first:
                end = min(end, fault.seq)
        rows = salvage.rows.between(first, end)
        count = max(int(np.searchsorted(np.cumsum(rows.data.size), bytes_max, "right")), 1)
        if count < len(rows):
            return Chunk(rows.slice(0, count), int(rows.seq[count]))
        return Chunk(rows, end)

    def chunks(self, content: SegmentContent, bytes_max: int) -> Iterator[Chunk]:
        """Read the whole segment, about `bytes_max` of data per chunk. A chunk with a fault has no rows."""
        return iter_chunks(partial(self.read, content), self.base, self.stop, bytes_max)

    def read_salvage(self, content: SegmentContent) -> Salvage:
        """Find the readable records of the segment without its index, and the faults between them."""
        if self.lost_reason:
            return Salvage(empty_rows(), [Fault(self.base, self.stop, 0, self.lost_reason)])
        size = content.data.size
        salvage = self.files.codec.salvage(content.data.fetch(0, size), content.sides, self.base, self.stop)
        last = salvage.faults[-1] if salvage.faults else None
        if size < self.complete_bytes and (last is None or last.resume < self.stop):
            after = int(salvage.rows.seq[-1]) + 1 if len(salvage.rows) else self.base
            reason = f"the data has {size} bytes, {self.complete_bytes} were written"
            return Salvage(salvage.rows, [*salvage.faults, Fault(after, max(self.stop, after), size, reason)])
        return salvage

    def reset(self) -> None:
        """Forget everything that was read from the files."""
        self.files.drop_cached(self.base)
        self.salvage, self.verified_chunks, self._time_range = None, set(), None

    def _map_data(self) -> MmapReader:
        # A missing file reads as an empty one: the codec then reports every record as lost.
        return MmapReader(map_file(self.files.disk, self.files.data_path(self.base)) or memoryview(b""))

    def _load_sides(self) -> list[Buffer | None]:
        files = self.files
        return [map_file(files.disk, files.side_read_path(self.base, suffix)) for suffix in files.codec.side_suffixes]

    def time_range(self) -> tuple[int, int] | None:
        """Return the first and last record time in microseconds; None where the layout stores none."""
        if self._time_range is None:
            self._time_range = self.files.codec.time_range(self.content())
        return self._time_range


class AppendBuffer:
    """The index of the active segment in memory: appended pieces, joined when it is read."""

    def __init__(self, initial: bytes) -> None:
        self._pending: list[SidePiece] = [initial]
        self._used_bytes = 0
        self._buffer: NDArray[np.uint8] = np.empty(max(1024, 2 * len(initial)), np.uint8)

    def append(self, piece: SidePiece) -> None:
        self._pending.append(piece)

    def view(self) -> memoryview:
        """Return the whole index. Earlier views stay valid: a full buffer is replaced, never resized."""
        if not self._pending:
            return self._buffer[: self._used_bytes].data
        new = segment_index.encode_entries(self._pending)
        size = self._used_bytes + len(new)
        if size > len(self._buffer):
            buffer = np.empty(2 * size, np.uint8)
            buffer[: self._used_bytes] = self._buffer[: self._used_bytes]
            self._buffer = buffer
        self._buffer[self._used_bytes : size] = np.frombuffer(new, np.uint8)
        self._used_bytes, self._pending = size, []
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
        recovered: RecoveredSegment,
        *,
        data: File,
        sides: list[File | None],
        created_us: int,
        last_write_us: int,
    ) -> None:
        self._files, self._latch = files, latch
        self.base = base
        self.data, self._sides = Storage(data, recovered.end), sides
        self._side_sizes = [len(side) for side in recovered.sides]
        self._index_bytes_written = self._side_sizes[0]  # bytes of the index that its file has
        self._side_state = recovered.side_state
        self.next_seq = recovered.next_seq
        self.last_ts_us = recovered.last_ts_us
        self.created_us = created_us
        self.last_write_us = last_write_us
        self._index = AppendBuffer(recovered.sides[0])
        # A reader of a segment that another program has continued: the file is shorter than the recovered content.
        self._recovered_sides = {
            number: content
            for number, (content, file) in enumerate(zip(recovered.sides, sides, strict=True))
            if number and file is not None and file.size() < len(content)
        }
        self._fd_lock = Lock()  # held by a sync that runs beside the writer, so that no descriptor is closed under it
        self._closed = False

    @property
    def size(self) -> int:
        """Committed bytes of data."""
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
        if self._recovered_sides:
            return [self._recovered_sides.get(number) for number in range(1, len(self._sides))]
        sizes = self._side_sizes[1:]
        return [None if file is None else file.read(0, size) for file, size in zip(self._sides[1:], sizes, strict=True)]

    def encode_append(self, ts_us: int, batch: Batch) -> EncodedAppend:
        """Encode a batch for the end of the segment. Writes nothing; raises where the layout cannot store it."""
        return self._files.codec.encode_append(self.next_seq, ts_us, batch, self.size, self.base, self._side_state)

    def encode_rows(self, rows: Rows) -> EncodedAppend:
        """Place rows that are encoded for this codec at the end of the segment, with their seqs and times."""
        return build_append(self._files.codec, rows, self.size, self.base, self._side_state)

    def write(self, encoded: EncodedAppend, *, durable: bool) -> None:
        """Write an encoded append after the last record."""
        self.roll_back_interrupted()
        try:
            for make in encoded.writes:
                self.data.stage_buffers(make())  # released before the next one is built
        except OSError as error:
            raise self.roll_back_after(error) from error
        self._commit(encoded, durable=durable)

    def commit_stream(self, rows: Rows, crcs: Ints, *, durable: bool) -> None:
        """Commit a record whose bytes are staged already."""
        self._commit(
            build_append(self._files.codec, rows, self.size, self.base, self._side_state, crcs), durable=durable
        )

    def _commit(self, encoded: EncodedAppend, *, durable: bool) -> None:
        """Write the sides of the staged bytes, sync if `durable`, and publish the records."""
        codec = self._files.codec
        # An index entry must never point at bytes that a power cut can remove.
        if durable and codec.syncs_data_first:
            self.timed_sync(self.data)
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
            self.created_us = encoded.first_ts_us  # the same value that recovery would find
        self.data.commit()
        self._side_state, self.next_seq, self.last_ts_us = encoded.side_state, encoded.next_seq, encoded.last_ts_us

    def _is_deferred_index(self, side: File) -> bool:
        return side is self._sides[0] and self._files.codec.writes_index_on_seal

    def write_index(self) -> None:
        """Bring the index file up to date. Optional: recovery rebuilds missing entries from the data."""
        file, size = self._sides[0], self._side_sizes[0]
        if file is not None and self._index_bytes_written < size:
            file.write(self._index_bytes_written, self._index.view()[self._index_bytes_written :])
            self._index_bytes_written = size

    def roll_back_interrupted(self) -> None:
        """Cut the bytes of an interrupted write, so that they are never read as a record."""
        if self.data.has_uncommitted_bytes:
            try:
                self.truncate_to_committed()
            except OSError as error:
                raise self._latch.trip(error, "rolling back an interrupted write") from error

    def timed_sync(self, file: Syncable) -> None:
        """Sync one file of the segment and measure it; a failure latches the log."""
        with self._files.counters.timed_sync():
            self._latch.sync_or_trip(file)

    def sync(self, *, data: bool = True) -> None:
        """Make everything written so far durable: the data and the authoritative sides."""
        with self._fd_lock:
            self._sync(data=data)

    def _sync(self, *, data: bool = True) -> None:
        # The kernel reports a failed sync once per descriptor: the latch reports it to every later sync.
        self._latch.check_before_sync()
        if data:
            self.timed_sync(self.data)
        for number, file in enumerate(self._sides):
            if number in self._files.codec.authoritative_sides and file is not None:
                self.timed_sync(file)

    def sync_concurrently(self) -> bool:
        """`sync` beside appends, without the log's lock; False where the segment was closed before."""
        with self._fd_lock:
            if self._closed:
                return False
            self._sync()
            return True

    def sync_all(self, *, derived_only: bool) -> None:
        """Sync every file of the segment before it is sealed; with `derived_only` those that `sync` leaves out."""
        with self._fd_lock:
            self._latch.check_before_sync()
            if not derived_only:
                self.timed_sync(self.data)
            for number, file in enumerate(self._sides):
                if file is not None and not (derived_only and number in self._files.codec.authoritative_sides):
                    self.timed_sync(file)

    def trim_sides(self) -> None:
        """Cut side files to their used size before the segment is sealed, without preallocated bytes."""
        self.write_index()
        for file, size in zip(self._sides, self._side_sizes, strict=True):
            if file is not None and file.size() != size:
                file.truncate(size)

    def truncate_to_committed(self) -> None:
        """Cut the files back to the last committed byte, durably."""
        self.data.roll_back()
        for file, size in zip(self._sides, [self._index_bytes_written, *self._side_sizes[1:]], strict=True):
            if file is not None and file.size() > size:
                file.truncate(size)
        self.data.sync()
        for number, file in enumerate(self._sides):
            if number in self._files.codec.authoritative_sides and file is not None:
                file.sync()

    def roll_back_after(self, error: OSError) -> Error:
        """Roll back the staged bytes; return the error to raise."""
        self._files.counters.write_failures += 1
        try:
            self.truncate_to_committed()
        except OSError as second:
            return self._latch.trip(second, f"rolling back after {error}")
        if error.errno in DISK_FULL_ERRNOS:
            return DiskFull(f"{self.data.path}: the device is full; the write was rolled back, free space and retry")
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
        """A bit for each authoritative side file that exists."""
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
    """Stands for the missing data file of an active segment in a log that is open for reading only."""

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
        """No file is open."""


def created_us(files: LogFiles, base: int) -> int | None:
    """Return when a segment was created, from its `.created` file; None where the codec has no such file."""
    suffix = files.codec.created_suffix
    if suffix is None:
        return None
    text = read_file(files.disk, files.side_path(base, suffix))
    if text is not None and text.strip().isdigit():
        return int(text)
    # A log of another program has no such file: its index was last changed when its last record was written.
    stat = files.disk.stat(files.side_path(base, files.codec.side_suffixes[0]))
    return stat.modified_ms * 1000 if stat else None


def empty_segment(base: int, sides: int) -> RecoveredSegment:
    return RecoveredSegment(0, (b"",) * sides, base, 0, 0, 0, 0, ScanStop.END, "", [])


def create_segment(
    files: LogFiles, latch: WriteLatch, base: int, *, now_us: int, last_ts_us: int, lenient: bool = False
) -> ActiveSegment:
    """Create an empty active segment at `base`; its file names are durable on return."""
    codec, disk = files.codec, files.disk
    opened: list[File] = []
    try:
        if codec.created_suffix:
            created = _create_file(disk, files.side_path(base, codec.created_suffix))
            opened.append(created)
            created.write(0, b"%d\n" % now_us)
            sync_file(created)
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
    recovered = empty_segment(base, len(codec.side_suffixes))._replace(
        last_ts_us=last_ts_us, side_state=codec.initial_side_state(base)
    )
    data, *sides = opened
    return ActiveSegment(
        files, latch, base, recovered, data=data, sides=list(sides), created_us=now_us, last_write_us=now_us
    )


def missing_active_segment(files: LogFiles, latch: WriteLatch, base: int) -> ActiveSegment:
    """Return an empty active segment without files, for a read-only log that has none."""
    count = len(files.codec.side_suffixes)
    recovered = empty_segment(base, count)._replace(side_state=files.codec.initial_side_state(base))
    data = MissingFile(files.data_path(base))
    return ActiveSegment(files, latch, base, recovered, data=data, sides=[None] * count, created_us=0, last_write_us=0)


def _create_file(disk: Disk, path: str) -> File:
    """Create an empty file, also where an attempt on a full disk left one."""
    remove_if_exists(disk, path)
    return disk.open(path, "create")


def seal_segment(files: LogFiles, latch: WriteLatch, active: ActiveSegment, *, synced: bool) -> SealedSegment:
    """Make a segment complete and immutable. It stays the active one until the next is created. `synced`: its data and
    authoritative sides are durable already."""
    active.roll_back_interrupted()
    try:
        active.trim_sides()
    except OSError as error:
        raise latch.write_error(error, f"sealing segment {active.base}") from error
    active.sync_all(derived_only=synced)
    # Mapped, not read: the bytes are synced and do not change, so hashing a segment needs no copy of it.
    content = active.content()
    content.data = MmapReader(map_file(files.disk, files.data_path(active.base)) or memoryview(b""))
    # The codec verifies the frames first: bytes that rotted since they were written must not get a valid checksum.
    footer = files.codec.build_footer(content)
    if footer is not None and files.codec.footer_suffix:
        try:
            replace_file(files.disk, files.side_path(active.base, files.codec.footer_suffix), footer)
        except OSError as error:
            raise latch.write_error(error, f"sealing segment {active.base}") from error
    return active.to_sealed(footer)


_REBUILDING_SUFFIX = ".rebuilding"


def prepare_replacement(files: LogFiles, base: int, data: Buffer, sides: Sequence[bytes], footer: bytes | None) -> None:
    """Write the new files of a segment durably, under temporary names. On an error all of them are removed."""
    codec, disk = files.codec, files.disk
    finish_replacements(files, [base])  # an interrupted one must not be mistaken for this one
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
    """Remove the prepared files."""
    sides = [_replacement_side(files, base, suffix) for suffix in files.codec.side_suffixes]
    # The data last: an authoritative side without its data would read as committed.
    for path in (*sides, _replacement_footer(files, base), files.data_path(base) + REPLACEMENT_SUFFIX):
        with suppress(OSError):
            remove_if_exists(files.disk, path)
    with suppress(OSError):
        files.disk.sync_dir(files.directory)


def commit_replacement(files: LogFiles, base: int) -> None:
    """Rename the prepared files into place; durable on return."""
    codec, disk, directory = files.codec, files.disk, files.directory
    files.drop_cached(base)
    target = files.data_path(base)
    derived = [suffix for number, suffix in enumerate(codec.side_suffixes) if number not in codec.authoritative_sides]
    obsolete = [*derived, *codec.stale_suffixes, *([codec.footer_suffix] if codec.footer_suffix else [])]
    if obsolete:
        for suffix in obsolete:
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
    """Finish or discard interrupted replacements of authoritative sides; return the names of those files."""
    codec, disk = files.codec, files.disk
    finished: list[str] = []
    authoritative = [codec.side_suffixes[number] for number in sorted(codec.authoritative_sides)]
    for base, suffix in product(bases, authoritative):
        new = _replacement_side(files, base, suffix)
        if disk.stat(new) is None:
            continue
        if disk.stat(files.data_path(base) + REPLACEMENT_SUFFIX) is None:
            disk.sync_dir(files.directory)  # the new data must be durable before its side is
            disk.rename(new, files.side_path(base, suffix))
        else:
            disk.remove(new)
        disk.sync_dir(files.directory)
        finished.append(codec.side_name(base, suffix) + REPLACEMENT_SUFFIX)
    return finished


def _replacement_side(files: LogFiles, base: int, suffix: str) -> str:
    authoritative = files.codec.side_suffixes.index(suffix) in files.codec.authoritative_sides
    return files.side_path(base, suffix) + (REPLACEMENT_SUFFIX if authoritative else _REBUILDING_SUFFIX)


def _replacement_footer(files: LogFiles, base: int) -> str:
    return f"{files.side_path(base, files.codec.footer_suffix or '')}.tmp"
