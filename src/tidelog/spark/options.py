"""What a reader may ask for. Every value is checked here, once, and nothing is ignored.

Rules, in order of authority:
  1. A name that is not known is refused, with the nearest that is: a misspelt limit would read everything.
  2. A value that cannot be meant is refused with the value in the message.
  3. Two options that contradict each other are refused; which one was meant is not guessed.
  4. What concerns only a stream is refused for a batch, and the other way round.

Spark hands options over as text, names in lower case. Seqs follow the habit of Spark's Kafka source: a start is
included, an end is not, -2 is the earliest and -1 the latest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args
from urllib.parse import urlsplit

import msgspec

from tidelog.addresses import SERVER_SCHEMES, local_directory, scheme_of
from tidelog.errors import BadInput
from tidelog.spark.filters import RecordFilter, parse_filter
from tidelog.spark.http_client import RETRY_TIMEOUT_MS

OnGap: TypeAlias = Literal["fail", "emit", "skip"]
OnTimestampMiss: TypeAlias = Literal["error", "latest"]
Payload: TypeAlias = Literal["bytes", "json", "infer"]
CodecName: TypeAlias = Literal["tide", "rustlog", "laminar", "narwhal"]

COLUMNS: Final = ("topic", "seq", "ts", "node", "tag", "meta", "data")
IS_JSON: Final = "is_json"  # given where it is named: the columns above are what everybody gets
GAP: Final = "gap"
EARLIEST: Final = -2
LATEST: Final = -1
SPLIT_BYTES: Final = 32 << 20
_MESSAGE_VALUE_CHARS: Final = 80
_SEQ_MAX: Final = (1 << 63) - 1
_BYTE_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_DURATION_UNITS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bound:
    """Where reading starts or ends: at a place common to all topics, seq by seq, at a time, or where a group stands."""

    default: int = EARLIEST  # EARLIEST or LATEST
    seqs: tuple[tuple[str, int], ...] = ()
    time_ms: int | None = None
    group: str | None = None

    def seq_for(self, topic: str) -> int:
        """The seq for a topic, or EARLIEST or LATEST."""
        return dict(self.seqs).get(topic, self.default)


@dataclass(frozen=True, slots=True)
class Options:
    path: str | None
    server: str | None
    key: str | None = field(repr=False)
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

    @property
    def location(self) -> str:
        """What is read, for messages."""
        return self.path or self.server or ""

    @property
    def is_object_store(self) -> bool:
        """Whether `path` is the address of an object store, and not a directory."""
        return self.path is not None and scheme_of(self.path) is not None

    @property
    def emits_gaps(self) -> bool:
        return self.on_gap == "emit"

    def for_batch(self) -> Options:
        """Themselves, after refusing what only a stream can do."""
        only = {
            "maxOffsetsPerTrigger": self.rows_max,
            "maxBytesPerTrigger": self.bytes_max,
            "minOffsetsPerTrigger": self.rows_min,
            "group": self.group,
        }
        _reject_given(only, "a batch reads its range once; leave it out or use readStream")
        return self

    def for_stream(self) -> Options:
        _reject_given(
            {"endingOffsets or endingTimestamp": self.end},
            "a stream has no end; leave it out, or read a batch",
        )
        return self


def _reject_given(given: Mapping[str, object], reason: str) -> None:
    for name, value in given.items():
        if value is not None:
            raise BadInput(f"option {name}: {reason}; nothing was read")


# ── one value each ────────────────────────────────────────────────────────────────────────────────


def _invalid_option(name: str, value: str, expected: str) -> BadInput:
    shown = repr(value) if len(value) <= _MESSAGE_VALUE_CHARS else f"{value[:_MESSAGE_VALUE_CHARS]!r} and more"
    return BadInput(f"option {name} is {shown}, it must be {expected}; nothing was read")


def _parse_choice(*choices: str) -> Callable[[str, str], Any]:
    def parse_value(name: str, value: str) -> str:
        if value.lower() not in choices:
            raise _invalid_option(name, value, f"one of {', '.join(choices)}")
        return value.lower()

    return parse_value


def _parse_bool(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise _invalid_option(name, value, "true or false")
    return value.lower() == "true"


def _parse_count(name: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", value) or not int(value):
        raise _invalid_option(name, value, "a whole number from 1")
    return int(value)


def _parse_bytes(name: str, value: str) -> int:
    found = re.fullmatch(r"([0-9]{1,15})\s*([kmg]?)i?b?", value.lower())
    if not found or not int(found[1]):
        raise _invalid_option(name, value, "a number of bytes from 1, such as 33554432 or 32m")
    return int(found[1]) * _BYTE_UNITS[found[2]]


def parse_duration_ms(name: str, value: str) -> int:
    found = re.fullmatch(r"([0-9]{1,12})\s*(ms|s|m|h)", value.lower())
    if not found:
        raise _invalid_option(name, value, "a time such as 500ms, 30s, 15m or 1h")
    return int(found[1]) * _DURATION_UNITS_MS[found[2]]


def _parse_names(name: str, value: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in value.split(","))
    if not all(found):
        raise _invalid_option(name, value, "a list of names with commas between them")
    if len(set(found)) < len(found):
        raise _invalid_option(name, value, "a list in which nothing is named twice")
    return found


def _parse_pattern(name: str, value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise _invalid_option(name, value, f"a regular expression ({error})") from None
    return value


def _parse_text(name: str, value: str) -> str:
    if not value.strip():
        raise _invalid_option(name, value, "a text that is not empty")
    return value.strip()


def _parse_path(name: str, value: str) -> str:
    """A directory, or the address of an object store as it is."""
    value = _parse_text(name, value)
    scheme = scheme_of(value)
    if scheme in SERVER_SCHEMES:
        raise _invalid_option(name, value, "a directory or an object store; a server is named by the option server")
    return value if scheme not in (None, "file") else local_directory(value, f"option {name}", "nothing was read")


def parse_server_address(name: str, value: str) -> str:
    value = value.strip().rstrip("/")
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port)
    except ValueError:
        good = None
    if not good:
        raise _invalid_option(name, value, "an address such as http://127.0.0.1:8080")
    return value


def parse_timestamp_ms(name: str, value: str) -> int:
    """Milliseconds since the epoch, from those or from ISO 8601 with a time zone."""
    if re.fullmatch(r"[0-9]{1,15}", value):
        return int(value)
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise _invalid_option(name, value, "milliseconds since the epoch, or a time such as 2026-01-31T12:00:00Z")
    since = found - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400_000) + since.seconds * 1000 + since.microseconds // 1000


def _parse_bound(name: str, value: str) -> Bound:
    if value.lower() in ("earliest", "latest"):
        return Bound(EARLIEST if value.lower() == "earliest" else LATEST)
    if value.startswith("group:"):
        if not value.removeprefix("group:").strip():
            raise _invalid_option(name, value, "group: and the name of a group")
        return Bound(group=value.removeprefix("group:").strip())
    must = 'earliest, latest, group:<name>, or seqs by topic such as {"orders": 42}'
    try:
        found = msgspec.json.decode(value)
    except msgspec.DecodeError:
        raise _invalid_option(name, value, must) from None
    if not isinstance(found, dict) or not found:
        raise _invalid_option(name, value, must)
    return Bound(seqs=tuple(sorted((topic, _parse_seq(name, value, seq)) for topic, seq in found.items())))


def _parse_seq(name: str, value: str, seq: object) -> int:
    if isinstance(seq, dict):
        seq = seq.get("seq")
    if type(seq) is not int or not EARLIEST <= seq <= _SEQ_MAX:
        raise _invalid_option(name, value, "a seq for each topic, from 0, or -2 for the earliest and -1 for the latest")
    return seq


_PARSERS: Final[dict[str, Callable[[str, str], Any]]] = {
    "path": _parse_path,
    "server": parse_server_address,
    "key": _parse_text,
    "codec": _parse_choice(*get_args(CodecName)),
    "subscribe": _parse_names,
    "subscribePattern": _parse_pattern,
    "startingOffsets": _parse_bound,
    "endingOffsets": _parse_bound,
    "startingTimestamp": parse_timestamp_ms,
    "endingTimestamp": parse_timestamp_ms,
    "onTimestampMiss": _parse_choice(*get_args(OnTimestampMiss)),
    "group": _parse_text,
    "maxOffsetsPerTrigger": _parse_count,
    "maxBytesPerTrigger": _parse_bytes,
    "minOffsetsPerTrigger": _parse_count,
    "maxTriggerDelay": parse_duration_ms,
    "minPartitions": _parse_count,
    "splitBytes": _parse_bytes,
    "failOnDataLoss": _parse_bool,
    "onGap": _parse_choice(*get_args(OnGap)),
    "includeGaps": _parse_bool,
    "columns": _parse_names,
    "where": parse_filter,
    "verify": _parse_bool,
    "payload": _parse_choice(*get_args(Payload)),
    "retryTimeout": parse_duration_ms,
    "consistency": _parse_choice("eventual", "strong"),
}
OPTION_NAMES: Final = tuple(_PARSERS)
_MAX_TRIGGER_DELAY_MS: Final = 15 * 60_000


def parse_options(given: Mapping[str, str]) -> Options:
    """The options of a reader, or BadInput that names the one that is wrong."""
    known = {name.lower(): name for name in OPTION_NAMES}
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name.lower() not in known:
            near = get_close_matches(name.lower(), known, n=1, cutoff=0.0)[0]
            raise BadInput(
                f"there is no option {name[:_MESSAGE_VALUE_CHARS]!r}; nothing was read, did you mean {known[near]}?"
            )
        full = known[name.lower()]
        found[full] = _PARSERS[full](full, str(value))
    _check_location(found)
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
        path=found.get("path"),
        server=found.get("server"),
        key=found.get("key"),
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
        retry_ms=found.get("retryTimeout", RETRY_TIMEOUT_MS),
        is_strong=found.get("consistency") == "strong",
    )


def _check_location(found: Mapping[str, Any]) -> None:
    if ("path" in found) == ("server" in found):
        given = "both are given" if "path" in found else "neither is given"
        raise BadInput(f"options path and server: {given}; nothing was read, name a directory or a server")
    if found.get("consistency") == "strong" and found.get("codec", "tide") != "tide":
        raise BadInput(
            f"option consistency is 'strong': it is for topics, and codec is {found['codec']!r}; nothing was read, "
            "leave it out"
        )
    if "key" in found and "path" in found:
        raise BadInput("option key: it is for a server, and path is given; nothing was read, leave it out")
    if "retryTimeout" in found and "path" in found:
        raise BadInput("option retryTimeout: it is for a server, and path is given; nothing was read, leave it out")
    if "server" in found and found.get("codec", "tide") != "tide":
        raise BadInput(f"option codec is {found['codec']!r}: a server has topics; nothing was read, read by path")
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
        if column not in known and payload != "infer":
            near = get_close_matches(column, known, n=1, cutoff=0.0)[0]
            raise BadInput(f"option columns: there is no column {column!r}; nothing was read, did you mean {near}?")
