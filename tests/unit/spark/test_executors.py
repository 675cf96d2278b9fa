"""What an executor says whose Python cannot run a task. No JVM is started."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import py4j  # type: ignore[import-untyped]
import pyspark
import pytest
from pyspark import cloudpickle
from pyspark.sql.types import BinaryType, StructField, StructType

from tidelog.spark import executors, options, sink
from tidelog.spark.executors import ExecutorFunction
from tidelog.spark.source import TidelogSource, TopicReader, TopicStreamReader, _may_push_filters
from tidelog.version import __version__

SCHEMA = StructType([StructField("data", BinaryType())])


def objects(directory: Path) -> Iterator[Any]:
    given = {"path": str(directory / "data"), "subscribe": "orders"}
    reading = options.parse_options(given)
    yield TopicReader(reading, SCHEMA)
    yield TopicStreamReader(reading, SCHEMA)
    writing = sink.parse_sink_options({"path": str(directory / "data"), "topic": "orders"})
    yield sink.TopicWriter(writing, SCHEMA)
    yield sink.TopicStreamWriter(writing, SCHEMA)
    yield ExecutorFunction(len)


def sent(value: object) -> bytes:
    """As Spark pickles it."""
    content: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    return content


def test_what_is_sent_to_executors_arrives_whole(tmp_path: Path) -> None:
    for value in objects(tmp_path):
        for content in (sent(value), pickle.dumps(value)):
            arrived = pickle.loads(content)
            assert type(arrived).__name__ == type(value).__name__
            assert vars(arrived).keys() == vars(value).keys()
            assert getattr(arrived, "_options", None) == getattr(value, "_options", None)
    assert pickle.loads(sent(ExecutorFunction(len)))("four") == 4


def test_executor_without_the_package_names_machine_and_next_step(tmp_path: Path) -> None:
    """An interpreter that has PySpark and not Tidelog, as a machine of a cluster may have it."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for package in (pyspark, py4j):
        (packages / package.__name__).symlink_to(Path(str(package.__file__)).parent)
    program = "import pickle, sys; pickle.load(sys.stdin.buffer)"
    for value in objects(tmp_path):
        done = subprocess.run(
            [sys.executable, "-S", "-c", program],
            input=sent(value),
            env={"PYTHONPATH": str(packages)},
            capture_output=True,
            timeout=60,
            check=False,
        )
        said = done.stderr.decode()
        assert "cannot import tidelog (No module named 'tidelog'); nothing was written by this task" in said, said
        assert f"Install tidelog[spark]=={__version__} there" in said
        assert f"ImportError: {sys.executable} on " in said
        assert "set PYSPARK_PYTHON before the session is started" in said


def test_executor_with_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    content = sent(ExecutorFunction(len))
    monkeypatch.setattr("tidelog.version.__version__", "0.0.1")
    with pytest.raises(ImportError, match=f"has tidelog 0.0.1, and the driver has {__version__}; nothing was written"):
        pickle.loads(content)


def test_executor_that_lacks_another_package_names_it() -> None:
    with pytest.raises(ImportError, match=r"cannot import what a task needs \(No module named 'lacking'\)"):
        executors.load_on_executor(b"clacking\nthing\n.", __version__)


def test_readers_support_filters_only_where_spark_may_push_them(monkeypatch: pytest.MonkeyPatch) -> None:
    source = TidelogSource({"path": "data", "subscribe": "orders"})
    push, plan = "pyspark.sql.worker.data_source_pushdown_filters", "pyspark.sql.worker.plan_data_source_read"
    for name in (push, plan):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert _may_push_filters(), "outside of Spark's workers"
    monkeypatch.setitem(sys.modules, plan, pyspark)
    assert type(source.reader(SCHEMA)) is TopicReader
    monkeypatch.setitem(sys.modules, push, pyspark)
    assert type(source.reader(SCHEMA)).__name__ == "FilteringReader"


def test_search_of_spark_survives_a_source_that_cannot_be_imported() -> None:
    """As with PySpark 4.1, which lacks classes that it imports; an error would hide the sources of other packages."""
    program = (
        "import sys; sys.modules['tidelog.spark.source'] = None\n"
        "from pyspark_tidelog import DefaultSource\n"
        "assert DefaultSource.name() == 'tidelog'\n"
        "try: DefaultSource({})\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "nothing was read or written. It needs PySpark 4.2 or newer" in done.stdout
