"""Table formats of exports: Parquet files with a log of commits, and Delta tables.

    interface   the interface of exports to tables, and their commits: files, counts, hashes, the position in the
                topic. Read this first
    parquet     a directory of Parquet files; writes and reads the files of both formats
    delta       a Delta table, through deltalake

This module detects the format of a table and opens it."""

from __future__ import annotations

from tidelog import addresses
from tidelog.disk.interface import Disk, join
from tidelog.errors import BadInput, NotFound
from tidelog.pipelines.table_formats import delta, interface
from tidelog.pipelines.table_formats.interface import Format, OnStep, Table
from tidelog.pipelines.table_formats.parquet import ParquetTable


def open_table(
    disk: Disk, path: str, format: Format | None = None, *, write: bool, step: OnStep = interface.no_step
) -> Table:
    """Open the table at `path`. The default format is that of the existing table, or parquet for a new one."""
    path = addresses.local_directory(path, "the table")
    there = detect_format(disk, path)
    if there is not None and format is not None and there != format:
        raise BadInput(f"{path} is a {there} table, not a {format} one; nothing was changed, leave the format out")
    if there is None and not write:
        raise NotFound(f"there is no table at {path}; nothing was done, check the path")
    kind = ParquetTable if (there or format or "parquet") == "parquet" else delta.DeltaLakeTable
    return kind(disk, path, write=write, step=step)


def detect_format(disk: Disk, path: str) -> Format | None:
    """Return the format of an existing table; None if there is no table."""
    if disk.stat(join(path, delta.DELTA_LOG_DIR)) is not None:
        return "delta"
    stat = disk.stat(path)
    if stat is None or not stat.is_dir:
        return None
    parquet = any(name.endswith(".parquet") for name in disk.list_dir(path))
    return "parquet" if parquet or disk.stat(join(join(path, interface.OWN_DIR), "log")) is not None else None
