"""[hot] Heads that came before. A client sends the same one with every small write, and it need not be read again.

    piece ──► head, hashed ──► known? ──yes──► is the rest exactly its body? ──yes──► Express(body, ticket)
                                 └──no───────────────┴──no──► the parser, as ever

Only what the parser and the application found to be in order is learned, with the application's own answer to how
the like of it may be taken. Kept are hashes that nobody can make collide, because heads carry keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple

from tidelog.server.http import reply
from tidelog.server.http.seam import Express, Response

if TYPE_CHECKING:
    from tidelog.server.http.h1 import H1

PIECE_BYTES_MAX: Final = 64 << 10  # larger requests are worth the parser
_HEADS_MAX: Final = 4096
_END: Final = b"\r\n\r\n"


class _Head(NamedTuple):
    length: int  # of its body
    take: Express


class Memo(NamedTuple):
    """The head that a connection sent last, and will most likely send again."""

    head: bytes
    size: int  # of the whole request
    take: Express


class Known:
    """The heads that the connections of one listener have seen."""

    def __init__(self) -> None:
        self._heads: dict[bytes, _Head] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def learn(self, piece: bytes, length: int, take: Express) -> None:
        """The head at the front of `piece` was in order, has a body of so many bytes, and the like is for `take`."""
        if len(self._heads) >= _HEADS_MAX:
            self._heads.clear()  # whoever sends so many different ones gains nothing here; others are learned again
        self._heads[sha256(piece[: piece.index(_END) + 4]).digest()] = _Head(length, take)

    def find(self, piece: bytes) -> Memo | None:
        """What is known of the head of the request that `piece` is, to its last byte."""
        end = piece.find(_END) + 4
        text = piece[:end]
        head = self._heads.get(sha256(text).digest())
        if head is None or len(piece) - end != head.length:
            return None
        return Memo(text, len(piece), head.take)


class Pass:
    """The turn of a request whose head is known: a `Turn` that has nothing left to do but to answer. One a connection,
    because one is under way at a time."""

    complete = sound = keep = True
    held_bytes = 0

    def __init__(self, connection: H1) -> None:
        self._connection = connection
        self._away = False

    def answer(self, body: bytes, request_id: bytes) -> None:
        house = self._connection.house
        says = reply.CLOSE if house.draining else b""
        self._write(reply.json(body, request_id, house.dates.refresh().line, says))

    def answer_in(self, pieces: Sequence[bytes], request_id: bytes) -> None:
        house = self._connection.house
        says = reply.CLOSE if house.draining else b""
        head = reply.json_head(sum(map(len, pieces)), request_id, house.dates.refresh().line, says)
        self._write(head + pieces[0], *pieces[1:])

    def respond(self, response: Response) -> None:
        house = self._connection.house
        says = reply.CLOSE if house.draining else b""
        self._write(*reply.whole(response, house.dates.refresh().line, says, False))

    def _write(self, *data: bytes) -> None:
        if self._away:
            return
        connection = self._connection
        connection.write(*data)
        if connection.house.draining:
            connection.last(self)
        else:
            connection.next(self)

    def leave(self) -> None:
        self._away = True
