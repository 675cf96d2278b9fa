"""Which table a path is, and how it is opened."""

from __future__ import annotations

from tidelog.disk.seam import Disk, join
from tidelog.errors import BadInput, NotFound
from tidelog.pipelines import addresses, delta_table, tables
from tidelog.pipelines.parquet_table import ParquetTable
from tidelog.pipelines.tables import Format, Steps, Table


def opened(disk: Disk, path: str, format: Format | None = None, *, write: bool, step: Steps = tables.nothing) -> Table:
    """The table at `path`. A format that is not named is the one that is there, or parquet where nothing is."""
    path = addresses.directory(path, "the table")
    there = found(disk, path)
    if there is not None and format is not None and there != format:
        raise BadInput(f"{path} is a {there} table, not a {format} one; nothing was changed, leave the format out")
    if there is None and not write:
        raise NotFound(f"there is no table at {path}; nothing was done, check the path")
    kind = ParquetTable if (there or format or "parquet") == "parquet" else delta_table.DeltaLake
    return kind(disk, path, write=write, step=step)


def found(disk: Disk, path: str) -> Format | None:
    """What is there; None: nothing, or a directory without a table."""
    if disk.stat(join(path, delta_table.LOG)) is not None:
        return "delta"
    stat = disk.stat(path)
    if stat is None or not stat.is_dir:
        return None
    parquet = any(name.endswith(".parquet") for name in disk.names(path))
    return "parquet" if parquet or disk.stat(join(join(path, tables.OWN), "log")) is not None else None
