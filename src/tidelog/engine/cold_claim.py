"""Which store is the cold tier of a data directory, and whether this directory may write and delete there.

    <directory>/meta/COLD     database id, claim, address      written by the directory that opens it for writing
    <store>/TIDELOG-STORE     database id, claim               the marker

The ids must be equal: a store of another database is refused. A copy of a directory has the same id, and would delete
the objects that the original named since. So every writer takes a new claim: it records the claim it is about to take,
replaces the marker, then records that it has it. A directory whose claim is no longer in the marker may read the store,
and neither writes nor deletes there until an operator lets it take the claim again (`tidelog tier claim`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final

import msgspec

from tidelog.disk.durability import read_file, replace_file
from tidelog.disk.interface import Disk, join
from tidelog.disk.segment_store import MARKER_KEY, SegmentStore, StoreMarker, read_marker
from tidelog.engine.manifest import MANIFEST_DIR
from tidelog.errors import WrongStore
from tidelog.formats import small_files
from tidelog.formats.backup_manifest import LABEL_KEY

STATE_FILE: Final = "COLD"
_MAGIC: Final = b"TLCS"
_VERSION: Final = 1


class ColdStoreState(msgspec.Struct, array_like=True, frozen=True):
    """What a data directory knows of its cold store."""

    database: str  # id
    claim: str  # in the marker, as far as known
    next_claim: str  # being written to the marker; "" if none is
    address: str  # without credentials; "" before the store was used


def state_path(root: str) -> str:
    return join(join(root, MANIFEST_DIR), STATE_FILE)


def load_state(disk: Disk, root: str) -> ColdStoreState | None:
    """Load the state; None if the directory never had a cold store. Raises Corrupt or NewerFormat."""
    path = state_path(root)
    content = read_file(disk, path)
    if content is None:
        return None
    return small_files.decode_msgpack(ColdStoreState, small_files.unwrap_file(_MAGIC, _VERSION, content, path), path)


def save_state(disk: Disk, root: str, state: ColdStoreState) -> None:
    disk.make_dir(join(root, MANIFEST_DIR))
    replace_file(disk, state_path(root), small_files.wrap_file(_MAGIC, _VERSION, msgspec.msgpack.encode(state)))


def find_foreign_store(disk: Disk, root: str, store: SegmentStore) -> str | None:
    """Return why a store is not the one with the segments of this directory, by its marker; None: it may be. Raises the
    errors of the store."""
    state, marker = load_state(disk, root), read_marker(store)
    if marker is None:
        return "it has no marker: it is another place, or it is not mounted"
    if state is not None and marker.database != state.database:
        return "it belongs to another database"
    return None


def _find_other_use(store: SegmentStore) -> str | None:
    """Return what Tidelog uses a place without a marker for. The writer of a data directory removes what its manifest
    does not name, objects of a cold store too."""
    if store.exists(LABEL_KEY):
        return "holds backups"
    bases = f"{MANIFEST_DIR}/snapshot."
    return "is a data directory" if any(each.key.startswith(bases) for each in store.list(MANIFEST_DIR)) else None


class StoreClaim:
    """The claim of one open directory on its store."""

    def __init__(
        self, disk: Disk, root: str, store: SegmentStore, *, new_id: Callable[[], str] = lambda: secrets.token_hex(16)
    ) -> None:
        self._disk, self._root, self._store, self._new_id = disk, root, store, new_id
        self._state = load_state(disk, root)
        self.is_held = False

    @property
    def recorded_address(self) -> str | None:
        """The address of the store that the directory used last; None if it used none."""
        return self._state.address or None if self._state is not None else None

    def take(self, *, cold_segments: int, force: bool = False) -> None:
        """Take the claim, or check that it is still held. Raises WrongStore where the store belongs to another
        database or another copy of this one, and the errors of the store. `force`: take it from another copy."""
        marker = read_marker(self._store)
        state = self._state or ColdStoreState(self._new_id(), "", "", "")
        if marker is None:
            if (other := _find_other_use(self._store)) is not None:
                step = "choose another directory or another prefix of the bucket"
                raise WrongStore(self._store.address, other, step=step)
            if cold_segments and not force:
                raise WrongStore(
                    self._store.address,
                    f"has no marker, and {cold_segments} segments of this database are in its cold store",
                    step="give the address where they are, or restore the marker with `tidelog tier claim`",
                )
        elif marker.database != state.database:
            if not (force and self._state is None):  # a directory without its state cannot know its id
                raise WrongStore(
                    self._store.address,
                    "belongs to another database",
                    step="choose another directory or another prefix of the bucket",
                )
            state = ColdStoreState(marker.database, "", "", "")
        elif marker.claim not in (state.claim, state.next_claim) and not force:
            raise WrongStore(
                self._store.address,
                "was taken over by another copy of this database",
                step="stop using one of the copies; `tidelog tier claim` gives the store to this one",
            )
        if self.is_held and marker is not None and marker.claim == state.claim:
            return
        claim = self._new_id()
        # The claim in the marker may be one that an interrupted take had only announced: it stays valid until the new
        # one has replaced it.
        held = marker.claim if marker is not None else state.claim
        self._save(msgspec.structs.replace(state, claim=held, next_claim=claim))
        self._store.put(MARKER_KEY, [StoreMarker(database=state.database, claim=claim).encode()])
        self._save(ColdStoreState(state.database, claim, "", self._store.address))
        self.is_held = True

    def _save(self, state: ColdStoreState) -> None:
        save_state(self._disk, self._root, state)
        self._state = state
