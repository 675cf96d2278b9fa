"""Copies of a log in a new directory: point-in-time restore, and conversion to another codec.

`restore` copies complete segments byte for byte and writes the last one up to the requested seq or time. The manifest
is written last, so an interrupted restore is an empty log and never a wrong one. `convert` keeps seqs and times and
drops no column silently. Both only read the source; the destination must be new or empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tidelog.addresses import check_path
from tidelog.commitlog.codec import Fault, concat_buffers, reencode
from tidelog.commitlog.codecs import make_codec
from tidelog.commitlog.log import SegmentedLog
from tidelog.commitlog.read import corrupt_error
from tidelog.commitlog.segment import LogFiles, SealedSegment
from tidelog.config import LogConfig
from tidelog.disk.durability import replace_file, write_temporary
from tidelog.disk.interface import Disk, join
from tidelog.errors import AlreadyExists, BadInput
from tidelog.formats import small_files
from tidelog.formats.rows import Rows
from tidelog.formats.small_files import LogManifest, ManifestEntry
from tidelog.types import Ints

_COPY_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class RestoreResult:
    path: str
    lowest: int
    highest: int  # one past the last seq of the copy
    bytes: int


def restore(
    log: SegmentedLog,
    destination: str,
    *,
    to_seq: int | None = None,
    to_time_us: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RestoreResult:
    """Copy every record up to and including `to_seq`, or not younger than `to_time_us`, into a new directory."""
    if (to_seq is None) == (to_time_us is None):
        raise BadInput("name either to_seq or to_time_us; nothing was written")
    check_path(destination)
    state = log._log_state
    if state.config.unverified:
        raise BadInput("a log that is read without verification is not restored; nothing was written, convert it")
    disk = state.disk
    stop = to_seq + 1 if to_seq is not None else log.seek_time((to_time_us or 0) + 1)
    if stop < log.lowest:
        raise BadInput(
            f"{log.path} starts at seq {log.lowest}; there is nothing before it to restore, nothing was written"
        )
    stop = min(stop, log.highest)
    for segment in state.sealed:
        if segment.lost_reason and segment.base < stop:
            raise corrupt_error(state, segment, Fault(segment.base, segment.stop, 0, segment.lost_reason))
    check_new_directory(disk, destination)
    disk.make_dir(destination)
    with state.writer_lock:  # no segment is removed or replaced while it is copied; readers continue
        with state.mutex:
            complete = [segment for segment in state.sealed if segment.stop <= stop]
        total = len(complete) + 1
        base = complete[-1].stop if complete else log.lowest
        # Until the copy is complete, its manifest lists every segment as being removed.
        _write_copy_manifest(log, destination, [], None, [*(segment.base for segment in complete), base])
        for number, segment in enumerate(complete):
            if progress is not None:
                progress(number, total)
            _copy_segment(state.files, segment, destination)
        _write_last_segment(log, destination, base, stop)
        _write_copy_manifest(log, destination, [segment.manifest_entry() for segment in complete], base, [])
    with SegmentedLog.open(
        destination, log.codec, disk=disk, clock=state.clock, config=state.config, first_seq=base
    ) as copy:
        if progress is not None:
            progress(total, total)
        return RestoreResult(destination, copy.lowest, copy.highest, copy.size)


def check_new_directory(disk: Disk, path: str) -> None:
    """Raise AlreadyExists unless `path` does not exist or is an empty directory."""
    stat = disk.stat(path)
    if stat is not None and (not stat.is_dir or disk.list_dir(path)):
        raise AlreadyExists(f"{path} exists already and is not empty; nothing was written, name a new directory")


def _write_copy_manifest(
    log: SegmentedLog, destination: str, entries: list[ManifestEntry], active: int | None, removing: list[int]
) -> None:
    """Write the manifest of the copy. The size of its last segment is not known yet."""
    content = LogManifest(
        codec=log.codec,
        generation=1,
        segments=entries,
        active=None if active is None else ManifestEntry(active, 0, 0),
        next_seq=active or 0,
        reserved=log.highest,
        clean=False,
        removing=removing,
        offsets=False,
    )
    replace_file(
        log._log_state.disk, join(destination, small_files.MANIFEST_NAME), small_files.encode_manifest(content)
    )


def _copy_segment(files: LogFiles, segment: SealedSegment, destination: str) -> None:
    disk = files.disk
    for path in files.segment_paths(segment.base):
        if disk.stat(path) is None:
            continue
        source = disk.open(path)
        target = disk.open(join(destination, path.rpartition("/")[2]), "create")
        try:
            size, pos = source.size(), 0
            while pos < size:
                piece = source.read(pos, _COPY_CHUNK_BYTES)
                target.write(pos, piece)
                pos += len(piece)
            target.sync()
        finally:
            source.close()
            target.close()
    disk.sync_dir(destination)


def _write_last_segment(log: SegmentedLog, destination: str, base: int, stop: int) -> None:
    """Write the records of [base, stop) as one segment, sides first, so that data never lacks them."""
    state, codec = log._log_state, log._log_state.codec
    parts: list[Rows] = [reencode(codec, rows) for rows in log.batches(base, stop)] if base < stop else []
    rows = concat_buffers(parts)
    sides, _ = codec.encode_sides(rows, 0, base, codec.initial_side_state(base))
    names = [codec.side_name(base, suffix) for suffix in codec.side_suffixes]
    # The file that makes the segment exist comes last: an authoritative index, otherwise the data.
    contents = [(codec.data_name(base), bytes(rows.buf)), *zip(names, sides, strict=True)]
    if 0 not in codec.authoritative_sides:
        contents = [*contents[1:], contents[0]]
    if codec.created_suffix:
        contents.insert(0, (codec.side_name(base, codec.created_suffix), b"%d\n" % state.clock.now_us()))
    for name, content in contents:
        write_temporary(state.disk, join(destination, name), content)
    state.disk.sync_dir(destination)


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

    A column that the target cannot store is refused unless named in `drop`. A seq that the target cannot store is
    refused unless `renumber` shifts all of them to its first seq. Times that step back, as another program's clock can
    leave them, are refused unless `clamp_times` raises each to the latest time before it. A copy in the same layout has
    the same variant of it (`header_bytes`, `index_width`) unless `settings` say otherwise.
    """
    check_path(destination)
    disk = disk or log._log_state.disk
    check_new_directory(disk, destination)
    target = make_codec(to, LogConfig())
    shift = target.first_seq - log.lowest if renumber else 0
    if log.lowest + shift < target.first_seq:
        raise BadInput(
            f"seq {log.lowest} does not exist in the {to} layout, which starts at {target.first_seq}; "
            "nothing was written, renumber shifts all seqs"
        )
    total = len(log)
    if to == log.codec:
        settings = log._log_state.codec.variant_settings() | settings
    elif to == "laminar" and log.highest + shift > 1 << 32:
        settings = {"index_width": 8} | settings
    copy = SegmentedLog.open(
        destination,
        to,
        disk=disk,
        clock=log._log_state.clock,
        first_seq=log.lowest + shift,
        **{"sync": "interval"} | settings,
    )
    try:
        for rows in log.batches():
            converted = _fit_columns(rows, shift, target.supported_columns, drop, to)
            if clamp_times and len(rows):
                times: Ints = np.maximum.accumulate(np.maximum(rows.ts_us, copy._log_state.active.last_ts_us))
                converted = replace(converted, ts_us=times)
            copy.append_rows(converted)
            if progress is not None:
                progress(int(rows.seq[-1]) + 1 - log.lowest, total)
        copy.sync()
    except BaseException:
        copy.remove()  # a partial copy is useless
        raise
    return copy


def _fit_columns(rows: Rows, shift: int, supported_columns: frozenset[str], drop: frozenset[str], to: str) -> Rows:
    spans = {}
    for name in ("node", "tag", "meta"):
        span = getattr(rows, name)
        keeps = span is not None and bool(span.size.any())
        if keeps and name not in supported_columns:
            if name not in drop:
                raise BadInput(
                    f"records have a {name} and the {to} layout cannot store it; stopped at seq {rows.seq[0]}, "
                    "drop it explicitly or choose another codec"
                )
            keeps = False
        spans[name] = span if keeps else None
    return Rows(rows.buf, rows.seq + shift, rows.ts_us, rows.frame_pos, rows.data, **spans)
