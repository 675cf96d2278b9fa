"""[shell] Strong consistency: a reader is shown nothing that a power cut could take back.

    append ──► published: acked under its class, seen by eventual readers
                  └──► synced, by the interval or because a strong reader asks ──► seen by strong readers

A topic is strong by its config, for all its readers; a watch session can be strong for itself. A strong read makes what
is published durable first, with one sync for all that wait, and delivers up to there. Where the disk refuses, it
delivers what was durable before. A record of class `fsync` is durable when it is published, so nothing changes there.

Copies that routers make are records of their target, logged in its shard: they are shown as its own records are.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, TypeAlias

from tidelog.disk.interface import join
from tidelog.engine.config import Durability
from tidelog.engine.topic_state import WAL_DIR, EngineContext, TopicState
from tidelog.errors import BadInput, Error, Unavailable
from tidelog.wal import Shard, paths

Consistency: TypeAlias = Literal["eventual", "strong"]


def needs_durable_records(topic: TopicState, strong: bool = False) -> bool:
    """Whether a reader of this topic is to be shown durable records alone: it asks for that, or the topic does."""
    return strong or topic.config.consistency == "strong"


def check_strong_durability(name: str, durability: Durability) -> None:
    """Refuse a strong reader of a topic whose class promises nothing about a power cut."""
    if durability in ("memory", "ephemeral"):
        raise BadInput(
            f"{name} has the class {durability}, which promises nothing after a power cut: strong readers cannot be "
            "served; nothing was read, use the class disk or fsync, or consistency eventual"
        )


def is_durable_to_head(topic: TopicState, strong: bool = False) -> bool:
    """Whether a reader does not have to wait for a sync."""
    return (
        not needs_durable_records(topic, strong) or topic.durable_seq >= topic.index.head or _is_durable_by_class(topic)
    )


def make_durable(topic: TopicState) -> int:
    """Make what is published survive a power cut; return the last seq that a strong reader may be shown. Waits for the
    disk. Raises BadInput where the topic's class rules it out."""
    check_strong_durability(topic.name, topic.config.durability)
    topic.context.strong_topics.add(topic)
    head = topic.index.head
    if topic.durable_seq < head and _is_durable_by_class(topic):
        topic.durable_seq = head
    if topic.durable_seq >= head:
        return topic.durable_seq
    with topic.sync_lock:
        head, shared = topic.index.head, topic.context
        if topic.durable_seq < head and (_sync(topic.shard) if shared.shards else _sync_files(shared)):
            topic.durable_seq = max(topic.durable_seq, head)
    return topic.durable_seq


def heads_before_sync(context: EngineContext) -> list[tuple[TopicState, int]]:
    """The heads of topics with strong readers before an interval sync."""
    for core in [core for core in tuple(context.strong_topics) if core.is_dropped]:
        context.strong_topics.discard(core)
    return [(core, core.index.head) for core in tuple(context.strong_topics)]


def on_interval_synced(heads: Sequence[tuple[TopicState, int]]) -> None:
    """What was published before an interval sync is durable behind it, where no shard refused."""
    for core, head in heads:
        if not core.shard.is_latched:
            core.durable_seq = max(core.durable_seq, head)


def require_durable(topic: TopicState, seqs: Sequence[int]) -> None:
    """Make these records durable before they are handed out. Raises where the disk refuses."""
    if seqs and max(seqs) > make_durable(topic):
        raise not_durable_error(topic)


def not_durable_error(topic: TopicState) -> Error:
    """Why records that are published cannot be shown to a strong reader."""
    try:
        if topic.context.shards:
            topic.shard.check_writable()
    except Error as error:
        return error
    return Unavailable(
        f"{topic.name}: records after {topic.durable_seq} could not be made durable, and its readers are strong; "
        f"nothing was "
        "read, retry later"
    )


def _is_durable_by_class(topic: TopicState) -> bool:
    """Whether what is published is durable: each record waited for its sync."""
    return topic.is_durable and bool(topic.context.shards)


def _sync(shard: Shard) -> bool:
    with suppress(Error):  # a failing disk keeps nobody from reading what is durable
        return shard.sync() and not shard.is_latched
    return False


def _sync_files(context: EngineContext) -> bool:
    """Sync the files of the WAL for a reader beside the writer: what it has replayed is durable then. Once is enough,
    since such a reader sees what was there when it was opened."""
    if not context.wal_files_synced:
        wal = join(context.root, WAL_DIR)
        try:
            for key in paths.list_shard_keys(context.disk, wal):
                directory = paths.shard_directory(wal, key)
                for first in paths.list_file_numbers(context.disk, directory):
                    with suppress(FileNotFoundError):  # a checkpoint has what was in it
                        file = context.disk.open(paths.file_path(directory, first))
                        try:
                            file.sync()
                        finally:
                            file.close()
        except OSError:
            return False
        context.wal_files_synced = True
    return True
