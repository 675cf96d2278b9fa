"""A Delta table as the target of exports, and as a source of rows.

An export adds the files that executors wrote in one transaction of the table:

    commitInfo    "tidelog": the commit, encoded as in the log of a Parquet table
    txn           tidelog/<topic>/<epoch> → the seq where the next commit begins

The checkpoints of the table keep the second, so it outlives the first, which is deleted with old log files. A
transaction of the same name in between makes the commit fail: two exporters on two machines cannot write rows twice.
Only the log of the table makes a file part of it.

Other programs may commit at any time (append, OPTIMIZE, DELETE, VACUUM). A commit is written for exactly one version of
the table. If that version exists, the table is read again and the commit is tried for the next version, after a growing
pause, `COMMIT_ATTEMPTS` times. It fails at once if it became wrong: another exporter has continued, or a file that a
repair replaces is gone.

Rows are read through the library that knows the format:

    plain       one task per file, read where the task runs
    special     mapped column names, deletion vectors, other reader features: one task, through the library's engine

Partition columns are not in the files: both ways add them. A version that the library cannot read is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from threading import Event
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import deltalake
import msgspec
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, DeltaProtocolError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from tidelog.disk.bucket_disk import BucketDisk
from tidelog.disk.interface import Disk, join
from tidelog.errors import BadInput, Damaged, Error, NotFound, StoreDenied, StoreUnavailable
from tidelog.pipelines import partitions, record_mapping
from tidelog.pipelines.record_mapping import RecordMapping
from tidelog.pipelines.table_formats import interface, parquet
from tidelog.pipelines.table_formats.interface import (
    QUARANTINE_DIR,
    Commit,
    DataFile,
    KeptFile,
    Leftover,
    OnStep,
    TableChanged,
    TableDirectory,
)

COLUMN_MAPPING_KEY: Final = "delta.columnMapping.mode"
_BATCH_ROWS: Final = 8192
# Words of the messages in which deltalake passes on that a store did not answer.
_STORE_IS_AWAY: Final = re.compile(
    r"error sending request|[Cc]onnection|timed out|Error after \d+ retries|HTTP error|Generic (S3|GCS|MicrosoftAzure)"
)


class DeltaVersion(NamedTuple):
    version: int
    description: str  # table id and version


def latest_version(disk: Disk, path: str) -> DeltaVersion:
    """Return the newest version of a table."""
    table = open_delta(disk, path, None)
    return DeltaVersion(table.version(), f"{table.metadata().id} version {table.version()}")


def storage_options(disk: Disk) -> dict[str, str] | None:
    """Return the options with which deltalake reaches the files of a disk."""
    return disk.options.to_delta() if isinstance(disk, BucketDisk) else None


def has_column_mapping(table: DeltaTable) -> bool:
    """Whether columns have other names in the files than in the table."""
    return (table.metadata().configuration.get(COLUMN_MAPPING_KEY) or "none").lower() != "none"


def arrow_schema(table: DeltaTable) -> pa.Schema:
    return parquet.schema_without_views(pa.schema(table.schema().to_arrow()))


class DeltaReader:
    """Reads a version of a table file by file, or as a whole where only its library can: mapped names, deletion
    vectors."""

    def __init__(self, disk: Disk, path: str, version: int | None) -> None:
        table = open_delta(disk, path, version)
        self._disk, self._path, self._version = disk, path, table.version()
        self.schema = arrow_schema(table)
        self._names: list[str] | None = None
        if not has_column_mapping(table):
            with suppress(DeltaProtocolError):
                found = table.to_pyarrow_dataset(schema=self.schema).get_fragments()
                self._names = [file.path for file in found]

    def parts(self) -> Sequence[str | None]:
        return [None] if self._names is None else self._names

    def read(self, part: str | None, /) -> Iterator[pa.RecordBatch]:
        if part is None:
            for batch in _scan(self._disk, self._path, self._version, None, None):
                yield parquet.conform(batch, self.schema)
            return
        data = open_delta(self._disk, self._path, self._version).to_pyarrow_dataset(schema=self.schema)
        (file,) = [fragment for fragment in data.get_fragments() if fragment.path == part]
        yield from file.scanner(schema=self.schema, batch_size=_BATCH_ROWS).to_batches()


class ChangeReader:
    """Reads the change feed of versions of a table, as a whole."""

    def __init__(self, disk: Disk, path: str, first: int, last: int | None) -> None:
        table = open_delta(disk, path, None)
        if not _has_change_feed(table):
            raise BadInput(
                f"{path} has no change feed; nothing was read, export into a new table with change_feed (--change-feed)"
            )
        self._disk, self._path, self.last = disk, path, table.version() if last is None else last
        # The version that creates an upsert table has no rows, and no changes.
        self.first = max(first, 1)
        if not self.first <= self.last <= table.version():
            raise BadInput(
                f"{path} has changes of versions 1 to {table.version()}, not of {first} to {self.last}; nothing was "
                "read"
            )
        self.schema = pa.schema(
            [
                *arrow_schema(table),
                pa.field("_change_type", pa.string()),
                pa.field("_commit_version", pa.int64()),
                pa.field("_commit_timestamp", pa.timestamp("us", "UTC")),
            ]
        )

    def parts(self) -> Sequence[None]:
        return [None]

    def read(self, part: None, /) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        table = open_delta(self._disk, self._path, None)
        try:
            found: Any = table.load_cdf(starting_version=self.first, ending_version=self.last)
            for batch in pa.RecordBatchReader.from_stream(found):
                plain = batch.cast(parquet.schema_without_views(batch.schema))
                at = plain.schema.get_field_index("_commit_timestamp")
                times = plain.column(at).cast(pa.timestamp("us")).view(pa.int64()).view(pa.timestamp("us", "UTC"))
                yield parquet.conform(plain.set_column(at, "_commit_timestamp", times), self.schema)
        except (DeltaError, pa.ArrowException, OSError) as error:
            raise _unreadable_error(self._disk, self._path, error) from None


class DeltaScan(NamedTuple):
    """A version of a table that is read through deltalake."""

    disk: Disk
    path: str
    version: int

    def rows(self, first: int | None, stop: int | None, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        predicate = None if first is None or stop is None else f"seq >= {first} AND seq < {stop}"
        for batch in _scan(self.disk, self.path, self.version, predicate, None):
            yield parquet.conform(batch, schema)

    def count_outside(self, first: int, stop: int) -> int:
        predicate = f"seq < {first} OR seq >= {stop} OR seq IS NULL"
        return sum(batch.num_rows for batch in _scan(self.disk, self.path, self.version, predicate, ["seq"]))


def count_rows_where(disk: Disk, path: str, predicate: str) -> int:
    """Count the rows of the newest version that match a predicate in SQL."""
    version = open_delta(disk, path, None).version()
    return sum(batch.num_rows for batch in _scan(disk, path, version, predicate, ["seq"]))


def describe_columns(disk: Disk, path: str) -> tuple[list[str], bool]:
    """Return the names of the columns, and whether a change data feed keeps removed rows."""
    table = open_delta(disk, path, None)
    return arrow_schema(table).names, _has_change_feed(table)


def _has_change_feed(table: DeltaTable) -> bool:
    return (table.metadata().configuration.get("delta.enableChangeDataFeed") or "false").lower() == "true"


def delete_rows(disk: Disk, path: str, predicate: str) -> tuple[int, list[str]]:
    """Delete the rows that match a predicate in SQL, in one commit; return how many, and the files that held them."""
    table = open_delta(disk, path, None)
    before = set(table.file_uris())
    try:
        deleted = int(table.delete(predicate)["num_deleted_rows"])
    except DeltaProtocolError as error:
        raise _unsupported_error(path, error) from None
    except (DeltaError, OSError) as error:
        raise _unreadable_error(disk, path, error) from None
    gone = before - set(table.file_uris())
    return deleted, sorted(_relative_name(path, name) for name in gone)


def remove_unnamed_files(disk: Disk, path: str) -> list[str]:
    """Remove every data file that the newest version does not name; older versions cannot be read any more. Return the
    names."""
    table = open_delta(disk, path, None)
    try:
        found = table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False, full=True)
    except (DeltaError, OSError) as error:
        raise _unreadable_error(disk, path, error) from None
    return sorted(_relative_name(path, name) for name in found)


def vacuum(disk: Disk, path: str, retention_hours: int, *, dry_run: bool) -> list[str]:
    """Remove data files that no version of the last hours names; return their names."""
    table = open_delta(disk, path, None)
    try:
        found = table.vacuum(
            retention_hours=retention_hours, dry_run=dry_run, enforce_retention_duration=False, full=True
        )
    except (DeltaError, OSError) as error:
        raise _unreadable_error(disk, path, error) from None
    return sorted(_relative_name(path, name) for name in found)


def compact_files(disk: Disk, path: str, target_bytes: int) -> None:
    """Join small files by deltalake, in this process."""
    try:
        open_delta(disk, path, None).optimize.compact(target_size=target_bytes)
    except CommitFailedError as error:
        raise TableChanged(
            f"{path} was written by another process meanwhile ({error}); nothing was committed, run it again"
        ) from None
    except (DeltaError, OSError) as error:
        raise _unreadable_error(disk, path, error) from None


def _relative_name(path: str, name: str) -> str:
    return unquote(name).removeprefix("file://").removeprefix(f"{path.rstrip('/')}/")


def open_delta(disk: Disk, path: str, version: int | None) -> DeltaTable:
    try:
        return DeltaTable(path, version=version, storage_options=storage_options(disk))
    except TableNotFoundError:
        raise NotFound(f"there is no Delta table at {path}; nothing was done, check the path") from None
    except DeltaProtocolError as error:
        raise _unsupported_error(path, error) from None
    except DeltaError as error:
        raise _unreadable_error(disk, path, error) from None


def _scan(
    disk: Disk, path: str, version: int, predicate: str | None, columns: list[str] | None
) -> Iterator[pa.RecordBatch]:
    try:
        reader: Any = open_delta(disk, path, version).scan(columns=columns, predicate=predicate)
        yield from pa.RecordBatchReader.from_stream(reader)
    except DeltaProtocolError as error:
        raise _unsupported_error(path, error) from None
    except (DeltaError, pa.ArrowException, OSError) as error:
        raise _unreadable_error(disk, path, error) from None


def _unreadable_error(disk: Disk, path: str, error: Exception) -> Error:
    """Return the error for a table that deltalake does not read: its store refuses or is away, or it is damaged."""
    if isinstance(disk, BucketDisk):
        found = disk.error(path, error)
        if isinstance(found, StoreDenied) or _STORE_IS_AWAY.search(str(error)):
            return found
        return Damaged(
            f"{path} cannot be read as a Delta table ({disk.options.remove_secrets(str(error))[:400]}); nothing was "
            "changed"
        )
    return Damaged(f"{path} cannot be read as a Delta table ({error}); nothing was changed")


def _unsupported_error(path: str, error: Exception) -> BadInput:
    return BadInput(
        f"{path} needs features that deltalake {deltalake.__version__} does not read ({error}); nothing was done. Have "
        "its own engine write it without them, or copy it into files that Spark reads"
    )


DELTA_LOG_DIR: Final = "_delta_log"
_COMMIT_KEY: Final = "tidelog"
_RECENT_VERSIONS: Final = 20  # versions searched before all of them are
COMMIT_ATTEMPTS: Final = 20
_FIRST_PAUSE_S: Final = 0.02  # before the second attempt; it doubles up to _MAX_PAUSE_S
_MAX_PAUSE_S: Final = 2.0
KEY_COLUMN: Final = "key"  # of an upsert table
DELETED_COLUMN: Final = "_deleted"  # of its staged rows
_DELETION_VECTORS: Final = "deletionVectors"


def transaction_app_id(topic: str, epoch: int) -> str:
    return f"tidelog/{topic}/{epoch}"


class DeltaLakeTable:
    format: interface.Format = "delta"

    def __init__(self, disk: Disk, path: str, *, write: bool, step: OnStep = interface.no_step) -> None:
        self.disk, self.path, self._step = disk, path, step
        self._table: DeltaTable | None = None
        self._pause: Callable[[float], object] = Event().wait
        self._directory = TableDirectory(disk, path, self.format, write=write)
        try:
            if write:
                # Before any file: a directory with files and without a log would be detected as another format.
                disk.make_dir(join(path, DELTA_LOG_DIR))
            self._load()
            if write and not self._directory.in_bucket:  # there it may be the file of another process
                self._remove_uncommitted()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._directory.close()

    def _load(self) -> None:
        try:
            self._table = DeltaTable(self.path, storage_options=storage_options(self.disk))
        except TableNotFoundError:
            if not self._directory.is_writer:  # a log without a commit: the first one was removed
                raise BadInput(f"{self.path} is a Delta table without a commit; nothing was done, export it") from None
        except (DeltaError, OSError) as error:
            raise _unreadable_error(self.disk, self.path, error) from None

    # ── content ───────────────────────────────────────────────────────────────────────────────

    def _own_commits(self, limit: int | None = None) -> Iterator[Commit]:
        """Yield the commits of exports, newest first."""
        for info in self._table.history(limit) if self._table is not None else ():
            if _COMMIT_KEY in info:
                made = interface.decode_commit(info[_COMMIT_KEY], f"{self.path}, version {info['version']}")
                yield msgspec.structs.replace(made, number=info["version"])

    def commits(self) -> list[Commit]:
        return list(self._own_commits())[::-1]

    def last_commit(self) -> Commit | None:
        """Return the newest commit of an export. A later repair does not move the end, so it counts as well."""
        if self._table is not None:
            self._table.update_incremental()  # the history is always current, the state is not
        elif self._directory.is_writer:
            self._load()  # another process may have created it
        made = next(self._own_commits(_RECENT_VERSIONS), None) or next(self._own_commits(), None)
        if made is None or self._table is None:
            return None
        stop = self.next_export_seq(made.topic, made.epoch)
        if stop is None or stop < made.stop:
            raise Damaged(
                f"{self.path}: its newest commit ends at seq {made.stop - 1} and its transaction says {stop}; nothing "
                "was written, look at the table's history"
            )
        # The transaction in a checkpoint of the table outlives the commits.
        return made if stop == made.stop else msgspec.structs.replace(made, first=made.stop, stop=stop, files=())

    def next_export_seq(self, topic: str, epoch: int) -> int | None:
        return None if self._table is None else self._table.transaction_version(transaction_app_id(topic, epoch))

    def visible_files(self) -> list[str]:
        encoded = [] if self._table is None else pa.table(self._table.get_add_actions())["path"].to_pylist()
        found = [unquote(name) for name in encoded]
        for name in found:
            if name.startswith("/") or "://" in name:
                raise BadInput(
                    f"{self.path} has a file outside of its directory ({name:.200}), as a shallow clone has; nothing "
                    "was changed, make a deep copy of the table"
                )
        return found

    def prepare(self, mapping: RecordMapping) -> None:
        """No effect: the place of the table is its address."""

    def scan(self) -> DeltaScan | None:
        if self._table is None:
            return None
        mapped = has_column_mapping(self._table)
        special = mapped or self._has_deletion_vectors() or not self._has_partitions_in_paths()
        return DeltaScan(self.disk, self.path, self._table.version()) if special else None

    def _has_partitions_in_paths(self) -> bool:
        """Whether the values of partition columns are in the paths of all files; other programs may write others."""
        assert self._table is not None, "only for a table with commits"
        columns = self._table.metadata().partition_columns
        return not columns or all(list(partitions.partition_values(name)) == columns for name in self.visible_files())

    def _has_deletion_vectors(self) -> bool:
        assert self._table is not None, "only for a table with commits"
        if _DELETION_VECTORS not in (self._table.protocol().reader_features or ()):
            return False
        return any(pa.record_batch(batch).num_rows for batch in self._table.deletion_vectors())

    def own_files(self) -> list[DataFile]:
        committed = {file.name: file for file in interface.active_files(self.commits())}
        found = [
            committed[name] if name in committed else parquet.data_file_from_footer(self.disk, self.path, name)
            for name in self.visible_files()
        ]
        return sorted((file for file in found if file is not None), key=lambda file: (file.first, file.name))

    def leftovers(self) -> list[Leftover]:
        return []  # a file that the log of the table does not name is not part of it

    def drop_leftovers(self) -> None:
        """No effect: there are none."""

    # ── writing ───────────────────────────────────────────────────────────────────────────────

    def staged_path(self, name: str) -> str:
        return interface.staged_path(self.path, self.format, name)

    def commit(self, commit: Commit) -> None:
        mapping = record_mapping.mapping_from_commit(commit.schema, commit.shape)
        actions: list[AddAction | RemoveAction] = [_add_action(file, commit) for file in commit.files]
        actions += [_kept_add_action(file, commit) for file in commit.kept]
        gone = (*commit.removed, *commit.retired)
        actions += [RemoveAction(name, not commit.same_rows, commit.ts_ms) for name in gone]
        self._add_columns(commit, mapping)
        pause_s = _FIRST_PAUSE_S
        for left in range(COMMIT_ATTEMPTS - 1, -1, -1):
            self._check_still_valid(commit, mapping)
            self._step("sync the names of staged files")
            # At every attempt: VACUUM of another program removes files that no version names.
            self._directory.sync_staged(commit)
            try:
                self._write(commit, mapping, actions)
                break
            except TableChanged:
                if self._is_committed(commit):  # the store answered a repeated request
                    break
                if not left:
                    raise
            self._pause(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        if not self._directory.in_bucket:
            self._step("sync the commit")
            self._sync_log()
        for name in commit.removed:
            self._directory.remove_quarantine(name)
        self._step("done")

    def _add_columns(self, commit: Commit, mapping: RecordMapping) -> None:
        """Add the columns that begin with this commit, by a version before it: empty, if the commit does not follow."""
        last = self.last_commit()
        if last is None or last.schema == commit.schema or self._table is None:
            return
        before = RecordMapping(last.schema).arrow.names
        there = pa.schema(self._table.schema().to_arrow()).names
        added = [field for field in mapping.arrow if field.name not in before and field.name not in there]
        if not added:
            return
        self._step("add columns")
        try:
            self._table.alter.add_columns(list(Schema.from_arrow(pa.schema(added)).fields))
        except CommitFailedError as error:
            raise TableChanged(
                f"{self.path} was written by another process meanwhile ({error}); nothing was committed, run it again"
            ) from None
        except (DeltaError, OSError) as error:
            raise _unreadable_error(self.disk, self.path, error) from None
        self._load()

    def _is_committed(self, commit: Commit) -> bool:
        """Whether a commit that was reported as failed is part of the table."""
        last = self.last_commit()
        if last is None or (not commit.files and commit.merged is None):
            return False
        made = commit.as_stored()
        return (last.files, last.merged, last.stop, last.ts_ms) == (made.files, made.merged, made.stop, made.ts_ms)

    def _check_still_valid(self, commit: Commit, mapping: RecordMapping) -> None:
        """Raise if the commit is wrong for the present state of the table."""
        last = self.last_commit()
        interface.check_continues(last, commit, self.path)
        if self._table is None:
            return
        gone = {*commit.removed, *commit.retired}.difference(self.visible_files())
        if gone or (commit.repair and last is not None and last.stop != commit.stop):
            raise TableChanged(
                f"{self.path} was changed by another process while a part of it was repaired; nothing was committed, "
                "run it again"
            )
        columns = [] if mapping.partition_column is None else [mapping.partition_column]
        if self._table.metadata().partition_columns != columns or has_column_mapping(self._table):
            raise BadInput(
                f"{self.path} has other partition columns than its exports, or mapped column names, which an export "
                "does not write; nothing was committed, export into another table"
            )
        there = pa.schema(self._table.schema().to_arrow())
        for field in mapping.arrow:
            if field.name not in there.names:
                raise BadInput(
                    f"{self.path} has no column {field.name!r} any more, another process dropped or renamed it; "
                    "nothing was committed, export into another table"
                )

    def merge(self, commit: Commit, rows: Callable[[], pa.RecordBatchReader], configuration: Mapping[str, str]) -> None:
        """Merge rows with keys into the table, in one commit that has the position of the export. The table is created
        by a version before.

        Args:
            rows: opens the rows, for each attempt; `latest_rows.staged_schema`.
        """
        mapping = record_mapping.mapping_from_commit(commit.schema, commit.shape)
        self._step("create the table")
        self._create(mapping, configuration)
        pause_s, before = _FIRST_PAUSE_S, set(self.visible_files())
        for left in range(COMMIT_ATTEMPTS - 1, -1, -1):
            if self._is_committed(commit):  # the store answered a repeated request
                break
            self._check_still_valid(commit, mapping)
            self._step("write the commit")
            try:
                self._merge(commit, mapping, rows)
                break
            except TableChanged:
                if not left:
                    raise
            self._pause(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        self._load()
        if not self._directory.in_bucket:
            self._step("sync the commit")
            for name in set(self.visible_files()) - before:
                self._sync_file(join(self.path, name))
            self._sync_log()
        self._step("done")

    def _create(self, mapping: RecordMapping, configuration: Mapping[str, str]) -> None:
        if self._table is not None:
            return
        try:
            DeltaTable.create(
                self.path,
                Schema.from_arrow(mapping.arrow),
                mode="ignore",
                configuration=dict(configuration),
                storage_options=storage_options(self.disk),
            )
        except (DeltaError, OSError) as error:
            raise _unreadable_error(self.disk, self.path, error) from None
        self._load()

    def _merge(self, commit: Commit, mapping: RecordMapping, rows: Callable[[], pa.RecordBatchReader]) -> None:
        assert self._table is not None, "it was created"
        version, properties = self._table.version(), self._properties(commit)
        values = {name: f"s.`{name}`" for name in mapping.arrow.names}
        try:
            merge = self._table.merge(
                rows(),
                f"t.`{KEY_COLUMN}` = s.`{KEY_COLUMN}`",
                source_alias="s",
                target_alias="t",
                commit_properties=properties,
            )
            merge = merge.when_matched_delete(predicate=f"s.`{DELETED_COLUMN}`")
            merge = merge.when_matched_update(values, predicate=f"NOT s.`{DELETED_COLUMN}`")
            merge.when_not_matched_insert(values, predicate=f"NOT s.`{DELETED_COLUMN}`").execute()
            if self._table.version() == version:  # it had no effect, and deltalake commits nothing then
                self._table.create_write_transaction([], "append", self._table.schema(), commit_properties=properties)
        except CommitFailedError as error:
            raise TableChanged(
                f"{self.path} was written by other processes meanwhile ({error}), {COMMIT_ATTEMPTS} times in a row; "
                "nothing was committed, run it again when they write less often"
            ) from None
        except DeltaProtocolError as error:
            raise _unsupported_error(self.path, error) from None
        except (DeltaError, OSError) as error:
            if isinstance(self.disk, BucketDisk) and isinstance(
                found := _unreadable_error(self.disk, self.path, error), StoreUnavailable
            ):
                raise found from None
            raise BadInput(f"{self.path} does not take these rows ({error}); nothing was committed") from None

    def _properties(self, commit: Commit) -> CommitProperties:
        return CommitProperties(
            custom_metadata={_COMMIT_KEY: interface.encode_commit(commit).decode()},
            max_commit_retries=0,
            app_transactions=[Transaction(transaction_app_id(commit.topic, commit.epoch), commit.stop)],
        )

    def _write(self, commit: Commit, mapping: RecordMapping, actions: Sequence[AddAction | RemoveAction]) -> None:
        properties = self._properties(commit)
        schema = Schema.from_arrow(mapping.arrow)
        partition_by = [] if mapping.partition_column is None else [mapping.partition_column]
        self._step("write the commit")
        try:
            if self._table is None:
                added = [action for action in actions if isinstance(action, AddAction)]
                create_table_with_add_actions(
                    self.path,
                    schema,
                    added,
                    partition_by=partition_by,
                    commit_properties=properties,
                    storage_options=storage_options(self.disk),
                )
            else:
                schema = self._table.schema()
                self._table.create_write_transaction(
                    list(actions), "append", schema, partition_by=partition_by, commit_properties=properties
                )
        except CommitFailedError as error:
            raise TableChanged(
                f"{self.path} was written by other processes meanwhile ({error}), {COMMIT_ATTEMPTS} times in a row; "
                "nothing was committed, run it again when they write less often"
            ) from None
        except DeltaError as error:
            if self._table is None and DeltaTable.is_deltatable(self.path, storage_options(self.disk)):
                raise TableChanged(
                    f"{self.path} was made by another process meanwhile; nothing was committed, run it again"
                ) from None
            if isinstance(self.disk, BucketDisk) and isinstance(
                found := _unreadable_error(self.disk, self.path, error), StoreUnavailable
            ):
                raise found from None
            raise BadInput(f"{self.path} does not take these rows ({error}); nothing was committed") from None
        self._load()

    def _sync_log(self) -> None:
        """Sync the commit file: the library does not, so the commit would not survive a power cut."""
        assert self._table is not None, "a commit creates it"
        log = join(self.path, DELTA_LOG_DIR)
        self._sync_file(join(log, f"{self._table.version():020d}.json"))
        self.disk.sync_dir(log)
        self.disk.sync_dir(self.path)

    def _sync_file(self, path: str) -> None:
        file = self.disk.open(path)
        try:
            file.sync()
        finally:
            file.close()

    def _remove_uncommitted(self) -> None:
        """Remove files after the newest commit that are part of no version."""
        last, there = self.last_commit(), set(self.visible_files())
        stop = 0 if last is None else last.stop
        for place, prefix in ((self.path, ""), (join(self.path, QUARANTINE_DIR), f"{QUARANTINE_DIR}/")):
            with suppress(FileNotFoundError):
                for name in interface.list_data_files(self.disk, place):
                    where = interface.parse_file_range(name)
                    if where is not None and where[0] >= stop and f"{prefix}{name}" not in there:
                        self.disk.remove(join(place, name))


def _add_action(file: DataFile, commit: Commit) -> AddAction:
    assert file.stats is not None, "a task collects them"
    return AddAction(
        file.name, file.bytes, partitions.partition_values(file.name), commit.ts_ms, not commit.same_rows, file.stats
    )


def _kept_add_action(file: KeptFile, commit: Commit) -> AddAction:
    stats = msgspec.json.encode({"numRecords": file.rows}).decode()
    return AddAction(file.name, file.bytes, partitions.partition_values(file.name), commit.ts_ms, True, stats)
