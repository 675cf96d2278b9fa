"""Loops over a consumer group for asyncio, and the batch that a consumer has leased."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from typing import Protocol, get_args

from tidelog.client.database import documented_by
from tidelog.engine import Gap, GroupBatch, GroupState, Page, Record
from tidelog.engine.group_leases import LEASE_MS_DEFAULT
from tidelog.engine.groups import CommitMode
from tidelog.engine.read import OnGap, check_on_gap
from tidelog.errors import BadInput, GapFound
from tidelog.times import Duration, Seconds

_log = logging.getLogger(__name__)


class AsyncConsumedGroup(Protocol):
    """A group of a directory or of a server, as the loops below use it."""

    @property
    def name(self) -> str: ...
    @property
    def topic(self) -> str: ...
    async def state(self) -> GroupState: ...
    async def fetch(self, limit: int = 256, timeout: Seconds | None = 0.0) -> Page: ...
    async def commit(self, seq: int, *, expect: int | None = None) -> int: ...
    async def claim(
        self, consumer: str, limit: int = 256, *, lease_ms: Duration = LEASE_MS_DEFAULT, timeout: Seconds | None = 0.0
    ) -> AsyncGroupBatch | None: ...
    async def ack(self, consumer: str, lease_id: int) -> bool: ...
    async def release(self, consumer: str, lease_id: int) -> bool: ...
    async def extend(self, consumer: str, lease_id: int, lease_ms: Duration = LEASE_MS_DEFAULT) -> bool: ...


async def follow_group(
    group: AsyncConsumedGroup,
    /,
    *,
    commit: CommitMode = "batch",
    limit: int = 256,
    timeout: Seconds | None = None,
    on_gap: OnGap = "fail",
) -> AsyncIterator[Record | Gap]:
    if commit not in get_args(CommitMode):
        raise BadInput(f"commit is each or batch, not {commit!r:.80}; nothing was read")
    check_on_gap(on_gap)
    position = (await group.state()).position
    while True:
        page = await group.fetch(limit, timeout)
        if page.gap is not None and on_gap == "fail":
            raise GapFound(group.topic, page.gap)
        if page.gap is not None and on_gap == "emit":
            yield page.gap
        for record in page.records:
            yield record
            if commit == "each":
                position = await group.commit(record.seq, expect=position)
        if page.next_from_seq == position and not page.records:
            return
        position = await group.commit(page.next_from_seq, expect=position)


async def consume_group(
    group: AsyncConsumedGroup,
    /,
    consumer: str,
    batch: int = 256,
    *,
    lease_ms: Duration = LEASE_MS_DEFAULT,
    timeout: Seconds | None = None,
) -> AsyncIterator[AsyncGroupBatch]:
    while (claimed := await group.claim(consumer, batch, lease_ms=lease_ms, timeout=timeout)) is not None:
        try:
            yield claimed
        except BaseException:
            await claimed.release()
            raise
        if not claimed.is_settled and not await claimed.ack():
            _log.warning(
                "%s: the lease of consumer %s of group %s on records %d to %d ended before they were processed; they "
                "are delivered again. Give a longer lease_ms, or call extend",
                *(group.topic, consumer, group.name, claimed.first_seq, claimed.last_seq),
            )


@documented_by(GroupBatch)
class AsyncGroupBatch:
    """Records that are leased to one consumer of a group, from `claim` and `consume`. Iterates over its records."""

    def __init__(
        self,
        group: AsyncConsumedGroup,
        lease_id: int,
        consumer: str,
        records: list[Record],
        gap: Gap | None,
        *,
        first_seq: int,
        last_seq: int,
    ) -> None:
        self._group = group
        self.records, self.gap = records, gap
        self.lease_id, self.consumer = lease_id, consumer
        self.first_seq, self.last_seq = first_seq, last_seq
        self.is_settled = False  # acked or released, or found void by one of them

    def __repr__(self) -> str:
        return f"<{len(self.records)} records of group {self._group.name!r}, {self.first_seq} to {self.last_seq}>"

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __bool__(self) -> bool:  # `while batch := await group.claim(…)` does not end at a gap without records
        return True

    async def ack(self) -> bool:
        self.is_settled = True
        return await self._group.ack(self.consumer, self.lease_id)

    async def release(self) -> bool:
        self.is_settled = True
        return await self._group.release(self.consumer, self.lease_id)

    async def extend(self, lease_ms: Duration = LEASE_MS_DEFAULT) -> bool:
        return await self._group.extend(self.consumer, self.lease_id, lease_ms)
