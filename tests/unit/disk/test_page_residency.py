"""Residency of mapped pages."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from tidelog.disk import process
from tidelog.disk.posix import PosixDisk
from tidelog.disk.process import is_resident

FAR = 32 << 20  # further than any kernel reads ahead


def mapped(path: Path, size: int) -> memoryview:
    with path.open("wb") as made:
        made.truncate(size)  # a hole: no page of it was ever in memory
    file = PosixDisk().open(str(path))
    try:
        return file.map()
    finally:
        file.close()


def test_pages_are_resident_after_they_were_read(tmp_path: Path) -> None:
    view = mapped(tmp_path / "a", 2 * FAR)
    assert not is_resident(view)
    assert not is_resident(view[:1])
    assert view[0] == 0
    assert is_resident(view[:1])
    assert not is_resident(view[FAR : FAR + 1])
    assert not is_resident(view[: FAR + 1]), "every page counts"


@pytest.mark.parametrize("size", [1, mmap.PAGESIZE - 1, mmap.PAGESIZE, mmap.PAGESIZE + 1])
def test_residency_of_ranges_across_page_boundaries(tmp_path: Path, size: int) -> None:
    view = mapped(tmp_path / "a", 2 * FAR)
    start = FAR + mmap.PAGESIZE - 1
    assert not is_resident(view[start : start + size])
    assert not any(view[start : start + size])
    assert is_resident(view[start : start + size])


def test_bytes_outside_a_mapping_are_resident(tmp_path: Path) -> None:
    assert is_resident(memoryview(b"abc"))
    assert is_resident(memoryview(b""))
    assert is_resident(mapped(tmp_path / "a", 0))


def test_pages_are_not_resident_if_the_kernel_cannot_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = mapped(tmp_path / "a", 10)
    assert view[0] == 0
    assert is_resident(view)
    monkeypatch.setattr(process, "_mincore", None)
    assert not is_resident(view)
    assert is_resident(memoryview(b"abc"))
