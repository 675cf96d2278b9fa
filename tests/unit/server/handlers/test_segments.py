"""Segments over HTTP: the manifest, and files in ranges (G62, G64, G84). What they hold is the engine's to prove."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.server.bulk_fixtures import ReceivedResponse, get, run_scenario_with, run_with_engine
from tests.unit.server.fakes import FakeSink, RunningStream, ServerHarness, let_idle
from xxhash import xxh3_64_hexdigest

from tidelog.engine import Topic
from tidelog.errors import Corrupt, NotFound
from tidelog.http.interface import Stream

SMALL: dict[str, Any] = {"segment_events_max": 4}


def filled(world: ServerHarness, count: int = 10, **config: Any) -> Topic:
    topic = world.topic("a", **config)
    for number in range(1, count + 1):
        topic.append({"n": number})
    return topic


def test_listing_names_files_and_the_start_of_the_tail() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = filled(world)
        empty = (await get(world, "/v0/topics/a/segments")).json
        assert (empty["generation"], empty["segments"], empty["tail"]) == (0, [], {"from_seq": 0, "to_seq": 10})
        world.engine.checkpoint()
        topic.append({"n": 11})
        topic.delete(seqs=[2])
        said = (await get(world, "/v0/topics/a/segments")).json
        assert set(said.pop("performance")) == {"server_total_ms"}
        rows = said.pop("segments")
        assert said == {
            "topic": "a",
            "epoch": topic.epoch,
            "generation": 1,
            "head_seq": 11,
            "earliest_seq": 1,
            "evict_floor": 1,
            "tail": {"from_seq": 10, "to_seq": 11},
            "next_from_seq": None,
            "records": 10,
            "bytes": 72,
            "removals": 1,
        }
        assert [(row["base"], row["stop"], row["sealed"], row["records"], row["live"]) for row in rows] == [
            (1, 5, True, 4, 3),
            (5, 9, True, 4, 4),
            (9, 11, False, 2, 2),
        ]
        assert [row["bytes"] for row in rows] == [21, 28, 15]
        assert [sorted(row["files"]) for row in rows] == [
            ["data", "del", "foot", "idx"],
            ["data", "foot", "idx"],
            ["data", "idx"],
        ]

    run_scenario_with(scenario, **SMALL)


def test_each_file_has_the_length_and_the_sum_of_the_manifest() -> None:
    """G64: and the same bytes come whole or in ranges."""

    async def scenario(world: ServerHarness) -> None:
        filled(world).delete(seqs=[3])
        world.engine.checkpoint()
        for row in (await get(world, "/v0/topics/a/segments")).json["segments"]:
            for kind, shown in row["files"].items():
                target = f"/v0/topics/a/segments/{row['base']}/{kind}"
                got = await get(world, target)
                assert (got.status, got.content_type) == (200, "application/octet-stream")
                assert (len(got.body), xxh3_64_hexdigest(got.body)) == (shown["bytes"], shown["xxh3"])
                assert got.headers["etag"] == f'"{shown["xxh3"]}-1"'
                assert got.headers["accept-ranges"] == "bytes"
                parts = [
                    (await get(world, target, range=f"bytes={at}-{at + 9}")).body for at in range(0, len(got.body), 10)
                ]
                assert b"".join(parts) == got.body

    run_scenario_with(scenario, **SMALL)


def test_without_sums_only_known_checksums_are_listed() -> None:
    """Sums read every byte of every file: whoever only plans can do without."""

    async def scenario(world: ServerHarness) -> None:
        filled(world, 4)
        world.engine.checkpoint()
        target = "/v0/topics/a/segments?sums=false"
        (row,) = (await get(world, target)).json["segments"]
        assert all("xxh3" not in row["files"][kind] for kind in ("data", "idx"))
        await get(world, "/v0/topics/a/segments/1/data")
        (row,) = (await get(world, target)).json["segments"]
        assert "xxh3" in row["files"]["data"]
        assert "xxh3" not in row["files"]["idx"]

    run_scenario_with(scenario, **SMALL)


@pytest.mark.parametrize(
    ("asked", "status", "part", "shown"),
    [
        ("bytes=0-0", 206, slice(0, 1), "bytes 0-0/80"),
        ("bytes=10-19", 206, slice(10, 20), "bytes 10-19/80"),
        ("bytes=70-", 206, slice(70, 80), "bytes 70-79/80"),
        ("bytes=70-1000", 206, slice(70, 80), "bytes 70-79/80"),
        ("bytes=-5", 206, slice(75, 80), "bytes 75-79/80"),
        ("bytes=-1000", 206, slice(0, 80), "bytes 0-79/80"),
        ("bytes=80-", 416, None, "bytes */80"),
        ("bytes=500-600", 416, None, "bytes */80"),
        ("bytes=-0", 416, None, "bytes */80"),
        ("bytes=20-10", 200, slice(0, 80), None),
        ("bytes=0-1,4-5", 200, slice(0, 80), None),
        ("bytes=-", 200, slice(0, 80), None),
        ("lines=0-1", 200, slice(0, 80), None),
        ("bytes=a-b", 200, slice(0, 80), None),
        (f"bytes={'9' * 30}-", 200, slice(0, 80), None),
    ],
)
def test_ranges_are_those_of_http(asked: str, status: int, part: slice | None, shown: str | None) -> None:
    """The index of four records has 80 bytes."""

    async def scenario(world: ServerHarness) -> None:
        filled(world, 4)
        world.engine.checkpoint()
        whole = (await get(world, "/v0/topics/a/segments/1/idx")).body
        got = await get(world, "/v0/topics/a/segments/1/idx", range=asked)
        assert (got.status, got.headers.get("content-range")) == (status, shown)
        if part is None:
            assert got.json["error"]["code"] == "range_not_satisfiable"
            assert got.json["error"]["detail"] == {"bytes": 80}
        else:
            assert got.body == whole[part]

    run_scenario_with(scenario, **SMALL)


def test_a_range_goes_on_only_while_the_content_is_the_same() -> None:
    """If-Range: another checkpoint alone does not make it another file, other bytes do."""

    async def scenario(world: ServerHarness) -> None:
        topic = filled(world, 3)
        world.engine.checkpoint()
        target = "/v0/topics/a/segments/1/idx"
        tag = (await get(world, target)).headers["etag"]
        world.topic("b").append(b"x")
        world.engine.checkpoint()
        assert (await get(world, target)).headers["etag"] != tag, "the generation is another one"
        got = await get(world, target, range="bytes=4-7", if_range=tag)
        assert (got.status, len(got.body)) == (206, 4)
        topic.append({"n": 4})
        world.engine.checkpoint()
        got = await get(world, target, range="bytes=4-7", if_range=tag)
        assert (got.status, len(got.body)) == (200, 80)

    run_scenario_with(scenario, **SMALL)


@pytest.mark.parametrize(
    "part",
    ["2/data", "0/data", "-1/data", "x/data", "１/data", f"{1 << 80}/data", "1/wal", "1/del", "1/DATA", "5/foot"],
)
def test_what_is_not_there_is_not_found_and_never_looked_for_in_files(part: str) -> None:
    async def scenario(world: ServerHarness) -> None:
        filled(world, 6)
        world.engine.checkpoint()
        path = part.encode().decode("latin-1")
        got = await get(world, f"/v0/topics/a/segments/{path}")
        assert (got.status, got.json["error"]["code"]) == (404, "not_found")

    run_scenario_with(scenario, **SMALL)


@pytest.mark.parametrize("name", ["nobody", "..%2F..%2Fmeta", "%2Fetc%2Fpasswd", "a%00b"])
def test_names_of_topics_reach_no_file(name: str) -> None:
    async def scenario(world: ServerHarness) -> None:
        filled(world, 4)
        world.engine.checkpoint()
        for target in (f"/v0/topics/{name}/segments", f"/v0/topics/{name}/segments/1/data"):
            got = await get(world, target)
            assert (got.status, got.json["error"]["code"]) == (404, "topic_not_found")

    run_scenario_with(scenario, **SMALL)


def large(world: ServerHarness, megabytes: int = 5) -> Topic:
    topic = world.topic("a")
    topic.append([b"%d" % number * 500_000 for number in range(megabytes * 2)])
    world.engine.checkpoint()
    return topic


def test_a_large_file_comes_in_pieces_that_wait_for_the_peer(tmp_path: Path) -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = large(world)
        held = topic.segment(1)
        assert held is not None
        content = held.content("data")
        assert content is not None
        tap = FakeSink()
        got = await get(world, "/v0/topics/a/segments/1/data", tap)
        assert got.body == bytes(content)
        assert max(map(len, tap.writes)) <= 1 << 20
        got = await get(world, "/v0/topics/a/segments/1/data", range="bytes=1000-3000000")
        assert (got.status, got.body) == (206, bytes(content)[1000:3000001])

    run_with_engine(scenario, tmp_path)


def test_a_copy_under_way_outlives_the_removal_of_its_file(tmp_path: Path) -> None:
    """G64: deleted, dropped by two checkpoints and gone from the directory, and still the same bytes."""

    async def scenario(world: ServerHarness) -> None:
        topic = large(world)
        topic.seal()
        world.engine.checkpoint()
        whole = (await get(world, "/v0/topics/a/segments/1/data")).body
        answer = await world.begin("GET", "/v0/topics/a/segments/1/data").answer()
        assert isinstance(answer, Stream)
        tap = FakeSink()
        tap.stuck = True
        async with RunningStream(answer.run(tap)) as running:
            topic.append(b"later")
            topic.delete(before_seq=topic.head_seq)
            for _ in range(3):
                topic.append(b"and later")
                world.engine.checkpoint()
            assert not list(tmp_path.glob(f"topics/00000001/seg-{1:016d}.data")), "the files are gone"
            tap.stuck = False
            tap.take()
            await running.ended()
        assert b"".join(tap.writes) == whole
        gone = await get(world, "/v0/topics/a/segments/1/data")
        assert gone.status == 404
        assert "list the segments again" in gone.json["error"]["message"]

    run_with_engine(scenario, tmp_path)


def test_data_in_the_cold_store_is_fetched_as_its_peer_reads_it(tmp_path: Path) -> None:
    """A peer that reads nothing held the whole segment in memory."""

    async def scenario(world: ServerHarness) -> None:
        topic = large(world, 15)
        topic.seal()
        world.engine.checkpoint()
        whole = (await get(world, "/v0/topics/a/segments/1/data")).body
        assert world.engine.relocate("a", keep_segments=0).segments == 1
        before = world.engine.tier_status().read_bytes
        got = await get(world, "/v0/topics/a/segments/1/data", range="bytes=1000-9000000")
        assert (got.status, got.body) == (206, whole[1000:9000001])
        assert (await get(world, "/v0/topics/a/segments/1/data", range="bytes=3-9")).body == whole[3:10]
        before = world.engine.tier_status().read_bytes
        answer = await world.begin("GET", "/v0/topics/a/segments/1/data").answer()
        assert isinstance(answer, Stream)
        assert answer.length == len(whole) > 12 << 20
        tap = FakeSink()
        tap.stuck = True
        async with RunningStream(answer.run(tap)) as running:
            await let_idle()
            assert world.engine.tier_status().read_bytes - before <= 5 << 20
            tap.stuck = False
            tap.take()
            await running.ended()
        assert b"".join(tap.writes) == whole
        assert max(map(len, tap.writes)) <= 4 << 20

    run_with_engine(scenario, tmp_path / "data", cold=str(tmp_path / "cold"), cold_cache_bytes=0)


@pytest.mark.parametrize("first", [True, False])
def test_a_cold_store_that_fails_is_an_error_or_ends_the_connection(tmp_path: Path, first: bool) -> None:
    async def scenario(world: ServerHarness) -> None:
        large(world, 6).seal()
        world.engine.checkpoint()
        world.engine.relocate("a", keep_segments=0)
        (cold,) = (tmp_path / "cold" / "topics").rglob("seg-*")
        if first:
            cold.rename(tmp_path / "away")
            got = await get(world, "/v0/topics/a/segments/1/data")
            assert (got.status, "the object is missing" in got.json["error"]["message"]) == (500, True), got.json
            return
        answer = await world.begin("GET", "/v0/topics/a/segments/1/data").answer()
        assert isinstance(answer, Stream)
        cold.rename(tmp_path / "away")
        tap = FakeSink()
        async with RunningStream(answer.run(tap)) as running:
            with pytest.raises(Corrupt):
                await running.ended()
        assert len(b"".join(tap.writes)) == 4 << 20, "less than the announced length: the connection is cut"

    run_with_engine(scenario, tmp_path / "data", cold=str(tmp_path / "cold"), cold_cache_bytes=0)


def test_a_segment_that_goes_away_while_it_is_listed_is_listed_no_more() -> None:
    """Method: the first sum that is asked for finds its segment gone; the listing is made again."""

    async def scenario(world: ServerHarness) -> None:
        filled(world)
        world.engine.checkpoint()
        from tidelog.engine.segment_listing import SegmentFile

        digest, calls = SegmentFile.digest, iter(range(1, 100))

        def failing(self: SegmentFile, kind: Any) -> int | None:
            if next(calls) == 5:
                raise NotFound("it went away; nothing was read, list the segments again")
            return digest(self, kind)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SegmentFile, "digest", failing)
            got = await get(world, "/v0/topics/a/segments")
        assert (got.status, [row["base"] for row in got.json["segments"]]) == (200, [1, 5, 9])

    run_scenario_with(scenario, **SMALL)


def test_copies_and_the_tail_are_the_topic_amid_writes_and_checkpoints(tmp_path: Path) -> None:
    """G5, G62. Method: list, copy every file that is listed, write and checkpoint in between; the copies walk as
    frames, seq by seq, and the tail goes on where they end."""

    async def scenario(world: ServerHarness) -> None:
        from tidelog.formats import scan

        topic = world.topic("a", durability="memory")
        for turn in range(12):
            topic.append([{"n": topic.head_seq + number} for number in range(1, 8)])
            if turn % 3:
                world.engine.checkpoint()
            said = (await get(world, "/v0/topics/a/segments?sums=false")).json
            topic.append([{"n": topic.head_seq + 1}])
            world.engine.checkpoint()
            seqs: list[int] = []
            for row in said["segments"]:
                shown = row["files"]["data"]["bytes"]
                got: ReceivedResponse = await get(
                    world, f"/v0/topics/a/segments/{row['base']}/data", range=f"bytes=0-{shown - 1}"
                )
                assert got.status == 206
                walk = scan.scan_records(got.body, above=row["base"] - 1)
                assert walk.end == shown
                seqs += walk.rows.seq.tolist()
            tail = (await get(world, f"/v0/topics/a/records?from_seq={said['tail']['from_seq']}")).lines
            seqs += [line["$seq"] for line in tail[:-1]]
            assert seqs == list(range(1, topic.head_seq + 1))

    run_with_engine(scenario, tmp_path, segment_events_max=10)
