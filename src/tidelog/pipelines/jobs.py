"""[shell] The jobs as a program calls them: where, what, and a session; everything else is in the room of its job.

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
from tidelog.clock import SystemClock
from tidelog.disk.posix import PosixDisk
from tidelog.disk.seam import Disk, join
from tidelog.errors import BadInput, NotFound, TopicNotFound
from tidelog.pipelines import addresses, backfilling, columns, delta_read, opening, tables
from tidelog.pipelines.backfilling import Backfilled, Function, Source
from tidelog.pipelines.columns import Bad, Shape
from tidelog.pipelines.exporting import Export, Exported, Pause, Work
from tidelog.pipelines.measuring import Stats, gathered
from tidelog.pipelines.publish import Door, Input, PathDoor, ServerDoor
from tidelog.pipelines.reconciling import Reconcile, Reconciled
from tidelog.pipelines.runner import SparkRunner
from tidelog.pipelines.scrubbing import Scrubbed, scrubbed
from tidelog.pipelines.sizing import Sizes
from tidelog.pipelines.tables import Format, Steps
from tidelog.spark import options as reading
from tidelog.spark import payload, places
from tidelog.spark.options import COLUMNS, IS_JSON, Options
from tidelog.spark.place import Place
from tidelog.spark.source import samples

Progress: TypeAlias = Callable[[int, int], None]
FileFormat: TypeAlias = Literal["parquet", "json", "csv", "delta"]
WITH_KIND: Final = (*COLUMNS, IS_JSON)  # of a topic that goes into a topic: what is JSON stays JSON


def place_of(where: str, key: str | None = None) -> dict[str, str]:
    """Where topics are read, as options of the source."""
    if addresses.is_server(where):
        return {"server": where, **({"key": key} if key is not None else {})}
    if key is not None:
        raise BadInput("a key is for a server; nothing was done, leave it out or name a server")
    return {"path": addresses.topics(where, "the place of the topics")}


def _options(where: str, topic: str, key: str | None, on_gap: str = "fail") -> Options:
    return reading.read(
        {**place_of(where, key), "subscribe": topic, "columns": ",".join(columns.OWN), "onGap": on_gap}
    )  # fmt: skip


@contextmanager
def session(spark: SparkSession | None, master: str) -> Iterator[SparkSession]:
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
        **(here if master.startswith("local") else {}),  # nobody else has to find the driver
    )
    made.sparkContext.setLogLevel("ERROR")
    try:
        yield made
    finally:
        if mine:
            made.stop()


def _work(spark: SparkSession, step: Steps) -> Work:
    return Work(SparkRunner(spark), PosixDisk(), SystemClock(), step)


def export(
    where: str,
    topic: str,
    table: str,
    *,
    format: Format | None = None,
    key: str | None = None,
    schema: StructType | str | None = None,
    infer: bool = False,
    bad: Bad = "rescue",
    on_gap: Literal["fail", "skip"] = "fail",
    sizes: Sizes | None = None,
    pause: Pause | None = None,
    spark: SparkSession | None = None,
    master: str = "local[*]",
    progress: Progress | None = None,
    step: Steps = tables.nothing,
) -> Exported:
    """Bring a topic into a table, from where the table ends to the topic's end; with `pause`, which is asked after
    every turn whether it is enough, and waits where nothing was done, on and on."""
    table = addresses.absolute(table, "the table")
    options = _options(where, topic, key, on_gap)
    if infer and schema is not None:
        raise BadInput("a schema is given and one is to be inferred; nothing was written, choose one of the two")
    with closing(places.of(options)) as place:
        _there(place, topic, where)
    with session(spark, master) as live, closing(_table(table, format, step)) as into:

        def shape(place: Place) -> Shape:
            if infer:
                return columns.shape_of(payload.inferred(samples(place, options)), bad)
            return columns.shape_of(_parsed(schema) if isinstance(schema, str) else schema, bad)

        with closing(Export(options, into, shape, _work(live, step), sizes)) as job:
            return job.once(progress) if pause is None else job.on(pause, progress)


def _parsed(schema: str) -> StructType:
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


def _table(path: str, format: Format | None, step: Steps, *, write: bool = True) -> tables.Table:
    return opening.opened(PosixDisk(), path, format, write=write, step=step)


def _there(place: Place, topic: str, where: str) -> None:
    """Say what is missing before anything is started or made."""
    if topic not in place.names():
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
    step: Steps = tables.nothing,
) -> Reconciled:
    """Prove that a table is the log, and show where not; with `repair`, make ranges again that differ."""
    table = addresses.absolute(table, "the table")
    options = _options(where, topic, key)
    with (
        closing(_table(table, None, step, write=repair)) as into,
        session(spark, master) as live,
        closing(Reconcile(options, into, _work(live, step))) as job,
    ):
        return job.run(repair=repair, progress=progress)


def scrub(
    path: str, *, spark: SparkSession | None = None, master: str = "local[*]", progress: Progress | None = None
) -> Scrubbed:
    """Verify every checksum of a directory of topics."""
    path = addresses.absolute(path, "the directory")
    if PosixDisk().stat(path) is None:
        raise NotFound(f"there is nothing at {path}; nothing was done, check the path")
    with session(spark, master) as live:
        return scrubbed(path, SparkRunner(live), progress)


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
    options = _options(where, topic, key)
    with closing(places.of(options)) as place:
        _there(place, topic, where)
    with session(spark, master) as live:
        return gathered(live, place_of(where, key), topic, every_ms)


def backfill(
    source: str,
    target: str,
    topic: str | None = None,
    *,
    from_topic: str | None = None,
    format: FileFormat | None = None,
    function: Function | None = None,
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
    step: Steps = tables.nothing,
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
        addresses.absolute(source, "the source") if from_topic is None else place_of(source, key).get("path", source)
    )
    target = target if topic is not None and addresses.is_server(target) else addresses.absolute(target, "the target")
    work_dir = addresses.absolute(work_dir or f".tidelog-backfill/{job}", "the working directory")
    name = function_name or (f"{function.__module__}:{function.__qualname__}" if function is not None else None)
    with session(spark, master) as live:
        work = _work(live, step)
        if topic is None:
            return _into_table(live, work, source, target, from_topic, function, name, job, key, first,
                               table_format, until)  # fmt: skip
        given = Input(source, target, from_topic, format, first, until, name)

        def rows() -> Source:
            if from_topic is None:
                return _files(live, source, format)
            place = place_of(source, key)
            with closing(places.of(_options(source, from_topic, key))) as looked:
                _there(looked, from_topic, source)
                sight = looked.look(from_topic)
            assert sight is not None, "it was there a moment ago"
            low = max(first if first is not None else sight.floor, sight.first)
            high = min(sight.next if until is None else until + 1, sight.next)
            return Source(
                lambda: _range(live, place, from_topic, low, high, WITH_KIND), high - 1, f"epoch {sight.epoch}"
            )

        with closing(_door(target, target_key)) as door:
            return backfilling.into_topic(job, topic, given, rows, function, door, work_dir, work, progress)


def _door(target: str, key: str | None) -> Door:
    where = place_of(target, key)
    return ServerDoor(where["server"], key) if "server" in where else PathDoor(where["path"])


def _range(
    spark: SparkSession, place: dict[str, str], topic: str, first: int, stop: int, columns: tuple[str, ...] = COLUMNS
) -> DataFrame:
    return (
        spark.read.format("tidelog")
        .options(
            **place,
            subscribe=topic,
            startingOffsets=f'{{"{topic}": {first}}}',
            endingOffsets=f'{{"{topic}": {stop}}}',
            columns=",".join(columns),
        )
        .load()
    )


def _files(spark: SparkSession, path: str, format: FileFormat | None) -> Source:
    kind = format or next((kind for kind in ("parquet", "json", "csv") if path.rstrip("/").endswith(kind)), None)
    if PosixDisk().stat(path) is None:
        raise NotFound(f"there is nothing at {path}; nothing was written, check the path")
    if kind == "delta" or opening.found(PosixDisk(), path) == "delta":
        table = delta_read.looked(path)
        return Source(lambda: delta_read.frame(spark, path, table.version), content=table.content)
    if kind is None:
        raise BadInput(
            f"{path}: its name does not say what it is; nothing was written, give the format (parquet, json, csv)"
        )
    reader: Any = spark.read
    if kind == "csv":
        reader = reader.option("header", "true").option("inferSchema", "true")
    return Source(lambda: getattr(reader, kind)(path), content=_content(PosixDisk(), path))


def _content(disk: Disk, path: str) -> str:
    """What files hold, by their names, sizes and times."""
    found = xxh3_128()
    waiting = [path]
    while waiting:
        place = waiting.pop()
        stat = disk.stat(place)
        if stat is None:
            continue
        if stat.is_dir:
            waiting += [join(place, name) for name in sorted(disk.names(place)) if name[0] not in "_."]
        else:
            found.update(f"{place.removeprefix(path)}\0{stat.size}\0{stat.modified_ms}\n".encode())
    return found.hexdigest()


def _into_table(
    spark: SparkSession,
    work: Work,
    source: str,
    target: str,
    from_topic: str | None,
    function: Function | None,
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
    place = place_of(source, key)
    with closing(places.of(_options(source, from_topic, key))) as looked:
        _there(looked, from_topic, source)
        sight = looked.look(from_topic)
        assert sight is not None, "it was there a moment ago"
        with closing(_table(target, format, work.step)) as table:
            return backfilling.into_table(
                job,
                sight,
                lambda low, high: _range(spark, place, from_topic, low, high),
                function,
                name,
                table,
                work,
                first,
                None if until is None else until + 1,
            )
