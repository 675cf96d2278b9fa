"""[policy] Content codings: which one a peer gets, and the codecs behind them.

`Accept-Encoding` is read as RFC 9110, 12.5.3 has it:
  1. The coding with the highest q above 0 wins; of equals zstd, which is several times cheaper here than gzip.
  2. `identity` is always acceptable, unless it or `*` was given q=0; named with a higher q than the rest, it wins.
  3. Where nothing we know is acceptable, the answer goes out as it is: better than no answer.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

import pyarrow as pa

from tidelog.engine.expansion import STEP_BYTES

GZIP: Final = b"gzip"
ZSTD: Final = b"zstd"
CODINGS: Final = (ZSTD, GZIP)  # in the order of our preference
_ALIASES: Final = {b"x-gzip": GZIP}
_GZIP_WBITS: Final = 31
_LEVEL: Final = 1  # of either: the next ones are 1.4 times slower and save one byte in a hundred of JSON rows
_WINDOW_BYTES: Final = 16 << 10  # of compressed bytes, handed to zlib at once
_MEMBERS_MAX: Final = (
    1_024  # of a gzip body, unless each has some bytes: one costs 5 µs, and is 20 bytes when it is empty
)
_MEMBER_BYTES_MIN: Final = 64


class Choice(NamedTuple):
    coding: bytes | None  # None: as it is
    must: bool = False  # the peer does not take it as it is, however small


@lru_cache(maxsize=512)
def choose(accept: bytes) -> Choice:
    """The coding for an answer, by an `Accept-Encoding` header."""
    weights: dict[bytes, float] = {}
    for item in accept.lower().split(b","):
        name, *parameters = (part.strip() for part in item.split(b";"))
        weight = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition(b"=")
            if key.strip() == b"q":
                try:
                    weight = float(value)
                except ValueError:
                    weight = 0.0
        if name:
            weights[_ALIASES.get(name, name)] = weight
    rest = weights.get(b"*", 0.0)
    best = max(CODINGS, key=lambda coding: weights.get(coding, rest))
    weight = weights.get(best, rest)
    identity = weights.get(b"identity")
    if weight <= 0 or (identity is not None and identity > weight):
        return Choice(None)
    return Choice(best, must=identity == 0 or (identity is None and weights.get(b"*") == 0))


def known(header: bytes) -> bytes | None:
    """The coding that a `Content-Encoding` header names; b"" for none at all, None where we cannot read it."""
    name = header.strip().lower()
    name = _ALIASES.get(name, name)
    if name in CODINGS:
        return name
    return b"" if name in (b"", b"identity") else None


# Whole bodies.


class TooMuch(Exception):
    """What was coded is larger than its reader takes."""


class NotCoded(Exception):
    """The bytes are not in the coding that they were said to be in."""


def encode(coding: bytes, data: bytes) -> bytes:
    if coding == ZSTD:
        packed: bytes = pa.Codec("zstd", compression_level=_LEVEL).compress(data, asbytes=True)
        return packed
    packer = zlib.compressobj(_LEVEL, wbits=_GZIP_WBITS)
    return packer.compress(data) + packer.flush()


def decode(coding: bytes, data: bytes, limit: int) -> bytes:
    """The bytes as they were. Raises TooMuch without having made more than `limit` of them, or NotCoded."""
    parts: list[bytes] = []
    left = limit
    for part in _unzstd(data) if coding == ZSTD else _ungzip(data):
        left -= len(part)
        if left < 0:
            raise TooMuch
        parts.append(part)
    return b"".join(parts)


def _unzstd(data: bytes) -> Iterator[bytes]:
    try:
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as source:
            while part := source.read(STEP_BYTES):
                yield part
    except OSError as error:
        raise NotCoded(str(error)) from error


def _ungzip(data: bytes) -> Iterator[bytes]:
    unpacker = Ungzip()
    yield from unpacker.feed(data)
    unpacker.end()


class Ungzip:
    """gzip, a piece at a time, in bounded steps. Several members in a row are one body, as RFC 1952 has it.

    zlib copies what it did not consume, for each member and each step. So it is fed in windows: with a whole body of
    64 MiB, members of 20 bytes each would cost 64 MiB of copying each.
    """

    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=_GZIP_WBITS)
        self._fresh = True
        self._members, self._came = 1, 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Decode one more piece, in parts of at most `STEP_BYTES`."""
        for start in range(0, len(data), _WINDOW_BYTES):
            window = data[start : start + _WINDOW_BYTES]
            self._came += len(window)
            while window:
                if self._member.eof:
                    self._next_member()
                self._fresh = False
                try:
                    part = self._member.decompress(window, STEP_BYTES)
                except zlib.error as error:
                    raise NotCoded(str(error)) from error
                window = self._member.unconsumed_tail or self._member.unused_data
                if part:
                    yield part
            while not self._member.eof and (part := self._rest()):
                yield part

    def _rest(self) -> bytes:
        """What zlib holds back although it has consumed its input: a step can end in the middle of a match."""
        try:
            return self._member.decompress(b"", STEP_BYTES)
        except zlib.error as error:
            raise NotCoded(str(error)) from error

    def _next_member(self) -> None:
        self._member = zlib.decompressobj(wbits=_GZIP_WBITS)
        self._members += 1
        if self._members > _MEMBERS_MAX and self._members * _MEMBER_BYTES_MIN > self._came:
            raise NotCoded(f"more than {_MEMBERS_MAX} gzip members of less than {_MEMBER_BYTES_MIN} bytes each")

    def end(self) -> None:
        """There are no more pieces."""
        if not self._fresh and not self._member.eof:
            raise NotCoded("the gzip stream breaks off")


# Streams.


class Packer(Protocol):
    """A coding of a stream. Each call returns what is ready to be sent."""

    def add(self, data: bytes) -> bytes: ...

    def flush(self) -> bytes:
        """All that was added, so that the peer can read it now."""
        ...

    def end(self) -> bytes: ...


class _GzipPacker:
    def __init__(self) -> None:
        self._packer = zlib.compressobj(_LEVEL, wbits=_GZIP_WBITS)

    def add(self, data: bytes) -> bytes:
        return self._packer.compress(data)

    def flush(self) -> bytes:
        return self._packer.flush(zlib.Z_SYNC_FLUSH)

    def end(self) -> bytes:
        return self._packer.flush()


class _Spout:
    """A file that only remembers, for a codec that wants one."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self.closed = True

    def taken(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


class _ZstdPacker:
    def __init__(self) -> None:
        self._spout = _Spout()
        self._packer = pa.CompressedOutputStream(pa.PythonFile(self._spout, mode="w"), "zstd")

    def add(self, data: bytes) -> bytes:
        self._packer.write(data)
        return self._spout.taken()

    def flush(self) -> bytes:
        self._packer.flush()
        return self._spout.taken()

    def end(self) -> bytes:
        self._packer.close()
        return self._spout.taken()


def packer(coding: bytes) -> Packer:
    return _ZstdPacker() if coding == ZSTD else _GzipPacker()
