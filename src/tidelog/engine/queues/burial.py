"""[shell] Dead letters: a job that was delivered too often goes to another topic, and then out of the queue.

    1  the copy is appended to the other topic, within its limits, and synced whatever its class is
    2  one commit deletes the job from the queue, under the queue's class, and counts it

The two may be in different WAL shards, of which a power cut keeps either: only because 1 is durable before 2 is
written a crash leaves the job in both topics at worst, never in neither. A dead letter names its queue and seq, so a
doubled one can be recognised. Where the other topic does not take it, the job is claimable again, nothing is counted,
and `Queue.dead_letter_error` says why. No lock is held over either wait.

A job of a queue that outlives the process is not moved to an ephemeral topic: no sync could make its copy durable.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
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
from tidelog.errors import BadInput, Damaged, Error, Refused, TopicNotFound, Unavailable
from tidelog.formats import bodies, frame
from tidelog.formats.rows import Rows, Span, values
from tidelog.wal import Token

FROM: Final = "$dead_letter_from"
DELIVERIES: Final = "$dead_letter_deliveries"
SRC_SEQ: Final = "$dead_letter_src_seq"
KEYS: Final = (FROM, DELIVERIES, SRC_SEQ)
_log = logging.getLogger("tidelog.queues")
_ROOM_BYTES: Final = 1_024  # what the three may take beside a meta that is as large as one may be


def bury(state: State, dead: Sequence[int], pieces: Sequence[Piece]) -> None:
    """Take these jobs, which were set aside, to the dead-letter topic; what cannot go there is claimable again."""
    failed: Error | None = None
    try:
        moved: list[int] = []
        for piece in pieces:
            done, failed = _moved(state, piece)
            moved += done
            if isinstance(failed, Damaged):
                break  # its shard is latched: it takes no more
        if moved:
            delete.settle(state.core)
            _delete(state, moved).wait()
    except Error as error:
        failed = error
    finally:
        with state.core.lock:
            state.leases.unsettled(dead)  # those that are not gone by now
    _report(state, failed)


def _report(state: State, failed: Error | None) -> None:
    """Keep what last kept a job from its dead-letter topic; each cause is logged once in a row."""
    before, state.dead_letter_error = state.dead_letter_error, failed
    if failed is not None and str(failed) != str(before):
        name, target = state.core.name, state.core.config.dead_letter
        _log.warning("%s: jobs stay in the queue, they cannot be moved to %s: %s", name, target, failed)


def _moved(state: State, piece: Piece) -> tuple[list[int], Error | None]:
    """Copy jobs to the other topic; the seqs of those that are durable there now, and what kept the others."""
    seqs: list[int] = piece.rows.seq.tolist()
    done = _copied(state, seqs)
    left = [seq for seq in seqs if seq not in done]
    if not left:
        return seqs, None
    try:
        _copy(state, piece if len(left) == len(seqs) else pick([piece], left)[0])
        return seqs, None
    except (Refused, Unavailable) as error:
        if len(left) == 1:
            return sorted(done), error
    except Error as error:
        return sorted(done), error
    try:
        for seq in left:  # there may be room for some of them
            _copy(state, pick([piece], [seq])[0])
            done.add(seq)
    except Error as error:
        return sorted(done), error
    return sorted(done), None


def _copied(state: State, seqs: list[int]) -> set[int]:
    """Which of these are durable in the other topic already, because deleting them here failed afterwards."""
    if not state.copied:
        return set()
    doors, name = state.core.shared.doors, state.core.config.dead_letter
    topic = None if doors is None or name is None else doors.find(name)
    if topic is None:
        state.copied.clear()
    return {seq for seq in seqs if topic is not None and state.copied.get(seq) == topic.id}


def _copy(state: State, piece: Piece) -> None:
    """Append copies to the other topic; on return they are durable there."""
    core = state.core
    name, doors = core.config.dead_letter, core.shared.doors
    assert name is not None, "only then a job can be delivered too often"
    assert doors is not None, "set before anybody has a handle"
    batch = _batch(state, piece)
    topic, _ = doors.ensure(name, TopicConfig(), batch)
    if topic.config.durability == "ephemeral" and not core.ephemeral:
        raise BadInput(
            f"{name} is ephemeral and {core.name} is not: a restart would lose the job; nothing was moved, give {name} "
            "another durability"
        )
    topic.stage(batch, synced=not core.ephemeral).wait()
    if topic.dropped:
        raise TopicNotFound(name)
    state.copied.update(dict.fromkeys(piece.rows.seq.tolist(), topic.id))


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
    for seq in seqs:
        state.copied.pop(seq, None)
    ours = [seq for seq in seqs if seq in leases.settling]
    counts = [leases.deliveries.get(seq, 0) for seq in ours]
    leases.settled(seqs)
    leases.dead_lettered += len(seqs)
    state.dead_staged = max(state.dead_staged, leases.dead_lettered)
    state.journal.note(state.core.shared.now_ms(), "dead_lettered", ours, None, None, counts)
    if not state.core.dropped:
        state.own_removal(lambda: delete.apply(state.core, gone))
