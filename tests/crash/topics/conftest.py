"""Batches of these histories are small, and would all stay in memory: here every one of a few bytes is large, and is
read where the WAL has it."""

from __future__ import annotations

import pytest

from tidelog.engine import append


@pytest.fixture(autouse=True)
def _batches_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append, "LARGE_BYTES", 24)
