"""The two files of a channel, frozen as bytes, and what becomes of them when any one byte changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidelog.errors import Corrupt
from tidelog.formats import small_files
from tidelog.formats.narwhal_channel import ImportRecord, IndexSize, decode_import_record, encode_import_record
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


IMPORTED = ImportRecord(
    b"\x06orphan\x00\x01\x02\x00\x01\x05\x01\x01\x00\x01\tlocalhost\x00\x00\x00\x00\x00",
    ChannelConfig(2, 65_536, 5, True, 0, "pubsub"),
    [IndexSize(1, 3_084)],
)


def test_the_record_of_an_import_is_written_and_read_as_it_was_frozen() -> None:
    assert encode_import_record(IMPORTED) == golden("imported.bin")
    assert decode_import_record(golden("imported.bin"), "it") == IMPORTED


def test_every_change_and_every_cut_of_the_record_of_an_import_is_found() -> None:
    whole = golden("imported.bin")
    changed = [whole[:size] for size in range(len(whole))]
    for at in range(len(whole)):
        changed += [whole[:at] + bytes([whole[at] ^ mask]) + whole[at + 1 :] for mask in (1, 0x80, 0xFF)]
    for content in changed:
        with pytest.raises(Corrupt):
            decode_import_record(content, "it")


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
