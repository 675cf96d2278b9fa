"""§1.2: settings of a process, and what keeps it from starting."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.contract_http.api import expect_error, topic_path
from tests.contract_http.server import Server
from tests.contract_http.sse_client import parse_heartbeat


def started_not(folder: Path, *args: str, **settings: Any) -> str:
    """What a process says that must not start."""
    server = Server(folder, *args, **settings)
    server.launch()
    try:
        assert server.wait() != 0
    finally:
        if server.is_running:
            server.kill()
    assert not (folder / "port.txt").exists() or settings.get("port_file"), "it never listened"
    return server.log


@pytest.mark.parametrize(
    "keys",
    ["secret:raed", "good,secret:read+wirte:pre", "secret:+", "secret:read+"],
)
def test_a_scope_that_is_none_keeps_it_from_starting(tmp_path: Path, keys: str) -> None:
    """§1.2, §1.5, D8: fail closed; and the key is not told to the log."""
    said = started_not(tmp_path, api_keys=keys)
    assert "scope" in said
    assert "secret" not in said.replace("no secret", "")
    assert "Traceback" not in said


@pytest.mark.parametrize("host", ["0.0.0.0:4000", "::", "no.such.host.invalid"])
def test_another_address_than_loopback_needs_keys(tmp_path: Path, host: str) -> None:
    """§1.2: an address that is everybody's, or that cannot be resolved, is refused without keys."""
    said = started_not(tmp_path, host=host)
    assert "Traceback" not in said
    assert "TIDELOG_API_KEYS" in said


def test_a_port_file_that_cannot_be_written_keeps_it_from_starting(tmp_path: Path) -> None:
    """§1.2."""
    args = ("--data", str(tmp_path / "data"), "--port", "0")
    said = started_not(tmp_path, *args, port_file=tmp_path / "no" / "such" / "folder" / "port.txt")
    assert "Traceback" not in said


def test_a_directory_has_one_process(tmp_path: Path) -> None:
    """§1.2: the second is refused, and the first does not notice."""
    with Server(tmp_path).start() as first, first.client() as client:
        client.write("t", 1)
        found = (tmp_path / "port.txt").read_bytes()
        args = ("--data", str(first.data), "--port", "0", "--port-file", str(tmp_path / "port.txt"))
        other = Server(tmp_path / "other", *args)
        other.launch()
        assert other.wait() != 0
        assert "Traceback" not in other.log
        url = f"http://{first.address.host}:{first.address.port}"
        assert f'data is served at {url}; nothing was changed, use it through the server: tidelog.connect("{url}")' in (
            other.log
        )
        assert (tmp_path / "port.txt").read_bytes() == found, "and whoever looks for it finds it"
        assert client.write("t", 2)["head_seq"] == 2


def test_everything_can_be_set_in_the_environment(tmp_path: Path) -> None:
    """§1.2: a host with a colon is the whole address and `PORT` is not looked at; the port file is exactly it."""
    server = Server(
        tmp_path,
        "--log-format",
        "text",
        host="127.0.0.1:0",
        port=1,
        port_file=tmp_path / "port.txt",
        data_dir=tmp_path / "elsewhere",
        segment_max_events=100,
        segment_max_bytes=1 << 20,
        segment_max_age_ms=0,
        hot_retain_segments=2,
        hot_retain_bytes=0,
        cold_dir=tmp_path / "cold",
        wal_shards=2,
        test_min_heartbeat_ms=5000,
    )
    with server.start() as running:
        said = (tmp_path / "port.txt").read_text()
        assert re.fullmatch(r"127\.0\.0\.1:[0-9]+", said)
        assert server.address.port != 1
        assert (tmp_path / "elsewhere").is_dir()
        left = {file.name for file in tmp_path.iterdir()}
        assert left <= {"port.txt", "log.txt", "elsewhere", "cold"}, "written whole, under no other name"
        with running.client() as client:
            assert client.write("t", 1)["created"]
            url = client.watch({"t": {}}, heartbeat_ms=1)["stream_url"]
        with running.events(url) as stream:
            stream.expect("record", "caught-up")
            began = time.monotonic()
            parse_heartbeat(stream.frame(within_s=30))
            assert time.monotonic() - began >= 0.9, "the hook lowers the floor of 1,000 ms, and never raises it"


def test_unknown_setting_is_reported(tmp_path: Path) -> None:
    """Nothing is ignored in silence, and nobody is kept from starting for it."""
    with Server(tmp_path, max_topcis=3, max_topics=3).start() as running:
        told = [line for line in running.log.splitlines() if "no setting" in line]
        assert len(told) == 1
        assert "TIDELOG_MAX_TOPCIS is no setting" in told[0]
        assert told[0].endswith("the nearest is TIDELOG_MAX_TOPICS")


def test_without_keys_it_says_so_loudly(server: Server) -> None:
    """§1.2: unset keys mean no authentication, and a line in the log."""
    assert re.search(r"(?i)no auth", server.log)


def test_a_limit_with_a_unit_is_understood(tmp_path: Path) -> None:
    """An empty value is not set."""
    with Server(tmp_path, max_body_bytes="2 KB", max_topics="").start() as running, running.client() as client:
        client.write("t", "x" * 1_900)
        expect_error(client.post(topic_path("t"), {"records": [{"data": "x" * 2_000}]}), 413, "payload_too_large")


def test_a_limit_that_does_not_parse_keeps_it_from_starting(tmp_path: Path) -> None:
    """§1.2 of the contract has the default in its place: nobody would notice."""
    said = started_not(tmp_path, max_body_bytes="64 parsecs")
    assert "TIDELOG_MAX_BODY_BYTES is '64 parsecs', it must be bytes, or a size such as 64m, 64MiB or 64MB" in said
    assert "Traceback" not in said


def test_a_cap_of_zero_is_no_cap(tmp_path: Path) -> None:
    """§1.12: all `0` = unlimited."""
    caps = (
        "max_topics",
        "max_routers",
        "max_watch_sessions",
        "max_sse_connections",
        "max_sse_connections_per_key",
        "max_inflight_per_key",
        "max_total_bytes",
    )
    with Server(tmp_path, api_keys="k", **dict.fromkeys(caps, 0)).start() as running, running.client("k") as client:
        for number in range(3):
            client.write(f"t{number}", "x")
            with running.events(client.watch({f"t{number}": {}})["stream_url"], key="k") as stream:
                stream.expect("record", "caught-up")


@pytest.mark.parametrize("value", ["1", "true"])
def test_a_switch_is_on_for_1_and_true(tmp_path: Path, value: str) -> None:
    """§1.2: of `PROBE_AUTH`."""
    with Server(tmp_path, api_keys="k", probe_auth=value).start(key="k") as running, running.client() as client:
        expect_error(client.get("/healthz"), 401, "unauthorized")


def test_both_signals_stop_it_cleanly(tmp_path: Path) -> None:
    """§1.2: SIGINT as SIGTERM."""
    with Server(tmp_path).start() as running:
        with running.client() as client:
            client.write("t", 1)
        for number in (signal.SIGINT, signal.SIGTERM):
            running.signal(number)
            assert running.wait() == 0
            running.start()
            with running.client() as client:
                assert client.get(topic_path("t")).json()["head_seq"] == 1
