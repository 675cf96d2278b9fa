"""Erase records from a topic and from the tables that exports made of it.

    1  open every table for writing, which keeps exports out until the end, and check that it can be done
    2  erase in the log, by the directory or the server, which gives the log's own receipt (`engine.erase`)
    3  remove the rows of each table:
         Delta     delete them in one commit, then remove every file that the newest version does not name
         Parquet   repair the table from the log, which has no such records any more
    4  verify that no table has a row of them, and that the files that had one are gone

Step 1 changes nothing. A run that breaks off later is repeated: each step does what is left. The receipt names the
files of the tables beside those of the log, and what is not reached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from tidelog import database
from tidelog.addresses import Location
from tidelog.client.http import Client, topic_path
from tidelog.disk.interface import Disk, join
from tidelog.engine.delete import parse_tag_match
from tidelog.engine.erase import ErasureIncomplete
from tidelog.errors import BadInput
from tidelog.pipelines.table_formats import Place, delta
from tidelog.pipelines.table_formats.interface import QUARANTINE_DIR, Table
from tidelog.pipelines.table_source import read_table
from tidelog.pipelines.upsert_job import remove_staged

RepairTable: TypeAlias = Callable[[Place, Table], object]
_ERASE_TIMEOUT_S: Final = 24 * 3600.0
_SEQS_MAX: Final = 10_000
_LOG_STATISTICS: Final = (
    "minimum and maximum of columns of removed files, in older commits of _delta_log: until Delta's log cleanup "
    "removes them (delta.logRetentionDuration)"
)


class ErasedTable(NamedTuple):
    """What an erasure did to one table."""

    table: str
    format: str
    rows: int  # removed by this call
    removed: tuple[str, ...]  # data files that are gone: those that held rows, and those of older versions
    version: int | None  # of a Delta table: the only one that can be read from now on
    not_reached: tuple[str, ...]


class Erased(NamedTuple):
    """The receipt of an erasure in a topic and its tables."""

    topic: str
    log: dict[str, Any]  # the receipt of the log, as `tidelog erase` prints it
    tables: tuple[ErasedTable, ...]
    sha256: str  # of this receipt as JSON with an empty sha256


@dataclass(frozen=True)
class Selection:
    """Records by tag or by seq."""

    match: str | None
    seqs: tuple[int, ...] | None
    tag: str = ""  # of a match, or the beginning of tags
    is_exact: bool = False

    @classmethod
    def parse(cls, match: str | None, seqs: Sequence[int] | None) -> Selection:
        if (match is None) == (seqs is None):
            raise BadInput("no records are selected, or twice; nothing was erased, give match or seqs")
        if seqs is not None and not 0 < len(seqs) <= _SEQS_MAX:
            raise BadInput(f"{len(seqs)} seqs are not between 1 and {_SEQS_MAX}; nothing was erased")
        selector = parse_tag_match(match, "nothing was erased")
        if selector is None:
            return cls(None, tuple(sorted(set(seqs or ()))))
        if "\0" in selector.value:
            raise BadInput("a tag in a table has no zero byte; nothing was erased")
        return cls(match, None, selector.value, selector.op.name == "EXACT")

    def to_sql(self) -> str:
        """Return the predicate for deltalake."""
        if self.match is None:
            return " OR ".join(f"(seq >= {first} AND seq <= {last})" for first, last in self._ranges())
        quoted = self.tag.replace("'", "''")
        return f"tag = '{quoted}'" if self.is_exact else f"starts_with(tag, '{quoted}')"

    def to_column(self) -> Column:
        """Return the predicate for Spark."""
        if self.match is None:
            found = F.lit(False)
            for first, last in self._ranges():
                found = found | F.col("seq").between(first, last)
            return found
        return F.col("tag") == self.tag if self.is_exact else F.col("tag").startswith(self.tag)

    def _ranges(self) -> list[tuple[int, int]]:
        seqs = self.seqs or ()
        ends = [before for before, after in pairwise(seqs) if after != before + 1]
        starts = [after for before, after in pairwise(seqs) if after != before + 1]
        return list(zip([seqs[0], *starts], [*ends, seqs[-1]], strict=True))


def check_table(place: Place, table: Table, topic: str, selection: Selection) -> None:
    """Raise BadInput if rows cannot be erased from a table."""
    last = table.last_commit()
    if last is None:
        raise BadInput(f"{place.path} has no commit of an export; nothing was erased, leave it out")
    if last.topic != topic:
        raise BadInput(f"{place.path} is a table of {last.topic!r}, not of {topic!r}; nothing was erased, leave it out")
    if table.format != "delta":
        return
    columns, has_change_feed = delta.describe_columns(place.disk, place.path)
    wanted = "seq" if selection.match is None else "tag"
    if wanted not in columns:
        raise BadInput(
            f"{place.path} has no column {wanted}, so its rows cannot be identified; nothing was erased, "
            "remove them with a program of yours, or drop the table"
        )
    if has_change_feed:
        raise BadInput(
            f"{place.path} has a change data feed, which keeps removed rows; nothing was erased, set "
            "delta.enableChangeDataFeed to false and remove _change_data first"
        )


def erase_log(location: Location, topic: str, selection: Selection, actor: str | None) -> dict[str, Any]:
    """Erase in the log and return its receipt."""
    if location.is_server:
        body = {"match": selection.match, "seqs": None if selection.seqs is None else list(selection.seqs)}
        with Client(location.address, key=location.key, timeout_s=_ERASE_TIMEOUT_S) as client:
            given = {name: value for name, value in body.items() if value is not None}
            return client.post(f"{topic_path(topic)}/erase", given)
    with database.open(location.address) as log:
        receipt = log.topic(topic, create=False).erase(match=selection.match, seqs=selection.seqs, actor=actor)
        fields: dict[str, Any] = msgspec.json.decode(receipt.to_json())
        return fields


def erase_table(
    spark: SparkSession | None, place: Place, table: Table, selection: Selection, repair: RepairTable
) -> ErasedTable:
    """Remove the rows of a table and verify that they are gone."""
    if table.format == "delta":
        found = _erase_delta(place, selection)
    else:
        assert spark is not None, "a Parquet table is repaired by Spark"
        found = _erase_parquet(spark, place, table, selection, repair)
    left = [name for name in found.removed if place.disk.stat(join(place.path, name)) is not None]
    if left:
        raise ErasureIncomplete(
            f"{place.path}: {len(left)} files that held erased rows are still there ({left[0]}); the log and other "
            "files are done, run it again"
        )
    return found


def _erase_delta(place: Place, selection: Selection) -> ErasedTable:
    predicate = selection.to_sql()
    remove_staged(place.disk, place.path)
    rows, replaced = delta.delete_rows(place.disk, place.path, predicate)
    removed = sorted({*replaced, *delta.remove_unnamed_files(place.disk, place.path)})
    left = delta.count_rows_where(place.disk, place.path, predicate)
    if left:
        raise ErasureIncomplete(
            f"{place.path} has {left} rows again that were removed: another program writes it; stop that and run it "
            "again"
        )
    version = delta.latest_version(place.disk, place.path).version
    return ErasedTable(
        place.path, "delta", rows, tuple(removed), version, (_LOG_STATISTICS, *_quarantine(place.disk, place.path))
    )


def _erase_parquet(
    spark: SparkSession, place: Place, table: Table, selection: Selection, repair: RepairTable
) -> ErasedTable:
    def count() -> int:
        return read_table(spark, place).where(selection.to_column()).count()

    before, files = count(), set(table.visible_files())
    if before:
        repair(place, table)
    left = count() if before else 0
    if left:
        raise ErasureIncomplete(
            f"{place.path} has {left} rows of records that the log lost before (to a cap, age or damage), which a "
            "repair keeps; the log is done. Export the topic into a new table and remove this one"
        )
    removed = files - set(table.visible_files())
    return ErasedTable(
        place.path, table.format, before, tuple(sorted(removed)), None, _quarantine(place.disk, place.path)
    )


def _quarantine(disk: Disk, path: str) -> tuple[str, ...]:
    directory = join(path, QUARANTINE_DIR)
    stat = disk.stat(directory)
    count = len(disk.list_dir(directory)) if stat is not None and stat.is_dir else 0
    return (f"{count} files of records that did not fit, in {QUARANTINE_DIR}/",) if count else ()


def make_receipt(topic: str, log: dict[str, Any], tables: Sequence[ErasedTable]) -> Erased:
    receipt = Erased(topic, log, tuple(tables), "")
    return receipt._replace(sha256=hashlib.sha256(msgspec.json.encode(receipt._asdict())).hexdigest())
