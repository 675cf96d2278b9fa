"""A thread that syncs for an event loop: the kernel's, and its twin."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
from tests.implementations import BOTH, implementation

from tidelog.disk.fsync_thread import FsyncThread

LIMIT_S = 60


def heard(beside: FsyncThread) -> int:
    beside.wait(LIMIT_S)
    error = beside.result()
    return 0 if error is None else int(error.errno or -1)


def nothing_is_heard(beside: FsyncThread) -> None:
    with pytest.raises(BlockingIOError):
        beside.result()


@BOTH
def test_a_descriptor_is_synced_and_what_came_of_it_is_told_once(tmp_path: Path, compiled: bool) -> None:
    with implementation(compiled=compiled):
        beside = FsyncThread("test")
    nothing_is_heard(beside)
    with (tmp_path / "file").open("wb") as file:
        for _ in range(3):
            file.write(b"x")
            file.flush()
            beside.request(file.fileno())
            assert heard(beside) == 0
            nothing_is_heard(beside)
        gone = file.fileno()
    beside.request(gone)
    assert heard(beside) == errno.EBADF
    ends = os.pipe()
    beside.request(ends[0])
    assert heard(beside) == errno.EINVAL, "a pipe cannot be synced"
    for end in ends:
        os.close(end)
    beside.close()


@BOTH
def test_its_thread_and_its_descriptors_end_with_it(compiled: bool) -> None:
    before = os.listdir("/proc/self/fd")
    with implementation(compiled=compiled):
        beside = FsyncThread("test")
    beside.close()
    assert not beside._thread.is_alive()
    assert len(os.listdir("/proc/self/fd")) == len(before)


@BOTH
def test_a_forked_child_that_holds_its_pipes_holds_up_nobody(compiled: bool) -> None:
    """Method: a second descriptor of the pipe, which is what a child has."""
    with implementation(compiled=compiled):
        beside = FsyncThread("test")
    held = os.dup(beside._request_fd)
    beside.close()
    assert not beside._thread.is_alive()
    os.close(held)


def test_it_is_heard_whatever_the_number_of_its_descriptor(tmp_path: Path) -> None:
    beside = FsyncThread("test")
    low = beside.descriptor
    beside.descriptor = fcntl.fcntl(low, fcntl.F_DUPFD, 1_100)
    with (tmp_path / "file").open("wb") as file:
        beside.request(file.fileno())
        assert heard(beside) == 0
    os.close(low)
    beside.close()
