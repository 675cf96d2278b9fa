"""Deletes: logged first, then applied. Readers skip deleted records without a gap.

The frame holds the request (`before_seq`, a tag, seqs) and the head at that time as a bound, so replay finds the same
records.

A tag match is searched once, before the delete is queued, and without the topic's lock: parts are listed under the
lock, searched without it, and records appended meanwhile are searched the same way until few are left. The rest, at
most a thousand records, is searched under the lock that queues the delete. The commit applies what was found, so
writers of the topic and of its shard never wait for a search. Where writers are faster than the search, the delete is
bounded by what it has searched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

import numpy as np

from tidelog.engine import key_index, retention
from tidelog.engine.batch_encoder import check_int
from tidelog.engine.context import RemovalCause
from tidelog.engine.memtable import MemTable
from tidelog.engine.results import Deleted
from tidelog.engine.routing import forwarder
from tidelog.engine.segment import Part, Segment, SizeCount, record_sizes_reader
from tidelog.engine.tag_search import search_part, search_part_locked
from tidelog.engine.topic_index import Slice
from tidelog.engine.topic_state import TopicState
from tidelog.errors import BadInput, Corrupt, Error
from tidelog.formats import control_frames
from tidelog.formats.control_frames import Match, MatchOp
from tidelog.formats.frame import SEQ_MAX
from tidelog.types import Ints
from tidelog.wal import Commit, CommitFuture

_DELETE_SEQS_MAX = 1_000_000
_FEW_SEQS_MAX = 16  # deleted one by one: arrays cost more below about this many
_LOCKED_SEARCH_RECORDS_MAX = 1_000  # records appended during a search that are searched under the lock
_SEARCH_ROUNDS_MAX = 8  # each searches what was appended during the one before


class MatchedRecords(NamedTuple):
    """Records that a tag match selects, found before the commit."""

    seqs: Ints  # ascending
    sizes: Ints  # bytes of data and meta of each


class DeleteCommit(Commit):
    """A delete on its way through the WAL. The frame's seq is the number of the delete, which identifies its gap log
    row."""

    __slots__ = ("actor", "body", "matched", "number", "topic")
    future: CommitFuture[Deleted]

    def __init__(
        self,
        topic: TopicState,
        body: control_frames.Delete,
        number: int,
        actor: str | None,
        matched: MatchedRecords | None = None,
    ) -> None:
        encoded = topic.encode_control(body, seq=number)
        super().__init__([encoded], frames=1, durable=topic.is_durable, future=CommitFuture(topic.shard))
        self.topic, self.body, self.number, self.actor, self.matched = topic, body, number, actor, matched

    def apply(self, error: Error | None) -> Deleted | Error | None:
        if error is not None:
            return None
        with self.topic.lock:
            try:
                removed = apply_delete(self.topic, self.body, self.number, self.actor, matched=self.matched)
                return _delete_result(self.topic, removed)
            except Error as failure:
                return failure  # it is logged: replay repeats it once the damage is repaired


def parse_tag_match(match: object, undone: str = "nothing was deleted") -> Match | None:
    """`x` is that tag, `x*` every tag that begins with x; also `["tag", "Eq" | "Glob", value]`."""
    if match is None:
        return None
    try:
        str(match).encode()
    except UnicodeEncodeError:
        raise BadInput(f"the match {match!r} cannot be written as UTF-8; {undone}") from None
    if isinstance(match, list | tuple):
        if len(match) != 3 or match[0] != "tag" or match[1] not in ("Eq", "Glob") or not isinstance(match[2], str):
            raise BadInput(f'a match is ["tag", "Eq" or "Glob", text], not {list(match)!r}; {undone}')
        if match[1] == "Eq":
            return Match(MatchOp.EXACT, match[2])
        if not match[2].endswith("*"):
            raise BadInput(f"a Glob ends with *, {match[2]!r} does not; {undone}")
        return Match(MatchOp.PREFIX, match[2][:-1])
    if not isinstance(match, str):
        raise BadInput(f"a match is a tag or a tag's beginning and *, not {type(match).__name__}; {undone}")
    return Match(MatchOp.PREFIX, match[:-1]) if match.endswith("*") else Match(MatchOp.EXACT, match)


def delete_records(
    topic: TopicState, match: object, before_seq: int | None, seqs: Sequence[int] | None, actor: str | None = None
) -> Deleted:
    """Delete records; when this returns they are gone under the topic's class, and on an error none is."""
    selector = parse_tag_match(match)
    if selector is None and before_seq is None and seqs is None:
        raise BadInput("say what to delete: match, before_seq or seqs; nothing was deleted")
    if seqs is not None and (selector is not None or before_seq is not None):
        raise BadInput("seqs are deleted by themselves, without match and before_seq; nothing was deleted")
    if seqs is not None and not isinstance(seqs, list | tuple | range | set | frozenset):
        raise BadInput(f"seqs are a list of whole numbers, not {type(seqs).__name__}; nothing was deleted")
    for seq in [*(seqs or ()), *([] if before_seq is None else [before_seq])]:
        check_int("a seq to delete", seq, 0, SEQ_MAX)
    if seqs is not None and len(seqs) > _DELETE_SEQS_MAX:
        raise BadInput(f"{len(seqs)} seqs are more than {_DELETE_SEQS_MAX} in one delete; nothing was deleted")
    forward_before_delete(topic)
    retention.expire_records(topic)
    # The search raises on damage before anything is logged.
    search = None if selector is None else _TagSearch(topic, selector, SEQ_MAX if before_seq is None else before_seq)
    while search is not None and search.advance():
        pass
    replaced = _delete_replaced(topic, search, seqs, actor) if topic.config.compaction is not None else 0
    with topic.lock:
        topic.check_writable()
        if seqs is not None and not seqs:
            return _delete_result(topic, SizeCount(0, 0))
        topic.context.shard(topic.id)  # raises where nothing can be written
        matched, bound = (None, topic.index.head + 1) if search is None else search.finish()
        body = control_frames.Delete(
            before_seq=before_seq, match=selector, seqs=tuple(sorted(set(seqs or ()))), bound_head=bound
        )
        done = _submit_delete(topic, body, actor, matched)
    result = done() if callable(done) else done
    return dataclasses.replace(result, deleted=result.deleted + replaced) if replaced else result


def _submit_delete(
    topic: TopicState, body: control_frames.Delete, actor: str | None, matched: MatchedRecords | None
) -> Deleted | Callable[[], Deleted]:
    """Log a delete and return a function that waits for it; of an ephemeral topic, apply it. With the lock held."""
    topic.delete_count += 1
    if topic.is_ephemeral:
        removed = apply_delete(topic, body, topic.delete_count, actor, matched=matched)
        topic.mark_dirty()
        return _delete_result(topic, removed)
    commit = DeleteCommit(topic, body, topic.delete_count, actor, matched)
    topic.submit(commit)
    return commit.future.wait


def _delete_replaced(
    topic: TopicState, search: _TagSearch | None, seqs: Sequence[int] | None, actor: str | None
) -> int:
    """Before the newest record of a key is deleted, delete the records that it replaced: with it the key is gone. A
    crash in between leaves the newest record, as compaction would. Returns how many were deleted."""
    selected = np.array(sorted(set(seqs or ())), np.int64) if search is None else search.found().seqs
    replaced = key_index.find_replaced(topic, selected) if len(selected) else selected
    return delete_seqs(topic, replaced, actor).deleted if len(replaced) else 0


def delete_seqs(topic: TopicState, seqs: Ints, actor: str | None) -> Deleted:
    """Delete these ascending seqs; when this returns they are gone under the topic's class."""
    matched = with_sizes(topic, seqs)
    with topic.lock:
        topic.check_writable()
        body = control_frames.Delete(seqs=tuple(seqs.tolist()), bound_head=topic.index.head + 1)
        done = _submit_delete(topic, body, actor, matched)
    return done() if callable(done) else done


class _TagSearch:
    """The search of one delete for matching records."""

    def __init__(self, topic: TopicState, match: Match, before_seq: int) -> None:
        self._topic, self._match, self._before = topic, match, before_seq
        self._searched_to = 0  # one past the last searched seq; 0: none
        self._rounds = 0
        self._found = [MatchedRecords(np.zeros(0, np.int64), np.zeros(0, np.int64))]

    def advance(self) -> bool:
        """Search what was not searched yet, without the lock. False if little is left for `finish`, or writers are
        faster."""
        topic = self._topic
        with topic.lock:
            topic.check_writable()
            topic.context.shard(topic.id)  # raises where nothing can be written
            index = topic.index
            first, stop = max(self._searched_to, index.earliest), min(index.head + 1, self._before)
            if self._rounds and stop - self._searched_to <= _LOCKED_SEARCH_RECORDS_MAX:
                return False
            parts = index.parts.copy()  # slicing would take longer under the lock
        for found in _slices(parts, first, stop):
            self._search(found)
        self._searched_to, self._rounds = max(stop, self._searched_to), self._rounds + 1
        return self._rounds < _SEARCH_ROUNDS_MAX

    def _search(self, found: Slice) -> None:
        topic, (part, lo, hi) = self._topic, found
        try:
            seqs = search_part(topic, part, lo, hi, self._match)
            self._found.append(_with_sizes(topic, part, seqs))
        except Corrupt:
            current = _current_slices(topic, found)
            if current is None:
                raise
            for each in current:
                self._search(each)

    def finish(self) -> tuple[MatchedRecords, int]:
        """Return all matches and the bound of the delete. With the lock held."""
        topic, index = self._topic, self._topic.index
        stop = min(index.head + 1, self._before)
        # With compaction, what goes with a record was found for the searched ones.
        if topic.config.compaction is not None or stop - self._searched_to > _LOCKED_SEARCH_RECORDS_MAX:
            return self.found(), self._searched_to
        for part, lo, hi in index.slices(max(self._searched_to, index.earliest), stop):
            seqs = search_part_locked(topic, part, lo, hi, self._match)
            self._found.append(MatchedRecords(seqs, _sizes(part, seqs)()))
        return self.found(), index.head + 1

    def found(self) -> MatchedRecords:
        """The matches so far."""
        return MatchedRecords(*(np.concatenate(column) for column in zip(*self._found, strict=True)))


def _slices(parts: Sequence[Segment | MemTable], first: int, stop: int) -> Iterator[Slice]:
    """Yield the slices of [first, stop). Without the lock: a part that a checkpoint extended meanwhile ends where the
    next listed part begins."""
    for part, next_base in zip(parts, chain((part.base for part in parts[1:]), (stop,)), strict=False):
        lo, hi = max(part.base, first), min(part.stop, next_base, stop)
        if lo < hi:
            yield Slice(part, lo, hi)


def _current_slices(topic: TopicState, unreadable: Slice) -> list[Slice] | None:
    """Return the slices that have these seqs now, where a rewrite replaced their part or an eviction or a drop removed
    it. None where it is still in use: it is damaged."""
    with topic.lock:
        if topic.is_dropped:
            return []
        if unreadable.part in topic.index.parts:
            return None
        return list(topic.index.slices(unreadable.first, unreadable.stop))


def _sizes(part: Part, seqs: Ints) -> Callable[[], Ints]:
    """Return a function that reads the sizes of these ascending seqs. Create it under the lock where the part still
    grows; call it without."""
    if not len(seqs):
        return lambda: seqs
    positions = seqs - part.base
    lo = int(positions[0])
    read_sizes = record_sizes_reader(part, lo, int(positions[-1]) + 1)
    return lambda: read_sizes()[positions - lo]


def _with_sizes(topic: TopicState, part: Part, seqs: Ints) -> MatchedRecords:
    """Add sizes to records that were found without the lock."""
    if isinstance(part, Segment) and part.is_sealed:
        return MatchedRecords(seqs, _sizes(part, seqs)())
    with topic.lock:
        read_sizes = _sizes(part, seqs)
    return MatchedRecords(seqs, read_sizes())


def with_sizes(topic: TopicState, seqs: Ints) -> MatchedRecords:
    """Add sizes to these ascending seqs. Without the lock; records that are gone meanwhile have none."""
    with topic.lock:
        parts = topic.index.parts.copy()
    found = [MatchedRecords(seqs[:0], np.zeros(0, np.int64))]
    for part, first, stop in _slices(parts, int(seqs[0]), int(seqs[-1]) + 1) if len(seqs) else ():
        lo, hi = np.searchsorted(seqs, (first, stop))
        if lo < hi:
            found.append(_with_sizes(topic, part, seqs[lo:hi]))
    return MatchedRecords(*(np.concatenate(column) for column in zip(*found, strict=True)))


def forward_before_delete(topic: TopicState) -> None:
    """Forward records before they are deleted, so that routers see records and deletes in the order of their
    callers."""
    if topic.upstream is not None or topic.downstream:
        with suppress(Error):
            forwarder.pull_from_sources(topic)
            forwarder.push_downstream(topic)


def replay_delete(topic: TopicState, body: control_frames.Delete, number: int, ts_ms: int) -> None:
    """Apply a delete found in the WAL. The gap log has rows for deletes up to the manifest's number."""
    apply_delete(topic, body, number if number > topic.delete_count else 0, "recovery", ts_ms)
    topic.delete_count = max(topic.delete_count, number)


def apply_delete(
    topic: TopicState,
    body: control_frames.Delete,
    number: int = 0,
    actor: str | None = None,
    ts_ms: int | None = None,
    matched: MatchedRecords | None = None,
    cause: RemovalCause = "delete",
) -> SizeCount:
    """Delete what `body` selects and record the removal under its number. The committer passes the records it `found`;
    replay searches again."""
    index = topic.index
    bound = index.head + 1 if body.bound_head is None else min(body.bound_head, index.head + 1)
    stop = bound if body.before_seq is None else min(body.before_seq, bound)
    first, last = index.earliest, stop - 1
    if not number and body.match is None and 0 < len(body.seqs) <= _FEW_SEQS_MAX:
        removed = index.delete_few([seq for seq in body.seqs if seq < bound])
    elif body.seqs or body.match is not None:
        seqs, weights = np.array(body.seqs, np.int64), None
        if matched is not None:
            seqs, weights = matched
        elif body.match is not None:
            seqs = _find_for_replay(topic, body.match, stop)
        keep = seqs < bound
        seqs, weights = seqs[keep], None if weights is None else weights[keep]
        if number:  # the gap log needs the range of live records
            live = index.live_seqs(seqs)
            weights = None if weights is None else weights[np.searchsorted(seqs, live)]
            seqs = live
            first, last = (int(seqs[0]), int(seqs[-1])) if len(seqs) else (0, 0)
        removed = index.delete(seqs, weights)
    else:
        removed = index.delete_before(stop)
    topic.quota.release(removed.bytes)
    if number and removed.records:
        topic.context.removals.add(topic, cause, first, last, removed, actor=actor, ts_ms=ts_ms, number=number)
    return removed


def find_by_tag(topic: TopicState, match: Match, first: int, stop: int) -> Ints:
    """Return the seqs of [first, stop) whose tag matches, ascending. Without the lock; damaged segments are skipped."""
    with topic.lock:
        parts = topic.index.parts.copy()
        first = max(first, topic.index.earliest)
    found = [np.zeros(0, np.int64)]
    pending = list(_slices(parts, first, stop))
    while pending:
        part, lo, hi = current = pending.pop(0)
        try:
            found.append(search_part(topic, part, lo, hi, match))
        except Corrupt:
            pending = [*(_current_slices(topic, current) or ()), *pending]
    return np.concatenate(found)


def _find_for_replay(topic: TopicState, match: Match, stop: int) -> Ints:
    """Return the seqs below `stop` whose tag matches, ascending, for replay. A damaged segment keeps its records."""
    found = [np.zeros(0, np.int64)]
    for part, first, end in topic.index.slices(topic.index.earliest, stop):
        try:
            found.append(search_part_locked(topic, part, first, end, match))
        except Corrupt:
            topic.damage.append(f"a delete could not look into segment {part.base}")
    return np.concatenate(found)


def _delete_result(topic: TopicState, removed: SizeCount) -> Deleted:
    index = topic.index
    return Deleted(removed.records, index.earliest, index.head, index.count, index.bytes)
