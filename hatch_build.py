"""Build hook: compile `tidelog._native` with the package, and go on without it where there is no compiler.

pip install .        ──► wheel:    _native.pyx ──► a module in the wheel, which is then one for this platform
pip install -e .     ──► editable: _native.pyx ──► a module beside its source
no compiler, or one that fails ──► a warning and a wheel for every platform; the Python implementations serve

python hatch_build.py               the second of these alone, after a change of _native.pyx
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_ROOT = Path(__file__).resolve().parent
_SOURCE = Path("src/tidelog/_native.pyx")


def compiled(root: Path, scratch: Path) -> Path:
    """Compile the module into `scratch`. Raises what the compiler raises."""
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    extension = Extension("tidelog._native", [str(root / _SOURCE)])
    modules = cythonize([extension], build_dir=str(scratch), quiet=True)
    command: Any = Distribution({"ext_modules": modules}).get_command_obj("build_ext")
    command.build_lib = command.build_temp = str(scratch)
    command.ensure_finalized()
    command.run()
    return Path(command.get_ext_fullpath("tidelog._native"))


class NativeHook(BuildHookInterface[Any]):
    """Called by hatchling around every wheel, an editable one too."""

    PLUGIN_NAME = "custom"
    _scratch: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        self._scratch = Path(tempfile.mkdtemp(prefix="tidelog-native-"))
        try:
            made = compiled(root, self._scratch)
        except Exception as error:  # whatever it is, the package works without
            self.app.display_warning(f"tidelog is built without its compiled module, and works: {error}")
            return
        if version == "editable":
            shutil.copy2(made, root / _SOURCE.parent / made.name)
            return
        build_data["force_include"][str(made)] = f"tidelog/{made.name}"
        build_data["pure_python"], build_data["infer_tag"] = False, True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        made = compiled(_ROOT, Path(scratch))
        shutil.copy2(made, _ROOT / _SOURCE.parent / made.name)
        sys.stdout.write(f"{_SOURCE.parent / made.name}\n")
