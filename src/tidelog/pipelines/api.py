"""The jobs as functions. Each job is in its own module.

`where` is a directory or the address of a server or an object store; a table is in a directory or in an object store,
with `storage_options`. `spark` is a session to run on, also one of Spark Connect; without one, a session is started
with `master` and the settings `conf` and stopped at the end. The default of `master` is that of spark-submit where it
runs this program, and this machine elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Any, Final, Literal, TypeAlias

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType
from xxhash import xxh3_128

import tidelog.spark
from tidelog import addresses
from tidelog.addresses import Location
from tidelog.clock import SystemClock
from tidelog.disk.bucket_disk import BucketDisk
from tidelog.disk.interface import Disk, join
from tidelog.disk.posix import PosixDisk
from tidelog.disk.store_options import TABLE_SCHEMES
from tidelog.engine.compaction import Compacted
from tidelog.errors import BadInput, NotFound, TopicNotFound
from tidelog.pipelines import (
    backfill_job,
    compact_job,
    erase_job,
    latest_rows,
    live_table,
    partitions,
    record_mapping,
    restore_job,
    schema_registry,
    table_formats,
)
from tidelog.pipelines.backfill_job import Backfilled, BackfillRequest, JobInput, RowSource, Transform
from tidelog.pipelines.erase_job import Erased, Selection
from tidelog.pipelines.export_job import HOLD_BYTES, Exported, ExportGroup, ExportJob, JobContext, ShouldStop, Sizes
from tidelog.pipelines.export_supervisor import ExportSupervisor, TopicExport
from tidelog.pipelines.optimize_job import RETENTION_HOURS, Optimized, Vacuumed, optimize_table, vacuum_table
from tidelog.pipelines.reconcile_job import Reconciled, ReconcileJob
from tidelog.pipelines.record_mapping import BadRecordPolicy, RecordMapping
from tidelog.pipelines.reprocess_job import Reprocessed, reprocess_table
from tidelog.pipelines.restore_job import Restored
from tidelog.pipelines.scrub_job import Scrubbed, run_remote_scrub, run_scrub
from tidelog.pipelines.spark_tasks import LocalTaskRunner, SparkTaskRunner
from tidelog.pipelines.stats_job import Stats, collect_stats
from tidelog.pipelines.table_formats import Place, delta, interface
from tidelog.pipelines.table_formats.interface import Format, OnStep
from tidelog.pipelines.table_source import read_changes, read_dead_letters, read_table
from tidelog.pipelines.table_status import TableStatus, table_status
from tidelog.pipelines.upsert_job import LatestReconcileJob, UpsertJob, require_delta
from tidelog.spark import backends, decode, plan, topic_schemas
from tidelog.spark import options as reading
from tidelog.spark.backends.interface import Backend, TopicSnapshot
from tidelog.spark.options import COLUMNS, IS_JSON, Options
from tidelog.spark.source import sample_data
from tidelog.spark.spark_session import is_connect, is_local_master
from tidelog.spark.topic_schemas import TopicSchema

Progress: TypeAlias = Callable[[int, int], None]
FileFormat: TypeAlias = Literal["parquet", "json", "csv", "delta"]
Mode: TypeAlias = Literal["append", "latest"]
StorageOptions: TypeAlias = Mapping[str, str] | None
_FOLLOW_PAUSE_S: Final = 5.0
_RETRY_PAUSE_S: Final = 0.5
COLUMNS_WITH_IS_JSON: Final = (*COLUMNS, IS_JSON)  # from topic to topic: JSON stays JSON


def _read_options(location: Location, topic: str, on_gap: str = "fail") -> Options:
    columns = ",".join(record_mapping.RECORD_COLUMNS)
    return reading.parse_options({**location.as_options(), "subscribe": topic, "columns": columns, "onGap": on_gap})


def _find_topic(location: Location, topic: str, where: str) -> TopicSnapshot:
    """Return a snapshot of a topic. Raises TopicNotFound before a job has started or created anything."""
    with closing(backends.open_backend(_read_options(location, topic))) as backend:
        snapshot = backend.snapshot(topic)
    if snapshot is None:
        error = TopicNotFound(topic)
        error.args = (f"there is no topic {topic!r} in {where}; nothing was done, look at the name again",)
        raise error
    return snapshot


@contextmanager
def job_session(
    spark: SparkSession | None, master: str | None = None, conf: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """Yield the given session, or one that is stopped after the job."""
    if spark is not None:
        tidelog.spark.register(spark)
        yield spark
        return
    is_own = SparkSession.getActiveSession() is None
    quiet = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}
    loopback = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    if is_local_master(master):  # only local workers have to find the driver
        quiet.update(loopback)
    session = tidelog.spark.session(master, conf={**quiet, **(conf or {})})
    if not is_connect(session) and "spark.log.level" not in (conf or {}):
        session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        if is_own:
            session.stop()


def _job_context(spark: SparkSession, disk: Disk, step: OnStep) -> JobContext:
    return JobContext(SparkTaskRunner(spark), disk, SystemClock(), step)


def export(
    where: str,
    topic: str,
    table: str,
    *,
    format: Format | None = None,
    storage_options: StorageOptions = None,
    key: str | None = None,
    schema: StructType | str | None = None,
    infer: bool = False,
    registered_schema: bool = False,
    bad: BadRecordPolicy = "rescue",
    partition_by: str | None = None,
    mode: Mode | None = None,
    latest_key: str | None = None,
    change_feed: bool = False,
    on_gap: Literal["fail", "skip"] = "fail",
    sizes: Sizes | None = None,
    group: str | None = None,
    hold_bytes: int = HOLD_BYTES,
    follow: bool = False,
    pause: ShouldStop | None = None,
    spark: SparkSession | None = None,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    step: OnStep = interface.no_step,
) -> Exported:
    """Export a topic into a table, from the end of the table to the end of the topic.

    Args:
        table: a directory, an address in an object store (s3://bucket/lake/orders, gs:, abfs:), or an Iceberg table of
            a catalog (iceberg://prod/shop.orders).
        format: of a new table, delta (the default) or parquet; a table of a catalog is an Iceberg table.
        storage_options: credentials and endpoints of the object store, as deltalake or pyarrow call them, and
            properties of the catalog.
        schema, infer: fields of JSON that become columns. A schema with more columns than the table has adds them.
        registered_schema: the schemas of the topic by seq (`set_schema`): each range gets the one of its records.
        partition_by: of a new table: `date(ts)` for the day of a record, or a column. A directory (Delta, Parquet) or a
            partition of the table (Iceberg) for each value.
        mode: of a new table, `append` (the default), with a row of each record, or `latest`, with the newest row of
            each key, in a Delta table.
        latest_key: of `latest`: `tag`, or a JSON pointer such as `/user/id`.
        change_feed: of a new table of `latest`: `changes` reads what each commit changed.
        group: a consumer group that is set to the position of the table: retention holds up to `hold_bytes` that the
            table does not have, and the group shows the lag. A directory must have no other writer.
        follow: continue as records come, until the process is interrupted.
        pause: continue until it returns true; it is called after every round, with true where nothing was exported, and
            waits there. Without it `follow` waits 5 s.
    """
    request = ExportRequest(
        format,
        storage_options,
        schema,
        infer,
        registered_schema,
        bad,
        partition_by,
        mode,
        latest_key,
        change_feed,
        on_gap,
        sizes,
        group,
        hold_bytes,
    )
    if follow and pause is None:
        pause = _wait_when_idle
    location = Location.parse(where, key)
    with ExitStack() as stack:
        opened = stack.enter_context(_open_export(location, topic, table, request, step))
        live = stack.enter_context(job_session(spark, master, conf))
        job = stack.enter_context(opened(live))
        return job.run(progress, should_stop=pause)


@dataclass(frozen=True)
class ExportRequest:
    """The options of an export, as `export` explains them."""

    format: Format | None
    storage_options: StorageOptions
    schema: StructType | str | None
    infer: bool
    registered_schema: bool
    bad: BadRecordPolicy
    partition_by: str | None
    mode: Mode | None
    latest_key: str | None
    change_feed: bool
    on_gap: Literal["fail", "skip"]
    sizes: Sizes | None
    group: str | None
    hold_bytes: int

    def __post_init__(self) -> None:
        if self.infer and self.schema is not None:
            raise BadInput("a schema is given and one is to be inferred; nothing was written, choose one of the two")
        if self.registered_schema and (self.infer or self.schema is not None):
            raise BadInput("the registered schemas and another one; nothing was written, choose one of the two")


@contextmanager
def _open_export(
    location: Location, topic: str, table: str, request: ExportRequest, step: OnStep
) -> Iterator[Callable[[SparkSession], closing[ExportJob]]]:
    """Check an export and open its table; yield the function that makes the job in a session."""
    place = table_formats.find_place(table, "the table", request.storage_options)
    options = _read_options(location, topic, request.on_gap)
    group = None if request.group is None else ExportGroup(location, topic, request.group, request.hold_bytes)
    _find_topic(location, topic, location.address)

    def schema_at(seq: int) -> tuple[StructType, int | None]:
        return topic_schemas.schema_at(topic_schemas.read_history(location, topic), seq, topic)

    if request.registered_schema:
        schema_at(0)  # there is one
    with closing(_open_table(place, request.format, step)) as into:
        is_latest = _is_latest(
            into, request.mode, request.latest_key, request.partition_by, change_feed=request.change_feed
        )

        def make_mapping(backend: Backend) -> RecordMapping:
            schema = request.schema
            fields = _parse_schema(schema) if isinstance(schema, str) else schema
            if request.registered_schema:
                found = backend.snapshot(topic)
                fields, _ = schema_at(max(found.evict_floor, found.first_seq) if found is not None else 0)
            if request.infer:
                fields = _infer_fields(backend, options)
            hidden = into.format == "iceberg"
            made = record_mapping.new_mapping(fields, request.bad, request.partition_by, hidden_partitions=hidden)
            return latest_rows.latest_mapping(made, request.latest_key) if is_latest else made

        def make_job(live: SparkSession) -> closing[ExportJob]:
            context = _job_context(live, place.disk, step)
            if is_latest:
                feed = request.change_feed
                job: ExportJob = UpsertJob(options, into, make_mapping, context, request.sizes, change_feed=feed)
            else:
                job = ExportJob(options, into, make_mapping, context, request.sizes)
            if group is not None:
                job.use_group(group)
            if request.registered_schema:

                def schema_of(seq: int) -> tuple[RecordMapping, int | None]:
                    fields, next_change = schema_at(seq)
                    return record_mapping.new_mapping(fields), next_change

                job.use_schemas(schema_of)
            if request.schema is not None and into.last_commit() is not None:
                schema = request.schema
                fields = _parse_schema(schema) if isinstance(schema, str) else schema
                job.use_schema(record_mapping.new_mapping(fields))
            return closing(job)

        yield make_job


def export_topics(
    where: str,
    into: str,
    *,
    topics: Sequence[str] | None = None,
    pattern: str | None = None,
    format: Format | None = None,
    storage_options: StorageOptions = None,
    key: str | None = None,
    schema: StructType | str | None = None,
    infer: bool = False,
    registered_schema: bool = False,
    bad: BadRecordPolicy = "rescue",
    partition_by: str | None = None,
    mode: Mode | None = None,
    latest_key: str | None = None,
    change_feed: bool = False,
    on_gap: Literal["fail", "skip"] = "fail",
    sizes: Sizes | None = None,
    group: str | None = None,
    hold_bytes: int = HOLD_BYTES,
    parallel: int = 4,
    follow: bool = False,
    pause: ShouldStop | None = None,
    spark: SparkSession | None = None,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    step: OnStep = interface.no_step,
) -> list[TopicExport]:
    """Export several topics into a table each, in one process. A topic that fails does not stop the others: it starts
    again after a growing pause. Return what became of each.

    Args:
        into: a directory or an address, with `{topic}` for the name of the topic; without it, the tables are below.
        topics, pattern: names, or a regular expression for whole names; by default all topics. With `follow`, topics
            that match later are exported too.
        parallel: topics that are exported at the same time.
        follow: continue as records come; without it, errors that a retry may fix are tried three times.

    The other arguments are those of `export`, for every topic.
    """
    if topics is not None and pattern is not None:
        raise BadInput("topics and a pattern are given; nothing was written, choose one of the two")
    if parallel < 1:
        raise BadInput(f"{parallel} exports at the same time; nothing was written, give at least 1")
    request = ExportRequest(
        format,
        storage_options,
        schema,
        infer,
        registered_schema,
        bad,
        partition_by,
        mode,
        latest_key,
        change_feed,
        on_gap,
        sizes,
        group,
        hold_bytes,
    )
    location = Location.parse(where, key)
    for name in topics or ():
        _find_topic(location, name, where)
    asked = {"subscribePattern": pattern if pattern is not None else ".*"}
    options = reading.parse_options({**location.as_options(), **asked})

    def find_topics() -> Sequence[str]:
        if topics is not None:
            return topics
        with closing(backends.open_backend(options, retry=False)) as backend:
            found = plan.resolve_topics(backend, options)
        return [name for name in found if pattern is not None or name != topic_schemas.SCHEMAS_TOPIC]

    if topics is None and not find_topics():
        raise NotFound(f"no topic in {where} matches; nothing was written, check the pattern")
    with job_session(spark, master, conf) as live:

        @contextmanager
        def open_export(topic: str, table: str) -> Iterator[ExportJob]:
            with _open_export(location, topic, table, request, step) as opened, opened(live) as job:
                yield job

        supervisor = ExportSupervisor(
            find_topics, lambda topic: _table_of(into, topic), open_export, SystemClock(), parallel=parallel
        )
        return supervisor.run(pause or (_wait_when_idle if follow else _wait_for_retry), once=not follow)


def _table_of(into: str, topic: str) -> str:
    return into.replace("{topic}", topic) if "{topic}" in into else f"{into.rstrip('/')}/{topic}"


def _wait_for_retry(is_idle: bool) -> bool:
    return Event().wait(_RETRY_PAUSE_S if is_idle else 0)


def _wait_when_idle(is_idle: bool) -> bool:
    return Event().wait(_FOLLOW_PAUSE_S if is_idle else 0)


def export_here(
    where: str,
    topic: str,
    table: str,
    *,
    since_last: bool = False,
    format: Format | None = None,
    storage_options: StorageOptions = None,
    key: str | None = None,
    infer: bool = False,
    partition_by: str | None = None,
    bad: BadRecordPolicy = "rescue",
    on_gap: Literal["fail", "skip"] = "fail",
    sizes: Sizes | None = None,
    progress: Progress | None = None,
    step: OnStep = interface.no_step,
) -> Exported:
    """`export` in this process, without Java: to the same tables, with the same commits, so that `export` continues a
    table of this function and the other way round.

    Args:
        since_last: continue an existing table; without it one that has commits is refused.
        format: of a new table, parquet by default.
        partition_by: of a new table, as for `export`.
    """
    place = table_formats.find_place(table, "the table", storage_options)
    location = Location.parse(where, key)
    options = _read_options(location, topic, on_gap)
    _find_topic(location, topic, where)
    if format is None and place.catalog is None:
        format = table_formats.detect_format(place.disk, place.path) or "parquet"
    with closing(_open_table(place, format, step)) as into:
        last = into.last_commit()
        if last is not None and not since_last:
            raise BadInput(
                f"{table} is a table that ends with seq {last.stop - 1} of {last.topic}; nothing was written, continue "
                "it (--since-last, since_last=True) or name another one"
            )

        def make_mapping(backend: Backend) -> RecordMapping:
            fields, hidden = _infer_fields(backend, options) if infer else None, into.format == "iceberg"
            return record_mapping.new_mapping(fields, bad, partition_by, hidden_partitions=hidden)

        if _is_latest(into, None, None, partition_by, change_feed=False):
            raise BadInput(
                f"{table} keeps the newest row of each key, which Spark writes; nothing was written, use tidelog "
                "pipeline export"
            )
        context = JobContext(LocalTaskRunner(), place.disk, SystemClock(), step)
        with closing(ExportJob(options, into, make_mapping, context, sizes)) as job:
            return job.run(progress)


def _infer_fields(backend: Backend, options: Options) -> StructType:
    return decode.infer_fields(sample_data(backend, options))


def _is_latest(
    table: interface.Table, mode: Mode | None, key: str | None, partition_by: str | None, *, change_feed: bool
) -> bool:
    """Return whether a table has the newest row of each key. Raises BadInput for options that are not those of the
    table."""
    last = table.last_commit()
    if last is None:
        if mode != "latest" and (key is not None or change_feed):
            raise BadInput("a key or a change feed without the mode latest; nothing was written, give the mode")
        if mode == "latest":
            require_delta(table)
            latest_rows.check_key(key)
        return mode == "latest"
    known = record_mapping.mapping_from_commit(last.schema, last.shape)
    there = "append" if known.latest_key is None else "latest"
    given = (
        ("mode", mode, there),
        ("key", key, known.latest_key),
        ("partition", None if partition_by is None else partitions.parse_rule(partition_by), known.partition_by),
    )
    for name, asked, has in given:
        if asked is not None and asked != has:
            raise BadInput(
                f"{table.path} was made with the {name} {has or '(none)'}, not {asked}; nothing was written, leave the "
                "option out or name another table"
            )
    if change_feed and not delta.describe_columns(table.disk, table.path)[1]:
        raise BadInput(
            f"{table.path} was made without a change feed; nothing was written, leave the option out or name another "
            "table"
        )
    return known.latest_key is not None


def _parse_schema(schema: str) -> StructType:
    try:
        found = StructType.fromDDL(schema)
    except PySparkException as error:
        raise BadInput(
            f"the schema {schema[:80]!r} does not read ({error.getCondition()}); nothing was written, write it as in "
            "'sku string, price double'"
        ) from None
    if not isinstance(found, StructType):
        raise BadInput(f"the schema {schema[:80]!r} names no columns; nothing was written, name some")
    return found


def _open_table(place: Place, format: Format | None, step: OnStep, *, write: bool = True) -> interface.Table:
    return table_formats.open_table(place.disk, place.path, format, catalog=place.catalog, write=write, step=step)


def read(
    spark: SparkSession, table: str, *, version: int | None = None, storage_options: StorageOptions = None
) -> DataFrame:
    """Load a table as a DataFrame, without a jar: as it is now, or a version of a Delta table, or a snapshot of an
    Iceberg table.

    Example:
        >>> pipelines.read(spark, "s3://bucket/lake/orders").where("seq > 100").show()
    """
    return read_table(spark, table_formats.find_place(table, "the table", storage_options), version)


def read_live(
    spark: SparkSession,
    where: str,
    topic: str,
    table: str,
    *,
    storage_options: StorageOptions = None,
    key: str | None = None,
    on_gap: Literal["fail", "skip"] = "fail",
) -> DataFrame:
    """Load a table up to its cursor and the log after it as one DataFrame, each row once.

    Both are fixed now: exports that commit before Spark reads change nothing. Records of the log get the columns of the
    table. Without a table all records come from the log.

    Example:
        >>> pipelines.read_live(spark, "data", "orders", "lake/orders").where("seq > 100").show()

    Raises:
        GapFound: retention has removed records that were not exported; `on_gap="skip"` reads the others.
    """
    place, location = table_formats.find_place(table, "the table", storage_options), Location.parse(where, key)
    _find_topic(location, topic, where)
    tidelog.spark.register(spark)
    return live_table.load(spark, live_table.plan_place(_read_options(location, topic, on_gap), place))


def status(
    where: str, tables: Sequence[str], *, storage_options: StorageOptions = None, key: str | None = None
) -> list[TableStatus]:
    """Return where tables stand beside their topics in a directory or a server. Starts no session of Spark.

    Args:
        tables: tables; directories and prefixes of buckets, which stand for all tables in them; and catalogs or
            namespaces of Iceberg (iceberg://prod, iceberg://prod/shop), which stand for the tables of exports in them.
    """
    places = [place for table in tables for place in table_formats.find_tables(table, storage_options)]
    options = reading.parse_options({**Location.parse(where, key).as_options(), "subscribePattern": ".*"})
    found: list[TableStatus] = []
    with closing(backends.open_backend(options, retry=False)) as backend:
        for place in places:
            with closing(_open_table(place, None, interface.no_step, write=False)) as opened:
                # The files of an Iceberg table are elsewhere than its name says.
                found.append(table_status(backend, opened, SystemClock())._replace(table=place.path))
    return found


def reconcile(
    where: str,
    topic: str,
    table: str,
    *,
    storage_options: StorageOptions = None,
    key: str | None = None,
    repair: bool = False,
    spark: SparkSession | None = None,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    step: OnStep = interface.no_step,
) -> Reconciled:
    """Compare a table with its topic and show the first difference; with `repair`, rewrite the ranges that differ."""
    place = table_formats.find_place(table, "the table", storage_options)
    options = _read_options(Location.parse(where, key), topic)
    with (
        closing(_open_table(place, None, step, write=repair)) as into,
        job_session(spark, master, conf) as live,
        closing(_reconcile_job(options, into, _job_context(live, place.disk, step))) as job,
    ):
        return job.run(repair=repair, progress=progress)


def _reconcile_job(options: Options, table: interface.Table, context: JobContext) -> ReconcileJob | LatestReconcileJob:
    last = table.last_commit()
    if last is not None and record_mapping.mapping_from_commit(last.schema, last.shape).latest_key is not None:
        return LatestReconcileJob(options, table, context)
    return ReconcileJob(options, table, context)


def dead_letters(spark: SparkSession, table: str, *, storage_options: StorageOptions = None) -> DataFrame:
    """Load the records in quarantine of a table as they were, with a column `reason`.

    Example:
        >>> pipelines.dead_letters(spark, "lake/orders").select("seq", "reason").show()
    """
    return read_dead_letters(spark, table_formats.find_place(table, "the table", storage_options))


def reprocess(
    where: str,
    topic: str,
    table: str,
    *,
    schema: StructType | str | None = None,
    storage_options: StorageOptions = None,
    key: str | None = None,
    spark: SparkSession | None = None,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    step: OnStep = interface.no_step,
) -> Reprocessed:
    """Try records in quarantine again with the newest schema of the table: those that fit become rows.

    Ranges of the topic with such records are read and written again, in one commit. `schema` adds columns to the table
    first, as for `export`.
    """
    place = table_formats.find_place(table, "the table", storage_options)
    _check_table_exists(place)
    options = _read_options(Location.parse(where, key), topic)
    with closing(_open_table(place, None, step)) as into, job_session(spark, master, conf) as live:
        fields = _parse_schema(schema) if isinstance(schema, str) else schema
        wanted = None if fields is None else record_mapping.new_mapping(fields)
        return reprocess_table(options, into, _job_context(live, place.disk, step), wanted)


def set_schema(
    where: str, topic: str, schema: str, *, first_seq: int | None = None, key: str | None = None
) -> TopicSchema:
    """Register the fields of a topic's JSON from a seq on, by default from the next record. Starts no session of Spark.

    Args:
        schema: as in 'sku string, price double'; with all fields of the schema before it.
    """
    return schema_registry.set_schema(Location.parse(where, key), topic, schema, first_seq)


def schema_history(where: str, topic: str, *, key: str | None = None) -> list[TopicSchema]:
    """Return the registered schemas of a topic, oldest first. Starts no session of Spark."""
    return topic_schemas.read_history(Location.parse(where, key), topic)


def optimize(
    table: str,
    *,
    file_bytes: int = 128 << 20,
    storage_options: StorageOptions = None,
    spark: SparkSession | None = None,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    step: OnStep = interface.no_step,
) -> Optimized:
    """Join neighbouring small files of a Delta or a Parquet table into files of at most `file_bytes`.

    Rows, ranges and hashes stay, so exports and comparisons go on as before. Older versions of a Delta table keep their
    files until `vacuum`.
    """
    if file_bytes < 1:
        raise BadInput(f"files of {file_bytes} bytes; nothing was done, give at least 1")
    place = table_formats.find_place(table, "the table", storage_options)
    _check_table_exists(place)
    with closing(_open_table(place, None, step)) as into, job_session(spark, master, conf) as live:
        return optimize_table(into, _job_context(live, place.disk, step), file_bytes)


def vacuum(
    table: str,
    *,
    retention_hours: int = RETENTION_HOURS,
    force: bool = False,
    dry_run: bool = False,
    storage_options: StorageOptions = None,
) -> Vacuumed:
    """Remove data files that no version of the last `retention_hours` needs, and staged files of killed exports.

    Starts no session of Spark. Less than 168 hours are refused without `force`: older versions cannot be read
    afterwards, and an export that is at work in a bucket may lose its files and begins its commit again.
    """
    place = table_formats.find_place(table, "the table", storage_options)
    _check_table_exists(place)
    with closing(_open_table(place, None, interface.no_step, write=not dry_run)) as opened:
        now_ms = SystemClock().now_us() // 1000
        return vacuum_table(place, opened, now_ms, retention_hours, force=force, dry_run=dry_run)


def _check_table_exists(place: Place) -> None:
    if place.catalog is None and table_formats.detect_format(place.disk, place.path) is None:
        raise NotFound(f"there is no table at {place.path}; nothing was done, check the path")


def changes(
    spark: SparkSession,
    table: str,
    *,
    first_version: int = 0,
    last_version: int | None = None,
    storage_options: StorageOptions = None,
) -> DataFrame:
    """Load what the commits of a table with a change feed changed, as rows with `_change_type` (insert, delete,
    update_preimage, update_postimage), `_commit_version` and `_commit_timestamp`.

    Args:
        first_version, last_version: of the table, both included; by default all, up to the newest one now.

    Example:
        >>> pipelines.changes(spark, "lake/users", first_version=7).where("_change_type = 'delete'").show()
    """
    place = table_formats.find_place(table, "the table", storage_options)
    return read_changes(spark, place, first_version, last_version)


def scrub(
    where: str,
    *,
    key: str | None = None,
    spark: SparkSession | None = None,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Scrubbed:
    """Verify every checksum of a directory of topics, or every record that a server or an object store has."""
    location = Location.parse(where, key)
    is_remote = location.is_server or location.is_object_store
    if location.is_object_store and addresses.scheme_of(where) not in TABLE_SCHEMES:
        raise BadInput(
            f"{where!r:.200} is no place that a scrub reads: a directory, an address with "
            f"{', '.join(f'{scheme}://' for scheme in TABLE_SCHEMES)} or a server; nothing was done, copy the "
            "directory to one of them"
        )
    if not is_remote and PosixDisk().stat(location.address) is None:
        raise NotFound(f"there is nothing at {where}; nothing was done, check the path")
    with job_session(spark, master, conf) as live:
        if is_remote:
            return run_remote_scrub(location, SparkTaskRunner(live), progress)
        return run_scrub(location.address, SparkTaskRunner(live), progress)


def stats(
    where: str,
    topic: str,
    *,
    every_ms: int = 60_000,
    key: str | None = None,
    spark: SparkSession | None = None,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
) -> Stats:
    """Compute rates, sizes and waits per interval."""
    location = Location.parse(where, key)
    _find_topic(location, topic, where)
    with job_session(spark, master, conf) as live:
        return collect_stats(live, location, topic, every_ms)


def backfill(
    source: str,
    target: str,
    topic: str | None = None,
    *,
    from_topic: str | None = None,
    format: FileFormat | None = None,
    function: Transform | None = None,
    function_name: str | None = None,
    job: str = "backfill",
    work_dir: str | None = None,
    first: int | None = None,
    until: int | None = None,
    table_format: Format | None = None,
    storage_options: StorageOptions = None,
    key: str | None = None,
    target_key: str | None = None,
    spark: SparkSession | None = None,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    step: OnStep = interface.no_step,
) -> Backfilled:
    """Write rows of files, of a table, or of a range of a topic, through a function, into a topic or a table.

    source, from_topic    a directory or server and its topic; or files of a `format`
    target, topic         a directory or server and its topic; without a topic, the path of a table
    first, until          seqs of the source, both included; by default up to its present end

    From topic to topic the function gets one more column, `is_json`. If the returned rows have it, JSON stays JSON;
    without it, `data` is written as bytes.

    A job into a topic is identified by its name: a second run with the same input writes nothing (`written` is 0),
    other input is refused.
    """
    from_location = None if from_topic is None else Location.parse(source, key)
    from_place = None if from_location is not None else _find_place(source, "the source", storage_options)
    source = from_location.address if from_location is not None else from_place.path if from_place else source
    into_server = topic is not None and Location(target).is_server
    to_place = None if topic is not None else _find_place(target, "the target", storage_options)
    if to_place is not None:
        target = to_place.path
    elif not into_server:
        target = addresses.absolute_path(target, "the target")
    work = _find_place(work_dir or f".tidelog-backfill/{job}", "the working directory", storage_options)
    name = function_name or (f"{function.__module__}:{function.__qualname__}" if function is not None else None)
    request = BackfillRequest(
        job,
        topic,
        JobInput(source, target, from_topic, format, first, until, name),
        function,
        work.path,
    )
    with job_session(spark, master, conf) as live:
        if to_place is not None:
            context = _job_context(live, to_place.disk, step)
            return _backfill_table(live, context, request, from_location, to_place, table_format)
        context = _job_context(live, work.disk, step)

        def rows() -> RowSource:
            if from_topic is None or from_location is None:
                assert from_place is not None, "a source without a topic is files or a table"
                return _file_source(live, from_place, format)
            snapshot = _find_topic(from_location, from_topic, source)
            low = max(first if first is not None else snapshot.evict_floor, snapshot.first_seq)
            high = min(snapshot.next_seq if until is None else until + 1, snapshot.next_seq)
            return RowSource(
                lambda: _read_range(live, from_location, from_topic, low, high, COLUMNS_WITH_IS_JSON),
                high - 1,
                f"epoch {snapshot.epoch}",
            )

        with backfill_job.open_target(Location.parse(target, target_key)) as opened:
            return backfill_job.backfill_topic(request, rows, opened, context, progress)


def erase(
    where: str,
    topic: str,
    tables: Sequence[str],
    *,
    match: str | None = None,
    seqs: Sequence[int] | None = None,
    actor: str | None = None,
    storage_options: StorageOptions = None,
    key: str | None = None,
    spark: SparkSession | None = None,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    step: OnStep = interface.no_step,
) -> Erased:
    """Erase records from a topic and its tables: rows and files, older versions of Delta tables included.

    Spark is started only where a table is a directory of Parquet files.

    Args:
        match: a tag, or the beginning of one and `*`.
        seqs: these records; one of the two is given.
        actor: who erases, for the receipt of a directory; a server takes the name of the key.

    Raises:
        ErasureIncomplete: the log is done, and a table still has rows or files of the records.
    """
    location, selection = Location.parse(where, key), Selection.parse(match, seqs)
    if location.is_object_store:
        raise BadInput(f"{where} is an object store, where nothing is erased; nothing was done, name a server")
    _find_topic(location, topic, where)
    with ExitStack() as stack:
        opened: list[tuple[Place, interface.Table]] = []
        for name in tables:
            place = table_formats.find_place(name, "the table", storage_options)
            if place.catalog is not None:
                raise BadInput(
                    f"{place.path} is an Iceberg table, whose snapshots keep removed rows; nothing was erased. Leave "
                    "it out, delete the rows and expire the snapshots with its own engine, and then reconcile it"
                )
            if table_formats.detect_format(place.disk, place.path) is None:
                raise NotFound(f"there is no table at {place.path}; nothing was erased, check the path")
            opened.append((place, stack.enter_context(closing(_open_table(place, None, step)))))
            erase_job.check_table(place, opened[-1][1], topic, selection)
        needs_spark = any(table.format != "delta" for _, table in opened)
        live = stack.enter_context(job_session(spark, master, conf)) if needs_spark else None

        def repair(place: Place, table: interface.Table) -> None:
            assert live is not None, "started above"
            context = _job_context(live, place.disk, step)
            with closing(ReconcileJob(_read_options(location, topic, "skip"), table, context)) as job:
                job.run(repair=True)

        step("erase the log")
        receipt = erase_job.erase_log(location, topic, selection, actor)
        done = []
        for place, table in opened:
            step("erase a table")
            done.append(erase_job.erase_table(live, place, table, selection, repair))
        return erase_job.make_receipt(topic, receipt, done)


def compact(
    where: str,
    topic: str,
    *,
    key: str | None = None,
    spark: SparkSession | None = None,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    step: OnStep = interface.no_step,
) -> Compacted:
    """Remove the records of a topic with compaction that newer ones of their key replaced: `Topic.compact`, with the
    search on executors.

    A directory is held by this process until the job ends. A run that broke off is repeated: what it removed stays
    removed, and the counts are those of the new run.

    Raises:
        BadInput: the topic has no compaction.
        Refused: the server was restarted, or the rule for keys was changed, while the job searched.
    """
    location = Location.parse(where, key)
    compact_job.check_location(location)
    _find_topic(location, topic, where)
    with compact_job.open_log(location, topic) as log, job_session(spark, master, conf) as live:
        return compact_job.run_compact(live, location, topic, log, step, progress)


def restore(
    target: str,
    into: str,
    topic: str | None = None,
    *,
    to_topic: str | None = None,
    backup_id: str | None = None,
    to_seq: Mapping[str, int] | None = None,
    to_time_ms: int | None = None,
    job: str = "restore",
    work_dir: str | None = None,
    target_key: str | None = None,
    spark: SparkSession | None = None,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    step: OnStep = interface.no_step,
) -> Restored:
    """Restore a backup as it was at a seq or a time: into a new directory, or one topic of it into a topic.

    Args:
        target: where the backups are: a directory, or an address such as s3://bucket/backups.
        into: a directory; with `topic` a directory or a server, where the topic is made if there is none.
        topic, to_topic: the topic of the backup, and its name in `into`, by default the same.
        to_seq, to_time_ms: records after it are not restored.
        job, work_dir: of the backfill into the topic; a run that broke off is repeated under the same name.
    """
    if topic is None:
        if to_topic is not None:
            raise BadInput("to_topic without a topic; nothing was done, name the topic of the backup")
        return restore_job.restore_directory(target, into, backup_id, to_seq, to_time_ms)
    work = addresses.absolute_path(work_dir or f".tidelog-restore/{job}", "the working directory")
    with job_session(spark, master, conf) as live:
        restore_job.check_local_session(live)
        step("restore")
        restored, directory = restore_job.restore_for_backfill(target, work, backup_id, to_seq, to_time_ms)
        restore_job.check_topic_restored(restored, topic)
        done = backfill(
            directory,
            into,
            to_topic or topic,
            from_topic=topic,
            job=job,
            work_dir=join(work, "staged"),
            target_key=target_key,
            spark=live,
            progress=progress,
            step=step,
        )
    return restored._replace(directory=None, backfilled=done)


def _read_range(
    spark: SparkSession, source: Location, topic: str, first: int, stop: int, columns: tuple[str, ...] = COLUMNS
) -> DataFrame:
    return (
        spark.read.format("tidelog")
        .options(
            **source.as_options(),
            subscribe=topic,
            startingOffsets=f'{{"{topic}": {first}}}',
            endingOffsets=f'{{"{topic}": {stop}}}',
            columns=",".join(columns),
        )
        .load()
    )


def _find_place(text: str, what: str, storage_options: StorageOptions) -> Place:
    """Return a place of a job that has several: the storage options are for those of them in an object store."""
    has_options = addresses.scheme_of(text) in (*TABLE_SCHEMES, interface.ICEBERG_SCHEME)
    return table_formats.find_place(text, what, storage_options if has_options else None)


def _file_source(spark: SparkSession, place: Place, format: FileFormat | None) -> RowSource:
    disk, path = place.disk, place.path
    if place.catalog is not None:
        from tidelog.pipelines.table_formats import iceberg  # pyiceberg is an extra of its own

        snapshot = iceberg.latest_scan(place.catalog, None)
        return RowSource(
            lambda: read_table(spark, place, snapshot.snapshot_id), content=f"{path} snapshot {snapshot.snapshot_id}"
        )
    kind = format or next((kind for kind in ("parquet", "json", "csv") if path.rstrip("/").endswith(kind)), None)
    if disk.stat(path) is None:
        raise NotFound(f"there is nothing at {path}; nothing was written, check the path")
    if kind == "delta" or table_formats.detect_format(disk, path) == "delta":
        table = delta.latest_version(disk, path)
        return RowSource(lambda: read_table(spark, place, table.version), content=table.description)
    if isinstance(disk, BucketDisk):
        if kind not in (None, "parquet") or table_formats.detect_format(disk, path) is None:
            raise BadInput(
                f"{path} is read without a jar only as a Delta or a Parquet table; nothing was written, copy {kind} "
                "files to a directory first"
            )
        return RowSource(lambda: read_table(spark, place), content=_fingerprint_files(disk, path))
    if kind is None:
        raise BadInput(
            f"{path}: its name does not say what it is; nothing was written, give the format (parquet, json, csv)"
        )
    reader: Any = spark.read
    if kind == "csv":
        reader = reader.option("header", "true").option("inferSchema", "true")
    return RowSource(lambda: getattr(reader, kind)(path), content=_fingerprint_files(disk, path))


def _fingerprint_files(disk: Disk, path: str) -> str:
    """Fingerprint files by their names, sizes and times."""
    digest = xxh3_128()
    waiting = [path]
    while waiting:
        entry = waiting.pop()
        stat = disk.stat(entry)
        if stat is None:
            continue
        if stat.is_dir:
            waiting += [join(entry, name) for name in sorted(disk.list_dir(entry)) if name[0] not in "_."]
        else:
            digest.update(f"{entry.removeprefix(path)}\0{stat.size}\0{stat.modified_ms}\n".encode())
    return digest.hexdigest()


def _backfill_table(
    spark: SparkSession,
    context: JobContext,
    request: BackfillRequest,
    source: Location | None,
    place: Place,
    format: Format | None,
) -> Backfilled:
    given = request.input
    if source is None or given.from_topic is None or request.function is None:
        raise BadInput(
            "a backfill into a table is a range of a topic through a function; nothing was written, name both, or use "
            "export for rows as they are"
        )
    topic = given.from_topic
    snapshot = _find_topic(source, topic, given.source)
    with closing(_open_table(place, format, context.on_step)) as table:
        return backfill_job.backfill_table(
            request, snapshot, lambda low, high: _read_range(spark, source, topic, low, high), table, context
        )
