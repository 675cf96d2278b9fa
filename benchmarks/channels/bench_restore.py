"""Restoring channels: how long a start takes with ten thousand of them.

Sketch. A channel is one small file in a directory of its own: two `stat`s to see that it lives, one more for its
size, one open and one read, some 25 µs of system calls; the checksum and the decoding of a few hundred bytes are
another 10. Ten thousand are half a second. No message log is opened. The limit is to list the directories and read
the files without looking into them.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.common import GB, Result, result, scratch_dir, steps, time_call

from tidelog.channels import ChannelManager
from tidelog.channels.rules import directory_name
from tidelog.clock import SystemClock
from tidelog.disk.posix import PosixDisk
from tidelog.formats import small_files
from tidelog.formats.small_files import ChannelAcl, ChannelConfig, ChannelMeta

_MEMBERS = 10


def run(quick: bool) -> list[Result]:
    count, rounds = (1_000, 2) if quick else (10_000, 5)
    with scratch_dir(GB // 2) as place:
        _make(place, count)
        restored, read = [], []
        with steps("restoring channels", rounds) as done:
            for _ in range(rounds):
                read.append(time_call(lambda: _read(place)))
                restored.append(time_call(lambda: _restore(place, count)))
                done()
    name = f"restore {count:,} channels of {_MEMBERS} members"
    return [result(name, restored, "s", limit=read, limit_name="list and read the files", max_value=2.0, kind="gate")]


def _make(place: Path, count: int) -> None:
    """As the store leaves them, without ten thousand times its syncs."""
    config = ChannelConfig(100, 65_536, 1_000, True, 0, "pubsub")
    for number in range(count):
        name = f"!room{number}@example.org"
        members = tuple(sorted(f"user{(number * 7 + each) % 5_000}@example.org" for each in range(_MEMBERS)))
        directory = place / "channels" / directory_name(name)
        directory.mkdir(parents=True)
        (directory / "metadata.bin").write_bytes(
            small_files.encode_channel(ChannelMeta(name, members[0], config, ChannelAcl(), members))
        )


def _read(place: Path) -> None:
    root = place / "channels"
    for name in os.listdir(root):
        (root / name / "metadata.bin").read_bytes()


def _restore(place: Path, count: int) -> None:
    manager = ChannelManager(PosixDisk(), str(place), SystemClock())
    assert manager.report.restored == count
    manager.close()
