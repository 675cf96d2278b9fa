"""Small segments, so that a few messages are several of them and a crash can fall into a roll."""

from __future__ import annotations

import pytest

from tidelog.channels import store


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_SEAL_MESSAGES_MIN", 2)
