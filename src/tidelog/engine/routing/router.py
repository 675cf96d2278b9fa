"""Routers: their settings, the rules for creating one, and the hop counts of records. No I/O.

    source ──▶ forwarder ──▶ dest       all routers between two topics share a forwarder and its cursor,
               │ router, router …       in the order of their creation

Rules for a new router, in order of authority:
  1. A dest has one source. With two, the order of copies would depend on timing.
  2. A router never changes its source and dest: earlier copies would not be its own.
  3. A dest that already leads to the source forms a cycle, which is refused unless `allow_cycle` is set; then the hop
     count of each record ends it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np

from tidelog.engine.manifest import RouterRow
from tidelog.errors import BadInput, RouterCycle, TopicExists
from tidelog.formats.control_frames import Match, MatchOp, RouterCreate
from tidelog.types import Ints

Guarantee: TypeAlias = Literal["at_least_once", "exactly_once"]
GUARANTEES: Final = ("at_least_once", "exactly_once")
HOPS_MAX: Final = 8  # a record that passed this many routers is not forwarded again
_FLAGS: Final = ("preserve_node", "preserve_tag", "allow_cycle", "exactly_once")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The settings of one router. A changed router is a new one that starts at the forwarder's cursor."""

    name: str
    source: str
    dest: str
    preserve_node: bool = True
    preserve_tag: bool = True
    allow_cycle: bool = False
    exactly_once: bool = False
    match: Match | None = None
    start: int = 0  # it forwards records after this seq of the source
    dest_head_at_creation: int = 0

    def to_body(self) -> RouterCreate:
        """Return the WAL frame body of this router."""
        return RouterCreate(
            name=self.name,
            source=self.source,
            dest=self.dest,
            match=self.match,
            initial_cursor=self.start,
            initial_dest_base=self.dest_head_at_creation,
            **flags_of(self),
        )

    @classmethod
    def from_body(cls, body: RouterCreate) -> Router:
        return cls(
            name=body.name,
            source=body.source,
            dest=body.dest,
            match=body.match,
            start=body.initial_cursor,
            dest_head_at_creation=body.initial_dest_base,
            **flags_of(body),
        )

    def to_row(self, source_id: int, dest_id: int, forwarded: int) -> RouterRow:
        """Return the manifest row of this router."""
        return RouterRow(
            name=self.name,
            source_id=source_id,
            dest_id=dest_id,
            match=None if self.match is None else (int(self.match.op), self.match.value),
            start=self.start,
            dest_base=self.dest_head_at_creation,
            forwarded=forwarded,
            **flags_of(self),
        )

    @classmethod
    def from_row(cls, row: RouterRow, source: str, dest: str) -> Router:
        return cls(
            name=row.name,
            source=source,
            dest=dest,
            match=None if row.match is None else Match(MatchOp(row.match[0]), row.match[1]),
            start=row.start,
            dest_head_at_creation=row.dest_base,
            **flags_of(row),
        )

    def has_settings_of(self, other: Router) -> bool:
        """Whether both forward the same records in the same way."""
        return self == replace(other, start=self.start, dest_head_at_creation=self.dest_head_at_creation)


def flags_of(router: Router | RouterCreate | RouterRow) -> dict[str, bool]:
    """Return the yes/no settings, which have the same names in every form of a router."""
    return {name: getattr(router, name) for name in _FLAGS}


class RouterState(NamedTuple):
    """A router as `Database.routers` shows it."""

    router: str
    source: str
    dest: str
    preserve_node: bool
    preserve_tag: bool
    filter: tuple[str, str, str] | None  # ("tag", "Eq" or "Glob", text)
    allow_cycle: bool
    guarantee: Guarantee
    forwarded_total: int
    created: bool = False  # by this call


def router_state(router: Router, forwarded: int, *, created: bool = False) -> RouterState:
    match = router.match
    tag_filter = None
    if match is not None:
        tag_filter = ("tag", "Eq", match.value) if match.op is MatchOp.EXACT else ("tag", "Glob", f"{match.value}*")
    return RouterState(
        router.name,
        router.source,
        router.dest,
        router.preserve_node,
        router.preserve_tag,
        tag_filter,
        router.allow_cycle,
        "exactly_once" if router.exactly_once else "at_least_once",
        forwarded,
        created,
    )


def check_router_name(name: object) -> None:
    """Raise BadInput unless a router can have this name."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise BadInput(
            f"{str(name)[:80]!r} cannot name a router: 1 to 255 of A-Z a-z 0-9 . _ : - >, starting with a letter or "
            "digit; nothing was created, choose another name"
        )


def check_endpoints(candidate: Router, routers: Iterable[Router]) -> Router | None:
    """Return the existing router of this name, if any. Raise if the candidate conflicts with an existing router."""
    existing: Router | None = None
    for router in routers:
        if router.name == candidate.name:
            existing = router
        elif router.dest == candidate.dest and router.source != candidate.source:
            raise TopicExists(
                candidate.dest,
                reason=f"router {router.name!r} feeds it from {router.source!r}, and a topic has one source",
                detail={"reason": "router_dest_fan_in"},
            )
    if existing is not None and (existing.source, existing.dest) != (candidate.source, candidate.dest):
        raise TopicExists(
            candidate.dest,
            reason=f"router {existing.name!r} leads from {existing.source!r} to {existing.dest!r}, which cannot change",
            detail={
                "router": existing.name,
                "reason": "router_repoint_forbidden",
                "existing_source": existing.source,
                "existing_dest": existing.dest,
            },
        )
    return existing


def check_cycle(candidate: Router, routers: Iterable[Router]) -> None:
    """Raise RouterCycle if the dest already leads to the source, unless the candidate allows it."""
    if candidate.allow_cycle:
        return
    dests: dict[str, list[str]] = {}
    for router in routers:
        if router.name != candidate.name:
            dests.setdefault(router.source, []).append(router.dest)
    paths, seen = [[candidate.source, candidate.dest]], {candidate.dest}
    while paths:
        path = paths.pop(0)
        if path[-1] == candidate.source:
            raise RouterCycle(candidate.name, path)
        for dest in dests.get(path[-1], ()):
            if dest not in seen:
                seen.add(dest)
                paths.append([*path, dest])


HopRange = tuple[int, int, int]  # seqs [lo, hi) and their hop count


class HopCounts:
    """The number of routers that the records of a topic passed, as ranges of seqs. The topic's lock guards it.

    A record that was written directly is in no range. Ranges below every cursor that needs them are dropped.
    """

    def __init__(self, ranges: Iterable[HopRange] = ()) -> None:
        self._ranges: list[HopRange] = list(ranges)

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def add_runs(self, lo: int, runs: Sequence[int]) -> None:
        """Add seqs from `lo` on, given as pairs of a number of records and their hop count."""
        for count, hops in zip(runs[::2], runs[1::2], strict=True):
            self.add(lo, lo + count, hops)
            lo += count

    def add(self, lo: int, hi: int, hops: int) -> None:
        """Add seqs [lo, hi), after all that were added before."""
        if self._ranges and self._ranges[-1][1:] == (lo, hops):
            lo = self._ranges.pop()[0]
        self._ranges.append((lo, hi, hops))

    def forget_below(self, below: int) -> None:
        """Drop ranges of seqs below this one."""
        keep = next((i for i, (_, hi, _) in enumerate(self._ranges) if hi > below), len(self._ranges))
        del self._ranges[:keep]

    def ranges_up_to(self, head: int) -> tuple[HopRange, ...]:
        """Return the ranges at or below `head`."""
        return tuple((lo, min(hi, head + 1), hops) for lo, hi, hops in self._ranges if lo <= head)

    def between(self, lo: int, hi: int) -> Ints:
        """Return the hop count of each seq of [lo, hi)."""
        counts: Ints = np.zeros(hi - lo, np.int64)
        for first, stop, hops in reversed(self._ranges):
            if stop <= lo:
                break
            counts[max(first - lo, 0) : max(stop - lo, 0)] = hops
        return counts
