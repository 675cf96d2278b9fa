"""Which interpreter the workers run in, and what is said where it cannot be the right one. No JVM is started."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tidelog.errors import NotFound
from tidelog.spark import spark_session
from tidelog.spark.java import Java
from tidelog.spark.spark_session import check_interpreter, check_workers, enable_filter_pushdown, is_local_master


class Builder:
    """SparkSession.builder, which starts nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self


@pytest.mark.parametrize(
    ("master", "given", "used"),
    [
        ("local[2]", None, sys.executable),
        ("local", None, sys.executable),
        ("local[*]", "/opt/python", "/opt/python"),
        ("spark://host:7077", None, None),
        ("yarn", None, None),
        ("k8s://host", "/opt/python", "/opt/python"),
    ],
)
def test_only_local_workers_get_the_interpreter_of_the_driver(
    monkeypatch: pytest.MonkeyPatch, master: str, given: str | None, used: str | None
) -> None:
    """A cluster was sent the path of the driver's interpreter."""
    values = {} if given is None else {"PYSPARK_PYTHON": given}
    checked: list[str] = []
    monkeypatch.setattr(spark_session, "find_java", lambda: Java(None, 17, "PATH"))
    monkeypatch.setattr(spark_session, "get_environment", values.get)
    monkeypatch.setattr(spark_session, "set_environment", values.__setitem__)
    monkeypatch.setattr(spark_session, "check_interpreter", checked.append)
    monkeypatch.setattr(SparkSession, "builder", Builder())
    spark_session.start_session(master, "app", {})
    assert values.get("PYSPARK_PYTHON") == used
    assert checked == [used or "python3"]


def test_interpreter_without_tidelog_gets_an_error_with_the_setting() -> None:
    asked: list[list[str]] = []

    def said(command: list[str], answer: str = "") -> str:
        asked.append(command)
        return answer

    check_interpreter(sys.executable, find_program=lambda name: name, command_output=said)
    assert asked == [], "it runs this"
    check_interpreter(
        "python3", find_program=lambda _: "/usr/bin/python3", command_output=lambda c: said(c, "tidelog is there\n")
    )
    places: dict[str, str | None] = {"cannot import tidelog": "/usr/bin/python3", "is not there": None}
    for words, found in places.items():
        with pytest.raises(NotFound, match=words) as caught:
            check_interpreter("python3", find_program={"python3": found}.get, command_output=said)
        assert f"PYSPARK_PYTHON before the session is started: to {sys.executable}" in str(caught.value)
    assert all(command[:2] == ["python3", "-c"] for command in asked)


def test_the_check_runs_a_real_interpreter() -> None:
    check_interpreter(sys.executable, find_program=lambda _: "another path of it")
    with pytest.raises(NotFound, match="cannot import"):
        check_interpreter("/bin/false")


class Session:
    def __init__(self, interpreter: str, pushdown: str = "false", *, fixed: bool = False) -> None:
        self._interpreter, self._fixed = interpreter, fixed
        self.values = {spark_session.FILTER_PUSHDOWN_CONF: pushdown}
        self.conf = self

    @property
    def sparkContext(self) -> Any:  # noqa: N802
        return type("Context", (), {"pythonExec": self._interpreter})

    def get(self, name: str, default: str) -> str:
        return self.values.get(name, default)

    def set(self, name: str, value: str) -> None:
        if self._fixed:
            raise PySparkException("SESSION_MUTATION_IN_DECLARATIVE_PIPELINE")
        self.values[name] = value


def test_workers_of_a_session() -> None:
    check_workers(Session(sys.executable))  # type: ignore[arg-type]
    remote = type("Session", (), {"__module__": "pyspark.sql.connect.session"})()
    check_workers(remote)  # its workers run on the server
    with pytest.raises(NotFound, match="is not there"):
        check_workers(Session("python-that-nobody-has"))  # type: ignore[arg-type]


def test_filters_are_pushed_where_the_session_lets_them() -> None:
    free, fixed = Session(sys.executable), Session(sys.executable, fixed=True)
    for session in (free, fixed):
        enable_filter_pushdown(session)  # type: ignore[arg-type]
    assert free.values[spark_session.FILTER_PUSHDOWN_CONF] == "true"
    assert fixed.values[spark_session.FILTER_PUSHDOWN_CONF] == "false"


class RecordingBuilder:
    """SparkSession.builder, which starts nothing and keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*values: str) -> RecordingBuilder:
            self.calls.append((name, *values))
            return self

        return call


@pytest.mark.parametrize(
    ("master", "submitted", "said"),
    [
        (None, False, ("master", "local[*]")),
        (None, True, None),
        ("yarn", True, ("master", "yarn")),
        ("sc://host:15002", False, ("remote", "sc://host:15002")),
    ],
)
def test_the_master_of_spark_submit_is_kept_unless_one_is_named(
    monkeypatch: pytest.MonkeyPatch, master: str | None, submitted: bool, said: tuple[str, str] | None
) -> None:
    values = {"PYSPARK_PYTHON": sys.executable, **({"PYSPARK_GATEWAY_PORT": "1"} if submitted else {})}
    builder = RecordingBuilder()
    monkeypatch.setattr(spark_session, "find_java", lambda: Java(None, 17, "PATH"))
    monkeypatch.setattr(spark_session, "get_environment", values.get)
    monkeypatch.setattr(SparkSession, "builder", builder)
    spark_session.start_session(master, "app", {"spark.executor.memory": "2g"})
    assert [call for call in builder.calls if call[0] in ("master", "remote")] == ([said] if said else [])
    assert ("config", "spark.executor.memory", "2g") in builder.calls
    assert is_local_master(master) == (said == ("master", "local[*]"))


def test_connect_session_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing(RecordingBuilder):
        def getOrCreate(self) -> None:  # noqa: N802
            raise ImportError("there is no grpc")

    monkeypatch.setattr(SparkSession, "builder", Missing())
    with pytest.raises(NotFound, match=r"there is no grpc.*pip install 'pyspark\[connect\]'"):
        spark_session.start_session("sc://host", "app", {})
