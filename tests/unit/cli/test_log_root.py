"""`tidelog log topics`, `describe`, `lag` and `retain` on a root of partitions, as RustLog left it and of our own."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidelog.cli.main import main
from tidelog.commitlog import PartitionedLog

RUSTLOG = Path(__file__).parents[2] / "golden" / "foreign" / "rustlog"
Run = Callable[..., Any]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree(RUSTLOG / "topics", tmp_path / "root" / "topics")
    return tmp_path / "root"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command with --json; its answer, or the exit code and the error."""

    def command(*words: object) -> Any:
        code = main(["log", *map(str, words), "--json"])
        out, err = capsys.readouterr()
        return json.loads(out) if code == 0 else (code, json.loads(err)["message"])

    return command


def read_partition(directory: Path) -> list[int]:
    """The offsets of a partition, read as RustLog does: 12-byte headers, one file after the other."""
    offsets = []
    for path in sorted(directory.glob("*.log")):
        data, pos = path.read_bytes(), 0
        while pos < len(data):
            size, offset = struct.unpack_from(">IQ", data, pos)
            offsets.append(offset)
            pos += 12 + size
        assert pos == len(data)
    return offsets


def test_a_root_that_rustlog_wrote_is_listed_and_described(root: Path, run: Run) -> None:
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert run("topics", root) == {"topics": [{"topic": "orders", "partitions": 2}]}
    found = run("describe", root)["partitions"]
    assert [(row["partition"], row["lowest"], row["highest"], row["segments"]) for row in found] == [
        (0, 0, 1000, 4),
        (1, 0, 200, 1),
    ]
    assert run("describe", root, "--topic", "orders")["partitions"] == found
    assert run("lag", root) == {"lag": []}
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_lag_and_retain_respect_the_groups(root: Path, run: Run) -> None:
    with PartitionedLog.open(str(root)) as log:
        log.offsets.commit("billing", 600, topic="orders", partition=0)
        log.offsets.commit("audit", 200, topic="orders", partition=1)
    found = {(row["group"], row["partition"]): (row["committed"], row["lag"]) for row in run("lag", root)["lag"]}
    assert found == {
        ("audit", 0): (None, 1000),
        ("audit", 1): (200, 0),
        ("billing", 0): (600, 400),
        ("billing", 1): (None, 200),
    }
    assert [row["lag"] for row in run("lag", root, "--group", "billing", "--topic", "orders")["lag"]] == [400, 200]
    done = run("retain", root, "--keep-bytes", 1)["partitions"]
    assert [(row["partition"], row["segments"], row["lowest"]) for row in done] == [(0, 2, 500), (1, 0, 0)]
    assert read_partition(root / "topics/orders/partitions/0") == list(range(500, 1000)), "whole segments of RustLog"
    assert run("retain", root, "--keep-bytes", 1, "--topic", "orders")["segments"] == 0


def test_what_is_appended_to_a_partition_is_what_rustlog_reads(root: Path, run: Run) -> None:
    with PartitionedLog.open(str(root)) as log:
        assert log.append("orders", 1, b"more") == 200
        log.partition("orders", 1).append_many([b"a", b"", b"c" * 5000])
    assert read_partition(root / "topics/orders/partitions/1") == list(range(204))
    assert run("describe", root)["partitions"][1]["highest"] == 204


def test_roots_of_other_layouts_and_empty_partitions(tmp_path: Path, run: Run) -> None:
    with PartitionedLog.open(str(tmp_path / "tide"), "tide") as log:
        log.create_topic("orders", 3)
        log.append("orders", 1, b"x")
    found = run("describe", tmp_path / "tide")["partitions"]
    assert [(row["partition"], row["lowest"], row["highest"]) for row in found] == [(0, 0, 0), (1, 1, 2), (2, 0, 0)]
    shutil.rmtree(tmp_path / "tide/topics/orders/partitions/1")
    (tmp_path / "tide/topics/orders/partitions/1").mkdir()
    code, message = run("describe", tmp_path / "tide")
    assert (code, "lost" in message) == (1, True)


def test_what_is_no_root_is_refused(root: Path, tmp_path: Path, run: Run) -> None:
    for words in (("topics", tmp_path / "no"), ("describe", tmp_path), ("lag", root / "topics/orders/partitions/0")):
        code, message = run(*words)
        assert (code, "holds no topics" in message) == (2, True)
    refused: list[tuple[tuple[object, ...], str]] = [
        (("describe", root, "--topic", "other"), "there is no topic other"),
        (("lag", root, "--group", "other"), "has committed nothing"),
        (("retain", root), "no limit is given"),
        (("retain", root, "--keep-bytes", 1, "--high-watermark", 3), "for one log"),
        (("retain", root / "topics/orders/partitions/0", "--keep-bytes", 1, "--topic", "x"), "root of partitions"),
        (("cat", root), "tidelog log topics"),
        (("retain", root, "--keep-bytes", 1, "--topic", "other"), "there is no topic other"),
    ]
    for command, text in refused:
        code, message = run(*command)
        assert code == 2
        assert text in message


def test_tables_are_printed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in (
        (["topics"], "partitions"),
        (["describe"], "segments"),
        (["lag"], "no group has committed"),
        (["retain", "--keep", "1w"], "dropped"),
    ):
        assert main(["log", words[0], str(root), *words[1:]]) == 0
        assert text in capsys.readouterr().out
    with PartitionedLog.open(str(root)) as log:
        log.offsets.commit("billing", 1, topic="orders", partition=0)
    assert main(["log", "lag", str(root)]) == 0
    assert "billing" in capsys.readouterr().out
