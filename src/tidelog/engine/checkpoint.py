"""[shell] Checkpoint: what only the WAL has is copied into segments, and then the WAL may forget it.

    1  where the WAL stands, group by group: everything before has been published
       and every floor is made durable: deletion vectors may be found by a replay that begins before the deletes
    2  frames → segment files, byte for byte: data, sync, index, sync; footers for what is complete
    3  deletion vectors, each replaced as a whole
       the ledger has rows for every removal that 3 and 5 reflect: replay may not find it again
    4  a CheckpointMark into every shard, synced
    5  the manifest, replaced as a whole: from here on it is true
    6  what neither of the two manifests needs is removed

Any error before 5 leaves the manifest before in force, and it is complete: nothing it names was
changed, only added to. Writers go on throughout; each topic is locked to take stock, never for I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tidelog.disk.atomic import remove_if_there, replace
from tidelog.disk.seam import Disk, File, join
from tidelog.engine import groups, manifest, numbers, retention
from tidelog.engine.block import Block
from tidelog.engine.core import WAL, Core, Shared
from tidelog.engine.home import Home
from tidelog.engine.manifest import GroupRow, Manifest, QueueRow, RouterRow, SegmentRow, TopicRow
from tidelog.engine.parts import Segment
from tidelog.engine.routing import holding
from tidelog.engine.tags import write_sealed
from tidelog.errors import Error
from tidelog.formats import bodies, footer, frame, idx, scan
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
    strangers: tuple[GroupRow, ...] = ()  # groups of an earlier shard count, replayed and not written any more
    moved: bool = False  # a checkpoint is needed before anything is written: replay must not begin where it did


def checkpoint(
    shared: Shared,
    registry: Callable[[], tuple[Sequence[Core], int]],
    history: History,
    *,
    final: bool,
    rest: Callable[[], object] = lambda: None,
) -> None:
    """Make a checkpoint. `final`: nobody writes any more, so no seq needs to stay reserved. `rest` is called after each
    step of the copying, with no lock held."""
    positions = [shard.position() for shard in shared.shards]
    # Asked behind the positions: a topic that is dropped from here on has its frame where replay begins.
    cores, next_topic_id = registry()
    retention.harden_all(cores)
    rows: list[TopicRow] = []
    routers: list[RouterRow] = []
    doomed: list[str] = []
    for core in cores:
        try:
            _write(core, rest)
            row, gone = _stock(core, final=final)
        except OSError:
            if not core.dropped:
                raise
            continue  # its files went while they were written: its last frame is where replay begins
        rows.append(row)
        routers += core.frozen.routers if core.frozen else ()
        doomed += gone
    rows.sort(key=lambda row: row.id)
    shared.ledger.settle()
    _mark(shared, rows)
    keys = names.keys(len(shared.shards))
    begin = tuple(GroupRow(key, at.first, at.pos) for key, at in zip(keys, positions, strict=True))
    made = Manifest(tuple(rows), (*begin, *history.strangers), next_topic_id, tuple(routers))
    manifest.save(shared.disk, shared.root, history.number + 1, made)
    for core in cores:
        holding.saved(core)
    before, history.groups = history.groups, made.groups
    history.number += 1
    _forget(shared, history, before)
    history.doomed = doomed


# ── one topic: frames into files ──────────────────────────────────────────────────────────────────


def _write(core: Core, rest: Callable[[], object]) -> None:
    with core.lock:
        core.frozen = None
        if core.dropped:
            return
        holding.freeze(core)
        chapters = _chapters(core)
    home = core.shared.home(core.id)
    if chapters:
        core.shared.disk.make_dir(home.directory)
    for chapter in chapters:
        _write_chapter(home, chapter, rest)
    if any(chapter.segment is None for chapter in chapters):  # its names may be an earlier attempt's, never synced
        core.shared.disk.sync_dir(home.directory)
    for chapter in chapters:
        if chapter.complete:
            _seal(home, chapter)
            rest()
    with core.lock:
        for chapter in chapters:
            _adopt(core, home, chapter)


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


def _write_chapter(home: Home, chapter: Chapter, rest: Callable[[], object]) -> None:
    """Write blocks where they belong. At fixed places: doing it twice changes nothing."""
    if not chapter.blocks:
        return
    data = _open(home.disk, home.path(chapter.base, ".data"))
    try:
        for block, _ in chapter.blocks:
            _copy(block, data, rest)
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


def _copy(block: Block, data: File, rest: Callable[[], object]) -> None:
    """Byte for byte, some at a time: what lies in the WAL is not brought into memory as a whole."""
    at, size, held = block.origin, 0, list[Buffer]()
    for piece in block.pieces():
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


def _seal(home: Home, chapter: Chapter) -> None:
    """Cut what an interrupted attempt left behind the end, and vouch for the whole."""
    size, stop = _extent(chapter)
    for suffix, length in ((".data", size), (".idx", (stop - chapter.base) * idx.ENTRY_BYTES)):
        path = home.path(chapter.base, suffix)
        file = home.disk.open(path, "write")
        try:
            if file.size() != length:
                file.cut(length)
                file.sync()
        finally:
            file.close()
    home.forget(chapter.base)
    data, entries = home.open(chapter.base)
    content = data.fetch(0, size)
    foot = footer.encode(footer.make(content, entries, first_seq=chapter.base))
    _index_tags(home, chapter.base, stop, content, entries, foot)
    replace(home.disk, home.path(chapter.base, ".foot"), foot)


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


def _adopt(core: Core, home: Home, chapter: Chapter) -> None:
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
    home.forget(chapter.base)


def _stock(core: Core, *, final: bool) -> tuple[TopicRow, list[str]]:
    """The row of a topic, its deletion vectors written, and the files it no longer needs."""
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
            tuple(index.ghosts),
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
    dropped = [part for part in gone if isinstance(part, Segment)]
    for segment in dropped:
        home.forget(segment.base)
        core.shared.tags.drop(core.id, segment.base)
    return row, [home.path(segment.base, suffix) for segment in dropped for suffix in SUFFIXES]


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


def _forget(shared: Shared, history: History, before: Sequence[GroupRow]) -> None:
    """Remove what the manifest before the newest did not need either. Failing here loses nothing: it is tried again,
    by the next checkpoint or by the next start."""
    manifest.prune(shared.disk, shared.root)
    touched = {path.rpartition("/")[0] for path in history.doomed if remove_if_there(shared.disk, path)}
    for directory in sorted(touched):
        shared.disk.sync_dir(directory)
    for row in before:
        trim(shared.disk, join(shared.root, WAL), row.key, row.first)
    history.strangers = tuple(row for row in history.strangers if row not in before)
    history.moved = bool(history.strangers)
