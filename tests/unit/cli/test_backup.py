"""The commands `tidelog backup` and `tidelog restore`, through `main`, on real files."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tidelog
from tidelog.cli.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in a directory of its own; exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def command(*words: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main(words)
        out, err = capsysbinary.readouterr()
        return code, out.decode(), err.decode()

    return command


def test_backups_are_made_listed_verified_restored_and_pruned(run: Run) -> None:
    run("topic", "write", "data", "orders", stdin=b"a\nb\nc\n")
    code, out, _ = run("backup", "create", "data", "target")
    assert (code, out.count("1 topic")) == (0, 1)
    first = out.partition(":")[0]
    run("topic", "write", "data", "orders", stdin=b"d\n")
    code, out, _ = run("backup", "create", "data", "target", "--incremental", "--copy", "--json")
    made = json.loads(out)
    assert (code, made["parent"], made["topics"]) == (0, first, {"orders": 4})
    code, out, _ = run("backup", "list", "target")
    assert [line.split()[0] for line in out.splitlines()[2:4]] == [first, made["id"]]
    assert out.endswith("2 backups\n")
    assert json.loads(run("backup", "list", "target", "--json")[1])["unfinished"] == []
    assert run("backup", "verify", "target")[1].endswith("whole\n")
    assert run("restore", "target", first, "old")[0] == 0
    assert run("topic", "read", "old", "orders")[1].split() == ["a", "b", "c"]
    code, out, _ = run("restore", "target", "cut", "--to-seq", "orders=2")
    assert "orders ends at seq 2, 2 seqs after it were left out" in out
    assert run("topic", "read", "cut", "orders")[1].split() == ["a", "b"]
    assert run("restore", "target", made["id"], "time", "--to-time", "2020-01-01T00:00:00Z")[0] == 0
    assert run("topic", "read", "time", "orders")[1].split() == []
    assert run("check", "cut")[0] == run("check", "old")[0] == run("check", "time")[0] == run("check", "data")[0] == 0
    code, out, _ = run("backup", "prune", "target", "--keep", "1")
    assert (code, out.startswith("removed 1 backup")) == (0, True)
    assert json.loads(run("backup", "prune", "target", "--older-than", "1ms", "--json")[1])["kept"] == [made["id"]]


def test_damage_of_a_backup_is_exit_code_1_and_names_the_object(run: Run, tmp_path: Path) -> None:
    run("topic", "write", "data", "orders", stdin=b"a\nb\nc\n")
    run("backup", "create", "data", "target", "--copy")
    damaged = max((tmp_path / "target" / "objects").rglob("*.data.*"))
    damaged.write_bytes(b"\0" + damaged.read_bytes()[1:])
    code, out, _ = run("backup", "verify", "target")
    assert (code, damaged.name in out) == (1, True)
    code, _, err = run("restore", "target", "new")
    assert (code, damaged.name in err) == (1, True)
    assert not any(path.is_file() and path.name != ".tidelog.lock" for path in (tmp_path / "new").rglob("*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("backup", "create", "data", "data/in"), "data directory"),
        (("backup", "create", "nowhere", "target"), "nothing at nowhere"),
        (("backup", "prune", "empty", "--keep", "1"), "no backup"),
        (("backup", "prune", "empty"), "--keep"),
        (("backup", "verify", "empty"), "no backup"),
        (("restore", "empty", "new"), "no backup"),
        (("restore", "empty", "a", "b", "c"), "TARGET [ID] DIR"),
        (("backup", "list", "nosuch://x/y"), "no segment store"),
    ],
)
def test_bad_input_is_refused(run: Run, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    with tidelog.open(str(tmp_path / "data")) as db:
        db.topic("orders").append(b"1")
    (tmp_path / "empty").mkdir()

    def names() -> list[str]:  # a command opens the directory, so its WAL has another file
        return sorted(str(path) for path in tmp_path.rglob("*") if "wal" not in path.parts)

    before = names()
    code, _, err = run(*words)
    assert code == 2
    assert message in err
    assert names() == before
