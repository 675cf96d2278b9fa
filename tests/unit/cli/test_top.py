"""`tidelog top` on a directory beside its writer, and what it makes of two samples."""

from __future__ import annotations

import json
import signal
from argparse import Namespace
from pathlib import Path

import pytest
from tests.kit.commands import Run, json_result, runner, start_process

import tidelog
from tidelog.cli.top import Sample, Sampler, compare, parse_metrics


@pytest.fixture
def run(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsysbinary, monkeypatch, "top", directory=tmp_path)


def fill(database: tidelog.Database) -> None:
    orders = database.topic("orders")
    orders.append([b"x"] * 100)
    orders.group("billing").commit(40)
    jobs = database.queue("jobs")
    jobs.put([b"a", b"b", b"c"])


def test_a_directory_beside_its_writer(run: Run) -> None:
    with tidelog.open("data") as database:
        fill(database)
        found = json_result(run("data", "--once", "--interval", "0.05", "--json"))
    assert [(row["topic"], row["count"], row["head_seq"]) for row in found["topics"]] == [
        ("orders", 100, 100),
        ("jobs", 3, 3),
    ]
    (group,) = found["groups"]
    assert (group["topic"], group["group"], group["position"], group["records"]) == ("orders", "billing", 40, 60)
    assert found["queues"] == [{"queue": "jobs", "ready": 3, "in_flight": 0, "dead_lettered": 0}]
    assert (found["records"], found["topics_total"], found["fsyncs_per_s"]) == (103, 2, None)
    assert found["disk_free_bytes"] > 0
    assert found["wal_bytes"] > 0
    code, out, err = run("data", "--once", "--interval", "0.05", "--limit", "1", "--prefix", "or")
    assert (code, err) == (0, "")
    assert "billing" in out
    assert "jobs" not in out


def test_it_ends_with_a_signal(run: Run, tmp_path: Path) -> None:
    del run  # its directory
    with tidelog.open("data") as database:
        fill(database)
        process = start_process(tmp_path, "top", "data", "--interval", "0.05", "--json")
        assert process.stdout is not None
        first, second = (json.loads(process.stdout.readline()) for _ in range(2))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert first["records"] == second["records"] == 103


def test_rates_are_differences_of_two_samples(run: Run) -> None:
    del run  # its directory
    samples = []
    with tidelog.open("data") as database:
        for at_ms, metrics in (
            (0, {"fsyncs": 10.0, "fsync_us": 500.0}),
            (2_000, {"fsyncs": 30.0, "fsync_us": 4_500.0}),
        ):
            topics = {state.topic: state for state in database.topics()}
            samples.append(Sample(at_ms, topics, metrics))
            fill(database)
            database.topic("orders").delete(before_seq=51)
        topics = {state.topic: state for state in database.topics()}
        samples.append(Sample(3_000, topics, {}))
        sampler = Sampler(Namespace(dir="data", prefix=""), database, None)
        first = compare("data", samples[0], samples[1], sampler, 10)
        second = compare("data", samples[1], samples[2], sampler, 10)
    assert (first["interval_s"], first["fsyncs_per_s"], first["fsync_mean_us"]) == (2.0, 10.0, 200)
    orders = first["topics"][0]
    assert (orders["topic"], orders["written_per_s"], orders["removed_per_s"]) == ("orders", 50.0, 25.0)
    orders = second["topics"][0]
    assert (orders["written_per_s"], orders["removed_per_s"], second["fsyncs_per_s"]) == (100.0, 0.0, None)


def test_metrics_of_a_server_are_parsed() -> None:
    text = (
        "# HELP tidelog_pressure The pressure.\ntidelog_pressure 0.25\ntidelog_wal_fsync_latency_us_count 10\n"
        'tidelog_wal_fsync_latency_us_bucket{le="50"} 3\ntidelog_wal_fsync_latency_us_sum 5000\nnonsense\n'
        "tidelog_disk_free_bytes 7.1e+10\n"
    )
    assert parse_metrics(text) == {"pressure": 0.25, "fsyncs": 10, "fsync_us": 5000, "disk_free_bytes": 7.1e10}


def test_what_is_refused(run: Run) -> None:
    assert "the least is" in run("data", "--interval", "0")[2]
    assert "there is nothing at data" in run("data")[2]
