"""Random lookups of single records, by codec and by how many indexes stay in memory.

Sketch. The bytes lie in the page cache, so reading a kilobyte at a known place is one system call,
2 µs. A lookup finds the segment and the index entry by arithmetic or by bisection, decodes and
verifies one stretch, and makes one record: expected 20 to 40 µs of Python where the index is dense
(laminar), and more where a stretch has to be walked: a frame of 250 records in tide, up to 100
records in rustlog, 4 KB in narwhal. Without an index cache each lookup maps the index again, two
system calls and a page fault: expected 10 to 20 µs more.

How far off: 80 to 250 µs. A lookup goes through the same columns as a scan, and some 60 to 100 calls of NumPy
cost a microsecond each, however few records they are for. Mapping an index again costs 30 to 50 µs.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.common import GB, Result, alternate, data_files, payloads, result, scratch_dir, steps

from tidelog.commitlog import SegmentedLog

_CODECS: dict[str, dict[str, Any]] = {
    "tide": {"codec": "tide"},
    "tide, one frame a record": {"codec": "tide"},
    "rustlog": {"codec": "rustlog"},
    "rustlog without checksums": {"codec": "rustlog", "checksums": False},
    "laminar": {"codec": "laminar"},
    "narwhal": {"codec": "narwhal"},
}
_CACHES: tuple[int | None, ...] = (None, 0, 8)
_SEGMENTS = 32
_SIZE = 1024


def run(quick: bool) -> list[Result]:
    batches = _SEGMENTS if quick else 2 * _SEGMENTS
    lookups = 200 if quick else 2000
    rounds = 3 if quick else 5
    found: list[Result] = []
    with scratch_dir(GB // 2) as place:
        for name, settings in _CODECS.items():
            path = place / name.replace(" ", "-").replace(",", "")
            _make(path, batches, single="one frame" in name, **settings)
            seqs = Random(7).choices(range(batches * 1000), k=lookups)
            figures = alternate(
                f"lookups, {name}",
                rounds,
                {
                    **{
                        str(cache): partial(_look_up, path, seqs, {**settings, "index_cache": cache})
                        for cache in _CACHES
                    },
                    "pread": partial(_pread, path, lookups),
                },
            )
            found += [
                result(
                    f"lookup 1 KB, index cache {_said(cache)}, {name}",
                    figures[str(cache)],
                    "/s",
                    limit=figures["pread"],
                    limit_name="pread at a known place",
                )
                for cache in _CACHES
            ]
    return found


def _said(cache: int | None) -> str:
    return "of all" if cache is None else f"of {cache}"


def _make(path: Path, batches: int, *, single: bool, **settings: Any) -> None:
    datas = payloads(_SIZE)
    with (
        SegmentedLog.open(str(path), sync="interval", segment_bytes_max=1 << 30, **settings) as log,
        steps(f"writing {path.name}", batches) as done,
    ):
        for number in range(batches):
            if single:
                for data in datas:
                    log.append(data)
            else:
                log.append_many(datas)
            if (number + 1) % (batches // _SEGMENTS) == 0:
                log.seal()
            done()


def _look_up(path: Path, seqs: list[int], settings: dict[str, Any]) -> float:
    """From a fresh open, so that the first lookups pay for what the later ones find in the caches."""
    with SegmentedLog.open(str(path), read_only=True, verify_on_open=False, **settings) as log:
        lowest = log.lowest
        start = time.perf_counter()
        for seq in seqs:
            log.read(lowest + seq)
        return len(seqs) / (time.perf_counter() - start)


def _pread(path: Path, lookups: int) -> float:
    files = [file for file in data_files(path) if file.stat().st_size > _SIZE]
    random = Random(7)
    opened = [(os.open(file, os.O_RDONLY), file.stat().st_size - _SIZE) for file in files]
    places = [(fd, random.randrange(last)) for fd, last in random.choices(opened, k=lookups)]
    try:
        start = time.perf_counter()
        for fd, pos in places:
            os.pread(fd, _SIZE, pos)
        return lookups / (time.perf_counter() - start)
    finally:
        for fd, _ in opened:
            os.close(fd)
