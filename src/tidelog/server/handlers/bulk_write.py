"""Streamed writes: JSON lines or Arrow batches of any length, split into atomic batches while they arrive.

    pieces ──► reader: lines or Arrow messages ──► batch ──► submitted in order ──► outcome
                                                   └ at most 4 MiB or 10 000 records; a few in flight at a time

Each batch is atomic, the stream is not: an error has the number of records that were written before it. Batches depend
on the content of the stream and never on its pieces, so a retry with the same Idempotency-Key is split the same: batch
n has the key `<key>:<n>`, and batches that were written before are not written again.

    {"data":{"sku":"A"},"tag":"order-7"}⏎      a record, as in a JSON write; an unknown field is refused
    {"$seq":7,"$ts":…,"$tag":"t","data":1}⏎     a record of a read: `$tag` and `$node` are used
    {"$end":{…}}⏎                               the last line of a read, with no other field: skipped
    {"sku":"A"}⏎                                with `raw`: the line is the data

pyarrow reads only from files, so messages of an Arrow stream are separated here and passed to it whole.
`formats/arrow_ipc.py` checks the metadata of a message before anything of it is decoded. Columns are text or bytes, not
dictionaries, runs or views: these can decode to far more than their size.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from itertools import pairwise
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeVar, cast

import msgspec
import numpy as np
import pyarrow as pa

from tidelog import api_types
from tidelog.api_types import BadBody, RecordToWrite
from tidelog.decompression import DecodedTooLarge, ExpansionCounter
from tidelog.engine import Appended, Batch, CommitFuture, EngineConfig, Topic, batch_encoder
from tidelog.engine.batch_encoder import ArrowBatch
from tidelog.engine.config import Durability
from tidelog.errors import BadInput, Error, TooLarge, TopicNotFound
from tidelog.formats import arrow_ipc
from tidelog.http.interface import AnyResponse, BodyError, ClientDisconnected, Response
from tidelog.server import response_types as responses
from tidelog.server.errors import ApiError, api_error_for_status, api_error_from
from tidelog.server.handlers import write as writing
from tidelog.server.handlers.write import check_is_queue, move_schedule_to_meta
from tidelog.server.openapi import Parameter, binary_schema, flag_param, operation, text_schema
from tidelog.server.request import ARROW, NDJSON, RequestContext, nearest_name
from tidelog.types import Ints

STREAM_BATCH_BYTES_MAX: Final = 4 << 20
"""A batch of a stream is about this large: enough that a sync costs little, not so much that anybody waits for it."""


class StreamBatch(NamedTuple):
    batch: Batch | ArrowBatch
    position: dict[str, int]  # {"line": n} or {"batch": n}, from 1: its first line or batch
    has_schedule: bool = False  # only for queues


_END_LINE_PREFIX: Final = b'{"$end":'
_BLANK_LINES: Final = re.compile(rb"\n[ \t\r\v\f]+(?=\n)")
_raw_decoder = api_types.json_decoder(msgspec.Raw)
_object_decoder = api_types.json_decoder(dict[str, msgspec.Raw])


class NdjsonRecord(RecordToWrite):
    """A record to write, or a record of a read."""

    seq: object = msgspec.field(default=None, name="$seq")  # a write assigns seq and time
    ts: object = msgspec.field(default=None, name="$ts")
    end: object = msgspec.field(default=None, name="$end")  # with other fields it is a record
    own_tag: str | None = msgspec.field(default=None, name="$tag")
    own_node: str | None = msgspec.field(default=None, name="$node")


_line_decoder = api_types.body_decoder(NdjsonRecord)


class NdjsonBatchReader:
    def __init__(self, limits: EngineConfig, now_ms: Callable[[], int], *, raw: bool) -> None:
        self._limits, self._now_ms, self._is_raw = limits, now_ms, raw
        self._bytes_max = max(STREAM_BATCH_BYTES_MAX, 2 * limits.record_bytes_max)
        self._lines, self._start = b"", 0  # lines that are not in a batch yet, from this offset
        self._pieces: list[bytes] = []  # pieces after them
        self._line_ends: Ints | None = None  # ends of lines, while there are more than fit a batch
        self.next_batch_bytes = 0
        self._line_count = 0
        self._ended = False
        self._lines_taken = 0  # lines of earlier batches
        self._line_number = 1

    @property
    def position(self) -> dict[str, int]:
        return {"line": self._line_number}

    @property
    def held_bytes(self) -> int:
        return self.next_batch_bytes

    @property
    def claimed(self) -> int:
        return 0  # at most `_bytes_max` of lines, in a thread

    @property
    def is_decoded(self) -> bool:
        return False

    @property
    def has_batch(self) -> bool:
        full = self.next_batch_bytes >= self._bytes_max or self._line_count >= self._limits.batch_records_max
        return self.next_batch_bytes > 0 and (self._ended or full)

    def feed(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.next_batch_bytes += len(piece)
        self._line_count += piece.count(b"\n")

    def finish(self) -> None:
        last = self._pieces[-1] if self._pieces else self._lines
        if self.next_batch_bytes and not last.endswith(b"\n"):
            self.feed(b"\n")
        self._ended = True

    def next_batch(self) -> StreamBatch | None:
        chunk = self._take_lines()
        first = self._lines_taken + 1
        self._line_number = first
        count, lines = _split_lines(chunk, first)
        self._lines_taken += count
        numbers, records = self._records(lines, ascii=chunk.isascii())
        if not records:
            return None
        if b'"$' in chunk:
            for record in records:
                if isinstance(record, NdjsonRecord):
                    record.tag = record.own_tag if record.tag is None else record.tag
                    record.node = record.own_node if record.node is None else record.node
        self._line_number = numbers[0]
        # Without line ends, so that records without blanks need no copy.
        body = chunk.replace(b"\n", b"")
        try:
            scheduled = move_schedule_to_meta(records, self._now_ms())
            return StreamBatch(writing.build_batch(self._limits, records, None, body), {"line": numbers[0]}, scheduled)
        except Error:
            self._raise_bad_record(numbers, records, body)
            raise

    def _take_lines(self) -> bytes:
        """The lines of the next batch."""
        if self._pieces:
            self._lines = b"".join((self._lines[self._start :], *self._pieces))
            self._pieces, self._start, self._line_ends = [], 0, None
        whole, start, most = self._lines, self._start, self._limits.batch_records_max
        if self._line_ends is None and self._line_count > most:
            self._line_ends = np.flatnonzero(np.frombuffer(whole, np.uint8) == ord("\n"))
        if self._line_ends is None:
            end = whole.rfind(b"\n", start, start + self._bytes_max) + 1
            count = whole.count(b"\n", start, end)
        else:
            first = len(self._line_ends) - self._line_count
            fits = int(np.searchsorted(self._line_ends, start + self._bytes_max)) - first
            count = min(fits, most)
            end = int(self._line_ends[first + count - 1]) + 1 if count else 0
        if end <= start:
            self._line_number = self._lines_taken + 1
            raise TooLarge("a line", size=len(whole) - start, limit=self._bytes_max)
        self._start, self.next_batch_bytes, self._line_count = end, len(whole) - end, self._line_count - count
        if not self.next_batch_bytes:
            self._lines, self._start, self._line_ends = b"", 0, None
        return whole[start:end]

    def _records(self, lines: Iterable[tuple[int, bytes]], *, ascii: bool) -> tuple[list[int], list[RecordToWrite]]:
        """The records of these lines, and their line numbers."""
        numbers: list[int] = []
        records: list[RecordToWrite] = []
        for number, line in lines:
            if (
                not line
                or line.isspace()
                or (line.startswith(_END_LINE_PREFIX) and not self._is_raw and _is_end_line(line))
            ):
                continue
            try:
                if not ascii:
                    line.decode()  # data is stored as it arrived: the decoder did not check its UTF-8
                record = RecordToWrite(_raw_decoder.decode(line)) if self._is_raw else _line_decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                self._line_number = number
                self._raise_bad_line(line)
                raise
            records.append(record)
            numbers.append(number)
        return numbers, records

    def _raise_bad_line(self, line: bytes) -> None:
        """Raise the error of a line, with the messages of any other body."""
        try:
            if self._is_raw:
                api_types.decode_body(_raw_decoder, line)
            else:
                api_types.decode_body(_line_decoder, line)
        except api_types.UnknownField as unknown:
            near = nearest_name(unknown.name, _line_decoder.field_names)
            raise BadInput(f"line {self._line_number}: {unknown}, the nearest is {near}; nothing was written") from None
        except BadBody as error:
            raise BadInput(f"line {self._line_number}: {error}; nothing was written") from None

    def _raise_bad_record(self, numbers: list[int], records: list[RecordToWrite], body: bytes) -> None:
        """Raise the error of the first bad record of a batch."""
        for number, record in zip(numbers, records, strict=True):
            self._line_number = number
            move_schedule_to_meta([record], self._now_ms())
            writing.build_batch(self._limits, [record], None, body)


def _split_lines(chunk: bytes, first: int) -> tuple[int, Iterable[tuple[int, bytes]]]:
    """The number of lines, and those that may be records, each with its number.

    Blank ones are left out without looking at each of them: they compress to nothing, so that a peer can send millions.
    """
    if b"\n\n" not in chunk and not _BLANK_LINES.search(chunk):
        lines = chunk.split(b"\n")
        lines.pop()  # the text after the last line end: empty
        return len(lines), enumerate(lines, first)
    if chunk.isspace():
        return chunk.count(b"\n"), ()
    packed = _BLANK_LINES.sub(b"\n", chunk)
    ends = np.flatnonzero(np.frombuffer(packed, np.uint8) == ord("\n"))
    starts = np.concatenate(([0], ends[:-1] + 1))
    filled = np.flatnonzero(ends > starts)
    spans = zip(filled.tolist(), starts[filled].tolist(), ends[filled].tolist(), strict=True)
    return len(ends), ((first + number, packed[lo:hi]) for number, lo, hi in spans)


def _is_end_line(line: bytes) -> bool:
    """Whether this is the last line of a read. A line with other fields is a record."""
    try:
        return len(_object_decoder.decode(line)) == 1 and not api_types.is_nested_too_deep(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # raises as a record


_BINARY_TYPES: Final = (pa.binary(), pa.large_binary(), pa.string(), pa.large_string())
_INTEGER_TYPES: Final = (
    pa.uint64(),
    pa.int64(),
    *(pa.timestamp(unit, zone) for unit in ("ms", "us") for zone in (None, "UTC")),
)
_RECORD_COLUMNS: Final = ("data", "tag", "node", "meta", "json")
_COLUMN_TYPES: Final = {
    "data": _BINARY_TYPES,
    **dict.fromkeys(("tag", "node", "meta"), (*_BINARY_TYPES, pa.null())),
    "json": (pa.bool_(),),
    **dict.fromkeys(("seq", "ts"), _INTEGER_TYPES),  # fields of a read that a write assigns
}


class ArrowBatchReader:
    def __init__(self, limits: EngineConfig, message_bytes_max: int, expansion: ExpansionCounter) -> None:
        self._limits, self._message_bytes_max, self._expansion = limits, message_bytes_max, expansion
        self._buffer = bytearray()
        self._needed_bytes = arrow_ipc.HEAD.size  # bytes until the next decision
        self._message_kind = 0  # of the first message, once its metadata has arrived
        self._decoded_bytes = 0  # bytes that it decodes to, once all of it has arrived
        self._stream_ended = False
        self._pending_error: Exception | None = None  # of the first message, for the next `take`
        self._schema: pa.Schema | None = None
        self._batches: deque[pa.RecordBatch] = deque()
        self._batch_number = 0

    @property
    def position(self) -> dict[str, int]:
        return {"batch": max(self._batch_number, 1)}

    @property
    def next_batch_bytes(self) -> int:
        """Decoded bytes of the next `take`."""
        if self._batches:
            return int(self._batches[0].nbytes)
        return max(min(self._needed_bytes, len(self._buffer)), self._decoded_bytes)

    @property
    def held_bytes(self) -> int:
        return len(self._buffer)

    @property
    def claimed(self) -> int:
        return 0 if self._batches else self._decoded_bytes

    @property
    def is_decoded(self) -> bool:
        return bool(self._batches)

    @property
    def has_batch(self) -> bool:
        return (
            bool(self._batches)
            or self._pending_error is not None
            or (self._message_kind > 0 and len(self._buffer) >= self._needed_bytes)
        )

    def feed(self, piece: bytes) -> None:
        self._buffer += piece
        if self._pending_error is None:
            self._inspect_front()

    def finish(self) -> None:
        if self._buffer or self._schema is None:
            raise BadInput("the Arrow stream is incomplete; nothing was written of the missing part, send it whole")

    def _inspect_front(self) -> None:
        """Check the first message. Its error is raised when it is taken, so that the batch before it is written however
        much of the stream has arrived."""
        try:
            self._parse_front()
        except (BadInput, ApiError) as error:
            # Without its traceback: that refers to the frames of the callers, and so to the batch decoded last.
            # Together with this reference it would be a cycle, which keeps 64 MiB until the garbage collector runs.
            self._pending_error = error.with_traceback(None)

    def _parse_front(self) -> None:
        """Find the length of the first message and, once it has arrived, check its metadata."""
        while not self._message_kind and len(self._buffer) >= self._needed_bytes:
            if self._stream_ended:
                raise BadInput("there are bytes after the end of the Arrow stream; nothing was written")
            size = arrow_ipc.metadata_bytes(self._buffer)
            if not size:
                self._stream_ended, self._needed_bytes = True, 1
                del self._buffer[: arrow_ipc.HEAD.size]
            elif len(self._buffer) < arrow_ipc.HEAD.size + size:
                self._needed_bytes = arrow_ipc.HEAD.size + size
            else:
                self._message_kind, body = arrow_ipc.read_kind_and_size(
                    bytes(self._buffer[arrow_ipc.HEAD.size : arrow_ipc.HEAD.size + size])
                )
                arrow_ipc.check_order(self._message_kind, self._schema)
                self._needed_bytes = arrow_ipc.HEAD.size + size + body
                if self._needed_bytes > self._message_bytes_max:
                    raise _oversized_error(DecodedTooLarge("a batch", self._needed_bytes, self._message_bytes_max))
        if self._message_kind == arrow_ipc.BATCH and not self._decoded_bytes and self.has_batch and not self._batches:
            self._decoded_bytes = self._measure_front()

    def _measure_front(self) -> int:
        """Bytes of the first batch when it is decoded, and of the records built from it."""
        assert self._schema is not None, "batches come after it"
        self._batch_number += 1
        with memoryview(self._buffer) as held, held[: self._needed_bytes] as message:
            try:
                size = arrow_ipc.measure(message, len(self._schema))
                if size.bytes > self._message_bytes_max:
                    raise DecodedTooLarge("a batch", size.bytes, self._message_bytes_max)
                self._expansion.add(self._needed_bytes, size.bytes)
            except DecodedTooLarge as error:
                raise _oversized_error(error) from None
        return max(size.bytes, 1)

    def next_batch(self) -> StreamBatch | None:
        if not self._batches:
            if self._pending_error is not None:
                self._refuse()
            message = bytes(memoryview(self._buffer)[: self._needed_bytes])
            del self._buffer[: self._needed_bytes]
            kind, self._message_kind, self._needed_bytes, self._decoded_bytes = (
                self._message_kind,
                0,
                arrow_ipc.HEAD.size,
                0,
            )
            self._decode_message(kind, message)
        cut = (
            StreamBatch(batch_encoder.batch_from_table(self._limits, self._batches.popleft()), self.position)
            if self._batches
            else None
        )
        if not self._batches:
            self._inspect_front()
        return cut

    def _refuse(self) -> NoReturn:
        refusal, self._pending_error = self._pending_error, None
        assert refusal is not None, "asked for before"
        try:
            raise refusal
        finally:
            del refusal  # its traceback refers to this frame: no cycle, as above

    def _decode_message(self, kind: int, message: bytes) -> None:
        if kind == arrow_ipc.SCHEMA:
            self._schema = arrow_ipc.read_schema(message, _COLUMN_TYPES)
            return
        batch = arrow_ipc.read_batch(message, self._schema)
        batch = batch.select([name for name in batch.schema.names if name in _RECORD_COLUMNS])
        if batch.num_rows:
            self._batches += _split_batch(batch, self._limits.batch_records_max)


def _oversized_error(error: DecodedTooLarge) -> ApiError:
    return ApiError("payload_too_large", f"{error}; nothing was written, send smaller batches")


def _split_batch(batch: pa.RecordBatch, count_max: int) -> list[pa.RecordBatch]:
    """Split a batch into parts that fit one commit."""
    columns = [batch.column(name) for name in ("data", "meta") if name in batch.schema.names]
    ends = np.cumsum(sum(_value_lengths(column) for column in columns))
    marks = [0]
    while marks[-1] < len(ends):
        at = marks[-1]
        fits = int(np.searchsorted(ends, (ends[at - 1] if at else 0) + STREAM_BATCH_BYTES_MAX, "right"))
        marks.append(min(max(fits, at + 1), at + count_max, len(ends)))
    return [batch.slice(lo, hi - lo) for lo, hi in pairwise(marks)]


def _value_lengths(column: pa.Array) -> Ints:
    import pyarrow.compute as pc  # a slow import that few servers need

    made: Ints = pc.fill_null(pc.binary_length(column.cast(pa.large_binary())), 0).to_numpy(zero_copy_only=False)
    return made


T = TypeVar("T")
_BATCHES_IN_FLIGHT_MAX: Final = 3  # batches in flight: one at the disk, one waiting, one being built
_INLINE_DECODE_BYTES_MAX: Final = 64 << 10  # smaller parts are decoded on the loop: a thread switch costs more
_INLINE_CALL_BYTES_MIN: Final = 1 << 10  # the least cost of a call, however small the message is
_STREAM_KEY_BYTES_MAX: Final = 240  # leaves space for the batch number


class BatchReader(Protocol):
    """Turns pieces of a body into batches."""

    @property
    def position(self) -> dict[str, int]: ...

    @property
    def next_batch_bytes(self) -> int:
        """Bytes that are in no batch yet."""
        ...

    @property
    def has_batch(self) -> bool:
        """Whether `take` has something to do."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes of the body in memory."""
        ...

    @property
    def claimed(self) -> int:
        """Bytes that the next `take` decodes and keeps until `is_decoded` is false."""
        ...

    @property
    def is_decoded(self) -> bool:
        """Whether decoded records wait to be taken."""
        ...

    def feed(self, piece: bytes) -> None: ...

    def finish(self) -> None:
        """The body has ended. Raises where it is incomplete."""
        ...

    def next_batch(self) -> StreamBatch | None:
        """The next batch; None where there is no record in it."""
        ...


async def write_stream(context: RequestContext, *, arrow: bool) -> Response:
    limits = context.service.engine.limits
    message_bytes_max = context.service.config.max_body_bytes or (1 << 31) - 1
    feed: BatchReader = (
        ArrowBatchReader(limits, message_bytes_max, context.service.config.decoding_allowance.start())
        if arrow
        else NdjsonBatchReader(limits, context.service.now_ms, raw=context.query.flag("raw", False))
    )
    assert context.request.body_stream is not None, "asked for bodies that come in pieces"
    return await StreamingWrite(context, feed).run(context.request.body_stream)


class StreamingWrite:
    """One streamed write."""

    def __init__(self, context: RequestContext, reader: BatchReader) -> None:
        self._context, self._reader, self._service = context, reader, context.service
        self._create = None if context.query.text("create") is None else context.query.flag("create", True)
        self._topic: Topic | None = None
        self._created = False
        self._key = _stream_key(context)
        self._batch_count = 0
        self._throttled_us = 0  # waiting for admission
        self._reserved = 0  # bytes of the decode budget
        self._inline_bytes = 0  # decoded on the loop since other tasks had their turn
        self._in_flight: deque[tuple[asyncio.Task[Appended], dict[str, int]]] = deque()
        self._done: list[Appended] = []

    async def run(self, pieces: AsyncIterator[bytes]) -> Response:
        self._topic = self._service.engine.find(self._context.topic)
        if self._topic is None and self._create is False:
            raise TopicNotFound(self._context.topic)
        try:
            await self._write_all(pieces)
        except (ApiError, Error) as error:
            raise await self._error_with_written(error, self._reader.position) from error
        except (ClientDisconnected, BodyError) as error:
            body_error = error if isinstance(error, BodyError) else BodyError(400, "the body is incomplete")
            api_error = api_error_for_status(body_error.status, f"{body_error.reason}; nothing was written")
            raise await self._error_with_written(api_error, {}) from error  # without a position in the body
        finally:
            self._release()
            for task, _ in self._in_flight:
                task.cancel()  # the client is gone; submitted batches are written all the same
        return self._response()

    async def _write_all(self, pieces: AsyncIterator[bytes]) -> None:
        feed = self._reader
        async for piece in pieces:
            feed.feed(piece)
            while feed.has_batch:
                await self._submit_next()
            self._keep()
        feed.finish()
        while feed.has_batch:
            await self._submit_next()
        if not self._batch_count:
            raise BadInput("a write needs at least one record; nothing was written")
        while self._in_flight:
            await self._wait_oldest()

    async def _submit_next(self) -> None:
        """Build the next batch and submit it after the one before."""
        await self._service.wait_caught_up()
        self._context.check_key()
        if claimed := self._reader.claimed:
            self._keep()
            await self._service.decoding.reserve(claimed)
            self._reserved = claimed
        try:
            await self._stage_next()
        finally:
            if not self._reader.is_decoded:
                self._release()

    def _keep(self) -> None:
        """Count the body's memory towards the limit of the process."""
        assert self._context.exchange is not None, "a call that reached its handler has one"
        self._context.exchange.keep_body(self._reader.held_bytes)

    def _release(self) -> None:
        reserved, self._reserved = self._reserved, 0
        if reserved:
            self._service.decoding.release(reserved)

    async def _stage_next(self) -> None:
        cut = await self._run_inline_or_pool(self._reader.next_batch_bytes, self._reader.next_batch)
        if cut is None:
            return
        if cut.has_schedule:
            check_is_queue(self._context.topic, "log" if self._topic is None else self._topic.config.type)
        self._batch_count += 1
        submitted = await writing.submit_write(
            self._service,
            self._context.topic,
            cut.batch,
            None if self._key is None else f"{self._key}:{self._batch_count}",
            self._context.principal,
            topic=self._topic,
            create=self._create,
            wait_if_full=True,  # instead of failing: meanwhile nothing is read, which slows the sender down
            blocks=cut.batch.weight > _INLINE_DECODE_BYTES_MAX,
        )
        self._topic, self._created = submitted.topic, self._created or submitted.created
        self._context.durability = submitted.durability
        self._throttled_us += submitted.held_us
        self._in_flight.append((asyncio.ensure_future(self._wait_committed(submitted.future)), cut.position))
        while len(self._in_flight) >= _BATCHES_IN_FLIGHT_MAX:
            await self._wait_oldest()

    async def _run_inline_or_pool(self, size: int, call: Callable[[], T]) -> T:
        """Run a small call on the loop, and let other tasks run after every `_INLINE_BYTES` of such work: a stream
        without records submits nothing and would never wait."""
        self._inline_bytes += max(size, _INLINE_CALL_BYTES_MIN)
        if self._inline_bytes > _INLINE_DECODE_BYTES_MAX:
            self._inline_bytes = 0
            await asyncio.sleep(0)
        return call() if size <= _INLINE_DECODE_BYTES_MAX else await self._service.run_blocking(call)

    async def _wait_committed(self, token: CommitFuture[Appended]) -> Appended:
        """Submit in a thread, even where small writes are committed on the loop: a batch has megabytes."""
        commits = self._service.writes
        return await (self._service.run_blocking(token.wait) if commits.syncs_on_loop else commits.wait(token))

    async def _wait_oldest(self) -> None:
        """Wait for the oldest batch in flight."""
        task, where = self._in_flight[0]
        try:
            done = await task
        except Error as error:
            self._in_flight.popleft()
            raise await self._error_with_written(error, where) from error
        self._in_flight.popleft()
        self._record_done(done)

    def _record_done(self, done: Appended) -> None:
        self._done.append(done)
        self._service.metrics.count_appended(self._context.topic, done)

    # ── response ──────────────────────────────────────────────────────────────────────────────

    def _response(self) -> Response:
        done = self._done
        times = {
            "wal_append_ms": sum(batch.write_us for batch in done) / 1000,
            "fsync_ms": sum(batch.sync_us for batch in done) / 1000,
        }
        throttled_us = self._throttled_us + sum(batch.held_us for batch in done)
        if throttled_us:
            times["throttle_wait_ms"] = throttled_us / 1000
        body = responses.BulkWritten(
            self._context.topic,
            first_seq=done[0].first_seq,
            last_seq=done[-1].last_seq,
            head_seq=max(batch.head_seq for batch in done),
            count=sum(batch.count for batch in done),
            batches=len(done),
            created=self._created,
            deduped=sum(batch.deduped for batch in done),
            durability=cast(Durability, self._context.durability),
        )
        return self._context.json(body, status=201 if self._created else 200, **times)

    async def _error_with_written(self, error: ApiError | Error, position: dict[str, int]) -> ApiError:
        """The error with the number of written records: batches after the failed one may have been written."""
        if isinstance(error, _PartialWriteError):
            return error
        problem = error if isinstance(error, ApiError) else api_error_from(error)
        detail = dict(problem.detail or {})
        in_doubt = "written" in detail and detail["written"] is None  # the outcome of the failed batch is unknown
        while self._in_flight:
            task, _ = self._in_flight.popleft()
            try:
                self._record_done(await task)
            except Error as another:  # the first error is reported
                in_doubt = in_doubt or another.written is None
        if in_doubt:
            detail["in_doubt"] = True
        return _PartialWriteError(
            problem, {**detail, "written": self._written_ranges(), **position}, sum(each.count for each in self._done)
        )

    def _written_ranges(self) -> dict[str, Any]:
        ranges: list[list[int]] = []
        for done in sorted(self._done, key=lambda each: each.first_seq):
            if ranges and ranges[-1][1] + 1 == done.first_seq:
                ranges[-1][1] = done.last_seq
            else:
                ranges.append([done.first_seq, done.last_seq])
        return {
            "count": sum(each.count for each in self._done),
            "first_seq": ranges[0][0] if ranges else None,
            "last_seq": ranges[-1][1] if ranges else None,
            "ranges": ranges,
        }


class _PartialWriteError(ApiError):
    """An error with the number of records that were written before it."""

    def __init__(self, problem: ApiError, detail: dict[str, Any], count: int) -> None:
        message = problem.message
        if count:
            message = message.replace("nothing was written", "nothing of this batch was written")
            message += (
                f"; {count} records of this stream were, and a retry with its Idempotency-Key does not repeat them"
            )
        super().__init__(problem.code, message, detail, status=problem.status)


def _stream_key(context: RequestContext) -> str | None:
    key = writing.idempotency_key(context, None)
    if key is not None and not 0 < len(key.encode()) <= _STREAM_KEY_BYTES_MAX:
        raise BadInput(
            f"the idempotency key of a stream must have 1 to {_STREAM_KEY_BYTES_MAX} bytes; nothing was written, "
            "shorten it"
        )
    return key


@operation(
    "append",
    request=api_types.Write,
    response=(responses.Written, responses.BulkWritten),
    params=(
        flag_param("return_seqs", True, "A JSON body: return the seq of each record."),
        flag_param("raw", False, "NDJSON: each line is the data of one record."),
        flag_param("create", True, "NDJSON and Arrow: false refuses to create the topic."),
        Parameter(
            "Idempotency-Key",
            {"type": "string", "minLength": 1, "maxLength": 256},
            "A second write with this key writes nothing.",
            "header",
        ),
    ),
    errors=("batch_too_large", "record_too_large", "topic_not_found", "topic_full"),
    statuses=(200, 201),
    request_content={
        NDJSON.decode(): text_schema("One RecordToWrite per line; with raw=1 only its data."),
        ARROW.decode(): binary_schema(
            "An IPC stream with a column data (bytes or text) and optionally tag, node, meta (JSON text), json."
        ),
    },
)
def append_records(context: RequestContext) -> AnyResponse | Coroutine[Any, Any, AnyResponse] | None:
    """Append records: one batch, or a stream of them.

    A JSON body is one atomic batch. NDJSON and Arrow bodies have no size limit and are split into atomic batches;
    an error after the first of them has the number of written records in detail.written.
    """
    if context.request.body_stream is None:
        return writing.write_records(context)
    kind = (context.request.header(b"content-type") or b"").partition(b";")[0].strip()
    return write_stream(context, arrow=kind == ARROW)
