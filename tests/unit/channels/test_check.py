"""What `ChannelCheck` finds, on real files; the command itself is in tests/unit/cli/test_check.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tidelog
from tidelog.channels.rules import directory_name
from tidelog.channels.store import ChannelCheck
from tidelog.engine.check import Finding

CHANNEL, JOBS, ANN = "!room@example.org", "!jobs@example.org", "ann@example.org"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A pubsub channel with sealed and active segments, and a fifo channel with one popped message."""
    with tidelog.open(str(tmp_path / "d")) as log:
        channel = log.channel(CHANNEL, user=ANN).join(persist=True, max_persist_messages=1000)
        for number in range(8):
            channel.publish_many([b"message %d" % number] * 100)
        jobs = log.channel(JOBS, user=ANN).join(persist=True, type="fifo")
        jobs.push(b"one")
        jobs.push(b"two")
        jobs.pop()
    return tmp_path / "d"


def at(data: Path, channel: str, file: str = "") -> Path:
    return data / "channels" / directory_name(channel) / file


def found(data: Path) -> list[Finding]:
    return list(ChannelCheck(str(data)))


def flip(path: Path, pos: int) -> None:
    content = bytearray(path.read_bytes())
    content[pos] ^= 1
    path.write_bytes(content)


def test_check_counts_undamaged_channels(data: Path) -> None:
    looked = ChannelCheck(str(data))
    assert list(looked) == []
    assert (looked.channels, looked.messages) == (2, 802)
    assert looked.bytes > 8000


def test_check_of_a_directory_without_channels_finds_nothing(tmp_path: Path) -> None:
    with tidelog.open(str(tmp_path / "d")) as log:
        log.topic("t").append(b"x")
    assert found(tmp_path / "d") == []


def _metadata(data: Path) -> None:
    flip(at(data, CHANNEL, "metadata.bin"), 20)


def _swapped(data: Path) -> None:
    at(data, CHANNEL, "metadata.bin").write_bytes(at(data, JOBS, "metadata.bin").read_bytes())


def _sealed(data: Path) -> None:
    flip(min(at(data, CHANNEL).glob("*.log")), 40)


def _cursor(data: Path) -> None:
    flip(at(data, JOBS, "cursor.bin"), 0)


def _no_cursor(data: Path) -> None:
    at(data, JOBS, "cursor.bin").unlink()


@pytest.mark.parametrize(
    ("spoil", "kind", "file"),
    [
        (_metadata, "channel", "metadata.bin"),
        (_swapped, "channel", "metadata.bin"),
        (_sealed, "messages", ".log"),
        (_cursor, "cursor", "cursor.bin"),
        (_no_cursor, "cursor", "cursor.bin"),
    ],
)
def test_check_names_the_damaged_file(data: Path, spoil: Callable[[Path], None], kind: str, file: str) -> None:
    spoil(data)
    damage = [finding for finding in found(data) if finding.damage]
    assert [finding.kind for finding in damage] == [kind]
    assert damage[0].file.endswith(file)
    assert damage[0].file.startswith("channels/")
    if kind == "messages":
        assert (damage[0].topic, damage[0].seqs.start) == (CHANNEL, 1)
        assert len(damage[0].seqs) >= 1


def test_a_cursor_that_contradicts_the_log_is_damage(data: Path) -> None:
    for path in at(data, JOBS).glob("*.log"):
        path.write_bytes(b"")
    for path in (*at(data, JOBS).glob("*.idx"), at(data, JOBS, ".tidelog.manifest")):
        path.unlink()
    assert ["its cursor is 2" in finding.reason for finding in found(data) if finding.kind == "cursor"] == [True]


def test_leftovers_are_notes_and_foreign_directories_are_ignored(data: Path) -> None:
    at(data, CHANNEL, "deleted").write_bytes(b"")
    (data / "channels" / "lost+found").mkdir()
    notes = found(data)
    assert [(note.kind, note.damage) for note in notes] == [("leftover", False)]
