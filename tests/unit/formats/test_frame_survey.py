"""`scan_headers` against a reader of one frame at a time, and the records that are decoded from it.

WAL content is generated from a seed: topics and control frames mixed, batches chained and chains broken, names short,
long and of every script; then cut, flipped, zeroed, lengthened, or sealed again around a wrong header. `test_scan.py`
verifies the reader of one frame at a time with code that shares nothing with it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
import xxhash
from tests.frames import FrameReader, encode_batch
from tests.implementations import implementation

from tidelog import _native
from tidelog.errors import Corrupt
from tidelog.formats import frame, scan
from tidelog.formats.frame import APPEND, APPEND_BATCH, DURABLE, HEADER_BYTES, JSON, MORE
from tidelog.formats.rows import ScanStop, iter_records
from tidelog.types import Record

TS = 1_700_000_000_000
TOPICS = (1, 10, 1 << 63)
NAMES = [b"", b"n1", "knöten".encode(), b"long" * 40, "名".encode() * 50]


def scan_both_ways(buf: bytes, pos: int = 0, end: int | None = None) -> tuple[object, ...]:
    at, heads, *rest = scan.scan_headers(buf, pos, end)
    assert heads.dtype == frame.HEADER
    with implementation(compiled=False):
        plain_at, plain_heads, *plain = scan.scan_headers(buf, pos, end)
    assert (plain_at.tolist(), plain_heads.tobytes(), plain) == (at.tolist(), heads.tobytes(), rest)
    return at.tolist(), heads.tobytes(), *rest


def read_one_by_one(buf: bytes, pos: int = 0, end: int | None = None) -> tuple[object, ...]:
    """What `scan_both_ways` should say, frame by frame."""
    scanner = FrameReader(buf, pos, end)
    seen = [found.pos for found in scanner]
    kept = [start for start in seen if start < scanner.whole_end]
    heads = b"".join(buf[start : start + HEADER_BYTES] for start in kept)
    return kept, heads, scanner.end, scanner.whole_end, scanner.stop, scanner.reason


def sealed(covered: bytes) -> bytes:
    return struct.pack("<I", len(covered) + 8) + covered + struct.pack("<Q", xxhash.xxh3_64(covered).intdigest())


def lying(kind: int = APPEND, flags: int = 3, seq: int = 2, ts: int = TS, **fields: Any) -> bytes:
    """A frame of topic 10 whose header says what it likes under a checksum that holds."""
    node, tag, data = (fields.get(name, value) for name, value in (("node", b"n"), ("tag", b"t"), ("data", b"two")))
    lengths = fields.get("lengths", (len(node), len(tag), len(data)))
    return sealed(struct.pack("<BBQQQHHI", kind, flags, 10, seq, ts, *lengths) + node + tag + data)


# WALs made by chance ---------------------------------------------------------------------------------


class Maker:
    """Pieces of a WAL in the order they are written, and the records that they hold."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.pieces: list[bytes] = []
        self.records: dict[int, list[Record]] = {topic: [] for topic in TOPICS}
        self.seqs = dict.fromkeys(TOPICS, 1)
        self.ts = TS

    def grow(self) -> None:
        random = self.random
        self.ts += random.choice((0, 1, 1000))
        topic = random.choice(TOPICS)
        shape = random.random()
        if shape < 0.2:
            kind = random.choice([kind for kind in frame.FRAME_NAMES if kind not in (APPEND, APPEND_BATCH)])
            flags = random.choice((0, DURABLE))
            data = random.randbytes(random.randrange(30))
            self.pieces.append(frame.encode(kind, topic_id=topic, ts_ms=self.ts, data=data, flags=flags))
        elif shape < 0.6:
            self.append(topic, 0)
        else:
            count = random.choice((1, 2, 3))
            for number in range(count):
                random.choice((self.append, self.batch))(topic, MORE if number + 1 < count else 0)

    def append(self, topic: int, flags: int) -> None:
        random = self.random
        node, tag = random.choice(NAMES), random.choice(NAMES)
        data = random.randbytes(random.randrange(9))
        flags |= random.choice((0, DURABLE, JSON))
        made = frame.encode(
            APPEND, topic_id=topic, seq=self.seqs[topic], ts_ms=self.ts, data=data, node=node, tag=tag, flags=flags
        )
        self.wrote(topic, made, [(data, node, tag, b"")])

    def batch(self, topic: int, flags: int) -> None:
        random = self.random
        datas = [random.randbytes(random.randrange(6)) for _ in range(random.randrange(1, 5))]
        blank = [b""] * len(datas)
        tags = [random.choice((b"", b"t")) for _ in datas] if random.random() < 0.3 else None
        metas = [random.choice((b"", b"m")) for _ in datas] if random.random() < 0.3 else None
        node = random.choice((b"", b"n1"))
        flags |= random.choice((0, JSON))
        made = encode_batch(topic, self.seqs[topic], self.ts, datas, tags=tags, metas=metas, node=node, flags=flags)
        rows = zip(datas, [node] * len(datas), tags or blank, metas or blank, strict=True)
        self.wrote(topic, made, list(rows))

    def wrote(self, topic: int, made: bytes, values: list[tuple[bytes, bytes, bytes, bytes]]) -> None:
        first = self.seqs[topic]
        self.pieces.append(made)
        self.records[topic] += [Record(first + i, self.ts * 1000, *value) for i, value in enumerate(values)]
        self.seqs[topic] += len(values)


def make(random: Random, count_max: int = 12) -> Maker:
    maker = Maker(random)
    for _ in range(random.randrange(1, count_max)):
        maker.grow()
    return maker


def damage(random: Random, pieces: list[bytes]) -> bytes:
    buf = b"".join(pieces)
    out = bytearray(buf)
    number = random.randrange(len(pieces))
    match random.randrange(9):
        case 0:
            return buf
        case 1:
            return buf[: random.randrange(len(buf) + 1)]
        case 2:
            out[random.randrange(len(buf))] ^= random.randrange(1, 256)
        case 3:
            lo = random.randrange(len(buf))
            hi = min(len(buf), lo + random.choice((1, 4, 38, 46, 100)))
            out[lo:hi] = bytes(hi - lo)
        case 4:
            return buf + bytes(random.randrange(100))
        case 5:
            return buf + bytes(random.randrange(3)) + random.randbytes(random.randrange(60))
        case 6:  # a frame is missing, which may leave a chain that something interrupts
            return b"".join(pieces[:number] + pieces[number + 1 :])
        case 7:  # a frame in the wrong place
            at = random.randrange(len(pieces) + 1)
            return b"".join([*pieces[:at], pieces[number], *pieces[at:]])
        case 8:  # a wrong header with a checksum that holds
            covered = bytearray(pieces[number][4:-8])
            for _ in range(random.randrange(1, 3)):
                where = random.choice((0, 1, 1, 2, 17, 25, 26, 28, 30, 34, random.randrange(len(covered))))
                covered[min(where, len(covered) - 1)] = random.choice((0, 1, 8, 9, 12, 16, 32, 128, 255))
            return b"".join([*pieces[:number], sealed(bytes(covered)), *pieces[number + 1 :]])
    return bytes(out)


@pytest.mark.parametrize("seed", range(80))
def test_scan_headers_agrees_with_reading_frame_by_frame(seed: int) -> None:
    """G52, G58."""
    random = Random(seed)
    for _ in range(25):
        buf = damage(random, make(random).pieces)
        assert scan_both_ways(buf) == read_one_by_one(buf), (seed, buf.hex())
        around = b"\xee" * 5 + buf + b"\xee" * 50
        assert scan_both_ways(around, 5, 5 + len(buf)) == read_one_by_one(around, 5, 5 + len(buf)), (seed, buf.hex())


def test_the_generated_damage_has_every_kind() -> None:
    """A property that never meets a torn chain or an interrupted one proves nothing of them."""
    random = Random(1)
    reasons = "|".join(scan.scan_headers(damage(random, make(random).pieces)).reason for _ in range(3000))
    for words in (
        "checksum mismatch",
        "breaks off",
        "is interrupted by",
        "bytes are left",
        "are left",
        "below the smallest",
        "add up",
        "unknown frame type",
        "unknown flags",
        "the flag MORE",
        "the flag JSON",
        "larger than a log can store",
        "the node has no flag",
        "the tag has no flag",
    ):
        assert words in reasons


@pytest.mark.parametrize("seed", range(3))
def test_scan_headers_agrees_for_every_cut_and_every_changed_byte(seed: int) -> None:
    """G52, G58."""
    random = Random(seed)
    buf = b"".join(make(random, 7).pieces) + bytes(50)
    for size in range(len(buf)):
        assert scan_both_ways(buf[:size]) == read_one_by_one(buf[:size]), size
        assert scan_both_ways(buf, 0, size) == read_one_by_one(buf, 0, size), size
    for pos, byte in enumerate(buf):
        for mask in (1, 8, 16, 128, 255):
            broken = buf[:pos] + bytes((byte ^ mask,)) + buf[pos + 1 :]
            assert scan_both_ways(broken) == read_one_by_one(broken), (pos, mask)


@pytest.mark.parametrize("seed", range(30))
def test_random_bytes_never_raise(seed: int) -> None:
    """G58."""
    random = Random(seed)
    one = frame.encode(APPEND, topic_id=10, seq=1, ts_ms=TS)
    for _ in range(60):
        buf = random.randbytes(random.randrange(200))
        if random.random() < 0.5:
            buf = one + struct.pack("<I", random.randrange(200)) + buf
        assert scan_both_ways(buf) == read_one_by_one(buf)


# By hand ---------------------------------------------------------------------------------------------

ONE = lying(seq=1)
WRONG_HEADERS = [
    {"kind": 0},
    {"kind": 19},
    {"flags": 32 | 3},
    {"flags": 255},
    {"kind": frame.LEASE, "flags": MORE | 3},
    {"kind": frame.DELETE, "flags": JSON | 3},
    {"flags": 1},
    {"flags": 2},
    {"seq": 1 << 63},
    {"ts": frame.TS_MS_MAX + 1},
    {"lengths": (2, 1, 3)},
    {"lengths": (1, 1, (1 << 32) - 1)},
    {"lengths": (9, 1, (1 << 32) - 5)},  # adds up in 32 bits
    # So does this one, and its node is text to the last byte, which is the first of the checksum.
    {"lengths": (10, 0, (1 << 32) - 1), "node": b"", "tag": b"", "data": b"nine byte", "ts": TS + 1},
    {"node": b"\xff"},
    {"tag": b"\xff"},
    {"node": b"\xc3", "tag": b"\xa9"},
    {"node": b"x" * 200, "tag": b"\xff" * 200},
]


@pytest.mark.parametrize("lie", WRONG_HEADERS)
def test_a_header_that_read_frame_refuses_ends_the_scan(lie: dict[str, Any]) -> None:
    """G58. All headers are judged together; the rules are those for one."""
    bad = lying(**lie)
    alone = frame.read_frame(bad, 0, len(bad))
    assert isinstance(alone, frame.Fault)
    for many in (1, 40):
        got = scan.scan_headers(ONE * many + bad + ONE * many)
        assert (len(got.frame_pos), got.end, got.whole_end) == (many, len(ONE) * many, len(ONE) * many)
        assert (got.stop, got.reason) == alone


@pytest.mark.parametrize("size", range(34))
def test_a_frame_too_small_for_a_header_is_bad_however_good_its_checksum(size: int) -> None:
    """G58. Where it is the last, its header would end after the end of the buffer."""
    for tail in (b"", bytes(4), b"\1" * 4, bytes(60)):
        buf = ONE + sealed(b"x" * size) + tail
        assert scan_both_ways(buf) == read_one_by_one(buf)
        assert scan.scan_headers(buf)[2:4] == (len(ONE), len(ONE))


def chain(*frames: tuple[int, int, int]) -> bytes:
    return b"".join(
        frame.encode(kind, topic_id=topic, seq=i, ts_ms=TS, flags=flags)
        for i, (kind, topic, flags) in enumerate(frames)
    )


@pytest.mark.parametrize(
    ("frames", "end", "whole", "stop", "words"),
    [
        ([(1, 1, 0), (1, 1, MORE), (12, 1, MORE), (1, 1, 0)], 4, 4, ScanStop.END, ""),
        ([(1, 1, 0), (1, 1, MORE), (12, 1, MORE)], 3, 1, ScanStop.TORN, "starts at byte 46 breaks off"),
        ([(1, 1, MORE)], 1, 0, ScanStop.TORN, "starts at byte 0 breaks off"),
        ([(1, 1, 0), (1, 1, MORE), (1, 2, 0), (1, 1, 0)], 2, 1, ScanStop.BAD, "by a Append frame of topic 2"),
        ([(1, 1, 0), (1, 1, MORE), (11, 1, 0), (1, 1, 0)], 2, 1, ScanStop.BAD, "by a HeadWatermark frame of topic 1"),
        ([(1, 1, MORE), (1, 1, 0), (1, 1, MORE), (1, 1, MORE), (8, 0, 0)], 4, 2, ScanStop.BAD, "CheckpointMark"),
    ],
)
def test_a_batch_is_scanned_whole_or_not_at_all(
    frames: list[tuple[int, int, int]], end: int, whole: int, stop: ScanStop, words: str
) -> None:
    """G4, G52."""
    got = scan.scan_headers(chain(*frames))
    assert (got.end, got.whole_end, got.stop) == (46 * end, 46 * whole, stop)
    assert words in got.reason
    assert got.frame_pos.tolist() == [46 * i for i in range(whole)]
    assert got.headers["topic_id"].tolist() == [topic for _, topic, _ in frames[:whole]]


def test_preallocated_zeros_and_no_bytes_end_a_scan_cleanly() -> None:
    """G34."""
    for tail in (b"", bytes(3), bytes(4), bytes(5000)):
        assert scan_both_ways(tail) == ([], b"", 0, 0, ScanStop.END, "")
        assert scan.scan_headers(ONE + tail)[2:] == (len(ONE), len(ONE), ScanStop.END, "")


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_bytes_bytearrays_and_mapped_files_give_equal_scans(wrap: Callable[[bytes], Any]) -> None:
    buf = ONE + lying(node="é".encode()) + lying(node=b"x" * 300)
    got = scan.scan_headers(wrap(buf))
    assert (len(got.frame_pos), got.whole_end, got.stop) == (3, len(buf), ScanStop.END)
    assert got.headers["node_len"].tolist() == [1, 2, 300]


# Records ---------------------------------------------------------------------------------------------


def of_topic(buf: bytes, topic: int) -> Iterator[Record]:
    found = scan.scan_headers(buf)
    held = (found.headers["kind"] == APPEND) | (found.headers["kind"] == APPEND_BATCH)
    mine = np.flatnonzero(held & (found.headers["topic_id"] == topic))
    return iter_records(scan.decode_records(buf, found.frame_pos[mine], found.headers[mine]))


@pytest.mark.parametrize("seed", range(40))
def test_the_records_decoded_are_those_that_were_written(seed: int) -> None:
    """G1, G14: seq, time, node, tag, meta and bytes of each, in the order of the WAL."""
    random = Random(seed)
    for _ in range(10):
        maker = make(random, 25)
        buf = b"".join(maker.pieces)
        for topic in TOPICS:
            assert list(of_topic(buf, topic)) == maker.records[topic], (seed, topic)


@pytest.mark.parametrize("seed", range(20))
def test_decode_records_agrees_with_scan_records_of_one_topic(seed: int) -> None:
    random = Random(seed)
    maker = make(random, 25)
    for topic in TOPICS:
        held = [piece for piece in maker.pieces if piece[4] in (1, 12) and piece[6:14] == struct.pack("<Q", topic)]
        buf = b"".join(held)
        found = scan.scan_headers(buf)
        rows, walked = scan.decode_records(buf, found.frame_pos, found.headers), scan.scan_records(buf).rows
        assert list(iter_records(rows)) == list(iter_records(walked))
        assert rows.frame_pos.tolist() == walked.frame_pos.tolist()


def test_frames_without_records_decode_to_none() -> None:
    nothing = scan.scan_headers(b"")
    assert not len(scan.decode_records(b"", nothing.frame_pos, nothing.headers))
    holes = encode_batch(10, 1, TS, [b"", b""], kinds=b"\xff\xff")
    found = scan.scan_headers(holes)
    assert not len(scan.decode_records(holes, found.frame_pos, found.headers))


@pytest.mark.parametrize("before", [b"", ONE, ONE + encode_batch(10, 2, TS, [b"x"])])
@pytest.mark.parametrize("body", [b"", struct.pack("<IB3x", 0, 0), struct.pack("<IB3xI", 1, 0, 5)])
def test_a_batch_that_does_not_decode_is_corrupt_at_its_position(before: bytes, body: bytes) -> None:
    """G58. The checksum holds, so the survey has nothing against it; decoding has."""
    buf = (
        before
        + lying(kind=APPEND_BATCH, flags=0, seq=9, node=b"", tag=b"", data=body)
        + encode_batch(10, 10, TS, [b""])
    )
    found = scan.scan_headers(buf)
    assert found.stop is ScanStop.END
    with pytest.raises(Corrupt) as caught:
        scan.decode_records(buf, found.frame_pos, found.headers)
    assert caught.value.pos == len(before)
    assert "report" in str(caught.value)


@pytest.mark.parametrize(("pos", "end", "most"), [(-1, 9, 1), (0, len(ONE) + 1, 1), (5, 4, 1), (0, len(ONE), -1)])
def test_find_frames_refuses_a_range_outside_the_bytes(pos: int, end: int, most: int) -> None:
    with pytest.raises(ValueError, match="no such range"):
        _native.find_frames(ONE, pos, end, most)


def test_find_frames_returns_at_most_the_frames_asked_for() -> None:
    """The last frame is not reported: there is no length after it."""
    buf = ONE * 5
    for most, count in ((0, 0), (1, 1), (3, 3), (4, 4), (1 << 40, 4)):
        made, end = _native.find_frames(buf, 0, len(buf), most)
        assert np.frombuffer(made, np.int64).tolist() == [number * len(ONE) for number in range(count)]
        assert end == count * len(ONE)
    assert _native.find_frames(b"", 0, 0, 9) == (b"", 0)
    assert _native.find_frames(b"\xff" * 100, 0, 100, 9) == (b"", 0), "a length that leads out of the bytes"
