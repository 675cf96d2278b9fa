"""Cursors go out and come back, and everything else is told apart from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog import api_types
from tidelog.api_types import BadCursor


def test_the_example_of_the_contract() -> None:
    assert api_types.encode_positions({"jobs": 2}) == b"eyJqb2JzIjoyfQ"
    assert api_types.decode_positions("eyJqb2JzIjoyfQ") == {"jobs": 2}
    assert api_types.decode_positions("eyJqb2JzIjoyfQ==") == {"jobs": 2}


@given(st.dictionaries(st.text("abc.:-_é", min_size=1), st.integers(0, 2**63)))
def test_positions_come_back_sorted_and_safe_for_a_url(positions: dict[str, int]) -> None:
    text = api_types.encode_positions(positions).decode()
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
    assert list(api_types.decode_positions(text).items()) == sorted(
        positions.items(), key=lambda item: item[0].encode()
    )


@given(st.text(min_size=1))
def test_a_page_cursor_comes_back(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        return
    assert api_types.decode_page_cursor(api_types.encode_page_cursor(name)) == name


@pytest.mark.parametrize("text", ["%%%not-base64%%%", "!", "a", "e30", "W10", "bnVsbA", "é", "eyJhZnRlciI6MX0"])
def test_what_we_never_handed_out_is_refused(text: str) -> None:
    with pytest.raises(BadCursor):
        api_types.decode_page_cursor(text)
