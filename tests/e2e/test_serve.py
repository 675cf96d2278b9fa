"""The server as its user starts it: what the README says, pasted into a shell; signals, files and exit codes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.kit import processes
from tests.kit.commands import COMMAND, free_port
from tests.kit.waiting import eventually

ROOT = Path(__file__).parents[2]
TIDELOG = str(Path(sys.executable).with_name("tidelog"))
LIMIT_S = 30


def until_there(path: Path) -> str:
    eventually(path.exists, LIMIT_S, why=lambda: "the server starts")
    return path.read_text()


def ready(address: str) -> None:
    def is_ready() -> bool:
        try:
            with urllib.request.urlopen(f"http://{address}/v0/ready", timeout=LIMIT_S) as answer:
                assert answer.status == 200
                return True
        except OSError:
            return False

    eventually(is_ready, LIMIT_S, why=lambda: "the server is ready")


def post(address: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{address}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def start(tmp_path: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    port_file = tmp_path / "port"
    port_file.unlink(missing_ok=True)
    data = ["--data", str(tmp_path / "data"), "--port", "0", "--port-file", str(port_file)]
    process = processes.Popen([*COMMAND, "serve", *data, *options], stderr=subprocess.PIPE, text=True)
    address = until_there(port_file)
    ready(address)
    return process, address


@pytest.mark.slow
def test_the_file_of_init_starts_a_strict_server(tmp_path: Path) -> None:
    path = tmp_path / "tidelog.toml"
    processes.run([*COMMAND, "init", str(path)], check=True, timeout=LIMIT_S)
    process, address = start(tmp_path, "--config", str(path))
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://{address}/v0/topics?pagesize=3", timeout=LIMIT_S)
    with refused.value as response:
        assert (response.code, "nearest is page_size" in response.read().decode()) == (400, True)
    process.terminate()
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0


@pytest.mark.slow
def test_the_readme_s_commands_work_when_pasted(tmp_path: Path) -> None:
    page = (ROOT / "README.md").read_text()
    block = re.search(r"```console\n(\$ tidelog serve.*?)```", page, re.DOTALL)
    assert block is not None, "the README starts a server"
    script = re.sub(r"^\$ ", "", block[1], flags=re.MULTILINE).replace("4000", str(free_port()))
    script = "set -em\n" + script.replace("tidelog serve", f"{TIDELOG} serve", 1) + "\nwait\n"
    done = processes.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=2 * LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert '"first_seq":1' in done.stdout
    assert done.stdout.count('"sku"') == 2
    assert '"topics_fsync":1' in done.stdout
    assert "everything acknowledged is on disk" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_clean_and_loses_nothing(number: signal.Signals, tmp_path: Path) -> None:
    process, address = start(tmp_path)
    done = post(address, "/v0/topics/t", {"records": [{"data": 1}, {"data": 2}]})
    process.send_signal(number)
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    process, address = start(tmp_path)
    try:
        page = post(address, "/v0/topics/t/diff", {})
        assert [record["data"] for record in page["records"]] == [1, 2]
        assert page["head_seq"] == done["head_seq"], "a clean stop leaves no holes"
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT_S)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "env", "why"),
    [
        (["--host", "0.0.0.0"], {}, "no keys"),
        ([], {"TIDELOG_API_KEYS": "k:reed"}, "scope 'reed'"),
        (["--port", "70000"], {}, "0 to 65535"),
        (["--config", "missing.toml"], {}, "missing.toml"),
        (["--port-file", "no/such/place"], {}, "no/such"),
    ],
)
def test_what_cannot_be_served_says_why_and_exits(
    options: list[str], env: dict[str, str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    command = [*COMMAND, "serve", "--data", str(tmp_path / "data"), "--port", "0", *options]
    done = processes.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=LIMIT_S)
    assert done.returncode == 2, done.stderr
    assert why in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_second_server_on_the_directory_is_refused(tmp_path: Path) -> None:
    process, _ = start(tmp_path)
    try:
        command = [*COMMAND, "serve", "--data", str(tmp_path / "data"), "--port", "0"]
        done = processes.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 2, done.stderr
        assert "use it through the server" in done.stderr
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT_S)


@pytest.mark.slow
def test_settings_come_from_a_file_and_logs_are_lines_of_json(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text('api_keys = "s3cret:rw"\nlog_format = "json"\n')
    port_file = tmp_path / "port"
    command = [*COMMAND, "serve", "--data", str(tmp_path / "data"), "--config", str(tmp_path / "t.toml")]
    command += ["--port", "0", "--port-file", str(port_file)]
    process = processes.Popen(command, stderr=subprocess.PIPE, text=True)
    address = until_there(port_file)
    ready(address)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        post(address, "/v0/topics/t", {"records": [{"data": 1}]})
    process.terminate()
    _, said = process.communicate(timeout=LIMIT_S)
    lines = [json.loads(line) for line in said.splitlines()]
    assert lines
    assert all({"ts_ms", "level", "message"} <= line.keys() for line in lines)
    assert "s3cret" not in said
