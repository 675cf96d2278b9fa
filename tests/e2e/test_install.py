"""What an installed wheel can do without this checkout: the client and the embedded log with the base dependencies
alone, and the quick start of each extra in an environment that has that extra and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract_http.server import Server

ROOT = Path(__file__).resolve().parents[2]
KEY = "root"

BASE = """
import asyncio
import sys
import tidelog

with tidelog.open("data") as log:
    orders = log.topic("orders", durability="fsync")
    orders.append([{"sku": "A", "qty": 1}, {"sku": "B", "qty": 2}], tag="order-1")
    assert [record.data for record in orders.read().records] == [{"sku": "A", "qty": 1}, {"sku": "B", "qty": 2}]
    assert orders.to_arrow().num_rows == 2
    queue = log.queue("emails")
    queue.put({"to": "a@example.org"})
    (job,) = queue.claim("worker-1", 1)
    assert queue.ack("worker-1", [job])
    ann = log.channel("!support@example.org", user="ann@example.org")
    ann.join()
    ann.publish(b"hello")

with tidelog.connect(sys.argv[1], key=sys.argv[2]) as log:
    log.topic("orders").append([{"sku": "C"}])
    assert log.topic("orders").read().records[-1].data == {"sku": "C"}
    assert log.topic("orders").to_arrow().num_rows >= 1


async def main() -> None:
    async with tidelog.aio.connect(sys.argv[1], key=sys.argv[2]) as log:
        topic = await log.topic("awaited")
        await topic.append([{"sku": "D"}])
    async with tidelog.aio.open("data") as log:
        topic = await log.topic("orders")
        assert len((await topic.read()).records) == 2


asyncio.run(main())
print("done")
"""

SERVER = """
import os, signal, subprocess, sys, time
import tidelog

served = subprocess.Popen(
    [sys.executable, "-m", "tidelog.cli.main", "serve", "--data", "served", "--port", "0", "--json"],
    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
for line in served.stdout:
    import re
    found = re.search(r"http://[0-9.]+:[0-9]+", line)
    if found:
        break
with tidelog.connect(found[0]) as log:
    log.topic("orders").append([{"sku": "A"}])
    assert len(log.topic("orders").read().records) == 1
served.send_signal(signal.SIGTERM)
served.stdout.read()
assert served.wait() == 0
print("done")
"""

SPARK = """
import tidelog, tidelog.spark
from tidelog import pipelines

with tidelog.open("shop") as log:
    log.topic("orders").append([{"sku": "A"}, {"sku": "B"}])
spark = tidelog.spark.session()
orders = spark.read.format("tidelog").option("path", "shop").option("subscribe", "orders").load()
assert orders.count() == 2
pipelines.export("shop", "orders", TABLE, spark=spark)
assert pipelines.read(spark, TABLE).count() == 2
spark.stop()
print("done")
"""

FRAMES = """
import duckdb, pandas, polars, tidelog

with tidelog.open("data") as log:
    log.topic("orders").append([{"sku": "A"}, {"sku": "B"}])
    orders = log.topic("orders").to_arrow()
assert duckdb.sql("select count(*) from orders").fetchall() == [(2,)]
assert len(orders.to_pandas()) == len(polars.from_arrow(orders)) == 2
print("done")
"""

ICEBERG = 'import os\nos.environ["PYICEBERG_CATALOG__LOCAL__TYPE"] = "sql"\n' + (
    'os.environ["PYICEBERG_CATALOG__LOCAL__URI"] = "sqlite:///" + os.path.abspath("catalog.db")\n'
    'os.environ["PYICEBERG_CATALOG__LOCAL__WAREHOUSE"] = "file://" + os.path.abspath("warehouse")\n'
    'os.makedirs("warehouse")\n'
)

QUICK_STARTS = {
    "": BASE,
    "server": SERVER,
    "spark,lake": SPARK.replace("TABLE", '"table"'),
    "spark,iceberg": ICEBERG + SPARK.replace("TABLE", '"iceberg://local/shop.orders"'),
    "frames": FRAMES,
}

# Raises for every distribution that is no base dependency, as in an environment without it.
ONLY_BASE = """
import sys


class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {modules!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, NotInstalled())
"""


def optional_modules() -> set[str]:
    """Import names of everything that an extra brings."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    modules = {
        re.split(r"[<>=\[;,]", requirement)[0].strip().replace("-", "_")
        for extra in ("server", "spark", "lake", "iceberg", "frames")
        for requirement in extras[extra]
    }
    assert {"httptools", "h2", "pyspark", "deltalake", "pyiceberg", "duckdb", "pandas"} <= modules
    return modules


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Server(tmp_path_factory.mktemp("served"), api_keys=KEY).start() as server:
        yield f"http://127.0.0.1:{server.address.port}"


def run(python: str, program: str, where: Path, *words: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TIDELOG", "VIRTUAL"))}
    done = subprocess.run(
        [python, "-W", "error", "-c", program, *words], cwd=where, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "done"


@pytest.mark.slow
def test_log_and_client_need_the_base_dependencies_alone(tmp_path: Path, served: str) -> None:
    run(sys.executable, ONLY_BASE.format(modules=optional_modules()) + BASE, tmp_path, served, KEY)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(where)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    (wheel,) = where.glob("*.whl")
    return wheel


@pytest.mark.sweep
@pytest.mark.parametrize("extras", QUICK_STARTS)
def test_quick_start_of_an_extra_in_a_new_environment(extras: str, built: Path, tmp_path: Path, served: str) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=300)
    python = str(tmp_path / "venv/bin/python")
    wanted = f"{built}[{extras}]" if extras else str(built)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wanted]
    subprocess.run(install, check=True, timeout=900)
    work = tmp_path / "work"
    work.mkdir()
    run(python, QUICK_STARTS[extras], work, served, KEY)
    if not extras:  # the command is there, and says which extra `serve` needs
        command = tmp_path / "venv/bin/tidelog"
        printed = subprocess.run([command, "topic", "ls", "data"], cwd=work, capture_output=True, text=True, check=True)
        assert "orders" in printed.stdout
        refused = subprocess.run([command, "serve", "--data", "served"], cwd=work, capture_output=True, text=True)
        assert refused.returncode == 2
        assert "tidelog[server]" in refused.stderr
