"""Fields and values of requests that have no effect: reported where the contract says to ignore them, else refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.server.fakes import ServerHarness, run_scenario

from tidelog.http.interface import Request, Response

TOPIC = "/v0/topics/a"


async def respond(world: ServerHarness, method: str, target: str, body: Any = None) -> tuple[Response, Any]:
    answer = await world.begin(method, target, body).answer()
    assert isinstance(answer, Response)
    return answer, json.loads(answer.body)


def warning_headers(answer: Response) -> list[str]:
    return [value.decode() for name, value in answer.headers if name == b"tidelog-warning"]


CONTRACT_CASES = [
    ("POST", TOPIC, {"records": [{"data": 1}], "recrods": []}, "there is no field 'recrods', the nearest is records"),
    (
        "POST",
        TOPIC,
        {"records": [{"data": 1, "tagg": "x"}]},
        "there is no field 'tagg' in $.records[0], the nearest is tag",
    ),
    ("POST", f"{TOPIC}?return_seq=0", {"records": [{"data": 1}]}, "there is no parameter 'return_seq', the nearest is"),
    ("POST", f"{TOPIC}?return_seqs=no", {"records": [{"data": 1}]}, "return_seqs is 'no', it is true or false"),
    ("POST", f"{TOPIC}/diff", {"form_seq": 1}, "there is no field 'form_seq', the nearest is from_seq"),
    (
        "POST",
        f"{TOPIC}/delete",
        {"before_seq": 0, "before": 1},
        "there is no field 'before', the nearest is before_seq",
    ),
    (
        "POST",
        "/v0/watch",
        {"topics": {"a": {"tial": True}}},
        "there is no field 'tial' in $.topics[...], the nearest is tail",
    ),
    ("PUT", TOPIC, {"retention": 5}, "a config has no field 'retention', the nearest is"),
    ("PUT", "/v0/topics/jobs", {"type": "queue", "max_deliveries": 3}, "max_deliveries is 3 and dead_letter null"),
    ("GET", "/v0/topics?page_size=ten", None, "page_size is 'ten', it is a whole number"),
    ("GET", f"{TOPIC}?touch=maybe", None, "touch is 'maybe', it is true or false"),
    ("POST", "/v0/topics/q/claim", {"node": "n", "seqs": []}, "there is no field 'seqs', the nearest is"),
    (
        "PUT",
        "/v0/routers/r",
        {"source": "a", "dest": "b", "filters": None},
        "there is no field 'filters', the nearest is",
    ),
]


@pytest.mark.parametrize(("method", "target", "body", "warning"), CONTRACT_CASES)
def test_contract_route_ignores_and_reports(method: str, target: str, body: Any, warning: str) -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        world.topic("q", type="queue")
        answer, said = await respond(world, method, target, body)
        assert answer.status in (200, 201), said
        assert len(said["warnings"]) == 1
        assert said["warnings"][0].startswith(warning), said["warnings"]
        assert warning_headers(answer) == said["warnings"]

    run_scenario(scenario)


@pytest.mark.parametrize(("method", "target", "body", "warning"), CONTRACT_CASES)
def test_strict_server_refuses_and_does_nothing(method: str, target: str, body: Any, warning: str) -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        world.topic("q", type="queue")
        before = (topic.head_seq, topic.config, world.engine.names())
        answer, said = await respond(world, method, target, body)
        assert (answer.status, said["error"]["code"]) == (400, "invalid_request")
        assert said["error"]["message"].startswith(warning)
        assert said["error"]["message"].endswith("nothing was done")
        assert (topic.head_seq, topic.config, world.engine.names()) == before

    run_scenario(scenario, strict=True)


@pytest.mark.parametrize(
    ("method", "target", "body", "warning"),
    [
        ("POST", f"{TOPIC}/seek", {"ts": 1, "st": 2}, "there is no field 'st', the nearest is ts"),
        (
            "GET",
            f"{TOPIC}/records?from_sequence=4",
            None,
            "there is no parameter 'from_sequence', the nearest is from_seq",
        ),
        ("GET", f"{TOPIC}/records?limit=1e3", None, "limit is '1e3', it is a whole number"),
        ("GET", f"{TOPIC}/events?from_seq=-1", None, "from_seq is '-1', it is a whole number"),
        ("GET", f"{TOPIC}/gaps?from=yesterday", None, "from is 'yesterday', it is a whole number"),
        ("PUT", f"{TOPIC}/groups/g", {"hold": 1}, "there is no field 'hold', the nearest is hold_bytes"),
        ("POST", "/v0/tokens", {"topic": "a"}, "there is no field 'topic', the nearest is topics"),
        ("GET", "/v0/tiers?x=1", None, "there is no parameter 'x'"),
    ],
)
def test_route_beside_the_contract_refuses(method: str, target: str, body: Any, warning: str) -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        answer, said = await respond(world, method, target, body)
        assert (answer.status, said["error"]["code"]) == (400, "invalid_request")
        assert said["error"]["message"].startswith(warning), said

    run_scenario(scenario)


def test_correct_request_has_no_warnings() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        for method, target, body in (
            ("POST", f"{TOPIC}?return_seqs=false", {"records": [{"data": 1, "meta": {"any": 1}, "$encoding": None}]}),
            ("POST", f"{TOPIC}/diff", {"from_seq": 0, "node": ["n"]}),
            ("GET", "/v0/topics?prefix=a&page_size=0&cursor=&touch=1&token=x", None),
            ("PUT", TOPIC, {"ttl_ms": 0, "max_record_bytes": 5}),
        ):
            answer, said = await respond(world, method, target, body)
            assert answer.status == 200
            assert "warnings" not in said
            assert not warning_headers(answer)

    run_scenario(scenario, strict=True)


def test_request_with_many_mistakes_reports_some() -> None:
    """Each costs a comparison with all names."""

    async def scenario(world: ServerHarness) -> None:
        query = "&".join(f"x{number}=1" for number in range(100))
        _, said = await respond(world, "GET", f"/v0/topics?{query}")
        assert len(said["warnings"]) == 8

    run_scenario(scenario)


def test_name_of_a_client_starts_no_line_of_a_header() -> None:
    async def scenario(world: ServerHarness) -> None:
        answer, said = await respond(world, "GET", "/v0/topics?x%0d%0aset-cookie:%20a=%C3%A9")
        assert len(said["warnings"]) == 1
        assert all(32 <= byte < 127 for name, value in answer.headers for byte in (*name, *value))

    run_scenario(scenario)


def test_write_with_another_config_reports_what_it_did_not_change() -> None:
    async def scenario(world: ServerHarness) -> None:
        body = {"records": [{"data": 1}], "config": {"ttl_ms": 5000, "durability": "fsync", "auto_create": False}}
        world.topic("a", durability="fsync", cap_records=9)
        answer, said = await respond(world, "POST", TOPIC, body)
        assert (answer.status, said["count"]) == (200, 1)
        assert said["warnings"] == ["a exists with another config: ttl_ms is 0: a write changes no config, PUT does"]
        body["config"] = {"durable": True, "cap_records": 9}
        _, said = await respond(world, "POST", TOPIC, body)
        assert "warnings" not in said
        assert world.topic("a").config.ttl_ms == 0

    run_scenario(scenario)


def test_strict_server_refuses_a_write_with_another_config() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        answer, said = await respond(world, "POST", TOPIC, {"records": [{"data": 1}], "config": {"ttl_ms": 5000}})
        assert (answer.status, said["error"]["detail"]) == (400, {"fields": ["ttl_ms"]})
        assert topic.head_seq == 0

    run_scenario(scenario, strict=True)


@pytest.mark.parametrize(
    ("path", "body", "is_plain"),
    [
        ("/v0/topics/q/claim", {"node": "n", "nod": 1}, False),
        ("/v0/topics/q/ack", {"node": "n", "seqs": [1]}, True),
        ("/v0/topics/q/ack", {"node": "n", "seqs": [1], "lease": ""}, False),
        ("/v0/topics/q/diff", {"from_seq": 0}, True),
        ("/v0/topics/q/diff", {"from_seq": 0, "limt": 1}, False),
    ],
)
def test_fast_path_leaves_unknown_fields_to_the_normal_one(path: str, body: Any, is_plain: bool) -> None:
    class Responder:
        def respond(self, answer: Response) -> None: ...
        def respond_json(self, *content: object) -> None: ...
        def respond_json_parts(self, *content: object) -> None: ...

    async def scenario(world: ServerHarness) -> None:
        world.topic("q", type="queue").append([1])
        request = Request("POST", path, "", [(b"content-type", b"application/json")])
        handler: Any = world.app.fast_handler(request, 1 << 16)
        assert handler is not None
        assert handler(json.dumps(body).encode(), Responder()) is is_plain

    run_scenario(scenario)
