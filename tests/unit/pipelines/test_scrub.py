"""Scrub finds what check finds, wherever the parts were looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.pipelines.helpers import InlineRunner, PipelineHarness
from tests.unit.spark.helpers import run_server

import tidelog
from tidelog.addresses import Location
from tidelog.channels.store import ChannelCheck
from tidelog.engine.check import check_directory
from tidelog.errors import BadInput, NotFound
from tidelog.pipelines.scrub_job import run_remote_scrub, run_scrub


@pytest.fixture
def data(tmp_path: Path) -> Path:
    harness = PipelineHarness(tmp_path)
    harness.fill(300)
    with harness.engine() as engine:
        engine.topic("others").append([b"x"] * 30)
        engine.topic("orders").delete(seqs=[5, 6])
        engine.topic("orders").seal()
        engine.checkpoint()
        engine.topic("orders").append([b"tail"])
    return Path(harness.data)


def test_a_whole_directory(data: Path) -> None:
    runner, looked = InlineRunner(), check_directory(str(data))
    assert not [finding for finding in looked if finding.damage]
    found = run_scrub(str(data), runner)
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
    found, expected = run_scrub(str(data), InlineRunner()), list(check_directory(str(data)))
    assert set(found.findings) == set(expected)
    assert found.damage
    assert any(finding.file == path.relative_to(data).as_posix() for finding in found.damage)


@pytest.fixture
def data_with_channels(data: Path) -> Path:
    """Thirty rooms beside the topics, and what is left of one that ended."""
    with tidelog.open(str(data)) as log:
        for number in range(30):
            room = log.channel(f"!room{number}@example.org", user="ann@example.org").join(persist=True)
            room.publish_many([b"message"] * 10)
    (data / "channels" / ("0" * 64)).mkdir()
    return data


def test_channels_are_shared_out_too(data_with_channels: Path) -> None:
    runner, looked = InlineRunner(), ChannelCheck(str(data_with_channels))
    notes = list(looked)
    assert [finding.kind for finding in notes] == ["leftover"]
    found = run_scrub(str(data_with_channels), runner)
    assert [finding for finding in found.findings if finding in notes] == notes
    assert (found.damage, found.channels, found.messages) == ((), looked.channels, looked.messages) == ((), 30, 300)
    assert found.bytes == check_bytes(data_with_channels) + looked.bytes
    assert runner.tasks == found.parts


def test_damage_in_a_channel_is_named_by_its_place(data_with_channels: Path) -> None:
    path = sorted(data_with_channels.glob("channels/*/*.log"))[17]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)
    found = run_scrub(str(data_with_channels), InlineRunner())
    assert [finding.file for finding in found.damage] == [path.relative_to(data_with_channels).as_posix()]
    assert set(found.damage) <= set(ChannelCheck(str(data_with_channels)))


def check_bytes(data: Path) -> int:
    looked = check_directory(str(data))
    list(looked)
    return looked.bytes


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is nothing at"):
        run_scrub(str(tmp_path / "nowhere"), InlineRunner())
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="is a file"):
        run_scrub(str(tmp_path / "file"), InlineRunner())
    with pytest.raises(NotFound, match="there are no topics in"):
        run_scrub(str(tmp_path), InlineRunner())


# ── servers and object stores ─────────────────────────────────────────────────────────────────────


def test_records_of_a_server_and_of_an_object_store_are_verified(data: Path) -> None:
    store = Location(f"file://{data}")  # what pyarrow opens as a store
    assert not store.is_server
    with run_server(str(data)) as (_, address):
        for place in (Location(address), store):
            runner = InlineRunner()
            found = run_remote_scrub(place, runner)
            assert found.damage == (), place
            assert (found.topics, found.parts) == (2, runner.tasks), place
            assert found.bytes > 300, place


def test_damage_on_a_server_is_named_and_the_rest_is_read(data: Path) -> None:
    path = sorted(data.glob("topics/*/*.data"))[0]
    with run_server(str(data)) as (_, address):
        whole = run_remote_scrub(Location(address), InlineRunner())
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x10
        path.write_bytes(content)
        found = run_remote_scrub(Location(address), InlineRunner())
    (damage,) = found.damage
    assert damage.topic == "orders"
    assert damage.pos is not None
    assert damage.seqs
    assert 0 < found.bytes < whole.bytes
