"""The process and its machine: signals, forks, environment, programs, page cache.

**Signals.** Python runs signal handlers in the main thread, between any two bytecodes. A handler that raises (Ctrl-C,
an alarm, a SIGTERM that ends the program) would leave a commit written but not published, or published but not
acknowledged. So code that changes shared state runs inside `with DEFER_SIGNALS:`. While the main thread is inside, the
handlers are replaced by one that records the signal. On exit they are restored and called: the commit is completed,
then the interrupt is raised. An append's wait for another thread is outside the block. Other threads only compare
thread ids: Python delivers no signal to them. Entering and leaving costs the main thread 1.5 µs.

**Forks.** A handle belongs to the process that opened it. A forked child inherits descriptors, locks and buffers, but
none of the threads. If it wrote with them, it would overwrite records of its parent; if it closed them, it would
truncate and sync its parent's files. So a child gives up everything that it inherited, in `os.register_at_fork`, before
any other code runs:

- Files, lock files and pipes are closed in the child. The child holds no lock and keeps no removed file alive. The
  parent's `flock` stays: it ends with the last descriptor.
- Handles (engine, logs, channels, offsets, workers) are marked as closed and their locks are replaced by `ForkedLock`:
  using them raises Forked and never waits for a thread that does not exist in the child. `close` does nothing.
- A fork by C code runs no hooks. Files and disks therefore compare process ids before they change anything.

`register(handle)` adds an object whose `on_fork(pid)` is called in each child. The cost for a write is one `getpid` per
batch (0.2 µs).

**Page cache.** `is_resident` asks the kernel whether mapped bytes are in memory. The answer holds for that moment only:
if the kernel evicts a page between the check and the read, the reader waits for the disk once. So callers check small
ranges right before they read them.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # of CPython, without a stub
import ctypes
import mmap
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import wraps
from itertools import chain
from statistics import median
from threading import Condition, Lock, RLock, get_ident, main_thread
from types import FrameType
from typing import Any, Final, NoReturn, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

import pyarrow as pa

from tidelog.errors import Forked

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=type)

# ── signals ───────────────────────────────────────────────────────────────────────────────────

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


def _reset_deferral_in_child() -> None:
    """The forking thread is the main thread of the child and is outside every block of the parent's main thread."""
    global _main_thread_id
    if _main_thread_id != get_ident():
        _main_thread_id, DEFER_SIGNALS.depth = get_ident(), 0
        _pending_signals.clear()
        for number, handler in _saved_handlers:
            if _get_handler(number) is _record_signal:
                _set_handler(number, handler)


os.register_at_fork(after_in_child=_reset_deferral_in_child)


# ── forks ─────────────────────────────────────────────────────────────────────────────────────


class ForkAware(Protocol):
    def on_fork(self, pid: int) -> None:
        """Give up what belongs to the parent, process `pid`. Called in a forked child before other code runs. Must
        neither raise nor take a lock: the thread that holds it does not exist in the child."""
        ...


class ForkedLock:
    """Replacement for a lock or condition in a forked child: acquiring it raises Forked."""

    def __init__(self, what: str, pid: int) -> None:
        self._what, self._pid = what, pid

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise Forked(self._what, pid=self._pid)

    acquire = __enter__ = wait = wait_for = notify = notify_all = _refuse

    def __exit__(self, *_: object) -> None:
        """The block was entered by the parent, before the fork."""

    def release(self) -> None:
        """As `__exit__`."""

    def locked(self) -> bool:
        return False


_LOCK_TYPES: Final = (type(Lock()), type(RLock()), Condition)
_registered: WeakSet[ForkAware] = WeakSet()


def register(handle: ForkAware) -> None:
    """Call `handle.on_fork` in every child of this process, as long as the handle is alive."""
    _registered.add(handle)


def poison_locks(what: str, pid: int, *handles: object) -> None:
    """Replace every lock that is an attribute of these handles by a `ForkedLock`."""
    for handle in handles:
        names = {*getattr(handle, "__dict__", ()), *chain.from_iterable(_slots(kind) for kind in type(handle).__mro__)}
        for name in names:
            if isinstance(getattr(handle, name, None), _LOCK_TYPES):
                setattr(handle, name, ForkedLock(what, pid))


def _slots(kind: type) -> tuple[str, ...]:
    slots: str | tuple[str, ...] = getattr(kind, "__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def process_id() -> int:
    """The id of this process."""
    return os.getpid()


def check_process(what: str, pid: int) -> None:
    """Raise Forked if this is not the process `pid`, which opened `what`."""
    if os.getpid() != pid:
        raise Forked(what, pid=pid)


_current_pid = os.getpid()


def _release_handles_in_child() -> None:
    global _current_pid
    parent, _current_pid = _current_pid, os.getpid()
    for handle in list(_registered):
        handle.on_fork(parent)
    _registered.clear()


os.register_at_fork(after_in_child=_release_handles_in_child)


# ── the machine ───────────────────────────────────────────────────────────────────────────────

_COMMAND_TIMEOUT_S = 20


def get_environment(name: str) -> str | None:
    """An environment variable; None if it is not set or empty."""
    return os.environ.get(name) or None


def set_environment(name: str, value: str) -> None:
    """Set an environment variable for this process and its children."""
    os.environ[name] = value


def find_program(name: str) -> str | None:
    """The path of an executable, given its name or path; None if there is none."""
    return shutil.which(name)


def command_output(command: list[str]) -> str:
    """The standard output and standard error of a command; empty if it cannot be run."""
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return completed.stdout + completed.stderr


def processor_count() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0))


def page_faults() -> tuple[int, int] | None:
    """All page faults of this process since it started, and those that waited for the device; None if the system does
    not count them."""
    try:
        import resource  # not on every system
    except ImportError:
        return None
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt, usage.ru_majflt


def measure_sync_us(directory: str, now_us: Callable[[], int]) -> int:
    """Measure the median latency of a 4 KiB write with fdatasync, in microseconds. Raises OSError."""
    import tempfile  # late: importing it takes a tenth of the start of a process

    with tempfile.NamedTemporaryFile(dir=directory, prefix=".tidelog-doctor-") as file:
        latencies_us = []
        for _ in range(20):
            start = now_us()
            os.pwrite(file.fileno(), bytes(4096), 0)
            os.fdatasync(file.fileno())
            latencies_us.append(now_us() - start)
    return int(median(latencies_us))


def _load_mincore() -> Any:
    try:
        # PyDLL keeps the interpreter lock: the call takes 2 µs, getting the lock back may take far longer.
        mincore = ctypes.PyDLL(None).mincore
    except (OSError, AttributeError):  # not Linux: residency is unknown
        return None
    mincore.argtypes, mincore.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p), ctypes.c_int
    return mincore


_mincore = _load_mincore()


def is_resident(view: memoryview) -> bool:
    """Whether these bytes, a part of a `File.map`, can be read without waiting for the device. False if unknown."""
    if not len(view) or not isinstance(view.obj, mmap.mmap):
        return True  # not a mapped file
    if _mincore is None:
        return False
    start: int = pa.py_buffer(view).address  # takes a sixth of the time that numpy needs
    first_page = start - start % mmap.PAGESIZE
    size = start + len(view) - first_page
    pages = -(-size // mmap.PAGESIZE)
    residency = ctypes.create_string_buffer(pages)
    return _mincore(first_page, size, residency) == 0 and residency.raw.count(b"\x01") == pages
