"""The life of a service: how far its recovery is."""

from __future__ import annotations

import asyncio
from typing import Any

import tidelog.engine
from tidelog.server import lifecycle
from tidelog.server.config import ServerConfig
from tidelog.server.service import Service
from tidelog.testing import ManualClock, SimDisk


class Watched(Service):
    """Remembers every figure that it was told."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "recovery_progress":
            self.__dict__.setdefault("told", []).append(value)


def test_the_progress_of_recovery_never_falls_and_comes_from_both_of_its_passes() -> None:
    clock = ManualClock()
    disk = SimDisk()
    limits: dict[str, Any] = {"wal_shards": 2, "wal_file_bytes": 1 << 16}
    engine = tidelog.engine.open("data", disk=disk, clock=clock, threads=False, **limits)
    for number in range(8):
        engine.topic(f"t{number}", durability="fsync").append([number])
    disk = disk.reboot()

    async def recovered() -> list[float]:
        service = Watched(ServerConfig(data_dir="data", wal_shards=2, commit="loop"), clock, asyncio.get_running_loop())
        await lifecycle.recover(service, disk, lambda _: None)
        await lifecycle.close_service(service)
        told: list[float] = service.__dict__["told"]
        return told

    told = asyncio.run(recovered())
    assert told == sorted(told)
    assert (told[0], told[-1]) == (0.0, 1.0)
    assert len([at for at in told if 0 < at <= 0.5]) == 2, "shards that are read"
    assert len([at for at in told if 0.5 < at < 1]) >= 8, "topics that are replayed"
