"""[hot] Plain writes of one turn of the loop to one topic become one batch.

    request ─┐
    request ─┼─► (end of the turn) one batch, one frame, one place in the WAL's queue ─► each its own seqs
    request ─┘

Only what no other write can change the outcome of is gathered: no key, no cap that refuses, no age, no quota.
All of a turn's writes share one fate, as all writes of a commit batch do anyway: where there is no room for the batch
it waits in line, or is refused, as a whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from tidelog.engine import Appended, Batch, Token, Topic
from tidelog.errors import Error
from tidelog.server.admission import Admission
from tidelog.server.commits import Commits

Tell = Callable[[Appended | Error], None]
_BYTES_MAX: Final = 1 << 20  # more than that is staged without waiting for the turn's end
_RECORDS_MAX: Final = 4_096


class _Group:
    __slots__ = ("datas", "size", "tells", "topic")

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.datas: list[bytes] = []
        self.tells: list[tuple[Tell, int]] = []
        self.size = 0


class Gather:
    """On the event loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, commits: Commits, admission: Admission) -> None:
        self._loop, self._commits, self._admission = loop, commits, admission
        self._groups: dict[int, _Group] = {}

    def add(self, topic: Topic, datas: list[bytes], size: int, tell: Tell) -> None:
        """Write JSON texts; `tell` gets their seqs, or why there are none. Raises Busy where they are refused now."""
        self._admission.check(topic)
        if not self._groups:
            self._loop.call_soon(self._flush)
        group = self._groups.get(topic.id)
        if group is None:
            group = self._groups[topic.id] = _Group(topic)
        group.datas += datas
        group.size += size
        group.tells.append((tell, len(datas)))
        if group.size > _BYTES_MAX or len(group.datas) > _RECORDS_MAX:
            self._stage(self._groups.pop(topic.id))

    def _flush(self) -> None:
        groups, self._groups = self._groups, {}
        for group in groups.values():
            self._stage(group)

    def _stage(self, group: _Group) -> None:
        try:
            self._admission.stage(group.topic, Batch(group.datas, True), None, partial(self._staged, group.tells))
        except Error as error:
            _refused(group.tells, error)

    def _staged(self, tells: list[tuple[Tell, int]], token: Token[Appended] | Error, held_us: int) -> None:
        if isinstance(token, Error):
            _refused(tells, token)
        else:
            self._commits.when_done(token, partial(_told, tells, held_us))


def _refused(tells: list[tuple[Tell, int]], error: Error) -> None:
    for tell, _ in tells:
        tell(error)


def _told(tells: list[tuple[Tell, int]], held_us: int, token: Token[Appended]) -> None:
    try:
        done = token.wait()  # its outcome is known
    except Error as error:
        _refused(tells, error)
        return
    first, held_us = done.first_seq, done.held_us + held_us
    for tell, count in tells:
        tell(Appended(first, first + count - 1, done.head_seq, False, done.write_us, done.sync_us, held_us))
        first += count
