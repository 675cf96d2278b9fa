"""`RemoteDatabase`: the topics, queues and channels of a server, with the methods of an embedded `Database`.

Methods, results and errors are the same, so a command or a job that takes either one is written once.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

from tidelog import database
from tidelog.addresses import Location
from tidelog.channels import OPERATOR
from tidelog.client.channel import KEY_USER, ChannelUser, RemoteChannel
from tidelog.client.http import Client, topic_path
from tidelog.client.queue import RemoteQueue
from tidelog.client.topic import RemoteTopic
from tidelog.database import Database
from tidelog.engine import TopicInfo
from tidelog.errors import Forbidden, TopicNotFound

_PAGE_ROWS: Final = 1_000


class RemoteDatabase:
    """The topics, queues and channels of a server. Every method may be called from any thread."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def topic(self, name: str, *, create: bool = True, **config: object) -> RemoteTopic:
        """Return the topic of this name; create it if there is none. Given config fields are set, others stay. With
        `create=False` and no fields this sends no request: a missing topic raises at its first use."""
        if create or config:
            self._configure(name, create, config)
        return RemoteTopic(self._client, name)

    def queue(self, name: str, *, create: bool = True, **config: object) -> RemoteQueue:
        """`topic` for a queue."""
        if create or config:
            self._configure(name, create, {"type": "queue", **config})
        return RemoteQueue(self._client, name)

    def _configure(self, name: str, create: bool, config: dict[str, object]) -> None:
        """Create a topic or set fields. A PUT replaces the whole config, so the present fields are sent with it."""
        present: dict[str, object] = {}
        try:
            present = self._client.get(topic_path(name, "?touch=false"))["config"]
        except TopicNotFound:
            if not create:
                raise
        if not present or any(present.get(field) != value for field, value in config.items()):
            present.pop("durable", None)  # follows `durability`
            self._client.put(topic_path(name), {**present, **config})

    def topics(self, prefix: str = "") -> list[TopicInfo]:
        """Return the state of all topics, by name."""
        pages = self._pages("/v0/topics", f"&prefix={quote(prefix, safe='')}")
        return [RemoteTopic(self._client, row["topic"]).state() for page in pages for row in page["topics"]]

    def _pages(self, path: str, query: str = "") -> Iterator[dict[str, Any]]:
        cursor = ""
        while True:
            page = self._client.get(f"{path}?page_size={_PAGE_ROWS}&cursor={cursor}{query}")
            yield page
            cursor = page.get("next_cursor", "")
            if not cursor:
                return

    def channel(self, name: str, *, user: ChannelUser = OPERATOR, token: str | None = None) -> RemoteChannel:
        """Return a handle of a channel for `user`: KEY_USER is the user of the API key; the operator needs the scope
        admin."""
        return RemoteChannel(self._client, name, user, token)

    def channel_rows(self) -> tuple[list[dict[str, Any]], dict[str, str], ChannelUser]:
        """Return all channels, the reasons for unreadable ones, and the user to read them as: the operator, or where
        the key has no scope admin KEY_USER, which lists the channels of that user."""
        try:
            pages = list(self._pages("/v0/channels", "&operator=true"))
        except Forbidden:
            rows = [row for page in self._pages("/v0/channels") for row in page["channels"]]
            return rows, {}, KEY_USER
        return [row for page in pages for row in page["channels"]], pages[0]["unreadable"], OPERATOR


def open_location(location: Location, *, read_only: bool = False) -> Database | RemoteDatabase:
    """Open the directory or the server that a location names."""
    if location.is_server:
        return RemoteDatabase(Client(location.address, key=location.key))
    return database.open(location.address, read_only=read_only)
