"""[shell] Append: admission, seqs, frames, and one place in the shard's queue.

What the ack means is the class's word: `fsync` survives a power cut; `disk` survives kill -9, and
after a power cut its seqs are at least never given to another record; `memory` promises nothing;
`ephemeral` never leaves memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from msgspec.structs import replace

from tidelog.engine import encode, reserve
from tidelog.engine.block import LARGE_BYTES, Told
from tidelog.engine.config import OWN, TopicConfig
from tidelog.engine.core import Core, Shared
from tidelog.engine.encode import Batch, Columns, Parts
from tidelog.engine.idempotency import Pending
from tidelog.engine.reserve import Booked
from tidelog.engine.results import Appended
from tidelog.errors import BadInput, Error, TooLarge, TopicFull
from tidelog.formats import batch as batches
from tidelog.formats import bodies, frame, idx
from tidelog.formats.laid import Laid
from tidelog.types import Buffer
from tidelog.wal import Commit, Stored, Token

_KEY_BYTES_MAX = 256
Records: TypeAlias = Batch | Columns | Parts


class Append(Commit):
    """A staged batch on its way through the WAL."""

    __slots__ = (
        "books",
        "ceiling",
        "core",
        "count",
        "first",
        "kept",
        "key",
        "laid",
        "reserves",
        "shard",
        "token",
        "told",
        "ts_ms",
        "weight",
    )

    def __init__(self, core: Core, first: int, ts_ms: int, batch: Records, key: str | None) -> None:
        self.kept: list[bytes] = []  # its frames, where they stay in memory
        self.laid: Laid | None = None  # and where they do not
        flags = flags_of(batch)
        if isinstance(batch, Batch) and flags is not None and len(batch) > 1 and batch.weight >= LARGE_BYTES:
            self.laid = laid = encode.laid(core.shared.scratch.take, core.id, first, ts_ms, batch, durable=core.durable)
            self.told: Told | None = Told(laid.counts, batch.lengths, flags)
            frames: Sequence[Buffer] = laid.frames
        else:
            self.kept = frames = encode.frames(core.id, first, ts_ms, batch, durable=core.durable)
            self.told = told_of(batch, frames)
        super().__init__(frames, frames=len(frames), durable=core.durable)
        if key is not None:  # in front: a write that breaks off may leave it alone there, and it then does not count
            body = bodies.WriteKey(key=key, first=first, last=first + len(batch) - 1)
            self.precede(frame.encode(body.KIND, topic_id=core.id, ts_ms=ts_ms, data=bodies.encode(body)))
        self.vital = core.name.startswith(OWN)
        self.core, self.first, self.count, self.ts_ms = core, first, len(batch), ts_ms
        self.weight, self.key = batch.weight, key
        self.reserves = core.config.durability == "disk"
        self.ceiling = 0  # what its ack puts on record
        self.books: Booked | None = None  # and what a later sync does
        self.shard = core.shard
        self.token: Token[Appended] = Token(self.shard)

    @property
    def waits(self) -> bool:
        return self.durable or (self.reserves and reserve.is_due(self.core, self.first + self.count - 1))

    def prepare(self) -> None:
        """Disk class: seqs that a crash could give out again are first put on record, for many writes ahead."""
        if not self.reserves:
            return
        last = self.first + self.count - 1
        self.ceiling, self.books = reserve.cover(self, self.core, self.shard, self.first, last, self.ts_ms)

    def done(self, error: Error | None) -> None:
        core = self.core
        last = self.first + self.count - 1
        with core.lock:
            core.staged_records -= self.count
            core.staged_bytes -= self.weight
            reserve.covered(self, core, self.ceiling, self.books, good=error is None)
            if error is None:
                if core.dropped:
                    core.quota.give(self.weight)
                else:
                    self._publish()
            else:
                core.quota.give(self.weight)
            appended = Appended(
                self.first,
                last,
                core.index.head,
                False,
                self.shard.write_us,
                self.shard.sync_us if self.core.durable else 0,
                self.held_us,
            )
            if self.key is not None and error is not None:
                core.window.forget(self.key)
            elif self.key is not None:
                core.window.remember(self.key, appended, core.shared.clock.monotonic_ms())
        self._give()
        if error is None:
            self.token.set(appended)
            core.wake()
        else:
            self.token.fail(error)

    def _publish(self) -> None:
        core, told, laid = self.core, self.told, self.laid
        if laid is None or told is None or self.file is None:
            core.publish(self.first, self.kept, self.count, self.weight, self.ts_ms, kept=True, told=told)
            return
        at = self.at + self.size - sum(map(len, laid.frames))  # behind what `prepare` put in front
        pieces = []
        for made in laid.frames:
            pieces.append(Stored(self.file, at, len(made)))
            at += len(made)
        core.publish_stored(self.first, pieces, told, self.weight, self.ts_ms)

    def _give(self) -> None:
        """The WAL has its frames, or never will: the memory they lie in is the next one's."""
        laid, self.laid, self.pieces = self.laid, None, ()
        if laid is not None:
            self.core.shared.scratch.give(laid.memory)


def flags_of(batch: Records) -> int | None:
    """What the index says of every record of a batch; None where they differ."""
    if not isinstance(batch, Batch) or batch.metas is not None:
        return None
    tag, node, json = batch.tag, batch.node, batch.json
    if not (isinstance(json, bool) and isinstance(tag, bytes) and isinstance(node, bytes)):
        return None
    flags = (idx.JSON if json else 0) | (idx.HAS_TAG if tag else 0) | (idx.HAS_NODE if node else 0)
    return flags | (idx.BATCH if len(batch) > 1 else 0)


def told_of(batch: Records, frames: list[bytes]) -> Told | None:
    """What the index says of a batch, without reading it again for that; None where its records differ."""
    flags = flags_of(batch)
    if not isinstance(batch, Batch) or flags is None:
        return None
    counts = [len(batch)] if len(frames) == 1 else [_records_in(made) for made in frames]
    return Told(counts, batch.lengths, flags)


def _records_in(made: bytes) -> int:
    found = frame.get(made, 0, len(made), check=False)
    assert isinstance(found, frame.Frame), "a frame that was just made is one"
    return batches.count(made, found) if found.kind == frame.APPEND_BATCH else 1


class Synced(Append):
    """A batch that is durable when it is acknowledged, whatever the class of its topic is."""

    __slots__ = ()

    def __init__(self, core: Core, first: int, ts_ms: int, batch: Records, key: str | None) -> None:
        super().__init__(core, first, ts_ms, batch, key)
        self.durable = True


def append(core: Core, batch: Batch | Columns, key: str | None, *, synced: bool = False) -> Token[Appended]:
    """Stage a batch; its token tells when it is acknowledged. Raises before anything was assigned."""
    check_key(key)
    with core.lock:
        core.check_writable()
        shard = core.shard
        if key is not None:
            now_ms, window_ms = core.shared.clock.monotonic_ms(), core.config.idempotency_window_ms
            seen = core.window.lookup(key, now_ms, window_ms)
            if isinstance(seen, Pending):
                return _echo(core, seen.token)
            if seen is not None:
                return Token.ready(shard, replace(seen.outcome, deduped=True))
            core.window.forget_expired(now_ms, window_ms)
        return staged(core, batch, key, Synced if synced else Append)


def staged(core: Core, batch: Records, key: str | None, make: Callable[..., Append] = Append) -> Token[Appended]:
    """Admit a batch, give it seqs and put it in the queue. With the lock held and the topic found writable."""
    _admit(core, batch)
    core.quota.take(batch.weight)
    try:
        first, ts_ms = core.tail + 1, core.stamp()
        if core.ephemeral:
            return _resident(core, first, ts_ms, batch, key)
        commit = make(core, first, ts_ms, batch, key)
        core.submit(commit)
    except BaseException:
        core.quota.give(batch.weight)
        raise
    count = len(batch)
    core.tail = first + count - 1
    core.index.last_ts = ts_ms
    core.staged_records += count
    core.staged_bytes += batch.weight
    if key is not None:
        core.window.hold(key, commit.token)
    return commit.token


def check_key(key: object) -> None:
    """Refuse what is no idempotency key."""
    if key is not None and not (encode.is_text(key) and 0 < len(str(key).encode()) <= _KEY_BYTES_MAX):
        raise BadInput(
            f"an idempotency key is text of 1 to {_KEY_BYTES_MAX} bytes, not {key!r:.80}; nothing was written"
        )


def _echo(core: Core, first: Token[Appended]) -> Token[Appended]:
    """The outcome of a write under way, for another one with its key."""
    token: Token[Appended] = Token(core.shard)

    def tell(known: Token[Appended]) -> None:
        try:
            token.set(replace(known.wait(), deduped=True))
        except Error as error:
            token.fail(error)

    first.add_callback(tell)
    return token


def admit_first(shared: Shared, name: str, config: TopicConfig, batch: Records) -> None:
    """What the first write of a topic that does not exist yet would be refused for."""
    _check_caps(name, config, batch)
    shared.quota.take(batch.weight)
    shared.quota.give(batch.weight)


def _check_caps(name: str, config: TopicConfig, batch: Records) -> None:
    """A write that would not even fit an empty topic."""
    if config.discard == "reject":
        for cap, more, unit in ((config.cap_records, len(batch), "records"), (config.cap_bytes, batch.weight, "bytes")):
            if cap and more > cap:
                raise TooLarge(f"{name}: a write", size=more, limit=cap, unit=unit)


def _admit(core: Core, batch: Records) -> None:
    """A topic that rejects what it has no room for does so before a seq is taken."""
    config, index = core.config, core.index
    if config.discard != "reject":
        return
    _check_caps(core.name, config, batch)
    for cap, held, more in (
        (config.cap_records, index.count + core.staged_records, len(batch)),
        (config.cap_bytes, index.bytes + core.staged_bytes, batch.weight),
    ):
        if cap and held + more > cap:
            raise TopicFull(
                core.name,
                cap_records=config.cap_records,
                cap_bytes=config.cap_bytes,
                head_seq=index.head,
                earliest_seq=index.earliest,
            )


def _resident(core: Core, first: int, ts_ms: int, batch: Records, key: str | None) -> Token[Appended]:
    """An ephemeral topic's record is visible at once and lies in no file."""
    frames = encode.frames(core.id, first, ts_ms, batch, durable=False)
    core.publish(first, frames, len(batch), batch.weight, ts_ms, kept=False, told=told_of(batch, frames))
    core.tail = core.index.head
    appended = Appended(first, core.tail, core.tail)
    if key is not None:
        token: Token[Appended] = Token.ready(core.shard, appended)
        core.window.hold(key, token)
        core.window.remember(key, appended, core.shared.clock.monotonic_ms(), kept=False)
    return Token.ready(core.shard, appended)
