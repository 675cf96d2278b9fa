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
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from tidelog.disk.atomic import remove_if_there
from tidelog.disk.seam import Disk, join
from tidelog.errors import BadInput

FLAT: Final = ""
CURRENT: Final = "CURRENT"
SPARE: Final = "SPARE"
RESERVE: Final = "RESERVE"
NEWEST: Final = "NEWEST"
HINTS: Final = (f"{CURRENT}.tmp", SPARE, f"{SPARE}.tmp")  # nothing hangs on these
_FILE = re.compile(r"wal-(\d{16,20})\.log")
_NEWEST = re.compile(rf"{NEWEST}-(\d{{16,20}})-(\d{{1,20}})")
_SHARD = re.compile(r"shard-(\d{2,})")
_NUMBER_MAX: Final = (1 << 64) - 1
_CURRENT_BYTES_MAX: Final = 128
_CURRENT = re.compile(rb"(wal-\d{16,20}\.log)\nbytes=(\d{20})\nxxh3=([0-9a-f]{16})\n")


class Position(NamedTuple):
    """A place in the files of a group. Positions of one group compare as the bytes follow each other."""

    first: int  # the number of the file
    pos: int


class Named(NamedTuple):
    """What CURRENT says: the file was made, and is the newest unless a later one is there."""

    first: int
    size: int | None  # bytes that it may hold at most; None: as earlier versions wrote it, which proves nothing


class Proof(NamedTuple):
    """The newest file that is proven to have been made."""

    first: int
    size: int  # bytes that it may hold at most
    source: str  # the name of the file that proves it


def keys(shards: int) -> list[str]:
    """The group keys of a WAL with this many shards."""
    if shards < 1:
        raise BadInput(f"a WAL has at least one shard, not {shards}")
    return [FLAT] if shards == 1 else [f"shard-{number:02d}" for number in range(shards)]


def shard_of(topic_id: int, shards: int) -> int:
    """Which shard takes a topic's frames: the same one as long as the number of shards is. 0 is no topic's id."""
    return xxh3_64_intdigest(topic_id.to_bytes(8, "little")) % shards if topic_id else 0


def directory(wal: str, key: str) -> str:
    """Where the files of a group lie."""
    return join(wal, key) if key else wal


def groups(disk: Disk, wal: str) -> list[str]:
    """The keys of all groups that are on disk, by number, whatever count of shards is configured now."""
    if disk.stat(wal) is None:
        return []
    found = []
    for name in disk.names(wal):
        known = _SHARD.fullmatch(name)
        if known and name == f"shard-{int(known[1]):02d}" and _is_dir(disk, join(wal, name)):
            found.append((int(known[1]), name))
    return [FLAT] * bool(files(disk, wal) or proven(disk, wal)) + [name for _, name in sorted(found)]


def _is_dir(disk: Disk, path: str) -> bool:
    found = disk.stat(path)
    return found is not None and found.is_dir


def file_name(first: int) -> str:
    return f"wal-{first:016d}.log"


def first_of(name: str) -> int | None:
    """The number in a file's name; None for a name that is not a WAL file's."""
    known = _FILE.fullmatch(name)
    first = int(known[1]) if known else 0
    return first if 0 < first <= _NUMBER_MAX and file_name(first) == name else None


def path_of(directory: str, first: int) -> str:
    return join(directory, file_name(first))


def files(disk: Disk, directory: str) -> list[int]:
    """The numbers of the files of a group, rising; none where the directory is not there."""
    if disk.stat(directory) is None:
        return []
    return sorted(first for name in disk.names(directory) if (first := first_of(name)) is not None)


def current_content(first: int, size: int) -> bytes:
    """What CURRENT holds: always as long for a name of sixteen digits, so that it can be overwritten in its place."""
    said = f"{file_name(first)}\nbytes={size:020d}\n".encode()
    return said + b"xxh3=%016x\n" % xxh3_64_intdigest(said)


def named(disk: Disk, directory: str) -> Named | None:
    """What CURRENT says; None where it is missing, garbage or unreadable."""
    try:
        file = disk.open(join(directory, CURRENT))
        try:
            said = file.read(0, _CURRENT_BYTES_MAX)
        finally:
            file.close()
    except OSError:
        return None
    known = _CURRENT.fullmatch(said)
    if known is None:
        first = first_of(said.decode("ascii", "replace").removesuffix("\n"))
        return None if first is None else Named(first, None)
    first = first_of(known[1].decode())
    if first is None or current_content(first, int(known[2])) != said:
        return None
    return Named(first, int(known[2]))


def current(disk: Disk, directory: str) -> int | None:
    """The file that CURRENT names; None where it names none. Which file is the newest the listing decides."""
    said = named(disk, directory)
    return None if said is None else said.first


def newest_name(first: int, size: int) -> str:
    """The name of the empty file that says the same as `current_content`."""
    return f"{NEWEST}-{first:016d}-{size}"


def newest_names(disk: Disk, directory: str) -> dict[str, Proof]:
    """What the names of NEWEST files say, by name. A writer keeps one; a crash may leave an older one."""
    if disk.stat(directory) is None:
        return {}
    found = {}
    for name in disk.names(directory):
        known = _NEWEST.fullmatch(name)
        if known and name == newest_name(int(known[1]), int(known[2])):
            found[name] = Proof(int(known[1]), int(known[2]), name)
    return found


def proven(disk: Disk, directory: str) -> Proof | None:
    """The newest file that CURRENT or a NEWEST file proves to have been made; None where nothing does."""
    proofs = list(newest_names(disk, directory).values())
    said = named(disk, directory)
    if said is not None and said.size is not None:
        proofs.append(Proof(said.first, said.size, CURRENT))
    return max(proofs, default=None)


def remove_proofs(disk: Disk, directory: str) -> None:
    """Remove CURRENT and the NEWEST files, durably: what they name may be removed after that."""
    paths = [join(directory, name) for name in (CURRENT, *newest_names(disk, directory))]
    if sum(remove_if_there(disk, path) for path in paths):
        disk.sync_dir(directory)
