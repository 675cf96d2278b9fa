"""[shell] Channels over a WebSocket: one user a connection, who hears and says, on as many channels as it likes.

    command ──► publishes that are under way end ──► done, off the loop ──► its answer      one behind the other
    publish ──► its lane ──► ack, when it is done                                           many under way, in order
    receivers ──► the socket, beside it

The user is found out with the first command, once. What the connection does itself it is not told of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

import msgspec
from msgspec import Raw

from tidelog.channels import Ack, Message, changes, talk
from tidelog.server.api import channel_commands as ops
from tidelog.server.api import channel_messages as said
from tidelog.server.api import channels as rooms_api
from tidelog.server.api.auth import DELETE, READ, WRITE
from tidelog.server.api.problem import Problem
from tidelog.server.api.who import Claimed, user_of
from tidelog.server.channel_frames import ChannelMessages, message_body
from tidelog.server.hearing import Receiver
from tidelog.server.http.seam import Gone, Socket
from tidelog.server.patience import TooSlow
from tidelog.server.service import Service
from tidelog.wire import channels

_READ, _WRITE, _DELETE = (frozenset((scope,)) for scope in (READ, WRITE, DELETE))
_SCOPES: Final[dict[type[ops.OfChannel], frozenset[str]]] = {
    ops.Join: _WRITE,
    ops.Leave: _WRITE,
    ops.Subscribe: _READ,
    ops.Unsubscribe: _READ,
    ops.Publish: _WRITE,
    ops.History: _READ,
    ops.Members: _READ,
    ops.Configure: _WRITE,
    ops.SetAcl: _WRITE,
    ops.Delete: _DELETE,
    ops.Push: _WRITE,
    ops.Pop: _READ | _WRITE,
    ops.Clear: _DELETE,
}
_encode = msgspec.json.Encoder().encode


class Host(Protocol):
    """The conversation that this is part of."""

    def fail(self, command: ops.ChannelCommand, error: BaseException) -> None:
        """Answer a command with an error."""

    def owes(self, size: int) -> None:
        """So many bytes more, or less, wait for their ack."""

    async def room(self) -> None: ...
    def too_slow(self) -> None: ...


class ChannelTalk:
    """The channels of one connection."""

    def __init__(self, service: Service, who: Claimed, socket: Socket, host: Host) -> None:
        self._service, self._who, self._socket, self._host = service, who, socket, host
        self._peer = ChannelMessages(socket)
        self._user: str | None = None
        self._heard: dict[str, Receiver] = {}
        self._flying: set[asyncio.Future[Ack]] = set()
        self._easing: asyncio.Task[None] | None = None
        self._closed = False

    def close(self) -> None:
        self._closed = True
        for receiver in self._heard.values():
            receiver.close()
        self._heard.clear()
        if self._easing is not None:
            self._easing.cancel()
        if self._user is not None:
            self._service.rooms.departed(self._user)

    # ── commands ──────────────────────────────────────────────────────────────────────────────

    async def obey(self, command: ops.ChannelCommand, size: int) -> None:
        principal = self._who.principal
        scopes = _SCOPES[type(command)]
        if not principal.may(scopes):
            raise Problem("forbidden", f"this key lacks a scope of {', '.join(sorted(scopes))}; nothing was done")
        if not principal.owns(command.channel):
            raise Problem("forbidden", f"this key is not for the channel {command.channel!r}; nothing was done")
        user = self._user
        if user is None:
            user = await user_of(self._service.rooms, self._who)
            if self._closed:
                return
            self._user = user
            self._service.rooms.arrived(user)
        if isinstance(command, ops.Publish):
            self._publish(command, user, size)
            return
        if self._flying:  # what was said before this was said before it
            await asyncio.wait(self._flying)
        match command:
            case ops.Subscribe():
                await self._subscribe(command, user)
            case ops.Unsubscribe():
                self._unsubscribe(command)
            case _:
                await self._work(command, user)

    async def _work(self, command: ops.ChannelCommand, user: str) -> None:
        """Whatever is one call that may wait."""
        work = self._call(command, user)
        self._socket.send(await self._service.rooms.work(work))

    def _call(self, command: ops.ChannelCommand, user: str) -> Callable[[], bytes]:
        manager, channel, asked = self._service.rooms.manager, command.channel, command.request_id
        answer = partial(_answer, asked)
        match command:
            case ops.Join():
                body = channels.Join(command.user, command.config)
                join = partial(self._join, body, user)
                return lambda: answer("channel_joined", **rooms_api.joined(join(channel), body.user or user))
            case ops.Leave():
                leave = rooms_api.leaving(manager, channel, user, channels.Leave(command.user), source=self)
                return lambda: answer("channel_left", **leave())
            case ops.Members():
                members = rooms_api.members_page(manager, channel, user, command.page, command.page_size)
                return lambda: answer("channel_members", **members())
            case ops.Configure():
                return lambda: answer(
                    "channel_configured",
                    channel=channel,
                    config=rooms_api.config_fields(
                        changes.configure(manager, channel, user, command.config, source=self).config
                    ),
                )
            case ops.SetAcl():
                return lambda: answer(
                    "channel_acl",
                    channel=channel,
                    kind=command.kind,
                    listed=changes.set_acl(
                        manager, channel, user, command.kind, add=command.add, remove=command.remove
                    ),
                )
            case ops.Delete():
                return lambda: answer(
                    "channel_deleted", channel=channel, deleted=changes.delete(manager, channel, user, source=self)
                )
            case ops.History():
                return lambda: _history(command, talk.history(manager, channel, user, **_range(command)))
            case ops.Push():
                payload = said.payload_of(channels.Message(command.payload, command.payload_base64))
                return lambda: _pushed(asked, channel, talk.push(manager, channel, user, payload))
            case ops.Pop():
                return lambda: _popped(asked, talk.pop(manager, channel, user))
            case ops.Clear():
                return lambda: answer("channel_cleared", channel=channel, cleared=talk.clear(manager, channel, user))
            case _:
                raise AssertionError("answered before")

    def _join(self, body: channels.Join, user: str, channel: str) -> Any:
        return rooms_api.joining(self._service.rooms.manager, channel, user, body, source=self)()

    # ── hearing ───────────────────────────────────────────────────────────────────────────────

    async def _subscribe(self, command: ops.Subscribe, user: str) -> None:
        """In place of how it was heard before: from where that was, unless the command says another place."""
        channel, rooms = command.channel, self._service.rooms
        if command.from_seq is not None and command.from_seq < 0:
            raise Problem("invalid_request", "from_seq is a seq, or 0 before the first; nothing was done")
        receiver = Receiver(rooms, channel, user, self._stirred, self)
        await receiver.open()
        before, after = self._heard.pop(channel, None), command.from_seq
        if before is not None:
            before.close()
            after = before.sent or None if after is None else after
        if self._closed:
            receiver.close()
            return
        self._heard[channel] = receiver
        self._socket.send(_answer(command.request_id, "channel_subscribed", channel=channel, user=user))
        if after is not None:
            await receiver.catch_up(self._peer, after, self._host.room)
        receiver.begin(self._peer)

    def _unsubscribe(self, command: ops.Unsubscribe) -> None:
        receiver = self._heard.pop(command.channel, None)
        if receiver is not None:
            receiver.close()
        self._socket.send(
            _answer(command.request_id, "channel_unsubscribed", channel=command.channel, was=receiver is not None)
        )

    def _stirred(self) -> None:
        """A receiver is held, or over."""
        for channel, receiver in list(self._heard.items()):
            if receiver.over:
                del self._heard[channel]
                receiver.close()
        if self._easing is None and not self._closed and any(each.held for each in self._heard.values()):
            self._easing = self._service.spawn(self._ease())

    async def _ease(self) -> None:
        """Wait for a peer that is behind, then go on."""
        try:
            await self._host.room()
        except TooSlow:
            self._host.too_slow()
            return
        except Gone:
            return
        finally:
            self._easing = None
        if not self._closed:
            for receiver in list(self._heard.values()):
                if receiver.held:
                    receiver.resume()

    # ── saying ────────────────────────────────────────────────────────────────────────────────

    def _publish(self, command: ops.Publish, user: str, size: int) -> None:
        body = channels.Publish(command.payload, command.payload_base64, command.messages, command.qos)
        payloads = said.payloads_of(body)
        future = self._service.rooms.publish(command.channel, user, payloads, qos=command.qos, source=self)
        if future.done() and not self._flying:  # an earlier one may be done and not told yet
            self._acked(command, future)
            return
        self._flying.add(future)
        self._host.owes(size)
        future.add_done_callback(partial(self._landed, command, size))

    def _landed(self, command: ops.Publish, size: int, future: asyncio.Future[Ack]) -> None:
        self._flying.discard(future)
        self._host.owes(-size)
        self._acked(command, future)

    def _acked(self, command: ops.Publish, future: asyncio.Future[Ack]) -> None:
        error = future.exception()
        if error is None:
            self._socket.send(_answer(command.request_id, "channel_ack", **said.ack_fields(future.result())))
        else:
            self._host.fail(command, error)


def _answer(asked: Raw, op: str, /, **told: Any) -> bytes:
    return _encode({"op": op, "request_id": asked, **told})


def _range(command: ops.History) -> dict[str, Any]:
    return {
        "first": command.first,
        "last": command.last,
        "newest": command.newest,
        "since_ms": command.since,
        "until_ms": command.until,
        "limit": command.limit,
    }


def _history(command: ops.History, page: talk.History) -> bytes:
    return (
        b'{"op":"channel_history","request_id":%b,"channel":%b,"messages":[%b],"count":%d,"next_seq":%d,'
        b'"first_seq":%d,"last_seq":%d}'
        % (
            _encode(command.request_id),
            _encode(command.channel),
            b",".join(b"{" + message_body(message) for message in page.messages),
            len(page.messages),
            page.next_seq,
            page.first_seq,
            page.last_seq,
        )
    )


def _pushed(asked: Raw, channel: str, message: Message) -> bytes:
    return _answer(asked, "channel_pushed", channel=channel, seq=message.seq, ts=message.ts_ms)


def _popped(asked: Raw, message: Message) -> bytes:
    return b'{"op":"channel_popped","request_id":%b,%b' % (_encode(asked), message_body(message))
