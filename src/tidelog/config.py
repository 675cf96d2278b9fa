"""Settings of one log. Built once at the edge and passed down; nothing here reads the environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from tidelog.errors import BadInput

SyncPolicy: TypeAlias = Literal["each", "batch", "interval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Limits and promises of one segmented log."""

    sync: SyncPolicy = "batch"
    """What an ack means. `each`: every record is on disk before the next is written. `batch`: every record
    of the call is on disk when the call returns, with one sync for all. `interval`: the operating system has
    the bytes (they survive kill -9) and the disk has them at most `sync_interval_ms` later."""

    sync_interval_ms: int = 50
    """How long a power cut may reach back under `interval`."""

    segment_bytes_max: int = 64 << 20
    """Seal before the next append once the data file is this large. Smaller frees space sooner."""

    segment_overflow_bytes: int | None = None
    """How far the last record may pass `segment_bytes_max`; half of it when None. The bound on a streamed record."""

    index_bytes_max: int | None = None
    """Seal once the index file is this large; no limit when None."""

    segment_age_ms_max: int | None = 3_600_000
    """Seal once the segment was created this long ago; None: never by age."""

    first_seq: int | None = None
    """The first seq of a new log; the codec's own start (0 or 1) when None. Ignored by a log that exists."""

    index_every: int = 100
    """`rustlog`: one index entry per this many records. A lookup walks at most this far."""

    checksums: bool = True
    """`rustlog`: keep a checksum per record in a side-car file, because the seed's layout has none. Readers of
    the seed's layout never need it."""

    header_bytes: Literal[12, 20] | None = None
    """`rustlog`: bytes of a record's header: 20 as the design has it, 12 (no time) as the RustLog program writes.
    None: what the log was written with, 20 for a new one. The other size than the log has is refused."""

    index_width: Literal[4, 8] | None = None
    """`laminar`: bytes of the index stored inside each record; 8 allows more than 2**32 records. None: what the log
    was written with, 4 for a new one. The other width than the log has is refused."""

    unverified: bool = False
    """`laminar`: read a store whose hash function is unknown without checking its records. For reading only; a store
    with a known hash function is verified all the same."""

    index_cache: int | None = None
    """How many sealed segments keep their index in memory: None all, 0 none, n the n used last."""

    maps_max: int = 256
    """How many sealed data files stay mapped at once. Bounds descriptors, not memory."""

    verify_on_open: bool | None = None
    """Read and check every sealed record at open. None: as the codec's design says (only `narwhal` does)."""

    repair: bool = False
    """Cut bytes from the end of the active segment that are not plainly an unfinished write, and keep them in
    `quarantine/`. Without it such a log of another program opens for reading only."""

    def __post_init__(self) -> None:
        for name, least in (
            ("segment_bytes_max", 1),
            ("sync_interval_ms", 1),
            ("index_every", 1),
            ("maps_max", 1),
        ):
            if getattr(self, name) < least:
                raise BadInput(f"{name} is {getattr(self, name)}, it must be at least {least}")
        for name in (
            "segment_overflow_bytes",
            "index_bytes_max",
            "segment_age_ms_max",
            "first_seq",
            "index_cache",
        ):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise BadInput(f"{name} is {value}, it must not be negative")
        if self.sync not in ("each", "batch", "interval"):
            raise BadInput(f"sync is {self.sync!r}, it must be each, batch or interval")
        if self.index_width not in (None, 4, 8):
            raise BadInput(f"index_width is {self.index_width}, it must be 4 or 8")
        if self.header_bytes not in (None, 12, 20):
            raise BadInput(f"header_bytes is {self.header_bytes}, it must be 12 or 20")

    @property
    def overflow_bytes(self) -> int:
        extra = self.segment_overflow_bytes
        return self.segment_bytes_max // 2 if extra is None else extra
