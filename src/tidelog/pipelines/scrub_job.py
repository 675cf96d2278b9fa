"""Verify every checksum of a data directory in parallel.

What is looked at is what `tidelog check` looks at: snapshots, WAL, segments, indexes, footers and deletions of topics,
metadata, messages and cursors of channels. The parts that are long go to executors, channels by the dozen. Changes
nothing, and works beside a writer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

from tidelog.channels.store import ChannelCheck, ChannelCheckResult, check_channels
from tidelog.disk.posix import PosixDisk
from tidelog.engine.check import Finding, check_directory, run_check_task
from tidelog.errors import BadInput, NotFound
from tidelog.pipelines.spark_tasks import TaskRunner

T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[int, int], None]
_CHANNELS_PER_TASK: Final = 12  # channels of one part


class Scrubbed(NamedTuple):
    findings: tuple[Finding, ...]
    topics: int
    segments: int
    frames: int
    bytes: int
    parts: int
    channels: int = 0
    messages: int = 0

    @property
    def damage(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.damage)


def run_scrub(path: str, runner: TaskRunner, progress: Progress | None = None) -> Scrubbed:
    """Examine a directory. What is found is in the order of `tidelog check`, parts after the rest."""
    stat = PosixDisk().stat(path)
    if stat is None:
        raise NotFound(f"there is nothing at {path}; nothing was done, check the path")
    if not stat.is_dir:
        raise BadInput(f"{path} is a file, topics are stored in a directory; nothing was done, check the path")
    apart, channels = check_directory(path), ChannelCheck(path)
    found, live = list(apart.begin()), channels.live_directories()
    found += channels.find_leftovers(live)
    few = [(path, live[at : at + _CHANNELS_PER_TASK]) for at in range(0, len(live), _CHANNELS_PER_TASK)]
    total, step = len(apart.tasks) + len(few), max((len(apart.tasks) + len(few)) // 20, 8)

    def run_in_batches(function: Callable[[T], R], parts: Sequence[T], before: int) -> list[R]:
        seen: list[R] = []
        for at in range(0, len(parts), step):
            seen += runner.run(function, parts[at : at + step])
            if progress is not None:
                progress(before + len(seen), total)
        return seen

    found += apart.merge_results(run_in_batches(run_check_task, apart.tasks, 0))
    heard = run_in_batches(_check_channels, few, len(apart.tasks))
    found += [finding for each in heard for finding in each.findings]
    return Scrubbed(
        tuple(found),
        apart.topics,
        apart.segments,
        apart.frames,
        apart.bytes + sum(each.bytes for each in heard),
        total,
        channels=sum(each.channels for each in heard),
        messages=sum(each.messages for each in heard),
    )


def _check_channels(part: tuple[str, list[str]]) -> ChannelCheckResult:
    return check_channels(*part)
