"""A table as a directory of Parquet files, which Spark reads directly, with a commit log beside them.

    table/
      part-<first>-<stop>-….parquet      committed: seen by readers of the directory
      _part-….parquet                    staged, not committed; readers skip names that start with `_`
      _tidelog/log/00000000000000000017.json
      _tidelog/lock
      _quarantine/

A commit has these steps, in this order:

    1  staged files               verify their lengths, sync their names
    2  log/<n>.json               write and sync the commit. This step decides: nothing happened before it, all after it
    3  _part-… → part-…           rename and sync
    4  replaced files             remove; files of other programs are renamed to _foreign-…

Opening the table for writing repeats 3 and 4 of the newest commit and removes staged files without a commit. A reader
of the bare directory may see a part of the newest commit between 2 and 3, and rows twice while a repair is at 3 or 4.

If the log or its end is gone, the footers of the files have their topic and range. Consecutive files become one commit.
Files after a missing range are leftovers: an export removes them when the topic still has their records, and exports
these records again.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import msgspec

from tidelog.disk.durability import read_file, replace_file
from tidelog.disk.interface import Disk, join
from tidelog.errors import Damaged
from tidelog.pipelines.table_formats import commits, interface, parquet_files
from tidelog.pipelines.table_formats import parquet_files as footers
from tidelog.pipelines.table_formats.commits import Commit, DataFile
from tidelog.pipelines.table_formats.interface import OWN_DIR, QUARANTINE_DIR, Leftover, OnStep, TableDirectory
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
        self._directory = TableDirectory(disk, path, self.format, write=write)
        if write:
            try:
                disk.make_dir(self._log)
                self._recover()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        self._directory.close()

    # ── content ───────────────────────────────────────────────────────────────────────────────

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
        return None  # no state outlives commits and files, and files become commits again

    def scan_version(self) -> int | None:
        return None

    def visible_files(self) -> list[str]:
        return [name for name in self._disk.list_dir(self.path) if name.endswith(".parquet") and name[0] not in "_."]

    # ── writing ───────────────────────────────────────────────────────────────────────────────

    def staged_path(self, name: str) -> str:
        return interface.staged_path(self.path, self.format, name)

    def commit(self, commit: Commit) -> None:
        numbers = self._commit_numbers()
        last = self._read_commit(numbers[-1]) if numbers else None
        commits.check_continues(last, commit, self.path)
        made = msgspec.structs.replace(commit, number=numbers[-1] + 1 if numbers else 0)
        self._step("sync the names of staged files")
        self._directory.sync_staged(made)
        self._step("write the commit")
        path = self._commit_path(made.number)
        try:
            replace_file(self._disk, path, commits.encode_commit(made))
        except OSError as error:
            raise parquet_files.disk_full_error(path, error) from error
        self._apply_commit(made)

    def _apply_commit(self, commit: Commit) -> None:
        """Run steps 3 and 4, or the rest of them."""
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
            gone |= self._directory.remove_file(name)
        for name in commit.retired:
            if self._disk.stat(join(self.path, name)) is not None:
                self._step("rename a replaced file")
                # Readers skip this name. Files of other programs are never deleted.
                self._disk.rename(join(self.path, name), join(self.path, f"_foreign-{commit.number}-{name}"))
                gone = True
        if gone:
            self._disk.sync_dir(self.path)
        self._step("done")

    # ── recovery, after a crash or after commits were removed ────────────────────────────────

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
        self._remove_files(replaced)  # by a repair that had not finished when the log was removed
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
            gone |= self._directory.remove_file(name)
        if gone:
            self._disk.sync_dir(self.path)

    def _remove_staged(self) -> None:
        """Remove staged files without a commit."""
        for place in (self.path, join(self.path, QUARANTINE_DIR)):
            with suppress(FileNotFoundError):
                for name in self._disk.list_dir(place):
                    if name.startswith(_STAGED_PREFIXES):
                        self._disk.remove(join(place, name))

    def _uncommitted_files(self, stop: int) -> dict[str, FileFooter]:
        """Return the files of exports after the newest known commit."""
        found = {}
        for name in self.visible_files():
            where = interface.parse_file_range(name)
            if where is not None and where[0] >= stop:
                footer = footers.read_footer(self._disk, join(self.path, name))
                if footer is not None:
                    found[name] = footer
        return found

    def _adopt_files(self, last: Commit | None, uncommitted: dict[str, FileFooter]) -> Commit | None:
        """Build one commit of the files that continue the last commit without a missing range."""
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
    """Return the files in the order of their renames. Rows that a repair copied come last: where they are visible, the
    rest of the repair is too."""
    own = [name for file in commit.files for name in (file.bad_name, file.name) if name is not None]
    return [*own, *(file.name for file in commit.kept)]


def _choose_newest(uncommitted: dict[str, FileFooter]) -> tuple[dict[str, FileFooter], list[str]]:
    """Of files with overlapping ranges choose those of the newest run that covers all of them, else those of the oldest
    run. Return the chosen files and the names of the others, whose ranges are covered."""
    chosen: dict[str, FileFooter] = {}
    others: list[str] = []
    for group in interface.group_overlapping(uncommitted.items(), lambda item: (item[1].first, item[1].stop, item[0])):
        everything = _covered_ranges(footer for _, footer in group)
        runs = sorted({footer.run for _, footer in group})
        covering = (run for run in runs[:0:-1] if _covered_ranges(f for _, f in group if f.run == run) == everything)
        run = next(covering, runs[0])
        covered = _covered_ranges(footer for _, footer in group if footer.run == run)
        for name, footer in group:
            inside = any(low <= footer.first and footer.stop <= high for low, high in covered)
            if footer.run == run or not inside:
                chosen[name] = footer
            else:
                others.append(name)
    return chosen, others


def _covered_ranges(footers: Iterable[FileFooter]) -> interface.SeqRanges:
    return interface.merge_ranges((footer.first, footer.stop) for footer in footers)
