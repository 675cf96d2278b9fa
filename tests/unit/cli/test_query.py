"""`tidelog query`: SQL over topics of a directory. The server's form is in `tests/e2e/test_database_commands.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.kit.commands import Run, runner

import tidelog


@pytest.fixture
def run(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    with tidelog.open(str(tmp_path / "data")) as database:
        orders = database.topic("orders.eu")
        orders.append([{"sku": "A", "n": 1}, {"sku": "B", "n": 2}], tag="x", node="shop")
        orders.append([b"text", b"\xff"])
        database.topic("names").append([{"sku": "A", "name": "apple"}])
    return runner(capsysbinary, monkeypatch, "query", directory=tmp_path)


def rows(result: tuple[int, str, str]) -> list[dict[str, object]]:
    code, out, err = result
    assert (code, err) == (0, ""), result
    return [json.loads(line) for line in out.splitlines()]


def test_topics_are_tables_and_join(run: Run) -> None:
    sql = """select o.seq, n.data->>'name' as name, o.tag, o.node from "orders.eu" o join names n
             on o.json and o.data->>'sku' = n.data->>'sku'"""
    assert rows(run("data", sql, "--json")) == [{"seq": 1, "name": "apple", "tag": "x", "node": "shop"}]
    code, out, err = run("data", 'select count(*) as number, max(seq) as last from "orders.eu"')
    assert (code, err) == (0, "1 row\n")
    assert out.splitlines()[0].split() == ["number", "last"]
    assert out.splitlines()[2].split() == ["4", "4"]


def test_columns_are_typed_and_bytes_that_are_no_text_are_apart(run: Run) -> None:
    sql = 'select seq, data, data_bytes, tag, year(ts) > 2000 as now from "orders.eu" where not json order by seq'
    assert rows(run("data", sql, "--json")) == [
        {"seq": 3, "data": "text", "data_bytes": None, "tag": None, "now": True},
        {"seq": 4, "data": None, "data_bytes": "/w==", "tag": None, "now": True},
    ]
    assert run("data", 'select data from "orders.eu" where seq = 9')[1].split()[0] == "data"


def test_a_topic_is_used_twice_in_one_query(run: Run) -> None:
    sql = "select count(*) as pairs from names a, names b"
    assert rows(run("data", sql, "--json")) == [{"pairs": 1}]


def test_what_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, said in (
        (("data", "select * from nowhere"), "DuckDB: Catalog Error"),
        (("data", "selec 1"), "correct the query"),
        (("nowhere", "select * from names"), "there is nothing at nowhere"),
    ):
        code, out, err = run(*words)
        assert (code, out, said in err) == (2, "", True), err
    monkeypatch.setitem(sys.modules, "duckdb", None)
    code, _, err = run("data", "select 1")
    assert (code, "pip install 'tidelog[frames]'" in err) == (2, True)
