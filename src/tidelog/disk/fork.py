"""Forks: a handle belongs to the process that opened it.

A forked child inherits descriptors, locks and buffers, but none of the threads. If it wrote with them, it would
overwrite records of its parent; if it closed them, it would truncate and sync its parent's files. So a child gives up
everything that it inherited, in `os.register_at_fork`, before any other code runs:

- Files, lock files and pipes are closed in the child. The child holds no lock and keeps no removed file alive. The
  parent's `flock` stays: it ends with the last descriptor.
- Handles (engine, logs, channels, offsets, workers) are marked as closed and their locks are replaced by `ForkedLock`:
  using them raises Forked and never waits for a thread that does not exist in the child. `close` does nothing.
- A fork by C code runs no hooks. Files and disks therefore compare process ids before they change anything.

`register(handle)` adds an object whose `on_fork(pid)` is called in each child. The cost for a write is one `getpid` per
batch (0.2 µs).
"""

from __future__ import annotations

import os
from itertools import chain
from threading import Condition, Lock, RLock
from typing import Final, NoReturn, Protocol
from weakref import WeakSet

from tidelog.errors import Forked


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


def _after_fork_in_child() -> None:
    global _current_pid
    parent, _current_pid = _current_pid, os.getpid()
    for handle in list(_registered):
        handle.on_fork(parent)
    _registered.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
