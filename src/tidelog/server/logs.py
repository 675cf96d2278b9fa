"""Log lines for people or for machines. What clients sent as a key never gets here: handlers do not log headers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, TextIO

import msgspec

from tidelog.server.config import LogFormat, LogLevel

_encode = msgspec.json.Encoder(enc_hook=str).encode
_TEXT = "%(asctime)s %(levelname)s %(message)s"


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    """What a line says beside its message: `extra={"fields": {…}}`."""
    found = getattr(record, "fields", None)
    return found if isinstance(found, Mapping) else {}


class Text(logging.Formatter):
    """One line, and its fields behind the message. As JSON: what came from a client makes no line of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        more = [f" {name}={_encode(value).decode()}" for name, value in _fields(record).items()]
        return super().formatMessage(record) + "".join(more)


class Lines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, object] = {
            "ts_ms": int(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        said |= _fields(record)
        if record.exc_info:
            said["trace"] = self.formatException(record.exc_info)
        return _encode(said).decode()


def configure(how: LogFormat, to: TextIO, level: LogLevel = "info") -> logging.Logger:
    """Send what the server logs to this stream; returns its logger."""
    logger = logging.getLogger("tidelog")
    handler = logging.StreamHandler(to)
    handler.setFormatter(Lines() if how == "json" else Text(_TEXT))
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    return logger
