"""An address where a directory is expected is refused: before, `open("http://…")` made a directory named `http:`."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

import tidelog
from tidelog.addresses import check_path, scheme_of
from tidelog.cli.main import main
from tidelog.commitlog import PartitionedLog, SegmentedLog, convert, restore
from tidelog.errors import BadInput

ADDRESSES = ("http://127.0.0.1:4000", "https://host/data", "s3://bucket/data", "file:///data", "gs:/bucket", "S3://b")
OPENS: tuple[Callable[..., object], ...] = (tidelog.open, SegmentedLog.open, PartitionedLog.open)


@pytest.fixture(autouse=True)
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("open_", OPENS)
@pytest.mark.parametrize("read_only", [False, True])
def test_open_refuses_an_address(work_dir: Path, open_: Callable[..., object], address: str, read_only: bool) -> None:
    with pytest.raises(BadInput, match="is an address, and this takes a directory of this machine; nothing was done"):
        open_(address, read_only=read_only)
    assert not list(work_dir.iterdir())


def test_the_message_names_what_to_use() -> None:
    for address, step in (
        ("http://127.0.0.1:4000", r"tidelog\.connect\(URL\).*--server URL.*option server"),
        ("s3://bucket/data", "read through Spark"),
        ("file:///data", "leave file:// out"),
    ):
        with pytest.raises(BadInput, match=step):
            tidelog.open(address)


def test_a_pathlib_path_of_an_address_is_refused_too() -> None:
    with pytest.raises(BadInput, match="s3:/bucket"):
        check_path(PurePosixPath("s3://bucket/data"))


@pytest.mark.parametrize("path", ["data", "/data", "./http:/x", "c:/data", "a:b", "data:", "http:", "x/s3://y", ""])
def test_a_path_is_a_path(path: str) -> None:
    assert scheme_of(path) is None
    check_path(path)


def test_a_directory_with_such_a_name_can_be_opened(work_dir: Path) -> None:
    with tidelog.open("./http:/x") as log:
        log.topic("t").append(b"a")
    assert (work_dir / "http:" / "x").is_dir()


def test_copies_of_a_log_refuse_an_address(work_dir: Path) -> None:
    with SegmentedLog.open("a") as log:
        log.append(b"x")
        with pytest.raises(BadInput, match="is an address"):
            convert(log, "s3://bucket/log", "rustlog")
        with pytest.raises(BadInput, match="is an address"):
            restore(log, "s3://bucket/log", to_seq=1)
    assert [path.name for path in work_dir.iterdir()] == ["a"]


COMMANDS = (
    ["topic", "ls", "URL"],
    ["topic", "write", "URL", "t"],
    ["topic", "read", "URL", "t"],
    ["topic", "follow", "URL", "t", "--timeout", "0"],
    ["topic", "checkpoint", "URL"],
    ["check", "URL"],
    ["doctor", "URL"],
    ["serve", "--data", "URL", "--port", "0"],
    ["log", "append", "URL"],
    ["log", "cat", "URL"],
    ["log", "inspect", "URL"],
    ["log", "verify", "URL"],
    ["log", "repair", "URL"],
    ["log", "convert", "a", "URL", "--to", "rustlog"],
    ["log", "restore", "a", "URL", "--to-offset", "1"],
    ["queue", "ls", "URL"],
    ["queue", "put", "URL", "jobs"],
    ["worker", "URL", "jobs", "--once", "--", "cat"],
    ["channel", "ls", "URL"],
    ["group", "ls", "URL", "t"],
    ["gaps", "URL"],
)


LOCAL = ("check", "doctor", "serve", "log")  # the others take the address of a server


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "s3://bucket/data"])
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:2]))
def test_every_command_refuses_an_address(
    work_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], address: str
) -> None:
    with SegmentedLog.open("a") as log:
        log.append(b"x")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"{}\n")))
    assert main([address if word == "URL" else word for word in words]) == 2
    remote = address.startswith("http") and words[0] not in LOCAL
    expected = f"{address} cannot be reached" if remote else "is an address"
    assert expected in capsys.readouterr().err
    assert [path.name for path in work_dir.iterdir()] == ["a"]
