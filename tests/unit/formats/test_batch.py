"""AppendBatch, against an encoder that knows only the drawing, and against bodies that lie."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.frames import encode_batch, record_kinds
from tests.implementations import implementation

from tidelog.errors import BadInput, TooLarge
from tidelog.formats import batch, frame
from tidelog.formats.frame import DURABLE, JSON, MORE, Fault, Frame
from tidelog.formats.rows import Rows, ScanStop, iter_records, to_arrow
from tidelog.types import Record

TS = 1_700_000_000_000
quick = settings(max_examples=150, deadline=None, database=None)


def sealed(body: bytes, *, flags: int = 0, node: bytes = b"", tag: bytes = b"", seq: int = 1) -> bytes:
    """An AppendBatch frame around any body at all."""
    flags |= (2 if node else 0) | (1 if tag else 0)
    head = struct.pack("<BBQQQHHI", 12, flags, 10, seq, TS, len(node), len(tag), len(body))
    covered = head + node + tag + body
    return struct.pack("<I", len(covered) + 8) + covered + struct.pack("<Q", xxhash.xxh3_64(covered).intdigest())


def naive_body(
    datas: Sequence[bytes],
    tags: Sequence[bytes] | None = None,
    nodes: Sequence[bytes] | None = None,
    metas: Sequence[bytes] | None = None,
    kinds: bytes | None = None,
) -> bytes:
    bflags = (tags is not None) + 2 * (nodes is not None) + 4 * (metas is not None) + 8 * (kinds is not None)
    out = struct.pack("<IB3x", len(datas), bflags)
    for values, code in ((datas, "<I"), (tags, "<H"), (nodes, "<H"), (metas, "<I")):
        for value in values or ():
            out += struct.pack(code, len(value))
    out += kinds or b""
    for values in (tags, nodes, metas, datas):
        for value in values or ():
            out += value
    return out


def decoded(buf: bytes) -> Rows:
    found = frame.read_frame(buf, 0, len(buf))
    assert isinstance(found, Frame), found
    assert found.end == len(buf)
    rows = batch.decode(buf, found)
    assert isinstance(rows, Rows), rows
    return rows


def fault(body: bytes, **header: Any) -> str:
    buf = sealed(body, **header)
    found = frame.read_frame(buf, 0, len(buf))
    assert isinstance(found, Frame), found
    rows = batch.decode(buf, found)
    assert isinstance(rows, Fault), list(iter_records(rows))
    assert rows.stop is ScanStop.BAD
    return rows.reason


@st.composite
def batches(draw: st.DrawFn, count_max: int = 8) -> dict[str, Any]:
    """The columns of a batch as keyword arguments of `encode`."""
    count = draw(st.integers(1, count_max))
    data = st.binary(max_size=6)
    name = st.text(max_size=3).map(str.encode)

    def column(values: st.SearchStrategy[bytes]) -> list[bytes] | None:
        return draw(st.none() | st.lists(values, min_size=count, max_size=count))

    made: dict[str, Any] = {
        "datas": draw(st.lists(data, min_size=count, max_size=count)),
        "tags": column(name),
        "nodes": column(name),
        "metas": column(data),
        "kinds": draw(st.none() | st.lists(st.sampled_from([0, 1, 255]), min_size=count, max_size=count).map(bytes)),
    }
    for i, kind in enumerate(made["kinds"] or ()):
        if kind == batch.KIND_HOLE:
            for values in (made["datas"], made["tags"], made["nodes"], made["metas"]):
                if values is not None:
                    values[i] = b""
    made["tag"] = draw(name) if made["tags"] is None else b""
    made["node"] = draw(name) if made["nodes"] is None else b""
    return made


def expected(first: int, made: dict[str, Any]) -> list[Record]:
    count = len(made["datas"])
    tags = made["tags"] or [made["tag"]] * count
    nodes = made["nodes"] or [made["node"]] * count
    metas = made["metas"] or [b""] * count
    return [
        Record(first + i, TS * 1000, made["datas"][i], nodes[i], tags[i], metas[i])
        for i in range(count)
        if made["kinds"] is None or made["kinds"][i] != batch.KIND_HOLE
    ]


@quick
@given(batches(), st.integers(0, 1 << 50), st.sampled_from([0, DURABLE, MORE]))
def test_a_batch_decodes_to_its_records(made: dict[str, Any], first: int, flags: int) -> None:
    buf = encode_batch(10, first, TS, **made, flags=flags)
    columns = [made[name] for name in ("datas", "tags", "nodes", "metas", "kinds")]
    assert buf == sealed(naive_body(*columns), flags=flags, node=made["node"], tag=made["tag"], seq=first)
    rows = decoded(buf)
    assert list(iter_records(rows)) == expected(first, made)
    assert set(rows.frame_pos.tolist()) <= {0}
    found = frame.read_frame(buf, 0, len(buf))
    assert isinstance(found, Frame)
    kinds = made["kinds"] or bytes(len(made["datas"]))
    assert bytes(record_kinds(rows)) == bytes(kind for kind in kinds if kind != batch.KIND_HOLE)


@quick
@given(batches())
def test_a_batch_reads_as_arrow_and_is_written_from_arrow(made: dict[str, Any]) -> None:
    """The Arrow way in is the list way in, byte for byte, and the way out gives the records."""
    buf = encode_batch(10, 1, TS, **made)
    arrays = {name: made[name] and pa.array(made[name], pa.binary()) for name in ("tags", "nodes", "metas")}
    common = {name: made[name] for name in ("kinds", "tag", "node")}
    assert batch.encode_arrow(10, 1, TS, pa.array(made["datas"], pa.binary()), **arrays, **common) == [buf]
    table = to_arrow(decoded(buf)).to_pylist()
    wanted = expected(1, made)
    assert [row["data"] for row in table] == [record.data for record in wanted]
    assert [row["tag"] or b"" for row in table] == [record.tag for record in wanted]
    assert [row["node"] or b"" for row in table] == [record.node for record in wanted]
    assert [row["meta"] or b"" for row in table] == [record.meta for record in wanted]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.string(), pa.large_string()])
@pytest.mark.parametrize("shape", ["plain", "sliced", "chunked"])
def test_arrow_arrays_of_every_kind_and_shape_are_taken(kind: pa.DataType, shape: str) -> None:
    datas = [b"zero", b"one", b"", "zwölf".encode()]
    whole = pa.array(datas, pa.binary()).cast(kind)
    if shape == "sliced":
        other = pa.array([b"before", b"and", b"after"], pa.binary()).cast(kind)
        whole = pa.concat_arrays([other, whole, other]).slice(len(other), len(whole))
    elif shape == "chunked":
        whole = pa.chunked_array([whole.slice(0, 1), whole.slice(1, 0), whole.slice(1)])
    want = encode_batch(10, 1, TS, datas, tags=datas, metas=datas)
    assert batch.encode_arrow(10, 1, TS, whole, tags=whole, metas=whole) == [want]


def test_an_arrow_dictionary_is_taken_and_a_null_is_an_empty_value() -> None:
    tags = pa.array(["a", None, "a", "b"]).dictionary_encode()
    got = batch.encode_arrow(10, 1, TS, pa.array([b"1", b"2", b"3", b"4"]), tags=tags)
    assert got == [encode_batch(10, 1, TS, [b"1", b"2", b"3", b"4"], tags=[b"a", b"", b"a", b"b"])]
    # A null's slot of a binary array may still cover bytes, which must not reach the frame.
    hidden = pa.Array.from_buffers(
        pa.binary(), 2, [pa.py_buffer(b"\x01"), pa.py_buffer(struct.pack("<3i", 0, 1, 4)), pa.py_buffer(b"axyz")]
    )
    assert hidden.to_pylist() == [b"a", None]
    got = batch.encode_arrow(10, 1, TS, pa.array([b"1", b"2"]), tags=hidden)
    assert got == [encode_batch(10, 1, TS, [b"1", b"2"], tags=[b"a", b""])]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"data": pa.array([b"a", None])}, "nulls"),
        ({"data": pa.array([1, 2])}, "binary or string"),
        ({"data": pa.array([], pa.binary())}, "at least one"),
        ({"data": pa.array([b"a"]), "tags": pa.array([b"a", b"b"])}, "another number"),
        ({"data": pa.array([b"a"]), "tags": pa.array([b"\xff"])}, "UTF-8"),
        ({"data": pa.array([b"a"]), "tags": pa.array([b"a"]), "tag": b"t"}, "both"),
    ],
)
def test_an_arrow_batch_that_could_not_be_decoded_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        batch.encode_arrow(10, 1, TS, arguments.pop("data"), **arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"datas": []}, "at least one"),
        ({"datas": [], "tags": []}, "at least one"),
        ({"tags": [b"a"]}, "another number"),
        ({"metas": [b"a", b"b", b"c"]}, "another number"),
        ({"kinds": b"\0"}, "kinds"),
        ({"kinds": b"\0\2"}, "of kind"),
        ({"kinds": b"\0\xfe"}, "of kind"),
        ({"kinds": b"\xff\0"}, "hole"),
        ({"datas": [b"", b"b"], "tags": [b"t", b""], "kinds": b"\xff\0"}, "hole"),
        ({"datas": [b"", b"b"], "metas": [b"t", b""], "kinds": b"\xff\0"}, "hole"),
        ({"tags": [b"a", b"b"], "tag": b"t"}, "both"),
        ({"nodes": [b"a", b"b"], "node": b"t"}, "both"),
        ({"tags": [b"\xff", b"b"]}, "UTF-8"),
        ({"nodes": [b"\xc3", b"\xa9"]}, "UTF-8"),
        ({"tag": b"\xff"}, "UTF-8"),
        ({"flags": 1}, "callers may set"),
        ({"flags": JSON, "kinds": b"\1\0"}, "every record is JSON"),
        ({"flags": JSON, "datas": [b"", b"b"], "kinds": b"\xff\0"}, "every record is JSON"),
        ({"first_seq": frame.SEQ_MAX}, "seqs"),
    ],
)
def test_a_batch_that_could_not_be_decoded_is_refused(arguments: dict[str, Any], words: str) -> None:
    arguments = {"topic_id": 10, "first_seq": 1, "ts_ms": TS, "datas": [b"a", b"b"], **arguments}
    with pytest.raises(BadInput, match=words):
        batch.encode_many(**arguments)


def test_a_tag_over_64_kib_is_refused_and_never_cut() -> None:
    long = b"x" * 65_536
    with pytest.raises(TooLarge, match="a tag of the batch"):
        encode_batch(1, 1, 1, [b"", b""], tags=[b"", long])
    with pytest.raises(TooLarge, match="a node of the batch"):
        batch.encode_arrow(1, 1, 1, pa.array([b"", b""]), nodes=pa.array([b"", long]))
    assert len(decoded(encode_batch(1, 1, 1, [b""], tags=[long[:-1]]))) == 1


class Huge(bytes):
    """Bytes that claim to be 4 GiB long."""

    def __len__(self) -> int:
        return 1 << 32


@pytest.mark.parametrize("columns", [{}, {"tags": [b"", b""]}])
def test_data_over_4_gib_is_refused(columns: dict[str, Any]) -> None:
    with pytest.raises(TooLarge):
        batch.encode_many(1, 1, 1, [b"", Huge()], **columns)


@pytest.mark.parametrize("columns", [(), ("tags",), ("nodes", "metas"), ("tags", "nodes", "metas", "kinds")])
@pytest.mark.parametrize(
    ("count", "size", "frames"),
    [(1, 300_000, 1), (4096, 1, 1), (4097, 1, 2), (3, 200_000, 3), (300, 1000, 2), (9000, 0, 3)],
)
def test_a_large_batch_is_split_and_chained(columns: tuple[str, ...], count: int, size: int, frames: int) -> None:
    random = Random(count)
    made: dict[str, Any] = {"datas": [random.randbytes(size) for _ in range(count)]}
    names = [f"n{i % 7}".encode() for i in range(count)]
    made |= {name: names for name in columns if name != "kinds"}
    if "kinds" in columns:
        made["kinds"] = bytes(i % 2 for i in range(count))
    got = batch.encode_many(10, 5, TS, **made, flags=DURABLE)
    heads = [frame.read_frame(buf, 0, len(buf)) for buf in got]
    assert [isinstance(head, Frame) and head.flags for head in heads] == [DURABLE | MORE] * (len(got) - 1) + [DURABLE]
    found = [record for buf in got for record in iter_records(decoded(buf))]
    assert [record.seq for record in found] == list(range(5, 5 + count))
    assert [record.data for record in found] == made["datas"]
    for name, field in (("tags", "tag"), ("nodes", "node"), ("metas", "meta")):
        assert [getattr(record, field) for record in found] == made.get(name, [b""] * count)
    if not columns:
        assert len(got) == frames
    counts = [len(decoded(buf)) for buf in got]
    assert max(counts) <= batch.FRAME_RECORDS_MAX
    assert all(len(buf) < batch.FRAME_BYTES_TARGET * 1.5 or count == 1 for buf, count in zip(got, counts, strict=True))
    arrays = {name: pa.array(values, pa.binary()) for name, values in made.items() if name not in ("datas", "kinds")}
    data = pa.array(made["datas"], pa.binary())
    assert got == batch.encode_arrow(10, 5, TS, data, **arrays, kinds=made.get("kinds"), flags=DURABLE)


@pytest.mark.parametrize(("count", "size"), [(1, 0), (1, 300_000), (4097, 1), (3, 200_000), (300, 1000)])
@pytest.mark.parametrize("named", [{}, {"node": b"n1", "tag": b"tag"}, {"flags": JSON | DURABLE}, {"flags": MORE}])
def test_planned_frames_have_the_bytes_of_encode_many(count: int, size: int, named: dict[str, Any]) -> None:
    random = Random(count)
    datas = [random.randbytes(size) for _ in range(count)]
    want = batch.encode_many(10, 5, TS, datas, **named)
    lengths = np.array([len(data) for data in datas], "<u4")
    planned = batch.plan_frames(10, 5, TS, datas, lengths, **named)
    got = [b"".join(make()) for make in planned.frames]
    assert got == want
    assert planned.starts == [sum(map(len, want[:number])) for number in range(len(want))]
    assert planned.counts == [len(decoded(buf)) for buf in want]
    used = bytearray(b"\xff" * (sum(map(len, want)) + 7))  # by an earlier batch
    for compiled in (True, False):
        with implementation(compiled=compiled):
            made = batch.write_frames(lambda size: used[:size], 10, 5, TS, datas, lengths.tolist(), **named)
        assert made.frames == want
        assert made.counts == planned.counts
        assert bytes(made.buffer) == b"".join(want), "as much as was asked for, and nothing between"


def test_one_large_frame_is_the_same_bytes_however_its_parts_are_joined() -> None:
    datas = [bytes(range(250)) * 1600]
    assert len(datas[0]) > batch.FRAME_BYTES_TARGET
    assert encode_batch(10, 1, TS, datas) == sealed(naive_body(datas))
    assert encode_batch(10, 1, TS, datas, metas=datas) == sealed(naive_body(datas, metas=datas))


BODY = naive_body([b"one", b"two"], [b"a", b"b"], [b"n", b""], [b"", b"m"], b"\0\1")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "shorter than its head"),
        (BODY[:7], "shorter than its head"),
        (struct.pack("<IB3x", 0, 0), "a batch of 0 records"),
        (BODY[:4] + b"\x10" + BODY[5:], "column flags 0x10"),
        (BODY[:4] + b"\xff" + BODY[5:], "column flags 0xff"),
        (BODY[:5] + b"\1" + BODY[6:], "padding 010000"),
        (BODY[:7] + b"\1" + BODY[8:], "padding 000001"),
        (struct.pack("<IB3x", (1 << 32) - 1, 0), "do not fit"),
        (struct.pack("<IB3xI", 2, 0, 0), "do not fit"),
        (BODY[:-1], "1 bytes away"),
        (BODY + b"x", "1 bytes away"),
        (struct.pack("<IB3xII", 2, 0, 1 << 31, 1 << 31), "bytes away"),
        (struct.pack("<IB3xII", 2, 0, (1 << 32) - 1, 1) + b"x" * 64, "bytes away"),
        (naive_body([b"x"], kinds=b"\2"), "kind 2"),
        (naive_body([b"x", b""], kinds=b"\xff\xfe"), "kind 254"),
        (naive_body([b"x"], kinds=b"\xff"), "hole of the batch has a value"),
        (naive_body([b""], tags=[b"t"], kinds=b"\xff"), "hole of the batch has a value"),
        (naive_body([b""], nodes=[b"t"], kinds=b"\xff"), "hole of the batch has a value"),
        (naive_body([b""], metas=[b"t"], kinds=b"\xff"), "hole of the batch has a value"),
        (naive_body([b""], tags=[b"\xff"]), "tag of the batch is not UTF-8"),
        (naive_body([b"", b""], nodes=[b"\xc3", b"\xa9"]), "node of the batch is not UTF-8"),
    ],
)
def test_an_inconsistent_body_is_bad_with_a_reason(body: bytes, words: str) -> None:
    assert words in fault(body)


def test_a_name_of_the_batch_and_of_each_record_is_bad() -> None:
    assert "both" in fault(naive_body([b"x"], tags=[b"t"]), tag=b"t")
    assert "both" in fault(naive_body([b"x"], nodes=[b"t"]), node=b"t")
    both_ways = sealed(naive_body([b"x"], tags=[b"t"]), node=b"n")
    assert next(iter_records(decoded(both_ways))) == Record(1, TS * 1000, b"x", b"n", b"t")


@pytest.mark.parametrize("count", [3, 5000])
def test_the_json_flag_of_a_batch_holds_for_every_record(count: int) -> None:
    """However it is written; and an index, which is what a reader asks, says it of each."""
    datas = [b"{}"] * count
    lengths = np.full(count, 2, "<u4")
    array = pa.array(datas, pa.binary())
    flags = DURABLE | JSON
    ways = [
        batch.encode_many(10, 1, TS, datas, flags=flags),
        [b"".join(make()) for make in batch.plan_frames(10, 1, TS, datas, lengths, flags=flags).frames],
        batch.encode_arrow(10, 1, TS, array, flags=flags),
        batch.encode_many(10, 1, TS, datas, metas=[b"m"] * count, flags=flags),
        batch.encode_many(10, 1, TS, datas, kinds=b"\1" * count, flags=flags),
    ]
    assert ways[0] == ways[1] == ways[2]
    for way in ways:
        for buf in way:
            found = frame.read_frame(buf, 0, len(buf))
            assert isinstance(found, Frame)
            assert found.flags & ~MORE == flags
            assert record_kinds(decoded(buf)) == [batch.KIND_JSON] * len(decoded(buf))


def test_under_the_flag_a_batch_may_have_holes_and_no_record_of_bytes() -> None:
    """Reading holds the rule that writing holds."""
    body = naive_body([b"{}", b"", b"[]"], kinds=b"\1\xff\1")
    written = encode_batch(10, 1, TS, [b"{}", b"", b"[]"], kinds=b"\1\xff\1", flags=JSON)
    assert written == sealed(body, flags=JSON)
    assert [record.seq for record in iter_records(decoded(written))] == [1, 3]
    assert "all JSON" in fault(naive_body([b"{}", b"", b"[]"], kinds=b"\1\xff\0"), flags=JSON)
    assert "all JSON" in fault(naive_body([b"{}"], kinds=b"\0"), flags=JSON)
    assert "kind 2" in fault(naive_body([b"{}"], kinds=b"\2"), flags=JSON)
    assert len(decoded(sealed(naive_body([b"{}"], kinds=b"\0")))) == 1


def test_a_batch_beyond_the_highest_seq_is_bad() -> None:
    assert "exceeds the highest seq" in fault(naive_body([b"x", b"y"]), seq=frame.SEQ_MAX)


@pytest.mark.parametrize("seed", range(40))
def test_many_batches_read_at_once_are_the_batches_read_one_by_one(seed: int) -> None:
    random = Random(seed)
    pieces: list[bytes] = []
    for number in range(random.randrange(1, 12)):
        datas = [random.randbytes(random.randrange(4)) for _ in range(random.randrange(1, 6))]
        seq = frame.SEQ_MAX - random.randrange(6) if random.random() < 0.02 else 10 * number
        body = naive_body(datas, tags=[b"t"] * len(datas) if random.random() < 0.1 else None)
        if random.random() < 0.1:  # an inconsistent body
            where = random.choice((0, 3, 4, 5, 7, 8, 11, random.randrange(len(body))))
            body = body[:where] + bytes((random.choice((0, 1, 2, 255)),)) + body[where + 1 :]
        node = random.choice((b"", b"", b"n1"))
        pieces.append(sealed(body, node=node, seq=seq))
    buf = b"".join(pieces)
    frames = []
    pos = 0
    while isinstance(found := frame.read_frame(buf, pos, len(buf)), Frame):
        frames.append(found)
        pos = found.end
    assert len(frames) == len(pieces)
    want: list[Record] = []
    wrong = None
    for found in frames:
        rows = batch.decode(buf, found)
        if isinstance(rows, Fault):
            wrong = (found.pos, rows)
            break
        want += iter_records(rows)
    got, bad = batch.decode_all(buf, frames)
    assert [record for rows in got for record in iter_records(rows)] == want, seed
    assert bad == wrong, seed
    assert {at for rows in got for at in rows.frame_pos.tolist()} == {
        f.pos for f in frames if not bad or f.pos < bad[0]
    }


def test_batches_at_the_end_of_all_seqs_are_read_at_once_or_refused() -> None:
    last = sealed(naive_body([b"x", b"y"]), seq=frame.SEQ_MAX - 1)
    beyond = sealed(naive_body([b"x", b"y"]), seq=frame.SEQ_MAX)
    far_beyond = sealed(naive_body([b"x", b"y", b"z"]), seq=frame.SEQ_MAX)
    for pieces, good in (([last, last], 2), ([last, beyond], 1), ([last, far_beyond], 1)):
        buf = b"".join(pieces)
        found = [frame.read_frame(buf, pos, len(buf)) for pos in (0, len(pieces[0]))]
        rows, bad = batch.decode_all(buf, [f for f in found if isinstance(f, Frame)])
        assert sum(map(len, rows)) == 2 * good
        assert bad is None or "exceeds the highest seq" in bad[1].reason
        assert (bad is None) == (good == 2)


def test_a_head_whose_padding_hides_in_an_overflow_is_refused_among_others() -> None:
    """The last byte of the padding is the top of a 64-bit number; times four it would vanish."""
    good = naive_body([b"x", b"y"])
    lying = good[:7] + b"\x40" + good[8:]
    buf = sealed(good) + sealed(lying)
    found = [frame.read_frame(buf, pos, len(buf)) for pos in (0, len(buf) // 2)]
    rows, bad = batch.decode_all(buf, [f for f in found if isinstance(f, Frame)])
    assert sum(map(len, rows)) == 2
    assert bad is not None
    assert "padding 000040" in bad[1].reason


def test_a_batch_of_holes_only_has_no_records() -> None:
    rows = decoded(encode_batch(10, 1, TS, [b"", b""], kinds=b"\xff\xff", tag=b"t"))
    assert not len(rows)
    assert list(iter_records(rows)) == []
    assert to_arrow(rows).num_rows == 0


@pytest.mark.parametrize("seed", range(60))
def test_a_random_body_with_a_good_checksum_gets_a_verdict_or_rows_inside_itself(seed: int) -> None:
    random = Random(seed)
    for _ in range(60):
        body = bytearray(BODY if random.random() < 0.8 else random.randbytes(random.randrange(64)))
        for _ in range(random.randint(0, 3)):
            if body:
                body[random.randrange(len(body))] = random.choice((0, 1, 2, 255, random.randrange(256)))
        if random.random() < 0.3:
            body = body[: random.randrange(len(body) + 1)]
        buf = sealed(bytes(body), tag=random.choice((b"", b"t")))
        found = frame.read_frame(buf, 0, len(buf))
        assert isinstance(found, Frame)
        rows = batch.decode(buf, found)
        if isinstance(rows, Fault):
            assert rows.reason
            continue
        for span in (rows.data, rows.node, rows.tag, rows.meta):
            if span is not None and len(rows):
                assert int(span.pos.min()) >= found.node_pos
                assert int((span.pos + span.size).max()) <= found.data_end
        assert len(list(iter_records(rows))) == len(rows) == len(record_kinds(rows))
