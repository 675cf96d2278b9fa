"""File names of the codecs."""

from __future__ import annotations

import pytest

from tidelog.commitlog.codecs import CODEC_NAMES, make_codec
from tidelog.config import LogConfig

TOP = (1 << 63) - 1


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_file_name_contains_the_base(name: str) -> None:
    codec = make_codec(name, LogConfig())
    for base in (0, 1, 1000, TOP):
        assert codec.parse_file_name(codec.data_name(base)) == (base, "")
        for suffix in codec.side_suffixes:
            assert codec.parse_file_name(codec.side_name(base, suffix)) == (base, suffix)
            assert not codec.is_temporary(codec.side_name(base, suffix))


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_other_names_belong_to_no_segment(name: str) -> None:
    codec = make_codec(name, LogConfig())
    for other in (
        codec.data_name(TOP + 1),
        f"{codec.data_name(1000)}\n",
        f"{codec.data_name(1000)}.compacted",
        codec.data_name(1000).replace("1000", "١٠٠٠"),
        codec.data_name(1000).replace("1000", "-100"),
        ".cleaner_checkpoint",
        "metadata.bin",
    ):
        assert codec.parse_file_name(other) is None, other


@pytest.mark.parametrize(
    ("name", "data", "side"),
    [
        ("tide", "seg-0000000000001000.data", "seg-0000000000001000.idx"),
        ("rustlog", "00000000000000001000.log", "00000000000000001000.index"),
        ("laminar", "1000.store", "1000.index"),
        ("narwhal", "00000000000000001000.log", "00000000000000001000.idx"),
    ],
)
def test_names_are_those_of_the_format(name: str, data: str, side: str) -> None:
    codec = make_codec(name, LogConfig())
    assert (codec.data_name(1000), codec.side_name(1000, codec.side_suffixes[0])) == (data, side)
