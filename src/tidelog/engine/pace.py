"""[policy] How long a checkpoint that nobody waits for rests between its steps, so that writers have the disk too.

    in the WAL and covered by none    0                     3 × checkpoint_bytes
                                      ├──────────────────────┼──────────────────►
                                      │ 3 × what a step took │ not at all: the WAL has grown enough

A checkpoint writes every byte a second time. At full speed it takes the disk and the interpreter from whoever
waits for a sync, and those are the ones in a hurry: one of 64 MiB made a write of 1 MB with its sync take twice as
long. Where nobody writes there is nobody to make room for.
"""

from __future__ import annotations

from typing import Final

_TIMES: Final = 3
_TRIGGERS: Final = 3
_REST_US_MAX: Final = 20_000


def rest_us(took_us: int, written_bytes: int, behind_bytes: int, trigger_bytes: int) -> int:
    """How long to rest after a step that took so long, in which so much was written; so much is covered by none."""
    if not written_bytes or behind_bytes >= _TRIGGERS * trigger_bytes:
        return 0
    return min(_TIMES * took_us, _REST_US_MAX)
