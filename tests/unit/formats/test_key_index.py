"""The bytes of key files: what is written is read, and nothing else is taken for one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tidelog.errors import Corrupt, NewerFormat
from tidelog.formats import key_index
from tidelog.formats.key_index import SegmentKeys

FIELDS: dict[str, Any] = {"base": 7, "foot": 11, "selector": 13, "seqs": 40}


def made(count: int = 20) -> SegmentKeys:
    return SegmentKeys(
        np.arange(count, dtype=np.uint64),
        np.arange(count, dtype=np.uint64) ** np.uint64(2),
        np.arange(count, dtype=np.uint32) * np.uint32(2),
        np.arange(count) % 3 == 0,
        np.arange(1, count, 2, dtype=np.uint32),
        np.arange(1, count, 2, dtype=np.uint32),
    )


def encoded(keys: SegmentKeys) -> bytes:
    return key_index.encode(7, 11, 13, 40, keys)


@pytest.mark.parametrize("count", [0, 1, 8, 9, 20])
def test_what_is_written_is_read(count: int) -> None:
    keys = made(count)
    found = key_index.decode(encoded(keys), **FIELDS)
    assert [column.tolist() for column in found] == [column.tolist() for column in keys]
    assert key_index.stored_selector(encoded(keys)) == 13


def test_every_changed_byte_and_every_truncation_is_noticed() -> None:
    content = encoded(made(5))
    for pos in range(len(content)):
        with pytest.raises((Corrupt, NewerFormat)):
            key_index.decode(content[:pos] + bytes([content[pos] ^ 0x41]) + content[pos + 1 :], **FIELDS)
        with pytest.raises(Corrupt):
            key_index.decode(content[:pos], **FIELDS)
    assert key_index.stored_selector(content[:-1]) is None
    assert key_index.stored_selector(b"") is None


@pytest.mark.parametrize("field", FIELDS)
def test_the_file_of_another_segment_or_rule_is_refused(field: str) -> None:
    with pytest.raises(Corrupt, match="another segment"):
        key_index.decode(encoded(made()), **FIELDS | {field: 1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": np.full(20, 40, np.uint32)}, "a row"),
        ({"older_rows": np.full(10, 99, np.uint32)}, "a row"),
        ({"older_keys": np.full(10, 20, np.uint32)}, "a key"),
    ],
)
def test_rows_and_keys_that_do_not_exist_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(Corrupt, match=message):
        key_index.decode(encoded(made()._replace(**change)), **FIELDS)


def test_a_newer_version_is_no_damage() -> None:
    content = bytearray(encoded(made()))
    content[4] = 2
    head, body = bytes(content[:48]), bytes(content[56:])
    content[48:56] = key_index._checksum(head, body).to_bytes(8, "little")
    with pytest.raises(NewerFormat):
        key_index.decode(bytes(content), **FIELDS)
