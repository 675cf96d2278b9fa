"""[hot] `pyarrow.compute`, loaded when the first of its functions is asked for.

It makes some three hundred functions while it is imported, which takes as long as all of numpy: a fifth of the start of
a process. Most commands and most servers never call one of them.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """A function, once; from then on it is found here without asking."""
    from pyarrow import compute

    found = globals()[name] = getattr(compute, name)
    return found
