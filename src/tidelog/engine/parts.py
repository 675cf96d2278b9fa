"""[hot] The parts of a topic: segments on disk and blocks in memory, one after the other by seq.

    seg 1..10000 sealed │ seg 10001..14200 on disk │ block 14201..14950 in memory │
                        └──────────── one segment, still growing ───────────────┘

Both answer the same questions: which seqs, which of them are deleted, what their index says, and the
records of a range as columns. Neither keeps a Python object per record. Blocks are in `block`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidelog.commitlog.codec import Chunk, Fault, Shape
from tidelog.commitlog.segment import Mapped
from tidelog.disk.resident import is_resident
from tidelog.engine.edges import Edges, edges
from tidelog.engine.home import CODEC, Home
from tidelog.engine.masks import Bools as Bools
from tidelog.engine.masks import Mask
from tidelog.errors import Corrupt, NewerFormat
from tidelog.formats import deletions, footer, frame, idx, scan
from tidelog.formats.deletions import DeletionVector
from tidelog.formats.rows import none
from tidelog.types import Buffer, Ints

if TYPE_CHECKING:
    from tidelog.engine.block import Block

Places: TypeAlias = list[tuple[Buffer, int]]
"""Bytes that hold frames one behind the other, and where in them the first one begins."""
AT_HAND_MAX = 2 << 20  # bytes; to copy them once takes 0.15 ms where no page is missing
_NEAR_BYTES = 1 << 20  # for which it is asked at once whether they are in memory
_NEAR_US = 50_000  # for which the answer is believed; a page that goes meanwhile costs a wait for the disk


class Weight(NamedTuple):
    """How much a stretch of seqs holds that is not deleted."""

    records: int
    size: int  # bytes of data and meta


class Part(Protocol):
    base: int
    stop: int
    live: int
    live_bytes: int
    first_ts: int
    last_ts: int

    def entries(self) -> NDArray[np.void]:
        """The index: one entry a seq."""
        ...

    def dead(self) -> Bools | None:
        """Which seqs are deleted, one flag each; None: none is. Good while the topic's lock is held: keep a copy."""
        ...

    def bare(self, first: int, stop: int, bytes_max: int, near_us: int | None) -> Callable[[], Places | None] | None:
        """Finds out, without the topic's lock, where the frames of these records lie, in bytes that need no check. None
        where one of them was deleted, and where they are better scanned. `near_us`, for somebody who may not wait, is
        the time: and where that takes a look at a file, or they are not in memory."""
        ...

    def bury(self, which: Ints, weights: Ints | None = None) -> Weight:
        """Delete the seqs at these places, whose bytes may be known; return what went."""
        ...

    def bury_one(self, at: int) -> int | None:
        """`bury` of one place: its bytes, or None where it was deleted before."""
        ...

    def look(self, first: int, stop: int, bytes_max: int, *, compiled: bool = True) -> Callable[[], Chunk]:
        """What reads these seqs. Made under the topic's lock, called without it: a long read stops no writer.
        `compiled`: the kernel may be asked."""
        ...


def sizes(part: Part, lo: int, hi: int) -> Ints:
    """Bytes of data and meta of the records at places [lo, hi)."""
    return sizes_later(part, lo, hi)()


def sizes_later(part: Part, lo: int, hi: int) -> Callable[[], Ints]:
    """What tells `sizes`. Made under the topic's lock, called without it: it reads the records that have metas."""
    entries = part.entries()[lo:hi]
    found: Ints = entries["data_len"].astype(np.int64)
    if not (entries["flags"] & idx.HAS_META).any():
        return lambda: found
    base, look = part.base, part.look(part.base + lo, part.base + hi, 1 << 62)

    def read() -> Ints:
        rows = look().rows
        if rows.meta is not None:
            found[rows.seq - base - lo] += rows.meta.size
        return found

    return read


def weigh(part: Part, lo: int, hi: int) -> Weight:
    """What the places [lo, hi) of a part hold that is not deleted."""
    if lo >= hi:
        return Weight(0, 0)
    if lo == 0 and hi == part.stop - part.base:
        return Weight(part.live, part.live_bytes)
    found, dead = sizes(part, lo, hi), part.dead()
    if dead is None:
        return Weight(hi - lo, int(found.sum()))
    live = ~dead[lo:hi]
    return Weight(int(live.sum()), int(found[live].sum()))


def bury(part: Part, mask: Mask, which: Ints, weights: Ints | None = None) -> Weight:
    """Delete these places of a part in its mask; what that takes away."""
    new = ~mask.view(part.stop - part.base)[which]
    fresh = which[new]
    if not len(fresh):
        return Weight(0, 0)
    if weights is None:
        lo, hi = int(fresh.min()), int(fresh.max()) + 1
        size = int(sizes(part, lo, hi)[fresh - lo].sum())
    else:
        size = int(weights[new].sum())
    mask.set_all(fresh)
    return Weight(len(fresh), size)


def bury_one(part: Part, mask: Mask, at: int) -> int | None:
    """`bury` of one place, without arrays: how many bytes went; None where it was deleted before."""
    if mask.has(at):
        return None
    entries = part.entries()
    size = int(sizes(part, at, at + 1)[0]) if entries["flags"][at] & idx.HAS_META else int(entries["data_len"][at])
    mask.set(at)
    return size


def _places(shape: Shape, first: int, stop: int, bytes_max: int) -> Places | None:
    window = CODEC.window(shape, first, stop, bytes_max)
    return None if window is None else [(shape.data.fetch(*window), 0)]


class Limited:
    """The bytes of a mapped data file that the manifest vouches for."""

    def __init__(self, mapped: Mapped, size: int) -> None:
        self._mapped, self.size = mapped, min(size, mapped.size)

    def fetch(self, lo: int, hi: int) -> Buffer:
        return self._mapped.fetch(lo, min(hi, self.size))


class Segment:
    """A segment on disk; the last one of a topic may still grow, by checkpoints."""

    def __init__(
        self,
        home: Home,
        base: int,
        stop: int,
        size: int,
        *,
        live: int,
        live_bytes: int,
        first_ts: int,
        last_ts: int,
        sealed: bool,
        unproven: bool = False,
    ) -> None:
        self.home, self.base, self.stop, self.size = home, base, stop, size
        self.live, self.live_bytes = live, live_bytes
        self.first_ts, self.last_ts, self.sealed = first_ts, last_ts, sealed
        self.unproven = unproven  # sealed without a footer: not all of its frames verified
        self.unsaved = False  # deletions that no `.del` file has yet
        self._extra: bytes | None = None
        self._verified: set[int] = set()
        self._dead: Mask | None = None
        self._looked = False  # whether `.del` was read
        self._buried = stop - base - live  # how many it must name at least
        self._edges: Edges | None = None  # of a sealed one, where they are few
        self.tagged: bool | None = None  # of a sealed one: whether it has tags at all, once a search has looked
        self._near: dict[int, int] = {}  # which of its bytes are taken to be in memory, and until when
        self._chunk_bytes = 1  # that a checksum of its footer is of, where the edges are known
        self.rebuilt: bytes | None = None  # an index that had to be made again; the file has another or none

    def shape(self) -> Shape:
        data, index = self.home.open(self.base)
        if self.rebuilt is not None:
            index = self.rebuilt
        if self.sealed and self._extra is None and not self.unproven:
            self._extra = self.home.side(self.base, ".foot")
        index = memoryview(index)[: (self.stop - self.base) * idx.ENTRY_BYTES]
        extra = self._extra if self.sealed else None
        return Shape(self.base, self.stop, Limited(data, self.size), index, [index], extra, self._verified)

    def footer(self) -> bytes | None:
        """The bytes of its footer, where it is sealed and has one that holds."""
        content = self.shape().extra
        if content is None:
            return None
        try:
            footer.decode(content)
        except (Corrupt, NewerFormat):
            return None
        return bytes(content)

    @property
    def is_index_verified(self) -> bool:
        """Whether its index is known to be the one that was sealed."""
        return self.sealed and CODEC.INDEX in self._verified

    def trust(self) -> None:
        """Believe its sealed bytes without looking at their checksums: for a reader that asks for that."""
        foot = self.home.side(self.base, ".foot") if self.sealed else None
        if foot is not None:
            self._verified |= {CODEC.INDEX, *range(len(footer.decode(foot).chunks))}

    def rebuild(self) -> bool:
        """Make the index again from the data, in memory; False where the data does not hold all of it either."""
        data, _ = self.home.open(self.base)
        walk = scan.walk(data.fetch(0, min(self.size, data.size)), above=self.base - 1)
        if walk.end != self.size or len(walk.rows) != self.stop - self.base:
            return False
        self.rebuilt = idx.to_bytes(idx.entries(walk.rows, self.base, self.stop, self.size))
        return True

    def entries(self) -> NDArray[np.void]:
        found = CODEC.index(self.shape())
        if len(found) < self.stop - self.base:
            where = self.home.path(self.base, ".idx")
            raise Corrupt(where, pos=len(found) * idx.ENTRY_BYTES, reason="the index is shorter than its segment")
        return found

    def recount(self) -> None:
        """Count what is live where there are deletions: the file may be newer than what the manifest says of it."""
        dead = self.dead()
        if dead is not None:
            live, size = ~dead, sizes(self, 0, self.stop - self.base)
            self.live, self.live_bytes = int(live.sum()), int(size[live].sum())

    def dead(self) -> Bools | None:
        if not self._looked:
            path = self.home.path(self.base, ".del")
            content = self.home.side(self.base, ".del")
            count, mask, found = self.stop - self.base, None, 0
            if content is not None:
                mask = Mask()
                vector = deletions.decode(content, path)
                where = vector.seqs() - self.base
                mask.set_all(where[where < count])
                found = int(mask.view(count).sum())
                # Written by a checkpoint that was not finished: what it says of seqs that this segment does not have
                # yet must not meet them when it does.
                self.unsaved |= vector.size > count
            if found < self._buried:
                # Serving what it lacks would bring deleted records back.
                raise Corrupt(path, pos=0, reason=f"{self._buried} records were deleted, it names {found}")
            self._dead, self._looked = mask, True
        return None if self._dead is None else self._dead.view(self.stop - self.base)

    def mask(self, dead: Bools | None) -> None:
        """These places are deleted, whatever the file says."""
        self._dead, self._looked, self.unsaved = None if dead is None else Mask(dead), True, dead is not None

    def _mask(self) -> Mask:
        """Where to set what is deleted."""
        if self.dead() is None:
            self._dead = Mask()
        assert self._dead is not None, "made above"
        return self._dead

    def bury(self, which: Ints, weights: Ints | None = None) -> Weight:
        gone = bury(self, self._mask(), which, weights)
        self._less(*gone)
        return gone

    def bury_one(self, at: int) -> int | None:
        size = bury_one(self, self._mask(), at)
        if size is not None:
            self._less(1, size)
        return size

    def _less(self, records: int, size: int) -> None:
        self.live, self.live_bytes = self.live - records, self.live_bytes - size
        self.unsaved |= records > 0

    def vector(self) -> bytes:
        """The content of its `.del` file."""
        made = DeletionVector(self.base, self.stop - self.base)
        dead = self.dead()
        if dead is not None:
            made.mark(np.flatnonzero(dead) + self.base)
        return deletions.encode(made)

    def grow(self, block: Block) -> None:
        """Take over what a block held, now that the files have it."""
        assert (block.base, block.origin) == (self.stop, self.size), "a block goes on where its segment ends"
        self.dead()  # what the file says is about the seqs that it had until now
        theirs = block.dead()
        if theirs is not None:
            self._mask().set_all(np.flatnonzero(theirs) + self.stop - self.base)
            self.unsaved = True
        self.live, self.live_bytes = self.live + block.live, self.live_bytes + block.live_bytes
        self.stop, self.size, self.last_ts = block.stop, self.size + block.size, block.last_ts
        self.home.forget(self.base)

    def is_at_hand(self, first: int, stop: int, bytes_max: int) -> bool:
        """Whether these seqs can be read where nobody may wait: sealed, mapped, checked before, all of them records,
        little, and in memory at this moment."""
        home, entries = self.home, (self.stop - self.base) * idx.ENTRY_BYTES
        known = self.sealed and self._looked and self._extra is not None and self.rebuilt is None
        dense = self.live == self.stop - self.base
        if not known or not dense or entries > AT_HAND_MAX or not home.is_open(self.base):
            return False
        shape = self.shape()
        window = None if self._edges is None else self._edges.window(first, stop, bytes_max)
        if window is None or not self._is_checked(shape.data.size, *window):
            index = memoryview(shape.index)
            if len(index) < entries or not is_resident(index):
                return False
            if self._edges is None and CODEC.INDEX in shape.verified and self._extra is not None:
                self._edges = edges(self.base, idx.read(index), self.size)
                self._chunk_bytes = footer.decode(self._extra).chunk_bytes
            window = CODEC.window(shape, first, stop, bytes_max)
        if window is None or window[1] - window[0] > AT_HAND_MAX:
            return False
        return is_resident(memoryview(shape.data.fetch(*window)))

    def bare(self, first: int, stop: int, bytes_max: int, near_us: int | None) -> Callable[[], Places | None] | None:
        if not self.sealed or not self._looked or self._extra is None or self.rebuilt is not None:
            return None
        dead = self.dead()
        if dead is not None and dead[first - self.base : stop - self.base].any():
            return None
        held = self.home.held(self.base)
        if held is not None and self._edges is not None:
            window = self._edges.window(first, stop, bytes_max)
            if window is not None and self._is_checked(min(held[0].size, self.size), *window):
                if near_us is not None and not self._is_near(held[0], *window, near_us):
                    return None
                found: Places = [(held[0].fetch(*window), 0)]
                return lambda: found
        return None if near_us is not None else partial(_places, self.shape(), first, stop, bytes_max)

    def _is_checked(self, size: int, low: int, high: int) -> bool:
        """Whether these of `size` bytes of data were held against the footer before. It is a segment whose edges are
        known, so its index was."""
        chunk = self._chunk_bytes
        return high <= size and self._verified.issuperset(range(low // chunk, -(-high // chunk)))

    def _is_near(self, data: Mapped, low: int, high: int, now_us: int) -> bool:
        """Whether these bytes are in memory, as they and those around them were a moment ago: whoever reads goes on
        from page to page, and to ask for each costs a tenth of it."""
        if high - low > AT_HAND_MAX:
            return False
        for chunk in range(low // _NEAR_BYTES, -(-high // _NEAR_BYTES)):
            if self._near.get(chunk, -1) < now_us:
                if not is_resident(data.fetch(chunk * _NEAR_BYTES, (chunk + 1) * _NEAR_BYTES)):
                    return is_resident(data.fetch(low, high))
                self._near[chunk] = now_us + _NEAR_US
        return True

    def look(self, first: int, stop: int, bytes_max: int, *, compiled: bool = True) -> Callable[[], Chunk]:
        return partial(self._read, self.shape(), first, stop, bytes_max, compiled=compiled)

    def _read(self, shape: Shape, first: int, stop: int, bytes_max: int, *, compiled: bool) -> Chunk:
        if len(shape.index) < (shape.stop - shape.base) * idx.ENTRY_BYTES and not self.rebuild():
            return Chunk(none(), first, Fault(first, shape.stop, 0, "its index is missing and its data is not whole"))
        shown = self.shape() if self.rebuilt else shape
        found = self._mine(CODEC.read(shown, first, stop, bytes_max, compiled=compiled))
        if found.fault is None or self.rebuilt is not None or shape.stop != self.stop or not self.rebuild():
            return found
        # It was the index that was wrong, not the data.
        return self._mine(CODEC.read(self.shape(), first, stop, bytes_max, compiled=compiled))

    def _mine(self, chunk: Chunk) -> Chunk:
        """The chunk, if its frames are this topic's: a file in another one's place is as good as damaged."""
        rows = chunk.rows
        if not len(rows):
            return chunk
        starts = rows.at[np.append(0, np.flatnonzero(rows.at[1:] != rows.at[:-1]) + 1)]
        if (frame.headers(rows.buf, starts)["topic_id"] == self.home.topic_id).all():
            return chunk
        first = int(rows.seq[0])
        return Chunk(none(), first, Fault(first, self.stop, int(starts[0]), "its frames are another topic's"))
