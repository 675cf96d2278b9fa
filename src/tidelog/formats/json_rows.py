"""[hot] Rows → the JSON objects that readers are sent, back to back with commas between them.

    {"$seq":7,"$ts":1700000000000,"$node":"eu-1","$tag":"order-7731","data":{"sku":"A"},"meta":{"k":"v"}}

Stored JSON goes out as the text that came in; nothing is decoded. A record that is bytes goes out as
base64 with `"$encoding":"base64"` beside it, since JSON has no word for bytes.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidelog.formats.rows import Rows, Span, values

_quote = msgspec.json.Encoder().encode


class Show(NamedTuple):
    """Which fields readers asked for beside `$seq`, `$ts` and `$node`."""

    data: bool = True
    tags: bool = False
    meta: bool = True


def objects(rows: Rows, json: NDArray[np.bool_], show: Show = Show()) -> list[bytes]:  # noqa: B008 (immutable)
    """Each row as one JSON object. `json` says which of them hold JSON."""
    seqs, times = rows.seq.tolist(), (rows.ts_us // 1000).tolist()
    tag = rows.tag if show.tags else None
    meta = rows.meta if show.meta else None
    if rows.node is None and tag is None and meta is None and show.data and bool(json.all()):
        datas = values(rows.buf, rows.data)
        return [b'{"$seq":%d,"$ts":%d,"data":%b}' % row for row in zip(seqs, times, datas, strict=True)]
    parts = [[b'{"$seq":%d,"$ts":%d' % pair for pair in zip(seqs, times, strict=True)]]
    for key, span in ((b',"$node":', rows.node), (b',"$tag":', tag)):
        if span is not None:
            parts.append(_names(rows, span, key))
    if show.data:
        parts.append(_datas(rows, json))
    if meta is not None:
        parts.append([b',"meta":' + text if text else b"" for text in values(rows.buf, meta)])
    return [b"".join((*row, b"}")) for row in zip(*parts, strict=True)]


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
