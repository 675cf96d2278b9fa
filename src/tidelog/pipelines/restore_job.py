"""Restore a backup, at a point in time, from a directory or a bucket: into a new directory, or one topic of it into a
topic that is there.

Into a directory it is `tidelog.backup.restore`. Into a topic, the backup is first restored into the working directory;
then a backfill writes the records into the topic, as new records with new seqs, each once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tidelog.disk.durability import read_file, remove_tree, replace_file
from tidelog.disk.interface import join
from tidelog.disk.posix import PosixDisk
from tidelog.engine.restore import restore_backup
from tidelog.errors import BadInput, TopicNotFound
from tidelog.pipelines.backfill_job import Backfilled


class Restored(NamedTuple):
    """The result of a restore."""

    backup: str  # the id
    directory: str | None  # of a restore into a directory
    topics: dict[str, int]  # the last seq of each topic of the restored directory
    cut: dict[str, int]  # topics that are shorter than in the backup, and how many seqs they lost
    dropped: tuple[str, ...]  # topics that were created after the time
    notes: tuple[str, ...]
    backfilled: Backfilled | None  # of a restore into a topic


class _Mark(msgspec.Struct):
    """What is in the working directory, written once it is whole."""

    wanted: str  # the arguments
    restored: Restored


def restore_directory(
    target: str, directory: str, backup_id: str | None, to_seq: Mapping[str, int] | None, to_time_ms: int | None
) -> Restored:
    done = restore_backup(target, directory, backup_id=backup_id, to_seq=to_seq, to_time_ms=to_time_ms)
    return Restored(done.id, done.path, done.topics, done.cut, tuple(done.dropped), tuple(done.notes), None)


def restore_for_backfill(
    target: str, work_dir: str, backup_id: str | None, to_seq: Mapping[str, int] | None, to_time_ms: int | None
) -> tuple[Restored, str]:
    """Restore into the working directory, or return what an earlier run of the same job restored there whole: another
    restore of the same backup would have other epochs, and so be another source."""
    disk = PosixDisk()
    disk.make_dir(work_dir)
    directory, mark = join(work_dir, "data"), join(work_dir, "restored.json")
    wanted = msgspec.json.encode([target, backup_id, dict(to_seq or {}), to_time_ms])
    content = read_file(disk, mark)
    if content is not None:
        found = msgspec.json.decode(content, type=_Mark)
        if found.wanted != wanted.decode():
            raise BadInput(
                f"{work_dir} has another restore under the name of this job; nothing was done, name another job, or "
                "remove the directory"
            )
        return found.restored, directory
    remove_tree(disk, directory)
    restored = restore_directory(target, directory, backup_id, to_seq, to_time_ms)
    replace_file(disk, mark, msgspec.json.encode(_Mark(wanted.decode(), restored)))
    return restored, directory


def check_topic_restored(restored: Restored, topic: str) -> None:
    if topic not in restored.topics:
        error = TopicNotFound(topic)
        error.args = (
            f"backup {restored.backup} has no topic {topic!r} at that time; nothing was written, its topics are "
            f"{', '.join(sorted(restored.topics)) or 'none'}",
        )
        raise error


def check_local_session(spark: SparkSession) -> None:
    """Raise BadInput unless executors see the directory that the driver restores into."""
    try:
        master = spark.conf.get("spark.master") or ""
    except PySparkException:
        master = ""
    if not master.startswith("local"):
        raise BadInput(
            "a restore into a topic restores a directory on the driver first, which executors of "
            f"{master or 'a server'} do not see; nothing was done, run it with --master local[*]"
        )
