"""The bodies of control frames, types 2 to 11, 13 to 16 and 18. Only this module knows their bytes.

    text        u32 length, then UTF-8
    option      0, or 1 and the value
    match       option of: op u8 (0 exact, 1 prefix), text

    TopicCreate, ConfigUpdate   text name, u32 length and the config's bytes
    TopicDelete                 text name, u32 zero
    RouterCreate                text name, source, dest; bools u8; match; u64 cursor; u64 dest base
    RouterDelete                text name
    Delete                      option u64 before; match; u32 n, u64 seq × n; option u64 bound
    EvictWatermark              u64 evict floor, u64 earliest, u64 expiry floor
    CheckpointBarrier           u64
    CheckpointMark              u32 version 1; u64 wal first; u64 wal pos; u32 n; 7 × u64 a topic, ids rising
    Lease                       event u8; u64 lease id; u64 deadline ms; u64 deliveries; text node
    HeadWatermark               u64 head
    Forward                     event u8; u64 source id; u64 first, u64 last source seq; u64 target head after it;
                                events 3 and 4 also: u64s copies by router; u64s pairs of count and hops
    GroupCursor                 text group; gone u8; u64 seq; u64 hold bytes
    NumberedBatch               text writer; u64 number; u64 first, u64 last seq; u64 × 2 sum; the highest
                                bit of number is set where a text follows: the query id
    WriteKey                    text key; u64 first, u64 last seq
    Compaction                  u64 selector; u64 compacted to; u64 oldest tombstone ms; u32 n, u64 seq × n

Little-endian. Bytes left over, an option that is neither 0 nor 1 and an unknown operation are damage: the checksum of
the frame holds, and no version of the program has written such a body.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise
from struct import Struct, pack
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias, TypeVar

from tidelog.errors import BadInput, Corrupt, NewerFormat, TooLarge
from tidelog.formats import frame
from tidelog.formats.frame import U32_MAX
from tidelog.types import Buffer

CHECKPOINT_VERSION: Final = 1
_U32 = Struct("<I")
_U64 = Struct("<Q")
_BARRIER_BYTES: Final = 8
_U64_LIMIT: Final = 1 << 64


class MatchOp(IntEnum):
    EXACT = 0
    PREFIX = 1


class LeaseEvent(IntEnum):
    CLAIMED = 0
    RELEASED = 1
    EXTENDED = 2
    ACKED = 3


class ForwardEvent(IntEnum):
    # Events 0 to 2 were written while copies were in no WAL. They are read and no longer written.
    REACHED = 0  # everything up to `last` was forwarded
    TRIMMED = 1  # first to last were lost at the source before they were forwarded: one hole each
    SKIPPED = 2  # first to last were deleted at the source before they were forwarded: no records for them
    COPIED = 3  # the records after it, up to `dest_head`, are copies of first to last
    LOST = 4  # first to last were lost at the source before they were copied: one seq for each copy, a gap


@dataclass(frozen=True, slots=True)
class Match:
    """Selects tags. A prefix is stored without its trailing star."""

    op: MatchOp
    value: str


@dataclass(frozen=True, slots=True)
class TopicCreate:
    KIND: ClassVar[int] = frame.TOPIC_CREATE
    name: str
    config: bytes  # opaque here


@dataclass(frozen=True, slots=True)
class TopicDelete:
    KIND: ClassVar[int] = frame.TOPIC_DELETE
    name: str


@dataclass(frozen=True, slots=True)
class ConfigUpdate:
    KIND: ClassVar[int] = frame.CONFIG_UPDATE
    name: str
    config: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterCreate:
    KIND: ClassVar[int] = frame.ROUTER_CREATE
    name: str
    source: str
    dest: str
    preserve_node: bool = False
    preserve_tag: bool = False
    create_dest: bool = False
    allow_cycle: bool = False
    exactly_once: bool = False
    match: Match | None = None
    initial_cursor: int = 0
    initial_dest_base: int = 0


@dataclass(frozen=True, slots=True)
class RouterDelete:
    KIND: ClassVar[int] = frame.ROUTER_DELETE
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """The request, not its result: replay finds the seqs of `before_seq` and `match` again."""

    KIND: ClassVar[int] = frame.DELETE
    before_seq: int | None = None
    match: Match | None = None
    seqs: tuple[int, ...] = ()
    bound_head: int | None = None  # head + 1 when it was logged: later records are not deleted


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictWatermark:
    KIND: ClassVar[int] = frame.EVICT_WATERMARK
    evict_floor: int
    earliest_seq: int
    expiry_floor: int


@dataclass(frozen=True, slots=True)
class CheckpointBarrier:
    """The short form of a CheckpointMark: a sync barrier that names no position."""

    KIND: ClassVar[int] = frame.CHECKPOINT_MARK
    last_checkpoint_seq: int = 0


class TopicMark(NamedTuple):
    topic_id: int
    highest_seq: int
    evict_floor: int
    earliest_seq: int
    delete_below: int
    seg_first_seq: int
    seg_data_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMark:
    KIND: ClassVar[int] = frame.CHECKPOINT_MARK
    wal_first: int  # the number in the shard's active file name
    wal_pos: int  # bytes of that file that were synced before this frame was written
    topics: tuple[TopicMark, ...] = ()  # ids rising


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The frame's seq is the leased record's."""

    KIND: ClassVar[int] = frame.LEASE
    event: LeaseEvent
    lease_id: int
    deadline_ms: int
    deliveries: int
    node: str = ""


@dataclass(frozen=True, slots=True)
class HeadWatermark:
    KIND: ClassVar[int] = frame.HEAD_WATERMARK
    head_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Progress of the routers that lead to a topic. The frame's seq is its number among the topic's router frames."""

    KIND: ClassVar[int] = frame.FORWARD
    event: ForwardEvent
    source_id: int
    first: int
    last: int
    dest_head: int
    counts: tuple[int, ...] = ()  # copies, or lost ones, of each router in the order of the routers
    hops: tuple[int, ...] = ()  # pairs of a number of copies, in order, and the routers that they passed

    @property
    def total(self) -> int:
        """How many seqs of the target it covers."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCursor:
    """The new cursor of a consumer group in the topic; or the group was removed."""

    KIND: ClassVar[int] = frame.GROUP_CURSOR
    group: str
    seq: int = 0
    hold_bytes: int = 0  # how many bytes retention may keep for it; 0: none
    gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedBatch:
    """The frames after it, of the same topic and up to `last`, are this batch of a writer that numbers its batches."""

    KIND: ClassVar[int] = frame.NUMBERED_BATCH
    writer: str
    number: int
    first: int
    last: int
    sum: tuple[int, int]  # of its content, as the writer computed it
    query_id: str = ""  # of the query that wrote it; "": not known, and no text is written


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteKey:
    """The records that follow it, `first` to `last` of the same topic, were written under this idempotency key."""

    KIND: ClassVar[int] = frame.WRITE_KEY
    key: str
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """Records that compaction removes, and how far it is. The frame's seq is its number among the topic's deletes."""

    KIND: ClassVar[int] = frame.COMPACTION
    selector: int  # identifies the topic's rule for keys: under another one this progress does not count
    compacted_to: int  # of the records up to here, only the newest of each key is left; 0: more frames follow
    tombstone_ms: int  # the time of the oldest tombstone that is left; 0: none
    seqs: tuple[int, ...] = ()


Body: TypeAlias = (
    TopicCreate
    | TopicDelete
    | ConfigUpdate
    | RouterCreate
    | RouterDelete
    | Delete
    | EvictWatermark
    | CheckpointBarrier
    | CheckpointMark
    | Lease
    | HeadWatermark
    | Forward
    | GroupCursor
    | NumberedBatch
    | WriteKey
    | Compaction
)

_ROUTER_BOOLS: Final = ("preserve_node", "preserve_tag", "create_dest", "allow_cycle", "exactly_once")
_HAS_QUERY_ID: Final = 1 << 63  # in the number of a numbered batch
_EVENT_NAMES: Final[dict[type[IntEnum], str]] = {LeaseEvent: "lease", ForwardEvent: "forward"}
E = TypeVar("E", LeaseEvent, ForwardEvent)


class _Reader:
    """Reads a body from front to back; every length is compared with the bytes that remain before it is used."""

    def __init__(self, data: Buffer, what: str) -> None:
        self._data, self._pos, self._what = memoryview(data), 0, what

    @property
    def remaining(self) -> int:
        return len(self._data) - self._pos

    def corrupt(self, reason: str) -> Corrupt:
        return Corrupt(f"{self._what} body", pos=self._pos, reason=reason)

    def _bytes(self, size: int) -> memoryview:
        if size > self.remaining:
            raise self.corrupt(f"{size} bytes do not fit, {self.remaining} are left")
        self._pos += size
        return self._data[self._pos - size : self._pos]

    def u8(self) -> int:
        return self._bytes(1)[0]

    def u32(self) -> int:
        return int(_U32.unpack(self._bytes(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack(self._bytes(8))[0])

    def u64s(self, width: int = 1) -> tuple[int, ...]:
        """Read a count and so many times `width` numbers."""
        count = self.u32() * width
        return Struct(f"<{count}Q").unpack(self._bytes(8 * count))

    def blob(self) -> bytes:
        return bytes(self._bytes(self.u32()))

    def text(self) -> str:
        try:
            return str(self.blob(), "utf-8")
        except UnicodeDecodeError:
            raise self.corrupt("a name is not UTF-8") from None

    def flag(self) -> bool:
        option = self.u8()
        if option > 1:
            raise self.corrupt(f"option byte {option} is neither 0 nor 1")
        return option == 1

    def event(self, events: type[E]) -> E:
        event = self.u8()
        if event > max(events):
            raise self.corrupt(f"unknown {_EVENT_NAMES[events]} event {event}")
        return events(event)

    def option(self) -> int | None:
        return self.u64() if self.flag() else None

    def match(self) -> Match | None:
        if not self.flag():
            return None
        op = self.u8()
        if op > max(MatchOp):
            raise self.corrupt(f"unknown match operation {op}")
        return Match(MatchOp(op), self.text())

    def check_finished(self) -> None:
        if self.remaining:
            raise self.corrupt(f"{self.remaining} bytes are left over")


def _encode_u64(value: int) -> bytes:
    if not 0 <= value < _U64_LIMIT:
        raise BadInput(f"{value} does not fit an unsigned 64-bit field")
    return _U64.pack(value)


def _encode_u64s(values: tuple[int, ...]) -> bytes:
    _encode_u64(min(values, default=0))
    _encode_u64(max(values, default=0))
    return pack(f"<I{len(values)}Q", len(values), *values)


def _encode_blob(value: bytes) -> bytes:
    if len(value) > U32_MAX:
        raise TooLarge("a value of a control frame", size=len(value), limit=U32_MAX)
    return _U32.pack(len(value)) + value


def _encode_text(value: str) -> bytes:
    try:
        return _encode_blob(value.encode())
    except UnicodeEncodeError:
        raise BadInput(f"{value!r} cannot be written as UTF-8") from None


def _encode_option(value: int | None) -> bytes:
    return b"\x00" if value is None else b"\x01" + _encode_u64(value)


def _encode_match(match: Match | None) -> bytes:
    return b"\x00" if match is None else b"\x01" + bytes((MatchOp(match.op),)) + _encode_text(match.value)


class _Codec(NamedTuple):
    encode: Callable[[Any], bytes]
    decode: Callable[[_Reader], Any]


_TEXT = _Codec(_encode_text, _Reader.text)
_BLOB = _Codec(_encode_blob, _Reader.blob)
_U64_CODEC = _Codec(_encode_u64, _Reader.u64)
_U64S = _Codec(_encode_u64s, _Reader.u64s)
_BOOL = _Codec(lambda value: bytes((value,)), _Reader.flag)
_OPTION = _Codec(_encode_option, _Reader.option)
_MATCH = _Codec(_encode_match, _Reader.match)
_LEASE_EVENT = _Codec(lambda value: bytes((LeaseEvent(value),)), lambda reader: reader.event(LeaseEvent))
_FORWARD_EVENT = _Codec(lambda value: bytes((ForwardEvent(value),)), lambda reader: reader.event(ForwardEvent))

# The fields of a body in the order of its bytes. Of Forward and RouterCreate only the fields that every body has.
_LAYOUTS: Final[dict[type[Body], dict[str, _Codec]]] = {
    TopicCreate: {"name": _TEXT, "config": _BLOB},
    ConfigUpdate: {"name": _TEXT, "config": _BLOB},
    RouterDelete: {"name": _TEXT},
    Delete: {"before_seq": _OPTION, "match": _MATCH, "seqs": _U64S, "bound_head": _OPTION},
    EvictWatermark: {"evict_floor": _U64_CODEC, "earliest_seq": _U64_CODEC, "expiry_floor": _U64_CODEC},
    CheckpointBarrier: {"last_checkpoint_seq": _U64_CODEC},
    Lease: {
        "event": _LEASE_EVENT,
        "lease_id": _U64_CODEC,
        "deadline_ms": _U64_CODEC,
        "deliveries": _U64_CODEC,
        "node": _TEXT,
    },
    HeadWatermark: {"head_seq": _U64_CODEC},
    Forward: {
        "event": _FORWARD_EVENT,
        "source_id": _U64_CODEC,
        "first": _U64_CODEC,
        "last": _U64_CODEC,
        "dest_head": _U64_CODEC,
    },
    GroupCursor: {"group": _TEXT, "gone": _BOOL, "seq": _U64_CODEC, "hold_bytes": _U64_CODEC},
    WriteKey: {"key": _TEXT, "first": _U64_CODEC, "last": _U64_CODEC},
    Compaction: {
        "selector": _U64_CODEC,
        "compacted_to": _U64_CODEC,
        "tombstone_ms": _U64_CODEC,
        "seqs": _U64S,
    },
}
_CLASSES: Final = {kind.KIND: kind for kind in _LAYOUTS}


def encode(body: Body) -> bytes:
    """Encode the data of a frame of type `body.KIND`. Raises for values that their fields cannot hold."""
    match body:
        case TopicDelete(name):
            return _encode_text(name) + _encode_blob(b"")
        case RouterCreate():
            names = _encode_text(body.name) + _encode_text(body.source) + _encode_text(body.dest)
            bools = sum(1 << bit for bit, field in enumerate(_ROUTER_BOOLS) if getattr(body, field))
            ends = _encode_u64(body.initial_cursor) + _encode_u64(body.initial_dest_base)
            return names + bytes((bools,)) + _encode_match(body.match) + ends
        case CheckpointMark():
            if any(mark.topic_id <= last.topic_id for last, mark in pairwise(body.topics)):
                raise BadInput("the topics of a checkpoint mark are given by rising id, each once")
            head = _U32.pack(CHECKPOINT_VERSION) + _encode_u64(body.wal_first) + _encode_u64(body.wal_pos)
            marks = b"".join(_encode_u64(value) for mark in body.topics for value in mark)
            return head + _U32.pack(len(body.topics)) + marks
        case Forward() if body.event >= ForwardEvent.COPIED:
            return _encode_fields(body) + _encode_u64s(body.counts) + _encode_u64s(body.hops)
        case NumberedBatch():
            if body.number >= _HAS_QUERY_ID:
                raise BadInput(f"the number of a batch is below 2^63, {body.number} is not")
            number = body.number | _HAS_QUERY_ID if body.query_id else body.number
            numbers = b"".join(map(_encode_u64, (number, body.first, body.last, *body.sum)))
            return _encode_text(body.writer) + numbers + (_encode_text(body.query_id) if body.query_id else b"")
        case _:
            return _encode_fields(body)


def _encode_fields(body: Body) -> bytes:
    return b"".join([codec.encode(getattr(body, field)) for field, codec in _LAYOUTS[type(body)].items()])


def decode(kind: int, data: Buffer) -> Body:
    """Decode the body of a control frame of this type; Corrupt when these bytes are not one."""
    reader = _Reader(data, frame.FRAME_NAMES.get(kind, f"type {kind}"))
    body = _decode(kind, reader)
    reader.check_finished()
    return body


def _decode(kind: int, reader: _Reader) -> Body:
    match kind:
        case frame.TOPIC_DELETE:
            name = reader.text()
            if reader.blob():
                raise reader.corrupt("a deleted topic has no config")
            return TopicDelete(name)
        case frame.ROUTER_CREATE:
            name, source, dest, bools = reader.text(), reader.text(), reader.text(), reader.u8()
            if bools >> len(_ROUTER_BOOLS):
                raise reader.corrupt(f"unknown router options {bools:#04x}")
            return RouterCreate(
                name=name,
                source=source,
                dest=dest,
                **{field: bool(bools >> bit & 1) for bit, field in enumerate(_ROUTER_BOOLS)},
                match=reader.match(),
                initial_cursor=reader.u64(),
                initial_dest_base=reader.u64(),
            )
        case frame.CHECKPOINT_MARK if reader.remaining != _BARRIER_BYTES:
            return _decode_checkpoint(reader)
        case frame.NUMBERED_BATCH:
            return _decode_numbered(reader)
    body_class = _CLASSES.get(kind)
    if body_class is None:
        raise reader.corrupt("not the body of a control frame")
    body: Body = body_class(**{field: codec.decode(reader) for field, codec in _LAYOUTS[body_class].items()})
    if isinstance(body, Forward) and body.event >= ForwardEvent.COPIED:
        body = replace(body, counts=reader.u64s(), hops=reader.u64s())
        if len(body.hops) % 2 or sum(body.hops[::2]) != body.total or body.total > body.dest_head:
            raise reader.corrupt("hops and copies of a forward do not agree")
    return body


def _decode_numbered(reader: _Reader) -> NumberedBatch:
    writer, number, first, last = reader.text(), reader.u64(), reader.u64(), reader.u64()
    total, query_id = (reader.u64(), reader.u64()), ""
    if number >= _HAS_QUERY_ID:
        number, query_id = number - _HAS_QUERY_ID, reader.text()
        if not query_id:
            raise reader.corrupt("a query id that is there is not empty")
    return NumberedBatch(writer=writer, number=number, first=first, last=last, sum=total, query_id=query_id)


def _decode_checkpoint(reader: _Reader) -> CheckpointMark:
    version = reader.u32()
    if version > CHECKPOINT_VERSION:
        raise NewerFormat("CheckpointMark", found=version, known=CHECKPOINT_VERSION)
    if version < CHECKPOINT_VERSION:
        raise reader.corrupt(f"version {version} was never written")
    wal_first, wal_pos = reader.u64(), reader.u64()
    values = reader.u64s(len(TopicMark._fields))
    topics = tuple(map(TopicMark._make, zip(*[iter(values)] * len(TopicMark._fields), strict=True)))
    if any(mark.topic_id <= last.topic_id for last, mark in pairwise(topics)):
        raise reader.corrupt("topic ids do not rise")
    return CheckpointMark(wal_first=wal_first, wal_pos=wal_pos, topics=topics)
