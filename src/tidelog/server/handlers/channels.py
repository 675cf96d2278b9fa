"""[shell] Who asks something of a channel.

    keys    hook      the user is
    no      no        whoever it says it is (X-Tidelog-User, or ?user= on streams), else anonymous@localhost
    yes     no        the one that the key names (user@domain=secret), else key-<digest>@localhost; a key with the scope
                      admin may speak for anybody
    –       yes       whom the hook makes of that name and of X-Tidelog-User-Token (?user_token=)

A key with the scope admin may be the operator (?operator=true): it may look at everything, change what an owner may,
and say nothing.

Channels themselves: make and configure, look at, list, end; members and access lists.

Everything here may wait for a disk or for a lock that somebody else's save holds, so all of it runs off the loop.

Messages of channels: publish, look back, and the queue of a fifo channel.

[shell] A channel as Server-Sent Events: what its members say, and who comes and goes.

A client that comes back with `Last-Event-ID` gets what it missed from the history, where the channel keeps one. What is
not kept any more is told as a gap.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import msgspec

from tidelog import api_types
from tidelog.channels import (
    OPERATOR,
    Ack,
    ChannelAcl,
    ChannelConfig,
    ChannelManager,
    ChannelMeta,
    Message,
    Operator,
    membership,
    messaging,
    rules,
)
from tidelog.channels import rules as lists
from tidelog.channels.manager import authenticate
from tidelog.channels.rules import check_user
from tidelog.errors import BadInput, BatchTooLarge, ChannelNotFound, Forbidden, NotFound
from tidelog.http.interface import AnyResponse, Response, Sink, Stream
from tidelog.server.auth import ADMIN, Principal
from tidelog.server.errors import ApiError
from tidelog.server.handlers.sse import EVENT_STREAM, STREAM_HEADERS, check_accepts_events
from tidelog.server.handlers.topics import parse_paging
from tidelog.server.push.channel_stream import ChannelService, ChannelStream, WakeEvent
from tidelog.server.push.peers import ChannelSsePeer, SlowConsumerGuard, encode_message_fields
from tidelog.server.push.topic_stream import Heartbeat, StreamSlot
from tidelog.server.request import RequestContext, json_response
from tidelog.server.service import Service

_ADMIN_SCOPE: Final = frozenset((ADMIN,))


class ClaimedIdentity(NamedTuple):
    """Who somebody says it is, before anybody has looked at that."""

    principal: Principal
    user: str | None
    token: str | None


def claimed_identity(context: RequestContext) -> ClaimedIdentity:
    user = _header_or_query(context, b"x-tidelog-user", "user")
    return ClaimedIdentity(context.principal, user, _header_or_query(context, b"x-tidelog-user-token", "user_token"))


def _header_or_query(context: RequestContext, header: bytes, parameter: str) -> str | None:
    """A header, which may be percent-encoded as parameters are; streams may come without."""
    value = context.request.header(header)
    if value is None:
        return context.query.text(parameter)
    try:
        return unquote(value.decode(), errors="strict")
    except UnicodeDecodeError:
        raise ApiError("invalid_request", f"{header.decode()} is not UTF-8; nothing was done") from None


def default_user(channels: ChannelService, principal: Principal) -> str:
    """Who a key is, where nobody says anything."""
    if principal.user is not None:
        return principal.user
    return f"key-{principal.name}@{channels.domain}" if principal.name else f"anonymous@{channels.domain}"


async def resolve_user(channels: ChannelService, identity: ClaimedIdentity) -> str:
    """The user, or a refusal."""
    name, hook = default_user(channels, identity.principal), channels.hook
    if hook is not None:
        asked, metrics = check_user(identity.user or name), channels.manager.metrics
        return await channels.run_blocking(lambda: authenticate(hook, metrics, asked, identity.token))
    if identity.user is None or identity.user == name:
        return name
    if not identity.principal.has_scopes(_ADMIN_SCOPE):
        raise ApiError(
            "forbidden",
            f"this key is {name} and speaks for nobody else; nothing was done, use the other's key or one with the "
            "scope admin",
        )
    return check_user(identity.user)


async def authenticate_caller(context: RequestContext) -> str | Operator:
    """The user, or the operator where that is asked for."""
    if not context.query.flag("operator", False):
        return await authenticate_user(context)
    if not context.principal.has_scopes(_ADMIN_SCOPE):
        raise ApiError("forbidden", "to be the operator takes a key with the scope admin; nothing was done")
    return OPERATOR


async def authenticate_user(context: RequestContext) -> str:
    return await resolve_user(context.service.channels, claimed_identity(context))


_settings_decoder = api_types.json_decoder(dict[str, Any])
_join_decoder = api_types.json_decoder(api_types.ChannelJoin)
_leave_decoder = api_types.json_decoder(api_types.ChannelLeave)
_acl_decoder = api_types.json_decoder(api_types.ChannelAclChange)


def query_number(context: RequestContext, name: str) -> int | None:
    """A whole number of the query; None where it is not there. Nothing is guessed about what is none."""
    text = context.query.text(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        raise ApiError("invalid_request", f"{name} is {text[:80]!r}, it must be a whole number; nothing was done")
    return int(text)


def config_json(config: ChannelConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


def acl_json(acl: ChannelAcl) -> dict[str, list[str]]:
    return {kind: list(getattr(acl, kind)) for kind in lists.ACL_KINDS}


def channel_json(meta: ChannelMeta) -> dict[str, Any]:
    return {
        "channel": meta.handler,
        "type": meta.config.type,
        "owner": meta.owner,
        "members": len(meta.members),
        "persist": meta.config.persist,
    }


def member_meta(manager: ChannelManager, channel: str, user: str | Operator) -> ChannelMeta:
    """What a channel is, for its members and the operator."""
    meta = manager.meta(channel)
    if not isinstance(user, Operator):
        rules.check_member(meta, user)
    return meta


# ── channels ──────────────────────────────────────────────────────────────────────────────────────


async def list_channels(context: RequestContext) -> Response:
    """The channels that the user is in; all of them for the operator. With whom the server takes it for, and limits."""
    rooms, user = context.service.channels, await authenticate_caller(context)
    manager, owns = rooms.manager, context.principal.may_use_name
    behind, size = parse_paging(context.query)
    prefix = context.query.text("prefix") or ""

    def look() -> tuple[list[dict[str, Any]], bool]:
        names = manager.channel_names() if isinstance(user, Operator) else manager.memberships.channels_of(user)
        wanted = [name for name in names if name > behind and name.startswith(prefix) and owns(name)]
        rows = []
        for name in wanted[:size]:
            try:
                rows.append(channel_json(manager.meta(name)))
            except NotFound:
                continue  # it ended meanwhile
        return rows, len(wanted) > size and bool(rows)

    rows, more = await rooms.run_blocking(look)
    said: dict[str, Any] = {"channels": rows, "user": None if isinstance(user, Operator) else user}
    if more:
        said["next_cursor"] = api_types.encode_page_cursor(rows[-1]["channel"])
    if isinstance(user, Operator):
        said["unreadable"] = dict(manager.report.skipped)
    return json_response({**said, "limits": manager.limits.to_dict(), "performance": context.performance()})


async def put_channel(context: RequestContext) -> Response:
    """Make a channel, or change its settings. Those that are not named stay."""
    body = context.decode_body(_settings_decoder, default={})
    user = await authenticate_caller(context)
    manager, channel = context.service.channels.manager, context.path_names[0]

    def work() -> tuple[bool, ChannelMeta]:
        try:
            return False, membership.configure(manager, channel, user, body)
        except ChannelNotFound:
            if isinstance(user, Operator):
                raise
        return True, membership.join(manager, channel, user, config=body)

    created, meta = await context.service.channels.run_blocking(work)
    created = created and meta.members == (user,)  # another may have been first
    said = {**channel_json(meta), "created": created, "config": config_json(meta.config)}
    return json_response({**said, "performance": context.performance()}, status=201 if created else 200)


async def get_channel(context: RequestContext) -> Response:
    user = await authenticate_caller(context)
    manager, channel = context.service.channels.manager, context.path_names[0]

    def look() -> dict[str, Any]:
        meta = member_meta(manager, channel, user)
        found = {**channel_json(meta), "config": config_json(meta.config), "first_seq": None, "last_seq": None}
        if meta.config.type == "fifo":
            if isinstance(user, Operator) or user == meta.owner:
                found["waiting"] = messaging.length(manager, channel, user)
        elif meta.config.persist:
            with suppress(Forbidden):  # what it holds is for those who may read
                found["first_seq"], found["last_seq"] = messaging.bounds(manager, channel, user)
        with suppress(Forbidden):
            found["holes"] = messaging.holes(manager, channel, user)
        return found

    return json_response({**await context.service.channels.run_blocking(look), "performance": context.performance()})


async def delete_channel(context: RequestContext) -> Response:
    user = await authenticate_caller(context)
    manager, channel = context.service.channels.manager, context.path_names[0]
    deleted = await context.service.channels.run_blocking(lambda: membership.delete(manager, channel, user))
    return json_response({"channel": channel, "deleted": deleted, "performance": context.performance()})


# ── members ───────────────────────────────────────────────────────────────────────────────────────


async def join_channel(context: RequestContext) -> Response:
    """Become a member, which makes a channel that is not there; with `user`, as its owner make somebody else one."""
    body = context.decode_body(_join_decoder, default=api_types.ChannelJoin())
    by = await authenticate_caller(context)
    manager, channel = context.service.channels.manager, context.path_names[0]
    meta = await context.service.channels.run_blocking(join_action(manager, channel, by, body, source=None))
    return json_response(
        {
            **joined_json(meta, by if isinstance(by, str) and body.user is None else body.user),
            **_performance_field(context),
        }
    )


def join_action(
    manager: ChannelManager, channel: str, by: str | Operator, body: api_types.ChannelJoin, *, source: object
) -> Callable[[], ChannelMeta]:
    """`source`: a connection, which is not told of what it does itself."""
    if body.user is not None:
        invited = body.user
        return lambda: _invite(manager, channel, invited, by, source)
    if isinstance(by, Operator):
        raise ApiError("invalid_request", "the operator joins nothing; nothing was done, name a user")
    return lambda: membership.join(manager, channel, by, config=body.config, source=source)


def _invite(manager: ChannelManager, channel: str, user: str, by: str | Operator, source: object) -> ChannelMeta:
    manager.meta(channel)  # whoever invites makes nothing
    return membership.join(manager, channel, user, by=by, source=source)


def joined_json(meta: ChannelMeta, user: str | None) -> dict[str, Any]:
    alone = meta.members == (user,)
    return {"channel": meta.handler, "user": user, "owner": meta.owner, "members": len(meta.members), "created": alone}


async def leave_channel(context: RequestContext) -> Response:
    """End one's membership; with `user`, as the owner that of somebody else."""
    body = context.decode_body(_leave_decoder, default=api_types.ChannelLeave())
    by = await authenticate_caller(context)
    manager, channel = context.service.channels.manager, context.path_names[0]
    return json_response(
        {
            **await context.service.channels.run_blocking(leave_action(manager, channel, by, body, source=None)),
            **_performance_field(context),
        }
    )


def leave_action(
    manager: ChannelManager, channel: str, by: str | Operator, body: api_types.ChannelLeave, *, source: object
) -> Callable[[], dict[str, Any]]:
    user = by if body.user is None else body.user
    if isinstance(user, Operator):
        raise ApiError("invalid_request", "the operator is in no channel; nothing was done, name a user")

    def work() -> dict[str, Any]:
        membership.leave(manager, channel, user, by=None if body.user is None else by, source=source)
        try:
            owner = manager.meta(channel).owner
        except ChannelNotFound:
            return {"channel": channel, "user": user, "ended": True, "owner": None}
        return {"channel": channel, "user": user, "ended": False, "owner": owner}

    return work


async def list_members(context: RequestContext) -> Response:
    user = await authenticate_caller(context)
    manager, channel = context.service.channels.manager, context.path_names[0]
    page, size = query_number(context, "page"), query_number(context, "page_size")
    look = members_action(
        manager, channel, user, 1 if page is None else page, api_types.MEMBERS_PAGE_SIZE if size is None else size
    )
    return json_response({**await context.service.channels.run_blocking(look), **_performance_field(context)})


def members_action(
    manager: ChannelManager, channel: str, user: str | Operator, page: int, size: int
) -> Callable[[], dict[str, Any]]:
    def look() -> dict[str, Any]:
        listed = member_meta(manager, channel, user).members
        found = rules.page_of(listed, page, size)
        return {"channel": channel, "members": found, "page": page, "total": len(listed)}

    return look


# ── access lists ──────────────────────────────────────────────────────────────────────────────────


async def get_channel_acl(context: RequestContext) -> Response:
    user = await authenticate_caller(context)
    manager, channel = context.service.channels.manager, context.path_names[0]
    acl = await context.service.channels.run_blocking(lambda: read_acl(manager, channel, user))
    return json_response({"channel": channel, "acl": acl, **_performance_field(context)})


def read_acl(manager: ChannelManager, channel: str, user: str | Operator) -> dict[str, list[str]]:
    meta = manager.meta(channel)
    if not isinstance(user, Operator):
        rules.check_owner(meta, user, "see its lists")
    return acl_json(meta.acl)


async def set_channel_acl(context: RequestContext) -> Response:
    body = context.decode_body(_acl_decoder)
    user = await authenticate_caller(context)
    manager, channel = context.service.channels.manager, context.path_names[0]
    listed = await context.service.channels.run_blocking(
        lambda: membership.set_acl(manager, channel, user, body.kind, add=body.add, remove=body.remove)
    )
    return json_response({"channel": channel, "kind": body.kind, "listed": listed, **_performance_field(context)})


def _performance_field(context: RequestContext) -> dict[str, Any]:
    return {"performance": context.performance()}


OCTET_STREAM: Final = b"application/octet-stream"
STREAM_HEADER: Final = b"x-tidelog-stream"
_publish_decoder = api_types.json_decoder(api_types.ChannelPublish)
_message_decoder = api_types.json_decoder(api_types.ChannelMessage)
_encode = msgspec.json.Encoder().encode


def message_payload(message: api_types.ChannelMessage) -> bytes:
    """The bytes of a message."""
    if (message.payload is None) == (message.payload_base64 is None):
        raise BadInput("a message has either a payload (text) or a payload_base64; nothing was written")
    if message.payload is not None:
        return message.payload.encode()
    try:
        return b64decode(message.payload_base64 or "", validate=True)
    except ValueError:
        raise BadInput("payload_base64 is not base64; nothing was written") from None


def publish_payloads(body: api_types.ChannelPublish) -> list[bytes]:
    if body.messages is None:
        return [message_payload(body)]
    if body.payload is not None or body.payload_base64 is not None:
        raise BadInput("one payload or messages, not both; nothing was written")
    if len(body.messages) > api_types.PUBLISH_MESSAGES_MAX:
        raise BatchTooLarge("messages", count=len(body.messages), limit=api_types.PUBLISH_MESSAGES_MAX)
    return [message_payload(message) for message in body.messages]


def ack_json(ack: Ack) -> dict[str, Any]:
    return {
        "channel": ack.channel,
        "first_seq": ack.seq - ack.messages + 1,
        "last_seq": ack.seq,
        "count": ack.messages,
        "ts": ack.ts_ms,
        "qos": ack.qos,
        "durable": ack.durable,
        "receivers": ack.receivers,
    }


def _is_octet_stream(context: RequestContext) -> bool:
    kind = context.request.header(b"content-type") or b""
    return kind.partition(b";")[0].strip().lower() == OCTET_STREAM


async def publish_to_channel(context: RequestContext) -> Response:
    """Say something: JSON, or bytes as they are."""
    if _is_octet_stream(context):
        qos = query_number(context, "qos")
        payloads, qos = [context.request.body], 1 if qos is None else qos
        header = context.request.header(STREAM_HEADER)
        stream = None if header is None else header.decode("latin-1")
    else:
        body = context.decode_body(_publish_decoder)
        payloads, qos, stream = publish_payloads(body), body.qos, body.stream
    rooms, user = context.service.channels, await authenticate_user(context)
    source = None if stream is None else rooms.streams_by_name.get(stream)
    own = source.source if source is not None and source.user == user else None
    ack = await rooms.publish(context.path_names[0], user, payloads, qos=qos, source=own)
    return json_response({**ack_json(ack), "performance": context.performance()})


# ── history ───────────────────────────────────────────────────────────────────────────────────────

_HISTORY_PARAMETERS: Final = {
    "first": "first",
    "last": "last",
    "newest": "newest",
    "since": "since_ms",
    "until": "until_ms",
    "limit": "limit",
}


async def channel_history(context: RequestContext) -> Response:
    """Messages from a seq on, the newest n, or from a time on; oldest first."""
    asked: dict[str, Any] = {named: query_number(context, name) for name, named in _HISTORY_PARAMETERS.items()}
    asked["skip_damage"] = context.query.flag("skip_damage", False)
    user, rooms, channel = await authenticate_caller(context), context.service.channels, context.path_names[0]
    manager = rooms.manager
    page = await rooms.run_blocking(lambda: messaging.history(manager, channel, user, **asked))
    return Response(200, encode_history(channel, page, _encode(context.performance())))


def encode_history(channel: str, page: messaging.HistoryPage, performance: bytes) -> bytes:
    """Payloads go out as they are stored, without a look at each as an object."""
    return b'{"channel":%b,"messages":[%b],"count":%d,"next_seq":%d,"first_seq":%d,"last_seq":%d,"performance":%b}' % (
        _encode(channel),
        b",".join(b"{" + encode_message_fields(message) for message in page.messages),
        len(page.messages),
        page.next_seq,
        page.first_seq,
        page.last_seq,
        performance,
    )


# ── fifo ──────────────────────────────────────────────────────────────────────────────────────────


async def push_to_channel(context: RequestContext) -> Response:
    payload = (
        context.request.body if _is_octet_stream(context) else message_payload(context.decode_body(_message_decoder))
    )
    user, rooms, channel = await authenticate_user(context), context.service.channels, context.path_names[0]
    manager = rooms.manager
    made = await rooms.run_blocking(lambda: messaging.push(manager, channel, user, payload))
    return json_response({"channel": channel, "seq": made.seq, "ts": made.ts_ms, "performance": context.performance()})


async def pop_from_channel(context: RequestContext) -> Response:
    """At most once: when the answer is lost, so is the message."""
    user, rooms, channel = await authenticate_user(context), context.service.channels, context.path_names[0]
    manager = rooms.manager
    return Response(
        200,
        encode_popped(await rooms.run_blocking(lambda: messaging.pop(manager, channel, user)), context.performance()),
    )


def encode_popped(message: Message, performance: dict[str, Any]) -> bytes:
    return b'{"performance":%b,%b' % (_encode(performance), encode_message_fields(message))


async def clear_channel(context: RequestContext) -> Response:
    user, rooms, channel = await authenticate_caller(context), context.service.channels, context.path_names[0]
    manager = rooms.manager
    cleared = await rooms.run_blocking(lambda: messaging.clear(manager, channel, user))
    return json_response({"channel": channel, "cleared": cleared, "performance": context.performance()})


CHANNEL_HEARTBEAT_MS: Final = 15_000


async def follow_channel(context: RequestContext) -> AnyResponse:
    request, service = context.request, context.service
    check_accepts_events(request.header(b"accept"))
    after = _last_seen_seq(context)
    user, rooms, channel = await authenticate_user(context), service.channels, context.path_names[0]
    if request.method == "HEAD":
        await rooms.run_blocking(lambda: member_meta(rooms.manager, channel, user))
        return Response(200, content_type=EVENT_STREAM, headers=STREAM_HEADERS)
    listener = ChannelEventStream(service, channel, user, after)
    # Given back with the stream, or with a stream that never began.
    slot = StreamSlot(service, context.principal, listener.close)
    try:
        await listener.open()
    except BaseException:
        slot.release()
        raise
    return Stream(200, partial(listener.run, slot), EVENT_STREAM, STREAM_HEADERS)


def _last_seen_seq(context: RequestContext) -> int | None:
    """The last seq that the client has; None where it wants what comes. An id that is none of ours says nothing."""
    text = (context.request.header(b"last-event-id") or b"").strip()
    if text.isdigit() and len(text) <= 19:
        return int(text)
    return query_number(context, "from_seq")


class ChannelEventStream:
    """One stream."""

    def __init__(self, service: Service, channel: str, user: str, after_seq: int | None) -> None:
        self._service, self._channel, self._user, self._after_seq = service, channel, user, after_seq
        self._wake_event = WakeEvent()
        self._stream = ChannelStream(service.channels, channel, user, self._on_change, self)
        self._slow_consumer_guard: SlowConsumerGuard | None = None
        self._stream_name = service.channels.stream_name()
        self._is_connected = False

    async def open(self) -> None:
        rooms = self._service.channels
        self._is_connected = True
        rooms.on_connect(self._user)
        await self._stream.open()
        rooms.streams_by_name[self._stream_name] = self._stream

    def close(self) -> None:
        self._stream.close()
        if self._is_connected:
            self._is_connected = False
            rooms = self._service.channels
            rooms.streams_by_name.pop(self._stream_name, None)
            rooms.on_disconnect(self._user)

    async def run(self, slot: StreamSlot, sink: Sink) -> None:
        service, receiver = self._service, self._stream
        frames = ChannelSsePeer(sink, service.loop.time)
        patience = self._slow_consumer_guard = SlowConsumerGuard(
            service.loop, frames, self._is_ending, service.limit_counters
        )
        pulse = Heartbeat(service, frames, CHANNEL_HEARTBEAT_MS)
        try:
            slot.start()
            frames.send_subscribed(channel=self._channel, user=self._user, stream=self._stream_name)
            if self._after_seq is not None:
                await receiver.catch_up(frames, self._after_seq, patience.wait_writable)
            receiver.start(frames)
            while not self._is_ending():
                await self._wake_event.wait()
                if receiver.is_paused and not self._is_ending():
                    await patience.wait_writable()
                    receiver.resume()
            if not receiver.is_ended:
                frames.send_shutdown()
        finally:
            pulse.stop()
            slot.release()

    def _on_change(self) -> None:
        self._wake_event()
        if self._slow_consumer_guard is not None:
            self._slow_consumer_guard.on_shutdown()  # at the end nobody is waited for

    def _is_ending(self) -> bool:
        return self._stream.is_ended or self._service.stopping.is_set()
