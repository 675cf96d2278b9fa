"""[shell] A caller's handle on what becomes of its messages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock
from typing import NamedTuple

from tidelog.channels.messages import Message, MessageLog
from tidelog.errors import Error, InDoubt


class Ack(NamedTuple):
    """What was promised about a publish, and nothing more than that."""

    channel: str
    seq: int  # of the last message of the call
    messages: int  # of the call
    ts_ms: int  # the same for every receiver
    qos: int  # 0: accepted; 1: appended, synced as the channel says, and handed to every receiver's queue
    durable: bool  # whether a power cut now would leave it
    receivers: int | None  # subscriptions it was handed to; None: not known yet


class Pending:
    """Messages that were accepted. `wait` where waiting is fine, `add_callback` on an event loop."""

    __slots__ = (
        "_bell",
        "_callbacks",
        "_lock",
        "_outcome",
        "_pump",
        "_waiting",
        "log",
        "messages",
        "qos",
        "sender_source",
        "sync",
    )

    def __init__(
        self,
        messages: list[Message],
        *,
        qos: int,
        sync: bool,
        source: object,
        pump: Callable[[], object],
        log: MessageLog | None = None,
    ) -> None:
        self.messages, self.qos, self.sync, self.sender_source = messages, qos, sync, source
        self.log = log  # where they were appended; None: the channel keeps no messages
        self._pump = pump
        self._outcome: Ack | Error | None = None
        self._lock = Lock()
        self._bell: Event | None = None
        self._waiting = 0  # threads in `wait`
        self._callbacks: list[Callable[[Pending], object]] = []

    @property
    def seq(self) -> int:
        return self.messages[-1].seq

    @property
    def size(self) -> int:
        """Bytes of all payloads."""
        return sum(len(message.payload) for message in self.messages)

    @property
    def done(self) -> bool:
        return self._outcome is not None

    def ack(self, *, durable: bool, receivers: int | None) -> Ack:
        last = self.messages[-1]
        return Ack(last.channel, last.seq, len(self.messages), last.ts_ms, self.qos, durable, receivers)

    def set(self, outcome: Ack | Error) -> None:
        """Tell the outcome; the first one counts. A message of qos 0 has its ack before it is delivered."""
        with self._lock:
            if self._outcome is not None:
                return
            self._outcome = outcome
            bell, callbacks, self._callbacks = self._bell, self._callbacks, []
        if bell is not None:
            bell.set()
        for callback in callbacks:
            # Whoever is called may be gone by now, with its event loop; that must not stop the committer.
            with suppress(Exception):
                callback(self)

    def add_callback(self, callback: Callable[[Pending], object]) -> None:
        """Have `callback(pending)` called once the outcome is known: now if it is, else by whoever commits. It must be
        short and must not wait."""
        with self._lock:
            if self._outcome is None:
                self._callbacks.append(callback)
                return
        callback(self)

    def deliver(self) -> None:
        """Commit by itself what nobody is committing yet."""
        self._pump()

    def take_over(self) -> bool:
        """Have a thread that waits for this commit what is queued; False where none waits."""
        with self._lock:
            if self._outcome is not None or not self._waiting or self._bell is None:
                return False
            self._bell.set()
            return True

    def result(self) -> Ack:
        """The ack, or the error raised; only once it is `done`."""
        assert self._outcome is not None, "asked once it is done"
        if isinstance(self._outcome, Error):
            raise self._outcome.with_traceback(None)
        return self._outcome

    def wait(self, timeout: float | None = None) -> Ack:
        """The ack, or the error raised. Commits by itself what nobody is committing yet, and when the thread that does
        has done its one commit and passes that on."""
        while not self.done:
            self._pump()
            with self._lock:
                if self._outcome is not None:
                    break
                bell = self._bell = self._bell or Event()
                self._waiting += 1
            try:
                bell.wait(timeout)
            except BaseException:
                if self._woken(bell):
                    self._pump()  # it was passed on to this thread, which ends
                raise
            if not self._woken(bell) and not self.done:
                raise InDoubt(
                    f"{self.messages[0].channel}: no outcome within {timeout} s; the message may still be delivered, "
                    "look into the history before it is sent again"
                )
        return self.result()

    def _woken(self, bell: Event) -> bool:
        """This thread waits no more: whether it is to commit what is queued, or has its outcome."""
        with self._lock:
            self._waiting -= 1
            woken = bell.is_set()
            if self._outcome is None:
                bell.clear()
            return woken
