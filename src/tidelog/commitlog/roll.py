"""[shell] Birth and sealing of segments. The order of syncs here is what recovery relies on.

    seal    sync data and sides → write the footer (atomic) → the segment is complete
    birth   write the birth file → create data and sides → sync the directory
    roll    seal, then birth; a crash in between leaves a complete last segment, which simply goes on growing

So a later segment exists on disk only after the one before it is whole.
"""

from __future__ import annotations

from tidelog.commitlog.codec import Recovered
from tidelog.commitlog.segment import Absent, Active, Files, Mapped, Sealed, map_file
from tidelog.disk.atomic import SyncFailed, remove_if_there, replace, sync_file, sync_names
from tidelog.disk.latch import Latch
from tidelog.disk.seam import Disk, File
from tidelog.formats.rows import Stop


def empty(base: int, sides: int) -> Recovered:
    return Recovered(0, (b"",) * sides, base, 0, 0, 0, 0, Stop.END, "", [])


def birth(files: Files, latch: Latch, base: int, *, now_us: int, last_ts_us: int, lenient: bool = False) -> Active:
    """Create an empty active segment at `base`; its names survive a power cut on return."""
    codec, disk = files.codec, files.disk
    opened: list[File] = []
    try:
        if codec.birth_suffix:
            born = _fresh(disk, files.side(base, codec.birth_suffix))
            opened.append(born)
            born.write(0, b"%d\n" % now_us)
            sync_file(born)
            opened.pop().close()
        opened.append(_fresh(disk, files.data(base)))
        for suffix in codec.side_suffixes:
            side = _fresh(disk, files.side(base, suffix))
            opened.append(side)
        if codec.reserve_bytes:
            opened[1].reserve(codec.reserve_bytes)
        sync_names(disk, files.directory)
    except OSError as error:
        for file in opened:
            file.close()
        fatal = not lenient and (codec.latch_on_write_error or isinstance(error, SyncFailed))
        raise (latch.failed if fatal else latch.refused)(error, f"creating segment {base}") from error
    found = empty(base, len(codec.side_suffixes))._replace(last_ts_us=last_ts_us, mark=codec.first_mark(base))
    data, *sides = opened
    return Active(files, latch, base, found, data=data, sides=list(sides), born_us=now_us, last_write_us=now_us)


def absent(files: Files, latch: Latch, base: int) -> Active:
    """The active segment of a log that has none and may not make one: an empty one that has no files."""
    count = len(files.codec.side_suffixes)
    found = empty(base, count)._replace(mark=files.codec.first_mark(base))
    data = Absent(files.data(base))
    return Active(files, latch, base, found, data=data, sides=[None] * count, born_us=0, last_write_us=0)


def _fresh(disk: Disk, path: str) -> File:
    """A new, empty file, also where an attempt that ran out of room left one."""
    remove_if_there(disk, path)
    return disk.open(path, "create")


def seal(files: Files, latch: Latch, active: Active, *, synced: bool) -> Sealed:
    """Make a segment complete and immutable. It stays the active one until another is born. `synced`: everything in it
    is known to be on disk, but for what can be derived."""
    active.settle()
    try:
        active.trim_sides()
    except OSError as error:
        raise latch.failed(error, f"sealing segment {active.base}") from error
    active.sync_all(derived_only=synced)
    # Mapped, not read: the bytes are synced and will not change, and a whole segment need not be copied to be hashed.
    shape = active.shape()
    shape.data = Mapped(map_file(files.disk, files.data(active.base)) or memoryview(b""))
    # The codec verifies what it seals: bytes that rotted since they were written must not become good ones.
    extra = files.codec.seal(shape)
    if extra is not None and files.codec.extra_suffix:
        try:
            replace(files.disk, files.side(active.base, files.codec.extra_suffix), extra)
        except OSError as error:
            raise latch.failed(error, f"sealing segment {active.base}") from error
    return active.sealed(extra)
