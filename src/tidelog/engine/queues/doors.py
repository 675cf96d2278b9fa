"""What a queue needs of the engine it is in: other topics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tidelog.engine.config import TopicConfig
    from tidelog.engine.encode import Batch, Columns
    from tidelog.engine.topic import Topic

HISTORY = "_tidelog.history."  # and the name of the queue


class Doors(Protocol):
    def ensure(self, name: str, config: TopicConfig, first: Batch | Columns) -> tuple[Topic, bool]:
        """The topic of this name, made where there is none, for this write."""
        ...

    def find(self, name: str) -> Topic | None: ...

    def own(self, name: str, **config: object) -> Topic:
        """A topic of the engine's own, made where there is none."""
        ...

    def disown(self, name: str) -> None:
        """Drop a topic of the engine's own, if it is there."""
        ...
