"""The ledger of gaps over HTTP, and the engine's own topics: read by whoever may read, written by nobody."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.contract_http.api import Api, expect_error, expect_success, topic_path
from tests.contract_http.server import Server

ROW = {"topic", "topic_id", "cause", "first", "last", "records", "bytes", "ts_ms", "actor", "about", "seq"}
OWN = "_tidelog.gaps"


def gaps(api: Api, topic: str, query: str = "") -> list[dict[str, Any]]:
    found = expect_success(api.get(topic_path(topic, f"/gaps{query}")))
    assert found["topic"] == topic
    rows: list[dict[str, Any]] = found["gaps"]
    assert all(row.keys() == ROW and row["topic"] == topic for row in rows)
    return rows


def summaries(rows: list[dict[str, Any]]) -> list[tuple[str, int, int, int]]:
    return [(row["cause"], row["first"], row["last"], row["records"]) for row in rows]


def test_removed_records_are_listed_at_once(api: Api, topic: str) -> None:
    api.create_topic(topic, cap_records=4)
    assert gaps(api, topic) == []
    api.write(topic, *range(6))
    api.remove(topic, before_seq=4)
    assert summaries(gaps(api, topic)) == [("cap", 1, 2, 2), ("delete", 3, 3, 1)]
    assert [row["actor"] for row in gaps(api, topic)] == ["retention", None]


def test_a_topic_that_is_gone_has_its_rows(api: Api, topic: str) -> None:
    expect_error(api.get(topic_path(topic, "/gaps")), 404, "topic_not_found", {"topic": topic})
    api.write(topic, 1, 2)
    first = api.drop(topic)
    assert first["deleted"]
    assert summaries(gaps(api, topic)) == [("drop", 1, 2, 2)]
    api.write(topic, 1)
    api.remove(topic, before_seq=2)
    rows = gaps(api, topic)
    assert summaries(rows) == [("drop", 1, 2, 2), ("delete", 1, 1, 1)]
    assert rows[0]["topic_id"] != rows[1]["topic_id"]


def test_page_by_page_and_from_a_time(api: Api, topic: str) -> None:
    api.write(topic, *range(7))
    for seq in range(2, 9):
        api.remove(topic, before_seq=seq)
    every = gaps(api, topic)
    assert [row["first"] for row in every] == list(range(1, 8))
    pages, cursor = [], ""
    while True:
        found = expect_success(api.get(topic_path(topic, f"/gaps?limit=3{cursor}")))
        pages.append(found["gaps"])
        if "next_cursor" not in found:
            break
        cursor = f"&cursor={quote(found['next_cursor'])}"
    assert [len(page) for page in pages] == [3, 3, 1]
    assert [row for page in pages for row in page] == every
    noon = every[3]["ts_ms"]
    assert gaps(api, topic, f"?from={noon}") == [row for row in every if row["ts_ms"] >= noon]
    assert gaps(api, topic, f"?from={(1 << 64) - 1}") == []
    assert gaps(api, topic, "?limit=0") == every[:1], "the least is one"
    expect_error(
        api.get(topic_path(topic, "/gaps?from=x")), 400, "invalid_request", {"parameter": "from", "value": "x"}
    )


@pytest.mark.parametrize("cursor", ["x", "eyJhZnRlciI6IngifQ", "eyJhZnRlciI6Ii0xIn0", "%00"])
def test_foreign_cursor_is_refused(api: Api, topic: str, cursor: str) -> None:
    api.write(topic, 1)
    expect_error(api.get(topic_path(topic, f"/gaps?cursor={cursor}")), 400, "invalid_request")


def test_who_may_see_what_and_who_did_it(tmp_path: Path) -> None:
    with Server(tmp_path, api_keys="root,w:write,mine:read:mine").start(key="root") as server:
        with server.client("root") as api:
            for topic in ("mine", "theirs"):
                api.write(topic, 1)
                api.remove(topic, before_seq=9)
            api.drop("theirs")
            rows = expect_success(api.get("/v0/gaps"))["gaps"]
            assert [(row["topic"], row["cause"]) for row in rows] == [
                ("mine", "delete"),
                ("theirs", "delete"),
                ("theirs", "drop"),
            ]
            assert {row["actor"] for row in rows} == {sha256(b"root").hexdigest()[:16]}, "its digest, never the key"
        with server.client("mine") as api:
            assert [row["topic"] for row in expect_success(api.get("/v0/gaps"))["gaps"]] == ["mine"]
            assert len(gaps(api, "mine")) == 1
            expect_error(api.get(topic_path("theirs", "/gaps")), 403, "forbidden")
            expect_error(api.get(topic_path(OWN)), 403, "forbidden")
        with server.client("w") as api:
            expect_error(api.get("/v0/gaps"), 403, "forbidden")
            expect_error(api.get(topic_path("mine", "/gaps")), 403, "forbidden")
        with server.client() as api:
            expect_error(api.get("/v0/gaps"), 401, "unauthorized")


def test_rows_survive_a_kill(tmp_path: Path) -> None:
    with Server(tmp_path).start() as server:
        with server.client() as api:
            api.create_topic("t", durability="fsync", cap_records=3)
            api.write("t", *range(5))
            api.remove("t", before_seq=4)
        server.kill()
        server.start()
        with server.client() as api:
            assert summaries(gaps(api, "t")) == [("cap", 1, 2, 2), ("delete", 3, 3, 1)]


def test_the_engines_own_topics_are_read_and_nothing_else(api: Api, topic: str) -> None:
    api.write(topic, 1)
    api.remove(topic, before_seq=2)
    gaps(api, topic)
    state = api.state(OWN)
    assert (state["topic"], state["config"]["durability"]) == (OWN, "disk")
    rows = [record["data"] for record in api.diff(OWN, limit=1000, from_seq=max(state["head_seq"] - 50, 0))["records"]]
    assert (topic, "delete") in [(row["topic"], row["cause"]) for row in rows]
    assert OWN not in [row["topic"] for row in api.topics("?page_size=1000")["topics"]]
    for reply in (
        api.try_write(OWN, {"data": 1}),
        api.put(topic_path(OWN), {}),
        api.delete(topic_path(OWN)),
        api.post(topic_path(OWN, "/delete"), {"before_seq": 9}),
        api.post(topic_path(OWN, "/groups/g/commit"), {"seq": 0}),
        api.put(topic_path(OWN, "/groups/g"), {}),
        api.try_write("_tidelog.new", {"data": 1}),
    ):
        expect_error(reply, 400, "invalid_request")
    assert api.state(OWN)["head_seq"] == state["head_seq"]
