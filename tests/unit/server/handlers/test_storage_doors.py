"""The endpoints of storage under attack: keys for other names, values out of bounds, bodies of other shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tests.unit.server.fakes import ServerHarness, run_scenario

from tidelog.http.interface import Response, Stream

Request = tuple[str, str, Any]
OF_A_TOPIC: tuple[Request, ...] = (
    ("POST", "relocate", {}),
    ("POST", "recall", {}),
    ("POST", "rewrite", {"force": True}),
    ("POST", "erase", {"match": "t"}),
    ("POST", "compact", None),
    ("POST", "seal", None),
    ("POST", "retention/simulate", {"cap_records": 1}),
    ("GET", "latest", None),
    ("GET", "latest?key=t", None),
    ("GET", "segments", None),
    ("GET", "segments?format=arrow", None),
    ("GET", "segments/1/data", None),
    ("GET", "records/1/data", None),
    ("GET", "batches?writer=w", None),
    ("POST", "batches", {"writer": "w", "number": 1, "sum": "0" * 32, "chunks": []}),
    ("POST", "stream", b"x"),
    ("PUT", "staging/w.1", b"x"),
    ("DELETE", "staging/w", None),
)
OF_ALL: tuple[Request, ...] = (
    ("GET", "/v0/tiers", None),
    ("GET", "/v0/tiers/segments", None),
    ("GET", "/v0/tiers/segments?topic=a.topic", None),
    ("POST", "/v0/tiers/relocate", {"topic": "a.topic"}),
    ("POST", "/v0/tiers/recall", {"topic": "a.topic"}),
    ("POST", "/v0/tiers/claim", None),
    ("POST", "/v0/checkpoint", None),
    ("GET", "/v0/health/details", None),
    ("GET", "/v0/erasures", None),
    ("POST", "/v0/erasures/verify", None),
    ("POST", "/v0/backups", {}),
    ("GET", "/v0/backups", None),
)
KEYS = "all:admin+read+write+delete,some:admin+read+write+delete:a.,reader:read"


async def status_of(world: ServerHarness, request: Request, **more: Any) -> tuple[int, str]:
    """The status and the code of the error."""
    method, target, body = request
    headers: Mapping[str, str] = {}
    if isinstance(body, bytes):
        headers = {"content-type": "application/vnd.apache.arrow.stream" if "staging" in target else "text/plain"}
    answer = await world.begin(method, target, body, headers=headers, **more).answer()
    if isinstance(answer, Stream):
        return answer.status, ""
    assert isinstance(answer, Response)
    text = bytes(answer.body).decode(errors="replace")
    return answer.status, text.split('"code":"')[1].split('"')[0] if '"code":"' in text else ""


def filled(world: ServerHarness) -> None:
    for name in ("a.topic", "b.topic"):
        world.topic(name, compaction="latest_by_tag").append([b"1", b"2"], tag="t")
    world.engine.checkpoint()


@pytest.mark.parametrize("request_", OF_A_TOPIC, ids=lambda it: f"{it[0]} {it[1]}")
def test_a_key_for_other_names_is_refused_and_changes_nothing(request_: Request) -> None:
    async def scenario(world: ServerHarness) -> None:
        filled(world)
        method, path, body = request_
        for name in ("b.topic", "a", "A.topic", "aa.topic", "%61a.topic"):
            found = await status_of(world, (method, f"/v0/topics/{name}/{path}", body), key="some")
            assert found == (403, "forbidden"), name
        if method != "GET":
            found = await status_of(world, (method, f"/v0/topics/b.topic/{path}", body), key="reader")
            assert found[0] in ((403,) if path != "retention/simulate" else (200, 403))
        assert (await status_of(world, (method, f"/v0/topics/b.topic/{path}", body)))[0] == 401
        assert [record.data for record in world.topic("b.topic").read().records] == [b"1", b"2"]
        assert world.engine.names() == ["a.topic", "b.topic"]

    run_scenario(scenario, api_keys=KEYS)


@pytest.mark.parametrize("request_", OF_ALL, ids=lambda it: f"{it[0]} {it[1]}")
def test_what_is_about_all_topics_needs_a_key_for_all_names(request_: Request) -> None:
    async def scenario(world: ServerHarness) -> None:
        filled(world)
        generation = world.engine.generation
        for key in ("some", "reader"):
            assert await status_of(world, request_, key=key) == (403, "forbidden"), key
        assert (await status_of(world, request_))[0] == 401
        assert world.engine.generation == generation

    run_scenario(scenario, api_keys=KEYS)


BAD_VALUES = (-1, 1 << 64, 1 << 200, 1.5, "7", True, [1], {"a": 1})


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("topics/a.topic/relocate", "keep_segments"),
        ("topics/a.topic/recall", "first_seq"),
        ("topics/a.topic/recall", "last_seq"),
        ("tiers/relocate", "keep_segments"),
        ("tiers/recall", "first_seq"),
        ("topics/a.topic/retention/simulate", "cap_records"),
        ("topics/a.topic/retention/simulate", "ttl_ms"),
        ("topics/a.topic/rewrite", "force"),
        ("topics/a.topic/erase", "seqs"),
        ("topics/a.topic/erase", "match"),
    ],
)
def test_values_out_of_bounds_are_refused(path: str, field: str) -> None:
    async def scenario(world: ServerHarness) -> None:
        filled(world)
        for value in BAD_VALUES:
            if (field, value) in (("force", True), ("match", "7"), ("seqs", [1])) and not isinstance(value, int | dict):
                continue  # these are values that it takes
            if field == "force" and value is True:
                continue
            found = await status_of(world, ("POST", f"/v0/{path}", {field: value}))
            assert found[0] == 400, (value, found)
        for body in (b"[]", b"7", b"{", b'"x"', b"\xff", b'{"' + b"x" * 100_000 + b'":1}', b"[" * 5_000):
            found = await status_of(world, ("POST", f"/v0/{path}", body))
            assert found[0] in (400, 415), (body[:20], found)
        assert [record.data for record in world.topic("a.topic").read().records] == [b"1", b"2"]

    run_scenario(scenario)


@pytest.mark.parametrize(
    "target",
    [
        "latest?limit=-1",
        "latest?limit=x",
        f"latest?limit={1 << 70}",
        "latest?after=x",
        f"latest?after={'A' * 10_000}",
        "segments?from_seq=-1",
        f"segments?from_seq={1 << 70}",
        "segments?limit=-7",
        "segments?format=xml",
        "segments/1/data?generation=x",
        "records/x/data",
        f"records/{1 << 70}/data",
        "records/-1/data",
        "batches",
        "batches?writer=",
    ],
)
def test_bad_queries_are_an_error_of_the_client(target: str) -> None:
    async def scenario(world: ServerHarness) -> None:
        filled(world)
        status, code = await status_of(world, ("GET", f"/v0/topics/a.topic/{target}", None))
        assert status in (400, 404), (status, code)
        assert code

    run_scenario(scenario)
