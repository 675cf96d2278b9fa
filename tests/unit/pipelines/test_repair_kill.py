"""A repair that is ended anywhere has happened or has not: no row that the log cannot give back is gone.

Method: a table of files of ours and of others, across the topic's floor, with a deleted record in each; a repair ends
at each of its steps and is run again.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from tests.unit.pipelines.helpers import FORMATS, PipelineHarness, Row, table_rows
from tests.unit.pipelines.test_export import Killed, Killer

from tidelog.pipelines.export_job import Sizes
from tidelog.pipelines.table_formats.interface import Format

FLOOR, DELETED = 71, (75, 110, 150)


def prepare(root: Path, format: Format) -> PipelineHarness:
    """200 records: 1 to 100 compacted by others, the rest in files of ours; the log has those from 71 on."""
    harness = PipelineHarness(root, format)
    harness.sizes = Sizes(file_bytes=2_500, age_ms=1_000, commit_bytes=5_000)
    harness.fill(100)
    harness.export_once()
    if format == "delta":
        DeltaTable(harness.table).optimize.compact()
    else:
        whole = pq.read_table(harness.table)
        for path in harness.files():
            path.unlink()
        pq.write_table(whole.replace_schema_metadata(None), Path(harness.table) / "other.parquet")
    harness.fill(100, start=100)
    harness.export_once()
    with harness.engine() as engine:
        engine.topic("orders", cap_records=200 - FLOOR + 1)
        engine.topic("orders").delete(seqs=list(DELETED))
        engine.checkpoint()
    return harness


def seen(harness: PipelineHarness) -> list[Row]:
    if harness.format == "delta":
        return table_rows(DeltaTable(harness.table).to_pyarrow_table())
    return table_rows(pq.read_table(harness.table))


@pytest.mark.parametrize("format", FORMATS)
def test_every_step_of_a_repair_may_be_the_last(format: Format, tmp_path: Path) -> None:
    prepare(tmp_path / "whole", format)
    counting = Killer()
    steps, at = 1, 0
    while at <= steps:
        root = tmp_path / str(at)
        shutil.copytree(tmp_path / "whole", root)
        harness = PipelineHarness(root, format)
        harness.sizes = Sizes(file_bytes=2_500, age_ms=1_000, commit_bytes=5_000)
        before = Counter(seen(harness))
        wanted = Counter({row: count for row, count in before.items() if row[0] not in DELETED})
        harness.on_step = Killer(at) if at else counting
        if at:
            with pytest.raises(Killed) as caught:
                harness.reconcile(repair=True)
            now = Counter(seen(harness))
            assert not (wanted - now) or format == "parquet", f"a row is gone at {caught.value}"
            if format == "delta":
                assert now in (before, wanted), f"half of a repair is seen at {caught.value}"
            harness.on_step = lambda _: None
            harness.export_once(onGap="skip")
            assert not wanted - Counter(seen(harness)), f"a row is gone after {caught.value}"
        assert harness.reconcile(repair=True).whole
        assert Counter(seen(harness)) == wanted
        steps = len(counting.steps)
        at += 1
    assert steps > 7
