"""docs/security.md names every limit of the server with its setting and its default."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Final

import pytest

from tidelog.disk.posix import FILE_MODE_SETTING
from tidelog.server import config
from tidelog.server.config import ServerConfig

PAGE: Final = Path(__file__).parents[3] / "docs" / "security.md"
PREFIX: Final = "TIDELOG_"
LIMITS: Final = sorted(
    {
        *(name for name in config._SETTING_TYPES if name.startswith("max_")),
        *("write_timeout_ms", "turn_units", "wal_queue_max", "channel_messages_max"),
    }
)
SECTION: Final = ("Setting", "Default")


def named(text: str) -> set[str]:
    """Settings in code marks; `TIDELOG_MAX_` alone stands for all that begin so."""
    return {name for name in re.findall(r"`(TIDELOG_[A-Z_]+)[`:=]", text) if not name.endswith("_")}


def defaults() -> dict[str, str]:
    """By setting: the cell with its default."""
    defaults: dict[str, str] = {}
    columns: dict[str, int] = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            columns = {}
        elif not columns:
            columns = {name: at for at, name in enumerate(cells)}
        elif all(name in columns for name in SECTION):
            for name in named(cells[columns["Setting"]]):
                assert name not in defaults, f"{name} has two rows"
                defaults[name] = cells[columns["Default"]]
    return defaults


def shown(name: str) -> str:
    value: int = getattr(ServerConfig(), name)
    if not value:
        return "no limit"
    if name.endswith("_ms"):
        return f"{value // 1000} s"
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if name.endswith("bytes") and not value % size:
            return f"{value // size} {unit}"
    return f"{value:,}"


@pytest.mark.parametrize("name", LIMITS)
def test_every_limit_has_a_row_with_its_default(name: str) -> None:
    cell = defaults().get(PREFIX + name.upper())
    assert cell is not None, f"docs/security.md has no row for {PREFIX}{name.upper()}"
    assert re.search(rf"(?<![\d,]){shown(name)}(?![\d,]\d)", cell), f"{cell!r} does not say {shown(name)}"


def test_every_setting_on_the_page_exists() -> None:
    known = {FILE_MODE_SETTING, *(PREFIX + each.name.upper() for each in fields(ServerConfig))}
    assert named(PAGE.read_text()) <= known


def test_every_max_setting_is_a_limit() -> None:
    """A new one that is named as a limit gets a row."""
    caps = {each.name for each in fields(ServerConfig) if "max" in each.name.split("_")}
    assert caps - set(LIMITS) == {"segment_max_events", "segment_max_bytes", "segment_max_age_ms"}, "these only seal"
