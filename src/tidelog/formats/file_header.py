"""The headers of small files: of Tidelog's own, and of metadata snapshots.

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

XXH3-64 covers the body, which is MessagePack. Version 100 is Tidelog's first; lower numbers belong to
another system that shares the header. The file is exactly as long as its header says.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, TypeVar

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


def encode_snapshot(content: object) -> bytes:
    """Encode the snapshot file of anything msgspec can encode. Maps keep their order: for equal bytes a caller fills
    them in order and uses no sets."""
    return wrap_snapshot(msgspec.msgpack.encode(content))


def decode_snapshot(kind: type[T], buf: Buffer, what: str = "snapshot") -> T:
    """Decode the content of a snapshot file as a `kind`; Corrupt or NewerFormat when it is not one."""
    return decode_msgpack(kind, unwrap_snapshot(buf, what), what)


def wrap_snapshot(body: bytes, *, version: int = SNAPSHOT_VERSION) -> bytes:
    """Return the snapshot file that holds these bytes."""
    if len(body) > U32_MAX:
        raise TooLarge("the body of a snapshot", size=len(body), limit=U32_MAX)
    return _SNAPSHOT_HEADER.pack(SNAPSHOT_MAGIC, version, len(body), xxh3_64_intdigest(body)) + body


def unwrap_snapshot(buf: Buffer, what: str = "snapshot", *, version: int = SNAPSHOT_VERSION) -> bytes:
    """Return the bytes that a snapshot file of exactly this version holds."""
    if len(buf) < SNAPSHOT_HEADER_BYTES:
        raise Corrupt(what, pos=0, reason=f"{len(buf)} bytes are too few for its head")
    magic, file_version, size, checksum = _SNAPSHOT_HEADER.unpack_from(buf, 0)
    if magic != SNAPSHOT_MAGIC:
        raise Corrupt(what, pos=0, reason=f"it begins with {magic!r} and not with {SNAPSHOT_MAGIC!r}")
    if file_version > version:
        raise NewerFormat(what, found=file_version, known=version)
    if file_version < version:
        raise Corrupt(what, pos=4, reason=f"version {file_version} was never written here")
    if size != len(buf) - SNAPSHOT_HEADER_BYTES:
        raise Corrupt(
            what, pos=8, reason=f"a body of {size} bytes in its header, not {len(buf) - SNAPSHOT_HEADER_BYTES}"
        )
    body = bytes(memoryview(buf)[SNAPSHOT_HEADER_BYTES:])
    if xxh3_64_intdigest(body) != checksum:
        raise Corrupt(what, pos=12, reason="checksum mismatch")
    return body
