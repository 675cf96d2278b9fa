"""The session that benchmarks of Spark share: two tasks at a time, and nothing that draws or logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pyspark.sql import SparkSession

import tidelog.spark

TASKS = 2


@contextmanager
def session(conf: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    spark = tidelog.spark.session(
        f"local[{TASKS}]",
        conf=conf,
        spark_ui_enabled="false",
        spark_ui_showConsoleProgress="false",
        spark_sql_shuffle_partitions=str(TASKS),
        spark_driver_memory="1g",
        spark_driver_host="127.0.0.1",
        spark_driver_bindAddress="127.0.0.1",
    )
    spark.sparkContext.setLogLevel("OFF")
    try:
        yield spark
    finally:
        spark.stop()
