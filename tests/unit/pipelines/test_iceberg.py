"""Iceberg tables of a SQL catalog, in a directory and in a bucket: table = log, also beside other programs."""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyiceberg.types import StringType
from tests.kit.emulators import run_emulator
from tests.kit.iceberg_rest import run_rest_catalog
from tests.kit.s3 import SECRET_KEY, S3Server
from tests.unit.pipelines.helpers import PipelineHarness, iceberg_table
from tests.unit.pipelines.test_export import Killed, Killer

from tidelog.disk.interface import join
from tidelog.errors import BadInput, Locked, NotFound, StoreUnavailable
from tidelog.pipelines import table_formats
from tidelog.pipelines.table_formats.iceberg import IcebergReader, IcebergScan, latest_scan
from tidelog.pipelines.table_formats.interface import StagedFileMissing

REST = pytest.param("rest", marks=pytest.mark.sweep)
AZURE = pytest.param("abfs", marks=pytest.mark.sweep)


@pytest.fixture(scope="module")
def rest_catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with run_rest_catalog(tmp_path_factory.mktemp("rest")) as address:
        yield address


@pytest.fixture(params=["directory", "bucket", REST, AZURE])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PipelineHarness]:
    if request.param == "abfs":
        (tmp_path / "store").mkdir()
        with run_emulator(request.param, tmp_path / "store") as emulator:
            yield PipelineHarness(tmp_path, "iceberg", place=iceberg_table(tmp_path, emulator=emulator))
        return
    server: S3Server | None = request.getfixturevalue("s3_server") if request.param == "bucket" else None
    rest: str | None = request.getfixturevalue("rest_catalog") if request.param == "rest" else None
    yield PipelineHarness(tmp_path, "iceberg", place=iceberg_table(tmp_path, server=server, rest=rest))


@pytest.fixture(params=["sql", REST])
def local(request: pytest.FixtureRequest, tmp_path: Path) -> PipelineHarness:
    rest: str | None = request.getfixturevalue("rest_catalog") if request.param == "rest" else None
    return PipelineHarness(tmp_path, "iceberg", place=iceberg_table(tmp_path, rest=rest))


def test_a_table_is_its_topic(harness: PipelineHarness) -> None:
    harness.fill(300)
    done = harness.export_once()
    assert (done.rows, done.stop) == (300, 301)
    assert done.commits > 1
    harness.check()
    assert harness.export_once().commits == 0
    harness.fill(50, start=300)
    assert harness.export_once().rows == 50
    harness.check()
    found = harness.reconcile()
    assert found.equal
    assert (found.log_rows, found.table_rows) == (350, 350)


def test_the_position_is_in_the_snapshot_and_in_the_table(local: PipelineHarness) -> None:
    local.fill(20)
    local.export_once()
    table = local.iceberg()
    for found in (table.properties, table.current_snapshot().summary.additional_properties):
        assert (found["tidelog.topic"], found["tidelog.next_seq"]) == ("orders", "21")


def other_table(local: PipelineHarness, root: Path, name: str) -> PipelineHarness:
    """Return another table of the topic, in the same catalog."""
    assert local.place.catalog is not None
    uri = local.place.catalog.properties["uri"]
    place = iceberg_table(root, name, rest=uri if uri.startswith("http") else None)
    return PipelineHarness(root, "iceberg", place=place)


def test_an_export_that_is_killed_anywhere_goes_on(local: PipelineHarness, tmp_path: Path) -> None:
    local.fill(60)
    steps = local.on_step = Killer()
    local.export_once()
    for at in range(1, len(steps.steps) + 1, 2):
        again = other_table(local, tmp_path, f"killed{at}")
        again.on_step = Killer(at)
        with pytest.raises(Killed):
            again.export_once()
        again.on_step = Killer()
        again.export_once()
        again.check()


def test_a_second_exporter_of_a_table_loses(local: PipelineHarness) -> None:
    """Without an own check, pyiceberg would repeat the commit after the other one and double its rows."""
    local.fill(20)
    local.export_once()
    local.fill(20, start=20)
    other = PipelineHarness(Path(local.data).parent, "iceberg", place=local.place)

    def race(step: str) -> None:
        if step == "write the commit":
            local.on_step = Killer()
            other.export_once()

    local.on_step = race
    with pytest.raises(Locked, match="nothing was committed"):
        local.export_once()
    local.check()


def test_a_commit_that_meets_another_program_is_tried_again(local: PipelineHarness) -> None:
    local.fill(20)
    local.export_once()
    local.fill(20, start=20)
    met: list[str] = []

    def other(step: str) -> None:
        if step == "write the commit" and not met:
            met.append(step)
            local.iceberg().delete("seq = 3")

    local.on_step = other
    local.export_once()
    assert met
    assert [row[0] for row in local.table_rows()] == [seq for seq in range(1, 41) if seq != 3]


def test_a_commit_whose_answer_was_lost_is_recognised(local: PipelineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    local.fill(20)
    with local.open_table() as table:
        write = table._write  # type: ignore[attr-defined]

        def lose(commit: Any) -> None:
            write(commit)
            write(commit)

        monkeypatch.setattr(table, "_write", lose)
        with local.export() as job:
            job._table = table
            job.run()
    local.check()


def compact(table: Any) -> None:
    """Write all rows into one file, as a compaction does."""
    table.overwrite(table.scan().to_arrow())


def expire(table: Any) -> None:
    compact(table)
    table.maintenance.expire_snapshots().older_than(datetime.datetime.now() + datetime.timedelta(days=1)).commit()


def add_column(table: Any) -> None:
    with table.update_schema() as update:
        update.add_column("note", StringType())


@pytest.mark.parametrize("change", [compact, expire, add_column])
def test_a_table_is_its_topic_after_what_others_do(local: PipelineHarness, change: Callable[[Any], None]) -> None:
    local.fill(100)
    local.export_once()
    change(local.iceberg())
    assert local.reconcile().equal
    local.fill(30, start=100)
    assert local.export_once().first == 101
    assert local.reconcile().equal
    local.check()


def test_rows_that_others_delete_change_and_add_are_differences_and_repaired(harness: PipelineHarness) -> None:
    harness.fill(120)
    harness.export_once()
    table = harness.iceberg()
    table.delete("seq >= 10 and seq < 15")
    rows = table.scan(row_filter="seq = 50").to_arrow()
    table.append(rows)
    table.append(rows.set_column(rows.schema.get_field_index("seq"), rows.schema.field("seq"), pa.array([9_999])))
    found = harness.reconcile()
    assert found.difference is not None
    assert found.difference.seq == 10
    assert found.beyond == 1
    harness.reconcile(repair=True)
    assert [row[0] for row in harness.table_rows()] == [*range(1, 121), 9_999]
    assert harness.reconcile().beyond == 1, "a row with a seq that the log does not have is reported and left"


def test_a_deleted_record_is_removed_by_a_repair(local: PipelineHarness) -> None:
    local.fill(40)
    local.export_once()
    with local.engine() as engine:
        engine.topic("orders").delete(seqs=[7])
    assert not local.reconcile().equal
    assert local.reconcile(repair=True).whole
    local.check()


def test_a_staged_file_that_is_gone_is_not_committed(local: PipelineHarness) -> None:
    local.fill(20)

    def lose(step: str) -> None:
        if step == "verify staged files":
            for path in Path(local.iceberg().location().removeprefix("file://")).glob("data/part-*"):
                path.unlink()

    local.on_step = lose
    with pytest.raises(StagedFileMissing, match="nothing was committed"):
        local.export_once()
    local.on_step = Killer()
    local.export_once()
    local.check()


def test_a_table_of_another_topic_or_of_no_export_is_refused(local: PipelineHarness) -> None:
    local.fill(20)
    local.export_once()
    with local.engine() as engine:
        engine.topic("other").append([{"n": 1}])
    with pytest.raises(BadInput, match="is the table of topic 'orders', not of 'other'"):
        local.export_once(subscribe="other")
    table = local.iceberg()
    with table.transaction() as transaction:
        transaction.remove_properties("tidelog.commit")
    with pytest.raises(BadInput, match="no commit of an export; nothing was written"):
        local.export_once()


def test_every_reader_reads_it(harness: PipelineHarness) -> None:
    harness.fill(100)
    harness.export_once()
    harness.iceberg().delete("seq = 1")
    rows = harness.iceberg().scan().to_arrow()
    assert duckdb.from_arrow(rows).aggregate("count(*), sum(seq)").fetchall() == [(99, 5049)]
    assert harness.place.catalog is not None
    reader = pickle.loads(pickle.dumps(IcebergReader(latest_scan(harness.place.catalog, None))))
    parts = pickle.loads(pickle.dumps(reader.parts()))
    assert len(parts) > 1
    assert sum(batch.num_rows for part in parts for batch in reader.read(part)) == 99


def test_secrets_are_not_shown(tmp_path: Path, s3_server: S3Server) -> None:
    harness = PipelineHarness(tmp_path, "iceberg", place=iceberg_table(tmp_path, server=s3_server))
    harness.fill(20)
    harness.export_once()
    assert harness.place.catalog is not None
    scan = latest_scan(harness.place.catalog, None)
    assert isinstance(scan, IcebergScan)
    assert SECRET_KEY not in f"{harness.place!r} {scan!r}"
    with closing(table_formats.open_table(*harness.place[:2], catalog=harness.place.catalog, write=True)) as table:
        file = table.disk.open(join(table.path, table.visible_files()[0]))
        assert SECRET_KEY.encode() not in file.read(0, file.size())
        file.close()
    assert SECRET_KEY not in harness.iceberg().metadata.model_dump_json()


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    for address in ("iceberg://prod", "iceberg://prod/orders", "iceberg://prod/shop..orders", "iceberg:///a.b"):
        with pytest.raises(BadInput, match=r"iceberg://CATALOG/NAMESPACE\.TABLE"):
            table_formats.find_place(address, "the table", None)
    with pytest.raises(BadInput, match="names no catalog"):
        table_formats.open_table(*table_formats.find_place(str(tmp_path), "the table")[:2], "iceberg", write=True)
    place = iceberg_table(tmp_path)
    with pytest.raises(NotFound, match=r"there is no table iceberg://tests/shop\.orders"):
        table_formats.open_table(*place[:2], catalog=place.catalog, write=False)
    with pytest.raises(BadInput, match="leave the format out"):
        table_formats.open_table(*place[:2], "delta", catalog=place.catalog, write=True)


def test_a_catalog_that_is_away_or_not_configured_is_an_error() -> None:
    for options, kind in (({}, BadInput), ({"type": "rest", "uri": "http://127.0.0.1:9"}, StoreUnavailable)):
        place = table_formats.find_place("iceberg://nowhere/a.b", "the table", options)
        with pytest.raises(kind, match=r"the catalog of iceberg://nowhere/a\.b cannot be"):
            table_formats.open_table(*place[:2], catalog=place.catalog, write=True)
