"""A REST catalog of Iceberg for tests: the server of Iceberg's own tests, in Java, with its tables in SQLite.

Its jars are fetched once from Maven Central. A test that asks for it is skipped, with the reason, where there is no
Maven.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.kit.commands import accepts, free_port
from tests.kit.jars import Artifact, NoJars, fetch_jars
from tests.kit.s3 import cache_directory
from tests.kit.waiting import eventually
from tidelog.spark import find_java

_VERSION: Final = "1.10.1"
_JARS: Final = (
    Artifact("org.apache.iceberg", "iceberg-open-api", _VERSION, "test-fixtures"),
    Artifact("org.apache.iceberg", "iceberg-core", _VERSION),
    Artifact("org.apache.iceberg", "iceberg-core", _VERSION, "tests"),
    Artifact("org.apache.hadoop", "hadoop-client-api", "3.4.1"),
    Artifact("org.apache.hadoop", "hadoop-client-runtime", "3.4.1"),
    Artifact("org.eclipse.jetty", "jetty-servlet", "11.0.26"),
    Artifact("org.eclipse.jetty", "jetty-server", "11.0.26"),
    Artifact("org.xerial", "sqlite-jdbc", "3.50.3.0"),
    Artifact("org.slf4j", "slf4j-simple", "2.0.17"),
)
_START_S: Final = 90


@contextmanager
def run_rest_catalog(directory: Path) -> Iterator[str]:
    """Run a catalog whose tables are files below a directory; yield its address."""
    java = find_java()
    assert java is not None, "Spark needs one as well"
    program = str(Path(java.home) / "bin" / "java") if java.home else "java"
    try:
        jars = fetch_jars(cache_directory(), "iceberg-rest", _JARS)
    except NoJars as error:
        pytest.skip(f"a REST catalog of Iceberg: {error}")
    directory.mkdir(parents=True, exist_ok=True)
    port = free_port()
    settings = {
        "CATALOG_CATALOG__IMPL": "org.apache.iceberg.jdbc.JdbcCatalog",
        "CATALOG_URI": f"jdbc:sqlite:{directory}/catalog.db",
        "CATALOG_WAREHOUSE": f"file://{directory}/warehouse",
        "CATALOG_JDBC_USER": "user",
        "CATALOG_JDBC_PASSWORD": "password",
        "CATALOG_REST_PORT": str(port),
    }
    command = [program, "-Xmx256m", "-XX:TieredStopAtLevel=1", "-cp", os.pathsep.join(map(str, jars))]
    with open(directory / "catalog.log", "wb") as log:
        process = subprocess.Popen(
            [*command, "org.apache.iceberg.rest.RESTCatalogServer"],
            env={**os.environ, **settings},
            stdout=log,
            stderr=log,
        )
    try:
        said = directory / "catalog.log"
        eventually(lambda: accepts(port), _START_S, every_s=0.1, process=process, why=lambda: said.read_text()[-2000:])
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
