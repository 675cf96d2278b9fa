"""Following a topic: the position of a follower, and the loops over a topic of a directory or of a server.

    FollowCursor ──► read: waits for the next records ──► accept(page): records and gaps, in order; the cursor moves
         ▲                                                     │
         └─────────────────────────────────────────────────────┘

The cursor moves when a page is accepted. So a follower continues from there after an error, and one of a server after a
restart of it: every read is repeated until it has a response. `aio.follow` has the same loops for asyncio.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol, TypedDict, overload

import pyarrow as pa

from tidelog.engine.batch_encoder import check_int
from tidelog.engine.read import OnGap, check_on_gap
from tidelog.engine.results import Page, Record
from tidelog.engine.topic_index import Gap
from tidelog.errors import BadInput, GapFound
from tidelog.formats.frame import SEQ_MAX
from tidelog.frames import RECORD_SCHEMA
from tidelog.times import Seconds, seconds

PAGE_RECORDS: Final = 1_000
PAGE_BYTES: Final = 1 << 20
ARROW_BATCH_RECORDS: Final = 10_000
_HEARTBEAT_S_MIN: Final = 0.001
# `from_pylist` and `pa.array` import pandas where it is installed, which takes as long as all of this package.
EMPTY_ARROW_BATCH: Final = pa.RecordBatch.from_arrays(
    [pa.nulls(0, each.type) for each in RECORD_SCHEMA], schema=RECORD_SCHEMA
)


class PageQuery(TypedDict):
    """The arguments of `Topic.read` for the next page."""

    from_seq: int
    limit: int
    node: str | Sequence[str] | None
    bytes_max: int
    timeout: float | None
    strong: bool


class FollowCursor:
    """The position of a follower, what it does at a gap, and how long it waits."""

    def __init__(
        self,
        topic: str,
        from_seq: int = 0,
        *,
        timeout: Seconds | None = None,
        node: str | Sequence[str] | None = None,
        on_gap: OnGap = "fail",
        strong: bool = False,
        batch: int | None = None,
        heartbeat: Seconds | None = None,
    ) -> None:
        check_on_gap(on_gap)
        check_int("from_seq", from_seq, 0, SEQ_MAX)
        if batch is not None:
            check_int("batch", batch, 1, SEQ_MAX)
        if heartbeat is not None and batch is None:
            raise BadInput("a heartbeat is an empty batch; nothing was read, pass batch=1000 as well")
        heartbeat_s = seconds("heartbeat", heartbeat)
        if heartbeat_s is not None and not heartbeat_s >= _HEARTBEAT_S_MIN:
            raise BadInput(f"heartbeat is a number of seconds, at least {_HEARTBEAT_S_MIN}, not {heartbeat!r:.80}")
        self.from_seq, self.strong = from_seq, strong
        self.batch = batch or PAGE_RECORDS
        self.is_ended = False  # no record arrived for `timeout` seconds
        self._topic, self._node, self._on_gap = topic, node, on_gap
        self._timeout = seconds("timeout", timeout)
        self._heartbeat, self._idle_s = heartbeat_s, 0.0

    @property
    def wait_s(self) -> float | None:
        """How long to wait for the next record."""
        left = None if self._timeout is None else max(self._timeout - self._idle_s, 0.0)
        if self._heartbeat is None or left is None:
            return left if self._heartbeat is None else self._heartbeat
        return min(left, self._heartbeat)

    def query(self) -> PageQuery:
        return {
            "from_seq": self.from_seq,
            "limit": self.batch,
            "node": self._node,
            "bytes_max": PAGE_BYTES,
            "timeout": self.wait_s,
            "strong": self.strong,
        }

    def probe(self) -> PageQuery:
        """`query` that only waits for the next record."""
        return {**self.query(), "limit": 1, "bytes_max": 1}

    def accept(self, page: Page) -> Page | None:
        """Move past a page and return it as the follower yields it; an empty one is a heartbeat. None: nothing to
        yield. Raises GapFound where records were lost and `on_gap` is fail; the cursor then stays."""
        if page.gap is not None:
            self._check_gap(page.gap)
        if self.is_news(page):
            self._idle_s = 0.0
            self.from_seq = page.next_from_seq
            page = page if self._on_gap == "emit" else page._replace(gap=None)
            return page if page.records or page.gap is not None else None
        return page if self.note_idle() else None

    def is_news(self, page: Page) -> bool:
        """Whether there is more after the cursor than before."""
        return page.next_from_seq != self.from_seq or page.gap is not None

    def note_idle(self) -> bool:
        """Nothing arrived for `wait_s`; return whether a heartbeat is due."""
        waited = self.wait_s
        self._idle_s += waited or 0.0
        self.is_ended = self._timeout is not None and self._idle_s >= self._timeout
        return self._heartbeat is not None and not self.is_ended

    def _check_gap(self, gap: Gap) -> None:
        if self._on_gap == "fail":
            raise GapFound(self._topic, gap)

    # ── Arrow ─────────────────────────────────────────────────────────────────────────────────

    def accept_arrow(self, batch: pa.RecordBatch, gaps: Sequence[Gap]) -> Iterator[pa.RecordBatch | Gap]:
        """Move past a batch of a scan; yield the gaps before it and its records. `gaps`: those of the scan so far."""
        seqs = batch.column("seq")
        yield from self._accept_gaps(gaps, seqs[0].as_py())
        for start in range(0, len(batch), self.batch):
            part = batch.slice(start, self.batch)
            self.from_seq = seqs[start + len(part) - 1].as_py()
            yield part

    def finish_arrow(self, gaps: Sequence[Gap], next_from_seq: int) -> Iterator[Gap]:
        """Move to the end of a scan; yield the gaps after its last batch."""
        yield from self._accept_gaps(gaps, next_from_seq + 1)
        self.from_seq = max(self.from_seq, next_from_seq)

    def _accept_gaps(self, gaps: Sequence[Gap], before_seq: int) -> Iterator[Gap]:
        for gap in gaps:
            if self.from_seq < gap.gap_to < before_seq:
                self._check_gap(gap)
                self.from_seq = gap.gap_to
                if self._on_gap == "emit":
                    yield gap


class FollowedScan(Protocol):
    @property
    def gaps(self) -> list[Gap]: ...
    @property
    def next_from_seq(self) -> int: ...
    def iter_arrow_batches(self) -> Iterator[pa.RecordBatch]: ...


class FollowedTopic(Protocol):
    """A topic of a directory or of a server, as the loops below use it."""

    @property
    def name(self) -> str: ...
    def read(
        self,
        from_seq: int = 0,
        limit: int = 256,
        *,
        node: str | Sequence[str] | None = None,
        bytes_max: int = 1 << 20,
        timeout: Seconds | None = 0.0,
        strong: bool = False,
    ) -> Page: ...
    def scan(self, from_seq: int = 0, to_seq: int | None = None, *, strong: bool = False) -> FollowedScan: ...


def follow_pages(topic: FollowedTopic, cursor: FollowCursor) -> Iterator[Page]:
    """Yield pages of records as they arrive, forever or until none arrived for the timeout."""
    while not cursor.is_ended:
        page = cursor.accept(topic.read(**cursor.query()))
        if page is not None:
            yield page


def follow_records(topic: FollowedTopic, cursor: FollowCursor) -> Iterator[Record | Gap]:
    """`follow_pages`, one record at a time."""
    for page in follow_pages(topic, cursor):
        if page.gap is not None:
            yield page.gap
        yield from page.records


@overload
def follow(
    topic: FollowedTopic,
    /,
    from_seq: int = 0,
    *,
    timeout: Seconds | None = None,
    node: str | Sequence[str] | None = None,
    on_gap: OnGap = "fail",
    strong: bool = False,
    batch: None = None,
    heartbeat: None = None,
) -> Iterator[Record | Gap]: ...


@overload
def follow(
    topic: FollowedTopic,
    /,
    from_seq: int = 0,
    *,
    timeout: Seconds | None = None,
    node: str | Sequence[str] | None = None,
    on_gap: OnGap = "fail",
    strong: bool = False,
    batch: int,
    heartbeat: Seconds | None = None,
) -> Iterator[Page]: ...


def follow(
    topic: FollowedTopic,
    /,
    from_seq: int = 0,
    *,
    timeout: Seconds | None = None,
    node: str | Sequence[str] | None = None,
    on_gap: OnGap = "fail",
    strong: bool = False,
    batch: int | None = None,
    heartbeat: Seconds | None = None,
) -> Iterator[Record | Gap] | Iterator[Page]:
    """Yield records as they are written, until none arrived for `timeout` seconds; None: forever.

    In a read-only engine, records of the writing process are seen within about 0.2 s.

    Where records were lost to a cap or to age before they were read, `fail` raises GapFound, `emit` yields the Gap
    in their place, `skip` continues. `strong`: as for `read`.

    With `batch`: yield pages of at most so many records, and about 1 MiB. `page.gap` is before the records of its
    page. With `heartbeat` also an empty page whenever nothing arrived for so many seconds.

    >>> [record.seq for record in orders.follow(1, timeout=0)]
    [2, 3]
    >>> [len(page.records) for page in orders.follow(timeout=0, batch=2)]
    [2, 1]
    """
    cursor = FollowCursor(
        topic.name,
        from_seq,
        timeout=timeout,
        node=node,
        on_gap=on_gap,
        strong=strong,
        batch=batch,
        heartbeat=heartbeat,
    )
    return follow_records(topic, cursor) if batch is None else follow_pages(topic, cursor)


def follow_arrow(
    topic: FollowedTopic,
    /,
    from_seq: int = 0,
    *,
    timeout: Seconds | None = None,
    on_gap: OnGap = "fail",
    strong: bool = False,
    batch: int = ARROW_BATCH_RECORDS,
    heartbeat: Seconds | None = None,
) -> Iterator[pa.RecordBatch | Gap]:
    """`follow` as Arrow batches of at most `batch` records, with the columns of `to_arrow`; a heartbeat is an empty
    batch. With `on_gap="emit"` a Gap is yielded between the batches, in its place.

    >>> [batch.num_rows for batch in orders.follow_arrow(timeout=0)]
    [3]
    """
    cursor = FollowCursor(
        topic.name, from_seq, timeout=timeout, on_gap=on_gap, strong=strong, batch=batch, heartbeat=heartbeat
    )
    return follow_batches(topic, cursor)


def follow_batches(topic: FollowedTopic, cursor: FollowCursor) -> Iterator[pa.RecordBatch | Gap]:
    """Yield records as Arrow batches as they arrive. A read waits for the next record, a scan reads all there are."""
    while not cursor.is_ended:
        if not cursor.is_news(topic.read(**cursor.probe())):
            if cursor.note_idle():
                yield EMPTY_ARROW_BATCH
            continue
        scan = topic.scan(cursor.from_seq, strong=cursor.strong)
        for batch in scan.iter_arrow_batches():
            yield from cursor.accept_arrow(batch, scan.gaps)
        yield from cursor.finish_arrow(scan.gaps, scan.next_from_seq)
