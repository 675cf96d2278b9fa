"""What a caller can do with routers: the part of the engine's door that is about them."""

from __future__ import annotations

from threading import Lock
from typing import Protocol

from tidelog.disk.interrupts import deferring
from tidelog.engine.config import OWN, TopicConfig, check_topic_name
from tidelog.engine.core import Core
from tidelog.engine.delete import parse
from tidelog.engine.routing.router import GUARANTEES, Guarantee, Router, RouterState, check_router_name
from tidelog.engine.routing.routing import Routing, found
from tidelog.engine.topic import Topic
from tidelog.errors import BadInput, Error, NotEmpty, TopicNotFound


class _Home(Protocol):
    """What the engine has: the topics, and the lock over making and dropping them."""

    _routing: Routing
    _registry: Lock
    _topics: dict[str, Core]

    def _check(self) -> None: ...

    def _check_writable(self) -> None: ...

    def _find(self, name: object) -> Core | None: ...

    def _create(self, name: str, config: TopicConfig) -> Core: ...

    def _drop(self, core: Core, actor: str | None = None) -> None: ...


@deferring("router", "find_router", "drop_router", "remove")
class Routers:
    """Mixed into the engine."""

    def router(
        self: _Home,
        name: str,
        source: str,
        dest: str,
        *,
        preserve_node: bool = True,
        preserve_tag: bool = True,
        create_dest: bool = True,
        filter: object = None,
        allow_cycle: bool = False,
        guarantee: Guarantee = "at_least_once",
    ) -> RouterState:
        """Have every record that `source` gets from now on passed on to `dest`; topics that are not there are made.

        `filter` is a tag, a tag's beginning and `*`, or `["tag", "Eq" | "Glob", text]`: records without such a tag
        stay behind. A router of this name that is there is changed: options that are not given take their defaults,
        what it passed on stays. Where nothing can be made of it, nothing is made at all.
        """
        check_router_name(name)
        if guarantee not in GUARANTEES:
            raise BadInput(f"a guarantee is one of {', '.join(GUARANTEES)}, not {guarantee!r}; nothing was made")
        for flag in (preserve_node, preserve_tag, create_dest, allow_cycle):
            if not isinstance(flag, bool):
                raise BadInput(f"an option of a router is true or false, not {flag!r}; nothing was made")
        if source == dest:
            raise BadInput(f"{source!r} cannot be passed on to itself; nothing was made, name another dest")
        check_topic_name(source)
        check_topic_name(dest)
        wanted = Router(
            name=name,
            source=source,
            dest=dest,
            preserve_node=preserve_node,
            preserve_tag=preserve_tag,
            allow_cycle=allow_cycle,
            exactly_once=guarantee == "exactly_once",
            match=parse(filter, "nothing was made"),
        )
        with self._registry:
            self._check_writable()
            if not create_dest and self._find(dest) is None:
                raise TopicNotFound(dest)
            known = self._routing.check(wanted)
            made: list[Core] = []
            try:
                ends = []
                for end in (source, dest):
                    core = self._find(end)
                    if core is None:
                        core = self._create(end, TopicConfig())
                        made.append(core)
                    ends.append(core)
                self._routing.put(wanted, *ends)
            except Error:
                for core in reversed(made):
                    self._drop(core)
                raise
        return found(self._routing.state(name, created=not known), name)

    def find_router(self: _Home, name: str, *, fresh: bool = True) -> RouterState | None:
        """The router of this name, if there is one; `fresh`: when it has passed on all that its source holds now."""
        self._check()
        return self._routing.state(name, fresh=fresh)

    def routers(self: _Home, prefix: str = "", source: str | None = None, dest: str | None = None) -> list[RouterState]:
        """What routers there are, by name: those that begin with `prefix`, from `source`, to `dest`. As they are."""
        self._check()
        return self._routing.states(prefix, source, dest)

    @property
    def router_count(self: _Home) -> int:
        return len(self._routing)

    def drop_router(self: _Home, name: str) -> bool:
        """Stop passing on; False where there is no such router. Copies stay. On return the drop survives a crash."""
        with self._registry:
            self._check_writable()
            return self._routing.drop(name)

    def remove(self: _Home, name: str, *, if_empty: bool = False, actor: str | None = None) -> list[str] | None:
        """Remove a topic with all its records; return the routers that went with it, None where there is no topic."""
        with self._registry:
            core = self._topics.get(name)
            if core is None or name.startswith(OWN):
                self._check_writable()
                return None
            if if_empty and (count := Topic(core).count):
                raise NotEmpty(name, count=count)
            routers = self._routing.leave(core)
            self._drop(core, actor)
        return sorted(routers, key=str.encode)
