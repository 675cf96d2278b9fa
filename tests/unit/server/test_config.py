"""Settings: precedence, rejected values, and that a typing error does not open access."""

from __future__ import annotations

import pytest

from tidelog.errors import BadInput
from tidelog.server.config import (
    ServerConfig,
    check_config,
    config_from_env,
    config_from_file,
    keys_from_file,
    unknown_settings,
)

BASE = ServerConfig()


def test_settings_are_read_from_the_environment() -> None:
    config = config_from_env(
        BASE,
        {
            "TIDELOG_PORT": "0",
            "TIDELOG_DATA_DIR": "d",
            "TIDELOG_PROBE_AUTH": "true",
            "TIDELOG_MAX_TOPICS": "7",
            "TIDELOG_WAL_SHARDS": "3",
            "TIDELOG_LOG_FORMAT": "json",
            "HOST": "0.0.0.0",
        },
    )
    assert (config.port, config.data_dir, config.probe_auth, config.max_topics, config.wal_shards) == (
        0,
        "d",
        True,
        7,
        3,
    )
    assert (config.log_format, config.host) == ("json", "127.0.0.1")


@pytest.mark.parametrize("text", ["many", "-1", "1.5", "1e3", "0x10", "1_000", "5k", "٣"])
def test_limit_that_does_not_parse_is_rejected(text: str) -> None:
    """A default in its place would be a limit that the operator did not set."""
    with pytest.raises(
        BadInput, match=f"TIDELOG_MAX_TOPICS is '{text}', it must be a whole number; the server was not"
    ):
        config_from_env(BASE, {"TIDELOG_MAX_TOPICS": text})


@pytest.mark.parametrize("name", ["MAX_TOPICS", "WAL_SHARDS", "PORT"])
def test_empty_number_is_not_set(name: str) -> None:
    assert config_from_env(BASE, {f"TIDELOG_{name}": " "}) == BASE


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("67108864", 67_108_864),
        ("64m", 64 << 20),
        ("64MiB", 64 << 20),
        ("64 mib", 64 << 20),
        ("64MB", 64_000_000),
        ("1g", 1 << 30),
        ("2TB", 2 * 10**12),
        ("512B", 512),
        ("0", 0),
    ],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert config_from_env(BASE, {"TIDELOG_MAX_BODY_BYTES": text}).max_body_bytes == size
    assert config_from_file(BASE, {"cold_rate_bytes": text}, "t.toml").cold_rate_bytes == size


@pytest.mark.parametrize(
    ("text", "time_ms"),
    [("250", 250), ("250ms", 250), ("30s", 30_000), ("10min", 600_000), ("10m", 600_000), ("1h", 3_600_000)],
)
def test_times_have_units(text: str, time_ms: int) -> None:
    assert config_from_env(BASE, {"TIDELOG_DRAIN_MS": text}).drain_ms == time_ms


@pytest.mark.parametrize(("name", "text"), [("MAX_BODY_BYTES", "64s"), ("MAX_BODY_BYTES", "64XB"), ("DRAIN_MS", "3KB")])
def test_unit_of_another_kind_is_rejected(name: str, text: str) -> None:
    with pytest.raises(BadInput, match=f"TIDELOG_{name} is '{text}', it must be"):
        config_from_env(BASE, {f"TIDELOG_{name}": text})


def test_unknown_variable_has_a_nearest_setting() -> None:
    environment = {"TIDELOG_MAX_TOPCIS": "3", "TIDELOG_PORT": "1", "TIDELOG_SERVER": "http://s", "OTHER": "x"}
    assert unknown_settings(environment) == {"TIDELOG_MAX_TOPCIS": "TIDELOG_MAX_TOPICS"}


def test_keys_of_a_file_are_one_on_each_line() -> None:
    assert keys_from_file("# operators\n a:r \n\n\tb\r\n", "keys") == "a:r,b"
    assert keys_from_file("# none\n", "keys") == ""
    with pytest.raises(BadInput, match="key 2 of keys has a comma"):
        keys_from_file("# two\na\nb,c\n", "keys")


def test_limit_of_zero_is_kept() -> None:
    assert config_from_env(BASE, {"TIDELOG_MAX_SSE_CONNECTIONS": "0"}).max_sse_connections == 0


@pytest.mark.parametrize(
    ("name", "text"), [("PORT", "http"), ("PROBE_AUTH", "yes"), ("LOG_FORMAT", "xml"), ("COMMIT", "never")]
)
def test_other_settings_that_do_not_parse_are_rejected(name: str, text: str) -> None:
    with pytest.raises(BadInput, match="not started"):
        config_from_env(BASE, {f"TIDELOG_{name}": text})


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("0.0.0.0:99", ("0.0.0.0", 99)),
        ("[::1]:99", ("::1", 99)),
        ("::1", ("::1", 4000)),
        ("localhost", ("localhost", 4000)),
    ],
)
def test_host_with_a_port_is_split(host: str, expected: tuple[str, int]) -> None:
    config = config_from_env(BASE, {"TIDELOG_HOST": host, "TIDELOG_PORT": "4000"})
    assert (config.host, config.port) == expected


def test_settings_are_read_from_a_file_by_the_same_names() -> None:
    config = config_from_file(BASE, {"port": 1, "probe_auth": True, "api_keys": "k:r"}, "t.toml")
    assert (config.port, config.probe_auth, config.api_keys) == (1, True, "k:r")


def test_unknown_setting_in_a_file_is_rejected() -> None:
    with pytest.raises(BadInput, match="'api_key', which is no setting; the nearest is api_keys"):
        config_from_file(BASE, {"api_key": "k"}, "t.toml")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.test", "10.0.0.1", ""])
def test_public_address_needs_keys(host: str) -> None:
    config = ServerConfig(host=host)
    with pytest.raises(BadInput, match="no keys"):
        check_config(config)
    check_config(ServerConfig(host=host, api_keys="k"))
    check_config(ServerConfig(host=host, allow_insecure_no_auth=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_address_needs_no_keys(host: str) -> None:
    check_config(ServerConfig(host=host))


def test_keys_are_not_in_the_repr() -> None:
    assert "s3cret" not in repr(ServerConfig(api_keys="s3cret"))


@pytest.mark.parametrize(("given", "floor"), [(None, 1000), (0, 1), (20, 20), (5000, 1000)])
def test_minimum_heartbeat_is_lowered_only_by_the_test_setting(given: int | None, floor: int) -> None:
    assert ServerConfig(test_min_heartbeat_ms=given).heartbeat_ms_min == floor
