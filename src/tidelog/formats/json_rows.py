"""[hot] Rows → the JSON objects that readers are sent, with commas or line ends between them.

    {"$seq":7,"$ts":1700000000000,"$node":"eu-1","$tag":"order-7731","data":{"sku":"A"},"meta":{"k":"v"}}

Stored JSON goes out as the text that came in; nothing is decoded. A record that is bytes goes out as
base64 with `"$encoding":"base64"` beside it, since JSON has no word for bytes.

`joined` asks the compiled kernel where it was built. `plain` is its twin and says what the text is: it serves where
there was no compiler, and the tests hold the kernel against it, byte for byte.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidelog.formats.rows import Rows, Span, values

try:
    from tidelog import kernel
except ImportError:  # built where there was no compiler
    COMPILED = False
else:
    COMPILED = True

_quote = msgspec.json.Encoder().encode


class Show(NamedTuple):
    """Which fields readers asked for beside `$seq`, `$ts` and `$node`."""

    data: bool = True
    tags: bool = False
    meta: bool = True


def joined(
    rows: Rows,
    json: NDArray[np.bool_],
    show: Show = Show(),  # noqa: B008
    between: bytes = b",",
    last: bytes = b"",
    *,
    compiled: bool = True,
) -> bytes:
    """The rows as JSON objects, `between` two of them and `last` behind the last. `json` says which of them hold JSON;
    `compiled`, that the kernel may do it."""
    if not (COMPILED and compiled):
        return plain(rows, json, show, between, last)
    return kernel.joined(
        rows.buf,
        rows.seq,
        rows.ts_us,
        json,
        rows.data if show.data else None,
        rows.node,
        rows.tag if show.tags else None,
        rows.meta if show.meta else None,
        between,
        last,
    )


def plain(rows: Rows, json: NDArray[np.bool_], show: Show, between: bytes, last: bytes) -> bytes:
    """`joined`, in Python alone."""
    if not len(rows):
        return b""
    tag = rows.tag if show.tags else None
    meta = rows.meta if show.meta else None
    if rows.node is None and tag is None and meta is None and show.data and bool(json.all()):
        return _lone(rows, between, last)
    parts = [[b'{"$seq":%d,"$ts":%d' % pair for pair in zip(rows.seq.tolist(), _times(rows), strict=True)]]
    for key, span in ((b',"$node":', rows.node), (b',"$tag":', tag)):
        if span is not None:
            parts.append(_names(rows, span, key))
    if show.data:
        parts.append(_datas(rows, json))
    if meta is not None:
        parts.append([b',"meta":' + text if text else b"" for text in values(rows.buf, meta)])
    made = [b"".join((*row, b"}")) for row in zip(*parts, strict=True)]
    made[-1] += last
    return between.join(made)


def few(first_seq: int, ts_ms: int, datas: list[bytes]) -> bytes:
    """`joined` of records of one time that are JSON data alone, without columns: for one record a tenth of the time."""
    rows = [b'{"$seq":%d,"$ts":%d,"data":%b}' % (seq, ts_ms, data) for seq, data in enumerate(datas, first_seq)]
    return b",".join(rows)


def _lone(rows: Rows, between: bytes, last: bytes) -> bytes:
    """Rows that are data alone: heads and datas in turn, joined once. Half the time of a row at a time."""
    close = b"}" + between
    count, times = len(rows), _times(rows)
    pieces: list[bytes] = [b""] * (2 * count + 1)
    if times[0] == times[-1]:  # they never fall, so all are the same
        head = b'%b{"$seq":%%d,"$ts":%d,"data":' % (close.replace(b"%", b"%%"), times[0])
        pieces[0:-1:2] = [head % seq for seq in rows.seq.tolist()]
    else:
        pairs = zip(rows.seq.tolist(), times, strict=True)
        pieces[0:-1:2] = [b'%b{"$seq":%d,"$ts":%d,"data":' % (close, seq, ts_ms) for seq, ts_ms in pairs]
    pieces[0] = pieces[0][len(close) :]
    pieces[1::2] = values(rows.buf, rows.data)
    pieces[-1] = b"}" + last
    return b"".join(pieces)


def _times(rows: Rows) -> list[int]:
    found: list[int] = (rows.ts_us // 1000).tolist()
    return found


def _names(rows: Rows, span: Span, key: bytes) -> list[bytes]:
    """A column of names, each quoted once however often it occurs."""
    quoted: dict[bytes, bytes] = {b"": b""}
    out = []
    for name in values(rows.buf, span):
        made = quoted.get(name)
        if made is None:
            made = quoted[name] = key + _quote(name.decode())
        out.append(made)
    return out


def _datas(rows: Rows, json: NDArray[np.bool_]) -> list[bytes]:
    datas = values(rows.buf, rows.data)
    if bool(json.all()):
        return [b',"data":' + data for data in datas]
    show: tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]] = (_raw, _text)
    return [show[is_json](data) for data, is_json in zip(datas, json.tolist(), strict=True)]


def _text(data: bytes) -> bytes:
    return b',"data":' + data


def _raw(data: bytes) -> bytes:
    return b',"data":"' + b64encode(data) + b'","$encoding":"base64"'
