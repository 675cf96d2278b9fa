"""[shell] Topics over a WebSocket: follow many, write to many, on one connection. Channels: `channel_socket`.

    receive ──► command ──► its answer          in the order they came; only commits are under way together,
                   └──► staged ──► ack           and are acknowledged as they are done
    delivery ──► records of what is followed    beside it, and never before `subscribed`

A command that fails is answered with an error and the socket stays open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import msgspec

from tidelog.engine import Appended, Show, Token
from tidelog.engine.append import check_key
from tidelog.engine.config import OWN, check_topic_name
from tidelog.engine.encode import check_count
from tidelog.engine.read import nodes_of
from tidelog.errors import Error
from tidelog.server.api import write
from tidelog.server.api.auth import ADMIN, READ, WRITE
from tidelog.server.api.call import Call
from tidelog.server.api.channel_socket import ChannelTalk
from tidelog.server.api.commands import (
    Ack,
    Command,
    Failed,
    Ping,
    Pong,
    Publish,
    Subscribe,
    Subscribed,
    Unsubscribe,
    Unsubscribed,
    decode,
    encode,
    request_id,
)
from tidelog.server.api.diff import budget
from tidelog.server.api.problem import Problem, of_error
from tidelog.server.api.schedule import check_queue, schedule
from tidelog.server.api.topics import found
from tidelog.server.api.watch import start_of, state_of, watermarks
from tidelog.server.api.who import Claimed, claimed
from tidelog.server.delivery import Delivery, Slot
from tidelog.server.frames import Messages
from tidelog.server.http.seam import Answer, Socket, Upgrade
from tidelog.server.pages import View
from tidelog.server.patience import HIGH_BYTES, TooSlow
from tidelog.server.service import Service
from tidelog.wire.requests import NULL, BadBody, Cursor

T = TypeVar("T")
PENDING_BYTES_MAX: Final = 8 << 20  # of writes that wait for the disk; past it no more commands are read
_NO_LIMIT: Final = 1 << 62
_ID_BYTES_MAX: Final = 128  # of what a client calls a command, in the log
_GOING_AWAY: Final = 1001
_POLICY: Final = 1008
_log = logging.getLogger("tidelog.server")
_READ, _WRITE, _ADMIN = (frozenset((scope,)) for scope in (READ, WRITE, ADMIN))


def connect(call: Call) -> Answer:
    service = call.service
    if not call.request.upgrade:
        raise Problem("invalid_request", "this is a WebSocket, over HTTP/1.1; nothing was done, ask for an upgrade")
    _ = service.engine  # raises where there is none yet
    slot = Slot(service, call.principal)
    run = partial(_run, service, claimed(call), call.id.decode(), slot)
    return Upgrade(run, service.config.max_body_bytes or _NO_LIMIT)


async def _run(service: Service, who: Claimed, name: str, slot: Slot, socket: Socket) -> None:
    try:
        slot.begin()
        await Conversation(service, who, name, socket).run()
    except asyncio.CancelledError:
        if not slot.is_revoked:
            raise
        socket.close(_POLICY, "the key was removed")
    finally:
        slot.give()


class Conversation:
    def __init__(self, service: Service, who: Claimed, name: str, socket: Socket) -> None:
        """`name` is the id of the request that it began with."""
        self._service, self._principal, self._name, self._socket = service, who.principal, name, socket
        self._channels = ChannelTalk(service, who, socket, self)
        self._messages = Messages(socket)
        self._delivery = Delivery(service, self._messages, {}, lasting=True)
        self._pending = 0  # bytes
        self._eased = asyncio.Event()

    async def run(self) -> None:
        service, delivery = self._service, self._delivery
        listening = service.loop.create_task(self._listen())
        listening.add_done_callback(self._heard_all)
        stopping = service.loop.create_task(service.stopping.wait())
        stopping.add_done_callback(lambda _: delivery.wake())
        try:
            await delivery.run()
            if listening.done():
                listening.result()  # the peer closed, or is gone, or is too slow for its answers
            else:
                self._socket.close(_GOING_AWAY, "shutting down")
        except TooSlow:
            self._socket.close(_POLICY, "too slow")
        finally:
            listening.cancel()
            stopping.cancel()
            delivery.close()
            self._channels.close()

    def _heard_all(self, listening: asyncio.Task[None]) -> None:
        if not listening.cancelled():
            listening.exception()  # looked at here: `run` may be at its own end already
        self._delivery.end()

    async def _listen(self) -> None:
        socket = self._socket
        while (message := await socket.receive()) is not None:
            if isinstance(message, str):
                await self._obey(message.encode())
            else:
                self._messages.error("unsupported_message", "messages are text; nothing was done, send JSON as text")
            if socket.waiting > HIGH_BYTES:
                await self._delivery.room()
            while self._pending > PENDING_BYTES_MAX:
                self._eased.clear()
                await self._eased.wait()

    # ── commands ──────────────────────────────────────────────────────────────────────────────

    async def _obey(self, text: bytes) -> None:
        try:
            command = await self._look(len(text), partial(decode, text))
        except BadBody as error:
            asked = await self._look(len(text), partial(request_id, text))
            self._say(Failed(asked, "invalid_json", f"{error}; nothing was done"))
            return
        try:
            await self._do(command, text)
        except Exception as error:  # the rim: a mistake of ours is one command's error
            self.fail(command, error)

    async def _look(self, size: int, call: Callable[[], T]) -> T:
        """Look at a message of this size: on the loop where that takes no time, and in a thread else."""
        return call() if size <= write.LARGE_BYTES else await self._service.work(call)

    async def _do(self, command: Command, text: bytes) -> None:
        if not self._service.keys.knows(self._principal):
            raise Problem("unauthorized", "this key was removed from the settings; nothing was done, use another one")
        match command:
            case Publish():
                await self._publish(command, text)
            case Subscribe():
                await self._subscribe(command)
            case Unsubscribe():
                self._unsubscribe(command)
            case Ping():
                self._say(Pong(command.request_id))
            case _:
                await self._channels.obey(command, len(text))

    def _may(self, scopes: frozenset[str], *names: str) -> None:
        if not self._principal.may(scopes):
            raise Problem("forbidden", f"this key lacks a scope of {', '.join(sorted(scopes))}; nothing was done")
        for name in names:
            if not self._principal.owns(name):
                raise Problem("forbidden", f"this key is not for the topic {name!r}; nothing was done")

    async def _subscribe(self, command: Subscribe) -> None:
        wanted = dict(command.topics)
        if command.topic is not None:
            wanted.setdefault(command.topic, Cursor(command.from_seq, command.tail))
        if not wanted:
            raise Problem("invalid_request", "subscribe names a topic or topics; nothing was done")
        self._may(_READ, *wanted)
        service, engine = self._service, self._service.engine
        limit, bytes_max = budget(command.limit, command.max_batch_bytes)
        show = Show(data=command.include_data, tags=command.include_tags, meta=command.include_meta)
        view = View(limit, bytes_max, nodes_of(command.node), show, command.consistency == "strong")
        if command.lenient:
            topics = {name: topic for name in wanted if (topic := engine.find(name)) is not None}
        else:
            topics = {name: found(engine, name) for name in wanted}
        for topic in topics.values() if view.strong else ():
            topic.check_strong()
        marks = {name: await state_of(service, topic) for name, topic in topics.items()}
        cursors = {name: start_of(wanted[name], now) for name, now in marks.items()}
        self._say(Subscribed(command.request_id, {name: watermarks(cursors[name], now) for name, now in marks.items()}))
        for name, topic in topics.items():
            self._delivery.follow(name, topic, view, cursors[name])

    def _unsubscribe(self, command: Unsubscribe) -> None:
        names = [*([] if command.topic is None else [command.topic]), *command.topics]
        if not names:
            raise Problem("invalid_request", "unsubscribe names a topic or topics; nothing was done")
        for name in names:
            self._delivery.unfollow(name)
        self._say(Unsubscribed(command.request_id, names))

    # ── writes ────────────────────────────────────────────────────────────────────────────────

    async def _publish(self, command: Publish, text: bytes) -> None:
        """Stage a write and go on; its ack follows when it is done."""
        service, name = self._service, command.topic
        began_us = service.clock.monotonic_us()
        self._may(_WRITE, name)
        engine = service.engine
        if name.startswith(OWN):
            check_topic_name(name)  # which it cannot be
        if len(text) > write.LARGE_BYTES and not await service.admit_large():
            await service.refuse_behind(insists=command.disable_backpressure)
        config = await self._look(len(text), partial(write.config_in, name, command.config))
        if config is not None:
            self._may(_ADMIN)
        check_count(engine.limits, len(command.records))
        check_key(command.idempotency_key)
        if schedule(command.records, service.now_ms()):
            known = engine.find(name)
            check_queue(name, write.type_of(config) if known is None else known.config.type)
        batch = await self._look(len(text), partial(write.batch_of, engine.limits, command.records, command.node, text))
        topic, created = engine.find(name), False
        if topic is None:
            topic, created = await write.ensure(service, name, command.create, config, batch, self._principal)
        durability = topic.config.durability
        # The next command waits for this, so that what a client writes to a topic stays in its order.
        token, held_us = await service.admission.staged(
            topic,
            batch,
            command.idempotency_key,
            insists=created or command.disable_backpressure,
            work=service.work if topic.is_due else None,
        )
        self._pending += len(text)
        service.commits.when_done(
            token, partial(self._told, command, len(text), began_us, held_us, created, durability)
        )

    def _told(
        self,
        command: Publish,
        size: int,
        began_us: int,
        held_us: int,
        created: bool,
        durability: str,
        token: Token[Appended],
    ) -> None:
        self._pending -= size
        self._eased.set()
        try:
            done = token.wait()  # its outcome is known
        except Error as error:
            self.fail(command, error)
            return
        service = self._service
        service.metrics.wrote(command.topic, 0 if done.deduped else done.count)
        took = write.performance_of((service.clock.monotonic_us() - began_us) / 1000, done, held_us)
        self._say(
            Ack(
                command.request_id,
                command.topic,
                done.first_seq,
                done.last_seq,
                list(done.seqs) if command.return_seqs else None,
                done.head_seq,
                done.count,
                created and not done.deduped,
                done.deduped,
                durability,
                took,
            )
        )

    # ── answers ───────────────────────────────────────────────────────────────────────────────

    def _say(self, answer: msgspec.Struct) -> None:
        self._socket.send(encode(answer))

    def fail(self, command: Command, error: BaseException) -> None:
        """Answer a command with an error."""
        if isinstance(error, Problem):
            problem = error
        elif isinstance(error, Error):
            problem = of_error(error)
            if problem.status >= 500:
                _log.error("a command over a WebSocket: %s", error, extra={"fields": self._fields(command)})
        else:
            _log.error("a command over a WebSocket broke", exc_info=error, extra={"fields": self._fields(command)})
            problem = Problem("internal", "the server broke on this command; see its log")
        self._say(Failed(command.request_id, problem.code, problem.message))

    def _fields(self, command: Command) -> dict[str, str]:
        """For the log: the command's own id, or its connection's, and what it was about."""
        asked = "" if command.request_id == NULL else bytes(command.request_id)[:_ID_BYTES_MAX].decode(errors="replace")
        named = {place: getattr(command, place, None) for place in ("topic", "channel")}
        return {"request_id": asked.strip('"') or self._name, **{place: name for place, name in named.items() if name}}

    # ── for its channels ──────────────────────────────────────────────────────────────────────

    def owes(self, size: int) -> None:
        """So many bytes more, or less, wait for their ack."""
        self._pending += size
        self._eased.set()

    async def room(self) -> None:
        await self._delivery.room()

    def too_slow(self) -> None:
        self._socket.close(_POLICY, "too slow")
        self._delivery.end()
