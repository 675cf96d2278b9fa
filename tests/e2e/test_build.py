"""The package is built with its compiled modules where there is a compiler, and without them where there is none or it
fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tarfile import open as open_tar
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILED = ("tidelog/_native", "tidelog/http/_fast_path")
SOURCES = {
    *(f"{name}{suffix}" for name in COMPILED for suffix in (".pyx", ".pyi")),
    "tidelog/py.typed",
    "tidelog/formats/json_rows.py",
    "pyspark_tidelog/__init__.py",
    "pyspark_tidelog/submit.py",
}
# A row of bytes, with names: what both must say the same of.
SAY = """
from importlib.util import find_spec
import numpy as np
from tidelog import native
from tidelog.formats import json_rows, rows
one = np.ones(1, np.int64)
made = rows.Rows(b"?\\xff", one, one, one, rows.Span(one, one))
compiled = {native.COMPILED, find_spec("tidelog._native") is not None, find_spec("tidelog.http._fast_path") is not None}
print(*compiled, json_rows.encode_rows(made, np.zeros(1, bool)).decode())
"""
TEXT = '{"$seq":1,"$ts":0,"data":"/w==","$encoding":"base64"}'

pytestmark = pytest.mark.slow


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What is needed to build, as a clone has it: nothing compiled."""
    made = tmp_path / "tree"
    made.mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, made / name)
    shutil.copytree(ROOT / "src", made / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return made


def run(tree: Path, *command: str, **environ: str) -> str:
    # That it compiles is what is tested, not how fast that makes it: without optimising it takes a third of the time.
    env = {**os.environ, "CFLAGS": "-O0", **environ}
    done = subprocess.run([sys.executable, *command], cwd=tree, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def wheel(tree: Path, **environ: str) -> tuple[Path, str]:
    said = run(tree, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tree / "dist"), **environ)
    (found,) = (tree / "dist").glob("*.whl")
    return found, said


def unpacked(found: Path, where: Path) -> set[str]:
    with ZipFile(found) as archive:
        archive.extractall(where)
        return set(archive.namelist())


def test_source_archive_builds_a_wheel_with_compiled_modules_and_their_sources(tree: Path) -> None:
    run(tree, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tree / "dist"))
    (archived,) = (tree / "dist").glob("*.tar.gz")
    with open_tar(archived) as archive:
        archive.extractall(tree / "again", filter="data")
    (again,) = (tree / "again").iterdir()
    assert {f"src/{name}" for name in SOURCES} <= {path.relative_to(again).as_posix() for path in again.rglob("*")}
    found, _ = wheel(again)
    names = unpacked(found, tree / "there")
    assert names >= SOURCES
    compiled = {name.partition(".")[0] for name in names if name.endswith(".so")}
    assert compiled == set(COMPILED)
    assert not found.stem.endswith("none-any"), "compiled for one platform"
    assert run(tree, "-c", SAY, PYTHONPATH=str(tree / "there")).strip() == f"True {TEXT}"
    assert not list((again / "src").rglob("*.so")), "the sources stay without compiled modules"


@pytest.mark.sweep
def test_wheel_without_compiler_uses_python_code(tree: Path) -> None:
    """A compiler that fails; the editable install below has none."""
    found, said = wheel(tree, CC="false")
    names = unpacked(found, tree / "there")
    assert names >= SOURCES
    assert not [name for name in names if name.endswith(".so")]
    assert found.stem.endswith("py3-none-any")
    assert "without its compiled modules" in said
    assert run(tree, "-c", SAY, PYTHONPATH=str(tree / "there")).strip() == f"False {TEXT}"


def test_source_that_does_not_compile_fails_no_install(tree: Path) -> None:
    with (tree / "src/tidelog/_native.pyx").open("a") as source:
        source.write("\nthis is no Cython\n")
    found, said = wheel(tree)
    assert found.stem.endswith("py3-none-any")
    assert "without its compiled modules" in said


@pytest.mark.sweep
def test_editable_install_compiles_beside_the_sources(tree: Path) -> None:
    say = "import hatchling.build as build; print(build.build_editable('.'))"
    for compiler, there in (("/nowhere/cc", False), ("", True)):
        environ = {"CC": compiler} if compiler else {}
        run(tree, "-c", say, **environ)
        assert all(bool([*(tree / "src").glob(f"{name}.*.so")]) == there for name in COMPILED)
        assert run(tree, "-c", SAY, PYTHONPATH=str(tree / "src")).strip() == f"{there} {TEXT}"
