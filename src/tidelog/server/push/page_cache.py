"""Pages of records as they are sent to watchers, encoded once for all that read the same position.

    "topic":"jobs","from_seq":2,"to_seq":4,"head_seq":9,"records":[{"$seq":3,…},{"$seq":4,…}]}
    └ the transport puts the beginning of its frame before this

`PageCache` is the only cache of pages. A page's key is the request and the version of the topic: its head, its evict
floor and its number of live records. While the head does not change records only disappear, so the same head and the
same count are the same records; a page from before a delete is never returned after it. Pages of older versions are
not requested again and are the first to be evicted. A page keeps the frames that it was encoded into, and during one
delivery readers at the same position share the page without a look at the version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from tidelog.engine import SEQ_MAX, FieldSelection, Gap, JsonPage, Topic
from tidelog.engine.read import ExcludedNodes
from tidelog.engine.topic import topic_operations
from tidelog.errors import TopicNotFound

CACHE_BYTES_MAX: Final = 16 << 20
CACHE_PAGES_MAX: Final = 1_024
_FRAMES_PER_PAGE_MAX: Final = 2  # one for SSE, one for WebSocket
_encode_json = msgspec.json.Encoder().encode

PageKey: TypeAlias = tuple[object, ...]
RunBlocking: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]  # runs a blocking call in a thread


class ReadOptions(NamedTuple):
    """Which fields and records of a topic a reader wants, and the size of its pages."""

    limit: int
    bytes_max: int
    nodes: ExcludedNodes
    show: FieldSelection
    strong: bool = False  # only records that survive a power cut


class EncodedPage:
    """Records after a cursor as JSON text; `body` is empty where there are none."""

    __slots__ = ("_frames", "body", "count", "gap", "head_seq", "name", "next_from_seq")

    def __init__(self, name: str, body: bytes, count: int, gap: Gap | None, next_from_seq: int, head_seq: int) -> None:
        self.name, self.body, self.count, self.gap = name, body, count, gap
        self.next_from_seq, self.head_seq = next_from_seq, head_seq
        self._frames: dict[bytes, bytes] = {}

    @property
    def caught_up(self) -> bool:
        return self.next_from_seq == self.head_seq

    def frame(self, key: bytes, encode: Callable[[EncodedPage], bytes]) -> bytes:
        """Return the page as a frame of a transport. Peers with the same frame share one object: the unsent bytes of a
        thousand slow peers are in memory once."""
        frame = self._frames.get(key)
        if frame is None:
            frame = encode(self)
            if len(self._frames) < _FRAMES_PER_PAGE_MAX:
                self._frames[key] = frame
        return frame


def read_page(topic: Topic, from_seq: int, options: ReadOptions) -> EncodedPage:
    """Read and encode a page."""
    page = topic_operations(topic).read_json(
        min(from_seq, SEQ_MAX),
        options.limit,
        options.bytes_max,
        nodes=options.nodes,
        show=options.show,
        strong=options.strong,
    )
    return build_page(topic.name, from_seq, page)


def build_page(name: str, from_seq: int, text_page: JsonPage) -> EncodedPage:
    body = b""
    if text_page.text:
        if text_page.gap is not None:
            from_seq = text_page.gap.earliest_seq - 1  # the position of the tombstone before this page
        body = b'"topic":%b,"from_seq":%d,"to_seq":%d,"head_seq":%d,"records":[%b]}' % (
            _encode_json(name),
            from_seq,
            text_page.next_from_seq,
            text_page.head_seq,
            text_page.text,
        )
    return EncodedPage(name, body, text_page.counts.rows, text_page.gap, text_page.next_from_seq, text_page.head_seq)


class PageCache:
    """Pages that several readers share. On the event loop's thread; bounded in number and in bytes."""

    def __init__(self, bytes_max: int = CACHE_BYTES_MAX, pages_max: int = CACHE_PAGES_MAX) -> None:
        self._bytes_max, self._pages_max = bytes_max, pages_max
        self._pages: dict[PageKey, EncodedPage] = {}  # oldest first
        self._loading: dict[PageKey, asyncio.Future[EncodedPage]] = {}
        self._latest: dict[tuple[int, int, ReadOptions], EncodedPage | None] = {}  # of the running delivery
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._pages)

    def get_cached(self, topic: Topic, from_seq: int, options: ReadOptions) -> EncodedPage | None:
        """Return the page after `from_seq`, where it is cached or can be read from memory."""
        operations = topic_operations(topic)
        if not operations.is_floor_durable_for(from_seq) or not operations.is_durable_for(options.strong):
            return None
        key = _page_key(topic, from_seq, options)
        page = self._pages.get(key)
        # A reader that skips records, or their data, may need more of a segment than is known to be in memory.
        limit = options.limit if options.show.data and not options.nodes else 0
        if page is None and operations.can_read_without_blocking(
            from_seq, limit, options.bytes_max, strong=options.strong
        ):
            page = self._store(key, read_page(topic, from_seq, options))
        return page

    def get_latest(self, topic: Topic, from_seq: int, options: ReadOptions) -> EncodedPage | None:
        """`get_cached` for readers that are notified of a write. Mostly they lack that write only, which costs less to
        encode than to look up. Readers at the same position share the page until `end_delivery`: no other write is
        acknowledged between them."""
        key = (topic.id, from_seq, options)
        if key not in self._latest:
            self._latest[key] = self._read_latest(topic, from_seq, options)
            topic_operations(topic).record_access()
        return self._latest[key]

    def _read_latest(self, topic: Topic, from_seq: int, options: ReadOptions) -> EncodedPage | None:
        if options.show.data:
            page = topic_operations(topic).read_cached_json(
                from_seq, options.limit, options.bytes_max, strong=options.strong
            )
            if page is not None:
                return build_page(topic.name, from_seq, page)
        return self.get_cached(topic, from_seq, options)

    def end_delivery(self) -> None:
        """Forget the pages of `get_latest`."""
        self._latest.clear()

    async def get(self, topic: Topic, from_seq: int, options: ReadOptions, run_blocking: RunBlocking) -> EncodedPage:
        """Return the page after `from_seq`, without a wait where it is in memory."""
        if not topic_operations(topic).is_floor_durable_for(from_seq):
            await run_blocking(topic.state)
        page = self.get_cached(topic, from_seq, options)
        if page is not None:
            return page
        key = _page_key(topic, from_seq, options)
        loading = self._loading.get(key)
        if loading is None:
            loading = asyncio.ensure_future(self._load(key, topic, from_seq, options, run_blocking))
            self._loading[key] = loading
            loading.add_done_callback(lambda done: self._on_loaded(key, done))
        # Shielded: the first reader may leave while others wait for the same page.
        return await asyncio.shield(loading)

    async def _load(
        self, key: PageKey, topic: Topic, from_seq: int, options: ReadOptions, run_blocking: RunBlocking
    ) -> EncodedPage:
        page: EncodedPage = await run_blocking(lambda: read_page(topic, from_seq, options))
        return self._store(key, page)

    def _on_loaded(self, key: PageKey, done: asyncio.Future[EncodedPage]) -> None:
        del self._loading[key]
        if not done.cancelled():
            done.exception()  # retrieved, so that asyncio does not log the error of readers that have all left

    def _store(self, key: PageKey, page: EncodedPage) -> EncodedPage:
        """Cache a page. It was read after its key was built: it may be newer than the key, never older."""
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
    if topic_operations(topic).is_dropped:
        raise TopicNotFound(topic.name)
    return (version, from_seq, topic.config.dedupe_node, options)
