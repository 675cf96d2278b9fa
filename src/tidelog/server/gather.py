"""[hot] Plain writes of one turn of the loop to one topic become one batch.

    request ─┐
    request ─┼─► (end of the turn) one batch, one frame, one place in the WAL's queue ─► each its own seqs
    request ─┘

Only what no other write can change the outcome of is gathered: no key, no cap that refuses, no age, no quota.
All of a turn's writes share one fate, as all writes of a commit batch do anyway: where there is no room for the batch
it waits in line, or is refused, as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from tidelog.engine import Appended, Batch, Token, Topic
from tidelog.errors import Error
from tidelog.server.admission import Admission
from tidelog.server.commits import Commits

T = TypeVar("T")
Part: TypeAlias = tuple[T, int, int]
"""Who wrote something, the place of the first of it in the batch, and how many records it is."""
Tell: TypeAlias = Callable[[Appended | Error, list[Part[T]]], None]
_BYTES_MAX: Final = 1 << 20  # more than that is staged without waiting for the turn's end
_RECORDS_MAX: Final = 4_096


class _Group:
    __slots__ = ("datas", "size", "tells", "topic")

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.datas: list[bytes] = []
        self.tells: dict[Tell[Any], list[Part[Any]]] = {}
        self.size = 0


class Gather:
    """On the event loop's thread."""

    def __init__(self, commits: Commits, admission: Admission) -> None:
        self._commits, self._admission = commits, admission
        self._groups: dict[int, _Group] = {}
        self._late: list[Callable[[], None]] = []
        commits.last_call = self._flush

    def soon(self, call: Callable[[], None]) -> None:
        """Have it called at the end of this turn, before anything is staged: it may still add writes."""
        self._late.append(call)
        self._commits.want()

    def add(self, topic: Topic, datas: list[bytes], size: int, tell: Tell[T], who: T) -> None:
        """Write JSON texts. `tell` gets the outcome of the batch, once for all who named the same one, with everybody's
        part in it. Raises Busy where they are refused now."""
        self._admission.check(topic)
        if not self._groups:
            self._commits.want()
        group = self._groups.get(topic.id)
        if group is None:
            group = self._groups[topic.id] = _Group(topic)
        group.tells.setdefault(tell, []).append((who, len(group.datas), len(datas)))
        group.datas += datas
        group.size += size
        if group.size > _BYTES_MAX or len(group.datas) > _RECORDS_MAX:
            self._stage(self._groups.pop(topic.id))

    def _flush(self) -> int:
        """Stage all that was added; return how many records that are."""
        late, self._late = self._late, []
        for call in late:
            call()
        groups, self._groups = self._groups, {}
        count = sum(len(group.datas) for group in groups.values())
        for group in groups.values():
            self._stage(group)
        return count

    def _stage(self, group: _Group) -> None:
        try:
            self._admission.stage(group.topic, Batch(group.datas, True), None, partial(self._staged, group))
        except Error as error:
            _told(group, error)

    def _staged(self, group: _Group, token: Token[Appended] | Error, held_us: int) -> None:
        if isinstance(token, Error):
            _told(group, token)
        else:
            self._commits.when_done(token, partial(_done, group, held_us))


def _done(group: _Group, held_us: int, token: Token[Appended]) -> None:
    try:
        done = token.wait()  # its outcome is known
    except Error as error:
        _told(group, error)
        return
    if held_us:
        done = msgspec.structs.replace(done, held_us=done.held_us + held_us)
    _told(group, done)


def _told(group: _Group, done: Appended | Error) -> None:
    for tell, parts in group.tells.items():
        tell(done, parts)
