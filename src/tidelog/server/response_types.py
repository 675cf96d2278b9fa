"""Bodies of `/v0` responses. The OpenAPI document is generated from them, and handlers build them.

    Body    a component of the document; `RequestContext.json` appends `performance` where the class is a `TimedBody`
    Part    a part of a body, described in place

Fields are in the order in which they are sent. A field that is UNSET is not sent. Pages, write acknowledgements and
claims are encoded by hand from stored text; `test_openapi.py` compares their responses with the types here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from tidelog.api_types import LeaseToken, SearchRange, TimestampMs, described, schema_ref
from tidelog.engine.config import Durability
from tidelog.engine.context import RemovalCause
from tidelog.server.push.topic_stream import TTL_MS

Count: TypeAlias = Annotated[int, Meta(ge=0)]
Ratio: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
ConfigJson: TypeAlias = Annotated[Raw, described(**schema_ref("TopicConfig"))]
ChannelConfigJson: TypeAlias = Annotated[Any, described(**schema_ref("ChannelSettings"))]
AckDurability: TypeAlias = Annotated[
    Durability,
    described("The durability of this acknowledgement: the topic's class, whatever a config in the write asked for."),
]


class Body(Struct):
    """A whole response, and a component of the OpenAPI document."""


class TimedBody(Body):
    """A response that ends with `performance`."""


class TopicBody(TimedBody):
    """A response about one topic."""

    topic: str


class ChannelBody(TimedBody):
    """A response about one channel."""

    channel: str


class Part(Struct):
    """A part of one kind of response."""


class Performance(Body):
    """Where the time went. All fields but server_total_ms are sent only where they apply."""

    server_total_ms: float
    wal_append_ms: float | UnsetType = UNSET
    fsync_ms: float | UnsetType = UNSET
    throttle_wait_ms: float | UnsetType = UNSET
    records_scanned: Count | UnsetType = UNSET


class ErrorInfo(Part):
    code: str
    message: str
    detail: dict[str, Any] | UnsetType = UNSET


class Error(Body):
    """The message says what happened, whether anything was written and what to do next."""

    error: ErrorInfo


# ── topics and records ────────────────────────────────────────────────────────────────────────────


class Record(Body):
    seq: Annotated[int, Meta(ge=1)] = msgspec.field(name="$seq")
    ts: TimestampMs = msgspec.field(name="$ts")
    node: str | UnsetType = msgspec.field(default=UNSET, name="$node")
    tag: str | UnsetType = msgspec.field(default=UNSET, name="$tag")
    data: Annotated[Raw, described("Absent only where the request excluded it.")] | UnsetType = UNSET
    meta: dict[str, Any] | UnsetType = UNSET
    encoding: Literal["base64"] | UnsetType = msgspec.field(default=UNSET, name="$encoding")


class Tombstone(Body):
    """Records that were lost before they could be read: all seqs from gap_from to gap_to."""

    gap_from: Count
    gap_to: Count
    reason: Literal["cap", "ttl", "mixed", "recreated", "source_trim"]
    missed_estimate: Count
    earliest_seq: Count
    head_seq: Count


class Counts(Body):
    """What became of every seq of a range. The counts add up to its length."""

    rows: Count
    deleted: Count
    expired: Count
    evicted: Count
    filtered: Count
    holes: Count


class QueueDepth(Part):
    ready: Count
    in_flight: Count
    dead_lettered: Count


class Topic(TopicBody):
    type: Literal["log", "queue"]
    head_seq: Count
    earliest_seq: Count
    next_seq: Count
    count: Count
    bytes: Count
    config: ConfigJson
    effective_priority: int
    last_write_ts: TimestampMs | None
    last_read_ts: TimestampMs | None
    queue: QueueDepth | UnsetType = UNSET
    id: Annotated[Count, described("Where details asked for it.")] | UnsetType = UNSET
    epoch: Annotated[Count, described("Where details asked for it.")] | UnsetType = UNSET
    evict_floor: Annotated[Count, described("Where details asked for it.")] | UnsetType = UNSET


class TopicCreated(TopicBody):
    created: bool
    config: ConfigJson


class TopicDropped(TopicBody):
    deleted: bool
    routers_removed: list[str]


class TopicRow(Part):
    topic: str
    head_seq: Count
    earliest_seq: Count
    count: Count
    bytes: Count
    durable: bool
    effective_priority: int
    id: Annotated[Count, described("This field and those below where details asked for them.")] | UnsetType = UNSET
    epoch: Count | UnsetType = UNSET
    evict_floor: Count | UnsetType = UNSET
    last_write_ts: TimestampMs | UnsetType | None = UNSET
    last_read_ts: TimestampMs | UnsetType | None = UNSET
    config: ConfigJson | UnsetType = UNSET


class TopicList(TimedBody):
    topics: list[TopicRow]
    next_cursor: str | UnsetType = UNSET


class AppendedBody(TopicBody):
    """A response to a write."""

    first_seq: Count
    last_seq: Count
    head_seq: Count
    count: Count


class Written(AppendedBody):
    created: bool
    deduped: bool
    durability: AckDurability
    seqs: list[Count] | UnsetType = UNSET


class BulkWritten(AppendedBody):
    batches: Annotated[Count, described("Batches; each was written whole or not at all.")]
    created: bool
    deduped: Annotated[Count, described("Batches that an earlier request with the same key had written.")]
    durability: AckDurability


class Page(TopicBody):
    records: list[Record]
    next_from_seq: Count
    head_seq: Count
    earliest_seq: Count
    caught_up: bool
    tombstone: Tombstone | None
    lag: Count
    counts: Annotated[Counts, described("Where include_counts asked for it.")] | UnsetType = UNSET


class EndInfo(Part):
    next_from_seq: Count
    head_seq: Count
    earliest_seq: Count
    gap: Tombstone | None
    gaps: list[Tombstone]
    counts: Counts


class End(Body):
    """The last line. A stream without it is incomplete."""

    end: EndInfo = msgspec.field(name="$end")


class Deleted(TopicBody):
    deleted: Count
    earliest_seq: Count
    head_seq: Count
    count: Count
    bytes: Count


class RewrittenSegment(Part):
    base: Count
    generation: Annotated[Count, described("Of its new files.")]
    records_removed: Count
    bytes_before: Count
    bytes_after: Count
    xxh3_before: Annotated[int, described("XXH3-64 of its data.")]
    xxh3_after: int
    path_before: str
    path_after: str


class SkippedSegment(Part):
    base: Count
    reason: str


class Rewritten(TopicBody):
    segments: list[RewrittenSegment]
    skipped: Annotated[list[SkippedSegment], described("Segments that do not verify.")]
    bytes_reclaimed: Count


class ErasedFile(Part):
    path: str
    action: Literal["rewritten", "removed"]
    bytes: Count
    xxh3: str
    new_path: str | None
    new_bytes: int | None
    new_xxh3: str | None


class ErasureReceipt(Body):
    """The receipt of an erasure, as the gap log stores it."""

    topic: str
    number: Annotated[Count, described("Position in the chain of receipts.")]
    topic_id: Count
    ts_ms: TimestampMs
    actor: str | None
    selected_by: Literal["match", "seqs"]
    selection_sha256: Annotated[str, described("Of the match, or of the seqs with commas between them.")]
    records: Annotated[Count, described("Deleted by this request.")]
    records_before: Annotated[Count, described("Selected and deleted before.")]
    first: Count
    last: Count
    files: list[ErasedFile]
    not_reached: list[str]
    previous: Annotated[str, described("The hash of the receipt before; empty for the first.")]
    hash: Annotated[str, described("SHA-256 of this receipt with an empty hash.")]


class Erased(ErasureReceipt, TimedBody):
    """The receipt of this erasure."""


class Sealed(TopicBody):
    """The active segment is closed."""


class ErasureList(TimedBody):
    erasures: Annotated[list[Any], described(items=schema_ref("ErasureReceipt"))]


class ErasuresVerified(TimedBody):
    receipts: Count
    problems: list[str]


class Sought(TopicBody):
    ts: TimestampMs
    seq: Annotated[Count, described("The first record of this time or later; head_seq + 1 where there is none.")]
    from_seq: Count
    head_seq: Count
    earliest_seq: Count


class LatestRow(Part):
    """A key and the fields of its newest record."""

    key: str
    seq: Annotated[int, Meta(ge=1)] = msgspec.field(name="$seq")
    ts: TimestampMs = msgspec.field(name="$ts")
    node: str | UnsetType = msgspec.field(default=UNSET, name="$node")
    tag: str | UnsetType = msgspec.field(default=UNSET, name="$tag")
    data: Raw | UnsetType = UNSET
    meta: dict[str, Any] | UnsetType = UNSET
    encoding: Literal["base64"] | UnsetType = msgspec.field(default=UNSET, name="$encoding")


class Latest(TopicBody):
    records: list[LatestRow]
    next_after: Annotated[str, described("The cursor of the next page. Absent on the last one.")] | UnsetType = UNSET


class TopicCompacted(TopicBody):
    removed: Annotated[Count, described("Records, tombstones included.")]
    bytes: Count
    tombstones: Annotated[Count, described("Of the removed records, tombstones whose delay had passed.")]
    compacted_to: Annotated[Count, described("Of the records up to here, only the newest of each key is left.")]


class FoundRemoved(TopicBody):
    removed: Annotated[Count, described("Records, tombstones included.")]
    bytes: Count
    tombstones: Annotated[Count, described("Of the removed records, tombstones whose delay had passed.")]
    horizon: Annotated[Count, described("For the next part.")]
    oldest_tombstone_ms: Annotated[Count, described("For the next part; 0: no tombstone stays.")]


class CompactionSearch(TopicBody):
    range: SearchRange


class EvictedRange(Part):
    """Records that would be lost; without records, first_seq is one past last_seq."""

    records: Count
    bytes: Count
    first_seq: Count
    last_seq: Count
    first_ts: TimestampMs | None
    last_ts: TimestampMs | None


class Remaining(Part):
    records: Count
    bytes: Count


class UnreadLoss(Part):
    """What a consumer group would lose unread."""

    group: str
    position: Count
    records: Count
    bytes: Count
    hold_bytes: Count
    hold_breaks: bool


class RetentionSimulated(TopicBody):
    config: ConfigJson
    cap: Annotated[EvictedRange, described("Lost to the caps.")]
    ttl: Annotated[EvictedRange, described("Lost to age, of what the caps leave.")]
    evict_floor: Annotated[Count, described("Afterwards: the first seq that was not lost.")]
    remaining: Remaining
    groups: Annotated[list[UnreadLoss], described("Groups that would lose something, by name.")]
    held_by: Annotated[list[str], described("Groups whose holds keep records that caps or age would evict.")]


class SegmentFileInfo(Part):
    """A file; XXH3-64 in hexadecimal."""

    bytes: Count
    xxh3: Annotated[str, described(pattern="^[0-9a-f]{16}$")] | UnsetType = UNSET


class SegmentFiles(Part, rename={"deletions": "del"}):
    data: SegmentFileInfo
    idx: SegmentFileInfo
    foot: SegmentFileInfo | UnsetType = UNSET
    deletions: SegmentFileInfo | UnsetType = UNSET


class Segment(Body):
    base: Annotated[Count, described("Its first seq, which names it.")]
    generation: Annotated[Count, described("Of its files: how often it was rewritten without its deleted records.")]
    stop: Annotated[Count, described("The seq after its last one.")]
    sealed: bool
    records: Count
    live: Count
    bytes: Annotated[Count, described("Data and meta of live records.")]
    first_ts: TimestampMs
    last_ts: TimestampMs
    tier: Annotated[
        Literal["hot", "cold", "both"], described("Where its data is: on the disk, in the cold store, or in both.")
    ]
    files: SegmentFiles


class Tiers(TimedBody):
    store: Annotated[str | None, described("The address of the cold store, without credentials; null: there is none.")]
    enabled: Annotated[bool, described("Whether segments are moved there.")]
    hot_segments: Count
    hot_bytes: Count
    cold_segments: Count
    cold_bytes: Annotated[Count, described("Of the data of these segments.")]
    object_bytes: Annotated[Count, described("What they take in the store.")]
    relocated: Annotated[Count, described("Segments moved since the start.")]
    recalled: Count
    deleted_objects: Count
    failures: Count
    reads: Annotated[Count, described("Ranges read from the store for readers.")]
    read_bytes: Count
    read_failures: Count
    cache_bytes: Count
    last_error: str | None


class SegmentPlace(Part):
    topic: str
    first_seq: Count
    last_seq: Count
    bytes: Count
    tier: Literal["hot", "cold", "both"]
    object: Annotated[str | None, described("Its address in the store.")]
    object_bytes: Count
    is_recalled: bool


class SegmentPlaces(TimedBody):
    segments: list[SegmentPlace]


class ColdStoreClaimed(TimedBody):
    store: str | None


class Checkpointed(TimedBody):
    generation: Annotated[Count, described("Of the newest checkpoint.")]


class SegmentNotMoved(Part):
    base: Count
    reason: str
    topic: str


class AllSegmentsMoved(TimedBody):
    segments: Count
    bytes: Count
    failed: list[SegmentNotMoved]


class SegmentsMoved(TimedBody):
    topic: str
    segments: Count
    bytes: Count
    failed: list[SegmentNotMoved]


class SegmentTail(Part):
    """Seqs that are in no file: read them as records."""

    from_seq: Count
    to_seq: Count


class Segments(TopicBody):
    epoch: Annotated[Count, described("Changes when the topic is dropped and created again.")]
    generation: Annotated[Count, described("Of the newest checkpoint.")]
    head_seq: Count
    earliest_seq: Count
    evict_floor: Count
    segments: list[Segment]
    tail: SegmentTail
    next_from_seq: Annotated[int | None, described("List from there: the limit left segments out.")]
    records: Annotated[Count, described("Live records of the topic.")]
    bytes: Annotated[Count, described("Their data and meta.")]
    removals: Annotated[
        Count, described("Grows with every removal: with the same epoch and generation, live counts are the same.")
    ]


class Watermarks(Part):
    from_seq: Count
    head_seq: Count
    earliest_seq: Count


class WatchSession(TimedBody):
    wid: Annotated[str, described(pattern="^wid_[A-Za-z0-9_-]{22}$")]
    stream_url: str
    session_ttl_ms: Annotated[Any, described(const=TTL_MS)]
    topics: dict[str, Watermarks]


class Version(TimedBody):
    version: str
    api: str
    python: str
    compiled: Annotated[bool, described("The compiled modules are in use.")]


class Settings(TimedBody):
    settings: Annotated[dict[str, Any], described("By name, in lower case and without TIDELOG_.")]
    hidden: Annotated[list[str], described("Settings whose values are secret.")]


class ReadToken(TimedBody):
    token: str
    expires_ms: TimestampMs
    topics: list[str]
    prefixes: list[str]


# ── routers ───────────────────────────────────────────────────────────────────────────────────────


class RouterOptions(Part):
    router: str
    source: str
    dest: str
    preserve_node: bool
    preserve_tag: bool
    filter: Annotated[list[str], described(minItems=3, maxItems=3)] | None
    allow_cycle: bool
    guarantee: str


class Router(RouterOptions, TimedBody):
    forwarded_total: Count


class RouterMade(RouterOptions, TimedBody):
    created: bool


class RouterDropped(TimedBody):
    router: str
    deleted: bool


class RouterRow(Part):
    router: str
    source: str
    dest: str
    guarantee: str
    forwarded_total: Count
    preserve_node: (
        Annotated[bool, described("This field and those below where details asked for them.")] | UnsetType
    ) = UNSET
    preserve_tag: bool | UnsetType = UNSET
    filter: list[str] | UnsetType | None = UNSET
    allow_cycle: bool | UnsetType = UNSET


class RouterList(TimedBody):
    routers: list[RouterRow]
    next_cursor: str | UnsetType = UNSET


# ── consumer groups and gaps ──────────────────────────────────────────────────────────────────────


class GroupLag(Part):
    """What the group has still to read; seconds: the age of the first of these records."""

    records: Count
    bytes: Count
    seconds: float


Position: TypeAlias = Annotated[Count, described("The last committed seq.")]
HoldBytes: TypeAlias = Annotated[Count, described("How many bytes retention keeps for the group; 0: none.")]
HoldBroken: TypeAlias = Annotated[bool, described("Records that the group had not read were removed.")]


class GroupInfo(Part):
    group: str
    position: Position
    head_seq: Count
    lag: GroupLag
    hold_bytes: HoldBytes
    hold_broken: HoldBroken
    last_commit_ts: TimestampMs | None


class GroupList(TopicBody):
    groups: list[GroupInfo]


class GroupShown(TopicBody):
    group: str
    position: Position
    head_seq: Count
    lag: GroupLag
    hold_bytes: HoldBytes
    hold_broken: HoldBroken
    last_commit_ts: TimestampMs | None


class GroupPut(TopicBody):
    created: bool
    group: str
    position: Position
    head_seq: Count
    lag: GroupLag
    hold_bytes: HoldBytes
    hold_broken: HoldBroken
    last_commit_ts: TimestampMs | None


class GroupDropped(TopicBody):
    group: str
    deleted: bool


class GroupCommitted(TopicBody):
    group: str
    position: Count


class RangeLease(Part):
    lease_id: Count
    consumer: str
    first_seq: Count
    last_seq: Count
    lease_ms: Count


class RangeClaimed(TopicBody):
    lease: Annotated[RangeLease | None, described("null: there is no record now.")]
    records: list[Record]
    tombstone: Tombstone | UnsetType | None = UNSET
    next_from_seq: Count | UnsetType = UNSET
    head_seq: Count | UnsetType = UNSET
    earliest_seq: Count | UnsetType = UNSET
    caught_up: bool | UnsetType = UNSET
    lag: Count | UnsetType = UNSET
    counts: Annotated[Counts, described("Where include_counts asked for it.")] | UnsetType = UNSET


class RangesSettled(TopicBody):
    settled: Count
    void: Annotated[list[Count], described("Leases that had ended.")]
    position: Position


class GroupLeft(TopicBody):
    group: str
    returned: Annotated[Count, described("How many leased ranges went back to the group.")]


class Consumer(Part):
    consumer: str
    leases: Count
    first_seq: Count
    last_seq: Count


class ConsumerList(TopicBody):
    group: str
    consumers: list[Consumer]


class GroupReset(TopicBody, rename={"from_": "from"}):
    group: str
    from_: Count
    to: Count
    records: Annotated[Count, described("Records to be read again, or skipped.")]
    bytes: Count
    gap: Tombstone | None
    preview: bool


class GapRow(Part):
    topic: str
    topic_id: Annotated[Count, described("Changes when the topic is dropped and created again.")]
    cause: RemovalCause
    first: Count
    last: Annotated[Count, described("Included.")]
    records: Annotated[Count, described("How many records of the range were removed now.")]
    bytes: Count
    ts_ms: TimestampMs
    actor: str | None
    about: str
    seq: Annotated[Count, described("Of the row; 0 while it is not written yet.")]


class TopicGaps(TopicBody):
    gaps: list[GapRow]
    next_cursor: str | UnsetType = UNSET


class GapList(TimedBody):
    gaps: list[GapRow]
    next_cursor: str | UnsetType = UNSET


# ── backups ───────────────────────────────────────────────────────────────────────────────────────


class Backup(Part):
    id: str
    created_ms: Annotated[TimestampMs, described("It has what was written before, and nothing written after.")]
    database_id: str
    parent: Annotated[str | None, described("The backup whose objects were used again.")]
    topics: Annotated[dict[str, Count], described("The last seq of each topic.")]
    channels: Count
    files: Count
    bytes: Count
    stored_bytes: Annotated[Count, described("Of the objects that it added to its target.")]
    damaged: Annotated[list[str], described("Files that did not verify, and were accepted.")]
    external: Annotated[list[str], described("Objects of a cold store that it refers to.")]


class BackupMade(TimedBody):
    target: str
    backup: Backup


class BackupList(TimedBody):
    target: str
    backups: list[Backup]
    unfinished: Annotated[list[str], described("Backups that are being made, or were interrupted.")]
    unreadable: Annotated[dict[str, str], described("Backups whose manifest does not read, and why.")]


# ── numbered batches ──────────────────────────────────────────────────────────────────────────────


class ChunkStaged(TopicBody):
    chunk: str
    bytes: Count


class StagingCleared(TopicBody):
    removed: Count


class BatchPut(AppendedBody):
    deduped: Annotated[bool, described("An earlier request had written it.")]
    durability: AckDurability
    created: bool


class BatchRow(Part):
    number: Count
    first_seq: Count
    last_seq: Count
    sum: Annotated[str, described(pattern="^[0-9a-f]{32}$")]
    query_id: str


class BatchList(TopicBody):
    writer: str
    batches: list[BatchRow]


# ── queues ────────────────────────────────────────────────────────────────────────────────────────


class Job(Part, kw_only=True):
    seq: Count = msgspec.field(name="$seq")
    lease_id: Annotated[LeaseToken, described("Sent with ack, nack or extend, it rejects a holder whose lease ended.")]
    deadline: Annotated[TimestampMs, described("The end of the lease, in milliseconds since the epoch.")]
    ts: TimestampMs = msgspec.field(name="$ts")
    tag: str | UnsetType = msgspec.field(default=UNSET, name="$tag")
    deliveries: Annotated[Count, described("How often the job was claimed, including this time.")]
    data: Raw
    encoding: Annotated[Any, described(const="base64")] | UnsetType = msgspec.field(default=UNSET, name="$encoding")
    meta: dict[str, Any] | UnsetType = UNSET


class Claimed(TopicBody):
    claimed: list[Job]
    count: Count
    ready: Count


class Acked(TopicBody):
    acked: Count
    skipped: list[Count]
    ready: Count
    in_flight: Count


class Nacked(TopicBody):
    nacked: Count
    skipped: list[Count]
    ready: Count
    in_flight: Count


class Rejected(TopicBody):
    rejected: Count
    skipped: list[Count]
    ready: Count
    in_flight: Count


class Extended(TopicBody):
    extended: Count
    skipped: list[Count]
    deadlines: Annotated[dict[str, TimestampMs], described("By seq.")]


class HistoryEvent(Body):
    at: Annotated[Count, described("Its seq in the history.")]
    ts_ms: TimestampMs
    event: Literal[
        "enqueued",
        "claimed",
        "extended",
        "nacked",
        "expired",
        "released",
        "acked",
        "dead_lettered",
        "redriven",
        "restarted",
    ]
    seq: Annotated[Count, described("The job's; the first one's where several were enqueued.")] | UnsetType = UNSET
    last_seq: Count | UnsetType = UNSET
    node: str | UnsetType = UNSET
    lease_id: Count | UnsetType = UNSET
    deliveries: Count | UnsetType = UNSET
    waited_ms: Annotated[int, described("claimed: the time since the job was enqueued.")] | UnsetType = UNSET
    deadline_ms: (
        Annotated[TimestampMs, described("The lease's; of a nack, when the job can be claimed again.")] | UnsetType
    ) = UNSET


class History(TopicBody):
    events: list[HistoryEvent]
    count: Count
    next_from_seq: Annotated[Count, described("from_seq of the next request.")]


class Redriven(TopicBody):
    redriven: Count
    queues: Annotated[dict[str, Count], described("Records by queue.")]
    skipped: Annotated[Count, described("Records whose queue is not known, or that are leased.")]


# ── channels ──────────────────────────────────────────────────────────────────────────────────────


class ChannelRow(Part):
    channel: str
    type: Literal["pubsub", "fifo"]
    owner: str | None
    members: Annotated[Count, described("How many.")]
    persist: bool


class ChannelList(TimedBody, kw_only=True):
    channels: list[ChannelRow]
    user: str | None
    next_cursor: str | UnsetType = UNSET
    unreadable: Annotated[dict[str, str], described("The reason, by directory.")] | UnsetType = UNSET
    limits: dict[str, Any]


class ChannelPut(ChannelRow, TimedBody):
    created: bool
    config: ChannelConfigJson


class Channel(ChannelRow, TimedBody):
    config: ChannelConfigJson
    first_seq: Count | None
    last_seq: Count | None
    waiting: Annotated[Count, described("Messages of a fifo channel; for its owner.")] | UnsetType = UNSET
    holes: (
        Annotated[
            list[list[Count]],
            described("Seqs that power cuts lost before their fsync: the first and the last of each range."),
        ]
        | UnsetType
    ) = UNSET


class ChannelDeleted(ChannelBody):
    deleted: bool


class ChannelJoined(ChannelBody):
    user: str
    owner: str
    members: Count
    created: bool


class ChannelLeft(ChannelBody):
    user: str
    ended: bool
    owner: str | None


class ChannelMembers(ChannelBody):
    members: list[str]
    page: Count
    total: Count


class AclLists(Part):
    join: list[str]
    publish: list[str]
    read: list[str]


class ChannelAcl(ChannelBody):
    acl: AclLists


class AclChanged(ChannelBody):
    kind: str
    listed: list[str]


class ChannelAck(ChannelBody):
    first_seq: Count
    last_seq: Count
    count: Count
    ts: TimestampMs
    qos: Annotated[Any, described("0: accepted. 1: stored as the channel's settings say, and delivered.", enum=[0, 1])]
    durable: Annotated[bool, described("Whether the message survives a power cut now.")]
    receivers: Annotated[Count, described("How many streams got it.")] | None


class MessageInfo(Part):
    channel: str
    seq: Count
    ts: TimestampMs
    sender: str
    payload: Annotated[str, described("Where the bytes are UTF-8.")] | UnsetType = UNSET
    payload_base64: Annotated[str, described("Where they are not.")] | UnsetType = UNSET


class ChannelHistory(ChannelBody):
    messages: list[MessageInfo]
    count: Count
    next_seq: Count
    first_seq: Count
    last_seq: Count


class ChannelPushed(ChannelBody):
    seq: Count
    ts: TimestampMs
    sender: str


class ChannelPopped(MessageInfo, TimedBody):
    pass


class ChannelCleared(ChannelBody):
    cleared: Count


# ── health and metrics ────────────────────────────────────────────────────────────────────────────


class Health(Body):
    status: Annotated[Any, described(const="ok")]
    version: str
    uptime_ms: Count


class ReadyHealth(Part):
    """A summary of the server's health: how many topics lag, and failures in a row by task. Errors are in the
    metrics."""

    ok: bool
    checkpoint_age_ms: Count
    lagging_topics: Count
    corruptions: Count
    failing: dict[str, Count]


class Ready(Body):
    status: Annotated[Any, described(const="ready")]
    wal_replay_complete: bool
    topics: Count
    health: ReadyHealth


class TaskDetails(Part):
    """One kind of background work; `failing` counts failures since its last success."""

    name: str
    runs: Count
    failures: Count
    failing: Count
    last_ok_ms: TimestampMs | None
    last_error: str | None
    last_error_ms: TimestampMs | None


class CorruptPlace(Part):
    topic: str
    topic_id: Count
    where: str
    reason: str
    seen_ms: TimestampMs


class HealthDetails(TimedBody):
    ok: bool
    tasks: list[TaskDetails]
    checkpoint_age_ms: Count
    uncovered_bytes: Count
    lagging: Annotated[list[str], described("Topics that the last checkpoint could not write.")]
    corruptions: Count
    corrupt: list[CorruptPlace]


class TaskHealth(Part):
    """One kind of background work; `failing` counts failures since its last success."""

    runs: Count
    failures: Count
    failing: Count
    last_ok_ms: TimestampMs | None
    last_error_ms: TimestampMs | None
    last_error: str | None


class ServerHealth(Part):
    """Background work and stored bytes. The last checkpoint could not write the topics in `lagging_topics`; their
    records are in the WAL."""

    ok: bool
    checkpoint_age_ms: Count
    wal_uncovered_bytes: Count
    corruptions: Count
    lagging_topics: list[str]
    tasks: dict[str, TaskHealth]


class WalMetrics(Part):
    fsyncs: Count
    frames: Count
    copied_frames: Count
    batches: Count
    bytes_written: Count
    rotations: Count
    queue_depth: Count
    queue_depth_peak: Count
    submit_full_total: Count
    fsync_count: Count
    fsync_micros_total: Count
    read_only: bool


class Metrics(Body):
    topics: Count
    topics_ephemeral: Count
    topics_memory: Count
    topics_disk: Count
    topics_fsync: Count
    routers: Count
    records_live: Count
    bytes_live: Count
    queue_topics: Count
    queue_leases_in_flight: Count
    sse_connections: Count
    watch_sessions: Count
    channels: Count
    channel_receivers: Count
    ready: bool
    replay_progress: Ratio
    uptime_ms: Count
    pressure: Ratio
    sched_latency_ms: Annotated[float, Meta(ge=0)]
    ready_topics: Count
    deferred_topics: Count
    throttled_total: Count
    health: ServerHealth | None
    wal: WalMetrics
