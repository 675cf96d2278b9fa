"""What a server refused of a channel, as the engine in this process would raise it.

[shell] Requests to a server over connections that are kept, from any thread.

    request ──► an idle connection, or a new one ──► answer ──► idle again
                └ broken where nothing was answered: once more on a new one, if asking twice does no harm

A forked child closes its copies of the connections and opens its own: two processes that shared one would read each
other's answers. The parent's connections are unaffected.

An error of the server is raised as the engine in this process would raise it: the same class, the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from threading import Lock
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote, urlsplit

import msgspec

from tidelog import errors
from tidelog.disk import fork
from tidelog.engine.json_codec import from_json
from tidelog.errors import BadInput, Error, InDoubt, Refused, Unavailable


def channel_error(code: str, message: str, detail: dict[str, Any]) -> Error | None:
    """What a server refused of a channel, as the engine would raise it; None where it is about something else."""
    channel, user = str(detail.get("channel", "")), str(detail.get("user", ""))
    match code:
        case "forbidden":
            return errors.Forbidden(message)
        case "not_a_member":
            return errors.NotMember(channel, user)
        case "user_in_channel":
            return errors.AlreadyMember(channel, user)
        case "channel_not_found":
            return errors.ChannelNotFound(channel)
        case "channel_full":
            return errors.ChannelFull(channel, limit=int(detail.get("limit", 0)))
        case "queue_full":
            return errors.FifoFull(channel, limit=int(detail.get("limit", 0)))
        case "queue_empty":
            return errors.FifoEmpty(channel)
        case "wrong_type":
            return errors.WrongType(channel, type=str(detail.get("type")), wanted=str(detail.get("wanted")))
        case "persistence_not_enabled":
            return errors.NotPersistent(channel)
        case "cursor_recovery_required":
            return errors.CursorLost(channel, reason=str(detail.get("reason")))
        case "channel_offline":
            return errors.ChannelOffline(channel, reason=str(detail.get("reason")))
        case "rejected":
            return errors.Rejected(message)
        case "hook_failed":
            return errors.HookFailed(message)
        case _:
            return None


_TIMEOUT_S: Final = 60.0
_IDLE_CONNECTIONS_MAX: Final = 8
_ERROR_STATUS_MIN: Final = 300
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class _NoResponse(Exception):
    """A connection that ended before there was an answer."""


class Client:
    """A server at `url`, as `http://127.0.0.1:4000`. `key`: where it asks for one."""

    def __init__(self, url: str, *, key: str | None = None, timeout_s: float = _TIMEOUT_S) -> None:
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise BadInput(f"{url!r:.200} is no address of a server; nothing was done, write http://host:port")
        self.url = url
        self._connection_class = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port, self._base = parts.hostname, port, parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._lock = Lock()
        self._idle: list[HTTPConnection] = []
        self._busy: set[HTTPConnection] = set()
        self._pid = fork.process_id()
        fork.register(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._check_process()
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def on_fork(self, pid: int) -> None:  # noqa: ARG002
        """Close this child's copies of its parent's connections. Nothing is sent on them."""
        inherited = [*self._idle, *self._busy]
        self._lock, self._idle, self._busy = Lock(), [], set()
        self._pid = fork.process_id()
        for connection in inherited:
            connection.close()

    def _check_process(self) -> None:
        if self._pid != fork.process_id():  # a fork by C code runs no hooks
            self.on_fork(self._pid)

    def get(self, path: str) -> dict[str, Any]:
        return self._parse_object(self.request("GET", path, retry_safe=True))

    def post(self, path: str, body: Mapping[str, Any], *, retry_safe: bool = False) -> dict[str, Any]:
        """`again`: it may be sent twice where nothing was answered the first time."""
        return self._parse_object(self.request("POST", path, _encode(body), retry_safe=retry_safe))

    def put(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._parse_object(self.request("PUT", path, _encode(body), retry_safe=True))

    def delete(self, path: str) -> dict[str, Any]:
        return self._parse_object(self.request("DELETE", path, retry_safe=True))

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        retry_safe: bool,
        accept: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """The body of a good answer. Raises what the server says, Unavailable, and InDoubt where it said nothing."""
        sent = {**self._headers, "Accept": accept}
        if body is not None:
            sent["Content-Type"] = "application/json"
        sent |= headers or {}
        try:
            status, answer = self._exchange(method, path, body, sent)
        except _NoResponse as first:
            if not retry_safe:
                raise InDoubt(
                    f"{self.url} closed the connection without an answer ({first}); nobody knows whether it was "
                    "written, look before you retry"
                ) from None
            try:
                status, answer = self._exchange(method, path, body, sent, new_connection=True)
            except _NoResponse as second:
                raise Unavailable(
                    f"{self.url} does not answer ({second}); nothing is known to be done, retry"
                ) from None
        if status >= _ERROR_STATUS_MIN:
            raise _error_from_response(status, answer)
        return answer

    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], *, new_connection: bool = False
    ) -> tuple[int, bytes]:
        connection = self._take_connection(new_connection)
        try:
            return self._exchange_on(connection, method, path, body, headers)
        finally:
            with self._lock:
                self._busy.discard(connection)

    def _exchange_on(
        self, connection: HTTPConnection, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        try:
            if connection.sock is None:
                connection.connect()
        except OSError as error:
            raise Unavailable(f"{self.url} cannot be reached ({error}); nothing was done, start it or retry") from None
        try:
            connection.request(method, self._base + path, body, headers)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, HTTPException) as error:
            connection.close()
            raise _NoResponse(str(error) or type(error).__name__) from None
        with self._lock:
            if len(self._idle) < _IDLE_CONNECTIONS_MAX:
                self._idle.append(connection)
                return response.status, answer
        connection.close()
        return response.status, answer

    def _take_connection(self, new_connection: bool) -> HTTPConnection:
        self._check_process()
        with self._lock:
            idle = bool(self._idle) and not new_connection
            connection = (
                self._idle.pop() if idle else self._connection_class(self._host, self._port, timeout=self._timeout_s)
            )
            self._busy.add(connection)
        return connection

    def _parse_object(self, answer: bytes) -> dict[str, Any]:
        try:
            found = from_json(answer)
        except msgspec.DecodeError:
            found = None
        if not isinstance(found, dict):
            raise Unavailable(f"{self.url} answers, but is no Tidelog server; check the address")
        return found


def topic_path(topic: str, rest: str = "") -> str:
    return f"/v0/topics/{quote(topic, safe='')}{rest}"


def _error_from_response(status: int, answer: bytes) -> Error:
    """What the server refused, as the same error that the engine would raise."""
    try:
        told = _decode(answer)["error"]
        code, message, detail = str(told["code"]), str(told["message"]), told.get("detail") or {}
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return Unavailable(f"the server answered {status} and nothing that can be read; check the address")
    match code:
        case "topic_not_found":
            return errors.TopicNotFound(str(detail.get("topic", "")))
        case "not_a_queue":
            return errors.NotAQueue(str(detail.get("topic", "")))
        case "invalid_request" | "batch_too_large" | "record_too_large":
            return BadInput(message)
        case "throttled" | "not_ready" | "shutting_down":
            return Unavailable(message)
        case "disk_full":
            return errors.DiskFull(message)
        case "internal" if detail.get("written") is False:  # its disk failed before, and it knows that
            damaged = errors.Damaged(message)
            damaged.written = False
            return damaged
        case "internal":
            return InDoubt(message)
        case _:
            return channel_error(code, message, detail) or Refused(message)
