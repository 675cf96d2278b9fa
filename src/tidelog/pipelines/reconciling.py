"""[shell] Table = log, proven range by range; the first difference shown row by row; one range made again.

    1  pieces     every file of the table is one, with the seqs that it stands for; what lies between is one as well
    2  compare    on executors, by block (`compare`)
    3  look       at the first block that differs, on the driver: which seq, what the log has, what the table has
    4  repair     where that is asked for: the files of every piece that differs are replaced by new ones, in one commit
                  each; files that nobody committed are taken out of sight

A record that was deleted from the log since it was exported is a difference too, and repair takes it out of the table.
What the log lost to a cap or to age is not: there the table is held against its own commits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Final, NamedTuple

import pyarrow as pa

from tidelog.errors import TopicNotFound
from tidelog.pipelines import columns, commits, compare, digest, files
from tidelog.pipelines.commits import Commit, DataFile
from tidelog.pipelines.compare import Compared, Piece
from tidelog.pipelines.exporting import Export, Work
from tidelog.pipelines.tables import Foreign, Table
from tidelog.spark import places, plan
from tidelog.spark.options import Options
from tidelog.spark.place import Sight
from tidelog.spark.plan import Range
from tidelog.spark.stretches import Split
from tidelog.spark.where import Where

_SHOWN: Final = 200
_SPLIT_BYTES: Final = 1 << 62
_STEP: Final = 1 << 22  # seqs of a piece that has no file
Progress = Callable[[int, int], None]


class Difference(NamedTuple):
    """The first place where table and log are not the same."""

    seq: int | None  # None: of no one seq, as a file that was changed and can no longer be held against the log
    log: str  # what the log has
    table: str


class Reconciled(NamedTuple):
    topic: str
    first: int
    stop: int  # one past what the table stands for
    log_rows: int
    table_rows: int
    quarantined: int
    alone: int  # rows that only the table still has, see `compare`
    hash: int  # of the table's rows
    pieces: int
    differing: tuple[tuple[int, int], ...]  # ranges of pieces that differ
    foreign: tuple[str, ...]  # files of the table that no export wrote; their rows are compared like all others
    beyond: int  # rows of theirs with seqs that the table does not stand for
    difference: Difference | None
    repaired: int  # pieces

    @property
    def equal(self) -> bool:
        return not self.differing and not self.beyond


class Reconcile:
    def __init__(self, options: Options, table: Table, work: Work) -> None:
        self._topic = options.subscribe[0]
        self._options = replace(options, partitions_min=1, split_bytes=_SPLIT_BYTES, on_gap="skip")
        self._asked, self._table, self._work = options, table, work
        self._place = places.of(options)

    def close(self) -> None:
        self._place.close()

    def run(self, *, repair: bool = False, progress: Progress | None = None) -> Reconciled:
        plan.topics(self._place, self._options)
        sight = self._place.look(self._topic)
        if sight is None:
            raise TopicNotFound(self._topic)
        last = self._table.last()
        if last is None:
            return Reconciled(self._topic, 0, 0, 0, 0, 0, 0, 0, 0, (), (), 0, None, 0)
        commits.check_same(last, self._topic, sight.epoch, self._table.path)
        found = self._look(sight, last, progress)
        if not repair or found.equal:
            return found
        # Files that nobody committed go first: what they held of the log is then missing, and made again.
        self._table.disown([Foreign(name) for name in found.foreign])
        again = self._look(sight, last, None) if found.foreign else found
        return found._replace(repaired=self._repair(sight, last, again.differing))

    def _look(self, sight: Sight, last: Commit, progress: Progress | None) -> Reconciled:
        foreign = tuple(file.name for file in self._table.foreign())
        pieces = self._pieces(sight, last, foreign)
        found = self._compared(pieces, progress)
        hurt = [
            (piece, seen) for piece, seen in zip(pieces, found, strict=True) if seen.blocks or _doubted(piece, seen)
        ]
        first = min((piece.first for piece in pieces), default=last.stop)
        beyond = self._beyond(foreign, first, last.stop)
        return Reconciled(
            self._topic,
            first,
            last.stop,
            sum(each.log_rows for each in found),
            sum(each.table_rows for each in found) + beyond,
            sum(file.bad for file in self._table.files()),
            sum(each.alone for each in found),
            sum(each.table_hash for each in found) & digest.MASK,
            len(pieces),
            tuple((piece.first, piece.stop) for piece, _ in hurt),
            foreign,
            beyond,
            self._first(sight, hurt) or _beyond(foreign, beyond),
            0,
        )

    def _beyond(self, foreign: Sequence[str], first: int, stop: int) -> int:
        found = 0
        for batch in files.batches(self._work.disk, self._table.path, foreign, None, None):
            seqs = batch.column("seq").to_numpy()
            found += int(((seqs < first) | (seqs >= stop)).sum())
        return found

    def _compared(self, pieces: Sequence[Piece], progress: Progress | None) -> list[Compared]:
        """A handful at a time, so that somebody sees it move."""
        found: list[Compared] = []
        step = max(len(pieces) // 20, 8)
        for at in range(0, len(pieces), step):
            found += self._work.runner.run(compare.compared, pieces[at : at + step])
            if progress is not None:
                progress(len(found), len(pieces))
        return found

    # ── pieces ────────────────────────────────────────────────────────────────────────────────

    def _pieces(self, sight: Sight, last: Commit, foreign: tuple[str, ...]) -> list[Piece]:
        held = self._table.commits()
        transforms = {file.name for commit in held if commit.transform for file in commit.files}
        self._shape = columns.shape_from(last.schema, last.shape)
        at = min((commit.first for commit in held), default=last.stop)
        made = []
        for file in self._table.files():
            made += self._between(sight, at, file.first, foreign)
            made.append(self._piece(sight, file.first, file.stop, (file,), foreign, file.name in transforms))
            at = max(at, file.stop)
        return [*made, *self._between(sight, at, last.stop, foreign)]

    def _between(self, sight: Sight, first: int, stop: int, foreign: tuple[str, ...]) -> list[Piece]:
        """Seqs that no file of ours stands for."""
        bounds = [(at, min(at + _STEP, stop)) for at in range(first, stop, _STEP)]
        return [self._piece(sight, low, high, (), foreign) for low, high in bounds]

    def _piece(
        self,
        sight: Sight,
        first: int,
        stop: int,
        held: tuple[DataFile, ...],
        foreign: tuple[str, ...],
        transformed: bool = False,
    ) -> Piece:
        low = min(max(first, sight.floor), stop)
        return Piece(
            self._topic,
            self._table.path,
            self._work.disk,
            self._shape,
            self._options,
            first,
            stop,
            sight.floor,
            () if transformed else self._splits(sight, low, stop),
            (*(file.name for file in held), *(() if transformed else foreign)),
            tuple(file.bad_name for file in held if file.bad_name is not None),
            held,
            transformed,
        )

    def _splits(self, sight: Sight, first: int, stop: int) -> tuple[Split, ...]:
        if first >= stop:
            return ()
        return tuple(plan.splits(self._place, self._options, [Range(sight, first, stop)], Where()))

    # ── the first difference ──────────────────────────────────────────────────────────────────

    def _first(self, sight: Sight, hurt: Sequence[tuple[Piece, Compared]]) -> Difference | None:
        for piece, seen in hurt:
            if seen.blocks:
                return self._row(sight, piece, *seen.blocks[0])
            if seen.changed:
                said = sum(file.rows for file in piece.told)
                return Difference(
                    None,
                    f"{said:,} rows by the commit of seqs {piece.first} to {piece.stop - 1}, which it lost since",
                    f"{seen.table_rows:,} rows or other ones in {', '.join(seen.changed)}",
                )
        return None

    def _row(self, sight: Sight, piece: Piece, first: int, stop: int) -> Difference:
        near = replace(piece, first=first, stop=stop, told=(), splits=self._splits(sight, first, stop))
        ours = _by_seq([rows.table for rows in compare.log_rows(near)])
        theirs = _by_seq(list(compare.table_rows_of(near)))
        for seq in sorted({*ours, *theirs}):
            here, there = ours.get(seq, []), theirs.get(seq, [])
            if sorted(row.hash for row in here) != sorted(row.hash for row in there):
                return Difference(seq, _shown(here, "log"), _shown(there, "table"))
        return Difference(None, f"other records of seqs {first} to {stop - 1} that do not fit", "its quarantine")

    # ── repair ────────────────────────────────────────────────────────────────────────────────

    def _repair(self, sight: Sight, last: Commit, hurt: Sequence[tuple[int, int]]) -> int:
        """Make ranges again that the log still has. The others stay as they are: nobody knows what should be there."""
        shape = columns.shape_from(last.schema, last.shape)
        held = self._table.files()
        ranges = [(first, stop) for first, stop in hurt if first >= sight.floor]
        with closing(Export(self._asked, self._table, lambda _: shape, self._work)) as export:
            for first, stop in ranges:
                names = tuple(file.name for file in held if (file.first, file.stop) == (first, stop))
                export.rewrite(sight, shape, first, stop, names, again=True)
        return len(ranges)


def _doubted(piece: Piece, seen: Compared) -> bool:
    """Whether only the commit can say that something is wrong: the log has lost a part of the range."""
    return bool(seen.changed) and (piece.transformed or piece.first < piece.floor)


def _beyond(foreign: Sequence[str], rows: int) -> Difference | None:
    if not rows:
        return None
    return Difference(None, "no such seqs", f"{rows:,} rows beyond the last commit, in {', '.join(foreign[:3])}")


class _Row(NamedTuple):
    hash: int
    fields: dict[str, Any]


def _by_seq(batches: list[pa.RecordBatch]) -> dict[int, list[_Row]]:
    found: dict[int, list[_Row]] = {}
    for batch in batches:
        for hashed, fields in zip(digest.rows(batch).tolist(), batch.to_pylist(), strict=True):
            found.setdefault(fields["seq"], []).append(_Row(hashed, fields))
    return found


def _shown(rows: Sequence[_Row], where: str) -> str:
    if not rows:
        return "nothing: it was deleted, or never there" if where == "log" else "nothing"
    fields = {name: value for name, value in rows[0].fields.items() if name != "seq" and value is not None}
    text = ", ".join(f"{name}={value!r}" for name, value in fields.items())
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"
    return text if len(rows) == 1 else f"{len(rows)} rows, the first of them {text}"
