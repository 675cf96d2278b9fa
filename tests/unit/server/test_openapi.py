"""The OpenAPI document: it is one, and it says what the server does. Method: routes, types and real answers are held
against it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from tests.unit.server.bulk_fixtures import get, post
from tests.unit.server.fakes import ServerHarness, run_scenario

from tidelog import __version__
from tidelog.server import app
from tidelog.server.errors import STATUS_BY_CODE

DOCUMENT: dict[str, Any] = json.loads(app.document_bytes())
OPERATIONS = [
    (path, method.upper(), operation)
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
    if method != "parameters"
]
ROUTES = [(route.path, method, endpoint) for route in app.ROUTES for method, endpoint in route.methods.items()]


def test_it_is_served() -> None:
    async def scenario(world: ServerHarness) -> None:
        got = await get(world, "/v0/openapi.json")
        assert (got.status, got.content_type) == (200, "application/json")
        assert got.json == DOCUMENT
        assert got.json["info"]["version"] == __version__

    run_scenario(scenario)


def test_it_needs_a_key_and_no_scope() -> None:
    async def scenario(world: ServerHarness) -> None:
        assert (await world.ask("GET", "/v0/openapi.json"))[0] == 401
        assert (await world.ask("GET", "/v0/openapi.json", key="w"))[0] == 200

    run_scenario(scenario, api_keys="w:write")


def test_it_is_an_openapi_document() -> None:
    assert [str(error) for error in OpenAPIV31SpecValidator(DOCUMENT).iter_errors()] == []


def test_every_route_is_described_and_nothing_else() -> None:
    assert sorted((path, method) for path, method, _ in OPERATIONS) == sorted(
        (path, method) for path, method, _ in ROUTES
    )
    assert len({operation["operationId"] for _, _, operation in OPERATIONS}) == len(OPERATIONS)


@pytest.mark.parametrize(("path", "method", "operation"), OPERATIONS)
def test_who_may_is_what_the_route_asks_for(path: str, method: str, operation: dict[str, Any]) -> None:
    endpoint = next(endpoint for known, name, endpoint in ROUTES if (known, name) == (path, method))
    ways = {name: scopes for way in operation["security"] for name, scopes in way.items()}
    if endpoint.is_probe:
        assert ways == {}
    else:
        assert set(ways["bearer"]) == endpoint.scopes
    assert ("token" in ways) == (endpoint.token_in_query or endpoint.handler_authenticates)
    assert "403" in operation["responses"], "a page of another site is refused everywhere"
    streamed = {kind.encode() for kind in operation.get("requestBody", {}).get("content", {})} - {b"application/json"}
    streamed.discard(b"application/octet-stream")  # taken whole
    assert streamed == endpoint.streamed_types


@pytest.mark.parametrize(("path", "method", "operation"), OPERATIONS)
def test_every_status_is_one_of_ours(path: str, method: str, operation: dict[str, Any]) -> None:
    statuses = {int(status) for status in operation["responses"]}
    fine = {status for status in statuses if 200 <= status < 300}
    assert fine or path == "/v0/ws", "something can come of it"
    others = {101} if path == "/v0/ws" else {304} if path.endswith("/data") else set()
    assert statuses - fine - others <= set(STATUS_BY_CODE.values())
    assert (503 in statuses) == (path not in ("/v0/health", "/healthz")), method


@pytest.mark.parametrize(
    ("status", "method", "target"),
    [
        (400, "GET", "/v0/topics/{topic}"),
        (400, "DELETE", "/v0/topics/{topic}"),
        (400, "GET", "/v0/routers/{router}"),
        (400, "GET", "/v0/watch/{wid}"),
        (401, "GET", "/v0/topics"),
        *((401, "GET", path) for path in ("/v0/health", "/healthz", "/v0/ready", "/readyz")),
        *((405, "PATCH", route.path) for route in app.ROUTES),
    ],
)
def test_a_refusal_that_occurs_is_described(status: int, method: str, target: str) -> None:
    """405 is told by the methods that a path has. 426 is the front end's own: contract_http/test_auth.py."""

    async def scenario(world: ServerHarness) -> None:
        asked = re.sub(r"{\w+}", "%ff" if status == 400 else "x", target)
        assert (await world.ask(method, asked, key=None if status == 401 else "k"))[0] == status
        described = {name: set(item["responses"]) for path, name, item in OPERATIONS if path == target}
        told = described.values() if status == 405 else [described[method]]
        assert all(str(status) in statuses for statuses in told)

    run_scenario(scenario, api_keys="k", probe_auth=True)


def test_every_error_is_the_envelope_with_all_its_codes() -> None:
    assert set(DOCUMENT["components"]["responses"]) == {str(status) for status in STATUS_BY_CODE.values()}
    for status, response in DOCUMENT["components"]["responses"].items():
        assert response["content"] == {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        assert all(code in response["description"] for code, known in STATUS_BY_CODE.items() if str(known) == status)
        assert ("headers" in response) == (status in ("429", "503"))


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_every_reference_leads_somewhere_and_every_schema_is_used() -> None:
    found = set(references(DOCUMENT))
    schemas = {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}
    responses = {f"#/components/responses/{name}" for name in DOCUMENT["components"]["responses"]}
    assert found <= schemas | responses
    assert schemas - found <= {f"#/components/schemas/{name}" for name in ("Record", "RecordToWrite", "End")}, (
        "lines of a stream are text to OpenAPI"
    )


def test_parameters_in_paths_are_described() -> None:
    for path, item in DOCUMENT["paths"].items():
        named = {part[1:-1] for part in path.split("/") if part.startswith("{")}
        assert {parameter["name"] for parameter in item.get("parameters", [])} == named


def checker(name: str) -> Any:
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    return OAS31Validator(_closed(schema))


def _closed(value: Any) -> Any:
    """The same with nothing allowed that is not described: an answer may not have a field that nobody wrote down."""
    if isinstance(value, list):
        return [_closed(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    made = {key: _closed(inner) for key, inner in value.items()}
    if made.get("type") == "object" and "properties" in made:
        made["additionalProperties"] = False
    return made


async def asked(world: ServerHarness, method: str, target: str, body: Any = None) -> Any:
    return (await world.ask(method, target, body))[1]


def test_real_answers_are_what_the_document_says() -> None:
    """Each field of each answer is described, and no other."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a", cap_records=4)
        records = [
            {"data": {"n": 1}, "tag": "t", "node": "n", "meta": {"m": 1}},
            {"data": "AA==", "$encoding": "base64"},
        ]
        answers = {
            "TopicCreated": await asked(world, "PUT", "/v0/topics/b", {"ttl_ms": 5}),
            "Written": await asked(world, "POST", "/v0/topics/a", {"records": records * 3}),
            "BulkWritten": (await post(world, "/v0/topics/c", [b'{"data":1}\n']))[1],
            "Topic": await asked(world, "GET", "/v0/topics/a"),
            "TopicList": await asked(world, "GET", "/v0/topics?page_size=1"),
            "Page": await asked(world, "POST", "/v0/topics/a/diff", {"include_tags": True}),
            "Deleted": await asked(world, "POST", "/v0/topics/a/delete", {"before_seq": 4}),
            "Sought": await asked(world, "POST", "/v0/topics/a/seek", {"ts": 1}),
            "WatchSession": await asked(world, "POST", "/v0/watch", {"topics": {"a": {}}}),
            "Health": await asked(world, "GET", "/healthz"),
            "Ready": await asked(world, "GET", "/readyz"),
            "Metrics": (await get(world, "/v0/metrics", accept="application/json")).json,
            "Error": await asked(world, "GET", "/v0/topics/nobody"),
        }
        jobs = [{"data": {"n": 1}, "tag": "t", "meta": {"m": 1}, "priority": 1}, *({"data": n} for n in range(5))]
        await asked(world, "PUT", "/v0/topics/q", {"type": "queue", "max_deliveries": 1, "dead_letter": "d"})
        await asked(world, "POST", "/v0/topics/q", {"records": jobs})
        queue = "/v0/topics/q"
        answers |= {
            "Claimed": await asked(world, "POST", f"{queue}/claim", {"node": "n", "max": 4}),
            "Acked": await asked(world, "POST", f"{queue}/ack", {"node": "n", "seqs": [1, 99]}),
            "Nacked": await asked(world, "POST", f"{queue}/nack", {"node": "n", "seqs": [2, 99]}),
            "Extended": await asked(world, "POST", f"{queue}/extend", {"node": "n", "seqs": [3], "lease_ms": 900}),
        }
        await asked(world, "POST", f"{queue}/claim", {"node": "n", "max": 1})
        answers["Redriven"] = await asked(world, "POST", "/v0/topics/d/redrive", {})
        answers["History"] = await asked(world, "GET", f"{queue}/history")
        state = await asked(world, "GET", queue)
        assert not list(checker("Topic").iter_errors(state))
        assert state["queue"]["dead_lettered"] == answers["Redriven"]["redriven"] == 1
        events = {step["event"] for step in answers["History"]["events"]}
        assert events == {"enqueued", "claimed", "acked", "nacked", "extended", "dead_lettered", "redriven"}
        topic.seal()
        world.engine.checkpoint()
        answers["Segments"] = await asked(world, "GET", "/v0/topics/a/segments")
        answers["TopicDropped"] = await asked(world, "DELETE", "/v0/topics/b")
        for name, answer in answers.items():
            errors = [f"{name}: {error.message}" for error in checker(name).iter_errors(answer)]
            assert errors == []
        assert answers["Segments"]["segments"][0]["files"]["foot"]
        assert answers["Page"]["tombstone"]
        lines = (await get(world, "/v0/topics/a/records")).lines
        assert not [error for line in lines[:-1] for error in checker("Record").iter_errors(line)]
        assert not list(checker("End").iter_errors(lines[-1]))

    run_scenario(scenario)


def test_a_planted_difference_is_caught() -> None:
    """The checks above can fail."""
    assert list(checker("Health").iter_errors({"status": "ok", "version": "1", "uptime_ms": 1, "more": 1}))
    assert list(checker("Health").iter_errors({"status": "ok", "version": "1"}))
    broken = json.loads(json.dumps(DOCUMENT))
    broken["paths"]["/v0/topics"]["get"]["parameters"][0]["in"] = "the air"
    assert list(OpenAPIV31SpecValidator(broken).iter_errors())


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("Write", {"records": [{"data": None}]}, {"records": []}),
        ("Diff", {"from_seq": 0, "node": ["a"]}, {"from_seq": -1}),
        ("Delete", {"match": ["tag", "Glob", "p*"]}, {"match": ["tag"]}),
        ("Watch", {"topics": {"a": {"tail": True}}}, {"topics": {}}),
        ("Seek", {"ts": 1}, {"ts": "1"}),
        ("Claim", {"node": "n", "max": 0, "lease_ms": None}, {"node": "n", "max": None}),
        ("Ack", {"node": "n", "seqs": [], "lease_ids": []}, {"node": "n", "seqs": [1], "lease_ids": ["x"]}),
        ("Nack", {"node": "n", "seqs": [1], "delay_ms": 1}, {"node": "n", "seqs": [1], "delay_ms": -1}),
        ("Extend", {"node": "n", "seqs": [1], "lease_ms": 100}, {"node": "n", "seqs": [1]}),
        ("Redrive", {"to": None, "limit": 5}, {"rate": 0}),
        ("TopicConfig", {"durability": "fsync", "lease_ms": 100}, {"durability": "paper"}),
    ],
)
def test_bodies_that_the_document_allows_are_taken_and_others_are_not(name: str, good: Any, bad: Any) -> None:
    targets = {
        "Write": ("POST", "/v0/topics/a"),
        "Diff": ("POST", "/v0/topics/a/diff"),
        "Delete": ("POST", "/v0/topics/a/delete"),
        "Watch": ("POST", "/v0/watch"),
        "Seek": ("POST", "/v0/topics/a/seek"),
        "TopicConfig": ("PUT", "/v0/topics/a"),
        **{name: ("POST", f"/v0/topics/q/{name.lower()}") for name in ("Claim", "Ack", "Nack", "Extend", "Redrive")},
    }

    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        world.topic("q", type="queue")
        assert not list(checker(name).iter_errors(good))
        assert list(checker(name).iter_errors(bad))
        assert (await world.ask(*targets[name], good))[0] == 200
        assert (await world.ask(*targets[name], bad))[0] == 400

    run_scenario(scenario)
