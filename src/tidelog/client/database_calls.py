"""Calls of a database as a whole: topics by name, routers, gap log, erasures, tiers, checkpoints, backups. No I/O."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from itertools import islice
from typing import Any, Final

import msgspec

from tidelog.api_types import encode_page_cursor
from tidelog.channels import OPERATOR
from tidelog.client.channel_calls import KEY_USER, ChannelUser
from tidelog.client.core import Call, Request
from tidelog.client.topic_calls import TopicCalls, read_gaps
from tidelog.client.wire import encode_json, parse_topic_info, quote_name
from tidelog.engine import Corruption, GapEntries, HealthState, TaskState, TopicConfig, TopicInfo
from tidelog.engine.backup_target import BackupInfo
from tidelog.engine.batch_encoder import check_int, check_text
from tidelog.engine.erase import ChainCheck, ErasureReceipt
from tidelog.engine.gap_log import GAPS_LIMIT_DEFAULT
from tidelog.engine.rewrite import RewriteResult
from tidelog.engine.routing.router import Guarantee, RouterState, check_router_name
from tidelog.engine.tiers import Moved, SegmentPlace, TierStatus
from tidelog.errors import Forbidden, RouterNotFound, Unavailable, Unsupported
from tidelog.formats.frame import SEQ_MAX
from tidelog.times import Time

_PAGE_ROWS: Final = 1_000
_LONG_WORK_S: Final = 3_600.0


def _get(path: str, **query: object) -> Call[dict[str, Any]]:
    return (yield Request("GET", path, query=query, retry_safe=True)).json()


def _post(path: str, body: object, *, retry_safe: bool = True, wait_s: float = 0.0) -> Call[dict[str, Any]]:
    return (yield Request("POST", path, encode_json(body), retry_safe=retry_safe, wait_s=wait_s)).json()


def _list_rows(
    path: str, rows: str, limit: int | None = None, cursor: str | None = None, **query: object
) -> Generator[Request, Any, list[dict[str, Any]]]:
    """Read rows of a list, page by page."""
    found: list[dict[str, Any]] = []
    while limit is None or len(found) < limit:
        size = _PAGE_ROWS if limit is None else min(limit - len(found), _PAGE_ROWS)
        page = yield from _get(path, page_size=size, cursor=cursor, **query)
        found += page[rows]
        cursor = page.get("next_cursor")
        if not cursor:
            break
    return found


class DatabaseCalls:
    """The calls of the database of a server."""

    # ── topics ────────────────────────────────────────────────────────────────────────────────

    def check_server(self) -> Call[str]:
        """Check that a Tidelog server is there and knows the key; return its version."""
        try:
            body = yield from _get("/v0/health")
        except Unsupported:
            raise Unavailable(
                "the server responds, but there is no Tidelog at this address; check it: an address has no path, "
                "except where an application has mounted Tidelog under one"
            ) from None
        if "version" not in body or "uptime_ms" not in body:
            raise Unavailable("the server responds, but is no Tidelog server; check the address")
        try:
            yield from _get("/v0/topics", page_size=1)
        except Forbidden as error:
            if error.code == "unauthorized":
                raise  # a key without the scope read may still write
        return str(body["version"])

    def configure(self, name: str, fields: Mapping[str, object]) -> Call[bool]:
        """Set the whole config of a topic; return whether it was created."""
        TopicConfig.make(fields)
        return (yield from TopicCalls(name).put_config(dict(fields)))

    def names(self) -> Call[list[str]]:
        rows = yield from _list_rows("/v0/topics", "topics")
        return [row["topic"] for row in rows]

    def topics(self, prefix: str = "", *, after: str = "", limit: int | None = None) -> Call[list[TopicInfo]]:
        check_text("prefix", prefix)
        check_text("after", after)
        if limit is not None:
            check_int("limit", limit, 1, SEQ_MAX)
        cursor = encode_page_cursor(after) if after else None
        rows = yield from _list_rows("/v0/topics", "topics", limit, cursor, prefix=prefix, details=True)
        return list(map(parse_topic_info, islice(rows, limit)))

    def drop(self, name: str, *, if_empty: bool = False) -> Call[bool]:
        request = Request("DELETE", TopicCalls(name).path(), query={"if_empty": if_empty}, retry_safe=True)
        return bool((yield request).json()["deleted"])

    def gaps(
        self,
        topic: str | None = None,
        from_ms: Time | None = None,
        limit: int = GAPS_LIMIT_DEFAULT,
        *,
        after_seq: int = 0,
    ) -> Call[GapEntries]:
        check_int("after_seq", after_seq, 0, SEQ_MAX)
        path = "/v0/gaps" if topic is None else TopicCalls(topic).path("/gaps")
        return (yield from read_gaps(path, from_ms, limit, after_seq))

    def rewrite(self, name: str, *, force: bool = False) -> Call[RewriteResult]:
        return (yield from TopicCalls(name).rewrite(force=force))

    def erase(self, name: str, *, match: object = None, seqs: list[int] | None = None) -> Call[ErasureReceipt]:
        return (yield from TopicCalls(name).erase(match=match, seqs=seqs))

    def erasures(self) -> Call[list[ErasureReceipt]]:
        rows = (yield from _get("/v0/erasures"))["erasures"]
        return [msgspec.convert(row, ErasureReceipt) for row in rows]

    def verify_erasures(self, receipt: ErasureReceipt | None = None) -> Call[ChainCheck]:
        body = {} if receipt is None else {"receipt": msgspec.to_builtins(receipt)}
        found = yield from _post("/v0/erasures/verify", body)
        return ChainCheck(found["receipts"], tuple(found["problems"]))

    # ── routers ───────────────────────────────────────────────────────────────────────────────

    def router(
        self,
        name: str,
        source: str,
        dest: str,
        *,
        preserve_node: bool = True,
        preserve_tag: bool = True,
        create_dest: bool = True,
        filter: object = None,
        allow_cycle: bool = False,
        guarantee: Guarantee = "at_least_once",
    ) -> Call[RouterState]:
        check_router_name(name)
        body = {
            "source": source,
            "dest": dest,
            "preserve_node": preserve_node,
            "preserve_tag": preserve_tag,
            "create_dest": create_dest,
            "filter": filter,
            "allow_cycle": allow_cycle,
            "guarantee": guarantee,
        }
        made = (yield Request("PUT", _router_path(name), encode_json(body), retry_safe=True)).json()
        return _parse_router({"forwarded_total": (yield from _get(_router_path(name)))["forwarded_total"], **made})

    def find_router(self, name: str) -> Call[RouterState | None]:
        try:
            return _parse_router((yield from _get(_router_path(name))))
        except RouterNotFound:
            return None

    def routers(self, prefix: str = "", source: str | None = None, dest: str | None = None) -> Call[list[RouterState]]:
        rows = yield from _list_rows("/v0/routers", "routers", prefix=prefix, source=source, dest=dest, details=True)
        return list(map(_parse_router, rows))

    def drop_router(self, name: str) -> Call[bool]:
        return bool((yield Request("DELETE", _router_path(name), retry_safe=True)).json()["deleted"])

    # ── background work ───────────────────────────────────────────────────────────────────────

    def checkpoint(self) -> Call[None]:
        yield from _post("/v0/checkpoint", {}, wait_s=_LONG_WORK_S)

    def health(self) -> Call[HealthState]:
        found = yield from _get("/v0/health/details")
        tasks = tuple(TaskState(*(row[name] for name in TaskState._fields)) for row in found["tasks"])
        return HealthState(
            found["ok"],
            tasks,
            found["checkpoint_age_ms"],
            found["uncovered_bytes"],
            tuple(found["lagging"]),
            found["corruptions"],
            tuple(_parse_corruption(row) for row in found["corrupt"]),
        )

    def corruption(self) -> Call[tuple[Corruption, ...]]:
        return tuple(_parse_corruption(row) for row in (yield from _get("/v0/health/details"))["corrupt"])

    def tier_status(self) -> Call[TierStatus]:
        found = yield from _get("/v0/tiers")
        return TierStatus(*(found[name] for name in TierStatus._fields))

    def segment_places(self, topic: str | None = None) -> Call[list[SegmentPlace]]:
        rows = (yield from _get("/v0/tiers/segments", topic=topic))["segments"]
        return [SegmentPlace(*(row[name] for name in SegmentPlace._fields)) for row in rows]

    def relocate(self, topic: str | None = None, *, keep_segments: int | None = None) -> Call[Moved]:
        body = {"topic": topic, "keep_segments": keep_segments}
        return _parse_moved((yield from _post("/v0/tiers/relocate", body, wait_s=_LONG_WORK_S)))

    def recall(self, topic: str | None = None, *, first_seq: int = 0, last_seq: int | None = None) -> Call[Moved]:
        body = {"topic": topic, "first_seq": first_seq, "last_seq": last_seq}
        return _parse_moved((yield from _post("/v0/tiers/recall", body, wait_s=_LONG_WORK_S)))

    def claim_cold_store(self) -> Call[None]:
        yield from _post("/v0/tiers/claim", {})

    def backup(
        self,
        target: str | None = None,
        *,
        incremental: bool = False,
        link: bool = True,
        accept_damage: bool = False,
    ) -> Call[BackupInfo]:
        body = {"target": target, "incremental": incremental, "link": link, "accept_damage": accept_damage}
        done = yield from _post("/v0/backups", body, retry_safe=False, wait_s=_LONG_WORK_S)
        return parse_backup(done["backup"])

    # ── channels ──────────────────────────────────────────────────────────────────────────────

    def channel_names(self) -> Call[list[str]]:
        rows, _, _ = yield from self.channel_rows()
        return [row["channel"] for row in rows]

    def channel_rows(self) -> Call[tuple[list[dict[str, Any]], dict[str, str], ChannelUser]]:
        """Return all channels, the reasons for unreadable ones, and the user to read them as: the operator, or where
        the key has no scope admin KEY_USER, which lists the channels of that user."""
        try:
            first = yield from _get("/v0/channels", page_size=1, operator=True)
        except Forbidden:
            return (yield from _list_rows("/v0/channels", "channels")), {}, KEY_USER
        rows = yield from _list_rows("/v0/channels", "channels", operator=True)
        return rows, first["unreadable"], OPERATOR


def parse_backup(row: dict[str, Any]) -> BackupInfo:
    return BackupInfo(**{**row, "damaged": tuple(row["damaged"]), "external": tuple(row["external"])})


def _router_path(name: str) -> str:
    return f"/v0/routers/{quote_name('the name of a router', name)}"


def _parse_router(row: dict[str, Any]) -> RouterState:
    tag_filter = row["filter"]
    return RouterState(
        row["router"],
        row["source"],
        row["dest"],
        row["preserve_node"],
        row["preserve_tag"],
        None if tag_filter is None else tuple(tag_filter),
        row["allow_cycle"],
        row["guarantee"],
        row["forwarded_total"],
        row.get("created", False),
    )


def _parse_corruption(row: dict[str, Any]) -> Corruption:
    return Corruption(*(row[name] for name in Corruption._fields))


def _parse_moved(row: dict[str, Any]) -> Moved:
    return Moved(
        row["segments"], row["bytes"], tuple((each["topic"], each["base"], each["reason"]) for each in row["failed"])
    )
