"""`tidelog query`: SQL over topics, through DuckDB.

    SQL ──► names of its tables ──► those that are topics ──► Arrow batches ──► temporary tables of DuckDB ──► result

Only the topics that the query names are read, each once and in bounded memory: DuckDB moves tables that do not fit to
its temporary directory.
"""

from __future__ import annotations

import json
from argparse import Namespace
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing
from datetime import date, datetime
from types import ModuleType
from typing import Any, Final

import pyarrow as pa

from tidelog import protocols
from tidelog.cli.command import DATABASE, Commands, add_command
from tidelog.cli.render import Screen, plural
from tidelog.cli.target import open_target
from tidelog.errors import BadInput, NotFound, TopicNotFound
from tidelog.formats import lazy_compute as pc

TABLE_SCHEMA: Final = pa.schema(
    {
        "seq": pa.int64(),
        "ts": pa.timestamp("us", tz="UTC"),
        "node": pa.string(),
        "tag": pa.string(),
        "meta": pa.string(),
        "data": pa.string(),
        "data_bytes": pa.binary(),
        "json": pa.bool_(),
    }
)
_PAGE_ROWS: Final = 1_000


def query(args: Namespace, screen: Screen) -> int:
    """Run a query and print its rows."""
    duckdb = _import_duckdb()
    with closing(duckdb.connect()) as connection:
        try:
            connection.execute("SET TimeZone = 'UTC'")
            names = connection.get_table_names(args.sql)
            with open_target(args, screen, write=False) as database:
                for name in sorted(names):
                    _load_topic(connection, database, name, screen)
            with screen.progress_bar("running the query"):
                cursor = connection.execute(args.sql)
            columns = [column[0] for column in cursor.description or ()]
            count = _print_rows(screen, columns, iter(lambda: cursor.fetchmany(_PAGE_ROWS), []))
        except duckdb.Error as error:
            raise BadInput(f"DuckDB: {error}; no topic was changed, correct the query") from None
    screen.flush()
    screen.print_note(plural(count, "row"))
    return 0


def _import_duckdb() -> ModuleType:
    try:
        import duckdb
    except ImportError:
        raise NotFound(
            "queries need DuckDB, which is not installed; nothing was read, run: pip install 'tidelog[frames]'"
        ) from None
    module: ModuleType = duckdb
    return module


def _load_topic(connection: Any, database: protocols.Database, name: str, screen: Screen) -> None:
    """Copy a topic into a table of the same name. A name that is no topic is left to DuckDB: it may be a file."""
    try:
        scan = database.topic(name, create=False).scan()
    except (TopicNotFound, BadInput):
        return
    if scan.gap is not None:
        screen.print_note(f"{name}: records up to seq {scan.gap.gap_to} were lost to its cap or to their age")
    reader = pa.RecordBatchReader.from_batches(TABLE_SCHEMA, map(to_table_batch, scan.iter_arrow_batches()))
    connection.register("tidelog_reader", reader)
    quoted = name.replace('"', '""')
    with screen.progress_bar(f"reading {name}"):
        connection.execute(f'CREATE TEMP TABLE "{quoted}" AS SELECT * FROM tidelog_reader')
    connection.unregister("tidelog_reader")


def to_table_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch of records with text where there is text; data that is not UTF-8 is in `data_bytes`."""
    columns: dict[str, Any] = {name: batch.column(name) for name in ("seq", "ts", "json")}
    for name in ("node", "tag", "meta"):
        text, _ = _split_text(batch.column(name))
        columns[name] = pc.if_else(pc.equal(pc.fill_null(text, ""), ""), pa.scalar(None, pa.string()), text)
    columns["data"], columns["data_bytes"] = _split_text(batch.column("data"))
    return pa.RecordBatch.from_arrays([columns[name] for name in TABLE_SCHEMA.names], schema=TABLE_SCHEMA)


def _split_text(column: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return the values that are UTF-8 as text, and the others as bytes, with nulls between them."""
    column = column.cast(pa.binary())
    try:
        return column.cast(pa.string()), pa.nulls(len(column), pa.binary())
    except pa.ArrowInvalid:  # one value at least is not UTF-8
        values = column.to_pylist()
    texts = [None if value is None else _decode(value) for value in values]
    others = [value if text is None else None for value, text in zip(values, texts, strict=True)]
    return pa.array(texts, pa.string()), pa.array(others, pa.binary())


def _decode(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _print_rows(screen: Screen, columns: list[str], pages: Iterator[list[tuple[Any, ...]]]) -> int:
    """Print rows page by page, with --json one object a line, and return their number."""
    count = 0
    for page in pages:
        if screen.json:
            lines = [json.dumps(dict(zip(columns, map(_json_value, row), strict=True))) for row in page]
            screen.write_data("".join(f"{line}\n" for line in lines).encode())
        else:
            screen.print_table(columns, [[_format_value(value) for value in row] for row in page])
        count += len(page)
    if not count and not screen.json and columns:
        screen.print_table(columns, [])
    return count


def _json_value(value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case datetime() | date():
            return value.isoformat()
        case bytes():
            return b64encode(value).decode()
        case list() | tuple():
            return [_json_value(each) for each in value]
        case dict():
            return {str(key): _json_value(each) for key, each in value.items()}
    return str(value)


def _format_value(value: Any) -> str:
    match value:
        case None:
            return ""
        case str():
            return value
        case bytes():
            return value.decode(errors="backslashreplace")
    return str(_json_value(value))


def add(commands: Commands) -> None:
    """Add `query` to the command line."""
    add_command(
        commands,
        "query",
        query,
        DATABASE,
        "SQL",
        summary="SQL over topics, through DuckDB",
        description="Run a query of DuckDB over topics, which are tables under their names (quote names with a dot or "
        "a\n"
        "dash). Columns: seq, ts, node, tag, meta (JSON), data (text; JSON as it was written), data_bytes (data that\n"
        "is not UTF-8), json (whether data is JSON). Only topics that the query names are read, whole, into\n"
        "temporary tables; nothing is written. With --json one object a line. Needs pip install 'tidelog[frames]'.",
        examples='tidelog query data "select tag, count(*) from orders group by tag"\n'
        "tidelog query http://127.0.0.1:4000 \"select seq, data->>'sku' as sku from orders\" --json",
    )
