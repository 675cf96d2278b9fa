"""The commands of `tidelog channel`, through `main`, on real files."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree

import pytest
from tests.kit.commands import Run, runner

import tidelog
from tidelog.channels.rules import directory_name

ROOM, ANN, BOB = "!room@example.org", "ann@example.org", "bob@example.net"


@pytest.fixture
def run(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsysbinary, monkeypatch, "channel", directory=tmp_path)


@pytest.fixture
def channel_run(run: Run) -> Run:
    assert run("create", "data", ROOM, "--user", ANN, "--set", "max_clients=3")[0] == 0
    assert run("publish", "data", ROOM, "--user", ANN, stdin=b"hello\nworld\n")[1] == "wrote 2 records, seqs 1 to 2\n"
    return run


def test_channel_from_create_to_delete(channel_run: Run) -> None:
    code, out, _ = channel_run("join", "data", ROOM, "--user", BOB, "--json")
    assert (code, json.loads(out)["members"]) == (0, [ANN, BOB])
    assert channel_run("history", "data", ROOM)[1] == "hello\nworld\n"
    assert channel_run("history", "data", ROOM, "--newest", 1)[1] == "world\n"
    shown = json.loads(channel_run("show", "data", ROOM, "--json")[1])
    assert (shown["owner"], shown["max_clients"], shown["last_seq"]) == (ANN, 3, 2)
    assert "owner: ann@example.org" in channel_run("show", "data", ROOM)[1]
    listed = json.loads(channel_run("ls", "data", "--json")[1])["channels"]
    assert [(row["channel"], row["members"], row["last_seq"]) for row in listed] == [(ROOM, 2, 2)]
    assert ROOM in channel_run("ls", "data")[1]
    assert "which bob@example.net owns" in channel_run("leave", "data", ROOM, "--user", ANN)[1]
    assert json.loads(channel_run("leave", "data", ROOM, "--user", BOB, "--json")[1])["ended"] is True
    assert json.loads(channel_run("ls", "data", "--json")[1])["channels"] == []


def test_history_as_json_over_pages(channel_run: Run) -> None:
    lines = b"".join(b"%d\n" % number for number in range(250)) + b"\xff\n"
    assert channel_run("publish", "data", ROOM, "--user", ANN, stdin=lines)[0] == 0
    found = [json.loads(line) for line in channel_run("history", "data", ROOM, "--json")[1].splitlines()]
    assert [row["seq"] for row in found] == list(range(1, 254))
    assert found[-1]["payload_base64"] == "/w=="
    assert found[0]["sender"] == ANN
    assert len(channel_run("history", "data", ROOM, "--newest", 120, "--json")[1].splitlines()) == 120
    assert channel_run("history", "data", ROOM, "--from", 250, "--limit", 2)[1] == "247\n248\n"
    assert channel_run("history", "data", ROOM, "--from", 2, "--to", 3)[1] == "world\n0\n"
    assert channel_run("history", "data", ROOM, "--since", "2999-01-01T00:00:00Z")[1] == ""


def test_access_lists(channel_run: Run) -> None:
    assert channel_run("acl", "data", ROOM, "join")[1] == "everybody may join\n"
    assert channel_run("acl", "data", ROOM, "join", "--add", "example.org", "--add", ANN)[1] == f"{ANN}\nexample.org\n"
    assert channel_run("acl", "data", ROOM, "join", "--remove", ANN, "--user", ANN)[1] == "example.org\n"
    code, _, err = channel_run("join", "data", ROOM, "--user", BOB, "--json")
    assert (code, json.loads(err)["error"]) == (2, "forbidden")
    code, _, err = channel_run("join", "data", ROOM, "--user", BOB, "--by", ANN)
    assert code == 2
    assert channel_run("acl", "data", ROOM, "publish", "--user", BOB)[0] == 2


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("show", "data", "room"), "bad_input"),
        (("show", "data", "!none@host"), "channel_not_found"),
        (("join", "data", "!none@host", "--user", "a@b"), "channel_not_found"),
        (("join", "data", ROOM, "--user", "nobody"), "bad_input"),
        (("join", "data", ROOM, "--user", ANN), "user_in_channel"),
        (("leave", "data", ROOM, "--user", BOB), "not_a_member"),
        (("publish", "data", ROOM, "--user", BOB), "not_a_member"),
        (("create", "data", "!x@host", "--user", ANN, "--set", "colour=red"), "bad_input"),
        (("delete", "data", "!none@host"), "channel_not_found"),
        (("delete", "data", ROOM, "--user", BOB), "forbidden"),
        (("ls", "nowhere"), "not_found"),
    ],
)
def test_what_cannot_be_is_refused(channel_run: Run, words: tuple[str, ...], error: str) -> None:
    code, _, err = channel_run(*words, "--json", stdin=b"x\n")
    assert (code, json.loads(err)["error"]) == (2, error)
    assert channel_run("history", "data", ROOM)[1] == "hello\nworld\n", "everything is as before"


def test_damage_is_named_and_can_be_deleted(channel_run: Run, tmp_path: Path) -> None:
    (tmp_path / "data" / "channels" / directory_name(ROOM) / "metadata.bin").write_bytes(b"?")
    code, out, _ = channel_run("ls", "data", "--json")
    assert (code, list(json.loads(out)["unreadable"])) == (1, [directory_name(ROOM)])
    assert channel_run("ls", "data")[0] == 1
    assert channel_run("show", "data", ROOM)[0] == 1
    assert channel_run("delete", "data", ROOM)[0] == 0
    assert channel_run("ls", "data")[0] == 0


def test_nothing_to_publish_writes_nothing(channel_run: Run) -> None:
    assert channel_run("publish", "data", ROOM, "--user", ANN)[1] == "nothing was written, the next seq is 3\n"


def test_a_queue_is_listed_without_a_history(run: Run, tmp_path: Path) -> None:
    assert run("create", "data", "!jobs@host", "--user", ANN, "--set", "type=fifo")[0] == 0
    with tidelog.open(str(tmp_path / "data")) as log:
        log.channel("!jobs@host", user=ANN).push(b"1")
    assert json.loads(run("ls", "data", "--json")[1])["channels"][0]["last_seq"] is None
    assert json.loads(run("show", "data", "!jobs@host", "--json")[1])["type"] == "fifo"
    code, _, err = run("history", "data", "!jobs@host", "--json")
    assert (code, json.loads(err)["error"]) == (2, "wrong_type")


def test_show_names_what_a_power_cut_took(run: Run, tmp_path: Path) -> None:
    said = [b"a" * 20, b"b" * 20, b"c" * 20]
    with tidelog.open(str(tmp_path / "live"), threads=False) as log:
        jobs = log.channel(ROOM, user=ANN)
        jobs.join(persist=True, type="fifo", message_flush_interval=60_000)
        for payload in said:
            jobs.push(payload)
        copytree(tmp_path / "live", tmp_path / "data")  # as a kill leaves it; the disk then loses one sector
    path = tmp_path / "data" / "channels" / directory_name(ROOM) / f"{1:020}.log"
    path.write_bytes(path.read_bytes().replace(said[1], b"\0" * 20))
    with tidelog.open(str(tmp_path / "data")) as log:
        assert log.channel(ROOM, user=ANN).pop().payload == said[0]
    assert json.loads(run("show", "data", ROOM, "--json")[1])["holes"] == [[2, 3]]
    assert "lost to a power cut before their sync: seqs 2 to 3" in run("show", "data", ROOM)[1]
