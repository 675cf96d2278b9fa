"""The examples of docs/pipelines.md, run from top to bottom in the session of the tests."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tidelog import pipelines
from tidelog.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()


@pytest.mark.slow
def test_the_examples_run(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("export", "reconcile", "scrub", "backfill", "stats", "compact"):
        monkeypatch.setattr(pipelines, name, partial(getattr(pipelines, name), spark=spark))
    blocks = re.findall(r"```(python|console)\n(.*?)```", PAGE, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "console", "python", "python"]
    names: dict[str, Any] = {"__name__": "__main__"}
    for kind, block in blocks:
        if kind == "python":
            # Spark's own working directory is that of its process, so places are named in full.
            block = re.sub(r'"(data|table|by-sku|work)"', lambda found: repr(str(tmp_path / found[1])), block)
            exec(compile(block, "docs/pipelines.md", "exec", dont_inherit=True), names)
            continue
        for line in block.splitlines():
            words = re.sub(r"\b(data|table)\b", lambda found: str(tmp_path / found[1]), line).split()[2:]
            assert main(words) == 0, capsys.readouterr().err
    assert (tmp_path / "orders.svg").exists()


def test_every_command_and_choice_is_on_the_page() -> None:
    for name in ("export", "reconcile", "scrub", "backfill", "stats", "compact", "erase", "restore"):
        assert f"## {name}" in PAGE
    for option in ("--once", "--schema", "--infer", "--bad", "--on-gap", "--file-bytes", "--file-age", "--repair"):
        assert option in PAGE
