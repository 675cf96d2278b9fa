"""Records of a topic as one Arrow table: a range of seqs or times, some columns, what matches a filter."""

from __future__ import annotations

import pyarrow as pa

from tidelog.engine.json_pages import BulkScan
from tidelog.engine.read import ExcludedNodes, table_metadata
from tidelog.engine.results import Counts
from tidelog.engine.segment_listing import list_segments
from tidelog.engine.topic_index import Gap
from tidelog.engine.topic_state import TopicState
from tidelog.formats.frame import SEQ_MAX
from tidelog.frames import TableQuery


def read_table(topic: TopicState, query: TableQuery, nodes: ExcludedNodes, *, strong: bool = False) -> pa.Table:
    """Read what a query selects. The schema's metadata has `gap`, `gaps` and `counts` of the ranges that were read, as
    JSON."""
    batches: list[pa.RecordBatch] = []
    gaps: list[Gap] = []
    counts = Counts()
    for from_seq, to_seq in query.ranges(list_segments(topic).segments if query.filter is not None else ()):
        at, last = from_seq, to_seq
        while True:
            scan = BulkScan(topic, at, last, nodes, SEQ_MAX, strong=strong, columns=query.needed)
            last = scan.head_seq if last is None else min(last, scan.head_seq)
            batches += map(query.select, scan.iter_arrow_batches())
            gaps, counts = gaps + scan.gaps, counts + scan.counts
            if scan.next_from_seq >= last or (scan.next_from_seq == at and scan.gap is None):
                break
            at = scan.next_from_seq  # it was overtaken by eviction, and continues with that gap
    rows = sum(map(len, batches))
    counts = counts._replace(rows=rows, filtered=counts.filtered + counts.rows - rows)
    return query.table(batches, table_metadata(gaps, counts))
