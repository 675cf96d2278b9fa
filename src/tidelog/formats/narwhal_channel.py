"""The files of a narwhal channel that are not messages, and Tidelog's record of an import. No other module knows them.

`metadata.bin` of narwhal 0.7 is postcard: six fields in this order, without magic, version and checksum.

    handler, owner, config, acl, members, type

    number    LEB128: seven bits a byte, lowest first; the top bit is set on every byte but the last
    text      its length as a number, then UTF-8
    option    00, or 01 and the value
    config    five options: max_clients, max_payload_size, max_persist_messages, persist, message_flush_interval
    acl       three maps, join, publish and read: a count, then domain and users of each; a domain without users stands
              for all its users. The order is that of a hash map: any
    members   a count, then user@domain of each
    type      00 pub/sub, 01 fifo; files of versions before 0.7 end before it

Every file has one encoding: a number that is longer than necessary is refused. So bytes that decode are the bytes that
`encode_narwhal_channel` returns. Without a checksum a changed letter of a name is another name.

`imported.bin` is Tidelog's: a file header "TLNI" 1, then MessagePack, an array of

    metadata   the bytes of the narwhal file that the channel was imported from
    config     the settings that its channel got, as in `small_files.ChannelConfig`
    indexes    [first, bytes] of the index file of each segment
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Annotated, Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from tidelog.errors import BadInput, Corrupt, TooLarge
from tidelog.formats.small_files import METADATA_BYTES_MAX, ChannelConfig, decode_msgpack, unwrap_file, wrap_file
from tidelog.types import Buffer

T = TypeVar("T")
Acl: TypeAlias = tuple[tuple[str, tuple[str, ...]], ...]
"""The users of each domain, in the order of the file; no users: the whole domain."""

NAMES_MAX: Final = 1 << 20
"""Users and domains in one file. Their number is checked before any is decoded: 64 MiB of empty names would take
gigabytes of memory."""
NAME_BYTES_MAX: Final = 510
_U32_MAX: Final = (1 << 32) - 1
_NEXT_STEP: Final = "nothing was changed, check which program wrote it"


class NarwhalConfig(NamedTuple):
    """The settings of a channel; None: the default of the server that opens it."""

    max_clients: int | None
    max_payload_size: int | None
    max_persist_messages: int | None
    persist: bool | None
    message_flush_interval: int | None


class NarwhalChannel(NamedTuple):
    handler: str
    owner: str | None
    config: NarwhalConfig
    join: Acl
    publish: Acl
    read: Acl
    members: tuple[str, ...]
    is_fifo: bool


def narwhal_directory_name(handler: str) -> str:
    """Return the directory of a channel: lowercase hex SHA-256 of its handler, without domain."""
    return sha256(handler.encode()).hexdigest()


class _Reader:
    """A position in a file; every length is checked against the bytes that are left before it is used."""

    def __init__(self, buf: Buffer, what: str) -> None:
        self._buf, self._what, self.pos = bytes(buf), what, 0
        self._names_left = NAMES_MAX

    def fail(self, reason: str, *, pos: int | None = None) -> Corrupt:
        return Corrupt(self._what, pos=self.pos if pos is None else pos, reason=reason, next_step=_NEXT_STEP)

    @property
    def left(self) -> int:
        return len(self._buf) - self.pos

    def byte(self, field: str) -> int:
        if self.pos >= len(self._buf):
            raise self.fail(f"the file ends before its {field}")
        self.pos += 1
        return self._buf[self.pos - 1]

    def number(self, field: str) -> int:
        start, value = self.pos, 0
        for shift in range(0, 35, 7):
            part = self.byte(field)
            value |= (part & 0x7F) << shift
            if part < 0x80:
                if value > _U32_MAX or (part == 0 and shift):
                    break
                return value
        raise self.fail(f"the number of its {field} is no u32 in its shortest form", pos=start)

    def text(self, field: str, bytes_max: int = NAME_BYTES_MAX) -> str:
        start, size = self.pos, self.number(field)
        if size > min(bytes_max, self.left):
            raise self.fail(f"its {field} has {size} bytes: more than {min(bytes_max, self.left)}", pos=start)
        self.pos += size
        try:
            return self._buf[self.pos - size : self.pos].decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"its {field} is not UTF-8", pos=start) from error

    def count(self, field: str) -> int:
        """Read the number of items that follow; each takes at least one byte."""
        start, count = self.pos, self.number(field)
        if count > self.left:
            raise self.fail(f"{count} {field} in the {self.left} bytes that are left", pos=start)
        if count > self._names_left:
            raise self.fail(f"more than {NAMES_MAX} users and domains in one file", pos=start)
        self._names_left -= count
        return count

    def flag(self, field: str) -> bool:
        start, value = self.pos, self.byte(field)
        if value > 1:
            raise self.fail(f"its {field} is {value}, neither 0 nor 1", pos=start)
        return bool(value)

    def optional_number(self, field: str) -> int | None:
        return self.number(field) if self.flag(field) else None

    def acl(self, field: str) -> Acl:
        start, entries = self.pos, list[tuple[str, tuple[str, ...]]]()
        for _ in range(self.count(f"domains of the {field} list")):
            domain = self.text(f"{field} list")
            users = tuple(self.text(f"{field} list") for _ in range(self.count(f"users of the {field} list")))
            if len({*users}) < len(users):
                raise self.fail(f"a user is twice on its {field} list", pos=start)
            entries.append((domain, users))
        if len({domain for domain, _ in entries}) < len(entries):
            raise self.fail(f"a domain is twice on its {field} list", pos=start)
        return tuple(entries)


def decode_narwhal_channel(buf: Buffer, what: str) -> NarwhalChannel:
    """Decode a metadata file of narwhal; Corrupt when it is not one."""
    if len(buf) > METADATA_BYTES_MAX:
        raise Corrupt(what, pos=0, reason=f"{len(buf)} bytes are more than {METADATA_BYTES_MAX}", next_step=_NEXT_STEP)
    reader = _Reader(buf, what)
    handler = reader.text("handler")
    owner = reader.text("owner") if reader.flag("owner") else None
    config = NarwhalConfig(
        reader.optional_number("max_clients"),
        reader.optional_number("max_payload_size"),
        reader.optional_number("max_persist_messages"),
        reader.flag("persist") if reader.flag("persist") else None,
        reader.optional_number("message_flush_interval"),
    )
    join, publish, read = reader.acl("join"), reader.acl("publish"), reader.acl("read")
    members = tuple(reader.text("members") for _ in range(reader.count("members")))
    if len({*members}) < len(members):
        raise reader.fail("a member is listed twice")
    if not reader.left:
        raise reader.fail("the file ends before the channel's type: narwhal before version 0.7 wrote it")
    is_fifo = reader.flag("type")
    if reader.left:
        raise reader.fail(f"{reader.left} bytes follow the last field")
    return NarwhalChannel(handler, owner, config, join, publish, read, members, is_fifo)


def encode_narwhal_channel(channel: NarwhalChannel) -> bytes:
    """Encode a metadata file of narwhal. Raises BadInput or TooLarge for values that the decoder would refuse."""
    parts = [_text(channel.handler), _option(channel.owner, _text)]
    config = channel.config
    parts += [_option(number, _number) for number in config[:3]]
    parts += [_option(config.persist, lambda on: bytes([on])), _option(config.message_flush_interval, _number)]
    for entries in (channel.join, channel.publish, channel.read):
        parts.append(_number(len(entries)))
        for domain, users in entries:
            parts += [_text(domain), _number(len(users)), *map(_text, users)]
    parts += [_number(len(channel.members)), *map(_text, channel.members), bytes([channel.is_fifo])]
    encoded = b"".join(parts)
    if len(encoded) > METADATA_BYTES_MAX:
        raise TooLarge(f"the metadata of {channel.handler}", size=len(encoded), limit=METADATA_BYTES_MAX)
    return encoded


def _number(value: int) -> bytes:
    if not 0 <= value <= _U32_MAX:
        raise BadInput(f"narwhal stores numbers from 0 to {_U32_MAX}, not {value}; nothing was written")
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _text(value: str) -> bytes:
    encoded = value.encode()
    if len(encoded) > NAME_BYTES_MAX:
        raise TooLarge(f"the name {value[:40]}…", size=len(encoded), limit=NAME_BYTES_MAX)
    return _number(len(encoded)) + encoded


def _option(value: T | None, encode: Callable[[T], bytes]) -> bytes:
    return b"\0" if value is None else b"\1" + encode(value)


IMPORT_MAGIC: Final = b"TLNI"
IMPORT_VERSION: Final = 1
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class IndexSize(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The size of an index file that narwhal had preallocated."""

    first: _Count
    bytes: _Count


class ImportRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an export needs to write the files of an imported channel as they were."""

    metadata: bytes
    config: ChannelConfig
    indexes: list[IndexSize]


def encode_import_record(record: ImportRecord) -> bytes:
    return wrap_file(IMPORT_MAGIC, IMPORT_VERSION, msgspec.msgpack.encode(record))


def decode_import_record(buf: Buffer, what: str) -> ImportRecord:
    """Decode `imported.bin`; Corrupt or NewerFormat when it is not one."""
    return decode_msgpack(ImportRecord, unwrap_file(IMPORT_MAGIC, IMPORT_VERSION, buf, what), what)
