"""[shell] Queues as a command needs them, wherever they are: in a directory, or behind a server.

    tidelog queue … DIR QUEUE               this process is the writer, or a reader beside one
    tidelog queue … QUEUE --server URL      a server is, and commands are its clients

Both say the same in the same shapes, so a command does not know which one it talks to.
"""

from __future__ import annotations

from argparse import Namespace
from base64 import b64encode
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any, Protocol
from urllib.parse import quote

import msgspec

from tidelog.cli import places
from tidelog.cli.render import Screen
from tidelog.client import Client, RemoteQueue
from tidelog.engine import Engine
from tidelog.engine.queues import Extended, Job, Settled
from tidelog.engine.queues.schedule import PRIORITY, RUN_AT
from tidelog.errors import NotAQueue

_PAGE = 1_000


class Put(Protocol):
    """What jobs of one put have in common."""

    tag: str | None
    delay_ms: int | None
    run_at_ms: int | None
    priority: int


class Door(Protocol):
    def names(self, prefix: str) -> list[str]:
        """Every queue."""
        ...

    def state(self, name: str) -> dict[str, Any]: ...
    def make(self, name: str) -> None: ...
    def put(self, name: str, datas: Sequence[Any], how: Put) -> tuple[int, int]:
        """The first and the last seq."""
        ...

    def claim(self, name: str, node: str, most: int, lease_ms: int | None) -> Sequence[Job]: ...
    def ack(self, name: str, node: str, seqs: Sequence[Any], ids: Sequence[int | None] | None) -> Settled: ...
    def nack(
        self, name: str, node: str, seqs: Sequence[Any], ids: Sequence[int | None] | None, delay_ms: int
    ) -> Settled: ...
    def extend(self, name: str, node: str, seqs: Sequence[Any], lease_ms: int) -> Extended: ...
    def history(self, name: str, from_seq: int, limit: int) -> list[dict[str, Any]]: ...
    def redrive(self, name: str, to: str | None, match: str | None, limit: int | None, rate: int | None) -> Any:
        """How many were moved, to which queues, and how many were left."""
        ...


def queue_named(args: Namespace) -> str:
    return places.named(args, "QUEUE")


def opened(args: Namespace, screen: Screen, *, write: bool, create: bool = False) -> AbstractContextManager[Door]:
    """The door that the command line names. Everything is on disk when this ends."""
    return places.opened(args, screen, Local, Remote, write=write, create=create)


class Local:
    def __init__(self, log: Engine) -> None:
        self._log = log

    def names(self, prefix: str) -> list[str]:
        return [state.topic for state in self._log.topics(prefix) if state.config.type == "queue"]

    def state(self, name: str) -> dict[str, Any]:
        queue = self._log.queue(name, create=False)
        state, counts = queue.topic.state(), queue.counts()
        return {
            "queue": name,
            **counts._asdict(),
            "count": state.count,
            "bytes": state.bytes,
            "head_seq": state.head_seq,
            "config": msgspec.json.decode(state.config.to_json()),
        }

    def make(self, name: str) -> None:
        self._log.queue(name)

    def put(self, name: str, datas: Sequence[Any], how: Put) -> tuple[int, int]:
        done = self._log.queue(name, create=False).put(
            list(datas), tag=how.tag, delay_ms=how.delay_ms, run_at_ms=how.run_at_ms, priority=how.priority
        )
        return done.first_seq, done.last_seq

    def claim(self, name: str, node: str, most: int, lease_ms: int | None) -> Sequence[Job]:
        return self._log.queue(name, create=False).claim(node, most, lease_ms)

    def ack(self, name: str, node: str, seqs: Sequence[Any], ids: Sequence[int | None] | None) -> Settled:
        return self._log.queue(name, create=False).ack(node, seqs, ids)

    def nack(
        self, name: str, node: str, seqs: Sequence[Any], ids: Sequence[int | None] | None, delay_ms: int
    ) -> Settled:
        return self._log.queue(name, create=False).nack(node, seqs, ids, delay_ms)

    def extend(self, name: str, node: str, seqs: Sequence[Any], lease_ms: int) -> Extended:
        return self._log.queue(name, create=False).extend(node, seqs, lease_ms=lease_ms)

    def history(self, name: str, from_seq: int, limit: int) -> list[dict[str, Any]]:
        return self._log.queue(name, create=False).history().read(from_seq, limit)

    def redrive(self, name: str, to: str | None, match: str | None, limit: int | None, rate: int | None) -> Any:
        done = self._log.topic(name, create=False).redrive(to=to, match=match, limit=limit, rate=rate)
        return done.count, done.queues, done.skipped


class Remote:
    def __init__(self, client: Client) -> None:
        self._client = client

    def _queue(self, name: str) -> RemoteQueue:
        return RemoteQueue(self._client, name)

    def names(self, prefix: str) -> list[str]:
        found: list[str] = []
        after = ""
        while True:
            page = self._client.get(f"/v0/topics?page_size={_PAGE}&prefix={quote(prefix, safe='')}&cursor={after}")
            found += [row["topic"] for row in page["topics"]]
            after = page.get("next_cursor", "")
            if not after:
                return [name for name in found if self._queue(name).state()["type"] == "queue"]

    def state(self, name: str) -> dict[str, Any]:
        now = self._queue(name).state()
        if now["type"] != "queue":
            raise NotAQueue(name)
        kept = {key: now[key] for key in ("count", "bytes", "head_seq", "config")}
        return {"queue": name, **now["queue"], **kept}

    def make(self, name: str) -> None:
        if name not in self.names(name):
            self._client.put(f"/v0/topics/{quote(name, safe='')}", {"type": "queue"})

    def put(self, name: str, datas: Sequence[Any], how: Put) -> tuple[int, int]:
        more = {"tag": how.tag, "delay_ms": how.delay_ms, "run_at_ms": how.run_at_ms, "priority": how.priority or None}
        done = self._queue(name).put([{**_data(data), **more} for data in datas])
        return done["first_seq"], done["last_seq"]

    def claim(self, name: str, node: str, most: int, lease_ms: int | None) -> Sequence[Job]:
        return [Job(*job) for job in self._queue(name).claim(node, most, lease_ms)]

    def ack(self, name: str, node: str, seqs: Sequence[Any], ids: Sequence[int | None] | None) -> Settled:
        done = self._queue(name).ack(node, seqs, ids)
        return Settled(*done)

    def nack(
        self, name: str, node: str, seqs: Sequence[Any], ids: Sequence[int | None] | None, delay_ms: int
    ) -> Settled:
        done = self._queue(name).nack(node, seqs, ids, delay_ms)
        return Settled(*done)

    def extend(self, name: str, node: str, seqs: Sequence[Any], lease_ms: int) -> Extended:
        done = self._queue(name).extend(node, seqs, lease_ms=lease_ms)
        return Extended(*done)

    def history(self, name: str, from_seq: int, limit: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._queue(name).history(from_seq, limit)["events"]
        return found

    def redrive(self, name: str, to: str | None, match: str | None, limit: int | None, rate: int | None) -> Any:
        """As many requests as it takes: a server moves some thousands with each."""
        moved, skipped = 0, 0
        queues: dict[str, int] = {}
        for _ in count():
            left = None if limit is None else limit - moved
            asked = {"to": to, "match": match, "rate": rate, "limit": _PAGE if left is None else min(left, _PAGE)}
            done = self._queue(name).redrive(**asked)
            moved, skipped = moved + done["redriven"], done["skipped"]
            for queue, number in done["queues"].items():
                queues[queue] = queues.get(queue, 0) + number
            if not done["redriven"] or (limit is not None and moved >= limit):
                break
        return moved, queues, skipped


def _data(data: Any) -> dict[str, Any]:
    if isinstance(data, bytes):
        return {"data": b64encode(data).decode(), "$encoding": "base64"}
    return {"data": data}


def job_fields(job: Job) -> dict[str, Any]:
    """A job as a command shows it, and as the command of a worker reads it."""
    data = job.data
    if isinstance(data, bytes):
        try:
            named = {"data": data.decode()}
        except UnicodeDecodeError:
            named = {"data_base64": b64encode(data).decode()}
    else:
        named = {"data": data}
    meta = {key: value for key, value in (job.meta or {}).items() if key not in (RUN_AT, PRIORITY)}
    return {
        "seq": job.seq,
        "lease_id": job.token,
        "deadline_ms": job.deadline_ms,
        "ts_ms": job.ts_ms,
        "deliveries": job.deliveries,
        **named,
        **({} if job.tag is None else {"tag": job.tag}),
        **({"meta": meta} if meta else {}),
    }
