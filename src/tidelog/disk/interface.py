"""The seam between Tidelog and the operating system.

Everything that can lose data goes through here and nothing else does, so a test that swaps
the disk can make any write short, any sync fail and any crash happen.

What survives what:

    call            survives kill -9      survives a power cut
    write, cut      on return             after File.sync
    create, rename,
    remove, mkdir   on return             after Disk.sync_dir of the directory that holds the name

Paths are strings with "/" between parts. A failed call raises OSError with its errno; only
NotFound-like answers that callers branch on are values (`stat` answers None).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

from tidelog.types import Buffer

Mode: TypeAlias = Literal["read", "write", "create"]


class Stat(NamedTuple):
    size: int
    modified_ms: int
    is_dir: bool


class File(Protocol):
    """One open file. Positional: there is no cursor, so no two callers can disturb each other's."""

    @property
    def path(self) -> str: ...

    def size(self) -> int:
        """Bytes in the file as this process sees it now."""
        ...

    def read(self, pos: int, size: int, /) -> bytes:
        """The bytes of [pos, pos + size); fewer only where the file ends."""
        ...

    def write(self, pos: int, data: Buffer, /) -> None:
        """Hand all of `data` to the operating system, however many calls that takes.

        When it raises, any part of `data` may have been written: the caller cuts.
        """
        ...

    def writev(self, pos: int, pieces: Sequence[Buffer], /) -> None:
        """`write` of the pieces back to back, without joining them first."""
        ...

    def truncate(self, size: int, /) -> None:
        """Make the file exactly `size` bytes long, forgetting what lay behind."""
        ...

    def allocate(self, size: int, /) -> None:
        """Make the file at least `size` bytes long with blocks really allocated; new bytes are zero."""
        ...

    def sync(self) -> None:
        """Return only once every byte written and the file's length survive a power cut.

        A failure is final: the kernel may have dropped the pages, so a second sync that succeeds proves nothing.
        """
        ...

    @property
    def descriptor(self) -> int | None:
        """What the operating system knows it by: whoever syncs it there has done what `sync` does. None where only
        `sync` does it."""
        ...

    def map(self) -> memoryview:
        """The whole file as it is now, without copying. For sealed files only: a file that is
        cut under its mapping kills the process."""
        ...

    def close(self) -> None:
        """Give the descriptor back. Syncs nothing. Closing twice is harmless."""
        ...


class Lock(Protocol):
    def release(self) -> None:
        """Let another process in. Releasing twice is harmless."""
        ...


class Disk(Protocol):
    def open(self, path: str, mode: Mode = "read", /) -> File:
        """`read` and `write` want an existing file (FileNotFoundError), `create` a new name (FileExistsError)."""
        ...

    def stat(self, path: str, /) -> Stat | None:
        """What is at `path`, or None where nothing is."""
        ...

    def list_dir(self, directory: str, /) -> list[str]:
        """Names in a directory, sorted; FileNotFoundError where there is none."""
        ...

    def resolve(self, path: str, /) -> str:
        """`path` from the root of the file system on, links followed: the names of the directories that hold it."""
        ...

    def make_dir(self, path: str, /) -> None:
        """Make `path` and its missing parents. Every new name is durable on return. Existing is fine."""
        ...

    def remove(self, path: str, /) -> None:
        """Forget a file's name. FileNotFoundError where there is none."""
        ...

    def remove_dir(self, path: str, /) -> None:
        """Forget an empty directory."""
        ...

    def rename(self, old: str, new: str, /) -> None:
        """Put `old` in the place of `new` in one step. Both lie in one directory (ValueError otherwise),
        so that one `sync_dir` covers the change and it cannot fail half-way between file systems."""
        ...

    def sync_dir(self, path: str, /) -> None:
        """Return only once every create, rename and remove in this directory survives a power cut."""
        ...

    def lock(self, path: str, /) -> Lock:
        """Take the exclusive lock file `path`, creating it; BlockingIOError while another holder lives."""
        ...


def free_bytes(disk: Disk, path: str) -> int | None:
    """Bytes that may still be allocated on the device of `path`; None where the disk has no limit, or does not say."""
    ask: Callable[[str], int | None] | None = getattr(disk, "free", None)
    return None if ask is None else ask(path)


def write_all(pwrite: Callable[[memoryview, int], int], pos: int, data: Buffer) -> None:
    """Call `pwrite(piece, pos)` until all of `data` is written. A short write is not an error, a stuck one is."""
    view = memoryview(data).cast("B") if not isinstance(data, bytes) else memoryview(data)
    while view:
        done = pwrite(view, pos)
        if done <= 0:
            raise OSError(5, "the device accepted no bytes")
        view = view[done:]
        pos += done


def write_all_buffers(pwritev: Callable[[Sequence[Buffer], int], int], pos: int, pieces: Sequence[Buffer]) -> None:
    """Call `pwritev(pieces, pos)` until all of them are written, at most 1024 at a time as the kernel takes them."""
    left = [piece for piece in pieces if len(piece)]
    while left:
        done = pwritev(left[:1024], pos)
        if len(left) == 1 and done == len(left[0]):
            return
        if done <= 0:
            raise OSError(5, "the device accepted no bytes")
        pos += done
        whole = 0
        while whole < len(left) and done >= len(left[whole]):
            done -= len(left[whole])
            whole += 1
        left = left[whole:]
        if done:
            left[0] = memoryview(left[0])[done:]


def parent_dir(path: str) -> str:
    """The directory that holds `path`'s name."""
    head, _, _ = path.rstrip("/").rpartition("/")
    return head or ("/" if path.startswith("/") else ".")


def check_same_directory(old: str, new: str) -> None:
    """Refuse a rename across directories before it reaches the disk."""
    if parent_dir(old) != parent_dir(new):
        raise ValueError(f"rename stays inside one directory: {old} -> {new}")


def join(directory: str, name: str) -> str:
    return f"{directory.rstrip('/')}/{name}" if directory not in ("", ".") else name
