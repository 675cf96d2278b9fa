"""[shell] A channel as Server-Sent Events: what its members say, and who comes and goes.

A client that comes back with `Last-Event-ID` gets what it missed from the history, where the channel keeps one. What is
not kept any more is told as a gap.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from tidelog.server.api import who
from tidelog.server.api.call import Call
from tidelog.server.api.channels import number, seen
from tidelog.server.api.watch import EVENT_STREAM, HEADERS, accepts
from tidelog.server.channel_frames import ChannelEvents
from tidelog.server.delivery import Pulse, Slot
from tidelog.server.hearing import Receiver, Stir
from tidelog.server.http.seam import Answer, Response, Sink, Stream
from tidelog.server.patience import Patience
from tidelog.server.service import Service

HEARTBEAT_MS: Final = 15_000


async def events(call: Call) -> Answer:
    request, service = call.request, call.service
    accepts(request.header(b"accept"))
    after = _after(call)
    user, rooms, channel = await who.user(call), service.rooms, call.names[0]
    if request.method == "HEAD":
        await rooms.work(lambda: seen(rooms.manager, channel, user))
        return Response(200, content_type=EVENT_STREAM, headers=HEADERS)
    listener = Listener(service, channel, user, after)
    # Given back with the stream, or with a stream that never began.
    slot = Slot(service, call.principal, listener.close)
    try:
        await listener.open()
    except BaseException:
        slot.give()
        raise
    return Stream(200, partial(listener.run, slot), EVENT_STREAM, HEADERS)


def _after(call: Call) -> int | None:
    """The last seq that the client has; None where it wants what comes. An id that is none of ours says nothing."""
    text = (call.request.header(b"last-event-id") or b"").strip()
    if text.isdigit() and len(text) <= 19:
        return int(text)
    return number(call, "from_seq")


class Listener:
    """One stream."""

    def __init__(self, service: Service, channel: str, user: str, after: int | None) -> None:
        self._service, self._channel, self._user, self._after = service, channel, user, after
        self._stir = Stir()
        self._receiver = Receiver(service.rooms, channel, user, self._stirred, self)
        self._patience: Patience | None = None
        self._name = service.rooms.stream_name()
        self._here = False

    async def open(self) -> None:
        rooms = self._service.rooms
        self._here = True
        rooms.arrived(self._user)
        await self._receiver.open()
        rooms.by_stream[self._name] = self._receiver

    def close(self) -> None:
        self._receiver.close()
        if self._here:
            self._here = False
            rooms = self._service.rooms
            rooms.by_stream.pop(self._name, None)
            rooms.departed(self._user)

    async def run(self, slot: Slot, sink: Sink) -> None:
        service, receiver = self._service, self._receiver
        frames = ChannelEvents(sink, service.loop.time)
        patience = self._patience = Patience(service.loop, frames, self._is_ending, service.refusals)
        pulse = Pulse(service, frames, HEARTBEAT_MS)
        try:
            slot.begin()
            frames.hello(channel=self._channel, user=self._user, stream=self._name)
            if self._after is not None:
                await receiver.catch_up(frames, self._after, patience.room)
            receiver.begin(frames)
            while not self._is_ending():
                await self._stir.wait()
                if receiver.held and not self._is_ending():
                    await patience.room()
                    receiver.resume()
            if not receiver.over:
                frames.stopping()
        finally:
            pulse.stop()
            slot.give()

    def _stirred(self) -> None:
        self._stir()
        if self._patience is not None:
            self._patience.look()  # at the end nobody is waited for

    def _is_ending(self) -> bool:
        return self._receiver.over or self._service.stopping.is_set()
