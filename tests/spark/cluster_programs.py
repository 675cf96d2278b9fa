"""Programs that tests run on the machines of a cluster: without Spark (`fill`, `topic`, `table`), and under
spark-submit (`copy`, a stream from a topic of the server into another one, and `live`, a live read).

    python -m tests.spark.cluster_programs fill http://10.77.0.4:4000 orders 20000
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Final

KEY: Final = "s3cret"
ROWS_OF_BATCH: Final = 1000


def fill(server: str, topic: str, rows: str, keys: str = "0") -> object:
    """Append rows to a topic: JSON with a number, and 100 bytes that fill it up. With a number of keys, each has one,
    and the topic a rule for them."""
    from tidelog.client import Client

    with Client(server, key=KEY) as client:
        if int(keys):
            client.put(f"/v0/topics/{topic}", {"compaction": "/key"})
        for first in range(0, int(rows), ROWS_OF_BATCH):
            numbers = range(first, first + ROWS_OF_BATCH)
            records = [{"data": {"n": n, "key": n % (int(keys) or 1), "fill": "x" * 100}} for n in numbers]
            client.post(f"/v0/topics/{topic}", {"records": records})
    return int(rows)


def topic_numbers(server: str, topic: str) -> object:
    """How many records a topic has, how many different numbers are in them, and their sum."""
    import pyarrow as pa

    from tidelog.client import Client

    query = {"format": "arrow"}
    with Client(server, key=KEY) as client, client.stream(f"/v0/topics/{topic}/records", query=query) as response:
        data = pa.ipc.open_stream(response).read_all().column("data").to_pylist()
    return _summary([json.loads(each)["n"] for each in data])


def table_numbers(table: str) -> object:
    """The same of a Delta table; the environment has the options of its store."""
    from deltalake import DeltaTable

    options = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    data = DeltaTable(table, storage_options=options).to_pyarrow_table(columns=["data"]).column(0).to_pylist()
    return _summary([json.loads(each)["n"] for each in data])


def _summary(numbers: list[int]) -> dict[str, int]:
    return {"rows": len(numbers), "different": len(set(numbers)), "sum": sum(numbers)}


def copy(server: str, source: str, target: str, per_batch: str) -> object:
    """Copy a topic by a stream until all is there; its checkpoint is on the driver's own disk."""
    import tidelog.spark

    spark = tidelog.spark.session()
    rows = (
        spark.readStream.format("tidelog")
        .options(server=server, key=KEY, subscribe=source, startingOffsets="earliest", columns="data,is_json")
        .options(maxOffsetsPerTrigger=per_batch, minPartitions="4", group="copy")
        .load()
    )
    query = (
        rows.writeStream.format("tidelog")
        .options(server=server, key=KEY, topic=target, query=target, checkpointLocation=f"/tmp/checkpoint-{target}")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    batches = [json.loads(progress.json)["numInputRows"] for progress in query.recentProgress]
    spark.stop()
    return {"batches": batches}


def live(server: str, topic: str, table: str, storage_options: str) -> object:
    """Read a table and the log after it as one DataFrame."""
    import tidelog.spark
    from tidelog import pipelines

    spark = tidelog.spark.session()
    rows = pipelines.read_live(spark, server, topic, table, storage_options=json.loads(storage_options), key=KEY)
    counted = rows.selectExpr("count(*) as rows", "count(distinct seq) as different").collect()[0].asDict()
    spark.stop()
    return counted


PROGRAMS: Final[dict[str, Callable[..., object]]] = {
    "fill": fill,
    "topic": topic_numbers,
    "table": table_numbers,
    "copy": copy,
    "live": live,
}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(PROGRAMS[sys.argv[1]](*sys.argv[2:])) + "\n")
    sys.stdout.flush()
    os._exit(0)  # threads of Arrow that still close a table's store abort an interpreter that ends by itself
