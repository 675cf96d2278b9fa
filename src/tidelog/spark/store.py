"""[shell] Topics that were copied to an object store, whole directories as they are.

The driver plans from the manifest that lies there, as from a directory; executors fetch the ranges that the plan names.
Whatever changes there while a query runs, a newer copy for example, is met as a directory's changes are: the seqs are
looked for again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tidelog.disk.store import opened
from tidelog.engine.core import directory
from tidelog.engine.home import Home, Maps
from tidelog.errors import BadInput, NotFound
from tidelog.spark import ranges
from tidelog.spark.groups import PathGroups
from tidelog.spark.offsets import Spot
from tidelog.spark.path import PathPlace
from tidelog.spark.place import Found, Wanted
from tidelog.spark.stretches import Stretch


class StoreGroups(PathGroups):
    """Groups as the copy has them. They cannot be moved there."""

    def check(self) -> None:
        raise BadInput(
            f"option group: {self._path} is in an object store, which is only read; nothing was read, leave group out, "
            "or read the directory or the server that it is a copy of"
        )

    def commit(self, group: str, spots: Mapping[str, Spot]) -> bool:  # noqa: ARG002
        self.check()
        return False


class StorePlace(PathPlace):
    def __init__(self, address: str) -> None:
        disk, path = opened(address)
        super().__init__(path, disk=disk)

    @property
    def groups(self) -> StoreGroups:
        return StoreGroups(self._path, self._disk, self._engine)

    def read(self, stretch: Stretch, wanted: Wanted, *, verify: bool) -> Iterator[Found]:  # noqa: ARG002
        if stretch.file is None:
            yield from self._again(stretch)
            return
        home = Home(self._disk, directory(self._path, stretch.epoch), stretch.epoch, Maps(1))
        base, at = stretch.file.base, stretch.first

        def part(kind: str, lo: int, hi: int) -> bytes:
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
            for found, until in ranges.of_file(part, home.path(base, ""), stretch, stretch.file, verify=verify):
                yield found
                at = until
        except NotFound:
            yield from self._again(stretch, at)
