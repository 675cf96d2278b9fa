"""Version, settings, and metrics of the process over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.server.fakes import ServerHarness, run_scenario

from tidelog.http.interface import Response
from tidelog.version import __version__

KEYS = "s3cret,reader:r,mine:admin:my"


def test_version_needs_any_key() -> None:
    async def scenario(world: ServerHarness) -> None:
        status, body = await world.ask("GET", "/v0/version", key="mine")
        assert (status, body["version"], body["api"]) == (200, __version__, "v0")
        assert (await world.ask("GET", "/v0/version"))[0] == 401

    run_scenario(scenario, api_keys=KEYS)


def test_settings_are_shown_without_secrets() -> None:
    async def scenario(world: ServerHarness) -> None:
        status, body = await world.ask("GET", "/v0/settings", key="s3cret")
        assert status == 200
        assert body["settings"]["max_topics"] == 7
        assert body["settings"]["max_body_bytes"] == 64 << 20
        assert set(body["hidden"]) == {"api_keys", "token_secret", "backup_targets", "cold_dir"}
        assert not set(body["hidden"]) & set(body["settings"])
        assert "s3cret" not in str(body)
        assert "t" * 32 not in str(body)

    run_scenario(scenario, api_keys=KEYS, max_topics=7, token_secret="t" * 32, backup_targets="s3://a:b@c")


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v0/settings"), ("GET", "/metrics")],
)
def test_keys_without_the_right_are_refused(method: str, path: str) -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        body: Any
        for key, status in ((None, 401), ("mine", 403), *([] if path == "/metrics" else [("reader", 403)])):
            found, body = await world.ask(method, path, key=key)
            assert found == status, body

    run_scenario(scenario, api_keys=KEYS)


def test_metrics_have_an_alias_and_series_of_process_disk_and_build() -> None:
    async def scenario(world: ServerHarness) -> None:
        texts = []
        for path in ("/metrics", "/v0/metrics"):
            answer = await world.begin("GET", path, key="reader").answer()
            assert isinstance(answer, Response)
            assert answer.status == 200
            texts.append(answer.body.decode())
        names = [{line.split("{")[0].split(" ")[0] for line in text.splitlines() if line[0] != "#"} for text in texts]
        assert names[0] <= names[1]
        assert {"process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds_total"} <= names[0]
        assert 'tidelog_build_info{python="' in texts[0]
        assert f'version="{__version__}"' in texts[0]
        assert "tidelog_disk_free_bytes" in names[0]

    run_scenario(scenario, api_keys=KEYS)
