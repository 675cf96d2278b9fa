"""[shell] Table = log, proven range by range; the first difference shown row by row; ranges that differ made again.

    1  pieces     files of ours whose ranges overlap are one; so is what lies between
    2  compare    on executors, by block (`compare`)
    3  look       at the first block that differs, on the driver: which seq, what the log has, what the table has
    4  repair     where that is asked for: one commit that adds the log's rows of the ranges that differ and replaces
                  the files which hold rows of them; every other row of those files is copied (`repairing`)
    5  again      1 to 3 once more after a repair: what is left is reported

A record that was deleted from the log since it was exported is a difference too, and repair takes it out of the table.
What the log lost is not, and stays in the table: rows below its floor (a cap, age), which are compared with the commits
of the table, and rows of seqs above it whose records a power cut or damage took. Nor does a repair remove rows that
others wrote with seqs that the log does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import pyarrow as pa

from tidelog.disk.seam import join
from tidelog.errors import BadInput, TopicNotFound
from tidelog.pipelines import columns, commits, compare, delta_read, digest, files, leftovers, repairing
from tidelog.pipelines.commits import Commit, DataFile
from tidelog.pipelines.compare import Compared, Piece
from tidelog.pipelines.exporting import Export, Work
from tidelog.pipelines.repairing import Copied, Cut
from tidelog.pipelines.tables import NotStaged, Overtaken, Table
from tidelog.pipelines.writing import Target
from tidelog.spark import places, plan
from tidelog.spark.options import Options
from tidelog.spark.place import Sight
from tidelog.spark.plan import Range
from tidelog.spark.stretches import Split
from tidelog.spark.where import Where

_SHOWN: Final = 200
_SPLIT_BYTES: Final = 1 << 62
_STEP: Final = 1 << 22  # seqs of a piece that has no file
_TRIES: Final = 5  # repairs that other writers of the table made void
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
    alone: int  # rows that only the table still has, because the log lost their records; see `compare`
    hash: int  # of the table's rows
    pieces: int
    differing: tuple[tuple[int, int], ...]  # ranges of pieces that differ
    foreign: tuple[str, ...]  # files of the table that no export wrote; their rows are compared like all others
    beyond: int  # rows of theirs with seqs that the table does not stand for
    difference: Difference | None
    repaired: int = 0  # ranges that were made again
    left: tuple[tuple[int, int], ...] = ()  # after a repair: ranges that differ and that the log cannot make again
    left_beyond: int = 0  # after a repair: rows after the table's end with seqs that the log does not have

    @property
    def equal(self) -> bool:
        return not self.differing and not self.beyond

    @property
    def whole(self) -> bool:
        """Whether table and log are the same now."""
        return self.equal or bool(self.repaired and not self.left and not self.left_beyond)


@dataclass(frozen=True)
class _Seen:
    """One comparison of everything."""

    found: Reconciled
    hurt: tuple[tuple[Piece, Compared], ...]
    lost: tuple[tuple[int, int], ...]
    foreign: dict[str, tuple[int, int]]  # name → lowest and highest seq


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
            return Reconciled(self._topic, 0, 0, 0, 0, 0, 0, 0, 0, (), (), 0, None)
        commits.check_same(last, self._topic, sight.epoch, self._table.path)
        if repair:
            work = self._work
            leftovers.drop(self._table, last, self._place, self._options, sight, work.disk, work.runner)
        seen = self._look(sight, last, progress)
        if not repair or seen.found.equal:
            return seen.found
        for left in range(_TRIES - 1, -1, -1):
            try:
                return self._repaired(sight, last, seen)
            except (Overtaken, NotStaged):
                if not left:
                    raise
            # Another process changed the table while files were written: what was seen of it is no longer true.
            last = self._table.last()
            assert last is not None, "commits do not go away"
            seen = self._look(sight, last, progress)
            if seen.found.equal:
                return seen.found
        raise AssertionError("the last try returns or raises")

    def _repaired(self, sight: Sight, last: Commit, seen: _Seen) -> Reconciled:
        repaired = self._repair(sight, last, seen)
        now = self._look(sight, last, None).found
        return seen.found._replace(repaired=repaired, left=now.differing, left_beyond=now.beyond)

    def _look(self, sight: Sight, last: Commit, progress: Progress | None) -> _Seen:
        """Compare everything. Files of ours that also hold rows of other ranges are then taken as files of others."""
        strays: set[str] = set()
        while True:
            foreign = self._foreign(strays, last)
            pieces = self._pieces(sight, last, foreign, strays)
            compared = self._compared(pieces, progress)
            found = {name for each in compared for name in each.strays}
            if found <= strays:
                return self._seen(sight, last, foreign, pieces, compared)
            strays |= found

    def _foreign(self, strays: set[str], last: Commit) -> dict[str, tuple[int, int]]:
        """Files of others by their seqs; nothing where rows are read through the library, or are not the log's."""
        made: dict[str, tuple[int, int]] = {}
        if self._table.scanned() is not None:
            return made
        for name in (*self._table.foreign(), *sorted(strays)):
            if last.transform is not None:
                made[name] = (0, -1)
                continue
            bounds = files.bounds(self._work.disk, join(self._table.path, name))
            if bounds is not None:
                made[name] = bounds[1:]
        return made

    def _seen(
        self,
        sight: Sight,
        last: Commit,
        foreign: dict[str, tuple[int, int]],
        pieces: Sequence[Piece],
        found: Sequence[Compared],
    ) -> _Seen:
        hurt = tuple(
            (piece, seen) for piece, seen in zip(pieces, found, strict=True) if seen.blocks or _doubted(piece, seen)
        )
        first = min((piece.first for piece in pieces), default=last.stop)
        beyond = 0 if last.transform is not None else self._beyond(foreign, first, last.stop)
        made = Reconciled(
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
            tuple(foreign),
            beyond,
            self._first(sight, hurt) or _beyond(tuple(foreign), beyond),
        )
        return _Seen(made, hurt, tuple(each for seen in found for each in seen.lost), foreign)

    def _beyond(self, foreign: dict[str, tuple[int, int]], first: int, stop: int) -> int:
        version = self._table.scanned()
        if version is not None:
            return delta_read.rows_outside(self._table.path, version, first, stop)
        names = [name for name, (low, high) in foreign.items() if low < first or high >= stop]
        found = 0
        for batch in files.batches(self._work.disk, self._table.path, names, None, None):
            seqs = files.seqs_of(batch)
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

    def _pieces(self, sight: Sight, last: Commit, foreign: dict[str, tuple[int, int]], strays: set[str]) -> list[Piece]:
        made = self._table.commits()
        self._shape = columns.shape_from(last.schema, last.shape)
        first = min((commit.first for commit in made), default=last.stop)
        committed = commits.active(made)
        if last.transform is not None:
            return self._transformed(sight, first, last, committed, foreign)
        held = [] if self._table.scanned() is not None else [x for x in self._table.files() if x.name not in strays]
        there = {file.name for file in held}
        # Quarantine outlives a file of ours that another program replaced.
        bad = [file for file in committed if file.name not in there and file.bad_name is not None]
        found, at = [], first
        for group in _overlapping(held):
            found += self._between(sight, at, group[0].first, foreign, bad)
            stop = max(file.stop for file in group)
            found.append(self._piece(sight, group[0].first, stop, group, foreign, bad))
            at = max(at, stop)
        return [*found, *self._between(sight, at, last.stop, foreign, bad)]

    def _transformed(
        self,
        sight: Sight,
        first: int,
        last: Commit,
        committed: Sequence[DataFile],
        foreign: dict[str, tuple[int, int]],
    ) -> list[Piece]:
        """Rows that went through a function: only their sums are known, by commit, or of the whole table where another
        program has written files of it."""
        version, there = self._table.scanned(), set(self._table.names())
        if version is not None or foreign or any(file.name not in there for file in committed):
            whole = self._piece(sight, first, last.stop, committed, {}, (), transformed=True)
            return [replace(whole, names=tuple(self._table.names()))] if committed else []
        return [
            replace(
                self._piece(sight, group[0].first, max(file.stop for file in group), group, {}, (), transformed=True),
                names=tuple(file.name for file in group),
            )
            for group in _overlapping(committed)
        ]

    def _between(
        self,
        sight: Sight,
        first: int,
        stop: int,
        foreign: dict[str, tuple[int, int]],
        bad: Sequence[DataFile],
    ) -> list[Piece]:
        """Seqs that no file of ours stands for."""
        bounds = [(at, min(at + _STEP, stop)) for at in range(first, stop, _STEP)]
        return [self._piece(sight, low, high, (), foreign, bad) for low, high in bounds]

    def _piece(
        self,
        sight: Sight,
        first: int,
        stop: int,
        held: Sequence[DataFile],
        foreign: dict[str, tuple[int, int]],
        bad: Sequence[DataFile],
        *,
        transformed: bool = False,
    ) -> Piece:
        low = min(max(first, sight.floor), stop)
        near = [file for file in bad if file.first < stop and first < file.stop]
        return Piece(
            self._topic,
            self._table.path,
            self._work.disk,
            self._shape,
            self._options,
            first,
            stop,
            sight.floor,
            sight.next,
            () if transformed else self._splits(sight, low, min(stop, sight.next)),
            tuple(name for name, (least, most) in foreign.items() if least < stop and first <= most),
            tuple(file.bad_name for file in (*held, *near) if file.bad_name is not None),
            tuple(held),
            transformed,
            self._table.scanned(),
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
        names = (*(file.name for file in piece.told), *piece.names)
        splits = self._splits(sight, first, min(stop, sight.next))
        near = replace(piece, first=first, stop=stop, told=(), names=names, splits=splits)
        ours = _by_seq([rows.table for rows, _ in compare.log_rows(near)])
        theirs = _by_seq(list(compare.table_rows_of(near)))
        for seq in sorted({*ours, *theirs}):
            here, there = ours.get(seq, []), theirs.get(seq, [])
            if sorted(row.hash for row in here) != sorted(row.hash for row in there):
                return Difference(seq, _shown(here, "log"), _shown(there, "table"))
        return Difference(None, f"other records of seqs {first} to {stop - 1} that do not fit", "its quarantine")

    # ── repair ────────────────────────────────────────────────────────────────────────────────

    def _repair(self, sight: Sight, last: Commit, seen: _Seen) -> int:
        """Make ranges again that the log still has, in one commit. Everything else stays as it is: the log does not
        say what should be there."""
        if self._table.scanned() is not None:
            raise BadInput(
                f"{self._table.path} has deletion vectors, mapped column names or partition columns: it can be "
                "compared and not repaired; nothing was changed. Have its own engine rewrite it without them (REORG "
                "TABLE … APPLY (PURGE), OPTIMIZE), or export into another table"
            )
        again = [(piece, found) for piece, found in seen.hurt if found.blocks and not piece.transformed]
        ranges = repairing.merged([each for piece, found in again for each in _cuts(sight, piece, found)])
        after = ((max(last.stop, sight.floor), sight.next),) if seen.found.beyond else ()
        lost = [*seen.lost, *(each for bounds in after for each in self._lost(sight, *bounds, seen.foreign))]
        cut = Cut(repairing.merged([*ranges, *after]), repairing.merged(lost))
        if not cut.ranges:
            return 0
        shape = columns.shape_from(last.schema, last.shape)
        options = replace(self._asked, on_gap="fail")  # what is lost from here on is not in the plan of the repair
        with closing(Export(options, self._table, lambda _: shape, self._work)) as export:
            target = export.target(sight, shape)
            made = tuple(export.write(sight, target, ranges))
            own = [(piece, found) for piece, found in again if piece.told]
            stay = self._work.runner.run(repairing.kept, [_own(target, piece, found, cut) for piece, found in own])
            near = [name for name, (low, high) in seen.foreign.items() if cut.touches(low, high)]
            tasks = [repairing.Foreign(target, name, number, cut) for number, name in enumerate(near)]
            copied: list[Copied] = [each for each in self._work.runner.run(repairing.copied, tasks) if each.dropped]
            if not made and not own and not copied:
                return 0
            commit = Commit(
                self._topic,
                sight.epoch,
                ranges[0][0] if ranges else last.stop,
                last.stop,
                (*made, *(file for file in stay if file is not None)),
                shape.schema,
                shape.told,
                removed=tuple(file.name for piece, _ in own for file in piece.told),
                repair=True,
                ts_ms=self._work.clock.now_us() // 1000,
                kept=tuple(each.kept for each in copied if each.kept is not None),
                retired=tuple(each.name for each in copied),
            )
            self._work.step("commit")
            self._table.commit(commit)
            self._work.step("committed")
        return len(again) or len(copied)

    def _lost(
        self, sight: Sight, first: int, stop: int, foreign: dict[str, tuple[int, int]]
    ) -> Iterator[tuple[int, int]]:
        """Seqs after the end of the table that files of others hold rows of and that the log lost: no export brings
        them."""
        near = [piece for piece in self._between(sight, first, stop, foreign, ()) if piece.names]
        for found in self._work.runner.run(compare.lost, near):
            yield from found


def _overlapping(held: Sequence[DataFile]) -> list[list[DataFile]]:
    """Files by range, those whose ranges overlap together."""
    found: list[list[DataFile]] = []
    stop = 0
    for file in sorted(held, key=lambda file: (file.first, file.stop, file.name)):
        if found and file.first < stop:
            found[-1].append(file)
        else:
            found.append([file])
        stop = max(stop, file.stop)
    return found


def _cuts(sight: Sight, piece: Piece, seen: Compared) -> list[tuple[int, int]]:
    """What the log makes again of a piece: all of it where files of ours stand for it, else the blocks that differ."""
    ranges = [(piece.first, piece.stop)] if piece.told else list(seen.blocks)
    return [(max(first, sight.floor), min(stop, sight.next)) for first, stop in ranges]


def _own(target: Target, piece: Piece, seen: Compared, cut: Cut) -> repairing.Own:
    names = tuple(file.name for file in piece.told)
    return repairing.Own(target, piece.first, piece.stop, names, piece.bad_names, cut, *_expected(piece, seen))


def _expected(piece: Piece, seen: Compared) -> tuple[int, int]:
    """Rows and hash that a piece has to have beside those that the log makes again: what the table has, if it was what
    its commits say. Else the commits are believed: the rows below the floor may be what is wrong, and the next
    comparison has to report it."""
    if not seen.changed or piece.first >= piece.floor:
        return seen.alone, seen.alone_hash
    rows = sum(file.rows for file in piece.told) - seen.log_rows
    return max(rows, 0), (sum(file.hash for file in piece.told) - seen.log_hash) & digest.MASK


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
