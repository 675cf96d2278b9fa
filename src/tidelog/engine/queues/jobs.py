"""[hot] What a queue answers: jobs as columns until somebody asks for objects or for text, and small results."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tidelog.engine.parts import Bools
from tidelog.engine.read import Stretch, records_of
from tidelog.engine.results import Counts
from tidelog.engine.texts import from_json
from tidelog.errors import BadInput
from tidelog.formats.rows import Rows, values

_PREFIX = "lease_"
_quote = msgspec.json.Encoder().encode


def lease_token(lease_id: int) -> str:
    """A lease's id as it is shown outside."""
    return f"{_PREFIX}{lease_id:x}"


def parse_lease_token(text: str) -> int | None:
    """The id that a token stands for; None for the empty one, which stands for none."""
    if not text:
        return None
    digits = text.removeprefix(_PREFIX)
    try:
        if digits == text or len(digits) > 16 or not digits.isascii() or not digits.isalnum():  # int takes more
            raise ValueError
        return int(digits, 16)
    except ValueError:
        raise BadInput(f"{text!r:.80} is no lease token; nothing was done, send what the claim answered") from None


class Job(NamedTuple):
    """A job that somebody holds."""

    seq: int
    lease_id: int
    deadline_ms: int  # it is theirs up to and with this time
    ts_ms: int  # when it was enqueued
    deliveries: int  # how often it was handed out, with this time
    data: Any
    tag: str | None = None
    meta: dict[str, Any] | None = None

    @property
    def token(self) -> str:
        return lease_token(self.lease_id)


class Settled(NamedTuple):
    """What an ack or a nack came to, and the queue behind it."""

    count: int  # type: ignore[assignment]  # hides a method that nobody misses
    skipped: list[int]  # not held by that node, or not under that lease; in the order they were given
    ready: int
    in_flight: int


class Extended(NamedTuple):
    count: int  # type: ignore[assignment]  # hides a method that nobody misses
    skipped: list[int]
    deadlines: dict[int, int]


class QueueCounts(NamedTuple):
    ready: int  # can be claimed now
    in_flight: int  # held under a lease
    dead_lettered: int  # since the queue was made


class Piece(NamedTuple):
    """Records that lie in one buffer."""

    rows: Rows
    json: Bools


class Texts(NamedTuple):
    """JSON records without tags and metas, taken out of their buffers already: mostly a few."""

    times_ms: list[int]
    datas: list[bytes]


class Leased:
    """What one claimer got, ascending by seq. There is no object per job until `jobs`."""

    __slots__ = ("_pieces", "deadlines", "deliveries", "lease_ids", "ready", "seqs")

    def __init__(
        self,
        seqs: list[int],
        lease_ids: list[int],
        deadlines: list[int],
        deliveries: list[int],
        pieces: Sequence[Piece] | Texts,
        ready: int = 0,
    ) -> None:
        self.seqs, self.lease_ids, self.deadlines, self.deliveries = seqs, lease_ids, deadlines, deliveries
        self._pieces = pieces
        self.ready = ready  # what could be claimed behind it

    @property
    def count(self) -> int:
        return len(self.seqs)

    def jobs(self) -> list[Job]:
        if isinstance(self._pieces, Texts):
            datas = map(from_json, self._pieces.datas)
            columns = (self.seqs, self.lease_ids, self.deadlines, self._pieces.times_ms, self.deliveries)
            return list(map(Job, *columns, datas))
        stretches = (Stretch(piece.rows, piece.json, Counts(), 0, full=False) for piece in self._pieces)
        records = [record for stretch in stretches for record in records_of(stretch)]
        return [
            Job(record.seq, lease_id, deadline, record.ts_ms, count, record.data, record.tag, record.meta)
            for record, lease_id, deadline, count in zip(
                records, self.lease_ids, self.deadlines, self.deliveries, strict=True
            )
        ]

    def texts(self) -> list[bytes]:
        """Each job as the JSON object of the wire contract. Stored JSON goes out as the text that came in."""
        if isinstance(self._pieces, Texts):
            times_ms, datas = self._pieces
            plain = zip(self.seqs, self.lease_ids, self.deadlines, times_ms, self.deliveries, datas, strict=True)
            return [
                b'{"$seq":%d,"lease_id":"lease_%x","deadline":%d,"$ts":%d,"deliveries":%d,"data":%b}' % each
                for each in plain
            ]
        columns = zip(self.seqs, self.lease_ids, self.deadlines, self.waiting_since(), strict=True)
        heads = [b'{"$seq":%d,"lease_id":"lease_%x","deadline":%d,"$ts":%d' % each for each in columns]
        tails = [tail for piece in self._pieces for tail in _tails(piece)]
        return [
            b'%b%b,"deliveries":%d%b}' % (head, tag, count, rest)
            for head, count, (tag, rest) in zip(heads, self.deliveries, tails, strict=True)
        ]

    def waiting_since(self) -> list[int]:
        """When each was enqueued."""
        if isinstance(self._pieces, Texts):
            return self._pieces.times_ms
        return [ts_ms for piece in self._pieces for ts_ms in (piece.rows.ts_us // 1000).tolist()]


def _tails(piece: Piece) -> list[tuple[bytes, bytes]]:
    """Tag, and data with meta, of each record as JSON."""
    rows, json = piece
    datas = values(rows.buf, rows.data)
    if json.all():
        rests = [b',"data":' + data for data in datas]
    else:
        shown = zip(datas, json.tolist(), strict=True)
        rests = [
            b',"data":' + data if is_json else b',"data":"%b","$encoding":"base64"' % b64encode(data)
            for data, is_json in shown
        ]
    if rows.meta is not None:
        metas = values(rows.buf, rows.meta)
        rests = [rest + b',"meta":' + meta if meta else rest for rest, meta in zip(rests, metas, strict=True)]
    if rows.tag is None:
        return [(b"", rest) for rest in rests]
    tags = [b',"$tag":' + _quote(tag.decode()) if tag else b"" for tag in values(rows.buf, rows.tag)]
    return list(zip(tags, rests, strict=True))
