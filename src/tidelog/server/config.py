"""Settings of a server process. The command line overrides the file, which overrides the environment.

A setting that does not parse keeps the server from starting: a default in its place could open access or lift a limit.
Sizes and times have units: `64MiB`, `64m` and `67108864` are the same size, `30s` and `30000` the same time.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from ipaddress import ip_address
from itertools import pairwise
from textwrap import wrap
from typing import Any, Literal, get_args

from tidelog.decompression import FREE_BYTES_DEFAULT, RATIO_DEFAULT, ExpansionLimit
from tidelog.disk.posix import FILE_MODE_SETTING
from tidelog.engine.config import ColdCompression
from tidelog.errors import BadInput
from tidelog.native import SETTING as NATIVE_SETTING

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
CommitMode = Literal["beside", "loop"]
AccessLogFormat = Literal["off", "json", "combined"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    data_dir: str = "tidelog-data"
    """The directory of topics. One process writes to it."""

    host: str = "127.0.0.1"
    """The address to listen on. Anything but loopback needs keys."""

    port: int = 4000
    """0: any free port; see `port_file`."""

    port_file: str | None = None
    """A file that gets `host:port` after the bind, written atomically."""

    api_keys: str = field(default="", repr=False)
    """`[user@domain=]secret[:scopes[:prefixes]]`, comma-separated. Empty: no authentication."""

    keys_file: str | None = None
    """A file with more keys, one on each line, as in `api_keys`; `#` begins a comment. SIGHUP reads it again."""

    allow_insecure_no_auth: bool = False
    """Allow a public address without keys."""

    allowed_hosts: str = ""
    """Host names that the server answers for, comma-separated, each with or without a port; `*`: all. Empty: any with
    keys; without keys, loopback names and the address it listens on."""

    allowed_origins: str = ""
    """Origins (`https://host[:port]`) whose pages may use the server besides its own, comma-separated; `*`: all."""

    cors_origins: str = ""
    """Origins whose pages may also read responses (CORS), comma-separated; `*`: all, on a server with keys."""

    token_secret: str = field(default="", repr=False)
    """Signs the read tokens of browsers, at least 32 characters: tokens survive a restart then. Empty: a random one."""

    probe_auth: bool = False
    """Require a key for health and readiness too."""

    strict: bool = False
    """Refuse fields and values of requests that have no effect, instead of ignoring them with a warning."""

    max_body_bytes: int = 64 << 20
    """A larger request body is answered with 413; so is a compressed one that decodes to more, and a batch of an Arrow
    stream."""

    max_expansion: int = RATIO_DEFAULT
    """A streamed compressed body may decode to `max_body_bytes` and to this multiple of its size; 0: no limit, as with
    every limit below."""

    max_topics: int = 100_000
    """Topics."""

    max_routers: int = 10_000
    """Routers."""

    max_watch_sessions: int = 10_000
    """Watch sessions."""

    max_watch_sessions_per_key: int = 1_000
    """Watch sessions of one key."""

    max_sse_connections: int = 10_000
    """Open streams and sockets."""

    max_sse_connections_per_key: int = 1_000
    """Open streams and sockets of one key."""

    max_inflight_per_key: int = 1_000
    """Requests in flight of one key."""

    max_connections: int = 20_000
    """Open connections; a further one is answered with 503 and closed."""

    max_connection_streams: int = 256
    """Streamed responses (events and bulk reads) on one HTTP/2 connection."""

    max_connection_header_bytes: int = 1 << 20
    """Bytes of request heads that one HTTP/2 connection has open."""

    max_control_frames: int = 4_096
    """Burst of frames without a request or a payload from one connection; a sixteenth of it is refilled a second."""

    max_resets: int = 1_024
    """Burst of stream resets from one HTTP/2 connection; a sixteenth of it is refilled a second."""

    max_unsent_bytes: int = 512 << 20
    """Bytes of responses that clients have not read, of all connections together."""

    max_request_bytes: int = 512 << 20
    """Bytes of request bodies kept until their response, of all connections together."""

    max_decoded_bytes: int = 128 << 20
    """Decoded bytes of Arrow messages of streamed writes at one time; further messages wait."""

    write_timeout_ms: int = 30_000
    """A stream is reset, or a connection closed, when the client reads no byte of its response for this long."""

    turn_units: int = 256
    """Input of one connection that is handled before other connections get a turn: a frame is 1, a request 4."""

    max_total_bytes: int = 0
    """Live bytes of all topics."""

    max_channels: int = 5_000
    """Channels. Restored ones are kept beyond it."""

    max_channel_members: int = 100
    """Default and ceiling of a channel's `max_clients`."""

    max_channels_per_user: int = 100
    """Channels that one user may join."""

    max_channel_payload_bytes: int = 64 << 10
    """Default and ceiling of a channel's `max_payload_size`."""

    channel_messages_max: int = 1_000
    """Default and ceiling of a channel's `max_persist_messages`; 0: no channel persists."""

    channel_domain: str | None = None
    """Channels of other domains are rejected; None accepts all."""

    channel_grace_ms: int = 15_000
    """Delay after which a user without a connection leaves the channels that do not persist."""

    hook: str | None = None
    """`module:function`: authenticates users of channels, and accepts, replaces or rejects their messages."""

    backup_targets: str = field(default="", repr=False)
    """Directories and addresses that backups over HTTP may be written to, or below, comma-separated. Empty: none."""

    wal_shards: int | None = None
    """WAL shards, written in parallel; None: by the number of processors."""

    wal_queue_max: int = 4_096
    """Writes that may wait in the queue of one WAL shard; as many again are queued before it, further ones are
    rejected."""

    segment_max_events: int = 10_000
    """Seal a segment at this many records."""

    segment_max_bytes: int = 64 << 20
    """Seal a segment at this many bytes."""

    segment_max_age_ms: int = 3_600_000
    """Seal a segment at this age; 0: never by age."""

    rewrite_dead_percent: int = 50
    """Rewrite a sealed segment once this share of its data belongs to deleted records; 0: only on request."""

    rewrite_dead_bytes_min: int = 256 << 10
    """Rewrite a sealed segment only if that frees at least this much."""

    rewrite_bytes_per_second: int = 32 << 20
    """How fast segments are rewritten; 0: without a limit."""

    cold_dir: str = field(default="", repr=False)
    """The cold store: a directory, or an address such as s3://bucket/prefix. Old segments move there. Empty: none."""

    hot_retain_segments: int = 4
    """How many of the newest sealed segments of a topic stay on the disk."""

    hot_retain_bytes: int = 0
    """How many bytes of them stay on the disk, at most; 0: no limit. The stricter of the two decides."""

    cold_compression: ColdCompression = "none"
    """How segments are stored in the cold store: none or zstd."""

    cold_rate_bytes: int = 64 << 20
    """How many bytes a second are copied to the cold store; 0: no limit."""

    cold_cache_bytes: int = 64 << 20
    """Memory for blocks that were read from the cold store."""

    cold_timeout_ms: int = 30_000
    """How long a request waits for the cold store."""

    commit: CommitMode = "beside"
    """Where fsyncs run: beside the event loop in threads of their own, or on it, where every request waits for them."""

    drain_ms: int = 10_000
    """How long a stop waits for requests in flight."""

    log_format: LogFormat = "text"
    """Log lines as text or as JSON."""

    log_level: LogLevel = "info"
    """The lowest level that is logged."""

    access_log: AccessLogFormat = "off"
    """A line on standard output for each request, as JSON or in the combined format. Small requests cost more then."""

    accept_loss: bool = False
    """Start even if acknowledged records were lost to damage."""

    test_min_heartbeat_ms: int | None = None
    """For tests: the lowest heartbeat interval of streams, 1 to 1000."""

    @property
    def decoding_allowance(self) -> ExpansionLimit:
        """How far a compressed body may expand."""
        return ExpansionLimit(self.max_body_bytes or FREE_BYTES_DEFAULT, self.max_expansion)

    @property
    def heartbeat_ms_min(self) -> int:
        minimum = self.test_min_heartbeat_ms
        return 1_000 if minimum is None else min(max(minimum, 1), 1_000)


_PROBES_OF_TESTS = "test_"
_COMMENT_CHARS = 100


def setting_texts() -> dict[str, str]:
    """Return what each setting means: the text below its field, in one line."""
    (definition,) = ast.parse(inspect.getsource(ServerConfig)).body
    assert isinstance(definition, ast.ClassDef), "the source of a class"
    texts = {}
    for statement, below in pairwise(definition.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            assert isinstance(below, ast.Expr), "every setting is explained"
            assert isinstance(below.value, ast.Constant), "by a text"
            texts[statement.target.id] = " ".join(str(below.value.value).split())
    return texts


def config_template(values: Mapping[str, object]) -> str:
    """Return a configuration file that sets these values and has every other setting with its default, as comments."""
    lines = [
        "# Settings of tidelog serve, for --config. A line that begins with # has no effect.",
        '# Sizes and times may have units: "64MiB", "30s". The environment has the same settings (TIDELOG_PORT), which',
        "# this file overrides; the command line overrides both.",
    ]
    texts, plain = setting_texts(), ServerConfig()
    for name in _SETTING_TYPES:
        if name.startswith(_PROBES_OF_TESTS):
            continue
        lines += ["", *(f"# {line}" for line in wrap(texts[name], _COMMENT_CHARS))]
        value = values.get(name, getattr(plain, name))
        shown = str(value).lower() if isinstance(value, bool) else json.dumps("" if value is None else value)
        lines.append(f"{'' if name in values else '# '}{name} = {shown}")
    return "\n".join(lines) + "\n"


_SETTING_TYPES: dict[str, str] = {setting.name: str(setting.type) for setting in fields(ServerConfig)}
_SETTING_CHOICES: dict[str, tuple[str, ...]] = {
    "LogFormat": get_args(LogFormat),
    "LogLevel": get_args(LogLevel),
    "CommitMode": get_args(CommitMode),
    "AccessLogFormat": get_args(AccessLogFormat),
    "ColdCompression": get_args(ColdCompression),
}
_SIZE_UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{f"{letter}{suffix}": 1 << 10 * power for power, letter in enumerate("kmgt", 1) for suffix in ("", "ib")},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
_TIME_UNITS_MS: dict[str, int] = {"": 1, "ms": 1, "s": 1000, "min": 60_000, "m": 60_000, "h": 3_600_000}
_NUMBER = re.compile(r"(\d{1,18})\s*([A-Za-z]*)", re.ASCII)
_ENV_PREFIX = "TIDELOG_"
_TURN_UNITS_MIN = 4  # one request
_TOKEN_SECRET_CHARS_MIN = 32
RELOADABLE_SETTINGS = ("api_keys", "allowed_hosts", "allowed_origins", "cors_origins", "log_level")
"""Settings that take effect on SIGHUP; the others need a restart."""


def config_from_env(base: ServerConfig, environ: Mapping[str, str]) -> ServerConfig:
    """Return `base` with the settings of the environment."""
    values: dict[str, Any] = {}
    for name in _SETTING_TYPES:
        text = environ.get(_ENV_PREFIX + name.upper())
        if text is not None:
            values |= _parse_setting(name, text, _ENV_PREFIX + name.upper())
    return _split_host_port(replace(base, **values))


CLIENT_SETTINGS = ("TIDELOG_SERVER", "TIDELOG_KEY")
"""Variables that commands read and a server does not."""


def unknown_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that look like settings and are none, each with the nearest that is."""
    known = [FILE_MODE_SETTING, NATIVE_SETTING, *(_ENV_PREFIX + name.upper() for name in _SETTING_TYPES)]
    unknown = (name for name in environ if name.startswith(_ENV_PREFIX) and name not in (*known, *CLIENT_SETTINGS))
    return {name: _nearest(name, known) for name in sorted(unknown)}


def _nearest(name: str, known: list[str]) -> str:
    return get_close_matches(name[:80], known, n=1, cutoff=0.0)[0]


def config_from_file(base: ServerConfig, content: Mapping[str, object], where: str) -> ServerConfig:
    """Return `base` with the settings of a TOML file. Raises BadInput for an unknown name: a typing error must not open
    access."""
    values: dict[str, Any] = {}
    for name, value in content.items():
        if name not in _SETTING_TYPES:
            near = _nearest(name, list(_SETTING_TYPES))
            raise BadInput(
                f"{where} sets {name!r}, which is no setting; the nearest is {near}; the server was not started"
            )
        if isinstance(value, bool) or not isinstance(value, str):
            value = str(value).lower() if isinstance(value, bool) else str(value)
        values |= _parse_setting(name, value, f"{name} in {where}")
    return _split_host_port(replace(base, **values))


def _parse_setting(name: str, text: str, shown: str) -> dict[str, Any]:
    """Return the value of a setting; nothing where an empty text leaves a number as it is. `shown`: its name in
    errors."""
    kind = _SETTING_TYPES[name]
    text = text.strip() if name != "api_keys" else text
    if kind.startswith("bool"):
        if text.lower() not in ("1", "true", "0", "false", ""):
            raise BadInput(f"{shown} is {text!r}, it must be 1 or 0; the server was not started")
        return {name: text.lower() in ("1", "true")}
    if kind.startswith("int"):
        return {name: _parse_number(name, text, shown)} if text else {}
    choices = _SETTING_CHOICES.get(kind)
    if choices and text not in choices:
        raise BadInput(f"{shown} is {text!r}, it must be one of {', '.join(choices)}; the server was not started")
    return {name: text}


def _parse_number(name: str, text: str, shown: str) -> int:
    """Parse a number: a size, a time or a count, by the name of its setting."""
    units, form = {"": 1}, "a whole number"
    if name.endswith("_ms"):
        units, form = _TIME_UNITS_MS, "milliseconds, or a time such as 500ms, 30s, 10min or 1h"
    elif "bytes" in name:
        units, form = _SIZE_UNITS, "bytes, or a size such as 64m, 64MiB or 64MB (64,000,000)"
    match = _NUMBER.fullmatch(text)
    unit = None if match is None else units.get(match[2].lower())
    if match is None or unit is None:
        raise BadInput(f"{shown} is {text!r}, it must be {form}; the server was not started")
    return int(match[1]) * unit


def keys_from_file(text: str, where: str) -> str:
    """Return the keys of a file as `api_keys` has them: an entry on each line, comments and blank lines left out."""
    entries = [entry for line in text.splitlines() if (entry := line.strip()) and not entry.startswith("#")]
    if bad := next((at for at, entry in enumerate(entries, 1) if "," in entry), 0):
        raise BadInput(f"key {bad} of {where} has a comma: write one key on each line; the server was not started")
    return ",".join(entries)


def _split_host_port(config: ServerConfig) -> ServerConfig:
    """Split a host with a port, unless it is an IPv6 address."""
    host, separator, port = config.host.rpartition(":")
    if not separator or (config.host.count(":") > 1 and not config.host.startswith("[")):
        return config
    if not port.isdecimal():
        return config
    return replace(config, host=host.strip("[]"), port=int(port))


def check_config(config: ServerConfig) -> None:
    """Raise BadInput for settings that are invalid or unsafe."""
    if not 0 <= config.port <= 65_535:
        raise BadInput(f"port is {config.port}, it must be from 0 to 65535; the server was not started")
    if 0 < len(config.token_secret) < _TOKEN_SECRET_CHARS_MIN:
        raise BadInput(
            f"token_secret has {len(config.token_secret)} characters, it must have at least {_TOKEN_SECRET_CHARS_MIN}, "
            "or it could be guessed from a token; the server was not started"
        )
    if config.turn_units < _TURN_UNITS_MIN or config.write_timeout_ms < 1:
        raise BadInput(
            f"turn_units is {config.turn_units} and must be at least {_TURN_UNITS_MIN}; write_timeout_ms is "
            f"{config.write_timeout_ms} and must be at least 1; the server was not started"
        )
    if config.api_keys.strip() or config.allow_insecure_no_auth or is_loopback(config.host):
        return
    raise BadInput(
        f"{config.host} is not a loopback address and there are no keys: every client has full access; "
        "the server was not started, set TIDELOG_API_KEYS, or TIDELOG_ALLOW_INSECURE_NO_AUTH=1 if that is meant"
    )


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
