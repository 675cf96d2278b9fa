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

from tidelog.engine import SEQ_MAX, FieldSelection, Gap, JsonPage, Topic
from tidelog.engine.read import ExcludedNodes
from tidelog.errors import TopicNotFound

CACHE_BYTES_MAX: Final = 16 << 20
CACHE_PAGES_MAX: Final = 1_024
_FRAMES_PER_PAGE_MAX: Final = 2  # of a page: as an event, and as a message
_encode_json = msgspec.json.Encoder().encode

PageKey: TypeAlias = tuple[object, ...]
RunBlocking: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]  # runs what may wait, off the loop


class ReadOptions(NamedTuple):
    """What of a topic somebody wants to see, and how much at once."""

    limit: int
    bytes_max: int
    nodes: ExcludedNodes
    show: FieldSelection
    strong: bool = False  # only what survives a power cut


class EncodedPage:
    """Records behind a cursor, as text; `body` is empty where there are none."""

    __slots__ = ("_frames", "body", "count", "gap", "head_seq", "name", "next_from_seq")

    def __init__(self, name: str, body: bytes, count: int, gap: Gap | None, next_from_seq: int, head_seq: int) -> None:
        self.name, self.body, self.count, self.gap = name, body, count, gap
        self.next_from_seq, self.head_seq = next_from_seq, head_seq
        self._frames: dict[bytes, bytes] = {}

    @property
    def caught_up(self) -> bool:
        return self.next_from_seq == self.head_seq

    def frame(self, key: bytes, encode: Callable[[EncodedPage], bytes]) -> bytes:
        """The page as its transport sends it. Peers to whom the same is said get the same object: what a thousand
        slow peers have not taken yet is in memory once."""
        made = self._frames.get(key)
        if made is None:
            made = encode(self)
            if len(self._frames) < _FRAMES_PER_PAGE_MAX:
                self._frames[key] = made
        return made


def read_page(topic: Topic, from_seq: int, options: ReadOptions) -> EncodedPage:
    """Read a page and make it text."""
    found = topic.read_json(
        min(from_seq, SEQ_MAX),
        options.limit,
        options.bytes_max,
        nodes=options.nodes,
        show=options.show,
        strong=options.strong,
    )
    return build_page(topic.name, from_seq, found)


def build_page(name: str, from_seq: int, text_page: JsonPage) -> EncodedPage:
    body = b""
    if text_page.text:
        if text_page.gap is not None:
            from_seq = text_page.gap.earliest_seq - 1  # the position that the tombstone before this page says
        body = b'"topic":%b,"from_seq":%d,"to_seq":%d,"head_seq":%d,"records":[%b]}' % (
            _encode_json(name),
            from_seq,
            text_page.next_from_seq,
            text_page.head_seq,
            text_page.text,
        )
    return EncodedPage(name, body, text_page.counts.rows, text_page.gap, text_page.next_from_seq, text_page.head_seq)


class PageCache:
    """Pages that somebody else may ask for as well. On the event loop's thread; bounded in number and in bytes."""

    def __init__(self, bytes_max: int = CACHE_BYTES_MAX, pages_max: int = CACHE_PAGES_MAX) -> None:
        self._bytes_max, self._pages_max = bytes_max, pages_max
        self._pages: dict[PageKey, EncodedPage] = {}  # oldest first
        self._loading: dict[PageKey, asyncio.Future[EncodedPage]] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._pages)

    def get_cached(self, topic: Topic, from_seq: int, options: ReadOptions) -> EncodedPage | None:
        """The page behind `from_seq`, where it is kept or can be made from memory."""
        if not topic.is_floor_durable_for(from_seq) or not topic.is_durable_for(options.strong):
            return None
        key = _page_key(topic, from_seq, options)
        page = self._pages.get(key)
        # Who leaves records out, or their data, may need more of a segment than what is known to be at hand.
        limit = options.limit if options.show.data and not options.nodes else 0
        if page is None and topic.can_read_without_blocking(from_seq, limit, options.bytes_max, strong=options.strong):
            page = self._store(key, read_page(topic, from_seq, options))
        return page

    def get_latest(self, topic: Topic, from_seq: int, options: ReadOptions) -> EncodedPage | None:
        """`at_hand` for those who are told of a write as it is done: what they lack is mostly that write and nothing
        else, which costs less to make than to look for."""
        found = (
            topic.read_cached_json(from_seq, options.limit, options.bytes_max, strong=options.strong)
            if options.show.data
            else None
        )
        return self.get_cached(topic, from_seq, options) if found is None else build_page(topic.name, from_seq, found)

    async def get(self, topic: Topic, from_seq: int, options: ReadOptions, run_blocking: RunBlocking) -> EncodedPage:
        """The page behind `from_seq`. Comes back at once where it is at hand."""
        if not topic.is_floor_durable_for(from_seq):
            await run_blocking(topic.state)
        page = self.get_cached(topic, from_seq, options)
        if page is not None:
            return page
        key = _page_key(topic, from_seq, options)
        coming = self._loading.get(key)
        if coming is None:
            coming = asyncio.ensure_future(self._load(key, topic, from_seq, options, run_blocking))
            self._loading[key] = coming
            coming.add_done_callback(lambda done: self._on_loaded(key, done))
        # Shielded: whoever asked first may leave, and others wait for the same.
        return await asyncio.shield(coming)

    async def _load(
        self, key: PageKey, topic: Topic, from_seq: int, options: ReadOptions, run_blocking: RunBlocking
    ) -> EncodedPage:
        page: EncodedPage = await run_blocking(lambda: read_page(topic, from_seq, options))
        return self._store(key, page)

    def _on_loaded(self, key: PageKey, done: asyncio.Future[EncodedPage]) -> None:
        del self._loading[key]
        if not done.cancelled():
            done.exception()  # looked at, so that nobody is told of an error whose askers have all left

    def _store(self, key: PageKey, page: EncodedPage) -> EncodedPage:
        """Keep a page. It was read after its key was made: it may be newer than its key says and never older."""
        self._evict(key)
        self._pages[key] = page
        self.bytes += len(page.body)
        while self.bytes > self._bytes_max or len(self._pages) > self._pages_max:
            self._evict(next(iter(self._pages)))
        return page

    def _evict(self, key: PageKey) -> None:
        page = self._pages.pop(key, None)
        if page is not None:
            self.bytes -= len(page.body)


def _page_key(topic: Topic, from_seq: int, options: ReadOptions) -> PageKey:
    version = topic.version
    if topic.is_dropped:
        raise TopicNotFound(topic.name)
    return (version, from_seq, topic.config.dedupe_node, options)
