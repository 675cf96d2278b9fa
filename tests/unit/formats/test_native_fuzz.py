"""Every compiled function with random arguments, also such that no caller passes: it returns what the Python function
returns, or raises, and reads and writes no byte outside of its arguments (`make asan` detects that).

Method: seeded random arguments; `TIDELOG_FUZZ_ROUNDS` is the number of rounds.
"""

from __future__ import annotations

import os
from array import array
from contextlib import suppress
from random import Random
from typing import Any, Final

import numpy as np

from tidelog import _native, _pure_python
from tidelog.formats import batch

ROUNDS: Final = int(os.environ.get("TIDELOG_FUZZ_ROUNDS", "1500"))
EDGES: Final = (
    *(0, 1, 2, 3, 7, 8, 9, 255, 256, 4095, 1 << 16),
    *((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 63) - 1),
)
WORDS: Final = (
    *(b'{"records":[', b'{"data":', b"}", b"]}", b",", b'"', b"\\", b"1"),
    *(b"-", b".5", b"true", b"nul", b"[", b"{", b":"),
)


def number(random: Random) -> int:
    edge = random.choice(EDGES)
    return random.choice([edge, -edge, edge - 1, random.randrange(64)])


def octets(random: Random, most: int = 200) -> bytes:
    return random.randbytes(random.choice([0, 1, 3, 4, 7, 8, random.randrange(most)]))


def tried(call: Any, *args: Any) -> Any:
    """What a function returns; None where it refuses its arguments."""
    with suppress(ValueError, OverflowError, TypeError, UnicodeDecodeError, MemoryError):
        return call(*args)
    return None


def copied(module: Any, *args: Any) -> bool:
    try:
        module.copy_values(*args)
    except ValueError:
        return False
    return True


def test_split_by_size_returns_for_every_limit() -> None:
    """A bound of no values never returned."""
    lengths = array("I", [3, 0, 5, 9])
    for count_max in (0, -1, -(1 << 62), 1, 2, 1 << 62):
        assert _native.split_by_size(lengths, 8, count_max) == _pure_python.split_by_size(lengths, 8, count_max)


def test_values_with_random_arguments() -> None:
    for seed in range(ROUNDS):
        random = Random(seed)
        datas = [octets(random, 40) for _ in range(random.randrange(12))]
        assert _native.value_lengths(datas) == _pure_python.value_lengths(datas), seed
        lengths = array("I", map(len, datas))
        size_max, count_max = abs(number(random)), number(random)
        expected = _pure_python.split_by_size(lengths, size_max, count_max)
        assert _native.split_by_size(lengths, size_max, count_max) == expected, seed
        into, copy = bytearray(octets(random)), bytearray()
        copy[:] = into
        pos, lo, hi = (random.choice([number(random), random.randrange(12)]) for _ in range(3))
        made = tried(_native.copy_values_into, into, pos, datas, lo, hi)
        wanted = tried(_pure_python.copy_values_into, copy, pos, datas, lo, hi)
        assert made == wanted, seed
        if made is not None:
            assert into == copy, seed
        tried(_native.borrow_buffer, random.choice([-1, 0, 1 << 62, (1 << 63) - 1, random.randrange(99_999)]))
        for place in (
            (octets(random), number(random), number(random), number(random)),
            (octets(random), 0, random.randrange(200), random.randrange(9)),
        ):
            assert tried(_native.find_frames, *place) == tried(_pure_python.find_frames, *place), seed


def test_bodies_with_random_arguments() -> None:
    for seed in range(ROUNDS):
        random = Random(seed)
        body = b"".join(random.choice([*WORDS, octets(random, 9)]) for _ in range(random.randrange(16)))
        if random.random() < 0.7:
            body = b'{"records":[{"data":' + body
        cut = body[: random.randrange(len(body) + 1)]
        for text in (body, cut):
            tried(_native.parse_plain_body, text, number(random))
            tried(_native.parse_plain_bodies, [text, cut], number(random), number(random))
        alone = _native.parse_plain_body(body, 10)
        if alone is not None and body.isascii():
            assert _native.parse_plain_bodies([body], 10, len(body)) == (alone, [len(alone)]), seed


def test_json_values_with_random_arguments() -> None:
    """Texts that are cut anywhere and places outside of the buffer: nothing outside of it is read."""
    texts = (b'{"a":{"b":"k"}}', b'{"a" : [1, -2.5e-7, "\\ud83d\\ude00x"], "b":null}', b'{"a":"\xc3\xa9"}', b'{"a":tru')
    for seed in range(ROUNDS):
        random = Random(seed)
        text = bytearray(b"".join(random.choice([*texts, *WORDS]) for _ in range(random.randrange(1, 5))))
        for _ in range(random.choice([0, 0, 1, 3])):
            text[random.randrange(len(text))] = random.choice([0, 34, 92, 123, 255, random.randrange(256)])
        count = random.randrange(4)
        pos = np.array([random.randrange(len(text)) for _ in range(count)], np.int64)
        size = np.array([random.randrange(len(text) + 1 - int(at)) for at in pos], np.int64)
        if count and random.random() < 0.1:
            random.choice([pos, size])[0] = number(random) % (1 << 62)
        starts, sizes = np.zeros(count + random.choice([0, 0, 0, 1]), np.int64), np.zeros(count, np.int64)
        names = tuple(
            random.choice([b"a", b"b", b"", octets(random, 9)]) for _ in range(random.choice([0, 1, 1, 2, 33]))
        )
        left = tried(_native.find_json_values, starts, sizes, bytes(text), pos, size, names)
        if left is not None:
            assert left == (sizes < 0).sum(), seed
            inside = (starts >= pos) & (starts + np.maximum(sizes, 0) <= pos + size)
            assert inside.all(), seed


def test_rows_with_random_arguments() -> None:
    for seed in range(ROUNDS):
        random = Random(seed)
        count, buf = random.randrange(5), octets(random)

        def column(near: int, count: int = count, random: Random = random) -> Any:
            made = [random.choice([number(random), random.randrange(near + 1)]) % (1 << 64) for _ in range(count)]
            return np.array(made, np.uint64).view(np.int64)

        def span(buf: bytes = buf, random: Random = random, column: Any = column) -> Any:
            return None if random.random() < 0.2 else (column(len(buf)), column(9))

        flags = np.array([random.random() < 0.5 for _ in range(count)], bool)
        tried(
            _native.encode_json_rows,
            buf,
            column(9),
            column(9),
            flags,
            span(),
            span(),
            span(),
            span(),
            octets(random, 5),
            b"]",
        )
        place = [random.choice([number(random), random.randrange(200)]) for _ in range(7)]
        made = tried(_native.encode_json_batch, buf, *place)
        assert made is None or made == _pure_python.encode_json_batch(buf, *place), seed
        into, edges = bytearray(random.randrange(64)), bytearray(4 * (count + random.choice([0, 1, 1, 1, 2])))
        values, reference = (buf, column(len(buf)), column(9)), (bytearray(into), bytearray(edges))
        made = [copied(_native, into, edges, *values), copied(_pure_python, *reference, *values)]
        assert made[0] == made[1], seed
        if made[0]:
            assert (into, edges) == reference, seed
        entries = octets(random, 8 * 24)
        memory = [np.zeros(random.choice([8, 9]), np.int64) for _ in range(8)]
        node, tag = (random.choice([None, (memory[at], memory[at + 1])]) for at in (4, 6))
        marks = np.zeros(9, np.uint8)
        columns = (memory[0], memory[1], marks, (memory[2], memory[3]), node, tag)
        tried(_native.fill_indexed_records, buf, entries, number(random), number(random), *columns)


def test_responses_with_random_arguments() -> None:
    for seed in range(ROUNDS):
        random = Random(seed)
        first = random.choice([random.randrange(1 << 62), number(random)])
        counts = [random.choice([random.randrange(1, 50), number(random)]) for _ in range(random.randrange(4))]
        took_us = [random.choice([random.randrange(10**6), number(random)]) for _ in counts]
        parts = [octets(random, 30) for _ in range(4)]
        small = all(0 < count < 1000 for count in counts) and min(took_us, default=0) >= 0
        if small and 0 <= first <= (1 << 63) - 10_000 and max(took_us, default=0) < 10**12:
            assert _native.encode_write_responses(
                first, counts, took_us, *parts
            ) == _pure_python.encode_write_responses(first, counts, took_us, *parts), seed
        elif sum(abs(count) for count in counts) < 10_000:
            tried(_native.encode_write_responses, first, counts, took_us, *parts)
        tried(_native.encode_write_responses, first, [1 << 62, -1], [0, 0], *parts)


def test_frames_with_random_arguments() -> None:
    """Positions that no scan returns: nothing outside of the buffers is read or written."""
    for seed in range(ROUNDS):
        random = Random(seed)
        frames = [
            batch.encode_many(7, 1 + 3 * n, 5, [octets(random, 40) for _ in range(3)], flags=random.choice([0, 16]))[0]
            for n in range(random.randrange(1, 4))
        ]
        buf = bytearray(b"".join(frames))
        for _ in range(random.choice([0, 0, 1, 3])):  # fields of frames, with any value
            buf[random.randrange(len(buf))] = random.choice([0, 1, 255, random.randrange(256)])
        starts = np.cumsum([0, *map(len, frames)])[:-1]
        ends = np.append(starts[1:], len(buf)) - 8
        if random.random() < 0.3:
            at = random.randrange(len(starts))
            random.choice([starts, ends])[at] = number(random)
        counts = [tried(module.count_valid_checksums, bytes(buf), starts, ends) for module in (_native, _pure_python)]
        assert counts[0] == counts[1], seed
        frame_pos = np.repeat(starts, random.choice([1, 3, 3, 3, 4]))
        removed = np.array([random.random() < 0.5 for _ in frame_pos], bool)
        target = bytearray(random.choice([0, 50, len(buf), len(buf)]))
        end = random.choice([len(buf), len(buf), number(random)])
        size = tried(
            _native.remove_records, target, bytes(buf), frame_pos, removed, end, 1000, random.choice([1, 2, 9])
        )
        assert size is None or -1 <= size <= len(target), seed
        values = [np.array([random.randrange(-1, 40) for _ in range(3)]) for _ in range(3)]
        other = octets(random)
        arguments = (bytes(buf), values[0], values[1], other, values[2])
        assert tried(_native.have_equal_values, *arguments) == tried(_pure_python.have_equal_values, *arguments), seed
