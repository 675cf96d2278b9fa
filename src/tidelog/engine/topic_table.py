"""The topics of an engine by name.

A topic that nothing has used since the directory was opened is idle: the table keeps its row of the manifest, as bytes,
and loads it on first use. So memory and the time of an open follow the topics in use; a directory may hold very many.

    get ──► loaded ──► TopicState
        └─► idle ────► load(TopicEntry) ──► TopicState, loaded from then on

`resident` has the loaded topics only: background work has nothing to do for idle ones. Their next expiry or seal is in
the maintenance schedule, by name. Thread-safe: lookups of loaded topics take no lock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock
from typing import Final

from tidelog.engine.config import TopicConfig
from tidelog.engine.manifest import TopicEntry, TopicRow
from tidelog.engine.results import TopicInfo
from tidelog.engine.topic_index import Watermarks
from tidelog.engine.topic_state import TopicState, effective_priority
from tidelog.errors import Damaged

LoadTopic = Callable[[TopicEntry], TopicState]
_PAGE_NAMES: Final = 256


@dataclass(slots=True)
class IdleTotals:
    """What idle topics have together, so that a scrape of metrics decodes none of their rows."""

    topics: int = 0
    queues: int = 0
    records: int = 0
    bytes: int = 0
    by_class: Counter[str] = field(default_factory=Counter)
    hot_segments: int = 0  # sealed ones
    hot_bytes: int = 0
    cold_segments: int = 0
    cold_bytes: int = 0
    object_bytes: int = 0

    def add(self, entry: TopicEntry, row: TopicRow, config: TopicConfig, sign: int = 1) -> None:
        """Count a topic; with the sign -1, no longer."""
        self.topics += sign
        self.queues += sign * (config.type == "queue")
        self.records += sign * entry.records
        self.bytes += sign * entry.size
        self.by_class[config.durability] += sign
        for segment in row.segments:
            if segment.cold is not None and segment.cold.key:
                self.cold_segments += sign
                self.cold_bytes += sign * segment.size
                self.object_bytes += sign * segment.cold.length
            elif segment.sealed:
                self.hot_segments += sign
                self.hot_bytes += sign * segment.size


class TopicTable:
    def __init__(
        self,
        topics: Mapping[str, TopicState] | None = None,
        idle: Mapping[str, TopicEntry] | None = None,
        load: LoadTopic | None = None,
        idle_totals: IdleTotals | None = None,
    ) -> None:
        """`idle_totals`: those of `idle`."""
        self.idle_totals = idle_totals or IdleTotals()
        self._loaded: dict[str, TopicState] = dict(topics or {})
        self._idle: dict[str, TopicEntry] = dict(idle or {})
        self._load = load
        self._lock = Lock()  # held while a topic is loaded, and while names are sorted
        self._names: list[str] = []  # sorted; those in `_added` are missing
        self._added = deque((*self._loaded, *self._idle))  # appended to without the lock

    def __len__(self) -> int:
        return len(self._loaded) + len(self._idle)

    def get(self, name: str) -> TopicState | None:
        """Return the topic of this name, loaded if it was idle."""
        topic = self._loaded.get(name)
        if topic is not None or name not in self._idle:
            return topic or self._loaded.get(name)  # it may have been loaded between the two
        with self._lock:
            entry = self._idle.get(name)
            if entry is None:
                return self._loaded.get(name)
            assert self._load is not None, "a table with idle topics can load them"
            try:
                topic = self._load(entry)
            except OSError as error:
                raise Damaged(
                    f"{name} cannot be loaded: {error}; nothing was changed, repair the disk and retry"
                ) from error
            self._loaded[name] = topic
            del self._idle[name]
            row = entry.decode()
            self.idle_totals.add(entry, row, TopicConfig.from_json(row.config), -1)
            return topic

    def add(self, topic: TopicState) -> None:
        """Add a new topic. Called by the committer, which must not wait for a load."""
        self._loaded[topic.name] = topic
        self._added.append(topic.name)

    def remove(self, topic: TopicState) -> None:
        del self._loaded[topic.name]
        with self._lock:
            self._sort_names()
            place = bisect_left(self._names, topic.name)
            if self._names[place : place + 1] == [topic.name]:
                del self._names[place]

    def resident(self) -> list[TopicState]:
        """Return the topics that are loaded."""
        return list(self._loaded.values())

    def ids(self) -> set[int]:
        """Return the ids of all topics, loaded or idle."""
        idle = {entry.id for entry in list(self._idle.values())}  # first: one that is loaded meanwhile is in both
        return idle | {topic.id for topic in self.resident()}

    def names(self, prefix: str = "", after: str = "") -> Iterator[str]:
        """Yield the names that begin with `prefix` and come after `after`, sorted. A page costs its names."""
        while True:
            with self._lock:
                self._sort_names()
                start = max(bisect_left(self._names, prefix), bisect_right(self._names, after) if after else 0)
                page = list(islice(self._names, start, start + _PAGE_NAMES))
            for name in page:
                if not name.startswith(prefix):
                    return
                yield name
            if len(page) < _PAGE_NAMES:
                return
            after = page[-1]

    def _sort_names(self) -> None:
        """Merge new names: linear where few were added. With the lock held."""
        if self._added:
            while self._added:
                self._names.append(self._added.popleft())
            self._names.sort()

    def has_idle(self, entry: TopicEntry) -> bool:
        """Whether a topic is idle with this row."""
        found = self._idle.get(entry.name)
        return found is not None and found.row == entry.row

    def idle_row(self, name: str) -> TopicRow | None:
        """Return the row of an idle topic; None: it is loaded, or does not exist."""
        entry = self._idle.get(name)
        return None if entry is None else entry.decode()

    def idle_info(self, name: str) -> TopicInfo | None:
        """Return the state of an idle topic without loading it; None: it is loaded, or does not exist."""
        entry = self._idle.get(name)
        return None if entry is None else _describe(entry, entry.decode())


def _describe(entry: TopicEntry, row: TopicRow) -> TopicInfo:
    config = TopicConfig.from_json(row.config)
    floor = Watermarks(row.cap_mark, row.ttl_mark, row.source_mark).evict_floor
    return TopicInfo(
        row.name,
        row.id,
        row.epoch or row.id,
        row.head,
        row.earliest,
        floor,
        entry.records,
        entry.size,
        row.last_ts or None,
        None,
        effective_priority(config, None),
        config,
    )
