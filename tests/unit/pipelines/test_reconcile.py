"""Reconcile finds what was planted, says where, and makes that range again and no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from tests.unit.pipelines.helpers import FORMATS, PipelineHarness

from tidelog.errors import Damaged
from tidelog.pipelines.compare import BLOCK_SEQS, BlockSums

Change = Callable[[pa.Table], pa.Table]


@pytest.fixture(params=FORMATS)
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> PipelineHarness:
    made = PipelineHarness(tmp_path, request.param)
    made.fill(300)
    made.export_once()
    return made


def missing(table: pa.Table) -> pa.Table:
    return pa.concat_tables([table.slice(0, 7), table.slice(8)])


def doubled(table: pa.Table) -> pa.Table:
    return pa.concat_tables([table, table.slice(7, 1)])


def changed(table: pa.Table) -> pa.Table:
    datas = table["data"].to_pylist()
    datas[7] = bytes([datas[7][0] ^ 1]) + datas[7][1:]
    return table.set_column(table.schema.get_field_index("data"), table.schema.field("data"), [datas])


def swapped(table: pa.Table) -> pa.Table:
    datas = table["data"].to_pylist()
    datas[7], datas[9] = datas[9], datas[7]
    return table.set_column(table.schema.get_field_index("data"), table.schema.field("data"), [datas])


def nulled(table: pa.Table) -> pa.Table:
    tags = pc.if_else(pa.array([at == 7 for at in range(len(table))]), None, table["tag"])
    return table.set_column(table.schema.get_field_index("tag"), table.schema.field("tag"), tags)


def plant(path: Path, change: Change) -> int:
    """Change the rows of a file behind everybody's back; return the seq of its eighth row."""
    table = pq.read_table(path)
    pq.write_table(change(table), path)
    found: int = table["seq"].to_pylist()[7]
    return found


@pytest.mark.parametrize("change", [missing, doubled, changed, swapped, nulled])
def test_planted_difference_is_found_and_repaired(harness: PipelineHarness, change: Change) -> None:
    files = harness.files()
    seq = plant(files[2], change)
    assert harness.table_rows() != harness.log_rows(), "something was planted"
    found = harness.reconcile()
    assert not found.equal
    assert found.difference is not None
    assert found.difference.seq == seq
    assert len(found.differing) == 1
    if change is missing:
        assert found.difference.table == "nothing"
    if change is doubled:
        assert found.difference.table.startswith("2 rows")
    if change is changed:
        assert f'"n":{seq - 1}' in found.difference.log
        assert f'"n":{seq - 1}' in found.difference.table
        assert found.difference.log != found.difference.table
    mended = harness.reconcile(repair=True)
    assert (mended.repaired, mended.equal) == (1, False)
    harness.check()
    assert harness.reconcile().equal
    assert len(set(files) - set(harness.files())) == 1, "one file was replaced, the others were left alone"
    harness.fill(20, start=300)
    harness.export_once()
    harness.check()


def test_rows_in_another_order_are_the_same_rows(harness: PipelineHarness) -> None:
    plant(harness.files()[1], lambda table: table.take(pa.array(range(len(table) - 1, -1, -1))))
    assert harness.reconcile().equal


def test_a_file_that_is_gone(harness: PipelineHarness) -> None:
    file = harness.files()[3]
    first = pq.read_table(file)["seq"].to_pylist()[0]
    file.unlink()
    found = harness.reconcile()
    assert found.difference is not None
    assert (found.difference.seq, found.difference.table) == (first, "nothing")
    assert harness.reconcile(repair=True).repaired == 1
    harness.check()


def test_rows_of_another_program(harness: PipelineHarness) -> None:
    extra = pq.read_table(harness.files()[2]).slice(3, 2)
    seq = extra["seq"].to_pylist()[0]
    _append(harness, extra)
    found = harness.reconcile()
    assert not found.equal
    assert found.difference is not None
    assert (found.difference.seq, found.difference.table.startswith("2 rows")) == (seq, True)
    harness.reconcile(repair=True)
    harness.check()
    assert harness.reconcile().equal


def test_rows_beyond_the_last_commit(harness: PipelineHarness) -> None:
    extra = pq.read_table(harness.files()[0]).slice(0, 2)
    later = pa.array([1000, 1001], pa.int64())
    _append(harness, extra.set_column(0, extra.schema.field("seq"), later))
    found = harness.reconcile()
    assert (found.equal, found.beyond, found.differing) == (False, 2, ())
    kept = harness.reconcile(repair=True)
    assert (kept.repaired, kept.left_beyond, kept.whole) == (0, 2, False)
    assert [row[0] for row in harness.table_rows()][-2:] == [1000, 1001], (
        "the log never had them: it cannot give them back"
    )
    harness.fill(800, start=300)
    assert harness.reconcile(repair=True).whole, "now it can"
    assert len(harness.table_rows()) == 300
    harness.export_once()
    harness.check()


def _append(harness: PipelineHarness, rows: pa.Table) -> None:
    if harness.format == "delta":
        write_deltalake(harness.table, rows, mode="append")
    else:
        pq.write_table(rows, Path(harness.table) / "stray.parquet")


def test_a_delta_table_that_was_compacted_is_still_the_log(tmp_path: Path) -> None:
    harness = PipelineHarness(tmp_path, "delta")
    harness.fill(300)
    harness.export_once()
    DeltaTable(harness.table).optimize.compact()
    assert len(harness.files()) == 1
    found = harness.reconcile()
    assert (found.equal, found.table_rows, len(found.foreign)) == (True, 300, 1)
    plant(harness.files()[0], missing)
    assert not harness.reconcile().equal
    harness.reconcile(repair=True)
    harness.check()
    harness.fill(20, start=300)
    harness.export_once()
    harness.check()


def test_a_record_that_was_deleted_since_is_a_difference_and_repair_takes_it_out(harness: PipelineHarness) -> None:
    with harness.engine() as engine:
        engine.topic("orders").delete(seqs=[123])
    found = harness.reconcile()
    assert found.difference is not None
    assert (found.difference.seq, found.difference.log) == (123, "nothing: it was deleted, or never there")
    harness.reconcile(repair=True)
    harness.check()


def test_records_that_the_log_lost_are_compared_with_the_commits(harness: PipelineHarness) -> None:
    with harness.engine() as engine:
        engine.topic("orders", cap_records=10)
    found = harness.reconcile()
    assert (found.equal, found.alone, found.table_rows) == (True, 290, 300)
    plant(harness.files()[0], changed)
    found = harness.reconcile()
    assert found.difference is not None
    assert found.difference.seq is None
    assert harness.files()[0].name in found.difference.table
    assert harness.reconcile(repair=True).repaired == 0, "nobody knows what should be there"


def test_a_file_that_does_not_read(harness: PipelineHarness) -> None:
    harness.files()[1].write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(Damaged, match="cannot be read"):
        harness.reconcile()


def test_sums_by_block() -> None:
    import numpy as np

    one, other = BlockSums(100, 100 + 3 * BLOCK_SEQS), BlockSums(100, 100 + 3 * BLOCK_SEQS)
    seqs = np.arange(100, 100 + 3 * BLOCK_SEQS)
    hashes = np.arange(3 * BLOCK_SEQS, dtype=np.uint64)
    one.add(seqs, hashes)
    for part in np.array_split(np.random.default_rng(1).permutation(3 * BLOCK_SEQS), 5):
        other.add(seqs[part], hashes[part])
    assert list(one.differences(other)) == []
    other.add(seqs[BLOCK_SEQS : BLOCK_SEQS + 1], hashes[:1])
    assert list(one.differences(other)) == [(100 + BLOCK_SEQS, 100 + 2 * BLOCK_SEQS)]
