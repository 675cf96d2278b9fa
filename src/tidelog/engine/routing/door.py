"""What a caller can do with routers: the part of the engine's door that is about them."""

from __future__ import annotations

from threading import Lock

from tidelog.engine.config import TopicConfig, check_topic_name
from tidelog.engine.core import Core
from tidelog.engine.delete import parse
from tidelog.engine.routing.router import GUARANTEES, Guarantee, Router, RouterState, check_router_name
from tidelog.engine.routing.routing import Routing, found
from tidelog.errors import BadInput, Error, TopicNotFound


class Routers:
    """Mixed into the engine, which has the topics and the lock over making and dropping them."""

    _routing: Routing
    _registry: Lock

    def router(
        self,
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
                ends = [self._find(end) or self._new(end, made) for end in (source, dest)]
                self._routing.put(wanted, *ends)
            except Error:
                for core in reversed(made):
                    self._drop(core)
                raise
        return found(self._routing.state(name, created=not known), name)

    def find_router(self, name: str, *, fresh: bool = True) -> RouterState | None:
        """The router of this name, if there is one; `fresh`: when it has passed on all that its source holds now."""
        self._check()
        return self._routing.state(name, fresh=fresh)

    def routers(self, prefix: str = "", source: str | None = None, dest: str | None = None) -> list[RouterState]:
        """What routers there are, by name: those that begin with `prefix`, from `source`, to `dest`. As they are."""
        self._check()
        return self._routing.states(prefix, source, dest)

    @property
    def router_count(self) -> int:
        return len(self._routing)

    def drop_router(self, name: str) -> bool:
        """Stop passing on; False where there is no such router. Copies stay."""
        with self._registry:
            self._check_writable()
            return self._routing.drop(name)

    def _new(self, name: str, made: list[Core]) -> Core:
        core = self._create(name, TopicConfig())
        made.append(core)
        return core

    # What the engine has.

    def _check(self) -> None:
        raise NotImplementedError

    def _check_writable(self) -> None:
        raise NotImplementedError

    def _find(self, name: object) -> Core | None:
        raise NotImplementedError

    def _create(self, name: str, config: TopicConfig) -> Core:
        raise NotImplementedError

    def _drop(self, core: Core, actor: str | None = None) -> None:
        raise NotImplementedError
