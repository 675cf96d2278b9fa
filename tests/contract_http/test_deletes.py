"""§2.7: deleting records."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract_http.api import Api, expect_error, record_bytes, topic_path
from tests.contract_http.server import Server
from tests.kit.waiting import run_together

DELETED = {"topic", "deleted", "earliest_seq", "head_seq", "count", "bytes", "performance"}
TAGS = ["chat-42:a", "chat-42:b", "chat-420:c", "chat-42", None, None, "other", "chat-42:*"]


@pytest.fixture
def tagged(api: Api, topic: str) -> str:
    """A topic with a record for each of TAGS, seqs from 1."""
    api.records(topic, *({"data": number, "tag": tag} for number, tag in enumerate(TAGS, 1)))
    return topic


def test_the_answer_to_a_delete(api: Api, topic: str) -> None:
    """§2.7: seven keys, of the topic as it is after it."""
    api.records(topic, {"data": "abc", "tag": "a"}, {"data": 1, "tag": "b", "meta": {"m": 1}}, {"data": 2})
    gone = api.remove(topic, before_seq=2)
    assert gone.keys() == DELETED
    del gone["performance"]
    left = record_bytes(1, {"m": 1}) + record_bytes(2)
    assert gone == {"topic": topic, "deleted": 1, "earliest_seq": 2, "head_seq": 3, "count": 2, "bytes": left}
    gone = api.remove(topic, before_seq=99)
    assert (gone["deleted"], gone["earliest_seq"], gone["head_seq"], gone["count"], gone["bytes"]) == (2, 4, 3, 0, 0)


@pytest.mark.parametrize(
    ("before", "deleted"), [(0, 0), (1, 0), (2, 1), (5, 4), (6, 5), (7, 5), (1000, 5), ((1 << 64) - 1, 5)]
)
def test_before_a_seq(api: Api, topic: str, before: int, deleted: int) -> None:
    """§2.7: seq < min(before_seq, head + 1)."""
    api.write(topic, *range(5))
    assert api.remove(topic, before_seq=before)["deleted"] == deleted
    assert api.seqs(topic) == list(range(deleted + 1, 6))
    assert api.write(topic, "later")["seqs"] == [6]
    assert api.seqs(topic, from_seq=5) == [6], "what comes later is never swept"


@pytest.mark.parametrize(
    ("match", "seqs"),
    [
        (["tag", "Eq", "chat-42"], [4]),
        (["tag", "Eq", "nothing"], []),
        (["tag", "Eq", ""], []),
        (["tag", "Eq", "chat-42:*"], [8]),
        ("chat-42", [4]),
        ("chat-42:a", [1]),
        ("nothing", []),
        (["tag", "Glob", "chat-42:*"], [1, 2, 8]),
        ("chat-42:*", [1, 2, 8]),
        (["tag", "Glob", "chat-42*"], [1, 2, 3, 4, 8]),
        (["tag", "Glob", "chat-42:**"], [8]),
        (["tag", "Glob", "*"], [1, 2, 3, 4, 7, 8]),
        ("*", [1, 2, 3, 4, 7, 8]),
        (["tag", "Glob", "Chat*"], []),
    ],
)
def test_what_matches(api: Api, tagged: str, match: Any, seqs: list[int]) -> None:
    """§2.7, B16: Eq and Glob; a prefix is literal, only the last `*` is special; without a tag nothing matches."""
    gone = api.remove(tagged, match=match)
    left = [seq for seq in range(1, len(TAGS) + 1) if seq not in seqs]
    assert (gone["deleted"], gone["count"]) == (len(seqs), len(left))
    assert api.seqs(tagged) == left
    assert gone["earliest_seq"] == left[0]
    assert api.remove(tagged, match=match)["deleted"] == 0, "once"


def test_an_empty_tag_is_no_tag(api: Api, topic: str) -> None:
    """§2.7: a record without a tag never matches. The contract sets no least length; ours is one (docs/http.md)."""
    api.records(topic, {"data": 1, "tag": ""}, {"data": 2}, {"data": 3, "tag": "a"})
    assert [record.get("$tag") for record in api.diff(topic, include_tags=True)["records"]] == [None, None, "a"]
    assert api.remove(topic, match=["tag", "Eq", ""])["deleted"] == 0
    assert api.remove(topic, match="*")["deleted"] == 1
    assert api.seqs(topic) == [1, 2]


def test_a_prefix_is_no_sibling(api: Api, tagged: str) -> None:
    """C: `chat-42:*` does not reach `chat-420:c`."""
    api.remove(tagged, match="chat-42:*")
    tags = [record.get("$tag") for record in api.diff(tagged, include_tags=True)["records"]]
    assert "chat-420:c" in tags


def test_both_selectors_must_hold(api: Api, tagged: str) -> None:
    """§2.7, C: below the seq and of the tag; others below stay."""
    gone = api.remove(tagged, before_seq=3, match=["tag", "Glob", "chat-42*"])
    assert gone["deleted"] == 2
    assert api.seqs(tagged) == [3, 4, 5, 6, 7, 8]
    assert api.remove(tagged, before_seq=1, match="*")["deleted"] == 0
    assert api.remove(tagged, before_seq=5, match="other")["deleted"] == 0
    assert api.remove(tagged, before_seq=999, match="other")["deleted"] == 1
    assert api.seqs(tagged) == [3, 4, 5, 6, 8]


@pytest.mark.parametrize(
    "match",
    [
        ["tag", "Eq"],
        ["tag"],
        [],
        ["tag", "Eq", "a", "b"],
        ["node", "Eq", "a"],
        ["Tag", "Eq", "a"],
        ["tag", "eq", "a"],
        ["tag", "EQ", "a"],
        ["tag", "glob", "a*"],
        ["tag", "Like", "a"],
        ["tag", "", "a"],
        ["tag", "Eq", 1],
        ["tag", "Eq", None],
        ["tag", 1, "a"],
        [1, "Eq", "a"],
        ["tag", "Glob", "a"],
        ["tag", "Glob", ""],
        ["tag", "Glob", "*a"],
        ["tag", "Glob", 1],
        1,
        True,
        {},
        {"tag": "a"},
    ],
)
def test_what_is_no_selector_is_400(api: Api, tagged: str, match: Any) -> None:
    """§2.7: and nothing is deleted; also beside a good `before_seq`, and before the topic is looked for."""
    expect_error(api.post(topic_path("nowhere", "/delete"), {"match": match}), 400, "invalid_request")
    expect_error(api.post(topic_path(tagged, "/delete"), {"match": match}), 400, "invalid_request")
    expect_error(api.post(topic_path(tagged, "/delete"), {"match": match, "before_seq": 99}), 400, "invalid_request")
    assert api.state(tagged)["count"] == len(TAGS)


def test_no_selector_at_all_is_400_before_the_topic_is_looked_for(api: Api, topic: str) -> None:
    """§2.7: 400, then 404."""
    for body in ({}, {"before_seq": None}, {"match": None}, {"before_seq": None, "match": None}):
        expect_error(api.post(topic_path(topic, "/delete"), body), 400, "invalid_request")
    expect_error(api.post(topic_path(topic, "/delete"), {"before_seq": 1}), 404, "topic_not_found", {"topic": topic})
    expect_error(api.post(topic_path(topic, "/delete"), {"match": "a"}), 404, "topic_not_found", {"topic": topic})
    assert not api.exists(topic)


def test_get_on_delete_is_405(api: Api, topic: str) -> None:
    """C."""
    expect_error(api.get(topic_path(topic, "/delete")), 405, "method_not_allowed")


def test_a_tag_may_be_used_again_after_its_records_went(api: Api, topic: str) -> None:
    """§2.7: the bound is the head at the time of the call."""
    api.records(topic, {"data": 1, "tag": "a"})
    assert api.remove(topic, match="a")["deleted"] == 1
    api.records(topic, {"data": 2, "tag": "a"}, {"data": 3, "tag": "b"})
    assert api.seqs(topic) == [2, 3]
    assert api.remove(topic, match="a")["deleted"] == 1
    assert api.seqs(topic) == [3]


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_deletes_work_in_every_class(api: Api, topic: str, durability: str) -> None:
    """§4."""
    api.create_topic(topic, durability=durability)
    api.records(topic, *({"data": 1, "tag": tag} for tag in "abab"))
    assert api.remove(topic, match="a")["deleted"] == 2
    assert api.remove(topic, before_seq=3)["deleted"] == 1
    assert api.seqs(topic) == [4]


def test_count_and_bytes_agree_while_writers_and_deleters_race(api: Api, server: Server, topic: str) -> None:
    """§2.7: `count == 0 ⇒ bytes == 0`; nothing is deleted twice."""
    api.create_topic(topic)

    def write() -> int:
        with server.client() as client:
            return sum(client.records(topic, {"data": "xy", "tag": "t"})["count"] for _ in range(40))

    def remove() -> int:
        total = 0
        with server.client() as client:
            for _ in range(40):
                gone = client.remove(topic, match="t")
                assert gone["bytes"] == 4 * gone["count"]
                total += gone["deleted"]
        return total

    *deleted, written = run_together([remove, remove, write])
    last = api.remove(topic, match="t")
    assert sum(deleted) + last["deleted"] == written
    assert (last["count"], last["bytes"], last["earliest_seq"]) == (0, 0, written + 1)
