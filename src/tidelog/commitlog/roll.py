"""[shell] Birth and sealing of segments. The order of syncs here is what recovery relies on.

    seal    sync data and sides → write the footer (atomic) → the segment is complete
    birth   write the birth file → create data and sides → sync the directory
    roll    seal, then birth; a crash in between leaves a complete last segment, which simply goes on growing

So a later segment exists on disk only after the one before it is whole.
"""

from __future__ import annotations

from tidelog.commitlog.codec import Recovered
from tidelog.commitlog.latch import Latch
from tidelog.commitlog.segment import Active, Files, Mapped, Sealed, map_file
from tidelog.disk.atomic import remove_if_there, replace
from tidelog.disk.seam import File
from tidelog.formats.rows import Stop


def empty(base: int, sides: int) -> Recovered:
    return Recovered(0, (b"",) * sides, base, 0, 0, 0, 0, Stop.END, "", [])


def birth(files: Files, latch: Latch, base: int, *, now_us: int, last_ts_us: int) -> Active:
    """Create an empty active segment at `base`; its names survive a power cut on return."""
    codec, disk = files.codec, files.disk
    opened: list[File] = []
    try:
        if codec.birth_suffix:
            replace(disk, files.side(base, codec.birth_suffix), b"%d\n" % now_us)
        for path in [files.data(base), *(files.side(base, suffix) for suffix in codec.side_suffixes)]:
            remove_if_there(disk, path)  # left by an attempt that ran out of room
            opened.append(disk.open(path, "create"))
        if codec.reserve_bytes:
            opened[1].reserve(codec.reserve_bytes)
        disk.sync_dir(files.directory)
    except OSError as error:
        for file in opened:
            file.close()
        raise latch.failed(error, f"creating segment {base}") from error
    found = empty(base, len(codec.side_suffixes))._replace(last_ts_us=last_ts_us, mark=codec.first_mark(base))
    data, *sides = opened
    return Active(files, latch, base, found, data=data, sides=list(sides), born_us=now_us, last_write_us=now_us)


def seal(files: Files, latch: Latch, active: Active) -> Sealed:
    """Make a segment complete and immutable. It stays the active one until another is born."""
    active.settle()
    try:
        active.trim_sides()
    except OSError as error:
        raise latch.failed(error, f"sealing segment {active.base}") from error
    active.sync_all()
    # Mapped, not read: the bytes are synced and will not change, and a whole segment need not be copied to be hashed.
    shape = active.shape()
    shape.data = Mapped(map_file(files.disk, files.data(active.base)) or memoryview(b""))
    extra = files.codec.seal(shape)
    if extra is not None and files.codec.extra_suffix:
        try:
            replace(files.disk, files.side(active.base, files.codec.extra_suffix), extra)
        except OSError as error:
            raise latch.failed(error, f"sealing segment {active.base}") from error
    return active.sealed(extra)
