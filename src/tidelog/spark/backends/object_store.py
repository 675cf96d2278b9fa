"""Topics that were copied to an object store, whole directories as they are.

The driver plans from the manifest there, as from a directory; executors fetch the ranges that the plan names.
Whatever changes there while a query runs, a newer copy for example, is met as a directory's changes are: the seqs are
looked for again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tidelog.disk.object_store import open_object_store
from tidelog.engine.context import topic_directory
from tidelog.engine.segment import MmapCache, SegmentFiles
from tidelog.errors import BadInput, NotFound
from tidelog.spark.backends import range_reader
from tidelog.spark.backends.directory import DirectoryBackend
from tidelog.spark.backends.interface import ColumnSet, ReadChunk, ReadRange
from tidelog.spark.groups import DirectoryGroups
from tidelog.spark.offsets import Position


class ObjectStoreGroups(DirectoryGroups):
    """Groups as the copy has them. They cannot be moved there."""

    def check_writable(self) -> None:
        raise BadInput(
            f"option group: {self._path} is in an object store, which is only read; nothing was read, leave group out, "
            "or read the directory or the server that it is a copy of"
        )

    def commit(self, group: str, positions: Mapping[str, Position]) -> bool:  # noqa: ARG002
        self.check_writable()
        return False


class ObjectStoreBackend(DirectoryBackend):
    def __init__(self, address: str) -> None:
        disk, path = open_object_store(address)
        super().__init__(path, disk=disk)

    @property
    def groups(self) -> ObjectStoreGroups:
        return ObjectStoreGroups(self._path, self._disk, self._engine)

    def read(self, read_range: ReadRange, columns: ColumnSet, *, verify: bool) -> Iterator[ReadChunk]:  # noqa: ARG002
        if read_range.file is None:
            yield from self._read_from_engine(read_range)
            return
        home = SegmentFiles(self._disk, topic_directory(self._path, read_range.epoch), read_range.epoch, MmapCache(1))
        base, at = read_range.file.base, read_range.first

        def fetch(kind: str, lo: int, hi: int) -> bytes:
            path = home.path(base, f".{kind}")
            try:
                file = self._disk.open(path)
            except FileNotFoundError as error:
                raise NotFound(f"{path} is gone") from error
            try:
                found = file.read(lo, hi - lo)
            finally:
                file.close()
            if len(found) < hi - lo:
                raise NotFound(f"{path} is shorter than it was")
            return found

        try:
            for found, until in range_reader.read_segment_ranges(
                fetch, home.path(base, ""), read_range, read_range.file, verify=verify
            ):
                yield found
                at = until
        except NotFound:
            yield from self._read_from_engine(read_range, at)
