"""The loops under every write: a device may take less than it was given, and a stuck one is an error."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from tidelog.disk.interface import join, parent_dir, write_all_buffers
from tidelog.types import Buffer


def test_pieces_survive_any_sequence_of_short_writes() -> None:
    """G26. Method: a device that takes a random number of bytes each time, 200 seeds."""
    for seed in range(200):
        random = Random(seed)
        pieces = [random.randbytes(random.choice((0, 1, 5, 300))) for _ in range(random.randrange(12))]
        disk = bytearray(10_000)

        def pwritev(given: Sequence[Buffer], pos: int, random: Random = random, disk: bytearray = disk) -> int:
            whole = b"".join(given)
            taken = random.randint(1, len(whole))
            disk[pos : pos + taken] = whole[:taken]
            return taken

        write_all_buffers(pwritev, 7, pieces)
        whole = b"".join(pieces)
        assert bytes(disk[7 : 7 + len(whole)]) == whole, f"seed {seed}"
        assert not any(disk[7 + len(whole) :])


def test_a_device_that_accepts_no_bytes_raises() -> None:
    with pytest.raises(OSError, match="no bytes"):
        write_all_buffers(lambda _pieces, _pos: 0, 0, [b"x"])


def test_join_and_parent_dir_are_inverse() -> None:
    assert [join("a/", "b"), join("", "b"), join(".", "b"), join("/", "b")] == ["a/b", "b", "b", "/b"]
    assert [parent_dir("a/b"), parent_dir("a/b/"), parent_dir("a"), parent_dir("/a")] == ["a", "a", ".", "/"]
