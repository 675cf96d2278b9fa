"""A Kafka broker on this machine and the jars of Spark's Kafka source, from Maven Central: the peer of `bench_kafka`.

Jars are kept in ~/.cache/tidelog-bench/kafka. Without Maven, Java or a network there is no broker, and the benchmark
is left out with the reason.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.kit import jars
from tests.kit.commands import accepts, free_port
from tests.kit.jars import Artifact, NoJars

from tidelog.spark import find_java

CACHE: Final = Path.home() / ".cache" / "tidelog-bench" / "kafka"
BROKER: Final = (Artifact("org.apache.kafka", "kafka_2.13", "4.1.0"),)
CONNECTOR: Final = (
    Artifact("org.apache.spark", "spark-sql-kafka-0-10_2.13", "4.2.0", alone=True),
    # Used with Kerberos, loaded always.
    Artifact("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.0.0", alone=True),
    Artifact("org.apache.kafka", "kafka-clients", "3.9.2", alone=True),
    Artifact("org.apache.commons", "commons-pool2", "2.12.0", alone=True),
)
_CLUSTER_ID: Final = "MkU3OEVBNTcwNTJENDM2Qg"  # 16 bytes; any
_START_S: Final = 90


class NoBroker(Exception):
    """There is no broker here, and why."""


def fetch_jars(name: str, artifacts: Sequence[Artifact]) -> list[Path]:
    try:
        return jars.fetch_jars(CACHE, name, artifacts)
    except NoJars as error:
        raise NoBroker(str(error)) from None


@contextmanager
def open_broker(directory: Path) -> Iterator[str]:
    """Run a broker with its files in a directory; its address. Raises NoBroker."""
    java = find_java()
    if java is None:
        raise NoBroker("there is no Java")
    program = str(Path(java.home) / "bin" / "java") if java.home else "java"
    found = os.pathsep.join(map(str, fetch_jars("broker", BROKER)))
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
    run = [program, "-Xmx700m", "-cp", found]
    words = ["kafka.tools.StorageTool", "format", "-t", _CLUSTER_ID, "-c", "server.properties"]
    made = subprocess.run([*run, *words], cwd=directory, capture_output=True, text=True, check=False)
    if made.returncode:
        raise NoBroker(f"the broker's storage was not made: {made.stderr[-200:]}")
    with open(directory / "broker.log", "wb") as log:
        process = subprocess.Popen([*run, "kafka.Kafka", "server.properties"], cwd=directory, stdout=log, stderr=log)
    try:
        until = time.monotonic() + _START_S
        while not accepts(port):
            if process.poll() is not None or time.monotonic() > until:
                raise NoBroker(f"the broker does not start: {(directory / 'broker.log').read_text()[-200:]}")
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
