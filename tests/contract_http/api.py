"""The verbs of the contract over the small client, and what holds for every answer (§1.8, §1.9)."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import quote

from tests.contract_http.client import JSON, Client, Headers, Reply, dumps

ANY: Final = {"any": "detail"}  # where the contract leaves a detail open


def expect_success(reply: Reply, status: int = 200) -> dict[str, Any]:
    """The body of a success: bare, with `performance`."""
    assert reply.status == status, (reply.status, reply.body[:500])
    body = reply.json()
    assert isinstance(body, dict)
    assert not {"ok", "status", "error"} & body.keys(), body.keys()
    total = body["performance"]["server_total_ms"]
    assert isinstance(total, float | int)
    assert not isinstance(total, bool)
    assert total >= 0
    assert reply.header("content-encoding") is None
    return body


def expect_error(reply: Reply, status: int, code: str, detail: object = None) -> dict[str, Any]:
    """The envelope of an error; returns what is in it. `detail` None: there is none."""
    assert reply.status == status, (reply.status, reply.body[:500])
    body = reply.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() <= {"code", "message", "detail"}
    assert error["code"] == code, error
    assert isinstance(error["message"], str)
    assert error["message"]
    if detail is not ANY:
        assert error.get("detail") == detail, error
        assert ("detail" in error) == (detail is not None), "absent, not null"
    after = reply.header("retry-after")
    assert after == ("1" if status in (429, 503) else None)
    assert reply.header("www-authenticate") is None
    assert isinstance(error, dict)
    return error


def topic_path(topic: str, rest: str = "") -> str:
    return f"/v0/topics/{quote(topic, safe='')}{rest}"


class Api(Client):
    """A client that expects success, and gives the body of it."""

    def create_topic(self, topic: str, **config: Any) -> dict[str, Any]:
        return expect_success(self.put(topic_path(topic), config), 201)

    def configure(self, topic: str, **config: Any) -> dict[str, Any]:
        return expect_success(self.put(topic_path(topic), config))

    def try_write(
        self, topic: str, *records: dict[str, Any], query: str = "", headers: Headers = (), **more: Any
    ) -> Reply:
        return self.post(topic_path(topic, query), {"records": records, **more}, headers)

    def write_raw(self, topic: str, count: int, **more: Any) -> Reply:
        """Append so many records that are as small as can be."""
        rest = b"".join(b',"%b":%b' % (key.encode(), dumps(value)) for key, value in more.items())
        body = b'{"records":[%b]%b}' % (b",".join([b'{"data":1}'] * count), rest)
        return self.request("POST", topic_path(topic), body, [JSON])

    def records(self, topic: str, *records: dict[str, Any], **more: Any) -> dict[str, Any]:
        """Append records as they are."""
        reply = self.try_write(topic, *records, **more)
        return expect_success(reply, reply.status if reply.status == 201 else 200)

    def write(self, topic: str, *datas: object, **more: Any) -> dict[str, Any]:
        """Append data."""
        return self.records(topic, *({"data": data} for data in datas), **more)

    def diff(self, topic: str, **body: Any) -> dict[str, Any]:
        return expect_success(self.post(topic_path(topic, "/diff"), body))

    def seqs(self, topic: str, **body: Any) -> list[int]:
        """The seqs of one read, which has no tombstone."""
        found = self.diff(topic, **body)
        assert found["tombstone"] is None, found
        return [record["$seq"] for record in found["records"]]

    def state(self, topic: str, query: str = "?touch=false") -> dict[str, Any]:
        return expect_success(self.get(topic_path(topic, query)))

    def remove(self, topic: str, **body: Any) -> dict[str, Any]:
        """Delete records."""
        return expect_success(self.post(topic_path(topic, "/delete"), body))

    def drop(self, topic: str, query: str = "") -> dict[str, Any]:
        return expect_success(self.delete(topic_path(topic, query)))

    def topics(self, query: str = "") -> dict[str, Any]:
        return expect_success(self.get(f"/v0/topics{query}"))

    def exists(self, topic: str) -> bool:
        reply = self.get(topic_path(topic, "?touch=false"))
        if reply.status == 404:
            expect_error(reply, 404, "topic_not_found", {"topic": topic})
        return reply.status == 200

    def watch(self, topics: dict[str, Any], query: str = "", **more: Any) -> dict[str, Any]:
        return expect_success(self.post(f"/v0/watch{query}", {"topics": topics, **more}))

    def metrics(self) -> dict[str, Any]:
        """The metrics in JSON."""
        reply = self.get("/v0/metrics", [("Accept", "application/json")])
        assert reply.status == 200
        found = reply.json()
        assert isinstance(found, dict)
        return found


def record_bytes(data: object, meta: object = None) -> int:
    """Bytes of a record as the contract counts them (§1.12)."""
    return len(dumps(data)) + (0 if meta is None else len(dumps(meta)))
