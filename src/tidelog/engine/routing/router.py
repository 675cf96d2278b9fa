"""[policy] What a router is, which ones may be made, and what each passes on.

    a source ──▶ lane ──▶ a dest        all routers between two topics share a lane and its cursor,
                 │ router, router …     in the order in which they were made

Rules for a new one, in order of authority:
  1. A dest has one source. Its copies are found again from that source, seq by seq; a second one would make
     their order a matter of timing.
  2. A router never changes its ends: copies that were made would not be its own any more.
  3. A dest that already leads to the source makes a circle, which is refused unless it is asked for; then the
     number of routers a record came over ends it.

[policy] Over how many routers the records of a topic came: stretches of seqs, kept only where it matters.

A record that was written directly came over none and is in no stretch. What lies behind every cursor that
still needs it is let go of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np

from tidelog.errors import BadInput, RouterCycle, TopicExists
from tidelog.formats.control_frames import Match, MatchOp, RouterCreate
from tidelog.types import Ints

Guarantee: TypeAlias = Literal["at_least_once", "exactly_once"]
GUARANTEES: Final = ("at_least_once", "exactly_once")
HOPS_MAX: Final = 8  # a record that came over so many routers is passed on by no other
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """One router as it is now. When it is changed it is another one, which begins where the lane stands."""

    name: str
    source: str
    dest: str
    preserve_node: bool = True
    preserve_tag: bool = True
    allow_cycle: bool = False
    exactly_once: bool = False
    match: Match | None = None
    start: int = 0  # it passes on what lies behind this seq of the source
    dest_head_at_creation: int = 0  # the dest's head when it was made

    def to_body(self) -> RouterCreate:
        return RouterCreate(
            name=self.name,
            source=self.source,
            dest=self.dest,
            preserve_node=self.preserve_node,
            preserve_tag=self.preserve_tag,
            allow_cycle=self.allow_cycle,
            exactly_once=self.exactly_once,
            match=self.match,
            initial_cursor=self.start,
            initial_dest_base=self.dest_head_at_creation,
        )

    @classmethod
    def from_body(cls, body: RouterCreate) -> Router:
        return cls(
            name=body.name,
            source=body.source,
            dest=body.dest,
            preserve_node=body.preserve_node,
            preserve_tag=body.preserve_tag,
            allow_cycle=body.allow_cycle,
            exactly_once=body.exactly_once,
            match=body.match,
            start=body.initial_cursor,
            dest_head_at_creation=body.initial_dest_base,
        )

    @property
    def settings(self) -> tuple[object, ...]:
        """What a caller asked for: two that are equal in this pass on the same."""
        flags = (self.preserve_node, self.preserve_tag, self.allow_cycle, self.exactly_once)
        return (self.name, self.source, self.dest, *flags, self.match)


class RouterState(NamedTuple):
    """A router as a caller sees it."""

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
    told = None
    if match is not None:
        told = ("tag", "Eq", match.value) if match.op is MatchOp.EXACT else ("tag", "Glob", f"{match.value}*")
    return RouterState(
        router.name,
        router.source,
        router.dest,
        router.preserve_node,
        router.preserve_tag,
        told,
        router.allow_cycle,
        "exactly_once" if router.exactly_once else "at_least_once",
        forwarded,
        created,
    )


def check_router_name(name: object) -> None:
    """Raise where a router cannot be called this."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise BadInput(
            f"{str(name)[:80]!r} cannot name a router: 1 to 255 of A-Z a-z 0-9 . _ : - > and a letter or digit first; "
            "nothing was created, choose another name"
        )


def check_endpoints(wanted: Router, routers: Iterable[Router]) -> Router | None:
    """The router of this name, where there is one. Raises where the wanted one cannot be beside those there are."""
    known: Router | None = None
    for router in routers:
        if router.name == wanted.name:
            known = router
        elif router.dest == wanted.dest and router.source != wanted.source:
            raise TopicExists(
                wanted.dest,
                reason=f"router {router.name!r} feeds it from {router.source!r}, and a topic is fed from one source",
                detail={"reason": "router_dest_fan_in"},
            )
    if known is not None and (known.source, known.dest) != (wanted.source, wanted.dest):
        raise TopicExists(
            wanted.dest,
            reason=f"router {known.name!r} leads from {known.source!r} to {known.dest!r} and never to elsewhere",
            detail={
                "router": known.name,
                "reason": "router_repoint_forbidden",
                "existing_source": known.source,
                "existing_dest": known.dest,
            },
        )
    return known


def check_cycle(wanted: Router, routers: Iterable[Router]) -> None:
    """Raise where the dest leads to the source already, over other routers, unless that is what is wanted."""
    if wanted.allow_cycle:
        return
    onward: dict[str, list[str]] = {}
    for router in routers:
        if router.name != wanted.name:
            onward.setdefault(router.source, []).append(router.dest)
    paths, seen = [[wanted.source, wanted.dest]], {wanted.dest}
    while paths:
        path = paths.pop(0)
        if path[-1] == wanted.source:
            raise RouterCycle(wanted.name, path)
        for further in onward.get(path[-1], ()):
            if further not in seen:
                seen.add(further)
                paths.append([*path, further])


HopRange = tuple[int, int, int]  # seqs [lo, hi) came over so many


class HopCounts:
    """The owner's lock guards it."""

    def __init__(self, stretches: Iterable[HopRange] = ()) -> None:
        self._ranges: list[HopRange] = list(stretches)

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def add_runs(self, lo: int, runs: Sequence[int]) -> None:
        """Seqs from `lo` on, in pairs of how many and how far they came."""
        for count, hops in zip(runs[::2], runs[1::2], strict=True):
            self.add(lo, lo + count, hops)
            lo += count

    def add(self, lo: int, hi: int, hops: int) -> None:
        """Seqs [lo, hi), behind all that were added before."""
        if self._ranges and self._ranges[-1][1:] == (lo, hops):
            lo = self._ranges.pop()[0]
        self._ranges.append((lo, hi, hops))

    def forget_below(self, below: int) -> None:
        """Nobody will ask about seqs below this one."""
        keep = next((at for at, (_, hi, _) in enumerate(self._ranges) if hi > below), len(self._ranges))
        del self._ranges[:keep]

    def ranges_up_to(self, head: int) -> tuple[HopRange, ...]:
        """All that lies at or below `head`."""
        return tuple((lo, min(hi, head + 1), hops) for lo, hi, hops in self._ranges if lo <= head)

    def between(self, lo: int, hi: int) -> Ints:
        """One number a seq of [lo, hi)."""
        found: Ints = np.zeros(hi - lo, np.int64)
        for first, stop, hops in reversed(self._ranges):
            if stop <= lo:
                break
            found[max(first - lo, 0) : max(stop - lo, 0)] = hops
        return found
