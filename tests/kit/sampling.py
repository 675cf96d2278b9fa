"""Which part of a sweep `make test` takes. `TIDELOG_TEST_SEED` chooses another part."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Final, TypeVar

import pytest

T = TypeVar("T")

SEED: Final = int(os.environ.get("TIDELOG_TEST_SEED", "0"))
"""Over as many seeds as a sample has parts, every case is in `make test` once."""


def one_in(parts: int, cases: Iterable[Any]) -> list[Any]:
    """Return all cases; all but one in `parts`, chosen by SEED, are marked `sweep`, so `make crash` has them."""
    return [
        case if number % parts == SEED % parts else pytest.param(*_values(case), marks=pytest.mark.sweep)
        for number, case in enumerate(cases)
    ]


def _values(case: object) -> tuple[object, ...]:
    return case if isinstance(case, tuple) else (case,)
