"""[shell] Disk → topics. In numbered passes, each of which may be cut off by a crash and done again.

    1  the newest manifest that reads
    2  its topics, with the segments it names: sizes are looked at, contents are not
    3  every WAL group that is on disk, whatever the number of shards is now
    4  its frames, topic by topic in their order: what the manifest holds already is passed over
    5  heads are padded to what was reserved, caps applied; routers are linked to their topics
    6  only then, and only for a writer: WAL tails are cut, segments cut to the length the manifest names, files that no
       manifest names removed

Passes 1 to 5 change nothing on disk, so a reader beside a live writer takes them too. A bad frame below the position
that was synced is damage: what follows it is replayed, the writer does not open unless it may (`accept_loss`), and the
bytes are kept in quarantine. A bad frame above it is an unfinished write, and its group ends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tidelog.disk.seam import Disk, join
from tidelog.engine import groups as cursors
from tidelog.engine import idempotency, manifest, numbers
from tidelog.engine.config import TopicConfig
from tidelog.engine.core import TOPICS, WAL, Core, Shared
from tidelog.engine.floors import Marks
from tidelog.engine.holds import Cursor
from tidelog.engine.manifest import Loaded, TopicRow
from tidelog.engine.notes import Cause
from tidelog.engine.parts import Segment
from tidelog.engine.queues.projection import Projection
from tidelog.engine.replay import Contents, Group, Replayed
from tidelog.engine.report import READING, Progress, Report
from tidelog.engine.routing import restore
from tidelog.errors import Corrupt, Damaged
from tidelog.formats import idx
from tidelog.wal import Position, Replay, names, read


class Missing(NamedTuple):
    """Bytes of a segment that the manifest names and the disk does not have."""

    core: Core
    where: str
    reason: str


class Recovered(NamedTuple):
    topics: dict[str, Core]
    next_topic_id: int
    groups: list[Group]
    loaded: Loaded
    shorter: bool  # a source of routers ends before their cursors


def recover(shared: Shared, report: Report, progress: Progress, *, writable: bool) -> Recovered:
    """Passes 1 to 5."""
    loaded = manifest.load(shared.disk, shared.root)
    report.snapshot, report.snapshots_skipped = loaded.number, loaded.skipped
    missing: list[Missing] = []
    cores = {row.id: _restored(shared, row, missing) for row in loaded.manifest.topics}
    groups = _groups(shared, loaded, report, progress)
    restore.begin(cores, loaded.manifest)
    replayed = Replayed(shared, cores, loaded.manifest, report)
    shared.replaying = shared.notes.recovering = True
    replayed.run(groups, progress)
    shared.replaying = False
    topics: dict[str, Core] = {}
    for core in sorted(cores.values(), key=lambda core: core.id):
        if core.dropped:
            shared.health.forget(core.id)
            continue
        if core.name in topics:
            report.damage.append(f"two topics are called {core.name!r}: the older one is not served")
        topics[core.name] = core
        report.damage += core.damage
        if core.lost:
            report.lost_seqs[core.name] = core.lost
        _finish(core, report, writable=writable)
    for each in missing:
        if not each.core.dropped:  # a drop removes files that the manifest still names
            each.core.spoiled(each.where, each.reason)
    shorter = restore.link(cores, report, writable=writable)
    report.topics = len(topics)
    return Recovered(topics, replayed.next_id, groups, loaded, shorter)


# ── 2  topics and their segments ──────────────────────────────────────────────────────────────────


def _restored(shared: Shared, row: TopicRow, missing: list[Missing]) -> Core:
    core = Core(shared, row.id, row.name, TopicConfig.from_json(row.config))
    index, home = core.index, shared.home(row.id)
    for segment in row.segments:
        part = Segment(
            home,
            segment.base,
            segment.stop,
            segment.size,
            live=segment.live,
            live_bytes=segment.live_bytes,
            first_ts=segment.first_ts,
            last_ts=segment.last_ts,
            sealed=segment.sealed,
            unproven=segment.unproven,
        )
        index.parts.append(part)
        found = _look(shared.disk, part)
        if segment.unproven and not found:
            found = [f"{home.path(part.base, '.data')} was sealed without a footer: not all of its frames verify"]
        missing += [Missing(core, home.path(part.base, ".data"), said) for said in found]
        core.damage += found
    index.head, index.earliest, index.last_ts = row.head, row.earliest, row.last_ts
    index.marks = Marks(row.cap_mark, row.ttl_mark, row.source_mark)
    core.hardened = index.evict_floor
    core.synced = row.head
    index.ghosts, index.trims = list(row.ghosts), list(row.trims)
    core.reserved, core.removals = row.reserved, row.removals
    core.groups = {each.group: Cursor(each.seq, each.ts_ms, each.hold_bytes) for each in row.consumers}
    core.guarded = core.guarding = row.guarded
    core.numbered = numbers.of_rows(row.writers)
    idempotency.restore(core.window, row.keys, shared.clock)
    core.projection = None if row.queue is None else Projection(row.queue)
    try:
        for each in index.parts:
            if isinstance(each, Segment):
                each.recount()
        index.count, index.bytes = index.weigh(index.earliest, index.head + 1)
        index.skip_dead()  # an ephemeral topic has lost its records and keeps its head
    except Corrupt as error:
        core.damage.append(f"{row.name}: {error}; its counts are those of the parts that read")
        live = [part for part in index.parts if part.stop > index.earliest]
        index.count, index.bytes = sum(part.live for part in live), sum(part.live_bytes for part in live)
    core.quota.hold(index.bytes)
    return core


def _look(disk: Disk, part: Segment) -> list[str]:
    """A cheap look at the files of a segment: what is missing. A lost index is made again from the data."""
    data, index = (disk.stat(part.home.path(part.base, suffix)) for suffix in (".data", ".idx"))
    path = part.home.path(part.base, ".data")
    if data is None or data.size < part.size:
        return [f"{path} has {data.size if data else 0} bytes, the manifest says {part.size}"]
    if index is None or index.size < (part.stop - part.base) * idx.ENTRY_BYTES:
        part.rebuild()
    return []


def _finish(core: Core, report: Report, *, writable: bool) -> None:
    """5. What was reserved is taken, what was lost stays lost."""
    index = core.index
    if writable and core.reserved > index.head:
        report.padded[core.name] = core.reserved - index.head
        index.pad(core.reserved)
    told: tuple[tuple[Cause, int], ...] = (("ttl", core.floors.ttl), ("cap", core.floors.cap))
    for cause, floor in told:
        core.evict(min(floor + 1, index.head + 1), cause)
    # What the manifest and frames say, and not what was worked out from records: the next replay may find another one,
    # by the cursors of a group or by deletion vectors that are newer than what it begins with.
    core.hardened = max(core.hardened, min(core.floors.evict_floor, index.head + 1))
    if not core.unsure:
        core.keep_caps()
    core.tail = core.found = core.told = index.head
    core.last_write_ms = index.last_ts or None
    core.reserving = core.reserved
    cursors.clamp(core)


# ── 3  the groups of the WAL ──────────────────────────────────────────────────────────────────────


def start_of(loaded: Loaded, key: str) -> Position | None:
    """Where the manifest says that replay of a group begins; None: it does not know the group."""
    return next((Position(row.first, row.pos) for row in loaded.manifest.groups if row.key == key), None)


def first_number(loaded: Loaded, groups: Sequence[Group], key: str) -> int:
    """The number of the first file of a group that has none. Groups of the first number of shards start at 1 and no
    others do: without a manifest that tells whether something is missing that only a manifest knew. As long as no
    group has had a frame this is the beginning: their files were empty, and `cut` has removed them."""
    begin = start_of(loaded, key)
    if begin is not None:
        return begin.first  # nothing was written to it: a file that held frames would be known to be absent
    if loaded.number:
        return 2
    if all(group.replay.next_first == 1 for group in groups):
        return 1
    ones = {group.key for group in groups if group.replay.numbers[:1] == [1]}
    return 1 if key in _first_layout(ones) else 2


def _first_layout(ones: set[str]) -> list[str]:
    """The groups of the first number of shards, of which these are some; the others had no frame when they were let
    go of, which is done lowest first."""
    if names.FLAT in ones:
        return [names.FLAT]
    return names.keys(100)[: max(int(key.removeprefix("shard-")) for key in ones) + 1]


def _is_whole(keys: Sequence[str], begun: dict[str, int]) -> bool:
    """Whether the groups, by the numbers of their first files, are all there ever were, from the first frame on: those
    of the first number of shards start at 1, and they are let go of lowest first. One without files has no frame."""
    ones = {key for key, number in begun.items() if number == 1}
    if max(begun.values(), default=1) > 2 or not ones:
        return False
    first_layout = _first_layout(ones)
    return ones <= {*first_layout} and all(key in ones or (key in keys and key not in begun) for key in first_layout)


def _groups(shared: Shared, loaded: Loaded, report: Report, progress: Progress) -> list[Group]:
    wal = join(shared.root, WAL)
    keys = names.groups(shared.disk, wal)
    begun = {key: number for key in keys if (number := _oldest(shared.disk, names.directory(wal, key)))}
    keys += [row.key for row in loaded.manifest.groups if row.pos and row.key not in keys]  # all of it is gone
    topics = join(shared.root, TOPICS)
    used = begun or loaded.skipped or (shared.disk.stat(topics) is not None and shared.disk.names(topics))
    if not loaded.number and used and not _is_whole(keys, begun):
        raise Damaged(
            f"{shared.root}: no snapshot reads and the WAL does not go back to the beginning; nothing was changed, "
            f"restore {manifest.DIRECTORY}/ from a copy"
        )
    groups = []
    for number, key in enumerate(keys):
        directory = names.directory(wal, key)
        unknown = Position(2 if begun.get(key) == 2 else 1, 0)  # none of its files can have been let go of
        start = start_of(loaded, key) or unknown
        replay, contents = read(shared.disk, directory, start, compiled=shared.limits.kernel), Contents()
        for window in replay:
            contents.add(window)
        progress(READING, number + 1, len(keys))
        _tell(report, key or WAL, replay)
        groups.append(Group(key, replay, contents))
    for group in groups:
        at, absent = start_of(loaded, group.key), group.replay.absent
        told = absent is not None and at is not None and absent.first == at.first
        if at is None or not at.pos or at.first in group.replay.numbers or told:
            continue
        report.damage.append(f"{group.key or WAL}/{names.file_name(at.first)} is missing, replay begins in it")
        report.lost = True
    return groups


def _oldest(disk: Disk, directory: str) -> int | None:
    """The number of the oldest file of a group, there or lost."""
    found = names.files(disk, directory)
    said = names.proven(disk, directory)
    return found[0] if found else said and said.first


def _tell(report: Report, key: str, replay: Replay) -> None:
    """What of a group was not replayed, byte for byte."""
    cut = replay.cut
    if cut is not None:
        said = f"{key}/{cut.file} at byte {cut.pos}, {cut.size} bytes: {cut.reason}"
        follow = f"; {cut.frames} frames that read follow it, of which no sync is known: kept in quarantine"
        report.cut.append(said + follow * bool(cut.frames))
    for lost in replay.losses:
        if lost.file:
            said = f"{key}/{lost.file} at byte {lost.pos}, {lost.end - lost.pos} bytes that were synced: {lost.reason}"
            report.damage.append(said)
    if (absent := replay.absent) is not None:
        said = f"{key}/{names.file_name(absent.first)} is missing: {absent.reason}; all that was in it is lost"
        report.damage.append(said)
    report.damage += [f"{key}: frames {gap.start} to {gap.stop - 1} are in no file" for gap in replay.missing]
    report.lost |= bool(replay.losses)
