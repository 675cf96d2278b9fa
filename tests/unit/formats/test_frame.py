"""The frame codec, against an encoder that shares no code with it and against bytes that are no frame."""

from __future__ import annotations

import struct
from random import Random
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.frames import encode_appends

from tidelog.errors import BadInput, TooLarge
from tidelog.formats import frame
from tidelog.formats.frame import APPEND, APPEND_BATCH, DURABLE, HAS_NODE, HAS_TAG, JSON, MORE, Fault, Frame
from tidelog.formats.rows import ScanStop

names = st.text(max_size=12).map(str.encode)
seqs = st.integers(0, frame.SEQ_MAX)
ids = st.integers(0, frame.U64_MAX)
times = st.integers(0, frame.TS_MS_MAX)
quick = settings(max_examples=150, deadline=None, database=None)


def sealed(covered: bytes) -> bytes:
    """A frame around any bytes at all, with the length and the checksum that make it look whole."""
    return struct.pack("<I", len(covered) + 8) + covered + struct.pack("<Q", xxhash.xxh3_64(covered).intdigest())


def naive(kind: int, flags: int, topic_id: int, seq: int, ts_ms: int, node: bytes, tag: bytes, data: bytes) -> bytes:
    lengths = struct.pack("<HHI", len(node), len(tag), len(data))
    return sealed(struct.pack("<BBQQQ", kind, flags, topic_id, seq, ts_ms) + lengths + node + tag + data)


def verdict(buf: bytes, pos: int = 0, end: int | None = None) -> Fault:
    found = frame.read_frame(buf, pos, len(buf) if end is None else end)
    assert isinstance(found, Fault), found
    return found


@quick
@given(
    kind=st.sampled_from(sorted(frame.FRAME_NAMES)),
    topic_id=ids,
    seq=seqs,
    ts_ms=times,
    node=names,
    tag=names,
    data=st.binary(max_size=300),
    flags=st.sampled_from([0, DURABLE, MORE, JSON, DURABLE | MORE | JSON]),
    before=st.binary(max_size=9),
    after=st.binary(max_size=9),
)
def test_a_frame_decodes_to_its_fields(
    kind: int,
    topic_id: int,
    seq: int,
    ts_ms: int,
    node: bytes,
    tag: bytes,
    data: bytes,
    flags: int,
    before: bytes,
    after: bytes,
) -> None:
    flags &= DURABLE | (MORE | JSON if kind in (APPEND, APPEND_BATCH) else 0)
    made = frame.encode(kind, topic_id=topic_id, seq=seq, ts_ms=ts_ms, node=node, tag=tag, data=data, flags=flags)
    flags |= (HAS_NODE if node else 0) | (HAS_TAG if tag else 0)
    assert made == naive(kind, flags, topic_id, seq, ts_ms, node, tag, data)
    buf = before + made + after
    found = frame.read_frame(buf, len(before), len(buf))
    assert isinstance(found, Frame)
    assert (found.kind, found.flags, found.topic_id, found.seq, found.ts_ms) == (
        kind,
        flags,
        topic_id,
        seq,
        ts_ms,
    )
    assert (found.pos, found.end) == (len(before), len(before) + len(made))
    assert buf[found.node_pos : found.tag_pos] == node
    assert buf[found.tag_pos : found.data_pos] == tag
    assert buf[found.data_pos : found.data_end] == data


@quick
@given(parts=st.lists(st.binary(max_size=40), max_size=6), node=names, tag=names)
def test_a_frame_from_parts_is_the_frame_of_their_concatenation(parts: list[bytes], node: bytes, tag: bytes) -> None:
    made = frame.encode_parts(APPEND_BATCH, 3, 5, 9, 7, parts, node=node, tag=tag, flags=MORE)
    whole = b"".join(parts)
    assert made == frame.encode(APPEND_BATCH, topic_id=3, seq=5, ts_ms=7, data=whole, node=node, tag=tag, flags=MORE)


@quick
@given(node=names, tag=names, data=st.binary(max_size=40), seq=seqs)
def test_a_head_its_data_and_their_checksum_are_a_frame(node: bytes, tag: bytes, data: bytes, seq: int) -> None:
    head = frame.encode_header(APPEND, topic_id=3, seq=seq, ts_ms=7, data_len=len(data), node=node, tag=tag)
    made = head + data + struct.pack("<Q", xxhash.xxh3_64(head[4:] + data).intdigest())
    assert made == frame.encode(APPEND, topic_id=3, seq=seq, ts_ms=7, data=data, node=node, tag=tag)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kind": 0}, "does not exist"),
        ({"kind": 99}, "does not exist"),
        ({"flags": HAS_TAG}, "callers may set"),
        ({"flags": 32}, "callers may set"),
        ({"kind": frame.DELETE, "flags": MORE}, "has no records"),
        *(({"kind": kind, "flags": JSON}, "no records") for kind in range(2, 12)),
        ({"topic_id": -1}, "topic id"),
        ({"topic_id": (1 << 64) - 1}, "topic id"),
        ({"seq": -1}, "seqs"),
        ({"seq": (1 << 63) - 1}, "seqs"),
        ({"ts_ms": -1}, "time"),
        ({"ts_ms": frame.TS_MS_MAX + 1}, "time"),
        ({"node": b"\xff"}, "UTF-8"),
        ({"tag": b"\xc3"}, "UTF-8"),
        ({"tag": "\ud800".encode("utf-8", "surrogatepass")}, "UTF-8"),
    ],
)
def test_a_value_that_could_not_be_decoded_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        frame.encode(**{"kind": APPEND, "ts_ms": 1, **arguments})


class Huge(bytes):
    """Bytes that claim to be 4 GiB long."""

    def __len__(self) -> int:
        return 1 << 32


@pytest.mark.parametrize("what", ["node", "tag"])
def test_a_name_over_64_kib_is_refused_and_never_cut(what: str) -> None:
    with pytest.raises(TooLarge) as caught:
        frame.encode(APPEND, ts_ms=1, **{what: b"x" * 65_536})  # type: ignore[arg-type]
    assert (caught.value.size, caught.value.limit) == (65_536, 65_535)
    full = frame.encode(APPEND, ts_ms=1, node=b"n" * 65_535, tag=b"t" * 65_535)
    assert isinstance(frame.read_frame(full, 0, len(full)), Frame)


def test_data_over_4_gib_is_refused() -> None:
    with pytest.raises(TooLarge, match="data of a frame"):
        frame.encode(APPEND, ts_ms=1, data=Huge())


GOOD = naive(APPEND, HAS_NODE | HAS_TAG, 10, 1, 5, b"n1", b"t", b"data")
HEAD = struct.Struct("<BBQQQHHI")


def resealed(**fields: int) -> bytes:
    """GOOD with some header fields replaced and a checksum that holds."""
    values = dict(
        zip(("kind", "flags", "topic_id", "seq", "ts", "node", "tag", "data"), HEAD.unpack_from(GOOD, 4), strict=True)
    )
    values.update(fields)
    return sealed(HEAD.pack(*values.values()) + GOOD[38:-8])


@pytest.mark.parametrize(
    ("buf", "stop", "words"),
    [
        (b"", ScanStop.END, ""),
        (b"\0", ScanStop.END, ""),
        (b"\0\0\0", ScanStop.END, ""),
        (b"\0\0\1", ScanStop.TORN, "too few"),
        (b"\x2a", ScanStop.TORN, "too few"),
        (bytes(4), ScanStop.END, ""),
        (bytes(46), ScanStop.END, ""),
        (bytes(38) + b"x", ScanStop.END, ""),
        (bytes(37) + b"x", ScanStop.BAD, "below the smallest"),
        (b"\0" + GOOD[1:], ScanStop.BAD, "below the smallest"),
        (struct.pack("<I", 41) + bytes(60), ScanStop.BAD, "below the smallest"),
        (struct.pack("<I", 42) + bytes(41), ScanStop.TORN, "has 42 bytes, 41"),
        (b"\xff\xff\xff\xff" + bytes(60), ScanStop.TORN, "the frame has"),
        (GOOD[:-1], ScanStop.TORN, "the frame has"),
        (struct.pack("<I", 42) + bytes(42), ScanStop.BAD, "checksum"),
        (struct.pack("<I", 43) + bytes(43), ScanStop.BAD, "add up"),
        (GOOD[:-1] + bytes((GOOD[-1] ^ 1,)), ScanStop.BAD, "checksum"),
        (GOOD[:40] + b"x" + GOOD[41:], ScanStop.BAD, "checksum"),
        (resealed(kind=0), ScanStop.BAD, "unknown frame type 0"),
        (resealed(kind=99), ScanStop.BAD, "unknown frame type 99"),
        (resealed(flags=32 | 3), ScanStop.BAD, "unknown flags"),
        (resealed(kind=frame.DELETE, flags=MORE | 3), ScanStop.BAD, "Delete frame has the flag MORE"),
        *((resealed(kind=kind, flags=JSON | 3), ScanStop.BAD, "has the flag JSON") for kind in range(2, 12)),
        (resealed(seq=frame.SEQ_MAX + 1), ScanStop.BAD, "larger than a log"),
        (resealed(ts=frame.TS_MS_MAX + 1), ScanStop.BAD, "larger than a log"),
        (resealed(flags=HAS_TAG), ScanStop.BAD, "node"),
        (resealed(flags=HAS_NODE), ScanStop.BAD, "tag"),
        (resealed(node=3), ScanStop.BAD, "add up"),
        (resealed(data=5), ScanStop.BAD, "add up"),
        (naive(APPEND, 3, 10, 1, 5, b"\xff", b"t", b""), ScanStop.BAD, "node"),
        (naive(APPEND, 3, 10, 1, 5, b"n", b"\xff", b""), ScanStop.BAD, "tag"),
        (naive(APPEND, 3, 10, 1, 5, b"\xc3", b"\xa9", b""), ScanStop.BAD, "node"),
    ],
)
def test_bytes_that_are_no_frame_get_a_fault_with_a_reason(buf: bytes, stop: ScanStop, words: str) -> None:
    found = verdict(buf)
    assert found.stop is stop
    assert words in found.reason
    assert bool(found.reason) == (stop is not ScanStop.END)
    shifted = b"xyz" + buf
    assert verdict(shifted, 3) == found, "the verdict is about the bytes, not about where they lie"


def test_a_flag_without_a_name_is_an_empty_name() -> None:
    buf = naive(APPEND, HAS_NODE | HAS_TAG, 10, 1, 5, b"", b"", b"data")
    found = frame.read_frame(buf, 0, len(buf))
    assert isinstance(found, Frame)
    assert found.node_pos == found.tag_pos == found.data_pos


def test_no_byte_after_the_end_is_read() -> None:
    buf = GOOD + GOOD
    assert isinstance(frame.read_frame(buf, 0, len(GOOD)), Frame)
    for end in range(1, len(GOOD)):
        assert verdict(buf, 0, end).stop is ScanStop.TORN, end
    assert verdict(buf, 0, 0).stop is ScanStop.END
    zeros = bytes(8) + GOOD
    assert verdict(zeros, 0, 8).stop is ScanStop.END
    assert verdict(zeros).stop is ScanStop.BAD, "seen in whole, the zeros hide a frame"


def test_bytes_that_were_verified_elsewhere_need_not_be_hashed_again() -> None:
    broken = GOOD[:-1] + bytes((GOOD[-1] ^ 1,))
    assert isinstance(frame.read_frame(broken, 0, len(broken), check=False), Frame)
    torn = frame.read_frame(broken, 0, len(broken) - 1, check=False)
    assert isinstance(torn, Fault), "lengths are compared with the bytes in any case"


@quick
@given(buf=st.binary(max_size=120), pos=st.integers(0, 20))
def test_random_bytes_are_a_frame_or_a_fault(buf: bytes, pos: int) -> None:
    pos = min(pos, len(buf))
    assert isinstance(frame.read_frame(buf, pos, len(buf)), Frame | Fault)


@pytest.mark.parametrize("seed", range(30))
def test_random_headers_with_a_good_checksum_are_a_frame_or_a_fault(seed: int) -> None:
    random = Random(seed)
    for _ in range(100):
        covered = bytearray(GOOD[4:-8])
        for _ in range(random.randint(1, 4)):
            covered[random.randrange(len(covered))] = random.randrange(256)
        buf = sealed(bytes(covered))
        found = frame.read_frame(buf, 0, len(buf))
        if isinstance(found, Frame):
            assert found.end == len(buf)
            assert found.pos + 38 == found.node_pos <= found.tag_pos <= found.data_pos <= found.data_end
        else:
            assert found.stop is ScanStop.BAD


@quick
@example([b"\xc3", b"\xa9"])
@example([b"", b"\xc3\xa9", b""])
@example([b"\xc3\xa9", b"a", b"\xe2\x82", b"\xac"])
@given(st.lists(st.one_of(st.text(max_size=3).map(str.encode), st.binary(max_size=3)), max_size=6))
def test_values_are_utf8_exactly_when_each_is(values: list[bytes]) -> None:
    def is_text(value: bytes) -> bool:
        try:
            value.decode()
        except UnicodeDecodeError:
            return False
        return True

    lengths = np.array([len(value) for value in values], np.uint16)
    assert frame.are_utf8(b"".join(values), lengths) == all(map(is_text, values))


def test_headers_are_read_at_any_position() -> None:
    buf = b"odd" + encode_appends(7, 3, 9, [b"a", b"", b"ccc"], node=b"n", tag=b"tt")
    at = []
    pos = 3
    while isinstance(found := frame.read_frame(buf, pos, len(buf)), Frame):
        at.append(pos)
        pos = found.end
    heads = frame.read_headers(buf, np.array(at, np.int64))
    assert heads["seq"].tolist() == [3, 4, 5]
    assert heads["data_len"].tolist() == [1, 0, 3]
    assert set(heads["topic_id"].tolist()) == {7}
    assert set(heads["node_len"].tolist()) == {1}
    assert set(heads["tag_len"].tolist()) == {2}
    assert not len(frame.read_headers(b"", np.zeros(0, np.int64)))


@given(
    seq=st.integers(-1, 3) | st.sampled_from([frame.SEQ_MAX, frame.SEQ_MAX + 1]),
    ts_ms=st.sampled_from([-1, 0, 5, frame.TS_MS_MAX, frame.TS_MS_MAX + 1]),
    data=st.binary(max_size=20),
    node=st.sampled_from([b"", b"n", b"\xff"]),
    tag=st.sampled_from([b"", b"t"]),
    flags=st.sampled_from([0, frame.DURABLE, frame.JSON | frame.MORE, 1, 128]),
)
def test_one_append_is_encoded_as_any_frame_is(
    seq: int, ts_ms: int, data: bytes, node: bytes, tag: bytes, flags: int
) -> None:
    """The short way gives the same bytes, or the same refusal."""
    try:
        wanted: bytes | str = frame.encode(
            frame.APPEND, topic_id=7, seq=seq, ts_ms=ts_ms, data=data, node=node, tag=tag, flags=flags
        )
    except BadInput as error:
        wanted = str(error)
    try:
        made: bytes | str = frame.encode_append(7, seq, ts_ms, data, node, tag, flags)
    except BadInput as error:
        made = str(error)
    assert made == wanted
