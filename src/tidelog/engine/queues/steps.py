"""[hot] Steps of jobs as the JSON texts of a history, a whole call at a time.

    {"ts_ms":1,"event":"claimed","seq":%d,"node":"w","lease_id":%d,"deliveries":%d,…}      one template a call
                                       7               12             1                    a row each

What a step has nothing to say of is left out. A job has two steps at least, so a history of objects would cost
more than all else that is done for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
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
    ts_ms, event, seqs, node, *more = note
    if seqs is None:
        return [b'{"ts_ms":%d,"event":%b}' % (ts_ms, _quote(event))]
    if event == "enqueued":
        return [b'{"ts_ms":%d,"event":"enqueued","seq":%d,"last_seq":%d}' % (ts_ms, *seqs)]
    row = _template(event, node, *map(bool, more))
    return [row % each for each in zip([ts_ms] * len(seqs), seqs, *filter(None, more), strict=True)]


@lru_cache(1024)
def _template(event: str, node: str | None, *given: bool) -> bytes:
    """The text of a step with a place for its time, its seq and each of the columns that it has."""
    said = b'{"ts_ms":%%d,"event":%b,"seq":%%d' % _quote(event)
    if node is not None:
        said += b',"node":' + _quote(node).replace(b"%", b"%%")
    columns = [b',"%b":%%d' % name for name, there in zip(_COLUMNS, given, strict=True) if there]
    return said + b"".join(columns) + b"}"
