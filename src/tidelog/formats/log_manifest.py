"""The manifest of a segmented log, `.tidelog.manifest`. The only module that knows its bytes.

    file header "TLLM" 1, then MessagePack, an array of
    ┌───────┬────────────┬──────────┬────────┬──────────┬──────────┬───────┬──────────┬─────────┐
    │ codec │ generation │ segments │ active │ next_seq │ reserved │ clean │ removing │ offsets │
    └───────┴────────────┴──────────┴────────┴──────────┴──────────┴───────┴──────────┴─────────┘
    segments   [base, data_bytes, sides] of every sealed segment, oldest first
    active     the same of the segment that grows; its bytes are those known to be durable

Every layout has it beside the segments; no other program needs it. A file that it names existed, durably, when it was
written: a file that is missing or too short is damage. `reserved` is above every seq that was ever assigned, so the
loss of the active segment never leads to a seq that is assigned twice. In a closed log (`clean`) it is the next seq.
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
UNKNOWN: Final = -1  # of data_bytes: the file was lost before its size was recorded

_Seq: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One segment."""

    base: _Seq
    data_bytes: Annotated[int, msgspec.Meta(ge=UNKNOWN, le=(1 << 63) - 1)]  # at least
    sides: Annotated[int, msgspec.Meta(ge=0, le=255)]  # a bit for each side file that cannot be rebuilt from the data


class LogManifest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    codec: str
    generation: _Seq  # rises with every save
    segments: list[Entry]
    active: Entry | None  # None: the log is being erased
    next_seq: _Seq  # the next append gets no lower one
    reserved: _Seq  # no seq from here on was assigned
    clean: bool  # closed: `active`, `next_seq` and `reserved` are exact
    removing: list[_Seq]  # bases of segments that are being removed on purpose
    offsets: bool  # consumers have committed offsets


def encode(manifest: LogManifest) -> bytes:
    return file_header.wrap_file(MAGIC, VERSION, msgspec.msgpack.encode(manifest))


def decode(buf: Buffer, what: str = NAME) -> LogManifest:
    """Decode a manifest; Corrupt or NewerFormat when it is not one."""
    manifest = file_header.decode_msgpack(LogManifest, file_header.unwrap_file(MAGIC, VERSION, buf, what), what)
    bases = [entry.base for entry in manifest.segments] + ([manifest.active.base] if manifest.active else [])
    if any(low >= high for low, high in pairwise(bases)):
        raise Corrupt(what, pos=file_header.FILE_HEADER_BYTES, reason=f"the bases {bases} do not rise")
    return manifest
