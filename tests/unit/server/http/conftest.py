"""The stages that tests ask for: one per loop, so that what holds on one holds on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.unit.server.http.stage import LOOPS, Stage, Wire

from tidelog.server.http.limits import Limits


@pytest.fixture(params=LOOPS)
def kind(request: pytest.FixtureRequest) -> str:
    name = request.param
    assert isinstance(name, str)
    return name


@pytest.fixture
def stage(kind: str) -> Iterator[Stage]:
    """With limits as they are."""
    with Stage(kind) as opened:
        yield opened


@pytest.fixture
def wire(stage: Stage) -> Iterator[Wire]:
    with stage.connect() as opened:
        yield opened


@pytest.fixture
def limited(kind: str) -> Callable[..., Stage]:
    """A stage with limits of one's own, to be opened by the test."""
    return lambda **limits: Stage(kind, Limits(**limits))
