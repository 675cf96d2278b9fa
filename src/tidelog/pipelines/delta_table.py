"""[shell] A Delta table whose commits are ours: files that executors wrote, added in one transaction of the table.

    commitInfo    "tidelog": the commit, as a directory of Parquet files would have it in its log
    txn           tidelog/<topic>/<epoch> → the seq where the next commit begins

The second is kept by the table's checkpoints and outlives the first, which goes with old log files; and a transaction
of the same name that came in between makes ours fail, so two exporters on two machines cannot double anything. Files
lie in the table's directory before they are committed: only the log makes them part of the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from tidelog.disk.seam import Disk, join
from tidelog.errors import BadInput, Damaged, Locked
from tidelog.pipelines import commits, footers, tables
from tidelog.pipelines.columns import Shape
from tidelog.pipelines.commits import Commit, DataFile
from tidelog.pipelines.tables import QUARANTINE, Foreign, Steps

LOG: Final = "_delta_log"
_KEY: Final = "tidelog"
_FEW: Final = 20  # versions that are looked at before all of them are


def app_id(topic: str, epoch: int) -> str:
    return f"tidelog/{topic}/{epoch}"


class DeltaLake:
    format: tables.Format = "delta"

    def __init__(self, disk: Disk, path: str, *, write: bool, step: Steps = tables.nothing) -> None:
        self._disk, self.path, self._step = disk, path, step
        self._table: DeltaTable | None = None
        tables.check_directory(disk, path, there=not write)
        self._release = tables.lock(disk, path) if write else None
        try:
            if write:
                # Before any file: a directory with files and without a log would pass for another format.
                disk.make_dir(join(path, LOG))
            self._load()
            if write:
                self._sweep()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._release is not None:
            self._release()
            self._release = None

    def _load(self) -> None:
        try:
            self._table = DeltaTable(self.path)
        except TableNotFoundError:
            if self._release is None:  # a log without a commit: somebody removed the first one
                raise BadInput(f"{self.path} is a Delta table without a commit; nothing was done, export it") from None
        except DeltaError as error:
            raise Damaged(f"{self.path} cannot be read as a Delta table ({error}); nothing was changed") from None

    # ── what it holds ─────────────────────────────────────────────────────────────────────────

    def _told(self, limit: int | None = None) -> Iterator[Commit]:
        """Commits of ours, newest first."""
        for info in self._table.history(limit) if self._table is not None else ():
            if _KEY in info:
                made = commits.decode(info[_KEY], f"{self.path}, version {info['version']}")
                yield msgspec.structs.replace(made, number=info["version"])

    def commits(self) -> list[Commit]:
        return list(self._told())[::-1]

    def last(self) -> Commit | None:
        """The newest commit of ours. A repair that came later leaves the end where it was, so it is as good."""
        if self._table is not None:
            self._table.update_incremental()  # its history is always of now, and what it says of itself is not
        made = next(self._told(_FEW), None) or next(self._told(), None)
        if made is None or self._table is None:
            return None
        stop = self.stands(made.topic, made.epoch)
        if stop is None or stop < made.stop:
            raise Damaged(
                f"{self.path}: its newest commit ends at seq {made.stop - 1} and its transaction says {stop}; nothing "
                "was written, look at the table's history"
            )
        # What a checkpoint of the table knows outlives the commits it was made from.
        return made if stop == made.stop else msgspec.structs.replace(made, first=made.stop, stop=stop, files=())

    def stands(self, topic: str, epoch: int) -> int | None:
        return None if self._table is None else self._table.transaction_version(app_id(topic, epoch))

    def names(self) -> list[str]:
        return [] if self._table is None else pa.table(self._table.get_add_actions())["path"].to_pylist()

    def files(self) -> list[DataFile]:
        told = {file.name: file for file in commits.active(self.commits())}
        found = [told[name] if name in told else footers.held(self._disk, self.path, name) for name in self.names()]
        return sorted((file for file in found if file is not None), key=lambda file: (file.first, file.name))

    def foreign(self) -> list[Foreign]:
        ours = {file.name for file in self.files()}
        return [Foreign(name) for name in self.names() if name not in ours]

    # ── writing ───────────────────────────────────────────────────────────────────────────────

    def staged(self, name: str) -> str:
        return join(self.path, name)

    def commit(self, commit: Commit) -> None:
        commits.check_next(self.last(), commit, self.path)
        self._step("sync the names of staged files")
        for place in {self.path, *(join(self.path, QUARANTINE) for file in commit.files if file.bad_name)}:
            self._disk.sync_dir(place)
        self._check_there(commit)
        actions: list[AddAction | RemoveAction] = [_added(file, commit) for file in commit.files]
        actions += [RemoveAction(name, True, commit.ts_ms) for name in commit.removed]
        self._write(commit, actions)
        self._step("sync the commit")
        self._sync()
        self._step("done")

    def _check_there(self, commit: Commit) -> None:
        """An exporter on another machine, which does not see our lock, takes our files for leftovers."""
        for file in commit.files:
            if self._disk.stat(join(self.path, file.name)) is None:
                raise Locked(
                    f"{join(self.path, file.name)} was removed meanwhile, by another process or by hand; nothing was "
                    "committed, run it again"
                )

    def _write(self, commit: Commit, actions: Sequence[AddAction | RemoveAction]) -> None:
        properties = CommitProperties(
            custom_metadata={_KEY: commits.encode(commit).decode()},
            max_commit_retries=0,
            app_transactions=[Transaction(app_id(commit.topic, commit.epoch), commit.stop)],
        )
        schema = Schema.from_arrow(Shape(commit.schema).arrow)
        self._step("write the commit")
        try:
            if self._table is None:
                added = [action for action in actions if isinstance(action, AddAction)]
                create_table_with_add_actions(self.path, schema, added, commit_properties=properties)
            else:
                self._table.create_write_transaction(list(actions), "append", schema, commit_properties=properties)
        except CommitFailedError as error:
            raise Locked(
                f"{self.path} was written by another process meanwhile ({error}); nothing was committed, run it again"
            ) from None
        except DeltaError as error:
            raise BadInput(f"{self.path} does not take these rows ({error}); nothing was committed") from None
        self._table = DeltaTable(self.path)

    def _sync(self) -> None:
        """What the library wrote survives a kill; this makes it survive a power cut."""
        assert self._table is not None, "a commit makes it"
        log = join(self.path, LOG)
        file = self._disk.open(join(log, f"{self._table.version():020d}.json"))
        try:
            file.sync()
        finally:
            file.close()
        self._disk.sync_dir(log)
        self._disk.sync_dir(self.path)

    def disown(self, files: Sequence[Foreign]) -> None:
        """Out of the table, not off the disk: older versions of the table still have them."""
        last = self.last()
        if not files or last is None:
            return
        removed = tuple(file.name for file in files)
        self.commit(msgspec.structs.replace(last, files=(), removed=removed, repair=True))

    def _sweep(self) -> None:
        """Remove what was written behind the newest commit and is part of no version."""
        last, there = self.last(), set(self.names())
        stop = 0 if last is None else last.stop
        for place, prefix in ((self.path, ""), (join(self.path, QUARANTINE), f"{QUARANTINE}/")):
            with suppress(FileNotFoundError):
                for name in self._disk.names(place):
                    where = tables.range_of(name)
                    if where is not None and where[0] >= stop and f"{prefix}{name}" not in there:
                        self._disk.remove(join(place, name))


def _added(file: DataFile, commit: Commit) -> AddAction:
    stats: dict[str, Any] = {"numRecords": file.rows}
    if file.rows and commit.transform is None:
        stats |= {"minValues": {"seq": file.first}, "maxValues": {"seq": file.stop - 1}, "nullCount": {"seq": 0}}
    return AddAction(file.name, file.bytes, {}, commit.ts_ms, True, msgspec.json.encode(stats).decode())
