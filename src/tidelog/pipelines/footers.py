"""What a file says of itself, in its own footer: enough to find the commits again where their log is gone."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from tidelog.disk.seam import Disk, join
from tidelog.pipelines import files
from tidelog.pipelines.commits import DataFile
from tidelog.pipelines.tables import QUARANTINE, range_of


class Footer(msgspec.Struct, frozen=True):
    topic: str
    epoch: int
    first: int
    stop: int
    run: str  # rises from one commit to the next
    schema: str
    shape: str
    rows: int = 0
    hash: int = 0
    bad: int = 0
    transform: str | None = None


def read(disk: Disk, path: str) -> Footer | None:
    """None where a file is none of ours."""
    said = files.told(disk, path)
    with suppress(msgspec.DecodeError):
        return None if said is None else msgspec.json.decode(said, type=Footer)
    return None


def held(disk: Disk, directory: str, name: str) -> DataFile | None:
    """A file as its commit had it; None where it is none of ours, or what belongs to it is gone."""
    path = join(directory, name)
    stat, footer = disk.stat(path), read(disk, path)
    # A program that reads a file of ours with pyarrow and writes a part of it keeps the footer.
    if stat is None or footer is None or range_of(name) != (footer.first, footer.stop):
        return None
    bad_name = f"{QUARANTINE}/{name}" if footer.bad else None
    if bad_name is not None and disk.stat(join(directory, bad_name)) is None:
        return None
    return DataFile(name, footer.first, footer.stop, footer.rows, stat.size, footer.hash, footer.bad, bad_name)
