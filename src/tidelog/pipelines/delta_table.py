"""[shell] A Delta table whose commits are ours: files that executors wrote, added in one transaction of the table.

    commitInfo    "tidelog": the commit, as a directory of Parquet files would have it in its log
    txn           tidelog/<topic>/<epoch> → the seq where the next commit begins

The second is kept by the table's checkpoints and outlives the first, which goes with old log files; and a transaction
of the same name that came in between makes ours fail, so two exporters on two machines cannot double anything. Files
lie in the table's directory before they are committed: only the log makes them part of the table.

Others may commit at any time (append, OPTIMIZE, DELETE, VACUUM). A commit of ours is written for exactly one version of
the table; where that version is taken, the table is looked at again and the commit is tried for the next one, after a
pause that grows, `TRIES` times. It is given up at once where it would no longer be right: another exporter went on, or
a file that a repair replaces is no longer there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from threading import Event
from typing import Any, Final

import msgspec
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from tidelog.disk.atomic import remove_if_there
from tidelog.disk.seam import Disk, join
from tidelog.errors import BadInput, Damaged
from tidelog.pipelines import commits, delta_read, footers, tables
from tidelog.pipelines.columns import Shape
from tidelog.pipelines.commits import Commit, DataFile, KeptFile
from tidelog.pipelines.tables import QUARANTINE, Leftover, Overtaken, Steps

LOG: Final = "_delta_log"
_KEY: Final = "tidelog"
_FEW: Final = 20  # versions that are looked at before all of them are
TRIES: Final = 20
_PAUSE_S: Final = 0.02  # before the second try; it doubles up to _PAUSE_MAX_S
_PAUSE_MAX_S: Final = 2.0
_VECTORS: Final = "deletionVectors"


def app_id(topic: str, epoch: int) -> str:
    return f"tidelog/{topic}/{epoch}"


class DeltaLake:
    format: tables.Format = "delta"

    def __init__(self, disk: Disk, path: str, *, write: bool, step: Steps = tables.nothing) -> None:
        self._disk, self.path, self._step = disk, path, step
        self._table: DeltaTable | None = None
        self._pause: Callable[[float], object] = Event().wait
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
        elif self._release is not None:
            self._load()  # another process may have made it
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
        found = [] if self._table is None else pa.table(self._table.get_add_actions())["path"].to_pylist()
        for name in found:
            if name.startswith("/") or "://" in name:
                raise BadInput(
                    f"{self.path} has a file outside of its directory ({name:.200}), as a shallow clone has; nothing "
                    "was changed, make a deep copy of the table"
                )
        return found

    def scanned(self) -> int | None:
        if self._table is None:
            return None
        mapped = delta_read.is_mapped(self._table)
        special = bool(self._table.metadata().partition_columns) or mapped or self._has_vectors()
        return self._table.version() if special else None

    def _has_vectors(self) -> bool:
        assert self._table is not None, "asked of a table that is there"
        if _VECTORS not in (self._table.protocol().reader_features or ()):
            return False
        return any(pa.record_batch(batch).num_rows for batch in self._table.deletion_vectors())

    def files(self) -> list[DataFile]:
        told = {file.name: file for file in commits.active(self.commits())}
        found = [told[name] if name in told else footers.held(self._disk, self.path, name) for name in self.names()]
        return sorted((file for file in found if file is not None), key=lambda file: (file.first, file.name))

    def foreign(self) -> list[str]:
        ours = {file.name for file in self.files()}
        return [name for name in self.names() if name not in ours]

    def leftovers(self) -> list[Leftover]:
        """None: only the log makes a file part of the table, and what it does not name is no row of it."""
        return []

    def drop_leftovers(self) -> None:
        """There are none."""

    # ── writing ───────────────────────────────────────────────────────────────────────────────

    def staged(self, name: str) -> str:
        return join(self.path, name)

    def commit(self, commit: Commit) -> None:
        actions: list[AddAction | RemoveAction] = [_added(file, commit) for file in commit.files]
        actions += [_copied(file, commit) for file in commit.kept]
        actions += [RemoveAction(name, True, commit.ts_ms) for name in (*commit.removed, *commit.retired)]
        pause_s = _PAUSE_S
        for left in range(TRIES - 1, -1, -1):
            self._check_current(commit)
            self._step("sync the names of staged files")
            # Also where only a foreign commit came in between: VACUUM removes files that no version names.
            tables.check_staged(self._disk, commit, self.staged)
            for place in {self.path, *(join(self.path, QUARANTINE) for file in commit.files if file.bad_name)}:
                self._disk.sync_dir(place)
            try:
                self._write(commit, actions)
                break
            except Overtaken:
                if not left:
                    raise
            self._pause(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
        self._step("sync the commit")
        self._sync()
        for name in commit.removed:
            remove_if_there(self._disk, join(self.path, f"{QUARANTINE}/{name}"))
        self._step("done")

    def _check_current(self, commit: Commit) -> None:
        """Refuse a commit that the table, as it is now, must not get."""
        last = self.last()
        commits.check_next(last, commit, self.path)
        if self._table is None:
            return
        gone = {*commit.removed, *commit.retired}.difference(self.names())
        if gone or (commit.repair and last is not None and last.stop != commit.stop):
            raise Overtaken(
                f"{self.path} was changed by another process while a part of it was repaired; nothing was committed, "
                "run it again"
            )
        if self._table.metadata().partition_columns or delta_read.is_mapped(self._table):
            raise BadInput(
                f"{self.path} has partition columns or mapped column names, which an export does not write; nothing "
                "was committed, export into another table"
            )
        there = pa.schema(self._table.schema().to_arrow())
        for field in Shape(commit.schema).arrow:
            if field.name not in there.names:
                raise BadInput(
                    f"{self.path} has no column {field.name!r} any more, another process dropped or renamed it; "
                    "nothing was committed, export into another table"
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
                schema = self._table.schema()
                self._table.create_write_transaction(list(actions), "append", schema, commit_properties=properties)
        except CommitFailedError as error:
            raise Overtaken(
                f"{self.path} was written by other processes meanwhile ({error}), {TRIES} times in a row; nothing was "
                "committed, run it again when they write less often"
            ) from None
        except DeltaError as error:
            if self._table is None and DeltaTable.is_deltatable(self.path):
                raise Overtaken(
                    f"{self.path} was made by another process meanwhile; nothing was committed, run it again"
                ) from None
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
    stats: dict[str, Any] = {"numRecords": file.rows if file.held is None else file.held}
    if stats["numRecords"] and commit.transform is None:
        stats |= {"minValues": {"seq": file.first}, "maxValues": {"seq": file.stop - 1}, "nullCount": {"seq": 0}}
    return AddAction(file.name, file.bytes, {}, commit.ts_ms, True, msgspec.json.encode(stats).decode())


def _copied(file: KeptFile, commit: Commit) -> AddAction:
    stats = msgspec.json.encode({"numRecords": file.rows}).decode()
    return AddAction(file.name, file.bytes, {}, commit.ts_ms, True, stats)
