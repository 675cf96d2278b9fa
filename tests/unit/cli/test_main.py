"""The command line as a whole: help, usage, and how errors become exit codes."""

from __future__ import annotations

import json
import re
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator

import pytest
from tests.kit import processes

import tidelog
from tidelog.cli import log
from tidelog.cli.main import build_parser, main
from tidelog.cli.render import Screen
from tidelog.cli.worker import split_command
from tidelog.errors import Corrupt, Error, InDoubt, Latched, Locked

LOG = (
    *("append", "cat", "inspect", "verify", "repair", "seal", "truncate", "compact", "retain", "convert", "restore"),
    *("topics", "describe", "lag"),
)
TOPIC = (
    *("ls", "show", "write", "read", "cat-record", "latest", "follow", "delete", "drop", "config", "seal", "compact"),
    *("rewrite", "checkpoint"),
)
QUEUE = ("ls", "show", "put", "claim", "ack", "nack", "history", "redrive")
GROUP = ("ls", "show", "commit", "reset", "hold", "drop")
ROUTER = ("ls", "show", "add", "drop")
TIER = ("status", "relocate", "recall", "claim")
CHANNEL = (
    *("ls", "show", "history", "create", "join", "leave", "publish", "listen", "push", "pop", "clear", "configure"),
    *("acl", "delete", "import", "export"),
)
PIPELINE = (
    *("export", "reconcile", "scrub", "backfill", "stats", "compact", "erase", "restore", "status", "export-topics"),
    *("optimize", "vacuum", "reprocess", "script"),
)
COMMANDS = (
    *(f"topic {verb}" for verb in TOPIC),
    *(f"queue {verb}" for verb in QUEUE),
    "worker",
    *(f"group {verb}" for verb in GROUP),
    "gaps",
    "retention simulate",
    *(f"erase {verb}" for verb in ("run", "ls", "verify")),
    *(f"router {verb}" for verb in ROUTER),
    *(f"tier {verb}" for verb in TIER),
    *(f"channel {verb}" for verb in CHANNEL),
    "serve",
    *(f"backup {verb}" for verb in ("create", "list", "verify", "prune")),
    *("restore", "check"),
    *(f"pipeline {verb}" for verb in PIPELINE),
    *(f"schema {verb}" for verb in ("set", "show", "history")),
    "doctor",
    *(f"log {verb}" for verb in LOG),
    "top",
    "bench",
    "query",
    "export",
    "init",
    "completion",
)


def parsers(made: ArgumentParser) -> Iterator[ArgumentParser]:
    yield made
    for action in made._actions:
        if isinstance(action.choices, dict):
            for below in action.choices.values():
                yield from parsers(below)


def test_the_commands_are_those_that_are_tested() -> None:
    named = (
        *("topic", "queue", "group", "retention", "erase", "router", "tier", "channel", "backup", "pipeline"),
        *("schema", "log"),
    )
    groups = ("tidelog", *(f"tidelog {group}" for group in named))
    found = [made.prog for made in parsers(build_parser())]
    assert [name for name in found if name in groups] == list(groups)
    assert [name.removeprefix("tidelog ") for name in found if name not in groups] == list(COMMANDS)


def test_a_command_made_alone_is_the_one_of_the_whole() -> None:
    whole = {made.prog: made.format_help() for made in parsers(build_parser())}
    alone: dict[str, str] = {}
    for command in dict.fromkeys(command.partition(" ")[0] for command in COMMANDS):
        alone |= {made.prog: made.format_help() for made in list(parsers(build_parser(command)))[1:]}
    del whole["tidelog"]
    assert alone == whole


def test_python_runs_the_package_as_the_command() -> None:
    done = processes.run([sys.executable, "-m", "tidelog", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"tidelog {tidelog.__version__}\n")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"tidelog {tidelog.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_with_an_example_that_parses(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    _, _, examples = said.partition("\nexample")
    lines = re.findall(r"^  \$ (.*)$", examples, re.MULTILINE)
    assert lines, said
    for line in lines:
        example = re.search(rf"\btidelog ({command} .*?)(?: && .*)?$", line)
        assert example is not None, line
        given, _ = split_command(shlex.split(example[1]))
        assert callable(build_parser().parse_args(given).run)


@pytest.mark.parametrize(
    "group",
    ["", "topic", "queue", "group", "retention", "router", "tier", "channel", "backup", "pipeline", "schema", "log"],
)
def test_the_help_of_a_group_says_where_to_start(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*group.split(), "--help"])
    said = capsys.readouterr().out
    for line in re.findall(r"^  \$ (.*)$", said.partition("start here:")[2], re.MULTILINE):
        words = shlex.split(line.partition("tidelog ")[2])
        known = {*COMMANDS, f"check {words[-1]}", "worker data"}
        assert not known.isdisjoint((words[0], " ".join(words[:2]))) or words[-1] == "--help", line


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["log"],
        ["log", "eat"],
        ["log", "cat"],
        ["log", "cat", "a", "--codec", "papyrus"],
        ["log", "cat", "a", "--from", "-1"],
        ["log", "cat", "a", "--limit", "-5"],
        ["log", "append", "a", "--batch", "0"],
        ["log", "append", "a", "--segment-bytes", "0"],
        ["log", "append", "a", "--sync", "never"],
        ["log", "compact", "a"],
        ["log", "compact", "a", "--key", "data"],
        ["log", "retain", "a", "--keep", "7d", "--keep-ms", "5"],
        ["log", "truncate", "a"],
        ["log", "restore", "a", "b"],
        ["log", "restore", "a", "b", "--to-offset", "5", "--to-time", "5"],
        ["log", "convert", "a", "b"],
        ["log", "convert", "a", "b", "--to", "tide", "--drop", "data"],
        ["topic"],
        ["topic", "ls"],
        ["channel"],
        ["channel", "publish", "a", "!r@h"],
        ["channel", "history", "a", "!r@h", "--newest", "0"],
        ["channel", "history", "a", "!r@h", "--newest", "1", "--from", "2"],
        ["channel", "acl", "a", "!r@h", "write"],
        ["topic", "read", "a"],
        ["topic", "read", "a", "t", "--limit", "0"],
        ["topic", "read", "a", "t", "--from", "-1"],
        ["topic", "write", "a", "t", "--batch", "0"],
        ["topic", "write", "a", "t", "--class", "paper"],
        ["topic", "follow", "a", "t", "--timeout", "soon"],
        ["topic", "follow", "a", "t", "--on-gap", "cry"],
        ["topic", "delete", "a", "t", "--seqs", "1,x"],
        ["topic", "config", "a", "t", "ttl_ms"],
        ["topic", "config", "a", "t", "ttl_ms=soon"],
        ["check"],
    ],
)
def test_a_bad_command_line_exits_with_2_and_the_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: tidelog")


def test_an_unknown_codec_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["log", "cat", "a", "--codec", "papyrus"])
    said = capsys.readouterr().err
    assert all(name in said for name in ("tide", "rustlog", "laminar", "narwhal", "papyrus"))


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Make `tidelog log cat` end with an error of our choice."""

    def arrange(error: BaseException) -> None:
        def cat(_args: Namespace, screen: Screen) -> int:
            screen.write_data(b"before\n")
            raise error

        monkeypatch.setattr(log, "cat", cat)

    return arrange


@pytest.mark.parametrize(
    ("error", "code", "name", "written"),
    [
        (Locked("a is taken"), 2, "locked", False),
        (InDoubt("who knows"), 2, "in_doubt", None),
        (Error("something"), 2, "internal", False),
        (Corrupt("a/x.data", pos=7, reason="bad"), 1, "corrupt", None),
        (Latched("a is latched"), 1, "latched", None),
        (PermissionError(13, "Permission denied", "a"), 2, "os_error", None),
        (KeyboardInterrupt(), 130, "interrupted", None),
    ],
)
def test_every_error_is_one_line_or_one_object_with_its_exit_code(
    error: BaseException,
    code: int,
    name: str,
    written: bool | None,
    raising: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    raising(error)
    message = str(error) or "interrupted"
    assert main(["log", "cat", "a"]) == code
    assert capsys.readouterr() == ("before\n", f"tidelog: {message}\n")
    assert main(["log", "cat", "a", "--json"]) == code
    out, err = capsys.readouterr()
    assert out == "before\n"
    assert json.loads(err) == {
        "error": name,
        "message": message,
        "written": written,
        "acked": None,
        "remarks": [],
    }


def test_a_message_of_several_lines_is_printed_as_one(
    raising: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    raising(Locked("first\nsecond"))
    assert main(["log", "cat", "a"]) == 2
    assert capsys.readouterr().err == "tidelog: first second\n"


def test_a_bug_is_called_one_and_is_not_taken_for_damage(
    raising: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    raising(ZeroDivisionError("oops"))
    assert main(["log", "cat", "a"]) == 70
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("tidelog: this is a bug in tidelog: ZeroDivisionError('oops')\n")
