"""A table as a directory of Parquet files, which Spark reads directly, with a commit log beside them.

    table/
      part-<first>-<stop>-….parquet      committed: seen by readers of the directory
      _part-….parquet                    staged, not committed; readers skip names that start with `_`
      _tidelog/log/00000000000000000017.json
      _tidelog/lock
      _quarantine/

A commit has these steps, in this order:

    1  staged files               verify their lengths, sync their names
    2  log/<n>.json               write and sync the commit (`commit_log`; in a bucket a write on condition). This step
                                  decides: nothing happened before it, all after it
    3  _part-… → part-…           rename and sync
    4  replaced files             remove; files of other programs are renamed to _foreign-…

Opening the table for writing repeats 3 and 4 of the newest commit and removes staged files without a commit. A reader
of the bare directory may see a part of the newest commit between 2 and 3, and rows twice while a repair is at 3 or 4.

If the log or its end is gone, the footers of the files have their topic and range. Consecutive files become one commit.
Files after a missing range are leftovers: an export removes them when the topic still has their records, and exports
these records again.

Parquet files: written by executors from Arrow batches, read by range of seqs.

A file is complete and synced when `close` returns; the driver syncs its name. Bytes are written through the disk
interface, so a full disk raises DiskFull. Row groups are small and have the least and the greatest seq, so reading a
range of a large file costs no more than the range. The footer of a file has enough to restore lost commits.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from tidelog.disk.bucket_disk import BucketDisk
from tidelog.disk.interface import Disk, File, join
from tidelog.errors import Damaged, Error
from tidelog.pipelines import partitions, row_hash
from tidelog.pipelines.record_mapping import RecordMapping
from tidelog.pipelines.table_formats import interface
from tidelog.pipelines.table_formats.commit_log import open_commit_log
from tidelog.pipelines.table_formats.interface import (
    QUARANTINE_DIR,
    Commit,
    DataFile,
    Leftover,
    OnStep,
    TableDirectory,
    TableScan,
    parse_file_range,
)
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
        self.rows = self.buffered_bytes = self.hash = 0

    def add(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        self.rows += batch.num_rows
        if self._compute_hash:
            self.hash = (self.hash + row_hash.sum_hashes(row_hash.hash_rows(batch))) & row_hash.MASK_64
        self._buffered.append(batch)
        self.buffered_bytes += batch.nbytes
        if self.buffered_bytes >= ROW_GROUP_BYTES:
            self._write_group()

    def end_group(self) -> None:
        """End the row group; the next batch starts another."""
        if self._buffered:
            self._write_group()

    def _write_group(self) -> None:
        table = pa.Table.from_batches(self._buffered, schema=self._schema)
        self._buffered, self.buffered_bytes = [], 0
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

    def stats(self) -> str:
        """Return the statistics of a closed file, as a Delta table has them."""
        assert self._writer is not None, "it was closed"
        return encode_stats(self._writer.writer.metadata, self._schema)

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
            raise interface.disk_full_error(path, error) from None
        raise


def read_metadata(disk: Disk, path: str) -> bytes | None:
    """Return the export's metadata in the footer of a file; None for files of other programs."""
    with suppress(pa.ArrowException, OSError), _open_parquet(disk, path) as file:
        found: Mapping[bytes, bytes] = file.metadata.metadata or {}
        return found.get(METADATA_KEY)
    return None


def _open_parquet(disk: Disk, path: str) -> Any:
    if isinstance(disk, BucketDisk):
        return pq.ParquetFile(disk.open_input(path), pre_buffer=True)
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
        raise _unreadable_error(disk, path, error) from None
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
    disk: Disk,
    directory: str,
    names: Sequence[str],
    first: int | None,
    stop: int | None,
    *,
    with_partitions: bool = True,
) -> Iterator[pa.RecordBatch]:
    """Read the rows of files with seqs in [first, stop), a row group at a time; without bounds, all of them.

    Args:
        with_partitions: with the columns that are in the path of a file.
    """
    for name in names:
        path = join(directory, name)
        try:
            file = _open_parquet(disk, path)
        except FileNotFoundError:
            continue  # the comparison reports it: its rows are missing
        except (pa.ArrowException, OSError) as error:
            raise _unreadable_error(disk, path, error) from None
        with file:
            for number in range(file.num_row_groups):
                if first is not None and stop is not None and _group_is_outside(file, number, first, stop):
                    continue
                batches: Iterator[pa.RecordBatch] = iter(without_views(file.read_row_group(number)).to_batches())
                if first is not None and stop is not None:
                    batches = _filter_seqs(batches, first, stop)
                for batch in batches:
                    yield partitions.restore_columns(batch, name) if with_partitions else batch


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


def _unreadable_error(disk: Disk, path: str, error: Exception) -> Error:
    if isinstance(disk, BucketDisk) and not isinstance(error, pa.ArrowException):
        return disk.error(path, error)
    return Damaged(f"{path} cannot be read ({error}); nothing was changed, remove it and repair")


def _filter_seqs(batches: Iterable[pa.RecordBatch], first: int, stop: int) -> Iterator[pa.RecordBatch]:
    for batch in batches:
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


def read_row_groups(disk: Disk, path: str, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Read the row groups of a file, each as one batch."""
    try:
        file = _open_parquet(disk, path)
    except (pa.ArrowException, OSError) as error:
        raise Damaged(f"{path} cannot be read ({error}); nothing more was written") from None
    with file:
        for number in range(file.num_row_groups):
            table = file.read_row_group(number, columns).combine_chunks()
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
    files: int = 1  # of its range in this attempt: a file a partition


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
    bad_name = interface.quarantine_name(name) if footer.bad else None
    if bad_name is not None and disk.stat(join(directory, bad_name)) is None:
        return None
    return DataFile(name, footer.first, footer.stop, footer.rows, stat.size, footer.hash, footer.bad, bad_name)


def visible_files(disk: Disk, path: str) -> list[str]:
    """Return the files that readers of a directory see."""
    names = interface.list_data_files(disk, path)
    return [name for name in names if name.endswith(".parquet") and name.rpartition("/")[2][0] not in "_."]


def table_schema(disk: Disk, path: str) -> pa.Schema:
    """Return the columns of a table: those of its newest commit, or of the files where there is none."""
    last = open_commit_log(disk, path, write=False).last()
    if last is not None:
        return RecordMapping(last.schema).arrow
    found = []
    for name in visible_files(disk, path):
        with _open_parquet(disk, join(path, name)) as file:
            found.append(schema_without_views(file.schema_arrow).remove_metadata())
    try:
        return pa.unify_schemas(found)
    except pa.ArrowException as error:
        raise Damaged(f"files of {path} have columns of different types ({error}); nothing was read") from None


class DirectoryReader:
    """Reads the files that readers of a directory see."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk, self._path = disk, path
        self._names = visible_files(disk, path)
        self.schema = table_schema(disk, path)

    def parts(self) -> Sequence[str]:
        return self._names

    def read(self, part: str, /) -> Iterator[pa.RecordBatch]:
        for batch in read_batches(self._disk, self._path, [part], None, None):
            yield conform(batch, self.schema)


_STAGED_PREFIXES: Final = ("_part-", "_kept-")


def remove_old_staged(disk: Disk, path: str, before_ms: int, *, dry_run: bool) -> list[str]:
    """Remove files that exports staged before a time and did not commit; return their names."""
    last = open_commit_log(disk, path, write=False).last()
    committed = set() if last is None else {staged_name(name) for name in _files_in_order(last)}
    found = []
    for place in ("", QUARANTINE_DIR):
        with suppress(FileNotFoundError):
            for name in interface.list_data_files(disk, join(path, place) if place else path):
                whole = f"{place}/{name}" if place else name
                stat = disk.stat(join(path, whole)) if name.rpartition("/")[2].startswith(_STAGED_PREFIXES) else None
                if stat is not None and whole not in committed and stat.modified_ms < before_ms:
                    found.append(whole)
    for name in () if dry_run else found:
        disk.remove(join(path, name))
    return sorted(found)


def staged_name(name: str) -> str:
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}_{base}"


class ParquetTable:
    format: interface.Format = "parquet"

    def __init__(self, disk: Disk, path: str, *, write: bool, step: OnStep = interface.no_step) -> None:
        self.disk, self.path, self._step = disk, path, step
        self._leftovers: dict[str, FileFooter] = {}
        self._directory = TableDirectory(disk, path, self.format, write=write)
        try:
            self._log = open_commit_log(disk, path, write=write)
            if write:
                self._recover()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._directory.close()

    # ── content ───────────────────────────────────────────────────────────────────────────────

    def last_commit(self) -> Commit | None:
        return self._log.last()

    def commits(self) -> list[Commit]:
        return self._log.all()

    def own_files(self) -> list[DataFile]:
        return interface.active_files(self.commits())

    def next_export_seq(self, topic: str, epoch: int) -> int | None:  # noqa: ARG002
        return None  # no state outlives commits and files, and files become commits again

    def prepare(self, mapping: RecordMapping) -> None:
        """No effect: the place of the table is its address."""

    def scan(self) -> TableScan | None:
        return None

    def visible_files(self) -> list[str]:
        return visible_files(self.disk, self.path)

    # ── writing ───────────────────────────────────────────────────────────────────────────────

    def staged_path(self, name: str) -> str:
        return interface.staged_path(self.path, self.format, name)

    def commit(self, commit: Commit) -> None:
        last = self._log.last()
        interface.check_continues(last, commit, self.path)
        made = msgspec.structs.replace(commit, number=0 if last is None else last.number + 1)
        self._step("sync the names of staged files")
        self._directory.sync_staged(made)
        self._step("write the commit")
        self._log.append(made)
        self._apply_commit(made)

    def _apply_commit(self, commit: Commit) -> None:
        """Run steps 3 and 4, or the rest of them."""
        moved = set()
        for name in _files_in_order(commit):
            staged, path = self.staged_path(name), join(self.path, name)
            if self.disk.stat(staged) is not None:
                self._step("rename a file")
                self.disk.rename(staged, path)
                moved.add(path.rpartition("/")[0])
        self._step("sync the names of files")
        for place in moved:
            self.disk.sync_dir(place)
        gone = set()
        for name in commit.removed:
            self._step("remove a replaced file")
            if self._directory.remove_file(name):
                gone.add(join(self.path, name).rpartition("/")[0])
        for name in commit.retired:
            if self.disk.stat(join(self.path, name)) is not None:
                self._step("rename a replaced file")
                # Readers skip this name. Files of other programs are never deleted.
                folder, _, base = name.rpartition("/")
                place = join(self.path, folder) if folder else self.path
                self.disk.rename(join(self.path, name), join(place, f"_foreign-{commit.number}-{base}"))
                gone.add(place)
        for place in gone:
            self.disk.sync_dir(place)
        self._step("done")

    # ── recovery, after a crash or after commits were removed ────────────────────────────────

    def _recover(self) -> None:
        last = self.last_commit()
        if last is not None:
            self._apply_commit(last)
        if self._directory.in_bucket:
            return  # files without a commit may be those of another process; the log is never lost with its end
        self._remove_staged()
        loose = self._uncommitted_files(last.stop if last is not None else 0)
        partial = _partial_sets(loose)
        chosen, replaced = _choose_newest({name: footer for name, footer in loose.items() if name not in partial})
        covered = _covered_ranges(chosen.values())
        for name, footer in partial.items():
            if any(low <= footer.first and footer.stop <= high for low, high in covered):
                replaced.append(name)
        made = self._adopt_files(last, chosen)
        if made is not None:
            self._log.append(made)
        self._remove_files(replaced)  # by a repair that had not finished when the log was removed
        kept = set() if made is None else {file.name for file in made.files}
        left = chosen | {name: footer for name, footer in partial.items() if name not in replaced}
        self._leftovers = {name: footer for name, footer in left.items() if name not in kept}

    def leftovers(self) -> list[Leftover]:
        found = []
        for name, footer in self._leftovers.items():
            bad_name = interface.quarantine_name(name)
            is_there = self.disk.stat(join(self.path, bad_name)) is not None
            found.append(
                Leftover(
                    name,
                    footer.topic,
                    footer.epoch,
                    footer.first,
                    footer.stop,
                    bad_name if is_there else None,
                    footer.schema,
                    footer.shape,
                )
            )
        return found

    def drop_leftovers(self) -> None:
        self._remove_files(self._leftovers)
        self._leftovers = {}

    def _remove_files(self, names: Iterable[str]) -> None:
        gone = set()
        for name in names:
            self._step("remove a file of no commit")
            if self._directory.remove_file(name):
                gone.add(join(self.path, name).rpartition("/")[0])
        for place in gone:
            self.disk.sync_dir(place)

    def _remove_staged(self) -> None:
        """Remove staged files without a commit."""
        for place in (self.path, join(self.path, QUARANTINE_DIR)):
            with suppress(FileNotFoundError):
                for name in interface.list_data_files(self.disk, place):
                    if name.rpartition("/")[2].startswith(_STAGED_PREFIXES):
                        self.disk.remove(join(place, name))

    def _uncommitted_files(self, stop: int) -> dict[str, FileFooter]:
        """Return the files of exports after the newest known commit."""
        found = {}
        for name in self.visible_files():
            where = interface.parse_file_range(name)
            if where is not None and where[0] >= stop:
                footer = read_footer(self.disk, join(self.path, name))
                if footer is not None:
                    found[name] = footer
        return found

    def _adopt_files(self, last: Commit | None, uncommitted: dict[str, FileFooter]) -> Commit | None:
        """Build one commit of the files that continue the last commit without a missing range."""
        made: list[DataFile] = []
        at = last.stop if last is not None else min((footer.first for footer in uncommitted.values()), default=0)
        for name, footer in sorted(uncommitted.items(), key=lambda item: (item[1].first, -item[1].stop, item[0])):
            if footer.transform is not None:
                raise Damaged(
                    f"{self.path}: the commit of {name} is gone, and its rows went through {footer.transform}, so they "
                    "cannot be made again from the log alone; nothing was changed, put the log of the table back"
                )
            held = data_file_from_footer(self.disk, self.path, name)
            if held is None or (last is not None and footer.epoch != last.epoch):
                break
            if held.first > at:
                break
            made.append(held)
            at = max(at, held.stop)
        if not made:
            return None
        said = uncommitted[made[0].name]
        number = 0 if last is None else last.number + 1
        commit = Commit(said.topic, said.epoch, made[0].first, at, tuple(made), said.schema, said.shape, number=number)
        before = last
        for file in made:
            schema, shape = uncommitted[file.name].schema, uncommitted[file.name].shape
            eras = interface.extend_eras(before, file.first, schema, shape)
            before = commit = msgspec.structs.replace(commit, schema=schema, shape=shape, eras=eras)
        return commit


def _files_in_order(commit: Commit) -> list[str]:
    """Return the files in the order of their renames. Rows that a repair copied come last: where they are visible, the
    rest of the repair is too."""
    own = [name for file in commit.files for name in (file.bad_name, file.name) if name is not None]
    return [*own, *(file.name for file in commit.kept)]


def _partial_sets(uncommitted: dict[str, FileFooter]) -> dict[str, FileFooter]:
    """Return the files of ranges of which a file of another partition is missing."""
    sets: dict[tuple[str, ...], list[str]] = {}
    for name in uncommitted:
        sets.setdefault(_attempt_of(name), []).append(name)
    return {
        name: uncommitted[name]
        for names in sets.values()
        for name in names
        if len(names) != uncommitted[names[0]].files
    }


def _attempt_of(name: str) -> tuple[str, ...]:
    """Return range, run and attempt of a file, which files of other partitions have as well."""
    parts = name.rpartition("/")[2].removesuffix(".parquet").split("-")
    return (*parts[1:5], "kept" if "kept" in parts else "")


def _choose_newest(uncommitted: dict[str, FileFooter]) -> tuple[dict[str, FileFooter], list[str]]:
    """Of files with overlapping ranges choose those of the newest run that covers all of them, else those of the oldest
    run. Return the chosen files and the names of the others, whose ranges are covered."""
    chosen: dict[str, FileFooter] = {}
    others: list[str] = []
    for group in interface.group_overlapping(uncommitted.items(), lambda item: (item[1].first, item[1].stop, item[0])):
        everything = _covered_ranges(footer for _, footer in group)
        runs = sorted({footer.run for _, footer in group})
        covering = (run for run in runs[:0:-1] if _covered_ranges(f for _, f in group if f.run == run) == everything)
        run = next(covering, runs[0])
        covered = _covered_ranges(footer for _, footer in group if footer.run == run)
        for name, footer in group:
            inside = any(low <= footer.first and footer.stop <= high for low, high in covered)
            if footer.run == run or not inside:
                chosen[name] = footer
            else:
                others.append(name)
    return chosen, others


def _covered_ranges(footers: Iterable[FileFooter]) -> interface.SeqRanges:
    return interface.merge_ranges((footer.first, footer.stop) for footer in footers)


_TEXT_CHARS: Final = 32
_LAST_CHARACTER: Final = "\U0010ffff"


def encode_stats(footer: Any, schema: pa.Schema) -> str:
    """Return the statistics of a file as the log of a Delta table has them: readers skip files by them.

    They come from the footer: of seq, ts, tag, node and typed columns of numbers, dates, times and texts. A long text
    is cut: the least value to its beginning, the greatest to that with the last character of Unicode after it.
    """
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for at in range(footer.num_columns if footer.num_row_groups else 0):
        name = footer.row_group(0).column(at).path_in_schema
        if name not in schema.names or not _has_order(schema.field(name).type):
            continue
        found = [footer.row_group(number).column(at).statistics for number in range(footer.num_row_groups)]
        if any(stats is None or not stats.has_null_count for stats in found):
            continue
        rows = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
        nulls[name] = sum(stats.null_count for stats in found)
        known = [stats for stats, count in zip(found, rows, strict=True) if stats.null_count < count]
        if known and all(stats.has_min_max for stats in known):
            least[name] = _encode_bound(min(stats.min for stats in known), is_greatest=False)
            greatest[name] = _encode_bound(max(stats.max for stats in known), is_greatest=True)
    made: dict[str, Any] = {"numRecords": footer.num_rows}
    if footer.num_rows:
        made |= {"minValues": least, "maxValues": greatest, "nullCount": nulls}
    return msgspec.json.encode(made).decode()


def _has_order(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_string(kind)
        or pa.types.is_date32(kind)
        or pa.types.is_timestamp(kind)
    )


def _encode_bound(value: Any, *, is_greatest: bool) -> Any:
    if isinstance(value, str):
        if len(value) <= _TEXT_CHARS:
            return value
        return value[:_TEXT_CHARS] + (_LAST_CHARACTER if is_greatest else "")
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ") if value.tzinfo else value.isoformat()
    return value.isoformat() if isinstance(value, date) else value
