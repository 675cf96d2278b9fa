"""The data source "tidelog": small, without state, and picklable, because Spark sends it from process to process.

Spark says       we say
partition        Split: what one task reads
pushFilters      a condition, where it is on topic, seq, ts, node or tag
schema           the columns of `schema`, or what somebody gave
writer           `sink`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.types import BinaryType, StructField, StructType

from tidelog.errors import BadInput
from tidelog.spark import options as reading
from tidelog.spark import payload, places, plan, schema
from tidelog.spark import sink_options as writing
from tidelog.spark.options import Options
from tidelog.spark.place import Place
from tidelog.spark.plan import Range
from tidelog.spark.read import Reading
from tidelog.spark.sink import TopicStreamWriter, TopicWriter
from tidelog.spark.stream import TopicStreamReader
from tidelog.spark.stretches import Split
from tidelog.spark.where import Term, Where, of_spark

_SAMPLES = 1000  # records at each end of a topic that are looked at for their fields


class TidelogSource(DataSource):
    @property
    def _reader(self) -> type[TopicReader]:
        return FilteringReader

    @classmethod
    def name(cls) -> str:
        return "tidelog"

    def schema(self) -> StructType:
        options = reading.read(self.options)
        if options.payload != "infer":
            return schema.default(options)
        with closing(places.of(options, retry=False)) as place:
            return schema.default(options, payload.inferred(samples(place, options)))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = reading.read(self.options).for_batch()
        return self._reader(options, _given(schema, options))

    def writer(self, schema: StructType, overwrite: bool) -> TopicWriter:
        options = writing.read(self.options).for_batch()
        if overwrite:
            raise BadInput("a log is only appended to; nothing was written, use mode append, or drop the topic first")
        return TopicWriter(options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> TopicStreamWriter:  # noqa: N802
        options = writing.read(self.options).for_stream()
        if overwrite:
            raise BadInput("a log is only appended to; nothing was written, use outputMode append")
        return TopicStreamWriter(options, schema)

    def streamReader(self, schema: StructType) -> TopicStreamReader:  # noqa: N802
        options = reading.read(self.options).for_stream()
        return TopicStreamReader(options, _given(schema, options))


def _given(given: StructType, options: Options) -> StructType:
    return schema.checked(given, options)


def samples(place: Place, options: Options) -> Iterator[bytes]:
    """The data of some records: the first ones and the last ones of every topic."""
    only = reading.read({"path": ".", "subscribe": "a", "onGap": "skip"})
    shape = StructType([StructField("data", BinaryType())])
    for name in plan.topics(place, options):
        sight = place.look(name)
        if sight is None:
            continue
        begin = max(sight.floor, sight.first, sight.earliest)
        late = max(begin, sight.next - _SAMPLES)
        for each in (Range(sight, begin, min(begin + _SAMPLES, late)), Range(sight, late, sight.next)):
            for split in plan.splits(place, only, [each], Where()):
                batches = Reading(place, only, shape, Where(), split).batches()
                yield from (value.as_py() for batch in batches for value in batch.column(0))


class UnfilteredSource(TidelogSource):
    """For a session that does not push filters down: Spark refuses readers that could take them."""

    @property
    def _reader(self) -> type[TopicReader]:
        return TopicReader


class TopicReader(DataSourceReader):
    """A batch: a range of seqs that is fixed when it is planned."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options, self._schema = options, schema
        self._pushed: tuple[Term, ...] = ()

    @property
    def where(self) -> Where:
        return self._options.where + Where(self._pushed)

    def partitions(self) -> Sequence[Split]:
        with closing(places.of(self._options, retry=False)) as place:
            return plan.splits(place, self._options, plan.batch_ranges(place, self._options), self.where)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs on an executor, perhaps twice: the same split gives the same rows."""
        assert isinstance(partition, Split), "planned by this reader"
        with closing(places.of(self._options)) as place:
            yield from Reading(place, self._options, self._schema, self.where, partition).batches()


class FilteringReader(TopicReader):
    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        for each in filters:
            term = of_spark(each, self._schema.names)
            if term is None or self._options.gaps:  # a row that stands for a gap is Spark's to filter
                yield each
            else:
                self._pushed = (*self._pushed, term)
