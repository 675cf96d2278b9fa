"""[shell] Fifo channels: the owner pushes, readers pop, a durable cursor says what is next.

    first ≤ cursor ≤ last + 1         what the log has from the cursor on waits

A pop is at most once: the message is on disk before the cursor passes it, the cursor is on disk before
the message is handed out. A crash in between loses that message and never gives it twice. A cursor
that cannot be read, or that contradicts the log, is not guessed: the channel says CursorLost until its
owner clears it. Seqs that a power cut took before their sync are not given again and never wait: a pop passes over
them, logs their range and counts them (`fifo_seqs_passed_over`). Every function wants the shard's lock held, and waits
for the disk.
"""

from __future__ import annotations

import logging

from tidelog.channels.messages import Message
from tidelog.channels.metrics import Metrics
from tidelog.channels.room import Room
from tidelog.channels.store import CURSOR
from tidelog.disk.atomic import read_all, replace
from tidelog.disk.latch import FULL
from tidelog.disk.seam import Disk, join
from tidelog.errors import CursorLost, Damaged, DiskFull, FifoEmpty, FifoFull, Latched, WriteFailed
from tidelog.formats.channel import decode_cursor, encode_cursor

_log = logging.getLogger("tidelog.channels")


class Fifo:
    """The queue in a channel's directory."""

    def __init__(self, room: Room, disk: Disk, directory: str, metrics: Metrics) -> None:
        self._room, self._disk, self._path, self._metrics = room, disk, join(directory, CURSOR), metrics

    def begin(self, next_seq: int) -> None:
        """Make an empty queue of a channel: what was published before is out of reach."""
        self._move(next_seq)

    def push(self, payload: bytes, sender: str, *, sync: bool) -> Message:
        """Put one message at the end. When it raises, nothing was pushed (`written` of the error is False), except that
        a sync may fail (Latched) when the message is written already: `written` is None, and whether it was pushed
        shows after a restart."""
        room, log = self._room, self._room.messages()
        limit = room.meta.config.max_persist_messages
        if log.count_from(self._next()) >= limit:
            raise FifoFull(room.handler, limit=limit)
        seq, ts_ms = log.append([payload], sender.encode())
        if sync:
            try:
                log.sync()
            except Latched as error:
                raise Latched(
                    f"{room.handler}: message {seq} was written and its sync failed ({error}); whether it was pushed "
                    "shows when the directory is opened again, look for it before it is pushed again"
                ) from error
        return Message(room.handler, seq, ts_ms, sender, payload)

    def pop(self) -> Message:
        """Take the oldest message. It is gone for everybody, also after a crash."""
        room, log = self._room, self._room.messages()
        cursor = self._next()
        seq = log.after_hole(cursor)
        if seq > log.last_seq:
            raise FifoEmpty(room.handler)
        if not log.synced:
            log.sync()  # a cursor must never stand past what a power cut leaves
        found = log.read(seq, limit=1, bytes_max=1)
        if not found or found[0].seq != seq:
            raise Damaged(f"{room.handler}: message {seq} is not there; nothing was popped, its owner can clear it")
        self._move(seq + 1)
        self._passed_over(cursor, seq)
        return found[0]

    def _passed_over(self, first: int, stop: int) -> None:
        """Count and log the seqs of [first, stop) that the cursor went past without a message."""
        missing = self._room.messages().hole_seqs(first, stop)
        if missing:
            self._metrics.add("fifo_seqs_passed_over", by=missing)
            _log.warning(
                "%s: the cursor passed over %d of the seqs %d to %d, which a power cut took before their sync; push "
                "these messages again where they are still wanted",
                *(self._room.handler, missing, first, stop - 1),
            )

    def trim(self) -> None:
        """Drop sealed segments that were popped whole, and start another where one has grown."""
        log = self._room.messages()
        if not log.latched:
            log.keep_from(self._next(), self._room.meta.config.max_persist_messages)

    def clear(self) -> int:
        """Pass over all that waits; return how many that were, 0 where nobody knows. Mends a lost cursor."""
        log = self._room.messages()
        if not log.synced:
            log.sync()
        first, stop = log.last_seq + 1, log.last_seq + 1
        try:
            first, waiting = self._next(), self.length()
        except CursorLost:
            waiting = 0
        self._move(stop)
        self._passed_over(first, stop)
        return waiting

    def length(self) -> int:
        return self._room.messages().count_from(self._next())

    def _next(self) -> int:
        """The next seq to pop, held against the log."""
        if self._room.cursor is None:
            self._room.cursor = self._read()
        cursor, log = self._room.cursor, self._room.messages()
        if isinstance(cursor, int) and cursor > log.last_seq + 1:
            cursor = f"cursor.bin says {cursor} and the log ends at {log.last_seq}"
        if isinstance(cursor, int) and cursor < log.first_seq:
            cursor = f"cursor.bin says {cursor} and the log begins at {log.first_seq}"
        if isinstance(cursor, str):
            raise CursorLost(self._room.handler, reason=cursor)
        return cursor

    def _read(self) -> int | str:
        try:
            content = read_all(self._disk, self._path)
        except OSError as error:
            raise Damaged(
                f"{self._path} cannot be read: {error}; nothing was changed, mend the disk and retry"
            ) from error
        if content is None:
            return "there is no cursor.bin"
        found = decode_cursor(content)
        return "cursor.bin is damaged" if found is None else found

    def _move(self, next_seq: int) -> None:
        before = self._room.cursor
        try:
            with self._metrics.timed("fifo_cursor_duration"):
                replace(self._disk, self._path, encode_cursor(next_seq))
        except OSError as error:
            self._room.cursor = self._moved_back(before)
            if error.errno in FULL:
                raise DiskFull(
                    f"{self._path}: no room for the cursor; nothing was popped, free space and retry"
                ) from error
            raise WriteFailed(f"{self._path}: {error}; nothing was handed out, mend the disk and retry") from error
        self._room.cursor = next_seq

    def _moved_back(self, before: int | str | None) -> int | str | None:
        """The cursor after a failed move: as before where that could be made sure, else to be read from the file, so
        that no message is handed out by two pops, one before a restart and one after."""
        if not isinstance(before, int):
            return before
        try:
            if read_all(self._disk, self._path) != encode_cursor(before):
                replace(self._disk, self._path, encode_cursor(before))
        except OSError:
            return None
        return before
