"""Where the files of the WAL lie. The only module that knows their names.

    wal/                              one shard: files directly here, group key ""
      CURRENT                         names the newest file: where that one is gone, it was lost
      NEWEST-0000000000000412-1048576 the same in the name of an empty file, should CURRENT be lost as well
      SPARE                           zeros, made ahead of time, of which the next file is made
      RESERVE                         room that is given up where the disk is full, for deletes and checkpoints
      wal-0000000000000001.log
      wal-0000000000000412.log
    wal/shard-00/, wal/shard-01/ …    several shards: one directory each, group key "shard-00" …

The number in a file's name is the ordinal of its first frame in the group, from 1, so numbers
rise and no two files ever share one. Sixteen digits, more where the number needs them: names are
read as numbers and sorted as numbers. Names we did not make are left alone.

[shell] Bytes of a WAL file that are read where they are, instead of being kept in memory.

[shell] Letting go of WAL files that a checkpoint covers.
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
PREALLOCATED: Final = "SPARE"
RESERVE: Final = "RESERVE"
NEWEST: Final = "NEWEST"
DISPOSABLE_FILES: Final = (f"{CURRENT}.tmp", PREALLOCATED, f"{PREALLOCATED}.tmp")  # nothing hangs on these
_FILE_PATTERN = re.compile(r"wal-(\d{16,20})\.log")
_NEWEST = re.compile(rf"{NEWEST}-(\d{{16,20}})-(\d{{1,20}})")
_SHARD_PATTERN = re.compile(r"shard-(\d{2,})")
_NUMBER_MAX: Final = (1 << 64) - 1
_CURRENT_BYTES_MAX: Final = 128
_CURRENT_PATTERN = re.compile(rb"(wal-\d{16,20}\.log)\nbytes=(\d{20})\nxxh3=([0-9a-f]{16})\n")


class Position(NamedTuple):
    """A place in the files of a group. Positions of one group compare as the bytes follow each other."""

    file_number: int  # the number of the file
    pos: int


class CurrentFile(NamedTuple):
    """What CURRENT says: the file was made, and is the newest unless a later one is there."""

    file_number: int
    size_max: int | None  # bytes that it may hold at most; None: as earlier versions wrote it, which proves nothing


class Proof(NamedTuple):
    """The newest file that is proven to have been made."""

    first: int
    size: int  # bytes that it may hold at most
    source: str  # the name of the file that proves it


def shard_keys(shards: int) -> list[str]:
    """The group keys of a WAL with this many shards."""
    if shards < 1:
        raise BadInput(f"a WAL has at least one shard, not {shards}")
    return [SINGLE_SHARD_KEY] if shards == 1 else [f"shard-{number:02d}" for number in range(shards)]


def shard_for_topic(topic_id: int, shards: int) -> int:
    """Which shard takes a topic's frames: the same one as long as the number of shards is. 0 is no topic's id."""
    return xxh3_64_intdigest(topic_id.to_bytes(8, "little")) % shards if topic_id else 0


def shard_directory(wal: str, key: str) -> str:
    """Where the files of a group lie."""
    return join(wal, key) if key else wal


def list_shard_keys(disk: Disk, wal: str) -> list[str]:
    """The keys of all groups that are on disk, by number, whatever count of shards is configured now."""
    if disk.stat(wal) is None:
        return []
    found = []
    for name in disk.list_dir(wal):
        known = _SHARD_PATTERN.fullmatch(name)
        if known and name == f"shard-{int(known[1]):02d}" and _is_dir(disk, join(wal, name)):
            found.append((int(known[1]), name))
    return [SINGLE_SHARD_KEY] * bool(list_file_numbers(disk, wal) or proven_current(disk, wal)) + [
        name for _, name in sorted(found)
    ]


def _is_dir(disk: Disk, path: str) -> bool:
    found = disk.stat(path)
    return found is not None and found.is_dir


def file_name(first: int) -> str:
    return f"wal-{first:016d}.log"


def parse_file_name(name: str) -> int | None:
    """The number in a file's name; None for a name that is not a WAL file's."""
    known = _FILE_PATTERN.fullmatch(name)
    first = int(known[1]) if known else 0
    return first if 0 < first <= _NUMBER_MAX and file_name(first) == name else None


def file_path(directory: str, first: int) -> str:
    return join(directory, file_name(first))


def list_file_numbers(disk: Disk, directory: str) -> list[int]:
    """The numbers of the files of a group, rising; none where the directory is not there."""
    if disk.stat(directory) is None:
        return []
    return sorted(first for name in disk.list_dir(directory) if (first := parse_file_name(name)) is not None)


def encode_current(first: int, size: int) -> bytes:
    """What CURRENT holds: always as long for a name of sixteen digits, so that it can be overwritten in its place."""
    said = f"{file_name(first)}\nbytes={size:020d}\n".encode()
    return said + b"xxh3=%016x\n" % xxh3_64_intdigest(said)


def read_current(disk: Disk, directory: str) -> CurrentFile | None:
    """What CURRENT says; None where it is missing, garbage or unreadable."""
    try:
        file = disk.open(join(directory, CURRENT))
        try:
            said = file.read(0, _CURRENT_BYTES_MAX)
        finally:
            file.close()
    except OSError:
        return None
    known = _CURRENT_PATTERN.fullmatch(said)
    if known is None:
        first = parse_file_name(said.decode("ascii", "replace").removesuffix("\n"))
        return None if first is None else CurrentFile(first, None)
    first = parse_file_name(known[1].decode())
    if first is None or encode_current(first, int(known[2])) != said:
        return None
    return CurrentFile(first, int(known[2]))


def current_file_number(disk: Disk, directory: str) -> int | None:
    """The file that CURRENT names; None where it names none. Which file is the newest the listing decides."""
    said = read_current(disk, directory)
    return None if said is None else said.file_number


def newest_name(first: int, size: int) -> str:
    """The name of the empty file that says the same as `current_content`."""
    return f"{NEWEST}-{first:016d}-{size}"


def newest_names(disk: Disk, directory: str) -> dict[str, Proof]:
    """What the names of NEWEST files say, by name. A writer keeps one; a crash may leave an older one."""
    if disk.stat(directory) is None:
        return {}
    found = {}
    for name in disk.list_dir(directory):
        known = _NEWEST.fullmatch(name)
        if known and name == newest_name(int(known[1]), int(known[2])):
            found[name] = Proof(int(known[1]), int(known[2]), name)
    return found


def proven_current(disk: Disk, directory: str) -> Proof | None:
    """The newest file that CURRENT or a NEWEST file proves to have been made; None where nothing does."""
    proofs = list(newest_names(disk, directory).values())
    said = read_current(disk, directory)
    if said is not None and said.size_max is not None:
        proofs.append(Proof(said.file_number, said.size_max, CURRENT))
    return max(proofs, default=None)


def remove_proofs(disk: Disk, directory: str) -> None:
    """Remove CURRENT and the NEWEST files, durably: what they name may be removed after that."""
    paths = [join(directory, name) for name in (CURRENT, *newest_names(disk, directory))]
    if sum(remove_if_exists(disk, path) for path in paths):
        disk.sync_dir(directory)


@dataclass(frozen=True, slots=True)
class WalRange:
    """A stretch of a WAL file. Holding it keeps the file open, so it can be read after the file's name is gone."""

    file: File
    pos: int
    size: int

    def __len__(self) -> int:
        return self.size

    def is_followed_by(self, other: WalRange) -> bool:
        """Whether the other one begins where this one ends."""
        is_plain = type(self) is WalRange is type(other)
        return is_plain and self.file is other.file and self.pos + self.size == other.pos

    def read(self, lo: int, hi: int) -> bytes:
        """Bytes [lo, hi) of it. Damaged where the disk does not give them back."""
        return self._bytes(self.pos + lo, self.pos + hi)

    def _bytes(self, lo: int, hi: int) -> bytes:
        """Bytes [lo, hi) of the file."""
        try:
            content = self.file.read(lo, hi - lo)
        except OSError as error:
            raise Damaged(f"{self.file.path} cannot be read: {error}; mend the disk and open again") from error
        if len(content) != hi - lo:
            raise Damaged(f"{self.file.path} is shorter than what was written to it; run `tidelog check`")
        return content


@dataclass(frozen=True, slots=True)
class GatheredRange(WalRange):
    """Frames of one topic with frames of others between them, as if they were back to back."""

    starts: Ints  # of each frame, in the file
    ends: Ints  # of each frame, in what this reads as

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
        places = zip((starts - base).tolist(), (starts - base + sizes).tolist(), strict=True)
        return b"".join([raw[at:end] for at, end in places])[lo - before : hi - before]


def remove_old_files(disk: Disk, wal: str, key: str, first: int) -> int:
    """Remove the files of a group below number `first`, oldest first; return how many. The order matters: whatever a
    power cut leaves is a group without a hole. A group of which no file is left goes with its directory, and before its
    files CURRENT and NEWEST are removed, which say that there are some."""
    place = shard_directory(wal, key)
    numbers = list_file_numbers(disk, place)
    stale = [number for number in numbers if number < first]
    if disk.stat(place) is None:
        return 0
    ended = len(stale) == len(numbers)
    if ended:
        remove_proofs(disk, place)
    for number in stale:
        remove_if_exists(disk, file_path(place, number))
    hints = [remove_if_exists(disk, join(place, name)) for name in DISPOSABLE_FILES if ended]
    if stale or any(hints):
        disk.sync_dir(place)
    if ended and key != SINGLE_SHARD_KEY:
        with suppress(OSError):  # something else lies in it
            disk.remove_dir(place)
            disk.sync_dir(wal)
    return len(stale)
