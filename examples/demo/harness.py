"""The stage of the guided tour: how it talks, how it checks itself, and the accidents it arranges.

A claim of the tour that does not hold ends it with a message and a non-zero exit code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

from tidelog.addresses import check_path
from tidelog.cli.render import build_table, make_console
from tidelog.disk.interface import join
from tidelog.disk.posix import PosixDisk

MARKER_FILE = ".tidelog-demo"  # only a directory that holds this is ever removed

T = TypeVar("T")


def section(title: str, *lines: str) -> None:
    screen = make_console(sys.stdout)
    screen.print(f"\n{title}", style="bold")
    screen.print("─" * len(title), style="dim")
    for line in lines:
        print(line)


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print()
    make_console(sys.stdout).print(build_table(titles, rows))
    print()


def check(condition: bool, claim: str) -> None:
    """Go on if the claim held; end the tour, loudly, if it did not."""
    if not condition:
        raise SystemExit(f"\nthe tour ends here, this did not hold: {claim}")
    print(f"  [ok] {claim}")


def require(value: T | None, name: str) -> T:
    if value is None:
        raise SystemExit(f"\nthe tour ends here: there is no {name}")
    return value


# ── files, through the library's Disk interface ─────────────────────────────────────────────────


def make_empty_dir(path: str) -> None:
    """An empty directory; what an earlier tour left there is removed, anything else is refused."""
    check_path(path)
    disk = PosixDisk()
    stat = disk.stat(path)
    if stat is not None:
        names = disk.list_dir(path) if stat.is_dir else [path]
        if names and MARKER_FILE not in names:
            raise SystemExit(f"{path} is not from an earlier tour; nothing was removed, name another directory")
        remove_tree(disk, path)
    disk.make_dir(path)
    disk.open(join(path, MARKER_FILE), "create").close()


def remove_tree(disk: PosixDisk, path: str) -> None:
    # Backwards: the marker sorts first and so goes last, and a removal that was interrupted can be done again.
    for name in reversed(disk.list_dir(path)):
        stat = disk.stat(join(path, name))
        if stat is not None and stat.is_dir:
            remove_tree(disk, join(path, name))
        else:
            disk.remove(join(path, name))
    disk.remove_dir(path)


def data_files(path: str) -> list[str]:
    """The data files of a tide log, oldest first."""
    return [join(path, name) for name in PosixDisk().list_dir(path) if name.endswith(".data")]


def disk_bytes(path: str) -> int:
    disk = PosixDisk()
    found = (disk.stat(join(path, name)) for name in disk.list_dir(path))
    return sum(stat.size for stat in found if stat is not None)


# ── accidents ─────────────────────────────────────────────────────────────────────────────────────


def write_half_a_record(path: str) -> None:
    """Leave what a power cut may leave: the first bytes of a record."""
    file = PosixDisk().open(path, "write")
    try:
        file.write(file.size(), file.read(0, 120))  # of a first frame that is longer than this
    finally:
        file.close()


def flip_a_bit(path: str) -> int:
    """Change one bit in the middle of a file; return the byte it is in."""
    file = PosixDisk().open(path, "write")
    try:
        at = file.size() // 2
        file.write(at, bytes([file.read(at, 1)[0] ^ 0x10]))
    finally:
        file.close()
    return at
