"""The two small files of a channel: its metadata, and the cursor of its queue. No other module knows their bytes.

    metadata.bin   a file header (`formats/file_header.py`) with magic "TLCM" and version 1, then MessagePack:
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

from struct import Struct
from typing import Final, Literal, TypeAlias
from zlib import crc32

import msgspec

from tidelog.errors import Corrupt, TooLarge
from tidelog.formats import file_header
from tidelog.types import Buffer

MAGIC: Final = b"TLCM"
VERSION: Final = 1
METADATA_BYTES_MAX: Final = 64 << 20
_CURSOR = Struct("<QI4s")
_CRC_AT: Final = 8
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


_encode = msgspec.msgpack.Encoder().encode


def encode(meta: ChannelMeta) -> bytes:
    """Encode the metadata file of a channel."""
    encoded = file_header.wrap_file(MAGIC, VERSION, _encode(meta))
    if len(encoded) > METADATA_BYTES_MAX:
        raise TooLarge(f"the metadata of {meta.handler}", size=len(encoded), limit=METADATA_BYTES_MAX)
    return encoded


def decode(buf: Buffer, what: str) -> ChannelMeta:
    """Decode a metadata file; Corrupt or NewerFormat when it is not one."""
    if len(buf) > METADATA_BYTES_MAX:
        raise oversized_error(what, len(buf))
    body = file_header.unwrap_file(MAGIC, VERSION, buf, what)
    meta = file_header.decode_msgpack(ChannelMeta, body, what)
    if _encode(meta) != body:
        raise Corrupt(what, pos=file_header.FILE_HEADER_BYTES, reason="its body is not in the canonical encoding")
    for name, listed in (
        ("members", meta.members),
        ("join", meta.acl.join),
        ("publish", meta.acl.publish),
        ("read", meta.acl.read),
    ):
        if len(listed) > 1 and tuple(sorted({*listed})) != listed:
            raise Corrupt(
                what, pos=file_header.FILE_HEADER_BYTES, reason=f"its {name} are not sorted, or one occurs twice"
            )
    return meta


def oversized_error(what: str, size: int) -> Corrupt:
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
    is_valid = crc == crc32(bytes(memoryview(buf)[:_CRC_AT])) and pad == bytes(4)
    return int(next_seq) if is_valid and 1 <= next_seq < 1 << 63 else None
