"""JSON that is cheap to send and was dear to look at: 62 MiB of it stalled every client for 23 s and longer."""

from __future__ import annotations

import tracemalloc
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from tidelog import _native, _pure_python
from tidelog.engine import EngineConfig, batch_encoder
from tidelog.errors import BadInput
from tidelog.http.limits import TurnScheduler

MIB = 1 << 20
PARTS = [
    *(b"\\u%04x" % code for code in (0, 1, 8, 9, 10, 12, 13, 31, 32, 34, 47, 92, 127, 128, 0x7FF, 0x800, 0xFFFF)),
    *(b"\\ud83d\\ude00", b"\\uD800\\uDC00", b"\\uDBFF\\udfff", b"\\/", b"\\n", b"\\\\", b'\\"', b"a", b"[", b"{"),
    "é".encode(),
]


@pytest.mark.parametrize("seed", range(20))
def test_escapes_and_depths_are_the_same_in_both(seed: int) -> None:
    chance = Random(seed)
    for _ in range(500):
        text = b'"' + b"".join(chance.choice(PARTS) for _ in range(chance.randrange(9))) + b'"'
        deep = chance.randrange(4)
        text = b"[" * deep + text + b"]" * deep
        assert _native.remove_json_escapes(text) == _pure_python.remove_json_escapes(text)
        assert _native.json_depth(text) == _pure_python.json_depth(text) == deep


@pytest.mark.parametrize(
    "text",
    [b'"\\ud800"', b'"\\udc00"', b'"\\ud800\\u0041"', b'"\\uzzzz"', b'"\\u12"', b'"\\', b'"\\u00e', b'"\\u00+1"'],
)
def test_what_is_no_escape_is_left_to_the_other(text: bytes) -> None:
    assert _native.remove_json_escapes(text) is None
    assert _pure_python.remove_json_escapes(text) is None


def test_an_escape_that_is_no_character_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError, match="escape"):
        batch_encoder.compact_json(b'"\\ud800"')


def test_a_list_of_lists_is_not_decoded_to_see_how_deep_it_is() -> None:
    data = b"[" + b"[]," * 200_000 + b"1]"
    tracemalloc.start()
    try:
        batch_encoder.check_depth(data)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()
    with pytest.raises(BadInput, match="deeper"):
        batch_encoder.check_depth(b"[" * 129 + b"]" * 129)
    batch_encoder.check_depth(b'"' + b"[" * 500 + b'"')


def test_metas_are_decoded_one_at_a_time() -> None:
    """Those of one body would take 30 times its bytes together."""
    text = Raw(b'{"a":[' + b"[]," * 5_000 + b"1]}")
    count = 100
    tracemalloc.start()
    try:
        made = batch_encoder.batch_from_texts(EngineConfig(), [b"1"] * count, True, None, None, [text] * count)
        assert tracemalloc.get_traced_memory()[1] < 6 * MIB
    finally:
        tracemalloc.stop()
    assert made.metas is not None
    assert len(made.metas) == count


@pytest.mark.parametrize(
    "meta",
    [
        b"1",
        b"[]",
        b'"a"',
        b'{"a":' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"a":"' + b"x" * 17_000 + b'"}',
        b" " * MIB + b"{}",
    ],
)
def test_a_meta_that_cannot_be_is_refused(meta: bytes) -> None:
    with pytest.raises(BadInput, match="nothing was written"):
        batch_encoder.batch_from_texts(EngineConfig(), [b"1"], True, None, None, [Raw(meta)])


class _Loop:
    def call_soon(self, *_: Any) -> None:
        """Never mind."""


def test_a_turn_knows_when_it_has_done_its_share() -> None:
    ring = TurnScheduler(_Loop(), 256)  # type: ignore[arg-type]
    ring.spend(255)
    assert not ring.is_exhausted
    ring.spend(1)
    assert (ring.is_exhausted, ring.units_left) == (True, 8)
