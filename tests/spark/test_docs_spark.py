"""The examples of docs/spark.md, run from top to bottom in the session of the tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import tidelog.spark
from tidelog.spark import sink
from tidelog.spark.options import COLUMNS, OPTION_NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()


@pytest.mark.slow
def test_the_examples_run(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tidelog.spark, "session", lambda: spark)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        # Spark's own working directory is that of its process, so places are named in full.
        block = re.sub(r'(?<!alias\()"(data2?|out|checkpoint2?)"', lambda found: repr(str(tmp_path / found[1])), block)
        exec(compile(block, "docs/spark.md", "exec", dont_inherit=True), names)
    assert names["query"].exception() is None


@pytest.mark.parametrize("name", sorted({*OPTION_NAMES, *COLUMNS, *sink.SINK_OPTION_NAMES, *sink.SINK_COLUMNS}))
def test_every_option_and_column_is_on_the_page(name: str) -> None:
    assert re.search(rf"\b{name}\b", PAGE), name
