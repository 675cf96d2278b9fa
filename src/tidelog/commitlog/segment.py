"""[shell] The files of one segment: sealed ones are mapped, the active one is written and read by file.

What is true when `Active.write` returns: the rows lie in the data file, every side file names
them, and with `durable` both survive a power cut. When it raises, none of that is visible and
the next write starts at the same byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from errno import ENOENT
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from tidelog.commitlog.cache import Lru
from tidelog.commitlog.codec import Batch, Chunk, Codec, Fault, Piece, Placed, Recovered, Salvage, Shape, placed
from tidelog.commitlog.storage import Storage
from tidelog.disk.atomic import read_all, remove_if_there
from tidelog.disk.latch import FULL, Latch
from tidelog.disk.seam import Disk, File, join
from tidelog.errors import DiskFull, Error, WriteFailed
from tidelog.formats import idx
from tidelog.formats.log_manifest import UNKNOWN, Entry
from tidelog.formats.rows import Rows, none
from tidelog.types import Buffer, Ints

SWAPPED = ".compacted"  # behind the name of what is about to take the place of a file


class Mapped:
    """A sealed data file, seen through its mapping."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.size = len(view)

    def fetch(self, lo: int, hi: int) -> memoryview:
        return self._view[lo:hi]


class Filed:
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
class Files:
    """Where the segments of one log lie and how many of them stay open."""

    disk: Disk
    directory: str
    codec: Codec
    maps: Lru[Mapped]
    indexes: Lru[list[Buffer | None]]

    def data(self, base: int) -> str:
        return join(self.directory, self.codec.data_name(base))

    def side(self, base: int, suffix: str) -> str:
        return join(self.directory, self.codec.side_name(base, suffix))

    def side_source(self, base: int, suffix: str) -> str:
        """Where to read a side file. An interrupted swap has the new data in place and a new side that cannot be
        derived still beside the old one: the new one belongs to the data."""
        path = self.side(base, suffix)
        if suffix in self.codec.side_suffixes and self.codec.side_suffixes.index(suffix) in self.codec.truths:
            fresh = path + SWAPPED
            if self.disk.stat(fresh) is not None and self.disk.stat(self.data(base) + SWAPPED) is None:
                return fresh
        return path

    def all_of(self, base: int) -> list[str]:
        """Every file a segment may have, in the order in which they may be removed: what makes the segment
        count as one goes first, so that a half-removed segment is swept and never served."""
        codec = self.codec
        extras = [suffix for suffix in (codec.extra_suffix, codec.birth_suffix) if suffix]
        sides = [self.side(base, suffix) for suffix in (*codec.side_suffixes, *codec.stale_suffixes, *extras)]
        return (
            [*sides[:1], self.data(base), *sides[1:]]
            if codec.sync_data_first and 0 in codec.truths
            else [self.data(base), *sides]
        )

    def remove(self, base: int) -> None:
        """Remove a segment; gone after a power cut too when this returns."""
        self.forget(base)
        for path in self.all_of(base):
            remove_if_there(self.disk, path)
        self.disk.sync_dir(self.directory)

    def forget(self, base: int) -> None:
        self.maps.drop(base)
        self.indexes.drop(base)


@dataclass(slots=True)
class Sealed:
    """An immutable segment. Its bytes never change; its `stop` is where the next segment begins."""

    files: Files
    base: int
    stop: int
    size: int  # bytes of data
    side_bytes: int
    extra: bytes | None = None
    override: tuple[bytes, ...] | None = None  # sides rebuilt in memory, when the log may not write
    verified: set[int] = field(default_factory=set)
    sealed_bytes: int = UNKNOWN  # how long the data was when it was last known to be whole
    truth_sides: int = 0  # a bit for each side file that it had and that its data does not give
    lost: str = ""  # why none of it can be read, where that is so
    salvage: Salvage | None = None  # what can be read, once damage was met
    _times: tuple[int, int] | None = None

    def shape(self) -> Shape:
        """The segment as its codec reads it: mapped data, mapped or cached index."""
        files = self.files
        data = files.maps.get(self.base, self._map)
        sides: Sequence[Buffer | None] = self.override or files.indexes.get(self.base, self._load_sides)
        return Shape(self.base, self.stop, data, sides[0] or b"", sides, self.extra, self.verified)

    def entry(self) -> Entry:
        """What the manifest says of it."""
        return Entry(self.base, self.sealed_bytes, self.truth_sides)

    def read(self, shape: Shape, first: int, stop: int, bytes_max: int) -> Chunk:
        """Records of [first, stop), as the codec reads them. Where it meets damage the segment is read once without its
        index, so that exactly what is damaged is reported and everything else is served."""
        if self.salvage is None and not self.lost:
            chunk = self.files.codec.read(shape, first, stop, bytes_max)
            if chunk.fault is None:
                return chunk
        found = self.salvage
        if found is None:
            found = self.salvage = self.examine(shape)
        end = stop
        for fault in found.faults:
            if fault.seq <= first < fault.resume:
                return Chunk(none(), first, fault._replace(seq=first))
            if fault.resume > fault.seq > first:
                end = min(end, fault.seq)
        rows = found.rows.between(first, end)
        count = max(int(np.searchsorted(np.cumsum(rows.data.size), bytes_max, "right")), 1)
        if count < len(rows):
            return Chunk(rows.part(0, count), int(rows.seq[count]))
        return Chunk(rows, end)

    def examine(self, shape: Shape) -> Salvage:
        """Everything that can be read of the segment by its records alone, and what cannot."""
        if self.lost:
            return Salvage(none(), [Fault(self.base, self.stop, 0, self.lost)])
        size = shape.data.size
        found = self.files.codec.salvage(shape.data.fetch(0, size), shape.sides, self.base, self.stop)
        last = found.faults[-1] if found.faults else None
        if size < self.sealed_bytes and (last is None or last.resume < self.stop):
            after = int(found.rows.seq[-1]) + 1 if len(found.rows) else self.base
            reason = f"the data has {size} bytes, {self.sealed_bytes} were written"
            return Salvage(found.rows, [*found.faults, Fault(after, max(self.stop, after), size, reason)])
        return found

    def forget(self) -> None:
        """Look at the files anew when it is read next."""
        self.files.forget(self.base)
        self.salvage, self.verified, self._times = None, set(), None

    def _map(self) -> Mapped:
        # A missing file reads as an empty one: the codec then reports each record that should be there.
        return Mapped(map_file(self.files.disk, self.files.data(self.base)) or memoryview(b""))

    def _load_sides(self) -> list[Buffer | None]:
        files = self.files
        return [map_file(files.disk, files.side_source(self.base, suffix)) for suffix in files.codec.side_suffixes]

    def forget_times(self) -> None:
        self._times = None

    def times(self) -> tuple[int, int] | None:
        """First and last record time in microseconds; None where the layout keeps none."""
        if self._times is None:
            self._times = self.files.codec.times(self.shape())
        return self._times


class Growing:
    """The index of the active segment in memory: pieces as they come, laid together when somebody looks."""

    def __init__(self, initial: bytes) -> None:
        self._fresh: list[Piece] = [initial]
        self._used = 0
        self._room: NDArray[np.uint8] = np.empty(max(1024, 2 * len(initial)), np.uint8)

    def add(self, piece: Piece) -> None:
        self._fresh.append(piece)

    def view(self) -> memoryview:
        """All of it. What was handed out earlier stays as it was: room is replaced when it grows, never resized."""
        if not self._fresh:
            return self._room[: self._used].data
        fresh = idx.lay(self._fresh)
        need = self._used + len(fresh)
        if need > len(self._room):
            room = np.empty(2 * need, np.uint8)
            room[: self._used] = self._room[: self._used]
            self._room = room
        self._room[self._used : need] = np.frombuffer(fresh, np.uint8)
        self._used, self._fresh = need, []
        return self._room[: self._used].data


def _bytes_of(piece: Piece) -> int:
    return piece.size if isinstance(piece, idx.Run) else len(piece)


class Active:
    """The one segment that grows."""

    def __init__(
        self,
        files: Files,
        latch: Latch,
        base: int,
        found: Recovered,
        *,
        data: File,
        sides: list[File | None],
        born_us: int,
        last_write_us: int,
    ) -> None:
        self._files, self._latch = files, latch
        self.base = base
        self.data, self._sides = Storage(data, found.end), sides
        self._side_sizes = [len(side) for side in found.sides]
        self._spilled = self._side_sizes[0]  # bytes of the index that its file has
        self._mark = found.mark
        self.next_seq = found.next_seq
        self.last_ts_us = found.last_ts_us
        self.born_us = born_us
        self.last_write_us = last_write_us
        self._index = Growing(found.sides[0])
        self._descriptors = Lock()  # held by whoever syncs beside the writer, so that no descriptor is closed under it
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

    def shape(self) -> Shape:
        index = self._index.view()
        return Shape(self.base, self.next_seq, Filed(self.data), index, [index, *self._rest()])

    def _rest(self) -> list[Buffer | None]:
        sizes = self._side_sizes[1:]
        return [None if file is None else file.read(0, size) for file, size in zip(self._sides[1:], sizes, strict=True)]

    def place(self, ts_us: int, batch: Batch) -> Placed:
        """A batch as it will be after the last record. Nothing is written; raises where the layout refuses it."""
        return self._files.codec.place(self.next_seq, ts_us, batch, self.size, self.base, self._mark)

    def append_rows(self, rows: Rows, *, durable: bool) -> None:
        """Write rows that are encoded for this codec, seqs and times as they are."""
        self.write(placed(self._files.codec, rows, self.size, self.base, self._mark), durable=durable)

    def write(self, made: Placed, *, durable: bool) -> None:
        """Write what was placed after the last record."""
        self.settle()
        try:
            for make in made.frames:
                self.data.stage_pieces(make())  # forgotten before the next is made
        except OSError as error:
            raise self.undo(error) from error
        self._finish(made, durable=durable)

    def finish_stream(self, rows: Rows, crcs: Ints, *, durable: bool) -> None:
        """Name a record whose bytes are staged."""
        made = placed(self._files.codec, rows, self.size, self.base, self._mark, crcs)
        self._finish(made, durable=durable)

    def _finish(self, made: Placed, *, durable: bool) -> None:
        """Write the sides of what is staged, make it durable if asked, and publish it."""
        codec, latch = self._files.codec, self._latch
        # The index must never name bytes that a power cut can take away.
        if durable and codec.sync_data_first:
            latch.sync(self.data)
        try:
            for file, size, piece in zip(self._sides, self._side_sizes, made.sides, strict=True):
                if piece and file is not None and isinstance(piece, bytes) and not self._late(file):
                    file.write(size, piece)
        except OSError as error:
            raise self.undo(error) from error
        if durable:
            self.sync(data=not codec.sync_data_first)
        self._side_sizes = [
            size + (_bytes_of(piece) if file is not None else 0)
            for file, size, piece in zip(self._sides, self._side_sizes, made.sides, strict=True)
        ]
        self._index.add(made.sides[0])
        if not self._files.codec.late_index:
            self._spilled = self._side_sizes[0]
        if self.size == 0 and self._files.codec.birth_suffix is None:
            self.born_us = made.first_ts_us  # what a restart would find
        self.data.commit()
        self._mark, self.next_seq, self.last_ts_us = made.mark, made.next_seq, made.last_ts_us

    def _late(self, side: File) -> bool:
        return side is self._sides[0] and self._files.codec.late_index

    def spill(self) -> None:
        """Bring the index file up to date. Nothing hangs on it: what it lacks is made again from the data."""
        file, size = self._sides[0], self._side_sizes[0]
        if file is not None and self._spilled < size:
            file.write(self._spilled, self._index.view()[self._spilled :])
            self._spilled = size

    def settle(self) -> None:
        """Cut what an interrupted write left behind, so that it can never be read as a record."""
        if self.data.touched:
            try:
                self.cut_back()
            except OSError as error:
                raise self._latch.trip(error, "rolling back an interrupted write") from error

    def sync(self, *, data: bool = True) -> None:
        """Make everything written so far survive a power cut: the data and the sides that cannot be derived from it."""
        with self._descriptors:
            self._sync(data=data)

    def _sync(self, *, data: bool = True) -> None:
        # The kernel tells of a failed sync once per descriptor: whoever comes second must hear it from the latch.
        self._latch.check_sync()
        if data:
            self._latch.sync(self.data)
        for number, file in enumerate(self._sides):
            if number in self._files.codec.truths and file is not None:
                self._latch.sync(file)

    def sync_beside(self) -> bool:
        """`sync` without the log's lock, beside appends; False where the segment was closed before it could begin."""
        with self._descriptors:
            if self._closed:
                return False
            self._sync()
            return True

    def sync_all(self, *, derived_only: bool) -> None:
        """Sync every file of the segment, derivable or not: what sealing needs."""
        with self._descriptors:
            self._latch.check_sync()
            if not derived_only:
                self._latch.sync(self.data)
            for number, file in enumerate(self._sides):
                if file is not None and not (derived_only and number in self._files.codec.truths):
                    self._latch.sync(file)

    def trim_sides(self) -> None:
        """Side files of exactly their size, before the segment is sealed: all written, nothing preallocated."""
        self.spill()
        for file, size in zip(self._sides, self._side_sizes, strict=True):
            if file is not None and file.size() != size:
                file.cut(size)

    def cut_back(self) -> None:
        """Back to the last published byte, durably."""
        self.data.roll_back()
        for file, size in zip(self._sides, [self._spilled, *self._side_sizes[1:]], strict=True):
            if file is not None and file.size() > size:
                file.cut(size)
        self.data.sync()
        for number, file in enumerate(self._sides):
            if number in self._files.codec.truths and file is not None:
                file.sync()

    def undo(self, error: OSError) -> Error:
        """Roll back what is staged; return the error to raise."""
        try:
            self.cut_back()
        except OSError as second:
            return self._latch.trip(second, f"rolling back after {error}")
        if error.errno in FULL:
            return DiskFull(f"{self.data.path}: no room on the device; the write was rolled back, free space and retry")
        if self._files.codec.latch_on_write_error:
            return self._latch.trip(error, "writing")
        return WriteFailed(f"{self.data.path}: {error}; the write was rolled back and nothing is visible, retry")

    def close(self) -> None:
        with self._descriptors:
            self._closed = True
            self.data.close()
            for file in self._sides:
                if file is not None:
                    file.close()

    @property
    def truth_sides(self) -> int:
        """A bit for each side file that it has and that its data does not give."""
        return sum(
            1 << number
            for number, file in enumerate(self._sides)
            if number in self._files.codec.truths and file is not None
        )

    def sealed(self, extra: bytes | None) -> Sealed:
        return Sealed(
            self._files,
            self.base,
            self.next_seq,
            self.size,
            self.side_bytes,
            extra,
            sealed_bytes=self.size,
            truth_sides=self.truth_sides,
        )


class Absent:
    """The data file of an active segment that is not there, for a log that may not make one."""

    descriptor = None

    def __init__(self, path: str) -> None:
        self.path = path

    def size(self) -> int:
        return 0

    def read(self, _pos: int, _size: int, /) -> bytes:
        return b""

    def write(self, _pos: int, _data: Buffer, /) -> None:
        self._refuse()

    def write_pieces(self, _pos: int, _pieces: Sequence[Buffer], /) -> None:
        self._refuse()

    def cut(self, _size: int, /) -> None:
        self._refuse()

    def reserve(self, _size: int, /) -> None:
        self._refuse()

    def sync(self) -> None:
        self._refuse()

    def _refuse(self) -> None:
        raise FileNotFoundError(ENOENT, "the file is missing", self.path)

    def map(self) -> memoryview:
        return memoryview(b"")

    def close(self) -> None:
        """Nothing is open."""


def birth_us(files: Files, base: int) -> int | None:
    """When a segment was created, as persisted; None where the codec keeps no such file."""
    suffix = files.codec.birth_suffix
    if suffix is None:
        return None
    text = read_all(files.disk, files.side(base, suffix))
    if text is not None and text.strip().isdigit():
        return int(text)
    # A log written elsewhere has no birth file: the index was last touched when its last record came.
    found = files.disk.stat(files.side(base, files.codec.side_suffixes[0]))
    return found.modified_ms * 1000 if found else None
