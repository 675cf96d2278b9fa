"""Channels on a simulated disk, with a clock that stands still."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tidelog.channels import Channel, ChannelLimits, ChannelManager
from tidelog.channels.manager import Hook
from tidelog.testing import ManualClock, SimDisk

CHANNEL, ANN, BOB, CID = "!room@host", "ann@host", "bob@host", "cid@else.org"


class ChannelEnv:
    """A directory of channels that can be restarted."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.disk = SimDisk(clock=self.clock)
        self.disk.make_dir("data")
        self.limits = ChannelLimits(shards=2, segment_bytes=1 << 17)
        self.hook: Hook | None = None
        self._manager: ChannelManager | None = None

    @property
    def manager(self) -> ChannelManager:
        if self._manager is None:
            self._manager = ChannelManager(self.disk, "data", self.clock, limits=self.limits, hook=self.hook)
        return self._manager

    def channel(self, user: str = ANN, name: str = CHANNEL) -> Channel:
        return Channel(self.manager, name, user)

    def restart(self) -> ChannelManager:
        """Close and open again."""
        if self._manager is not None:
            self._manager.close()
        self._manager = None
        return self.manager

    def crash(self) -> ChannelManager:
        """Cut the power; what was not synced is lost."""
        self.disk = self.disk.crash_image("none")
        self._manager = None
        return self.manager


@pytest.fixture
def env() -> ChannelEnv:
    return ChannelEnv()


Make = Callable[..., Channel]
