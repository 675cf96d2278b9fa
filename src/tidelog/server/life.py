"""[shell] The life of a service, whoever listens for it: recovery, and an end that leaves nothing open.

    recover ──► serve ──► part: streams get their last frame ──► requests under way end ──► close: checkpoint

Between `part` and `close` whoever listens lets the requests end; what they wrote is in the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable

from tidelog.channels import ChannelLimits
from tidelog.channels import open as open_engine
from tidelog.disk.seam import Disk
from tidelog.engine import EngineConfig
from tidelog.engine.report import PASSES
from tidelog.server.config import ServerConfig
from tidelog.server.service import Service

_NO_LIMIT = 1 << 31
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


def channel_limits(config: ServerConfig, *, auth: bool) -> ChannelLimits:
    """`auth`: users are who they say they are, so that what they are members of can be kept."""
    usual = ChannelLimits()
    return ChannelLimits(
        auth=auth,
        domain=config.channel_domain or None,
        channels_max=config.max_channels or _NO_LIMIT,
        clients_max=config.max_channel_members or _NO_LIMIT,
        channels_per_client_max=config.max_channels_per_user or _NO_LIMIT,
        payload_bytes_max=min(config.max_channel_payload_bytes or usual.segment_bytes, usual.segment_bytes),
        persist_messages_max=config.channel_messages_max,
    )


async def recover(service: Service, disk: Disk, say: Callable[[str], None]) -> None:
    """Return when the service is ready."""
    config, clock = service.config, service.clock
    began_ms = clock.monotonic_ms()

    def progress(what: str, done: int, total: int) -> None:
        """Each pass has its share, so that what was reached is never taken back."""
        service.progress = min((PASSES.index(what) + done / total) / len(PASSES), 0.999)

    engine = await service.work(
        lambda: open_engine(
            config.data_dir,
            disk=disk,
            clock=clock,
            config=engine_config(config),
            accept_loss=config.accept_loss,
            progress=progress,
            channels=channel_limits(config, auth=service.rooms.auth),
            hook=service.rooms.hook,
        )
    )
    try:
        manager = await service.work(lambda: engine.channels)
        service.ready(engine)
    except BaseException:
        await service.work(engine.close)
        raise
    service.rooms.ready(manager)
    report = engine.report
    took_s = (clock.monotonic_ms() - began_ms) / 1000
    say(f"ready in {took_s:.1f} s: {report.topics} topics, {report.frames} frames replayed from the WAL")
    for line in report.lines():
        say(f"  {line}")
    if manager.report.restored or manager.report.skipped:
        say(f"  {manager.report.restored} channels restored, {len(manager.report.skipped)} passed over")


async def part(service: Service) -> None:
    """Tell everybody who waits, and see the streams off."""
    service.stop()
    await service.streams_gone(_STREAMS_MS / 1000)


async def close(service: Service) -> None:
    """A last checkpoint; the directory is free when this returns."""
    await service.settle()
    if service.is_ready:
        service.commits.close()
        await service.work(service.engine.close)
    service.close()
