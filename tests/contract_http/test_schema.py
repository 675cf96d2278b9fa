"""The OpenAPI document against a live server: what it allows is asked for, and answers are what it says.

Method: Schemathesis reads `GET /v0/openapi.json` and makes requests of it, good ones and spoilt ones, alone and one
after another, in a process of its own. It is derandomized and has no deadline, so that a slow machine is only slow.
The streams that have no end are left out: test_watch.py, test_ws.py, test_work.py, test_channel_delivery.py and the
unit tests of events have them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.contract_http.channel_api import channel_path
from tests.contract_http.server import Server
from tests.kit.sampling import one_in

ROOT: Final = Path(__file__).parents[2]
HOOKS: Final = Path(__file__).with_name("schema_hooks.py")
"""Not imported here: Schemathesis would be 22 MiB of every worker."""

KEY: Final = "k3y"
KNOWN: Final = "known"  # a topic with sealed segments, the first of which begins with seq 1
SPARE: Final = "spare"  # one whose records may be deleted
JOBS: Final = "jobs"  # a queue
ROOM: Final = "!known@example.org"  # a channel that persists, and one that is a queue
FIFO: Final = "!jobs@example.org"
CASES: Final = 2  # of an operation in `make test`
CASES_LONG: Final = 12  # in `make crash`, beside those that are worked out of its schema
ENDLESS: Final = ("followWatch", "socket", "work", "followChannel", "followTopic")
EXCEPT: Final = {
    "negative_data_rejection": "by contract unknown fields are ignored, and a parameter that does not parse is absent",
    "positive_data_acceptance": "a schema cannot say which names exist, nor rules between fields and a topic's state",
}
EXCEPT_WITHOUT_KEYS: Final = {
    "ignored_auth": "there are no keys to ask for",
    "missing_required_header": "the header is the one with the key",
}
LIMIT_S: Final = 300
CONFIG: Final = """
hooks = {hooks}
suppress-health-check = ["all"]
headers = {{ Authorization = "Bearer {key}" }}
request-timeout = 60
[generation]
deterministic = true
database = "none"
max-examples = {cases}
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 501, 505]
"""


@pytest.fixture(params=one_in(2, [True, False]), ids=["with keys", "without keys"])
def target(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server with a key or without, and with topics whose records lie in segments as well as in the WAL."""
    keyed: bool = request.param
    settings = {"api_keys": KEY} if keyed else {}
    with Server(tmp_path / "server", segment_max_events=4, **settings).start() as running:
        with running.client(KEY) as api:
            api.create_topic(JOBS, type="queue")
            for topic in (KNOWN, SPARE, JOBS):
                for number in range(9):
                    api.records(topic, {"data": {"n": number}, "tag": f"t{number}", "node": "n", "meta": {"m": 1}})
        running.restart()
        with running.client(KEY) as api:
            api.write(KNOWN, "in no file yet")
            assert api.put(channel_path(ROOM), {"persist": keyed}).status == 201
            assert api.post(channel_path(ROOM, "/publish"), {"messages": [{"payload": "x"}] * 9}).status == 200
            if keyed:  # nothing persists without users, and a queue does
                assert api.put(channel_path(FIFO), {"persist": True, "type": "fifo"}).status == 201
                assert api.post(channel_path(FIFO, "/push"), {"payload": "x"}).status == 200
        yield running


def schemathesis(
    target: Server, folder: Path, *options: str, cases: int, excluded: Iterable[str]
) -> tuple[dict[str, Any], str]:
    """Its report and what it said. All of its checks but those that are excluded."""
    hooks = json.dumps(str(HOOKS))
    (folder / "schemathesis.toml").write_text(CONFIG.format(hooks=hooks, key=KEY, cases=cases))
    host, port = target.address
    report = folder / "report.json"
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"http://{host}:{port}/v0/openapi.json"),
        *("--no-color", "--report-json-path", str(report), "--checks", "all", "--exclude-checks", ",".join(excluded)),
        *(part for name in ENDLESS for part in ("--exclude-operation-id", name)),
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert report.exists(), done.stdout + done.stderr
    found: dict[str, Any] = json.loads(report.read_text())
    return found, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES, pytest.param(CASES_LONG, marks=pytest.mark.sweep)])
def test_every_answer_is_as_documented(
    target: Server, tmp_path: Path, cases: int, record_count: Callable[[str, int], None]
) -> None:
    """§1.8, §1.9: no 5xx; status, content type, headers and body of every answer are those of the document."""
    with target.client() as nobody:
        is_open = nobody.get("/v0/topics").status == 200
    excluded = {**EXCEPT, **(EXCEPT_WITHOUT_KEYS if is_open else {})}
    covers = cases == CASES_LONG  # a thousand more cases, which are worked out of the schema
    phases = "coverage,fuzzing,stateful" if covers else "fuzzing,stateful"
    report, said = schemathesis(target, tmp_path, "--phases", phases, cases=cases, excluded=excluded)
    assert report["exit_code"] == 0, said
    assert report["complete"], said
    assert (report["failures"], report["errors"]) == ([], []), said
    with target.client(KEY) as api:
        operations = [
            operation
            for item in api.get("/v0/openapi.json").json()["paths"].values()
            for method, operation in item.items()
            if method != "parameters"
        ]
        assert api.get("/v0/health").json()["status"] == "ok"
        assert api.metrics()["wal"]["read_only"] is False
    assert report["operations"]["tested"] == len(operations) - len(ENDLESS) - 1, "all but these and the document itself"
    assert report["test_cases"]["generated"] > (1_000 if covers else 100), said
    assert "Traceback" not in target.log
    record_count("cases from the schema", report["test_cases"]["generated"])
