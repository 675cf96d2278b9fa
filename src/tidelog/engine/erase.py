"""Erasure: delete records and remove their bytes from every file of the directory, with a receipt.

    1  delete, as `Topic.delete`: durable before anything else happens
    2  seal the active segment and checkpoint: no record is in the WAL only
    3  rewrite every segment that holds one of the records, also one that was deleted earlier
    4  start new WAL files; two checkpoints remove the old ones, old segment files and blobs, and all old manifests
    5  remove the quarantine; forget the idempotency keys of the records
    6  verify that the old files are gone, and write the receipt to the gap log

A crash at any step leaves the records deleted, or as they were before 1; repeating the call does the rest. A segment
that does not verify is never rewritten: its bytes stay, and the call raises `ErasureIncomplete`. What no call can reach
is listed in the receipt.

Receipts are a chain: each has the SHA-256 of the one before, so a changed, removed or inserted one is found
(`verify_chain`). A receipt has no byte of the records; of a match it has the SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from xxhash import xxh3_64_hexdigest

from tidelog.commitlog.segment import map_file
from tidelog.disk.durability import remove_if_exists
from tidelog.disk.interface import join
from tidelog.engine import delete, tag_search
from tidelog.engine.blobs import blob_path
from tidelog.engine.context import WAL_DIR, EngineContext
from tidelog.engine.manifest import MANIFEST_DIR, is_manifest_file
from tidelog.engine.memtable import MemTable
from tidelog.engine.producer_batches import STAGING_DIR
from tidelog.engine.segment import Segment, SizeCount, parse_file_name
from tidelog.engine.startup import QUARANTINE_DIR
from tidelog.engine.topic_state import TopicState
from tidelog.errors import BadInput, Corrupt, Damaged, Unavailable
from tidelog.formats.control_frames import Match
from tidelog.types import Ints
from tidelog.wal import paths

if TYPE_CHECKING:
    from tidelog.engine.gap_log import GapEntry
    from tidelog.engine.rewrite import Rewriter

Progress = Callable[[str, int, int], object]  # what is done, how much of it, of how much
_STEPS: Final = 6
_ALWAYS_UNREACHED: Final = (
    "copies of the directory: backups, exports, file system snapshots, and blocks that the device has freed",
    "processes that have an old file open or mapped, until they close it, and what readers have read",
)


class ErasedFile(msgspec.Struct, frozen=True):
    """A file that held bytes of erased records, or may have."""

    path: str  # relative to the data directory
    action: Literal["rewritten", "removed"]
    bytes: int
    xxh3: str
    new_path: str | None = None
    new_bytes: int | None = None
    new_xxh3: str | None = None


class ErasureReceipt(msgspec.Struct, frozen=True):
    """What an erasure did. Stored in the gap log as JSON."""

    number: int  # position in the chain, from 1
    topic: str
    topic_id: int
    ts_ms: int
    actor: str | None
    selected_by: Literal["match", "seqs"]
    selection_sha256: str  # of the match, or of the seqs as decimal text with commas
    records: int  # deleted by this call
    records_before: int  # selected and deleted by an earlier call
    first: int  # lowest seq selected; 0: none
    last: int
    files: tuple[ErasedFile, ...]
    not_reached: tuple[str, ...]
    previous: str  # hash of the receipt before; empty for the first
    hash: str = ""  # SHA-256 of this receipt with an empty hash

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    def computed_hash(self) -> str:
        return hashlib.sha256(msgspec.structs.replace(self, hash="").to_json()).hexdigest()


class ErasureIncomplete(Damaged):
    """Records are deleted, but some of their bytes are in a file that could not be rewritten or removed. No receipt was
    written."""


class EraseLocation(Protocol):
    """Another place that holds segment files, such as a cold tier."""

    def erase(self, topic_id: int) -> tuple[Sequence[ErasedFile], Sequence[str]]:
        """Remove what the place has of a topic and no segment names: old generations, and segments that were dropped;
        return the files, and what it could not reach. Raises ErasureIncomplete where a file stays."""
        ...


class ChainCheck(NamedTuple):
    """The result of walking the chain of receipts."""

    receipts: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_chain(entries: Iterable[GapEntry], receipt: ErasureReceipt | None = None) -> ChainCheck:
    """Walk the receipts in these rows of the gap log, oldest first; `receipt`, which a caller kept, must be one of
    them. The oldest rows may have been dropped by the cap of the gap log."""
    problems: list[str] = []
    known: set[str] = set()
    before: ErasureReceipt | None = None
    count = 0
    for entry in entries:
        count += 1
        where = f"row {entry.seq}"
        try:
            found = msgspec.json.decode(entry.about.encode(), type=ErasureReceipt)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            problems.append(f"{where} has no receipt: {error}")
            before = None
            continue
        where = f"{where}, receipt {found.number} of {found.topic}"
        if found.computed_hash() != found.hash:
            problems.append(f"{where} was changed: its hash is another")
        row = entry.topic, entry.topic_id, entry.first, entry.last, entry.ts_ms, entry.actor
        if row != (found.topic, found.topic_id, found.first, found.last, found.ts_ms, found.actor):
            problems.append(f"{where}: the row contradicts its receipt")
        if before is not None and (found.previous, found.number) != (before.hash, before.number + 1):
            problems.append(f"{where} does not follow receipt {before.number}: one was changed, removed or inserted")
        if before is None and count == 1 and (found.number == 1) != (found.previous == ""):
            problems.append(f"{where} is the oldest: its number and the hash before it contradict each other")
        known.add(found.hash)
        before = found
    if receipt is not None and (receipt.computed_hash() != receipt.hash or receipt.hash not in known):
        problems.append(f"receipt {receipt.number} of {receipt.topic} is not in the chain")
    return ChainCheck(count, tuple(problems))


@dataclass(slots=True)
class Eraser:
    """Erases records of an engine, one call at a time."""

    context: EngineContext
    rewriter: Rewriter
    checkpoint: Callable[[], None]
    request_base: Callable[[], None]  # the next checkpoint saves the whole manifest
    _lock: Lock

    def erase(
        self,
        topic: TopicState,
        *,
        match: object = None,
        seqs: Sequence[int] | None = None,
        actor: str | None = None,
        progress: Progress = lambda *_: None,
    ) -> ErasureReceipt:
        selector = delete.parse_tag_match(match, "nothing was erased")
        if (selector is None) == (seqs is None):
            raise BadInput("say what to erase: match or seqs, one of them; nothing was erased")
        with self._lock:
            return _Erasure(self, topic, selector, seqs, actor, progress).run(match)


class _Stored(NamedTuple):
    """A file as it was."""

    size: int
    xxh3: str


class _Erasure:
    def __init__(
        self,
        host: Eraser,
        topic: TopicState,
        selector: Match | None,
        seqs: Sequence[int] | None,
        actor: str | None,
        progress: Progress,
    ) -> None:
        self._host, self._context, self._topic = host, host.context, topic
        self._selector, self._seqs, self._actor, self._progress = selector, seqs, actor, progress

    def run(self, match: object) -> ErasureReceipt:
        context, topic = self._context, self._topic
        self._step("deleting", 0)
        with topic.lock:  # before a checkpoint forgets them
            blob_ids, dropped_ids = dict(topic.blobs), [*topic.dropped_blobs]
        deleted = delete.delete_records(topic, match, None, self._seqs, self._actor).deleted
        selected = self._find_selected()
        bases = self._segments_of(selected)
        blobs = self._blob_files([*dropped_ids, *(blob_ids[seq] for seq in selected.tolist() if seq in blob_ids)])
        self._forget_keys(selected)
        self._step("sealing", 1)
        with topic.lock:
            topic.index.roll_segment()
        self._host.checkpoint()
        old_segments = self._segment_files(bases)
        self._step("rewriting", 2)
        self._rewrite(bases)
        self._step("removing old files", 3)
        for shard in context.shards:
            shard.start_new_file()
        old_wal = self._wal_files()
        quarantined, old_manifests = self._files_in(QUARANTINE_DIR), self._manifest_files()
        for _ in range(2):  # the first names the new files, the second removes the old ones
            self._host.request_base()
            self._host.checkpoint()
        self._step("removing old files", 4)
        self._remove_quarantine(quarantined)
        files, more, not_reached = [*self._compare(bases, old_segments)], list[ErasedFile](), list[str]()
        for path, old in (old_wal | old_manifests | quarantined | blobs).items():
            if context.disk.stat(join(context.root, path)) is not None:
                raise self._incomplete(f"{path} is still there")
            files.append(ErasedFile(path, "removed", old.size, old.xxh3))
        for location in context.erase_locations:
            found, unreached = location.erase(topic.id)
            more += found
            not_reached += unreached
        self._step("writing the receipt", 5)
        receipt = self._make_receipt(match, deleted, selected, (*files, *more), not_reached)
        self._store(receipt)
        self._step("done", _STEPS)
        return receipt

    def _step(self, what: str, done: int) -> None:
        self._progress(what, done, _STEPS)

    def _incomplete(self, reason: str) -> ErasureIncomplete:
        return ErasureIncomplete(
            f"{self._topic.name}: the records are deleted, but not all of their bytes are gone: {reason}; no receipt "
            "was written, repair this and erase again"
        )

    # ── what is erased ────────────────────────────────────────────────────────────────────────

    def _find_selected(self) -> Ints:
        """Return the seqs of all selected records that a part has, deleted or not, ascending."""
        topic = self._topic
        with topic.lock:
            parts, head = topic.index.parts.copy(), topic.index.head
        found = [np.zeros(0, np.int64)]
        for part in parts:
            stop = min(part.stop, head + 1)
            if self._selector is None:
                wanted = np.unique(np.array(list(self._seqs or ()), np.int64))
                found.append(wanted[(wanted >= part.base) & (wanted < stop)])
                continue
            try:
                found.append(tag_search.search_part(topic, part, part.base, stop, self._selector))
            except Corrupt as error:
                raise self._incomplete(str(error)) from error
        return np.unique(np.concatenate(found))

    def _segments_of(self, seqs: Ints) -> frozenset[int]:
        """Return the bases of the segments that hold these records, or will after a checkpoint."""
        bases = set()
        with self._topic.lock:
            for part in self._topic.index.parts:
                lo, hi = np.searchsorted(seqs, (part.base, part.stop))
                if lo < hi:
                    bases.add(part.segment if isinstance(part, MemTable) else part.base)
        return frozenset(bases)

    def _forget_keys(self, seqs: Ints) -> None:
        """Forget the idempotency keys of writes of which every record is erased. Of records that were named by their
        seqs a key may be all that is left."""
        topic, erased = self._topic, {*seqs.tolist(), *(self._seqs or ())}
        with topic.lock:
            topic.producers.keys.forget_writes(lambda done: erased.issuperset(done.seqs))

    def _rewrite(self, bases: frozenset[int]) -> None:
        result = self._host.rewriter.rewrite(
            self._topic,
            force=True,
            bases=bases,
            progress=lambda done, total: self._progress("rewriting", 2 if done < total else 3, _STEPS),
        )
        if result.skipped:
            raise self._incomplete("; ".join(f"segment {each.base}: {each.reason}" for each in result.skipped))
        with self._topic.lock:
            for part in self._topic.index.parts:
                if isinstance(part, Segment) and part.base in bases and not part.is_sealed:
                    raise self._incomplete(f"segment {part.base} still grows")

    # ── files ─────────────────────────────────────────────────────────────────────────────────

    def _digest(self, path: str) -> _Stored | None:
        """Return size and checksum of a file; None where there is none, or a directory."""
        stat = self._context.disk.stat(join(self._context.root, path))
        if stat is None or stat.is_dir:
            return None
        content = map_file(self._context.disk, join(self._context.root, path))
        return None if content is None else _Stored(len(content), xxh3_64_hexdigest(content))

    def _files_in(self, directory: str) -> dict[str, _Stored]:
        found = {}
        with suppress(FileNotFoundError):
            for name in sorted(self._context.disk.list_dir(join(self._context.root, directory))):
                stat = self._context.disk.stat(join(join(self._context.root, directory), name))
                if stat is None or stat.is_dir:  # blobs of large records are in a directory of their own
                    continue
                if (stored := self._digest(join(directory, name))) is not None:
                    found[join(directory, name)] = stored
        return found

    def _manifest_files(self) -> dict[str, _Stored]:
        """Return the bases and deltas of the manifest. The ids beside them hold nothing of a record."""
        files = self._files_in(MANIFEST_DIR)
        return {path: file for path, file in files.items() if is_manifest_file(path.rpartition("/")[2])}

    def _segment_files(self, bases: frozenset[int]) -> dict[str, _Stored]:
        """Return all files of these segments, of any generation."""
        directory = self._topic.context.segment_files(self._topic.id).directory
        relative = directory.removeprefix(f"{self._context.root}/")
        files = self._files_in(relative)
        return {path: file for path, file in files.items() if _is_of(path, bases)}

    def _wal_files(self) -> dict[str, _Stored]:
        """Return the WAL files that are not written any more."""
        context, found = self._context, dict[str, _Stored]()
        active = {shard.directory: shard.position().file_number for shard in context.shards}
        wal = join(context.root, WAL_DIR)
        for key in paths.list_shard_keys(context.disk, wal):
            directory = paths.shard_directory(wal, key)
            for number in paths.list_file_numbers(context.disk, directory):
                path = paths.file_path(directory, number).removeprefix(f"{context.root}/")
                if number != active.get(directory) and (stored := self._digest(path)) is not None:
                    found[path] = stored
        return found

    def _blob_files(self, blob_ids: Iterable[int]) -> dict[str, _Stored]:
        """Return the files of these blobs that exist."""
        files = (blob_path(self._topic.directory, blob_id) for blob_id in blob_ids)
        relative = [path.removeprefix(f"{self._context.root}/") for path in files]
        return {path: stored for path in relative if (stored := self._digest(path)) is not None}

    def _remove_quarantine(self, files: Iterable[str]) -> None:
        disk, root = self._context.disk, self._context.root
        if sum(remove_if_exists(disk, join(root, path)) for path in files):
            disk.sync_dir(join(root, QUARANTINE_DIR))

    def _compare(self, bases: frozenset[int], before: dict[str, _Stored]) -> Iterable[ErasedFile]:
        """Yield what became of the files of these segments. Raises where an old one is still there."""
        after = self._segment_files(bases)
        successors = {
            (name.base, name.suffix): path
            for path in after
            if (name := parse_file_name(path.rpartition("/")[2])) is not None and not name.is_temporary
        }
        with self._topic.lock:
            current = {part.base: part.generation for part in self._topic.index.parts if isinstance(part, Segment)}
        for path, old in before.items():
            name = parse_file_name(path.rpartition("/")[2])
            assert name is not None, "listed by its name"
            if path in after:
                if current.get(name.base) != name.generation:
                    raise self._incomplete(f"{path} is still there")
                continue  # it holds none of the bytes: a rewrite had removed them before
            new_path = successors.get((name.base, name.suffix))
            if new_path is None:
                yield ErasedFile(path, "removed", old.size, old.xxh3)
            else:
                new = after[new_path]
                yield ErasedFile(path, "rewritten", old.size, old.xxh3, new_path, new.size, new.xxh3)

    # ── the receipt ───────────────────────────────────────────────────────────────────────────

    def _make_receipt(
        self, match: object, deleted: int, selected: Ints, files: Sequence[ErasedFile], not_reached: Sequence[str]
    ) -> ErasureReceipt:
        context, topic = self._context, self._topic
        text = str(match) if self._selector is not None else ",".join(map(str, sorted(set(self._seqs or ()))))
        entries = context.gap_log.read_erasures()
        before = msgspec.json.decode(entries[-1].about.encode(), type=ErasureReceipt) if entries else None
        receipt = ErasureReceipt(
            before.number + 1 if before else 1,
            topic.name,
            topic.id,
            context.now_ms(),
            self._actor,
            "seqs" if self._selector is None else "match",
            hashlib.sha256(text.encode()).hexdigest(),
            deleted,
            max(len(selected) - deleted, 0),
            int(selected[0]) if len(selected) else 0,
            int(selected[-1]) if len(selected) else 0,
            tuple(files),
            (*_ALWAYS_UNREACHED, *self._copies_elsewhere(), *not_reached),
            before.hash if before else "",
        )
        return msgspec.structs.replace(receipt, hash=receipt.computed_hash())

    def _copies_elsewhere(self) -> Iterable[str]:
        topic, context = self._topic, self._context
        # Without the names of other topics: a key that may read this one may read its receipts.
        if copies := len(topic.downstream):
            targets = "1 topic" if copies == 1 else f"{copies} topics"
            yield f"copies in {targets} that routers of this one write to: list the routers, and erase them there"
        if topic.config.type == "queue":
            if topic.config.dead_letter is not None:
                yield "dead letters in the topic that the settings name: erase them there"
            yield "the history of the queue, which has seqs and the names of workers, and no record"
        if staged := self._files_in(STAGING_DIR):
            yield f"{len(staged)} staged files of batches that are being written: they are no records yet"
        if not context.limits.ledger_records:
            yield "the gap log is switched off: this receipt is stored nowhere and not part of a chain"

    def _store(self, receipt: ErasureReceipt) -> None:
        context = self._context
        context.removals.add(
            self._topic,
            "erase",
            receipt.first,
            receipt.last,
            SizeCount(0, 0),  # the delete has a row of its own, which counts them
            actor=receipt.actor,
            ts_ms=receipt.ts_ms,
            about=receipt.to_json().decode(),
        )
        try:
            context.gap_log.flush_durably()
        except OSError as error:
            raise Unavailable(
                f"{self._topic.name}: the bytes are gone, but the receipt cannot be stored: {error}; erase again"
            ) from error


def _is_of(path: str, bases: frozenset[int]) -> bool:
    name = parse_file_name(path.rpartition("/")[2])
    return name is not None and name.base in bases
