"""Nonsense of every kind against a live server: it answers or closes, and is whole afterwards.

Never a 500, never a hang, never a slot or a connection that stays. Each kind has a seed of its own, and a failure
names the case; 501 and 505 are what HTTP has for codings and versions that a server does not speak.
"""

from __future__ import annotations

import json
import socket
import struct
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random
from typing import Any, Final
from urllib.parse import quote

import pytest

from tests.contract_http.client import JSON, RawConnection, Reply, dumps, loads
from tests.contract_http.http2 import PREFACE
from tests.contract_http.server import Server
from tests.kit.waiting import eventually

PATIENCE_S: Final = 10.0
UPGRADE: Final = (
    b"GET /v0/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
BODY: Final = (
    b'{"records":[{"data":{"a":[1,2.5,null,"x"]},"tag":"t","node":"n","meta":{"k":"v"}}],"node":"b","create":true}'
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own, which holds nothing and nobody at the end."""
    with Server(tmp_path_factory.mktemp("fuzz"), max_body_bytes=1 << 20).start() as running:
        with running.client() as api:
            api.write("t", 1)
        yield running


@pytest.fixture(autouse=True)
def _whole_afterwards(target: Server) -> Iterator[None]:
    """It answers, and neither a slot nor a connection is left."""
    with target.client() as api:
        assert api.get("/v0/health").status == 200
        before = target.open_files
        yield
        assert api.get("/v0/health").json()["status"] == "ok"
        assert api.metrics()["ready"] is True
        assert api.metrics()["wal"]["read_only"] is False
        eventually(lambda: api.metrics()["sse_connections"] == 0)
        # Files of the log come and go by ones and twos; a connection for each case would be hundreds.
        eventually(lambda: target.open_files <= before + 8)


def check(reply: Reply, case: object) -> None:
    """An answer that may be given to nonsense."""
    assert reply.status < 500 or reply.status in (501, 505), (case, reply)
    if reply.status >= 400:
        error = loads(reply.body)["error"]
        assert error.keys() <= {"code", "message", "detail"}, (case, reply)
        assert error["message"], (case, reply)


def talk(server: Server, data: bytes, case: object) -> list[Reply]:
    """What comes back for these bytes and the end of them; the server must close."""
    found: list[Reply] = []
    with RawConnection(server.address, PATIENCE_S) as wire:
        with suppress(ConnectionResetError, BrokenPipeError):
            wire.send(data)
            wire.socket.shutdown(socket.SHUT_WR)
        try:
            with suppress(ConnectionResetError):
                wire.drain()
        except TimeoutError:
            raise AssertionError(f"{case}: the connection hangs") from None
        while wire.held.startswith(b"HTTP/1.1 "):
            head, separator, _ = bytes(wire.held).partition(b"\r\n\r\n")
            if not separator:
                break
            del wire.held[: len(head) + 4]
            status = int(head.split(b" ", 2)[1])
            lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
            size = int(lines.get(b"content-length", 0))
            body = bytes(wire.held[:size])
            del wire.held[:size]
            found.append(Reply("HTTP/1.1", status, (), body if len(body) == size else b'{"error":{"message":"cut"}}'))
    return found


def spoil(random: Random, data: bytes) -> bytes:
    """These bytes with one to four mistakes."""
    made = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(made) + 1)
        match random.randrange(7):
            case 0 if made:
                made[at % len(made)] = random.randrange(256)
            case 1:
                made[at:at] = random.randbytes(random.randint(1, 9))
            case 2:
                del made[at : at + random.randint(1, 20)]
            case 3:
                part = bytes(made[at : at + random.randint(1, 40)])
                made[at:at] = part * random.randint(1, 3)
            case 4:
                del made[at:]
            case 5:
                made[at:at] = random.choice(
                    [b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"%", b"\xff", b"-1", b"99999999999999999999"]
                )
            case _:
                made[at:at] = random.choice(
                    [b"\r\nTransfer-Encoding: chunked", b"\r\nContent-Length: 5", b"\r\nHost: y"]
                )
    return bytes(made)


REQUESTS: Final = [
    b"GET /v0/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /v0/topics?page_size=5&prefix=a&cursor= HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n",
    b"POST /v0/topics/t HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    % (len(BODY), BODY),
    b"POST /v0/topics/t HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    b"PUT /v0/topics/t HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}",
    b"POST /v0/topics/t/diff HTTP/1.1\r\nHost: localhost\r\n\r\nGET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"DELETE /v0/topics/gone?if_empty=true HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"POST /v0/watch HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
    UPGRADE,
]


def test_bytes_that_are_almost_http(target: Server, record_count: Callable[[str, int], None]) -> None:
    """§1.8: malformed HTTP/1.1."""
    random = Random(1)
    answers = 0
    for number in range(900):
        data = spoil(random, random.choice(REQUESTS))
        for reply in talk(target, data, (number, data)):
            check(reply, (number, data))
            answers += 1
    assert answers > 300, "most of it is understood well enough to be refused"
    record_count("fuzz cases", 900)


def test_frames_that_are_almost_http_2(target: Server, record_count: Callable[[str, int], None]) -> None:
    """§1.1: what follows the preface is nonsense."""
    random = Random(2)
    headers = b"\x82\x84\x86\x41\x01x"  # GET / over http, authority x
    good = [
        b"\0\0\0\4\0\0\0\0\0",
        b"\0\0\6\1\5\0\0\0\1" + headers,
        b"\0\0\10\6\0\0\0\0\0abcdefgh",
        b"\0\0\4\10\0\0\0\0\0\0\1\0\0",
        b"\0\0\4\3\0\0\0\0\1\0\0\0\10",
    ]
    for number in range(300):
        frames = b"".join(random.choices(good, k=random.randint(1, 6)))
        data = PREFACE + b"\0\0\0\4\0\0\0\0\0" + (spoil(random, frames) if number % 5 else random.randbytes(60))
        talk(target, data, (number, data))
    record_count("fuzz cases", 300)


def value(random: Random, depth: int = 0) -> Any:
    """Any JSON, most often of the kind that is not expected."""
    kind = random.randrange(9 if depth < 3 else 7)
    if kind == 7:
        return [value(random, depth + 1) for _ in range(random.randint(0, 3))]
    if kind == 8:
        return {key(random): value(random, depth + 1) for _ in range(random.randint(0, 3))}
    return random.choice(
        [
            None,
            True,
            False,
            0,
            1,
            -1,
            1.5,
            1e308,
            1 << 63,
            1 << 64,
            -(1 << 63),
            "",
            "t",
            "*",
            "tag",
            "\ud800",
            "\0",
            "é" * 99,
        ]
    )


# fmt: off
FIELDS: Final = [
    "records", "data", "tag", "node", "meta", "create", "config", "idempotency_key",
    "from_seq", "limit", "wait_ms", "max_batch_bytes", "include_tags", "include_meta", "include_data", "before_seq",
    "match", "topics", "tail", "heartbeat_ms", "consistency", "type", "ttl_ms", "cap_records",
    "cap_bytes", "discard", "durable", "durability", "priority", "auto_create", "lease_ms", "dead_letter",
    "$encoding", "op", "topic", "request_id", "lenient",
]
# fmt: on


def key(random: Random) -> str:
    return random.choice([*FIELDS, "t", "", "$seq", "\u0000", "x" * 300])


def body(random: Random) -> bytes:
    """A body of known fields with whatever in them, or one that is almost JSON."""
    if random.random() < 0.3:
        return spoil(random, BODY)
    made = {random.choice(FIELDS): value(random) for _ in range(random.randint(0, 4))}
    made.pop("wait_ms", None)  # a long poll that is asked for is no hang
    if random.random() < 0.4:
        made["records"] = [{"data": value(random), random.choice(FIELDS): value(random)}]
    if random.random() < 0.2:
        made["topics"] = {"t": value(random)}
    if random.random() < 0.2:
        made["match"] = [random.choice(["tag", "Eq", "Glob", 1]) for _ in range(random.randint(0, 4))]
    return json.dumps(made, ensure_ascii=random.random() < 0.8, allow_nan=True).encode("utf-8", "surrogatepass")


def test_bodies_that_are_almost_requests(target: Server, record_count: Callable[[str, int], None]) -> None:
    """§1.6: JSON of the wrong kind in every field of every endpoint; what is taken can be read back."""
    random = Random(3)
    routes = [
        ("POST", "/v0/topics/t"),
        ("POST", "/v0/topics/t/diff"),
        ("POST", "/v0/topics/t/delete"),
        ("POST", "/v0/watch?lenient=1"),
        ("PUT", "/v0/topics/t2"),
        ("POST", "/v0/topics/fresh"),
    ]
    taken = 0
    with target.client() as api:
        for number in range(1_500):
            method, route = random.choice(routes)
            data = body(random)
            reply = api.request(method, route, data, [JSON])
            check(reply, (number, method, route, data))
            taken += reply.status < 400
            if number % 50 == 0:
                for topic in ("t", "t2", "fresh"):
                    if api.exists(topic):
                        api.diff(topic, limit=1000, include_tags=True)  # valid JSON and UTF-8, whatever was written
                api.drop("fresh")
        assert taken > 150, "some of it is a request after all"
    record_count("fuzz cases", 1_500)


def text(random: Random) -> str:
    letters = "abc019%&=+;#?/\\\"'<>{}[]|^`~!*().,:-_ \t"
    made = "".join(random.choice(letters) for _ in range(random.randint(0, 30)))
    return quote(made, safe="%&=+;/?:@!$'()*,-._~[]|") if random.random() < 0.8 else quote(random.randbytes(9))


def test_queries_and_paths_of_any_kind(target: Server, record_count: Callable[[str, int], None]) -> None:
    """§1.1, §1.6, §1.10: query strings, list cursors and names."""
    random = Random(4)
    with target.client() as api:
        for number in range(700):
            field = random.choice(["cursor", "page_size", "prefix", "touch", "if_empty", "return_seqs", "token", ""])
            query = random.choice([f"?{field}={text(random)}", f"?{text(random)}", f"?{field}", f"?{field}=1&{field}="])
            method, route = random.choice(
                [
                    ("GET", f"/v0/topics{query}"),
                    ("GET", f"/v0/topics/t{query}"),
                    ("GET", f"/v0/topics/{text(random)}"),
                    ("DELETE", f"/v0/topics/{quote(text(random), safe='')}x{query}"),
                    ("POST", f"/v0/topics/t/diff{query}"),
                    ("GET", f"/v0/watch/{text(random)}"),
                    ("GET", f"/{text(random)}"),
                ]
            )
            route = route.replace(" ", "").replace("#", "")
            check(api.request(method, route, b"" if method == "POST" else None), (number, method, route))
    record_count("fuzz cases", 700)


def test_ids_of_events_of_any_kind(target: Server, record_count: Callable[[str, int], None]) -> None:
    """§3.7: whatever a client says that it has seen, its stream begins."""
    random = Random(5)
    with target.client() as api:
        url = api.watch({"t": {}})["stream_url"]
    for number in range(200):
        made = random.choice(
            [
                random.randbytes(random.randint(0, 40)).hex(),
                urlsafe_b64encode(random.randbytes(random.randint(0, 40))).decode(),
                urlsafe_b64encode(dumps({"t": random.choice([0, -1, 1 << 70, None, "x", [], 1.5])})).decode(),
                urlsafe_b64encode(spoil(random, b'{"t":1}')).decode().rstrip("="),
                "".join(chr(random.choice([*range(33, 127), *range(128, 256)])) for _ in range(20)),
            ]
        )
        with target.events(url, headers={"Last-Event-ID": made}) as stream:
            assert stream.refusal is None, (number, made)
            assert stream.next().name in ("record", "caught-up"), (number, made)
    record_count("fuzz cases", 200)


def frame(random: Random, payload: bytes, wild: bool) -> bytes:
    """A frame of a WebSocket; a wild one has mistakes of its own beside those of its command."""
    mask = random.randbytes(4)
    masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))
    length = len(payload)
    if not wild:
        head = struct.pack(">BB", 0x81, 0x80 | length) if length < 126 else struct.pack(">BBH", 0x81, 0xFE, length)
        return head + mask + masked
    opcode = random.choice([1, 1, 1, 1, 2, 0, 8, 9, 10, random.randrange(16)])
    first = (
        (0x80 if random.random() < 0.85 else 0) | (random.randrange(8) << 4 if random.random() < 0.05 else 0) | opcode
    )
    lie = random.random()
    if lie < 0.03:
        length += random.randint(1, 10)
    if length < 126:
        head = struct.pack(">BB", first, 0x80 | length)
    elif lie < 0.06:
        head = struct.pack(">BBQ", first, 0xFF, 1 << random.randint(20, 63))
    else:
        head = struct.pack(">BBH", first, 0xFE, length)
    if random.random() < 0.03:
        return head + payload  # without its mask, and said to have one
    return head + mask + masked


def command(random: Random) -> bytes:
    if random.random() < 0.1:
        return random.randbytes(random.randint(0, 150))
    if random.random() < 0.2:
        return spoil(random, b'{"op":"subscribe","topics":{"t":{"from_seq":0,"tail":true}},"request_id":1}')
    made = loads(b"{}")
    made |= {random.choice(FIELDS): value(random) for _ in range(random.randint(0, 3))}
    made["op"] = random.choice(["subscribe", "unsubscribe", "publish", "ping", "dance", 1])
    made["topic"] = random.choice(["t", "t2", "-", 1, "fresh"])
    return json.dumps(made).encode()


def test_frames_that_are_almost_of_a_websocket(target: Server, record_count: Callable[[str, int], None]) -> None:
    """§3.9: wrong opcodes, lengths, masks, fragments and commands; the server answers or closes."""
    random = Random(6)
    answers = 0
    for number in range(400):
        data = b"".join(frame(random, command(random), number % 3 == 0) for _ in range(random.randint(1, 5)))
        with RawConnection(target.address, PATIENCE_S) as wire:
            with suppress(ConnectionResetError, BrokenPipeError):
                wire.send(UPGRADE + data)
                if number % 2 == 0:  # some wait for their answers, some go at once
                    with suppress(TimeoutError):
                        while wire.receive_more(0.02):
                            pass
                wire.socket.shutdown(socket.SHUT_WR)
            try:
                with suppress(ConnectionResetError):
                    wire.drain()
            except TimeoutError:
                raise AssertionError(f"case {number}: the connection hangs after {data!r}") from None
            assert wire.held.startswith(b"HTTP/1.1 101 "), (number, bytes(wire.held[:200]))
            assert b'"code":"internal"' not in wire.held, (number, data, bytes(wire.held[:2000]))
            answers += wire.held.count(b'{"op":')
    assert answers > 100, "most of it is understood well enough to be answered"
    record_count("fuzz cases", 400)


def test_clients_that_leave_at_any_moment(target: Server, record_count: Callable[[str, int], None]) -> None:
    """§1.12: cut off in the head, in the body, in a stream, in a socket; with a reset and without."""
    random = Random(7)
    with target.client() as api:
        stream = f"GET {api.watch({'t': {}})['stream_url']} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    poll = b"POST /v0/topics/t/diff HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\n"
    poll += b'Content-Length: 34\r\n\r\n{"from_seq":999999,"wait_ms":9000}'
    for _ in range(300):
        data = random.choice([*REQUESTS, stream, stream, poll, UPGRADE])
        with RawConnection(target.address, PATIENCE_S) as wire:
            wire.send(data if random.random() < 0.6 else data[: random.randrange(1, len(data))])
            if random.random() < 0.3:
                with suppress(TimeoutError):
                    wire.receive_more(0.005)
            if random.random() < 0.5:
                wire.abort()
    record_count("fuzz cases", 300)
