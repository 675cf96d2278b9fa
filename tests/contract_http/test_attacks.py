"""A server under attack: memory stays bounded, and other clients are served between any two slices of a flood.

The server runs under a limit of its memory (RLIMIT_AS): one that needs more fails, and so does its test. Slices are
bounded in bytes; nothing is measured in time. The short form is part of `make test`, the long one, with the numbers
that were reported, of `make crash`. Latencies during each flood: `benchmarks/run.py --only server-attacks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from tests.contract_http.api import Api, topic_path
from tests.contract_http.attacks import (
    CALM,
    CONTINUATION,
    END_HEADERS,
    FLOODS,
    HEADERS,
    PREFACE,
    RST_STREAM,
    Flood,
    RawSocket,
    h2_frame,
    h2_head,
    h2_settings,
    limit_memory,
    memory,
    silent_reader,
    zero_windows,
)
from tests.contract_http.server import Server
from tests.kit.waiting import eventually

MB = 1 << 20
_numbers = count(1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("attacked")).start() as running:
        with running.client() as api:
            api.create_topic("victim")
            api.write("victim", 1)
        limit_memory(running, 512 * MB)
        yield running


def limits_met(api: Api, limit: str) -> int:
    text = api.get("/v0/metrics").body.decode()
    [line] = [line for line in text.splitlines() if line.startswith(f'tidelog_limits_met_total{{limit="{limit}"}}')]
    return int(line.rpartition(" ")[2])


def under_flood(server: Server, flood: Flood, frames: int) -> None:
    """Another client writes and reads after every slice; the flood ends as it should."""
    topic = f"flood-{next(_numbers)}"
    with server.client() as api, RawSocket(server.address) as raw:
        api.create_topic(topic)
        before = memory(server.pid)["VmRSS"]
        if flood.opening(topic):
            raw.send(flood.opening(topic))
        for written, piece in enumerate(flood.slices(frames), 1):
            going_on = raw.send(piece)
            assert api.write(topic, written)["head_seq"] == written
            if not going_on:
                break
        if flood.ends == "goaway":
            assert raw.goaway() in (CALM, None)
            assert limits_met(api, "control_frames") + limits_met(api, "resets") > 0
        elif flood.ends == "1008":
            # the close frame is lost where the flood goes on after it: the kernel resets the connection
            raw.read_rest()
            assert raw.closed
            assert limits_met(api, "control_frames") > 0
        else:
            assert not raw.closed, "nothing is wrong with it but its size"
        assert memory(server.pid)["VmRSS"] - before < 128 * MB
        assert api.get("/v0/health").status == 200


@pytest.mark.parametrize("flood", FLOODS, ids=lambda flood: flood.name)
def test_others_are_served_between_slices_of_a_flood(server: Server, flood: Flood) -> None:
    under_flood(server, flood, 12_000)


@pytest.mark.sweep
@pytest.mark.parametrize("flood", FLOODS, ids=lambda flood: flood.name)
def test_others_are_served_between_slices_of_a_long_flood(server: Server, flood: Flood) -> None:
    under_flood(server, flood, flood.frames)


@pytest.mark.parametrize("flood", FLOODS[:1], ids=lambda flood: flood.name)
def test_a_flood_needs_no_key_to_be_ended(tmp_path: Path, flood: Flood) -> None:
    with Server(tmp_path, api_keys="secret").start() as server, RawSocket(server.address) as raw:
        raw.send(flood.opening(""))
        for piece in flood.slices(12_000):
            raw.send(piece)
        assert raw.goaway() in (CALM, None)
        with server.client("secret") as api:
            assert limits_met(api, "control_frames") == 1
            assert api.get("/v0/topics").status == 200
        assert server.log.count("a limit was exceeded") == 1


def filled(server: Server, megabytes: int) -> None:
    """A topic with so much in it, which was read once: Arrow's allocator reserves 1 GiB of address space with its first
    large buffer, which is no memory, and would be most of what a limit set before that allows."""
    with server.client() as api:
        api.create_topic("big")
        for _ in range(megabytes):
            api.write("big", *["x" * 10_000] * 100)
        assert api.get(topic_path("big", "/records")).status == 200


def resets(raw: RawSocket, wanted: int) -> dict[int, int]:
    """The streams that the server reset, with their codes."""
    found: dict[int, int] = {}
    for frame in raw.frames():
        if frame.kind == RST_STREAM:
            found[frame.stream] = int.from_bytes(frame.payload)
            if len(found) == wanted:
                break
    return found


def attacked_by_windows(folder: Path, *, streams: int, window: int, growth_bytes: int) -> None:
    """Two connections with so many bulk reads each, of which they read no more than `window` bytes each."""
    with Server(folder, write_timeout_ms=1_500).with_few_arenas().start() as server:
        filled(server, 24)
        limit_memory(server, 1024 * MB)
        before = memory(server.pid)["VmRSS"]
        with ExitStack() as stack, server.client() as api:
            raws = [stack.enter_context(zero_windows(server.address, "big", streams, window)) for _ in range(2)]
            for number in range(20):
                assert api.write("other", number)["head_seq"] == number + 1
            open_streams = min(streams, 256)
            for raw in raws:
                found = resets(raw, open_streams)
                assert set(found.values()) == {8}, (
                    f"not only CANCEL; the log of the server ends with: {server.log[-4000:]}"
                )
                assert len(found) == open_streams
            assert api.write("other", -1)["head_seq"] == 21
            # Refusals of streams past the bound are answers too, and are not read either.
            assert limits_met(api, "stalled") >= 2 * open_streams
            assert (limits_met(api, "streams") > 0) == (streams > 256)
            eventually(lambda: api.metrics()["sse_connections"] == 0)
        assert memory(server.pid)["VmHWM"] - before < growth_bytes


@pytest.mark.parametrize("window", [0, 1])
def test_bulk_reads_with_a_closed_window_cost_little_and_end(tmp_path: Path, window: int) -> None:
    attacked_by_windows(tmp_path, streams=100, window=window, growth_bytes=(64 if window == 0 else 300) * MB)


@pytest.mark.sweep
@pytest.mark.parametrize("window", [0, 1])
def test_a_thousand_bulk_reads_with_a_closed_window_cost_little_and_end(tmp_path: Path, window: int) -> None:
    """The numbers that took a server to 18 GB."""
    attacked_by_windows(tmp_path, streams=1_000, window=window, growth_bytes=(128 if window == 0 else 700) * MB)


def test_unread_bytes_are_bounded_over_all_connections(tmp_path: Path) -> None:
    """HTTP/1.1 peers that never read a bulk read, more than the bound has room for; a reader gets all of its own."""
    with Server(tmp_path, max_unsent_bytes=24 * MB).with_few_arenas().start() as server:
        filled(server, 24)
        limit_memory(server, 512 * MB)
        before = memory(server.pid)["VmRSS"]
        with ExitStack() as stack, server.client() as api:
            for _ in range(60):
                stack.enter_context(silent_reader(server.address, topic_path("big", "/records")))
            for _ in range(3):
                lines = api.get(topic_path("big", "/records")).body.splitlines()
                assert len(lines) == 2_401
            eventually(lambda: limits_met(api, "unsent_bytes") > 0)
        assert memory(server.pid)["VmHWM"] - before < 256 * MB


def test_requests_with_huge_heads_are_refused_past_a_bound(tmp_path: Path) -> None:
    """Requests whose bodies do not come, each with a head of 60,000 bytes: 1 MiB of them at once on a connection."""
    with Server(tmp_path).start() as server, server.client() as api, RawSocket(server.address) as raw:
        limit_memory(server, 512 * MB)
        big = tuple((f"x-big-{number}", "y" * 10_000) for number in range(6))
        block = h2_head(topic_path("slow"), "POST", ("content-type", "application/json"), *big)
        pieces = [block[at : at + 16_000] for at in range(0, len(block), 16_000)]
        raw.send(PREFACE + h2_settings())
        for stream in range(1, 80, 2):
            raw.send(h2_frame(HEADERS, 0, stream, pieces[0]))
            raw.send(b"".join(h2_frame(CONTINUATION, 0, stream, piece) for piece in pieces[1:-1]))
            raw.send(h2_frame(CONTINUATION, END_HEADERS, stream, pieces[-1]))
        found = resets(raw, 23)
        assert list(found) == list(range(35, 80, 2)), "17 fit"
        assert set(found.values()) == {7}, "REFUSED_STREAM"
        assert limits_met(api, "header_bytes") == 23
        assert api.write("other", 1)["head_seq"] == 1
