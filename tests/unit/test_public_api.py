"""docs/api.md lists the public names of every object of `tidelog.open`, and no other name is public."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tidelog
from tidelog.testing import ManualClock, SimDisk

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def documented_names(section: str) -> set[str]:
    """Return the names in the first column of a section's table."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    first_cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}


def public_object(section: str) -> object:
    database = tidelog.open("data", disk=SimDisk(), clock=ManualClock(), threads=False, wal_file_bytes=1 << 14)
    topic = database.topic("orders")
    return {
        "Database": database,
        "Topic": topic,
        "Queue": database.queue("jobs"),
        "Channel": database.channel("!support@example.org"),
        "Group": topic.group("readers"),
    }[section]


@pytest.mark.parametrize("section", ["Database", "Queue", "Channel", "Group"])
def test_dir_shows_exactly_the_documented_names(section: str) -> None:
    public = {name for name in dir(public_object(section)) if not name.startswith("_")}
    assert documented_names(section) == public


def test_every_documented_name_of_a_topic_exists() -> None:
    """The methods of a topic that only the server calls are public still."""
    assert documented_names("Topic") <= set(dir(public_object("Topic")))


def test_the_package_exports_the_documented_objects() -> None:
    sections = re.findall(r"^## (\w+)$", PAGE.read_text(), flags=re.M)
    assert sections == ["Database", "Topic", "Queue", "Channel", "Group"]
    assert set(sections) <= set(tidelog.__all__)
