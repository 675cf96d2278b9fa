"""Make a backup of a running database. `snapshot` explains which bytes are copied, `backup_target` where they go.

The steps: the marker of a running backup; the snapshot; the WAL, which the writer reuses soonest; deletion vectors;
channels; segments; the manifest; the marker is removed. Every file is read once and verified on the way: frames of the
WAL by their checksums, sealed segments by their footers. Linked files are read for their checksum and not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from secrets import token_bytes
from threading import Event
from typing import Final, NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest, xxh3_128

from tidelog.disk.backup_store import DirectoryStore
from tidelog.disk.durability import read_file, replace_file
from tidelog.disk.interface import File, join
from tidelog.disk.segment_store import RangeFile
from tidelog.engine.backup_target import (
    PIECE_BYTES,
    PRUNE_KEY,
    RUNNING_SUFFIX,
    BackupInfo,
    BackupTarget,
    TopicHeads,
    describe_backup,
    ids_of,
    manifest_key,
    no_progress,
    running_key,
)
from tidelog.engine.cold_reader import open_data_file
from tidelog.engine.context import EngineContext
from tidelog.engine.engine import Engine
from tidelog.engine.manifest import DATABASE_ID_FILE, MANIFEST_DIR, ColdRow, encode_manifest
from tidelog.engine.results import Progress
from tidelog.engine.snapshot import EngineSnapshot, SegmentFile, WalExtent
from tidelog.errors import BadInput, Busy, Corrupt
from tidelog.formats import backup_manifest, sealed_segment, segment_index
from tidelog.formats.backup_manifest import (
    LABEL_KEY,
    OBJECTS_PREFIX,
    BackupFile,
    BackupManifest,
    ShardPosition,
    TopicPosition,
    object_key,
    object_prefix,
)
from tidelog.formats.cold_object import BLOCK_BYTES
from tidelog.version import __version__
from tidelog.wal import paths
from tidelog.wal.recovery import read_frames

COPYING: Final = "copying files"


class SourceFile(NamedTuple):
    """A file that another part of the database adds to a backup."""

    path: str  # from the data directory on
    content: bytes | File  # a file is open, and is read up to `size`
    size: int


def create_backup(
    engine: Engine,
    address: str,
    *,
    incremental: bool = False,
    link: bool = True,
    accept_damage: bool = False,
    rate_bytes_per_s: int | None = None,
    progress: Progress = no_progress,
    list_channels: Callable[[], Iterator[list[SourceFile]]] = lambda: iter(()),
    random_bytes: Callable[[int], bytes] = token_bytes,
    pause: Callable[[float], object] | None = None,
) -> BackupInfo:
    """Back up a running engine. When it raises, the target has no new backup and the engine is as before.

    Args:
        incremental: read and store only what changed since the newest backup of the target.
        link: link files that never change where engine and target share a file system, instead of copying them.
        accept_damage: back up files that do not verify, and name them in the result; otherwise Corrupt is raised.
        rate_bytes_per_s: read no more than this, so that writers have the rest of the disk; None: as fast as it goes.
        list_channels: yields the files of one channel at a time, after the snapshot of the topics was taken.
    """
    context = engine.context
    if rate_bytes_per_s is not None and rate_bytes_per_s < 1:
        raise BadInput(f"a rate is at least one byte a second, not {rate_bytes_per_s}; nothing was done")
    target = BackupTarget.open(address, context.disk)
    _check_target_outside(context, target)
    with engine.exclusive_backup():
        known = target.database_id()
        database_id = load_database_id(context, random_bytes)
        if known is not None and known != database_id:
            raise BadInput(
                f"{target.store.address} holds backups of another database ({known}, this one is {database_id}); "
                "nothing was changed, choose another directory or prefix"
            )
        pace = _Pace(context, rate_bytes_per_s, pause or Event().wait)
        creation = _Creation(engine, target, database_id, link, accept_damage, progress, random_bytes, pace)
        return creation.run(incremental, list_channels)


def _check_target_outside(context: EngineContext, target: BackupTarget) -> None:
    if not isinstance(target.store, DirectoryStore):
        return
    root, place = context.disk.resolve(context.root), target.store.address
    if f"{place}/".startswith(f"{root.rstrip('/')}/"):
        raise BadInput(
            f"{place} is in the data directory {context.root}; nothing was changed, choose a place outside of it"
        )


def load_database_id(context: EngineContext, random_bytes: Callable[[int], bytes] = token_bytes) -> str:
    """The id of a database, which its first backup assigns."""
    path = join(join(context.root, MANIFEST_DIR), DATABASE_ID_FILE)
    content = read_file(context.disk, path)
    if content is not None and len(content) == 33 and content.endswith(b"\n"):
        return content[:32].decode("ascii", "replace")
    database_id = random_bytes(16).hex()
    replace_file(context.disk, path, f"{database_id}\n".encode())
    return database_id


class _Pace:
    """Keeps the copying at a rate."""

    def __init__(self, context: EngineContext, rate: int | None, pause: Callable[[float], object]) -> None:
        self._now_us, self._rate, self._pause = context.clock.monotonic_us, rate, pause
        self._started_us, self._bytes = self._now_us(), 0

    def wait_after(self, size: int) -> None:
        """Wait until as much time has passed as the bytes so far take at the rate."""
        if self._rate is None:
            return
        self._bytes += size
        ahead_us = self._bytes * 1_000_000 // self._rate - (self._now_us() - self._started_us)
        if ahead_us > 0:
            self._pause(ahead_us / 1_000_000)


class _Creation:
    """One backup that is being made."""

    def __init__(
        self,
        engine: Engine,
        target: BackupTarget,
        database_id: str,
        link: bool,
        accept_damage: bool,
        progress: Progress,
        random_bytes: Callable[[int], bytes],
        pace: _Pace,
    ) -> None:
        self._pace = pace
        self._engine, self._target, self._store, self._database_id = engine, target, target.store, database_id
        self._link, self._accept_damage, self._progress, self._random_bytes = (
            link,
            accept_damage,
            progress,
            random_bytes,
        )
        self._disk, self._root, self._cold = engine.context.disk, engine.context.root, engine.context.cold
        self._files: list[BackupFile] = []
        self._stored: dict[str, int] = {}  # objects of the target that need not be written again
        self._parent: dict[str, BackupFile] = {}
        self._stored_bytes = self._done = self._total = 0
        self._damaged: list[str] = []

    def run(self, incremental: bool, list_channels: Callable[[], Iterator[list[SourceFile]]]) -> BackupInfo:
        context, store = self._engine.context, self._store
        try:
            backup_id = new_backup_id(context.now_ms(), self._target.ids(), self._random_bytes)
            self._announce(backup_id)
            parent = self._target.newest() if incremental else None
            if parent is not None:
                self._parent = {file.path: file for file in parent.files}
                self._stored = store.list(OBJECTS_PREFIX)
            snapshot = self._engine.take_snapshot()
            try:
                topics = self._copy_engine(snapshot, list_channels)
            finally:
                snapshot.release()
            channels = {file.path.split("/")[1] for file in self._files if file.path.startswith("channels/")}
            manifest = BackupManifest(
                id=backup_id,
                database_id=self._database_id,
                created_ms=snapshot.now_ms,
                version=__version__,
                parent=parent.id if parent is not None else "",
                shards=tuple(ShardPosition(key, *position) for key, position in snapshot.positions.items()),
                topics=topics,
                engine_manifest=encode_manifest(snapshot.manifest),
                files=tuple(self._files),
                stored_bytes=self._stored_bytes,
                damaged=tuple(self._damaged),
                channels=len(channels),
            )
            store.flush()  # every object, before the manifest that lists it
            store.put(manifest_key(backup_id), [backup_manifest.encode_backup(manifest)])
            store.flush()
            store.delete(running_key(backup_id))
            store.flush()
        except OSError as error:
            raise store.wrap_error(error, "writing a backup") from error
        return describe_backup(manifest)

    def _announce(self, backup_id: str) -> None:
        """Write the marker, then look for a prune. Markers of this database's earlier backups are stale: one process
        writes a database, and it makes one backup at a time."""
        store = self._store
        if store.length(LABEL_KEY) is None:
            store.put(LABEL_KEY, [backup_manifest.encode_label(self._database_id)])
        for stale in ids_of(self._target.list_keys(), RUNNING_SUFFIX):
            store.delete(running_key(stale))
        store.put(running_key(backup_id), [b""])
        store.flush()
        if store.length(PRUNE_KEY) is not None:
            store.delete(running_key(backup_id))
            raise Busy(
                f"{store.address}: a prune runs or was interrupted; no backup was made, run `tidelog backup prune` "
                "again and retry"
            )

    # ── files ─────────────────────────────────────────────────────────────────────────────────

    def _copy_engine(
        self, snapshot: EngineSnapshot, list_channels: Callable[[], Iterator[list[SourceFile]]]
    ) -> tuple[TopicPosition, ...]:
        rows = snapshot.rows()
        self._total = sum(extent.hi - extent.lo for extent in snapshot.wal)
        self._total += sum(
            segment.size + (segment.stop - segment.base) * segment_index.ENTRY_BYTES
            for row in rows
            for segment in row.segments
        )
        heads = TopicHeads(snapshot.manifest, snapshot.live)
        for extent in snapshot.wal:
            self._copy_wal(extent, heads)
        snapshot.release_wal()
        for row in rows:
            for segment in row.segments:
                path, content = snapshot.deletions(row, segment)
                if content is not None:
                    self._put_bytes(path, content)
        for files in list_channels():
            for source in files:
                self._copy_source(source)
        for row in rows:
            for segment in row.segments:
                self._copy_segment(snapshot.segment_files(row, segment))
        for topic_id in sorted(snapshot.live):
            for path in snapshot.blob_paths(topic_id):
                self._copy_blob(path)
        return heads.positions()

    def _copy_wal(self, extent: WalExtent, heads: TopicHeads) -> None:
        """Verify the frames of an extent, then copy it without the zeros at its end."""
        path = f"{extent.directory}/{paths.file_name(extent.file_number)}"
        end = extent.lo
        for window in read_frames(self._disk, join(self._root, path), extent.file_number, extent.lo, extent.hi):
            heads.add(window)
            last = int(window.frame_pos[-1])
            end = window.file_offset + last + 4 + int(window.headers["frame_len"][-1])
        file = self._disk.open(join(self._root, path))
        try:
            if end < extent.hi and (extent.is_last or _has_bytes(file, end, extent.hi)):
                self._report_damage(path, end, "the frames end before the position of the backup")
                end = extent.hi
            if end > extent.lo or extent.lo or extent.is_last:
                self._put_file(path, file, extent.lo, end)
        finally:
            file.close()
        self._done += extent.hi - end

    def _copy_segment(self, files: list[SegmentFile]) -> None:
        """Copy the files of one segment. Where the footer is the same as in the parent, so are data and index."""
        footer: sealed_segment.Footer | None = None
        is_known = False
        for source in files:
            path = join(self._root, source.path)
            size = source.size
            if size is None:
                stat = self._disk.stat(path)
                size = stat.size if stat is not None else None
            if size is None:
                if source.is_required:
                    self._report_damage(source.path, 0, "the file is missing")
                continue
            known = self._parent.get(source.path)
            if is_known and known is not None and known.size == size and self._has_object(known):
                self._files.append(known)
                self._advance(size)
                continue
            try:
                file = self._disk.open(path)
            except FileNotFoundError:
                if source.cold is None:
                    if source.is_required:
                        self._report_damage(source.path, 0, "the file is missing")
                    continue
                if self._is_lost(source, source.cold):
                    continue
                file = open_data_file(self._cold, source.cold, size)
            try:
                if file.size() < size:
                    self._report_damage(source.path, file.size(), f"it ends there, {size} bytes were written")
                    size = file.size()
                if source.suffix == ".foot":
                    content = file.read(0, size)
                    footer = self._decode_footer(source.path, content)
                    copied = self._put_bytes(source.path, content, link=source.is_final)
                    is_known = footer is not None and source.is_final and known == copied
                else:
                    is_local = not isinstance(file, RangeFile)
                    self._put_file(source.path, file, 0, size, link=source.is_final and is_local, footer=footer)
            finally:
                file.close()

    def _is_lost(self, source: SegmentFile, row: ColdRow) -> bool:
        """Whether the object of a segment cannot be read, which is reported as damage."""
        try:
            for lo in range(0, source.size or 0, BLOCK_BYTES) if self._accept_damage else ():
                self._cold.read(row, source.size or 0, lo, lo + 1)
        except Corrupt as error:
            self._report_damage(source.path, 0, f"its object does not read: {error}")
            return True
        return False

    def _copy_blob(self, path: str) -> None:
        """Copy the blob of a large record, unless the parent has it: the name of a blob is never used again."""
        try:
            file = self._disk.open(join(self._root, path))
        except FileNotFoundError:
            return  # of a record that was not written after all
        try:
            known, size = self._parent.get(path), file.size()
            if known is not None and known.size == size and self._has_object(known):
                self._files.append(known)
            else:
                self._put_file(path, file, 0, size, link=True)
        finally:
            file.close()

    def _decode_footer(self, path: str, content: bytes) -> sealed_segment.Footer | None:
        try:
            return sealed_segment.decode_footer(content, path)
        except Corrupt as error:
            self._report_damage(path, error.pos, error.reason)
            return None

    def _copy_source(self, source: SourceFile) -> None:
        if isinstance(source.content, bytes):
            self._put_bytes(source.path, source.content)
            return
        try:
            self._put_file(source.path, source.content, 0, source.size)
        finally:
            source.content.close()

    # ── objects ───────────────────────────────────────────────────────────────────────────────

    def _put_bytes(self, path: str, content: bytes, *, link: bool = False) -> BackupFile:
        entry = BackupFile(path, len(content), xxh3_128(content).hexdigest())

        def store() -> None:
            key = object_key(entry)
            if not (link and self._link and self._store.link(key, self._disk, join(self._root, path))):
                self._put(key, [content])

        self._store_object(entry, store)
        return entry

    def _put(self, key: str, pieces: Iterable[bytes]) -> None:
        if isinstance(self._store, DirectoryStore):
            self._store.put_then_name(key, pieces, lambda: "")
        else:
            self._store.put(key, pieces)

    def _put_file(
        self,
        path: str,
        file: File,
        lo: int,
        hi: int,
        *,
        link: bool = False,
        footer: sealed_segment.Footer | None = None,
    ) -> None:
        """Read a file once for its checksum; store it by a link, or by reading it again."""
        digest = xxh3_128()

        def pieces() -> Iterator[bytes]:
            for piece in self._verified_pieces(path, file, lo, hi, footer):
                digest.update(piece)
                self._advance(len(piece))
                yield piece

        can_link = link and self._link and lo == 0 and file.size() == hi
        if not can_link and isinstance(self._store, DirectoryStore) and path not in self._parent:
            self._store.put_then_name(object_prefix(path), pieces(), lambda: f".{digest.hexdigest()}")
            self._stored_bytes += hi - lo
            self._files.append(BackupFile(path, hi - lo, digest.hexdigest(), lo))
            return
        for _ in pieces():
            pass
        entry = BackupFile(path, hi - lo, digest.hexdigest(), lo)

        def store() -> None:
            key = object_key(entry)
            if not (can_link and self._store.link(key, self._disk, join(self._root, path))):
                self._put(key, _pieces(file, lo, hi))

        self._store_object(entry, store)

    def _verified_pieces(
        self, path: str, file: File, lo: int, hi: int, footer: sealed_segment.Footer | None
    ) -> Iterator[bytes]:
        """The bytes of a file; those of a sealed segment are compared with its footer."""
        if footer is None or not path.endswith((".data", ".idx")):
            yield from _pieces(file, lo, hi)
            return
        is_data, index_digest = path.endswith(".data"), xxh3_64()
        for number, piece in enumerate(_pieces(file, lo, hi, footer.chunk_bytes if is_data else PIECE_BYTES)):
            if not is_data:
                index_digest.update(piece)
            elif number >= len(footer.chunks) or xxh3_64_intdigest(piece) != footer.chunks[number]:
                pos = number * footer.chunk_bytes
                self._report_damage(path, pos, "the bytes do not match the footer of their segment")
            yield piece
        if not is_data and index_digest.intdigest() != footer.idx_xxh3:
            self._report_damage(path, 0, "the index does not match the footer of its segment")

    def _store_object(self, entry: BackupFile, store: Callable[[], None]) -> None:
        if not self._has_object(entry):
            store()
            self._stored_bytes += entry.size
        self._files.append(entry)

    def _has_object(self, entry: BackupFile) -> bool:
        return self._stored.get(object_key(entry)) == entry.size

    def _advance(self, size: int) -> None:
        context = self._engine.context
        if context.closed:
            raise context.closed_error("no backup was made")
        self._done += size
        self._pace.wait_after(size)
        self._progress(COPYING, min(self._done, self._total), self._total)

    def _report_damage(self, path: str, pos: int, reason: str) -> None:
        if not self._accept_damage:
            step = "no backup was made; repair it, or make a backup with accept_damage"
            raise Corrupt(join(self._root, path), pos=pos, reason=reason, next_step=step)
        self._damaged.append(f"{path} at byte {pos}: {reason}")


def _pieces(file: File, lo: int, hi: int, step: int = PIECE_BYTES) -> Iterator[bytes]:
    """Bytes [lo, hi) of a file. Raises OSError where it has become shorter."""
    for pos in range(lo, hi, step):
        wanted = min(step, hi - pos)
        piece = file.read(pos, wanted)
        if len(piece) != wanted:
            raise OSError(5, "the file became shorter while it was read", file.path)
        yield piece


def _has_bytes(file: File, lo: int, hi: int) -> bool:
    """Whether a range has bytes other than zero."""
    return any(piece.strip(b"\0") for piece in _pieces(file, lo, hi))


def new_backup_id(now_ms: int, known: list[str], random_bytes: Callable[[int], bytes]) -> str:
    """An id that sorts after the known ones: by time, unless the clock was set back."""
    newest = max(known, default="")
    while (start := _format_time(now_ms)) <= newest[: len(start)]:
        now_ms = max(now_ms + 1, _parse_time(newest) + 1)
    return f"{start}-{random_bytes(3).hex()}"


def _format_time(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms // 1000, UTC):%Y%m%dT%H%M%S}{ms % 1000:03d}Z"


def _parse_time(backup_id: str) -> int:
    moment = datetime.strptime(backup_id[:15], "%Y%m%dT%H%M%S").replace(tzinfo=UTC)
    return int(moment.timestamp()) * 1000 + int(backup_id[15:18])
