"""Channels beside topics in one directory: `tidelog.open(…).channel`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tidelog
from tidelog.channels import Message
from tidelog.errors import BadInput, Closed, Forbidden, HookFailed, ReadOnly
from tidelog.testing import ManualClock, SimDisk

CHANNEL, ANN, BOB = "!room@host", "ann@host", "bob@host"


def test_channels_and_topics_survive_close_in_one_directory(tmp_path: Path) -> None:
    path = str(tmp_path / "data")
    with tidelog.open(path) as log:
        log.topic("orders").append([b"1"])
        log.channel(CHANNEL, user=ANN).join(persist=True)
        log.channel(CHANNEL, user=ANN).publish(b"hello")
        assert isinstance(log, tidelog.Database)
    with pytest.raises(Closed):
        log.channel(CHANNEL)
    with tidelog.open(path) as log:
        assert log.topic("orders").count == 1
        assert [message.payload for message in log.channel(CHANNEL, user=ANN).history().messages] == [b"hello"]


def test_a_read_only_database_reads_history_and_refreshes(tmp_path: Path) -> None:
    path = str(tmp_path / "data")
    with tidelog.open(path) as log:
        ann = log.channel(CHANNEL, user=ANN)
        ann.join(persist=True)
        ann.publish(b"one")
        with tidelog.open(path, read_only=True) as reader:
            channel = reader.channel(CHANNEL)
            assert [message.payload for message in channel.history().messages] == [b"one"]
            with pytest.raises(ReadOnly):
                reader.channel(CHANNEL, user=ANN).publish(b"no")
            ann.publish(b"two")
            reader.refresh()
            assert [message.payload for message in reader.channel(CHANNEL).history().messages] == [b"one", b"two"]


def test_database_tick_syncs_channels_after_their_flush_interval() -> None:
    clock = ManualClock()
    disk = SimDisk(clock=clock)
    log = tidelog.open("data", disk=disk, clock=clock, threads=False, wal_file_bytes=1 << 14)
    ann = log.channel(CHANNEL, user=ANN)
    ann.join(persist=True, message_flush_interval=100)
    ann.publish(b"soon")
    clock.tick(100)
    log.tick()
    again = tidelog.open("data", disk=disk.crash_image(), clock=clock, threads=False, wal_file_bytes=1 << 14)
    assert [message.payload for message in again.channel(CHANNEL).history().messages] == [b"soon"]


def test_creating_a_handle_performs_no_io() -> None:
    disk = SimDisk()
    log = tidelog.open("data", disk=disk, clock=ManualClock(), threads=False, wal_file_bytes=1 << 14)
    before = disk.op_count
    assert repr(log.channel(CHANNEL)) == "Channel('!room@host', user=OPERATOR)"
    assert log.channel(CHANNEL, user=ANN)
    assert disk.op_count == before


@pytest.mark.parametrize("name", ["room", "!room", "", None])
def test_a_bad_name_is_refused(name: Any) -> None:
    log = tidelog.open("data", disk=SimDisk(), clock=ManualClock(), threads=False, wal_file_bytes=1 << 14)
    with pytest.raises(BadInput):
        log.channel(name)
    with pytest.raises(BadInput):
        log.channel(CHANNEL, user="no-domain")
    with pytest.raises(BadInput):
        log.channel(CHANNEL, user=None)  # type: ignore[arg-type]


def test_a_hook_authenticates_users() -> None:
    def hook(asked: Any) -> object:
        if asked.token == "crash":
            raise KeyError("token")
        if asked.token == "odd":
            return 5
        return {"secret": "root@host", "yes": True}.get(asked.token)

    log = tidelog.open("data", disk=SimDisk(), clock=ManualClock(), threads=False, wal_file_bytes=1 << 14, hook=hook)
    assert log.channel(CHANNEL, user=ANN, token="secret").user == "root@host"
    assert log.channel(CHANNEL, user=ANN, token="yes").user == ANN
    with pytest.raises(Forbidden):
        log.channel(CHANNEL, user=ANN, token="wrong")
    for token in ("crash", "odd"):
        with pytest.raises(HookFailed):
            log.channel(CHANNEL, user=ANN, token=token)
    assert log.channels.metrics.get("auth_attempts", "success") == 2
    assert log.channels.metrics.get("auth_attempts", "forbidden") == 1


def test_fields_of_a_message() -> None:
    assert Message._fields == ("channel", "seq", "ts_ms", "sender", "payload")
