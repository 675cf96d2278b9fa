"""The interface of an export to a table, and the parts that the formats share.

    delta     a Delta table; commits of exports are commits of the table (`delta`)
    iceberg   an Iceberg table of a catalog; commits of exports are snapshots of the table (`iceberg`)
    parquet   a directory of Parquet files with its own commit log beside them (`parquet`)

Executors write files under the names that `staged_path` returns, which readers skip. `commit` makes all of them part of
the table at once, with the position in the topic. One process writes a table at a time.

Commits of a table: its files, and which range of the topic each one has.

    topic      1 ············ first ──────────── stop ······ head
    commit n                  ├─ file ─┬─ file ─┤            rows, quarantined, hash; `stop` is where the next begins
    file                      [first, stop)                  rows, hash: their sums are those of the commit

A commit has everything that the next one needs, so there is no other state: the table has its own position. A repair is
a commit that removes files and adds others in one step and does not move the end. Rows that the log no longer has are
copied: those of an exported file into a file of the same range (the two then overlap), those of files of other programs
into `kept` files, which have no range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec
import pyarrow as pa

from tidelog.disk.bucket_disk import BucketDisk
from tidelog.disk.durability import remove_if_exists
from tidelog.disk.interface import Disk, join
from tidelog.errors import BadInput, Damaged, DiskFull, GapFound, Locked, NewerFormat, NotFound, Unavailable
from tidelog.pipelines.record_mapping import RecordMapping
from tidelog.pipelines.row_hash import MASK_64

COMMIT_FORMAT: Final = 3  # 2: a repair that copies rows; 3: partitions, upsert tables, schemas by seq
_COPIES_FORMAT: Final = 2
_BASE_FORMAT: Final = 1
_OPTIONAL_FIELDS: Final = ("kept", "retired", "replaced", "table_first", "merged", "eras", "same_rows")
_OPTIONAL_FILE_FIELDS: Final = ("bad_bytes", "held")
_NEW_SHAPES: Final = ('"partition_by"', '"latest_key"')
SeqRanges: TypeAlias = tuple[tuple[int, int], ...]  # [first, stop) each, ascending


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
    stats: str | None = None  # statistics of its columns in JSON, for the log of a Delta table; not stored in a commit


class KeptFile(msgspec.Struct, frozen=True):
    """Rows of files of other programs, copied by a repair."""

    name: str
    rows: int
    bytes: int


class Merged(msgspec.Struct, frozen=True):
    """What a commit of an upsert table had: newest records of keys, newest tombstones, records without a key."""

    upserted: int
    deleted: int
    keyless: int
    records: int


class Era(msgspec.Struct, frozen=True):
    """From which seq on the rows of a table have a schema."""

    first: int
    schema: str  # schema and shape of a commit
    shape: str


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
    table_first: int | None = None  # where the table begins; older commits may be gone. None: in an earlier version
    replaced: SeqRanges = ()  # an Iceberg table deletes the rows of these seqs; other formats name files
    retired: tuple[str, ...] = ()  # files of other programs that these replace
    merged: Merged | None = None  # of an upsert table
    eras: tuple[Era, ...] = ()  # of a table whose schema has changed: the schemas of all seqs, the newest one last
    same_rows: bool = False  # files were joined: readers of changes skip the commit
    format: int = _BASE_FORMAT

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files) + (0 if self.merged is None else self.merged.upserted)

    @property
    def bad(self) -> int:
        return sum(file.bad for file in self.files)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def hash(self) -> int:
        return sum(file.hash for file in self.files) & MASK_64

    def as_stored(self) -> Commit:
        """Return the commit as `decode_commit` returns it."""
        files = tuple(msgspec.structs.replace(file, stats=None) for file in self.files)
        return msgspec.structs.replace(self, files=files, format=_format_of(self))


class _StoredCommit(Commit, frozen=True):
    """A commit as it is stored: with its totals, for people and other programs."""

    totals: dict[str, int | str] = {}


_commit_decoder = msgspec.json.Decoder(_StoredCommit)
_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _format_of(commit: Commit) -> int:
    if commit.eras or any(key in commit.shape for key in _NEW_SHAPES):
        return COMMIT_FORMAT
    return _COPIES_FORMAT if commit.kept or commit.retired else commit.format


def encode_commit(commit: Commit) -> bytes:
    made: dict[str, Any] = msgspec.to_builtins(commit)
    made["format"] = _format_of(commit)
    made["totals"] = {"rows": commit.rows, "quarantined": commit.bad, "hash": f"{commit.hash:016x}"}
    for name in _OPTIONAL_FIELDS:  # without them a commit has the bytes of earlier versions
        if made[name] in (None, (), []) or made[name] is False:
            del made[name]
    for file in made["files"]:
        del file["stats"]
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


def eras_of(commit: Commit) -> tuple[Era, ...]:
    """Return the schemas of a table by seq, oldest first; there is at least one."""
    return commit.eras or (Era(0, commit.schema, commit.shape),)


def era_at(eras: Sequence[Era], seq: int) -> Era:
    """Return the schema of a seq. Seqs below the first one have that."""
    return next((era for era in reversed(eras) if era.first <= seq), eras[0])


def extend_eras(last: Commit | None, first: int, schema: str, shape: str) -> tuple[Era, ...]:
    """Return the schemas of a table whose rows from `first` on have this schema; empty for a table with only one."""
    if last is None or (last.schema, last.shape) == (schema, shape):
        return () if last is None else last.eras
    return (*eras_of(last), Era(first, schema, shape))


def active_files(commits: Sequence[Commit]) -> list[DataFile]:
    """Return the files of a table after all of its commits, by range."""
    found: dict[str, DataFile] = {}
    for commit in commits:
        for name in (*commit.removed, *commit.retired):
            found.pop(name, None)
        found |= {file.name: file for file in commit.files}
    return sorted(found.values(), key=lambda file: (file.first, file.stop, file.name))


Format: TypeAlias = Literal["delta", "iceberg", "parquet"]
OnStep: TypeAlias = Callable[[str], None]  # called with the name of the next step; tests kill the process there
T = TypeVar("T")
QUARANTINE_DIR: Final = "_quarantine"
ICEBERG_SCHEME: Final = "iceberg"  # of addresses of tables in a catalog
OWN_DIR: Final = "_tidelog"
LOCK_FILE: Final = "lock"


class TableChanged(Locked):
    """Another process committed to the table in between. Nothing was committed; a new plan may succeed."""


class StagedFileMissing(Unavailable):
    """The driver does not see a file that a task wrote, or sees another length."""


class Leftover(NamedTuple):
    """A file of an export after a missing range, whose commit is gone."""

    name: str
    topic: str
    epoch: int
    first: int
    stop: int
    bad_name: str | None
    schema: str  # schema and shape of its mapping, as in a commit
    shape: str


class TableScan(Protocol):
    """One version of a table that is read through its library, also by tasks: picklable."""

    def rows(self, first: int | None, stop: int | None, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Read the rows with seqs in [first, stop), as columns of a schema; without bounds, all of them."""
        ...

    def count_outside(self, first: int, stop: int) -> int:
        """Count the rows with other seqs, or without a seq."""
        ...


class Table(Protocol):
    path: str  # of its files, in `disk`
    disk: Disk
    format: Format

    def prepare(self, mapping: RecordMapping) -> None:
        """Make the table's place known before the first file is written: a catalog chooses it."""
        ...

    def last_commit(self) -> Commit | None:
        """Return the newest commit of an export, which has the position of the table."""
        ...

    def next_export_seq(self, topic: str, epoch: int) -> int | None:
        """Return where the next commit of a topic begins, from state that outlives the commits; None if unknown."""
        ...

    def commits(self) -> list[Commit]:
        """Return the known commits of exports, oldest first."""
        ...

    def own_files(self) -> list[DataFile]:
        """Return the files of exports that are part of the table now, by range."""
        ...

    def visible_files(self) -> list[str]:
        """Return every file that readers of the table see."""
        ...

    def scan(self) -> TableScan | None:
        """Return the present version of the table, to be read through its library, if its files alone do not show what
        a reader sees (an Iceberg table; deletion vectors, mapped columns, partition columns); else None."""
        ...

    def leftovers(self) -> list[Leftover]:
        """Return the files of exports after a missing range, whose commits are gone."""
        ...

    def drop_leftovers(self) -> None:
        """Remove them. The caller has checked that the log still has their records (`export_job.drop_leftovers`)."""
        ...

    def staged_path(self, name: str) -> str:
        """Return where an executor writes the file `name`."""
        ...

    def commit(self, commit: Commit) -> None:
        """Add staged files to the table and remove those that they replace. On return the commit survives a power
        cut. If this raises, or the process dies, all files are part of the table or none is; opening the table for
        writing completes a started commit. Every staged file is verified first."""
        ...

    def close(self) -> None: ...


def disk_full_error(path: str, error: OSError) -> DiskFull:
    return DiskFull(
        f"{path} cannot be written ({error.strerror or error}); nothing was committed, free space and run it again: it "
        "goes on where it stopped"
    )


def no_step(_: str) -> None:
    """The default of `OnStep`."""


def staged_path(path: str, format: Format, name: str) -> str:
    """Return where the file `name` of a table is written before its commit."""
    folder, _, base = name.rpartition("/")
    return join(join(path, folder) if folder else path, f"_{base}" if format == "parquet" else base)


class TableDirectory:
    """The directory of a table: its lock, staged files, and removals. Both formats have one. A table in a bucket has no
    lock: two writers meet in its commits."""

    def __init__(self, disk: Disk, path: str, format: Format, *, write: bool) -> None:
        self._disk, self._path, self._format = disk, path, format
        self._release: Callable[[], None] | None = None
        stat = disk.stat(path)
        if stat is None and not write:
            raise NotFound(f"there is no table at {path}; nothing was done, check the path")
        if stat is not None and not stat.is_dir:
            raise BadInput(f"{path} is a file, a table is a directory; nothing was changed, check the path")
        self.is_writer = write
        self.in_bucket = isinstance(disk, BucketDisk)
        if write and not self.in_bucket:
            self._lock()

    def _lock(self) -> None:
        own = join(self._path, OWN_DIR)
        self._disk.make_dir(own)
        try:
            self._release = self._disk.lock(join(own, LOCK_FILE)).release
        except BlockingIOError:
            raise Locked(
                f"{self._path} is being written by another process; nothing was changed, wait for it or stop it"
            ) from None

    def close(self) -> None:
        if self._release is not None:
            self._release()
            self._release = None

    def sync_staged(self, commit: Commit) -> None:
        """Verify the staged files of a commit and sync their names."""
        check_staged(self._disk, commit, lambda name: staged_path(self._path, self._format, name))
        written = (name for file in commit.files for name in (file.name, file.bad_name) if name is not None)
        folders = {name.rpartition("/")[0] for name in (*written, *(file.name for file in commit.kept))} - {""}
        for place in (*sorted(join(self._path, folder) for folder in folders), self._path):
            self._disk.sync_dir(place)

    def remove_file(self, name: str) -> bool:
        """Remove a data file and its quarantine; return whether the data file existed."""
        was_there = remove_if_exists(self._disk, join(self._path, name))
        self.remove_quarantine(name)
        return was_there

    def remove_quarantine(self, name: str) -> None:
        remove_if_exists(self._disk, join(self._path, quarantine_name(name)))


def foreign_files(table: Table) -> list[str]:
    """Return the files that readers of a table see and that no export wrote."""
    own = {file.name for file in table.own_files()}
    return [name for name in table.visible_files() if name not in own]


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> SeqRanges:
    """Merge ranges [first, stop) that overlap or touch; drop empty ones."""
    merged: list[tuple[int, int]] = []
    for first, stop in sorted(each for each in ranges if each[0] < each[1]):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((first, stop))
    return tuple(merged)


def group_overlapping(items: Iterable[T], key: Callable[[T], tuple[int, int, str]]) -> list[list[T]]:
    """Sort items by their `key` (first, stop, name) and group those whose ranges overlap."""
    groups: list[list[T]] = []
    end = 0
    for item in sorted(items, key=key):
        first, stop, _ = key(item)
        if groups and first < end:
            groups[-1].append(item)
        else:
            groups.append([item])
        end = max(end, stop)
    return groups


def check_staged(disk: Disk, commit: Commit, staged_path: Callable[[str], str]) -> None:
    """Verify that the driver sees every file of a commit with the length that its task reported."""
    wanted: list[tuple[str, int | None]] = []
    for file in commit.files:
        wanted.append((file.name, file.bytes))
        if file.bad_name is not None:
            wanted.append((file.bad_name, file.bad_bytes))
    wanted += [(file.name, file.bytes) for file in commit.kept]
    for name, size in wanted:
        path = staged_path(name)
        found = disk.stat(path)
        if found is not None and (size is None or found.size == size):
            continue
        what = "is not there" if found is None else f"has {found.size} bytes, not {size}"
        raise StagedFileMissing(
            f"{path}, which a task has written, {what}: it was removed meanwhile, or executors write to disks that "
            "the driver does not see; nothing was committed. The driver and all executors need the same directory "
            "under this path (mount it everywhere) or the same bucket; run it again then"
        )


def check_empty(table: Table) -> None:
    """Raise BadInput for an existing table that no export has written: the origin of its rows would be unknown."""
    names = table.visible_files()
    if names:
        raise BadInput(
            f"{table.path} holds {names[0]} and no commit of an export; nothing was written, name a table that is new"
        )


def data_file_name(first: int, stop: int, run: str, attempt: int) -> str:
    """Return a name that sorts by range. `run` and `attempt` distinguish repeated attempts."""
    return f"part-{first:020d}-{stop:020d}-{run}-{attempt:05d}.parquet"


def quarantine_name(name: str) -> str:
    """Return the name of the file with the records in quarantine of a data file."""
    return f"{QUARANTINE_DIR}/{name.rpartition('/')[2]}"


def list_data_files(disk: Disk, path: str) -> list[str]:
    """Return the names below a directory of a table, also in the directories of its partitions; no order."""
    found: list[str] = []
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        prefix = f"{folder}/" if folder else ""
        for name in disk.list_dir(join(path, folder) if folder else path):
            if "=" in name and not name.endswith(".parquet"):
                waiting.append(f"{prefix}{name}")
            else:
                found.append(f"{prefix}{name}")
    return found


def parse_file_range(name: str) -> tuple[int, int] | None:
    """Return the range in the name of a data file; None for other names."""
    name = name.rpartition("/")[2]
    parts = name.removesuffix(".parquet").split("-")
    if not name.startswith("part-") or len(parts) < 5 or not (parts[1].isdigit() and parts[2].isdigit()):
        return None
    return int(parts[1]), int(parts[2])
