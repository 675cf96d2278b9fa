"""The cleaner checkpoint: what is written is read back, and nothing else is."""

from __future__ import annotations

import json
from contextlib import suppress
from struct import pack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelog.commitlog.codecs.rustlog import CleanerCheckpoint, decode_cleaner_checkpoint, encode_cleaner_checkpoint
from tidelog.errors import BadInput, Corrupt

quick = settings(deadline=None, max_examples=100)

TOP = (1 << 63) - 1
number = st.integers(0, TOP)
checkpoints = st.builds(
    CleanerCheckpoint,
    number,
    number,
    st.none() | st.tuples(number, st.sampled_from(["copy", "swap"])),
    st.integers(0, TOP - 1_999_999),
)


def shape(**changes: object) -> dict[str, Any]:
    good = {
        "last_cleaned_offset": 3,
        "retention_horizon_ms": 4,
        "compaction_state": "Idle",
        "created_at": {"secs_since_epoch": 5, "nanos_since_epoch": 6000},
    }
    return {key: value for key, value in (good | changes).items() if value is not None}


@quick
@given(checkpoints)
def test_what_is_written_is_read_back(checkpoint: CleanerCheckpoint) -> None:
    text = encode_cleaner_checkpoint(checkpoint)
    assert decode_cleaner_checkpoint(text) == checkpoint
    assert json.dumps(json.loads(text), indent=2).encode() == text, "pretty, two spaces, no newline at the end"


def test_the_four_members_come_in_order() -> None:
    text = encode_cleaner_checkpoint(CleanerCheckpoint(7, 8, (9, "swap"), 10_000_011))
    assert list(json.loads(text).items()) == [
        ("last_cleaned_offset", 7),
        ("retention_horizon_ms", 8),
        ("compaction_state", {"Running": {"segment": 9, "phase": "swap"}}),
        ("created_at", {"secs_since_epoch": 10, "nanos_since_epoch": 11_000}),
    ]


def test_members_may_come_in_any_order_and_nanoseconds_are_rounded_down() -> None:
    good = shape(created_at={"nanos_since_epoch": 6999, "secs_since_epoch": 5})
    assert decode_cleaner_checkpoint(json.dumps(dict(reversed(good.items()))).encode()) == CleanerCheckpoint(
        3, 4, None, 5_000_006
    )


NO_NUMBERS: list[object] = [-1, TOP + 1, (1 << 64) - 1, 1.0, True, "3", [], {}]
NO_STEPS: list[object] = [{}, {"segment": 1, "phase": "done"}, {"segment": -1, "phase": "copy"}, {"segment": 1}]
NO_STATES: list[object] = ["idle", "Running", 3, {}, {"Idle": {}}]


@pytest.mark.parametrize(
    "bad",
    [
        *(shape(**{member: None}) for member in shape()),
        *(shape(last_cleaned_offset=value) for value in NO_NUMBERS),
        *(shape(retention_horizon_ms=value) for value in (-1, TOP + 1, "3")),
        *(shape(compaction_state=value) for value in NO_STATES),
        *(
            shape(compaction_state={"Running": value})
            for value in (
                {},
                {"segment": 1, "phase": "done"},
                {"segment": -1, "phase": "copy"},
                {"segment": 1},
            )
        ),
        shape(compaction_state={"Running": {"segment": 1, "phase": "copy", "more": 1}}),
        shape(compaction_state={"Running": {"segment": 1, "phase": "copy"}, "Idle": {}}),
        *(
            shape(created_at={"secs_since_epoch": seconds, "nanos_since_epoch": nanos})
            for seconds, nanos in ((-1, 0), (1, 1_000_000_000), (1, -1), (TOP, 0), ("1", 0))
        ),
        shape(created_at=5),
        shape(more=1),
        [shape()],
        "Idle",
        3,
    ],
)
def test_a_file_of_another_shape_is_corrupt(bad: object) -> None:
    with pytest.raises(Corrupt):
        decode_cleaner_checkpoint(json.dumps(bad).encode())


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"{",
        b"null",
        b"\xff",
        b"\0" * 15,
        b"\0" * 17,
        b'{"\x80":1}',
        b"[" * 100_000,
        b"{" + b" " * 15,
        b"{" + bytes(15),
    ],
)
def test_bytes_that_are_no_text_of_ours_are_corrupt(bad: bytes) -> None:
    with pytest.raises(Corrupt, match="partition 3"):
        decode_cleaner_checkpoint(bad, where="partition 3")


def test_the_binary_form_is_read() -> None:
    assert decode_cleaner_checkpoint(pack(">QQ", 42, 1_700_000_000_000)) == CleanerCheckpoint(
        42, 0, None, 1_700_000_000_000_000
    )
    assert decode_cleaner_checkpoint(bytes(16)) == CleanerCheckpoint(0, 0, None, 0)
    for wrong in (pack(">QQ", (1 << 64) - 1, 0), pack(">QQ", 1 << 63, 0), pack(">QQ", 0, TOP // 1000 + 1)):
        with pytest.raises(Corrupt):
            decode_cleaner_checkpoint(wrong)


@quick
@given(st.binary(max_size=40))
def test_no_bytes_make_it_raise_anything_but_corrupt(data: bytes) -> None:
    with suppress(Corrupt):
        assert isinstance(decode_cleaner_checkpoint(data), CleanerCheckpoint)


@pytest.mark.parametrize(
    "bad",
    [
        CleanerCheckpoint(-1, 0, None, 0),
        CleanerCheckpoint(TOP + 1, 0, None, 0),
        CleanerCheckpoint(0, -1, None, 0),
        CleanerCheckpoint(0, 0, (-1, "copy"), 0),
        CleanerCheckpoint(0, 0, (0, "done"), 0),
        CleanerCheckpoint(0, 0, None, -1),
        CleanerCheckpoint(0, 0, None, TOP + 1),
    ],
)
def test_a_checkpoint_that_could_not_be_read_back_is_not_written(bad: CleanerCheckpoint) -> None:
    with pytest.raises(BadInput):
        encode_cleaner_checkpoint(bad)
