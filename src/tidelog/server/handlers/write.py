"""JSON writes: decode the body, build one batch, and respond when the topic's durability class allows it.

A plain write is `{"records":[{"data":…},…]}` and nothing else. One compiled pass returns the text of each record where
every byte is as it will be stored; other bodies (blanks, escapes, exponents, deep nesting) go through the decoder.

The schedule of a job is stored in its meta, so that a job is copied, exported and read as any other record:

    {"data":…,"delay_ms":5000,"priority":7}  ──►  {"data":…,"meta":{"$run_at_ms":1700000005000,"$priority":7}}
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw

from tidelog import api_types, native
from tidelog.api_types import JSON_NULL, RecordToWrite
from tidelog.engine import Appended, Batch, CommitFuture, EngineConfig, Topic, TopicConfig, batch_encoder
from tidelog.engine.append import check_idempotency_key
from tidelog.engine.batch_encoder import ArrowBatch, decode_meta
from tidelog.engine.config import ADDED, KEYS, TopicType, check_topic_name
from tidelog.engine.queues.jobs import PRIORITY_KEY, PRIORITY_MAX, RUN_AT_KEY
from tidelog.engine.topic import topic_operations
from tidelog.errors import BadInput, Error, TopicNotFound
from tidelog.http.interface import AnyResponse, Response
from tidelog.server.auth import ADMIN, Principal
from tidelog.server.errors import ApiError
from tidelog.server.handlers.topics import check_dead_letter_allowed, parse_topic_config
from tidelog.server.request import RequestContext
from tidelog.server.service import Service
from tidelog.server.write_pipeline import BatchSlice

_SLICE_BYTES: Final = 1 << 20  # per search
_BRACES_PER_RECORD: Final = 16
_KEY_BYTES_MAX: Final = 64  # of "records" with every letter escaped: 44
_TOKEN: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{}]', re.DOTALL)
_encode = msgspec.json.Encoder().encode
_decode_plain_write = api_types.json_decoder(api_types.PlainWrite).decode


def check_records(body: bytes, limits: EngineConfig) -> None:
    """Refuse a body with far too many records before it is decoded: one call of the decoder holds the interpreter, and
    each record takes 16 times its text. Five million of them in 60 MiB took 1.6 s and 980 MiB.

    Every record has a brace. Bodies with few braces are decoded at once; the others are scanned up to the record that
    is one too many, and other threads run between two tokens."""
    records_max = limits.batch_records_max
    braces = 0
    for start in range(0, len(body), _SLICE_BYTES):
        braces += body.count(b"{", start, start + _SLICE_BYTES)
    if braces <= _BRACES_PER_RECORD * records_max:
        return
    depth = count = 0
    key, in_records = b"", False
    for match in _TOKEN.finditer(body):
        token = match[0]
        if token[:1] == b'"':
            if depth == 1:
                key = token
        elif token in (b"}", b"]"):
            depth -= 1
        else:
            if depth == 1:
                in_records = token == b"[" and _is_records(key)
            elif depth == 2 and in_records:
                count += 1
                if count > records_max:
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
    """The data of a plain write's records; None for any other body, also for one that must be refused."""
    try:
        if not body.isascii():
            body.decode()
    except UnicodeDecodeError:
        return None
    records_max = limits.batch_records_max
    datas = native.parse_plain_body(body, records_max)
    if datas is None:
        datas = _plain_records_py(body, records_max)
    if datas is None or (len(body) > limits.record_bytes_max and max(map(len, datas)) > limits.record_bytes_max):
        return None
    return datas


def plain_records_of(bodies: list[bytes], limits: EngineConfig, records_max: int) -> tuple[list[bytes], list[int]]:
    """The data of all bodies, and the number of records of each: 0 for a body that is not plain or has too many."""
    records_max = min(records_max, limits.batch_records_max)
    parsed = native.parse_plain_bodies(bodies, records_max, limits.record_bytes_max)
    if parsed is not None:
        return parsed
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
    if batch_encoder.may_compact(body):
        datas = [batch_encoder.compact_json(data) for data in datas]
    batch_encoder.check_depths(body, datas)
    return datas


RUN_AT_MS_MAX: Final = 253_402_300_799_999  # the year 9999


def is_scheduled(record: RecordToWrite) -> bool:
    return record.run_at_ms is not None or record.delay_ms is not None or record.priority is not None


def move_schedule_to_meta(records: Sequence[RecordToWrite], now_ms: int) -> bool:
    """Move schedules into meta; return whether any record has one. Raises BadInput for an invalid one."""
    has_schedule = False
    for record in records:
        if is_scheduled(record):
            has_schedule = True
            record.meta = Raw(_encode({**(decode_meta(bytes(record.meta)) or {}), **_schedule_meta(record, now_ms)}))
    return has_schedule


def _schedule_meta(record: RecordToWrite, now_ms: int) -> dict[str, int]:
    run_at_ms, delay_ms, priority = record.run_at_ms, record.delay_ms, record.priority
    meta: dict[str, int] = {}
    if run_at_ms is not None and delay_ms is not None:
        raise BadInput("a job has run_at_ms or delay_ms, not both; nothing was written, leave one out")
    if run_at_ms is not None:
        meta[RUN_AT_KEY] = _check_range("run_at_ms", run_at_ms, 0, RUN_AT_MS_MAX)
    if delay_ms is not None:
        meta[RUN_AT_KEY] = now_ms + _check_range("delay_ms", delay_ms, 0, RUN_AT_MS_MAX - now_ms)
    if priority is not None:
        meta[PRIORITY_KEY] = _check_range("priority", priority, -PRIORITY_MAX, PRIORITY_MAX)
    return meta


def _check_range(name: str, value: int, minimum: int, maximum: int) -> int:
    if not minimum <= value <= maximum:
        raise BadInput(f"{name} must be an integer from {minimum} to {maximum}, not {value!r:.40}; nothing was written")
    return value


def check_is_queue(topic: str, kind: str) -> None:
    """Refuse a schedule in a log, where it would have no effect."""
    if kind != "queue":
        raise BadInput(
            f"{topic} is a log: run_at_ms, delay_ms and priority are for jobs of a queue; nothing was written, leave "
            "them out or write to a queue"
        )


_BATCHED_RECORDS_MAX: Final = 1_000  # a write of more records gets a batch of its own
BLOCKING_PARSE_BYTES: Final = 256 << 10  # larger bodies are parsed in a thread: 64 MiB take half a second and more
_ONE_CALL_BYTES: Final = 2 << 20
"""The largest body that one compiled call decodes. The call holds the interpreter: 0.15 to 0.35 s for 60 MiB. The
decoder of larger bodies calls Python code for every record, so that other threads run in between."""
_write_decoder = api_types.body_decoder(api_types.Write)
_large_decoder = api_types.body_decoder(api_types.LargeWrite)
_ADMIN_SCOPE = frozenset((ADMIN,))
_CONFIG_OF_ONE_WRITE = ("auto_create",)  # decides about the write that it comes with


class WriteResponse(msgspec.Struct, omit_defaults=True):
    """The response to a write, as it is encoded; `response_types.Written` describes it."""

    topic: str
    first_seq: int
    last_seq: int
    head_seq: int
    count: int
    created: bool
    deduped: bool
    durability: str  # the class of the topic, whatever a config in the write asked for
    performance: dict[str, float]
    seqs: list[int] | None = None


class _ParsedWrite(NamedTuple):
    """A parsed write."""

    body: api_types.Write  # without its records where the write is plain
    config: TopicConfig | ApiError | None
    batch: Batch
    key: str | None


def write_records(context: RequestContext) -> AnyResponse | Coroutine[Any, Any, AnyResponse] | None:
    topic = context.service.engine.find(context.topic)
    if len(context.request.body) > BLOCKING_PARSE_BYTES:
        return _write_large(context, topic)
    if topic is not None and not topic_operations(topic).needs_expiry and _try_batched_write(context, topic):
        return None
    parsed = _parse_write(context, topic)
    if topic is None or topic_operations(topic).needs_expiry:
        return _write_async(context, parsed)
    _submit(context, topic, parsed.batch, parsed.key, wait_if_full=parsed.body.disable_backpressure)
    return None


async def _write_large(context: RequestContext, topic: Topic | None) -> Response:
    """Parse a large body in a thread. The write waits while checkpoints are slower than writers, as streamed writes
    do."""
    context.check_json_type()
    service = context.service
    is_admitted = await service.admit_large()
    parsed = await service.run_blocking(partial(_parse_large, context, topic))
    if not is_admitted:
        await service.reject_large(wait_if_full=parsed.body.disable_backpressure)
    context.check_key()
    return await _write_async(context, parsed)


def _parse_large(context: RequestContext, topic: Topic | None) -> _ParsedWrite:
    check_records(context.request.body, context.service.engine.limits)
    is_small = len(context.request.body) <= _ONE_CALL_BYTES
    if is_small and topic is not None and context.request.header(b"idempotency-key") is None:
        datas = plain_records(context.request.body, context.service.engine.limits)
        if datas is not None:
            return _ParsedWrite(api_types.Write([]), None, Batch(datas, True), None)
    return _parse_write(context, topic)


def _parse_write(context: RequestContext, topic: Topic | None) -> _ParsedWrite:
    """Decode and check a write. Runs on any thread."""
    engine = context.service.engine
    is_small = len(context.request.body) <= _ONE_CALL_BYTES
    body = context.decode_body(_write_decoder) if is_small else context.decode_body(_large_decoder)
    config = parse_write_config(context.topic, body.config, context.warn)
    if topic is not None and isinstance(config, TopicConfig):
        warn_of_other_config(context.warn, topic, config, bytes(body.config))
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
    """Submit a plain write and return True. A small one joins the batch of this loop turn."""
    request, limits = context.request, context.service.engine.limits
    if request.header(b"idempotency-key") is not None:
        return False
    context.check_json_type()
    datas = plain_records(request.body, limits)
    if datas is None:
        return False
    context.durability = topic.config.durability
    if len(datas) <= _BATCHED_RECORDS_MAX and topic_operations(topic).has_no_write_limits:
        context.service.writes.add_to_batch(topic, datas, len(request.body), _on_batch_committed, context)
    else:
        _submit(context, topic, Batch(datas, True), None)
    return True


def slice_appended(done: Appended, offset: int, count: int) -> Appended:
    """Return the part of a joint write that belongs to one caller."""
    first = done.first_seq + offset
    return msgspec.structs.replace(done, first_seq=first, last_seq=first + count - 1)


def _on_batch_committed(done: Appended | Error, parts: list[BatchSlice[RequestContext]]) -> None:
    for context, offset, count in parts:
        if isinstance(done, Error):
            context.fail(done)
        else:
            context.respond(write_response(context, slice_appended(done, offset, count)))


def warn_of_other_config(warn: Callable[..., None], topic: Topic, config: TopicConfig, text: bytes) -> None:
    """Report the fields of a config that the topic, which exists, has with other values: a write changes none."""
    has, given = topic.config, msgspec.json.decode(text)
    names = [name for name in (*KEYS, *ADDED) if name in given and name not in _CONFIG_OF_ONE_WRITE]
    other = [name for name in names if getattr(config, name) != getattr(has, name)]
    if other:
        shown = ", ".join(f"{name} is {_encode(getattr(has, name)).decode()[:80]}" for name in other[:8])
        warn(f"{topic.name} exists with another config: {shown}", "a write changes no config, PUT does", fields=other)


def parse_write_config(
    topic: str, given: msgspec.Raw, warn: Callable[[str], None] | None = None
) -> TopicConfig | ApiError | None:
    """The config of a write, or None. Its types are always checked. A dead_letter name that is invalid is returned as
    an error, and raised after all other checks by a write that creates the topic."""
    text = bytes(given)
    try:
        return None if text == b"null" else parse_topic_config(topic, text, warn)
    except ApiError as error:
        if error.detail and isinstance(error.detail.get("dead_letter"), str):
            return error
        raise


def topic_type(config: TopicConfig | ApiError | None) -> TopicType:
    """The type of a topic that is created with this config."""
    return config.type if isinstance(config, TopicConfig) else TopicConfig().type


def idempotency_key(context: RequestContext, given: str | None) -> str | None:
    """The idempotency key of the body, or else of the header."""
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
        context.respond_when_done(token, partial(write_response, context, held_us=held_us))


def write_response(context: RequestContext, done: Appended, held_us: int = 0, *, created: bool = False) -> Response:
    context.service.metrics.count_appended(context.topic, done)
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
    """Encode the response to a write."""
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
    """Encode the responses of requests that share a batch from `offset` on, by their records and times."""
    start = b'{"topic":%b,"first_seq":' % _encode(topic)
    took = _encode(write_performance(0.0, done)).removeprefix(b'{"server_total_ms":0.0')
    said = b',"created":false,"deduped":%b,"durability":%b' % (_encode(done.deduped), _encode(durability))
    middle = said + b',"performance":{"server_total_ms":'
    head = b',"head_seq":%d,"count":' % done.head_seq
    return native.encode_write_responses(done.first_seq + offset, counts, took_us, start, head, middle, took)


def write_performance(elapsed_ms: float, done: Appended, held_us: int = 0) -> dict[str, float]:
    """`held_us`: how long the write waited for admission."""
    took = {"server_total_ms": elapsed_ms}
    if not done.deduped:
        took["wal_append_ms"], took["fsync_ms"] = done.write_us / 1000, done.sync_us / 1000
        held_us += done.held_us
    if held_us:
        took["throttle_wait_ms"] = held_us / 1000
    return took


async def _write_async(context: RequestContext, parsed: _ParsedWrite) -> Response:
    """A write that is large, creates its topic, or waits until expired records are removed."""
    submitted = await submit_write(
        context.service,
        context.topic,
        parsed.batch,
        parsed.key,
        context.principal,
        create=parsed.body.create,
        config=parsed.config,
        wait_if_full=parsed.body.disable_backpressure,
        blocks=True,
    )
    context.durability = submitted.durability
    done = await context.service.writes.wait(submitted.future)
    # Another request with the same key may have written first to the topic that this one created.
    return write_response(context, done, submitted.held_us, created=submitted.created and not done.deduped)


class SubmittedWrite(NamedTuple):
    topic: Topic
    created: bool  # the write created its topic
    durability: str  # of the topic, when the write was submitted
    future: CommitFuture[Appended]
    held_us: int  # how long it waited for admission


async def submit_write(
    service: Service,
    name: str,
    batch: Batch | ArrowBatch,
    key: str | None,
    principal: Principal,
    *,
    topic: Topic | None = None,
    create: bool | None = None,
    config: TopicConfig | ApiError | None = None,
    wait_if_full: bool = False,
    blocks: bool = False,
) -> SubmittedWrite:
    """Submit a write, and create its topic where there is none and the write allows it. One that created its topic is
    not rejected. `topic`: that of the writes before it. `blocks`: submit it off the loop."""
    created = False
    if topic is None:
        topic = service.engine.find(name)
    if topic is None:
        topic, created = await _create_topic(service, name, create, config, batch, principal)
        blocks = blocks and batch.weight > BLOCKING_PARSE_BYTES  # a new topic has nothing to expire
    durability = topic.config.durability
    future, held_us = await service.writes.submit_async(
        topic,
        batch,
        key,
        wait_if_full=created or wait_if_full,
        run_blocking=service.run_blocking if blocks or topic_operations(topic).needs_expiry else None,
    )
    return SubmittedWrite(topic, created, durability, future, held_us)


async def _create_topic(
    service: Service,
    name: str,
    create: bool | None,
    config: TopicConfig | ApiError | None,
    first: Batch | ArrowBatch,
    principal: Principal,
) -> tuple[Topic, bool]:
    """Create the topic of a write. A write that would be refused creates none."""
    wanted = config if isinstance(config, TopicConfig) else TopicConfig()
    if not (wanted.auto_create if create is None else create):
        raise TopicNotFound(name)
    check_topic_name(name)
    if isinstance(config, ApiError):
        raise config
    check_dead_letter_allowed(principal, wanted, None)
    engine = service.engine
    begun = engine.begin_create(name, wanted, first, wait_for_lock=False)
    if begun is None:  # the lock is held for a commit
        state, created = await service.run_blocking(lambda: engine.ensure_topic(name, wanted, first))
        return Topic(state), created
    state, future, created = begun
    if future is not None:  # one commit for all topics that are created in this turn
        await service.writes.wait(future)
    return Topic(state), created


def build_batch(limits: EngineConfig, records: list[api_types.RecordToWrite], node: str | None, body: bytes) -> Batch:
    """Build one batch of a body's records. Data is stored as the text that arrived, without blanks between tokens."""
    datas = [bytes(record.data) for record in records]
    if batch_encoder.may_compact(body):
        datas = list(map(batch_encoder.compact_json, datas))
    batch_encoder.check_depths(body, datas)
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
        raise BadInput(f"$encoding must be base64 or absent, not {record.encoding!r:.80}; nothing was written")
    try:
        return b64decode(msgspec.json.decode(data, type=str), validate=True)
    except ValueError as error:
        raise BadInput(f"data is not base64 ({error}); nothing was written") from None
