"""Names and numbers of WAL files (G33, G36, G49–G51)."""

from __future__ import annotations

from collections import Counter
from struct import pack

import pytest
from xxhash import xxh3_64

from tidelog.disk.memory import MemoryDisk
from tidelog.errors import BadInput
from tidelog.testing import SimDisk
from tidelog.wal import (
    Position,
    file_name,
    list_file_numbers,
    list_shard_keys,
    paths,
    shard_directory,
    shard_for_topic,
    shard_keys,
)


def test_single_shard_has_no_directory_of_its_own() -> None:
    """G51: the flat group and shard-00 are two groups."""
    assert shard_keys(1) == [""]
    assert shard_keys(3) == ["shard-00", "shard-01", "shard-02"]
    assert shard_keys(101)[-1] == "shard-100"
    assert shard_directory("data/wal", "") == "data/wal"
    assert shard_directory("data/wal", "shard-07") == "data/wal/shard-07"
    with pytest.raises(BadInput):
        shard_keys(0)


def test_a_topic_goes_to_the_shard_of_its_hash() -> None:
    assert [shard_for_topic(topic_id, 1) for topic_id in range(20)] == [0] * 20
    assert shard_for_topic(0, 7) == 0
    for topic_id in (1, 2, 255, 256, (1 << 64) - 2):
        for shards in (2, 3, 7, 8):
            assert shard_for_topic(topic_id, shards) == xxh3_64(pack("<Q", topic_id)).intdigest() % shards
    assert [shard_for_topic(topic_id, 8) for topic_id in range(1, 9)] == [6, 3, 5, 0, 4, 3, 7, 6], (
        "frozen: files depend on it"
    )


def test_topics_are_spread_over_the_shards() -> None:
    counts = Counter(shard_for_topic(topic_id, 8) for topic_id in range(1, 8001))
    assert len(counts) == 8
    assert all(900 < count < 1100 for count in counts.values())


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("wal-0000000000000001.log", 1),
        ("wal-9999999999999999.log", 9_999_999_999_999_999),
        ("wal-10000000000000000.log", 10_000_000_000_000_000),
        ("wal-18446744073709551615.log", (1 << 64) - 1),
        ("wal-18446744073709551616.log", None),
        ("wal-0000000000000000.log", None),
        ("wal-00000000000000001.log", None),
        ("wal-1.log", None),
        ("wal-000000000000001.log", None),
        ("wal-0000000000000001.log.tmp", None),
        ("wal-٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠١.log", None),
        ("CURRENT", None),
        ("", None),
    ],
)
def test_only_wal_file_names_are_parsed(name: str, first: int | None) -> None:
    assert paths.parse_file_name(name) == first
    assert first is None or file_name(first) == name


def test_files_are_listed_by_number_and_other_names_are_ignored() -> None:
    disk = SimDisk()
    assert list_file_numbers(disk, "wal") == []
    for name in (
        "wal-10000000000000000.log",
        "wal-9999999999999999.log",
        "wal-0000000000000412.log",
        "notes",
        "CURRENT",
    ):
        disk.write_file(f"wal/{name}", b"")
    assert list_file_numbers(disk, "wal") == [412, 9_999_999_999_999_999, 10_000_000_000_000_000]


def test_every_shard_on_disk_is_listed() -> None:
    """G49: the count of shards may change between restarts."""
    disk = SimDisk()
    assert list_shard_keys(disk, "wal") == []
    for path in (
        "shard-10/CURRENT",
        "shard-02/wal-0000000000000001.log",
        "shard-100/x",
        "shard-3/x",
        "shard-002/x",
        "x/y",
    ):
        disk.write_file(f"wal/{path}", b"")
    disk.write_file("wal/shard-04", b"a file, not a directory")
    assert list_shard_keys(disk, "wal") == ["shard-02", "shard-10", "shard-100"]
    disk.write_file("wal/wal-0000000000000001.log", b"")
    assert list_shard_keys(disk, "wal") == ["", "shard-02", "shard-10", "shard-100"]


def test_positions_of_a_shard_are_ordered() -> None:
    assert Position(1, 900) < Position(412, 0) < Position(412, 1)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"wal-0000000000000412.log\n", 412),
        (b"wal-0000000000000412.log", 412),
        (b"", None),
        (b"\n", None),
        (b"wal-412.log\n", None),
        (b"\xff\xfe", None),
        (b"wal-0000000000000412.log\n" * 100, None),
        (paths.encode_current(412, 1 << 20), 412),
        (paths.encode_current(412, 1 << 20)[:-1], None),
        (paths.encode_current(412, 1 << 20).replace(b"412", b"413"), None),
        (paths.encode_current(412, 1 << 20).replace(b"=0", b"=1"), None),
    ],
)
def test_invalid_current_is_ignored(content: bytes, said: int | None) -> None:
    """G33."""
    disk = MemoryDisk()
    disk.make_dir("wal")
    assert paths.current_file_number(disk, "wal") is None
    disk.open("wal/CURRENT", "create").write(0, content)
    assert paths.current_file_number(disk, "wal") == said
    disk.remove("wal/CURRENT")
    disk.make_dir("wal/CURRENT")
    assert paths.current_file_number(disk, "wal") is None
