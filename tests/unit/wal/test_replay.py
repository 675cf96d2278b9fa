"""The WAL read back: what counts, what is torn, what is damage (G31, G33–G36, G46–G48, G52, G53, G56–G58)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.wal.bench import (
    FILE_BYTES,
    QUARANTINE,
    WAL,
    Bench,
    Found,
    append,
    chain,
    look,
    mark,
    path,
    recover,
    reopened,
)

from tidelog.errors import Damaged, Unavailable
from tidelog.formats.rows import Stop
from tidelog.testing import SimDisk
from tidelog.wal import Position, Verdict, cut, read
from tidelog.wal.replay import Ending, classify


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk(trace=True)


def three_files(disk: SimDisk) -> list[bytes]:
    """Files 1, 3 and 5, two frames each but the last, which has three; everything is durable."""
    bench = Bench(disk)
    datas = [b"%d" % number * 900 for number in range(6)]
    for data in datas:
        bench.write(data)
    bench.write(b"last")
    return [*datas, b"last"]


# What is there.


def test_frames_come_back_file_by_file_as_columns(disk: SimDisk) -> None:
    datas = three_files(disk)
    replay = read(disk, WAL)
    files = list(replay)
    assert [(file.first, file.lo, file.hi, file.at.tolist()) for file in files] == [
        (1, 0, 1892, [0, 946]),
        (3, 0, 1892, [0, 946]),
        (5, 0, 1942, [0, 946, 1892]),
    ]
    assert [file.heads["data_len"].tolist() for file in files] == [[900, 900], [900, 900], [900, 900, 4]]
    assert [(file.stop, file.reason) for file in files] == [(Stop.END, "")] * 3
    assert all(file.buf == disk.read_file(path(file.first)) for file in files)
    assert (replay.cut, replay.later, replay.missing, replay.next_first) == (None, [], [], 8)
    assert replay.current_fault() is None
    assert look(disk).datas == datas


def test_a_wal_that_is_not_there_is_empty(disk: SimDisk) -> None:
    assert look(disk) == Found([], None, [], [], 1, [])
    assert recover(disk) == Found([], None, [], [], 1, [])
    disk.make_dir(WAL)
    assert look(disk).next_first == 1


def test_looking_changes_nothing(disk: SimDisk) -> None:
    """Method: also where there is something to cut."""
    three_files(disk)
    disk.flip(path(1), 100, 0)
    before, began = disk.digest(), disk.ops
    assert look(disk).verdict is Verdict.CORRUPT
    assert (disk.digest(), disk.ops) == (before, began)


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
def test_a_replay_starts_where_it_is_told(start: Position, first: int, missing: list[range], disk: SimDisk) -> None:
    datas = three_files(disk)
    found = look(disk, start)
    assert (found.datas, found.cut, found.missing, found.next_first) == (datas[first:], None, missing, 8)


@pytest.mark.parametrize(
    "start", [Position(5, 1943), Position(5, 2048), Position(5, 9999), Position(9, 0), Position(9, 7)]
)
def test_a_position_beyond_the_end_loses_nothing_that_comes(start: tuple[int, int], disk: SimDisk) -> None:
    """G46. Method: what is written now must be found from that position on."""
    beyond = Position(*start)
    three_files(disk)
    found = recover(disk, beyond)
    assert (found.datas, found.cut) == ([], None)
    assert len(disk.read_file(path(5))) <= FILE_BYTES, "and no file grows to where it should end"
    bench = Bench(disk, first=found.next_first)
    bench.write(b"new")
    again = look(disk, beyond)
    assert (again.datas, again.verdict) == ([b"new"], None)
    assert bench.writer.position.first > 5


def test_a_start_whose_bytes_before_it_are_damaged_is_still_a_start(disk: SimDisk) -> None:
    """Method: a snapshot has what lies before; numbers then count at least as many frames as there can have been."""
    datas = three_files(disk)
    disk.flip(path(5), 500, 3)
    found = recover(disk, Position(5, 946))
    assert (found.datas, found.cut) == (datas[5:], None)
    assert found.next_first >= 8
    bench = Bench(disk, first=found.next_first)
    bench.write(b"new")
    assert look(disk, Position(5, 946)).datas == [*datas[5:], b"new"]
    older = look(disk, Position(3, 0))
    assert (older.datas, older.verdict) == (datas[2:4], Verdict.CORRUPT), "an older start needs the damaged frames"


def test_frames_that_no_file_holds_are_told(disk: SimDisk) -> None:
    """Method: a file is gone; also behind one that ends where its frames do, as a file that was closed does."""
    datas = three_files(disk)
    disk.remove(path(3))
    found = look(disk, Position(3, 946))
    assert (found.missing, found.datas, found.next_first) == ([range(3, 5)], datas[4:], 8)
    assert look(disk, Position(5, 0)).missing == []
    disk.write_file(path(1), disk.read_file(path(1))[:1892])
    found = look(disk)
    assert (found.missing, found.datas, found.cut) == ([range(3, 5)], datas[:2] + datas[4:], None)
    disk.remove(path(1))
    found = look(disk)
    assert (found.missing, found.datas, found.next_first) == ([range(1, 5)], datas[4:], 8)


def test_a_batch_counts_as_a_whole(disk: SimDisk) -> None:
    """G4. Method: a chain of frames cut off at every byte."""
    bench = Bench(disk)
    bench.write(b"one")
    bench.write(b"a", b"b", b"c")
    content = disk.read_file(path(1))
    for stop in range(49, 49 + 3 * 47):
        disk.write_file(path(1), content[:stop] + bytes(FILE_BYTES - stop))
        found = look(disk)
        assert found.datas == [b"one"], stop
        assert found.verdict is (Verdict.TORN if stop > 49 else None), stop
    disk.write_file(path(1), content[: 49 + 3 * 47])
    assert look(disk).datas == [b"one", b"a", b"b", b"c"]


def test_reserved_zeros_are_not_damage(disk: SimDisk) -> None:
    """G34. Method: in the newest file, in older ones, in a file that was only just made, and in one that was not
    reserved yet."""
    datas = three_files(disk)
    for size in (0, 1, 37, 500, FILE_BYTES):
        disk.write_file(path(8), bytes(size))
        found = look(disk)
        assert (found.datas, found.cut, found.later, found.next_first) == (datas, None, [], 8)


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
    said = read(disk, WAL).current_fault()
    assert said is not None
    assert "the newest is 5" in said
    assert recover(disk) == plain
    bench, found = reopened(disk)
    assert found.datas == datas
    bench.write(b"new")
    assert read(disk, WAL).current_fault() is None


def test_an_unreadable_current_stops_nobody(disk: SimDisk) -> None:
    """G33."""
    datas = three_files(disk)
    disk.fail("read", path="CURRENT", times=None)
    assert read(disk, WAL).current_fault() is not None
    assert look(disk).datas == datas


# Read errors.


@pytest.mark.parametrize("first", [1, 3, 5])
@pytest.mark.parametrize("call", ["open", "read"])
def test_a_file_that_cannot_be_read_stops_everything(first: int, call: str, disk: SimDisk) -> None:
    """G57."""
    datas = three_files(disk)
    before = disk.digest()
    disk.fail(call, path=path(first))  # type: ignore[arg-type]
    with pytest.raises(Damaged, match="cannot be read"):
        recover(disk)
    assert disk.digest() == before
    assert recover(disk).datas == datas


def test_a_file_that_vanishes_under_a_reader_is_not_damage(disk: SimDisk) -> None:
    """Method: the writer dropped a file that a snapshot covers while somebody reads along."""
    three_files(disk)
    files = iter(read(disk, WAL))
    next(files)
    disk.remove(path(3))
    with pytest.raises(Unavailable, match="read it again"):
        next(files)


# Torn tails.


def torn(disk: SimDisk, spoil: Callable[[bytearray], object]) -> tuple[SimDisk, Found]:
    image = disk.reboot()
    content = bytearray(image.read_file(path(5)))
    spoil(content)
    image.write_file(path(5), bytes(content))
    found = recover(image, durable=Position(5, 946))
    return image, found


def check_torn(disk: SimDisk, datas: list[bytes], spoil: Callable[[bytearray], object], what: object) -> None:
    """The tail behind byte 946 of the newest file is spoilt: it is cut, what is before it is kept, and no later
    recovery finds anything there."""
    image, found = torn(disk, spoil)
    assert found.datas == datas[: len(found.datas)], what
    assert len(found.datas) >= 5, what
    assert found.verdict in (Verdict.TORN, None), what
    assert found.quarantined == [], what
    assert found.next_first == len(found.datas) + 1, what
    after = image.digest()
    again = recover(image)
    assert (again.datas, again.cut, again.next_first) == (found.datas, None, found.next_first), what
    assert image.digest() == after, what
    Bench(image, first=found.next_first).write(b"new")
    assert look(image.crash_image("none")).datas == [*found.datas, b"new"], what


def test_every_prefix_of_the_tail_is_cut_to_whole_frames(disk: SimDisk) -> None:
    """G52, G53. Method: the file ends at every byte, or is zero from there on."""
    datas = three_files(disk)
    for stop in range(946, 1943, 7):
        check_torn(disk, datas, lambda content, stop=stop: content.__delitem__(slice(stop, None)), stop)  # type: ignore[misc]

        def zeros(content: bytearray, stop: int = stop) -> None:
            content[stop:] = bytes(len(content) - stop)

        check_torn(disk, datas, zeros, stop)


def test_a_lost_sector_and_a_flipped_bit_in_the_tail_are_cut(disk: SimDisk) -> None:
    """G52, G53. Method: good frames may lie behind it; they prove nothing and do not come back."""
    datas = three_files(disk)
    for sector in range(1024, 2048, 512):

        def lose(content: bytearray, sector: int = sector) -> None:
            content[sector : sector + 512] = bytes(len(content[sector : sector + 512]))

        check_torn(disk, datas, lose, f"sector at {sector}")
    for pos in range(946, FILE_BYTES, 5):

        def flip(content: bytearray, pos: int = pos) -> None:
            content[pos] ^= 1 << pos % 8

        check_torn(disk, datas, flip, f"byte {pos}")


def test_zeros_at_a_frames_start_with_frames_behind_them_are_a_torn_tail(disk: SimDisk) -> None:
    """G53. Method: a whole frame reads as zeros, the one behind it is good."""
    datas = three_files(disk)
    image, found = torn(disk, lambda content: content.__setitem__(slice(946, 1892), bytes(946)))
    assert (found.datas, found.verdict, found.cut and found.cut.size) == (datas[:5], Verdict.TORN, 1942 - 946)
    assert len(image.read_file(path(5))) == 946


def test_an_empty_newest_file_is_removed_and_its_number_used_for_itself(disk: SimDisk) -> None:
    """G31, G36."""
    datas = three_files(disk)
    for content in (b"", bytes(FILE_BYTES), append(b"torn")[:-1], bytes(60) + b"x"):
        image = disk.reboot()
        image.write_file(path(8), content)
        found = recover(image)
        assert (found.datas, found.next_first) == (datas, 8)
        assert path(8) not in image.crash_image("none").tree()
        Bench(image, first=8).write(b"new")
        assert look(image.crash_image("none")).datas == [*datas, b"new"]


def test_what_a_killed_process_wrote_is_made_durable(disk: SimDisk) -> None:
    """G47. Method: after a kill the kernel still has the bytes; they are replayed, so no power cut may take them."""
    bench = Bench(disk)
    bench.write(b"a", durable=False)
    image = disk.reboot()
    assert recover(image).datas == [b"a"]
    assert look(image.crash_image("none")).datas == [b"a"]


# Damage.


def check_damage(
    disk: SimDisk, datas: list[bytes], kept: int, first: int, pos: int, *, durable: Position | None = None
) -> Found:
    """What lies behind is told, put aside and cut, in files that were there; then writing goes on."""
    whole = disk.reboot()
    found = recover(disk, durable=durable)
    assert found.datas == datas[:kept]
    assert found.cut is not None
    assert found.cut[:3] == (first, path(first).rpartition("/")[2], pos)
    assert found.cut.verdict is Verdict.CORRUPT
    assert found.next_first == 6
    assert found.later == [number for number in (1, 3, 5) if number > first]
    aside = {name: content for name, content in disk.tree().items() if name.startswith(QUARANTINE)}
    expected = {f"{QUARANTINE}/wal.{found.cut.file}.{pos}": whole.read_file(path(first))[pos:]}
    for later in found.later:
        expected[f"{QUARANTINE}/wal.wal-{later:016d}.log.0"] = whole.read_file(path(later))
    assert aside == {name: content.rstrip(b"\0") for name, content in expected.items()}
    assert sorted(found.quarantined) == sorted(aside)
    assert found.cut.size == len(aside[f"{QUARANTINE}/wal.{found.cut.file}.{pos}"])
    Bench(disk, first=found.next_first).write(b"new")
    after = look(disk.crash_image("none"))
    assert (after.datas, after.cut) == ([*datas[:kept], b"new"], None)
    return found


def test_a_bad_frame_in_an_older_file_is_damage(disk: SimDisk) -> None:
    """G56: later files are not replayed."""
    datas = three_files(disk)
    disk.flip(path(1), 950, 0)
    found = check_damage(disk, datas, 1, 1, 946)
    assert found.cut is not None
    assert found.cut.reason == "checksum mismatch"


def test_a_bad_frame_below_a_snapshots_position_is_damage(disk: SimDisk) -> None:
    """G56. Method: the position is exactly one byte behind the start of the bad frame, and exactly at it."""
    datas = three_files(disk)
    disk.flip(path(5), 1000, 0)
    assert look(disk, durable=Position(5, 946)).verdict is Verdict.TORN
    assert look(disk, durable=Position(3, 1892)).verdict is Verdict.TORN
    assert look(disk, durable=Position(5, 947)).verdict is Verdict.CORRUPT
    assert look(disk, durable=Position(6, 0)).verdict is Verdict.CORRUPT, "a later file was there once"
    check_damage(disk, datas, 5, 5, 946, durable=Position(5, 1892))


@pytest.mark.parametrize(
    ("first", "pos", "verdict"),
    [
        (1, 46, Verdict.TORN),
        (1, 47, Verdict.TORN),
        (1, 48, Verdict.CORRUPT),
        (1, 5 * 47, Verdict.CORRUPT),
        (2, 5 * 47, Verdict.TORN),
    ],
)
def test_a_mark_behind_a_bad_frame_tells_that_it_was_durable(
    first: int, pos: int, verdict: Verdict, disk: SimDisk
) -> None:
    """G56. Method: the second frame is bad; behind it a CheckpointMark says how much was synced before."""
    content = b"".join([append(b"%d" % number) for number in range(5)]) + mark(first, pos) + append(b"5")
    disk.write_file(path(1), content + bytes(500))
    assert look(disk).datas == [b"0", b"1", b"2", b"3", b"4", b"5"]
    disk.flip(path(1), 90, 2)
    found = look(disk)
    assert (found.datas, found.verdict) == ([b"0"], verdict)
    assert found.cut is not None
    assert (found.cut.pos, found.cut.size) == (47, len(content) - 47)


def test_a_mark_that_is_damaged_itself_or_short_proves_nothing(disk: SimDisk) -> None:
    """G58. Method: every byte of the mark is changed, one at a time."""
    head = append(b"0") + append(b"1")[:-1] + b"?"
    said = mark(1, 94)
    for pos in range(len(said)):
        changed = bytearray(said)
        changed[pos] ^= 0x40
        disk.write_file(path(1), head + changed)
        assert look(disk).verdict is Verdict.TORN
    disk.write_file(path(1), head + said)
    assert look(disk).verdict is Verdict.CORRUPT


def test_zeros_where_frames_were_synced_are_damage(disk: SimDisk) -> None:
    """G56. Method: a zeroed page whose start is a frame's start looks like the end of the file, but for what the
    numbers of the files and the position say."""
    datas = three_files(disk)
    older = disk.reboot()
    older.write_file(path(1), older.read_file(path(1))[:946] + bytes(FILE_BYTES - 946))
    found = look(older)
    assert (found.datas, found.verdict, found.cut and found.cut.pos) == (datas[:1], Verdict.CORRUPT, 946)
    assert found.cut is not None
    assert "1 frames are missing" in found.cut.reason
    disk.write_file(path(5), disk.read_file(path(5))[:946] + bytes(FILE_BYTES - 946))
    assert look(disk, durable=Position(5, 946)).cut is None
    assert look(disk, durable=Position(5, 1892)).verdict is Verdict.CORRUPT


def test_rubbish_in_the_reserved_end_of_an_older_file_has_cost_no_frame(disk: SimDisk) -> None:
    """G34. Method: the number of the next file proves that every frame is there."""
    datas = three_files(disk)
    for pos in range(1892, FILE_BYTES):
        disk.flip(path(1), pos, pos % 8)
        found = look(disk)
        assert (found.datas, found.cut) == (datas, None), pos
        disk.flip(path(1), pos, pos % 8)


def test_every_bit_of_every_file_is_told_from_its_place(disk: SimDisk) -> None:
    """G52, G56, G58. Method: one flip a run in every byte; below what is known to be durable it is damage, behind it a
    torn tail, in zeros harmless; nothing is ever made up."""
    datas = three_files(disk)
    durable = Position(5, 946)
    seen = {Verdict.CORRUPT: 0, Verdict.TORN: 0, None: 0}
    for first in (1, 3, 5):
        for pos in range(FILE_BYTES):
            disk.flip(path(first), pos, pos % 8)
            found = look(disk, durable=durable)
            disk.flip(path(first), pos, pos % 8)
            frame = min(pos // 946, 2) if first == 5 else min(pos // 946, 1)
            kept = first - 1 + frame
            expected: tuple[list[bytes], Verdict | None]
            if first < 5 and pos >= 1892:
                expected = (datas, None)
            elif pos >= 1942:
                expected = (datas, Verdict.TORN)  # nothing acked is lost with it
            else:
                damaged = first < 5 or pos < 946
                expected = (datas[:kept], Verdict.CORRUPT if damaged else Verdict.TORN)
            assert (found.datas, found.verdict) == expected, (first, pos)
            seen[found.verdict] += 1
    assert all(count > 100 for count in seen.values())


def test_a_crash_at_any_operation_of_the_cut_comes_to_the_same_end(disk: SimDisk) -> None:
    """G47, G48, G56. Method: as above, three deep: the verdict must not change while the evidence is being put aside,
    and nothing that was put aside may be lost."""
    datas = three_files(disk)
    whole = {first: disk.read_file(path(first)) for first in (1, 3, 5)}
    disk.flip(path(1), 950, 0)
    spoilt = disk.read_file(path(1))
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
        assert found.datas == datas[:1]
        assert found.next_first >= 6
        tree = image.tree()
        assert tree[f"{QUARANTINE}/wal.wal-0000000000000001.log.946"] == spoilt[946:].rstrip(b"\0")
        for first in (3, 5):
            assert tree[f"{QUARANTINE}/wal.wal-{first:016d}.log.0"] == whole[first].rstrip(b"\0")
        assert tree[path(1)] == spoilt[:946]
        again = recover(image)
        assert (again.datas, again.cut, again.next_first) == (datas[:1], None, 6)

    check(disk, 2)
    assert judged > 100


@pytest.mark.parametrize("verdict", [Verdict.TORN, Verdict.CORRUPT])
def test_a_crash_at_any_operation_of_a_cut_in_the_newest_file(verdict: Verdict, disk: SimDisk) -> None:
    """G48, G53."""
    datas = three_files(disk)
    disk.flip(path(5), 1000, 0)
    durable = Position(5, 1892) if verdict is Verdict.CORRUPT else None
    images: list[SimDisk] = []
    working = disk.reboot()
    working.on_op = lambda op: images.extend(image.disk for image in working.images(random=Random(op)))
    recover(working, durable=durable)
    working.on_op = None
    assert len(images) > 2
    for image in [*images, working.crash_image("none")]:
        found = recover(image, durable=durable)
        assert found.datas == datas[:5]
        assert found.next_first >= 6
        kept = [name for name in image.tree() if name.startswith(QUARANTINE)]
        assert len(kept) == (verdict is Verdict.CORRUPT)


def test_what_to_cut_is_known_only_after_the_loop(disk: SimDisk) -> None:
    three_files(disk)
    replay = read(disk, WAL)
    next(iter(replay))
    with pytest.raises(AssertionError):
        cut(disk, WAL, replay, quarantine=QUARANTINE)


@pytest.mark.parametrize("directory", ["data/wal/shard-03", "shard-03"])
def test_what_is_put_aside_says_which_group_it_is_from(directory: str) -> None:
    disk = SimDisk()
    disk.write_file(f"{directory}/wal-0000000000000001.log", append(b"a")[:-1])
    replay = read(disk, directory, durable=Position(1, 10))
    assert [file.hi for file in replay] == [0]
    kept = cut(disk, directory, replay, quarantine="q")
    assert kept == ["q/shard-03.wal-0000000000000001.log.0"]
    assert disk.read_file(kept[0]) == append(b"a")[:-1]


@pytest.mark.parametrize("at", [100, (1 << 20) - 1, 1 << 20, 3 << 20, (3 << 20) + 6])
def test_one_byte_far_behind_the_end_is_found(at: int, disk: SimDisk) -> None:
    """G53. Method: in the reserved megabytes of a file as large as real ones are."""
    content = bytearray((3 << 20) + 7)
    content[:47] = append(b"a")
    disk.write_file(path(1), bytes(content))
    assert look(disk).cut is None
    content[at] = 1
    disk.write_file(path(1), bytes(content))
    found = look(disk)
    assert (found.datas, found.verdict, found.cut and found.cut.size) == ([b"a"], Verdict.TORN, at + 1 - 47)


# The rules by themselves.


BAD = Ending(pos=100, bad=True, reason="bad", used=150, size=200, durable=0, newest=True, lacking=None)


@pytest.mark.parametrize(
    ("ending", "verdict"),
    [
        (BAD, Verdict.TORN),
        (BAD._replace(durable=100), Verdict.TORN),
        (BAD._replace(durable=101), Verdict.CORRUPT),
        (BAD._replace(newest=False), Verdict.CORRUPT),
        (BAD._replace(newest=False, lacking=1), Verdict.CORRUPT),
        (BAD._replace(newest=False, lacking=-1), Verdict.CORRUPT),
        (BAD._replace(newest=False, lacking=0), None),
        (BAD._replace(bad=False), Verdict.TORN),
        (BAD._replace(bad=False, newest=False), Verdict.CORRUPT),
        (BAD._replace(bad=False, used=100), None),
        (BAD._replace(bad=False, used=100, durable=101), Verdict.CORRUPT),
        (BAD._replace(bad=False, used=100, newest=False), None),
        (BAD._replace(bad=False, used=100, newest=False, lacking=1), Verdict.CORRUPT),
        (BAD._replace(bad=False, used=100, newest=False, lacking=1, size=100), None),
        (BAD._replace(bad=False, used=100, newest=False, lacking=-1), None),
    ],
)
def test_a_verdict_follows_its_rules(ending: Ending, verdict: Verdict | None) -> None:
    found = classify(ending)
    assert (found[0] if found else None) is verdict


@given(st.binary(max_size=300), st.integers(0, 3), st.booleans())
def test_no_bytes_make_a_reader_fail(content: bytes, frames: int, newest: bool) -> None:
    """G58: whatever a file holds, it is read, judged and cut; what is replayed was written."""
    disk = SimDisk()
    good = [b"%d" % number for number in range(frames)]
    disk.write_file(path(1), b"".join(chain(good[:1]) + [append(data) for data in good[1:]]) + content)
    if not newest:
        disk.write_file(path(9), append(b"later"))
    found = recover(disk)
    assert found.datas[:frames] == good
    assert found.datas[frames:] in ([], [b"later"])
    assert recover(disk).cut is None
