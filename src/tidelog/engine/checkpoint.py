"""[shell] Checkpoint: what only the WAL has is copied into segments, and then the WAL may forget it.

    1  where the WAL stands, group by group: everything before has been published
       and every floor is made durable: deletion vectors may be found by a replay that begins before the deletes
    2  frames → segment files, byte for byte: data, sync, index, sync; then, for what is complete, every frame is read
       back and verified, and a footer is written
    3  deletion vectors, each replaced as a whole
       the ledger has rows for every removal that 3 and 5 reflect: replay may not find it again
    4  a CheckpointMark into every shard, synced
    5  the manifest, replaced as a whole: from here on it is true
    6  what neither of the two manifests needs is removed

Any error before 5 leaves the manifest before in force, and it is complete: nothing it names was
changed, only added to. Writers go on throughout; each topic is locked to take stock, never for I/O.

One topic that cannot be written does not stop the others. The new manifest repeats its row of the one before
(`Manifest.lagging`), and replay of its shard still begins where that row needs it; replay of all other topics begins
here (`Manifest.fresh`). A segment whose frames do not all verify is sealed without a footer: every read then checks
frame by frame, and what is intact is served.

Where there is no room for copies, a checkpoint without them (`copy=False`) lets go of the segments of which nothing is
left: rows then say what the files hold, and replay begins where it did.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from tidelog.commitlog.codec import Shape
from tidelog.commitlog.segment import Mapped
from tidelog.disk.atomic import remove_if_there, replace
from tidelog.disk.latch import FULL
from tidelog.disk.seam import Disk, File, join
from tidelog.engine import groups, idempotency, manifest, numbers, retention
from tidelog.engine.block import Block
from tidelog.engine.core import WAL, Core, Shared
from tidelog.engine.home import CODEC, Home
from tidelog.engine.manifest import GroupRow, Manifest, QueueRow, RouterRow, SegmentRow, TopicRow
from tidelog.engine.parts import Segment
from tidelog.engine.routing import holding
from tidelog.engine.tags import write_sealed
from tidelog.errors import Corrupt, Error, Forked, NewerFormat
from tidelog.formats import bodies, deletions, footer, frame, idx, scan
from tidelog.formats.bodies import CheckpointMark, TopicMark
from tidelog.types import Buffer
from tidelog.wal import Commit, Position, Shard, Token, names
from tidelog.wal.trim import trim

_COPY_BYTES = 1 << 20
SUFFIXES = (".data", ".idx", ".foot", ".tag", ".del")  # data first: what is half removed is no segment any more


class Chapter(NamedTuple):
    """What one segment file gets: the blocks that belong to it, and whether it is complete then."""

    base: int
    segment: Segment | None  # None: it has no file yet
    blocks: list[tuple[Block, bytes]]  # each with its index
    complete: bool


class Mark(Commit):
    __slots__ = ("token",)

    def __init__(self, shard: Shard, mark: CheckpointMark, ts_ms: int) -> None:
        made = frame.encode(frame.CHECKPOINT_MARK, ts_ms=ts_ms, data=bodies.encode(mark))
        super().__init__([made], frames=1, durable=True)
        self.token: Token[None] = Token(shard)

    def done(self, error: Error | None) -> None:
        if error is None:
            self.token.set(None)
        else:
            self.token.fail(error)


@dataclass(slots=True)
class History:
    """What checkpoints of one engine must remember of each other."""

    number: int = 0  # of the newest manifest
    groups: tuple[GroupRow, ...] = ()  # its positions: replay from the manifest before it may need less, never more
    doomed: list[str] = field(default_factory=list)  # files that only the newest manifest's predecessor names
    stale: list[str] = field(default_factory=list)  # files that neither names: to be removed
    strangers: tuple[GroupRow, ...] = ()  # groups of an earlier shard count, replayed and not written any more
    moved: bool = False  # a checkpoint is needed before anything is written: replay must not begin where it did


Failed: TypeAlias = dict[Core, Exception]
"""The topics that a checkpoint could not write, and why."""


def checkpoint(
    shared: Shared,
    registry: Callable[[], tuple[Sequence[Core], int]],
    history: History,
    *,
    final: bool,
    rest: Callable[[], object] = lambda: None,
    copy: bool = True,
) -> Failed:
    """Make a checkpoint; return the topics that it had to leave out. `final`: nothing is written any more, so no seq
    needs to stay reserved. `rest` is called after each step of the copying, with no lock held. Without `copy` no record
    is copied: topics that have some to copy are left out, but segments that they do not need any more go."""
    positions = [shard.position() for shard in shared.shards]
    # Asked after the positions: a topic that is dropped from here on has its frame where replay begins.
    cores, next_topic_id = registry()
    failed = _harden(cores)
    rows: list[TopicRow] = []
    routers: list[RouterRow] = []
    doomed: list[str] = []
    written: list[Core] = []
    freed: set[Core] = set()  # left out, but for the segments that they do not need any more
    for core in cores:
        if core in failed:
            continue
        try:
            whole = copy or not _is_behind(core)
            if whole:
                _write(core, rest)
            else:
                failed[core] = OSError(errno.ENOSPC, "there is no room to copy its records")
                if not _is_plain(core):
                    continue
                freed.add(core)
            row = _stock(core, final=final and whole)
            if not whole:
                row = _as_configured(shared, history, row)
        except Forked:  # of the process, not of this topic
            raise
        except Exception as error:
            freed.discard(core)
            if not core.dropped:
                failed[core] = error
            continue  # a dropped one's files went while they were written: its last frame is where replay begins
        rows.append(row)
        routers += core.frozen.routers if core.frozen else ()
        home = shared.home(core.id)
        doomed += [home.path(base, suffix) for base in core.discarded for suffix in SUFFIXES]
        written.append(core)
    if failed and not written:
        return failed
    left = {core: error for core, error in failed.items() if core not in freed}
    shared.ledger.settle({core.id for core in left})
    if left:
        old, led = _left_out(shared, history, left)
        rows += old
        routers += led
    rows.sort(key=lambda row: row.id)
    _mark(shared, rows)
    keys = names.keys(len(shared.shards))
    begin = tuple(GroupRow(key, at.first, at.pos) for key, at in zip(keys, positions, strict=True))
    made = Manifest((*rows,), (*begin, *history.strangers), next_topic_id, (*routers,))
    if failed:
        made = _held_back(shared, history, made, failed)
    manifest.save(shared.disk, shared.root, history.number + 1, made)
    for core in written:
        holding.saved(core)
        core.discarded = []
    before, history.groups = history.groups, made.groups
    history.number += 1
    history.stale, history.doomed = [*history.stale, *history.doomed], doomed
    _forget(shared, history, before, complete=not failed)
    return failed


def _harden(cores: Sequence[Core]) -> Failed:
    """Make all floors durable; topics whose floors cannot be are left out."""
    try:
        retention.harden_all(cores)
    except Forked:
        raise
    except Exception:  # whose it was is found out one by one
        failed: Failed = {}
        for core in cores:
            try:
                retention.harden_all([core])
            except Forked:
                raise
            except Exception as error:
                failed[core] = error
        return failed
    return {}


def _left_out(shared: Shared, history: History, failed: Failed) -> tuple[list[TopicRow], list[RouterRow]]:
    """The rows that topics had in the manifest before, and those of the routers that lead to them. A topic that it
    does not know has a row without records: the WAL still has all of them."""
    before = manifest.load_one(shared.disk, shared.root, history.number) if history.number else Manifest()
    known = {row.id: row for row in before.topics}
    ids = {core.id for core in failed if not core.dropped}
    rows = [
        known.get(core.id) or TopicRow(core.id, core.name, core.config.to_json(), 0, 0, 1, 0, 0, 0, ())
        for core in failed
        if not core.dropped
    ]
    return rows, [router for router in before.routers if router.dest_id in ids]


def _held_back(shared: Shared, history: History, made: Manifest, failed: Failed) -> Manifest:
    """The manifest with replay of the failed topics' shards beginning where it did. Groups of an earlier shard count
    may hold frames of any of them."""
    wal, strange = join(shared.root, WAL), {row.key for row in history.strangers}
    shards = {
        key
        for key, shard in zip(names.keys(len(shared.shards)), shared.shards, strict=True)
        if any(core.shard is shard for core in failed)
    }
    before = {row.key: row for row in history.groups}

    def start(row: GroupRow) -> GroupRow:
        if row.key not in shards and row.key not in strange:
            return row
        if (known := before.get(row.key)) is not None:
            return known
        files = names.files(shared.disk, names.directory(wal, row.key))  # nothing was let go of without a manifest
        return GroupRow(row.key, files[0], 0) if files else row

    groups = tuple(start(row) for row in made.groups)
    lagging = tuple(sorted(core.id for core in failed if not core.dropped))
    return msgspec.structs.replace(made, groups=groups, fresh=made.groups, lagging=lagging)


# ── one topic: frames into files ──────────────────────────────────────────────────────────────────


def _is_plain(core: Core) -> bool:
    """Whether the row of a topic may be newer than the place where its replay begins by any amount: what its frames
    say is absolute. Jobs and routers count; groups that hold records back decide what a cap takes."""
    counts = core.queue is not None or core.projection is not None or core.lane is not None or bool(core.lanes)
    return not (counts or core.guarded or core.guarding)


def _as_configured(shared: Shared, history: History, row: TopicRow) -> TopicRow:
    """A row with the settings that held where replay begins: later ones would take records, by a cap, which were there
    together only until deletes that replay finds after them."""
    before = manifest.load_one(shared.disk, shared.root, history.number) if history.number else Manifest()
    known = next((old for old in before.topics if old.id == row.id), None)
    return row if known is None else msgspec.structs.replace(row, config=known.config)


def _is_behind(core: Core) -> bool:
    """Whether a topic has records to copy; it is frozen as it is."""
    with core.lock:
        core.frozen = None
        if core.dropped:
            return False
        holding.freeze(core)
        return bool(_chapters(core))


def _write(core: Core, rest: Callable[[], object]) -> None:
    """Copy what is in no file into files. Where there is no room for it, what was begun is taken back."""
    broken = _broken_off(core)
    with core.lock:
        core.frozen = None
        if core.dropped:
            return
        holding.freeze(core)
        if broken is not None:
            _detach(core, *broken)
        chapters = _chapters(core)
    home = core.shared.home(core.id)
    try:
        if chapters:
            core.shared.disk.make_dir(home.directory)
        for chapter in chapters:
            _write_chapter(core, home, chapter, rest)
        if any(chapter.segment is None for chapter in chapters):  # its names may be an earlier attempt's, never synced
            core.shared.disk.sync_dir(home.directory)
        unproven = {chapter.base for chapter in chapters if chapter.complete and not _seal(core, home, chapter, rest)}
    except OSError as error:
        if error.errno in FULL:
            _take_back(home, chapters)
        raise
    with core.lock:
        for chapter in chapters:
            _adopt(core, home, chapter, unproven=chapter.base in unproven)


def _take_back(home: Home, chapters: Sequence[Chapter]) -> None:
    """Give back the room of copies that did not all find some: no manifest names them, and what makes room needs it."""
    for chapter in chapters:
        home.forget(chapter.base)
        segment = chapter.segment
        with suppress(OSError):
            for suffix in (".foot", ".tag"):
                remove_if_there(home.disk, home.path(chapter.base, suffix))
            if segment is None:
                for suffix in (".idx", ".data"):
                    remove_if_there(home.disk, home.path(chapter.base, suffix))
                continue
            sizes = {".data": segment.size, ".idx": (segment.stop - segment.base) * idx.ENTRY_BYTES}
            for suffix, size in sizes.items():
                file = home.disk.open(home.path(chapter.base, suffix), "write")
                try:
                    if file.size() > size:
                        file.cut(size)
                finally:
                    file.close()


def _broken_off(core: Core) -> tuple[Segment, str] | None:
    """The unsealed segment of a topic, where its files cannot be continued, and why: they are shorter than what was
    written, or its deletions do not read."""
    with core.lock:
        segment = next((part for part in core.index.parts if isinstance(part, Segment) and not part.sealed), None)
        if segment is None:
            return None
        try:
            deleted = segment.dead() is not None
        except Corrupt as error:
            return segment, error.reason
        sizes = {".data": segment.size, ".idx": (segment.stop - segment.base) * idx.ENTRY_BYTES}
    for suffix, size in sizes.items():
        found = core.shared.disk.stat(segment.home.path(segment.base, suffix))
        if (found.size if found else 0) < size:
            have = f"it has {found.size} bytes" if found else "the file is missing"
            if suffix == ".idx" and segment.rebuild():  # from verified frames
                replace(segment.home.disk, segment.home.path(segment.base, ".idx"), segment.rebuilt or b"")
                segment.home.forget(segment.base)
                continue
            return segment, f"{suffix}: {have}, {size} were written"
    if deleted and not segment.unsaved and not _names_deletions(segment):
        segment.unsaved = True  # what memory knows is written again
    return None


def _names_deletions(segment: Segment) -> bool:
    """Whether the file of deletions reads. What it names was compared when it was loaded."""
    try:
        content = segment.home.side(segment.base, ".del")
        return content is not None and deletions.decode(content).base == segment.base
    except (Corrupt, NewerFormat):
        return False


def _detach(core: Core, segment: Segment, reason: str) -> None:
    """Let what comes after a damaged segment start another one: nothing is added to its files, which are the only
    evidence, and the topic goes on. With the lock held."""
    segment.sealed = segment.unproven = True
    core.spoiled(segment.home.path(segment.base, ".data"), f"{reason}; it was sealed without a footer")
    origin, base = 0, 0
    for part in core.index.parts:
        if isinstance(part, Block) and part.segment == segment.base:
            base = base or part.base
            part.move(base, origin)
            origin += part.size


def _chapters(core: Core) -> list[Chapter]:
    """What is to be written: frozen now, so that it does not change while it is."""
    index = core.index
    obsolete = index.obsolete()
    found: dict[int, Chapter] = {}
    for part in index.parts:
        if isinstance(part, Block):
            if not part.kept or part.base == part.stop or part.segment in obsolete:
                continue
            part.frozen = True
            chapter = found.setdefault(part.segment, Chapter(part.segment, None, [], False))
            chapter.blocks.append((part, bytes(part.index())))
        elif not part.sealed:
            found[part.base] = Chapter(part.base, part, [], False)
    growing = index.segment()
    chapters = [chapter._replace(complete=chapter.base != growing) for chapter in found.values()]
    return [chapter for chapter in chapters if chapter.blocks or chapter.complete]


def _write_chapter(core: Core, home: Home, chapter: Chapter, rest: Callable[[], object]) -> None:
    """Write blocks where they belong. At fixed places: doing it twice changes nothing."""
    if not chapter.blocks:
        return
    data = _open(home.disk, home.path(chapter.base, ".data"))
    try:
        for block, _ in chapter.blocks:
            _copy(core, block, data, rest)
        data.sync()
    finally:
        data.close()
    index = _open(home.disk, home.path(chapter.base, ".idx"))
    try:
        for block, entries in chapter.blocks:
            index.write((block.base - chapter.base) * idx.ENTRY_BYTES, entries)
        index.sync()
    finally:
        index.close()


def _copy(core: Core, block: Block, data: File, rest: Callable[[], object]) -> None:
    """Byte for byte, some at a time: what lies in the WAL is not brought into memory as a whole. A frame that does not
    verify there is copied as it is: reads of it raise Corrupt, and the frames around it are saved."""
    at, size, held = block.origin, 0, list[Buffer]()
    for piece, problem in block.pieces():
        if problem is not None:
            core.spoiled(*problem)
        held.append(piece)
        size += len(piece)
        if size >= _COPY_BYTES:
            data.write_pieces(at, held)
            at, size, held = at + size, 0, []
            rest()
    if held:
        data.write_pieces(at, held)


def _open(disk: Disk, path: str) -> File:
    return disk.open(path, "create" if disk.stat(path) is None else "write")


def _seal(core: Core, home: Home, chapter: Chapter, rest: Callable[[], object]) -> bool:
    """Cut what an interrupted attempt left after the end, verify every frame, and write the footer. False: a frame does
    not verify, and there is no footer."""
    size, stop = _extent(chapter)
    path = home.path(chapter.base, ".data")
    if chapter.segment is not None and chapter.segment.unproven:
        return False
    for suffix, length in ((".data", size), (".idx", (stop - chapter.base) * idx.ENTRY_BYTES)):
        file = home.disk.open(home.path(chapter.base, suffix), "write")
        try:
            if file.size() > length:
                file.cut(length)
                file.sync()
        finally:
            file.close()
    home.forget(chapter.base)
    data, entries = home.open(chapter.base)
    content = data.fetch(0, size)
    fault = "it is shorter than what was written" if len(content) < size else None
    fault = fault or _unverified(core.id, chapter.base, stop, content, entries, rest)
    if fault is not None:
        made = _index(core.id, chapter.base, stop, content)
        if made is None:
            if remove_if_there(home.disk, home.path(chapter.base, ".foot")):
                home.disk.sync_dir(home.directory)
            core.spoiled(path, f"{fault}; the segment was sealed without a footer")
            return False
        replace(home.disk, home.path(chapter.base, ".idx"), made)  # the data is whole: only its index was not
        home.forget(chapter.base)
        entries = made
    foot = footer.encode(footer.make(content, entries, first_seq=chapter.base))
    _index_tags(home, chapter.base, stop, content, entries, foot)
    replace(home.disk, home.path(chapter.base, ".foot"), foot)
    rest()
    return True


def _unverified(
    topic_id: int, base: int, stop: int, content: Buffer, entries: Buffer, rest: Callable[[], object]
) -> str | None:
    """What is wrong with the first frame that does not verify, is another topic's, or does not follow the one before;
    None: every byte of the data belongs to a frame that does, and the index names exactly these."""
    if len(entries) != (stop - base) * idx.ENTRY_BYTES:
        return f"its index has {len(entries)} bytes"
    if (said := idx.fault(idx.read(entries), len(content))) is not None:
        return f"its index: {said}"
    shape, seq = Shape(base, stop, Mapped(memoryview(content)), entries, [entries]), base
    last, end = -1, 0  # of the frame before
    while seq < stop:
        chunk = CODEC.read(shape, seq, stop, _COPY_BYTES)
        if chunk.fault is not None:
            return f"byte {chunk.fault.pos}: {chunk.fault.reason}"
        starts = chunk.rows.at[np.append(0, np.flatnonzero(np.diff(chunk.rows.at)) + 1)]
        heads = frame.headers(chunk.rows.buf, starts)
        if (heads["topic_id"] != topic_id).any():
            return "its frames are another topic's"
        low = int(idx.read(entries)["frame_offset"][seq - base]) - int(starts[0])
        begins, ends = starts + low, starts + low + heads["frame_len"].astype(np.int64) + 4
        # A batch may be read in two chunks: then its frame is met again.
        if begins[0] not in (end, last) or (begins[1:] != ends[:-1]).any():
            return f"byte {end}: bytes that are in no frame"
        seq, last, end = chunk.next_seq, int(begins[-1]), int(ends[-1])
        rest()
    return None if end == len(content) else f"byte {end}: bytes that are in no frame"


def _index(topic_id: int, base: int, stop: int, content: Buffer) -> bytes | None:
    """The index of a segment by its data alone; None where the data is not whole."""
    walk = scan.walk(content, above=base - 1)
    rows = walk.rows
    if walk.end != len(content) or len(rows) != stop - base or int(rows.seq[-1]) != stop - 1:
        return None
    starts = rows.at[np.append(0, np.flatnonzero(np.diff(rows.at)) + 1)]
    if (frame.headers(rows.buf, starts)["topic_id"] != topic_id).any():
        return None
    return idx.to_bytes(idx.entries(rows, base, stop, len(content)))


def _index_tags(home: Home, base: int, stop: int, data: Buffer, entries: Buffer, foot: bytes) -> None:
    """Write the tag index of a segment that is being sealed. Where a frame does not hold its checksum there is none:
    searches then scan the segment and say what is wrong with it."""
    if not (idx.read(entries)["flags"] & idx.HAS_TAG).any():
        return
    walk = scan.walk(data, above=base - 1)
    if walk.end == len(data) and len(walk.rows) == stop - base:
        write_sealed(home, base, foot, walk.rows)


def _extent(chapter: Chapter) -> tuple[int, int]:
    """Bytes of data and one past the last seq of a segment when its blocks are written."""
    if chapter.blocks:
        last = chapter.blocks[-1][0]
        return last.origin + last.size, last.stop
    assert chapter.segment is not None, "a segment without blocks has files"
    return chapter.segment.size, chapter.segment.stop


def _adopt(core: Core, home: Home, chapter: Chapter, *, unproven: bool) -> None:
    """The files have it: what was a block is a segment."""
    index, segment = core.index, chapter.segment
    written = [block for block, _ in chapter.blocks]
    if segment is None:
        first = written[0]
        segment = Segment(
            home, chapter.base, chapter.base, 0, live=0, live_bytes=0, first_ts=first.first_ts, last_ts=0, sealed=False
        )
        segment.mask(None)
        index.parts[index.parts.index(first)] = segment
    for block in written:
        segment.grow(block)
        if block in index.parts:
            index.parts.remove(block)
    segment.sealed = segment.sealed or chapter.complete
    segment.unproven = segment.unproven or unproven
    home.forget(chapter.base)


def _stock(core: Core, *, final: bool) -> TopicRow:
    """The row of a topic, its deletion vectors written. Segments that it no longer needs are in `core.discarded` until
    a manifest without them is saved."""
    home, index = core.shared.home(core.id), core.index
    with core.lock:
        obsolete = index.obsolete()
        gone = [
            part
            for part in index.parts
            if (part.segment if isinstance(part, Block) else part.base) in obsolete
            and (isinstance(part, Block) or part.sealed)
        ]
        index.forget(gone)
        core.discarded += [part.base for part in gone if isinstance(part, Segment)]
        segments = [part for part in index.parts if isinstance(part, Segment)]
        vectors = [(segment, segment.vector()) for segment in segments if segment.unsaved]
        for segment, _ in vectors:
            segment.unsaved = False
        # What came while this topic was written is in the WAL only: the row must not claim it, nor anything about it.
        fresh = [part.base for part in index.parts if isinstance(part, Block) and part.kept and part.stop > part.base]
        frozen = core.frozen
        head = min([*(base - 1 for base in fresh), index.head, *([frozen.head] if frozen else [])])
        marks = index.marks.clamped(head)
        row = TopicRow(
            core.id,
            core.name,
            core.config.to_json(),
            head,
            head if final else max(core.ceiling, head),
            min(index.earliest, head + 1),
            marks.cap,
            marks.ttl,
            index.last_ts,
            tuple(_row(segment) for segment in segments),
            tuple((lo, min(hi, head + 1)) for lo, hi in index.ghosts if lo <= head),
            marks.source,
            fed=frozen.fed if frozen else None,
            hops=frozen.hops if frozen else (),
            queue=_queue(core, final=final),
            consumers=groups.rows(core),
            guarded=core.guarded,
            removals=core.removals,
            writers=numbers.rows(core.numbered, head),
            wired=frozen.wired if frozen else core.wired,
            trims=tuple((lo, min(hi, head + 1)) for lo, hi in index.trims if lo <= head),
        )
        kept = core.window.kept()
    if kept:
        window_ms = core.config.idempotency_window_ms
        row = msgspec.structs.replace(row, keys=idempotency.rows(kept, head, core.shared.clock, window_ms))
    try:
        if vectors:  # replay may find them without the deletes that made them
            retention.harden_all([core])  # also what caps took while files were written
            core.shard.sync()  # a floor of class memory does not wait for that
            core.shard.check()
            core.shared.ledger.settle()
        for segment, content in vectors:
            replace(core.shared.disk, home.path(segment.base, ".del"), content)
    except BaseException:
        with core.lock:
            for segment, _ in vectors:
                segment.unsaved = True
        raise
    for segment in (part for part in gone if isinstance(part, Segment)):
        home.forget(segment.base)
        core.shared.tags.drop(core.id, segment.base)
    return row


def _queue(core: Core, *, final: bool) -> QueueRow | None:
    if core.queue is not None:
        return core.queue.row(final=final)
    return None if core.projection is None else core.projection.row()


def _row(segment: Segment) -> SegmentRow:
    return SegmentRow(
        segment.base,
        segment.stop,
        segment.size,
        segment.live,
        segment.live_bytes,
        segment.first_ts,
        segment.last_ts,
        segment.sealed,
        segment.unproven,
    )


# ── all topics ────────────────────────────────────────────────────────────────────────────────────


def _mark(shared: Shared, rows: Iterable[TopicRow]) -> None:
    marks = [
        TopicMark(
            row.id,
            row.head,
            max(row.cap_mark, row.ttl_mark, row.source_mark) + 1,
            row.earliest,
            row.earliest,
            row.segments[-1].base if row.segments else 0,
            row.segments[-1].size if row.segments else 0,
        )
        for row in rows
    ]
    tokens = []
    for shard in shared.shards:
        mine = tuple(mark for mark in marks if shared.shard(mark.topic_id) is shard)
        at: Position = shard.synced()
        commit = Mark(shard, CheckpointMark(wal_first=at.first, wal_pos=at.pos, topics=mine), shared.now_ms())
        shard.submit(commit)
        tokens.append(commit.token)
    for token in tokens:
        token.wait()


def _forget(shared: Shared, history: History, before: Sequence[GroupRow], *, complete: bool) -> None:
    """Remove what the manifest before the newest did not need either. Failing here loses nothing: it is tried again,
    by the next checkpoint or by the next start."""
    manifest.prune(shared.disk, shared.root)
    removed: set[str] = set()
    touched: set[str] = set()
    try:
        for path in history.stale:
            if remove_if_there(shared.disk, path):
                touched.add(path.rpartition("/")[0])
            removed.add(path)
    finally:
        history.stale = [path for path in history.stale if path not in removed]
    for directory in sorted(touched):
        if shared.disk.stat(directory) is not None:  # else its topic was dropped
            shared.disk.sync_dir(directory)
    for row in before:
        trim(shared.disk, join(shared.root, WAL), row.key, row.first)
    if complete:
        history.strangers = tuple(row for row in history.strangers if row not in before)
        history.moved = bool(history.strangers)
