"""[policy] Which records are wanted: conditions on topic, seq, ts, node and tag, all of which must hold.

    seq >= 100 and ts < '2026-02-01T00:00:00Z' and topic in ('a', 'b') and tag like 'order-%' and node is not null

One form for the option `where` and for what Spark pushes down. As in SQL a comparison with a missing value holds for
no record, negated or not. A condition on seq, ts or topic also narrows what is read at all.
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
FILTERED: Final = ("topic", "seq", "ts", "node", "tag")
_TOKEN = re.compile(r"\s*(?:'((?:[^']|'')*)'|(<>|!=|<=|>=|=|<|>|\(|\)|,)|(-?\d+)\b|([A-Za-z_]\w*))")
_FAR: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Term:
    """One condition. Times are microseconds since the epoch."""

    column: str
    op: Op
    values: tuple[Value, ...] = ()
    negated: bool = False


class Bounds(NamedTuple):
    """What a record must lie between, both ends included."""

    low: int = -_FAR
    high: int = _FAR

    def narrowed(self, term: Term) -> Bounds:
        if term.negated or not term.values or any(not isinstance(value, int) for value in term.values):
            return self
        found = [value for value in term.values if isinstance(value, int)]
        match term.op:
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
class Where:
    terms: tuple[Term, ...] = ()

    def __add__(self, other: Where) -> Where:
        return Where((*self.terms, *other.terms))

    def bounds(self, column: str) -> Bounds:
        found = Bounds()
        for term in self.terms:
            if term.column == column:
                found = found.narrowed(term)
        return found

    def of_rows(self) -> Where:
        """What is left to be asked of each record once a topic was chosen."""
        return Where(tuple(term for term in self.terms if term.column != "topic"))

    def takes_topic(self, topic: str) -> bool:
        """Whether records of this topic can be wanted at all."""
        asked = Where(tuple(term for term in self.terms if term.column == "topic"))
        found = asked.mask({"topic": pa.array([topic], pa.string())})
        return found is None or bool(found[0].as_py())

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(term.column for term in self.terms)

    def mask(self, cells: Mapping[str, pa.Array]) -> pa.Array | None:
        """For each row whether it is wanted; None: all are."""
        found: pa.Array | None = None
        for term in self.terms:
            holds = pc.fill_null(_holds(term, cells[term.column]), False)
            found = holds if found is None else pc.and_(found, holds)
        return found


def _holds(term: Term, column: pa.Array) -> pa.Array:
    found = _plain(term, column)
    return pc.invert(found) if term.negated else found


def _plain(term: Term, column: pa.Array) -> pa.Array:
    if term.op == "null":
        return pc.is_null(column)
    if term.op == "same" and term.values == (None,):
        return pc.is_null(column)
    values = pa.array(term.values, pa.int64() if pa.types.is_timestamp(column.type) else column.type)
    values = values.cast(column.type)
    one = values[0] if len(values) else None
    match term.op:
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
            return pc.starts_with(column, term.values[0])
        case "ends":
            return pc.ends_with(column, term.values[0])
        case "holds":
            return pc.match_substring(column, term.values[0])
        case _:
            known = pc.is_in(column, values.drop_null())
            return pc.if_else(pc.is_null(column), pa.scalar(None, pa.bool_()), known)


# ── from text ─────────────────────────────────────────────────────────────────────────────────────


def parse(name: str, text: str) -> Where:
    """The conditions of a text, or BadInput that says where it stops making sense."""
    tokens, at = [], 0
    while text[at:].strip():
        found = _TOKEN.match(text, at)
        begin = at + len(text[at:]) - len(text[at:].lstrip())
        if found is None:
            raise _senseless(name, text, begin)
        tokens.append((found.lastindex or 0, found[found.lastindex or 0], begin))
        at = found.end()
    terms: list[Term] = []
    rest = _Tokens(name, text, tokens)
    while True:
        terms.append(_term(rest))
        if rest.done:
            return Where(tuple(terms))
        rest.word("and")


class _Tokens:
    def __init__(self, name: str, text: str, tokens: list[tuple[int, str, int]]) -> None:
        self._name, self._text, self._tokens, self._at = name, text, tokens, 0

    @property
    def done(self) -> bool:
        return self._at == len(self._tokens)

    def wrong(self) -> BadInput:
        at = len(self._text) if self._at >= len(self._tokens) else self._tokens[self._at][2]
        return _senseless(self._name, self._text, at)

    def is_word(self, *words: str) -> str | None:
        """The next token, taken, if it is one of these."""
        if self.done or self._tokens[self._at][0] == 1 or self._tokens[self._at][1].lower() not in words:
            return None
        self._at += 1
        return self._tokens[self._at - 1][1].lower()

    def word(self, *words: str) -> str:
        found = self.is_word(*words)
        if found is None:
            raise self.wrong()
        return found

    def value(self, column: str) -> Value:
        if self.done or self._tokens[self._at][0] not in (1, 3):
            raise self.wrong()
        kind, text, _ = self._tokens[self._at]
        found = _value(column, int(text) if kind == 3 else text.replace("''", "'"))
        if found is None:
            raise self.wrong()
        self._at += 1
        return found


def _term(rest: _Tokens) -> Term:
    column = rest.word(*FILTERED)
    if rest.is_word("is"):
        negated = rest.is_word("not") is not None
        rest.word("null")
        return Term(column, "null", (), negated)
    negated = rest.is_word("not") is not None
    if rest.is_word("in"):
        rest.word("(")
        values = [rest.value(column)]
        while rest.is_word(","):
            values.append(rest.value(column))
        rest.word(")")
        return Term(column, "in", tuple(values), negated)
    if column in ("topic", "node", "tag") and rest.is_word("like"):
        return _like(rest, column, negated)
    if negated:
        raise rest.wrong()
    op = rest.word("=", "!=", "<>", "<", "<=", ">", ">=")
    if op in ("!=", "<>"):
        return Term(column, "=", (rest.value(column),), negated=True)
    return Term(column, op, (rest.value(column),))  # type: ignore[arg-type]


def _like(rest: _Tokens, column: str, negated: bool) -> Term:
    text = str(rest.value(column))
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
    return Term(column, ends[text.startswith("%"), text.endswith("%")], (inner,), negated)


def _senseless(name: str, text: str, at: int) -> BadInput:
    return BadInput(
        f"option {name} is {text[:200]!r}: it cannot be understood at character {at + 1}; nothing was read. It is made "
        f"of conditions on {', '.join(FILTERED)} (=, !=, <, <=, >, >=, in, like, is null) with `and` between them; "
        "anything else can be asked of the DataFrame"
    )


def _value(column: str, value: object) -> Value:
    """A value as its column has it; None: it cannot be one."""
    if column == "seq":
        return value if type(value) is int and abs(value) <= _FAR else None
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

_SPARK: Final[dict[str, Op]] = {
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


def of_spark(given: object, columns: Iterable[str]) -> Term | None:
    """A filter of Spark's as a condition; None where it is not one that is understood here."""
    negated = type(given).__name__ == "Not"
    inner = getattr(given, "child", None) if negated else given
    op = _SPARK.get(type(inner).__name__)
    path: tuple[str, ...] = getattr(inner, "attribute", ())
    if op is None or len(path) != 1 or path[0] not in FILTERED or path[0] not in columns:
        return None
    column = path[0]
    if type(inner).__name__ == "IsNotNull":
        return Term(column, "null", (), not negated)
    if op == "null":
        return Term(column, "null", (), negated)
    raw = getattr(inner, "value", None)
    given_values = list(raw) if op == "in" and isinstance(raw, list | tuple) else [raw]
    if op in ("starts", "ends", "holds") and not isinstance(raw, str):
        return None
    values = [_value(column, value) for value in given_values]
    if op == "same" and raw is None:
        return Term(column, op, (None,), negated)
    if not values or any(value is None for value in values):
        return None
    return Term(column, op, tuple(values), negated)
