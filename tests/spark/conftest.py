"""One Spark session for the whole run: it takes seconds to start, and the first query some more."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import tidelog.spark


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    place: Path = tmp_path_factory.mktemp("spark")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = tidelog.spark.session(
            "local[2]",
            spark_ui_enabled="false",
            spark_ui_showConsoleProgress="false",
            spark_sql_shuffle_partitions="2",
            spark_driver_memory="1g",
            spark_driver_host="127.0.0.1",
            spark_driver_bindAddress="127.0.0.1",
            spark_sql_session_timeZone="UTC",
            spark_sql_warehouse_dir=str(place),
            spark_sql_streaming_stopTimeout="30s",
            # Queries of milliseconds do not live long enough for a second compiler to pay.
            spark_driver_extraJavaOptions="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            spark_sql_codegen_wholeStage="false",
            spark_python_daemon_module="tests.spark.preloaded_daemon",
        )
        made.sparkContext.setLogLevel("OFF")
    yield made
    made.stop()
