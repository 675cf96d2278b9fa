"""A topic through Spark: count, a scan of every column, a group-by; beside Spark's Parquet reader and a naive source.

Sketch. Spark's Parquet reader fills vectors in the JVM at some 100 MB/s a core for plain bytes. Ours decodes a segment
at memory speed (bench topics-read: 20 M records/s) and then pays for what every Python source pays: Arrow over a
socket, about 1 GB/s a core, and a copy out of it row by row, because Spark asks its sources of another language for
rows. So the scan should reach half of Parquet, and the decoder should hardly show. A naive source hands over tuples:
each is an object, a conversion and an append per column, some 5 µs a record, so 0.2 M/s a core.

`count()` is no test of a Parquet reader, which answers it from footers; it is here because everybody runs it. There is
no column pruning for Python sources: all columns travel unless `columns` or a schema says otherwise, which the last
row does. What the decoder alone does, without Spark, stands beside the scan. The page cache is warm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from benchmarks.common import GB, MB, Result, alternate, result, scratch_dir, time_call
from benchmarks.spark.bench_session import TASKS, session
from benchmarks.spark.sample_records import events
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import CaseInsensitiveDict, DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

import tidelog
from tidelog.spark.source import TidelogSource, TopicReader

_BATCH = 1000
_SCHEMA = "topic string, seq long, ts timestamp, node string, tag string, meta map<string,string>, data binary"


class Naive(DataSource):
    """What one writes on the first day: pages of records, a tuple each."""

    @classmethod
    def name(cls) -> str:
        return "naive"

    def schema(self) -> str:
        return _SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        return NaiveReader(self.options["path"], int(self.options["head"]))


class NaiveReader(DataSourceReader):
    def __init__(self, path: str, head: int) -> None:
        self._path, self._head = path, head

    def pushFilters(self, filters: list[Any]) -> list[Any]:  # noqa: N802
        return filters

    def partitions(self) -> list[InputPartition]:
        step = -(-self._head // TASKS)
        return [InputPartition((at, min(at + step, self._head))) for at in range(0, self._head, step)]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        from datetime import UTC, datetime

        at, stop = partition.value
        with tidelog.open(self._path, read_only=True) as engine:
            topic = engine.topic("bench", create=False)
            while at < stop:
                page = topic.read(at, min(_BATCH, stop - at))
                for record in page.records:
                    moment = datetime.fromtimestamp(record.ts_ms / 1000, UTC)
                    yield "bench", record.seq, moment, record.node, record.tag, record.meta, record.data
                at = page.next_from_seq


def run(quick: bool) -> list[Result]:
    rows: list[Result] = []
    with scratch_dir(4 * GB if not quick else GB) as place, session() as spark:
        spark.dataSource.register(Naive)
        for size, named in ((100, "100 B"), (1024, "1 KB")):
            count = (GB if not quick else GB // 10) // size
            rows += _measure(spark, place, size, count // _BATCH, 1 if quick else 3, named)
            if quick:
                break  # sizes are for the full run
    return rows


def _measure(spark: SparkSession, place: Path, size: int, batches: int, rounds: int, named: str) -> list[Result]:
    path, parquet = str(place / f"topic-{named}"), place / f"parquet-{named}"
    total = batches * _BATCH
    with tidelog.open(path) as engine:
        topic = engine.topic("bench", durability="memory")
        for number in range(batches):
            topic.append(events(size, number, _BATCH), tag=f"tag-{number % 100}")
        topic.seal()
        engine.checkpoint()
        _to_parquet(topic, parquet)
    options = {"path": path, "subscribe": "bench"}
    ours = partial(_load, spark, options)
    native = partial(spark.read.parquet, str(parquet))
    # A tuple a record takes so long that a part of them is enough to know its rate.
    some = max(total // 20, _BATCH)
    naive = spark.read.format("naive").options(path=path, head=str(some)).load
    figures = alternate(
        f"spark {named}",
        rounds,
        {
            "count": _rate(total, lambda: _counted(ours(), total)),
            "count of one column": _rate(total, lambda: _counted(_load(spark, {**options, "columns": "seq"}), total)),
            "count, parquet": _rate(total, lambda: _counted(native(), total)),
            "scan": _rate(total, lambda: _scanned(ours())),
            "scan, parquet": _rate(total, lambda: _scanned(native())),
            "scan, naive": _rate(some, lambda: _scanned(naive())),
            "group-by": _rate(total, lambda: _grouped(ours())),
            "group-by, parquet": _rate(total, lambda: _grouped(native())),
            "decode": _rate(total, lambda: _decoded(options)),
        },
    )
    head = f"spark {named}"
    made = [
        result(
            f"{head}, scan ÷ Parquet",
            figures["scan"],
            "/s",
            limit=figures["scan, parquet"],
            limit_name="Spark's Parquet reader",
            min_ratio=0.4,
        ),
        result(
            f"{head}, scan ÷ naive source",
            figures["scan"],
            "/s",
            limit=figures["scan, naive"],
            limit_name="a tuple a record",
            min_ratio=10,
        ),
        result(f"{head}, scan", [rate * size / MB for rate in figures["scan"]], "MB/s"),
        result(
            f"{head}, scan ÷ decoder alone",
            figures["scan"],
            "/s",
            limit=figures["decode"],
            limit_name="the decoder, one process",
        ),
    ]
    for what in ("count", "group-by"):
        limit = figures[f"{what}, parquet"]
        made.append(
            result(f"{head}, {what} ÷ Parquet", figures[what], "/s", limit=limit, limit_name="Spark's Parquet reader")
        )
    made.append(
        result(
            f"{head}, count of one column ÷ of all",
            figures["count of one column"],
            "/s",
            limit=figures["count"],
            limit_name="count with all columns",
        )
    )
    sizes = [split.size for split in _reader(options).partitions()]
    made.append(result(f"{head}, largest task ÷ smallest", [max(sizes) / min(sizes)], "×", max_value=1.5))
    return made


def _rate(total: int, work: Callable[[], object]) -> Callable[[], float]:
    return lambda: total / time_call(work)


def _load(spark: SparkSession, options: dict[str, str]) -> DataFrame:
    return spark.read.format("tidelog").options(**options).load()


def _counted(df: DataFrame, total: int) -> None:
    found = df.count()
    assert found == total, f"{found} of {total} records"


def _scanned(df: DataFrame) -> None:
    df.write.format("noop").mode("overwrite").save()


def _grouped(df: DataFrame) -> None:
    assert len(df.groupBy("tag").count().collect()) > 1


def _reader(options: dict[str, str]) -> TopicReader:
    source = TidelogSource(CaseInsensitiveDict(options))
    made = source.reader(source.schema())
    assert isinstance(made, TopicReader)
    return made


def _decoded(options: dict[str, str]) -> int:
    reader = _reader(options)
    return sum(batch.num_rows for split in reader.partitions() for batch in reader.read(split))


def _to_parquet(topic: tidelog.Topic, directory: Path) -> None:
    """The same rows as Spark writes them: snappy, one file a task."""
    reader = TidelogSource(CaseInsensitiveDict({"path": ".", "subscribe": "bench"}))
    kinds = {field.name for field in reader.schema().fields}
    directory.mkdir()
    head, step = topic.head_seq, -(-topic.head_seq // TASKS)
    for number, at in enumerate(range(0, head, step)):
        writer: pq.ParquetWriter | None = None
        for batch in topic.scan(at, min(at + step, head)).iter_arrow_batches():
            made = pa.table(
                {
                    "topic": pa.repeat("bench", batch.num_rows),
                    "seq": batch.column("seq"),
                    "ts": batch.column("ts"),
                    "node": pa.nulls(batch.num_rows, pa.string()),
                    "tag": batch.column("tag").cast(pa.string()),
                    "meta": pa.nulls(batch.num_rows, pa.map_(pa.string(), pa.string())),
                    "data": batch.column("data"),
                }
            )
            assert set(made.schema.names) == kinds, "the same columns"
            writer = writer or pq.ParquetWriter(directory / f"part-{number}.parquet", made.schema, compression="snappy")
            writer.write_table(made)
        if writer is not None:
            writer.close()
