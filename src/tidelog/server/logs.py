"""Log lines for people or for machines. What clients sent as a key never gets here: handlers do not log headers."""

from __future__ import annotations

import logging
from typing import TextIO

import msgspec

from tidelog.server.config import LogFormat

_TEXT = "%(asctime)s %(levelname)s %(message)s"


class Lines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, object] = {
            "ts_ms": int(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        more = getattr(record, "fields", None)
        if isinstance(more, dict):
            said |= more
        if record.exc_info:
            said["trace"] = self.formatException(record.exc_info)
        return msgspec.json.encode(said, enc_hook=str).decode()


def configure(how: LogFormat, to: TextIO) -> logging.Logger:
    """Send what the server logs to this stream; returns its logger."""
    logger = logging.getLogger("tidelog")
    handler = logging.StreamHandler(to)
    handler.setFormatter(Lines() if how == "json" else logging.Formatter(_TEXT))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return logger
