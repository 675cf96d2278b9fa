"""The `/v0` contract, as server and client see it: bodies of requests, limits, errors, and opaque cursors.

Types are strict (no 1.0 for 1, no null where the contract has none); a `BodyDecoder` finds unknown fields. A record's
data stays the bytes that arrived: it is checked to be JSON and not decoded. The OpenAPI document is generated from
these types and from `server.response_types`: class names are names of components, docstrings and `described` are its
texts.

A cursor is base64url without padding, so that a client can paste it into a URL:
list page    {"after":"orders"}       SSE id    {"jobs":2,"orders":17}    every topic of the session, keys sorted
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping
from functools import lru_cache
from inspect import isfunction, signature
from types import UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Generic,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta, Raw, Struct

from tidelog import errors, native

T = TypeVar("T")
JSON_NULL: Final = Raw(b"null")
DOCUMENTED: Final = "documented"  # a key of JSON schemas that `server.openapi` resolves
U64_MAX: Final = (1 << 64) - 1

# ── limits of the contract ────────────────────────────────────────────────────────────────────────

READ_LIMIT: Final = 256  # records of a page where the client gives no limit
READ_LIMIT_MAX: Final = 1_000
READ_BYTES: Final = 1 << 20
READ_BYTES_MAX: Final = 8 << 20
WAIT_MS_MAX: Final = 30_000  # of a long poll
WATCH_TOPICS_MAX: Final = 256
HEARTBEAT_MS_MAX: Final = 60_000
HEARTBEAT_MS_DEFAULT: Final = 15_000
WATCH_BYTES: Final = 262_144  # of a page of a watch, where the client gives no limit
TOKEN_TTL_MS: Final = 300_000  # of a read token, where the client gives none
TOKEN_TTL_MS_MIN: Final = 1_000
TOKEN_TTL_MS_MAX: Final = 86_400_000
TOKEN_NAMES_MAX: Final = 32
PAGE_SIZE: Final = 100  # rows of a page of a list
PAGE_SIZE_MAX: Final = 1_000
GAPS_LIMIT: Final = 100
GAPS_LIMIT_MAX: Final = 1_000
HISTORY_LIMIT: Final = 256
HISTORY_LIMIT_MAX: Final = 10_000
JOBS_IDLE: Final = b"idle"  # the comment of a job stream that has no job for its worker now
JOBS_FULL: Final = b"full"  # the worker holds as many jobs as it may
CLAIM_JOBS_MAX: Final = 1_000  # jobs of one claim; a larger number is reduced to this
CLAIM_BYTES_MAX: Final = 8 << 20  # data of one claim's jobs; a claim returns one job of any size
SETTLE_SEQS_MAX: Final = 1_000  # of one ack, nack or extend; more are refused
NODE_BYTES_MAX: Final = 128
DELAY_MS_MAX: Final = 86_400_000
REDRIVE_LIMIT: Final = 1_000
REDRIVE_RECORDS_MAX: Final = 10_000  # records of one redrive; a larger number is reduced to this
REDRIVE_S_MAX: Final = 30  # a redrive with a rate moves at most what the rate allows in this time
PUBLISH_MESSAGES_MAX: Final = 1_000  # of one publish; more are refused
MEMBERS_PAGE_SIZE: Final = 100

# ── field types ───────────────────────────────────────────────────────────────────────────────────


def described(text: str = "", **schema: Any) -> Meta:
    """What the OpenAPI document says about a field. Nothing of it is checked when a body is decoded: the server reduces
    a number over its maximum, and handlers have messages of their own. It replaces what msgspec says about the type."""
    return Meta(description=text or None, extra_json_schema={DOCUMENTED: schema} if schema else None)


def schema_ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


U64: TypeAlias = Annotated[int, Meta(ge=0)]  # for the upper bound see `check_u64`
U32: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Nodes: TypeAlias = str | list[str] | None
Consistency: TypeAlias = Literal["eventual", "strong"]
TimestampMs: TypeAlias = Annotated[int, Meta(description="Milliseconds since the epoch.")]
TopicName: TypeAlias = Annotated[str, described(pattern="^[A-Za-z0-9][A-Za-z0-9._:-]{0,254}$")]
UserName: TypeAlias = Annotated[str, described("user@domain", minLength=3, maxLength=510)]
LeaseToken: TypeAlias = Annotated[str, described(pattern="^(lease_[0-9a-f]{1,16})?$")]
TagMatch: TypeAlias = Annotated[Any, described(**schema_ref("Match"))]
NodeName: TypeAlias = Annotated[str, described(minLength=1, maxLength=NODE_BYTES_MAX)]
PageLimit: TypeAlias = Annotated[U32, described(f"0 is {READ_LIMIT}.", maximum=READ_LIMIT_MAX)]
PageBytes: TypeAlias = Annotated[U64, described(f"0 is {READ_BYTES}.", maximum=READ_BYTES_MAX)]
ConsumerName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=255)]
LeaseMs: TypeAlias = Annotated[int, Meta(ge=1, le=86_400_000)]
LeaseIds: TypeAlias = Annotated[list[Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]], Meta(max_length=1_000)]
WaitMs: TypeAlias = Annotated[
    U32, described("How long to wait for a record where there is none yet.", maximum=WAIT_MS_MAX)
]


def check_u64(*numbers: int | None) -> None:
    """Raise ValueError for a number over 2**64 - 1. msgspec cannot check a bound over 2**63; it reports what a
    `__post_init__` raises as a validation error."""
    for number in numbers:
        if number is not None and number > U64_MAX:
            raise ValueError(f"a number of {number.bit_length()} bits is over 2**64 - 1")


# ── topics and records ────────────────────────────────────────────────────────────────────────────


class RecordToWrite(Struct):
    data: Raw
    tag: str | None = None
    node: str | None = None
    meta: Raw = msgspec.field(default_factory=lambda: JSON_NULL)  # an object; the write handler decodes it
    encoding: str | None = msgspec.field(default=None, name="$encoding")  # "base64": data is bytes, as text
    run_at_ms: int | None = None  # the last three are a job's and are stored in its meta
    delay_ms: int | None = None
    priority: int | None = None


class Write(Struct):
    records: list[RecordToWrite]
    node: str | None = None
    idempotency_key: Annotated[
        Annotated[str, described(minLength=1, maxLength=256)] | None,
        described("A second write with this key writes nothing."),
    ] = None
    create: bool | None = None
    config: Raw = msgspec.field(default_factory=lambda: JSON_NULL)  # an optional Raw would take no object
    disable_backpressure: bool = False


class LargeRecord(RecordToWrite):
    def __post_init__(self) -> None:
        """Python code that the decoder calls after each record: the interpreter can switch threads there."""


class LargeWrite(Write):
    """A write whose body takes long to decode. Other threads run between two of its records."""

    records: list[LargeRecord]  # type: ignore[assignment]  # a list of a subclass, which is only read


class PlainRecord(Struct, forbid_unknown_fields=True):
    data: Raw


class PlainWrite(Struct, forbid_unknown_fields=True):
    """A write with no fields but records, and these with no fields but data. Most writes are; it costs half."""

    records: list[PlainRecord]


class Diff(Struct):
    from_seq: U64 = 0
    limit: PageLimit = READ_LIMIT
    node: Nodes = None
    include_tags: bool = False
    include_meta: bool = True
    wait_ms: WaitMs = 0
    max_batch_bytes: PageBytes = READ_BYTES
    consistency: Annotated[Consistency, described("strong: only records that survive a power cut.")] = "eventual"
    include_counts: Annotated[bool, described("Send what became of every seq of the page's range.")] = False

    def __post_init__(self) -> None:
        check_u64(self.from_seq, self.max_batch_bytes)


class Delete(Struct):
    """before_seq, match or both; or seqs."""

    before_seq: U64 | None = None
    match: TagMatch = None
    seqs: Annotated[list[U64] | None, described("These records alone.")] = None

    def __post_init__(self) -> None:
        check_u64(self.before_seq, max(self.seqs or (), default=0))


class SimulateRetention(Struct):
    """Limits to try; a limit that is not given is the topic's own."""

    cap_records: U64 | None = None
    cap_bytes: U64 | None = None
    ttl_ms: U64 | None = None

    def __post_init__(self) -> None:
        check_u64(self.cap_records, self.cap_bytes, self.ttl_ms)


FOUND_RECORDS_MAX: Final = 131_072  # seqs of each kind in one part of what a search has found


class SearchRange(Struct):
    """What a search for replaced records reads: all live records from first to below stop."""

    epoch: U64
    rule: Annotated[str, described("compaction of the topic's config.")]
    opening: Annotated[U64, described("Identifies this opening of the data directory.")]
    first: U64
    stop: U64
    horizon: Annotated[U64, described("No later record may be removed now.")]


class FoundRecords(Struct):
    """A part of what a search has found. Parts are sent in the order of their seqs."""

    range: Annotated[SearchRange, described("As it was returned; horizon: that of the response to the part before.")]
    replaced: Annotated[list[U64], described("Ascending; a later record of their key was live.")] = []
    tombstones: Annotated[list[U64], described("Ascending; the newest of their keys.")] = []
    is_last: Annotated[bool, described("All was sent: the topic counts as compacted.")] = False
    oldest_tombstone_ms: Annotated[U64, described("Of the response to the part before.")] = 0

    def __post_init__(self) -> None:
        check_u64(self.oldest_tombstone_ms, *(seqs[-1] for seqs in (self.replaced, self.tombstones) if seqs))
        if max(len(self.replaced), len(self.tombstones)) > FOUND_RECORDS_MAX:
            raise ValueError(f"a part has at most {FOUND_RECORDS_MAX} seqs of each kind")


class Rewrite(Struct):
    force: Annotated[bool, described("Also segments with few deleted records.")] = False


class Erase(Struct):
    """match or seqs."""

    match: TagMatch = None
    seqs: list[U64] | None = None

    def __post_init__(self) -> None:
        for seq in self.seqs or ():
            check_u64(seq)


class Cursor(Struct):
    from_seq: U64 = 0
    tail: bool = False

    def __post_init__(self) -> None:
        check_u64(self.from_seq)


class Watch(Struct):
    topics: Annotated[
        dict[str, Cursor],
        described(
            propertyNames={"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]{0,254}$"},
            minProperties=1,
            maxProperties=WATCH_TOPICS_MAX,
        ),
    ]
    node: Nodes = None
    limit: PageLimit = READ_LIMIT
    max_batch_bytes: PageBytes = WATCH_BYTES
    heartbeat_ms: Annotated[
        U64, described("The longest time without an event.", minimum=1_000, maximum=HEARTBEAT_MS_MAX)
    ] = HEARTBEAT_MS_DEFAULT
    include_meta: bool = True
    include_tags: bool = False
    include_data: bool = True
    consistency: Consistency = "eventual"

    def __post_init__(self) -> None:
        check_u64(self.max_batch_bytes, self.heartbeat_ms)


class ReadTokenToMake(Struct):
    """topics, prefixes or both."""

    topics: Annotated[list[TopicName], described(maxItems=TOKEN_NAMES_MAX)] = []
    prefixes: Annotated[
        list[str],
        described(maxItems=TOKEN_NAMES_MAX, description="Of names of topics, now and later."),
    ] = []
    ttl_ms: Annotated[
        U64, described("The time until it expires.", minimum=TOKEN_TTL_MS_MIN, maximum=TOKEN_TTL_MS_MAX)
    ] = TOKEN_TTL_MS

    def __post_init__(self) -> None:
        check_u64(self.ttl_ms)


class RouterToMake(Struct):
    source: TopicName
    dest: TopicName
    preserve_node: bool = True
    preserve_tag: bool = True
    create_dest: bool = True
    filter: Annotated[Any, described(anyOf=[schema_ref("Match"), {"type": "null"}])] = None
    allow_cycle: bool = False
    guarantee: Literal["at_least_once", "exactly_once"] = "at_least_once"


class BackupToMake(Struct):
    target: Annotated[str, described("Where to write it; by default the first target of the server.")] | None = None
    incremental: Annotated[bool, described("Store only what changed since the newest backup of the target.")] = False
    link: Annotated[bool, described("Link files that never change, on the same file system, instead of copying.")] = (
        True
    )
    accept_damage: Annotated[bool, described("Also back up files that do not verify.")] = False


class RelocateAll(Struct):
    topic: TopicName | None = None
    keep_segments: Annotated[U64 | None, described("How many of the newest sealed segments stay on the disk.")] = None


class RecallAll(Struct):
    topic: TopicName | None = None
    first_seq: Annotated[U64, described("Only segments with seqs from here on.")] = 0
    last_seq: Annotated[U64 | None, described("Only segments with seqs up to here.")] = None


class VerifyErasures(Struct):
    """A receipt that the caller kept: it must be part of the chain."""

    receipt: Annotated[Raw, described(**schema_ref("Erased"))] = msgspec.field(default_factory=lambda: JSON_NULL)


class Relocate(Struct):
    keep_segments: Annotated[U64 | None, described("How many of the newest sealed segments stay on the disk.")] = None


class Recall(Struct):
    first_seq: Annotated[U64, described("Only segments with seqs from here on.")] = 0
    last_seq: Annotated[U64 | None, described("Only segments with seqs up to here.")] = None


class Seek(Struct):
    ts: TimestampMs


# ── consumer groups ───────────────────────────────────────────────────────────────────────────────


class Moment(Struct):
    ts: TimestampMs


GroupPosition: TypeAlias = Annotated[
    Literal["earliest", "latest"] | U64 | Moment,
    described("A seq: the last record that was read. A time: the first record to read is of this time or later."),
]


class PutGroup(Struct):
    hold_bytes: U64 = 0
    from_: GroupPosition = msgspec.field(default="earliest", name="from")
    keep: Annotated[bool, described("Leave a group that exists as it is.")] = False

    def __post_init__(self) -> None:
        check_u64(self.hold_bytes, self.from_ if isinstance(self.from_, int) else None)


class CommitGroup(Struct):
    seq: U64
    expect: U64 | None = None
    preview: Annotated[bool, described("Only say whether it would be accepted.")] = False

    def __post_init__(self) -> None:
        check_u64(self.seq, self.expect)


class ResetGroup(Struct):
    to: GroupPosition
    preview: bool = False
    create: Annotated[bool, described("A group that does not exist is at 0, and is created by its first move.")] = False

    def __post_init__(self) -> None:
        check_u64(self.to if isinstance(self.to, int) else None)


class Fetch(Struct):
    """A Diff whose cursor is the group's position."""

    limit: PageLimit = READ_LIMIT
    node: Nodes = None
    include_tags: bool = False
    include_meta: bool = True
    wait_ms: WaitMs = 0
    max_batch_bytes: PageBytes = READ_BYTES
    consistency: Annotated[Consistency, described("strong: only records that survive a power cut.")] = "eventual"
    include_counts: Annotated[bool, described("Send what became of every seq of the page's range.")] = False

    def __post_init__(self) -> None:
        check_u64(self.max_batch_bytes)


class ClaimRange(Struct):
    """A claim of the next records of a group for one of its consumers."""

    consumer: ConsumerName
    limit: PageLimit = READ_LIMIT
    lease_ms: LeaseMs = 30_000
    include_tags: bool = False
    include_meta: bool = True
    wait_ms: WaitMs = 0
    max_batch_bytes: PageBytes = READ_BYTES
    include_counts: Annotated[bool, described("Send what became of every seq of the range.")] = False

    def __post_init__(self) -> None:
        check_u64(self.max_batch_bytes)


class SettleRanges(Struct):
    consumer: ConsumerName
    lease_ids: LeaseIds


class ExtendRanges(Struct):
    consumer: ConsumerName
    lease_ids: LeaseIds
    lease_ms: LeaseMs = 30_000


class LeaveGroup(Struct):
    consumer: ConsumerName


# ── numbered batches ──────────────────────────────────────────────────────────────────────────────


class Staged(Struct):
    """A staged chunk and the content that it must have."""

    chunk: str
    rows: U64
    bytes: U64
    sum: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]


class PutBatch(Struct):
    writer: str
    number: U64
    sum: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    chunks: list[Staged]
    query_id: Annotated[str, Meta(max_length=128)] = ""

    def __post_init__(self) -> None:
        check_u64(self.number)

    @property
    def checksum_words(self) -> tuple[int, int]:
        return int(self.sum[:16], 16), int(self.sum[16:], 16)

    @staticmethod
    def checksum_hex(words: tuple[int, int]) -> str:
        return f"{words[0]:016x}{words[1]:016x}"


# ── queues ────────────────────────────────────────────────────────────────────────────────────────


class Claim(Struct):
    node: NodeName
    max: Annotated[U32, described("0 is 1.", maximum=CLAIM_JOBS_MAX)] = 1
    lease_ms: Annotated[U64 | None, described("Default: the queue's lease_ms.")] = None

    def __post_init__(self) -> None:
        check_u64(self.lease_ms)


class Ack(Struct, kw_only=True):
    node: NodeName
    seqs: Annotated[list[U64], described(maxItems=SETTLE_SEQS_MAX)]
    lease_ids: Annotated[
        list[LeaseToken], described('One for each seq, or none at all; "" is no token.', maxItems=SETTLE_SEQS_MAX)
    ] = []

    def __post_init__(self) -> None:
        check_u64(max(self.seqs, default=0))


class JobError(Struct):
    """Why a job failed; a dead letter has it in its meta."""

    message: str = ""
    type: str = ""


class Nack(Ack, kw_only=True):
    delay_ms: Annotated[U64, described("How long the jobs cannot be claimed.", maximum=DELAY_MS_MAX)] = 0
    error: JobError | None = None

    def __post_init__(self) -> None:
        check_u64(self.delay_ms, max(self.seqs, default=0))


class Reject(Ack, kw_only=True):
    error: JobError | None = None

    def __post_init__(self) -> None:
        check_u64(max(self.seqs, default=0))


class Extend(Ack, kw_only=True):
    lease_ms: Annotated[U64, described("The length of the lease, from now on.")]

    def __post_init__(self) -> None:
        check_u64(self.lease_ms, max(self.seqs, default=0))


class Redrive(Struct):
    to: Annotated[TopicName | None, described("The queue. Default: the queue that each record came from.")] = None
    match: TagMatch = None
    limit: Annotated[U32, described("The most records to move.", maximum=REDRIVE_RECORDS_MAX)] = REDRIVE_LIMIT
    rate: Annotated[
        Annotated[U32, described(minimum=1)] | None,
        described(f"Records per second; the request ends after {REDRIVE_S_MAX} seconds."),
    ] = None


# ── channels ──────────────────────────────────────────────────────────────────────────────────────


class ChannelMessage(Struct):
    """A payload as text, or as bytes in base64: one of the two."""

    payload: str | None = None
    payload_base64: str | None = None


class PublishToChannel(ChannelMessage):
    """One message, or several with consecutive seqs. `stream` names an event stream that does not get them."""

    messages: Annotated[list[ChannelMessage], described(maxItems=PUBLISH_MESSAGES_MAX)] | None = None
    qos: Annotated[int, described(enum=[0, 1])] = 1
    stream: str | None = None


class JoinChannel(Struct):
    """`user`: another user, whom the owner invites. `config`: the settings of a channel that this request creates."""

    user: UserName | None = None
    config: Annotated[dict[str, Any], described(**schema_ref("ChannelSettings"))] = {}


class LeaveChannel(Struct):
    """`user`: another user, whom the owner removes."""

    user: UserName | None = None


class ChangeAcl(Struct):
    kind: str
    add: list[Annotated[str, described("user@domain, or a whole domain.")]] = []
    remove: list[Annotated[str, described("user@domain, or a whole domain.")]] = []


# ── decoding ──────────────────────────────────────────────────────────────────────────────────────


# Python's own limit is about 1,000 levels in 3.11, 2,000 in 3.12 and 10,000 in 3.13.
_BODY_DEPTH_MAX: Final = 512


class BadBody(Exception):
    """A body that is not of its endpoint's type; the text says where and why."""


class UnknownField(BadBody):
    """A body with a field that its type does not have."""

    def __init__(self, name: str, where: str) -> None:
        super().__init__(f"there is no field {name[:80]!r}{where}")
        self.name, self.where = name, where


class BodyDecoder(Generic[T]):
    """Decodes bodies of one type: `decode` refuses fields that the type does not have, at every depth, `lenient`
    ignores them. Both cost the same, so a body is decoded strictly first, and again only if it has such a field."""

    __slots__ = ("decode", "field_names", "lenient")

    def __init__(self, type_: type[T]) -> None:
        names: set[str] = set()
        self.lenient = json_decoder(type_)
        self.decode: Callable[[bytes], T] = json_decoder(_forbid_unknown_fields(type_, names)).decode
        self.field_names = frozenset(names)


def body_decoder(type_: type[T]) -> BodyDecoder[T]:
    return BodyDecoder(type_)


def _forbid_unknown_fields(hint: Any, names: set[str]) -> Any:
    """Return a type that decodes the same and refuses unknown fields; add the names of all fields to `names`."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        hints, changed = get_type_hints(hint, include_extras=True), []
        for each in msgspec.structs.fields(hint):
            names.add(each.encode_name)
            inner = _forbid_unknown_fields(hints[each.name], names)
            if inner is not hints[each.name]:
                kept: dict[str, Any] = {"default": each.default, "default_factory": each.default_factory}
                field: Any = msgspec.field(name=each.encode_name, **kept)
                changed.append((each.name, inner, field))
        return msgspec.defstruct(
            hint.__name__, changed, bases=(hint,), forbid_unknown_fields=True, kw_only=True, module=hint.__module__
        )
    parts = () if get_origin(hint) is Literal else get_args(hint)
    inner_parts = tuple(_forbid_unknown_fields(part, names) for part in parts)
    if all(inner is part for inner, part in zip(inner_parts, parts, strict=True)):
        return hint
    origin = get_origin(hint)
    if origin is Annotated:
        return Annotated[(inner_parts[0], *hint.__metadata__)]
    return Union[inner_parts] if origin in (Union, UnionType) else origin[inner_parts]  # noqa: UP007 - computed


_UNKNOWN_FIELD: Final = re.compile(r"Object contains unknown field `(.*?)`(?: - at `(.*)`)?", re.DOTALL)


def json_decoder(type_: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(type_)


def is_nested_too_deep(body: bytes) -> bool:
    """Whether JSON text is nested too deep, with the same answer in every version of Python."""
    return body.count(b"[") + body.count(b"{") > _BODY_DEPTH_MAX and native.json_depth(body) > _BODY_DEPTH_MAX


def decode_body(decoder: msgspec.json.Decoder[T] | BodyDecoder[T], body: bytes) -> T:
    """Decode a body. Raises BadBody where it is not JSON, not UTF-8, nested too deep or of another type, and
    UnknownField where a `BodyDecoder` meets one."""
    try:
        if not body.isascii():
            body.decode()  # msgspec does not check that a Raw field is UTF-8
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if (unknown := _UNKNOWN_FIELD.fullmatch(str(error))) and not is_nested_too_deep(body):
            raise UnknownField(unknown[1], f" in {unknown[2][:80]}" if unknown[2] else "") from None
        raise BadBody("the body is nested too deep" if is_nested_too_deep(body) else str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise BadBody("the body is nested too deep") from None


# ── errors ────────────────────────────────────────────────────────────────────────────────────────

# The detail of an error response: attributes of the error, and arguments of its class.
ERROR_FIELDS: Final[Mapping[type[errors.Error], tuple[str, ...]]] = {
    errors.TopicFull: ("topic", "cap_records", "cap_bytes", "head_seq", "earliest_seq"),
    errors.TopicNotFound: ("topic",),
    errors.RecordNotFound: ("topic", "seq", "earliest_seq", "head_seq"),
    errors.NotAQueue: ("topic",),
    errors.NotEmpty: ("topic", "count"),
    errors.GroupNotFound: ("topic", "group"),
    errors.CursorConflict: ("topic", "group", "seq", "position", "head_seq"),
    errors.BatchConflict: ("topic", "writer", "number", "newest"),
    errors.RouterNotFound: ("router",),
    errors.ChannelNotFound: ("channel",),
    errors.NotMember: ("channel", "user"),
    errors.AlreadyMember: ("channel", "user"),
    errors.ChannelFull: ("channel", "limit"),
    errors.WrongType: ("channel", "type", "wanted"),
    errors.NotPersistent: ("channel",),
    errors.FifoEmpty: ("channel",),
    errors.FifoFull: ("channel", "limit"),
    errors.CursorLost: ("channel", "reason"),
    errors.ChannelOffline: ("channel", "reason"),
    errors.BackupNotFound: ("target", "backup_id"),
    errors.BackupIncomplete: ("target", "backup_id"),
}
# Attributes of errors whose details the contract has in another form.
_DETAIL_FIELDS: Final[Mapping[type[errors.Error], tuple[str, ...]]] = {
    errors.RouterCycle: ("cycle",),
    errors.Throttled: ("limit", "max"),
}
ERROR_HEADER: Final = "tidelog-error"  # names the class of an engine's error: the contract has one code for several
NO_ROUTE: Final = "there is nothing at "  # begins the message of a 404 for a path that the server does not have


def _error_classes() -> Mapping[str, type[errors.Error]]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.Error)]
    return {kind.code: kind for kind in kinds if kind is not errors.Error}


_ERRORS_BY_CODE: Final = _error_classes()


def _attributes_of(kind: type[errors.Error]) -> tuple[str, ...]:
    """The attributes of an error class: those that the wire has, else the arguments of its constructor."""
    fields = ERROR_FIELDS.get(kind) or _DETAIL_FIELDS.get(kind)
    if fields is not None:
        return fields
    constructor = kind.__init__
    return tuple(signature(constructor).parameters)[1:] if isfunction(constructor) else ()


def error_from_wire(code: str, message: str, detail: Mapping[str, Any]) -> errors.Error | None:
    """The error of the embedded engine that a server returned, with its text and its attributes; None for a code that
    is no error of the engine. `code` is that of `ERROR_HEADER`, or of the body without it."""
    kind = _ERRORS_BY_CODE.get(code)
    if kind is None:
        return None
    error = kind.__new__(kind, message)
    error.args = (message,)
    for name in _attributes_of(kind):
        setattr(error, name, detail.get(name, ""))
    if isinstance(error, errors.TopicExists):
        error.detail = {name: value for name, value in detail.items() if name != "topic"}
    written = detail.get("written", error.written)
    if isinstance(written, Mapping):  # of a body that is split into batches: what was written before the error
        ranges = written.get("ranges") or []
        error.acked = range(ranges[0][0], ranges[0][1] + 1) if len(ranges) == 1 else range(0)
        written = None if detail.get("in_doubt") else bool(ranges)
    error.written = written
    return error


# ── cursors ───────────────────────────────────────────────────────────────────────────────────────

_encode_cursor = msgspec.json.Encoder(order="deterministic").encode
_after_decoder = msgspec.json.Decoder(dict[str, str])
_positions_decoder = msgspec.json.Decoder(dict[str, int])


class BadCursor(Exception):
    """Text that is no cursor of a Tidelog server."""


def _encode_base64(value: Mapping[str, object]) -> bytes:
    return urlsafe_b64encode(_encode_cursor(value)).rstrip(b"=")


def _decode_base64(text: str) -> bytes:
    try:
        # Both alphabets, with padding and without: a proxy or an older client may have changed it.
        plain = text.encode("ascii").rstrip(b"=").replace(b"+", b"-").replace(b"/", b"_")
        content = urlsafe_b64decode(plain + b"=" * (-len(plain) % 4))
        if urlsafe_b64encode(content).rstrip(b"=") != plain:
            raise BadCursor(text)
        return content
    except ValueError:
        raise BadCursor(text) from None


def encode_page_cursor(after: str) -> str:
    return _encode_base64({"after": after}).decode()


def decode_page_cursor(text: str) -> str:
    """Return the last name of the page before."""
    try:
        return _after_decoder.decode(_decode_base64(text))["after"]
    except (msgspec.DecodeError, KeyError, UnicodeDecodeError):
        raise BadCursor(text) from None


def encode_positions(cursors: Mapping[str, int]) -> bytes:
    return _encode_position(*cursors.items()) if len(cursors) == 1 else _encode_base64(cursors)


@lru_cache(256)
def _encode_position(position: tuple[str, int]) -> bytes:
    """Encode the position of a session with one topic. All such sessions get the same text after a write."""
    return _encode_base64(dict((position,)))


def decode_positions(text: str) -> dict[str, int]:
    try:
        return _positions_decoder.decode(_decode_base64(text))
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadCursor(text) from None
