"""`GET …/history` right after the response to a step, beside the thread that writes steps, and after a restart."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.contract_http.api import Api, expect_success, topic_path
from tests.contract_http.server import Server

ROUNDS = 40


def events_of(api: Api, queue: str, seq: int) -> list[str]:
    answer = expect_success(api.get(topic_path(queue, "/history?limit=10000")))
    return [
        step["event"]
        for step in answer["events"]
        if step.get("seq", 0) <= seq <= step.get("last_seq", step.get("seq", 0))
    ]


def run_jobs(api: Api, queue: str) -> list[list[str]]:
    """Put, claim and ack one job after another, and read the history after each ack."""
    found = []
    for number in range(ROUNDS):
        seq = api.write(queue, number)["first_seq"]
        [job] = expect_success(api.post(topic_path(queue, "/claim"), {"node": "w"}))["claimed"]
        assert job["$seq"] == seq
        expect_success(api.post(topic_path(queue, "/ack"), {"node": "w", "seqs": [seq]}))
        found.append(events_of(api, queue, seq))
    return found


def test_history_is_complete_right_after_an_ack(server: Server, name: Callable[[str], str]) -> None:
    """Several queues at a time, so that the thread that writes steps is busy."""

    def run(queue: str) -> list[list[str]]:
        with server.client() as api:
            api.create_topic(queue, type="queue")
            return run_jobs(api, queue)

    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(run, [name(f"q{number}") for number in range(3)]):
            assert found == [["enqueued", "claimed", "acked"]] * ROUNDS


def test_history_is_complete_after_a_restart(tmp_path: Path) -> None:
    with Server(tmp_path).start() as server:
        with server.client() as api:
            api.create_topic("q", type="queue")
            api.write("q", 1, 2)
            expect_success(api.post(topic_path("q", "/claim"), {"node": "w"}))
        server.restart()
        with server.client() as api:
            assert events_of(api, "q", 1) == ["enqueued", "claimed"]
            assert events_of(api, "q", 2) == ["enqueued"]
