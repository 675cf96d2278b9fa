"""The rest of the machine: environment, programs, processors, sync latency, page cache.

`is_resident` asks the kernel whether mapped bytes are in memory. The answer holds for that moment only: if the kernel
evicts a page between the check and the read, the reader waits for the disk once. So callers check small ranges right
before they read them.
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
    """An environment variable; None if it is not set or empty."""
    return os.environ.get(name) or None


def set_environment(name: str, value: str) -> None:
    """Set an environment variable for this process and its children."""
    os.environ[name] = value


def find_program(name: str) -> str | None:
    """The path of an executable, given its name or path; None if there is none."""
    return shutil.which(name)


def command_output(command: list[str]) -> str:
    """The standard output and standard error of a command; empty if it cannot be run."""
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return completed.stdout + completed.stderr


def processor_count() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0))


def measure_sync_us(directory: str, now_us: Callable[[], int], *, rounds: int = 20) -> int:
    """Measure the median latency of a 4 KiB write with fdatasync, in microseconds. Raises OSError."""
    import tempfile  # late: importing it takes a tenth of the start of a process

    with tempfile.NamedTemporaryFile(dir=directory, prefix=".tidelog-doctor-") as file:
        latencies_us = []
        for _ in range(rounds):
            start = now_us()
            os.pwrite(file.fileno(), bytes(4096), 0)
            os.fdatasync(file.fileno())
            latencies_us.append(now_us() - start)
    return int(median(latencies_us))


def _load_mincore() -> Any:
    try:
        # PyDLL keeps the interpreter lock: the call takes 2 µs, getting the lock back may take far longer.
        mincore = ctypes.PyDLL(None).mincore
    except (OSError, AttributeError):  # not Linux: residency is unknown
        return None
    mincore.argtypes, mincore.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p), ctypes.c_int
    return mincore


_mincore = _load_mincore()


def is_resident(view: memoryview) -> bool:
    """Whether these bytes, a part of a `File.map`, can be read without waiting for the device. False if unknown."""
    if not len(view) or not isinstance(view.obj, mmap.mmap):
        return True  # not a mapped file
    if _mincore is None:
        return False
    start: int = pa.py_buffer(view).address  # takes a sixth of the time that numpy needs
    first_page = start - start % mmap.PAGESIZE
    size = start + len(view) - first_page
    pages = -(-size // mmap.PAGESIZE)
    residency = ctypes.create_string_buffer(pages)
    return _mincore(first_page, size, residency) == 0 and residency.raw.count(b"\x01") == pages
