"""Places in a module that can be changed, the rules that leave some out, and the draw of a sample.

    source ──► places × operators ──► without what the rules leave out ──► drawn by seed ──► one mutant a place

Operators are cosmic-ray's, those of `OPERATORS`, and one of ours: a call whose result is not used is left out
(`RemoveCall`), which is what a forgotten sync, close or notification is.

The rules (`RULES`) leave out what no test of behaviour could notice. Each mutant that they drop is counted by rule.

A place is known by its function and the text of its line, not by its line number, and the draw orders places by a hash
of that and the seed: an edit somewhere else in the module does not change which mutants are drawn.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, TypeAlias

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

REMOVE_CALL: Final = "RemoveCall"

# Each replaces by what a programmer could have written: `is` is not compared with `<`, `+` is not made a power. Those
# left out fail in every test that runs the line, and would only make the figure look better.
OPERATORS: Final = (
    *(
        f"core/ReplaceBinaryOperator_{pair}"
        for pair in (
            "Add_Sub", "Sub_Add", "Mul_FloorDiv", "Mul_Add", "FloorDiv_Mul", "Mod_FloorDiv", "Div_Mul", "RShift_LShift",
            "LShift_RShift", "BitOr_BitAnd", "BitAnd_BitOr", "BitXor_BitAnd",
        )
    ),
    *(
        f"core/ReplaceComparisonOperator_{pair}"
        for pair in (
            "Eq_NotEq", "NotEq_Eq", "Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt",
            "Is_IsNot", "IsNot_Is",
        )
    ),
    "core/ReplaceUnaryOperator_USub_UAdd",
    "core/ReplaceUnaryOperator_Delete_Not",
    "core/ReplaceUnaryOperator_Delete_Invert",
    "core/AddNot",
    "core/ReplaceTrueWithFalse",
    "core/ReplaceFalseWithTrue",
    "core/ReplaceAndWithOr",
    "core/ReplaceOrWithAnd",
    "core/ReplaceBreakWithContinue",
    "core/ReplaceContinueWithBreak",
    "core/ExceptionReplacer",
    "core/NumberReplacer",
    "core/RemoveDecorator",
    "core/ZeroIterationForLoop",
    REMOVE_CALL,
)  # fmt: skip

RULES: Final = {
    "annotation": "annotations, type aliases, casts, `TYPE_CHECKING` blocks and protocols: they are not run",
    "typing": "decorators for type checkers: `override`, `final`, `overload`",
    "log": "calls of a logger and their arguments",
    "message": "arguments of a raised error and of `assert`, and whole functions that only make such texts",
    "repr": "`__repr__`, `__str__` and `__format__`",
    "layout": "`__slots__`, `__all__`, and options such as `slots=` or `frozen=` of a class",
    "tuning": "constants that targets.toml lists as tuning: every value is correct, some are faster",
}
_TYPING: Final = {"override", "final", "overload", "no_type_check", "runtime_checkable"}
_TEXTS: Final = {"__repr__", "__str__", "__format__"}
_LOGGERS: Final = {"_log", "log", "logger", "logging"}
_LOGGED: Final = {"debug", "info", "warning", "error", "exception", "critical", "log"}
_CLASS_OPTIONS: Final = {"slots", "frozen", "kw_only", "eq", "order", "gc", "cache_hash"}

Place: TypeAlias = tuple[int, int]


class Span(NamedTuple):
    """A part of a source text."""

    first: Place
    last: Place

    def has(self, place: Place) -> bool:
        return self.first <= place < self.last


class Function(NamedTuple):
    name: str
    key_line: int  # where its code begins, decorators included
    span: Span


class Mutant(NamedTuple):
    """One small change of one module."""

    group: str
    module: str
    function: str
    line: int
    statement: tuple[int, int]  # first and last line
    key_line: int | None  # of the function; None for what runs at import
    operator: str
    changed: str  # the whole module
    diff: str
    id: str


class Site(NamedTuple):
    place: Place
    operator: str
    occurrence: int


def span_of(node: ast.AST) -> Span:
    end = (getattr(node, "end_lineno", 0), getattr(node, "end_col_offset", 0))
    return Span((getattr(node, "lineno", 0), getattr(node, "col_offset", 0)), end)


def _name(node: ast.AST) -> str:
    """The last name of `a`, `a.b` and `a.b(...)`."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_log(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _LOGGED
        and _name(node.func.value) in _LOGGERS
    )


def excluded_spans(
    tree: ast.Module, tuning: Iterable[str] = (), texts: Iterable[str] = ()
) -> Iterator[tuple[str, Span]]:
    """Every part of a module that a rule leaves out, with the rule's name."""
    tuned, worded = set(tuning), set(texts)
    for node in ast.walk(tree):
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(part, ast.AST):
                yield "annotation", span_of(part)
        yield from (("annotation", span) for span in _typed(node))
        if _is_log(node):
            yield "log", span_of(node)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from (("message", span_of(part)) for part in (*node.exc.args, *node.exc.keywords))
        elif isinstance(node, ast.Assert) and node.msg is not None:
            yield "message", span_of(node.msg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in node.decorator_list:
                if _name(decorator) in _TYPING:
                    yield "typing", Span((decorator.lineno, 0), span_of(decorator).last)
            if node.name in _TEXTS:
                yield "repr", span_of(node)
            if node.name in worded:
                yield "message", span_of(node)
        elif isinstance(node, ast.ClassDef):
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call):
                    yield from _options(decorator.keywords)
            yield from _options(node.keywords)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {each.id for each in targets if isinstance(each, ast.Name)}
            if names & {"__slots__", "__all__"}:
                yield "layout", span_of(node)
            if names & tuned:
                yield "tuning", span_of(node)


def _typed(node: ast.AST) -> Iterator[Span]:
    alias = isinstance(node, ast.AnnAssign) and _name(node.annotation) == "TypeAlias"
    checked = isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING"
    protocol = isinstance(node, ast.ClassDef) and any(_name(base) == "Protocol" for base in node.bases)
    if alias or checked or protocol:
        yield span_of(node)
    elif isinstance(node, ast.Call) and _name(node.func) in ("cast", "TypeVar") and node.args:
        yield span_of(node.args[0])
        yield from map(span_of, node.keywords)


def _options(keywords: list[ast.keyword]) -> Iterator[tuple[str, Span]]:
    return (("layout", span_of(each)) for each in keywords if each.arg in _CLASS_OPTIONS)


def functions(tree: ast.Module) -> list[Function]:
    """Every function of a module, outer ones first."""
    found: list[Function] = []

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                key_line = min([child.lineno, *(each.lineno for each in child.decorator_list)])
                body = Span(span_of(child.body[0]).first, span_of(child).last)
                found.append(Function(prefix + child.name, key_line, body))
                walk(child, f"{prefix}{child.name}.")
            else:
                walk(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)

    walk(tree, "")
    return found


def statements(tree: ast.Module) -> list[Span]:
    """Every statement; of one with a body, what comes before the body."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            body = getattr(node, "body", None)
            first = span_of(node).first if not isinstance(node, ast.match_case) else span_of(node.pattern).first
            last = span_of(node).last
            if isinstance(body, list) and body:
                last = span_of(body[0]).first
                last = (last[0], 0) if last[0] > first[0] else last
            found.append(Span(first, last))
    return found


def sites(source: str, tree: ast.Module) -> Iterator[Site]:
    """Every place and operator that fits there."""
    nodes = list(ast_nodes(get_ast(source)))
    for name in OPERATORS:
        if name == REMOVE_CALL:
            calls = [each for each in ast.walk(tree) if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)]
            calls.sort(key=lambda each: (each.lineno, each.col_offset))
            yield from (Site((each.lineno, each.col_offset), name, number) for number, each in enumerate(calls))
            continue
        operator = get_operator(name)()
        places = (start for node in nodes for start, _ in operator.mutation_positions(node))
        yield from (Site(start, name, number) for number, start in enumerate(places))


def change(source: str, tree: ast.Module, site: Site) -> str | None:
    """The module with one change; None where there is none."""
    if site.operator != REMOVE_CALL:
        changed: str | None = mutate_code(source, get_operator(site.operator)(), site.occurrence)
    else:
        node = next(
            each
            for each in ast.walk(tree)
            if isinstance(each, ast.Expr) and (each.lineno, each.col_offset) == site.place
        )
        lines = source.encode().splitlines(keepends=True)
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        tail = lines[last][node.end_col_offset :]
        lines[first : last + 1] = [lines[first][: node.col_offset] + b"pass" + tail]
        changed = b"".join(lines).decode()
    if changed is None or changed == source:
        return None
    try:
        compile(changed, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return None
    return changed


def _hash(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


class Sample(NamedTuple):
    mutants: list[Mutant]
    places: int  # that the rules leave
    dropped: Counter[str]  # places by rule


def draw_sample(
    group: str, sources: dict[str, str], *, seed: int, limit: int, tuning: Iterable[str] = (), texts: Iterable[str] = ()
) -> Sample:
    """Draw up to so many mutants of a group of modules, one a place."""
    dropped: Counter[str] = Counter()
    ranked: list[tuple[str, str, list[Site]]] = []
    for module, source in sources.items():
        tree = ast.parse(source)
        excluded = list(excluded_spans(tree, tuning, texts))
        owners, lines = functions(tree), source.splitlines()
        kept: dict[Place, list[Site]] = {}
        gone: dict[Place, str] = {}
        for site in sites(source, tree):
            rule = next((rule for rule, span in excluded if span.has(site.place)), None)
            if rule is None:
                kept.setdefault(site.place, []).append(site)
            else:
                gone[site.place] = rule
        dropped.update(gone.values())
        repeated: Counter[tuple[str, str, int]] = Counter()
        for place in sorted(kept):
            owner = _owner(owners, place)
            key = (owner.name if owner else "", lines[place[0] - 1].strip(), place[1])
            repeated[key] += 1
            ranked.append((_hash(seed, module, *key, repeated[key]), module, kept[place]))
    ranked.sort(key=lambda each: each[0])
    mutants: list[Mutant] = []
    trees = {module: ast.parse(source) for module, source in sources.items()}
    for rank, module, found in ranked:
        if len(mutants) == limit:
            break
        for site in sorted(found, key=lambda each: _hash(rank, each.operator, each.occurrence - found[0].occurrence)):
            changed = change(sources[module], trees[module], site)
            if changed is not None:
                mutants.append(_mutant(group, module, sources[module], trees[module], site, changed))
                break
    return Sample(mutants, len(ranked), dropped)


def _owner(owners: list[Function], place: Place) -> Function | None:
    return max((each for each in owners if each.span.has(place)), key=lambda each: each.span.first, default=None)


def _mutant(group: str, module: str, source: str, tree: ast.Module, site: Site, changed: str) -> Mutant:
    owner = _owner(functions(tree), site.place)
    around = [span for span in statements(tree) if span.has(site.place)]
    inner = max(around, key=lambda span: span.first) if around else Span(site.place, site.place)
    diff = list(difflib.unified_diff(source.splitlines(), changed.splitlines(), module, "mutant", "", "", 2, ""))
    text = [line for line in diff[2:] if not line.startswith("@@")]
    return Mutant(
        group,
        module,
        owner.name if owner else "",
        site.place[0],
        (inner.first[0], max(inner.first[0], inner.last[0] - (inner.last[1] == 0))),
        owner.key_line if owner else None,
        site.operator.removeprefix("core/"),
        changed,
        "\n".join(diff),
        _hash(module, owner.name if owner else "", *text)[:16],
    )
