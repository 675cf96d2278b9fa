"""[policy] What a pass does with a stretch of the source, step by step, and how much of it the target takes.

    copies   records that a router passes on: they get seqs, one after the other
    trim     records that were lost before they could be passed on: as many seqs of the target, and a gap there
    skip     records that were deleted before they could be passed on, and seqs that never had one: nothing for them

A record, and the loss of one, is passed on HOPS_MAX times at most: what came over so many routers is skipped. Where
a target has no room the pass ends before that record and continues there later: order is kept at the price of waiting.

[hot] Records of a source → copies in a dest, as columns. No Python object per record, except for evidence.

A copy has the data and the meta of its record, byte for byte, and its JSON flag; node and tag as its router
says. A router that promises `exactly_once` adds where the copy comes from to its meta. That text has to be
made record by record; it may take a meta past the limit for writers, which is no reason to lose either.

[hot] What follows a lane's cursor in its source: records as columns, or seqs that have no record any more.

    cursor │ record │ record │ lost │ deleted │ hole │ record …
           └─── one stretch: seqs of one part, or of no part at all ───┘

What is needed of a part is taken under the source's lock; reading happens without it, and no other lock is held.
Records older than the source's `ttl_ms` count as lost, whether a reader of the source has made them expire or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from tidelog.commitlog.codec import Fault
from tidelog.engine import batch_encoder
from tidelog.engine.batch_encoder import ArrowBatch, Batch
from tidelog.engine.routing.router import HOPS_MAX, Router
from tidelog.engine.segment import BoolArray
from tidelog.engine.topic_state import TopicState
from tidelog.formats import lazy_compute as pc
from tidelog.formats import segment_index
from tidelog.formats.control_frames import Match, MatchOp
from tidelog.formats.rows import Rows, Span, copy_values, empty_rows, to_binary_array
from tidelog.types import Ints

PASS_RECORDS_MAX: Final = 1024
PASS_EMPTY_SEQS_MAX: Final = 1 << 20  # seqs without a record that are looked at in one go
_PASS_BYTES_MAX: Final = 4 << 20
ChunkKind: TypeAlias = Literal["records", "lost", "deleted", "hole"]


@dataclass(frozen=True, slots=True)
class SourceChunk:
    """Seqs [first, stop) of a source."""

    first: int
    stop: int
    kind: ChunkKind  # "records": `rows` has one for every seq
    rows: Rows
    lost: int = 0  # so many of the first rows were lost to a cap or to age
    deleted: BoolArray | None = None  # which rows were deleted
    hops: Ints | None = None  # over how many routers each came; None: over none


def read_source(source: TopicState, cursor: int) -> SourceChunk | None:
    """The next stretch after `cursor`; None: there is nothing."""
    first = cursor + 1
    with source.lock:
        index = source.index
        stop = index.head + 1
        if first >= stop:
            return None
        floor = max(index.evict_floor, _source_expiry(source))
        found = next(index.slices(first, stop), None)
        if found is None or found.first > first:
            return _empty_chunk(source, first, stop if found is None else found.first, floor)
        part, stop = found.part, min(found.stop, first + PASS_RECORDS_MAX)
        read = part.reader(first, stop, _PASS_BYTES_MAX)
        lost = max(min(floor, stop) - first, 0)
        dead = part.deleted_mask()
        gone: BoolArray | None = None if dead is None else dead[found.lo : found.lo + stop - first].copy()
        if index.earliest > first:
            gone = np.zeros(stop - first, bool) if gone is None else gone
            gone[: index.earliest - first] = True
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
        return _damaged_chunk(source, first, Fault(first, stop, 0, "seqs are not all where their index says"))
    return SourceChunk(
        first,
        stop,
        "records",
        rows,
        min(lost, count),
        None if gone is None else gone[:count],
        None if hops is None else hops[:count],
    )


def _source_expiry(source: TopicState) -> int:
    """One past the last record that is older than the source's age limit. With the source's lock held."""
    if not source.config.ttl_ms:
        return 0
    expiry = source.index.floor_for_age(source.context.now_ms() - source.config.ttl_ms)
    return source.limit_by_holds(expiry) if expiry > source.index.evict_floor else expiry


def _hops_between(source: TopicState, first: int, stop: int) -> Ints | None:
    return source.hops.between(first, stop) if source.hops else None


def _empty_chunk(source: TopicState, first: int, stop: int, floor: int) -> SourceChunk:
    """Seqs that no part has: their records were lost or deleted, or there never was one. With the lock held."""
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
    """Records that do not read are lost to the target: waiting for them would block all that follow."""
    stop = max(fault.resume, first + 1)
    said = f"{source.name}: seqs {first} to {stop - 1} could not be passed on: {fault.reason}"
    if said not in source.damage:
        source.damage[:] = [*source.damage, said][-10:]
    with source.lock:
        return SourceChunk(first, stop, "lost", empty_rows(), hops=_hops_between(source, first, stop))


_META_KEYS_MAX: Final = 64
_ROUTER_META_KEY: Final = "_topics_router"
_ORIGINAL_META_KEY: Final = "_topics_original_meta"
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.Encoder().encode


class CopiedColumns(NamedTuple):
    """Which records become copies, by which router: rows rising, and by one row in the order of the routers."""

    rows: Rows  # of the source
    row_indexes: Ints  # a row each
    router_indexes: Ints  # the number of a router each
    size: Ints  # bytes of data and meta each
    hops: Ints | None  # over how many routers each copy came; None: over one
    metas: list[bytes] | None  # where they are not those of the records

    def __len__(self) -> int:
        return len(self.row_indexes)

    def slice(self, lo: int, hi: int) -> CopiedColumns:
        hops = None if self.hops is None else self.hops[lo:hi]
        metas = None if self.metas is None else self.metas[lo:hi]
        return CopiedColumns(
            self.rows, self.row_indexes[lo:hi], self.router_indexes[lo:hi], self.size[lo:hi], hops, metas
        )

    def filter(self, keep: BoolArray) -> CopiedColumns:
        hops = None if self.hops is None else self.hops[keep]
        metas = None if self.metas is None else list(compress(self.metas, keep.tolist()))
        return CopiedColumns(self.rows, self.row_indexes[keep], self.router_indexes[keep], self.size[keep], hops, metas)


def choose_copies(routers: Sequence[Router], source_id: int, found: SourceChunk) -> CopiedColumns:
    """What the routers pass on of a stretch, as if nothing of it was deleted or lost."""
    rows = found.rows
    passes = np.empty((len(rows), len(routers)), bool)
    open_ = np.ones(len(rows), bool) if found.hops is None else found.hops < HOPS_MAX
    for number, router in enumerate(routers):
        passes[:, number] = open_ & (rows.seq > router.start)
        if router.match is not None:
            passes[:, number] &= _tag_matches(rows, router.match)
    which, who = np.nonzero(passes)
    hops = None if found.hops is None else found.hops[which] + 1
    metas = (
        _metas_with_evidence(rows, which, who, routers, source_id)
        if any(router.exactly_once for router in routers)
        else None
    )
    size = rows.data.size[which]
    if metas is not None:
        size = size + np.fromiter(map(len, metas), np.int64, len(metas))
    elif rows.meta is not None:
        size = size + rows.meta.size[which]
    return CopiedColumns(rows, which, who, size, hops, metas)


def _tag_matches(rows: Rows, match: Match) -> BoolArray:
    if rows.tag is None:
        return np.zeros(len(rows), bool)
    tags, value = to_binary_array(rows.buf, rows.tag), match.value.encode()
    found = pc.equal(tags, value) if match.op is MatchOp.EXACT else pc.starts_with(tags, pattern=value)
    mask: BoolArray = found.to_numpy(zero_copy_only=False).astype(bool)
    return mask & (rows.tag.size > 0)


class EncodedCopies(NamedTuple):
    """Frames of copies with consecutive seqs. All of them are in the WAL after a crash, or none."""

    frames: list[bytes]
    records: int
    data_bytes: int
    counts: tuple[int, ...]  # copies of each router
    hops: tuple[int, ...]  # pairs: so many of them, in order, came over so many routers
    last: int  # the seq of the last record in the source


def encode_copies(
    dest_id: int, first: int, copies: CopiedColumns, routers: Sequence[Router], *, ts_ms: int, durable: bool
) -> Iterator[EncodedCopies]:
    """The frames of copies that get the seqs from `first` on, all of time `ts_ms`."""
    rows = copies.rows
    json = (segment_index.record_flags(rows)[copies.row_indexes] & segment_index.JSON) != 0
    for lo, hi in pairwise([0, *(np.flatnonzero(json[1:] != json[:-1]) + 1).tolist(), len(copies)]):
        part = copies.slice(lo, hi)
        batch = _copies_batch(part, routers, bool(json[lo]))
        frames = batch_encoder.encode_frames(dest_id, first + lo, ts_ms, batch, durable=durable)
        counts = tuple(np.bincount(part.router_indexes, minlength=len(routers)).tolist())
        yield EncodedCopies(frames, hi - lo, batch.weight, counts, _hop_runs(part), int(rows.seq[part.row_indexes[-1]]))


def _hop_runs(copies: CopiedColumns) -> tuple[int, ...]:
    if copies.hops is None:
        return (len(copies), 1)
    hops = copies.hops
    edges = [0, *(np.flatnonzero(hops[1:] != hops[:-1]) + 1).tolist(), len(hops)]
    return tuple(value for lo, hi in pairwise(edges) for value in (hi - lo, int(hops[lo])))


def _copies_batch(copies: CopiedColumns, routers: Sequence[Router], json: bool) -> Batch | ArrowBatch:
    rows, which, who = copies.rows, copies.row_indexes, copies.router_indexes
    keeps_tag = np.array([router.preserve_tag for router in routers])[who]
    keeps_node = np.array([router.preserve_node for router in routers])[who]
    tags, nodes = (
        _optional_column(rows, rows.tag, which, keeps_tag),
        _optional_column(rows, rows.node, which, keeps_node),
    )
    metas = (
        _optional_column(rows, rows.meta, which, None) if copies.metas is None else pa.array(copies.metas, pa.binary())
    )
    data = to_binary_array(rows.buf, rows.data.take(which))
    if len(which) > 1 or metas is not None:
        return ArrowBatch(data, json, tags, nodes, metas)
    tag, node = (b"" if column is None else column[0].as_py() or b"" for column in (tags, nodes))
    return Batch([data[0].as_py()], json, tag, node)


def _optional_column(rows: Rows, span: Span | None, which: Ints, keep: BoolArray | None) -> pa.Array | None:
    """A column that records may lack; None where all of them do."""
    if span is None or not span.size[which].any() or not (keep is None or keep.any()):
        return None
    picked = to_binary_array(rows.buf, span.take(which))
    return picked if keep is None or keep.all() else pc.if_else(pa.array(keep), picked, None)


def _metas_with_evidence(rows: Rows, which: Ints, who: Ints, routers: Sequence[Router], source_id: int) -> list[bytes]:
    """Metas with the evidence of where each copy comes from, where its router promises that."""
    known = [b""] * len(which) if rows.meta is None else copy_values(rows.buf, rows.meta.take(which))
    found = zip(known, rows.seq[which].tolist(), map(routers.__getitem__, who.tolist()), strict=True)
    return [encode_evidence(old, router, source_id, seq) if router.exactly_once else old for old, seq, router in found]


def encode_evidence(old: bytes, router: Router, source_id: int, seq: int) -> bytes:
    """The meta of a copy. An object with room takes one more key; anything else is kept beside it."""
    told = {
        "idempotency_key": f"router:{router.name}:{source_id}:{source_id}:{seq}",
        "router": router.name,
        "source_topic": router.source,
        "source_topic_id": source_id,
        "source_epoch": source_id,
        "source_seq": seq,
    }
    if not old:
        return _encode({_ROUTER_META_KEY: told})
    try:
        fields = _object_decoder.decode(old)
    except msgspec.DecodeError:
        fields = None
    if fields is None or (len(fields) >= _META_KEYS_MAX and _ROUTER_META_KEY not in fields):
        return _encode({_ROUTER_META_KEY: told, _ORIGINAL_META_KEY: msgspec.Raw(old)})
    return _encode({**fields, _ROUTER_META_KEY: told})


ForwardAction: TypeAlias = Literal["copies", "trim", "skip"]
_NO_LIMIT = 1 << 62


class ForwardStep(NamedTuple):
    """One step over seqs `first` to `last` of the source."""

    action: ForwardAction
    first: int
    last: int
    counts: tuple[int, ...]  # of copies or of lost ones, a router each
    copies: CopiedColumns | None = None
    hops: int = 1  # trim: over how many routers the lost records came, with this one

    @property
    def total(self) -> int:
        return sum(self.counts)


def plan_steps(routers: Sequence[Router], source_id: int, found: SourceChunk) -> list[ForwardStep]:
    """The steps over a stretch, in order, up to its end."""
    last = found.stop - 1
    if found.kind == "lost":
        return _loss_steps(routers, found, found.stop - found.first)
    if found.kind != "records":
        return [ForwardStep("skip", found.first, last, ())]
    steps = _loss_steps(routers, found, found.lost) if found.lost else []
    copies = choose_copies(routers, source_id, found)
    keep = copies.row_indexes >= found.lost
    if found.deleted is not None:
        keep &= ~found.deleted[copies.row_indexes]
    first = found.first + found.lost
    if first <= last:
        steps.append(_copy_step(routers, copies if keep.all() else copies.filter(keep), first, last))
    return steps


def _copy_step(routers: Sequence[Router], copies: CopiedColumns, first: int, last: int) -> ForwardStep:
    counts = np.bincount(copies.router_indexes, minlength=len(routers)).tolist()
    return ForwardStep("copies", first, last, tuple(counts), copies)


def _loss_steps(routers: Sequence[Router], found: SourceChunk, count: int) -> list[ForwardStep]:
    """Steps over the first `count` seqs of a stretch, which were lost: one for each run of equal hops."""
    if found.hops is None:
        return [_loss_step(routers, found.first, found.first + count - 1, 0)]
    hops = found.hops[:count]
    edges = (np.flatnonzero(hops[1:] != hops[:-1]) + 1).tolist()
    runs = pairwise([0, *edges, count])
    return [_loss_step(routers, found.first + lo, found.first + hi - 1, int(hops[lo])) for lo, hi in runs]


def _loss_step(routers: Sequence[Router], first: int, last: int, hops: int) -> ForwardStep:
    if hops >= HOPS_MAX:
        return ForwardStep("skip", first, last, ())
    counts = tuple(max(last - max(first - 1, router.start), 0) for router in routers)
    return ForwardStep("trim", first, last, counts, hops=hops + 1)


class DestCapacity(NamedTuple):
    """What a target takes now."""

    records: int
    bytes: int


def dest_capacity(dest: TopicState) -> DestCapacity:
    """How much the target would take. With its lock held."""
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
    routers: Sequence[Router], steps: Sequence[ForwardStep], room: DestCapacity
) -> tuple[list[ForwardStep], bool]:
    """As many steps as there is room for, the last one cut before the first record that does not fit; whether one
    did not."""
    taken: list[ForwardStep] = []
    records, size = room
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
