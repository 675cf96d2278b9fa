"""[shell] `tidelog pipeline …`: jobs that run on Spark. Nothing of Spark is imported before one of them is started."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import TYPE_CHECKING

from tidelog.cli import pipeline_export, pipeline_jobs
from tidelog.cli.command import command, group
from tidelog.cli.options import age_ms, count, size

if TYPE_CHECKING:
    from tidelog.cli.command import Commands


def add(commands: Commands) -> None:
    """Add `pipeline` and its commands to the command line."""
    verbs = group(
        commands,
        "pipeline",
        short="export, reconcile, scrub, backfill and stats, on Spark",
        about="Jobs over topics that run on Spark: on all processors of this machine, or on a cluster (--master).\n"
        "WHERE is a directory of topics or the address of a server. No jar is needed, and no Spark but the\n"
        "Python package: pip install 'tidelog[spark,lake]'.",
        start="start here:\n  $ tidelog pipeline export data orders table --once\n"
        "  $ tidelog pipeline reconcile data orders table\n",
    )
    _export(verbs)
    _reconcile(verbs)
    _scrub(verbs)
    _backfill(verbs)
    _stats(verbs)


def _common(made: ArgumentParser, *, key: bool = True) -> None:
    made.add_argument("--master", default="local[*]", help="where Spark runs (local[*])")
    if key:
        made.add_argument("--key", help="of the server, where it asks for one")


def _export(verbs: Commands) -> None:
    made = command(
        verbs,
        "export",
        pipeline_export.export,
        short="a topic into a table, exactly once",
        about="Bring a topic into TABLE, a directory of Parquet files or a Delta table, and go on with it as records\n"
        "come. How far it is stands in the table's own commits and nowhere else: a run that was killed, or whose\n"
        "files were half written, is taken up by the next one without a row lost or doubled.\n"
        "With --schema or --infer the fields of JSON records become columns.",
        examples="tidelog pipeline export data orders table --once\n"
        "tidelog pipeline export http://127.0.0.1:4000 orders lake/orders --format delta --infer --bad quarantine",
    )
    for name, about in (("where", "WHERE"), ("topic", "TOPIC"), ("table", "TABLE")):
        made.add_argument(name, metavar=about)
    made.add_argument("--format", choices=("parquet", "delta"), help="of a table that is new (parquet)")
    made.add_argument("--once", action="store_true", help="end when the table holds what the topic holds now")
    made.add_argument("--every", type=age_ms, default=5_000, metavar="AGE", help="look for new records so often (5s)")
    made.add_argument("--file-bytes", type=size, default=128 << 20, metavar="SIZE", help="of the log in a file (128m)")
    made.add_argument("--file-age", type=age_ms, default=60_000, metavar="AGE", help="commit by then anyway (1m)")
    made.add_argument("--commit-bytes", type=size, default=1 << 30, metavar="SIZE", help="of the log in a commit (1g)")
    made.add_argument("--schema", help="columns out of JSON records, as 'sku string, price double'")
    made.add_argument("--infer", action="store_true", help="find the columns by looking at records")
    made.add_argument(
        "--bad", choices=("rescue", "quarantine", "fail"), default="rescue", help="records that do not fit (rescue)"
    )
    made.add_argument(
        "--on-gap", choices=("fail", "skip"), default="fail", help="records lost before they were read (fail)"
    )
    _common(made)


def _reconcile(verbs: Commands) -> None:
    made = command(
        verbs,
        "reconcile",
        pipeline_jobs.reconcile,
        short="prove that a table is the log; exit code 1 where it is not",
        about="Hold every range of TABLE against the topic, by counts and hashes of its rows. Where one differs,\n"
        "show the first seq with what the log has and what the table has, and end with exit code 1. With --repair\n"
        "the ranges that differ are made again, and only those; the exit code is then 0 if all of them could be.",
        examples="tidelog pipeline reconcile data orders table\ntidelog pipeline reconcile data orders table --repair",
    )
    for name, about in (("where", "WHERE"), ("topic", "TOPIC"), ("table", "TABLE")):
        made.add_argument(name, metavar=about)
    made.add_argument("--repair", action="store_true", help="make ranges again that differ")
    _common(made)


def _scrub(verbs: Commands) -> None:
    made = command(
        verbs,
        "scrub",
        pipeline_jobs.scrub,
        short="verify every checksum of a directory in parallel; exit code 1 on damage",
        about="What `tidelog check` does, on as many processors as Spark is given: snapshots, WAL, segments, indexes,\n"
        "footers, deletions; metadata, messages and cursors of channels. Damage is named by file,\n"
        "byte and records. Changes nothing.",
        examples="tidelog pipeline scrub data\ntidelog pipeline scrub data --json",
    )
    made.add_argument("dir", metavar="DIR")
    _common(made, key=False)


def _backfill(verbs: Commands) -> None:
    made = command(
        verbs,
        "backfill",
        pipeline_jobs.backfill,
        short="files, a table or a range of a topic into a topic or a table",
        about="SOURCE is files (Parquet, JSON lines, CSV with a header) or a Delta table, or with --from-topic a\n"
        "directory or server with that topic. TARGET is a directory or a server with --topic, or else a table.\n"
        "--through names a function from DataFrame to DataFrame that rows go through. A job that broke off is\n"
        "taken up where it was, by its --job name, and writes nothing twice.",
        examples="tidelog pipeline backfill old.parquet data --topic orders --job old-orders\n"
        "tidelog pipeline backfill data table --from-topic orders --through shop.jobs:by_day",
    )
    made.add_argument("source", metavar="SOURCE")
    made.add_argument("target", metavar="TARGET")
    made.add_argument("--topic", help="of the target; without it the target is a table")
    made.add_argument("--from-topic", help="of the source; without it the source is files or a table")
    made.add_argument("--format", choices=("parquet", "json", "csv", "delta"), help="of files, where no name tells")
    made.add_argument("--through", metavar="MODULE:FUNCTION", help="what rows go through")
    made.add_argument("--job", default="backfill", help="the name by which a job is taken up again (backfill)")
    made.add_argument("--work-dir", metavar="DIR", help="where rows are staged (.tidelog-backfill/JOB)")
    made.add_argument("--first", type=count, metavar="SEQ", help="of the source's topic; the earliest")
    made.add_argument("--until", type=count, metavar="SEQ", help="of the source's topic, included; its end now")
    made.add_argument("--table-format", choices=("parquet", "delta"), help="of a table that is new (parquet)")
    made.add_argument("--target-key", help="of the server that is written to")
    _common(made)


def _stats(verbs: Commands) -> None:
    made = command(
        verbs,
        "stats",
        pipeline_jobs.stats,
        short="rates, sizes and waits by interval, as a table and a plot",
        about="Records and bytes per interval with percentiles of sizes; of a queue, claims and how long jobs had\n"
        "waited for them. --plot draws it as an SVG.",
        examples="tidelog pipeline stats data orders --every 1m\n"
        "tidelog pipeline stats data jobs --every 10s --plot jobs.svg",
    )
    made.add_argument("where", metavar="WHERE")
    made.add_argument("topic", metavar="TOPIC")
    made.add_argument("--every", type=age_ms, default=60_000, metavar="AGE", help="length of an interval (1m)")
    made.add_argument("--plot", metavar="FILE", help="an SVG to write")
    _common(made)
