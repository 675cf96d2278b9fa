"""[shell] Commands that make a second log from a first: convert, restore. The first is only read."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from tidelog.cli.opening import codec_there
from tidelog.cli.render import Screen, bytes_, several, span
from tidelog.commitlog import SegmentedLog
from tidelog.commitlog import convert as convert_log
from tidelog.commitlog import restore as restore_log
from tidelog.disk.posix import PosixDisk


def convert(args: Namespace, screen: Screen) -> int:
    """Write a log again in another codec's layout."""
    codec = codec_there(PosixDisk(), args.source, args.codec)
    with (
        SegmentedLog.open(args.source, codec, read_only=True) as log,
        _made(args.destination, screen),
        screen.bar(f"converting {args.source}", total=len(log)) as bar,
    ):
        copy = convert_log(
            log,
            args.destination,
            args.to,
            renumber=args.renumber,
            drop=args.drop,
            clamp_times=args.clamp_times,
            progress=bar,
        )
        copy.close()
    screen.answer(
        {
            "path": args.destination,
            "codec": args.to,
            "lowest": copy.lowest,
            "highest": copy.highest,
            "seqs": len(copy),
            "bytes": copy.size,
        },
        f"{args.destination}: a {args.to} log, {span(copy.lowest, copy.highest)}, {bytes_(copy.size)}",
    )
    return 0


def restore(args: Namespace, screen: Screen) -> int:
    """Copy a log as it was at a seq or a time."""
    codec = codec_there(PosixDisk(), args.source, args.codec)
    with (
        SegmentedLog.open(args.source, codec, read_only=True) as log,
        _made(args.destination, screen),
        screen.bar(f"restoring {args.source}", total=1) as bar,
    ):
        done = restore_log(log, args.destination, to_seq=args.to_offset, to_time_us=args.to_time, progress=bar)
        left_out = log.highest - done.highest
    screen.answer(
        {
            "path": done.path,
            "codec": codec,
            "lowest": done.lowest,
            "highest": done.highest,
            "bytes": done.bytes,
            "left_out": left_out,
        },
        f"{done.path}: a {codec} log, {span(done.lowest, done.highest)}, {bytes_(done.bytes)}; "
        f"{several(left_out, 'later seq')} left out",
    )
    return 0


@contextmanager
def _made(path: str, screen: Screen) -> Iterator[None]:
    """Where the block ends early and had begun to fill a new directory, whoever reports it says so."""
    before = _filled(path)
    failed = True
    try:
        yield
        failed = False
    finally:
        if failed and not before and _filled(path):
            screen.unfinished = f"{path} is incomplete; remove it before you try again"


def _filled(path: str) -> bool:
    disk = PosixDisk()
    stat = disk.stat(path)
    return stat is not None and (not stat.is_dir or bool(disk.names(path)))
