"""The scripts of `tidelog completion`, in the shells that are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.kit.commands import Run, json_result, runner

from tidelog.cli.completion import SCRIPTS, walk
from tidelog.cli.main import build_parser


@pytest.fixture
def run(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsysbinary, monkeypatch, "completion", directory=tmp_path)


@pytest.fixture
def script(run: Run, tmp_path: Path) -> Path:
    code, out, _ = run("bash")
    assert code == 0
    path = tmp_path / "completion.bash"
    path.write_text(out)
    return path


def complete_in_bash(script: Path, *words: str) -> list[str]:
    """Return what bash offers for the last word."""
    quoted = " ".join(f"'{word}'" for word in ("tidelog", *words))
    line = (
        f'source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _tidelog; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", line], cwd=script.parent, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_commands_options_values_and_files(script: Path) -> None:
    (script.parent / "data").mkdir()
    assert complete_in_bash(script, "ch") == ["channel", "check"]
    assert complete_in_bash(script, "topic", "re") == ["read", "rewrite"]
    assert complete_in_bash(script, "topic", "read", "da") == ["data"], "directories"
    assert complete_in_bash(script, "topic", "read", "data", "--fr") == ["--from"]
    assert complete_in_bash(script, "topic", "write", "data", "t", "--class", "") == [
        *("ephemeral", "memory", "disk", "fsync")
    ]
    assert complete_in_bash(script, "channel", "acl", "data", "x", "pub") == ["publish"]
    assert complete_in_bash(script, "completion", "")[:3] == ["bash", "zsh", "fish"]
    assert "--server" in complete_in_bash(script, "queue", "ls", "--")
    assert complete_in_bash(script, "topic", "nonsense") == []


def test_every_command_is_in_every_script(run: Run) -> None:
    nodes = list(walk(build_parser()))
    assert len(nodes) > 80
    for shell in SCRIPTS:
        text = json_result(run(shell, "--json"))["script"]
        assert not [node.path for node in nodes if f"{node.path}" not in text]
        assert "--exactly-once" in text or "-l exactly-once" in text


def test_zsh_loads_the_script_and_completes(run: Run, tmp_path: Path) -> None:
    (tmp_path / "_tidelog").write_text(run("zsh")[1])
    # `_describe` stands for the function of zsh that shows choices: it prints the array that it is given.
    line = """
        functions[compdef]=':'
        source ./_tidelog
        _describe() { local name="${@[-1]}"; print -l -- "${(@P)name}" }
        _files() { print files }
        words=(tidelog topic ''); CURRENT=3; _tidelog
        words=(tidelog topic read --f); CURRENT=4; _tidelog
        compadd() { print -l -- "${@[2,-1]}" }
        words=(tidelog topic write --class ''); CURRENT=5; _tidelog
    """
    for shell in filter(None, [shutil.which("zsh")]):  # where it is installed
        done = subprocess.run(
            [shell, "-f", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
        )
        said = done.stdout.splitlines()
        assert done.stderr == ""
        assert "read:print records" in said
        assert any(each.startswith("--from:") for each in said)
        assert said[-4:] == ["ephemeral", "memory", "disk", "fsync"]


def test_fish_loads_the_script_and_completes(run: Run, tmp_path: Path) -> None:
    (tmp_path / "tidelog.fish").write_text(run("fish")[1])

    def complete(shell: str, line: str) -> list[str]:
        words = [shell, "--no-config", "-c", f"source tidelog.fish; complete -C '{line}'"]
        environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        return [each.partition("\t")[0] for each in done.stdout.splitlines()]

    for shell in filter(None, [shutil.which("fish")]):  # where it is installed
        assert complete(shell, "tidelog topic re") == ["read", "rewrite"]
        assert complete(shell, "tidelog topic read data --fr") == ["--from"]
        assert sorted(complete(shell, "tidelog topic write data t --class ")) == [
            "disk",
            "ephemeral",
            "fsync",
            "memory",
        ]
