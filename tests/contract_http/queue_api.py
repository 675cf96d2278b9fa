"""The verbs of queues over the small client, and a worker's stream byte by byte (§2.11, §3.11)."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from tests.contract_http.api import Api, expect_success, topic_path
from tests.contract_http.client import Address, Headers, Reply, dumps, loads
from tests.contract_http.sse_client import SseStream

_JOB: Final = re.compile(rb"id: ([0-9]+)\nevent: job\ndata: (\{[^\n\r]*\})\n\n")
_ERROR: Final = re.compile(rb"event: error\ndata: (\{[^\n\r]*\})\n\n")


class QueueApi(Api):
    """A client that claims, and expects success."""

    def make_queue(self, topic: str, **config: Any) -> dict[str, Any]:
        return self.create_topic(topic, type="queue", **config)

    def try_verb(self, topic: str, verb: str, **body: Any) -> Reply:
        return self.post(topic_path(topic, f"/{verb}"), body)

    def claim(self, topic: str, node: str = "n", **body: Any) -> list[dict[str, Any]]:
        said = self.claim_all(topic, node, **body)
        found: list[dict[str, Any]] = said["claimed"]
        return found

    def claim_all(self, topic: str, node: str = "n", **body: Any) -> dict[str, Any]:
        said = expect_success(self.try_verb(topic, "claim", node=node, **body))
        assert said.keys() == {"topic", "claimed", "count", "ready", "performance"}
        assert (said["topic"], said["count"]) == (topic, len(said["claimed"]))
        seqs = [job["$seq"] for job in said["claimed"]]
        assert seqs == sorted(seqs), "ascending"
        return said

    def claim_seqs(self, topic: str, node: str = "n", **body: Any) -> list[int]:
        """The seqs of a claim."""
        return [job["$seq"] for job in self.claim(topic, node, **body)]

    def ack(self, topic: str, *seqs: int, node: str = "n", **body: Any) -> dict[str, Any]:
        return self._settle(topic, "ack", "acked", {"node": node, "seqs": seqs, **body})

    def nack(self, topic: str, *seqs: int, node: str = "n", **body: Any) -> dict[str, Any]:
        return self._settle(topic, "nack", "nacked", {"node": node, "seqs": seqs, **body})

    def _settle(self, topic: str, verb: str, done: str, body: dict[str, Any]) -> dict[str, Any]:
        said = expect_success(self.try_verb(topic, verb, **body))
        assert said.keys() == {"topic", done, "skipped", "ready", "in_flight", "performance"}
        assert said["topic"] == topic
        return said

    def extend(self, topic: str, *seqs: int, node: str = "n", lease_ms: int = 30_000, **body: Any) -> dict[str, Any]:
        said = expect_success(self.try_verb(topic, "extend", node=node, seqs=seqs, lease_ms=lease_ms, **body))
        assert said.keys() == {"topic", "extended", "skipped", "deadlines", "performance"}
        return said

    def counts(self, topic: str) -> tuple[int, int, int]:
        """Ready, in flight, dead-lettered."""
        now = self.state(topic)["queue"]
        assert now.keys() == {"ready", "in_flight", "dead_lettered"}
        return now["ready"], now["in_flight"], now["dead_lettered"]

    def metric(self, name: str, topic: str | None = None) -> float:
        """One value of the figures as Prometheus reads them."""
        labels = "" if topic is None else f'{{topic="{topic}"}}'
        wanted = f"tidelog_{name}{labels} "
        lines = self.get("/v0/metrics").body.decode().splitlines()
        (found,) = [line.removeprefix(wanted) for line in lines if line.startswith(wanted)]
        return float(found)


class Job(NamedTuple):
    seq: int
    data: dict[str, Any]
    raw: bytes


class WorkStream(SseStream):
    """A worker's stream."""

    def __init__(self, address: Address, topic: str, *, key: str | None = None, headers: Headers = (), **query: Any):
        named = [*headers, *([] if key is None else [("Authorization", f"Bearer {key}")])]
        super().__init__(address, f"{topic_path(topic)}/work?{urlencode(query)}", headers=named)

    def job(self, within_s: float | None = None) -> Job:
        """The next job; heartbeats between are passed over."""
        raw = self.event_frame(within_s)
        found = _JOB.fullmatch(raw)
        assert found is not None, raw[:300]
        value = loads(found[2])
        assert dumps(value) == found[2], "compact"
        assert next(iter(value)) == "topic"
        assert value["$seq"] == int(found[1]), "the id is the seq"
        return Job(value["$seq"], value, raw)

    def jobs(self, count: int) -> list[int]:
        """The seqs of the next so many."""
        return [self.job().seq for _ in range(count)]

    def error(self) -> dict[str, Any]:
        """The last frame of a stream that the server ends."""
        found = _ERROR.fullmatch(self.frame())
        assert found is not None
        value: dict[str, Any] = loads(found[1])
        assert list(value) == ["code", "error", "topic"]
        assert self.is_over()
        return value
