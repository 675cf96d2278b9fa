"""What every test of the segmented log stands on: a disk that can fail, a clock that stands still, one codec at a time.

File names are written down here once more, from the layouts' descriptions: a test that damages a
file must not ask the code under test which one it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tidelog.commitlog import SegmentedLog
from tidelog.testing import ManualClock, SimDisk

CODECS = ("tide", "rustlog", "laminar", "narwhal")
DATA = {"tide": "seg-{:016d}.data", "rustlog": "{:020d}.log", "laminar": "{}.store", "narwhal": "{:020d}.log"}
INDEX = {"tide": "seg-{:016d}.idx", "rustlog": "{:020d}.index", "laminar": "{}.index", "narwhal": "{:020d}.idx"}


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> str:
    name = request.param
    assert isinstance(name, str)
    return name


@pytest.fixture
def first_seq(codec: str) -> int:
    """The first seq of a new log, as the codec's design has it."""
    return {"tide": 1, "rustlog": 0, "laminar": 0, "narwhal": 1}[codec]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def disk(clock: ManualClock) -> SimDisk:
    return SimDisk(clock=clock, trace=True)


@pytest.fixture
def open_log(codec: str, clock: ManualClock, disk: SimDisk) -> Callable[..., SegmentedLog]:
    """Open the log `log` on the simulated disk; any argument of `SegmentedLog.open` may be given or overruled."""

    def opened(path: str = "log", **settings: Any) -> SegmentedLog:
        defaults: dict[str, Any] = {"codec": codec, "disk": disk, "clock": clock}
        return SegmentedLog.open(path, **defaults | settings)

    return opened


@pytest.fixture
def data_path(codec: str) -> Callable[[int], str]:
    """Where the data file of a segment lies."""
    return lambda base: f"log/{DATA[codec].format(base)}"


@pytest.fixture
def index_path(codec: str) -> Callable[[int], str]:
    """Where the index file of a segment lies."""
    return lambda base: f"log/{INDEX[codec].format(base)}"
