"""Run code with the compiled functions and with their Python reference implementations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tidelog import _native, _pure_python, native

BOTH = pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "python"])


@contextmanager
def implementation(*, compiled: bool) -> Iterator[None]:
    """Replace the functions of `tidelog.native` with those of one of the two modules."""
    with pytest.MonkeyPatch.context() as patch:
        for name in native.__all__:
            patch.setattr(native, name, getattr(_native if compiled else _pure_python, name))
        yield


@pytest.fixture(params=[True, False], ids=["compiled", "python"])
def both_implementations(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test once with each implementation."""
    with implementation(compiled=request.param):
        yield
