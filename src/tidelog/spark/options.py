"""Options of readers, and `OptionParser`, which readers and writers share. Every value is checked here, once.

  1. An unknown name is refused with the nearest known one: a misspelt limit would read everything.
  2. An invalid value is refused, and the message shows it.
  3. Two options that contradict each other are refused.
  4. Options for streams are refused for a batch, and the other way round.

Spark passes options as text and names in lower case. As in Spark's Kafka source, a starting seq is included, an ending
seq is not, -2 is the earliest and -1 the latest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args
from urllib.parse import urlsplit

import msgspec

from tidelog.addresses import SERVER_SCHEMES, Location, local_directory, scheme_of
from tidelog.errors import BadInput
from tidelog.spark.filters import RecordFilter, parse_filter
from tidelog.spark.http_client import RETRY_TIMEOUT_MS

OnGap: TypeAlias = Literal["fail", "emit", "skip"]
OnTimestampMiss: TypeAlias = Literal["error", "latest"]
Payload: TypeAlias = Literal["bytes", "json", "infer", "registered"]
CodecName: TypeAlias = Literal["tide", "rustlog", "laminar", "narwhal", "log"]
"""`tide`: topics of a data directory; `log`: a log of the library of any layout; the others: one of that layout."""

COLUMNS: Final = ("topic", "seq", "ts", "node", "tag", "meta", "data")
IS_JSON: Final = "is_json"  # only where it is named; the columns above are the default
GAP: Final = "gap"
EARLIEST: Final = -2
LATEST: Final = -1
SPLIT_BYTES: Final = 32 << 20
_MESSAGE_VALUE_CHARS: Final = 80
_SEQ_MAX: Final = (1 << 63) - 1
_BYTE_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_DURATION_UNITS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}


@dataclass(frozen=True, slots=True)
class Bound:
    """Where reading starts or ends: the same for all topics, a seq per topic, a time, or the position of a group."""

    default: int = EARLIEST  # EARLIEST or LATEST
    seqs: tuple[tuple[str, int], ...] = ()
    time_ms: int | None = None
    group: str | None = None

    def seq_for(self, topic: str) -> int:
        """Return the seq for a topic, or EARLIEST or LATEST."""
        return dict(self.seqs).get(topic, self.default)


@dataclass(frozen=True, slots=True)
class Options:
    location: Location
    codec: CodecName
    subscribe: tuple[str, ...]
    pattern: str | None
    start: Bound | None  # None: not given; a batch then starts at the earliest, a stream at the latest
    end: Bound | None
    on_timestamp_miss: OnTimestampMiss
    group: str | None
    rows_max: int | None
    bytes_max: int | None
    rows_min: int | None
    max_trigger_delay_ms: int
    partitions_min: int | None
    split_bytes: int
    on_gap: OnGap
    columns: tuple[str, ...] | None
    where: RecordFilter
    verify: bool
    payload: Payload
    retry_ms: int
    is_strong: bool
    history: tuple[str, ...] = ()  # queues whose events are read instead of records
    gaps: tuple[str, ...] = ()  # topics whose rows of the gap log are read instead of records
    # Of payload=registered, set by the source: by topic the first seq of columns that its first schema does not have.
    field_starts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def emits_gaps(self) -> bool:
        return self.on_gap == "emit"

    def for_batch(self) -> Options:
        """Return these options. Raises BadInput for an option of streams."""
        only = {
            "maxOffsetsPerTrigger": self.rows_max,
            "maxBytesPerTrigger": self.bytes_max,
            "minOffsetsPerTrigger": self.rows_min,
            "group": self.group,
        }
        _reject_given(only, "a batch reads its range once; leave it out or use readStream")
        return self

    def for_stream(self) -> Options:
        """Return these options. Raises BadInput for an option of batches."""
        _reject_given(
            {"history": self.history or None, "gaps": self.gaps or None}, "it is read as a batch; use spark.read"
        )
        _reject_given(
            {"endingOffsets or endingTimestamp": self.end},
            "a stream has no end; leave it out, or read a batch",
        )
        return self


def _reject_given(given: Mapping[str, object], reason: str) -> None:
    for name, value in given.items():
        if value is not None:
            raise BadInput(f"option {name}: {reason}; nothing was read")


# ── values ────────────────────────────────────────────────────────────────────────────────────────


class OptionValue(NamedTuple):
    """A given option. `undone` is the part of an error message that says that nothing was read or written."""

    name: str
    text: str
    undone: str

    def invalid(self, expected: str) -> BadInput:
        text = self.text
        shown = repr(text) if len(text) <= _MESSAGE_VALUE_CHARS else f"{text[:_MESSAGE_VALUE_CHARS]!r} and more"
        return BadInput(f"option {self.name} is {shown}, it must be {expected}; {self.undone}")


ValueParser: TypeAlias = Callable[[OptionValue], Any]


def parse_choice(*choices: str) -> ValueParser:
    def parse_value(value: OptionValue) -> str:
        if value.text.lower() not in choices:
            raise value.invalid(f"one of {', '.join(choices)}")
        return value.text.lower()

    return parse_value


def _parse_bool(value: OptionValue) -> bool:
    if value.text.lower() not in ("true", "false"):
        raise value.invalid("true or false")
    return value.text.lower() == "true"


def _parse_count(value: OptionValue) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", value.text) or not int(value.text):
        raise value.invalid("a whole number from 1")
    return int(value.text)


def _parse_bytes(value: OptionValue) -> int:
    match = re.fullmatch(r"([0-9]{1,15})\s*([kmg]?)i?b?", value.text.lower())
    if not match or not int(match[1]):
        raise value.invalid("a number of bytes from 1, such as 33554432 or 32m")
    return int(match[1]) * _BYTE_UNITS[match[2]]


def _parse_duration_ms(value: OptionValue) -> int:
    match = re.fullmatch(r"([0-9]{1,12})\s*(ms|s|m|h)", value.text.lower())
    if not match:
        raise value.invalid("a time such as 500ms, 30s, 15m or 1h")
    return int(match[1]) * _DURATION_UNITS_MS[match[2]]


def _parse_names(value: OptionValue) -> tuple[str, ...]:
    names = tuple(part.strip() for part in value.text.split(","))
    if not all(names):
        raise value.invalid("a list of names with commas between them")
    if len(set(names)) < len(names):
        raise value.invalid("a list in which nothing is named twice")
    return names


def _parse_pattern(value: OptionValue) -> str:
    try:
        re.compile(value.text)
    except re.error as error:
        raise value.invalid(f"a regular expression ({error})") from None
    return value.text


def parse_text(value: OptionValue) -> str:
    if not value.text.strip():
        raise value.invalid("a text that is not empty")
    return value.text.strip()


def parse_directory(value: OptionValue) -> str:
    """Return the path of a directory, which may be given as a `file:` address."""
    text = parse_text(value)
    if scheme_of(text) in SERVER_SCHEMES:
        raise value.invalid("a directory; a server is named by the option server")
    return local_directory(text, f"option {value.name}", value.undone)


def _parse_directory_or_store(value: OptionValue) -> str:
    """Return the path of a directory, or the address of an object store as it is given."""
    text = parse_text(value)
    if scheme_of(text) in SERVER_SCHEMES:
        raise value.invalid("a directory or an object store; a server is named by the option server")
    return text if scheme_of(text) not in (None, "file") else parse_directory(value)


def _parse_server(value: OptionValue) -> str:
    value = value._replace(text=value.text.strip().rstrip("/"))
    try:
        parts = urlsplit(value.text)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port)
    except ValueError:
        is_valid = None
    if not is_valid:
        raise value.invalid("an address such as http://127.0.0.1:8080")
    return value.text


def _parse_timestamp_ms(value: OptionValue) -> int:
    """Return milliseconds since the epoch, from those or from ISO 8601 with a time zone."""
    if re.fullmatch(r"[0-9]{1,15}", value.text):
        return int(value.text)
    try:
        moment = datetime.fromisoformat(value.text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise value.invalid("milliseconds since the epoch, or a time such as 2026-01-31T12:00:00Z")
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400_000) + since.seconds * 1000 + since.microseconds // 1000


def _parse_bound(value: OptionValue) -> Bound:
    word = value.text.lower()
    if word in ("earliest", "latest"):
        return Bound(EARLIEST if word == "earliest" else LATEST)
    if value.text.startswith("group:"):
        if not value.text.removeprefix("group:").strip():
            raise value.invalid("group: and the name of a group")
        return Bound(group=value.text.removeprefix("group:").strip())
    try:
        seqs = msgspec.json.decode(value.text)
    except msgspec.DecodeError:
        seqs = None
    if not isinstance(seqs, dict) or not seqs:
        raise value.invalid('earliest, latest, group:<name>, or seqs by topic such as {"orders": 42}')
    return Bound(seqs=tuple(sorted((topic, _parse_seq(value, seq)) for topic, seq in seqs.items())))


def _parse_seq(value: OptionValue, seq: object) -> int:
    if isinstance(seq, dict):
        seq = seq.get("seq")
    if type(seq) is not int or not EARLIEST <= seq <= _SEQ_MAX:
        raise value.invalid("a seq for each topic, from 0, or -2 for the earliest and -1 for the latest")
    return seq


class OptionParser:
    """Parses the options of a reader or a writer.

    Args:
        parsers: the options besides the location, by name.
        verb: "read" or "written": what an error message says was not done.
        parse_path: the parser of the option path.
    """

    def __init__(self, parsers: Mapping[str, ValueParser], verb: str, parse_path: ValueParser) -> None:
        self._undone = f"nothing was {verb}"
        shared = {"path": parse_path, "server": _parse_server, "key": parse_text, "retryTimeout": _parse_duration_ms}
        self._parsers = {**shared, **parsers}
        self.names = tuple(self._parsers)

    def parse(self, given: Mapping[str, str]) -> dict[str, Any]:
        """Return the parsed values by name, with `location` and `retryTimeout`. Raises BadInput that names the wrong
        option."""
        known = {name.lower(): name for name in self.names}
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name.lower() not in known:
                near = get_close_matches(name.lower(), known, n=1, cutoff=0.0)[0]
                raise BadInput(
                    f"there is no option {name[:_MESSAGE_VALUE_CHARS]!r}; {self._undone}, did you mean {known[near]}?"
                )
            full = known[name.lower()]
            values[full] = self._parsers[full](OptionValue(full, str(value), self._undone))
        if ("path" in values) == ("server" in values):
            both = "both are given" if "path" in values else "neither is given"
            raise BadInput(f"options path and server: {both}; {self._undone}, name a directory or a server")
        for name in ("key", "retryTimeout"):
            if name in values and "path" in values:
                raise BadInput(f"option {name}: it is for a server, and path is given; {self._undone}, leave it out")
        values["location"] = Location(values.get("path") or values["server"], values.get("key"))
        values.setdefault("retryTimeout", RETRY_TIMEOUT_MS)
        return values


_PARSERS: Final[dict[str, ValueParser]] = {
    "codec": parse_choice(*get_args(CodecName)),
    "subscribe": _parse_names,
    "subscribePattern": _parse_pattern,
    "startingOffsets": _parse_bound,
    "endingOffsets": _parse_bound,
    "startingTimestamp": _parse_timestamp_ms,
    "endingTimestamp": _parse_timestamp_ms,
    "onTimestampMiss": parse_choice(*get_args(OnTimestampMiss)),
    "group": parse_text,
    "maxOffsetsPerTrigger": _parse_count,
    "maxBytesPerTrigger": _parse_bytes,
    "minOffsetsPerTrigger": _parse_count,
    "maxTriggerDelay": _parse_duration_ms,
    "minPartitions": _parse_count,
    "splitBytes": _parse_bytes,
    "failOnDataLoss": _parse_bool,
    "onGap": parse_choice(*get_args(OnGap)),
    "includeGaps": _parse_bool,
    "columns": _parse_names,
    "where": lambda value: parse_filter(value.name, value.text),
    "verify": _parse_bool,
    "payload": parse_choice(*get_args(Payload)),
    "consistency": parse_choice("eventual", "strong"),
    "history": _parse_names,
    "gaps": _parse_names,
}
_OPTIONS: Final = OptionParser(_PARSERS, "read", _parse_directory_or_store)
OPTION_NAMES: Final = _OPTIONS.names
_MAX_TRIGGER_DELAY_MS: Final = 15 * 60_000


def parse_options(given: Mapping[str, str]) -> Options:
    """Parse the options of a reader. Raises BadInput that names the wrong one."""
    found = _OPTIONS.parse(given)
    _check_consistent(found)
    on_gap = _resolve_on_gap(found)
    payload: Payload = found.get("payload", "bytes")
    columns = found.get("columns")
    if columns is not None:
        _check_columns(columns, gaps=on_gap == "emit", payload=payload)
    if "maxTriggerDelay" in found and "minOffsetsPerTrigger" not in found:
        raise BadInput(
            "option maxTriggerDelay: it bounds how long minOffsetsPerTrigger may wait; nothing was read, give both"
        )
    return Options(
        location=found["location"],
        codec=found.get("codec", "tide"),
        subscribe=found.get("subscribe", ()),
        pattern=found.get("subscribePattern"),
        start=_seq_or_time_bound(found, "startingOffsets", "startingTimestamp"),
        end=_seq_or_time_bound(found, "endingOffsets", "endingTimestamp"),
        on_timestamp_miss=found.get("onTimestampMiss", "error"),
        group=found.get("group"),
        rows_max=found.get("maxOffsetsPerTrigger"),
        bytes_max=found.get("maxBytesPerTrigger"),
        rows_min=found.get("minOffsetsPerTrigger"),
        max_trigger_delay_ms=found.get("maxTriggerDelay", _MAX_TRIGGER_DELAY_MS),
        partitions_min=found.get("minPartitions"),
        split_bytes=found.get("splitBytes", SPLIT_BYTES),
        on_gap=on_gap,
        columns=columns,
        where=found.get("where", RecordFilter()),
        verify=found.get("verify", True),
        payload=payload,
        retry_ms=found["retryTimeout"],
        is_strong=found.get("consistency") == "strong",
        history=found.get("history", ()),
        gaps=found.get("gaps", ()),
    )


_LOG_TABLES: Final = ("history", "gaps")
_LOG_TABLE_OPTIONS: Final = frozenset(("path", "server", "key", "retryTimeout", "location", *_LOG_TABLES))


def _check_log_table(found: Mapping[str, Any], name: str) -> None:
    for other in found:
        if other in _LOG_TABLES and other != name:
            raise BadInput("options history and gaps: both are given; nothing was read, read one after the other")
        if other not in _LOG_TABLE_OPTIONS:
            raise BadInput(
                f"option {other}: {name} is given, which reads no records; nothing was read, leave it out and filter "
                "the DataFrame"
            )


def _check_consistent(found: Mapping[str, Any]) -> None:
    for name in _LOG_TABLES:
        if name in found:
            _check_log_table(found, name)
            return
    if found.get("consistency") == "strong" and found.get("codec", "tide") != "tide":
        raise BadInput(
            f"option consistency is 'strong': it is for topics, and codec is {found['codec']!r}; nothing was read, "
            "leave it out"
        )
    if "server" in found and found.get("codec", "tide") != "tide":
        raise BadInput(f"option codec is {found['codec']!r}: a server has topics; nothing was read, read by path")
    if found.get("payload") == "registered" and found.get("codec", "tide") != "tide":
        raise BadInput("option payload is 'registered': logs have no schemas; nothing was read, give a schema")
    if "subscribe" in found and "subscribePattern" in found:
        raise BadInput("options subscribe and subscribePattern: both are given; nothing was read, give one of them")
    if not {"subscribe", "subscribePattern"} & set(found) and found.get("codec", "tide") == "tide":
        raise BadInput("option subscribe: no topic is named; nothing was read, name some or give subscribePattern")


def _seq_or_time_bound(found: Mapping[str, Any], by_seq: str, by_time: str) -> Bound | None:
    if by_seq in found and by_time in found:
        raise BadInput(f"options {by_seq} and {by_time}: both are given; nothing was read, give one of them")
    if by_time in found:
        return Bound(time_ms=found[by_time])
    bound: Bound | None = found.get(by_seq)
    if by_seq == "endingOffsets" and bound is not None and bound == Bound(EARLIEST):
        raise BadInput("option endingOffsets is 'earliest': there is nothing before it; nothing was read, give latest")
    return bound


def _resolve_on_gap(found: Mapping[str, Any]) -> OnGap:
    fail: bool | None = found.get("failOnDataLoss")
    on_gap: OnGap | None = found.get("onGap")
    if fail is not None and on_gap is not None and fail != (on_gap == "fail"):
        raise BadInput(
            f"options failOnDataLoss and onGap: {str(fail).lower()} and {on_gap} contradict each other; nothing was "
            "read, give onGap alone"
        )
    chosen: OnGap = on_gap or ("skip" if fail is False else "fail")
    include: bool | None = found.get("includeGaps")
    if include is not None and include != (chosen == "emit"):
        raise BadInput(
            f"option includeGaps is {str(include).lower()} and onGap is {chosen}; nothing was read, gaps are rows with "
            "onGap=emit and only then"
        )
    return chosen


def _check_columns(columns: Iterable[str], *, gaps: bool, payload: Payload) -> None:
    known = (*COLUMNS, IS_JSON, *([GAP] if gaps else []))
    for column in columns:
        if column not in known and payload not in ("infer", "registered"):
            near = get_close_matches(column, known, n=1, cutoff=0.0)[0]
            raise BadInput(f"option columns: there is no column {column!r}; nothing was read, did you mean {near}?")
