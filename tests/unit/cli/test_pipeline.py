"""`tidelog pipeline`: what is asked of a job, what is said of it, exit codes. The jobs themselves are fakes."""

from __future__ import annotations

import inspect
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.pipelines.helpers import InlineRunner, PipelineHarness

from tidelog import pipelines
from tidelog.cli.main import main
from tidelog.errors import BadInput
from tidelog.pipelines import Backfilled, Difference, Exported, Reconciled, Stats, api
from tidelog.pipelines.scrub_job import run_scrub

Capture = pytest.CaptureFixture[str]
DONE = Exported("orders", 1, 1, 101, 99, 1, 5000, 2, 3, 1000, 2000, 255)
EQUAL = Reconciled("orders", 1, 101, 100, 100, 0, 0, 255, 3, (), (), 0, None, 0)
OTHER = EQUAL._replace(differing=((1, 51), (51, 101)), difference=Difference(7, "data=b'x'", "nothing"))


class Fake:
    """A job that says what it was told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, says: Any) -> None:
        self.args: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}
        self._says = says
        monkeypatch.setattr(pipelines, name, self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.args, self.options = args, options
        if "progress" in options:
            options["progress"](1, 2)
        return self._says


def test_export(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    job = Fake(monkeypatch, "export", DONE)
    line = ["pipeline", "export", "data", "orders", "table", "--once"]
    assert main([*line, "--file-bytes", "2m", "--master", "local[2]"]) == 0
    assert job.args == ("data", "orders", "table")
    assert (job.options["pause"], job.options["master"]) == (None, "local[2]")
    assert job.options["storage_options"] == {}
    assert job.options["sizes"] == pipelines.Sizes(2 << 20, 60_000, 1 << 30)
    out = capsys.readouterr().out
    assert "table: 99 rows in 3 files, 2 commits; it stands for orders up to seq 100" in out
    assert "3, of 1.0 kB to 2.0 kB" in out
    assert main([*line, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["rows"], said["quarantined"], said["hash"], said["stop"]) == (99, 1, "00000000000000ff", 101)


def test_spark_has_a_page_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    started: list[tuple[Any, ...]] = []
    session = SimpleNamespace(sparkContext=SimpleNamespace(uiWebUrl="http://here:4040"))

    def start(*given: Any) -> Any:
        started.append(given)
        return nullcontext(session)

    monkeypatch.setattr(api, "job_session", start)
    job = Fake(monkeypatch, "export", DONE)
    assert main(["pipeline", "export", "data", "orders", "table", "--ui", "--master", "local[3]"]) == 0
    assert started == [(None, "local[3]", {"spark.ui.enabled": "true"})]
    assert job.options["spark"] is session
    assert "Spark's page: http://here:4040" in capsys.readouterr().err


def test_an_export_that_goes_on_is_asked_whether_it_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Fake(monkeypatch, "export", DONE)
    assert main(["pipeline", "export", "data", "orders", "table", "--follow", "--every", "1ms"]) == 0
    assert [job.options["pause"](idle) for idle in (True, False)] == [False, False], "nobody has told it to stop"


def test_an_export_runs_once_without_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Fake(monkeypatch, "export", DONE)
    assert main(["pipeline", "export", "data", "orders", "table"]) == 0
    assert job.options["pause"] is None
    with pytest.raises(SystemExit):
        main(["pipeline", "export", "data", "orders", "table", "--once", "--follow"])


@pytest.mark.parametrize("command", ["export", "reconcile"])
def test_storage_options_are_passed_on(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Fake(monkeypatch, command, DONE if command == "export" else EQUAL)
    line = ["pipeline", command, "data", "orders", "s3://lake/orders"]
    assert main([*line, "--storage-option", "AWS_REGION=r", "--storage-option", "AWS_SECRET_ACCESS_KEY=a=b"]) == 0
    assert job.options["storage_options"] == {"AWS_REGION": "r", "AWS_SECRET_ACCESS_KEY": "a=b"}


def test_a_storage_option_without_a_name_is_refused_and_not_shown(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["pipeline", "export", "data", "orders", "s3://lake/orders", "--storage-option", "hush"])
    said = capsys.readouterr().err
    assert "NAME=VALUE" in said
    assert "hush" not in said


def test_reconcile(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    line = ["pipeline", "reconcile", "data", "orders", "table"]
    Fake(monkeypatch, "reconcile", EQUAL)
    assert main(line) == 0
    said = capsys.readouterr().out
    assert "table is orders, seqs 1 to 100: 100 rows in 3 ranges, hash 00000000000000ff" in said
    assert ["ranges", "that", "differ", "0"] in [line.split() for line in said.splitlines()]
    Fake(monkeypatch, "reconcile", OTHER)
    assert main(line) == 1
    found = capsys.readouterr()
    assert found.out.splitlines()[:4] == [
        "table is not orders: 2 ranges of 3 differ",
        "first difference, seq 7",
        "  log    data=b'x'",
        "  table  nothing",
    ]
    assert "--repair" in found.err
    Fake(monkeypatch, "reconcile", OTHER._replace(repaired=2))
    assert main([*line, "--repair"]) == 0
    Fake(monkeypatch, "reconcile", OTHER._replace(repaired=1, left=((51, 101),)))
    assert main([*line, "--repair"]) == 1, "one of them could not be made again"
    assert main([*line, "--json"]) == 1
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["equal"], said["difference"]["seq"]) == (False, 7)


def test_scrub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture) -> None:
    bench = PipelineHarness(tmp_path)
    bench.fill(100)
    monkeypatch.setattr(pipelines, "scrub", lambda path, **_: run_scrub(path, InlineRunner()))
    assert main(["pipeline", "scrub", bench.data]) == 0
    assert "no damage, 1 topic" in capsys.readouterr().out
    path = sorted(Path(bench.data).glob("topics/*/*.data"))[0]
    path.write_bytes(b"\0" + path.read_bytes()[1:])
    assert main(["pipeline", "scrub", bench.data]) == 1
    assert f"damage in {path.relative_to(bench.data)} at byte 0" in capsys.readouterr().out
    assert main(["pipeline", "scrub", bench.data, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["damage"] is True


def test_backfill(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture) -> None:
    job = Fake(monkeypatch, "backfill", Backfilled("j", "copy", 5, 1, 11, 15, 40, 5))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop_jobs.py").write_text("def same(df):\n    return df\nnumber = 1\n")
    line = ["pipeline", "backfill", "data", "other", "--topic", "copy", "--from-topic", "orders"]
    assert main([*line, "--through", "shop_jobs:same", "--until", "40"]) == 0
    first, *table = capsys.readouterr().out.splitlines()
    assert first == "5 rows in copy, seqs 11 to 15; the live stream goes on at seq 41"
    assert ["rows", "of", "this", "run", "5"] in [row.split() for row in table]
    assert job.options["function"]("df") == "df"
    for wrong, said in (
        ("shop_jobs", "names no function"),
        ("shop_jobs:nothing", "cannot be loaded"),
        ("no_such:f", "cannot be loaded"),
        ("shop_jobs:number", "is no function"),
    ):
        assert main([*line, "--through", wrong]) == 2
        assert said in capsys.readouterr().err


def test_stats(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture) -> None:
    sizes = {"size_p50": 5, "size_p90": 8, "size_p99": 9, "size_max": 9}
    rate = {"from": "2026-01-01T00:00:00Z", "records": 60, "bytes": 300, "records_s": 1.0, "bytes_s": 5.0, **sizes}
    wait = {"from": "2026-01-01T00:00:00Z", "claims": 4, "acks": 3, "nacks": 1, "dead": 0, "wait_ms_p50": 10}
    wait |= {"wait_ms_p90": 15, "wait_ms_p99": 20, "wait_ms_max": 30}
    Fake(monkeypatch, "stats", Stats("jobs", 60_000, [rate], [wait]))
    plot = tmp_path / "jobs.svg"
    assert main(["pipeline", "stats", "data", "jobs", "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert "jobs: 60 records in 1 interval" in out
    assert "20 ms" in out
    assert plot.read_text().startswith("<svg")
    assert main(["pipeline", "stats", "data", "jobs", "--plot", "jobs.png"]) == 2
    assert "a plot is an SVG" in capsys.readouterr().err


def test_an_error_of_a_job_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise BadInput("table is the table of topic 'a'; nothing was written")

    monkeypatch.setattr(pipelines, "export", broken)
    assert main(["pipeline", "export", "data", "orders", "table", "--once"]) == 2
    assert capsys.readouterr().err == "tidelog: table is the table of topic 'a'; nothing was written\n"


# Each job with what it needs alone.
MINIMAL = {
    "export": ["data", "orders", "table"],
    "export_topics": ["data", "lake"],
    "reconcile": ["data", "orders", "table"],
    "scrub": ["data"],
    "backfill": ["old.parquet", "data", "--topic", "orders"],
    "stats": ["data", "orders"],
    "compact": ["data", "orders"],
    "erase": ["data", "orders", "table", "--match", "t"],
    "restore": ["backups", "restored"],
    "status": ["data", "table"],
    "optimize": ["table"],
    "vacuum": ["table"],
    "reprocess": ["data", "orders", "table"],
}
# A command follows with a pause that SIGTERM ends.
OF_PROGRAMS = {"spark", "step", "progress", "pause", "follow"}
MEANS_NOTHING: list[object] = [None, {}, [], pipelines.Sizes()]


@pytest.mark.parametrize("job", MINIMAL)
def test_a_command_has_the_options_and_the_defaults_of_its_function(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command without options calls the job with the defaults of Python, and it passes every parameter on."""
    signature = inspect.signature(getattr(pipelines, job))

    class Called(BaseException):
        pass

    def called(*args: Any, **options: Any) -> None:
        raise Called(signature.bind(*args, **options))

    monkeypatch.setattr(pipelines, job, called)
    with pytest.raises(Called) as caught:
        main(["pipeline", job.replace("_", "-"), *MINIMAL[job]])
    given: dict[str, Any] = caught.value.args[0].arguments
    named = {name for name, each in signature.parameters.items() if each.default is not inspect.Parameter.empty}
    assert named - OF_PROGRAMS <= given.keys(), "an option is missing"
    for name in named & given.keys():
        default, value = signature.parameters[name].default, given[name]
        same = value == default or (default in MEANS_NOTHING and value in MEANS_NOTHING)
        assert same or name in ("topic", "match", "progress"), f"{name} is {value!r}, and {default!r} in Python"
