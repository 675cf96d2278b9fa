"""Transforms of jobs: functions from DataFrame to DataFrame that run nothing themselves.

    records(df)          any table → columns of records: data, json, tag, node, meta
    rates(df, every)     records of a topic → per interval: count, sizes, rates
    waits(df, every)     steps of a queue's jobs → per interval: claims, acks, and waiting times

A user's function has the same form and is given to a job as `module:function`.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import BinaryType, BooleanType, MapType, StructType

from tidelog.errors import BadInput
from tidelog.spark.options import IS_JSON

PERCENTILES: Final = (0.5, 0.9, 0.99)
_SIDE_COLUMNS: Final = ("tag", "node", "meta")


def records(df: DataFrame) -> DataFrame:
    """Convert rows to records. A column `data` (bytes or text) is the data; without one, the columns of a row become a
    JSON object. `tag`, `node` and `meta` are kept in both cases; `topic`, `seq` and `ts` are assigned by the write.

    `is_json` says for each row whether `data` is JSON. Without that column `data` is written as bytes."""
    if "data" in df.columns:
        data = F.col("data").cast(BinaryType())
        json = F.coalesce(F.col(IS_JSON), F.lit(False)) if has_is_json(df) else F.lit(False)
    else:
        fields = [F.col(f"`{name}`") for name in df.columns if name not in _SIDE_COLUMNS]
        data, json = F.to_json(F.struct(*fields), {"ignoreNullFields": "false"}).cast(BinaryType()), F.lit(True)
    return df.select(
        data.alias("data"), json.alias("json"), _text(df, "tag"), _text(df, "node"), _text(df, "meta")
    )  # fmt: skip


def has_is_json(df: DataFrame) -> bool:
    """Whether rows have a column that says which data is JSON."""
    if not {"data", IS_JSON} <= set(df.columns):
        return False
    kind = df.schema[IS_JSON].dataType
    if not isinstance(kind, BooleanType):
        raise BadInput(
            f"the rows have is_json as {kind.simpleString()}, it must be boolean; nothing was written, cast it"
        )
    return True


def _text(df: DataFrame, name: str) -> Column:
    if name not in df.columns:
        return F.lit(None).cast("string").alias(name)
    if isinstance(df.schema[name].dataType, MapType | StructType):
        return F.to_json(F.col(name)).alias(name)
    return F.col(name).cast("string").alias(name)


def _interval_start(ts: Column, every_ms: int) -> Column:
    """Return the start of the interval that contains a time."""
    return F.timestamp_millis(F.floor(F.unix_millis(ts) / every_ms) * every_ms).alias("from")


def rates(df: DataFrame, every_ms: int) -> DataFrame:
    """Aggregate columns ts and data of records to from, records, bytes, records_s, bytes_s and percentiles of sizes."""
    size = F.length("data").cast("long")
    counted = df.select(_interval_start(F.col("ts"), every_ms), size.alias("size")).groupBy("from")
    made = counted.agg(
        F.count("*").alias("records"),
        F.sum("size").alias("bytes"),
        *(F.percentile_approx("size", place).alias(_percentile_column("size", place)) for place in PERCENTILES),
        F.max("size").alias("size_max"),
    )
    seconds = F.lit(every_ms / 1000)
    return made.select(
        "*", (F.col("records") / seconds).alias("records_s"), (F.col("bytes") / seconds).alias("bytes_s")
    ).orderBy("from")


def waits(df: DataFrame, every_ms: int) -> DataFrame:
    """Aggregate columns ts_ms, event and waited_ms of a queue's history to from, claims, acks, … and percentiles of
    waits."""
    kept = df.select(_interval_start(F.col("ts_ms"), every_ms), "event", "waited_ms").groupBy("from")
    return kept.agg(
        *(
            F.count(F.when(F.col("event") == event, 1)).alias(name)
            for name, event in (
                ("claims", "claimed"),
                ("acks", "acked"),
                ("nacks", "nacked"),
                ("dead", "dead_lettered"),
            )
        ),
        *(F.percentile_approx("waited_ms", place).alias(_percentile_column("wait_ms", place)) for place in PERCENTILES),
        F.max("waited_ms").alias("wait_ms_max"),
    ).orderBy("from")


def _percentile_column(name: str, percentile: float) -> str:
    return f"{name}_p{percentile * 100:g}"
