"""The shapes of the `/v0` contract, as both sides of it see them.

What clients send: the bodies of the `/v0` contract.

Types are strict (no 1.0 for 1, no null where none is allowed) and unknown fields are ignored, everywhere.
A record's data stays the bytes that came: it is checked to be JSON and never decoded.

What claimers and workers say to a queue: the bodies of claim, ack, nack, extend and redrive.

What clients say to channels: bodies of requests, and what a WebSocket command has in common with them.

Opaque cursors: base64url without padding, so that they can be pasted into a URL as they are.

list page    {"after":"orders"}       SSE id    {"jobs":2,"orders":17}    every topic of the session, keys sorted
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

U64_MAX = (1 << 64) - 1
U64: TypeAlias = Annotated[int, Meta(ge=0)]  # its upper bound: see `within`
U32: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Nodes: TypeAlias = str | list[str] | None
T = TypeVar("T")
JSON_NULL: Final = Raw(b"null")


def check_u64(*numbers: int | None) -> None:
    """msgspec cannot check a bound over 2**63 by itself; what a `__post_init__` raises it tells as any other fault."""
    for number in numbers:
        if number is not None and number > U64_MAX:
            raise ValueError(f"a number of {number.bit_length()} bits is over 2**64 - 1")


class Record(Struct):
    data: Raw
    tag: str | None = None
    node: str | None = None
    meta: Raw = msgspec.field(
        default_factory=lambda: JSON_NULL
    )  # an object; decoded one at a time, see `texts.to_meta`
    encoding: str | None = msgspec.field(default=None, name="$encoding")  # "base64": data is bytes, as text
    run_at_ms: int | None = None  # these three are a job's, and travel in its meta
    delay_ms: int | None = None
    priority: int | None = None


class Write(Struct):
    records: list[Record]
    node: str | None = None
    idempotency_key: str | None = None
    create: bool | None = None
    config: Raw = msgspec.field(default_factory=lambda: JSON_NULL)  # an optional Raw would take no object
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
        check_u64(self.from_seq, self.max_batch_bytes)


class Delete(Struct):
    before_seq: U64 | None = None
    match: Any = None

    def __post_init__(self) -> None:
        check_u64(self.before_seq)


class Cursor(Struct):
    from_seq: U64 = 0
    tail: bool = False

    def __post_init__(self) -> None:
        check_u64(self.from_seq)


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
        check_u64(self.max_batch_bytes, self.heartbeat_ms)


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


GroupPosition: TypeAlias = Literal["earliest", "latest"] | U64 | Moment


class PutGroup(Struct):
    hold_bytes: U64 = 0
    from_: GroupPosition = msgspec.field(default="earliest", name="from")

    def __post_init__(self) -> None:
        check_u64(self.hold_bytes, self.from_ if isinstance(self.from_, int) else None)


class CommitGroup(Struct):
    seq: U64
    expect: U64 | None = None

    def __post_init__(self) -> None:
        check_u64(self.seq, self.expect)


class ResetGroup(Struct):
    to: GroupPosition
    preview: bool = False

    def __post_init__(self) -> None:
        check_u64(self.to if isinstance(self.to, int) else None)


class Fetch(Struct):
    """A Diff whose cursor is the group's."""

    limit: U32 = 0
    node: Nodes = None
    include_tags: bool = False
    include_meta: bool = True
    wait_ms: U32 = 0
    max_batch_bytes: U64 = 0

    def __post_init__(self) -> None:
        check_u64(self.max_batch_bytes)


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
        check_u64(self.number)

    @property
    def checksum_words(self) -> tuple[int, int]:
        return int(self.sum[:16], 16), int(self.sum[16:], 16)

    @staticmethod
    def checksum_hex(words: tuple[int, int]) -> str:
        return f"{words[0]:016x}{words[1]:016x}"


class BadBody(Exception):
    """A body that is not what its endpoint takes; the text says where and why."""


def json_decoder(type_: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(type_)


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The body as its type. Raises BadBody for what is not JSON, not UTF-8, nested too deep or of another type."""
    try:
        if not body.isascii():
            body.decode()  # what stays as it came was only looked at as JSON, not as UTF-8
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise BadBody(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise BadBody("the body is nested too deep") from None


CLAIM_JOBS_MAX: Final = 1_000  # jobs of one claim; more is this many
CLAIM_BYTES_MAX: Final = 8 << 20  # data of one claim's jobs: what would be more stays for the next; one job in any case
SETTLE_SEQS_MAX: Final = 1_000  # of one ack, nack or extend; more is refused
NODE_BYTES_MAX: Final = 128
DELAY_MS_MAX: Final = 86_400_000
REDRIVE_RECORDS_MAX: Final = 10_000  # records of one redrive; more is this many
REDRIVE_S_MAX: Final = 30  # and no more than a rate allows in so many seconds


class Claim(Struct):
    node: str
    max: U32 = 1
    lease_ms: U64 | None = None

    def __post_init__(self) -> None:
        check_u64(self.lease_ms)


class Ack(Struct, kw_only=True):
    node: str
    seqs: list[U64]
    lease_ids: list[str] = []

    def __post_init__(self) -> None:
        check_u64(max(self.seqs, default=0))


class Nack(Ack, kw_only=True):
    delay_ms: U64 = 0

    def __post_init__(self) -> None:
        check_u64(self.delay_ms, max(self.seqs, default=0))


class Extend(Ack, kw_only=True):
    lease_ms: U64

    def __post_init__(self) -> None:
        check_u64(self.lease_ms, max(self.seqs, default=0))


class Redrive(Struct):
    to: str | None = None
    match: Any = None
    limit: U32 = 1_000
    rate: U32 | None = None


PUBLISH_MESSAGES_MAX: Final = 1_000  # of one publish; more is refused
MEMBERS_PAGE_SIZE: Final = 100  # members in one answer


class ChannelMessage(Struct):
    """What is said: as text, or as bytes in base64. One of the two."""

    payload: str | None = None
    payload_base64: str | None = None


class ChannelPublish(ChannelMessage):
    """One message, or several with consecutive seqs. `stream`: of whose events it is to be left out."""

    messages: list[ChannelMessage] | None = None
    qos: int = 1
    stream: str | None = None


class ChannelJoin(Struct):
    """`user`: somebody else, whom the owner invites. `config`: of a channel that this makes."""

    user: str | None = None
    config: dict[str, Any] = {}


class ChannelLeave(Struct):
    """`user`: somebody else, whom the owner sends away."""

    user: str | None = None


class ChannelAclChange(Struct):
    kind: str
    add: list[str] = []
    remove: list[str] = []


_encode_cursor = msgspec.json.Encoder(order="deterministic").encode
_after_decoder = msgspec.json.Decoder(dict[str, str])
_positions_decoder = msgspec.json.Decoder(dict[str, int])


class BadCursor(Exception):
    """Text that no server of ours has handed out."""


def _encode_base64(value: Mapping[str, object]) -> bytes:
    return urlsafe_b64encode(_encode_cursor(value)).rstrip(b"=")


def _decode_base64(text: str) -> bytes:
    try:
        # Both alphabets, with padding and without: a cursor may have been through a proxy or an older client.
        plain = text.encode("ascii").rstrip(b"=").replace(b"+", b"-").replace(b"/", b"_")
        made = urlsafe_b64decode(plain + b"=" * (-len(plain) % 4))
        if urlsafe_b64encode(made).rstrip(b"=") != plain:
            raise BadCursor(text)
        return made
    except ValueError:
        raise BadCursor(text) from None


def encode_page_cursor(after: str) -> str:
    return _encode_base64({"after": after}).decode()


def decode_page_cursor(text: str) -> str:
    """The name to go on behind."""
    try:
        return _after_decoder.decode(_decode_base64(text))["after"]
    except (msgspec.DecodeError, KeyError, UnicodeDecodeError):
        raise BadCursor(text) from None


def encode_positions(cursors: Mapping[str, int]) -> bytes:
    return _encode_position(*cursors.items()) if len(cursors) == 1 else _encode_base64(cursors)


@lru_cache(256)
def _encode_position(where: tuple[str, int]) -> bytes:
    """One topic: what its watchers are told of a write is the same for all of them."""
    return _encode_base64(dict((where,)))


def decode_positions(text: str) -> dict[str, int]:
    try:
        return _positions_decoder.decode(_decode_base64(text))
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadCursor(text) from None
