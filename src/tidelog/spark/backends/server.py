"""Topics of a server, without a shared disk.

driver      GET …/segments?limit=0             the ends of a topic; idle streams send nothing else
            GET …/segments?format=arrow        segment files from a seq on, as columns: 100,000 are four requests
executor    GET …/segments/{base}/data, idx    the bytes of a range; frames are verified one by one
            GET …/records                      the tail, and records whose file is gone, as Arrow
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from http.client import HTTPException
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidelog.engine import Counts
from tidelog.engine.manifest import epoch_topic_id
from tidelog.engine.segment_table import SegmentTable
from tidelog.errors import BadInput, Corrupt, NotFound, TopicNotFound, Unavailable
from tidelog.formats import segment_index
from tidelog.spark.backends import interface
from tidelog.spark.backends.interface import (
    INDEX_BLOCK_ENTRIES,
    BoolArray,
    ColumnSet,
    InlineRecords,
    ReadChunk,
    ReadRange,
    Segments,
    TopicGap,
    TopicSnapshot,
    clip_counts,
    decode_deletions,
    estimate_bytes,
)
from tidelog.spark.groups import ServerGroups
from tidelog.spark.http_client import Client, ServerUnreachable, connection_error, open_client, quote_name
from tidelog.spark.options import IS_JSON

_PAGE_SIZE: Final = 1000
_decode = msgspec.json.decode


_Version: TypeAlias = tuple[int, ...]
_TABLES_MAX: Final = 64  # listings of so many topics are kept


class _Table(NamedTuple):
    """The segments with seqs of [first, stop) at a version of their topic."""

    version: _Version
    first: int
    stop: int
    table: SegmentTable


def _version(listing: Mapping[str, Any]) -> _Version:
    """What changes when segments or their deletions do."""
    return tuple(int(listing[name]) for name in ("epoch", "generation", "removals", "earliest_seq", "evict_floor"))


class ServerBackend:
    has_timestamps = has_json_flag = True

    def __init__(
        self,
        server: str,
        key: str | None,
        *,
        retry_ms: int = 0,
        http: Client | None = None,
        strong: bool = False,
    ) -> None:
        """`strong`: plans end with the last record that survives a power cut."""
        self._consistency = {"consistency": "strong"} if strong else {}
        self._tables: dict[str, _Table] = {}
        self._server, self._http = server, http or open_client(server, key, retry_ms=retry_ms)

    def refresh(self) -> None:
        """No effect: every call asks the server. Listings are kept as long as the server names the same version."""

    def close(self) -> None:
        self._http.close()

    @property
    def groups(self) -> ServerGroups:
        return ServerGroups(self._http)

    # ── planning ──────────────────────────────────────────────────────────────────────────────

    def names(self) -> list[str]:
        found: list[str] = []
        query: dict[str, object] = {"page_size": _PAGE_SIZE}
        while True:
            page = self._http.get("/v0/topics", **query)
            found += [row["topic"] for row in page["topics"]]
            if not page.get("next_cursor"):
                return found
            query["cursor"] = page["next_cursor"]

    def snapshot(self, topic: str) -> TopicSnapshot | None:
        """One request: segments are listed when they are needed."""
        path = f"/v0/topics/{quote_name(topic)}"
        try:
            listing = self._http.get(f"{path}/segments", limit="0", **self._consistency)
        except TopicNotFound:
            return None
        if "removals" not in listing:
            raise BadInput(
                f"the server {self._server} is of an earlier version, which lists no segments from a seq on; nothing "
                "was read, update it"
            )
        head, tail = listing["head_seq"], listing["tail"]["from_seq"]
        return TopicSnapshot(
            topic,
            listing["epoch"],
            1,
            head + 1,
            listing["earliest_seq"],
            listing["evict_floor"],
            tail + 1,
            estimate_bytes(head - tail, listing["records"], listing["bytes"]),
            partial(self._list_segments, topic, _version(listing)),
        )

    def _list_segments(self, topic: str, version: _Version, first: int, stop: int) -> Segments:
        cached = self._tables.get(topic)
        if cached is None or cached.version != version or not cached.first <= first < stop <= cached.stop:
            cached = self._request_table(topic, first, stop)
            self._tables.pop(topic, None)
            self._tables[topic] = cached
            if len(self._tables) > _TABLES_MAX:
                del self._tables[next(iter(self._tables))]
        whole = cached.table
        lo, hi = int(np.searchsorted(whole.stop, first, "right")), int(np.searchsorted(whole.base, stop))
        table = whole.slice(lo, max(hi, lo))
        path = f"/v0/topics/{quote_name(topic)}/segments"

        def place(at: int, kind: str) -> str:
            return f"{path}/{int(table.base[at])}/{kind}?generation={int(table.generation[at])}"

        @lru_cache(maxsize=64)
        def index_block(at: int, number: int) -> NDArray[np.void]:
            lo, hi = number * INDEX_BLOCK_ENTRIES, min((number + 1) * INDEX_BLOCK_ENTRIES, int(table.records[at]))
            content = self._http.get_range(
                place(at, "idx"), lo * segment_index.ENTRY_BYTES, hi * segment_index.ENTRY_BYTES
            )
            return segment_index.read_entries(content)

        def frame_offset(at: int, seq: int) -> int:
            number, entry = divmod(seq - int(table.base[at]), INDEX_BLOCK_ENTRIES)
            try:
                return int(index_block(at, number)["frame_offset"][entry])
            except NotFound:  # the segment was replaced since: about there
                return int(table.size[at]) * (seq - int(table.base[at])) // int(table.records[at])

        def load_deleted(at: int) -> BoolArray | None:
            content = self._http.get_bytes(place(at, "del"))
            return decode_deletions(content, int(table.base[at]), int(table.records[at]))

        return Segments(table, (), load_deleted, frame_offset)

    def _request_table(self, topic: str, first: int, stop: int) -> _Table:
        """List the segments with seqs of [first, stop), a page a request."""
        pages: list[pa.Table] = []
        at: int | None = first
        version: _Version | None = None
        while at is not None and at < stop:
            query = {"format": "arrow", "from_seq": at, **self._consistency}
            with self._http.stream(f"/v0/topics/{quote_name(topic)}/segments", query=query) as response:
                page = pa.ipc.open_stream(response.read()).read_all()
            listing = _decode(page.schema.metadata[b"listing"])
            version, pages = _version(listing), [*pages, page] if version in (None, _version(listing)) else [page]
            restarted = len(pages) == 1 and at != first
            at = first if restarted else listing["next_from_seq"]
            if restarted:  # segments were replaced between two pages: list again
                pages, version = [], None
        joined = pa.concat_tables(page.replace_schema_metadata() for page in pages)
        columns = {name: joined.column(name).to_numpy() for name in joined.column_names}
        table = SegmentTable.of_columns(**columns)
        reached = stop if at is None else at
        assert version is not None, "there is at least one page"
        return _Table(version, first, max(stop, reached), table)

    def seek(self, topic: str, ts_ms: int) -> int:
        return int(self._http.post(f"/v0/topics/{quote_name(topic)}/seek", {"ts": ts_ms})["seq"])

    def time_of(self, topic: str, seq: int) -> int | None:
        body = {"from_seq": seq - 1, "limit": 1, "max_batch_bytes": 1}
        records = self._http.post(f"/v0/topics/{quote_name(topic)}/diff", body)["records"]
        return int(records[0]["$ts"]) if records else None

    def gap_before(self, topic: str, first: int) -> TopicGap | None:
        page = self._http.post(f"/v0/topics/{quote_name(topic)}/diff", {"from_seq": first - 1, "limit": 1})
        return None if page["tombstone"] is None else TopicGap.from_wire(topic, page["tombstone"])

    def account_missing(self, topic: str, first: int, stop: int) -> tuple[Counts, tuple[TopicGap, ...]]:
        retry = self._http.new_backoff()
        while True:
            try:
                return self._account_once(topic, first, stop)
            except ServerUnreachable as error:
                retry.wait_or_raise(error)

    def _account_once(self, topic: str, first: int, stop: int) -> tuple[Counts, tuple[TopicGap, ...]]:
        for found, about in self._stream_records(topic, first, stop, frozenset(("seq",))):
            if found is not None:
                reason = f"{topic}: {found.num_rows} records where none should be"
                raise Corrupt(self._server, pos=0, reason=reason)
            if "counts" in about:
                gaps = _stream_gaps(topic, about)
                return clip_counts(Counts(**about["counts"]), gaps, first, stop), gaps
        raise AssertionError("a stream ends with its counts or raises")

    def last_seq_before_drop(self, topic: str, epoch: int) -> int | None:
        query: dict[str, object] = {"limit": _PAGE_SIZE}
        while True:
            try:
                page = self._http.get(f"/v0/topics/{quote_name(topic)}/gaps", **query)
            except TopicNotFound:
                return None
            for row in page["gaps"]:
                if row["cause"] == "drop" and row["topic_id"] == epoch_topic_id(epoch):
                    return int(row["last"])
            if not page.get("next_cursor"):
                return None
            query["cursor"] = page["next_cursor"]

    def read_tail_inline(self, topic: str, first: int, stop: int) -> InlineRecords | None:  # noqa: ARG002
        return None  # executors request the tail from the server

    # ── reading ───────────────────────────────────────────────────────────────────────────────

    def read(self, read_range: ReadRange, columns: ColumnSet, *, verify: bool) -> Iterator[ReadChunk]:
        if read_range.file is None:
            yield from self._read_records(read_range, read_range.first, columns)
            return
        file, at = read_range.file, read_range.first
        where = f"/v0/topics/{quote_name(read_range.topic)}/segments/{file.base}"

        def fetch(kind: str, lo: int, hi: int) -> bytes:
            return self._http.get_range(f"{where}/{kind}?generation={file.generation}", lo, hi)

        try:
            read_range = read_range.with_deletions(
                lambda: decode_deletions(
                    self._http.get_bytes(f"{where}/del?generation={file.generation}"), file.base, file.stop - file.base
                )
            )
            for found, until in interface.read_segment_ranges(fetch, where, read_range, file, verify=verify):
                yield found
                at = until
        except NotFound:
            yield from self._read_records(read_range, at, columns)

    def _read_records(self, read_range: ReadRange, first: int, columns: ColumnSet) -> Iterator[ReadChunk]:
        """Read the range from `first` on as records, with the gaps and deletions since the plan."""
        at = first
        while at < read_range.stop:
            asked = _ResumableRead(read_range, at)
            retry = self._http.new_backoff()
            while asked.next_seq is None:
                try:
                    before = asked.last_seen_seq
                    for found in self._request_rest(asked, columns):
                        if asked.last_seen_seq > before:
                            retry.reset()
                        yield found
                except ServerUnreachable as error:
                    retry.wait_or_raise(error)
            at = asked.next_seq

    def _request_rest(self, resumable: _ResumableRead, columns: ColumnSet) -> Iterator[ReadChunk]:
        """Send one request for the rest of a range and skip rows that an earlier, aborted request has returned."""
        read_range, start = resumable.read_range, resumable.start
        hidden = 0
        try:
            for batch, about in self._stream_records(read_range.topic, start, read_range.stop, columns):
                if about.get("epoch", read_range.epoch) != read_range.epoch:
                    yield resumable.topic_gone("recreated")
                    return
                if batch is not None:
                    seqs = batch.column("seq").to_numpy()
                    known = int(np.searchsorted(seqs, resumable.last_seen_seq, "right"))
                    kept, deleted = batch.slice(known), resumable.deleted
                    if deleted is not None:
                        alive = ~deleted[seqs - read_range.first]
                        kept = kept.filter(pa.array(alive[known:]))
                        hidden += int((~alive).sum())
                    if len(seqs):
                        resumable.last_seen_seq = max(resumable.last_seen_seq, int(seqs[-1]))
                    resumable.rows_returned += kept.num_rows
                    yield ReadChunk(kept if kept.num_rows else None, Counts())
                if "counts" not in about:
                    continue
                gaps, counts = _stream_gaps(read_range.topic, about), Counts(**about["counts"])
                if about["head_seq"] < read_range.stop - 1:
                    raise Unavailable(
                        f"{read_range.topic} ends at seq {about['head_seq']} on {self._server}, the query was planned "
                        f"up to {read_range.stop - 1}; nothing was written, run it again"
                    )
                next_seq = int(about["next_from_seq"]) + 1
                # Rows that an aborted request returned and that were removed since: they are also in the counts of
                # this request.
                twice = resumable.rows_returned - (counts.rows - hidden)
                if not counts.rows and not resumable.rows_returned and next_seq >= read_range.stop:
                    clipped = tuple(gap.clip(read_range.stop) for gap in gaps)
                    yield ReadChunk(None, clip_counts(counts, gaps, start, read_range.stop), clipped)
                else:
                    yield ReadChunk(None, _subtract_rows(counts._replace(rows=0), twice) + Counts(deleted=hidden), gaps)
                resumable.next_seq = next_seq
        except TopicNotFound:
            yield resumable.topic_gone("dropped")

    def _stream_records(
        self, topic: str, first: int, stop: int, wanted_columns: ColumnSet
    ) -> Iterator[tuple[pa.RecordBatch | None, dict[str, Any]]]:
        """Yield batches of records, and metadata of the stream: before the first batch, and with counts after the
        last."""
        shown = {
            f"include_{word}": str(not wanted_columns.isdisjoint(columns)).lower() for word, columns in _INCLUDE_PARAMS
        }
        query = {"from_seq": first - 1, "to_seq": stop - 1, "format": "arrow", **shown}
        with self._http.stream(f"/v0/topics/{quote_name(topic)}/records", query=query) as response:
            try:
                with pa.ipc.open_stream(response) as reader:
                    yield None, _parse_metadata(reader.schema.metadata)
                    while True:
                        batch, about = reader.read_next_batch_with_custom_metadata()
                        if about is not None:
                            response.read()
                            yield None, _parse_metadata(about)
                            return
                        yield batch, {}
            except (StopIteration, pa.ArrowInvalid, HTTPException, OSError) as error:
                raise connection_error(self._server, error) from error


_INCLUDE_PARAMS: Final = (("data", ("data", IS_JSON)), ("tags", ("tag",)), ("meta", ("meta",)))


def _parse_metadata(metadata: dict[bytes, bytes] | None) -> dict[str, Any]:
    found = {key.decode(): value for key, value in (metadata or {}).items()}
    return {key: value.decode() if key == "topic" else _decode(value) for key, value in found.items()}


def _stream_gaps(topic: str, metadata: dict[str, Any]) -> tuple[TopicGap, ...]:
    """Return the gaps in the metadata at the end of a stream."""
    # A server of an earlier version sends only the first gap.
    gaps = metadata["gaps"] if "gaps" in metadata else [metadata["gap"]]
    return tuple(TopicGap.from_wire(topic, gap) for gap in gaps if gap is not None)


class _ResumableRead:
    """The state of reading a range across aborted requests."""

    def __init__(self, read_range: ReadRange, start: int) -> None:
        self.read_range, self.start, self.deleted = read_range, start, read_range.deleted_mask()
        self.last_seen_seq = start - 1
        self.rows_returned = 0
        self.next_seq: int | None = None  # set by a complete response

    def topic_gone(self, cause: str) -> ReadChunk:
        """Return the gap of the rest of the range, after its topic was dropped."""
        self.next_seq = self.read_range.stop
        gap = TopicGap(self.read_range.topic, self.last_seen_seq + 1, self.read_range.stop - 1, cause, 1, 0)
        gone = self.read_range.stop - self.start - self.rows_returned
        return ReadChunk(None, Counts(evicted=gone), (gap,) if self.last_seen_seq + 1 < self.read_range.stop else ())


def _subtract_rows(counts: Counts, rows: int) -> Counts:
    """Subtract seqs that were returned as rows before they were removed."""
    numbers = counts._asdict()
    for cause in ("deleted", "evicted", "expired", "holes"):
        taken = min(numbers[cause], rows)
        numbers[cause], rows = numbers[cause] - taken, rows - taken
    return Counts(**numbers)
