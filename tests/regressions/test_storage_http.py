"""Bugs of the server beside a cold store or a backup store. Listed in docs/bugs.md."""

from __future__ import annotations

from threading import current_thread

import pytest
from tests.unit.server.fakes import ServerHarness, run_scenario

from tidelog.disk.memory import MemoryDisk
from tidelog.engine import Topic, recovery
from tidelog.engine.backup_target import BackupListing
from tidelog.engine.manifest import TopicEntry, TopicRow
from tidelog.engine.topic import TopicOperations
from tidelog.errors import StoreUnavailable
from tidelog.server import metrics
from tidelog.server.handlers import backups
from tidelog.testing import ManualClock


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


def test_a_delete_that_may_need_keys_from_the_cold_store_occupies_no_thread_of_writers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With compaction, a delete takes the older records of a key with it: their segments may be in the store."""
    threads: list[str] = []

    def wait_for_store(*_: object, **__: object) -> None:
        threads.append(current_thread().name)
        raise StoreUnavailable("s3://bucket", "it does not answer")

    async def scenario(world: ServerHarness) -> None:
        world.topic("a", compaction="latest_by_tag").append(b"x", tag="t")
        monkeypatch.setattr(TopicOperations, "may_read_cold", lambda _, from_seq: from_seq == 0)
        monkeypatch.setattr(Topic, "delete", wait_for_store)
        status, _ = await world.ask("POST", "/v0/topics/a/delete", {"before_seq": 2})
        assert status == 503

    run_scenario(scenario)
    (thread,) = threads
    assert not thread.startswith("tidelog work"), thread


def test_metrics_decode_no_row_of_an_idle_topic_without_series(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, decoded = MemoryDisk(ManualClock()), list[str]()

    async def fill(world: ServerHarness) -> None:
        for number in range(30):
            world.topic(f"t{number:02d}", durability=("fsync", "disk")[number % 2]).append([b"x"] * (number + 1))

    async def scrape(world: ServerHarness) -> None:
        world.topic("t29").append(b"used")
        monkeypatch.setattr(TopicEntry, "decode", count)
        said: dict[str, object] = {}
        for _ in range(2):
            decoded.clear()
            said = (await world.ask("GET", "/v0/metrics", headers={"accept": "application/json"}))[1]
            assert sorted(decoded) == ["t00", "t01", "t02"]
            decoded.clear()
            assert b"tidelog_topics 30\n" in world.service.metrics.prometheus_text()
            assert sorted(decoded) == ["t00", "t01", "t02"]
        assert (said["topics"], said["topics_disk"], said["records_live"]) == (30, 15, 466)

    def count(entry: TopicEntry) -> TopicRow:
        decoded.append(entry.name)
        return decode(entry)

    decode = TopicEntry.decode
    monkeypatch.setattr(recovery, "IDLE_TOPICS_MIN", 0)
    monkeypatch.setattr(metrics, "TOPICS_MAX", 3)
    run_scenario(fill, disk=disk)
    run_scenario(scrape, disk=disk)


@pytest.mark.parametrize("path", ["erase", "gaps"])
def test_a_receipt_names_no_topic_that_a_key_for_some_names_may_not_see(path: str) -> None:
    """Receipts named the topics that routers copy to, and the gap log keeps receipts."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a.topic").append(b"x", tag="t")
        world.engine.router("secret-router", "a.topic", "secret.topic")
        status, said = await world.ask("POST", "/v0/topics/a.topic/erase", {"match": "t"}, key="some")
        assert status == 200
        assert any("1 topic" in text for text in said["not_reached"])
        if path == "gaps":
            status, said = await world.ask("GET", "/v0/topics/a.topic/gaps", key="some")
            assert status == 200
            assert "erase" in str(said)
        assert "secret" not in str(said)

    run_scenario(scenario, api_keys="all:admin,some:admin+read+delete:a.")


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
