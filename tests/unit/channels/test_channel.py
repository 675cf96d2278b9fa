"""Channels beside topics in one directory: `tidelog.open(…).channel`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tidelog
from tidelog.channels import Message
from tidelog.errors import BadInput, Closed, Forbidden, HookFailed, ReadOnly
from tidelog.testing import ManualClock, SimDisk

ROOM, ANN, BOB = "!room@host", "ann@host", "bob@host"


def test_a_room_lives_beside_topics_and_survives_closing(tmp_path: Path) -> None:
    path = str(tmp_path / "data")
    with tidelog.open(path) as log:
        log.topic("orders").append([b"1"])
        log.channel(ROOM, user=ANN).join(persist=True)
        log.channel(ROOM, user=ANN).publish(b"hello")
        assert isinstance(log, tidelog.Database)
    with pytest.raises(Closed):
        log.channel(ROOM)
    with tidelog.open(path) as log:
        assert log.topic("orders").count == 1
        assert [message.payload for message in log.channel(ROOM, user=ANN).history().messages] == [b"hello"]


def test_a_reader_beside_the_writer_reads_history_and_looks_again(tmp_path: Path) -> None:
    path = str(tmp_path / "data")
    with tidelog.open(path) as log:
        ann = log.channel(ROOM, user=ANN)
        ann.join(persist=True)
        ann.publish(b"one")
        with tidelog.open(path, read_only=True) as reader:
            room = reader.channel(ROOM)
            assert [message.payload for message in room.history().messages] == [b"one"]
            with pytest.raises(ReadOnly):
                reader.channel(ROOM, user=ANN).publish(b"no")
            ann.publish(b"two")
            reader.refresh()
            assert [message.payload for message in reader.channel(ROOM).history().messages] == [b"one", b"two"]


def test_the_engines_tick_keeps_the_intervals_of_channels() -> None:
    clock = ManualClock()
    disk = SimDisk(clock=clock)
    log = tidelog.open("data", disk=disk, clock=clock, threads=False, wal_file_bytes=1 << 14)
    ann = log.channel(ROOM, user=ANN)
    ann.join(persist=True, message_flush_interval=100)
    ann.publish(b"soon")
    clock.tick(100)
    log.tick()
    again = tidelog.open("data", disk=disk.crash_image(), clock=clock, threads=False, wal_file_bytes=1 << 14)
    assert [message.payload for message in again.channel(ROOM).history().messages] == [b"soon"]


def test_making_a_handle_does_nothing() -> None:
    disk = SimDisk()
    log = tidelog.open("data", disk=disk, clock=ManualClock(), threads=False, wal_file_bytes=1 << 14)
    before = disk.op_count
    assert repr(log.channel(ROOM)) == "Channel('!room@host', user=OPERATOR)"
    assert log.channel(ROOM, user=ANN)
    assert disk.op_count == before


@pytest.mark.parametrize("name", ["room", "!room", "", None])
def test_a_bad_name_is_refused(name: Any) -> None:
    log = tidelog.open("data", disk=SimDisk(), clock=ManualClock(), threads=False, wal_file_bytes=1 << 14)
    with pytest.raises(BadInput):
        log.channel(name)
    with pytest.raises(BadInput):
        log.channel(ROOM, user="nobody")
    with pytest.raises(BadInput):
        log.channel(ROOM, user=None)  # type: ignore[arg-type]


def test_a_hook_says_who_somebody_is() -> None:
    def hook(asked: Any) -> object:
        if asked.token == "crash":
            raise KeyError("token")
        if asked.token == "odd":
            return 5
        return {"secret": "root@host", "yes": True}.get(asked.token)

    log = tidelog.open("data", disk=SimDisk(), clock=ManualClock(), threads=False, wal_file_bytes=1 << 14, hook=hook)
    assert log.channel(ROOM, user=ANN, token="secret").user == "root@host"
    assert log.channel(ROOM, user=ANN, token="yes").user == ANN
    with pytest.raises(Forbidden):
        log.channel(ROOM, user=ANN, token="wrong")
    for token in ("crash", "odd"):
        with pytest.raises(HookFailed):
            log.channel(ROOM, user=ANN, token=token)
    assert log.channels.metrics.get("auth_attempts", "success") == 2
    assert log.channels.metrics.get("auth_attempts", "forbidden") == 1


def test_a_message_is_what_everybody_has() -> None:
    assert Message._fields == ("channel", "seq", "ts_ms", "sender", "payload")
