"""Queues from the command line, in a directory and behind a server: the same commands, the same words."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract_http.server import Server
from tests.kit import processes
from tests.kit.waiting import eventually

import tidelog
from tidelog.cli.main import main
from tidelog.client import Client, RemoteDatabase, RemoteQueue
from tidelog.errors import BadInput, NotAQueue, Refused, TopicNotFound, Unavailable

LIMIT_S = 30
KEY = "s3cret"
LATE_MS = 120_000


class Shell:
    """`tidelog queue …` and `tidelog worker …`, on one of the two."""

    def __init__(
        self, capsys: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, server: Server | None
    ) -> None:
        self._capsys, self._monkeypatch, self.server = capsys, monkeypatch, server

    @property
    def place(self) -> list[str]:
        return ["data"] if self.server is None else []

    @property
    def options(self) -> list[str]:
        if self.server is None:
            return []
        host, port = self.server.address
        return ["--server", f"http://{host}:{port}", "--key", KEY]

    def words(self, verb: str, queue: str, *more: str) -> list[str]:
        head = ["worker"] if verb == "worker" else ["queue", verb]
        return [*head, *self.place, queue, *self.options, *more]

    def __call__(self, verb: str, queue: str, *more: str, stdin: bytes = b"") -> tuple[int, str, str]:
        return self.raw(*self.words(verb, queue, *more), stdin=stdin)

    def raw(self, *words: str, stdin: bytes = b"") -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main(list(words))
        out, err = self._capsys.readouterr()
        return code, out.decode(), err.decode()

    def json(self, verb: str, queue: str, *more: str, stdin: bytes = b"") -> Any:
        code, out, err = self(verb, queue, "--json", *more, stdin=stdin)
        assert (code, err) == (0, "")
        return json.loads(out)

    def lines(self, verb: str, queue: str, *more: str) -> list[dict[str, Any]]:
        code, out, err = self(verb, queue, "--json", *more)
        assert (code, err) == (0, "")
        return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(params=["directory", "server"])
def shell(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsysbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Shell]:
    monkeypatch.chdir(tmp_path)
    if request.param == "directory":
        with tidelog.open("data") as log:
            log.queue("jobs", leases_durable=True, max_deliveries=2, dead_letter="dead", lease_ms=LATE_MS)
        yield Shell(capsysbinary, monkeypatch, None)
        return
    with Server(tmp_path / "server", api_keys=KEY).start(key=KEY) as server:
        with server.client(KEY) as api:
            api.create_topic("jobs", type="queue", max_deliveries=2, dead_letter="dead", lease_ms=LATE_MS)
        yield Shell(capsysbinary, monkeypatch, server)


def test_jobs_from_put_to_ack(shell: Shell) -> None:
    done = shell.json("put", "jobs", "--tag", "t", stdin=b"one\ntwo\n\xff\n")
    assert done == {"queue": "jobs", "count": 3, "first_seq": 1, "last_seq": 3}
    done = shell.json("put", "jobs", "--json-lines", "--priority", "5", stdin=b'{"n": 4}\n\n')
    assert (done["count"], done["first_seq"]) == (1, 4)
    shell.json("put", "jobs", "--delay", "10m", stdin=b"later\n")
    shown = shell.json("show", "jobs")
    assert [shown[key] for key in ("queue", "ready", "in_flight", "count")] == ["jobs", 4, 0, 5]
    jobs = shell.lines("claim", "jobs", "--node", "me", "--max", "4", "--lease", "5m")
    assert [job["seq"] for job in jobs] == [1, 2, 3, 4]
    assert (jobs[0]["data"], jobs[0]["tag"], jobs[3]["data"]) == ("one", "t", {"n": 4})
    assert (jobs[2]["data_base64"], jobs[0]["lease_id"], jobs[0]["deliveries"]) == ("/w==", "lease_2", 1)
    assert abs(jobs[0]["deadline_ms"] - time.time() * 1000 - 300_000) < 60_000
    done = shell.json("ack", "jobs", "--node", "me", "--seqs", "1,9", "--leases", "lease_2,lease_2")
    assert done == {"queue": "jobs", "acked": 1, "skipped": [9], "ready": 0, "in_flight": 3}
    assert shell.json("ack", "jobs", "--node", "me", "--seqs", "2", "--leases", "lease_99")["skipped"] == [2]
    done = shell.json("nack", "jobs", "--node", "me", "--seqs", "2,3")
    assert (done["nacked"], done["ready"]) == (2, 2)
    assert shell.json("nack", "jobs", "--node", "me", "--seqs", "4", "--delay", "1h")["ready"] == 2
    code, out, _ = shell("show", "jobs")
    assert code == 0
    assert "2 jobs to be claimed, 0 in flight, 2 not due yet" in out
    assert "after 2 deliveries a job goes to dead" in out


def test_lists_of_queues(shell: Shell) -> None:
    shell.json("put", "jobs", stdin=b"one\n")
    shell.json("put", "more", stdin=b"one\ntwo\n")
    code, out, _ = shell.raw("queue", "ls", *shell.place, *shell.options, "--json")
    assert code == 0
    assert [(row["queue"], row["ready"]) for row in json.loads(out)["queues"]] == [("jobs", 1), ("more", 2)]
    code, out, _ = shell.raw("queue", "ls", *shell.place, *shell.options, "--prefix", "mo")
    assert code == 0
    assert out.splitlines()[-1] == "1 queue, 2 jobs to be done"


def test_a_worker_runs_a_command_for_every_job(shell: Shell, tmp_path: Path) -> None:
    """Exit code 0 acks, any other gives back; --once ends when there is nothing to claim."""
    shell.json("put", "jobs", "--json-lines", stdin=b"".join(b'{"n":%d}\n' % number for number in range(6)))
    script = tmp_path / "work.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "job = json.load(sys.stdin)\n"
        "pathlib.Path('done-%d' % job['data']['n']).write_text(json.dumps(job))\n"
        "sys.exit(3 if job['data']['n'] == 2 else 0)\n"
    )
    code, out, err = shell(
        "worker", "jobs", "--concurrency", "3", "--node", "w", "--once", "--json", "--", sys.executable, str(script)
    )
    assert (code, err) == (0, "")
    assert json.loads(out) == {"queue": "jobs", "done": 5, "failed": 1, "lost": 0}
    assert sorted(path.name for path in tmp_path.glob("done-*")) == [f"done-{number}" for number in range(6)]
    job = json.loads((tmp_path / "done-4").read_text())
    assert (job["seq"], job["data"], job["deliveries"]) == (5, {"n": 4}, 1)
    shown = shell.json("show", "jobs")
    assert (shown["in_flight"], shown["count"]) == (0, 1), "the one that failed comes back, a second later"
    code, out, err = shell("worker", "jobs", "--idle", "0.1", "--", "true")
    assert (code, out) in ((0, "0 jobs done, 0 failed\n"), (0, "1 job done, 0 failed\n")), "or it is that time already"


def test_a_worker_that_can_not_work_says_so(shell: Shell) -> None:
    shell.json("put", "jobs", stdin=b"one\n")
    for words, said in (
        (("jobs", "--once", "--", "no-such-command"), "cannot be run"),
        (("nowhere", "--once", "--", "true"), "there is no topic 'nowhere'"),
        (("jobs", "--once"), "comes after --"),
    ):
        code, out, err = shell("worker", *words)
        assert (code, out) == (2, "")
        assert said in err
    assert shell.json("show", "jobs")["count"] == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_finishes_what_it_has_begun(shell: Shell, tmp_path: Path, number: signal.Signals) -> None:
    """The job that runs is acked; those behind it are there for others."""
    shell.json("put", "jobs", stdin=b"one\ntwo\n")
    script = "touch began; while [ ! -e go ]; do sleep 0.02; done; touch ended"
    command = [
        sys.executable,
        "-m",
        "tidelog.cli.main",
        *shell.words("worker", "jobs", "--json", "--", "sh", "-c", script),
    ]
    process = processes.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)
    eventually((tmp_path / "began").exists, LIMIT_S)
    os.kill(process.pid, number)
    time.sleep(0.2)
    assert process.poll() is None, "it waits for its command"
    (tmp_path / "go").touch()
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert json.loads(out) == {"queue": "jobs", "done": 1, "failed": 0, "lost": 0}
    assert (tmp_path / "ended").exists()
    shown = shell.json("show", "jobs")
    assert (shown["ready"], shown["in_flight"]) == (1, 0)


def test_a_second_signal_ends_what_runs(shell: Shell, tmp_path: Path) -> None:
    shell.json("put", "jobs", stdin=b"one\n")
    words = shell.words("worker", "jobs", "--json", "--", "sh", "-c", "touch began; exec sleep 60")
    process = processes.Popen([sys.executable, "-m", "tidelog.cli.main", *words], stdout=subprocess.PIPE, cwd=tmp_path)
    eventually((tmp_path / "began").exists, LIMIT_S)
    for _ in range(2):
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.3)  # two signals of one kind at once are one
    out, _ = process.communicate(timeout=LIMIT_S)
    assert json.loads(out) == {"queue": "jobs", "done": 0, "failed": 1, "lost": 0}


def test_history_and_redrive(shell: Shell) -> None:
    shell.json("put", "jobs", "--tag", "t-1", stdin=b"one\ntwo\n")
    for _ in range(2):
        seqs = ",".join(str(job["seq"]) for job in shell.lines("claim", "jobs", "--node", "me", "--max", "9"))
        shell.json("nack", "jobs", "--node", "me", "--seqs", seqs)
    assert shell.lines("claim", "jobs", "--node", "me", "--max", "9") == []
    assert shell.json("show", "jobs")["dead_lettered"] == 2
    steps = shell.lines("history", "jobs")
    events = [(step["event"], step.get("seq")) for step in steps if step["event"] not in ("restarted", "enqueued")]
    assert events == [
        *([("claimed", 1), ("claimed", 2), ("nacked", 1), ("nacked", 2)] * 2),
        ("dead_lettered", 1),
        ("dead_lettered", 2),
    ]
    assert shell.lines("history", "jobs", "--from", str(steps[1]["at"]), "--limit", "3") == steps[2:5]
    code, _, err = shell("history", "jobs", "--limit", "2")
    assert code == 0
    assert "go on with --from 2" in err
    assert shell.json("redrive", "dead", "--match", "other-*")["redriven"] == 0
    done = shell.json("redrive", "dead", "--match", "t-*", "--limit", "1")
    assert done == {"topic": "dead", "redriven": 1, "queues": {"jobs": 1}, "skipped": 0}
    assert shell.json("redrive", "dead", "--rate", "1000")["redriven"] == 1
    assert [job["data"] for job in shell.lines("claim", "jobs", "--node", "me", "--max", "9")] == ["one", "two"]


def test_what_is_refused(shell: Shell) -> None:
    for words, said in (
        (("show", "nowhere"), "there is no topic 'nowhere'"),
        (("claim", "nowhere", "--node", "n"), "there is no topic 'nowhere'"),
        (("ack", "jobs", "--node", "n", "--seqs", "1,2", "--leases", "lease_1"), "2 seqs came with 1 leases"),
        (("ack", "jobs", "--node", "n", "--seqs", "1", "--leases", "x"), "'x'"),
        (("claim", "jobs", "--node", "n" * 129), "128 bytes"),
        (("put", "jobs", "--at", "2030-01-01", "--delay", "1s"), "not both"),
    ):
        code, out, err = shell(*words)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert said in err
    with pytest.raises(SystemExit, match="2"):
        shell.raw("queue", "show", "a", "b", "c", *shell.options)


def test_a_key_is_for_a_server(shell: Shell) -> None:
    if shell.server is None:
        for words in (("show", "data", "jobs", "--key", KEY), ("ls",)):
            with pytest.raises(SystemExit, match="2"):
                shell.raw("queue", *words)
    else:
        host, port = shell.server.address
        code, _, err = shell.raw("queue", "show", "jobs", "--server", f"{host}:{port}")
        assert (code, "needs a key and none was given" in err) == (2, True)


# ── the client by itself ──────────────────────────────────────────────────────────────────────


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path, api_keys=KEY).start(key=KEY) as running:
        with running.client(KEY) as api:
            api.create_topic("q", type="queue")
            api.create_topic("log")
        yield running


def url(server: Server) -> str:
    return f"http://{server.address.host}:{server.address.port}"


def test_errors_of_a_server_are_those_of_the_engine(server: Server) -> None:
    with Client(url(server), key=KEY) as client:
        with pytest.raises(TopicNotFound, match="no topic 'nowhere'"):
            RemoteQueue(client, "nowhere").claim("n")
        with pytest.raises(NotAQueue):
            RemoteQueue(client, "log").ack("n", [1])
        with pytest.raises(BadInput):
            RemoteQueue(client, "q").claim("")
    with Client(url(server), key="wrong") as client, pytest.raises(Refused, match="a valid key"):
        RemoteQueue(client, "q").counts()


def test_a_remote_database_configures_topics_as_an_embedded_one(server: Server) -> None:
    with RemoteDatabase(Client(url(server), key=KEY)) as database:
        database.topic("log", cap_records=9)
        database.topic("log", durability="fsync")
        state = database.topic("log").state()
        assert (state.config.cap_records, state.config.durability, state.head_seq) == (9, "fsync", 0)
        assert [info.topic for info in database.topics()] == ["log", "q"]
        assert [info.topic for info in database.topics("l")] == ["log"]
        assert database.queue("q", lease_ms=5_000).topic.state().config.lease_ms == 5_000
        assert database.queue("new").counts() == (0, 0, 0)
        with pytest.raises(TopicNotFound):
            database.topic("nowhere", create=False, cap_records=1)
        with pytest.raises(Refused):
            database.queue("log")
        with pytest.raises(NotAQueue):
            database.queue("log", create=False).counts()


def test_a_remote_queue_takes_and_returns_what_an_embedded_one_does(server: Server) -> None:
    with RemoteDatabase(Client(url(server), key=KEY)) as database:
        queue = database.queue("q", create=False)
        done = queue.put([b"\xff", {"n": 2}], tag=["a", None], meta={"m": 1}, priority=3)
        assert (done.first_seq, done.last_seq, done.count) == (1, 2, 2)
        assert queue.put("alone", key="k").seqs == queue.put("alone", key="k").seqs == range(3, 4)
        jobs = queue.claim("n", 9)
        assert [(job.data, job.tag) for job in jobs] == [(b"\xff", "a"), ({"n": 2}, None), ("alone", None)]
        assert jobs[0].meta is not None
        assert jobs[0].meta["m"] == 1
        assert queue.ack("n", jobs).count == 3
        assert [step["event"] for step in queue.history().read(0, 1)] == ["enqueued"]
        table = queue.history().to_arrow()
        assert table["event"].to_pylist()[-1] == "acked"
        assert table.num_rows == len(queue.history().read(0, 100))


@pytest.mark.parametrize("address", ["", "ftp://x", "http://", "http://x:0", "http://x:many"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(BadInput):
        Client(address)


def test_a_server_that_is_not_there() -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(Unavailable, match="cannot be reached"):
        client.get("/v0/health")


def test_a_connection_that_was_closed_meanwhile_is_made_again(server: Server) -> None:
    """What may be asked twice is; a write has a key, the caller's or the client's, so it is written once."""
    with Client(url(server), key=KEY) as client:
        queue = RemoteQueue(client, "q")
        assert queue.put([1]).count == 1
        _break(client)
        assert queue.counts().ready == 1
        _break(client)
        assert queue.put([2]).count == 1
        _break(client)
        assert queue.put([3], key="k").count == 1
        _break(client)
        assert [job.data for job in queue.claim("n", 9)] == [1, 2, 3]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_worker_of_a_remote_queue_counts_what_it_did(server: Server, is_async: bool) -> None:
    """Every job was counted as neither done nor failed, and `wait` waited for ever."""
    seen: list[int] = []

    def handle(job: Any) -> None:
        seen.append(job.data)
        if job.data == 3 and job.deliveries == 1:
            raise ValueError("try again")

    async def handle_later(job: Any) -> None:
        handle(job)

    with Client(url(server), key=KEY) as client:
        queue = RemoteQueue(client, "worked")
        client.put("/v0/topics/worked", {"type": "queue"})
        queue.put([1, 2, 3])
        function = handle_later if is_async else handle
        with tidelog.Worker(
            queue, function, node="w", concurrency=2, lease_ms=300, retries=tidelog.backoff(0), poll_ms=1
        ) as worker:
            assert worker.wait(4, 60)
        assert worker.stats == (3, 1, 0)
        assert sorted(seen) == [1, 2, 3, 3]
        assert queue.topic.state().count == 0
        queue.put([4])
        (job,) = queue.claim("n")
        assert queue.extend("n", [job], lease_ms=5_000).deadlines.keys() == {job.seq}
        assert queue.nack("n", [job]) == (1, [], 1, 0)
        assert queue.ack("n", [job]).skipped == [job.seq]


def _break(client: Client) -> None:
    """As if the server had closed what is idle."""
    for connection in client._idle:
        assert connection.sock is not None
        connection.sock.close()
