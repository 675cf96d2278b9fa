"""Records of a topic as Arrow for users, with text as text: batch by batch, or as one table of a range of seqs or
times, of some columns and of what matches a filter."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from tidelog.engine.json_pages import BulkScan
from tidelog.engine.read import ExcludedNodes, table_metadata
from tidelog.engine.results import Counts
from tidelog.engine.segment_listing import list_segments
from tidelog.engine.topic_index import Gap
from tidelog.engine.topic_state import TopicState
from tidelog.formats.frame import SEQ_MAX
from tidelog.frames import TableQuery, typed_records


class Scan:
    """One pass over a topic in bounded memory. `Topic.scan` returns one; gap and counts are complete when it ends."""

    __slots__ = ("_name", "_scan")

    def __init__(self, name: str, scan: BulkScan) -> None:
        self._name, self._scan = name, scan

    def __repr__(self) -> str:
        return f"<scan of topic {self._name!r}, after {self.next_from_seq}>"

    @property
    def gap(self) -> Gap | None:
        """The first of `gaps`."""
        return self._scan.gap

    @property
    def gaps(self) -> list[Gap]:
        """Every gap among the seqs passed so far."""
        return self._scan.gaps

    @property
    def counts(self) -> Counts:
        """What became of the seqs passed so far."""
        return self._scan.counts

    @property
    def next_from_seq(self) -> int:
        """The cursor: the last seq that was passed."""
        return self._scan.next_from_seq

    @property
    def head_seq(self) -> int:
        """The last seq at the start."""
        return self._scan.head_seq

    @property
    def earliest_seq(self) -> int:
        """The first live record at the start."""
        return self._scan.earliest_seq

    def iter_arrow_batches(self) -> Iterator[pa.RecordBatch]:
        """Yield batches with the columns of `Topic.to_arrow`."""
        return map(typed_records, self._scan.iter_arrow_batches())


def read_table(topic: TopicState, query: TableQuery, nodes: ExcludedNodes, *, strong: bool = False) -> pa.Table:
    """Read what a query selects. The schema's metadata has `gap`, `gaps` and `counts` of the ranges that were read, as
    JSON."""
    batches: list[pa.RecordBatch] = []
    gaps: list[Gap] = []
    counts = Counts()
    for from_seq, to_seq in query.ranges(list_segments(topic).segments if query.filter is not None else ()):
        at, last = from_seq, to_seq
        while True:
            scan = Scan(topic.name, BulkScan(topic, at, last, nodes, SEQ_MAX, strong=strong, columns=query.needed))
            last = scan.head_seq if last is None else min(last, scan.head_seq)
            batches += map(query.select, scan.iter_arrow_batches())
            gaps, counts = gaps + scan.gaps, counts + scan.counts
            if scan.next_from_seq >= last or (scan.next_from_seq == at and scan.gap is None):
                break
            at = scan.next_from_seq  # it was overtaken by eviction, and continues with that gap
    rows = sum(map(len, batches))
    counts = counts._replace(rows=rows, filtered=counts.filtered + counts.rows - rows)
    return query.table(batches, table_metadata(gaps, counts))
