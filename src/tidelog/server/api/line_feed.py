"""[hot] Lines of JSON → batches.

    {"data":{"sku":"A"},"tag":"order-7"}⏎      a record, as in a plain write
    {"$seq":7,"$ts":…,"$tag":"t","data":1}⏎     as a read gives it: `$tag` and `$node` are taken over
    {"$end":{…}}⏎                               the last line of a read, and nothing else in it: passed
    {"sku":"A"}⏎                                with `raw`: the line is the data, whatever it says

A batch is as many whole lines as fit 4 MiB and the limit of records: the same lines give the same batches,
whatever pieces they came in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from tidelog.engine import EngineConfig
from tidelog.errors import BadInput, Error, TooLarge
from tidelog.server.api import write as writing
from tidelog.server.api.records import BYTES_MAX, Cut
from tidelog.server.api.schedule import schedule
from tidelog.wire import requests
from tidelog.wire.requests import BadBody, Record

_END: Final = b'{"$end":'
_raw = requests.decoder(msgspec.Raw)
_object = requests.decoder(dict[str, msgspec.Raw])


class Line(Record):
    """A record to be written, or one that was read and is written again."""

    own_tag: str | None = msgspec.field(default=None, name="$tag")
    own_node: str | None = msgspec.field(default=None, name="$node")


_line = requests.decoder(Line)


class Lines:
    def __init__(self, limits: EngineConfig, now_ms: Callable[[], int], *, raw: bool) -> None:
        self._limits, self._now_ms, self._is_raw = limits, now_ms, raw
        self._bytes_max = max(BYTES_MAX, 2 * limits.record_bytes_max)
        self._held: list[bytes] = []
        self.size = 0
        self._breaks = 0
        self._ended = False
        self._passed = 0  # lines that were cut off
        self._at = 1

    @property
    def where(self) -> dict[str, int]:
        return {"line": self._at}

    @property
    def due(self) -> bool:
        full = self.size >= self._bytes_max or self._breaks >= self._limits.batch_records_max
        return self.size > 0 and (self._ended or full)

    def add(self, piece: bytes) -> None:
        self._held.append(piece)
        self.size += len(piece)
        self._breaks += piece.count(b"\n")

    def end(self) -> None:
        if self.size and not self._held[-1].endswith(b"\n"):
            self.add(b"\n")
        self._ended = True

    def take(self) -> Cut | None:
        chunk = self._chunk()
        first = self._passed + 1
        lines = chunk.split(b"\n")
        lines.pop()  # what is behind the last line end: nothing
        self._passed += len(lines)
        self._at = first
        numbers, records = self._records(lines, first, ascii=chunk.isascii())
        if not records:
            return None
        if b'"$' in chunk:
            for record in records:
                if isinstance(record, Line):
                    record.tag = record.own_tag if record.tag is None else record.tag
                    record.node = record.own_node if record.node is None else record.node
        self._at = numbers[0]
        # Without the line ends, so that records without a blank are taken as they are.
        body = chunk.replace(b"\n", b"")
        try:
            scheduled = schedule(records, self._now_ms())
            return Cut(writing.batch_of(self._limits, records, None, body), {"line": numbers[0]}, scheduled)
        except Error:
            self._blame(numbers, records, body)
            raise

    def _chunk(self) -> bytes:
        """The lines of the next batch."""
        whole = self._held[0] if len(self._held) == 1 else b"".join(self._held)
        end = whole.rfind(b"\n", 0, self._bytes_max) + 1
        if not end:
            self._at = self._passed + 1
            raise TooLarge("a line", size=len(whole), limit=self._bytes_max)
        most = self._limits.batch_records_max
        count = whole.count(b"\n", 0, end)
        if count > most:
            breaks = np.flatnonzero(np.frombuffer(whole, np.uint8, end) == ord("\n"))
            count, end = most, int(breaks[most - 1]) + 1
        rest = whole[end:]
        self._held = [rest] if rest else []
        self.size, self._breaks = len(rest), self._breaks - count
        return whole[:end]

    def _records(self, lines: list[bytes], first: int, *, ascii: bool) -> tuple[list[int], list[Record]]:
        """The records of these lines, and the number of each one's line."""
        numbers: list[int] = []
        records: list[Record] = []
        for number, line in enumerate(lines, first):
            if not line or line.isspace() or (line.startswith(_END) and not self._is_raw and _is_end(line)):
                continue
            try:
                if not ascii:
                    line.decode()  # data stays as it came: it was looked at as JSON, not as UTF-8
                record = Record(_raw.decode(line)) if self._is_raw else _line.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                self._at = number
                self._complain(line)
                raise
            records.append(record)
            numbers.append(number)
        return numbers, records

    def _complain(self, line: bytes) -> None:
        """Say what is wrong with a line, in the words of every other body."""
        try:
            if self._is_raw:
                requests.decode(_raw, line)
            else:
                requests.decode(_line, line)
        except BadBody as error:
            raise BadInput(f"line {self._at}: {error}; nothing was written") from None

    def _blame(self, numbers: list[int], records: list[Record], body: bytes) -> None:
        """Find the record that the batch was refused for."""
        for number, record in zip(numbers, records, strict=True):
            self._at = number
            schedule([record], self._now_ms())
            writing.batch_of(self._limits, [record], None, body)


def _is_end(line: bytes) -> bool:
    """Whether this is the last line of a read. What has other fields, too, is somebody's record."""
    try:
        return len(_object.decode(line)) == 1
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # it is complained about as a record
