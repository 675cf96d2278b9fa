"""[shell] `tidelog pipeline reconcile | scrub | backfill | stats`: the jobs that end by themselves."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from tidelog.cli.check import finding_fields, finding_row, place
from tidelog.cli.render import Screen, bytes_, several, span
from tidelog.disk.posix import PosixDisk
from tidelog.errors import BadInput

_WIDE: Final = 24
_SHOWN: Final = 5  # ranges that a repair had to leave


def reconcile(args: Namespace, screen: Screen) -> int:
    """Table = log; 1 where it is not."""
    from tidelog import pipelines

    with screen.bar(f"comparing {args.table} with {args.topic}", total=1) as bar:
        found = pipelines.reconcile(
            args.where, args.topic, args.table, key=args.key, repair=args.repair, master=args.master, progress=bar
        )
    fields = {**found._asdict(), "hash": f"{found.hash:016x}", "equal": found.equal, "whole": found.whole}
    fields["table"] = args.table
    fields["difference"] = found.difference._asdict() if found.difference is not None else None
    rows = f"{several(found.table_rows, 'row')} in {several(found.pieces, 'range')}, hash {found.hash:016x}"
    if found.equal:
        alone = f"; {found.alone:,} of them are no longer in the log" if found.alone else ""
        screen.answer(fields, f"{args.table} is {args.topic}, {span(found.first, found.stop)}: {rows}{alone}")
        return 0
    first = found.difference
    lines = [f"{args.table} is not {args.topic}: {several(len(found.differing), 'range')} of {found.pieces} differ"]
    if first is not None:
        lines += [
            f"first difference{'' if first.seq is None else f', seq {first.seq}'}",
            f"  log    {first.log}",
            f"  table  {first.table}",
        ]
    if args.repair:
        lines.append(f"{several(found.repaired, 'range')} made again from the log")
        lines += [f"  {span(low, high)} differs still: the log lost records of it" for low, high in found.left[:_SHOWN]]
        if found.left_beyond:
            lines.append(f"  {several(found.left_beyond, 'row')} with seqs that the log does not have were not touched")
    screen.answer(fields, *lines)
    if not args.repair:
        screen.say("run it again with --repair to make these ranges again from the log")
    return 0 if found.whole else 1


def scrub(args: Namespace, screen: Screen) -> int:
    """Every checksum; 1 where something is damaged."""
    from tidelog import pipelines

    with screen.bar(f"scrubbing {args.dir}", total=1) as bar:
        found = pipelines.scrub(args.dir, master=args.master, progress=bar)
    fields = {**found._asdict(), "ok": not found.damage, "path": args.dir}
    fields["findings"] = [finding_fields(finding) for finding in found.findings]
    seen = f"{several(found.segments, 'segment')} and {several(found.frames, 'frame')} of the WAL"
    said = f"{seen}, {bytes_(found.bytes)}, in {several(found.parts, 'part')}"
    if found.damage:
        screen.answer(fields, f"{args.dir}: damage in {place(found.damage[0])}: {found.damage[0].reason}")
    else:
        rooms = f" and {several(found.channels, 'channel')}" if found.channels else ""
        screen.answer(fields, f"{args.dir}: no damage, {several(found.topics, 'topic')}{rooms}; {said}")
    if found.findings and not screen.json:
        screen.table(("", "what", "where", "why"), [finding_row(finding) for finding in found.findings])
    return 1 if found.damage else 0


def named(text: str) -> Callable[[Any], Any]:
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

    function = named(args.through) if args.through else None
    with screen.bar(f"job {args.job}", total=1) as bar:
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
            key=args.key,
            target_key=args.target_key,
            master=args.master,
            progress=bar,
        )
    live = "" if done.join_seq is None else f"; the live stream goes on at seq {done.join_seq + 1}"
    where = f"{several(done.rows, 'row')} in {done.target}, {span(done.first, done.last + 1)}{live}"
    before = f"nothing was written: job {args.job} had written everything before; " if not done.written else ""
    screen.answer(done._asdict(), f"{before}{where}")
    return 0


def stats(args: Namespace, screen: Screen) -> int:
    from tidelog import pipelines
    from tidelog.pipelines import addresses
    from tidelog.pipelines.measuring import save
    from tidelog.pipelines.plot import bar

    if args.plot:
        args.plot = addresses.directory(args.plot, "--plot")
    if args.plot and not args.plot.endswith(".svg"):
        raise BadInput(f"{args.plot}: a plot is an SVG; nothing was done, give a name that ends in .svg")
    with screen.bar(f"reading {args.topic}"):
        found = pipelines.stats(args.where, args.topic, every_ms=args.every, key=args.key, master=args.master)
    if args.plot:
        save(found, PosixDisk(), args.plot)
    counted = sum(row["records"] for row in found.rates)
    screen.answer(
        {**found._asdict(), "plot": args.plot},
        f"{args.topic}: {several(counted, 'record')} in {several(len(found.rates), 'interval')}",
    )
    if screen.json:
        return 0
    most = max((row["records_s"] for row in found.rates), default=0)
    screen.table(
        ("from (UTC)", ">records", ">per s", ">bytes per s", ">p50", ">p99", ">largest", ""),
        [
            (
                row["from"],
                f"{row['records']:,}",
                f"{row['records_s']:,.1f}",
                bytes_(int(row["bytes_s"])),
                bytes_(row["size_p50"]),
                bytes_(row["size_p99"]),
                bytes_(row["size_max"]),
                bar(row["records_s"], most, _WIDE),
            )
            for row in found.rates
        ],
    )
    if found.waits:
        longest = max((row["wait_ms_p99"] or 0 for row in found.waits), default=0)
        screen.table(
            ("from (UTC)", ">claims", ">acks", ">nacks", ">dead", ">wait p50", ">wait p99", ""),
            [
                (
                    row["from"],
                    *(f"{row[name]:,}" for name in ("claims", "acks", "nacks", "dead")),
                    *(f"{row[name] or 0:,} ms" for name in ("wait_ms_p50", "wait_ms_p99")),
                    bar(row["wait_ms_p99"] or 0, longest, _WIDE),
                )
                for row in found.waits
            ],
        )
    return 0
