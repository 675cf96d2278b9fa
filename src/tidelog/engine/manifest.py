"""The manifest of an engine: its topics, their segments, and where replay of the WAL begins.

It holds no record. Records are in the segments it names and in the WAL from the positions it names on. Rows are
arrays, not maps: a later version appends fields.

Manifests are numbered. A checkpoint saves what changed since the one before, so it costs what changed and not how many
topics there are:

    meta/snapshot.0004.bin                 base: the whole manifest 4
    meta/delta.0005.bin … delta.0011.bin   delta: what manifest 5 (… 11) changed of the one before it
    meta/snapshot.0009.bin                 base: the whole manifest 9, as bases and deltas up to 9 give it
    meta/delta.0012.bin                    the newest manifest is 9 + 10 + 11 + 12

The newest manifest and the one before it can be loaded, and nothing that these two need is removed from the directory.
Any one file of `meta` may be lost or damaged:

  a base           the base before it and the deltas since give the same manifest
  a delta          the next delta repeats what it says, unless a base of its number does
  the last delta   the manifest before it is used, and the WAL still has all that came after

A delta names its parent by a hash over the parent's bytes, which names the parent's parent: deltas of another history,
or with a hole between them, are never applied. A manifest that cannot be loaded this way does not exist; without the
two newest the directory is damaged (`recovery`), however many older ones read.

A new base is written before a delta, never instead of one (`ManifestStore.save`): when the deltas since the last base
are many or large, and when a damaged file has to be replaced or one of the older form (versions 100 and 101, in which
every manifest is a base). Each file is replaced as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec
from xxhash import xxh3_64_intdigest

from tidelog.disk.durability import read_file, remove_if_exists, replace_file
from tidelog.disk.interface import Disk, join
from tidelog.errors import Corrupt, Damaged, NewerFormat, Unavailable
from tidelog.formats import small_files

MANIFEST_DIR: Final = "meta"
DATABASE_ID_FILE: Final = "database.id"  # beside the manifests, from the first backup on
_NAME = re.compile(r"(snapshot|delta)\.(\d{4,20})\.bin")
_TEMPORARY = re.compile(r"(snapshot|delta)\.\d{4,20}\.bin\.tmp")
_BASES_KEPT: Final = 2
_LOAD_TRIES: Final = 8
DELTAS_MAX: Final = 64  # since the newest base, before another one is written
DELTA_BYTES_MIN: Final = 1 << 16  # of deltas that are no reason for another base, however small the newest is


class ColdRow(msgspec.Struct, array_like=True, frozen=True):
    """The object of a segment in the cold tier."""

    key: str  # in the store; "" of a segment that was recalled: it stays on the disk
    length: int  # of the object
    digest: int  # XXH3-64 of the object
    data_digest: int  # XXH3-64 of the data
    compression: int  # 0: the object is the data file, 1: blocks of zstd


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
    cold: ColdRow | None = None  # None: on the disk


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
    blobs: bytes = b""  # of large records: seq and blob, as pairs of u64
    epoch: int = 0  # of a restored topic (`restored_epoch`); 0: the id
    compaction: tuple[int, int, int] | None = None  # rule for keys, compacted up to, time of the oldest tombstone


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


class Positions(msgspec.Struct, array_like=True, frozen=True):
    """What a manifest says about the directory as a whole. Every delta has all of it."""

    groups: tuple[GroupRow, ...] = ()
    next_topic_id: int = 1
    lagging: tuple[int, ...] = ()
    fresh: tuple[GroupRow, ...] = ()
    closed: int = -1  # number of the last manifest of a close: rows saved up to then reserve no seqs


EPOCH_ID_BITS: Final = 32
RESTORES_MAX: Final = (1 << 21) - 1  # epochs stay below 2 ** 53: every JSON reader keeps them exactly


def restored_epoch(topic_id: int, restore: int) -> int:
    """The epoch of a topic after the restore with this number, from 1 to RESTORES_MAX."""
    assert 0 < restore <= RESTORES_MAX, "0 is a topic that was not restored"
    assert topic_id < 1 << EPOCH_ID_BITS, "an epoch has the id in its low bits"
    return restore << EPOCH_ID_BITS | topic_id


def epoch_topic_id(epoch: int) -> int:
    """The id of the topic that has this epoch."""
    return epoch & (1 << EPOCH_ID_BITS) - 1


class TopicEntry(msgspec.Struct, array_like=True, frozen=True):
    """A topic in a base or a delta: what an open needs of every topic, and its rows, which are decoded on first use."""

    id: int
    name: str
    records: int  # live ones, as of the row; -1: not known
    size: int  # their bytes
    row: bytes  # a TopicRow
    routers: tuple[RouterRow, ...] = ()  # those that write to it, in the order of their creation
    number: int = 0  # of the manifest that it was saved with; 0: one of version 100 or 101

    @classmethod
    def from_row(
        cls, row: TopicRow, routers: Iterable[RouterRow] = (), *, records: int = -1, size: int = 0
    ) -> TopicEntry:
        return cls(row.id, row.name, records, size, _encode(row), tuple(routers))

    def decode(self) -> TopicRow:
        return small_files.decode_msgpack(TopicRow, self.row, f"the manifest's row of topic {self.id}")


class Base(msgspec.Struct, array_like=True, frozen=True):
    """The file of a whole manifest."""

    number: int
    link: int  # of the delta of this number; 0: there is none
    positions: Positions
    topics: tuple[TopicEntry, ...]  # ascending ids


class Change(msgspec.Struct, array_like=True, frozen=True):
    """What a manifest changes of the one before it."""

    number: int
    parent: int  # link of the manifest before it
    positions: Positions
    topics: tuple[TopicEntry, ...] = ()  # new and changed ones
    dropped: tuple[int, ...] = ()


class Delta(msgspec.Struct, array_like=True, frozen=True):
    """The file of a delta: its change, and the change before it again, for the case that its file is lost. Both are
    encoded: a link is the hash of these bytes."""

    change: bytes
    before: bytes = b""  # empty: a base has it


_encode = msgspec.msgpack.Encoder().encode
FileKind: TypeAlias = Literal["snapshot", "delta"]
FILE_KINDS: Final[tuple[FileKind, ...]] = ("snapshot", "delta")
Fault: TypeAlias = Corrupt | NewerFormat | OSError


class FaultyFile(NamedTuple):
    """A file of `meta` that does not read, or is missing."""

    name: str  # relative to the directory
    fault: Fault


@dataclass(slots=True)
class _State:
    """A manifest while changes are applied to it."""

    number: int
    link: int
    positions: Positions
    topics: dict[int, TopicEntry]
    replaced: dict[int, TopicEntry | None] = field(default_factory=dict)  # what the last change replaced; None: new


@dataclass
class LoadedManifest:
    number: int = 0  # 0: no manifest
    positions: Positions = field(default_factory=Positions)
    topics: dict[int, TopicEntry] = field(default_factory=dict)  # by id
    replaced: dict[int, TopicEntry | None] = field(default_factory=dict)  # the rows of the manifest before that differ
    faults: list[FaultyFile] = field(default_factory=list)
    link: int = 0
    bases: list[int] = field(default_factory=list)  # that can be used, ascending
    last_change: bytes = b""  # of this number; empty: not known
    base_bytes: int = 0
    delta_bytes: int = 0  # since the newest base
    needs_base: bool = True  # a lost file could make it unreadable, or an older version would misread what follows

    @property
    def skipped(self) -> list[str]:
        """Files that do not read, with the reason."""
        return [str(fault.fault) for fault in self.faults]

    @cached_property
    def manifest(self) -> Manifest:
        """All rows, decoded."""
        return build_manifest(self.topics.values(), self.positions)

    def row(self, topic_id: int) -> TopicRow | None:
        """Decode the row of one topic."""
        entry = self.topics.get(topic_id)
        return None if entry is None else decode_row(entry, self.positions)

    def rows_before(self) -> Iterator[TopicRow]:
        """Decode the rows of the manifest before this one, as far as they differ."""
        return (entry.decode() for entry in self.replaced.values() if entry is not None)


def decode_row(entry: TopicEntry, positions: Positions, row: TopicRow | None = None) -> TopicRow:
    """Decode a row as of a manifest: since it was saved, a close may have given back the seqs that it reserves. `row`:
    the decoded row, if it is known."""
    row = row or entry.decode()
    return msgspec.structs.replace(row, reserved=row.head) if entry.number <= positions.closed else row


def build_manifest(topics: Iterable[TopicEntry], positions: Positions) -> Manifest:
    """Return a manifest with all rows decoded."""
    entries = sorted(topics, key=lambda entry: entry.id)
    return join_manifest((decode_row(entry, positions) for entry in entries), entries, positions)


def join_manifest(rows: Iterable[TopicRow], entries: Iterable[TopicEntry], positions: Positions) -> Manifest:
    """Return a manifest of these rows; entries are in the same order."""
    return Manifest(
        tuple(rows),
        positions.groups,
        positions.next_topic_id,
        tuple(router for entry in entries for router in entry.routers),
        positions.lagging,
        positions.fresh,
    )


def split_manifest(manifest: Manifest) -> tuple[Positions, tuple[TopicEntry, ...]]:
    """Return the parts of a manifest in the form of files: that of versions 100 and 101, or one that a test made."""
    routers: dict[int, list[RouterRow]] = {}
    for router in manifest.routers:
        routers.setdefault(router.dest_id, []).append(router)
    positions = Positions(manifest.groups, manifest.next_topic_id, manifest.lagging, manifest.fresh)
    return positions, tuple(TopicEntry.from_row(row, routers.get(row.id, ())) for row in manifest.topics)


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a whole manifest for a copy outside of a directory."""
    return small_files.wrap_snapshot(_encode(manifest), version=small_files.CHAIN_VERSION)


def decode_manifest(content: bytes, what: str) -> Manifest:
    """Decode what `encode_manifest` has made; Corrupt or NewerFormat when it is something else."""
    body = small_files.unwrap_snapshot(content, what, version=small_files.CHAIN_VERSION)
    return small_files.decode_msgpack(Manifest, body, what)


def manifest_path(root: str, number: int, kind: FileKind = "snapshot") -> str:
    return join(join(root, MANIFEST_DIR), f"{kind}.{number:04d}.bin")


def _list_files(disk: Disk, root: str) -> dict[FileKind, list[int]]:
    """Return the numbers of the files of each kind, ascending."""
    found: dict[FileKind, list[int]] = {"snapshot": [], "delta": []}
    try:
        names = disk.list_dir(join(root, MANIFEST_DIR))
    except FileNotFoundError:
        return found
    for name in names:
        if match := _NAME.fullmatch(name):
            found["snapshot" if match[1] == "snapshot" else "delta"].append(int(match[2]))
    return {kind: sorted(numbers) for kind, numbers in found.items()}


def list_manifest_numbers(disk: Disk, root: str) -> list[int]:
    """Return the numbers of the manifests that files in a directory are about, newest first."""
    files = _list_files(disk, root)
    return sorted({*files["snapshot"], *files["delta"]} - {0}, reverse=True)


class _ChangeHead(msgspec.Struct, array_like=True, frozen=True):
    number: int
    parent: int


class _BaseHead(msgspec.Struct, array_like=True, frozen=True):
    number: int
    link: int


class _BaseFile(NamedTuple):
    """A base whose checksum holds. One that is not the newest is not decoded."""

    number: int
    link: int
    size: int
    old_form: Base | None  # of version 100 or 101, decoded
    body: bytes

    def decode(self) -> Base:
        if self.old_form is not None:
            return self.old_form
        return small_files.decode_msgpack(Base, self.body, f"{MANIFEST_DIR}/snapshot.{self.number:04d}.bin")


_EMPTY_BASE: Final = _BaseFile(0, 0, 0, None, _encode(Base(0, 0, Positions(), ())))


class _Reader:
    """Reads the files of `meta`, each once."""

    def __init__(self, disk: Disk, root: str) -> None:
        self._disk, self._root = disk, root
        self.files = _list_files(disk, root)
        self.faults: dict[str, Fault] = {}
        self.has_vanished = False  # a writer removed a listed file meanwhile
        self.sizes: dict[str, int] = {}
        self._bases: dict[int, _BaseFile | None] = {}
        self.changes: dict[int, dict[int, bytes]] = {}  # number → parent → the encoded change, of deltas that read
        self.copies: dict[int, int] = {}  # number → files that have its change

    def _read(self, kind: FileKind, number: int) -> bytes | None:
        path = manifest_path(self._root, number, kind)
        name = path.removeprefix(f"{self._root.rstrip('/')}/")
        try:
            content = read_file(self._disk, path)
        except OSError as error:
            self.faults[name] = error
            return None
        self.has_vanished |= content is None
        self.sizes[name] = len(content or b"")
        return content

    def base(self, number: int) -> _BaseFile | None:
        """Return a base; None if it does not read."""
        if number not in self._bases:
            self._bases[number] = self._load_base(number)
        return self._bases[number]

    def _load_base(self, number: int) -> _BaseFile | None:
        name = f"{MANIFEST_DIR}/snapshot.{number:04d}.bin"
        content = self._read("snapshot", number)
        if content is None:
            return None
        try:
            if (small_files.snapshot_version(content) or 0) <= small_files.SNAPSHOT_VERSION_NEWEST:
                manifest = small_files.decode_snapshot(Manifest, content, name)
                return _BaseFile(number, 0, len(content), Base(number, 0, *split_manifest(manifest)), b"")
            body = small_files.unwrap_snapshot(content, name, version=small_files.CHAIN_VERSION)
            found = small_files.decode_msgpack(_BaseHead, body, name)
            if found.number != number:
                raise Corrupt(name, pos=0, reason=f"it is the base of manifest {found.number}")
        except (Corrupt, NewerFormat) as error:
            self.faults[name] = error
            return None
        return _BaseFile(number, found.link, len(content), None, body)

    def load_deltas(self) -> None:
        for number in self.files["delta"]:
            name = f"{MANIFEST_DIR}/delta.{number:04d}.bin"
            content = self._read("delta", number)
            if content is None:
                continue
            try:
                body = small_files.unwrap_snapshot(content, name, version=small_files.CHAIN_VERSION)
                delta = small_files.decode_msgpack(Delta, body, name)
                self._add_change(delta.change, number, name)
                if delta.before:
                    self._add_change(delta.before, number - 1, name)
            except (Corrupt, NewerFormat) as error:
                self.faults[name] = error

    def _add_change(self, encoded: bytes, number: int, name: str) -> None:
        found = small_files.decode_msgpack(_ChangeHead, encoded, name)
        if found.number != number:
            raise Corrupt(name, pos=0, reason=f"it has the change of manifest {found.number}")
        self.changes.setdefault(number, {})[found.parent] = encoded
        self.copies[number] = self.copies.get(number, 0) + 1

    def has_single_copy(self, target: int) -> bool:
        """Whether a change before the last one is in one file only."""
        return any(self.copies.get(number, 0) < 2 for number in range(1, target))

    def path_to(self, target: int, number: int, link: int) -> list[bytes] | None:
        """Return the changes that lead from a base to manifest `target`; None: not all of them are there."""
        path: list[bytes] = []
        for step in range(number + 1, target + 1):
            encoded = self.changes.get(step, {}).get(link)
            if encoded is None:
                return None
            path.append(encoded)
            link = xxh3_64_intdigest(encoded)
        return path


def _apply_change(state: _State, encoded: bytes) -> None:
    change = small_files.decode_msgpack(Change, encoded, f"{MANIFEST_DIR}/delta.{state.number + 1:04d}.bin")
    state.replaced = {}
    for entry in change.topics:
        state.replaced[entry.id] = state.topics.get(entry.id)
        state.topics[entry.id] = entry
    for topic_id in change.dropped:
        state.replaced[topic_id] = state.topics.pop(topic_id, None)
    state.number, state.link, state.positions = change.number, xxh3_64_intdigest(encoded), change.positions


def load_newest(disk: Disk, root: str) -> LoadedManifest:
    """Load the newest manifest that reads, or the one before it. A newer format is refused, not skipped: an older state
    would be wrong."""
    loaded = inspect(disk, root)
    for _, fault in loaded.faults:
        if isinstance(fault, NewerFormat):
            raise fault
        if isinstance(fault, OSError):
            name = next(file.name for file in loaded.faults if file.fault is fault)
            raise Damaged(f"{name} cannot be read: {fault}; nothing was changed, repair the disk and retry") from fault
    return loaded


def inspect(disk: Disk, root: str) -> LoadedManifest:
    """`load_newest` that raises for no file: `faults` has what is wrong with each."""
    for _ in range(_LOAD_TRIES):
        reader = _Reader(disk, root)
        loaded = _load(reader)
        if loaded.number or not reader.has_vanished:
            return loaded
    raise Unavailable(f"{root} changes faster than it can be read; nothing was changed, try again")


def _load(reader: _Reader) -> LoadedManifest:
    reader.load_deltas()
    files = reader.files
    newest = max([*files["snapshot"], *files["delta"]], default=0)
    # A directory begins with the empty manifest 0, whether or not its file is there.
    starts = sorted({0, *files["snapshot"]}, reverse=True)
    for target in (newest, newest - 1):
        if target <= 0:
            break
        usable: list[tuple[_BaseFile, list[bytes]]] = []
        for number in starts:
            base = (reader.base(number) if number in files["snapshot"] else None) or (None if number else _EMPTY_BASE)
            path = reader.path_to(target, number, base.link) if base is not None and number <= target else None
            if base is not None and path is not None:
                usable.append((base, path))
        if usable:
            return _describe(reader, target, newest, usable)
    return LoadedManifest(faults=_list_faults(reader, newest))


def _describe(reader: _Reader, target: int, newest: int, usable: list[tuple[_BaseFile, list[bytes]]]) -> LoadedManifest:
    """Apply the changes since the newest base. `usable`: every base from which the manifest can be reached."""
    file, path = usable[0]
    base = file.decode()
    state = _State(base.number, base.link, base.positions, {entry.id: entry for entry in base.topics})
    for encoded in path:
        _apply_change(state, encoded)
    older = reader.base(target - 1) if not path and target - 1 in reader.files["snapshot"] else None
    if older is not None:  # version 100 or 101, where every manifest is a base
        state.replaced = {entry.id: entry for entry in older.decode().topics}
    bases = sorted(found.number for found, _ in usable)
    # Deltas up to the older of the bases that are kept may be gone in part: a power cut interrupted `prune`.
    faults = _list_faults(reader, newest, bases[-_BASES_KEPT:][0])
    return LoadedManifest(
        state.number,
        state.positions,
        state.topics,
        state.replaced,
        faults,
        state.link,
        bases if older is None else [older.number, *bases],
        path[-1] if path else b"",
        file.size,
        sum(map(len, path)),
        # The empty base 0 needs no second one: its content is known without its file.
        needs_base=(len(usable) < 2 and (file.number > 0 or reader.has_single_copy(target)))
        or bool(faults)
        or target < newest
        or file.old_form is not None,
    )


def _list_faults(reader: _Reader, newest: int, oldest_base: int | None = None) -> list[FaultyFile]:
    """Return the files that do not read, newest first, and the deltas since a base that must have been there."""
    faults = dict(reader.faults)
    deltas = reader.files["delta"]
    first = deltas[0] if oldest_base is None and deltas else (oldest_base or 0) + 1
    if deltas and deltas[-1] > first:
        for number in sorted({*range(first, newest + 1)} - {*deltas}):
            name = f"{MANIFEST_DIR}/delta.{number:04d}.bin"
            faults.setdefault(name, Corrupt(name, pos=0, reason="the file is missing"))
    order = sorted(faults.items(), key=lambda file: file[0].rpartition(".")[0].rpartition(".")[2], reverse=True)
    return [FaultyFile(name, fault) for name, fault in order]


def write_base(disk: Disk, root: str, number: int, manifest: Manifest) -> None:
    """Write a whole manifest as the base of its number; it survives a power cut on return."""
    replace_file(disk, manifest_path(root, number), _encode_base(Base(number, 0, *split_manifest(manifest))))


def _encode_base(base: Base) -> bytes:
    return small_files.wrap_snapshot(_encode(base), version=small_files.CHAIN_VERSION)


class ManifestStore:
    """The newest manifest of a directory that is open for writing, and its files. Used by one checkpoint at a time."""

    def __init__(self, disk: Disk, root: str, loaded: LoadedManifest | None = None) -> None:
        loaded = loaded or LoadedManifest()
        self._disk, self._root = disk, root
        self.number, self.positions = loaded.number, loaded.positions
        self.topics: dict[int, TopicEntry] = loaded.topics  # by id
        self._link, self._bases, self._last_change = loaded.link, loaded.bases, loaded.last_change
        self._base_bytes, self._delta_bytes = loaded.base_bytes, loaded.delta_bytes
        self._needs_base = loaded.needs_base
        self._is_base_requested = False

    def request_base(self) -> None:
        """Let the next save write a base first. Two of them in a row replace every file of the manifest."""
        self._is_base_requested = True

    def manifest(self) -> Manifest:
        """All rows, decoded."""
        return build_manifest(self.topics.values(), self.positions)

    def save(
        self, changed: Iterable[TopicEntry], dropped: Collection[int], positions: Positions, *, final: bool = False
    ) -> None:
        """Make a manifest with these changes the newest; it survives a power cut on return. `final`: close waits for
        it, so a base that can wait does."""
        if self._needs_base:
            self._restart_chain()
        elif self._is_base_requested or self._has_many_deltas(2 if final else 1):
            self._write_base()
        self._is_base_requested = False
        number = self.number + 1
        if final and not positions.lagging:
            positions = msgspec.structs.replace(positions, closed=number)
        else:
            positions = msgspec.structs.replace(positions, closed=self.positions.closed)
        topics = {entry.id: msgspec.structs.replace(entry, number=number) for entry in changed}
        gone = tuple(sorted(topic_id for topic_id in dropped if topic_id in self.topics))
        change = _encode(Change(number, self._link, positions, (*topics.values(),), gone))
        self._write_delta(change)
        self.topics |= topics
        for topic_id in gone:
            del self.topics[topic_id]
        self.positions = positions

    def _has_many_deltas(self, factor: int) -> bool:
        """Whether the deltas since the newest base cost an open more than another base costs a checkpoint."""
        limit = factor * max(self._base_bytes // 2, DELTA_BYTES_MIN)
        return self.number - max(self._bases, default=0) >= factor * DELTAS_MAX or self._delta_bytes > limit

    def _restart_chain(self) -> None:
        """Write a base that an older version refuses, and a delta of its number that changes nothing: with either of
        them lost the manifest reads."""
        if not self.number:
            self._write_base()
        else:
            change = _encode(Change(self.number + 1, self._link, self.positions))
            base = Base(self.number + 1, xxh3_64_intdigest(change), self.positions, self._sorted_topics())
            self._replace_base(base)
            self._last_change = b""
            self._write_delta(change)
            self._bases = [*(number for number in self._bases if number < self.number), self.number]
            self._delta_bytes = 0
        self._needs_base = False

    def _write_base(self) -> None:
        """Write the newest manifest as a base."""
        self._replace_base(Base(self.number, self._link, self.positions, self._sorted_topics()))
        self._bases = [*(number for number in self._bases if number < self.number), self.number]
        self._last_change, self._delta_bytes = b"", 0

    def _sorted_topics(self) -> tuple[TopicEntry, ...]:
        return tuple(self.topics[topic_id] for topic_id in sorted(self.topics))

    def _replace_base(self, base: Base) -> None:
        content = _encode_base(base)
        replace_file(self._disk, manifest_path(self._root, base.number), content)
        self._base_bytes = len(content)

    def _write_delta(self, change: bytes) -> None:
        content = _encode(Delta(change, self._last_change))
        replace_file(
            self._disk,
            manifest_path(self._root, self.number + 1, "delta"),
            small_files.wrap_snapshot(content, version=small_files.CHAIN_VERSION),
        )
        self.number += 1
        self._link, self._last_change = xxh3_64_intdigest(change), change
        self._delta_bytes += len(change)

    def prune(self) -> None:
        """Remove all but the two newest bases and the deltas since the older one. Files that do not read are removed
        as soon as there are two bases without them."""
        self._bases = self._bases[-_BASES_KEPT:]
        files = _list_files(self._disk, self._root)
        stale = [manifest_path(self._root, number) for number in files["snapshot"] if number not in self._bases]
        stale += [manifest_path(self._root, number, "delta") for number in files["delta"] if number <= self._bases[0]]
        if sum(remove_if_exists(self._disk, path) for path in stale):
            self._disk.sync_dir(join(self._root, MANIFEST_DIR))


def is_manifest_file(name: str) -> bool:
    """Whether a file in the directory of manifests is a base or a delta, whole or not."""
    return _NAME.fullmatch(name) is not None or _TEMPORARY.fullmatch(name) is not None


def remove_temporary_files(disk: Disk, root: str) -> None:
    """Remove what interrupted saves left."""
    directory = join(root, MANIFEST_DIR)
    left = [join(directory, name) for name in disk.list_dir(directory) if _TEMPORARY.fullmatch(name)]
    if sum(remove_if_exists(disk, path) for path in left):
        disk.sync_dir(directory)
