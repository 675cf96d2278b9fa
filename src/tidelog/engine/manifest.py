"""The metadata snapshot of an engine: what it says is what there is.

    meta/snapshot.0007.bin      the newest; files it does not name are swept, bytes behind the lengths it names are cut
    meta/snapshot.0006.bin      the one before, for a newest that does not read; nothing it needs is removed yet

It holds no record. Records lie in the segments it names and in the WAL from the positions it names
on. Rows are arrays, not maps: a later version adds fields behind the last one.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import msgspec

from tidelog.disk.durability import read_file, remove_if_exists, replace_file
from tidelog.disk.interface import Disk, join
from tidelog.errors import Corrupt, Damaged, NewerFormat
from tidelog.formats import file_header

MANIFEST_DIR: Final = "meta"
_NAME = re.compile(r"snapshot\.(\d{4,20})\.bin")
_TEMPORARY = re.compile(r"snapshot\.\d{4,20}\.bin\.tmp")
_MANIFESTS_KEPT: Final = 2


class SegmentRow(msgspec.Struct, array_like=True, frozen=True):
    """One segment's files. An unsealed one is the last of its topic."""

    base: int
    stop: int
    size: int  # bytes of `.data`; what lies behind them belongs to a checkpoint that was not finished
    live: int  # records that are not deleted, floors not looked at
    live_bytes: int
    first_ts: int
    last_ts: int
    sealed: bool
    unproven: bool = False  # sealed without a footer, because not all of its frames verified


class LeaseRow(msgspec.Struct, array_like=True, frozen=True):
    seq: int
    lease_id: int
    deadline_ms: int
    node: str


class QueueRow(msgspec.Struct, array_like=True, frozen=True):
    """What a queue knows beside its jobs. Leases and counts are here where they are durable."""

    lease_id: int  # ids up to here may have been handed out
    dead_lettered: int
    leases: tuple[LeaseRow, ...] = ()
    deliveries: tuple[tuple[int, int], ...] = ()  # seq, how often it was handed out
    delayed: tuple[tuple[int, int], ...] = ()  # seq, not before this time


class ConsumerRow(msgspec.Struct, array_like=True, frozen=True):
    """A group of consumers and where it stands."""

    group: str
    seq: int
    ts_ms: int  # of its last commit
    hold_bytes: int


class WriterRow(msgspec.Struct, array_like=True, frozen=True):
    """The last batches of a writer that numbers them: number, first seq, last seq, and the two words of its sum."""

    writer: str
    batches: tuple[tuple[int, int, int, int, int], ...]
    query_id: str = ""  # of the query that wrote the newest of them


class FedRow(msgspec.Struct, array_like=True, frozen=True):
    """How far the source of a topic that routers feed was passed on, as of the row's head."""

    source_id: int
    cursor: int
    copying: bool = True  # of manifests that were written while copies were in no WAL; always true now


class RouterRow(msgspec.Struct, array_like=True, frozen=True):
    name: str
    source_id: int
    dest_id: int
    preserve_node: bool
    preserve_tag: bool
    allow_cycle: bool
    exactly_once: bool
    match: tuple[int, str] | None
    start: int  # it passes on what lies behind this seq of the source
    dest_base: int  # the dest's head when it was made
    forwarded: int  # as of the dest row's head


class TopicRow(msgspec.Struct, array_like=True, frozen=True):
    id: int
    name: str
    config: bytes
    head: int
    reserved: int  # seqs up to here may have been handed out
    earliest: int
    cap_mark: int
    ttl_mark: int
    last_ts: int
    segments: tuple[SegmentRow, ...]
    ghosts: tuple[tuple[int, int], ...] = ()  # seqs [lo, hi) whose records were deleted and lie in no segment any more
    source_mark: int = 0  # holes up to here stand for records that were lost at the source
    queue: QueueRow | None = None
    consumers: tuple[ConsumerRow, ...] = ()
    fed: FedRow | None = None
    hops: tuple[tuple[int, int, int], ...] = ()  # seqs [lo, hi) came over so many routers
    guarded: bool = False  # a group of it has had a hold
    removals: int = 0  # deletes up to this number have rows in the ledger
    writers: tuple[WriterRow, ...] = ()
    wired: int = 0  # router frames of the topic up to this number are part of the row
    trims: tuple[tuple[int, int], ...] = ()  # seqs [lo, hi) that stand for records which a router's source lost
    keys: tuple[tuple[str, int, int, int], ...] = ()  # idempotency key, first seq, last seq, when it was acked in ms


class GroupRow(msgspec.Struct, array_like=True, frozen=True):
    """Replay of a WAL group begins here."""

    key: str
    first: int
    pos: int


class Manifest(msgspec.Struct, array_like=True, frozen=True):
    topics: tuple[TopicRow, ...] = ()  # ids rising
    groups: tuple[GroupRow, ...] = ()
    next_topic_id: int = 1
    routers: tuple[RouterRow, ...] = ()  # of one dest in the order in which they were made
    lagging: tuple[int, ...] = ()  # topics that could not be written: their rows are those of the manifest before
    fresh: tuple[GroupRow, ...] = ()  # where replay of all other topics begins, where that is not `groups`


class LoadedManifest(NamedTuple):
    number: int  # 0: there is none
    manifest: Manifest
    before: Manifest | None  # the one behind it, where that reads too
    skipped: list[str]  # files that are there and do not read, with the reason


def manifest_path(root: str, number: int) -> str:
    return join(join(root, MANIFEST_DIR), f"snapshot.{number:04d}.bin")


def list_manifest_numbers(disk: Disk, root: str) -> list[int]:
    """The snapshots of a directory, newest first."""
    try:
        names = disk.list_dir(join(root, MANIFEST_DIR))
    except FileNotFoundError:
        return []
    return sorted((int(found[1]) for name in names if (found := _NAME.fullmatch(name))), reverse=True)


def load_newest(disk: Disk, root: str) -> LoadedManifest:
    """The newest snapshot that reads. A newer format is refused, not skipped: an older state is not what is wanted."""
    good: list[tuple[int, Manifest]] = []
    skipped: list[str] = []
    for number in list_manifest_numbers(disk, root):
        name = f"{MANIFEST_DIR}/snapshot.{number:04d}.bin"
        try:
            content = read_file(disk, manifest_path(root, number))
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error}; nothing was changed, mend the disk and retry") from error
        if content is None:
            continue  # pruned while we looked
        try:
            good.append((number, file_header.decode_snapshot(Manifest, content, name)))
        except NewerFormat:
            raise
        except Corrupt as error:
            skipped.append(str(error))
    if not good:
        return LoadedManifest(0, Manifest(), None, skipped)
    return LoadedManifest(*good[0], good[1][1] if len(good) > 1 else None, skipped)


def load_number(disk: Disk, root: str, number: int) -> Manifest:
    """The snapshot of this number. Raises where it does not read."""
    name = f"{MANIFEST_DIR}/snapshot.{number:04d}.bin"
    content = read_file(disk, manifest_path(root, number))
    if content is None:
        raise Corrupt(name, pos=0, reason="the file is missing")
    return file_header.decode_snapshot(Manifest, content, name)


def save(disk: Disk, root: str, number: int, manifest: Manifest) -> None:
    """Make this the newest snapshot; it survives a power cut on return."""
    replace_file(disk, manifest_path(root, number), file_header.encode_snapshot(manifest))


def prune(disk: Disk, root: str) -> None:
    """Remove all but the two newest, and what interrupted saves left behind."""
    directory = join(root, MANIFEST_DIR)
    stale = [manifest_path(root, number) for number in list_manifest_numbers(disk, root)[_MANIFESTS_KEPT:]]
    stale += [join(directory, name) for name in disk.list_dir(directory) if _TEMPORARY.fullmatch(name)]
    if sum(remove_if_exists(disk, path) for path in stale):
        disk.sync_dir(directory)
