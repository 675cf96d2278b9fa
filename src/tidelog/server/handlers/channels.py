"""Channels over HTTP: settings, membership, access lists, messages, and the event stream.

The user of a request:

    keys    hook      the user is
    no      no        the name that the client gives (X-Tidelog-User, or ?user= on streams), else anonymous@localhost
    yes     no        the user that the key names (user@domain=secret), else key-<digest>@localhost; a key with the
                      scope admin may act for any user
    –       yes       the user that the hook returns for that name and X-Tidelog-User-Token (?user_token=)

A key with the scope admin may be the operator (?operator=true), who reads everything and changes what an owner may, but
publishes nothing. All operations may wait for a disk or a lock and run in a thread. A `ChannelOperation` is what an
HTTP request and a WebSocket command have in common.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar, overload
from urllib.parse import unquote

from msgspec import UNSET

from tidelog import api_types
from tidelog.channels import (
    OPERATOR,
    Ack,
    Channel,
    ChannelConfig,
    ChannelManager,
    ChannelMeta,
    HistoryPage,
    Message,
    Operator,
    membership,
    rules,
)
from tidelog.channels.manager import authenticate
from tidelog.channels.rules import check_user
from tidelog.errors import BadInput, BatchTooLarge, ChannelNotFound, Forbidden, NotFound
from tidelog.http.interface import AnyResponse, Response, Sink, Stream
from tidelog.server import response_types as responses
from tidelog.server.auth import ADMIN, DELETE, READ, WRITE, Principal
from tidelog.server.errors import ApiError
from tidelog.server.handlers.sse import EVENT_STREAM, STREAM_HEADERS, check_accepts_events
from tidelog.server.handlers.topics import parse_paging
from tidelog.server.openapi import (
    BINARY,
    COUNT,
    PAGING_PARAMS,
    STRING,
    USER_NAME,
    Parameter,
    flag_param,
    operation,
    text_schema,
)
from tidelog.server.push.channel_stream import ChannelService, ChannelStream, WakeEvent
from tidelog.server.push.peers import ChannelSsePeer, SlowConsumerGuard, encode_message_fields
from tidelog.server.push.topic_stream import StreamSlot
from tidelog.server.request import OCTET_STREAM, RequestContext, encode_json
from tidelog.server.service import Service

T = TypeVar("T")
_IDENTITY: Final = (
    Parameter("X-Tidelog-User", USER_NAME, "The user, where the key names none or may act for other users.", "header"),
    Parameter("X-Tidelog-User-Token", STRING, "The token that the hook checks for this user.", "header"),
)
_CALLER: Final = (*_IDENTITY, flag_param("operator", False, "Act as the operator; needs the scope admin."))
_CHANNEL_ERRORS: Final = ("invalid_request", "not_a_member", "channel_not_found", "channel_offline", "hook_failed")
_SEQ: Final = {"type": "integer", "minimum": 1, "maximum": (1 << 63) - 1}
_ADMIN_SCOPE: Final = frozenset((ADMIN,))


class ClaimedIdentity(NamedTuple):
    """The user that a client claims to be, before a check."""

    principal: Principal
    user: str | None
    token: str | None


def claimed_identity(context: RequestContext) -> ClaimedIdentity:
    user = _header_or_query(context, b"x-tidelog-user", "user")
    return ClaimedIdentity(context.principal, user, _header_or_query(context, b"x-tidelog-user-token", "user_token"))


def _header_or_query(context: RequestContext, header: bytes, parameter: str) -> str | None:
    """A header, percent-encoded or not, or a query parameter: browsers cannot set headers of event streams."""
    value = context.request.header(header)
    if value is None:
        return context.query.text(parameter)
    try:
        return unquote(value.decode(), errors="strict")
    except UnicodeDecodeError:
        raise ApiError("invalid_request", f"{header.decode()} is not UTF-8; nothing was done") from None


def default_user(channels: ChannelService, principal: Principal) -> str:
    """The user of a key, where the client names none."""
    if principal.user is not None:
        return principal.user
    return f"key-{principal.name}@{channels.domain}" if principal.name else f"anonymous@{channels.domain}"


async def resolve_user(channels: ChannelService, identity: ClaimedIdentity) -> str:
    """Return the authenticated user. Raises ApiError, or what the hook raises."""
    name, hook = default_user(channels, identity.principal), channels.hook
    if hook is not None:
        claimed, metrics = check_user(identity.user or name), channels.manager.metrics
        return await channels.run_blocking(lambda: authenticate(hook, metrics, claimed, identity.token))
    if identity.user is None or identity.user == name:
        return name
    if not identity.principal.has_scopes(_ADMIN_SCOPE):
        raise ApiError(
            "forbidden",
            f"this key is the user {name} and cannot act for another one; nothing was done, use the other user's key "
            "or one with the scope admin",
        )
    return check_user(identity.user)


async def authenticate_caller(context: RequestContext) -> str | Operator:
    """The user, or the operator where the request asks for it."""
    if not context.query.flag("operator", False):
        return await authenticate_user(context)
    if not context.principal.has_scopes(_ADMIN_SCOPE):
        raise ApiError("forbidden", "the operator needs a key with the scope admin; nothing was done")
    return OPERATOR


async def authenticate_user(context: RequestContext) -> str:
    return await resolve_user(context.service.channels, claimed_identity(context))


_settings_decoder = api_types.json_decoder(dict[str, Any])
_join_decoder = api_types.body_decoder(api_types.JoinChannel)
_leave_decoder = api_types.body_decoder(api_types.LeaveChannel)
_acl_decoder = api_types.body_decoder(api_types.ChangeAcl)


@overload
def query_number(context: RequestContext, name: str) -> int | None: ...
@overload
def query_number(context: RequestContext, name: str, default: int) -> int: ...
def query_number(context: RequestContext, name: str, default: int | None = None) -> int | None:
    """A number of the query. Raises ApiError where it is no number, instead of taking the default."""
    text = context.query.text(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        raise ApiError("invalid_request", f"{name} is {text[:80]!r}, it must be an integer; nothing was done")
    return int(text)


def config_json(config: ChannelConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


def _row_fields(meta: ChannelMeta) -> dict[str, Any]:
    return {
        "channel": meta.handler,
        "type": meta.config.type,
        "owner": meta.owner,
        "members": len(meta.members),
        "persist": meta.config.persist,
    }


class ChannelCall(NamedTuple):
    """A channel and the user who calls an operation on it. `source`: a connection that gets no event of the call."""

    manager: ChannelManager
    channel: str
    user: str | Operator
    source: object = None

    @property
    def handle(self) -> Channel:
        return Channel(self.manager, self.channel, self.user, self.source)

    def member_meta(self) -> ChannelMeta:
        """The metadata of the channel, for its members and the operator."""
        meta = self.manager.meta(self.channel)
        if not isinstance(self.user, Operator):
            rules.check_member(meta, self.user)
        return meta


class ChannelOperation(NamedTuple):
    """An operation, the same over HTTP and over a WebSocket. `run` may block and takes the call and its arguments."""

    scopes: frozenset[str]
    run: Callable[..., responses.TimedBody | HistoryPage | Message]


async def _run(context: RequestContext, run: Callable[..., T], user: str | Operator, *args: Any) -> T:
    """Run an operation on the channel of the path in a thread."""
    channels = context.service.channels
    call = ChannelCall(channels.manager, context.path_names[0], user)
    return await channels.run_blocking(lambda: run(call, *args))


async def _respond(
    context: RequestContext, run: Callable[..., responses.TimedBody], user: str | Operator, *args: Any
) -> Response:
    return context.json(await _run(context, run, user, *args))


# ── channels ──────────────────────────────────────────────────────────────────────────────────────


@operation(
    "listChannels",
    response=responses.ChannelList,
    params=(*PAGING_PARAMS, *_CALLER),
    errors=("invalid_request", "hook_failed"),
)
async def list_channels(context: RequestContext) -> Response:
    """List the channels of the user, by name.

    The operator gets all channels. The response has the authenticated user and the limits.
    """
    channels, user = context.service.channels, await authenticate_caller(context)
    manager, owns = channels.manager, context.principal.may_use_name
    after, size = parse_paging(context.query)
    prefix = context.query.text("prefix") or ""
    is_operator = isinstance(user, Operator)

    def work() -> tuple[list[responses.ChannelRow], bool]:
        names = manager.channel_names() if isinstance(user, Operator) else manager.memberships.channels_of(user)
        allowed = [name for name in names if name > after and name.startswith(prefix) and owns(name)]
        rows = []
        for name in allowed[:size]:
            try:
                rows.append(responses.ChannelRow(**_row_fields(manager.meta(name))))
            except NotFound:
                continue  # it ended meanwhile
        return rows, len(allowed) > size and bool(rows)

    rows, has_more = await channels.run_blocking(work)
    return context.json(
        responses.ChannelList(
            channels=rows,
            user=None if isinstance(user, Operator) else user,
            next_cursor=api_types.encode_page_cursor(rows[-1].channel) if has_more else UNSET,
            unreadable=dict(manager.report.skipped) if is_operator else UNSET,
            limits=manager.limits.to_dict(),
        )
    )


@operation(
    "putChannel",
    request="ChannelSettings",
    response=responses.ChannelPut,
    params=(*_CALLER, flag_param("create", True, "false: only change the settings of a channel that exists.")),
    errors=_CHANNEL_ERRORS,
    body_required=False,
    statuses=(200, 201),
)
async def put_channel(context: RequestContext) -> Response:
    """Create a channel, or change its settings.

    The user that creates a channel owns it. Settings that are not named stay; only the owner changes them.
    """
    body = context.decode_body(_settings_decoder, default={})
    user = await authenticate_caller(context)
    manager, channel = context.service.channels.manager, context.path_names[0]
    may_create = context.query.flag("create", True)

    def work() -> tuple[bool, ChannelMeta]:
        try:
            return False, membership.configure(manager, channel, user, body)
        except ChannelNotFound:
            if isinstance(user, Operator) or not may_create:
                raise
        return True, membership.join(manager, channel, user, config=body)

    created, meta = await context.service.channels.run_blocking(work)
    created = created and meta.members == (user,)  # another user may have been first
    response = responses.ChannelPut(**_row_fields(meta), created=created, config=config_json(meta.config))
    return context.json(response, status=201 if created else 200)


@operation(
    "getChannel", response=responses.Channel, params=_CALLER, errors=(*_CHANNEL_ERRORS, "cursor_recovery_required")
)
async def get_channel(context: RequestContext) -> Response:
    """Describe a channel."""
    return await _respond(context, _describe, await authenticate_caller(context))


def _describe(call: ChannelCall) -> responses.Channel:
    meta, handle, user = call.member_meta(), call.handle, call.user
    response = responses.Channel(**_row_fields(meta), config=config_json(meta.config), first_seq=None, last_seq=None)
    if meta.config.type == "fifo":
        if isinstance(user, Operator) or user == meta.owner:
            response.waiting = len(handle)
    elif meta.config.persist:
        with suppress(Forbidden):  # only for users that may read
            response.first_seq, response.last_seq = handle.bounds()
    with suppress(Forbidden):
        response.holes = [list(hole) for hole in handle.holes()]
    return response


@operation("deleteChannel", response=responses.ChannelDeleted, params=_CALLER, errors=_CHANNEL_ERRORS)
async def delete_channel(context: RequestContext) -> Response:
    """Delete a channel with all its messages."""
    return await _respond(context, _delete, await authenticate_caller(context))


def _delete(call: ChannelCall) -> responses.ChannelDeleted:
    return responses.ChannelDeleted(call.channel, call.handle.delete())


# ── members ───────────────────────────────────────────────────────────────────────────────────────


@operation(
    "joinChannel",
    request=api_types.JoinChannel,
    response=responses.ChannelJoined,
    params=_CALLER,
    errors=(*_CHANNEL_ERRORS, "user_in_channel", "channel_full"),
    body_required=False,
)
async def join_channel(context: RequestContext) -> Response:
    """Become a member, or add another user.

    Creates a channel that does not exist. Only the owner can add another `user`.
    """
    body = context.decode_body(_join_decoder, default=api_types.JoinChannel())
    return await _respond(context, _join, await authenticate_caller(context), body)


def _join(call: ChannelCall, body: api_types.JoinChannel) -> responses.ChannelJoined:
    """Add `body.user`, or the user who calls."""
    manager, channel, by, source = call
    if body.user is not None:
        user = body.user
        manager.meta(channel)  # raises ChannelNotFound: an invitation creates no channel
        meta = membership.join(manager, channel, user, by=by, source=source)
    elif isinstance(by, Operator):
        raise ApiError("invalid_request", "the operator cannot join a channel; nothing was done, name a user")
    else:
        user = by
        meta = membership.join(manager, channel, user, config=body.config, source=source)
    owner = meta.owner or ""  # never empty: a channel with a member has an owner
    return responses.ChannelJoined(meta.handler, user, owner, len(meta.members), meta.members == (user,))


@operation(
    "leaveChannel",
    request=api_types.LeaveChannel,
    response=responses.ChannelLeft,
    params=_CALLER,
    errors=_CHANNEL_ERRORS,
    body_required=False,
)
async def leave_channel(context: RequestContext) -> Response:
    """End the own membership, or that of another user.

    Only the owner can remove another `user`. After the owner leaves, the next member by name owns the channel; it
    ends with its last member, and a fifo channel with its owner.
    """
    body = context.decode_body(_leave_decoder, default=api_types.LeaveChannel())
    return await _respond(context, _leave, await authenticate_caller(context), body)


def _leave(call: ChannelCall, body: api_types.LeaveChannel) -> responses.ChannelLeft:
    """Remove `body.user`, or the user who calls."""
    manager, channel, by, source = call
    user = by if body.user is None else body.user
    if isinstance(user, Operator):
        raise ApiError("invalid_request", "the operator is a member of no channel; nothing was done, name a user")
    membership.leave(manager, channel, user, by=None if body.user is None else by, source=source)
    try:
        return responses.ChannelLeft(channel, user, ended=False, owner=manager.meta(channel).owner)
    except ChannelNotFound:
        return responses.ChannelLeft(channel, user, ended=True, owner=None)


@operation(
    "listMembers",
    response=responses.ChannelMembers,
    params=(
        Parameter("page", {**_SEQ, "default": 1}, "Counted from 1."),
        Parameter(
            "page_size",
            {**_SEQ, "default": api_types.MEMBERS_PAGE_SIZE},
            f"At most {api_types.MEMBERS_PAGE_SIZE}.",
        ),
        *_CALLER,
    ),
    errors=_CHANNEL_ERRORS,
)
async def list_members(context: RequestContext) -> Response:
    """List members by name, in pages."""
    user = await authenticate_caller(context)
    page = query_number(context, "page", 1)
    page_size = query_number(context, "page_size", api_types.MEMBERS_PAGE_SIZE)
    return await _respond(context, _members, user, page, page_size)


def _members(call: ChannelCall, page: int, page_size: int) -> responses.ChannelMembers:
    names = call.member_meta().members
    return responses.ChannelMembers(call.channel, list(rules.page_of(names, page, page_size)), page, len(names))


# ── access lists ──────────────────────────────────────────────────────────────────────────────────


@operation("getChannelAcl", response=responses.ChannelAcl, params=_CALLER, errors=_CHANNEL_ERRORS)
async def get_channel_acl(context: RequestContext) -> Response:
    """Read the access lists."""
    return await _respond(context, _read_acl, await authenticate_caller(context))


def _read_acl(call: ChannelCall) -> responses.ChannelAcl:
    meta = call.manager.meta(call.channel)
    if not isinstance(call.user, Operator):
        rules.check_owner(meta, call.user, "see its lists")
    return responses.ChannelAcl(
        call.channel, responses.AclLists(**{kind: list(getattr(meta.acl, kind)) for kind in rules.ACL_KINDS})
    )


@operation(
    "setChannelAcl", request=api_types.ChangeAcl, response=responses.AclChanged, params=_CALLER, errors=_CHANNEL_ERRORS
)
async def set_channel_acl(context: RequestContext) -> Response:
    """Change one access list."""
    body = context.decode_body(_acl_decoder)
    return await _respond(context, _set_acl, await authenticate_caller(context), body)


def _set_acl(call: ChannelCall, body: api_types.ChangeAcl) -> responses.AclChanged:
    listed = membership.set_acl(call.manager, call.channel, call.user, body.kind, add=body.add, remove=body.remove)
    return responses.AclChanged(call.channel, body.kind, list(listed))


# ── messages ──────────────────────────────────────────────────────────────────────────────────────

STREAM_HEADER: Final = b"x-tidelog-stream"
_publish_decoder = api_types.body_decoder(api_types.PublishToChannel)
_message_decoder = api_types.body_decoder(api_types.ChannelMessage)


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


def publish_payloads(body: api_types.PublishToChannel) -> list[bytes]:
    if body.messages is None:
        return [message_payload(body)]
    if body.payload is not None or body.payload_base64 is not None:
        raise BadInput("one payload or messages, not both; nothing was written")
    if len(body.messages) > api_types.PUBLISH_MESSAGES_MAX:
        raise BatchTooLarge("messages", count=len(body.messages), limit=api_types.PUBLISH_MESSAGES_MAX)
    return [message_payload(message) for message in body.messages]


def channel_ack(ack: Ack) -> responses.ChannelAck:
    first_seq = ack.seq - ack.messages + 1
    return responses.ChannelAck(
        ack.channel, first_seq, ack.seq, ack.messages, ack.ts_ms, ack.qos, ack.durable, ack.receivers
    )


def _is_octet_stream(context: RequestContext) -> bool:
    kind = context.request.header(b"content-type") or b""
    return kind.partition(b";")[0].strip().lower() == OCTET_STREAM


@operation(
    "publishToChannel",
    request=api_types.PublishToChannel,
    response=responses.ChannelAck,
    params=(
        Parameter("qos", {"enum": [0, 1], "default": 1}, "Of a binary body."),
        Parameter("X-Tidelog-Stream", STRING, "A binary body: the event stream that does not get it.", "header"),
        *_IDENTITY,
    ),
    errors=(*_CHANNEL_ERRORS, "record_too_large", "batch_too_large", "wrong_type", "rejected"),
    request_content={OCTET_STREAM.decode(): BINARY},
)
async def publish_to_channel(context: RequestContext) -> Response:
    """Publish messages to all members."""
    if _is_octet_stream(context):
        payloads, qos = [context.request.body], query_number(context, "qos", 1)
        header = context.request.header(STREAM_HEADER)
        stream = None if header is None else header.decode("latin-1")
    else:
        body = context.decode_body(_publish_decoder)
        payloads, qos, stream = publish_payloads(body), body.qos, body.stream
    channels, user = context.service.channels, await authenticate_user(context)
    own_stream = None if stream is None else channels.streams_by_name.get(stream)
    source = own_stream.source if own_stream is not None and own_stream.user == user else None
    ack = await channels.publish(context.path_names[0], user, payloads, qos=qos, source=source)
    return context.json(channel_ack(ack))


# ── history ───────────────────────────────────────────────────────────────────────────────────────

HISTORY_PARAMETERS: Final = {
    "first": "first",
    "last": "last",
    "newest": "newest",
    "since": "since_ms",
    "until": "until_ms",
    "limit": "limit",
}


@operation(
    "channelHistory",
    response=responses.ChannelHistory,
    params=(
        Parameter("first", _SEQ, "Start with this seq."),
        Parameter("newest", _SEQ, "Only this many of the newest messages."),
        Parameter("since", COUNT, "Start at this time, in milliseconds since the epoch."),
        Parameter("last", _SEQ, "End with this seq."),
        Parameter("until", COUNT, "End at this time."),
        Parameter("limit", _SEQ, "The most messages to return; never more than limits.history_max."),
        flag_param("skip_damage", False, "Skip messages that cannot be read."),
        *_CALLER,
    ),
    errors=(*_CHANNEL_ERRORS, "wrong_type", "persistence_not_enabled"),
)
async def channel_history(context: RequestContext) -> Response:
    """Read stored messages."""
    bounds: dict[str, Any] = {option: query_number(context, name) for name, option in HISTORY_PARAMETERS.items()}
    bounds["skip_damage"] = context.query.flag("skip_damage", False)
    page = await _run(context, _history, await authenticate_caller(context), bounds)
    fields = encode_history(context.path_names[0], page)
    return Response(200, b'{%b,"performance":%b}' % (fields, encode_json(context.performance())))


def _history(call: ChannelCall, bounds: dict[str, Any]) -> HistoryPage:
    return call.handle.history(**bounds)


def encode_history(channel: str, page: HistoryPage) -> bytes:
    """Encode the fields of a history without braces. Payloads are copied as they are stored."""
    return b'"channel":%b,"messages":[%b],"count":%d,"next_seq":%d,"first_seq":%d,"last_seq":%d' % (
        encode_json(channel),
        b",".join(b"{" + encode_message_fields(message) for message in page.messages),
        len(page.messages),
        page.next_seq,
        page.first_seq,
        page.last_seq,
    )


# ── fifo ──────────────────────────────────────────────────────────────────────────────────────────


@operation(
    "pushToChannel",
    request=api_types.ChannelMessage,
    response=responses.ChannelPushed,
    params=_IDENTITY,
    errors=(*_CHANNEL_ERRORS, "record_too_large", "wrong_type", "queue_full", "cursor_recovery_required"),
    request_content={OCTET_STREAM.decode(): BINARY},
)
async def push_to_channel(context: RequestContext) -> Response:
    """Append one message to a fifo channel."""
    payload = (
        context.request.body if _is_octet_stream(context) else message_payload(context.decode_body(_message_decoder))
    )
    return await _respond(context, _push, await authenticate_user(context), payload)


def _push(call: ChannelCall, payload: bytes) -> responses.ChannelPushed:
    message = call.handle.push(payload)
    return responses.ChannelPushed(call.channel, message.seq, message.ts_ms, message.sender)


@operation(
    "popFromChannel",
    response=responses.ChannelPopped,
    params=_IDENTITY,
    errors=(*_CHANNEL_ERRORS, "wrong_type", "queue_empty", "cursor_recovery_required"),
)
async def pop_from_channel(context: RequestContext) -> Response:
    """Take the oldest message of a fifo channel.

    At most once: a message whose response is lost is removed.
    """
    message = await _run(context, _pop, await authenticate_user(context))
    return Response(200, b'{"performance":%b,%b' % (encode_json(context.performance()), encode_message_fields(message)))


def _pop(call: ChannelCall) -> Message:
    return call.handle.pop()


@operation("clearChannel", response=responses.ChannelCleared, params=_CALLER, errors=(*_CHANNEL_ERRORS, "wrong_type"))
async def clear_channel(context: RequestContext) -> Response:
    """Remove all messages of a fifo channel."""
    return await _respond(context, _clear, await authenticate_caller(context))


def _clear(call: ChannelCall) -> responses.ChannelCleared:
    return responses.ChannelCleared(call.channel, call.handle.clear())


_READ, _WRITE, _DELETE = (frozenset((scope,)) for scope in (READ, WRITE, DELETE))
CONFIGURE_SCOPES: Final = _WRITE
PUBLISH_SCOPES: Final = _WRITE
SUBSCRIBE_SCOPES: Final = _READ
JOIN: Final = ChannelOperation(_WRITE, _join)
LEAVE: Final = ChannelOperation(_WRITE, _leave)
MEMBERS: Final = ChannelOperation(_READ, _members)
SET_ACL: Final = ChannelOperation(_WRITE, _set_acl)
DELETE_CHANNEL: Final = ChannelOperation(_DELETE, _delete)
HISTORY: Final = ChannelOperation(_READ, _history)
PUSH: Final = ChannelOperation(_WRITE, _push)
POP: Final = ChannelOperation(_READ | _WRITE, _pop)
CLEAR: Final = ChannelOperation(_DELETE, _clear)


# ── event stream ──────────────────────────────────────────────────────────────────────────────────

_HEARTBEAT_MS: Final = 15_000


@operation(
    "followChannel",
    params=(
        Parameter("Last-Event-ID", STRING, "The last seq that the client has.", "header"),
        Parameter("from_seq", COUNT, "The same, for the first request. Default: new messages only."),
        *_IDENTITY,
    ),
    errors=(*_CHANNEL_ERRORS, "not_acceptable"),
    response_content={EVENT_STREAM.decode(): text_schema("subscribed, message, presence, gap, end, error.")},
)
async def follow_channel(context: RequestContext) -> AnyResponse:
    """Stream messages and changes of membership."""
    request, service = context.request, context.service
    check_accepts_events(request.header(b"accept"))
    after = _last_seen_seq(context)
    user, channels, channel = await authenticate_user(context), service.channels, context.path_names[0]
    if request.method == "HEAD":
        await channels.run_blocking(ChannelCall(channels.manager, channel, user).member_meta)
        return Response(200, content_type=EVENT_STREAM, headers=STREAM_HEADERS)
    stream = ChannelEventStream(service, channel, user, after)
    # Released when the stream ends, also when it never starts.
    slot = StreamSlot(service, context.principal, stream.close)
    try:
        await stream.open()
    except BaseException:
        slot.release()
        raise
    return Stream(200, partial(stream.run, slot), EVENT_STREAM, STREAM_HEADERS)


def _last_seen_seq(context: RequestContext) -> int | None:
    """The last seq that the client has; None: new messages only. An invalid Last-Event-ID is ignored."""
    text = (context.request.header(b"last-event-id") or b"").strip()
    if text.isdigit() and len(text) <= 19:
        return int(text)
    return query_number(context, "from_seq")


class ChannelEventStream:
    """One channel as Server-Sent Events. A client that reconnects with `Last-Event-ID` gets later messages from
    the history, where the channel stores one; messages that are not stored any more are sent as a gap."""

    def __init__(self, service: Service, channel: str, user: str, after_seq: int | None) -> None:
        self._service, self._channel, self._user, self._after_seq = service, channel, user, after_seq
        self._wake_event = WakeEvent()
        self._stream = ChannelStream(service.channels, channel, user, self._on_change, self)
        self._slow_consumer_guard: SlowConsumerGuard | None = None
        self._stream_name = service.channels.stream_name()
        self._is_connected = False

    async def open(self) -> None:
        channels = self._service.channels
        self._is_connected = True
        channels.on_connect(self._user)
        await self._stream.open()
        channels.streams_by_name[self._stream_name] = self._stream

    def close(self) -> None:
        self._stream.close()
        if self._is_connected:
            self._is_connected = False
            channels = self._service.channels
            channels.streams_by_name.pop(self._stream_name, None)
            channels.on_disconnect(self._user)

    async def run(self, slot: StreamSlot, sink: Sink) -> None:
        service, stream = self._service, self._stream
        peer = ChannelSsePeer(sink, service.loop.time)
        guard = self._slow_consumer_guard = SlowConsumerGuard(
            service.loop, peer, self._is_ending, service.limit_counters
        )
        with slot.open(peer, _HEARTBEAT_MS):
            peer.send_subscribed(channel=self._channel, user=self._user, stream=self._stream_name)
            if self._after_seq is not None:
                await stream.catch_up(peer, self._after_seq, guard.wait_writable)
            stream.start(peer)
            while not self._is_ending():
                await self._wake_event.wait()
                if stream.is_paused and not self._is_ending():
                    await guard.wait_writable()
                    stream.resume()
            if not stream.is_ended:
                peer.send_shutdown()

    def _on_change(self) -> None:
        self._wake_event()
        if self._slow_consumer_guard is not None:
            self._slow_consumer_guard.on_shutdown()  # a stream that ends does not wait for a slow client

    def _is_ending(self) -> bool:
        return self._stream.is_ended or self._service.stopping.is_set()
