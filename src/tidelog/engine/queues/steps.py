"""[hot] Steps of jobs as the JSON texts of a history, a whole call at a time.

    {"ts_ms":1,"event":"claimed","seq":%d,"node":"w","lease_id":%d,"deliveries":%d,…}      one template a call
                                       7               12             1                    a row each

What a step has nothing to say of is left out. A job has two steps at least, so a history of objects would cost
more than all else that is done for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

_quote = msgspec.json.Encoder().encode
_COLUMNS: Final = (b"lease_id", b"deliveries", b"waited_ms", b"deadline_ms")
Ints = Sequence[int] | None


class Note(NamedTuple):
    """The same step of the jobs of one call; of `enqueued`, of jobs `seqs[0]` to `seqs[1]`."""

    ts_ms: int
    event: str
    seqs: Ints = None
    node: str | None = None
    lease_ids: Ints = None
    deliveries: Ints = None
    waited_ms: Ints = None
    deadlines_ms: Ints = None


def texts(note: Note) -> list[bytes]:
    """A text for each step."""
    head = b'{"ts_ms":%d,"event":%b' % (note.ts_ms, _quote(note.event))
    if note.seqs is None:
        return [head + b"}"]
    if note.event == "enqueued":
        return [b'%b,"seq":%d,"last_seq":%d}' % (head, note.seqs[0], note.seqs[1])]
    node = b"" if note.node is None else b',"node":' + _quote(note.node).replace(b"%", b"%%")
    given = [(name, column) for name, column in zip(_COLUMNS, note[4:], strict=True) if column]
    row = head + b',"seq":%d' + node + b"".join(b',"%b":%%d' % name for name, _ in given) + b"}"
    return [row % each for each in zip(note.seqs, *(column for _, column in given), strict=True)]
