"""Storage of a segment's data: a file with staged appends, commit and rollback.

    0                          size            size + staged
    ┌──────────────────────────┬────────────────┬┄┄┄┄
    │ committed                │ staged         │
    └──────────────────────────┴────────────────┴┄┄┄┄

Bytes are staged after the end and become readable with `commit`; `roll_back` removes them. An append of a slice or of a
stream is therefore atomic. The same class serves files and memory: it works on any Disk.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence

from tidelog.disk.durability import remove_if_exists
from tidelog.disk.interface import Disk, File, parent_dir
from tidelog.errors import BadInput, OutOfRange, StreamBroken
from tidelog.types import Buffer


class Storage:
    """One file of a disk as a storage medium. Not thread-safe: its owner serialises calls."""

    def __init__(self, file: File, size: int | None = None) -> None:
        self._file = file
        self._size = file.size() if size is None else size
        self._staged_bytes = 0
        self._has_uncommitted_bytes = False  # the file may have bytes after `size`

    @classmethod
    def open(cls, disk: Disk, path: str) -> Storage:
        """Open the storage at `path`, or create it with a durable name."""
        if disk.stat(path) is not None:
            return cls(disk.open(path, "write"))
        disk.make_dir(parent_dir(path))
        file = disk.open(path, "create")
        disk.sync_dir(parent_dir(path))
        return cls(file)

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def size(self) -> int:
        """Bytes that were committed."""
        return self._size

    @property
    def staged_bytes(self) -> int:
        return self._staged_bytes

    @property
    def has_uncommitted_bytes(self) -> bool:
        """Whether a write was begun and neither committed nor rolled back."""
        return self._has_uncommitted_bytes

    def append(self, chunks: Iterable[Buffer], threshold: int | None = None) -> tuple[int, int]:
        """Append a stream of at most `threshold` bytes; return its position and length.

        A longer or broken stream, or a disk error, leaves the storage unchanged and raises.
        """
        pos = self._size
        try:
            for chunk in guard_stream(self.path, chunks):
                self.stage(chunk, threshold)
        except BaseException:
            self.roll_back()
            raise
        return pos, self.commit()

    def stage(self, chunk: Buffer, threshold: int | None = None) -> None:
        """Write bytes after the end without committing them. The caller rolls back when this raises."""
        try:
            view = memoryview(chunk).cast("B")
        except TypeError:
            raise BadInput(f"a stream yields bytes, not {type(chunk).__name__}; nothing was written") from None
        if threshold is not None and self._staged_bytes + len(view) > threshold:
            raise StreamBroken(
                f"{self.path}: the stream is longer than its limit of {threshold} bytes; it was rolled back, nothing "
                "was written, send less or raise segment_bytes_max"
            )
        self._has_uncommitted_bytes = True
        self._file.write(self._size + self._staged_bytes, view)
        self._staged_bytes += len(view)

    def stage_buffers(self, buffers: Sequence[Buffer]) -> None:
        """`stage` of several pieces with one write, without joining them."""
        self._has_uncommitted_bytes = True
        self._file.writev(self._size + self._staged_bytes, buffers)
        self._staged_bytes += sum(map(len, buffers))

    def overwrite_staged(self, pos: int, data: Buffer) -> None:
        """Write over staged bytes, `pos` counted from the first of them."""
        assert pos + len(data) <= self._staged_bytes, "only staged bytes may change"
        self._file.write(self._size + pos, data)

    def read_staged(self, pos: int, size: int) -> bytes:
        return self._file.read(self._size + pos, min(size, self._staged_bytes - pos))

    def commit(self) -> int:
        """Make the staged bytes part of the storage; return their number."""
        committed, self._staged_bytes = self._staged_bytes, 0
        self._size += committed
        self._has_uncommitted_bytes = False
        return committed

    def roll_back(self) -> None:
        """Remove the staged bytes."""
        if self._has_uncommitted_bytes:
            self._file.truncate(self._size)
            self._staged_bytes, self._has_uncommitted_bytes = 0, False

    def read(self, pos: int, size: int) -> bytes:
        """Read exactly these bytes; raise OutOfRange where some of them are not committed."""
        if pos < 0 or size < 0 or pos + size > self._size:
            raise OutOfRange(self.path, asked=pos + size, lowest=0, highest=self._size)
        return self._file.read(pos, size)  # shorter where the file lost bytes: callers compare the length

    def truncate(self, size: int) -> None:
        """Remove every byte from `size` on."""
        if not 0 <= size <= self._size:
            raise OutOfRange(self.path, asked=size, lowest=0, highest=self._size)
        self._file.truncate(size)
        self._size, self._staged_bytes, self._has_uncommitted_bytes = size, 0, False

    def sync(self) -> None:
        """Make every byte durable."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def remove(self, disk: Disk) -> None:
        """Close the file and remove it durably."""
        self._file.close()
        if remove_if_exists(disk, self.path):
            disk.sync_dir(parent_dir(self.path))


def guard_stream(path: str, chunks: Iterable[Buffer]) -> Iterator[Buffer]:
    """Yield the chunks; raise an error of their iterable as StreamBroken: a socket's error is not the disk's."""
    iterator = iter(chunks)
    while True:
        try:
            chunk = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise _stream_broken_error(path, error) from error
        yield chunk


async def guard_stream_async(path: str, chunks: AsyncIterable[Buffer]) -> AsyncIterator[Buffer]:
    """`guard_stream` for an async iterable."""
    iterator = aiter(chunks)
    while True:
        try:
            chunk = await anext(iterator)
        except StopAsyncIteration:
            return
        except Exception as error:
            raise _stream_broken_error(path, error) from error
        yield chunk


def _stream_broken_error(path: str, error: Exception) -> StreamBroken:
    return StreamBroken(
        f"{path}: the stream broke off ({type(error).__name__}: {error}); it was rolled back and nothing was "
        "written, send it again"
    )
