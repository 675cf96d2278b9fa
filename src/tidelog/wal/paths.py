"""Names and places of the WAL's files. The only module that knows them.

    wal/                              one shard: files directly here, shard key ""
      CURRENT                         names the newest file: if that one is gone, it was lost
      NEWEST-0000000000000412-1048576 the same in the name of an empty file, in case CURRENT is lost as well
      SYNCED                          up to where which file was synced when the shard was last idle
      SPARE                           the next file, filled with zeros ahead of time
      RESERVE                         disk space for deletes and checkpoints, released when the disk is full
      wal-0000000000000001.log
      wal-0000000000000412.log
    wal/shard-00/, wal/shard-01/ …    several shards: one directory each, shard key "shard-00" …

The number in a file's name is the ordinal of its first frame in the shard, from 1: numbers increase and are unique.
They have sixteen digits, or more if needed, and are parsed and sorted as numbers. Files with other names are ignored.

Also here: ranges of WAL files that are read in place (`WalRange`), and the removal of files that a checkpoint covers.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from tidelog.disk.durability import remove_if_exists
from tidelog.disk.interface import Disk, File, join
from tidelog.errors import BadInput, Damaged
from tidelog.types import Ints

SINGLE_SHARD_KEY: Final = ""
CURRENT: Final = "CURRENT"
SYNCED: Final = "SYNCED"
PREALLOCATED: Final = "SPARE"
RESERVE: Final = "RESERVE"
NEWEST: Final = "NEWEST"
DISPOSABLE_FILES: Final = (f"{CURRENT}.tmp", SYNCED, PREALLOCATED, f"{PREALLOCATED}.tmp")  # can be removed at any time
_FILE_PATTERN = re.compile(r"wal-(\d{16,20})\.log")
_NEWEST_PATTERN = re.compile(rf"{NEWEST}-(\d{{16,20}})-(\d{{1,20}})")
_SHARD_PATTERN = re.compile(r"shard-(\d{2,})")
_NUMBER_MAX: Final = (1 << 64) - 1
_STATEMENT_BYTES_MAX: Final = 128
_STATEMENT_PATTERN = re.compile(rb"(wal-\d{16,20}\.log)\n(?:bytes|synced)=(\d{20})\nxxh3=[0-9a-f]{16}\n")


class Position(NamedTuple):
    """A position in the files of a shard. Positions of one shard are ordered."""

    file_number: int
    pos: int


class CurrentFile(NamedTuple):
    """The content of CURRENT: the file existed, and is the newest unless a later one exists."""

    file_number: int
    size_max: int | None  # upper bound of its bytes; None: written by an earlier version, proves nothing


class Proof(NamedTuple):
    """The newest file that is proven to have existed."""

    first: int
    size: int  # upper bound of its bytes
    source: str  # the name of the file that proves it


def shard_keys(shards: int) -> list[str]:
    """The shard keys of a WAL with this many shards."""
    if shards < 1:
        raise BadInput(f"a WAL has at least one shard, not {shards}")
    return [SINGLE_SHARD_KEY] if shards == 1 else [f"shard-{number:02d}" for number in range(shards)]


def shard_for_topic(topic_id: int, shards: int) -> int:
    """The shard of a topic's frames, which is stable for a given number of shards. 0 is not a topic's id."""
    return xxh3_64_intdigest(topic_id.to_bytes(8, "little")) % shards if topic_id else 0


def shard_directory(wal: str, key: str) -> str:
    """The directory of a shard's files."""
    return join(wal, key) if key else wal


def list_shard_keys(disk: Disk, wal: str) -> list[str]:
    """The keys of all shards on disk, by number, regardless of the configured number of shards."""
    if disk.stat(wal) is None:
        return []
    keys = [SINGLE_SHARD_KEY] if list_file_numbers(disk, wal) or proven_current(disk, wal) else []
    numbers = []
    for name in disk.list_dir(wal):
        match = _SHARD_PATTERN.fullmatch(name)
        if match and name == f"shard-{int(match[1]):02d}":
            info = disk.stat(join(wal, name))
            if info is not None and info.is_dir:
                numbers.append(int(match[1]))
    return keys + [f"shard-{number:02d}" for number in sorted(numbers)]


def file_name(first: int) -> str:
    return f"wal-{first:016d}.log"


def parse_file_name(name: str) -> int | None:
    """The number in a file's name; None if it is not a WAL file's name."""
    match = _FILE_PATTERN.fullmatch(name)
    first = int(match[1]) if match else 0
    return first if 0 < first <= _NUMBER_MAX and file_name(first) == name else None


def file_path(directory: str, first: int) -> str:
    return join(directory, file_name(first))


def list_file_numbers(disk: Disk, directory: str) -> list[int]:
    """The numbers of a shard's files, in order; empty if the directory does not exist."""
    if disk.stat(directory) is None:
        return []
    return sorted(first for name in disk.list_dir(directory) if (first := parse_file_name(name)) is not None)


def encode_current(first: int, size: int) -> bytes:
    """The content of CURRENT. Its length is the same for all numbers of sixteen digits: it can be overwritten."""
    return _encode_statement(first, "bytes", size)


def encode_synced(synced: Position) -> bytes:
    """The content of SYNCED."""
    return _encode_statement(synced.file_number, "synced", synced.pos)


def _encode_statement(first: int, field: str, value: int) -> bytes:
    """A file's name and a number, with a checksum."""
    body = f"{file_name(first)}\n{field}={value:020d}\n".encode()
    return body + b"xxh3=%016x\n" % xxh3_64_intdigest(body)


def read_current(disk: Disk, directory: str) -> CurrentFile | None:
    """Read CURRENT; None if it is missing, invalid or unreadable."""
    content = _read_small_file(disk, join(directory, CURRENT))
    match = _STATEMENT_PATTERN.fullmatch(content)
    if match is None:
        first = parse_file_name(content.decode("ascii", "replace").removesuffix("\n"))
        return None if first is None else CurrentFile(first, None)
    first = parse_file_name(match[1].decode())
    if first is None or encode_current(first, int(match[2])) != content:
        return None
    return CurrentFile(first, int(match[2]))


def read_synced(disk: Disk, directory: str) -> Position | None:
    """Read SYNCED: every byte of the file before the position was synced; None if it is missing, invalid or
    unreadable, which proves nothing."""
    content = _read_small_file(disk, join(directory, SYNCED))
    match = _STATEMENT_PATTERN.fullmatch(content)
    first = parse_file_name(match[1].decode()) if match else None
    if match is None or first is None:
        return None
    synced = Position(first, int(match[2]))
    return synced if encode_synced(synced) == content else None


def _read_small_file(disk: Disk, path: str) -> bytes:
    """The first bytes of a file; none if it cannot be read."""
    try:
        file = disk.open(path)
        try:
            return file.read(0, _STATEMENT_BYTES_MAX)
        finally:
            file.close()
    except OSError:
        return b""


def current_file_number(disk: Disk, directory: str) -> int | None:
    """The number of the file that CURRENT names; None if it names none. The directory listing decides which file is the
    newest."""
    current = read_current(disk, directory)
    return None if current is None else current.file_number


def newest_name(first: int, size: int) -> str:
    """The name of the empty file with the same information as `encode_current`."""
    return f"{NEWEST}-{first:016d}-{size}"


def newest_names(disk: Disk, directory: str) -> dict[str, Proof]:
    """The proofs in the names of NEWEST files, by name. A writer keeps one; a crash may leave an older one."""
    if disk.stat(directory) is None:
        return {}
    proofs = {}
    for name in disk.list_dir(directory):
        match = _NEWEST_PATTERN.fullmatch(name)
        if match and name == newest_name(int(match[1]), int(match[2])):
            proofs[name] = Proof(int(match[1]), int(match[2]), name)
    return proofs


def proven_current(disk: Disk, directory: str) -> Proof | None:
    """The newest file that CURRENT or a NEWEST file proves to have existed; None if there is no proof."""
    proofs = list(newest_names(disk, directory).values())
    current = read_current(disk, directory)
    if current is not None and current.size_max is not None:
        proofs.append(Proof(current.file_number, current.size_max, CURRENT))
    return max(proofs, default=None)


def remove_proofs(disk: Disk, directory: str) -> None:
    """Durably remove CURRENT and the NEWEST files. After that the file that they name may be removed."""
    paths = [join(directory, name) for name in (CURRENT, *newest_names(disk, directory))]
    if sum(remove_if_exists(disk, path) for path in paths):
        disk.sync_dir(directory)


@dataclass(frozen=True, slots=True)
class WalRange:
    """A range of a WAL file. It keeps the file open, so it can be read after the file was removed."""

    file: File
    pos: int
    size: int

    def __len__(self) -> int:
        return self.size

    def is_followed_by(self, other: WalRange) -> bool:
        """Whether the other range begins where this one ends."""
        is_plain = type(self) is WalRange is type(other)
        return is_plain and self.file is other.file and self.pos + self.size == other.pos

    def read(self, lo: int, hi: int) -> bytes:
        """Bytes [lo, hi) of the range. Raises Damaged if they cannot be read."""
        return self._bytes(self.pos + lo, self.pos + hi)

    def _bytes(self, lo: int, hi: int) -> bytes:
        """Bytes [lo, hi) of the file."""
        try:
            content = self.file.read(lo, hi - lo)
        except OSError as error:
            raise Damaged(f"{self.file.path} cannot be read: {error}; repair the disk and open again") from error
        if len(content) != hi - lo:
            raise Damaged(f"{self.file.path} is shorter than the data written to it; run `tidelog check`")
        return content


@dataclass(frozen=True, slots=True)
class GatheredRange(WalRange):
    """Frames of one topic that have frames of others between them, read as if they were back to back."""

    starts: Ints  # of each frame, in the file
    ends: Ints  # of each frame, in the gathered bytes

    @classmethod
    def from_frames(cls, file: File, starts: Ints, sizes: Ints) -> GatheredRange:
        ends = sizes.cumsum()
        return cls(file, int(starts[0]), int(ends[-1]), starts, ends)

    def read(self, lo: int, hi: int) -> bytes:
        if lo >= hi:
            return b""
        first, last = int(np.searchsorted(self.ends, lo, "right")), int(np.searchsorted(self.ends, hi, "left"))
        starts, ends = self.starts[first : last + 1], self.ends[first : last + 1]
        before = int(self.ends[first - 1]) if first else 0
        sizes = np.diff(ends, prepend=before)
        base = int(starts[0])
        raw = memoryview(self._bytes(base, int(starts[-1] + sizes[-1])))
        bounds = zip((starts - base).tolist(), (starts - base + sizes).tolist(), strict=True)
        return b"".join([raw[start:end] for start, end in bounds])[lo - before : hi - before]


def remove_old_files(disk: Disk, wal: str, key: str, first: int) -> int:
    """Remove the files of a shard with numbers below `first`, oldest first; return how many. With this order a power
    cut leaves no hole in the shard. If no file is left, the directory is removed too. CURRENT and NEWEST, which prove
    that files existed, are removed before the files."""
    directory = shard_directory(wal, key)
    numbers = list_file_numbers(disk, directory)
    stale = [number for number in numbers if number < first]
    if disk.stat(directory) is None:
        return 0
    is_empty = len(stale) == len(numbers)
    if is_empty:
        remove_proofs(disk, directory)
    for number in stale:
        remove_if_exists(disk, file_path(directory, number))
    removed = [remove_if_exists(disk, join(directory, name)) for name in DISPOSABLE_FILES if is_empty]
    if stale or any(removed):
        disk.sync_dir(directory)
    if is_empty and key != SINGLE_SHARD_KEY:
        with suppress(OSError):  # it contains other files
            disk.remove_dir(directory)
            disk.sync_dir(wal)
    return len(stale)
