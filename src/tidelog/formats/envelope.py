"""The envelope of Tidelog's small files. The only module that knows how one says what it is.

    0       4         5      8          12      20
    ┌───────┬─────────┬──────┬──────────┬───────┬──────┐
    │ magic │ version │ zero │ body_len │ xxh3  │ body │
    │  4 B  │   u8    │ 3 B  │   u32    │  u64  │      │
    └───────┴─────────┴──────┴──────────┴───────┴──────┘
    └──────────── covered ──────────────┘       └ covered ┘

Little-endian. XXH3-64 covers the twelve bytes before it and the body, so that a damaged version byte
cannot make one layout pass for another. The file is exactly as long as it says: not one byte of it
can change and still be read.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from xxhash import xxh3_64

from tidelog.errors import Corrupt, NewerFormat, TooLarge
from tidelog.formats.frame import U32_MAX
from tidelog.types import Buffer

_LEAD = Struct("<4sB3sI")
_SUM = Struct("<Q")
_PAD: Final = bytes(3)
HEAD_BYTES: Final = 20
assert _LEAD.size + _SUM.size == HEAD_BYTES, "drawn above, frozen by tests/golden; changing it is a new format"


def wrap(magic: bytes, version: int, body: bytes) -> bytes:
    """The file that holds `body`."""
    assert len(magic) == 4, "a magic has four bytes"
    assert 0 < version < 256, "version 0 is what zeroed bytes would say"
    if len(body) > U32_MAX:
        raise TooLarge("the body of a file", size=len(body), limit=U32_MAX)
    lead = _LEAD.pack(magic, version, _PAD, len(body))
    return b"".join((lead, _SUM.pack(_checksum(lead, body)), body))


def unwrap(magic: bytes, known_version: int, buf: Buffer, what: str) -> bytes:
    """The body of a file that `wrap` made. NewerFormat for a later version whose checksum holds, Corrupt for anything
    else: a version byte that is damaged must not stop whoever could do without the file."""
    if len(buf) < HEAD_BYTES:
        raise Corrupt(what, pos=0, reason=f"{len(buf)} bytes are too few for its head")
    found, version, pad, size = _LEAD.unpack_from(buf, 0)
    if found != magic:
        raise Corrupt(what, pos=0, reason=f"it starts with {found!r} and not with {magic!r}")
    view = memoryview(buf)
    body = bytes(view[HEAD_BYTES:])
    holds = _SUM.unpack_from(buf, _LEAD.size)[0] == _checksum(bytes(view[: _LEAD.size]), body)
    if version > known_version and holds:
        raise NewerFormat(what, found=version, known=known_version)
    if version < known_version:
        raise Corrupt(what, pos=4, reason=f"version {version} was never written")
    if pad != _PAD:
        raise Corrupt(what, pos=5, reason="reserved bytes are not zero")
    if size != len(buf) - HEAD_BYTES:
        raise Corrupt(what, pos=8, reason=f"it says {size} bytes of body and has {len(buf) - HEAD_BYTES}")
    if not holds:
        raise Corrupt(what, pos=_LEAD.size, reason="checksum mismatch")
    return body


def _checksum(lead: bytes, body: bytes) -> int:
    digest = xxh3_64(lead)
    digest.update(body)
    return digest.intdigest()
