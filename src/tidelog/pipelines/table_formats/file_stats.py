"""Statistics of the columns of a file, as the log of a Delta table has them: readers skip files by them.

    numRecords, minValues, maxValues, nullCount      from the footer of the Parquet file; of seq, ts, tag, node and
                                                     typed columns of numbers, dates, times and texts

A long text is cut: the least value to its beginning, the greatest to its beginning with the last character of Unicode
after it. Both are bounds of the values, and may not be values themselves.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any, Final

import msgspec
import pyarrow as pa

_TEXT_CHARS: Final = 32
_LAST_CHARACTER: Final = "\U0010ffff"


def encode_stats(footer: Any, schema: pa.Schema) -> str:
    """Return the statistics of a file from its metadata, as pyarrow collects it."""
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for at in range(footer.num_columns if footer.num_row_groups else 0):
        name = footer.row_group(0).column(at).path_in_schema
        if name not in schema.names or not _has_order(schema.field(name).type):
            continue
        found = [footer.row_group(number).column(at).statistics for number in range(footer.num_row_groups)]
        if any(stats is None or not stats.has_null_count for stats in found):
            continue
        rows = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
        nulls[name] = sum(stats.null_count for stats in found)
        known = [stats for stats, count in zip(found, rows, strict=True) if stats.null_count < count]
        if known and all(stats.has_min_max for stats in known):
            least[name] = _encode_bound(min(stats.min for stats in known), is_greatest=False)
            greatest[name] = _encode_bound(max(stats.max for stats in known), is_greatest=True)
    made: dict[str, Any] = {"numRecords": footer.num_rows}
    if footer.num_rows:
        made |= {"minValues": least, "maxValues": greatest, "nullCount": nulls}
    return msgspec.json.encode(made).decode()


def _has_order(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_string(kind)
        or pa.types.is_date32(kind)
        or pa.types.is_timestamp(kind)
    )


def _encode_bound(value: Any, *, is_greatest: bool) -> Any:
    if isinstance(value, str):
        if len(value) <= _TEXT_CHARS:
            return value
        return value[:_TEXT_CHARS] + (_LAST_CHARACTER if is_greatest else "")
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ") if value.tzinfo else value.isoformat()
    return value.isoformat() if isinstance(value, date) else value
