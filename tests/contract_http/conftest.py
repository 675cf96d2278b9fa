"""One server for most tests of a worker, and a name of its own for every topic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest

from tests.contract_http.api import Api
from tests.contract_http.server import Server

_numbers = count(1)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Without keys, with the defaults of every setting."""
    with Server(tmp_path_factory.mktemp("shared")).start() as running:
        yield running


@pytest.fixture
def api(server: Server) -> Iterator[Api]:
    with server.client() as client:
        yield client


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Names that no other test has; `name("b")` sorts behind `name("a")` within one test."""
    number = next(_numbers)
    worker = getattr(request.config, "workerinput", {}).get("workerid", "main")

    def made(what: str = "t") -> str:
        return f"{worker}-{number:04d}-{what}"

    return made


@pytest.fixture
def topic(name: Callable[[str], str]) -> str:
    """A name for a topic that is not there."""
    return name("t")
