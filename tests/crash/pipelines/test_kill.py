"""Real processes and SIGKILL: an export that is killed anywhere, and whose state is thrown away, is the log in the end.

Method: a child exports and kills itself at a step that chance names; sometimes its newest commit or all that it keeps
beside the files is then removed, sometimes the topic grows. After every kill a reader that shares no code with the
library sees no row twice and none that is not the log's; after the last run, which is let live, it sees the log.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from pyiceberg.exceptions import NoSuchTableError
from tests.kit import processes
from tests.kit.s3 import S3Server
from tests.kit.sampling import one_in
from tests.unit.pipelines.helpers import FORMATS, PipelineHarness, iceberg_table, s3_options, s3_table
from tests.unit.pipelines.test_upsert import UpsertHarness

from tidelog.pipelines import table_formats
from tidelog.pipelines.table_formats import Place
from tidelog.pipelines.table_formats.interface import Format

Tell = Callable[[str, int], None]


def run(
    bench: PipelineHarness,
    step: int,
    address: str = "",
    options: Mapping[str, str] | None = None,
    *,
    form: str | None = None,
) -> list[str]:
    """Export in a child; the steps that it came to."""
    script, table = str(Path(__file__).with_name("kill_exporter.py")), address or bench.table
    command = [sys.executable, script, bench.data, table, form or bench.format, str(step), json.dumps(options or {})]
    done = processes.run(command, capture_output=True, text=True, timeout=300)
    steps: list[str] = done.stdout.splitlines()
    assert done.returncode == (-signal.SIGKILL if step and len(steps) == step else 0), done.stderr
    return steps


def look(bench: PipelineHarness, said: str) -> None:
    there = DeltaTable.is_deltatable(bench.table) if bench.format == "delta" else bool(bench.files())
    rows = bench.table_rows() if there else []
    assert len(rows) == len({row[0] for row in rows}), f"a row is there twice, {said}"
    assert set(rows) <= set(bench.log_rows()), f"a row is not the log's, {said}"


def forget(bench: PipelineHarness, random: Random) -> str:
    """Throw something away that an export keeps beside its files."""
    own = Path(bench.table) / "_tidelog"
    log = Path(bench.table) / "_delta_log" if bench.format == "delta" else own / "log"
    what = random.choice(["nothing", "the newest commit", "our state"])
    found = sorted(log.glob("*.json")) if log.is_dir() else []
    if what == "the newest commit" and found:
        found[-1].unlink()
    elif what == "our state" and own.is_dir():
        shutil.rmtree(own)
    return what


def kill_and_judge(root: Path, format: Format, random: Random, *, kills: int) -> None:
    bench, written, said = PipelineHarness(root, format), 0, ""
    for _ in range(kills):
        if random.random() < 0.5 or not written:
            bench.fill(count := random.randint(20, 150), start=written)
            written += count
        steps = run(bench, at := random.randint(1, 40))
        said = f"killed at step {at}, {steps[-1:]}"
        look(bench, said)
        said = f"{said}, without {forget(bench, random)}"
    run(bench, 0)
    assert bench.table_rows() == bench.log_rows(), said
    assert bench.reconcile().equal


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(5, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("format", one_in(2, FORMATS))
def test_a_killed_export_loses_and_doubles_nothing(
    format: Format, kills: int, tmp_path: Path, record_count: Tell
) -> None:
    kill_and_judge(tmp_path, format, Random(f"suite {format}"), kills=kills)
    record_count("kills of an export", kills)


def place_of(root: Path, format: Format, server: S3Server | None) -> tuple[Place, str, dict[str, str]]:
    """A table's place, its address, and the options that a process needs to reach it."""
    if format == "iceberg":
        place = iceberg_table(root, server=server)
        assert place.catalog is not None, "it is in a catalog"
        return place, "iceberg://tests/shop.orders", dict(place.catalog.properties)
    if server is None:
        return table_formats.find_place(str(root / "table"), "the table"), str(root / "table"), {}
    place = s3_table(server, "killed")
    return place, place.path, s3_options(server)


def kill_at_every_step(root: Path, format: Format, server: S3Server | None, *, every: int, first: int) -> int:
    """Export with a kill at one step after the other, each run from where the one before was killed."""
    place, address, options = place_of(root, format, server)
    bench = PipelineHarness(root, format, place=place)
    bench.fill(150)
    kills = 0
    for at in range(first, 400, every):
        bench.fill(20, start=150 + 20 * kills)  # there is always something to export
        steps = run(bench, at, address, options)
        log = set(bench.log_rows())
        with suppress(NoSuchTableError, TableNotFoundError, FileNotFoundError, KeyError):  # no file
            rows = bench.table_rows()
            assert len(rows) == len({row[0] for row in rows}), f"a row is there twice, killed at {at}, {steps[-1:]}"
            assert set(rows) <= log, f"a row is not the log's, killed at {at}, {steps[-1:]}"
        if len(steps) < at:
            break  # there are no more steps
        kills += 1
    run(bench, 0, address, options)
    assert bench.table_rows() == bench.log_rows()
    assert bench.reconcile().equal
    return kills


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(1, 4))
@pytest.mark.parametrize("store", ["local", "s3"])
@pytest.mark.parametrize("format", ["delta", "iceberg", "parquet"])
def test_each_format_in_each_store_is_killed_at_every_step(
    format: Format, store: str, first: int, tmp_path: Path, record_count: Tell, request: pytest.FixtureRequest
) -> None:
    server: S3Server | None = request.getfixturevalue("s3_server") if store == "s3" else None
    record_count("kills of an export", kill_at_every_step(tmp_path, format, server, every=3, first=first))


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(20))
@pytest.mark.parametrize("format", FORMATS)
def test_two_hundred_kills(format: Format, part: int, tmp_path: Path, record_count: Tell) -> None:
    kill_and_judge(tmp_path, format, Random(f"sweep {format} {part}"), kills=6)
    record_count("kills of an export", 6)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.sweep) for part in range(1, 20))])
def test_a_killed_upsert_has_the_newest_rows(part: int, tmp_path: Path, record_count: Tell) -> None:
    harness, random = UpsertHarness(tmp_path), Random(f"upsert {part}")
    kills = 2 if not part else 6
    for _ in range(kills):
        harness.write(random, random.randint(20, 80))
        steps = run(harness, at := random.randint(1, 25), form="latest")
        keys = [key for key, _ in harness.rows()]
        assert len(keys) == len(set(keys)), f"a key is there twice, killed at step {at}, {steps[-1:]}"
    run(harness, 0, form="latest")
    harness.check()
    assert harness.compare().equal
    record_count("kills of an upsert", kills)
