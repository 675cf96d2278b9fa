"""The access log: one line for each request, as JSON or in the combined format of web servers.

    {"ts_ms":…,"peer":"127.0.0.1","key":"9f86d081884c7d65","method":"GET","path":"/v0/topics/a","status":200,…}
    127.0.0.1 - 9f86d081884c7d65 [18/Nov/2026:20:51:00 +0000] "GET /v0/topics/a HTTP/1.1" 200 312 "-" "curl/8.5"

A line has no key and no token: `key` is the beginning of the key's digest, as in the gap log; `token` in a query and
the id of a watch session in a path are `-`. A stream is logged when it begins. A thread writes the lines, so that an
output that blocks delays no request; with too many unwritten lines further ones are dropped and counted. With the
access log on no request takes the fast path.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from threading import Condition, Thread
from typing import TYPE_CHECKING, Final, TextIO
from urllib.parse import unquote_plus

import msgspec

if TYPE_CHECKING:
    from tidelog.server.config import AccessLogFormat
    from tidelog.server.request import RequestContext

_LINES_MAX: Final = 10_000  # unwritten
_FIELD_CHARS_MAX: Final = 2_000
_CLOSE_S: Final = 2.0
_SECRET_PARAMETERS: Final = frozenset(("token", "user_token"))
_SESSION_PATH: Final = "/v0/watch/"
_encode = msgspec.json.Encoder().encode


class AccessLog:
    """Writes to one output. `close` writes what is left."""

    def __init__(self, kind: AccessLogFormat, output: TextIO, now_us: Callable[[], int]) -> None:
        self._is_json, self._output, self._now_us = kind == "json", output, now_us
        self._lines: deque[str] = deque()
        self._changed = Condition()
        self._closing = False
        self.dropped = 0
        self._thread = Thread(target=self._run, name="tidelog access log", daemon=True)
        self._thread.start()

    def add(self, context: RequestContext, status: int, size: int | None) -> None:
        """Log a request. `size`: bytes of the response's body before compression; None for a stream."""
        if len(self._lines) >= _LINES_MAX:
            self.dropped += 1
            return
        line = (self._json_line if self._is_json else self._combined_line)(context, status, size)
        with self._changed:
            self._lines.append(line)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._lines and not self._closing:
                    self._changed.wait()
                lines = list(self._lines)
                self._lines.clear()
            if not lines:
                return
            try:
                self._output.write("".join(lines))
                self._output.flush()
            except (OSError, ValueError):  # the reader of a pipe has gone
                self.dropped += len(lines)

    def _json_line(self, context: RequestContext, status: int, size: int | None) -> str:
        request = context.request
        fields: dict[str, object] = {
            "ts_ms": self._now_us() // 1000,
            "peer": request.peer,
            "key": context.principal.name,
            "method": request.method[:_FIELD_CHARS_MAX],
            "path": shown_target(request.path, request.query),
            "status": status,
            "bytes": size,
            "ms": round(context.elapsed_ms(), 3),
            "request_id": context.request_id.decode(),
            "agent": _header(context, b"user-agent"),
        }
        return _encode(fields).decode() + "\n"

    def _combined_line(self, context: RequestContext, status: int, size: int | None) -> str:
        request = context.request
        moment = datetime.fromtimestamp(self._now_us() / 1e6, UTC).strftime("%d/%b/%Y:%H:%M:%S +0000")
        target = f"{request.method[:_FIELD_CHARS_MAX]} {shown_target(request.path, request.query)} HTTP/1.1"
        referer = (_header(context, b"referer") or "").partition("?")[0]
        who = f"{request.peer or '-'} - {context.principal.name or '-'} [{moment}]"
        agent = _header(context, b"user-agent")
        return f"{who} {_quoted(target)} {status} {'-' if size is None else size} {_quoted(referer)} {_quoted(agent)}\n"


def _header(context: RequestContext, name: bytes) -> str | None:
    value = context.request.header(name)
    return None if value is None else value[:_FIELD_CHARS_MAX].decode("latin-1")


def _quoted(text: str | None) -> str:
    """Quote a text of a client: it ends no field and begins no line."""
    if not text:
        return '"-"'
    return '"' + text.encode("unicode_escape").decode("ascii").replace('"', '\\"') + '"'


def shown_target(path: str, query: str) -> str:
    """Return the target of a request without secrets."""
    if path.startswith(_SESSION_PATH):
        path = f"{_SESSION_PATH}-"
    path = path[:_FIELD_CHARS_MAX]
    if not query:
        return path
    pairs = (pair.partition("=") for pair in query[:_FIELD_CHARS_MAX].split("&"))
    shown = (
        f"{name}=-" if unquote_plus(name) in _SECRET_PARAMETERS else name + sep + value for name, sep, value in pairs
    )
    return f"{path}?{'&'.join(shown)}"
