"""[shell] Dead letters: a job that was delivered too often goes to another topic, and then out of the queue.

First the other topic has it, under that topic's own class and within its limits; then one commit deletes it here and
counts it. A crash between the two leaves it in both, never in neither. Where the other topic does not take it, the
job is claimable again and nothing is counted. No lock is held over either wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from tidelog.engine import delete, encode
from tidelog.engine.config import TopicConfig
from tidelog.engine.encode import Batch
from tidelog.engine.queues.jobs import Piece
from tidelog.engine.queues.reading import pick
from tidelog.engine.queues.state import State, Step
from tidelog.engine.texts import from_json
from tidelog.errors import Error, Refused, Unavailable
from tidelog.formats import bodies, frame
from tidelog.formats.rows import Rows, Span, values
from tidelog.wal import Token

FROM: Final = "$dead_letter_from"
DELIVERIES: Final = "$dead_letter_deliveries"
SRC_SEQ: Final = "$dead_letter_src_seq"
KEYS: Final = (FROM, DELIVERIES, SRC_SEQ)
_ROOM_BYTES: Final = 1_024  # what the three may take beside a meta that is as large as one may be


def bury(state: State, dead: Sequence[int], pieces: Sequence[Piece]) -> None:
    """Take these jobs, which were set aside, to the dead-letter topic; what cannot go there is claimable again."""
    moved: list[int] = []
    try:
        for piece in pieces:
            moved += _moved(state, piece)
        if moved:
            _delete(state, moved).wait()
    except Error:
        pass  # told by the job, which comes back
    finally:
        with state.core.lock:
            state.leases.unsettled(dead)  # those that are not gone by now


def _moved(state: State, piece: Piece) -> list[int]:
    """Append copies to the other topic; the seqs of those that are there now."""
    seqs: list[int] = piece.rows.seq.tolist()
    try:
        _copy(state, piece)
        return seqs
    except (Refused, Unavailable):
        if len(seqs) == 1:
            return []
    done: list[int] = []
    with suppress(Refused, Unavailable):  # there may be room for some of them
        for seq in seqs:
            _copy(state, pick([piece], [seq])[0])
            done.append(seq)
    return done


def _copy(state: State, piece: Piece) -> None:
    core = state.core
    name, doors = core.config.dead_letter, core.shared.doors
    assert name is not None, "only then a job can be delivered too often"
    assert doors is not None, "set before anybody has a handle"
    batch = _batch(state, piece)
    topic, _ = doors.ensure(name, TopicConfig(), batch)
    topic.stage(batch).wait()


def _batch(state: State, piece: Piece) -> Batch:
    rows, limits, most = piece.rows, state.core.shared.limits, state.core.config.max_deliveries
    marks = [{FROM: state.core.name, DELIVERIES: str(most), SRC_SEQ: str(seq)} for seq in rows.seq.tolist()]
    metas = [{**meta, **mark} for meta, mark in zip(_metas(rows), marks, strict=True)]
    room = replace(
        limits,
        meta_bytes_max=limits.meta_bytes_max + _ROOM_BYTES,
        meta_keys_max=limits.meta_keys_max + len(KEYS),
        record_bytes_max=limits.record_bytes_max + _ROOM_BYTES,
        batch_records_max=max(limits.batch_records_max, len(rows)),
    )
    json = piece.json.tolist()
    whole = json[0] if len(set(json)) == 1 else json
    return encode.from_texts(
        room, values(rows.buf, rows.data), whole, names(rows, rows.tag), names(rows, rows.node), metas
    )


def _metas(rows: Rows) -> list[dict[str, Any]]:
    if rows.meta is None:
        return [{}] * len(rows)
    found = [from_json(text) if text else {} for text in values(rows.buf, rows.meta)]
    return [meta if isinstance(meta, dict) else {} for meta in found]


def names(rows: Rows, span: Span | None) -> list[str | None] | None:
    """The tags or nodes of records, as they are given to a write."""
    return None if span is None else [name.decode() or None for name in values(rows.buf, span)]


def _delete(state: State, seqs: list[int]) -> Token[None]:
    """Delete what was moved and count it, in one commit."""
    core = state.core
    with core.lock:
        core.check_writable()
        gone = bodies.Delete(seqs=tuple(sorted(seqs)), bound_head=core.index.head + 1)
        finish = partial(_deleted, state, seqs, gone)
        if core.ephemeral:
            finish(None)
            return Token.ready(core.shard, None)
        count = state.dead_staged + len(seqs)
        taken = frame.encode(frame.DELETE, topic_id=core.id, ts_ms=core.stamp(), data=bodies.encode(gone))
        commit = Step(state, [taken, state.mark_frame(state.ceiling, count)], finish, durable=core.durable)
        core.submit(commit)
        state.dead_staged = count
        return commit.token


def _deleted(state: State, seqs: list[int], gone: bodies.Delete, error: Error | None) -> None:
    leases = state.leases
    if error is not None:
        state.dead_staged = leases.dead_lettered
        return
    ours = [seq for seq in seqs if seq in leases.settling]
    counts = [leases.deliveries.get(seq, 0) for seq in ours]
    leases.settled(seqs)
    leases.dead_lettered += len(seqs)
    state.dead_staged = max(state.dead_staged, leases.dead_lettered)
    state.journal.note(state.core.shared.now_ms(), "dead_lettered", ours, None, None, counts)
    if not state.core.dropped:
        state.own_removal(lambda: delete.apply(state.core, gone))
