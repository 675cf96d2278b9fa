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
from typing import Final

from tidelog._pure_python import slice_values as slice_values  # has no compiled implementation

__all__ = (
    "all_bytes",
    "borrow_buffer",
    "copy_values",
    "copy_values_into",
    "encode_json_batch",
    "encode_json_rows",
    "encode_write_responses",
    "fill_indexed_records",
    "find_frames",
    "fsync_loop",
    "json_depth",
    "parse_plain_bodies",
    "parse_plain_body",
    "remove_json_escapes",
    "split_by_size",
    "value_lengths",
)

SETTING: Final = "TIDELOG_KERNEL"
_IS_WANTED: Final = os.environ.get(SETTING, "1").strip().lower() not in ("", "0", "false")

try:
    if not _IS_WANTED:
        raise ImportError(f"switched off by {SETTING}")
    from tidelog._native import LAYOUT as LAYOUT
    from tidelog._native import (
        all_bytes,
        borrow_buffer,
        copy_values,
        copy_values_into,
        encode_json_batch,
        encode_json_rows,
        encode_write_responses,
        fill_indexed_records,
        find_frames,
        fsync_loop,
        json_depth,
        parse_plain_bodies,
        parse_plain_body,
        remove_json_escapes,
        split_by_size,
        value_lengths,
    )
except ImportError as error:
    if _IS_WANTED and find_spec("tidelog._native") is not None:
        logging.getLogger("tidelog").warning(
            "the compiled module cannot be used (%s): Python serves, which is slower; install tidelog again", error
        )
    from tidelog._pure_python import LAYOUT as LAYOUT
    from tidelog._pure_python import (
        all_bytes,
        borrow_buffer,
        copy_values,
        copy_values_into,
        encode_json_batch,
        encode_json_rows,
        encode_write_responses,
        fill_indexed_records,
        find_frames,
        fsync_loop,
        json_depth,
        parse_plain_bodies,
        parse_plain_body,
        remove_json_escapes,
        split_by_size,
        value_lengths,
    )

    COMPILED = False
else:
    COMPILED = True
