"""Filters on topic, seq, ts, node and tag: predicates that must all be true.

    seq >= 100 and ts < '2026-02-01T00:00:00Z' and topic in ('a', 'b') and tag like 'order-%' and node is not null

The option `where` and the filters that Spark pushes down have the same form. As in SQL a comparison with null is never
true, negated or not. A condition on seq, ts or topic also narrows the range that is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from tidelog.errors import BadInput

Op: TypeAlias = Literal["=", "<", "<=", ">", ">=", "in", "null", "starts", "ends", "holds", "same"]
Value: TypeAlias = int | str | None
FILTERABLE_COLUMNS: Final = ("topic", "seq", "ts", "node", "tag")
_TOKEN_RE = re.compile(r"\s*(?:'((?:[^']|'')*)'|(<>|!=|<=|>=|=|<|>|\(|\)|,)|(-?\d+)\b|([A-Za-z_]\w*))")
_INT64_MAX: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Predicate:
    """One condition. Times are microseconds since the epoch."""

    column: str
    op: Op
    values: tuple[Value, ...] = ()
    negated: bool = False


class Bounds(NamedTuple):
    """Bounds of a column, both included."""

    low: int = -_INT64_MAX
    high: int = _INT64_MAX

    def narrow(self, predicate: Predicate) -> Bounds:
        if predicate.negated or not predicate.values or any(not isinstance(value, int) for value in predicate.values):
            return self
        found = [value for value in predicate.values if isinstance(value, int)]
        match predicate.op:
            case "=" | "in" | "same":
                return Bounds(max(self.low, min(found)), min(self.high, max(found)))
            case "<":
                return Bounds(self.low, min(self.high, found[0] - 1))
            case "<=":
                return Bounds(self.low, min(self.high, found[0]))
            case ">":
                return Bounds(max(self.low, found[0] + 1), self.high)
            case ">=":
                return Bounds(max(self.low, found[0]), self.high)
            case _:
                return self


@dataclass(frozen=True, slots=True)
class RecordFilter:
    predicates: tuple[Predicate, ...] = ()

    def __add__(self, other: RecordFilter) -> RecordFilter:
        return RecordFilter((*self.predicates, *other.predicates))

    def bounds(self, column: str) -> Bounds:
        found = Bounds()
        for term in self.predicates:
            if term.column == column:
                found = found.narrow(term)
        return found

    def without_topic(self) -> RecordFilter:
        """Return the predicates that must be evaluated per record."""
        return RecordFilter(tuple(term for term in self.predicates if term.column != "topic"))

    def accepts_topic(self, topic: str) -> bool:
        """Whether records of this topic can match."""
        asked = RecordFilter(tuple(term for term in self.predicates if term.column == "topic"))
        found = asked.row_mask({"topic": pa.array([topic], pa.string())})
        return found is None or bool(found[0].as_py())

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(term.column for term in self.predicates)

    def row_mask(self, arrays: Mapping[str, pa.Array]) -> pa.Array | None:
        """Return for each row whether it matches; None if there are no predicates."""
        found: pa.Array | None = None
        for term in self.predicates:
            holds = pc.fill_null(_evaluate(term, arrays[term.column]), False)
            found = holds if found is None else pc.and_(found, holds)
        return found


def _evaluate(predicate: Predicate, column: pa.Array) -> pa.Array:
    found = _evaluate_positive(predicate, column)
    return pc.invert(found) if predicate.negated else found


def _evaluate_positive(predicate: Predicate, column: pa.Array) -> pa.Array:
    if predicate.op == "null":
        return pc.is_null(column)
    if predicate.op == "same" and predicate.values == (None,):
        return pc.is_null(column)
    values = pa.array(predicate.values, pa.int64() if pa.types.is_timestamp(column.type) else column.type)
    values = values.cast(column.type)
    one = values[0] if len(values) else None
    match predicate.op:
        case "=":
            return pc.equal(column, one)
        case "same":
            return pc.fill_null(pc.equal(column, one), False)
        case "<":
            return pc.less(column, one)
        case "<=":
            return pc.less_equal(column, one)
        case ">":
            return pc.greater(column, one)
        case ">=":
            return pc.greater_equal(column, one)
        case "starts":
            return pc.starts_with(column, predicate.values[0])
        case "ends":
            return pc.ends_with(column, predicate.values[0])
        case "holds":
            return pc.match_substring(column, predicate.values[0])
        case _:
            known = pc.is_in(column, values.drop_null())
            return pc.if_else(pc.is_null(column), pa.scalar(None, pa.bool_()), known)


# ── from text ─────────────────────────────────────────────────────────────────────────────────────


def parse_filter(name: str, text: str) -> RecordFilter:
    """Parse the option `where`. Raises BadInput with the position of the syntax error."""
    tokens, at = [], 0
    while text[at:].strip():
        found = _TOKEN_RE.match(text, at)
        begin = at + len(text[at:]) - len(text[at:].lstrip())
        if found is None:
            raise _syntax_error(name, text, begin)
        tokens.append((found.lastindex or 0, found[found.lastindex or 0], begin))
        at = found.end()
    terms: list[Predicate] = []
    rest = _Tokens(name, text, tokens)
    while True:
        terms.append(_parse_predicate(rest))
        if rest.is_done:
            return RecordFilter(tuple(terms))
        rest.take("and")


class _Tokens:
    def __init__(self, name: str, text: str, tokens: list[tuple[int, str, int]]) -> None:
        self._name, self._text, self._tokens, self._at = name, text, tokens, 0

    @property
    def is_done(self) -> bool:
        return self._at == len(self._tokens)

    def syntax_error(self) -> BadInput:
        at = len(self._text) if self._at >= len(self._tokens) else self._tokens[self._at][2]
        return _syntax_error(self._name, self._text, at)

    def take_if(self, *words: str) -> str | None:
        """Take and return the next token if it is one of these."""
        if self.is_done or self._tokens[self._at][0] == 1 or self._tokens[self._at][1].lower() not in words:
            return None
        self._at += 1
        return self._tokens[self._at - 1][1].lower()

    def take(self, *words: str) -> str:
        found = self.take_if(*words)
        if found is None:
            raise self.syntax_error()
        return found

    def take_value(self, column: str) -> Value:
        if self.is_done or self._tokens[self._at][0] not in (1, 3):
            raise self.syntax_error()
        kind, text, _ = self._tokens[self._at]
        found = _convert_value(column, int(text) if kind == 3 else text.replace("''", "'"))
        if found is None:
            raise self.syntax_error()
        self._at += 1
        return found


def _parse_predicate(tokens: _Tokens) -> Predicate:
    column = tokens.take(*FILTERABLE_COLUMNS)
    if tokens.take_if("is"):
        negated = tokens.take_if("not") is not None
        tokens.take("null")
        return Predicate(column, "null", (), negated)
    negated = tokens.take_if("not") is not None
    if tokens.take_if("in"):
        tokens.take("(")
        values = [tokens.take_value(column)]
        while tokens.take_if(","):
            values.append(tokens.take_value(column))
        tokens.take(")")
        return Predicate(column, "in", tuple(values), negated)
    if column in ("topic", "node", "tag") and tokens.take_if("like"):
        return _parse_like(tokens, column, negated)
    if negated:
        raise tokens.syntax_error()
    op = tokens.take("=", "!=", "<>", "<", "<=", ">", ">=")
    if op in ("!=", "<>"):
        return Predicate(column, "=", (tokens.take_value(column),), negated=True)
    return Predicate(column, op, (tokens.take_value(column),))  # type: ignore[arg-type]


def _parse_like(tokens: _Tokens, column: str, negated: bool) -> Predicate:
    text = str(tokens.take_value(column))
    inner = text.strip("%")
    if "%" in inner or "_" in inner:
        raise BadInput(
            f"option where: like {text!r} has a wildcard inside; nothing was read, use % at its ends only, or filter "
            "the DataFrame"
        )
    ends: dict[tuple[bool, bool], Op] = {
        (False, False): "=",
        (True, False): "ends",
        (False, True): "starts",
        (True, True): "holds",
    }
    return Predicate(column, ends[text.startswith("%"), text.endswith("%")], (inner,), negated)


def _syntax_error(name: str, text: str, at: int) -> BadInput:
    return BadInput(
        f"option {name} is {text[:200]!r}: it cannot be understood at character {at + 1}; nothing was read. It is made "
        f"of conditions on {', '.join(FILTERABLE_COLUMNS)} (=, !=, <, <=, >, >=, in, like, is null) with `and` "
        "between them; anything else can be asked of the DataFrame"
    )


def _convert_value(column: str, value: object) -> Value:
    """Convert a value to the type of its column; None if that is impossible."""
    if column == "seq":
        return value if type(value) is int and abs(value) <= _INT64_MAX else None
    if column != "ts":
        return value if isinstance(value, str) else None
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return None
    if isinstance(value, datetime) and value.tzinfo is not None:
        since = value.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
        return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    return None


# ── from Spark ────────────────────────────────────────────────────────────────────────────────────

_SPARK_FILTER_OPS: Final[dict[str, Op]] = {
    "EqualTo": "=",
    "EqualNullSafe": "same",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "In": "in",
    "IsNull": "null",
    "IsNotNull": "null",
    "StringStartsWith": "starts",
    "StringEndsWith": "ends",
    "StringContains": "holds",
}


def from_spark_filter(spark_filter: object, columns: Iterable[str]) -> Predicate | None:
    """Convert a filter of Spark to a predicate; None if it is not supported."""
    negated = type(spark_filter).__name__ == "Not"
    inner = getattr(spark_filter, "child", None) if negated else spark_filter
    op = _SPARK_FILTER_OPS.get(type(inner).__name__)
    path: tuple[str, ...] = getattr(inner, "attribute", ())
    if op is None or len(path) != 1 or path[0] not in FILTERABLE_COLUMNS or path[0] not in columns:
        return None
    column = path[0]
    if type(inner).__name__ == "IsNotNull":
        return Predicate(column, "null", (), not negated)
    if op == "null":
        return Predicate(column, "null", (), negated)
    raw = getattr(inner, "value", None)
    given_values = list(raw) if op == "in" and isinstance(raw, list | tuple) else [raw]
    if op in ("starts", "ends", "holds") and not isinstance(raw, str):
        return None
    values = [_convert_value(column, value) for value in given_values]
    if op == "same" and raw is None:
        return Predicate(column, op, (None,), negated)
    if not values or any(value is None for value in values):
        return None
    return Predicate(column, op, tuple(values), negated)
