"""One topic as events for a browser, and the read tokens of its page: positions, what a token allows, when it ends."""

from __future__ import annotations

import asyncio
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import sha256
from typing import Any

import pytest
from tests.unit.server.fakes import FakeSink, LoopClock, RunningStream, ServerHarness, run_scenario

from tidelog.http.interface import Request, Response, Stream
from tidelog.server.config import ServerConfig

KEYS = "full,reader:r,writer:w,mine:r:my|our"
PATH = "/v0/topics/a/events"


def encode_id(positions: dict[str, int]) -> str:
    return urlsafe_b64encode(json.dumps(positions, separators=(",", ":")).encode()).rstrip(b"=").decode()


def seqs(tap: FakeSink) -> list[int]:
    return [record["$seq"] for event in tap.events if event.event == "record" for record in event.data["records"]]


def error_of(answer: Any) -> dict[str, Any]:
    assert isinstance(answer, Response), answer
    found: dict[str, Any] = json.loads(answer.body)["error"]
    assert found["message"]
    return found


async def open_stream(world: ServerHarness, target: str, tap: FakeSink, **options: Any) -> RunningStream:
    answer = await world.begin("GET", target, **options).answer()
    assert isinstance(answer, Stream), error_of(answer)
    return RunningStream(answer.run(tap))


async def new_token(world: ServerHarness, key: str | None = "reader", **body: Any) -> str:
    status, answer = await world.ask("POST", "/v0/tokens", body, key=key)
    assert status == 200, answer
    token: str = answer["token"]
    return token


# positions ---------------------------------------------------------------------------------------------------


def test_stream_begins_after_from_seq_and_goes_on_with_new_records() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        topic.append([1, 2, 3])
        tap = FakeSink()
        async with await open_stream(world, f"{PATH}?from_seq=1", tap):
            await tap.until(2)
            topic.append([4])
            await tap.until(4)
        assert tap.frames[0] == b"retry: 2000\n\n"
        assert seqs(tap) == [2, 3, 4]
        assert [event.event for event in tap.events] == ["record", "caught-up"] * 2

    run_scenario(scenario)


def test_last_event_id_outranks_from_seq() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a").append([1, 2, 3])
        first, second = FakeSink(), FakeSink()
        async with await open_stream(world, PATH, first):
            [event, *_] = await first.until(2)
        assert event.id is not None
        headers = {"last-event-id": encode_id({**event.id, "a": 2})}
        async with await open_stream(world, f"{PATH}?from_seq=0", second, headers=headers):
            await second.until(2)
        assert seqs(second) == [3]

    run_scenario(scenario)


@pytest.mark.parametrize("header", ["", "!", encode_id({"b": 2}), encode_id({"a": -1})])
def test_id_that_is_none_of_ours_is_ignored(header: str) -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a").append([1, 2, 3])
        tap = FakeSink()
        async with await open_stream(world, f"{PATH}?from_seq=2", tap, headers={"last-event-id": header}):
            await tap.until(2)
        assert seqs(tap) == [3]

    run_scenario(scenario)


def test_lost_records_are_a_tombstone() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a", cap_records=2)
        topic.append([1, 2, 3, 4, 5])
        tap = FakeSink()
        async with await open_stream(world, f"{PATH}?from_seq=1", tap):
            events = await tap.until(3)
        assert [event.event for event in events] == ["tombstone", "record", "caught-up"]
        assert (events[0].data["gap_from"], events[0].data["gap_to"]) == (2, 3)
        assert seqs(tap) == [4, 5]

    run_scenario(scenario)


def test_topic_that_was_created_again_begins_with_a_gap() -> None:
    """The id of an event has the epoch: its seq would be a record of the new topic otherwise."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a").append([1, 2, 3])
        first, second, third = FakeSink(), FakeSink(), FakeSink()
        async with await open_stream(world, PATH, first):
            [*_, event] = await first.until(2)
        assert event.id is not None
        world.engine.drop("a")
        world.topic("a").append([1, 2, 3, 4])
        async with await open_stream(world, PATH, second, headers={"last-event-id": encode_id(event.id)}):
            events = await second.until(3)
        assert (events[0].event, events[0].data["reason"]) == ("tombstone", "recreated")
        assert seqs(second) == [1, 2, 3, 4]
        again = events[-1].id
        assert again is not None
        async with await open_stream(world, PATH, third, headers={"last-event-id": encode_id(again)}):
            events = await third.until(1)
        assert events[0].event == "caught-up"

    run_scenario(scenario)


def test_dropped_topic_ends_the_stream() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a").append([1])
        tap = FakeSink()
        async with await open_stream(world, PATH, tap) as stream:
            await tap.until(2)
            world.engine.drop("a")
            await stream.ended()
        assert tap.events[-1].event == "topic-deleted"

    run_scenario(scenario)


def test_options_choose_what_an_event_has() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        topic.append({"data": 1}, tag="x", node="eu")
        topic.append({"data": 2}, tag="y", node="us")
        tap = FakeSink()
        target = f"{PATH}?include_tags=1&include_data=0&node=eu,ap&limit=1"
        async with await open_stream(world, target, tap):
            await tap.until(2)
        [record] = [record for event in tap.events if event.event == "record" for record in event.data["records"]]
        assert record["$tag"] == "y"
        assert "data" not in record

    run_scenario(scenario)


def test_tail_begins_at_the_head() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        topic.append([1, 2])
        tap = FakeSink()
        async with await open_stream(world, f"{PATH}?tail=true&from_seq=1", tap):
            await tap.until(1)
            topic.append([3])
            await tap.until(3)
        assert seqs(tap) == [3]

    run_scenario(scenario)


def test_requests_that_are_refused() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a", durability="memory")
        for target, headers, code in (
            ("/v0/topics/none/events", {}, "topic_not_found"),
            (PATH, {"accept": "application/json"}, "not_acceptable"),
            (f"{PATH}?consistency=strong", {}, "invalid_request"),
        ):
            assert error_of(await world.begin("GET", target, headers=headers).answer())["code"] == code
        head = await world.begin("HEAD", PATH).answer()
        assert isinstance(head, Response)
        assert (head.status, head.content_type) == (200, b"text/event-stream")
        assert world.service.auth.stream_limit.count == 0

    run_scenario(scenario)


# tokens ------------------------------------------------------------------------------------------------------


def test_token_follows_its_topics_and_no_others() -> None:
    async def scenario(world: ServerHarness) -> None:
        for name in ("a", "b", "shop.eu", "shop"):
            world.topic(name).append([1])
        token = await new_token(world, topics=["a"], prefixes=["shop."])
        for name, allowed in (("a", True), ("shop.eu", True), ("b", False), ("shop", False)):
            tap, target = FakeSink(), f"/v0/topics/{name}/events?token={token}"
            if allowed:
                async with await open_stream(world, target, tap):
                    await tap.until(2)
                assert seqs(tap) == [1]
            else:
                assert error_of(await world.begin("GET", target).answer())["code"] == "forbidden"

    run_scenario(scenario, clock=LoopClock(), api_keys=KEYS)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v0/topics/a/diff"),
        ("POST", "/v0/topics/a"),
        ("GET", "/v0/topics/a/records"),
        ("GET", "/v0/topics"),
        ("POST", "/v0/tokens"),
        ("GET", "/v0/topics/a/work"),
    ],
)
def test_token_is_for_events_only(method: str, path: str) -> None:
    """Neither in the query nor as a key."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        token = await new_token(world, topics=["a"])
        body: dict[str, Any] | None = {} if method == "POST" else None
        assert error_of(await world.begin(method, f"{path}?token={token}", body).answer())["code"] == "unauthorized"
        assert error_of(await world.begin(method, path, body, key=token).answer())["code"] == "unauthorized"

    run_scenario(scenario, clock=LoopClock(), api_keys=KEYS)


def test_key_is_no_token() -> None:
    """A key in an address would be in the logs of proxies."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        assert error_of(await world.begin("GET", f"{PATH}?token=full").answer())["code"] == "unauthorized"
        assert error_of(await world.begin("GET", PATH).answer())["code"] == "unauthorized"
        assert error_of(await world.begin("GET", PATH, key="writer").answer())["code"] == "forbidden"
        assert isinstance(await world.begin("GET", PATH, key="reader").answer(), Stream)

    run_scenario(scenario, clock=LoopClock(), api_keys=KEYS)


def test_token_allows_no_more_than_its_key() -> None:
    async def scenario(world: ServerHarness) -> None:
        cases: list[tuple[str, dict[str, Any], str]] = [
            ("mine", {"topics": ["a"]}, "forbidden"),
            ("mine", {"prefixes": ["m"]}, "forbidden"),
            ("writer", {"topics": ["a"]}, "forbidden"),
            ("reader", {}, "invalid_request"),
            ("reader", {"topics": [""]}, "invalid_request"),
            ("reader", {"prefixes": [""]}, "invalid_request"),
            ("reader", {"topics": ["x" * 256]}, "invalid_request"),
            ("reader", {"topics": ["a"] * 33}, "invalid_request"),
            ("reader", {"topics": ["a"], "ttl_ms": 999}, "invalid_request"),
            ("reader", {"topics": ["a"], "ttl_ms": 86_400_001}, "invalid_request"),
        ]
        for key, body, code in cases:
            status, answer = await world.ask("POST", "/v0/tokens", body, key=key)
            assert (status in (400, 403), answer["error"]["code"]) == (True, code), body
        status, answer = await world.ask("POST", "/v0/tokens", {"topics": ["my.a"], "prefixes": ["ours"]}, key="mine")
        assert (status, answer["topics"], answer["prefixes"]) == (200, ["my.a"], ["ours"])
        assert answer["expires_ms"] == world.clock.now_us() // 1000 + 300_000

    run_scenario(scenario, clock=LoopClock(), api_keys=KEYS)


def test_expired_token_is_refused_and_its_stream_has_ended() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        topic.append([1])
        token = await new_token(world, topics=["a"], ttl_ms=60_000)
        tap = FakeSink()
        async with await open_stream(world, f"{PATH}?token={token}", tap) as stream:
            await tap.until(2)
            await stream.ended()
        assert tap.events[-1].event == "error"
        assert tap.events[-1].data["code"] == "token_expired"
        refused = error_of(await world.begin("GET", f"{PATH}?token={token}").answer())
        assert (refused["code"], refused["detail"]) == ("unauthorized", {"reason": "token_expired"})
        assert world.service.auth.stream_limit.count == 0

    run_scenario(scenario, clock=LoopClock(), api_keys=KEYS)


def test_stream_of_a_key_does_not_expire() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        tap = FakeSink()
        async with await open_stream(world, PATH, tap, key="reader"):
            await asyncio.sleep(1_000)
            topic.append([1])
            await tap.until(2)
        assert seqs(tap) == [1]

    run_scenario(scenario, clock=LoopClock(), api_keys=KEYS)


def test_changed_token_is_no_token() -> None:
    """Every byte of it, and a signature of another server."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        token = await new_token(world, topics=["a"])
        claims, _, signature = token.removeprefix("tlt_").partition(".")
        widened = json.loads(urlsafe_b64decode(claims + "=="))
        widened[0] += 1
        forged = urlsafe_b64encode(json.dumps(widened, separators=(",", ":")).encode()).rstrip(b"=").decode()
        changed = [
            token[:at] + ("A" if token[at] != "A" else "B") + token[at + 1 :] for at in range(0, len(token) - 1, 7)
        ]
        for bad in (f"tlt_{forged}.{signature}", f"tlt_{claims}.", f"tlt_{claims}", "tlt_", "tlt_é.é", *changed):
            assert world.service.read_tokens.verify(bad) is None, bad

    run_scenario(scenario, clock=LoopClock(), api_keys=KEYS)


def test_token_is_valid_after_a_restart_with_the_same_secret() -> None:
    tokens: list[str] = []

    async def issue(world: ServerHarness) -> None:
        tokens.append(await new_token(world, topics=["a"]))

    async def is_valid(world: ServerHarness) -> None:
        assert world.service.read_tokens.verify(tokens[0]) is not None

    async def is_invalid(world: ServerHarness) -> None:
        assert world.service.read_tokens.verify(tokens[0]) is None

    run_scenario(issue, api_keys=KEYS, token_secret="s" * 32)
    run_scenario(is_valid, api_keys=KEYS, token_secret="s" * 32)
    for secret in ("t" * 32, ""):
        run_scenario(is_invalid, api_keys=KEYS, token_secret=secret)


def test_token_holds_no_digest_of_its_key() -> None:
    async def scenario(world: ServerHarness) -> None:
        token = await new_token(world, topics=["a"])
        claims = urlsafe_b64decode(token.removeprefix("tlt_").partition(".")[0] + "==")
        for digest in (sha256(b"reader").hexdigest().encode(), sha256(b"reader").digest(), b"reader"):
            assert digest not in claims

    run_scenario(scenario, api_keys=KEYS)


def test_token_ends_with_its_key() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        topic.append([1])
        token = await new_token(world, topics=["a"])
        tap = FakeSink()
        async with await open_stream(world, f"{PATH}?token={token}", tap) as stream:
            await tap.until(2)
            world.service.reload(ServerConfig(data_dir="data", api_keys="full"))
            await asyncio.wait([stream.task])
            assert stream.task.cancelled()
        assert error_of(await world.begin("GET", f"{PATH}?token={token}").answer())["code"] == "unauthorized"

    run_scenario(scenario, clock=LoopClock(), api_keys=KEYS)


def test_token_loses_the_names_that_its_key_loses() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        token = await new_token(world, topics=["a"])
        world.service.reload(ServerConfig(data_dir="data", api_keys="full,reader:r:b"))
        assert error_of(await world.begin("GET", f"{PATH}?token={token}").answer())["code"] == "forbidden"

    run_scenario(scenario, clock=LoopClock(), api_keys=KEYS)


# CORS --------------------------------------------------------------------------------------------------------

UI = "https://ui.example"


def headers_of(answer: Any) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in answer.headers}


def test_preflight_is_answered_without_a_key() -> None:
    async def scenario(world: ServerHarness) -> None:
        headers = {
            "origin": UI,
            "access-control-request-method": "POST",
            "access-control-request-private-network": "true",
        }
        answer = await world.begin("OPTIONS", "/v0/topics/a", headers=headers).answer()
        assert isinstance(answer, Response)
        sent = headers_of(answer)
        assert answer.status == 204
        assert sent["access-control-allow-origin"] == UI
        assert sent["access-control-allow-methods"] == "DELETE, GET, POST, PUT"
        assert "authorization" in sent["access-control-allow-headers"]
        assert sent["access-control-allow-private-network"] == "true"
        assert "access-control-allow-credentials" not in sent
        assert sent["vary"] == "origin"

    run_scenario(scenario, api_keys=KEYS, cors_origins=UI)


@pytest.mark.parametrize("origin", ["https://ui.example.evil", "http://ui.example", "https://ui.example:8443", "null"])
def test_page_of_another_origin_is_refused(origin: str) -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        for method, key, status in (("OPTIONS", None, 401), ("OPTIONS", "full", 403), ("GET", "full", 403)):
            headers = {"origin": origin, "access-control-request-method": "GET"}
            answer = await world.begin(method, "/v0/topics/a", headers=headers, key=key).answer()
            assert isinstance(answer, Response)
            assert answer.status == status
            assert "access-control-allow-origin" not in headers_of(answer)

    run_scenario(scenario, api_keys=KEYS, cors_origins=UI)


def test_page_of_a_named_origin_reads_responses_and_errors() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        for target, key, status in (("/v0/topics/a", "full", 200), ("/v0/topics/a", None, 401), ("/none", "full", 404)):
            answer = await world.begin("GET", target, key=key, headers={"origin": UI}).answer()
            assert isinstance(answer, Response)
            assert answer.status == status
            assert headers_of(answer)["access-control-allow-origin"] == UI
        answer = await world.begin("GET", PATH, key="full", headers={"origin": UI}).answer()
        assert isinstance(answer, Stream)
        assert headers_of(answer)["access-control-allow-origin"] == UI

    run_scenario(scenario, api_keys=KEYS, cors_origins=f"{UI}, https://other.example")


def test_without_the_setting_there_are_no_headers_of_cors() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        answer = await world.begin("GET", "/v0/topics/a", key="full", headers={"origin": UI}).answer()
        assert isinstance(answer, Response)
        assert answer.status == 200
        assert not {name for name in headers_of(answer) if name.startswith("access-control") or name == "vary"}

    run_scenario(scenario, api_keys=KEYS, allowed_origins=UI)


def test_head_with_an_origin_is_not_on_the_fast_path() -> None:
    """Its responses would not have the headers."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        for headers, is_fast in (({}, True), ({"origin": UI}, False)):
            head = {"content-type": "application/json", "authorization": "Bearer full", **headers}
            request = Request(
                "POST", "/v0/topics/a", "", [(name.encode(), text.encode()) for name, text in head.items()]
            )
            assert (world.app.fast_handler(request, 1 << 16) is not None) is is_fast

    run_scenario(scenario, api_keys=KEYS, cors_origins=UI)
