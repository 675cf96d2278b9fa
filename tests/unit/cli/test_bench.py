"""`tidelog bench`: what it reports adds up, and it leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.kit.commands import Run, json_result, runner

import tidelog


@pytest.fixture
def run(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsysbinary, monkeypatch, "bench", directory=tmp_path)


def test_a_run_adds_up_and_leaves_nothing(run: Run, tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    done = json_result(
        run(".", "--seconds", "0.05", "--writers", 3, "--batch", 4, "--record-bytes", 300, "--class", "disk", "--json")
    )
    assert done["appends"] > 0
    assert sum(count for _, count in done["histogram"]) == done["appends"]
    assert done["histogram"][-1][0] >= done["max_us"] > done["histogram"][0][0] / 2
    assert done["records_per_s"] == pytest.approx(done["appends_per_s"] * 4, rel=0.01)
    assert done["bytes_per_s"] == pytest.approx(done["records_per_s"] * 300, rel=0.01)
    assert done["ratio"] == pytest.approx(done["appends_per_s"] / done["bare"]["fsyncs_per_s"], rel=0.01, abs=0.001)
    assert 0 < done["p50_us"] <= done["p99_us"] <= done["max_us"]
    assert done["read_records_per_s"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_people_get_a_plot(run: Run) -> None:
    code, out, err = run(".", "--seconds", "0.05", "--class", "memory", "--plot", "bench.svg")
    assert (code, err) == (0, "")
    assert "bare " in out
    assert "times that\n" in out
    assert "█" in out
    drawn = ElementTree.fromstring(Path("bench.svg").read_text())
    assert "latency of appends, appends" in [each.text for each in drawn.iter()]


def test_what_is_refused(run: Run, tmp_path: Path) -> None:
    for words, said in (
        (("nowhere",), "there is no directory nowhere"),
        ((".", "--seconds", "0"), "--seconds is 0"),
        ((".", "--plot", "bench.png"), "ends in .svg"),
        (("http://127.0.0.1:1",), "cannot be reached"),
    ):
        code, out, err = run(*words)
        assert (code, out, said in err) == (2, "", True), err
    assert list(tmp_path.iterdir()) == []


def test_a_failed_writer_ends_the_run_and_the_directory_is_removed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise tidelog.errors.DiskFull("no space left; nothing was written")

    monkeypatch.setattr(tidelog.Topic, "append", fail)
    code, _, err = run(".", "--seconds", "0.2")
    assert (code, "no space left" in err) == (2, True)
    assert list(tmp_path.iterdir()) == []
