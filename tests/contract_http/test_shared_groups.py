"""Consumers that share a group over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract_http.api import ANY, Api, expect_error, expect_success, topic_path
from tests.contract_http.server import Server
from tests.kit.waiting import run_together


def post(api: Api, topic: str, verb: str, **body: Any) -> dict[str, Any]:
    return expect_success(api.post(topic_path(topic, f"/groups/g/{verb}"), body))


def claim(api: Api, topic: str, consumer: str, limit: int, **more: Any) -> tuple[int, list[int]]:
    found = post(api, topic, "claim", consumer=consumer, limit=limit, **more)
    return found["lease"]["lease_id"], [record["$seq"] for record in found["records"]]


@pytest.fixture
def ten_records(api: Api, topic: str) -> str:
    api.write(topic, *range(10))
    return topic


def test_consumers_share_the_records_and_the_position_follows_the_acks(api: Api, ten_records: str) -> None:
    one, first = claim(api, ten_records, "a", 4)
    two, second = claim(api, ten_records, "b", 4)
    assert (first, second) == ([1, 2, 3, 4], [5, 6, 7, 8])
    done = post(api, ten_records, "ack", consumer="b", lease_ids=[two])
    assert (done["settled"], done["void"], done["position"]) == (1, [], 0)
    rows = expect_success(api.get(topic_path(ten_records, "/groups/g/consumers")))["consumers"]
    assert rows == [{"consumer": "a", "leases": 1, "first_seq": 1, "last_seq": 4}]
    done = post(api, ten_records, "ack", consumer="a", lease_ids=[one, two])
    assert (done["settled"], done["void"], done["position"]) == (1, [two], 8)
    assert expect_success(api.get(topic_path(ten_records, "/groups/g")))["position"] == 8


def test_a_claim_has_the_fields_of_a_page(api: Api, topic: str) -> None:
    api.create_topic(topic, cap_records=2)
    api.write(topic, *range(5))
    found = post(api, topic, "claim", consumer="a", limit=9, lease_ms=5_000)
    del found["performance"]
    lease_id = found["lease"].pop("lease_id")
    assert isinstance(lease_id, int)
    assert found["lease"] == {"consumer": "a", "first_seq": 1, "last_seq": 5, "lease_ms": 5_000}
    assert (found["tombstone"]["gap_from"], found["tombstone"]["gap_to"]) == (1, 3)
    assert (found["next_from_seq"], found["head_seq"], found["caught_up"]) == (5, 5, True)
    nothing = post(api, topic, "claim", consumer="a")
    assert (nothing["lease"], nothing["records"]) == (None, [])


def test_released_extended_and_left_ranges(api: Api, ten_records: str) -> None:
    one, _ = claim(api, ten_records, "a", 2)
    two, _ = claim(api, ten_records, "a", 2)
    assert post(api, ten_records, "release", consumer="a", lease_ids=[one])["settled"] == 1
    assert post(api, ten_records, "extend", consumer="a", lease_ids=[one, two], lease_ms=60_000)["void"] == [one]
    assert claim(api, ten_records, "b", 9)[1] == [1, 2]
    assert post(api, ten_records, "leave", consumer="a")["returned"] == 1
    assert claim(api, ten_records, "b", 9)[1] == [3, 4]


def test_a_claim_waits_for_a_record_and_for_a_range_that_another_consumer_returns(
    server: Server, api: Api, ten_records: str
) -> None:
    lease, _ = claim(api, ten_records, "a", 10)

    def wait() -> list[int]:
        with server.client() as client:
            found = expect_success(
                client.post(
                    topic_path(ten_records, "/groups/g/claim"), {"consumer": "b", "limit": 3, "wait_ms": 10_000}
                )
            )
            return [record["$seq"] for record in found["records"]]

    def release() -> int:
        settled: int = post(api, ten_records, "release", consumer="a", lease_ids=[lease])["settled"]
        return settled

    assert run_together([wait, release]) == [[1, 2, 3], 1]
    claim(api, ten_records, "c", 10)

    def write() -> int:
        with server.client() as client:
            return len(client.write(ten_records, "new")["seqs"])

    assert run_together([wait, write]) == [[11], 1]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"consumer": ""},
        {"consumer": "x" * 256},
        {"consumer": "a", "lease_ms": 0},
        {"consumer": "a", "lease_ms": 86_400_001},
        {"consumer": "a", "limit": -1},
    ],
)
def test_a_bad_claim_is_refused(api: Api, ten_records: str, body: dict[str, Any]) -> None:
    expect_error(api.post(topic_path(ten_records, "/groups/g/claim"), body), 400, "invalid_request", ANY)
    assert expect_success(api.get(topic_path(ten_records, "/groups/g/consumers")))["consumers"] == []


def test_a_missing_topic_is_not_found(api: Api) -> None:
    expect_error(api.post(topic_path("missing", "/groups/g/claim"), {"consumer": "a"}), 404, "topic_not_found", ANY)
