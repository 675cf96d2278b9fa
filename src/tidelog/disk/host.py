"""What a machine has beside a disk: its environment, its programs, and how long its device takes for a sync.

Whether bytes of a mapped file are in memory: whoever may not wait for a disk asks before it reads them.

The kernel answers for this moment. A page that it takes away between the answer and the read costs the reader one
wait for the disk, so the question is asked right before, and of little at a time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable
from statistics import median
from typing import Any

import pyarrow as pa

_COMMAND_TIMEOUT_S = 20


def get_environment(name: str) -> str | None:
    """A variable of the environment; None where it is not set, or is empty."""
    return os.environ.get(name) or None


def set_environment(name: str, value: str) -> None:
    """For this process and those it starts."""
    os.environ[name] = value


def find_program(name: str) -> str | None:
    """Where a program lies: by its name on the path, or itself; None where there is none to run."""
    return shutil.which(name)


def command_output(command: list[str]) -> str:
    """What a program prints, on both of its outputs; nothing where it cannot be run."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout + done.stderr


def measure_sync_us(directory: str, now_us: Callable[[], int], *, rounds: int = 20) -> int:
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


def _load_mincore() -> Any:
    try:
        # PyDLL keeps the interpreter's lock: the call takes 2 µs, getting the lock back may take far longer.
        call = ctypes.PyDLL(None).mincore
    except (OSError, AttributeError):  # another system: nobody can tell
        return None
    call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p), ctypes.c_int
    return call


_mincore = _load_mincore()


def is_resident(view: memoryview) -> bool:
    """Whether reading these bytes, a part of what `File.map` gave, waits for no device. False where it is not known."""
    if not len(view) or not isinstance(view.obj, mmap.mmap):
        return True  # no file is behind it
    if _mincore is None:
        return False
    start: int = pa.py_buffer(view).address  # a sixth of what numpy takes to tell it
    first = start - start % mmap.PAGESIZE
    size = start + len(view) - first
    pages = -(-size // mmap.PAGESIZE)
    told = ctypes.create_string_buffer(pages)
    return _mincore(first, size, told) == 0 and told.raw.count(b"\x01") == pages
