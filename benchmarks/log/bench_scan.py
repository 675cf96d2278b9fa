"""Sealed sequential scan to Arrow, every checksum verified, from a fresh open each time.

Sketch. The bytes lie in the page cache, so memory is the slowest resource: hashing a mapped file
runs at some 10 GB/s. Beyond the hash a scan pays once per batch (headers, columns) and, where
records do not lie back to back, one copy. Expected: 2 to 4 GB/s with 1 KB records in batches. With
100-byte records the per-record columns (seq, time, two positions, an index entry) weigh as much as
the data: expected 15 to 25 million records a second, against 80 million that the hash alone allows.
One frame per record costs a Python call per record when its own checksum has to be verified, but a
sealed segment is vouched for by its footer: expected a third of the batched rate.
Layouts with a CRC-32 per record pay a call each: expected 1 to 2 million records a second.

How far off: columns of a 20-byte index are strided, and NumPy copies a strided column before it searches
it. Until that is avoided the index costs more than the data, a third of the expected rate at 100 bytes.
One frame a record is nearly as fast as batches, because nothing is called per record either.
"""

from __future__ import annotations

import mmap
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import GB, MB, Result, alternate, data_files, payloads, result, scratch_dir, steps, time_call
from xxhash import xxh3_64_intdigest

from tidelog.commitlog import SegmentedLog
from tidelog.formats.rows import to_arrow

_SEGMENT_BYTES = 64 << 20
_BATCH = 1000
_PIECE = 1 << 20
_HASH = "XXH3 of the mapped files"
_NEEDS_BYTES = 2 * GB


class _Made(NamedTuple):
    path: Path
    records: int
    data_bytes: int


def run(quick: bool) -> list[Result]:
    large = 128 * MB if quick else 1024 * MB
    small = 32 * MB if quick else 256 * MB
    others = 16 * MB if quick else 128 * MB
    rounds = 3 if quick else 5
    found: list[Result] = []
    with scratch_dir(_NEEDS_BYTES if not quick else GB // 2) as place:
        for size, total, least in ((1024, large, 1.0), (100, small, 5.0)):
            name = f"scan {_said(size)} × {_BATCH}, tide"
            made = _make(place / f"tide-{size}", size, total, codec="tide")
            found.append(_measure(name, made, rounds, least=least))
        for size in (1024, 100):
            made = _make(place / f"single-{size}", size, others // (2 if size > 100 else 8), single=True, codec="tide")
            found.append(_measure(f"scan {_said(size)}, one frame a record, tide", made, rounds))
        for label, settings in (
            ("rustlog", {"codec": "rustlog"}),
            ("rustlog without checksums", {"codec": "rustlog", "checksums": False}),
            ("laminar", {"codec": "laminar"}),
            ("narwhal", {"codec": "narwhal"}),
        ):
            for size, total in ((1024, others), (100, others // 4)):
                made = _make(place / f"{label.replace(' ', '-')}-{size}", size, total, **settings)
                found.append(_measure(f"scan {_said(size)} × {_BATCH}, {label}", made, rounds, settings))
    return found


def _said(size: int) -> str:
    return "1 KB" if size == 1024 else f"{size} B"


def _make(path: Path, size: int, total: int, *, single: bool = False, **settings: Any) -> _Made:
    """A log of `total` bytes of data, all of it sealed."""
    datas = payloads(size, _BATCH)
    batches = max(total // (size * _BATCH), 1)
    with (
        SegmentedLog.open(str(path), sync="interval", segment_bytes_max=_SEGMENT_BYTES, **settings) as log,
        steps(f"writing {path.name}", batches) as done,
    ):
        for _ in range(batches):
            if single:
                for data in datas:
                    log.append(data)
            else:
                log.append_many(datas)
            done()
        log.seal()
    return _Made(path, batches * _BATCH, batches * _BATCH * size)


def _measure(
    name: str, made: _Made, rounds: int, settings: dict[str, Any] | None = None, *, least: float | None = None
) -> Result:
    """Scan and hash by turns. The log goes when both are done, so that the page cache can be used again."""
    by_records = made.data_bytes // made.records < 1024
    amount = made.records / 1e6 if by_records else made.data_bytes / GB
    times = alternate(
        name,
        rounds,
        {
            "scan": lambda: time_call(lambda: _scan(made, settings or {})),
            "hash": lambda: time_call(lambda: _hash(made)),
        },
    )
    shutil.rmtree(made.path)
    return result(
        name,
        [amount / taken for taken in times["scan"]],
        "M records/s" if by_records else "GB/s",
        limit=[amount / taken for taken in times["hash"]],
        limit_name=_HASH,
        min_value=least,
        kind="information" if least is None else "gate",
    )


def _scan(made: _Made, settings: dict[str, Any]) -> None:
    # What open would verify is verified by the scan, so that each byte is checked once in every layout.
    records = size = 0
    with SegmentedLog.open(str(made.path), read_only=True, verify_on_open=False, **settings) as log:
        for rows in log.batches():
            arrow = to_arrow(rows)
            records += arrow.num_rows
            size += int(rows.data.size.sum())
        if log.damage_skipped or (records, size) != (made.records, made.data_bytes):
            raise RuntimeError(f"{made.path.name}: {records} records of {made.records} came back")


def _hash(made: _Made) -> None:
    for path in data_files(made.path):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            view = memoryview(mapped)
            for pos in range(0, len(view), _PIECE):
                xxh3_64_intdigest(view[pos : pos + _PIECE])
            view.release()
