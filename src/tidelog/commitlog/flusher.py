"""The background thread of the `interval` policy: it syncs while no caller appends.

Every exception of a run is logged, counted and kept in `SegmentedLog.background` until a run succeeds again. The thread
ends with the log and not before: a full disk is temporary, and records that were acked still wait for their sync. After
a failed sync the log is latched: runs then do nothing, and the state goes on to say why.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from threading import Event, Thread
from typing import Final

from tidelog.commitlog.append import tick
from tidelog.commitlog.state import State
from tidelog.errors import Error

_log = logging.getLogger("tidelog.commitlog")
_LOG_AGAIN_MS: Final = 60_000  # while the same error repeats


@dataclass(frozen=True, slots=True)
class BackgroundState:
    """The background syncs of a log since it was opened."""

    runs: int = 0
    failures: int = 0
    failing: int = 0  # failures since the last run that succeeded; 0: the last one did
    last_error: str | None = None  # kept after a success
    latched: bool = False  # no run can succeed until the log is opened again


class Flusher:
    def __init__(self, state: State) -> None:
        self._state = state
        state.background = True
        self._runs = self._failures = self._failing = 0
        self._error: str | None = None
        self._logged_ms = 0
        self._ending = Event()
        self._thread = Thread(target=self._run, name=f"tidelog sync {state.path}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> BackgroundState:
        latched = self._state.latch.closed
        return BackgroundState(self._runs, self._failures, self._failing, self._error, latched)

    def _run(self) -> None:
        pause_s = max(self._state.config.sync_interval_ms / 4000, 0.001)
        while not self._ending.wait(pause_s):
            self.run_once()

    def run_once(self) -> None:
        """Sync and seal what is due. Raises nothing."""
        if self._state.latch.closed:
            return  # the run that latched it was counted, and the next append or sync raises
        self._runs += 1
        try:
            tick(self._state)
        except Exception as error:
            self._failed(error)
        else:
            self._failing = 0

    def _failed(self, error: Exception) -> None:
        self._failures, self._failing = self._failures + 1, self._failing + 1
        said = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
        now_ms = self._state.clock.monotonic_ms()
        if self._failing == 1 or said != self._error or now_ms - self._logged_ms >= _LOG_AGAIN_MS:
            self._logged_ms = now_ms
            trace = None if isinstance(error, Error) else error
            _log.error("%s: a background sync failed: %s", self._state.path, said, exc_info=trace)
        self._error = said

    def stop(self) -> None:
        self._ending.set()
        self._thread.join()
