"""Bugs of the server beside a cold store or a backup store. Listed in docs/bugs.md."""

from __future__ import annotations

from threading import current_thread

import pytest
from tests.unit.server.fakes import ServerHarness, run_scenario

from tidelog.engine import Topic
from tidelog.engine.backup_target import BackupListing
from tidelog.engine.topic import TopicOperations
from tidelog.errors import StoreUnavailable
from tidelog.server.handlers import backups


@pytest.mark.parametrize(
    ("method", "path", "body", "called"),
    [
        ("GET", "latest", None, "latest"),
        ("GET", "records/1/data", None, "open_record"),
        ("POST", "compact", None, "compact"),
        ("POST", "rewrite", {"force": True}, "rewrite"),
        ("POST", "erase", {"seqs": [1]}, "erase"),
    ],
)
def test_a_request_that_waits_for_the_cold_store_occupies_no_thread_of_writers(
    method: str, path: str, body: object, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool of writers has two threads: two such requests would stop all large writes."""
    threads: list[str] = []

    def wait_for_store(*_: object, **__: object) -> None:
        threads.append(current_thread().name)
        raise StoreUnavailable("s3://bucket", "it does not answer")

    async def scenario(world: ServerHarness) -> None:
        world.topic("a", compaction="latest_by_tag").append(b"x", tag="t")
        monkeypatch.setattr(TopicOperations, "may_read_cold", lambda *_: True)
        monkeypatch.setattr(Topic, called, wait_for_store)
        status, _ = await world.ask(method, f"/v0/topics/a/{path}", body)
        assert status == 503

    run_scenario(scenario)
    (thread,) = threads
    assert not thread.startswith("tidelog work"), thread


def test_backups_over_http_do_not_show_the_credentials_of_their_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def list_backups(target: str, **_: object) -> BackupListing:
        assert "SECRET" in target, "the store is opened with them"
        return BackupListing([], [], {})

    async def scenario(world: ServerHarness) -> None:
        monkeypatch.setattr(backups, "list_backups", list_backups)
        status, said = await world.ask("GET", "/v0/backups")
        assert (status, said["target"]) == (200, "s3://bucket/backups")
        status, said = await world.ask("GET", "/v0/backups?target=s3://ID:OTHER@elsewhere/x")
        assert status == 403
        assert "OTHER" not in str(said)

    run_scenario(scenario, backup_targets="s3://ID:SECRET@bucket/backups")


def test_a_key_for_some_names_does_not_see_the_cold_tier_of_all() -> None:
    async def scenario(world: ServerHarness) -> None:
        assert (await world.ask("GET", "/v0/tiers", key="all"))[0] == 200
        status, said = await world.ask("GET", "/v0/tiers", key="some")
        assert (status, said["error"]["code"]) == (403, "forbidden")

    run_scenario(scenario, api_keys="all:admin,some:admin:a")
