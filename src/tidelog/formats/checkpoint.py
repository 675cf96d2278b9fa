"""The cleaner checkpoint of a rustlog partition: how far retention and compaction have come.

    {
      "last_cleaned_offset": 1000,
      "retention_horizon_ms": 1700000000000,
      "compaction_state": "Idle",            or {"Running": {"segment": 2000, "phase": "copy"}}
      "created_at": {
        "secs_since_epoch": 1700000600,
        "nanos_since_epoch": 0
      }
    }

Text has no checksum, so the reader is strict: four members of the right kind and nothing else, or
the file is corrupt. A changed digit still reads as another number. There is a second form, 16
bytes, big-endian: the last cleaned seq and the ms of that run. It is read, never written. It has
no horizon: 0 stands for it, which claims nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import Annotated, Literal, TypeAlias

import msgspec

from tidelog.errors import BadInput, Corrupt

NAME = ".cleaner_checkpoint"
TEMPORARY_NAME = ".cleaner_checkpoint.tmp"

_BINARY = Struct(">QQ")  # last cleaned seq, ms of the run
_SIGNED_MAX = (1 << 63) - 1
_NEXT_STEP = "remove the file and the next cleaning starts from the beginning"
_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_SIGNED_MAX)]
_Seconds: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_SIGNED_MAX // 1_000_000 - 1)]
_Nanos: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1_000_000_000)]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    last_cleaned_seq: int
    retention_horizon_ms: int
    running: tuple[int, str] | None  # the base of the segment being compacted, and its phase: copy or swap
    created_at_us: int


class _Time(msgspec.Struct, forbid_unknown_fields=True):
    secs_since_epoch: _Seconds
    nanos_since_epoch: _Nanos


class _Step(msgspec.Struct, forbid_unknown_fields=True):
    segment: _Number
    phase: Literal["copy", "swap"]


class _Running(msgspec.Struct, forbid_unknown_fields=True, rename={"step": "Running"}):
    step: _Step


class _File(msgspec.Struct, forbid_unknown_fields=True):
    last_cleaned_offset: _Number
    retention_horizon_ms: _Number
    compaction_state: Literal["Idle"] | _Running
    created_at: _Time


def encode(checkpoint: Checkpoint) -> bytes:
    """The file's content. Whatever `decode` would refuse is refused here already."""
    seconds, micros = divmod(checkpoint.created_at_us, 1_000_000)
    state: object = "Idle"
    if checkpoint.running is not None:
        state = {"Running": dict(zip(("segment", "phase"), checkpoint.running, strict=True))}
    content = {
        "last_cleaned_offset": checkpoint.last_cleaned_seq,
        "retention_horizon_ms": checkpoint.retention_horizon_ms,
        "compaction_state": state,
        "created_at": {"secs_since_epoch": seconds, "nanos_since_epoch": micros * 1000},
    }
    try:
        return msgspec.json.format(msgspec.json.encode(msgspec.convert(content, _File)), indent=2)
    except msgspec.ValidationError as error:
        raise BadInput(f"no checkpoint can be written from {checkpoint}: {error}") from error


def decode(data: bytes, *, where: str = NAME) -> Checkpoint:
    """What `encode` was given; Corrupt, naming `where`, for anything it could not have written."""
    if len(data) == _BINARY.size and not data.startswith(b"{"):
        return _decode_binary(data, where)
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        # The second comes from naming a member that is no member and no UTF-8 either.
        raise Corrupt(where, pos=0, reason=str(error), next_step=_NEXT_STEP) from error
    state, time = file.compaction_state, file.created_at
    return Checkpoint(
        file.last_cleaned_offset,
        file.retention_horizon_ms,
        (state.step.segment, state.step.phase) if isinstance(state, _Running) else None,
        time.secs_since_epoch * 1_000_000 + time.nanos_since_epoch // 1000,
    )


def _decode_binary(data: bytes, where: str) -> Checkpoint:
    last_cleaned, run_ms = _BINARY.unpack(data)
    if last_cleaned > _SIGNED_MAX or run_ms > _SIGNED_MAX // 1000:
        raise Corrupt(where, pos=0, reason="a number is out of range", next_step=_NEXT_STEP)
    return Checkpoint(last_cleaned, 0, None, run_ms * 1000)
