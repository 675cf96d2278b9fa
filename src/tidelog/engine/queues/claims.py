"""[shell] The claim pass: one look at the queue for a whole cohort.

    1  old jobs expire; what has come is looked at; lease ids are on record        may wait for the disk
    2  under the topic's lock: sweep, take, divide, lease; durable leases go into one commit
    3  that commit is waited for; where it fails, nobody has had anything
    4  jobs that were delivered too often go to the dead-letter topic
    5  the records are read

A job whose record does not read stays leased, out of the way of the others, until its lease ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import lt
from typing import Final, NamedTuple

from tidelog.engine import retention, strong
from tidelog.engine.config import LEASE_MS_MAX, LEASE_MS_MIN
from tidelog.engine.index import TopicIndex
from tidelog.engine.queues import burial, reading
from tidelog.engine.queues.cohort import Want, divide
from tidelog.engine.queues.jobs import Leased, Piece, Texts
from tidelog.engine.queues.reading import Run
from tidelog.engine.queues.state import State, Step
from tidelog.errors import Corrupt, Error
from tidelog.formats.bodies import LeaseEvent
from tidelog.wal import Token

MOST_MAX: Final = 1_000


class Grant(NamedTuple):
    """What one claimer is given, in the order of handing out."""

    want: Want
    seqs: list[int]
    ids: range
    counts: list[int]
    deadline_ms: int


class Pass(NamedTuple):
    now_ms: int
    grants: list[Grant]
    dead: list[int]  # delivered too often
    texts: list[Texts] | None  # what each is given, where that was at hand
    plan: list[Run]  # how to read it where it was not
    token: Token[None] | None  # of durable leases
    ready: int  # jobs that nobody was given
    swept: bool


def clamp_lease(lease_ms: int) -> int:
    return min(max(lease_ms, LEASE_MS_MIN), LEASE_MS_MAX)


def is_quick(state: State, most: int) -> bool:
    """Whether a pass for so many needs memory alone."""
    core = state.core
    config = core.config
    if state.durable or retention.is_due(core) or retention.is_behind(core) or not strong.is_settled(core):
        return False
    with core.lock:
        leases = state.leases
        buries = config.max_deliveries and config.dead_letter is not None
        if not core.ephemeral and leases.lease_id + most > state.ceiling:
            return False
        return state.at_hand() and not (buries and (leases.waiting or leases.held or leases.delayed))


def claim_now(state: State, wants: Sequence[Want]) -> list[Leased]:
    core = state.core
    wants = [want._replace(most=max(min(want.most, MOST_MAX), 0)) for want in wants]
    retention.bring(core)
    retention.expire(core)
    state.catch_up()
    if strong.is_wanted(core):
        strong.settle(core)  # before the pass, so that what it takes needs no other sync
    found = _pass(state, wants)
    if found.swept:
        state.ring()
    try:
        if found.token is not None:
            found.token.wait()
        if strong.is_wanted(core):
            strong.require(core, _together(found.grants, found.dead))
        pieces, lost = reading.fetch(found.plan)
    except BaseException:
        with core.lock:
            state.leases.unsettled(found.dead)
        raise
    if found.dead:
        burial.bury(state, found.dead, reading.pick(pieces, found.dead))
    if found.texts is not None:
        pairs = zip(found.grants, found.texts, strict=True)
        answers = [_answer(grant, texts, found.ready) for grant, texts in pairs]
    else:
        alone = len(wants) == 1 and not found.dead
        answers = [_leased(pieces, grant, lost, found.ready, alone=alone) for grant in found.grants]
    for grant, answer in zip(found.grants, answers, strict=True):
        state.journal.claimed(found.now_ms, grant.want.node, answer)
    if lost and not any(answer.count for answer in answers):
        raise Corrupt(
            core.name,
            pos=0,
            reason=f"jobs {lost[:10]} do not read",
            next_step="they stay leased until their leases end, claim again for the others",
        )
    return answers


def _pass(state: State, wants: Sequence[Want]) -> Pass:
    core, leases = state.core, state.leases
    total = sum(want.most for want in wants)
    while True:
        if leases.lease_id + total > state.ceiling:
            state.reserve(total)
        with core.lock:
            core.check_writable()
            core.shared.shard(core.id)  # refuses where nothing can be written
            if not core.ephemeral and leases.lease_id + total > state.ceiling:
                continue
            now_ms = core.shared.now_ms()
            swept = state.refresh(now_ms)
            live, dead = _taken(state, total)
            grants: list[Grant] = []
            for want, share in zip(wants, _dealt(live, wants), strict=True):
                deadline_ms = now_ms + clamp_lease(core.config.lease_ms if want.lease_ms is None else want.lease_ms)
                seqs = _fitting(state, want, share)
                grants.append(Grant(want, seqs, *leases.grant(seqs, want.node, deadline_ms, want.conn), deadline_ms))
            leases.set_aside(dead)
            try:
                texts = None if dead else _texts(core.index, grants)
                plan = reading.plan(core.index, _together(grants, dead), state.ahead) if texts is None else []
                token = _log(state, grants) if state.durable and live else None
            except BaseException:
                _take_back(state, grants)
                leases.unsettled(dead)
                raise
            return Pass(now_ms, grants, dead, texts, plan, token, state.counts().ready, bool(swept))


def _dealt(live: list[int], wants: Sequence[Want]) -> list[list[int]]:
    """Which jobs each of them is given."""
    if len(wants) == 1:
        return [live]
    return [[live[at] for at in share] for share in divide(len(live), [want.most for want in wants])]


def _fitting(state: State, want: Want, seqs: list[int]) -> list[int]:
    """As many of these jobs as their claimer can take; the others can be claimed again, before all that is fresh."""
    index, most = state.core.index, want.bytes_max
    if most is None or index.bytes <= most or len(seqs) < 2:
        return seqs
    fit = reading.fitting(index, seqs, most)
    state.leases.put_back(seqs[fit:])
    return seqs[:fit]


def _together(grants: Sequence[Grant], dead: Sequence[int]) -> list[int]:
    return sorted([*dead, *(seq for grant in grants for seq in grant.seqs)])


def _texts(index: TopicIndex, grants: Sequence[Grant]) -> list[Texts] | None:
    """What each of them is given, where all of it is at hand."""
    found: list[Texts] = []
    for grant in grants:
        texts = reading.texts(index, sorted(grant.seqs)) if grant.seqs else Texts([], [])
        if texts is None:
            return None
        found.append(texts)
    return found


def _taken(state: State, total: int) -> tuple[list[int], list[int]]:
    """The next jobs to hand out, and those that came up before them and were handed out too often."""
    leases, config = state.leases, state.core.config
    if not config.max_deliveries or config.dead_letter is None:
        return leases.take(total, state.fresh), []
    live: list[int] = []
    dead: list[int] = []
    while len(live) < total:
        taken = leases.take(total - len(live), state.fresh)
        if not taken:
            break
        for seq in taken:
            (dead if leases.deliveries.get(seq, 0) >= config.max_deliveries else live).append(seq)
    return live, dead


def _log(state: State, grants: Sequence[Grant]) -> Token[None]:
    """The grants as frames, in one commit."""
    frames = [
        state.lease_frame(seq, LeaseEvent.CLAIMED, lease_id, grant.deadline_ms, count, grant.want.node)
        for grant in grants
        for seq, lease_id, count in zip(grant.seqs, grant.ids, grant.counts, strict=True)
    ]
    commit = Step(state, frames, partial(_logged, state, grants), durable=state.core.durable)
    state.core.submit(commit)
    return commit.token


def _logged(state: State, grants: Sequence[Grant], error: Error | None) -> None:
    if error is not None:
        _take_back(state, grants)


def _take_back(state: State, grants: Sequence[Grant]) -> None:
    for grant in grants:
        state.leases.revoke(grant.seqs, grant.ids)


def _answer(grant: Grant, texts: Texts, ready: int) -> Leased:
    seqs, ids, counts = grant.seqs, grant.ids, grant.counts
    deadlines = [grant.deadline_ms] * len(seqs)
    if all(map(lt, seqs, seqs[1:])):
        return Leased(seqs, list(ids), deadlines, counts, texts, ready)
    rows = sorted(zip(seqs, ids, counts, strict=True))
    first, second, third = ([row[at] for row in rows] for at in range(3))
    return Leased(first, second, deadlines, third, texts, ready)


def _leased(pieces: Sequence[Piece], grant: Grant, lost: Sequence[int], ready: int, *, alone: bool) -> Leased:
    rows = zip(grant.seqs, grant.ids, grant.counts, strict=True)
    unread = set(lost)
    kept = sorted(row for row in rows if row[0] not in unread)
    seqs = [seq for seq, _, _ in kept]
    return Leased(
        seqs,
        [lease_id for _, lease_id, _ in kept],
        [grant.deadline_ms] * len(kept),
        [count for _, _, count in kept],
        list(pieces) if alone else reading.pick(pieces, seqs),
        ready,
    )
