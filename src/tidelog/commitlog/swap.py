"""[shell] Putting new bytes in the place of a segment, so that a crash shows the old ones or the new ones.

`prepare` writes every new file beside the old one and changes nothing; a full disk or a failed
write is noticed there, and `abandon` takes the new files away again. `commit` only renames:

    remove the sides that can be derived → rename the data (commit) → rename the new sides

An old index beside new data would point at the wrong bytes, so where a side can be derived it
goes first, and a crash leaves it missing: it is rebuilt. A side that cannot be derived (the index of
laminar, the checksums of rustlog) stays until its new form takes its place. That is written after the new
data, so a side.compacted without a data.compacted says "committed, finish it"; with it, "not committed,
forget both". `settle` does the one or the other, and readers look at it the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import product

from tidelog.commitlog.segment import SWAPPED as SUFFIX
from tidelog.commitlog.segment import Files
from tidelog.disk.atomic import remove_if_there, sync_names, write_temporary
from tidelog.types import Buffer

_SIDE_SUFFIX = ".rebuilding"


def prepare(files: Files, base: int, data: Buffer, sides: Sequence[bytes], extra: bytes | None) -> None:
    """Write the new files of a segment, durably, under names that the sweep knows. On an error none of them stays."""
    codec, disk = files.codec, files.disk
    settle(files, [base])  # one that failed half-way must not be taken for this one
    try:
        write_temporary(disk, files.data(base) + SUFFIX, data)
        sync_names(disk, files.directory)
        for suffix, content in zip(codec.side_suffixes, sides, strict=True):
            write_temporary(disk, _new_side(files, base, suffix), content)
        if extra is not None and codec.extra_suffix:
            write_temporary(disk, _new_extra(files, base), extra)
        sync_names(disk, files.directory)
    except OSError:
        abandon(files, base)
        raise


def abandon(files: Files, base: int) -> None:
    """Forget what was prepared."""
    new = [_new_side(files, base, suffix) for suffix in files.codec.side_suffixes]
    # The data last: an index of the truth kind without its data would read as committed.
    for path in (*new, _new_extra(files, base), files.data(base) + SUFFIX):
        with suppress(OSError):
            remove_if_there(files.disk, path)
    with suppress(OSError):
        files.disk.sync_dir(files.directory)


def commit(files: Files, base: int) -> None:
    """Put what was prepared in place; durable on return."""
    codec, disk, directory = files.codec, files.disk, files.directory
    files.forget(base)
    target = files.data(base)
    derived = [suffix for number, suffix in enumerate(codec.side_suffixes) if number not in codec.truths]
    gone = [*derived, *codec.stale_suffixes, *([codec.extra_suffix] if codec.extra_suffix else [])]
    if gone:
        for suffix in gone:
            remove_if_there(disk, files.side(base, suffix))
        disk.sync_dir(directory)
    disk.rename(target + SUFFIX, target)
    disk.sync_dir(directory)
    for suffix in codec.side_suffixes:
        disk.rename(_new_side(files, base, suffix), files.side(base, suffix))
    if codec.extra_suffix and disk.stat(_new_extra(files, base)) is not None:
        disk.rename(_new_extra(files, base), files.side(base, codec.extra_suffix))
    disk.sync_dir(directory)


def settle(files: Files, bases: Sequence[int]) -> list[str]:
    """Finish or forget interrupted swaps of sides that cannot be derived; the names that were dealt with."""
    codec, disk = files.codec, files.disk
    done: list[str] = []
    truths = [codec.side_suffixes[number] for number in sorted(codec.truths)]
    for base, suffix in product(bases, truths):
        fresh = _new_side(files, base, suffix)
        if disk.stat(fresh) is None:
            continue
        if disk.stat(files.data(base) + SUFFIX) is None:
            disk.sync_dir(files.directory)  # the new data must not vanish again when its side is there
            disk.rename(fresh, files.side(base, suffix))
        else:
            disk.remove(fresh)
        disk.sync_dir(files.directory)
        done.append(codec.side_name(base, suffix) + SUFFIX)
    return done


def _new_side(files: Files, base: int, suffix: str) -> str:
    truth = files.codec.side_suffixes.index(suffix) in files.codec.truths
    return files.side(base, suffix) + (SUFFIX if truth else _SIDE_SUFFIX)


def _new_extra(files: Files, base: int) -> str:
    return f"{files.side(base, files.codec.extra_suffix or '')}.tmp"
