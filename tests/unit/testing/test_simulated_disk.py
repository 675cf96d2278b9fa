"""What survives a power cut on the simulated disk, what does not, and that a dead disk says nothing."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.testing import ALL_POLICIES, ManualClock, Policy, PowerOff, SimDisk

OLD, NEW = b"o" * 1500, b"n" * 1500


def written(data: bytes = b"", *, name: str = "a") -> SimDisk:
    """A disk with one durable file."""
    disk = SimDisk(trace=True)
    disk.write_file(name, data)
    return disk


def found(disk: SimDisk, *policies: Policy, path: str = "a") -> set[bytes | None]:
    """What a file may be after a power cut now; None for gone."""
    return {image.disk.tree().get(path) for image in disk.images(policies or ALL_POLICIES, Random(0))}


# Data.


def test_a_write_that_was_not_synced_is_lost_kept_or_torn_at_a_sector() -> None:
    disk = written(OLD)
    disk.open("a", "write").write(0, NEW)
    assert disk.crash_image("none").tree() == {"a": OLD}
    assert disk.crash_image("all").tree() == {"a": NEW}
    torn = {NEW[:at] + OLD[at:] for at in (0, 512, 1024)}
    assert found(disk, "torn_last") == torn
    assert found(disk, "prefixes") == torn | {NEW}
    middle_lost = NEW[:512] + OLD[512:1024] + NEW[1024:]
    assert middle_lost in found(disk, "all_but_one"), "sectors are lost in any combination, not only from the end"


def test_a_synced_write_survives_every_power_cut() -> None:
    disk = written(OLD)
    file = disk.open("a", "write")
    file.write(0, NEW)
    file.sync()
    assert found(disk) == {NEW}


def test_sectors_are_counted_from_the_start_of_the_file_not_of_the_write() -> None:
    disk = written(OLD)
    disk.open("a", "write").write(500, b"n" * 20)
    first, second = OLD[:500] + b"n" * 12 + OLD[512:], OLD[:512] + b"n" * 8 + OLD[520:]
    assert found(disk, "only_one") == {first, second}


def test_writes_of_one_sector_survive_in_any_combination_and_in_their_order() -> None:
    disk = written(b"....")
    file = disk.open("a", "write")
    file.write(0, b"abc")
    file.write(1, b"XYZ")
    assert found(disk) == {b"....", b"abc.", b".XYZ", b"aXYZ"}


# Sizes.


def test_a_size_that_survives_without_its_bytes_shows_zeros() -> None:
    disk = written(b"ab")
    disk.open("a", "write").write(2, b"cd")
    assert found(disk) == {b"ab", b"ab\0\0", b"abcd"}


def test_bytes_that_survive_without_their_size_are_not_seen() -> None:
    disk = written(b"ab")
    disk.open("a", "write").write(1, b"XY")
    assert found(disk) == {b"ab", b"aX", b"ab\0", b"aXY"}


def test_a_file_may_end_in_the_middle_of_a_write_that_grew_it() -> None:
    disk = written()
    disk.open("a", "write").write(0, NEW)
    cut = {NEW[:at] for at in (0, 512, 1024)}
    zeros = {NEW[:at].ljust(1500, b"\0") for at in (0, 512, 1024)}
    assert found(disk, "torn_last") == cut | zeros


def test_a_cut_is_lost_or_kept_apart_from_the_bytes_before_it() -> None:
    disk = written(b"old")
    file = disk.open("a", "write")
    file.write(0, b"new")
    file.truncate(1)
    assert found(disk) == {b"old", b"new", b"o", b"n"}


def test_a_cut_that_survives_takes_the_bytes_issued_before_it_but_not_those_after() -> None:
    disk = written(b"12")
    file = disk.open("a", "write")
    file.write(1, b"X")
    file.truncate(1)
    file.write(1, b"Y")
    assert found(disk) == {b"12", b"1X", b"1Y", b"1", b"1\0"}


def test_sizes_survive_in_order() -> None:
    disk = written(b"12345")
    file = disk.open("a", "write")
    file.truncate(3)
    file.truncate(1)
    file.truncate(2)
    assert found(disk) == {b"12345", b"123", b"1", b"1\0"}


def test_reserved_bytes_are_zero_and_only_the_size_is_pending() -> None:
    disk = written(b"ab")
    file = disk.open("a", "write")
    file.allocate(4)
    assert found(disk) == {b"ab", b"ab\0\0"}
    file.sync()
    file.write(2, b"cd")
    assert found(disk) == {b"ab\0\0", b"abcd"}


# Names.


def test_synced_bytes_whose_name_was_not_synced_vanish() -> None:
    disk = SimDisk()
    file = disk.open("a", "create")
    file.write(0, b"abc")
    file.sync()
    assert found(disk) == {None, b"abc"}
    disk.sync_dir(".")
    assert found(disk) == {b"abc"}


def test_a_synced_name_whose_bytes_were_not_synced_holds_nothing_for_sure() -> None:
    disk = SimDisk()
    disk.open("a", "create").write(0, b"abc")
    disk.sync_dir("")
    assert found(disk) == {b"", b"\0\0\0", b"abc"}


def test_a_rename_that_was_not_synced_is_old_or_new_never_neither() -> None:
    disk = written(b"old")
    disk.write_file("b", b"new")
    disk.rename("b", "a")
    trees = [image.disk.tree() for image in disk.images()]
    assert sorted(trees, key=len) == [{"a": b"new"}, {"a": b"old", "b": b"new"}]
    disk.sync_dir(".")
    assert [image.disk.tree() for image in disk.images()] == [{"a": b"new"}]


def test_a_rename_before_the_sync_of_its_bytes_can_show_an_empty_file() -> None:
    disk = written(b"old")
    disk.open("b", "create").write(0, b"new")
    disk.rename("b", "a")
    assert found(disk) == {b"old", b"", b"\0\0\0", b"new"}


def test_a_remove_that_was_not_synced_may_be_undone() -> None:
    disk = written(b"abc")
    disk.remove("a")
    assert disk.tree() == {}
    assert found(disk) == {None, b"abc"}
    disk.sync_dir(".")
    assert found(disk) == {None}


def test_names_of_one_directory_survive_in_order() -> None:
    disk = SimDisk()
    for name in "abc":
        disk.open(name, "create")
    assert {"".join(image.disk.tree()) for image in disk.images()} == {"", "a", "ab", "abc"}


def test_two_directories_do_not_wait_for_each_other() -> None:
    disk = SimDisk()
    disk.make_dir("x")
    disk.make_dir("y")
    disk.open("x/a", "create")
    disk.open("y/b", "create")
    disk.remove("x/a")
    trees = {tuple(image.disk.tree()) for image in disk.images(["directories"])}
    assert trees == {(), ("x/a",), ("y/b",), ("x/a", "y/b")}


def test_all_pairs_of_prefixes_of_three_directories_are_tried() -> None:
    disk = SimDisk()
    for name in "xyz":
        disk.make_dir(name)
        disk.open(f"{name}/1", "create")
        disk.open(f"{name}/2", "create")
    trees = {tuple(image.disk.tree()) for image in disk.images(["directories"])}
    # 3 prefixes of each of two directories while the third is whole: 27 less those counted more than once.
    expected = {
        tuple(sorted(f"{name}/{n + 1}" for name, kept in zip("xyz", counts, strict=True) for n in range(kept)))
        for counts in ((i, j, k) for i in range(3) for j in range(3) for k in range(3))
        if 2 in counts
    }
    assert trees == expected
    assert len(trees) == 19


def test_make_dir_makes_every_new_name_durable() -> None:
    disk = SimDisk(trace=True)
    disk.make_dir("x/y")
    assert disk.trace == ["mkdir x", "sync_dir .", "mkdir x/y", "sync_dir x"]
    assert [image.disk.list_dir("x") for image in disk.images()] == [["y"]]


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_power_cut_inside_make_dir_leaves_some_of_the_directories(number: int) -> None:
    disk = SimDisk()
    disk.cut_power_at(number)
    with pytest.raises(PowerOff):
        disk.make_dir("x/y")
    made = {image.disk.stat("x") is not None for image in disk.images()}
    assert made == ({False} if number == 1 else {False, True} if number == 2 else {True})


def test_a_directory_whose_name_is_lost_loses_all_that_is_inside() -> None:
    disk = SimDisk()
    disk.ignores_syncs = True
    disk.make_dir("x")
    disk.ignores_syncs = False
    file = disk.open("x/a", "create")
    file.write(0, b"abc")
    file.sync()
    disk.sync_dir("x")
    assert {tuple(image.disk.tree()) for image in disk.images()} == {(), ("x/a",)}


def test_a_directory_that_was_removed_may_come_back_with_what_it_held() -> None:
    disk = SimDisk()
    disk.write_file("x/a", b"abc")
    disk.remove("x/a")
    disk.remove_dir("x")
    assert disk.list_dir("") == []
    kept = {(tuple(image.disk.list_dir("")), tuple(image.disk.tree())) for image in disk.images()}
    assert kept == {((), ()), (("x",), ()), (("x",), ("x/a",))}


def test_a_renamed_directory_keeps_what_is_pending_inside() -> None:
    disk = SimDisk()
    disk.make_dir("x")
    disk.open("x/a", "create")
    disk.rename("x", "y")
    held = {(tuple(image.disk.list_dir("")), tuple(image.disk.tree())) for image in disk.images()}
    assert held == {(("x",), ()), (("x",), ("x/a",)), (("y",), ()), (("y",), ("y/a",))}


# Numbers, the trace and the clock.


def test_every_call_that_changes_something_is_one_numbered_operation() -> None:
    disk = SimDisk(trace=True)
    disk.make_dir("d")
    file = disk.open("d/a", "create")
    file.write(0, b"x" * 25)
    file.write(25, b"")
    file.truncate(20)
    file.allocate(30)
    file.allocate(10)
    file.sync()
    disk.rename("d/a", "d/b")
    disk.sync_dir("d")
    file.read(0, 5)
    file.map()
    disk.stat("d/b")
    disk.list_dir("d")
    disk.open("d/b").close()
    disk.lock("LOCK").release()
    disk.lock("LOCK")
    disk.remove("d/b")
    disk.remove_dir("d")
    assert disk.trace == [
        "mkdir d",
        "sync_dir .",
        "create d/a",
        "write d/a@0+25",
        "cut d/a to 20",
        "reserve d/a to 30",
        "sync d/a",
        "rename d/a -> d/b",
        "sync_dir d",
        "create LOCK",
        "remove d/b",
        "rmdir d",
    ]
    assert disk.op_count == len(disk.trace)


def test_a_refused_call_is_no_operation_and_the_trace_is_kept_only_when_asked_for() -> None:
    disk = SimDisk()
    disk.open("a", "create")
    for refused in (
        lambda: disk.open("a", "create"),
        lambda: disk.remove("b"),
        lambda: disk.rename("b", "c"),
    ):
        with pytest.raises(OSError):
            refused()
    assert (disk.op_count, disk.trace) == (1, [])


def test_files_are_stamped_by_the_clock_that_was_passed_in() -> None:
    clock = ManualClock(5_000_000)
    disk = SimDisk(clock=clock)
    file = disk.open("a", "create")
    clock.tick(7)
    file.write(0, b"x")
    clock.tick(7)
    for each in (disk, disk.crash_image("all"), disk.reboot()):
        stat = each.stat("a")
        assert stat is not None
        assert stat.modified_ms == 5_007


# Power.


def calls(disk: SimDisk) -> list[Callable[[], object]]:
    """Every call of the protocol, on things that were there before the power failed."""
    file, lock = disk.open("a", "write"), disk.lock("LOCK")
    closed = disk.open("a")
    closed.close()
    return [
        lambda: disk.open("a"),
        lambda: disk.open("new", "create"),
        lambda: disk.stat("a"),
        lambda: disk.stat("no"),
        lambda: disk.list_dir(""),
        lambda: disk.make_dir("d"),
        lambda: disk.make_dir("new"),
        lambda: disk.remove("a"),
        lambda: disk.remove("no"),
        lambda: disk.remove_dir("d"),
        lambda: disk.rename("a", "b"),
        lambda: disk.rename("a", "a"),
        lambda: disk.sync_dir(""),
        lambda: disk.lock("other"),
        lambda: file.size(),
        lambda: file.read(0, 1),
        lambda: file.write(0, b"x"),
        lambda: file.write(0, b""),
        lambda: file.truncate(0),
        lambda: file.allocate(0),
        lambda: file.allocate(100),
        lambda: file.sync(),
        lambda: file.map(),
        lambda: file.close(),
        lambda: closed.close(),
        lambda: lock.release(),
    ]


@pytest.mark.parametrize("number", range(26))
def test_after_a_power_cut_every_call_raises_and_changes_nothing(number: int) -> None:
    disk = written(b"abc")
    disk.make_dir("d")
    every = calls(disk)
    assert len(every) == 26
    before = disk.digest()
    disk.power_off()
    for _ in range(2):
        with pytest.raises(PowerOff):
            every[number]()
    assert disk.digest() == before


def test_power_off_is_not_an_exception_that_a_handler_could_survive() -> None:
    assert not issubclass(PowerOff, Exception)


def workload(disk: SimDisk) -> None:
    disk.make_dir("x")
    file = disk.open("x/a", "create")
    file.write(0, NEW)
    file.sync()
    disk.sync_dir("x")
    file.write(100, OLD)
    file.truncate(1400)
    disk.open("x/b", "create").write(0, b"abc")
    disk.rename("x/b", "x/a")
    disk.sync_dir("x")


def test_the_power_fails_before_the_operation_it_was_asked_for() -> None:
    disk = SimDisk(trace=True)
    disk.cut_power_at(4)
    with pytest.raises(PowerOff, match="after operation 3"):
        workload(disk)
    assert disk.trace == ["mkdir x", "sync_dir .", "create x/a"]
    assert disk.tree() == {"x/a": b""}


def test_looking_at_every_operation_finds_what_cutting_the_power_there_finds() -> None:
    """Method: one run with an observer against one run for every number."""
    seen: list[tuple[int, list[bytes]]] = []

    def look(number: int) -> None:
        seen.append((number, [image.disk.digest() for image in disk.images(random=Random(number))]))

    disk = SimDisk()
    disk.on_op = look
    workload(disk)
    assert [number for number, _ in seen] == list(range(1, disk.op_count + 1))
    for number, digests in seen:
        dead = SimDisk()
        dead.cut_power_at(number)
        with pytest.raises(PowerOff):
            workload(dead)
        assert [image.disk.digest() for image in dead.images(random=Random(number))] == digests


def test_an_observer_may_turn_the_power_off() -> None:
    disk = SimDisk()
    disk.on_op = lambda number: disk.power_off() if number == 3 else None
    with pytest.raises(PowerOff):
        workload(disk)
    assert (disk.op_count, disk.tree()) == (2, {})


def test_looking_at_images_disturbs_nothing_and_images_are_disks_of_their_own() -> None:
    quiet, watched = SimDisk(trace=True), SimDisk(trace=True)

    def disturb(_: int) -> None:
        for image in watched.images(random=Random(1)):
            for path in image.disk.tree():
                image.disk.open(path, "write").write(0, b"scribble")
            image.disk.write_file("x/more", b"scribble")

    watched.on_op = disturb
    workload(quiet)
    workload(watched)
    assert watched.trace == quiet.trace
    assert watched.tree() == quiet.tree()
    assert watched.crash_image("none").tree() == quiet.crash_image("none").tree()
    assert watched.crash_image("all").tree() == quiet.crash_image("all").tree()


def test_images_are_those_of_the_moment_they_were_asked_for() -> None:
    disk = written(b"old")
    disk.open("a", "write").write(0, b"new")
    images = disk.images()
    disk.open("a", "write").write(0, b"???")
    disk.open("a", "write").sync()
    disk.remove("a")
    disk.sync_dir("")
    assert [image.disk.tree() for image in images] == [{"a": b"old"}, {"a": b"new"}]


def test_an_image_is_a_healthy_disk_that_can_crash_again() -> None:
    disk = written(b"old")
    disk.capacity_bytes = 3
    disk.fail("open", times=None)
    disk.ignores_syncs = True
    disk.cut_power_at(1)
    with pytest.raises(PowerOff):
        disk.open("b", "create")
    image = disk.crash_image()
    assert image.op_count == 0
    file = image.open("a", "write")
    file.write(0, b"newer")
    assert found(image) == {b"old", b"new", b"old\0\0", b"newer"}
    file.sync()
    assert found(image) == {b"newer"}


def test_after_a_kill_all_that_was_live_is_there_and_what_was_not_synced_can_still_be_lost() -> None:
    disk = written(b"old")
    disk.make_dir("x")
    file = disk.open("a", "write")
    file.write(0, b"new")
    disk.open("x/b", "create").write(0, b"b")
    disk.lock("LOCK")
    again = disk.reboot()
    assert again.tree() == disk.tree() == {"a": b"new", "x/b": b"b", "LOCK": b""}
    again.lock("LOCK")
    assert again.crash_image("none").tree() == {"a": b"old"}
    file.write(0, b"???")
    assert again.read_file("a") == b"new", "the dead process still writes"
    again.open("a", "write").sync()
    assert again.crash_image("none").tree() == {"a": b"new"}
    assert disk.crash_image("none").tree() == {"a": b"old"}


def test_a_name_still_pending_at_a_reboot_leads_to_the_file_of_the_new_process() -> None:
    disk = SimDisk()
    disk.open("a", "create")
    again = disk.reboot()
    file = again.open("a", "write")
    file.write(0, b"abc")
    file.sync()
    assert found(again) == {None, b"abc"}
    assert found(disk) == {None, b""}


def test_what_was_pending_at_a_reboot_comes_before_what_follows() -> None:
    disk = SimDisk()
    disk.write_file("a", b"old")
    disk.write_file("b", b"old")
    disk.open("a", "write").write(0, b"new")
    again = disk.reboot()
    again.open("b", "write").write(0, b"new")
    trees = [tuple(image.disk.tree().values()) for image in again.images(("prefixes",))]
    assert trees == [(b"old", b"old"), (b"new", b"old"), (b"new", b"new")]


def test_a_reboot_keeps_the_order_of_what_was_pending() -> None:
    disk = SimDisk()
    disk.open("a", "create")
    again = disk.reboot()
    again.rename("a", "b")
    again.open("c", "create")
    assert {"".join(image.disk.tree()) for image in again.images()} == {"", "a", "b", "bc"}


# Helpers.


def test_write_file_is_durable_at_once_with_all_names_above_it() -> None:
    disk = SimDisk()
    disk.open("pending", "create")
    disk.write_file("x/y/a", b"abc")
    assert disk.crash_image("none").tree() == {"pending": b"", "x/y/a": b"abc"}
    disk.open("x/y/a", "write").write(0, b"???")
    disk.write_file("x/y/a", b"d")
    assert [image.disk.tree() for image in disk.images()] == [{"pending": b"", "x/y/a": b"d"}]
    assert (disk.read_file("/x/y/a"), disk.op_count) == (b"d", 2)


def test_the_digest_knows_names_contents_and_empty_directories() -> None:
    def digest(files: dict[str, bytes], *directories: str) -> bytes:
        disk = SimDisk()
        for path, data in files.items():
            disk.write_file(path, data)
        for path in directories:
            disk.make_dir(path)
        return disk.digest()

    trees = [
        digest({}),
        digest({"a": b""}),
        digest({}, "a"),
        digest({"a": b"b"}),
        digest({"a": b"", "b": b""}),
        digest({"a/b": b""}),
        digest({"a": b"\0"}),
    ]
    assert len(set(trees)) == len(trees)
    assert digest({"a": b"1", "b": b"2"}) == digest({"b": b"2", "a": b"1"})


def test_make_dir_refuses_the_place_of_a_file() -> None:
    disk = written(b"abc", name="x/a")
    for path in ("x/a", "x/a/b"):
        with pytest.raises(FileExistsError):
            disk.make_dir(path)


def test_a_map_keeps_its_bytes_while_the_file_changes() -> None:
    disk = written(b"abc")
    file = disk.open("a", "write")
    view = file.map()
    file.write(0, b"xyz")
    file.truncate(1)
    assert bytes(view) == b"abc"


def test_operations_of_several_threads_are_numbered_one_by_one() -> None:
    disk = SimDisk(trace=True)
    numbers: list[int] = []
    disk.on_op = numbers.append

    def work(number: int) -> None:
        file = disk.open(f"{number}", "create")
        for turn in range(100):
            file.write(turn, b"x")
            file.sync()

    threads = [Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers == list(range(1, 4 * 201 + 1))
    disk.sync_dir("")
    assert disk.crash_image("none").tree() == {f"{number}": b"x" * 100 for number in range(4)}


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("create"), st.sampled_from("abcd"), st.sampled_from("xy")),
        st.tuples(st.just("write"), st.integers(0, 1500), st.integers(1, 1200)),
        st.tuples(st.just("cut"), st.integers(0, 2000), st.just(0)),
        st.tuples(st.just("sync"), st.just(0), st.just(0)),
        st.tuples(st.just("rename"), st.sampled_from("abcd"), st.sampled_from("abcd")),
        st.tuples(st.just("remove"), st.sampled_from("abcd"), st.sampled_from("xy")),
        st.tuples(st.just("sync_dir"), st.sampled_from("xy"), st.just(0)),
    ),
    max_size=25,
)


@given(STEPS, st.randoms(use_true_random=False))
def test_all_kept_is_what_was_seen_and_after_syncing_everything_so_is_none_kept(
    steps: list[tuple[str, object, object]], random: Random
) -> None:
    disk = SimDisk()
    for name in "xy":
        disk.make_dir(name)
    file = disk.open("x/a", "create")
    for step, one, two in steps:
        try:
            if step == "create":
                file = disk.open(f"{two}/{one}", "create")
            elif step == "write":
                assert isinstance(one, int)
                assert isinstance(two, int)
                file.write(one, random.randbytes(two))
            elif step == "cut":
                assert isinstance(one, int)
                file.truncate(one)
            elif step == "sync":
                file.sync()
            elif step == "rename":
                disk.rename(f"x/{one}", f"x/{two}")
            elif step == "remove":
                disk.remove(f"{two}/{one}")
            else:
                disk.sync_dir(f"{one}")
        except (FileExistsError, FileNotFoundError):
            continue
    assert disk.crash_image("all").tree() == disk.reboot().tree() == disk.tree()
    for path in disk.tree():
        disk.open(path, "write").sync()
    for name in "xy":
        disk.sync_dir(name)
    assert [image.disk.tree() for image in disk.images(random=random)] == [disk.tree()]


def test_open_files_are_those_that_are_not_closed() -> None:
    disk = SimDisk()
    first, second = disk.open("a", "create"), disk.open("a")
    disk.remove("a")
    assert disk.open_files() == ["a", "a"]
    first.close()
    first.close()
    assert disk.open_files() == ["a"]
    del second
    assert disk.open_files() == []
