"""Signal deferral: a signal handler that raises does not interrupt a commit half-way.

Python runs signal handlers in the main thread, between any two bytecodes. A handler that raises (Ctrl-C, an alarm, a
SIGTERM that ends the program) would leave a commit written but not published, or published but not acknowledged. So
code that changes shared state runs inside `with DEFER_SIGNALS:`. While the main thread is inside, the handlers are
replaced by one that records the signal. On exit they are restored and called: the commit is completed, then the
interrupt is raised. An append's wait for another thread is outside the block. Other threads only compare thread ids:
Python delivers no signal to them. Entering and leaving costs the main thread 1.5 µs.
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

# Signals for which programs install handlers that may raise. SIGINT first: it is deferred before the others.
_DEFERRED_SIGNALS: Final = tuple(
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCHLD")
    if hasattr(signal, name)
)
# From `_signal`: the functions of `signal` convert to enums, which costs ten times as much.
_get_handler, _set_handler = _signal.getsignal, _signal.signal

_main_thread_id = main_thread().ident
_saved_handlers: list[tuple[int, Any]] = []  # handlers that were replaced by this block
_last_handlers: dict[int, Any] = {}  # the handler of each signal that was replaced last
_pending_signals: list[tuple[int, FrameType | None]] = []  # signals that arrived inside the block


def _record_signal(number: int, frame: FrameType | None) -> None:
    _pending_signals.append((number, frame))


class SignalDeferral:
    """A block in which signals are deferred. May be nested."""

    def __init__(self) -> None:
        self.depth = 0  # nesting depth of the main thread

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
    """Wrap `function` so that it runs with signals deferred."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with DEFER_SIGNALS:
            return function(*args, **kwargs)

    return call


def defer_signals_in(*names: str) -> Callable[[C], C]:
    """Class decorator: run these methods with signals deferred."""

    def decorate(cls: C) -> C:
        for name in names:
            setattr(cls, name, defer_signals(cls.__dict__[name]))
        return cls

    return decorate


def _install_recorders() -> None:
    _saved_handlers.clear()
    try:
        for number in _DEFERRED_SIGNALS:
            handler = _get_handler(number)
            if handler is _record_signal:  # a second signal interrupted the exit of an earlier block
                _saved_handlers.append((number, _last_handlers[number]))
            elif callable(handler):
                _last_handlers[number] = handler
                _saved_handlers.append((number, handler))
                _set_handler(number, _record_signal)
    except ValueError:  # a subinterpreter, which receives no signals
        _saved_handlers.clear()
    except BaseException:
        _restore_and_deliver()
        raise


def _restore_and_deliver() -> None:
    try:
        _restore_handlers(len(_saved_handlers) - 1)
    finally:
        if _pending_signals:
            calls = [(_last_handlers[number], number, frame) for number, frame in _pending_signals]
            _pending_signals.clear()
            _deliver(calls)


def _restore_handlers(index: int) -> None:
    """Restore this handler and those before it, even if a signal that arrives in between raises. SIGINT is the last."""
    if index >= 0:
        try:
            number, handler = _saved_handlers[index]
            if _get_handler(number) is _record_signal:  # otherwise the program has installed another handler
                _set_handler(number, handler)
        finally:
            _restore_handlers(index - 1)


def _deliver(calls: list[tuple[Callable[[int, FrameType | None], object], int, FrameType | None]]) -> None:
    """Call every handler, even if an earlier one raises."""
    if calls:
        handler, number, frame = calls.pop(0)
        try:
            handler(number, frame)
        finally:
            _deliver(calls)


def _after_fork_in_child() -> None:
    """The forking thread is the main thread of the child and is outside every block of the parent's main thread."""
    global _main_thread_id
    if _main_thread_id != get_ident():
        _main_thread_id, DEFER_SIGNALS.depth = get_ident(), 0
        _pending_signals.clear()
        for number, handler in _saved_handlers:
            if _get_handler(number) is _record_signal:
                _set_handler(number, handler)


os.register_at_fork(after_in_child=_after_fork_in_child)
