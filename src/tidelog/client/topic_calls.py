"""Calls of one topic: what each method of `Topic` sends to a server, and what it makes of the response. No I/O.

Reads of any size are pages: a page that was lost is requested again, so a long read survives a restart of the server. A
write has an idempotency key, its own or one made here, so a write whose response was lost is sent again and never
written twice, within the topic's `idempotency_window_ms`.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from secrets import token_hex
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa
from xxhash import xxh3_64_intdigest

from tidelog import frames
from tidelog.api_types import (
    GAPS_LIMIT_MAX,
    READ_BYTES_MAX,
    READ_LIMIT,
    READ_LIMIT_MAX,
    PutBatch,
    encode_page_cursor,
)
from tidelog.client.core import Call, Request
from tidelog.client.http import topic_path
from tidelog.client.wire import (
    OpenRecord,
    encode_json,
    encode_records,
    node_list,
    parse_appended,
    parse_config,
    parse_gap_entry,
    parse_page,
    parse_record,
    parse_topic_info,
)
from tidelog.clock import SystemClock
from tidelog.engine import (
    SEQ_MAX,
    Appended,
    Compacted,
    Counts,
    Deleted,
    EvictedRange,
    Gap,
    GapEntries,
    LatestPage,
    LatestRecord,
    Page,
    Record,
    RedriveResult,
    RetentionPreview,
    TopicConfig,
    TopicInfo,
    UnreadLoss,
)
from tidelog.engine.batch_encoder import Batch, check_int, is_utf8_text, prepare_batch
from tidelog.engine.config import EngineConfig
from tidelog.engine.erase import ErasureReceipt
from tidelog.engine.gap_log import GAPS_LIMIT_DEFAULT
from tidelog.engine.idempotency import BatchRange
from tidelog.engine.producer_queue import ProducerBatch
from tidelog.engine.read import parse_nodes, table_metadata
from tidelog.engine.rewrite import RewriteResult, RewrittenFile, SkippedSegment
from tidelog.engine.segment import SizeCount
from tidelog.errors import BadInput, Error, Forbidden, NotAQueue, TopicNotFound, Unavailable
from tidelog.formats.frame import TS_MS_MAX
from tidelog.times import Duration, Seconds, Time, duration_ms, fields_in_ms, seconds, time_ms
from tidelog.types import Buffer

ARROW: Final = "application/vnd.apache.arrow.stream"
POLL_MS: Final = 25_000  # of one long poll; the server waits at most 30 s
_SCAN_BYTES: Final = 8 << 20  # of one page of a bulk read
_REDRIVE_PAGE_RECORDS: Final = 1_000
_LONG_WORK_S: Final = 3_600.0  # an erasure or a compaction may rewrite many segments before it responds


class RecordHead(NamedTuple):
    """The length of a record's data and its checksum."""

    size: int
    xxh3: str


class ListedSegment(NamedTuple):
    """The seqs and the times of a segment."""

    base: int
    stop: int
    first_ts: int
    last_ts: int


class ScanPage(NamedTuple):
    """One response of a bulk read."""

    batches: list[pa.RecordBatch]
    gaps: list[Gap]
    counts: Counts
    next_from_seq: int
    head_seq: int
    earliest_seq: int


class ScanCursor:
    """The position of a bulk read, and what it has passed. It ends at the head that the first page had."""

    def __init__(
        self,
        from_seq: int,
        to_seq: int | None,
        nodes: frozenset[bytes],
        limit: int,
        strong: bool,
        columns: Sequence[str] | None = None,
    ) -> None:
        check_int("from_seq", from_seq, 0, SEQ_MAX)
        if to_seq is not None:
            check_int("to_seq", to_seq, 0, SEQ_MAX)
        self.next_from_seq, self._to_seq, self._strong = from_seq, to_seq, strong
        self._nodes = sorted(node.decode() for node in nodes)
        check_int("limit", limit, 0, SEQ_MAX)
        self._left, self._columns = limit, frames.check_columns(columns)
        self.gaps: list[Gap] = []
        self.counts = Counts()
        self.head_seq = self.earliest_seq = 0
        self.is_done = False

    @property
    def gap(self) -> Gap | None:
        """The first of `gaps`."""
        return self.gaps[0] if self.gaps else None

    def query(self) -> dict[str, object]:
        return {
            "from_seq": self.next_from_seq,
            "to_seq": self._to_seq,
            "limit": None if self._left >= SEQ_MAX else self._left,
            "bytes_max": _SCAN_BYTES,
            "node": self._nodes or None,
            "consistency": "strong" if self._strong else None,
            "format": "arrow",
            **self._hidden(),
        }

    def _hidden(self) -> dict[str, object]:
        """What the server does not have to send."""
        wanted = frames.RECORD_SCHEMA.names if self._columns is None else self._columns
        sent = {
            "include_tags": "tag" in wanted,
            "include_meta": "meta" in wanted,
            "include_data": "data" in wanted or "json" in wanted,
        }
        return {name: False for name, is_sent in sent.items() if not is_sent}

    def _typed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        try:
            return frames.typed_records(batch if self._columns is None else batch.select(list(self._columns)))
        except (KeyError, pa.ArrowException) as error:
            raise Unavailable(
                f"a page of records has other columns than expected ({error}); nothing was lost, use the client of the "
                "server's version"
            ) from None

    def accept(self, page: ScanPage) -> list[pa.RecordBatch]:
        """Move past a page and return its batches."""
        if not self.head_seq:
            self.head_seq, self.earliest_seq = page.head_seq, page.earliest_seq
            self._to_seq = page.head_seq if self._to_seq is None else min(self._to_seq, page.head_seq)
        self.gaps += page.gaps
        self.counts = self.counts + page.counts
        self._left -= sum(len(batch) for batch in page.batches)
        is_stuck = page.next_from_seq <= self.next_from_seq and not page.gaps
        self.next_from_seq = page.next_from_seq
        assert self._to_seq is not None, "set by the first page"
        self.is_done = is_stuck or self._left <= 0 or self.next_from_seq >= self._to_seq
        return list(map(self._typed, page.batches))


class TopicCalls:
    """The calls of the topic `name`. `open_record` opens the data of a large record for `LargeData.open`."""

    def __init__(self, name: str, open_record: OpenRecord | None = None) -> None:
        self.name, self._open_record = name, open_record

    def path(self, rest: str = "") -> str:
        return topic_path(self.name, rest)

    def _post(
        self, rest: str, body: object, *, retry_safe: bool = True, wait_s: float = 0.0, reads: bool = False
    ) -> Call[dict[str, Any]]:
        content = encode_json(body)
        request = Request("POST", self.path(rest), content, retry_safe=retry_safe, wait_s=wait_s, reads=reads)
        return (yield request).json()

    def _get(self, rest: str, **query: object) -> Call[dict[str, Any]]:
        return (yield Request("GET", self.path(rest), query=query, retry_safe=True)).json()

    # ── state ────────────────────────────────────────────────────────────────────────────────

    def state(self) -> Call[TopicInfo]:
        return parse_topic_info((yield from self._get("", touch=False, details=True)))

    def check_queue(self) -> Call[None]:
        """Raise NotAQueue unless it is one."""
        if (yield from self._get("", touch=False))["type"] != "queue":
            raise NotAQueue(self.name)

    # ── writing ───────────────────────────────────────────────────────────────────────────────

    def append(
        self,
        records: object,
        *,
        tag: str | Sequence[str | None] | None = None,
        node: str | Sequence[str | None] | None = None,
        meta: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        key: str | None = None,
    ) -> Call[Appended]:
        return (yield from self.write(encode_records(records, tag=tag, node=node, meta=meta), key))

    def write(self, rows: list[msgspec.Raw], key: str | None) -> Call[Appended]:
        """Write encoded records."""
        given = _write_key(key)
        body = {"records": rows, "idempotency_key": given, "create": False}
        return parse_appended((yield from self._post("", body)), is_own_key=key is None)

    def append_stream(
        self,
        chunks: Iterable[Buffer] | AsyncIterable[Buffer],
        *,
        tag: str | None = None,
        node: str | None = None,
        meta: dict[str, Any] | None = None,
        key: str | None = None,
    ) -> Call[Appended]:
        if isinstance(chunks, bytes | bytearray | memoryview | str) or not isinstance(chunks, Iterable | AsyncIterable):
            raise BadInput(
                f"append_stream takes an iterable of bytes, not {type(chunks).__name__}; nothing was written, "
                "use append for a value that is in memory"
            )
        prepare_batch(EngineConfig(), b"", tag, node, meta)  # checks what goes into the query
        query = {"tag": tag, "node": node, "meta": None if meta is None else encode_json(meta).decode()}
        headers = {"Content-Type": "application/octet-stream", "Idempotency-Key": _write_key(key)}
        request = Request("POST", self.path("/stream"), None, {**query, "create": False}, headers, chunks=chunks)
        return parse_appended((yield request).json(), is_own_key=key is None)

    def append_arrow(self, table: pa.Table | pa.RecordBatch, *, key: str | None = None) -> Call[Appended]:
        headers = {"Content-Type": ARROW, "Idempotency-Key": _write_key(key)}
        body = encode_table(table)
        query = {"create": False}
        request = Request("POST", self.path(), body, query, headers, retry_safe=True)
        return parse_appended((yield request).json(), is_own_key=key is None)

    def append_batch(self, batch: ProducerBatch, producer: str) -> Call[Appended]:
        """Write a batch of a producer (`new_producer_name`); once, however often it is sent."""
        headers = {"Content-Type": ARROW, "Idempotency-Key": f"{producer}:{batch.name}"}
        body = encode_batch(batch.encode())
        request = Request("POST", self.path(), body, {"create": False}, headers, retry_safe=True)
        return parse_appended((yield request).json())

    def check_producer(self, repeated_for_ms: int) -> Call[None]:
        """Raise where the topic may forget the key of a batch that is still repeated: it would be written twice."""
        try:
            window_ms = (yield from self.state()).config.idempotency_window_ms
        except Forbidden:  # a key that only writes
            window_ms = TopicConfig().idempotency_window_ms
        if repeated_for_ms >= window_ms:
            raise BadInput(
                f"{self.name} remembers for {window_ms} ms which batches were written (idempotency_window_ms), and "
                f"this client repeats a batch for up to {repeated_for_ms} ms (timeout_s and retry_s); nothing was "
                "done, connect with less than that or let the topic remember longer"
            )

    def append_numbered(
        self,
        tables: Iterable[pa.Table | pa.RecordBatch],
        *,
        writer: str,
        number: int,
        sum: tuple[int, int],
        query_id: str = "",
    ) -> Call[Appended]:
        owner, now_ms = token_hex(16), SystemClock().now_us() // 1000
        chunks = []
        for place, table in enumerate(tables):
            content, chunk = encode_table(table), f"{owner}-{now_ms:012x}-{place:016x}"
            headers = {"Content-Type": ARROW}
            yield Request("PUT", self.path(f"/staging/{chunk}"), content, headers=headers, retry_safe=True)
            digest = f"{xxh3_64_intdigest(content):016x}"
            chunks.append({"chunk": chunk, "rows": table.num_rows, "bytes": len(content), "sum": digest})
        body = {
            "writer": writer,
            "number": number,
            "sum": PutBatch.checksum_hex(sum),
            "query_id": query_id,
            "chunks": chunks,
        }
        try:
            return parse_appended((yield from self._post("/batches", body, wait_s=_LONG_WORK_S)))
        finally:
            yield Request("DELETE", self.path(f"/staging/{owner}"), retry_safe=True)

    def producer_batches(self, writer: str) -> Call[dict[int, BatchRange]]:
        rows = (yield from self._get("/batches", writer=writer))["batches"]
        return {
            row["number"]: BatchRange(
                row["first_seq"], row["last_seq"], (int(row["sum"][:16], 16), int(row["sum"][16:], 16)), row["query_id"]
            )
            for row in rows
        }

    def delete(
        self, *, match: object = None, before_seq: int | None = None, seqs: Sequence[int] | None = None
    ) -> Call[Deleted]:
        body = {"match": match, "before_seq": before_seq, "seqs": _seq_list(seqs)}
        done = yield from self._post("/delete", body)
        return Deleted(done["deleted"], done["earliest_seq"], done["head_seq"], done["count"], done["bytes"])

    def compact(self) -> Call[Compacted]:
        done = yield from self._post("/compact", {}, wait_s=_LONG_WORK_S)
        return Compacted(done["removed"], done["bytes"], done["tombstones"], done["compacted_to"])

    def seal(self) -> Call[None]:
        yield from self._post("/seal", {})

    def rewrite(self, *, force: bool = False) -> Call[RewriteResult]:
        done = yield from self._post("/rewrite", {"force": force}, wait_s=_LONG_WORK_S)
        files = tuple(RewrittenFile(*(row[name] for name in RewrittenFile._fields)) for row in done["segments"])
        skipped = tuple(SkippedSegment(row["base"], row["reason"]) for row in done["skipped"])
        return RewriteResult(done["topic"], files, skipped)

    def erase(self, *, match: object = None, seqs: Sequence[int] | None = None) -> Call[ErasureReceipt]:
        body = {"match": match, "seqs": _seq_list(seqs)}
        done = yield from self._post("/erase", body, wait_s=_LONG_WORK_S)
        return msgspec.convert(done, ErasureReceipt)

    def redrive(
        self, *, to: str | None = None, match: object = None, rate: float | None = None, limit: int | None = None
    ) -> Call[RedriveResult]:
        if limit is not None:
            check_int("limit", limit, 0, SEQ_MAX)
        count, queues, skipped = 0, dict[str, int](), 0
        while True:
            page = _REDRIVE_PAGE_RECORDS if limit is None else min(limit - count, _REDRIVE_PAGE_RECORDS)
            body = {"to": to, "match": match, "rate": rate, "limit": page}
            done = yield from self._post("/redrive", body, retry_safe=False)
            count, skipped = count + done["redriven"], done["skipped"]
            for queue, number in done["queues"].items():
                queues[queue] = queues.get(queue, 0) + number
            if not done["redriven"] or (limit is not None and count >= limit):
                return RedriveResult(count, queues, skipped)

    # ── reading ───────────────────────────────────────────────────────────────────────────────

    def read(
        self,
        from_seq: int = 0,
        limit: int = READ_LIMIT,
        *,
        node: str | Sequence[str] | None = None,
        bytes_max: int = 1 << 20,
        timeout: Seconds | None = 0.0,
        strong: bool = False,
    ) -> Call[Page]:
        check_int("from_seq", from_seq, 0, SEQ_MAX)
        body: dict[str, object] = {"from_seq": from_seq, "consistency": "strong" if strong else "eventual"}
        return (yield from self.read_page(self.path("/diff"), body, limit, node, bytes_max, timeout))

    def read_page(
        self,
        path: str,
        body: dict[str, object],
        limit: int,
        node: str | Sequence[str] | None,
        bytes_max: int,
        timeout: Seconds | None,
    ) -> Call[Page]:
        """Read the records after a cursor from a route of the server; wait for the first one."""
        check_int("limit", limit, 1, SEQ_MAX)
        check_int("bytes_max", bytes_max, 1, SEQ_MAX)
        parse_nodes(node)
        timeout_s = seconds("timeout", timeout)
        left_ms = None if timeout_s is None else max(int(timeout_s * 1000), 0)
        body |= {
            "node": node_list(node),
            "limit": min(limit, READ_LIMIT_MAX),
            "max_batch_bytes": min(bytes_max, READ_BYTES_MAX),
            "include_tags": True,
            "include_counts": True,
        }
        while True:
            body["wait_ms"] = wait_ms = POLL_MS if left_ms is None else min(left_ms, POLL_MS)
            content, wait_s = encode_json(body), wait_ms / 1000
            response = yield Request("POST", path, content, retry_safe=True, wait_s=wait_s, reads=True)
            page = self.parse_page(response.json())
            is_news = page.records or page.gap or not page.caught_up or sum(page.counts)
            left_ms = None if left_ms is None else left_ms - response.elapsed_ms
            if is_news or (left_ms is not None and left_ms <= 0):
                return (yield from self._fill_page(body, page, limit, bytes_max))

    def parse_page(self, body: Mapping[str, Any]) -> Page:
        return parse_page(body, self._open_record)

    def _fill_page(self, body: dict[str, object], page: Page, limit: int, bytes_max: int) -> Call[Page]:
        """Add what a page of the server did not hold: it has limits of its own."""
        while page.records and not page.caught_up and len(page.records) < limit and limit > READ_LIMIT_MAX:
            rest = body | {"from_seq": page.next_from_seq, "wait_ms": 0, "limit": min(limit - len(page.records), 1_000)}
            response = yield Request("POST", self.path("/diff"), encode_json(rest), retry_safe=True, reads=True)
            size = len(response.content)
            more = parse_page(response.json(), self._open_record)
            if more.gap is not None or not more.records:
                return page
            bytes_max -= size
            page = more._replace(records=page.records + more.records, gap=page.gap, counts=page.counts + more.counts)
            if bytes_max <= 0:
                return page
        return page

    def scan_page(self, cursor: ScanCursor) -> Call[list[pa.RecordBatch]]:
        """Read the next page of a bulk read and move its cursor."""
        request = Request("GET", self.path("/records"), query=cursor.query(), retry_safe=True, accept=ARROW)
        response = yield request
        return cursor.accept(parse_scan_page(response.content))

    def to_arrow(
        self,
        from_seq: int = 0,
        to_seq: int | None = None,
        *,
        since: Time | None = None,
        until: Time | None = None,
        columns: Sequence[str] | None = None,
        filter: object = None,
        node: str | Sequence[str] | None = None,
        strong: bool = False,
    ) -> Call[pa.Table]:
        nodes = parse_nodes(node)
        check_int("from_seq", from_seq, 0, SEQ_MAX)
        if since is not None:
            from_seq = max(from_seq, (yield from self.seek(time_ms("since", since))) - 1)
        if until is not None:
            before = (yield from self.seek(time_ms("until", until))) - 1
            to_seq = before if to_seq is None else min(to_seq, before)
        query = frames.TableQuery(from_seq, to_seq, columns, filter)
        segments: list[ListedSegment] = []
        if query.filter is not None:
            listed = (yield from self.list_segments())["segments"]
            segments = [ListedSegment(row["base"], row["stop"], row["first_ts"], row["last_ts"]) for row in listed]
        batches: list[pa.RecordBatch] = []
        gaps: list[Gap] = []
        counts = Counts()
        for first, last in query.ranges(segments):
            cursor = ScanCursor(first, last, nodes, SEQ_MAX, strong, query.needed)
            while not cursor.is_done:
                batches += map(query.select, (yield from self.scan_page(cursor)))
            gaps, counts = gaps + cursor.gaps, counts + cursor.counts
        rows = sum(map(len, batches))
        counts = counts._replace(rows=rows, filtered=counts.filtered + counts.rows - rows)
        return query.table(batches, table_metadata(gaps, counts))

    def record_head(self, seq: int, *, strong: bool = False) -> Call[RecordHead]:
        check_int("seq", seq, 1, SEQ_MAX)
        query = {"consistency": "strong" if strong else None}
        path = self.path(f"/records/{seq}/data")
        try:
            response = yield Request("HEAD", path, None, query, {}, True, "*/*")
        except Error:  # a response to HEAD has no body that says what is wrong
            response = yield Request("GET", path, None, query, {"Range": "bytes=0-0"}, True, "*/*")
            raise Unavailable(f"record {seq} of {self.name} cannot be opened; nothing was read, retry") from None
        return RecordHead(int(response.headers["content-length"]), response.headers["etag"].strip('"'))

    def record_range(self, seq: int, head: RecordHead, first: int, stop: int) -> Call[bytes]:
        """Bytes [first, stop) of the data of a record."""
        if first >= stop:
            return b""
        headers = {"Range": f"bytes={first}-{stop - 1}", "If-Range": f'"{head.xxh3}"'}
        path = self.path(f"/records/{seq}/data")
        response = yield Request("GET", path, None, {}, headers, True, "*/*")
        if response.headers.get("etag") != f'"{head.xxh3}"' or len(response.content) != stop - first:
            raise Unavailable(
                f"record {seq} of {self.name} is another one now: the topic was dropped and created again; nothing was "
                "read, open the record again"
            )
        return response.content

    def seek(self, ts_ms: Time) -> Call[int]:
        given_ms = min(max(time_ms("ts_ms", ts_ms), 0), TS_MS_MAX)
        seq: int = (yield from self._post("/seek", {"ts": given_ms}, reads=True))["seq"]
        return seq

    def gaps(self, from_ms: Time | None = None, limit: int = GAPS_LIMIT_DEFAULT) -> Call[GapEntries]:
        return (yield from read_gaps(self.path("/gaps"), from_ms, limit, current=True))

    def list_segments(self, *, strong: bool = False) -> Call[dict[str, Any]]:
        return (yield from self._get("/segments", sums=False, consistency="strong" if strong else None))

    def segment_bytes(self, base: int, generation: int, kind: str, lo: int, hi: int | None) -> Call[bytes | None]:
        """Bytes [lo, hi) of a segment file; None where the segment has no such file."""
        if hi is not None and lo >= hi:
            return b""
        headers = {} if hi is None else {"Range": f"bytes={lo}-{hi - 1}"}
        path, query = self.path(f"/segments/{base}/{kind}"), {"generation": generation}
        response = yield Request("GET", path, None, query, headers, True, "*/*")
        return response.content

    def simulate_retention(
        self, *, cap_records: int | None = None, cap_bytes: int | None = None, ttl_ms: Duration | None = None
    ) -> Call[RetentionPreview]:
        kept_ms = None if ttl_ms is None else duration_ms("ttl_ms", ttl_ms)
        limits = {"cap_records": cap_records, "cap_bytes": cap_bytes, "ttl_ms": kept_ms}
        found = yield from self._post("/retention/simulate", limits, reads=True)
        return RetentionPreview(
            found["topic"],
            parse_config(found["config"]),
            EvictedRange(*found["cap"].values()),
            EvictedRange(*found["ttl"].values()),
            found["evict_floor"],
            SizeCount(*found["remaining"].values()),
            tuple(UnreadLoss(*loss.values()) for loss in found["groups"]),
            tuple(found["held_by"]),
        )

    # ── latest ────────────────────────────────────────────────────────────────────────────────

    def latest_record(self, key: str, prefix: str = "") -> Call[Record | None]:
        """Return the newest record of a key."""
        if not is_utf8_text(key) or not key:
            raise BadInput(f"a key is text, not {key!r:.80}; nothing was read")
        if not key.startswith(prefix):
            return None
        return next((row.record for row in (yield from self._latest(key=key)).records), None)

    def latest_page(self, prefix: str, limit: int, after: str | None) -> Call[LatestPage]:
        check_int("limit", limit, 1, SEQ_MAX)
        return (yield from self._latest(prefix=prefix or None, limit=min(limit, READ_LIMIT_MAX), after=after))

    def latest_table(self, prefix: str) -> Call[pa.Table]:
        tables: list[pa.Table] = []
        after: str | None = None
        while True:
            query = {"prefix": prefix or None, "after": after, "format": "arrow"}
            response = yield Request("GET", self.path("/latest"), None, query, {}, True, ARROW)
            table = pa.ipc.open_stream(response.content).read_all()
            after = (table.schema.metadata or {}).get(b"next_after", b"").decode() or None
            tables.append(table.replace_schema_metadata(None))
            if after is None:
                return frames.typed_records(pa.concat_tables(tables).sort_by("seq"))

    def _latest(self, **query: object) -> Call[LatestPage]:
        found = yield from self._get("/latest", **query)
        rows = [LatestRecord(row["key"], parse_record(row, self._open_record)) for row in found["records"]]
        return LatestPage(rows, found.get("next_after"))

    # ── configuration ─────────────────────────────────────────────────────────────────────────

    def ensure(self, *, create: bool, fields: dict[str, object]) -> Call[None]:
        """Create the topic or set fields. A PUT replaces the whole config, so the present fields are sent with it."""
        fields = fields_in_ms(fields)
        TopicConfig.make(fields)  # a misspelt field has the same error here and there
        present: dict[str, object] = {}
        try:
            present = (yield from self._get("", touch=False))["config"]
        except TopicNotFound:
            if not create:
                raise
        if not present or any(present.get(field) != value for field, value in fields.items()):
            present.pop("durable", None)  # follows `durability`
            yield from self.put_config({**present, **fields})

    def put_config(self, fields: dict[str, object]) -> Call[bool]:
        """Set the whole config; return whether the topic was created."""
        response = yield Request("PUT", self.path(), encode_json(fields_in_ms(fields)), retry_safe=True)
        return bool(response.json()["created"])

    def contains(self, seq: object) -> Call[bool]:
        """Whether there is a live record of this seq."""
        check_int("seq", seq, 1, SEQ_MAX)
        assert isinstance(seq, int), "checked"
        page = yield from self.read(seq - 1, 1)
        return bool(page.records) and page.records[0].seq == seq

    def exists(self) -> Call[bool]:
        try:
            yield from self._get("", touch=False)
        except TopicNotFound:
            return False
        return True


def _seq_list(seqs: object) -> list[Any] | None:
    if seqs is None:
        return None
    if not isinstance(seqs, list | tuple | range | set | frozenset):
        raise BadInput(f"seqs are a list of whole numbers, not {type(seqs).__name__}; nothing was deleted")
    return list(seqs)


def _write_key(key: str | None) -> str:
    """The key of a write: the caller's, or one of its own."""
    if key is None:
        return f"auto-{token_hex(12)}"
    if not is_utf8_text(key) or not key:
        raise BadInput(f"a key is text of 1 to 256 bytes, not {key!r:.80}; nothing was written")
    return key


def new_producer_name() -> str:
    """A name that no other producer has, for the keys of its batches."""
    return token_hex(16)


def encode_batch(batch: Batch) -> Buffer:
    """Encode records as an Arrow stream."""
    count, columns = len(batch), {"data": pa.array(batch.datas, pa.binary())}
    for name, column in (("tag", batch.tag), ("node", batch.node), ("meta", batch.metas)):
        if column:
            values = column if isinstance(column, list) else [column] * count
            columns[name] = pa.array(values, pa.binary())
    if batch.json is not False:
        columns["json"] = pa.array(batch.json if isinstance(batch.json, list) else [True] * count, pa.bool_())
    return encode_table(pa.record_batch(columns))


def encode_table(table: pa.Table | pa.RecordBatch) -> bytes:
    """Encode a table as an Arrow stream."""
    if not isinstance(table, pa.Table | pa.RecordBatch):
        raise BadInput(f"append_arrow takes a table or a record batch, not {type(table).__name__}; nothing was written")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def parse_scan_page(content: bytes) -> ScanPage:
    """Decode a bulk read. Raises Unavailable where it was cut off."""
    batches, end = [], None
    try:
        with pa.ipc.open_stream(content) as reader:
            while True:
                batch, metadata = reader.read_next_batch_with_custom_metadata()
                if metadata is not None and b"next_from_seq" in dict(metadata):
                    end = {name.decode(): msgspec.json.decode(value) for name, value in dict(metadata).items()}
                elif len(batch):
                    batches.append(batch.replace_schema_metadata(None))
    except StopIteration:
        pass
    except (pa.ArrowException, OSError) as error:
        raise Unavailable(f"a page of records did not arrive whole ({error}); nothing was lost, retry") from None
    if end is None:
        raise Unavailable("a page of records did not arrive whole; nothing was lost, retry")
    gaps = [Gap(**gap) for gap in end["gaps"]]
    counts = Counts(**end["counts"])
    return ScanPage(batches, gaps, counts, end["next_from_seq"], end["head_seq"], end["earliest_seq"])


def read_gaps(
    path: str, from_ms: Time | None, limit: int, after_seq: int | None = None, **query: object
) -> Call[GapEntries]:
    """Read entries of the gap log, page by page. With `after_seq` a topic without entries need not exist."""
    check_int("limit", limit, 1, SEQ_MAX)
    since_ms = None if from_ms is None else time_ms("from_ms", from_ms)
    check_int("from_ms", since_ms or 0, 0, TS_MS_MAX)
    entries = GapEntries()
    cursor = None if after_seq is None else encode_page_cursor(str(after_seq))
    while len(entries) < limit:
        count = min(limit - len(entries), GAPS_LIMIT_MAX)
        given = {"from": since_ms, "limit": count, "cursor": cursor, **query}
        page = (yield Request("GET", path, query=given, retry_safe=True)).json()
        entries += map(parse_gap_entry, page["gaps"])
        cursor = page.get("next_cursor")
        if cursor is None:
            break
    return entries
