"""[hot] Figures of queues: what they hold, asked when somebody scrapes, and what clients did with them, counted."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tidelog.engine import Engine, TopicState
from tidelog.errors import NotAQueue, TopicNotFound


class Held(NamedTuple):
    """What one queue holds."""

    ready: int
    in_flight: int
    dead_lettered: int
    expired: int


class Done:
    """What clients did with one queue since the server started."""

    __slots__ = ("acked", "claimed", "extended", "nacked")

    def __init__(self) -> None:
        self.claimed = self.acked = self.nacked = self.extended = 0


class QueueFigures:
    """Counted on the event loop's thread, told on any."""

    def __init__(self) -> None:
        self._done: dict[str, Done] = {}

    def _of(self, topic: str) -> Done:
        row = self._done.get(topic)
        if row is None:
            row = self._done[topic] = Done()
        return row

    def claimed(self, topic: str, jobs: int) -> None:
        self._of(topic).claimed += jobs

    def acked(self, topic: str, jobs: int) -> None:
        self._of(topic).acked += jobs

    def nacked(self, topic: str, jobs: int) -> None:
        self._of(topic).nacked += jobs

    def extended(self, topic: str, jobs: int) -> None:
        self._of(topic).extended += jobs

    def forget(self, known: Collection[str]) -> None:
        """Drop the figures of queues that are gone: one made again starts from nothing."""
        for name in list(self._done):
            if name not in known:
                self._done.pop(name, None)

    def held(self, engine: Engine, topics: Sequence[TopicState]) -> dict[str, Held]:
        """What every queue holds now. A lease that has run out is none."""
        found: dict[str, Held] = {}
        for state in topics:
            topic = engine.find(state.topic) if state.config.type == "queue" else None
            if topic is None:
                continue  # a log, or dropped meanwhile
            try:
                queue = topic.queue()
                found[state.topic] = Held(*queue.counts(), queue.expired)
            except (NotAQueue, TopicNotFound):
                continue  # dropped meanwhile, and perhaps made again as a log
        return found

    def collect(self, queues: Sequence[tuple[str, Held]]) -> Iterator[Metric]:
        """Series by queue."""
        nothing = Done()
        rows = [(name, held, self._done.get(name, nothing)) for name, held in queues]
        for what, text, values in (
            ("ready", "Jobs that can be claimed.", [held.ready for _, held, _ in rows]),
            ("in_flight", "Jobs under a lease.", [held.in_flight for _, held, _ in rows]),
        ):
            gauge = GaugeMetricFamily(f"tidelog_topic_queue_{what}", text, labels=["topic"])
            for (name, _, _), value in zip(rows, values, strict=True):
                gauge.add_metric([name], value)
            yield gauge
        for what, text, values in (
            ("claimed", "Jobs that were handed out.", [done.claimed for _, _, done in rows]),
            ("acked", "Jobs that were done.", [done.acked for _, _, done in rows]),
            ("nacked", "Jobs that were given back.", [done.nacked for _, _, done in rows]),
            ("extended", "Leases that were made longer.", [done.extended for _, _, done in rows]),
            ("expired", "Leases that ran out.", [held.expired for _, held, _ in rows]),
            ("dead_lettered", "Jobs that were delivered too often, ever.", [held.dead_lettered for _, held, _ in rows]),
        ):
            counter = CounterMetricFamily(f"tidelog_topic_queue_{what}", text, labels=["topic"])
            for (name, _, _), value in zip(rows, values, strict=True):
                counter.add_metric([name], value)
            yield counter
