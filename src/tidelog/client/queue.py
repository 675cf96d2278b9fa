"""A queue of a server, with the methods of an embedded one: claim, ack, nack, extend."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from tidelog.client.http import Client, topic_path

_LEASE_TOKEN_PREFIX: Final = "lease_"


class RemoteJob(NamedTuple):
    """One leased job."""

    seq: int
    lease_id: int
    deadline_ms: int
    ts_ms: int
    deliveries: int
    data: Any
    tag: str | None = None
    meta: dict[str, Any] | None = None

    @property
    def token(self) -> str:
        return f"{_LEASE_TOKEN_PREFIX}{self.lease_id:x}"


class RemoteAckResult(NamedTuple):
    """The result of an ack or a nack, with the counts of the queue after it."""

    count: int  # type: ignore[assignment]  # hides a method of tuples
    skipped: list[int]  # not held by that node, or not under that lease
    ready: int
    in_flight: int


class RemoteExtendResult(NamedTuple):
    count: int  # type: ignore[assignment]  # hides a method of tuples
    skipped: list[int]
    deadlines: dict[int, int]


class RemoteQueue:
    """A queue of a server. Every method may be called from any thread.

    `claim`, `ack`, `nack` and `extend` return what an embedded queue returns, so a `tidelog.Worker` takes either.
    """

    def __init__(self, client: Client, name: str) -> None:
        self._client, self.name = client, name

    def claim(self, node: str, most: int = 1, lease_ms: int | None = None) -> list[RemoteJob]:
        """Lease up to `most` jobs. A claim without a response is repeated: the leases of the first one expire."""
        body = {"node": node, "max": most, "lease_ms": lease_ms}
        return [_parse_job(job) for job in self._post("/claim", body)["claimed"]]

    def ack(self, node: str, jobs: Sequence[Any], lease_ids: Sequence[int | None] | None = None) -> RemoteAckResult:
        """Remove finished jobs: jobs, which are checked by their leases, or seqs."""
        return _ack_result("acked", self._post("/ack", {"node": node, **_seqs_and_tokens(jobs, lease_ids)}))

    def nack(
        self, node: str, jobs: Sequence[Any], lease_ids: Sequence[int | None] | None = None, delay_ms: int = 0
    ) -> RemoteAckResult:
        """Return jobs to the queue, at once or after a delay."""
        return _ack_result(
            "nacked", self._post("/nack", {"node": node, **_seqs_and_tokens(jobs, lease_ids), "delay_ms": delay_ms})
        )

    def extend(
        self, node: str, jobs: Sequence[Any], lease_ids: Sequence[int | None] | None = None, *, lease_ms: int
    ) -> RemoteExtendResult:
        """Extend the leases, from now on."""
        done = self._post("/extend", {"node": node, **_seqs_and_tokens(jobs, lease_ids), "lease_ms": lease_ms})
        deadlines = {int(seq): deadline_ms for seq, deadline_ms in done["deadlines"].items()}
        return RemoteExtendResult(done["extended"], done["skipped"], deadlines)

    def put(self, records: Iterable[dict[str, Any]], *, key: str | None = None) -> dict[str, Any]:
        """Append jobs: JSON records `{"data": …}`, optionally with run_at_ms, delay_ms or priority."""
        body = {"records": list(records), "idempotency_key": key, "create": False}
        return self._client.post(topic_path(self.name), body, retry_safe=key is not None)

    def state(self) -> dict[str, Any]:
        """Describe the queue."""
        return self._client.get(topic_path(self.name, "?touch=false"))

    def history(self, from_seq: int, limit: int) -> dict[str, Any]:
        """Read the events of its jobs, oldest first."""
        return self._client.get(topic_path(self.name, f"/history?from_seq={from_seq}&limit={limit}"))

    def redrive(self, **options: Any) -> dict[str, Any]:
        """Move the records of a dead-letter topic back into their queues."""
        return self._client.post(topic_path(self.name, "/redrive"), options)

    def _post(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._client.post(topic_path(self.name, verb), body, retry_safe=True)


def _ack_result(verb: str, response: dict[str, Any]) -> RemoteAckResult:
    return RemoteAckResult(response[verb], response["skipped"], response["ready"], response["in_flight"])


def _parse_job(fields: dict[str, Any]) -> RemoteJob:
    data = fields["data"]
    return RemoteJob(
        fields["$seq"],
        int(fields["lease_id"].removeprefix(_LEASE_TOKEN_PREFIX), 16),
        fields["deadline"],
        fields["$ts"],
        fields["deliveries"],
        b64decode(data) if fields.get("$encoding") == "base64" else data,
        fields.get("$tag"),
        fields.get("meta"),
    )


def _seqs_and_tokens(jobs: Sequence[Any], lease_ids: Sequence[int | None] | None) -> dict[str, Any]:
    """The seqs, and the lease tokens where they are known."""
    if lease_ids is None:
        lease_ids = [None if isinstance(job, int) else job.lease_id for job in jobs]
    seqs = [job if isinstance(job, int) else job.seq for job in jobs]
    if all(lease_id is None for lease_id in lease_ids):
        return {"seqs": seqs}
    return {
        "seqs": seqs,
        "lease_ids": ["" if lease_id is None else f"{_LEASE_TOKEN_PREFIX}{lease_id:x}" for lease_id in lease_ids],
    }
