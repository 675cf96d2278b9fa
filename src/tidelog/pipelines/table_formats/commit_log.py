"""The log of the commits of a Parquet table: the next number is written once, or not at all.

    directory   _tidelog/log/00000000000000000017.json       one file a commit; the table's lock keeps writers apart
    bucket      _tidelog/log/_delta_log/…                     a Delta table without files, a version a commit

A bucket has no locks, so two writers must meet in the log: the second one that writes commit 17 has to fail. That needs
a write on condition, which deltalake's object store has on S3, GCS and Azure and pyarrow's does not.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final, Protocol

import msgspec
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import create_table_with_add_actions

from tidelog.disk.bucket_disk import BucketDisk
from tidelog.disk.durability import read_file, replace_file
from tidelog.disk.interface import Disk, join
from tidelog.errors import Damaged
from tidelog.pipelines.table_formats import interface
from tidelog.pipelines.table_formats.interface import OWN_DIR, Commit, TableChanged

COMMIT_LOG_DIR: Final = "log"
_NUMBER_DIGITS: Final = 20
_COMMIT_KEY: Final = "tidelog"
_SCHEMA: Final = pa.schema([pa.field("commit", pa.string())])  # of no rows


class CommitLog(Protocol):
    def last(self) -> Commit | None:
        """Return the newest commit."""
        ...

    def all(self) -> list[Commit]:
        """Return all commits, oldest first."""
        ...

    def append(self, commit: Commit) -> None:
        """Write a commit under its number. Raises TableChanged if there is one of this number."""
        ...


def open_commit_log(disk: Disk, path: str, *, write: bool) -> CommitLog:
    """Open the log of the table at `path`."""
    log = join(join(path, OWN_DIR), COMMIT_LOG_DIR)
    if isinstance(disk, BucketDisk):
        return BucketCommitLog(disk, log)
    if write:
        disk.make_dir(log)
    return DirectoryCommitLog(disk, log)


class DirectoryCommitLog:
    def __init__(self, disk: Disk, path: str) -> None:
        self._disk, self._path = disk, path

    def last(self) -> Commit | None:
        numbers = self._numbers()
        return self._read(numbers[-1]) if numbers else None

    def all(self) -> list[Commit]:
        return [self._read(number) for number in self._numbers()]

    def _numbers(self) -> list[int]:
        with suppress(FileNotFoundError):
            names = self._disk.list_dir(self._path)
            return sorted(int(name[:_NUMBER_DIGITS]) for name in names if name[_NUMBER_DIGITS:] == ".json")
        return []

    def _read(self, number: int) -> Commit:
        path = self._commit_path(number)
        content = read_file(self._disk, path)
        if content is None:
            raise Damaged(f"{path} went away while it was read; nothing was changed, run it again")
        return interface.decode_commit(content, path)

    def _commit_path(self, number: int) -> str:
        return join(self._path, f"{number:0{_NUMBER_DIGITS}d}.json")

    def append(self, commit: Commit) -> None:
        path = self._commit_path(commit.number)
        try:
            replace_file(self._disk, path, interface.encode_commit(commit))
        except OSError as error:
            raise interface.disk_full_error(path, error) from error


class BucketCommitLog:
    def __init__(self, disk: BucketDisk, path: str) -> None:
        self._disk, self._path = disk, path
        self._options = disk.options.to_delta()

    def _open(self) -> DeltaTable | None:
        try:
            return DeltaTable(self._path, storage_options=self._options)
        except TableNotFoundError:
            return None
        except (DeltaError, OSError) as error:
            raise self._disk.error(self._path, error) from None

    def _commits(self, limit: int | None) -> list[Commit]:
        """Return the newest commits, newest first."""
        table = self._open()
        return [
            msgspec.structs.replace(
                interface.decode_commit(info[_COMMIT_KEY], f"{self._path}, version {info['version']}"),
                number=info["version"],
            )
            for info in (table.history(limit) if table is not None else ())
        ]

    def last(self) -> Commit | None:
        return next(iter(self._commits(1)), None)

    def all(self) -> list[Commit]:
        return self._commits(None)[::-1]

    def append(self, commit: Commit) -> None:
        properties = CommitProperties(
            custom_metadata={_COMMIT_KEY: interface.encode_commit(commit).decode()}, max_commit_retries=0
        )
        table = self._open()
        number = 0 if table is None else table.version() + 1
        try:
            if number != commit.number:
                raise CommitFailedError(f"version {commit.number} exists")
            if table is None:
                create_table_with_add_actions(
                    self._path,
                    Schema.from_arrow(_SCHEMA),
                    [],
                    commit_properties=properties,
                    storage_options=self._options,
                    configuration={"delta.enableExpiredLogCleanup": "false"},
                )
            else:
                table.create_write_transaction([], "append", table.schema(), commit_properties=properties)
        except (DeltaError, OSError) as error:
            last = self.last()
            if last == commit:
                return  # the store answered a repeated request
            if last is not None and last.number >= commit.number:
                raise TableChanged(
                    f"{self._path}: another process made commit {commit.number} meanwhile; nothing was committed, run "
                    "it again"
                ) from None
            raise self._disk.error(self._path, error) from None
