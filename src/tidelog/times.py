"""Times and durations as callers give them: numbers, or `datetime` and `timedelta`.

A parameter whose name ends with `_ms` takes milliseconds or one of these; a `timeout` takes seconds or a `timedelta`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from math import isfinite
from typing import Final, TypeAlias

from tidelog.errors import BadInput

Time: TypeAlias = int | datetime  # milliseconds since the epoch
Duration: TypeAlias = int | timedelta  # milliseconds
Seconds: TypeAlias = float | timedelta
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)
_IN_MS: Final = ("_ms", "_ms_max", "message_flush_interval")
_SECONDS_MAX: Final = 86_400 * 365 * 100


def time_ms(what: str, given: object) -> int:
    """Return a time in milliseconds since the epoch. Raises BadInput for a datetime without a time zone."""
    if isinstance(given, datetime):
        if given.tzinfo is None:
            raise BadInput(
                f"{what} is a datetime without a time zone, {given!r:.80}; nothing was done, give one with it, such as "
                "datetime.now(timezone.utc)"
            )
        return (given - _EPOCH) // _MS
    if isinstance(given, bool) or not isinstance(given, int):
        raise BadInput(f"{what} is a datetime or milliseconds since the epoch, not {given!r:.80}; nothing was done")
    return int(given)


def duration_ms(what: str, given: object) -> int:
    """Return a duration in milliseconds."""
    if isinstance(given, timedelta):
        return given // _MS
    if isinstance(given, bool) or not isinstance(given, int):
        raise BadInput(f"{what} is a timedelta or milliseconds, not {given!r:.80}; nothing was done")
    return given


def seconds(what: str, given: object) -> float | None:
    """Return a timeout in seconds; None: none."""
    if given is None:
        return None
    value = given.total_seconds() if isinstance(given, timedelta) else given
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise BadInput(f"{what} is a timedelta, a number of seconds or None, not {given!r:.80}; nothing was done")
    return min(float(value), _SECONDS_MAX)


def fields_in_ms(fields: Mapping[str, object]) -> dict[str, object]:
    """Return settings with every `timedelta` of a field in milliseconds as a number."""
    return {
        name: given // _MS if isinstance(given, timedelta) and name.endswith(_IN_MS) else given
        for name, given in fields.items()
    }
