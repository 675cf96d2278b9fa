"""Directories of topics as commands open them: what is refused, and in which words."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import tidelog
from tidelog.cli.main import main
from tidelog.cli.target import check_holds_topics
from tidelog.commitlog import SegmentedLog
from tidelog.database import engine_of
from tidelog.disk.posix import PosixDisk
from tidelog.engine.read import WalWatch
from tidelog.errors import BadInput, NotFound

LOOKS = (["ls", "d"], ["show", "d", "t"], ["read", "d", "t"], ["follow", "d", "t", "--timeout", "0"])
DRY = ["delete", "d", "t", "--before", "2", "--dry-run"]
CHANGES = (
    ["write", "d", "t"],
    ["delete", "d", "t", "--before", "2"],
    ["drop", "d", "t", "--yes"],
    ["config", "d", "t", "ttl_ms=1h"],
    ["seal", "d", "t"],
    ["checkpoint", "d"],
)


@pytest.fixture(autouse=True)
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opened() -> tidelog.Database:
    """A writer without background work: it changes no file by itself."""
    return tidelog.open("d", wal_file_bytes=1 << 16, threads=False)


def age_wal() -> None:
    """Set the times of the WAL files back: they are coarser than two writes of a test."""
    for path in Path("d/wal").rglob("*.log"):
        os.utime(path, (1, 1))


@pytest.mark.parametrize("words", CHANGES, ids=lambda words: words[0])
def test_a_second_writer_is_refused_in_one_line_that_says_what_to_do(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One process writes; the other changes nothing and is told who holds the directory."""
    with opened() as log:
        log.topic("t").append([b"x", b"y"])
        before = {path: path.read_bytes() for path in Path("d").rglob("*") if path.is_file()}
        assert main(["topic", *words]) == 2
        out, err = capsys.readouterr()
        pid = Path("d/.tidelog.lock").read_text().strip().removeprefix("pid=")
        assert (out, err) == (
            "",
            f"tidelog: d is being written by another process (pid {pid}); nothing was changed, stop it first, or only "
            "read: tidelog topic ls, show, read, follow and tidelog check work beside it\n",
        )
        assert {path: path.read_bytes() for path in Path("d").rglob("*") if path.is_file()} == before
        Path("d/.tidelog.lock").write_bytes(b"somebody")
        assert main(["topic", *words, "--json"]) == 2
        error = json.loads(capsys.readouterr().err)
        assert (error["error"], error["written"]) == ("locked", False)
        assert "another process; nothing was changed" in error["message"], "a lock that names nobody"
        engine_of(log).announce_server("http://127.0.0.1:4000")
        assert main(["topic", *words]) == 2
        assert capsys.readouterr().err == (
            "tidelog: d is served at http://127.0.0.1:4000; nothing was changed, give --server http://127.0.0.1:4000 "
            "in place of the directory, or only read: tidelog topic ls, show, read, follow and tidelog check work "
            "beside it\n"
        )


@pytest.mark.parametrize("words", [*LOOKS, DRY], ids=lambda words: words[0])
def test_those_who_only_look_work_beside_a_writer(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with opened() as log:
        log.topic("t").append([b"x", b"y"])
        before = {path: path.read_bytes() for path in Path("d").rglob("*") if path.is_file()}
        assert main(["topic", *words]) == 0
        assert capsys.readouterr().out
        assert {path: path.read_bytes() for path in Path("d").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("words", [["topic", *words] for words in (*LOOKS, DRY, *CHANGES[1:])] + [["check", "d"]])
@pytest.mark.parametrize("there", ["nothing", "a file", "letters", "a log"])
def test_where_there_are_no_topics_nothing_is_made(
    words: list[str], there: str, work_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if there == "a file":
        Path("d").write_bytes(b"dear")
    elif there == "letters":
        Path("d").mkdir()
        Path("d/letter").write_bytes(b"dear")
    elif there == "a log":
        SegmentedLog.open("d").close()
    before = {path: path.is_file() and path.read_bytes() for path in work_dir.rglob("*")}
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "nothing was changed" in err
    said = {
        "nothing": "nothing at d",
        "a file": "d is a file",
        "letters": "no topics",
        "a log": "use tidelog log with d",
    }
    assert said[there] in err
    assert {path: path.is_file() and path.read_bytes() for path in work_dir.rglob("*")} == before


def test_a_write_does_not_mix_topics_into_what_is_something_else(capsys: pytest.CaptureFixture[str]) -> None:
    SegmentedLog.open("d").close()
    assert main(["topic", "write", "d", "t"]) == 2
    assert "it belongs to another program" in capsys.readouterr().err
    with pytest.raises(NotFound, match="use tidelog log"):
        check_holds_topics("d")
    Path("f").touch()
    with pytest.raises(BadInput, match="f is a file"):
        check_holds_topics("f")


def test_what_recovery_did_is_remarked_on(capsys: pytest.CaptureFixture[str]) -> None:
    with opened() as log:
        log.topic("t").append([b"x"])
        log.checkpoint()
        log.topic("t").append([b"y"])
        for name in ("meta", "wal", "topics"):  # as a kill leaves it
            for path in Path("d", name).rglob("*"):
                target = Path("killed", path.relative_to("d"))
                target.parent.mkdir(parents=True, exist_ok=True)
                if path.is_file():
                    target.write_bytes(path.read_bytes())
    wal = max(Path("killed/wal").rglob("*.log"), key=lambda path: path.read_bytes().count(b"y"))
    content = wal.read_bytes().rstrip(b"\0")
    wal.write_bytes(content + bytes(64) + b"half a frame")  # further on: a frame may end with zeros itself
    assert main(["topic", "read", "killed", "t"]) == 0
    assert capsys.readouterr().err.startswith("2 records; "), "a reader cuts nothing and need not know"
    assert main(["topic", "checkpoint", "killed"]) == 0
    assert "recovery: cut an unfinished write: " in capsys.readouterr().err
    assert main(["topic", "checkpoint", "killed", "--json"]) == 0
    assert capsys.readouterr().err == ""


def flip(path: Path, pos: int) -> None:
    content = bytearray(path.read_bytes())
    content[pos] ^= 1
    path.write_bytes(content)


def test_damage_that_is_met_points_to_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    with opened() as log:
        log.topic("t").append([b"x" * 100])
    (data,) = Path("d/topics").rglob("*.data")
    flip(data, 60)
    assert main(["topic", "read", "d", "t"]) == 1
    err = capsys.readouterr().err
    assert err.endswith("; tidelog check d lists all of it\n")
    assert err.count("\n") == 1


def test_damage_of_the_wal_is_reported_to_readers_and_stops_writers_until_accept_loss(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with tidelog.open("d", wal_file_bytes=4096, wal_shards=1) as log:
        topic = log.topic("t", durability="fsync")
        for _ in range(60):
            topic.append(b"x" * 100)
        for path in Path("d").rglob("*"):
            target = Path("killed", path.relative_to("d"))
            target.mkdir(parents=True) if path.is_dir() else None
            if path.is_file() and path.name[0] != ".":
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
    wal = sorted(Path("killed/wal").glob("*.log"))[0]
    flip(wal, wal.read_bytes().index(b"x" * 100, 2000))  # in a record that was synced
    assert main(["topic", "ls", "killed"]) == 0
    out, err = capsys.readouterr()
    assert "1 topic" in out
    assert err.startswith("damage: wal/wal-0000000000000001.log at byte ")
    assert err.endswith("; tidelog check killed lists all of it\n")
    assert main(["topic", "checkpoint", "killed"]) == 1
    assert "acknowledged records may be lost" in capsys.readouterr().err
    assert main(["topic", "checkpoint", "killed", "--accept-loss"]) == 0
    err = capsys.readouterr().err
    assert "recovery: damage: wal/wal-0000000000000001.log at byte " in err
    assert "recovery: kept the bytes in " in err
    (kept,) = Path("killed/quarantine").glob("wal.*")
    assert b"y" + b"x" * 99 in kept.read_bytes()
    assert main(["topic", "checkpoint", "killed"]) == 0
    assert "recovery: " not in capsys.readouterr().err
    with tidelog.open("killed") as log:
        assert len(log.topic("t", create=False).read(limit=100).records) == 59, "only the damaged record is lost"


def test_a_watch_is_stirred_by_whatever_a_writer_does_and_once_more_after_it() -> None:
    with opened() as log:
        topic = log.topic("t")
        age_wal()
        watch = WalWatch(PosixDisk(), "d")
        assert [watch.changed() for _ in range(3)] == [True, False, False], "once after the start, whatever happened"
        topic.append(b"x")
        assert [watch.changed() for _ in range(3)] == [True, True, False]
        log.checkpoint()
        assert [watch.changed() for _ in range(3)] == [True, True, False]
    assert watch.changed()
