"""What a machine has beside a disk: its environment, its programs, and how long its device takes for a sync."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from statistics import median

_SAID_S = 20


def environment(name: str) -> str | None:
    """A variable of the environment; None where it is not set, or is empty."""
    return os.environ.get(name) or None


def set_environment(name: str, value: str) -> None:
    """For this process and those it starts."""
    os.environ[name] = value


def program(name: str) -> str | None:
    """Where a program lies: by its name on the path, or itself; None where there is none to run."""
    return shutil.which(name)


def said(command: list[str]) -> str:
    """What a program prints, on both of its outputs; nothing where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SAID_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout + done.stderr


def sync_us(directory: str, now_us: Callable[[], int], *, rounds: int = 20) -> int:
    """How long the device takes to make 4 KiB survive a power cut: the median, in microseconds. Raises OSError."""
    import tempfile  # late: with all it brings, a tenth of the start of a process

    with tempfile.NamedTemporaryFile(dir=directory, prefix=".tidelog-doctor-") as file:
        taken = []
        for _ in range(rounds):
            start = now_us()
            os.pwrite(file.fileno(), bytes(4096), 0)
            os.fdatasync(file.fileno())
            taken.append(now_us() - start)
    return int(median(taken))
