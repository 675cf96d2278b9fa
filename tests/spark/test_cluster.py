"""Jobs on a cluster of Spark whose machines share no file, with kills: `tests.spark.cluster` draws the machines.

Every job reads and writes topics by the server and tables by the S3 server, both on a machine of their own. They are
part of `make crash`: each starts seven processes and takes a minute or more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.kit.s3 import BUCKET
from tests.spark import cluster_programs
from tests.spark.cluster import KEY, LIMIT_S, Cluster, kill_processes, open_cluster

pytestmark = pytest.mark.slow
ROWS = 20_000


def complete(rows: int = ROWS) -> dict[str, int]:
    """What `cluster_programs` says of a topic or a table that has every record once."""
    return {"rows": rows, "different": rows, "sum": rows * (rows - 1) // 2}


def table_address(name: str) -> str:
    return f"s3://{BUCKET}/{name}"


def export_words(cluster: Cluster, topic: str, table: str) -> list[Any]:
    """An export in many small commits, so that a kill comes between some of them."""
    sizes = ["--file-bytes", "200k", "--commit-bytes", "400k"]
    words = ["export", cluster.server, topic, table_address(table), "--key", KEY, "--format", "delta", *sizes]
    return [*words, *cluster.storage_words(), "--json"]


def check_equal(cluster: Cluster, topic: str, table: str) -> None:
    words = ["reconcile", cluster.server, topic, table_address(table), "--key", KEY, *cluster.storage_words(), "--json"]
    assert last_json(cluster.submit(*words).wait())["equal"] is True


def last_json(output: str) -> dict[str, Any]:
    (line, *_) = [line for line in reversed(output.splitlines()) if line.startswith("{")]
    found: dict[str, Any] = json.loads(line)
    return found


def test_export_on_machines_that_share_nothing(tmp_path: Path) -> None:
    """The short form, in `make test`: one worker, one job, no kill."""
    with open_cluster(tmp_path, executors=1) as cluster:
        cluster.program("fill", cluster.server, "orders", 2000)
        done = last_json(cluster.submit(*export_words(cluster, "orders", "orders")).wait())
        assert done["rows"] == 2000
        assert cluster.objects("orders/_delta_log")
        assert cluster.program("table", table_address("orders")) == complete(2000)
        assert not cluster.files(cluster.one, "/tmp/tidelog*"), "an executor keeps no data of a table on its own disk"


@pytest.mark.cluster
def test_export_goes_on_when_a_worker_is_cut_off(tmp_path: Path) -> None:
    with open_cluster(tmp_path) as cluster:
        cluster.program("fill", cluster.server, "orders", ROWS)
        job = cluster.submit(*export_words(cluster, "orders", "orders"))
        job.until(lambda: cluster.objects("orders/_delta_log"))  # the first of its commits
        cluster.one.cut_off()
        done = last_json(job.wait())
        assert done["rows"] == ROWS
        assert done["commits"] > 2, "the others came after the loss"
        assert "Lost executor" in job.output
        assert cluster.program("table", table_address("orders")) == complete()
        assert not cluster.files(cluster.two, "/tmp/tidelog*"), "an executor keeps no data of a table on its own disk"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One cluster for all tests of `make crash`. A test leaves two workers and a server."""
    with open_cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


def filled(cluster: Cluster, topic: str, rows: int = ROWS) -> str:
    cluster.program("fill", cluster.server, topic, rows)
    return topic


@pytest.mark.cluster
def test_machines_share_no_file(cluster: Cluster) -> None:
    """The proof that the other tests are what they say."""
    machines = [cluster.master, cluster.one, cluster.two, cluster.store, cluster.driver]
    for machine in machines:
        machine.run("sh", "-c", f"echo {machine.name} > /tmp/mine && cat /tmp/mine")
    for machine in machines:
        assert machine.run("cat", "/tmp/mine") == f"{machine.name}\n"
        refused = machine.run("sh", "-c", f"echo x > {Path(__file__).parent}/mine 2>&1 || echo refused")
        assert "refused" in refused, "the rest of the disk is read-only"
    assert cluster.one.run("hostname") == "one\n"


@pytest.mark.cluster
def test_export_and_reconcile_after_the_driver_is_cut_off(cluster: Cluster) -> None:
    topic = filled(cluster, "driver-lost")
    lost = cluster.new_driver()
    job = cluster.submit(*export_words(cluster, topic, topic), driver=lost)
    job.until(lambda: cluster.objects(f"{topic}/_delta_log"))
    lost.cut_off()
    job.fail()
    assert cluster.program("table", table_address(topic))["rows"] < ROWS, "it was cut off between commits"
    cluster.submit(*export_words(cluster, topic, topic)).wait()
    assert cluster.program("table", table_address(topic)) == complete()
    check_equal(cluster, topic, topic)


@pytest.mark.cluster
def test_export_goes_on_when_the_server_is_killed(cluster: Cluster) -> None:
    topic = filled(cluster, "server-lost")
    job = cluster.submit(*export_words(cluster, topic, topic))
    job.until(lambda: cluster.objects(f"{topic}/_delta_log"))
    cluster.kill_server()
    cluster.restart_server()
    if job.process.wait(LIMIT_S):  # planning on the driver does not wait for a server; the next run goes on
        cluster.submit(*export_words(cluster, topic, topic)).wait()
    assert cluster.program("table", table_address(topic)) == complete()


@pytest.mark.cluster
@pytest.mark.parametrize("killed", ["worker", "driver", "server"])
def test_source_and_sink_copy_a_topic_exactly_once(cluster: Cluster, killed: str) -> None:
    topic, target = filled(cluster, f"source-{killed}"), f"copy-of-{killed}"
    words = ["copy", cluster.server, topic, target, str(ROWS // 10)]
    script = cluster_programs.__file__
    job = cluster.submit(*words, script=script)
    job.until(lambda: cluster.files(cluster.driver, f"/tmp/checkpoint-{target}/commits"))  # of its first batch
    if killed == "worker":
        kill_processes(cluster.one)
    elif killed == "driver":
        kill_processes(cluster.driver)
    else:
        cluster.kill_server()
        cluster.restart_server()
    if killed == "driver":
        job.fail()
        cluster.submit(*words, script=script).wait()
    else:
        job.wait()
    if killed == "worker":
        cluster.start_worker(cluster.one)
    assert cluster.program("topic", cluster.server, target) == complete()


@pytest.mark.cluster
def test_backfill_stats_and_scrub_by_the_server(cluster: Cluster) -> None:
    """A table in the bucket into a topic, which is then looked at; the driver is killed on the way."""
    topic = filled(cluster, "source-of-table")
    cluster.submit(*export_words(cluster, topic, topic)).wait()
    words = ["backfill", table_address(topic), cluster.server, "--topic", "again", "--format", "delta"]
    words += ["--target-key", KEY, "--work-dir", f"{table_address('work')}", "--job", "again", *cluster.storage_words()]
    job = cluster.submit(*words)
    job.until(lambda: cluster.objects("work"))
    kill_processes(cluster.driver)
    job.fail()
    cluster.submit(*words).wait()
    assert cluster.program("topic", cluster.server, "again") == complete()
    counted = last_json(cluster.submit("stats", cluster.server, "again", "--key", KEY, "--json").wait())
    assert sum(row["records"] for row in counted["rates"]) == ROWS
    verified = last_json(cluster.submit("scrub", cluster.server, "--key", KEY, "--json").wait())
    assert verified["ok"] is True
    assert verified["bytes"] > ROWS * 100


@pytest.mark.cluster
@pytest.mark.parametrize("killed", ["worker", "driver", "server"])
def test_compact_leaves_the_newest_of_each_key(cluster: Cluster, killed: str) -> None:
    """The search is on workers that see no file of the server, whose background compacts at the same time. Whatever is
    killed, the newest records stay, and the next run says that nothing else is left."""
    topic, rows, keys = f"keyed-{killed}", 1000, 100
    cluster.program("fill", cluster.server, topic, rows, keys)
    words = ["compact", cluster.server, topic, "--key", KEY, "--json"]
    job = cluster.submit(*words)
    job.until(lambda: cluster.files(cluster.one, "/tmp/work"))  # its executors start
    if killed == "worker":
        kill_processes(cluster.one)
    elif killed == "driver":
        kill_processes(cluster.driver)
    else:
        cluster.kill_server()
        cluster.restart_server()
    if job.process.wait(LIMIT_S):  # a search from before a restart of the server is refused
        assert killed != "worker", job.output[-3000:]
        job = cluster.submit(*words)
    job.wait()
    if killed == "worker":
        cluster.start_worker(cluster.one)
    again = last_json(cluster.submit(*words).wait())
    assert (again["records"], again["compacted_to"]) == (0, rows)
    last = {"rows": keys, "different": keys, "sum": sum(range(rows - keys, rows))}
    assert cluster.program("topic", cluster.server, topic) == last


def job_words(cluster: Cluster, verb: str, topic: str, table: str, *more: str) -> list[Any]:
    words = [verb, cluster.server, topic, table_address(table), "--key", KEY]
    return [*words, *more, *cluster.storage_words(), "--json"]


@pytest.mark.cluster
def test_a_table_is_optimized_vacuumed_and_read_live(cluster: Cluster) -> None:
    """The driver is killed while executors join files."""
    topic = filled(cluster, "maintained")
    cluster.submit(*export_words(cluster, topic, topic)).wait()
    files = len([name for name in cluster.objects(topic) if "/part-" in name])
    words = ["optimize", table_address(topic), *cluster.storage_words(), "--json"]
    job = cluster.submit(*words)
    job.until(lambda: len([name for name in cluster.objects(topic) if "/part-" in name]) > files)
    kill_processes(cluster.driver)
    job.fail()
    assert cluster.program("table", table_address(topic)) == complete()
    done = last_json(cluster.submit(*words).wait())
    assert done["commits"] == 0 or done["removed"] > done["added"], "the kill came after the commit, or before it"
    assert cluster.program("table", table_address(topic)) == complete()
    check_equal(cluster, topic, topic)
    cluster.submit("vacuum", table_address(topic), "--retention", "0s", "--force", *cluster.storage_words()).wait()
    cluster.program("fill", cluster.server, topic, 1000)
    words = ["live", cluster.server, topic, table_address(topic), json.dumps(cluster.storage_options)]
    live = cluster.submit(*words, script=cluster_programs.__file__)
    assert last_json(live.wait()) == {"rows": ROWS + 1000, "different": ROWS + 1000}


@pytest.mark.cluster
def test_upserts_quarantine_and_many_topics_in_tables_of_a_bucket(cluster: Cluster) -> None:
    topic, keys = "upserted", 100
    cluster.program("fill", cluster.server, topic, 1000, keys)
    words = job_words(cluster, "export", topic, topic, "--mode", "latest", "--latest-key", "/key")
    job = cluster.submit(*words)
    job.until(lambda: cluster.files(cluster.one, "/tmp/work"))  # its executors start
    kill_processes(cluster.one)
    if job.process.wait(LIMIT_S):
        cluster.submit(*words).wait()
    cluster.start_worker(cluster.one)
    last = {"rows": keys, "different": keys, "sum": sum(range(1000 - keys, 1000))}
    assert cluster.program("table", table_address(topic)) == last
    check_equal(cluster, topic, topic)
    schema = ["--schema", "n int, fill int", "--bad", "quarantine"]  # `fill` is text
    into = table_address("lake")
    many = ["export-topics", cluster.server, into, "--topic", topic, "--key", KEY, *schema, *cluster.storage_words()]
    done = last_json(cluster.submit(*many, "--json").wait())
    assert [each["state"] for each in done["topics"]] == ["done"]
    more = ["--schema", "n int, fill int, key int"]
    tried = last_json(cluster.submit(*job_words(cluster, "reprocess", topic, f"lake/{topic}", *more)).wait())
    assert (tried["fitted"], tried["left"]) == (0, tried["before"])
    assert tried["before"] > 0
    check_equal(cluster, topic, f"lake/{topic}")


@pytest.mark.cluster
def test_executor_without_the_package_says_so_and_nothing_is_committed(cluster: Cluster) -> None:
    """The interpreter has the same path everywhere, and on the workers it does not see Tidelog."""
    topic = filled(cluster, "no-package", 1000)
    for machine, flags in ((cluster.driver, ""), (cluster.one, "-S"), (cluster.two, "-S")):
        cluster.install_python(machine, "/tmp/python", flags)
    said = cluster.submit(*export_words(cluster, topic, topic), python="/tmp/python").fail()
    assert "cannot import tidelog" in said
    assert "set PYSPARK_PYTHON before the session is started" in said
    assert not cluster.objects(f"{topic}/_delta_log")


OTHER_VERSION = """
import sys
from collections import namedtuple

kind = namedtuple("version_info", "major minor micro releaselevel serial")
sys.version_info = kind(3, sys.version_info[1] + 1, 0, "final", 0)
"""


@pytest.mark.cluster
def test_executor_with_another_python_says_so_and_nothing_is_committed(cluster: Cluster) -> None:
    """The interpreter of the workers says that it is the next minor version."""
    topic = filled(cluster, "other-python", 1000)
    for machine in (cluster.driver, cluster.one, cluster.two):
        cluster.install_python(machine, "/tmp/other-python", "")
    for machine in (cluster.one, cluster.two):
        machine.run("sh", "-c", f"printf '%s' '{OTHER_VERSION}' > /tmp/site/sitecustomize.py")
    said = cluster.submit(*export_words(cluster, topic, topic), python="/tmp/other-python").fail()
    for machine in (cluster.one, cluster.two):
        machine.run("rm", "/tmp/site/sitecustomize.py")
    assert "PYTHON_VERSION_MISMATCH" in said
    assert "PYSPARK_PYTHON" in said
    assert not cluster.objects(f"{topic}/_delta_log")


@pytest.mark.cluster
def test_job_on_a_master_that_is_not_there_says_so(cluster: Cluster) -> None:
    words = ["stats", cluster.server, "orders", "--key", KEY, "--master", f"spark://{cluster.one.address}:7"]
    said = cluster.submit(*words).fail()
    assert "Spark did not start on spark://" in said or "All masters are unresponsive" in said
