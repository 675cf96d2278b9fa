"""A standalone cluster of Spark whose machines share nothing (`tests.kit.machines`), and what its jobs talk to.

10.77.0.1  master
10.77.0.2  one          a worker
10.77.0.3  two          a worker
10.77.0.4  store        a Tidelog server and an S3 server, each with its files
10.77.0.5  driver       where jobs are submitted; a test that cuts it off adds another one
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pyspark
from tests.kit import s3
from tests.kit.machines import ROOT, Machine, Network, open_network
from tests.kit.waiting import eventually

from tidelog.spark import find_java

HOME: Final = Path(pyspark.__file__).parent
KEY: Final = "s3cret"
LIMIT_S: Final = 600
_SMALL_JVM: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
SERVER_PORT, S3_PORT = 4000, 7070


class Cluster:
    def __init__(self, network: Network, logs: Path, executors: int) -> None:
        """`executors`: workers that run, one executor each; the machines are always the same."""
        self._network, self._logs = network, logs
        self._executors, self._jobs = executors, 0
        self.master, self.one, self.two, self.store, self.driver = (
            network.add(name) for name in ("master", "one", "two", "store", "driver")
        )
        self.master_url = f"spark://{self.master.address}:7077"
        self.server = f"http://{self.store.address}:{SERVER_PORT}"
        self._start_s3()
        self._server = self.start_server()
        self._start_spark()

    # ── services ──────────────────────────────────────────────────────────────────────────────

    def _start_s3(self) -> None:
        self.store.run("mkdir", "-p", f"/tmp/s3/{s3.BUCKET}")
        kind, command = s3.server_command(Path("/tmp/s3"), self.store.address, S3_PORT)
        assert kind == "versitygw", "moto keeps objects in memory of one process and has no buckets here"
        keys = {"ROOT_ACCESS_KEY": s3.ACCESS_KEY, "ROOT_SECRET_KEY": s3.SECRET_KEY}
        process = self.store.start(self._logs / "s3.log", *command, environ=keys)
        self._wait_for_port(process, S3_PORT, "s3.log")

    @property
    def storage_options(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": s3.ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": s3.SECRET_KEY,
            "AWS_ENDPOINT_URL": f"http://{self.store.address}:{S3_PORT}",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def start_server(self) -> subprocess.Popen[bytes]:
        words = ["serve", "--data", "/tmp/data", "--host", self.store.address, "--port", str(SERVER_PORT)]
        settings = {"TIDELOG_API_KEYS": f"{KEY}:rw+admin", "TIDELOG_SEGMENT_MAX_EVENTS": "2000"}
        command = [sys.executable, "-m", "tidelog.cli.main", *words]
        process = self.store.start(self._logs / "server.log", *command, environ=settings)
        self._wait_for_port(process, SERVER_PORT, "server.log")
        return process

    def kill_server(self) -> None:
        """Kill the Tidelog server; its files stay."""
        self.store.run("pkill", "-9", "-f", "tidelog.cli.main serve")  # sees the processes of this machine only
        self._server.wait(30)

    def restart_server(self) -> None:
        self._server = self.start_server()

    def _wait_for_port(self, process: subprocess.Popen[bytes], port: int, log: str) -> None:
        probe = f"import socket; socket.create_connection(('{self.store.address}', {port}), 5).close()"
        command = self.driver.command(sys.executable, "-S", "-c", probe)
        eventually(
            lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0,
            LIMIT_S,
            every_s=0.3,
            process=process,
            why=lambda: self.log(log),
        )

    # ── Spark ─────────────────────────────────────────────────────────────────────────────────

    def _start_spark(self) -> None:
        at = ["--port", "7077", "--webui-port", "0", "--host", self.master.address]
        self._start_daemon(self.master, "org.apache.spark.deploy.master.Master", *at)
        self._wait_for_words("master.log", "Starting Spark master at")
        workers = (self.one, self.two)[: self._executors]
        for worker in workers:
            self.start_worker(worker)
        for worker in workers:
            self._wait_for_words(f"{worker.name}.log", "Successfully registered with master")

    def start_worker(self, worker: Machine) -> None:
        size = ["--cores", "1", "--memory", "700m", "--webui-port", "0", "--host", worker.address]
        self._start_daemon(worker, "org.apache.spark.deploy.worker.Worker", *size, self.master_url)

    def _start_daemon(self, machine: Machine, name: str, *words: str) -> None:
        settings = {
            "SPARK_DAEMON_MEMORY": "200m",
            "SPARK_DAEMON_JAVA_OPTS": f"{_SMALL_JVM} -Dspark.worker.timeout=10",
            "SPARK_WORKER_DIR": "/tmp/work",
        }
        environ = {**self.environ(machine), **settings}
        machine.start(self._logs / f"{machine.name}.log", HOME / "bin" / "spark-class", name, *words, environ=environ)

    def environ(self, machine: Machine, python: str = sys.executable) -> dict[str, str]:
        java = find_java()
        assert java is not None
        home = {} if java.home is None else {"JAVA_HOME": java.home}
        return {**home, "SPARK_HOME": str(HOME), "SPARK_LOCAL_IP": machine.address, "PYSPARK_PYTHON": python}

    def submit(
        self, *words: object, script: str | None = None, driver: Machine | None = None, python: str = sys.executable
    ) -> Job:
        """Run a job of `tidelog pipeline`, or a script, under spark-submit."""
        at = driver or self.driver
        settings = {
            "spark.driver.host": at.address,
            "spark.driver.memory": "512m",
            "spark.driver.extraJavaOptions": _SMALL_JVM,
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.executor.extraJavaOptions": _SMALL_JVM,
            "spark.executor.heartbeatInterval": "2s",
            "spark.network.timeout": "20s",
            "spark.network.timeoutInterval": "5s",
            "spark.cores.max": str(self._executors),
            "spark.locality.wait": "0s",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
            "spark.sql.shuffle.partitions": "2",
            "spark.ui.enabled": "false",
        }
        confs = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        script = script or str(ROOT / "src" / "pyspark_tidelog" / "submit.py")
        self._jobs += 1
        log = self._logs / f"job-{self._jobs}.log"
        command = [HOME / "bin" / "spark-submit", "--master", self.master_url, *confs, script, *words]
        return Job(at.start(log, *command, environ=self.environ(at, python)), log)

    def storage_words(self) -> list[str]:
        """The options of a pipeline command for tables in the bucket."""
        options = (f"{name}={value}" for name, value in self.storage_options.items())
        return [word for option in options for word in ("--storage-option", option)]

    def program(self, *words: object) -> Any:
        """Run a program of `tests.spark.cluster_programs` on the driver, without Spark, and return its result."""
        command = [sys.executable, "-m", "tests.spark.cluster_programs", *words]
        environ = {**self.storage_options, "PYTHONPATH": str(ROOT)}
        return json.loads(self.driver.run(*command, environ=environ, timeout_s=LIMIT_S))

    def new_driver(self) -> Machine:
        return self._network.add("driver-again")

    def install_python(self, machine: Machine, path: str, flags: str) -> None:
        """Write an interpreter that starts this one with flags, and with PySpark and what that needs."""
        packages = [HOME, *(HOME.parent / name for name in ("py4j", "numpy", "pyarrow"))]
        machine.run("sh", "-c", f"mkdir -p /tmp/site; ln -sfn {' '.join(map(str, packages))} /tmp/site/")
        script = f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:/tmp/site" exec {sys.executable} {flags} "$@"\n'
        machine.run("sh", "-c", f"printf '%s' '{script}' > {path}; chmod +x {path}")

    # ── what is seen from outside ─────────────────────────────────────────────────────────────

    def log(self, name: str) -> str:
        return (self._logs / name).read_text("utf-8", "replace")

    def _wait_for_words(self, name: str, words: str) -> None:
        eventually(lambda: re.search(words, self.log(name)), LIMIT_S, every_s=0.1, why=lambda: self.log(name)[-2000:])

    def objects(self, prefix: str) -> list[str]:
        """The names of the objects below a prefix of the bucket."""
        root = f"/tmp/s3/{s3.BUCKET}/"
        found = self.store.run("find", root, "-type", "f").splitlines()
        return sorted(path.removeprefix(root) for path in found if path.startswith(f"{root}{prefix}/"))

    def files(self, machine: Machine, directory: str) -> list[str]:
        return machine.run("sh", "-c", f"find {directory} -type f 2>/dev/null || true").splitlines()


class Job:
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log

    @property
    def output(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def wait(self) -> str:
        """Wait for its end, which has to be a good one; return its output."""
        code = self.process.wait(LIMIT_S)
        assert code == 0, self.output[-4000:]
        return self.output

    def fail(self) -> str:
        """Wait for its end, which has to be a bad one; return its output."""
        assert self.process.wait(LIMIT_S) != 0, self.output[-4000:]
        return self.output

    def until(self, condition: object) -> None:
        """Wait until something is true; the job still runs then."""
        assert callable(condition)
        eventually(condition, LIMIT_S, every_s=0.3, process=self.process, why=lambda: self.output[-3000:])


@contextmanager
def open_cluster(logs: Path, executors: int = 2) -> Iterator[Cluster]:
    assert shutil.which("pkill"), "a cluster needs procps"
    with open_network() as network:
        yield Cluster(network, logs, executors)


def kill_processes(machine: Machine) -> None:
    """Kill all processes of a machine and keep its files: the programs crash, the machine does not."""
    machine.run("sh", "-c", "kill -9 $(ls /proc | grep -E '^[0-9]+$' | grep -vxE \"1|$$\") 2>/dev/null || true")
