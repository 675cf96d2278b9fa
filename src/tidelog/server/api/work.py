"""[shell] Jobs pushed to a worker, as Server-Sent Events.

    retry: 2000                                       first, once
    id: <seq>␊event: job␊data: {"topic",…}␊␊          as many as it may hold without settling them
    event: error␊data: {"code","error","topic"}␊␊     then the end
    : hb 1700000000000␊␊                              when nothing was said for long

    room? ──► stand in line ──► jobs, leased to this connection ──► frames ──► room? …

A worker holds at most `max` jobs: every ack, nack and lease that ran out makes room for another. When the connection
ends, whatever it still holds is free at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec

from tidelog.engine.queues import Leased, Queue, Want
from tidelog.errors import Error, NotAQueue, TopicNotFound
from tidelog.server.api.call import Call
from tidelog.server.api.problem import of_error
from tidelog.server.api.queues import check_node, lease_ms, queue_of
from tidelog.server.api.watch import EVENT_STREAM, HEADERS, accepts
from tidelog.server.delivery import Pulse, Slot
from tidelog.server.frames import RETRY, SLOW, STOPPING, EventPeer
from tidelog.server.http.seam import Answer, Response, Sink, Stream
from tidelog.server.patience import HIGH_BYTES, Patience
from tidelog.server.service import Service
from tidelog.wire import jobs

HEARTBEAT_MS: Final = 15_000
_PASS_BYTES: Final = 1 << 20  # about so much is claimed at once: a peer that stalls has leased no more
_PASS_FIRST: Final = 32  # jobs, before it is known how large they are
_CONFLICT: Final = 409
_TOO_SLOW: Final = 429
_quote = msgspec.json.Encoder().encode


def work(call: Call) -> Answer:
    request, service, query = call.request, call.service, call.query
    accepts(request.header(b"accept"))
    node = query.text("node") or ""
    check_node(node)
    queue = queue_of(call)
    most = min(max(query.number("max", 1), 1), jobs.CLAIM_MAX)
    length_ms = query.number("lease_ms", -1)
    worker = Worker(service, queue, node, most, None if length_ms < 0 else lease_ms(length_ms))
    if request.method == "HEAD":
        return Response(200, content_type=EVENT_STREAM, headers=HEADERS)
    return Stream(200, partial(worker.run, Slot(service, call.principal)), EVENT_STREAM, HEADERS)


class Frames(EventPeer):
    """What a worker is told, as bytes."""

    def __init__(self, sink: Sink, topic: str, loop_time: Callable[[], float]) -> None:
        super().__init__(sink, loop_time)
        self._topic = _quote(topic)

    def hello(self) -> None:
        self._write(RETRY)

    def jobs(self, leased: Leased) -> int:
        """Each job is a frame, and all of them one write; how many bytes that was."""
        topic = self._topic
        text = b"".join(
            b'id: %d\nevent: job\ndata: {"topic":%b,%b\n\n' % (seq, topic, job[1:])
            for seq, job in zip(leased.seqs, leased.texts(), strict=True)
        )
        self._write(text)
        return len(text)

    def stopping(self) -> None:
        self._error(b'"server_shutting_down"', STOPPING)

    def slow(self) -> None:
        self._error(b"%d" % _TOO_SLOW, SLOW)

    def failed(self, error: Error) -> None:
        """A queue that is gone, or is none any more, is 409 to the contract; anything else has its own code."""
        gone = isinstance(error, TopicNotFound | NotAQueue)
        self._error(b"%d" % _CONFLICT if gone else _quote(of_error(error).code), str(error))

    def _error(self, code: bytes, said: str) -> None:
        self._write(b'event: error\ndata: {"code":%b,"error":%b,"topic":%b}\n\n' % (code, _quote(said), self._topic))


class Worker:
    """One connection that works. Its leases are known by it, so that they end with it."""

    def __init__(self, service: Service, queue: Queue, node: str, most: int, length_ms: int | None) -> None:
        self._service, self._queue = service, queue
        self._node, self._most, self._lease_ms = node, most, length_ms
        self._pass_max = _PASS_FIRST

    def _want(self) -> Want | None:
        """What it has room for now."""
        room = min(self._most - self._queue.held(self), self._pass_max)
        return Want(self._node, room, self._lease_ms, self) if room > 0 else None

    async def run(self, slot: Slot, sink: Sink) -> None:
        service = self._service
        frames = Frames(sink, self._queue.topic.name, service.loop.time)
        patience = Patience(service.loop, frames, service.stopping.is_set, service.refusals)
        pulse = Pulse(service, frames, HEARTBEAT_MS)
        desk = service.desks.of(self._queue)
        desk.enter(patience.look)
        try:
            slot.begin()
            frames.hello()
            while not service.stopping.is_set():
                if frames.waiting > HIGH_BYTES:
                    await patience.room()  # back at once where the server stops
                leased = await desk.stand(self._want)
                if leased is not None:
                    self._sized(frames.jobs(leased), leased.count)
                    service.metrics.queues.claimed(self._queue.topic.name, leased.count)
            frames.stopping()
        except Error as error:
            frames.failed(error)
        finally:
            pulse.stop()
            desk.leave(patience.look)
            self._release()
            slot.give()

    def _sized(self, size: int, count: int) -> None:
        self._pass_max = min(max(_PASS_BYTES * count // size, 1), jobs.CLAIM_MAX)

    def _release(self) -> None:
        """What it holds is free at once; of a queue that is gone, or of an engine that is closed, nothing is held."""
        with suppress(Error):
            self._queue.release(self)
