"""[policy] What a router is, which ones may be made, and what each passes on.

    a source ──▶ lane ──▶ a dest        all routers between two topics share a lane and its cursor,
                 │ router, router …     in the order in which they were made

Rules for a new one, in order of authority:
  1. A dest has one source. Its copies are found again from that source, seq by seq; a second one would make
     their order a matter of timing.
  2. A router never changes its ends: copies that were made would not be its own any more.
  3. A dest that already leads to the source makes a circle, which is refused unless it is asked for; then the
     number of routers a record came over ends it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from tidelog.errors import BadInput, RouterCycle, TopicExists
from tidelog.formats.bodies import Match, MatchOp, RouterCreate

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
    base: int = 0  # the dest's head when it was made

    def as_body(self) -> RouterCreate:
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
            initial_dest_base=self.base,
        )

    @classmethod
    def of_body(cls, body: RouterCreate) -> Router:
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
            base=body.initial_dest_base,
        )

    @property
    def wish(self) -> tuple[object, ...]:
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


def shown(router: Router, forwarded: int, *, created: bool = False) -> RouterState:
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


def check_fits(wanted: Router, routers: Iterable[Router]) -> Router | None:
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


def check_circle(wanted: Router, routers: Iterable[Router]) -> None:
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
