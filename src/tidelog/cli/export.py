"""`tidelog export`: a topic into a table of Parquet files, in this process.

The table has the commits of `tidelog pipeline export`, so either command continues a table of the other.
"""

from __future__ import annotations

from argparse import Namespace

from tidelog.cli.command import DATABASE, Commands, add_command
from tidelog.cli.pipeline import add_storage_options, print_exported
from tidelog.cli.render import Screen
from tidelog.cli.target import check_target, target_place
from tidelog.errors import NotFound


def export(args: Namespace, screen: Screen) -> int:
    """Export what a table does not have yet."""
    try:
        from tidelog import pipelines
    except ImportError as error:
        raise NotFound(
            f"exports need packages that are not installed ({error.name} is missing); nothing was written, run: pip "
            "install 'tidelog[spark,lake]' (Java is not needed)"
        ) from None
    check_target(args)
    with screen.progress_bar(f"exporting {args.topic}", total=1) as bar:
        done = pipelines.export_here(
            target_place(args),
            args.topic,
            args.table,
            since_last=args.since_last,
            format=args.format,
            storage_options=dict(args.storage_options),
            key=args.api_key,
            infer=args.infer,
            partition_by=args.partition_by,
            bad=args.bad,
            on_gap=args.on_gap,
            progress=bar,
        )
    print_exported(args, screen, done)
    return 0


def add(commands: Commands) -> None:
    """Add `export` to the command line."""
    parser = add_command(
        commands,
        "export",
        export,
        DATABASE,
        "TOPIC",
        "TABLE",
        summary="a topic into Parquet files, without Spark or Java",
        description="Write a topic into a table: a directory of Parquet files (orders.parquet), which pandas, polars "
        "and\n"
        "DuckDB read, a Delta table, or an Iceberg table (iceberg://CATALOG/NAMESPACE.TABLE), also in a bucket. A new\n"
        "table gets all records; with --since-last one that exists gets those after its last commit, exactly once.\n"
        "It is the table of tidelog pipeline export: each continues what the other wrote, and tidelog pipeline\n"
        "reconcile compares it with the topic. Needs pip install 'tidelog[spark,lake]', but no Java.",
        examples="tidelog export data orders orders.parquet\n"
        "tidelog export http://127.0.0.1:4000 orders orders.parquet --since-last --infer",
    )
    parser.add_argument("--since-last", action="store_true", help="continue the table where it ends, or begin it")
    parser.add_argument("--infer", action="store_true", help="columns of a new table out of the fields of JSON records")
    parser.add_argument("--format", choices=("parquet", "delta", "iceberg"), help="of a table that is new (parquet)")
    parser.add_argument(
        "--partition-by", metavar="RULE", help="of a table that is new: date(ts), or a column such as tag (none)"
    )
    parser.add_argument(
        "--bad",
        choices=("rescue", "quarantine", "fail"),
        default="rescue",
        help="what happens to records that do not fit inferred columns (rescue)",
    )
    parser.add_argument(
        "--on-gap",
        choices=("fail", "skip"),
        default="fail",
        help="where records were lost before they were exported (fail)",
    )
    add_storage_options(parser)
