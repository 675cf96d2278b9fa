"""Keys, scopes and names: whatever does not parse is refused, and nothing opens by mistake."""

from __future__ import annotations

from hashlib import sha256

import pytest
from tests.unit.server.fakes import ServerHarness, run_scenario

from tidelog.errors import BadInput
from tidelog.server.auth import ADMIN, ALL_SCOPES, ANONYMOUS, DELETE, READ, WRITE, Keyring, bearer_token


@pytest.mark.parametrize(
    ("entry", "scopes", "prefixes"),
    [
        ("k", ALL_SCOPES, ()),
        ("k:read", {READ}, ()),
        ("k:r+W", {READ, WRITE}, ()),
        ("k:rw+del", {READ, WRITE, DELETE}, ()),
        ("k:admin+d+delete+a", {ADMIN, DELETE}, ()),
        ("k::orders", ALL_SCOPES, ("orders",)),
        ("k:r:a|b:c|", {READ}, ("a", "b:c")),
        (" k : r : a ", {READ}, (" a",)),
        ("k::", ALL_SCOPES, ()),
    ],
)
def test_key_is_parsed_into_scopes_and_prefixes(entry: str, scopes: set[str], prefixes: tuple[str, ...]) -> None:
    principal = Keyring(f"other,{entry}").find(entry.strip().partition(":")[0])
    assert principal is not None
    assert principal.scopes == frozenset(scopes)
    assert principal.prefixes == prefixes


@pytest.mark.parametrize(
    "keys",
    ["k:reed", "k:+", "k:r+", "k:+:x", ":r", "::", " , ,", "k:r, x:y:z:q,:", "ann=k", "ann=k:r", "a=b=", "k,x=y"],
)
def test_invalid_key_keeps_the_server_from_starting(keys: str) -> None:
    with pytest.raises(BadInput, match="not started"):
        Keyring(keys)


def test_empty_keyring_allows_everything() -> None:
    assert Keyring("").is_empty
    assert Keyring("  ").is_empty
    assert not Keyring("k").is_empty


def test_only_the_digest_of_a_key_is_kept() -> None:
    keys = Keyring("s3cret:r")
    principal = keys.find("s3cret")
    assert principal is not None
    assert principal.identity == sha256(b"s3cret").digest()
    assert keys.find("s3cre") is None
    assert keys.find("") is None
    assert "s3cret" not in repr(vars(keys))


def test_service_drops_the_keys_once_it_has_their_digests() -> None:
    """§1.5: from then on its settings contain no key."""

    async def scenario(world: ServerHarness) -> None:
        assert world.service.config.api_keys == ""
        assert world.service.auth.keys.find("s3cret") is not None
        assert not world.service.auth.keys.is_empty
        assert (await world.ask("GET", "/v0/topics"))[0] == 401
        assert (await world.ask("GET", "/v0/topics", key="s3cret"))[0] == 200

    run_scenario(scenario, api_keys="s3cret:r")


def test_scope_and_prefix_are_both_required() -> None:
    principal = Keyring("k:r+w:orders|jobs").find("k")
    assert principal is not None
    assert principal.has_scopes(frozenset((READ, WRITE)))
    assert not principal.has_scopes(frozenset((READ, ADMIN)))
    assert principal.may_use_name("orders.eu")
    assert not principal.may_use_name("order")
    assert ANONYMOUS.may_use_name("anything")


@pytest.mark.parametrize(
    ("header", "secret"),
    [
        (b"Bearer k", "k"),
        (b"Bearer  k ", "k"),
        (b"bearer k", None),
        (b"Basic k", None),
        (b"Bearer ", None),
        (None, None),
    ],
)
def test_bearer_scheme_is_matched_exactly(header: bytes | None, secret: str | None) -> None:
    assert bearer_token(header) == secret


@pytest.mark.parametrize(
    ("entry", "secret", "user", "scopes"),
    [
        ("ann@example.org=k", "k", "ann@example.org", ALL_SCOPES),
        ("ann@example.org:81=k:r", "k", "ann@example.org:81", {READ}),
        ("ann@[::1]=k=:r", "k=", "ann@[::1]", {READ}),
        ("k=:r", "k=", None, {READ}),
        ("k:r:a@b=c", "k", None, {READ}),
        ("k==", "k==", None, ALL_SCOPES),
    ],
)
def test_key_may_name_a_user(entry: str, secret: str, user: str | None, scopes: set[str]) -> None:
    principal = Keyring(entry).find(secret)
    assert principal is not None
    assert (principal.user, principal.scopes) == (user, frozenset(scopes))
    assert principal.identity == sha256(secret.encode()).digest()


@pytest.mark.parametrize("keys", ["a b@example.org=k", "@example.org=k", "ann@=k", "ann@example.org=", "ann@-x=k"])
def test_key_with_an_invalid_user_keeps_the_server_from_starting(keys: str) -> None:
    with pytest.raises(BadInput, match="not started"):
        Keyring(keys)
