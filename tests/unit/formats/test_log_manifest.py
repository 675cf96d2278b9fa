"""The manifest of a segmented log: its bytes, and what is refused."""

from __future__ import annotations

import msgspec
import pytest

from tidelog.errors import Corrupt, NewerFormat
from tidelog.formats import small_files
from tidelog.formats.small_files import LogManifest, ManifestEntry

MANIFEST = LogManifest(
    codec="rustlog",
    generation=7,
    segments=[ManifestEntry(0, 4096, 2)],
    active=ManifestEntry(100, 0, 2),
    next_seq=100,
    reserved=1048676,
    clean=False,
    removing=[],
    offsets=True,
)
GOLDEN = bytes.fromhex(
    "544c4c4d 01 000000 1e000000 09c33a853b598d2199 a7727573746c6f67 07 91 9300cd100002 93640002 64 ce00100064 c2 90 c3"
)


def test_the_bytes_never_change() -> None:
    assert small_files.encode_manifest(MANIFEST) == GOLDEN
    assert small_files.decode_manifest(GOLDEN) == MANIFEST


def test_every_changed_bit_is_detected() -> None:
    for pos in range(len(GOLDEN)):
        for bit in range(8):
            with pytest.raises(Corrupt):
                small_files.decode_manifest(GOLDEN[:pos] + bytes([GOLDEN[pos] ^ 1 << bit]) + GOLDEN[pos + 1 :])


@pytest.mark.parametrize(
    "content", [[], {}, ["tide"], [*msgspec.msgpack.decode(GOLDEN[20:])[:3], 5, 1, 1, False, [], False]]
)
def test_a_body_of_another_shape_is_corrupt(content: object) -> None:
    with pytest.raises(Corrupt):
        small_files.decode_manifest(small_files.wrap_file(b"TLLM", 1, msgspec.msgpack.encode(content)))


def test_bases_that_do_not_rise_are_corrupt() -> None:
    twice = msgspec.structs.replace(MANIFEST, active=ManifestEntry(0, 0, 0))
    with pytest.raises(Corrupt):
        small_files.decode_manifest(small_files.encode_manifest(twice))


def test_a_newer_version_is_refused() -> None:
    with pytest.raises(NewerFormat):
        small_files.decode_manifest(small_files.wrap_file(b"TLLM", 2, b"anything"))
