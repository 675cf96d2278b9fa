"""The walks of docs/architecture.md: the functions that they name exist, and no walk passes too many files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest

from tests.test_tidy import PACKAGE, modules, none, read

PAGE = "docs/architecture.md"
FILES_MAX = {
    "Embedded append": 14,
    "HTTP write": 18,
    "SSE push": 10,
    "Claim and ack": 9,
    "Spark read and export": 10,
    "Channel publish": 9,
    "Open after a crash": 6,
}


class Step(NamedTuple):
    module: str  # `engine/topic.py`
    function: str  # `Topic.append`


def walks(text: str) -> dict[str, list[Step]]:
    """The sections `### Name (n files)` below "Walks", each with lines "1. `module.py`: `function`, `Class.method`"."""
    found: dict[str, list[Step]] = {}
    section = text.partition("\n## Walks\n")[2].partition("\n## ")[0]
    for title, body in re.findall(
        r"^### ([^\n(]+?) \(\d+ files\)\n(.*?)(?=^### |\Z)", section, re.MULTILINE | re.DOTALL
    ):
        steps = found.setdefault(title, [])
        for module, functions in re.findall(r"^\d+\. `([\w/.]+\.pyx?)`: ((?:`[\w.]+`(?:, )?)+)", body, re.MULTILINE):
            steps += [Step(module, function) for function in re.findall(r"`([\w.]+)`", functions)]
    return found


@cache
def definitions(source: str) -> set[str]:
    """Functions, classes and methods, by qualified name."""
    found: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


def walk_complaints(title: str, steps: list[Step], sources: dict[str, str]) -> Iterator[str]:
    for module, function in steps:
        if module not in sources:
            yield f"{title}: there is no module {module}"
        elif function not in definitions(sources[module]):
            yield f"{title}: {module} has no {function}"
    files = {step.module for step in steps}
    if len(files) > FILES_MAX[title]:
        yield f"{title}: {len(files)} files, at most {FILES_MAX[title]}"
    if f"### {title} ({len(files)} files)" not in read(PAGE):
        yield f"{title}: the page does not say that it is {len(files)} files"


def rules(text: str) -> list[Step]:
    """The rows of the table "Where a rule is decided"."""
    section = text.partition("\n## Where a rule is decided\n")[2].partition("\n## ")[0]
    return [Step(*found) for found in re.findall(r"`([\w/.]+\.py)`: `([\w.]+)`", section)]


def test_rules_are_where_the_page_says() -> None:
    sources = dict(modules())
    found = rules(read(PAGE))
    assert len(found) >= 15
    none(
        f"{module} has no {name}"
        for module, name in found
        if name not in definitions(sources.get(module, "")) and f"\n{name}: " not in sources.get(module, "")
    )


def test_every_walk_is_there() -> None:
    assert list(walks(read(PAGE))) == list(FILES_MAX)


@pytest.mark.parametrize("title", FILES_MAX)
def test_functions_of_a_walk_exist(title: str) -> None:
    steps = walks(read(PAGE))[title]
    assert len(steps) >= 5
    none(walk_complaints(title, steps, dict(modules())))


def test_a_planted_wrong_step_is_reported() -> None:
    title, steps = next(iter(walks(read(PAGE)).items()))
    sources = dict(modules())
    assert not list(walk_complaints(title, steps, sources))
    for wrong in (Step("engine/nothing.py", "append"), Step("engine/topic.py", "Topic.nothing")):
        assert len(list(walk_complaints(title, [*steps, wrong], sources))) >= 1
    many = [Step(module, next(iter(sorted(found)))) for module, text in sources.items() if (found := definitions(text))]
    assert any("at most" in complaint for complaint in walk_complaints(title, many, sources))


def test_the_page_is_about_this_package() -> None:
    assert PACKAGE == "src/tidelog/"
