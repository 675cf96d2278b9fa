"""The values of a batch: equal results in both implementations, and no byte outside the memory is written."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.implementations import implementation

from tidelog import _native, _pure_python
from tidelog.formats import batch

batches = st.lists(st.binary(max_size=9) | st.binary(min_size=200, max_size=300), max_size=12)
PUTS = [_native.copy_values_into, _pure_python.copy_values_into]


class Derived(bytes):
    pass


@pytest.mark.parametrize(
    ("many", "wanted"),
    [
        ([], True),
        ([b""], True),
        ([b"a", "a"], False),
        ([b"a", None], False),
        ([bytearray(b"a")], False),
        ([Derived(b"a")], False),
        ([memoryview(b"a")], False),
    ],
)
@pytest.mark.parametrize("kind", [list, tuple])
def test_only_plain_bytes_are_bytes(many: list[Any], wanted: bool, kind: Callable[[list[Any]], Any]) -> None:
    assert [module.all_bytes(kind(many)) for module in (_native, _pure_python)] == [wanted, wanted]


@given(batches)
def test_lengths_are_equal_in_both_implementations(datas: list[bytes]) -> None:
    for compiled in (True, False):
        with implementation(compiled=compiled):
            found, total = batch.value_lengths(datas)
        assert list(found) == [len(data) for data in datas]
        assert total == sum(map(len, datas))
        assert memoryview(found).itemsize == 4  # type: ignore[arg-type]


def test_lengths_of_other_values_are_measured_in_python() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return 1 << 32

    assert _native.value_lengths([b"a", Huge()]) is None
    assert _pure_python.value_lengths([b"a", Huge()]) is None
    found, total = batch.value_lengths([b"a", Huge()])
    assert (list(found), total) == ([1, 1 << 32], (1 << 32) + 1)


@given(
    st.lists(st.integers(0, 50) | st.integers(0, (1 << 32) - 1), max_size=40), st.integers(1, 100), st.integers(1, 9)
)
def test_values_are_split_equally_and_none_is_left_out(sizes: list[int], size_max: int, count_max: int) -> None:
    lengths = array("I", sizes)
    found = _native.split_by_size(lengths, size_max, count_max)
    assert found == _pure_python.split_by_size(lengths, size_max, count_max)
    assert found == _native.split_by_size(np.asarray(lengths, np.uint32), size_max, count_max)
    assert [value for lo, hi, _ in found for value in sizes[lo:hi]] == sizes
    for lo, hi, size in found:
        assert size == sum(sizes[lo:hi])
        assert hi == lo + 1 or (size <= size_max and hi - lo <= count_max)
        assert hi == len(sizes) or hi - lo == count_max or size + sizes[hi] > size_max, "as many as go"


@given(batches, st.integers(0, 20), st.data())
def test_values_are_copied_equally_and_no_other_byte_is_written(
    datas: list[bytes], pos: int, draw: st.DataObject
) -> None:
    lo = draw.draw(st.integers(0, len(datas)))
    hi = draw.draw(st.integers(lo, len(datas)))
    joined = b"".join(datas[lo:hi])
    for put in PUTS:
        memory = bytearray(b"\xee" * (pos + len(joined) + 5))
        assert put(memory, pos, datas, lo, hi) == pos + len(joined)
        assert memory == b"\xee" * pos + joined + b"\xee" * 5


@pytest.mark.parametrize("put", PUTS)
@pytest.mark.parametrize(
    ("size", "pos", "lo", "hi"), [(5, 0, 0, 2), (6, 1, 0, 2), (9, -1, 0, 2), (9, 0, 0, 3), (9, 0, -1, 1), (9, 0, 2, 1)]
)
def test_nothing_is_written_outside_the_memory(put: Any, size: int, pos: int, lo: int, hi: int) -> None:
    memory = bytearray(size)
    with pytest.raises(ValueError, match=r"values|place"):
        put(memory, pos, [b"abc", b"def"], lo, hi)
    assert len(memory) == size


def test_the_compiled_copy_refuses_other_values() -> None:
    with pytest.raises(ValueError, match="not bytes"):
        _native.copy_values_into(bytearray(9), 0, [b"a", "b"], 0, 2)  # type: ignore[list-item]


@pytest.mark.parametrize("put", PUTS)
def test_values_of_a_derived_class_are_copied(put: Any) -> None:
    memory = bytearray(3)
    assert put(memory, 0, [Derived(b"ab"), b"c"], 0, 2) == 3
    assert memory == b"abc"
