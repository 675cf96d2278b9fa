"""A segment store in memory that fails, hangs, loses and damages objects, on demand.

It keeps the promises of `disk/segment_store.py`: what `put` stored survives every crash of the process. `on_op` is
called before and after every operation, and may raise `PowerOff` to end the process there: a sweep runs a workload once
per operation and looks at what is left.

    store = SimStore()
    store.fail("put", times=2)          the next two puts raise StoreUnavailable
    store.hang()                        every operation blocks until `resume`
    store.damage(key, pos)              flip a bit of an object
    store.lose(key)                     the object is gone, as after a deletion by hand
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from threading import Event, Lock
from typing import Literal, TypeAlias

from tidelog.disk.segment_store import StoredObject, check_key
from tidelog.errors import StoreDenied, StoreUnavailable
from tidelog.types import Buffer

StoreCall: TypeAlias = Literal["put", "read", "length", "delete", "list"]
StoreObserver: TypeAlias = Callable[[StoreCall, str, Literal["before", "after"]], None]


@dataclass(slots=True)
class _Fault:
    call: StoreCall | None  # None: any
    times: int
    is_partial: bool
    is_denied: bool


class SimStore:
    """A simulated store, empty at first. Safe to use from several threads."""

    def __init__(self, address: str = "sim://store") -> None:
        self._address = address
        self._lock = Lock()
        self._faults: list[_Fault] = []
        self._resumed = Event()
        self._resumed.set()
        self.objects: dict[str, bytes] = {}
        self.calls: list[tuple[StoreCall, str]] = []
        self.on_op: StoreObserver | None = None
        self.hanging = 0  # calls that are blocked now

    @property
    def address(self) -> str:
        return self._address

    # For tests.

    def fail(
        self, call: StoreCall | None = None, *, times: int = 1 << 30, denied: bool = False, partial: bool = False
    ) -> None:
        """Let the next `times` calls raise. `partial`: a put that fails leaves an object that is too short."""
        with self._lock:
            self._faults.append(_Fault(call, times, partial, denied))

    def heal(self) -> None:
        """End all faults and hangs."""
        with self._lock:
            self._faults.clear()
        self._resumed.set()

    def hang(self) -> None:
        """Block every call from here on, until `resume`."""
        self._resumed.clear()

    def resume(self) -> None:
        self._resumed.set()

    def lose(self, key: str) -> None:
        with self._lock:
            del self.objects[key]

    def damage(self, key: str, pos: int = 0) -> None:
        """Flip one bit of an object."""
        with self._lock:
            content = bytearray(self.objects[key])
            content[pos] ^= 1
            self.objects[key] = bytes(content)

    def truncate(self, key: str, size: int) -> None:
        with self._lock:
            self.objects[key] = self.objects[key][:size]

    # The SegmentStore protocol.

    def put(self, key: str, pieces: Iterable[Buffer], /) -> None:
        check_key(key)
        self._begin("put", key)
        content = b"".join(map(bytes, pieces))
        fault = self._take_fault("put")
        with self._lock:
            if fault is None:
                self.objects[key] = content
            elif fault.is_partial:
                self.objects[key] = content[: len(content) // 2]
        if fault is not None:
            raise self._error(fault)
        self._end("put", key)

    def read(self, key: str, lo: int, hi: int, /) -> bytes:
        self._run("read", key)
        with self._lock:
            if key not in self.objects:
                raise FileNotFoundError(errno.ENOENT, "there is no such object", key)
            content = self.objects[key][lo:hi]
        self._end("read", key)
        return content

    def length(self, key: str, /) -> int | None:
        self._run("length", key)
        with self._lock:
            found = self.objects.get(key)
        self._end("length", key)
        return None if found is None else len(found)

    def exists(self, key: str, /) -> bool:
        return self.length(key) is not None

    def delete(self, key: str, /) -> bool:
        self._run("delete", key)
        with self._lock:
            existed = self.objects.pop(key, None) is not None
        self._end("delete", key)
        return existed

    def list(self, prefix: str = "", /) -> Iterator[StoredObject]:
        self._run("list", prefix)
        below = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        with self._lock:
            found = [StoredObject(key, len(content)) for key, content in self.objects.items() if key.startswith(below)]
        self._end("list", prefix)
        return iter(found)

    def remove_leftovers(self, prefix: str = "", /) -> tuple[StoredObject, ...]:
        self._run("list", prefix)
        self._end("list", prefix)
        return ()  # a put that ends leaves an object or nothing

    def _begin(self, call: StoreCall, key: str) -> None:
        if self.on_op is not None:
            self.on_op(call, key, "before")
        with self._lock:
            self.calls.append((call, key))
            self.hanging += 1
        self._resumed.wait()
        with self._lock:
            self.hanging -= 1

    def _run(self, call: StoreCall, key: str) -> None:
        self._begin(call, key)
        fault = self._take_fault(call)
        if fault is not None:
            raise self._error(fault)

    def _end(self, call: StoreCall, key: str) -> None:
        if self.on_op is not None:
            self.on_op(call, key, "after")

    def _take_fault(self, call: StoreCall) -> _Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.call in (None, call) and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None

    def _error(self, fault: _Fault) -> StoreUnavailable:
        if fault.is_denied:
            return StoreDenied(self.address, "the credentials are refused")
        return StoreUnavailable(self.address, "the connection was reset")
