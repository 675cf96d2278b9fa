"""[shell] Where the files of topics lie, and how many of them are open."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Final, TypeVar

from tidelog.commitlog.cache import Lru
from tidelog.commitlog.codecs.tide import TideCodec
from tidelog.commitlog.segment import Mapped, map_file
from tidelog.config import LogConfig
from tidelog.disk.atomic import read_all
from tidelog.disk.seam import Disk, join
from tidelog.errors import Damaged, Unavailable
from tidelog.types import Buffer

CODEC: Final = TideCodec(LogConfig())
T = TypeVar("T")
_NO_DESCRIPTORS: Final = frozenset((errno.EMFILE, errno.ENFILE))


class Maps:
    """What is mapped of all topics, bounded by number: descriptors and address space, not memory."""

    def __init__(self, capacity: int) -> None:
        self._held: Lru[tuple[Mapped, Buffer]] = Lru(capacity)
        self._lock = Lock()

    def get(self, key: int, load: Callable[[], tuple[Mapped, Buffer]]) -> tuple[Mapped, Buffer]:
        with self._lock:
            return self._held.get(key, load)

    def held(self, key: int) -> tuple[Mapped, Buffer] | None:
        """What is there; it counts as used."""
        with self._lock:
            return self._held.find(key)

    def drop(self, key: int) -> None:
        with self._lock:
            self._held.drop(key)

    def clear(self) -> None:
        with self._lock:
            self._held.clear()

    def forget(self) -> None:
        """`clear` in a forked child, where a thread that is not there may hold the lock."""
        self._held.clear()


class Fetched(Mapped):
    """A data file that is somewhere else: each look at it fetches what is looked at."""

    def __init__(self, fetch: Callable[[int, int], bytes], size: int) -> None:
        super().__init__(memoryview(b""))
        self._fetch, self.size = fetch, size

    def fetch(self, lo: int, hi: int) -> memoryview:
        lo, hi = max(lo, 0), min(hi, self.size)
        return memoryview(self._fetch(lo, hi) if lo < hi else b"")


def _range(lo: int, hi: int, disk: Disk, path: str) -> bytes:
    file = disk.open(path)
    try:
        return file.read(lo, hi - lo)
    finally:
        file.close()


class Home:
    """Where the segment files of one topic lie, and what of them is open."""

    def __init__(self, disk: Disk, directory: str, topic_id: int, maps: Maps) -> None:
        self.disk, self.directory, self.topic_id, self._maps = disk, directory, topic_id, maps

    def path(self, base: int, suffix: str) -> str:
        return join(self.directory, f"{CODEC.stem.format(base)}{suffix}")

    def open(self, base: int) -> tuple[Mapped, Buffer]:
        """The mapped data and index of a segment; a missing file reads as an empty one."""
        return self._maps.get(self._key(base), lambda: self._open(base))

    def is_open(self, base: int) -> bool:
        """Whether `open` has nothing to do."""
        return self.held(base) is not None

    def held(self, base: int) -> tuple[Mapped, Buffer] | None:
        """What `open` gives, where it has nothing to do."""
        return self._maps.held(self._key(base))

    def _open(self, base: int) -> tuple[Mapped, Buffer]:
        index = self._told(self.path(base, ".idx"), map_file) or b""
        path = self.path(base, ".data")
        if getattr(self.disk, "fetches", False):  # what is asked for costs a request, what is not costs nothing
            found = self.disk.stat(path)
            return Fetched(lambda lo, hi: self._told(path, partial(_range, lo, hi)), found.size if found else 0), index
        data = self._told(path, map_file)
        return Mapped(data or memoryview(b"")), index

    def part(self, base: int, suffix: str, lo: int, hi: int) -> bytes:
        """Bytes [lo, hi) of a file beside the data."""
        return self._told(self.path(base, suffix), partial(_range, lo, hi))

    def side(self, base: int, suffix: str) -> bytes | None:
        """A small file beside the data, whole; None where there is none."""
        return self._told(self.path(base, suffix), read_all)

    def _told(self, path: str, read: Callable[[Disk, str], T]) -> T:
        try:
            return read(self.disk, path)
        except OSError as error:
            step = "close some files and retry" if error.errno in _NO_DESCRIPTORS else "mend the disk and retry"
            kind = Unavailable if error.errno in _NO_DESCRIPTORS else Damaged
            raise kind(f"{path} cannot be read: {error}; nothing was changed, {step}") from error

    def forget(self, base: int) -> None:
        self._maps.drop(self._key(base))

    def _key(self, base: int) -> int:
        return self.topic_id << 64 | base
