"""Read the data of a large record: a file-like object over its blob, in verified chunks.

    Record.data is a LargeData ──► open() ──► RecordReader ──► blob file
                                                 └ holds one chunk, whose checksum was verified

A reader keeps its file open: a record that is deleted meanwhile is read to its end. Nothing here loads a whole blob,
except `LargeData.read`, which is asked to.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_intdigest

from tidelog.disk.interface import Disk, File
from tidelog.engine import blobs
from tidelog.errors import BadInput, Closed, Corrupt, Damaged, RecordNotFound
from tidelog.formats import large_record
from tidelog.formats.large_record import BLOB_HEADER_BYTES, BlobRef
from tidelog.types import Buffer

if TYPE_CHECKING:
    from tidelog.engine.topic_state import TopicState


class BlobReader:
    """An open blob whose checksums are known: `read_chunk` returns verified bytes. Not thread-safe."""

    def __init__(self, disk: Disk, path: str, ref: BlobRef) -> None:
        self.ref, self.path = ref, path
        self._file: File = disk.open(path)
        try:
            header = self._file.read(0, BLOB_HEADER_BYTES)
            sums = self._file.read(BLOB_HEADER_BYTES + ref.length, ref.file_bytes)
            self._sums = large_record.decode_sums(ref, header, sums, path)
        except BaseException:
            self._file.close()
            raise

    def read_chunk(self, number: int) -> bytes:
        """Return a chunk of the data. Raises Corrupt where it is not what was written."""
        ref = self.ref
        start = number * ref.chunk_bytes
        pos, size = BLOB_HEADER_BYTES + start, min(ref.chunk_bytes, ref.length - start)
        content = self._file.read(pos, size)
        if len(content) != size:
            raise Corrupt(self.path, pos=pos + len(content), reason=f"the file ends {size - len(content)} bytes early")
        if xxh3_64_intdigest(content) != self._sums[number]:
            raise Corrupt(self.path, pos=pos, reason=f"checksum mismatch in the {size} bytes from here")
        return content

    def chunks(self) -> Iterator[bytes]:
        """Yield all chunks in order."""
        return map(self.read_chunk, range(self.ref.chunks))

    def close(self) -> None:
        self._file.close()


class RecordReader(io.RawIOBase):
    """The data of one record as a binary file: `read`, `readinto`, `seek`, `close`, and a context manager.

    `read(n)` returns fewer than n bytes only at the end. Every chunk is verified when it is read; Corrupt says where it
    is not what was written. Not thread-safe.
    """

    def __init__(
        self, length: int, chunk_bytes: int, load: Callable[[int], Buffer], close: Callable[[], None], xxh3: str
    ) -> None:
        super().__init__()
        self._length, self._chunk_bytes, self._load, self._close = length, chunk_bytes, load, close
        self._pos, self._cached = 0, (-1, memoryview(b""))
        self.xxh3 = xxh3  # of the whole data, as 16 hexadecimal digits

    @classmethod
    def from_bytes(cls, data: bytes) -> RecordReader:
        """Return a reader of data in memory."""
        return cls(len(data), max(len(data), 1), lambda _: data, lambda: None, f"{xxh3_64_intdigest(data):016x}")

    def __len__(self) -> int:
        """The bytes of the record's data."""
        return self._length

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        self._check_open()
        target = memoryview(buffer).cast("B")
        done = 0
        while done < len(target) and self._pos < self._length:
            number, offset = divmod(self._pos, self._chunk_bytes)
            if self._cached[0] != number:
                self._cached = number, memoryview(self._load(number))
            piece = self._cached[1][offset : offset + len(target) - done]
            target[done : done + len(piece)] = piece
            done, self._pos = done + len(piece), self._pos + len(piece)
        return done

    def readall(self) -> bytes:
        """Return everything from here to the end, in memory."""
        self._check_open()
        content = bytearray(max(self._length - self._pos, 0))
        self.readinto(content)
        return bytes(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._check_open()
        if whence not in (io.SEEK_SET, io.SEEK_CUR, io.SEEK_END):
            raise BadInput(f"whence is 0, 1 or 2, not {whence!r}; nothing was read")
        pos = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._pos, io.SEEK_END: self._length}[whence]
        if pos < 0:
            raise BadInput(f"position {pos} is before the beginning; nothing was read")
        self._pos = pos
        return pos

    def tell(self) -> int:
        self._check_open()
        return self._pos

    def close(self) -> None:
        if not self.closed:
            self._cached = (-1, memoryview(b""))
            self._close()
        super().close()

    def _check_open(self) -> None:
        if self.closed:
            raise Closed("this reader of a record was closed; nothing was read, open the record again")


class LargeData:
    """The data of a large record in `Record.data`: what it is, without its bytes. `open` returns them as a file."""

    __slots__ = ("_open", "seq", "size", "xxh3")

    def __init__(self, seq: int, size: int, xxh3: str, open_data: Callable[[], RecordReader]) -> None:
        self.seq = seq
        self.size = size  # the bytes of the data
        self.xxh3 = xxh3  # XXH3-64 of the data, as 16 hexadecimal digits
        self._open = open_data

    def __repr__(self) -> str:
        return f"<large data of record {self.seq}, {self.size} bytes>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LargeData) and (self.size, self.xxh3) == (other.size, other.xxh3)

    def __hash__(self) -> int:
        return hash((self.size, self.xxh3))

    def open(self) -> RecordReader:
        """Open the data as a file. Raises RecordNotFound where the record was removed since."""
        return self._open()

    def read(self) -> bytes:
        """Read all of the data into memory."""
        with self.open() as reader:
            return reader.readall()

    def to_reference(self) -> dict[str, object]:
        """The JSON object that stands for the data over HTTP and in exports."""
        return {large_record.REFERENCE_KEY: {"bytes": self.size, "xxh3": self.xxh3, "href": f"records/{self.seq}/data"}}


def large_data(topic: TopicState, seq: int, ref: BlobRef) -> LargeData:
    """Return what stands for the data of a large record."""
    return LargeData(seq, ref.length, f"{ref.digest:016x}", lambda: open_blob(topic, seq, ref))


def open_blob(topic: TopicState, seq: int, ref: BlobRef) -> RecordReader:
    """Open the data of a large record."""
    path = blobs.blob_path(topic.directory, ref.blob_id)
    try:
        reader = BlobReader(topic.context.disk, path, ref)
    except FileNotFoundError:
        raise _missing_blob_error(topic, seq, path) from None
    except Corrupt as error:
        raise _with_place(topic, seq, error) from None
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error}; nothing was changed, repair the disk and retry") from error

    def load(number: int) -> bytes:
        try:
            return reader.read_chunk(number)
        except Corrupt as error:
            raise _with_place(topic, seq, error) from None
        except OSError as error:
            raise Damaged(f"{path} cannot be read: {error}; nothing was changed, repair the disk and retry") from error

    return RecordReader(ref.length, ref.chunk_bytes, load, reader.close, f"{ref.digest:016x}")


def _missing_blob_error(topic: TopicState, seq: int, path: str) -> Exception:
    """Return the error for a blob without a file: damage, if its record is still there."""
    with topic.lock:
        index = topic.index
        is_live = not topic.is_dropped and any(blob_seq == seq for blob_seq, _ in topic.blobs)
        part = index.find_part(seq) if is_live and seq >= index.earliest else None
        deleted = None if part is None else part.deleted_mask()
        is_live = part is not None and (deleted is None or not deleted[seq - part.base])
        missing = RecordNotFound(topic.name, seq=seq, earliest_seq=index.earliest, head_seq=index.head)
    if not is_live or topic.context.reload_topics is not None:
        return missing  # beside a writer, which removes blobs after their records
    return _with_place(topic, seq, Corrupt(path, pos=0, reason="the file is missing"))


def _with_place(topic: TopicState, seq: int, error: Corrupt) -> Corrupt:
    """Report a damaged blob, and add the record it belongs to."""
    topic.report_corruption(f"{error.where}, byte {error.pos}", f"record {seq}: {error.reason}")
    error.seq, error.resume = seq, seq + 1
    return error
