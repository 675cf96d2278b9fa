"""Blob files of large records: their names, the table of a topic, and which of them may be removed.

    topics/<id>/blobs/spill-<id>.tmp    a stream that is being written; nothing names it
                      blob-<id>.blob    complete and synced; a LargeRecord frame names it

    stream ─► spill ─► sync ─► rename ─► sync of the directory ─► frame in the WAL ─► `BlobTable` of the topic
    record removed ─► a manifest without it ─► another one ─► the file is removed

The name of a blob is durable before the frame that names it is written, in every class: no crash leaves a record
without its blob. A blob is removed only when neither of the two newest manifests nor the WAL after them needs it. After
a crash there may be blobs that nothing names: the next start removes them, as it does spill files.

Ids rise with time, also where the clock is set back: the id of a record's blob is never used again.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from tidelog.disk.durability import remove_if_exists
from tidelog.disk.interface import Disk, join
from tidelog.types import Ints

if TYPE_CHECKING:
    from tidelog.engine.topic_index import TopicIndex
    from tidelog.engine.topic_state import TopicState

BLOBS_DIR: Final = "blobs"
BLOB_FILE_PATTERN: Final = re.compile(r"blob-([0-9a-f]{16})\.blob")
SPILL_FILE_PATTERN: Final = re.compile(r"spill-[0-9a-f]{16}\.tmp")
_ID_BITS_BELOW_MS: Final = 20
_ROW: Final = np.dtype([("seq", "<u8"), ("blob", "<u8")])


def blobs_directory(topic_directory: str) -> str:
    return join(topic_directory, BLOBS_DIR)


def blob_path(topic_directory: str, blob_id: int) -> str:
    return join(blobs_directory(topic_directory), f"blob-{blob_id:016x}.blob")


def spill_path(topic_directory: str, blob_id: int) -> str:
    return join(blobs_directory(topic_directory), f"spill-{blob_id:016x}.tmp")


class BlobIds:
    """Assigns the ids of an engine's blobs: milliseconds since the epoch, and a counter. Thread-safe."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms, self._lock, self._last = now_ms, Lock(), 0

    def skip(self, last_id: int, last_ts_ms: int) -> None:
        """Assign no id up to `last_id`, and none that a record of this time or before may have had."""
        with self._lock:
            self._last = max(self._last, last_id, (last_ts_ms + 1) << _ID_BITS_BELOW_MS)

    def next(self) -> int:
        with self._lock:
            self._last = max(self._last + 1, self._now_ms() << _ID_BITS_BELOW_MS)
            return self._last


class BlobTable:
    """The blobs of a topic by seq, live or not yet removed. Guarded by the topic's lock. 16 bytes a record."""

    def __init__(self) -> None:
        self._seqs, self._ids = array("q"), array("Q")

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield seqs and ids."""
        return zip(self._seqs, self._ids, strict=True)

    @classmethod
    def from_row(cls, row: bytes) -> BlobTable:
        """Return the table that a manifest has."""
        table, pairs = cls(), np.frombuffer(row, _ROW)
        table._seqs.extend(pairs["seq"].tolist())
        table._ids.extend(pairs["blob"].tolist())
        return table

    def add(self, seq: int, blob_id: int) -> None:
        assert not self._seqs or seq > self._seqs[-1], "publish order is seq order"
        self._seqs.append(seq)
        self._ids.append(blob_id)

    def find(self, seq: int) -> int | None:
        """Return the blob of a record; None: it has none."""
        place = bisect_left(self._seqs, seq)
        return self._ids[place] if place < len(self._seqs) and self._seqs[place] == seq else None

    @property
    def last_id(self) -> int:
        """The highest id; 0 without blobs."""
        return max(self._ids, default=0)

    def take_removed(self, index: TopicIndex, head: int) -> list[int]:
        """Remove the records up to `head` that are no longer live and return their blobs."""
        if not self._seqs:
            return []
        seqs: Ints = np.array(self._seqs, np.int64)
        known = seqs[: int(np.searchsorted(seqs, head, "right"))]
        live = np.isin(known, index.live_seqs(known), assume_unique=True)
        if live.all():
            return []
        removed = [self._ids[place] for place in np.flatnonzero(~live).tolist()]
        keep = [*np.flatnonzero(live).tolist(), *range(len(known), len(seqs))]
        self._seqs = array("q", [self._seqs[place] for place in keep])
        self._ids = array("Q", [self._ids[place] for place in keep])
        return removed

    def to_row(self, head: int) -> bytes:
        """Encode the records up to `head` for a manifest."""
        count = bisect_left(self._seqs, head + 1)
        pairs = np.zeros(count, _ROW)
        pairs["seq"], pairs["blob"] = np.array(self._seqs[:count], np.uint64), np.array(self._ids[:count], np.uint64)
        return pairs.tobytes()


def ids_of_row(row: bytes) -> set[int]:
    """Return the blobs that a row of a manifest names."""
    return set(np.frombuffer(row, _ROW)["blob"].tolist())


class BlobFile(NamedTuple):
    """A blob of a topic and the record it belongs to."""

    seq: int
    blob_id: int
    path: str


def list_blob_files(topic: TopicState) -> list[BlobFile]:
    """Return the blob files of live records, by seq: what a backup copies, and what an erasure has to remove."""
    with topic.lock:
        seqs = np.array([seq for seq, _ in topic.blobs], np.int64)
        live = set(topic.index.live_seqs(seqs).tolist()) if len(seqs) else set()
        return [
            BlobFile(seq, blob_id, blob_path(topic.directory, blob_id)) for seq, blob_id in topic.blobs if seq in live
        ]


def find_missing(topic: TopicState) -> list[BlobFile]:
    """Return the blobs of live records that have no file."""
    named = list_blob_files(topic) if len(topic.blobs) else []
    present = _list_names(topic.context.disk, blobs_directory(topic.directory)) if named else ()
    return [blob for blob in named if blob.path.rpartition("/")[2] not in present]


def sweep(disk: Disk, topic_directory: str, named: Collection[int]) -> list[str]:
    """Remove spill files, and blobs that nothing names; return their names. Files with other names stay."""
    directory = blobs_directory(topic_directory)
    removed = []
    for name in find_unnamed(_list_names(disk, directory), named):
        remove_if_exists(disk, join(directory, name))
        removed.append(f"{BLOBS_DIR}/{name}")
    if removed:
        disk.sync_dir(directory)
    return removed


def remove_directory(disk: Disk, topic_directory: str) -> None:
    """Remove the blobs of a dropped topic."""
    directory = blobs_directory(topic_directory)
    names = _list_names(disk, directory)
    for name in names:
        if BLOB_FILE_PATTERN.fullmatch(name) or SPILL_FILE_PATTERN.fullmatch(name):
            remove_if_exists(disk, join(directory, name))
    if disk.stat(directory) is not None and not disk.list_dir(directory):
        disk.remove_dir(directory)


def find_unnamed(names: Iterable[str], named: Collection[int]) -> Iterator[str]:
    """Yield the names of blobs that nothing names, and of spill files."""
    for name in names:
        match = BLOB_FILE_PATTERN.fullmatch(name)
        if SPILL_FILE_PATTERN.fullmatch(name) or (match is not None and int(match[1], 16) not in named):
            yield name


def _list_names(disk: Disk, directory: str) -> list[str]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return disk.list_dir(directory)
    return []
