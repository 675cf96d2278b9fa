"""Where backups are kept: a directory of a disk, or a store of whole objects (`segment_store`).

Both have the verbs `put`, `read`, `list`, `length` and `delete` over keys with "/" between parts. A key is complete or
absent: `put` of a directory renames a synced temporary file, a bucket shows an object when its upload ends. A directory
also links files, and syncs many files together: what was put survives a power cut after `flush`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from tidelog.addresses import SERVER_SCHEMES, local_directory, scheme_of
from tidelog.disk.bounded_store import BoundedStore
from tidelog.disk.durability import DISK_FULL_ERRNOS, ParallelSyncs, remove_if_exists
from tidelog.disk.interface import Disk, File, join, parent_dir, start_writeback
from tidelog.disk.posix import PosixDisk
from tidelog.disk.segment_store import SegmentStore, open_store
from tidelog.errors import BadInput, DiskFull, Error, StoreUnavailable, WriteFailed
from tidelog.types import Buffer

_LINK_REFUSED: Final = frozenset((errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES))
_TEMPORARY_SUFFIX: Final = ".tmp"
_UNSETTLED_FILES_MAX: Final = 64
_UNSETTLED_BYTES_MAX: Final = 64 << 20


class DirectoryStore:
    """Objects as files below a directory of a disk."""

    def __init__(self, disk: Disk, root: str) -> None:
        self._disk, self._root, self.address = disk, root, root
        self._unsynced: set[str] = set()  # directories with new or removed names
        self._known: set[str] = set()  # directories that were created or found
        self._unsettled: list[tuple[File, str, str]] = []  # written under temporary names: file, name, final name
        self._unsettled_bytes = 0

    def _path(self, key: str) -> str:
        return join(self._root, key)

    def _prepare(self, key: str) -> str:
        path = self._path(key)
        directory = parent_dir(path)
        if not self._known:
            self._disk.make_dir(self._root)
            self._known.add(self._root)
        if directory not in self._known:
            self._disk.make_dir(directory, durable=False)
        above = directory
        while above not in self._known:  # those that exist, too: a backup that was killed may have created them
            self._known.add(above)
            above = parent_dir(above)
            self._unsynced.add(above)
        self._unsynced.add(directory)
        return path

    def put(self, key: str, pieces: Iterable[Buffer], /) -> None:
        self.put_then_name(key, pieces, lambda: "")
        self._settle()

    def put_then_name(self, prefix: str, pieces: Iterable[Buffer], suffix: Callable[[], str], /) -> None:
        """`put` under the key `prefix + suffix()`, known when all pieces were written. It exists after `flush`: syncs
        of many files together cost less than one after the other."""
        path = self._prepare(prefix)
        temporary = path + _TEMPORARY_SUFFIX
        remove_if_exists(self._disk, temporary)
        file = self._disk.open(temporary, "create")
        pos = 0
        try:
            for piece in pieces:
                file.write(pos, piece)
                start_writeback(file, pos, len(memoryview(piece)))
                pos += len(memoryview(piece))
        except BaseException as error:
            if isinstance(error, Exception):
                with suppress(OSError):
                    file.close()
                    self._disk.remove(temporary)
            raise
        self._unsettled.append((file, temporary, path + suffix()))
        self._unsettled_bytes += pos
        if self._unsettled_bytes > _UNSETTLED_BYTES_MAX or len(self._unsettled) >= _UNSETTLED_FILES_MAX:
            self._settle()

    def _settle(self) -> None:
        """Sync what was written, then give it its name."""
        unsettled, self._unsettled, self._unsettled_bytes = self._unsettled, [], 0
        with ParallelSyncs() as syncs:
            synced = [syncs.sync_and_close(file) for file, _, _ in unsettled]
        for each in synced:
            each.result()
        for _, temporary, path in unsettled:
            self._disk.rename(temporary, path)

    def link(self, key: str, disk: Disk, path: str, /) -> bool:
        if disk is not self._disk:
            return False
        target = self._prepare(key)
        temporary = target + _TEMPORARY_SUFFIX
        remove_if_exists(disk, temporary)
        try:
            disk.link(path, temporary)
        except OSError as error:
            if error.errno in _LINK_REFUSED:
                return False
            raise
        disk.rename(temporary, target)
        remove_if_exists(disk, temporary)  # a rename to another name of the same file does nothing
        return True

    def read(self, key: str, lo: int, hi: int, /) -> bytes:
        file = self._disk.open(self._path(key))
        try:
            return file.read(lo, hi - lo)
        finally:
            file.close()

    def list(self, prefix: str, /) -> dict[str, int]:
        found: dict[str, int] = {}
        self._collect(prefix.rstrip("/"), found)
        return found

    def _collect(self, key: str, found: dict[str, int]) -> None:
        path = self._path(key) if key else self._root
        try:
            names = self._disk.list_dir(path)
        except FileNotFoundError:
            return
        for name in names:
            child = f"{key}/{name}" if key else name
            stat = self._disk.stat(join(path, name))
            if stat is None or name.endswith(_TEMPORARY_SUFFIX):
                continue
            if stat.is_dir:
                self._collect(child, found)
            else:
                found[child] = stat.size

    def length(self, key: str, /) -> int | None:
        stat = self._disk.stat(self._path(key))
        return None if stat is None or stat.is_dir else stat.size

    def delete(self, key: str, /) -> None:
        path = self._path(key)
        if remove_if_exists(self._disk, path):
            self._unsynced.add(parent_dir(path))

    def flush(self) -> None:
        self._settle()
        directories = sorted(self._unsynced)
        if isinstance(self._disk, PosixDisk):
            with ParallelSyncs() as syncs:
                syncs.sync_directories(self._disk, directories)
        else:
            for directory in directories:
                self._disk.sync_dir(directory)
        self._unsynced.clear()

    def remove_leftovers(self) -> None:
        """Remove temporary files of interrupted puts, and empty directories."""
        self._sweep(self._root)

    def _sweep(self, directory: str) -> None:
        for name in self._disk.list_dir(directory):
            path = join(directory, name)
            stat = self._disk.stat(path)
            if stat is not None and stat.is_dir:
                self._sweep(path)
                if not self._disk.list_dir(path):
                    self._disk.remove_dir(path)
                    self._unsynced.discard(path)
                    self._unsynced.add(directory)
                    self._known.discard(path)
            elif name.endswith(_TEMPORARY_SUFFIX) and remove_if_exists(self._disk, path):
                self._unsynced.add(directory)

    def wrap_error(self, error: OSError, step: str, /) -> Error:
        if error.errno in DISK_FULL_ERRNOS:
            return DiskFull(f"{self.address}: no space left while {step}; free space and retry")
        if isinstance(error, PermissionError | NotADirectoryError | FileExistsError):
            return BadInput(f"{self.address} cannot hold backups: {step} failed ({error}); choose another place")
        return WriteFailed(f"{self.address}: {step} failed ({error}); repair the disk and retry")


class BucketStore:
    """Objects in a store of whole objects, such as S3. Its errors are those of `segment_store`."""

    def __init__(self, store: SegmentStore) -> None:
        self._store, self.address = store, store.address

    def put(self, key: str, pieces: Iterable[Buffer], /) -> None:
        self._store.put(key, pieces)

    def link(self, key: str, disk: Disk, path: str, /) -> bool:  # noqa: ARG002
        return False

    def read(self, key: str, lo: int, hi: int, /) -> bytes:
        return self._store.read(key, lo, hi)

    def list(self, prefix: str, /) -> dict[str, int]:
        return {found.key: found.length for found in self._store.list(prefix.rstrip("/"))}

    def length(self, key: str, /) -> int | None:
        return self._store.length(key)

    def delete(self, key: str, /) -> None:
        self._store.delete(key)

    def flush(self) -> None:
        """An object survives a power cut when its `put` returns."""

    def remove_leftovers(self) -> None:
        """An upload that was cut off leaves no key."""

    def wrap_error(self, error: OSError, step: str, /) -> Error:
        return StoreUnavailable(self.address, f"{step} failed: {str(error)[:300]}")


def open_backup_store(address: str, disk: Disk) -> DirectoryStore | BucketStore:
    """Open the store of an address. Raises BadInput for one that cannot hold backups; creates nothing."""
    scheme = scheme_of(address)
    if scheme is None or scheme == "file":
        return DirectoryStore(disk, disk.resolve(local_directory(address, "the target of backups")))
    if scheme in SERVER_SCHEMES:
        raise BadInput(f"{address[:200]!r} is a server, backups go to a directory or an object store; nothing was done")
    return BucketStore(BoundedStore(open_store(address, disk=disk)))
