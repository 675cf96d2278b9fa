"""The cold tier: sealed segments move to a segment store, and come back.

    relocation   1  copy      the data of a segment, verified chunk by chunk, to an object with a new key
                 2  verify    the whole object is read back, its checksums compared
                 3  flip      the segment names its object; the next checkpoint's manifest makes that durable
                 4  remove    the data file, once neither of the two newest manifests needs it (`checkpoint`)
    recall       the object to a data file, verified, renamed into place; the next manifest no longer names the object,
                 which is deleted when neither of two does

Reads use the file as long as it is there. A crash before 3 leaves an object that no manifest names; it is deleted at
the next start (`_sweep`). So one complete, verified copy exists at any time. `.idx`, `.foot`, `.tag`, `.del` stay on
the disk, and `.siz` is written before the flip: floors, caps, deletes and counts never need the store.

The thread of the relocator is the only one that waits for the store beside readers. A store that fails makes it pause,
with growing intervals, and shows in `Engine.health` as the task `tiers`; one topic that cannot be moved does not stop
the others. Objects are deleted and written only while this directory holds the store's claim (`cold_claim`).

Never moved: the active segment, segments without a footer, topics of the engine itself, queues, whose claims must not
wait, and records that a router has still to forward.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from threading import Event, Lock
from typing import Final, NamedTuple, TypeVar

from xxhash import xxh3_64

from tidelog.addresses import scheme_of
from tidelog.clock import Clock
from tidelog.disk.bounded_store import BoundedStore
from tidelog.disk.durability import remove_if_exists, replace_file, sync_file
from tidelog.disk.interface import start_writeback
from tidelog.disk.segment_store import MARKER_KEY, SegmentStore
from tidelog.engine import key_index
from tidelog.engine.cold_claim import StoreClaim
from tidelog.engine.cold_reader import ZSTD
from tidelog.engine.config import OWN, TopicConfig
from tidelog.engine.context import EngineContext
from tidelog.engine.erase import ErasedFile, ErasureIncomplete
from tidelog.engine.manifest import ColdRow, SegmentRow
from tidelog.engine.segment import Segment, Tier, format_file_name, record_sizes
from tidelog.engine.tag_search import TAG_INDEX_SUFFIX, write_tag_index
from tidelog.engine.topic_state import TopicState
from tidelog.engine.topic_table import TopicTable
from tidelog.errors import BadInput, Corrupt, Damaged, Error, ReadOnly, StoreUnavailable, WrongStore
from tidelog.formats import cold_object, scan, sealed_segment, segment_index
from tidelog.formats.cold_object import BLOCK_BYTES
from tidelog.formats.sealed_segment import Footer
from tidelog.types import Buffer

TASK: Final = "tiers"
_RESTS_PER_S: Final = 8  # the background rests so long after a segment: writers of the same disk wait for its syncs
_VERIFY_BYTES: Final = 8 << 20  # of one read
_PLAN_INTERVAL_MS: Final = 1_000
_BACKOFF_MS: Final = (1_000, 60_000)
_OBJECTS_DIR: Final = "topics"
_OBJECT_KEY: Final = re.compile(r"topics/[0-9A-F]{8,16}/seg-\d{16,20}(\.g\d+)?\.data(\.zst)?\.[0-9a-f]+")
RECALLED: Final = ColdRow("", 0, 0, 0, 0)


class SegmentPlace(NamedTuple):
    """Where the data of one segment is."""

    topic: str
    first_seq: int
    last_seq: int
    bytes: int
    tier: Tier  # both: copied, the file is not removed yet
    object: str | None  # its address in the store
    object_bytes: int
    is_recalled: bool  # it stays on the disk until it is relocated by hand


class TierStatus(NamedTuple):
    """The cold tier of a database at one moment."""

    store: str | None  # its address; None: there is none
    enabled: bool  # segments are moved
    hot_segments: int
    hot_bytes: int
    cold_segments: int
    cold_bytes: int  # of data
    object_bytes: int  # what they take in the store
    relocated: int  # segments since the directory was opened
    recalled: int
    deleted_objects: int
    failures: int
    reads: int  # ranged reads of the store for readers
    read_bytes: int
    read_failures: int
    cache_bytes: int
    last_error: str | None


class Moved(NamedTuple):
    """The result of a relocation or a recall."""

    segments: int
    bytes: int
    failed: tuple[tuple[str, int, str], ...] = ()  # topic, first seq, reason


class RateLimiter:
    """Spreads copies over time: `pause` after every step, with the bytes of it."""

    def __init__(self, clock: Clock, bytes_per_s: int, wait: Callable[[float], object]) -> None:
        self._clock, self._rate, self._wait = clock, bytes_per_s, wait
        self._free_at_us = clock.monotonic_us()

    def pause(self, size: int) -> None:
        if not self._rate:
            return
        now_us = self._clock.monotonic_us()
        self._free_at_us = max(self._free_at_us, now_us) + size * 1_000_000 // self._rate
        self._wait((self._free_at_us - now_us) / 1e6)


SegmentT = TypeVar("SegmentT", Segment, SegmentRow)


def select_cold(sealed: Sequence[SegmentT], retain_segments: int, retain_bytes: int) -> list[SegmentT]:
    """Return the sealed segments, oldest first, that are beyond the newest `retain_segments` or, if `retain_bytes` is
    not 0, beyond the newest of so many bytes: the stricter of the two decides."""
    kept = size = 0
    for segment in reversed(sealed):
        size += segment.size
        if kept >= retain_segments or (retain_bytes and size > retain_bytes):
            break
        kept += 1
    return list(sealed[: len(sealed) - kept])


class Tiers:
    """Moves segments of one engine. `run` is the step of the background thread; the other methods work in the calling
    thread. One of them runs at a time."""

    def __init__(
        self,
        context: EngineContext,
        claim: StoreClaim | None,
        list_topics: Callable[[], list[TopicState]],
        table: Callable[[], TopicTable],
        named_keys: Iterable[str] | None,
    ) -> None:
        """`named_keys`: the objects that the manifests at the start name; None: unknown, so none is swept."""
        self._context, self._claim, self._list_topics = context, claim, list_topics
        self._table = table
        self._named_keys = None if named_keys is None else set(named_keys)
        self._work_lock = Lock()
        self._stopped = Event()
        self._in_flight: set[str] = set()
        self._garbage: deque[str] = deque()
        self._due_ms = 0
        self._backoff_ms = 0
        self._sequence = 0
        self._last_error: str | None = None
        self.relocated = self.relocated_bytes = self.recalled = self.deleted_objects = self.failures = 0

    @property
    def store(self) -> SegmentStore | None:
        return self._context.cold.store

    @property
    def is_enabled(self) -> bool:
        """Whether segments are moved: a store is configured, and the directory is open for writing."""
        return self._claim is not None

    def _require_store(self) -> SegmentStore:
        if not self._context.shards:
            raise ReadOnly(f"{self._context.root} was opened for reading; nothing was moved")
        if self.store is None or self._claim is None:
            raise BadInput(
                "no cold store is configured; nothing was moved, open the database with cold=ADDRESS, or set "
                "TIDELOG_COLD_DIR"
            )
        return self.store

    # ── the background step ───────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Move what is due. Called often; does nothing until a segment was sealed or something is to be deleted. Raises
        the first error, after the other topics had their turn."""
        now_ms = self._context.clock.monotonic_ms()
        if now_ms < self._due_ms or self._stopped.is_set():
            return
        self._due_ms = now_ms + _PLAN_INTERVAL_MS
        while self._context.idle_sealed:
            self._load_if_due(self._context.idle_sealed.pop())
        topics = [topic for topic in tuple(self._context.sealed_topics) if not topic.is_dropped]
        if not topics and not self._garbage and self._named_keys is None:
            return
        limiter = RateLimiter(self._context.clock, self._context.limits.cold_rate_bytes, self._stopped.wait)
        try:
            with self._work_lock:
                self._run(topics, limiter.pause)
        except Exception as error:
            self._note_failure(error)
            if isinstance(error, StoreUnavailable):
                first, most = _BACKOFF_MS
                self._backoff_ms = min(max(2 * self._backoff_ms, first), most)
                self._due_ms = self._context.clock.monotonic_ms() + self._backoff_ms
            if not self._stopped.is_set():
                raise
        else:
            self._backoff_ms = 0

    def _load_if_due(self, name: str) -> None:
        """Load an idle topic with segments to move: loading adds it to the topics with sealed segments. Its data files
        of moved ones are removed, or it would not be idle."""
        row = self._table().idle_row(name)
        if row is None:
            return
        sealed = [segment for segment in row.segments if segment.sealed]
        due = select_cold(sealed, *self._retained(TopicConfig.from_json(row.config)))
        if any(segment.cold is None for segment in due):
            self._table().get(name)

    def _run(self, topics: Sequence[TopicState], pause: Callable[[int], None]) -> None:
        self._take_claim()
        self._sweep()
        self._delete_garbage()
        failed: Exception | None = None
        for topic in topics:
            self._context.sealed_topics.discard(topic)
            for segment in self._plan(topic):
                if self._stopped.is_set():
                    return
                try:
                    self._relocate(topic, segment, pause)
                except StoreUnavailable:
                    self._context.sealed_topics.add(topic)
                    raise
                except Exception as error:  # of this segment; the next one that is sealed makes it due again
                    failed = failed or error
        if failed is not None:
            raise failed

    def _note_failure(self, error: Exception) -> None:
        self.failures += 1
        self._last_error = str(error)

    def stop(self) -> None:
        """End the background step and every wait for the store, for a close."""
        self._stopped.set()
        if isinstance(self.store, BoundedStore):
            self.store.close()

    # ── by hand ───────────────────────────────────────────────────────────────────────────────

    def relocate(
        self, topics: Sequence[TopicState], *, keep_segments: int | None = None, throttled: bool = False
    ) -> Moved:
        """Move the segments of these topics that are due, also recalled ones; `keep_segments` instead of what the
        settings keep on the disk. `throttled`: at the rate of the background."""
        self._require_store()
        pause = self._pause_of(throttled)
        moved: list[int] = []
        failed: list[tuple[str, int, str]] = []
        with self._work_lock:
            self._take_claim()
            self._delete_garbage()
            for topic in topics:
                for segment in self._plan(topic, keep_segments=keep_segments, recalled=True):
                    try:
                        if self._relocate(topic, segment, pause):
                            moved.append(segment.size)
                    except StoreUnavailable:
                        raise
                    except (Error, OSError) as error:
                        self._note_failure(error if isinstance(error, Error) else OSError(str(error)))
                        failed.append((topic.name, segment.base, str(error)))
        return Moved(len(moved), sum(moved), tuple(failed))

    def recall(
        self, topics: Sequence[TopicState], first: int = 0, last: int | None = None, *, throttled: bool = False
    ) -> Moved:
        """Bring the segments of these topics that hold seqs `first` to `last` back to the disk, where they stay.
        `throttled`: at the rate of the background."""
        self._require_store()
        pause = self._pause_of(throttled)
        moved: list[int] = []
        failed: list[tuple[str, int, str]] = []
        with self._work_lock:
            for topic in topics:
                with topic.lock:
                    segments = [
                        part
                        for part in topic.index.parts
                        if isinstance(part, Segment)
                        and part.has_cold_copy
                        and part.stop > first
                        and (last is None or part.base <= last)
                    ]
                for segment in segments:
                    try:
                        if self._recall(topic, segment, pause):
                            moved.append(segment.size)
                            self.recalled += 1
                    except StoreUnavailable:
                        raise
                    except (Error, OSError) as error:
                        failed.append((topic.name, segment.base, str(error)))
        return Moved(len(moved), sum(moved), tuple(failed))

    def _pause_of(self, throttled: bool) -> Callable[[int], None]:
        """Return what waits after so many bytes: at the rate of the background, or not at all."""
        rate = self._context.limits.cold_rate_bytes if throttled else 0
        return RateLimiter(self._context.clock, rate, self._stopped.wait).pause

    def claim(self) -> None:
        """Take the store from another copy of this database."""
        self._require_store()
        assert self._claim is not None, "checked above"
        with self._work_lock:
            self._claim.take(cold_segments=self._count_cold(), force=True)

    def discard(self, keys: Iterable[str]) -> None:
        """Delete these objects in the background: no manifest names them."""
        self._garbage.extend(keys)

    def discard_topic(self, topic: TopicState) -> None:
        """Delete the objects of a dropped topic in the background. The drop is durable."""
        with topic.lock:
            self.discard(
                [
                    part.cold.key
                    for part in topic.index.parts
                    if isinstance(part, Segment) and part.cold and part.cold.key
                ]
            )
            self.discard(topic.dropped_objects)

    def erase(self, topic_id: int) -> tuple[list[ErasedFile], list[str]]:
        """Delete the objects of a topic that no segment names, for an erasure; return them, and the store if it cannot
        be changed from here. Raises ErasureIncomplete where the store does not answer."""
        store = self.store
        if store is None:
            return [], []
        if self._claim is None:
            return [], [f"{store.address}: the cold store, which this process only reads"]
        erased: list[ErasedFile] = []
        try:
            with self._work_lock:
                self._take_claim()
                named = {*self._in_flight, *(key for key in self._named_objects(topic_id))}
                for each in list(store.list(f"{_OBJECTS_DIR}/{topic_id:08X}")):
                    if each.key in named or not _OBJECT_KEY.fullmatch(each.key):
                        continue
                    store.delete(each.key)
                    self._context.cold.cache.drop(each.key)
                    erased.append(ErasedFile(f"{store.address}/{each.key}", "removed", each.length, ""))
                erased += [
                    ErasedFile(f"{store.address}/{each.key}", "removed", each.length, "")
                    for each in store.remove_leftovers(f"{_OBJECTS_DIR}/{topic_id:08X}")
                ]
        except (StoreUnavailable, WrongStore) as error:
            raise ErasureIncomplete(
                f"the records are deleted, and objects of the cold store {store.address} may still hold their bytes; "
                f"no receipt was written, erase them again when the store can be used ({error})"
            ) from error
        self.deleted_objects += len(erased)
        if scheme_of(store.address) in (None, "file", "hdfs"):
            return erased, []
        step = "let the bucket remove incomplete uploads by a rule of its life cycle"
        return erased, [f"parts of uploads to {store.address} that a crash cut off, which no key names: {step}"]

    def _named_objects(self, topic_id: int) -> Iterator[str]:
        for topic in self._list_topics():
            if topic.id == topic_id:
                with topic.lock:
                    parts = [part for part in topic.index.parts if isinstance(part, Segment)]
                yield from (part.cold.key for part in parts if part.cold is not None)

    # ── state ─────────────────────────────────────────────────────────────────────────────────

    def status(self) -> TierStatus:
        places = list(self.places(self._list_topics()))
        cold = [place for place in places if place.tier != "hot"]
        hot = [place for place in places if place.tier != "cold"]
        reader, idle = self._context.cold, self._table().idle_totals
        return TierStatus(
            None if self.store is None else self.store.address,
            self.is_enabled,
            len(hot) + idle.hot_segments,
            sum(place.bytes for place in hot) + idle.hot_bytes,
            len(cold) + idle.cold_segments,
            sum(place.bytes for place in cold) + idle.cold_bytes,
            sum(place.object_bytes for place in cold) + idle.object_bytes,
            self.relocated,
            self.recalled,
            self.deleted_objects,
            self.failures,
            reader.reads,
            reader.bytes,
            reader.failures,
            reader.cache.nbytes,
            self._last_error,
        )

    def places(self, topics: Iterable[TopicState]) -> Iterator[SegmentPlace]:
        """Yield where each sealed segment of these topics is."""
        for topic in topics:
            with topic.lock:
                segments = [part for part in topic.index.parts if isinstance(part, Segment) and part.is_sealed]
                found = [(segment, segment.tier(), segment.cold) for segment in segments]
            for segment, tier, cold in found:
                is_stored = cold is not None and cold.key != ""
                yield SegmentPlace(
                    topic.name,
                    segment.base,
                    segment.stop - 1,
                    segment.size,
                    tier,
                    self._context.cold.where(cold) if is_stored and cold is not None else None,
                    cold.length if cold is not None else 0,
                    cold is not None and not is_stored,
                )

    def _count_cold(self) -> int:
        return self._table().idle_totals.cold_segments + sum(
            isinstance(part, Segment) and part.has_cold_copy
            for topic in self._list_topics()
            for part in tuple(topic.index.parts)
        )

    # ── relocation ────────────────────────────────────────────────────────────────────────────

    def _plan(self, topic: TopicState, *, keep_segments: int | None = None, recalled: bool = False) -> list[Segment]:
        """Return the segments of a topic to move, oldest first."""
        if topic.name.startswith(OWN) or topic.config.type == "queue" or topic.is_ephemeral:
            return []
        keep, keep_bytes = self._retained(topic.config)
        if keep_segments is not None:
            keep, keep_bytes = keep_segments, 0
        with topic.lock:
            if topic.is_dropped:
                return []
            index = topic.index
            obsolete = index.obsolete_segments()
            sealed = [part for part in index.parts if isinstance(part, Segment) and part.is_sealed]
            return [
                segment
                for segment in select_cold(sealed, keep, keep_bytes)
                if not segment.lacks_footer
                and segment.base not in obsolete
                and segment.stop - 1 <= index.forwarded_seq
                and (segment.cold is None or (recalled and not segment.has_cold_copy))
            ]

    def _retained(self, config: TopicConfig) -> tuple[int, int]:
        """Return how many segments of a topic stay on the disk, and how many bytes; 0 bytes: any number."""
        limits, own_segments, own_bytes = self._context.limits, config.hot_retain_segments, config.hot_retain_bytes
        return (
            limits.hot_retain_segments if own_segments is None else own_segments,
            limits.hot_retain_bytes if own_bytes is None else own_bytes,
        )

    def _relocate(self, topic: TopicState, segment: Segment, pause: Callable[[int], None]) -> bool:
        """Copy, verify and flip one segment; False if it was dropped meanwhile."""
        store = self._require_store()
        footer = self._prepare_files(topic, segment)
        key = self._new_key(topic, segment)
        self._in_flight.add(key)
        try:
            row = self._copy(store, key, segment, footer, pause)
            self._verify(store, row, segment, footer, pause)
            with topic.lock:
                is_gone = topic.is_dropped or segment not in topic.index.parts or segment.cold not in (None, RECALLED)
                if not is_gone:
                    segment.cold = row
                    topic.relocated_segments.append(segment)
                    self._context.needs_checkpoint = True
                    self._context.dirty_topics.add(topic)
            if is_gone:
                self.discard([key])
                return False
        except BaseException:
            self.discard([key])  # an object that did not verify, or only a part of one
            raise
        finally:
            self._in_flight.discard(key)
        self.relocated, self.relocated_bytes = self.relocated + 1, self.relocated_bytes + segment.size
        pause(self._context.limits.cold_rate_bytes // _RESTS_PER_S)
        return True

    def _new_key(self, topic: TopicState, segment: Segment) -> str:
        """Return a key that no object of the topic ever had."""
        suffix = ".zst" if self._context.limits.cold_compression == "zstd" else ""
        name = format_file_name(segment.base, segment.generation, f".data{suffix}")
        with topic.lock:
            used = {part.cold.key for part in topic.index.parts if isinstance(part, Segment) and part.cold}
            used |= {*topic.dropped_objects, *self._garbage, *self._in_flight, *(self._named_keys or ())}
        while True:
            self._sequence += 1
            key = f"{_OBJECTS_DIR}/{topic.id:08X}/{name}.{self._context.clock.now_us() + self._sequence:x}"
            if key not in used:
                return key

    def _prepare_files(self, topic: TopicState, segment: Segment) -> Footer:
        """Check and complete the files that stay on the disk; return the footer."""
        content = segment.read_footer()
        if content is None:
            raise Corrupt(
                segment.path(".foot"), pos=0, reason="the footer does not read: the segment stays on the disk"
            )
        footer, shape = sealed_segment.decode_footer(content), segment.shape()
        fault = sealed_segment.find_index_fault(footer, shape.index)
        if fault is None and (footer.data_bytes, footer.chunk_bytes) != (segment.size, BLOCK_BYTES):
            fault = f"its footer covers {footer.data_bytes} bytes in chunks of {footer.chunk_bytes}"
        if fault is not None:
            topic.report_corruption(segment.path(".idx"), fault)
            raise Corrupt(segment.path(".idx"), pos=0, reason=f"{fault}: the segment stays on the disk")
        flags, files = segment_index.read_entries(shape.index)["flags"], segment.files
        if (flags & segment_index.HAS_TAG).any() and files.disk.stat(segment.path(TAG_INDEX_SUFFIX)) is None:
            rows = scan.scan_records(shape.data.fetch(0, segment.size), above=segment.base - 1).rows
            write_tag_index(files, segment.base, segment.generation, content, rows)
            files.disk.sync_dir(files.directory)
        key_index.ensure_key_file(topic, segment)  # without it a delete would read the segment from the store
        if (flags & segment_index.HAS_META).any():
            sizes = record_sizes(segment, 0, segment.stop - segment.base)
            replace_file(files.disk, segment.path(".siz"), sealed_segment.encode_record_sizes(segment.base, sizes))
        return footer

    def _copy(
        self, store: SegmentStore, key: str, segment: Segment, footer: Footer, pause: Callable[[int], None]
    ) -> ColdRow:
        """Put the object; its bytes come from chunks that match the footer at this moment."""
        data, path = segment.shape().data, segment.path(".data")
        data_digest, digest, length = xxh3_64(), xxh3_64(), 0

        def blocks() -> Iterator[Buffer]:
            for number, lo in enumerate(range(0, segment.size, BLOCK_BYTES)):
                block = data.fetch(lo, min(lo + BLOCK_BYTES, segment.size))
                if not sealed_segment.is_chunk_valid(footer, number, block):
                    raise Corrupt(
                        path, pos=lo, reason="a chunk does not match the footer: the segment stays on the disk"
                    )
                data_digest.update(block)
                yield block
                pause(len(block))

        is_compressed = self._context.limits.cold_compression == "zstd"

        def pieces() -> Iterator[Buffer]:
            nonlocal length
            for piece in cold_object.encode_blocks(blocks()) if is_compressed else blocks():
                digest.update(piece)
                length += len(piece)
                yield piece

        store.put(key, pieces())
        return ColdRow(key, length, digest.intdigest(), data_digest.intdigest(), ZSTD if is_compressed else 0)

    def _verify(
        self, store: SegmentStore, row: ColdRow, segment: Segment, footer: Footer, pause: Callable[[int], None]
    ) -> None:
        """Read the whole object back and compare it with what was copied. Raises Corrupt."""
        verify_object(store, row, segment.size, footer, self._context.cold.where(row), pause)

    # ── recall ────────────────────────────────────────────────────────────────────────────────

    def _recall(self, topic: TopicState, segment: Segment, pause: Callable[[int], None]) -> bool:
        """Bring one segment back; False if it was dropped meanwhile."""
        row, disk, path = segment.cold, segment.files.disk, segment.path(".data")
        assert row is not None, "it is in the cold tier"
        temporary, is_fetched = f"{path}.tmp", segment.is_remote()
        if is_fetched:
            self._fetch(segment, row, temporary, pause)
        with self._context.hot_files_lock:  # a checkpoint may be about to remove the data file
            if is_fetched:
                disk.rename(temporary, path)
            elif segment.is_remote():
                raise Damaged(f"{path} was removed while it was recalled; nothing was changed, try again")
            disk.sync_dir(segment.files.directory)
            with topic.lock:
                is_gone = topic.is_dropped or segment not in topic.index.parts
                if not is_gone:
                    segment.cold = RECALLED
                    segment.unmap()
                    topic.dropped_objects.append(row.key)
                    topic.relocated_segments = [each for each in topic.relocated_segments if each is not segment]
                    self._context.needs_checkpoint = True
                    self._context.dirty_topics.add(topic)
            if is_gone and is_fetched:  # a file that was there before may be all that the newest manifest names
                remove_if_exists(disk, path)
        self._context.cold.cache.drop(row.key)
        pause(self._context.limits.cold_rate_bytes // _RESTS_PER_S)
        return not is_gone

    def _fetch(self, segment: Segment, row: ColdRow, temporary: str, pause: Callable[[int], None]) -> None:
        """Write the data of a segment to a temporary file, verified against the footer, and synced."""
        disk, content = segment.files.disk, segment.read_footer()
        if content is None:
            raise Corrupt(segment.path(".foot"), pos=0, reason="the footer does not read: nothing was recalled")
        footer, shape = sealed_segment.decode_footer(content), segment.shape()
        remove_if_exists(disk, temporary)
        file = disk.open(temporary, "create")
        try:
            for lo in range(0, segment.size, _VERIFY_BYTES):
                piece = shape.data.fetch(lo, min(lo + _VERIFY_BYTES, segment.size))
                for number in range(lo // BLOCK_BYTES, -(-(lo + len(piece)) // BLOCK_BYTES)):
                    at = number * BLOCK_BYTES - lo
                    if not sealed_segment.is_chunk_valid(footer, number, piece[at : at + BLOCK_BYTES]):
                        reason = "a chunk does not match the footer: nothing was recalled"
                        raise Corrupt(self._context.cold.where(row), pos=lo + at, reason=reason)
                file.write(lo, piece)
                start_writeback(file, lo, len(piece))
                pause(len(piece))
            sync_file(file)
        except BaseException:
            with suppress(OSError):
                disk.remove(temporary)
            raise
        finally:
            file.close()

    # ── objects that are not needed ───────────────────────────────────────────────────────────

    def _take_claim(self) -> None:
        assert self._claim is not None, "only of an enabled tier"
        self._claim.take(cold_segments=self._count_cold())

    def _delete_garbage(self) -> None:
        """Delete objects that no manifest names, unless a backup may read them. The claim was checked by the caller."""
        store = self._require_store()
        while self._garbage and not self._stopped.is_set() and not self._context.pins.hold_segments:
            key = self._garbage[0]
            self.deleted_objects += store.delete(key)
            self._context.cold.cache.drop(key)
            self._garbage.popleft()

    def _sweep(self) -> None:
        """Once after the start: delete objects of this database that no manifest names, which a crash left."""
        if self._named_keys is None:
            return
        self._require_store().remove_leftovers(_OBJECTS_DIR)
        listed = [each.key for each in self._require_store().list(_OBJECTS_DIR)]
        # Taken after the listing: what was put meanwhile is named here.
        named = {*self._named_keys, *self._in_flight, *self._garbage, MARKER_KEY}
        for topic in self._list_topics():
            with topic.lock:
                named |= {part.cold.key for part in topic.index.parts if isinstance(part, Segment) and part.cold}
                named |= set(topic.dropped_objects)
        self.discard([key for key in listed if key not in named and _OBJECT_KEY.fullmatch(key)])
        self._named_keys = None


def verify_object(
    store: SegmentStore,
    row: ColdRow,
    data_bytes: int,
    footer: Footer | None,
    where: str,
    pause: Callable[[int], None] = lambda _: None,
) -> None:
    """Read a whole object and compare it with its row and, block by block, with the footer of its segment.

    Raises:
        Corrupt: the object is missing, or is not the one that was stored.
        StoreUnavailable: the store does not answer.
    """
    digest, step = xxh3_64(), "restore the object, or recall the segment while its file is there"

    def read(lo: int, hi: int) -> bytes:
        try:
            content = store.read(row.key, lo, hi)
        except FileNotFoundError:
            raise Corrupt(where, pos=0, reason="the object is missing", next_step=step) from None
        if len(content) != hi - lo:
            reason = f"it ends at byte {lo + len(content)} of {row.length}"
            raise Corrupt(where, pos=lo + len(content), reason=reason, next_step=step)
        digest.update(content)
        pause(len(content))
        return content

    def check_block(number: int, block: Buffer) -> None:
        if footer is not None and not sealed_segment.is_chunk_valid(footer, number, block):
            raise Corrupt(where, pos=number * BLOCK_BYTES, reason="a block is not what was sealed", next_step=step)

    if row.compression == ZSTD:
        lo = max(row.length - cold_object.tail_bytes(data_bytes), 0)
        try:
            index = cold_object.decode_index(store.read(row.key, lo, row.length), row.length, where)
        except FileNotFoundError:
            raise Corrupt(where, pos=0, reason="the object is missing", next_step=step) from None
        read(0, cold_object.HEADER_BYTES)
        for number in range(len(index)):
            check_block(number, index.decode_block(number, read(*index.byte_range(number, number + 1)), where))
        read(lo, row.length)
        size = index.data_bytes
    else:
        size = row.length
        for lo in range(0, row.length, _VERIFY_BYTES):
            piece = memoryview(read(lo, min(lo + _VERIFY_BYTES, row.length)))
            for at in range(0, len(piece), BLOCK_BYTES):
                check_block((lo + at) // BLOCK_BYTES, piece[at : at + BLOCK_BYTES])
    if size != data_bytes:
        raise Corrupt(where, pos=size, reason=f"it holds {size} bytes of data, not {data_bytes}", next_step=step)
    if digest.intdigest() != row.digest:
        raise Corrupt(where, pos=0, reason="its checksum is not the one that was stored", next_step=step)
    length = store.length(row.key)
    if length != row.length:
        raise Corrupt(where, pos=row.length, reason=f"it has {length} bytes, {row.length} were stored", next_step=step)
