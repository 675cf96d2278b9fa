"""The manifest of a segmented log, `.tidelog.manifest`. The only module that knows its bytes.

    envelope "TLLM" 1, then MessagePack, an array of
    ┌───────┬────────────┬──────────┬────────┬──────────┬──────────┬───────┬──────────┬─────────┐
    │ codec │ generation │ segments │ active │ next_seq │ reserved │ clean │ removing │ offsets │
    └───────┴────────────┴──────────┴────────┴──────────┴──────────┴───────┴──────────┴─────────┘
    segments   [base, data_bytes, sides] of every sealed segment, oldest first
    active     the same of the segment that grows; its bytes are those known to be durable

It is ours in every layout, lies beside the segments, and no other program needs it. A file that
it names existed, durably, when it was written; so a file that is gone or too short is damage.
`reserved` is above every seq that was ever handed out, so a lost active segment never leads to a seq being
given twice. In a log that was closed (`clean`) it is the next seq exactly.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Final, TypeAlias

import msgspec

from tidelog.errors import Corrupt
from tidelog.formats import file_header
from tidelog.types import Buffer

NAME: Final = ".tidelog.manifest"
MAGIC: Final = b"TLLM"
VERSION: Final = 1
UNKNOWN: Final = -1  # of data_bytes: the file was lost before its size was on record

_Seq: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """What is known of one segment."""

    base: _Seq
    data_bytes: Annotated[int, msgspec.Meta(ge=UNKNOWN, le=(1 << 63) - 1)]  # at least
    sides: Annotated[int, msgspec.Meta(ge=0, le=255)]  # a bit for each side file that it has and that no data gives


class LogManifest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    codec: str
    generation: _Seq  # rises with every save
    segments: list[Entry]
    active: Entry | None  # None: the log is being erased
    next_seq: _Seq  # the next append gets no lower one
    reserved: _Seq  # no seq from here on was handed out
    clean: bool  # closed: `active`, `next_seq` and `reserved` are exact
    removing: list[_Seq]  # bases of segments that are being removed on purpose
    offsets: bool  # consumers have committed offsets


def encode(manifest: LogManifest) -> bytes:
    return file_header.wrap_file(MAGIC, VERSION, msgspec.msgpack.encode(manifest))


def decode(buf: Buffer, what: str = NAME) -> LogManifest:
    """What `encode` was given; Corrupt or NewerFormat when it is not that."""
    body = file_header.unwrap_file(MAGIC, VERSION, buf, what)
    try:
        found = msgspec.msgpack.decode(body, type=LogManifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(what, pos=file_header.FILE_HEADER_BYTES, reason=f"its body does not decode: {error}") from error
    bases = [entry.base for entry in found.segments] + ([found.active.base] if found.active else [])
    if any(low >= high for low, high in pairwise(bases)):
        raise Corrupt(what, pos=file_header.FILE_HEADER_BYTES, reason=f"the bases {bases} do not rise")
    return found
