"""A topic, as a program holds it. Every method may be called from any thread."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from tidelog.disk.interrupts import DEFERRED, deferring
from tidelog.engine import append, delete, encode, numbered, pages, read, retention, segments
from tidelog.engine import strong as consistency
from tidelog.engine.config import TopicConfig
from tidelog.engine.core import Core
from tidelog.engine.encode import Batch, Columns, Parts
from tidelog.engine.floors import Gap
from tidelog.engine.groups import Group
from tidelog.engine.ledger import LIMIT, Gaps
from tidelog.engine.numbers import Written
from tidelog.engine.pages import Pass, TextPage
from tidelog.engine.queues.door import Queue
from tidelog.engine.queues.redrive import Redriven, Where, redrive
from tidelog.engine.queues.state import state_of
from tidelog.engine.read import Nodes, OnGap
from tidelog.engine.results import Appended, Deleted, Page, Record, TopicState
from tidelog.engine.segments import Held, Listing
from tidelog.errors import NotAQueue
from tidelog.formats.frame import SEQ_MAX
from tidelog.formats.json_rows import Show
from tidelog.wal import Shard, Token


@deferring("append_nowait", "append_arrow", "append_numbered", "stage", "delete", "seal")
class Topic:
    """A durable, numbered sequence of records. `Engine.topic` makes one."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def __repr__(self) -> str:
        return f"<topic {self.name!r}, head {self.head_seq}>"

    @property
    def core(self) -> Core:
        """What is behind it, for other parts of the engine."""
        return self._core

    # ── what it is ────────────────────────────────────────────────────────────────────────────

    @property
    def name(self) -> str:
        return self._core.name

    @property
    def id(self) -> int:
        return self._core.id

    @property
    def epoch(self) -> int:
        """Changes when a topic of this name is dropped and made again."""
        return self._core.id

    @property
    def config(self) -> TopicConfig:
        return self._core.config

    @property
    def head_seq(self) -> int:
        """The last seq that can be read; 0 before the first write."""
        return self._core.index.head

    @property
    def earliest_seq(self) -> int:
        """The first record that is there; one past the head where none is."""
        return self.state().earliest_seq

    @property
    def evict_floor(self) -> int:
        """The first seq that was not lost to a cap or to age."""
        return self.state().evict_floor

    @property
    def count(self) -> int:
        """Records that are there."""
        return self.state().count

    @property
    def bytes(self) -> int:
        """Bytes of their data and meta."""
        return self.state().bytes

    @property
    def priority(self) -> int:
        """How urgent it is to tell of its records: as configured, or by how lately somebody read them."""
        return self._core.priority()

    @property
    def shard(self) -> Shard:
        """Where its writes wait for the disk."""
        return self._core.shard

    def state(self) -> TopicState:
        """All of the above at one moment, as old records have it at that moment."""
        retention.observe(self._core)
        state = self._core.state()
        retention.harden(self._core, state.evict_floor)
        return state

    @property
    def version(self) -> Hashable:
        """Stands still as long as a read from the same place finds the same records."""
        return self._core.version()

    # ── writing ───────────────────────────────────────────────────────────────────────────────

    def append(
        self,
        records: object,
        *,
        tag: str | Sequence[str | None] | None = None,
        node: str | Sequence[str | None] | None = None,
        meta: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        key: str | None = None,
    ) -> Appended:
        """Write records; return when the topic's class allows it, with the seqs they got.

        A list or a tuple is a batch of records, written as a whole or not at all; anything else is one record. A
        record is bytes, or any JSON value. `tag` (to delete by), `node` (where it comes from) and `meta` are for all of
        them, or lists with one for each. A second write with the same `key` within the topic's window writes nothing
        and returns the first one's seqs.
        """
        batch = encode.prepare(self._core.shared.limits, records, tag, node, meta)
        with DEFERRED:
            token = self._append(batch, key)
            token.push()
        return token.wait()  # where another thread commits, this one may be interrupted: its record is on its way

    def append_nowait(
        self,
        records: object,
        *,
        tag: str | Sequence[str | None] | None = None,
        node: str | Sequence[str | None] | None = None,
        meta: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        key: str | None = None,
    ) -> Token[Appended]:
        """`append` without waiting: the token's `wait` returns what `append` would, or raises what it would."""
        token = self._append(encode.prepare(self._core.shared.limits, records, tag, node, meta), key)
        self._core.shard.want()
        return token

    def append_arrow(self, table: pa.Table | pa.RecordBatch, *, key: str | None = None) -> Appended:
        """Write the rows of a table as one batch: a column `data` (binary or text), and where there are such columns
        `tag`, `node`, `meta` (JSON text) and `json` (whether data is JSON). `seq` and `ts` are not taken over."""
        return self._append(encode.from_table(self._core.shared.limits, table), key).wait()

    def append_numbered(
        self,
        tables: Iterable[pa.Table | pa.RecordBatch] | Parts,
        *,
        writer: str,
        number: int,
        sum: tuple[int, int],
        query_id: str = "",
    ) -> Appended:
        """Write the rows of all these tables, as `append_arrow` takes them, as one batch of a writer that numbers its
        batches: one range of seqs, all of it or nothing, synced whatever the topic's class is.

        A batch that was written before, also before a restart, is not written again: its seqs are returned
        (`deduped`). `sum` says what is in it. The same number with another sum, and a number below one that was
        written, are a BatchConflict.

        `query_id` tells two queries that write under one name apart. Under the id that wrote the newest batch, that
        batch is a repetition whatever its sum: its source may have changed since. Under another id every batch is a
        BatchConflict, because the writer lost its checkpoint. "": not known, only the sum decides.
        """
        parts = tables if isinstance(tables, Parts) else numbered.prepared(self._core.shared.limits, tables)
        return numbered.append_numbered(self._core, parts, writer, number, sum, query_id)

    def numbered(self, writer: str) -> dict[int, Written]:
        """The last batches that this writer has written, by number."""
        with self._core.lock:
            self._core.check()
            return dict(self._core.numbered.get(writer, {}))

    def _append(self, batch: Batch | Columns, key: str | None, *, synced: bool = False) -> Token[Appended]:
        retention.expire(self._core)
        token = append.append(self._core, batch, key, synced=synced)
        if self._core.ephemeral:
            self._core.wake()
        return token

    def stage(self, batch: Batch | Columns, key: str | None = None, *, synced: bool = False) -> Token[Appended]:
        """`append` of a batch that was made before, without waiting and without waking anybody for it: whoever drives
        the commits does. Where old records have to go first (`is_due`) this waits for that. `synced`: it is durable
        when its token is set, in every class but `ephemeral`."""
        return self._append(batch, key, synced=synced)

    @property
    def is_open(self) -> bool:
        """Whether a write is taken however much is there: no cap refuses it, nothing has to expire for it, and there is
        no quota."""
        core = self._core
        config = core.config
        return config.discard == "old" and not config.ttl_ms and not core.shared.limits.total_bytes_max

    @property
    def is_fed(self) -> bool:
        """Whether routers bring records to it."""
        return self._core.lane is not None

    @property
    def is_routed(self) -> bool:
        """Whether routers bring records to it or take them from it."""
        return self._core.lane is not None or bool(self._core.lanes)

    @property
    def is_settled(self) -> bool:
        """Whether `state` can be had without waiting for the disk."""
        return retention.is_settled(self._core)

    def is_settled_for(self, from_seq: int) -> bool:
        """Whether a read from this cursor does not have to make a floor durable first, which waits for the disk."""
        return retention.is_settled(self._core, from_seq)

    @property
    def is_due(self) -> bool:
        """Whether a write would first have to make an expiry durable, which waits for the disk."""
        return retention.is_due(self._core)

    def delete(
        self,
        *,
        match: object = None,
        before_seq: int | None = None,
        seqs: Sequence[int] | None = None,
        actor: str | None = None,
    ) -> Deleted:
        """Delete records: below `before_seq`, by tag (`"order-7"` is that tag, `"order-*"` all that begin so), both,
        or `seqs`. Only what is there now is meant. Readers pass over them in silence; the ledger of gaps tells who did
        it (`actor`) and when."""
        return delete.delete(self._core, match, before_seq, seqs, actor)

    def queue(self) -> Queue:
        """The same topic as a queue: its jobs, handed out under leases. Raises NotAQueue where it is a log."""
        if self._core.config.type != "queue":
            raise NotAQueue(self.name)
        return Queue(self, state_of(self._core))

    def redrive(
        self,
        *,
        to: str | None = None,
        match: object = None,
        where: Where | None = None,
        rate: float | None = None,
        limit: int | None = None,
    ) -> Redriven:
        """Give dead letters back to the queue that each came from, or to the queue `to`, and delete them here.

        All of them, or those whose tag matches (as in `delete`) and for which `where(record)` holds; at most `limit`,
        at most `rate` a second. Each batch is written to its queue before it is deleted: a crash between the two may
        double one batch and never loses one.
        """
        return redrive(self._core, to=to, match=match, where=where, rate=rate, limit=limit)

    def seal(self) -> None:
        """Let the next record start another segment; the next checkpoint completes this one."""
        with self._core.lock:
            self._core.check_writable()
            self._core.index.roll()
            self._core.shared.rolled = True

    # ── reading ───────────────────────────────────────────────────────────────────────────────

    def read(
        self,
        from_seq: int = 0,
        limit: int = 256,
        *,
        node: str | Sequence[str] | None = None,
        bytes_max: int = 1 << 20,
        timeout: float | None = 0.0,
        strong: bool = False,
    ) -> Page:
        """The records behind `from_seq`: it is the last seq the reader has, 0 before the first.

        At most `limit` of them and about `bytes_max` bytes; none of `node`, which is usually the reader's own. Where
        there is nothing yet, wait up to `timeout` seconds for it. `page.next_from_seq` is where to go on, and
        `page.gap` tells of records that were lost before they could be read. `strong`: only records that survive a
        power cut, whatever the topic's consistency is; the read syncs what is published first.
        """
        return read.wait_page(self._core, from_seq, limit, read.nodes_of(node), bytes_max, timeout, strong=strong)

    def follow(
        self,
        from_seq: int = 0,
        *,
        timeout: float | None = None,
        node: str | Sequence[str] | None = None,
        on_gap: OnGap = "fail",
        strong: bool = False,
    ) -> Iterator[Record | Gap]:
        """Records as they are written, until none came for `timeout` seconds; None: for ever.

        Of a topic that was opened for reading, records of the process that writes are seen within about 0.2 s.

        Where records were lost to a cap or to age before they were read: `fail` raises GapFound, `emit` yields the
        Gap in their place, `skip` goes on. `strong`: as for `read`.
        """
        return read.follow(self._core, from_seq, read.nodes_of(node), timeout, on_gap, strong=strong)

    def __iter__(self) -> Iterator[Record | Gap]:
        """All records that are there now."""
        return self.follow(timeout=0.0, on_gap="skip")

    def read_json(
        self,
        from_seq: int,
        limit: int,
        bytes_max: int,
        *,
        nodes: Nodes = frozenset(),
        show: Show,
        strong: bool = False,
    ) -> TextPage:
        """`read`, with records as JSON text that is ready to be sent. `strong`: only what survives a power cut,
        whatever the topic's consistency is."""
        return pages.text_page(self._core, from_seq, limit, nodes, bytes_max, show, strong=strong)

    def is_quick(self, from_seq: int, limit: int = 0, bytes_max: int = 0, *, strong: bool = False) -> bool:
        """Whether `read_json` from here needs memory alone, and may be called where nobody may wait. Without a limit,
        or for a reader that leaves out a node's records: whether they are in no file."""
        return pages.is_quick(self._core, from_seq, limit, bytes_max, strong=strong)

    def at_hand(self, from_seq: int, limit: int, bytes_max: int, *, strong: bool = False) -> TextPage | None:
        """What `read_json` gives where everything is shown, if it is records that are JSON data and nothing else, in
        memory at this moment. None says nothing: ask `is_quick`, or wait for it."""
        return pages.at_hand(self._core, from_seq, limit, bytes_max, strong=strong)

    def is_synced_for(self, strong: bool) -> bool:
        """Whether a read does not have to sync what it is to show first."""
        return consistency.is_settled(self._core, strong)

    def check_strong(self) -> None:
        """Raise BadInput where a strong reader could never be shown anything: the class promises nothing."""
        consistency.check_class(self.name, self.config.durability)

    def scan(
        self,
        from_seq: int = 0,
        to_seq: int | None = None,
        *,
        nodes: Nodes = frozenset(),
        limit: int = SEQ_MAX,
        strong: bool = False,
    ) -> Pass:
        """A pass over many records in bounded memory, as lines or as Arrow batches. `strong`: as for `read`."""
        return Pass(self._core, from_seq, to_seq, nodes, limit, strong=strong)

    def seek(self, ts_ms: int) -> int:
        """The first record of this time (milliseconds since the epoch) or later; one past the head where there is
        none. A reader goes on behind the seq before it."""
        return segments.seek(self._core, ts_ms)

    def group(self, name: str) -> Group:
        """A named, durable place in it, for consumers that share their progress. Made by its first commit."""
        return Group(self._core, name)

    def groups(self) -> list[Group]:
        """Its groups, by name."""
        self._core.check()
        return [Group(self._core, name) for name in sorted(self._core.groups.copy())]

    def gaps(self, from_ms: int | None = None, limit: int = LIMIT) -> Gaps:
        """What was removed of it and why, oldest first, since a moment."""
        return self._core.shared.ledger.rows(self.name, from_ms, limit, topic_id=self.id)

    def segments(self, *, strong: bool = False) -> Listing:
        """What of it lies in files, at this moment; what is newer is the tail. `strong`: as for `read`."""
        return segments.listing(self._core, strong=strong)

    def segment(self, base: int) -> Held | None:
        """The segment whose first seq is `base`, if it lies in files."""
        return segments.one(self._core, base)

    def touch(self, *, read: bool = True) -> None:
        """Count as somebody who looked: at the records, or only at the state. Priorities follow it."""
        self._core.touch(read=read)

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` after every write, drop and close, from the thread that did it, until `unlisten`. It must be
        short and must not wait."""
        self._core.listen(wake)

    def unlisten(self, wake: Callable[[], None]) -> None:
        self._core.unlisten(wake)

    @property
    def dropped(self) -> bool:
        return self._core.dropped

    def to_arrow(
        self,
        from_seq: int = 0,
        to_seq: int | None = None,
        *,
        node: str | Sequence[str] | None = None,
        strong: bool = False,
    ) -> pa.Table:
        """The records behind `from_seq`, up to and with `to_seq`, as a table. Its schema's metadata has, as JSON,
        which seqs of the range are not in it and why: `gap`, the first that were lost, `gaps`, all of them, and
        `counts`. `strong`: as for `read`."""
        return read.table(self._core, from_seq, to_seq, read.nodes_of(node), strong=strong)
