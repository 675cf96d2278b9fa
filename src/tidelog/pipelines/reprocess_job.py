"""Dead letters: records in quarantine, which did not fit the schema of a typed table, and a second try for them.

    range of a file      [first, stop)  schema A: rows, and records in `_quarantine/`
    reprocess            [first, stop)  schema B: the range is read from the log once more, with the newest schema

A range is replaced as a whole, by a commit of the table like that of a repair, so every record stays a row or in
quarantine. The commit says that the range has the newest schema now (`Commit.eras`). A range whose records are not all
in the log any more stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

from tidelog.errors import BadInput, TopicNotFound
from tidelog.pipelines import record_mapping
from tidelog.pipelines.export_job import ExportJob, JobContext
from tidelog.pipelines.record_mapping import RecordMapping
from tidelog.pipelines.table_formats import interface
from tidelog.pipelines.table_formats.interface import Commit, DataFile, Era, Table, group_overlapping
from tidelog.spark import backends, plan
from tidelog.spark.options import Options


class Reprocessed(NamedTuple):
    """What became of the records in quarantine."""

    topic: str
    table: str
    before: int  # records in quarantine
    fitted: int  # of them rows now
    left: int  # in quarantine still
    skipped: int  # of them in ranges whose records are not all in the log any more: these stay as they are
    ranges: int  # that were replaced


def reprocess_table(
    options: Options, table: Table, context: JobContext, wanted: RecordMapping | None = None
) -> Reprocessed:
    """Try records in quarantine again, with the newest schema, or with `wanted`, which may add columns to it."""
    (topic,) = options.subscribe
    with closing(backends.open_backend(options)) as backend:
        plan.resolve_topics(backend, options)
        snapshot = backend.snapshot(topic)
        if snapshot is None:
            raise TopicNotFound(topic)
        last = table.last_commit()
        if last is None:
            raise BadInput(f"{table.path} has no commit of an export; nothing was done, export it first")
        interface.check_same_topic(last, topic, snapshot.epoch, table.path)
        mapping = record_mapping.mapping_from_commit(last.schema, last.shape)
        if mapping.latest_key is not None:
            raise BadInput(f"{table.path} has the newest row of each key and no quarantine; nothing was done")
        if wanted is not None:
            mapping = record_mapping.evolve(mapping, wanted, table.path)
        eras = interface.extend_eras(last, last.stop, mapping.schema, mapping.options_json) or interface.eras_of(last)
        if table.format == "delta" and table.scan() is not None:
            raise BadInput(
                f"{table.path} has deletion vectors, mapped column names, or partitions that are not in paths; nothing "
                "was done, have its own engine rewrite it without them"
            )
        files = table.own_files()
        before = sum(file.bad for file in files)
        groups = _groups_to_try(files, eras)
        there = [group for group in groups if group[0].first >= snapshot.evict_floor]
        ranges = [(min(file.first for file in group), max(file.stop for file in group)) for group in there]
        with closing(ExportJob(replace(options, on_gap="fail"), table, lambda _: mapping, context)) as job:
            written = job.write_files(snapshot, job.commit_target(snapshot, mapping), ranges) if ranges else []
        made = [[file for file in written if first <= file.first < stop] for first, stop in ranges]
        kept = [at for at in range(len(there)) if _count_records(made[at]) == _count_records(there[at])]
        for at in set(range(len(there))) - set(kept):
            for file in made[at]:
                _remove_staged(table, file)
        tried = sum(file.bad for at in kept for file in there[at])
        skipped = sum(file.bad for group in groups for file in group) - tried
        if not kept:
            return Reprocessed(topic, table.path, before, 0, before, skipped, 0)
        replaced = tuple(ranges[at] for at in kept)
        commit = Commit(
            topic,
            snapshot.epoch,
            replaced[0][0],
            last.stop,
            tuple(file for at in kept for file in made[at]),
            mapping.schema,
            mapping.options_json,
            removed=tuple(file.name for at in kept for file in there[at]),
            repair=True,
            table_first=last.table_first,
            ts_ms=context.clock.now_us() // 1000,
            replaced=replaced if table.format == "iceberg" else (),
            eras=replace_eras(eras, replaced),
        )
        context.on_step("commit")
        table.commit(commit)
        context.on_step("committed")
    left = before - tried + commit.bad
    return Reprocessed(topic, table.path, before, before - left, left, skipped, len(kept))


def _count_records(files: Sequence[DataFile]) -> int:
    return sum(file.rows + file.bad for file in files)


def _remove_staged(table: Table, file: DataFile) -> None:
    for name in (file.name, file.bad_name):
        if name is not None:
            table.disk.remove(table.staged_path(name))


def _groups_to_try(files: Sequence[DataFile], eras: Sequence[Era]) -> list[list[DataFile]]:
    """Return the files of ranges that have records in quarantine and an older schema than the newest."""
    newest = eras[-1]
    found = []
    for group in group_overlapping(files, lambda file: (file.first, file.stop, file.name)):
        era = interface.era_at(eras, group[0].first)
        if any(file.bad for file in group) and (era.schema, era.shape) != (newest.schema, newest.shape):
            found.append(group)
    return found


def replace_eras(eras: Sequence[Era], ranges: Sequence[tuple[int, int]]) -> tuple[Era, ...]:
    """Return the schemas by seq after the ranges got the newest one."""
    newest = eras[-1]
    cuts = sorted({era.first for era in eras} | {seq for bounds in ranges for seq in bounds})
    made: list[Era] = []
    for cut in cuts:
        inside = any(first <= cut < stop for first, stop in ranges)
        era = newest if inside else interface.era_at(eras, cut)
        if not made or (made[-1].schema, made[-1].shape) != (era.schema, era.shape):
            made.append(Era(cut, era.schema, era.shape))
    return tuple(made)
