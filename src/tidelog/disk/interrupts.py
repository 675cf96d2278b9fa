"""[shell] Interrupts: a signal handler that raises does not cut a commit in two.

Python runs signal handlers in the main thread, between any two bytecodes. A handler that raises (Ctrl-C, an alarm, a
SIGTERM that ends the program) would leave a commit written and not published, or published and not acknowledged. So
whatever changes shared state does it inside

    with DEFERRED:
        ...

While the main thread is inside, handlers are replaced by one that remembers the signal. On the way out they are put
back and called: the commit is completed, then the interrupt is raised. An append's wait for another thread is outside.
Other threads pay a comparison: Python delivers no signal to them. Entering and leaving costs the main thread 1.5 µs.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # of CPython, without a stub
import os
import signal
from collections.abc import Callable
from functools import wraps
from threading import get_ident, main_thread
from types import FrameType
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=type)

# Those for which programs install handlers that may raise. SIGINT first: it is deferred before the others.
_DEFERRED_SIGNALS: Final = tuple(
    int(getattr(signal, name))
    for name in (*("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCHLD"),)
    if hasattr(signal, name)
)
_get_handler, _set_handler = (
    _signal.getsignal,
    _signal.signal,
)  # without the enums of `signal`, which cost ten times as much

_main_thread_id = main_thread().ident
_saved_handlers: list[tuple[int, Any]] = []  # handlers that were replaced
_last_handlers: dict[int, Any] = {}  # of each signal, the handler that was replaced last
_pending_signals: list[tuple[int, FrameType | None]] = []  # signals that came meanwhile


def _record_signal(number: int, frame: FrameType | None) -> None:
    _pending_signals.append((number, frame))


class SignalDeferral:
    """The block in which signals wait. May be nested."""

    def __init__(self) -> None:
        self.depth = 0  # of the main thread

    def __enter__(self) -> None:
        if get_ident() != _main_thread_id:
            return
        if not self.depth:
            _install_recorders()
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        if get_ident() != _main_thread_id:
            return
        self.depth -= 1
        if not self.depth:
            _restore_and_deliver()


DEFER_SIGNALS: Final = SignalDeferral()


def defer_signals(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, called with signals deferred."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with DEFER_SIGNALS:
            return function(*args, **kwargs)

    return call


def defer_signals_in(*names: str) -> Callable[[C], C]:
    """Let these methods of a class run with signals deferred."""

    def change(kind: C) -> C:
        for name in names:
            setattr(kind, name, defer_signals(kind.__dict__[name]))
        return kind

    return change


def _install_recorders() -> None:
    _saved_handlers.clear()
    try:
        for number in _DEFERRED_SIGNALS:
            handler = _get_handler(number)
            if handler is _record_signal:  # a second signal broke off the way out of an earlier block
                _saved_handlers.append((number, _last_handlers[number]))
            elif callable(handler):
                _last_handlers[number] = handler
                _saved_handlers.append((number, handler))
                _set_handler(number, _record_signal)
    except ValueError:  # not the main interpreter, which gets no signals either
        _saved_handlers.clear()
    except BaseException:
        _restore_and_deliver()
        raise


def _restore_and_deliver() -> None:
    try:
        _restore_handlers(len(_saved_handlers) - 1)
    finally:
        if _pending_signals:
            came = [(_last_handlers[number], number, frame) for number, frame in _pending_signals]
            _pending_signals.clear()
            _deliver(came)


def _restore_handlers(at: int) -> None:
    """Restore a handler and those before it, also where a signal that comes in between raises. SIGINT is the last."""
    if at >= 0:
        try:
            number, handler = _saved_handlers[at]
            if _get_handler(number) is _record_signal:  # or the program has installed another one meanwhile
                _set_handler(number, handler)
        finally:
            _restore_handlers(at - 1)


def _deliver(came: list[tuple[Callable[[int, FrameType | None], object], int, FrameType | None]]) -> None:
    """Call every handler, also where one before it raises."""
    if came:
        handler, number, frame = came.pop(0)
        try:
            handler(number, frame)
        finally:
            _deliver(came)


def _after_fork_in_child() -> None:
    """The thread that forked is the main thread of the child, and is outside of every block of another."""
    global _main_thread_id
    if _main_thread_id != get_ident():
        _main_thread_id, DEFER_SIGNALS.depth = get_ident(), 0
        _pending_signals.clear()
        for number, handler in _saved_handlers:
            if _get_handler(number) is _record_signal:
                _set_handler(number, handler)


os.register_at_fork(after_in_child=_after_fork_in_child)
