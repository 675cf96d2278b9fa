"""Settings of a topic and of an engine. Nothing here reads the environment.

A topic's config is the object of the wire contract: 17 keys in one order, always all of them, followed by those of
`ADDED` that are not the default. Callers give some of the fields; the stored config is complete. Rules, in order of
authority:

  1. An unknown key is refused, with the nearest known one: a misspelt cap would keep everything.
  2. A value has exactly the type of its field: true is not 1, and 1.0 is not 1 either.
  3. `durability` says how a write survives. `durable` is the older, shorter form for two of its four classes, used only
     where `durability` is absent or null.
  4. Times of queues are clamped, not refused.

An engine's config belongs to the process, not to the data: any directory opens under any of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias, TypedDict, get_args

import msgspec

from tidelog.errors import BadInput
from tidelog.times import Duration, fields_in_ms

TopicType: TypeAlias = Literal["log", "queue"]
Discard: TypeAlias = Literal["old", "reject"]
Durability: TypeAlias = Literal["ephemeral", "memory", "disk", "fsync"]
Consistency: TypeAlias = Literal["eventual", "strong"]
ColdCompression: TypeAlias = Literal["none", "zstd"]

KEYS: Final = (  # the order of the contract
    *("type", "ttl_ms", "cap_records", "cap_bytes", "discard", "durable", "durability", "priority", "auto_priority"),
    *("auto_create", "idempotency_window_ms", "dedupe_node", "lease_ms", "claim_jitter_ms", "max_deliveries"),
    *("dead_letter", "leases_durable"),
)
LATEST_BY_TAG: Final = "latest_by_tag"
TOMBSTONE_DELAY_MS: Final = 86_400_000
_ADDED_DEFAULTS: Final = {
    "consistency": "eventual",
    "max_record_bytes": 1 << 20,
    "compaction": None,
    "tombstone_delay_ms": TOMBSTONE_DELAY_MS,
    "hot_retain_segments": None,
    "hot_retain_bytes": None,
}
ADDED: Final = tuple(_ADDED_DEFAULTS)  # keys beside the contract's: written only if not the default
MAX_RECORD_BYTES_MAX: Final = (1 << 32) - 1  # 4 GiB less one byte: an index has 32 bits for a length
_POINTER_BYTES_MAX: Final = 1_024
_POINTER_TOKENS_MAX: Final = 32
LEASE_MS_MIN: Final = 100
LEASE_MS_MAX: Final = 86_400_000
CLAIM_JITTER_MS_MAX: Final = 5_000

_CHOICES: Final = {
    "type": get_args(TopicType),
    "discard": get_args(Discard),
    "durability": get_args(Durability),
    "consistency": get_args(Consistency),
}
KNOWN: Final = (*KEYS, *ADDED)
_BOOL_FIELDS: Final = ("auto_priority", "auto_create", "dedupe_node", "leases_durable")
_COUNT_FIELDS: Final = (
    *("ttl_ms", "cap_records", "cap_bytes", "idempotency_window_ms"),
    *("lease_ms", "claim_jitter_ms", "max_deliveries", "tombstone_delay_ms"),
)
_U64_MAX: Final = (1 << 64) - 1
_I32_MAX: Final = (1 << 31) - 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,254}")
_SHOWN_CHARS_MAX: Final = 80  # length of a value in a message
OWN: Final = "_tidelog."  # prefix of internal topics, invalid in names given by users


def check_topic_name(name: object) -> None:
    """Raise BadInput for an invalid topic name. Called where a topic is created; elsewhere such a topic is just not
    found."""
    if not _is_name(name):
        raise BadInput(
            f"{_format_value(name)} cannot name a topic: 1 to 255 of A-Z a-z 0-9 . _ : - and a letter or digit first; "
            "nothing was created, choose another name"
        )


class TopicFields(TypedDict, total=False):
    """The fields of `TopicConfig` by name, as callers give them: a misspelt one fails type checks."""

    type: TopicType
    ttl_ms: Duration
    cap_records: int
    cap_bytes: int
    discard: Discard
    durable: bool  # the older form of `durability`: fsync or disk
    durability: Durability | None
    priority: int | None
    auto_priority: bool
    auto_create: bool
    idempotency_window_ms: Duration
    dedupe_node: bool
    lease_ms: Duration
    claim_jitter_ms: Duration
    max_deliveries: int
    dead_letter: str | None
    leases_durable: bool
    consistency: Consistency
    max_record_bytes: int
    compaction: str | None
    tombstone_delay_ms: Duration
    hot_retain_segments: int | None
    hot_retain_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicConfig:
    """What one topic keeps, and what its acks mean. Every instance is valid."""

    type: TopicType = "log"
    """A queue is a log whose records are leased and acked. Never changes."""

    ttl_ms: int = 0
    """A record expires once it is older than this; 0: never."""

    cap_records: int = 0
    """Maximum of live records; 0: no cap. The cap that is reached first applies."""

    cap_bytes: int = 0
    """Maximum bytes of live records; 0: no cap."""

    discard: Discard = "old"
    """What happens at a cap: the oldest records are evicted, or the write is rejected."""

    durability: Durability = "disk"
    """What an ack means. `ephemeral`: in memory only. `memory`: written, nothing promised. `disk`: handed to the
    operating system, synced soon. `fsync`: survives a power cut."""

    priority: int | None = None
    """Rank among topics when readers compete; kept as given, the scheduler clamps it. None: by `auto_priority`."""

    auto_priority: bool = True
    """Rank by how recently it was read, where no `priority` is given."""

    auto_create: bool = True
    """Whether a write that brings this config may create the topic."""

    idempotency_window_ms: int = 120_000
    """How long a write's idempotency key is remembered."""

    dedupe_node: bool = True
    """Whether a reader may leave out the records of its own node."""

    lease_ms: int = 30_000
    """How long a claim holds a record, unless it says otherwise."""

    claim_jitter_ms: int = 0
    """How long the first claim waits for other claims, to share jobs fairly; 0: not at all."""

    max_deliveries: int = 0
    """How often a record is delivered before it moves to `dead_letter`; 0: no limit."""

    dead_letter: str | None = None
    """The topic for records that were delivered too often."""

    leases_durable: bool = False
    """Whether leases and delivery counts survive a restart."""

    consistency: Consistency = "eventual"
    """What readers see. `eventual`: what is acked. `strong`: what survives a power cut; needs the class
    `disk` or `fsync`."""

    max_record_bytes: int = 1 << 20
    """Data of one streamed record, up to 4 GiB less one byte. Other writes are bounded by the engine's
    `record_bytes_max`."""

    compaction: str | None = None
    """Keep only the newest record of each key. `latest_by_tag`: the key is the tag. A text that begins with `/`: the
    key is the value at this JSON pointer in data. None: keep all records."""

    tombstone_delay_ms: int = TOMBSTONE_DELAY_MS
    """How long compaction keeps the record that marks its key as deleted."""

    hot_retain_segments: int | None = None
    """How many of the newest sealed segments stay on the disk where there is a cold store. None: as the engine's
    setting."""

    hot_retain_bytes: int | None = None
    """How many bytes of the newest sealed segments stay on the disk, at most; 0: no limit. None: as the engine's
    setting."""

    def __post_init__(self) -> None:
        _check_int("max_record_bytes", self.max_record_bytes, 1, MAX_RECORD_BYTES_MAX)
        for name, choices in _CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        for name in _COUNT_FIELDS:
            _check_int(name, getattr(self, name), 0, _U64_MAX)
        for name in _BOOL_FIELDS:
            _check_bool(name, getattr(self, name))
        if self.priority is not None:
            _check_int("priority", self.priority, -_I32_MAX - 1, _I32_MAX)
        for name in ("hot_retain_segments", "hot_retain_bytes"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, _U64_MAX)
        if self.consistency == "strong" and self.durability in ("memory", "ephemeral"):
            raise BadInput(
                f"consistency is strong and durability {self.durability}, which promises nothing after a power cut: "
                "readers would be shown nothing; give durability disk or fsync, or consistency eventual"
            )
        if self.dead_letter is not None and not _is_name(self.dead_letter):
            raise BadInput(
                f"dead_letter is {_format_value(self.dead_letter)}, which cannot name a topic; give null or a topic's "
                "name: 1 to 255 of A-Z a-z 0-9 . _ : - and a letter or digit first"
            )
        if self.compaction is not None:
            _check_compaction(self.compaction)
            if self.type == "queue":
                raise BadInput(
                    "a queue has no compaction: its jobs are removed by acks, and a newer job does not replace an "
                    "older one; give compaction null, or type log"
                )
        object.__setattr__(self, "lease_ms", min(max(self.lease_ms, LEASE_MS_MIN), LEASE_MS_MAX))
        object.__setattr__(self, "claim_jitter_ms", min(self.claim_jitter_ms, CLAIM_JITTER_MS_MAX))

    @property
    def durable(self) -> bool:
        """Whether every acked write survives a power cut."""
        return self.durability == "fsync"

    @classmethod
    def make(cls, fields: Mapping[str, object], *, base: TopicConfig | None = None) -> TopicConfig:
        """Return `base`, or the defaults, with these fields set. Null is valid for `durability`, `priority`,
        `dead_letter` and `compaction`."""
        if not isinstance(fields, Mapping):
            raise BadInput(f"the fields of a topic are a dict, not {_format_value(fields)}; nothing was done")
        for name in fields:
            if name not in KNOWN:
                raise BadInput(f"a topic has no field {_format_value(name)}; the nearest is {_nearest(name, KNOWN)}")
        return _with_fields(base or cls(), fields)

    def to_json(self) -> bytes:
        """Encode all 17 keys in the contract's order, then ours that are not the default, without spaces: the same
        config gives the same bytes."""
        fields = {name: getattr(self, name) for name in KEYS}
        fields |= {name: getattr(self, name) for name in ADDED if getattr(self, name) != _ADDED_DEFAULTS[name]}
        return msgspec.json.encode(fields)

    @classmethod
    def from_json(cls, text: bytes) -> TopicConfig:
        """Decode a stored config. Keys of a newer version are ignored, known ones are validated."""
        return _decode_cached(text) if len(text) <= _CACHED_TEXT_BYTES_MAX else _decode(text)


def _check_compaction(value: object) -> None:
    """Raise BadInput unless this is `latest_by_tag` or a JSON pointer (RFC 6901) to a value inside data."""
    if value == LATEST_BY_TAG:
        return
    is_pointer = isinstance(value, str) and value.startswith("/") and not re.search("~(?![01])", value)
    if not is_pointer or not _is_utf8(str(value)):
        raise BadInput(
            f"compaction is {_format_value(value)}; give null, {LATEST_BY_TAG}, or a JSON pointer: it begins with / "
            "and has ~0 for ~ and ~1 for / inside a name"
        )
    size, tokens = len(str(value).encode()), str(value).count("/")
    if size > _POINTER_BYTES_MAX or tokens > _POINTER_TOKENS_MAX:
        raise BadInput(
            f"compaction is a pointer of {size} bytes and {tokens} names; at most {_POINTER_BYTES_MAX} bytes and "
            f"{_POINTER_TOKENS_MAX} names are allowed"
        )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_dead_letter(topic: str, config: TopicConfig) -> None:
    """Raise BadInput where a queue of this name would be its own dead-letter topic."""
    if config.type == "queue" and config.dead_letter == topic:
        raise BadInput(
            f"dead_letter is {topic!r}, the queue itself: what failed would come back for ever; name another topic"
        )


def check_deliveries(config: TopicConfig) -> None:
    """Raise BadInput for a queue that limits deliveries and has no place for the jobs that reach the limit."""
    if lacks_dead_letter(config):
        raise BadInput(
            f"max_deliveries is {config.max_deliveries} and dead_letter null: after so many deliveries a job would "
            "have no place to go; nothing was done, name a topic for dead_letter, or leave max_deliveries out, and a "
            "job is delivered until it is acked"
        )


def lacks_dead_letter(config: TopicConfig) -> bool:
    return config.type == "queue" and config.max_deliveries > 0 and config.dead_letter is None


DELIVERY_FIELDS: Final = frozenset(("max_deliveries", "dead_letter"))


def _decode(text: bytes) -> TopicConfig:
    try:
        fields = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadInput(f"a topic's config is not JSON ({error}); give an object with the fields to set") from None
    if not isinstance(fields, dict):
        raise BadInput(f"a topic's config is {_format_value(fields)}; give an object with the fields to set")
    return _with_fields(TopicConfig(), {name: value for name, value in fields.items() if name in KNOWN})


# A start decodes the same few configs for all topics: the cache takes a twentieth of the time.
_decode_cached = lru_cache(256)(_decode)
_CACHED_TEXT_BYTES_MAX: Final = 1024


def _with_fields(base: TopicConfig, fields: Mapping[str, object]) -> TopicConfig:
    changes: dict[str, Any] = fields_in_ms(fields)
    if "durable" in changes:
        _check_bool("durable", changes["durable"])
    durable = changes.pop("durable", None)
    if changes.get("durability") is None:
        changes["durability"] = base.durability if durable is None else "fsync" if durable else "disk"
    return replace(base, **changes)


class EngineSettings(TypedDict, total=False):
    """The fields of `EngineConfig` by name, as callers give them."""

    wal_shards: int | None
    wal_file_bytes: int
    checkpoint_bytes: int
    checkpoint_ms: Duration
    sync_interval_ms: Duration
    segment_events_max: int
    segment_bytes_max: int
    segment_age_ms_max: Duration
    record_bytes_max: int
    batch_records_max: int
    meta_bytes_max: int
    meta_keys_max: int
    tag_bytes_max: int
    node_bytes_max: int
    topics_max: int
    routers_max: int
    total_bytes_max: int
    groups_max: int
    ledger_records: int
    head_reserve: int
    maps_max: int
    tags_cache_bytes: int
    key_index_bytes: int
    compaction_interval_ms: Duration
    compaction_bytes_per_s: int
    queue_max: int
    queue_history_records: int
    rewrite_dead_percent: int
    rewrite_dead_bytes_min: int
    rewrite_bytes_per_second: int
    cold: str | None
    hot_retain_segments: int
    hot_retain_bytes: int
    cold_compression: ColdCompression
    cold_rate_bytes: int
    cold_cache_bytes: int
    cold_timeout_ms: Duration
    cold_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of one engine: how it uses the machine, and what it refuses to take in."""

    wal_shards: int | None = None
    """How many WAL files are written side by side. More sync in parallel, fewer share a sync. None: by processors.
    May differ from one start to the next."""

    wal_file_bytes: int = 64 << 20
    """A WAL file is reserved at this size and closed when a batch does not fit; where checkpoints lag,
    at up to eight times this size. Space is freed in such steps after a checkpoint."""

    checkpoint_bytes: int = 64 << 20
    """Move records from the WAL to segments after this much, throttled until it is three times as much. Bounds what
    a restart replays and what memory holds."""

    checkpoint_ms: int = 60_000
    """Checkpoint at least this often while there is something to move."""

    sync_interval_ms: int = 50
    """How far a power cut may reach back into topics of class `disk`."""

    segment_events_max: int = 10_000
    """Seal a segment at this many records. Whole segments are dropped, so fewer free space sooner."""

    segment_bytes_max: int = 64 << 20
    """Seal a segment at this many bytes of data. Below 2 GiB: an index has 32 bits for a position."""

    segment_age_ms_max: int = 3_600_000
    """Seal a segment this long after its first record, so that a quiet topic's records reach sealed files.
    0: never by age."""

    record_bytes_max: int = 1 << 20
    """Data and meta of one record together. A larger one is refused."""

    batch_records_max: int = 10_000
    """Records of one write. It is applied as a whole, so it has to fit in memory more than once."""

    meta_bytes_max: int = 16_384
    """Meta of one record: headers, not a second payload."""

    meta_keys_max: int = 64
    """Keys of one record's meta."""

    tag_bytes_max: int = 256
    """A tag. Every tag is in an index that deletes search."""

    node_bytes_max: int = 128
    """The name of the node a record came from."""

    topics_max: int = 100_000
    """Maximum of topics; another one is throttled. Bounds directories and the size of a snapshot. 0: no limit."""

    routers_max: int = 10_000
    """Maximum of routers; another one is throttled. 0: no limit."""

    total_bytes_max: int = 0
    """Live bytes of all topics; a write past it is throttled until something is deleted or evicted. 0: no limit."""

    groups_max: int = 1_000
    """Consumer groups of one topic; another one is throttled. Each is in every snapshot. 0: no limit."""

    ledger_records: int = 1_000_000
    """Newest rows kept in the gap log. 0: no row is written."""

    head_reserve: int = 256
    """Seqs of a `disk` topic reserved by one sync. After a crash up to this many stay unused: larger syncs
    less often and leaves larger holes."""

    maps_max: int = 256
    """How many segment files stay mapped at once. Bounds descriptors, not memory."""

    tags_cache_bytes: int = 32 << 20
    """Memory for the tag indexes of segments; an evicted one is loaded again when needed. 0: keep none."""

    key_index_bytes: int = 128 << 20
    """Memory for the key indexes of topics with compaction. A topic that needs more is handled in parts."""

    compaction_interval_ms: int = 15_000
    """Shortest time between two background compactions of one topic."""

    compaction_bytes_per_s: int = 64 << 20
    """How many bytes of records the background compaction reads per second. 0: no limit."""

    queue_max: int = 4_096
    """Writes that may wait for one WAL shard; another is refused as busy. Bounds memory while the disk is slow."""

    queue_history_records: int = 100_000
    """Job steps kept per queue: claims and their outcomes. 0: none."""

    rewrite_dead_percent: int = 50
    """Rewrite a sealed segment once this share of its data belongs to deleted records. 0: only on request."""

    rewrite_dead_bytes_min: int = 256 << 10
    """Rewrite a sealed segment only if that frees at least this much."""

    rewrite_bytes_per_second: int = 32 << 20
    """How fast segments are rewritten in the background. 0: without a limit."""

    cold: str | None = field(default=None, repr=False)
    """The cold store: a directory, or an address such as s3://bucket/prefix. Old segments move there. None: all stay
    on the disk; segments that moved before are read where they are."""

    hot_retain_segments: int = 4
    """How many of the newest sealed segments of a topic stay on the disk. A topic may have its own number."""

    hot_retain_bytes: int = 0
    """How many bytes of them stay on the disk, at most; 0: no limit. The stricter of the two decides."""

    cold_compression: ColdCompression = "none"
    """How segments are stored in the cold store: `none`, byte for byte, or `zstd`."""

    cold_rate_bytes: int = 64 << 20
    """How many bytes a second the background copies to the cold store. 0: no limit."""

    cold_cache_bytes: int = 64 << 20
    """Memory for blocks that were read from the cold store."""

    cold_timeout_ms: int = 30_000
    """How long a read or a copy waits for the cold store before it fails."""

    cold_threads: int = 4
    """How many requests to the cold store run at once."""

    def __post_init__(self) -> None:
        _check_choice("cold_compression", self.cold_compression, get_args(ColdCompression))
        if self.cold is not None and (type(self.cold) is not str or not self.cold.strip()):
            raise BadInput(f"cold is {_format_value(self.cold)}, it must be a directory or the address of a store")
        for name, (minimum, maximum) in _BOUNDS.items():
            if name != "wal_shards" or self.wal_shards is not None:
                _check_int(name, getattr(self, name), minimum, maximum)

    def shards(self, processors: int) -> int:
        """Return the number of WAL shards on a machine with this many processors."""
        return self.wal_shards or max(min(processors, _SHARDS_DEFAULT_MAX), 1)


_SHARDS_DEFAULT_MAX: Final = 8
_I64_MAX: Final = (1 << 63) - 1
_BOUNDS: Final[dict[str, tuple[int, int]]] = {
    "wal_shards": (1, 100),  # two digits in a directory's name
    "wal_file_bytes": (1, _I64_MAX),
    "checkpoint_bytes": (1, _I64_MAX),
    "checkpoint_ms": (1, _I64_MAX),
    "sync_interval_ms": (1, _I64_MAX),
    "segment_events_max": (1, (1 << 32) - 1),
    "segment_bytes_max": (1, (1 << 31) - 1),
    "segment_age_ms_max": (0, _I64_MAX),
    "record_bytes_max": (1, 1 << 30),  # it has to fit a frame, and a frame a segment
    "batch_records_max": (1, (1 << 32) - 1),
    "meta_bytes_max": (0, 1 << 30),
    "meta_keys_max": (0, _I64_MAX),
    "tag_bytes_max": (0, (1 << 16) - 1),  # a frame's field
    "node_bytes_max": (0, (1 << 16) - 1),
    "topics_max": (0, _I64_MAX),
    "routers_max": (0, _I64_MAX),
    "total_bytes_max": (0, _I64_MAX),
    "groups_max": (0, _I64_MAX),
    "ledger_records": (0, _I64_MAX),
    "head_reserve": (1, 1 << 32),
    "maps_max": (1, _I64_MAX),
    "tags_cache_bytes": (0, _I64_MAX),
    "key_index_bytes": (1 << 10, _I64_MAX),
    "compaction_interval_ms": (1, _I64_MAX),
    "compaction_bytes_per_s": (0, _I64_MAX),
    "queue_max": (1, _I64_MAX),
    "queue_history_records": (0, _I64_MAX),
    "rewrite_dead_percent": (0, 100),
    "rewrite_dead_bytes_min": (0, _I64_MAX),
    "rewrite_bytes_per_second": (0, _I64_MAX),
    "hot_retain_segments": (0, _I64_MAX),
    "hot_retain_bytes": (0, _I64_MAX),
    "cold_rate_bytes": (0, _I64_MAX),
    "cold_cache_bytes": (0, _I64_MAX),
    "cold_timeout_ms": (1, _I64_MAX),
    "cold_threads": (1, 256),
}


def _is_name(name: object) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _check_int(name: str, value: object, minimum: int, maximum: int) -> None:
    # Not isinstance: a bool is an int in Python.
    if type(value) is not int or not minimum <= value <= maximum:
        raise BadInput(f"{name} is {_format_value(value)}, it must be a whole number from {minimum} to {maximum}")


def _check_bool(name: str, value: object) -> None:
    if type(value) is not bool:
        raise BadInput(f"{name} is {_format_value(value)}, it must be true or false")


def _check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    if type(value) is not str or value not in choices:
        raise BadInput(f"{name} is {_format_value(value)}, it must be one of {', '.join(choices)}")


def _nearest(name: object, known: Iterable[str]) -> str:
    # Truncated: the comparison costs the product of both lengths.
    return get_close_matches(str(name)[:_SHOWN_CHARS_MAX].lower(), known, n=1, cutoff=0.0)[0]


def _format_value(value: object) -> str:
    """Format a value for an error message: short and on one line."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_CHARS_MAX:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, str | bytes):
        return repr(value) if len(value) <= _SHOWN_CHARS_MAX else f"{value[:_SHOWN_CHARS_MAX]!r} and more"
    return repr(value) if value is None or isinstance(value, int | float) else f"a {type(value).__name__}"
