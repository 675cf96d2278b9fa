"""The channel store: the source design's own list of tests, and what it leaves out (G130-G139)."""

from __future__ import annotations

import logging
from hashlib import sha256

import pytest

from tidelog.channels.metrics import ChannelMetrics
from tidelog.channels.rules import directory_name, shard_of
from tidelog.channels.store import ChannelStore
from tidelog.errors import Corrupt, Damaged, NewerFormat, WriteFailed
from tidelog.formats import small_files
from tidelog.formats import small_files as layout
from tidelog.formats.small_files import METADATA_BYTES_MAX, ChannelAcl, ChannelConfig, ChannelMeta
from tidelog.testing import ManualClock, SimDisk

META = ChannelMeta(
    "!room@host",
    "ann@host",
    ChannelConfig(10, 1_000, 50, True, 250, "fifo"),
    ChannelAcl(("host",), ("ann@host",), ()),
    ("ann@host", "bob@host"),
)
NAME = directory_name(META.handler)


@pytest.fixture
def store() -> ChannelStore:
    disk = SimDisk()
    disk.make_dir("data")
    return ChannelStore(disk, "data", ChannelMetrics(ManualClock()))


def sim(store: ChannelStore) -> SimDisk:
    assert isinstance(store.disk, SimDisk)
    return store.disk


def test_save_and_load_round_trip(store: ChannelStore) -> None:
    assert store.save(META, None) == NAME
    assert store.load(NAME) == META


def test_load_channel_hashes(store: ChannelStore) -> None:
    others = [ChannelMeta(f"!{name}@host", None, META.config, ChannelAcl(), ()) for name in "abc"]
    for meta in (META, *others):
        store.save(meta, None)
    assert store.list_channels(sweep=True).live == sorted(directory_name(meta.handler) for meta in (META, *others))


def test_delete_channel(store: ChannelStore) -> None:
    store.save(META, None)
    sim(store).write_file(f"data/channels/{NAME}/metadata.bin.tmp", b"half")
    store.delete(NAME, META)
    assert sim(store).list_dir("data/channels") == []
    assert sim(store).crash_image().list_dir("data/channels") == [], "and after a power cut"


def test_delete_nonexistent_channel(store: ChannelStore) -> None:
    store.delete(NAME, None)
    store.save(META, None)
    store.delete(NAME, META)
    store.delete(NAME, META)
    assert store.list_channels(sweep=False) == ([], [], [])


def test_save_overwrites_existing(store: ChannelStore) -> None:
    store.save(META, None)
    other = ChannelMeta(META.handler, "bob@host", META.config, ChannelAcl(), ("bob@host",))
    store.save(other, META)
    assert store.load(NAME) == other
    assert sim(store).list_dir(f"data/channels/{NAME}") == ["metadata.bin"]


def test_load_corrupted_file_returns_error(store: ChannelStore) -> None:
    store.save(META, None)
    path = f"data/channels/{NAME}/metadata.bin"
    whole = sim(store).read_file(path)
    for bad in (b"", b"\0" * 40, whole[:-1], whole + b"\0", b"no channel at all, but text of some length"):
        sim(store).write_file(path, bad)
        with pytest.raises(Corrupt):
            store.load(NAME)


def test_channel_hash_deterministic() -> None:
    assert directory_name("!room@host") == sha256(b"!room@host").hexdigest() == NAME
    assert directory_name("!Room@host") != NAME
    assert [shard_of(f"!{n}@h", 16) for n in range(4)] == [shard_of(f"!{n}@h", 16) for n in range(4)]
    assert {shard_of(f"!{n}@h", 4) for n in range(64)} == {0, 1, 2, 3}


def test_an_oversized_file_is_refused_without_being_read(store: ChannelStore) -> None:
    store.save(META, None)
    path = f"data/channels/{NAME}/metadata.bin"
    file = sim(store).open(path, "write")
    file.truncate(METADATA_BYTES_MAX + 1)
    sim(store).fail("read", path="metadata.bin", times=None)
    with pytest.raises(Corrupt, match="more than"):
        store.load(NAME)


def test_a_newer_version_is_refused(store: ChannelStore) -> None:
    store.save(META, None)
    body = small_files.unwrap_file(
        layout.CHANNEL_MAGIC, 1, sim(store).read_file(f"data/channels/{NAME}/metadata.bin"), "it"
    )
    sim(store).write_file(f"data/channels/{NAME}/metadata.bin", small_files.wrap_file(layout.CHANNEL_MAGIC, 2, body))
    with pytest.raises(NewerFormat):
        store.load(NAME)


def test_metadata_of_another_channel_is_corrupt(store: ChannelStore) -> None:
    store.save(META, None)
    other = directory_name("!other@host")
    sim(store).write_file(
        f"data/channels/{other}/metadata.bin", sim(store).read_file(f"data/channels/{NAME}/metadata.bin")
    )
    with pytest.raises(Corrupt, match="another directory"):
        store.load(other)


def test_a_temporary_file_is_never_loaded(store: ChannelStore) -> None:
    sim(store).write_file(f"data/channels/{NAME}/metadata.bin.tmp", layout.encode_channel(META))
    assert store.list_channels(sweep=True).live == []


def test_the_sweep_removes_only_remains_of_deleted_channels(
    store: ChannelStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(META, None)
    stale, marked, strange = ("a" * 64, "b" * 64, "c" * 64)
    disk = sim(store)
    disk.write_file(f"data/channels/{stale}/{1:020d}.log", b"messages")
    disk.write_file(f"data/channels/{marked}/metadata.bin", layout.encode_channel(META))
    disk.write_file(f"data/channels/{marked}/quarantine/{1:020d}.log.5", b"cut")
    disk.write_file(f"data/channels/{marked}/deleted", b"")
    disk.write_file(f"data/channels/{strange}/notes.txt", b"mine")
    for foreign in ("A" * 64, "backup", "a" * 63):
        disk.write_file(f"data/channels/{foreign}/{1:020d}.log", b"not ours")
    disk.write_file("data/channels/" + "d" * 64, b"a file with the name of a directory")
    with caplog.at_level(logging.WARNING):
        found = store.list_channels(sweep=True)
    assert (found.live, found.swept, found.not_removed) == ([NAME], [stale, marked], [strange])
    assert len(caplog.records) == 3
    assert disk.read_file(f"data/channels/{strange}/notes.txt") == b"mine"
    assert set(disk.list_dir("data/channels")) == {NAME, strange, "A" * 64, "backup", "a" * 63, "d" * 64}
    assert store.list_channels(sweep=False).live == [NAME]


def test_a_read_only_listing_removes_nothing(store: ChannelStore) -> None:
    sim(store).write_file(f"data/channels/{'a' * 64}/{1:020d}.log", b"messages")
    assert store.list_channels(sweep=False) == ([], [], [])
    assert sim(store).list_dir("data/channels") == ["a" * 64]


def test_an_unreadable_channel_is_not_overwritten(store: ChannelStore) -> None:
    sim(store).write_file(f"data/channels/{NAME}/metadata.bin", b"damaged")
    with pytest.raises(Damaged, match="could not be read"):
        store.save(META, None)
    assert sim(store).read_file(f"data/channels/{NAME}/metadata.bin") == b"damaged"


def test_equal_channels_have_equal_bytes() -> None:
    again = ChannelMeta(
        META.handler, META.owner, META.config, ChannelAcl(("host",), ("ann@host",), ()), ("ann@host", "bob@host")
    )
    assert layout.encode_channel(META) == layout.encode_channel(again)


@pytest.mark.parametrize("call", ["create", "write", "sync", "rename", "sync_dir"])
def test_a_failed_save_leaves_the_old_metadata(store: ChannelStore, call: str) -> None:
    store.save(META, None)
    sim(store).fail(call, path=NAME)  # type: ignore[arg-type]
    with pytest.raises(WriteFailed):
        store.save(ChannelMeta(META.handler, "bob@host", META.config, ChannelAcl(), ("bob@host",)), META)
    assert store.load(NAME) == META
    assert not store.undecided
    assert store._metrics.get("store_saves", "write_failed") == 1


def test_an_undecided_save_is_reconciled_later(store: ChannelStore) -> None:
    store.save(META, None)
    sim(store).fail("sync_dir", path=NAME, times=None)
    with pytest.raises(WriteFailed):
        store.save(ChannelMeta(META.handler, "bob@host", META.config, ChannelAcl(), ("bob@host",)), META)
    assert list(store.undecided) == [NAME]
    sim(store).clear_faults()
    assert store.reconcile(NAME, META.handler, META)
    assert not store.undecided
    assert ChannelStore(sim(store).crash_image(), "data", ChannelMetrics(ManualClock())).load(NAME) == META


def test_unsorted_members_are_corrupt() -> None:
    bad = ChannelMeta("!room@host", None, META.config, ChannelAcl(), ("bob@host", "ann@host"))
    with pytest.raises(Corrupt, match="not sorted"):
        layout.decode_channel(layout.encode_channel(bad), "it")


@pytest.mark.parametrize("next_seq", [1, 2, (1 << 63) - 1])
def test_a_cursor_with_a_flipped_bit_is_not_decoded(next_seq: int) -> None:
    made = layout.encode_cursor(next_seq)
    assert layout.decode_cursor(made) == next_seq
    assert layout.decode_cursor(made[:-1]) is None
    for pos in range(len(made) * 8):
        flipped = bytearray(made)
        flipped[pos // 8] ^= 1 << pos % 8
        assert layout.decode_cursor(flipped) is None
