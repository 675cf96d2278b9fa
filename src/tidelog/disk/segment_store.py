"""Stores of whole, immutable objects: where segments of the cold tier are kept.

    address                          store
    /mnt/cold, file:///mnt/cold      DirectoryStore, on any Disk
    s3://bucket/prefix, gs: abfs:    ObjectStore, through pyarrow
    hdfs:                            ObjectStore, which renames a finished file

Every store keeps the same promises (`SegmentStore`), and every failure is an error of `tidelog.errors` that names the
store without its credentials. Stores do not wait and do not retry: `bounded_store` adds time limits and retries to any
of them. A store is tied to one database by a marker object, which `StoreMarker` encodes.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Final, NamedTuple, NoReturn, Protocol
from urllib.parse import urlsplit

import msgspec

from tidelog.addresses import local_directory, scheme_of
from tidelog.disk.durability import DISK_FULL_ERRNOS, remove_if_exists, sync_directory, sync_file
from tidelog.disk.interface import Disk, File, join, parent_dir, start_writeback
from tidelog.errors import BadInput, Corrupt, NewerFormat, StoreDenied, StoreUnavailable
from tidelog.types import Buffer

_KEY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_KEY_CHARS_MAX: Final = 500
_TEMPORARY_SUFFIX: Final = ".tmp"
STORE_SCHEMES: Final = ("file", "s3", "gs", "abfs", "abfss", "hdfs")
_DENIED_ERRNOS: Final = frozenset((errno.EACCES, errno.EPERM, errno.EROFS))


class StoredObject(NamedTuple):
    key: str
    length: int


class SegmentStore(Protocol):
    """Objects by key. A key is one or more names with "/" between them. Safe to use from several threads.

    Raises StoreUnavailable where the store does not answer, StoreDenied where it refuses, and FileNotFoundError where
    an object that is read does not exist.
    """

    @property
    def address(self) -> str:
        """Where the store is, without credentials: for messages, logs and metrics."""
        ...

    def put(self, key: str, pieces: Iterable[Buffer], /) -> None:
        """Store an object, replacing one of the same key. On return it is complete and survives a power cut. After an
        error the key has the old object, the whole new one, or none."""
        ...

    def read(self, key: str, lo: int, hi: int, /) -> bytes:
        """Read bytes [lo, hi) of an object; fewer only at its end."""
        ...

    def length(self, key: str, /) -> int | None:
        """Return the length of an object in bytes; None if it does not exist."""
        ...

    def exists(self, key: str, /) -> bool: ...

    def delete(self, key: str, /) -> bool:
        """Delete an object; False if there was none."""
        ...

    def list(self, prefix: str = "", /) -> Iterator[StoredObject]:
        """Yield the objects whose keys begin with the names of `prefix`, however many there are, in any order."""
        ...

    def remove_leftovers(self, prefix: str = "", /) -> tuple[StoredObject, ...]:
        """Remove what interrupted puts left below the names of `prefix` under temporary names, and return it. No put
        runs there."""
        ...


def check_key(key: str) -> str:
    """Return a key that every store accepts. Raises BadInput for another one."""
    if len(key) > _KEY_CHARS_MAX or _KEY.fullmatch(key) is None or key.endswith(_TEMPORARY_SUFFIX):
        raise BadInput(f"{key[:80]!r} cannot be the key of an object; nothing was done, use names of A-Z a-z 0-9 . _ -")
    return key


def shown_address(address: str) -> str:
    """Return an address without user, password and query, which may be secret."""
    if scheme_of(address) is None:
        return address
    try:
        parts = urlsplit(address)
        # abfs://container@account: before the @ is a name, which is not secret unless a password follows it.
        user, _, host = parts.netloc.rpartition("@")
        name = f"{user}@" if user and ":" not in user and parts.scheme.startswith("abfs") else ""
        return f"{parts.scheme}://{name}{host}{parts.path}"
    except ValueError:
        return f"{scheme_of(address)}:…"


def open_store(address: str, *, disk: Disk, timeout_s: float = 30.0) -> SegmentStore:
    """Open the store of a path or an address. Nothing is read: whether it answers shows the first operation.

    Args:
        disk: where a path or a `file:` address is.
        timeout_s: for one request, where the store has such a setting.

    Raises:
        BadInput: the address has an unknown scheme, or the parts of it are not understood.
    """
    scheme = scheme_of(address)
    if scheme in (None, "file"):
        return DirectoryStore(disk, disk.resolve(local_directory(address, "the cold store")))
    if scheme not in STORE_SCHEMES:
        raise BadInput(
            f"{shown_address(address)[:200]!r} names no segment store: {scheme}: is not one of "
            f"{', '.join(STORE_SCHEMES)}; nothing was done, give a directory or an address such as s3://bucket/prefix"
        )
    from tidelog.disk.object_store import ObjectStore  # pyarrow.fs takes 30 ms to import

    return ObjectStore.open(address, timeout_s=timeout_s)


class DirectoryStore:
    """Objects as files of a directory: a second disk, or a mounted file system."""

    def __init__(self, disk: Disk, root: str) -> None:
        self._disk, self._root = disk, root.rstrip("/") or "/"
        self._made = ""  # the directory of the last put, whose name is durable

    @property
    def address(self) -> str:
        return self._root

    def put(self, key: str, pieces: Iterable[Buffer], /) -> None:
        path = join(self._root, check_key(key))
        temporary, directory = path + _TEMPORARY_SUFFIX, parent_dir(path)
        try:
            if directory != self._made or self._disk.stat(directory) is None:  # it may have been removed meanwhile
                self._disk.make_dir(directory)
                self._made = directory
            with suppress(FileNotFoundError):
                self._disk.remove(temporary)
            file = self._disk.open(temporary, "create")
            try:
                self._write(file, pieces)
            except BaseException:
                with suppress(OSError):
                    self._disk.remove(temporary)
                raise
            finally:
                file.close()
            self._disk.rename(temporary, path)
            sync_directory(self._disk, directory)
        except OSError as error:
            raise self._error(error) from error

    def _write(self, file: File, pieces: Iterable[Buffer]) -> None:
        pos = 0
        for piece in pieces:
            file.write(pos, piece)
            start_writeback(file, pos, len(piece))
            pos += len(piece)
        sync_file(file)

    def read(self, key: str, lo: int, hi: int, /) -> bytes:
        try:
            file = self._disk.open(join(self._root, check_key(key)))
            try:
                return file.read(lo, hi - lo)
            finally:
                file.close()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._error(error) from error

    def length(self, key: str, /) -> int | None:
        try:
            stat = self._disk.stat(join(self._root, check_key(key)))
        except OSError as error:
            raise self._error(error) from error
        return None if stat is None or stat.is_dir else stat.size

    def exists(self, key: str, /) -> bool:
        return self.length(key) is not None

    def delete(self, key: str, /) -> bool:
        path = join(self._root, check_key(key))
        try:
            removed = remove_if_exists(self._disk, path)
            if removed:
                sync_directory(self._disk, parent_dir(path))
        except OSError as error:
            raise self._error(error) from error
        return removed

    def list(self, prefix: str = "", /) -> Iterator[StoredObject]:
        try:
            yield from self._list(prefix.strip("/"))
        except OSError as error:
            raise self._error(error) from error

    def _list(self, directory: str, *, temporary: bool = False) -> Iterator[StoredObject]:
        path = join(self._root, directory) if directory else self._root
        try:
            names = self._disk.list_dir(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in names:
            key = f"{directory}/{name}" if directory else name
            stat = self._disk.stat(join(self._root, key))
            if stat is not None and stat.is_dir:
                yield from self._list(key, temporary=temporary)
            elif stat is not None and _KEY.fullmatch(key) and key.endswith(_TEMPORARY_SUFFIX) == temporary:
                yield StoredObject(key, stat.size)

    def remove_leftovers(self, prefix: str = "", /) -> tuple[StoredObject, ...]:
        try:
            found = tuple(self._list(prefix.strip("/"), temporary=True))
            for directory in sorted({parent_dir(each.key) for each in found if self._remove(each.key)}):
                sync_directory(self._disk, join(self._root, directory) if directory else self._root)
        except OSError as error:
            raise self._error(error) from error
        return found

    def _remove(self, key: str) -> bool:
        return remove_if_exists(self._disk, join(self._root, key))

    def _error(self, error: OSError) -> StoreUnavailable:
        if error.errno in _DENIED_ERRNOS:
            return StoreDenied(
                self.address, str(error), step="let this user write the directory, or choose another one, then retry"
            )
        step = "free space there and retry" if error.errno in DISK_FULL_ERRNOS else "repair or mount it and retry"
        return StoreUnavailable(self.address, str(error), step=step)


class RangeFile:
    """An object of a store as a file that is only read."""

    def __init__(self, path: str, size: int, read_range: Callable[[int, int], bytes]) -> None:
        self._path, self._size, self._read_range = path, size, read_range

    @property
    def path(self) -> str:
        return self._path

    @property
    def descriptor(self) -> int | None:
        return None

    def size(self) -> int:
        return self._size

    def read(self, pos: int, size: int, /) -> bytes:
        return self._read_range(pos, min(pos + size, self._size)) if pos < self._size else b""

    def map(self) -> memoryview:
        return memoryview(self.read(0, self._size))

    def close(self) -> None:
        pass

    def _refuse(self, *_: object) -> NoReturn:
        raise OSError(errno.EROFS, "an object of a store is only read", self._path)

    write = writev = truncate = allocate = sync = _refuse


MARKER_KEY: Final = "TIDELOG-STORE"
_MARKER_VERSION: Final = 1
MARKER_BYTES_MAX: Final = 4096


class StoreMarker(msgspec.Struct, frozen=True, kw_only=True):
    """The object that ties a store, or a prefix of a bucket, to one database. JSON, so that an operator can read it."""

    format: str = "tidelog segment store"
    version: int = _MARKER_VERSION
    database: str  # id of the database
    claim: str  # of the directory that may write and delete here: a copy of the database has the same id

    def encode(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"

    @classmethod
    def decode(cls, content: bytes, store: str) -> StoreMarker:
        """Decode a marker. Raises Corrupt or NewerFormat."""
        what = f"{store}/{MARKER_KEY}"
        try:
            marker = msgspec.json.decode(content, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Corrupt(
                what,
                pos=0,
                reason=f"it is no marker of a store: {error}",
                next_step="restore it, or use another prefix",
            ) from None
        if marker.version > _MARKER_VERSION:
            raise NewerFormat(what, found=marker.version, known=_MARKER_VERSION)
        return marker


def read_marker(store: SegmentStore) -> StoreMarker | None:
    """Read the marker of a store; None if it has none yet."""
    try:
        content = store.read(MARKER_KEY, 0, MARKER_BYTES_MAX)
    except FileNotFoundError:
        return None
    return StoreMarker.decode(content, store.address)
