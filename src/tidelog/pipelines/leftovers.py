"""[shell] Files of ours that follow a hole in a table and whose commits are gone.

The next export makes them again, so they are removed first, but only where the log still has every record whose row
they hold: a row of a record that was evicted, or that a power cut or damage took, is nowhere else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tidelog.disk.seam import Disk
from tidelog.errors import Damaged
from tidelog.pipelines import columns, compare
from tidelog.pipelines.commits import Commit
from tidelog.pipelines.compare import Piece
from tidelog.pipelines.runner import Runner
from tidelog.pipelines.tables import Leftover, Table
from tidelog.spark import plan
from tidelog.spark.options import Options
from tidelog.spark.place import Place, Sight
from tidelog.spark.plan import Range
from tidelog.spark.where import Where

_SPLIT_BYTES: Final = 1 << 62


def drop(table: Table, last: Commit, place: Place, options: Options, sight: Sight, disk: Disk, runner: Runner) -> None:
    """Remove them, or raise Damaged where the log cannot give all of their rows back."""
    found = table.leftovers()
    if not found:
        return
    options = replace(options, partitions_min=1, split_bytes=_SPLIT_BYTES, on_gap="skip")
    pieces = []
    for each in found:
        if each.epoch != sight.epoch:
            raise _kept(table, each, f"the topic {sight.topic} was dropped and made again since")
        if each.first < sight.floor:
            raise _kept(table, each, f"the topic has nothing below seq {sight.floor} any more")
        pieces.append(_piece(table, last, place, options, sight, disk, each))
    for each, lost in zip(found, runner.run(compare.lost, pieces), strict=True):
        if lost:
            first, stop = lost[0]
            raise _kept(table, each, f"the topic lost records of it (seqs {first} to {stop - 1})")
    table.drop_leftovers()


def _piece(
    table: Table, last: Commit, place: Place, options: Options, sight: Sight, disk: Disk, each: Leftover
) -> Piece:
    end = min(each.stop, sight.next)
    ranges = [Range(sight, each.first, end)] if each.first < end else []
    return Piece(
        sight.topic,
        table.path,
        disk,
        columns.shape_from(last.schema, last.shape),
        options,
        each.first,
        each.stop,
        sight.floor,
        sight.next,
        tuple(plan.splits(place, options, ranges, Where())) if ranges else (),
        (each.name,),
        (each.bad_name,) if each.bad_name is not None else (),
    )


def _kept(table: Table, each: Leftover, why: str) -> Damaged:
    return Damaged(
        f"{table.path}: the commits of {each.name} (seqs {each.first} to {each.stop - 1}) are gone, a file before it "
        f"is missing, and {why}, so its rows cannot be exported again; nothing was changed. Put the table's commits "
        "(_tidelog/log) or the missing file back, or move this table away and export into another one"
    )
