"""Compaction: of the records with the same key only the newest stays.

    seq      1:a  2:b  3:a  4:∅  5:b† │ 6:a  7:c            † tombstone
             └──── horizon ───────────┘ └ active segment, or not read yet by a group with a hold
    removed  1, 2, and 3, which 6 replaced; 5 once it is older than tombstone_delay_ms; 4 has no key and stays

What is removed is a voluntary delete: readers skip it without a gap, seqs and times of the others stay, and the gap log
has a row with the cause `compaction`. The bytes are reclaimed where segments are dropped or rewritten.

The horizon is the last record that may be removed. After it are the records of the active segment, records that a
group with a hold has not read, and records that a router has not forwarded, as of the newest checkpoint. A tombstone is
removed only with the records that it replaced or after them, so an older value of its key never comes back.

A run logs what it removes in frames of at most `_FRAME_RECORDS` (type Compaction), oldest records first, and last how
far it is. A crash loses the frames that were not synced, and the next run finds the same records again. Progress is in
the frame and in the manifest: a topic without new records is not looked at again after a restart.

The search for replaced records may be done elsewhere (`pipelines.compact`, on many machines): `begin_search` closes
the active segment and says what is to be searched, `remove_found` removes a part of what was found, oldest first, by
the same rules and in the same frames.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from tidelog.engine import delete, retention
from tidelog.engine.context import EngineContext
from tidelog.engine.delete import MatchedRecords
from tidelog.engine.key_index import KeyIndex, KeyTable, merge_seqs
from tidelog.engine.record_keys import selector_of
from tidelog.engine.segment import SizeCount
from tidelog.engine.topic_state import CompactionProgress, TopicState
from tidelog.errors import BadInput, Error, Refused
from tidelog.formats import control_frames
from tidelog.formats.frame import SEQ_MAX
from tidelog.types import Ints
from tidelog.wal import Commit, CommitFuture

_log = logging.getLogger("tidelog.engine")
COMPACTION_TASK: Final = "compaction"
_FRAME_RECORDS: Final = 16_384
_LOGGED_FRAMES_MAX: Final = 8  # that are on their way to the WAL: they share a sync
Pace = Callable[[int], object]  # called with the bytes that were read; may wait


class Compacted(NamedTuple):
    """The result of a compaction."""

    records: int  # removed, tombstones included
    bytes: int
    tombstones: int  # of them, tombstones whose delay had passed
    compacted_to: int  # of the records up to here, only the newest of each key is left


class CompactionCommit(Commit):
    """A step of a compaction on its way through the WAL. The frame's seq is its number among the topic's deletes."""

    __slots__ = ("actor", "body", "matched", "number", "topic")
    future: CommitFuture[SizeCount]

    def __init__(
        self,
        topic: TopicState,
        body: control_frames.Compaction,
        number: int,
        actor: str | None,
        matched: MatchedRecords,
    ) -> None:
        encoded = topic.encode_control(body, seq=number)
        super().__init__([encoded], frames=1, durable=topic.is_durable, future=CommitFuture(topic.shard))
        self.topic, self.body, self.number, self.actor, self.matched = topic, body, number, actor, matched

    def apply(self, error: Error | None) -> SizeCount | Error | None:
        if error is not None:
            return None
        with self.topic.lock:
            try:
                return _apply(self.topic, self.body, self.number, self.actor, matched=self.matched)
            except Error as failure:
                return failure  # it is logged: replay repeats it once the damage is repaired


def _apply(
    topic: TopicState,
    body: control_frames.Compaction,
    number: int,
    actor: str | None,
    ts_ms: int | None = None,
    matched: MatchedRecords | None = None,
) -> SizeCount:
    """Remove the records and record the progress. With the topic's lock held."""
    removed = SizeCount(0, 0)
    if body.seqs:
        request = control_frames.Delete(seqs=body.seqs)
        removed = delete.apply_delete(topic, request, number, actor, ts_ms, matched, cause="compaction")
    if body.compacted_to:
        topic.compaction = CompactionProgress(body.selector, body.compacted_to, body.tombstone_ms)
    return removed


def replay_compaction(topic: TopicState, body: control_frames.Compaction, number: int, ts_ms: int) -> None:
    """Apply a frame found in the WAL. The gap log has rows for deletes up to the manifest's number."""
    _apply(topic, body, number if number > topic.delete_count else 0, "recovery", ts_ms)
    topic.delete_count = max(topic.delete_count, number)


# ── one run ───────────────────────────────────────────────────────────────────────────────────────


def compact_topic(
    topic: TopicState, *, actor: str | None = None, seal: bool = False, pace: Pace = lambda _: None
) -> Compacted:
    """Remove the records that newer ones of their key replaced; when this returns they are gone under the topic's
    class. `seal`: start another segment first, so that every record may be removed. On an error, part of them may be
    gone, which is correct at any point; a later run removes the rest."""
    keys = topic.key_index
    keys.selector()
    with topic.lock:
        topic.check_writable()
        topic.context.shard(topic.id)  # raises where nothing can be written
    delete.forward_before_delete(topic)
    retention.expire_records(topic)
    with keys.compaction_lock:
        return _Run(topic, keys, actor, pace).run(seal=seal)


class _Run:
    """One compaction of one topic. Readers of the table wait for one segment of it at most, never for its pace."""

    def __init__(self, topic: TopicState, keys: KeyIndex, actor: str | None, pace: Pace) -> None:
        self._topic, self._keys, self._actor, self._pace = topic, keys, actor, pace
        self._selector = keys.selector().id
        self._delay_ms = topic.config.tombstone_delay_ms
        self._removed = SizeCount(0, 0)
        self._tombstones = 0
        self._oldest_tombstone_ms = 0
        self._horizon = SEQ_MAX  # the lowest of this run
        self._logged: list[tuple[CompactionCommit, Ints]] = []  # on their way, each with the tombstones of its records

    def run(self, *, seal: bool) -> Compacted:
        topic, stats = self._topic, self._topic.context.compaction_stats
        with topic.lock:
            if seal:
                topic.index.roll_segment()
                topic.mark_dirty()
                topic.context.needs_checkpoint = True
            stop = closed_stop(topic)
        part, parts = 0, self._count_parts()
        while part < parts:
            self._extend(part, stop)
            with self._keys.lock:
                if self._keys.parts() != parts:  # the topic has grown: the keys are divided differently
                    part, parts = 0, self._keys.parts()
                    continue
                self._compact_part(self._keys.open(part, stop), stop)
            part += 1
        self._finish(stop)
        stats.runs += 1
        progress = topic.compaction
        result = Compacted(*self._removed, self._tombstones, 0 if progress is None else progress.compacted_to)
        if result.records:
            _log.info(
                "%s: compaction removed %d records, %d bytes, up to seq %d",
                topic.name,
                result.records,
                result.bytes,
                result.compacted_to,
            )
        return result

    def _count_parts(self) -> int:
        with self._keys.lock:
            return self._keys.parts()

    def _extend(self, part: int, stop: int) -> None:
        """Index the records below `stop`, segment by segment, at the pace of the run."""
        size = 1
        try:
            while size:
                with self._keys.lock:
                    size = self._keys.extend(part, stop) if part < self._keys.parts() else 0
                self._topic.context.compaction_stats.read_bytes += size
                self._pace(size)
        finally:
            with self._keys.lock:
                self._keys.finish_files()

    def _compact_part(self, table: KeyTable, stop: int) -> None:
        """Remove what one part of the keys allows, oldest first."""
        horizon = self._wait_for_horizon(stop)
        self._remove(table.replaced(self._keys.live).seqs, table.tombstones(self._keys.live), horizon, stop)

    def _remove(self, replaced: Ints, tombstones: Ints, horizon: int, stop: int) -> None:
        """Remove the replaced records up to the horizon, and with them the tombstones whose delay has passed."""
        times = record_times(self._topic, tombstones)
        now_ms = self._topic.context.now_ms()
        is_due = (times + self._delay_ms <= now_ms) & (tombstones <= horizon)
        # A tombstone that a later record replaced is removed as any other replaced record.
        at = np.searchsorted(replaced, tombstones)
        is_replaced = np.append(replaced, -1)[at] == tombstones
        due = tombstones[is_due & ~is_replaced]
        kept_ms = int(times[~is_due & ~is_replaced].min(initial=np.iinfo(np.int64).max))
        if kept_ms < np.iinfo(np.int64).max:
            self._oldest_tombstone_ms = min(self._oldest_tombstone_ms or kept_ms, kept_ms)
        seqs = merge_seqs(replaced[: np.searchsorted(replaced, horizon, "right")], due)
        for lo in range(0, len(seqs), _FRAME_RECORDS):
            self._submit(seqs[lo : lo + _FRAME_RECORDS], stop, 0, due)
            # Replaced records may go in any order. A tombstone is never removed before a record that it replaced: where
            # frames have tombstones, one that cannot be written ends the run before the next is logged.
            if len(due) or len(self._logged) >= _LOGGED_FRAMES_MAX:
                self._wait_for_logged()
        self._wait_for_logged()

    def _wait_for_horizon(self, stop: int) -> int:
        """Return the horizon once no cursor move is on its way: a hold that was acknowledged is respected."""
        topic = self._topic
        while True:
            with topic.lock:
                topic.check_writable()
                pending = list(topic.pending_cursor_commits.values())
                if not pending:
                    self._horizon = min(self._horizon, horizon(topic, stop))
                    return self._horizon
            for future in pending:
                try:
                    future.wait()
                except Error:
                    continue  # its own caller gets the error

    def _submit(self, seqs: Ints, stop: int, compacted_to: int, tombstones: Ints) -> None:
        """Log one step, which its commit applies. Records that a hold covers by now stay."""
        topic = self._topic
        matched = delete.with_sizes(topic, seqs)
        while True:
            limit = self._wait_for_horizon(stop)
            with topic.lock:
                topic.check_writable()
                if topic.pending_cursor_commits:
                    continue
                keep = matched.seqs <= min(limit, horizon(topic, stop))
                matched = MatchedRecords(matched.seqs[keep], matched.sizes[keep])
                if not len(matched.seqs) and not compacted_to:
                    return
                body = control_frames.Compaction(
                    selector=self._selector,
                    compacted_to=compacted_to,
                    tombstone_ms=self._oldest_tombstone_ms,
                    seqs=tuple(matched.seqs.tolist()),
                )
                topic.delete_count += 1
                if topic.is_ephemeral:
                    removed = _apply(topic, body, topic.delete_count, self._actor, matched=matched)
                    topic.mark_dirty()
                    break
                commit = CompactionCommit(topic, body, topic.delete_count, self._actor, matched)
                topic.submit(commit)
            self._logged.append((commit, tombstones))
            return
        self._count(removed, matched, tombstones)

    def _wait_for_logged(self) -> None:
        """Wait until the frames that were logged are applied. Raises the first error, after all of them."""
        logged, self._logged = self._logged, []
        failed: Error | None = None
        for commit, tombstones in logged:
            try:
                self._count(commit.future.wait(), commit.matched, tombstones)
            except Error as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _count(self, removed: SizeCount, matched: MatchedRecords, tombstones: Ints) -> None:
        self._tombstones += int(np.isin(matched.seqs, tombstones).sum()) if len(tombstones) else 0
        self._removed = SizeCount(self._removed.records + removed.records, self._removed.bytes + removed.bytes)
        stats = self._topic.context.compaction_stats
        stats.records, stats.bytes = stats.records + removed.records, stats.bytes + removed.bytes

    def remove_found(self, found: FoundRecords) -> FoundRemoved:
        topic, stop = self._topic, found.range.stop
        with topic.lock:
            _check_found(topic, found)
            stop = min(stop, closed_stop(topic))
            replaced, tombstones = topic.index.live_seqs(found.replaced), topic.index.live_seqs(found.tombstones)
        self._horizon, self._oldest_tombstone_ms = found.range.horizon, found.oldest_tombstone_ms
        self._remove(replaced, tombstones, self._wait_for_horizon(stop), stop)
        progress = topic.compaction
        is_new = progress is None or progress.selector != self._selector or progress.compacted_to < self._horizon
        if found.is_last and is_new:
            self._finish(stop)
        return FoundRemoved(*self._removed, self._tombstones, self._horizon, self._oldest_tombstone_ms)

    def _finish(self, stop: int) -> None:
        topic = self._topic
        reached = min(self._wait_for_horizon(stop), stop - 1)
        progress = CompactionProgress(self._selector, max(reached, 1), self._oldest_tombstone_ms)
        topic.context.compaction_stats.tombstones += self._tombstones
        if topic.index.head and topic.compaction != progress:
            self._submit(np.zeros(0, np.int64), stop, progress.compacted_to, np.zeros(0, np.int64))
            self._wait_for_logged()


# ── what was found elsewhere ──────────────────────────────────────────────────────────────────────


class SearchRange(NamedTuple):
    """What a search for replaced records reads: all live records of [first, stop)."""

    epoch: int
    rule: str  # `compaction` of the topic's config
    opening: int  # identifies this opening of the directory
    first: int
    stop: int
    horizon: int  # the last record that may be removed now


class FoundRecords(NamedTuple):
    """A part of what a search of a range has found. Parts are removed in the order of their seqs."""

    range: SearchRange  # `horizon`: the lowest of all parts so far
    replaced: Ints  # ascending; a later record of their key was live
    tombstones: Ints  # ascending; the newest of their keys
    is_last: bool = False  # nothing is left: remember how far the topic is compacted
    oldest_tombstone_ms: int = 0  # of the tombstones of earlier parts that stay


class FoundRemoved(NamedTuple):
    """What became of a part."""

    records: int
    bytes: int
    tombstones: int
    horizon: int  # for the next part
    oldest_tombstone_ms: int  # of this and of earlier parts


def begin_search(topic: TopicState) -> SearchRange:
    """Start another segment, so that every record may be removed, and return what is to be searched.

    What the search finds stays true while the directory is open and the rule stays: a record whose newer one was live
    then is replaced, whatever is written or deleted meanwhile. After another opening it may not be: a power cut may
    have taken the newer one. So `remove_found` refuses what was found before.
    """
    rule = topic.key_index.selector().rule
    with topic.lock:
        topic.check_writable()
        topic.context.shard(topic.id)  # raises where nothing can be written
    delete.forward_before_delete(topic)
    retention.expire_records(topic)
    with topic.lock:
        topic.index.roll_segment()
        topic.mark_dirty()
        topic.context.needs_checkpoint = True
        stop = closed_stop(topic)
        first, last = topic.index.earliest, horizon(topic, stop)
        return SearchRange(topic.epoch, rule, topic.context.opening, first, stop, last)


def remove_found(topic: TopicState, found: FoundRecords, *, actor: str | None = None) -> FoundRemoved:
    """Remove what a search has found, as `compact_topic` does; when this returns it is gone under the topic's class.

    Raises:
        Refused: the topic, its rule or the opening of the directory is not that of the search.
    """
    # A run of the background may be at work: what both remove is removed once.
    return _Run(topic, topic.key_index, actor, lambda _: None).remove_found(found)


def _check_found(topic: TopicState, found: FoundRecords) -> None:
    sought, rule = found.range, topic.config.compaction
    now = (topic.epoch, rule, topic.context.opening)
    if now != (sought.epoch, sought.rule, sought.opening):
        reason = "its rule for keys was changed" if rule != sought.rule else "it was opened or created again"
        raise Refused(
            f"{topic.name}: {reason} since replaced records were searched; what was removed before is right, nothing "
            "more was removed, search again"
        )
    for seqs in (found.replaced, found.tombstones):
        if len(seqs) and (seqs[0] < 1 or seqs[-1] >= sought.stop or (seqs[1:] <= seqs[:-1]).any()):
            raise BadInput(
                f"{topic.name}: seqs that were found have to ascend, from 1 to below {sought.stop}; nothing was removed"
            )


def closed_stop(topic: TopicState) -> int:
    """Return one past the last record before the active segment. With the topic's lock held."""
    active = topic.index.active_segment_base()
    return topic.index.head + 1 if active is None else active


def horizon(topic: TopicState, stop: int) -> int:
    """Return the last record below `stop` that compaction may remove. With the topic's lock held."""
    held = [cursor.seq for cursor in topic.groups.values() if cursor.hold_bytes]
    forwarded = [min(out.cursor, out.saved_cursor) for out in topic.downstream]
    return min([stop - 1, *held, *forwarded])


def record_times(topic: TopicState, seqs: Ints) -> Ints:
    """Return the times of these ascending seqs in milliseconds; 0 where the record is gone. Indexes of sealed segments
    are verified against their footers: a wrong time would remove a tombstone too early."""
    times = np.zeros(len(seqs), np.int64)
    with topic.lock:
        for part, first, stop in topic.index.slices(int(seqs[0]), int(seqs[-1]) + 1) if len(seqs) else ():
            lo, hi = np.searchsorted(seqs, (first, stop))
            if lo < hi:
                times[lo:hi] = part.entries()["ts"][seqs[lo:hi] - part.base].astype(np.int64)
    return times


# ── background ────────────────────────────────────────────────────────────────────────────────────


class _Stopped(Exception):
    """The directory is being closed. What a run has logged stays, and the next one does the rest."""


class Compactor:
    """Compacts the topics that are due, one after the other, at a bounded rate. A topic that fails does not stop the
    others."""

    def __init__(self, context: EngineContext, wait: Callable[[float], object] | None = None) -> None:
        """`wait` blocks for so many seconds, or less when the engine closes; None: no limit of the rate."""
        self._context, self._wait = context, wait
        self._is_stopping = False
        self._next_ms: dict[TopicState, int] = {}  # when a topic is looked at again, monotonic

    def stop(self) -> None:
        """End a run after the segment that it indexes; the next start goes on."""
        self._is_stopping = True

    def run_due(self) -> None:
        """Compact every topic that is due; raise the first error."""
        context, failed = self._context, list[Exception]()
        now_ms = context.clock.monotonic_ms()
        topics = context.compacted_topics.copy()
        for gone in self._next_ms.keys() - topics:
            del self._next_ms[gone]
        for topic in topics:
            if self._next_ms.get(topic, 0) > now_ms or self._is_stopping:
                continue
            self._next_ms[topic] = now_ms + context.limits.compaction_interval_ms
            try:
                if is_due(topic):
                    compact_topic(topic, actor=COMPACTION_TASK, pace=self._pace)
            except _Stopped:
                return
            except Exception as error:
                if not (topic.is_dropped or context.closing):
                    failed.append(error)
        if failed:
            raise failed[0]

    def _pace(self, size: int) -> None:
        if self._is_stopping:
            raise _Stopped
        rate = self._context.limits.compaction_bytes_per_s
        if self._wait is not None and rate:
            self._wait(size / rate)


def is_due(topic: TopicState) -> bool:
    """Whether a compaction may find something to remove: closed records after its progress that nothing holds, or a
    tombstone whose delay has passed."""
    with topic.lock:
        rule, progress = topic.config.compaction, topic.compaction
        if rule is None or topic.is_dropped or not topic.index.count:
            return False
        if progress is None or progress.selector != selector_of(rule).id:
            progress = CompactionProgress(0, 0, 0)
        due_ms = progress.tombstone_ms + topic.config.tombstone_delay_ms
        if progress.tombstone_ms and due_ms <= topic.context.now_ms():
            return True
        return horizon(topic, closed_stop(topic)) > progress.compacted_to
