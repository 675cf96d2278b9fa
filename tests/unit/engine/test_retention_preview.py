"""The preview of retention says what a change of the config then does."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from tests.unit.engine.harness import TINY, EngineHarness

from tidelog.errors import BadInput


def test_a_preview_names_records_times_and_groups_and_changes_nothing() -> None:
    world = EngineHarness()
    topic = world.log.topic("t", durability="fsync")
    for _ in range(10):
        topic.append(b"x" * 10)
        world.clock.tick(100)
    topic.group("behind").commit(4)
    topic.group("held").hold(20)
    topic.group("ahead").commit(9)
    files, state = world.disk.tree(), topic.state()
    found = topic.simulate_retention(cap_records=3)
    assert (found.records, found.bytes, found.cap.first_seq, found.cap.last_seq) == (7, 70, 1, 7)
    assert found.cap.first_ms is not None
    assert found.cap.last_ms == found.cap.first_ms + 600
    assert [(loss.group, loss.records, loss.hold_breaks) for loss in found.groups] == [
        ("behind", 3, False),
        ("held", 7, True),
    ]
    assert (found.evict_floor, found.remaining, found.held_by) == (8, (3, 30), ())
    kept = topic.simulate_retention(cap_records=8)
    assert (kept.records, kept.held_by) == (0, ("held",))
    aged = topic.simulate_retention(ttl_ms=450)
    assert (aged.cap.records, aged.ttl.records, aged.ttl.last_seq) == (0, 6, 6)
    assert (world.disk.tree(), topic.state()) == (files, state)
    with pytest.raises(BadInput, match="cap_records"):
        topic.simulate_retention(cap_records=-1)


@pytest.mark.parametrize("seed", range(24))
def test_what_a_preview_says_is_what_the_change_does(seed: int) -> None:
    random = Random(seed)
    world = EngineHarness(**TINY)
    start: dict[str, Any] = {"discard": random.choice(("old", "old", "reject")), "durability": "fsync"}
    topic = world.log.topic("t", **start)
    for _ in range(random.randint(1, 30)):
        topic.append(b"x" * random.randint(1, 30), tag="x", meta={"m": 1} if random.random() < 0.3 else None)
        world.clock.tick(random.randint(0, 200))
        if random.random() < 0.1:
            world.log.checkpoint()
        if random.random() < 0.1:
            topic.delete(seqs=[random.randint(1, topic.head_seq)])
    for name in ("a", "b", "c"):
        if random.random() < 0.6:
            group = topic.group(name)
            group.commit(random.randint(0, topic.head_seq))
            group.hold(random.choice((0, 30, 200)))
    fields: dict[str, Any] = {
        "cap_records": random.choice((0, 3, 8)),
        "cap_bytes": random.choice((0, 50, 150)),
        "ttl_ms": random.choice((0, 300, 1_500)),
    }
    said = topic.simulate_retention(**fields)
    rows = len(topic.gaps())
    world.log.topic("t", **fields)
    topic.state()  # what is too old expires with the next look
    state = topic.state()
    assert (state.count, state.bytes, state.evict_floor) == (*said.remaining, said.evict_floor)
    assert state.config == said.config
    new = topic.gaps()[rows:]
    assert sum(row.records for row in new) == said.records
    assert sum(row.bytes for row in new) == said.bytes
    broken = {name for row in new for name in row.about.split(", ") if name}
    assert broken == {loss.group for loss in said.groups if loss.hold_breaks}
