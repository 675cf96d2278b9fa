"""Read seqs of a segment by byte ranges of its files, from a server or an object store.

It fetches the index entries of the seqs and those up to the next frame, then the data, a few megabytes at a time.
Frames are verified one by one, because the checksums of chunks need whole chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidelog.errors import Corrupt, NotFound
from tidelog.formats import frame, scan, segment_index
from tidelog.formats.rows import Rows
from tidelog.spark.backends.interface import PlannedFile, ReadChunk, ReadRange, to_chunk

CHUNK_BYTES: Final = 4 << 20
INDEX_BLOCK_ENTRIES: Final = 4096  # index entries per request
FetchRange: TypeAlias = Callable[[str, int, int], bytes]  # bytes [lo, hi) of "idx" or "data"; raises NotFound


def read_segment_ranges(
    fetch: FetchRange, label: str, read_range: ReadRange, file: PlannedFile, *, verify: bool
) -> Iterator[tuple[ReadChunk, int]]:
    """Yield records with the seq after them. Raises NotFound if the file is gone or belongs to another topic."""
    entries, ends = _index_entries(fetch, read_range, file)
    positions = entries["frame_offset"].astype(np.int64)
    deleted, at = read_range.deleted_mask(), 0
    while at < read_range.seq_count:
        low = int(positions[at])
        until = max(int(np.searchsorted(positions, low + CHUNK_BYTES)), at + 1)
        until = int(np.searchsorted(positions, positions[until - 1], "right"))  # a frame is read once
        buf = fetch("data", low, ends if until == read_range.seq_count else int(positions[until]))
        some = entries[at:until]
        rows = scan.scan_indexed(buf, some, 0, until - at, read_range.first + at, check=verify, origin=low)
        if not _belongs_to_topic(rows, read_range.epoch):
            raise NotFound(f"segment {file.base} of {read_range.topic} is another topic's now")
        reason = f"seqs {read_range.first + at} and later are not all where their index says"
        misplaced = partial(Corrupt, f"{label}/data", pos=low, reason=reason)
        yield to_chunk(rows, some, deleted, read_range.first, misplaced), read_range.first + until
        at = until


def _index_entries(fetch: FetchRange, read_range: ReadRange, file: PlannedFile) -> tuple[NDArray[np.void], int]:
    """Return the index entries of a range and the end of its last frame, which is where the next one starts."""
    lo, hi = read_range.first - file.base, read_range.stop - file.base
    found = segment_index.read_entries(fetch("idx", lo * segment_index.ENTRY_BYTES, hi * segment_index.ENTRY_BYTES))
    last = int(found["frame_offset"][-1])
    while hi < file.stop - file.base:
        more = min(hi + INDEX_BLOCK_ENTRIES, file.stop - file.base)
        some = segment_index.read_entries(
            fetch("idx", hi * segment_index.ENTRY_BYTES, more * segment_index.ENTRY_BYTES)
        )
        later = some["frame_offset"][some["frame_offset"] != last]
        if len(later):
            return found, int(later[0])
        hi = more
    return found, file.size


def _belongs_to_topic(rows: Rows, epoch: int) -> bool:
    """Whether the frames of these rows belong to the planned topic."""
    return not len(rows) or bool((frame.read_headers(rows.buf, np.unique(rows.frame_pos))["topic_id"] == epoch).all())
