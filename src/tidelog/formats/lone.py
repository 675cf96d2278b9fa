"""[hot] The records of one frame, without a walk.

A walk prepares for thousands of frames: arrays of headers, gathered, compared, joined. For the newest write, which
every watcher wants at once, and for a page that lies in one batch, that is all overhead: 160 µs against 4, and 70
against 34. Whatever is out of the ordinary is left to the walk: the answer is None then.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidelog.formats import batch, columns, frame, idx
from tidelog.formats.frame import APPEND, APPEND_BATCH, HEADER_BYTES, Fault, Frame
from tidelog.formats.rows import Rows, Span
from tidelog.types import Buffer


def rows(made: Buffer) -> Rows | None:
    """The records of a frame that this process has just made, checksum and text: neither is looked at again. None where
    it is not one whole frame with records in it."""
    found = frame.get(made, 0, len(made), check=False)
    if not isinstance(found, Frame) or found.end != len(made):
        return None
    if found.kind == APPEND_BATCH:
        decoded = batch.decode(made, found)
        return None if isinstance(decoded, Fault) else decoded
    return _record(made, found) if found.kind == APPEND else None


def texts(made: bytes, pos: int, seq: int, stop: int, *, nodes: bool = True) -> tuple[int, list[bytes]] | None:
    """The time and the data of records [seq, stop), as far as the frame at `pos` has them, without columns. As in
    `rows` nothing is looked at again. None where they are not all JSON, or have tags or metas; or nodes, where the
    caller would have to tell of these."""
    found = frame.get(made, pos, len(made), check=False)
    if not isinstance(found, Frame) or found.flags & (frame.JSON | frame.HAS_TAG) != frame.JSON:
        return None
    if not nodes and found.flags & frame.HAS_NODE:
        return None
    if found.kind == APPEND:
        return found.ts_ms, [made[found.data_at : found.data_end]]
    plain = batch.plain(made, found) if found.kind == APPEND_BATCH else None
    if plain is None:
        return None
    count, lengths_at = plain
    return found.ts_ms, columns.cut(made, lengths_at, count, seq - found.seq, stop - found.seq)


class Bare(NamedTuple):
    """Where the records of a batch lie that have nothing but JSON data, and what they share."""

    seq: int
    ts_ms: int
    records: int
    lengths_at: int  # the values follow
    data_end: int
    end: int  # of the frame


def bare(buf: Buffer, pos: int, topic_id: int) -> Bare | None:
    """The batch at `pos` of bytes that are known to be whole, for whoever reads its records where they lie. None where
    there is no such batch of this topic, or its records have more than JSON data. Its lengths are not looked at."""
    found = frame.get(buf, pos, len(buf), check=False)
    if not isinstance(found, Frame) or found.kind != APPEND_BATCH or found.topic_id != topic_id:
        return None
    if found.flags & (frame.JSON | frame.HAS_TAG | frame.HAS_NODE) != frame.JSON:
        return None
    plain = batch.plain(buf, found)
    return None if plain is None else Bare(found.seq, found.ts_ms, *plain, found.data_end, found.end)


def named(buf: Buffer, entries: NDArray[np.void], first_seq: int, *, check: bool, origin: int) -> Rows | None:
    """The records of these index entries, the first of which is of `first_seq`, where all lie in one batch that says
    the same of each of them."""
    at = entries["frame_offset"]
    if at[0] != at[-1] or not entries["flags"][0] & idx.BATCH:
        return None
    found = frame.get(buf, int(at[0]) - origin, len(buf), check=check)
    decoded = batch.decode(buf, found) if isinstance(found, Frame) and found.kind == APPEND_BATCH else found
    if not isinstance(decoded, Rows) or not isinstance(found, Frame):
        return None
    stop_seq = first_seq + len(entries)
    there = decoded.between(first_seq, stop_seq)
    # Seqs rise, so as many as there are entries are all of them.
    same = (
        len(there) == len(entries)
        and (at == at[0]).all()
        and (entries["data_len"] == there.data.size).all()
        and (entries["ts"] == found.ts_ms).all()
        and (entries["flags"] == idx.flags(there)).all()
    )
    return there if same else None


def _record(made: Buffer, found: Frame) -> Rows:
    node, tag, data, end = HEADER_BYTES, found.tag_at, found.data_at, found.data_end
    numbers = (found.seq, found.ts_ms * 1000, 0, data, end - data, node, tag - node, tag, data - tag)
    cells = np.array(numbers, np.int64).reshape(len(numbers), 1)  # one array, cut: each is a column of one value
    return Rows(
        made,
        cells[0],
        cells[1],
        cells[2],
        Span(cells[3], cells[4]),
        Span(cells[5], cells[6]) if tag > node else None,
        Span(cells[7], cells[8]) if data > tag else None,
    )
