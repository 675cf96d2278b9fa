"""[hot] Pages of records as watchers are sent them, made once for all who ask for the same.

    "topic":"jobs","from_seq":2,"to_seq":4,"head_seq":9,"records":[{"$seq":3,…},{"$seq":4,…}]}
    └ what a frame begins with is the transport's, and stands before this

A kept page is found by what it was asked for and by what the topic held at that moment: its head, its evict floor
and how many records live. While the head stands still records only go away, so the same head and the same count are
the same records; a page from before a delete is never found after it. Pages that a write has made obsolete are not
looked for again and are the first to be let go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from tidelog.engine import SEQ_MAX, Gap, Show, TextPage, Topic
from tidelog.engine.read import Nodes
from tidelog.errors import TopicNotFound

BYTES_MAX: Final = 16 << 20
PAGES_MAX: Final = 1_024
_FRAMED_MAX: Final = 2  # of a page: as an event, and as a message
_quote = msgspec.json.Encoder().encode

Key: TypeAlias = tuple[object, ...]
Work: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]  # runs what may wait, off the loop


class View(NamedTuple):
    """What of a topic somebody wants to see, and how much at once."""

    limit: int
    bytes_max: int
    nodes: Nodes
    show: Show
    strong: bool = False  # only what survives a power cut


class Page:
    """Records behind a cursor, as text; `body` is empty where there are none."""

    __slots__ = ("_framed", "body", "count", "gap", "head_seq", "name", "next_from_seq")

    def __init__(self, name: str, body: bytes, count: int, gap: Gap | None, next_from_seq: int, head_seq: int) -> None:
        self.name, self.body, self.count, self.gap = name, body, count, gap
        self.next_from_seq, self.head_seq = next_from_seq, head_seq
        self._framed: dict[bytes, bytes] = {}

    @property
    def caught_up(self) -> bool:
        return self.next_from_seq == self.head_seq

    def framed(self, key: bytes, make: Callable[[Page], bytes]) -> bytes:
        """The page as its transport sends it. Peers to whom the same is said get the same object: what a thousand
        slow peers have not taken yet is in memory once."""
        made = self._framed.get(key)
        if made is None:
            made = make(self)
            if len(self._framed) < _FRAMED_MAX:
                self._framed[key] = made
        return made


def render(topic: Topic, from_seq: int, view: View) -> Page:
    """Read a page and make it text."""
    found = topic.read_json(
        min(from_seq, SEQ_MAX), view.limit, view.bytes_max, nodes=view.nodes, show=view.show, strong=view.strong
    )
    return page_of(topic.name, from_seq, found)


def page_of(name: str, from_seq: int, found: TextPage) -> Page:
    body = b""
    if found.text:
        if found.gap is not None:
            from_seq = found.gap.earliest_seq - 1  # the position that the tombstone before this page says
        body = b'"topic":%b,"from_seq":%d,"to_seq":%d,"head_seq":%d,"records":[%b]}' % (
            _quote(name),
            from_seq,
            found.next_from_seq,
            found.head_seq,
            found.text,
        )
    return Page(name, body, found.counts.rows, found.gap, found.next_from_seq, found.head_seq)


class Pages:
    """Pages that somebody else may ask for as well. On the event loop's thread; bounded in number and in bytes."""

    def __init__(self, bytes_max: int = BYTES_MAX, pages_max: int = PAGES_MAX) -> None:
        self._bytes_max, self._pages_max = bytes_max, pages_max
        self._kept: dict[Key, Page] = {}  # oldest first
        self._coming: dict[Key, asyncio.Future[Page]] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def at_hand(self, topic: Topic, from_seq: int, view: View) -> Page | None:
        """The page behind `from_seq`, where it is kept or can be made from memory."""
        if not topic.is_settled_for(from_seq) or not topic.is_synced_for(view.strong):
            return None
        key = _key(topic, from_seq, view)
        page = self._kept.get(key)
        # Who leaves records out, or their data, may need more of a segment than what is known to be at hand.
        limit = view.limit if view.show.data and not view.nodes else 0
        if page is None and topic.is_quick(from_seq, limit, view.bytes_max, strong=view.strong):
            page = self._keep(key, render(topic, from_seq, view))
        return page

    def newest(self, topic: Topic, from_seq: int, view: View) -> Page | None:
        """`at_hand` for those who are told of a write as it is done: what they lack is mostly that write and nothing
        else, which costs less to make than to look for."""
        found = topic.at_hand(from_seq, view.limit, view.bytes_max, strong=view.strong) if view.show.data else None
        return self.at_hand(topic, from_seq, view) if found is None else page_of(topic.name, from_seq, found)

    async def get(self, topic: Topic, from_seq: int, view: View, work: Work) -> Page:
        """The page behind `from_seq`. Comes back at once where it is at hand."""
        if not topic.is_settled_for(from_seq):
            await work(topic.state)
        page = self.at_hand(topic, from_seq, view)
        if page is not None:
            return page
        key = _key(topic, from_seq, view)
        coming = self._coming.get(key)
        if coming is None:
            coming = asyncio.ensure_future(self._read(key, topic, from_seq, view, work))
            self._coming[key] = coming
            coming.add_done_callback(lambda done: self._came(key, done))
        # Shielded: whoever asked first may leave, and others wait for the same.
        return await asyncio.shield(coming)

    async def _read(self, key: Key, topic: Topic, from_seq: int, view: View, work: Work) -> Page:
        page: Page = await work(lambda: render(topic, from_seq, view))
        return self._keep(key, page)

    def _came(self, key: Key, done: asyncio.Future[Page]) -> None:
        del self._coming[key]
        if not done.cancelled():
            done.exception()  # looked at, so that nobody is told of an error whose askers have all left

    def _keep(self, key: Key, page: Page) -> Page:
        """Keep a page. It was read after its key was made: it may be newer than its key says and never older."""
        self._forget(key)
        self._kept[key] = page
        self.bytes += len(page.body)
        while self.bytes > self._bytes_max or len(self._kept) > self._pages_max:
            self._forget(next(iter(self._kept)))
        return page

    def _forget(self, key: Key) -> None:
        page = self._kept.pop(key, None)
        if page is not None:
            self.bytes -= len(page.body)


def _key(topic: Topic, from_seq: int, view: View) -> Key:
    version = topic.version
    if topic.dropped:
        raise TopicNotFound(topic.name)
    return (version, from_seq, topic.config.dedupe_node, view)
