"""The commands of `tidelog router`, through `main`, on real files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.kit.commands import Run, runner


@pytest.fixture
def run(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsysbinary, monkeypatch, directory=tmp_path)


def test_a_router_is_made_shown_listed_and_dropped(run: Run) -> None:
    code, out, _ = run("router", "add", "data", "r", "orders", "audit", "--filter", "order-*", "--no-node")
    assert code == 0
    assert out.splitlines() == [
        "r: orders to audit, 0 records passed on",
        "  filter       Glob order-*",
        "  copies keep  data and meta and tag",
        "  guarantee    at_least_once",
    ]
    assert run("topic", "write", "data", "orders", "--tag", "order-7", stdin=b"one\ntwo\n")[0] == 0
    assert run("topic", "read", "data", "audit")[1] == "one\ntwo\n"
    code, out, err = run("router", "ls", "data", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "path": "data",
        "routers": [
            {
                "router": "r",
                "source": "orders",
                "dest": "audit",
                "preserve_node": False,
                "preserve_tag": True,
                "filter": ["tag", "Glob", "order-*"],
                "allow_cycle": False,
                "guarantee": "at_least_once",
                "forwarded_total": 2,
            }
        ],
    }
    listed = run("router", "ls", "data")[1]
    assert "Glob order-*" in listed
    assert listed.endswith("1 router\n")
    assert run("router", "ls", "data", "--source", "audit")[1] == "0 routers\n"
    assert json.loads(run("router", "show", "data", "r", "--json")[1])["forwarded_total"] == 2
    assert run("router", "drop", "data", "r")[1] == "dropped r; its copies stay\n"
    assert run("topic", "read", "data", "audit")[1] == "one\ntwo\n"


@pytest.mark.parametrize("verb", ["show", "drop"])
def test_a_router_that_is_not_there(run: Run, verb: str) -> None:
    run("topic", "write", "data", "t", stdin=b"x\n")
    code, out, err = run("router", verb, "data", "nobody")
    assert (code, out) == (2, "")
    assert err.startswith("tidelog: there is no router 'nobody'; nothing was done")


def test_what_is_refused_leaves_nothing(run: Run) -> None:
    code, _, err = run("router", "add", "data", "r", "a", "a", "--json")
    assert code == 2
    assert json.loads(err)["error"] == "bad_input"
    assert json.loads(run("topic", "ls", "data", "--json")[1])["topics"] == []
    assert run("router", "add", "data", "r", "a", "b", "--no-create")[0] == 2
