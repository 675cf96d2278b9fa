"""[hot] What jobs say of when they want to run and how urgently: `$run_at_ms` and `$priority` in their meta.

Nothing is done when a job is written. Before somebody claims or counts, what has come since is looked
at once: the index tells which records have a meta at all, one search over those finds the few that
name either word, and only they are parsed. A restart begins from the first job and finds the same.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from tidelog.errors import BadInput
from tidelog.formats import compute as pc
from tidelog.formats.rows import Rows, binary, values

RUN_AT: Final = "$run_at_ms"
PRIORITY: Final = "$priority"
PRIORITY_MAX: Final = 1_000
TIME_MS_MAX: Final = (1 << 63) - 1
_PATTERN: Final = r'"\$(run_at_ms|priority)"'


class Wish(NamedTuple):
    seq: int
    run_at_ms: int | None
    priority: int


class _Meta(msgspec.Struct):
    run_at_ms: Any = msgspec.field(default=None, name=RUN_AT)
    priority: Any = msgspec.field(default=None, name=PRIORITY)


_decode = msgspec.json.Decoder(_Meta).decode


def wishes(rows: Rows) -> list[Wish]:
    """What these records ask for; those that ask for nothing are not among them."""
    if rows.meta is None or not len(rows):
        return []
    some = rows.pick(np.flatnonzero(rows.meta.size > 0))
    assert some.meta is not None, "asked of rows with metas"
    if not len(some):
        return []
    hits = np.flatnonzero(
        pc.match_substring_regex(binary(some.buf, some.meta), _PATTERN).to_numpy(zero_copy_only=False)
    )
    found = []
    for seq, text in zip(some.seq[hits].tolist(), values(some.buf, some.meta.pick(hits)), strict=True):
        wish = _wish(seq, text)
        if wish is not None:
            found.append(wish)
    return found


def _wish(seq: int, text: bytes) -> Wish | None:
    try:
        meta = _decode(text)
    except msgspec.MsgspecError:
        return None
    run_at = meta.run_at_ms if _is_whole(meta.run_at_ms) else None
    priority = meta.priority if _is_whole(meta.priority) else 0
    if run_at is None and not priority:
        return None
    run_at = None if run_at is None else min(run_at, TIME_MS_MAX)
    return Wish(seq, run_at, max(min(priority, PRIORITY_MAX), -PRIORITY_MAX))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def marked(meta: object, count: int, *, run_at_ms: int | None, priority: int) -> object:
    """The meta of a write with what its jobs ask for: for all of them, or for each."""
    more: dict[str, int] = {} if run_at_ms is None else {RUN_AT: run_at_ms}
    if priority:
        more[PRIORITY] = priority
    if not more:
        return meta
    if meta is None or isinstance(meta, dict):
        return {**(meta or {}), **more}
    if not isinstance(meta, list | tuple) or len(meta) != count or not all(isinstance(m, dict | None) for m in meta):
        raise BadInput("a meta is a dict, or a list with one for each record; nothing was written")
    return [{**(each or {}), **more} for each in meta]
