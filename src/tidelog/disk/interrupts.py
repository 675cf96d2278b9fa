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
_SIGNALS: Final = tuple(
    int(getattr(signal, name))
    for name in (*("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCHLD"),)
    if hasattr(signal, name)
)
_get, _set = _signal.getsignal, _signal.signal  # without the enums of `signal`, which cost ten times as much

_main = main_thread().ident
_saved: list[tuple[int, Any]] = []  # handlers that were replaced
_last: dict[int, Any] = {}  # of each signal, the handler that was replaced last
_held: list[tuple[int, FrameType | None]] = []  # signals that came meanwhile


def _hold(number: int, frame: FrameType | None) -> None:
    _held.append((number, frame))


class Deferred:
    """The block in which signals wait. May be nested."""

    def __init__(self) -> None:
        self.depth = 0  # of the main thread

    def __enter__(self) -> None:
        if get_ident() != _main:
            return
        if not self.depth:
            _replace()
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        if get_ident() != _main:
            return
        self.depth -= 1
        if not self.depth:
            _put_back()


DEFERRED: Final = Deferred()


def deferred(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, called with signals deferred."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with DEFERRED:
            return function(*args, **kwargs)

    return call


def deferring(*names: str) -> Callable[[C], C]:
    """Let these methods of a class run with signals deferred."""

    def change(kind: C) -> C:
        for name in names:
            setattr(kind, name, deferred(kind.__dict__[name]))
        return kind

    return change


def _replace() -> None:
    _saved.clear()
    try:
        for number in _SIGNALS:
            handler = _get(number)
            if handler is _hold:  # a second signal broke off the way out of an earlier block
                _saved.append((number, _last[number]))
            elif callable(handler):
                _last[number] = handler
                _saved.append((number, handler))
                _set(number, _hold)
    except ValueError:  # not the main interpreter, which gets no signals either
        _saved.clear()
    except BaseException:
        _put_back()
        raise


def _put_back() -> None:
    try:
        _restore(len(_saved) - 1)
    finally:
        if _held:
            came = [(_last[number], number, frame) for number, frame in _held]
            _held.clear()
            _deliver(came)


def _restore(at: int) -> None:
    """Restore a handler and those before it, also where a signal that comes in between raises. SIGINT is the last."""
    if at >= 0:
        try:
            number, handler = _saved[at]
            if _get(number) is _hold:  # or the program has installed another one meanwhile
                _set(number, handler)
        finally:
            _restore(at - 1)


def _deliver(came: list[tuple[Callable[[int, FrameType | None], object], int, FrameType | None]]) -> None:
    """Call every handler, also where one before it raises."""
    if came:
        handler, number, frame = came.pop(0)
        try:
            handler(number, frame)
        finally:
            _deliver(came)


def _in_child() -> None:
    """The thread that forked is the main thread of the child, and is outside of every block of another."""
    global _main
    if _main != get_ident():
        _main, DEFERRED.depth = get_ident(), 0
        _held.clear()
        for number, handler in _saved:
            if _get(number) is _hold:
                _set(number, handler)


os.register_at_fork(after_in_child=_in_child)
