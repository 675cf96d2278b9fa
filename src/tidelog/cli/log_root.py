"""`tidelog log topics | describe | lag | retain` on a root: many logs in RustLog's directory layout.

    <root>/topics/<topic>/partitions/<n>/     a log each; every other command of `tidelog log` takes such a directory

`topics`, `describe` and `lag` only read, beside a writer. RustLog keeps the offsets of consumer groups in memory and
loses them at a restart; these commands use those that `PartitionedLog.offsets` stores.
"""

from __future__ import annotations

from argparse import Namespace

from tidelog.cli.command import Commands, add_command
from tidelog.cli.render import Screen, format_bytes, plural
from tidelog.commitlog import PartitionedLog
from tidelog.commitlog.codecs import CODEC_NAMES
from tidelog.commitlog.partitions import PartitionInfo, is_root, root_codec
from tidelog.disk.posix import PosixDisk
from tidelog.errors import BadInput, NotFound


def _open(args: Namespace, *, write: bool = False) -> PartitionedLog:
    disk = PosixDisk()
    if not is_root(disk, args.root):
        raise NotFound(
            f"{args.root} holds no topics (topics/NAME/partitions/NUMBER); nothing was changed, check the path"
        )
    return PartitionedLog.open(args.root, args.codec or root_codec(disk, args.root), read_only=not write)


def _chosen(root: PartitionedLog, topic: str | None) -> list[str]:
    names = sorted(root.topics())
    if topic is None:
        return names
    if topic not in names:
        raise NotFound(f"there is no topic {topic}; nothing was changed, tidelog log topics lists them")
    return [topic]


def topics(args: Namespace, screen: Screen) -> int:
    """List the topics of a root."""
    with _open(args) as root:
        counts = sorted(root.topics().items())
    rows = [{"topic": name, "partitions": count} for name, count in counts]
    if screen.json:
        screen.print_result({"topics": rows})
    else:
        screen.print_table(("topic", ">partitions"), [(name, str(count)) for name, count in counts])
    return 0


def describe(args: Namespace, screen: Screen) -> int:
    """Show range, segments and size of every partition."""
    with _open(args) as root:
        found = [info for name in _chosen(root, args.topic) for info in root.describe(name)]
    if screen.json:
        screen.print_result({"partitions": [info._asdict() for info in found]})
    else:
        titles = ("topic", ">partition", ">first", ">next", ">segments", ">size")
        screen.print_table(titles, [_describe_row(info) for info in found])
    return 0


def _describe_row(info: PartitionInfo) -> tuple[str, ...]:
    numbers = (info.partition, info.lowest, info.highest, info.segments)
    return (info.topic, *map(str, numbers), format_bytes(info.size))


def lag(args: Namespace, screen: Screen) -> int:
    """Show how many records each group has still to process."""
    with _open(args) as root:
        groups = root.offsets.groups() if args.group is None else [args.group]
        if args.group is not None and args.group not in root.offsets.groups():
            raise NotFound(f"the group {args.group} has committed nothing in {args.root}; nothing was changed")
        infos = [info for name in _chosen(root, args.topic) for info in root.describe(name)]
        rows = []
        for group in groups:
            for info in infos:
                topic, number = info.topic, info.partition
                committed = root.offsets.fetch(group, topic=topic, partition=number)
                left = root.offsets.lag(group, info.highest, topic=topic, partition=number, lowest=info.lowest)
                row: dict[str, object] = {"group": group, "topic": topic, "partition": number}
                rows.append(row | {"committed": committed, "next_seq": info.highest, "lag": left})
    if screen.json:
        screen.print_result({"lag": rows})
    elif not rows:
        screen.print_result({}, f"{args.root}: no group has committed anything")
    else:
        titles = ("group", "topic", ">partition", ">committed", ">next", ">lag")
        cells = [["–" if value is None else str(value) for value in row.values()] for row in rows]
        screen.print_table(titles, cells)
    return 0


def retain(args: Namespace, screen: Screen) -> int:
    """Drop old segments of every partition. Called by `tidelog log retain` when its directory is a root."""
    if args.high_watermark is not None:
        raise BadInput("--high-watermark is for one log; nothing was dropped, give the directory of a partition")
    args.root = args.dir
    rows = []
    with _open(args, write=True) as root:
        for name in _chosen(root, args.topic):
            results = root.retain(name, keep_ms=args.keep_ms, keep_bytes=args.keep_bytes)
            for number, done in enumerate(results):
                fields = {"segments": done.segments, "records": done.records, "bytes": done.bytes}
                rows.append(
                    {"topic": name, "partition": number, **fields, "lowest": done.lowest, "because": done.reason}
                )
    dropped = sum(int(str(row["segments"])) for row in rows)
    titles = ("topic", ">partition", ">segments", ">seqs", ">bytes", ">first", "because")
    screen.print_result(
        {"partitions": rows, "segments": dropped},
        f"dropped {plural(dropped, 'segment')} of {plural(len(rows), 'partition')}",
        titles=titles,
        rows=[[str(value) for value in row.values()] for row in rows],
    )
    return 0


def add(subcommands: Commands) -> None:
    """Add the commands on a root to the `log` group."""
    layout = "ROOT has topics/NAME/partitions/NUMBER, as RustLog has it. Only reads; a writer may be at work."
    for name, run, summary, text, example in (
        (
            "topics",
            topics,
            "list the topics of a root of partitions",
            "List topics and how many partitions each has.",
            "",
        ),
        (
            *("describe", describe, "show the partitions of a root"),
            "Show first and next seq, segments and size of every partition, or of those of one topic.",
            " --topic orders",
        ),
        (
            *("lag", lag, "show how far consumer groups are in a root"),
            "Show what each consumer group has committed and how many seqs it has still to process. RustLog keeps\n"
            "these offsets in memory only; shown are those that PartitionedLog.offsets stores.",
            " --group billing",
        ),
    ):
        parser = add_command(
            subcommands,
            name,
            run,
            "ROOT",
            summary=summary,
            description=f"{text}\n{layout}",
            examples=f"tidelog log {name} data{example}",
        )
        parser.add_argument("--codec", choices=CODEC_NAMES, help="the layout of its logs (recognised by their files)")
        if run is not topics:
            parser.add_argument("--topic", metavar="NAME", help="only this topic")
        if run is lag:
            parser.add_argument("--group", metavar="NAME", help="only this group")
