"""`tidelog export`: a topic into a table in this process. Its tables and Spark: `tests/spark/test_export_here.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from tests.kit.commands import Run, json_result, runner

import tidelog
from tidelog.pipelines import table_formats


@pytest.fixture
def run(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    write(tmp_path, 0, 100)
    return runner(capsysbinary, monkeypatch, "export", directory=tmp_path)


def write(root: Path, start: int, stop: int) -> None:
    with tidelog.open(str(root / "data")) as database:
        database.topic("orders").append([{"n": number} for number in range(start, stop)], tag="x")


def test_a_table_begins_and_continues(run: Run, tmp_path: Path) -> None:
    done = json_result(run("data", "orders", "orders.parquet", "--json"))
    assert (done["first"], done["stop"], done["rows"], done["commits"]) == (1, 101, 100, 1)
    table = pq.read_table("orders.parquet")
    assert (table.num_rows, table["data"][99].as_py()) == (100, b'{"n":99}')
    write(tmp_path, 100, 130)
    code, _, err = run("data", "orders", "orders.parquet")
    assert (code, "ends with seq 100 of orders; nothing was written" in err) == (2, True)
    done = json_result(run("data", "orders", "orders.parquet", "--since-last", "--json"))
    assert (done["first"], done["rows"]) == (101, 30)
    done = json_result(run("data", "orders", "orders.parquet", "--since-last", "--json"))
    assert (done["rows"], done["commits"]) == (0, 0)
    assert pq.read_table("orders.parquet")["seq"].to_pylist() == list(range(1, 131))
    place = table_formats.find_place("orders.parquet", "the table")
    assert table_formats.detect_format(place.disk, place.path) == "parquet"


def test_columns_are_inferred_and_bad_records_rescued(run: Run, tmp_path: Path) -> None:
    with tidelog.open(str(tmp_path / "data")) as database:
        database.topic("orders").append([b"no JSON"])
    assert "stands for orders up to seq 101" in run("data", "orders", "typed", "--infer")[1]
    table = ds.dataset([str(path) for path in Path("typed").glob("*.parquet")]).to_table()
    assert table["n"].to_pylist() == [*range(100), None]
    assert table["_rescued"].to_pylist()[-1] == "no JSON"


def test_what_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, said in (
        (("data", "nowhere", "out"), "there is no topic 'nowhere' in data"),
        (("nowhere", "orders", "out"), "there is nothing at nowhere"),
        (("http://127.0.0.1:1", "orders", "out"), "cannot be reached"),
    ):
        code, out, err = run(*words)
        assert (code, out, said in err) == (2, "", True), err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]
    for name in [name for name in sys.modules if name.startswith("tidelog.pipelines")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(tidelog, "pipelines")
    monkeypatch.setitem(sys.modules, "pyspark", None)
    code, _, err = run("data", "orders", "out")
    assert (code, "pip install 'tidelog[spark,lake]'" in err) == (2, True)
