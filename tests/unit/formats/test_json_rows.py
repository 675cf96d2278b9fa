"""Rows as the JSON that readers are sent: what came in as text goes out as that text."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.implementations import BOTH, implementation

from tidelog.formats import batch, json_rows, scan, segment_index
from tidelog.formats.frame import JSON
from tidelog.formats.json_rows import FieldSelection

Row = tuple[bytes, str, str, dict[str, str] | None]
names = st.text('ab"\\é\n ', max_size=4)
datas = st.recursive(st.none() | st.integers() | st.text(max_size=8), lambda inner: st.lists(inner, max_size=3))


def rendered(datas: list[bytes], *, flags: int, show: FieldSelection, **columns: Any) -> list[dict[str, Any]]:
    walk = scan.scan_records(b"".join(batch.encode_many(1, 5, 1_700_000_000_000, datas, flags=flags, **columns)))
    is_json = (segment_index.record_flags(walk.rows) & segment_index.JSON) != 0
    with implementation(compiled=False):
        lines = json_rows.encode_rows(walk.rows, is_json, show, b"\n").split(b"\n")
    assert len(lines) == len(datas), "one line a record"
    assert json_rows.encode_rows(walk.rows, is_json, show) == b",".join(lines)
    return [json.loads(text) for text in lines]


@given(
    st.lists(st.tuples(datas, names, names, st.none() | st.dictionaries(names, names, max_size=2)), min_size=1),
    st.booleans(),
)
def test_every_record_is_encoded_with_its_fields(rows: list[tuple[Any, str, str, Any]], full: bool) -> None:
    texts = [json.dumps(data, separators=(",", ":")).encode() for data, *_ in rows]
    show = FieldSelection(data=True, tags=full, meta=full)
    made = rendered(
        texts,
        flags=JSON,
        show=show,
        tags=[tag.encode() for _, tag, _, _ in rows],
        nodes=[node.encode() for _, _, node, _ in rows],
        metas=[b"" if meta is None else json.dumps(meta, separators=(",", ":")).encode() for *_, meta in rows],
    )
    for number, (found, (data, tag, node, meta)) in enumerate(zip(made, rows, strict=True)):
        wanted: dict[str, Any] = {"$seq": 5 + number, "$ts": 1_700_000_000_000, "data": data}
        wanted |= {"$node": node} if node else {}
        wanted |= {"$tag": tag} if tag and full else {}
        wanted |= {"meta": meta} if meta is not None and full else {}
        assert found == wanted


def test_keys_are_in_the_order_of_the_contract() -> None:
    walk = scan.scan_records(
        b"".join(batch.encode_many(1, 1, 9, [b"1"], flags=JSON, tags=[b"t"], nodes=[b"n"], metas=[b'{"k":1}']))
    )
    made = json_rows.encode_rows(walk.rows, np.ones(1, bool), FieldSelection(tags=True))
    assert made == b'{"$seq":1,"$ts":9,"$node":"n","$tag":"t","data":1,"meta":{"k":1}}'


@BOTH
@pytest.mark.parametrize("later", [9, 10])
def test_records_with_data_only_have_the_same_text(later: int, compiled: bool) -> None:
    frames = batch.encode_many(1, 1, 9, [b'{"a":"%d"}', b"null"], flags=JSON) + batch.encode_many(
        1, 3, later, [b"3", b"4"], flags=JSON
    )
    walk = scan.scan_records(b"".join(frames))
    with implementation(compiled=compiled):
        made = json_rows.encode_rows(walk.rows, np.ones(4, bool), separator=b"%", terminator=b"!")
        empty = json_rows.encode_rows(walk.rows.slice(0, 0), np.ones(0, bool), terminator=b"!")
    heads = [(1, 9, b'{"a":"%d"}'), (2, 9, b"null"), (3, later, b"3"), (4, later, b"4")]
    assert made == b"%".join([b'{"$seq":%d,"$ts":%d,"data":%b}' % row for row in heads]) + b"!"
    assert empty == b""


def test_bytes_are_encoded_as_base64() -> None:
    found = rendered([b"\x00\xff", b""], flags=0, show=FieldSelection())
    assert [b64decode(row["data"]) for row in found] == [b"\x00\xff", b""]
    assert [row["$encoding"] for row in found] == ["base64", "base64"]


@pytest.mark.parametrize("flags", [0, JSON])
def test_without_data_there_is_no_data(flags: int) -> None:
    assert rendered([b"1"], flags=flags, show=FieldSelection(data=False)) == [{"$seq": 5, "$ts": 1_700_000_000_000}]
