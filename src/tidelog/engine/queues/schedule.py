"""When a scheduled job is due: `every` some seconds, or at the times of a `cron` line. All times are UTC."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final, Protocol

from tidelog.errors import BadInput
from tidelog.times import seconds

_FIELDS: Final = (("minute", 0, 59), ("hour", 0, 23), ("day", 1, 31), ("month", 1, 12), ("weekday", 0, 7))
_MONTHS: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_NAMES: Final = {
    "month": {name: number for number, name in enumerate(_MONTHS, 1)},
    "weekday": {name: number for number, name in enumerate(_WEEKDAYS)},
}
_PART = re.compile(r"(\*|(\w+)(?:-(\w+))?)(?:/(\d+))?")
_DAYS_SEARCHED: Final = 366 * 8 + 2  # 29 February comes back after eight years at the most


class Schedule(Protocol):
    """The times at which a job is due."""

    def next_after(self, ms: int) -> int:
        """The first due time after `ms`, in milliseconds since the epoch."""
        ...


class Every:
    """Multiples of a length of time since the epoch, so that all workers agree on them."""

    def __init__(self, length_ms: int) -> None:
        self._length_ms = length_ms

    def __repr__(self) -> str:
        return f"every({self._length_ms / 1000:g})"

    def next_after(self, ms: int) -> int:
        return (ms // self._length_ms + 1) * self._length_ms


class Cron:
    """The minutes that a cron line names."""

    def __init__(self, line: str) -> None:
        texts = line.split()
        if len(texts) != len(_FIELDS):
            raise BadInput(
                f"{line!r:.200} is no cron line: it takes minute, hour, day, month and weekday, such as '0 3 * * mon'; "
                "nothing was scheduled"
            )
        self._line = line
        sets = [_parse_field(line, text, *field) for text, field in zip(texts, _FIELDS, strict=True)]
        self._minutes, self._hours, self._days, self._months, weekdays = sets
        self._weekdays = {day % 7 for day in weekdays}  # 0 and 7 are Sunday
        # As in cron: if both are restricted, a day that matches one of them is enough.
        self._any_day = not texts[2].startswith("*") and not texts[4].startswith("*")
        if self._next_day(datetime(2024, 1, 1, tzinfo=UTC)) is None:
            raise BadInput(f"no day matches the cron line {line!r:.200}; nothing was scheduled")

    def __repr__(self) -> str:
        return f"cron({self._line!r})"

    def next_after(self, ms: int) -> int:
        after = datetime.fromtimestamp(ms / 1000, UTC).replace(second=0, microsecond=0) + timedelta(minutes=1)
        day = self._next_day(after)
        while day is not None:
            start = after if day.date() == after.date() else day
            for hour in sorted(self._hours):
                for minute in sorted(self._minutes):
                    due = day.replace(hour=hour, minute=minute)
                    if due >= start:
                        return int(due.timestamp() * 1000)
            day = self._next_day(day + timedelta(days=1))
        raise AssertionError("a cron line was accepted that matches no day")

    def _next_day(self, after: datetime) -> datetime | None:
        """The start of the first matching day from that of `after` on."""
        day = after.replace(hour=0, minute=0)
        for _ in range(_DAYS_SEARCHED):
            if day.month in self._months and self._matches_day(day):
                return day
            day += timedelta(days=1)
        return None

    def _matches_day(self, day: datetime) -> bool:
        by_day, by_weekday = day.day in self._days, day.isoweekday() % 7 in self._weekdays
        return by_day or by_weekday if self._any_day else by_day and by_weekday


def every(length: float | timedelta) -> Schedule:
    """A job every so many seconds, or every timedelta.

    >>> every(60)
    every(60)
    """
    given = seconds("the time between two jobs", length)
    if given is None or not given >= 1:
        raise BadInput(f"a job cannot be due every {length!r:.80}: the shortest time is one second")
    return Every(int(given * 1000))


def cron(line: str) -> Schedule:
    """A job at the times of a cron line: minute, hour, day of month, month, weekday, in UTC.

    >>> cron("*/5 8-17 * * mon-fri")
    cron('*/5 8-17 * * mon-fri')
    """
    if not isinstance(line, str):
        raise BadInput(f"a cron line is text such as '0 3 * * mon', not {line!r:.80}; nothing was scheduled")
    return Cron(line)


def _parse_field(line: str, text: str, name: str, low: int, high: int) -> set[int]:
    values: set[int] = set()
    for part in text.lower().split(","):
        match = _PART.fullmatch(part)
        step = 1 if match is None or match[4] is None else int(match[4])
        if match is None or step == 0:
            raise _bad_field(line, part, name, low, high)
        if match[1] == "*":
            first, last = low, high
        else:
            first = _parse_value(line, match[2], name, low, high)
            last = high if match[3] is None and match[4] else first
            last = last if match[3] is None else _parse_value(line, match[3], name, low, high)
        if first > last:
            raise _bad_field(line, part, name, low, high)
        values.update(range(first, last + 1, step))
    return values


def _parse_value(line: str, text: str, name: str, low: int, high: int) -> int:
    value = _NAMES.get(name, {}).get(text)
    if value is None and text.isdecimal() and text.isascii():
        value = int(text)
    if value is None or not low <= value <= high:
        raise _bad_field(line, text, name, low, high)
    return value


def _bad_field(line: str, part: str, name: str, low: int, high: int) -> BadInput:
    return BadInput(
        f"{part!r:.80} in the cron line {line!r:.200} is no {name} from {low} to {high}, no list, range or step of "
        "them; nothing was scheduled"
    )
