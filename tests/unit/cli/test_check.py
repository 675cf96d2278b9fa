"""`tidelog check`, through `main`. What is found is the engine's matter (tests/unit/engine/test_check.py)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tidelog
from tidelog.cli.doctor import describe_location, finding_fields, finding_row
from tidelog.cli.main import main
from tidelog.engine.check import Finding

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`tidelog check d`, on a directory with a sealed and a growing segment of a topic."""
    monkeypatch.chdir(tmp_path)
    with tidelog.open("d", wal_file_bytes=1 << 16, segment_events_max=8) as log:
        log.topic("orders").append([b"record %d" % number for number in range(8)])
        log.topic("orders").append([b"last"])

    def command(*words: str) -> tuple[int, str, str]:
        code = main(["check", "d", *words])
        return code, *capsys.readouterr()

    return command


def flip(path: Path, pos: int) -> None:
    content = bytearray(path.read_bytes())
    content[pos] ^= 1
    path.write_bytes(content)


def data() -> Path:
    return min(Path("d/topics").rglob("*.data"))


def fields(result: tuple[int, str, str], code: int) -> dict[str, Any]:
    assert (result[0], result[2]) == (code, "")
    found = json.loads(result[1])
    assert isinstance(found, dict)
    return found


def test_a_sound_directory_gets_one_line(run: Run) -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    assert re.fullmatch(r"d: no damage, 1 topic with 9 records; 2 segments and \d+ frames of the WAL, .*B\n", out), out
    found = fields(run("--json"), 0)
    assert (found["ok"], found["topics"], found["records"], found["findings"]) == (True, 1, 9, [])


def test_damage_is_exit_code_1_with_the_first_bad_place_and_a_table_of_all(run: Run) -> None:
    flip(data(), 60)
    flip(data().with_suffix(".idx"), 7)
    code, out, err = run()
    assert code == 1
    assert out.startswith(
        "d: damage in topics/00000001/seg-0000000000000001.data at byte 0, seqs 1 to 8 of orders: checksum mismatch\n"
    )
    rows = [line.split()[:2] for line in out.splitlines()[3:]]
    assert rows == [["damage", "data"], ["damage", "index"]]
    assert err.startswith("2 damaged places in 2 segments and ")
    assert "(tidelog topic read d TOPIC)" in err
    found = fields(run("--json"), 1)
    assert (found["ok"], found["records"]) == (False, None)
    assert found["findings"][0] == {
        "damage": True,
        "kind": "data",
        "file": "topics/00000001/seg-0000000000000001.data",
        "pos": 0,
        "topic": "orders",
        "first_seq": 1,
        "last_seq": 8,
        "reason": "checksum mismatch",
    }


def test_notes_are_shown_and_do_not_fail(run: Run) -> None:
    Path("d/topics/00000001/seg-0000000000000099.data").write_bytes(b"x")
    code, out, err = run()
    assert (code, err) == (0, "")
    assert "no damage" in out
    assert out.splitlines()[3].split()[:3] == ["note", "leftover", "topics/00000001/seg-0000000000000099.data"]


def test_check_changes_nothing_and_reports_progress(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(data(), 60)
    before = {path: path.read_bytes() for path in Path("d").rglob("*") if path.is_file()}
    told: list[tuple[int, int | None]] = []

    @contextmanager
    def bar(*_: object, **__: object) -> Any:
        yield lambda done, total: told.append((done, total))

    monkeypatch.setattr("tidelog.cli.render.Screen.progress_bar", bar)
    assert run()[0] == 1
    assert {path: path.read_bytes() for path in Path("d").rglob("*") if path.is_file()} == before
    total = told[-1][1]
    assert told == [(done, total) for done in range(1, len(told) + 1)]
    assert total == len(told)


def test_a_place_is_named_by_what_is_known_of_it() -> None:
    bare = Finding("start", ".", None, "why")
    assert (describe_location(bare), finding_row(bare)) == (".", ["damage", "start", ".", "why"])
    assert describe_location(Finding("wal", "wal/x", 7, "why", False)) == "wal/x at byte 7"
    assert describe_location(Finding("data", "f", 7, "why", True, "t", range(3, 4))) == "f at byte 7, seq 3 of t"
    assert finding_fields(bare)["first_seq"] is None
