"""Settings: precedence, rejected values, and that a typing error does not open access."""

from __future__ import annotations

import pytest

from tidelog.errors import BadInput
from tidelog.server.config import ServerConfig, check_config, config_from_env, config_from_file

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


@pytest.mark.parametrize("text", ["", "many", "-1", "1.5"])
def test_limit_that_does_not_parse_is_its_default(text: str) -> None:
    assert config_from_env(BASE, {"TIDELOG_MAX_TOPICS": text}).max_topics == BASE.max_topics


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
    with pytest.raises(BadInput, match="api_key'"):
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
