"""Names, access lists, promotion, settings: the rules alone."""

from __future__ import annotations

from typing import Any

import pytest

from tidelog.channels import rules
from tidelog.channels.rules import ChannelLimits
from tidelog.errors import AlreadyMember, BadInput, ChannelFull, Forbidden, NotMember
from tidelog.formats.small_files import ChannelMeta

LIMITS = ChannelLimits()


@pytest.mark.parametrize(
    "name",
    ["!room@host", "!a/b/c@example.org", "!A.b_c-1@localhost:8080", "!r@[::1]", "!r@127.0.0.1", f"!{'x' * 256}@h"],
)
def test_valid_channel_names(name: str) -> None:
    assert rules.check_channel(name) == name


@pytest.mark.parametrize(
    "name",
    *[["", "!", "room@host", "!room", "!@host", "!room@", "!ro om@host", "!rö@host", "!room@ho st", "!room@-host",
       f"!{'x' * 257}@host", "!room@host@other", "!room\n@host", "!../x@host\0", None, 7, b"!room@host",
       f"!r@{'a' * 254}", "!\ud800@host"]],
)  # fmt: skip
def test_invalid_channel_names(name: Any) -> None:
    with pytest.raises(BadInput):
        rules.check_channel(name)


@pytest.mark.parametrize("name", ["ann@host", "ann.b_c-1@example.org", "änn@host", "用户@host"])
def test_valid_user_names(name: str) -> None:
    assert rules.check_user(name) == name
    assert rules.check_entry(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "ann",
        "@host",
        "ann@",
        "an n@host",
        "a@b@c",
        "!ann@host",
        "ann\n@host",
        "\udc00@host",
        "ü" * 254 + "@hosting",
        3,
    ],
)
def test_invalid_user_names(name: Any) -> None:
    with pytest.raises(BadInput):
        rules.check_user(name)


@pytest.mark.parametrize(
    ("listed", "user", "allowed"),
    [
        ((), "ann@host", True),
        (("ann@host",), "ann@host", True),
        (("ann@host",), "bob@host", False),
        (("host",), "ann@host", True),
        (("host",), "ann@else", False),
        (("ann@host", "host"), "bob@host", False),  # users win
        (("ann@host", "host"), "ann@host", True),
        (("ann@host", "else"), "bob@else", True),  # users of another domain do not count
        (("sub.host",), "ann@host", False),
    ],
)
def test_access_lists_allow_users_and_domains(listed: tuple[str, ...], user: str, allowed: bool) -> None:
    assert rules.is_allowed(tuple(sorted(listed)), user) is allowed


def test_access_lists_are_sorted_sets() -> None:
    listed = rules.update_entries((), add=["b@h", "a@h", "b@h"])
    assert listed == ("a@h", "b@h")
    assert rules.update_entries(listed, remove=["a@h", "z@h"], add=["c.org"]) == ("b@h", "c.org")
    with pytest.raises(BadInput):
        rules.update_entries(listed, add=["not a name"])


def of(*members: str, **config: object) -> ChannelMeta:
    meta = rules.change_config(rules.new_channel("!room@host", LIMITS), config, LIMITS)
    for member in members:
        meta = rules.add_member(meta, member)
    return meta


def test_the_first_member_owns_and_members_are_sorted() -> None:
    meta = of("m@h", "z@h", "a@h")
    assert (meta.owner, meta.members) == ("m@h", ("a@h", "m@h", "z@h"))


def test_the_next_member_by_name_becomes_the_owner() -> None:
    done = rules.remove_member(of("m@h", "z@h", "b@h"), "m@h")
    assert done.meta is not None
    assert (done.meta.owner, done.promoted, done.meta.members) == ("b@h", "b@h", ("b@h", "z@h"))
    other = rules.remove_member(of("m@h", "z@h"), "z@h")
    assert other.meta is not None
    assert (other.meta.owner, other.promoted) == ("m@h", None)


def test_the_last_member_or_a_fifo_owner_that_leaves_ends_the_channel() -> None:
    assert rules.remove_member(of("m@h"), "m@h").meta is None
    assert rules.remove_member(of("m@h", "z@h", type="fifo", persist=True), "m@h").meta is None
    assert rules.remove_member(of("m@h", "z@h", type="fifo", persist=True), "z@h").meta is not None


def test_a_join_is_refused_twice_above_the_limit_and_by_the_list() -> None:
    meta = of("a@h", "b@h", max_clients=2)
    with pytest.raises(AlreadyMember):
        rules.add_member(meta, "a@h")
    with pytest.raises(ChannelFull):
        rules.add_member(meta, "c@h")
    with pytest.raises(Forbidden):
        rules.add_member(rules.change_acl(of("a@h"), "join", add=["b@h"]), "c@h")
    with pytest.raises(NotMember):
        rules.remove_member(meta, "c@h")


def test_the_owner_is_not_exempt_from_a_list() -> None:
    meta = rules.change_acl(of("a@h", "b@h"), "publish", add=["b@h"])
    with pytest.raises(Forbidden):
        rules.check_may_publish(meta, "a@h")
    rules.check_may_publish(meta, "b@h")


def test_an_access_list_has_at_most_max_clients_users() -> None:
    meta = of("a@h", max_clients=2)
    assert rules.change_acl(meta, "read", add=["x@h", "y@h", "dom.org", "two.org"]).acl.read[0] == "dom.org"
    with pytest.raises(Forbidden):
        rules.change_acl(meta, "read", add=["x@h", "y@h", "z@h"])
    with pytest.raises(BadInput):
        rules.change_acl(meta, "write", add=["x@h"])


@pytest.mark.parametrize(
    "changes",
    [
        {"max_clients": 101},
        {"max_clients": -1},
        {"max_clients": True},
        {"max_payload_size": (64 << 10) + 1},
        {"max_persist_messages": 1_001},
        {"message_flush_interval": 60_001},
        {"message_flush_interval": 0.5},
        {"persist": 1},
        {"persist": True, "max_persist_messages": 0},
        {"type": "queue"},
        {"type": "fifo"},
        {"colour": "red"},
    ],
)
def test_a_setting_out_of_bounds_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        rules.change_config(of("a@h"), changes, LIMITS)


def test_a_fifo_channel_cannot_change_its_type() -> None:
    meta = of("a@h", persist=True, type="fifo")
    for changes in ({"type": "pubsub"}, {"persist": False}):
        with pytest.raises(BadInput):
            rules.change_config(meta, changes, LIMITS)


def test_persist_needs_authentication() -> None:
    with pytest.raises(Forbidden):
        rules.change_config(of("a@h"), {"persist": True}, ChannelLimits(auth=False))


@pytest.mark.parametrize(("page", "size"), [(0, 10), (1, 0), (-1, 5), ("1", 5), (True, 5)])
def test_page_0_is_refused(page: Any, size: Any) -> None:
    with pytest.raises(BadInput):
        rules.page_of(("a", "b"), page, size)


def test_pages_are_counted_from_1_and_bounded() -> None:
    listed = tuple(f"{number:03}" for number in range(250))
    assert rules.page_of(listed, 1, 100_000) == listed[:100]
    assert rules.page_of(listed, 3, 100) == listed[200:]
    assert rules.page_of(listed, 4, 100) == ()


@pytest.mark.parametrize(
    "limit", [{"clients_max": 0}, {"shards": 0}, {"persist_messages_max": -1}, {"segment_bytes": 10}]
)
def test_invalid_limits_are_refused(limit: dict[str, int]) -> None:
    with pytest.raises(BadInput):
        ChannelLimits(**limit)  # type: ignore[arg-type]


def test_limits_are_shown_to_clients() -> None:
    shown = LIMITS.to_dict()
    assert shown["payload_bytes_max"] == 64 << 10
    assert shown["auth"] is True
