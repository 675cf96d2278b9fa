"""`tidelog bench`: what the user's own disk, machine and load allow, beside a bare write and fsync of the same bytes.

    directory    bare: one file, write + fsync, one after the other ──► a new database below it, which is removed
    server       a new topic, which is dropped; the disk of the server cannot be measured from here

Writers are threads; each appends a batch, waits for its ack, and appends the next one.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any, Final, get_args

import numpy as np

import tidelog
from tidelog import protocols
from tidelog.addresses import check_path
from tidelog.cli.command import (
    DATABASE,
    Commands,
    add_command,
    parse_positive,
    parse_positive_size,
    parse_seconds,
    stop_event,
)
from tidelog.cli.plot import Series, check_svg_path, render_bar, render_svg, save_svg
from tidelog.cli.render import Screen, format_bytes, plural
from tidelog.cli.target import target_place
from tidelog.client import connect
from tidelog.clock import SystemClock
from tidelog.disk.durability import remove_tree
from tidelog.disk.interface import join
from tidelog.disk.posix import PosixDisk
from tidelog.engine.config import Durability
from tidelog.errors import BadInput, Error, NotFound

_BARE_S_MAX: Final = 2.0
_BARE_ROUNDS_MIN: Final = 20
_BAR_CHARS: Final = 40
_SECONDS_MAX: Final = 3600.0


def bench(args: Namespace, screen: Screen) -> int:
    """Measure appends and reads, and print them beside a bare write and fsync."""
    if not 0 < args.seconds <= _SECONDS_MAX:
        raise BadInput(f"--seconds is {args.seconds:g}, it must be above 0 and at most {_SECONDS_MAX:g}")
    if args.plot is not None:
        check_path(args.plot, "a file of this machine")
        check_svg_path(args.plot)
    name = f"tidelog-bench-{SystemClock().now_us():x}"
    batch = [_payload(args.record_bytes)] * args.batch
    bare = None if args.server else measure_bare(args, name, b"".join(batch))
    with _open_scratch(args, name) as database, stop_event() as stopping:
        topic = database.topic(name, durability=args.durability)
        try:
            with screen.progress_bar("appending"):
                writes = measure_appends(topic, batch, args.writers, args.seconds, stopping.is_set)
            with screen.progress_bar("reading"):
                read_per_s = measure_reads(topic)
        finally:
            if args.server:
                database.drop(name)
    fields = _fields(args, writes, read_per_s, bare)
    lines, rows = _describe(args, fields)
    if args.plot is not None:
        save_svg(args.plot, _render_histogram(fields))
    screen.print_result(fields, *lines, titles=(">latency up to", ">appends", ""), rows=rows)
    return 0


def _payload(size: int) -> bytes:
    return (bytes(range(256)) * (size // 256 + 1))[:size]


@contextmanager
def _open_scratch(args: Namespace, name: str) -> Iterator[protocols.Database]:
    """Yield the server, or a new database below the directory, which is removed afterwards."""
    if args.server:
        with connect(args.server, key=args.api_key) as remote:
            yield remote
        return
    path, disk = join(args.dir, name), PosixDisk()
    try:
        with tidelog.open(path) as database:
            yield database
    finally:
        remove_tree(disk, path)


def measure_bare(args: Namespace, name: str, data: bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Write and sync the bytes of one batch, again and again; return the microseconds of each."""
    check_path(args.dir)
    disk, clock = PosixDisk(), SystemClock()
    stat = disk.stat(args.dir)
    if stat is None or not stat.is_dir:
        raise NotFound(f"there is no directory {args.dir}; nothing was measured, name one on the disk that is meant")
    path = join(args.dir, f"{name}.bare")
    taken: list[int] = []
    file = disk.open(path, "create")
    try:
        begin = clock.monotonic_us()
        limit_us = int(min(args.seconds, _BARE_S_MAX) * 1e6)
        while len(taken) < _BARE_ROUNDS_MIN or clock.monotonic_us() - begin < limit_us:
            start = clock.monotonic_us()
            file.write(len(taken) * len(data), data)
            file.sync()
            taken.append(clock.monotonic_us() - start)
    finally:
        file.close()
        disk.remove(path)
    return np.array(taken, np.int64)


class Appends:
    """The appends of a run: the latency of each, and how long all of them took."""

    def __init__(self, latencies_us: np.ndarray[Any, np.dtype[np.int64]], elapsed_us: int) -> None:
        self.latencies_us, self.elapsed_us = latencies_us, elapsed_us


def measure_appends(
    topic: protocols.Topic, batch: Sequence[bytes], writers: int, seconds: float, is_stopped: Callable[[], bool]
) -> Appends:
    """Append batches from threads for so many seconds. Raises the first error of a writer."""
    clock, latencies, errors = SystemClock(), [list[int]() for _ in range(writers)], list[Error]()
    begin = clock.monotonic_us()
    end = begin + int(seconds * 1e6)

    def write(taken: list[int]) -> None:
        try:
            while (start := clock.monotonic_us()) < end and not errors and not is_stopped():
                topic.append(batch)
                taken.append(clock.monotonic_us() - start)
        except Error as error:
            errors.append(error)

    threads = [Thread(target=write, args=(taken,), name=f"bench-{at}") for at, taken in enumerate(latencies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return Appends(np.array([each for taken in latencies for each in taken], np.int64), clock.monotonic_us() - begin)


def measure_reads(topic: protocols.Topic) -> float:
    """Read all records of a topic as Arrow batches; return records a second."""
    clock = SystemClock()
    begin = clock.monotonic_us()
    count: int = sum(batch.num_rows for batch in topic.scan().iter_arrow_batches())
    elapsed_s: float = max(clock.monotonic_us() - begin, 1) / 1e6
    return count / elapsed_s


def _quantiles(values: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, int]:
    if not len(values):
        return {}
    p50, p99 = np.percentile(values, (50, 99))
    return {"p50_us": int(p50), "p99_us": int(p99), "max_us": int(values.max())}


def _fields(
    args: Namespace, writes: Appends, read_per_s: float, bare: np.ndarray[Any, np.dtype[np.int64]] | None
) -> dict[str, Any]:
    elapsed_s = writes.elapsed_us / 1e6
    appends_per_s = len(writes.latencies_us) / elapsed_s
    fields: dict[str, Any] = {
        "database": target_place(args),
        "class": args.durability,
        "record_bytes": args.record_bytes,
        "batch": args.batch,
        "writers": args.writers,
        "seconds": round(elapsed_s, 3),
        "appends": len(writes.latencies_us),
        "appends_per_s": round(appends_per_s, 1),
        "records_per_s": round(appends_per_s * args.batch, 1),
        "bytes_per_s": int(appends_per_s * args.batch * args.record_bytes),
        **_quantiles(writes.latencies_us),
        "read_records_per_s": round(read_per_s, 1),
        "bare": None,
        "ratio": None,
        "histogram": _histogram(writes.latencies_us),
    }
    if bare is not None:
        bare_per_s = len(bare) / max(int(bare.sum()), 1) * 1e6
        fields["bare"] = {"fsyncs_per_s": round(bare_per_s, 1), **_quantiles(bare)}
        fields["ratio"] = round(appends_per_s / bare_per_s, 3)
    return fields


def _histogram(latencies_us: np.ndarray[Any, np.dtype[np.int64]]) -> list[list[int]]:
    """Return pairs of a latency, a power of two of microseconds, and the number of appends up to it."""
    if not len(latencies_us):
        return []
    powers = np.ceil(np.log2(np.maximum(latencies_us, 1))).astype(np.int64)
    counts = np.bincount(powers)
    return [[1 << power, int(counts[power])] for power in range(int(powers.min()), len(counts))]


def _format_us(us: int) -> str:
    if us < 1000:
        return f"{us} µs"
    return f"{us / 1000:.3g} ms" if us < 1_000_000 else f"{us / 1_000_000:.3g} s"


def _describe(args: Namespace, fields: dict[str, Any]) -> tuple[list[str], list[tuple[str, str, str]]]:
    lines = [
        f"{fields['database']}: {plural(args.writers, 'writer')}, batches of {plural(args.batch, 'record')} of "
        f"{args.record_bytes:,} bytes, class {args.durability}, {fields['seconds']:g} s",
        f"written   {fields['records_per_s']:,.0f} records/s, {format_bytes(fields['bytes_per_s'])}/s, "
        f"{fields['appends_per_s']:,.0f} appends/s",
    ]
    if fields["appends"]:
        lines.append("acked     " + ", ".join(f"{name} {_format_us(fields[f'{name}_us'])}" for name in _QUANTILES))
    lines.append(f"read      {fields['read_records_per_s']:,.0f} records/s")
    if fields["bare"] is not None:
        bare = fields["bare"]
        lines.append(
            f"bare      {bare['fsyncs_per_s']:,.0f} writes with fsync/s of the same bytes, p50 "
            f"{_format_us(bare['p50_us'])}, p99 {_format_us(bare['p99_us'])}; "
            f"appends/s are {fields['ratio']:g} times that"
        )
    most = max((count for _, count in fields["histogram"]), default=0)
    return lines, [
        (_format_us(us), f"{count:,}", render_bar(count, most, _BAR_CHARS)) for us, count in fields["histogram"]
    ]


def _render_histogram(fields: dict[str, Any]) -> str:
    labels = [f"up to {_format_us(us)}" for us, _ in fields["histogram"]]
    counts = Series("latency of appends", "appends", [count for _, count in fields["histogram"]])
    title = f"{fields['database']}: {fields['records_per_s']:,.0f} records/s, class {fields['class']}"
    return render_svg(labels, [counts], title)


_QUANTILES: Final = ("p50", "p99", "max")


def add(commands: Commands) -> None:
    """Add `bench` to the command line."""
    parser = add_command(
        commands,
        "bench",
        bench,
        DATABASE,
        summary="measure this disk, or a server, under your load",
        description="Append records for some seconds and read them back, and print rates, latencies and their\n"
        "distribution; for a directory beside a bare write and fsync of the same bytes on the same disk. It writes\n"
        "to a database of its own below the directory, or to a topic of its own on a server, and removes it.",
        examples="tidelog bench /var/lib --writers 16\n"
        "tidelog bench . --class disk --record-bytes 1k --batch 100 --json\n"
        "tidelog bench http://127.0.0.1:4000 --seconds 10",
    )
    parser.add_argument(
        "--class",
        dest="durability",
        choices=get_args(Durability),
        default="fsync",
        help="what an ack means (fsync); see tidelog topic --help",
    )
    parser.add_argument("--record-bytes", type=parse_positive_size, default=100, metavar="SIZE", help="a record (100)")
    parser.add_argument("--batch", type=parse_positive, default=1, metavar="N", help="records in one append (1)")
    parser.add_argument("--writers", type=parse_positive, default=1, metavar="N", help="threads that append (1)")
    parser.add_argument("--seconds", type=parse_seconds, default=5.0, metavar="S", help="how long to append (5)")
    parser.add_argument("--plot", metavar="FILE", help="an SVG of the latencies to write")
