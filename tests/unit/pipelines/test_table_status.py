"""Where tables stand beside their topics."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from tests.unit.pipelines.helpers import FORMATS, PipelineHarness, iceberg_table

from tidelog import pipelines
from tidelog.cli.main import main
from tidelog.errors import NotFound
from tidelog.pipelines.table_formats.interface import Format


@pytest.mark.parametrize("format", FORMATS)
def test_states_of_a_table(tmp_path: Path, format: Format, capsys: pytest.CaptureFixture[str]) -> None:
    world = PipelineHarness(tmp_path, format)
    world.fill(60)
    world.export_once()

    def state() -> tuple[str, int, int | None]:
        (found,) = pipelines.status(world.data, [world.table])
        assert (found.topic, found.format) == ("orders", format)
        assert (found.lag_ms is None) == (found.lag_records is None)
        return found.state, found.next_seq, found.lag_records

    assert state() == ("current", 61, 0)
    world.fill(40, start=60)
    assert state() == ("lagging", 61, 40)
    assert main(["pipeline", "status", world.data, world.table, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lag_records"] == 40
    assert main(["pipeline", "status", world.data, world.table]) == 0
    assert "lagging" in capsys.readouterr().out
    with world.engine() as engine:
        engine.topic("orders", cap_records=20)
    assert state() == ("lost", 61, 40)
    assert main(["pipeline", "status", world.data, world.table]) == 1
    with world.engine() as engine:
        engine.drop("orders")
    assert state() == ("no topic", 61, None)
    world.fill(10)
    assert state() == ("recreated", 61, None)


def test_a_table_that_is_not_there_is_named(tmp_path: Path) -> None:
    world = PipelineHarness(tmp_path)
    world.fill(10)
    with pytest.raises(NotFound, match="no table at"):
        pipelines.status(world.data, [world.table])


def test_a_directory_stands_for_the_tables_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = PipelineHarness(tmp_path, "delta", table=str(tmp_path / "lake" / "orders"))
    world.fill(60)
    world.export_once()
    other = PipelineHarness(tmp_path, "parquet", table=str(tmp_path / "lake" / "eu" / "orders"))
    other.export_once()
    world.fill(40, start=60)
    lake = str(tmp_path / "lake")
    assert [(each.table, each.lag_records) for each in pipelines.status(world.data, [lake])] == [
        (f"{lake}/eu/orders", 40),
        (f"{lake}/orders", 40),
    ]
    assert main(["pipeline", "status", world.data, lake, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lag_records"] == 80


def test_a_catalog_or_a_namespace_stands_for_the_tables_of_exports_in_it(tmp_path: Path) -> None:
    world = PipelineHarness(tmp_path, "iceberg", place=iceberg_table(tmp_path))
    world.fill(60)
    world.export_once()
    PipelineHarness(tmp_path, "iceberg", place=iceberg_table(tmp_path, "again")).export_once()
    assert world.place.catalog is not None
    options = dict(world.place.catalog.properties)
    load_catalog("tests", **options).create_table("shop.foreign", pa.schema([("a", pa.int64())]))
    world.fill(40, start=60)
    for name in ("iceberg://tests", "iceberg://tests/shop"):
        found = pipelines.status(world.data, [name], storage_options=options)
        assert [(each.table, each.lag_records) for each in found] == [
            ("iceberg://tests/shop.again", 40),
            ("iceberg://tests/shop.orders", 40),
        ]
    with pytest.raises(NotFound, match="no namespace iceberg://tests/other"):
        pipelines.status(world.data, ["iceberg://tests/other"], storage_options=options)
