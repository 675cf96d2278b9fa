"""Verify every checksum of a data directory in parallel.

It verifies what `tidelog check` verifies: snapshots, WAL, segments, indexes, footers and deletions of topics, metadata,
messages and cursors of channels. Executors verify segments and channels, the driver the rest. It changes nothing and
works beside a writer.
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
_CHANNELS_PER_TASK: Final = 12


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
    """Verify a directory. Findings have the order of `tidelog check`, those of executors last."""
    stat = PosixDisk().stat(path)
    if stat is None:
        raise NotFound(f"there is nothing at {path}; nothing was done, check the path")
    if not stat.is_dir:
        raise BadInput(f"{path} is a file, topics are stored in a directory; nothing was done, check the path")
    check, channels = check_directory(path), ChannelCheck(path)
    findings, live = list(check.begin()), channels.live_directories()
    findings += channels.find_leftovers(live)
    parts = [(path, live[at : at + _CHANNELS_PER_TASK]) for at in range(0, len(live), _CHANNELS_PER_TASK)]
    total = len(check.tasks) + len(parts)
    step = max(total // 20, 8)

    def run_in_batches(function: Callable[[T], R], parts: Sequence[T], before: int) -> list[R]:
        results: list[R] = []
        for at in range(0, len(parts), step):
            results += runner.run(function, parts[at : at + step])
            if progress is not None:
                progress(before + len(results), total)
        return results

    findings += check.merge_results(run_in_batches(run_check_task, check.tasks, 0))
    checked = run_in_batches(_check_channels, parts, len(check.tasks))
    findings += [finding for result in checked for finding in result.findings]
    return Scrubbed(
        tuple(findings),
        check.topics,
        check.segments,
        check.frames,
        check.bytes + sum(result.bytes for result in checked),
        total,
        channels=sum(result.channels for result in checked),
        messages=sum(result.messages for result in checked),
    )


def _check_channels(part: tuple[str, list[str]]) -> ChannelCheckResult:
    return check_channels(*part)
