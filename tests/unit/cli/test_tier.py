"""The commands `tidelog tier …`, through `main`, on real files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import tidelog
from tidelog.cli.main import main

Run = Callable[..., tuple[int, str, str]]
RECORDS = 250


@pytest.fixture
def run(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in a directory with a topic of three segments; exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def command(*words: str) -> tuple[int, str, str]:
        try:
            code = main(words)
        except SystemExit as error:  # arguments that do not parse
            code = int(str(error.code))
        out, err = capsysbinary.readouterr()
        return code, out.decode(), err.decode()

    with tidelog.open("data", threads=False, segment_events_max=100) as log:
        log.topic("orders").append([b"%d" % number for number in range(RECORDS)])
        log.topic("orders").seal()
    return command


def values(run: Run, path: str = "data") -> list[str]:
    code, out, err = run("topic", "read", path, "orders", "--limit", "1000")
    assert code == 0, err
    return out.split()


def test_segments_move_to_a_directory_and_back(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("tier", "relocate", "data", "--cold", "cold", "--keep", "0", "--compression", "zstd")
    assert code == 0
    assert "moved to the cold store" in out
    state = json.loads(run("tier", "status", "data", "--segments", "--json")[1])
    moved = state["cold_segments"]
    assert (state["store"], state["hot_segments"], {each["tier"] for each in state["segments"]}) == (
        str(tmp_path / "cold"),
        0,
        {"cold"},
    )
    assert len(list((tmp_path / "cold").rglob("seg-*"))) == moved > 0
    assert not list((tmp_path / "data").rglob("seg-*.data"))
    assert values(run) == [str(number) for number in range(RECORDS)]
    code, out, _ = run("tier", "recall", "data", "--topic", "orders", "--json")
    assert (code, json.loads(out)["segments"]) == (0, moved)
    assert json.loads(run("tier", "status", "data", "--json")[1])["cold_segments"] == 0
    assert values(run) == [str(number) for number in range(RECORDS)]
    assert run("check", "data", "--full")[0] == 0


def test_a_segment_that_cannot_be_recalled_is_named_and_stays(run: Run, tmp_path: Path) -> None:
    assert run("tier", "relocate", "data", "--cold", "cold", "--keep", "0")[0] == 0
    damaged = min((tmp_path / "cold").rglob("seg-*"))
    content = damaged.read_bytes()
    damaged.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    code, out, _ = run("tier", "recall", "data", "--json")
    assert (code, [each["first_seq"] for each in json.loads(out)["failed"]]) == (2, [1])
    assert "orders: segment 1 was not moved" in "".join(run("tier", "recall", "data")[1:])
    assert run("check", "data", "--full")[0] == 1
    damaged.write_bytes(content)
    assert run("tier", "recall", "data")[0] == 0
    assert values(run) == [str(number) for number in range(RECORDS)]


def test_the_status_with_the_address_of_another_store_is_refused(run: Run, tmp_path: Path) -> None:
    assert run("tier", "relocate", "data", "--cold", "cold", "--keep", "0")[0] == 0
    code, out, err = run("tier", "status", "data", "--cold", "wrong")
    assert (code, out) == (2, "")
    assert "does not have the segments of data" in err
    assert str(tmp_path / "cold") in err
    assert run("tier", "status", "data", "--cold", "cold")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("relocate", "data"), "no cold store"),
        (("relocate", "data", "--cold", "ftp://host/x"), "no segment store"),
        (("relocate", "data", "--cold", "data/cold"), "in the data directory"),
        (("relocate", "data", "--cold", "other"), "another data directory"),
        (("relocate", "data", "--cold", "backups"), "holds backups"),
        (("relocate", "data", "--cold", "foreign"), "belongs to another database"),
        (("relocate", "data", "--cold", "letter.txt/cold"), "letter.txt"),
        (("relocate", "data", "--cold", "cold", "--topic", "nosuch"), "nosuch"),
        (("recall", "nowhere"), "nowhere"),
        (("claim", "data", "--server", "http://127.0.0.1:1"), "this takes --server"),
    ],
)
def test_bad_input_is_refused_and_nothing_moves(run: Run, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    with tidelog.open("other", threads=False, cold="foreign", hot_retain_segments=0) as log:
        log.topic("theirs").append(b"x")
        log.backup("backups")
    (tmp_path / "letter.txt").write_text("dear")

    def names() -> list[str]:  # a command opens the directory, so its WAL has another file
        return sorted(
            str(path) for path in tmp_path.rglob("*") if "wal" not in path.parts and path.parent.name != "meta"
        )

    before = names()
    code, _, err = run("tier", *words)
    assert (code, message in err) == (2, True), err
    assert [name for name in names() if not name.endswith(("/cold", "/cold/TIDELOG-STORE"))] == before
    assert values(run) == [str(number) for number in range(RECORDS)]
