"""The envelope of a metadata snapshot. What lies in it is the engine's business.

    0        4         8          12     20
    ┌────────┬─────────┬──────────┬──────┬──────┐
    │ "SNP1" │ version │ body_len │ xxh3 │ body │      4 bytes, u32, u32, u64 little-endian
    └────────┴─────────┴──────────┴──────┴──────┘

XXH3-64 covers the body, which is MessagePack. Version 100 is Tidelog's first; lower numbers belong to
another system that shares the header and never come here. The file is exactly as long as it says.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

from tidelog.errors import Corrupt, NewerFormat, TooLarge
from tidelog.formats.frame import U32_MAX
from tidelog.types import Buffer

MAGIC: Final = b"SNP1"
VERSION: Final = 100
_HEAD = Struct("<4sIIQ")
HEAD_BYTES: Final = 20
assert _HEAD.size == HEAD_BYTES, "drawn above, frozen by tests/golden; changing it is a new format"

T = TypeVar("T")


def encode(content: object) -> bytes:
    """The snapshot file of anything msgspec can encode. Maps keep their order, so one who wants equal bytes for
    equal content fills them in order and uses no sets."""
    return wrap(msgspec.msgpack.encode(content))


def decode(kind: type[T], buf: Buffer, what: str = "snapshot") -> T:
    """The content of a snapshot file as a `kind`; Corrupt or NewerFormat when it is not one."""
    body = unwrap(buf, what)
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(what, pos=HEAD_BYTES, reason=f"its body does not decode: {error}") from error


def wrap(body: bytes, *, version: int = VERSION) -> bytes:
    """The snapshot file that holds these bytes."""
    if len(body) > U32_MAX:
        raise TooLarge("the body of a snapshot", size=len(body), limit=U32_MAX)
    return _HEAD.pack(MAGIC, version, len(body), xxh3_64_intdigest(body)) + body


def unwrap(buf: Buffer, what: str = "snapshot", *, version: int = VERSION) -> bytes:
    """The bytes that a snapshot file of exactly this version holds."""
    if len(buf) < HEAD_BYTES:
        raise Corrupt(what, pos=0, reason=f"{len(buf)} bytes are too few for its head")
    magic, found, size, checksum = _HEAD.unpack_from(buf, 0)
    if magic != MAGIC:
        raise Corrupt(what, pos=0, reason=f"it starts with {magic!r} and not with {MAGIC!r}")
    if found > version:
        raise NewerFormat(what, found=found, known=version)
    if found < version:
        raise Corrupt(what, pos=4, reason=f"version {found} was never written here")
    if size != len(buf) - HEAD_BYTES:
        raise Corrupt(what, pos=8, reason=f"it says {size} bytes of body and has {len(buf) - HEAD_BYTES}")
    body = bytes(memoryview(buf)[HEAD_BYTES:])
    if xxh3_64_intdigest(body) != checksum:
        raise Corrupt(what, pos=12, reason="checksum mismatch")
    return body
