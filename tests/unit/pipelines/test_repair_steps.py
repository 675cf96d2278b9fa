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
from tests.unit.pipelines.test_export import Killed, Killer
from tests.unit.pipelines.world import FORMATS, Bench, Row, rows_of

from tidelog.pipelines.sizing import Sizes
from tidelog.pipelines.tables import Format

FLOOR, DELETED = 71, (75, 110, 150)


def prepare(root: Path, format: Format) -> Bench:
    """200 records: 1 to 100 compacted by others, the rest in files of ours; the log has those from 71 on."""
    bench = Bench(root, format)
    bench.sizes = Sizes(file_bytes=2_500, age_ms=1_000, commit_bytes=5_000)
    bench.fill(100)
    bench.once()
    if format == "delta":
        DeltaTable(bench.table).optimize.compact()
    else:
        whole = pq.read_table(bench.table)
        for path in bench.files():
            path.unlink()
        pq.write_table(whole.replace_schema_metadata(None), Path(bench.table) / "other.parquet")
    bench.fill(100, start=100)
    bench.once()
    with bench.engine() as engine:
        engine.topic("orders", cap_records=200 - FLOOR + 1)
        engine.topic("orders").delete(seqs=list(DELETED))
        engine.checkpoint()
    return bench


def seen(bench: Bench) -> list[Row]:
    if bench.format == "delta":
        return rows_of(DeltaTable(bench.table).to_pyarrow_table())
    return rows_of(pq.read_table(bench.table))


@pytest.mark.parametrize("format", FORMATS)
def test_every_step_of_a_repair_may_be_the_last(format: Format, tmp_path: Path) -> None:
    prepare(tmp_path / "whole", format)
    counting = Killer()
    steps, at = 1, 0
    while at <= steps:
        root = tmp_path / str(at)
        shutil.copytree(tmp_path / "whole", root)
        bench = Bench(root, format)
        bench.sizes = Sizes(file_bytes=2_500, age_ms=1_000, commit_bytes=5_000)
        before = Counter(seen(bench))
        wanted = Counter({row: count for row, count in before.items() if row[0] not in DELETED})
        bench.step = Killer(at) if at else counting
        if at:
            with pytest.raises(Killed) as caught:
                bench.reconcile(repair=True)
            now = Counter(seen(bench))
            assert not (wanted - now) or format == "parquet", f"a row is gone at {caught.value}"
            if format == "delta":
                assert now in (before, wanted), f"half of a repair is seen at {caught.value}"
            bench.step = lambda _: None
            bench.once(onGap="skip")
            assert not wanted - Counter(seen(bench)), f"a row is gone after {caught.value}"
        assert bench.reconcile(repair=True).whole
        assert Counter(seen(bench)) == wanted
        steps = len(counting.steps)
        at += 1
    assert steps > 7
