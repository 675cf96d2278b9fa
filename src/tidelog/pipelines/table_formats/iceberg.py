"""An Iceberg table as the target of exports, through pyiceberg and a catalog.

    address     iceberg://CATALOG/NAMESPACE.TABLE; the catalog as pyiceberg is configured, or by storage options
    files       <location>/data/part-….parquet, written by executors, added by the driver (`add_files`)
    commit      one snapshot; its summary and the properties of the table have the commit of the export

        tidelog.commit               the commit, encoded as in the log of a Parquet table
        tidelog.topic, .epoch, .next_seq     the position, for people and other programs

The properties outlive snapshots that are expired, so the table keeps its position whatever other programs remove. A
commit is written for exactly one snapshot of the table: pyiceberg's own repetitions, which would add the files of two
exporters, are off. If another program was faster, the table is loaded again and the commit is checked and tried again.
An answer that was lost is recognised by the commit in the properties.

Rows are read through pyiceberg, at one snapshot: compaction, deletes and changes of the schema by other programs are
then seen as every reader sees them. A repair is one commit: it deletes the ranges that it writes anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from threading import Event
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    ForbiddenError,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
    UnauthorizedError,
)
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io import PY_IO_IMPL
from pyiceberg.io.pyarrow import ArrowScan, schema_to_pyarrow
from pyiceberg.table import FileScanTask, StaticTable
from pyiceberg.table import Table as PyIcebergTable
from pyiceberg.transforms import DayTransform, IdentityTransform, Transform
from pyiceberg.utils.config import Config

from tidelog import addresses
from tidelog.disk.bucket_disk import BucketDisk
from tidelog.disk.interface import Disk
from tidelog.disk.posix import PosixDisk
from tidelog.disk.store_options import TABLE_SCHEMES, family_of, options_for, parse_store_address
from tidelog.errors import BadInput, Damaged, Error, NotFound, StoreDenied, StoreUnavailable
from tidelog.pipelines import partitions
from tidelog.pipelines.record_mapping import RecordMapping
from tidelog.pipelines.table_formats import interface, parquet
from tidelog.pipelines.table_formats.interface import (
    Commit,
    DataFile,
    Leftover,
    OnStep,
    TableChanged,
    TableScan,
)

_PREFIX: Final = "tidelog."
_COMMIT_KEY: Final = "tidelog.commit"
_DATA_DIR: Final = "data"
_FILE_IO: Final = "pyiceberg.io.pyarrow.PyArrowFileIO"
_NO_RETRIES: Final = {"commit.retry.num-retries": "0"}
COMMIT_ATTEMPTS: Final = 20
_FIRST_PAUSE_S: Final = 0.02  # before the second attempt; it doubles up to _MAX_PAUSE_S
_MAX_PAUSE_S: Final = 2.0


class CatalogTable(NamedTuple):
    """The name of a table and how its catalog is reached."""

    catalog: str
    identifier: str
    properties: Mapping[str, str]

    def __repr__(self) -> str:
        return f"CatalogTable({self.address!r})"

    @property
    def address(self) -> str:
        return f"{interface.ICEBERG_SCHEME}://{self.catalog}/{self.identifier}"


def parse_address(address: str, given: Mapping[str, str] | None) -> CatalogTable:
    """Parse iceberg://CATALOG/NAMESPACE.TABLE."""
    catalog, slash, identifier = address.partition("://")[2].strip("/").partition("/")
    names = identifier.replace("/", ".").split(".")
    if not catalog or not slash or len(names) < 2 or not all(names):
        raise BadInput(
            f"{address!r} names no Iceberg table; nothing was done, write iceberg://CATALOG/NAMESPACE.TABLE, as in "
            "iceberg://prod/shop.orders"
        )
    return CatalogTable(catalog, ".".join(names), _catalog_properties(given or {}))


def exported_tables(address: str, given: Mapping[str, str] | None) -> list[CatalogTable] | None:
    """Return the tables that exports made in a catalog or a namespace, iceberg://CATALOG/NAMESPACE, by name; None if
    the address names a table."""
    catalog, _, namespace = address.partition("://")[2].strip("/").partition("/")
    if not catalog or "." in namespace or "/" in namespace:
        return None
    place = CatalogTable(catalog, namespace, _catalog_properties(given or {}))
    opened = open_catalog(place)
    try:
        spaces = [(namespace,)] if namespace else opened.list_namespaces()
        names = sorted(".".join(name) for space in spaces for name in opened.list_tables(space))
        found = [place._replace(identifier=name) for name in names]
        return [each for each in found if _COMMIT_KEY in opened.load_table(each.identifier).properties]
    except Exception as error:
        raise _catalog_error(place, error) from None


def _catalog_properties(given: Mapping[str, str]) -> dict[str, str]:
    """Return properties for pyiceberg: options of stores under the names of other libraries are translated."""
    made = dict(given)
    for family in ("s3", "gs", "abfs"):
        found, rest = options_for(family, made)
        if found is not None:
            made = {**rest, **found.to_iceberg()}
    return made


class IcebergScan(NamedTuple):
    """One snapshot of a table, read on any machine without the catalog."""

    metadata_location: str
    properties: Mapping[str, str]
    snapshot_id: int | None

    def __repr__(self) -> str:
        return f"IcebergScan({self.metadata_location!r})"

    def table(self) -> StaticTable:
        return StaticTable.from_metadata(self.metadata_location, dict(self.properties))

    def rows(self, first: int | None, stop: int | None, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        wanted = "true" if first is None or stop is None else _seq_range(first, stop)
        for batch in self._batches(wanted, ("*",)):
            yield parquet.conform(_decoded(batch), schema)

    def count_outside(self, first: int, stop: int) -> int:
        return sum(
            batch.num_rows for batch in self._batches(f"seq < {first} or seq >= {stop} or seq is null", ("seq",))
        )

    def _batches(self, wanted: str, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
        if self.snapshot_id is None:
            return
        try:
            scan = self.table().scan(row_filter=wanted, selected_fields=columns, snapshot_id=self.snapshot_id)
            yield from scan.to_arrow_batch_reader()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise Damaged(
                f"{self.metadata_location} cannot be read as an Iceberg table ({type(error).__name__}: "
                f"{str(error)[:300]}); nothing was changed"
            ) from None


def _decoded(batch: pa.RecordBatch) -> pa.RecordBatch:
    schema = parquet.schema_without_views(batch.schema.remove_metadata())
    return batch.cast(schema) if not batch.schema.equals(schema) else batch


def _seq_range(first: int, stop: int) -> str:
    return f"(seq >= {first} and seq < {stop})"


class IcebergTable:
    format: interface.Format = "iceberg"

    def __init__(self, name: CatalogTable, *, write: bool, step: OnStep = interface.no_step) -> None:
        self._name, self._step = name, step
        self._pause: Callable[[float], object] = Event().wait
        self._catalog = open_catalog(name)
        self._table: PyIcebergTable | None = None
        self.disk: Disk = PosixDisk()
        self.path = name.address
        if not self._load() and not write:
            self.close()
            raise NotFound(f"there is no table {name.address}; nothing was done, check the name and the catalog")

    def close(self) -> None:
        """Release the connections to the catalog. A table in a catalog has no lock."""
        close: Callable[[], None] | None = getattr(self._catalog, "close", None)  # since pyiceberg 0.11
        if close is not None:
            close()

    def _load(self) -> bool:
        """Load the newest version; return whether there is a table."""
        try:
            self._use(self._catalog.load_table(self._name.identifier))
        except (NoSuchTableError, NoSuchNamespaceError):
            self._table = None
        except Exception as error:
            raise _catalog_error(self._name, error) from None
        return self._table is not None

    def _use(self, table: PyIcebergTable) -> None:
        # Only in this process: pyiceberg would add the files of a commit again after another exporter added its own.
        metadata = table.metadata
        table.metadata = metadata.model_copy(update={"properties": {**metadata.properties, **_NO_RETRIES}})
        if self._table is None:
            self.disk, self.path = _data_place(self._name, table)
        self._table = table

    def prepare(self, mapping: RecordMapping) -> None:
        """Create an empty table: its catalog decides where the files are."""
        if self._table is not None:
            self._check_partitions(mapping)
            return
        try:
            with suppress(NamespaceAlreadyExistsError):
                self._catalog.create_namespace(self._name.identifier.rpartition(".")[0])
            with self._catalog.create_table_transaction(self._name.identifier, mapping.arrow) as transaction:
                if mapping.partition_by is not None:
                    with transaction.update_spec() as spec:
                        spec.add_field(*_partition_field(mapping.partition_by))
            table = self._catalog.load_table(self._name.identifier)
        except TableAlreadyExistsError:
            self._load()
            self._check_partitions(mapping)
            return
        except Exception as error:
            raise _catalog_error(self._name, error) from None
        self._use(table)
        self.disk.make_dir(self.path)

    def _check_partitions(self, mapping: RecordMapping) -> None:
        """Raise if files of one partition of the mapping may have rows of several partitions of the table."""
        assert self._table is not None, "it was found"
        if mapping.partition_by is None or self._table.current_snapshot() is not None:
            return
        source, transform, _ = _partition_field(mapping.partition_by)
        schema, fields = self._table.schema(), self._table.spec().fields
        if [(schema.find_column_name(each.source_id), each.transform) for each in fields] != [(source, transform)]:
            raise BadInput(
                f"{self._name.address} exists and is not partitioned by {mapping.partition_by}; nothing was written, "
                "name a table that is new"
            )

    # ── content ───────────────────────────────────────────────────────────────────────────────

    def last_commit(self) -> Commit | None:
        self._load()
        if self._table is None:
            return None
        found = self._table.properties.get(_COMMIT_KEY)
        return None if found is None else interface.decode_commit(found, f"{self._name.address}, its properties")

    def next_export_seq(self, topic: str, epoch: int) -> int | None:  # noqa: ARG002
        return None  # the commit in the properties outlives all snapshots

    def commits(self) -> list[Commit]:
        found: dict[tuple[int, int, int, tuple[str, ...]], Commit] = {}
        texts = [] if self._table is None else [_own_summary(snapshot) for snapshot in self._table.snapshots()]
        if self._table is not None:
            texts.append(self._table.properties.get(_COMMIT_KEY))
        for text in texts:
            if text is not None:
                made = interface.decode_commit(text, f"{self._name.address}, a snapshot")
                found[made.first, made.stop, made.ts_ms, tuple(file.name for file in made.files)] = made
        return list(found.values())

    def own_files(self) -> list[DataFile]:
        there = set(self.visible_files())
        return [file for file in interface.active_files(self.commits()) if file.name in there]

    def visible_files(self) -> list[str]:
        if self._table is None or self._table.current_snapshot() is None:
            return []
        paths = self._table.inspect.data_files()["file_path"].to_pylist()
        return [path.removeprefix(f"{_data_uri(self._table)}/") for path in paths]

    def scan(self) -> TableScan | None:
        if self._table is None:
            return None
        snapshot = self._table.current_snapshot()
        properties = dict(self._table.io.properties)
        return IcebergScan(self._table.metadata_location, properties, snapshot.snapshot_id if snapshot else None)

    def leftovers(self) -> list[Leftover]:
        return []  # a file that no snapshot names is not part of the table

    def drop_leftovers(self) -> None:
        """No effect: there are none."""

    # ── writing ───────────────────────────────────────────────────────────────────────────────

    def staged_path(self, name: str) -> str:
        return interface.staged_path(self.path, self.format, name)

    def commit(self, commit: Commit) -> None:
        pause_s = _FIRST_PAUSE_S
        for left in range(COMMIT_ATTEMPTS - 1, -1, -1):
            last = self.last_commit()
            if last == commit.as_stored():
                break  # the catalog had committed it, and the answer was lost
            self._check_still_valid(last, commit)
            self._step("verify staged files")
            interface.check_staged(self.disk, commit, self.staged_path)
            self._step("write the commit")
            try:
                self._write(commit)
                break
            except TableChanged:
                if not left:
                    raise
            self._pause(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        self._step("done")

    def _check_still_valid(self, last: Commit | None, commit: Commit) -> None:
        interface.check_continues(last, commit, self._name.address)
        if commit.repair and last is not None and last.stop != commit.stop:
            raise TableChanged(
                f"{self._name.address} was changed by another process while a part of it was repaired; nothing was "
                "committed, run it again"
            )
        assert self._table is not None, "it was prepared"
        there = {column.name for column in self._table.schema().fields}
        if last is not None:  # columns that begin with this commit
            there |= set(RecordMapping(commit.schema).arrow.names) - set(RecordMapping(last.schema).arrow.names)
        for column in RecordMapping(commit.schema).arrow:
            if column.name not in there:
                raise BadInput(
                    f"{self._name.address} has no column {column.name!r} any more, another process dropped or renamed "
                    "it; nothing was committed, export into another table"
                )

    def _write(self, commit: Commit) -> None:
        assert self._table is not None, "it was prepared"
        cursor = {
            _COMMIT_KEY: interface.encode_commit(commit).decode(),
            f"{_PREFIX}topic": commit.topic,
            f"{_PREFIX}epoch": str(commit.epoch),
            f"{_PREFIX}next_seq": str(commit.stop),
        }
        base = _data_uri(self._table)
        try:
            transaction = self._table.transaction()
            columns = RecordMapping(commit.schema).arrow
            if not set(columns.names) <= {column.name for column in self._table.schema().fields}:
                with transaction.update_schema() as update:
                    update.union_by_name(columns)
            if commit.replaced:
                ranges = [_seq_range(first, stop) for first, stop in commit.replaced]
                transaction.delete(" or ".join(ranges))
            transaction.add_files([f"{base}/{file.name}" for file in commit.files], snapshot_properties=cursor)
            transaction.set_properties(cursor)
            transaction.commit_transaction()
        except CommitFailedException as error:
            raise TableChanged(
                f"{self._name.address} was written by other processes meanwhile ({str(error)[:200]}), "
                f"{COMMIT_ATTEMPTS} times in a row; nothing was committed, run it again when they write less often"
            ) from None
        except CommitStateUnknownException:
            raise TableChanged(
                f"the catalog of {self._name.address} did not answer a commit; whether it was made shows the next run"
            ) from None
        except (ValueError, RuntimeError) as error:
            self._load()
            if self._is_committed(commit):
                return
            raise BadInput(
                f"{self._name.address} does not take these files ({str(error)[:300]}); nothing was committed"
            ) from None
        except Exception as error:
            raise _catalog_error(self._name, error) from None

    def _is_committed(self, commit: Commit) -> bool:
        return self._table is not None and self._table.properties.get(_COMMIT_KEY) == (
            interface.encode_commit(commit).decode()
        )


def _partition_field(rule: str) -> tuple[str, Transform[Any, Any], str]:
    """Return the source column, the transform and the name of a partition."""
    if rule == partitions.DATE_RULE:
        return "ts", DayTransform(), "ts_day"
    return rule, IdentityTransform(), f"{rule}_partition"


def _own_summary(snapshot: Any) -> str | None:
    summary = snapshot.summary
    return None if summary is None else summary.additional_properties.get(_COMMIT_KEY)


def _data_uri(table: PyIcebergTable) -> str:
    return f"{table.location().rstrip('/')}/{_DATA_DIR}"


def _data_place(name: CatalogTable, table: PyIcebergTable) -> tuple[Disk, str]:
    """Return where the files of a table are written, with the credentials of its catalog."""
    uri = _data_uri(table)
    scheme = addresses.scheme_of(uri)
    if scheme in (None, "file"):
        return PosixDisk(), addresses.local_directory(uri, f"the location of {name.address}")
    if scheme not in TABLE_SCHEMES:
        raise BadInput(f"{name.address} is in {uri}, and {scheme}: is not supported; nothing was done")
    properties = table.io.properties
    found = {key: value for key, value in properties.items() if key.partition(".")[0] in ("s3", "gcs", "adls")}
    given, _ = options_for(family_of(scheme), found)
    address, options = parse_store_address(uri, given.to_iceberg() if given is not None else None)
    return BucketDisk(address, options), address


def open_catalog(name: CatalogTable) -> Catalog:
    try:
        configured = Config().get_catalog_config(name.catalog) or {}
        # pyiceberg would take other libraries for the files of some stores, which are not installed with it.
        default = {} if PY_IO_IMPL in configured else {PY_IO_IMPL: _FILE_IO}
        return load_catalog(name.catalog, **{**default, **name.properties})
    except Exception as error:
        raise _catalog_error(name, error) from None


def _catalog_error(name: CatalogTable, error: Exception) -> Error:
    """Return the error for what a catalog answered, without the values of its properties."""
    if isinstance(error, Error):
        return error
    text = f"{type(error).__name__}: {error}"
    for key, value in name.properties.items():
        if key not in ("type", "warehouse") and len(value) > 3:
            text = text.replace(value, "…")
    text = text[:300]
    if isinstance(error, (UnauthorizedError, ForbiddenError)):
        return StoreDenied(
            name.address, text, kind="catalog of", step="check the credentials of the catalog, then retry"
        )
    if isinstance(error, NoSuchNamespaceError):
        return NotFound(f"there is no namespace {name.address}; nothing was done, check the name and the catalog")
    if isinstance(error, (ValueError, ImportError)):
        return BadInput(
            f"the catalog of {name.address} cannot be opened ({text}); nothing was done, configure it in "
            ".pyiceberg.yaml or with storage options (type, uri, warehouse)"
        )
    return StoreUnavailable(name.address, text, kind="catalog of", step="check the catalog and retry")


# ── reading in tasks ──────────────────────────────────────────────────────────────────────────────


def latest_scan(name: CatalogTable, snapshot_id: int | None) -> IcebergScan:
    """Return a snapshot of a table, by default the newest."""
    with closing(IcebergTable(name, write=False)) as table:
        scan = table.scan()
    assert isinstance(scan, IcebergScan), "a table that exists has one"
    if snapshot_id is not None and scan.table().snapshot_by_id(snapshot_id) is None:
        raise NotFound(f"{name.address} has no snapshot {snapshot_id}; nothing was read, it may have been expired")
    return scan if snapshot_id is None else scan._replace(snapshot_id=snapshot_id)


class IcebergReader:
    """Reads a snapshot of a table file by file, with the deletes of each file."""

    def __init__(self, scan: IcebergScan) -> None:
        self._scan = scan
        whole = scan.table().scan(snapshot_id=scan.snapshot_id)
        declared = schema_to_pyarrow(whole.projection(), include_field_ids=False)
        self.schema = parquet.schema_without_views(_without_large_types(declared))

    def parts(self) -> Sequence[FileScanTask]:
        if self._scan.snapshot_id is None:
            return []
        return list(self._scan.table().scan(snapshot_id=self._scan.snapshot_id).plan_files())

    def read(self, part: FileScanTask, /) -> Iterator[pa.RecordBatch]:
        table = self._scan.table()
        projection = table.scan(snapshot_id=self._scan.snapshot_id).projection()
        for batch in ArrowScan(table.metadata, table.io, projection, AlwaysTrue()).to_record_batches([part]):
            yield parquet.conform(_decoded(batch), self.schema)


def _without_large_types(schema: pa.Schema) -> pa.Schema:
    """Replace Arrow's large types, which pyiceberg declares and does not always return."""
    kinds = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
    return pa.schema([pa.field(column.name, kinds.get(column.type, column.type)) for column in schema])
