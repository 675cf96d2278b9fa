"""docs/api.md lists the public names of every object of `tidelog.open`, and no other name is public."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tidelog
from tidelog import backup
from tidelog.commitlog import AsyncSegmentedLog, SegmentedLog
from tidelog.engine import FailedRecords, UnwrittenRecord
from tidelog.errors import BadInput
from tidelog.testing import ManualClock, SimDisk

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def documented_names(section: str) -> set[str]:
    """Return the names in the first column of a section's table."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    first_cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}


def public_object(section: str) -> object:
    database = tidelog.open("data", disk=SimDisk(), clock=ManualClock(), threads=False, wal_file_bytes=1 << 14)
    topic = database.topic("orders")
    return {
        "Database": database,
        "Topic": topic,
        "Queue": database.queue("jobs"),
        "Channel": database.channel("!support@example.org"),
        "Group": topic.group("readers"),
    }[section]


def public_names(value: object) -> set[str]:
    """Return the names that a value shows. A named tuple shows `count` and `index` of every tuple too."""
    hidden = {"count", "index"} - set(getattr(value, "_fields", ())) if isinstance(value, tuple) else set()
    hidden |= set(dir(list)) if isinstance(value, list) else set()
    return {name for name in dir(value) if not name.startswith("_")} - hidden


@pytest.mark.parametrize("section", ["Database", "Topic", "Queue", "Channel", "Group"])
def test_dir_shows_exactly_the_documented_names(section: str) -> None:
    assert documented_names(section) == public_names(public_object(section))


def backup_values(database: tidelog.Database, disk: SimDisk) -> tuple[object, ...]:
    made = database.backup("backups")
    listed, verified = backup.list_backups("backups", disk=disk), backup.verify("backups", disk=disk)
    return (
        made,
        listed,
        verified,
        backup.restore("backups", "new", disk=disk),
        backup.prune("backups", keep=1, disk=disk),
    )


def _typed_values(database: tidelog.Database) -> list[object]:
    topic = database.topic("numbers").typed(int)
    topic.append(1)
    return [topic, topic.read(), topic.read().records[0]]


def _compaction_values() -> list[object]:
    database = tidelog.open("keyed", disk=SimDisk(), clock=ManualClock(), threads=False, wal_file_bytes=1 << 14)
    topic = database.topic("users", compaction="/id")
    topic.append([{"id": 1}, {"id": 2}])
    topic.group("slow").begin()
    table, preview = topic.latest(), topic.simulate_retention(cap_records=1)
    page = table.page()
    return [topic.compact(), table, page, page.records[0], preview, preview.cap, preview.groups[0]]


def producer_values(topic: tidelog.Topic) -> list[object]:
    with topic.producer() as producer:
        delivery = producer.send(1)
    error = BadInput("no")
    return [producer, delivery, producer.stats(), FailedRecords(error, []), UnwrittenRecord(1)]


def test_returned_values_show_exactly_the_documented_names() -> None:
    disk = SimDisk()
    database = tidelog.open("data", disk=disk, clock=ManualClock(), threads=False, wal_file_bytes=1 << 14)
    topic, queue = database.topic("orders", cap_records=2), database.queue("jobs")
    appended, page = topic.append([1, 2, 3]), topic.read()
    queue.put("x")
    database.topic("large").append_stream([bytes(300_000)])
    group, jobs = topic.group("readers"), queue.claim("worker")
    group.begin()
    values = (
        *(page, page.records[0], page.gap, appended, topic.delete(before_seq=3), topic.state(), *_compaction_values()),
        topic.segments(),
        *(topic.gaps()[0], jobs[0], queue.counts(), queue.ack("worker", jobs), queue.history()),
        *(database.router("r", "orders", "copies"), group.state(), group.lag(), group.preview(0)),
        *(group.claim("worker", 1), group.consumers()[0]),
        *(topic.rewrite(), topic.erase(seqs=[3])),
        *(topic.scan(), topic.gaps(), topic.groups(), *_typed_values(database)),
        *(database.report, database.health(), database.topic("large").read().records[0].data),
        *backup_values(database, disk),
        *producer_values(database.topic("sent")),
    )
    rows = PAGE.read_text().split("## Values that calls return\n")[1].split("\n## ")[0].splitlines()
    documented = [re.findall(r"`(\w+)`", row) for row in rows if row.startswith("| `")]
    assert {name: set(names) for name, *names in documented} == {type(v).__name__: public_names(v) for v in values}


def test_the_logs_show_exactly_the_documented_names() -> None:
    text = PAGE.read_text().split("\n## The segmented log\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    names = {mark: set[str]() for mark in ("", "(plain)", "(async)")}
    for cell, note in rows:
        names[next(mark for mark in ("(plain)", "(async)", "") if note.strip().startswith(mark))] |= set(
            re.findall(r"`(\w+)`", cell)
        )
    with SegmentedLog.open("log", disk=SimDisk()) as log:
        assert public_names(log) == names[""] | names["(plain)"]
    shown = {name for name in dir(AsyncSegmentedLog) if not name.startswith("_")}
    assert shown == names[""] | names["(async)"]


def test_import_loads_no_library_of_an_extra() -> None:
    """pandas takes longer to import than all of this package, and pyarrow imports it for some of its calls."""
    libraries = ("pandas", "polars", "duckdb", "pyspark", "httptools", "pyarrow.compute", "pyarrow.fs")
    program = f"import sys, tidelog; print([name for name in {libraries} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_package_exports_the_documented_objects() -> None:
    sections = re.findall(r"^## (\w+)$", PAGE.read_text(), flags=re.M)
    assert sections == ["Database", "Topic", "Queue", "Channel", "Group"]
    assert set(sections) <= set(tidelog.__all__)
