"""Single records from one Python process over loopback, beside Kafka and Redis with the usual Python clients.

Sketch. `send` of 100 bytes is one Python call: half a microsecond, and as much again for what is done per batch in C.
A batch of 10 000 records is 1 MB of Arrow, which the server decodes and frames in one pass each; so a process sends a
million records in a second if it does nothing else, and the server has a processor of its own. confluent-kafka-python
is a C library behind one Python call per record; its broker copies batches as they are. redis-py makes the bytes of
every command in Python, and Redis runs a command for each record.

Each sends the same records to an empty topic and waits until all of them are acknowledged. All three promises are the
same: acknowledged records are in files, without a sync for each (class `disk`; one broker, acks=all; everysec). Kafka
and Tidelog write once and in order over retries (`enable.idempotence`). What a server has in the end is compared with
what was sent. Servers stand still while another one is measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Literal

from benchmarks.common import GB, PROGRESS, Result, alternate, result, scratch_dir
from benchmarks.server import peers
from benchmarks.server.processes import Server, pin_processors, run_alone

import tidelog
from tidelog import aio

SIZE = 100
PIPELINE = 1_000  # commands: larger ones are slower
TARGET_PER_S = 300_000
TARGET_RATIO = 1.5
_numbers = count(1)
Send = Callable[[str, Sequence[bytes]], int]  # into a new topic; the number of records there in the end


def run(quick: bool) -> list[Result]:
    records_count, rounds = (20_000, 1) if quick else (400_000, 4)
    records = [b"%0*d" % (SIZE, number) for number in range(records_count)]
    for line in peers.missing_clients():
        PROGRESS.console.print(line)
    with scratch_dir(8 * GB if not quick else GB) as place, candidates(place) as found:
        servers = list({id(server): server for server, _ in found.values()}.values())
        used: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
        with pin_processors(*servers):
            work = {
                name: partial(rate, servers, server, send, records, used[name])
                for name, (server, send) in found.items()
            }
            figures = alternate(f"producers, {SIZE} B", rounds, work)
    ours = figures["disk"]
    known = {name: values for name, values in figures.items() if name in (KAFKA, REDIS)}
    rows = [result(f"one process, {SIZE} B, class disk", ours, "/s", min_value=TARGET_PER_S, kind="gate")]
    rows += [
        result(f"one process, {SIZE} B, class disk ÷ {name}", ours, "/s", limit=values, limit_name=name,
               min_ratio=TARGET_RATIO, kind="gate")
        for name, values in known.items()
    ]  # fmt: skip
    others = [name for name in figures if name != "disk" and name not in known]
    rows += [result(f"one process, {SIZE} B, {name}", figures[name], "/s") for name in others]
    for name, rounds_used in used.items():
        for part, what in enumerate(("the sending process", "the server")):
            values = [times[part] for times in rounds_used[1:]]
            rows.append(result(f"processor time a record of {what}, {name}", values, "µs"))
    return rows


def rate(
    servers: Sequence[Server],
    server: Server,
    send: Send,
    records: Sequence[bytes],
    used_us: list[tuple[float, float]],
) -> float:
    """Records a second, from the first `send` to the acknowledgement of the last. Notes the processor time a record."""
    with run_alone(server, servers):
        began, own_s, server_s = time.perf_counter(), time.process_time(), server.busy_s()
        kept = send(f"records-{next(_numbers)}", records)
        took = time.perf_counter() - began
        own_s, server_s = time.process_time() - own_s, server.busy_s() - server_s
    used_us.append((own_s / len(records) * 1e6, server_s / len(records) * 1e6))
    if kept != len(records):
        raise RuntimeError(f"{len(records)} records were sent and acknowledged, and there are {kept}")
    return len(records) / took


KAFKA, REDIS = "confluent-kafka to Kafka", "redis-py pipelines to Redis"


@contextmanager
def candidates(place: Path) -> Iterator[dict[str, tuple[Server, Send]]]:
    with ExitStack() as stack:
        start = stack.enter_context
        ours = start(peers.tidelog(place / "tidelog"))
        database = start(tidelog.connect(f"http://127.0.0.1:{ours.port}"))
        found: dict[str, tuple[Server, Send]] = {
            "disk": (ours, partial(send_tidelog, database, "disk")),
            "class fsync": (ours, partial(send_tidelog, database, "fsync")),
            "class disk, with a tag each": (ours, partial(send_tidelog, database, "disk", tag="order-7")),
            "class disk, asyncio": (ours, partial(send_asyncio, database, ours.port)),
        }
        if peers.kafka_jars() is not None and find_spec("confluent_kafka"):
            broker = start(peers.kafka(place / "kafka"))
            found[KAFKA] = broker, partial(send_kafka, broker.port)
        if peers.has_redis() and find_spec("redis"):
            redis = start(peers.redis(place / "redis", "everysec"))
            found[REDIS] = redis, partial(send_redis, redis.port)
        yield found


# ── each with its own client ──────────────────────────────────────────────────────────────────────


def send_tidelog(
    database: tidelog.client.RemoteDatabase,
    durability: Literal["disk", "fsync"],
    name: str,
    records: Sequence[bytes],
    tag: str | None = None,
) -> int:
    topic = database.topic(name, durability=durability)
    with topic.producer() as producer:
        if tag is None:
            for record in records:
                producer.send(record)
        else:
            for record in records:
                producer.send(record, tag=tag)
    return topic.count


def send_asyncio(database: tidelog.client.RemoteDatabase, port: int, name: str, records: Sequence[bytes]) -> int:
    async def main() -> None:
        async with aio.connect(f"http://127.0.0.1:{port}") as connected:
            topic = await connected.topic(name, durability="disk")
            async with topic.producer() as producer:
                for record in records:
                    await producer.send(record)

    asyncio.run(main())
    return database.topic(name, create=False).count


def send_kafka(port: int, name: str, records: Sequence[bytes]) -> int:
    from confluent_kafka import Consumer, Producer, TopicPartition

    servers = {"bootstrap.servers": f"127.0.0.1:{port}"}
    settings = {"enable.idempotence": True, "acks": "all", "linger.ms": 5, "queue.buffering.max.messages": 1_000_000}
    producer = Producer({**servers, **settings})
    produce, poll = producer.produce, producer.poll
    for record in records:
        while True:
            try:
                produce(name, record)
                break
            except BufferError:
                poll(0.01)
    producer.flush()
    reader = Consumer({**servers, "group.id": "count"})
    try:
        first, end = reader.get_watermark_offsets(TopicPartition(name, 0), timeout=30)
        return int(end - first)
    finally:
        reader.close()


def send_redis(port: int, name: str, records: Sequence[bytes]) -> int:
    import redis

    with redis.Redis(port=port) as client:
        for first in range(0, len(records), PIPELINE):
            pipeline = client.pipeline(transaction=False)
            for record in records[first : first + PIPELINE]:
                pipeline.xadd(name, {"d": record})
            pipeline.execute()
        kept = client.xlen(name)
        client.delete(name)
    return int(kept)
