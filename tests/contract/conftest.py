"""One database of each kind for the contract of `tidelog.protocols`: a directory and a server, blocking and asyncio."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest
from tests.contract_http.server import Server
from tests.kit.awaited_database import Awaited, connect_awaited, open_awaited

import tidelog
from tidelog import protocols

KEY = "root"  # without keys channels do not persist
_numbers = count(1)


@pytest.fixture(scope="session")
def contract_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server, one for all tests of a worker."""
    with Server(tmp_path_factory.mktemp("contract"), api_keys=KEY).start() as server:
        yield f"http://127.0.0.1:{server.address.port}"


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[protocols.Database]:
    with tidelog.open(str(tmp_path_factory.mktemp("embedded") / "data")) as database:
        yield database


@pytest.fixture(scope="session")
def remote(contract_server: str) -> Iterator[protocols.Database]:
    with tidelog.connect(contract_server, key=KEY) as database:
        yield database


@pytest.fixture(scope="session")
def embedded_asyncio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Awaited]:
    database, thread = open_awaited(str(tmp_path_factory.mktemp("embedded-asyncio") / "data"))
    with database:
        yield database
    thread.stop()


@pytest.fixture(scope="session")
def remote_asyncio(contract_server: str) -> Iterator[Awaited]:
    database, thread = connect_awaited(contract_server, KEY)
    with database:
        yield database
    thread.stop()


@pytest.fixture(scope="session", params=["embedded", "remote", "embedded_asyncio", "remote_asyncio"])
def database(request: pytest.FixtureRequest) -> protocols.Database:
    """A database of each kind; topics have names of their own."""
    found: protocols.Database = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def name() -> Callable[..., str]:
    """Names that no other test has."""
    number = next(_numbers)

    def made(what: str = "t") -> str:
        return f"contract-{number:04d}-{what}"

    return made
