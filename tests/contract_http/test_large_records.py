"""Streamed records over HTTP: chunked, with a length, over HTTP/2; broken in the middle; and ranges of their data."""

from __future__ import annotations

from pathlib import Path
from random import Random
from urllib.parse import quote

import pytest
from xxhash import xxh3_64_hexdigest

from tests.contract_http.api import ANY, Api, expect_error, expect_success, topic_path
from tests.contract_http.client import RawConnection, Reply, dumps
from tests.contract_http.http2 import H2Client
from tests.contract_http.server import Server
from tests.contract_http.websocket_client import Socket
from tests.kit.waiting import eventually

CEILING = 8 << 20
DATA = Random(5).randbytes((3 << 20) + 17)


def make(api: Api, topic: str, **config: object) -> None:
    expect_success(api.put(topic_path(topic), {"max_record_bytes": CEILING, **config}), 201)


def post(api: Api, topic: str, data: bytes, query: str = "", **headers: str) -> Reply:
    fields = [("Content-Type", "application/octet-stream"), *((k.replace("_", "-"), v) for k, v in headers.items())]
    return api.request("POST", topic_path(topic, f"/stream{query}"), data, fields)


def head_of(api: Api, topic: str) -> int:
    return int(expect_success(api.get(topic_path(topic)))["head_seq"])


def blob_files(server: Server) -> list[str]:
    return sorted(path.name for path in Path(server.data).glob("topics/*/blobs/*"))


def test_a_stream_is_one_record_and_pages_show_a_reference(api: Api, topic: str) -> None:
    make(api, topic)
    query = f"?tag=big&node=n1&meta={quote(dumps({'k': 'v'}).decode())}"
    done = expect_success(post(api, topic, DATA, query))
    assert (done["first_seq"], done["count"], done["deduped"]) == (1, 1, False)
    assert expect_success(post(api, topic, b"small"))["first_seq"] == 2
    page = expect_success(api.post(topic_path(topic, "/diff"), {"from_seq": 0, "tags": True}))
    large, small = page["records"]
    assert large["data"] == {"$large": {"bytes": len(DATA), "xxh3": xxh3_64_hexdigest(DATA), "href": "records/1/data"}}
    assert (large["$node"], large["meta"]) == ("n1", {"k": "v"})
    assert small["$encoding"] == "base64"
    lines = api.get(topic_path(topic, "/records?from_seq=0"), [("Accept", "application/x-ndjson")]).body.splitlines()
    assert b'"$large"' in lines[0]
    assert expect_success(api.get(topic_path(topic)))["bytes"] >= len(DATA)
    assert api.get(topic_path(topic, "/records/1/data")).body == DATA
    assert api.get(topic_path(topic, "/records/2/data")).body == b"small"


def test_ranges_etags_and_heads(api: Api, topic: str) -> None:
    make(api, topic)
    expect_success(post(api, topic, DATA))
    path, size = topic_path(topic, "/records/1/data"), len(DATA)
    etag = f'"{xxh3_64_hexdigest(DATA)}"'
    for given, (lo, hi) in {
        "bytes=0-0": (0, 1),
        "bytes=5-9": (5, 10),
        f"bytes={size - 3}-": (size - 3, size),
        "bytes=-4": (size - 4, size),
        f"bytes={(1 << 20) - 2}-{(2 << 20) + 2}": ((1 << 20) - 2, (2 << 20) + 3),
        f"bytes=0-{size + 100}": (0, size),
    }.items():
        reply = api.get(path, [("Range", given)])
        assert (reply.status, reply.header("content-range")) == (206, f"bytes {lo}-{hi - 1}/{size}")
        assert reply.body == DATA[lo:hi]
        assert reply.header("content-length") == str(hi - lo)
    reply = api.get(path, [("Range", f"bytes={size}-")])
    assert (reply.status, reply.header("content-range")) == (416, f"bytes */{size}")
    for ignored in ("bytes=9-5", "bytes=1-2,4-5", "items=0-1", "bytes=-"):
        assert api.get(path, [("Range", ignored)]).status == 200
    assert api.get(path, [("Range", "bytes=0-1"), ("If-Range", etag)]).status == 206
    assert api.get(path, [("Range", "bytes=0-1"), ("If-Range", '"other"')]).status == 200
    assert api.get(path, [("If-None-Match", etag)]).status == 304
    head = api.request("HEAD", path)
    assert (head.status, head.header("content-length"), head.header("etag")) == (200, str(size), etag)
    for missing in ("/records/2/data", "/records/0/data"):
        assert api.get(topic_path(topic, missing)).status in (400, 404)
    expect_error(api.get(topic_path(topic, "/records/9/data")), 404, "record_not_found", ANY)
    expect_error(api.get(topic_path(topic, "/records/x/data")), 400, "invalid_request")


def test_a_body_over_the_ceiling_is_refused(api: Api, server: Server, topic: str) -> None:
    make(api, topic, max_record_bytes=1 << 20)
    before = blob_files(server)
    expect_success(post(api, topic, DATA[: 1 << 20]))
    with server.client() as other:
        expect_error(post(other, topic, DATA[: (1 << 20) + 1]), 400, "record_too_large")
    with RawConnection(server.address) as raw:
        raw.send(_chunked_head(topic) + _chunk(DATA[: 1 << 20]) + _chunk(b"x") + b"0\r\n\r\n")
        assert raw.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert head_of(api, topic) == 1
    eventually(lambda: len(blob_files(server)) == len(before) + 1)


def test_a_key_writes_once(api: Api, server: Server, topic: str) -> None:
    make(api, topic)
    first = expect_success(post(api, topic, DATA, Idempotency_Key="k"))
    count = len(blob_files(server))
    again = expect_success(post(api, topic, DATA, Idempotency_Key="k"))
    assert (again["first_seq"], again["deduped"]) == (first["first_seq"], True)
    eventually(lambda: len(blob_files(server)) == count)


def _chunked_head(topic: str) -> bytes:
    return (
        f"POST {topic_path(topic, '/stream')} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    ).encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize("how", ["chunked", "length", "h2"])
@pytest.mark.parametrize("sent", [100, 300_000, 2 << 20])
def test_a_client_that_leaves_in_the_middle_leaves_nothing(
    how: str, sent: int, api: Api, server: Server, topic: str
) -> None:
    make(api, topic)
    before = blob_files(server)
    if how == "h2":
        with H2Client(server.address) as client:
            client.step()  # its settings
            stream = client.state.get_next_available_stream_id()
            pairs = [(":method", "POST"), (":scheme", "http"), (":authority", client.authority)]
            client.state.send_headers(stream, [*pairs, (":path", topic_path(topic, "/stream"))])
            for start in range(0, min(sent, client.state.local_flow_control_window(stream)), 1 << 14):
                client.state.send_data(stream, DATA[start : start + min(1 << 14, sent - start)])
            client._flush()
            client.state.reset_stream(stream)
            client._flush()
            client.wire.abort()
    else:
        with RawConnection(server.address) as raw:
            if how == "chunked":
                raw.send(_chunked_head(topic) + _chunk(DATA[:sent])[: sent + 8])
            else:
                head = _chunked_head(topic).replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % len(DATA))
                raw.send(head + DATA[:sent])
            raw.abort()
    assert expect_success(api.post(topic_path(topic), {"records": [{"data": 1}]}))["first_seq"] == 1
    eventually(lambda: blob_files(server) == before)
    assert head_of(api, topic) == 1


def test_chunked_and_http2_bodies_arrive_whole(api: Api, server: Server, topic: str) -> None:
    make(api, topic)
    with RawConnection(server.address) as raw:
        pieces = [DATA[pos : pos + 70_000] for pos in range(0, len(DATA), 70_000)]
        raw.send(_chunked_head(topic) + b"".join(map(_chunk, pieces)) + b"0\r\n\r\n")
        assert raw.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200")
    with H2Client(server.address) as client:
        reply = client.request("POST", topic_path(topic, "/stream"), DATA[:60_000])
        assert reply.status == 200
    assert api.get(topic_path(topic, "/records/1/data")).body == DATA
    assert api.get(topic_path(topic, "/records/2/data")).body == DATA[:60_000]


def test_large_records_survive_a_kill(tmp_path: Path) -> None:
    with Server(tmp_path).start() as server:
        with server.client() as api:
            make(api, "t", durability="fsync")
            expect_success(post(api, "t", DATA))
        server.kill()
        server.start()
        with server.client() as api:
            assert api.get(topic_path("t", "/records/1/data")).body == DATA


def test_a_stream_takes_constant_memory(tmp_path: Path) -> None:
    """64 MiB in and out: the peak of the server's memory grows by less than 32 MiB."""
    piece = Random(1).randbytes(1 << 20)
    with Server(tmp_path).start() as server, server.client() as api:
        make(api, "t", max_record_bytes=1 << 30)
        expect_success(post(api, "t", DATA))
        api.get(topic_path("t", "/records/1/data"))
        before = _peak_bytes(server)
        with RawConnection(server.address, timeout_s=120) as raw:
            raw.send(_chunked_head("t"))
            for _ in range(64):
                raw.send(_chunk(piece))
            raw.send(b"0\r\n\r\n")
            assert raw.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200")
        with RawConnection(server.address, timeout_s=120) as raw:
            raw.send(f"GET {topic_path('t', '/records/2/data')} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert b"content-length: 67108864" in raw.read_until(b"\r\n\r\n")
            for _ in range(64):
                assert raw.read_exactly(1 << 20) == piece
        assert _peak_bytes(server) - before < 32 << 20


def _peak_bytes(server: Server) -> int:
    assert server._process is not None
    status = Path(f"/proc/{server._process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def test_watchers_are_pushed_the_reference(api: Api, server: Server, topic: str) -> None:
    make(api, topic)
    socket = Socket(server)
    with server.events(api.watch({topic: {}})["stream_url"]) as stream, socket.raw:
        assert socket.request(op="subscribe", topic=topic)["op"] == "subscribed"
        expect_success(post(api, topic, DATA))
        reference = {"bytes": len(DATA), "xxh3": xxh3_64_hexdigest(DATA), "href": "records/1/data"}
        while b"$large" not in (frame := stream.frame()):
            assert frame
        assert dumps({"$large": reference}) in frame
        while "$large" not in (said := str(socket.receive())):
            assert said
        assert str(reference["xxh3"]) in said
