"""Streams: from append to sink at a thousand records a second, catching up with AvailableNow, and rows into the sink.

Sketch. A micro-batch is some 0.2 s of Spark: planning, offsets and commits in files of the checkpoint, a task in a
Python worker. A record waits half of one on average and then one whole, so p50 should be near 0.3 s and p99 near two
batches. Catching up is the scan of bench `spark` cut into batches, so a little slower than that. The sink gets Arrow
out of the JVM, stages it, and the driver appends it once more, synced: two copies on disk, against one that Spark's
Parquet writer compresses.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event, Thread

from benchmarks.common import GB, Result, alternate, payloads, result, scratch_dir, time_call
from benchmarks.server import peers
from benchmarks.spark.bench_session import session
from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamReader

import tidelog

_BATCH = 1000
_RATE, _EVERY_S = 1000, 0.01


def run(quick: bool) -> list[Result]:
    records, rows, lasting_s, rounds = (500_000, 200_000, 6.0, 1) if quick else (10_000_000, 2_000_000, 30.0, 3)
    with scratch_dir(5 * GB if not quick else GB) as place, session() as spark:
        return [
            *_latency(spark, place, lasting_s),
            *_catch_up(spark, place, records, rounds),
            *_sink(spark, place, rows, rounds),
        ]


def _latency(spark: SparkSession, place: Path, lasting_s: float) -> list[Result]:
    source, copy = str(place / "live"), str(place / "live-copy")
    done = Event()

    def write(topic: tidelog.Topic) -> None:
        due_s = time.perf_counter()
        while not done.is_set():
            now = struct.pack("<q", time.time_ns())
            topic.append([now] * int(_RATE * _EVERY_S))
            due_s += _EVERY_S
            time.sleep(max(due_s - time.perf_counter(), 0))

    with tidelog.open(source) as log:
        topic = log.topic("live")
        topic.append(b"the first one, so that there is something to plan with")
        stream = _read(spark, source, "live", columns="data").load()
        into = stream.writeStream.format("tidelog").options(path=copy, topic="copy", queryName="live")
        query = into.option("checkpointLocation", str(place / "live-checkpoint")).start()
        writer = Thread(target=write, args=(topic,))
        try:
            query.processAllAvailable()
            writer.start()
            time.sleep(lasting_s)
        finally:
            done.set()
            writer.join()
        query.processAllAvailable()
        query.stop()
    with tidelog.open(copy, read_only=True) as log:
        copied = log.topic("copy", create=False).to_arrow()
    pairs = zip(copied["ts"].cast("int64").to_pylist()[1:], copied["data"].to_pylist()[1:], strict=True)
    waits = sorted((ts_us / 1e3 - struct.unpack("<q", sent)[0] / 1e6) for ts_us, sent in pairs)
    waits = waits[len(waits) // 5 :] if len(waits) < _RATE else waits
    at = {f"p{percent}": waits[len(waits) * percent // 100] for percent in (50, 99)}
    return [result(f"stream at 1 k/s, append → sink, {name}", [ms], "ms") for name, ms in at.items()]


def _catch_up(spark: SparkSession, place: Path, records: int, rounds: int) -> list[Result]:
    source, numbers = str(place / "behind"), count()
    with tidelog.open(source) as log:
        topic = log.topic("behind", durability="memory")
        for _ in range(records // _BATCH):
            topic.append(payloads(100, _BATCH))
        topic.seal()
        log.checkpoint()

    def stream() -> None:
        read = _read(spark, source, "behind", maxBytesPerTrigger="256m")
        written = read.load().writeStream.format("noop").trigger(availableNow=True)
        query = written.option("checkpointLocation", str(place / f"behind-{next(numbers)}")).start()
        query.awaitTermination()
        assert sum(progress.numInputRows for progress in query.recentProgress) == records

    def scan() -> None:
        read = spark.read.format("tidelog").options(path=source, subscribe="behind").load()
        read.write.format("noop").mode("overwrite").save()

    found = alternate("catching up", rounds, {"stream": _rate(records, stream), "scan": _rate(records, scan)})
    return [
        result(
            "catching up ÷ a batch scan",
            found["stream"],
            "/s",
            limit=found["scan"],
            limit_name="the same rows at once",
        )
    ]


def _sink(spark: SparkSession, place: Path, rows: int, rounds: int) -> list[Result]:
    frame = spark.range(rows).selectExpr("encode(concat('order ', lpad(id, 90, 'x')), 'utf-8') as data")

    def sink(**options: str) -> None:
        into = frame.write.format("tidelog").options(topic="sunk", **options)
        into.mode("append").save()

    with peers.tidelog(place / "server") as server:
        found = alternate(
            "into the sink",
            rounds,
            {
                "path": _rate(rows, partial(sink, path=str(place / "sink"))),
                "server": _rate(rows, partial(sink, server=f"http://127.0.0.1:{server.port}")),
                "parquet": _rate(rows, lambda: frame.write.mode("overwrite").parquet(str(place / "parquet"))),
            },
        )
    return [
        result(f"sink by {by} ÷ Parquet", found[by], "/s", limit=found["parquet"], limit_name="Spark's Parquet writer")
        for by in ("path", "server")
    ]


def _read(spark: SparkSession, path: str, topic: str, **options: str) -> DataStreamReader:
    """From the earliest: a stream starts at the latest unless it is told."""
    return spark.readStream.format("tidelog").options(path=path, subscribe=topic, startingOffsets="earliest", **options)


def _rate(total: int, work: Callable[[], object]) -> Callable[[], float]:
    return lambda: total / time_call(work)
