"""Small files that are replaced as a whole: headers, the manifest of a log, and the two files of a channel.

No other module knows their bytes. The header of Tidelog's own files:

    0       4         5      8          12      20
    ┌───────┬─────────┬──────┬──────────┬───────┬──────┐
    │ magic │ version │ zero │ body_len │ xxh3  │ body │
    │  4 B  │   u8    │ 3 B  │   u32    │  u64  │      │
    └───────┴─────────┴──────┴──────────┴───────┴──────┘
    └──────────── covered ──────────────┘       └ covered ┘

Little-endian. XXH3-64 covers the twelve bytes before it and the body, so that a damaged version byte cannot make one
layout pass for another. The file is exactly as long as its header says: a change of any byte is detected.

A metadata snapshot, whose content the engine defines:

    0        4         8          12     20
    ┌────────┬─────────┬──────────┬──────┬──────┐
    │ "SNP1" │ version │ body_len │ xxh3 │ body │      4 bytes, u32, u32, u64 little-endian
    └────────┴─────────┴──────────┴──────┴──────┘

XXH3-64 covers the body, which is MessagePack, and from version 101 on the version before it. Version 100 is Tidelog's
first, 101 has generations of segments, 102 is a base or a delta; lower numbers belong to another system that shares the
header. The file is exactly as long as its header says.

The manifest of a segmented log, `.tidelog.manifest`.

    file header "TLLM" 1, then MessagePack, an array of
    ┌───────┬────────────┬──────────┬────────┬──────────┬──────────┬───────┬──────────┬─────────┐
    │ codec │ generation │ segments │ active │ next_seq │ reserved │ clean │ removing │ offsets │
    └───────┴────────────┴──────────┴────────┴──────────┴──────────┴───────┴──────────┴─────────┘
    segments   [base, data_bytes, sides] of every sealed segment, oldest first
    active     the same of the segment that grows; its bytes are those known to be durable

Every layout has it beside the segments; no other program needs it. A file that it names existed, durably, when it was
written: a file that is missing or too short is damage. `reserved` is above every seq that was ever assigned, so the
loss of the active segment never leads to a seq that is assigned twice. In a closed log (`clean`) it is the next seq.

The two small files of a channel: its metadata, and the cursor of its queue.

    metadata.bin   the file header with magic "TLCM" and version 1, then MessagePack:
                   [handler, owner or nil, config, acl, members]
                     config   [max_clients, max_payload_size, max_persist_messages, persist,
                               message_flush_interval (ms), type]
                     acl      [join, publish, read], each a sorted array of users and domains
                     members  sorted, each once

    cursor.bin     0          8       12     16
                   ┌──────────┬───────┬──────┐
                   │ next seq │ crc32 │ zero │      little-endian; the CRC-32 covers the first eight bytes
                   └──────────┴───────┴──────┘

Arrays and no maps, and everything sorted: equal channels have equal bytes. A body that is encoded in another way is
refused, so that no two files mean the same channel.
"""

from __future__ import annotations

from itertools import pairwise
from struct import Struct
from typing import Annotated, Final, Literal, TypeAlias, TypeVar
from zlib import crc32

import msgspec
from xxhash import xxh3_64, xxh3_64_intdigest

from tidelog.errors import Corrupt, NewerFormat, TooLarge
from tidelog.formats.frame import U32_MAX
from tidelog.types import Buffer

_HEADER = Struct("<4sB3sI")
_CHECKSUM = Struct("<Q")
_PAD: Final = bytes(3)
FILE_HEADER_BYTES: Final = 20
assert _HEADER.size + _CHECKSUM.size == FILE_HEADER_BYTES, (
    "drawn above, frozen by tests/golden; changing it is a new format"
)


def wrap_file(magic: bytes, version: int, body: bytes) -> bytes:
    """Return the file that holds `body`."""
    assert len(magic) == 4, "a magic has four bytes"
    assert 0 < version < 256, "zeroed bytes would be version 0"
    if len(body) > U32_MAX:
        raise TooLarge("the body of a file", size=len(body), limit=U32_MAX)
    lead = _HEADER.pack(magic, version, _PAD, len(body))
    return b"".join((lead, _CHECKSUM.pack(_checksum(lead, body)), body))


def unwrap_file(magic: bytes, known_version: int, buf: Buffer, what: str) -> bytes:
    """Return the body of a file of `wrap_file`. NewerFormat for a later version whose checksum holds, Corrupt for
    anything else: a caller that can work without the file has to survive a damaged version byte."""
    if len(buf) < FILE_HEADER_BYTES:
        raise Corrupt(what, pos=0, reason=f"{len(buf)} bytes are too few for its head")
    file_magic, version, pad, size = _HEADER.unpack_from(buf, 0)
    if file_magic != magic:
        raise Corrupt(what, pos=0, reason=f"it begins with {file_magic!r} and not with {magic!r}")
    view = memoryview(buf)
    body = bytes(view[FILE_HEADER_BYTES:])
    is_valid = _CHECKSUM.unpack_from(buf, _HEADER.size)[0] == _checksum(bytes(view[: _HEADER.size]), body)
    if version > known_version and is_valid:
        raise NewerFormat(what, found=version, known=known_version)
    if version < known_version:
        raise Corrupt(what, pos=4, reason=f"version {version} was never written")
    if pad != _PAD:
        raise Corrupt(what, pos=5, reason="reserved bytes are not zero")
    if size != len(buf) - FILE_HEADER_BYTES:
        raise Corrupt(what, pos=8, reason=f"a body of {size} bytes in its header, not {len(buf) - FILE_HEADER_BYTES}")
    if not is_valid:
        raise Corrupt(what, pos=_HEADER.size, reason="checksum mismatch")
    return body


def _checksum(lead: bytes, body: bytes) -> int:
    digest = xxh3_64(lead)
    digest.update(body)
    return digest.intdigest()


SNAPSHOT_MAGIC: Final = b"SNP1"
SNAPSHOT_VERSION: Final = 100
SNAPSHOT_VERSION_NEWEST: Final = 101  # the versions between differ in what the body may say, not in its layout
CHAIN_VERSION: Final = 102  # of bases and deltas
_SNAPSHOT_HEADER = Struct("<4sIIQ")
SNAPSHOT_HEADER_BYTES: Final = FILE_HEADER_BYTES
assert _SNAPSHOT_HEADER.size == SNAPSHOT_HEADER_BYTES, (
    "drawn above, frozen by tests/golden; changing it is a new format"
)

T = TypeVar("T")


def decode_msgpack(kind: type[T], body: bytes, what: str) -> T:
    """Decode the MessagePack body of a file that has one of these headers; Corrupt when it is not a `kind`."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(what, pos=FILE_HEADER_BYTES, reason=f"its body does not decode: {error}") from error


def encode_snapshot(content: object, *, version: int = SNAPSHOT_VERSION) -> bytes:
    """Encode the snapshot file of anything msgspec can encode. Maps keep their order: for equal bytes a caller fills
    them in order and uses no sets."""
    return wrap_snapshot(msgspec.msgpack.encode(content), version=version)


def decode_snapshot(kind: type[T], buf: Buffer, what: str = "snapshot") -> T:
    """Decode the content of a snapshot file as a `kind`; Corrupt or NewerFormat when it is not one."""
    return decode_msgpack(kind, unwrap_snapshot(buf, what, newest=SNAPSHOT_VERSION_NEWEST), what)


def wrap_snapshot(body: bytes, *, version: int = SNAPSHOT_VERSION) -> bytes:
    """Return the snapshot file that holds these bytes."""
    if len(body) > U32_MAX:
        raise TooLarge("the body of a snapshot", size=len(body), limit=U32_MAX)
    return _SNAPSHOT_HEADER.pack(SNAPSHOT_MAGIC, version, len(body), _snapshot_checksum(version, body)) + body


def snapshot_version(buf: Buffer) -> int | None:
    """Return the version in the header of a snapshot file; None where it has none."""
    if len(buf) < SNAPSHOT_HEADER_BYTES:
        return None
    magic, version, _, _ = _SNAPSHOT_HEADER.unpack_from(buf, 0)
    return int(version) if magic == SNAPSHOT_MAGIC else None


def _snapshot_checksum(version: int, body: bytes) -> int:
    """The checksum of a snapshot. From version 101 on it covers the version, which changes what the body may say."""
    return xxh3_64_intdigest(body if version <= SNAPSHOT_VERSION else version.to_bytes(4, "little") + body)


def unwrap_snapshot(
    buf: Buffer, what: str = "snapshot", *, version: int = SNAPSHOT_VERSION, newest: int | None = None
) -> bytes:
    """Return the bytes that a snapshot file of this version holds, or of one up to `newest`."""
    newest = version if newest is None else newest
    if len(buf) < SNAPSHOT_HEADER_BYTES:
        raise Corrupt(what, pos=0, reason=f"{len(buf)} bytes are too few for its head")
    magic, file_version, size, checksum = _SNAPSHOT_HEADER.unpack_from(buf, 0)
    if magic != SNAPSHOT_MAGIC:
        raise Corrupt(what, pos=0, reason=f"it begins with {magic!r} and not with {SNAPSHOT_MAGIC!r}")
    if file_version > newest:
        raise NewerFormat(what, found=file_version, known=newest)
    if file_version < version:
        raise Corrupt(what, pos=4, reason=f"version {file_version} was never written here")
    if size != len(buf) - SNAPSHOT_HEADER_BYTES:
        raise Corrupt(
            what, pos=8, reason=f"a body of {size} bytes in its header, not {len(buf) - SNAPSHOT_HEADER_BYTES}"
        )
    body = bytes(memoryview(buf)[SNAPSHOT_HEADER_BYTES:])
    if _snapshot_checksum(file_version, body) != checksum:
        raise Corrupt(what, pos=12, reason="checksum mismatch")
    return body


MANIFEST_NAME: Final = ".tidelog.manifest"
MANIFEST_MAGIC: Final = b"TLLM"
MANIFEST_VERSION: Final = 1
UNKNOWN_BYTES: Final = -1  # of data_bytes: the file was lost before its size was recorded

_Seq: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class ManifestEntry(msgspec.Struct, frozen=True, array_like=True):
    """One segment."""

    base: _Seq
    data_bytes: Annotated[int, msgspec.Meta(ge=UNKNOWN_BYTES, le=(1 << 63) - 1)]  # at least
    sides: Annotated[int, msgspec.Meta(ge=0, le=255)]  # a bit for each side file that cannot be rebuilt from the data


class LogManifest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    codec: str
    generation: _Seq  # rises with every save
    segments: list[ManifestEntry]
    active: ManifestEntry | None  # None: the log is being erased
    next_seq: _Seq  # the next append gets no lower one
    reserved: _Seq  # no seq from here on was assigned
    clean: bool  # closed: `active`, `next_seq` and `reserved` are exact
    removing: list[_Seq]  # bases of segments that are being removed on purpose
    offsets: bool  # consumers have committed offsets


def encode_manifest(manifest: LogManifest) -> bytes:
    return wrap_file(MANIFEST_MAGIC, MANIFEST_VERSION, msgspec.msgpack.encode(manifest))


def decode_manifest(buf: Buffer, what: str = MANIFEST_NAME) -> LogManifest:
    """Decode a manifest; Corrupt or NewerFormat when it is not one."""
    manifest = decode_msgpack(LogManifest, unwrap_file(MANIFEST_MAGIC, MANIFEST_VERSION, buf, what), what)
    bases = [entry.base for entry in manifest.segments] + ([manifest.active.base] if manifest.active else [])
    if any(low >= high for low, high in pairwise(bases)):
        raise Corrupt(what, pos=FILE_HEADER_BYTES, reason=f"the bases {bases} do not rise")
    return manifest


CHANNEL_MAGIC: Final = b"TLCM"
CHANNEL_VERSION: Final = 1
METADATA_BYTES_MAX: Final = 64 << 20
_CURSOR = Struct("<QI4s")
_CURSOR_CRC_AT: Final = 8
CURSOR_BYTES: Final = 16
assert _CURSOR.size == CURSOR_BYTES, "drawn above, frozen by tests/golden; changing it is a new format"

ChannelType: TypeAlias = Literal["pubsub", "fifo"]
AclKind: TypeAlias = Literal["join", "publish", "read"]


class ChannelConfig(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The settings of one channel."""

    max_clients: int
    max_payload_size: int
    max_persist_messages: int
    persist: bool
    message_flush_interval: int  # milliseconds; 0: every message is synced
    type: ChannelType


class ChannelAcl(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Users and domains for each operation; an empty list allows all."""

    join: tuple[str, ...] = ()
    publish: tuple[str, ...] = ()
    read: tuple[str, ...] = ()


class ChannelMeta(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything of a channel that survives a restart, except its messages."""

    handler: str
    owner: str | None
    config: ChannelConfig
    acl: ChannelAcl
    members: tuple[str, ...]


_pack = msgspec.msgpack.Encoder().encode


def encode_channel(meta: ChannelMeta) -> bytes:
    """Encode the metadata file of a channel."""
    encoded = wrap_file(CHANNEL_MAGIC, CHANNEL_VERSION, _pack(meta))
    if len(encoded) > METADATA_BYTES_MAX:
        raise TooLarge(f"the metadata of {meta.handler}", size=len(encoded), limit=METADATA_BYTES_MAX)
    return encoded


def decode_channel(buf: Buffer, what: str) -> ChannelMeta:
    """Decode a metadata file; Corrupt or NewerFormat when it is not one."""
    if len(buf) > METADATA_BYTES_MAX:
        raise oversized_channel_error(what, len(buf))
    body = unwrap_file(CHANNEL_MAGIC, CHANNEL_VERSION, buf, what)
    meta = decode_msgpack(ChannelMeta, body, what)
    if _pack(meta) != body:
        raise Corrupt(what, pos=FILE_HEADER_BYTES, reason="its body is not in the canonical encoding")
    for name, listed in (
        ("members", meta.members),
        ("join", meta.acl.join),
        ("publish", meta.acl.publish),
        ("read", meta.acl.read),
    ):
        if len(listed) > 1 and tuple(sorted({*listed})) != listed:
            raise Corrupt(what, pos=FILE_HEADER_BYTES, reason=f"its {name} are not sorted, or one occurs twice")
    return meta


def oversized_channel_error(what: str, size: int) -> Corrupt:
    return Corrupt(what, pos=0, reason=f"{size} bytes are more than the {METADATA_BYTES_MAX} that metadata can have")


def encode_cursor(next_seq: int) -> bytes:
    """Encode the cursor file of a queue whose next message is `next_seq`."""
    assert 1 <= next_seq < 1 << 63, "seqs run from 1"
    lead = next_seq.to_bytes(8, "little")
    return _CURSOR.pack(next_seq, crc32(lead), bytes(4))


def decode_cursor(buf: Buffer) -> int | None:
    """Return the next seq of a cursor file, or None where it is not one."""
    if len(buf) != CURSOR_BYTES:
        return None
    next_seq, crc, pad = _CURSOR.unpack_from(buf, 0)
    is_valid = crc == crc32(bytes(memoryview(buf)[:_CURSOR_CRC_AT])) and pad == bytes(4)
    return int(next_seq) if is_valid and 1 <= next_seq < 1 << 63 else None
