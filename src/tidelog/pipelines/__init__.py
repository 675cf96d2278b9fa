"""Pipelines: jobs over topics that run on Spark, on this machine or on a cluster.

    export      a topic → a Delta table or a directory of Parquet files, here or in a bucket, exactly once
    read        a table → a DataFrame, without a jar
    reconcile   compare a table with its topic, show the first difference, repair ranges
    scrub       verify every checksum of a directory, in parallel
    backfill    files, a table or a range of a topic → a function → a topic or a table
    stats       rates, sizes and waits per interval

Needs `pip install 'tidelog[spark,lake]'`. Start with `api`, the functions that a program calls. Each job is in its own
module (`export_job`, …), `table_formats` has the tables, `table_source` reads them, and `transforms` the functions
DataFrame → DataFrame.
"""

from __future__ import annotations

from tidelog.pipelines import transforms
from tidelog.pipelines.api import backfill, export, read, reconcile, scrub, stats
from tidelog.pipelines.backfill_job import Backfilled
from tidelog.pipelines.export_job import Exported, Sizes
from tidelog.pipelines.reconcile_job import Difference, Reconciled
from tidelog.pipelines.scrub_job import Scrubbed
from tidelog.pipelines.stats_job import Stats

__all__ = [
    "Backfilled",
    "Difference",
    "Exported",
    "Reconciled",
    "Scrubbed",
    "Sizes",
    "Stats",
    "backfill",
    "export",
    "read",
    "reconcile",
    "scrub",
    "stats",
    "transforms",
]
