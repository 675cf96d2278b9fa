"""Tidelog for Spark, without a jar: topics as a batch and as a stream.

    import tidelog.spark

    spark = tidelog.spark.session()          # or register(spark) with a session of your own
    spark.read.format("tidelog").option("path", "data").option("subscribe", "orders").load()

Needs `pip install 'tidelog[spark]'`, on the executors too. Spark is imported when one of these functions is called.
Start with `source` (reading) and `sink` (writing); `plan` splits a range into tasks, `task_reader` reads one, and
`backends` has directories, object stores and servers. `executors` is what runs where the package may be missing;
`listener` and `query_log` follow running queries; `key_source` has the keys of records, for compaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidelog.spark.java import Java, find_java

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

    from tidelog.spark.query_log import QueryCounts

__all__ = ["Java", "find_java", "query_counts", "register", "session"]


def register(spark: SparkSession) -> None:
    """Register the format "tidelog" in a session, and let Spark push filters down to it.

    Spark finds the format also without this, by the package `pyspark_tidelog` of the driver's Python. This adds four
    things: filters are pushed down, a listener moves consumer groups to the committed offsets of queries as soon as
    they are committed, another one logs and counts batches (`query_counts`), and an interpreter without the package is
    an error here and not in the first query.

    If settings of the session cannot be changed, as in definitions of Declarative Pipelines, and
    `spark.sql.python.filterPushdown.enabled` is not set, Spark filters the rows itself. On Spark Connect the server's
    Python workers run the source, so the package is needed there; groups are moved when a query plans its next batch.

    Raises:
        NotFound: the interpreter that the session starts its Python workers with cannot import tidelog.
    """
    from tidelog.spark.spark_session import check_workers, enable_filter_pushdown

    check_workers(spark)
    from tidelog.spark.listener import add_group_listener
    from tidelog.spark.query_log import add_query_log
    from tidelog.spark.source import TidelogSource

    enable_filter_pushdown(spark)
    spark.dataSource.register(TidelogSource)
    add_group_listener(spark)
    add_query_log(spark)


def query_counts(spark: SparkSession) -> list[QueryCounts]:
    """Return for each streaming query of a session that reads topics what it has read and how large its lag is.

    The counts begin where `register` or `session` set up the session, and queries that have ended stay in the list. A
    client of Spark Connect returns the running queries, each with the last 100 batches that Spark keeps.

    Example:
        >>> [(each.name, each.rows, each.lag_records, each.lag_ms) for each in tidelog.spark.query_counts(spark)]
        [('copy-orders', 2, 0, 0)]
    """
    from tidelog.spark.query_log import count_queries

    return count_queries(spark)


def session(
    master: str | None = None, app: str = "tidelog", *, conf: Mapping[str, str] | None = None, **settings: str
) -> SparkSession:
    """Start a session with the source registered, on the machine's Java or on the packaged one.

    On a local master the workers run in the interpreter that calls this. On any other, set PYSPARK_PYTHON to one that
    every machine has.

    Args:
        master: `local[2]`, `spark://host:7077`, `yarn`, `k8s://…`, or `sc://host:15002` for a Spark Connect server. By
            default that of spark-submit where it runs this program, and all processors of this machine elsewhere.
        conf: settings of Spark by their names.
        settings: the same with `_` for dots: `spark_sql_shuffle_partitions="2"`.
    """
    from tidelog.spark.spark_session import start_session

    named = {name.replace("_", "."): value for name, value in settings.items()}
    spark = start_session(master, app, {**named, **(conf or {})})
    register(spark)
    return spark
