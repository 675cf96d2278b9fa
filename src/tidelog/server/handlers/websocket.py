"""WebSocket connections: follow and write topics, and use channels as one user.

    receive ──► command ──► its reply           in order; only commits run concurrently,
                   └──► submitted ──► ack        and are acknowledged when they are done
    TopicStream ──► records of followed topics  concurrently, and never before `subscribed`
    ChannelStream ──► messages of channels      concurrently

A channel command waits for the publishes before it and runs in a thread; publishes run concurrently, in order. The
first channel command authenticates the user. A connection gets no events of its own changes. A command that fails
gets an error reply, and the connection stays open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec
from msgspec import Raw, Struct

from tidelog import api_types
from tidelog.api_types import JSON_NULL, U32, U64, BadBody, Cursor, Nodes, RecordToWrite
from tidelog.channels import Ack, HistoryPage, Message, membership
from tidelog.engine import Appended, CommitFuture, TopicConfig
from tidelog.engine.append import check_idempotency_key
from tidelog.engine.batch_encoder import check_count
from tidelog.engine.config import OWN, check_topic_name
from tidelog.errors import Error
from tidelog.http.interface import AnyResponse, ClientDisconnected, Socket, Upgrade
from tidelog.server.auth import ADMIN, READ, WRITE, Principal
from tidelog.server.errors import ApiError, api_error_from
from tidelog.server.handlers import channels, write
from tidelog.server.handlers.channels import (
    ChannelCall,
    ChannelOperation,
    ClaimedIdentity,
    claimed_identity,
    resolve_user,
)
from tidelog.server.handlers.sse import resolve_topics
from tidelog.server.handlers.write import check_is_queue, move_schedule_to_meta
from tidelog.server.openapi import operation
from tidelog.server.push.channel_stream import ChannelStream
from tidelog.server.push.peers import (
    HIGH_WATER_BYTES,
    ChannelWebSocketPeer,
    SlowConsumer,
    TopicWebSocketPeer,
    encode_message_fields,
)
from tidelog.server.push.topic_stream import StreamSlot, TopicStream
from tidelog.server.request import RequestContext, nearest_name
from tidelog.server.response_types import TimedBody, Watermarks
from tidelog.server.service import Service

# ── commands and replies: one JSON object per message, distinguished by `op` ──────────────────────


class CommandBase(Struct, tag_field="op", kw_only=True, dict=True):
    """A message of a client. Its reply has its request_id, and warnings of what has no effect in it."""

    request_id: Raw = JSON_NULL

    @property
    def warnings(self) -> list[str]:
        found: list[str] = self.__dict__.setdefault("warnings_of_command", [])
        return found


class ChannelCommandBase(CommandBase, kw_only=True):
    """A command about one channel."""

    channel: str


class ChannelJoinCommand(ChannelCommandBase, tag="channel_join", kw_only=True):
    user: str | None = None
    config: dict[str, Any] = {}


class ChannelLeaveCommand(ChannelCommandBase, tag="channel_leave", kw_only=True):
    user: str | None = None


class ChannelSubscribeCommand(ChannelCommandBase, tag="channel_subscribe", kw_only=True):
    from_seq: int | None = None


class ChannelUnsubscribeCommand(ChannelCommandBase, tag="channel_unsubscribe", kw_only=True):
    pass


class ChannelPublishCommand(ChannelCommandBase, tag="channel_publish", kw_only=True):
    payload: str | None = None
    payload_base64: str | None = None
    messages: list[api_types.ChannelMessage] | None = None
    qos: int = 1


class ChannelHistoryCommand(ChannelCommandBase, tag="channel_history", kw_only=True):
    first: int | None = None
    last: int | None = None
    newest: int | None = None
    since: int | None = None
    until: int | None = None
    limit: int | None = None


class ChannelMembersCommand(ChannelCommandBase, tag="channel_members", kw_only=True):
    page: int = 1
    page_size: int = api_types.MEMBERS_PAGE_SIZE


class ChannelConfigureCommand(ChannelCommandBase, tag="channel_configure", kw_only=True):
    config: dict[str, Any] = {}


class ChannelSetAclCommand(ChannelCommandBase, tag="channel_acl", kw_only=True):
    kind: str
    add: list[str] = []
    remove: list[str] = []


class ChannelDeleteCommand(ChannelCommandBase, tag="channel_delete", kw_only=True):
    pass


class ChannelPushCommand(ChannelCommandBase, tag="channel_push", kw_only=True):
    payload: str | None = None
    payload_base64: str | None = None


class ChannelPopCommand(ChannelCommandBase, tag="channel_pop", kw_only=True):
    pass


class ChannelClearCommand(ChannelCommandBase, tag="channel_clear", kw_only=True):
    pass


ChannelCommand: TypeAlias = (
    ChannelJoinCommand
    | ChannelLeaveCommand
    | ChannelSubscribeCommand
    | ChannelUnsubscribeCommand
    | ChannelPublishCommand
    | ChannelHistoryCommand
    | ChannelMembersCommand
    | ChannelConfigureCommand
    | ChannelSetAclCommand
    | ChannelDeleteCommand
    | ChannelPushCommand
    | ChannelPopCommand
    | ChannelClearCommand
)


class ChannelConfigured(TimedBody):
    """The reply to `ChannelConfigureCommand`, which creates no channel as the HTTP request does."""

    channel: str
    config: dict[str, Any]


class SubscribeCommand(CommandBase, tag="subscribe", kw_only=True):
    topic: str | None = None
    topics: dict[str, Cursor] = {}
    from_seq: U64 = 0
    tail: bool = False
    node: Nodes = None
    limit: U32 = 1_000
    max_batch_bytes: U64 = 1 << 20
    include_data: bool = True
    include_tags: bool = False
    include_meta: bool = True
    lenient: bool = False
    consistency: Literal["eventual", "strong"] = "eventual"

    def __post_init__(self) -> None:
        api_types.check_u64(self.from_seq, self.max_batch_bytes)


class UnsubscribeCommand(CommandBase, tag="unsubscribe", kw_only=True):
    topic: str | None = None
    topics: list[str] = []


class PublishCommand(CommandBase, tag="publish", kw_only=True):
    topic: str
    records: list[RecordToWrite]
    node: str | None = None
    idempotency_key: str | None = None
    create: bool | None = None
    config: Raw = JSON_NULL
    disable_backpressure: bool = False
    return_seqs: bool = True


class PingCommand(CommandBase, tag="ping", kw_only=True):
    pass


class SubscribedReply(Struct, tag_field="op", tag="subscribed"):
    request_id: Raw
    topics: dict[str, Watermarks]


class UnsubscribedReply(Struct, tag_field="op", tag="unsubscribed"):
    request_id: Raw
    topics: list[str]


class PublishAck(Struct, tag_field="op", tag="ack"):
    request_id: Raw
    topic: str
    first_seq: int
    last_seq: int
    seqs: list[int] | None
    head_seq: int
    count: int
    created: bool
    deduped: bool
    durability: str
    performance: dict[str, float]


class PongReply(Struct, tag_field="op", tag="pong"):
    request_id: Raw


class ErrorReply(Struct, tag_field="op", tag="error"):
    request_id: Raw
    code: str
    message: str


class _RequestIdOnly(Struct):
    request_id: Raw = JSON_NULL


Command: TypeAlias = SubscribeCommand | UnsubscribeCommand | PublishCommand | PingCommand | ChannelCommand
_command_decoder: api_types.BodyDecoder[Command] = api_types.BodyDecoder(Command)  # type: ignore[arg-type]  # a union
_request_id_decoder = api_types.json_decoder(_RequestIdOnly)
encode_reply = msgspec.json.Encoder().encode


def decode_command(text: bytes, *, strict: bool) -> Command:
    """Decode a message; a field that it does not have is refused, or noted in its warnings. Raises BadBody."""
    try:
        return api_types.decode_body(_command_decoder, text)
    except api_types.UnknownField as unknown:
        problem = f"{unknown}, the nearest is {nearest_name(unknown.name, _command_decoder.field_names)}"
        if strict:
            raise UnknownCommandField(problem) from None
        command = api_types.decode_body(_command_decoder.lenient, text)
        command.warnings.append(f"{problem}: it was ignored")
        return command


class UnknownCommandField(BadBody):
    """A command of a strict server with a field that it does not have."""


def extract_request_id(text: bytes) -> Raw:
    """The request_id of a message that is no command, or null."""
    try:
        return api_types.decode_body(_request_id_decoder, text).request_id
    except BadBody:
        return JSON_NULL


# ── connections ───────────────────────────────────────────────────────────────────────────────────

_READ, _WRITE, _ADMIN = (frozenset((scope,)) for scope in (READ, WRITE, ADMIN))


def _configure(call: ChannelCall, changes: dict[str, Any]) -> ChannelConfigured:
    meta = membership.configure(call.manager, call.channel, call.user, changes, source=call.source)
    return ChannelConfigured(call.channel, channels.config_json(meta.config))


def _tag(command: ChannelCommandBase | type[ChannelCommandBase]) -> str:
    return str(command.__struct_config__.tag)


class _BlockingCommand(NamedTuple):
    """A channel command that runs in a thread."""

    operation: ChannelOperation
    reply: str  # the `op` of its reply
    arguments: Callable[[Any], tuple[Any, ...]] = lambda _: ()  # of the operation, from the command


_BLOCKING_COMMAND_TYPES: Final[dict[type[ChannelCommandBase], _BlockingCommand]] = {
    ChannelJoinCommand: _BlockingCommand(
        channels.JOIN, "channel_joined", lambda command: (api_types.JoinChannel(command.user, command.config),)
    ),
    ChannelLeaveCommand: _BlockingCommand(
        channels.LEAVE, "channel_left", lambda command: (api_types.LeaveChannel(command.user),)
    ),
    ChannelHistoryCommand: _BlockingCommand(
        channels.HISTORY,
        "channel_history",
        lambda command: ({option: getattr(command, name) for name, option in channels.HISTORY_PARAMETERS.items()},),
    ),
    ChannelMembersCommand: _BlockingCommand(
        channels.MEMBERS, "channel_members", lambda command: (command.page, command.page_size)
    ),
    ChannelConfigureCommand: _BlockingCommand(
        ChannelOperation(channels.CONFIGURE_SCOPES, _configure), "channel_configured", lambda command: (command.config,)
    ),
    ChannelSetAclCommand: _BlockingCommand(
        channels.SET_ACL,
        "channel_acl",
        lambda command: (api_types.ChangeAcl(command.kind, command.add, command.remove),),
    ),
    ChannelDeleteCommand: _BlockingCommand(channels.DELETE_CHANNEL, "channel_deleted"),
    ChannelPushCommand: _BlockingCommand(
        channels.PUSH,
        "channel_pushed",
        lambda command: (channels.message_payload(api_types.ChannelMessage(command.payload, command.payload_base64)),),
    ),
    ChannelPopCommand: _BlockingCommand(channels.POP, "channel_popped"),
    ChannelClearCommand: _BlockingCommand(channels.CLEAR, "channel_cleared"),
}
# The decoder makes commands of subclasses, which have the same tags.
_BLOCKING_COMMANDS: Final = {_tag(command): row for command, row in _BLOCKING_COMMAND_TYPES.items()}
_COMMAND_SCOPES: Final[dict[str, frozenset[str]]] = {
    **{tag: row.operation.scopes for tag, row in _BLOCKING_COMMANDS.items()},
    _tag(ChannelPublishCommand): channels.PUBLISH_SCOPES,
    _tag(ChannelSubscribeCommand): channels.SUBSCRIBE_SCOPES,
    _tag(ChannelUnsubscribeCommand): channels.SUBSCRIBE_SCOPES,
}
_encode = msgspec.json.Encoder().encode


class SessionHost(Protocol):
    """The connection of a channel session."""

    def fail(self, command: ChannelCommand, error: BaseException) -> None:
        """Send an error reply to a command."""

    def add_pending_bytes(self, size: int) -> None:
        """Count bytes of commands without an ack; negative when they got it."""

    async def wait_writable(self) -> None: ...
    def close_slow_consumer(self) -> None: ...


class ChannelSession:
    """The channels of one connection."""

    def __init__(self, service: Service, identity: ClaimedIdentity, socket: Socket, host: SessionHost) -> None:
        self._service, self._identity, self._socket, self._host = service, identity, socket, host
        self._peer = ChannelWebSocketPeer(socket)
        self._user: str | None = None
        self._streams: dict[str, ChannelStream] = {}
        self._publishes_in_flight: set[asyncio.Future[Ack]] = set()
        self._drain_task: asyncio.Task[None] | None = None
        self._closed = False

    def close(self) -> None:
        self._closed = True
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        if self._drain_task is not None:
            self._drain_task.cancel()
        if self._user is not None:
            self._service.channels.on_disconnect(self._user)

    # ── commands ──────────────────────────────────────────────────────────────────────────────

    async def execute(self, command: ChannelCommand, size: int) -> None:
        _check_allowed(self._identity.principal, _COMMAND_SCOPES[_tag(command)], "channel", command.channel)
        user = self._user
        if user is None:
            user = await resolve_user(self._service.channels, self._identity)
            if self._closed:
                return
            self._user = user
            self._service.channels.on_connect(user)
        if isinstance(command, ChannelPublishCommand):
            self._publish(command, user, size)
            return
        if self._publishes_in_flight:  # commands take effect in the order of the client
            await asyncio.wait(self._publishes_in_flight)
        match command:
            case ChannelSubscribeCommand():
                await self._subscribe(command, user)
            case ChannelUnsubscribeCommand():
                self._unsubscribe(command)
            case _:
                await self._execute_blocking(command, user)

    async def _execute_blocking(self, command: ChannelCommand, user: str) -> None:
        """Run a command in a thread: it may wait for a disk or a lock."""
        row = _BLOCKING_COMMANDS[_tag(command)]
        call = ChannelCall(self._service.channels.manager, command.channel, user, self)

        def run() -> bytes:
            result = row.operation.run(call, *row.arguments(command))
            return _encode_result(command, row.reply, result)

        self._socket.send(await self._service.channels.run_blocking(run))

    # ── subscriptions ─────────────────────────────────────────────────────────────────────────

    async def _subscribe(self, command: ChannelSubscribeCommand, user: str) -> None:
        """Start a stream. It replaces and continues an earlier one of the channel, unless from_seq is given."""
        channel = command.channel
        if command.from_seq is not None and command.from_seq < 0:
            raise ApiError("invalid_request", "from_seq must be a seq, or 0 for the first one; nothing was done")
        stream = ChannelStream(self._service.channels, channel, user, self._on_stream_change, self)
        await stream.open()
        previous, after = self._streams.pop(channel, None), command.from_seq
        if previous is not None:
            previous.close()
            after = previous.sent_seq or None if after is None else after
        if self._closed:
            stream.close()
            return
        self._streams[channel] = stream
        self._socket.send(_encode_reply(command, "channel_subscribed", channel=channel, user=user))
        if after is not None:
            await stream.catch_up(self._peer, after, self._host.wait_writable)
        stream.start(self._peer)

    def _unsubscribe(self, command: ChannelUnsubscribeCommand) -> None:
        stream = self._streams.pop(command.channel, None)
        if stream is not None:
            stream.close()
        self._socket.send(
            _encode_reply(command, "channel_unsubscribed", channel=command.channel, was=stream is not None)
        )

    def _on_stream_change(self) -> None:
        """A stream was paused or ended."""
        for channel, stream in list(self._streams.items()):
            if stream.is_ended:
                del self._streams[channel]
                stream.close()
        if self._drain_task is None and not self._closed and any(stream.is_paused for stream in self._streams.values()):
            self._drain_task = self._service.spawn(self._resume_when_writable())

    async def _resume_when_writable(self) -> None:
        """Wait for a slow client, then resume its streams."""
        try:
            await self._host.wait_writable()
        except SlowConsumer:
            self._host.close_slow_consumer()
            return
        except ClientDisconnected:
            return
        finally:
            self._drain_task = None
        if not self._closed:
            for stream in list(self._streams.values()):
                if stream.is_paused:
                    stream.resume()

    # ── publishing ────────────────────────────────────────────────────────────────────────────

    def _publish(self, command: ChannelPublishCommand, user: str, size: int) -> None:
        body = api_types.PublishToChannel(command.payload, command.payload_base64, command.messages, command.qos)
        payloads = channels.publish_payloads(body)
        future = self._service.channels.publish(command.channel, user, payloads, qos=command.qos, source=self)
        if future.done() and not self._publishes_in_flight:  # the ack of an earlier one may not be sent yet
            self._send_ack(command, future)
            return
        self._publishes_in_flight.add(future)
        self._host.add_pending_bytes(size)
        future.add_done_callback(partial(self._on_publish_done, command, size))

    def _on_publish_done(self, command: ChannelPublishCommand, size: int, future: asyncio.Future[Ack]) -> None:
        self._publishes_in_flight.discard(future)
        self._host.add_pending_bytes(-size)
        self._send_ack(command, future)

    def _send_ack(self, command: ChannelPublishCommand, future: asyncio.Future[Ack]) -> None:
        error = future.exception()
        if error is None:
            self._socket.send(_encode_body_reply(command, "channel_ack", channels.channel_ack(future.result())))
        else:
            self._host.fail(command, error)


def _add_warnings(reply: bytes, command: CommandBase) -> bytes:
    return reply[:-1] + b',"warnings":%b}' % _encode(command.warnings) if command.warnings else reply


def _encode_reply(command: CommandBase, op: str, /, **fields: Any) -> bytes:
    return _add_warnings(_encode({"op": op, "request_id": command.request_id, **fields}), command)


def _encode_result(command: ChannelCommandBase, op: str, result: TimedBody | HistoryPage | Message) -> bytes:
    if isinstance(result, TimedBody):
        return _encode_body_reply(command, op, result)
    fields = (
        encode_message_fields(result)
        if isinstance(result, Message)
        else channels.encode_history(command.channel, result) + b"}"
    )
    return _add_warnings(b'{"op":%b,"request_id":%b,%b' % (_encode(op), _encode(command.request_id), fields), command)


def _check_allowed(principal: Principal, scopes: frozenset[str], kind: str = "topic", *names: str) -> None:
    """Raise ApiError where a key lacks a scope, or is not for one of these topics or channels."""
    if not principal.has_scopes(scopes):
        raise ApiError("forbidden", f"this key lacks a scope of {', '.join(sorted(scopes))}; nothing was done")
    for name in names:
        if not principal.may_use_name(name):
            raise ApiError("forbidden", f"this key is not for the {kind} {name!r}; nothing was done")


def _encode_body_reply(command: CommandBase, op: str, body: TimedBody) -> bytes:
    reply = b'{"op":%b,"request_id":%b,%b' % (_encode(op), _encode(command.request_id), _encode(body)[1:])
    return _add_warnings(reply, command)


T = TypeVar("T")
PENDING_BYTES_MAX: Final = 8 << 20  # of writes without an ack; above it no more commands are read
_NO_MESSAGE_LIMIT: Final = 1 << 62
_LOGGED_ID_BYTES_MAX: Final = 128  # of a command's request_id
_CLOSE_GOING_AWAY: Final = 1001
_CLOSE_POLICY_VIOLATION: Final = 1008
_log = logging.getLogger("tidelog.server")


@operation("socket", errors=("invalid_request", "upgrade_required"), statuses=(101,))
def open_websocket(context: RequestContext) -> AnyResponse:
    """Follow topics and append to them over a WebSocket.

    Commands are subscribe, unsubscribe, publish, ping and those of channels (channel_join, channel_publish and so
    on), one JSON object per message. Each needs its own scope.
    """
    service = context.service
    if not context.request.upgrade:
        raise ApiError(
            "invalid_request", "this path is a WebSocket over HTTP/1.1; nothing was done, send an upgrade request"
        )
    _ = service.engine  # raises before the server is ready
    slot = StreamSlot(service, context.principal)
    run = partial(_run_session, service, claimed_identity(context), context.request_id.decode(), slot)
    return Upgrade(run, service.config.max_body_bytes or _NO_MESSAGE_LIMIT)


async def _run_session(
    service: Service, identity: ClaimedIdentity, name: str, slot: StreamSlot, socket: Socket
) -> None:
    with slot.open():
        try:
            await WebSocketSession(service, identity, name, socket).run()
        except asyncio.CancelledError:
            if not slot.is_revoked:
                raise
            socket.close(_CLOSE_POLICY_VIOLATION, "the key was removed")


class WebSocketSession:
    def __init__(self, service: Service, identity: ClaimedIdentity, connection_id: str, socket: Socket) -> None:
        """`connection_id`: the id of the upgrade request."""
        self._service, self._principal, self._connection_id, self._socket = (
            service,
            identity.principal,
            connection_id,
            socket,
        )
        self._channels = ChannelSession(service, identity, socket, self)
        self._peer = TopicWebSocketPeer(socket)
        self._topic_stream = TopicStream(service, self._peer, {}, persistent=True)
        self._pending_bytes = 0  # of commands without an ack
        self._pending_changed = asyncio.Event()

    async def run(self) -> None:
        service, stream = self._service, self._topic_stream
        receiving = service.loop.create_task(self._receive_loop())
        receiving.add_done_callback(self._on_receive_done)
        stopping = service.loop.create_task(service.stopping.wait())
        stopping.add_done_callback(lambda _: stream.wake())
        try:
            await stream.run()
            if receiving.done():
                receiving.result()  # raises where the client disconnected or is too slow
            else:
                self._socket.close(_CLOSE_GOING_AWAY, "shutting down")
        except SlowConsumer:
            self._socket.close(_CLOSE_POLICY_VIOLATION, "too slow")
        finally:
            receiving.cancel()
            stopping.cancel()
            stream.close()
            self._channels.close()

    def _on_receive_done(self, receiving: asyncio.Task[None]) -> None:
        if not receiving.cancelled():
            receiving.exception()  # retrieved here: `run` may have ended already
        self._topic_stream.end()

    async def _receive_loop(self) -> None:
        socket = self._socket
        while (message := await socket.receive()) is not None:
            if isinstance(message, str):
                await self._execute_message(message.encode())
            else:
                self._peer.send_error_message(
                    "unsupported_message", "messages are text; nothing was done, send JSON as text"
                )
            if socket.pending_bytes > HIGH_WATER_BYTES:
                await self._topic_stream.wait_writable()
            while self._pending_bytes > PENDING_BYTES_MAX:
                self._pending_changed.clear()
                await self._pending_changed.wait()

    # ── commands ──────────────────────────────────────────────────────────────────────────────

    async def _execute_message(self, text: bytes) -> None:
        try:
            decode = partial(decode_command, text, strict=self._service.config.strict)
            command = await self._run_by_size(len(text), decode)
        except BadBody as error:
            request_id = await self._run_by_size(len(text), partial(extract_request_id, text))
            code = "invalid_request" if isinstance(error, UnknownCommandField) else "invalid_json"
            self._socket.send(encode_reply(ErrorReply(request_id, code, f"{error}; nothing was done")))
            return
        try:
            await self._execute(command, text)
        except Exception as error:  # a bug of the server is the error of one command
            self.fail(command, error)

    async def _run_by_size(self, size: int, call: Callable[[], T]) -> T:
        """Run a call on a message of this size: on the loop where it is small, else in a thread."""
        return call() if size <= write.BLOCKING_PARSE_BYTES else await self._service.run_blocking(call)

    async def _execute(self, command: Command, text: bytes) -> None:
        if not self._service.auth.keys.contains(self._principal):
            raise ApiError("unauthorized", "this key was removed from the settings; nothing was done, use another one")
        match command:
            case PublishCommand():
                await self._publish(command, text)
            case SubscribeCommand():
                await self._subscribe(command)
            case UnsubscribeCommand():
                self._unsubscribe(command)
            case PingCommand():
                self._send(command, PongReply(command.request_id))
            case _:
                await self._channels.execute(command, len(text))

    async def _subscribe(self, command: SubscribeCommand) -> None:
        wanted = dict(command.topics)
        if command.topic is not None:
            wanted.setdefault(command.topic, Cursor(command.from_seq, command.tail))
        if not wanted:
            raise ApiError("invalid_request", "subscribe needs topic or topics; nothing was done")
        _check_allowed(self._principal, _READ, "topic", *wanted)
        followed = await resolve_topics(self._service, wanted, command, lenient=command.lenient)
        self._send(command, SubscribedReply(command.request_id, followed.watermarks))
        for name, topic in followed.topics.items():
            self._topic_stream.follow(name, topic, followed.options, followed.cursors[name])

    def _unsubscribe(self, command: UnsubscribeCommand) -> None:
        names = [*([] if command.topic is None else [command.topic]), *command.topics]
        if not names:
            raise ApiError("invalid_request", "unsubscribe needs topic or topics; nothing was done")
        for name in names:
            self._topic_stream.unfollow(name)
        self._send(command, UnsubscribedReply(command.request_id, names))

    # ── writes ────────────────────────────────────────────────────────────────────────────────

    async def _publish(self, command: PublishCommand, text: bytes) -> None:
        """Submit a write; its ack follows when it is committed."""
        service, name = self._service, command.topic
        began_us = service.clock.monotonic_us()
        _check_allowed(self._principal, _WRITE, "topic", name)
        engine = service.engine
        if name.startswith(OWN):
            check_topic_name(name)  # raises: the prefix is reserved
        if len(text) > write.BLOCKING_PARSE_BYTES and not await service.admit_large():
            await service.reject_large(wait_if_full=command.disable_backpressure)
        warn = partial(self._warn, command)
        config = await self._run_by_size(len(text), partial(write.parse_write_config, name, command.config, warn))
        if config is not None:
            _check_allowed(self._principal, _ADMIN)
        known = engine.find(name)
        if known is not None and isinstance(config, TopicConfig):
            write.warn_of_other_config(warn, known, config, bytes(command.config))
        check_count(engine.limits, len(command.records))
        check_idempotency_key(command.idempotency_key)
        if move_schedule_to_meta(command.records, service.now_ms()):
            check_is_queue(name, write.topic_type(config) if known is None else known.config.type)
        batch = await self._run_by_size(
            len(text), partial(write.build_batch, engine.limits, command.records, command.node, text)
        )
        # The next command waits for this, so that writes of a client to a topic keep their order.
        _, created, durability, future, throttled_us = await write.submit_write(
            service,
            name,
            batch,
            command.idempotency_key,
            self._principal,
            create=command.create,
            config=config,
            wait_if_full=command.disable_backpressure,
        )
        self._pending_bytes += len(text)
        service.writes.add_done_callback(
            future, partial(self._on_publish_done, command, len(text), began_us, throttled_us, created, durability)
        )

    def _on_publish_done(
        self,
        command: PublishCommand,
        size: int,
        began_us: int,
        throttled_us: int,
        created: bool,
        durability: str,
        future: CommitFuture[Appended],
    ) -> None:
        self._pending_bytes -= size
        self._pending_changed.set()
        try:
            done = future.wait()  # does not block: it is done
        except Error as error:
            self.fail(command, error)
            return
        service = self._service
        service.metrics.count_appended(command.topic, done)
        times = write.write_performance((service.clock.monotonic_us() - began_us) / 1000, done, throttled_us)
        self._send(
            command,
            PublishAck(
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
                times,
            ),
        )

    # ── replies ───────────────────────────────────────────────────────────────────────────────

    def _send(self, command: CommandBase, reply: msgspec.Struct) -> None:
        self._socket.send(_add_warnings(encode_reply(reply), command))

    def _warn(self, command: CommandBase, problem: str, effect: str = "it was ignored", **_: object) -> None:
        """Note a part of a command that has no effect; a strict server refuses it."""
        if self._service.config.strict:
            raise ApiError("invalid_request", f"{problem}; nothing was done")
        command.warnings.append(f"{problem}: {effect}")

    def fail(self, command: Command, error: BaseException) -> None:
        """Send an error reply to a command."""
        if isinstance(error, ApiError):
            problem = error
        elif isinstance(error, Error):
            problem = api_error_from(error)
            if problem.status >= 500:
                _log.error("a WebSocket command failed: %s", error, extra={"fields": self._log_fields(command)})
        else:
            _log.error(
                "a WebSocket command failed unexpectedly", exc_info=error, extra={"fields": self._log_fields(command)}
            )
            problem = ApiError(
                "internal", "the server failed on this command; it is unknown what was done, see the server's log"
            )
        self._send(command, ErrorReply(command.request_id, problem.code, problem.message))

    def _log_fields(self, command: Command) -> dict[str, str]:
        """The command's request_id, or its connection's, and its topic or channel."""
        request_id = (
            ""
            if command.request_id == JSON_NULL
            else bytes(command.request_id)[:_LOGGED_ID_BYTES_MAX].decode(errors="replace")
        )
        names = {field: getattr(command, field, None) for field in ("topic", "channel")}
        return {
            "request_id": request_id.strip('"') or self._connection_id,
            **{field: name for field, name in names.items() if name},
        }

    # ── SessionHost ──────────────────────────────────────────────────────────────────────

    def add_pending_bytes(self, size: int) -> None:
        """Count bytes of commands without an ack; negative when they got it."""
        self._pending_bytes += size
        self._pending_changed.set()

    async def wait_writable(self) -> None:
        await self._topic_stream.wait_writable()

    def close_slow_consumer(self) -> None:
        self._socket.close(_CLOSE_POLICY_VIOLATION, "too slow")
        self._topic_stream.end()
