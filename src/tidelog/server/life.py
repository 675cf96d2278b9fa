"""[shell] The life of a service, whoever listens for it: recovery, and an end that leaves nothing open.

    recover ──► serve ──► part: streams get their last frame ──► requests under way end ──► close: checkpoint

Between `part` and `close` whoever listens lets the requests end; what they wrote is in the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable

from tidelog.disk.seam import Disk
from tidelog.engine import Engine, EngineConfig
from tidelog.engine import open as open_engine
from tidelog.server.config import ServerConfig
from tidelog.server.service import Service

_STREAMS_MS = 3_000  # streams are told and gone well before that


def engine_config(config: ServerConfig) -> EngineConfig:
    return EngineConfig(
        wal_shards=config.wal_shards,
        segment_events_max=config.segment_max_events,
        segment_bytes_max=config.segment_max_bytes,
        segment_age_ms_max=config.segment_max_age_ms,
        topics_max=config.max_topics,
        routers_max=config.max_routers,
        total_bytes_max=config.max_total_bytes,
        queue_max=config.wal_queue_max,
        kernel=config.kernel,
    )


async def recover(service: Service, disk: Disk, say: Callable[[str], None]) -> None:
    """Return when the service is ready."""
    config, clock = service.config, service.clock
    began_ms = clock.monotonic_ms()

    def progress(_: str, done: int, total: int) -> None:
        service.progress = min(done / total, 0.999) if total else 0.0

    engine = await service.work(
        lambda: open_engine(
            config.data_dir,
            disk=disk,
            clock=clock,
            config=engine_config(config),
            accept_loss=config.accept_loss,
            progress=progress,
        )
    )
    service.ready(engine)
    report = engine.report
    took_s = (clock.monotonic_ms() - began_ms) / 1000
    say(f"ready in {took_s:.1f} s: {report.topics} topics, {report.frames} frames replayed from the WAL")
    for line in report.lines():
        say(f"  {line}")


async def part(service: Service) -> None:
    """Tell everybody who waits, and see the streams off."""
    service.stop()
    await service.streams_gone(_STREAMS_MS / 1000)


async def close(service: Service) -> None:
    """A last checkpoint; the directory is free when this returns."""
    await service.settle()
    if service.is_ready:
        engine: Engine = service.engine
        await service.work(engine.close)
    service.close()
