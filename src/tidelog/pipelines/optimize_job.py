"""Table maintenance: join small files, and remove files that no version needs.

    optimize    neighbouring files of exports whose bytes together fit one file become one file a partition, on
                executors. Range, rows and hash of the new files are the sums of the old ones, so a comparison goes on
                as before; the sums are verified before the commit. A Delta commit says that no data changed.
    vacuum      files that no version of the retention period names, with deltalake; staged files of killed exports

An upsert table, whose files a MERGE wrote, is optimized by deltalake, in the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from tidelog.disk.bucket_disk import BucketDisk
from tidelog.disk.interface import join
from tidelog.errors import BadInput, Damaged
from tidelog.pipelines import record_mapping, row_hash
from tidelog.pipelines.export_job import CommitTarget, JobContext, RangeFiles, attempt_id
from tidelog.pipelines.table_formats import Place, delta, interface, parquet
from tidelog.pipelines.table_formats.interface import Commit, DataFile, Table, TableChanged, group_overlapping
from tidelog.pipelines.table_formats.parquet import FileFooter
from tidelog.pipelines.upsert_job import remove_staged

_COMMIT_FILES: Final = 32  # ranges that one commit joins
_ATTEMPTS: Final = 5  # while other programs write the table
RETENTION_HOURS: Final = 168
_HOUR_MS: Final = 3_600_000


class Optimized(NamedTuple):
    """What an optimization did to a table."""

    table: str
    format: interface.Format
    commits: int
    removed: int  # files
    added: int
    bytes: int  # of the added ones


class Vacuumed(NamedTuple):
    """What a vacuum removed from a table, or would remove."""

    table: str
    format: interface.Format
    retention_hours: int
    removed: tuple[str, ...]
    is_dry_run: bool


@dataclass(frozen=True)
class JoinTask:
    """Join the files of neighbouring ranges."""

    target: CommitTarget
    files: tuple[DataFile, ...]

    @property
    def first(self) -> int:
        return min(file.first for file in self.files)

    @property
    def stop(self) -> int:
        return max(file.stop for file in self.files)


def join_files(task: JoinTask) -> list[DataFile]:
    """Runs on an executor."""
    target = task.target
    name = interface.data_file_name(task.first, task.stop, target.footer.run, attempt_id())
    bad_names = [file.bad_name for file in task.files if file.bad_name is not None]
    with RangeFiles(target, name) as files:
        for batch in parquet.read_batches(target.disk, target.path, [file.name for file in task.files], None, None):
            files.add(parquet.conform(batch, target.mapping.arrow))
        for batch in parquet.read_batches(target.disk, target.path, bad_names, None, None):
            files.quarantine_file.add(batch.cast(record_mapping.QUARANTINE_SCHEMA))
        made = files.close(task.first, task.stop)
        before, after = (_sums(each) for each in (task.files, made))
        if before != after:
            raise Damaged(
                f"{target.path}: files of seqs {task.first} to {task.stop - 1} have {after[0]} rows and {after[1]} in "
                f"quarantine, or other ones than were committed ({before[0]} and {before[1]}); nothing was committed, "
                "run reconcile on the table"
            )
    return made


def _sums(files: Sequence[DataFile]) -> tuple[int, int, int]:
    return (
        sum(file.rows for file in files),
        sum(file.bad for file in files),
        sum(file.hash for file in files) & row_hash.MASK_64,
    )


def choose_files(files: Sequence[DataFile], target_bytes: int) -> list[tuple[DataFile, ...]]:
    """Return groups of files to join: consecutive ranges of at most `target_bytes` together. Files that a repair wrote
    beside rows of other programs stay."""
    found: list[tuple[DataFile, ...]] = []
    run: list[DataFile] = []
    ranges = 0

    def end_run() -> None:
        if ranges > 1 or len(run) > len({_folder(file) for file in run}):
            found.append(tuple(run))

    for group in group_overlapping(files, lambda file: (file.first, file.stop, file.name)):
        size = sum(file.bytes for file in group)
        fits = all(file.held is None for file in group) and size <= target_bytes
        if run and (not fits or sum(file.bytes for file in run) + size > target_bytes):
            end_run()
            run, ranges = [], 0
        if fits:
            run, ranges = [*run, *group], ranges + 1
    end_run()
    return found


def _folder(file: DataFile) -> str:
    return file.name.rpartition("/")[0]


def optimize_table(table: Table, context: JobContext, target_bytes: int) -> Optimized:
    last = table.last_commit()
    if last is None:
        raise BadInput(f"{table.path} has no commit of an export; nothing was done, export it first")
    if table.format == "iceberg":
        raise BadInput(
            f"{table.path} is an Iceberg table, which pyiceberg does not optimize; nothing was done, use an engine "
            "that does (Spark: CALL system.rewrite_data_files)"
        )
    mapping = record_mapping.mapping_from_commit(last.schema, last.shape)
    if mapping.latest_key is not None:
        return _optimize_with_deltalake(table, target_bytes)
    if table.scan() is not None:
        raise BadInput(
            f"{table.path} has deletion vectors, mapped column names, or partitions that are not in paths; nothing was "
            "done, optimize it with the engine that wrote them"
        )
    done = Optimized(table.path, table.format, 0, 0, 0, 0)
    attempts = _ATTEMPTS
    while True:
        eras = interface.eras_of(last)
        files = table.own_files()
        by_era = [[file for file in files if interface.era_at(eras, file.first) is era] for era in eras]
        groups = [group for each in by_era for group in choose_files(each, target_bytes)][:_COMMIT_FILES]
        if not groups:
            return done
        try:
            commit = _join(table, context, last, groups)
        except TableChanged:
            attempts -= 1
            if not attempts:
                raise
            last = table.last_commit() or last
            continue
        last = commit
        done = done._replace(
            commits=done.commits + 1,
            removed=done.removed + len(commit.removed),
            added=done.added + len(commit.files),
            bytes=done.bytes + commit.bytes,
        )


def _join(table: Table, context: JobContext, last: Commit, groups: Sequence[tuple[DataFile, ...]]) -> Commit:
    run = f"{context.clock.now_us():016x}"

    def target_of(first: int) -> CommitTarget:
        era = interface.era_at(interface.eras_of(last), first)
        mapping = record_mapping.mapping_from_commit(era.schema, era.shape)
        footer = FileFooter(last.topic, last.epoch, 0, 0, run, era.schema, era.shape, transform=last.transform)
        return CommitTarget(table.path, table.format, mapping, footer, table.disk)

    context.on_step("write files")
    files = context.runner.run(join_files, [JoinTask(target_of(group[0].first), group) for group in groups])
    commit = Commit(
        last.topic,
        last.epoch,
        groups[0][0].first,
        last.stop,
        tuple(file for each in files for file in each),
        last.schema,
        last.shape,
        removed=tuple(file.name for group in groups for file in group),
        repair=True,
        transform=last.transform,
        table_first=last.table_first,
        ts_ms=context.clock.now_us() // 1000,
        same_rows=True,
        eras=last.eras,
    )
    context.on_step("commit")
    table.commit(commit)
    context.on_step("committed")
    return commit


def _optimize_with_deltalake(table: Table, target_bytes: int) -> Optimized:
    before = set(table.visible_files())
    delta.compact_files(table.disk, table.path, target_bytes)
    table.last_commit()  # loads the newest version
    after = set(table.visible_files())
    sizes = [stat.size for name in after - before if (stat := table.disk.stat(join(table.path, name))) is not None]
    return Optimized(
        table.path, table.format, int(before != after), len(before - after), len(after - before), sum(sizes)
    )


def vacuum_table(
    place: Place, table: Table, now_ms: int, retention_hours: int, *, force: bool, dry_run: bool
) -> Vacuumed:
    if retention_hours < RETENTION_HOURS and not force:
        raise BadInput(
            f"a retention of {retention_hours} hours is less than {RETENTION_HOURS}: readers of older versions and "
            "exports that are at work may lose their files; nothing was removed, stop them and force it"
        )
    if table.format == "iceberg":
        raise BadInput(
            f"{table.path} is an Iceberg table, of which pyiceberg removes no files; nothing was done, use an engine "
            "that does (Spark: CALL system.expire_snapshots, system.remove_orphan_files)"
        )
    if table.format == "delta":
        removed = delta.vacuum(place.disk, place.path, retention_hours, dry_run=dry_run)
        if not dry_run and not isinstance(place.disk, BucketDisk):
            remove_staged(place.disk, place.path)
    else:
        before_ms = now_ms - retention_hours * _HOUR_MS
        removed = parquet.remove_old_staged(place.disk, place.path, before_ms, dry_run=dry_run)
    return Vacuumed(place.path, table.format, retention_hours, tuple(removed), dry_run)
