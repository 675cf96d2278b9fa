"""`make asan`: the compiled modules built with AddressSanitizer in a separate directory, under their tests and fuzzer.

    build/asan/tidelog      the package, with instrumented modules in place of the usual ones
    LD_PRELOAD=libasan      Python itself is not instrumented; memory of every object comes from malloc, so that a byte
                            read past the end of one is noticed

Leaks are not looked for: the interpreter keeps what it has at its end. The first error ends the run with its report.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "asan"
FLAGS = "-fsanitize=address -fno-omit-frame-pointer -g -O1"
TESTS = (
    "tests/unit/formats/test_native.py",
    "tests/unit/formats/test_native_fuzz.py",
    "tests/unit/formats/test_indexed_rows.py",
    "tests/unit/formats/test_batch_writer.py",
    "tests/unit/formats/test_json_rows.py",
    "tests/unit/formats/test_segment_rewrite.py",
    "tests/unit/server/handlers/test_plain_body.py",
    "tests/unit/server/handlers/test_fast_writes.py",
    "tests/unit/http/test_fast_path_reader.py",
    "tests/unit/http/test_request_batching.py",
)


def main() -> int:
    compiler = os.environ.get("CC", "gcc")
    library = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(library).is_absolute():
        sys.stderr.write(f"{compiler} has no libasan; install it, or set CC to a compiler that has\n")
        return 1
    shutil.rmtree(BUILD, ignore_errors=True)
    shutil.copytree(ROOT / "src" / "tidelog", BUILD / "tidelog", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    build = (
        "import shutil, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import hatch_build; "
        "modules = hatch_build.compile_modules(Path(sys.argv[1]), Path(sys.argv[2]) / 'scratch'); "
        "[shutil.copy2(file, Path(sys.argv[2]) / name) for name, file in modules.items()]"
    )
    environment = {**os.environ, "CFLAGS": FLAGS, "LDFLAGS": "-fsanitize=address"}
    subprocess.run([sys.executable, "-c", build, str(ROOT), str(BUILD)], env=environment, check=True)
    # The C++ library is named too: a program that is not instrumented would load it too late for its exceptions.
    extra = subprocess.run(
        [compiler, "-print-file-name=libstdc++.so.6"], capture_output=True, text=True, check=True
    ).stdout.strip()
    environment = {
        **os.environ,
        "PYTHONPATH": str(BUILD),
        "PYTHONMALLOC": "malloc",
        "LD_PRELOAD": f"{library} {extra}",
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:allocator_may_return_null=1",
        "TIDELOG_FUZZ_ROUNDS": os.environ.get("TIDELOG_FUZZ_ROUNDS", "20000"),
    }
    look = (
        "from tidelog import _native; from tidelog.http import _fast_path; "
        "print('instrumented:', _native.__file__, _fast_path.__file__)"
    )
    subprocess.run([sys.executable, "-c", look], env=environment, check=True)
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *TESTS], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
