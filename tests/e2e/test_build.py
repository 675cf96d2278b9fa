"""The package is built with its kernel where there is a compiler, and without it where there is none or it fails."""

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
SOURCES = {"tidelog/_native.pyx", "tidelog/_native.pyi", "tidelog/py.typed", "tidelog/formats/json_rows.py"}
# A row of bytes, with names: what both must say the same of.
SAY = """
import numpy as np
from tidelog import native
from tidelog.formats import json_rows, rows
one = np.ones(1, np.int64)
made = rows.Rows(b"?\\xff", one, one, one, rows.Span(one, one))
print(native.COMPILED, json_rows.encode_rows(made, np.zeros(1, bool)).decode())
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


def test_a_wheel_has_the_kernel_and_its_source(tree: Path) -> None:
    found, _ = wheel(tree)
    names = unpacked(found, tree / "there")
    assert names >= SOURCES
    assert [name for name in names if name.startswith("tidelog/_native.") and name.endswith(".so")]
    assert not found.stem.endswith("none-any"), "compiled for one platform"
    assert run(tree, "-c", SAY, PYTHONPATH=str(tree / "there")).strip() == f"True {TEXT}"
    assert not list((tree / "src").rglob("*.so")), "a wheel leaves nothing behind"


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false"])
def test_without_a_compiler_the_twin_serves(tree: Path, compiler: str) -> None:
    found, said = wheel(tree, CC=compiler)
    names = unpacked(found, tree / "there")
    assert names >= SOURCES
    assert not [name for name in names if name.endswith(".so")]
    assert found.stem.endswith("py3-none-any")
    assert "without its compiled module" in said
    assert run(tree, "-c", SAY, PYTHONPATH=str(tree / "there")).strip() == f"False {TEXT}"


def test_a_kernel_that_does_not_compile_fails_no_install(tree: Path) -> None:
    with (tree / "src/tidelog/_native.pyx").open("a") as source:
        source.write("\nthis is no Cython\n")
    found, said = wheel(tree)
    assert found.stem.endswith("py3-none-any")
    assert "without its compiled module" in said


def test_an_editable_install_compiles_beside_the_source(tree: Path) -> None:
    say = "import hatchling.build as build; print(build.build_editable('.'))"
    for compiler, there in (("/nowhere/cc", False), ("", True)):
        environ = {"CC": compiler} if compiler else {}
        run(tree, "-c", say, **environ)
        assert bool([*(tree / "src/tidelog").glob("_native.*.so")]) == there
        assert run(tree, "-c", SAY, PYTHONPATH=str(tree / "src")).strip() == f"{there} {TEXT}"


def test_a_source_archive_can_be_built_again(tree: Path) -> None:
    run(tree, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tree / "dist"))
    (found,) = (tree / "dist").glob("*.tar.gz")
    with open_tar(found) as archive:
        archive.extractall(tree / "again", filter="data")
    (again,) = (tree / "again").iterdir()
    assert {f"src/{name}" for name in SOURCES} <= {path.relative_to(again).as_posix() for path in again.rglob("*")}
    assert not list(again.rglob("*.so"))
    assert not wheel(again)[0].stem.endswith("none-any")
