"""`tidelog.aio.connect` and the asyncio objects of a server: the calls of `tidelog.client`, awaited."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import wraps
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar, Unpack

import pyarrow as pa

from tidelog import frames
from tidelog.aio import follow as loops
from tidelog.aio.groups import AsyncGroupBatch, consume_group, follow_group
from tidelog.aio.lifetime import Closable, Opening
from tidelog.aio.producer import AsyncProducer
from tidelog.aio.typed import AsyncTypedTopic
from tidelog.aio.worker import AsyncWorker, async_worker_for
from tidelog.api_types import READ_LIMIT, READ_LIMIT_MAX
from tidelog.channels import OPERATOR, Channel, ChannelEvent, SubscriptionEnded
from tidelog.channels.rules import ChannelSettings
from tidelog.client.asyncio_http import AsyncClient
from tidelog.client.channel_calls import KEY_USER, ChannelCalls, ChannelUser
from tidelog.client.core import REQUEST_TIMEOUT_S, Call, ConnectionLost, ServerUnreachable
from tidelog.client.database import (
    RETRY_S,
    RemoteSegment,
    RemoteSegmentList,
    documented_by,
    ensure_queue,
    parse_channel_event,
    parse_limits,
)
from tidelog.client.database_calls import DatabaseCalls
from tidelog.client.events import ServerEvent, SseParser
from tidelog.client.group_calls import GroupCalls, list_groups
from tidelog.client.queue_calls import QueueCalls
from tidelog.client.topic_calls import RecordHead, ScanCursor, TopicCalls, new_producer_name
from tidelog.client.wire import RECORD_LIMITS
from tidelog.database import Database
from tidelog.engine import (
    SEQ_MAX,
    Appended,
    Counts,
    Gap,
    Group,
    Job,
    LatestPage,
    LatestRecord,
    Queue,
    Record,
    RecordReader,
    Topic,
)
from tidelog.engine.config import TopicFields
from tidelog.engine.group_leases import LEASE_MS_DEFAULT
from tidelog.engine.groups import GroupList
from tidelog.engine.producer_queue import LINGER_MS, MAX_BYTES, OnError, ProducerBatch
from tidelog.engine.queues.history import History
from tidelog.engine.queues.worker_options import JobFunction, WorkerOptions
from tidelog.engine.read import ExcludedNodes
from tidelog.errors import BadInput, Error
from tidelog.times import Duration, Seconds, seconds

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

_RECORD_CHUNK_BYTES: Final = 1 << 20
C = TypeVar("C")
P = ParamSpec("P")
T = TypeVar("T")


class AsyncRemoteObject(Generic[C]):
    """An object of a server: its calls, and the client that runs them."""

    _client: AsyncClient
    _calls: C

    async def _run(self, call: Call[T]) -> T:
        return await self._client.call(call)


def awaiting(
    method: Callable[Concatenate[C, P], Call[T]],
) -> Callable[Concatenate[AsyncRemoteObject[C], P], CoroutineType[Any, Any, T]]:
    """Return a coroutine method that runs this call: same arguments, same result."""

    @wraps(method)
    async def run(self: AsyncRemoteObject[C], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(method(self._calls, *args, **kwargs))

    return run  # type: ignore[return-value]  # pyright infers CoroutineType, and protocols have it


def connect(
    url: str, *, key: str | None = None, timeout_s: Seconds = REQUEST_TIMEOUT_S, retry_s: Seconds = RETRY_S
) -> Opening[AsyncRemoteDatabase]:
    """`tidelog.connect` for asyncio: `async with tidelog.aio.connect(url) as database`."""
    limit_s, retry_ms = parse_limits(timeout_s, retry_s)

    async def start() -> AsyncRemoteDatabase:
        async with AsyncClient(url, key=key, timeout_s=limit_s) as probe:
            await probe.call(DatabaseCalls().check_server())
        return AsyncRemoteDatabase(AsyncClient(url, key=key, timeout_s=limit_s, retry_ms=retry_ms))

    return Opening(start)


class AsyncRemoteChannels(AsyncRemoteObject[DatabaseCalls]):
    """All channels of a server."""

    def __init__(self, client: AsyncClient) -> None:
        self._client, self._calls = client, DatabaseCalls()

    def __repr__(self) -> str:
        return f"<async channels of {self._client.url}>"

    channel_names = awaiting(DatabaseCalls.channel_names)


@documented_by(Database)
class AsyncRemoteDatabase(AsyncRemoteObject[DatabaseCalls], Closable):
    """The topics, queues, routers and channels of a server, for the tasks of one event loop."""

    def __init__(self, client: AsyncClient) -> None:
        self._client, self._calls = client, DatabaseCalls()

    def __repr__(self) -> str:
        return f"<async database of {self._client.url}>"

    async def close(self) -> None:
        """Close the connections. The server is not affected."""
        await self._client.close()

    async def topic(self, /, name: str, *, create: bool = True, **config: Unpack[TopicFields]) -> AsyncRemoteTopic:
        if create or config:
            await self._run(TopicCalls(name).ensure(create=create, fields=dict(config)))
        return AsyncRemoteTopic(self._client, name)

    async def queue(self, /, name: str, *, create: bool = True, **config: Unpack[TopicFields]) -> AsyncRemoteQueue:
        if create or config:
            await self._run(ensure_queue(name, create, dict(config)))
        return AsyncRemoteQueue(self._client, name)

    async def configure(self, name: str, fields: Mapping[str, object]) -> tuple[AsyncRemoteTopic, bool]:
        created = await self._run(self._calls.configure(name, fields))
        return AsyncRemoteTopic(self._client, name), created

    async def find(self, name: str) -> AsyncRemoteTopic | None:
        return AsyncRemoteTopic(self._client, name) if await self._run(TopicCalls(name).exists()) else None

    names = awaiting(DatabaseCalls.names)
    topics = awaiting(DatabaseCalls.topics)
    drop = awaiting(DatabaseCalls.drop)
    gaps = awaiting(DatabaseCalls.gaps)
    router = awaiting(DatabaseCalls.router)
    find_router = awaiting(DatabaseCalls.find_router)
    routers = awaiting(DatabaseCalls.routers)
    drop_router = awaiting(DatabaseCalls.drop_router)
    health = awaiting(DatabaseCalls.health)
    corruption = awaiting(DatabaseCalls.corruption)
    checkpoint = awaiting(DatabaseCalls.checkpoint)
    rewrite = awaiting(DatabaseCalls.rewrite)
    erase = awaiting(DatabaseCalls.erase)
    erasures = awaiting(DatabaseCalls.erasures)
    verify_erasures = awaiting(DatabaseCalls.verify_erasures)
    tier_status = awaiting(DatabaseCalls.tier_status)
    segment_places = awaiting(DatabaseCalls.segment_places)
    relocate = awaiting(DatabaseCalls.relocate)
    recall = awaiting(DatabaseCalls.recall)
    claim_cold_store = awaiting(DatabaseCalls.claim_cold_store)
    backup = awaiting(DatabaseCalls.backup)

    @property
    def channels(self) -> AsyncRemoteChannels:
        """All channels."""
        return AsyncRemoteChannels(self._client)

    def channel(self, name: str, *, user: ChannelUser = OPERATOR, token: str | None = None) -> AsyncRemoteChannel:
        return AsyncRemoteChannel(self._client, name, user, token)


def _refuse_blocking_open(seq: int) -> RecordReader:
    raise BadInput(f"this would block the event loop; nothing was read, use `await topic.open_record({seq})`")


def _refuse_blocking_fetch(base: int, *_: object) -> bytes | None:
    raise BadInput(f"this would block the event loop; nothing was read, read segment {base} with tidelog.connect")


@documented_by(Topic)
class AsyncRemoteTopic(AsyncRemoteObject[TopicCalls]):
    """A topic of a server. A missing topic raises TopicNotFound at the first request."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self._client, self._calls = client, TopicCalls(name, _refuse_blocking_open)

    def __repr__(self) -> str:
        return f"<async topic {self.name!r} of {self._client.url}>"

    @property
    def name(self) -> str:
        """Its name."""
        return self._calls.name

    state = awaiting(TopicCalls.state)
    append = awaiting(TopicCalls.append)
    append_stream = awaiting(TopicCalls.append_stream)
    append_arrow = awaiting(TopicCalls.append_arrow)

    async def append_pandas(self, frame: pd.DataFrame, *, key: str | None = None) -> Appended:
        return await self.append_arrow(await asyncio.to_thread(frames.from_pandas, frame), key=key)

    async def append_polars(self, frame: pl.DataFrame, *, key: str | None = None) -> Appended:
        return await self.append_arrow(await asyncio.to_thread(frames.from_polars, frame), key=key)

    append_numbered = awaiting(TopicCalls.append_numbered)

    def producer(
        self, *, linger_ms: float = LINGER_MS, max_bytes: int = MAX_BYTES, on_error: OnError | None = None
    ) -> AsyncProducer:
        producer = new_producer_name()

        async def write(batch: ProducerBatch) -> Appended:
            return await self._run(self._calls.append_batch(batch, producer))

        async def check() -> None:
            await self._run(self._calls.check_producer(self._client.repeats_for_ms))

        return AsyncProducer(
            self.name, write, check, RECORD_LIMITS, linger_ms=linger_ms, max_bytes=max_bytes, on_error=on_error
        )

    producer_batches = awaiting(TopicCalls.producer_batches)
    delete = awaiting(TopicCalls.delete)
    compact = awaiting(TopicCalls.compact)
    seal = awaiting(TopicCalls.seal)
    rewrite = awaiting(TopicCalls.rewrite)
    erase = awaiting(TopicCalls.erase)
    redrive = awaiting(TopicCalls.redrive)
    simulate_retention = awaiting(TopicCalls.simulate_retention)
    read = awaiting(TopicCalls.read)
    to_arrow = awaiting(TopicCalls.to_arrow)
    to_pandas = frames.PANDAS.awaiting(to_arrow)
    to_polars = frames.POLARS.awaiting(to_arrow)
    to_dicts = frames.DICTS.awaiting(to_arrow)
    seek = awaiting(TopicCalls.seek)
    gaps = awaiting(TopicCalls.gaps)

    follow = loops.follow
    follow_arrow = loops.follow_arrow

    def __aiter__(self) -> AsyncIterator[Record | Gap]:
        """Yield all records that exist now."""
        return self.follow(timeout=0.0, on_gap="skip")

    def scan(
        self,
        from_seq: int = 0,
        to_seq: int | None = None,
        *,
        nodes: ExcludedNodes = frozenset(),
        limit: int = SEQ_MAX,
        strong: bool = False,
        columns: Sequence[str] | None = None,
    ) -> AsyncRemoteScan:
        return AsyncRemoteScan(self._client, self._calls, ScanCursor(from_seq, to_seq, nodes, limit, strong, columns))

    async def open_record(self, seq: int, *, strong: bool = False) -> AsyncRemoteRecord:
        """Open the data of one record: `read`, `seek`, `position`; `async with` closes it."""
        return AsyncRemoteRecord(
            self._client, self._calls, seq, await self._run(self._calls.record_head(seq, strong=strong))
        )

    def latest(self, *, prefix: str = "") -> AsyncRemoteLatestTable:
        """The topic as a table: the newest record of each key that begins with `prefix`."""
        return AsyncRemoteLatestTable(self._client, self._calls, prefix)

    async def segments(self, *, strong: bool = False) -> RemoteSegmentList:
        return RemoteSegmentList.parse(
            await self._run(self._calls.list_segments(strong=strong)), _refuse_blocking_fetch
        )

    async def segment(self, base: int, generation: int | None = None) -> RemoteSegment | None:
        return (await self.segments()).find(base, generation)

    def typed(self, kind: type[T]) -> AsyncTypedTopic[T]:
        return AsyncTypedTopic(self, kind)

    async def queue(self) -> AsyncRemoteQueue:
        await self._run(self._calls.check_queue())
        return AsyncRemoteQueue(self._client, self.name)

    def group(self, name: str) -> AsyncRemoteGroup:
        return AsyncRemoteGroup(self._client, self.name, name)

    async def groups(self) -> GroupList[AsyncRemoteGroup]:
        states = await self._run(list_groups(self._calls))
        return GroupList([self.group(state.group) for state in states], states)


class AsyncRemoteScan:
    """A bulk read of a topic of a server, page by page. Gap and counts are complete when it ends."""

    def __init__(self, client: AsyncClient, calls: TopicCalls, cursor: ScanCursor) -> None:
        self._client, self._calls, self._cursor = client, calls, cursor

    def __repr__(self) -> str:
        return f"<async scan of topic {self._calls.name!r}, after {self.next_from_seq}>"

    @property
    def gaps(self) -> list[Gap]:
        """Every gap among the seqs passed so far."""
        return self._cursor.gaps

    @property
    def counts(self) -> Counts:
        return self._cursor.counts

    @property
    def next_from_seq(self) -> int:
        return self._cursor.next_from_seq

    @property
    def gap(self) -> Gap | None:
        """The first of `gaps`."""
        return self._cursor.gap

    @property
    def head_seq(self) -> int:
        return self._cursor.head_seq

    @property
    def earliest_seq(self) -> int:
        return self._cursor.earliest_seq

    async def iter_arrow_batches(self) -> AsyncIterator[pa.RecordBatch]:
        while not self._cursor.is_done:
            for batch in await self._client.call(self._calls.scan_page(self._cursor)):
                yield batch


class AsyncRemoteRecord(Closable):
    """The data of one record of a server as a file."""

    def __init__(self, client: AsyncClient, calls: TopicCalls, seq: int, head: RecordHead) -> None:
        self._client, self._calls, self._seq, self._head = client, calls, seq, head
        self._pos = 0
        self.xxh3 = head.xxh3

    def __repr__(self) -> str:
        return f"<async record {self._seq} of topic {self._calls.name!r}>"

    def __len__(self) -> int:
        return self._head.size

    async def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes from here; all of them where it is negative."""
        stop = self._head.size if size < 0 else min(self._pos + size, self._head.size)
        pieces = []
        while self._pos < stop:
            first, last = self._pos, min(self._pos + _RECORD_CHUNK_BYTES, stop)
            pieces.append(await self._client.call(self._calls.record_range(self._seq, self._head, first, last)))
            self._pos = last
        return b"".join(pieces)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Continue at this position."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._pos, io.SEEK_END: self._head.size}.get(whence)
        if start is None or start + offset < 0:
            raise BadInput(f"there is no position {offset} with whence {whence!r:.20}; nothing was read")
        self._pos = start + offset
        return self._pos

    @property
    def position(self) -> int:
        """The next byte to read."""
        return self._pos

    async def close(self) -> None:
        """Nothing is held open."""


class AsyncRemoteLatestTable:
    """The newest record of each key of a topic of a server."""

    def __init__(self, client: AsyncClient, calls: TopicCalls, prefix: str) -> None:
        self._client, self._calls, self._prefix = client, calls, prefix

    def __repr__(self) -> str:
        return f"<async latest records of {self._calls.name!r}>"

    async def get(self, key: str) -> Record | None:
        """Return the newest record of a key; None if the key is not in the table."""
        return await self._client.call(self._calls.latest_record(key, self._prefix))

    async def page(self, limit: int = READ_LIMIT, after: str | None = None) -> LatestPage:
        """Return at most `limit` keys with their newest records, after the page whose `next_after` is given."""
        return await self._client.call(self._calls.latest_page(self._prefix, limit, after))

    async def __aiter__(self) -> AsyncIterator[LatestRecord]:
        """Yield every key and its newest record."""
        after: str | None = None
        while True:
            page = await self.page(READ_LIMIT_MAX, after)
            for row in page.records:
                yield row
            after = page.next_after
            if after is None:
                return

    async def to_arrow(self) -> pa.Table:
        """Return the table: the columns of `Topic.to_arrow` after a column `key`, ordered by seq."""
        return await self._client.call(self._calls.latest_table(self._prefix))

    to_pandas = frames.PANDAS.awaiting(to_arrow)
    to_polars = frames.POLARS.awaiting(to_arrow)
    to_dicts = frames.DICTS.awaiting(to_arrow)


@documented_by(Group)
class AsyncRemoteGroup(AsyncRemoteObject[GroupCalls]):
    """A consumer group of a topic of a server."""

    def __init__(self, client: AsyncClient, topic: str, name: str) -> None:
        self._client, self._calls = client, GroupCalls(topic, name, _refuse_blocking_open)

    def __repr__(self) -> str:
        return f"<async group {self.name!r} of {self.topic!r} of {self._client.url}>"

    @property
    def name(self) -> str:
        """Its name."""
        return self._calls.name

    @property
    def topic(self) -> str:
        """The name of its topic."""
        return self._calls.topic

    exists = awaiting(GroupCalls.exists)
    state = awaiting(GroupCalls.state)
    lag = awaiting(GroupCalls.lag)
    fetch = awaiting(GroupCalls.fetch)
    commit = awaiting(GroupCalls.commit)
    would_commit = awaiting(GroupCalls.would_commit)
    reset = awaiting(GroupCalls.reset)
    preview = awaiting(GroupCalls.preview)
    hold = awaiting(GroupCalls.hold)
    begin = awaiting(GroupCalls.begin)
    delete = awaiting(GroupCalls.delete)
    ack = awaiting(GroupCalls.ack)
    release = awaiting(GroupCalls.release)
    extend = awaiting(GroupCalls.extend)
    leave = awaiting(GroupCalls.leave)
    consumers = awaiting(GroupCalls.consumers)

    follow = follow_group
    consume = consume_group

    async def claim(
        self, consumer: str, limit: int = 256, *, lease_ms: Duration = LEASE_MS_DEFAULT, timeout: Seconds | None = 0.0
    ) -> AsyncGroupBatch | None:
        claimed = await self._run(self._calls.claim(consumer, limit, lease_ms, timeout))
        if claimed is None:
            return None
        lease_id, first_seq, page = claimed
        seqs = {"first_seq": first_seq, "last_seq": page.next_from_seq}
        return AsyncGroupBatch(self, lease_id, consumer, page.records, page.gap, **seqs)


@documented_by(Queue)
class AsyncRemoteQueue(AsyncRemoteObject[QueueCalls]):
    """A queue of a server. A missing queue raises TopicNotFound at the first request."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self.topic = AsyncRemoteTopic(client, name)
        self._client, self._calls = client, QueueCalls(name, _refuse_blocking_open)

    def __repr__(self) -> str:
        return f"<async queue {self.name!r} of {self._client.url}>"

    @property
    def name(self) -> str:
        """Its name."""
        return self._calls.name

    put = awaiting(QueueCalls.put)
    claim = awaiting(QueueCalls.claim)
    ack = awaiting(QueueCalls.ack)
    nack = awaiting(QueueCalls.nack)
    reject = awaiting(QueueCalls.reject)
    extend = awaiting(QueueCalls.extend)
    counts = awaiting(QueueCalls.counts)
    redrive = awaiting(QueueCalls.redrive)

    def worker(self, **options: Unpack[WorkerOptions]) -> Callable[[JobFunction], AsyncWorker]:
        return async_worker_for(self, **options)

    async def lease_ms(self) -> int:
        """Return how long a claim holds a job, unless it says otherwise."""
        return (await self.topic.state()).config.lease_ms

    async def jobs(
        self, node: str, most: int = 1, lease_ms: Duration | None = None, timeout: Seconds | None = None
    ) -> AsyncIterator[Job]:
        """Yield jobs without end, or until none arrived for `timeout` seconds; at most `most` of them unsettled at a
        time. Jobs that are unsettled when the iterator is closed are claimable again at once."""
        query, path = self._calls.work_query(node, most, lease_ms), self._calls.work_path()
        cursor = self._calls.follow_jobs(timeout, self._client.core.errors.lost)
        while True:
            try:
                async with AsyncEvents(self._client, path, query) as events:
                    while (event := await events.next(cursor.wait_s)) is not None:
                        job = cursor.accept(event)
                        if job is not None:
                            yield job
                    return
            except ServerUnreachable as error:
                cursor.on_lost(error)
            await self.counts()  # a request that is repeated until the server is back

    def history(self) -> AsyncRemoteHistory:
        return AsyncRemoteHistory(self._client, self._calls)


@documented_by(History)
class AsyncRemoteHistory(AsyncRemoteObject[QueueCalls]):
    """The kept events of the jobs of a queue of a server, oldest first."""

    def __init__(self, client: AsyncClient, calls: QueueCalls) -> None:
        self._client, self._calls = client, calls

    def __repr__(self) -> str:
        return f"<async history of queue {self._calls.name!r}>"

    read = awaiting(QueueCalls.read_history)
    to_arrow = awaiting(QueueCalls.history_table)
    to_pandas = frames.PANDAS.awaiting(to_arrow)
    to_polars = frames.POLARS.awaiting(to_arrow)
    to_dicts = frames.DICTS.awaiting(to_arrow)


@documented_by(Channel)
class AsyncRemoteChannel(AsyncRemoteObject[ChannelCalls]):
    """One channel of a server as one user sees it."""

    def __init__(self, client: AsyncClient, name: str, user: ChannelUser = KEY_USER, token: str | None = None) -> None:
        self._client, self._calls = client, ChannelCalls(name, user, token)

    def __repr__(self) -> str:
        return f"<async channel {self.name!r} of {self._client.url}, user {self._calls.user!r}>"

    @property
    def name(self) -> str:
        """Its name."""
        return self._calls.name

    async def join(self, /, **config: Unpack[ChannelSettings]) -> Self:
        await self._run(self._calls.join(**config))
        return self

    leave = awaiting(ChannelCalls.leave)
    invite = awaiting(ChannelCalls.invite)
    kick = awaiting(ChannelCalls.kick)
    members = awaiting(ChannelCalls.members)
    state = awaiting(ChannelCalls.state)
    configure = awaiting(ChannelCalls.configure)
    acl = awaiting(ChannelCalls.acl)
    allow = awaiting(ChannelCalls.allow)
    disallow = awaiting(ChannelCalls.disallow)
    change_acl = awaiting(ChannelCalls.change_acl)
    delete = awaiting(ChannelCalls.delete)
    publish = awaiting(ChannelCalls.publish)
    publish_many = awaiting(ChannelCalls.publish_many)
    history = awaiting(ChannelCalls.history)
    bounds = awaiting(ChannelCalls.bounds)
    holes = awaiting(ChannelCalls.holes)
    push = awaiting(ChannelCalls.push)
    pop = awaiting(ChannelCalls.pop)
    clear = awaiting(ChannelCalls.clear)
    length = awaiting(ChannelCalls.length)

    async def subscribe(self) -> AsyncRemoteSubscription:
        """Receive messages and presence events from now on; members only."""
        events = AsyncEvents(self._client, self._calls.path("/events"), {})
        await events.__aenter__()
        try:
            subscription = AsyncRemoteSubscription(self.name, events)
            first = await events.next(None)
            assert first is not None, "without a timeout there is an event"
            subscription.accept(first)
            return subscription
        except BaseException:
            await events.close()
            raise


class AsyncRemoteSubscription(Closable):
    """The events of one channel of a server: iterate over it, or `wait`."""

    def __init__(self, channel: str, events: AsyncEvents) -> None:
        self.channel, self.closed = channel, False
        self._events = events
        self._ready: list[ChannelEvent] = []

    def __repr__(self) -> str:
        return f"<subscription of channel {self.channel!r}{', closed' if self.closed else ''}>"

    def accept(self, event: ServerEvent) -> None:
        """Keep an event of the stream for the next `wait`."""
        parsed = parse_channel_event(event)
        if parsed is not None:
            self._ready.append(parsed)
        if isinstance(parsed, SubscriptionEnded):
            self.closed = True

    async def wait(self, timeout: Seconds | None = None) -> list[ChannelEvent]:
        """Wait for events and return them; return an empty list after `timeout` seconds, or at once after the end."""
        while not self._ready and not self.closed:
            event = await self._events.next(timeout)
            if event is None:
                return []
            self.accept(event)
        taken, self._ready = self._ready, []
        return taken

    async def close(self) -> None:
        """End the subscription. The membership stays."""
        self.closed = True
        await self._events.close()

    async def __aiter__(self) -> AsyncIterator[ChannelEvent]:
        """Yield events until the subscription ends."""
        while events := await self.wait():
            for event in events:
                yield event


class AsyncEvents:
    """The events of one response."""

    def __init__(self, client: AsyncClient, path: str, query: Mapping[str, object]) -> None:
        self._client, self._path, self._query = client, path, query
        self._stack = AsyncExitStack()
        self._parser = SseParser()
        self._ready: list[ServerEvent] = []
        self._reading: asyncio.Task[bytes] | None = None

    async def __aenter__(self) -> Self:
        headers = {"Accept": "text/event-stream"}
        exchange = self._client.stream(self._path, query=self._query, headers=headers)
        self._connection = await self._stack.enter_async_context(exchange)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def next(self, timeout: Seconds | None) -> ServerEvent | None:
        """Return the next event; None where none came in time. Raises ServerUnreachable once the stream has ended."""
        loop = asyncio.get_running_loop()
        limit_s = seconds("timeout", timeout)
        until = None if limit_s is None else loop.time() + limit_s
        while not self._ready:
            # The read goes on over a timeout: a piece that arrives at that moment is not lost.
            if self._reading is None:
                self._reading = asyncio.ensure_future(self._connection.read_piece())
            left = None if until is None else max(until - loop.time(), 0)
            done, _ = await asyncio.wait({self._reading}, timeout=left)
            if not done:
                return None
            reading, self._reading = self._reading, None
            try:
                piece = reading.result()
            except ConnectionLost as error:
                raise self._client.core.errors.lost(str(error)) from None
            if not piece:
                raise self._client.core.errors.lost("the server ended the stream")
            self._ready = self._parser.feed(piece)
        return self._ready.pop(0)

    async def close(self) -> None:
        """End the stream: the server releases what it leased to it."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        with suppress(Error):
            await self._stack.aclose()
