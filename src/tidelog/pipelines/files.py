"""[shell] Parquet files: written by executors out of Arrow batches, read back by range.

A file is whole and synced when `close` returns; its name is what the driver makes durable. Bytes go through the seam
to the disk, so a disk that runs full is an error of ours. Row groups are small enough to be read one at a time, and
carry the least and greatest seq, so that a range of a large file costs no more than the range.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from tidelog.disk.seam import Disk, File, join
from tidelog.errors import Damaged, DiskFull
from tidelog.pipelines import digest
from tidelog.types import Buffer, Ints

KEY: Final = b"tidelog"  # of the footer's metadata
GROUP_BYTES: Final = 16 << 20
NO_SEQ: Final = -1  # of a row whose seq is null
_SEQ_MAX: Final = (1 << 63) - 1
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Out:
    """What Arrow writes to: a file of the seam, from its beginning to its end."""

    def __init__(self, file: File) -> None:
        self._file: File | None = file
        self._at, self.closed = 0, False

    def forget(self) -> None:
        """What is written from now on goes nowhere: Arrow ends a file when it is collected, wanted or not."""
        self._file = None

    def write(self, data: Buffer) -> int:
        if self._file is not None:
            self._file.write(self._at, data)
        self._at += len(data)
        return len(data)

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


class FileWriter:
    """A Parquet file in the making. The first batch makes it, `close` makes it whole, and durable but for its name."""

    def __init__(self, disk: Disk, path: str, schema: pa.Schema, *, hashed: bool = True) -> None:
        self._disk, self._path, self._schema, self._hashed = disk, path, schema, hashed
        self._file: File | None = None
        self._out: _Out | None = None
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.RecordBatch] = []
        self._size = self.rows = self.hash = 0

    def add(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        self.rows += batch.num_rows
        if self._hashed:
            self.hash = (self.hash + digest.total(digest.rows(batch))) & digest.MASK
        self._waiting.append(batch)
        self._size += batch.nbytes
        if self._size >= GROUP_BYTES:
            self._group()

    def end_group(self) -> None:
        """What was added so far is a row group of its own."""
        if self._waiting:
            self._group()

    def _group(self) -> None:
        table = pa.Table.from_batches(self._waiting, schema=self._schema)
        self._waiting, self._size = [], 0
        with _room(self._path):
            if self._writer is None:
                self._file = self._disk.open(self._path, "create")
                self._out = _Out(self._file)
                self._writer = pq.ParquetWriter(
                    pa.PythonFile(self._out, "w"),
                    self._schema,
                    compression="snappy",
                    # Bytes of records hardly ever repeat, and to find that out costs more than to write them.
                    use_dictionary=[name for name in self._schema.names if name not in ("data", "seq", "ts")],
                    write_statistics=[name for name in self._schema.names if name != "data"],
                )
            self._writer.write_table(table)

    def close(self, told: bytes | None) -> int:
        """End the file with these words about it; return its size. One without rows is a file as well."""
        if self._waiting or self._writer is None:
            self._group()
        assert self._writer is not None, "a group makes it"
        assert self._file is not None, "a group makes it"
        with _room(self._path):
            if told is not None:
                self._writer.add_key_value_metadata({KEY: told})
            self._writer.close()
            self._file.sync()
            size = self._file.size()
            self._file.close()
        return size

    def abandon(self) -> None:
        """Leave nothing behind."""
        if self._out is not None:
            self._out.forget()
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
                self._disk.remove(self._path)


class _room:  # noqa: N801  # used as a function
    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        """Nothing to do before."""

    def __exit__(self, _: object, error: object, __: object) -> None:
        if isinstance(error, OSError) and error.errno in _FULL:
            raise full(self._path, error) from None


def full(path: str, error: OSError) -> DiskFull:
    return DiskFull(
        f"{path} cannot be written ({error.strerror or error}); nothing was committed, make room and run it again: it "
        "goes on where it stopped"
    )


def told(disk: Disk, path: str) -> bytes | None:
    """What the footer of a file says of it; None where it is none of ours."""
    with suppress(pa.ArrowException, OSError), _opened(disk, path) as file:
        found: Mapping[bytes, bytes] = file.metadata.metadata or {}
        return found.get(KEY)
    return None


def _opened(disk: Disk, path: str) -> Any:
    file = disk.open(path)
    try:
        return pq.ParquetFile(pa.BufferReader(pa.py_buffer(file.map())))
    finally:
        file.close()


def bounds(disk: Disk, path: str) -> tuple[int, int, int] | None:
    """How many rows a file has and between which seqs they are, both included; None where there is no such file. A
    file whose row groups do not say it may hold every seq."""
    try:
        file = _opened(disk, path)
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None
    with file:
        low, high = _SEQ_MAX, -1
        for number in range(file.num_row_groups):
            found = _seq_bounds(file, number)
            if found is None:
                return file.metadata.num_rows, -_SEQ_MAX, _SEQ_MAX
            low, high = min(low, found[0]), max(high, found[1])
        return file.metadata.num_rows, low, high


def seqs_of(batch: pa.RecordBatch) -> Ints:
    """The seqs of rows, NO_SEQ where a row has none."""
    if "seq" not in batch.schema.names:
        raise Damaged("a file of the table has no column seq; nothing was changed, it is none of this topic's")
    column = batch.column("seq").cast(pa.int64())
    found: Ints = (column.fill_null(NO_SEQ) if column.null_count else column).to_numpy()
    return found


def conformed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of a schema, by name. One that a file does not have is null, as for every reader of the table."""
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


def batches(
    disk: Disk, directory: str, names: Sequence[str], first: int | None, stop: int | None
) -> Iterator[pa.RecordBatch]:
    """The rows of some files with seqs in [first, stop), a row group at a time; without bounds, all of them."""
    for name in names:
        path = join(directory, name)
        try:
            file = _opened(disk, path)
        except FileNotFoundError:
            continue  # told by whoever compares: its rows are missing
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(path, error) from None
        with file:
            for number in range(file.num_row_groups):
                if first is None or stop is None:
                    yield from plain(file.read_row_group(number)).to_batches()
                elif not _outside(file, number, first, stop):
                    yield from _inside(plain(file.read_row_group(number)), first, stop)


def plain(table: pa.Table) -> pa.Table:
    """The same rows without views, which other programs write and which rows cannot be chosen from."""
    schema = plain_schema(table.schema)
    return table if schema.equals(table.schema) else table.cast(schema)


def plain_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_type(_plain(field.type)) for field in schema], schema.metadata)


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_map(kind):
        return pa.map_(_plain(kind.key_type), kind.item_field.with_type(_plain(kind.item_type)))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([kind.field(at).with_type(_plain(kind.field(at).type)) for at in range(kind.num_fields)])
    return kind


def _unreadable(path: str, error: Exception) -> Damaged:
    return Damaged(f"{path} cannot be read ({error}); nothing was changed, remove it and repair")


def _inside(table: pa.Table, first: int, stop: int) -> Iterator[pa.RecordBatch]:
    for batch in table.to_batches():
        seqs = seqs_of(batch)
        inside = (seqs >= first) & (seqs < stop)
        if inside.all():
            yield batch
        elif inside.any():
            yield batch.filter(pa.array(inside))


def _outside(file: Any, number: int, first: int, stop: int) -> bool:
    found = _seq_bounds(file, number)
    return found is not None and (found[1] < first or found[0] >= stop)


def _seq_bounds(file: Any, number: int) -> tuple[int, int] | None:
    """The least and the greatest seq of a row group; None where it does not say, or where rows have none."""
    group = file.metadata.row_group(number)
    for at in range(group.num_columns):
        column = group.column(at)
        if column.path_in_schema == "seq":
            stats = column.statistics
            told = stats is not None and stats.has_min_max and stats.has_null_count and not stats.null_count
            return (int(stats.min), int(stats.max)) if told else None
    raise Damaged("a file of the table has no column seq; nothing was changed, it is none of this topic's")


def groups(disk: Disk, path: str) -> Iterator[pa.RecordBatch]:
    """A file's row groups, each as one batch."""
    try:
        file = _opened(disk, path)
    except (pa.ArrowException, OSError) as error:
        raise Damaged(f"{path} cannot be read ({error}); nothing more was written") from None
    with file:
        for number in range(file.num_row_groups):
            table = file.read_row_group(number).combine_chunks()
            yield from table.to_batches()
