"""[shell] Channels as a command needs them, wherever they are: in a directory, or behind a server.

    tidelog channel … DIR CHANNEL               this process is the writer, or a reader beside one
    tidelog channel … CHANNEL --server URL      a server is, and commands are its clients

Both say the same in the same shapes. A user that is None is the operator: whoever has the files, or a key with the
scope admin; a command that only looks is the key's own user where the key may not be that.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from tidelog.channels import OPERATOR, Channel, ChannelManager, Message, Meta
from tidelog.channels.acl import KINDS
from tidelog.channels.door import Engine
from tidelog.cli import places
from tidelog.cli.render import Screen
from tidelog.client import Client, RemoteChannel, RemoteMessage
from tidelog.client.channel import OWN, remote_channels
from tidelog.errors import ChannelNotFound, Error, Forbidden

T = TypeVar("T")
Said = Message | RemoteMessage


class Door(Protocol):
    def rows(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """A row a channel, and what could not be read."""
        ...

    def show(self, name: str) -> dict[str, Any]: ...
    def history(self, name: str, asked: dict[str, int | None]) -> tuple[Sequence[Said], int, int]:
        """A page, where the next one begins, and the last seq there is."""
        ...

    def bounds(self, name: str) -> tuple[int, int]: ...
    def create(self, name: str, user: str, config: Mapping[str, object]) -> dict[str, Any]: ...
    def join(self, name: str, user: str, by: str | None) -> dict[str, Any]: ...
    def leave(self, name: str, user: str, by: str | None) -> str | None:
        """Who owns it now; None where it ended."""
        ...

    def publish(self, name: str, user: str, payloads: list[bytes]) -> range:
        """Their seqs."""
        ...

    def acl(self, name: str, user: str | None, kind: str) -> Sequence[str]: ...
    def set_acl(
        self, name: str, user: str | None, kind: str, add: Sequence[str], remove: Sequence[str]
    ) -> Sequence[str]: ...
    def delete(self, name: str, user: str | None) -> None: ...


def channel_named(args: Namespace) -> str:
    return places.named(args, "CHANNEL")


def opened(args: Namespace, screen: Screen, *, write: bool, create: bool = False) -> AbstractContextManager[Door]:
    """The door that the command line names. Everything is on disk when this ends."""
    return places.opened(args, screen, Local, Remote, write=write, create=create)


def _fields(meta: Meta) -> dict[str, Any]:
    config = {name: getattr(meta.config, name) for name in meta.config.__struct_fields__}
    return {"channel": meta.handler, "owner": meta.owner, **config, "members": list(meta.members)}


class Local:
    def __init__(self, log: Engine) -> None:
        self._log = log

    def _room(self, name: str, user: str | None = None) -> Channel:
        return self._log.channel(name, user=OPERATOR if user is None else user)

    @staticmethod
    def _bounds(manager: ChannelManager, name: str) -> tuple[int, int] | None:
        """First and last seq; None for a queue, whose messages are nobody's history."""
        return Channel(manager, name, OPERATOR).bounds() if manager.meta(name).config.type == "pubsub" else None

    def rows(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        manager = self._log.channels
        found: list[dict[str, Any]] = []
        for name in manager.handlers():
            meta = manager.meta(name)
            row: dict[str, Any] = {"channel": name, "type": meta.config.type, "owner": meta.owner}
            row |= {"members": len(meta.members), "first_seq": None, "last_seq": None, "trouble": None}
            try:
                if (bounds := self._bounds(manager, name)) is not None:
                    row["first_seq"], row["last_seq"] = bounds
            except Error as error:
                row["trouble"] = str(error)
            found.append(row)
        return found, dict(manager.report.skipped)

    def show(self, name: str) -> dict[str, Any]:
        manager = self._log.channels
        meta = manager.meta(name)
        bounds = self._bounds(manager, name) or (None, None)
        acl = {kind: list(getattr(meta.acl, kind)) for kind in KINDS}
        holes = self._room(name).holes()
        return _fields(meta) | {"acl": acl, "first_seq": bounds[0], "last_seq": bounds[1], "holes": holes}

    def bounds(self, name: str) -> tuple[int, int]:
        return self._room(name).bounds()

    def history(self, name: str, asked: dict[str, int | None]) -> tuple[Sequence[Said], int, int]:
        named = {{"since": "since_ms", "until": "until_ms"}.get(key, key): value for key, value in asked.items()}
        page = self._room(name).history(**named)  # type: ignore[arg-type] # skip_damage is not among them
        return page.messages, page.next_seq, page.last_seq

    def create(self, name: str, user: str, config: Mapping[str, object]) -> dict[str, Any]:
        self._room(name, user).join(**config)
        return _fields(self._log.channels.meta(name))

    def join(self, name: str, user: str, by: str | None) -> dict[str, Any]:
        self._log.channels.meta(name)  # a command that joins makes no channel: what it made would not persist
        if by is None:
            self._room(name, user).join()
        else:
            self._room(name, by).invite(user)
        return _fields(self._log.channels.meta(name))

    def leave(self, name: str, user: str, by: str | None) -> str | None:
        if by is None:
            self._room(name, user).leave()
        else:
            self._room(name, by).kick(user)
        there = name in self._log.channels.handlers()
        return self._log.channels.meta(name).owner if there else None

    def publish(self, name: str, user: str, payloads: list[bytes]) -> range:
        ack = self._room(name, user).publish_many(payloads)
        return range(ack.seq - ack.messages + 1, ack.seq + 1)

    def acl(self, name: str, user: str | None, kind: str) -> Sequence[str]:
        return self._room(name, user).acl(kind)

    def set_acl(
        self, name: str, user: str | None, kind: str, add: Sequence[str], remove: Sequence[str]
    ) -> Sequence[str]:
        room = self._room(name, user)
        listed = room.allow(kind, *add) if add else ()
        return room.disallow(kind, *remove) if remove else listed

    def delete(self, name: str, user: str | None) -> None:
        if not self._room(name, user).delete():
            raise ChannelNotFound(name)


class Remote:
    def __init__(self, client: Client) -> None:
        self._client = client

    def _room(self, name: str, user: object = None) -> RemoteChannel:
        return RemoteChannel(self._client, name, user)

    def _looked(self, name: str, look: Callable[[RemoteChannel], T]) -> T:
        try:
            return look(self._room(name))
        except Forbidden:
            return look(self._room(name, OWN))

    def rows(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        rows, unreadable, user = remote_channels(self._client)
        found = []
        for row in rows:
            kept = {key: row[key] for key in ("channel", "type", "owner", "members")}
            kept |= {"first_seq": None, "last_seq": None, "trouble": None}
            try:
                state = self._room(row["channel"], user).state()
                kept |= {"first_seq": state["first_seq"], "last_seq": state["last_seq"]}
            except Error as error:
                kept["trouble"] = str(error)
            found.append(kept)
        return found, unreadable

    def show(self, name: str) -> dict[str, Any]:
        def look(room: RemoteChannel) -> dict[str, Any]:
            state = room.state()
            fields = {"channel": name, "owner": state["owner"], **state["config"], "members": room.members()}
            try:
                acl: dict[str, list[str]] | None = room.acl()
            except Forbidden:
                acl = None  # it is the owner's to know
            told = {name: state[name] for name in ("first_seq", "last_seq")}
            return fields | {"acl": acl, **told, "holes": state.get("holes", [])}

        return self._looked(name, look)

    def bounds(self, name: str) -> tuple[int, int]:
        state = self._looked(name, RemoteChannel.state)
        return state["first_seq"] or 1, state["last_seq"] or 0

    def history(self, name: str, asked: dict[str, int | None]) -> tuple[Sequence[Said], int, int]:
        return self._looked(name, lambda room: room.history(**asked))

    def create(self, name: str, user: str, config: Mapping[str, object]) -> dict[str, Any]:
        self._room(name, user).join(config=config)
        return self._told(name, user)

    def _told(self, name: str, user: str) -> dict[str, Any]:
        room = self._room(name, user)
        state = room.state()
        return {"channel": name, "owner": state["owner"], **state["config"], "members": room.members()}

    def join(self, name: str, user: str, by: str | None) -> dict[str, Any]:
        if by is not None:
            self._room(name, by).join(user)
            return self._told(name, by)
        self._looked(name, _is_there)
        self._room(name, user).join()
        return self._told(name, user)

    def leave(self, name: str, user: str, by: str | None) -> str | None:
        done = self._room(name, user).leave() if by is None else self._room(name, by).leave(user)
        owner: str | None = done["owner"]
        return owner

    def publish(self, name: str, user: str, payloads: list[bytes]) -> range:
        done = self._room(name, user).publish(payloads)
        return range(done["first_seq"], done["last_seq"] + 1)

    def acl(self, name: str, user: str | None, kind: str) -> Sequence[str]:
        return self._room(name, user).acl()[kind]

    def set_acl(
        self, name: str, user: str | None, kind: str, add: Sequence[str], remove: Sequence[str]
    ) -> Sequence[str]:
        return self._room(name, user).set_acl(kind, add=add, remove=remove)

    def delete(self, name: str, user: str | None) -> None:
        if not self._room(name, user).delete():
            raise ChannelNotFound(name)


def _is_there(room: RemoteChannel) -> None:
    """A command that joins makes no channel; whether there is one, a stranger is told as well."""
    try:
        room.state()
    except ChannelNotFound:
        raise
    except Forbidden:
        return
