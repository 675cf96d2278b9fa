"""`scan_records` against a slow scan that shares no code with it.

Logs are generated from a seed, then damaged: cut, flipped, zeroed, lengthened, or changed and sealed again with a
checksum that holds. Both scans must return the same records, and stop at the same byte and for the same kind of reason.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import xxhash
from tests.frames import FrameReader, encode_appends, encode_batch

from tidelog.errors import Corrupt
from tidelog.formats import frame, scan, segment_index
from tidelog.formats.frame import APPEND, DURABLE, JSON, MORE
from tidelog.formats.rows import Rows, ScanStop, iter_records, to_arrow
from tidelog.types import Record

TS = 1_700_000_000_000
TOPIC = 10


def sealed(covered: bytes) -> bytes:
    return struct.pack("<I", len(covered) + 8) + covered + struct.pack("<Q", xxhash.xxh3_64(covered).intdigest())


# The slow walk ---------------------------------------------------------------------------------------


class Seen(NamedTuple):
    kind: int
    flags: int
    topic: int
    seq: int
    ts: int
    node: bytes
    tag: bytes
    data: bytes
    end: int


def is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def slow_frame(buf: bytes, pos: int) -> Seen | ScanStop:
    left = buf[pos:]
    if not left.strip(b"\0")[:1] or not left[:38].strip(b"\0"):
        return ScanStop.END
    if len(left) < 4:
        return ScanStop.TORN
    size = int.from_bytes(left[:4], "little")
    if size < 42:
        return ScanStop.BAD
    if 4 + size > len(left):
        return ScanStop.TORN
    covered, checksum = left[4 : size - 4], left[size - 4 : size + 4]
    if xxhash.xxh3_64(covered).digest()[::-1] != checksum:
        return ScanStop.BAD
    kind, flags, topic, seq, ts, n, m, p = struct.unpack("<BBQQQHHI", covered[:34])
    if 34 + n + m + p != len(covered):
        return ScanStop.BAD
    node, tag, data = covered[34 : 34 + n], covered[34 + n : 34 + n + m], covered[34 + n + m :]
    good = (
        1 <= kind <= 16
        and flags < 32
        and not (flags & (8 | 16) and kind not in (1, 12))
        and seq <= 2**63 - 2
        and ts * 1000 < 2**63
        and not (node and not flags & 2)
        and not (tag and not flags & 1)
        and is_text(node)
        and is_text(tag)
    )
    return Seen(kind, flags, topic, seq, ts, node, tag, data, pos + 4 + size) if good else ScanStop.BAD


def slow_batch(found: Seen) -> list[Record] | None:
    body = found.data
    if len(body) < 8:
        return None
    count, bflags, pad = struct.unpack("<IB3s", body[:8])
    if not count or bflags > 15 or any(pad) or bflags & found.flags & 3 or found.seq + count - 1 > 2**63 - 2:
        return None
    at = 8
    columns: list[list[int]] = []
    for bit, width in ((0, 4), (1, 2), (2, 2), (4, 4), (8, 1)):
        if bit and not bflags & bit:
            columns.append([0] * count if bit != 8 else [0])
            continue
        if len(body) < at + width * count:
            return None
        columns.append([int.from_bytes(body[at + width * i :][:width], "little") for i in range(count)])
        at += width * count
    datas, tags, nodes, metas, kinds = columns
    if at + sum(datas) + sum(tags) + sum(nodes) + sum(metas) != len(body):
        return None
    if len(kinds) == 1 and count > 1:
        kinds = kinds * count
    values: list[list[bytes]] = []
    for lengths in (tags, nodes, metas, datas):
        values.append([])
        for length in lengths:
            values[-1].append(body[at : at + length])
            at += length
    out = []
    for i in range(count):
        if found.flags & 16 and bflags & 8 and kinds[i] == 0:
            return None
        if kinds[i] not in (0, 1, 255) or not is_text(values[0][i]) or not is_text(values[1][i]):
            return None
        if kinds[i] == 255:
            if any(column[i] for column in values):
                return None
            continue
        tag = found.tag if found.flags & 1 else values[0][i]
        node = found.node if found.flags & 2 else values[1][i]
        out.append(Record(found.seq + i, found.ts * 1000, values[3][i], node, tag, values[2][i]))
    return out


def slow_scan(buf: bytes, pos: int = 0, above: int = -1) -> tuple[list[Record], int, ScanStop]:
    done: list[Record] = []
    pending: list[Record] = []
    chain_at, chain_topic = None, None
    topic: int | None = None
    last_seq, last_ts = above, -1
    while True:
        found = slow_frame(buf, pos)
        back = pos if chain_at is None else chain_at
        if isinstance(found, ScanStop):
            return done, back, ScanStop.TORN if chain_at is not None and found is ScanStop.END else found
        if found.kind not in (1, 12) or (chain_at is not None and found.topic != chain_topic):
            if chain_at is not None:
                return done, back, ScanStop.BAD
            pos = found.end
            continue
        if found.kind == 1:
            got = [Record(found.seq, found.ts * 1000, found.data, found.node, found.tag)]
        else:
            decoded = slow_batch(found)
            if decoded is None:
                return done, back, ScanStop.BAD
            got = decoded
        if got:
            if topic is None:
                topic = found.topic
            if found.topic != topic or got[0].seq <= last_seq or found.ts < last_ts:
                return done, back, ScanStop.BAD
            last_seq, last_ts = got[-1].seq, found.ts
        pending += got
        if found.flags & 8:
            chain_at, chain_topic = back, found.topic
        else:
            done, pending, chain_at = done + pending, [], None
        pos = found.end


# Logs made by chance ---------------------------------------------------------------------------------


def append(seq: int, ts: int, data: bytes, *, node: bytes = b"", tag: bytes = b"", flags: int = 0) -> bytes:
    return frame.encode(APPEND, topic_id=TOPIC, seq=seq, ts_ms=ts, data=data, node=node, tag=tag, flags=flags)


def make_log(random: Random, *, control: bool = True) -> tuple[bytes, list[int]]:
    """A good log, and where its frames start."""
    pieces: list[bytes] = []
    seq, ts = random.randrange(5), TS
    for _ in range(random.choice((random.randrange(1, 12), 30))):  # few frames and many are read in different ways
        ts += random.choice((0, 0, 1, 1000))
        seq += random.choice((1, 1, 1, 7))
        names = [b"", b"n1", "knöten".encode()]
        shape = random.random()
        if shape < 0.45:
            data = random.randbytes(random.randrange(9))
            flags = random.choice((0, DURABLE, JSON))
            pieces.append(append(seq, ts, data, node=random.choice(names), tag=random.choice(names), flags=flags))
        elif shape < 0.55 and control:
            pieces.append(frame.encode(frame.HEAD_WATERMARK, topic_id=3, ts_ms=ts, data=bytes(8)))
        else:
            frames = random.choice((1, 1, 2, 3))
            for number in range(frames):
                count = random.randrange(1, 5)
                more = MORE if number + 1 < frames else 0
                if count == 1 and random.random() < 0.5:
                    pieces.append(append(seq, ts, b"alone", flags=more))
                else:
                    pieces.append(make_batch(random, seq, ts, count, more))
                seq += count - (number + 1 == frames)
    starts = np.cumsum([0, *map(len, pieces)]).tolist()
    return b"".join(pieces), starts[:-1]


def make_batch(random: Random, seq: int, ts: int, count: int, flags: int) -> bytes:
    def column() -> list[bytes] | None:
        return [random.choice((b"", b"x", b"longer")) for _ in range(count)] if random.random() < 0.3 else None

    made: dict[str, Any] = {"tags": column(), "nodes": column(), "metas": column()}
    if made["tags"] is None:
        made["tag"] = random.choice((b"", b"common"))
    datas = [random.randbytes(random.randrange(6)) for _ in range(count)]
    flags |= random.choice((0, 0, JSON))
    if random.random() < 0.3:
        made["kinds"] = bytes(random.choice((1, 255) if flags & JSON else (0, 1, 255)) for _ in range(count))
        for i, kind in enumerate(made["kinds"]):
            for values in (datas, made["tags"], made["nodes"], made["metas"]):
                if kind == 255 and values is not None:
                    values[i] = b""
    return encode_batch(TOPIC, seq, ts, datas, **made, flags=flags)


def damage(random: Random, buf: bytes, starts: list[int]) -> bytes:
    out = bytearray(buf)
    match random.randrange(8):
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
        case 6:  # a frame twice, or in the wrong place
            lo = random.randrange(len(starts))
            piece = buf[starts[lo] : [*starts, len(buf)][lo + 1]]
            at = random.choice([*starts, len(buf)])
            return buf[:at] + piece + buf[at:]
        case 7:  # a wrong header with a checksum that holds
            number = random.randrange(len(starts))
            at, end = starts[number], [*starts, len(buf)][number + 1]
            covered = bytearray(buf[at + 4 : end - 8])
            for _ in range(random.randrange(1, 3)):
                where = random.choice((0, 1, 2, 10, 17, 18, 25, 26, 28, 30, random.randrange(len(covered))))
                covered[where] = random.choice((0, 1, 2, 3, 8, 9, 12, 16, 17, 128, 255, random.randrange(256)))
            return buf[:at] + sealed(bytes(covered)) + buf[end:]
    return bytes(out)


@pytest.mark.parametrize("logs", [8, pytest.param(25, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("seed", range(120))
def test_scan_records_agrees_with_a_slow_scan_of_good_and_damaged_logs(seed: int, logs: int) -> None:
    random = Random(seed)
    for _ in range(logs):
        good, starts = make_log(random)
        buf = damage(random, good, starts)
        want, end, stop = slow_scan(buf)
        got = scan.scan_records(buf)
        assert (list(iter_records(got.rows)), got.end, got.stop) == (want, end, stop), (seed, buf.hex(), got.reason)
        assert bool(got.reason) == (stop is not ScanStop.END)
        again = scan.scan_records(b"\xee" * 5 + buf + b"\xee" * 50, 5, 5 + len(buf))
        assert (len(again.rows), again.end, again.stop) == (len(want), end + 5, stop), (seed, buf.hex())


@pytest.mark.parametrize("seed", range(40))
def test_frames_read_one_by_one_agree_with_the_slow_reader(seed: int) -> None:
    random = Random(seed)
    for _ in range(10):
        good, starts = make_log(random)
        buf = damage(random, good, starts)
        scanner = FrameReader(buf)
        seen = list(scanner)
        pos, whole, chained = 0, 0, None
        for found in seen:
            slow = slow_frame(buf, pos)
            assert isinstance(slow, Seen)
            assert chained is None or (found.kind in (1, 12) and found.topic_id == chained)
            assert (found.kind, found.flags, found.seq, found.pos, found.end) == (*slow[:2], slow.seq, pos, slow.end)
            pos = found.end
            chained = found.topic_id if found.flags & MORE else None
            whole = whole if found.flags & MORE else pos
        assert (scanner.end, scanner.whole_end) == (pos, whole)
        last = slow_frame(buf, pos)
        if isinstance(last, Seen):
            assert chained is not None
            assert scanner.stop is ScanStop.BAD, "a batch that something else interrupts"
        elif chained is not None and last is ScanStop.END:
            assert scanner.stop is ScanStop.TORN
            assert f"byte {whole} " in scanner.reason
        else:
            assert scanner.stop is last


@pytest.mark.parametrize("seed", range(40))
def test_a_sealed_segment_reads_the_same_through_its_index(seed: int) -> None:
    random = Random(seed)
    for _ in range(5):
        buf, _ = make_log(random, control=False)
        walk = scan.scan_records(buf)
        assert walk.stop is ScanStop.END
        base = int(walk.rows.seq[0]) - random.randrange(2) if len(walk.rows) else 1
        stop = (int(walk.rows.seq[-1]) if len(walk.rows) else base) + random.randrange(1, 4)
        entries = segment_index.build_entries(walk.rows, base, stop, len(buf))
        assert segment_index.find_index_fault(entries, len(buf)) is None
        want = list(iter_records(walk.rows))
        for _ in range(8):
            lo = random.randrange(stop - base + 1)
            hi = random.randrange(lo, stop - base + 1)
            rows = scan.scan_indexed(buf, entries, lo, hi, base, check=random.random() < 0.5)
            assert list(iter_records(rows)) == [record for record in want if base + lo <= record.seq < base + hi]
        whole = scan.scan_indexed(buf, entries, 0, stop - base, base, check=True)
        assert to_arrow(whole).equals(to_arrow(walk.rows))


@pytest.mark.parametrize("seed", range(40))
def test_damage_to_a_segment_is_detected_through_its_index(seed: int) -> None:
    """Method: damage the data or the index; a checked read gives the records it should, or raises Corrupt."""
    random = Random(seed)
    for _ in range(15):
        good, starts = make_log(random, control=False)
        rows = scan.scan_records(good).rows
        if not len(rows):
            continue
        base, stop = int(rows.seq[0]), int(rows.seq[-1]) + 1
        entries = segment_index.build_entries(rows, base, stop, len(good))
        data, index = good, entries.tobytes()
        if random.random() < 0.5:
            data = damage(random, good, starts)
            resealed = slow_scan(data)[0] != slow_scan(good)[0]
        else:
            broken = bytearray(index)
            broken[random.randrange(len(broken))] ^= random.randrange(1, 256)
            index, resealed = bytes(broken), False
            if segment_index.find_index_fault(segment_index.read_entries(index), len(data)) is not None:
                continue
        try:
            found = list(
                iter_records(
                    scan.scan_indexed(data, segment_index.read_entries(index), 0, stop - base, base, check=True)
                )
            )
        except Corrupt:
            continue
        wanted = list(iter_records(rows))
        lost = {record.seq for record in wanted} - {record.seq for record in found}
        empty = {record.seq for record in wanted if not record.data and not record.tag}
        assert resealed or all(record in wanted for record in found), seed
        # Only the footer detects this: an empty record of a batch whose entry turned into a hole.
        assert resealed or lost <= empty, seed


# By hand ---------------------------------------------------------------------------------------------


ONE = append(1, TS, b"one")
TWO = encode_batch(TOPIC, 2, TS, [b"two", b"three"], flags=MORE)
FOUR = encode_batch(TOPIC, 4, TS, [b"four"], tags=[b"t"])
FIVE = append(5, TS + 1, b"five", node=b"n", tag=b"t")
MARK = frame.encode(frame.CHECKPOINT_MARK, ts_ms=TS, data=bytes(8))


def seqs(walk: Any) -> list[int]:
    found: list[int] = walk.rows.seq.tolist()
    return found


def test_a_batch_that_breaks_off_is_left_out() -> None:
    whole = ONE + TWO + FOUR + FIVE
    for size in range(len(whole) + 1):
        got = scan.scan_records(whole[:size])
        if size < len(ONE):
            wanted: list[int] = []
        elif size < len(ONE + TWO + FOUR):
            wanted = [1]
        elif size < len(whole):
            wanted = [1, 2, 3, 4]
        else:
            wanted = [1, 2, 3, 4, 5]
        assert seqs(got) == wanted, size
        assert got.end == (0, len(ONE), 0, 0, len(ONE + TWO + FOUR), len(whole))[len(wanted)], size
        clean = size in (0, len(ONE), len(ONE + TWO + FOUR), len(whole))
        assert got.stop is (ScanStop.END if clean else ScanStop.TORN), size
    assert "byte 49 breaks off" in scan.scan_records(ONE + TWO).reason


@pytest.mark.parametrize("between", [MARK, frame.encode(APPEND, topic_id=11, seq=4, ts_ms=TS)])
def test_a_batch_that_something_interrupts_is_bad(between: bytes) -> None:
    got = scan.scan_records(ONE + TWO + between + FOUR)
    assert (seqs(got), got.end, got.stop) == ([1], len(ONE), ScanStop.BAD)
    assert "interrupted" in got.reason


@pytest.mark.parametrize(
    ("log", "kept", "words"),
    [
        (ONE + ONE, 1, "seq 1 comes after seq 1"),
        (FIVE + FOUR, 1, "seq 4 comes after seq 5"),
        (ONE + append(2, TS - 1, b""), 1, "comes after"),
        (ONE + frame.encode(APPEND, topic_id=11, seq=2, ts_ms=TS), 1, "topic 11 in the log of topic 10"),
        (ONE + encode_batch(11, 2, TS, [b""]), 1, "topic 11 in the log of topic 10"),
        (ONE + TWO + append(3, TS, b"again") + FIVE, 1, "seq 3 comes after seq 3"),
    ],
)
def test_records_out_of_order_end_the_scan(log: bytes, kept: int, words: str) -> None:
    got = scan.scan_records(log)
    assert len(got.rows) == kept
    assert got.stop is ScanStop.BAD
    assert words in got.reason


def test_a_scan_starts_above_a_seq() -> None:
    assert seqs(scan.scan_records(FOUR + FIVE, above=3)) == [4, 5]
    refused = scan.scan_records(FOUR + FIVE, above=4)
    assert (len(refused.rows), refused.end, refused.stop) == (0, 0, ScanStop.BAD)


def test_control_frames_are_skipped() -> None:
    got = scan.scan_records(MARK + ONE + MARK + FIVE + MARK + bytes(100))
    assert (seqs(got), got.end, got.stop) == ([1, 5], len(MARK) * 3 + len(ONE + FIVE), ScanStop.END)


def test_an_empty_log_and_one_of_zeros_end_cleanly() -> None:
    for buf in (b"", bytes(3), bytes(4), bytes(5000)):
        got = scan.scan_records(buf)
        assert (len(got.rows), got.end, got.stop, got.reason) == (0, 0, ScanStop.END, "")
        scanner = FrameReader(buf)
        assert (list(scanner), scanner.end, scanner.whole_end, scanner.stop) == ([], 0, 0, ScanStop.END)


def test_columns_of_mixed_frames_line_up() -> None:
    rows = scan.scan_records(ONE + FOUR + FIVE).rows
    assert [(r.data, r.node, r.tag) for r in iter_records(rows)] == [
        (b"one", b"", b""),
        (b"four", b"", b"t"),
        (b"five", b"n", b"t"),
    ]
    assert rows.frame_pos.tolist() == [0, len(ONE), len(ONE + FOUR)]
    assert rows.tag is not None
    assert (np.diff(rows.tag.pos) >= 0).all()
    assert to_arrow(rows).column("tag").to_pylist() == [b"", b"t", b"t"]
    assert scan.scan_records(ONE).rows.tag is None


def test_a_batch_of_holes_only_leaves_the_columns_of_others_as_they_are() -> None:
    """A record without a node reads as null, through the index, which knows no such batch, and without it."""
    log = ONE + encode_batch(TOPIC, 2, TS, [b""], nodes=[b""], kinds=b"\xff") + append(3, TS, b"three")
    rows = scan.scan_records(log).rows
    entries = segment_index.build_entries(rows, 1, 4, len(log))
    assert to_arrow(rows).equals(to_arrow(scan.scan_indexed(log, entries, 0, 3, 1, check=True)))
    assert rows.node is None


@pytest.mark.parametrize("seed", range(60))
def test_random_bytes_never_raise(seed: int) -> None:
    random = Random(seed)
    for _ in range(60):
        buf = random.randbytes(random.randrange(200))
        if random.random() < 0.5:
            buf = ONE + struct.pack("<I", random.randrange(200)) + buf
        assert isinstance(scan.scan_records(buf).rows, Rows)
        list(FrameReader(buf))
        entries = segment_index.read_entries(random.randbytes(20 * random.randrange(1, 5)))
        small = entries.copy()
        small["frame_offset"] %= max(len(buf), 1)
        for some in (entries, small):
            with suppress(Corrupt):
                scan.scan_indexed(buf, some, 0, len(some), 1, check=random.random() < 0.5)
            segment_index.find_index_fault(some, len(buf))


def lying(**fields: int) -> bytes:
    """An Append of seq 2 with some header fields replaced and a checksum that holds."""
    good = append(2, TS, b"two", node=b"n", tag=b"t")
    names = ("kind", "flags", "topic", "seq", "ts", "node", "tag", "data")
    values = dict(zip(names, struct.unpack_from("<BBQQQHHI", good, 4), strict=True)) | fields
    return sealed(struct.pack("<BBQQQHHI", *values.values()) + good[38:-8])


WRONG_HEADERS = [
    {"flags": 32 | 3},
    {"flags": 255},
    {"flags": 1},
    {"flags": 2},
    {"seq": 1 << 63},
    {"ts": frame.TS_MS_MAX + 1},
    {"node": 2},
    {"tag": 0},
    {"data": 2},
    {"data": (1 << 32) - 1},
]


@pytest.mark.parametrize("fields", WRONG_HEADERS)
def test_a_header_that_read_frame_refuses_ends_scan_records(fields: dict[str, int]) -> None:
    """Many frames are judged together; the rules are those for one."""
    bad = lying(**fields)
    alone = frame.read_frame(bad, 0, len(bad))
    assert isinstance(alone, frame.Fault)
    got = scan.scan_records(ONE + bad + append(3, TS, b"three") + append(4, TS, b"four"))
    assert (seqs(got), got.end, got.stop, got.reason) == ([1], len(ONE), ScanStop.BAD, alone.reason)


@pytest.mark.parametrize("fields", [*WRONG_HEADERS, {"kind": frame.LEASE}, {"kind": 0}, {"seq": 3}, {"ts": TS + 1}])
@pytest.mark.parametrize("check", [False, True])
def test_such_a_frame_is_corrupt_through_an_index(fields: dict[str, int], check: bool) -> None:
    good = ONE + lying() + append(3, TS, b"three")
    entries = segment_index.build_entries(scan.scan_records(good).rows, 1, 4, len(good))
    assert len(scan.scan_indexed(good, entries, 0, 3, 1, check=check)) == 3
    bad = ONE + lying(**fields) + append(3, TS, b"three")
    with pytest.raises(Corrupt) as caught:
        scan.scan_indexed(bad, entries, 0, 3, 1, check=check)
    assert caught.value.pos == len(ONE)
    assert len(scan.scan_indexed(bad, entries, 0, 1, 1, check=check)) == 1


@pytest.mark.parametrize(
    ("index", "field", "value"),
    [
        (0, "data_len", 4),
        (0, "ts", TS + 1),
        (0, "ts", TS + (1 << 61)),
        (0, "flags", segment_index.HAS_TAG),
        (0, "flags", segment_index.JSON),
        (0, "flags", segment_index.HAS_META),
        (3, "flags", segment_index.BATCH | segment_index.JSON),
        (4, "flags", segment_index.BATCH | segment_index.HAS_META),
        (2, "flags", segment_index.HAS_TAG | segment_index.BATCH),
        (3, "data_len", 2),
        (3, "ts", TS + 1),
        (1, "frame_offset", 2 * 49),
        (2, "frame_offset", 3 * 49),
        (0, "flags", segment_index.BATCH),
        (3, "flags", 0),
    ],
)
def test_an_entry_that_disagrees_with_its_frame_is_corrupt(index: int, field: str, value: int) -> None:
    single = encode_appends(TOPIC, 1, TS, [b"one", b"two"])
    log = single + encode_batch(TOPIC, 3, TS, [b"x"]) + encode_batch(TOPIC, 4, TS, [b"y", b"z"])
    entries = segment_index.build_entries(scan.scan_records(log).rows, 1, 6, len(log)).copy()
    assert len(scan.scan_indexed(log, entries, 0, 5, 1, check=True)) == 5
    entries[field][index] = value
    with pytest.raises(Corrupt):
        scan.scan_indexed(log, entries, 0, 5, 1, check=True)


@pytest.mark.parametrize("index", range(4))
def test_an_entry_without_the_flag_json_or_meta_is_corrupt(index: int) -> None:
    """G66: an index of before there were these flags is not taken for one that was made with them."""
    log = append(1, TS, b"{}", flags=JSON)
    log += encode_batch(TOPIC, 2, TS, [b"x"], metas=[b"m"])
    log += encode_batch(TOPIC, 3, TS, [b"{}", b"", b"y", b"{}"], kinds=b"\1\xff\0\1")
    entries = segment_index.build_entries(scan.scan_records(log).rows, 1, 7, len(log)).copy()
    assert len(scan.scan_indexed(log, entries, 0, 6, 1, check=True)) == 5
    which = (0, 1, 2, 5)[index]
    assert entries["flags"][which] in (
        segment_index.JSON,
        segment_index.BATCH | segment_index.JSON,
        segment_index.BATCH | segment_index.HAS_META,
    )
    entries["flags"][which] &= ~np.uint8(segment_index.JSON | segment_index.HAS_META)
    with pytest.raises(Corrupt, match="different records"):
        scan.scan_indexed(log, entries, 0, 6, 1, check=True)


@pytest.mark.parametrize("check", [False, True])
def test_a_segment_that_lost_the_end_of_its_last_frame_is_corrupt_through_its_index(check: bool) -> None:
    """G58, G65: no position outside the bytes that are there is ever believed."""
    log = ONE + append(2, TS, b"x" * 100)
    entries = segment_index.build_entries(scan.scan_records(log).rows, 1, 3, len(log))
    for size in range(len(ONE) + frame.OVERHEAD_BYTES, len(log)):
        with pytest.raises(Corrupt) as caught:
            scan.scan_indexed(log[:size], entries, 0, 2, 1, check=check)
        assert caught.value.pos == len(ONE)


def test_entries_that_name_a_neighbours_frame_are_corrupt() -> None:
    """Method: entries whose frames exist, agree in number and size, and are not theirs."""
    twice = encode_appends(TOPIC, 1, TS, [b"one", b"two", b"six"])
    entries = segment_index.build_entries(scan.scan_records(twice).rows, 1, 4, len(twice)).copy()
    entries["frame_offset"][1] = entries["frame_offset"][2]
    with pytest.raises(Corrupt):
        scan.scan_indexed(twice, entries, 0, 3, 1, check=True)
    many = encode_appends(TOPIC, 1, TS, [b"one"] * 40)
    for check in (False, True):
        entries = segment_index.build_entries(scan.scan_records(many).rows, 1, 41, len(many)).copy()
        entries["frame_offset"][20] = entries["frame_offset"][21]
        with pytest.raises(Corrupt) as caught:
            scan.scan_indexed(many, entries, 0, 40, 1, check=check)
        assert caught.value.pos == entries["frame_offset"][20]
    one, two = encode_batch(TOPIC, 1, TS, [b"x"]), encode_batch(TOPIC, 2, TS, [b"y", b"z"])
    entries = segment_index.build_entries(scan.scan_records(one + two).rows, 1, 4, len(one + two)).copy()
    entries["frame_offset"][1] = 0
    with pytest.raises(Corrupt):
        scan.scan_indexed(one + two, entries, 0, 3, 1, check=True)


def test_a_scan_to_an_end_reads_only_the_bytes_before_it() -> None:
    log = ONE + append(2, TS, b"two") + append(3, TS, b"three") + encode_batch(TOPIC, 4, TS, [b"4"]) + FIVE
    for end in range(len(log) + 1):
        got, want = scan.scan_records(log, 0, end), scan.scan_records(log[:end])
        assert (seqs(got), got.end, got.stop) == (seqs(want), want.end, want.stop), end
        frames, wanted = FrameReader(log, 0, end), FrameReader(log[:end])
        assert [f.end for f in frames] == [f.end for f in wanted]
        assert frames.stop is wanted.stop


@pytest.mark.parametrize("check", [False, True])
def test_a_broken_checksum_is_detected_through_the_index_with_check(check: bool) -> None:
    log = ONE + FOUR + FIVE
    entries = segment_index.build_entries(scan.scan_records(log).rows, 1, 6, len(log))
    for at, first, stop in ((len(ONE) - 1, 0, 1), (len(ONE + FOUR) - 1, 3, 4), (len(log) - 1, 4, 5)):
        broken = log[:at] + bytes((log[at] ^ 1,)) + log[at + 1 :]
        if check:
            with pytest.raises(Corrupt, match="checksum"):
                scan.scan_indexed(broken, entries, first, stop, 1, check=True)
        else:
            assert len(scan.scan_indexed(broken, entries, first, stop, 1, check=False)) == 1
        others = [i for i in (0, 3, 4) if not first <= i < stop]
        for i in others:
            assert len(scan.scan_indexed(broken, entries, i, i + 1, 1, check=True)) == 1, "neighbours stay readable"
