"""`pyarrow.compute`, imported when one of its functions is first used.

Its import creates some three hundred functions, which takes as long as all of numpy: a fifth of the start of a process.
Most commands and most servers never call one of them.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Import a function and keep it in this module."""
    from pyarrow import compute

    function = globals()[name] = getattr(compute, name)
    return function
