"""Calls of one channel as one user. No I/O."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any, Final, TypeAlias, Unpack
from urllib.parse import quote, urlencode

from tidelog.api_types import PUBLISH_MESSAGES_MAX
from tidelog.channels import Ack, ChannelConfig, ChannelInfo, HistoryPage, Message, Operator
from tidelog.channels.rules import ChannelSettings, check_channel, check_payloads
from tidelog.client.core import Call, Request
from tidelog.client.wire import encode_json
from tidelog.engine.batch_encoder import check_text
from tidelog.errors import BadInput, BatchTooLarge
from tidelog.times import Time, fields_in_ms, time_ms

_MEMBERS_PAGE_SIZE: Final = 100


class KeyUser:
    """The user of the API key."""

    def __repr__(self) -> str:
        return "KEY_USER"


KEY_USER: Final = KeyUser()
ChannelUser: TypeAlias = str | Operator | KeyUser


class ChannelCalls:
    """The calls of the channel `name` as `user`."""

    def __init__(self, name: str, user: ChannelUser, token: str | None) -> None:
        check_channel(name)
        self.name, self.user = name, user
        self._identity_query: dict[str, str] = {}
        if isinstance(user, Operator):
            self._identity_query["operator"] = "true"
        elif not isinstance(user, KeyUser):
            self._identity_query["user"] = user
        if token is not None:
            self._identity_query["user_token"] = token

    def path(self, verb: str = "", **query: object) -> str:
        for name, value in query.items():
            if isinstance(value, str):
                check_text(name, value)
        parameters = self._identity_query | {name: str(value) for name, value in query.items() if value is not None}
        rest = f"?{urlencode(parameters)}" if parameters else ""
        return f"/v0/channels/{quote(self.name, safe='')}{verb}{rest}"

    def _post(self, verb: str, body: object, *, retry_safe: bool = False) -> Call[dict[str, Any]]:
        return (yield Request("POST", self.path(verb), encode_json(body), retry_safe=retry_safe)).json()

    def _get(self, verb: str = "", **query: object) -> Call[dict[str, Any]]:
        return (yield Request("GET", self.path(verb, **query), retry_safe=True)).json()

    def _require_user(self, action: str) -> None:
        if isinstance(self.user, Operator):
            raise BadInput(f"{self.name}: {action} needs a user; nothing was done, pass one: channel(name, user=…)")

    # ── members ───────────────────────────────────────────────────────────────────────────────

    def join(self, /, **config: Unpack[ChannelSettings]) -> Call[None]:
        self._require_user("join")
        yield from self._post("/join", {"config": fields_in_ms(config)})

    def leave(self) -> Call[str | None]:
        self._require_user("leave")
        owner: str | None = (yield from self._post("/leave", {}))["owner"]
        return owner

    def invite(self, user: str) -> Call[None]:
        yield from self._post("/join", {"user": user})

    def kick(self, user: str) -> Call[str | None]:
        owner: str | None = (yield from self._post("/leave", {"user": user}))["owner"]
        return owner

    def members(self, page: int = 1, page_size: int = _MEMBERS_PAGE_SIZE) -> Call[tuple[str, ...]]:
        return tuple((yield from self._get("/members", page=page, page_size=page_size))["members"])

    # ── settings and access lists ─────────────────────────────────────────────────────────────

    def state(self) -> Call[ChannelInfo]:
        fields = yield from self._get()
        names: tuple[str, ...] = ()
        for page in range(1, 1 << 30):
            found = yield from self.members(page)
            names += found
            if len(found) < _MEMBERS_PAGE_SIZE:
                break
        return ChannelInfo(fields["channel"], fields["owner"], _parse_config(fields), names)

    def configure(self, /, **changes: Unpack[ChannelSettings]) -> Call[ChannelConfig]:
        request = Request("PUT", self.path(create="false"), encode_json(fields_in_ms(changes)), retry_safe=True)
        return _parse_config((yield request).json())

    def acl(self, kind: str) -> Call[tuple[str, ...]]:
        check_text("the kind of an access list", kind)
        lists = (yield from self._get("/acl"))["acl"]
        if kind not in lists:
            raise BadInput(f"{kind!r:.80} is no access list, there are join, publish and read; nothing was done")
        return tuple(lists[kind])

    def allow(self, kind: str, *entries: str) -> Call[tuple[str, ...]]:
        return (yield from self.change_acl(kind, add=entries))

    def disallow(self, kind: str, *entries: str) -> Call[tuple[str, ...]]:
        return (yield from self.change_acl(kind, remove=entries))

    def change_acl(self, kind: str, *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> Call[tuple[str, ...]]:
        body = {"kind": kind, "add": add, "remove": remove}
        return tuple((yield from self._post("/acl", body, retry_safe=True))["listed"])

    def delete(self) -> Call[bool]:
        return bool((yield Request("DELETE", self.path(), retry_safe=True)).json()["deleted"])

    # ── messages ──────────────────────────────────────────────────────────────────────────────

    def publish(self, payload: bytes, *, qos: int = 1) -> Call[Ack]:
        return (yield from self.publish_many([payload], qos=qos))

    def publish_many(self, payloads: Sequence[bytes], *, qos: int = 1) -> Call[Ack]:
        self._require_user("publish")
        if qos not in (0, 1) or isinstance(qos, bool):
            raise BadInput(f"qos must be 0 or 1, not {qos!r}; nothing was written")
        check_payloads(payloads)
        if len(payloads) > PUBLISH_MESSAGES_MAX:
            raise BatchTooLarge("messages", count=len(payloads), limit=PUBLISH_MESSAGES_MAX)
        messages = [{"payload_base64": _encode_payload(payload)} for payload in payloads]
        if not messages:
            raise BadInput("no payloads were given; nothing was written")
        done = yield from self._post("/publish", {"messages": messages, "qos": qos})
        names = ("channel", "last_seq", "count", "ts", "qos", "durable", "receivers")
        return Ack(*(done[name] for name in names))

    def history(
        self,
        first: int | None = None,
        *,
        last: int | None = None,
        newest: int | None = None,
        since_ms: Time | None = None,
        until_ms: Time | None = None,
        limit: int | None = None,
    ) -> Call[HistoryPage]:
        since = None if since_ms is None else time_ms("since_ms", since_ms)
        until = None if until_ms is None else time_ms("until_ms", until_ms)
        page = yield from self._get(
            "/history", first=first, last=last, newest=newest, since=since, until=until, limit=limit
        )
        messages = [parse_message(message) for message in page["messages"]]
        return HistoryPage(messages, page["next_seq"], page["first_seq"], page["last_seq"])

    def bounds(self) -> Call[tuple[int, int]]:
        fields = yield from self._get()
        if fields["first_seq"] is not None:
            return fields["first_seq"], fields["last_seq"]
        page = yield from self.history(limit=1)  # raises the reason: no history, or not for this user
        return page.first_seq, page.last_seq

    def holes(self) -> Call[list[tuple[int, int]]]:
        return [(first, last) for first, last in (yield from self._get()).get("holes", [])]

    # ── fifo ──────────────────────────────────────────────────────────────────────────────────

    def push(self, payload: bytes) -> Call[Message]:
        self._require_user("push")
        done = yield from self._post("/push", {"payload_base64": _encode_payload(payload)})
        return Message(done["channel"], done["seq"], done["ts"], done["sender"], payload)

    def pop(self) -> Call[Message]:
        self._require_user("pop")
        return parse_message((yield from self._post("/pop", {})))

    def clear(self) -> Call[int]:
        cleared: int = (yield from self._post("/clear", {}, retry_safe=True))["cleared"]
        return cleared

    def length(self) -> Call[int]:
        """Return the number of waiting messages of a fifo channel; owner only."""
        waiting: int = (yield from self._get())["waiting"]
        return waiting


def _encode_payload(payload: object) -> str:
    if not isinstance(payload, bytes):
        raise BadInput(f"a payload is bytes, not {type(payload).__name__}; nothing was written, encode it first")
    return b64encode(payload).decode()


def _parse_config(fields: dict[str, Any]) -> ChannelConfig:
    config = fields["config"]
    return ChannelConfig(**{name: config[name] for name in ChannelConfig.__struct_fields__})


def parse_message(fields: dict[str, Any]) -> Message:
    text = fields.get("payload")
    payload = b64decode(fields["payload_base64"]) if text is None else text.encode()
    return Message(fields["channel"], fields["seq"], fields["ts"], fields["sender"], payload)
