"""[shell] Deletes: what was asked to go is logged first, then gone, quietly.

The frame says what was asked (`before_seq`, a tag, seqs) and where the head was. Replay finds the same
records again: later ones are behind the bound and are not meant.

A match is searched for once, before the delete is queued, and without the topic's lock: the parts are listed under the
lock, searched without it, and what was appended meanwhile is searched the same way until it is little. The rest,
at most a thousand records, is searched under the lock that the delete is queued with. The commit takes away
what was found and searches for nothing, so writers of the topic and of its shard never wait for a search. Where writers
are faster than the search, the delete is bounded by what it has searched: it was called before what comes later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

import numpy as np

from tidelog.engine import retention
from tidelog.engine.batch_encoder import check_int
from tidelog.engine.memtable import MemTable
from tidelog.engine.results import Deleted
from tidelog.engine.routing import forwarder as lanes
from tidelog.engine.segment import Part, Segment, SizeCount, record_sizes_reader
from tidelog.engine.tag_search import search_part, search_part_locked
from tidelog.engine.topic_index import Slice
from tidelog.engine.topic_state import TopicState
from tidelog.errors import BadInput, Corrupt, Error
from tidelog.formats import control_frames, frame
from tidelog.formats.control_frames import Match, MatchOp
from tidelog.formats.frame import SEQ_MAX
from tidelog.types import Ints
from tidelog.wal import Commit, CommitFuture

_DELETE_SEQS_MAX = 1_000_000
_FEW_SEQS_MAX = 16  # seqs that are deleted one by one: arrays cost more until there are about so many
_LOCKED_SEARCH_RECORDS_MAX = 1_000  # records appended during a search that are searched under the lock
_SEARCH_ROUNDS_MAX = 8  # of searching what was appended during the round before


class MatchedRecords(NamedTuple):
    """The records that a match means, found ahead of the commit."""

    seqs: Ints  # rising
    sizes: Ints  # bytes of data and meta of each


class DeleteCommit(Commit):
    """The frame's seq is the number of the delete: rows of the ledger are told apart by it."""

    __slots__ = ("actor", "body", "found", "number", "topic")
    future: CommitFuture[Deleted]

    def __init__(
        self,
        topic: TopicState,
        body: control_frames.Delete,
        number: int,
        actor: str | None,
        found: MatchedRecords | None = None,
    ) -> None:
        made = frame.encode(
            frame.DELETE,
            topic_id=topic.id,
            seq=number,
            ts_ms=topic.next_timestamp_ms(),
            data=control_frames.encode(body),
        )
        super().__init__([made], frames=1, durable=topic.is_durable, future=CommitFuture(topic.shard))
        self.topic, self.body, self.number, self.actor, self.found = topic, body, number, actor, found

    def apply(self, error: Error | None) -> Deleted | Error | None:
        if error is not None:
            return None
        with self.topic.lock:
            try:
                count = apply_delete(self.topic, self.body, self.number, self.actor, found=self.found)
                return _delete_result(self.topic, count)
            except Error as damage:
                return damage  # it is logged, and applied again after a repair


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
    # Damage is found by the search, before anything is logged.
    hunt = None if selector is None else _TagSearch(topic, selector, SEQ_MAX if before_seq is None else before_seq)
    while hunt is not None and hunt.advance():
        pass
    with topic.lock:
        topic.check_writable()
        if seqs is not None and not seqs:
            return _delete_result(topic, SizeCount(0, 0))
        topic.context.shard(topic.id)  # refuses where nothing can be written
        found, bound = (None, topic.index.head + 1) if hunt is None else hunt.finish()
        body = control_frames.Delete(
            before_seq=before_seq, match=selector, seqs=tuple(sorted(set(seqs or ()))), bound_head=bound
        )
        topic.delete_count += 1
        if topic.is_ephemeral:
            return _delete_result(topic, apply_delete(topic, body, topic.delete_count, actor, found=found))
        commit = DeleteCommit(topic, body, topic.delete_count, actor, found)
        topic.submit(commit)
    return commit.future.wait()


class _TagSearch:
    """The search of one delete for the records that its match means."""

    def __init__(self, topic: TopicState, match: Match, before_seq: int) -> None:
        self._core, self._match, self._before = topic, match, before_seq
        self._searched_to = 0  # one past the last seq that was searched; 0: none was
        self._rounds = 0
        self._found = [MatchedRecords(np.zeros(0, np.int64), np.zeros(0, np.int64))]

    def advance(self) -> bool:
        """Search what is there and was not searched yet, without the lock; False where little is left for `finish`, or
        writers are faster than this."""
        core = self._core
        with core.lock:
            core.check_writable()
            core.context.shard(core.id)  # refuses where nothing can be written
            index = core.index
            first, stop = max(self._searched_to, index.earliest), min(index.head + 1, self._before)
            if self._rounds and stop - self._searched_to <= _LOCKED_SEARCH_RECORDS_MAX:
                return False
            parts = index.parts.copy()  # the list alone: cutting it into slices takes longer
        for part, lo, hi in _slices(parts, first, stop):
            try:
                seqs = search_part(core, part, lo, hi, self._match)
                self._found.append(_with_sizes(core, part, seqs))
            except Corrupt:
                with core.lock:
                    if part in core.index.parts and not core.is_dropped:
                        raise
                # It was evicted or dropped while it was searched: none of its records is there any more.
        self._searched_to, self._rounds = max(stop, self._searched_to), self._rounds + 1
        return self._rounds < _SEARCH_ROUNDS_MAX

    def finish(self) -> tuple[MatchedRecords, int]:
        """All that the match means and the bound of the delete. With the lock held."""
        core, index = self._core, self._core.index
        stop = min(index.head + 1, self._before)
        if stop - self._searched_to > _LOCKED_SEARCH_RECORDS_MAX:
            return self._all(), self._searched_to
        for part, lo, hi in index.slices(max(self._searched_to, index.earliest), stop):
            seqs = search_part_locked(core, part, lo, hi, self._match)
            self._found.append(MatchedRecords(seqs, _sizes(part, seqs)()))
        return self._all(), index.head + 1

    def _all(self) -> MatchedRecords:
        return MatchedRecords(*(np.concatenate(column) for column in zip(*self._found, strict=True)))


def _slices(parts: Sequence[Segment | MemTable], first: int, stop: int) -> Iterator[Slice]:
    """The parts of [first, stop). Without the lock: a part that a checkpoint has made longer since the list was made is
    cut where the next one on the list begins."""
    for part, after in zip(parts, chain((part.base for part in parts[1:]), (stop,)), strict=False):
        lo, hi = max(part.base, first), min(part.stop, after, stop)
        if lo < hi:
            yield Slice(part, lo, hi)


def _sizes(part: Part, seqs: Ints) -> Callable[[], Ints]:
    """What tells the bytes of these records of a part, rising. Made with the lock where the part still grows, called
    without it."""
    if not len(seqs):
        return lambda: seqs
    where = seqs - part.base
    lo = int(where[0])
    later = record_sizes_reader(part, lo, int(where[-1]) + 1)
    return lambda: later()[where - lo]


def _with_sizes(topic: TopicState, part: Part, seqs: Ints) -> MatchedRecords:
    """Records that were found without the lock, with their sizes."""
    if isinstance(part, Segment) and part.is_sealed:
        return MatchedRecords(seqs, _sizes(part, seqs)())
    with topic.lock:
        later = _sizes(part, seqs)
    return MatchedRecords(seqs, later())


def forward_before_delete(topic: TopicState) -> None:
    """What is about to be deleted is passed on first: routers and deletes then come in the order of their callers."""
    if topic.upstream is not None or topic.downstream:
        with suppress(Error):
            lanes.pull_from_sources(topic)
            lanes.push_downstream(topic)


def replay_delete(topic: TopicState, body: control_frames.Delete, number: int, ts_ms: int) -> None:
    """A delete that is found in the WAL. Up to the number that the manifest has, the ledger has its row."""
    apply_delete(topic, body, number if number > topic.delete_count else 0, "recovery", ts_ms)
    topic.delete_count = max(topic.delete_count, number)


def apply_delete(
    topic: TopicState,
    body: control_frames.Delete,
    number: int = 0,
    actor: str | None = None,
    ts_ms: int | None = None,
    found: MatchedRecords | None = None,
) -> SizeCount:
    """Take away what a delete means, as the topic is now, and note it under its number. Used by the committer, which
    knows what was `found`, and by replay."""
    index = topic.index
    bound = index.head + 1 if body.bound_head is None else min(body.bound_head, index.head + 1)
    stop = bound if body.before_seq is None else min(body.before_seq, bound)
    first, last = index.earliest, stop - 1
    if not number and body.match is None and 0 < len(body.seqs) <= _FEW_SEQS_MAX:
        gone = index.delete_few([seq for seq in body.seqs if seq < bound])
    elif body.seqs or body.match is not None:
        seqs, weights = np.array(body.seqs, np.int64), None
        if found is not None:
            seqs, weights = found
        elif body.match is not None:
            seqs = _find_for_replay(topic, body.match, stop)
        keep = seqs < bound
        seqs, weights = seqs[keep], None if weights is None else weights[keep]
        if number:  # somebody wants to know what was there
            living = index.live_seqs(seqs)
            weights = None if weights is None else weights[np.searchsorted(seqs, living)]
            seqs = living
            first, last = (int(seqs[0]), int(seqs[-1])) if len(seqs) else (0, 0)
        gone = index.delete(seqs, weights)
    else:
        gone = index.delete_before(stop)
    topic.quota.release(gone.bytes)
    if number and gone.records:
        topic.context.removals.add(topic, "delete", first, last, gone, actor=actor, ts_ms=ts_ms, number=number)
    return gone


def find_by_tag(topic: TopicState, match: Match, first: int, stop: int) -> Ints:
    """Seqs of [first, stop) whose tag matches, rising. Without the lock; what a damaged segment has is left out."""
    with topic.lock:
        parts = topic.index.parts.copy()
        first = max(first, topic.index.earliest)
    found = [np.zeros(0, np.int64)]
    for part, lo, hi in _slices(parts, first, stop):
        with suppress(Corrupt):
            found.append(search_part(topic, part, lo, hi, match))
    return np.concatenate(found)


def _find_for_replay(topic: TopicState, match: Match, stop: int) -> Ints:
    """Seqs below `stop` whose tag matches, rising, for replay. A damaged segment keeps its records."""
    found = [np.zeros(0, np.int64)]
    for part, first, end in topic.index.slices(topic.index.earliest, stop):
        try:
            found.append(search_part_locked(topic, part, first, end, match))
        except Corrupt:
            topic.damage.append(f"a delete could not look into segment {part.base}")
    return np.concatenate(found)


def _delete_result(topic: TopicState, gone: SizeCount) -> Deleted:
    index = topic.index
    return Deleted(gone.records, index.earliest, index.head, index.count, index.bytes)
