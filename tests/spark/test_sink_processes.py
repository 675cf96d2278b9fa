"""The sink where processes are whole ones: drivers that are killed with their JVM, and a cluster of two workers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark
import pytest
from tests.kit.waiting import eventually
from tests.spark import killed_sink
from tests.spark.topic_copy import check_copy, fill_topic
from tests.unit.spark.helpers import run_server

import tidelog
from tidelog.spark import find_java

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
LIMIT_S = 300


def environment() -> dict[str, str]:
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYSPARK_PYTHON": sys.executable}


def driver(directory: Path, **sink: str) -> int:
    """One run of the copy as a program of its own; its exit code, negative where it was killed."""
    command = [sys.executable, "-m", "tests.spark.topic_copy", str(directory)]
    with (directory / "driver.log").open("ab") as log:
        done = subprocess.run(
            [*command, *(f"{name}={value}" for name, value in sink.items())],
            cwd=ROOT,
            env=environment(),
            stdout=log,
            stderr=log,
            timeout=LIMIT_S,
            check=False,
        )
    return done.returncode


@pytest.mark.sweep
def test_a_driver_that_is_killed_before_spark_knows_of_its_commit(tmp_path: Path) -> None:
    """The worst moment: the batch is written and synced, and everybody who knows dies."""
    fill_topic(tmp_path / "source")
    killed_sink.schedule_kill(tmp_path / "doom", "appended", 1, driver=True)
    assert driver(tmp_path, path=str(tmp_path / "sink")) == -signal.SIGKILL
    with tidelog.open(str(tmp_path / "sink")) as log:
        assert len(log.topic("copy").producer_batches("copy")) == 2
    assert driver(tmp_path, path=str(tmp_path / "sink")) == 0
    with tidelog.open(str(tmp_path / "sink")) as log:
        check_copy(log)


@pytest.mark.sweep
@pytest.mark.parametrize("step", killed_sink.DIRECTORY_STEPS)
def test_a_driver_that_is_killed_at_any_step(tmp_path: Path, step: str) -> None:
    fill_topic(tmp_path / "source")
    for passes in (0, 2):
        killed_sink.schedule_kill(tmp_path / "doom", step, passes, driver=True)
        assert driver(tmp_path, path=str(tmp_path / "sink")) == -signal.SIGKILL
    assert driver(tmp_path, path=str(tmp_path / "sink")) == 0
    with tidelog.open(str(tmp_path / "sink")) as log:
        check_copy(log)


@pytest.mark.sweep
@pytest.mark.parametrize("step", killed_sink.SERVER_STEPS)
def test_a_driver_of_a_server_that_is_killed_at_any_step(tmp_path: Path, step: str) -> None:
    fill_topic(tmp_path / "source")
    with run_server(str(tmp_path / "sink")) as (engine, address):
        killed_sink.schedule_kill(tmp_path / "doom", step, 1, driver=True)
        assert driver(tmp_path, server=address) == -signal.SIGKILL
        assert driver(tmp_path, server=address) == 0
        check_copy(engine)


# ── a cluster ─────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def running(directory: Path, name: str, ready: str, *command: str) -> Iterator[re.Match[str]]:
    """A process of Spark's, from the moment that its log says so; ended with this."""
    home = Path(pyspark.__file__).parent
    java = find_java()
    assert java is not None
    settings = {
        **environment(),
        **({"JAVA_HOME": java.home} if java.home else {}),
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_WORKER_DIR": str(directory / f"{name}-work"),
    }
    path = directory / f"{name}.log"
    with path.open("wb") as log:
        started = [str(home / "bin" / "spark-class"), *command]
        process = subprocess.Popen(started, env=settings, stdout=log, stderr=log, start_new_session=True)
    try:
        yield _said(process, path, ready)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def _said(process: subprocess.Popen[bytes], path: Path, words: str) -> re.Match[str]:
    def text() -> str:
        return path.read_text("utf-8", "replace")

    found = eventually(
        lambda: re.search(words, text()), LIMIT_S, every_s=0.1, process=process, why=lambda: text()[-2000:]
    )
    assert found is not None
    return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """A master and two workers of one core each, as processes of their own."""
    at = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    with running(
        tmp_path, "master", r"Starting Spark master at (spark://\S+)", "org.apache.spark.deploy.master.Master", *at
    ) as master:
        worker = ["org.apache.spark.deploy.worker.Worker", *at, "--cores", "1", "--memory", "600m", master[1]]
        registered = "Successfully registered with master"
        with running(tmp_path, "one", registered, *worker), running(tmp_path, "two", registered, *worker):
            yield master[1]


@pytest.mark.cluster
def test_two_workers(cluster: str, tmp_path: Path) -> None:
    """Tasks of both stage into one directory, and the driver publishes."""
    fill_topic(tmp_path / "source")
    assert driver(tmp_path, master=cluster, tasks="4", path=str(tmp_path / "sink")) == 0, _tail(tmp_path)
    with tidelog.open(str(tmp_path / "sink")) as log:
        check_copy(log)
    logs = {path.parent.parent.parent.name: path.read_text() for path in tmp_path.glob("*-work/*/*/stderr")}
    assert {name for name, said in logs.items() if "Finished task" in said} == {"one-work", "two-work"}


def _tail(directory: Path) -> str:
    return (directory / "driver.log").read_text("utf-8", "replace")[-3000:]
