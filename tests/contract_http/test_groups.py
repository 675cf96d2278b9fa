"""Groups of consumers over HTTP: where they stand, how they move, who may move them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract_http.api import ANY, Api, expect_error, expect_success, topic_path
from tests.contract_http.client import JSON
from tests.contract_http.server import Server
from tests.kit.waiting import run_together

STATE = {"group", "position", "head_seq", "lag", "hold_bytes", "hold_broken", "last_commit_ts"}
TOO_BIG = 1 << 64


def at(topic: str, group: str = "g", rest: str = "") -> str:
    return topic_path(topic, f"/groups/{group}{rest}")


def commit(api: Api, topic: str, seq: int, group: str = "g", **more: Any) -> dict[str, Any]:
    return expect_success(api.post(at(topic, group, "/commit"), {"seq": seq, **more}))


@pytest.fixture
def ten_records(api: Api, topic: str) -> str:
    """A topic with ten records."""
    api.write(topic, *range(10))
    return topic


def test_a_commit_makes_a_group_and_moves_it(api: Api, ten_records: str) -> None:
    done = commit(api, ten_records, 4)
    del done["performance"]
    assert done == {"topic": ten_records, "group": "g", "position": 4}
    found = expect_success(api.get(at(ten_records)))
    assert found.keys() == {"topic", "performance"} | STATE
    assert (found["position"], found["head_seq"], found["hold_bytes"], found["hold_broken"]) == (4, 10, 0, False)
    assert (found["lag"]["records"], found["lag"]["bytes"]) == (6, 6)
    assert found["lag"]["seconds"] >= 0
    assert found["last_commit_ts"] > 0
    commit(api, ten_records, 10)
    assert expect_success(api.get(at(ten_records)))["lag"] == {"records": 0, "bytes": 0, "seconds": 0}


def test_groups_are_listed_by_name(api: Api, ten_records: str) -> None:
    for name in ("b", "a.1", "C"):
        commit(api, ten_records, 3, name)
    found = expect_success(api.get(topic_path(ten_records, "/groups")))
    assert found["topic"] == ten_records
    assert [row["group"] for row in found["groups"]] == ["C", "a.1", "b"]
    assert all(row.keys() == STATE for row in found["groups"])


@pytest.mark.parametrize(
    ("body", "position"), [({"seq": 11}, 5), ({"seq": 4}, 5), ({"seq": 6, "expect": 4}, 5), ({"seq": (1 << 64) - 1}, 5)]
)
def test_a_move_that_cannot_be_is_a_conflict(api: Api, ten_records: str, body: dict[str, Any], position: int) -> None:
    commit(api, ten_records, 5)
    error = expect_error(api.post(at(ten_records, rest="/commit"), body), 409, "cursor_conflict", ANY)
    detail = error["detail"]
    assert (detail["topic"], detail["group"], detail["position"], detail["head_seq"]) == (
        ten_records,
        "g",
        position,
        10,
    )
    assert expect_success(api.get(at(ten_records)))["position"] == 5


def test_of_many_that_expect_the_same_one_wins(server: Server, api: Api, ten_records: str) -> None:
    commit(api, ten_records, 0)

    def one(number: int) -> int:
        with server.client() as client:
            return client.post(at(ten_records, rest="/commit"), {"seq": number, "expect": 0}).status

    statuses = run_together([lambda number=number: one(number) for number in range(1, 7)])  # type: ignore[misc]
    assert sorted(statuses) == [200] + [409] * 5


def test_fetch_is_a_diff_after_the_position(api: Api, ten_records: str) -> None:
    commit(api, ten_records, 7)
    found = expect_success(api.post(at(ten_records, rest="/fetch"), {"limit": 2}))
    plain = api.diff(ten_records, from_seq=7, limit=2)
    del found["performance"], plain["performance"]
    assert found == plain
    assert [
        record["$seq"] for record in expect_success(api.request("POST", at(ten_records, rest="/fetch")))["records"]
    ] == [8, 9, 10]
    assert expect_success(api.get(at(ten_records)))["position"] == 7, "a fetch moves nothing"


def test_a_fetch_waits_for_records(server: Server, api: Api, ten_records: str) -> None:
    commit(api, ten_records, 10)

    def wait() -> list[int]:
        with server.client() as client:
            page = expect_success(client.post(at(ten_records, rest="/fetch"), {"wait_ms": 10_000}))
            return [record["$seq"] for record in page["records"]]

    def write() -> list[int]:
        with server.client() as client:
            seqs: list[int] = client.write(ten_records, "new")["seqs"]
            return seqs

    assert run_together([wait, write]) == [[11], [11]]
    assert expect_success(api.post(at(ten_records, rest="/fetch"), {"wait_ms": 1, "node": ["x"]}))["records"] != []


def test_fetch_reports_a_gap(api: Api, topic: str) -> None:
    api.create_topic(topic, cap_records=2)
    api.write(topic, *range(5))
    commit(api, topic, 0)
    found = expect_success(api.post(at(topic, rest="/fetch"), {}))
    assert (found["tombstone"]["gap_from"], found["tombstone"]["gap_to"]) == (1, 3)


def test_a_reset_goes_anywhere_and_a_preview_nowhere(api: Api, ten_records: str) -> None:
    commit(api, ten_records, 6)
    look = expect_success(api.post(at(ten_records, rest="/reset"), {"to": "earliest", "preview": True}))
    del look["performance"]
    want = {
        "topic": ten_records,
        "group": "g",
        "from": 6,
        "to": 0,
        "records": 6,
        "bytes": 6,
        "gap": None,
        "preview": True,
    }
    assert look == want
    assert expect_success(api.get(at(ten_records)))["position"] == 6
    done = expect_success(api.post(at(ten_records, rest="/reset"), {"to": "earliest"}))
    del done["performance"]
    assert done == {**want, "preview": False}
    for to, position in ((3, 3), ("latest", 10), ({"ts": 0}, 0), ({"ts": 1 << 42}, 10)):
        assert expect_success(api.post(at(ten_records, rest="/reset"), {"to": to}))["to"] == position
        assert expect_success(api.get(at(ten_records)))["position"] == position
    expect_error(api.post(at(ten_records, rest="/reset"), {"to": 11}), 409, "cursor_conflict", ANY)


def test_put_makes_a_group_and_sets_its_hold(api: Api, topic: str) -> None:
    api.create_topic(topic, cap_records=3, durability="fsync")
    api.write(topic, *range(3))
    made = expect_success(api.put(at(topic), {"hold_bytes": 4}), 201)
    assert made.keys() == {"topic", "created", "performance"} | STATE
    assert (made["created"], made["position"], made["hold_bytes"]) == (True, 0, 4)
    assert expect_success(api.put(at(topic, "late"), {"from": "latest"}), 201)["position"] == 3
    assert expect_success(api.put(at(topic, "two"), {"from": 2}), 201)["position"] == 2
    assert expect_success(api.request("PUT", at(topic, "plain")), 201)["hold_bytes"] == 0
    api.write(topic, *range(4))
    assert api.state(topic)["earliest_seq"] == 1, "held"
    api.write(topic, 1)
    now = expect_success(api.get(at(topic)))
    assert (api.state(topic)["earliest_seq"], now["hold_broken"]) == (6, True)
    again = expect_success(api.put(at(topic), {"from": "latest"}))
    assert (again["created"], again["position"], again["hold_bytes"]) == (False, 0, 0), "it stays, without a hold"
    expect_error(api.put(at(topic, "ahead"), {"from": 99}), 409, "cursor_conflict", ANY)


def test_a_group_is_forgotten(api: Api, ten_records: str) -> None:
    commit(api, ten_records, 6)
    gone = expect_success(api.delete(at(ten_records)))
    del gone["performance"]
    assert gone == {"topic": ten_records, "group": "g", "deleted": True}
    for reply in (
        api.get(at(ten_records)),
        api.delete(at(ten_records)),
        api.post(at(ten_records, rest="/fetch"), {}),
        api.post(at(ten_records, rest="/reset"), {"to": 1}),
        api.get(at(ten_records, "_never")),
    ):
        group = "_never" if b"_never" in reply.body else "g"
        expect_error(reply, 404, "group_not_found", {"topic": ten_records, "group": group})
    assert expect_success(api.get(topic_path(ten_records, "/groups")))["groups"] == []


def test_without_a_topic_there_is_no_group(api: Api, topic: str) -> None:
    for reply in (
        api.get(topic_path(topic, "/groups")),
        api.get(at(topic)),
        api.put(at(topic), {}),
        api.delete(at(topic)),
        api.post(at(topic, rest="/commit"), {"seq": 0}),
        api.post(at(topic, rest="/fetch"), {}),
        api.post(at(topic, rest="/reset"), {"to": 0}),
    ):
        expect_error(reply, 404, "topic_not_found", {"topic": topic})


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("commit", {}),
        ("commit", {"seq": -1}),
        ("commit", {"seq": 1.0}),
        ("commit", {"seq": TOO_BIG}),
        ("commit", {"seq": None}),
        ("commit", {"seq": 1, "expect": "1"}),
        ("reset", {}),
        ("reset", {"to": "first"}),
        ("reset", {"to": -1}),
        ("reset", {"to": TOO_BIG}),
        ("reset", {"to": {"ts": "x"}}),
        ("reset", {"to": {"ts": -1}}),
        ("reset", {"to": 1, "preview": 1}),
        ("fetch", {"limit": -1}),
        ("fetch", []),
    ],
)
def test_bodies_that_are_none(api: Api, ten_records: str, verb: str, body: object) -> None:
    commit(api, ten_records, 5)
    expect_error(api.post(at(ten_records, rest=f"/{verb}"), body), 400, "invalid_request")
    assert expect_success(api.get(at(ten_records)))["position"] == 5


def test_checks_come_in_their_order(api: Api, topic: str) -> None:
    """§1.4: media type, then JSON, then the topic, then the group."""
    expect_error(api.request("POST", at(topic, rest="/commit"), b"{}"), 415, "unsupported_media_type")
    expect_error(api.request("POST", at(topic, rest="/commit"), b"{", [JSON]), 400, "invalid_request")
    expect_error(api.post(at(topic, "_", "/commit"), {"seq": 0}), 404, "topic_not_found", {"topic": topic})
    api.write(topic, 1)
    expect_error(api.post(at(topic, "_", "/commit"), {"seq": 0}), 400, "invalid_request")
    expect_error(api.put(at(topic, "_"), {}), 400, "invalid_request")
    assert api.post(at(topic), {}).status == 405


def test_who_may_do_what(tmp_path: Path) -> None:
    keys = "root,r:read,w:write,d:delete,mine:rw+delete:mine"
    with Server(tmp_path, api_keys=keys).start(key="root") as server, server.client("root") as api:
        for topic in ("mine", "theirs"):
            api.write(topic, 1, 2)
            commit(api, topic, 1)
        calls: dict[str, tuple[str, str, Any]] = {
            "list": ("GET", "", None),
            "get": ("GET", "/g", None),
            "fetch": ("POST", "/g/fetch", {}),
            "commit": ("POST", "/g/commit", {"seq": 2}),
            "reset": ("POST", "/g/reset", {"to": 1}),
            "put": ("PUT", "/g", {}),
            "drop": ("DELETE", "/x", None),
        }
        may = {
            "r": {"list", "get", "fetch"},
            "w": {"commit", "reset", "put"},
            "d": {"drop"},
            "mine": set(calls),
        }
        for key, allowed in may.items():
            with server.client(key) as client:
                for topic in ("mine", "theirs"):
                    for name, (method, rest, body) in calls.items():
                        target = topic_path(topic, f"/groups{rest}")
                        reply = client.post(target, body) if method == "POST" else None
                        reply = reply or (
                            client.put(target, body) if method == "PUT" else client.request(method, target)
                        )
                        fine = name in allowed and (key != "mine" or topic == "mine")
                        assert (reply.status != 403) == fine, (key, topic, name, reply.status)
        with server.client() as nobody:
            expect_error(nobody.get(topic_path("mine", "/groups")), 401, "unauthorized")


def test_a_commit_survives_a_kill(tmp_path: Path) -> None:
    with Server(tmp_path).start() as server:
        with server.client() as api:
            api.create_topic("t", durability="fsync")
            api.write("t", *range(5))
            commit(api, "t", 3)
            expect_success(api.put(at("t"), {"hold_bytes": 77}))
        server.kill()
        server.start()
        with server.client() as api:
            found = expect_success(api.get(at("t")))
            assert (found["position"], found["hold_bytes"], found["lag"]["records"]) == (3, 77, 2)


def test_lag_is_a_metric(api: Api, ten_records: str) -> None:
    commit(api, ten_records, 8)
    text = api.get("/v0/metrics").body.decode()
    assert f'tidelog_group_lag_records{{group="g",topic="{ten_records}"}} 2\n' in text
    assert f'tidelog_group_lag_bytes{{group="g",topic="{ten_records}"}} 2\n' in text
    assert f'tidelog_group_lag_seconds{{group="g",topic="{ten_records}"}}' in text
    assert "\ntidelog_group_hold_broken_total " in text
