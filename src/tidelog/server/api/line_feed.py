"""[hot] Lines of JSON → batches.

    {"data":{"sku":"A"},"tag":"order-7"}⏎      a record, as in a plain write
    {"$seq":7,"$ts":…,"$tag":"t","data":1}⏎     as a read gives it: `$tag` and `$node` are taken over
    {"$end":{…}}⏎                               the last line of a read, and nothing else in it: passed
    {"sku":"A"}⏎                                with `raw`: the line is the data, whatever it says

A batch is as many whole lines as fit 4 MiB and the limit of records: the same lines give the same batches,
whatever pieces they came in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import numpy as np

from tidelog.engine import EngineConfig
from tidelog.errors import BadInput, Error, TooLarge
from tidelog.server.api import write as writing
from tidelog.server.api.records import BYTES_MAX, Cut
from tidelog.server.api.schedule import schedule
from tidelog.types import Ints
from tidelog.wire import requests
from tidelog.wire.requests import BadBody, Record

_END: Final = b'{"$end":'
_BLANK: Final = re.compile(rb"\n[ \t\r\v\f]+(?=\n)")
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
        self._whole, self._start = b"", 0  # lines that wait to be cut begin there
        self._held: list[bytes] = []  # pieces that came after them
        self._ends: Ints | None = None  # where lines of `_whole` end, while there are more than fit a batch
        self.size = 0
        self._breaks = 0
        self._ended = False
        self._passed = 0  # lines that were cut off
        self._at = 1

    @property
    def where(self) -> dict[str, int]:
        return {"line": self._at}

    @property
    def held_bytes(self) -> int:
        return self.size

    @property
    def claimed(self) -> int:
        return 0  # at most `_bytes_max` of lines, in one of the threads of the service

    @property
    def is_decoded(self) -> bool:
        return False

    @property
    def due(self) -> bool:
        full = self.size >= self._bytes_max or self._breaks >= self._limits.batch_records_max
        return self.size > 0 and (self._ended or full)

    def add(self, piece: bytes) -> None:
        self._held.append(piece)
        self.size += len(piece)
        self._breaks += piece.count(b"\n")

    def end(self) -> None:
        last = self._held[-1] if self._held else self._whole
        if self.size and not last.endswith(b"\n"):
            self.add(b"\n")
        self._ended = True

    def take(self) -> Cut | None:
        chunk = self._chunk()
        first = self._passed + 1
        self._at = first
        count, lines = _lines(chunk, first)
        self._passed += count
        numbers, records = self._records(lines, ascii=chunk.isascii())
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
        if self._held:
            self._whole = b"".join((self._whole[self._start :], *self._held))
            self._held, self._start, self._ends = [], 0, None
        whole, start, most = self._whole, self._start, self._limits.batch_records_max
        if self._ends is None and self._breaks > most:
            self._ends = np.flatnonzero(np.frombuffer(whole, np.uint8) == ord("\n"))
        if self._ends is None:
            end = whole.rfind(b"\n", start, start + self._bytes_max) + 1
            count = whole.count(b"\n", start, end)
        else:
            first = len(self._ends) - self._breaks
            fits = int(np.searchsorted(self._ends, start + self._bytes_max)) - first
            count = min(fits, most)
            end = int(self._ends[first + count - 1]) + 1 if count else 0
        if end <= start:
            self._at = self._passed + 1
            raise TooLarge("a line", size=len(whole) - start, limit=self._bytes_max)
        self._start, self.size, self._breaks = end, len(whole) - end, self._breaks - count
        if not self.size:
            self._whole, self._start, self._ends = b"", 0, None
        return whole[start:end]

    def _records(self, lines: Iterable[tuple[int, bytes]], *, ascii: bool) -> tuple[list[int], list[Record]]:
        """The records of these lines, and the number of each one's line."""
        numbers: list[int] = []
        records: list[Record] = []
        for number, line in lines:
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


def _lines(chunk: bytes, first: int) -> tuple[int, Iterable[tuple[int, bytes]]]:
    """How many lines there are, and those of them that may be records, each with its number.

    Blank ones are left out without looking at each of them: they compress to nothing, so that a peer can send millions.
    """
    if b"\n\n" not in chunk and not _BLANK.search(chunk):
        lines = chunk.split(b"\n")
        lines.pop()  # what is behind the last line end: nothing
        return len(lines), enumerate(lines, first)
    if chunk.isspace():
        return chunk.count(b"\n"), ()
    packed = _BLANK.sub(b"\n", chunk)
    ends = np.flatnonzero(np.frombuffer(packed, np.uint8) == ord("\n"))
    starts = np.concatenate(([0], ends[:-1] + 1))
    filled = np.flatnonzero(ends > starts)
    spans = zip(filled.tolist(), starts[filled].tolist(), ends[filled].tolist(), strict=True)
    return len(ends), ((first + number, packed[lo:hi]) for number, lo, hi in spans)


def _is_end(line: bytes) -> bool:
    """Whether this is the last line of a read. What has other fields, too, is somebody's record."""
    try:
        return len(_object.decode(line)) == 1
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # it is complained about as a record
