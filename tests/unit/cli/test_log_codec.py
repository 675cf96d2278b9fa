"""Which codec a directory's log has, before anything is opened for writing."""

from __future__ import annotations

import pytest

from tidelog.cli.log import codec_to_write, existing_codec
from tidelog.commitlog import SegmentedLog
from tidelog.commitlog.codecs import CODEC_NAMES
from tidelog.disk.memory import MemoryDisk
from tidelog.errors import BadInput, NotFound


@pytest.fixture
def disk() -> MemoryDisk:
    made = MemoryDisk()
    for name in CODEC_NAMES:
        with SegmentedLog.open(name, name, disk=made) as log:
            log.append(b"a")
    made.make_dir("empty")
    made.make_dir("unclear")
    made.open("unclear/00000000000000000000.log", "create").close()
    made.open("file", "create").close()
    return made


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_a_log_is_recognised_by_its_files(disk: MemoryDisk, name: str) -> None:
    for asked in (None, name):
        assert existing_codec(disk, name, asked) == name
        assert codec_to_write(disk, name, asked) == name


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_another_codec_than_the_log_has_is_refused(disk: MemoryDisk, name: str) -> None:
    for asked in set(CODEC_NAMES) - {name}:
        for choose in (existing_codec, codec_to_write):
            with pytest.raises(BadInput, match=f"holds a {name} log, not a {asked} one"):
                choose(disk, name, asked)


@pytest.mark.parametrize("path", ["nowhere", "empty"])
def test_where_there_is_no_log_only_an_append_makes_one(disk: MemoryDisk, path: str) -> None:
    assert codec_to_write(disk, path, None) == "tide"
    assert codec_to_write(disk, path, "laminar") == "laminar"
    for asked in (None, "tide"):
        with pytest.raises(NotFound, match=path):
            existing_codec(disk, path, asked)


def test_files_of_two_layouts_want_a_word(disk: MemoryDisk) -> None:
    for choose in (existing_codec, codec_to_write):
        assert choose(disk, "unclear", "narwhal") == "narwhal"
        for asked in (None, "tide"):
            with pytest.raises(BadInput, match="rustlog or narwhal; nothing was changed, choose with"):
                choose(disk, "unclear", asked)


def test_a_file_is_no_log(disk: MemoryDisk) -> None:
    for choose in (existing_codec, codec_to_write):
        with pytest.raises(BadInput, match="file is a file, a log is a directory"):
            choose(disk, "file", None)
