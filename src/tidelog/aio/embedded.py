"""`tidelog.aio.open` and the asyncio objects of a directory: the blocking objects, called on a few threads.

Waiting takes no thread: a read that waits, a follower and a worker are woken by a listener of the topic. An append
waits for its commit on the event loop, so appends of many tasks share a sync.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from os import PathLike
from types import CoroutineType
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar, Unpack

import pyarrow as pa

from tidelog import database as embedded
from tidelog import frames
from tidelog.addresses import path_text
from tidelog.aio import follow as loops
from tidelog.aio.groups import AsyncGroupBatch, consume_group, follow_group
from tidelog.aio.lifetime import Closable, Opening
from tidelog.aio.producer import AsyncProducer
from tidelog.aio.threads import THREADS, Threads
from tidelog.aio.typed import AsyncTypedTopic
from tidelog.aio.waiting import Deadline, Wakeups
from tidelog.aio.worker import AsyncWorker, async_worker_for
from tidelog.channels import OPERATOR, Channel, ChannelEvent, ChannelManager, Subscription
from tidelog.channels.rules import ChannelSettings, User
from tidelog.client.database import documented_by
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
    LatestTable,
    Page,
    Queue,
    Record,
    RecordReader,
    Topic,
)
from tidelog.engine.batch_encoder import check_int
from tidelog.engine.config import TopicFields
from tidelog.engine.group_leases import LEASE_MS_DEFAULT
from tidelog.engine.groups import GroupList, leases_of
from tidelog.engine.producer_queue import LINGER_MS, MAX_BYTES, OnError, ProducerBatch
from tidelog.engine.queues.history import History
from tidelog.engine.queues.queue import operations_of
from tidelog.engine.queues.worker_options import JobFunction, WorkerOptions
from tidelog.engine.read import READER_POLL_S, ExcludedNodes
from tidelog.engine.tables import Scan
from tidelog.engine.topic import topic_operations
from tidelog.errors import Error, StreamBroken
from tidelog.times import Duration, Seconds, seconds
from tidelog.types import Buffer

_LATEST_PAGE_KEYS: Final = 256
S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")


class AsyncObject(Generic[S]):
    """A blocking object and the threads that call it."""

    _threads: Threads
    _target: S


def reading(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[AsyncObject[S], P], CoroutineType[Any, Any, T]]:
    """Return a coroutine method that runs this one in a thread: same arguments, same result."""

    @wraps(method)
    async def run(self: AsyncObject[S], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._threads.read(method, self._target, *args, **kwargs)

    return run  # type: ignore[return-value]  # pyright infers CoroutineType, and protocols have it


def writing(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[AsyncObject[S], P], CoroutineType[Any, Any, T]]:
    """`reading` for a method that changes something: a cancelled call is finished first."""

    @wraps(method)
    async def run(self: AsyncObject[S], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._threads.write(method, self._target, *args, **kwargs)

    return run  # type: ignore[return-value]  # pyright infers CoroutineType, and protocols have it


def open(path: str | PathLike[str], *, workers: int = THREADS, **settings: Any) -> Opening[AsyncDatabase]:
    """`tidelog.open` for asyncio: `async with tidelog.aio.open("data") as database`.

    Args:
        workers: how many calls run at the same time.
        settings: the arguments of `tidelog.open`.
    """
    check_int("workers", workers, 1, 1_000)
    name = path_text(path, "the directory to open")

    async def start() -> AsyncDatabase:
        threads = Threads(name, workers)
        try:
            return AsyncDatabase(await threads.write(embedded.open, path, **settings), threads)
        except asyncio.CancelledError as cancelled:
            opened = getattr(cancelled.__cause__, "result", None)
            if isinstance(opened, Database):  # it had begun: no caller has it to close
                await asyncio.shield(threads.write(opened.close))
            raise
        except BaseException:
            await threads.stop()
            raise

    return Opening(start)


class AsyncChannels(AsyncObject[ChannelManager]):
    """All channels of a directory."""

    def __init__(self, database: Database, threads: Threads) -> None:
        self._database, self._threads = database, threads

    def __repr__(self) -> str:
        return "<async channels>"

    async def channel_names(self) -> list[str]:
        return await self._threads.read(lambda: self._database.channels.channel_names())


@documented_by(Database)
class AsyncDatabase(AsyncObject[Database], Closable):
    """Topics, queues, routers and channels of one directory, for the tasks of an event loop."""

    def __init__(self, database: Database, threads: Threads) -> None:
        self._target, self._threads = database, threads

    def __repr__(self) -> str:
        return f"<async {self._target!r}>"

    async def close(self) -> None:
        await self._threads.write(self._target.close)
        await self._threads.stop()

    async def topic(self, /, name: str, *, create: bool = True, **config: Unpack[TopicFields]) -> AsyncTopic:
        topic = await self._threads.write(lambda: self._target.topic(name, create=create, **config))
        return AsyncTopic(topic, self._threads)

    async def queue(self, /, name: str, *, create: bool = True, **config: Unpack[TopicFields]) -> AsyncQueue:
        queue = await self._threads.write(lambda: self._target.queue(name, create=create, **config))
        return AsyncQueue(queue, self._threads)

    async def configure(self, name: str, fields: Mapping[str, object]) -> tuple[AsyncTopic, bool]:
        topic, created = await self._threads.write(self._target.configure, name, fields)
        return AsyncTopic(topic, self._threads), created

    async def find(self, name: str) -> AsyncTopic | None:
        topic = await self._threads.read(self._target.find, name)
        return None if topic is None else AsyncTopic(topic, self._threads)

    names = reading(Database.names)
    topics = reading(Database.topics)
    drop = writing(Database.drop)
    gaps = reading(Database.gaps)
    router = writing(Database.router)
    find_router = reading(Database.find_router)
    routers = reading(Database.routers)
    drop_router = writing(Database.drop_router)
    health = reading(Database.health)
    corruption = reading(Database.corruption)
    checkpoint = writing(Database.checkpoint)
    rewrite = writing(Database.rewrite)
    erase = writing(Database.erase)
    erasures = reading(Database.erasures)
    verify_erasures = reading(Database.verify_erasures)
    tier_status = reading(Database.tier_status)
    segment_places = reading(Database.segment_places)
    relocate = writing(Database.relocate)
    recall = writing(Database.recall)
    claim_cold_store = writing(Database.claim_cold_store)
    backup = writing(Database.backup)
    refresh = writing(Database.refresh)

    @property
    def channels(self) -> AsyncChannels:
        """All channels."""
        return AsyncChannels(self._target, self._threads)

    def channel(self, name: str, *, user: User = OPERATOR, token: str | None = None) -> AsyncChannel:
        return AsyncChannel(lambda: self._target.channel(name, user=user, token=token), name, self._threads)


@documented_by(Topic)
class AsyncTopic(AsyncObject[Topic]):
    """A durable, numbered sequence of records. `AsyncDatabase.topic` returns one."""

    def __init__(self, topic: Topic, threads: Threads) -> None:
        self._target, self._threads = topic, threads

    def __repr__(self) -> str:
        return f"<async {self._target!r}>"

    @property
    def name(self) -> str:
        """Its name."""
        return self._target.name

    state = reading(Topic.state)
    append_arrow = writing(Topic.append_arrow)
    append_pandas = writing(Topic.append_pandas)
    append_polars = writing(Topic.append_polars)
    append_numbered = writing(Topic.append_numbered)
    producer_batches = reading(Topic.producer_batches)

    def producer(
        self, *, linger_ms: float = LINGER_MS, max_bytes: int = MAX_BYTES, on_error: OnError | None = None
    ) -> AsyncProducer:
        operations = topic_operations(self._target)

        async def write(batch: ProducerBatch) -> Appended:
            return await self._threads.commit(lambda: operations.submit(batch.encode()))

        async def check() -> None:
            await self._threads.read(operations.check_writable)

        return AsyncProducer(
            self.name, write, check, operations.limits, linger_ms=linger_ms, max_bytes=max_bytes, on_error=on_error
        )

    delete = writing(Topic.delete)
    compact = writing(Topic.compact)
    seal = writing(Topic.seal)
    rewrite = writing(Topic.rewrite)
    erase = writing(Topic.erase)
    redrive = writing(Topic.redrive)
    simulate_retention = reading(Topic.simulate_retention)
    to_arrow = reading(Topic.to_arrow)
    to_pandas = frames.PANDAS.awaiting(to_arrow)
    to_polars = frames.POLARS.awaiting(to_arrow)
    to_dicts = frames.DICTS.awaiting(to_arrow)
    seek = reading(Topic.seek)
    gaps = reading(Topic.gaps)
    segments = reading(Topic.segments)
    segment = reading(Topic.segment)

    async def append(
        self,
        records: object,
        *,
        tag: str | Sequence[str | None] | None = None,
        node: str | Sequence[str | None] | None = None,
        meta: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        key: str | None = None,
    ) -> Appended:
        submit = partial(self._target.append_nowait, records, tag=tag, node=node, meta=meta, key=key)
        return await self._threads.commit(submit)

    async def append_stream(
        self,
        chunks: Iterable[Buffer] | AsyncIterable[Buffer],
        *,
        tag: str | None = None,
        node: str | None = None,
        meta: dict[str, Any] | None = None,
        key: str | None = None,
    ) -> Appended:
        if not isinstance(chunks, AsyncIterable):
            call = partial(self._target.append_stream, chunks, tag=tag, node=node, meta=meta, key=key)
            return await self._threads.write(call)
        begin = partial(topic_operations(self._target).begin_stream, tag=tag, node=node, meta=meta, key=key)
        stream = await self._threads.write(begin)
        try:
            try:
                async for chunk in chunks:
                    await self._threads.write(stream.write, chunk)
            except (Error, asyncio.CancelledError):
                raise
            except Exception as error:
                raise StreamBroken(
                    f"{self.name}: the stream broke off ({error!r:.200}); it was rolled back and nothing was written"
                ) from error
            return await self._threads.commit(stream.submit)
        finally:
            await asyncio.shield(self._threads.write(stream.roll_back))

    async def read(
        self,
        from_seq: int = 0,
        limit: int = 256,
        *,
        node: str | Sequence[str] | None = None,
        bytes_max: int = 1 << 20,
        timeout: Seconds | None = 0.0,
        strong: bool = False,
    ) -> Page:
        timeout = seconds("timeout", timeout)
        call = partial(self._target.read, from_seq, limit, node=node, bytes_max=bytes_max, strong=strong)
        if timeout is not None and timeout <= 0:
            return await self._threads.read(call)
        return await wait_for_page(self._target, self._threads, call, from_seq, timeout)

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
    ) -> AsyncScan:
        start = partial(self._target.scan, from_seq, to_seq, nodes=nodes, limit=limit, strong=strong, columns=columns)
        return AsyncScan(start, self._threads, from_seq)

    async def open_record(self, seq: int, *, strong: bool = False) -> AsyncRecord:
        """Open the data of one record: `read`, `seek`, `position`; `async with` closes it."""
        return AsyncRecord(
            await self._threads.read(partial(self._target.open_record, seq, strong=strong)), self._threads
        )

    def latest(self, *, prefix: str = "") -> AsyncLatestTable:
        """The topic as a table: the newest record of each key that begins with `prefix`."""
        return AsyncLatestTable(partial(self._target.latest, prefix=prefix), self._threads)

    def typed(self, kind: type[T]) -> AsyncTypedTopic[T]:
        return AsyncTypedTopic(self, kind)

    async def queue(self) -> AsyncQueue:
        return AsyncQueue(await self._threads.read(self._target.queue), self._threads)

    def group(self, name: str) -> AsyncGroup:
        return AsyncGroup(self._target.group(name), self._target, self._threads)

    async def groups(self) -> GroupList[AsyncGroup]:
        found = await self._threads.read(self._target.groups)
        return GroupList([AsyncGroup(group, self._target, self._threads) for group in found], found.states)


async def wait_for_page(
    topic: Topic, threads: Threads, call: Callable[..., Page], from_seq: int, timeout: Seconds | None
) -> Page:
    """Read a page; while there is nothing, wait for a write without a thread. A database that is opened read-only
    beside a writer has no listeners: it looks again every `READER_POLL_S`, in a thread."""
    deadline = Deadline(timeout)
    with Wakeups(topic) as wakeups:  # before the first read: a record between read and wait must not be missed
        while True:
            wakeups.clear()
            page = await threads.read(call)
            is_news = page.records or page.gap or not page.caught_up or page.next_from_seq > from_seq
            if is_news or deadline.is_over:
                return page
            if topic_operations(topic).is_read_only:
                page = await threads.read(partial(call, timeout=deadline.left(READER_POLL_S)))
                if page.records or page.gap or deadline.is_over:
                    return page
            else:
                await wakeups.wait(deadline.left())


class AsyncScan:
    """A bulk read of a topic. Gaps and counts are complete when it ends."""

    def __init__(self, start: Callable[[], Scan], threads: Threads, from_seq: int) -> None:
        self._start, self._threads, self._from_seq = start, threads, from_seq
        self._scan: Scan | None = None

    def __repr__(self) -> str:
        return f"<async scan, after {self.next_from_seq}>"

    @property
    def gaps(self) -> list[Gap]:
        """Every gap among the seqs passed so far."""
        return [] if self._scan is None else self._scan.gaps

    @property
    def counts(self) -> Counts:
        return Counts() if self._scan is None else self._scan.counts

    @property
    def next_from_seq(self) -> int:
        return self._from_seq if self._scan is None else self._scan.next_from_seq

    @property
    def gap(self) -> Gap | None:
        """The first of `gaps`."""
        return None if self._scan is None else self._scan.gap

    @property
    def head_seq(self) -> int:
        return 0 if self._scan is None else self._scan.head_seq

    @property
    def earliest_seq(self) -> int:
        return 0 if self._scan is None else self._scan.earliest_seq

    async def iter_arrow_batches(self) -> AsyncIterator[pa.RecordBatch]:
        self._scan = await self._threads.read(self._start)
        batches = self._scan.iter_arrow_batches()
        while (batch := await self._threads.read(next, batches, None)) is not None:
            yield batch


class AsyncRecord(Closable):
    """The data of one record as a file."""

    def __init__(self, reader: RecordReader, threads: Threads) -> None:
        self._reader, self._threads, self.xxh3 = reader, threads, reader.xxh3

    def __repr__(self) -> str:
        return f"<async record of {len(self)} bytes>"

    def __len__(self) -> int:
        return len(self._reader)

    async def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes from here; all of them where it is negative."""
        return await self._threads.read(self._reader.read, size) or b""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Continue at this position."""
        return self._reader.seek(offset, whence)

    @property
    def position(self) -> int:
        """The next byte to read."""
        return self._reader.seek(0, io.SEEK_CUR)

    async def close(self) -> None:
        await self._threads.read(self._reader.close)


class AsyncLatestTable:
    """The newest record of each key."""

    def __init__(self, table: Callable[[], LatestTable], threads: Threads) -> None:
        self._table, self._threads = table, threads

    def __repr__(self) -> str:
        return f"<async {self._table()!r}>"

    async def get(self, key: str) -> Record | None:
        """Return the newest record of a key; None if the key is not in the table."""
        return await self._threads.read(lambda: self._table().get(key))

    async def page(self, limit: int = _LATEST_PAGE_KEYS, after: str | None = None) -> LatestPage:
        """Return at most `limit` keys with their newest records, after the page whose `next_after` is given."""
        return await self._threads.read(lambda: self._table().page(limit, after))

    async def __aiter__(self) -> AsyncIterator[LatestRecord]:
        """Yield every key and its newest record."""
        after: str | None = None
        while True:
            page = await self.page(after=after)
            for row in page.records:
                yield row
            after = page.next_after
            if after is None:
                return

    async def to_arrow(self) -> pa.Table:
        """Return the table: the columns of `Topic.to_arrow` after a column `key`, ordered by seq."""
        return await self._threads.read(lambda: self._table().to_arrow())

    to_pandas = frames.PANDAS.awaiting(to_arrow)
    to_polars = frames.POLARS.awaiting(to_arrow)
    to_dicts = frames.DICTS.awaiting(to_arrow)


@documented_by(Group)
class AsyncGroup(AsyncObject[Group]):
    """A consumer group of one topic."""

    def __init__(self, group: Group, topic: Topic, threads: Threads) -> None:
        self._target, self._topic, self._threads = group, topic, threads

    def __repr__(self) -> str:
        return f"<async group {self.name!r} of {self.topic!r}>"

    @property
    def name(self) -> str:
        """Its name."""
        return self._target.name

    @property
    def topic(self) -> str:
        """The name of its topic."""
        return self._target.topic

    async def exists(self) -> bool:
        """Whether it was created."""
        return await self._threads.read(lambda: self._target.exists)

    state = reading(Group.state)
    lag = reading(Group.lag)
    commit = writing(Group.commit)
    would_commit = reading(Group.would_commit)
    reset = writing(Group.reset)
    preview = reading(Group.preview)
    hold = writing(Group.hold)
    begin = writing(Group.begin)
    delete = writing(Group.delete)
    ack = writing(Group.ack)
    release = writing(Group.release)
    extend = writing(Group.extend)
    leave = writing(Group.leave)
    consumers = reading(Group.consumers)

    follow = follow_group
    consume = consume_group

    async def claim(
        self, consumer: str, limit: int = 256, *, lease_ms: Duration = LEASE_MS_DEFAULT, timeout: Seconds | None = 0.0
    ) -> AsyncGroupBatch | None:
        def claim() -> AsyncGroupBatch | None:
            found = self._target.claim(consumer, limit, lease_ms=lease_ms)
            if found is None:
                return None
            seqs = {"first_seq": found.first_seq, "last_seq": found.last_seq}
            return AsyncGroupBatch(self, found.lease_id, consumer, found.records, found.gap, **seqs)

        leases, deadline = await self._threads.read(leases_of, self._target), Deadline(timeout)
        with Wakeups(self._topic, leases) as wakeups:  # before the first claim
            while True:
                wakeups.clear()
                batch = await self._threads.write(claim)
                if batch is not None or deadline.is_over:
                    return batch
                await wakeups.wait(deadline.left(leases.seconds_to_next_deadline()))

    async def fetch(self, limit: int = 256, timeout: Seconds | None = 0.0, node: str | list[str] | None = None) -> Page:
        timeout = seconds("timeout", timeout)
        call = partial(self._target.fetch, limit, node=node)
        if timeout is not None and timeout <= 0:
            return await self._threads.read(call)
        position = await self._threads.read(lambda: self._target.position)
        return await wait_for_page(self._topic, self._threads, call, position, timeout)


@documented_by(Queue)
class AsyncQueue(AsyncObject[Queue]):
    """Jobs of a topic, claimed under leases. `AsyncDatabase.queue` returns one."""

    def __init__(self, queue: Queue, threads: Threads) -> None:
        self._target, self._threads = queue, threads
        self.topic = AsyncTopic(queue.topic, threads)

    def __repr__(self) -> str:
        return f"<async {self._target!r}>"

    @property
    def name(self) -> str:
        return self._target.name

    put = writing(Queue.put)
    claim = writing(Queue.claim)
    ack = writing(Queue.ack)
    nack = writing(Queue.nack)
    reject = writing(Queue.reject)
    extend = writing(Queue.extend)
    counts = reading(Queue.counts)
    redrive = writing(Queue.redrive)

    def worker(self, **options: Unpack[WorkerOptions]) -> Callable[[JobFunction], AsyncWorker]:
        return async_worker_for(self, self._target, **options)

    async def lease_ms(self) -> int:
        """Return how long a claim holds a job, unless it says otherwise."""
        return await self._threads.read(lambda: self._target.lease_ms)

    async def jobs(
        self, node: str, most: int = 1, lease_ms: Duration | None = None, timeout: Seconds | None = None
    ) -> AsyncIterator[Job]:
        """Yield jobs without end, or until none arrived for `timeout` seconds; at most `most` of them unsettled at a
        time. Jobs that are unsettled when the iterator is closed are claimable again at once."""
        operations, connection = operations_of(self._target), object()
        request = operations.make_request(node, most, lease_ms, connection)

        def claim() -> list[Job]:
            capacity = most - operations.count_leases(connection)
            return operations.claim_for_all([request._replace(count_max=capacity)])[0].jobs() if capacity > 0 else []

        def seconds_to_next_due() -> float | None:
            due_ms = self._target.next_due_ms()
            return None if due_ms is None else operations.seconds_until(due_ms)

        try:
            with Wakeups(self._target) as wakeups:
                deadline = Deadline(timeout)
                while True:
                    wakeups.clear()
                    try:
                        jobs = await self._threads.write(claim)
                    except asyncio.CancelledError as cancelled:
                        raise cancelled from None  # what it leased is released below
                    for job in jobs:
                        yield job
                        deadline = Deadline(timeout)
                    if jobs:
                        continue
                    if deadline.is_over:
                        return
                    await wakeups.wait(deadline.left(await self._threads.read(seconds_to_next_due)))
        finally:
            with suppress(Error):
                await asyncio.shield(self._threads.write(operations.release_connection, connection))

    def history(self) -> AsyncHistory:
        return AsyncHistory(self._target.history(), self._threads)


@documented_by(History)
class AsyncHistory(AsyncObject[History]):
    """The kept events of the jobs of a queue, oldest first."""

    def __init__(self, history: History, threads: Threads) -> None:
        self._target, self._threads = history, threads

    def __repr__(self) -> str:
        return f"<async {self._target!r}>"

    read = reading(History.read)
    to_arrow = reading(History.to_arrow)
    to_pandas = frames.PANDAS.awaiting(to_arrow)
    to_polars = frames.POLARS.awaiting(to_arrow)
    to_dicts = frames.DICTS.awaiting(to_arrow)


def of_channel(
    method: Callable[Concatenate[Channel, P], T],
) -> Callable[Concatenate[AsyncChannel, P], CoroutineType[Any, Any, T]]:
    """`writing` for a method of a channel, whose handle is made in a thread."""

    @wraps(method)
    async def run(self: AsyncChannel, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._threads.write(lambda: method(self._open(), *args, **kwargs))

    return run  # type: ignore[return-value]  # pyright infers CoroutineType, and protocols have it


@documented_by(Channel)
class AsyncChannel:
    """One channel as one user sees it."""

    def __init__(self, handle: Callable[[], Channel], name: str, threads: Threads) -> None:
        self._handle, self.name, self._threads = handle, name, threads
        self._channel: Channel | None = None

    def __repr__(self) -> str:
        return f"<async channel {self.name!r}>"

    def _open(self) -> Channel:
        """The handle, made in a thread: the first one restores the channels."""
        if self._channel is None:
            self._channel = self._handle()
        return self._channel

    async def join(self, /, **config: Unpack[ChannelSettings]) -> Self:
        await self._threads.write(lambda: self._open().join(**config))
        return self

    leave = of_channel(Channel.leave)
    invite = of_channel(Channel.invite)
    kick = of_channel(Channel.kick)
    members = of_channel(Channel.members)
    state = of_channel(Channel.state)
    configure = of_channel(Channel.configure)
    acl = of_channel(Channel.acl)
    allow = of_channel(Channel.allow)
    disallow = of_channel(Channel.disallow)
    change_acl = of_channel(Channel.change_acl)
    delete = of_channel(Channel.delete)
    publish = of_channel(Channel.publish)
    publish_many = of_channel(Channel.publish_many)
    history = of_channel(Channel.history)
    bounds = of_channel(Channel.bounds)
    holes = of_channel(Channel.holes)
    push = of_channel(Channel.push)
    pop = of_channel(Channel.pop)
    clear = of_channel(Channel.clear)

    async def length(self) -> int:
        """Return the number of waiting messages of a fifo channel; owner only."""
        return await self._threads.read(lambda: len(self._open()))

    async def subscribe(self, *, queue_max: int | None = None) -> AsyncSubscription:
        """Receive messages and presence events from now on; members only."""
        wakeups = _SubscriptionWakeups()
        subscription = await self._threads.write(lambda: self._open().subscribe(wake=wakeups.wake, queue_max=queue_max))
        return AsyncSubscription(subscription, wakeups, self._threads)


class _SubscriptionWakeups:
    """Wakes the task that waits for events of a channel."""

    def __init__(self) -> None:
        self._loop, self._event = asyncio.get_running_loop(), asyncio.Event()

    def wake(self) -> None:
        self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, limit_s: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._event.wait()
        self._event.clear()


class AsyncSubscription(Closable):
    """The events of one channel for one subscriber: iterate over it, or `wait`."""

    def __init__(self, subscription: Subscription, wakeups: _SubscriptionWakeups, threads: Threads) -> None:
        self._subscription, self._wakeups, self._threads = subscription, wakeups, threads
        self.channel = subscription.channel

    def __repr__(self) -> str:
        return f"<subscription of channel {self.channel!r}{', closed' if self.closed else ''}>"

    @property
    def closed(self) -> bool:
        return self._subscription.closed

    async def wait(self, timeout: Seconds | None = None) -> list[ChannelEvent]:
        """Wait for events and return them; return an empty list after `timeout` seconds, or at once after the end."""
        deadline = Deadline(timeout)
        while not (events := self._subscription.take()) and not self.closed and not deadline.is_over:
            await self._wakeups.wait(deadline.left())
        return events or self._subscription.take()

    async def close(self) -> None:
        """End the subscription. The membership stays."""
        await self._threads.write(self._subscription.close)

    async def __aiter__(self) -> AsyncIterator[ChannelEvent]:
        """Yield events until the subscription ends."""
        while events := await self.wait():
            for event in events:
                yield event
