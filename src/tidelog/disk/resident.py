"""Whether bytes of a mapped file are in memory: whoever may not wait for a disk asks before it reads them.

The kernel answers for this moment. A page that it takes away between the answer and the read costs the reader one
wait for the disk, so the question is asked right before, and of little at a time.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import pyarrow as pa


def _mincore() -> Any:
    try:
        # PyDLL keeps the interpreter's lock: the call takes 2 µs, getting the lock back may take far longer.
        call = ctypes.PyDLL(None).mincore
    except (OSError, AttributeError):  # another system: nobody can tell
        return None
    call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p), ctypes.c_int
    return call


_call = _mincore()


def is_resident(view: memoryview) -> bool:
    """Whether reading these bytes, a part of what `File.map` gave, waits for no device. False where it is not known."""
    if not len(view) or not isinstance(view.obj, mmap.mmap):
        return True  # no file is behind it
    if _call is None:
        return False
    start: int = pa.py_buffer(view).address  # a sixth of what numpy takes to tell it
    first = start - start % mmap.PAGESIZE
    size = start + len(view) - first
    pages = -(-size // mmap.PAGESIZE)
    told = ctypes.create_string_buffer(pages)
    return _call(first, size, told) == 0 and told.raw.count(b"\x01") == pages
