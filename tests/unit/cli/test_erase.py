"""`tidelog erase …` and `tidelog topic rewrite`, through `main`, on real files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tidelog
from tidelog.cli.erase import complete_command
from tidelog.cli.main import main


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    with tidelog.open("d", threads=False) as log:
        topic = log.topic("orders")
        topic.append([b"needle-1", b"stays", b"needle-2"], tag=["c7", "c8", "c7"])
        topic.append(b"more" * 1000)
        topic.seal()
        topic.append(b"last")
    return "d"


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    return code, *capsys.readouterr()


def test_short_form_is_run() -> None:
    assert complete_command(["erase", "d", "t"]) == ["erase", "run", "d", "t"]
    for words in (["erase", "verify", "d"], ["erase", "--help"], ["erase"], ["topic", "ls", "d"]):
        assert complete_command(words) == words


def test_erase_prints_a_receipt_that_verifies(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(capsys, "erase", data, "orders", "--match", "c7", "--actor", "alice", "--json")
    assert code == 0
    receipt: dict[str, Any] = json.loads(out)
    assert (receipt["records"], receipt["actor"], receipt["number"]) == (2, "alice", 1)
    Path("kept.json").write_text(out)
    assert [path for path in Path(data).rglob("*") if path.is_file() and b"needle" in path.read_bytes()] == []
    code, out, _ = command(capsys, "erase", data, "orders", "--seqs", "2")
    assert code == 0
    assert "erased 1 record of orders" in out
    assert "not reached: copies of the directory" in out
    code, out, _ = command(capsys, "erase", "verify", data, "--receipt", "kept.json")
    assert (code, out) == (0, "2 receipts, every one as it was written\n")
    code, out, _ = command(capsys, "erase", "ls", data)
    assert code == 0
    assert "2 receipts" in out


def test_changed_receipt_is_damage(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = command(capsys, "erase", data, "orders", "--match", "c7", "--json")
    Path("kept.json").write_text(out.replace('"records":2', '"records":1').replace('"records": 2', '"records": 1'))
    code, _, err = command(capsys, "erase", "verify", data, "--receipt", "kept.json")
    assert code == 1
    assert "receipt 1 of orders is not in the chain" in err
    code, out, _ = command(capsys, "erase", "verify", data, "--receipt", "kept.json", "--json")
    assert (code, json.loads(out)["ok"]) == (1, False)


def test_bad_input_erases_nothing(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in (
        (("erase", data, "orders"), "nothing was erased"),
        (("erase", data, "orders", "--match", "a", "--seqs", "1"), "nothing was erased"),
        (("erase", data, "none", "--match", "a"), "none"),
        (("erase", "verify", data, "--receipt", "no.json"), "there is no file"),
    ):
        code, _, err = command(capsys, *words)
        assert code == 2
        assert text in err
    Path("bad.json").write_text("[]")
    assert command(capsys, "erase", "verify", data, "--receipt", "bad.json")[0] == 2


def test_topic_rewrite_frees_bytes(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    command(capsys, "topic", "delete", data, "orders", "--seqs", "4")
    code, out, _ = command(capsys, "topic", "rewrite", data, "orders")
    assert code == 0
    assert "rewrote 0 segments" in out
    code, out, _ = command(capsys, "topic", "rewrite", data, "orders", "--force", "--json")
    fields = json.loads(out)
    assert (code, len(fields["segments"]), fields["skipped"]) == (0, 1, [])
    assert fields["bytes_reclaimed"] > 3900
    code, out, _ = command(capsys, "topic", "show", data, "orders", "--json")
    assert [row["generation"] for row in json.loads(out)["segments"]] == [1, 0]
