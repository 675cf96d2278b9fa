"""The FUSE file system without a mount: a write that is torn at chosen bytes."""

from __future__ import annotations

from errno import EIO
from pathlib import Path

import pytest

from tidelog.testing.fault_fs import FaultFS, TearPlan


def torn(fs: FaultFS) -> None:
    """One write before, and then the one in which power fails."""
    handle = fs.create("/a.log", 0o644)
    other = fs.create("/a.txt", 0o644)
    assert fs.write("/a.log", bytes(8), 0, handle) == 8  # zeros are not counted
    assert fs.write("/a.log", b"before--", 0, handle) == 8
    assert fs.write("/a.log", b"few", 0, handle) == 3  # nor are small writes
    assert fs.write("/a.log", b"bef", 0, handle) == 3
    assert fs.write("/a.txt", b"not counted", 0, other) == 11
    with pytest.raises(OSError, match="power is off") as caught:
        fs.write("/a.log", b"0123456789", 4, handle)
    assert caught.value.errno == EIO
    with pytest.raises(OSError, match="power is off"):
        fs.fsync("/a.log", 0, handle)


@pytest.mark.parametrize(
    ("kept", "content"),
    [([], b"before--"), ([(0, 2)], b"befo01--"), ([(7, 9)], b"before--\0\0\x0078"), ([(0, 1), (3, 5)], b"befo0e-34")],
)
def test_of_a_torn_write_the_chosen_bytes_survive(kept: list[tuple[int, int]], content: bytes, tmp_path: Path) -> None:
    fs = FaultFS(tear=TearPlan(".log", 2, bytes_min=8))
    torn(fs)
    assert fs.torn_write == ("a.log", 4, b"0123456789", b"befo")
    fs.tear(tmp_path / "out", kept)
    assert (tmp_path / "out/a.log").read_bytes() == content
    assert (tmp_path / "out/a.txt").read_bytes() == b"not counted"


def test_only_a_write_in_which_power_failed_can_be_torn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not failed in a write"):
        FaultFS(tear=TearPlan(".log", 2, bytes_min=8)).tear(tmp_path / "out", [])
    fs = FaultFS(tear=TearPlan(".log", 2, bytes_min=8))
    torn(fs)
    with pytest.raises(ValueError, match="not in a write of 10 bytes"):
        fs.tear(tmp_path / "out", [(3, 11)])
