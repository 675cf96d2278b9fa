"""The stages that tests ask for: one per loop, so that what holds on one holds on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.unit.http.harness import LOOPS, ListenerHarness, RawConnection

from tidelog.http.limits import Limits


@pytest.fixture(params=LOOPS)
def kind(request: pytest.FixtureRequest) -> str:
    name = request.param
    assert isinstance(name, str)
    return name


@pytest.fixture
def listener(kind: str) -> Iterator[ListenerHarness]:
    """With limits as they are."""
    with ListenerHarness(kind) as opened:
        yield opened


@pytest.fixture
def connection(listener: ListenerHarness) -> Iterator[RawConnection]:
    with listener.connect() as opened:
        yield opened


@pytest.fixture
def make_listener(kind: str) -> Callable[..., ListenerHarness]:
    """A stage with limits of one's own, to be opened by the test."""
    return lambda **limits: ListenerHarness(kind, Limits(**limits))
