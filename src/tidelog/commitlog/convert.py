"""[shell] One log in another codec's layout: seqs and times kept, nothing dropped in silence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tidelog.addresses import check_path
from tidelog.commitlog.codecs import codec_named
from tidelog.commitlog.log import SegmentedLog
from tidelog.config import LogConfig
from tidelog.disk.seam import Disk
from tidelog.errors import AlreadyExists, BadInput
from tidelog.formats.rows import Rows
from tidelog.types import Ints


def convert(
    log: SegmentedLog,
    destination: str,
    to: str,
    *,
    renumber: bool = False,
    drop: frozenset[str] = frozenset(),
    clamp_times: bool = False,
    disk: Disk | None = None,
    progress: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> SegmentedLog:
    """Write every record of `log` to a new log at `destination`, and return that log, open.

    A column that the target has no room for is refused unless named in `drop`. A seq that the target cannot hold
    is refused unless `renumber` shifts all of them to its own start. Times that step back, as another program's
    clock can leave them, are refused unless `clamp_times` raises each to the latest time before it.
    """
    check_path(destination)
    disk = disk or log.state.disk
    found = disk.stat(destination)
    if found is not None and (not found.is_dir or disk.names(destination)):
        raise AlreadyExists(f"{destination} is there already and not empty; nothing was written, name a new directory")
    target = codec_named(to, LogConfig())
    shift = target.first_seq - log.lowest if renumber else 0
    if log.lowest + shift < target.first_seq:
        raise BadInput(
            f"seq {log.lowest} does not exist in the {to} layout, which starts at {target.first_seq}; "
            "nothing was written, renumber shifts all seqs"
        )
    total = len(log)
    copy = SegmentedLog.open(
        destination,
        to,
        disk=disk,
        clock=log.state.clock,
        first_seq=log.lowest + shift,
        **{"sync": "interval"} | settings,
    )
    try:
        for rows in log.batches():
            fitted = _fitted(rows, shift, target.room, drop, to)
            if clamp_times and len(rows):
                times: Ints = np.maximum.accumulate(np.maximum(rows.ts_us, copy.state.active.last_ts_us))
                fitted = replace(fitted, ts_us=times)
            copy.append_rows(fitted)
            if progress is not None:
                progress(int(rows.seq[-1]) + 1 - log.lowest, total)
        copy.sync()
    except BaseException:
        copy.remove()  # half a copy is no copy
        raise
    return copy


def _fitted(rows: Rows, shift: int, room: frozenset[str], drop: frozenset[str], to: str) -> Rows:
    spans = {}
    for name in ("node", "tag", "meta"):
        span = getattr(rows, name)
        keeps = span is not None and bool(span.size.any())
        if keeps and name not in room:
            if name not in drop:
                raise BadInput(
                    f"records carry a {name} and the {to} layout has no room for it; stopped at seq {rows.seq[0]}, "
                    f"drop it explicitly or choose another codec"
                )
            keeps = False
        spans[name] = span if keeps else None
    return Rows(rows.buf, rows.seq + shift, rows.ts_us, rows.at, rows.data, **spans)
