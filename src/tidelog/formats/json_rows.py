"""Encode records as the JSON objects that readers receive, with commas or line ends between them.

    {"$seq":7,"$ts":1700000000000,"$node":"eu-1","$tag":"order-7731","data":{"sku":"A"},"meta":{"k":"v"}}

Stored JSON is copied as text; it is not decoded. A record of bytes is encoded as base64 with `"$encoding":"base64"`.
Most pages have records with JSON data only, written in batches. `encode_batch` encodes those from the frame: reading
them into columns first takes as long as writing the text. The result is that of `encode_rows`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidelog import native
from tidelog.formats.rows import Rows
from tidelog.formats.scan import PlainBatch
from tidelog.types import Buffer


class FieldSelection(NamedTuple):
    """Fields in the text beside `$seq`, `$ts` and `$node`."""

    data: bool = True
    tags: bool = False
    meta: bool = True


def encode_rows(
    rows: Rows,
    json: NDArray[np.bool_],
    show: FieldSelection = FieldSelection(),  # noqa: B008
    separator: bytes = b",",
    terminator: bytes = b"",
) -> bytes:
    """Encode rows as JSON objects with `separator` between them and `terminator` after the last. `json`: which rows
    hold JSON."""
    return native.encode_json_rows(
        rows.buf,
        rows.seq,
        rows.ts_us,
        json,
        rows.data if show.data else None,
        rows.node,
        rows.tag if show.tags else None,
        rows.meta if show.meta else None,
        separator,
        terminator,
    )


def encode_few(first_seq: int, ts_ms: int, datas: list[bytes]) -> bytes:
    """`encode_rows` of records of one time with JSON data only, without columns: for one record a tenth of the time."""
    rows = [b'{"$seq":%d,"$ts":%d,"data":%b}' % (seq, ts_ms, data) for seq, data in enumerate(datas, first_seq)]
    return b",".join(rows)


def encode_batch(buf: Buffer, batch: PlainBatch, lo: int, hi: int) -> bytes | None:
    """Encode records [lo, hi) of a batch with commas between them. None where its lengths do not add up."""
    if not 0 <= lo < hi <= batch.records or batch.lengths_pos + 4 * batch.records > batch.data_end:
        return None
    return native.encode_json_batch(
        buf, batch.lengths_pos, batch.records, batch.data_end, lo, hi, batch.seq + lo, batch.ts_ms
    )
