"""A channel of a server, with the methods of an embedded one, as one of its users or as the operator."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode

from tidelog.client.http import Client
from tidelog.errors import Forbidden

KEY_USER: Final = object()  # the user of the key
_CHANNELS_PAGE_SIZE: Final = 1_000
_MEMBERS_PAGE_SIZE: Final = 100


class RemoteMessage(NamedTuple):
    """One message."""

    channel: str
    seq: int
    ts_ms: int
    sender: str
    payload: bytes


class RemoteChannel:
    """One channel of a server.

    Args:
        user: the user to act as; by default the user of the key. None: the operator, which needs the scope admin.
        token: the user's token, where the server has an authentication hook.
    """

    def __init__(self, client: Client, name: str, user: object = KEY_USER, token: str | None = None) -> None:
        self._client, self.name = client, name
        self._identity_query: dict[str, str] = {}
        if user is None:
            self._identity_query["operator"] = "true"
        elif user is not KEY_USER:
            self._identity_query["user"] = str(user)
        if token is not None:
            self._identity_query["user_token"] = token

    def _path(self, verb: str = "", **query: object) -> str:
        parameters = self._identity_query | {name: str(value) for name, value in query.items() if value is not None}
        rest = f"?{urlencode(parameters)}" if parameters else ""
        return f"/v0/channels/{quote(self.name, safe='')}{verb}{rest}"

    def configure(self, **config: object) -> dict[str, Any]:
        """Create the channel, or change its settings."""
        return self._client.put(self._path(), config)

    def state(self) -> dict[str, Any]:
        return self._client.get(self._path())

    def delete(self) -> bool:
        """Delete the channel with its messages."""
        return bool(self._client.delete(self._path())["deleted"])

    def join(self, user: str | None = None, *, config: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Become a member, or add `user`. Creates a channel that does not exist, with `config`."""
        return self._client.post(self._path("/join"), {"user": user, "config": dict(config or {})})

    def leave(self, user: str | None = None) -> dict[str, Any]:
        """End the membership, or that of `user`."""
        return self._client.post(self._path("/leave"), {"user": user})

    def members(self) -> list[str]:
        """All members, by name."""
        names: list[str] = []
        page = 1
        while True:
            response = self._client.get(self._path("/members", page=page, page_size=_MEMBERS_PAGE_SIZE))
            names += response["members"]
            if not response["members"] or len(names) >= response["total"]:
                return names
            page += 1

    def acl(self) -> dict[str, list[str]]:
        listed: dict[str, list[str]] = self._client.get(self._path("/acl"))["acl"]
        return listed

    def set_acl(self, kind: str, *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> list[str]:
        body = {"kind": kind, "add": list(add), "remove": list(remove)}
        listed: list[str] = self._client.post(self._path("/acl"), body, retry_safe=True)["listed"]
        return listed

    def publish(self, payloads: Sequence[bytes], *, qos: int = 1) -> dict[str, Any]:
        """Publish messages. Without a response it raises InDoubt; the history shows whether they were published."""
        messages = [{"payload_base64": b64encode(payload).decode()} for payload in payloads]
        return self._client.post(self._path("/publish"), {"messages": messages, "qos": qos})

    def history(self, **bounds: int | None) -> tuple[list[RemoteMessage], int, int]:
        """A page of messages, the seq at which the next one begins, and the last seq."""
        response = self._client.get(self._path("/history", **bounds))
        return [_parse_message(message) for message in response["messages"]], response["next_seq"], response["last_seq"]

    def push(self, payload: bytes) -> int:
        body = {"payload_base64": b64encode(payload).decode()}
        seq: int = self._client.post(self._path("/push"), body)["seq"]
        return seq

    def pop(self) -> RemoteMessage:
        return _parse_message(self._client.post(self._path("/pop"), {}))

    def clear(self) -> int:
        cleared: int = self._client.post(self._path("/clear"), {}, retry_safe=True)["cleared"]
        return cleared


def list_remote_channels(client: Client) -> tuple[list[dict[str, Any]], dict[str, str], object]:
    """All channels of a server, the unreadable ones, and the `user` to read them as: None (the operator) where the key
    has the scope admin, else KEY_USER, which lists the user's own channels."""
    try:
        rows = list(_list_channels(client, "&operator=true"))
        unreadable = client.get("/v0/channels?page_size=1&operator=true")["unreadable"]
    except Forbidden:
        return list(_list_channels(client, "")), {}, KEY_USER
    return rows, unreadable, None


def _list_channels(client: Client, query: str) -> Iterator[dict[str, Any]]:
    after = ""
    while True:
        page = client.get(f"/v0/channels?page_size={_CHANNELS_PAGE_SIZE}&cursor={after}{query}")
        yield from page["channels"]
        after = page.get("next_cursor", "")
        if not after:
            return


def _parse_message(fields: dict[str, Any]) -> RemoteMessage:
    text = fields.get("payload")
    payload = b64decode(fields["payload_base64"]) if text is None else text.encode()
    return RemoteMessage(fields["channel"], fields["seq"], fields["ts"], fields["sender"], payload)
