"""§2.8, §3.6, §1.5, §1.12: routers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.contract_http.api import Api, expect_error, expect_success
from tests.contract_http.client import Reply
from tests.contract_http.server import Server
from tests.kit.waiting import eventually

Name = Callable[[str], str]
OPTIONS: dict[str, Any] = {
    "preserve_node": True,
    "preserve_tag": True,
    "filter": None,
    "allow_cycle": False,
    "guarantee": "at_least_once",
}


def router(name: str, query: str = "") -> str:
    return f"/v0/routers/{quote(name, safe='')}{query}"


def put(api: Api, name: str, source: str, dest: str, **options: Any) -> Reply:
    return api.put(router(name), {"source": source, "dest": dest, **options})


def made(api: Api, name: str, source: str, dest: str, **options: Any) -> dict[str, Any]:
    return expect_success(put(api, name, source, dest, **options), 201)


def total(api: Api, name: str) -> int:
    found = expect_success(api.get(router(name)))["forwarded_total"]
    assert isinstance(found, int)
    return found


def datas(api: Api, topic: str, **body: Any) -> list[Any]:
    return [record["data"] for record in api.diff(topic, **body)["records"]]


# ── PUT, GET, DELETE ──────────────────────────────────────────────────────────────────────────


def test_put_makes_a_router_and_its_topics(api: Api, name: Name) -> None:
    """§2.8: 201 with the whole router, then 200; source and dest are made with default configs."""
    a, b, r = name("a"), name("b"), f"{name('a')}>{name('b')}"
    said = made(api, r, a, b)
    assert said.keys() == {"router", "created", "source", "dest", *OPTIONS, "performance"}
    assert {key: said[key] for key in OPTIONS} == OPTIONS
    assert (said["router"], said["source"], said["dest"], said["created"]) == (r, a, b, True)
    assert api.exists(a)
    assert api.exists(b)
    again = expect_success(put(api, r, a, b))
    assert (again["created"], again["router"]) == (False, r)
    got = expect_success(api.get(router(r)))
    assert got.keys() == {"router", "source", "dest", *OPTIONS, "forwarded_total", "performance"}
    assert got["forwarded_total"] == 0


def test_options_are_replaced_and_what_was_passed_on_stays(api: Api, name: Name) -> None:
    """§2.8: a changed PUT is 200, keeps cursor and total; what it leaves out takes its default."""
    a, b, r = name("a"), name("b"), name("r")
    made(api, r, a, b, preserve_tag=False, guarantee="exactly_once")
    api.records(a, {"data": 1, "tag": "x"})
    assert total(api, r) == 1
    said = expect_success(put(api, r, a, b, filter="x*"))
    assert (said["preserve_tag"], said["guarantee"], said["filter"]) == (True, "at_least_once", ["tag", "Glob", "x*"])
    api.records(a, {"data": 2, "tag": "x"}, {"data": 3})
    assert total(api, r) == 2
    records = api.diff(b, include_tags=True)["records"]
    assert [(record["data"], record.get("$tag")) for record in records] == [(1, None), (2, "x")]
    assert "_topics_router" in records[0]["meta"]
    assert "meta" not in records[1]


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        (None, None),
        ("v", ["tag", "Eq", "v"]),
        ("p*", ["tag", "Glob", "p*"]),
        (["tag", "Eq", "v*"], ["tag", "Eq", "v*"]),
        (["tag", "Glob", "*"], ["tag", "Glob", "*"]),
    ],
)
def test_filter_is_returned_in_one_form(api: Api, name: Name, given: object, echoed: object) -> None:
    """§2.8, §2.7: the grammar of a match; the answer always has three parts."""
    r = name("r")
    assert made(api, r, name("a"), name("b"), filter=given)["filter"] == echoed
    assert expect_success(api.get(router(r)))["filter"] == echoed


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"source": "a"},
        {"dest": "b"},
        {"source": 1, "dest": "b"},
        {"source": "a", "dest": None},
        {"source": "a", "dest": "a"},
        {"source": "-a", "dest": "b"},
        {"source": "a", "dest": "b>"},
        {"source": "a", "dest": "b", "preserve_node": None},
        {"source": "a", "dest": "b", "preserve_tag": 1},
        {"source": "a", "dest": "b", "create_dest": "yes"},
        {"source": "a", "dest": "b", "allow_cycle": 0},
        {"source": "a", "dest": "b", "guarantee": "once"},
        {"source": "a", "dest": "b", "guarantee": None},
        {"source": "a", "dest": "b", "filter": ["tag", "Glob", "x"]},
        {"source": "a", "dest": "b", "filter": ["node", "Eq", "x"]},
        {"source": "a", "dest": "b", "filter": 7},
    ],
)
def test_what_is_no_router_is_refused_and_makes_nothing(api: Api, name: Name, body: dict[str, Any]) -> None:
    """§1.6, §1.7, §2.8."""
    own = {key: name(value) if value in ("a", "b") else value for key, value in body.items()}
    expect_error(api.put(router(name("r")), own), 400, "invalid_request")
    for end in "ab":
        assert not api.exists(name(end))
    expect_error(api.get(router(name("r"))), 404, "router_not_found", {"router": name("r")})


@pytest.mark.parametrize("bad", ["-r", ">r", "r r", "ü", "x" * 256])
def test_a_router_has_a_name(api: Api, name: Name, bad: str) -> None:
    """§1.7: a topic's characters and `>`, not first; elsewhere such a name is just not there."""
    expect_error(put(api, bad, name("a"), name("b")), 400, "invalid_request")
    assert not api.exists(name("a"))
    expect_error(api.get(router(bad)), 404, "router_not_found", {"router": bad})
    assert expect_success(api.delete(router(bad)))["deleted"] is False


def test_a_dest_that_must_be_there(api: Api, name: Name) -> None:
    """§2.8: create_dest false and no dest is a 404 that makes nothing."""
    a, b, r = name("a"), name("b"), name("r")
    expect_error(put(api, r, a, b, create_dest=False), 404, "topic_not_found", {"topic": b})
    assert not api.exists(a)
    api.create_topic(b)
    made(api, r, a, b, create_dest=False)


def test_delete_stops_and_copies_stay(api: Api, name: Name) -> None:
    """§2.8: 200 always; a router that is made again begins at the head of its source, with a total of 0."""
    a, b, r = name("a"), name("b"), name("r")
    made(api, r, a, b)
    api.write(a, 1, 2)
    said = expect_success(api.delete(router(r)))
    assert said.keys() == {"router", "deleted", "performance"}
    assert (said["router"], said["deleted"]) == (r, True)
    assert expect_success(api.delete(router(r)))["deleted"] is False
    expect_error(api.get(router(r)), 404, "router_not_found", {"router": r})
    api.write(a, 3)
    assert datas(api, b) == [1, 2]
    made(api, r, a, b)
    assert total(api, r) == 0
    api.write(a, 4)
    assert datas(api, b) == [1, 2, 4]
    assert total(api, r) == 1


def test_other_methods(api: Api, name: Name) -> None:
    """§1.3."""
    expect_error(api.post(router(name("r")), {}), 405, "method_not_allowed")
    expect_error(api.put("/v0/routers", {}), 405, "method_not_allowed")


# ── lists ─────────────────────────────────────────────────────────────────────────────────────


def test_a_list_is_sorted_filtered_and_paged(api: Api, name: Name) -> None:
    """§2.8, §1.10."""
    a, b, prefix = name("a"), name("b"), name("r")
    for number in (3, 1, 4, 0, 2):
        made(api, f"{prefix}{number}", a if number % 2 else b, name(f"d{number}"))
    api.write(a, 1)
    assert total(api, f"{prefix}1") == 1
    listed = expect_success(api.get(f"/v0/routers?prefix={prefix}"))
    assert listed.keys() == {"routers", "performance"}
    assert [row["router"] for row in listed["routers"]] == [f"{prefix}{number}" for number in range(5)]
    assert listed["routers"][1] == {
        "router": f"{prefix}1",
        "source": a,
        "dest": name("d1"),
        "guarantee": "at_least_once",
        "forwarded_total": 1,
    }
    of_a = expect_success(api.get(f"/v0/routers?source={a}"))["routers"]
    assert [row["router"] for row in of_a] == [f"{prefix}1", f"{prefix}3"]
    to_d4 = expect_success(api.get(f"/v0/routers?dest={name('d4')}"))["routers"]
    assert [row["router"] for row in to_d4] == [f"{prefix}4"]
    found, cursor = [], ""
    for _ in range(3):
        page = expect_success(api.get(f"/v0/routers?prefix={prefix}&page_size=2&cursor={cursor}"))
        found.append([row["router"][-1] for row in page["routers"]])
        cursor = page.get("next_cursor", "")
    assert (found, cursor) == ([["0", "1"], ["2", "3"], ["4"]], "")
    expect_error(api.get("/v0/routers?cursor=%%%not-base64%%%"), 400, "invalid_request")


# ── passing on ────────────────────────────────────────────────────────────────────────────────


def test_copies_come_in_order_with_seqs_of_their_own(api: Api, name: Name) -> None:
    """§3.6: read-your-writes for diff and state; data and meta verbatim; node and tag kept; no backfill."""
    a, b, r = name("a"), name("b"), name("r")
    api.write(a, "before")
    made(api, r, a, b)
    api.records(a, {"data": {"n": 1}, "tag": "t", "node": "n", "meta": {"k": [1]}}, {"data": None})
    api.write(a, "third")
    assert api.state(b)["head_seq"] == 3
    records = api.diff(b, include_tags=True)["records"]
    assert [record["$seq"] for record in records] == [1, 2, 3]
    assert records[0] | {"$ts": 0} == {
        "$seq": 1,
        "$ts": 0,
        "$node": "n",
        "$tag": "t",
        "data": {"n": 1},
        "meta": {"k": [1]},
    }
    assert [record["data"] for record in records[1:]] == [None, "third"]
    assert total(api, r) == 3
    assert datas(api, b, node="n") == [None, "third"], "the node of a copy is left out as well"


def test_node_and_tag_can_be_dropped(api: Api, name: Name) -> None:
    """§3.6."""
    a, b = name("a"), name("b")
    made(api, name("r"), a, b, preserve_node=False, preserve_tag=False)
    api.records(a, {"data": 1, "tag": "t", "node": "n"})
    (copy,) = api.diff(b, include_tags=True)["records"]
    assert copy.keys() == {"$seq", "$ts", "data"}


def test_a_filter_keeps_back_and_its_total_counts_copies(api: Api, name: Name) -> None:
    """§3.6: untagged records never match."""
    a, b, r = name("a"), name("b"), name("r")
    made(api, r, a, b, filter="chat-42:*")
    tags = ("chat-42:a", "chat-420:c", None, "chat-42:", "x")
    api.records(a, *({"data": number, "tag": tag} for number, tag in enumerate(tags)))
    assert datas(api, b) == [0, 3]
    assert total(api, r) == 2


def test_direct_writes_interleave(api: Api, name: Name) -> None:
    """§3.6."""
    a, b = name("a"), name("b")
    made(api, name("r"), a, b)
    api.write(a, 1)
    assert datas(api, b) == [1]
    assert api.write(b, "direct")["first_seq"] == 2
    api.write(a, 2)
    assert datas(api, b) == [1, "direct", 2]


def test_a_chain_is_followed_to_its_end(api: Api, name: Name) -> None:
    """§3.6: recursing is better than eventual."""
    ends = [name(letter) for letter in "abcd"]
    for source, dest in pairwise(ends):
        made(api, f"{source}>{dest}", source, dest)
    api.write(ends[0], 1, 2)
    assert datas(api, ends[3]) == [1, 2]


def test_two_routers_between_two_topics(api: Api, name: Name) -> None:
    """§3.6: the same source twice is allowed."""
    a, b = name("a"), name("b")
    made(api, name("r1"), a, b)
    made(api, name("r2"), a, b, filter="x", preserve_tag=False)
    api.records(a, {"data": 1, "tag": "x"}, {"data": 2})
    records = api.diff(b, include_tags=True)["records"]
    assert [(record["data"], record.get("$tag")) for record in records] == [(1, "x"), (1, None), (2, None)]
    assert (total(api, name("r1")), total(api, name("r2"))) == (2, 1)


def test_what_was_lost_at_the_source_is_a_gap_at_the_dest(api: Api, name: Name) -> None:
    """§3.6, §3.4: one hole a record, counted, and told as source_trim."""
    a, b, r = name("a"), name("b"), name("r")
    api.create_topic(a, cap_records=2)
    made(api, r, a, b)
    api.write(a, *range(5))
    page = api.diff(b)
    assert page["tombstone"] == {
        "gap_from": 1,
        "gap_to": 3,
        "reason": "source_trim",
        "missed_estimate": 3,
        "earliest_seq": 4,
        "head_seq": 5,
    }
    assert [(record["$seq"], record["data"]) for record in page["records"]] == [(4, 3), (5, 4)]
    assert total(api, r) == 5


def test_what_was_deleted_at_the_source_stays_at_the_dest(api: Api, name: Name) -> None:
    """§3.6: deletes never propagate."""
    a, b = name("a"), name("b")
    made(api, name("r"), a, b)
    api.records(a, {"data": 1, "tag": "t"}, {"data": 2})
    assert api.remove(a, match="t")["deleted"] == 1
    assert datas(api, b) == [1, 2]


def test_full_dest_delays_its_source_and_nothing_is_lost(api: Api, name: Name) -> None:
    """§3.6: 4 records into a cap of 2 are 2, and the rest when there is room."""
    a, b, r = name("a"), name("b"), name("r")
    api.create_topic(b, cap_records=2, discard="reject")
    made(api, r, a, b)
    api.write(a, 1, 2, 3, 4)
    assert datas(api, b) == [1, 2]
    assert total(api, r) == 2
    api.remove(b, before_seq=3)
    assert datas(api, b) == [3, 4]
    assert total(api, r) == 4


def test_exactly_once_records_the_origin_of_a_copy(api: Api, name: Name) -> None:
    """§3.6: beside what meta there is, and instead of it where it has no room."""
    a, b, r = name("a"), name("b"), name("r")
    made(api, r, a, b, guarantee="exactly_once")
    full = {f"k{number}": number for number in range(64)}
    api.records(a, {"data": 1}, {"data": 2, "meta": {"k": 1}}, {"data": 3, "meta": full})
    metas = [record["meta"] for record in api.diff(b)["records"]]
    for seq, meta in enumerate(metas, 1):
        told = meta["_topics_router"]
        assert told["idempotency_key"].startswith(f"router:{r}:")
        assert told["idempotency_key"].endswith(f":{seq}")
        assert (told["router"], told["source_topic"], told["source_seq"]) == (r, a, seq)
        assert told.keys() == {
            *("idempotency_key", "router", "source_topic", "source_topic_id", "source_epoch", "source_seq")
        }
    assert metas[0].keys() == {"_topics_router"}
    assert metas[1] == {"k": 1, "_topics_router": metas[1]["_topics_router"]}
    assert metas[2] == {"_topics_router": metas[2]["_topics_router"], "_topics_original_meta": full}


def test_a_meta_at_its_limit_does_not_hold_up_exactly_once(api: Api, name: Name) -> None:
    """Appendix D 11: it is kept, and so is the evidence."""
    a, b, r = name("a"), name("b"), name("r")
    made(api, r, a, b, guarantee="exactly_once")
    meta = {"k": "x" * (16_384 - 8)}
    api.records(a, {"data": 1, "meta": meta}, {"data": 2})
    copies = api.diff(b)["records"]
    assert [record["data"] for record in copies] == [1, 2]
    assert copies[0]["meta"]["k"] == meta["k"]


def test_a_parked_reader_is_woken_by_a_copy(server: Server, api: Api, name: Name) -> None:
    """§3.6, §2.6: a background worker covers those who wait; streams and long polls."""
    a, b = name("a"), name("b")
    made(api, name("r"), a, b)
    with server.events(api.watch({b: {}})["stream_url"]) as stream:
        stream.expect("caught-up")
        api.write(a, 1)
        stream.expect("record", "caught-up")


def test_watch_marks_of_a_dest_are_fresh(api: Api, name: Name) -> None:
    """Appendix D 7: tail is behind what routers have yet to bring."""
    a, b = name("a"), name("b")
    made(api, name("r"), a, b)
    api.write(a, 1, 2)
    assert api.watch({b: {"tail": True}})["topics"][b] == {"from_seq": 2, "head_seq": 2, "earliest_seq": 1}


# ── what may not be ───────────────────────────────────────────────────────────────────────────


def test_a_dest_has_one_source(api: Api, name: Name) -> None:
    """§3.6: 409 for another one, cycles allowed or not; nothing is made."""
    a, b, c = name("a"), name("b"), name("c")
    made(api, name("r"), a, b)
    for allow in (False, True):
        reply = put(api, name("s"), c, b, allow_cycle=allow)
        expect_error(reply, 409, "topic_exists_incompatible", {"topic": b, "reason": "router_dest_fan_in"})
    assert not api.exists(c)
    expect_success(api.delete(router(name("r"))))
    made(api, name("s"), c, b)


def test_a_router_never_leads_elsewhere(api: Api, name: Name) -> None:
    """§2.8: re-pointing is refused."""
    a, b, r = name("a"), name("b"), name("r")
    made(api, r, a, b)
    detail = {"router": r, "reason": "router_repoint_forbidden", "existing_source": a, "existing_dest": b}
    expect_error(put(api, r, a, name("c")), 409, "topic_exists_incompatible", detail)
    assert not api.exists(name("c"))


def test_cycle_is_refused_and_reported(api: Api, name: Name) -> None:
    """§3.6: the new source is first and last; a router's own way does not count."""
    a, b, c = name("a"), name("b"), name("c")
    made(api, name("r1"), a, b)
    made(api, name("r2"), b, c)
    expect_error(put(api, name("r3"), c, a), 409, "router_cycle", {"cycle": [c, a, b, c]})
    assert expect_success(put(api, name("r2"), b, c))["created"] is False


def test_a_mirror_comes_to_rest(api: Api, name: Name) -> None:
    """§3.6: hops are bounded; the write returns, and both heads stay small."""
    a, b = name("a"), name("b")
    made(api, name("r1"), a, b)
    made(api, name("r2"), b, a, allow_cycle=True)
    assert api.write(a, 1)["first_seq"] == 1
    eventually(lambda: (api.state(a)["head_seq"], api.state(b)["head_seq"]) == (5, 4))
    assert 1 <= api.state(a)["head_seq"] <= 9


def test_dropping_an_end_drops_the_router(api: Api, name: Name) -> None:
    """§2.4: either end; sorted names; copies stay."""
    a, b, c = name("a"), name("b"), name("c")
    made(api, name("r2"), a, b)
    made(api, name("r1"), b, c)
    api.write(a, 1, 2)
    assert datas(api, c) == [1, 2]
    assert api.drop(b)["routers_removed"] == [name("r1"), name("r2")]
    assert datas(api, c) == [1, 2]
    assert expect_success(api.get(f"/v0/routers?source={a}"))["routers"] == []
    api.write(a, 3)
    assert not api.exists(b)
    made(api, name("r2"), a, b)
    assert api.drop(a)["routers_removed"] == [name("r2")]


# ── keys and caps ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def keyed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = "root,admin:admin,reader:read,mine:rw+admin+delete:m-|r-"
    with Server(tmp_path_factory.mktemp("locked"), api_keys=keys, max_routers=2).start() as running:
        yield running


def test_routers_need_scopes_and_prefixes(keyed_server: Server) -> None:
    """§1.3, §1.5: name, source and dest; of a body with the name, of the path without; lists are filtered."""
    with (
        keyed_server.client("root") as root,
        keyed_server.client("mine") as mine,
        keyed_server.client("reader") as reader,
    ):
        expect_error(reader.put(router("r-1"), {"source": "m-a", "dest": "m-b"}), 403, "forbidden")
        expect_error(reader.delete(router("r-1")), 403, "forbidden")
        expect_error(mine.put(router("x"), {"source": "m-a", "dest": "m-b"}), 403, "forbidden")
        expect_error(put(mine, "r-1", "a", "m-b"), 403, "forbidden", {"topic": "a"})
        expect_error(put(mine, "r-1", "m-a", "b"), 403, "forbidden", {"topic": "b"})
        made(mine, "r-1", "m-a", "m-b")
        made(root, "r-2", "m-a", "other")
        assert [row["router"] for row in expect_success(mine.get("/v0/routers"))["routers"]] == ["r-1"]
        assert [row["router"] for row in expect_success(reader.get("/v0/routers"))["routers"]] == ["r-1", "r-2"]
        expect_error(mine.get(router("r-2")), 403, "forbidden", {"topic": "other"})
        expect_error(mine.delete(router("r-2")), 403, "forbidden", {"topic": "other"})
        expect_error(mine.get(router("r-3")), 404, "router_not_found", {"router": "r-3"})
        # §1.12: the cap; a refused router leaves no topic, and what is there can be put again.
        expect_error(put(root, "r-3", "new-a", "new-b"), 429, "throttled", {"limit": "routers", "max": 2})
        assert not root.exists("new-a")
        assert not root.exists("new-b")
        assert expect_success(put(mine, "r-1", "m-a", "m-b"))["created"] is False
        assert root.metrics()["routers"] == 2
        expect_success(root.delete(router("r-2")))
        made(root, "r-3", "new-a", "new-b")
        expect_success(root.delete(router("r-3")))
        expect_success(root.delete(router("r-1")))


def test_a_topic_cap_refuses_the_router_as_a_whole(tmp_path: Path) -> None:
    """§1.12, §2.8: what was made for it goes again."""
    with Server(tmp_path, max_topics=1).start() as running, running.client() as api:
        expect_error(put(api, "r", "a", "b"), 429, "throttled", {"limit": "topics", "max": 1})
        assert api.topics()["topics"] == []
        assert expect_success(api.get("/v0/routers"))["routers"] == []


# ── restart ───────────────────────────────────────────────────────────────────────────────────


def test_what_a_restart_keeps_of_routers(tmp_path: Path) -> None:
    """§3.6, §4: routers with their options, totals, cursors and the seqs of copies; the trim mark; no backfill."""
    with Server(tmp_path).start() as running:
        with running.client() as api:
            api.create_topic("a", durability="fsync", cap_records=3)
            api.create_topic("b", durability="fsync")
            api.write("a", "before")
            made(api, "r", "a", "b", filter=None, preserve_tag=False)
            api.write("a", *range(5))
            assert datas(api, "b") == [2, 3, 4]
            api.write("b", "direct")
            api.write("a", 5)
            before = api.diff("b")
            assert before["tombstone"]["reason"] == "source_trim"
        for end in ("kill", "stop"):
            getattr(running, end)()
            running.start()
            with running.client() as api:
                after = api.diff("b")
                keys = ("tombstone", "head_seq", "earliest_seq")
                assert [after[key] for key in keys] == [before[key] for key in keys]
                shown = [[(record["$seq"], record["data"]) for record in page["records"]] for page in (before, after)]
                assert shown[0] == shown[1], end
                assert expect_success(api.get(router("r")))["preserve_tag"] is False
                assert total(api, "r") == 6
        with running.client() as api:
            api.write("a", 6)
            assert datas(api, "b", from_seq=before["head_seq"]) == [6]
