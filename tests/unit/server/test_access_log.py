"""The access log: formats, no secrets, no line that a client made, and an output that blocks."""

from __future__ import annotations

import io
import json
import re
from threading import Event
from typing import Any

import pytest
from tests.unit.server.fakes import FakeSink, RunningStream, ServerHarness, run_scenario

from tidelog.http.interface import Request, Response, Stream
from tidelog.server.access_log import AccessLog, shown_target
from tidelog.server.config import AccessLogFormat


async def logged(world: ServerHarness, kind: AccessLogFormat, *requests: tuple[str, str, dict[str, str]]) -> list[str]:
    output = io.StringIO()
    world.service.access_log = log = AccessLog(kind, output, world.clock.now_us)
    for method, target, headers in requests:
        answer = await world.begin(method, target, headers=headers).answer()
        if isinstance(answer, Stream):
            async with RunningStream(answer.run(FakeSink())):
                pass
    log.close()
    return output.getvalue().splitlines()


def test_line_of_json_has_the_facts_of_a_request() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        headers = {"authorization": "Bearer s3cret", "user-agent": "curl", "x-request-id": "r1"}
        [line, refused] = await logged(
            world, "json", ("GET", "/v0/topics/a?touch=0", headers), ("GET", "/v0/topics/a", {})
        )
        fields = json.loads(line)
        assert fields.pop("ms") >= 0
        assert fields.pop("bytes") > 100
        assert fields == {
            "ts_ms": world.clock.now_us() // 1000,
            "peer": "",
            "key": fields["key"],
            "method": "GET",
            "path": "/v0/topics/a?touch=0",
            "status": 200,
            "request_id": "r1",
            "agent": "curl",
        }
        assert re.fullmatch("[0-9a-f]{16}", fields["key"])
        assert (json.loads(refused)["status"], json.loads(refused)["key"]) == (401, None)

    run_scenario(scenario, api_keys="s3cret")


def test_combined_line_has_the_format_of_web_servers() -> None:
    async def scenario(world: ServerHarness) -> None:
        headers = {"user-agent": 'x" \r\n127.0.0.1 - - "é', "referer": "https://ui.example/page?secret=1"}
        [line] = await logged(world, "combined", ("GET", "/v0/health", headers))
        pattern = (
            r'- - - \[\d\d/\w{3}/\d{4}:\d\d:\d\d:\d\d \+0000\] "GET /v0/health HTTP/1\.1" 200 \d+ "([^"]*)" "(.*)"'
        )
        match = re.fullmatch(pattern, line)
        assert match is not None, line
        assert match[1] == "https://ui.example/page"
        assert match[2] == 'x\\" \\r\\n127.0.0.1 - - \\"\\xc3\\xa9'

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("path", "query", "shown"),
    [
        ("/v0/topics/a/events", "from_seq=1&token=tlt_abc", "/v0/topics/a/events?from_seq=1&token=-"),
        ("/v0/topics/a/work", "%74oken=key&node=n", "/v0/topics/a/work?%74oken=-&node=n"),
        ("/v0/channels/x/events", "user_token=t", "/v0/channels/x/events?user_token=-"),
        ("/v0/watch/wid_abc", "token=k", "/v0/watch/-?token=-"),
        ("/v0/topics", "", "/v0/topics"),
    ],
)
def test_target_is_shown_without_secrets(path: str, query: str, shown: str) -> None:
    assert shown_target(path, query) == shown


def test_no_key_and_no_token_is_in_a_line() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        _, made = await world.ask("POST", "/v0/tokens", {"topics": ["a"]}, key="s3cret")
        wid = await world.watch({"a": {}}, key="s3cret")
        requests: list[tuple[str, str, dict[str, str]]] = [
            ("GET", f"/v0/topics/a/events?token={made['token']}", {}),
            ("GET", f"/v0/watch/{wid}?token=s3cret", {}),
            ("GET", "/v0/topics?token=s3cret", {"authorization": "Bearer s3cret"}),
        ]
        for kind in ("json", "combined"):
            lines = await logged(world, kind, *requests)
            assert len(lines) == 3
            assert not [line for line in lines for secret in ("s3cret", made["token"], wid) if secret in line]

    run_scenario(scenario, api_keys="s3cret")


def test_output_that_blocks_delays_no_request() -> None:
    class Blocked(io.StringIO):
        begun, released = Event(), Event()

        def write(self, text: str) -> int:
            self.begun.set()
            self.released.wait(30)
            return super().write(text)

    async def scenario(world: ServerHarness) -> None:
        output = Blocked()
        world.service.access_log = log = AccessLog("json", output, world.clock.now_us)
        assert (await world.ask("GET", "/v0/health"))[0] == 200
        assert output.begun.wait(30), "the thread has taken the first line"
        for _ in range(10_100):
            answer: Any = await world.begin("GET", "/v0/health").answer()
            assert isinstance(answer, Response)
        assert log.dropped == 100
        output.released.set()
        log.close()
        assert len(output.getvalue().splitlines()) + log.dropped == 10_101

    run_scenario(scenario)


def test_output_that_has_gone_is_counted() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            assert text
            raise BrokenPipeError

    async def scenario(world: ServerHarness) -> None:
        world.service.access_log = log = AccessLog("json", Gone(), world.clock.now_us)
        assert (await world.ask("GET", "/v0/health"))[0] == 200
        log.close()
        assert log.dropped == 1

    run_scenario(scenario)


def test_small_requests_are_logged_too() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        request = Request("POST", "/v0/topics/a", "", [(b"content-type", b"application/json")])
        assert world.app.fast_handler(request, 1 << 16) is not None
        world.service.access_log = log = AccessLog("json", io.StringIO(), world.clock.now_us)
        assert world.app.fast_handler(request, 1 << 16) is None
        log.close()

    run_scenario(scenario)
