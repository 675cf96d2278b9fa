"""Topics whose records are of one type, for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tidelog.client.database import documented_by
from tidelog.engine import Appended, Gap
from tidelog.engine.read import OnGap
from tidelog.engine.typed import Codec, TypedPage, TypedRecord, TypedTopic
from tidelog.times import Seconds

if TYPE_CHECKING:
    from tidelog import protocols

T = TypeVar("T")


@documented_by(TypedTopic)
class AsyncTypedTopic(Generic[T]):
    """A topic whose records are of one type. `AsyncTopic.typed` returns one."""

    def __init__(self, topic: protocols.AsyncTopic, kind: type[T]) -> None:
        self._topic, self._codec = topic, Codec(kind)

    def __repr__(self) -> str:
        return f"<async topic {self.name!r} of {self._codec.name}>"

    @property
    def name(self) -> str:
        return self._topic.name

    async def append(
        self,
        records: T | Sequence[T],
        *,
        tag: str | Sequence[str | None] | None = None,
        node: str | Sequence[str | None] | None = None,
        meta: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        key: str | None = None,
    ) -> Appended:
        self._codec.check(records)
        return await self._topic.append(records, tag=tag, node=node, meta=meta, key=key)

    async def read(
        self,
        from_seq: int = 0,
        limit: int = 256,
        *,
        node: str | Sequence[str] | None = None,
        timeout: Seconds | None = 0.0,
        strong: bool = False,
    ) -> TypedPage[T]:
        page = await self._topic.read(from_seq, limit, node=node, timeout=timeout, strong=strong)
        return self._codec.page(self.name, page)

    async def follow(
        self,
        from_seq: int = 0,
        *,
        timeout: Seconds | None = None,
        node: str | Sequence[str] | None = None,
        on_gap: OnGap = "fail",
        strong: bool = False,
    ) -> AsyncIterator[TypedRecord[T] | Gap]:
        async for item in self._topic.follow(from_seq, timeout=timeout, node=node, on_gap=on_gap, strong=strong):
            yield item if isinstance(item, Gap) else self._codec.record(self.name, item)

    async def __aiter__(self) -> AsyncIterator[TypedRecord[T]]:
        """Yield all records that exist now."""
        async for item in self.follow(timeout=0.0, on_gap="skip"):
            assert isinstance(item, TypedRecord), "gaps are skipped"
            yield item
