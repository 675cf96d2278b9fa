"""Calls of one consumer group. No I/O."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from tidelog.api_types import READ_LIMIT_MAX
from tidelog.client.core import Call, Request
from tidelog.client.topic_calls import POLL_MS, TopicCalls
from tidelog.client.wire import OpenRecord, encode_json, parse_gap
from tidelog.engine import SEQ_MAX, GroupState, Lag, Page, Preview
from tidelog.engine.batch_encoder import check_int
from tidelog.engine.group_leases import LEASE_MS_DEFAULT, ConsumerState
from tidelog.engine.groups import ResetTarget, check_group_name, timestamp_ms
from tidelog.errors import BadInput, CursorConflict, GroupNotFound
from tidelog.times import Duration, Seconds, duration_ms, seconds, time_ms

_FETCH_BYTES: Final = 1 << 20


class GroupCalls:
    """The calls of the group `name` of a topic. A group that does not exist is at 0, as in the embedded API."""

    def __init__(self, topic: str, name: str, open_record: OpenRecord | None = None) -> None:
        check_group_name(name)
        self.topic, self.name = topic, name
        self._topic = TopicCalls(topic, open_record)

    def _path(self, rest: str = "") -> str:
        return self._topic.path(f"/groups/{self.name}{rest}")

    def _post(self, rest: str, body: object) -> Call[dict[str, Any]]:
        return (yield Request("POST", self._path(rest), encode_json(body), retry_safe=True)).json()

    def state(self) -> Call[GroupState]:
        request = Request("GET", self._path(), query={"missing": True}, retry_safe=True)
        return parse_group((yield request).json())

    def lag(self) -> Call[Lag]:
        return (yield from self.state()).lag

    def exists(self) -> Call[bool]:
        return (yield from self.state()).last_commit_ms is not None

    def fetch(self, limit: int = 256, timeout: Seconds | None = 0.0, node: str | list[str] | None = None) -> Call[Page]:
        try:
            return (yield from self._topic.read_page(self._path("/fetch"), {}, limit, node, _FETCH_BYTES, timeout))
        except GroupNotFound:
            return (yield from self._topic.read(0, limit, node=node, timeout=timeout))

    def commit(self, seq: int, *, expect: int | None = None) -> Call[int]:
        check_int("seq", seq, 0, SEQ_MAX)
        if expect is not None:
            check_int("expect", expect, 0, SEQ_MAX)
        try:
            position: int = (yield from self._post("/commit", {"seq": seq, "expect": expect}))["position"]
        except CursorConflict as error:
            if error.is_of_repetition and error.position == seq:
                return seq  # the first attempt did it, and its response was lost
            raise
        return position

    def would_commit(self, seq: int, *, expect: int | None = None) -> Call[Preview]:
        check_int("seq", seq, 0, SEQ_MAX)
        yield from self._post("/commit", {"seq": seq, "expect": expect, "preview": True})
        return (yield from self.preview(seq))

    def reset(self, to: ResetTarget) -> Call[int]:
        seq: int = (yield from self._post("/reset", {"to": _position(to), "create": True}))["to"]
        return seq

    def preview(self, to: ResetTarget) -> Call[Preview]:
        found = yield from self._post("/reset", {"to": _position(to), "create": True, "preview": True})
        return Preview(found["from"], found["to"], found["records"], found["bytes"], parse_gap(found["gap"]))

    def hold(self, hold_bytes: int) -> Call[None]:
        check_int("hold", hold_bytes, 0, SEQ_MAX)
        yield Request("PUT", self._path(), encode_json({"hold_bytes": hold_bytes}), retry_safe=True)

    def begin(self, at: ResetTarget = "earliest", *, hold_bytes: int = 0) -> Call[bool]:
        check_int("hold", hold_bytes, 0, SEQ_MAX)
        body = {"hold_bytes": hold_bytes, "from": _position(at), "keep": True}
        created: bool = (yield Request("PUT", self._path(), encode_json(body), retry_safe=True)).json()["created"]
        return created

    def claim(
        self, consumer: str, limit: int, lease_ms: Duration, timeout: Seconds | None
    ) -> Call[tuple[int, int, Page] | None]:
        """Lease the next records; return the lease's id, its first seq and the records."""
        check_int("limit", limit, 1, SEQ_MAX)
        timeout_s = seconds("timeout", timeout)
        left_ms = None if timeout_s is None else max(int(timeout_s * 1000), 0)
        body: dict[str, object] = {
            "consumer": consumer,
            "limit": min(limit, READ_LIMIT_MAX),
            "lease_ms": duration_ms("lease_ms", lease_ms),
        }
        while True:
            wait_ms = POLL_MS if left_ms is None else min(left_ms, POLL_MS)
            content = encode_json(body | {"include_tags": True, "include_counts": True, "wait_ms": wait_ms})
            response = yield Request("POST", self._path("/claim"), content, retry_safe=True, wait_s=wait_ms / 1000)
            found = response.json()
            if (lease := found["lease"]) is not None:
                return lease["lease_id"], lease["first_seq"], self._topic.parse_page(found)
            left_ms = None if left_ms is None else left_ms - response.elapsed_ms
            if left_ms is not None and left_ms <= 0:
                return None

    def ack(self, consumer: str, lease_id: int) -> Call[bool]:
        return (yield from self._settle("/ack", consumer, lease_id))

    def release(self, consumer: str, lease_id: int) -> Call[bool]:
        return (yield from self._settle("/release", consumer, lease_id))

    def extend(self, consumer: str, lease_id: int, lease_ms: Duration = LEASE_MS_DEFAULT) -> Call[bool]:
        return (yield from self._settle("/extend", consumer, lease_id, lease_ms=duration_ms("lease_ms", lease_ms)))

    def _settle(self, verb: str, consumer: str, lease_id: int, **more: int) -> Call[bool]:
        done = yield from self._post(verb, {"consumer": consumer, "lease_ids": [lease_id], **more})
        return bool(done["settled"])

    def leave(self, consumer: str) -> Call[int]:
        returned: int = (yield from self._post("/leave", {"consumer": consumer}))["returned"]
        return returned

    def consumers(self) -> Call[list[ConsumerState]]:
        rows = (yield Request("GET", self._path("/consumers"), retry_safe=True)).json()["consumers"]
        return [ConsumerState(**row) for row in rows]

    def delete(self) -> Call[bool]:
        try:
            done = (yield Request("DELETE", self._path(), retry_safe=True)).json()
        except GroupNotFound:
            return False
        return bool(done["deleted"])


def list_groups(topic: TopicCalls) -> Call[list[GroupState]]:
    """Return the groups of a topic, by name."""
    rows = (yield Request("GET", topic.path("/groups"), retry_safe=True)).json()["groups"]
    return [parse_group(row) for row in rows]


def parse_group(row: dict[str, Any]) -> GroupState:
    return GroupState(
        row["group"],
        row["position"],
        row["hold_bytes"],
        row["hold_broken"],
        row["last_commit_ts"],
        row["head_seq"],
        Lag(**row["lag"]),
    )


def _position(to: object) -> object:
    """A position as the wire has it."""
    if isinstance(to, timestamp_ms | datetime):
        return {"ts": time_ms("a moment", to)}
    if to in ("earliest", "latest"):
        return to
    if isinstance(to, bool) or not isinstance(to, int):
        raise BadInput(f"a group goes to earliest, latest, a seq, a datetime or a timestamp_ms, not to {to!r:.80}")
    check_int("seq", to, 0, SEQ_MAX)
    return to
