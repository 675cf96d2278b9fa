"""The life of a service: how far its recovery is."""

from __future__ import annotations

import asyncio
from typing import Any

import tidelog.engine
from tidelog.server import lifecycle
from tidelog.server.config import ServerConfig
from tidelog.server.service import Service
from tidelog.testing import ManualClock, SimDisk


class RecordingService(Service):
    """Records every value of the recovery progress."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "recovery_progress":
            self.__dict__.setdefault("progress_values", []).append(value)


def test_recovery_progress_never_falls_and_covers_both_passes() -> None:
    clock = ManualClock()
    disk = SimDisk()
    limits: dict[str, Any] = {"wal_shards": 2, "wal_file_bytes": 1 << 16}
    engine = tidelog.open("data", disk=disk, clock=clock, threads=False, **limits)
    for number in range(8):
        engine.topic(f"t{number}", durability="fsync").append([number])
    disk = disk.reboot()

    async def recovered() -> list[float]:
        service = RecordingService(
            ServerConfig(data_dir="data", wal_shards=2, commit="loop"), clock, asyncio.get_running_loop()
        )
        await lifecycle.recover(service, disk, lambda _: None)
        await lifecycle.close_service(service)
        values: list[float] = service.__dict__["progress_values"]
        return values

    values = asyncio.run(recovered())
    assert values == sorted(values)
    assert (values[0], values[-1]) == (0.0, 1.0)
    assert len([value for value in values if 0 < value <= 0.5]) == 2, "shards that are read"
    assert len([value for value in values if 0.5 < value < 1]) >= 8, "topics that are replayed"
