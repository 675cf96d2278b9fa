"""The jobs as a program calls them: where, what, and a session. Each job is in its own module.

`where` is a directory or the address of a server. `spark` is a session of yours; without one a session is started on
`master`, which is this machine unless another is named, and ended again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Final, Literal, TypeAlias

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType
from xxhash import xxh3_128

import tidelog.spark
from tidelog import addresses
from tidelog.clock import SystemClock
from tidelog.disk.interface import Disk, join
from tidelog.disk.posix import PosixDisk
from tidelog.errors import BadInput, NotFound, TopicNotFound
from tidelog.pipelines import backfill_job, table_formats
from tidelog.pipelines import record_mapping as columns
from tidelog.pipelines.backfill_job import (
    Backfilled,
    BatchSink,
    DirectorySink,
    JobInput,
    RowSource,
    ServerSink,
    Transform,
)
from tidelog.pipelines.export_job import Exported, ExportJob, JobContext, ShouldStop, Sizes
from tidelog.pipelines.reconcile_job import Reconciled, ReconcileJob
from tidelog.pipelines.record_mapping import BadRecordPolicy, RecordMapping
from tidelog.pipelines.scrub_job import Scrubbed, run_scrub
from tidelog.pipelines.spark_tasks import SparkTaskRunner
from tidelog.pipelines.stats_job import Stats, collect_stats
from tidelog.pipelines.table_formats import delta, interface
from tidelog.pipelines.table_formats.interface import Format, OnStep
from tidelog.spark import backends, decode
from tidelog.spark import options as reading
from tidelog.spark.backends.interface import Backend
from tidelog.spark.options import COLUMNS, IS_JSON, Options
from tidelog.spark.source import sample_data

Progress: TypeAlias = Callable[[int, int], None]
FileFormat: TypeAlias = Literal["parquet", "json", "csv", "delta"]
COLUMNS_WITH_IS_JSON: Final = (*COLUMNS, IS_JSON)  # of a topic that goes into a topic: what is JSON stays JSON


def source_options(where: str, key: str | None = None) -> dict[str, str]:
    """Where topics are read, as options of the source."""
    if addresses.is_server(where):
        return {"server": where, **({"key": key} if key is not None else {})}
    if key is not None:
        raise BadInput("a key is for a server; nothing was done, leave it out or name a server")
    return {"path": addresses.topics_address(where, "the place of the topics")}


def _read_options(where: str, topic: str, key: str | None, on_gap: str = "fail") -> Options:
    return reading.parse_options(
        {**source_options(where, key), "subscribe": topic, "columns": ",".join(columns.RECORD_COLUMNS), "onGap": on_gap}
    )  # fmt: skip


@contextmanager
def job_session(spark: SparkSession | None, master: str) -> Iterator[SparkSession]:
    """The session that was given, or one that ends with the job."""
    if spark is not None:
        tidelog.spark.register(spark)
        yield spark
        return
    mine = SparkSession.getActiveSession() is None
    here = {"spark_driver_host": "127.0.0.1", "spark_driver_bindAddress": "127.0.0.1"}
    made = tidelog.spark.session(
        master,
        "tidelog",
        spark_ui_enabled="false",
        spark_ui_showConsoleProgress="false",
        spark_log_level="ERROR",
        **(here if master.startswith("local") else {}),  # only local workers have to find the driver
    )
    made.sparkContext.setLogLevel("ERROR")
    try:
        yield made
    finally:
        if mine:
            made.stop()


def _job_context(spark: SparkSession, step: OnStep) -> JobContext:
    return JobContext(SparkTaskRunner(spark), PosixDisk(), SystemClock(), step)


def export(
    where: str,
    topic: str,
    table: str,
    *,
    format: Format | None = None,
    key: str | None = None,
    schema: StructType | str | None = None,
    infer: bool = False,
    bad: BadRecordPolicy = "rescue",
    on_gap: Literal["fail", "skip"] = "fail",
    sizes: Sizes | None = None,
    pause: ShouldStop | None = None,
    spark: SparkSession | None = None,
    master: str = "local[*]",
    progress: Progress | None = None,
    step: OnStep = interface.no_step,
) -> Exported:
    """Bring a topic into a table, from where the table ends to the topic's end; with `pause`, which is asked after
    every turn whether it is enough, and waits where nothing was done, on and on."""
    table = addresses.absolute_path(table, "the table")
    options = _read_options(where, topic, key, on_gap)
    if infer and schema is not None:
        raise BadInput("a schema is given and one is to be inferred; nothing was written, choose one of the two")
    with closing(backends.open_backend(options)) as place:
        _check_topic_exists(place, topic, where)
    with job_session(spark, master) as live, closing(_open_table(table, format, step)) as into:

        def shape(place: Backend) -> RecordMapping:
            if infer:
                return columns.new_mapping(decode.infer_fields(sample_data(place, options)), bad)
            return columns.new_mapping(_parse_schema(schema) if isinstance(schema, str) else schema, bad)

        with closing(ExportJob(options, into, shape, _job_context(live, step), sizes)) as job:
            return job.run_once(progress) if pause is None else job.run_until_stopped(pause, progress)


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


def _open_table(path: str, format: Format | None, step: OnStep, *, write: bool = True) -> interface.Table:
    return table_formats.open_table(PosixDisk(), path, format, write=write, step=step)


def _check_topic_exists(backend: Backend, topic: str, where: str) -> None:
    """Say what is missing before anything is started or made."""
    if topic not in backend.names():
        error = TopicNotFound(topic)
        error.args = (f"there is no topic {topic!r} in {where}; nothing was done, look at the name again",)
        raise error


def reconcile(
    where: str,
    topic: str,
    table: str,
    *,
    key: str | None = None,
    repair: bool = False,
    spark: SparkSession | None = None,
    master: str = "local[*]",
    progress: Progress | None = None,
    step: OnStep = interface.no_step,
) -> Reconciled:
    """Prove that a table is the log, and show where not; with `repair`, make ranges again that differ."""
    table = addresses.absolute_path(table, "the table")
    options = _read_options(where, topic, key)
    with (
        closing(_open_table(table, None, step, write=repair)) as into,
        job_session(spark, master) as live,
        closing(ReconcileJob(options, into, _job_context(live, step))) as job,
    ):
        return job.run(repair=repair, progress=progress)


def scrub(
    path: str, *, spark: SparkSession | None = None, master: str = "local[*]", progress: Progress | None = None
) -> Scrubbed:
    """Verify every checksum of a directory of topics."""
    path = addresses.absolute_path(path, "the directory")
    if PosixDisk().stat(path) is None:
        raise NotFound(f"there is nothing at {path}; nothing was done, check the path")
    with job_session(spark, master) as live:
        return run_scrub(path, SparkTaskRunner(live), progress)


def stats(
    where: str,
    topic: str,
    *,
    every_ms: int = 60_000,
    key: str | None = None,
    spark: SparkSession | None = None,
    master: str = "local[*]",
) -> Stats:
    """Rates, sizes and waits by interval."""
    options = _read_options(where, topic, key)
    with closing(backends.open_backend(options)) as place:
        _check_topic_exists(place, topic, where)
    with job_session(spark, master) as live:
        return collect_stats(live, source_options(where, key), topic, every_ms)


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
    key: str | None = None,
    target_key: str | None = None,
    spark: SparkSession | None = None,
    master: str = "local[*]",
    progress: Progress | None = None,
    step: OnStep = interface.no_step,
) -> Backfilled:
    """Rows of files, of a table, or of a range of a topic, through a function, into a topic or a table.

    source, from_topic    a directory or server and the topic in it; or files of a `format`
    target, topic         a directory or server and the topic in it; without a topic, the path of a table
    first, until          of the source's seqs, both included; until its end now where not given

    From a topic into a topic the function gets one more column, `is_json`: with it in the rows it gives, JSON stays
    JSON; where it drops the column, `data` is written as bytes.

    A job into a topic is known by its name: run again with the same input it writes nothing (`written` is 0), with
    other input it is refused.
    """
    source = (
        addresses.absolute_path(source, "the source")
        if from_topic is None
        else source_options(source, key).get("path", source)
    )
    target = (
        target if topic is not None and addresses.is_server(target) else addresses.absolute_path(target, "the target")
    )
    work_dir = addresses.absolute_path(work_dir or f".tidelog-backfill/{job}", "the working directory")
    name = function_name or (f"{function.__module__}:{function.__qualname__}" if function is not None else None)
    with job_session(spark, master) as live:
        work = _job_context(live, step)
        if topic is None:
            return _backfill_table(live, work, source, target, from_topic, function, name, job, key, first,
                               table_format, until)  # fmt: skip
        given = JobInput(source, target, from_topic, format, first, until, name)

        def rows() -> RowSource:
            if from_topic is None:
                return _file_source(live, source, format)
            place = source_options(source, key)
            with closing(backends.open_backend(_read_options(source, from_topic, key))) as looked:
                _check_topic_exists(looked, from_topic, source)
                sight = looked.snapshot(from_topic)
            assert sight is not None, "it was there a moment ago"
            low = max(first if first is not None else sight.evict_floor, sight.first_seq)
            high = min(sight.next_seq if until is None else until + 1, sight.next_seq)
            return RowSource(
                lambda: _read_range(live, place, from_topic, low, high, COLUMNS_WITH_IS_JSON),
                high - 1,
                f"epoch {sight.epoch}",
            )

        with closing(_open_sink(target, target_key)) as sink:
            return backfill_job.backfill_topic(job, topic, given, rows, function, sink, work_dir, work, progress)


def _open_sink(target: str, key: str | None) -> BatchSink:
    where = source_options(target, key)
    return ServerSink(where["server"], key) if "server" in where else DirectorySink(where["path"])


def _read_range(
    spark: SparkSession, source: dict[str, str], topic: str, first: int, stop: int, columns: tuple[str, ...] = COLUMNS
) -> DataFrame:
    return (
        spark.read.format("tidelog")
        .options(
            **source,
            subscribe=topic,
            startingOffsets=f'{{"{topic}": {first}}}',
            endingOffsets=f'{{"{topic}": {stop}}}',
            columns=",".join(columns),
        )
        .load()
    )


def _file_source(spark: SparkSession, path: str, format: FileFormat | None) -> RowSource:
    kind = format or next((kind for kind in ("parquet", "json", "csv") if path.rstrip("/").endswith(kind)), None)
    if PosixDisk().stat(path) is None:
        raise NotFound(f"there is nothing at {path}; nothing was written, check the path")
    if kind == "delta" or table_formats.detect_format(PosixDisk(), path) == "delta":
        table = delta.latest_version(path)
        return RowSource(lambda: delta.read_frame(spark, path, table.version), content=table.description)
    if kind is None:
        raise BadInput(
            f"{path}: its name does not say what it is; nothing was written, give the format (parquet, json, csv)"
        )
    reader: Any = spark.read
    if kind == "csv":
        reader = reader.option("header", "true").option("inferSchema", "true")
    return RowSource(lambda: getattr(reader, kind)(path), content=_fingerprint_files(PosixDisk(), path))


def _fingerprint_files(disk: Disk, path: str) -> str:
    """What files hold, by their names, sizes and times."""
    found = xxh3_128()
    waiting = [path]
    while waiting:
        place = waiting.pop()
        stat = disk.stat(place)
        if stat is None:
            continue
        if stat.is_dir:
            waiting += [join(place, name) for name in sorted(disk.list_dir(place)) if name[0] not in "_."]
        else:
            found.update(f"{place.removeprefix(path)}\0{stat.size}\0{stat.modified_ms}\n".encode())
    return found.hexdigest()


def _backfill_table(
    spark: SparkSession,
    context: JobContext,
    source: str,
    target: str,
    from_topic: str | None,
    function: Transform | None,
    name: str | None,
    job: str,
    key: str | None,
    first: int | None,
    format: Format | None,
    until: int | None,
) -> Backfilled:
    if from_topic is None or function is None or name is None:
        raise BadInput(
            "a backfill into a table is a range of a topic through a function; nothing was written, name both, or use "
            "export for rows as they are"
        )
    place = source_options(source, key)
    with closing(backends.open_backend(_read_options(source, from_topic, key))) as looked:
        _check_topic_exists(looked, from_topic, source)
        sight = looked.snapshot(from_topic)
        assert sight is not None, "it was there a moment ago"
        with closing(_open_table(target, format, context.on_step)) as table:
            return backfill_job.backfill_table(
                job,
                sight,
                lambda low, high: _read_range(spark, place, from_topic, low, high),
                function,
                name,
                table,
                context,
                first,
                None if until is None else until + 1,
            )
