"""What an export needs of a table, and which kinds there are.

    parquet   a directory of Parquet files with a commit log of ours beside them (`parquet_table`)
    delta     a Delta table; our commits are its commits (`delta_table`)

Executors write files under the names that `staged` gives, where no reader sees them. `commit` makes them part of the
table, all at once, together with what it says of the topic. One process writes a table at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

from tidelog.disk.interface import Disk, join
from tidelog.errors import BadInput, Locked, NotFound, Unavailable
from tidelog.pipelines.table_formats.commits import Commit, DataFile

Format: TypeAlias = Literal["parquet", "delta"]
OnStep: TypeAlias = Callable[
    [str], None
]  # called with the name of the step that comes next; tests end the process there
QUARANTINE_DIR: Final = "_quarantine"
OWN_DIR: Final = "_tidelog"
LOCK_FILE: Final = "lock"


class TableChanged(Locked):
    """Another process committed to the table meanwhile. Nothing of ours was committed; planning anew may succeed."""


class StagedFileMissing(Unavailable):
    """A file that a task wrote is not where the driver looks for it, or has another length."""


class Leftover(NamedTuple):
    name: str
    epoch: int
    first: int
    stop: int
    bad_name: str | None


class Table(Protocol):
    path: str
    format: Format

    def last_commit(self) -> Commit | None:
        """The newest commit of ours: how far the table is."""
        ...

    def next_export_seq(self, topic: str, epoch: int) -> int | None:
        """Where the next commit of a topic begins, by what outlives the commits themselves; None: unknown."""
        ...

    def commits(self) -> list[Commit]:
        """Every commit of ours that is known, oldest first."""
        ...

    def own_files(self) -> list[DataFile]:
        """The files of ours that are part of the table now, by range."""
        ...

    def visible_files(self) -> list[str]:
        """Every file that readers of the table see."""
        ...

    def foreign_files(self) -> list[str]:
        """Files that readers of the table see beside those."""
        ...

    def scan_version(self) -> int | None:
        """The version to read through the table's library, where its files alone do not say what a reader sees
        (deletion vectors, mapped columns, partition columns). None: rows are what the files hold."""
        ...

    def leftovers(self) -> list[Leftover]:
        """Files of ours that follow a hole in the table and whose commits are gone."""
        ...

    def drop_leftovers(self) -> None:
        """Remove them. The caller has checked that the log can give their rows back (`leftovers.drop`)."""
        ...

    def staged_path(self, name: str) -> str:
        """Where an executor writes a file that is to be called `name`."""
        ...

    def commit(self, commit: Commit) -> None:
        """Make files part of the table, and take those out that they replace. When it returns they are, whatever
        happens to the machine; when it raises, or the process dies in it, all of them are or none is; opening the
        table for writing finishes what was begun. Every staged file is verified first (`check_staged`)."""
        ...

    def close(self) -> None: ...


def no_step(_: str) -> None:
    """The step that nothing happens at."""


def lock_table(disk: Disk, path: str) -> Callable[[], None]:
    """Be the one writer of a table; call what this gives to let another in."""
    own = join(path, OWN_DIR)
    disk.make_dir(own)
    try:
        return disk.lock(join(own, LOCK_FILE)).release
    except BlockingIOError:
        raise Locked(
            f"{path} is being written by another process; nothing was changed, wait for it or stop it"
        ) from None


def check_table_directory(disk: Disk, path: str, *, must_exist: bool) -> None:
    found = disk.stat(path)
    if found is None and must_exist:
        raise NotFound(f"there is no table at {path}; nothing was done, check the path")
    if found is not None and not found.is_dir:
        raise BadInput(f"{path} is a file, a table is a directory; nothing was changed, check the path")


def check_staged(disk: Disk, commit: Commit, staged_path: Callable[[str], str]) -> None:
    """Verify that the driver sees every file of a commit with the length that its task reported."""
    wanted: list[tuple[str, int | None]] = []
    for file in commit.files:
        wanted.append((file.name, file.bytes))
        if file.bad_name is not None:
            wanted.append((file.bad_name, file.bad_bytes))
    wanted += [(file.name, file.bytes) for file in commit.kept]
    for name, size in wanted:
        path = staged_path(name)
        found = disk.stat(path)
        if found is not None and (size is None or found.size == size):
            continue
        what = "is not there" if found is None else f"has {found.size} bytes, not {size}"
        raise StagedFileMissing(
            f"{path}, which a task has written, {what}: it was removed meanwhile, or executors write to disks that "
            "the driver does not see; nothing was committed. The driver and all executors need the same directory "
            "under this path; mount it everywhere and run it again"
        )


def check_empty(table: Table) -> None:
    """Refuse an existing table that no export has written: the origin of its rows would be unknown."""
    names = table.visible_files()
    if names:
        raise BadInput(
            f"{table.path} holds {names[0]} and no commit of an export; nothing was written, name a table that is new"
        )


def data_file_name(first: int, stop: int, run: str, attempt: int) -> str:
    """Sorts by range. `run` and `attempt` keep apart what was tried more than once."""
    return f"part-{first:020d}-{stop:020d}-{run}-{attempt:05d}.parquet"


def parse_file_range(name: str) -> tuple[int, int] | None:
    """The range that a name of ours says, or None where it is none."""
    parts = name.removesuffix(".parquet").split("-")
    if not name.startswith("part-") or len(parts) < 5 or not (parts[1].isdigit() and parts[2].isdigit()):
        return None
    return int(parts[1]), int(parts[2])
