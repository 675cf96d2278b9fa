"""Registered schemas: which fields a topic has from which seq on, and exports by them."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from deltalake import DeltaTable
from tests.unit.pipelines.helpers import PipelineHarness
from tests.unit.spark.helpers import run_server

import tidelog
from tidelog import pipelines
from tidelog.addresses import Location
from tidelog.cli.main import main
from tidelog.errors import BadInput, NotFound, TopicNotFound
from tidelog.pipelines import record_mapping
from tidelog.pipelines.export_job import ExportJob
from tidelog.pipelines.record_mapping import RecordMapping
from tidelog.spark import topic_schemas


def fill(data: Path, count: int) -> None:
    with tidelog.open(str(data), threads=False) as log:
        log.topic("orders").append([{"n": number, "text": f"x{number}", "more": 1.5} for number in range(count)])


def test_a_schema_applies_from_the_next_record_or_from_a_seq(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    fill(tmp_path / "data", 10)
    assert pipelines.schema_history(data, "orders") == []
    assert pipelines.set_schema(data, "orders", "n bigint").first_seq == 11
    assert pipelines.set_schema(data, "orders", "n bigint, text string", first_seq=15).first_seq == 15
    found = pipelines.schema_history(data, "orders")
    assert [(each.first_seq, each.schema) for each in found] == [(11, "n bigint"), (15, "n bigint, text string")]
    fields, until = topic_schemas.schema_at(found, 3, "orders")
    assert (fields.names, until) == (["n"], 15), "records before the first schema have it"
    assert topic_schemas.schema_at(found, 15, "orders")[1] is None
    with tidelog.open(data, threads=False) as log:
        log.drop("orders")
    fill(tmp_path / "data", 1)
    assert pipelines.schema_history(data, "orders") == [], "those of a dropped topic are not of the new one"


def test_a_server_and_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "data", 3)
    with run_server(str(tmp_path / "data")) as (_, address):
        assert main(["schema", "set", address, "orders", "n int", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["first_seq"] == 4
        assert main(["schema", "set", address, "orders", "text string"]) == 2
        assert "narrows" in capsys.readouterr().err
        assert main(["schema", "history", address, "orders"]) == 0
        assert "n int" in capsys.readouterr().out
    assert main(["schema", "show", str(tmp_path / "data"), "orders"]) == 0
    assert "from seq 4 on: n int" in capsys.readouterr().out


def test_an_export_has_the_schema_of_each_range(tmp_path: Path) -> None:
    harness = PipelineHarness(tmp_path, "delta")
    data = harness.data
    fill(tmp_path / "data", 10)
    pipelines.set_schema(data, "orders", "n bigint", first_seq=1)
    pipelines.set_schema(data, "orders", "n bigint, text string")
    fill(tmp_path / "data", 10)
    pipelines.set_schema(data, "orders", "n bigint, text string, more double")
    fill(tmp_path / "data", 10)

    def schema_of(seq: int) -> tuple[RecordMapping, int | None]:
        history = topic_schemas.read_history(Location.parse(data), "orders")
        fields, until = topic_schemas.schema_at(history, seq, "orders")
        return record_mapping.new_mapping(fields), until

    harness.mapping = schema_of(1)[0]
    with harness.open_table() as table:
        job = ExportJob(harness.options(), table, lambda _: harness.mapping, harness.context())
        job.use_schemas(schema_of)
        with closing(job):
            done = job.run()
    assert (done.rows, done.commits) == (30, 3)
    rows = DeltaTable(harness.table).to_pyarrow_table().sort_by("seq")
    assert rows["text"].null_count == 10
    assert rows["more"].to_pylist() == [None] * 20 + [1.5] * 10
    with harness.open_table(write=False) as table:
        last = table.last_commit()
    assert last is not None
    assert [era.first for era in last.eras] == [0, 11, 21]
    assert harness.reconcile().equal


@pytest.mark.parametrize(
    "text", ["", "n", "n strung", "n int, ", "n int, n int", "a array<int>", "n decimal(50,2)", "n int(3)"]
)
def test_a_text_that_is_no_schema(text: str) -> None:
    with pytest.raises(BadInput, match="does not read"):
        topic_schemas.parse_fields(text)


def test_texts_that_are_schemas() -> None:
    found = topic_schemas.parse_fields("a string,`b c` BIGINT , d decimal(5, 2), e timestamp")
    assert [field.simpleString() for field in found.fields] == [
        "a:string",
        "b c:bigint",
        "d:decimal(5,2)",
        "e:timestamp",
    ]


def test_what_is_refused(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    fill(tmp_path / "data", 3)
    with pytest.raises(TopicNotFound):
        pipelines.set_schema(data, "nope", "n int")
    with pytest.raises(BadInput, match="name of a column of ours"):
        pipelines.set_schema(data, "orders", "seq int")
    pipelines.set_schema(data, "orders", "n int")
    with pytest.raises(BadInput, match="'n' is int there and is string"):
        pipelines.set_schema(data, "orders", "n string")
    with pytest.raises(BadInput, match="give a later seq"):
        pipelines.set_schema(data, "orders", "n int, m int", first_seq=2)
    with pytest.raises(BadInput, match="object store"):
        pipelines.schema_history("s3://bucket/data", "orders")
    with pytest.raises(NotFound, match="tidelog schema set"):
        topic_schemas.schema_at([], 1, "orders")
    with pytest.raises(BadInput, match="choose one of the two"):
        pipelines.export(data, "orders", str(tmp_path / "table"), schema="n int", registered_schema=True)
    assert len(pipelines.schema_history(data, "orders")) == 1
