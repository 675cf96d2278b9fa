"""A topic into a table: MB/s of records per core, to Parquet, Delta and Iceberg, beside Spark's own Parquet writer.

Sketch. A task reads a segment at memory speed, fingerprints every row (NumPy, some 900 MB/s) and writes Parquet with
snappy (some 300 MB/s for bytes that do not compress), so a core should do about 200 MB/s of large records and less of
small ones, whose seq, ts and lengths weigh as much as their data; then the device takes its sync. The published bar of
the field is 5 MiB/s per core. Spark's own writer gets the same rows through the source, so out of Python, into rows of
the JVM and into columns again; it proves nothing and commits by renaming a directory.

An Iceberg table gets the same files, whose statistics pyiceberg reads once more. Into S3, which is versitygw on this
machine (`python -m tests.kit.s3` builds it; left out without), a file goes over a socket instead of to the device, so
what the server takes of the processor is the difference.

Reconcile reads both sides and fingerprints them, so it should take about as long as the export. Typed columns cost a
JSON parser on top. What is measured is the job with a session that is warm; the page cache is warm too. On a machine
with other things to do, look at the processor time of a task, which nobody else can take.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

from benchmarks.common import GB, MB, Result, alternate, result, scratch_dir, time_call
from benchmarks.spark.bench_session import TASKS, session
from benchmarks.spark.sample_records import events, orders
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType
from tests.kit.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server, build_server

import tidelog
from tidelog import pipelines
from tidelog.clock import SystemClock
from tidelog.disk.posix import PosixDisk
from tidelog.pipelines import Exported, Sizes, table_formats
from tidelog.pipelines import record_mapping as columns
from tidelog.pipelines.export_job import ExportJob, JobContext
from tidelog.pipelines.spark_tasks import run_guarded, unwrap_results
from tidelog.pipelines.table_formats.interface import Format
from tidelog.spark import options as reading

Batch = Callable[[int], list[bytes]]  # the n-th one
T = TypeVar("T")
R = TypeVar("R")
_BATCH = 1000
_SCHEMA = "n long, user string, price double, text string"


def run(quick: bool) -> list[Result]:
    rows: list[Result] = []
    size = GB // 10 if quick else GB
    with scratch_dir(6 * size) as place, session() as spark, _open_s3(place) as server:
        for named, batch in (("100 B", _sized(100)), ("1 KB", _sized(1024)), ("JSON", lambda n: orders(n, _BATCH))):
            rows += _measure(spark, place, server, named, batch, size, 1 if quick else 3)
    return rows


def _sized(size: int) -> Batch:
    return lambda number: events(size, number, _BATCH)


@contextmanager
def _open_s3(place: Path) -> Iterator[S3Server | None]:
    """An S3 server with its objects on the disk under test; None where it is not built."""
    if build_server() is None:
        yield None
        return
    directory = place / "s3"
    directory.mkdir()
    server = S3Server(directory)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _measure(
    spark: SparkSession, place: Path, server: S3Server | None, named: str, batch: Batch, about: int, rounds: int
) -> list[Result]:
    path, table, lake = str(place / "topic"), str(place / "table"), place / "lake"
    size = 0
    with tidelog.open(path) as engine:
        topic = engine.topic("bench", durability="memory")
        for number in count():
            datas = batch(number)
            topic.append(datas, tag=f"tag-{number % 100}")
            size += sum(map(len, datas))
            if size >= about:
                break
        topic.seal()
        engine.checkpoint()
    sizes = Sizes(file_bytes=max(size // 8, 1 << 20), commit_bytes=max(size // 2, 1 << 20))
    schema = _SCHEMA if named == "JSON" else None
    done: dict[str, Exported] = {}

    def export(format: Format) -> None:
        shutil.rmtree(table, ignore_errors=True)
        done[format] = pipelines.export(path, "bench", table, format=format, schema=schema, sizes=sizes, spark=spark)

    def export_to_s3() -> None:
        assert server is not None, "it is a candidate only with a server"
        shutil.rmtree(server.directory / BUCKET / "table", ignore_errors=True)
        options = {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": f"http://{server.endpoint}",
        }
        into = f"s3://{BUCKET}/table"
        pipelines.export(path, "bench", into, storage_options=options, schema=schema, sizes=sizes, spark=spark)

    def export_to_iceberg() -> None:
        shutil.rmtree(lake, ignore_errors=True)
        lake.mkdir()
        options = {"type": "sql", "uri": f"sqlite:///{lake}/catalog.db", "warehouse": f"file://{lake}"}
        into = "iceberg://bench/lake.table"
        pipelines.export(path, "bench", into, storage_options=options, schema=schema, sizes=sizes, spark=spark)

    def spark_writes() -> None:
        shutil.rmtree(table, ignore_errors=True)
        columns = "seq,ts,node,tag,meta,data"
        df = spark.read.format("tidelog").options(path=path, subscribe="bench", columns=columns).load()
        df.write.parquet(table)

    def reconcile() -> float:
        export("parquet")
        return _rate(size, lambda: pipelines.reconcile(path, "bench", table, spark=spark))()

    candidates = {
        "parquet": _rate(size, partial(export, "parquet")),
        "delta": _rate(size, partial(export, "delta")),
        "iceberg": _rate(size, export_to_iceberg),
        "s3": _rate(size, export_to_s3),
        "reconcile": reconcile,
        "Spark's writer": _rate(size, spark_writes),
    }
    if schema is not None:
        del candidates["Spark's writer"]
    if server is None:
        del candidates["s3"]
    candidates["processor"] = lambda: size / MB / _processor_s(path, table, schema, sizes)
    figures = alternate(f"export {named}", rounds, candidates)
    shutil.rmtree(path)
    shutil.rmtree(table, ignore_errors=True)
    shutil.rmtree(lake, ignore_errors=True)
    limit = figures.get("Spark's writer")
    made = [
        result(
            f"export {named} to {kind}",
            figures[kind],
            "MB/s per core",
            limit=limit,
            limit_name="Spark's own Parquet writer" if limit else "",
            min_value=50,
        )
        for kind in ("parquet", "delta")
    ]
    for kind, least, name in (("iceberg", 1 / 1.3, "Iceberg"), ("s3", 0.7, "Delta in S3")):
        if kind in figures:
            made.append(
                result(
                    f"export {named}, {name} ÷ Delta in a directory",
                    figures[kind],
                    "MB/s per core",
                    limit=figures["delta"],
                    limit_name="Delta in a directory",
                    min_ratio=least,
                )
            )
    made.append(
        result(f"export {named}, processor time of a task", figures["processor"], "MB/s per core", min_value=50)
    )
    made.append(result(f"reconcile {named}", figures["reconcile"], "MB/s per core"))
    last = done["parquet"]
    made.append(result(f"export {named}, files", [last.files], "files"))
    made.append(result(f"export {named}, smallest ÷ largest file", [last.smallest / last.largest], "of 1"))
    return made


class _InlineRunner:
    """Tasks in this process, one after the other."""

    def run(self, function: Callable[[T], R], tasks: Sequence[T]) -> list[R]:
        return unwrap_results([run_guarded(function, task) for task in tasks])


def _processor_s(path: str, table: str, schema: str | None, sizes: Sizes) -> float:
    """What an export costs a processor, without Spark and whatever else the machine does meanwhile."""
    shutil.rmtree(table, ignore_errors=True)
    fields = None if schema is None else StructType.fromDDL(schema)
    assert fields is None or isinstance(fields, StructType)
    options = reading.parse_options({"path": path, "subscribe": "bench"})
    work = JobContext(_InlineRunner(), PosixDisk(), SystemClock())
    start = time.process_time()
    with (
        closing(table_formats.open_table(PosixDisk(), table, "parquet", write=True)) as into,
        closing(ExportJob(options, into, lambda _: columns.new_mapping(fields), work, sizes)) as job,
    ):
        job.run()
    return time.process_time() - start


def _rate(size: int, work: Callable[[], object]) -> Callable[[], float]:
    """Megabytes of records a second, for each of the cores."""
    return lambda: size / MB / TASKS / time_call(work)
