"""The same commands on a directory and on a server: the same answers. And commands that are made for a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract_http.server import Server
from tests.kit.commands import Run, runner

import tidelog

KEY = "s3cret"
READER = "reader"  # of one prefix
RECORDS = b'{"sku": "A", "n": 1}\n{"sku": "B", "n": 2}\n{"sku": "C", "n": 3}\n'


@pytest.fixture
def run(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("TIDELOG_SERVER", raising=False)
    monkeypatch.delenv("TIDELOG_KEY", raising=False)
    return runner(capsysbinary, monkeypatch, directory=tmp_path)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "s", api_keys=f"{KEY},{READER}:read:orders").start() as running:
        yield running


def url(server: Server) -> str:
    return f"http://{server.address.host}:{server.address.port}"


def normalized(value: Any) -> Any:
    """JSON without times, places and what differs by nature."""
    left_out = {"ts", "last_ts", "path", "first_ts", "last_commit", "ts_ms", "seconds", "id", "meant", "database"}
    left_out |= {
        "hot_bytes",
        "bytes_before",
        "bytes_after",
        "bytes_reclaimed",
        "stored_bytes",
        "actor",
        "hash",
        "files",
        "created_ms",
        "deadline_ms",
        "lease_id",
        "data_bytes",
    }
    if isinstance(value, dict):
        return {key: normalized(each) for key, each in value.items() if key not in left_out}
    return [normalized(each) for each in value] if isinstance(value, list) else value


COMMANDS = (
    ("topic write orders --json-lines --tag new", RECORDS),
    ("topic write users --json-lines --tag u1", b'{"name": "ann"}\n{"name": "bob"}\n'),
    ("topic config users compaction=latest_by_tag", b""),
    ("topic ls", b""),
    ("topic read orders --from 1", b""),
    ("topic latest users", b""),
    ("topic compact users", b""),
    ("topic follow orders --timeout 0", b""),
    ("topic config orders ttl_ms=7d", b""),
    ("topic config orders", b""),
    ("topic delete orders --seqs 2 --dry-run", b""),
    ("topic delete orders --seqs 2", b""),
    ("group commit orders billing 1", b""),
    ("group reset orders billing earliest --dry-run", b""),
    ("group hold orders billing 64m", b""),
    ("group ls orders", b""),
    ("group show orders billing", b""),
    ("group drop orders billing", b""),
    ("router add to-audit orders audit --filter new", b""),
    ("topic write orders --json-lines --tag new", b'{"sku": "D", "n": 4}\n'),
    ("router ls", b""),
    ("router show to-audit", b""),
    ("topic read audit", b""),
    ("router drop to-audit", b""),
    ("gaps orders", b""),
    ("retention simulate orders --cap-records 1", b""),
    ("topic seal orders", b""),
    ("tier status", b""),
    ("topic rewrite orders --force", b""),
    ("topic show orders", b""),
    ("erase run orders --seqs 1", b""),
    ("erase ls", b""),
    ("erase verify", b""),
    ("topic drop audit --yes", b""),
    ("topic read nowhere", b""),
)


def answers(run: Run, name_database: Callable[[list[str]], list[str]]) -> list[tuple[int, Any, Any]]:
    found = []
    for line, stdin in COMMANDS:
        code, out, err = run(*name_database(line.split()), "--json", stdin=stdin)
        errors = [json.loads(each).get("error") for each in err.splitlines()]
        found.append((code, [normalized(json.loads(each)) for each in out.splitlines()], errors))
    return found


def test_a_directory_and_a_server_answer_alike(run: Run, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_directory(words: list[str]) -> list[str]:
        at = 1 if words[0] == "gaps" else 2
        return [*words[:at], "data", *words[at:]]

    local = answers(run, in_directory)
    monkeypatch.setenv("TIDELOG_KEY", KEY)
    remote = answers(run, lambda words: [*words, "--server", url(server)])
    for (line, _), here, there in zip(COMMANDS, local, remote, strict=True):
        assert here == there, line
    assert [code for code, _, _ in local] == [0] * (len(COMMANDS) - 1) + [2]


def test_an_address_or_the_environment_name_a_server(run: Run, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("topic", "write", url(server), "orders", "--api-key", KEY, stdin=b"hello\n")[0] == 0
    assert run("topic", "read", url(server), "orders", "--key", KEY)[1] == "hello\n"
    monkeypatch.setenv("TIDELOG_SERVER", url(server))
    monkeypatch.setenv("TIDELOG_KEY", KEY)
    assert run("topic", "read", "orders")[1] == "hello\n"
    assert run("topic", "cat-record", "orders", "--seq", 1)[1] == "hello"
    done = json.loads(run("topic", "checkpoint", "--json")[1])
    assert done == {"path": url(server)}
    assert run("topic", "write", "orders", "--key", "once", stdin=b"x\n")[1].startswith("wrote 1 record, seq 2\n")
    assert run("topic", "write", "orders", "--key", "once", stdin=b"x\n")[1].startswith("wrote 1 record, seq 2\n")


def test_what_a_server_refuses(run: Run, server: Server) -> None:
    for words, said in (
        (("topic", "ls", url(server)), "key"),
        (("topic", "ls", url(server), "--key", "wrong"), "key"),
        (("topic", "ls", "http://127.0.0.1:1"), "cannot be reached"),
        (("topic", "read", url(server), "nowhere", "--key", KEY), "there is no topic 'nowhere'"),
        (("topic", "checkpoint", url(server), "--key", KEY, "--accept-loss"), "for a directory only"),
        (("tier", "status", url(server), "--key", KEY, "--cold", "x"), "for a directory only"),
        (("erase", "run", url(server), "t", "--key", KEY, "--seqs", "1", "--actor", "me"), "leave --actor out"),
        (("backup", "create", url(server), "b", "--key", KEY, "--rate", "1m"), "--rate is for a directory"),
    ):
        code, out, err = run(*words)
        assert (code, out, said in err) == (2, "", True), (words, err)


def test_top_query_bench_and_export_of_a_server(run: Run, server: Server) -> None:
    place = (url(server), "--key", KEY)
    with tidelog.connect(url(server), key=KEY) as database:
        orders = database.topic("orders", durability="fsync")
        orders.append([{"n": 1}, {"n": 2}])
        orders.group("billing").commit(1)
    found = json.loads(run("top", *place, "--once", "--interval", "0.1", "--json")[1])
    assert [(row["topic"], row["count"]) for row in found["topics"]] == [("orders", 2)]
    assert [(row["group"], row["records"]) for row in found["groups"]] == [("billing", 1)]
    assert found["fsyncs_per_s"] >= 0
    assert found["disk_free_bytes"] > 0
    found = json.loads(run("top", url(server), "--key", READER, "--once", "--interval", "0.1", "--json")[1])
    assert [row["topic"] for row in found["topics"]] == ["orders"]
    assert json.loads(run("query", *place, "select sum((data->>'n')::int) as n from orders", "--json")[1]) == {"n": 3}
    done = json.loads(run("bench", *place, "--seconds", "0.05", "--batch", 2, "--json")[1])
    assert done["appends"] > 0
    assert (done["bare"], done["ratio"]) == (None, None)
    assert json.loads(run("topic", "ls", *place, "--json")[1])["topics"][0]["topic"] == "orders", "no topic is left"
    assert len(json.loads(run("topic", "ls", *place, "--json")[1])["topics"]) == 1
    done = json.loads(run("export", *place, "orders", "orders.parquet", "--infer", "--json")[1])
    assert (done["rows"], done["stop"]) == (2, 3)


def test_a_follower_of_a_server_gets_records_as_they_come(run: Run, server: Server) -> None:
    with tidelog.connect(url(server), key=KEY) as database:
        database.topic("orders").append(b"one")
        code, out, _ = run("topic", "follow", url(server), "orders", "--key", KEY, "--timeout", "0")
        assert (code, out) == (0, "one\n")
