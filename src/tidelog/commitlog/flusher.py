"""The background thread of the `interval` policy: it keeps the promise while nobody appends."""

from __future__ import annotations

from threading import Event, Thread

from tidelog.commitlog.append import tick
from tidelog.commitlog.state import State
from tidelog.errors import Error


class Flusher:
    def __init__(self, state: State) -> None:
        self._state = state
        state.background = True
        self._ending = Event()
        self._thread = Thread(target=self._run, name=f"tidelog sync {state.path}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pause_s = max(self._state.config.sync_interval_ms / 4000, 0.001)
        while not self._ending.wait(pause_s):
            try:
                tick(self._state)
            except Error:
                return  # the latch is closed now: the next append or sync tells its caller

    def stop(self) -> None:
        self._ending.set()
        self._thread.join()
