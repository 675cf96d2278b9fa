"""Pipelines: jobs over topics that run on Spark, on this machine or on a cluster.

    export      a topic → a Delta, Iceberg or Parquet table, exactly once; export_topics: many of them, supervised
    export_here the same in this process, without Java
    read        a table → a DataFrame, without a jar; read_live: with the log after it; changes: what commits changed
    reconcile   compare a table with its topic, show the first difference, repair ranges
    scrub       verify every checksum of a directory, in parallel, or every record of a server or an object store
    backfill    files, a table or a range of a topic → a function → a topic or a table
    stats       rates, sizes and waits per interval; status: where tables stand beside their topics
    compact     the newest record of each key stays; erase: records out of a topic and its tables, with a receipt
    restore     a backup at a point in time → a directory, or one topic of it → a topic
    optimize    join small files of a table; vacuum: remove old files; reprocess: try quarantine again

Needs `pip install 'tidelog[spark,lake]'`. Start with `api`, the functions that a program calls. A job has a module of
its own (`export_job`, …); `table_formats` has the tables, `table_source` reads them, `transforms` changes DataFrames.
"""

from __future__ import annotations

from tidelog.pipelines import transforms
from tidelog.pipelines.api import (
    backfill,
    changes,
    compact,
    dead_letters,
    erase,
    export,
    export_here,
    export_topics,
    optimize,
    read,
    read_live,
    reconcile,
    reprocess,
    restore,
    schema_history,
    scrub,
    set_schema,
    stats,
    status,
    vacuum,
)
from tidelog.pipelines.backfill_job import Backfilled
from tidelog.pipelines.erase_job import Erased, ErasedTable
from tidelog.pipelines.export_job import Exported, Sizes
from tidelog.pipelines.export_supervisor import TopicExport
from tidelog.pipelines.optimize_job import Optimized, Vacuumed
from tidelog.pipelines.reconcile_job import Difference, Reconciled
from tidelog.pipelines.reprocess_job import Reprocessed
from tidelog.pipelines.restore_job import Restored
from tidelog.pipelines.scrub_job import Scrubbed
from tidelog.pipelines.stats_job import Stats
from tidelog.pipelines.table_status import TableStatus
from tidelog.spark.topic_schemas import TopicSchema

__all__ = [
    "Backfilled",
    "Difference",
    "Erased",
    "ErasedTable",
    "Exported",
    "Optimized",
    "Reconciled",
    "Reprocessed",
    "Restored",
    "Scrubbed",
    "Sizes",
    "Stats",
    "TableStatus",
    "TopicExport",
    "TopicSchema",
    "Vacuumed",
    "backfill",
    "changes",
    "compact",
    "dead_letters",
    "erase",
    "export",
    "export_here",
    "export_topics",
    "optimize",
    "read",
    "read_live",
    "reconcile",
    "reprocess",
    "restore",
    "schema_history",
    "scrub",
    "set_schema",
    "stats",
    "status",
    "transforms",
    "vacuum",
]
