"""Java programs from Maven Central: their jars are fetched once and kept."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

_ALONE: Final = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
_FETCH_S: Final = 600


class NoJars(Exception):
    """There are no jars here, and why."""


class Artifact(NamedTuple):
    group: str
    name: str
    version: str
    classifier: str = ""
    alone: bool = False  # without the jars that it needs


def fetch_jars(cache: Path, name: str, artifacts: Sequence[Artifact]) -> list[Path]:
    """Return the jars of these artifacts and of what they need. Raises NoJars without Maven or a network."""
    target = cache / name
    if target.exists():
        return sorted(target.glob("*.jar"))
    if (maven := shutil.which("mvn")) is None:
        raise NoJars("there is no Maven to fetch the jars with")
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _fetch(maven, cache / f"{name}.building", target, artifacts)
    return sorted(target.glob("*.jar"))


def _fetch(maven: str, building: Path, target: Path, artifacts: Sequence[Artifact]) -> None:
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    wanted = "".join(
        f"<dependency><groupId>{each.group}</groupId><artifactId>{each.name}</artifactId>"
        f"<version>{each.version}</version>{f'<classifier>{each.classifier}</classifier>' if each.classifier else ''}"
        f"{_ALONE if each.alone else ''}</dependency>"
        for each in artifacts
    )
    (building / "pom.xml").write_text(
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion><groupId>jars</groupId>'
        f"<artifactId>jars</artifactId><version>1</version><dependencies>{wanted}</dependencies></project>"
    )
    command = [maven, "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=jars", "-DincludeScope=runtime"]
    done = subprocess.run(command, cwd=building, capture_output=True, text=True, timeout=_FETCH_S, check=False)
    if done.returncode:
        raise NoJars(f"Maven did not fetch the jars: {done.stdout.strip()[:200]}")
    (building / "jars").rename(target)
