"""`tidelog init`: its file has every setting, and `tidelog serve --config` accepts it as it is and with all lines in
effect."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from tests.kit.commands import Run, json_result, runner

from tidelog.server.config import ServerConfig, check_config, config_from_file, setting_texts


@pytest.fixture
def run(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsysbinary, monkeypatch, "init", directory=tmp_path)


def test_the_file_is_strict_and_otherwise_the_defaults(run: Run, tmp_path: Path) -> None:
    assert json_result(run("--json")) == {"path": "tidelog.toml", "set": {"strict": True}}
    text = (tmp_path / "tidelog.toml").read_text()
    assert tomllib.loads(text) == {"strict": True}
    everything = tomllib.loads(re.sub(r"^# (?=[a-z_]+ = )", "", text, flags=re.MULTILINE))
    names = {setting.name for setting in fields(ServerConfig) if not setting.name.startswith("test_")}
    assert everything.keys() == names
    found = config_from_file(ServerConfig(), everything, "tidelog.toml")
    check_config(found)
    plain = ServerConfig(strict=True)
    for name in names:
        assert getattr(found, name) in (getattr(plain, name), ""), name
    for text_of in setting_texts().values():
        assert text_of[:30] in text or text_of.startswith("For tests")


def test_a_file_that_exists_stays(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("port = 5000\n")
    code, _, err = run("mine.toml")
    assert (code, "mine.toml exists; nothing was written" in err) == (2, True)
    assert (tmp_path / "mine.toml").read_text() == "port = 5000\n"


def test_it_prints_and_names_a_directory(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("-", "--data", "/srv/log")
    assert (code, tomllib.loads(out)) == (0, {"strict": True, "data_dir": "/srv/log"})
    assert list(tmp_path.iterdir()) == []
    assert run("--data", "http://127.0.0.1:4000")[0] == 2
    assert run("nowhere/tidelog.toml")[0] == 2
