"""[hot] Heads that came before. A client sends the same one with every small write, and it need not be read again.

    piece ──► head, hashed ──► known? ──yes──► is the rest exactly its body? ──yes──► its way: alone, or the lobby
                                 └──no───────────────┴──no──► the parser, as ever

It is known by all of it but the digits of its Content-Length: a client's records are not all of one size.

Only what the parser and the application found to be in order is learned, with the application's own answer to how
the like of it may be taken. Kept are hashes that nobody can make collide, because heads carry keys.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple

from tidelog.server.http.gate import body_of
from tidelog.server.http.lobby import Lobby
from tidelog.server.http.seam import Alone, Express, Together

if TYPE_CHECKING:
    from tidelog.server.http.house import House

_HEADS_MAX: Final = 4096
_END: Final = b"\r\n\r\n"
_LENGTH: Final = re.compile(rb"(?i)\r\ncontent-length:[ \t]*(0|[1-9]\d{0,4})[ \t]*\r\n")


class Memo(NamedTuple):
    """A head, as a connection sent it and will most likely send it again."""

    before: bytes  # up to the digits of its body's length
    after: bytes  # and from behind them
    take: Alone | None
    lobby: Lobby | None  # where those who are taken together wait

    def body(self, piece: bytes) -> bytes | None:
        """The body of the request that `piece` is, if it has this head."""
        return body_of(piece, self.before, self.after)


class Known:
    """The heads that the connections of one listener have seen."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._heads: dict[bytes, tuple[Alone | None, Lobby | None]] = {}
        self._lobbies: dict[Together, Lobby] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def learn(self, piece: bytes, way: Express) -> None:
        """The head at the front of `piece` was in order, and the like of it go this way."""
        parts = _parted(piece[: piece.index(_END) + 4])
        if parts is None:
            return
        if len(self._heads) >= _HEADS_MAX:  # whoever sends so many different ones gains nothing here
            self._heads.clear()  # others are learned again
            self._lobbies.clear()
        if isinstance(way, Together):
            lobby = self._lobbies.get(way)
            if lobby is None:
                lobby = self._lobbies[way] = Lobby(self._house, way)
            self._heads[_key(*parts[:2])] = (None, lobby)
        else:
            self._heads[_key(*parts[:2])] = (way, None)

    def find(self, piece: bytes) -> tuple[Memo, bytes] | None:
        """What is known of the head of the request that `piece` is, to its last byte, and its body."""
        end = piece.find(_END) + 4
        parts = _parted(piece[:end])
        if parts is None or parts[2] != len(piece) - end:
            return None
        before, after, _ = parts
        found = self._heads.get(_key(before, after))
        return None if found is None else (Memo(before, after, *found), piece[end:])


def _parted(head: bytes) -> tuple[bytes, bytes, int] | None:
    """A head before and behind the digits of its body's length, and that length; None: it says none, or oddly."""
    found = _LENGTH.search(head)
    return None if found is None else (head[: found.start(1)], head[found.end(1) :], int(found[1]))


def _key(before: bytes, after: bytes) -> bytes:
    return sha256(b"%b\0%b" % (before, after)).digest()
