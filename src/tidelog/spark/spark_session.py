"""Start Spark, and set up a session for this source: a Java, an interpreter that can import tidelog, and one setting.
Nothing else of a session is changed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tidelog.disk.process import command_output, find_program, get_environment, set_environment
from tidelog.errors import NotFound, Unavailable
from tidelog.spark.java import MIN_JAVA_VERSION, find_java

FILTER_PUSHDOWN_CONF: Final = "spark.sql.python.filterPushdown.enabled"
LOCAL_MASTER: Final = "local[*]"
CONNECT_SCHEME: Final = "sc://"
_SUBMIT_VARIABLE: Final = "PYSPARK_GATEWAY_PORT"  # set by spark-submit: its JVM, with master and settings, runs already
_IMPORT_OK: Final = "tidelog is there"


def start_session(master: str | None, app: str, conf: Mapping[str, str]) -> SparkSession:
    """Start a session, or return the running one."""
    if master is not None and master.startswith(CONNECT_SCHEME):
        builder = _configure(SparkSession.builder.remote(master).appName(app), conf)
        try:
            return builder.getOrCreate()
        except ImportError as error:
            raise NotFound(
                f"Spark Connect needs packages that are not installed ({error}); nothing was started, run `pip install "
                "'pyspark[connect]'`"
            ) from None
    is_submitted = get_environment(_SUBMIT_VARIABLE) is not None
    if not is_submitted:
        _prepare_java()
    named = master or (None if is_submitted else LOCAL_MASTER)
    if get_environment("PYSPARK_PYTHON") is None and named is not None and named.startswith("local"):
        # Spark would use `python3` of the path, which may lack this package. Not for other masters: executors on other
        # machines would get this path as well.
        set_environment("PYSPARK_PYTHON", sys.executable)
    check_interpreter(get_environment("PYSPARK_PYTHON") or "python3")
    builder = SparkSession.builder.appName(app)
    if named is not None:
        builder = builder.master(named)
    try:
        return _configure(builder, conf).getOrCreate()
    except Py4JJavaError as error:
        reason = str(error.java_exception.getMessage()).partition("\n")[0].strip().rstrip(".")
        raise Unavailable(
            f"Spark did not start on {named or 'the master of spark-submit'}: {reason}; nothing was done, check "
            "the master and the settings"
        ) from error


def _configure(builder: SparkSession.Builder, conf: Mapping[str, str]) -> SparkSession.Builder:
    for name, value in conf.items():
        builder = builder.config(name, value)
    return builder


def _prepare_java() -> None:
    """Name the Java that Spark starts. Raises NotFound where there is none that it can use."""
    java = find_java()
    if java is None or not java.is_supported:
        found = (
            "there is no Java" if java is None else f"the Java of {java.origin} is version {java.version or 'unknown'}"
        )
        raise NotFound(
            f"{found} and Spark needs {MIN_JAVA_VERSION} or newer; nothing was started, run `pip install "
            "'tidelog[spark]'` which brings one, or set JAVA_HOME"
        )
    if java.home is not None:
        set_environment("JAVA_HOME", java.home)


def is_local_master(master: str | None) -> bool:
    """Whether a session that is started with this master runs on this machine alone."""
    return master.startswith("local") if master is not None else get_environment(_SUBMIT_VARIABLE) is None


def is_connect(spark: SparkSession) -> bool:
    """Whether this is a session of Spark Connect, whose driver is another process."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def check_workers(spark: SparkSession) -> None:
    """Raise NotFound if the Python workers of a session cannot import tidelog."""
    if not is_connect(spark):  # there the workers run on the server
        check_interpreter(spark.sparkContext.pythonExec)


def check_interpreter(
    interpreter: str,
    *,
    find_program: Callable[[str], str | None] = find_program,
    command_output: Callable[[list[str]], str] = command_output,
) -> None:
    """Raise NotFound if an interpreter cannot import tidelog. Spark would fail with "Failed to create Python data
    source instance" and a traceback."""
    found = find_program(interpreter)
    if found == sys.executable:
        return
    command = [interpreter, "-c", f"import pyspark, tidelog.spark; print('{_IMPORT_OK}')"]
    if found is not None and _IMPORT_OK in command_output(command):
        return
    what = "is not there" if found is None else f"({found}) cannot import tidelog and pyspark"
    raise NotFound(
        f"Spark runs its Python workers with {interpreter}, which {what}; nothing was registered. Set the environment "
        f"variable PYSPARK_PYTHON before the session is started: to {sys.executable} on this machine, on a cluster to "
        "an interpreter that every machine has, with tidelog[spark] installed; tidelog.spark.session() does it for "
        "local masters"
    )


def enable_filter_pushdown(spark: SparkSession) -> None:
    """Enable filter pushdown to Python sources where the session allows it."""
    if spark.conf.get(FILTER_PUSHDOWN_CONF, "false") != "true":
        with suppress(PySparkException):  # definitions of Declarative Pipelines cannot change settings
            spark.conf.set(FILTER_PUSHDOWN_CONF, "true")
