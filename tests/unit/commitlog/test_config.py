"""Settings: what cannot be is refused with the value in the message, before anything is touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from typing import Any, TypeAlias

import pytest

from tidelog.commitlog import LogConfig, PartitionedLog, SegmentedLog
from tidelog.errors import BadInput
from tidelog.testing import SimDisk

Opener: TypeAlias = Callable[..., SegmentedLog]

BAD: list[tuple[str, Any]] = [
    ("sync", "never"),
    ("sync", "Each"),
    ("sync", ""),
    ("sync_interval_ms", 0),
    ("sync_interval_ms", -50),
    ("segment_bytes_max", 0),
    ("segment_bytes_max", -1),
    ("segment_overflow_bytes", -1),
    ("index_bytes_max", -1),
    ("segment_age_ms_max", -1),
    ("first_seq", -1),
    ("index_every", 0),
    ("index_every", -100),
    ("header_bytes", 16),
    ("index_width", 0),
    ("index_width", 5),
    ("index_cache", -1),
    ("maps_max", 0),
    ("maps_max", -2),
]
GOOD: list[tuple[str, Any]] = [
    ("sync", "each"),
    ("sync", "batch"),
    ("sync", "interval"),
    ("sync_interval_ms", 1),
    ("segment_bytes_max", 1),
    ("segment_overflow_bytes", 0),
    ("segment_overflow_bytes", None),
    ("index_bytes_max", None),
    ("segment_age_ms_max", None),
    ("first_seq", 0),
    ("index_every", 1),
    ("header_bytes", 12),
    ("index_width", 8),
    ("index_cache", None),
    ("index_cache", 0),
    ("maps_max", 1),
    ("verify_on_open", True),
    ("verify_on_open", False),
    ("checksums", False),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_refused_with_its_name_and_itself(name: str, value: Any) -> None:
    with pytest.raises(BadInput) as refused:
        LogConfig(**{name: value})
    assert name in str(refused.value)
    assert str(value) in str(refused.value)


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_a_good_value_is_kept(name: str, value: Any) -> None:
    assert getattr(LogConfig(**{name: value}), name) == value


def test_every_setting_that_can_be_wrong_is_tried() -> None:
    free = {"checksums", "verify_on_open", "repair", "unverified"}  # any truth value will do
    assert {name for name, _ in BAD} == {field.name for field in fields(LogConfig)} - free


@pytest.mark.parametrize("codec", ["tide"])
@pytest.mark.parametrize("settings", [dict([pair]) for pair in BAD], ids=[f"{name}={value}" for name, value in BAD])
def test_a_log_with_a_bad_setting_is_not_opened_and_nothing_is_made(
    open_log: Opener, disk: SimDisk, settings: dict[str, Any]
) -> None:
    (name,) = settings
    with pytest.raises(BadInput, match=name):
        open_log(**settings)
    assert disk.tree() == {}
    assert disk.stat("log") is None


@pytest.mark.parametrize("codec", ["tide"])
def test_an_unknown_setting_is_refused_by_name(open_log: Opener, disk: SimDisk) -> None:
    with pytest.raises(BadInput, match="segment_bytes_maximum"):
        open_log(segment_bytes_maximum=7)
    with pytest.raises(BadInput, match="colour"):
        open_log(config=LogConfig(), colour="blue")
    assert disk.stat("log") is None


def test_an_unknown_setting_of_a_partitioned_log_is_refused_when_it_is_opened() -> None:
    disk = SimDisk()
    with pytest.raises(BadInput, match="colour"):
        PartitionedLog.open("data", disk=disk, colour="blue")


@pytest.mark.parametrize("name", ["", "Tide", "parquet"])
def test_an_unknown_codec_is_refused_with_the_names_there_are(disk: SimDisk, name: str) -> None:
    with pytest.raises(BadInput, match="tide, rustlog, laminar, narwhal") as refused:
        SegmentedLog.open("log", name or " ", disk=disk)
    assert name in str(refused.value)


@pytest.mark.parametrize("codec", ["tide"])
def test_a_path_that_is_a_file_is_refused(open_log: Opener, disk: SimDisk) -> None:
    disk.write_file("log", b"text")
    for read_only in (False, True):
        with pytest.raises(BadInput, match="file"):
            open_log(read_only=read_only)
    assert disk.tree() == {"log": b"text"}


def test_a_config_cannot_be_changed() -> None:
    config = LogConfig()
    with pytest.raises(FrozenInstanceError):
        config.sync = "each"  # type: ignore[misc]


def test_overflow_is_half_a_segment_by_default() -> None:
    assert LogConfig(segment_bytes_max=1_000).overflow_bytes == 500
    assert LogConfig(segment_bytes_max=1_000, segment_overflow_bytes=7).overflow_bytes == 7
    assert LogConfig(segment_bytes_max=1_000, segment_overflow_bytes=0).overflow_bytes == 0
