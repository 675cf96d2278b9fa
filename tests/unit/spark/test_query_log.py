"""Counts of streaming queries, from the progress that Spark reports. The events here have what a session sends."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tidelog.spark.query_log import QueryCounts, QueryLog, add_batch

NEW = QueryCounts("copy", "id", "run", True)


def report(rows: int, *, lag: int = 0, lag_ms: int = 0, age: int | None = None, **fates: int) -> str:
    batch = {"rows": rows, **fates}
    batch.setdefault("seqs", sum(number for name, number in batch.items() if name != "unknown"))
    topic: dict[str, Any] = {"epoch": 1, "seq": 9, "lag_records": lag, "lag_ms": lag_ms}
    return json.dumps({"orders": topic | ({} if age is None else {"freshness_ms": age}), "_tidelog": {"batch": batch}})


def progress(number: int, *reports: str | None) -> Any:
    sources = [SimpleNamespace(latestOffset=text) for text in reports]
    return SimpleNamespace(progress=SimpleNamespace(name="copy", id="id", runId="run", batchId=number, sources=sources))


def test_batches_and_sources_are_added_up() -> None:
    first = add_batch(NEW, [report(10, deleted=2, lag=7, lag_ms=50, age=5), None, report(1, lag=1, lag_ms=90)])
    assert first == NEW._replace(batches=1, seqs=13, rows=11, deleted=2, lag_records=8, lag_ms=90, freshness_ms=5)
    assert first is not None
    second = add_batch(first, [report(0)])
    assert second == first._replace(lag_records=0, lag_ms=0), "nothing was read: no batch, and the lag is gone"
    third = add_batch(first, [report(3, evicted=4, unknown=1, age=8)])
    assert third is not None
    assert (third.batches, third.seqs, third.evicted, third.unknown, third.freshness_ms) == (2, 20, 4, 1, 8)


@pytest.mark.parametrize("text", [None, "", "7", '{"orders": {"seq": 1}}', '{"_tidelog": 3}', '"_tidelog'])
def test_sources_of_others_are_not_counted(text: str | None) -> None:
    assert add_batch(NEW, [text]) is None


def test_each_batch_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tidelog.spark.queries")
    log = QueryLog()
    log.onQueryProgress(progress(0, '{"kafka": 1}'))
    assert log.counts() == []
    log.onQueryProgress(progress(0, report(1000, deleted=2, lag=3, lag_ms=1500, age=200)))
    log.onQueryProgress(progress(1, report(0)))
    log.onQueryProgress(progress(1, report(1, expired=4)))
    log.onQueryProgress(progress(2, report(1, seqs=3)))
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert lines[0] == (
        "INFO",
        "query copy, batch 0: rows 1,000, deleted 2; lag 3 records, 1.5 s; newest record 0.2 s old",
    )
    assert [level for level, _ in lines] == ["INFO", "WARNING", "ERROR"], "an idle trigger is no line"
    assert "records were lost before they were read: rows 1, expired 4" in lines[1][1]
    assert "3 seqs are not the sum of rows 1" in lines[2][1]
    (counts,) = log.counts()
    assert (counts.batches, counts.rows, counts.is_active) == (3, 1002, True)
    log.onQueryTerminated(SimpleNamespace(runId="run"))  # type: ignore[arg-type]
    assert not log.counts()[0].is_active
