"""The WAL read back: what counts, what is torn, what is damage (G31, G33–G36, G46–G48, G52, G53, G56–G58)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.wal.harness import (
    FILE_BYTES,
    QUARANTINE,
    WAL,
    WalContents,
    WalHarness,
    append,
    chain,
    checkpoint_mark,
    inspect_wal,
    recover,
    reopened,
    wal_path,
)

from tidelog.errors import Damaged, Unavailable
from tidelog.formats import control_frames, frame
from tidelog.testing import SimDisk
from tidelog.wal import Position, prepare_for_writing, recovery, replay_shard


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk(trace=True)


def three_files(disk: SimDisk) -> list[bytes]:
    """Files 1, 3 and 5, two frames each but the last, which has three; everything is durable, and nothing says so: they
    have no marks, like those of versions that wrote none."""
    bench = WalHarness(disk, marks=False)
    datas = [b"%d" % number * 900 for number in range(6)]
    for data in datas:
        bench.write(data)
    bench.write(b"last")
    return [*datas, b"last"]


# What is there.


def test_frames_come_back_file_by_file_as_columns(disk: SimDisk) -> None:
    datas = three_files(disk)
    found = replay_shard(disk, WAL)
    windows = list(found)
    assert [(window.file_number, window.file_offset, window.frame_pos.tolist()) for window in windows] == [
        (1, 0, [0, 946]),
        (3, 0, [0, 946]),
        (5, 0, [0, 946, 1892]),
    ]
    assert [window.headers["data_len"].tolist() for window in windows] == [[900, 900], [900, 900], [900, 900, 4]]
    assert all(window.buf == disk.read_file(wal_path(window.file_number)) for window in windows)
    assert (found.torn_tail, found.losses, found.missing_frames, found.next_file_number) == (None, [], [], 8)
    assert [extent[:3] for extent in found.extents] == [(1, 0, 1892), (3, 0, 1892), (5, 0, 1942)]
    assert found.current_file_fault() is None
    assert inspect_wal(disk).datas == datas


def test_a_wal_that_is_not_there_is_empty(disk: SimDisk) -> None:
    assert inspect_wal(disk) == WalContents([], None, [], [], 1, [])
    assert recover(disk) == WalContents([], None, [], [], 1, [])
    disk.make_dir(WAL)
    assert inspect_wal(disk).next_first == 1


def test_replay_changes_no_file(disk: SimDisk) -> None:
    """Method: also where there is something to cut."""
    three_files(disk)
    disk.flip_bit(wal_path(1), 100, 0)
    before, began = disk.digest(), disk.op_count
    assert inspect_wal(disk).verdict == "damaged"
    assert (disk.digest(), disk.op_count) == (before, began)


@pytest.mark.parametrize(
    ("start", "first", "missing"),
    [
        (Position(1, 0), 0, []),
        (Position(1, 946), 1, []),
        (Position(1, 1892), 2, []),
        (Position(3, 0), 2, []),
        (Position(3, 946), 3, []),
        (Position(5, 1892), 6, []),
        (Position(5, 1942), 7, []),
        (Position(8, 0), 7, []),
    ],
)
def test_replay_starts_at_the_given_position(start: Position, first: int, missing: list[range], disk: SimDisk) -> None:
    datas = three_files(disk)
    found = inspect_wal(disk, start)
    assert (found.datas, found.cut, found.missing, found.next_first) == (datas[first:], None, missing, 8)


@pytest.mark.parametrize(
    "start", [Position(5, 1943), Position(5, 2048), Position(5, 9999), Position(9, 0), Position(9, 7)]
)
def test_start_beyond_the_end_loses_no_later_frames(start: tuple[int, int], disk: SimDisk) -> None:
    """G46. Method: what is written now must be found from that position on."""
    beyond = Position(*start)
    three_files(disk)
    found = recover(disk, beyond)
    assert (found.datas, found.cut) == ([], None)
    assert len(disk.read_file(wal_path(5))) <= FILE_BYTES, "and no file grows to where it should end"
    bench = WalHarness(disk, first=found.next_first)
    bench.write(b"new")
    again = inspect_wal(disk, beyond)
    assert (again.datas, again.verdict) == ([b"new"], None)
    assert bench.writer.position.file_number > 5


def test_damage_before_the_start_is_ignored(disk: SimDisk) -> None:
    """Method: a snapshot has the frames before it; the next number is above all frames that there can have been."""
    datas = three_files(disk)
    disk.flip_bit(wal_path(5), 500, 3)
    found = recover(disk, Position(5, 946))
    assert (found.datas, found.cut) == (datas[5:], None)
    assert found.next_first >= 8
    bench = WalHarness(disk, first=found.next_first)
    bench.write(b"new")
    assert inspect_wal(disk, Position(5, 946)).datas == [*datas[5:], b"new"]
    older = inspect_wal(disk, Position(3, 0))
    assert (older.datas, older.verdict) == ([*datas[2:4], *datas[5:], b"new"], "damaged"), "an older start needs them"


def test_missing_frames_are_reported(disk: SimDisk) -> None:
    """Method: a file is gone; also after one that ends with its last frame, as a closed file does."""
    datas = three_files(disk)
    disk.remove(wal_path(3))
    found = inspect_wal(disk, Position(3, 946))
    assert (found.missing, found.datas, found.next_first) == ([range(3, 5)], datas[4:], 8)
    assert inspect_wal(disk, Position(5, 0)).missing == []
    disk.write_file(wal_path(1), disk.read_file(wal_path(1))[:1892])
    found = inspect_wal(disk)
    assert (found.missing, found.datas, found.cut) == ([range(3, 5)], datas[:2] + datas[4:], None)
    disk.remove(wal_path(1))
    found = inspect_wal(disk)
    assert (found.missing, found.datas, found.next_first) == ([range(1, 5)], datas[4:], 8)


def test_a_batch_counts_as_a_whole(disk: SimDisk) -> None:
    """G4. Method: a chain of frames cut off at every byte."""
    bench = WalHarness(disk, marks=False)
    bench.write(b"one")
    bench.write(b"a", b"b", b"c")
    content = disk.read_file(wal_path(1))
    for stop in range(49, 49 + 3 * 47):
        disk.write_file(wal_path(1), content[:stop] + bytes(FILE_BYTES - stop))
        found = inspect_wal(disk)
        assert found.datas == [b"one"], stop
        assert found.verdict == ("torn" if stop > 49 else None), stop
    disk.write_file(wal_path(1), content[: 49 + 3 * 47])
    assert inspect_wal(disk).datas == [b"one", b"a", b"b", b"c"]


def test_reserved_zeros_are_not_damage(disk: SimDisk) -> None:
    """G34. Method: in the newest file, in older ones, in a file that was only just made, and in one that was not
    reserved yet."""
    datas = three_files(disk)
    for size in (0, 1, 37, 500, FILE_BYTES):
        disk.write_file(wal_path(8), bytes(size))
        found = inspect_wal(disk)
        assert (found.datas, found.cut, found.losses, found.next_first) == (datas, None, [], 8)


# CURRENT.


@pytest.mark.parametrize(
    "content", [None, b"", b"garbage\xff", b"wal-0000000000000001.log\n", b"wal-9.log\n", b"\0" * 99]
)
def test_current_changes_nothing(content: bytes | None, disk: SimDisk) -> None:
    """G33: missing, empty, garbage or stale."""
    datas = three_files(disk)
    plain = recover(disk.reboot())
    if content is None:
        disk.remove(f"{WAL}/CURRENT")
    else:
        disk.write_file(f"{WAL}/CURRENT", content)
    said = replay_shard(disk, WAL).current_file_fault()
    assert said is not None
    assert "the newest is 5" in said
    assert recover(disk) == plain
    bench, found = reopened(disk)
    assert found.datas == datas
    bench.write(b"new")
    assert replay_shard(disk, WAL).current_file_fault() is None


def test_unreadable_current_does_not_stop_recovery(disk: SimDisk) -> None:
    """G33."""
    datas = three_files(disk)
    disk.fail("read", path="CURRENT", times=None)
    assert replay_shard(disk, WAL).current_file_fault() is not None
    assert inspect_wal(disk).datas == datas


# Read errors.


@pytest.mark.parametrize("first", [1, 3, 5])
@pytest.mark.parametrize("call", ["open", "read"])
def test_a_file_that_cannot_be_read_stops_everything(first: int, call: str, disk: SimDisk) -> None:
    """G57."""
    datas = three_files(disk)
    before = disk.digest()
    disk.fail(call, path=wal_path(first))  # type: ignore[arg-type]
    with pytest.raises(Damaged, match="cannot be read"):
        recover(disk)
    assert disk.digest() == before
    assert recover(disk).datas == datas


def test_file_removed_during_replay_is_not_damage(disk: SimDisk) -> None:
    """Method: the writer dropped a file that a snapshot covers while a reader replays it."""
    three_files(disk)
    files = iter(replay_shard(disk, WAL))
    next(files)
    disk.remove(wal_path(3))
    with pytest.raises(Unavailable, match="read it again"):
        next(files)


# Torn tails.


def torn(disk: SimDisk, spoil: Callable[[bytearray], object]) -> tuple[SimDisk, WalContents]:
    image = disk.reboot()
    content = bytearray(image.read_file(wal_path(5)))
    spoil(content)
    image.write_file(wal_path(5), bytes(content))
    found = recover(image, durable=Position(5, 946))
    return image, found


def check_torn(disk: SimDisk, datas: list[bytes], spoil: Callable[[bytearray], object], what: object) -> None:
    """The tail after byte 946 of the newest file is spoilt: it is cut, what is before it is kept, and no later
    recovery finds anything there."""
    image, found = torn(disk, spoil)
    assert found.datas == datas[: len(found.datas)], what
    assert len(found.datas) >= 5, what
    assert found.verdict in ("torn", None), what
    assert len(found.quarantined) == bool(found.cut and found.cut.frames), what
    assert found.next_first == len(found.datas) + 1, what
    after = image.digest()
    again = recover(image)
    assert (again.datas, again.cut, again.next_first) == (found.datas, None, found.next_first), what
    assert image.digest() == after, what
    WalHarness(image, first=found.next_first).write(b"new")
    assert inspect_wal(image.crash_image("none")).datas == [*found.datas, b"new"], what


def test_every_prefix_of_the_tail_is_cut_to_whole_frames(disk: SimDisk) -> None:
    """G52, G53. Method: the file ends at every byte, or is zero from there on."""
    datas = three_files(disk)
    for stop in range(946, 1943, 7):
        check_torn(disk, datas, lambda content, stop=stop: content.__delitem__(slice(stop, None)), stop)  # type: ignore[misc]

        def zeros(content: bytearray, stop: int = stop) -> None:
            content[stop:] = bytes(len(content) - stop)

        check_torn(disk, datas, zeros, stop)


def test_a_lost_sector_and_a_flipped_bit_in_the_tail_are_cut(disk: SimDisk) -> None:
    """G52, G53. Method: valid frames may follow it; they prove nothing and are not replayed."""
    datas = three_files(disk)
    for sector in range(1024, 2048, 512):

        def lose(content: bytearray, sector: int = sector) -> None:
            content[sector : sector + 512] = bytes(len(content[sector : sector + 512]))

        check_torn(disk, datas, lose, f"sector at {sector}")
    for pos in range(946, FILE_BYTES, 5):

        def flip(content: bytearray, pos: int = pos) -> None:
            content[pos] ^= 1 << pos % 8

        check_torn(disk, datas, flip, f"byte {pos}")


def test_zeros_followed_by_frames_are_a_torn_tail(disk: SimDisk) -> None:
    """G53. Method: a whole frame reads as zeros, the next one is valid."""
    datas = three_files(disk)
    image, found = torn(disk, lambda content: content.__setitem__(slice(946, 1892), bytes(946)))
    assert (found.datas, found.verdict, found.cut and found.cut.size) == (datas[:5], "torn", 1942 - 946)
    assert len(image.read_file(wal_path(5))) == 946
    assert found.cut is not None
    assert found.cut.frames == 1
    assert [image.read_file(kept) for kept in found.quarantined] == [
        disk.read_file(wal_path(5))[946:1942].replace(disk.read_file(wal_path(5))[946:1892], bytes(946))
    ]


def test_empty_newest_file_is_removed_and_its_number_is_reused(disk: SimDisk) -> None:
    """G31, G36."""
    datas = three_files(disk)
    for content in (b"", bytes(FILE_BYTES), append(b"torn")[:-1], bytes(60) + b"x"):
        image = disk.reboot()
        image.write_file(wal_path(8), content)
        found = recover(image)
        assert (found.datas, found.next_first) == (datas, 8)
        assert wal_path(8) not in image.crash_image("none").tree()
        WalHarness(image, first=8).write(b"new")
        assert inspect_wal(image.crash_image("none")).datas == [*datas, b"new"]


def test_what_a_killed_process_wrote_is_made_durable(disk: SimDisk) -> None:
    """G47. Method: after a kill the kernel still has the bytes; they are replayed, so no power cut may take them."""
    bench = WalHarness(disk)
    bench.write(b"a", durable=False)
    image = disk.reboot()
    assert recover(image).datas == [b"a"]
    assert inspect_wal(image.crash_image("none")).datas == [b"a"]


# Damage.


def check_damage(
    disk: SimDisk, datas: list[bytes], lost: int, first: int, pos: int, *, durable: Position | None = None
) -> WalContents:
    """One frame is lost: it is reported and quarantined, all others are replayed, and writing continues."""
    content = disk.read_file(wal_path(first))[pos : pos + 946]
    kept = [data for number, data in enumerate(datas) if number != lost]
    found = recover(disk, durable=durable)
    assert (found.datas, found.cut) == (kept, None)
    (gone,) = found.losses
    assert gone[:4] == (first, wal_path(first).rpartition("/")[2], pos, pos + 946)
    assert (gone.kinds, gone.records) == (frozenset({1}), 1)
    aside = {name: content for name, content in disk.tree().items() if name.startswith(QUARANTINE)}
    assert aside == {f"{QUARANTINE}/wal.{gone.file}.{pos}": content}
    assert found.quarantined == [*aside]
    assert found.next_first >= 8
    WalHarness(disk, first=found.next_first).write(b"new")
    after = inspect_wal(disk.crash_image("none"), durable=durable)
    assert (after.datas, after.losses, after.cut) == ([*kept, b"new"], found.losses, None), "the evidence stays"
    beyond = inspect_wal(disk.crash_image("none"), Position(found.next_first, 0))
    assert (beyond.datas, beyond.verdict) == ([b"new"], None), "and a snapshot no longer needs it"
    return found


def test_a_bad_frame_in_an_older_file_is_damage(disk: SimDisk) -> None:
    """G56: what follows it, in the same file and in later ones, is replayed."""
    datas = three_files(disk)
    disk.flip_bit(wal_path(1), 950, 0)
    found = check_damage(disk, datas, 1, 1, 946)
    assert found.losses[0].reason == "checksum mismatch"


@pytest.mark.parametrize("pos", [0, 4, 5, 10, 20, 30, 34, 100, 945])
def test_frames_after_a_bad_one_are_found_whatever_byte_of_it_is_bad(pos: int, disk: SimDisk) -> None:
    """Method: a flip in the length, the type, the flags, the topic, the time, the lengths of sections, the data and the
    checksum of a frame in the middle."""
    datas = three_files(disk)
    disk.flip_bit(wal_path(5), pos, 6)
    check_damage(disk, datas, 4, 5, 0, durable=Position(5, 1942))


def test_a_bad_frame_below_a_snapshots_position_is_damage(disk: SimDisk) -> None:
    """G56. Method: the position is exactly one byte after the start of the bad frame, and exactly at it."""
    datas = three_files(disk)
    disk.flip_bit(wal_path(5), 1000, 0)
    assert inspect_wal(disk, durable=Position(5, 946)).verdict == "torn"
    assert inspect_wal(disk, durable=Position(3, 1892)).verdict == "torn"
    assert inspect_wal(disk, durable=Position(5, 947)).verdict == "damaged"
    assert inspect_wal(disk, durable=Position(6, 0)).verdict == "damaged", "a later file was there once"
    check_damage(disk, datas, 5, 5, 946, durable=Position(5, 1892))


@pytest.mark.parametrize(
    ("first", "pos", "verdict"),
    [(1, 46, "torn"), (1, 47, "torn"), (1, 48, "damaged"), (1, 5 * 47, "damaged"), (2, 5 * 47, "torn")],
)
@pytest.mark.parametrize("is_located", [True, False])
def test_mark_after_a_bad_frame_proves_that_it_was_durable(
    first: int, pos: int, verdict: str, is_located: bool, disk: SimDisk
) -> None:
    """G56. Method: the second frame is bad; after it a CheckpointMark says how much was synced before, with its own
    byte or, as earlier versions wrote it, without."""
    said = checkpoint_mark(first, pos, at=5 * 47 if is_located else 0)
    content = b"".join([append(b"%d" % number) for number in range(5)]) + said + append(b"5")
    disk.write_file(wal_path(1), content + bytes(500))
    assert inspect_wal(disk).datas == [b"0", b"1", b"2", b"3", b"4", b"5"]
    disk.flip_bit(wal_path(1), 90, 2)
    found = inspect_wal(disk)
    if verdict == "damaged":
        assert (found.datas, found.cut) == ([b"0", b"2", b"3", b"4", b"5"], None)
        assert [lost[2:4] for lost in found.losses] == [(47, 94)]
        return
    assert (found.datas, found.losses) == ([b"0"], [])
    assert found.cut is not None
    assert (found.cut.pos, found.cut.size, found.cut.frames) == (47, len(content) - 47, 5)


def test_a_mark_that_is_damaged_itself_or_elsewhere_or_short_proves_nothing(disk: SimDisk) -> None:
    """G58. Method: every byte of the mark is changed, one at a time; and it names another byte than its own."""
    head = append(b"0") + append(b"1")[:-1] + b"?"
    said = checkpoint_mark(1, 94, at=94)
    for pos in range(len(said)):
        changed = bytearray(said)
        changed[pos] ^= 0x40
        disk.write_file(wal_path(1), head + changed)
        assert inspect_wal(disk).verdict == "torn", pos
    disk.write_file(wal_path(1), head + checkpoint_mark(1, 94, at=93))
    assert inspect_wal(disk).verdict == "torn"
    disk.write_file(wal_path(1), head + said)
    assert inspect_wal(disk).verdict == "damaged"


def test_two_bad_frames_lose_no_third(disk: SimDisk) -> None:
    """Method: every pair of twenty frames, in a file that is not the newest."""
    datas = [b"%02d" % number for number in range(20)]
    content = b"".join(append(data) for data in datas)
    disk.write_file(wal_path(21), append(b"later"))
    for one in range(20):
        for other in range(one + 1, 20):
            changed = bytearray(content)
            for bad in (one, other):
                changed[48 * bad + 39] ^= 1
            disk.write_file(wal_path(1), bytes(changed))
            found = inspect_wal(disk)
            assert found.datas == [*(datas[at] for at in range(20) if at not in (one, other)), b"later"]
            assert sum(lost.end - lost.pos for lost in found.losses) == 96


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("newest", [True, False])
def test_a_lost_sector_takes_only_the_frames_that_it_touches(marks: bool, newest: bool, disk: SimDisk) -> None:
    """Method: each sector of a file is zeroed, and overwritten with rubbish."""
    bench = WalHarness(disk, marks=marks, file_bytes=1 << 16)
    for number in range(60):
        bench.write(b"%02d" % number * 30)
    if marks:
        bench.shard.tick()
    content = disk.read_file(wal_path(1)).rstrip(b"\0")
    content += bytes(-len(content) % 512)
    places = {data: content.index(data) for data in (b"%02d" % number * 30 for number in range(60))}
    if not newest:
        disk.write_file(wal_path(1 + 60 + 60 * marks), append(b"later"))
    durable = Position(1, len(content)) if newest and not marks else None
    random = Random(1)
    for sector in range(0, len(content), 512):
        for rubbish in (bytes(512), random.randbytes(512)):
            disk.write_file(wal_path(1), content[:sector] + rubbish + content[sector + 512 :])
            touched = [data for data, at in places.items() if at - 38 < sector + 512 and at + 68 > sector]
            found = inspect_wal(disk, durable=durable)
            left = [data for data in places if data not in touched]
            if newest and marks and sector + 1024 > len(content):
                assert [data for data in found.datas if data in left] == found.datas  # the end has no mark after it
                assert set(left) - set(found.datas) <= {data for data, at in places.items() if at > sector - 300}
                continue
            assert [data for data in found.datas if data != b"later"] == left, sector
            assert found.verdict == "damaged", sector


def test_the_rest_of_a_batch_that_lost_a_frame_is_dropped(disk: SimDisk) -> None:
    """G4. Method: a batch of five frames between others; each of its frames is damaged, in every byte of its header
    and in its data."""
    before, batch, after = append(b"before"), chain([b"a", b"b", b"c", b"d", b"e"]), append(b"after")
    content = before + b"".join(batch) + after
    disk.write_file(wal_path(1), content + bytes(100))
    disk.write_file(wal_path(8), append(b"later"))
    assert inspect_wal(disk).datas == [b"before", b"a", b"b", b"c", b"d", b"e", b"after", b"later"]
    for number in range(5):
        for pos in [*range(39), 45]:
            for bit in range(8):
                disk.flip_bit(wal_path(1), len(before) + 47 * number + pos, bit)
                found = inspect_wal(disk)
                disk.flip_bit(wal_path(1), len(before) + 47 * number + pos, bit)
                assert found.datas == [b"before", b"after", b"later"], (number, pos, bit)
                assert found.verdict == "damaged"


def test_possible_rest_of_a_batch_is_marked_as_doubtful(disk: SimDisk) -> None:
    """Method: the frame before has no header left, so that nothing says whether its batch went on."""
    content = append(b"one") + append(b"lost") + b"".join(chain([b"a", b"b"])) + append(b"last")
    zeroed = content[:49] + bytes(45) + content[94:]
    disk.write_file(wal_path(1), zeroed)
    disk.write_file(wal_path(6), append(b"later"))
    windows = list(replay_shard(disk, WAL))
    assert [
        (window.file_offset, len(window.frame_pos), window.losses_before, window.doubtful) for window in windows
    ] == [
        (0, 1, 0, 0),
        (99, 3, 1, 2),
        (0, 1, 1, 0),
    ]
    found = recover(disk)
    assert disk.read_file(found.quarantined[0]) == zeroed[49 : 99 + 94], "kept with what was lost"


def test_frames_inside_a_record_are_not_replayed(disk: SimDisk) -> None:
    """Method: a record holds forged frames, up to its last byte and not; every byte of its frame's header is changed,
    and some of it or all of it is zeroed."""
    forged = b"".join(append(b"forged") for _ in range(5))
    for inside in (forged, forged + b"x", b"x" + forged, forged + checkpoint_mark(1, 100, at=40) + forged):
        content = append(b"one") + append(inside) + append(b"two") + append(b"three")
        disk.write_file(wal_path(5), append(b"later"))
        hurt = [content[:49] + bytes(size) + content[49 + size :] for size in (1, 4, 38)]
        hurt += [content[: 49 + pos] + b"\xa5" + content[50 + pos :] for pos in range(38)]
        for changed in hurt:
            disk.write_file(wal_path(1), changed)
            assert inspect_wal(disk).datas == [b"one", b"two", b"three", b"later"]


def without_reasons(found: WalContents) -> WalContents:
    """Why a frame is none can depend on how much of it was looked at."""
    cut = found.cut and found.cut._replace(reason="")
    return found._replace(cut=cut, losses=[lost._replace(reason="") for lost in found.losses])


def test_frames_do_not_depend_on_the_window_size(disk: SimDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: windows from a few bytes on, so that frames and batches are longer than one; whole, torn and damaged."""
    bench = WalHarness(disk, file_bytes=1 << 14)
    for number in range(40):
        bench.write(*[b"%d" % number * size for size in range(1, 1 + number % 5)])
    contents = {first: disk.read_file(wal_path(first)) for first in (1,)}
    used = len(contents[1].rstrip(b"\0"))
    random = Random(7)
    for _ in range(30):
        changed = bytearray(contents[1])
        for _ in range(random.randint(0, 2)):
            changed[random.randrange(used)] ^= 1 << random.randrange(8)
        disk.write_file(wal_path(1), bytes(changed))
        whole = inspect_wal(disk)
        for size in (64, 100, 333, 1000):
            with monkeypatch.context() as patch:
                patch.setattr(recovery, "WINDOW_BYTES", size)
                patch.setattr(recovery, "CACHED_WINDOWS_BYTES_MAX", random.choice([0, 1 << 20]))
                patch.setattr(recovery, "_CHUNK_BYTES", random.choice([100, 512, 1 << 20]))
                assert without_reasons(inspect_wal(disk)) == without_reasons(whole), size


@pytest.mark.parametrize("kind", [frame.FORWARD, frame.NUMBERED_BATCH, frame.WRITE_KEY])
def test_a_frame_that_announces_records_is_in_one_window_with_them(
    disk: SimDisk, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    """Method: every size of a window, so that it ends after every frame and inside of each."""
    announcing = frame.encode(kind, topic_id=1, ts_ms=1_700_000_000_000, data=b"of the next")
    frames = [piece for number in range(8) for piece in (append(b"%d" % number), announcing, append(b"announced"))]
    disk.make_dir(WAL)
    disk.write_file(wal_path(1), b"".join(frames))
    datas = [data for number in range(8) for data in (b"%d" % number, b"announced")]
    for size in range(1, sum(map(len, frames)) + 1):
        monkeypatch.setattr(recovery, "WINDOW_BYTES", size)
        found = inspect_wal(disk)
        assert (found.datas, found.frames, found.verdict) == (datas, len(frames), None), size
        assert all(window.headers["kind"][-1] != kind for window in replay_shard(disk, WAL)), size


def test_missing_file_is_reported_by_the_numbers_of_its_frames(disk: SimDisk) -> None:
    three_files(disk)
    disk.remove(wal_path(3))
    (lost,) = inspect_wal(disk, Position(3, 0)).losses
    assert (lost.file_number, lost.file, lost.pos, lost.end, lost.frames, lost.kinds) == (3, "", 0, 0, 2, None)
    assert lost.records >= 2


def test_a_writer_at_work_is_not_damage(disk: SimDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: a reader sees the end of the file, then several batches are written and synced, then it looks for what
    follows and finds marks that say so."""
    bench = WalHarness(disk)
    bench.write(b"one")
    real = recovery._WalFileReader.used_end
    written = False

    def used(self: recovery._WalFileReader, pos: int) -> int:
        nonlocal written
        if not written:
            written = True
            bench.write(b"two")
            bench.write(b"three")
            bench.write(b"four")
        return real(self, pos)

    monkeypatch.setattr(recovery._WalFileReader, "used_end", used)
    found = inspect_wal(disk)
    assert (found.datas, found.verdict) == ([b"one", b"two", b"three", b"four"], None)


def test_zeros_where_frames_were_synced_are_damage(disk: SimDisk) -> None:
    """G56. Method: a zeroed page whose start is a frame's start looks like the end of the file, but for what the
    numbers of the files and the position say."""
    datas = three_files(disk)
    older = disk.reboot()
    older.write_file(wal_path(1), older.read_file(wal_path(1))[:946] + bytes(FILE_BYTES - 946))
    found = inspect_wal(older)
    assert (found.datas, found.verdict) == (datas[:1] + datas[2:], "damaged")
    assert (found.losses[0].pos, found.losses[0].kinds) == (946, None)
    assert "1 frames are missing" in found.losses[0].reason
    disk.write_file(wal_path(5), disk.read_file(wal_path(5))[:946] + bytes(FILE_BYTES - 946))
    assert inspect_wal(disk, durable=Position(5, 946)).cut is None
    assert inspect_wal(disk, durable=Position(5, 1892)).verdict == "damaged"


@pytest.mark.parametrize("newest", [True, False])
def test_zeros_up_to_the_synced_end_are_lost_with_all_frames(newest: bool, disk: SimDisk) -> None:
    """The header of the bad frame is whole: its lengths say where it ends, and only zeros follow there."""
    frames = [append(b"%d" % number * 100) for number in range(5)]
    content, start = b"".join(frames), len(frames[0])
    hole = start + 60
    disk.make_dir(WAL)
    disk.write_file(wal_path(1), content[:hole] + bytes(len(content) - hole))
    if not newest:
        disk.write_file(wal_path(6), checkpoint_mark(1, len(content)) + append(b"later"))
    found = inspect_wal(disk, durable=Position(1, len(content)) if newest else None)
    assert found.datas[0] == b"0" * 100
    (lost,) = found.losses
    assert (lost.pos, lost.end, lost.kinds) == (start, len(content), None)
    assert lost.records >= 4


def test_garbage_in_the_preallocated_end_of_an_older_file_loses_no_frame(disk: SimDisk) -> None:
    """G34. Method: the number of the next file proves that every frame is there."""
    datas = three_files(disk)
    for pos in range(1892, FILE_BYTES):
        disk.flip_bit(wal_path(1), pos, pos % 8)
        found = inspect_wal(disk)
        assert (found.datas, found.cut) == (datas, None), pos
        disk.flip_bit(wal_path(1), pos, pos % 8)


def file_with_rubbish_after_its_end(disk: SimDisk, following: bytes) -> tuple[list[bytes], int]:
    """File 1 with five frames and rubbish where its reserved zeros were, and file 6; the frames, and where they end."""
    frames = [append(b"%d" % number * 100) for number in range(5)]
    content = b"".join(frames)
    disk.make_dir(WAL)
    disk.write_file(wal_path(1), content + Random(1).randbytes(200))
    disk.write_file(wal_path(6), following + append(b"later"))
    return frames, len(content)


@pytest.mark.parametrize("size", [146 * 5, 146 * 6], ids=["the end", "beyond it"])
def test_garbage_after_the_end_that_the_next_file_names_is_no_damage(size: int, disk: SimDisk) -> None:
    """G34. Method: a frame before the start is bad too, so that the numbers of the files prove nothing."""
    _, end = file_with_rubbish_after_its_end(disk, checkpoint_mark(1, 146 * 5))
    assert end == 146 * 5
    disk.flip_bit(wal_path(1), 300, 3)
    found = recover(disk, Position(1, size))
    assert (found.datas, found.losses, found.cut, found.quarantined) == ([b"later"], [], None, [])


@pytest.mark.parametrize("number", range(5))
def test_garbage_after_the_end_that_the_next_file_names_is_no_second_loss(number: int, disk: SimDisk) -> None:
    """G56. Method: one frame is bad; it is the whole loss, and is kept."""
    frames, _ = file_with_rubbish_after_its_end(disk, checkpoint_mark(1, 146 * 5))
    pos = sum(map(len, frames[:number]))
    disk.flip_bit(wal_path(1), pos + 60, 3)
    found = recover(disk)
    assert found.datas == [*(b"%d" % each * 100 for each in range(5) if each != number), b"later"]
    assert [lost[2:4] for lost in found.losses] == [(pos, pos + 146)]
    assert [disk.read_file(kept) for kept in found.quarantined] == [disk.read_file(wal_path(1))[pos : pos + 146]]


def test_the_position_of_a_checkpoint_is_not_the_end_of_a_file(disk: SimDisk) -> None:
    """Method: a file begins with the mark of a checkpoint without topics, as earlier versions could write it, and the
    last frame before it, which is needed, is bad."""
    body = control_frames.encode(control_frames.CheckpointMark(wal_first=1, wal_pos=146 * 4))
    _, end = file_with_rubbish_after_its_end(disk, frame.encode(frame.CHECKPOINT_MARK, ts_ms=1, data=body))
    disk.flip_bit(wal_path(1), 146 * 4 + 60, 3)
    disk.flip_bit(wal_path(1), 300, 3)
    found = recover(disk, Position(1, 146 * 4))
    assert found.datas == [b"later"]
    (lost,) = found.losses
    assert lost.pos == 146 * 4
    assert lost.end >= end
    assert len(found.quarantined) == 1


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.sweep)])
def test_every_flipped_bit_is_classified_by_its_position(disk: SimDisk, step: int) -> None:
    """G52, G56, G58. Method: one flip a run in each byte that is drawn; below what is known to be durable it is damage,
    after it a torn tail, in zeros harmless; nothing is ever made up."""
    datas = three_files(disk)
    durable = Position(5, 946)
    seen: dict[str | None, int] = {"damaged": 0, "torn": 0, None: 0}
    for first in (1, 3, 5):
        for pos in range(0, FILE_BYTES, step):
            disk.flip_bit(wal_path(first), pos, pos % 8)
            found = inspect_wal(disk, durable=durable)
            disk.flip_bit(wal_path(first), pos, pos % 8)
            frame = min(pos // 946, 2) if first == 5 else min(pos // 946, 1)
            kept = first - 1 + frame
            expected: tuple[list[bytes], str | None]
            if first < 5 and pos >= 1892:
                expected = (datas, None)
            elif pos >= 1942:
                expected = (datas, "torn")  # nothing acked is lost with it
            elif first < 5 or pos < 946:
                expected = (datas[:kept] + datas[kept + 1 :], "damaged")
            else:
                expected = (datas[:kept], "torn")
            assert (found.datas, found.verdict) == expected, (first, pos)
            seen[found.verdict] += 1
    assert all(count > 100 // step for count in seen.values())


def test_crash_during_prepare_for_writing_has_the_same_result(disk: SimDisk) -> None:
    """G47, G48, G56. Method: as above, three deep: the verdict must not change while the evidence is being put aside,
    and nothing that was put aside may be lost."""
    datas = three_files(disk)
    disk.flip_bit(wal_path(1), 950, 0)
    spoilt = disk.read_file(wal_path(1))
    judged = 0

    def check(image: SimDisk, depth: int) -> None:
        nonlocal judged
        judged += 1

        def crash(op: int) -> None:
            for found in image.images(random=Random(op), limit=4):
                check(found.disk, depth - 1)

        image.on_op = crash if depth else None
        found = recover(image)
        image.on_op = None
        assert found.datas == datas[:1] + datas[2:]
        assert [lost[:4] for lost in found.losses] == [(1, "wal-0000000000000001.log", 946, 1892)]
        tree = image.tree()
        assert tree[f"{QUARANTINE}/wal.wal-0000000000000001.log.946"] == spoilt[946:1892]
        assert tree[wal_path(1)] == spoilt
        after = image.digest()
        assert recover(image).losses == found.losses
        assert image.digest() == after

    check(disk, 2)
    assert judged > 30


@pytest.mark.parametrize("is_torn", [True, False])
def test_crash_during_the_truncation_of_the_newest_file(is_torn: bool, disk: SimDisk) -> None:
    """G48, G53."""
    datas = three_files(disk)
    disk.flip_bit(wal_path(5), 1000, 0)
    durable = None if is_torn else Position(5, 1892)
    images: list[SimDisk] = []
    working = disk.reboot()
    working.on_op = lambda op: images.extend(image.disk for image in working.images(random=Random(op)))
    recover(working, durable=durable)
    working.on_op = None
    assert len(images) > 2
    for image in [*images, working.crash_image("none")]:
        found = recover(image, durable=durable)
        assert found.datas == (datas[:5] if is_torn else datas[:5] + datas[6:])
        assert found.next_first >= 6
        kept = [content for name, content in image.tree().items() if name.startswith(QUARANTINE) and name[-1] != "p"]
        assert kept == [disk.read_file(wal_path(5))[946 : 1942 if is_torn else 1892]]


def test_prepare_for_writing_needs_a_finished_replay(disk: SimDisk) -> None:
    three_files(disk)
    found = replay_shard(disk, WAL)
    next(iter(found))
    with pytest.raises(AssertionError):
        prepare_for_writing(disk, WAL, found, quarantine=QUARANTINE)


@pytest.mark.parametrize("directory", ["data/wal/shard-03", "shard-03"])
def test_quarantine_file_names_its_shard(directory: str) -> None:
    disk = SimDisk()
    disk.write_file(f"{directory}/wal-0000000000000001.log", append(b"a")[:-1])
    found = replay_shard(disk, directory, durable=Position(1, 10))
    assert list(found) == []
    kept = prepare_for_writing(disk, directory, found, quarantine="q")
    assert kept == ["q/shard-03.wal-0000000000000001.log.0"]
    assert disk.read_file(kept[0]) == append(b"a")[:-1]


@pytest.mark.parametrize("at", [100, (1 << 20) - 1, 1 << 20, 3 << 20, (3 << 20) + 6])
def test_one_byte_far_after_the_end_is_found(at: int, disk: SimDisk) -> None:
    """G53. Method: in the reserved megabytes of a file as large as real ones are."""
    content = bytearray((3 << 20) + 7)
    content[:47] = append(b"a")
    disk.write_file(wal_path(1), bytes(content))
    assert inspect_wal(disk).cut is None
    content[at] = 1
    disk.write_file(wal_path(1), bytes(content))
    found = inspect_wal(disk)
    assert (found.datas, found.verdict, found.cut and found.cut.size) == ([b"a"], "torn", at + 1 - 47)


@given(st.binary(max_size=300), st.integers(0, 3), st.booleans())
def test_no_bytes_make_a_reader_fail(content: bytes, frames: int, newest: bool) -> None:
    """G58: whatever a file holds, it is read, judged and cut; what is replayed was written."""
    disk = SimDisk()
    good = [b"%d" % number for number in range(frames)]
    disk.write_file(wal_path(1), b"".join(chain(good[:1]) + [append(data) for data in good[1:]]) + content)
    if not newest:
        disk.write_file(wal_path(9), append(b"later"))
    found = recover(disk)
    assert found.datas[:frames] == good
    assert found.datas[frames:] == ([] if newest else [b"later"])
    assert recover(disk).cut is None
