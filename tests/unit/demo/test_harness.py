"""The stage of the guided tour."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.demo import harness
from examples.demo.logs import event

from tidelog.disk.posix import PosixDisk


def test_a_claim_that_holds_is_said_and_one_that_does_not_ends_the_tour(capsys: pytest.CaptureFixture[str]) -> None:
    harness.check(True, "the sun rises")
    assert capsys.readouterr().out == "  [ok] the sun rises\n"
    with pytest.raises(SystemExit, match="this did not hold: the sun sets") as ended:
        harness.check(False, "the sun sets")
    assert ended.value.code not in (0, None)
    with pytest.raises(SystemExit, match="there is no answer"):
        harness.require(None, "answer")
    assert harness.require(7, "answer") == 7


def test_only_what_an_earlier_tour_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "tour"
    harness.make_empty_dir(str(path))
    (path / "log").mkdir()
    (path / "log" / "a.data").write_bytes(b"x")
    harness.make_empty_dir(str(path))
    assert [entry.name for entry in path.rglob("*")] == [harness.MARKER_FILE]

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "letter").write_bytes(b"dear")
    for path in (foreign, foreign / "letter"):
        with pytest.raises(SystemExit, match="nothing was removed"):
            harness.make_empty_dir(str(path))
    assert (foreign / "letter").read_bytes() == b"dear"


def test_a_removal_that_broke_off_can_be_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.make_empty_dir(str(tmp_path / "tour"))
    (tmp_path / "tour" / "file").write_bytes(b"")

    really, removed = PosixDisk.remove, list[str]()

    def broken(self: PosixDisk, path: str) -> None:
        if removed:
            raise OSError(5, "broken", path)
        removed.append(path)
        really(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(PosixDisk, "remove", broken)
        with pytest.raises(OSError, match="broken"):
            harness.make_empty_dir(str(tmp_path / "tour"))
    assert (tmp_path / "tour" / harness.MARKER_FILE).exists()
    harness.make_empty_dir(str(tmp_path / "tour"))
    assert not (tmp_path / "tour" / "file").exists()


def test_the_accidents_change_what_they_say_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "a.data"
    before = bytes(range(256)) * 2
    file.write_bytes(before)
    at = harness.flip_a_bit(str(file))
    after = file.read_bytes()
    assert [number for number in range(512) if before[number] != after[number]] == [at]
    assert (before[at] ^ after[at]).bit_count() == 1
    harness.write_half_a_record(str(file))
    assert file.read_bytes() == after + after[:120]


def test_data_files_are_listed_oldest_first_and_sizes_are_those_on_disk(tmp_path: Path) -> None:
    for name, size in (("seg-2.data", 3), ("seg-1.data", 4), ("seg-1.idx", 5)):
        (tmp_path / name).write_bytes(b"x" * size)
    assert harness.data_files(str(tmp_path)) == [f"{tmp_path}/seg-1.data", f"{tmp_path}/seg-2.data"]
    assert harness.disk_bytes(str(tmp_path)) == 12


def test_every_event_of_the_tour_is_another() -> None:
    assert len({event(seq) for seq in range(1000)}) == 1000
