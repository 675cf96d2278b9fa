"""`tidelog.connect` and the blocking objects of a server: `RemoteDatabase` and what it returns.

Methods, results and errors are those of the embedded objects, so code that takes either one is written once
(`tidelog.protocols`). What a method sends is in the modules `…_calls`; here each is bound to a client by one line.
`help()` shows the text of the embedded method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    NamedTuple,
    ParamSpec,
    Self,
    TypeVar,
    Unpack,
    overload,
)

import pyarrow as pa

from tidelog import database, frames
from tidelog.addresses import Location
from tidelog.api_types import READ_LIMIT, READ_LIMIT_MAX
from tidelog.channels import (
    OPERATOR,
    Channel,
    ChannelEvent,
    Presence,
    SubscriptionEnded,
)
from tidelog.channels.rules import ChannelSettings
from tidelog.client.channel_calls import KEY_USER, ChannelCalls, ChannelUser, KeyUser, parse_message
from tidelog.client.core import REQUEST_TIMEOUT_S, Call, ServerUnreachable
from tidelog.client.database_calls import DatabaseCalls
from tidelog.client.events import EventStream, ServerEvent
from tidelog.client.group_calls import GroupCalls, list_groups
from tidelog.client.http import Client
from tidelog.client.queue_calls import QueueCalls
from tidelog.client.topic_calls import ScanCursor, TopicCalls, new_producer_name
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
    TopicConfig,
)
from tidelog.engine import follow as loops
from tidelog.engine.config import TopicFields
from tidelog.engine.group_leases import LEASE_MS_DEFAULT
from tidelog.engine.groups import GroupBatch, GroupList, consume_group, follow_group
from tidelog.engine.producer import Producer
from tidelog.engine.producer_queue import LINGER_MS, MAX_BYTES, OnError, ProducerBatch
from tidelog.engine.queues.history import History
from tidelog.engine.queues.worker import Worker, worker_for
from tidelog.engine.queues.worker_options import JobFunction, WorkerOptions
from tidelog.engine.read import ExcludedNodes, parse_nodes
from tidelog.engine.typed import TypedTopic
from tidelog.errors import BadInput, Error, TopicNotFound, Unavailable
from tidelog.times import Duration, Seconds, Time, seconds

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

    from tidelog.datasets import TopicDataset

__all__ = [
    "KEY_USER",
    "KeyUser",
    "RemoteChannel",
    "RemoteDatabase",
    "RemoteGroup",
    "RemoteQueue",
    "RemoteTopic",
    "connect",
    "open_location",
]

RETRY_S: Final = 30.0  # less than the two minutes for which a topic remembers the key of a write
_DAY_S: Final = 86_400
_RECORD_CHUNK_BYTES: Final = 1 << 20
C = TypeVar("C")
P = ParamSpec("P")
T = TypeVar("T")
ClassT = TypeVar("ClassT", bound=type)
FetchBytes = Callable[[int, int, str, int, int | None], bytes | None]  # base, generation, file, bytes [lo, hi)


class RemoteObject(Generic[C]):
    """An object of a server: its calls, and the client that runs them."""

    _client: Client
    _calls: C

    def _run(self, call: Call[T]) -> T:
        return self._client.call(call)


def blocking(method: Callable[Concatenate[C, P], Call[T]]) -> Callable[Concatenate[RemoteObject[C], P], T]:
    """Return a method that runs this call and returns its result: same signature."""

    @wraps(method)
    def run(self: RemoteObject[C], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(method(self._calls, *args, **kwargs))

    return run


def documented_by(embedded: type) -> Callable[[ClassT], ClassT]:
    """Give public methods without a docstring that of the embedded class."""

    def decorate(remote: ClassT) -> ClassT:
        for name, method in vars(remote).items():
            text = getattr(getattr(embedded, name, None), "__doc__", None)
            target = method.fget if isinstance(method, property) else method
            if not name.startswith("_") and callable(target) and not target.__doc__:
                target.__doc__ = text
                if isinstance(method, property):
                    method.__doc__ = text
        return remote

    return decorate


def connect(
    url: str, *, key: str | None = None, timeout_s: Seconds = REQUEST_TIMEOUT_S, retry_s: Seconds = RETRY_S
) -> RemoteDatabase:
    """Connect to a server and return its database: the methods, results and errors of `tidelog.open`.

    Raises at once if the address does not answer, is no Tidelog server, or does not accept the key. Later, requests
    that are safe to repeat are repeated while the server is away; so are writes, which carry an idempotency key.

    Args:
        key: the API key, where the server needs one.
        timeout_s: how long one request may take.
        retry_s: how long a request is repeated before its error is raised; 0: not at all.
    """
    limit_s, retry_ms = parse_limits(timeout_s, retry_s)
    with Client(url, key=key, timeout_s=limit_s) as probe:
        probe.call(DatabaseCalls().check_server())
    return RemoteDatabase(Client(url, key=key, timeout_s=limit_s, retry_ms=retry_ms))


def parse_limits(timeout_s: Seconds, retry_s: Seconds) -> tuple[float, int]:
    """Return how long a request may take, in seconds, and how long it is repeated, in milliseconds."""
    limit_s, repeat_s = (seconds(name, given) for name, given in (("timeout_s", timeout_s), ("retry_s", retry_s)))
    if limit_s is None or not 0 < limit_s <= _DAY_S:
        raise BadInput(f"timeout_s is a number of seconds, not {timeout_s!r:.80}; nothing was done")
    if repeat_s is None or not 0 <= repeat_s <= _DAY_S:
        raise BadInput(f"retry_s is a number of seconds, not {retry_s!r:.80}; nothing was done")
    return limit_s, int(repeat_s * 1000)


def open_location(location: Location, *, read_only: bool = False) -> Database | RemoteDatabase:
    """Open the directory or the server that a location names."""
    if location.is_server:
        return RemoteDatabase(Client(location.address, key=location.key))
    return database.open(location.address, read_only=read_only)


# ── the database ──────────────────────────────────────────────────────────────────────────────────


class RemoteChannels(RemoteObject[DatabaseCalls]):
    """All channels of a server."""

    def __init__(self, client: Client) -> None:
        self._client, self._calls = client, DatabaseCalls()

    def __repr__(self) -> str:
        return f"<channels of {self._client.url}>"

    channel_names = blocking(DatabaseCalls.channel_names)


@documented_by(Database)
class RemoteDatabase(RemoteObject[DatabaseCalls]):
    """The topics, queues, routers and channels of a server. Every method may be called from any thread."""

    def __init__(self, client: Client) -> None:
        self._client, self._calls = client, DatabaseCalls()

    def __repr__(self) -> str:
        return f"<database of {self._client.url}>"

    def __contains__(self, name: object) -> bool:
        """Whether there is a topic of this name."""
        return isinstance(name, str) and self.find(name) is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. The server is not affected."""
        self._client.close()

    # ── topics and queues ─────────────────────────────────────────────────────────────────────

    def topic(self, /, name: str, *, create: bool = True, **config: Unpack[TopicFields]) -> RemoteTopic:
        """Return the topic of this name; create it if there is none. Given config fields are set, others stay. With
        `create=False` and no fields this sends no request: a missing topic raises at its first use."""
        if create or config:
            self._run(TopicCalls(name).ensure(create=create, fields=dict(config)))
        return RemoteTopic(self._client, name)

    def queue(self, /, name: str, *, create: bool = True, **config: Unpack[TopicFields]) -> RemoteQueue:
        """`topic` for a queue. Raises NotAQueue if there is a topic of another type with this name."""
        if create or config:
            self._run(ensure_queue(name, create, dict(config)))
        return RemoteQueue(self._client, name)

    def configure(self, name: str, fields: Mapping[str, object]) -> tuple[RemoteTopic, bool]:
        created = self._run(self._calls.configure(name, fields))
        return RemoteTopic(self._client, name), created

    def find(self, name: str) -> RemoteTopic | None:
        return RemoteTopic(self._client, name) if self._run(TopicCalls(name).exists()) else None

    names = blocking(DatabaseCalls.names)
    topics = blocking(DatabaseCalls.topics)
    drop = blocking(DatabaseCalls.drop)
    gaps = blocking(DatabaseCalls.gaps)
    router = blocking(DatabaseCalls.router)
    find_router = blocking(DatabaseCalls.find_router)
    routers = blocking(DatabaseCalls.routers)
    drop_router = blocking(DatabaseCalls.drop_router)
    health = blocking(DatabaseCalls.health)
    corruption = blocking(DatabaseCalls.corruption)
    checkpoint = blocking(DatabaseCalls.checkpoint)
    rewrite = blocking(DatabaseCalls.rewrite)
    erase = blocking(DatabaseCalls.erase)
    erasures = blocking(DatabaseCalls.erasures)
    verify_erasures = blocking(DatabaseCalls.verify_erasures)
    tier_status = blocking(DatabaseCalls.tier_status)
    segment_places = blocking(DatabaseCalls.segment_places)
    relocate = blocking(DatabaseCalls.relocate)
    recall = blocking(DatabaseCalls.recall)
    claim_cold_store = blocking(DatabaseCalls.claim_cold_store)
    backup = blocking(DatabaseCalls.backup)

    @property
    def channels(self) -> RemoteChannels:
        """All channels."""
        return RemoteChannels(self._client)

    def channel(self, name: str, *, user: ChannelUser = OPERATOR, token: str | None = None) -> RemoteChannel:
        """Return a handle of a channel for `user`: KEY_USER is the user of the API key; the operator needs the scope
        admin."""
        return RemoteChannel(self._client, name, user, token)

    def backups(self, target: str | None = None) -> dict[str, Any]:
        """The backups of a target of the server."""
        return self._client.get("/v0/backups", target=target)


def list_channels(database: RemoteDatabase) -> tuple[list[dict[str, Any]], dict[str, str], ChannelUser]:
    """Return the channels of a server with their state, those that cannot be read and why, and the user who may read
    them; for the command line."""
    return database._run(database._calls.channel_rows())


def ensure_queue(name: str, create: bool, config: dict[str, object]) -> Call[None]:
    topic = TopicCalls(name)
    if (yield from topic.exists()):
        yield from topic.check_queue()
        fields = config
    elif create:
        fields = {"type": "queue", **config}
    else:
        raise TopicNotFound(name)
    yield from topic.ensure(create=create, fields=fields)


# ── topics ────────────────────────────────────────────────────────────────────────────────────────


@documented_by(Topic)
class RemoteTopic(RemoteObject[TopicCalls]):
    """A topic of a server. A missing topic raises TopicNotFound at the first request."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self._calls = client, TopicCalls(name, self.open_record)

    def __repr__(self) -> str:
        return f"<topic {self.name!r} of {self._client.url}>"

    @property
    def name(self) -> str:
        return self._calls.name

    # Each of these is one request; `state` returns all of them with one.

    @property
    def id(self) -> int:
        return self.state().id

    @property
    def epoch(self) -> int:
        return self.state().epoch

    @property
    def config(self) -> TopicConfig:
        return self.state().config

    @property
    def head_seq(self) -> int:
        return self.state().head_seq

    @property
    def earliest_seq(self) -> int:
        return self.state().earliest_seq

    @property
    def evict_floor(self) -> int:
        return self.state().evict_floor

    @property
    def count(self) -> int:
        return self.state().count

    @property
    def bytes(self) -> int:
        return self.state().bytes

    @property
    def priority(self) -> int:
        return self.state().effective_priority

    state = blocking(TopicCalls.state)
    append = blocking(TopicCalls.append)
    append_stream = blocking(TopicCalls.append_stream)
    append_arrow = blocking(TopicCalls.append_arrow)

    def append_pandas(self, frame: pd.DataFrame, *, key: str | None = None) -> Appended:
        return self.append_arrow(frames.from_pandas(frame), key=key)

    def append_polars(self, frame: pl.DataFrame, *, key: str | None = None) -> Appended:
        return self.append_arrow(frames.from_polars(frame), key=key)

    append_numbered = blocking(TopicCalls.append_numbered)

    def producer(
        self, *, linger_ms: float = LINGER_MS, max_bytes: int = MAX_BYTES, on_error: OnError | None = None
    ) -> Producer:
        self._run(self._calls.check_producer(self._client.repeats_for_ms))

        producer = new_producer_name()

        def write(batch: ProducerBatch) -> Appended:
            return self._run(self._calls.append_batch(batch, producer))

        return Producer(self.name, write, RECORD_LIMITS, linger_ms=linger_ms, max_bytes=max_bytes, on_error=on_error)

    producer_batches = blocking(TopicCalls.producer_batches)
    delete = blocking(TopicCalls.delete)
    compact = blocking(TopicCalls.compact)
    seal = blocking(TopicCalls.seal)
    rewrite = blocking(TopicCalls.rewrite)
    erase = blocking(TopicCalls.erase)
    redrive = blocking(TopicCalls.redrive)
    simulate_retention = blocking(TopicCalls.simulate_retention)
    read = blocking(TopicCalls.read)
    to_arrow = blocking(TopicCalls.to_arrow)
    to_pandas = frames.PANDAS.of(to_arrow)
    to_polars = frames.POLARS.of(to_arrow)
    to_dicts = frames.DICTS.of(to_arrow)
    seek = blocking(TopicCalls.seek)
    gaps = blocking(TopicCalls.gaps)

    follow = loops.follow
    follow_arrow = loops.follow_arrow

    def __iter__(self) -> Iterator[Record | Gap]:
        """Yield all records that exist now."""
        return self.follow(timeout=0.0, on_gap="skip")

    def __contains__(self, seq: object) -> bool:
        """Whether there is a live record of this seq."""
        return self._run(self._calls.contains(seq))

    def scan(
        self,
        from_seq: int = 0,
        to_seq: int | None = None,
        *,
        nodes: ExcludedNodes = frozenset(),
        limit: int = SEQ_MAX,
        strong: bool = False,
        columns: Sequence[str] | None = None,
    ) -> RemoteScan:
        return RemoteScan(self._client, self._calls, ScanCursor(from_seq, to_seq, nodes, limit, strong, columns))

    def to_dataset(
        self,
        from_seq: int = 0,
        to_seq: int | None = None,
        *,
        since: Time | None = None,
        until: Time | None = None,
        node: str | Sequence[str] | None = None,
        strong: bool = False,
    ) -> TopicDataset:
        from tidelog.datasets import TopicDataset

        nodes = parse_nodes(node)
        return TopicDataset(self, from_seq, to_seq, since=since, until=until, nodes=nodes, strong=strong)

    def open_record(self, seq: int, *, strong: bool = False) -> RecordReader:
        head = self._run(self._calls.record_head(seq, strong=strong))

        def load(number: int) -> bytes:
            first = number * _RECORD_CHUNK_BYTES
            stop = min(first + _RECORD_CHUNK_BYTES, head.size)
            return self._run(self._calls.record_range(seq, head, first, stop))

        return RecordReader(head.size, _RECORD_CHUNK_BYTES, load, lambda: None, head.xxh3)

    @overload
    def latest(self, key: None = None, *, prefix: str = "") -> RemoteLatestTable: ...

    @overload
    def latest(self, key: str, *, prefix: str = "") -> Record | None: ...

    def latest(self, key: str | None = None, *, prefix: str = "") -> RemoteLatestTable | Record | None:
        table = RemoteLatestTable(self._client, self._calls, prefix)
        return table if key is None else table.get(key)

    def typed(self, kind: type[T]) -> TypedTopic[T]:
        return TypedTopic(self, kind)

    def queue(self) -> RemoteQueue:
        self._run(self._calls.check_queue())
        return RemoteQueue(self._client, self.name)

    def group(self, name: str) -> RemoteGroup:
        return RemoteGroup(self._client, self.name, name)

    def groups(self) -> GroupList[RemoteGroup]:
        states = self._run(list_groups(self._calls))
        return GroupList([self.group(state.group) for state in states], states)

    def segments(self, *, strong: bool = False) -> RemoteSegmentList:
        listing = self._run(self._calls.list_segments(strong=strong))
        return RemoteSegmentList.parse(listing, lambda *place: self._run(self._calls.segment_bytes(*place)))

    def segment(self, base: int, generation: int | None = None) -> RemoteSegment | None:
        return self.segments().find(base, generation)


class RemoteScan:
    """A bulk read of a topic of a server, page by page. Gap and counts are complete when it ends."""

    def __init__(self, client: Client, calls: TopicCalls, cursor: ScanCursor) -> None:
        self._client, self._calls, self._cursor = client, calls, cursor
        self._first = client.call(calls.scan_page(cursor))

    def __repr__(self) -> str:
        return f"<scan of topic {self._calls.name!r}, after {self.next_from_seq}>"

    @property
    def gap(self) -> Gap | None:
        return self._cursor.gap

    @property
    def gaps(self) -> list[Gap]:
        """Every gap among the seqs passed so far; `gap` is the first."""
        return self._cursor.gaps

    @property
    def counts(self) -> Counts:
        return self._cursor.counts

    @property
    def next_from_seq(self) -> int:
        return self._cursor.next_from_seq

    @property
    def head_seq(self) -> int:
        return self._cursor.head_seq

    @property
    def earliest_seq(self) -> int:
        return self._cursor.earliest_seq

    def iter_arrow_batches(self) -> Iterator[pa.RecordBatch]:
        batches, self._first = self._first, []
        while True:
            yield from batches
            if self._cursor.is_done:
                return
            batches = self._client.call(self._calls.scan_page(self._cursor))


class RemoteLatestTable:
    """The newest record of each key of a topic of a server."""

    def __init__(self, client: Client, calls: TopicCalls, prefix: str) -> None:
        if not isinstance(prefix, str):
            raise BadInput("the prefix of a key is text; nothing was read")
        self._client, self._calls, self._prefix = client, calls, prefix

    def __repr__(self) -> str:
        return f"<latest records of {self._calls.name!r}>"

    def get(self, key: str) -> Record | None:
        """Return the newest record of a key; None if the key is not in the table."""
        return self._client.call(self._calls.latest_record(key, self._prefix))

    def page(self, limit: int = READ_LIMIT, after: str | None = None) -> LatestPage:
        """Return at most `limit` keys with their newest records, from the start or after the page whose `next_after` is
        given. A page may have fewer and not be the last."""
        return self._client.call(self._calls.latest_page(self._prefix, limit, after))

    def __iter__(self) -> Iterator[LatestRecord]:
        """Yield every key and its newest record."""
        after: str | None = None
        while True:
            page = self.page(READ_LIMIT_MAX, after)
            yield from page.records
            after = page.next_after
            if after is None:
                return

    def to_arrow(self) -> pa.Table:
        """Return the table: the columns of `Topic.to_arrow` after a column `key`, ordered by seq."""
        return self._client.call(self._calls.latest_table(self._prefix))

    to_pandas = frames.PANDAS.of(to_arrow)
    to_polars = frames.POLARS.of(to_arrow)
    to_dicts = frames.DICTS.of(to_arrow)


@dataclass(frozen=True, slots=True)
class RemoteSegment:
    """A segment of a topic of a server at the time of its listing."""

    base: int
    generation: int  # of its files
    stop: int
    sealed: bool
    size: int  # bytes of data
    live_records: int
    live_bytes: int
    first_ts: int
    last_ts: int
    tier: str
    _fetch: FetchBytes = field(repr=False, compare=False)
    _files: Mapping[str, Mapping[str, Any]] = field(repr=False, compare=False)

    @classmethod
    def parse(cls, row: Mapping[str, Any], fetch: FetchBytes) -> RemoteSegment:
        files = row["files"]
        return cls(
            base=row["base"],
            generation=row["generation"],
            stop=row["stop"],
            sealed=row["sealed"],
            size=files["data"]["bytes"],
            live_records=row["live"],
            live_bytes=row["bytes"],
            first_ts=row["first_ts"],
            last_ts=row["last_ts"],
            tier=row["tier"],
            _fetch=fetch,
            _files=files,
        )

    @property
    def records(self) -> int:
        return self.stop - self.base

    def content(self, kind: str) -> bytes | None:
        """Return the bytes of a file; None if there is no such file. Raises NotFound if the segment was removed since
        it was listed."""
        if kind not in self._files:
            return None
        return self._fetch(self.base, self.generation, kind, 0, None)

    def read_range(self, kind: str, lo: int, hi: int) -> bytes | None:
        """Return bytes [lo, hi) of a file."""
        if kind not in self._files:
            return None
        return self._fetch(self.base, self.generation, kind, lo, hi)


class RemoteSegmentList(NamedTuple):
    """Segments of a topic of a server, and where the rest begins."""

    head_seq: int
    earliest_seq: int
    evict_floor: int
    segments: list[RemoteSegment]
    tail_from_seq: int  # records after it are read as records

    @classmethod
    def parse(cls, listing: Mapping[str, Any], fetch: FetchBytes) -> RemoteSegmentList:
        rows = [RemoteSegment.parse(row, fetch) for row in listing["segments"]]
        tail_seq = listing["tail"]["from_seq"]
        return cls(listing["head_seq"], listing["earliest_seq"], listing["evict_floor"], rows, tail_seq)

    def find(self, base: int, generation: int | None) -> RemoteSegment | None:
        """Return the segment whose first seq is `base`."""
        for found in self.segments:
            if found.base == base and generation in (None, found.generation):
                return found
        return None


# ── groups ────────────────────────────────────────────────────────────────────────────────────────


@documented_by(Group)
class RemoteGroup(RemoteObject[GroupCalls]):
    """A consumer group of a topic of a server."""

    def __init__(self, client: Client, topic: str, name: str) -> None:
        open_record = RemoteTopic(client, topic).open_record
        self._client, self._calls = client, GroupCalls(topic, name, open_record)

    def __repr__(self) -> str:
        return f"<group {self.name!r} of {self.topic!r} of {self._client.url}>"

    @property
    def name(self) -> str:
        """Its name in the topic."""
        return self._calls.name

    @property
    def topic(self) -> str:
        return self._calls.topic

    @property
    def exists(self) -> bool:
        return self._run(self._calls.exists())

    @property
    def position(self) -> int:
        return self.state().position

    @property
    def hold_bytes(self) -> int:
        return self.state().hold_bytes

    @property
    def hold_broken(self) -> bool:
        return self.state().hold_broken

    follow = follow_group
    consume = consume_group

    def claim(
        self, consumer: str, limit: int = 256, *, lease_ms: Duration = LEASE_MS_DEFAULT, timeout: Seconds | None = 0.0
    ) -> GroupBatch | None:
        claimed = self._run(self._calls.claim(consumer, limit, lease_ms, timeout))
        if claimed is None:
            return None
        lease_id, first_seq, page = claimed
        return GroupBatch(self, lease_id, consumer, first_seq, page)

    ack = blocking(GroupCalls.ack)
    release = blocking(GroupCalls.release)
    extend = blocking(GroupCalls.extend)
    leave = blocking(GroupCalls.leave)
    consumers = blocking(GroupCalls.consumers)
    state = blocking(GroupCalls.state)
    lag = blocking(GroupCalls.lag)
    fetch = blocking(GroupCalls.fetch)
    commit = blocking(GroupCalls.commit)
    would_commit = blocking(GroupCalls.would_commit)
    reset = blocking(GroupCalls.reset)
    preview = blocking(GroupCalls.preview)
    hold = blocking(GroupCalls.hold)
    begin = blocking(GroupCalls.begin)
    delete = blocking(GroupCalls.delete)


# ── queues ────────────────────────────────────────────────────────────────────────────────────────


@documented_by(Queue)
class RemoteQueue(RemoteObject[QueueCalls]):
    """A queue of a server. Every method may be called from any thread.

    Methods and results are those of an embedded queue, so a `tidelog.Worker` takes either. A missing queue raises
    TopicNotFound at the first request.
    """

    def __init__(self, client: Client, name: str) -> None:
        self.topic = RemoteTopic(client, name)
        self._client, self._calls = client, QueueCalls(name, self.topic.open_record)

    def __repr__(self) -> str:
        return f"<queue {self.name!r} of {self._client.url}>"

    @property
    def name(self) -> str:
        """The name of its topic."""
        return self._calls.name

    @property
    def lease_ms(self) -> int:
        return self.topic.config.lease_ms

    def worker(self, **options: Unpack[WorkerOptions]) -> Callable[[JobFunction], Worker]:
        return worker_for(self, **options)

    put = blocking(QueueCalls.put)
    claim = blocking(QueueCalls.claim)
    ack = blocking(QueueCalls.ack)
    nack = blocking(QueueCalls.nack)
    reject = blocking(QueueCalls.reject)
    extend = blocking(QueueCalls.extend)
    counts = blocking(QueueCalls.counts)
    redrive = blocking(QueueCalls.redrive)

    def jobs(
        self, node: str, most: int = 1, lease_ms: Duration | None = None, timeout: Seconds | None = None
    ) -> Iterator[Job]:
        query, path = self._calls.work_query(node, most, lease_ms), self._calls.work_path()
        cursor = self._calls.follow_jobs(timeout, self._client.core.errors.lost)
        while True:
            try:
                with EventStream(self._client, path, query) as events:
                    while (event := events.next(cursor.wait_s)) is not None:
                        job = cursor.accept(event)
                        if job is not None:
                            yield job
                    return
            except ServerUnreachable as error:
                cursor.on_lost(error)
            self.counts()  # a request that is repeated until the server is back

    def history(self) -> RemoteHistory:
        return RemoteHistory(self._client, self._calls)


@documented_by(History)
class RemoteHistory(RemoteObject[QueueCalls]):
    """The kept events of the jobs of a queue of a server, oldest first."""

    def __init__(self, client: Client, calls: QueueCalls) -> None:
        self._client, self._calls = client, calls

    def __repr__(self) -> str:
        return f"<history of queue {self._calls.name!r}>"

    read = blocking(QueueCalls.read_history)
    to_arrow = blocking(QueueCalls.history_table)
    to_pandas = frames.PANDAS.of(to_arrow)
    to_polars = frames.POLARS.of(to_arrow)
    to_dicts = frames.DICTS.of(to_arrow)


# ── channels ──────────────────────────────────────────────────────────────────────────────────────


@documented_by(Channel)
class RemoteChannel(RemoteObject[ChannelCalls]):
    """One channel of a server as one user sees it.

    Args:
        user: the user to act as; by default the user of the key. OPERATOR needs the scope admin.
        token: the user's token, where the server has an authentication hook.
    """

    def __init__(self, client: Client, name: str, user: ChannelUser = KEY_USER, token: str | None = None) -> None:
        self._client, self._calls = client, ChannelCalls(name, user, token)

    def __repr__(self) -> str:
        return f"<channel {self.name!r} of {self._client.url}, user {self.user!r}>"

    @property
    def name(self) -> str:
        """The name of the channel."""
        return self._calls.name

    @property
    def user(self) -> ChannelUser:
        """The user that the calls act as."""
        return self._calls.user

    def join(self, **config: Unpack[ChannelSettings]) -> RemoteChannel:
        self._run(self._calls.join(**config))
        return self

    leave = blocking(ChannelCalls.leave)
    invite = blocking(ChannelCalls.invite)
    kick = blocking(ChannelCalls.kick)
    members = blocking(ChannelCalls.members)
    state = blocking(ChannelCalls.state)
    configure = blocking(ChannelCalls.configure)
    acl = blocking(ChannelCalls.acl)
    allow = blocking(ChannelCalls.allow)
    disallow = blocking(ChannelCalls.disallow)
    change_acl = blocking(ChannelCalls.change_acl)
    delete = blocking(ChannelCalls.delete)
    publish = blocking(ChannelCalls.publish)
    publish_many = blocking(ChannelCalls.publish_many)
    history = blocking(ChannelCalls.history)
    bounds = blocking(ChannelCalls.bounds)
    holes = blocking(ChannelCalls.holes)
    push = blocking(ChannelCalls.push)
    pop = blocking(ChannelCalls.pop)
    clear = blocking(ChannelCalls.clear)

    def subscribe(self) -> RemoteSubscription:
        return RemoteSubscription(self._client, self._calls)

    def __len__(self) -> int:
        """Return the number of waiting messages of a fifo channel; owner only."""
        return self._run(self._calls.length())

    def __bool__(self) -> bool:
        return True


class RemoteSubscription:
    """The events of one channel of a server, from now on."""

    def __init__(self, client: Client, calls: ChannelCalls) -> None:
        self.channel, self.closed = calls.name, False
        self._events = EventStream(client, calls.path("/events"))
        self._ready: list[ChannelEvent] = []
        first = self._events.next(None)
        if first is not None and first.kind != "subscribed":
            self._accept(first)

    def __repr__(self) -> str:
        return f"<subscription of channel {self.channel!r}{', closed' if self.closed else ''}>"

    def _accept(self, event: ServerEvent) -> None:
        parsed = parse_channel_event(event)
        if parsed is not None:
            self._ready.append(parsed)
        if isinstance(parsed, SubscriptionEnded):
            self.closed = True

    def take(self, limit: int | None = None) -> list[ChannelEvent]:
        """Return events that have arrived, oldest first, at most `limit`, without blocking."""
        while not self.closed and (event := self._events.next(0)) is not None:
            self._accept(event)
        count = len(self._ready) if limit is None else limit
        taken, self._ready = self._ready[:count], self._ready[count:]
        return taken

    def wait(self, timeout: Seconds | None = None) -> list[ChannelEvent]:
        """Wait for events and return them; return an empty list after `timeout` seconds, or at once after the end."""
        while not (events := self.take()) and not self.closed:
            event = self._events.next(timeout)
            if event is None:
                return []
            self._accept(event)
        return events

    def close(self) -> None:
        """End the subscription. The membership stays."""
        if not self.closed:
            self.closed = True
            with suppress(Error):
                self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[ChannelEvent]:
        """Yield events until the subscription ends."""
        while events := self.wait():
            yield from events


def parse_channel_event(event: ServerEvent) -> ChannelEvent | None:
    """The event of a channel's stream as the embedded API has it; None for one that it does not have. Raises the error
    that the server sends before it stops."""
    fields = event.data
    match event.kind:
        case "message":
            return parse_message(fields)
        case "presence":
            return Presence(fields["kind"], fields["channel"], fields["user"], fields["owner"], fields["ts"])
        case "end":
            return SubscriptionEnded(fields["channel"], fields["reason"], fields["last_seq"])
        case "error":
            raise Unavailable(str(fields.get("message", "the server ended the stream; subscribe again")))
        case _:
            return None
