"""What clients send: the bodies of the `/v0` contract.

Types are strict (no 1.0 for 1, no null where none is allowed) and unknown fields are ignored, everywhere.
A record's data stays the bytes that came: it is checked to be JSON and never decoded.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

U64_MAX = (1 << 64) - 1
U64: TypeAlias = Annotated[int, Meta(ge=0)]  # its upper bound: see `within`
U32: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Nodes: TypeAlias = str | list[str] | None
T = TypeVar("T")
NULL: Final = Raw(b"null")


def within(*numbers: int | None) -> None:
    """msgspec cannot check a bound over 2**63 by itself; what a `__post_init__` raises it tells as any other fault."""
    for number in numbers:
        if number is not None and number > U64_MAX:
            raise ValueError(f"a number of {number.bit_length()} bits is over 2**64 - 1")


class Record(Struct):
    data: Raw
    tag: str | None = None
    node: str | None = None
    meta: Raw = msgspec.field(default_factory=lambda: NULL)  # an object; decoded one at a time, see `texts.to_meta`
    encoding: str | None = msgspec.field(default=None, name="$encoding")  # "base64": data is bytes, as text
    run_at_ms: int | None = None  # these three are a job's, and travel in its meta
    delay_ms: int | None = None
    priority: int | None = None


class Write(Struct):
    records: list[Record]
    node: str | None = None
    idempotency_key: str | None = None
    create: bool | None = None
    config: Raw = msgspec.field(default_factory=lambda: NULL)  # an optional Raw would take no object
    disable_backpressure: bool = False


class LargeRecord(Record):
    def __post_init__(self) -> None:
        """Python code that the decoder calls after each record: the interpreter can change threads there."""


class LargeWrite(Write):
    """A write whose body takes long to decode. Other threads run between two of its records."""

    records: list[LargeRecord]  # type: ignore[assignment]  # a list of a subclass, which is only read


class PlainRecord(Struct, forbid_unknown_fields=True):
    data: Raw


class PlainWrite(Struct, forbid_unknown_fields=True):
    """A write that is records and nothing else, and they data and nothing else: most are, and it costs half."""

    records: list[PlainRecord]


class Diff(Struct):
    from_seq: U64 = 0
    limit: U32 = 0
    node: Nodes = None
    include_tags: bool = False
    include_meta: bool = True
    wait_ms: U32 = 0
    max_batch_bytes: U64 = 0

    def __post_init__(self) -> None:
        within(self.from_seq, self.max_batch_bytes)


class Delete(Struct):
    before_seq: U64 | None = None
    match: Any = None

    def __post_init__(self) -> None:
        within(self.before_seq)


class Cursor(Struct):
    from_seq: U64 = 0
    tail: bool = False

    def __post_init__(self) -> None:
        within(self.from_seq)


class Watch(Struct):
    topics: dict[str, Cursor]
    node: Nodes = None
    limit: U32 = 256
    max_batch_bytes: U64 = 262_144
    heartbeat_ms: U64 = 15_000
    include_meta: bool = True
    include_tags: bool = False
    include_data: bool = True
    consistency: Literal["eventual", "strong"] = "eventual"

    def __post_init__(self) -> None:
        within(self.max_batch_bytes, self.heartbeat_ms)


class Router(Struct):
    source: str
    dest: str
    preserve_node: bool = True
    preserve_tag: bool = True
    create_dest: bool = True
    filter: Any = None
    allow_cycle: bool = False
    guarantee: Literal["at_least_once", "exactly_once"] = "at_least_once"


class Seek(Struct):
    ts: int


class Moment(Struct):
    ts: int  # milliseconds since the epoch


Place: TypeAlias = Literal["earliest", "latest"] | U64 | Moment


class PutGroup(Struct):
    hold_bytes: U64 = 0
    from_: Place = msgspec.field(default="earliest", name="from")

    def __post_init__(self) -> None:
        within(self.hold_bytes, self.from_ if isinstance(self.from_, int) else None)


class CommitGroup(Struct):
    seq: U64
    expect: U64 | None = None

    def __post_init__(self) -> None:
        within(self.seq, self.expect)


class ResetGroup(Struct):
    to: Place
    preview: bool = False

    def __post_init__(self) -> None:
        within(self.to if isinstance(self.to, int) else None)


class Fetch(Struct):
    """A Diff whose cursor is the group's."""

    limit: U32 = 0
    node: Nodes = None
    include_tags: bool = False
    include_meta: bool = True
    wait_ms: U32 = 0
    max_batch_bytes: U64 = 0

    def __post_init__(self) -> None:
        within(self.max_batch_bytes)


class Staged(Struct):
    """A chunk that was staged, and what must be in it."""

    chunk: str
    rows: U64
    bytes: U64
    sum: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


class PutBatch(Struct):
    writer: str
    number: U64
    sum: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    chunks: list[Staged]
    query_id: Annotated[str, msgspec.Meta(max_length=128)] = ""

    def __post_init__(self) -> None:
        within(self.number)

    @property
    def words(self) -> tuple[int, int]:
        return int(self.sum[:16], 16), int(self.sum[16:], 16)

    @staticmethod
    def hex(words: tuple[int, int]) -> str:
        return f"{words[0]:016x}{words[1]:016x}"


class BadBody(Exception):
    """A body that is not what its endpoint takes; the text says where and why."""


def decoder(type_: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(type_)


def decode(with_: msgspec.json.Decoder[T], body: bytes) -> T:
    """The body as its type. Raises BadBody for what is not JSON, not UTF-8, nested too deep or of another type."""
    try:
        if not body.isascii():
            body.decode()  # what stays as it came was only looked at as JSON, not as UTF-8
        return with_.decode(body)
    except msgspec.ValidationError as error:
        raise BadBody(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise BadBody("the body is nested too deep") from None
