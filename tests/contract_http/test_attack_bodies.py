"""Bodies that claim or decode to far more than they weigh, against a server whose memory is limited.

Method: each attack is sent to a server process that may take `GROWTH_BYTES` of address space more than it had when it
was ready (prlimit). It must be refused with an answer of the contract, the peak of resident memory stays below that,
and the same server goes on serving a plain client. The long form (`sweep`) repeats every attack on several connections.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

import pyarrow as pa
import pytest

from tests.contract_http.api import Api, topic_path
from tests.contract_http.client import Client, RawConnection, Reply
from tests.contract_http.server import Server
from tests.contract_http.test_batches import ARROW, body, chunk_name, fields_of
from tests.zero_records import zero_records

NDJSON: Final = ("Content-Type", "application/x-ndjson")
GROWTH_BYTES: Final = 640 << 20
ROWS: Final = 100_000_000
MIB: Final = 1 << 20


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("attacked")).with_few_arenas().start() as running:
        with running.client() as api:
            api.write("plain", 1)
        running.limit_growth(GROWTH_BYTES)
        yield running


def arrow(batch: pa.RecordBatch, times: int = 1, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        for _ in range(times):
            writer.write_batch(batch)
    made: bytes = sink.getvalue().to_pybytes()
    return made


def rows_of_nothing() -> bytes:
    return arrow(pa.record_batch({"data": pa.nulls(ROWS)}))


def tags_of_nothing() -> bytes:
    """`data` has one row, the batch and its tag claim a hundred million."""
    good = pa.record_batch({"data": pa.array([b"x"]), "tag": pa.nulls(1)})
    return claiming(arrow(good), 1, ROWS)


def claiming(stream: bytes, old: int, new: int) -> bytes:
    """A stream whose batches have another number wherever one was `old`."""
    at = len(arrow_schema(stream))
    return stream[:at] + stream[at:].replace(struct.pack("<q", old), struct.pack("<q", new))


def arrow_schema(stream: bytes) -> bytes:
    size: int = struct.unpack_from("<i", stream, 4)[0]
    return stream[: 8 + size]


def rows(old: int, new: int) -> Callable[[], bytes]:
    return lambda: claiming(arrow(pa.record_batch({"data": pa.array([b"xy"] * 7)})), old, new)


def many_columns() -> bytes:
    names = [f"c{number}" for number in range(50_000)]
    return arrow(pa.record_batch([pa.array([b"x"])] * len(names), names))


def nested(kind: pa.DataType) -> Callable[[], bytes]:
    return lambda: arrow(pa.record_batch([pa.array([None], kind)], ["data"]))


def zeros(compression: str, name: str = "data", times: int = 1) -> bytes:
    """60 MiB each time."""
    columns: dict[str, Any] = {"data": pa.array([b""] * 60)}
    columns[name] = zero_records(60, MIB)
    return arrow(pa.record_batch(columns), times, compression)


def offsets_alone() -> bytes:
    """Two million empty records, which are next to nothing when they are compressed."""
    buffers = [None, pa.py_buffer(bytes(4 * (2_000_000 + 1))), pa.py_buffer(b"")]
    return arrow(
        pa.RecordBatch.from_arrays([pa.Array.from_buffers(pa.binary(), 2_000_000, buffers)], ["data"]), 1, "zstd"
    )


def views() -> bytes:
    return arrow(pa.record_batch([pa.array([b"x" * 20], pa.binary_view())], ["data"]))


def runs() -> bytes:
    ends, values = pa.array([ROWS], pa.int32()), pa.array([b"x" * 1000])
    return arrow(pa.record_batch([pa.RunEndEncodedArray.from_arrays(ends, values)], ["data"]))


def in_passed_column() -> bytes:
    seqs = pa.RunEndEncodedArray.from_arrays(pa.array([1], pa.int32()), pa.array([1]))
    return arrow(pa.record_batch([pa.array([b"x"]), seqs], ["data", "seq"]))


ATTACKS: Final[dict[str, Callable[[], bytes]]] = {
    "a hundred million rows of type null": rows_of_nothing,
    "a hundred million rows of tags": tags_of_nothing,
    "more rows than there are": rows(7, 1 << 40),
    "fewer rows than none": rows(7, -1),
    "a buffer beyond its message": rows(14, 1 << 50),
    "fifty thousand columns": many_columns,
    "a dictionary": lambda: arrow(pa.record_batch([pa.array([b"x"] * 9).dictionary_encode()], ["data"])),
    "runs": runs,
    "views": views,
    "a list": nested(pa.list_(pa.binary())),
    "a list view": nested(pa.list_view(pa.binary())),
    "a struct": nested(pa.struct([("a", pa.binary())])),
    "fixed size lists": nested(pa.list_(pa.binary(), 1 << 20)),
    "runs in a column that is passed over": in_passed_column,
    "two million empty records": offsets_alone,
    "zeros, many times (zstd)": lambda: zeros("zstd", times=40),
    "zeros, many times (lz4)": lambda: zeros("lz4", times=40),
    "zeros in one batch": lambda: arrow(pa.record_batch({"data": zero_records(80, MIB)}), 1, "zstd"),
    "zeros in tags": lambda: zeros("zstd", "tag", times=40),
}


@cache
def made(name: str) -> bytes:
    return ATTACKS[name]()


def refuse(reply: Reply) -> None:
    assert reply.status in (400, 413), (reply.status, reply.body[:400])
    assert "nothing" in reply.json()["error"]["message"], reply.body[:400]


def serves(target: Server, bytes_max: int = GROWTH_BYTES) -> None:
    """It still does what it is for, within its memory."""
    with target.client() as api:
        before = api.state("plain")["head_seq"]
        assert api.write("plain", {"n": 1})["first_seq"] == before + 1
    assert target.peak_bytes < bytes_max
    assert "MemoryError" not in target.log


@pytest.mark.parametrize("name", ATTACKS)
def test_an_arrow_body_that_claims_more_than_it_is(target: Server, name: str) -> None:
    """A stream of this kind of 224 bytes blocked the loop for 24 s, with a peak of 3.2 GB."""
    with target.client() as api:
        refuse(api.request("POST", topic_path("attacked"), made(name), [ARROW]))
    serves(target)


def stage(api: Client, number: int, content: bytes) -> Reply:
    return api.request("PUT", topic_path("attacked", f"/staging/{chunk_name(number)}"), content, [ARROW])


@pytest.mark.parametrize("name", ATTACKS)
def test_a_staged_chunk_that_claims_more_than_it_is(target: Server, name: str) -> None:
    """33 KB of zstd became 1 GB when they were published."""
    content = made(name)
    with target.client() as api:
        assert stage(api, 1, content).status == 200
        refuse(api.post(topic_path("attacked", "/batches"), body(fields_of(1, 1, content))))
    serves(target)


def test_a_chunk_is_named_once(target: Server) -> None:
    content = arrow(pa.record_batch({"data": pa.array([b""] * 1_000_000)}), 1, "zstd")
    with target.client() as api:
        assert stage(api, 2, content).status == 200
        refuse(api.post(topic_path("attacked", "/batches"), body(*[fields_of(2, 1_000_000, content)] * 500)))
    serves(target)


def gzipped(piece: bytes, times: int) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    return b"".join([*(packer.compress(piece) for _ in range(times)), packer.flush()])


@cache
def bombs() -> dict[str, bytes]:
    return {
        "newlines": gzipped(b"\n" * MIB, 256),
        "blanks": gzipped(b" " * MIB, 256),
        "one long line": gzipped(b"1" * MIB, 256),
        "members": gzipped(b"", 1) * 100_000,
    }


@pytest.mark.parametrize("name", ["newlines", "blanks", "one long line", "members"])
@pytest.mark.parametrize("kind", ["ndjson", "json", "arrow", "staged"])
def test_a_gzip_body_that_decodes_to_far_more(target: Server, name: str, kind: str) -> None:
    """261 KB were 256 MiB of newlines, inflated at once on the loop."""
    headers = [("Content-Encoding", "gzip")]
    with target.client() as api:
        if kind == "staged":
            reply = api.request(
                "PUT", topic_path("attacked", f"/staging/{chunk_name(3)}"), bombs()[name], [ARROW, *headers]
            )
        else:
            of_kind = {"ndjson": NDJSON, "json": ("Content-Type", "application/json"), "arrow": ARROW}[kind]
            reply = api.request("POST", topic_path("attacked"), bombs()[name], [of_kind, *headers])
    refuse(reply)
    serves(target)


def test_others_are_served_while_a_bomb_is_inflated(target: Server) -> None:
    """Each answer comes before the next is asked for; that a slice is bounded is counted in
    tests/unit/server/test_slices.py."""
    with target.client() as attacker, target.client() as api:
        attacker.begin("POST", topic_path("attacked"), bombs()["newlines"], [NDJSON, ("Content-Encoding", "gzip")])
        for _ in range(20):
            assert api.get("/v0/health").status == 200
        refuse(attacker.end())
    serves(target)


def test_a_peer_that_leaves_takes_its_bomb_along(target: Server) -> None:
    for number in range(8):
        with RawConnection(target.address) as wire:
            data = bombs()["newlines"]
            head = (
                f"POST {topic_path('attacked')} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
            )
            wire.send(
                f"{head}Content-Encoding: gzip\r\nContent-Length: {2 * len(data)}\r\n\r\n".encode() + data[: 1 << 16]
            )
            if number % 2:
                wire.abort()
    serves(target)


@pytest.mark.parametrize("seed", range(40))
def test_damaged_metadata_is_refused_or_written_and_nothing_else(target: Server, seed: int) -> None:
    """Method: bytes of good streams, compressed or not, are changed by seeded chance."""
    random = Random(seed)
    batch = pa.record_batch(
        {"data": pa.array([b"abc"] * 50), "tag": pa.array(["t"] * 50), "json": pa.array([False] * 50)}
    )
    damaged = bytearray(arrow(batch, 2, random.choice([None, "zstd", "lz4"])))
    for _ in range(random.randint(1, 8)):
        damaged[random.randrange(len(damaged))] = random.choice([0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)])
    with target.client() as api:
        reply = api.request("POST", topic_path("damaged"), bytes(damaged), [ARROW])
        assert reply.status in (200, 201, 400, 413), reply
        assert stage(api, 4, bytes(damaged)).status == 200
        assert (
            api.post(topic_path("damaged", "/batches"), body(fields_of(4, 100, bytes(damaged)), number=seed)).status
            < 500
        )
    serves(target)


@contextmanager
def fresh_target(tmp_path: Path) -> Iterator[Server]:
    """A server of its own that may take 1,280 MiB of address space more than it had after its first Arrow body."""
    with Server(tmp_path).with_few_arenas().start() as running:
        with running.client() as api:
            api.write("plain", 1)
            # Arrow's allocator reserves 1 GiB of address space with its first large buffer, which is no memory.
            refuse(api.request("POST", topic_path("attacked"), made("zeros, many times (zstd)"), [ARROW]))
        running.limit_growth(2 * GROWTH_BYTES)
        yield running


@pytest.mark.parametrize("name", ["zeros, many times (zstd)", "zeros, many times (lz4)"])
def test_messages_that_are_decoded_at_the_same_time(tmp_path: Path, name: str) -> None:
    """Each is within the limits of one message: only a bound over all of them keeps the sum small. The short form of
    `test_many_at_once`, which answered 500 for want of memory; the five bombs would decode to 12,000 MiB."""
    with fresh_target(tmp_path) as target:

        def attack(number: int) -> None:
            with Api(target.address, timeout_s=120) as api:
                refuse(api.request("POST", topic_path(f"attacked{number}"), made(name), [ARROW]))

        with ThreadPoolExecutor(5) as pool:
            for each in [pool.submit(attack, number) for number in range(5)]:
                each.result()
        serves(target, 2 * GROWTH_BYTES)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*ATTACKS, "newlines", "blanks", "one long line", "members"])
def test_many_at_once(tmp_path: Path, name: str) -> None:
    """The long form: eight connections, five times each, while a plain client writes.

    The limit is 1,280 MiB. The largest bombs decode to 2,400 MiB each, 19,200 MiB for the eight that are sent at the
    same time, so a server that decodes them fails. One that bounds each message and not their sum took 3,400 MiB. The
    measured peak is 640 to 672 MiB, of which 128 MiB may be decoded messages (`max_decoded_bytes`) and 192 MiB records
    that no checkpoint covers."""
    with fresh_target(tmp_path) as target:
        content, headers = (made(name), [ARROW]) if name in ATTACKS else (bombs()[name], [NDJSON])

        def attack(number: int) -> None:
            more = [] if name in ATTACKS else [("Content-Encoding", "gzip")]
            with Api(target.address, timeout_s=120) as api:
                for _ in range(5):
                    refuse(api.request("POST", topic_path(f"attacked{number}"), content, [*headers, *more]))

        with ThreadPoolExecutor(8) as pool, target.client() as api:
            running = [pool.submit(attack, number) for number in range(8)]
            served = 0
            while not all(each.done() for each in running):
                api.write("plain", served)
                served += 1
            for each in running:
                each.result()
            assert served
        serves(target, 2 * GROWTH_BYTES)
