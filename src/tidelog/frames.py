"""Arrow tables as pandas and polars data frames and as rows, and data frames as tables to append.

Every object with `to_arrow` gets its other forms here, one line each:

    to_pandas, to_polars, to_dicts = PANDAS.of(to_arrow), POLARS.of(to_arrow), DICTS.of(to_arrow)

pandas and polars belong to the extra `frames` and are imported when a method needs them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import wraps
from importlib import import_module
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, Protocol, TypeVar

import msgspec
import pyarrow as pa

from tidelog.errors import BadInput, Unsupported
from tidelog.formats import lazy_compute as pc
from tidelog.times import Time, time_ms

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

S = TypeVar("S")
P = ParamSpec("P")
F = TypeVar("F")
M = TypeVar("M", bound=Callable[..., Any])
Rows = list[dict[str, Any]]

RECORD_SCHEMA: Final = pa.schema(
    [
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("ts", pa.timestamp("ms", tz="UTC"), nullable=False),
        pa.field("node", pa.string()),
        pa.field("tag", pa.string()),
        pa.field("meta", pa.string()),  # JSON
        pa.field("data", pa.binary(), nullable=False),
        pa.field("json", pa.bool_()),  # whether data is JSON text
    ]
)
_FIELDS: Final = {field.name: field for field in [pa.field("key", pa.string(), nullable=False), *RECORD_SCHEMA]}
_OPTIONAL: Final = ("node", "tag", "meta")
_decode = msgspec.json.Decoder().decode
_encode_lines = msgspec.json.Encoder().encode_lines


# ── columns of records ────────────────────────────────────────────────────────────────────────────


def check_columns(columns: object) -> tuple[str, ...] | None:
    """Raise BadInput unless these are columns of records; None: all."""
    if columns is None:
        return None
    names = () if isinstance(columns, str) or not isinstance(columns, Iterable) else tuple(columns)
    if not names or not all(isinstance(name, str) and name in RECORD_SCHEMA.names for name in names):
        raise BadInput(f"columns are a list of {', '.join(RECORD_SCHEMA.names)}, not {columns!r:.80}; nothing was read")
    return names


def record_schema(columns: Sequence[str] | None) -> pa.Schema:
    """The schema of records with these columns."""
    return RECORD_SCHEMA if columns is None else pa.schema([RECORD_SCHEMA.field(name) for name in columns])


def typed_records(stored: pa.RecordBatch | pa.Table) -> Any:
    """Return stored records with text as text and times in milliseconds. Empty is how a missing tag, node or meta is
    stored beside others that have one; here it is null."""
    schema = pa.schema([_FIELDS[name] for name in stored.schema.names], stored.schema.metadata)
    typed = stored.cast(schema)
    for place, name in enumerate(schema.names):
        if name in _OPTIONAL and pc.any(is_empty := pc.equal(pc.binary_length(stored[name]), 0)).as_py():
            typed = typed.set_column(place, schema.field(name), pc.if_else(is_empty, None, typed[name]))
    return typed


def time_range(
    seek: Callable[[Time], int], from_seq: int, to_seq: int | None, since: Time | None, until: Time | None
) -> tuple[int, int | None]:
    """Narrow a range of seqs to records of `since` or later and before `until`. Times of records do not fall."""
    if since is not None:
        from_seq = max(from_seq, seek(time_ms("since", since)) - 1)
    if until is not None:
        before = seek(time_ms("until", until)) - 1
        to_seq = before if to_seq is None else min(to_seq, before)
    return from_seq, to_seq


class SegmentRange(Protocol):
    """The seqs and the times of a segment."""

    @property
    def base(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def first_ts(self) -> int: ...
    @property
    def last_ts(self) -> int: ...


class TableQuery:
    """What a table of records consists of: a range of seqs, columns and a filter. A filter needs `pyarrow.dataset`,
    whose import takes as long as a small query, so it is imported with the first filter."""

    def __init__(self, from_seq: int, to_seq: int | None, columns: Sequence[str] | None, filter: object) -> None:
        self.from_seq, self.to_seq, self.columns, self.filter = from_seq, to_seq, check_columns(columns), None
        self.needed = self.columns  # the columns to read
        if filter is not None:
            from tidelog import datasets

            self.filter = datasets.check_filter(filter)
            self.needed = datasets.columns_to_read(self.columns, self.filter)

    def ranges(self, segments: Sequence[SegmentRange]) -> list[tuple[int, int | None]]:
        """The ranges of seqs that can have a match; `segments` are needed with a filter only."""
        if self.filter is None:
            return [(self.from_seq, self.to_seq)]
        from tidelog import datasets

        return datasets.matching_ranges(self.filter, segments, self.from_seq, self.to_seq)

    def select(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """What matches of a batch, with the columns of the query."""
        found = batch if self.filter is None else batch.filter(self.filter)
        return found if self.columns is None else found.select(list(self.columns))

    def table(self, batches: Sequence[pa.RecordBatch], metadata: dict[bytes, bytes]) -> pa.Table:
        table = pa.Table.from_batches(batches, schema=record_schema(self.columns))
        return table.replace_schema_metadata(metadata)


# ── other forms of a table ────────────────────────────────────────────────────────────────────────


def _require(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise Unsupported(
            f"this needs {module}, which is not installed; nothing was done, run: pip install 'tidelog[frames]'"
        ) from None


def to_pandas(table: pa.Table) -> pd.DataFrame:
    """Convert a table to pandas. Whole numbers stay whole numbers where values are missing."""
    pandas = _require("pandas")
    has_missing = any(pa.types.is_integer(column.type) and column.null_count for column in table.columns)
    types = {pa.int64(): pandas.Int64Dtype()}.get if has_missing else None
    frame: pd.DataFrame = table.replace_schema_metadata(None).to_pandas(types_mapper=types)
    return frame


def to_polars(table: pa.Table) -> pl.DataFrame:
    """Convert a table to polars."""
    frame: pl.DataFrame = _require("polars").from_arrow(table.replace_schema_metadata(None))
    return frame


def to_dicts(table: pa.Table) -> Rows:
    """Convert a table to one dict a row. JSON in `data` and `meta` is decoded; the column `json`, which says where, is
    left out then."""
    rows: Rows = table.to_pylist()
    decodes_data = {"data", "json"} <= set(table.schema.names)
    for row in rows if decodes_data else ():
        if row.pop("json"):
            row["data"] = _decode(row["data"])
    for row in rows if "meta" in table.schema.names else ():
        if row["meta"]:
            row["meta"] = _decode(row["meta"])
    return rows


class Form(Generic[F]):
    """A form of tables: the methods of objects that have `to_arrow`, and of topics that have `append_arrow`."""

    def __init__(self, name: str, module: str | None, convert: Callable[[pa.Table], F], text: str) -> None:
        self._name, self._module, self._convert, self._text = name, module, convert, text

    def of(self, to_arrow: Callable[Concatenate[S, P], pa.Table]) -> Callable[Concatenate[S, P], F]:
        """Return a method that is `to_arrow` in this form: same arguments."""

        @wraps(to_arrow)
        def method(self_: S, /, *args: P.args, **kwargs: P.kwargs) -> F:
            self._prepare(kwargs)
            return self._convert(to_arrow(self_, *args, **kwargs))

        return self._documented(method)

    def awaiting(
        self, to_arrow: Callable[Concatenate[S, P], Coroutine[Any, Any, pa.Table]]
    ) -> Callable[Concatenate[S, P], CoroutineType[Any, Any, F]]:
        """`of` for a coroutine method; the conversion runs in a thread."""

        @wraps(to_arrow)
        async def method(self_: S, /, *args: P.args, **kwargs: P.kwargs) -> F:
            self._prepare(kwargs)
            return await asyncio.to_thread(self._convert, await to_arrow(self_, *args, **kwargs))

        return self._documented(method)  # type: ignore[return-value]  # as pyright infers it

    def _prepare(self, kwargs: dict[str, Any]) -> None:
        """Raise before anything is read where the library is missing; ask for what the conversion needs."""
        if self._module is not None:
            _require(self._module)
        elif "columns" in kwargs:
            kwargs["columns"] = _with_json(kwargs["columns"])

    def _documented(self, method: M) -> M:
        method.__name__ = f"to_{self._name}"
        method.__qualname__ = method.__qualname__.replace("to_arrow", method.__name__)
        method.__doc__ = self._text
        return method


def _with_json(columns: Sequence[str] | None) -> Sequence[str] | None:
    """The columns that `to_dicts` needs to decode these."""
    if columns is None or isinstance(columns, str) or "data" not in columns or "json" in columns:
        return columns
    return [*columns, "json"]


PANDAS: Final[Form[pd.DataFrame]] = Form(
    "pandas",
    "pandas",
    to_pandas,
    """`to_arrow` as a pandas data frame: the same arguments and columns. Needs the extra `frames`.

    >>> orders.to_pandas(columns=["seq"])["seq"].tolist()
    [1, 2, 3]
    """,
)
POLARS: Final[Form[pl.DataFrame]] = Form(
    "polars",
    "polars",
    to_polars,
    """`to_arrow` as a polars data frame: the same arguments and columns. Needs the extra `frames`.

    >>> orders.to_polars(columns=["seq"])["seq"].to_list()
    [1, 2, 3]
    """,
)
DICTS: Final = Form(
    "dicts",
    None,
    to_dicts,
    """`to_arrow` as a list with one dict for each row: the same arguments. Times are datetimes, JSON is decoded.

    >>> orders.to_dicts(columns=["seq", "data"])[0]
    {'seq': 1, 'data': {'sku': 'A'}}
    """,
)


# ── frames to append ──────────────────────────────────────────────────────────────────────────────


def from_pandas(frame: pd.DataFrame) -> pa.Table:
    """Convert a pandas data frame to a table for `append_arrow`."""
    pandas = _require("pandas")
    if not isinstance(frame, pandas.DataFrame):
        raise BadInput(f"append_pandas takes a pandas DataFrame, not {type(frame).__name__}; nothing was written")
    try:
        return as_records(pa.Table.from_pandas(frame, preserve_index=False))
    except pa.ArrowException as error:
        raise BadInput(f"the data frame has a column that is not of one type: {error}; nothing was written") from None


def from_polars(frame: pl.DataFrame) -> pa.Table:
    """Convert a polars data frame to a table for `append_arrow`."""
    polars = _require("polars")
    if not isinstance(frame, polars.DataFrame):
        raise BadInput(f"append_polars takes a polars DataFrame, not {type(frame).__name__}; nothing was written")
    return as_records(frame.to_arrow())


def as_records(table: pa.Table) -> pa.Table:
    """Return a table for `append_arrow`: as it is if it has a column `data`, else one with a JSON object for each
    row."""
    if "data" in table.schema.names:
        return table.replace_schema_metadata(None)
    if not table.num_columns:
        raise BadInput("a data frame to append has at least one column; nothing was written")
    for name in table.schema.names:
        _check_finite(name, table[name])
    texts = _encode_lines(_with_microseconds(table).to_pylist()).split(b"\n")[:-1]
    return pa.table({"data": pa.array(texts, pa.binary()), "json": pa.repeat(True, len(texts))})


def _check_finite(name: str, values: pa.ChunkedArray | pa.Array) -> None:
    """Raise BadInput for NaN and infinities, at any depth: JSON has none."""
    if pa.types.is_floating(values.type):
        if not pc.all(pc.is_finite(values), min_count=0).as_py():
            raise BadInput(
                f"the column {name!r} has NaN or an infinity, which JSON cannot represent; nothing was written, use "
                "nulls"
            )
    elif pa.types.is_struct(values.type):
        for field in values.type:
            _check_finite(name, pc.struct_field(values, field.name))
    elif pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        _check_finite(name, pc.list_flatten(values))


def _with_microseconds(table: pa.Table) -> pa.Table:
    """Times of data frames are in nanoseconds, those of Python in microseconds."""
    fields = [
        field.with_type(pa.timestamp("us", field.type.tz))
        if pa.types.is_timestamp(field.type) and field.type.unit == "ns"
        else field.with_type(pa.duration("us"))
        if pa.types.is_duration(field.type) and field.type.unit == "ns"
        else field
        for field in table.schema
    ]
    return table.cast(pa.schema(fields), safe=False)
