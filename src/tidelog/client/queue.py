"""A queue of a server, with the methods of an embedded one."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa

from tidelog.client.http import Client, topic_path
from tidelog.client.topic import RemoteTopic
from tidelog.engine import Appended
from tidelog.engine.queues import AckResult, ExtendResult, Job, QueueCounts
from tidelog.engine.queues.history import HISTORY_SCHEMA
from tidelog.engine.queues.jobs import lease_token, parse_lease_token
from tidelog.errors import NotAQueue

_HISTORY_PAGE_STEPS: Final = 10_000


class RemoteQueue:
    """A queue of a server. Every method may be called from any thread.

    Methods and results are those of an embedded queue, so a `tidelog.Worker` takes either. A missing queue raises
    TopicNotFound at the first request.
    """

    def __init__(self, client: Client, name: str) -> None:
        self._client, self.name = client, name
        self.topic = RemoteTopic(client, name)

    def put(
        self,
        records: object,
        *,
        tag: str | Sequence[str | None] | None = None,
        node: str | Sequence[str | None] | None = None,
        meta: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        key: str | None = None,
        run_at_ms: int | None = None,
        delay_ms: int | None = None,
        priority: int = 0,
    ) -> Appended:
        """Append jobs. Without a response this raises InDoubt; with a key it is repeated."""
        datas: Sequence[Any] = records if isinstance(records, list | tuple) else [records]
        schedule = {"run_at_ms": run_at_ms, "delay_ms": delay_ms, "priority": priority or None}
        columns = [value if isinstance(value, list | tuple) else [value] * len(datas) for value in (tag, node, meta)]
        rows = [
            {**_encode_data(data), "tag": row_tag, "node": row_node, "meta": row_meta, **schedule}
            for data, row_tag, row_node, row_meta in zip(datas, *columns, strict=True)
        ]
        body = {"records": rows, "idempotency_key": key, "create": False}
        done = self._client.post(topic_path(self.name), body, retry_safe=key is not None)
        return Appended(done["first_seq"], done["last_seq"], done["head_seq"], done["deduped"])

    def claim(self, node: str, most: int = 1, lease_ms: int | None = None) -> list[Job]:
        """Lease up to `most` jobs. A claim without a response is repeated: the leases of the first one expire."""
        body = {"node": node, "max": most, "lease_ms": lease_ms}
        return [_parse_job(job) for job in self._post("/claim", body)["claimed"]]

    def ack(self, node: str, seqs: Sequence[Job | int], lease_ids: Sequence[int | None] | None = None) -> AckResult:
        """Delete finished jobs. `Job` objects in place of seqs carry their lease ids."""
        return _ack_result("acked", self._post("/ack", {"node": node, **_seqs_and_tokens(seqs, lease_ids)}))

    def nack(
        self, node: str, seqs: Sequence[Job | int], lease_ids: Sequence[int | None] | None = None, delay_ms: int = 0
    ) -> AckResult:
        """Make unfinished jobs claimable again, at once or after `delay_ms`."""
        body = {"node": node, **_seqs_and_tokens(seqs, lease_ids), "delay_ms": delay_ms}
        return _ack_result("nacked", self._post("/nack", body))

    def extend(
        self, node: str, seqs: Sequence[Job | int], lease_ids: Sequence[int | None] | None = None, *, lease_ms: int
    ) -> ExtendResult:
        """Extend the leases of these jobs to `lease_ms` from now."""
        done = self._post("/extend", {"node": node, **_seqs_and_tokens(seqs, lease_ids), "lease_ms": lease_ms})
        deadlines = {int(seq): deadline_ms for seq, deadline_ms in done["deadlines"].items()}
        return ExtendResult(done["extended"], done["skipped"], deadlines)

    def counts(self) -> QueueCounts:
        """Return the number of claimable jobs, leased jobs and dead letters."""
        state = self._client.get(topic_path(self.name, "?touch=false"))
        if state["type"] != "queue":
            raise NotAQueue(self.name)
        return QueueCounts(**state["queue"])

    def history(self) -> RemoteHistory:
        """Return the events of the jobs of this queue."""
        return RemoteHistory(self._client, self.name)

    def _post(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._client.post(topic_path(self.name, verb), body, retry_safe=True)


class RemoteHistory:
    """The kept events of the jobs of a queue, oldest first."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self._name = client, name

    def read(self, from_seq: int = 0, limit: int = 256) -> list[dict[str, Any]]:
        """Return steps after `from_seq` of the history, each with its seq there as `at`."""
        path = topic_path(self._name, f"/history?from_seq={from_seq}&limit={limit}")
        steps: list[dict[str, Any]] = self._client.get(path)["events"]
        return steps

    def to_arrow(self) -> pa.Table:
        """Return the whole history as a table with one row per step."""
        return pa.Table.from_pylist(list(self._rows()), schema=HISTORY_SCHEMA)

    def _rows(self) -> Iterator[dict[str, Any]]:
        at = 0
        while page := self.read(at, _HISTORY_PAGE_STEPS):
            for step in page:
                yield {**step, "ts_ms": datetime.fromtimestamp(step["ts_ms"] / 1000, UTC)}
            at = page[-1]["at"]


def _ack_result(verb: str, response: dict[str, Any]) -> AckResult:
    return AckResult(response[verb], response["skipped"], response["ready"], response["in_flight"])


def _encode_data(data: Any) -> dict[str, Any]:
    if isinstance(data, bytes):
        return {"data": b64encode(data).decode(), "$encoding": "base64"}
    return {"data": data}


def _parse_job(fields: dict[str, Any]) -> Job:
    data, lease_id = fields["data"], parse_lease_token(fields["lease_id"])
    assert lease_id is not None, "a claim names its leases"
    return Job(
        fields["$seq"],
        lease_id,
        fields["deadline"],
        fields["$ts"],
        fields["deliveries"],
        b64decode(data) if fields.get("$encoding") == "base64" else data,
        fields.get("$tag"),
        fields.get("meta"),
    )


def _seqs_and_tokens(jobs: Sequence[Job | int], lease_ids: Sequence[int | None] | None) -> dict[str, Any]:
    """The seqs, and the lease tokens where they are known."""
    if lease_ids is None:
        lease_ids = [None if isinstance(job, int) else job.lease_id for job in jobs]
    seqs = [job if isinstance(job, int) else job.seq for job in jobs]
    if all(lease_id is None for lease_id in lease_ids):
        return {"seqs": seqs}
    return {"seqs": seqs, "lease_ids": ["" if each is None else lease_token(each) for each in lease_ids]}
