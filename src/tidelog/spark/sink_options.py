"""[policy] What a writer may ask for, and which columns it may bring. Refused before a row is written.

who writes     query, else queryName, else checkpointLocation where that is absolute, else the query id that Spark
               keeps in the checkpoint: the name under which batches are numbered, the same at every start. A relative
               checkpointLocation names nothing: two jobs in two directories could have the same one.
               A batch (`save`) has none, and is written once because it is run once; with `query` and `batch` (in
               foreachBatch) it has the one they name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    MapType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from tidelog.addresses import SERVERS, directory, scheme_of
from tidelog.engine.config import check_topic_name
from tidelog.engine.numbers import ONCE
from tidelog.errors import BadInput
from tidelog.spark import options as reading
from tidelog.spark.options import IS_JSON
from tidelog.spark.wire import RETRY_MS

_SHOWN_MAX: Final = 80
OF_PLACE: Final = "checkpoint:"  # what the name of a stream begins with that goes by the place of its checkpoint
OF_QUERY: Final = "query:"  # and of one that goes by its query id


@dataclass(frozen=True, slots=True)
class WriteOptions:
    path: str | None
    server: str | None
    key: str | None = field(repr=False)
    topic: str | None
    writer: str | None  # None: a batch without a name, or a stream that goes by its query id
    batch: int | None
    json: bool
    retry_ms: int = RETRY_MS

    @property
    def place(self) -> str:
        return self.path or self.server or ""

    def for_batch(self) -> WriteOptions:
        if (self.writer is None) != (self.batch is None):
            raise BadInput(
                "options query and batch: a batch that may be repeated has both; nothing was written, give both or "
                "neither"
            )
        return self

    def for_stream(self) -> WriteOptions:
        if self.batch is not None:
            raise BadInput("option batch: Spark numbers the batches of a stream; nothing was written, leave it out")
        return self


def _wrong(name: str, value: str, must: str) -> BadInput:
    return BadInput(f"option {name} is {value[:_SHOWN_MAX]!r}, it must be {must}; nothing was written")


def _text(name: str, value: str) -> str:
    if not value.strip():
        raise _wrong(name, value, "a text that is not empty")
    return value.strip()


def _path(name: str, value: str) -> str:
    value = _text(name, value)
    if scheme_of(value) in SERVERS:
        raise _wrong(name, value, "a directory; a server is named by the option server")
    return directory(value, f"option {name}", "nothing was written")


def _topic(_: str, value: str) -> str:
    check_topic_name(value)
    return value


def _query(name: str, value: str) -> str:
    value = _text(name, value)
    if value.startswith((ONCE, OF_PLACE, OF_QUERY)):
        raise _wrong(name, value, f"a name that does not begin with {ONCE}, {OF_PLACE} or {OF_QUERY}")
    return value


def _number(name: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise _wrong(name, value, "a whole number from 0")
    return int(value)


def _retry(name: str, value: str) -> int:
    try:
        return reading.span_ms(name, value)
    except BadInput as error:
        raise BadInput(str(error).replace("nothing was read", "nothing was written")) from None


def _payload(name: str, value: str) -> bool:
    if value.lower() not in ("bytes", "json"):
        raise _wrong(name, value, "bytes or json")
    return value.lower() == "json"


_READERS: Final[dict[str, Callable[[str, str], Any]]] = {
    "path": _path,
    "server": reading.address,
    "key": _text,
    "topic": _topic,
    "query": _query,
    "batch": _number,
    "payload": _payload,
    "queryName": _query,
    "checkpointLocation": _text,
    "retryTimeout": _retry,
}
NAMES: Final = tuple(_READERS)


def read(given: Mapping[str, str]) -> WriteOptions:
    """The options of a writer, or BadInput that names the one that is wrong."""
    known = {name.lower(): name for name in NAMES}
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name.lower() not in known:
            near = get_close_matches(name.lower(), known, n=1, cutoff=0.0)[0]
            raise BadInput(
                f"there is no option {name[:_SHOWN_MAX]!r}; nothing was written, did you mean {known[near]}?"
            )
        full = known[name.lower()]
        found[full] = _READERS[full](full, str(value))
    if ("path" in found) == ("server" in found):
        given_both = "both are given" if "path" in found else "neither is given"
        raise BadInput(f"options path and server: {given_both}; nothing was written, name a directory or a server")
    if "key" in found and "path" in found:
        raise BadInput("option key: it is for a server, and path is given; nothing was written, leave it out")
    if "retryTimeout" in found and "path" in found:
        raise BadInput("option retryTimeout: it is for a server, and path is given; nothing was written, leave it out")
    place = found.get("checkpointLocation", "")
    by_place = f"{OF_PLACE}{place.rstrip('/')}" if place.startswith("/") or scheme_of(place) else None
    return WriteOptions(
        path=found.get("path"),
        server=found.get("server"),
        key=found.get("key"),
        topic=found.get("topic"),
        writer=found.get("query") or found.get("queryName") or by_place,
        batch=found.get("batch"),
        json=found.get("payload", False),
        retry_ms=found.get("retryTimeout", RETRY_MS),
    )


_KINDS: Final[dict[str, tuple[type[DataType], ...]]] = {
    "data": (BinaryType, StringType, StructType),
    "topic": (StringType,),
    "tag": (StringType,),
    "node": (StringType,),
    "ts": (TimestampType,),
    "meta": (MapType,),
    IS_JSON: (BooleanType,),
}
_SAID: Final = {"data": "binary, string or struct", "meta": "map<string,string>", "ts": "timestamp", IS_JSON: "boolean"}
COLUMNS: Final = (*_KINDS, "seq")


def check_schema(schema: StructType, options: WriteOptions) -> None:
    """Refuse columns that no record has, and types that do not fit."""
    names = [each.name for each in schema.fields]
    if len(set(names)) < len(names):
        raise BadInput(f"the DataFrame names a column twice: {names}; nothing was written")
    if "data" not in names:
        raise BadInput(
            f"the DataFrame has the columns {', '.join(names)} and no data; nothing was written, make it of them: "
            'select(struct("*").alias("data"))'
        )
    for each in schema.fields:
        if each.name not in COLUMNS:
            raise BadInput(
                f"the DataFrame has a column {each.name!r}, which no record has; nothing was written. Columns are "
                f"{', '.join(COLUMNS)}; drop it, or make it part of data with struct(…)"
            )
        wanted = _KINDS.get(each.name)
        if wanted is not None and not _fits(each.dataType, wanted):
            said = _SAID.get(each.name, "string")
            raise BadInput(
                f"the DataFrame has {each.name} as {each.dataType.simpleString()}, it must be {said}; nothing was "
                "written, cast it"
            )
    if IS_JSON in names:
        _check_kinds(schema["data"].dataType, options)
    if options.topic is None and "topic" not in names:
        raise BadInput("option topic: no topic is named and there is no column topic; nothing was written, name one")


def _check_kinds(data: DataType, options: WriteOptions) -> None:
    """Refuse a second word on what the column says row by row."""
    if options.json:
        raise BadInput(
            "option payload is 'json', and the DataFrame has a column is_json that says it row by row; nothing was "
            "written, leave the option out, or drop the column and all rows are JSON"
        )
    if isinstance(data, StructType):
        raise BadInput(
            "the DataFrame has data as struct, which is always written as JSON, and a column is_json; nothing was "
            "written, drop the column"
        )


def _fits(kind: DataType, wanted: tuple[type[DataType], ...]) -> bool:
    if isinstance(kind, MapType):
        return MapType in wanted and isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType)
    return isinstance(kind, wanted) and not isinstance(kind, TimestampNTZType)
