"""[shell] Deletes: what was asked to go is logged first, then gone, quietly.

The frame says what was asked (`before_seq`, a tag, seqs) and where the head was. Replay finds the same
records again: later ones are behind the bound and are not meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from tidelog.engine import retention
from tidelog.engine.core import Core
from tidelog.engine.encode import check_number
from tidelog.engine.parts import Part, Weight
from tidelog.engine.results import Deleted
from tidelog.engine.routing import lane as lanes
from tidelog.engine.tags import TagIndex
from tidelog.errors import BadInput, Corrupt, Error
from tidelog.formats import bodies, frame, idx
from tidelog.formats.bodies import Match, MatchOp
from tidelog.formats.frame import SEQ_MAX
from tidelog.formats.rows import binary
from tidelog.types import Ints
from tidelog.wal import Commit, Token

_SEQS_MAX = 1_000_000
_FEW = 16  # seqs that are deleted one by one: arrays cost more until there are about so many


class Delete(Commit):
    """The frame's seq is the number of the delete: rows of the ledger are told apart by it."""

    __slots__ = ("actor", "body", "core", "number", "token")

    def __init__(self, core: Core, body: bodies.Delete, number: int, actor: str | None) -> None:
        made = frame.encode(frame.DELETE, topic_id=core.id, seq=number, ts_ms=core.stamp(), data=bodies.encode(body))
        super().__init__([made], frames=1, durable=core.durable)
        self.core, self.body, self.number, self.actor = core, body, number, actor
        self.token: Token[Deleted] = Token(core.shard)

    def done(self, error: Error | None) -> None:
        if error is not None:
            self.token.fail(error)
            return
        outcome: Deleted | Error
        with self.core.lock:
            try:
                outcome = _outcome(self.core, apply(self.core, self.body, self.number, self.actor))
            except Error as damage:
                outcome = damage  # it is logged, and done again when the damage is mended
        self.token.set(outcome)


def parse(match: object, undone: str = "nothing was deleted") -> Match | None:
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


def delete(
    core: Core, match: object, before_seq: int | None, seqs: Sequence[int] | None, actor: str | None = None
) -> Deleted:
    """Delete records; when this returns they are gone under the topic's class, and on an error none is."""
    selector = parse(match)
    if selector is None and before_seq is None and seqs is None:
        raise BadInput("say what to delete: match, before_seq or seqs; nothing was deleted")
    if seqs is not None and (selector is not None or before_seq is not None):
        raise BadInput("seqs are deleted by themselves, without match and before_seq; nothing was deleted")
    if seqs is not None and not isinstance(seqs, list | tuple | range | set | frozenset):
        raise BadInput(f"seqs are a list of whole numbers, not {type(seqs).__name__}; nothing was deleted")
    for seq in [*(seqs or ()), *([] if before_seq is None else [before_seq])]:
        check_number("a seq to delete", seq, 0, SEQ_MAX)
    if seqs is not None and len(seqs) > _SEQS_MAX:
        raise BadInput(f"{len(seqs)} seqs are more than {_SEQS_MAX} in one delete; nothing was deleted")
    settle(core)
    retention.expire(core)
    with core.lock:
        core.check_writable()
        if seqs is not None and not seqs:
            return _outcome(core, Weight(0, 0))
        core.shared.shard(core.id)  # refuses where nothing can be written
        bound = core.index.head + 1
        if selector is not None:
            find(core, selector, bound)  # damage is found before anything is logged
        body = bodies.Delete(
            before_seq=before_seq, match=selector, seqs=tuple(sorted(set(seqs or ()))), bound_head=bound
        )
        core.removals += 1
        if core.ephemeral:
            return _outcome(core, apply(core, body, core.removals, actor))
        commit = Delete(core, body, core.removals, actor)
        core.submit(commit)
    return commit.token.wait()


def settle(core: Core) -> None:
    """What is about to be deleted is passed on first: routers and deletes then come in the order of their callers."""
    if core.lane is not None or core.lanes:
        with suppress(Error):
            lanes.catch_up(core)
            lanes.pass_on(core)


def replay(core: Core, body: bodies.Delete, number: int, ts_ms: int) -> None:
    """A delete that is found in the WAL. Up to the number that the manifest has, the ledger has its row."""
    apply(core, body, number if number > core.removals else 0, "recovery", ts_ms)
    core.removals = max(core.removals, number)


def apply(
    core: Core, body: bodies.Delete, number: int = 0, actor: str | None = None, ts_ms: int | None = None
) -> Weight:
    """Take away what a delete means, as the topic is now, and note it under its number. Used by the committer and by
    replay."""
    index = core.index
    bound = index.head + 1 if body.bound_head is None else min(body.bound_head, index.head + 1)
    stop = bound if body.before_seq is None else min(body.before_seq, bound)
    first, last = index.earliest, stop - 1
    if not number and body.match is None and 0 < len(body.seqs) <= _FEW:
        gone = index.remove([seq for seq in body.seqs if seq < bound])
    elif body.seqs or body.match is not None:
        seqs = np.array(body.seqs, np.int64)
        if body.match is not None:
            seqs = find(core, body.match, stop, strict=False)
        seqs = seqs[seqs < bound]
        if number:  # somebody wants to know what was there
            seqs = index.living(seqs)
            first, last = (int(seqs[0]), int(seqs[-1])) if len(seqs) else (0, 0)
        gone = index.delete(seqs)
    else:
        gone = index.delete_before(stop)
    core.quota.give(gone.size)
    if number and gone.records:
        core.shared.notes.add(core, "delete", first, last, gone, actor=actor, ts_ms=ts_ms, number=number)
    return gone


def find(core: Core, match: Match, stop: int, *, strict: bool = True) -> Ints:
    """Seqs below `stop` whose tag matches, rising. Not `strict`: a damaged segment keeps its records."""
    found = [np.zeros(0, np.int64)]
    for part, first, end in core.index.slices(core.index.earliest, stop):
        try:
            rows = _rows(core, part, match)
        except Corrupt:
            if strict:
                raise
            core.damage.append(f"a delete could not look into segment {part.base}")
            continue
        seqs = rows + part.base
        found.append(seqs[(seqs >= first) & (seqs < end)])
    return np.concatenate(found)


def _rows(core: Core, part: Part, match: Match) -> Ints:
    if not (part.entries()["flags"] & idx.HAS_TAG).any():
        return np.zeros(0, np.int64)
    tags = core.shared.tags.get((core.id, part.base, part.stop - part.base), lambda: _tags(part))
    value = match.value.encode()
    return tags.exact(value) if match.op is MatchOp.EXACT else tags.prefix(value)


def _tags(part: Part) -> TagIndex:
    chunk = part.look(part.base, part.stop, 1 << 62)()
    if chunk.fault is not None:
        raise Corrupt(f"segment {part.base}", pos=chunk.fault.pos, reason=chunk.fault.reason)
    assert chunk.rows.tag is not None, "its index says that it has tags"
    return TagIndex.build(binary(chunk.rows.buf, chunk.rows.tag))


def _outcome(core: Core, gone: Weight) -> Deleted:
    index = core.index
    return Deleted(gone.records, index.earliest, index.head, index.count, index.bytes)
