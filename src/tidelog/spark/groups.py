"""Consumer groups: reading the position of a group, and moving it as a query progresses.

    offset of Spark     the next seq to read          position of a group     the last seq that was processed

Offsets in Spark's checkpoint decide what a query reads; a group shows its progress to others. So a group that cannot be
moved does not stop a running query; in a directory that happens while another writer has the lock, and the next batch
moves the group for both. At the start of a query it raises, because later nothing would show it. A group that is ahead
stays; only a reset moves it back.

Offsets in Spark's checkpoint: {"orders": {"epoch": 7, "seq": 42}}, the next seq to read; and the size of a batch.

The start of a batch is included, its end is not. The epoch distinguishes a topic that was dropped and created again
from the old one. A topic that an end has and a start has not is new: it is read from its first record. Names are
sorted, because Spark compares offsets as text. `admit_batch` has no state: offsets in, offsets out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

from tidelog import database
from tidelog.clock import SystemClock
from tidelog.database import Database
from tidelog.disk.interface import Disk
from tidelog.errors import BadInput, CursorConflict, GroupNotFound, Locked, TopicNotFound, Unavailable
from tidelog.spark.http_client import Client, quote_name
from tidelog.spark.sink_backends import open_when_unlocked


class Position(NamedTuple):
    epoch: int
    seq: int


Positions: TypeAlias = dict[str, Position]
REPORT_KEY: Final = "_tidelog"  # beside topics in the latest offset, whose names do not begin so


def encode_offsets(positions: Mapping[str, Position]) -> dict[str, dict[str, int]]:
    return {topic: {"epoch": positions[topic].epoch, "seq": positions[topic].seq} for topic in sorted(positions)}


def decode_offsets(offsets: Any) -> Positions:
    """Decode the offsets of a checkpoint; None and {} are the beginning."""
    try:
        return {str(topic): Position(int(at["epoch"]), int(at["seq"])) for topic, at in (offsets or {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise BadInput(
            f"{str(offsets)[:200]} is not an offset of a tidelog stream; nothing was read, is the checkpoint another "
            "query's?"
        ) from None


class Pending(NamedTuple):
    """Pending seqs [first, stop) of one topic."""

    topic: str
    first: int
    stop: int
    bytes_before: Callable[[int], int]

    @property
    def seq_count(self) -> int:
        return self.stop - self.first


def admit_batch(pending: list[Pending], rows_max: int | None, bytes_max: int | None) -> dict[str, int]:
    """Return where one batch ends, by topic. Each topic gets a share of the limits in proportion to its pending seqs or
    bytes. If anything is pending, the batch has at least one seq."""
    ends = {each.topic: each.stop for each in pending}
    if rows_max is not None:
        for each, share in _split_limit(pending, [each.seq_count for each in pending], rows_max):
            ends[each.topic] = min(ends[each.topic], each.first + share)
    if bytes_max is not None:
        sizes = [each.bytes_before(ends[each.topic]) - each.bytes_before(each.first) for each in pending]
        for each, share in _split_limit(pending, sizes, bytes_max):
            ends[each.topic] = _last_seq_within(each, ends[each.topic], share)
    waiting = [each for each in pending if each.seq_count]
    if waiting and all(ends[each.topic] == each.first for each in waiting):
        ends[waiting[0].topic] += 1  # a limit that is smaller than one record must not stop the stream
    return ends


def _split_limit(pending: list[Pending], sizes: list[int], limit: int) -> list[tuple[Pending, int]]:
    """Split a limit in proportion to sizes; the first topics get the rest of the rounding."""
    total = sum(sizes)
    if total <= limit:
        return list(zip(pending, sizes, strict=True))
    shares = [size * limit // total for size in sizes]
    left = limit - sum(shares)
    for number, size in enumerate(sizes):
        more = min(left, size - shares[number])
        shares[number] += more
        left -= more
    return list(zip(pending, shares, strict=True))


def _last_seq_within(pending: Pending, stop: int, budget: int) -> int:
    """Return the last seq up to `stop` whose bytes fit, by bisection."""
    low, high, origin = pending.first, stop, pending.bytes_before(pending.first)
    while low < high:
        middle = (low + high + 1) // 2
        if pending.bytes_before(middle) - origin <= budget:
            low = middle
        else:
            high = middle - 1
    return low


LOCK_WAIT_MS = 2_000  # a sink of the same directory holds it while it publishes
_log = logging.getLogger("tidelog.spark")


class GroupStore(Protocol):
    def check_writable(self) -> None:
        """Raise if a group could not be moved."""
        ...

    def fetch(self, group: str, topic: str) -> int | None:
        """Return the seq that the group reads next; None if it has not read this topic."""
        ...

    def commit(self, group: str, positions: Mapping[str, Position]) -> bool:
        """Move the group to these positions. Returns False if that failed now; the log has the reason."""
        ...


@runtime_checkable
class HasGroups(Protocol):
    @property
    def groups(self) -> GroupStore: ...


def group_store(backend: object, option: str, group: str) -> GroupStore:
    """Return the groups of a backend. Raises BadInput if it has none."""
    if isinstance(backend, HasGroups):
        return backend.groups
    raise BadInput(
        f"option {option}: logs of the library keep no groups of consumers, so there is no {group!r}; nothing was "
        "read, give startingOffsets as seqs, earliest or latest"
    )


class DirectoryGroups:
    """Groups in a directory: read from a snapshot, moved by a writer that locks the directory for that moment. Those
    of a `read_only` object store cannot be moved."""

    def __init__(self, path: str, disk: Disk, reader: Database, *, read_only: bool = False) -> None:
        self._path, self._disk, self._reader, self._read_only = path, disk, reader, read_only

    def check_writable(self) -> None:
        if self._read_only:
            raise BadInput(
                f"option group: {self._path} is in an object store, which is only read; nothing was read, leave group "
                "out, or read the directory or the server that it is a copy of"
            )
        try:
            database.open(self._path, disk=self._disk, threads=False).close()
        except Locked as error:
            server = "the server that has it" if error.server is None else error.server
            raise Locked(
                f"option group: {self._path} is held by another writer, and a group is moved by writing; nothing was "
                f"read, name {server} (option server), end that writer, or leave group out",
                pid=error.pid,
                server=error.server,
            ) from error

    def fetch(self, group: str, topic: str) -> int | None:
        opened = self._reader.find(topic)
        known = None if opened is None else opened.group(group)
        return known.position + 1 if known is not None and known.exists else None

    def commit(self, group: str, positions: Mapping[str, Position]) -> bool:
        if self._read_only:
            self.check_writable()
        if not any(self._needs_commit(group, topic, position) for topic, position in positions.items()):
            return True  # the source and the listener of a query both move it; the second one need not write
        try:
            with open_when_unlocked(self._open_writer, self._path, SystemClock(), LOCK_WAIT_MS) as log:
                for topic, position in positions.items():
                    opened = log.find(topic)
                    if opened is not None and opened.epoch == position.epoch:
                        with suppress(CursorConflict):
                            opened.group(group).commit(position.seq - 1)
        except Locked as error:
            _log.warning("the group %s stays where it is until the next batch: %s", group, error)
            return False
        return True

    def _needs_commit(self, group: str, topic: str, position: Position) -> bool:
        """Whether the snapshot has the topic of an offset, and its group before that offset."""
        opened = self._reader.find(topic)
        return opened is not None and opened.epoch == position.epoch and (self.fetch(group, topic) or 0) < position.seq

    def _open_writer(self) -> Database:
        return database.open(self._path, disk=self._disk, threads=False)


class ServerGroups:
    def __init__(self, http: Client) -> None:
        self._http = http

    def check_writable(self) -> None:
        """No effect: the first commit shows whether the key may write."""

    def fetch(self, group: str, topic: str) -> int | None:
        try:
            return int(self._http.get(_group_path(topic, group))["position"]) + 1
        except (GroupNotFound, TopicNotFound):
            return None

    def commit(self, group: str, positions: Mapping[str, Position]) -> bool:
        try:
            for topic, position in positions.items():
                with suppress(TopicNotFound, CursorConflict):
                    listing = self._http.get(f"/v0/topics/{quote_name(topic)}/segments", sums="false")
                    if listing["epoch"] == position.epoch:
                        self._http.post(f"{_group_path(topic, group)}/commit", {"seq": position.seq - 1})
        except Unavailable as error:
            _log.warning("the group %s stays where it is until the next batch: %s", group, error)
            return False
        return True


def _group_path(topic: str, group: str) -> str:
    return f"/v0/topics/{quote_name(topic)}/groups/{quote_name(group)}"
