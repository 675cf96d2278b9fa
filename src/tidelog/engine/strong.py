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

from tidelog.disk.seam import join
from tidelog.engine.config import Durability
from tidelog.engine.core import WAL, Core, Shared
from tidelog.errors import BadInput, Error, Unavailable
from tidelog.wal import Shard, names

Consistency: TypeAlias = Literal["eventual", "strong"]


def is_wanted(core: Core, strong: bool = False) -> bool:
    """Whether a reader of this topic is to be shown durable records alone: it asks for that, or the topic does."""
    return strong or core.config.consistency == "strong"


def check_class(name: str, durability: Durability) -> None:
    """Refuse a strong reader of a topic whose class promises nothing about a power cut."""
    if durability in ("memory", "ephemeral"):
        raise BadInput(
            f"{name} has the class {durability}, which promises nothing after a power cut: strong readers cannot be "
            "served; nothing was read, use the class disk or fsync, or consistency eventual"
        )


def is_settled(core: Core, strong: bool = False) -> bool:
    """Whether a reader does not have to wait for a sync."""
    return not is_wanted(core, strong) or core.synced >= core.index.head or _is_plain(core)


def settle(core: Core) -> int:
    """Make what is published survive a power cut; return the last seq that a strong reader may be shown. Waits for the
    disk. Raises BadInput where the topic's class rules it out."""
    check_class(core.name, core.config.durability)
    core.shared.strong.add(core)
    head = core.index.head
    if core.synced < head and _is_plain(core):
        core.synced = head
    if core.synced >= head:
        return core.synced
    with core.settling:
        head, shared = core.index.head, core.shared
        if core.synced < head and (_sync(core.shard) if shared.shards else _sync_files(shared)):
            core.synced = max(core.synced, head)
    return core.synced


def before_interval(shared: Shared) -> list[tuple[Core, int]]:
    """The heads of topics with strong readers before an interval sync."""
    for core in [core for core in tuple(shared.strong) if core.dropped]:
        shared.strong.discard(core)
    return [(core, core.index.head) for core in tuple(shared.strong)]


def after_interval(heads: Sequence[tuple[Core, int]]) -> None:
    """What was published before an interval sync is durable behind it, where no shard refused."""
    for core, head in heads:
        if not core.shard.latched:
            core.synced = max(core.synced, head)


def require(core: Core, seqs: Sequence[int]) -> None:
    """Make these records durable before they are handed out. Raises where the disk refuses."""
    if seqs and max(seqs) > settle(core):
        raise refused(core)


def refused(core: Core) -> Error:
    """Why records that are published cannot be shown to a strong reader."""
    try:
        if core.shared.shards:
            core.shard.check()
    except Error as error:
        return error
    return Unavailable(
        f"{core.name}: records after {core.synced} could not be made durable, and its readers are strong; nothing was "
        "read, retry later"
    )


def _is_plain(core: Core) -> bool:
    """Whether what is published is durable: each record waited for its sync."""
    return core.durable and bool(core.shared.shards)


def _sync(shard: Shard) -> bool:
    with suppress(Error):  # a failing disk keeps nobody from reading what is durable
        return shard.sync() and not shard.latched
    return False


def _sync_files(shared: Shared) -> bool:
    """Sync the files of the WAL for a reader beside the writer: what it has replayed is durable then. Once is enough,
    since such a reader sees what was there when it was opened."""
    if not shared.files_synced:
        wal = join(shared.root, WAL)
        try:
            for key in names.groups(shared.disk, wal):
                directory = names.directory(wal, key)
                for first in names.files(shared.disk, directory):
                    with suppress(FileNotFoundError):  # a checkpoint has what was in it
                        file = shared.disk.open(names.path_of(directory, first))
                        try:
                            file.sync()
                        finally:
                            file.close()
        except OSError:
            return False
        shared.files_synced = True
    return True
