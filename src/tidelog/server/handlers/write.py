"""[hot] The body of a plain write: `{"records":[{"data":…},…]}` and nothing else, in the text that will be stored.

body ──► the kernel, one pass ──► the text of each record        where every byte is as it will be stored
              └── anything else ──► its twin in Python, which also knows blanks, escapes, exponents, depth

[policy] When a job may run and how urgent it is: fields of a record on the wire, kept in its meta.

    {"data":…,"delay_ms":5000,"priority":7}  ──►  {"data":…,"meta":{"$run_at_ms":1700000005000,"$priority":7}}

Meta is what a record has anyway, so a job needs no format of its own: it is copied, exported and read as any other.

[hot] Writes: JSON in, one batch, one answer when the topic's class allows it.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw
from msgspec.json import Encoder

from tidelog import api_types, native
from tidelog.api_types import JSON_NULL, RecordToWrite
from tidelog.engine import (
    Appended,
    Batch,
    CommitFuture,
    EngineConfig,
    Topic,
    TopicConfig,
    batch_encoder,
    json_codec,
)
from tidelog.engine.append import check_idempotency_key
from tidelog.engine.batch_encoder import ArrowBatch
from tidelog.engine.config import TopicType, check_topic_name
from tidelog.engine.json_codec import decode_meta
from tidelog.engine.queues.jobs import PRIORITY_KEY, PRIORITY_MAX, RUN_AT_KEY
from tidelog.errors import BadInput, Error, TopicNotFound
from tidelog.http.interface import AnyResponse, Response
from tidelog.server.auth import ADMIN, Principal
from tidelog.server.errors import ApiError
from tidelog.server.handlers.topics import check_dead_letter_allowed, parse_topic_config
from tidelog.server.request import RequestContext
from tidelog.server.service import Service
from tidelog.server.write_pipeline import BatchSlice

_SLICE_BYTES: Final = 1 << 20  # searched at once
_BRACES_PER_RECORD: Final = 16
_KEY_BYTES_MAX: Final = 64  # of "records" with every letter escaped: 44
_TOKEN: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{}]', re.DOTALL)
_decode_plain_write = api_types.json_decoder(api_types.PlainWrite).decode


def check_records(body: bytes, limits: EngineConfig) -> None:
    """Refuse a body with far too many records before it is decoded: one call of the decoder holds the interpreter, and
    each record takes 16 times its text. Five million of them in 60 MiB took 1.6 s and 980 MiB.

    Every record has a brace. Bodies with few braces are decoded at once; the others are scanned up to the record that
    is one too many, and other threads run between two tokens."""
    most = limits.batch_records_max
    braces = 0
    for start in range(0, len(body), _SLICE_BYTES):
        braces += body.count(b"{", start, start + _SLICE_BYTES)
    if braces <= _BRACES_PER_RECORD * most:
        return
    depth = count = 0
    key, in_records = b"", False
    for token in _TOKEN.finditer(body):
        found = token[0]
        if found[:1] == b'"':
            if depth == 1:
                key = found
        elif found in (b"}", b"]"):
            depth -= 1
        else:
            if depth == 1:
                in_records = found == b"[" and _is_records(key)
            elif depth == 2 and in_records:
                count += 1
                if count > most:
                    batch_encoder.check_count(limits, count)
            depth += 1


def _is_records(key: bytes) -> bool:
    if b"\\" not in key:
        return key == b'"records"'
    try:
        return len(key) <= _KEY_BYTES_MAX and msgspec.json.decode(key) == "records"
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def plain_records(body: bytes, limits: EngineConfig) -> list[bytes] | None:
    """The records of a body that are nothing but data; None for all else, and for what has to be refused."""
    try:
        if not body.isascii():
            body.decode()
    except UnicodeDecodeError:
        return None
    most = limits.batch_records_max
    datas = native.parse_plain_body(body, most)
    if datas is None:
        datas = _plain_records_py(body, most)
    if datas is None or (len(body) > limits.record_bytes_max and max(map(len, datas)) > limits.record_bytes_max):
        return None
    return datas


def plain_records_of(bodies: list[bytes], limits: EngineConfig, records_max: int) -> tuple[list[bytes], list[int]]:
    """The records of all of them, and how many are each one's: 0 where it is not plain or they are more than `most`."""
    records_max = min(records_max, limits.batch_records_max)
    found = native.parse_plain_bodies(bodies, records_max, limits.record_bytes_max)
    if found is not None:
        return found
    datas: list[bytes] = []
    counts: list[int] = []
    for body in bodies:
        try:
            of_one = plain_records(body, limits)
        except BadInput:
            of_one = None
        taken = of_one if of_one is not None and len(of_one) <= records_max else []
        datas += taken
        counts.append(len(taken))
    return datas, counts


def _plain_records_py(body: bytes, records_max: int) -> list[bytes] | None:
    try:
        records = _decode_plain_write(body).records
    except (msgspec.DecodeError, RecursionError):
        return None
    if not 0 < len(records) <= records_max:
        return None
    datas: list[bytes] = [bytes(record.data) for record in records]
    if json_codec.may_compact(body):
        datas = [json_codec.compact_json(data) for data in datas]
    json_codec.check_depths(body, datas)
    return datas


_encode_meta = Encoder().encode
RUN_AT_MS_MAX: Final = 253_402_300_799_999  # the year 9999


def is_scheduled(record: RecordToWrite) -> bool:
    return record.run_at_ms is not None or record.delay_ms is not None or record.priority is not None


def move_schedule_to_meta(records: Sequence[RecordToWrite], now_ms: int) -> bool:
    """Move what says when into meta; whether any of them said so. Raises where it cannot be meant."""
    found = False
    for record in records:
        if is_scheduled(record):
            found = True
            record.meta = Raw(
                _encode_meta({**(decode_meta(bytes(record.meta)) or {}), **_schedule_meta(record, now_ms)})
            )
    return found


def _schedule_meta(record: RecordToWrite, now_ms: int) -> dict[str, int]:
    run_at_ms, delay_ms, priority = record.run_at_ms, record.delay_ms, record.priority
    made: dict[str, int] = {}
    if run_at_ms is not None and delay_ms is not None:
        raise BadInput("a job has run_at_ms or delay_ms, not both; nothing was written, leave one out")
    if run_at_ms is not None:
        made[RUN_AT_KEY] = _check_range("run_at_ms", run_at_ms, 0, RUN_AT_MS_MAX)
    if delay_ms is not None:
        made[RUN_AT_KEY] = now_ms + _check_range("delay_ms", delay_ms, 0, RUN_AT_MS_MAX - now_ms)
    if priority is not None:
        made[PRIORITY_KEY] = _check_range("priority", priority, -PRIORITY_MAX, PRIORITY_MAX)
    return made


def _check_range(name: str, value: int, minimum: int, maximum: int) -> int:
    if not minimum <= value <= maximum:
        raise BadInput(f"{name} is a whole number from {minimum} to {maximum}, not {value!r:.40}; nothing was written")
    return value


def check_is_queue(topic: str, kind: str) -> None:
    """Refuse a schedule for what is no queue: a log hands nothing out, so nothing would come of it."""
    if kind != "queue":
        raise BadInput(
            f"{topic} is a log: run_at_ms, delay_ms and priority are for jobs of a queue; nothing was written, leave "
            "them out or write to a queue"
        )


_BATCHED_RECORDS_MAX: Final = 1_000  # a write of more records is worth a batch of its own
BLOCKING_PARSE_BYTES: Final = 256 << 10  # of a body that is looked at in a thread: 64 MiB take half a second and more
_ONE_CALL_BYTES: Final = 2 << 20
"""Of a body that is decoded by one compiled call, which holds the interpreter: 0.15 to 0.35 s for 60 MiB. The decoder
of larger ones calls Python code for every record, so other threads run in between."""
_write_decoder = api_types.json_decoder(api_types.Write)
_large_decoder = api_types.json_decoder(api_types.LargeWrite)
_encode = msgspec.json.Encoder().encode
_ADMIN_SCOPE = frozenset((ADMIN,))


class WriteResponse(msgspec.Struct, omit_defaults=True):
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


class _ParsedWrite(NamedTuple):
    """A write that was looked at."""

    body: api_types.Write  # without its records where they are nothing but data
    config: TopicConfig | ApiError | None
    batch: Batch
    key: str | None


def write_records(context: RequestContext) -> AnyResponse | Coroutine[Any, Any, AnyResponse] | None:
    topic = context.service.engine.find(context.topic)
    if len(context.request.body) > BLOCKING_PARSE_BYTES:
        return _write_large(context, topic)
    if topic is not None and not topic.needs_expiry and _try_batched_write(context, topic):
        return None
    asked = _parse_write(context, topic)
    if topic is None or topic.needs_expiry:
        return _write_async(context, asked)
    _submit(context, topic, asked.batch, asked.key, wait_if_full=asked.body.disable_backpressure)
    return None


async def _write_large(context: RequestContext, topic: Topic | None) -> Response:
    """A write whose body takes a while to look at: that is done in a thread. It waits for a checkpoint that is slower
    than the writers, as streamed writes do."""
    context.check_json_type()
    service = context.service
    is_admitted = await service.admit_large()
    asked = await service.run_blocking(partial(_parse_large, context, topic))
    if not is_admitted:
        await service.reject_large(wait_if_full=asked.body.disable_backpressure)
    context.check_key()
    return await _write_async(context, asked)


def _parse_large(context: RequestContext, topic: Topic | None) -> _ParsedWrite:
    check_records(context.request.body, context.service.engine.limits)
    is_small = len(context.request.body) <= _ONE_CALL_BYTES
    if is_small and topic is not None and context.request.header(b"idempotency-key") is None:
        datas = plain_records(context.request.body, context.service.engine.limits)
        if datas is not None:
            return _ParsedWrite(api_types.Write([]), None, Batch(datas, True), None)
    return _parse_write(context, topic)


def _parse_write(context: RequestContext, topic: Topic | None) -> _ParsedWrite:
    """What a write asks for, checked. On any thread."""
    engine = context.service.engine
    is_small = len(context.request.body) <= _ONE_CALL_BYTES
    body = context.decode_body(_write_decoder) if is_small else context.decode_body(_large_decoder)
    config = parse_write_config(context.topic, body.config)
    if topic is None and config is not None and not context.principal.has_scopes(_ADMIN_SCOPE):
        raise ApiError(
            "forbidden", "a write that creates a topic with a config needs the scope admin", {"topic": context.topic}
        )
    batch_encoder.check_count(engine.limits, len(body.records))
    key = idempotency_key(context, body.idempotency_key)
    if move_schedule_to_meta(body.records, context.service.now_ms()):
        check_is_queue(context.topic, topic_type(config) if topic is None else topic.config.type)
    return _ParsedWrite(body, config, build_batch(engine.limits, body.records, body.node, context.request.body), key)


def _try_batched_write(context: RequestContext, topic: Topic) -> bool:
    """Whether this was a plain write, and is on its way: a few records go along with others of this turn."""
    request, limits = context.request, context.service.engine.limits
    if request.header(b"idempotency-key") is not None:
        return False
    context.check_json_type()
    datas = plain_records(request.body, limits)
    if datas is None:
        return False
    context.durability = topic.config.durability
    if len(datas) <= _BATCHED_RECORDS_MAX and topic.has_no_write_limits:
        context.service.writes.add_to_batch(topic, datas, len(request.body), _on_batch_committed, context)
    else:
        _submit(context, topic, Batch(datas, True), None)
    return True


def _on_batch_committed(done: Appended | Error, parts: list[BatchSlice[RequestContext]]) -> None:
    for call, offset, count in parts:
        if isinstance(done, Error):
            call.fail(done)
        else:
            call.service.metrics.count_written(call.topic, count)
            call.respond(write_response(call, done.slice(offset, count), created=False))


def parse_write_config(topic: str, given: msgspec.Raw) -> TopicConfig | ApiError | None:
    """The config of a write that may create its topic, where there is one. Its types are held to, needed or not; what
    is wrong with the name in it is a problem for whoever needs it, behind all other checks."""
    text = bytes(given)
    try:
        return None if text == b"null" else parse_topic_config(topic, text)
    except ApiError as problem:
        if problem.detail and isinstance(problem.detail.get("dead_letter"), str):
            return problem
        raise


def topic_type(config: TopicConfig | ApiError | None) -> TopicType:
    """Of the topic that would be made with it."""
    return config.type if isinstance(config, TopicConfig) else TopicConfig().type


def idempotency_key(context: RequestContext, given: str | None) -> str | None:
    """The idempotency key: the body's, or else the header's."""
    header = context.request.header(b"idempotency-key") if given is None else None
    key = given if header is None else header.decode("utf-8", "replace")
    check_idempotency_key(key)
    return key


def _submit(
    context: RequestContext, topic: Topic, batch: Batch, key: str | None, *, wait_if_full: bool = False
) -> None:
    context.durability = topic.config.durability
    context.service.writes.submit(topic, batch, key, partial(_on_submitted, context), wait_if_full=wait_if_full)


def _on_submitted(context: RequestContext, token: CommitFuture[Appended] | Error, held_us: int) -> None:
    if isinstance(token, Error):
        context.fail(token)
    else:
        context.service.writes.add_done_callback(token, partial(_on_committed, context, held_us))


def _on_committed(context: RequestContext, held_us: int, token: CommitFuture[Appended]) -> None:
    try:
        done = token.wait()  # its outcome is known
    except Error as error:
        context.fail(error)
        return
    context.service.metrics.count_written(context.topic, 0 if done.deduped else done.count)
    context.respond(write_response(context, done, held_us, created=False))


def write_response(context: RequestContext, done: Appended, held_us: int = 0, *, created: bool) -> Response:
    seqs = context.query.flag("return_seqs", True)
    body = encode_write_response(
        context.topic, context.durability, done, context.elapsed_ms(), held_us, created=created, seqs=seqs
    )
    return Response(201 if created else 200, body)


def encode_write_response(
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
    said = WriteResponse(
        topic,
        done.first_seq,
        done.last_seq,
        done.head_seq,
        done.count,
        created,
        done.deduped,
        durability,
        write_performance(elapsed_ms, done, held_us),
        list(done.seqs) if seqs else None,
    )
    return _encode(said)


def encode_write_responses(
    topic: str,
    durability: str,
    done: Appended,
    offset: int,
    counts: Sequence[int],
    took_us: Sequence[int],
) -> list[bytes]:
    """`told` for many who have a part in one write, one behind the other from `offset` on: how many records are each
    one's, and how long it took."""
    start = b'{"topic":%b,"first_seq":' % _encode(topic)
    took = _encode(write_performance(0.0, done)).removeprefix(b'{"server_total_ms":0.0')
    said = b',"created":false,"deduped":%b,"durability":%b' % (_encode(done.deduped), _encode(durability))
    middle = said + b',"performance":{"server_total_ms":'
    head = b',"head_seq":%d,"count":' % done.head_seq
    return native.encode_write_responses(done.first_seq + offset, counts, took_us, start, head, middle, took)


def write_performance(elapsed_ms: float, done: Appended, held_us: int = 0) -> dict[str, float]:
    """`held_us`: how long it waited to be let in."""
    took = {"server_total_ms": elapsed_ms}
    if not done.deduped:
        took["wal_append_ms"], took["fsync_ms"] = done.write_us / 1000, done.sync_us / 1000
        held_us += done.held_us
    if held_us:
        took["throttle_wait_ms"] = held_us / 1000
    return took


async def _write_async(context: RequestContext, parsed: _ParsedWrite) -> Response:
    """A write that is large, or first has to make its topic, or has to wait until old records are gone for good."""
    service, batch = context.service, parsed.batch
    topic, created = await ensure_topic(
        service, context.topic, parsed.body.create, parsed.config, batch, context.principal
    )
    context.durability = topic.config.durability
    token, held_us = await service.writes.submit_async(
        topic,
        batch,
        parsed.key,
        wait_if_full=created or parsed.body.disable_backpressure,
        run_blocking=service.run_blocking,
    )
    done = await service.writes.wait(token)
    service.metrics.count_written(context.topic, 0 if done.deduped else done.count)
    # Another call with its key may have been quicker to write to the topic that this one has made.
    return write_response(context, done, held_us, created=created and not done.deduped)


async def ensure_topic(
    service: Service,
    name: str,
    create: bool | None,
    config: TopicConfig | ApiError | None,
    first: Batch | ArrowBatch,
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
    if isinstance(config, ApiError):
        raise config
    check_dead_letter_allowed(principal, wanted, None)
    return await service.run_blocking(lambda: engine.ensure_topic(name, wanted, first))


def build_batch(limits: EngineConfig, records: list[api_types.RecordToWrite], node: str | None, body: bytes) -> Batch:
    """The records of a body as one batch. Their data is the text that came, without blanks between its words."""
    datas = [bytes(record.data) for record in records]
    if json_codec.may_compact(body):
        datas = list(map(json_codec.compact_json, datas))
    json_codec.check_depths(body, datas)
    json: bool | list[bool] = True
    if not all(record.encoding is None for record in records):
        json = [record.encoding is None for record in records]
        datas = [
            data if is_json else _decode_base64(record, data)
            for record, data, is_json in zip(records, datas, json, strict=True)
        ]
    tags = [record.tag for record in records]
    nodes: list[str | None] = [node if record.node is None else record.node for record in records]
    metas = [None if record.meta == JSON_NULL else record.meta for record in records]
    return batch_encoder.batch_from_texts(
        limits,
        datas,
        json,
        tags if any(tag is not None for tag in tags) else None,
        nodes if any(name is not None for name in nodes) else None,
        metas if any(meta is not None for meta in metas) else None,
    )


def _decode_base64(record: api_types.RecordToWrite, data: bytes) -> bytes:
    if record.encoding != "base64":
        raise BadInput(f"$encoding is base64 or absent, not {record.encoding!r:.80}; nothing was written")
    try:
        return b64decode(msgspec.json.decode(data, type=str), validate=True)
    except ValueError as error:
        raise BadInput(f"data is not base64 ({error}); nothing was written") from None
