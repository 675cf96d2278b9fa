"""The compiled functions for JSON text against those in Python: equal bytes, and no byte outside the buffers is read.

These tests need the compiled module, which `make` builds where there is a compiler.
"""

from __future__ import annotations

import sys
from struct import pack
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.implementations import implementation

from tidelog import _native, _pure_python, native
from tidelog.formats import json_rows
from tidelog.formats.json_rows import FieldSelection
from tidelog.formats.rows import Rows, Span

I64 = st.integers(-(1 << 63), (1 << 63) - 1)
Row = tuple[int, int, bool, bytes, bytes, bytes, bytes]
names = st.text(max_size=6).map(str.encode) | st.text('"\\\x00\x1f\x7f\n/é€😀', max_size=6).map(str.encode)
rows_of = st.lists(st.tuples(I64, I64, st.booleans(), st.binary(max_size=20), names, names, st.binary(max_size=9)))


def build_rows(rows: list[Row], gap: bytes = b"?", shared: bool = False) -> tuple[Rows, NDArray[np.bool_]]:
    """Rows over one buffer, value after value. `shared`: all have the first one's names, as those of a batch do."""
    buf = bytearray(gap)
    at: list[list[tuple[int, int]]] = []
    for row in rows:
        places = []
        for value in row[3:]:
            places.append((len(buf), len(value)))
            buf += value + gap
        if shared and at:
            places[1:3] = at[0][1:3]
        at.append(places)
    spans = [
        Span(*(np.array([places[number][part] for places in at], np.int64) for part in (0, 1))) for number in range(4)
    ]
    columns = [np.array([row[number] for row in rows], np.int64) for number in (0, 1)]
    columns[1].sort()  # times never fall, and the Python function relies on it
    made = Rows(bytes(buf), columns[0], columns[1], columns[0], *spans)
    return made, np.array([row[2] for row in rows], bool)


def both(rows: Rows, json: NDArray[np.bool_], show: FieldSelection, between: bytes = b",", last: bytes = b"") -> bytes:
    made = []
    for compiled in (True, False):
        with implementation(compiled=compiled):
            made.append(json_rows.encode_rows(rows, json, show, between, last))
    assert made[0] == made[1]
    return made[0]


def test_the_compiled_module_is_used() -> None:
    assert native.COMPILED


@given(
    rows_of,
    st.builds(FieldSelection, st.booleans(), st.booleans(), st.booleans()),
    st.binary(max_size=3),
    st.booleans(),
)
@example([(-(1 << 63), -(1 << 63), True, b"1", b"", b"", b"")], FieldSelection(), b",", False)
@example([((1 << 63) - 1, -1, False, b"\xff\xfe", b"n", b"t", b"{}")], FieldSelection(tags=True), b"\n", True)
@settings(deadline=None, max_examples=400)
def test_both_implementations_encode_the_same_bytes(
    rows: list[Row], show: FieldSelection, between: bytes, shared: bool
) -> None:
    both(*build_rows(rows, shared=shared), show, between, b"end")


@given(rows_of, st.sets(st.sampled_from(["node", "tag", "meta"])))
@settings(deadline=None)
def test_a_column_may_be_missing(rows: list[Row], absent: set[str]) -> None:
    made, json = build_rows(rows)
    fields: dict[str, Any] = {name: None if name in absent else getattr(made, name) for name in ("node", "tag", "meta")}
    both(Rows(made.buf, made.seq, made.ts_us, made.frame_pos, made.data, **fields), json, FieldSelection(tags=True))


@given(st.lists(st.tuples(st.binary(max_size=4), st.binary(max_size=4)), min_size=1, max_size=4))
@settings(deadline=None, max_examples=400)
def test_a_name_that_is_not_utf_8_is_the_same_error(found: list[tuple[bytes, bytes]]) -> None:
    made, json = build_rows([(1, 1, True, b"1", node, tag, b"") for node, tag in found])
    said = []
    for compiled in (False, True):
        try:
            with implementation(compiled=compiled):
                said.append(repr(json_rows.encode_rows(made, json, FieldSelection(tags=True))))
        except UnicodeDecodeError as error:
            said.append(str(error))
    assert said[0] == said[1]


@pytest.mark.parametrize("size", [1 << 10, 3 << 20])
def test_large_and_many(size: int) -> None:
    """Past a megabyte the interpreter's lock is let go."""
    value = bytes(range(256)) * (size >> 8)
    rows, json = build_rows([(1, 5, False, value, b"n", b"t", value[:100]), (2, 5, True, value, b"", b"", b"")])
    assert len(both(rows, json, FieldSelection(tags=True))) > 2 * size
    count = 20_000
    many, json = build_rows(
        [(seq, 1_700_000_000_000_000 + seq, True, b'"%d"' % seq, b"eu", b"", b"") for seq in range(count)]
    )
    assert both(many, json, FieldSelection(), b"\n", b"\n").count(b"\n") == count


def test_columns_may_have_steps() -> None:
    """Picked from a table, turned around, or one value for all: what NumPy calls strides."""
    rows, json = build_rows([(seq, 7, seq % 2 == 0, b"%d" % seq, b"", b"", b"") for seq in range(10)])
    stepped = Rows(
        rows.buf, rows.seq[::2], rows.ts_us[::2], rows.frame_pos[::2], Span(rows.data.pos[::2], rows.data.size[::2])
    )
    both(stepped, json[::2], FieldSelection())
    same = Span(np.broadcast_to(rows.data.pos[3], 10), np.broadcast_to(rows.data.size[3], 10))
    both(Rows(rows.buf, rows.seq, np.broadcast_to(rows.ts_us[0], 10), rows.frame_pos, same), json, FieldSelection())


def call(**changed: Any) -> bytes:
    one = np.ones(1, np.int64)
    given: dict[str, Any] = {
        **dict.fromkeys(("seq", "ts_us"), one),
        **dict.fromkeys(("node", "tag", "meta")),
        "buf": b"0123",
        "json": np.ones(1, bool),
        "data": (one, one),
        "between": b",",
        "last": b"",
        **changed,
    }
    return _native.encode_json_rows(**given)


@pytest.mark.parametrize("column", ["data", "node", "tag", "meta"])
@pytest.mark.parametrize(
    ("pos", "size"), [(0, 5), (4, 1), (5, 0), (-1, 1), (0, -1), (1 << 62, 1 << 62), ((1 << 63) - 1, 1), (2, 1 << 63)]
)
def test_a_value_outside_of_the_buffer_is_refused(column: str, pos: int, size: int) -> None:
    where = tuple(np.array([number], np.uint64).view(np.int64) for number in (pos % (1 << 64), size % (1 << 64)))
    with pytest.raises(ValueError, match="outside of the buffer"):
        call(**{column: where})


def test_an_empty_value_may_be_at_the_end_of_the_buffer() -> None:
    end = (np.array([4], np.int64), np.zeros(1, np.int64))
    assert call(data=end, node=end) == b'{"$seq":1,"$ts":0,"data":}'
    assert call(buf=b"", data=None) == b'{"$seq":1,"$ts":0}'


@pytest.mark.parametrize(
    "changed",
    [
        {"ts_us": np.zeros(0, np.int64)},
        {"json": np.zeros(0, bool)},
        {"json": np.ones(1, np.int64)},
        {"seq": np.ones(1, np.int32)},
        {"seq": np.ones((1, 1), np.int64)},
        {"data": (np.zeros(1, np.int64), np.zeros(0, np.int64))},
        {"tag": (np.zeros(1, np.int64),)},
    ],
)
def test_columns_that_do_not_fit_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"column|unpack"):
        call(**changed)


@pytest.mark.parametrize("changed", [{"buf": "text"}, {"between": None}, {"last": bytearray()}, {"data": 7}])
def test_arguments_of_a_wrong_type_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        call(**changed)


# Batches as they lie there --------------------------------------------------------------------------------


def batch_of(datas: list[bytes], before: bytes = b"") -> tuple[bytes, int, int, int]:
    """A body, where its lengths lie, how many there are, and where its data ends."""
    body = before + pack(f"<{len(datas)}I", *map(len, datas)) + b"".join(datas)
    return body + b"after", len(before), len(datas), len(body)


@given(
    st.lists(st.binary(max_size=20), min_size=1, max_size=30),
    st.binary(max_size=9),
    st.integers(0, (1 << 63) - 31),
    st.integers(0, (1 << 63) - 1),
    st.data(),
)
@example([b""], b"", (1 << 63) - 31, (1 << 63) - 1, None)
@settings(deadline=None, max_examples=400)
def test_a_batch_has_the_same_text_in_both_implementations_and_by_columns(
    datas: list[bytes], before: bytes, seq: int, ts_ms: int, drawn: Any
) -> None:
    lo = 0 if drawn is None else drawn.draw(st.integers(0, len(datas) - 1))
    hi = len(datas) if drawn is None else drawn.draw(st.integers(lo + 1, len(datas)))
    given = (*batch_of(datas, before), lo, hi, seq, ts_ms)
    made = _native.encode_json_batch(*given)
    assert made == _pure_python.encode_json_batch(*given)
    assert (
        made
        == _native.encode_json_batch(memoryview(given[0]), *given[1:])
        == _pure_python.encode_json_batch(memoryview(given[0]), *given[1:])
    )
    rows = [b'{"$seq":%d,"$ts":%d,"data":%b}' % (seq + at, ts_ms, data) for at, data in enumerate(datas[lo:hi])]
    assert made == b",".join(rows)


@pytest.mark.parametrize("size", [1 << 10, 3 << 20])
def test_a_large_batch(size: int) -> None:
    given = (*batch_of([b"x" * size, b"", b"y" * size]), 0, 3, 7, 8)
    assert _native.encode_json_batch(*given) == _pure_python.encode_json_batch(*given)


def test_lengths_that_do_not_add_up_are_no_batch() -> None:
    body, at, count, end = batch_of([b"one", b"two"])
    for wrong in (0, 2, 4, 1 << 31, (1 << 32) - 1):
        lie = pack("<I", wrong) + body[4:]
        for ask in (_native.encode_json_batch, _pure_python.encode_json_batch):
            assert ask(lie, at, count, end, 0, 1, 1, 1) is None
            assert ask(lie, at, count, end, 1, 2, 1, 1) is None
    for ask in (_native.encode_json_batch, _pure_python.encode_json_batch):
        assert ask(body, at, count, end + 1, 0, 1, 1, 1) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"lengths_at": -1},
        {"lengths_at": 1 << 62},
        {"lengths_at": 12},
        {"count": 1 << 61},
        {"count": 5},
        {"data_end": 99},
        {"data_end": -1},
        {"data_end": 7},
        {"lo": -1},
        {"lo": 2},
        {"hi": 3},
        {"hi": 0},
    ],
)
def test_a_batch_outside_of_its_buffer_is_refused(wrong: dict[str, int]) -> None:
    body, at, count, end = batch_of([b"one", b"two"])
    given = {"lengths_at": at, "count": count, "data_end": end, "lo": 0, "hi": 2, "seq": 1, "ts_ms": 1, **wrong}
    for encode in (_native.encode_json_batch, _pure_python.encode_json_batch):
        with pytest.raises(ValueError, match="outside of the buffer"):
            encode(body, *given.values())


def test_no_reference_is_kept_after_a_call() -> None:
    """Neither the buffer, which could not grow any more, nor the text, nor after an error."""
    buf = bytearray(b'"a"\xff')
    column = np.zeros(1, np.int64), np.full(1, 3, np.int64)
    made = call(buf=buf, data=column)
    assert sys.getrefcount(made) == 2
    with pytest.raises(UnicodeDecodeError):
        call(buf=buf, node=(np.full(1, 3, np.int64), np.ones(1, np.int64)))
    with pytest.raises(ValueError, match="outside"):
        call(buf=buf, data=(np.zeros(1, np.int64), np.full(1, 5, np.int64)))
    buf += b"grows"
    assert made == b'{"$seq":1,"$ts":0,"data":"a"}'
