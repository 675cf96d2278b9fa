"""Table formats of exports: Delta tables, Iceberg tables, and Parquet files with a log of commits.

    interface    the interface of exports to tables, and their commits: files, counts, hashes, the position in the
                 topic. Read this first
    delta        a Delta table, through deltalake
    iceberg      a table of an Iceberg catalog, through pyiceberg; imported only for one
    parquet      a directory of Parquet files; writes and reads the files of all formats
    commit_log   the log of the commits of a Parquet table

A table is in a directory, or in a bucket of an object store (`disk.bucket_disk`); the formats see a `Disk` in both.
This module detects the place and the format of a table and opens it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Final, NamedTuple

from tidelog import addresses
from tidelog.disk.bucket_disk import BucketDisk
from tidelog.disk.interface import Disk, join
from tidelog.disk.posix import PosixDisk
from tidelog.disk.store_options import TABLE_SCHEMES, parse_store_address
from tidelog.errors import BadInput, NotFound
from tidelog.pipelines.table_formats import delta, interface
from tidelog.pipelines.table_formats.commit_log import COMMIT_LOG_DIR
from tidelog.pipelines.table_formats.interface import Format, OnStep, Table
from tidelog.pipelines.table_formats.parquet import ParquetTable

if TYPE_CHECKING:
    from tidelog.pipelines.table_formats.iceberg import CatalogTable

DEFAULT_FORMAT: Format = "delta"


class Place(NamedTuple):
    """Where a table, input files or staged rows are: a path of a disk, or a table of a catalog."""

    disk: Disk
    path: str
    catalog: CatalogTable | None = None


def find_place(text: str, what: str, storage_options: Mapping[str, str] | None = None) -> Place:
    """Return the place that an argument of a job names: a path, a `file:` address, or an address in an object store.

    Raises:
        BadInput: the address is not supported, or an option of the store is unknown.
    """
    scheme = addresses.scheme_of(text)
    if scheme in TABLE_SCHEMES:
        address, options = parse_store_address(text, storage_options)
        return Place(BucketDisk(address, options), address)
    if scheme == interface.ICEBERG_SCHEME:
        name = _iceberg().parse_address(text, storage_options)
        return Place(PosixDisk(), name.address, name)
    path = addresses.absolute_path(text, what)
    if storage_options:
        raise BadInput(f"{path} is a directory and has no storage options; nothing was done, leave them out")
    return Place(PosixDisk(), path)


def _iceberg() -> ModuleType:
    try:
        return import_module("tidelog.pipelines.table_formats.iceberg")
    except ImportError as error:
        raise BadInput(
            f"Iceberg tables need pyiceberg ({error}); nothing was done, pip install 'tidelog[iceberg]'"
        ) from None


def open_table(
    disk: Disk,
    path: str,
    format: Format | None = None,
    *,
    catalog: CatalogTable | None = None,
    write: bool,
    step: OnStep = interface.no_step,
) -> Table:
    """Open the table at `path`. The default format is that of the existing table, or DEFAULT_FORMAT for a new one."""
    if catalog is not None:
        if format not in (None, "iceberg"):
            raise BadInput(f"{path} is an Iceberg table, not a {format} one; nothing was done, leave the format out")
        table: Table = _iceberg().IcebergTable(catalog, write=write, step=step)
        return table
    if format == "iceberg":
        raise BadInput(
            f"{path} names no catalog, and an Iceberg table has one; nothing was done, write "
            "iceberg://CATALOG/NAMESPACE.TABLE, and the catalog's properties as storage options"
        )
    if isinstance(disk, BucketDisk):
        disk.check_bucket()
    else:
        path = addresses.local_directory(path, "the table")
    there = detect_format(disk, path)
    if there is not None and format is not None and there != format:
        raise BadInput(f"{path} is a {there} table, not a {format} one; nothing was changed, leave the format out")
    if there is None and not write:
        raise NotFound(f"there is no table at {path}; nothing was done, check the path")
    kind = ParquetTable if (there or format or DEFAULT_FORMAT) == "parquet" else delta.DeltaLakeTable
    return kind(disk, path, write=write, step=step)


def detect_format(disk: Disk, path: str) -> Format | None:
    """Return the format of an existing table; None if there is no table."""
    if disk.stat(join(path, delta.DELTA_LOG_DIR)) is not None:
        return "delta"
    stat = disk.stat(path)
    if stat is None or not stat.is_dir:
        return None
    if disk.stat(join(join(path, interface.OWN_DIR), COMMIT_LOG_DIR)) is not None:
        return "parquet"
    names = [name for name in interface.list_data_files(disk, path) if name.endswith(".parquet")]
    if isinstance(disk, BucketDisk):  # staged files of a Delta table without its first commit
        names = [name for name in names if interface.parse_file_range(name) is None]
    return "parquet" if names else None


_SEARCH_DEPTH: Final = 3  # directories between an argument and a table


def find_tables(text: str, storage_options: Mapping[str, str] | None = None) -> list[Place]:
    """Return the table that an argument names, or else the tables below it, by name: in directories, in a prefix of a
    bucket, or in a namespace or all namespaces of a catalog. The place itself if there is none."""
    if addresses.scheme_of(text) == interface.ICEBERG_SCHEME:
        tables = _iceberg().exported_tables(text, storage_options)
        if tables is not None:
            return [Place(PosixDisk(), table.address, table) for table in tables]
    place = find_place(text, "the table", storage_options)
    if place.catalog is not None or detect_format(place.disk, place.path) is not None:
        return [place]
    return list(_tables_below(place.disk, place.path, _SEARCH_DEPTH)) or [place]


def _tables_below(disk: Disk, path: str, depth: int) -> Iterator[Place]:
    stat = disk.stat(path)
    if stat is None or not stat.is_dir:
        return
    for name in sorted(name for name in disk.list_dir(path) if name[0] not in "_."):
        below = join(path, name)
        if detect_format(disk, below) is not None:
            yield Place(disk, below)
        elif depth > 1:
            yield from _tables_below(disk, below, depth - 1)
