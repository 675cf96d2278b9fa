"""A forwarder: all routers from one topic to another, with a common cursor.

    source  ──────●──────────────────▶ head        `cursor`: the source's seq up to which all routers have forwarded
                  └ cursor
    dest    ─ D D C C C ─ D ─ C C ───▶ head        C copies, D records written to it directly

A copy is a record of the dest and is logged there. A Forward frame before its frames, in the same commit, holds the
seqs of the source that were copied, so replay finds records and cursor together or neither (docs/decisions/0028).
Records that the source lost before they were forwarded are a Forward frame alone.

One pass at a time: it reads the source with the source's lock only, assigns seqs with the dest's lock, and is
published by the committer as any write is. No thread holds the locks of two topics. A pass reads a chunk of the source,
chooses the copies, and fits them to the dest's capacity:

    cursor │ record │ record │ lost │ deleted │ hole │ record …
           └─── one chunk: seqs of one part, or of no part ────┘

    copies   records that routers forward: they get consecutive seqs
    trim     records that were lost before they were forwarded: as many seqs of the dest, and a gap there
    skip     records that were deleted before they were forwarded, and seqs that never had a record: no seqs

Reading takes the source's lock to choose a part and reads without a lock. Records older than the source's `ttl_ms`
count as lost, whether they have expired yet or not. A record, and the loss of one, passes at most HOPS_MAX routers. If
the dest has no capacity the pass ends before that record and continues there later, which keeps the order.

A large record is a pass of its own: its blob is copied to the dest, without a lock, before the copy is committed. A
blob that cannot be read, or that an ephemeral dest cannot keep, is a loss.

Copies are columns, without a Python object per record. A copy has the data, meta and JSON flag of its record; node and
tag as its router is configured. A router with `exactly_once` adds the origin of the copy to its meta; that text is
built record by record and may exceed the size limit for the meta of writers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from threading import Lock
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from tidelog.commitlog.codec import Fault
from tidelog.disk.process import DEFER_SIGNALS
from tidelog.engine import batch_encoder
from tidelog.engine.batch_encoder import ArrowBatch, Batch
from tidelog.engine.large_append import BlobWriter, copy_blob
from tidelog.engine.routing.router import HOPS_MAX, Router
from tidelog.engine.segment import BoolArray, SizeCount
from tidelog.engine.topic_state import PendingReservation, TopicState
from tidelog.errors import Corrupt, Error, NewerFormat, Throttled
from tidelog.formats import control_frames, frame, large_record, segment_index
from tidelog.formats import lazy_compute as pc
from tidelog.formats.control_frames import Forward, ForwardEvent, Match, MatchOp
from tidelog.formats.large_record import BlobRef
from tidelog.formats.rows import Rows, Span, copy_values, empty_rows, to_binary_array
from tidelog.types import Ints
from tidelog.wal import Commit, CommitFuture

PASS_RECORDS_MAX: Final = 1024
PASS_EMPTY_SEQS_MAX: Final = 1 << 20  # seqs without a record in one chunk
_PASS_BYTES_MAX: Final = 4 << 20
ChunkKind: TypeAlias = Literal["records", "lost", "deleted", "hole"]


# ── the plan of a pass ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class SourceChunk:
    """Seqs [first, stop) of a source."""

    first: int
    stop: int
    kind: ChunkKind  # "records": `rows` has one for every seq
    rows: Rows
    lost: int = 0  # number of first rows that were lost to a cap or to age
    deleted: BoolArray | None = None  # which rows were deleted
    hops: Ints | None = None  # hop count of each row; None: 0


def read_source(source: TopicState, cursor: int) -> SourceChunk | None:
    """Return the next chunk after `cursor`; None if there is none."""
    first = cursor + 1
    with source.lock:
        index = source.index
        stop = index.head + 1
        if first >= stop:
            return None
        floor = max(index.evict_floor, _source_expiry(source))
        piece = next(index.slices(first, stop), None)
        if piece is None or piece.first > first:
            return _empty_chunk(source, first, stop if piece is None else piece.first, floor)
        part, stop = piece.part, min(piece.stop, first + PASS_RECORDS_MAX)
        read = part.reader(first, stop, _PASS_BYTES_MAX)
        lost = max(min(floor, stop) - first, 0)
        mask = part.deleted_mask()
        deleted: BoolArray | None = None if mask is None else mask[piece.lo : piece.lo + stop - first].copy()
        if index.earliest > first:
            deleted = np.zeros(stop - first, bool) if deleted is None else deleted
            deleted[: index.earliest - first] = True
        hops = _hops_between(source, first, stop)
    chunk = read()
    stop = min(stop, chunk.next_seq)
    if chunk.fault is not None:
        if not len(chunk.rows):
            return _damaged_chunk(source, first, chunk.fault)
        stop = min(stop, chunk.fault.seq)
    count = stop - first
    rows = chunk.rows.between(first, stop)
    if len(rows) != count:
        return _damaged_chunk(source, first, Fault(first, stop, 0, "records are missing that the index has"))
    if rows.blob_bytes is not None and rows.blob_bytes.any():
        count = max(int((rows.blob_bytes > 0).argmax()), 1)
        rows, stop = rows.slice(0, count), first + count
    return SourceChunk(
        first,
        stop,
        "records",
        rows,
        min(lost, count),
        None if deleted is None else deleted[:count],
        None if hops is None else hops[:count],
    )


def _source_expiry(source: TopicState) -> int:
    """Return one past the last record that is older than the source's `ttl_ms`. With the source's lock held."""
    if not source.config.ttl_ms:
        return 0
    expiry = source.index.floor_for_age(source.context.now_ms() - source.config.ttl_ms)
    return source.limit_by_holds(expiry) if expiry > source.index.evict_floor else expiry


def _hops_between(source: TopicState, first: int, stop: int) -> Ints | None:
    return source.hops.between(first, stop) if source.hops else None


def _empty_chunk(source: TopicState, first: int, stop: int, floor: int) -> SourceChunk:
    """Return a chunk of seqs without a part: lost, deleted, or never assigned. With the lock held."""
    index = source.index
    stop = min(stop, first + PASS_EMPTY_SEQS_MAX)
    for lo, hi in index.trimmed_ranges:
        if hi > first:
            if lo <= first:
                hi = min(hi, stop)
                return SourceChunk(first, hi, "lost", empty_rows(), hops=_hops_between(source, first, hi))
            stop = min(stop, lo)
            break
    for lo, hi in index.deleted_ranges:
        if hi <= first:
            continue
        if lo > first:
            return SourceChunk(first, min(lo, stop), "hole", empty_rows())
        stop = min(hi, stop)
        if first < floor:
            stop = min(stop, floor)
            return SourceChunk(first, stop, "lost", empty_rows(), hops=_hops_between(source, first, stop))
        return SourceChunk(first, stop, "deleted", empty_rows())
    return SourceChunk(first, stop, "hole", empty_rows())


def _damaged_chunk(source: TopicState, first: int, fault: Fault) -> SourceChunk:
    """Return unreadable records as a lost chunk: waiting for them would block all later records."""
    stop = max(fault.resume, first + 1)
    message = f"{source.name}: seqs {first} to {stop - 1} could not be forwarded: {fault.reason}"
    if message not in source.damage:
        source.add_damage(message)
    with source.lock:
        return SourceChunk(first, stop, "lost", empty_rows(), hops=_hops_between(source, first, stop))


_META_KEYS_MAX: Final = 64
_ROUTER_META_KEY: Final = "_topics_router"
_ORIGINAL_META_KEY: Final = "_topics_original_meta"
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.Encoder().encode


class CopiedColumns(NamedTuple):
    """The copies of a chunk as columns, ordered by row, then by router."""

    rows: Rows  # of the source
    row_indexes: Ints  # the row of each copy
    router_indexes: Ints  # the router of each copy
    size: Ints  # bytes of data and meta of each copy
    hops: Ints | None  # hop count of each copy; None: 1
    metas: list[bytes] | None  # None: those of the records
    refs: Sequence[BlobRef] = ()  # of a large record: its blob for each copy
    blobs: Sequence[BlobWriter] = ()  # and the files, until a frame names them

    def __len__(self) -> int:
        return len(self.row_indexes)

    def slice(self, lo: int, hi: int) -> CopiedColumns:
        hops = None if self.hops is None else self.hops[lo:hi]
        metas = None if self.metas is None else self.metas[lo:hi]
        return CopiedColumns(
            self.rows,
            self.row_indexes[lo:hi],
            self.router_indexes[lo:hi],
            self.size[lo:hi],
            hops,
            metas,
            self.refs[lo:hi],
            self.blobs[lo:hi],
        )

    def with_blobs(self, refs: Sequence[BlobRef], blobs: Sequence[BlobWriter]) -> CopiedColumns:
        """Return the copies with their blobs. Not `_replace`, which needs the length to be that of the tuple."""
        return CopiedColumns(
            self.rows, self.row_indexes, self.router_indexes, self.size, self.hops, self.metas, refs, blobs
        )

    def filter(self, keep: BoolArray) -> CopiedColumns:
        hops = None if self.hops is None else self.hops[keep]
        metas = None if self.metas is None else list(compress(self.metas, keep.tolist()))
        return CopiedColumns(self.rows, self.row_indexes[keep], self.router_indexes[keep], self.size[keep], hops, metas)


def choose_copies(routers: Sequence[Router], source_id: int, chunk: SourceChunk) -> CopiedColumns:
    """Return the copies of a chunk, as if none of its records was deleted or lost."""
    rows = chunk.rows
    passes = np.empty((len(rows), len(routers)), bool)
    below_limit = np.ones(len(rows), bool) if chunk.hops is None else chunk.hops < HOPS_MAX
    for number, router in enumerate(routers):
        passes[:, number] = below_limit & (rows.seq > router.start)
        if router.match is not None:
            passes[:, number] &= _tag_matches(rows, router.match)
    row_indexes, router_indexes = np.nonzero(passes)
    hops = None if chunk.hops is None else chunk.hops[row_indexes] + 1
    metas = (
        _metas_with_evidence(rows, row_indexes, router_indexes, routers, source_id)
        if any(router.exactly_once for router in routers)
        else None
    )
    size = rows.data_lengths()[row_indexes]
    if metas is not None:
        size = size + np.fromiter(map(len, metas), np.int64, len(metas))
    elif rows.meta is not None:
        size = size + rows.meta.size[row_indexes]
    return CopiedColumns(rows, row_indexes, router_indexes, size, hops, metas)


def _tag_matches(rows: Rows, match: Match) -> BoolArray:
    if rows.tag is None:
        return np.zeros(len(rows), bool)
    tags, value = to_binary_array(rows.buf, rows.tag), match.value.encode()
    matches = pc.equal(tags, value) if match.op is MatchOp.EXACT else pc.starts_with(tags, pattern=value)
    mask: BoolArray = matches.to_numpy(zero_copy_only=False).astype(bool)
    return mask & (rows.tag.size > 0)


class EncodedCopies(NamedTuple):
    """Frames of copies with consecutive seqs. After a crash the WAL has all of them or none."""

    frames: list[bytes]
    records: int
    data_bytes: int
    counts: tuple[int, ...]  # copies of each router
    hops: tuple[int, ...]  # pairs of a number of copies, in order, and their hop count
    last: int  # the seq of the last record in the source
    blob_ids: tuple[int, ...] = ()  # of copies of a large record


def encode_copies(
    dest_id: int, first: int, copies: CopiedColumns, routers: Sequence[Router], *, ts_ms: int, durable: bool
) -> Iterator[EncodedCopies]:
    """Encode copies with the seqs from `first` on and the time `ts_ms`."""
    rows = copies.rows
    json = (segment_index.record_flags(rows)[copies.row_indexes] & segment_index.JSON) != 0
    for lo, hi in pairwise([0, *(np.flatnonzero(json[1:] != json[:-1]) + 1).tolist(), len(copies)]):
        part = copies.slice(lo, hi)
        if part.refs:
            yield _encode_large_copies(dest_id, first + lo, part, routers, ts_ms=ts_ms, durable=durable)
            continue
        batch = _copies_batch(part, routers, bool(json[lo]))
        frames = batch_encoder.encode_frames(dest_id, first + lo, ts_ms, batch, durable=durable)
        counts = tuple(np.bincount(part.router_indexes, minlength=len(routers)).tolist())
        yield EncodedCopies(frames, hi - lo, batch.weight, counts, _hop_runs(part), int(rows.seq[part.row_indexes[-1]]))


def _encode_large_copies(
    dest_id: int, first: int, copies: CopiedColumns, routers: Sequence[Router], *, ts_ms: int, durable: bool
) -> EncodedCopies:
    """Encode the copies of one large record, one frame each."""
    rows = copies.rows
    tag, node, meta = (
        b"" if span is None else copy_values(rows.buf, span)[0] for span in (rows.tag, rows.node, rows.meta)
    )
    frames: list[bytes] = []
    for number, (ref, router_index) in enumerate(zip(copies.refs, copies.router_indexes.tolist(), strict=True)):
        router = routers[router_index]
        more = frame.MORE if number + 1 < len(copies) else 0
        frames.append(
            large_record.encode_frame(
                dest_id,
                first + number,
                ts_ms,
                ref,
                tag=tag if router.preserve_tag else b"",
                node=node if router.preserve_node else b"",
                meta=meta if copies.metas is None else copies.metas[number],
                flags=(frame.DURABLE if durable else 0) | more,
            )
        )
    counts = tuple(np.bincount(copies.router_indexes, minlength=len(routers)).tolist())
    ids = tuple(ref.blob_id for ref in copies.refs)
    return EncodedCopies(frames, len(copies), int(copies.size.sum()), counts, _hop_runs(copies), int(rows.seq[0]), ids)


def _hop_runs(copies: CopiedColumns) -> tuple[int, ...]:
    if copies.hops is None:
        return (len(copies), 1)
    hops = copies.hops
    edges = [0, *(np.flatnonzero(hops[1:] != hops[:-1]) + 1).tolist(), len(hops)]
    return tuple(value for lo, hi in pairwise(edges) for value in (hi - lo, int(hops[lo])))


def _copies_batch(copies: CopiedColumns, routers: Sequence[Router], json: bool) -> Batch | ArrowBatch:
    rows, row_indexes, router_indexes = copies.rows, copies.row_indexes, copies.router_indexes
    keeps_tag = np.array([router.preserve_tag for router in routers])[router_indexes]
    keeps_node = np.array([router.preserve_node for router in routers])[router_indexes]
    tags = _optional_column(rows, rows.tag, row_indexes, keeps_tag)
    nodes = _optional_column(rows, rows.node, row_indexes, keeps_node)
    if copies.metas is None:
        metas = _optional_column(rows, rows.meta, row_indexes, None)
    else:
        metas = pa.array(copies.metas, pa.binary())
    data = to_binary_array(rows.buf, rows.data.take(row_indexes))
    if len(row_indexes) > 1 or metas is not None:
        return ArrowBatch(data, json, tags, nodes, metas)
    tag, node = (b"" if column is None else column[0].as_py() or b"" for column in (tags, nodes))
    return Batch([data[0].as_py()], json, tag, node)


def _optional_column(rows: Rows, span: Span | None, row_indexes: Ints, keep: BoolArray | None) -> pa.Array | None:
    """Return a column that records may lack; None if all of them do."""
    if span is None or not span.size[row_indexes].any() or not (keep is None or keep.any()):
        return None
    picked = to_binary_array(rows.buf, span.take(row_indexes))
    return picked if keep is None or keep.all() else pc.if_else(pa.array(keep), picked, None)


def _metas_with_evidence(
    rows: Rows, row_indexes: Ints, router_indexes: Ints, routers: Sequence[Router], source_id: int
) -> list[bytes]:
    """Return the metas of copies, with their origin if the router has `exactly_once`."""
    metas = [b""] * len(row_indexes) if rows.meta is None else copy_values(rows.buf, rows.meta.take(row_indexes))
    copies = zip(metas, rows.seq[row_indexes].tolist(), map(routers.__getitem__, router_indexes.tolist()), strict=True)
    return [encode_evidence(old, router, source_id, seq) if router.exactly_once else old for old, seq, router in copies]


def encode_evidence(old: bytes, router: Router, source_id: int, seq: int) -> bytes:
    """Return the meta of a copy with its origin. An object below the key limit gets one more key; any other meta is
    kept beside it."""
    evidence = {
        "idempotency_key": f"router:{router.name}:{source_id}:{source_id}:{seq}",
        "router": router.name,
        "source_topic": router.source,
        "source_topic_id": source_id,
        "source_epoch": source_id,
        "source_seq": seq,
    }
    if not old:
        return _encode({_ROUTER_META_KEY: evidence})
    try:
        fields = _object_decoder.decode(old)
    except msgspec.DecodeError:
        fields = None
    if fields is None or (len(fields) >= _META_KEYS_MAX and _ROUTER_META_KEY not in fields):
        return _encode({_ROUTER_META_KEY: evidence, _ORIGINAL_META_KEY: msgspec.Raw(old)})
    return _encode({**fields, _ROUTER_META_KEY: evidence})


ForwardAction: TypeAlias = Literal["copies", "trim", "skip"]
_NO_LIMIT = 1 << 62


class ForwardStep(NamedTuple):
    """One step over seqs `first` to `last` of the source."""

    action: ForwardAction
    first: int
    last: int
    counts: tuple[int, ...]  # copies or lost records of each router
    copies: CopiedColumns | None = None
    hops: int = 1  # trim: hop count of the lost records, including this router

    @property
    def total(self) -> int:
        return sum(self.counts)


def plan_steps(routers: Sequence[Router], source_id: int, chunk: SourceChunk) -> list[ForwardStep]:
    """Return the steps over a chunk, in order."""
    last = chunk.stop - 1
    if chunk.kind == "lost":
        return _loss_steps(routers, chunk, chunk.stop - chunk.first)
    if chunk.kind != "records":
        return [ForwardStep("skip", chunk.first, last, ())]
    steps = _loss_steps(routers, chunk, chunk.lost) if chunk.lost else []
    copies = choose_copies(routers, source_id, chunk)
    keep = copies.row_indexes >= chunk.lost
    if chunk.deleted is not None:
        keep &= ~chunk.deleted[copies.row_indexes]
    first = chunk.first + chunk.lost
    if first <= last:
        steps.append(_copy_step(routers, copies if keep.all() else copies.filter(keep), first, last))
    return steps


def _copy_step(routers: Sequence[Router], copies: CopiedColumns, first: int, last: int) -> ForwardStep:
    counts = np.bincount(copies.router_indexes, minlength=len(routers)).tolist()
    return ForwardStep("copies", first, last, tuple(counts), copies)


def _loss_steps(routers: Sequence[Router], chunk: SourceChunk, count: int) -> list[ForwardStep]:
    """Return the steps over the first `count` seqs of a chunk, which were lost: one for each run of equal hops."""
    if chunk.hops is None:
        return [_loss_step(routers, chunk.first, chunk.first + count - 1, 0)]
    hops = chunk.hops[:count]
    edges = (np.flatnonzero(hops[1:] != hops[:-1]) + 1).tolist()
    runs = pairwise([0, *edges, count])
    return [_loss_step(routers, chunk.first + lo, chunk.first + hi - 1, int(hops[lo])) for lo, hi in runs]


def _loss_step(routers: Sequence[Router], first: int, last: int, hops: int) -> ForwardStep:
    if hops >= HOPS_MAX:
        return ForwardStep("skip", first, last, ())
    counts = tuple(max(last - max(first - 1, router.start), 0) for router in routers)
    return ForwardStep("trim", first, last, counts, hops=hops + 1)


class DestCapacity(NamedTuple):
    """The records and bytes that a dest accepts now."""

    records: int
    bytes: int


def dest_capacity(dest: TopicState) -> DestCapacity:
    """Return the capacity of a dest. With its lock held."""
    config, index = dest.config, dest.index
    records = size = _NO_LIMIT
    if config.discard == "reject":
        if config.cap_records:
            records = max(config.cap_records - index.count - dest.staged_records, 0)
        if config.cap_bytes:
            size = max(config.cap_bytes - index.bytes - dest.staged_bytes, 0)
    left = dest.quota.available
    return DestCapacity(records, size if left is None else min(size, left))


def fit_steps(
    routers: Sequence[Router], steps: Sequence[ForwardStep], capacity: DestCapacity
) -> tuple[list[ForwardStep], bool]:
    """Return the steps that fit, the last one cut before the first record that does not, and whether one did not."""
    taken: list[ForwardStep] = []
    records, size = capacity
    for step in steps:
        copies = step.copies
        if copies is None or not len(copies):
            taken.append(step)
            continue
        fits = min(int(np.searchsorted(np.cumsum(copies.size), size, "right")), records)
        if fits < len(copies):
            row = int(copies.row_indexes[fits])  # all copies of a record or none
            fits = int(np.searchsorted(copies.row_indexes, row))
            first_left = int(copies.rows.seq[row])
            if first_left > step.first:
                taken.append(_copy_step(routers, copies.slice(0, fits), step.first, first_left - 1))
            return taken, True
        records, size = records - len(copies), size - int(copies.size.sum())
        taken.append(step)
    return taken, False


# ── the forwarder ─────────────────────────────────────────────────────────────────────────────


class ForwardBatch(NamedTuple):
    """One Forward frame of a pass and the copies that follow it."""

    body: Forward
    copies: EncodedCopies | None  # None: records that the source lost

    @property
    def first(self) -> int:
        return self.body.dest_head - self.body.total + 1


class Forwarder:
    """All routers from `source` to `dest`. `lock` is held during a pass and during a change of the routers."""

    def __init__(self, source: TopicState, dest: TopicState, cursor: int) -> None:
        self.source, self.dest = source, dest
        self.routers: tuple[Router, ...] = ()
        self.forwarded: dict[str, int] = {}
        self.cursor = cursor
        self.saved_cursor = cursor  # as the newest manifest has it: replay may begin there
        self.lock = Lock()
        self.is_blocked = False  # the dest has no capacity for the next record
        self.is_ended = False

    def run(self) -> bool:
        """Forward all records that the source has now; return whether there were any."""
        target, moved = self.source.index.head, False
        while self.cursor < target and self.step():
            moved = True
        return moved

    def step(self) -> bool:
        """Run one pass; return False if there is nothing to forward or no capacity for it."""
        with DEFER_SIGNALS, self.lock:
            return self.begin_pass()()

    def begin_pass(self) -> Callable[[], bool]:
        """Stage a pass; return a function that waits for its commit. The caller holds `lock` over both calls."""
        source, dest, routers = self.source, self.dest, self.routers
        context = dest.context
        if self.is_ended or not routers or context.closing or not context.shards or source.is_dropped:
            return _nothing_done
        chunk = read_source(source, self.cursor)
        if chunk is None:
            return _nothing_done
        steps = plan_steps(routers, source.id, chunk)
        blobs: list[BlobWriter] = []
        if chunk.rows.blob_bytes is not None and any(step.copies is not None and len(step.copies) for step in steps):
            with dest.lock:
                if fit_steps(routers, steps, dest_capacity(dest))[1]:
                    self.is_blocked = True
                    return _nothing_done
            steps = self._copy_blobs(chunk, steps, blobs)
        try:
            return self._stage(steps)
        finally:
            for blob in blobs:
                blob.discard()  # those that a frame names are kept

    def _copy_blobs(
        self, chunk: SourceChunk, steps: Sequence[ForwardStep], written: list[BlobWriter]
    ) -> list[ForwardStep]:
        """Copy the blob of a large record for each of its copies."""
        source, dest, rows = self.source, self.dest, chunk.rows
        ref = large_record.read_ref(rows.buf, int(rows.frame_pos[0]))
        out: list[ForwardStep] = []
        try:
            if dest.is_ephemeral:
                raise Corrupt(
                    source.name, pos=0, reason=f"{dest.name} is ephemeral and keeps no record of {ref.length} bytes"
                )
            for step in steps:
                if step.copies is None or not len(step.copies):
                    out.append(step)
                    continue
                dest.context.enable_large_records()
                refs = []
                for _ in range(len(step.copies)):
                    copied, writer = copy_blob(source, ref, dest)
                    written.append(writer)
                    refs.append(copied)
                out.append(step._replace(copies=step.copies.with_blobs(refs, written[-len(refs) :])))
        except (Corrupt, NewerFormat, FileNotFoundError) as error:
            reason = error.reason if isinstance(error, Corrupt) else str(error)
            lost = _damaged_chunk(source, chunk.first, Fault(chunk.first, chunk.stop, 0, reason))
            return plan_steps(self.routers, source.id, lost)
        return out

    def _stage(self, steps: Sequence[ForwardStep]) -> Callable[[], bool]:
        """Stage these steps; return a function that waits for their commit."""
        dest, routers, context = self.dest, self.routers, self.dest.context
        with dest.lock:
            if dest.is_dropped or context.closing:
                return _nothing_done
            taken, self.is_blocked = fit_steps(routers, steps, dest_capacity(dest))
            if not taken:
                return _nothing_done
            if not any(step.total for step in taken):
                # Not logged: after a crash the same seqs are read again.
                self.cursor = taken[-1].last
                dest.mark_dirty()
                return _pass_done
            try:
                commit = self._submit(taken)
            except Throttled:
                self.is_blocked = True
                return _nothing_done
        if commit is None:
            dest.notify_listeners()
            return _pass_done
        return commit.future.wait

    def _submit(self, taken: Sequence[ForwardStep]) -> ForwardCommit | None:
        """Assign seqs to these steps and submit them; return None if they are applied already. With the dest's lock
        held."""
        dest = self.dest
        weight = sum(int(step.copies.size.sum()) for step in taken if step.copies is not None)
        dest.quota.acquire(weight)
        try:
            if dest.is_ephemeral and any(step.copies is not None and step.copies.refs for step in taken):
                raise Throttled("large records of an ephemeral topic", max=0, used=0, asked=1)  # it became one just now
            ts_ms = dest.next_timestamp_ms()
            batches = list(_plan_batches(self, taken, dest.last_assigned_seq + 1, ts_ms))
            if dest.is_ephemeral:
                apply_batches(self, batches, ts_ms)
                self.cursor = taken[-1].last
                dest.mark_dirty()
                return None
            commit = ForwardCommit(self, batches, taken[-1].last, weight, ts_ms)
            dest.submit(commit)
        except BaseException:
            dest.quota.release(weight)
            raise
        for step in taken:
            for blob in step.copies.blobs if step.copies is not None else ():
                blob.keep()
        dest.last_assigned_seq = commit.last
        dest.staged_router_frame += len(batches)
        dest.index.last_ts = ts_ms
        dest.staged_records += commit.count
        dest.staged_bytes += weight
        return commit

    def encode_router_frame(self, body: control_frames.Body, number: int) -> bytes:
        """Encode a frame about the routers of the dest; its seq is the number."""
        return self.dest.encode_control(body, seq=number, ts_ms=self.dest.context.now_ms())


def _nothing_done() -> bool:
    return False


def _pass_done() -> bool:
    return True


class ForwardCommit(Commit):
    """The commit of a pass in the dest's shard."""

    __slots__ = (
        "batches",
        "count",
        "cursor_after",
        "data_bytes",
        "forwarder",
        "last",
        "needs_reservation",
        "pending_reservation",
        "reserved_ceiling",
        "shard",
        "ts_ms",
    )
    future: CommitFuture[bool]

    def __init__(self, forwarder: Forwarder, batches: list[ForwardBatch], last: int, weight: int, ts_ms: int) -> None:
        dest = forwarder.dest
        pieces: list[bytes] = []
        for number, (body, copies) in enumerate(batches, dest.staged_router_frame + 1):
            pieces.append(forwarder.encode_router_frame(body, number))
            pieces += () if copies is None else copies.frames
        has_losses = any(copies is None for _, copies in batches)
        # A gap that a reader saw must be there after a power cut.
        durable = dest.is_durable or (has_losses and dest.config.durability == "disk")
        self.shard = dest.shard
        super().__init__(pieces, frames=len(pieces), durable=durable, future=CommitFuture(self.shard))
        self.copied_frames = len(pieces)
        self.may_use_reserve = False  # copies are new records of the dest
        self.forwarder, self.batches, self.data_bytes, self.ts_ms = forwarder, batches, weight, ts_ms
        self.cursor_after = last  # the cursor when it is done
        self.count = sum(copies.records for _, copies in batches if copies is not None)
        self.last = batches[-1].body.dest_head
        self.needs_reservation = dest.config.durability == "disk"
        self.reserved_ceiling = 0
        self.pending_reservation: PendingReservation | None = None

    @property
    def needs_sync(self) -> bool:
        return self.durable or (self.needs_reservation and self.forwarder.dest.reservation.is_needed(self.last))

    def before_write(self) -> None:
        """Class `disk`: reserve the seqs of copies, as for every write."""
        if not self.needs_reservation:
            return
        first = self.batches[0].first
        self.reserved_ceiling, self.pending_reservation = self.forwarder.dest.reservation.prepare(
            self, self.shard, first, self.last, self.ts_ms
        )

    def apply(self, error: Error | None) -> bool:
        forwarder, dest = self.forwarder, self.forwarder.dest
        with dest.lock:
            dest.staged_records -= self.count
            dest.staged_bytes -= self.data_bytes
            dest.reservation.on_done(self, self.reserved_ceiling, self.pending_reservation, ok=error is None)
            if error is None and not dest.is_dropped:
                apply_batches(forwarder, self.batches, self.ts_ms)
                forwarder.cursor = self.cursor_after
            else:
                dest.quota.release(self.data_bytes)
                dest.dropped_blobs += [
                    blob_id for _, copies in self.batches if copies is not None for blob_id in copies.blob_ids
                ]
                dest.mark_dirty()
        return True

    def on_done(self, error: Error | None) -> None:
        super().on_done(error)
        if error is None:
            self.forwarder.dest.notify_listeners()


def _plan_batches(forwarder: Forwarder, steps: Sequence[ForwardStep], first: int, ts_ms: int) -> Iterator[ForwardBatch]:
    """Encode steps with the seqs from `first` on. With the dest's lock held."""
    dest = forwarder.dest
    for step in steps:
        source_first = step.first
        if step.action == "trim" and step.total:
            hops = (step.total, step.hops)
            yield ForwardBatch(
                _forward_body(forwarder, ForwardEvent.LOST, source_first, step.last, first, step.counts, hops), None
            )
            first += step.total
        if step.copies is None or not len(step.copies):
            continue
        for copies in encode_copies(
            dest.id, first, step.copies, forwarder.routers, ts_ms=ts_ms, durable=dest.is_durable
        ):
            body = _forward_body(
                forwarder, ForwardEvent.COPIED, source_first, copies.last, first, copies.counts, copies.hops
            )
            yield ForwardBatch(body, copies)
            first, source_first = first + copies.records, copies.last + 1


def _forward_body(
    forwarder: Forwarder,
    event: ForwardEvent,
    first: int,
    last: int,
    dest_first: int,
    counts: tuple[int, ...],
    hops: tuple[int, ...],
) -> Forward:
    return Forward(
        event=event,
        source_id=forwarder.source.id,
        first=first,
        last=last,
        dest_head=dest_first + sum(counts) - 1,
        counts=counts,
        hops=hops,
    )


def apply_batches(forwarder: Forwarder, batches: Sequence[ForwardBatch], ts_ms: int) -> None:
    """Make a pass visible. With the dest's lock held."""
    dest = forwarder.dest
    for batch in batches:
        body, copies = batch
        if copies is not None:
            for number, blob_id in enumerate(copies.blob_ids):
                dest.blobs.add(batch.first + number, blob_id)
            dest.publish(
                batch.first, copies.frames, copies.records, copies.data_bytes, ts_ms, persistent=not dest.is_ephemeral
            )
        else:
            record_source_loss(dest, batch.first, body.dest_head)
        if dest.downstream:
            dest.hops.add_runs(batch.first, body.hops)
        for router, count in zip(forwarder.routers, body.counts, strict=True):
            forwarder.forwarded[router.name] += count
        dest.applied_router_frame += 1
        forwarder.cursor = body.last
    dest.staged_router_frame = max(dest.staged_router_frame, dest.applied_router_frame)
    dest.last_assigned_seq = max(dest.last_assigned_seq, dest.index.head)
    dest.context.needs_checkpoint = True


def record_source_loss(dest: TopicState, first: int, last: int) -> None:
    """Record that seqs first to last stand for records that the source lost; no record of the dest is removed. With
    the lock held, or in replay."""
    dest.index.add_trimmed_range(first, last + 1)
    dest.context.removals.add(dest, "source_trim", first, last, SizeCount(0, 0), actor="retention")


# ── all forwarders that lead to a topic ───────────────────────────────────────────────────────────


def upstream_forwarders(topic: TopicState) -> tuple[list[Forwarder], bool]:
    """Return the forwarders that lead to a topic, farthest first, and whether they form a cycle."""
    path: list[Forwarder] = []
    seen: set[int] = set()
    is_cycle = False
    current: TopicState | None = topic
    while current is not None and current.upstream is not None:  # a topic has one source, so this is a path
        if current.id in seen:
            is_cycle = True
            break
        seen.add(current.id)
        path.append(current.upstream)
        current = current.upstream.source
    return path[::-1], is_cycle


def pull_from_sources(topic: TopicState) -> None:
    """Forward to a topic all records that its sources have. Raises what a write to it would raise."""
    forwarders, is_cycle = upstream_forwarders(topic)
    for _ in range(HOPS_MAX + 2 if is_cycle else 1):
        if not sum([forwarder.run() for forwarder in forwarders]):
            return


def push_downstream(topic: TopicState) -> None:
    """Forward the records of a topic before some of them are deleted."""
    for forwarder in list(topic.downstream):
        forwarder.run()


def is_lagging(topic: TopicState) -> bool:
    """Whether `pull_from_sources` has something to do."""
    return bool(topic.context.shards) and any(
        forwarder.cursor < forwarder.source.index.head for forwarder in upstream_forwarders(topic)[0]
    )
