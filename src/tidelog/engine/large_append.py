"""Append a record from a stream, in constant memory.

    chunks ─► memory up to LARGE_RECORD_BYTES ─► an ordinary record
                └ more ─► spill file, hashed on the way ─► synced, renamed ─► a LargeRecord frame in the WAL

Nothing is visible and no seq is assigned before the stream is complete: a stream that breaks off, exceeds the topic's
`max_record_bytes` or meets a disk error is removed. The blob is durable before its frame is written, in every class but
`ephemeral`, which has no files: there a streamed record is bounded by `record_bytes_max`.

A frame that was handed to the WAL owns its blob, even if the commit fails: whether the frame reached the disk may be
unknown, so the blob goes the way of removed records (`blobs`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from threading import RLock
from typing import Any, Final, TypeVar

from tidelog.commitlog.storage import guard_stream, guard_stream_async
from tidelog.disk.durability import DISK_FULL_ERRNOS, remove_if_exists, sync_directory, sync_file
from tidelog.disk.interface import File
from tidelog.disk.process import DEFER_SIGNALS
from tidelog.engine import append, batch_encoder, blobs
from tidelog.engine.batch_encoder import Batch, LargeBatch
from tidelog.engine.large_read import BlobReader
from tidelog.engine.results import Appended
from tidelog.engine.topic_state import TopicState
from tidelog.errors import BadInput, Corrupt, DiskFull, TooLarge, WriteFailed
from tidelog.formats import large_record
from tidelog.formats.large_record import BLOB_HEADER_BYTES, LENGTH_MAX, BlobHasher, BlobRef, encode_blob_header
from tidelog.formats.rows import Rows
from tidelog.types import Buffer
from tidelog.wal import CommitFuture

LARGE_RECORD_BYTES: Final = 256 << 10  # more is stored as a blob: one frame stays below the target of a batch's
CHUNK_BYTES: Final = large_record.CHUNK_BYTES  # of a new blob: each has a checksum
_WRITE_BYTES: Final = 256 << 10  # smaller chunks are joined before they are written
T = TypeVar("T")


class BlobWriter:
    """A blob that is being written: `write`, then `commit`; or `discard`. Not thread-safe."""

    def __init__(self, topic: TopicState) -> None:
        context = topic.context
        self._topic, self._disk, self._id = topic, context.disk, context.blob_ids.next()
        self._spill = blobs.spill_path(topic.directory, self._id)
        self._hasher, self._buffer, self._pos = BlobHasher(CHUNK_BYTES), bytearray(), BLOB_HEADER_BYTES
        self._file: File | None = None
        self._path: str | None = None  # where it is; None: nowhere
        with self._disk_errors("creating its file"):
            self._disk.make_dir(blobs.blobs_directory(topic.directory))
            self._file = self._disk.open(self._spill, "create")
            self._path = self._spill
            self._file.write(0, encode_blob_header(CHUNK_BYTES))

    @property
    def length(self) -> int:
        return self._hasher.length + len(self._buffer)

    def write(self, chunk: Buffer) -> None:
        """Add bytes. On an error the file is removed."""
        view = memoryview(chunk)
        if len(self._buffer) + len(view) < _WRITE_BYTES:
            self._buffer += view
            return
        with self._disk_errors("writing"):
            self._flush()
            self._write(view)

    def _flush(self) -> None:
        if self._buffer:
            self._write(memoryview(self._buffer))
            self._buffer = bytearray()

    def _write(self, view: memoryview) -> None:
        assert self._file is not None, "discarded"
        for start in range(0, len(view), 1 << 20):  # hashed while it is in the processor's cache
            piece = view[start : start + (1 << 20)]
            self._file.write(self._pos, piece)
            self._hasher.update(piece)
            self._pos += len(piece)

    def commit(self) -> BlobRef:
        """Make the blob durable under its name."""
        with self._disk_errors("syncing"):
            self._flush()
            assert self._file is not None, "discarded"
            ref, sums = self._hasher.finish(self._id)
            self._file.write(self._pos, sums)
            sync_file(self._file)
            self._close()
            path = blobs.blob_path(self._topic.directory, self._id)
            self._disk.rename(self._spill, path)
            self._path = path
            sync_directory(self._disk, blobs.blobs_directory(self._topic.directory))
            return ref

    def discard(self) -> None:
        """Remove the file. Does nothing when there is none, or `keep` was called."""
        self._close()
        path, self._path = self._path, None
        if path is not None:
            with suppress(OSError):  # the next start removes it
                remove_if_exists(self._disk, path)

    def keep(self) -> None:
        """Leave the file: a frame names it."""
        self._path = None

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    @contextmanager
    def _disk_errors(self, step: str) -> Iterator[None]:
        """Remove the file after an error, and raise an error of the disk as one of ours."""
        try:
            yield
        except OSError as error:
            self.discard()
            self._topic.check_open()  # its directory goes when it is dropped
            name = self._topic.name
            if error.errno in DISK_FULL_ERRNOS:
                raise DiskFull(
                    f"{name}: no space left on the device while {step} a large record; nothing was written, free space "
                    "and retry"
                ) from error
            raise WriteFailed(
                f"{name}: {step} a large record failed ({error}); nothing was written, repair the disk and retry"
            ) from error
        except BaseException:
            self.discard()
            raise


def copy_blob(source: TopicState, ref: BlobRef, dest: TopicState) -> tuple[BlobRef, BlobWriter]:
    """Copy a blob to another topic, verifying every chunk; it is durable on return. The caller keeps or discards it.
    Raises Corrupt where the source is damaged, FileNotFoundError where it was removed."""
    reader = BlobReader(source.context.disk, blobs.blob_path(source.directory, ref.blob_id), ref)
    try:
        writer = BlobWriter(dest)
        try:
            for chunk in reader.chunks():
                writer.write(chunk)
            return writer.commit(), writer
        except BaseException:
            writer.discard()
            raise
    finally:
        reader.close()


def append_copy(source: TopicState, rows: Rows, dest: TopicState, names: Batch, *, durable: bool) -> Appended:
    """Append a copy of a large record, the only one of `rows`, with the tag, node and meta of `names`, which is one
    record. On return it is committed; `durable`: and durable."""
    if dest.is_ephemeral:
        raise BadInput(f"{dest.name} is ephemeral and keeps no large records; nothing was moved, change its durability")
    ref = large_record.read_ref(rows.buf, int(rows.frame_pos[0]))
    dest.context.enable_large_records()
    try:
        copied, blob = copy_blob(source, ref, dest)
    except FileNotFoundError:
        path = blobs.blob_path(source.directory, ref.blob_id)
        raise Corrupt(path, pos=0, reason="the file is missing") from None
    tag, node = (column if isinstance(column, bytes) else column[0] for column in (names.tag, names.node))
    batch = LargeBatch(copied, tag, node, names.metas[0] if names.metas else b"")
    with DEFER_SIGNALS:
        try:
            future = append.submit_write(dest, batch, durable=durable)
            future.try_commit()
        finally:
            if batch.is_staged:
                blob.keep()
            blob.discard()
    return future.wait()


def split_large(rows: Rows) -> list[tuple[int, int, bool]]:
    """Return the runs [lo, hi) of rows that are written together, and whether each is one large record."""
    if rows.blob_bytes is None:
        return [(0, len(rows), False)]
    runs: list[tuple[int, int, bool]] = []
    for place, size in enumerate(rows.blob_bytes.tolist()):
        if not size and runs and not runs[-1][2]:
            runs[-1] = (runs[-1][0], place + 1, False)
        else:
            runs.append((place, place + 1, size > 0))
    return runs


class StreamedAppend:
    """A record that is being streamed: `write` chunks, then `submit`; or `roll_back`. Calls block on the disk.
    Thread-safe: a roll-back waits for the call that another thread is in."""

    def __init__(
        self,
        topic: TopicState,
        *,
        tag: str | None = None,
        node: str | None = None,
        meta: dict[str, Any] | None = None,
        key: str | None = None,
        length: int | None = None,
        durable: bool = False,
    ) -> None:
        topic.check_writable()
        append.check_idempotency_key(key)
        for what, value in (("tag", tag), ("node", node), ("meta", meta)):
            if isinstance(value, list | tuple):
                raise BadInput(f"a streamed record has one {what}, not a list; nothing was written")
        limits = topic.context.limits
        self._names = batch_encoder.batch_from_texts(limits, [b""], False, tag, node, meta)
        self._topic, self._key, self._durable = topic, key, durable
        meta_bytes = self._names.weight
        in_memory = max(limits.record_bytes_max - meta_bytes, 0)
        self._memory_max = in_memory if topic.is_ephemeral else min(LARGE_RECORD_BYTES, in_memory)
        self.bytes_max = min(topic.config.max_record_bytes, LENGTH_MAX)
        if topic.is_ephemeral:
            self.bytes_max = min(self.bytes_max, in_memory)
        self._buffer, self._blob = bytearray(), None
        self._is_done, self._lock = False, RLock()
        if length is not None:
            self._check_length(length)
            append.check_capacity(topic, length + meta_bytes)

    _blob: BlobWriter | None

    @property
    def length(self) -> int:
        """The bytes of data so far."""
        return len(self._buffer) if self._blob is None else self._blob.length

    def write(self, chunk: Buffer) -> None:
        """Add bytes to the record. On an error it is rolled back."""
        try:
            view = memoryview(chunk).cast("B")
        except TypeError:
            self.roll_back()
            raise BadInput(
                f"a stream yields bytes, not {type(chunk).__name__}; it was rolled back and nothing was written"
            ) from None
        with self._lock:
            self._check_active()
            try:
                self._write(view)
            except BaseException:
                self.roll_back()
                raise

    def _write(self, view: memoryview) -> None:
        self._check_length(self.length + len(view))
        if self._blob is None and len(self._buffer) + len(view) > self._memory_max:
            self._topic.check_writable()
            self._topic.context.enable_large_records()
            self._blob = BlobWriter(self._topic)
            self._blob.write(self._buffer)
            self._buffer = bytearray()
        if self._blob is None:
            self._buffer += view
        else:
            self._blob.write(view)

    def _check_length(self, length: int) -> None:
        if length > self.bytes_max:
            what, step = "a streamed record", "raise max_record_bytes of the topic or send it in parts"
            if self._topic.is_ephemeral:
                what = "a streamed record of an ephemeral topic, which is kept in memory,"
                step = "send it in parts, or to a topic of another class"
            raise TooLarge(f"{self._topic.name}: {what}", size=length, limit=self.bytes_max, next_step=step)

    def _check_active(self) -> None:
        if self._is_done:
            raise BadInput("this streamed record was already finished or rolled back; nothing was written")

    def submit(self) -> CommitFuture[Appended]:
        """Complete the record and stage it. The caller commits the future, or wakes the writer thread."""
        with self._lock:
            self._check_active()
            try:
                return self._submit()
            finally:
                self.roll_back()

    def _submit(self) -> CommitFuture[Appended]:
        if self._blob is not None:
            return self._submit_blob(self._blob)
        names = self._names
        batch = Batch([bytes(self._buffer)], False, names.tag, names.node, names.metas)
        return append.submit_write(self._topic, batch, self._key, durable=self._durable)

    def _submit_blob(self, blob: BlobWriter) -> CommitFuture[Appended]:
        names = self._names
        assert isinstance(names.tag, bytes) and isinstance(names.node, bytes), "one record"  # noqa: PT018
        meta = names.metas[0] if names.metas else b""
        batch = LargeBatch(blob.commit(), names.tag, names.node, meta)
        with DEFER_SIGNALS:  # an interrupt must not part a staged frame from its blob
            try:
                return append.submit_write(self._topic, batch, self._key, durable=self._durable)
            finally:
                if batch.is_staged:
                    blob.keep()

    def roll_back(self) -> None:
        """Remove every byte of the record. Does nothing once it was submitted."""
        with self._lock:
            self._is_done = True
            self._buffer = bytearray()
            if self._blob is not None:
                self._blob.discard()


def append_stream(stream: StreamedAppend, chunks: Iterable[Buffer], name: str) -> CommitFuture[Appended]:
    """Write one record from chunks and commit it; the caller waits."""
    try:
        for chunk in guard_stream(name, chunks):
            stream.write(chunk)
        with DEFER_SIGNALS:  # the commit is completed before an interrupt is raised
            future = stream.submit()
            future.try_commit()
        return future
    finally:
        stream.roll_back()


async def append_stream_async(
    stream: StreamedAppend, chunks: AsyncIterable[Buffer], name: str, wait: Callable[[CommitFuture[T]], T]
) -> Appended:
    """`append_stream` from an async iterable: the disk is used in a thread. If the task is cancelled, the record is
    rolled back, unless it was complete: then it is committed."""
    loop = asyncio.get_running_loop()
    pending: asyncio.Future[Any] | None = None

    async def run(step: Callable[..., Any], *args: object) -> Any:
        nonlocal pending
        pending = loop.run_in_executor(None, step, *args)
        return await asyncio.shield(pending)

    try:
        async for chunk in guard_stream_async(name, chunks):
            await run(stream.write, chunk)
        result: Appended = await run(lambda: wait(stream.submit()))  # type: ignore[arg-type]
        return result
    finally:
        if pending is not None and not pending.done():
            # Cancelled: a thread still uses the stream.
            await asyncio.gather(asyncio.shield(pending), return_exceptions=True)
        stream.roll_back()
