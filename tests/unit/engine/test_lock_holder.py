"""A directory that is locked: the error names the process, and the server, that has it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import tidelog
from tidelog.commitlog.log import LOCK_FILE
from tidelog.database import engine_of
from tidelog.disk.memory import MemoryDisk
from tidelog.disk.posix import PosixDisk
from tidelog.errors import Locked

URL = "http://127.0.0.1:4000"


def refused(path: str, disk: PosixDisk | MemoryDisk) -> Locked:
    with pytest.raises(Locked) as raised:
        tidelog.open(path, disk=disk, threads=False)
    return raised.value


def test_locked_names_the_process(tmp_path: Path) -> None:
    with tidelog.open(str(tmp_path), threads=False):
        error = refused(str(tmp_path), PosixDisk())
    assert (error.pid, error.server) == (os.getpid(), None)
    assert f"another process (pid {os.getpid()}); nothing was changed" in str(error)


@pytest.mark.parametrize("disk", [PosixDisk(), MemoryDisk()], ids=["posix", "memory"])
def test_locked_names_the_server_and_the_call_that_works(tmp_path: Path, disk: PosixDisk | MemoryDisk) -> None:
    path = str(tmp_path / "d")
    with tidelog.open(path, disk=disk, threads=False) as log:
        engine_of(log).announce_server(URL)
        error = refused(path, disk)
        assert error.server == URL
        assert f"{path} is served at {URL}; nothing was changed" in str(error)
        assert f'tidelog.connect("{URL}")' in str(error)
    with tidelog.open(path, disk=disk, threads=False):
        assert refused(path, disk).server is None, "the address of an earlier holder"


@pytest.mark.parametrize(
    "content",
    [b"", b"somebody", b"pid=1\nserver=http://a b\n", b'pid=1\nserver=http://x/")\n', b"pid=1\nserver=" + b"x" * 9999],
)
def test_lock_file_that_does_not_parse_names_no_holder(tmp_path: Path, content: bytes) -> None:
    with tidelog.open(str(tmp_path), threads=False):
        (tmp_path / LOCK_FILE).write_bytes(content)
        error = refused(str(tmp_path), PosixDisk())
    assert (error.pid, error.server) == (None, None)
    assert "another process; nothing was changed" in str(error)
