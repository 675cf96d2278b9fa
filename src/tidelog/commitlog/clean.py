"""[shell] Dropping old segments, and the cleaner's checkpoint that says how far cleaning has come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tidelog.commitlog import manifest
from tidelog.commitlog.append import roll_over
from tidelog.commitlog.retention import Candidate, decide
from tidelog.commitlog.segment import birth_us
from tidelog.commitlog.state import State
from tidelog.disk.atomic import read_all, replace, sync_names
from tidelog.disk.seam import join
from tidelog.errors import BadInput, Corrupt
from tidelog.formats import checkpoint
from tidelog.formats.checkpoint import Checkpoint

Running = tuple[int, Literal["copy", "swap"]]

CHECKPOINT = ".cleaner_checkpoint"


@dataclass(frozen=True, slots=True)
class Retained:
    """What a retention pass did."""

    segments: int
    records: int  # seqs that left; compaction may have emptied some of them before
    bytes: int
    lowest: int
    because: str  # why it stopped where it did


def load_checkpoint(state: State) -> Checkpoint | None:
    """The cleaner's state; None where there is none or it cannot be read (cleaning then starts anew, safely)."""
    text = read_all(state.disk, join(state.path, CHECKPOINT))
    if text is None:
        return None
    try:
        return checkpoint.decode(text)
    except Corrupt:
        return None


def save_checkpoint(
    state: State, *, cleaned: int | None = None, horizon_ms: int | None = None, running: Running | None = None
) -> Checkpoint:
    """Write the cleaner's state atomically. Progress never goes back."""
    old = load_checkpoint(state) or Checkpoint(0, 0, None, 0)
    new = Checkpoint(
        max(old.last_cleaned_seq, cleaned or 0),
        old.retention_horizon_ms if horizon_ms is None else max(horizon_ms, old.retention_horizon_ms),
        running,
        state.clock.now_us(),
    )
    replace(state.disk, join(state.path, CHECKPOINT), checkpoint.encode(new))
    return new


def candidates(state: State) -> list[Candidate]:
    """The sealed segments as the policy sees them. Where records carry no time, a segment is as young as the
    birth of the one behind it: nothing in it is younger."""
    found = []
    bases = [*(segment.base for segment in state.sealed), state.active.base]
    for segment, behind in zip(state.sealed, bases[1:], strict=True):
        times = segment.times()
        if times is not None:
            newest = times[1]
        elif state.codec.birth_suffix is not None:
            newest = birth_us(state.files, behind) or 0
        elif segment.lost:
            # Its records do not tell: as young as the next segment that has any, so that the loss stays visible.
            newest = state.clock.now_us()
        elif segment.size == 0:
            newest = 0  # compaction left no record in it
        else:
            # Damaged, so its records do not tell: as young as its file, which is never too old.
            stat = state.disk.stat(state.files.data(segment.base))
            newest = stat.modified_ms * 1000 if stat else 0
        found.append(Candidate(segment.base, segment.stop, segment.size + segment.side_bytes, newest))
    return found


def retain(
    state: State,
    *,
    keep_ms: int | None,
    keep_bytes: int | None,
    high_watermark: int | None,
    committed: Iterable[int],
) -> Retained:
    """Drop what the policy says, oldest first, each durably before the next; then write the checkpoint."""
    for name, value in (("keep_ms", keep_ms), ("keep_bytes", keep_bytes)):
        if value is not None and value < 0:
            raise BadInput(f"{name} is {value}, it must not be negative; nothing was dropped")
    with state.turn, state.mutex:
        state.check_writable()
        now_us = state.clock.now_us()
        mark = state.durable if high_watermark is None else min(high_watermark, state.durable)
        decision = decide(
            candidates(state),
            now_us=now_us,
            keep_ms=keep_ms,
            keep_bytes=keep_bytes,
            high_watermark=mark,
            committed=min(committed, default=None),
            active_bytes=state.active.size + state.active.side_bytes,
        )
        done = drop_oldest(state, decision.drop, decision.because)
        if done.segments:
            horizon_ms = max(now_us // 1000 - keep_ms, 0) if keep_ms is not None else None
            _after(state, cleaned=mark, horizon_ms=horizon_ms)
        return done


def remove_expired(state: State, age_ms: int) -> Retained:
    """Drop every leading segment whose records are all older than this, the active one too: numbering goes on. By age
    alone, as the laminar design has it: what consumers have committed does not hold it back, `retain` does that."""
    if age_ms < 0:
        raise BadInput(f"the age is {age_ms} ms, it must not be negative; nothing was dropped")
    with state.turn, state.mutex:
        state.check_writable()
        horizon_us = state.clock.now_us() - age_ms * 1000
        expired = 0
        for candidate in candidates(state):
            if candidate.newest_us >= horizon_us:
                break
            expired += 1
        active = state.active
        if expired == len(state.sealed) and active.size and active.last_write_us < horizon_us:
            roll_over(state, lenient=True)  # the next seq lives on in the name of the new, empty segment
            expired += 1
        done = drop_oldest(state, expired, "segments past the given age were dropped")
        if done.segments:
            _after(state, cleaned=state.lowest, horizon_ms=max(horizon_us // 1000, 0))
        return done


def drop_below(state: State, seq: int) -> Retained:
    """Drop every leading sealed segment that ends at or before `seq`."""
    with state.turn, state.mutex:
        state.check_writable()
        mark = min(seq, state.durable)
        over = next((number for number, segment in enumerate(state.sealed) if segment.stop > mark), len(state.sealed))
        return drop_oldest(state, over, f"what lies below seq {mark} was dropped")


def drop_oldest(state: State, count: int, because: str) -> Retained:
    records = size = 0
    if state.names_unsynced:
        try:
            sync_names(state.disk, state.path)
        except OSError as error:
            raise state.latch.refused(error, "syncing an earlier removal") from error
        state.names_unsynced = False
    if count:
        going = [segment.base for segment in state.sealed[:count]]
        try:
            manifest.save(state, sealed=state.sealed[count:], removing=going)
        except OSError as error:
            raise state.latch.refused(error, f"dropping segment {going[0]}") from error
    for _ in range(count):
        segment = state.sealed[0]
        try:
            state.files.remove(segment.base)
        except OSError as error:
            if state.disk.stat(state.files.all_of(segment.base)[0]) is None:
                del state.sealed[0]  # it does not count as a segment any more
                state.names_unsynced = True  # but a power cut could bring it back
            raise state.latch.refused(error, f"dropping segment {segment.base}") from error
        # After the files: a reader that still sees the segment finds it, one that does not is told the new range.
        del state.sealed[0]
        records += segment.stop - segment.base
        size += segment.size + segment.side_bytes
    return Retained(count, records, size, state.lowest, because)


def _after(state: State, *, cleaned: int, horizon_ms: int | None) -> None:
    try:
        save_checkpoint(state, cleaned=cleaned, horizon_ms=horizon_ms)
    except OSError as error:
        raise state.latch.refused(error, "writing the cleaner's checkpoint") from error
