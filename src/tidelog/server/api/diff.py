"""[hot] Reading behind a cursor, with a long poll where there is nothing yet."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final

import msgspec

from tidelog.engine import SEQ_MAX, Show, TextPage, Topic
from tidelog.engine.read import nodes_of
from tidelog.server.api.call import Call
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


def diff(call: Call) -> Answer | Coroutine[Any, Any, Answer]:
    body = call.body(_decoder, empty=requests.Diff())
    return behind(call, found(call.service.engine, call.topic), seq(body.from_seq), body)


def behind(
    call: Call, topic: Topic, from_seq: int, body: requests.Diff | requests.Fetch
) -> Answer | Coroutine[Any, Any, Answer]:
    """What lies behind a cursor, wherever that came from."""
    topic.touch()
    limit, bytes_max = budget(body.limit, body.max_batch_bytes)
    nodes = nodes_of(body.node)
    show = Show(tags=body.include_tags, meta=body.include_meta)
    look = partial(topic.read_json, from_seq, limit, bytes_max, nodes=nodes, show=show)
    wait_ms = min(body.wait_ms, WAIT_MS_MAX)
    if wait_ms:
        return _polled(call, topic, look, from_seq, wait_ms)
    if topic.is_quick(from_seq, 0 if nodes else limit, bytes_max):
        return answer_of(call, look())
    return _cold(call, look)


async def _cold(call: Call, look: partial[TextPage]) -> Response:
    return answer_of(call, await call.service.work(look))


async def _polled(call: Call, topic: Topic, look: partial[TextPage], from_seq: int, wait_ms: int) -> Response:
    """Look; where there is nothing, wait for a write and look again until the time is over."""
    service = call.service
    woken = asyncio.Event()
    until_ms = service.clock.monotonic_ms() + wait_ms
    service.bells.add(topic, woken.set)  # before the first look
    try:
        while True:
            woken.clear()
            page = look() if topic.is_quick(from_seq) else await service.work(look)
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
    """Put together by hand: the records are text already."""
    service = call.service
    service.metrics.read(call.topic, page.counts.rows, gap=page.gap is not None)
    gap = b"null" if page.gap is None else _encode(page.gap._asdict())
    scanned = sum(page.counts)
    head = b'{"topic":%b,"records":[' % _encode(call.topic)
    tail = (
        b'],"next_from_seq":%d,"head_seq":%d,"earliest_seq":%d,"caught_up":%b,"tombstone":%b,"lag":%d,'
        b'"performance":{"server_total_ms":%b,"records_scanned":%d}}'
    ) % (
        page.next_from_seq,
        page.head_seq,
        page.earliest_seq,
        b"true" if page.caught_up else b"false",
        gap,
        page.head_seq - page.next_from_seq,
        _encode(call.elapsed_ms()),
        scanned,
    )
    return Response(200, b"".join((head, page.text, tail)))
