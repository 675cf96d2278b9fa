"""[hot] The body of a plain write: `{"records":[{"data":…},…]}` and nothing else, in the text that will be stored.

body ──► the kernel, one pass ──► the text of each record        where every byte is as it will be stored
              └── anything else ──► its twin in Python, which also knows blanks, escapes, exponents, depth
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from tidelog.engine import EngineConfig, encode, texts
from tidelog.errors import BadInput
from tidelog.wire import requests

try:
    from tidelog.kernel import datas as _compiled
    from tidelog.kernel import datas_of as _compiled_all
except ImportError:  # built where there was no compiler

    def _compiled(body: bytes, most: int) -> list[bytes] | None:  # noqa: ARG001 - as the kernel has it
        return None

    def _compiled_all(bodies: list[bytes], most: int, size_max: int) -> tuple[list[bytes], list[int]] | None:  # noqa: ARG001
        return None


_SLICE_BYTES: Final = 1 << 20  # searched at once
_BRACES_PER_RECORD: Final = 16
_KEY_BYTES_MAX: Final = 64  # of "records" with every letter escaped: 44
_TOKEN: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{}]', re.DOTALL)
_decode = requests.decoder(requests.PlainWrite).decode


def check_records(body: bytes, limits: EngineConfig) -> None:
    """Refuse a body with far too many records before it is decoded: one call of the decoder holds the interpreter, and
    each record takes 16 times its text. Five million of them in 60 MiB took 1.6 s and 980 MiB.

    Every record has a brace. Bodies with few braces are decoded at once; the others are scanned up to the record that
    is one too many, and other threads run between two tokens."""
    most = limits.batch_records_max
    braces = 0
    for start in range(0, len(body), _SLICE_BYTES):
        braces += body.count(b"{", start, start + _SLICE_BYTES)
    if braces <= _BRACES_PER_RECORD * most:
        return
    depth = count = 0
    key, in_records = b"", False
    for token in _TOKEN.finditer(body):
        found = token[0]
        if found[:1] == b'"':
            if depth == 1:
                key = found
        elif found in (b"}", b"]"):
            depth -= 1
        else:
            if depth == 1:
                in_records = found == b"[" and _is_records(key)
            elif depth == 2 and in_records:
                count += 1
                if count > most:
                    encode.check_count(limits, count)
            depth += 1


def _is_records(key: bytes) -> bool:
    if b"\\" not in key:
        return key == b'"records"'
    try:
        return len(key) <= _KEY_BYTES_MAX and msgspec.json.decode(key) == "records"
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def plain(body: bytes, limits: EngineConfig) -> list[bytes] | None:
    """The records of a body that are nothing but data; None for all else, and for what has to be refused."""
    try:
        if not body.isascii():
            body.decode()
    except UnicodeDecodeError:
        return None
    most = limits.batch_records_max
    datas = _compiled(body, most) if limits.kernel else None
    if datas is None:
        datas = _plain(body, most)
    if datas is None or (len(body) > limits.record_bytes_max and max(map(len, datas)) > limits.record_bytes_max):
        return None
    return datas


def plain_all(bodies: list[bytes], limits: EngineConfig, most: int) -> tuple[list[bytes], list[int]]:
    """The records of all of them, and how many are each one's: 0 where it is not plain or they are more than `most`."""
    most = min(most, limits.batch_records_max)
    found = _compiled_all(bodies, most, limits.record_bytes_max) if limits.kernel else None
    if found is not None:
        return found
    datas: list[bytes] = []
    counts: list[int] = []
    for body in bodies:
        try:
            of_one = plain(body, limits)
        except BadInput:
            of_one = None
        taken = of_one if of_one is not None and len(of_one) <= most else []
        datas += taken
        counts.append(len(taken))
    return datas, counts


def _plain(body: bytes, most: int) -> list[bytes] | None:
    try:
        records = _decode(body).records
    except (msgspec.DecodeError, RecursionError):
        return None
    if not 0 < len(records) <= most:
        return None
    datas: list[bytes] = [bytes(record.data) for record in records]
    if texts.is_loose(body):
        datas = [texts.compact(data) for data in datas]
    texts.check_depths(body, datas)
    return datas
