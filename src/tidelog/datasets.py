"""A topic as an Arrow dataset: what DuckDB, polars and Arrow query lazily, and which seqs a filter can match.

    records = topic.to_dataset()
    duckdb.sql("select tag, count(*) from records where ts > '2026-01-01' group by tag")

An engine asks the dataset for a scanner with the columns and the filter of its query. Only those columns are read, and
only the ranges of seqs that can have a match: a segment states its seqs and times, so a condition on `seq` or `ts`
skips whole segments. The rest of the filter is evaluated batch by batch. A scan reads to the head at its start.

Arrow has no public form of a filter that could be searched for conditions. It compares filters with what partitions of
a dataset guarantee, so segments are given to it as partitions of files that are never opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs

from tidelog.errors import BadInput
from tidelog.frames import RECORD_SCHEMA, SegmentRange, TableQuery, record_schema, time_range
from tidelog.times import Time

_WORDS: Final = re.compile(r"\w+")
_FORMAT: Final = ds.ParquetFileFormat()
_FILES: Final = pyarrow.fs.LocalFileSystem()
_NO_END: Final = (1 << 63) - 1


def check_filter(filter: object) -> ds.Expression | None:
    """Raise BadInput unless this is a filter of Arrow over columns of records."""
    if filter is None:
        return None
    if not isinstance(filter, ds.Expression):
        raise BadInput(
            f"filter is an expression of Arrow such as pyarrow.compute.field('tag') == 'a', not "
            f"{type(filter).__name__}; nothing was read"
        )
    try:
        ds.Scanner.from_batches(iter(()), schema=RECORD_SCHEMA, filter=filter)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise BadInput(f"the filter does not fit the columns of records: {error}; nothing was read") from None
    return filter


def columns_to_read(columns: Sequence[str] | None, filter: ds.Expression | None) -> tuple[str, ...] | None:
    """The columns of a query and of its filter; None: all."""
    if columns is None:
        return None
    words = set() if filter is None else set(_WORDS.findall(str(filter)))
    if "FieldPath" in words:  # a field without its name
        return None
    return tuple(name for name in RECORD_SCHEMA.names if name in columns or name in words)


def matching_ranges(
    filter: ds.Expression, segments: Sequence[SegmentRange], from_seq: int, to_seq: int | None
) -> list[tuple[int, int | None]]:
    """Return the parts of a range of seqs that can have a match, by the seqs and times of its segments. Each is the
    records after a seq, up to and including another."""
    last = _NO_END - 1 if to_seq is None else to_seq
    edges: list[tuple[int, int, int | None, int | None]] = []  # first seq, stop, first and last time
    at = from_seq + 1
    newest_ts: int | None = None
    for segment in segments:
        if segment.stop <= at or segment.base > last:
            continue
        if segment.base > at:
            edges.append((at, segment.base, None, None))
        edges.append((max(at, segment.base), min(segment.stop, last + 1), segment.first_ts, segment.last_ts))
        at, newest_ts = segment.stop, segment.last_ts
    if at <= last:
        edges.append((at, last + 1, newest_ts, None))  # the tail: times do not fall
    fragments = [
        _FORMAT.make_fragment(str(number), _FILES, partition_expression=_guarantee(*edge))
        for number, edge in enumerate(edges)
    ]
    if not fragments:
        return []
    partitions = ds.FileSystemDataset(fragments, RECORD_SCHEMA, _FORMAT, _FILES)
    numbers = sorted(int(fragment.path) for fragment in partitions.get_fragments(filter=filter))
    ranges: list[tuple[int, int]] = []
    for first, stop, _, _ in (edges[number] for number in numbers):
        if ranges and ranges[-1][1] == first - 1:
            ranges[-1] = (ranges[-1][0], stop - 1)
        else:
            ranges.append((first - 1, stop - 1))
    return [(low, None if to_seq is None and high == last else high) for low, high in ranges]


def _guarantee(first: int, stop: int, first_ts: int | None, last_ts: int | None) -> ds.Expression:
    seq, ts = ds.field("seq"), ds.field("ts")
    holds = (seq >= first) & (seq < stop)
    if first_ts is not None:
        holds &= ts >= _time(first_ts)
    if last_ts is not None:
        holds &= ts <= _time(last_ts)
    return holds


def _time(ts_ms: int) -> pa.Scalar:
    return pa.scalar(ts_ms, pa.timestamp("ms", tz="UTC"))


class _Scan(Protocol):
    def iter_arrow_batches(self) -> Iterator[pa.RecordBatch]: ...


class _Segments(Protocol):
    @property
    def segments(self) -> Sequence[SegmentRange]: ...


class ScannedTopic(Protocol):
    """What a dataset needs of a topic, in a directory or on a server."""

    @property
    def name(self) -> str: ...
    def scan(
        self,
        from_seq: int = 0,
        to_seq: int | None = None,
        *,
        nodes: frozenset[bytes] = ...,
        strong: bool = False,
        columns: Sequence[str] | None = None,
    ) -> _Scan: ...
    def segments(self) -> _Segments: ...
    def seek(self, ts_ms: Time) -> int: ...


class TopicDataset(ds.Dataset):  # type: ignore[misc]  # Arrow has no types
    """A topic that is read when it is queried. `Topic.to_dataset` returns one."""

    def __init__(
        self,
        topic: ScannedTopic,
        from_seq: int,
        to_seq: int | None,
        *,
        since: Time | None,
        until: Time | None,
        nodes: frozenset[bytes],
        strong: bool,
    ) -> None:
        # Without the constructor of `Dataset`, which cannot be called: engines use `schema` and `scanner` only.
        TableQuery(from_seq, to_seq, None, None)
        self._topic, self._from_seq, self._to_seq = topic, from_seq, to_seq
        self._since, self._until, self._nodes, self._strong = since, until, nodes, strong

    def __repr__(self) -> str:
        return f"<dataset of topic {self._topic.name!r}>"

    @property
    def schema(self) -> pa.Schema:
        """The columns of `Topic.to_arrow`."""
        return RECORD_SCHEMA

    def scanner(
        self, columns: Sequence[str] | None = None, filter: ds.Expression | None = None, **options: Any
    ) -> ds.Scanner:
        """Return a scanner of these columns of the records that match. DuckDB, polars and Arrow call it."""
        from_seq, to_seq = time_range(self._topic.seek, self._from_seq, self._to_seq, self._since, self._until)
        wanted = ["seq"] if columns is not None and not len(columns) else columns  # of a count
        query = TableQuery(from_seq, to_seq, wanted, filter)
        kept = {name: value for name, value in options.items() if name in ("batch_size", "use_threads", "memory_pool")}
        return ds.Scanner.from_batches(
            self._read(query), schema=record_schema(query.needed), columns=columns, filter=filter, **kept
        )

    def _read(self, query: TableQuery) -> Iterator[pa.RecordBatch]:
        segments = self._topic.segments().segments if query.filter is not None else ()
        for from_seq, to_seq in query.ranges(segments):
            scan = self._topic.scan(from_seq, to_seq, nodes=self._nodes, strong=self._strong, columns=query.needed)
            yield from scan.iter_arrow_batches()
