"""[shell] Letting go of WAL files that a checkpoint covers."""

from __future__ import annotations

from contextlib import suppress

from tidelog.disk.atomic import remove_if_there
from tidelog.disk.seam import Disk, join
from tidelog.wal.names import FLAT, HINTS, directory, files, path_of, remove_proofs


def trim(disk: Disk, wal: str, key: str, first: int) -> int:
    """Remove the files of a group below number `first`, oldest first; return how many. The order matters: whatever a
    power cut leaves is a group without a hole. A group of which no file is left goes with its directory, and before its
    files CURRENT and NEWEST are removed, which say that there are some."""
    place = directory(wal, key)
    numbers = files(disk, place)
    stale = [number for number in numbers if number < first]
    if disk.stat(place) is None:
        return 0
    ended = len(stale) == len(numbers)
    if ended:
        remove_proofs(disk, place)
    for number in stale:
        remove_if_there(disk, path_of(place, number))
    hints = [remove_if_there(disk, join(place, name)) for name in HINTS if ended]
    if stale or any(hints):
        disk.sync_dir(place)
    if ended and key != FLAT:
        with suppress(OSError):  # something else lies in it
            disk.remove_dir(place)
            disk.sync_dir(wal)
    return len(stale)
