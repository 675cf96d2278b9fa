"""A real file system of 16 MiB that a test can fill to the last byte."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted_small_disk(parent: Path) -> Iterator[Path]:
    """Mount a file system of 16 MiB; skips the test, with the reason, without the right to mount one."""
    place = parent / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs root to mount a small file system: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], capture_output=True, check=False)


def take_all(place: Path) -> None:
    """Take every byte that is free, as another program could."""
    with (place / "filler").open("ab") as file:
        size = 1 << 16
        while size:
            try:
                os.write(file.fileno(), bytes(size))
            except OSError:
                size //= 2
