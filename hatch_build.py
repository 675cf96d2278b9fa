"""Build hook: compile the Cython modules with the package, and build without them where there is no compiler.

pip install .        ──► wheel:    each .pyx ──► a module in the wheel, which is then specific to this platform
pip install -e .     ──► editable: each .pyx ──► a module beside its source
no compiler, or one that fails ──► a warning and a wheel for every platform; Python code serves in their place

python hatch_build.py               compile beside the sources, after a change of a .pyx
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_ROOT = Path(__file__).resolve().parent
_SOURCES = Path("src")
MODULES = ("tidelog._native", "tidelog.http._fast_path")


def compile_modules(root: Path, scratch: Path) -> dict[str, Path]:
    """Compile the modules into `scratch`; return each one's path below `src` and its file. Raises what the compiler
    raises."""
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    extensions = [Extension(name, [str(root / _SOURCES / f"{name.replace('.', '/')}.pyx")]) for name in MODULES]
    modules = cythonize(extensions, build_dir=str(scratch), quiet=True)
    command: Any = Distribution({"ext_modules": modules}).get_command_obj("build_ext")
    command.build_lib = command.build_temp = str(scratch)
    command.ensure_finalized()
    command.run()
    files = [Path(command.get_ext_fullpath(name)) for name in MODULES]
    return {file.relative_to(scratch).as_posix(): file for file in files}


def _compile_beside_sources(root: Path, scratch: Path) -> list[Path]:
    copies = []
    for name, file in compile_modules(root, scratch).items():
        copies.append(root / _SOURCES / name)
        shutil.copy2(file, copies[-1])
    return copies


class NativeHook(BuildHookInterface[Any]):
    """Called by hatchling around every wheel, an editable one too."""

    PLUGIN_NAME = "custom"
    _scratch: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        self._scratch = Path(tempfile.mkdtemp(prefix="tidelog-native-"))
        try:
            if version == "editable":
                _compile_beside_sources(root, self._scratch)
                return
            modules = compile_modules(root, self._scratch)
        except Exception as error:  # the package works without the compiled modules
            self.app.display_warning(f"tidelog is built without its compiled modules, and works: {error}")
            return
        build_data["force_include"].update({str(file): name for name, file in modules.items()})
        build_data["pure_python"], build_data["infer_tag"] = False, True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for copy in _compile_beside_sources(_ROOT, Path(scratch)):
            sys.stdout.write(f"{copy.relative_to(_ROOT)}\n")
