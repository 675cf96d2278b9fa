"""A server that is asked for more than it can do: it gets slower and says so, and loses nothing (§1.8, §1.9, §2.5).

One flood serves all of it: writers that never pause, on connections of their own, against a WAL queue of two. What is
said about a moment is held against the server's own figures of that moment; nothing here waits for a time to pass.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract_http.api import Api, expect_error, expect_success
from tests.contract_http.server import Server
from tests.contract_http.sse_client import Event, SseStream
from tests.kit.waiting import eventually

WRITERS = 6
WATCHERS = 8
LIMIT_S = 60.0
TOPICS = ("orders", "prices")


class Writer:
    """Writes one number after the other, and notes what became of each."""

    def __init__(self, server: Server, number: int, stop: threading.Event) -> None:
        self._server, self._stop, self.number = server, stop, number
        self.topic = TOPICS[number % len(TOPICS)]
        self.insists = number < 2
        self.acked: dict[int, str] = {}  # seq → data
        self.refused: list[str] = []
        self.waits_ms: list[float] = []
        self.failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._server.client() as api:
                turn = 0
                while not self._stop.is_set():
                    turn += 1
                    self._write(api, f"{self.number}-{turn}")
        except BaseException as error:
            self.failed = error

    def _write(self, api: Api, data: str) -> None:
        more: dict[str, Any] = {"disable_backpressure": True} if self.insists else {}
        reply = api.try_write(self.topic, {"data": data}, node="w", **more)
        if reply.status == 429:
            expect_error(reply, 429, "throttled")  # with Retry-After, and no detail
            self.refused.append(data)
            return
        body = expect_success(reply)
        self.acked[body["first_seq"]] = data
        self.waits_ms.append(body["performance"].get("throttle_wait_ms", 0.0))

    def end(self) -> None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        if self.failed is not None:
            raise self.failed


class Watcher:
    """Reads a topic's stream until it was told of a seq."""

    def __init__(self, server: Server, topic: str) -> None:
        self.topic = topic
        with server.client() as api:
            wid = api.watch({topic: {}})["wid"]
        self.seqs: list[int] = []
        self.pages = 0
        self.failed: BaseException | None = None
        self.until: int | None = None  # the seq that it stops at
        self._events = SseStream(server.address, f"/v0/watch/{wid}", timeout_s=LIMIT_S)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._events as events:
                while self.until is None or (self.seqs or [0])[-1] < self.until:
                    self._take(events.next())
        except BaseException as error:
            self.failed = error

    def _take(self, event: Event) -> None:
        assert event.name in ("record", "caught-up"), event
        if event.name == "record":
            self.seqs += event.seqs
            self.pages += 1

    def end(self) -> list[int]:
        """All seqs, once the last one came."""
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        if self.failed is not None:
            raise self.failed
        return self.seqs


class Flood:
    """What was seen while there was one, and after it."""

    def __init__(self, server: Server, api: Api) -> None:
        self.server, self.api = server, api
        for topic in TOPICS:
            api.create_topic(topic, durability="fsync")
        api.create_topic("low", durability="fsync", priority=-10)
        self.peak: dict[str, Any] = {}
        self.pushed_before: list[int] = []
        self.paused_seq = 0
        self.diffed: list[int] = []
        self.quiet = False
        stop = threading.Event()
        low = SseStream(server.address, f"/v0/watch/{api.watch({'low': {}})['wid']}", timeout_s=LIMIT_S)
        self.watchers = [Watcher(server, TOPICS[number % len(TOPICS)]) for number in range(WATCHERS)]
        self.writers = [Writer(server, number, stop) for number in range(WRITERS)]
        with low:
            try:
                self._pause(low)
            finally:
                stop.set()
            for writer in self.writers:
                writer.end()
            self.resumed = self._read_until(low, self.paused_seq)
        for watcher in self.watchers:
            watcher.until = api.state(watcher.topic)["head_seq"] + 1
        # One more, so that a watcher that has seen all the others gets to look whether it is at its end.
        self.last = {topic: api.write(topic, "last", disable_backpressure=True)["last_seq"] for topic in TOPICS}
        self.throttled = api.metrics()["throttled_total"]
        self.told = [(watcher.topic, watcher.end(), watcher.pages) for watcher in self.watchers]

    def _pause(self, low: SseStream) -> None:
        """Write to the low topic until the server was seen not to tell of it for a while."""
        deadline = time.monotonic() + LIMIT_S
        while not self.quiet and time.monotonic() < deadline:
            self.quiet = self._is_held_back(low)

    def _is_held_back(self, low: SseStream) -> bool:
        """Whether between two looks at the figures that both say so, nothing of it came and a read had all of it.
        A flood breathes: where it was let go in between, its record has come, and this was not such a while."""
        self.paused_seq = self.api.write("low", 1, disable_backpressure=True)["last_seq"]
        figures = self.api.metrics()
        if not figures["deferred_topics"]:
            return False
        self.peak = figures
        while not low.is_quiet(0.05):
            self.pushed_before += _seqs(low.next())
        self.diffed = self.api.seqs("low", from_seq=self.paused_seq - 1)
        still = low.is_quiet(0.05) and bool(self.api.metrics()["deferred_topics"])
        return still and self.paused_seq not in self.pushed_before

    def _read_until(self, low: SseStream, seq: int) -> list[int]:
        found: list[int] = []
        while [0, *self.pushed_before, *found][-1] < seq:
            found += _seqs(low.next())
        return found


def _seqs(event: Event) -> list[int]:
    return event.seqs if event.name == "record" else []


@pytest.fixture(scope="module")
def flood(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flood]:
    folder: Path = tmp_path_factory.mktemp("flood")
    with (
        Server(folder, wal_queue_max=2, wal_shards=1).start() as server,
        Api(server.address, timeout_s=LIMIT_S) as api,
    ):
        yield Flood(server, api)


def test_what_was_refused_was_refused_at_once_and_is_not_there(flood: Flood) -> None:
    """§1.8: 429 with Retry-After, whose every byte `refused` has looked at. Never acknowledged and then dropped."""
    turned_away = [data for writer in flood.writers for data in writer.refused]
    assert turned_away, "this was no flood"
    for topic in TOPICS:
        assert not set(turned_away) & set(stored(flood.api, topic).values())
    assert flood.throttled == len(turned_away)


def test_everything_acknowledged_is_there_where_it_was_said_to_be(flood: Flood) -> None:
    for topic in TOPICS:
        acked = {seq: data for writer in flood.writers if writer.topic == topic for seq, data in writer.acked.items()}
        assert stored(flood.api, topic) == acked | {flood.last[topic]: "last"}


def test_each_writer_finds_its_records_in_its_order(flood: Flood) -> None:
    for writer in flood.writers:
        turns = [int(writer.acked[seq].partition("-")[2]) for seq in sorted(writer.acked)]
        assert turns == sorted(turns)
        assert turns, "nobody was shut out for good"


def test_write_without_backpressure_waits_and_reports_the_time(flood: Flood) -> None:
    """§2.5 disable_backpressure, §1.9 throttle_wait_ms."""
    insisting = [writer for writer in flood.writers if writer.insists]
    assert [writer.refused for writer in insisting] == [[]] * len(insisting)
    assert max(wait for writer in insisting for wait in writer.waits_ms) > 0.0


def test_metrics_show_the_overload(flood: Flood) -> None:
    assert flood.peak["pressure"] > 0.6, "deferral lasts until it is below that"
    assert flood.peak["deferred_topics"] == 1


def test_a_low_topic_is_not_pushed_meanwhile_and_can_be_read(flood: Flood) -> None:
    assert flood.quiet, f"in {LIMIT_S} s it was never deferred and kept back"
    assert flood.diffed == [flood.paused_seq]
    assert flood.paused_seq not in flood.pushed_before


def test_and_is_pushed_again_afterwards_without_a_record_missing(flood: Flood) -> None:
    assert flood.pushed_before + flood.resumed == list(range(1, flood.paused_seq + 1))


def test_every_watcher_got_every_record_once_and_in_order(flood: Flood) -> None:
    for topic, seqs, pages in flood.told:
        assert seqs == sorted(stored(flood.api, topic))
        assert pages <= len(seqs)


def test_it_comes_back_to_normal(flood: Flood) -> None:
    def is_normal() -> bool:
        now = flood.api.metrics()
        return now["pressure"] == 0 and not now["deferred_topics"] and not now["ready_topics"]

    eventually(is_normal, LIMIT_S)
    before = flood.api.metrics()["throttled_total"]
    with flood.server.events(f"/v0/watch/{flood.api.watch({'low': {'tail': True}})['wid']}") as events:
        events.expect("caught-up")
        reply = flood.api.write("low", "calm")
        assert "throttle_wait_ms" not in reply["performance"]
        assert events.expect("record")[0].seqs == [reply["last_seq"]]
    assert flood.api.metrics()["throttled_total"] == before


def test_a_kill_after_the_flood_takes_nothing_acknowledged(flood: Flood) -> None:
    before = {topic: stored(flood.api, topic) for topic in TOPICS}
    flood.api.close()
    flood.server.kill()
    flood.api.address = flood.server.start().address
    assert {topic: stored(flood.api, topic) for topic in TOPICS} == before


def stored(api: Api, topic: str) -> dict[int, str]:
    """All records of a topic, seq by seq."""
    found: dict[int, str] = {}
    from_seq, caught_up = 0, False
    while not caught_up:
        page = api.diff(topic, from_seq=from_seq, limit=1000)
        assert page["tombstone"] is None
        found |= {record["$seq"]: record["data"] for record in page["records"]}
        from_seq, caught_up = page["next_from_seq"], page["caught_up"]
    return found
