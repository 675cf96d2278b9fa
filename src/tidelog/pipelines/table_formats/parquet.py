"""A directory of Parquet files that Spark reads as it is, with commits beside them.

    table/
      part-<first>-<stop>-….parquet      committed: what a reader of the directory sees
      _part-….parquet                    written and not committed; readers pass over names with `_`
      _tidelog/log/00000000000000000017.json
      _tidelog/lock
      _quarantine/

A commit, in this order and no other:

    1  staged files               each is there with its length; names synced
    2  log/<n>.json               the commit: replaced into place, synced. Before it nothing happened, after it all did
    3  _part-… → part-…           synced
    4  files that it replaces     removed; those of others are renamed to _foreign-…

Opening the table for writing does 3 and 4 of the newest commit again, and removes what was staged for none. A reader
of the bare directory may see a part of the newest commit between 2 and 3, and rows twice while a repair is at 3 or 4.

Where the log, or the end of it, is gone, the files say in their footers which range of which topic they are. Those that
follow each other without a gap are written down as one commit. What is left over follows a hole: it is removed once it
is known that the log still has its records (`leftovers`), and the next export makes it again.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import msgspec

from tidelog.disk.durability import read_file, remove_if_exists, replace_file
from tidelog.disk.interface import Disk, join
from tidelog.errors import Damaged
from tidelog.pipelines.table_formats import commits, interface, parquet_files
from tidelog.pipelines.table_formats import parquet_files as footers
from tidelog.pipelines.table_formats.commits import Commit, DataFile
from tidelog.pipelines.table_formats.interface import OWN_DIR, QUARANTINE_DIR, Leftover, OnStep
from tidelog.pipelines.table_formats.parquet_files import FileFooter

COMMIT_LOG_DIR: Final = "log"
_NUMBER_DIGITS: Final = 20
_STAGED_PREFIXES: Final = ("_part-", "_kept-")


class ParquetTable:
    format: interface.Format = "parquet"

    def __init__(self, disk: Disk, path: str, *, write: bool, step: OnStep = interface.no_step) -> None:
        self._disk, self.path, self._step = disk, path, step
        self._log = join(join(path, OWN_DIR), COMMIT_LOG_DIR)
        self._leftovers: dict[str, FileFooter] = {}
        interface.check_table_directory(disk, path, must_exist=not write)
        self._release = interface.lock_table(disk, path) if write else None
        if write:
            try:
                disk.make_dir(self._log)
                self._recover()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        if self._release is not None:
            self._release()
            self._release = None

    # ── what it holds ─────────────────────────────────────────────────────────────────────────

    def _commit_numbers(self) -> list[int]:
        with suppress(FileNotFoundError):
            names = self._disk.list_dir(self._log)
            return sorted(int(name[:_NUMBER_DIGITS]) for name in names if name[_NUMBER_DIGITS:] == ".json")
        return []

    def _read_commit(self, number: int) -> Commit:
        path = self._commit_path(number)
        content = read_file(self._disk, path)
        if content is None:
            raise Damaged(f"{path} went away while it was read; nothing was changed, run it again")
        return commits.decode_commit(content, path)

    def _commit_path(self, number: int) -> str:
        return join(self._log, f"{number:0{_NUMBER_DIGITS}d}.json")

    def last_commit(self) -> Commit | None:
        numbers = self._commit_numbers()
        return self._read_commit(numbers[-1]) if numbers else None

    def commits(self) -> list[Commit]:
        return [self._read_commit(number) for number in self._commit_numbers()]

    def own_files(self) -> list[DataFile]:
        return commits.active_files(self.commits())

    def next_export_seq(self, topic: str, epoch: int) -> int | None:  # noqa: ARG002
        """Nothing outlives the commits and the files here, and files become commits again."""
        return None

    def foreign_files(self) -> list[str]:
        ours = {file.name for file in self.own_files()}
        return [name for name in self.visible_files() if name not in ours]

    def scan_version(self) -> int | None:
        return None

    def visible_files(self) -> list[str]:
        return [name for name in self._disk.list_dir(self.path) if name.endswith(".parquet") and name[0] not in "_."]

    # ── writing ───────────────────────────────────────────────────────────────────────────────

    def staged_path(self, name: str) -> str:
        folder, _, base = name.rpartition("/")
        return join(join(self.path, folder) if folder else self.path, f"_{base}")

    def commit(self, commit: Commit) -> None:
        numbers = self._commit_numbers()
        last = self._read_commit(numbers[-1]) if numbers else None
        commits.check_continues(last, commit, self.path)
        made = msgspec.structs.replace(commit, number=numbers[-1] + 1 if numbers else 0)
        self._step("sync the names of staged files")
        interface.check_staged(self._disk, made, self.staged_path)
        for place in {self.path, *(join(self.path, QUARANTINE_DIR) for file in made.files if file.bad_name)}:
            self._disk.sync_dir(place)
        self._step("write the commit")
        path = self._commit_path(made.number)
        try:
            replace_file(self._disk, path, commits.encode_commit(made))
        except OSError as error:
            raise parquet_files.disk_full_error(path, error) from error
        self._apply_commit(made)

    def _apply_commit(self, commit: Commit) -> None:
        """Steps 3 and 4, from wherever they were left."""
        moved = set()
        for name in _files_in_order(commit):
            staged, path = self.staged_path(name), join(self.path, name)
            if self._disk.stat(staged) is not None:
                self._step("rename a file")
                self._disk.rename(staged, path)
                moved.add(path.rpartition("/")[0])
        self._step("sync the names of files")
        for place in moved:
            self._disk.sync_dir(place)
        gone = False
        for name in commit.removed:
            self._step("remove a replaced file")
            gone |= remove_if_exists(self._disk, join(self.path, name))
            remove_if_exists(self._disk, join(self.path, f"{QUARANTINE_DIR}/{name}"))
        for name in commit.retired:
            if self._disk.stat(join(self.path, name)) is not None:
                self._step("rename a replaced file")
                # Readers pass over this name. Bytes that others wrote are not destroyed.
                self._disk.rename(join(self.path, name), join(self.path, f"_foreign-{commit.number}-{name}"))
                gone = True
        if gone:
            self._disk.sync_dir(self.path)
        self._step("done")

    # ── after a crash, or after the commits were removed ─────────────────────────────────────

    def _recover(self) -> None:
        last = self.last_commit()
        if last is not None:
            self._apply_commit(last)
        self._remove_staged()
        loose = self._uncommitted_files(last.stop if last is not None else 0)
        chosen, replaced = _choose_newest(loose)
        made = self._adopt_files(last, chosen)
        if made is not None:
            replace_file(self._disk, self._commit_path(made.number), commits.encode_commit(made))
        self._remove_files(replaced)  # a repair replaced them, and was not finished when the log went away
        kept = set() if made is None else {file.name for file in made.files}
        self._leftovers = {name: footer for name, footer in chosen.items() if name not in kept}

    def leftovers(self) -> list[Leftover]:
        found = []
        for name, footer in self._leftovers.items():
            bad_name = f"{QUARANTINE_DIR}/{name}"
            is_there = self._disk.stat(join(self.path, bad_name)) is not None
            found.append(Leftover(name, footer.epoch, footer.first, footer.stop, bad_name if is_there else None))
        return found

    def drop_leftovers(self) -> None:
        self._remove_files(self._leftovers)
        self._leftovers = {}

    def _remove_files(self, names: Iterable[str]) -> None:
        gone = False
        for name in names:
            self._step("remove a file of no commit")
            gone |= remove_if_exists(self._disk, join(self.path, name))
            remove_if_exists(self._disk, join(self.path, f"{QUARANTINE_DIR}/{name}"))
        if gone:
            self._disk.sync_dir(self.path)

    def _remove_staged(self) -> None:
        """Remove what was staged and not committed."""
        for place in (self.path, join(self.path, QUARANTINE_DIR)):
            with suppress(FileNotFoundError):
                for name in self._disk.list_dir(place):
                    if name.startswith(_STAGED_PREFIXES):
                        self._disk.remove(join(place, name))

    def _uncommitted_files(self, stop: int) -> dict[str, FileFooter]:
        """Own files after the newest known commit."""
        found = {}
        for name in self.visible_files():
            where = interface.parse_file_range(name)
            if where is not None and where[0] >= stop:
                footer = footers.read_footer(self._disk, join(self.path, name))
                if footer is not None:
                    found[name] = footer
        return found

    def _adopt_files(self, last: Commit | None, uncommitted: dict[str, FileFooter]) -> Commit | None:
        """One commit for the files that follow the last one, each where the ones before it end."""
        made: list[DataFile] = []
        at = last.stop if last is not None else min((footer.first for footer in uncommitted.values()), default=0)
        for name, footer in sorted(uncommitted.items(), key=lambda item: (item[1].first, -item[1].stop, item[0])):
            if footer.transform is not None:
                raise Damaged(
                    f"{self.path}: the commit of {name} is gone, and its rows went through {footer.transform}, so they "
                    "cannot be made again from the log alone; nothing was changed, put the log of the table back"
                )
            held = footers.data_file_from_footer(self._disk, self.path, name)
            if held is None or (last is not None and footer.epoch != last.epoch):
                break
            if held.first > at:
                break
            made.append(held)
            at = max(at, held.stop)
        if not made:
            return None
        said = uncommitted[made[0].name]
        number = 0 if last is None else last.number + 1
        return Commit(said.topic, said.epoch, made[0].first, at, tuple(made), said.schema, said.shape, number=number)


def _files_in_order(commit: Commit) -> list[str]:
    """Files in the order in which they are put in place. The rows that a repair copied come last, so that where they
    are seen everything else of the repair is there."""
    own = [name for file in commit.files for name in (file.bad_name, file.name) if name is not None]
    return [*own, *(file.name for file in commit.kept)]


def _choose_newest(uncommitted: dict[str, FileFooter]) -> tuple[dict[str, FileFooter], list[str]]:
    """Of files whose ranges overlap those of the newest run, if they cover all of them, else those of the oldest one;
    and the names of the others, whose ranges are covered."""
    chosen: dict[str, FileFooter] = {}
    others: list[str] = []
    group: dict[str, FileFooter] = {}
    stop = 0

    def close() -> None:
        runs = sorted({footer.run for footer in group.values()})
        for run in (*runs[:0:-1], *runs[:1]):
            mine = {name: footer for name, footer in group.items() if footer.run == run}
            covered = _covered_ranges(mine.values())
            if run == runs[0] or covered == _covered_ranges(group.values()):
                for name, footer in group.items():
                    inside = any(low <= footer.first and footer.stop <= high for low, high in covered)
                    if name in mine or not inside:
                        chosen[name] = footer
                    else:
                        others.append(name)
                break
        group.clear()

    for name, footer in sorted(uncommitted.items(), key=lambda item: (item[1].first, item[1].stop, item[0])):
        if group and footer.first >= stop:
            close()
        group[name], stop = footer, max(stop if group else 0, footer.stop)
    if group:
        close()
    return chosen, others


def _covered_ranges(footers: Iterable[FileFooter]) -> list[tuple[int, int]]:
    """The ranges of some files, those that touch or overlap as one."""
    found: list[tuple[int, int]] = []
    for first, stop in sorted((footer.first, footer.stop) for footer in footers):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((first, stop))
    return found
