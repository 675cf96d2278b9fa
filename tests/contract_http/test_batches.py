"""Numbered batches over HTTP: staged in chunks, made once, and known after a restart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from xxhash import xxh3_64_hexdigest

from tests.contract_http.api import ANY, Api, expect_error, expect_success, topic_path
from tests.contract_http.client import Client, RawConnection, Reply
from tests.contract_http.server import Server

ARROW = ("Content-Type", "application/vnd.apache.arrow.stream")
OWNER = "00112233445566778899aabbccddeeff"
SUM = "0123456789abcdef" * 2
NOW_MS = time.time_ns() // 1_000_000  # what is older than a week is swept


def stream(*datas: bytes, **columns: Any) -> bytes:
    table = pa.table({"data": pa.array(datas, pa.binary()), **columns})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    made: bytes = sink.getvalue().to_pybytes()
    return made


def chunk_name(number: int, owner: str = OWNER) -> str:
    return f"{owner}-{NOW_MS:012x}-{number:016x}"


def stage(api: Client, topic: str, number: int, content: bytes, owner: str = OWNER) -> Reply:
    return api.request("PUT", topic_path(topic, f"/staging/{chunk_name(number, owner)}"), content, [ARROW])


def fields_of(number: int, rows: int, content: bytes) -> dict[str, Any]:
    return {"chunk": chunk_name(number), "rows": rows, "bytes": len(content), "sum": xxh3_64_hexdigest(content)}


def body(*chunks: dict[str, Any], number: int = 0, **more: Any) -> dict[str, Any]:
    return {"writer": "etl", "number": number, "sum": SUM, "chunks": list(chunks), **more}


def put(api: Api, topic: str, number: int, *datas: bytes, status: int = 200) -> dict[str, Any]:
    content = stream(*datas)
    expect_success(stage(api, topic, number, content))
    return expect_success(
        api.post(topic_path(topic, "/batches"), body(fields_of(number, len(datas), content), number=number)), status
    )


def test_chunks_become_one_range_and_it_stays_the_same(api: Api, topic: str) -> None:
    one, two = stream(b"a", b"b", tag=pa.array(["t", None])), stream(b"c")
    staged = expect_success(stage(api, topic, 1, one))
    assert (staged["chunk"], staged["bytes"]) == (chunk_name(1), len(one))
    expect_success(stage(api, topic, 2, two))
    assert not api.exists(topic), "staged is not written"
    batch = body(fields_of(1, 2, one), fields_of(2, 1, two))
    done = expect_success(api.post(topic_path(topic, "/batches"), batch), 201)
    assert [done[name] for name in ("first_seq", "last_seq", "count", "deduped", "created")] == [1, 3, 3, False, True]
    api.write(topic, "between")
    again = expect_success(api.post(topic_path(topic, "/batches"), batch))
    assert [again[name] for name in ("first_seq", "last_seq", "head_seq", "deduped", "created")] == [
        1,
        3,
        4,
        True,
        False,
    ]
    assert api.seqs(topic) == [1, 2, 3, 4]
    found = expect_success(api.get(topic_path(topic, "/batches?writer=etl")))
    assert found["batches"] == [{"number": 0, "first_seq": 1, "last_seq": 3, "sum": SUM, "query_id": ""}]
    assert expect_success(api.get(topic_path(topic, "/batches?writer=nobody")))["batches"] == []


def test_a_conflict_says_three_ways_out(api: Api, topic: str) -> None:
    put(api, topic, 5, b"a", status=201)
    content = stream(b"b")
    expect_success(stage(api, topic, 6, content))
    for more in ({"number": 5, "sum": "f" * 32}, {"number": 4}):
        error = expect_error(
            api.post(topic_path(topic, "/batches"), body(fields_of(6, 1, content), **more)),
            409,
            "batch_conflict",
            {"topic": topic, "writer": "etl", "number": more["number"], "newest": 5},
        )
        assert "three ways to continue" in error["message"]
    assert api.seqs(topic) == [1]


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"rows": 2}, 400, "invalid_request"),
        ({"sum": "0" * 16}, 400, "invalid_request"),
        ({"chunk": chunk_name(99)}, 404, "not_found"),
        ({"chunk": "../../meta"}, 400, "invalid_request"),
        ({"sum": "xyz"}, 400, "invalid_request"),
    ],
)
def test_chunk_that_differs_from_its_description_is_refused(
    api: Api, topic: str, change: dict[str, Any], status: int, code: str
) -> None:
    content = stream(b"a")
    expect_success(stage(api, topic, 1, content))
    expect_error(
        api.post(topic_path(topic, "/batches"), body({**fields_of(1, 1, content), **change})), status, code, ANY
    )
    assert not api.exists(topic), "a write that is refused makes no topic"


def test_bodies_that_are_no_batch(api: Api, topic: str) -> None:
    for wrong in (body(), {**body(), "number": -1}, {"writer": "etl"}, body(writer="", number=0)):
        expect_error(api.post(topic_path(topic, "/batches"), wrong), 400, "invalid_request", ANY)
    expect_error(api.get(topic_path(topic, "/batches?writer=x")), 404, "topic_not_found", {"topic": topic})
    api.write(topic, 1)
    expect_error(api.get(topic_path(topic, "/batches")), 400, "invalid_request")
    expect_error(api.put(topic_path(topic, f"/staging/{chunk_name(1)}"), {}), 415, "unsupported_media_type")
    expect_error(api.request("PUT", topic_path(topic, "/staging/x"), b"", [ARROW]), 400, "invalid_request", ANY)
    expect_error(api.delete(topic_path(topic, "/staging/x")), 400, "invalid_request", ANY)


def test_what_is_no_arrow_is_found_when_it_is_published(api: Api, topic: str) -> None:
    for number, content in enumerate((b"no arrow", stream(b"a", price=pa.array([1.5])), stream(b"a")[:-20])):
        expect_success(stage(api, topic, number, content))
        reply = api.post(topic_path(topic, "/batches"), body(fields_of(number, 1, content)))
        assert "nothing was" in expect_error(reply, 400, "invalid_request", ANY)["message"]
    assert not api.exists(topic)


def test_a_full_topic(api: Api, topic: str) -> None:
    api.create_topic(topic, cap_records=2, discard="reject")
    put(api, topic, 0, b"a", b"b")
    content = stream(b"c")
    expect_success(stage(api, topic, 1, content))
    expect_error(
        api.post(topic_path(topic, "/batches"), body(fields_of(1, 1, content), number=1)), 422, "topic_full", ANY
    )
    assert expect_success(api.get(topic_path(topic, "/batches?writer=etl")))["batches"][-1]["number"] == 0


def test_an_owner_clears_what_is_its_own(api: Api, topic: str) -> None:
    other = OWNER[::-1]
    for number in range(3):
        expect_success(stage(api, topic, number, stream(b"a")))
    expect_success(stage(api, topic, 9, stream(b"a"), other))
    expect_success(stage(api, f"{topic}-2", 9, stream(b"a")))
    assert expect_success(api.delete(topic_path(topic, f"/staging/{OWNER}")))["removed"] == 3
    assert expect_success(api.delete(topic_path(topic, f"/staging/{OWNER}")))["removed"] == 0
    assert expect_success(api.delete(topic_path(topic, f"/staging/{other}")))["removed"] == 1
    assert expect_success(api.delete(topic_path(f"{topic}-2", f"/staging/{OWNER}")))["removed"] == 1


def test_a_body_that_breaks_off_leaves_nothing(api: Api, topic: str, server: Server) -> None:
    content = stream(b"a" * 1000)
    with RawConnection(server.address) as broken:
        path = topic_path(topic, f"/staging/{chunk_name(1)}")
        head = f"PUT {path} HTTP/1.1\r\nHost: localhost\r\n{ARROW[0]}: {ARROW[1]}\r\n"
        broken.send(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content[:100])
        broken.abort()
    expect_success(stage(api, topic, 2, content))  # behind it, on the same loop
    reply = api.post(topic_path(topic, "/batches"), body(fields_of(1, 1, content)))
    expect_error(reply, 404, "not_found", ANY)


def test_unreadable_body_is_refused_and_nothing_is_stored(api: Api, topic: str) -> None:
    target = topic_path(topic, f"/staging/{chunk_name(1)}")
    reply = api.request("PUT", target, b"not coded at all", [ARROW, ("Content-Encoding", "gzip")])
    message = expect_error(reply, 400, "invalid_request")["message"]
    assert message.startswith("the body is not gzip")
    assert message.endswith("nothing of the chunk was stored, send it again")


def test_a_restart_remembers(tmp_path: Path, topic: str) -> None:
    for again in range(2):
        with Server(tmp_path).start() as server, server.client() as api:
            done = put(api, topic, 3, b"a", b"b", status=200 if again else 201)
            assert (done["first_seq"], done["last_seq"], done["deduped"]) == (1, 2, bool(again))
