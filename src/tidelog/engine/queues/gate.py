"""[shell] Threads that claim together: they wait out the jitter window, and the first to wake runs the pass for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event, Lock

from tidelog.clock import Clock
from tidelog.engine.queues.cohort import Cohort, Want
from tidelog.engine.queues.jobs import Leased


class _Seat:
    __slots__ = ("answer", "error", "served")

    def __init__(self) -> None:
        self.served = Event()
        self.answer: Leased | None = None
        self.error: BaseException | None = None


class Gate:
    """`serve` is a pass for a cohort; `give_back` is told of what somebody was given who has left meanwhile."""

    def __init__(
        self,
        clock: Clock,
        serve: Callable[[Sequence[Want]], list[Leased]],
        give_back: Callable[[Want, Leased], object],
    ) -> None:
        self._clock, self._serve, self._give_back = clock, serve, give_back
        self._lock = Lock()
        self._cohort = Cohort(0)
        self._seats: dict[int, _Seat] = {}

    def claim(self, want: Want, window_ms: int) -> Leased:
        seat = _Seat()
        with self._lock:
            self._cohort.window_ms = window_ms
            ticket = self._cohort.join(self._clock.monotonic_ms(), want)
            self._seats[ticket] = seat
        try:
            while not seat.served.is_set():
                seat.served.wait(self._left_s(ticket))
                self._serve_if_due(ticket)
        except BaseException:
            self._leave(ticket, want, seat)
            raise
        if seat.error is not None:
            raise seat.error
        assert seat.answer is not None, "whoever is served has an answer or an error"
        return seat.answer

    def _left_s(self, ticket: int) -> float | None:
        """How long the window is still open; None where somebody runs the pass of this ticket already."""
        with self._lock:
            due_ms = self._cohort.due_ms
            if ticket not in self._seats or due_ms is None:
                return None
            return max(due_ms - self._clock.monotonic_ms(), 0) / 1000

    def _serve_if_due(self, ticket: int) -> None:
        with self._lock:
            due_ms = self._cohort.due_ms
            if ticket not in self._seats or due_ms is None or self._clock.monotonic_ms() < due_ms:
                return
            members = [(self._seats.pop(each), want) for each, want in self._cohort.close()]
        try:
            answers = self._serve([want for _, want in members])
        except BaseException as error:
            for seat, _ in members:
                seat.error = error
                seat.served.set()
            return
        for (seat, _), answer in zip(members, answers, strict=True):
            seat.answer = answer
            seat.served.set()

    def _leave(self, ticket: int, want: Want, seat: _Seat) -> None:
        with self._lock:
            if self._seats.pop(ticket, None) is not None:
                self._cohort.leave(ticket)
                return
        seat.served.wait()  # its pass runs: what comes of it is given back
        if seat.answer is not None and seat.answer.count:
            self._give_back(want, seat.answer)
