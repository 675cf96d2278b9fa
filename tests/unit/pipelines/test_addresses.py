"""Every argument of a job that names a place: what is not supported is refused, before anything is started or made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.pipelines.helpers import PipelineHarness

from tidelog import addresses, pipelines
from tidelog.cli.main import main
from tidelog.errors import BadInput, Refused

REFUSED = [
    "s3://bucket/table",
    "S3A://bucket/table",
    "s3:/bucket/table",
    "s3:bucket/table",
    "gs://bucket/table",
    "abfss://c@a.dfs.core.windows.net/table",
    "hdfs://name/table",
    "dbfs:/table",
    "unknown://x/table",
    "https://host/table",
    "file://host/table",
    "file:table",
    "file:///table?x=1",
    "file:///table#x",
    "file:///a%00b",
    "C:\\table",
    "c:/table",
    "\\\\host\\share",
    "~",
    "~/table",
    "",
    "  ",
    "a\0b",
]
MEANT = {
    "table": "table",
    "/lake/table/": "/lake/table",
    "/": "/",
    "./~": "./~",
    "a:b": "a:b",
    "2026-01-01T00:00:00": "2026-01-01T00:00:00",
    "file:///lake/a%20b/": "/lake/a b",
    "file:/lake/table": "/lake/table",
    "FILE://localhost/lake": "/lake",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_directory_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"(?s)^the table is .*; nothing was done\. Give a directory"):
        addresses.local_directory(text, "the table")


@pytest.mark.parametrize("text", MEANT)
def test_what_is_a_directory(text: str) -> None:
    assert addresses.local_directory(text, "the table") == MEANT[text]


def test_topics_are_read_from_more_places() -> None:
    for text in ("http://127.0.0.1:1", "HTTPS://host", "s3://bucket/data", "gs://bucket/data"):
        assert addresses.Location.parse(text).address == text
    for text in ("C:\\data", "c:/data", "~/data", ""):
        with pytest.raises(BadInput):
            addresses.Location.parse(text)


Job = Callable[[str, str], Any]
JOBS: dict[str, Job] = {
    "export": lambda data, bad: pipelines.export(data, "orders", bad),
    "reconcile": lambda data, bad: pipelines.reconcile(data, "orders", bad),
    "scrub": lambda _, bad: pipelines.scrub(bad),
    "backfill source": lambda data, bad: pipelines.backfill(bad, data, "copy", format="parquet"),
    "backfill target": lambda data, bad: pipelines.backfill(data, bad, from_topic="orders", function=lambda df: df),
    "backfill topics": lambda data, bad: pipelines.backfill(data, bad, "copy", from_topic="orders"),
    "backfill work": lambda data, bad: pipelines.backfill(data, data, "copy", from_topic="orders", work_dir=bad),
}


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("bad", ["hdfs://host/table", "~/table", "C:\\table", "dbfs:/table"])
def test_every_job_refuses_them_before_it_starts(
    job: str, bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = PipelineHarness(tmp_path)
    harness.fill(10)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tidelog.pipelines.api.job_session", lambda *_: pytest.fail("Spark was started"))
    with pytest.raises(BadInput, match="nothing was done"):
        JOBS[job](harness.data, bad)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"], "nothing was made"


@pytest.mark.parametrize("job", ["export", "reconcile", "stats"])
def test_a_place_of_topics_that_is_none(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for bad in ("~/data", "C:\\data", "unknown://x/data"):
        args = (bad, "orders") if job == "stats" else (bad, "orders", "table")
        with pytest.raises(Refused, match="nothing was"):
            getattr(pipelines, job)(*args)
    assert not list(tmp_path.iterdir())


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    harness = PipelineHarness(tmp_path)
    harness.fill(10)
    monkeypatch.chdir(tmp_path)
    for args in (
        ["export", harness.data, "orders", "hdfs://bucket/table"],
        ["stats", harness.data, "orders", "--plot", "s3://bucket/a.svg"],
        ["backfill", "hdfs://bucket/in.parquet", harness.data, "--topic", "copy"],
    ):
        assert main(["pipeline", *args]) != 0
        assert "nothing was done. Give a directory" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_a_file_address_is_the_directory(tmp_path: Path) -> None:
    harness = PipelineHarness(tmp_path / "a b")
    harness.fill(20)
    harness.table = f"file://{str(tmp_path).replace(' ', '%20')}/a%20b/table"
    harness.export_once()
    with harness.open_table(write=False) as table:
        assert table.path == str(tmp_path / "a b" / "table")
