"""Control frame bodies: round trips, and every way in which a body can be malformed."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelog.errors import BadInput, Corrupt, NewerFormat
from tidelog.formats import control_frames, frame
from tidelog.formats.control_frames import Match, MatchOp, TopicMark

u64 = st.integers(0, (1 << 64) - 1)
text = st.text(max_size=8)
match = st.builds(Match, st.sampled_from(MatchOp), text)
option = st.none() | u64
quick = settings(max_examples=200, deadline=None, database=None)

BODIES = st.one_of(
    st.builds(control_frames.TopicCreate, text, st.binary(max_size=9)),
    st.builds(control_frames.ConfigUpdate, text, st.binary(max_size=9)),
    st.builds(control_frames.TopicDelete, text),
    st.builds(
        control_frames.RouterCreate,
        name=text,
        source=text,
        dest=text,
        preserve_node=st.booleans(),
        preserve_tag=st.booleans(),
        create_dest=st.booleans(),
        allow_cycle=st.booleans(),
        exactly_once=st.booleans(),
        match=st.none() | match,
        initial_cursor=u64,
        initial_dest_base=u64,
    ),
    st.builds(control_frames.RouterDelete, text),
    st.builds(
        control_frames.Delete,
        before_seq=option,
        match=st.none() | match,
        seqs=st.lists(u64, max_size=4).map(tuple),
        bound_head=option,
    ),
    st.builds(control_frames.EvictWatermark, evict_floor=u64, earliest_seq=u64, expiry_floor=u64),
    st.builds(control_frames.CheckpointBarrier, u64),
    st.builds(
        control_frames.CheckpointMark,
        wal_first=u64,
        wal_pos=u64,
        topics=st.lists(st.builds(TopicMark, u64, u64, u64, u64, u64, u64, u64), max_size=3, unique_by=lambda m: m[0])
        .map(sorted)
        .map(tuple),
    ),
    st.builds(
        control_frames.Lease,
        event=st.sampled_from(control_frames.LeaseEvent),
        lease_id=u64,
        deadline_ms=u64,
        deliveries=u64,
        node=text,
    ),
    st.builds(control_frames.HeadWatermark, u64),
    st.builds(
        control_frames.Forward,
        event=st.sampled_from(control_frames.ForwardEvent),
        source_id=u64,
        first=u64,
        last=u64,
        dest_head=u64,
    ),
    st.builds(
        control_frames.NumberedBatch,
        writer=text,
        number=st.integers(0, (1 << 63) - 1),
        first=u64,
        last=u64,
        sum=st.tuples(u64, u64),
        query_id=text,
    ),
    st.builds(control_frames.WriteKey, key=text, first=u64, last=u64),
    st.builds(control_frames.GroupCursor, group=text, seq=u64, hold_bytes=u64, gone=st.booleans()),
)


@quick
@given(BODIES)
def test_a_body_decodes_to_itself(body: control_frames.Body) -> None:
    assert control_frames.decode(body.KIND, control_frames.encode(body)) == body
    assert control_frames.decode(body.KIND, memoryview(control_frames.encode(body))) == body


@quick
@given(BODIES, st.binary(min_size=1, max_size=3))
def test_a_body_cut_anywhere_or_with_bytes_left_over_is_corrupt(body: control_frames.Body, extra: bytes) -> None:
    """One length is taken: a mark cut to 8 bytes would be a barrier. The frame's length forbids that cut.

    A barrier of another length is read as a mark, of a version that may look newer.
    """
    whole = control_frames.encode(body)
    for size in range(len(whole)):
        if isinstance(body, control_frames.CheckpointMark) and size == 8:
            assert isinstance(control_frames.decode(body.KIND, whole[:size]), control_frames.CheckpointBarrier)
            continue
        with pytest.raises((Corrupt, NewerFormat)):
            control_frames.decode(body.KIND, whole[:size])
    with pytest.raises((Corrupt, NewerFormat)):
        control_frames.decode(body.KIND, whole + extra)


@quick
@given(st.integers(0, 300), st.binary(max_size=80))
def test_random_bytes_are_a_body_or_a_typed_error(kind: int, data: bytes) -> None:
    try:
        body = control_frames.decode(kind, data)
    except (Corrupt, NewerFormat):
        return
    assert control_frames.encode(body) == data, "what decodes is what would have been written"


def lp(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


ROUTER = lp(b"r") + lp(b"a") + lp(b"b")


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        (frame.TOPIC_CREATE, lp(b"\xff") + lp(b""), "UTF-8"),
        (frame.TOPIC_CREATE, struct.pack("<I", 1 << 31) + b"x", "bytes do not fit"),
        (frame.TOPIC_DELETE, lp(b"a") + lp(b"{}"), "no config"),
        (frame.ROUTER_CREATE, ROUTER + b"\x20\x00" + bytes(16), "router options"),
        (frame.ROUTER_CREATE, ROUTER + b"\x00\x02" + bytes(16), "neither 0 nor 1"),
        (frame.ROUTER_CREATE, ROUTER + b"\x00\x01\x02" + lp(b"x") + bytes(16), "match operation 2"),
        (frame.DELETE, b"\x02" + bytes(8) + b"\0" + bytes(4) + b"\0", "neither 0 nor 1"),
        (frame.DELETE, b"\0\0" + bytes(4) + b"\x03" + bytes(8), "neither 0 nor 1"),
        (frame.DELETE, b"\0\0" + struct.pack("<I", (1 << 32) - 1) + bytes(9), "bytes do not fit"),
        (frame.LEASE, b"\x04" + bytes(24) + lp(b""), "lease event 4"),
        (frame.EVICT_WATERMARK, bytes(25), "left over"),
        (frame.CHECKPOINT_MARK, bytes(24), "version 0"),
        (frame.CHECKPOINT_MARK, b"", "bytes do not fit"),
        (
            frame.CHECKPOINT_MARK,
            struct.pack("<IQQI", 1, 0, 0, 2) + struct.pack("<Q48x", 5) + struct.pack("<Q48x", 5),
            "do not rise",
        ),
        (frame.CHECKPOINT_MARK, struct.pack("<IQQI", 1, 0, 0, (1 << 32) - 1), "bytes do not fit"),
        (frame.APPEND, b"", "not the body"),
        (frame.APPEND_BATCH, b"", "not the body"),
        (0, b"", "not the body"),
    ],
)
def test_a_malformed_body_is_corrupt_with_a_reason(kind: int, data: bytes, words: str) -> None:
    with pytest.raises(Corrupt, match=words):
        control_frames.decode(kind, data)


def test_a_later_checkpoint_mark_is_refused_as_newer() -> None:
    with pytest.raises(NewerFormat) as caught:
        control_frames.decode(frame.CHECKPOINT_MARK, struct.pack("<IQQI", 2, 0, 0, 0))
    assert (caught.value.found, caught.value.known) == (2, 1)


@pytest.mark.parametrize(
    "body",
    [
        control_frames.HeadWatermark(-1),
        control_frames.HeadWatermark(1 << 64),
        control_frames.Delete(seqs=(1, -1)),
        control_frames.Delete(before_seq=1 << 64),
        control_frames.RouterDelete("\ud800"),
        control_frames.CheckpointMark(wal_first=1, wal_pos=1, topics=(TopicMark(*[2] * 7), TopicMark(*[2] * 7))),
    ],
)
def test_a_value_that_could_not_be_decoded_is_refused(body: Any) -> None:
    with pytest.raises(BadInput):
        control_frames.encode(body)


def test_every_control_type_has_a_body() -> None:
    kinds = {kind for kind in frame.FRAME_NAMES if not frame.is_record(kind)}
    found = {body.KIND for body in vars(control_frames).values() if hasattr(body, "KIND")}
    assert found == kinds
