"""A Kafka broker on this machine and the jars of Spark's Kafka source, from Maven Central: the peer of `bench_kafka`.

Jars are kept in ~/.cache/tidelog-bench/kafka. Without Maven, Java or a network there is no broker, and the benchmark
is left out with the reason.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from tests.kit.commands import free_port

from tidelog.spark import find_java

CACHE: Final = Path.home() / ".cache" / "tidelog-bench" / "kafka"
BROKER: Final = (("org.apache.kafka", "kafka_2.13", "4.1.0"),)
CONNECTOR: Final = (
    ("org.apache.spark", "spark-sql-kafka-0-10_2.13", "4.2.0"),
    ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.0.0"),  # used with Kerberos, loaded always
    ("org.apache.kafka", "kafka-clients", "3.9.2"),
    ("org.apache.commons", "commons-pool2", "2.12.0"),
)
_ALONE: Final = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
_CLUSTER_ID: Final = "MkU3OEVBNTcwNTJENDM2Qg"  # 16 bytes; any
_START_S: Final = 90


class NoBroker(Exception):
    """There is no broker here, and why."""


def fetch_jars(name: str, artifacts: tuple[tuple[str, str, str], ...], *, alone: bool) -> list[Path]:
    """Return the jars of these artifacts; with what they need, unless they are to be fetched alone."""
    target = CACHE / name
    if not target.exists():
        if (maven := shutil.which("mvn")) is None:
            raise NoBroker("there is no Maven to fetch the jars with")
        building = CACHE / f"{name}.building"
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        wanted = "".join(
            f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version>"
            f"{_ALONE if alone else ''}</dependency>"
            for group, artifact, version in artifacts
        )
        (building / "pom.xml").write_text(
            '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion><groupId>bench</groupId>'
            f"<artifactId>{name}</artifactId><version>1</version><dependencies>{wanted}</dependencies></project>"
        )
        command = [
            maven,
            "-q",
            "-B",
            "dependency:copy-dependencies",
            "-DoutputDirectory=jars",
            "-DincludeScope=runtime",
        ]
        done = subprocess.run(command, cwd=building, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise NoBroker(f"Maven did not fetch the jars: {done.stdout.strip()[:200]}")
        (building / "jars").rename(target)
    return sorted(target.glob("*.jar"))


@contextmanager
def open_broker(directory: Path) -> Iterator[str]:
    """Run a broker with its files in a directory; its address. Raises NoBroker."""
    java = find_java()
    if java is None:
        raise NoBroker("there is no Java")
    program = str(Path(java.home) / "bin" / "java") if java.home else "java"
    jars = os.pathsep.join(map(str, fetch_jars("broker", BROKER, alone=False)))
    port, voter = free_port(), free_port()
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{voter}",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{voter}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": str(directory / "logs"),
        "offsets.topic.replication.factor": "1",
        "num.partitions": "1",
    }
    directory.mkdir(parents=True)
    (directory / "server.properties").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    run = [program, "-Xmx700m", "-cp", jars]
    words = ["kafka.tools.StorageTool", "format", "-t", _CLUSTER_ID, "-c", "server.properties"]
    made = subprocess.run([*run, *words], cwd=directory, capture_output=True, text=True, check=False)
    if made.returncode:
        raise NoBroker(f"the broker's storage was not made: {made.stderr[-200:]}")
    with open(directory / "broker.log", "wb") as log:
        process = subprocess.Popen([*run, "kafka.Kafka", "server.properties"], cwd=directory, stdout=log, stderr=log)
    try:
        until = time.monotonic() + _START_S
        while not _accepts(port):
            if process.poll() is not None or time.monotonic() > until:
                raise NoBroker(f"the broker does not start: {(directory / 'broker.log').read_text()[-200:]}")
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _accepts(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
