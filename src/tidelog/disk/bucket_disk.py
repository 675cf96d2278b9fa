"""A disk over an object store, for tables: files are written once, front to back, and read by ranges.

    path             an address without credentials: s3://bucket/lake/orders/part-….parquet
    open "create"    an upload; `sync` completes it. No object exists before, and none is ever half there
    rename           a copy inside the store, then a removal; repeated after a crash it has the same result
    make_dir, sync_dir, lock     a store has no directories and makes objects durable itself; it has no locks

Two processes that write one table are kept apart by the table's own commits and not by a lock. A file that is in no
commit may be the file of another process, so a writer that opens the table leaves it.

The object is picklable: tasks carry it, with the options of the store, to executors.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn, TypeVar

import pyarrow as pa
from pyarrow import fs
from pyarrow.fs import FileSelector, FileSystem, FileType

from tidelog.disk.interface import Lock, Mode, Stat
from tidelog.disk.object_store import STORE_ERRORS, store_error
from tidelog.disk.store_options import StoreOptions
from tidelog.errors import BadInput, StoreUnavailable
from tidelog.types import Buffer

T = TypeVar("T")
_ATTEMPTS: Final = 5  # of one request
_CONNECT_TIMEOUT_S: Final = 5.0
_REQUEST_TIMEOUT_S: Final = 60.0


class BucketDisk:
    fetches = True  # files are not mapped: a reader requests the ranges that it needs

    def __init__(self, root: str, options: StoreOptions) -> None:
        self._root, self.options = root, options
        self._scheme, _, rest = root.partition("://")
        self._host = rest.partition("/")[0]
        self._store: FileSystem | None = None

    def __repr__(self) -> str:
        return f"BucketDisk({self._root!r})"

    def __getstate__(self) -> tuple[str, StoreOptions]:
        return self._root, self.options

    def __setstate__(self, state: tuple[str, StoreOptions]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    # ── the store ─────────────────────────────────────────────────────────────────────────────

    def _files(self) -> FileSystem:
        if self._store is None:
            try:
                self._store = _open_file_system(self.options)
            except STORE_ERRORS as error:
                text = self.options.remove_secrets(str(error))
                raise BadInput(f"the store of {self._root} cannot be opened ({text[:300]}); nothing was done") from None
        return self._store

    def _key(self, path: str) -> str:
        """Return the path inside the store."""
        prefix = f"{self._scheme}://{self._host}"
        assert path.startswith(f"{prefix}/"), "paths of a table are below its address"
        return f"{self._host.partition('@')[0]}{path.removeprefix(prefix)}"

    def _call(self, path: str, call: Callable[[FileSystem, str], T]) -> T:
        """Run a call of pyarrow; its errors become those of Tidelog, without secrets."""
        store, key = self._files(), self._key(path)
        try:
            return call(store, key)
        except FileNotFoundError:
            raise
        except STORE_ERRORS as error:
            raise self.error(path, error) from None

    def error(self, path: str, error: Exception) -> StoreUnavailable:
        return store_error("table's store", path, self.options.remove_secrets(str(error)), error)

    def check_bucket(self) -> None:
        """Raise StoreDenied if there is no such bucket: most calls would answer that there is no such object."""
        store, bucket = self._files(), self._host.partition("@")[0]
        try:
            is_missing = store.get_file_info(bucket).type == FileType.NotFound
        except STORE_ERRORS as error:
            raise self.error(self._root, error) from None
        if is_missing:
            reason = f"there is no bucket {bucket!r}, or it does not know the credentials"
            raise store_error("table's store", self._root, reason, PermissionError())

    # ── files ─────────────────────────────────────────────────────────────────────────────────

    def open(self, path: str, mode: Mode = "read", /) -> BucketFile:
        if mode == "read":
            return BucketFile(self, path, reader=self.open_input(path))
        if mode == "create":
            return BucketFile(self, path, writer=self._call(path, lambda store, key: store.open_output_stream(key)))
        raise OSError(errno.EROFS, "an object is not changed in place", path)

    def open_input(self, path: str) -> Any:
        """Open an object as a file of pyarrow, which reads ranges."""
        return self._call(path, lambda store, key: store.open_input_file(key))

    def stat(self, path: str, /) -> Stat | None:
        info = self._call(path, lambda store, key: store.get_file_info(key))
        if info.type == FileType.NotFound:
            return None
        return Stat(info.size or 0, (info.mtime_ns or 0) // 1_000_000, info.type == FileType.Directory)

    def list_dir(self, directory: str, /) -> list[str]:
        found = self._call(directory, lambda store, key: store.get_file_info(FileSelector(key, allow_not_found=True)))
        return sorted(info.base_name for info in found)

    def resolve(self, path: str, /) -> str:
        return path

    def remove(self, path: str, /) -> None:
        def remove(store: FileSystem, key: str) -> None:
            if store.get_file_info(key).type == FileType.NotFound:
                raise FileNotFoundError(errno.ENOENT, "there is no such object", path)
            store.delete_file(key)

        self._call(path, remove)

    def rename(self, old: str, new: str, /) -> None:
        target = self._key(new)

        def move(store: FileSystem, key: str) -> None:
            try:
                try:
                    store.move(key, target)
                except pa.ArrowNotImplementedError:  # an account of Azure without a hierarchical namespace
                    store.copy_file(key, target)
                    store.delete_file(key)
            except OSError:
                # Another process that completes the same commit was faster.
                is_moved = store.get_file_info(key).type == FileType.NotFound
                if not is_moved or store.get_file_info(target).type == FileType.NotFound:
                    raise

        self._call(old, move)

    def make_dir(self, path: str, /, *, durable: bool = True) -> None:
        """No effect: there are no directories."""

    def sync_dir(self, path: str, /) -> None:
        """No effect: an object that was stored is durable."""

    def remove_dir(self, path: str, /) -> None:
        """No effect: there are no directories."""

    def lock(self, path: str, /) -> Lock:
        raise OSError(errno.ENOTSUP, "an object store has no locks", path)

    def link(self, old: str, new: str, /) -> None:  # noqa: ARG002
        raise OSError(errno.ENOTSUP, "an object store has no links", old)


def _open_file_system(options: StoreOptions) -> FileSystem:
    options = options.with_environment()
    arguments = options.to_arrow()
    if options.family == "s3":
        return fs.S3FileSystem(
            **arguments,
            connect_timeout=_CONNECT_TIMEOUT_S,
            request_timeout=_REQUEST_TIMEOUT_S,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
            allow_delayed_open=True,  # a small object is one request
        )
    if options.family == "gs":
        if key_file := options.values.get("service_account"):
            if os.environ.get("GOOGLE_APPLICATION_CREDENTIALS", key_file) != key_file:
                raise ValueError("GOOGLE_APPLICATION_CREDENTIALS names another service account than the option")
            os.environ["GOOGLE_APPLICATION_CREDENTIALS"] = key_file  # the only way in which pyarrow takes it
        return fs.GcsFileSystem(**arguments)
    if "account_name" not in arguments:
        raise ValueError("the option account_name is missing, or write abfs://container@account.dfs.core.windows.net/")
    return fs.AzureFileSystem(**arguments)


class BucketFile:
    """An object that is read, or an upload."""

    def __init__(self, disk: BucketDisk, path: str, *, reader: Any = None, writer: Any = None) -> None:
        self._disk, self._path, self._reader, self._writer = disk, path, reader, writer
        self._at, self._is_complete = 0, writer is None

    @property
    def path(self) -> str:
        return self._path

    @property
    def descriptor(self) -> int | None:
        return None

    def _run(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except FileNotFoundError:
            raise
        except STORE_ERRORS as error:
            raise self._disk.error(self._path, error) from None

    def size(self) -> int:
        return self._at if self._reader is None else int(self._run(self._reader.size))

    def read(self, pos: int, size: int, /) -> bytes:
        wanted = min(size, self.size() - pos)
        return bytes(self._run(lambda: self._reader.read_at(wanted, pos))) if wanted > 0 else b""

    def map(self) -> memoryview:
        """The whole object, fetched."""
        return memoryview(self.read(0, self.size()))

    def write(self, pos: int, data: Buffer, /) -> None:
        assert pos == self._at, "an object is written front to back"
        self._run(lambda: self._writer.write(data))
        self._at += memoryview(data).nbytes

    def writev(self, pos: int, pieces: Sequence[Buffer], /) -> None:
        for piece in pieces:
            self.write(pos, piece)
            pos += memoryview(piece).nbytes

    def sync(self) -> None:
        """Complete the upload: the object exists from here on."""
        if not self._is_complete:
            self._run(self._writer.close)
            self._is_complete = True

    def close(self) -> None:
        if not self._is_complete:
            # pyarrow cannot abort an upload: closing the stream completes an object that is too short.
            self._is_complete = True
            with suppress(*STORE_ERRORS):
                self._writer.close()
            with suppress(Exception):
                self._disk.remove(self._path)
        if self._reader is not None:
            self._reader.close()

    def _refuse(self, *_: object) -> NoReturn:
        raise OSError(errno.EROFS, "an object is not changed in place", self._path)

    truncate = allocate = _refuse
