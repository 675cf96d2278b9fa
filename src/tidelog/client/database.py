"""`RemoteDatabase`: the topics, queues and channels of a server, with the methods of an embedded `Database`.

Methods, results and errors are the same, so a command or a job that takes either one is written once.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, overload
from urllib.parse import quote, urlencode

import msgspec
import pyarrow as pa

from tidelog import database
from tidelog.addresses import Location
from tidelog.api_types import READ_LIMIT, READ_LIMIT_MAX, encode_page_cursor
from tidelog.channels import OPERATOR, Ack, ChannelConfig, ChannelInfo, HistoryPage, Message, Operator
from tidelog.client.http import Client, topic_path
from tidelog.database import Database
from tidelog.engine import (
    Appended,
    Compacted,
    EvictedRange,
    LatestPage,
    LatestRecord,
    Record,
    RedriveResult,
    RetentionPreview,
    TopicConfig,
    TopicInfo,
    UnreadLoss,
)
from tidelog.engine.queues import AckResult, ExtendResult, Job, QueueCounts
from tidelog.engine.queues.history import HISTORY_SCHEMA
from tidelog.engine.queues.jobs import lease_token, parse_lease_token
from tidelog.engine.segment import SizeCount
from tidelog.errors import Forbidden, NotAQueue, TopicNotFound

ARROW_CONTENT_TYPE: Final = "application/vnd.apache.arrow.stream"
_PAGE_ROWS: Final = 1_000
_REDRIVE_PAGE_RECORDS: Final = 1_000
_HISTORY_PAGE_STEPS: Final = 10_000
_MEMBERS_PAGE_SIZE: Final = 100
_encode = msgspec.json.Encoder().encode


class RemoteDatabase:
    """The topics, queues and channels of a server. Every method may be called from any thread."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def topic(self, name: str, *, create: bool = True, **config: object) -> RemoteTopic:
        """Return the topic of this name; create it if there is none. Given config fields are set, others stay. With
        `create=False` and no fields this sends no request: a missing topic raises at its first use."""
        if create or config:
            self._configure(name, create, config)
        return RemoteTopic(self._client, name)

    def queue(self, name: str, *, create: bool = True, **config: object) -> RemoteQueue:
        """`topic` for a queue."""
        if create or config:
            self._configure(name, create, {"type": "queue", **config})
        return RemoteQueue(self._client, name)

    def _configure(self, name: str, create: bool, config: dict[str, object]) -> None:
        """Create a topic or set fields. A PUT replaces the whole config, so the present fields are sent with it."""
        present: dict[str, object] = {}
        try:
            present = self._client.get(topic_path(name, "?touch=false"))["config"]
        except TopicNotFound:
            if not create:
                raise
        if not present or any(present.get(field) != value for field, value in config.items()):
            present.pop("durable", None)  # follows `durability`
            self._client.put(topic_path(name), {**present, **config})

    def topics(self, prefix: str = "", *, after: str = "", limit: int | None = None) -> list[TopicInfo]:
        """Return the state of topics, by name: those that begin with `prefix` and come after `after`, at most
        `limit`."""
        cursor = encode_page_cursor(after) if after else ""
        pages = self._pages("/v0/topics", f"&prefix={quote(prefix, safe='')}", cursor)
        rows = islice((row for page in pages for row in page["topics"]), limit)
        return [RemoteTopic(self._client, row["topic"]).state() for row in rows]

    def _pages(self, path: str, query: str = "", cursor: str = "") -> Iterator[dict[str, Any]]:
        while True:
            page = self._client.get(f"{path}?page_size={_PAGE_ROWS}&cursor={cursor}{query}")
            yield page
            cursor = page.get("next_cursor", "")
            if not cursor:
                return

    def channel(self, name: str, *, user: ChannelUser = OPERATOR, token: str | None = None) -> RemoteChannel:
        """Return a handle of a channel for `user`: KEY_USER is the user of the API key; the operator needs the scope
        admin."""
        return RemoteChannel(self._client, name, user, token)

    def backup(self, target: str | None = None, **options: bool) -> dict[str, Any]:
        """Make a backup on the server: `target` is a place that it may write, by default its first one. Options are
        those of `Database.backup`. Returns the backup."""
        return self._client.post("/v0/backups", {"target": target, **options})

    def backups(self, target: str | None = None) -> dict[str, Any]:
        """The backups of a target of the server."""
        return self._client.get("/v0/backups", **({} if target is None else {"target": target}))

    def channel_rows(self) -> tuple[list[dict[str, Any]], dict[str, str], ChannelUser]:
        """Return all channels, the reasons for unreadable ones, and the user to read them as: the operator, or where
        the key has no scope admin KEY_USER, which lists the channels of that user."""
        try:
            pages = list(self._pages("/v0/channels", "&operator=true"))
        except Forbidden:
            rows = [row for page in self._pages("/v0/channels") for row in page["channels"]]
            return rows, {}, KEY_USER
        return [row for page in pages for row in page["channels"]], pages[0]["unreadable"], OPERATOR


def open_location(location: Location, *, read_only: bool = False) -> Database | RemoteDatabase:
    """Open the directory or the server that a location names."""
    if location.is_server:
        return RemoteDatabase(Client(location.address, key=location.key))
    return database.open(location.address, read_only=read_only)


class RemoteTopic:
    """A topic of a server. A missing topic raises TopicNotFound at the first request."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self.name = client, name

    def state(self) -> TopicInfo:
        """Return settings, sizes and seqs."""
        fields = self._client.get(topic_path(self.name, "?touch=false"))
        listing = self._client.get(topic_path(self.name, "/segments?sums=false"))
        return TopicInfo(
            topic=self.name,
            id=listing["epoch"],
            epoch=listing["epoch"],
            head_seq=fields["head_seq"],
            earliest_seq=fields["earliest_seq"],
            evict_floor=listing["evict_floor"],
            count=fields["count"],
            bytes=fields["bytes"],
            last_write_ms=fields["last_write_ts"],
            last_read_ms=fields["last_read_ts"],
            effective_priority=fields["effective_priority"],
            config=TopicConfig.from_json(_encode(fields["config"])),
        )

    def append_arrow(self, table: pa.Table | pa.RecordBatch, *, key: str | None = None) -> Appended:
        """Write the rows of a table as one batch. With a key, a request without a response is repeated."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write(table)
        headers = {"Content-Type": ARROW_CONTENT_TYPE, **({} if key is None else {"Idempotency-Key": key})}
        body = sink.getvalue().to_pybytes()
        response = self._client.post_bytes(topic_path(self.name), body, headers, retry_safe=key is not None)
        return Appended(response["first_seq"], response["last_seq"], response["head_seq"], bool(response["deduped"]))

    def compact(self) -> Compacted:
        """Remove the records that newer ones of their key replaced, and tombstones whose delay has passed, now."""
        done = self._client.post(topic_path(self.name, "/compact"), {})
        return Compacted(done["removed"], done["bytes"], done["tombstones"], done["compacted_to"])

    @overload
    def latest(self, key: None = None, *, prefix: str = "") -> RemoteLatestTable: ...

    @overload
    def latest(self, key: str, *, prefix: str = "") -> Record | None: ...

    def latest(self, key: str | None = None, *, prefix: str = "") -> RemoteLatestTable | Record | None:
        """The newest record of a key, or a table of all keys that begin with `prefix`."""
        table = RemoteLatestTable(self._client, self.name, prefix)
        return table if key is None else table.get(key)

    def simulate_retention(
        self, *, cap_records: int | None = None, cap_bytes: int | None = None, ttl_ms: int | None = None
    ) -> RetentionPreview:
        """Return which records these limits would evict now, and which groups have not read them; None: as configured.
        Changes nothing."""
        limits = {"cap_records": cap_records, "cap_bytes": cap_bytes, "ttl_ms": ttl_ms}
        found = self._client.post(topic_path(self.name, "/retention/simulate"), limits)
        return RetentionPreview(
            found["topic"],
            TopicConfig.from_json(_encode(found["config"])),
            EvictedRange(*found["cap"].values()),
            EvictedRange(*found["ttl"].values()),
            found["evict_floor"],
            SizeCount(*found["remaining"].values()),
            tuple(UnreadLoss(*loss.values()) for loss in found["groups"]),
            tuple(found["held_by"]),
        )

    def redrive(
        self,
        *,
        to: str | None = None,
        match: object = None,
        rate: float | None = None,
        limit: int | None = None,
    ) -> RedriveResult:
        """Move dead letters back to the queue that each came from, or to the queue `to`. A server moves some thousands
        per request, so this may send several."""
        count, queues, skipped = 0, dict[str, int](), 0
        while True:
            page = _REDRIVE_PAGE_RECORDS if limit is None else min(limit - count, _REDRIVE_PAGE_RECORDS)
            body = {"to": to, "match": match, "rate": rate, "limit": page}
            done = self._client.post(topic_path(self.name, "/redrive"), body)
            count, skipped = count + done["redriven"], done["skipped"]
            for queue, number in done["queues"].items():
                queues[queue] = queues.get(queue, 0) + number
            if not done["redriven"] or (limit is not None and count >= limit):
                return RedriveResult(count, queues, skipped)


class RemoteLatestTable:
    """The newest record of each key of a topic of a server."""

    def __init__(self, client: Client, name: str, prefix: str) -> None:
        self._client, self._name, self._prefix = client, name, prefix

    def get(self, key: str) -> Record | None:
        """Return the newest record of a key; None if the key is not in the table."""
        return next((row.record for row in self._read(key=key).records), None)

    def page(self, limit: int = READ_LIMIT, after: str | None = None) -> LatestPage:
        """Return at most `limit` keys with their newest records, from the start or after the page whose `next_after` is
        given. A page may have fewer and not be the last."""
        return self._read(limit=limit, after=after)

    def __iter__(self) -> Iterator[LatestRecord]:
        """Yield every key and its newest record."""
        after: str | None = None
        while True:
            page = self.page(READ_LIMIT_MAX, after)
            yield from page.records
            after = page.next_after
            if after is None:
                return

    def _read(self, **query: object) -> LatestPage:
        given = {"prefix": self._prefix or None, **query}
        text = urlencode({name: value for name, value in given.items() if value is not None})
        found = self._client.get(topic_path(self._name, f"/latest?{text}"))
        return LatestPage(
            [LatestRecord(row["key"], _parse_record(row)) for row in found["records"]], found.get("next_after")
        )


def _parse_record(fields: dict[str, Any]) -> Record:
    data = b64decode(fields["data"]) if fields.get("$encoding") == "base64" else fields["data"]
    return Record(fields["$seq"], fields["$ts"], data, fields.get("$tag"), fields.get("$node"), fields.get("meta"))


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


class KeyUser:
    """The user of the API key."""

    def __repr__(self) -> str:
        return "KEY_USER"


KEY_USER: Final = KeyUser()
ChannelUser: TypeAlias = str | Operator | KeyUser


class RemoteChannel:
    """One channel of a server.

    Args:
        user: the user to act as; by default the user of the key. OPERATOR needs the scope admin.
        token: the user's token, where the server has an authentication hook.
    """

    def __init__(self, client: Client, name: str, user: ChannelUser = KEY_USER, token: str | None = None) -> None:
        self._client, self.name, self.user = client, name, user
        self._identity_query: dict[str, str] = {}
        if isinstance(user, Operator):
            self._identity_query["operator"] = "true"
        elif not isinstance(user, KeyUser):
            self._identity_query["user"] = user
        if token is not None:
            self._identity_query["user_token"] = token

    def _path(self, verb: str = "", **query: object) -> str:
        parameters = self._identity_query | {name: str(value) for name, value in query.items() if value is not None}
        rest = f"?{urlencode(parameters)}" if parameters else ""
        return f"/v0/channels/{quote(self.name, safe='')}{verb}{rest}"

    # ── members ───────────────────────────────────────────────────────────────────────────────

    def join(self, **config: object) -> RemoteChannel:
        """Become a member. The first member creates the channel with the given settings and owns it."""
        self._client.post(self._path("/join"), {"config": config})
        return self

    def leave(self) -> str | None:
        """End the membership; return the owner afterwards, None if the channel was deleted."""
        owner: str | None = self._client.post(self._path("/leave"), {})["owner"]
        return owner

    def invite(self, user: str) -> None:
        """Make another user a member; owner only."""
        self._client.post(self._path("/join"), {"user": user})

    def kick(self, user: str) -> str | None:
        """End the membership of another user; return the owner afterwards. Owner only."""
        owner: str | None = self._client.post(self._path("/leave"), {"user": user})["owner"]
        return owner

    def members(self, page: int = 1, page_size: int = _MEMBERS_PAGE_SIZE) -> tuple[str, ...]:
        """Return one page of the members, sorted by name; pages count from 1. Members only."""
        return tuple(self._client.get(self._path("/members", page=page, page_size=page_size))["members"])

    def _all_members(self) -> tuple[str, ...]:
        names: tuple[str, ...] = ()
        page = 1
        while members := self.members(page):
            names, page = names + members, page + 1
            if len(members) < _MEMBERS_PAGE_SIZE:
                break
        return names

    # ── settings and access lists ─────────────────────────────────────────────────────────────

    def state(self) -> ChannelInfo:
        """Return owner, settings and members. Members only."""
        fields = self._client.get(self._path())
        return ChannelInfo(fields["channel"], fields["owner"], _parse_config(fields), self._all_members())

    def configure(self, **changes: object) -> ChannelConfig:
        """Create the channel, or change settings; return all of them. Owner only."""
        return _parse_config(self._client.put(self._path(), changes))

    def acl(self, kind: str) -> tuple[str, ...]:
        """Return one of the access lists (join, publish, read); owner only. An empty list allows every user."""
        return tuple(self._client.get(self._path("/acl"))["acl"][kind])

    def allow(self, kind: str, *entries: str) -> tuple[str, ...]:
        """Add users or domains to an access list and return it; owner only."""
        return self.change_acl(kind, add=entries)

    def disallow(self, kind: str, *entries: str) -> tuple[str, ...]:
        """Remove users or domains from an access list and return it; owner only."""
        return self.change_acl(kind, remove=entries)

    def change_acl(self, kind: str, *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> tuple[str, ...]:
        """Add and remove entries of an access list in one change, and return it; owner only."""
        body = {"kind": kind, "add": add, "remove": remove}
        return tuple(self._client.post(self._path("/acl"), body, retry_safe=True)["listed"])

    def delete(self) -> bool:
        """Delete the channel with its messages; owner only. Return whether there was one."""
        return bool(self._client.delete(self._path())["deleted"])

    # ── messages ──────────────────────────────────────────────────────────────────────────────

    def publish(self, payload: bytes, *, qos: int = 1) -> Ack:
        """Publish one message."""
        return self.publish_many([payload], qos=qos)

    def publish_many(self, payloads: Sequence[bytes], *, qos: int = 1) -> Ack:
        """Publish several messages with consecutive seqs. Without a response this raises InDoubt; the history shows
        whether they were published."""
        messages = [{"payload_base64": b64encode(payload).decode()} for payload in payloads]
        done = self._client.post(self._path("/publish"), {"messages": messages, "qos": qos})
        return Ack(
            done["channel"],
            done["last_seq"],
            done["count"],
            done["ts"],
            done["qos"],
            done["durable"],
            done["receivers"],
        )

    def history(
        self,
        first: int | None = None,
        *,
        last: int | None = None,
        newest: int | None = None,
        since_ms: int | None = None,
        until_ms: int | None = None,
        limit: int | None = None,
    ) -> HistoryPage:
        """Return a page of delivered messages: from a seq, the newest n, or from a time. For members who may read."""
        path = self._path(
            "/history", first=first, last=last, newest=newest, since=since_ms, until=until_ms, limit=limit
        )
        page = self._client.get(path)
        messages = [_parse_message(message) for message in page["messages"]]
        return HistoryPage(messages, page["next_seq"], page["first_seq"], page["last_seq"])

    def bounds(self) -> tuple[int, int]:
        """Return the first and the last seq of the history. For members who may read."""
        fields = self._client.get(self._path())
        if fields["first_seq"] is not None:
            return fields["first_seq"], fields["last_seq"]
        page = self.history(limit=1)  # raises the reason: no history, or not for this user
        return page.first_seq, page.last_seq

    def holes(self) -> list[tuple[int, int]]:
        """Return the ranges of seqs that a power cut lost before their sync, first and last of each; none for users
        who may not read."""
        return [(first, last) for first, last in self._client.get(self._path()).get("holes", [])]

    # ── fifo ──────────────────────────────────────────────────────────────────────────────────

    def push(self, payload: bytes) -> int:
        """Append one message to a fifo channel and return its seq; owner only."""
        body = {"payload_base64": b64encode(payload).decode()}
        seq: int = self._client.post(self._path("/push"), body)["seq"]
        return seq

    def pop(self) -> Message:
        """Remove and return the oldest message of a fifo channel. For members who may read."""
        return _parse_message(self._client.post(self._path("/pop"), {}))

    def clear(self) -> int:
        """Drop every waiting message of a fifo channel and return their number; owner only."""
        cleared: int = self._client.post(self._path("/clear"), {}, retry_safe=True)["cleared"]
        return cleared

    def __len__(self) -> int:
        """Return the number of waiting messages of a fifo channel; owner only."""
        waiting: int = self._client.get(self._path())["waiting"]
        return waiting

    def __bool__(self) -> bool:
        return True


def _parse_config(fields: dict[str, Any]) -> ChannelConfig:
    config = fields["config"]
    return ChannelConfig(**{name: config[name] for name in ChannelConfig.__struct_fields__})


def _parse_message(fields: dict[str, Any]) -> Message:
    text = fields.get("payload")
    payload = b64decode(fields["payload_base64"]) if text is None else text.encode()
    return Message(fields["channel"], fields["seq"], fields["ts"], fields["sender"], payload)
