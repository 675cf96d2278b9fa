"""Small frames, so that a caller's batch is a chain of several and a crash can fall between them."""

from __future__ import annotations

import pytest

from tidelog.formats import batch


@pytest.fixture(autouse=True)
def _small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "FRAME_RECORDS_MAX", 2)
