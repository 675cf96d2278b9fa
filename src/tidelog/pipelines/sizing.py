"""[policy] When to commit and how much: files of a good size where there is enough, and none that waits too long.

    pending bytes ≥ file_bytes               a commit, up to commit_bytes at once
    the oldest pending record ≥ age_ms old   a commit of whatever there is
    nobody will come back (once)             a commit of whatever there is
    else                                     wait

What would be left for a last commit that is smaller than a file goes with the one before it.

A commit's bytes are cut evenly into as few files as do not pass `file_bytes`, so none of them is a crumb. Bytes are
those of the log: Parquet makes fewer of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tidelog.errors import BadInput
from tidelog.spark.offsets import Pending, admit

Reason: TypeAlias = Literal["nothing", "bytes", "age", "once", "wait"]


@dataclass(frozen=True, slots=True)
class Sizes:
    file_bytes: int = 128 << 20
    age_ms: int = 60_000
    commit_bytes: int = 1 << 30  # so that a long history is many commits, each of which is progress

    def __post_init__(self) -> None:
        if self.file_bytes < 1 or self.commit_bytes < self.file_bytes:
            raise BadInput(
                f"files of {self.file_bytes} bytes in commits of {self.commit_bytes}: the first must be at least 1 and "
                "at most the second; nothing was written"
            )


def decide(sizes: Sizes, *, seqs: int, pending_bytes: int, oldest_ms: int | None, once: bool) -> Reason:
    """Whether to commit now. `oldest_ms` is how old the first pending record is; None: nobody knows."""
    if seqs <= 0:
        return "nothing"
    if once:
        return "once"
    if pending_bytes >= sizes.file_bytes:
        return "bytes"
    return "age" if oldest_ms is not None and oldest_ms >= sizes.age_ms else "wait"


def until(sizes: Sizes, first: int, head: int, bytes_at: Callable[[int], int]) -> int:
    """Where a commit ends that begins at `first`. At least one seq is taken."""
    pending = Pending("", first, head, bytes_at)
    stop = admit([pending], None, sizes.commit_bytes)[""]
    return head if bytes_at(head) - bytes_at(stop) < sizes.file_bytes else stop
