"""What a router is and which ones may be made: tables of cases."""

from __future__ import annotations

import msgspec
import pytest

from tidelog.engine.routing.forwarder import encode_evidence
from tidelog.engine.routing.router import (
    HopCounts,
    Router,
    check_cycle,
    check_endpoints,
    check_router_name,
    router_state,
)
from tidelog.errors import BadInput, RouterCycle, TopicExists
from tidelog.formats.control_frames import Match, MatchOp


def way(name: str, source: str, dest: str, *, allow_cycle: bool = False) -> Router:
    return Router(name=name, source=source, dest=dest, allow_cycle=allow_cycle)


@pytest.mark.parametrize("name", ["a", "a>b", "9", "a.b_c:d-e>", "x" * 255])
def test_valid_router_names(name: str) -> None:
    check_router_name(name)


@pytest.mark.parametrize("name", ["", ">a", "-a", "a b", "ä", "x" * 256, None, 7])
def test_invalid_router_names(name: object) -> None:
    with pytest.raises(BadInput, match="nothing was created"):
        check_router_name(name)


def test_a_dest_has_one_source_and_a_router_keeps_its_endpoints() -> None:
    there = [way("r", "a", "b"), way("s", "a", "b"), way("t", "b", "c")]
    assert check_endpoints(way("r", "a", "b"), there) is there[0]
    assert check_endpoints(way("new", "a", "b"), there) is None, "the same source twice"
    assert check_endpoints(way("new", "a", "d"), there) is None
    with pytest.raises(TopicExists) as fan_in:
        check_endpoints(way("new", "x", "b", allow_cycle=True), there)
    assert fan_in.value.detail == {"reason": "router_dest_fan_in"}
    with pytest.raises(TopicExists) as moved:
        check_endpoints(way("t", "b", "d"), there)
    assert moved.value.detail["reason"] == "router_repoint_forbidden"
    assert (moved.value.detail["existing_source"], moved.value.detail["existing_dest"]) == ("b", "c")
    with pytest.raises(TopicExists) as first:
        check_endpoints(way("t", "x", "b"), there)
    assert first.value.detail["reason"] == "router_dest_fan_in", "asked before the other"


def test_the_shortest_cycle_is_reported() -> None:
    there = [way("r1", "a", "b"), way("r2", "b", "c"), way("r3", "b", "d"), way("r4", "d", "e")]
    with pytest.raises(RouterCycle) as circle:
        check_cycle(way("new", "c", "a"), there)
    assert circle.value.cycle == ["c", "a", "b", "c"]
    with pytest.raises(RouterCycle) as circle:
        check_cycle(way("new", "e", "a"), there)
    assert circle.value.cycle == ["e", "a", "b", "d", "e"]
    check_cycle(way("new", "e", "a", allow_cycle=True), there)
    check_cycle(way("r2", "b", "c"), there)
    check_cycle(way("new", "c", "z"), there)


def test_a_router_goes_through_its_frame_and_back() -> None:
    for match in (None, Match(MatchOp.EXACT, "v"), Match(MatchOp.PREFIX, "p")):
        encoded = Router(
            name="r",
            source="a",
            dest="b",
            preserve_tag=False,
            exactly_once=True,
            match=match,
            start=3,
            dest_head_at_creation=9,
        )
        assert Router.from_body(encoded.to_body()) == encoded
        assert router_state(encoded, 4).forwarded_total == 4
    assert router_state(Router(name="r", source="a", dest="b", match=match), 0).filter == ("tag", "Glob", "p*")


def test_hops_are_kept_as_ranges() -> None:
    hops = HopCounts()
    assert not hops
    hops.add(3, 5, 1)
    hops.add(5, 7, 1)
    hops.add(9, 10, 2)
    assert hops.ranges_up_to(20) == ((3, 7, 1), (9, 10, 2))
    assert hops.ranges_up_to(5) == ((3, 6, 1),)
    assert hops.between(1, 12).tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 2, 0, 0]
    assert hops.between(4, 6).tolist() == [1, 1]
    hops.forget_below(7)
    assert hops.ranges_up_to(20) == ((9, 10, 2),)
    hops.forget_below(99)
    assert not hops


def test_evidence_is_added_to_any_meta() -> None:
    router, decode = way("r", "a", "b"), msgspec.json.decode
    evidence = {
        "idempotency_key": "router:r:7:7:3",
        "router": "r",
        "source_topic": "a",
        "source_topic_id": 7,
        "source_epoch": 7,
        "source_seq": 3,
    }
    full = {f"k{number}": number for number in range(64)}

    def encoded(meta: object) -> object:
        return decode(encode_evidence(b"" if meta is None else msgspec.json.encode(meta), router, 7, 3))

    assert encoded(None) == {"_topics_router": evidence}
    assert encoded({"a": 1.0}) == {"a": 1.0, "_topics_router": evidence}
    assert encoded({"a": 1, "_topics_router": "old"}) == {"a": 1, "_topics_router": evidence}, "of the last router"
    for old in ([1], "text", 7, full):
        assert encoded(old) == {"_topics_router": evidence, "_topics_original_meta": old}
