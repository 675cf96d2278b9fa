"""Consumer groups: the position of a group, and moving it as a query progresses.

    offset of Spark     the seq to be read next          a group's position     the last seq that was passed

Offsets in Spark's checkpoint decide what a query reads; a group is how everybody else sees how far it is. So a group
that cannot be moved does not stop a running query: by path that happens while another writer holds the directory. The
next batch moves it by both. At the start of a query it is an error, because it would never be noticed later.
A group that is ahead stays there: it goes back by a reset only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol, runtime_checkable

from tidelog import database
from tidelog.clock import SystemClock
from tidelog.database import Database
from tidelog.disk.interface import Disk
from tidelog.errors import BadInput, CursorConflict, GroupNotFound, Locked, TopicNotFound, Unavailable
from tidelog.spark.http_client import ServerHttpClient, quote_name
from tidelog.spark.offsets import Position
from tidelog.spark.sink_backends import open_when_unlocked

LOCK_WAIT_MS = 2_000  # a sink of the same directory holds it while it publishes
_log = logging.getLogger("tidelog.spark")


class GroupStore(Protocol):
    def check_writable(self) -> None:
        """Raise if a group could not be moved."""
        ...

    def fetch(self, group: str, topic: str) -> int | None:
        """The seq the group reads next; None: it has not read this topic."""
        ...

    def commit(self, group: str, positions: Mapping[str, Position]) -> bool:
        """Move the group to these positions. Returns False if that failed now; the log has the reason."""
        ...


@runtime_checkable
class HasGroups(Protocol):
    @property
    def groups(self) -> GroupStore: ...


def group_store(backend: object, option: str, group: str) -> GroupStore:
    """The groups of a place, or BadInput."""
    if isinstance(backend, HasGroups):
        return backend.groups
    raise BadInput(
        f"option {option}: logs of the library keep no groups of consumers, so there is no {group!r}; nothing was "
        "read, give startingOffsets as seqs, earliest or latest"
    )


class DirectoryGroups:
    """Groups in a directory: read from a snapshot of it, moved by a writer that holds it for that moment."""

    def __init__(self, path: str, disk: Disk, reader: Database) -> None:
        self._path, self._disk, self._reader = path, disk, reader

    def check_writable(self) -> None:
        try:
            database.open(self._path, disk=self._disk, threads=False).close()
        except Locked as error:
            raise Locked(
                f"option group: {self._path} is held by another writer, and a group is moved by writing; nothing was "
                "read, name the server that has it (option server), end that writer, or leave group out"
            ) from error

    def fetch(self, group: str, topic: str) -> int | None:
        found = self._reader.find(topic)
        mine = None if found is None else found.group(group)
        return mine.position + 1 if mine is not None and mine.exists else None

    def commit(self, group: str, positions: Mapping[str, Position]) -> bool:
        if not any(self._needs_commit(group, topic, spot) for topic, spot in positions.items()):
            return True  # the source and the listener of a query both move it; the second one need not write
        try:
            with open_when_unlocked(self._open_writer, self._path, SystemClock(), LOCK_WAIT_MS) as log:
                for topic, spot in positions.items():
                    found = log.find(topic)
                    if found is not None and found.epoch == spot.epoch:
                        with suppress(CursorConflict):
                            found.group(group).commit(spot.seq - 1)
        except Locked as error:
            _log.warning("the group %s stays where it is until the next batch: %s", group, error)
            return False
        return True

    def _needs_commit(self, group: str, topic: str, position: Position) -> bool:
        """Whether the snapshot has the topic of an offset, and its group before that offset."""
        found = self._reader.find(topic)
        return found is not None and found.epoch == position.epoch and (self.fetch(group, topic) or 0) < position.seq

    def _open_writer(self) -> Database:
        return database.open(self._path, disk=self._disk, threads=False)


class ServerGroups:
    def __init__(self, http: ServerHttpClient) -> None:
        self._http = http

    def check_writable(self) -> None:
        """Who may not write is found out by the first commit."""

    def fetch(self, group: str, topic: str) -> int | None:
        try:
            return int(self._http.get(_group_path(topic, group))["position"]) + 1
        except (GroupNotFound, TopicNotFound):
            return None

    def commit(self, group: str, positions: Mapping[str, Position]) -> bool:
        try:
            for topic, spot in positions.items():
                with suppress(TopicNotFound, CursorConflict):
                    if self._http.get(f"/v0/topics/{quote_name(topic)}/segments", sums="false")["epoch"] == spot.epoch:
                        self._http.post(f"{_group_path(topic, group)}/commit", {"seq": spot.seq - 1})
        except Unavailable as error:
            _log.warning("the group %s stays where it is until the next batch: %s", group, error)
            return False
        return True


def _group_path(topic: str, group: str) -> str:
    return f"/v0/topics/{quote_name(topic)}/groups/{quote_name(group)}"
