"""What a strict type checker says about programs of users: nothing where they are right, and the line of each typo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit import processes

PROGRAM = """from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import tidelog
from tidelog import protocols


@dataclass
class Order:
    sku: str
    qty: int


def embedded(path: Path) -> int:
    with tidelog.open(path, sync_interval_ms=timedelta(milliseconds=20)) as log:
        orders = log.topic("orders", durability="fsync", ttl_ms=timedelta(days=7))
        seqs = orders.append([{"sku": "A"}, b"raw"], tag="order-7").seqs
        page = orders.read(0, limit=10, timeout=timedelta(seconds=1))
        for record in page.records:
            print(record.seq, record.tag, record.ts_ms)
        for item in orders.follow(timeout=0, on_gap="emit"):
            if isinstance(item, tidelog.Gap):
                print(item.gap_from, item.gap_to)
            else:
                print(item.seq)
        typed = orders.typed(Order)
        typed.append(Order("A", 1))
        total = sum(record.data.qty for record in typed)
        rows = orders.to_dicts(since=datetime.now(timezone.utc), columns=["seq"])
        print(rows[0]["seq"] if rows else None, 1 in orders, "orders" in log)
        print(orders.to_polars().height, orders.to_pandas().shape)
        print(orders.group("x").state().lag.records, orders.groups().to_dicts())
        jobs = log.queue("jobs", lease_ms=timedelta(minutes=1))
        jobs.put("hello", delay_ms=timedelta(seconds=5))
        for job in jobs.claim("worker"):
            jobs.ack("worker", job)

        @jobs.worker(concurrency=2)
        def work(job: tidelog.Job) -> None:
            print(job.seq)

        with work:
            pass
        for job in jobs.jobs("worker", timeout=0):
            jobs.ack("worker", job)
        with orders.producer(on_error=lambda failed: print(failed.error, len(failed.records))) as producer:
            print(producer.send(b"x").result(timeout=5), producer.stats().written)
        for part in orders.follow(batch=100, heartbeat=5, timeout=0):
            print(len(part.records))
        group = orders.group("readers")
        group.commit(seqs[0])
        for batch in group.consume("first", timeout=0):
            print(len(batch), batch.first_seq)
        for gap in log.gaps("orders"):
            print(gap.cause, gap.first)
        channel = log.channel("!a@example.org", user="ann@example.org").join(persist=True)
        print(channel.publish(b"x").seq)
        return total


def either(database: protocols.Database) -> int:
    return database.topic("orders", cap_records=5).count


async def tasks() -> None:
    async with tidelog.aio.open("data") as log:
        orders = await log.topic("orders", cap_records=1000)
        done = await orders.append({"sku": "A"})
        print(done.first_seq)
        async for record in orders.follow(timeout=0, on_gap="skip"):
            print(record)
        typed = orders.typed(Order)
        for record in (await typed.read()).records:
            print(record.data.sku)
        jobs = await log.queue("jobs")
        async for job in jobs.jobs("worker", timeout=0):
            await jobs.ack("worker", job)

        @jobs.worker(concurrency=8, retries=tidelog.backoff(attempts=5), timeout=timedelta(minutes=1))
        async def send(job: tidelog.Job) -> None:
            await asyncio.sleep(job.seq)

        async with send:
            print(send.stats.done, await send.wait(1, timeout=timedelta(seconds=1)))
        async with orders.producer(linger_ms=1) as producer:
            delivery = await producer.send({"sku": "A"}, tag="order-7")
            print(await delivery.result(), (await producer.stats()).written)
        async for page in orders.follow(batch=100, heartbeat=5, timeout=0, on_gap="emit"):
            print(len(page.records), page.next_from_seq)


async def awaited(database: protocols.AsyncDatabase) -> int:
    jobs = await database.queue("jobs")
    async for job in jobs.jobs("worker", timeout=0):
        await jobs.ack("worker", job)
    return (await (await database.topic("orders")).state()).count


async def both() -> None:
    async with tidelog.aio.open("data") as here, tidelog.aio.connect("http://127.0.0.1:4000", key="k") as there:
        print(await awaited(here), await awaited(there))


with tidelog.connect("http://127.0.0.1:4000", key="k", timeout_s=timedelta(seconds=5)) as remote:
    print(either(remote), remote.topic("orders").typed(Order).read().records[0].data.qty)
print(embedded(Path("data")))
asyncio.run(tasks())
asyncio.run(both())
"""
TYPOS = """import tidelog

with tidelog.open("data") as log:
    log.topic("orders", cap_record=5)
    log.queue("jobs", lease_ms="soon")
    log.topic("orders").read(timeout="soon")
    tidelog.open("data", wal_shard=3)
    log.channel("!a@b.org", user="a@b.org").join(persistent=True)
    log.topic("orders", durability="sometimes")
    log.queue("jobs").worker(concurency=3)
    log.queue("jobs").jobs()
"""


def errors_of(directory: Path) -> dict[str, list[int]]:
    """Check the programs of a directory; return the lines with errors of each, counted from 1."""
    (directory / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict"}))
    done = processes.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "."],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 2, done.stderr
    found: dict[str, list[int]] = {}
    for each in report["generalDiagnostics"]:
        found.setdefault(Path(each["file"]).name, []).append(each["range"]["start"]["line"] + 1)
    return found


@pytest.mark.slow
def test_a_strict_checker_accepts_programs_and_finds_typos(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "typos.py").write_text(TYPOS)
    assert errors_of(tmp_path) == {"typos.py": [4, 5, 6, 7, 8, 9, 10, 11]}
