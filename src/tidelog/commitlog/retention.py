"""[policy] Retention: which sealed segments may go. Decides, never deletes.

Rules, in order of authority:
  1. A segment that reaches past the high watermark, or past what a consumer has committed, is
     kept, whatever the limits say; and so is every segment behind it.
  2. The active segment is never dropped, so at least one segment remains.
  3. Segments leave oldest first and without gaps, so the lowest seq only ever rises.
  4. Age and size are independent; breaking either is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the policy needs to know of a sealed segment; it never sees the files."""

    base: int
    stop: int
    size_bytes: int
    newest_us: int


@dataclass(frozen=True, slots=True)
class Decision:
    drop: int  # how many segments, counted from the oldest
    because: str


def decide(
    candidates: Sequence[Candidate],
    *,
    now_us: int,
    keep_ms: int | None,
    keep_bytes: int | None,
    high_watermark: int,
    committed: int | None,
    active_bytes: int = 0,
) -> Decision:
    """How many of the oldest segments break a limit and are protected by nothing."""
    total = sum(candidate.size_bytes for candidate in candidates) + active_bytes
    horizon_us = None if keep_ms is None else now_us - keep_ms * 1000
    for count, candidate in enumerate(candidates):
        too_old = horizon_us is not None and candidate.newest_us < horizon_us
        too_big = keep_bytes is not None and total > keep_bytes
        if not (too_old or too_big):
            return Decision(count, "within limits")
        if candidate.stop > high_watermark:
            return Decision(count, f"segment {candidate.base} reaches past the high watermark {high_watermark}")
        if committed is not None and candidate.stop > committed:
            return Decision(count, f"a consumer has committed only {committed} of segment {candidate.base}")
        total -= candidate.size_bytes
    return Decision(len(candidates), "every sealed segment was over the limits")
