"""[shell] A disk that is an object store, for reading: s3, gs, abfs, hdfs and what else pyarrow knows by its address.

    s3://bucket/data?region=eu-central-1     the address names the store; keys and regions come with it, from the
    gs://bucket/data                         environment or from the machine, as pyarrow documents them

Files are read by ranges. What is never done here raises: nobody writes topics into a store.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import NoReturn

import pyarrow as pa
from pyarrow.fs import FileSelector, FileSystem, FileType

from tidelog.disk.interface import Lock, Mode, Stat
from tidelog.errors import BadInput
from tidelog.types import Buffer


def open_object_store(address: str) -> tuple[ObjectStoreDisk, str]:
    """The store that an address names, and the place in it; BadInput where nobody knows such a store."""
    try:
        made, path = FileSystem.from_uri(address)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise BadInput(
            f"{address[:200]!r} names no store that can be read here ({str(error)[:200]}); nothing was read, give a "
            "directory, or an address such as s3://bucket/data"
        ) from None
    return ObjectStoreDisk(made), path


class ObjectStoreFile:
    def __init__(self, store: FileSystem, path: str) -> None:
        self._path, self._file = path, store.open_input_file(path)

    @property
    def path(self) -> str:
        return self._path

    def size(self) -> int:
        return int(self._file.size())

    def read(self, pos: int, size: int, /) -> bytes:
        there = min(size, self.size() - pos)
        return bytes(self._file.read_at(there, pos)) if there > 0 else b""

    def map(self) -> memoryview:
        """All of it, fetched: a store has no pages to share."""
        return memoryview(self.read(0, self.size()))

    def close(self) -> None:
        self._file.close()

    def write(self, pos: int, data: Buffer, /) -> None:  # noqa: ARG002
        _raise_read_only(self._path)

    def writev(self, pos: int, pieces: Sequence[Buffer], /) -> None:  # noqa: ARG002
        _raise_read_only(self._path)

    def truncate(self, size: int, /) -> None:  # noqa: ARG002
        _raise_read_only(self._path)

    def allocate(self, size: int, /) -> None:  # noqa: ARG002
        _raise_read_only(self._path)

    @property
    def descriptor(self) -> int | None:
        return None

    def sync(self) -> None:
        _raise_read_only(self._path)


class ObjectStoreDisk:
    fetches = True  # its files are not mapped: whoever wants a part of one asks for that part

    def __init__(self, store: FileSystem) -> None:
        self._store = store

    def open(self, path: str, mode: Mode = "read", /) -> ObjectStoreFile:
        if mode != "read":
            _raise_read_only(path)
        return ObjectStoreFile(self._store, path)

    def stat(self, path: str, /) -> Stat | None:
        found = self._store.get_file_info(path)
        if found.type == FileType.NotFound:
            return None
        return Stat(found.size or 0, (found.mtime_ns or 0) // 1_000_000, found.type == FileType.Directory)

    def list_dir(self, directory: str, /) -> list[str]:
        found = self._store.get_file_info(FileSelector(directory))
        return sorted(info.base_name for info in found)

    def resolve(self, path: str, /) -> str:
        return path  # there is no current directory and there are no links

    def make_dir(self, path: str, /) -> None:
        _raise_read_only(path)

    def remove(self, path: str, /) -> None:
        _raise_read_only(path)

    def remove_dir(self, path: str, /) -> None:
        _raise_read_only(path)

    def rename(self, old: str, new: str, /) -> None:  # noqa: ARG002
        _raise_read_only(old)

    def sync_dir(self, path: str, /) -> None:
        _raise_read_only(path)

    def lock(self, path: str, /) -> Lock:
        _raise_read_only(path)


def _raise_read_only(path: str) -> NoReturn:
    raise OSError(errno.EROFS, "an object store is only read here", path)
