"""Many records at once: what a bulk read sends and what a bulk write promises (E8, G4, G5, G7, G8, G12, G58, G70)."""

from __future__ import annotations

import asyncio
import gc
import gzip
import io
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import pyarrow as pa
import pytest
from tests.unit.server.bulk_fixtures import (
    ARROW,
    NDJSON,
    ReceivedResponse,
    get,
    listening,
    post,
    run_scenario_with,
    run_with_engine,
    send,
)
from tests.unit.server.fakes import FakeSink, RunningStream, ServerHarness, captured_log, parse_log, run_scenario
from tests.zero_records import zero_records

from tidelog.engine import Topic
from tidelog.engine.read import SCHEMA
from tidelog.engine.topic import TopicOperations
from tidelog.errors import DiskFull, Error, InDoubt
from tidelog.frames import typed_records
from tidelog.http.interface import BodyError, ClientDisconnected, Stream
from tidelog.server.handlers import records
from tidelog.testing import SimDisk


def pieces(body: bytes, size: int) -> list[bytes]:
    return [body[at : at + size] for at in range(0, len(body), size)]


def lines(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def arrow(table: pa.Table, rows: int | None = None, **options: Any) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, rows)
    return sink.getvalue()


def unpacked(body: bytes) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """The schema's metadata, the rows and the last batch's metadata of a stream, as any reader of Arrow finds them."""
    reader = pa.ipc.open_stream(body)
    rows: list[dict[str, Any]] = []
    last: dict[str, Any] = {}
    while True:
        try:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
        except StopIteration:
            return _decode_metadata(reader.schema.metadata), rows, last
        assert not last, "nothing comes behind the last batch"
        rows += batch.to_pylist()
        if metadata is not None:
            assert batch.num_rows == 0
            last = _decode_metadata(metadata)


def _decode_metadata(metadata: Any) -> dict[str, Any]:
    plain = {name.decode(): value.decode() for name, value in dict(metadata).items()}
    return {name: value if name == "topic" else json.loads(value) for name, value in plain.items()}


def conserved(end: dict[str, Any], from_seq: int) -> None:
    """E8: every seq of the range is accounted for."""
    assert sum(end["counts"].values()) == end["next_from_seq"] - from_seq


def filled(world: ServerHarness, name: str = "a", count: int = 10, **config: Any) -> Topic:
    topic = world.topic(name, **config)
    for number in range(1, count + 1):
        topic.append(
            {"n": number}, tag=f"t{number}" if number % 2 else None, node=f"n{number % 3}", meta={"m": number % 2}
        )
    return topic


# ── out ───────────────────────────────────────────────────────────────────────────────────────────


def test_lines_are_the_records_of_a_diff_and_the_last_one_says_that_they_are_all() -> None:
    async def scenario(world: ServerHarness) -> None:
        filled(world)
        got = await get(world, "/v0/topics/a/records")
        assert (got.status, got.content_type) == (200, NDJSON)
        _, page = await world.ask("POST", "/v0/topics/a/diff", {"include_tags": True, "limit": 100})
        *records, last = got.lines
        assert records == page["records"]
        assert last == {
            "$end": {
                "next_from_seq": 10,
                "head_seq": 10,
                "earliest_seq": 1,
                "gap": None,
                "gaps": [],
                "counts": {"rows": 10, "deleted": 0, "expired": 0, "evicted": 0, "filtered": 0, "holes": 0},
            }
        }

    run_scenario(scenario)


def test_arrow_is_the_table_of_the_engine_with_gaps_at_both_ends() -> None:
    """The schema comes first, so what is known only at the end stands in the metadata of a last batch without rows."""

    async def scenario(world: ServerHarness) -> None:
        topic = filled(world, cap_records=6)
        topic.delete(seqs=[7])
        got = await get(world, "/v0/topics/a/records", accept=ARROW)
        assert (got.status, got.content_type) == (200, ARROW)
        start, rows, end = unpacked(got.body)
        gap = {
            "gap_from": 1,
            "gap_to": 4,
            "reason": "cap",
            "missed_estimate": 4,
            "earliest_seq": 5,
            "head_seq": 10,
        }
        assert start == {
            "topic": "a",
            "epoch": topic.epoch,
            "from_seq": 0,
            "head_seq": 10,
            "earliest_seq": 5,
            "gap": gap,
        }
        assert typed_records(pa.Table.from_pylist(rows, schema=SCHEMA)).to_pylist() == topic.to_arrow().to_pylist()
        assert [row["seq"] for row in rows] == [5, 6, 8, 9, 10]
        assert end["counts"] == {"rows": 5, "deleted": 1, "expired": 0, "evicted": 4, "filtered": 0, "holes": 0}
        assert (end["next_from_seq"], end["gap"], end["gaps"]) == (10, gap, [gap])
        assert pa.ipc.open_stream(got.body).read_all().num_rows == 5, "whoever does not ask for it does not see it"

    run_scenario(scenario)


def test_every_gap_that_a_router_left_is_named_at_the_end() -> None:
    async def scenario(world: ServerHarness) -> None:
        source, target = world.topic("s", cap_records=2), world.topic("a")
        world.engine.router("r", "s", "a")
        for turn in range(3):
            source.append([b"x"] * 5)
            assert target.state().head_seq == 6 * turn + 5
            target.append(b"direct")
        *_, last = (await get(world, "/v0/topics/a/records")).lines
        gaps = [(gap["gap_from"], gap["gap_to"], gap["reason"]) for gap in last["$end"]["gaps"]]
        assert gaps == [(1, 3, "source_trim"), (7, 9, "source_trim"), (13, 15, "source_trim")]
        assert last["$end"]["gap"] == last["$end"]["gaps"][0]
        _, _, end = unpacked((await get(world, "/v0/topics/a/records", accept=ARROW)).body)
        assert end["gaps"] == last["$end"]["gaps"]
        *_, last = (await get(world, "/v0/topics/a/records?limit=4")).lines
        assert (last["$end"]["next_from_seq"], len(last["$end"]["gaps"])) == (10, 2), "those that were passed"

    run_scenario(scenario)


def test_an_empty_topic_is_an_end_alone() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        got = await get(world, "/v0/topics/a/records")
        assert [line["$end"]["next_from_seq"] for line in got.lines] == [0]
        _, rows, end = unpacked((await get(world, "/v0/topics/a/records?format=arrow")).body)
        assert (rows, end["next_from_seq"]) == ([], 0)

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("query", "seqs", "next_from_seq"),
    [
        ("", range(1, 11), 10),
        ("from_seq=4", range(5, 11), 10),
        ("from_seq=4&to_seq=7", range(5, 8), 7),
        ("to_seq=0", range(0), 0),
        ("from_seq=8&to_seq=3", range(0), 8),
        ("limit=3", range(1, 4), 3),
        ("from_seq=2&limit=3&to_seq=100", range(3, 6), 5),
        ("limit=0&to_seq=99999999999999999999", range(1, 11), 10),
        ("node=n0", [1, 2, 4, 5, 7, 8, 10], 10),
        ("node=n0,n1", [2, 5, 8], 10),
        ("node=n0&node=n1", [2, 5, 8], 10),
        ("node=n0%2Cn1", range(1, 11), 10),
        ("node=", range(1, 11), 10),
    ],
)
@pytest.mark.parametrize("kind", ["ndjson", "arrow"])
def test_a_range_a_limit_and_nodes(kind: str, query: str, seqs: Any, next_from_seq: int) -> None:
    """E8: and what was left out is counted."""

    async def scenario(world: ServerHarness) -> None:
        filled(world)
        got = await get(world, f"/v0/topics/a/records?format={kind}&{query}")
        if kind == "ndjson":
            *records, last = got.lines
            found, end = [record["$seq"] for record in records], last["$end"]
        else:
            _, rows, end = unpacked(got.body)
            found = [row["seq"] for row in rows]
        assert found == list(seqs)
        assert end["next_from_seq"] == next_from_seq
        first = 8 if "from_seq=8" in query else 4 if "from_seq=4" in query else 2 if "from_seq=2" in query else 0
        conserved(end, first)

    run_scenario(scenario)


def test_fields_that_are_not_wanted_are_left_out() -> None:
    async def scenario(world: ServerHarness) -> None:
        filled(world, count=1)
        query = "include_data=false&include_tags=0&include_meta=false"
        record, _ = (await get(world, f"/v0/topics/a/records?{query}")).lines
        assert set(record) == {"$seq", "$ts", "$node"}
        _, (row,), _ = unpacked((await get(world, f"/v0/topics/a/records?format=arrow&{query}")).body)
        assert set(row) == {"seq", "ts", "node"}
        record, _ = (await get(world, "/v0/topics/a/records")).lines
        assert set(record) == {"$seq", "$ts", "$node", "$tag", "meta", "data"}

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", NDJSON),
        ("*/*", NDJSON),
        ("application/*;q=0.5", NDJSON),
        (NDJSON, NDJSON),
        (ARROW, ARROW),
        (f"{ARROW};q=0.2, {NDJSON};q=0.1", ARROW),
        (f"{ARROW};q=0.2, */*;q=0.9", NDJSON),
        (f"text/html, {ARROW}", ARROW),
        ("application/json", None),
        ("text/event-stream", None),
        (f"{ARROW};q=0", None),
        (f"{ARROW};q=oops", None),
    ],
)
def test_what_is_accepted_decides_the_format(accept: str, kind: str | None) -> None:
    async def scenario(world: ServerHarness) -> None:
        filled(world, count=1)
        got = await get(world, "/v0/topics/a/records", accept=accept)
        if kind is None:
            assert (got.status, got.json["error"]["code"]) == (406, "not_acceptable")
        else:
            assert (got.status, got.content_type) == (200, kind)

    run_scenario(scenario)


def test_a_format_in_the_query_outweighs_the_header_and_must_be_known() -> None:
    async def scenario(world: ServerHarness) -> None:
        filled(world, count=1)
        got = await get(world, "/v0/topics/a/records?format=arrow", accept="text/html")
        assert (got.status, got.content_type) == (200, ARROW)
        got = await get(world, "/v0/topics/a/records?format=parquet")
        assert (got.status, got.json["error"]["code"]) == (400, "invalid_request")
        got = await get(world, "/v0/topics/nobody/records")
        assert (got.status, got.json["error"]["detail"]) == (404, {"topic": "nobody"})

    run_scenario(scenario)


def test_bytes_that_are_not_json_are_distinguished() -> None:
    async def scenario(world: ServerHarness) -> None:
        world.topic("a").append([b"\xff\x00", {"n": 1}])
        first, second, _ = (await get(world, "/v0/topics/a/records")).lines
        assert (first["data"], first["$encoding"]) == ("/wA=", "base64")
        assert (second["data"], "$encoding" in second) == ({"n": 1}, False)
        _, rows, _ = unpacked((await get(world, "/v0/topics/a/records?format=arrow")).body)
        assert [(row["data"], row["json"]) for row in rows] == [(b"\xff\x00", False), (b'{"n":1}', True)]

    run_scenario(scenario)


def test_a_slow_peer_holds_up_its_own_stream_and_gets_one_piece_at_a_time() -> None:
    """Memory is bounded: what a peer does not take is not made."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        for _ in range(12):
            topic.append(b"x" * 1_000_000)
        answer = await world.begin("GET", "/v0/topics/a/records").answer()
        assert isinstance(answer, Stream)
        tap = FakeSink()
        tap.stuck = True
        async with RunningStream(answer.run(tap)) as running:
            for _ in range(40):
                await asyncio.sleep(0.01)
                if not tap.pending_bytes:
                    continue
                await asyncio.sleep(0.01)
                assert tap.most <= 256 << 10, "one piece at a time"
                tap.take()
            tap.stuck = False
            tap.take()
            await running.ended()
        whole = ReceivedResponse(200, b"".join(tap.writes), {}, NDJSON)
        assert [line["$seq"] for line in whole.lines[:-1]] == list(range(1, 13))

    run_scenario(scenario)


class Making:
    """Stretches of two pieces each, and how many were made."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count, self.made, self.error = count, 0, error

    def __iter__(self) -> Iterator[list[bytes]]:
        return self

    def __next__(self) -> list[bytes]:
        self.made += 1
        if self.made <= self.count:
            return [b"%d" % self.made, b"-"]
        raise StopIteration if self.error is None else self.error


class Chunks:
    """In the place of a pass: the sizes that were asked for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.next_from_seq = 0

    def set_chunk_bytes(self, size: int) -> None:
        self.sizes.append(size)


def test_one_chunk_is_made_while_the_one_before_is_on_its_way_and_none_for_a_peer_that_reads_nothing() -> None:
    async def scenario(world: ServerHarness) -> None:
        making, chunks, tap = Making(5), Chunks(), FakeSink()
        tap.stuck, tap.pending_bytes = True, 1

        async def settled() -> None:
            for _ in range(5):
                await asyncio.sleep(0.002)

        async with RunningStream(
            records._send_chunks(world.service, world.service.engine.topic("orders"), tap, chunks, making)
        ) as running:
            await settled()
            assert making.made == 0, "the peer takes nothing yet"
            tap.take()
            while not tap.writes:
                await asyncio.sleep(0)
            await settled()
            assert (making.made, tap.writes) == (1, [b"1"]), "and nothing ahead before it takes something"
            for taken in range(1, 6):
                tap.take()
                await settled()
                assert making.made == taken + 1, "one ahead"
                assert tap.writes[-2:] == [b"%d" % taken, b"-"]
                tap.take()
                await settled()
            await running.ended()
        assert b"".join(tap.writes) == b"1-2-3-4-5-"
        assert chunks.sizes == [size << 10 for size in (256, 512, 1024, 2048, 2048, 2048)]

    run_scenario(scenario)


def test_an_error_comes_after_all_that_was_made_before_it_and_none_is_left_unretrieved() -> None:
    """Method: an error that nothing retrieves is reported to the loop when it is collected."""

    async def scenario(world: ServerHarness) -> None:
        unheard: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, about: unheard.append(about))
        tap = FakeSink()
        with pytest.raises(ZeroDivisionError):
            await records._send_chunks(
                world.service, world.service.engine.topic("orders"), tap, Chunks(), Making(2, ZeroDivisionError())
            )
        assert tap.writes == [b"1", b"-", b"2", b"-"]
        making, tap = Making(1, ZeroDivisionError()), FakeSink()
        task = asyncio.ensure_future(
            records._send_chunks(world.service, world.service.engine.topic("orders"), tap, Chunks(), making)
        )
        while not tap.writes:
            await asyncio.sleep(0)
        tap.stuck, tap.pending_bytes = True, 1
        while making.made < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises((asyncio.CancelledError, ZeroDivisionError)):
            await task
        del task
        gc.collect()
        await asyncio.sleep(0)
        assert unheard == []

    run_scenario(scenario)


def test_a_stream_whose_peer_left_has_no_last_line() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        for _ in range(3):
            topic.append(b"x" * 1_000_000)
        answer = await world.begin("GET", "/v0/topics/a/records").answer()
        assert isinstance(answer, Stream)
        tap = FakeSink()
        tap.stuck = True
        task = asyncio.ensure_future(answer.run(tap))
        while not tap.pending_bytes:
            await asyncio.sleep(0)
        tap.leave()
        with pytest.raises(ClientDisconnected):
            await task
        assert b"$end" not in b"".join(tap.writes)

    run_scenario(scenario)


def test_reading_is_whole_amid_writes_deletes_and_checkpoints(tmp_path: Path) -> None:
    """E8, G5, G72. Method: threads write, delete and checkpoint while streams are read; each stream has rising seqs,
    nothing twice, the data of each seq, counts that add up to its range, and everything that nobody deletes."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a", durability="memory")
        topic.append([{"n": number} for number in range(1, 2_001)])
        kept = set(range(1, 100_000, 7))
        random = Random(7)

        def write() -> None:
            for _ in range(20):
                head = topic.head_seq
                topic.append([{"n": head + number} for number in range(1, random.randint(2, 40))])

        def delete() -> None:
            for _ in range(20):
                topic.delete(seqs=sorted({random.randint(1, topic.head_seq) for _ in range(20)} - kept))

        def checkpoint() -> None:
            for _ in range(4):
                world.engine.checkpoint()

        for turn in range(10):
            threads = [Thread(target=work) for work in (write, delete, checkpoint)]
            for thread in threads:
                thread.start()
            got = await get(world, f"/v0/topics/a/records?format={'arrow' if turn % 2 else 'ndjson'}")
            for thread in threads:
                thread.join()
            if turn % 2:
                start, rows, end = unpacked(got.body)
                found = {row["seq"]: json.loads(row["data"])["n"] for row in rows}
                assert start["head_seq"] == end["head_seq"]
                count = len(rows)
            else:
                *records, last = got.lines
                end, count = last["$end"], len(records)
                found = {record["$seq"]: record["data"]["n"] for record in records}
            conserved(end, 0)
            assert end["next_from_seq"] == end["head_seq"] >= 2_000
            assert count == len(found) == end["counts"]["rows"]
            assert list(found) == sorted(found)
            assert all(seq == number for seq, number in found.items())
            assert {seq for seq in kept if seq <= end["head_seq"]} <= set(found), "what nobody deleted is there"

    run_with_engine(scenario, tmp_path, segment_events_max=97)


def test_reader_overtaken_by_eviction_gets_the_next_seq() -> None:
    """G70: the stream ends before the loss, and the next one tells of the gap."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a", cap_records=20)
        for _ in range(10):
            topic.append(b"x" * 1_000_000)
        answer = await world.begin("GET", "/v0/topics/a/records").answer()
        assert isinstance(answer, Stream)
        tap = FakeSink()
        tap.stuck = True
        async with RunningStream(answer.run(tap)) as running:
            while not tap.pending_bytes:
                await asyncio.sleep(0)
            topic.append([b"y"] * 20)
            tap.stuck = False
            tap.take()
            await running.ended()
        got = ReceivedResponse(200, b"".join(tap.writes), {}, NDJSON)
        *records, last = got.lines
        end = last["$end"]
        assert [record["$seq"] for record in records] == list(range(1, end["next_from_seq"] + 1))
        assert end["next_from_seq"] < end["head_seq"] == 10
        conserved(end, 0)
        again = (await get(world, f"/v0/topics/a/records?from_seq={end['next_from_seq']}")).lines
        assert again[-1]["$end"]["gap"]["gap_from"] == end["next_from_seq"] + 1

    run_scenario(scenario)


# ── in: lines ─────────────────────────────────────────────────────────────────────────────────────


def test_lines_become_records_and_the_answer_says_which() -> None:
    async def scenario(world: ServerHarness) -> None:
        body = (
            lines({"data": {"n": 1}, "tag": "t", "node": "n", "meta": {"m": 1}}, {"data": None}) + b'\n  \n{"data":"x"}'
        )
        status, said = await post(world, "/v0/topics/a", [body])
        took = said.pop("performance")
        assert (status, said) == (
            201,
            {
                "topic": "a",
                "first_seq": 1,
                "last_seq": 3,
                "head_seq": 3,
                "count": 3,
                "batches": 1,
                "created": True,
                "deduped": 0,
                "durability": "disk",
            },
        )
        assert set(took) == {"server_total_ms", "wal_append_ms", "fsync_ms"}
        records = world.topic("a").read().records
        assert [record[2:] for record in records] == [
            ({"n": 1}, "t", "n", {"m": 1}),
            (None, None, None, None),
            ("x", None, None, None),
        ]
        status, said = await post(world, "/v0/topics/a", [lines({"data": 4})])
        assert (status, said["first_seq"], said["created"]) == (200, 4, False)

    run_scenario(scenario)


def test_with_raw_a_line_is_the_data() -> None:
    async def scenario(world: ServerHarness) -> None:
        status, _ = await post(world, "/v0/topics/a?raw=1", [b'{"data": 1}\r\n[1, 2]\r\n"x y"\r\n'])
        assert status == 201
        assert [record.data for record in world.topic("a").read().records] == [{"data": 1}, [1, 2], "x y"]
        texts = (await get(world, "/v0/topics/a/records")).body
        assert b'"data":{"data":1}}' in texts, "without the blanks between its words"

    run_scenario(scenario)


def test_with_raw_every_line_is_a_record_whatever_it_says() -> None:
    async def scenario(world: ServerHarness) -> None:
        status, said = await post(world, "/v0/topics/a?raw=1", [b'{"$end":{"a":1}}\n\n{"b":2}\n{"$end":0}\n'])
        assert (status, said["count"]) == (201, 3)
        assert [record.data for record in world.topic("a").read().records] == [
            {"$end": {"a": 1}},
            {"b": 2},
            {"$end": 0},
        ]

    run_scenario(scenario)


def test_the_last_line_of_a_read_is_passed_and_what_says_more_is_a_record() -> None:
    async def scenario(world: ServerHarness) -> None:
        body = b'{"$end":{},"data":1}\n{"$end": {"head_seq":9}}\n{"data":2,"$end":{}}\n{"$end":{},"tag":"t","data":3}\n'
        status, said = await post(world, "/v0/topics/a", [body])
        assert (status, said["count"]) == (201, 3)
        assert [(record.data, record.tag) for record in world.topic("a").read().records] == [
            *((1, None), (2, None), (3, "t")),
        ]

    run_scenario(scenario)


@pytest.mark.parametrize("kind", [NDJSON, ARROW])
def test_what_is_read_can_be_written_again(kind: str) -> None:
    """A copy has the data, tags, nodes and metas of what was copied, and seqs of its own."""

    async def scenario(world: ServerHarness) -> None:
        filled(world, "a")
        world.topic("a").append([b"\x00bytes", "text"], tag="last")
        got = await get(world, "/v0/topics/a/records?from_seq=3", accept=kind)
        status, said = await post(world, "/v0/topics/b", pieces(got.body, 77), kind)
        assert (status, said["count"]) == (201, 9)
        source, copy = world.topic("a").read(3).records, world.topic("b").read().records
        assert [record[2:] for record in copy] == [record[2:] for record in source]

    run_scenario(scenario)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1_000, 100_000])
def test_batches_are_cut_by_what_the_lines_say_and_not_by_how_they_came(size: int) -> None:
    """G4: with seven records a batch, whatever the pieces are; the time of a record tells its batch."""

    async def scenario(world: ServerHarness) -> None:
        body = lines(*({"data": number} for number in range(1, 31)))
        status, said = await post(world, "/v0/topics/a", pieces(body, size))
        assert (status, said["count"], said["batches"]) == (201, 30, 5)
        assert (said["first_seq"], said["last_seq"], said["head_seq"]) == (1, 30, 30)
        assert [record.data for record in world.topic("a").read().records] == list(range(1, 31))

    run_scenario_with(scenario, batch_records_max=7)


@pytest.mark.parametrize("size", [300_000, 5_000_000, 10_000_000])
def test_a_batch_is_about_four_mebibytes_whatever_the_pieces_are(size: int) -> None:
    async def scenario(world: ServerHarness) -> None:
        line = lines({"data": "x" * 999_000})
        status, said = await post(world, "/v0/topics/a", pieces(line * 10, size))
        assert (status, said["count"], said["batches"]) == (201, 10, 3), "4 + 4 + 2 of a megabyte"

    run_scenario(scenario)


def test_a_retry_of_the_whole_stream_writes_nothing_twice() -> None:
    async def scenario(world: ServerHarness) -> None:
        body = lines(*({"data": number} for number in range(20)))
        _, first = await post(world, "/v0/topics/a", pieces(body, 9), idempotency_key="k")
        status, again = await post(world, "/v0/topics/a", pieces(body, 1_000), idempotency_key="k")
        assert (status, again["deduped"], again["batches"], again["count"]) == (200, 3, 3, 20)
        assert [again[key] for key in ("first_seq", "last_seq")] == [first[key] for key in ("first_seq", "last_seq")]
        assert world.topic("a").head_seq == 20
        _, other = await post(world, "/v0/topics/a", [body], idempotency_key="other")
        assert (other["deduped"], other["first_seq"]) == (0, 21)

    run_scenario_with(scenario, batch_records_max=7)


def test_a_retry_after_an_error_in_the_middle_goes_on_where_it_was() -> None:
    """What the error says was written is what is there, and the retry adds the rest."""

    async def scenario(world: ServerHarness) -> None:
        good = [b'{"data":%d}\n' % number for number in range(20)]
        bad = [*good[:16], b'{"data":16,"tag":1}\n', *good[17:]]
        status, said = await post(world, "/v0/topics/a", bad, idempotency_key="k")
        error = said["error"]
        assert (status, error["code"], error["detail"]["line"]) == (400, "invalid_request", 17)
        assert error["detail"]["written"] == {"count": 14, "first_seq": 1, "last_seq": 14, "ranges": [[1, 14]]}
        assert "nothing of this batch was written" in error["message"]
        assert "14 records of this stream were" in error["message"]
        topic = world.topic("a")
        assert [record.data for record in topic.read().records] == list(range(14))
        status, said = await post(world, "/v0/topics/a", good, idempotency_key="k")
        assert (status, said["deduped"], said["batches"], said["last_seq"]) == (200, 2, 3, 20)
        assert [record.data for record in topic.read().records] == list(range(20))

    run_scenario_with(scenario, batch_records_max=7)


@pytest.mark.parametrize(
    ("bad", "code", "words"),
    [
        (b'{"data":}', "invalid_request", "not JSON"),
        (b'{"data":1} {"data":2}', "invalid_request", "trailing"),
        (b"[1]", "invalid_request", "Expected `object`"),
        (b'{"tag":"t"}', "invalid_request", "missing required field `data`"),
        (b'{"data":1,"meta":[]}', "invalid_request", "meta"),
        (b'{"data":"\xff"}', "invalid_request", "utf-8"),
        (b'{"data":1,"tag":"%b"}' % (b"t" * 257), "invalid_request", "tag of 257 bytes"),
        (b'{"data":1,"$encoding":"hex"}', "invalid_request", "base64"),
        (b'{"data":"%b"}' % (b"x" * (1 << 20)), "record_too_large", "limit is 1048576"),
        (b'{"data":%b1%b}' % (b"[" * 140, b"]" * 140), "invalid_request", "nested deeper"),
        (b'{"$end":{},"sku":"A"}', "invalid_request", "there is no field 'sku', the nearest is "),
        (b'{"data":1,"tga":"t"}', "invalid_request", "there is no field 'tga', the nearest is tag"),
        (b'{"$end":{}', "invalid_request", "not JSON"),
        (b'{"$end":%b1%b}' % (b"[" * 5000, b"]" * 5000), "invalid_request", "nested too deep"),
    ],
)
def test_a_bad_line_is_named_and_its_batch_is_not_written(bad: bytes, code: str, words: str) -> None:
    """G7, G58."""

    async def scenario(world: ServerHarness) -> None:
        body = b'{"data":1}\n\n' + bad + b'\n{"data":3}\n'
        status, said = await post(world, "/v0/topics/a", [body])
        error = said["error"]
        assert (status, error["code"], error["detail"]["line"]) == (400, code, 3), error
        assert words in error["message"]
        assert error["detail"]["written"] == {"count": 0, "first_seq": None, "last_seq": None, "ranges": []}
        assert world.engine.find("a") is None, "a write that is refused makes no topic"

    run_scenario(scenario)


@pytest.mark.parametrize("ending", [b"\n", b""])
def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(ending: bytes) -> None:
    async def scenario(world: ServerHarness) -> None:
        taken = 0

        async def endless() -> AsyncIterator[bytes]:
            nonlocal taken
            yield b'{"data":0}\n{"data":"'
            for _ in range(100):
                taken += 1
                yield b"x" * (1 << 20)
            yield b'"}' + ending

        status, said = await post(world, "/v0/topics/a", endless())
        error = said["error"]
        assert (status, error["code"], error["detail"]["line"]) == (400, "record_too_large", 2)
        assert error["detail"]["written"]["count"] == 1, "what stands before it is a batch of its own"
        assert taken <= 9

    run_scenario(scenario)


@pytest.mark.parametrize("body", [[], [b""], [b"\n \n"], [b'{"$end":{}}\n']])
def test_a_stream_without_records_is_refused(body: list[bytes]) -> None:
    async def scenario(world: ServerHarness) -> None:
        status, said = await post(world, "/v0/topics/a", body)
        assert (status, said["error"]["code"]) == (400, "invalid_request")
        assert world.engine.find("a") is None

    run_scenario(scenario)


def test_a_topic_is_made_only_where_that_is_wanted() -> None:
    async def scenario(world: ServerHarness) -> None:
        status, said = await post(world, "/v0/topics/a?create=false", [b'{"data":1}\n'])
        assert (status, said["error"]["code"], said["error"]["detail"]) == (404, "topic_not_found", {"topic": "a"})
        status, said = await post(world, "/v0/topics/-a", [b'{"data":1}\n'])
        assert (status, said["error"]["code"]) == (400, "invalid_request")
        status, _ = await post(world, "/v0/topics/a?create=true", [b'{"data":1}\n'])
        assert status == 201

    run_scenario(scenario)


@pytest.mark.parametrize("key", ["", "k" * 241])
def test_key_too_long_for_a_batch_number_is_refused_at_once(key: str) -> None:
    async def scenario(world: ServerHarness) -> None:
        status, said = await post(world, "/v0/topics/a", [b'{"data":1}\n'], idempotency_key=key)
        assert (status, said["error"]["code"]) == (400, "invalid_request")
        assert world.engine.find("a") is None

    run_scenario(scenario)


def test_full_topic_stops_the_stream_and_reports_written_records() -> None:
    """G12."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a", cap_records=10, discard="reject")
        status, said = await post(world, "/v0/topics/a", [lines({"data": n}) for n in range(20)])
        error = said["error"]
        assert (status, error["code"]) == (422, "topic_full")
        assert error["detail"]["written"] == {"count": 8, "first_seq": 1, "last_seq": 8, "ranges": [[1, 8]]}
        assert error["detail"]["line"] == 9, "where the batch begins that was not taken"
        assert error["detail"]["cap_records"] == 10
        assert world.topic("a").head_seq == 8

    run_scenario_with(scenario, batch_records_max=4)


def test_a_body_that_breaks_off_writes_no_half_batch() -> None:
    """G4, G7: whole batches before it stay, the unfinished one is dropped with its last, half line."""

    async def scenario(world: ServerHarness) -> None:
        async def broken() -> AsyncIterator[bytes]:
            yield lines(*({"data": number} for number in range(10))) + b'{"da'
            raise ClientDisconnected

        status, said = await post(world, "/v0/topics/a", broken())
        assert (status, said["error"]["code"]) == (400, "invalid_request")
        assert said["error"]["detail"]["written"]["count"] == 8
        assert world.topic("a").head_seq == 8

    run_scenario_with(scenario, batch_records_max=4)


_RANDOM = Random(7)
_LINES = lines(*({"data": _RANDOM.randbytes(1000).hex()} for _ in range(25)))
_PACKED = gzip.compress(_LINES)
_GZIP = b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n"


@pytest.mark.parametrize(
    ("first", "rest", "status", "words"),
    [
        ((_GZIP % (len(_PACKED) - 100)) + _PACKED[:-200], _PACKED[-200:-100], 400, "the gzip stream is incomplete"),
        ((_GZIP % len(_PACKED)) + _PACKED[:-8], bytes(8), 400, "the body is not gzip"),
        (_CHUNKED % (len(_LINES), _LINES), b"zz\r\n", 400, "this is not HTTP/1.1"),
        (b"Content-Length: %d\r\n\r\n%b" % (len(_LINES) + 1000, _LINES), b"", 408, "no more of the body arrived"),
    ],
    ids=["cut", "flipped", "no chunk", "silence"],
)
def test_a_body_that_breaks_on_the_wire_says_what_was_written(
    first: bytes, rest: bytes, status: int, words: str, tmp_path: Path
) -> None:
    """G7. Method: two of three batches are there before what breaks it is sent."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        async with listening(world, **({} if rest else {"body_timeout_s": 0.1})) as client:
            client.send(b"POST /v0/topics/a HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: mine\r\n")
            client.send(b"Content-Type: application/x-ndjson\r\n" + first)
            while topic.head_seq < 20:
                await asyncio.sleep(0.001)
            client.send(rest)
            got = await client.reply()
        error = got.json["error"]
        assert (got.status, got.headers["x-request-id"]) == (status, "mine")
        assert words in error["message"]
        assert "nothing was" not in error["message"]
        assert "20 records of this stream were" in error["message"]
        assert error["detail"] == {"written": {"count": 20, "first_seq": 1, "last_seq": 20, "ranges": [[1, 20]]}}
        assert topic.head_seq == 20

    run_with_engine(scenario, tmp_path, batch_records_max=10)


def test_a_body_that_breaks_before_anything_was_written_says_so() -> None:
    async def scenario(world: ServerHarness) -> None:
        async def broken() -> AsyncIterator[bytes]:
            yield lines({"data": 1})
            raise BodyError(408, "no more of it came")

        status, said = await post(world, "/v0/topics/a", broken())
        assert (status, said["error"]["code"]) == (408, "request_timeout")
        assert said["error"]["message"] == "no more of it came; nothing was written"
        assert said["error"]["detail"]["written"]["count"] == 0
        assert world.engine.find("a") is None

    run_scenario(scenario)


def test_a_body_that_breaks_while_a_batch_is_in_doubt_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """G7: what is under way when it breaks is waited for, and what became of it is not kept back."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        stage, calls = TopicOperations.submit, iter(range(1, 100))

        def failing(self: TopicOperations, batch: Any, key: str | None = None) -> Any:
            token = stage(self, batch, key)
            return Lost(token, InDoubt("planted")) if next(calls) == 2 else token

        async def broken() -> AsyncIterator[bytes]:
            yield lines(*({"data": number} for number in range(8)))
            raise BodyError(400, "this is no body")

        monkeypatch.setattr(TopicOperations, "submit", failing)
        status, said = await post(world, "/v0/topics/a", broken())
        detail = said["error"]["detail"]
        assert (status, detail["written"]["ranges"], detail["in_doubt"]) == (400, [[1, 4]], True)

    run_scenario_with(scenario, batch_records_max=4)


def test_a_peer_that_leaves_holds_nothing_and_what_was_staged_is_whole() -> None:
    """G4."""

    async def scenario(world: ServerHarness) -> None:
        world.topic("a")
        reached = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield lines(*({"data": number} for number in range(9)))
            reached.set()
            await asyncio.Event().wait()

        asked = send(world, "/v0/topics/a", slow())
        await reached.wait()
        asked.leave()
        await asyncio.sleep(0.01)
        assert not asked.answered
        assert asyncio.all_tasks() == {asyncio.current_task()}
        for shard in world.engine.shards:
            shard.commit_pending()
        assert world.topic("a").head_seq == 8

    run_scenario_with(scenario, batch_records_max=4)


@pytest.mark.parametrize("commit", ["loop", "beside"])
def test_megabytes_are_committed_in_order_in_every_mode(commit: str, tmp_path: Path) -> None:
    """G8, G14: several batches are under way at a time, and their order is the stream's."""

    async def scenario(world: ServerHarness) -> None:
        body = b"".join(b'{"data":{"n":%d,"pad":"%b"}}\n' % (number, b"x" * 900) for number in range(20_000))
        status, said = await post(world, "/v0/topics/a", pieces(body, 1 << 18))
        assert (status, said["count"], said["last_seq"]) == (201, 20_000, 20_000)
        assert said["batches"] == 5
        got = (await get(world, "/v0/topics/a/records")).lines
        assert [line["data"]["n"] for line in got[:-1]] == list(range(20_000))

    run_with_engine(scenario, tmp_path, server={"commit": commit}, wal_file_bytes=64 << 20)


def test_writers_of_streams_and_plain_ones_share_a_topic(tmp_path: Path) -> None:
    """G4, G14: batches of two streams and of plain writes mix, records of one batch do not."""

    async def scenario(world: ServerHarness) -> None:
        async def stream(name: str) -> None:
            body = [lines(*({"data": [name, at]} for at in range(start, start + 50))) for start in range(0, 500, 50)]
            status, said = await post(world, "/v0/topics/a", body)
            assert (status in (200, 201), said["count"]) == (True, 500)

        async def plain() -> None:
            for at in range(20):
                assert (await world.ask("POST", "/v0/topics/a", {"records": [{"data": ["p", at]}]}))[0] in (200, 201)

        await asyncio.gather(stream("x"), stream("y"), plain())
        got = (await get(world, "/v0/topics/a/records")).lines[:-1]
        assert len(got) == 1_020
        for name, count in (("x", 500), ("y", 500), ("p", 20)):
            mine = [(line["$seq"], line["data"][1]) for line in got if line["data"][0] == name]
            assert [at for _, at in mine] == list(range(count)), "in the order that they were sent"
            if name != "p":
                for start in range(0, 500, 100):
                    seqs = [seq for seq, _ in mine[start : start + 100]]
                    assert seqs == list(range(seqs[0], seqs[0] + 100)), "a batch is contiguous"

    run_with_engine(scenario, tmp_path, batch_records_max=100)


def test_error_reports_batches_written_after_the_failed_one() -> None:
    """G7, G19. Method: the second batch of six meets a full disk, two behind it were staged by then and do not."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        stage, calls = TopicOperations.submit, iter(range(1, 100))

        def failing(self: TopicOperations, batch: Any, key: str | None = None) -> Any:
            token = stage(self, batch, key)
            return Lost(token) if next(calls) == 2 else token

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TopicOperations, "submit", failing)
            with captured_log() as text:
                status, said = await post(world, "/v0/topics/a", [lines(*({"data": n} for n in range(24)))])
        error = said["error"]
        assert [(line["topic"], "no room" in line["message"]) for line in parse_log(text)] == [("a", True)]
        assert (status, error["code"], error["detail"]["line"]) == (507, "disk_full", 5)
        assert error["detail"]["reason"] == "disk_full"
        assert error["detail"]["written"]["ranges"] == [[1, 4], [9, 16]]
        assert error["detail"]["written"]["count"] == 12
        assert topic.head_seq == 16, "nothing was staged once it was known"

    run_scenario_with(scenario, batch_records_max=4)


class Lost:
    """A token of a commit that met a full disk; the records behind it are there, in this test, to tell them apart."""

    done = True

    def __init__(self, token: Any, error: Error | None = None) -> None:
        self._token, self._error = token, error or DiskFull("no room; nothing was written, make room and retry")

    def wait(self) -> Any:
        self._token.wait()
        raise self._error


def test_only_the_write_that_latched_a_shard_is_in_doubt() -> None:
    """G7, G22: whoever comes behind it has written nothing, and is told so in words and in detail."""
    disk = SimDisk()

    async def scenario(world: ServerHarness) -> None:
        world.topic("a", durability="fsync")
        body = {"records": [{"data": 1}]}
        disk.fail_sync("kept", 1, 1, "wal")
        told = [await world.ask("POST", "/v0/topics/a", body) for _ in range(3)]
        assert {(status, said["error"]["code"]) for status, said in told} == {(500, "internal")}
        details = [said["error"]["detail"] for _, said in told]
        assert details == [{"reason": "latched", "written": written} for written in (None, False, False)]
        assert all("wrote nothing" in said["error"]["message"] for _, said in told[1:])
        status, said = await post(world, "/v0/topics/a", [lines({"data": 1})])
        assert (status, said["error"]["detail"]["reason"]) == (500, "latched")
        assert "in_doubt" not in said["error"]["detail"]
        assert said["error"]["detail"]["written"]["count"] == 0

    run_scenario_with(scenario, disk=disk)


def test_a_stream_that_latched_a_shard_is_in_doubt() -> None:
    """G7, G22."""
    disk = SimDisk()

    async def scenario(world: ServerHarness) -> None:
        world.topic("a", durability="fsync")
        disk.fail_sync("kept", 1, 1, "wal")
        _, said = await post(world, "/v0/topics/a", [lines({"data": 1})])
        assert (said["error"]["detail"]["reason"], said["error"]["detail"]["in_doubt"]) == ("latched", True)

    run_scenario_with(scenario, disk=disk)


# ── in: Arrow ─────────────────────────────────────────────────────────────────────────────────────


def table(count: int = 10) -> pa.Table:
    return pa.table(
        {
            "data": [b'{"n":%d}' % number for number in range(count)],
            "tag": [f"t{number}" for number in range(count)],
            "node": pa.nulls(count),
            "meta": ['{"m":1}' if number % 2 else None for number in range(count)],
            "json": [True] * count,
        }
    )


@pytest.mark.parametrize("size", [1, 5, 8, 9, 500, 1 << 20])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_an_arrow_stream_is_read_from_any_pieces(size: int, compression: str | None) -> None:
    async def scenario(world: ServerHarness) -> None:
        body = arrow(table(), 4, compression=compression)
        status, said = await post(world, "/v0/topics/a", pieces(body, size), ARROW)
        assert (status, said["count"], said["batches"]) == (201, 10, 3)
        records = world.topic("a").read().records
        assert [record.data for record in records] == [{"n": number} for number in range(10)]
        assert [record.tag for record in records] == [f"t{number}" for number in range(10)]
        assert [record.meta for record in records] == [None, {"m": 1}] * 5

    run_scenario(scenario)


def test_a_large_arrow_batch_is_cut_by_records_and_by_bytes() -> None:
    async def scenario(world: ServerHarness) -> None:
        _, said = await post(world, "/v0/topics/a", [arrow(pa.table({"data": [b"x"] * 20}))], ARROW)
        assert (said["count"], said["batches"]) == (20, 3)
        _, said = await post(world, "/v0/topics/b", [arrow(pa.table({"data": [b"x" * 1_000_000] * 6}))], ARROW)
        assert (said["count"], said["batches"]) == (6, 2)
        _, again = await post(
            world, "/v0/topics/b", [arrow(pa.table({"data": [b"x"] * 20}))], ARROW, idempotency_key="k"
        )
        _, again = await post(
            world, "/v0/topics/b", [arrow(pa.table({"data": [b"x"] * 20}))], ARROW, idempotency_key="k"
        )
        assert (again["deduped"], world.topic("b").head_seq) == (3, 26)

    run_scenario_with(scenario, batch_records_max=8)


def test_a_stream_may_end_without_its_end_mark() -> None:
    """The length of the body says that it is whole; the mark is optional in the format."""

    async def scenario(world: ServerHarness) -> None:
        status, said = await post(world, "/v0/topics/a", [arrow(table())[:-8]], ARROW)
        assert (status, said["count"]) == (201, 10)

    run_scenario(scenario)


def test_json_in_arrow_is_kept_without_blanks() -> None:
    """A line end in it would end a line of NDJSON and an event of a stream."""

    async def scenario(world: ServerHarness) -> None:
        made = pa.table({"data": ['{\n "n": 1\n}', "a\nb"], "json": [True, False]})
        await post(world, "/v0/topics/a", [arrow(made)], ARROW)
        got = (await get(world, "/v0/topics/a/records")).lines
        assert [line.get("data") for line in got[:-1]] == [{"n": 1}, "YQpi"]
        assert [record.data for record in world.topic("a").read().records] == [{"n": 1}, b"a\nb"]

    run_scenario(scenario)


def bomb() -> bytes:
    """A kilobyte that claims to be 80 MB of zeros."""
    return arrow(pa.table({"data": zero_records(80, 1_000_000)}), compression="zstd")


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (b"not arrow at all", "invalid_request", "not an Arrow IPC stream"),
        (b"\xff\xff\xff\xff\x10\0\0\0" + b"\xff" * 16, "invalid_request", "not an Arrow IPC stream"),
        (b"\xff\xff\xff\xff\xff\xff\xff\x7f", "invalid_request", "not an Arrow IPC stream"),
        (b"", "invalid_request", "incomplete"),
        (arrow(table())[:100], "invalid_request", "incomplete"),
        (arrow(table())[:-40], "invalid_request", "incomplete"),
        (arrow(table()) + b"more", "invalid_request", "after the end"),
        (arrow(table()) + arrow(table()), "invalid_request", "after the end"),
        (arrow(pa.table({"value": [b"x"]})), "invalid_request", "one column `data`"),
        (arrow(pa.table({"data": [1]})), "invalid_request", "the column 'data' is int64"),
        (arrow(pa.table({"data": pa.nulls(5)})), "invalid_request", "the column 'data' is null"),
        (arrow(pa.table({"data": ["x"], "seq": [[1]]})), "invalid_request", "the column 'seq' is list"),
        (arrow(pa.table({"data": [b"x"], "json": ["yes"]})), "invalid_request", "the column 'json' is string"),
        (arrow(pa.table({"data": [b"x"], "extra": [1]})), "invalid_request", "no column 'extra'"),
        (arrow(pa.table({"data": [b"x", None]})), "invalid_request", "nulls"),
        (arrow(pa.table({"data": ["{"], "json": [True]})), "invalid_request", "not JSON"),
        (arrow(pa.table({"data": ["x"], "tag": ["t" * 257]})), "record_too_large", "257"),
        (arrow(pa.table({"data": pa.array(["x", "x"]).dictionary_encode()})), "invalid_request", "dictionary"),
        (arrow(pa.table({"data": [b"x"]}).slice(0, 0)), "invalid_request", "at least one record"),
        (bomb, "payload_too_large", "smaller batches"),
    ],
)
def test_bytes_that_are_no_such_stream_are_refused_by_name(
    body: bytes | Callable[[], bytes], code: str, words: str
) -> None:
    """G58: whatever comes, the answer is one of ours, and nothing is made of it."""
    sent = body() if callable(body) else body

    async def scenario(world: ServerHarness) -> None:
        status, said = await post(world, "/v0/topics/a", pieces(sent, 64_000), ARROW)
        error = said["error"]
        assert (error["code"], status) == (code, 413 if code == "payload_too_large" else 400), error
        assert words in error["message"], error
        topic = world.engine.find("a")
        assert error["detail"]["written"]["count"] == (0 if topic is None else topic.head_seq)

    run_scenario(scenario)


def test_a_batch_that_would_not_fit_is_refused_before_it_is_here() -> None:
    async def scenario(world: ServerHarness) -> None:
        body = arrow(pa.table({"data": [b"x" * 1_000_000] * 5}))
        taken = 0

        def each() -> Iterator[bytes]:
            nonlocal taken
            for piece in pieces(body, 10_000):
                taken += 1
                yield piece

        status, said = await post(world, "/v0/topics/a", each(), ARROW)
        assert (status, said["error"]["code"]) == (413, "payload_too_large")
        assert taken == 1, "its head says how long it is"

    run_scenario(scenario, max_body_bytes=2_000_000)


@pytest.mark.parametrize("seed", range(150))
def test_damaged_streams_are_refused_or_whole_but_never_break_anything(seed: int) -> None:
    """G58. Method: a few bytes of a good stream are changed by seeded chance; the answer is one of ours, what it says
    was written is there, and what is there can be read."""

    async def scenario(world: ServerHarness) -> None:
        random = Random(seed)
        damaged = bytearray(arrow(table(), 3, compression=random.choice([None, "zstd"])))
        for _ in range(random.randint(1, 3)):
            damaged[random.randrange(len(damaged))] = random.choice([0, 1, 0x7F, 0x80, 0xFF])
        status, said = await post(world, "/v0/topics/a", pieces(bytes(damaged), 333), ARROW)
        assert status in (200, 201, 400, 413), f"seed {seed}: {said}"
        topic = world.engine.find("a")
        written = said["count"] if status < 300 else said["error"]["detail"]["written"]["count"]
        assert (0 if topic is None else topic.head_seq) == written, f"seed {seed}"
        if topic is not None:
            assert len((await get(world, "/v0/topics/a/records")).lines) == written + 1

    run_scenario(scenario)


def test_an_error_in_a_later_arrow_batch_names_it() -> None:
    async def scenario(world: ServerHarness) -> None:
        made = pa.table({"data": ["1", "2", "3", "{", "5"], "json": [True] * 5})
        status, said = await post(world, "/v0/topics/a", [arrow(made, 2)], ARROW)
        assert (status, said["error"]["code"]) == (400, "invalid_request")
        assert said["error"]["detail"] == {
            "written": {"count": 2, "first_seq": 1, "last_seq": 2, "ranges": [[1, 2]]},
            "batch": 2,
        }

    run_scenario(scenario)
