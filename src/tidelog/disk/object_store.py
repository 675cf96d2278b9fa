"""Object stores that pyarrow opens by URI: S3, GCS, ABFS, HDFS.

    s3://bucket/data?region=eu-central-1
    gs://bucket/data

`ObjectStoreDisk` is a read-only disk: files are read by ranges, and methods that would change the store raise OSError
(EROFS). `ObjectStore` keeps whole objects (`SegmentStore`). Credentials and regions come from the URI, the environment
or the machine, as pyarrow documents; no message shows them.
"""

from __future__ import annotations

import errno
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any, Final, NoReturn, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import pyarrow as pa
from pyarrow import fs
from pyarrow.fs import FileSelector, FileSystem, FileType

from tidelog.addresses import scheme_of
from tidelog.disk.interface import Mode, Stat, join
from tidelog.disk.segment_store import StoredObject, check_key, shown_address
from tidelog.errors import BadInput, StoreDenied, StoreUnavailable
from tidelog.types import Buffer

T = TypeVar("T")
_S3_OPTIONS: Final = ("region", "scheme", "endpoint_override")
_S3_ATTEMPTS: Final = 2  # of one request; the caller retries the whole operation
_CONNECT_TIMEOUT_S: Final = 5.0
# Words of the messages in which pyarrow passes on what a store answered.
_DENIED: Final = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH|INVALID_SIGNATURE|INVALID_CLIENT_TOKEN|EXPIRED_TOKEN"
    r"|UserNotFound|NO_SUCH_BUCKET|InvalidBucketName|AuthenticationFailed|AuthorizationFailure"
    r"|AuthorizationPermissionMismatch|Unauthorized"
    r"|Permission denied|PERMISSION_DENIED|AccessControlException|HTTP status 40[13]\b|\b403 Forbidden"
)
_CREDENTIALS: Final = {
    "gs": "GOOGLE_SERVICE_ACCOUNT",
    "gc": "GOOGLE_SERVICE_ACCOUNT",
    "ab": "AZURE_STORAGE_ACCOUNT_KEY",
}
_COLORS: Final = re.compile("\x1b\\[[0-9;]*m|\u21b3")  # in messages of deltalake
_OPEN_FILES_MAX: Final = 256
_TEMPORARY_SUFFIX: Final = ".tmp"
STORE_ERRORS: Final = (OSError, ValueError, pa.ArrowException)  # what calls of pyarrow raise


def store_error(kind: str, address: str, text: str, error: Exception) -> StoreUnavailable:
    """Return the error for what a store answered. `text`: its message, without secrets; `kind`: of the store."""
    text = " ".join(_COLORS.sub("", text).split())[:400]
    if isinstance(error, PermissionError) or _DENIED.search(text):
        named = _CREDENTIALS.get((scheme_of(address) or "")[:2], "AWS_ACCESS_KEY_ID")
        step = f"check the bucket, the credentials ({named} and so on) and their rights, then retry"
        return StoreDenied(address, text, step=step, kind=kind)
    return StoreUnavailable(address, text, kind=kind)


def open_file_system(address: str, *, timeout_s: float = 60.0) -> tuple[FileSystem, str]:
    """Open the file system of a URI; return it and the path inside it. Nothing is read.

    Raises:
        BadInput: pyarrow knows no such store, or lacks a library for it.
    """
    try:
        if scheme_of(address) == "s3":
            return _open_s3(address, timeout_s)
        store, path = FileSystem.from_uri(address)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError, ValueError) as error:
        raise BadInput(
            f"{shown_address(address)[:200]!r} names no store that can be read here "
            f"({_without_secrets(str(error), address)[:200]}); nothing was read, pass a directory or an address such "
            "as s3://bucket/data"
        ) from None
    return store, path


def _open_s3(address: str, timeout_s: float) -> tuple[FileSystem, str]:
    """`FileSystem.from_uri` for S3, which has no time limits and may keep a whole object in memory."""
    parts = urlsplit(address)
    options = dict(parse_qsl(parts.query))
    if unknown := sorted(set(options) - set(_S3_OPTIONS)):
        raise ValueError(f"an option {unknown[0]!r} is not one of {', '.join(_S3_OPTIONS)}")
    user, _, bucket = parts.netloc.rpartition("@")
    if not bucket:
        raise ValueError("it names no bucket")
    access_key, _, secret_key = user.partition(":")
    arguments: dict[str, Any] = {**options}
    if access_key:
        arguments |= {"access_key": unquote(access_key), "secret_key": unquote(secret_key)}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint and "endpoint_override" not in options:
        # pyarrow reads them when it starts its first client, and ignores what is set afterwards.
        arguments["endpoint_override"] = endpoint.rpartition("://")[2].rstrip("/")
        arguments.setdefault("scheme", "http" if endpoint.startswith("http://") else "https")
    elif not options and not any(name in os.environ for name in ("AWS_REGION", "AWS_DEFAULT_REGION")):
        with suppress(OSError):  # the first operation shows what is wrong
            arguments["region"] = fs.resolve_s3_region(bucket)
    store = fs.S3FileSystem(
        **arguments,
        connect_timeout=min(_CONNECT_TIMEOUT_S, timeout_s),
        request_timeout=timeout_s,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_S3_ATTEMPTS),
        background_writes=False,  # else the parts of an object wait in memory until they are sent
        allow_delayed_open=True,  # a small object is one request
    )
    return store, bucket + parts.path.rstrip("/")


def _without_secrets(text: str, address: str) -> str:
    """Remove the credentials of an address from a message of a library."""
    with suppress(ValueError):
        parts = urlsplit(address)
        user = parts.netloc.rpartition("@")[0]
        secrets = [address, user, *user.split(":"), *(value for _, value in parse_qsl(parts.query))]
        if parts.scheme.startswith("abfs") and ":" not in user:
            secrets = [address]
        for secret in sorted({*secrets, *map(unquote, secrets)} - {""}, key=len, reverse=True):
            text = text.replace(secret, "…")
    return text


def open_object_store(address: str) -> tuple[ObjectStoreDisk, str]:
    """Open the store of a URI as a disk; return it and the path inside it. Raises BadInput for an unknown store."""
    store, path = open_file_system(address)
    return ObjectStoreDisk(store), path


class ObjectStore:
    """Objects of a bucket, below a prefix.

    Objects are immutable, so open files, which hold nothing but a key and a length, are kept: a read is one request.
    """

    def __init__(self, store: FileSystem, root: str, address: str) -> None:
        self._store, self._root, self._address = store, root.rstrip("/"), address
        self._renames = store.type_name == "hdfs"  # a file is visible while it is written
        self._files: OrderedDict[str, Any] = OrderedDict()
        self._lock = Lock()

    @classmethod
    def open(cls, address: str, *, timeout_s: float) -> ObjectStore:
        return cls(*open_file_system(address, timeout_s=timeout_s), address)

    @property
    def address(self) -> str:
        return shown_address(self._address)

    def put(self, key: str, pieces: Iterable[Buffer], /) -> None:
        path = join(self._root, check_key(key))
        self._forget(key)
        self._call(lambda: self._put(path, pieces))

    def _put(self, path: str, pieces: Iterable[Buffer]) -> None:
        target = f"{path}{_TEMPORARY_SUFFIX}" if self._renames else path
        if self._renames:
            self._store.create_dir(target.rpartition("/")[0], recursive=True)
        stream = self._store.open_output_stream(target)
        try:
            for piece in pieces:
                stream.write(piece)
            stream.close()
        except BaseException:
            # pyarrow cannot abort an upload: closing the stream completes an object that is too short.
            with suppress(Exception):
                stream.close()
            with suppress(Exception):
                self._store.delete_file(target)
            raise
        if self._renames:
            with suppress(FileNotFoundError):
                self._store.delete_file(path)
            self._store.move(target, path)

    def read(self, key: str, lo: int, hi: int, /) -> bytes:
        path = join(self._root, check_key(key))

        def read() -> bytes:
            file = self._open(key, path)
            size = min(hi, int(file.size())) - lo
            return bytes(file.read_at(size, lo)) if size > 0 else b""

        try:
            return self._call(read)
        except FileNotFoundError:
            self._check_bucket()
            raise
        except StoreUnavailable:
            # Some stores answer a read of an object that was deleted with another error.
            self._forget(key)
            is_missing = False
            with suppress(StoreUnavailable):
                is_missing = self.length(key) is None
            if not is_missing:
                raise
            raise FileNotFoundError(errno.ENOENT, "there is no such object", key) from None

    def _open(self, key: str, path: str) -> Any:
        with self._lock:
            file = self._files.get(key)
            if file is not None:
                self._files.move_to_end(key)
                return file
        file = self._store.open_input_file(path)
        with self._lock:
            self._files[key] = file
            if len(self._files) > _OPEN_FILES_MAX:
                self._files.popitem(last=False)
        return file

    def _forget(self, key: str) -> None:
        with self._lock:
            self._files.pop(key, None)

    def _check_bucket(self) -> None:
        """Raise StoreDenied if an object was not found because there is no bucket: some stores also answer like that
        where they do not know the access key."""
        bucket = self._root.partition("/")[0]
        if bucket and self._call(lambda: self._store.get_file_info(bucket)).type == FileType.NotFound:
            reason = f"there is no bucket {bucket!r}, or it does not know the credentials"
            raise store_error("segment store", self.address, reason, PermissionError())

    def length(self, key: str, /) -> int | None:
        path = join(self._root, check_key(key))
        info = self._call(lambda: self._store.get_file_info(path))
        if info.type == FileType.File:
            return int(info.size)
        self._check_bucket()
        return None

    def exists(self, key: str, /) -> bool:
        return self.length(key) is not None

    def delete(self, key: str, /) -> bool:
        path = join(self._root, check_key(key))
        self._forget(key)
        try:
            self._call(lambda: self._store.delete_file(path))
        except FileNotFoundError:
            self._check_bucket()
            return False
        return True

    def list(self, prefix: str = "", /) -> Iterator[StoredObject]:
        return (each for each in self._list(prefix) if not each.key.endswith(_TEMPORARY_SUFFIX))

    def _list(self, prefix: str) -> Iterator[StoredObject]:
        below = join(self._root, prefix.strip("/")) if prefix.strip("/") else self._root
        selector = FileSelector(below, recursive=True, allow_not_found=True)
        for info in self._call(lambda: self._store.get_file_info(selector)):
            key = info.path.removeprefix(f"{self._root}/")
            if info.type == FileType.File and not key.endswith("/"):
                yield StoredObject(key, int(info.size))

    def remove_leftovers(self, prefix: str = "", /) -> tuple[StoredObject, ...]:
        """Of stores that rename. An upload that was cut off leaves parts that no key names and pyarrow cannot list."""
        if not self._renames:
            return ()
        found = tuple(each for each in self._list(prefix) if each.key.endswith(_TEMPORARY_SUFFIX))
        for each in found:
            with suppress(FileNotFoundError):
                self._call(partial(self._store.delete_file, join(self._root, each.key)))
        return found

    def _call(self, call: Callable[[], T]) -> T:
        """Run a call of pyarrow; its errors become those of Tidelog."""
        try:
            return call()
        except FileNotFoundError:
            raise
        except (OSError, pa.ArrowException) as error:
            text = _without_secrets(str(error), self._address)
            raise store_error("segment store", self.address, text, error) from None


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

    def _refuse(self, path: str, /, *_: object, **__: object) -> NoReturn:
        raise _read_only_error(path)

    make_dir = remove = remove_dir = rename = link = sync_dir = lock = _refuse


def _read_only_error(path: str) -> OSError:
    return OSError(errno.EROFS, "an object store is only read here", path)
