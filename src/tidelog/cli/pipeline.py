"""`tidelog pipeline …`: jobs that run on Spark. Spark is imported only when one of them starts.

`export` runs once, or with `--follow` continuously until SIGTERM, which ends it between two commits. During a job Spark
handles Ctrl-C: it ends the job, and the next run repeats that commit from its beginning. All other jobs end by
themselves.

Every job shows a progress bar while it runs, and in the end a sentence and a table; with `--json` one object instead.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

from tidelog.cli.backup import parse_topic_seq
from tidelog.cli.command import (
    DATABASE,
    Commands,
    add_command,
    add_group,
    parse_age_ms,
    parse_count,
    parse_moment_us,
    parse_seqs,
    parse_size,
    stop_event,
)
from tidelog.cli.doctor import describe_location, finding_fields, finding_row
from tidelog.cli.plot import check_svg_path, render_bar, render_stats, save_svg
from tidelog.cli.render import Screen, format_bytes, format_seqs, plural
from tidelog.cli.target import target_place
from tidelog.errors import BadInput, NotFound

if TYPE_CHECKING:
    from tidelog.pipelines import Exported


@contextmanager
def _spark(args: Namespace, screen: Screen) -> Iterator[dict[str, Any]]:
    """Yield what a job is given of Spark: master and settings, or with --ui a session whose page is up."""
    if not args.ui:
        yield {"master": args.master, "conf": dict(args.conf)}
        return
    from tidelog.pipelines.api import job_session
    from tidelog.spark.spark_session import is_connect

    with job_session(None, args.master, {"spark.ui.enabled": "true", **dict(args.conf)}) as session:
        url = None if is_connect(session) else session.sparkContext.uiWebUrl
        screen.print_note(f"Spark's page: {url or 'it is that of the Connect server'}")
        yield {"spark": session}


_PLAIN: Final = ("", "")  # titles of a table of names and values


def export(args: Namespace, screen: Screen) -> int:
    from tidelog import pipelines

    with (
        _spark(args, screen) as spark,
        screen.progress_bar(f"exporting {args.topic}", total=1) as bar,
        stop_event() as stopping,
    ):
        done = pipelines.export(
            target_place(args),
            args.topic,
            args.table,
            pause=(lambda idle: stopping.wait(args.every / 1000 if idle else 0)) if args.follow else None,
            progress=bar,
            **_export_options(args),
            **spark,
        )
    print_exported(args, screen, done)
    return 0


def print_exported(args: Namespace, screen: Screen, done: Exported) -> None:
    """Print what an export has written."""
    fields = {**done._asdict(), "hash": f"{done.hash:016x}", "table": args.table}
    wrote = f"{plural(done.rows, 'row')} in {plural(done.files, 'file')}, {plural(done.commits, 'commit')}"
    screen.print_result(fields, f"{args.table}: {wrote}; it stands for {args.topic} up to seq {done.stop - 1}")
    if done.commits and not screen.json:
        screen.print_table(
            ("", ""),
            [
                ("range", format_seqs(done.first, done.stop)),
                ("rows", f"{done.rows:,}"),
                ("in quarantine", f"{done.quarantined:,}"),
                ("files", f"{done.files:,}, of {format_bytes(done.smallest)} to {format_bytes(done.largest)}"),
                ("bytes", format_bytes(done.bytes)),
                ("hash", f"{done.hash:016x}"),
            ],
        )


def _export_options(args: Namespace) -> dict[str, Any]:
    """Return the options that `export` and `export-topics` share."""
    from tidelog import pipelines

    return {
        "format": args.format,
        "key": args.api_key,
        "schema": args.schema,
        "infer": args.infer,
        "registered_schema": args.registered_schema,
        "bad": args.bad,
        "partition_by": args.partition_by,
        "mode": args.mode,
        "latest_key": args.latest_key,
        "change_feed": args.change_feed,
        "on_gap": args.on_gap,
        "sizes": pipelines.Sizes(args.file_bytes, args.file_age, max(args.commit_bytes, args.file_bytes)),
        "group": args.group,
        "hold_bytes": args.hold_bytes,
        "storage_options": dict(args.storage_options),
    }


def export_topics(args: Namespace, screen: Screen) -> int:
    """Many topics; 1 where one of them failed."""
    from tidelog import pipelines

    with (
        _spark(args, screen) as spark,
        screen.progress_bar("exporting topics"),
        stop_event() as stopping,
    ):
        done = pipelines.export_topics(
            target_place(args),
            args.into,
            topics=args.topics,
            pattern=args.pattern,
            parallel=args.parallel,
            follow=args.follow,
            pause=(lambda idle: stopping.wait(args.every / 1000 if idle else 0)) if args.follow else None,
            **_export_options(args),
            **spark,
        )
    failed = [each for each in done if each.state == "failed"]
    rows = sum(each.rows for each in done)
    screen.print_result(
        {"topics": [each._asdict() for each in done], "rows": rows, "failed": len(failed)},
        f"{plural(len(done), 'topic')}, {plural(rows, 'row')}; {len(failed)} failed",
        titles=("topic", "table", "state", ">rows", ">commits", ">next seq", ">failures"),
        rows=[
            [
                each.topic,
                each.table,
                each.state,
                f"{each.rows:,}",
                f"{each.commits:,}",
                "" if each.next_seq is None else f"{each.next_seq:,}",
                f"{each.failures:,}",
            ]
            for each in done
        ],
        after=[f"{each.topic}: {each.error}" for each in failed],
    )
    return 1 if failed else 0


_BAR_CHARS: Final = 24
_SHOWN_RANGES_MAX: Final = 5  # ranges that a repair had to leave


def reconcile(args: Namespace, screen: Screen) -> int:
    """Table = log; 1 where it is not."""
    from tidelog import pipelines

    with (
        _spark(args, screen) as spark,
        screen.progress_bar(f"comparing {args.table} with {args.topic}", total=1) as bar,
    ):
        found = pipelines.reconcile(
            target_place(args),
            args.topic,
            args.table,
            storage_options=dict(args.storage_options),
            key=args.api_key,
            repair=args.repair,
            progress=bar,
            **spark,
        )
    fields = {**found._asdict(), "hash": f"{found.hash:016x}", "equal": found.equal, "whole": found.whole}
    fields["table"] = args.table
    fields["difference"] = found.difference._asdict() if found.difference is not None else None
    rows = f"{plural(found.table_rows, 'row')} in {plural(found.pieces, 'range')}, hash {found.hash:016x}"
    if found.equal:
        alone = f"; {found.alone:,} of them are no longer in the log" if found.alone else ""
        screen.print_result(
            fields,
            f"{args.table} is {args.topic}, {format_seqs(found.first, found.stop)}: {rows}{alone}",
            titles=_PLAIN,
            rows=_compared_rows(found),
        )
        return 0
    first = found.difference
    lines = [f"{args.table} is not {args.topic}: {plural(len(found.differing), 'range')} of {found.pieces} differ"]
    if first is not None:
        lines += [
            f"first difference{'' if first.seq is None else f', seq {first.seq}'}",
            f"  log    {first.log}",
            f"  table  {first.table}",
        ]
    if args.repair:
        lines.append(f"{plural(found.repaired, 'range')} made again from the log")
        lines += [
            f"  {format_seqs(low, high)} differs still: the log lost records of it"
            for low, high in found.left[:_SHOWN_RANGES_MAX]
        ]
        if found.left_beyond:
            lines.append(f"  {plural(found.left_beyond, 'row')} with seqs that the log does not have were not touched")
    screen.print_result(fields, *lines, titles=_PLAIN, rows=_compared_rows(found))
    if not args.repair:
        screen.print_note("run it again with --repair to make these ranges again from the log")
    return 0 if found.whole else 1


def _compared_rows(found: Any) -> list[tuple[str, str]]:
    return [
        ("range", format_seqs(found.first, found.stop)),
        ("rows of the log", f"{found.log_rows:,}"),
        ("rows of the table", f"{found.table_rows:,}"),
        ("ranges compared", f"{found.pieces:,}"),
        ("ranges that differ", f"{len(found.differing):,}"),
    ]


def scrub(args: Namespace, screen: Screen) -> int:
    """Every checksum; 1 where something is damaged."""
    from tidelog import pipelines

    with _spark(args, screen) as spark, screen.progress_bar(f"scrubbing {target_place(args)}", total=1) as bar:
        found = pipelines.scrub(target_place(args), key=args.api_key, progress=bar, **spark)
    fields = {**found._asdict(), "ok": not found.damage, "path": target_place(args)}
    fields["findings"] = [finding_fields(finding) for finding in found.findings]
    frames = f" and {plural(found.frames, 'frame')} of the WAL" if found.frames else ""
    seen = f"{plural(found.segments, 'segment')}{frames}"
    said = f"{seen}, {format_bytes(found.bytes)}, in {plural(found.parts, 'part')}"
    if found.damage:
        line = f"{target_place(args)}: damage in {describe_location(found.damage[0])}: {found.damage[0].reason}"
    else:
        channels = f" and {plural(found.channels, 'channel')}" if found.channels else ""
        line = f"{target_place(args)}: no damage, {plural(found.topics, 'topic')}{channels}; {said}"
    counted = ("topics", "segments", "frames", "channels", "messages", "parts")
    rows = [(name, f"{getattr(found, name):,}") for name in counted]
    screen.print_result(fields, line, titles=_PLAIN, rows=[*rows, ("bytes", format_bytes(found.bytes))])
    if found.findings and not screen.json:
        screen.print_table(("", "what", "where", "why"), [finding_row(finding) for finding in found.findings])
    return 1 if found.damage else 0


def load_function(text: str) -> Callable[[Any], Any]:
    """The function that `module:function` names; modules of the current directory are found too."""
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        raise BadInput(f"{text!r} names no function; nothing was done, write module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadInput(f"{text} cannot be loaded ({error}); nothing was done, check the name and the path") from None
    if not callable(found):
        raise BadInput(f"{text} is no function; nothing was done, name one from DataFrame to DataFrame")
    made: Callable[[Any], Any] = found
    return made


def backfill(args: Namespace, screen: Screen) -> int:
    from tidelog import pipelines

    function = load_function(args.through) if args.through else None
    with _spark(args, screen) as spark, screen.progress_bar(f"job {args.job}", total=1) as bar:
        done = pipelines.backfill(
            args.source,
            args.target,
            args.topic,
            from_topic=args.from_topic,
            format=args.format,
            function=function,
            function_name=args.through,
            job=args.job,
            work_dir=args.work_dir,
            first=args.first,
            until=args.until,
            table_format=args.table_format,
            storage_options=dict(args.storage_options),
            key=args.key,
            target_key=args.target_key,
            progress=bar,
            **spark,
        )
    live = "" if done.join_seq is None else f"; the live stream goes on at seq {done.join_seq + 1}"
    where = f"{plural(done.rows, 'row')} in {done.target}, {format_seqs(done.first, done.last + 1)}{live}"
    before = f"nothing was written: job {args.job} had written everything before; " if not done.written else ""
    screen.print_result(done._asdict(), f"{before}{where}", titles=_PLAIN, rows=_backfilled_rows(done))
    return 0


def _backfilled_rows(done: Any) -> list[tuple[str, str]]:
    return [
        ("job", done.job),
        ("target", done.target),
        ("range", format_seqs(done.first, done.last + 1)),
        ("rows", f"{done.rows:,}"),
        ("rows of this run", f"{done.written:,}"),
        ("chunks", f"{done.chunks:,}"),
    ]


def stats(args: Namespace, screen: Screen) -> int:
    from tidelog import addresses, pipelines

    if args.plot:
        args.plot = addresses.local_directory(args.plot, "--plot")
    if args.plot:
        check_svg_path(args.plot)
    with _spark(args, screen) as spark, screen.progress_bar(f"reading {args.topic}"):
        found = pipelines.stats(target_place(args), args.topic, every_ms=args.every, key=args.api_key, **spark)
    if args.plot:
        save_svg(args.plot, render_stats(found))
    counted = sum(row["records"] for row in found.rates)
    screen.print_result(
        {**found._asdict(), "plot": args.plot},
        f"{args.topic}: {plural(counted, 'record')} in {plural(len(found.rates), 'interval')}",
    )
    if screen.json:
        return 0
    most = max((row["records_s"] for row in found.rates), default=0)
    screen.print_table(
        ("from (UTC)", ">records", ">per s", ">bytes per s", ">p50", ">p99", ">largest", ""),
        [
            (
                row["from"],
                f"{row['records']:,}",
                f"{row['records_s']:,.1f}",
                format_bytes(int(row["bytes_s"])),
                format_bytes(row["size_p50"]),
                format_bytes(row["size_p99"]),
                format_bytes(row["size_max"]),
                render_bar(row["records_s"], most, _BAR_CHARS),
            )
            for row in found.rates
        ],
    )
    if found.waits:
        longest = max((row["wait_ms_p99"] or 0 for row in found.waits), default=0)
        screen.print_table(
            ("from (UTC)", ">claims", ">acks", ">nacks", ">dead", ">wait p50", ">wait p99", ""),
            [
                (
                    row["from"],
                    *(f"{row[name]:,}" for name in ("claims", "acks", "nacks", "dead")),
                    *(f"{row[name] or 0:,} ms" for name in ("wait_ms_p50", "wait_ms_p99")),
                    render_bar(row["wait_ms_p99"] or 0, longest, _BAR_CHARS),
                )
                for row in found.waits
            ],
        )
    return 0


def compact(args: Namespace, screen: Screen) -> int:
    from tidelog import pipelines

    with _spark(args, screen) as spark, screen.progress_bar(f"compacting {args.topic}", total=1) as bar:
        done = pipelines.compact(target_place(args), args.topic, key=args.api_key, progress=bar, **spark)
    screen.print_result(
        {"topic": args.topic, **done._asdict()},
        f"{args.topic}: removed {plural(done.records, 'record')}, {format_bytes(done.bytes)}, "
        f"{plural(done.tombstones, 'tombstone')} of them; compacted up to seq {done.compacted_to}",
    )
    return 0


def optimize(args: Namespace, screen: Screen) -> int:
    from tidelog import pipelines

    options = dict(args.storage_options)
    with _spark(args, screen) as spark, screen.progress_bar(f"optimizing {args.table}"):
        done = pipelines.optimize(args.table, file_bytes=args.file_bytes, storage_options=options, **spark)
    said = "nothing to join" if not done.commits else f"{plural(done.removed, 'file')} became {done.added:,}"
    rows = [("commits", f"{done.commits:,}"), ("bytes", format_bytes(done.bytes))]
    screen.print_result(done._asdict(), f"{args.table}: {said}", titles=_PLAIN, rows=rows)
    return 0


def reprocess(args: Namespace, screen: Screen) -> int:
    from tidelog import pipelines

    options = dict(args.storage_options)
    with _spark(args, screen) as spark, screen.progress_bar(f"reprocessing {args.table}"):
        done = pipelines.reprocess(
            target_place(args),
            args.topic,
            args.table,
            schema=args.schema,
            storage_options=options,
            key=args.api_key,
            **spark,
        )
    screen.print_result(
        done._asdict(),
        f"{args.table}: {plural(done.fitted, 'record')} of {done.before:,} in quarantine fit now, {done.left:,} do not",
        titles=_PLAIN,
        rows=[("ranges written again", f"{done.ranges:,}"), ("not tried: the log lost records", f"{done.skipped:,}")],
    )
    return 0


def vacuum(args: Namespace, screen: Screen) -> int:
    from tidelog import pipelines

    done = pipelines.vacuum(
        args.table,
        retention_hours=-(-args.retention // 3_600_000),
        force=args.force,
        dry_run=args.dry_run,
        storage_options=dict(args.storage_options),
    )
    verb = "would be removed" if done.is_dry_run else "removed"
    screen.print_result(
        done._asdict(),
        f"{args.table}: {plural(len(done.removed), 'file')} {verb}",
        titles=("file",),
        rows=[(name,) for name in done.removed[:_SHOWN_FILES_MAX]],
    )
    return 0


_SHOWN_FILES_MAX: Final = 20
_BAD_STATES: Final = frozenset(("lost", "no topic", "recreated"))


def status(args: Namespace, screen: Screen) -> int:
    """Where tables stand; 1 where one cannot go on."""
    from tidelog import pipelines

    found = pipelines.status(
        target_place(args), args.table, storage_options=dict(args.storage_options), key=args.api_key
    )
    lag = sum(each.lag_records or 0 for each in found)
    screen.print_result(
        {"tables": [each._asdict() for each in found], "lag_records": lag},
        f"{plural(len(found), 'table')}, {plural(lag, 'record')} not exported yet",
    )
    if not screen.json:
        screen.print_table(
            ("table", "topic", "state", ">next seq", ">head", ">lag", ">oldest waits"),
            [
                (
                    each.table,
                    each.topic or "",
                    each.state,
                    f"{each.next_seq:,}",
                    "" if each.head_seq is None else f"{each.head_seq:,}",
                    "" if each.lag_records is None else f"{each.lag_records:,}",
                    "" if each.lag_ms is None else f"{each.lag_ms / 1000:,.1f} s",
                )
                for each in found
            ],
        )
    return 1 if any(each.state in _BAD_STATES for each in found) else 0


def script(args: Namespace, screen: Screen) -> int:  # noqa: ARG001
    """The path of the script for spark-submit."""
    spec = find_spec("pyspark_tidelog")
    directory = next(iter(spec.submodule_search_locations or ()), None) if spec is not None else None
    if directory is None:
        raise NotFound("the package pyspark_tidelog is not installed; install tidelog again, the two are one wheel")
    path = str(PurePath(directory, "submit.py"))
    screen.print_result({"path": path}, path)
    return 0


def add(commands: Commands) -> None:
    """Add `pipeline` and its commands to the command line."""
    verbs = add_group(
        commands,
        "pipeline",
        summary="export, reconcile, scrub, backfill and stats, on Spark",
        description="Jobs over topics that run on Spark: on all processors of this machine, or on a cluster "
        "(--master).\n"
        "DATABASE is a directory of topics, the address of a server, or of an object store. No jar is needed,\n"
        "and no Spark but the Python package: pip install 'tidelog[spark,lake]'.",
        first_steps="start here:\n  $ tidelog pipeline export data orders table\n"
        "  $ tidelog pipeline reconcile data orders table\n",
    )
    _add_export(verbs)
    _add_reconcile(verbs)
    _add_scrub(verbs)
    _add_backfill(verbs)
    _add_stats(verbs)
    _add_compact(verbs)
    _add_erase(verbs)
    _add_restore(verbs)
    _add_status(verbs)
    _add_export_topics(verbs)
    _add_optimize(verbs)
    _add_vacuum(verbs)
    _add_reprocess(verbs)
    add_command(
        verbs,
        "script",
        script,
        summary="the path of the script that runs these jobs under spark-submit",
        description="Print the path of a script for spark-submit. Its arguments are those of `tidelog pipeline`;\n"
        "master and settings are those of spark-submit:\n"
        "  spark-submit --master yarn $(tidelog pipeline script) export data orders s3://lake/orders",
        examples="tidelog pipeline script --json",
    )


def erase(args: Namespace, screen: Screen) -> int:
    from tidelog import pipelines

    with _spark(args, screen) as spark, screen.progress_bar(f"erasing {args.topic}"):
        done = pipelines.erase(
            target_place(args),
            args.topic,
            args.table,
            match=args.match,
            seqs=args.seqs,
            actor=args.actor,
            storage_options=dict(args.storage_options),
            key=args.api_key,
            **spark,
        )
    fields = {**done._asdict(), "tables": [each._asdict() for each in done.tables]}
    count = done.log["records"] + done.log["records_before"]
    screen.print_result(
        fields,
        f"erased {plural(count, 'record')} of {args.topic}, and rows of {plural(len(done.tables), 'table')}; "
        f"SHA-256 {done.sha256}",
        titles=("table", "format", ">rows", ">files removed", ">version"),
        rows=[
            [each.table, each.format, f"{each.rows:,}", f"{len(each.removed):,}", str(each.version or "-")]
            for each in done.tables
        ],
        after=[f"not reached: {text}" for text in done.log["not_reached"]]
        + [f"not reached in {each.table}: {text}" for each in done.tables for text in each.not_reached],
    )
    return 0


def restore(args: Namespace, screen: Screen) -> int:
    from tidelog import pipelines

    with _spark(args, screen) as spark, screen.progress_bar(f"restoring {args.into}", total=1) as bar:
        done = pipelines.restore(
            args.target,
            args.into,
            args.topic,
            to_topic=args.to_topic,
            backup_id=args.backup,
            to_seq=dict(args.to_seq),
            to_time_ms=None if args.to_time is None else args.to_time // 1000,
            job=args.job,
            work_dir=args.work_dir,
            target_key=args.target_key,
            progress=bar,
            **spark,
        )
    written = done.backfilled
    fields = {**done._asdict(), "backfilled": None if written is None else written._asdict()}
    if written is None:
        said = f"{done.directory}: backup {done.backup}, {plural(len(done.topics), 'topic')}"
    else:
        said = f"{plural(written.rows, 'record')} of backup {done.backup} in {written.target}"
    if written is not None:
        titles, rows = _PLAIN, _backfilled_rows(written)
    else:
        titles, rows = ("topic", ">last seq"), [(name, f"{seq:,}") for name, seq in done.topics.items()]
    screen.print_result(fields, said, titles=titles, rows=rows, after=list(done.notes))
    return 0


def parse_conf(text: str) -> tuple[str, str]:
    """`name=value` of a setting of Spark."""
    name, equals, value = text.partition("=")
    if not equals or not name.startswith("spark."):
        raise ArgumentTypeError(f"{text!r} is no setting of Spark; write NAME=VALUE, as spark.executor.memory=2g")
    return name, value


def _add_spark_options(parser: ArgumentParser) -> None:
    parser.add_argument("--master", help="where Spark runs (that of spark-submit, or else local[*])")
    parser.add_argument(
        "--conf",
        action="append",
        default=[],
        type=parse_conf,
        metavar="NAME=VALUE",
        help="a setting of Spark, as spark.executor.memory=2g; may be repeated",
    )
    parser.add_argument("--ui", action="store_true", help="with Spark's page of jobs and streams; its address is shown")


def add_storage_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--storage-option",
        dest="storage_options",
        action="append",
        type=parse_storage_option,
        default=[],
        metavar="NAME=VALUE",
        help="of the table's object store, as deltalake or pyarrow call it; repeatable. Without them the environment "
        "(AWS_ACCESS_KEY_ID …) counts",
    )


def parse_storage_option(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE. An error does not show the value, which may be secret."""
    name, found, value = text.partition("=")
    if not found or not name:
        raise ArgumentTypeError("it is written NAME=VALUE, as in --storage-option AWS_REGION=eu-central-1")
    return name, value


def _add_export(subcommands: Commands) -> None:
    parser = add_command(
        subcommands,
        "export",
        export,
        DATABASE,
        "TOPIC",
        "TABLE",
        summary="a topic into a table, exactly once",
        description="Bring a topic into TABLE, a Delta table or a directory of Parquet files, in a directory or a "
        "bucket\n"
        "(s3://, gs://, abfs://), up to its present end; with --follow go on with it as records come. How far it\n"
        "is stands in the table's own commits and nowhere else: a run that was killed, or whose\n"
        "files were half written, is taken up by the next one without a row lost or doubled.\n"
        "With --schema or --infer the fields of JSON records become columns.",
        examples="tidelog pipeline export data orders table\n"
        "tidelog pipeline export data orders s3://lake/orders --storage-option AWS_REGION=eu-central-1\n"
        "tidelog pipeline export http://127.0.0.1:4000 orders lake/orders --follow --infer --bad quarantine",
    )
    _add_export_options(parser)


def _add_export_topics(subcommands: Commands) -> None:
    parser = add_command(
        subcommands,
        "export-topics",
        export_topics,
        DATABASE,
        "INTO",
        summary="many topics into a table each, in one supervised process",
        description="Export the topics that match, each into INTO/TOPIC, or into INTO with {topic} replaced. "
        "A topic that\n"
        "fails does not stop the others: it starts again after 1 s, then 2, up to 5 minutes. Without --follow it is\n"
        "tried three times, where that may help. In the end a table shows every topic; the exit code is 1 where one\n"
        "failed.",
        examples="tidelog pipeline export-topics data lake\n"
        "tidelog pipeline export-topics http://127.0.0.1:4000 's3://lake/{topic}' --pattern 'orders.*' --follow",
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--topic", dest="topics", action="append", metavar="NAME", help="a topic; may be repeated")
    chosen.add_argument("--pattern", metavar="REGEX", help="topics whose whole name matches (all topics)")
    parser.add_argument("--parallel", type=int, default=4, metavar="N", help="topics at the same time (4)")
    _add_export_options(parser)


def _add_export_options(parser: ArgumentParser) -> None:
    parser.add_argument("--format", choices=("delta", "iceberg", "parquet"), help="of a table that is new (delta)")
    runs = parser.add_mutually_exclusive_group()
    runs.add_argument(
        "--once", action="store_true", help="end when the table holds what the topic holds now (the default)"
    )
    runs.add_argument("--follow", action="store_true", help="go on as records come, until Ctrl-C or SIGTERM")
    parser.add_argument(
        "--every", type=parse_age_ms, default=5_000, metavar="AGE", help="with --follow: look so often (5s)"
    )
    parser.add_argument(
        "--file-bytes", type=parse_size, default=128 << 20, metavar="SIZE", help="of the log in a file (128m)"
    )
    parser.add_argument(
        "--file-age", type=parse_age_ms, default=60_000, metavar="AGE", help="commit after this time (1m)"
    )
    parser.add_argument(
        "--commit-bytes", type=parse_size, default=1 << 30, metavar="SIZE", help="of the log in a commit (1g)"
    )
    parser.add_argument("--schema", help="columns out of JSON records, as 'sku string, price double'")
    parser.add_argument("--infer", action="store_true", help="find the columns by looking at records")
    parser.add_argument(
        "--registered-schema", action="store_true", help="the columns that `tidelog schema set` gave each seq"
    )
    parser.add_argument(
        "--bad", choices=("rescue", "quarantine", "fail"), default="rescue", help="records that do not fit (rescue)"
    )
    parser.add_argument(
        "--partition-by", metavar="RULE", help="of a table that is new: date(ts), or a column such as tag (none)"
    )
    parser.add_argument(
        "--group", metavar="NAME", help="a consumer group that is set to the table's position: retention holds the rest"
    )
    parser.add_argument(
        "--hold-bytes", type=parse_size, default=1 << 30, metavar="SIZE", help="of --group: held at most (1g)"
    )
    parser.add_argument(
        "--mode",
        choices=("append", "latest"),
        help="of a table that is new: a row of each record (append), or the newest row of each key (Delta tables)",
    )
    parser.add_argument(
        "--latest-key", metavar="RULE", help="of --mode latest: tag, or a JSON pointer such as /user/id"
    )
    parser.add_argument("--change-feed", action="store_true", help="of --mode latest: keep what each commit changed")
    parser.add_argument(
        "--on-gap", choices=("fail", "skip"), default="fail", help="records lost before they were read (fail)"
    )
    add_storage_options(parser)
    _add_spark_options(parser)


def _add_reconcile(subcommands: Commands) -> None:
    parser = add_command(
        subcommands,
        "reconcile",
        reconcile,
        DATABASE,
        "TOPIC",
        "TABLE",
        summary="prove that a table is the log; exit code 1 where it is not",
        description="Hold every range of TABLE against the topic, by counts and hashes of its rows. Where one "
        "differs,\n"
        "show the first seq with what the log has and what the table has, and end with exit code 1. With --repair\n"
        "the ranges that differ are made again, and only those; the exit code is then 0 if all of them could be.",
        examples="tidelog pipeline reconcile data orders table\ntidelog pipeline reconcile data orders table --repair",
    )
    parser.add_argument("--repair", action="store_true", help="make ranges again that differ")
    add_storage_options(parser)
    _add_spark_options(parser)


def _add_scrub(subcommands: Commands) -> None:
    parser = add_command(
        subcommands,
        "scrub",
        scrub,
        DATABASE,
        summary="verify every checksum in parallel; exit code 1 on damage",
        description="What `tidelog check` does, on as many processors as Spark is given: snapshots, WAL, segments, "
        "indexes,\n"
        "footers, deletions; metadata, messages and cursors of channels. Damage is named by file,\n"
        "byte and records. Of a server or an object store every record that a reader gets is verified, and nothing\n"
        "else. Changes nothing.",
        examples="tidelog pipeline scrub data\ntidelog pipeline scrub s3://backups/data --json",
    )
    _add_spark_options(parser)


def _add_backfill(subcommands: Commands) -> None:
    parser = add_command(
        subcommands,
        "backfill",
        backfill,
        "SOURCE",
        summary="files, a table or a range of a topic into a topic or a table",
        description="SOURCE is files (Parquet, JSON lines, CSV with a header) or a Delta table, or with --from-topic "
        "a\n"
        "directory or server with that topic. TARGET is a directory or a server with --topic, or else a table.\n"
        "--through names a function from DataFrame to DataFrame that rows go through. A job that broke off is\n"
        "taken up where it was, by its --job name, and writes nothing twice.",
        examples="tidelog pipeline backfill old.parquet data --topic orders --job old-orders\n"
        "tidelog pipeline backfill data table --from-topic orders --through shop.jobs:by_day",
    )
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("--topic", help="of the target; without it the target is a table")
    parser.add_argument("--from-topic", help="of the source; without it the source is files or a table")
    parser.add_argument("--format", choices=("parquet", "json", "csv", "delta"), help="of files without a suffix")
    parser.add_argument("--through", metavar="MODULE:FUNCTION", help="what rows go through")
    parser.add_argument("--job", default="backfill", help="the name by which a job is taken up again (backfill)")
    parser.add_argument("--work-dir", metavar="DIR", help="where rows are staged (.tidelog-backfill/JOB)")
    parser.add_argument("--first", type=parse_count, metavar="SEQ", help="of the source's topic; the earliest")
    parser.add_argument("--until", type=parse_count, metavar="SEQ", help="of the source's topic, included; its end now")
    parser.add_argument(
        "--table-format", choices=("delta", "iceberg", "parquet"), help="of a table that is new (delta)"
    )
    parser.add_argument("--key", help="of the server that is read")
    parser.add_argument("--target-key", help="of the server that is written to")
    add_storage_options(parser)
    _add_spark_options(parser)


def _add_status(subcommands: Commands) -> None:
    parser = add_command(
        subcommands,
        "status",
        status,
        DATABASE,
        "TABLE...",
        summary="the lag of tables; exit code 1 where one cannot go on",
        description="TABLE is a table, or a directory or a prefix of a bucket with tables in it. Show for each its "
        "topic, the\n"
        "seq that the next export begins with, how many records it lacks and how long the oldest of them waits. The\n"
        "exit code is 1 where retention has removed records before their export, or the topic was dropped. Spark is\n"
        "not started.",
        examples="tidelog pipeline status data table\ntidelog pipeline status data lake\n"
        "tidelog pipeline status http://127.0.0.1:4000 s3://lake/orders lake/bills",
    )
    add_storage_options(parser)


def _add_optimize(subcommands: Commands) -> None:
    parser = add_command(
        subcommands,
        "optimize",
        optimize,
        "TABLE",
        summary="join small files of a table",
        description="Join neighbouring files of exports whose bytes together fit one file, on Spark, a file a "
        "partition.\n"
        "Rows, ranges and hashes stay: exports and reconcile go on as before. The files before it stay for older\n"
        "versions of a Delta table until vacuum. An Iceberg table is optimized by the engines of its catalog.",
        examples="tidelog pipeline optimize table\ntidelog pipeline optimize s3://lake/orders --file-bytes 256m",
    )
    parser.add_argument(
        "--file-bytes", type=parse_size, default=128 << 20, metavar="SIZE", help="the largest joined file (128m)"
    )
    add_storage_options(parser)
    _add_spark_options(parser)


def _add_reprocess(subcommands: Commands) -> None:
    parser = add_command(
        subcommands,
        "reprocess",
        reprocess,
        DATABASE,
        "TOPIC",
        "TABLE",
        summary="try records in quarantine again, with the newest schema",
        description="Read the ranges of TOPIC that have records in TABLE's quarantine and an older schema than the\n"
        "newest one, and write them again in one commit: records that fit become rows, the others stay in quarantine.\n"
        "A --schema with more columns than the table has adds them first.",
        examples="tidelog pipeline reprocess data orders table --schema 'sku string, price double, vat double'",
    )
    parser.add_argument("--schema", help="more columns, as 'sku string, price double' (those of the table)")
    add_storage_options(parser)
    _add_spark_options(parser)


def _add_vacuum(subcommands: Commands) -> None:
    parser = add_command(
        subcommands,
        "vacuum",
        vacuum,
        "TABLE",
        summary="remove files that a table does not need any more",
        description="Remove the data files that no version of a Delta table within --retention names, and files that "
        "killed\n"
        "exports staged. Older versions cannot be read afterwards. Less than 7 days need --force: an export that is\n"
        "at work in a bucket may lose its files, and begins its commit again. Spark is not started.",
        examples="tidelog pipeline vacuum table --dry-run\ntidelog pipeline vacuum s3://lake/orders --retention 30d",
    )
    parser.add_argument(
        "--retention", type=parse_age_ms, default=7 * 86_400_000, metavar="AGE", help="keep what is younger (7d)"
    )
    parser.add_argument("--force", action="store_true", help="allow less than 7 days")
    parser.add_argument("--dry-run", action="store_true", help="show the files and remove nothing")
    add_storage_options(parser)


def _add_stats(subcommands: Commands) -> None:
    parser = add_command(
        subcommands,
        "stats",
        stats,
        DATABASE,
        "TOPIC",
        summary="rates, sizes and waits by interval, as a table and a plot",
        description="Records and bytes per interval with percentiles of sizes; of a queue, claims and how long jobs "
        "had\n"
        "waited for them. --plot draws it as an SVG.",
        examples="tidelog pipeline stats data orders --every 1m\n"
        "tidelog pipeline stats data jobs --every 10s --plot jobs.svg",
    )
    parser.add_argument("--every", type=parse_age_ms, default=60_000, metavar="AGE", help="length of an interval (1m)")
    parser.add_argument("--plot", metavar="FILE", help="an SVG to write")
    _add_spark_options(parser)


def _add_compact(subcommands: Commands) -> None:
    parser = add_command(
        subcommands,
        "compact",
        compact,
        DATABASE,
        "TOPIC",
        summary="keep the newest record of each key, searched on Spark",
        description="Remove the records of a topic with compaction that newer ones of their key replaced, and "
        "tombstones\n"
        "whose delay has passed: what `tidelog topic compact` does, with the search on the executors, for a history\n"
        "that one machine would read for long. Records that a group with a hold has not read stay. A\n"
        "directory is held until the end; a server asks for a key with the admin right. A run that broke off is\n"
        "repeated.",
        examples="tidelog pipeline compact data users\n"
        "tidelog pipeline compact http://127.0.0.1:4000 users --key KEY --master spark://master:7077 --json",
    )
    _add_spark_options(parser)


def _add_erase(subcommands: Commands) -> None:
    parser = add_command(
        subcommands,
        "erase",
        erase,
        DATABASE,
        "TOPIC",
        "TABLE...",
        summary="erase records from a topic and its tables, with a receipt",
        description="Erase the records with a tag, or of some seqs, from the topic and from tables that were exported "
        "from\n"
        "it. Of a Delta table all older versions are removed with them. The receipt names every file, and what is not\n"
        "reached. A run that broke off is repeated.",
        examples="tidelog pipeline erase data orders table --match 'customer-7*'\n"
        "tidelog pipeline erase http://127.0.0.1:4000 orders s3://lake/orders --seqs 4,5 --json",
    )
    parser.add_argument("--match", metavar="TAG", help="a tag, or the beginning of a tag and *")
    parser.add_argument("--seqs", type=parse_seqs, metavar="N,N…", help="these seqs")
    parser.add_argument("--actor", help="who erases, for the receipt")
    add_storage_options(parser)
    _add_spark_options(parser)


def _add_restore(subcommands: Commands) -> None:
    parser = add_command(
        subcommands,
        "restore",
        restore,
        "TARGET",
        "INTO",
        summary="a backup at a point in time into a directory, or one topic of it into a topic",
        description="TARGET holds backups: a directory or a bucket. INTO is a new directory, or with --topic a\n"
        "directory or a server whose topic gets the records, each once, with new seqs. --to-seq and --to-time leave\n"
        "out what came later.",
        examples="tidelog pipeline restore s3://bucket/backups restored --to-time 2026-11-18T14:00:00Z\n"
        "tidelog pipeline restore s3://bucket/backups http://127.0.0.1:4000 --topic orders --to-topic orders-before",
    )
    parser.add_argument("--topic", help="of the backup, to write into a topic")
    parser.add_argument("--to-topic", metavar="NAME", help="of INTO (the name in the backup)")
    parser.add_argument("--backup", metavar="ID", help="of `tidelog backup list` (the newest)")
    parser.add_argument(
        "--to-seq", type=parse_topic_seq, action="append", default=[], metavar="TOPIC=N", help="the last seq of a topic"
    )
    parser.add_argument("--to-time", type=parse_moment_us, metavar="T", help="the last time, as 2026-01-31T12:00:00Z")
    parser.add_argument("--job", default="restore", help="the name by which a restore is repeated (restore)")
    parser.add_argument("--work-dir", metavar="DIR", help="where it is restored first (.tidelog-restore/JOB)")
    parser.add_argument("--target-key", help="of the server that is written to")
    _add_spark_options(parser)
