"""The small files of a backup target, frozen. The bytes were made from the drawing in docs/format.md, by `struct` and a
plain MessagePack encoder, not by the code under test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from struct import pack

import msgspec
import pytest
from xxhash import xxh3_64_intdigest

from tidelog.errors import Corrupt, NewerFormat
from tidelog.formats.backup_manifest import (
    BackupFile,
    BackupManifest,
    ShardPosition,
    TopicPosition,
    decode_backup,
    decode_label,
    encode_backup,
    encode_label,
    object_key,
)

FOLDER = Path(__file__).parent / "backup"
MANIFEST = BackupManifest(
    id="20231114T221320000Z-a1b2c3",
    database_id="0123456789abcdef0123456789abcdef",
    created_ms=1_700_000_000_000,
    version="0.1.0",
    parent="",
    shards=(ShardPosition("shard-00", 3, 128),),
    topics=(TopicPosition("orders", 1, 1, 42, 1_699_999_999_000),),
    engine_manifest=b"SNP1",
    files=(BackupFile("wal/shard-00/wal-0000000000000003.log", 28, "00112233445566778899aabbccddeeff", 100),),
    stored_bytes=28,
)
FIELDS = [
    *("20231114T221320000Z-a1b2c3", "0123456789abcdef0123456789abcdef", 1_700_000_000_000, "0.1.0", ""),
    [["shard-00", 3, 128]],
    [["orders", 1, 1, 42, 1_699_999_999_000]],
    b"SNP1",
    [["wal/shard-00/wal-0000000000000003.log", 28, "00112233445566778899aabbccddeeff", 100]],
    *(28, [], [], 0),
]


def envelope(magic: bytes, version: int, fields: list[object]) -> bytes:
    body = msgspec.msgpack.encode(fields)
    lead = pack("<4sB3sI", magic, version, bytes(3), len(body))
    return lead + pack("<Q", xxh3_64_intdigest(lead + body)) + body


def golden(name: str) -> bytes:
    return bytes.fromhex("".join((FOLDER / f"{name}.hex").read_text().split()))


def test_label_is_as_frozen() -> None:
    assert golden("label") == envelope(b"TLBT", 1, ["0123456789abcdef0123456789abcdef"])
    assert encode_label("0123456789abcdef0123456789abcdef") == golden("label")
    assert decode_label(golden("label"), "label") == "0123456789abcdef0123456789abcdef"


def test_manifest_is_as_frozen() -> None:
    assert golden("manifest") == envelope(b"TLBM", 1, FIELDS)
    assert encode_backup(MANIFEST) == golden("manifest")
    assert decode_backup(golden("manifest"), "manifest") == MANIFEST
    assert object_key(MANIFEST.files[0]) == (
        "objects/wal/shard-00/wal-0000000000000003.log.00112233445566778899aabbccddeeff"
    )


def test_every_changed_byte_and_every_truncation_is_found() -> None:
    decoders: dict[str, Callable[[bytes, str], object]] = {"label": decode_label, "manifest": decode_backup}
    for name, decode in decoders.items():
        content = golden(name)
        for size in range(len(content)):
            with pytest.raises(Corrupt):
                decode(content[:size], "it")
        for pos in range(len(content)):
            broken = bytearray(content)
            broken[pos] ^= 1
            with pytest.raises((Corrupt, NewerFormat)):
                decode(bytes(broken), "it")


def test_a_later_version_is_refused_and_later_fields_are_read() -> None:
    with pytest.raises(NewerFormat):
        decode_backup(envelope(b"TLBM", 2, FIELDS), "it")
    assert decode_backup(envelope(b"TLBM", 1, [*FIELDS, "later"]), "it") == MANIFEST
