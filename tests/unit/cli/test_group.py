"""The commands of `tidelog group` and `tidelog gaps`, through `main`, on real files."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
from tests.kit.commands import Run, json_result, runner

import tidelog
from tidelog.cli.group import parse_position
from tidelog.testing import ManualClock


@pytest.fixture
def run(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command beside a directory `d` with a topic `t`: five records, of which a cap of four keeps four."""
    monkeypatch.chdir(tmp_path)
    with tidelog.open("d", wal_file_bytes=1 << 16, clock=ManualClock()) as log:
        log.topic("t", cap_records=4).append([b"12"] * 5)
    return runner(capsysbinary, monkeypatch)


def refused(result: tuple[int, str, str]) -> str:
    code, out, err = result
    assert (code, out, err.count("\n")) == (2, "", 1), result
    return err


def position() -> int | None:
    with tidelog.open("d", read_only=True) as log:
        group = log.topic("t").group("g")
        return group.position if group.exists else None


def test_a_commit_and_what_it_would_do(run: Run) -> None:
    look = json_result(run("group", "commit", "d", "t", "g", 3, "--dry-run", "--json"))
    assert look["gap"] is None
    assert (look["from"], look["to"], look["records"], look["bytes"], look["dry_run"]) == (0, 3, 2, 4, True)
    assert position() is None
    done = json_result(run("group", "commit", "d", "t", "g", 3, "--json"))
    assert (done["position"], done["lag"]["records"], done["hold_bytes"], position()) == (3, 2, 0, 3)
    for words in ((2,), (9,), (4, "--expect", 1), (4, "--expect", 1, "--dry-run")):
        assert "nothing was changed" in refused(run("group", "commit", "d", "t", "g", *words))
    assert position() == 3
    assert run("group", "commit", "d", "t", "g", 4, "--expect", 3)[1].startswith("g of t is at 4: 1 record (2 B) to ")


def test_a_reset_and_what_it_would_do(run: Run) -> None:
    assert "no group 'g'" in refused(run("group", "reset", "d", "t", "g", "latest"))
    run("group", "commit", "d", "t", "g", 5)
    code, out, err = run("group", "reset", "d", "t", "g", 0, "--dry-run")
    assert (code, err, position()) == (0, "", 5)
    assert out.splitlines() == [
        "g of t would go from 5 to 0: 4 records (8 B) read again",
        "gap: seq 1 was lost to the topic's cap before it was read",
    ]
    assert run("group", "reset", "d", "t", "g", "earliest")[1] == (
        "g of t goes from 5 to 1: 4 records (8 B) read again\n"
    )
    assert position() == 1
    assert json_result(run("group", "reset", "d", "t", "g", "2001-01-01", "--json"))["to"] == 1
    assert json_result(run("group", "reset", "d", "t", "g", "2101-01-01T12:00:00Z", "--json"))["to"] == 5


def test_groups_are_listed_and_shown(run: Run) -> None:
    assert run("group", "ls", "d", "t") == (0, "0 groups\n", "")
    run("group", "commit", "d", "t", "g", 4)
    run("group", "hold", "d", "t", "b", "1k")
    found = json_result(run("group", "ls", "d", "t", "--json"))
    assert [(row["group"], row["position"], row["hold_bytes"]) for row in found["groups"]] == [
        ("b", 1, 1024),
        ("g", 4, 0),
    ]
    out = run("group", "ls", "d", "t")[1]
    assert "1 record (2 B) to read" in out
    assert "1.0 kB" in out
    assert out.endswith("2 groups\n")
    shown = json_result(run("group", "show", "d", "t", "g", "--json"))
    for row in (shown, found["groups"][1]):
        assert row["lag"].pop("seconds") > 0
    assert shown == {"topic": "t", **found["groups"][1]}
    assert "there is no topic 'u'" in refused(run("group", "ls", "d", "u"))


def test_a_hold_and_a_drop(run: Run) -> None:
    assert json_result(run("group", "hold", "d", "t", "g", "64m", "--dry-run", "--json"))["hold_bytes"] == 64 << 20
    assert position() is None
    assert "hold 67.1 MB" in run("group", "hold", "d", "t", "g", "64m")[1]
    assert position() == 1
    assert run("group", "drop", "d", "t", "g", "--dry-run")[1] == "would drop g of t, which was at 1\n"
    assert position() == 1
    assert json_result(run("group", "drop", "d", "t", "g", "--json"))["position"] == 1
    assert position() is None
    assert "no group 'g'" in refused(run("group", "drop", "d", "t", "g"))


@pytest.mark.parametrize("text", ["first", "-1", "", "2026-13-01"])
def test_no_place(text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        parse_position(text)


def test_gaps_of_a_directory_and_of_a_topic(run: Run) -> None:
    run("topic", "delete", "d", "t", "--seqs", "3")
    code, out, err = run("gaps", "d", "--json")
    assert (code, err) == (0, "")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["cause"], row["first"], row["last"], row["actor"]) for row in rows] == [
        ("cap", 1, 1, "retention"),
        ("delete", 3, 3, None),
    ]
    assert run("gaps", "d", "t", "--json")[1] == out
    assert json.loads(run("gaps", "d", "--limit", 1, "--json")[1]) == rows[0]
    assert json.loads(run("gaps", "d", "--since", "2025-01-01", "--json")[1]) == rows[1], "the clock of the first stood"
    table = run("gaps", "d")[1]
    assert "retention" in table
    assert table.endswith("2 rows, 2 records removed\n")
    assert run("gaps", "d", "nobody") == (0, "0 rows, 0 records removed\n", "")
    assert run("check", "d")[0] == 0
