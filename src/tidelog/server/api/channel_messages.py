"""Messages of channels: publish, look back, and the queue of a fifo channel."""

from __future__ import annotations

from base64 import b64decode
from typing import Any, Final

import msgspec

from tidelog.channels import Ack, Message, talk
from tidelog.errors import BadInput, BatchTooLarge
from tidelog.server.api import who
from tidelog.server.api.call import Call, ok
from tidelog.server.api.channels import number
from tidelog.server.channel_frames import message_body
from tidelog.server.http.seam import Response
from tidelog.wire import channels, requests

OCTETS: Final = b"application/octet-stream"
STREAM: Final = b"x-tidelog-stream"
_publish = requests.decoder(channels.Publish)
_message = requests.decoder(channels.Message)
_encode = msgspec.json.Encoder().encode


def payload_of(message: channels.Message) -> bytes:
    """The bytes of a message."""
    if (message.payload is None) == (message.payload_base64 is None):
        raise BadInput("a message has either a payload (text) or a payload_base64; nothing was written")
    if message.payload is not None:
        return message.payload.encode()
    try:
        return b64decode(message.payload_base64 or "", validate=True)
    except ValueError:
        raise BadInput("payload_base64 is not base64; nothing was written") from None


def payloads_of(body: channels.Publish) -> list[bytes]:
    if body.messages is None:
        return [payload_of(body)]
    if body.payload is not None or body.payload_base64 is not None:
        raise BadInput("one payload or messages, not both; nothing was written")
    if len(body.messages) > channels.MESSAGES_MAX:
        raise BatchTooLarge("messages", count=len(body.messages), limit=channels.MESSAGES_MAX)
    return [payload_of(message) for message in body.messages]


def ack_fields(ack: Ack) -> dict[str, Any]:
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


def _is_raw(call: Call) -> bool:
    kind = call.request.header(b"content-type") or b""
    return kind.partition(b";")[0].strip().lower() == OCTETS


async def publish(call: Call) -> Response:
    """Say something: JSON, or bytes as they are."""
    if _is_raw(call):
        qos = number(call, "qos")
        payloads, qos = [call.request.body], 1 if qos is None else qos
        header = call.request.header(STREAM)
        stream = None if header is None else header.decode("latin-1")
    else:
        body = call.body(_publish)
        payloads, qos, stream = payloads_of(body), body.qos, body.stream
    rooms, user = call.service.rooms, await who.user(call)
    source = None if stream is None else rooms.by_stream.get(stream)
    own = source.source if source is not None and source.user == user else None
    ack = await rooms.publish(call.names[0], user, payloads, qos=qos, source=own)
    return ok({**ack_fields(ack), "performance": call.performance()})


# ── history ───────────────────────────────────────────────────────────────────────────────────────

_BOUNDS: Final = {
    "first": "first",
    "last": "last",
    "newest": "newest",
    "since": "since_ms",
    "until": "until_ms",
    "limit": "limit",
}


async def history(call: Call) -> Response:
    """Messages from a seq on, the newest n, or from a time on; oldest first."""
    asked: dict[str, Any] = {named: number(call, name) for name, named in _BOUNDS.items()}
    asked["skip_damage"] = call.query.flag("skip_damage", False)
    user, rooms, channel = await who.asker(call), call.service.rooms, call.names[0]
    manager = rooms.manager
    page = await rooms.work(lambda: talk.history(manager, channel, user, **asked))
    return Response(200, history_text(channel, page, _encode(call.performance())))


def history_text(channel: str, page: talk.History, performance: bytes) -> bytes:
    """Payloads go out as they are stored, without a look at each as an object."""
    return b'{"channel":%b,"messages":[%b],"count":%d,"next_seq":%d,"first_seq":%d,"last_seq":%d,"performance":%b}' % (
        _encode(channel),
        b",".join(b"{" + message_body(message) for message in page.messages),
        len(page.messages),
        page.next_seq,
        page.first_seq,
        page.last_seq,
        performance,
    )


# ── fifo ──────────────────────────────────────────────────────────────────────────────────────────


async def push(call: Call) -> Response:
    payload = call.request.body if _is_raw(call) else payload_of(call.body(_message))
    user, rooms, channel = await who.user(call), call.service.rooms, call.names[0]
    manager = rooms.manager
    made = await rooms.work(lambda: talk.push(manager, channel, user, payload))
    return ok({"channel": channel, "seq": made.seq, "ts": made.ts_ms, "performance": call.performance()})


async def pop(call: Call) -> Response:
    """At most once: when the answer is lost, so is the message."""
    user, rooms, channel = await who.user(call), call.service.rooms, call.names[0]
    manager = rooms.manager
    return Response(200, popped(await rooms.work(lambda: talk.pop(manager, channel, user)), call.performance()))


def popped(message: Message, performance: dict[str, Any]) -> bytes:
    return b'{"performance":%b,%b' % (_encode(performance), message_body(message))


async def clear(call: Call) -> Response:
    user, rooms, channel = await who.asker(call), call.service.rooms, call.names[0]
    manager = rooms.manager
    cleared = await rooms.work(lambda: talk.clear(manager, channel, user))
    return ok({"channel": channel, "cleared": cleared, "performance": call.performance()})
