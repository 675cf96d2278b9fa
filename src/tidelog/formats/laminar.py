"""[hot] The laminar layout: a store of contents and a dense index. No other module knows its files.

    <base>.store   │ content │ content │ …                   back to back, nothing between them

    content        0          4              4+L
                   ┌──────────┬──────────────┬──────┐
                   │ L, u32   │ metadata     │ data │        metadata of a record without headers:
                   └──────────┴──────────────┴──────┘        01, then its seq in 4 or 8 bytes

    <base>.index   0          8          16
                   ┌──────────┬──────────┬──────────┬────────┬──────────┐
                   │   base   │   zero   │ checksum │ length │ position │   entry i is for seq base + i
                   └──────────┴──────────┴──────────┴────────┴──────────┘

Little-endian. Only the index knows where a content begins and ends, so the store cannot be read
without it. The checksum is the CRC-32 of the whole content in eight bytes; a flipped bit in the
store or in an entry shows as a mismatch. An entry of length 0 is a hole: its record was compacted
away. An index file is empty until its first record comes; the marker is written with it. There
are no times: `<base>.created` is ours, and its age is the segment's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from struct import Struct
from typing import TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from tidelog.errors import BadInput, TooLarge
from tidelog.formats import lanes
from tidelog.formats.rows import Rows, Span, Stop, Walk, none
from tidelog.types import Buffer, Ints

Bools: TypeAlias = NDArray[np.bool_]
MARKER = Struct("<Q8x")
INDEX = np.dtype([("checksum", "<u8"), ("length", "<u4"), ("position", "<u4")])
MARKER_BYTES = MARKER.size
INDEX_ENTRY_BYTES = INDEX.itemsize
STORE_BYTES_MAX = (1 << 32) - 1  # positions and lengths have four bytes
assert MARKER_BYTES == INDEX_ENTRY_BYTES == 16, "drawn above, frozen by tests/golden; changing it is a new format"

_ENTRY = Struct("<QII")  # checksum, length, position
_UNIT = {4: Struct("<IBI"), 8: Struct("<IBQ")}  # metadata length, 01, seq
_META_AT = 4
_LENGTH = np.dtype([("length", "<u4")])
_HEADS = {width: np.dtype([("length", "<u4"), ("some", "u1"), ("seq", f"<u{width}")]) for width in _UNIT}
_SIGNED_MAX = (1 << 63) - 1  # columns are int64, so the upper half of u64 is refused
_NAME = re.compile(r"(0|[1-9][0-9]{0,18})\.store")


def data_name(base: int) -> str:
    return f"{base}.store"


def index_name(base: int) -> str:
    return f"{base}.index"


def created_name(base: int) -> str:
    return f"{base}.created"


def base_of(name: str) -> int | None:
    """The base a store's name carries, or None for any other name."""
    match = _NAME.fullmatch(name)
    base = int(match[1]) if match else -1
    return base if 0 <= base <= _SIGNED_MAX else None


def content_header(seq: int, width: int = 4) -> bytes:
    """What a content without headers of its own begins with: its metadata, and the length of that."""
    _check_seqs(seq, 1, width)
    return _UNIT[width].pack(1 + width, 1, seq)


def encode(first_seq: int, datas: Sequence[bytes], position: int, width: int = 4) -> tuple[bytes, bytes]:
    """The bytes to append to the store, which ends at `position`, and those to append to the index."""
    _check_seqs(first_seq, len(datas), width)
    pack, pack_entry = _UNIT[width].pack, _ENTRY.pack
    contents, entries = list[bytes](), list[bytes]()
    put, put_entry = contents.append, entries.append
    seq, meta_size, head_size = first_seq, 1 + width, _UNIT[width].size
    for data in datas:
        size = head_size + len(data)
        if position + size > STORE_BYTES_MAX:
            if size > STORE_BYTES_MAX:
                raise TooLarge(f"the record for seq {seq}", size=size, limit=STORE_BYTES_MAX)
            raise BadInput(
                f"seq {seq} would end at byte {position + size} of its store, whose index can point at "
                f"{STORE_BYTES_MAX}; roll to a new segment first"
            )
        content = pack(meta_size, 1, seq) + data
        put(content)
        put_entry(pack_entry(crc32(content), size, position))
        position += size
        seq += 1
    return b"".join(contents), b"".join(entries)


def _check_seqs(first: int, count: int, width: int) -> None:
    if width not in _UNIT:
        raise BadInput(f"a seq is stored with width 4 or 8, not {width}")
    if first < 0 or first + count - 1 > _SIGNED_MAX:
        raise BadInput(f"seqs run from 0 to 2**63 - 1, not from {first} for {count} records")
    if width == 4 and first + count > 1 << 32:
        raise BadInput(f"seq {first + count - 1} does not fit into 4 bytes; open the log with width=8")


def marker(base: int) -> bytes:
    """What an index file begins with, written together with its first entry."""
    _check_seqs(base, 1, 8)
    return MARKER.pack(base)


def read_index(buf: Buffer) -> tuple[int | None, NDArray[np.void]]:
    """The base and the whole entries, borrowing `buf`; no base while not even the marker is whole."""
    if len(buf) < MARKER_BYTES:
        return None, np.empty(0, INDEX)
    count = (len(buf) - MARKER_BYTES) // INDEX_ENTRY_BYTES
    return MARKER.unpack_from(buf)[0], np.frombuffer(buf, INDEX, count, MARKER_BYTES)


def index_fault(buf: Buffer, base: int, store_size: int) -> str | None:
    """Why these bytes are no index of a store with `store_size` bytes and this base, or None."""
    found, entries = read_index(buf)
    if found is None and len(buf):
        return f"the base marker ends after {len(buf)} bytes"
    if found is not None and found != base:
        return f"the base marker says {found}, the file's name says {base}"
    if found is not None and any(buf[MARKER_BYTES // 2 : MARKER_BYTES]):
        return "the padding of the base marker is not zero"
    if len(buf) % INDEX_ENTRY_BYTES:
        return f"the last entry has {len(buf) % INDEX_ENTRY_BYTES} bytes"
    pos, ends = _edges(entries)
    joined = lanes.first_false(_joined(pos, ends, 0))
    if joined < len(pos):
        return f"entry {joined} is at byte {pos[joined]} of the store, not where the one before it ends"
    last = int(ends[-1]) if len(ends) else 0
    if last > store_size:
        return f"entries reach to byte {last}, the store ends at {store_size}"
    if last < store_size:
        return f"{store_size - last} bytes at the end of the store have no entry"
    return None


def usable(entries: NDArray[np.void], store_size: int) -> int:
    """How many leading entries lie back to back from byte 0 and inside the store."""
    pos, ends = _edges(entries)
    return lanes.first_false(_joined(pos, ends, 0) & (ends <= store_size))


def _edges(entries: NDArray[np.void]) -> tuple[Ints, Ints]:
    pos: Ints = entries["position"].astype(np.int64)
    return pos, pos + entries["length"]


def _joined(pos: Ints, ends: Ints, start: int) -> Bools:
    """Whether each begins where the one before it ends, the first of them at `start`."""
    joined: Bools = pos == np.concatenate(([start], ends[:-1]))[: len(pos)]
    return joined


def walk(
    buf: Buffer,
    entries: NDArray[np.void],
    base: int,
    *,
    first: int | None = None,
    stop: int | None = None,
    bytes_max: int | None = None,
) -> Walk:
    """The records with first <= seq < stop from the store `buf`, each checked. Bad bytes never raise.

    The walk ends early, and cleanly, before the record that would bring the data over `bytes_max`,
    but never before the first. Holes are left out. `meta` is there only if some metadata is not
    the plain seq.
    """
    count = len(entries)
    lo = 0 if first is None else min(max(first - base, 0), count)
    hi = count if stop is None else min(max(stop - base, lo), count)
    start = _edge(entries, lo)
    if not 0 <= base <= _SIGNED_MAX - count:
        return Walk(none(buf), start, Stop.BAD, f"base {base} is out of range")
    pos, ends = _edges(entries[lo:hi])
    good, halt, reason = hi - lo, Stop.END, ""
    joined = _joined(pos, ends, start)
    if (fit := lanes.first_false(joined & (ends <= len(buf)))) < good:
        good, halt, reason = fit, Stop.TORN, "the content runs past the end of the store"
        if not joined[fit]:
            halt, reason = Stop.BAD, "position is not where the record before it ends"
    held = np.flatnonzero(ends[:good] > pos[:good])
    at, size = pos[held], (ends - pos)[held]
    meta = np.full(len(held), _META_AT, np.int64)  # where even its length does not fit, it is too long
    long = np.flatnonzero(size >= _META_AT)
    meta[long] = lanes.gather(buf, at[long], _LENGTH)["length"]
    data_size = size - _META_AT - meta  # negative where the metadata does not fit
    if bytes_max is not None and len(held):
        used = np.cumsum(np.maximum(data_size, 0))
        if (fit := max(int(np.searchsorted(used, bytes_max, "right")), 1)) < len(held):
            good, halt, reason = int(held[fit]), Stop.END, ""
    # Every entry, holes too: the checksum of nothing is 0, so a length that rotted to 0 shows.
    sums = lanes.checksums(buf, pos[:good], ends[:good])
    if (fit := lanes.first_false(sums == entries["checksum"][lo : lo + good])) < good:
        good, halt, reason = fit, Stop.BAD, "checksum"
    keep = int(np.searchsorted(held, good))
    seq = base + lo + held
    fits = data_size[:keep] >= 0
    own, right = _stored_seqs(buf, at[:keep], meta[:keep], fits, seq[:keep])
    if (fit := lanes.first_false(fits & right)) < keep:
        keep, good, halt = fit, int(held[fit]), Stop.BAD
        reason = "another seq is stored with the record" if fits[fit] else "metadata is longer than the content"
    at, meta, own = at[:keep], meta[:keep], own[:keep]
    rows = Rows(
        buf,
        seq[:keep],
        np.zeros(keep, np.int64),
        at,
        Span(at + _META_AT + meta, data_size[:keep]),
        meta=Span(at + _META_AT, np.where(own, meta, 0)) if own.any() else None,
    )
    return Walk(rows, int(ends[good - 1]) if good else start, halt, reason)


def _edge(entries: NDArray[np.void], i: int) -> int:
    """Where entry `i` begins in the store, or would if there were one more."""
    if i == 0:
        return 0
    return int(entries["position"][i]) if i < len(entries) else int(_edges(entries[-1:])[1][0])


def _stored_seqs(buf: Buffer, at: Ints, meta: Ints, fits: Bools, seq: Ints) -> tuple[Bools, Bools]:
    """For each content: is its metadata more than the plain seq, and if not, is that the right seq."""
    own, right = np.ones(len(at), np.bool_), np.ones(len(at), np.bool_)
    for width, heads in _HEADS.items():
        which = np.flatnonzero(fits & (meta == 1 + width))
        if not len(which):
            continue
        stored = lanes.gather(buf, at[which], heads)
        own[which] = stored["some"] != 1
        right[which] = own[which] | (stored["seq"].astype(np.int64) == seq[which])
    return own, right
