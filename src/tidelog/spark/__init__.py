"""Tidelog for Spark, without a jar: topics as a batch and as a stream.

    import tidelog.spark

    spark = tidelog.spark.session()          # or register(spark) with a session of your own
    spark.read.format("tidelog").option("path", "data").option("subscribe", "orders").load()

Needs `pip install 'tidelog[spark]'`, on the executors too. Spark is imported when one of these functions is called.
Start with `source` (reading) and `sink` (writing); `plan` splits a range into tasks, `task_reader` reads one, and
`backends` has directories, object stores and servers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidelog.spark.java import Java, find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Java", "find_java", "register", "session"]


def register(spark: SparkSession) -> None:
    """Register the format "tidelog" in a session, and let Spark push filters down to it.

    This also adds a listener to the session, which moves consumer groups to the committed offsets of queries.

    If settings of the session cannot be changed, as in definitions of Declarative Pipelines, and
    `spark.sql.python.filterPushdown.enabled` is not set, Spark filters the rows itself.

    Raises:
        NotFound: the interpreter that the session starts its Python workers with cannot import tidelog.
    """
    from tidelog.spark.spark_session import check_workers, enable_filter_pushdown

    check_workers(spark)
    from tidelog.spark.listener import add_group_listener
    from tidelog.spark.source import TidelogSource, UnfilteredSource

    spark.dataSource.register(TidelogSource if enable_filter_pushdown(spark) else UnfilteredSource)
    add_group_listener(spark)


def session(master: str = "local[*]", app: str = "tidelog", **conf: str) -> SparkSession:
    """Start a session with the source registered, on the machine's Java or on the packaged one.

    Settings are those of Spark, with `_` for dots: `spark_sql_shuffle_partitions="2"`. On a local master the workers
    run in the interpreter that calls this. On any other, set PYSPARK_PYTHON to one that every machine has.
    """
    from tidelog.spark.spark_session import start_session

    spark = start_session(master, app, {name.replace("_", "."): value for name, value in conf.items()})
    register(spark)
    return spark
