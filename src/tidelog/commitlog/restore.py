"""[shell] Point in time: a copy of a log as it was at a seq or at a time, in a new directory.

Whole segments are copied byte for byte; the one that holds the end is written up to it. The
source is only read. The copy is built under its final name, and its manifest is written last, so an
interrupted restore is an empty log and never a wrong one; the destination must be new or empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tidelog.addresses import check_path
from tidelog.commitlog.codec import Fault, glue, rewrite
from tidelog.commitlog.log import SegmentedLog
from tidelog.commitlog.read import corrupt
from tidelog.commitlog.segment import Files, Sealed
from tidelog.disk.atomic import replace, write_temporary
from tidelog.disk.seam import Disk, join
from tidelog.errors import AlreadyExists, BadInput
from tidelog.formats import log_manifest
from tidelog.formats.log_manifest import Entry, LogManifest
from tidelog.formats.rows import Rows

_COPY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Restored:
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
) -> Restored:
    """Copy every record up to and including `to_seq`, or not younger than `to_time_us`, into a new directory."""
    if (to_seq is None) == (to_time_us is None):
        raise BadInput("say either to_seq or to_time_us; nothing was written")
    check_path(destination)
    state = log.state
    disk = state.disk
    stop = to_seq + 1 if to_seq is not None else log.seek_time((to_time_us or 0) + 1)
    if stop < log.lowest:
        raise BadInput(
            f"{log.path} starts at seq {log.lowest}; there is nothing before it to restore, nothing was written"
        )
    stop = min(stop, log.highest)
    for segment in state.sealed:
        if segment.lost and segment.base < stop:
            raise corrupt(state, segment, Fault(segment.base, segment.stop, 0, segment.lost))
    _fresh(disk, destination)
    with state.turn:  # no segment goes or changes while it is copied; readers go on
        with state.mutex:
            whole = [segment for segment in state.sealed if segment.stop <= stop]
        total = len(whole) + 1
        base = whole[-1].stop if whole else log.lowest
        # Until all of it is there the manifest says that none of it is to stay.
        going = [*(segment.base for segment in whole), base]
        _note(log, destination, [], None, going)
        for number, segment in enumerate(whole):
            if progress is not None:
                progress(number, total)
            _copy(state.files, segment, destination)
        _write_last(log, destination, base, stop)
        _note(log, destination, [segment.entry() for segment in whole], base, [])
    with SegmentedLog.open(
        destination, log.codec, disk=disk, clock=state.clock, config=state.config, first_seq=base
    ) as copy:
        if progress is not None:
            progress(total, total)
        return Restored(destination, copy.lowest, copy.highest, copy.size)


def _fresh(disk: Disk, path: str) -> None:
    found = disk.stat(path)
    if found is not None and (not found.is_dir or disk.names(path)):
        raise AlreadyExists(f"{path} is there already and not empty; nothing was written, name a new directory")
    disk.make_dir(path)


def _note(log: SegmentedLog, destination: str, entries: list[Entry], active: int | None, going: list[int]) -> None:
    """Write the manifest of the copy. Nothing is known yet of the size of its last segment."""
    content = LogManifest(
        codec=log.codec,
        generation=1,
        segments=entries,
        active=None if active is None else Entry(active, 0, 0),
        next_seq=active or 0,
        reserved=log.highest,
        clean=False,
        removing=going,
        offsets=False,
    )
    replace(log.state.disk, join(destination, log_manifest.NAME), log_manifest.encode(content))


def _copy(files: Files, segment: Sealed, destination: str) -> None:
    disk = files.disk
    for path in files.all_of(segment.base):
        if disk.stat(path) is None:
            continue
        source = disk.open(path)
        target = disk.open(join(destination, path.rpartition("/")[2]), "create")
        try:
            size, pos = source.size(), 0
            while pos < size:
                piece = source.read(pos, _COPY_BYTES)
                target.write(pos, piece)
                pos += len(piece)
            target.sync()
        finally:
            source.close()
            target.close()
    disk.sync_dir(destination)


def _write_last(log: SegmentedLog, destination: str, base: int, stop: int) -> None:
    """The records of [base, stop) as one segment; its sides are written first, so that data never lacks them."""
    state, codec = log.state, log.state.codec
    parts: list[Rows] = [rewrite(codec, rows) for rows in log.batches(base, stop)] if base < stop else []
    rows = glue(parts)
    sides, _ = codec.sides(rows, 0, base, codec.first_mark(base))
    names = [codec.side_name(base, suffix) for suffix in codec.side_suffixes]
    # Where the index is the truth it makes the segment count as one, so it comes last; elsewhere the data does.
    order = [(codec.data_name(base), bytes(rows.buf)), *zip(names, sides, strict=True)]
    if 0 not in codec.truths:
        order = [*order[1:], order[0]]
    if codec.birth_suffix:
        order.insert(0, (codec.side_name(base, codec.birth_suffix), b"%d\n" % state.clock.now_us()))
    for name, content in order:
        write_temporary(state.disk, join(destination, name), content)
    state.disk.sync_dir(destination)
