"""What holds for every request: what it holds is given back, its answer is named and counted, its failure logged."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.server.bulk_fixtures import listening, run_with_engine
from tests.unit.server.fakes import ServerHarness, captured_log, parse_log, run_scenario

from tidelog.engine import Engine
from tidelog.engine.topic import TopicOperations
from tidelog.errors import InDoubt
from tidelog.server.config import LogFormat
from tidelog.server.handlers import records


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("turns", [0, 1, 5])
def test_client_that_leaves_releases_its_resources(turns: int) -> None:
    """§1.12: also one that leaves before its handler took its first step, whose work is then never begun."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("t")
        for target, body in (
            ("/v0/topics/t/diff", {"wait_ms": 20_000}),
            ("/v0/topics/new", {"records": [{"data": 1}]}),
            ("/v0/watch", {"topics": {"t": {}}}),
            ("/v0/topics/t/delete", {"before_seq": 1}),
        ):
            exchange = world.begin("POST", target, body, key="k")
            assert world.service.auth.inflight_limit.count == 1
            for _ in range(turns):
                await asyncio.sleep(0)
            exchange.leave()
            for _ in range(5):
                await asyncio.sleep(0)
            assert world.service.auth.inflight_limit.count == 0
        assert not len(world.service.push.notifiers)

    run_scenario(scenario, api_keys="k")


# Answers that no handler gave -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "name", "row"),
    [
        (b"GET /v0/health HT", None, ("", "other", 408)),
        (
            b"POST /v0/topics/t/diff HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: mine\r\nContent-Length: 9\r\n\r\n{",
            "mine",
            ("/v0/topics/{topic}/diff", "POST", 408),
        ),
        (b"GET /v0/%ff HTTP/1.1\r\nX-Request-Id: mine\r\n\r\n", "mine", ("", "GET", 400)),
    ],
    ids=["head", "body", "host"],
)
def test_response_without_a_handler_has_an_id_and_is_counted(
    sent: bytes, name: str | None, row: tuple[str, str, int], tmp_path: Path
) -> None:
    async def scenario(world: ServerHarness) -> None:
        async with listening(world, body_timeout_s=0.1, header_timeout_s=0.1) as client:
            client.send(sent)
            got = await client.reply()
        assert got.status == row[2]
        assert got.json["error"]["message"].endswith("; nothing was done")
        assert name in (None, got.headers["x-request-id"])
        assert [key for key, answers in world.service.metrics._responses.items() if sum(answers.counts) == 1] == [row]

    run_with_engine(scenario, tmp_path)


# The log --------------------------------------------------------------------------------------------------


def test_failed_request_is_logged_with_its_id_and_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise InDoubt("planted")

    def divide(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(TopicOperations, "submit", fail)
    monkeypatch.setattr(records, "plan_read", divide)

    async def scenario(world: ServerHarness) -> None:
        world.topic("t")
        mine, body = {"x-request-id": "mine"}, {"records": [{"data": 1}]}
        with captured_log() as text:
            assert (await world.ask("POST", "/v0/topics/t", body, key="sesame", headers=mine))[0] == 500
            assert (await world.ask("POST", "/v0/topics/t/diff", {"wait_ms": 1}, key="sesame"))[0] == 500
            assert (await world.ask("POST", "/v0/topics/none/diff", {}, key="sesame"))[0] == 404
        first, second = parse_log(text)
        assert (first["message"], first["request_id"]) == ("POST /v0/topics/{topic}: planted", "mine")
        assert (second["message"], second["request_id"][-2:]) == ("POST /v0/topics/{topic}/diff failed", "-1")
        assert first["topic"] == second["topic"] == "t"
        assert "ZeroDivisionError" in second["trace"]
        assert "sesame" not in text.getvalue()

    run_scenario(scenario, api_keys="sesame")


@pytest.mark.parametrize("how", ["text", "json"])
def test_client_text_cannot_start_a_log_line(how: LogFormat) -> None:
    def fail(*_: object) -> None:
        raise InDoubt("planted")

    async def scenario(world: ServerHarness) -> None:
        with captured_log(how) as text, pytest.MonkeyPatch.context() as patch:
            patch.setattr(Engine, "find", fail)
            status, _ = await world.ask("POST", "/v0/topics/a%0Ab/diff", {}, headers={"x-request-id": 'a"b'})
        assert status == 500
        (line,) = text.getvalue().splitlines()
        if how == "text":
            assert line.endswith(r' ERROR POST /v0/topics/{topic}/diff: planted request_id="a\"b" topic="a\nb"')

    run_scenario(scenario)


def test_session_id_is_never_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that knows it can read what the session reads."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    async def scenario(world: ServerHarness) -> None:
        world.topic("t")
        wid = await world.watch({"t": {}})
        monkeypatch.setattr(type(world.service.push.watch_sessions), "find", fail)
        with captured_log() as text:
            assert (await world.ask("GET", f"/v0/watch/{wid}"))[0] == 500
        (line,) = parse_log(text)
        assert line["message"] == "GET /v0/watch/{wid} failed"
        assert wid not in text.getvalue()

    run_scenario(scenario)
