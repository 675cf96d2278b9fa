"""The part of the guided tour about topics: classes and a kill, a gap, a silent delete, columns."""

from __future__ import annotations

import subprocess
import sys

import pyarrow.compute as pc

import tidelog
from examples.demo.harness import check, print_table, require, section
from tidelog.cli.topic import DURABILITY_MEANING, gap_line
from tidelog.clock import SystemClock
from tidelog.engine import Gap
from tidelog.engine.check import check_directory as check_directory

DURABILITY_CLASSES = ("fsync", "disk", "memory", "ephemeral")
ROUNDS, BATCH = 25, 10
RECORDS = 100_000


def tour(path: str) -> None:
    """The whole part, on topics in `path`."""
    show_acks_after_kill(path)
    with tidelog.open(path) as log:
        show_gap(log)
        show_delete(log)
        show_arrow(log)
    found = list(check_directory(path))
    check(not found, "tidelog check finds every byte as it should be")


def order(number: int) -> dict[str, int | str]:
    return {"order": number, "user": f"u{number * 7919 % 500:03d}", "cents": number * 31 % 10_000}


def append_forever(path: str) -> None:
    """The process that is killed: it says a class and a seq only after that topic has acked it."""
    log = tidelog.open(path)
    topics = {name: log.topic(f"orders-{name}", durability=name) for name in DURABILITY_CLASSES}  # type: ignore[arg-type]
    while True:
        for name, topic in topics.items():
            first = topic.head_seq + 1
            done = topic.append([order(number) for number in range(first, first + BATCH)])
            print(name, done.last_seq, flush=True)


def show_acks_after_kill(path: str) -> None:
    section(
        "7. Topics: what an ack means",
        "A second process writes to four topics, one of each class, and says every ack. It is killed (kill -9).",
    )
    child = subprocess.Popen(
        [sys.executable, "-m", "examples.demo.logs", "--topics-writer", path], stdout=subprocess.PIPE, text=True
    )
    with child:
        answers = require(child.stdout, "answer from the writer")
        try:
            said = [answers.readline() for _ in range(ROUNDS * len(DURABILITY_CLASSES))]
        finally:
            child.kill()
        # What it had said before it died is still in the pipe; a last line may be cut off.
        said += answers.readlines()
    acked: dict[str, int] = dict.fromkeys(DURABILITY_CLASSES, 0)
    for name, seq in (line.split() for line in said if line.endswith("\n")):
        acked[name] = int(seq)
    check(child.returncode == -9 and min(acked.values()) > 0, "the writer died by signal 9 in the middle of it")
    with tidelog.open(path) as log:
        topics = {name: log.topic(f"orders-{name}", create=False) for name in DURABILITY_CLASSES}
        rows = [(name, str(acked[name]), str(topic.count), DURABILITY_MEANING[name]) for name, topic in topics.items()]
        print_table(("class", ">acked up to", ">there now", "an acked record"), rows)
        print(f"  recovery replayed {log.report.frames:,} frames of the WAL")
        for line in log.report.lines():
            print(f"  recovery: {line}")
        for name in ("fsync", "disk"):
            there_now = [record.data for record in topics[name] if isinstance(record, tidelog.Record)]
            check(
                there_now[: acked[name]] == [order(number) for number in range(1, acked[name] + 1)],
                f"{name}: every acked record is there and holds what was written",
            )
            done = topics[name].append(order(0))
            check(done.first_seq > acked[name], f"{name}: the next seq, {done.first_seq}, was never acked to anybody")
        check(topics["ephemeral"].count == 0, "ephemeral: nothing of it was ever in a file")
        check(not log.report.damage, "and nothing is damaged")


def show_gap(log: tidelog.Database) -> None:
    section(
        "8. A reader gets a gap",
        "A topic keeps 100 records and gets 250. A reader that was away gets one gap that names the lost records.",
    )
    readings = log.topic("readings", cap_records=100)
    for first in range(0, 250, 50):
        readings.append([b"reading %d" % number for number in range(first, first + 50)])
    page = readings.read(0, 3)
    gap = require(page.gap, "gap")
    print(f"  {gap_line(gap, 'readings')}")
    print(f"  then seqs {page.records[0].seq} to {page.records[-1].seq}; {page.counts.evicted} evicted")
    check(gap[:3] == (1, 150, "cap"), "the gap names exactly what was evicted")
    check(readings.read(page.next_from_seq).gap is None, "the next page has none")
    gaps = sum(isinstance(item, Gap) for item in readings.follow(timeout=0.0, on_gap="emit"))
    check(gaps == 1, "a reader that follows from the start gets one gap as well")


def show_delete(log: tidelog.Database) -> None:
    section("9. A delete is silent", "Records are deleted by their tag. Readers skip them, without a gap.")
    carts = log.topic("carts", durability="fsync")
    for number in range(30):
        carts.append({"cart": number % 3, "step": number}, tag=f"cart-{number % 3}")
    done = carts.delete(match="cart-1")
    page = carts.read()
    print(f"  deleted {done.deleted} of 30 by their tag, {done.count} are left")
    check(page.gap is None, "no gap")
    check([record.data["cart"] for record in page.records[:4]] == [0, 2, 0, 2], "cart-1 is not there any more")
    check(sum(page.counts) == 30 and page.counts.deleted == 10, "every seq of the page is accounted for")


def show_arrow(log: tidelog.Database) -> None:
    section("10. Records as columns", f"{RECORDS:,} JSON records written in batches, read as one Arrow table.")
    clock, events = SystemClock(), log.topic("events", durability="disk")
    start_ms = clock.monotonic_ms()
    for first in range(1, RECORDS + 1, 1000):
        events.append([order(number) for number in range(first, first + 1000)], tag="tour")
    wrote_ms = max(clock.monotonic_ms() - start_ms, 1)
    log.checkpoint()
    start_ms = clock.monotonic_ms()
    arrow = events.to_arrow()
    read_ms = max(clock.monotonic_ms() - start_ms, 1)
    rows = [
        ("append", f"{RECORDS:,}", f"{wrote_ms} ms", f"{RECORDS * 1000 // wrote_ms:,}"),
        ("read as Arrow", f"{len(arrow):,}", f"{read_ms} ms", f"{RECORDS * 1000 // read_ms:,}"),
    ]
    print_table(("", ">records", ">time", ">records/s"), rows)
    print(f"  columns: {', '.join(arrow.schema.names)}")
    check(arrow["seq"].to_pylist() == list(range(1, RECORDS + 1)), "every seq came back, in order")
    check(pc.all(arrow["json"]).as_py(), "as the JSON it is")
