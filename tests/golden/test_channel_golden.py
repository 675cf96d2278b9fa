"""The two files of a channel, frozen as bytes, and what becomes of them when any one byte changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidelog.errors import Corrupt
from tidelog.formats import small_files
from tidelog.formats.small_files import ChannelAcl, ChannelConfig, ChannelMeta

META = ChannelMeta(
    "!room@host",
    "ann@host",
    ChannelConfig(100, 1_024, 50, True, 0, "pubsub"),
    ChannelAcl((), ("host",), ()),
    ("ann@host", "bob@host"),
)


def golden(name: str) -> bytes:
    return (Path(__file__).parent / "channel" / name).read_bytes()


def test_metadata_is_written_and_read_as_it_was_frozen() -> None:
    assert small_files.encode_channel(META) == golden("metadata.bin")
    assert small_files.decode_channel(golden("metadata.bin"), "it") == META


def test_a_cursor_is_written_and_read_as_it_was_frozen() -> None:
    assert small_files.encode_cursor(4) == golden("cursor.bin")
    assert small_files.decode_cursor(golden("cursor.bin")) == 4


def test_every_change_of_one_byte_of_metadata_is_found() -> None:
    whole = golden("metadata.bin")
    for at in range(len(whole)):
        for value in range(256):
            if value != whole[at]:
                with pytest.raises(Corrupt):
                    small_files.decode_channel(whole[:at] + bytes([value]) + whole[at + 1 :], "it")


def test_every_cut_is_found() -> None:
    whole = golden("metadata.bin")
    for size in range(len(whole)):
        with pytest.raises(Corrupt):
            small_files.decode_channel(whole[:size], "it")
    for size in range(16):
        assert small_files.decode_cursor(golden("cursor.bin")[:size]) is None
