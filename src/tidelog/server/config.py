"""Settings of a server process, from the environment, a file and the command line, in that order of weight.

A cap that does not parse falls back to its default, as the contract says; a key or a bind address that does not
is refused at the start: guessing there would open a door.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from ipaddress import ip_address
from typing import Any, Literal, get_args

from tidelog.decompression import FREE_BYTES_DEFAULT, RATIO_DEFAULT, ExpansionLimit
from tidelog.disk.posix import FILE_MODE_SETTING
from tidelog.errors import BadInput

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
CommitMode = Literal["beside", "loop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    data_dir: str = "tidelog-data"
    """The directory of topics. One process writes it."""

    host: str = "127.0.0.1"
    """Where to listen. Anything but loopback needs keys."""

    port: int = 4000
    """0: any free port; see `port_file`."""

    port_file: str | None = None
    """After the bind `host:port` is written here, whole or not at all."""

    api_keys: str = field(default="", repr=False)
    """`[user@domain=]secret[:scopes[:prefixes]]`, comma-separated. Empty: no authentication."""

    allow_insecure_no_auth: bool = False
    """Listen on a public address without keys all the same."""

    allowed_hosts: str = ""
    """Names that the server answers for, comma-separated, each with a port or without; `*`: all. Empty: any where there
    are keys; without, loopback names and the address it listens on."""

    allowed_origins: str = ""
    """Origins (`https://host[:port]`) whose pages may use the server beside its own, comma-separated; `*`: all."""

    probe_auth: bool = False
    """Ask for a key on health and readiness too."""

    max_body_bytes: int = 64 << 20
    """A larger request body is answered with 413; so is a compressed one that decodes to more, and a batch of an Arrow
    stream."""

    max_expansion: int = RATIO_DEFAULT
    """A compressed body that comes in pieces may decode to `max_body_bytes` and to so many times what came; 0: no
    limit, as with every cap below."""

    max_topics: int = 100_000
    """Topics at once."""

    max_routers: int = 10_000
    """Routers at once."""

    max_watch_sessions: int = 10_000
    """Watch sessions at once."""

    max_watch_sessions_per_key: int = 1_000
    """Watch sessions of one key at once."""

    max_sse_connections: int = 10_000
    """Streams and sockets at once."""

    max_sse_connections_per_key: int = 1_000
    """Streams and sockets of one key at once."""

    max_inflight_per_key: int = 1_000
    """Requests of one key that wait for their answer."""

    max_connections: int = 20_000
    """Connections at once; past it a connection is answered with 503 and closed."""

    max_connection_streams: int = 256
    """Streamed answers (events and bulk reads) at once on one HTTP/2 connection."""

    max_connection_header_bytes: int = 1 << 20
    """Heads of the requests that one HTTP/2 connection has open."""

    max_control_frames: int = 4_096
    """Frames without a request or a payload that a connection may send in a burst; a sixteenth is forgiven a second."""

    max_resets: int = 1_024
    """Streams that an HTTP/2 connection may reset in a burst; a sixteenth is forgiven a second."""

    max_unsent_bytes: int = 512 << 20
    """Bytes of answers that peers have not read, of all connections together."""

    max_request_bytes: int = 512 << 20
    """Bytes of request bodies that are kept until they are answered, of all connections together."""

    max_decoded_bytes: int = 128 << 20
    """Bytes that Arrow messages of streamed writes are decoded to at the same time; further messages wait."""

    write_timeout_ms: int = 30_000
    """Without a byte of its answer read by a peer, before its stream is reset or its connection is closed."""

    turn_units: int = 256
    """Input of one connection that is handled before others get their turn: a frame is 1, a request 4."""

    max_total_bytes: int = 0
    """Live bytes of all topics."""

    max_channels: int = 5_000
    """Channels at once. Restored ones are kept whatever it says."""

    max_channel_members: int = 100
    """Default and ceiling of a channel's `max_clients`."""

    max_channels_per_user: int = 100
    """Channels that one user may join."""

    max_channel_payload_bytes: int = 64 << 10
    """Default and ceiling of a channel's `max_payload_size`."""

    channel_messages_max: int = 1_000
    """Default and ceiling of a channel's `max_persist_messages`; 0: no channel persists."""

    channel_domain: str | None = None
    """Channels of other domains are refused; None takes them all."""

    channel_grace_ms: int = 15_000
    """After the last connection of a user ended: when it leaves the channels that do not persist."""

    hook: str | None = None
    """`module:function`: says who users of channels are, and accepts, replaces or refuses what they publish."""

    wal_shards: int | None = None
    """WAL files written side by side; None: by processors."""

    wal_queue_max: int = 4_096
    """Writes that may wait for one WAL file; as many again wait in line for it, and what comes then is refused."""

    segment_max_events: int = 10_000
    """Seal a segment at this many records."""

    segment_max_bytes: int = 64 << 20
    """Seal a segment at this many bytes."""

    segment_max_age_ms: int = 3_600_000
    """Seal a segment at this age; 0: never by age."""

    commit: CommitMode = "beside"
    """Where syncs run: beside the event loop, in threads of their own, or on it, where everybody waits for them."""

    kernel: bool = True
    """Put pages together with compiled code, where it was built. 0: in Python, which gives the same bytes."""

    drain_ms: int = 10_000
    """How long a stop waits for requests that are under way."""

    log_format: LogFormat = "text"
    """Lines for people or for machines."""

    log_level: LogLevel = "info"
    """The least that is logged."""

    accept_loss: bool = False
    """Start although acknowledged records were lost to damage."""

    test_min_heartbeat_ms: int | None = None
    """For tests: a lower floor for heartbeats of streams, 1 to 1000."""

    @property
    def decoding_allowance(self) -> ExpansionLimit:
        """What a compressed body may become."""
        return ExpansionLimit(self.max_body_bytes or FREE_BYTES_DEFAULT, self.max_expansion)

    @property
    def heartbeat_ms_min(self) -> int:
        wanted = self.test_min_heartbeat_ms
        return 1_000 if wanted is None else min(max(wanted, 1), 1_000)


_LENIENT_SETTINGS = frozenset(
    [
        "max_body_bytes",
        "max_expansion",
        "max_topics",
        "max_routers",
        "max_watch_sessions",
        "max_watch_sessions_per_key",
        "max_sse_connections",
        "max_sse_connections_per_key",
        "max_inflight_per_key",
        "max_connections",
        "max_connection_streams",
        "max_connection_header_bytes",
        "max_control_frames",
        "max_resets",
        "max_unsent_bytes",
        "max_request_bytes",
        "max_decoded_bytes",
        "max_total_bytes",
        "max_channels",
        "max_channel_members",
        "max_channels_per_user",
        "max_channel_payload_bytes",
    ]
)
_SETTING_TYPES: dict[str, str] = {known.name: str(known.type) for known in fields(ServerConfig)}
_SETTING_CHOICES: dict[str, tuple[str, ...]] = {
    "LogFormat": get_args(LogFormat),
    "LogLevel": get_args(LogLevel),
    "CommitMode": get_args(CommitMode),
}
_ENV_PREFIX = "TIDELOG_"
_TURN_UNITS_MIN = 4  # one request
RELOADABLE_SETTINGS = ("api_keys", "allowed_hosts", "allowed_origins", "log_level")
"""Settings that take effect on SIGHUP; the others need a restart."""


def config_from_env(base: ServerConfig, environ: Mapping[str, str]) -> ServerConfig:
    """The settings that the environment names, over `base`."""
    found: dict[str, Any] = {}
    for name in _SETTING_TYPES:
        text = environ.get(_ENV_PREFIX + name.upper())
        if text is not None:
            found |= _parse_setting(name, text, lenient=name in _LENIENT_SETTINGS)
    return _split_host_port(replace(base, **found))


def unknown_settings(environ: Mapping[str, str]) -> list[str]:
    """Names in the environment that look like settings and are none."""
    known = {FILE_MODE_SETTING, *(_ENV_PREFIX + name.upper() for name in _SETTING_TYPES)}
    return sorted(name for name in environ if name.startswith(_ENV_PREFIX) and name not in known)


def config_from_file(base: ServerConfig, content: Mapping[str, object], where: str) -> ServerConfig:
    """The settings of a TOML file, over `base`. Unknown names are refused: a typing error must not open a door."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        if name not in _SETTING_TYPES:
            raise BadInput(f"{where} sets {name!r}, which is no setting; the server was not started")
        if isinstance(value, bool) or not isinstance(value, str):
            value = str(value).lower() if isinstance(value, bool) else str(value)
        found |= _parse_setting(name, value, lenient=False)
    return _split_host_port(replace(base, **found))


def _parse_setting(name: str, text: str, *, lenient: bool) -> dict[str, Any]:
    kind = _SETTING_TYPES[name]
    text = text.strip() if name != "api_keys" else text
    if kind.startswith("bool"):
        if text.lower() not in ("1", "true", "0", "false", ""):
            raise BadInput(f"{name} is {text!r}, it must be 1 or 0; the server was not started")
        return {name: text.lower() in ("1", "true")}
    if kind.startswith("int"):
        if text.isdecimal():
            return {name: int(text)}
        if lenient or (not text and "None" in kind):
            return {}
        raise BadInput(f"{name} is {text!r}, it must be a whole number; the server was not started")
    choices = _SETTING_CHOICES.get(kind)
    if choices and text not in choices:
        raise BadInput(f"{name} is {text!r}, it must be one of {', '.join(choices)}; the server was not started")
    return {name: text}


def _split_host_port(config: ServerConfig) -> ServerConfig:
    """A host with a colon is a whole address, unless it is an IPv6 one."""
    host, separator, port = config.host.rpartition(":")
    if not separator or (config.host.count(":") > 1 and not config.host.startswith("[")):
        return config
    if not port.isdecimal():
        return config
    return replace(config, host=host.strip("[]"), port=int(port))


def check_config(config: ServerConfig) -> None:
    """Refuse what would be unsafe to start."""
    if not 0 <= config.port <= 65_535:
        raise BadInput(f"port is {config.port}, it must be from 0 to 65535; the server was not started")
    if config.turn_units < _TURN_UNITS_MIN or config.write_timeout_ms < 1:
        raise BadInput(
            f"turn_units is {config.turn_units} and must be at least {_TURN_UNITS_MIN}; write_timeout_ms is "
            f"{config.write_timeout_ms} and must be at least 1; the server was not started"
        )
    if config.api_keys.strip() or config.allow_insecure_no_auth or _is_loopback(config.host):
        return
    raise BadInput(
        f"{config.host} is not a loopback address and there are no keys: anybody could read and delete everything; "
        "the server was not started, set TIDELOG_API_KEYS, or TIDELOG_ALLOW_INSECURE_NO_AUTH=1 if that is meant"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
