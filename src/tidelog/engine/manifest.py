"""The metadata snapshot (manifest) of an engine.

    meta/snapshot.0007.bin   the newest; files it does not name are removed, bytes beyond the lengths it names truncated
    meta/snapshot.0006.bin   the one before, in case the newest does not read; nothing it needs is removed yet

It holds no record. Records are in the segments it names and in the WAL from the positions it names on. Rows are
arrays, not maps: a later version appends fields.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import msgspec

from tidelog.disk.durability import read_file, remove_if_exists, replace_file
from tidelog.disk.interface import Disk, join
from tidelog.errors import Corrupt, Damaged, NewerFormat
from tidelog.formats import small_files

MANIFEST_DIR: Final = "meta"
_NAME = re.compile(r"snapshot\.(\d{4,20})\.bin")
_TEMPORARY = re.compile(r"snapshot\.\d{4,20}\.bin\.tmp")
_MANIFESTS_KEPT: Final = 2


class SegmentRow(msgspec.Struct, array_like=True, frozen=True):
    """One segment's files. An unsealed one is the last of its topic."""

    base: int
    stop: int
    size: int  # bytes of `.data`; bytes after them belong to an unfinished checkpoint
    live: int  # records that are not deleted, without regard to floors
    live_bytes: int
    first_ts: int
    last_ts: int
    sealed: bool
    unproven: bool = False  # sealed without a footer, because not all of its frames verified
    generation: int = 0  # of its files: how often it was rewritten
    removed: int = 0  # deleted records whose bytes a rewrite removed


class LeaseRow(msgspec.Struct, array_like=True, frozen=True):
    seq: int
    lease_id: int
    deadline_ms: int
    node: str


class QueueRow(msgspec.Struct, array_like=True, frozen=True):
    """The state of a queue besides its jobs. Leases and counts are present where they are durable."""

    lease_id: int  # ids up to here may have been assigned
    dead_lettered: int
    leases: tuple[LeaseRow, ...] = ()
    deliveries: tuple[tuple[int, int], ...] = ()  # seq, deliveries
    delayed: tuple[tuple[int, int], ...] = ()  # seq, earliest time of delivery


class ConsumerRow(msgspec.Struct, array_like=True, frozen=True):
    """A consumer group and its cursor."""

    group: str
    seq: int
    ts_ms: int  # of its last commit
    hold_bytes: int


class WriterRow(msgspec.Struct, array_like=True, frozen=True):
    """The last batches of a producer that numbers them: number, first seq, last seq, and the two words of the sum."""

    writer: str
    batches: tuple[tuple[int, int, int, int, int], ...]
    query_id: str = ""  # of the query that wrote the newest batch


class FedRow(msgspec.Struct, array_like=True, frozen=True):
    """How far the source of a router's target was forwarded, as of the row's head."""

    source_id: int
    cursor: int
    copying: bool = True  # false only in manifests from before copies were logged


class RouterRow(msgspec.Struct, array_like=True, frozen=True):
    name: str
    source_id: int
    dest_id: int
    preserve_node: bool
    preserve_tag: bool
    allow_cycle: bool
    exactly_once: bool
    match: tuple[int, str] | None
    start: int  # records after this seq of the source are forwarded
    dest_base: int  # head of the target when the router was created
    forwarded: int  # as of the dest row's head


class TopicRow(msgspec.Struct, array_like=True, frozen=True):
    id: int
    name: str
    config: bytes
    head: int
    reserved: int  # seqs up to here may have been assigned
    earliest: int
    cap_mark: int
    ttl_mark: int
    last_ts: int
    segments: tuple[SegmentRow, ...]
    ghosts: tuple[tuple[int, int], ...] = ()  # seqs [lo, hi) of deleted records that no segment holds any more
    source_mark: int = 0  # holes up to here stand for records lost at a router's source
    queue: QueueRow | None = None
    consumers: tuple[ConsumerRow, ...] = ()
    fed: FedRow | None = None
    hops: tuple[tuple[int, int, int], ...] = ()  # lo, hi, hops: seqs [lo, hi) came over this many routers
    guarded: bool = False  # a group has had a hold
    removals: int = 0  # deletes up to this number have rows in the gap log
    writers: tuple[WriterRow, ...] = ()
    wired: int = 0  # router frames up to this number are part of the row
    trims: tuple[tuple[int, int], ...] = ()  # seqs [lo, hi) of records that a router's source lost
    keys: tuple[tuple[str, int, int, int], ...] = ()  # idempotency key, first seq, last seq, time of the ack in ms


class GroupRow(msgspec.Struct, array_like=True, frozen=True):
    """The position where replay of a WAL shard begins."""

    key: str
    first: int
    pos: int


class Manifest(msgspec.Struct, array_like=True, frozen=True):
    topics: tuple[TopicRow, ...] = ()  # ascending ids
    groups: tuple[GroupRow, ...] = ()
    next_topic_id: int = 1
    routers: tuple[RouterRow, ...] = ()  # those of one target in the order of their creation
    lagging: tuple[int, ...] = ()  # topics that could not be written: their rows come from the manifest before
    fresh: tuple[GroupRow, ...] = ()  # where replay of all other topics begins, if it differs from `groups`


class LoadedManifest(NamedTuple):
    number: int  # 0: no manifest
    manifest: Manifest
    before: Manifest | None  # the manifest before it, if it reads
    skipped: list[str]  # files that do not read, with the reason


def manifest_path(root: str, number: int) -> str:
    return join(join(root, MANIFEST_DIR), f"snapshot.{number:04d}.bin")


def list_manifest_numbers(disk: Disk, root: str) -> list[int]:
    """Return the numbers of the snapshots in a directory, newest first."""
    try:
        names = disk.list_dir(join(root, MANIFEST_DIR))
    except FileNotFoundError:
        return []
    return sorted((int(match[1]) for name in names if (match := _NAME.fullmatch(name))), reverse=True)


def load_newest(disk: Disk, root: str) -> LoadedManifest:
    """Load the newest snapshot that reads. A newer format is refused, not skipped: an older state would be wrong."""
    good: list[tuple[int, Manifest]] = []
    skipped: list[str] = []
    for number in list_manifest_numbers(disk, root):
        name = f"{MANIFEST_DIR}/snapshot.{number:04d}.bin"
        try:
            content = read_file(disk, manifest_path(root, number))
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error}; nothing was changed, repair the disk and retry") from error
        if content is None:
            continue  # pruned meanwhile
        try:
            good.append((number, small_files.decode_snapshot(Manifest, content, name)))
        except NewerFormat:
            raise
        except Corrupt as error:
            skipped.append(str(error))
    if not good:
        return LoadedManifest(0, Manifest(), None, skipped)
    return LoadedManifest(*good[0], good[1][1] if len(good) > 1 else None, skipped)


def load_number(disk: Disk, root: str, number: int) -> Manifest:
    """Load the snapshot of this number. Raises where it does not read."""
    name = f"{MANIFEST_DIR}/snapshot.{number:04d}.bin"
    content = read_file(disk, manifest_path(root, number))
    if content is None:
        raise Corrupt(name, pos=0, reason="the file is missing")
    return small_files.decode_snapshot(Manifest, content, name)


def save(disk: Disk, root: str, number: int, manifest: Manifest) -> None:
    """Make this the newest snapshot; it survives a power cut on return."""
    replace_file(disk, manifest_path(root, number), small_files.encode_snapshot(manifest, version=_version(manifest)))


def _version(manifest: Manifest) -> int:
    """Return the lowest version of the format that can say this: a reader that does not know generations would look for
    files that are gone."""
    is_rewritten = any(segment.generation for topic in manifest.topics for segment in topic.segments)
    return small_files.SNAPSHOT_VERSION_NEWEST if is_rewritten else small_files.SNAPSHOT_VERSION


def prune(disk: Disk, root: str) -> None:
    """Remove all but the two newest snapshots, and temporary files of interrupted saves."""
    directory = join(root, MANIFEST_DIR)
    stale = [manifest_path(root, number) for number in list_manifest_numbers(disk, root)[_MANIFESTS_KEPT:]]
    stale += [join(directory, name) for name in disk.list_dir(directory) if _TEMPORARY.fullmatch(name)]
    if sum(remove_if_exists(disk, path) for path in stale):
        disk.sync_dir(directory)
