"""[shell] One task: the stretches of a split, one after the other, as batches of the columns that were asked for.

Every seq of the split is accounted for when it ends: rows that were handed over, deleted, expired, evicted, filtered,
holes. Where the sum is another than was planned the task fails, because somebody would otherwise miss records and not
know it; where it is right, it goes to the worker's log. What was lost since the plan was made follows `onGap`, as it
does there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from tidelog.engine import Counts
from tidelog.errors import Damaged
from tidelog.spark import decode, payload
from tidelog.spark.decode import Cells
from tidelog.spark.options import COLUMNS, IS_JSON, Options
from tidelog.spark.place import Found, Place, Wanted
from tidelog.spark.plan import missed
from tidelog.spark.schema import RESCUED, fields_of
from tidelog.spark.stretches import Lost, Split, Stretch
from tidelog.spark.where import Where

_log = logging.getLogger("tidelog.spark")
_log.setLevel(logging.INFO)  # Spark gathers what workers log, where it is asked to; nobody else hears of it


class Reading:
    """One pass over a split. `counts` is whole when it has ended."""

    def __init__(self, place: Place, options: Options, schema: StructType, where: Where, split: Split) -> None:
        self._place, self._options, self._where, self._split = place, options, where.of_rows(), split
        self._fields = fields_of(schema)
        self._rescue = RESCUED in schema.names
        self._schema: pa.Schema = to_arrow_schema(schema, timezone="UTC")
        own = {name for name in schema.names if name in (*COLUMNS, IS_JSON)}
        self._wanted: Wanted = frozenset({*own, *self._where.columns, "seq", *(["data"] if self._fields else [])})
        self.counts = split.counts

    def batches(self) -> Iterator[pa.RecordBatch]:
        for lost in self._split.lost:
            yield from self._told(lost)
        for stretch in self._split.stretches:
            for found in self._found(stretch):
                for lost in found.lost:
                    yield from self._told(lost)
                self.counts += found.counts
                if found.rows is not None:
                    yield from self._batch(found, stretch.topic)
        if sum(self.counts) != self._split.seqs:
            raise Damaged(
                f"a task was to account for {self._split.seqs} seqs and found {sum(self.counts)} ({self.counts}); "
                "nothing was written, this is a bug in tidelog or damage that `tidelog check` shows"
            )
        _log.info("%s", self._account())

    def _account(self) -> str:
        """Where the seqs of this task went, as JSON: what a worker's log keeps of it."""
        ranges = [[each.topic, each.first, each.stop] for each in self._split.stretches]
        return msgspec.json.encode({"seqs": self._split.seqs, **self.counts._asdict(), "ranges": ranges}).decode()

    def _found(self, stretch: Stretch) -> Iterator[Found]:
        if stretch.inline is None:
            return self._place.read(stretch, self._wanted, verify=self._options.verify)
        return _inlined(stretch)

    def _told(self, lost: Lost | None) -> Iterator[pa.RecordBatch]:
        if lost is None:
            return
        missed(self._options, lost)
        if self._options.gaps:
            last = None if lost.is_open else lost.last
            yield decode.gap_row(lost.first, last, lost.cause, lost.topic, self._schema)

    def _batch(self, found: Found, topic: str) -> Iterator[pa.RecordBatch]:
        assert found.rows is not None, "asked of records"
        cells = decode.cells(found.rows, self._wanted, timed=self._place.timed, kinded=self._place.kinded)
        count = len(cells["seq"])
        mask = self._where.mask(cells)
        if mask is not None:
            cells = {name: column.filter(mask) for name, column in cells.items()}
        kept = len(cells["seq"])
        self.counts += Counts(rows=kept, filtered=count - kept)
        if kept:
            yield self._shaped(cells, topic, kept)

    def _shaped(self, cells: Cells, topic: str, count: int) -> pa.RecordBatch:
        if self._fields:
            cells |= payload.typed(cells["data"], cells["seq"], topic, self._fields, self._schema, rescue=self._rescue)
        columns = []
        for field in self._schema:
            if field.name == "topic":
                columns.append(pa.repeat(topic, count))
            elif field.name == "data" and self._options.payload != "bytes":
                columns.append(decode.text(cells["data"], cells["seq"], topic))
            elif field.name in cells:
                columns.append(cells[field.name])
            else:
                columns.append(pa.nulls(count, field.type))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _inlined(stretch: Stretch) -> Iterator[Found]:
    with pa.ipc.open_stream(stretch.inline) as stream:
        for batch in stream:
            yield Found(batch, Counts())
    assert stretch.counts is not None, "records in a plan come with their counts"
    yield Found(None, stretch.counts)
