"""Scrub finds what check finds, wherever the parts were looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.pipelines.world import Bench, Inline

import tidelog
from tidelog.channels.check import ChannelCheck
from tidelog.engine.check import check
from tidelog.errors import BadInput, NotFound
from tidelog.pipelines.scrubbing import scrubbed


@pytest.fixture
def data(tmp_path: Path) -> Path:
    bench = Bench(tmp_path)
    bench.fill(300)
    with bench.engine() as engine:
        engine.topic("others").append([b"x"] * 30)
        engine.topic("orders").delete(seqs=[5, 6])
        engine.topic("orders").seal()
        engine.checkpoint()
        engine.topic("orders").append([b"tail"])
    return Path(bench.data)


def test_a_whole_directory(data: Path) -> None:
    runner, looked = Inline(), check(str(data))
    assert not [finding for finding in looked if finding.damage]
    found = scrubbed(str(data), runner)
    assert found.damage == ()
    assert (found.topics, found.segments, found.frames, found.bytes) == (
        looked.topics,
        looked.segments,
        looked.frames,
        looked.bytes,
    )
    assert runner.tasks == found.parts > 1


@pytest.mark.parametrize("pattern", ["topics/*/*.data", "topics/*/*.idx", "topics/*/*.foot", "topics/*/*.del",
                                     "wal/**/*.log", "meta/*"])  # fmt: skip
def test_damage_anywhere_is_named_by_its_place(data: Path, pattern: str) -> None:
    """Method: one flipped bit in every kind of file; the same findings as `check`, which has its own proof."""
    path = sorted(data.glob(pattern))[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 3 if "wal" not in pattern else 40] ^= 0x10
    path.write_bytes(content)
    found, expected = scrubbed(str(data), Inline()), list(check(str(data)))
    assert set(found.findings) == set(expected)
    assert found.damage
    assert any(finding.file == path.relative_to(data).as_posix() for finding in found.damage)


@pytest.fixture
def rooms(data: Path) -> Path:
    """Thirty rooms beside the topics, and what is left of one that ended."""
    with tidelog.open(str(data)) as log:
        for number in range(30):
            room = log.channel(f"!room{number}@example.org", user="ann@example.org").join(persist=True)
            room.publish_many([b"message"] * 10)
    (data / "channels" / ("0" * 64)).mkdir()
    return data


def test_channels_are_shared_out_too(rooms: Path) -> None:
    runner, looked = Inline(), ChannelCheck(str(rooms))
    notes = list(looked)
    assert [finding.kind for finding in notes] == ["leftover"]
    found = scrubbed(str(rooms), runner)
    assert [finding for finding in found.findings if finding in notes] == notes
    assert (found.damage, found.channels, found.messages) == ((), looked.channels, looked.messages) == ((), 30, 300)
    assert found.bytes == check_bytes(rooms) + looked.bytes
    assert runner.tasks == found.parts


def test_damage_in_a_channel_is_named_by_its_place(rooms: Path) -> None:
    path = sorted(rooms.glob("channels/*/*.log"))[17]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)
    found = scrubbed(str(rooms), Inline())
    assert [finding.file for finding in found.damage] == [path.relative_to(rooms).as_posix()]
    assert set(found.damage) <= set(ChannelCheck(str(rooms)))


def check_bytes(data: Path) -> int:
    looked = check(str(data))
    list(looked)
    return looked.bytes


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is nothing at"):
        scrubbed(str(tmp_path / "nowhere"), Inline())
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="is a file"):
        scrubbed(str(tmp_path / "file"), Inline())
    with pytest.raises(NotFound, match="there are no topics in"):
        scrubbed(str(tmp_path), Inline())
