"""The contract suite of a Disk: each promise of `disk/interface.py` that can be tested without a power cut.

To run it against a disk of your own, in a test module:

    class TestMyDisk(DiskContract):
        def make_place(self, tmp_path, /):
            return MyDisk(), "some/directory/that/exists"
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TypeAlias

import pytest

from tidelog.disk.interface import Disk, File, join
from tidelog.types import Buffer

DiskAndRoot: TypeAlias = tuple[Disk, str]


class DiskContract(ABC):
    @abstractmethod
    def make_disk_and_root(self, tmp_path: Path, /) -> DiskAndRoot:
        """Return a disk, and an empty directory on it for one test."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> DiskAndRoot:
        return self.make_disk_and_root(tmp_path)

    # Opening.

    def test_a_created_file_is_empty_and_has_its_path(self, place: DiskAndRoot) -> None:
        path, file = create_file(place, "a")
        assert (file.path, file.size(), file.read(0, 10)) == (path, 0, b"")

    @pytest.mark.parametrize("mode", ["read", "write"])
    def test_opening_a_name_that_is_not_there_is_refused(self, place: DiskAndRoot, mode: str) -> None:
        disk, root = place
        with pytest.raises(FileNotFoundError):
            disk.open(join(root, "a"), "write" if mode == "write" else "read")
        assert disk.list_dir(root) == [], "a refused open made a file"

    def test_creating_a_name_that_is_taken_is_refused_and_leaves_the_file_alone(self, place: DiskAndRoot) -> None:
        disk, _ = place
        path, file = create_file(place, "a", b"kept")
        with pytest.raises(FileExistsError):
            disk.open(path, "create")
        assert file.read(0, 10) == b"kept"

    def test_creating_the_name_of_a_directory_is_refused(self, place: DiskAndRoot) -> None:
        disk, root = place
        disk.make_dir(join(root, "a"))
        with pytest.raises(FileExistsError):
            disk.open(join(root, "a"), "create")

    def test_creating_in_a_directory_that_is_not_there_is_refused(self, place: DiskAndRoot) -> None:
        disk, root = place
        with pytest.raises(FileNotFoundError):
            disk.open(join(root, "no/a"), "create")

    def test_open_for_writing_keeps_what_is_there(self, place: DiskAndRoot) -> None:
        disk, _ = place
        path, _ = create_file(place, "a", b"abcdef")
        disk.open(path, "write").write(2, b"XY")
        assert disk.open(path).read(0, 10) == b"abXYef"

    def test_a_file_opened_for_reading_refuses_to_change(self, place: DiskAndRoot) -> None:
        disk, _ = place
        path, _ = create_file(place, "a", b"kept")
        reader = disk.open(path)
        with pytest.raises(OSError):
            reader.write(0, b"x")
        with pytest.raises(OSError):
            reader.truncate(0)
        with pytest.raises(OSError):
            reader.allocate(10)
        assert disk.open(path).read(0, 10) == b"kept"

    def test_two_open_files_of_one_name_see_the_same_bytes(self, place: DiskAndRoot) -> None:
        disk, _ = place
        path, writer = create_file(place, "a")
        reader = disk.open(path)
        writer.write(0, b"seen at once")
        assert reader.read(0, 100) == b"seen at once"

    def test_closing_twice_is_harmless_and_a_closed_file_is_of_no_use(self, place: DiskAndRoot) -> None:
        _, file = create_file(place, "a", b"abc")
        file.close()
        file.close()
        for use in (file.size, file.sync, lambda: file.read(0, 1), lambda: file.write(0, b"x")):
            with pytest.raises((OSError, ValueError)):
                use()

    # Bytes.

    def test_write_changes_exactly_the_given_range(self, place: DiskAndRoot) -> None:
        _, file = create_file(place, "a", b"0123456789")
        file.write(3, b"abc")
        file.write(10, b"xyz")
        assert file.read(0, 100) == b"012abc6789xyz"
        assert file.size() == 13

    def test_pieces_are_written_back_to_back_however_many_they_are(self, place: DiskAndRoot) -> None:
        _, file = create_file(place, "a", b"0123456789")
        file.writev(2, [b"ab", b"", bytearray(b"c"), memoryview(b"defghijk")])
        assert file.read(0, 100) == b"01abcdefghijk"
        file.writev(13, [b"%04d" % number for number in range(1500)])  # more than the kernel takes at once
        assert file.read(13, 6000) == b"".join(b"%04d" % number for number in range(1500))
        assert file.size() == 6013

    def test_a_write_past_the_end_leaves_zeros_between(self, place: DiskAndRoot) -> None:
        _, file = create_file(place, "a", b"ab")
        file.write(5, b"c")
        assert file.read(0, 100) == b"ab\0\0\0c"

    @pytest.mark.parametrize("data", [b"abcd", bytearray(b"abcd"), memoryview(b"_abcd_")[1:5]])
    def test_bytes_bytearray_and_memoryview_can_be_written(self, place: DiskAndRoot, data: Buffer) -> None:
        _, file = create_file(place, "a")
        file.write(0, data)
        assert file.read(0, 100) == b"abcd"

    def test_a_memoryview_of_numbers_is_written_as_its_bytes(self, place: DiskAndRoot) -> None:
        _, file = create_file(place, "a", b"." * 12)
        file.write(2, memoryview(b"12345678").cast("I"))
        assert file.read(0, 100) == b"..12345678.."

    def test_a_bytearray_may_be_used_again_after_the_write(self, place: DiskAndRoot) -> None:
        _, file = create_file(place, "a")
        data = bytearray(b"abcd")
        file.write(0, data)
        data[:] = b"a longer one"
        assert file.read(0, 100) == b"abcd"

    @pytest.mark.parametrize("pos", [0, 3, 7])
    def test_writing_nothing_changes_nothing(self, place: DiskAndRoot, pos: int) -> None:
        _, file = create_file(place, "a", b"abc")
        file.write(pos, b"")
        assert file.read(0, 100) == b"abc"

    def test_a_large_write_arrives_whole(self, place: DiskAndRoot) -> None:
        _, file = create_file(place, "a")
        data = bytes(range(256)) * 4096
        file.write(3, data)
        assert file.read(3, len(data)) == data

    @pytest.mark.parametrize(
        ("pos", "size", "found"),
        [(0, 6, b"abcdef"), (2, 2, b"cd"), (4, 10, b"ef"), (6, 1, b""), (100, 5, b""), (3, 0, b"")],
    )
    def test_a_read_is_short_only_where_the_file_ends(
        self, place: DiskAndRoot, pos: int, size: int, found: bytes
    ) -> None:
        _, file = create_file(place, "a", b"abcdef")
        got = file.read(pos, size)
        assert got == found
        assert type(got) is bytes

    def test_a_negative_position_is_refused_and_never_counts_from_the_end(self, place: DiskAndRoot) -> None:
        _, file = create_file(place, "a", b"abcdef")
        for use in (
            lambda: file.read(-1, 3),
            lambda: file.read(0, -3),
            lambda: file.write(-1, b"x"),
            lambda: file.truncate(-1),
        ):
            with pytest.raises(OSError):
                use()
        assert file.read(0, 100) == b"abcdef"

    # Sizes.

    def test_truncated_bytes_do_not_return(self, place: DiskAndRoot) -> None:
        _, file = create_file(place, "a", b"abcdef")
        file.truncate(2)
        assert (file.size(), file.read(0, 100)) == (2, b"ab")
        file.write(5, b"x")
        assert file.read(0, 100) == b"ab\0\0\0x", "truncated bytes returned"

    def test_a_cut_beyond_the_end_adds_zeros(self, place: DiskAndRoot) -> None:
        _, file = create_file(place, "a", b"ab")
        file.truncate(5)
        assert file.read(0, 100) == b"ab\0\0\0"

    def test_reserve_adds_zeros_and_never_shrinks(self, place: DiskAndRoot) -> None:
        _, file = create_file(place, "a", b"ab")
        file.allocate(5)
        assert file.read(0, 100) == b"ab\0\0\0"
        file.allocate(1)
        file.allocate(0)
        assert file.read(0, 100) == b"ab\0\0\0"

    def test_sync_changes_nothing_that_can_be_seen(self, place: DiskAndRoot) -> None:
        disk, root = place
        _, file = create_file(place, "a", b"abc")
        file.sync()
        disk.sync_dir(root)
        assert (file.read(0, 100), disk.list_dir(root)) == (b"abc", ["a"])

    # Maps.

    def test_a_map_shows_the_whole_file_and_cannot_be_written_to(self, place: DiskAndRoot) -> None:
        disk, _ = place
        data = bytes(range(256)) * 20
        path, _ = create_file(place, "a", data)
        view = disk.open(path).map()
        assert bytes(view) == data
        assert view.readonly

    def test_the_map_of_an_empty_file_is_empty(self, place: DiskAndRoot) -> None:
        _, file = create_file(place, "a")
        assert len(file.map()) == 0

    def test_a_map_outlives_its_file_and_its_name(self, place: DiskAndRoot) -> None:
        disk, _ = place
        path, file = create_file(place, "a", b"still here")
        view = file.map()
        file.close()
        disk.remove(path)
        assert bytes(view) == b"still here"

    def test_a_file_can_grow_while_it_is_mapped(self, place: DiskAndRoot) -> None:
        _, file = create_file(place, "a", b"abc")
        view = file.map()
        file.write(3, b"def" * 1000)
        assert bytes(view) == b"abc"
        assert file.size() == 3003

    # Names.

    def test_names_are_sorted_and_hold_files_and_directories(self, place: DiskAndRoot) -> None:
        disk, root = place
        for name in ("b", "a", "10", "9"):
            create_file(place, name)
        disk.make_dir(join(root, "ab"))
        assert disk.list_dir(root) == ["10", "9", "a", "ab", "b"]

    def test_the_names_of_a_directory_that_is_not_there_are_refused(self, place: DiskAndRoot) -> None:
        disk, root = place
        with pytest.raises(FileNotFoundError):
            disk.list_dir(join(root, "no"))

    def test_stat_distinguishes_files_directories_and_missing_names(self, place: DiskAndRoot) -> None:
        disk, root = place
        path, _ = create_file(place, "a", b"abc")
        file, directory = disk.stat(path), disk.stat(root)
        assert file is not None
        assert (file.size, file.is_dir) == (3, False)
        assert file.modified_ms > 0
        assert directory is not None
        assert directory.is_dir
        assert disk.stat(join(root, "no")) is None
        assert disk.stat(join(root, "no/deeper")) is None
        assert disk.stat(join(path, "below a file")) is None

    def test_make_dir_makes_the_missing_parents(self, place: DiskAndRoot) -> None:
        disk, root = place
        disk.make_dir(join(root, "x/y/z"))
        assert disk.list_dir(join(root, "x")) == ["y"]
        assert disk.list_dir(join(root, "x/y/z")) == []
        disk.make_dir(join(root, "x/y/z"))
        disk.make_dir(join(root, "x/y"))
        disk.make_dir(join(root, "x/y2/"))
        assert disk.list_dir(join(root, "x")) == ["y", "y2"]
        disk.make_dir(join(root, "x/y3/z"), durable=False)
        disk.make_dir(join(root, "x/y3"), durable=False)
        assert disk.list_dir(join(root, "x")) == ["y", "y2", "y3"]

    def test_rename_replaces_what_was_there(self, place: DiskAndRoot) -> None:
        disk, root = place
        old, _ = create_file(place, "old", b"new content")
        new, _ = create_file(place, "new", b"old content")
        disk.rename(old, new)
        assert disk.list_dir(root) == ["new"]
        assert disk.open(new).read(0, 100) == b"new content"

    def test_rename_takes_a_free_name_and_leaves_open_files_working(self, place: DiskAndRoot) -> None:
        disk, root = place
        old, file = create_file(place, "old", b"abc")
        disk.rename(old, join(root, "new"))
        file.write(3, b"def")
        assert disk.open(join(root, "new")).read(0, 100) == b"abcdef"
        assert disk.stat(old) is None

    def test_renaming_to_the_same_name_changes_nothing(self, place: DiskAndRoot) -> None:
        disk, root = place
        disk.make_dir(join(root, "x"))
        path, _ = create_file(place, "x/a", b"abc")
        disk.rename(path, path)
        disk.rename(join(root, "x"), join(root, "x"))
        assert disk.list_dir(root) == ["x"]
        assert disk.open(path).read(0, 100) == b"abc"

    def test_rename_moves_a_directory_with_all_it_holds(self, place: DiskAndRoot) -> None:
        disk, root = place
        disk.make_dir(join(root, "x/y"))
        create_file(place, "x/y/a", b"abc")
        disk.rename(join(root, "x"), join(root, "z"))
        assert disk.open(join(root, "z/y/a")).read(0, 100) == b"abc"

    def test_rename_replaces_an_empty_directory_and_no_other(self, place: DiskAndRoot) -> None:
        disk, root = place
        for name in ("x", "y", "z"):
            disk.make_dir(join(root, name))
        create_file(place, "x/a")
        create_file(place, "y/b")
        with pytest.raises(OSError) as refused:
            disk.rename(join(root, "x"), join(root, "y"))
        assert refused.value.errno in (errno.ENOTEMPTY, errno.EEXIST)
        disk.rename(join(root, "x"), join(root, "z"))
        assert disk.list_dir(root) == ["y", "z"]
        assert disk.list_dir(join(root, "z")) == ["a"]

    def test_rename_refuses_to_leave_its_directory(self, place: DiskAndRoot) -> None:
        disk, root = place
        path, _ = create_file(place, "a", b"abc")
        disk.make_dir(join(root, "x"))
        with pytest.raises(ValueError, match="one directory"):
            disk.rename(path, join(root, "x/a"))
        assert disk.list_dir(root) == ["a", "x"]

    def test_renaming_what_is_not_there_is_refused_and_harms_nothing(self, place: DiskAndRoot) -> None:
        disk, root = place
        path, _ = create_file(place, "a", b"abc")
        with pytest.raises(FileNotFoundError):
            disk.rename(join(root, "no"), path)
        assert disk.open(path).read(0, 100) == b"abc"

    def test_rename_refuses_to_put_a_file_for_a_directory_or_the_other_way_about(self, place: DiskAndRoot) -> None:
        disk, root = place
        path, _ = create_file(place, "a", b"abc")
        disk.make_dir(join(root, "x"))
        with pytest.raises(IsADirectoryError):
            disk.rename(path, join(root, "x"))
        with pytest.raises(NotADirectoryError):
            disk.rename(join(root, "x"), path)
        assert disk.list_dir(root) == ["a", "x"]

    def test_a_link_is_a_second_name_of_the_same_bytes(self, place: DiskAndRoot) -> None:
        disk, root = place
        disk.make_dir(join(root, "x"))
        old, file = create_file(place, "a", b"first")
        new = join(root, "x/new")
        disk.link(old, new)
        file.write(0, b"F")
        assert disk.open(new).read(0, 10) == b"First"
        disk.remove(old)
        assert disk.open(new).read(0, 10) == b"First"

    def test_a_link_needs_a_file_and_a_free_name(self, place: DiskAndRoot) -> None:
        disk, root = place
        path, file = create_file(place, "a", b"kept")
        disk.make_dir(join(root, "x"))
        with pytest.raises(FileExistsError):
            disk.link(path, path)
        with pytest.raises(FileNotFoundError):
            disk.link(join(root, "no"), join(root, "new"))
        with pytest.raises(OSError):
            disk.link(join(root, "x"), join(root, "new"))
        assert (file.read(0, 10), disk.list_dir(root)) == (b"kept", ["a", "x"])

    def test_remove_forgets_the_name_and_an_open_file_lives_on(self, place: DiskAndRoot) -> None:
        disk, root = place
        path, file = create_file(place, "a", b"abc")
        disk.remove(path)
        assert (disk.list_dir(root), disk.stat(path)) == ([], None)
        assert file.read(0, 100) == b"abc"
        _, second = create_file(place, "a")
        assert second.size() == 0, "a removed file came back under its name"

    def test_removing_what_is_not_there_is_refused(self, place: DiskAndRoot) -> None:
        disk, root = place
        with pytest.raises(FileNotFoundError):
            disk.remove(join(root, "no"))
        with pytest.raises(FileNotFoundError):
            disk.remove_dir(join(root, "no"))

    def test_remove_is_for_files_and_remove_dir_for_directories(self, place: DiskAndRoot) -> None:
        disk, root = place
        path, _ = create_file(place, "a")
        disk.make_dir(join(root, "x"))
        with pytest.raises(OSError):
            disk.remove(join(root, "x"))
        with pytest.raises(NotADirectoryError):
            disk.remove_dir(path)
        assert disk.list_dir(root) == ["a", "x"]

    def test_remove_dir_wants_an_empty_directory(self, place: DiskAndRoot) -> None:
        disk, root = place
        disk.make_dir(join(root, "x"))
        path, _ = create_file(place, "x/a")
        with pytest.raises(OSError) as refused:
            disk.remove_dir(join(root, "x"))
        assert refused.value.errno == errno.ENOTEMPTY
        disk.remove(path)
        disk.remove_dir(join(root, "x"))
        assert disk.list_dir(root) == []

    def test_syncing_a_directory_that_is_not_there_is_refused(self, place: DiskAndRoot) -> None:
        disk, root = place
        with pytest.raises(FileNotFoundError):
            disk.sync_dir(join(root, "no"))

    # Locks.

    def test_a_lock_lets_one_in_and_the_next_after_release(self, place: DiskAndRoot) -> None:
        disk, root = place
        first = disk.lock(join(root, "LOCK"))
        assert disk.list_dir(root) == ["LOCK"]
        with pytest.raises(BlockingIOError):
            disk.lock(join(root, "LOCK"))
        first.release()
        second = disk.lock(join(root, "LOCK"))
        first.release()
        with pytest.raises(BlockingIOError):
            disk.lock(join(root, "LOCK"))
        second.release()

    def test_two_lock_files_do_not_know_each_other(self, place: DiskAndRoot) -> None:
        disk, root = place
        first, second = disk.lock(join(root, "a")), disk.lock(join(root, "b"))
        first.release()
        second.release()


def create_file(place: DiskAndRoot, name: str, data: bytes = b"") -> tuple[str, File]:
    """A new file with this content: its path, and the file open for writing."""
    disk, root = place
    path = join(root, name)
    file = disk.open(path, "create")
    file.write(0, data)
    return path, file
