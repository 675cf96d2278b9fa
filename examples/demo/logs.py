"""`make demo`: a guided tour of the log library, of topics and of the whole in a shop, on real files.

Every claim the tour makes is checked; one that does not hold ends it with a message and a
non-zero exit code. The files stay, so that the commands at its end have something to show.
"""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence

import pyarrow.compute as pc

from examples.demo import shop, topics
from examples.demo.harness import (
    check,
    data_files,
    disk_bytes,
    flip_a_bit,
    make_empty_dir,
    print_table,
    require,
    section,
    write_half_a_record,
)
from tidelog.cli.render import SEGMENT_TITLES, damage_line, format_bytes, format_seqs, format_time, plural, segment_row
from tidelog.clock import SystemClock
from tidelog.commitlog import SegmentedLog, inspect, restore, verify
from tidelog.disk.interface import join
from tidelog.types import Record

RECORDS, BATCH = 100_000, 1000
ACKS_BEFORE_KILL = 150


def main(argv: Sequence[str] | None = None) -> int:
    """Take the tour in `./demo-data`, or in the directory given."""
    arguments = ArgumentParser(
        prog="python -m examples.demo",
        description="A guided tour of the log library, of topics and of a whole shop, on real files.",
    )
    arguments.add_argument("dir", nargs="?", default="demo-data", help="made anew at every start (demo-data)")
    arguments.add_argument("--writer", action="store_true", help="be the process that is killed (used by the tour)")
    arguments.add_argument("--topics-writer", action="store_true", help="the same, of topics")
    arguments.add_argument("--producer", nargs=3, metavar=("URL", "FIRST", "COUNT"), help="be a producer of the shop")
    arguments.add_argument("--events", type=int, default=1_000_000, metavar="N", help="orders in the shop (1000000)")
    args = arguments.parse_args(argv)
    if args.producer:
        url, first, count = args.producer
        shop.produce(url, int(first), int(count))
        return 0
    if args.writer:
        append_forever(args.dir)
    if args.topics_writer:
        topics.append_forever(args.dir)
    clock = SystemClock()
    began_ms = clock.monotonic_ms()
    make_empty_dir(args.dir)
    events, crash, carts, bank, copy, topics_dir, shop_dir = (
        join(args.dir, name) for name in ("events", "crash", "carts", "bank", "bank-before", "topics", "shop")
    )
    append_and_read(events)
    crash_and_recover(crash)
    compact(carts)
    restore_to_a_moment(bank, copy)
    find_a_flipped_bit(events)
    show_segments(events)
    topics.tour(topics_dir)
    shop.tour(shop_dir, args.events)
    print_next_commands(events, args.dir)
    print(f"\nAll of it held, in {(clock.monotonic_ms() - began_ms) / 1000:.1f} s.")
    return 0


def event(seq: int) -> bytes:
    return b'{"event":%d,"user":"u%03d","cents":%d}' % (seq, seq * 7919 % 500, seq * 31 % 10_000)


def append_and_read(path: str) -> None:
    section(
        "1. Append and read",
        f"{RECORDS:,} records in batches of {BATCH}; every batch is on disk before the next begins (sync=batch).",
    )
    clock = SystemClock()
    with SegmentedLog.open(path, segment_bytes_max=1 << 20) as log:
        start_ms = clock.monotonic_ms()
        for first in range(1, RECORDS + 1, BATCH):
            log.append_many([event(seq) for seq in range(first, first + BATCH)])
        wrote_ms = max(clock.monotonic_ms() - start_ms, 1)
        start_ms = clock.monotonic_ms()
        arrow = log.to_arrow()
        read_ms = max(clock.monotonic_ms() - start_ms, 1)
        size = pc.sum(pc.binary_length(arrow["data"])).as_py()
        rows = [
            ("append", f"{RECORDS:,}", format_bytes(size), f"{wrote_ms} ms", f"{RECORDS * 1000 // wrote_ms:,}"),
            ("read as Arrow", f"{len(arrow):,}", format_bytes(size), f"{read_ms} ms", f"{RECORDS * 1000 // read_ms:,}"),
        ]
        print_table(("", ">records", ">data", ">time", ">records/s"), rows)
        print(f"  columns: {', '.join(arrow.schema.names)}; {plural(len(log.segments), 'segment')}")
        print(f"  record 77777: {log.read(77_777).data.decode()}")
        check(arrow["seq"].to_pylist() == list(range(1, RECORDS + 1)), "every seq came back, in order")
        check(
            arrow["data"].to_pylist() == [event(seq) for seq in range(1, RECORDS + 1)],
            "every record came back as it was written",
        )


def append_forever(path: str) -> None:
    """The process that is killed: it says a seq only after the append that wrote it has returned."""
    with SegmentedLog.open(path, sync="batch") as log:
        while True:
            seqs = log.append_many([event(seq) for seq in range(log.highest, log.highest + 20)])
            print(seqs[-1], flush=True)


def crash_and_recover(path: str) -> None:
    section(
        "2. Crash and recover",
        "A second process appends and says each seq it was promised. It is killed (kill -9) in the middle of that.",
    )
    child = subprocess.Popen(
        [sys.executable, "-m", "examples.demo.logs", "--writer", path], stdout=subprocess.PIPE, text=True
    )
    with child:
        answers = require(child.stdout, "answer from the writer")
        try:
            said = [answers.readline() for _ in range(ACKS_BEFORE_KILL)]
        finally:
            child.kill()
        # What it had said before it died is still in the pipe; a last line may be cut off.
        said += answers.readlines()
    acked = max((int(line) for line in said if line.endswith("\n")), default=0)
    check(child.returncode == -9 and acked > 0, f"the writer died by signal 9 after it was promised seq {acked:,}")

    write_half_a_record(data_files(path)[-1])
    print("  then half a record was smeared onto the end of the newest file, as a power cut may do")
    with SegmentedLog.open(path) as log:
        print_table(("what the next open did",), [(line,) for line in log.report.lines()])
        check(log.report.cut_bytes > 0, "the half record was cut")
        check(not log.report.damage, "nothing else was wrong")
        records = [(record.seq, record.data) for record in log]
        check(log.highest > acked, f"the log holds more than was promised, or just that: {format_seqs(1, log.highest)}")
        check(
            records == [(seq, event(seq)) for seq in range(1, log.highest)],
            "every promised record is there and holds what was written",
        )
        seq = log.append(event(log.highest))
        print(f"  the log goes on at seq {seq:,}")
    check(is_undamaged(path), "verify finds nothing to repair")


def is_undamaged(path: str) -> bool:
    verdict = verify(path)
    return verdict.ok and not verdict.notes


def compact(path: str) -> None:
    section(
        "3. Compact",
        "200 shopping carts, changed 20,000 times. Compaction keeps the newest record of every cart.",
    )
    with SegmentedLog.open(path, segment_bytes_max=256 << 10) as log:
        for first in range(0, 20_000, BATCH):
            tags = [b"cart-%03d" % (change * 7919 % 200) for change in range(first, first + BATCH)]
            log.append_many([event(first + number) for number in range(BATCH)], tag=tags)
        log.seal()
        newest = newest_by_tag(log)
        before = (sum(1 for _ in log), disk_bytes(path))
        done = log.compact(lambda record: record.tag or None)
        after = (sum(1 for _ in log), disk_bytes(path))
        print_table(
            ("", ">records", ">on disk"),
            [
                ("before", f"{before[0]:,}", format_bytes(before[1])),
                ("after", f"{after[0]:,}", format_bytes(after[1])),
                ("saved", f"{done.dropped:,}", f"{100 - 100 * after[1] / before[1]:.1f} %"),
            ],
        )
        check(after[0] == len(newest) == 200, "one record is left of every cart")
        check(newest_by_tag(log) == newest, "it is the newest one, with its seq and its time")
        check(after[1] < before[1], "the files are smaller")


def newest_by_tag(log: SegmentedLog) -> dict[bytes, Record]:
    return {record.tag: record for record in log}


def restore_to_a_moment(path: str, copy: str) -> None:
    section(
        "4. Restore to a moment",
        "A bad deploy doubles every amount. The log is copied as it was just before, and is itself not touched.",
    )
    clock = SystemClock()
    with SegmentedLog.open(path, segment_bytes_max=64 << 10) as log:
        for first in range(1, 5001, 500):
            log.append_many([b"paid %d" % number for number in range(first, first + 500)])
        good = log.read(log.highest - 1)
        while clock.now_us() // 1000 <= good.ts_us // 1000:
            pass  # times are kept in milliseconds; the bad records must not share one with the last good one
        log.append_many([b"paid %d twice" % number for number in range(500)])
        done = restore(log, copy, to_time_us=good.ts_us)
        bad = log.read(log.highest - 1)
    with SegmentedLog.open(copy, read_only=True) as restored:
        last = restored.read(restored.highest - 1)
    print_table(
        ("log", ">last seq", "its time", "its data"),
        [
            (path, str(bad.seq), str(format_time(bad.ts_us)), repr(bad.data)),
            (copy, str(last.seq), str(format_time(last.ts_us)), repr(last.data)),
        ],
    )
    check(last == good and done.highest == good.seq + 1, "the copy ends with the last good record")
    check(is_undamaged(copy), "the copy is whole")
    check(bad.seq == good.seq + 500, "the log itself still holds the bad ones")


def find_a_flipped_bit(path: str) -> None:
    section("5. A flipped bit", "One bit of an old, sealed file changes, as failing disks do.")
    name = data_files(path)[1]
    at = flip_a_bit(name)
    print(f"  flipped one bit of byte {at:,} of {name}")
    verdict = verify(path)
    for damage in verdict.damage:
        print(f"  verify: {damage_line(damage)}")
    check(len(verdict.damage) == 1, "verify found it, and nothing else")
    damaged, fault = verdict.damage[0]
    check(
        name.endswith(damaged) and 0 <= at - fault.pos < 256 << 10, "in the right file, in the frame that holds the bit"
    )
    with SegmentedLog.open(path, read_only=True) as log:
        served = [record.seq for record in log.records(skip_damage=True)]
    lost = fault.resume - fault.seq
    expected = [seq for seq in range(1, RECORDS + 1) if not fault.seq <= seq < fault.resume]
    check(served == expected, f"all other records are served: {len(served):,}; the batch of {lost:,} is refused")


def show_segments(path: str) -> None:
    section("6. Look around", f"What `tidelog log inspect {path}` shows:")
    with SegmentedLog.open(path, read_only=True) as log:
        infos = inspect(log)
    print_table(SEGMENT_TITLES, [segment_row(info) for info in infos])
    check(infos[-1].stop == RECORDS + 1, "the table ends where the log does")


def print_next_commands(path: str, root: str) -> None:
    section("Try next", "(with .venv/bin in front where Tidelog is not installed)")
    for command in (
        f"tidelog log verify {path}",
        f"tidelog log cat {root}/bank --from 5000 --limit 3 --json",
        f"tidelog log convert {root}/bank {root}/bank-laminar --to laminar --renumber",
        f"seq 10 | tidelog log append {root}/mine --sync each",
        f"tidelog topic ls {root}/topics",
        f"tidelog topic read {root}/topics readings --limit 3 --json",
        f"tidelog topic delete {root}/topics carts --match 'cart-*' --dry-run",
        f"tidelog check {root}/topics",
        f"tidelog pipeline reconcile {root}/shop/data orders {root}/shop/table",
        f"tidelog queue history {root}/shop/data mails --limit 5",
        "tidelog topic --help",
        "tidelog log --help",
    ):
        print(f"  $ {command}")


if __name__ == "__main__":
    sys.exit(main())
