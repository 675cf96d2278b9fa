"""[shell] The server process: bind, recover, serve, drain, checkpoint.

    bind ──► port file ──► recover (probes answer, the rest is 503) ──► serve ──► SIGTERM
    stop accepting ──► streams get their last frame ──► requests under way end ──► checkpoint ──► exit

The port is open before recovery begins: whoever waits for readiness sees how far it is.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tidelog.clock import Clock
from tidelog.disk.atomic import replace
from tidelog.disk.seam import Disk
from tidelog.engine.opening import check_free
from tidelog.errors import Error
from tidelog.server import life
from tidelog.server.api.app import App
from tidelog.server.config import RELOADED, ServerConfig, check
from tidelog.server.http.limits import Limits
from tidelog.server.http.listener import Listener, listen
from tidelog.server.service import Service
from tidelog.version import __version__

_log = logging.getLogger("tidelog.server")
_OVER_BYTES = 64 << 20  # a body that is too large by no more costs its peer the answer 413, and not the connection
_NO_LIMIT = 1 << 62
_SWITCH_S = 0.0005  # threads that sync must not wait for a busy loop to give way by itself


@dataclass(frozen=True, slots=True)
class Started:
    """A server that listens, and perhaps still recovers."""

    service: Service
    listener: Listener
    ready: asyncio.Task[None]


def run(
    config: ServerConfig,
    *,
    clock: Clock,
    disk: Disk,
    say: Callable[[str], None],
    again: Callable[[], ServerConfig] | None = None,
) -> None:
    """Serve until a signal says to stop. Raises what keeps it from starting. `again` reads the settings once more, on
    SIGHUP; None: SIGHUP changes nothing. It never ends the process."""
    check(config)
    sys.setswitchinterval(_SWITCH_S)
    with asyncio.Runner(loop_factory=_loop()) as runner:
        runner.run(_run(config, clock, disk, say, again))


def _loop() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        from uvloop import new_event_loop
    except ImportError:  # another platform: slower and the same otherwise
        return asyncio.new_event_loop
    return new_event_loop


async def _run(
    config: ServerConfig,
    clock: Clock,
    disk: Disk,
    say: Callable[[str], None],
    again: Callable[[], ServerConfig] | None,
) -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    started = await start(config, clock=clock, disk=disk, say=say)
    loop.add_signal_handler(signal.SIGHUP, _reload, started.service, again)
    stop = asyncio.ensure_future(asked.wait())
    try:
        await asyncio.wait((started.ready, stop), return_when=asyncio.FIRST_COMPLETED)
        if started.ready.done():
            started.ready.result()  # recovery that failed ends the process
            # What is there now stays: a search for garbage need not go through it each time, which takes 10 ms and more
            # with many topics. It is not searched first, for the same reason.
            gc.freeze()
        await stop
    finally:
        stop.cancel()
        await shut(started)
    say("stopped; everything acknowledged is on disk")


def _reload(service: Service, again: Callable[[], ServerConfig] | None) -> None:
    """Take over what may change while the server runs. Settings that do not read leave everything as it is."""
    if again is None:
        _log.warning("SIGHUP: there is no file of settings to read again, nothing has changed")
        return
    try:
        service.reload(again())
    except (OSError, Error) as error:
        _log.error("SIGHUP: the settings were not reloaded, the old ones stay: %s", error)
        return
    logging.getLogger("tidelog").setLevel(service.config.log_level.upper())
    _log.warning("SIGHUP: reloaded %s", ", ".join(RELOADED))


async def start(config: ServerConfig, *, clock: Clock, disk: Disk, say: Callable[[str], None]) -> Started:
    """Listen, and recover in the background."""
    loop = asyncio.get_running_loop()
    service = Service(config, clock, loop)
    listener = await listen(
        App(service),
        config.host,
        config.port,
        limits_of(config),
        now_us=clock.now_us,
        kernel=config.kernel,
        refusals=service.refusals,
    )
    host, port = listener.address
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if config.port_file:
            check_free(disk, config.data_dir)  # whoever reads the port file of another server is to find it there
            replace(disk, config.port_file, shown.encode())
    except (OSError, Error):
        await listener.close()
        service.close()
        raise
    who = "keys are required" if not service.keys.open else "NO AUTHENTICATION: anybody who reaches it may do anything"
    say(f"tidelog {__version__} listens on http://{shown}, data in {config.data_dir}; {who}")
    return Started(service, listener, loop.create_task(life.recover(service, disk, say)))


def limits_of(config: ServerConfig) -> Limits:
    """What a peer may cost, by the settings. Settings say 0 for no limit."""
    return Limits(
        discard_bytes_max=config.max_body_bytes + _OVER_BYTES,
        connections_max=config.max_connections or _NO_LIMIT,
        connection_streams_max=config.max_connection_streams,
        connection_header_bytes_max=config.max_connection_header_bytes or _NO_LIMIT,
        control_frames_max=config.max_control_frames,
        resets_max=config.max_resets,
        body_bytes_max=config.max_request_bytes,
        unsent_bytes_max=config.max_unsent_bytes,
        write_timeout_s=config.write_timeout_ms / 1000,
        turn_units=config.turn_units,
    )


async def shut(started: Started) -> None:
    """Stop as the contract says: streams are told, requests end, a last checkpoint."""
    service, listener = started.service, started.listener
    listener.stop_accepting()
    with suppress(Exception):
        await started.ready  # a recovery is not left half way, though it could be
    await life.part(service)
    await listener.drain(service.config.drain_ms / 1000)
    await listener.close()
    await life.close(service)
