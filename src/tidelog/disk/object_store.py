"""A read-only disk in an object store: S3, GCS, ABFS, HDFS and other stores that pyarrow opens by URI.

    s3://bucket/data?region=eu-central-1
    gs://bucket/data

Credentials and regions come from the URI, the environment or the machine, as pyarrow documents. Files are read by
ranges. Methods that would change the store raise OSError (EROFS).
"""

from __future__ import annotations

import errno
from typing import NoReturn

import pyarrow as pa
from pyarrow.fs import FileSelector, FileSystem, FileType

from tidelog.disk.interface import Mode, Stat
from tidelog.errors import BadInput


def open_object_store(address: str) -> tuple[ObjectStoreDisk, str]:
    """Open the store of a URI; return it and the path inside it. Raises BadInput for an unknown store."""
    try:
        store, path = FileSystem.from_uri(address)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise BadInput(
            f"{address[:200]!r} names no store that can be read here ({str(error)[:200]}); nothing was read, pass a "
            "directory or an address such as s3://bucket/data"
        ) from None
    return ObjectStoreDisk(store), path


class ObjectStoreFile:
    def __init__(self, store: FileSystem, path: str) -> None:
        self._path, self._file = path, store.open_input_file(path)

    @property
    def path(self) -> str:
        return self._path

    def size(self) -> int:
        return int(self._file.size())

    def read(self, pos: int, size: int, /) -> bytes:
        available = min(size, self.size() - pos)
        return bytes(self._file.read_at(available, pos)) if available > 0 else b""

    def map(self) -> memoryview:
        """The whole file, fetched: an object store cannot be mapped."""
        return memoryview(self.read(0, self.size()))

    def close(self) -> None:
        self._file.close()

    @property
    def descriptor(self) -> int | None:
        return None

    def _refuse(self, *_: object) -> NoReturn:
        raise _read_only_error(self._path)

    write = writev = truncate = allocate = sync = _refuse


class ObjectStoreDisk:
    fetches = True  # files are not mapped: a reader requests the ranges that it needs

    def __init__(self, store: FileSystem) -> None:
        self._store = store

    def open(self, path: str, mode: Mode = "read", /) -> ObjectStoreFile:
        if mode != "read":
            raise _read_only_error(path)
        return ObjectStoreFile(self._store, path)

    def stat(self, path: str, /) -> Stat | None:
        info = self._store.get_file_info(path)
        if info.type == FileType.NotFound:
            return None
        return Stat(info.size or 0, (info.mtime_ns or 0) // 1_000_000, info.type == FileType.Directory)

    def list_dir(self, directory: str, /) -> list[str]:
        return sorted(info.base_name for info in self._store.get_file_info(FileSelector(directory)))

    def resolve(self, path: str, /) -> str:
        return path  # there is no current directory and there are no links

    def _refuse(self, path: str, /, *_: object) -> NoReturn:
        raise _read_only_error(path)

    make_dir = remove = remove_dir = rename = sync_dir = lock = _refuse


def _read_only_error(path: str) -> OSError:
    return OSError(errno.EROFS, "an object store is only read here", path)
