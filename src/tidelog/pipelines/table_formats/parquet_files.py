"""Parquet files: written by executors from Arrow batches, read by range of seqs.

A file is complete and synced when `close` returns; the driver syncs its name. Bytes are written through the disk
interface, so a full disk raises DiskFull. Row groups are small and have the least and the greatest seq, so reading a
range of a large file costs no more than the range. The footer of a file has enough to restore lost commits.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from tidelog.disk.interface import Disk, File, join
from tidelog.errors import Damaged, DiskFull
from tidelog.pipelines import row_hash
from tidelog.pipelines.table_formats.commits import DataFile
from tidelog.pipelines.table_formats.interface import QUARANTINE_DIR, parse_file_range
from tidelog.types import Buffer, Ints

METADATA_KEY: Final = b"tidelog"  # of the footer's metadata
ROW_GROUP_BYTES: Final = 16 << 20
NO_SEQ: Final = -1  # of a row whose seq is null
_SEQ_MAX: Final = (1 << 63) - 1
_DISK_FULL_ERRNOS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _ArrowFile:
    """A file for Arrow to write to, sequentially, through the disk interface."""

    def __init__(self, file: File) -> None:
        self._file: File | None = file
        self._at, self.closed = 0, False

    def detach(self) -> None:
        """Discard later writes: Arrow writes the end of a file when the object is collected."""
        self._file = None

    def write(self, data: Buffer) -> int:
        if self._file is not None:
            self._file.write(self._at, data)
        self._at += len(data)
        return len(data)

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        """No effect: writes are not buffered."""

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


class ParquetFileWriter:
    """Writes one Parquet file. The first batch creates it; `close` completes and syncs it, except for its name."""

    def __init__(self, disk: Disk, path: str, schema: pa.Schema, *, compute_hash: bool = True) -> None:
        self._disk, self._path, self._schema, self._compute_hash = disk, path, schema, compute_hash
        self._file: File | None = None
        self._out: _ArrowFile | None = None
        self._writer: pq.ParquetWriter | None = None
        self._buffered: list[pa.RecordBatch] = []
        self._size = self.rows = self.hash = 0

    def add(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        self.rows += batch.num_rows
        if self._compute_hash:
            self.hash = (self.hash + row_hash.sum_hashes(row_hash.hash_rows(batch))) & row_hash.MASK_64
        self._buffered.append(batch)
        self._size += batch.nbytes
        if self._size >= ROW_GROUP_BYTES:
            self._write_group()

    def end_group(self) -> None:
        """End the row group; the next batch starts another."""
        if self._buffered:
            self._write_group()

    def _write_group(self) -> None:
        table = pa.Table.from_batches(self._buffered, schema=self._schema)
        self._buffered, self._size = [], 0
        with _disk_full_errors(self._path):
            if self._writer is None:
                self._file = self._disk.open(self._path, "create")
                self._out = _ArrowFile(self._file)
                self._writer = pq.ParquetWriter(
                    pa.PythonFile(self._out, "w"),
                    self._schema,
                    compression="snappy",
                    # Bytes of records hardly ever repeat, and building a dictionary costs more than writing them.
                    use_dictionary=[name for name in self._schema.names if name not in ("data", "seq", "ts")],
                    write_statistics=[name for name in self._schema.names if name != "data"],
                )
            self._writer.write_table(table)

    def close(self, metadata: bytes | None) -> int:
        """Write the footer with this metadata, sync the file and return its size. A file may have no rows."""
        if self._buffered or self._writer is None:
            self._write_group()
        assert self._writer is not None, "a group creates it"
        assert self._file is not None, "a group creates it"
        with _disk_full_errors(self._path):
            if metadata is not None:
                self._writer.add_key_value_metadata({METADATA_KEY: metadata})
            self._writer.close()
            self._file.sync()
            size = self._file.size()
            self._file.close()
        return size

    def abandon(self) -> None:
        """Remove the unfinished file."""
        if self._out is not None:
            self._out.detach()
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
                self._disk.remove(self._path)


@contextmanager
def _disk_full_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL_ERRNOS:
            raise disk_full_error(path, error) from None
        raise


def disk_full_error(path: str, error: OSError) -> DiskFull:
    return DiskFull(
        f"{path} cannot be written ({error.strerror or error}); nothing was committed, free space and run it again: it "
        "goes on where it stopped"
    )


def read_metadata(disk: Disk, path: str) -> bytes | None:
    """Return the export's metadata in the footer of a file; None for files of other programs."""
    with suppress(pa.ArrowException, OSError), _open_parquet(disk, path) as file:
        found: Mapping[bytes, bytes] = file.metadata.metadata or {}
        return found.get(METADATA_KEY)
    return None


def _open_parquet(disk: Disk, path: str) -> Any:
    file = disk.open(path)
    try:
        return pq.ParquetFile(pa.BufferReader(pa.py_buffer(file.map())))
    finally:
        file.close()


def seq_bounds(disk: Disk, path: str) -> tuple[int, int, int] | None:
    """Return the number of rows of a file, their least and their greatest seq; None if there is no such file. Without
    statistics the bounds are those of all seqs."""
    try:
        file = _open_parquet(disk, path)
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError) as error:
        raise _unreadable_error(path, error) from None
    with file:
        low, high = _SEQ_MAX, -1
        for number in range(file.num_row_groups):
            found = _group_seq_bounds(file, number)
            if found is None:
                return file.metadata.num_rows, -_SEQ_MAX, _SEQ_MAX
            low, high = min(low, found[0]), max(high, found[1])
        return file.metadata.num_rows, low, high


def row_seqs(batch: pa.RecordBatch) -> Ints:
    """Return the seqs of rows; NO_SEQ for null."""
    if "seq" not in batch.schema.names:
        raise Damaged("a file of the table has no column seq; nothing was changed, it is none of this topic's")
    column = batch.column("seq").cast(pa.int64())
    found: Ints = (column.fill_null(NO_SEQ) if column.null_count else column).to_numpy()
    return found


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the columns of a schema, by name. A missing column is null, as for every reader of the table."""
    if batch.schema.equals(schema):
        return batch
    there = set(batch.schema.names)
    try:
        columns = [
            batch.column(field.name).cast(field.type) if field.name in there else pa.nulls(len(batch), field.type)
            for field in schema
        ]
    except (pa.ArrowException, KeyError) as error:
        raise Damaged(
            f"a file of the table has columns of other types ({error}); nothing was changed, remove what wrote it"
        ) from None
    return pa.RecordBatch.from_arrays(columns, names=schema.names)


def read_batches(
    disk: Disk, directory: str, names: Sequence[str], first: int | None, stop: int | None
) -> Iterator[pa.RecordBatch]:
    """Read the rows of files with seqs in [first, stop), a row group at a time; without bounds, all of them."""
    for name in names:
        path = join(directory, name)
        try:
            file = _open_parquet(disk, path)
        except FileNotFoundError:
            continue  # the comparison reports it: its rows are missing
        except (pa.ArrowException, OSError) as error:
            raise _unreadable_error(path, error) from None
        with file:
            for number in range(file.num_row_groups):
                if first is None or stop is None:
                    yield from without_views(file.read_row_group(number)).to_batches()
                elif not _group_is_outside(file, number, first, stop):
                    yield from _filter_seqs(without_views(file.read_row_group(number)), first, stop)


def without_views(table: pa.Table) -> pa.Table:
    """Replace Arrow's view types, which other programs write and which cannot be filtered."""
    schema = schema_without_views(table.schema)
    return table if schema.equals(table.schema) else table.cast(schema)


def schema_without_views(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_type(_type_without_views(field.type)) for field in schema], schema.metadata)


def _type_without_views(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_map(kind):
        return pa.map_(
            _type_without_views(kind.key_type), kind.item_field.with_type(_type_without_views(kind.item_type))
        )
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_type_without_views(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct(
            [kind.field(at).with_type(_type_without_views(kind.field(at).type)) for at in range(kind.num_fields)]
        )
    return kind


def _unreadable_error(path: str, error: Exception) -> Damaged:
    return Damaged(f"{path} cannot be read ({error}); nothing was changed, remove it and repair")


def _filter_seqs(table: pa.Table, first: int, stop: int) -> Iterator[pa.RecordBatch]:
    for batch in table.to_batches():
        seqs = row_seqs(batch)
        inside = (seqs >= first) & (seqs < stop)
        if inside.all():
            yield batch
        elif inside.any():
            yield batch.filter(pa.array(inside))


def _group_is_outside(file: Any, number: int, first: int, stop: int) -> bool:
    found = _group_seq_bounds(file, number)
    return found is not None and (found[1] < first or found[0] >= stop)


def _group_seq_bounds(file: Any, number: int) -> tuple[int, int] | None:
    """Return the least and the greatest seq of a row group; None without statistics, or if rows have no seq."""
    group = file.metadata.row_group(number)
    for at in range(group.num_columns):
        column = group.column(at)
        if column.path_in_schema == "seq":
            stats = column.statistics
            has_range = stats is not None and stats.has_min_max and stats.has_null_count and not stats.null_count
            return (int(stats.min), int(stats.max)) if has_range else None
    raise Damaged("a file of the table has no column seq; nothing was changed, it is none of this topic's")


def read_row_groups(disk: Disk, path: str) -> Iterator[pa.RecordBatch]:
    """Read the row groups of a file, each as one batch."""
    try:
        file = _open_parquet(disk, path)
    except (pa.ArrowException, OSError) as error:
        raise Damaged(f"{path} cannot be read ({error}); nothing more was written") from None
    with file:
        for number in range(file.num_row_groups):
            table = file.read_row_group(number).combine_chunks()
            yield from table.to_batches()


class FileFooter(msgspec.Struct, frozen=True):
    """What the footer of an exported file has of its commit."""

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


def read_footer(disk: Disk, path: str) -> FileFooter | None:
    """Return the footer of an exported file; None for files of other programs."""
    said = read_metadata(disk, path)
    with suppress(msgspec.DecodeError):
        return None if said is None else msgspec.json.decode(said, type=FileFooter)
    return None


def data_file_from_footer(disk: Disk, directory: str, name: str) -> DataFile | None:
    """Restore the commit's entry of a file from its footer; None for files of other programs, or if its quarantine is
    gone."""
    path = join(directory, name)
    stat, footer = disk.stat(path), read_footer(disk, path)
    # A program that reads an exported file with pyarrow and writes a part of it keeps the footer.
    if stat is None or footer is None or parse_file_range(name) != (footer.first, footer.stop):
        return None
    bad_name = f"{QUARANTINE_DIR}/{name}" if footer.bad else None
    if bad_name is not None and disk.stat(join(directory, bad_name)) is None:
        return None
    return DataFile(name, footer.first, footer.stop, footer.rows, stat.size, footer.hash, footer.bad, bad_name)
