"""The fsync thread of an event loop: compiled, and in Python."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
from tests.implementations import BOTH, implementation

from tidelog.disk.posix import FsyncThread

LIMIT_S = 60


def wait_for_errno(thread: FsyncThread) -> int:
    thread.wait(LIMIT_S)
    error = thread.result()
    return 0 if error is None else int(error.errno or -1)


def assert_no_result(thread: FsyncThread) -> None:
    with pytest.raises(BlockingIOError):
        thread.result()


@BOTH
def test_result_of_a_sync_is_returned_once(tmp_path: Path, compiled: bool) -> None:
    with implementation(compiled=compiled):
        thread = FsyncThread("test")
    assert_no_result(thread)
    with (tmp_path / "file").open("wb") as file:
        for _ in range(3):
            file.write(b"x")
            file.flush()
            thread.request(file.fileno())
            assert wait_for_errno(thread) == 0
            assert_no_result(thread)
        closed_fd = file.fileno()
    thread.request(closed_fd)
    assert wait_for_errno(thread) == errno.EBADF
    pipe = os.pipe()
    thread.request(pipe[0])
    assert wait_for_errno(thread) == errno.EINVAL, "a pipe cannot be synced"
    for end in pipe:
        os.close(end)
    thread.close()


@BOTH
def test_close_stops_the_thread_and_closes_its_descriptors(compiled: bool) -> None:
    before = os.listdir("/proc/self/fd")
    with implementation(compiled=compiled):
        thread = FsyncThread("test")
    thread.close()
    assert not thread._thread.is_alive()
    assert len(os.listdir("/proc/self/fd")) == len(before)


@BOTH
def test_close_does_not_wait_for_a_child_that_inherited_the_pipe(compiled: bool) -> None:
    """Method: a duplicate of the descriptor, as a child inherits it."""
    with implementation(compiled=compiled):
        thread = FsyncThread("test")
    inherited_fd = os.dup(thread._request_fd)
    thread.close()
    assert not thread._thread.is_alive()
    os.close(inherited_fd)


def test_wait_works_with_a_descriptor_above_1023(tmp_path: Path) -> None:
    thread = FsyncThread("test")
    low = thread.descriptor
    thread.descriptor = fcntl.fcntl(low, fcntl.F_DUPFD, 1_100)
    with (tmp_path / "file").open("wb") as file:
        thread.request(file.fileno())
        assert wait_for_errno(thread) == 0
    os.close(low)
    thread.close()
