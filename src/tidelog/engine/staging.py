"""[shell] Chunks of records on their way into a numbered batch: written by many, published or swept by one.

    <root>/staging/<owner>-<ms>-<chance>          an Arrow stream: data, and where there are such tag, node, meta, json
    <root>/staging/<owner>-<ms>-<chance>.part     one that is being written, or that somebody left behind
    <root>/staging/<owner>-<key>.plan             chunks of a batch that is published in parts (`publication`)

A chunk is named by nobody until its writer has told of it, so the files of tasks that failed, ran twice or were
forgotten are waste, and nothing more. The owner sweeps all it has when its batch is published or given up; what no
owner comes back for is swept by whoever is next, when it is `KEPT_MS` old. Nothing here is synced: a batch whose chunks
a power cut took was not published, and is made again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec
import pyarrow as pa
from xxhash import xxh3_64, xxh3_64_intdigest, xxh3_128_hexdigest

from tidelog.disk.atomic import read_all, remove_if_there, replace
from tidelog.disk.latch import FULL
from tidelog.disk.seam import Disk, File, join
from tidelog.engine import ipc
from tidelog.engine.expansion import ALLOWANCE, Oversized
from tidelog.engine.numbers import ONCE
from tidelog.errors import BadInput, Damaged, DiskFull, NotFound, TooLarge, WriteFailed
from tidelog.types import Buffer

DIRECTORY: Final = "staging"
CHUNK_BYTES_MAX: Final = 1 << 30
BATCH_BYTES_MAX: Final = (
    128 << 20
)  # of one Arrow batch in a chunk once it is decoded: what can be appended, and offsets
KEPT_MS: Final = 7 * 86_400_000
_NAME: Final = re.compile(r"([0-9a-f]{16,48})-([0-9a-f]{12})-[0-9a-f]{16}")
_OWNER: Final = re.compile(r"[0-9a-f]{16,48}")
_TEXTS: Final = (pa.binary(), pa.large_binary(), pa.string(), pa.large_string())
_KINDS: Final = {"data": _TEXTS, "tag": _TEXTS, "node": _TEXTS, "meta": _TEXTS, "json": (pa.bool_(),)}
_PART: Final = ".part"
_PLAN: Final = ".plan"


class Chunk(NamedTuple):
    """What its writer tells of a chunk: whoever publishes it holds it against what is there."""

    name: str
    rows: int
    size: int
    sum: int  # XXH3-64 of its bytes


def name_of(owner: str, now_ms: int, chance: bytes) -> str:
    return f"{owner}-{now_ms:012x}-{chance.hex()}"


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise BadInput(f"{name!r:.80} cannot name a chunk; nothing was written")
    return name


class Plan(NamedTuple):
    """A batch that is published in parts: its chunks in their order, kept until the last part is published."""

    topic: str
    writer: str
    number: int
    sum: tuple[int, int]
    query_id: str
    chunks: tuple[Chunk, ...]


class Upload:
    """A chunk that is being written."""

    def __init__(self, disk: Disk, path: str, name: str) -> None:
        self._disk, self._path, self._name = disk, path, name
        remove_if_there(disk, path + _PART)
        self._file: File = disk.open(path + _PART, "create")
        self._hash, self._size = xxh3_64(), 0

    def write(self, pieces: Sequence[Buffer]) -> None:
        size = sum(map(len, pieces))
        if self._size + size > CHUNK_BYTES_MAX:
            raise TooLarge("a chunk", size=self._size + size, limit=CHUNK_BYTES_MAX)
        try:
            self._file.write_pieces(self._size, pieces)
        except OSError as error:
            kind = DiskFull if error.errno in FULL else WriteFailed
            raise kind(
                f"{self._path} cannot be written: {error}; nothing was published, free space and retry"
            ) from error
        for piece in pieces:
            self._hash.update(piece)
        self._size += size

    def finish(self, rows: int = 0) -> Chunk:
        self._file.close()
        self._disk.rename(self._path + _PART, self._path)
        return Chunk(self._name, rows, self._size, self._hash.intdigest())

    def abandon(self) -> None:
        self._file.close()
        with suppress(OSError):
            remove_if_there(self._disk, self._path + _PART)


class Staging:
    def __init__(self, disk: Disk, root: str) -> None:
        self._disk, self.directory = disk, join(root, DIRECTORY)

    @property
    def exists(self) -> bool:
        return self._disk.stat(self.directory) is not None

    def make(self) -> None:
        self._disk.make_dir(self.directory)

    def begin(self, name: str) -> Upload:
        return Upload(self._disk, join(self.directory, check_name(name)), name)

    def read(self, chunk: Chunk) -> Iterator[pa.RecordBatch]:
        """The records of a chunk, checked against what was told of it."""
        path = join(self.directory, check_name(chunk.name))
        try:
            file = self._disk.open(path)
        except FileNotFoundError:
            raise NotFound(
                f"the chunk {chunk.name} is not there: whoever staged it sees another directory, or it was swept; "
                "nothing was written, see that all of them have the same one and run it again"
            ) from None
        try:
            content = file.map() if file.size() else memoryview(b"")
            if len(content) != chunk.size or xxh3_64_intdigest(content) != chunk.sum:
                raise _other(path, "it is not what its writer wrote")
            yield from _batches(path, content, chunk.rows)
        finally:
            file.close()

    def remove(self, owner: str) -> int:
        """Forget the chunks of an owner, but for those of a plan; how many there were."""
        if not _OWNER.fullmatch(owner):
            raise BadInput(f"{owner!r:.80} owns no chunks; nothing was removed")
        planned = self._planned(owner)
        mine = [path for path, whose, _ in self._listed() if whose == owner and path not in planned]
        return sum(remove_if_there(self._disk, path) for path in mine)

    def sweep(self, now_ms: int) -> int:
        """Forget what nobody came back for. A plan of a writer that has a name is kept until it is finished; one that
        nobody can repeat goes with its chunks."""
        old = [path for path, _, made_ms in self._listed() if now_ms - made_ms > KEPT_MS]
        if not old:
            return 0
        plans = [(path, plan) for path in self._plans() if (plan := self._read_plan(path)) is not None]
        kept = {self._at(chunk.name) for _, plan in plans if not plan.writer.startswith(ONCE) for chunk in plan.chunks}
        swept = sum(remove_if_there(self._disk, path) for path in old if path not in kept)
        for path, plan in plans:
            if plan.writer.startswith(ONCE) and not any(self._is_there(chunk.name) for chunk in plan.chunks):
                remove_if_there(self._disk, path)
        return swept

    # ── plans ─────────────────────────────────────────────────────────────────────────────────

    def plan(self, owner: str, key: str) -> Plan | None:
        """The plan that was kept under a key; None where there is none."""
        return self._read_plan(self._plan_path(owner, key))

    def keep_plan(self, owner: str, key: str, plan: Plan) -> None:
        """Make a plan and its chunks durable: from here on they outlive a power cut."""
        for chunk in plan.chunks:
            file = self._disk.open(self._at(check_name(chunk.name)))
            try:
                file.sync()
            finally:
                file.close()
        self._disk.sync_dir(self.directory)
        path = self._plan_path(owner, key)
        try:
            replace(self._disk, path, msgspec.json.encode(plan))
        except OSError as error:
            kind = DiskFull if error.errno in FULL else WriteFailed
            raise kind(f"{path} cannot be written: {error}; nothing was published, free space and retry") from error

    def drop_plan(self, owner: str, key: str) -> None:
        remove_if_there(self._disk, self._plan_path(owner, key))

    def _plan_path(self, owner: str, key: str) -> str:
        return join(self.directory, f"{owner}-{xxh3_128_hexdigest(key.encode())}{_PLAN}")

    def _read_plan(self, path: str) -> Plan | None:
        content = read_all(self._disk, path)
        try:
            return None if content is None else msgspec.json.decode(content, type=Plan)
        except msgspec.DecodeError as error:
            raise Damaged(f"{path} cannot be read ({error}); nothing was published, put it back from a copy") from None

    def _plans(self) -> list[str]:
        with suppress(FileNotFoundError):
            return [join(self.directory, name) for name in self._disk.names(self.directory) if name.endswith(_PLAN)]
        return []

    def _planned(self, owner: str) -> set[str]:
        """Paths of chunks that a plan of an owner needs."""
        mine = (path for path in self._plans() if _name_in(path).startswith(f"{owner}-"))
        found = (self._read_plan(path) for path in mine)
        return {self._at(chunk.name) for plan in found if plan is not None for chunk in plan.chunks}

    def _at(self, name: str) -> str:
        return join(self.directory, name)

    def _is_there(self, name: str) -> bool:
        return self._disk.stat(self._at(name)) is not None

    def _listed(self) -> Iterator[tuple[str, str, int]]:
        try:
            names = self._disk.names(self.directory)
        except FileNotFoundError:
            return
        for name in names:
            found = _NAME.fullmatch(name.removesuffix(_PART))
            if found:
                yield join(self.directory, name), found[1], int(found[2], 16)


def _batches(path: str, content: memoryview, rows: int) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow stream, each bounded before it is decoded: a chunk comes from outside."""
    found = 0
    try:
        for batch in ipc.batches(content, _KINDS, BATCH_BYTES_MAX, ALLOWANCE.start()):
            found += batch.num_rows
            yield batch
    except Oversized as error:
        raise TooLarge(
            f"the chunk {_name_in(path)}: {error.what}", size=error.size, limit=error.limit, unit=error.unit
        ) from None
    except BadInput as error:
        raise _other(path, f"it cannot be appended ({_reason(error)})") from None
    if found != rows:
        raise _other(path, f"it has {found} rows and was to have {rows}")


def _reason(error: BadInput) -> str:
    return str(error).partition("; nothing was written")[0]


def _name_in(path: str) -> str:
    return path.rpartition("/")[2]


def _other(path: str, reason: str) -> BadInput:
    return BadInput(f"the chunk {_name_in(path)}: {reason}; nothing was published, stage it again")
