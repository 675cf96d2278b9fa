"""What the engine's own errors carry: the wire answers from these facts, not from the message."""

from __future__ import annotations

import pytest

from tidelog.engine.topic_index import Gap
from tidelog.errors import (
    AlreadyExists,
    BatchTooLarge,
    Error,
    GapFound,
    NotFound,
    Refused,
    Throttled,
    TopicExists,
    TopicFull,
    TopicNotFound,
    Unavailable,
)

GAP = Gap(3, 7, "ttl", 5, 8, 9)
CASES: list[tuple[Error, str, type[Error], dict[str, object], str]] = [
    (TopicNotFound("jobs"), "topic_not_found", NotFound, {"topic": "jobs"}, "no topic 'jobs'.*create it"),
    (
        TopicExists("jobs", reason="it is a log, a queue was asked for"),
        "topic_exists_incompatible",
        AlreadyExists,
        {"topic": "jobs", "reason": "it is a log, a queue was asked for"},
        "'jobs'.*it is a log, a queue.*another name",
    ),
    (
        TopicFull("jobs", cap_records=5, cap_bytes=0, head_seq=9, earliest_seq=5),
        "topic_full",
        Refused,
        {"topic": "jobs", "cap_records": 5, "cap_bytes": 0, "head_seq": 9, "earliest_seq": 5},
        "at most 5 records and refuses.*nothing was written.*delete or ack",
    ),
    (
        TopicFull("jobs", cap_records=5, cap_bytes=70, head_seq=9, earliest_seq=5),
        "topic_full",
        Refused,
        {"cap_bytes": 70},
        "at most 5 records and 70 bytes and refuses",
    ),
    (
        BatchTooLarge("records", count=10_001, limit=10_000),
        "batch_too_large",
        Refused,
        {"count": 10_001, "limit": 10_000},
        "10001 records.*10000; nothing was written, send them in parts",
    ),
    (
        GapFound("jobs", GAP),
        "gap",
        Refused,
        {"topic": "jobs", "gap": GAP, **GAP._asdict()},
        r"seqs 3 to 7 are lost \(ttl\).*from_seq=7",
    ),
    (
        GapFound("jobs", Gap(1, 0, "recreated", 1, 1, 0)),
        "gap",
        Refused,
        {"reason": "recreated", "missed_estimate": 1},
        "deleted and made again.*from_seq=0",
    ),
    (
        Throttled("total_bytes", max=100, used=90, asked=11),
        "throttled",
        Unavailable,
        {"limit": "total_bytes", "max": 100, "used": 90, "asked": 11},
        "90 of 100.*11 more.*nothing was written.*retry",
    ),
]


@pytest.mark.parametrize(
    ("error", "code", "category", "facts", "words"),
    CASES,
    ids=[f"{type(case[0]).__name__}-{i}" for i, case in enumerate(CASES)],
)
def test_an_error_says_what_happened_whether_it_was_written_and_what_to_do(
    error: Error, code: str, category: type[Error], facts: dict[str, object], words: str
) -> None:
    """G12 for the refusals: an error of these categories has written nothing."""
    assert error.code == code
    assert isinstance(error, category)
    assert error.written is False
    assert error.retryable is (category is Unavailable)
    assert {name: getattr(error, name) for name in facts} == facts
    with pytest.raises(category, match=words):
        raise error
