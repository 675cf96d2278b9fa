"""The loops of `tidelog.engine.follow` for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol, overload

import pyarrow as pa

from tidelog.engine import Gap, Page, Record
from tidelog.engine.follow import ARROW_BATCH_RECORDS, EMPTY_ARROW_BATCH, FollowCursor
from tidelog.engine.read import OnGap
from tidelog.times import Seconds


class AsyncFollowedScan(Protocol):
    @property
    def gaps(self) -> list[Gap]: ...
    @property
    def next_from_seq(self) -> int: ...
    def iter_arrow_batches(self) -> AsyncIterator[pa.RecordBatch]: ...


class AsyncFollowedTopic(Protocol):
    """A topic of a directory or of a server, as the loops below use it."""

    @property
    def name(self) -> str: ...
    async def read(
        self,
        from_seq: int = 0,
        limit: int = 256,
        *,
        node: str | Sequence[str] | None = None,
        bytes_max: int = 1 << 20,
        timeout: Seconds | None = 0.0,
        strong: bool = False,
    ) -> Page: ...
    def scan(self, from_seq: int = 0, to_seq: int | None = None, *, strong: bool = False) -> AsyncFollowedScan: ...


async def follow_pages(topic: AsyncFollowedTopic, cursor: FollowCursor) -> AsyncIterator[Page]:
    """Yield pages of records as they arrive, forever or until none arrived for the timeout."""
    while not cursor.is_ended:
        page = cursor.accept(await topic.read(**cursor.query()))
        if page is not None:
            yield page


async def follow_records(topic: AsyncFollowedTopic, cursor: FollowCursor) -> AsyncIterator[Record | Gap]:
    """`follow_pages`, one record at a time."""
    async for page in follow_pages(topic, cursor):
        if page.gap is not None:
            yield page.gap
        for record in page.records:
            yield record


@overload
def follow(
    topic: AsyncFollowedTopic,
    /,
    from_seq: int = 0,
    *,
    timeout: Seconds | None = None,
    node: str | Sequence[str] | None = None,
    on_gap: OnGap = "fail",
    strong: bool = False,
    batch: None = None,
    heartbeat: None = None,
) -> AsyncIterator[Record | Gap]: ...


@overload
def follow(
    topic: AsyncFollowedTopic,
    /,
    from_seq: int = 0,
    *,
    timeout: Seconds | None = None,
    node: str | Sequence[str] | None = None,
    on_gap: OnGap = "fail",
    strong: bool = False,
    batch: int,
    heartbeat: Seconds | None = None,
) -> AsyncIterator[Page]: ...


def follow(
    topic: AsyncFollowedTopic,
    /,
    from_seq: int = 0,
    *,
    timeout: Seconds | None = None,
    node: str | Sequence[str] | None = None,
    on_gap: OnGap = "fail",
    strong: bool = False,
    batch: int | None = None,
    heartbeat: Seconds | None = None,
) -> AsyncIterator[Record | Gap] | AsyncIterator[Page]:
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
    topic: AsyncFollowedTopic,
    /,
    from_seq: int = 0,
    *,
    timeout: Seconds | None = None,
    on_gap: OnGap = "fail",
    strong: bool = False,
    batch: int = ARROW_BATCH_RECORDS,
    heartbeat: Seconds | None = None,
) -> AsyncIterator[pa.RecordBatch | Gap]:
    cursor = FollowCursor(
        topic.name, from_seq, timeout=timeout, on_gap=on_gap, strong=strong, batch=batch, heartbeat=heartbeat
    )
    return follow_batches(topic, cursor)


async def follow_batches(topic: AsyncFollowedTopic, cursor: FollowCursor) -> AsyncIterator[pa.RecordBatch | Gap]:
    """Yield records as Arrow batches as they arrive. A read waits for the next record, a scan reads all there are."""
    while not cursor.is_ended:
        if not cursor.is_news(await topic.read(**cursor.probe())):
            if cursor.note_idle():
                yield EMPTY_ARROW_BATCH
            continue
        scan = topic.scan(cursor.from_seq, strong=cursor.strong)
        async for batch in scan.iter_arrow_batches():
            for item in cursor.accept_arrow(batch, scan.gaps):
                yield item
        for gap in cursor.finish_arrow(scan.gaps, scan.next_from_seq):
            yield gap
