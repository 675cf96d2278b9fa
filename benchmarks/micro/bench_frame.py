"""Frames in memory: how near the codecs come to joining and hashing the same bytes.

Sketch. A data-only batch of 1000 records copies its data twice and hashes it once, plus about 20 ns a
record for taking lengths: expected a quarter to a half of what `b"".join` of the same list does.
A frame per record is five calls of C a record, 0.35 µs: expected 2 to 3 M a second, whatever the size.
Reading a batch is one hash and a handful of NumPy calls, 20 µs a frame: expected to be bound by that
at 100 bytes and by the hash at 1 KB. All figures are gates: nothing but our code and the memory is in them.

Traps. Seconds are those of the processor, so that a busy machine does not count; its caches still do.
Buffers over 128 KB may be mapped and unmapped by malloc on every call and then pay page faults, which is
what the 1 KB figures show; MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ in the environment tell how much.
Medians of rounds in which every candidate and every limit takes its turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from statistics import median
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.table import Table
from xxhash import xxh3_64_intdigest

from tidelog.formats import batch, frame, scan, segment_index
from tidelog.formats.frame import Frame
from tidelog.formats.rows import Rows, to_arrow

TS = 1_700_000_000_000
COUNT = 1000
_ROUNDS = 15
_ROUND_S = 0.004  # long against the timer, short against the drift of the machine

Work = Callable[[], object]


def run() -> list[dict[str, Any]]:
    """One row per figure; `value` and `limit` in millions of records a second."""
    rows: list[dict[str, Any]] = []
    for size, said in ((100, "100 B"), (1024, "1 KB")):
        rows += _encode(size, said) + _decode(size, said)
    return rows


def _encode(size: int, said: str) -> list[dict[str, Any]]:
    random = Random(size)
    datas = [random.randbytes(size) for _ in range(COUNT)]
    tags = [b"tag-%d" % (i % 10) for i in range(COUNT)]
    array = pa.array(datas, pa.binary())
    speeds = _speeds(
        {
            "join": lambda: b"".join(datas),
            "appends": lambda: _encode_appends(1, datas),
            "named": lambda: _encode_appends(1, datas, b"node-1", b"tag-abcd"),
            "batch": lambda: batch.encode_many(1, 1, TS, datas),
            "tagged": lambda: batch.encode_many(1, 1, TS, datas, tags=tags),
            "arrow": lambda: batch.encode_arrow(1, 1, TS, array),
        },
        COUNT,
    )
    small = size == 100
    join = ("b''.join of the same data", speeds["join"])
    return [
        _row(f"encode Append frames one by one, {said}", speeds["appends"], join, 1.5 if small else None),
        _row(f"encode Append frames one by one, with node and tag, {said}", speeds["named"], join),
        _row(f"encode AppendBatch, data only, {said}", speeds["batch"], join, 8.0 if small else None),
        _row(f"encode AppendBatch, a tag a record, {said}", speeds["tagged"], join),
        _row(f"encode AppendBatch from Arrow, {said}", speeds["arrow"], join),
    ]


def _decode(size: int, said: str) -> list[dict[str, Any]]:
    random = Random(size)
    datas = [random.randbytes(size) for _ in range(COUNT)]
    one = memoryview(b"".join(batch.encode_many(1, 1, TS, datas)))
    speeds = _speeds(
        {
            "hash": lambda: xxh3_64_intdigest(one),
            "rows": lambda: _rows(one),
            "arrow": lambda: to_arrow(_rows(one)),
        },
        COUNT,
    )
    hashed = ("xxh3 of the same bytes", speeds["hash"])
    found = [
        _row(f"verify AppendBatch to columns, {said}", speeds["rows"], hashed),
        _row(f"verify AppendBatch to Arrow, {said}", speeds["arrow"], hashed),
    ]

    # A stretch of log as recovery meets it: 8 MB of each kind of frame.
    turns = (8 << 20) // (COUNT * size)
    batches = b"".join(piece for turn in range(turns) for piece in batch.encode_many(1, 1 + turn * COUNT, TS, datas))
    appends = b"".join(_encode_appends(1 + turn * COUNT, datas) for turn in range(turns))
    records = turns * COUNT
    entries = segment_index.build_entries(scan.scan_records(appends).rows, 1, records + 1, len(appends))
    speeds = _speeds(
        {
            "batches": lambda: scan.scan_records(batches),
            "batch hash": lambda: xxh3_64_intdigest(batches),
            "appends": lambda: scan.scan_records(appends),
            "append hash": lambda: xxh3_64_intdigest(appends),
            "indexed": lambda: scan.scan_indexed(appends, entries, 0, records, 1, check=False),
        },
        records,
    )
    for name, work, limit in (
        (f"walk 8 MB of AppendBatch, {said}", "batches", "batch hash"),
        (f"walk 8 MB of Append, {said}", "appends", "append hash"),
        (f"read 8 MB of Append by index, vouched for, {said}", "indexed", "append hash"),
    ):
        found.append(_row(name, speeds[work], ("xxh3 of the same bytes", speeds[limit])))
    return found


def _encode_appends(first_seq: int, datas: list[bytes], node: bytes = b"", tag: bytes = b"") -> bytes:
    return b"".join([frame.encode_append(1, seq, TS, data, node, tag) for seq, data in enumerate(datas, first_seq)])


def _rows(buf: memoryview) -> Rows:
    found = frame.read_frame(buf, 0, len(buf))
    assert isinstance(found, Frame)
    rows = batch.decode(buf, found)
    assert isinstance(rows, Rows)
    return rows


def _speeds(works: dict[str, Work], records: int) -> dict[str, list[float]]:
    """Millions of records a second of each work, one figure a round."""
    calls = {name: max(1, int(_ROUND_S / _seconds(work, 1))) for name, work in works.items()}
    found: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(_ROUNDS + 1):
        for name in list(works) if turn % 2 else reversed(list(works)):
            speed = records * calls[name] / _seconds(works[name], calls[name]) / 1e6
            if turn:
                found[name].append(speed)
    return found


def _seconds(work: Work, calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        work()
    return time.process_time() - start


def _row(name: str, speeds: list[float], limit: tuple[str, list[float]], least: float | None = None) -> dict[str, Any]:
    value, bound = median(speeds), median(limit[1])
    return {
        "name": name,
        "value": value,
        "unit": "M records/s",
        "limit": bound,
        "limit_name": limit[0],
        "ratio": value / bound,
        "target": "" if least is None else f"≥ {least:g} M records/s",
        "met": None if least is None else value >= least,
        "kind": "gate",
        "low": min(speeds),
        "high": max(speeds),
    }


def main() -> None:
    table = Table(title="frames", title_justify="left")
    for heading in ("benchmark", "M records/s", "limit", "limit is", "of limit", "target"):
        table.add_column(heading, justify="left" if heading in ("benchmark", "limit is", "target") else "right")
    for row in run():
        target = row["target"] and f"{row['target']} {'met' if row['met'] else 'MISSED'}"
        figures = f"{row['value']:.2f}", f"{row['limit']:.1f}", row["limit_name"], f"{row['ratio']:.0%}"
        table.add_row(row["name"], *figures, target)
    Console().print(table)


if __name__ == "__main__":
    main()
