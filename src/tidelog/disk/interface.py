"""The interface between Tidelog and the operating system: the `Disk` and `File` protocols.

Every operation that can lose data goes through it, so a test that replaces the disk can make any write short, any sync
fail and simulate any crash.

Durability of each call:

    call            survives kill -9      survives a power cut
    write, truncate on return             after File.sync
    create, rename, link,
    remove, mkdir   on return             after Disk.sync_dir of the parent directory

Paths are strings with "/" between parts. A failed call raises OSError with its errno; `stat` returns None for a missing
path, because callers branch on it.
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
    """One open file. Reads and writes are positional: there is no shared cursor."""

    @property
    def path(self) -> str: ...

    def size(self) -> int:
        """Current size of the file in bytes."""
        ...

    def read(self, pos: int, size: int, /) -> bytes:
        """Read bytes [pos, pos + size); fewer only at the end of the file."""
        ...

    def write(self, pos: int, data: Buffer, /) -> None:
        """Write all of `data`, with as many system calls as it takes. If it raises, any part of `data` may have been
        written: the caller truncates."""
        ...

    def writev(self, pos: int, pieces: Sequence[Buffer], /) -> None:
        """Write the pieces back to back without joining them first."""
        ...

    def truncate(self, size: int, /) -> None:
        """Set the file's length to `size` bytes and drop the bytes after it."""
        ...

    def allocate(self, size: int, /) -> None:
        """Make the file at least `size` bytes long with allocated blocks; new bytes are zero."""
        ...

    def sync(self) -> None:
        """Return once every written byte and the file's length survive a power cut. A failure is final: the kernel may
        have dropped the pages, so a later successful sync proves nothing."""
        ...

    @property
    def descriptor(self) -> int | None:
        """The file descriptor, whose fdatasync is equivalent to `sync`; None if only `sync` can be used."""
        ...

    def map(self) -> memoryview:
        """Map the whole file. For sealed files only: truncating a mapped file kills the process that reads it."""
        ...

    def close(self) -> None:
        """Close the descriptor without a sync. Idempotent."""
        ...


class Lock(Protocol):
    def describe_holder(self, text: str) -> None:
        """Write `text` into the lock file, for processes that the lock keeps out. Never raises for a full disk; not
        durable. A new holder replaces it."""
        ...

    def release(self) -> None:
        """Release the lock. Idempotent."""
        ...


class Disk(Protocol):
    def open(self, path: str, mode: Mode = "read", /) -> File:
        """Open a file. `read` and `write` need an existing file (FileNotFoundError), `create` a new name
        (FileExistsError)."""
        ...

    def stat(self, path: str, /) -> Stat | None:
        """Size, modification time and type of `path`; None if it does not exist."""
        ...

    def list_dir(self, directory: str, /) -> list[str]:
        """Names in a directory, sorted; FileNotFoundError if it does not exist."""
        ...

    def resolve(self, path: str, /) -> str:
        """The absolute path with all links followed."""
        ...

    def make_dir(self, path: str, /, *, durable: bool = True) -> None:
        """Create `path` and its missing parents; it may exist. Every new name is durable on return; without `durable`,
        once the caller has synced the directories above it."""
        ...

    def remove(self, path: str, /) -> None:
        """Remove a file; FileNotFoundError if it does not exist."""
        ...

    def remove_dir(self, path: str, /) -> None:
        """Remove an empty directory."""
        ...

    def rename(self, old: str, new: str, /) -> None:
        """Atomically replace `new` by `old`. Both are in one directory (ValueError otherwise), so that one `sync_dir`
        covers the change and it cannot fail half-way between file systems."""
        ...

    def link(self, old: str, new: str, /) -> None:
        """Give the file `old` a second name `new`, a new one (FileExistsError). Both names show the same bytes from now
        on, also those written later. OSError (EXDEV, EPERM, EMLINK, EOPNOTSUPP) where the file system cannot."""
        ...

    def sync_dir(self, path: str, /) -> None:
        """Return once every create, rename and remove in this directory survives a power cut."""
        ...

    def lock(self, path: str, /) -> Lock:
        """Take the exclusive lock file `path`, creating it; BlockingIOError while another holder is alive."""
        ...


def free_bytes(disk: Disk, path: str) -> int | None:
    """Bytes that can still be allocated on the device of `path`; None if there is no limit or it is unknown."""
    get_free: Callable[[str], int | None] | None = getattr(disk, "free", None)
    return None if get_free is None else get_free(path)


def start_writeback(file: File, pos: int, size: int) -> None:
    """Let the device begin to write these bytes, if the disk can. It promises nothing: a sync follows. Without it the
    sync of a large file writes all of it at once, and the syncs of other files wait meanwhile."""
    start: Callable[[int, int], None] | None = getattr(file, "start_writeback", None)
    if start is not None:
        start(pos, size)


def write_all(pwrite: Callable[[memoryview, int], int], pos: int, data: Buffer) -> None:
    """Call `pwrite(piece, pos)` until all of `data` is written. A short write is retried; one of 0 bytes raises."""
    view = memoryview(data).cast("B") if not isinstance(data, bytes) else memoryview(data)
    while view:
        written = pwrite(view, pos)
        if written <= 0:
            raise OSError(5, "the device accepted no bytes")
        view = view[written:]
        pos += written


def write_all_buffers(pwritev: Callable[[Sequence[Buffer], int], int], pos: int, pieces: Sequence[Buffer]) -> None:
    """Call `pwritev(pieces, pos)` until all pieces are written, at most 1024 a call: the kernel's limit."""
    remaining = [piece for piece in pieces if len(piece)]
    while remaining:
        written = pwritev(remaining[:1024], pos)
        if len(remaining) == 1 and written == len(remaining[0]):
            return
        if written <= 0:
            raise OSError(5, "the device accepted no bytes")
        pos += written
        complete = 0
        while complete < len(remaining) and written >= len(remaining[complete]):
            written -= len(remaining[complete])
            complete += 1
        remaining = remaining[complete:]
        if written:
            remaining[0] = memoryview(remaining[0])[written:]


def parent_dir(path: str) -> str:
    """The directory that contains `path`."""
    head, _, _ = path.rstrip("/").rpartition("/")
    return head or ("/" if path.startswith("/") else ".")


def check_same_directory(old: str, new: str) -> None:
    """Raise ValueError for a rename across directories."""
    if parent_dir(old) != parent_dir(new):
        raise ValueError(f"a rename must stay in one directory: {old} -> {new}")


def join(directory: str, name: str) -> str:
    return f"{directory.rstrip('/')}/{name}" if directory not in ("", ".") else name
