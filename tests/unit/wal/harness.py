"""Helpers of the WAL tests: frames whose data names their write, one shard, and its recovery.

File names are repeated here from the layout's description: a test that damages a file must not ask the code under test
for its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.kit.threads import TIMEOUT_S as TIMEOUT_S
from tests.kit.threads import running

from tidelog.disk.durability import WriteLatch
from tidelog.disk.interface import Disk
from tidelog.errors import Error
from tidelog.formats import control_frames, frame
from tidelog.testing import ManualClock, SimDisk
from tidelog.wal import (
    Commit,
    CommitFuture,
    LostRange,
    Position,
    Shard,
    TornTail,
    Writer,
    prepare_for_writing,
    replay_shard,
)

WAL = "data/wal"
QUARANTINE = "data/quarantine"
FILE_BYTES = 2048
OVERHEAD = 46  # bytes of a frame around its data


def wal_path(first: int) -> str:
    return f"{WAL}/wal-{first:016d}.log"


def append(data: bytes, *, more: bool = False, topic_id: int = 1) -> bytes:
    """One Append frame."""
    return frame.encode(
        frame.APPEND, topic_id=topic_id, seq=1, ts_ms=1_700_000_000_000, data=data, flags=frame.MORE if more else 0
    )


def chain(datas: Sequence[bytes]) -> list[bytes]:
    """One caller's batch: a chain of frames of which all count or none."""
    return [append(data, more=number < len(datas)) for number, data in enumerate(datas, 1)]


def checkpoint_mark(first: int, pos: int, *, at: int = 0) -> bytes:
    """A CheckpointMark which says that so much of a file was synced before it, and where it is itself."""
    body = control_frames.encode(control_frames.CheckpointMark(wal_first=first, wal_pos=pos))
    return frame.encode(frame.CHECKPOINT_MARK, seq=at, ts_ms=0, data=body)


@dataclass
class SubmittedWrite:
    """One caller's batch and its outcomes."""

    datas: list[bytes]
    durable: bool
    outcomes: list[Error | None] = field(default_factory=list)

    @property
    def acked(self) -> bool:
        return self.outcomes == [None]


class WalHarness:
    """A shard without a thread, and all that was ever submitted to it, in order."""

    def __init__(
        self,
        disk: Disk,
        *,
        first: int = 1,
        file_bytes: int = FILE_BYTES,
        history: list[SubmittedWrite] | None = None,
        on_write_done: Callable[[SubmittedWrite], None] = lambda _: None,
        queue_max: int = 4096,
        batch_frames: int = 4096,
        batch_bytes: int = 8 << 20,
        marks: bool = True,
    ) -> None:
        self.disk, self.latch = disk, WriteLatch(WAL)
        self.history = [] if history is None else history
        self.may_use_reserve = False  # as records are: the reserve of a full disk is not for them
        self._on_done = on_write_done
        self.writer = Writer(disk, WAL, file_number=first, file_bytes=file_bytes, latch=self.latch, write_marks=marks)
        self.shard = Shard(
            self.writer,
            clock=ManualClock(),
            queue_max=queue_max,
            batch_frames=batch_frames,
            batch_bytes=batch_bytes,
        )

    def submit(self, datas: Sequence[bytes], *, durable: bool = True, nowait: bool = False) -> CommitFuture[int]:
        write = SubmittedWrite(list(datas), durable)
        future: CommitFuture[int] = CommitFuture(self.shard)

        def done(error: Error | None) -> None:
            write.outcomes.append(error)
            self._on_done(write)
            future.set_result(len(datas) if error is None else error)

        self.history.append(write)
        try:
            commit = Commit(chain(datas), frames=len(datas), durable=durable, on_done=done)
            commit.may_use_reserve = self.may_use_reserve
            self.shard.submit(commit, nowait=nowait)
        except BaseException:
            self.history.remove(write)
            raise
        return future

    def write(self, *datas: bytes, durable: bool = True) -> int:
        return self.submit(datas, durable=durable).wait()


class WalContents(NamedTuple):
    datas: list[bytes]
    cut: TornTail | None
    losses: list[LostRange]
    missing: list[range]
    next_first: int
    quarantined: list[str]
    frames: int = 0  # with marks

    @property
    def verdict(self) -> str | None:
        """What is wrong with it, the worst first."""
        return "damaged" if any(lost.file for lost in self.losses) else "torn" if self.cut else None


def inspect_wal(disk: Disk, start: Position | None = None, *, durable: Position | None = None) -> WalContents:
    """What is in the WAL; nothing is changed."""
    return _recover(disk, start, durable, write=False)


def recover(disk: Disk, start: Position | None = None, *, durable: Position | None = None) -> WalContents:
    """What is in the WAL; its files are made ready for writing."""
    return _recover(disk, start, durable, write=True)


def _recover(disk: Disk, start: Position | None, durable: Position | None, *, write: bool) -> WalContents:
    replay = replay_shard(disk, WAL, start, durable=durable)
    datas: list[bytes] = []
    seen: list[tuple[int, int, list[int], int, int]] = []
    for window in replay:
        seen.append(
            (window.file_number, window.file_offset, window.frame_pos.tolist(), window.losses_before, window.doubtful)
        )
        assert len(window.frame_pos) == len(window.headers)
        for at, head in zip(window.frame_pos.tolist(), window.headers, strict=True):
            end = at + 38 + int(head["data_len"])
            assert 0 <= at < end < len(window.buf)
            if head["kind"] == frame.APPEND:
                datas.append(window.buf[at + 38 : end])
    again = [
        (each.file_number, each.file_offset, each.frame_pos.tolist(), each.losses_before, each.doubtful)
        for each in replay.windows()
    ]
    assert again == seen, "`windows` returns the same windows again"
    kept = prepare_for_writing(disk, WAL, replay, quarantine=QUARANTINE) if write else []
    frames = sum(len(at) for _, _, at, _, _ in seen)
    return WalContents(
        datas, replay.torn_tail, replay.losses, replay.missing_frames, replay.next_file_number, kept, frames
    )


def reopened(disk: SimDisk) -> tuple[WalHarness, WalContents]:
    """A recovered WAL with a new file to write to."""
    found = recover(disk)
    return WalHarness(disk, first=found.next_first), found


def run_all(works: list[Callable[[], object]]) -> None:
    """Run these at once and see all of them end."""
    with running(*works):
        pass
