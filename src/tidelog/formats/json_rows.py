"""[hot] Rows → the JSON objects that readers are sent, with commas or line ends between them.

    {"$seq":7,"$ts":1700000000000,"$node":"eu-1","$tag":"order-7731","data":{"sku":"A"},"meta":{"k":"v"}}

Stored JSON goes out as the text that came in; nothing is decoded. A record that is bytes goes out as
base64 with `"$encoding":"base64"` beside it, since JSON has no word for bytes.

`joined` asks the compiled kernel where it was built. `plain` is its twin and says what the text is: it serves where
there was no compiler, and the tests hold the kernel against it, byte for byte.

[hot] Records of batches → JSON text, straight from where they lie.

    lengths   │ 101 │ 99 │ 100 │ …     u32 × count, then the values back to back: all that a row needs is at hand
    row       {"$seq":7,"$ts":1700000000000,"data":…}

Most pages are of records that have JSON data and nothing else, written in batches. To read those into columns first
takes as long as to write their text. Whatever else there is goes by the columns (`json_rows`), which say what is right:
this is the same text.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from itertools import accumulate, pairwise
from struct import unpack_from
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidelog.formats.rows import Rows, Span, copy_values
from tidelog.formats.scan import PlainBatch
from tidelog.types import Buffer

try:
    from tidelog import _native
except ImportError:  # built where there was no compiler
    COMPILED = False
else:
    COMPILED = True

_quote = msgspec.json.Encoder().encode


class FieldSelection(NamedTuple):
    """Which fields readers asked for beside `$seq`, `$ts` and `$node`."""

    data: bool = True
    tags: bool = False
    meta: bool = True


def encode_rows(
    rows: Rows,
    json: NDArray[np.bool_],
    show: FieldSelection = FieldSelection(),  # noqa: B008
    separator: bytes = b",",
    terminator: bytes = b"",
    *,
    compiled: bool = True,
) -> bytes:
    """The rows as JSON objects, `between` two of them and `last` behind the last. `json` says which of them hold JSON;
    `compiled`, that the kernel may do it."""
    if not (COMPILED and compiled):
        return encode_rows_py(rows, json, show, separator, terminator)
    return _native.encode_json_rows(
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


def encode_rows_py(rows: Rows, json: NDArray[np.bool_], show: FieldSelection, between: bytes, last: bytes) -> bytes:
    """`joined`, in Python alone."""
    if not len(rows):
        return b""
    tag = rows.tag if show.tags else None
    meta = rows.meta if show.meta else None
    if rows.node is None and tag is None and meta is None and show.data and bool(json.all()):
        return _encode_data_only(rows, between, last)
    parts = [[b'{"$seq":%d,"$ts":%d' % pair for pair in zip(rows.seq.tolist(), _times_ms(rows), strict=True)]]
    for key, span in ((b',"$node":', rows.node), (b',"$tag":', tag)):
        if span is not None:
            parts.append(_quoted_names(rows, span, key))
    if show.data:
        parts.append(_data_fields(rows, json))
    if meta is not None:
        parts.append([b',"meta":' + text if text else b"" for text in copy_values(rows.buf, meta)])
    made = [b"".join((*row, b"}")) for row in zip(*parts, strict=True)]
    made[-1] += last
    return between.join(made)


def encode_few(first_seq: int, ts_ms: int, datas: list[bytes]) -> bytes:
    """`joined` of records of one time that are JSON data alone, without columns: for one record a tenth of the time."""
    rows = [b'{"$seq":%d,"$ts":%d,"data":%b}' % (seq, ts_ms, data) for seq, data in enumerate(datas, first_seq)]
    return b",".join(rows)


def _encode_data_only(rows: Rows, between: bytes, last: bytes) -> bytes:
    """Rows that are data alone: heads and datas in turn, joined once. Half the time of a row at a time."""
    close = b"}" + between
    count, times = len(rows), _times_ms(rows)
    pieces: list[bytes] = [b""] * (2 * count + 1)
    if times[0] == times[-1]:  # they never fall, so all are the same
        head = b'%b{"$seq":%%d,"$ts":%d,"data":' % (close.replace(b"%", b"%%"), times[0])
        pieces[0:-1:2] = [head % seq for seq in rows.seq.tolist()]
    else:
        pairs = zip(rows.seq.tolist(), times, strict=True)
        pieces[0:-1:2] = [b'%b{"$seq":%d,"$ts":%d,"data":' % (close, seq, ts_ms) for seq, ts_ms in pairs]
    pieces[0] = pieces[0][len(close) :]
    pieces[1::2] = copy_values(rows.buf, rows.data)
    pieces[-1] = b"}" + last
    return b"".join(pieces)


def _times_ms(rows: Rows) -> list[int]:
    found: list[int] = (rows.ts_us // 1000).tolist()
    return found


def _quoted_names(rows: Rows, span: Span, key: bytes) -> list[bytes]:
    """A column of names, each quoted once however often it occurs."""
    quoted: dict[bytes, bytes] = {b"": b""}
    out = []
    for name in copy_values(rows.buf, span):
        made = quoted.get(name)
        if made is None:
            made = quoted[name] = key + _quote(name.decode())
        out.append(made)
    return out


def _data_fields(rows: Rows, json: NDArray[np.bool_]) -> list[bytes]:
    datas = copy_values(rows.buf, rows.data)
    if bool(json.all()):
        return [b',"data":' + data for data in datas]
    show: tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]] = (_base64_field, _json_field)
    return [show[is_json](data) for data, is_json in zip(datas, json.tolist(), strict=True)]


def _json_field(data: bytes) -> bytes:
    return b',"data":' + data


def _base64_field(data: bytes) -> bytes:
    return b',"data":"' + b64encode(data) + b'","$encoding":"base64"'


if COMPILED:
    from tidelog import _native


def encode_batch(buf: Buffer, batch: PlainBatch, lo: int, hi: int, *, compiled: bool = True) -> bytes | None:
    """Records [lo, hi) of a batch, with commas between them. None where its lengths do not add up."""
    if not 0 <= lo < hi <= batch.records or batch.lengths_pos + 4 * batch.records > batch.data_end:
        return None
    given = (buf, batch.lengths_pos, batch.records, batch.data_end, lo, hi, batch.seq + lo, batch.ts_ms)
    if COMPILED and compiled:
        return _native.encode_json_batch(*given)
    return encode_batch_py(*given)


def encode_batch_py(
    buf: Buffer, lengths_at: int, count: int, data_end: int, lo: int, hi: int, seq: int, ts_ms: int
) -> bytes | None:
    """`text`, in Python alone."""
    sizes = unpack_from(f"<{count}I", buf, lengths_at)
    start = lengths_at + 4 * count
    if start + sum(sizes) != data_end:
        return None
    start += sum(sizes[:lo])
    wanted = bytes(buf[start : start + sum(sizes[lo:hi])])
    values: list[Any] = [0] * (2 * (hi - lo))
    values[::2] = range(seq, seq + hi - lo)
    values[1::2] = [wanted[at:end] for at, end in pairwise(accumulate(sizes[lo:hi], initial=0))]
    row = b'{"$seq":%%d,"$ts":%d,"data":%%b},' % ts_ms
    return (row * (hi - lo))[:-1] % tuple(values)  # one format for all: three quarters of the time of one each
