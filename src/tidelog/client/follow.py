"""Following a topic of a server: long polls, one page after the other. No I/O.

    FollowCursor ──► next_page() ──► a call: POST …/diff, which waits for the next record
         ▲                                    │
         └──────────── accept(page) ◄─────────┘   records and gaps, in order; the cursor moves

The cursor is the state of a follower: it moves when a page is accepted, so a follower continues from there after an
error or after a restart of the server. The retries of a request are those of every request (`core`). Both shells drive
a cursor in the same way and only wait differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tidelog.client.core import Call
from tidelog.client.topic_calls import TopicCalls
from tidelog.engine import SEQ_MAX, Gap, Page, Record
from tidelog.engine.batch_encoder import check_int
from tidelog.engine.read import OnGap
from tidelog.errors import BadInput, GapFound

PAGE_RECORDS: Final = 1_000
PAGE_BYTES: Final = 1 << 20


class FollowCursor:
    """The position of a follower and what it does at a gap."""

    def __init__(
        self,
        topic: str,
        from_seq: int = 0,
        *,
        timeout: float | None = None,
        node: str | Sequence[str] | None = None,
        on_gap: OnGap = "fail",
        strong: bool = False,
    ) -> None:
        if on_gap not in ("fail", "emit", "skip"):
            raise BadInput(f"on_gap is fail, emit or skip, not {on_gap!r}")
        check_int("from_seq", from_seq, 0, SEQ_MAX)
        self.from_seq = from_seq
        self.is_ended = False  # no record arrived for `timeout` seconds
        self._topic, self.timeout, self.node, self._on_gap, self.strong = topic, timeout, node, on_gap, strong

    def next_page(self, topic: TopicCalls) -> Call[Page]:
        """Wait for the next records; the page is empty where none arrived for `timeout` seconds."""
        return topic.read(
            self.from_seq,
            PAGE_RECORDS,
            node=self.node,
            bytes_max=PAGE_BYTES,
            timeout=self.timeout,
            strong=self.strong,
        )

    def accept(self, page: Page) -> list[Record | Gap]:
        """Move past a page and return what the follower yields. Raises GapFound where records were lost and `on_gap` is
        fail; the cursor then stays."""
        if page.gap is not None and self._on_gap == "fail":
            raise GapFound(self._topic, page.gap)
        self.is_ended = page.next_from_seq == self.from_seq and page.gap is None
        self.from_seq = page.next_from_seq
        gap: list[Record | Gap] = [page.gap] if page.gap is not None and self._on_gap == "emit" else []
        return gap + page.records
