"""Verify every checksum of a data directory in parallel.

Of a directory it verifies what `tidelog check` verifies: snapshots, WAL, segments, indexes, footers and deletions of
topics, metadata, messages and cursors of channels. Executors verify segments and channels, the driver the rest.

Of a server or an object store (`run_remote_scrub`) executors read every record that a reader gets, with the checksum of
each frame, and account for each seq. What no reader gets is not verified there: the WAL, footers, channels.

Neither changes anything, and both work beside a writer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Final, NamedTuple, TypeVar

from pyspark.sql.types import BinaryType, StructField, StructType

from tidelog.addresses import Location
from tidelog.channels.store import ChannelCheck, ChannelCheckResult, check_channels
from tidelog.disk.posix import PosixDisk
from tidelog.engine.check import Finding, check_directory, run_check_task
from tidelog.errors import BadInput, Corrupt, Damaged, NotFound
from tidelog.pipelines.spark_tasks import TaskRunner
from tidelog.spark import backends, plan
from tidelog.spark import options as reading
from tidelog.spark.backends.interface import ReadTask
from tidelog.spark.filters import RecordFilter
from tidelog.spark.options import Options
from tidelog.spark.plan import TopicRange
from tidelog.spark.task_reader import TaskReader

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


class _RemoteTask(NamedTuple):
    options: Options
    task: ReadTask


class _RemoteResult(NamedTuple):
    findings: tuple[Finding, ...]
    bytes: int


_DATA: Final = StructType([StructField("data", BinaryType())])


def run_remote_scrub(location: Location, runner: TaskRunner, progress: Progress | None = None) -> Scrubbed:
    """Verify every record of a server or an object store that a reader gets."""
    tasks: list[_RemoteTask] = []
    segments = 0
    every_topic = {**location.as_options(), "subscribePattern": ".*", "onGap": "skip"}
    with closing(backends.open_backend(reading.parse_options(every_topic), retry=False)) as backend:
        names = backend.names()
        for name in names:
            options = reading.parse_options({**location.as_options(), "subscribe": name, "onGap": "skip"})
            snapshot = backend.snapshot(name)
            if snapshot is None:
                continue  # dropped since the listing
            segments += len(snapshot.list_segments(0, snapshot.next_seq).table)
            whole = TopicRange(snapshot, max(snapshot.evict_floor, snapshot.first_seq), snapshot.next_seq)
            planned = plan.plan_tasks(backend, options, [whole], RecordFilter())
            tasks += [_RemoteTask(options, task) for task in planned]
    results: list[_RemoteResult] = []
    step = max(len(tasks) // 20, 8)
    for at in range(0, len(tasks), step):
        results += runner.run(_verify_task, tasks[at : at + step])
        if progress is not None:
            progress(len(results), len(tasks))
    findings = tuple(finding for result in results for finding in result.findings)
    return Scrubbed(findings, len(names), segments, 0, sum(result.bytes for result in results), len(tasks))


def _verify_task(part: _RemoteTask) -> _RemoteResult:
    """Read a task, range by range, with checksums. The first damage of a range ends it; the others are still read."""
    options, task = part
    findings: list[Finding] = []
    size = 0
    with closing(backends.open_backend(options)) as backend:
        for each in task.ranges:
            alone = ReadTask((each,), seq_count=each.seq_count)
            reader = TaskReader(backend, options, _DATA, RecordFilter(), alone)
            try:
                size += sum(batch.nbytes for batch in reader.batches())
            except Damaged as error:
                where, pos = (error.where, error.pos) if isinstance(error, Corrupt) else (each.topic, None)
                seqs = range(getattr(error, "seq", None) or each.first, each.stop)
                findings.append(Finding("data", where, pos, str(error), topic=each.topic, seqs=seqs))
    return _RemoteResult(tuple(findings), size)


def _check_channels(part: tuple[str, list[str]]) -> ChannelCheckResult:
    return check_channels(*part)
