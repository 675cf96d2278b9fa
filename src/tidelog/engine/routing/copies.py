"""[hot] Records of a source → copies in a dest, as columns. No Python object per record, except for evidence.

A copy has the data and the meta of its record, byte for byte, and its JSON flag; node and tag as its router
says. A router that promises `exactly_once` adds where the copy comes from to its meta. That text has to be
made record by record; it may take a meta past the limit for writers, which is no reason to lose either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress, pairwise
from typing import Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from tidelog.engine import encode
from tidelog.engine.encode import Batch, Columns
from tidelog.engine.parts import Bools
from tidelog.engine.routing.router import HOPS_MAX, Router
from tidelog.engine.routing.stretch import Stretch
from tidelog.formats import compute as pc
from tidelog.formats import idx
from tidelog.formats.bodies import Match, MatchOp
from tidelog.formats.rows import Rows, Span, binary, values
from tidelog.types import Ints

_KEYS_MAX: Final = 64
_ROUTER: Final = "_topics_router"
_ORIGINAL: Final = "_topics_original_meta"
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.Encoder().encode


class Copies(NamedTuple):
    """Which records become copies, by which router: rows rising, and by one row in the order of the routers."""

    rows: Rows  # of the source
    which: Ints  # a row each
    who: Ints  # the number of a router each
    size: Ints  # bytes of data and meta each
    hops: Ints | None  # over how many routers each copy came; None: over one
    metas: list[bytes] | None  # where they are not those of the records

    def __len__(self) -> int:
        return len(self.which)

    def part(self, lo: int, hi: int) -> Copies:
        hops = None if self.hops is None else self.hops[lo:hi]
        metas = None if self.metas is None else self.metas[lo:hi]
        return Copies(self.rows, self.which[lo:hi], self.who[lo:hi], self.size[lo:hi], hops, metas)

    def pick(self, keep: Bools) -> Copies:
        hops = None if self.hops is None else self.hops[keep]
        metas = None if self.metas is None else list(compress(self.metas, keep.tolist()))
        return Copies(self.rows, self.which[keep], self.who[keep], self.size[keep], hops, metas)


def choose(routers: Sequence[Router], source_id: int, found: Stretch) -> Copies:
    """What the routers pass on of a stretch, as if nothing of it was deleted or lost."""
    rows = found.rows
    passes = np.empty((len(rows), len(routers)), bool)
    open_ = np.ones(len(rows), bool) if found.hops is None else found.hops < HOPS_MAX
    for number, router in enumerate(routers):
        passes[:, number] = open_ & (rows.seq > router.start)
        if router.match is not None:
            passes[:, number] &= _matching(rows, router.match)
    which, who = np.nonzero(passes)
    hops = None if found.hops is None else found.hops[which] + 1
    metas = _evident(rows, which, who, routers, source_id) if any(router.exactly_once for router in routers) else None
    size = rows.data.size[which]
    if metas is not None:
        size = size + np.fromiter(map(len, metas), np.int64, len(metas))
    elif rows.meta is not None:
        size = size + rows.meta.size[which]
    return Copies(rows, which, who, size, hops, metas)


def _matching(rows: Rows, match: Match) -> Bools:
    if rows.tag is None:
        return np.zeros(len(rows), bool)
    tags, value = binary(rows.buf, rows.tag), match.value.encode()
    found = pc.equal(tags, value) if match.op is MatchOp.EXACT else pc.starts_with(tags, pattern=value)
    mask: Bools = found.to_numpy(zero_copy_only=False).astype(bool)
    return mask & (rows.tag.size > 0)


class Made(NamedTuple):
    """Frames of copies with consecutive seqs. All of them are in the WAL after a crash, or none."""

    frames: list[bytes]
    records: int
    weight: int
    counts: tuple[int, ...]  # copies of each router
    hops: tuple[int, ...]  # pairs: so many of them, in order, came over so many routers
    last: int  # the seq of the last record in the source


def make(
    dest_id: int, first: int, copies: Copies, routers: Sequence[Router], *, ts_ms: int, durable: bool
) -> Iterator[Made]:
    """The frames of copies that get the seqs from `first` on, all of time `ts_ms`."""
    rows = copies.rows
    json = (idx.flags(rows)[copies.which] & idx.JSON) != 0
    for lo, hi in pairwise([0, *(np.flatnonzero(json[1:] != json[:-1]) + 1).tolist(), len(copies)]):
        part = copies.part(lo, hi)
        batch = _batch(part, routers, bool(json[lo]))
        frames = encode.frames(dest_id, first + lo, ts_ms, batch, durable=durable)
        counts = tuple(np.bincount(part.who, minlength=len(routers)).tolist())
        yield Made(frames, hi - lo, batch.weight, counts, _runs(part), int(rows.seq[part.which[-1]]))


def _runs(copies: Copies) -> tuple[int, ...]:
    if copies.hops is None:
        return (len(copies), 1)
    hops = copies.hops
    edges = [0, *(np.flatnonzero(hops[1:] != hops[:-1]) + 1).tolist(), len(hops)]
    return tuple(value for lo, hi in pairwise(edges) for value in (hi - lo, int(hops[lo])))


def _batch(copies: Copies, routers: Sequence[Router], json: bool) -> Batch | Columns:
    rows, which, who = copies.rows, copies.which, copies.who
    keeps_tag = np.array([router.preserve_tag for router in routers])[who]
    keeps_node = np.array([router.preserve_node for router in routers])[who]
    tags, nodes = _column(rows, rows.tag, which, keeps_tag), _column(rows, rows.node, which, keeps_node)
    metas = _column(rows, rows.meta, which, None) if copies.metas is None else pa.array(copies.metas, pa.binary())
    data = binary(rows.buf, rows.data.pick(which))
    if len(which) > 1 or metas is not None:
        return Columns(data, json, tags, nodes, metas)
    tag, node = (b"" if column is None else column[0].as_py() or b"" for column in (tags, nodes))
    return Batch([data[0].as_py()], json, tag, node)


def _column(rows: Rows, span: Span | None, which: Ints, keep: Bools | None) -> pa.Array | None:
    """A column that records may lack; None where all of them do."""
    if span is None or not span.size[which].any() or not (keep is None or keep.any()):
        return None
    picked = binary(rows.buf, span.pick(which))
    return picked if keep is None or keep.all() else pc.if_else(pa.array(keep), picked, None)


def _evident(rows: Rows, which: Ints, who: Ints, routers: Sequence[Router], source_id: int) -> list[bytes]:
    """Metas with the evidence of where each copy comes from, where its router promises that."""
    known = [b""] * len(which) if rows.meta is None else values(rows.buf, rows.meta.pick(which))
    found = zip(known, rows.seq[which].tolist(), map(routers.__getitem__, who.tolist()), strict=True)
    return [evidence(old, router, source_id, seq) if router.exactly_once else old for old, seq, router in found]


def evidence(old: bytes, router: Router, source_id: int, seq: int) -> bytes:
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
        return _encode({_ROUTER: told})
    try:
        fields = _object.decode(old)
    except msgspec.DecodeError:
        fields = None
    if fields is None or (len(fields) >= _KEYS_MAX and _ROUTER not in fields):
        return _encode({_ROUTER: told, _ORIGINAL: msgspec.Raw(old)})
    return _encode({**fields, _ROUTER: told})
