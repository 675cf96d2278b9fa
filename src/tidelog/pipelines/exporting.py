"""[shell] A topic into a table, exactly once: `Export` is one table with its topic, and each `turn` at most one commit.

    1  where the table ends       from its newest commit, and nothing else: there is no state beside the table
    2  how much to take           `sizing`; a wait is an answer too
    3  plan                       one snapshot of the topic; what was lost since stops it, unless it may be skipped
    4  write                      executors, one file each, where no reader sees them
    5  commit                     the driver, all files at once with range, epoch, rows and hash

A process that dies anywhere leaves the table as it was before step 5, or as it is after it; the next turn begins at 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from tidelog.clock import Clock
from tidelog.disk.seam import Disk, join
from tidelog.errors import BadInput, TopicNotFound
from tidelog.pipelines import columns, commits, leftovers, sizing, tables, writing
from tidelog.pipelines.columns import Shape
from tidelog.pipelines.commits import Commit, DataFile
from tidelog.pipelines.footers import Footer
from tidelog.pipelines.runner import Runner
from tidelog.pipelines.sizing import Reason, Sizes
from tidelog.pipelines.tables import NotStaged, Steps, Table
from tidelog.spark import places, plan
from tidelog.spark.options import Options
from tidelog.spark.place import Place, Sight
from tidelog.spark.plan import Range
from tidelog.spark.where import Where

Progress = Callable[[int, int], None]  # seqs that are in the table, of how many
Pause = Callable[[bool], bool]  # whether there was nothing to do → whether it is enough
MakeShape = Callable[[Place], Shape]
_SEQ_MAX: Final = (1 << 63) - 1


class Exported(NamedTuple):
    """What a run did, and where the table is now."""

    topic: str
    epoch: int
    first: int  # of this run
    stop: int  # where the next one begins
    rows: int
    quarantined: int
    bytes: int
    commits: int
    files: int
    smallest: int  # bytes of files of this run
    largest: int
    hash: int


class Turn(NamedTuple):
    reason: Reason
    commit: Commit | None
    head: int  # of the topic, when it was looked at


@dataclass(frozen=True)
class Work:
    """What a turn stands on."""

    runner: Runner
    disk: Disk
    clock: Clock
    step: Steps = tables.nothing


class Export:
    def __init__(
        self, options: Options, table: Table, make_shape: MakeShape, work: Work, sizes: Sizes | None = None
    ) -> None:
        if len(options.subscribe) != 1:
            raise BadInput("an export is of one topic; nothing was written, name it")
        self._topic, self._sizes = options.subscribe[0], sizes or Sizes()
        self._options = replace(options, partitions_min=1, split_bytes=self._sizes.file_bytes)
        self._table, self._make_shape, self._work = table, make_shape, work
        self._place = places.of(options)
        self._made: list[Commit] = []

    def close(self) -> None:
        self._place.close()

    # ── one turn ──────────────────────────────────────────────────────────────────────────────

    def turn(self, *, once: bool, until: int = _SEQ_MAX) -> Turn:
        """At most one commit. `until`: nothing from this seq on."""
        try:
            return self._turn(once=once, until=until)
        except NotStaged:
            # VACUUM by another process may remove files between their writing and their commit. Once, that is.
            if self._table.format != "delta":
                raise
            return self._turn(once=once, until=until)

    def _turn(self, *, once: bool, until: int) -> Turn:
        self._place.refresh()
        plan.topics(self._place, self._options)
        sight = self._place.look(self._topic)
        if sight is None:
            raise TopicNotFound(self._topic)
        last = self._table.last()
        first, shape = self._start(sight, last)
        head = min(sight.next, until)
        if first > sight.next:
            raise BadInput(
                f"{self._table.path} ends at seq {first - 1} and {self._topic} at {sight.next - 1}: these are not the "
                "records it was made from; nothing was written, look which topic and which directory are meant"
            )
        pending = sight.bytes_at(head) - sight.bytes_at(first)
        reason = sizing.decide(
            self._sizes, seqs=head - first, pending_bytes=pending, oldest_ms=self._age(first, head), once=once
        )
        if reason in ("nothing", "wait"):
            return Turn(reason, None, head)
        stop = sizing.until(self._sizes, first, head, sight.bytes_at)
        made = self._commit(sight, shape, first, stop)
        self._made.append(made)
        return Turn(reason, made, head)

    def _start(self, sight: Sight, last: Commit | None) -> tuple[int, Shape]:
        if last is not None:
            commits.check_same(last, self._topic, sight.epoch, self._table.path)
            work = self._work
            leftovers.drop(self._table, last, self._place, self._options, sight, work.disk, work.runner)
            return last.stop, columns.shape_from(last.schema, last.shape)
        stands = self._table.stands(self._topic, sight.epoch)
        if stands is None:
            tables.check_new(self._table)
        return stands if stands is not None else max(sight.floor, sight.first), self._make_shape(self._place)

    def _age(self, first: int, head: int) -> int | None:
        """How old the first pending record is, as far as it matters."""
        if first >= head or not self._place.timed:
            return None
        before_ms = self._work.clock.now_us() // 1000 - self._sizes.age_ms
        return self._sizes.age_ms if self._place.seek(self._topic, max(before_ms + 1, 0)) > first else 0

    def target(self, sight: Sight, shape: Shape) -> writing.Target:
        """Where the files of one commit are staged."""
        work = self._work
        footer = Footer(self._topic, sight.epoch, 0, 0, f"{work.clock.now_us():016x}", shape.schema, shape.told)
        if shape.bad == "quarantine":
            work.disk.make_dir(join(self._table.path, tables.QUARANTINE))
        return writing.Target(self._table.path, self._table.format, shape, footer, work.disk)

    def write(self, sight: Sight, target: writing.Target, ranges: Sequence[tuple[int, int]]) -> list[DataFile]:
        """Steps 3 and 4 for some ranges of the topic."""
        work = self._work
        work.step("plan")
        tasks = []
        for first, stop in ranges:
            splits, at = plan.splits(self._place, self._options, [Range(sight, first, stop)], Where()), first
            for split in splits:
                end = stop if split is splits[-1] else split.stretches[-1].stop
                tasks.append(writing.Task(target, self._options, split, at, end))
                at = end
        work.step("write files")
        return work.runner.run(writing.written, tasks)

    def _commit(self, sight: Sight, shape: Shape, first: int, stop: int) -> Commit:
        """Steps 3 to 5."""
        work = self._work
        ts_ms = work.clock.now_us() // 1000
        files = tuple(self.write(sight, self.target(sight, shape), [(first, stop)]))
        made = Commit(self._topic, sight.epoch, first, stop, files, shape.schema, shape.told, ts_ms=ts_ms)
        work.step("commit")
        self._table.commit(made)
        work.step("committed")
        return made

    # ── runs ──────────────────────────────────────────────────────────────────────────────────

    def once(self, progress: Progress | None = None, *, until: int | None = None) -> Exported:
        """Until the table holds what the topic held when this began."""
        head = until
        while True:
            turn = self.turn(once=True, until=_SEQ_MAX if head is None else head)
            head = turn.head if head is None else head
            if progress is not None and self._made:
                progress(self._made[-1].stop - self._made[0].first, max(head - self._made[0].first, 1))
            if turn.commit is None or turn.commit.stop >= head:
                return self.done()

    def on(self, pause: Pause, progress: Progress | None = None) -> Exported:
        """Until `pause` says that it is enough. It is asked after every turn, and waits where nothing was done."""
        while True:
            turn = self.turn(once=False)
            if progress is not None and self._made:
                progress(self._made[-1].stop - self._made[0].first, max(turn.head - self._made[0].first, 1))
            if pause(turn.commit is None):
                return self.done()

    def done(self) -> Exported:
        made, last = self._made, self._table.last()
        sizes = [file.bytes for commit in made for file in commit.files]
        stop = last.stop if last is not None else 0
        return Exported(
            self._topic,
            last.epoch if last is not None else 0,
            made[0].first if made else stop,
            stop,
            sum(commit.rows for commit in made),
            sum(commit.bad for commit in made),
            sum(sizes),
            len(made),
            len(sizes),
            min(sizes, default=0),
            max(sizes, default=0),
            sum(commit.hash for commit in made) & ((1 << 64) - 1),
        )


def exporting(
    options: Options, table: Table, make_shape: MakeShape, work: Work, sizes: Sizes | None = None
) -> closing[Export]:
    return closing(Export(options, table, make_shape, work, sizes))
