"""The envelope of small files: what it lets pass, it lets pass unchanged."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelog.errors import Corrupt, NewerFormat
from tidelog.formats import small_files

quick = settings(max_examples=150, deadline=None, database=None)


def naive(magic: bytes, version: int, body: bytes) -> bytes:
    lead = magic + bytes((version, 0, 0, 0)) + struct.pack("<I", len(body))
    return lead + xxhash.xxh3_64(lead + body).digest()[::-1] + body


@quick
@given(st.binary(min_size=4, max_size=4), st.integers(1, 255), st.binary(max_size=99))
def test_a_body_decodes_to_itself(magic: bytes, version: int, body: bytes) -> None:
    made = small_files.wrap_file(magic, version, body)
    assert made == naive(magic, version, body)
    assert small_files.unwrap_file(magic, version, made, "a file") == body
    assert small_files.unwrap_file(magic, version, memoryview(made), "a file") == body


GOOD = small_files.wrap_file(b"TEST", 2, b"body")


@pytest.mark.parametrize(
    ("buf", "words"),
    [
        (b"", "too few"),
        (GOOD[:19], "too few"),
        (b"TOST" + GOOD[4:], "begins with b'TOST'"),
        (naive(b"TEST", 1, b"body"), "version 1 was never written"),
        (naive(b"TEST", 0, b"body"), "version 0 was never written"),
        (GOOD[:5] + b"\1" + GOOD[6:], "reserved"),
        (GOOD[:7] + b"\1" + GOOD[8:], "reserved"),
        (GOOD[:-1], "4 bytes in its header, not 3"),
        (GOOD + b"\0", "4 bytes in its header, not 5"),
        (GOOD[:-1] + b"x", "checksum"),
        (GOOD[:12] + bytes(8) + GOOD[20:], "checksum"),
    ],
)
def test_anything_else_is_corrupt_with_a_reason(buf: bytes, words: str) -> None:
    with pytest.raises(Corrupt, match=words) as caught:
        small_files.unwrap_file(b"TEST", 2, buf, "seg-7.foot")
    assert "seg-7.foot" in str(caught.value)


def test_a_newer_version_is_refused_and_a_damaged_one_is_damage() -> None:
    with pytest.raises(NewerFormat) as caught:
        small_files.unwrap_file(b"TEST", 2, naive(b"TEST", 3, b"body"), "seg-7.foot")
    assert caught.value.known == 2
    with pytest.raises(Corrupt, match="checksum"):
        small_files.unwrap_file(b"TEST", 2, GOOD[:4] + b"\xff" + GOOD[5:], "seg-7.foot")


def test_the_checksum_covers_the_version() -> None:
    """Or a damaged version byte would make a later layout pass for an earlier one."""
    later = naive(b"TEST", 3, b"body")
    with pytest.raises(Corrupt, match="checksum"):
        small_files.unwrap_file(b"TEST", 2, later[:4] + b"\2" + later[5:], "a file")


@quick
@given(st.binary(max_size=60))
def test_random_bytes_are_a_typed_error(buf: bytes) -> None:
    with pytest.raises((Corrupt, NewerFormat)):
        small_files.unwrap_file(b"TEST", 1, buf, "a file")
    with pytest.raises((Corrupt, NewerFormat)):
        small_files.unwrap_file(b"TEST", 1, b"TEST" + buf, "a file")
