"""PostgreSQL for a benchmark: a cluster of its own on the disk under test, gone afterwards.

It refuses to run as root, so there its own user runs it. Left out where it, or its driver, is not installed.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.server.processes import Server, free_port, run_process

_SETTINGS = ("listen_addresses=127.0.0.1", "unix_socket_directories=", "max_connections=100", "logging_collector=off")
_TABLE = """CREATE TABLE IF NOT EXISTS jobs (id bigserial PRIMARY KEY, data text NOT NULL, holder text,
    held_until timestamptz NOT NULL DEFAULT '-infinity')"""


def _programs() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    on_path = shutil.which("initdb")
    return Path(on_path).parent if on_path else found[-1].parent if found else None


def missing() -> str:
    """Why it cannot be measured; empty where it can."""
    if _programs() is None:
        return "initdb is not installed"
    return "" if find_spec("psycopg") else "the driver psycopg is not installed"


@contextmanager
def postgres(path: Path) -> Iterator[Server]:
    programs = _programs()
    assert programs is not None, "asked after `missing`"
    path.mkdir()
    as_user: list[str] = []
    if os.geteuid() == 0:
        shutil.chown(path, "postgres")
        _passable(path)
        as_user = ["runuser", "-u", "postgres", "--"]
    data = path / "data"
    made = [*as_user, str(programs / "initdb"), "-D", str(data), "-A", "trust", "-U", "bench", "--no-sync"]
    subprocess.run(made, check=True, capture_output=True, cwd=path)
    port = free_port()
    command = [*as_user, str(programs / "postgres"), "-D", str(data), "-p", str(port)]
    for setting in _SETTINGS:
        command += ["-c", setting]
    log = path.parent / "postgres.log"
    with run_process(command, log, lambda: port) as server:
        with session(server, durable=True) as database:
            database.execute(_TABLE)
        yield server


def _passable(path: Path) -> None:
    """Let another user walk to `path`: a temporary directory is its owner's alone."""
    for above in path.parents:
        mode = above.stat().st_mode
        if not mode & stat.S_IXOTH:
            above.chmod(mode | stat.S_IXOTH)


@contextmanager
def session(server: Server, *, durable: bool) -> Iterator[Any]:
    import psycopg

    options = f"-c synchronous_commit={'on' if durable else 'off'}"
    with psycopg.connect(
        f"host=127.0.0.1 port={server.port} user=bench dbname=postgres", autocommit=True, options=options
    ) as database:
        yield database
