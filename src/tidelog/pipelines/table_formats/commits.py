"""Commits of a table: its files, and which range of the topic each one has.

    topic      1 ············ first ──────────── stop ······ head
    commit n                  ├─ file ─┬─ file ─┤            rows, quarantined, hash; `stop` is where the next begins
    file                      [first, stop)                  rows, hash: their sums are those of the commit

A commit has everything that the next one needs, so there is no other state: the table has its own position. A repair is
a commit that removes files and adds others in one step and does not move the end. Rows that the log no longer has are
copied: those of an exported file into a file of the same range (the two then overlap), those of files of other programs
into `kept` files, which have no range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from tidelog.errors import BadInput, Damaged, GapFound, Locked, NewerFormat
from tidelog.pipelines.row_hash import MASK_64

COMMIT_FORMAT: Final = 2  # 2: a repair that copies rows
_BASE_FORMAT: Final = 1
_OPTIONAL_FIELDS: Final = ("kept", "retired")
_OPTIONAL_FILE_FIELDS: Final = ("bad_bytes", "held")


class DataFile(msgspec.Struct, frozen=True):
    """One Parquet file of a table and its range of the topic."""

    name: str
    first: int
    stop: int
    rows: int
    bytes: int
    hash: int
    bad: int = 0  # rows of its range in quarantine
    bad_name: str | None = None
    bad_bytes: int | None = None
    held: int | None = None  # rows in the file, if a repair copied other rows than were committed


class KeptFile(msgspec.Struct, frozen=True):
    """Rows of files of other programs, copied by a repair."""

    name: str
    rows: int
    bytes: int


class Commit(msgspec.Struct, frozen=True):
    topic: str
    epoch: int
    first: int
    stop: int  # of the topic: where the next commit begins
    files: tuple[DataFile, ...]
    schema: str  # of the table, as Spark writes it in JSON
    shape: str  # the other options of the mapping; see `record_mapping`
    number: int = 0
    removed: tuple[str, ...] = ()  # files that these replace
    repair: bool = False  # of a range that the table already has
    transform: str | None = None  # the function that rows went through
    ts_ms: int = 0
    kept: tuple[KeptFile, ...] = ()
    retired: tuple[str, ...] = ()  # files of other programs that these replace
    format: int = _BASE_FORMAT

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def bad(self) -> int:
        return sum(file.bad for file in self.files)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def hash(self) -> int:
        return sum(file.hash for file in self.files) & MASK_64


class _StoredCommit(Commit, frozen=True):
    """A commit as it is stored: with its totals, for people and other programs."""

    totals: dict[str, int | str] = {}


_commit_decoder = msgspec.json.Decoder(_StoredCommit)
_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def encode_commit(commit: Commit) -> bytes:
    made: dict[str, Any] = msgspec.to_builtins(commit)
    made["format"] = COMMIT_FORMAT if commit.kept or commit.retired else commit.format
    made["totals"] = {"rows": commit.rows, "quarantined": commit.bad, "hash": f"{commit.hash:016x}"}
    for name in _OPTIONAL_FIELDS:  # without them a commit has the bytes of earlier versions
        if not made[name]:
            del made[name]
    for file in made["files"]:
        for name in _OPTIONAL_FILE_FIELDS:
            if file[name] is None:
                del file[name]
    return msgspec.json.encode(made)


def decode_commit(content: bytes | str, where: str) -> Commit:
    """Decode a stored commit. Raises Damaged or NewerFormat."""
    try:
        found = _raw_decoder.decode(content)
        if int(bytes(found["format"])) > COMMIT_FORMAT:
            raise NewerFormat(where, found=int(bytes(found["format"])), known=COMMIT_FORMAT)
        stored = _commit_decoder.decode(content)
        made = Commit(**{name: getattr(stored, name) for name in Commit.__struct_fields__})
    except (msgspec.DecodeError, KeyError, ValueError) as error:
        raise Damaged(
            f"{where} is not a commit of tidelog ({error}); nothing was changed, put it back from a copy, or remove "
            "it: what it names is then found again or exported again"
        ) from None
    if stored.totals.get("hash") != f"{made.hash:016x}":
        raise Damaged(f"{where}: its sums are not those of its files; nothing was changed, put it back from a copy")
    return made


def check_same_topic(last: Commit, topic: str, epoch: int, where: str) -> None:
    """Raise if the table belongs to another topic, or to a dropped topic of this name."""
    if last.topic != topic:
        raise BadInput(
            f"{where} is the table of topic {last.topic!r}, not of {topic!r}; nothing was written, name another table"
        )
    if last.epoch != epoch:
        error = GapFound(topic, (last.stop, last.stop, "recreated", 0, last.stop, last.stop - 1))
        error.args = (
            f"{topic} was dropped and made again since {where} was written (epoch {last.epoch} there, {epoch} now): "
            "its seqs are other records; nothing was written, export the new one into another table",
        )
        raise error


def check_continues(last: Commit | None, made: Commit, where: str) -> None:
    """Raise if a commit does not begin at the end of the last one: it would lose records or have them twice."""
    if made.repair or last is None:
        return
    if made.first != last.stop or made.stop < made.first:
        raise Locked(
            f"{where} ends at seq {last.stop - 1} and {made.first} to {made.stop - 1} were to follow: another process "
            "wrote it meanwhile; nothing was committed, run it again"
        )


def active_files(commits: Sequence[Commit]) -> list[DataFile]:
    """Return the files of a table after all of its commits, by range."""
    found: dict[str, DataFile] = {}
    for commit in commits:
        for name in (*commit.removed, *commit.retired):
            found.pop(name, None)
        found |= {file.name: file for file in commit.files}
    return sorted(found.values(), key=lambda file: (file.first, file.stop, file.name))
