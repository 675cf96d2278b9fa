"""One frame without a walk: what it gives is what the walk gives, and where it gives nothing the walk has the word."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelog.errors import Corrupt
from tidelog.formats import batch, frame, scan, segment_index
from tidelog.formats.rows import Rows

TS = 1_700_000_000_000
names = st.text("aé", max_size=3).map(str.encode)
values = st.lists(st.tuples(st.binary(max_size=5), names, names, st.binary(max_size=3)), min_size=1, max_size=5)


def as_values(rows: Rows | None) -> list[Any] | None:
    if rows is None:
        return None
    spans = (rows.data, rows.node, rows.tag, rows.meta)
    columns = [rows.seq, rows.ts_us, rows.frame_pos]
    return [column.tolist() for column in columns] + [
        None if span is None else (span.pos.tolist(), span.size.tolist()) for span in spans
    ]


@given(values, st.booleans(), st.sampled_from([0, frame.JSON, frame.DURABLE]))
@settings(deadline=None)
def test_a_single_batch_reads_as_a_scan_of_it(found: list[Any], own: bool, flags: int) -> None:
    columns: dict[str, Any] = {"tag": b"t", "node": b"n"}
    if own:
        columns = {name: [row[at] for row in found] for name, at in (("tags", 1), ("nodes", 2), ("metas", 3))}
    (made,) = batch.encode_many(7, 5, TS, [row[0] for row in found], flags=flags, **columns)
    assert as_values(scan.read_single_frame(made)) == as_values(scan.scan_records(made).rows)


@given(st.binary(max_size=9), names, names)
@settings(deadline=None)
def test_a_single_record_reads_as_a_scan_of_it(data: bytes, node: bytes, tag: bytes) -> None:
    made = frame.encode(frame.APPEND, topic_id=7, seq=9, ts_ms=TS, data=data, node=node, tag=tag)
    assert as_values(scan.read_single_frame(made)) == as_values(scan.scan_records(made).rows)


def test_anything_but_one_frame_of_records_is_not_handled() -> None:
    one = frame.encode(frame.APPEND, topic_id=7, seq=9, ts_ms=TS, data=b"x")
    mark = frame.encode(frame.HEAD_WATERMARK, topic_id=7, ts_ms=TS, data=bytes(8))
    assert [scan.read_single_frame(made) for made in (b"", one[:-1], one + one, one + b"\0", mark)] == [None] * 5


# By an index ------------------------------------------------------------------------------------------


def segment(seed: int = 0) -> tuple[bytes, np.ndarray[Any, Any]]:
    """Batches and records by turns, with the entries of their index."""
    random, out, seq = Random(seed), b"", 1
    for number in range(6):
        datas = [random.randbytes(random.randrange(6)) for _ in range(random.randrange(1, 6))]
        kinds = bytes(random.choice((batch.KIND_BYTES, batch.KIND_JSON)) for _ in datas) if number % 2 else None
        tags = [random.choice([b"", b"t"]) for _ in datas] if number % 3 else None
        out += b"".join(batch.encode_many(7, seq, TS + number, datas, kinds=kinds, tags=tags))
        seq += len(datas)
        out += frame.encode(frame.APPEND, topic_id=7, seq=seq, ts_ms=TS + number, data=b"single")
        seq += 1
    walk = scan.scan_records(out)
    return out, segment_index.build_entries(walk.rows, 1, seq, len(out))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("check", [False, True])
def test_every_range_of_an_index_reads_as_a_scan_of_it(seed: int, check: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out, entries = segment(seed)
    ranges = [(lo, hi) for lo in range(len(entries)) for hi in range(lo + 1, len(entries) + 1)]
    quick = [scan.read_single_batch(out, entries[lo:hi], 1 + lo, check=check, origin=0) for lo, hi in ranges]
    monkeypatch.setattr(scan, "read_single_batch", lambda *_, **__: None)
    slow = [scan.scan_indexed(out, entries, lo, hi, 1, check=check) for lo, hi in ranges]
    assert sum(found is not None for found in quick) > len(entries) // 2
    for found, rows in zip(quick, slow, strict=True):
        assert found is None or as_values(found) == as_values(rows)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("field", ["frame_offset", "data_len", "ts", "flags"])
def test_an_entry_that_differs_is_not_handled(field: str, check: bool) -> None:
    """G21: the walk then says where they part."""
    (out,) = batch.encode_many(7, 1, TS, [b"a", b"bc", b"", b"def"])
    good = segment_index.build_entries(scan.scan_records(out).rows, 1, 5, len(out))
    assert scan.read_single_batch(out, good, 1, check=check, origin=0) is not None
    for place in range(4):
        wrong = good.copy()
        wrong[field][place] ^= 1
        assert scan.read_single_batch(out, wrong, 1, check=check, origin=0) is None
        with pytest.raises(Corrupt):
            scan.scan_indexed(out, wrong, 0, 4, 1, check=check)


def test_damage_is_detected_with_check() -> None:
    (out,) = batch.encode_many(7, 1, TS, [b"aaaa", b"bbbb"])
    entries = segment_index.build_entries(scan.scan_records(out).rows, 1, 3, len(out))
    for pos in range(len(out)):
        bad = bytearray(out)
        bad[pos] ^= 1
        assert scan.read_single_batch(bytes(bad), entries, 1, check=True, origin=0) is None


@pytest.mark.parametrize("count", [1, 2])
def test_more_entries_than_records_are_not_handled(count: int) -> None:
    (out,) = batch.encode_many(7, 1, TS, [b"a"] * count)
    entries = np.repeat(segment_index.build_entries(scan.scan_records(out).rows, 1, 1 + count, len(out))[:1], count + 1)
    assert scan.read_single_batch(out, entries, 1, check=False, origin=0) is None
    with pytest.raises(Corrupt):
        scan.scan_indexed(out, entries, 0, count + 1, 1, check=False)
