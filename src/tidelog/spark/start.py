"""[shell] Starting Spark: a Java, the interpreter that runs this for its workers too, and nothing else that is ours."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from pyspark.sql import SparkSession

from tidelog.disk.machine import environment, set_environment
from tidelog.errors import NotFound
from tidelog.spark.java import LEAST, find_java


def started(master: str, app: str, conf: Mapping[str, str]) -> SparkSession:
    """A session, or the one that runs already."""
    java = find_java()
    if java is None or not java.good:
        found = (
            "there is no Java" if java is None else f"the Java of {java.origin} is version {java.version or 'unknown'}"
        )
        raise NotFound(
            f"{found} and Spark needs {LEAST} or newer; nothing was started, run `pip install 'tidelog[spark]'` which "
            "brings one, or set JAVA_HOME"
        )
    if java.home is not None:
        set_environment("JAVA_HOME", java.home)
    if environment("PYSPARK_PYTHON") is None:
        # Spark would take the `python3` of the path, which need not have this package.
        set_environment("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(master).appName(app)
    for name, value in conf.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()
