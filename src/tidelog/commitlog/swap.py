"""[shell] Putting new bytes in the place of a segment's data file, so that a crash shows the old ones or the new ones.

Where the sides can be derived, they are removed first: an old index beside new data would point
at the wrong bytes, a missing one is rebuilt. Where the index is the truth, two files must change
together, and the order of names is the commit:

    store.compacted durable → index.compacted durable → rename the store (commit) → rename the index

An index.compacted without its store.compacted therefore says "committed, finish it"; with it,
"not committed, forget both". `settle` does the one or the other at open.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidelog.commitlog.segment import Files
from tidelog.disk.atomic import remove_if_there, replace, write_temporary
from tidelog.types import Buffer

SUFFIX = ".compacted"


def swap(files: Files, base: int, data: Buffer, sides: Sequence[bytes]) -> None:
    """Replace a segment's data and sides; durable on return. The extra file is the caller's."""
    codec, disk, directory = files.codec, files.disk, files.directory
    target = files.data(base)
    files.forget(base)
    write_temporary(disk, target + SUFFIX, data)
    disk.sync_dir(directory)
    if 0 in codec.truths:
        index = files.side(base, codec.side_suffixes[0])
        write_temporary(disk, index + SUFFIX, sides[0])
        disk.sync_dir(directory)
        disk.rename(target + SUFFIX, target)
        disk.sync_dir(directory)
        disk.rename(index + SUFFIX, index)
        disk.sync_dir(directory)
        return
    had = [disk.stat(files.side(base, suffix)) is not None for suffix in codec.side_suffixes]
    derived = [*codec.side_suffixes, *([codec.extra_suffix] if codec.extra_suffix else [])]
    for suffix in derived:
        remove_if_there(disk, files.side(base, suffix))
    disk.sync_dir(directory)
    disk.rename(target + SUFFIX, target)
    disk.sync_dir(directory)
    for number, (suffix, content) in enumerate(zip(codec.side_suffixes, sides, strict=True)):
        if had[number] or number not in codec.truths:
            path = files.side(base, suffix)
            replace(disk, path, content, temporary=f"{path}.rebuilding")


def settle(files: Files, bases: Sequence[int]) -> list[str]:
    """Finish or forget interrupted swaps of layouts whose index is the truth; the names that were dealt with."""
    codec, disk = files.codec, files.disk
    done: list[str] = []
    if 0 not in codec.truths:
        return done
    for base in bases:
        target = files.data(base)
        index = files.side(base, codec.side_suffixes[0])
        if disk.stat(index + SUFFIX) is None:
            continue
        if disk.stat(target + SUFFIX) is None:
            disk.rename(index + SUFFIX, index)
        else:
            # The index first: alone it would read as committed.
            disk.remove(index + SUFFIX)
        disk.sync_dir(files.directory)
        done.append(codec.side_name(base, codec.side_suffixes[0]) + SUFFIX)
    return done
