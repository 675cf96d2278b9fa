"""Topics whose records are of one type: `topic.typed(Order)` validates what is appended and returns objects.

A type is a dataclass, a `msgspec.Struct`, an attrs class, a TypedDict, any other type that msgspec decodes, or a
pydantic model. Records are stored as JSON, so a topic can be read without the type and with another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from tidelog.engine.batch_encoder import to_json
from tidelog.engine.read import OnGap
from tidelog.engine.results import Appended, Counts, Page, Record
from tidelog.engine.topic_index import Gap
from tidelog.errors import BadInput
from tidelog.times import Seconds

T = TypeVar("T")
_REASON_CHARS_MAX: Final = 300
_encode = msgspec.json.Encoder().encode


class TypedRecord(NamedTuple, Generic[T]):
    """A `Record` whose data is an object of a type."""

    seq: int
    ts_ms: int
    data: T
    tag: str | None = None
    node: str | None = None
    meta: dict[str, Any] | None = None


class TypedPage(NamedTuple, Generic[T]):
    """A `Page` of typed records."""

    records: list[TypedRecord[T]]
    gap: Gap | None
    next_from_seq: int
    head_seq: int
    earliest_seq: int
    counts: Counts

    @property
    def caught_up(self) -> bool:
        return self.next_from_seq == self.head_seq


class Codec(Generic[T]):
    """Validates values of one type."""

    def __init__(self, kind: type[T]) -> None:
        self.name = getattr(kind, "__name__", repr(kind))
        try:
            self._validate = _validator(kind)
        except TypeError as error:
            raise BadInput(
                f"{self.name} is no type of records: {error}; nothing was done, give a dataclass, a msgspec.Struct, a "
                "TypedDict or a pydantic model"
            ) from None

    def check(self, records: object) -> None:
        """Raise BadInput unless every record of a write reads back as this type."""
        items = records if isinstance(records, list | tuple) else [records]
        for text in to_json(items):
            try:
                self._validate(msgspec.json.decode(text))
            except (msgspec.ValidationError, ValueError) as error:
                raise BadInput(f"a record is not a {self.name}: {_reason(error)}; nothing was written") from None

    def record(self, topic: str, record: Record) -> TypedRecord[T]:
        try:
            data = self._validate(record.data)
        except (msgspec.ValidationError, ValueError, TypeError) as error:
            raise BadInput(
                f"record {record.seq} of {topic} is not a {self.name}: {_reason(error)}; nothing was lost, read it "
                "without the type"
            ) from None
        return TypedRecord(record.seq, record.ts_ms, data, record.tag, record.node, record.meta)

    def page(self, topic: str, page: Page) -> TypedPage[T]:
        records = [self.record(topic, record) for record in page.records]
        return TypedPage(records, *page[1:])


def _validator(kind: type[T]) -> Callable[[object], T]:
    if hasattr(kind, "__pydantic_validator__"):  # a model or a dataclass of pydantic, which is installed then
        validate_json = import_module("pydantic").TypeAdapter(kind).validate_json
        return lambda value: validate_json(_encode(value))
    if isinstance(msgspec.inspect.type_info(kind), msgspec.inspect.CustomType):
        raise TypeError("its fields are not declared")
    return lambda value: msgspec.convert(value, kind, str_keys=True)


def _reason(error: Exception) -> str:
    """What is wrong with a value, on one line."""
    if hasattr(error, "errors"):  # of pydantic
        text = ", ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    else:
        text = " ".join(str(error).split())
    return text[:_REASON_CHARS_MAX]


class TypedSource(Protocol):
    """What a typed topic needs of a topic, in a directory or on a server."""

    @property
    def name(self) -> str: ...
    def append(
        self,
        records: object,
        *,
        tag: str | Sequence[str | None] | None = None,
        node: str | Sequence[str | None] | None = None,
        meta: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        key: str | None = None,
    ) -> Appended: ...
    def read(
        self,
        from_seq: int = 0,
        limit: int = 256,
        *,
        node: str | Sequence[str] | None = None,
        timeout: Seconds | None = 0.0,
        strong: bool = False,
    ) -> Page: ...
    def follow(
        self,
        from_seq: int = 0,
        *,
        timeout: Seconds | None = None,
        node: str | Sequence[str] | None = None,
        on_gap: OnGap = "fail",
        strong: bool = False,
    ) -> Iterator[Record | Gap]: ...


class TypedTopic(Generic[T]):
    """A topic whose records are of one type. `Topic.typed` returns one."""

    def __init__(self, topic: TypedSource, kind: type[T]) -> None:
        self._topic, self._codec = topic, Codec(kind)

    def __repr__(self) -> str:
        return f"<topic {self.name!r} of {self._codec.name}>"

    @property
    def name(self) -> str:
        """The name of the topic."""
        return self._topic.name

    def append(
        self,
        records: T | Sequence[T],
        *,
        tag: str | Sequence[str | None] | None = None,
        node: str | Sequence[str | None] | None = None,
        meta: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        key: str | None = None,
    ) -> Appended:
        """`Topic.append` of objects of the type. Raises BadInput, with nothing written, for one that does not read back
        as the type."""
        self._codec.check(records)
        return self._topic.append(records, tag=tag, node=node, meta=meta, key=key)

    def read(
        self,
        from_seq: int = 0,
        limit: int = 256,
        *,
        node: str | Sequence[str] | None = None,
        timeout: Seconds | None = 0.0,
        strong: bool = False,
    ) -> TypedPage[T]:
        """`Topic.read` with objects of the type. Raises BadInput for a record that is none."""
        page = self._topic.read(from_seq, limit, node=node, timeout=timeout, strong=strong)
        return self._codec.page(self.name, page)

    def follow(
        self,
        from_seq: int = 0,
        *,
        timeout: Seconds | None = None,
        node: str | Sequence[str] | None = None,
        on_gap: OnGap = "fail",
        strong: bool = False,
    ) -> Iterator[TypedRecord[T] | Gap]:
        """`Topic.follow` with objects of the type. Raises BadInput for a record that is none."""
        for item in self._topic.follow(from_seq, timeout=timeout, node=node, on_gap=on_gap, strong=strong):
            yield item if isinstance(item, Gap) else self._codec.record(self.name, item)

    def __iter__(self) -> Iterator[TypedRecord[T]]:
        """Yield all records that exist now."""
        for item in self.follow(timeout=0.0, on_gap="skip"):
            assert isinstance(item, TypedRecord), "gaps are skipped"
            yield item
