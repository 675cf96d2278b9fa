"""[hot] Writes: JSON in, one batch, one answer when the topic's class allows it."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from tidelog.engine import Appended, Batch, EngineConfig, Token, Topic, TopicConfig, encode, texts
from tidelog.engine.append import check_key
from tidelog.engine.config import TopicType, check_topic_name
from tidelog.engine.encode import Columns
from tidelog.errors import BadInput, Error, TopicNotFound
from tidelog.server.api import bulk
from tidelog.server.api.auth import ADMIN, Principal
from tidelog.server.api.call import Call
from tidelog.server.api.plain import check_records, plain
from tidelog.server.api.problem import Problem
from tidelog.server.api.schedule import check_queue, schedule
from tidelog.server.api.topics import config_of, own_targets
from tidelog.server.gather import Part
from tidelog.server.http.seam import Answer, Response
from tidelog.server.service import Service
from tidelog.wire import requests
from tidelog.wire.requests import NULL

_FEW: Final = 1_000  # a write of more records is worth a batch of its own
LARGE_BYTES: Final = 256 << 10  # of a body that is looked at in a thread: 64 MiB take half a second and more
_ONE_CALL_BYTES: Final = 2 << 20
"""Of a body that is decoded by one compiled call, which holds the interpreter: 0.15 to 0.35 s for 60 MiB. The decoder
of larger ones calls Python code for every record, so other threads run in between."""
_decoder = requests.decoder(requests.Write)
_large_decoder = requests.decoder(requests.LargeWrite)
_encode = msgspec.json.Encoder().encode
_ADMIN = frozenset((ADMIN,))


class Done(msgspec.Struct, omit_defaults=True):
    """The answer to a write."""

    topic: str
    first_seq: int
    last_seq: int
    head_seq: int
    count: int
    created: bool
    deduped: bool
    durability: str  # what this ack means: the class of the topic, whatever a config in the write asked for
    performance: dict[str, float]
    seqs: list[int] | None = None


class _Asked(NamedTuple):
    """A write that was looked at."""

    body: requests.Write  # without its records where they are nothing but data
    config: TopicConfig | Problem | None
    batch: Batch
    key: str | None


def write(call: Call) -> Answer | Coroutine[Any, Any, Answer] | None:
    if call.request.pieces is not None:
        return bulk.write(call)
    topic = call.service.engine.find(call.topic)
    if len(call.request.body) > LARGE_BYTES:
        return _large(call, topic)
    if topic is not None and not topic.is_due and _went(call, topic):
        return None
    asked = _parsed(call, topic)
    if topic is None or topic.is_due:
        return _slowly(call, asked)
    _staged(call, topic, asked.batch, asked.key, insists=asked.body.disable_backpressure)
    return None


async def _large(call: Call, topic: Topic | None) -> Response:
    """A write whose body takes a while to look at: that is done in a thread. It waits for a checkpoint that is slower
    than the writers, as streamed writes do."""
    call.check_type()
    service = call.service
    is_admitted = await service.admit_large()
    asked = await service.work(partial(_parsed_any, call, topic))
    if not is_admitted:
        await service.refuse_behind(insists=asked.body.disable_backpressure)
    call.check_key()
    return await _slowly(call, asked)


def _parsed_any(call: Call, topic: Topic | None) -> _Asked:
    check_records(call.request.body, call.service.engine.limits)
    is_small = len(call.request.body) <= _ONE_CALL_BYTES
    if is_small and topic is not None and call.request.header(b"idempotency-key") is None:
        datas = plain(call.request.body, call.service.engine.limits)
        if datas is not None:
            return _Asked(requests.Write([]), None, Batch(datas, True), None)
    return _parsed(call, topic)


def _parsed(call: Call, topic: Topic | None) -> _Asked:
    """What a write asks for, checked. On any thread."""
    engine = call.service.engine
    is_small = len(call.request.body) <= _ONE_CALL_BYTES
    body = call.body(_decoder) if is_small else call.body(_large_decoder)
    config = config_in(call.topic, body.config)
    if topic is None and config is not None and not call.principal.may(_ADMIN):
        raise Problem(
            "forbidden", "a write that creates a topic with a config needs the scope admin", {"topic": call.topic}
        )
    encode.check_count(engine.limits, len(body.records))
    key = key_of(call, body.idempotency_key)
    if schedule(body.records, call.service.now_ms()):
        check_queue(call.topic, type_of(config) if topic is None else topic.config.type)
    return _Asked(body, config, batch_of(engine.limits, body.records, body.node, call.request.body), key)


def _went(call: Call, topic: Topic) -> bool:
    """Whether this was a plain write, and is on its way: a few records go along with others of this turn."""
    request, limits = call.request, call.service.engine.limits
    if request.header(b"idempotency-key") is not None:
        return False
    call.check_type()
    datas = plain(request.body, limits)
    if datas is None:
        return False
    call.durability = topic.config.durability
    if len(datas) <= _FEW and topic.is_open:
        call.service.gather.add(topic, datas, len(request.body), _answered, call)
    else:
        _staged(call, topic, Batch(datas, True), None)
    return True


def _answered(done: Appended | Error, parts: list[Part[Call]]) -> None:
    for call, offset, count in parts:
        if isinstance(done, Error):
            call.fail(done)
        else:
            call.service.metrics.wrote(call.topic, count)
            call.reply(answer_of(call, done.part(offset, count), created=False))


def config_in(topic: str, given: msgspec.Raw) -> TopicConfig | Problem | None:
    """The config of a write that may create its topic, where there is one. Its types are held to, needed or not; what
    is wrong with the name in it is a problem for whoever needs it, behind all other checks."""
    text = bytes(given)
    try:
        return None if text == b"null" else config_of(topic, text)
    except Problem as problem:
        if problem.detail and isinstance(problem.detail.get("dead_letter"), str):
            return problem
        raise


def type_of(config: TopicConfig | Problem | None) -> TopicType:
    """Of the topic that would be made with it."""
    return config.type if isinstance(config, TopicConfig) else TopicConfig().type


def key_of(call: Call, given: str | None) -> str | None:
    """The idempotency key: the body's, or else the header's."""
    header = call.request.header(b"idempotency-key") if given is None else None
    key = given if header is None else header.decode("utf-8", "replace")
    check_key(key)
    return key


def _staged(call: Call, topic: Topic, batch: Batch, key: str | None, *, insists: bool = False) -> None:
    call.durability = topic.config.durability
    call.service.admission.stage(topic, batch, key, partial(_under_way, call), insists=insists)


def _under_way(call: Call, token: Token[Appended] | Error, held_us: int) -> None:
    if isinstance(token, Error):
        call.fail(token)
    else:
        call.service.commits.when_done(token, partial(_told, call, held_us))


def _told(call: Call, held_us: int, token: Token[Appended]) -> None:
    try:
        done = token.wait()  # its outcome is known
    except Error as error:
        call.fail(error)
        return
    call.service.metrics.wrote(call.topic, 0 if done.deduped else done.count)
    call.reply(answer_of(call, done, held_us, created=False))


def answer_of(call: Call, done: Appended, held_us: int = 0, *, created: bool) -> Response:
    seqs = call.query.flag("return_seqs", True)
    body = told(call.topic, call.durability, done, call.elapsed_ms(), held_us, created=created, seqs=seqs)
    return Response(201 if created else 200, body)


def told(
    topic: str,
    durability: str,
    done: Appended,
    elapsed_ms: float,
    held_us: int = 0,
    *,
    created: bool = False,
    seqs: bool = True,
) -> bytes:
    """The body of the answer to a write."""
    said = Done(
        topic,
        done.first_seq,
        done.last_seq,
        done.head_seq,
        done.count,
        created,
        done.deduped,
        durability,
        performance_of(elapsed_ms, done, held_us),
        list(done.seqs) if seqs else None,
    )
    return _encode(said)


def told_all(
    topic: str,
    durability: str,
    done: Appended,
    offset: int,
    counts: Sequence[int],
    took_us: Sequence[int],
    *,
    kernel: bool,
) -> list[bytes]:
    """`told` for many who have a part in one write, one behind the other from `offset` on: how many records are each
    one's, and how long it took."""
    start = b'{"topic":%b,"first_seq":' % _encode(topic)
    took = _encode(performance_of(0.0, done)).removeprefix(b'{"server_total_ms":0.0')
    said = b',"created":false,"deduped":%b,"durability":%b' % (_encode(done.deduped), _encode(durability))
    middle = said + b',"performance":{"server_total_ms":'
    head = b',"head_seq":%d,"count":' % done.head_seq
    written = _compiled if kernel else _written
    return written(done.first_seq + offset, counts, took_us, start, head, middle, took)


def _written(
    first: int, counts: Sequence[int], took_us: Sequence[int], start: bytes, head: bytes, middle: bytes, took: bytes
) -> list[bytes]:
    """What the kernel's `written` makes."""
    made = []
    for count, us in zip(counts, took_us, strict=True):
        last = first + count - 1
        ms, seqs = repr(us / 1000).encode(), _encode(list(range(first, last + 1)))
        made.append(
            b'%b%d,"last_seq":%d%b%d%b%b%b,"seqs":%b}' % (start, first, last, head, count, middle, ms, took, seqs)
        )
        first = last + 1
    return made


try:
    from tidelog.kernel import written as _compiled
except ImportError:  # built where there was no compiler
    _compiled = _written


def performance_of(elapsed_ms: float, done: Appended, held_us: int = 0) -> dict[str, float]:
    """`held_us`: how long it waited to be let in."""
    took = {"server_total_ms": elapsed_ms}
    if not done.deduped:
        took["wal_append_ms"], took["fsync_ms"] = done.write_us / 1000, done.sync_us / 1000
        held_us += done.held_us
    if held_us:
        took["throttle_wait_ms"] = held_us / 1000
    return took


async def _slowly(call: Call, asked: _Asked) -> Response:
    """A write that is large, or first has to make its topic, or has to wait until old records are gone for good."""
    service, batch = call.service, asked.batch
    topic, created = await ensure(service, call.topic, asked.body.create, asked.config, batch, call.principal)
    call.durability = topic.config.durability
    token, held_us = await service.admission.staged(
        topic, batch, asked.key, insists=created or asked.body.disable_backpressure, work=service.work
    )
    done = await service.commits.outcome(token)
    service.metrics.wrote(call.topic, 0 if done.deduped else done.count)
    # Another call with its key may have been quicker to write to the topic that this one has made.
    return answer_of(call, done, held_us, created=created and not done.deduped)


async def ensure(
    service: Service,
    name: str,
    create: bool | None,
    config: TopicConfig | Problem | None,
    first: Batch | Columns,
    principal: Principal,
) -> tuple[Topic, bool]:
    """The topic to write to, made where that is asked for. A write that would be refused makes none."""
    engine = service.engine
    topic = engine.find(name)
    if topic is not None:
        return topic, False
    wanted = config if isinstance(config, TopicConfig) else TopicConfig()
    if not (wanted.auto_create if create is None else create):
        raise TopicNotFound(name)
    check_topic_name(name)
    if isinstance(config, Problem):
        raise config
    own_targets(principal, wanted, None)
    return await service.work(lambda: engine.ensure(name, wanted, first))


def batch_of(limits: EngineConfig, records: list[requests.Record], node: str | None, body: bytes) -> Batch:
    """The records of a body as one batch. Their data is the text that came, without blanks between its words."""
    datas = [bytes(record.data) for record in records]
    if texts.is_loose(body):
        datas = list(map(texts.compact, datas))
    texts.check_depths(body, datas)
    json: bool | list[bool] = True
    if not all(record.encoding is None for record in records):
        json = [record.encoding is None for record in records]
        datas = [
            data if is_json else _bytes(record, data)
            for record, data, is_json in zip(records, datas, json, strict=True)
        ]
    tags = [record.tag for record in records]
    nodes: list[str | None] = [node if record.node is None else record.node for record in records]
    metas = [None if record.meta == NULL else record.meta for record in records]
    return encode.from_texts(
        limits,
        datas,
        json,
        tags if any(tag is not None for tag in tags) else None,
        nodes if any(name is not None for name in nodes) else None,
        metas if any(meta is not None for meta in metas) else None,
    )


def _bytes(record: requests.Record, data: bytes) -> bytes:
    if record.encoding != "base64":
        raise BadInput(f"$encoding is base64 or absent, not {record.encoding!r:.80}; nothing was written")
    try:
        return b64decode(msgspec.json.decode(data, type=str), validate=True)
    except ValueError as error:
        raise BadInput(f"data is not base64 ({error}); nothing was written") from None
