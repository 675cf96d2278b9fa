"""[hot] Reading behind a cursor, with a long poll where there is nothing yet."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, NamedTuple

import msgspec

from tidelog.engine import SEQ_MAX, Show, TextPage, Topic
from tidelog.engine.read import Nodes, nodes_of
from tidelog.server.api.call import Call
from tidelog.server.api.problem import Problem
from tidelog.server.api.topics import found
from tidelog.server.http.seam import Answer, Response
from tidelog.wire import requests

LIMIT: Final = 256
LIMIT_MAX: Final = 1_000
BYTES: Final = 1 << 20
BYTES_MAX: Final = 8 << 20
WAIT_MS_MAX: Final = 30_000
_decoder = requests.decoder(requests.Diff)
_encode = msgspec.json.Encoder().encode


def budget(limit: int, bytes_max: int) -> tuple[int, int]:
    """How many records and bytes a page may have; 0 is the default."""
    return min(limit or LIMIT, LIMIT_MAX), min(bytes_max or BYTES, BYTES_MAX)


def seq(given: int) -> int:
    """A cursor within what the engine can count: further ahead is ahead as well."""
    return min(given, SEQ_MAX)


def is_strong(call: Call) -> bool:
    """Whether the query asks for records that survive a power cut, and no others."""
    named = call.query.text("consistency") or "eventual"
    if named not in ("eventual", "strong"):
        raise Problem("invalid_request", f"consistency is eventual or strong, not {named[:80]!r}; nothing was read")
    return named == "strong"


def diff(call: Call) -> Answer | Coroutine[Any, Any, Answer]:
    body = call.body(_decoder, empty=requests.Diff())
    return behind(call, found(call.service.engine, call.topic), seq(body.from_seq), body)


class Look(NamedTuple):
    """One page, as it was asked for."""

    topic: Topic
    from_seq: int
    limit: int
    bytes_max: int
    nodes: Nodes
    show: Show

    @property
    def is_quick(self) -> bool:
        """Whether nobody has to wait for it."""
        return self.topic.is_quick(self.from_seq, 0 if self.nodes else self.limit, self.bytes_max)

    def now(self) -> TextPage | None:
        """The page, where nobody has to wait for it."""
        found = self.topic.at_hand(self.from_seq, self.limit, self.bytes_max)
        return found if found is not None or not self.is_quick else self.page()

    def page(self) -> TextPage:
        return self.topic.read_json(self.from_seq, self.limit, self.bytes_max, nodes=self.nodes, show=self.show)


def look_of(topic: Topic, from_seq: int, body: requests.Diff | requests.Fetch) -> Look:
    limit, bytes_max = budget(body.limit, body.max_batch_bytes)
    show = Show(tags=body.include_tags, meta=body.include_meta)
    return Look(topic, from_seq, limit, bytes_max, nodes_of(body.node), show)


def behind(
    call: Call, topic: Topic, from_seq: int, body: requests.Diff | requests.Fetch
) -> Answer | Coroutine[Any, Any, Answer]:
    """What lies behind a cursor, wherever that came from."""
    topic.touch()
    look = look_of(topic, from_seq, body)
    wait_ms = min(body.wait_ms, WAIT_MS_MAX)
    if wait_ms:
        return _polled(call, look, wait_ms)
    page = look.now()
    return _cold(call, look) if page is None else answer_of(call, page)


async def _cold(call: Call, look: Look) -> Response:
    return answer_of(call, await call.service.work(look.page))


async def _polled(call: Call, look: Look, wait_ms: int) -> Response:
    """Look; where there is nothing, wait for a write and look again until the time is over."""
    service, topic = call.service, look.topic
    woken = asyncio.Event()
    until_ms = service.clock.monotonic_ms() + wait_ms
    service.bells.add(topic, woken.set)  # before the first look
    try:
        while True:
            woken.clear()
            call.check_key()
            page = look.page() if topic.is_quick(look.from_seq) else await service.work(look.page)
            left_ms = until_ms - service.clock.monotonic_ms()
            if page.text or page.gap or not page.caught_up or left_ms <= 0 or service.stopping.is_set():
                return answer_of(call, page)
            try:
                async with asyncio.timeout(left_ms / 1000):
                    await woken.wait()
            except TimeoutError:
                until_ms = service.clock.monotonic_ms()  # a last look: a topic that is put off does not ring
    finally:
        service.bells.remove(topic, woken.set)


def answer_of(call: Call, page: TextPage) -> Response:
    call.service.metrics.read(call.topic, page.counts.rows, gap=page.gap is not None)
    return Response(200, b"".join(pieces(call.topic, page, call.elapsed_ms())))


def pieces(name: str, page: TextPage, took_ms: float) -> tuple[bytes, bytes, bytes]:
    """The body of an answer, put together by hand: the records are text already."""
    head = b'{"topic":%b,"records":[' % _encode(name)
    tail = (
        b'],"next_from_seq":%d,"head_seq":%d,"earliest_seq":%d,"caught_up":%b,"tombstone":%b,"lag":%d,'
        b'"performance":{"server_total_ms":%b,"records_scanned":%d}}'
    ) % (
        page.next_from_seq,
        page.head_seq,
        page.earliest_seq,
        b"true" if page.caught_up else b"false",
        b"null" if page.gap is None else _encode(page.gap._asdict()),
        page.head_seq - page.next_from_seq,
        _encode(took_ms),
        sum(page.counts),
    )
    return head, page.text, tail
