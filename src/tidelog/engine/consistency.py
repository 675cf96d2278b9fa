"""Strong consistency: a reader sees nothing that a power cut could take back.

    append ──► published: acked under its class, seen by eventual readers
                  └──► synced, by the interval or because a strong reader asks ──► seen by strong readers

A topic is strong by its config, for all its readers; a watch session can be strong for itself. A strong read first
makes the published records durable, with one sync for all waiting readers, and delivers up to there. If the disk
refuses, it delivers what was durable before. A record of class `fsync` is durable when it is published.

Copies made by routers are records of their target topic, logged in its shard, and follow the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, TypeAlias

from tidelog.disk.interface import join
from tidelog.engine.config import Durability
from tidelog.engine.context import WAL_DIR, EngineContext
from tidelog.engine.topic_state import TopicState
from tidelog.errors import BadInput, Error, Unavailable
from tidelog.wal import Shard, paths

Consistency: TypeAlias = Literal["eventual", "strong"]


def needs_durable_records(topic: TopicState, strong: bool = False) -> bool:
    """Whether a reader gets durable records only: by its own request or by the topic's config."""
    return strong or topic.config.consistency == "strong"


def check_strong_durability(name: str, durability: Durability) -> None:
    """Raise BadInput for a strong reader of a topic whose class does not survive a power cut."""
    if durability in ("memory", "ephemeral"):
        raise BadInput(
            f"{name} has the class {durability}, which promises nothing after a power cut: strong readers cannot be "
            "served; nothing was read, use the class disk or fsync, or consistency eventual"
        )


def is_durable_to_head(topic: TopicState, strong: bool = False) -> bool:
    """Whether a read needs no sync first."""
    return (
        not needs_durable_records(topic, strong) or topic.durable_seq >= topic.index.head or _is_durable_by_class(topic)
    )


def make_durable(topic: TopicState) -> int:
    """Sync published records and return the last seq that a strong reader may see. Blocks on the disk. Raises BadInput
    where the topic's class rules it out."""
    check_strong_durability(topic.name, topic.config.durability)
    topic.context.strong_topics.add(topic)
    head = topic.index.head
    if topic.durable_seq < head and _is_durable_by_class(topic):
        topic.durable_seq = head
    if topic.durable_seq >= head:
        return topic.durable_seq
    with topic.sync_lock:
        head, context = topic.index.head, topic.context
        if topic.durable_seq < head and (_sync(topic.shard) if context.shards else _sync_files(context)):
            topic.durable_seq = max(topic.durable_seq, head)
    return topic.durable_seq


def heads_before_sync(context: EngineContext) -> list[tuple[TopicState, int]]:
    """Return the heads of topics with strong readers, before an interval sync."""
    for topic in [topic for topic in tuple(context.strong_topics) if topic.is_dropped]:
        context.strong_topics.discard(topic)
    return [(topic, topic.index.head) for topic in tuple(context.strong_topics)]


def on_interval_synced(heads: Sequence[tuple[TopicState, int]]) -> None:
    """Mark what was published before an interval sync as durable, where the shard did not fail."""
    for topic, head in heads:
        if not topic.shard.is_latched:
            topic.durable_seq = max(topic.durable_seq, head)


def require_durable(topic: TopicState, seqs: Sequence[int]) -> None:
    """Make these records durable before they are delivered. Raises where the disk refuses."""
    if seqs and max(seqs) > make_durable(topic):
        raise not_durable_error(topic)


def not_durable_error(topic: TopicState) -> Error:
    """The error for published records that cannot be shown to a strong reader."""
    try:
        if topic.context.shards:
            topic.shard.check_writable()
    except Error as error:
        return error
    return Unavailable(
        f"{topic.name}: records after {topic.durable_seq} could not be made durable, and its readers are strong; "
        "nothing was read, retry later"
    )


def _is_durable_by_class(topic: TopicState) -> bool:
    """Whether every published record is durable because its ack waited for a sync."""
    return topic.is_durable and bool(topic.context.shards)


def _sync(shard: Shard) -> bool:
    with suppress(Error):  # durable records stay readable on a failing disk
        return shard.sync() and not shard.is_latched
    return False


def _sync_files(context: EngineContext) -> bool:
    """Sync the WAL files for a read-only engine beside the writer, so that what it replayed is durable. Once is enough:
    such an engine sees the state at open time."""
    if not context.wal_files_synced:
        wal = join(context.root, WAL_DIR)
        try:
            for key in paths.list_shard_keys(context.disk, wal):
                directory = paths.shard_directory(wal, key)
                for number in paths.list_file_numbers(context.disk, directory):
                    with suppress(FileNotFoundError):  # removed: a checkpoint has its records
                        file = context.disk.open(paths.file_path(directory, number))
                        try:
                            file.sync()
                        finally:
                            file.close()
        except OSError:
            return False
        context.wal_files_synced = True
    return True
