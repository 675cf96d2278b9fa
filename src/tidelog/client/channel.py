"""A channel of a server, with the methods of an embedded one, as one of its users or as the operator."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any, Final, TypeAlias
from urllib.parse import quote, urlencode

from tidelog.channels import Ack, ChannelConfig, ChannelInfo, HistoryPage, Message, Operator
from tidelog.client.http import Client

_MEMBERS_PAGE_SIZE: Final = 100


class KeyUser:
    """The user of the API key."""

    def __repr__(self) -> str:
        return "KEY_USER"


KEY_USER: Final = KeyUser()
ChannelUser: TypeAlias = str | Operator | KeyUser


class RemoteChannel:
    """One channel of a server.

    Args:
        user: the user to act as; by default the user of the key. OPERATOR needs the scope admin.
        token: the user's token, where the server has an authentication hook.
    """

    def __init__(self, client: Client, name: str, user: ChannelUser = KEY_USER, token: str | None = None) -> None:
        self._client, self.name, self.user = client, name, user
        self._identity_query: dict[str, str] = {}
        if isinstance(user, Operator):
            self._identity_query["operator"] = "true"
        elif not isinstance(user, KeyUser):
            self._identity_query["user"] = user
        if token is not None:
            self._identity_query["user_token"] = token

    def _path(self, verb: str = "", **query: object) -> str:
        parameters = self._identity_query | {name: str(value) for name, value in query.items() if value is not None}
        rest = f"?{urlencode(parameters)}" if parameters else ""
        return f"/v0/channels/{quote(self.name, safe='')}{verb}{rest}"

    # ── members ───────────────────────────────────────────────────────────────────────────────

    def join(self, **config: object) -> RemoteChannel:
        """Become a member. The first member creates the channel with the given settings and owns it."""
        self._client.post(self._path("/join"), {"config": config})
        return self

    def leave(self) -> str | None:
        """End the membership; return the owner afterwards, None if the channel was deleted."""
        owner: str | None = self._client.post(self._path("/leave"), {})["owner"]
        return owner

    def invite(self, user: str) -> None:
        """Make another user a member; owner only."""
        self._client.post(self._path("/join"), {"user": user})

    def kick(self, user: str) -> str | None:
        """End the membership of another user; return the owner afterwards. Owner only."""
        owner: str | None = self._client.post(self._path("/leave"), {"user": user})["owner"]
        return owner

    def members(self, page: int = 1, page_size: int = _MEMBERS_PAGE_SIZE) -> tuple[str, ...]:
        """Return one page of the members, sorted by name; pages count from 1. Members only."""
        return tuple(self._client.get(self._path("/members", page=page, page_size=page_size))["members"])

    def _all_members(self) -> tuple[str, ...]:
        names: tuple[str, ...] = ()
        page = 1
        while members := self.members(page):
            names, page = names + members, page + 1
            if len(members) < _MEMBERS_PAGE_SIZE:
                break
        return names

    # ── settings and access lists ─────────────────────────────────────────────────────────────

    def state(self) -> ChannelInfo:
        """Return owner, settings and members. Members only."""
        fields = self._client.get(self._path())
        return ChannelInfo(fields["channel"], fields["owner"], _parse_config(fields), self._all_members())

    def configure(self, **changes: object) -> ChannelConfig:
        """Create the channel, or change settings; return all of them. Owner only."""
        return _parse_config(self._client.put(self._path(), changes))

    def acl(self, kind: str) -> tuple[str, ...]:
        """Return one of the access lists (join, publish, read); owner only. An empty list allows every user."""
        return tuple(self._client.get(self._path("/acl"))["acl"][kind])

    def allow(self, kind: str, *entries: str) -> tuple[str, ...]:
        """Add users or domains to an access list and return it; owner only."""
        return self.change_acl(kind, add=entries)

    def disallow(self, kind: str, *entries: str) -> tuple[str, ...]:
        """Remove users or domains from an access list and return it; owner only."""
        return self.change_acl(kind, remove=entries)

    def change_acl(self, kind: str, *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> tuple[str, ...]:
        """Add and remove entries of an access list in one change, and return it; owner only."""
        body = {"kind": kind, "add": add, "remove": remove}
        return tuple(self._client.post(self._path("/acl"), body, retry_safe=True)["listed"])

    def delete(self) -> bool:
        """Delete the channel with its messages; owner only. Return whether there was one."""
        return bool(self._client.delete(self._path())["deleted"])

    # ── messages ──────────────────────────────────────────────────────────────────────────────

    def publish(self, payload: bytes, *, qos: int = 1) -> Ack:
        """Publish one message."""
        return self.publish_many([payload], qos=qos)

    def publish_many(self, payloads: Sequence[bytes], *, qos: int = 1) -> Ack:
        """Publish several messages with consecutive seqs. Without a response this raises InDoubt; the history shows
        whether they were published."""
        messages = [{"payload_base64": b64encode(payload).decode()} for payload in payloads]
        done = self._client.post(self._path("/publish"), {"messages": messages, "qos": qos})
        return Ack(
            done["channel"],
            done["last_seq"],
            done["count"],
            done["ts"],
            done["qos"],
            done["durable"],
            done["receivers"],
        )

    def history(
        self,
        first: int | None = None,
        *,
        last: int | None = None,
        newest: int | None = None,
        since_ms: int | None = None,
        until_ms: int | None = None,
        limit: int | None = None,
    ) -> HistoryPage:
        """Return a page of delivered messages: from a seq, the newest n, or from a time. For members who may read."""
        path = self._path(
            "/history", first=first, last=last, newest=newest, since=since_ms, until=until_ms, limit=limit
        )
        page = self._client.get(path)
        messages = [_parse_message(message) for message in page["messages"]]
        return HistoryPage(messages, page["next_seq"], page["first_seq"], page["last_seq"])

    def bounds(self) -> tuple[int, int]:
        """Return the first and the last seq of the history. For members who may read."""
        fields = self._client.get(self._path())
        if fields["first_seq"] is not None:
            return fields["first_seq"], fields["last_seq"]
        page = self.history(limit=1)  # raises the reason: no history, or not for this user
        return page.first_seq, page.last_seq

    def holes(self) -> list[tuple[int, int]]:
        """Return the ranges of seqs that a power cut lost before their sync, first and last of each; none for users
        who may not read."""
        return [(first, last) for first, last in self._client.get(self._path()).get("holes", [])]

    # ── fifo ──────────────────────────────────────────────────────────────────────────────────

    def push(self, payload: bytes) -> int:
        """Append one message to a fifo channel and return its seq; owner only."""
        body = {"payload_base64": b64encode(payload).decode()}
        seq: int = self._client.post(self._path("/push"), body)["seq"]
        return seq

    def pop(self) -> Message:
        """Remove and return the oldest message of a fifo channel. For members who may read."""
        return _parse_message(self._client.post(self._path("/pop"), {}))

    def clear(self) -> int:
        """Drop every waiting message of a fifo channel and return their number; owner only."""
        cleared: int = self._client.post(self._path("/clear"), {}, retry_safe=True)["cleared"]
        return cleared

    def __len__(self) -> int:
        """Return the number of waiting messages of a fifo channel; owner only."""
        waiting: int = self._client.get(self._path())["waiting"]
        return waiting

    def __bool__(self) -> bool:
        return True


def _parse_config(fields: dict[str, Any]) -> ChannelConfig:
    config = fields["config"]
    return ChannelConfig(**{name: config[name] for name in ChannelConfig.__struct_fields__})


def _parse_message(fields: dict[str, Any]) -> Message:
    text = fields.get("payload")
    payload = b64decode(fields["payload_base64"]) if text is None else text.encode()
    return Message(fields["channel"], fields["seq"], fields["ts"], fields["sender"], payload)
