"""The history of queues and the gap log as DataFrames, by path and by server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.spark.helpers import MODES, SourceEnv, read, source, source_env

from tidelog.errors import BadInput, NotAQueue, NotFound, TopicNotFound
from tidelog.spark import log_tables


@pytest.fixture(params=MODES)
def env(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SourceEnv]:
    with source_env(request.param, tmp_path) as made:
        yield made


def log_options(env: SourceEnv, **more: Any) -> dict[str, str]:
    options = env.options(**more)
    del options["subscribe"]
    return options


def test_history_of_queues_is_a_table(env: SourceEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tables, "HISTORY_LIMIT_MAX", 7)
    for name in ("emails", "bills"):
        queue = env.engine.queue(name)
        env.engine.topic(name).append([{"n": number} for number in range(10)])
        jobs = queue.claim("worker-1", 4)
        queue.ack("worker-1", jobs)
        queue.history().read()  # writes the events that wait for the next turn of the background
    expected = env.engine.queue("emails").history().to_arrow()
    if env.mode == "path":
        env.engine.checkpoint()
    found = read(log_options(env, history="emails,bills")).table
    assert found.column_names == log_tables.HISTORY_SCHEMA.names
    assert len(found) == 2 * len(expected)
    emails = found.filter([name == "emails" for name in found["queue"].to_pylist()])
    assert emails["event"].to_pylist() == expected["event"].to_pylist()
    assert emails["seq"].to_pylist() == expected["seq"].to_pylist()
    assert emails["ts"].cast("int64").to_pylist() == [ms * 1000 for ms in expected["ts_ms"].cast("int64").to_pylist()]
    assert emails["at"].to_pylist() == list(range(1, len(emails) + 1))


def test_gaps_are_a_table(env: SourceEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tables, "_GAPS_PAGE", 2)
    for name in ("orders", "other"):
        topic = env.engine.topic(name, cap_records=100)
        for _ in range(5):
            topic.append([b"x"] * 50)
            env.engine.checkpoint()
        topic.delete(seqs=[200, 201])
    expected = env.engine.gaps("orders")
    assert len(expected) == 4
    env.engine.checkpoint()
    found = read(log_options(env, gaps="orders")).table
    assert found.column_names == log_tables.GAPS_SCHEMA.names
    assert [tuple(row.values()) for row in found.drop_columns(["ts"]).to_pylist()] == [
        (row.topic, row.topic_id, row.cause, row.first, row.last, row.records, row.bytes, row.actor, row.about, row.seq)
        for row in env.engine.gaps("orders")
    ]
    assert read(log_options(env, gaps="*")).table["topic"].to_pylist().count("other") == 4
    env.engine.drop("orders")
    env.engine.checkpoint()
    assert read(log_options(env, gaps="orders")).table["cause"].to_pylist()[-1] == "drop"


def test_a_topic_without_gaps_is_an_empty_table(env: SourceEnv) -> None:
    env.engine.topic("orders").append(b"x")
    assert read(log_options(env, gaps="orders")).table.num_rows == 0


def test_names_that_are_not_there_are_refused(env: SourceEnv) -> None:
    env.engine.topic("orders").append(b"x")
    with pytest.raises((TopicNotFound, NotFound)):
        read(log_options(env, gaps="nothing"))
    with pytest.raises((TopicNotFound, NotFound)):
        read(log_options(env, history="nothing"))
    with pytest.raises((NotAQueue, BadInput)):
        read(log_options(env, history="orders"))


def test_options_of_records_are_refused(env: SourceEnv) -> None:
    for wrong in ({"subscribe": "orders"}, {"startingOffsets": "latest"}, {"gaps": "orders"}):
        with pytest.raises(BadInput, match="nothing was read"):
            source({**log_options(env), "history": "emails", **wrong}).schema()
    with pytest.raises(BadInput, match="read as a batch"):
        source(log_options(env, gaps="orders")).streamReader(log_tables.GAPS_SCHEMA)
