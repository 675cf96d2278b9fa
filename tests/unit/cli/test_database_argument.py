"""How the command line names a database: a directory, an address, `--server`, or the environment."""

from __future__ import annotations

import pytest

from tidelog.cli.completion import walk
from tidelog.cli.main import build_parser

URL, OTHER = "http://127.0.0.1:4000", "http://127.0.0.1:4001"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("TIDELOG_SERVER", raising=False)
    monkeypatch.delenv("TIDELOG_KEY", raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("words", "variable", "expected"),
    [
        ("topic read data orders", None, ("data", None, "orders")),
        ("topic read data orders", URL, ("data", None, "orders")),
        (f"topic read {URL} orders", None, (None, URL, "orders")),
        (f"topic read {URL} orders", OTHER, (None, URL, "orders")),
        (f"topic read orders --server {URL}", None, (None, URL, "orders")),
        ("topic read orders", URL, (None, URL, "orders")),
        ("topic read data --json orders", None, ("data", None, "orders")),
        ("topic read --json data --from 3 orders", None, ("data", None, "orders")),
        ("gaps data", None, ("data", None, None)),
        ("gaps data", URL, ("data", None, None)),
        ("gaps", URL, (None, URL, None)),
        (f"gaps --server {URL} orders", None, (None, URL, "orders")),
    ],
)
def test_a_database_is_named_in_four_ways(
    words: str, variable: str | None, expected: tuple[object, ...], environment: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        environment.setenv("TIDELOG_SERVER", variable)
    args = build_parser().parse_args(words.split())
    assert (args.dir, args.server, args.topic) == expected


OTHERWISE = {
    "log": "a segmented log is no database",
    "pipeline backfill": "from a source to a target",
    "pipeline restore": "from a backup to a directory",
    "pipeline optimize": "of a table",
    "pipeline vacuum": "of a table",
    "pipeline script": "no database",
    "backup": "of backups",
    "restore": "from a backup to a directory",
    "channel import": "files of a directory that no server has open",
    "channel export": "files of a directory that no server has open",
    "check": "files of a directory",
    "doctor": "the machine",
    "serve": "makes a server of a directory",
    "init": "no database",
    "completion": "no database",
}


def test_every_other_command_takes_a_database() -> None:
    nodes = [node for node in walk(build_parser()) if not node.subcommands]
    without = {node.path[1:].replace("/", " ") for node in nodes if "--api-key" not in node.option_names}
    unexplained = {name for name in without if not {name, name.partition(" ")[0]} & OTHERWISE.keys()}
    assert unexplained == set()
    assert "backup create" not in without


def test_settings_come_after_the_names(environment: pytest.MonkeyPatch) -> None:
    for words in ("topic config data orders ttl_ms=7d", f"topic config {URL} orders ttl_ms=7d"):
        args = build_parser().parse_args(words.split())
        assert (args.topic, args.settings) == ("orders", [("ttl_ms", 604_800_000)])
    environment.setenv("TIDELOG_SERVER", URL)
    args = build_parser().parse_args(["topic", "config", "orders", "ttl_ms=7d", "durability=fsync"])
    assert (args.server, args.topic, len(args.settings)) == (URL, "orders", 2)


def test_the_key_of_a_server(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("TIDELOG_KEY", "kept")
    parse = build_parser().parse_args
    assert parse(["topic", "ls", URL]).api_key == "kept"
    assert parse(["topic", "ls", URL, "--key", "given"]).api_key == "given"
    assert parse(["topic", "ls", URL, "--api-key", "given"]).api_key == "given"
    assert parse(["topic", "ls", "data"]).api_key is None, "a directory has no key"
    args = parse(["topic", "write", URL, "orders", "--key", "once"])
    assert (args.api_key, args.key) == ("kept", "once"), "--key of a write is its idempotency key"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("topic ls", "name a database"),
        ("topic read data", "this takes DIR TOPIC, not 'data'"),
        ("topic read data orders more", "this takes DIR TOPIC, not 'data orders more'"),
        (f"topic read data orders --server {URL}", f"this takes --server {URL} TOPIC"),
        (f"topic ls {URL} --server {OTHER}", "named twice"),
        ("topic ls data --key k", "an API key is for a server"),
        ("group commit data orders billing many", "argument SEQ: 'many' is not a whole number"),
        ("channel acl data !r@h everything", "'everything' is none of join, publish, read"),
        ("topic ls data --nonsense", "unrecognized arguments: --nonsense"),
        ("topic ls data --nonsense 5", "unrecognized arguments: --nonsense 5"),
    ],
)
def test_a_wrong_command_line_says_what_is_right(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        build_parser().parse_args(words.split())
    assert said in capsys.readouterr().err
