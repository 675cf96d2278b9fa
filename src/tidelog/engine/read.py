"""[hot] Reading a topic: pages of records or of columns, and who waits for the next ones.

A page is made part by part. What is needed of a part is taken under the topic's lock; reading and
decoding happen without it, so a long read stops no writer. Every seq of a page's range is accounted
for: delivered, deleted, expired, evicted, filtered, or a hole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Event
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from tidelog.commitlog.codec import Chunk
from tidelog.engine import floors, retention
from tidelog.engine import strong as consistency
from tidelog.engine.core import Core
from tidelog.engine.encode import check_number, is_text
from tidelog.engine.floors import Gap
from tidelog.engine.parts import Bools, Part, Segment
from tidelog.engine.results import Counts, Page, Record
from tidelog.engine.texts import from_json
from tidelog.engine.watch import WalWatch
from tidelog.errors import BadInput, Corrupt, GapFound, Unavailable
from tidelog.formats import compute as pc
from tidelog.formats import idx
from tidelog.formats import rows as columns_of
from tidelog.formats.frame import SEQ_MAX
from tidelog.formats.rows import Rows, Span, binary, none, to_arrow, values
from tidelog.types import Ints

OnGap: TypeAlias = Literal["fail", "emit", "skip"]
Nodes: TypeAlias = frozenset[bytes]  # whose records a reader does not want
_CHUNK_BYTES = 8 << 20
_NO_LIMIT = 1 << 62
BESIDE_POLL_S = 0.2
_LOOKS = 8  # at a directory that a writer changes
SCHEMA = columns_of.SCHEMA.append(pa.field("json", pa.bool_()))


class Stretch(NamedTuple):
    """Live records of one part, and where the seqs of the stretch went."""

    rows: Rows
    json: Bools
    counts: Counts
    next_from_seq: int
    full: bool  # the next record does not fit the budget any more


class Scan:
    """One pass over a topic from a cursor to the head as it was at the start. It ends before seqs that stand for
    records which a router's source lost: the next one begins with that gap. `through`: it goes on after them; `gap`
    is the first of them and `gaps` are all."""

    chunk_bytes = _CHUNK_BYTES  # of frames that are read at once

    def __init__(
        self,
        core: Core,
        from_seq: int,
        nodes: Nodes,
        to_seq: int | None = None,
        *,
        through: bool = False,
        strong: bool = False,
    ) -> None:
        check_number("from_seq", from_seq, 0, SEQ_MAX)
        if to_seq is not None:
            check_number("to_seq", to_seq, 0, SEQ_MAX)
        retention.observe(core)
        durable = consistency.settle(core) if consistency.is_wanted(core, strong) else SEQ_MAX
        if to_seq is not None and durable < min(to_seq, core.index.head):
            raise consistency.refused(core)  # a range is read whole or not at all
        self._core = core
        self._nodes = nodes if core.config.dedupe_node else frozenset()
        with core.lock:
            core.check()
            index = core.index
            self.earliest, self.marks = index.earliest, index.marks
            # A strong reader's head is the last durable record. A cursor beyond it is not one of another topic.
            self.head = min(index.head, max(durable, from_seq, index.earliest - 1))
            begin = floors.start(from_seq, self.head, self.earliest, self.marks, index.trims)
            self.gap = self._start_gap = begin.gap
            self.cursor = max(begin.cursor, 0)
            self.head = max(self.head, self.cursor)  # also where a gap goes beyond what could be made durable
            self.counts = self._passed(0 if self.gap and self.gap.reason == "recreated" else from_seq, self.cursor)
            ahead = floors.next_trim(self.cursor, index.trims)
            trims = floors.trims_after(self.cursor, index.trims) if through else []
        self.last = self.head if to_seq is None else min(to_seq, self.head)
        self._trims = [span for span in trims if span[0] <= self.last]
        if self._trims and self.gap is None:
            self.gap = self._trim_gap(*self._trims[0])
        if ahead is not None and not through:
            self.last = max(min(self.last, ahead[0] - 1), self.cursor)

    @property
    def gaps(self) -> list[Gap]:
        """What was lost of the seqs that were passed so far, in order."""
        found = [] if self._start_gap is None else [self._start_gap]
        return found + [self._trim_gap(*span) for span in self._trims if span[0] <= self.cursor]

    def _trim_gap(self, lo: int, hi: int) -> Gap:
        return Gap(lo, hi - 1, "source_trim", hi - lo, hi, self.head)

    def _passed(self, lo: int, hi: int) -> Counts:
        """Where seqs (lo, hi] went that lie below the first live one."""
        if lo == hi:
            return Counts()
        evicted = max(min(hi, max(self.marks.cap, self.marks.source)) - lo, 0)
        lo += evicted
        expired = max(min(hi, self.marks.ttl) - lo, 0)
        lo += expired
        if self.gap is not None and self.gap.reason != "recreated":
            more = max(min(hi, self.gap.gap_to) - lo, 0)
            evicted, lo = evicted + more, lo + more
        return Counts(evicted=evicted, expired=expired) + self._gone(lo + 1, max(hi, lo) + 1)

    def _gone(self, first: int, stop: int) -> Counts:
        """Where seqs [first, stop) went, none of which can be read: deleted, or never there."""
        if first >= stop:
            return Counts()
        had = self._core.index.had(first, stop)
        lost = sum(max(min(hi, stop) - max(lo, first), 0) for lo, hi in self._core.index.trims)
        return Counts(deleted=had, evicted=lost, holes=stop - first - had - lost)

    def stretches(self, count_max: int = _NO_LIMIT, bytes_max: int = _NO_LIMIT) -> Iterator[Stretch]:
        """Stretch by stretch, until the end or until these many records or bytes were found."""
        least = 1  # one record in any case, however large
        while self.cursor < self.last and count_max > 0 and bytes_max > 0:
            found = self._stretch(count_max, bytes_max, least)
            if found is None:
                return
            count_max -= len(found.rows)
            bytes_max = 0 if found.full else bytes_max - int(_sizes(found.rows).sum())
            least = 0 if len(found.rows) else least
            self.cursor = found.next_from_seq
            self.counts = self.counts + found.counts
            last = [found]
            del found  # it is the reader's alone: one that is slow may hold this pass for long
            yield last.pop()

    def _stretch(self, count_max: int, bytes_max: int, least: int, *, again: int = _LOOKS) -> Stretch | None:
        first = self.cursor + 1
        core = self._core
        with core.lock:
            index = core.index
            if index.evict_floor > max(first, self.marks.evict_floor):
                return None  # overtaken by eviction: the next page tells of it
            live = min(max(index.earliest, first), self.last + 1)  # what lies below was deleted
            found = next(index.slices(live, self.last + 1), None)
            gone: Bools | None = None
            look: Callable[[], Chunk] | None = None
            base, start, stop = 0, self.last + 1, self.last + 1
            if found is not None:
                part, start, stop = found
                base = part.base
                stop = min(stop, start + max(count_max, 64))
                dead = part.dead()
                gone = None if dead is None else dead[start - part.base : stop - part.base].copy()
                look = part.look(start, stop, min(bytes_max, self.chunk_bytes), compiled=core.shared.limits.kernel)
            counts = self._gone(first, start)
        if look is None:
            return Stretch(none(), np.zeros(0, bool), counts, self.last, full=False)
        try:
            chunk = look()
        except Corrupt as bad:
            if again and found is not None and _looked_again(core, found[0]):
                return self._stretch(count_max, bytes_max, least, again=again - 1)
            core.spoiled(f"{bad.where}, byte {bad.pos}", bad.reason)
            raise
        if chunk.fault is not None and again and found is not None and _looked_again(core, found[0]):
            return self._stretch(count_max, bytes_max, least, again=again - 1)
        if chunk.fault is not None and not len(chunk.rows):
            fault = chunk.fault
            core.spoiled(f"segment {base}, byte {fault.pos}", fault.reason)
            error = Corrupt(f"{core.name}: segment {base}", pos=fault.pos, reason=fault.reason)
            error.seq, error.resume = fault.seq, fault.resume
            raise error
        rows, stop = chunk.rows, min(chunk.next_seq, stop)
        if chunk.fault is not None:
            stop = min(stop, chunk.fault.seq)
        return self._kept(rows, gone, start, stop, counts, count_max, bytes_max, least)

    def _kept(
        self,
        rows: Rows,
        gone: Bools | None,
        start: int,
        stop: int,
        counts: Counts,
        count_max: int,
        bytes_max: int,
        least: int,
    ) -> Stretch:
        """The rows that a reader gets, and how far that is."""
        if (
            gone is None
            and not (self._nodes and rows.node is not None)
            and _fits(rows, start, stop, count_max, bytes_max)
        ):
            # Nearly always: nothing has to be left out.
            return Stretch(
                rows, (idx.flags(rows) & idx.JSON) != 0, counts + Counts(rows=len(rows)), stop - 1, full=False
            )
        seqs = rows.seq - start
        keep: Bools = np.ones(len(rows), bool) if gone is None else ~gone[seqs]
        filtered: Bools = np.zeros(len(rows), bool)
        if self._nodes and rows.node is not None:
            filtered = keep & _among(rows, self._nodes)
            keep &= ~filtered
        which = np.flatnonzero(keep)
        fits = max(int(np.searchsorted(np.cumsum(_sizes(rows)[which]), bytes_max, "right")), least)
        most = min(fits, count_max)
        full = fits < len(which)
        if most < len(which) or 0 < count_max == len(which):  # what is passed over behind the last is the next page's
            stop = start + (int(seqs[which[most - 1]]) + 1 if most else int(seqs[which[0]]))
            which = which[:most]
        inside = seqs < stop - start
        if int(inside.sum()) != stop - start:
            raise Corrupt(
                self._core.name, pos=0, reason=f"seqs {start} to {stop - 1} are not all where their index says"
            )
        hidden = int(filtered[inside].sum())
        deleted = stop - start - len(which) - hidden
        picked = rows if len(which) == len(rows) else rows.pick(which)
        return Stretch(
            picked,
            (idx.flags(picked) & idx.JSON) != 0,
            counts + Counts(rows=len(which), deleted=deleted, filtered=hidden),
            stop - 1,
            full,
        )


def _looked_again(core: Core, part: Part) -> bool:
    """For a reader beside a writer: take the topic as it is on disk now, if files of this part of it are gone. They
    were removed on purpose, or a second look finds them missing as well."""
    look, disk = core.shared.look_again, core.shared.disk
    if look is None or not isinstance(part, Segment):
        return False
    if all(disk.stat(part.home.path(part.base, suffix)) is not None for suffix in (".data", ".idx")):
        return False
    _take_over(core, look())
    return True


def _take_over(core: Core, topics: Mapping[str, Core]) -> None:
    """Make a reader's topic what a second look at the directory has found of it."""
    fresh = next((topic for topic in topics.values() if topic.id == core.id), None)
    with core.lock:
        core.shared.files_synced = False
        if fresh is None:
            core.dropped = True
        else:
            core.index, core.config = fresh.index, fresh.config
    core.check()


def _fits(rows: Rows, start: int, stop: int, count_max: int, bytes_max: int) -> bool:
    """Whether these are all seqs of [start, stop), and no more than asked for."""
    count = len(rows)
    if not 0 < count == stop - start <= count_max or int(_sizes(rows).sum()) > bytes_max:
        return False
    return bool(rows.seq[0] == start) and bool(rows.seq[-1] == stop - 1)


def _sizes(rows: Rows) -> Ints:
    """Bytes of data and meta."""
    return rows.data.size if rows.meta is None else rows.data.size + rows.meta.size


def _among(rows: Rows, nodes: Nodes) -> Bools:
    assert rows.node is not None, "asked of rows with nodes"
    found = pc.is_in(binary(rows.buf, rows.node), pa.array(sorted(nodes), pa.binary()))
    mask: Bools = found.to_numpy(zero_copy_only=False).astype(bool)
    return mask & (rows.node.size > 0)


def nodes_of(node: str | Sequence[str] | None) -> frozenset[bytes]:
    """The nodes whose records a reader does not want: its own, usually."""
    if node is None:
        return frozenset()
    names = [node] if isinstance(node, str) else node
    if not isinstance(names, list | tuple | set | frozenset) or not all(map(is_text, names)):
        raise BadInput("a node is text, or a list of texts; nothing was read")
    return frozenset(name.encode() for name in names if name)


def page(core: Core, from_seq: int, limit: int, nodes: Nodes, bytes_max: int, *, strong: bool = False) -> Page:
    """The next records behind `from_seq`, at most `limit` and about `bytes_max`, at least one where there is one."""
    check_number("limit", limit, 1, SEQ_MAX)
    check_number("bytes_max", bytes_max, 1, SEQ_MAX)
    scan = Scan(core, from_seq, nodes, strong=strong)
    records = [record for stretch in scan.stretches(limit, bytes_max) for record in records_of(stretch)]
    retention.harden_gap(core, scan.gap, scan.marks.evict_floor)
    return Page(records, scan.gap, scan.cursor, scan.head, scan.earliest, scan.counts)


def records_of(stretch: Stretch) -> list[Record]:
    rows, json = stretch.rows, stretch.json
    if not len(rows):
        return []
    datas: list[Any] = values(rows.buf, rows.data)
    try:
        if json.all():
            datas = list(map(from_json, datas))
        elif json.any():
            datas = [from_json(data) if is_json else data for data, is_json in zip(datas, json.tolist(), strict=True)]
    except msgspec.DecodeError as error:
        raise Corrupt(
            "a record", pos=0, reason=f"its checksum holds and it is not the JSON it claims to be: {error}"
        ) from None
    columns = [rows.seq.tolist(), (rows.ts_us // 1000).tolist(), datas]
    if rows.node is None and rows.tag is None and rows.meta is None:
        return list(map(Record, *columns))
    metas = _optional(rows, rows.meta, from_json)
    return list(map(Record, *columns, _optional(rows, rows.tag, _text), _optional(rows, rows.node, _text), metas))


def _text(name: bytes) -> str:
    return name.decode()


def _optional(rows: Rows, span: Span | None, decode: Callable[[bytes], Any]) -> list[Any]:
    """The values of a column that a record may lack."""
    return [None] * len(rows) if span is None else [decode(v) if v else None for v in values(rows.buf, span)]


def table(core: Core, from_seq: int, to_seq: int | None, nodes: Nodes, *, strong: bool = False) -> pa.Table:
    """Everything behind `from_seq` up to `to_seq` as columns. What is missing is in the schema's metadata: `gap`, the
    first, `gaps`, all of them, and `counts`, as JSON."""
    scan = Scan(core, from_seq, nodes, to_seq, through=True, strong=strong)
    batches = []
    for stretch in scan.stretches():
        if len(stretch.rows):
            batch = to_arrow(stretch.rows, compiled=core.shared.limits.kernel)
            batches.append(batch.append_column("json", pa.array(stretch.json)))
    retention.harden_gap(core, scan.gap, scan.marks.evict_floor)
    told = {
        b"gap": msgspec.json.encode(None if scan.gap is None else scan.gap._asdict()),
        b"gaps": msgspec.json.encode([gap._asdict() for gap in scan.gaps]),
        b"counts": msgspec.json.encode(scan.counts._asdict()),
    }
    return pa.Table.from_batches(batches, schema=SCHEMA).replace_schema_metadata(told)


def wait_page(
    core: Core,
    from_seq: int,
    limit: int,
    nodes: Nodes,
    bytes_max: int,
    timeout: float | None,
    *,
    strong: bool = False,
) -> Page:
    """`page`, and where there is nothing yet, wait for it this many seconds; None: as long as it takes.

    A writer in this process wakes the reader. A reader beside another process's writer looks at the WAL's files every
    `BESIDE_POLL_S`, and at the directory where they have changed."""
    if timeout == 0:
        return page(core, from_seq, limit, nodes, bytes_max, strong=strong)
    woken, left = Event(), timeout
    core.listen(woken.set)  # before the first look: a record between look and wait must not be missed
    try:
        while True:
            woken.clear()
            found = page(core, from_seq, limit, nodes, bytes_max, strong=strong)
            if found.records or found.gap or not found.caught_up or found.next_from_seq > from_seq:
                return found
            if core.shared.look_again is None:
                if not woken.wait(timeout):
                    return found
                continue
            if left is not None and left <= 0:
                return found
            pause = BESIDE_POLL_S if left is None else min(left, BESIDE_POLL_S)
            woken.wait(pause)
            left = None if left is None else left - pause
            _look_beside(core)
    finally:
        core.unlisten(woken.set)


def _look_beside(core: Core) -> None:
    """Take over what a writer of another process has done to a reader's topic since the last look."""
    shared = core.shared
    assert shared.look_again is not None, "asked of a reader"
    core.check()
    if core.watch is None:
        core.watch = WalWatch(shared.disk, shared.root)
    if core.watch.changed():
        try:
            topics = shared.look_again()
        except Unavailable:  # the writer was faster than the look
            core.watch.look_once_more()
            return
        _take_over(core, topics)


def follow(
    core: Core, from_seq: int, nodes: Nodes, timeout: float | None, on_gap: OnGap, *, strong: bool = False
) -> Iterator[Record | Gap]:
    """Records as they come, for ever or until none came for `timeout` seconds."""
    if on_gap not in ("fail", "emit", "skip"):
        raise BadInput(f"on_gap is fail, emit or skip, not {on_gap!r}")
    while True:
        found = wait_page(core, from_seq, 1000, nodes, 1 << 20, timeout, strong=strong)
        if found.gap is not None and on_gap == "fail":
            raise GapFound(core.name, found.gap)
        if found.gap is not None and on_gap == "emit":
            yield found.gap
        if found.next_from_seq == from_seq and found.gap is None:
            return
        from_seq = found.next_from_seq
        yield from found.records
