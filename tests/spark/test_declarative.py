"""A Declarative Pipeline of Spark that reads a topic, run by Spark's own command. Its packages (`pyspark[pipelines]`,
130 MB) are not among those of development: the test is skipped without them. The command starts a Spark of its own, so
the test is in `make crash`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import tidelog
from tidelog.spark.java import find_java

pytestmark = [pytest.mark.slow, pytest.mark.sweep]
PACKAGES = ("grpc", "grpc_status", "google.rpc", "zstandard", "pandas", "yaml")
SPEC = """
name: orders
storage: file://{root}/storage
libraries:
  - glob:
      include: definitions/**
configuration:
  spark.sql.shuffle.partitions: "1"
"""
DEFINITIONS = """
from pyspark import pipelines
from pyspark.sql import SparkSession

spark = SparkSession.active()
options = {{"path": "{root}/data", "subscribe": "orders"}}


@pipelines.table
def copied():
    rows = spark.readStream.format("tidelog").options(**options, startingOffsets="earliest", group="etl").load()
    return rows.select("topic", "seq", "data")


@pipelines.materialized_view
def late():
    return spark.read.format("tidelog").options(**options).load().where("seq > 15").select("seq")
"""
# Spark 4.3.0: its client takes the accumulators of Python workers for an unknown answer, after the run has ended. Any
# Python data source in a pipeline does that.
AFTER_THE_END = "UNKNOWN_RESPONSE] Unknown response: Plan observed(__python_accumulator__="


def missing() -> list[str]:
    def is_there(name: str) -> bool:
        try:
            return find_spec(name) is not None
        except ModuleNotFoundError:
            return False

    return [name for name in PACKAGES if not is_there(name)]


def run(root: Path) -> str:
    """Run the pipeline and return what the command says."""
    java = find_java()
    assert java is not None
    home = {} if java.home is None else {"JAVA_HOME": java.home}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["spark-pipelines", "run", "--conf", "spark.ui.enabled=false"],
        cwd=root,
        env={**os.environ, **home, "PYSPARK_PYTHON": sys.executable, "PATH": path, "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0 or AFTER_THE_END in said, said
    assert "Run is COMPLETED" in said, said
    return said


def seqs(table: Path) -> list[int]:
    found: list[int] = []
    for path in table.glob("*.parquet"):
        found += pq.read_table(path).column("seq").to_pylist()
    return sorted(found)


@pytest.fixture(autouse=True)
def packages() -> None:
    if absent := missing():
        pytest.skip(f"needs pip install 'pyspark[pipelines]': there is no {', '.join(absent)}")


def test_a_declarative_pipeline_reads_a_topic(tmp_path: Path) -> None:
    """A stream with a group and a batch, in definitions that only name the format. One run: the catalog of
    Spark's default is in memory, so a second one finds tables that it does not know."""
    (tmp_path / "definitions").mkdir()
    (tmp_path / "spark-pipeline.yml").write_text(SPEC.format(root=tmp_path))
    (tmp_path / "definitions" / "orders.py").write_text(DEFINITIONS.format(root=tmp_path))
    with tidelog.open(str(tmp_path / "data"), threads=False) as log:
        log.topic("orders").append([{"n": number} for number in range(20)])
    said = run(tmp_path)
    assert "copied has COMPLETED" in said
    assert seqs(tmp_path / "spark-warehouse" / "copied") == list(range(1, 21))
    assert seqs(tmp_path / "spark-warehouse" / "late") == list(range(16, 21))
    with tidelog.open(str(tmp_path / "data"), threads=False) as log:
        assert log.topic("orders").group("etl").lag().records == 0
