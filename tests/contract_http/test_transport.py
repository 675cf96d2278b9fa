"""§1.1, §1.3, §1.6: how requests come in, which there are, and what a body is."""

from __future__ import annotations

import gzip
import re
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract_http.api import ANY, Api, expect_error, expect_success, topic_path
from tests.contract_http.client import JSON, RawConnection, dumps
from tests.contract_http.http2 import PREFACE, H2Client
from tests.contract_http.server import Server
from tests.contract_http.sse_client import RETRY, parse_event
from tests.kit.waiting import eventually

BODY_MAX = 2_000


@pytest.fixture(scope="module")
def small_limits_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that takes small bodies only."""
    with Server(tmp_path_factory.mktemp("small"), max_body_bytes=BODY_MAX).start() as running:
        yield running


# ── HTTP/1.1 ──────────────────────────────────────────────────────────────────────────────────


def test_a_connection_is_kept_for_any_number_of_requests(api: Api) -> None:
    """§1.1: HTTP/1.1 keep-alive."""
    for _ in range(5):
        reply = api.get("/v0/health")
        assert (reply.version, reply.status) == ("HTTP/1.1", 200)
        assert reply.header("connection") != "close"
    assert not api.connection.held


def test_requests_that_come_in_one_piece_are_answered_in_their_order(api: Api, topic: str) -> None:
    """§1.1: what was written before is there for the request behind it."""
    api.create_topic(topic)
    write = api.encode_request("POST", topic_path(topic), dumps({"records": [{"data": 7}]}), [JSON])
    read = api.encode_request("POST", topic_path(topic, "/diff"))
    api.connection.send(write + read + api.encode_request("GET", "/nowhere") + write)
    assert expect_success(api.end())["seqs"] == [1]
    assert [record["data"] for record in expect_success(api.end())["records"]] == [7]
    expect_error(api.end(), 404, "not_found")
    assert expect_success(api.end())["seqs"] == [2]


def test_a_request_may_come_byte_by_byte(api: Api, topic: str) -> None:
    data = api.encode_request("POST", topic_path(topic), dumps({"records": [{"data": "é"}]}), [JSON])
    for at in range(len(data)):
        api.connection.send(data[at : at + 1])
    assert expect_success(api.end(), 201)["count"] == 1


def test_connection_close_is_honoured_after_the_response(api: Api) -> None:
    with RawConnection(api.address) as wire:
        wire.send(b"GET /v0/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        reply = wire.reply()
        assert reply.status == 200
        assert reply.header("connection") == "close"
        assert wire.read_rest() == b""


def test_a_client_of_http_1_0_is_answered_and_closed(api: Api) -> None:
    with RawConnection(api.address) as wire:
        wire.send(b"GET /v0/health HTTP/1.0\r\n\r\n")
        reply = wire.reply()
        assert reply.status == 200
        assert reply.json()["status"] == "ok"
        assert wire.read_rest() == b""


def test_a_body_in_chunks_is_a_body(api: Api, topic: str) -> None:
    """§1.1: Transfer-Encoding: chunked."""
    body = dumps({"records": [{"data": "in pieces"}]})
    parts = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:7], body[7:8], body[8:]))
    head = api.encode_request("POST", topic_path(topic), headers=[JSON, ("Transfer-Encoding", "chunked")])
    api.connection.send(head + parts + b"0\r\n\r\n")
    assert expect_success(api.end(), 201)["count"] == 1
    assert api.diff(topic)["records"][0]["data"] == "in pieces"


def test_expect_continue_gets_100(api: Api, topic: str) -> None:
    """`Expect: 100-continue`, as curl sends with larger bodies."""
    body = dumps({"records": [{"data": 1}]})
    api.connection.send(
        api.encode_request("POST", topic_path(topic), body, [JSON, ("Expect", "100-continue")])[: -len(body)]
    )
    assert api.connection.head().status == 100
    api.connection.send(body)
    assert expect_success(api.end(), 201)["count"] == 1


@pytest.mark.parametrize(
    "head",
    [
        b"nonsense\r\n\r\n",
        b"G\x00T /v0/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v0/health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST /v0/watch HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v0/watch HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v0/watch HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v0/health HTTP/1.1\r\nHost : x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n",
    ],
)
def test_what_is_no_request_gets_the_envelope_and_the_connection_ends(api: Api, head: bytes) -> None:
    """§1.8: 400 with the envelope, also for what no handler ever sees."""
    with RawConnection(api.address) as wire:
        wire.send(head)
        expect_error(wire.reply(), 400, "invalid_request")
        assert wire.read_rest() == b""
    assert api.get("/v0/health").status == 200


def test_no_answer_has_headers_of_other_origins_or_of_compression(api: Api) -> None:
    """§1.1: no CORS; nothing is compressed that was not asked for."""
    reply = api.get("/v0/topics", [("Origin", "http://example.org")])
    assert not [header for header, _ in reply.headers if header.startswith("access-control-")]
    assert reply.header("content-encoding") is None
    assert reply.header("content-type") == "application/json"


# ── HTTP/2 on the same port ───────────────────────────────────────────────────────────────────


def test_http_2_with_prior_knowledge_is_really_http_2(server: Server, topic: str) -> None:
    """§1.1: the 24-byte preface chooses; the reply is frames, not an HTTP/1.1 line."""
    with RawConnection(server.address) as wire:
        wire.send(PREFACE + struct.pack(">I", 0)[1:] + b"\x04\x00" + struct.pack(">I", 0))
        head = wire.read_exactly(9)
        size, kind, stream = int.from_bytes(head[:3], "big"), head[3], int.from_bytes(head[5:], "big")
        assert (kind, stream) == (4, 0), "SETTINGS come first"
        settings = dict(struct.iter_unpack(">HI", wire.read_exactly(size)))
        assert settings[3] == 1024, "streams at once"
        assert settings[4] == 1 << 20, "window of a stream"
        window = 65_535
        while window != 4 << 20:
            head = wire.read_exactly(9)
            payload = wire.read_exactly(int.from_bytes(head[:3], "big"))
            if head[3] == 8 and head[5:] == b"\0\0\0\0":
                window += int.from_bytes(payload, "big")
    with H2Client(server.address) as client:
        reply = client.request("GET", "/v0/health")
        assert (reply.version, reply.status) == ("HTTP/2", 200)
        assert reply.json()["status"] == "ok"
        expect_success(client.request("PUT", topic_path(topic)), 201)
        written = client.request("POST", topic_path(topic), dumps({"records": [{"data": {"a": 1}}]}), [JSON])
        assert expect_success(written)["seqs"] == [1]
        assert expect_success(client.request("POST", topic_path(topic, "/diff")))["records"][0]["data"] == {"a": 1}
        expect_error(client.request("GET", "/nowhere"), 404, "not_found")
        expect_error(client.request("PATCH", topic_path(topic)), 405, "method_not_allowed")
        head_only = client.request("HEAD", topic_path(topic))
        assert (head_only.status, head_only.body) == (200, b"")


def test_the_preface_may_come_in_pieces(server: Server) -> None:
    """§1.1: sniffing waits for enough bytes to decide."""
    with RawConnection(server.address) as wire:
        for at in range(len(PREFACE)):
            wire.send(PREFACE[at : at + 1])
        wire.send(b"\0\0\0\x04\0" + b"\0\0\0\0")
        assert wire.read_exactly(9)[3] == 4


def test_both_versions_are_spoken_side_by_side(server: Server, api: Api, topic: str) -> None:
    """§1.1: one listener, chosen per connection; a write of one wakes a reader of the other."""
    api.create_topic(topic)
    with H2Client(server.address) as client:
        waiting = client.begin("POST", topic_path(topic, "/diff"), dumps({"wait_ms": 20_000}), [JSON])
        quick = client.request("GET", "/v0/health")
        assert quick.status == 200, "one stream does not hold up another"
        assert waiting not in client.ended
        assert api.write(topic, "x")["head_seq"] == 1
        assert [record["$seq"] for record in expect_success(client.end(waiting))["records"]] == [1]


def test_many_requests_share_one_http_2_connection(server: Server, topic: str) -> None:
    with H2Client(server.address) as client:
        expect_success(client.request("PUT", topic_path(topic)), 201)
        streams = [
            client.begin("POST", topic_path(topic), dumps({"records": [{"data": number}]}), [JSON])
            for number in range(100)
        ]
        seqs = [expect_success(client.end(stream))["first_seq"] for stream in streams]
        assert sorted(seqs) == list(range(1, 101))


def test_a_body_over_the_limit_is_refused_over_http_2_and_the_connection_lives(small_limits_server: Server) -> None:
    """§1.12: 413, for that stream alone."""
    with H2Client(small_limits_server.address) as client:
        expect_error(client.request("POST", topic_path("t"), b"x" * 300_000, [JSON]), 413, "payload_too_large")
        assert client.request("GET", "/v0/health").status == 200


def test_events_come_over_http_2_and_a_reset_frees_the_slot(server: Server, api: Api, topic: str) -> None:
    """§1.1: flushed after each frame; §1.12: slots are given back."""
    api.create_topic(topic)
    held = api.metrics()["sse_connections"]
    url = api.watch({topic: {}})["stream_url"]
    with H2Client(server.address) as client:
        stream = client.begin("GET", url)
        assert (client.head(stream).header("content-type") or "").startswith("text/event-stream")
        while client.data[stream].count(b"\n\n") < 2:
            assert client.step()
        retry, caught_up, _ = bytes(client.data[stream]).split(b"\n\n")
        assert retry + b"\n\n" == RETRY
        assert parse_event(caught_up + b"\n\n").name == "caught-up"
        api.write(topic, "x")
        while client.data[stream].count(b"\n\n") < 4:
            assert client.step()
        assert b'"$seq":1' in client.data[stream]
        assert api.metrics()["sse_connections"] == held + 1
        client.reset(stream)
        assert client.request("GET", "/v0/health").status == 200
        eventually(lambda: api.metrics()["sse_connections"] == held)


def test_a_websocket_is_not_offered_over_http_2(server: Server) -> None:
    """§1.1: WebSocket is an upgrade of HTTP/1.1 only."""
    with H2Client(server.address) as client:
        expect_error(client.request("GET", "/v0/ws"), 400, "invalid_request")


# ── routes (§1.3) ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/v0",
        "/v0/",
        "/v1/topics",
        "/v0/nope",
        "/v0/topics/",
        "/v0/topics/a/",
        "/v0/topics/a/nope",
        "/v0/topics/a/diff/",
        "/v0/topics//diff",
        "/v0//topics",
        "/v0/watch/",
        "/v0/watch/a/b",
        "/v0/ws/",
        "/v0/health/",
        "/healthz/",
        "/v0/metrics/",
        "/V0/topics",
        "/v0/Topics",
    ],
)
def test_an_unknown_path_is_404_and_so_is_a_trailing_slash(api: Api, target: str) -> None:
    """§1.1, §1.3."""
    for method in ("GET", "POST", "PUT", "DELETE"):
        expect_error(api.request(method, target), 404, "not_found")


@pytest.mark.parametrize(
    ("target", "methods"),
    [
        ("/v0/topics", "GET"),
        ("/v0/topics/{topic}", "PUT GET DELETE POST"),
        ("/v0/topics/{topic}/diff", "POST"),
        ("/v0/topics/{topic}/delete", "POST"),
        ("/v0/watch", "POST"),
        ("/v0/watch/wid_AAAAAAAAAAAAAAAAAAAAAA", "GET"),
        ("/v0/ws", "GET"),
        ("/v0/health", "GET"),
        ("/healthz", "GET"),
        ("/v0/ready", "GET"),
        ("/readyz", "GET"),
        ("/v0/metrics", "GET"),
    ],
)
def test_a_known_path_with_another_method_is_405(api: Api, topic: str, target: str, methods: str) -> None:
    """§1.3, and C: GET on /delete. HEAD is allowed where GET is."""
    allowed = set(methods.split()) | ({"HEAD"} if "GET" in methods else set())
    for method in {"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"} - allowed:
        reply = api.request(method, target.format(topic=topic), None if method in ("GET", "HEAD") else b"")
        if method == "HEAD":
            assert (reply.status, reply.body) == (405, b"")
        else:
            expect_error(reply, 405, "method_not_allowed")


@pytest.mark.parametrize(
    "target", ["/v0/topics", "/v0/topics/{topic}", "/v0/health", "/healthz", "/v0/ready", "/readyz", "/v0/metrics"]
)
def test_head_works_wherever_get_works(api: Api, topic: str, target: str) -> None:
    """§1.1: the same head, no body, and the connection goes on."""
    api.create_topic(topic)
    got, head = (api.request(method, target.format(topic=topic)) for method in ("GET", "HEAD"))
    assert (head.status, head.body) == (200, b"")
    assert head.header("content-type") == got.header("content-type")
    assert int(head.header("content-length") or 0) > 0
    assert api.get("/v0/health").status == 200


def test_head_of_what_is_not_there_is_404_without_a_body(api: Api, topic: str) -> None:
    for target in ("/nowhere", topic_path(topic), "/v0/watch/wid_nope"):
        head = api.request("HEAD", target)
        assert (head.status, head.body, head.header("content-type")) == (404, b"", "application/json")


def test_head_of_a_stream_has_its_headers_and_holds_no_slot(api: Api, topic: str) -> None:
    api.create_topic(topic)
    held = api.metrics()["sse_connections"]
    head = api.request("HEAD", api.watch({topic: {}})["stream_url"])
    assert head.status == 200
    assert (head.header("content-type") or "").startswith("text/event-stream")
    assert api.metrics()["sse_connections"] == held


# ── paths ─────────────────────────────────────────────────────────────────────────────────────


def test_a_part_of_a_path_is_decoded_once(api: Api, topic: str) -> None:
    """§1.1: `%3A` is `:`; `%2541` is `%41` and never `A`."""
    coded = "".join(f"%{ord(letter):02X}" for letter in topic)
    assert expect_success(api.put(f"/v0/topics/{coded}"), 201)["topic"] == topic
    assert expect_success(api.put(f"/v0/topics/{topic}%3ab"), 201)["topic"] == f"{topic}:b"
    expect_error(api.get(f"/v0/topics/{topic}%2541"), 404, "topic_not_found", {"topic": f"{topic}%41"})
    expect_error(api.put(f"/v0/topics/{topic}%2541"), 400, "invalid_request")
    expect_error(api.get(f"/v0/topics/{topic}%2Fx"), 404, "topic_not_found", {"topic": f"{topic}/x"})
    expect_error(api.put(f"/v0/topics/{topic}%2Fx"), 400, "invalid_request")
    expect_error(api.get("/v0/topics/%E2%82%AC"), 404, "topic_not_found", {"topic": "€"})
    assert expect_success(api.get(f"/v0/topics/{topic}?touch=%66alse"))["last_read_ts"] is None, (
        "a query is decoded too"
    )


@pytest.mark.parametrize("part", ["%ff", "a%C3", "%c0%80", "%ED%A0%80", "%80x"])
def test_a_path_that_cannot_be_decoded_is_400_with_the_envelope(api: Api, part: str) -> None:
    """§1.8, D12: not plain text."""
    for method, rest in (("GET", ""), ("PUT", ""), ("DELETE", ""), ("POST", "/diff")):
        expect_error(
            api.request(method, f"/v0/topics/{part}{rest}", b"" if method != "GET" else None), 400, "invalid_request"
        )
    assert api.get("/v0/health").status == 200


@pytest.mark.parametrize("part", ["%zz", "%", "a%4"])
def test_half_an_escape_is_no_server_error(api: Api, part: str) -> None:
    """§1.1: what such a name means is open; that it is answered with the envelope is not."""
    reply = api.get(f"/v0/topics/{part}")
    assert reply.status in (400, 404)
    expect_error(reply, reply.status, "invalid_request" if reply.status == 400 else "topic_not_found", ANY)


# ── media type and size (§1.4, §1.6, §1.12) ───────────────────────────────────────────────────

BODIED = [("POST", ""), ("POST", "/diff"), ("POST", "/delete"), ("PUT", "")]


@pytest.mark.parametrize(("method", "rest"), [*BODIED, ("WATCH", "")])
@pytest.mark.parametrize(
    "kind", [None, "text/plain", "text/json", "application/octet-stream", "json", "application/x-www-form-urlencoded"]
)
def test_another_media_type_is_415_before_anything_is_parsed(
    api: Api, topic: str, method: str, rest: str, kind: str | None
) -> None:
    """§1.6: checked before JSON, and before the topic is looked for."""
    target, method = ("/v0/watch", "POST") if method == "WATCH" else (topic_path(topic, rest), method)
    headers = [] if kind is None else [("Content-Type", kind)]
    expect_error(api.request(method, target, b"{not json", headers), 415, "unsupported_media_type")
    assert not api.exists(topic)


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "application/json;x=y", "  application/json  "])
def test_a_media_type_may_have_parameters_and_blanks(api: Api, topic: str, kind: str) -> None:
    """§1.6: begins with application/json."""
    reply = api.request("POST", topic_path(topic), dumps({"records": [{"data": 1}]}), [("Content-Type", kind)])
    expect_success(reply, 201)


def test_no_body_at_all_is_an_empty_object_where_the_contract_says_so(api: Api, topic: str) -> None:
    """§1.6: PUT topic and diff, with any media type and without; everywhere else 415, or 400 with the right one."""
    assert expect_success(api.request("PUT", topic_path(topic)), 201)["created"]
    assert not expect_success(api.request("PUT", topic_path(topic), b"", [JSON]))["created"]
    assert expect_success(api.request("POST", topic_path(topic, "/diff")))["records"] == []
    form = ("Content-Type", "application/x-www-form-urlencoded")  # as curl says of -d ''
    assert not expect_success(api.request("PUT", topic_path(topic), b"", [form]))["created"]
    for kind in (JSON, form):
        assert expect_success(api.request("POST", topic_path(topic, "/diff"), b"", [kind]))["records"] == []
    for target in (topic_path(topic), topic_path(topic, "/delete"), "/v0/watch"):
        expect_error(api.request("POST", target), 415, "unsupported_media_type")
        expect_error(api.request("POST", target, b"", [JSON]), 400, "invalid_request")


def chunks(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def test_a_body_as_large_as_the_limit_is_taken_and_one_byte_more_is_413(
    small_limits_server: Server, topic: str
) -> None:
    """§1.12: exactly at the limit is accepted."""
    body = dumps({"records": [{"data": "x"}]})
    with small_limits_server.client() as client:
        expect_success(client.request("POST", topic_path(topic), body.ljust(BODY_MAX), [JSON]), 201)
        expect_error(
            client.request("POST", topic_path(topic), body.ljust(BODY_MAX + 1), [JSON]), 413, "payload_too_large"
        )
        assert client.state(topic)["head_seq"] == 1


def test_a_body_over_the_limit_beats_a_wrong_media_type_and_broken_json(small_limits_server: Server) -> None:
    """§1.4: 413 before 415 before 400."""
    with small_limits_server.client() as client:
        for headers in ([], [("Content-Type", "text/plain")], [JSON]):
            for target in (topic_path("t"), topic_path("t", "/diff"), topic_path("t", "/delete"), "/v0/watch"):
                reply = client.request("POST", target, b"{" * (BODY_MAX + 1), headers)
                expect_error(reply, 413, "payload_too_large")
            expect_error(
                client.request("PUT", topic_path("t"), b"{" * (BODY_MAX + 1), headers), 413, "payload_too_large"
            )


def test_a_body_in_chunks_over_the_limit_is_413_and_the_connection_goes_on(
    small_limits_server: Server, topic: str
) -> None:
    """§1.12, E: a limit without a Content-Length."""
    with small_limits_server.client() as client:
        wire = client.connection
        head = client.encode_request("POST", topic_path(topic), headers=[JSON, ("Transfer-Encoding", "chunked")])
        wire.send(head + chunks(*[b"x" * 500] * 20))
        expect_error(client.end(), 413, "payload_too_large")
        assert client.request("GET", "/v0/health").status == 200
        assert client.connection is wire, "the same connection"
        assert not client.exists(topic)


@pytest.mark.parametrize("chunked", [False, True])
def test_the_answer_to_a_large_body_is_not_lost_to_a_reset(small_limits_server: Server, chunked: bool) -> None:
    """E: a client that first sends all of it, and only then reads, still gets its 413."""
    size = 8 << 20
    framing = ("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(size))
    with small_limits_server.client() as client:
        client.connection.send(client.encode_request("POST", topic_path("t"), headers=[JSON, framing]))
        for _ in range(size >> 16):
            part = b"x" * (1 << 16)
            client.connection.send(b"10000\r\n%b\r\n" % part if chunked else part)
        if chunked:
            client.connection.send(b"0\r\n\r\n")
        expect_error(client.end(), 413, "payload_too_large")


def test_a_client_that_asks_first_is_refused_without_sending_its_body(small_limits_server: Server) -> None:
    """`Expect: 100-continue` with a length over the limit: 413 in the place of 100."""
    headers = [JSON, ("Expect", "100-continue"), ("Content-Length", str(BODY_MAX + 1))]
    with small_limits_server.client() as client:
        client.connection.send(client.encode_request("POST", topic_path("t"), headers=headers))
        assert client.connection.head().status == 413


def test_a_body_that_is_moderately_too_large_does_not_cost_the_connection(api: Api) -> None:
    """§1.12: at the limit that a server has by itself, 64 MiB, the rest of a longer body is read and thrown away."""
    size, part = 90_000_000, b"x" * 1_000_000
    with api as client:
        wire = client.connection
        wire.send(client.encode_request("POST", topic_path("t"), headers=[JSON, ("Content-Length", str(size))]))
        for _ in range(size // len(part)):
            wire.send(part)
        expect_error(client.end(), 413, "payload_too_large")
        assert client.get("/v0/health").status == 200
        assert client.connection is wire, "the same connection"


def test_the_lines_of_a_list_are_one_list(server: Server, api: Api, topic: str) -> None:
    """RFC 9110, 5.3: for both versions of HTTP."""
    api.create_topic(topic)
    accept = [("Accept", "text/html"), ("Accept", "text/event-stream")]
    codings = [("Accept-Encoding", "br"), ("Accept-Encoding", "gzip")]
    stream = f"/v0/watch/{api.watch({topic: {}})['wid']}"
    with H2Client(server.address) as client:
        for reply in (api.request("HEAD", stream, headers=accept), client.request("HEAD", stream, headers=accept)):
            assert reply.status == 200
        target = "/v0/openapi.json"
        for reply in (api.get(target, codings), client.request("GET", target, headers=codings)):
            assert (reply.status, reply.header("content-encoding")) == (200, "gzip")
        assert api.request("HEAD", stream, headers=accept[:1]).status == 406


def counted(client: Api, status: int, route: str = ".*", method: str = ".*") -> int:
    """How many such answers the server has counted."""
    text = client.request("GET", "/v0/metrics").body.decode()
    row = rf'^tidelog_requests_total{{method="{method}",route="{route}",status="{status}"}} (\d+)$'
    return sum(map(int, re.findall(row, text, re.MULTILINE)))


MINE = b"Host: localhost\r\nX-Request-Id: mine\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "route", "method", "name"),
    [
        (b"G\x00T / HTTP/1.1\r\n" + MINE + b"\r\n", 400, "other", "other", None),
        (b"GET /v0/health HTTP/1.1\r\nX-Request-Id: mine\r\n\r\n", 400, "/v0/health", "GET", "mine"),
        (b"POST /v0/watch HTTP/1.1\r\n" + MINE + b"Content-Length: 9999\r\n\r\n", 413, "/v0/watch", "POST", "mine"),
        (b"GET /v0/" + b"x" * 40_000 + b" HTTP/1.1\r\n" + MINE + b"\r\n", 414, "other", ".*", None),
        (
            b"POST /v0/watch HTTP/1.1\r\n" + MINE + b"Content-Encoding: br\r\nContent-Length: 1\r\n\r\nx",
            *(415, "/v0/watch", "POST", "mine"),
        ),
        (
            b"GET /v0/ws HTTP/1.1\r\n" + MINE + b"Connection: upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 12\r\n\r\n",
            *(426, "/v0/ws", "GET", "mine"),
        ),
        (b"GET /v0/health HTTP/1.1\r\n" + MINE + b"A: " + b"x" * 70_000 + b"\r\n\r\n", 431, ".*", ".*", None),
        (
            b"POST /v0/watch HTTP/1.1\r\n" + MINE + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
            *(501, "/v0/watch", "POST", "mine"),
        ),
        (b"GET /v0/health HTTP/2.0\r\n" + MINE + b"\r\n", 505, "/v0/health", "GET", "mine"),
    ],
    ids=[*("no request", "no host", "413", "414", "415", "426", "431", "501", "505")],
)
def test_what_no_handler_answers_has_an_id_and_is_counted(
    small_limits_server: Server, sent: bytes, status: int, route: str, method: str, name: str | None
) -> None:
    """The client's own id where the head could be read. How much of a head that is too long was, depends on how it
    came."""
    with small_limits_server.client() as client, RawConnection(client.address) as wire:
        before = counted(client, status, route, method)
        wire.send(sent)
        reply = wire.reply()
        assert reply.status == status
        assert reply.header("x-request-id")
        assert name in (None, reply.header("x-request-id"))
        assert counted(client, status, route, method) == before + 1


@pytest.mark.parametrize(
    ("target", "body", "headers", "status", "route"),
    [
        ("/v0/watch", b"x" * 9999, [JSON], 413, "/v0/watch"),
        ("/v0/watch?" + "x" * 40_000, b"{}", [JSON], 414, "/v0/watch"),
        ("/v0/watch", b"{}", [JSON, ("Content-Encoding", "br")], 415, "/v0/watch"),
        ("/v0/watch", b"no gzip", [JSON, ("Content-Encoding", "gzip")], 400, "/v0/watch"),
        ("watch", b"{}", [JSON], 400, "other"),
    ],
    ids=["413", "414", "415", "no gzip", "no path"],
)
def test_what_no_handler_answers_over_http_2_has_an_id_and_is_counted(
    small_limits_server: Server, target: str, body: bytes, headers: list[tuple[str, str]], status: int, route: str
) -> None:
    with small_limits_server.client() as client, H2Client(small_limits_server.address) as wire:
        before = counted(client, status, route, "POST")
        reply = wire.request("POST", target, body, [*headers, ("X-Request-Id", "mine")])
        assert (reply.status, reply.header("x-request-id")) == (status, "mine")
        assert counted(client, status, route, "POST") == before + 1


# ── streams that break (docs/http.md) ─────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["cut", "flipped", "no chunk"])
def test_a_stream_in_that_breaks_off_says_what_was_written(api: Api, topic: str, how: str) -> None:
    """Two batches of three are whole before it; of what came last it depends on how it came."""
    body = b"".join(b'{"data":"%d"}\n' % (number * 7919**5 % 10**18) for number in range(25_000))
    packed = bytearray(gzip.compress(body))
    headers = [("Content-Type", "application/x-ndjson")]
    if how == "no chunk":
        framing = [("Transfer-Encoding", "chunked")]
        sent = b"%x\r\n%b\r\nzz\r\n" % (len(body), body)
    else:
        if how == "cut":
            del packed[-100:]
        else:
            packed[-6] ^= 1
        framing = [("Content-Encoding", "gzip"), ("Content-Length", str(len(packed)))]
        sent = bytes(packed)
    api.create_topic(topic)
    with RawConnection(api.address) as wire:
        wire.send(api.encode_request("POST", topic_path(topic), headers=[*headers, *framing]) + sent)
        error = expect_error(wire.reply(), 400, "invalid_request", ANY)
    count = api.state(topic)["head_seq"]
    assert error["detail"]["written"]["count"] == count
    assert error["detail"]["written"]["ranges"] == ([[1, count]] if count else [])
    assert ("nothing was" in error["message"]) == (not count)
    if how == "cut":
        assert count == 20_000


# ── JSON (§1.6, E) ────────────────────────────────────────────────────────────────────────────

U64 = [-1, 1.0, 1.5, "1", True, None, [], {}, 1 << 64]
U32 = [*U64, 1 << 32]
BOOL = [0, 1, "true", None, [], {}]
STRING = [1, True, [], {}]

ILL_TYPED: list[tuple[str, str, list[Any]]] = [
    *(
        ("PUT", field, U64)
        for field in (
            "ttl_ms",
            "cap_records",
            "cap_bytes",
            "idempotency_window_ms",
            "lease_ms",
            "claim_jitter_ms",
            "max_deliveries",
        )
    ),
    *(("PUT", field, BOOL) for field in ("durable", "auto_priority", "auto_create", "dedupe_node", "leases_durable")),
    ("PUT", "type", [None, 1, "LOG", "stack", ""]),
    ("PUT", "discard", [None, True, "new", "Old", ""]),
    ("PUT", "durability", [1, True, "FSYNC", "none", ""]),
    ("PUT", "priority", [1.0, "1", True, [], 1 << 31, -(1 << 31) - 1]),
    ("PUT", "dead_letter", [1, True, [], {}]),
    ("/diff", "from_seq", U64),
    ("/diff", "limit", U32),
    ("/diff", "wait_ms", U32),
    ("/diff", "max_batch_bytes", U64),
    ("/diff", "include_tags", BOOL),
    ("/diff", "include_meta", BOOL),
    ("/diff", "node", [1, True, {}, [1], [None], [["a"]]]),
    ("/delete", "before_seq", [value for value in U64 if value is not None]),
    ("WRITE", "records", [None, {}, "x", 1, [1], [[]], [None], ["x"]]),
    ("WRITE", "node", STRING),
    ("WRITE", "idempotency_key", STRING),
    ("WRITE", "create", [0, 1, "true", [], {}]),
    ("WRITE", "config", [1, "x", [], True]),
    ("WRITE", "disable_backpressure", BOOL),
    ("RECORD", "tag", STRING),
    ("RECORD", "node", STRING),
    ("WATCH", "limit", U32),
    ("WATCH", "max_batch_bytes", U64),
    ("WATCH", "heartbeat_ms", U64),
    ("WATCH", "include_meta", BOOL),
    ("WATCH", "include_tags", BOOL),
    ("WATCH", "include_data", BOOL),
    ("WATCH", "node", [1, True, {}, [1], [None]]),
    ("WATCH", "consistency", [None, 1, "Strong", "", "weak"]),
    ("WATCH", "topics", [None, [], "x", 1, ["a"], {"a": 1}, {"a": None}, {"a": "tail"}]),
    ("SPOT", "from_seq", U64),
    ("SPOT", "tail", BOOL),
]


@pytest.mark.parametrize(("where", "field", "values"), ILL_TYPED)
def test_types_are_strict(api: Api, topic: str, where: str, field: str, values: list[Any]) -> None:
    """§1.6: no float, string, boolean or null for an integer, no 0 or 1 for a boolean; all of it 400."""
    api.create_topic(topic)
    for value in values:
        match where:
            case "PUT":
                reply = api.put(topic_path(topic), {field: value})
            case "WRITE":
                reply = api.post(topic_path(topic), {"records": [{"data": 1}], field: value})
            case "RECORD":
                reply = api.post(topic_path(topic), {"records": [{"data": 1, field: value}]})
            case "WATCH":
                reply = api.post("/v0/watch", {"topics": {topic: {}}, field: value})
            case "SPOT":
                reply = api.post("/v0/watch", {"topics": {topic: {field: value}}})
            case _:
                reply = api.post(topic_path(topic, where), {field: value})
        assert reply.status == 400, (field, value, reply.status, reply.body)
        expect_error(reply, 400, "invalid_request", ANY)
    now = api.state(topic)
    assert (now["head_seq"], now["config"]["ttl_ms"]) == (0, 0), "nothing was done"


def test_null_is_absent_where_the_contract_says_so(api: Api, topic: str) -> None:
    """§1.6, §1.13, §1.14, §2.5, §2.6, §2.7."""
    made = api.create_topic(topic, durability=None, priority=None, dead_letter=None)["config"]
    assert (made["durability"], made["priority"], made["dead_letter"]) == ("disk", None, None)
    record = {"data": None, "tag": None, "node": None, "meta": None}
    wrote = api.records(topic, record, node=None, idempotency_key=None, create=None, config=None)
    assert wrote["count"] == 1
    got = api.diff(topic, node=None, include_tags=True)["records"][0]
    assert got.keys() == {"$seq", "$ts", "data"}, "and is never shown"
    assert api.remove(topic, before_seq=2, match=None)["deleted"] == 1


def test_the_largest_integers_of_a_type_are_taken(api: Api, topic: str) -> None:
    """§1.6: u64 and u32, to their last value."""
    top = (1 << 64) - 1
    assert api.create_topic(topic, ttl_ms=top, cap_bytes=top)["config"]["ttl_ms"] == top
    assert api.configure(topic, priority=-(1 << 31))["config"]["priority"] in (-(1 << 31), -1000)
    api.write(topic, 1)
    assert api.diff(topic, limit=(1 << 32) - 1, max_batch_bytes=top, from_seq=0)["next_from_seq"] == 1
    assert api.diff(topic, from_seq=top)["tombstone"]["reason"] == "recreated"
    assert api.remove(topic, before_seq=top)["deleted"] == 1
    watched = api.watch({topic: {"from_seq": top}}, heartbeat_ms=top, limit=(1 << 32) - 1)
    assert watched["topics"][topic]["from_seq"] == top, "as it was asked for"


DEEP = b"[" * 200 + b"]" * 200
NO_JSON = [
    b"",
    b" ",
    b"{",
    b"{}{}",
    b'{"records":[{"data":1}]} x',
    b'{"records":[{"data":1}],}',
    b"{'records':[]}",
    b"[]",
    b"null",
    b"1",
    b'"x"',
    b"\xef\xbb\xbf" + b'{"records":[{"data":1}]}',
    b'{"records":[{"data":"\xff"}]}',
    b'{"records":[{"data":"\xed\xa0\x80"}]}',
    b'{"records":[{"data":NaN}]}',
    b'{"records":[{"data":Infinity}]}',
    b'{"records":[{"data":-Infinity}]}',
    b'{"records":[{"data":01}]}',
    b'{"records":[{"data":"a\nb"}]}',
    b'{"records":[{"data":' + DEEP + b"}]}",
    b'{"records":[{"data":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
    b'{"records":[{"data":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}]}",
    b'{"records":[{"data":1,"meta":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}]}",
]


@pytest.mark.parametrize("body", NO_JSON, ids=range(len(NO_JSON)))
def test_what_is_not_json_is_400_and_nothing_is_done(api: Api, topic: str, body: bytes) -> None:
    """§1.6, E: trailing bytes, BOM, invalid UTF-8, NaN, and nesting beyond about 128."""
    expect_error(api.request("POST", topic_path(topic), body, [JSON]), 400, "invalid_request")
    assert not api.exists(topic)
    if body:
        expect_error(
            api.request("POST", topic_path(topic, "/diff"), body.replace(b"records", b"x") + b"]", [JSON]),
            400,
            "invalid_request",
        )


def test_nesting_that_is_not_too_deep_is_kept(api: Api, topic: str) -> None:
    """E: about 128 levels."""
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    api.write(topic, deep, {"a": deep})
    assert [record["data"] for record in api.diff(topic)["records"]] == [deep, {"a": deep}]


def test_deep_nesting_in_an_unknown_field_breaks_nothing(api: Api, topic: str) -> None:
    """§1.1, E: ignored or refused, never 5xx."""
    body = b'{"records":[{"data":1}],"stray":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    assert api.request("POST", topic_path(topic), body, [JSON]).status in (201, 400)
    assert api.get("/v0/health").status == 200


def test_unknown_fields_are_ignored_everywhere(api: Api, topic: str) -> None:
    """§1.1: clients send stray ones."""
    stray: dict[str, Any] = {"stray": {"a": [1]}, "ok": None}
    assert expect_success(api.put(topic_path(topic), {"ttl_ms": 0, **stray}), 201)["config"].keys() >= {"ttl_ms"}
    body = {"records": [{"data": 1, **stray}], "return_seqs": False, "seqs": [1], **stray}
    assert expect_success(api.post(topic_path(topic), body))["seqs"] == [1]
    found = api.diff(topic, **stray)["records"]
    assert found[0].keys() == {"$seq", "$ts", "data"}
    assert api.remove(topic, before_seq=1, **stray)["deleted"] == 0
    watched = api.watch({topic: {"from": "tail", **stray}}, **stray)
    assert watched["topics"][topic]["from_seq"] == 0
    config = {"ttl_ms": 5_000, **stray}
    assert api.write(f"{topic}-2", 1, config=config)["created"]
    assert api.state(f"{topic}-2")["config"]["ttl_ms"] == 5_000
    assert api.topics(f"?prefix={topic}&stray=1")["topics"]


@pytest.mark.parametrize(
    "data",
    [
        None,
        True,
        False,
        0,
        -1,
        1.5,
        1e300,
        12345678901234567890,
        "",
        "plain",
        'a "quoted" \\ line\nand\ttab / \u0000 \u2028 \x7f',
        "ünïcödé € 🌊",
        [],
        {},
        [1, [2, [3]]],
        {"z": 1, "a": {"ü": None}, "": []},
        {"$seq": 99, "$ts": 0, "data": "mine"},
    ],
)
def test_data_comes_back_as_the_value_that_was_sent(api: Api, topic: str, data: Any) -> None:
    """§1.6, §1.14: any JSON, null too."""
    api.write(topic, data)
    found = api.diff(topic)["records"][0]
    assert found.keys() == {"$seq", "$ts", "data"}
    assert found["data"] == data
    assert type(found["data"]) is type(data)


def test_escapes_and_blanks_change_no_value(api: Api, topic: str) -> None:
    """§1.6: compare by JSON value."""
    body = b'{ "records" : [ { "data" : { "a" : "\\u00e9\\ud83c\\udf0a\\/\\n" , "b" : [ 1 , 2.50 , 1E2 ] } } ] }'
    expect_success(api.request("POST", topic_path(topic), body, [JSON]), 201)
    assert api.diff(topic)["records"][0]["data"] == {"a": "é🌊/\n", "b": [1, 2.5, 100.0]}


@pytest.mark.parametrize(
    ("text", "touched"),
    [
        ("true", True),
        ("1", True),
        ("false", False),
        ("0", False),
        ("", True),
        ("TRUE", True),
        ("no", True),
        ("2", True),
    ],
)
def test_a_boolean_of_a_query_that_is_neither_is_the_default(api: Api, topic: str, text: str, touched: bool) -> None:
    """§1.6: `true|1`, `false|0`, anything else the default; here of `touch`, which is true."""
    api.create_topic(topic)
    assert (api.state(topic, f"?touch={text}")["last_read_ts"] is not None) == touched


def test_the_envelope_is_compact_in_what_it_says(api: Api, topic: str) -> None:
    """§1.8: `{"error":{"code","message","detail"}}` and nothing beside it, whoever refuses."""
    answers = [
        (api.get("/nowhere"), 404, "not_found", None),
        (api.request("PATCH", "/v0/topics"), 405, "method_not_allowed", None),
        (api.get(topic_path(topic)), 404, "topic_not_found", {"topic": topic}),
        (api.put("/v0/topics/-bad", {}), 400, "invalid_request", None),
        (api.get("/v0/watch/wid_nope"), 404, "not_found", None),
        (api.get("/v0/watch/wid_nope", [("Accept", "application/json")]), 406, "not_acceptable", None),
    ]
    for reply, status, code, detail in answers:
        expect_error(reply, status, code, detail)
        assert reply.header("content-type") == "application/json"
