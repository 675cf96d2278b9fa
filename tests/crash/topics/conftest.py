"""Batches of these histories are small, and would all stay in memory: here every one of a few bytes is large, and is
read where the WAL has it. And who has few seqs on record books more, as a fast topic does. Two deltas of the manifest
are many, so that bases and deltas both occur."""

from __future__ import annotations

import pytest

from tidelog.engine import append, manifest, topic_state


@pytest.fixture(autouse=True)
def _small_batches_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append, "LARGE_WRITE_BYTES", 24)
    monkeypatch.setattr(topic_state, "_SMALL_RESERVATION", 0)
    monkeypatch.setattr(manifest, "DELTAS_MAX", 2)
