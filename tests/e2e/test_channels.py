"""`tidelog channel` and the client against a real server, and `tidelog check` on what it left."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract_http.server import Server
from tests.kit.commands import Run, runner, start_process
from tests.kit.waiting import eventually

from tidelog import errors
from tidelog.api_types import error_from_wire
from tidelog.channels import Presence, SubscriptionEnded
from tidelog.cli.channel import _print_event
from tidelog.cli.main import main
from tidelog.cli.render import Screen
from tidelog.client import Client, RemoteChannel
from tidelog.server.errors import api_error_from

ROOM, JOBS, ANN, BOB = "!room@example.org", "!jobs@example.org", "ann@example.org", "bob@example.org"
KEYS = f"root,{ANN}=ann:read+write+delete,{BOB}=bob:rw"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "s", api_keys=KEYS).start() as running:
        yield running


def url(server: Server) -> str:
    return f"http://{server.address.host}:{server.address.port}"


@pytest.fixture
def run(server: Server, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    run = runner(capsysbinary, monkeypatch, "channel")

    def command(*words: object, key: str = "root", stdin: bytes = b"") -> tuple[int, str, str]:
        return run(*words, "--server", url(server), "--key", key, stdin=stdin)

    return command


def test_channel_of_a_server_from_creation_to_deletion(run: Run, server: Server) -> None:
    assert run("create", ROOM, "--user", ANN, "--set", "max_clients=3")[:2] == (
        0,
        f"created {ROOM}, a pubsub channel, owned by {ANN}\n",
    )
    lines = b"".join(b"%d\n" % number for number in range(250)) + b"\xff\n"
    assert run("publish", ROOM, "--user", ANN, stdin=lines)[1] == "wrote 251 records, seqs 1 to 251\n"
    assert run("publish", ROOM, "--user", ANN, key="ann", stdin=b"mine\n")[1] == "wrote 1 record, seq 252\n"
    assert json.loads(run("join", ROOM, "--user", BOB, "--json")[1])["members"] == [ANN, BOB]
    assert run("history", ROOM, "--newest", 120, key="bob")[1].count("\n") == 120
    found = [json.loads(line) for line in run("history", ROOM, "--json")[1].splitlines()]
    assert [row["seq"] for row in found] == list(range(1, 253))
    assert (found[250]["payload_base64"], found[251]["payload"], found[0]["sender"]) == ("/w==", "mine", ANN)
    assert run("history", ROOM, "--from", 3, "--limit", 2)[1] == "2\n3\n"
    assert run("history", ROOM, "--since", "2999-01-01T00:00:00Z")[1] == ""
    shown = json.loads(run("show", ROOM, "--json")[1])
    assert (shown["owner"], shown["max_clients"], shown["last_seq"]) == (ANN, 3, 252)
    assert shown["acl"] == {"join": [], "publish": [], "read": []}
    assert json.loads(run("show", ROOM, "--json", key="bob")[1])["acl"] is None, "which is the owner's to know"
    assert "may publish: everybody" in run("show", ROOM)[1]
    assert run("acl", ROOM, "publish", "--add", ANN)[1] == f"{ANN}\n"
    assert run("acl", ROOM, "publish", "--user", ANN, key="ann")[1] == f"{ANN}\n"
    code, _, err = run("publish", ROOM, "--user", BOB, "--json", stdin=b"x\n")
    assert (code, json.loads(err)["error"]) == (2, "forbidden")
    code, _, err = run("acl", ROOM, "read", key="ann")
    assert (code, "scope admin" in err) == (2, True), "without --user it is the operator who asks"
    listed = json.loads(run("ls", "--json")[1])
    assert [(row["channel"], row["members"], row["last_seq"]) for row in listed["channels"]] == [(ROOM, 2, 252)]
    assert [row["channel"] for row in json.loads(run("ls", "--json", key="bob")[1])["channels"]] == [ROOM]
    assert ROOM in run("ls")[1]
    assert "which bob@example.org owns" in run("leave", ROOM, "--user", ANN)[1]
    assert run("join", ROOM, "--user", ANN, "--by", BOB)[0] == 0
    server.restart()
    assert run("leave", ROOM, "--user", ANN, "--by", BOB)[0] == 0
    assert run("delete", ROOM)[1] == f"deleted {ROOM}, with all its messages\n"
    assert json.loads(run("delete", ROOM, "--json")[2])["error"] == "channel_not_found"
    assert json.loads(run("join", ROOM, "--user", BOB, "--json")[2])["error"] == "channel_not_found"
    assert json.loads(run("ls", "--json")[1])["channels"] == []


def test_a_fifo_channel_and_its_settings(run: Run) -> None:
    jobs = "!jobs@example.org"
    assert run("create", jobs, "--user", ANN, "--set", "type=fifo", key="ann")[0] == 0
    assert (
        run("push", jobs, "--user", ANN, key="ann", stdin=b"one\ntwo\nthree\n")[1] == "wrote 3 records, seqs 1 to 3\n"
    )
    assert run("pop", jobs, "--user", ANN, "--max", "2", key="ann")[:2] == (0, "one\ntwo\n")
    assert json.loads(run("clear", jobs, "--json")[1]) == {"channel": jobs, "cleared": 1}
    assert run("pop", jobs, "--user", ANN, key="ann") == (0, "", "0 messages\n")
    changed = json.loads(run("configure", jobs, "max_clients=7", "--json")[1])
    assert (changed["changed"], changed["max_clients"]) == (["max_clients"], 7)
    assert "max_clients: 7\n" in run("configure", jobs)[1]
    assert "has these settings already" in run("configure", jobs, "max_clients=7")[1]


def test_listen_prints_messages_and_events(server: Server, run: Run, tmp_path: Path) -> None:
    assert run("create", ROOM, "--user", ANN, key="ann")[0] == 0
    listener = start_process(
        tmp_path, "channel", "listen", ROOM, "--server", url(server), "--key", "ann", "--limit", 1, "--json"
    )

    def has_heard() -> bool:  # the first messages may come before the subscription
        assert run("publish", ROOM, "--user", ANN, key="ann", stdin=b"hello\n")[0] == 0
        return listener.poll() is not None

    eventually(has_heard)
    out, _ = listener.communicate(timeout=60)
    message = json.loads(out)
    assert (message["payload"], message["sender"], listener.returncode) == ("hello", ANN, 0)
    assert run("listen", ROOM, "--timeout", "0", key="ann") == (0, "", "")


def test_events_as_they_are_printed(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    joined = Presence("joined", ROOM, BOB, False, 5)
    _print_event(joined, Screen(json=True))
    _print_event(SubscriptionEnded(ROOM, "deleted", 7), Screen(json=True))
    _print_event(joined, Screen(json=False))
    sys.stdout.flush()
    out, err = capfdbinary.readouterr()
    assert [json.loads(line)["event"] for line in out.splitlines()] == ["joined", "ended"]
    assert err.decode() == f"{BOB}: joined\n"


def test_events_are_not_in_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["channel", "listen", str(tmp_path), ROOM]) == 2
    assert "name its server" in capsys.readouterr().err


def test_a_command_takes_a_directory_or_a_server(run: Run, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    for words in (["show", "data", ROOM], ["ls", "data"]):
        with pytest.raises(SystemExit, match="2"):
            run(*words)
        assert b"this takes --server http://127.0.0.1" in capsysbinary.readouterr().err
    for words in (["show", ROOM], ["ls"], ["show", "data", ROOM, "--key", "k"]):
        with pytest.raises(SystemExit, match="2"):
            main(["channel", *words])
    capsysbinary.readouterr()


def test_the_client_has_the_verbs_of_a_channel(server: Server) -> None:
    with Client(url(server), key="ann") as ann_client, Client(url(server), key="bob") as bob_client:
        ann, bob = RemoteChannel(ann_client, JOBS), RemoteChannel(bob_client, JOBS)
        with pytest.raises(errors.ChannelNotFound):
            ann.configure(persist=True)
        assert ann.join(persist=True, type="fifo").state().config.type == "fifo"
        assert bob.join().state().members == (ANN, BOB)
        assert [ann.push(b"\xff%d" % number).seq for number in range(3)] == [1, 2, 3]
        job = bob.pop()
        assert (job.seq, job.payload, job.sender) == (1, b"\xff0", ANN)
        assert len(ann) == 2
        with pytest.raises(errors.Refused):
            bob.clear()
        assert ann.clear() == 2
        with pytest.raises(errors.FifoEmpty):
            bob.pop()
        with pytest.raises(errors.AlreadyMember):
            bob.join()
        with pytest.raises(errors.WrongType) as wrong:
            bob.publish(b"x")
        assert (wrong.value.type, wrong.value.wanted) == ("fifo", "pubsub")
        assert ann.members() == (ANN, BOB)
        assert ann.delete() is True


EVERY: list[errors.Error] = [
    errors.Forbidden("no"),
    errors.NotMember(ROOM, ANN),
    errors.AlreadyMember(ROOM, ANN),
    errors.ChannelNotFound(ROOM),
    errors.ChannelFull(ROOM, limit=7),
    errors.FifoFull(ROOM, limit=7),
    errors.FifoEmpty(ROOM),
    errors.WrongType(ROOM, type="fifo", wanted="pubsub"),
    errors.NotPersistent(ROOM),
    errors.CursorLost(ROOM, reason="it is gone"),
    errors.ChannelOffline(ROOM, reason="it is gone"),
    errors.Rejected("no"),
    errors.HookFailed("no"),
]


@pytest.mark.parametrize("error", EVERY, ids=lambda error: error.code)
def test_an_error_comes_out_of_the_client_as_it_went_into_the_server(error: errors.Error) -> None:
    problem = api_error_from(error)
    assert problem.code == error.code, "one code, on the wire and in a program"
    again = error_from_wire(problem.code, problem.message, problem.detail or {})
    assert again is not None
    both = [(type(each), str(each), {"written": each.written, **vars(each)}) for each in (again, error)]
    assert both[0] == both[1]


def test_check_looks_at_channels(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with Client(url(server), key="ann") as client:
        room = RemoteChannel(client, ROOM)
        room.join(persist=True)
        room.publish_many([b"message %d" % number for number in range(10)])
    data = str(server.data)
    assert main(["check", data, "--json"]) == 0, "beside the server"
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["channels"], found["messages"]) == (True, 1, 10)
    server.stop()
    assert main(["check", data]) == 0
    assert "1 channel with 10 messages" in capsys.readouterr().out
    path = next(Path(data).glob("channels/*/metadata.bin"))
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["check", data, "--json"]) == 1
    damage = json.loads(capsys.readouterr().out)["findings"]
    assert [(each["kind"], each["damage"]) for each in damage] == [("channel", True)]
    server.start()
