"""Content codings over the wire, both ways and on both protocols (contract B1: documented, and here kept)."""

from __future__ import annotations

import gzip
import zlib
from random import Random

import pyarrow as pa
import pytest
from tests.unit.http.h2_client import H2Client
from tests.unit.http.harness import ListenerHarness, RawConnection

LARGE = 500_000  # coded on another thread


def plain(coding: str, data: bytes) -> bytes:
    if coding == "gzip":
        return gzip.decompress(data)
    whole: bytes = pa.CompressedInputStream(pa.BufferReader(data), "zstd").read()
    return whole


def packed(coding: str, data: bytes) -> bytes:
    whole: bytes = gzip.compress(data) if coding == "gzip" else pa.Codec("zstd").compress(data, asbytes=True)
    return whole


CODINGS = ("gzip", "zstd")


# Answers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("size", [1024, 50_000, LARGE])
def test_a_large_answer_is_coded(listener: ListenerHarness, connection: RawConnection, coding: str, size: int) -> None:
    reply = connection.get(f"/big?n={size}", f"Accept-Encoding: {coding}")
    assert reply.headers["content-encoding"] == coding
    assert reply.headers["vary"] == "accept-encoding"
    assert int(reply.headers["content-length"]) == len(reply.body) < size
    assert plain(coding, reply.body) == b"x" * size
    head = connection.get(f"/big?n={size}", f"Accept-Encoding: {coding}", method="HEAD")
    assert head.headers == reply.headers
    with H2Client(listener) as h2:
        got = h2.get(f"/big?n={size}", ("accept-encoding", coding))
        assert (got.headers["content-encoding"], plain(coding, got.body)) == (coding, b"x" * size)


def test_a_small_answer_is_not(connection: RawConnection) -> None:
    for asked in ("gzip", "zstd, gzip;q=0.5", "identity;q=0.1, gzip"):
        reply = connection.get("/big?n=1023", f"Accept-Encoding: {asked}")
        assert reply.body == b"x" * 1023
        assert not {"content-encoding", "vary"} & set(reply.headers)


def test_response_is_not_compressed_if_identity_is_preferred(connection: RawConnection) -> None:
    for asked in ("", "identity", "br", "gzip;q=0"):
        reply = connection.get("/big?n=5000", f"Accept-Encoding: {asked}")
        assert "content-encoding" not in reply.headers
        assert len(reply.body) == 5000
    assert "content-encoding" not in connection.get("/big?n=5000").headers


def test_small_response_is_compressed_if_identity_is_refused(connection: RawConnection) -> None:
    reply = connection.get("/hello", "Accept-Encoding: gzip, identity;q=0")
    assert gzip.decompress(reply.body) == b'{"hello":""}'
    assert "content-encoding" not in connection.get("/empty", "Accept-Encoding: gzip, identity;q=0").headers


@pytest.mark.parametrize("coding", CODINGS)
def test_a_stream_is_coded(listener: ListenerHarness, connection: RawConnection, coding: str) -> None:
    expected = b"".join(b"piece %d\n" % index for index in range(100))
    reply = connection.get("/stream?n=100", f"Accept-Encoding: {coding}")
    assert (reply.headers["content-encoding"], reply.headers["vary"]) == (coding, "accept-encoding")
    assert plain(coding, reply.body) == expected
    with H2Client(listener) as h2:
        assert plain(coding, h2.get("/stream?n=100", ("accept-encoding", coding)).body) == expected


def test_compressed_stream_is_flushed_at_once(listener: ListenerHarness, connection: RawConnection) -> None:
    """Method: the handler answers each piece of the body before the next is sent, so nothing may be held back."""
    connection.send(
        b"POST /slurp-duplex HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\nAccept-Encoding: gzip\r\n\r\n"
    )
    assert connection.head().headers["content-encoding"] == "gzip"
    reader = zlib.decompressobj(wbits=31)
    for size in (1, 2, 3):
        connection.send(b"%x\r\n%b\r\n" % (size, b"x" * size))
        said = b""
        while not said.endswith(b"\n"):
            said += reader.decompress(connection.chunk())
        assert said == b"got %d\n" % size
    connection.send(b"0\r\n\r\n")
    while chunk := connection.chunk():
        assert reader.decompress(chunk) == b""
    assert reader.eof
    assert listener.listener.connections == 1


def test_events_are_not_coded(listener: ListenerHarness, connection: RawConnection) -> None:
    """Contract 3.8: a proxy or a library between must not have to decode them."""
    connection.send(b"GET /events HTTP/1.1\r\nHost: t\r\nAccept-Encoding: gzip, zstd\r\n\r\n")
    assert "content-encoding" not in connection.head().headers
    assert connection.chunk() == b"data: 1\n\n"
    assert listener.app.seen.wait() == "streaming"


def test_disconnect_while_the_response_is_compressed(listener: ListenerHarness) -> None:
    for _ in range(20):
        with listener.connect() as connection:
            connection.send(b"GET /big?n=2000000 HTTP/1.1\r\nHost: t\r\nAccept-Encoding: gzip\r\n\r\n")
    listener.connections(0)


def test_pipelined_answers_stay_in_order_though_some_are_coded_elsewhere(connection: RawConnection) -> None:
    targets = [b"/big?n=%d" % (LARGE if index % 2 else 10 + index) for index in range(10)]
    connection.send(
        b"".join(b"GET %b HTTP/1.1\r\nHost: t\r\nAccept-Encoding: gzip\r\n\r\n" % target for target in targets)
    )
    for index in range(10):
        reply = connection.reply()
        assert ("content-encoding" in reply.headers) == bool(index % 2)
        if not index % 2:
            assert len(reply.body) == 10 + index


# Bodies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("size", [0, 10, LARGE])
def test_a_coded_body_is_decoded(listener: ListenerHarness, connection: RawConnection, coding: str, size: int) -> None:
    listener.app.limit = 1_000_000
    body = Random(size).randbytes(size)
    assert connection.post("/echo", packed(coding, body), f"Content-Encoding: {coding}").body == body
    with H2Client(listener) as h2:
        got = h2.reply(h2.post("/echo", packed(coding, body), ("content-encoding", coding)))
        assert got.body == body
    assert listener.app.requests[0].content_length == size
    assert listener.app.open == 0


@pytest.mark.parametrize("coding", CODINGS)
def test_limit_holds_for_the_decoded_body(listener: ListenerHarness, connection: RawConnection, coding: str) -> None:
    """A bomb is 413, and the connection goes on."""
    assert connection.post("/echo", packed(coding, b"x" * 1000), f"Content-Encoding: {coding}").status == 200
    for size in (1001, 10_000_000):
        data = packed(coding, b"x" * size)
        listener.app.limit = 1000 if size == 1001 else 20_000
        reply = connection.post("/echo", data, f"Content-Encoding: {coding}")
        assert (reply.status, reply.body) == (413, b"too large")
        assert listener.app.seen.wait() == "abandoned /echo"
    assert connection.get("/hello").status == 200
    assert listener.app.open == 0


def test_a_bomb_in_a_streamed_body(listener: ListenerHarness, connection: RawConnection) -> None:
    reply = connection.post("/slurp", packed("gzip", b"x" * 100_000), "Content-Encoding: gzip")
    assert (reply.status, reply.body) == (413, b"0 bytes, then the body is over 1000 bytes")
    assert listener.app.seen.wait() == "broken 413"
    assert connection.get("/hello").status == 200


def test_streamed_body_is_decoded_as_it_arrives(listener: ListenerHarness, connection: RawConnection) -> None:
    packer = zlib.compressobj(wbits=31)
    connection.send(b"POST /slurp HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\nContent-Encoding: gzip\r\n\r\n")
    for size in (10, 20):
        part = packer.compress(b"x" * size) + packer.flush(zlib.Z_SYNC_FLUSH)
        connection.send(b"%x\r\n%b\r\n" % (len(part), part))
        assert listener.app.seen.wait() == f"piece {size}"
    part = packer.flush()
    connection.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(part), part))
    assert connection.reply().body == b"30"


@pytest.mark.parametrize("coding", ["br", "gzip, zstd", "deflate"])
def test_an_unknown_coding_is_415(listener: ListenerHarness, connection: RawConnection, coding: str) -> None:
    reply = connection.post("/echo", b"abc", f"Content-Encoding: {coding}")
    assert (reply.status, reply.headers["accept-encoding"]) == (415, "gzip, zstd")
    assert listener.app.seen.wait() == "abandoned /echo"
    assert connection.post("/refuse", b"abc", f"Content-Encoding: {coding}").status == 401, "refusals come first"
    assert connection.post("/echo", b"abc", "Content-Encoding: identity").body == b"abc"


def test_zstd_cannot_be_streamed(listener: ListenerHarness, connection: RawConnection) -> None:
    reply = connection.post("/slurp", packed("zstd", b"abc"), "Content-Encoding: zstd")
    assert (reply.status, reply.headers["accept-encoding"]) == (415, "gzip")
    assert listener.app.open == 0


@pytest.mark.parametrize("coding", CODINGS)
def test_body_that_is_not_in_its_coding_is_400(
    listener: ListenerHarness, connection: RawConnection, coding: str
) -> None:
    reply = connection.post("/echo", b"not coded at all", f"Content-Encoding: {coding}")
    assert (reply.status, reply.body[:30]) == (400, f"malformed: the body is not {coding}".encode()[:30])
    assert listener.app.seen.wait() == "abandoned /echo"
    assert connection.get("/hello").status == 200


def test_streamed_body_that_is_not_in_its_coding_is_400(listener: ListenerHarness, connection: RawConnection) -> None:
    reply = connection.post("/slurp", b"not coded at all", "Content-Encoding: gzip")
    assert (reply.status, reply.body[:37]) == (400, b"0 bytes, then the body is not gzip: E")
    assert listener.app.seen.wait() == "broken 400"


@pytest.mark.parametrize("size", [10, LARGE])
def test_handler_that_raises_answers_one_client_with_500(
    listener: ListenerHarness, connection: RawConnection, size: int
) -> None:
    """Also where its body was decoded on another thread."""
    listener.app.limit = 1_000_000
    assert (
        connection.post("/bug-handle", packed("gzip", Random(1).randbytes(size)), "Content-Encoding: gzip").status
        == 500
    )
    assert listener.expected_errors() == ["planted"]
    assert connection.get("/hello").status == 200


def test_disconnect_before_the_body_is_decoded(listener: ListenerHarness) -> None:
    listener.app.limit = 100_000_000
    body = packed("gzip", Random(1).randbytes(3_000_000))
    with listener.connect() as connection:
        connection.send(b"POST /later HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n" % len(body))
        connection.send(b"Content-Encoding: gzip\r\n\r\n" + body)
    assert listener.app.seen.wait() in ("abandoned /later", "parked /later")
    listener.connections(0)
    assert listener.app.open == 0
