"""`tidelog retention simulate`, `tidelog topic compact` and `tidelog topic latest`, through `main`, on real files."""

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


def fill() -> None:
    with tidelog.open("data") as log:
        users = log.topic("users", compaction="/id")
        users.append([{"id": number % 2, "n": number} for number in range(5)])
        users.group("slow").hold(10)
        log.topic("other").append(["x", "y"])


def test_the_table_and_a_compaction(run: Run) -> None:
    fill()
    code, out, err = run("topic", "latest", "data", "users")
    assert (code, sorted(out.splitlines()), err) == (0, ['0\t{"id":0,"n":4}', '1\t{"id":1,"n":3}'], "2 keys\n")
    code, out, _ = run("topic", "latest", "data", "users", "--key", "1", "--json")
    assert (code, json.loads(out)["seq"], json.loads(out)["key"]) == (0, 4, "1")
    code, _, err = run("topic", "latest", "data", "users", "--key", "9")
    assert (code, "no record with the key '9'" in err) == (2, True)
    assert run("topic", "latest", "data", "users", "--limit", "1")[1].count("\n") == 1
    code, out, _ = run("topic", "compact", "data", "users", "--json")
    assert (code, json.loads(out)["records"]) == (0, 0), "a group with a hold has read none"
    assert run("group", "drop", "data", "users", "slow")[0] == 0
    code, out, _ = run("topic", "compact", "data", "users")
    assert (code, out) == (0, "users: 3 records, 42 B removed, 0 tombstones of them; compacted up to seq 5\n")
    assert "compaction" in run("gaps", "data", "users")[1]
    code, _, err = run("topic", "compact", "data", "other")
    assert (code, "has no compaction" in err) == (2, True)


def test_a_simulation_says_what_would_go_and_who_has_not_read_it(run: Run) -> None:
    fill()
    code, out, _ = run("retention", "simulate", "data", "users", "--cap-records", "1")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("users: 4 records, 56 B would go to the caps: seqs 1 to 4, written ")
    assert lines[1:] == [
        "users: 1 record, 14 B would stay",
        "  group slow, at 0, has not read 4 records, 56 B of it, and its hold of 10 B would break",
        "4 records, 56 B of 1 topic would go; nothing changed",
    ]
    code, out, _ = run("retention", "simulate", "data", "--cap-bytes", "1k", "--ttl", "7d", "--json")
    assert [json.loads(line)["topic"] for line in out.splitlines()] == ["other", "users"]
    code, out, _ = run("retention", "simulate", "data", "--cap-records", "1")
    assert out.splitlines()[-1] == "5 records, 59 B of 2 topics would go; nothing changed"
    with tidelog.open("data", read_only=True) as log:
        assert log.topic("users", create=False).count == 5


def test_a_bad_command_line_changes_nothing(run: Run) -> None:
    fill()
    for words in ((), ("data", "users", "more"), ("--server", "http://127.0.0.1:1", "a", "b")):
        with pytest.raises(SystemExit) as ended:
            run("retention", "simulate", *words)
        assert ended.value.code == 2
    assert run("retention", "simulate", "data", "nobody")[0] == 2
    with pytest.raises(SystemExit):
        run("retention", "simulate", "data", "--ttl", "soon")
