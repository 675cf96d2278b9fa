"""`tests.kit.processes` starts by a fork what `subprocess` starts with a new interpreter, and no test can tell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.kit import processes

LOOK = """
import json, os, sys
seen = {
    "argv": sys.argv, "cwd": os.getcwd(), "path": sys.path[0], "main": __name__, "input": sys.stdin.read(),
    "variables": {name: value for name, value in os.environ.items() if name not in ("_", "LC_CTYPE")},
    "encodings": [(each.encoding, each.errors, each.line_buffering, each.write_through) for each in (sys.stdout, sys.stderr)],
    "interrupts": str(__import__("signal").getsignal(2)), "parent": os.getppid(),
    "files": len(os.listdir("/proc/self/fd")), "session": os.getsid(0), "group": os.getpgid(0),
}
print(json.dumps(seen))
print("said", file=sys.stderr)
raise SystemExit(int(sys.argv[-1]))
"""  # noqa: E501 - a program


def started(run: Any, command: list[str], cwd: Path, **options: Any) -> tuple[int, Any, str]:
    done = run([sys.executable, *command], cwd=cwd, input="given\n", capture_output=True, text=True, **options)
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("kind", ["-c", "-m", "file"])
def test_a_fork_has_what_a_new_interpreter_has(kind: str, tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    first = {"-c": ["-c", LOOK], "-m": ["-m", "look"], "file": [str(tmp_path / "look.py")]}[kind]
    env = {**os.environ, "A_VARIABLE": "ä", "PYTHONPATH": processes.SOURCES}
    found = [started(run, [*first, "word", "7"], tmp_path, env=env) for run in (processes.run, subprocess.run)]
    assert {name: value for name, value in found[0][1].items() if value != found[1][1][name]} == {}
    assert found[0] == found[1]
    code, seen, errors = found[0]
    assert (code, seen["parent"], seen["input"], errors) == (7, os.getpid(), "given\n", "said\n")


def test_a_fork_has_the_package_already_and_imports_modules_of_the_test(tmp_path: Path) -> None:
    code = "import sys; known = 'tidelog.engine' in sys.modules; import json; print(json.dumps(known)); sys.exit(0)"
    assert started(processes.run, ["-c", code], tmp_path)[1] is True
    assert started(subprocess.run, ["-c", code], tmp_path)[1] is False


def test_variables_that_an_interpreter_reads_when_it_starts_get_a_new_one(tmp_path: Path) -> None:
    code = "import sys; print(int(sys.flags.utf8_mode))"
    env = {**os.environ, "PYTHONUTF8": str(1 - sys.flags.utf8_mode)}
    assert started(processes.run, ["-c", code], tmp_path, env=env)[1] == 1 - sys.flags.utf8_mode


def test_a_fork_is_killed_waited_for_and_fails_like_any_process(tmp_path: Path) -> None:
    with processes.Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
    failed = processes.run([sys.executable, "-c", "1 / 0"], capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr.endswith("ZeroDivisionError: division by zero\n")
    with pytest.raises(FileNotFoundError):
        processes.Popen([sys.executable, "-c", ""], cwd=tmp_path / "nowhere")
    with pytest.raises(subprocess.TimeoutExpired):
        processes.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.1)
