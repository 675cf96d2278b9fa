"""The latch: once a sync failed, nothing may be written until the log is reopened.

Linux marks pages clean after a failed sync, so a later sync can succeed while earlier bytes
never reached the device. A record acked after that would sit behind a hole.
"""

from __future__ import annotations

import errno
from typing import Protocol

from tidelog.errors import DiskFull, Error, Latched, WriteFailed

FULL = frozenset((errno.ENOSPC, errno.EDQUOT))


class Syncable(Protocol):
    @property
    def path(self) -> str: ...
    def sync(self) -> None: ...


class Latch:
    def __init__(self, log: str) -> None:
        self._log = log
        self._because: BaseException | None = None

    @property
    def closed(self) -> bool:
        return self._because is not None

    def check(self) -> None:
        """Raise when an earlier failure ended writing. For who has written nothing yet."""
        if self._because is not None:
            late = Latched(
                f"{self._log} is read-only since an earlier failure ({self._because}); this call wrote nothing, "
                "reopen the log on a healthy disk"
            )
            late.written = False  # what is in doubt is the write that failed, and no other
            raise late from self._because

    def check_sync(self) -> None:
        """`check`, for who is about to sync: what it has written may be what the earlier failure was about."""
        if self._because is not None:
            raise Latched(
                f"{self._log} is read-only since an earlier failure ({self._because}); whether what was written last "
                "is on disk is unknown, reopen the log on a healthy disk"
            ) from self._because

    def trip(self, error: BaseException, what: str) -> Latched:
        """Close the latch; return the error to raise."""
        self._because = self._because or error
        return Latched(
            f"{self._log}: {what} failed ({error}); whether the last write is on disk is unknown, earlier acked "
            "records are safe; reopen the log on a healthy disk"
        )

    def owing(self) -> Latched:
        """The error for who closes what was latched while acked records waited for a sync."""
        return Latched(
            f"{self._log}: an earlier failure ({self._because}) kept records from the disk that were acked without a "
            "sync; they are as the system has them and may not survive a power cut, reopen the log on a healthy disk"
        )

    def sync(self, file: Syncable) -> None:
        """Sync, or latch."""
        try:
            file.sync()
        except OSError as error:
            self._because = self._because or error  # before any call: an interrupt in between must not lose it
            raise self.trip(error, f"syncing {file.path}") from error

    def refused(self, error: OSError, what: str) -> Error:
        """The error for a failed step that changed nothing which acked records hang on: it may be tried again."""
        if error.errno in FULL:
            return self._full(what)
        return WriteFailed(f"{self._log}: {what} failed ({error}); every record is as before, mend the disk and retry")

    def failed(self, error: OSError, what: str) -> Error:
        """The error for a failed step behind which writing cannot go on: no room is temporary, the rest latches."""
        return self._full(what) if error.errno in FULL else self.trip(error, what)

    def _full(self, what: str) -> DiskFull:
        return DiskFull(f"{self._log}: no room on the device while {what}; nothing was written, free space and retry")
