"""The compiled functions, or the Python functions that return the same: chosen once, when this module is imported.

`tidelog._native` is used where the package was built with a compiler, else `tidelog._pure_python`, which is also the
reference of the tests. TIDELOG_KERNEL=0 in the environment selects the second. Call the functions through this module
(`native.find_frames(...)`): callers do not know which implementation they get. What each function does is documented
in `_pure_python`; see docs/decisions/0012-a-compiled-kernel.md for what they gain.
"""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from tidelog._pure_python import *  # noqa: F403 - the functions with two implementations
from tidelog._pure_python import LAYOUT as LAYOUT
from tidelog._pure_python import __all__ as __all__
from tidelog._pure_python import slice_values as slice_values  # has no compiled implementation

if TYPE_CHECKING:
    from tidelog._native import *  # noqa: F403 - the types of the two are compared

SETTING: Final = "TIDELOG_KERNEL"
_IS_WANTED: Final = os.environ.get(SETTING, "1").strip().lower() not in ("", "0", "false")

try:
    if not _IS_WANTED:
        raise ImportError(f"switched off by {SETTING}")
    from tidelog import _native

    _compiled = {name: getattr(_native, name) for name in ("LAYOUT", *__all__)}
except (ImportError, AttributeError) as error:  # AttributeError: it was built from an older version
    COMPILED = False
    if _IS_WANTED and find_spec("tidelog._native") is not None:
        logging.getLogger("tidelog").warning(
            "the compiled module cannot be used (%s): Python serves, which is slower; install tidelog again", error
        )
else:
    COMPILED = True
    globals().update(_compiled)
