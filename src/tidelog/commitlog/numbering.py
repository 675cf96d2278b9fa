"""[shell] A floor under the numbering, kept for the length of one step.

The next seq follows from the last record, or from the name of the last segment. A truncate that
leaves only holes below its mark has neither until the segment at the mark is born. For that
moment `.next_seq` holds the mark: an open that finds it goes on from there and takes it away.
"""

from __future__ import annotations

from tidelog.disk.atomic import read_all, remove_if_there, replace
from tidelog.disk.seam import Disk, join

FILE = ".next_seq"


def hold(disk: Disk, directory: str, seq: int) -> None:
    """Say durably that no seq below this one may be handed out again."""
    replace(disk, join(directory, FILE), b"%d\n" % seq)


def held(disk: Disk, directory: str) -> int:
    """The floor an interrupted step left behind; 0 where there is none. A torn file cannot be: it is replaced whole."""
    text = read_all(disk, join(directory, FILE))
    return int(text) if text is not None and text.strip().isdigit() else 0


def let_go(disk: Disk, directory: str) -> None:
    """The numbering stands on its own again."""
    if remove_if_there(disk, join(directory, FILE)):
        disk.sync_dir(directory)
