"""Plain words: names and prose use the words of the field, and every package has a map.

A private word costs every new reader a search. `BANNED` lists those that were used here, with words that readers know
from Kafka, PostgreSQL, asyncio or HTTP. The checks are functions from text to complaints, so that the tests beside them
can plant a violation.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.test_tidy import PACKAGE, files, modules, none, read

BANNED = {
    "whoever somebody nobody": "name the component: the client, a reader, the committer",
    "told tell tells telling": "reply, notify, report, encode, distinguish",
    "lies": "is stored, is at",
    "behind": "after (order), below (numbers), the rest of",
    "held against": "compared with, verified against",
    "vouch vouches vouched": "covers, proves, verifies",
    "mend mends mended": "repair, fix",
    "twin twins": "the Python implementation, the other implementation",
    "seam seams": "interface, boundary",
    "rim": "edge",
    "figures": "metrics, measurements, numbers",
    "crowd crowds lobby lobbies": "batch of requests, fast path",
    "house guest guests": "server state, connection",
    "gate gates": "lock, window, threshold",
    "bell bells": "notifier",
    "desk desks": "claim queue",
    "room rooms": "space, capacity, channel",
    "hearing patience": "delivery, slow consumer guard",
    "stretch stretches": "range",
    "lane lanes": "forwarder, stream, vectorized scan",
    "burial bury buried": "dead letter",
    "wish wishes": "schedule, request",
    "tally": "counter, statistics",
    "pump pumps pumped": "notify loop, scheduler",
    "chapter chapters": "phase, step",
    "glance": "peek, read",
    "disown": "release",
}
_WORD = {
    word: hint for words, hint in BANNED.items() for word in (words.split() if words != "held against" else [words])
}
_PATTERN = re.compile(rf"\b(?:{'|'.join(sorted(_WORD, key=len, reverse=True))})\b", re.IGNORECASE)
# Names of example channels, and the bytes of a golden file that has one.
_EXAMPLES = re.compile(r"!room@|%21room%40|21726f6f6d")
_DEFINITION = re.compile(r"\s*(?:async\s+def|def|class)\s+(\w+)")  # parsing all tests takes ten times as long

PROSE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/")


def _complaints_in(name: str, number: int, text: str) -> Iterator[str]:
    for match in _PATTERN.finditer(_EXAMPLES.sub("", text)):
        word = match[0].lower()
        yield f"{name}:{number}: {match[0]!r} is a private word: {_WORD[word]}"


def _parts(identifier: str) -> str:
    """`claimQueue_state` as words."""
    return re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", identifier.replace("_", " "))


def prose_complaints(name: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        yield from _complaints_in(name, number, line)


def source_complaints(name: str, text: str) -> Iterator[str]:
    """Comments, strings and identifiers of a Python module."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string != "tell":  # the method of a file
            yield from _complaints_in(name, token.start[0], _parts(token.string))
        elif token.type in (tokenize.COMMENT, tokenize.STRING):
            for further, line in enumerate(token.string.splitlines()):
                yield from _complaints_in(name, token.start[0] + further, line)


def test_name_complaints(name: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if definition := _DEFINITION.match(line):
            yield from _complaints_in(name, number, _parts(definition[1]))


test_name_complaints.__test__ = False  # type: ignore[attr-defined]  # a check, not a test


def test_prose_has_no_private_word() -> None:
    none(complaint for name, text in files(PROSE, ".md") for complaint in prose_complaints(name, text))


def test_source_has_no_private_word() -> None:
    none(complaint for name, text in files(PACKAGE, ".py") for complaint in source_complaints(name, text))
    none(complaint for name, text in files(PACKAGE, (".pyx", ".pyi")) for complaint in prose_complaints(name, text))


def test_names_of_tests_and_modules_have_no_private_word() -> None:
    none(complaint for name, text in files("tests/", ".py") for complaint in test_name_complaints(name, text))
    places = ("src/", "tests/", "benchmarks/", "docs/", "examples/")
    none(
        complaint for name, _ in files(places) for complaint in _complaints_in(name, 1, _parts(name.replace("-", " ")))
    )


@pytest.mark.parametrize(
    "source",
    [
        '"""Whoever waits is served."""',
        "x = 1  # the records behind a seq",
        "def notify_lobby(): ...",
        "class ClaimDesk: ...",
        "message = 'nobody was told'",
    ],
)
def test_planted_private_word_is_reported(source: str) -> None:
    assert list(source_complaints("engine/topic.py", source))


def test_words_that_only_contain_a_private_word_pass() -> None:
    source = (
        '"""Delegates a trimmed planet; ann@example.org joins !room@example.org."""\nstorytelling = aggregate = 1\n'
    )
    assert not [*source_complaints("engine/topic.py", source), *prose_complaints("docs/a.md", source)]


# Maps ------------------------------------------------------------------------------------------------


def map_complaints(module: str, text: str) -> Iterator[str]:
    """The docstring of a package says in 5 to 15 lines how its modules work together."""
    lines = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    if not 5 <= len(lines) <= 15:
        yield f"{module}: the map of the package has {len(lines)} lines, not 5 to 15"
    named = set(re.findall(r"\w+", "\n".join(lines)))
    folder = module.removesuffix("__init__.py")
    there = {
        name.removeprefix(PACKAGE + folder).split("/")[0].removesuffix(".py") for name, _ in files(PACKAGE + folder)
    }
    if folder and len(named & there) < min(2, len(there) - 1):
        yield f"{module}: the map names none of the package's modules"


def test_every_package_has_its_map() -> None:
    none(
        complaint
        for module, text in modules()
        if module.endswith("__init__.py")
        for complaint in map_complaints(module, text)
    )


def test_planted_package_without_a_map_is_reported() -> None:
    assert list(map_complaints("wal/__init__.py", '"""The write-ahead log."""'))
    assert list(map_complaints("wal/__init__.py", '"""The WAL.\n\nOne\ntwo\nthree\nfour\n"""'))


def test_module_docstrings_have_no_tags() -> None:
    none(
        f"{module}:1: a docstring starts with what the module is for, not with a tag"
        for module, text in modules()
        if re.match(r'r?"""(?:[^\n]*\n\n)?\[(?:hot|shell|policy)\]', text)
    )


def test_the_package_is_read() -> None:
    assert read(f"{PACKAGE}errors.py")
