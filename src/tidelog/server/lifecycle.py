"""Start and stop of a server: recovery, logging, signals, shutdown.

    bind ──► port file ──► recover (probes answer, the rest is 503) ──► serve ──► SIGTERM
    stop accepting ──► streams get their last frame ──► requests in flight end ──► checkpoint ──► exit

`recover`, `end_streams` and `close_service` serve any listener: between the last two the listener lets its requests
end, and their writes are in the last checkpoint. `run_server` is the server process. `AsgiApp` is the application for
another ASGI server, alone or mounted under a path of another application:

    lifespan startup, or `async with` ──► recover ──► requests ──► lifespan shutdown, or its end ──► checkpoint

Its requests before the start and after the stop get 503, also where the lifespan is never run. Keys are never logged:
handlers do not log headers.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TextIO

import msgspec

from tidelog.channels import ChannelLimits, ChannelManager
from tidelog.clock import Clock, SystemClock
from tidelog.database import Database, engine_of
from tidelog.database import open as open_database
from tidelog.disk.durability import replace_file
from tidelog.disk.interface import Disk
from tidelog.disk.posix import PosixDisk
from tidelog.engine import EngineConfig
from tidelog.engine.results import STARTUP_PASSES
from tidelog.engine.startup import check_not_locked
from tidelog.errors import BadInput, Closed, Error
from tidelog.http.asgi import AsgiAdapter, Receive, Scope, Send
from tidelog.http.interface import BodyPolicy, Exchange, Request, Response
from tidelog.http.limits import Limits
from tidelog.http.listener import Listener, listen
from tidelog.server.access_log import AccessLog
from tidelog.server.app import App
from tidelog.server.config import RELOADABLE_SETTINGS, LogFormat, LogLevel, ServerConfig, check_config
from tidelog.server.errors import ApiError, api_error_for_status
from tidelog.server.service import Service
from tidelog.version import __version__

_NO_CHANNEL_LIMIT = 1 << 31
_STREAM_DRAIN_MS = 3_000  # streams normally end well before that


def engine_config(config: ServerConfig) -> EngineConfig:
    return EngineConfig(
        wal_shards=config.wal_shards,
        segment_events_max=config.segment_max_events,
        segment_bytes_max=config.segment_max_bytes,
        segment_age_ms_max=config.segment_max_age_ms,
        rewrite_dead_percent=config.rewrite_dead_percent,
        rewrite_dead_bytes_min=config.rewrite_dead_bytes_min,
        rewrite_bytes_per_second=config.rewrite_bytes_per_second,
        topics_max=config.max_topics,
        routers_max=config.max_routers,
        total_bytes_max=config.max_total_bytes,
        queue_max=config.wal_queue_max,
        cold=config.cold_dir or None,
        hot_retain_segments=config.hot_retain_segments,
        hot_retain_bytes=config.hot_retain_bytes,
        cold_compression=config.cold_compression,
        cold_rate_bytes=config.cold_rate_bytes,
        cold_cache_bytes=config.cold_cache_bytes,
        cold_timeout_ms=config.cold_timeout_ms,
    )


def channel_limits(config: ServerConfig, *, auth: bool) -> ChannelLimits:
    """`auth`: users are authenticated, so that their memberships can be persisted."""
    defaults = ChannelLimits()
    return ChannelLimits(
        auth=auth,
        domain=config.channel_domain or None,
        channels_max=config.max_channels or _NO_CHANNEL_LIMIT,
        clients_max=config.max_channel_members or _NO_CHANNEL_LIMIT,
        channels_per_client_max=config.max_channels_per_user or _NO_CHANNEL_LIMIT,
        payload_bytes_max=min(config.max_channel_payload_bytes or defaults.segment_bytes, defaults.segment_bytes),
        persist_messages_max=config.channel_messages_max,
    )


async def recover(service: Service, disk: Disk, log_line: Callable[[str], None], url: str | None = None) -> None:
    """Open the engine and the channels, and make the service ready. `url`: where the server listens."""
    config, clock = service.config, service.clock
    started_ms = clock.monotonic_ms()

    def on_progress(name: str, done: int, total: int) -> None:
        """Give each pass an equal share, so that the progress never falls."""
        service.recovery_progress = min((STARTUP_PASSES.index(name) + done / total) / len(STARTUP_PASSES), 0.999)

    database = await service.run_blocking(
        lambda: open_database(
            config.data_dir,
            disk=disk,
            clock=clock,
            config=engine_config(config),
            accept_loss=config.accept_loss,
            progress=on_progress,
            channels=channel_limits(config, auth=service.channels.auth),
            hook=service.channels.hook,
        )
    )
    try:
        if url is not None:
            engine_of(database).announce_server(url)
        manager = await attach(service, database)
    except BaseException:
        await service.run_blocking(database.close)
        raise
    report = database.report
    took_s = (clock.monotonic_ms() - started_ms) / 1000
    log_line(f"ready in {took_s:.1f} s: {report.topics} topics, {report.frames} frames replayed from the WAL")
    for line in report.lines():
        log_line(f"  {line}")
    if manager.report.restored or manager.report.skipped:
        log_line(f"  {manager.report.restored} channels restored, {len(manager.report.skipped)} skipped")


async def attach(service: Service, database: Database) -> ChannelManager:
    """Serve an open database."""
    manager = await service.run_blocking(lambda: database.channels)
    service.on_recovered(database)
    service.channels.set_manager(manager)
    return manager


async def end_streams(service: Service) -> None:
    """End every stream and wait, and wait until the streams have ended."""
    service.stop()
    await service.wait_streams_closed(_STREAM_DRAIN_MS / 1000)


async def close_service(service: Service, *, keep_database: bool = False) -> None:
    """Write a last checkpoint and close the directory. `keep_database`: leave it open, for its other users."""
    await service.finish_tasks()
    if service.is_ready:
        service.writes.close()
        shards, database = service.engine.shards, service.database

        def detach() -> None:
            for shard in shards:
                shard.disable_async()

        await service.run_blocking(detach if keep_database else database.close)
    service.close()


_encode = msgspec.json.Encoder(enc_hook=str).encode
_TEXT_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def _log_fields(record: logging.LogRecord) -> Mapping[str, Any]:
    """Return the fields of a log record: `extra={"fields": {…}}`."""
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, Mapping) else {}


class TextFormatter(logging.Formatter):
    """One line, with its fields after the message, as JSON: text of a client cannot start a new line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        fields = [f" {name}={_encode(value).decode()}" for name, value in _log_fields(record).items()]
        return super().formatMessage(record) + "".join(fields)


class JsonLineFormatter(logging.Formatter):
    """One JSON object for each line."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "ts_ms": int(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= _log_fields(record)
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return _encode(fields).decode()


def configure_logging(log_format: LogFormat, output: TextIO, level: LogLevel = "info") -> logging.Logger:
    """Log to this stream; return the logger."""
    logger = logging.getLogger("tidelog")
    handler = logging.StreamHandler(output)
    handler.setFormatter(JsonLineFormatter() if log_format == "json" else TextFormatter(_TEXT_FORMAT))
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    return logger


_log = logging.getLogger("tidelog.server")
_DISCARD_MARGIN_BYTES = 64 << 20  # a body that is too large by less gets 413 and keeps its connection
_NO_HTTP_LIMIT = 1 << 62
_SWITCH_INTERVAL_S = 0.0005  # threads that sync must not wait long for a busy loop


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A listening server, perhaps in recovery."""

    service: Service
    listener: Listener
    recovery: asyncio.Task[None]


def run_server(
    config: ServerConfig,
    *,
    clock: Clock,
    disk: Disk,
    log_line: Callable[[str], None],
    reload_config: Callable[[], ServerConfig] | None = None,
    forward_hangups: Callable[[Callable[[], object] | None], None],
    access_output: TextIO,
) -> None:
    """Serve until SIGTERM or SIGINT. Raises where the server cannot start. `reload_config` reads the settings again, on
    SIGHUP; None: SIGHUP changes nothing. `forward_hangups` makes the handler of SIGHUP call a function; the handler is
    the caller's, because SIGHUP must not end the process before this call and after it either."""
    check_config(config)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve_until_signal(config, clock, disk, log_line, reload_config, forward_hangups, access_output))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        from uvloop import new_event_loop
    except ImportError:  # not on this platform: asyncio's loop is slower, otherwise equal
        return asyncio.new_event_loop
    return new_event_loop


async def _serve_until_signal(
    config: ServerConfig,
    clock: Clock,
    disk: Disk,
    log_line: Callable[[str], None],
    reload_config: Callable[[], ServerConfig] | None,
    forward_hangups: Callable[[Callable[[], object] | None], None],
    access_output: TextIO,
) -> None:
    stop_signal = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_signal.set)
    started = await start_server(config, clock=clock, disk=disk, log_line=log_line)
    if config.access_log != "off":
        started.service.access_log = AccessLog(config.access_log, access_output, clock.now_us)
    forward_hangups(partial(loop.call_soon_threadsafe, _reload_settings, started.service, reload_config))
    stop = asyncio.ensure_future(stop_signal.wait())
    try:
        await asyncio.wait((started.recovery, stop), return_when=asyncio.FIRST_COMPLETED)
        if started.recovery.done():
            started.recovery.result()  # recovery that failed ends the process
            # The objects of recovery stay: the garbage collector need not visit them each time, which takes 10 ms and
            # more with many topics. They are not collected first, for the same reason.
            gc.freeze()
        await stop
    finally:
        forward_hangups(None)
        stop.cancel()
        await shutdown(started)
    log_line("stopped; everything acknowledged is on disk")


def _reload_settings(service: Service, reload_config: Callable[[], ServerConfig] | None) -> None:
    """Apply the reloadable settings. Settings that do not parse change nothing."""
    if reload_config is None:
        _log.warning("SIGHUP: there is no file of settings to read again, nothing has changed")
        return
    try:
        service.reload(reload_config())
    except (OSError, Error) as error:
        reason = str(error).replace("; the server was not started", "")  # it runs, with the old settings
        _log.error("SIGHUP: the settings were not reloaded, the old ones stay: %s", reason)
        return
    logging.getLogger("tidelog").setLevel(service.config.log_level.upper())
    _log.warning("SIGHUP: reloaded %s", ", ".join(RELOADABLE_SETTINGS))


async def start_server(
    config: ServerConfig, *, clock: Clock, disk: Disk, log_line: Callable[[str], None]
) -> RunningServer:
    """Listen, and recover in the background: clients that wait for readiness see the progress."""
    loop = asyncio.get_running_loop()
    service = Service(config, clock, loop)
    listener = await listen(
        App(service),
        config.host,
        config.port,
        http_limits(config),
        now_us=clock.now_us,
        limit_counters=service.limit_counters,
    )
    host, port = listener.address
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if config.port_file:
            check_not_locked(disk, config.data_dir)  # the port file of a running server must not be replaced
            replace_file(disk, config.port_file, address.encode())
    except (OSError, Error):
        await listener.close()
        service.close()
        raise
    access = "NO AUTHENTICATION: every client has full access" if service.auth.keys.is_empty else "keys are required"
    log_line(f"tidelog {__version__} listens on http://{address}, data in {config.data_dir}; {access}")
    url = f"http://{_local_authority(host, port)}"
    return RunningServer(service, listener, loop.create_task(recover(service, disk, log_line, url)))


def _local_authority(host: str, port: int) -> str:
    """Return `host:port` as programs of this machine reach it: a wildcard address is reached at loopback."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def http_limits(config: ServerConfig) -> Limits:
    """Return the limits of the HTTP layer. 0 in the settings means no limit."""
    return Limits(
        discard_bytes_max=config.max_body_bytes + _DISCARD_MARGIN_BYTES,
        connections_max=config.max_connections or _NO_HTTP_LIMIT,
        connection_streams_max=config.max_connection_streams,
        connection_header_bytes_max=config.max_connection_header_bytes or _NO_HTTP_LIMIT,
        control_frames_max=config.max_control_frames,
        resets_max=config.max_resets,
        body_bytes_max=config.max_request_bytes,
        unsent_bytes_max=config.max_unsent_bytes,
        write_timeout_s=config.write_timeout_ms / 1000,
        turn_units=config.turn_units,
    )


async def shutdown(started: RunningServer) -> None:
    """Stop as the contract says: end streams, finish requests, write a last checkpoint."""
    service, listener = started.service, started.listener
    listener.stop_accepting()
    with suppress(Exception):
        await started.recovery  # recovery is not interrupted
    await end_streams(service)
    await listener.drain(service.config.drain_ms / 1000)
    await listener.close()
    await close_service(service)


def asgi(
    config: ServerConfig | None = None,
    *,
    log: Database | None = None,
    clock: Clock | None = None,
    disk: Disk | None = None,
) -> AsgiApp:
    """Create an ASGI application over the topics of a directory. Nothing is opened before it starts.

    Args:
        config: settings; those of the listener (host, port, sockets) belong to the ASGI server.
        log: an open database to serve, in place of the directory of the settings. Settings of the engine (limits,
            segments, WAL) are those that it was opened with. The application neither closes it nor outlives it.
    """
    return AsgiApp(config or ServerConfig(), clock or SystemClock(), disk or PosixDisk(), log)


class AsgiApp:
    """Started and stopped by its server's lifespan, or by `async with` where a framework does not forward that."""

    def __init__(self, config: ServerConfig, clock: Clock, disk: Disk, log: Database | None = None) -> None:
        if log is not None:
            _check_can_serve(config, log)
        if config.access_log != "off":
            raise BadInput("access_log is of `tidelog serve`; nothing was done, use the access log of the ASGI server")
        self._config, self._clock, self._disk, self._log = config, clock, disk, log
        self._not_started = AsgiAdapter(_NotStartedApp(), startup=self._start, shutdown=self._stop)
        self._asgi = self._not_started
        self._service: Service | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._not_started if scope["type"] == "lifespan" else self._asgi)(scope, receive, send)

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    @property
    def database(self) -> Database:
        """The database that is served, for the code around the application: one engine has both. Its calls may wait for
        the disk; call them in a thread, as a framework does with functions that are not `async`."""
        if self._log is not None:
            return self._log
        if self._service is None:
            raise Closed(
                "the application was not started, or was stopped, and has no database; nothing was done, use it while "
                "the lifespan runs, or pass an open one: asgi(log=database)"
            )
        return self._service.database

    async def _start(self) -> None:
        if self._service is not None:
            raise BadInput("the application is running; nothing was done, start it once")
        loop = asyncio.get_running_loop()
        service, log = Service(self._config, self._clock, loop), self._log
        ready: asyncio.Task[object] = loop.create_task(
            recover(service, self._disk, _log.info) if log is None else attach(service, log)
        )
        try:
            await asyncio.shield(ready)
        except BaseException:
            with suppress(Exception):
                await ready  # recovery is not abandoned: its engine would stay open
            await close_service(service, keep_database=log is not None)
            raise
        self._service, self._asgi = service, AsgiAdapter(App(service))

    async def _stop(self) -> None:
        """Close the directory, unless it was opened elsewhere. The server has ended or abandoned its requests."""
        service = self._service
        if service is not None:
            self._service, self._asgi = None, self._not_started
            await end_streams(service)
            await close_service(service, keep_database=self._log is not None)


def _check_can_serve(config: ServerConfig, log: Database) -> None:
    """Raise BadInput for a database that an application cannot serve."""
    engine = engine_of(log)
    if config.data_dir not in (ServerConfig().data_dir, engine.context.root):
        raise BadInput(
            f"data_dir is {config.data_dir!r} and log is open at {engine.context.root!r}; nothing was done, leave "
            "data_dir out"
        )
    if not engine.shards:
        raise BadInput("log was opened read_only, and a server writes; nothing was done, open it for writing")
    if config.commit == "beside" and not all(shard.has_writer_thread for shard in engine.shards):
        raise BadInput("log was opened with threads=False; nothing was done, open it with threads")


class _NotStartedApp:
    """The application before the start and after the stop."""

    def begin(self, request: Request) -> Response | BodyPolicy:  # noqa: ARG002 - the same for every request
        return ApiError(
            "not_ready",
            "the application was not started, or was stopped; nothing was done, have the server run its lifespan",
        ).response()

    def handle(self, request: Request, exchange: Exchange) -> None:  # noqa: ARG002
        raise AssertionError("`begin` has rejected it")

    def malformed(self, request: Request, status: int, reason: str) -> Response:  # noqa: ARG002
        return api_error_for_status(status, f"{reason}; nothing was done").response()

    def fast_handler(self, request: Request, answer_bytes_max: int) -> None:
        """Return None: `begin` rejects every request."""

    def on_abandoned(self, request: Request) -> None:
        """Nothing was acquired."""
