"""The small files of a backup target: its label, and the manifest of each backup. No other module knows their bytes.

    label      file header "TLBT" 1, then MessagePack: [database_id]
    manifest   file header "TLBM" 1, then MessagePack: the fields of `BackupManifest`, in order

Rows are arrays, so that a later version can append fields. A manifest lists every file of its backup, also those that
an earlier backup stored: it needs no other manifest. The bytes of a file are the object that `object_key` names, by the
path of the file and its content, so two backups share the objects of equal files and no object ever changes.
"""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec

from tidelog.errors import Corrupt
from tidelog.formats import small_files
from tidelog.types import Buffer

LABEL_KEY: Final = "tidelog-backup"  # in a target of backups
LABEL_MAGIC: Final = b"TLBT"
LABEL_VERSION: Final = 1
BACKUP_MAGIC: Final = b"TLBM"
BACKUP_VERSION: Final = 1
MANIFEST_BYTES_MAX: Final = 1 << 30
OBJECTS_PREFIX: Final = "objects/"

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Checksum = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
# Segments, WAL files and channels: no part is `..`, and none begins with a slash.
_PATH: Final = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+){0,7}")
_ID: Final = re.compile(r"[0-9]{8}T[0-9]{9}Z-[0-9a-f]{6}")


class BackupFile(msgspec.Struct, array_like=True, frozen=True):
    """One file of a data directory."""

    path: str
    size: _Count  # bytes of the object
    checksum: _Checksum  # XXH3-128 of the object
    offset: _Count = 0  # where they begin in the restored file; zeros are before them


class ShardPosition(msgspec.Struct, array_like=True, frozen=True):
    """Where the backup ends in a WAL shard."""

    key: str
    file_number: _Count
    pos: _Count


class TopicPosition(msgspec.Struct, array_like=True, frozen=True):
    """The last record of a topic in the backup."""

    name: str
    id: _Count
    epoch: _Count
    head: _Count
    last_ts_ms: _Count


class BackupManifest(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    id: str
    database_id: str
    created_ms: _Count  # the time of the position
    version: str  # of the program that wrote it
    parent: str  # the backup whose objects were used again; empty: none
    shards: tuple[ShardPosition, ...]
    topics: tuple[TopicPosition, ...]
    engine_manifest: bytes  # the manifest of the engine, as a whole
    files: tuple[BackupFile, ...]
    stored_bytes: _Count  # bytes of the objects that this backup added
    damaged: tuple[str, ...] = ()  # files that did not verify when they were copied, and were accepted
    external: tuple[str, ...] = ()  # objects of a cold store that the backup refers to and does not contain
    channels: _Count = 0


def object_key(file: BackupFile) -> str:
    """The name of the object with the bytes of a file."""
    return f"{object_prefix(file.path)}.{file.checksum}"


def object_prefix(path: str) -> str:
    """The name of an object without its checksum. Stores want names that begin with a letter or a digit."""
    return OBJECTS_PREFIX + "/".join(f"dot{name}" if name.startswith(".") else name for name in path.split("/"))


def is_backup_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def encode_label(database_id: str) -> bytes:
    return small_files.wrap_file(LABEL_MAGIC, LABEL_VERSION, msgspec.msgpack.encode([database_id]))


def decode_label(buf: Buffer, what: str) -> str:
    """The id of the database whose backups a target holds."""
    body = small_files.unwrap_file(LABEL_MAGIC, LABEL_VERSION, buf, what)
    return small_files.decode_msgpack(tuple[str], body, what)[0]


def encode_backup(manifest: BackupManifest) -> bytes:
    return small_files.wrap_file(BACKUP_MAGIC, BACKUP_VERSION, msgspec.msgpack.encode(manifest))


def decode_backup(buf: Buffer, what: str) -> BackupManifest:
    """Decode the manifest of a backup; Corrupt or NewerFormat when it is not one. Its paths stay below a directory."""
    body = small_files.unwrap_file(BACKUP_MAGIC, BACKUP_VERSION, buf, what)
    manifest = small_files.decode_msgpack(BackupManifest, body, what)
    for file in manifest.files:
        if not _PATH.fullmatch(file.path) or {".", ".."} & set(file.path.split("/")):
            raise Corrupt(what, pos=small_files.FILE_HEADER_BYTES, reason=f"{file.path[:80]!r} is no path of a backup")
    paths = {file.path for file in manifest.files}
    if len(paths) != len(manifest.files):
        raise Corrupt(what, pos=small_files.FILE_HEADER_BYTES, reason="it lists a file twice")
    return manifest
