"""A DataFrame of many gigabytes is saved as one batch, in parts, each row once.

`TIDELOG_SAVE_GB` is its size in units of a million rows of 1,000 bytes, 2 unless it is set. The disk needs more than
twice as much while the test runs.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

import tidelog

pytestmark = pytest.mark.sweep
SAVE_GB = int(os.environ.get("TIDELOG_SAVE_GB", "2"))
GB_ROWS, ROW_BYTES, DIGITS = 1_000_000, 1_000, 12
Tell = Callable[[str, int], None]


def test_a_data_frame_of_many_gigabytes_is_saved(spark: SparkSession, tmp_path: Path, record_count: Tell) -> None:
    data, rows = str(tmp_path / "data"), SAVE_GB * GB_ROWS
    number = F.lpad(F.col("id").cast("string"), DIGITS, "0")
    filler = F.repeat(F.sha2(F.col("id").cast("string"), 256), ROW_BYTES // 64 + 1)  # does not compress to nothing
    text = F.substring(F.concat(number, filler), 1, ROW_BYTES)
    frame = spark.range(0, rows, 1, 4 * SAVE_GB).select(text.cast("binary").alias("data"))
    try:
        begun = time.monotonic()
        frame.write.format("tidelog").options(path=data, topic="copy").mode("append").save()
        saved = time.monotonic()
        with tidelog.open(data, read_only=True) as log:
            topic = log.topic("copy", create=False)
            assert (topic.count, topic.head_seq) == (rows, rows)
        found = spark.read.format("tidelog").options(path=data, subscribe="copy").load()
        id = F.substring(F.col("data").cast("string"), 1, DIGITS).cast("long")
        row = found.agg(F.count("*"), F.sum(id), F.sum(id % 1009 * id), F.sum(F.length("data")), F.countDistinct("ts"))
        read = row.first()
        assert read is not None
        count, total, weighted, size, parts = read
        assert (count, total, size) == (rows, rows * (rows - 1) // 2, rows * ROW_BYTES)
        assert weighted == sum(each % 1009 * each for each in range(rows))
        assert parts > 1, "a commit takes 1 GiB at most"
        record_count("seconds to save gigabytes", round(saved - begun))
        record_count("seconds to read them", round(time.monotonic() - saved))
        record_count("parts of the save", parts)
        record_count("million rows saved", SAVE_GB)
    finally:
        shutil.rmtree(data, ignore_errors=True)
