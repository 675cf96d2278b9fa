"""Inodes of a simulated disk, which keep durable, pending and live state apart.

    file   durable   ▓▓▓▓▓▓▓▓▓▓                        always found by a restart
           pending   Resize 1024 · Piece @512 · Piece @1000 · Resize 700 …      in the order they were issued
           live      ▓▓▓▓▓▓▓▒▒▒▒▒▒                     seen by the process

    dir    durable   {name: inode}
           pending   Link · Move · Unlink …
           live      {name: inode}

After a power cut the disk has `durable` and some of `pending`. Rules for the survivors:

  1. Pieces, the sectors of a write, survive in any combination and apply in the order issued.
  2. Resizes of one file survive as a prefix. A size that survives without its piece shows zeros or the old bytes; a
     piece that survives without its size is not visible.
  3. A surviving resize to fewer bytes also removes the earlier pieces beyond it.
  4. Name changes of one directory survive as a prefix, independent of other directories and of data.

A write that grows a file grows it sector by sector, each with its own Resize, so a file may also end in the middle of a
write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

SECTOR_BYTES = 512


class SectorWrite(NamedTuple):
    """The part of one write in one sector."""

    serial: int  # orders the pending operations of the whole disk
    write: int  # the same for all that one write issued
    pos: int
    data: bytes


class Resize(NamedTuple):
    serial: int
    write: int  # the write that grew the file; 0 for cut and reserve
    size: int


class Link(NamedTuple):
    serial: int
    name: str
    node: Node


class Unlink(NamedTuple):
    serial: int
    name: str


class Move(NamedTuple):
    serial: int
    old: str
    new: str


FileChange: TypeAlias = SectorWrite | Resize
NameChange: TypeAlias = Link | Unlink | Move


class FileNode:
    __slots__ = ("_durable", "_live", "lock_holder", "modified_ms", "pending", "pending_size")

    def __init__(self, content: bytes, modified_ms: int) -> None:
        self._durable: bytes | bytearray = content
        self._live: bytes | bytearray = content
        self.pending: list[FileChange] = []
        # The size after all pending changes. Not always the live size: bytes that a failed sync dropped are visible but
        # never become durable.
        self.pending_size = len(content)
        self.modified_ms = modified_ms
        self.lock_holder: object = None  # the owner of this lock file

    @property
    def size(self) -> int:
        return len(self._live)

    @property
    def live(self) -> bytes:
        """The bytes that the process sees. Shared, not copied, until the next write."""
        self._live = bytes(self._live)
        return self._live

    @property
    def durable(self) -> bytes:
        """The bytes that always survive. Shared, not copied, until the next sync."""
        self._durable = bytes(self._durable)
        return self._durable

    def read(self, pos: int, size: int) -> bytes:
        return bytes(self._live[pos : pos + size])

    def write(self, serials: Iterator[int], pos: int, data: bytes) -> None:
        live = self._live = _mutable(self._live)
        if pos > len(live):
            live.extend(bytes(pos - len(live)))
        live[pos : pos + len(data)] = data
        write = next(serials)
        start = 0
        while start < len(data):
            stop = min(len(data), start + SECTOR_BYTES - (pos + start) % SECTOR_BYTES)
            if pos + stop > self.pending_size:
                self.pending_size = pos + stop
                self.pending.append(Resize(next(serials), write, pos + stop))
            self.pending.append(SectorWrite(next(serials), write, pos + start, data[start:stop]))
            start = stop

    def resize(self, serials: Iterator[int], size: int) -> None:
        live = self._live = _mutable(self._live)
        del live[size:]
        live.extend(bytes(size - len(live)))
        if size != self.pending_size:
            self.pending_size = size
            self.pending.append(Resize(next(serials), 0, size))

    def sync(self) -> None:
        """Make all pending changes durable."""
        if self.pending:
            durable = self._durable = _mutable(self._durable)
            apply_changes(durable, self.pending)
            self.pending.clear()

    def drop_pending(self) -> None:
        """Drop the pending changes but keep showing them, like a kernel that marks failed pages clean."""
        self.pending.clear()
        self.pending_size = len(self._durable)

    def revert(self) -> None:
        """Drop the pending changes and show the durable bytes, like a kernel that discards failed pages."""
        self.drop_pending()
        self._live = self.durable

    def set_content(self, content: bytes) -> None:
        """Set the content, durable, with nothing pending."""
        self._durable = self._live = content
        self.pending.clear()
        self.pending_size = len(content)

    def flip_bit(self, pos: int, bit: int) -> None:
        """Flip one bit in every copy of this byte, so that no later sync repairs it."""
        if not 0 <= pos < len(self._live):
            raise ValueError(f"byte {pos} is outside the file of {len(self._live)} bytes")
        self._live, self._durable = (_flip_bit(held, pos, bit) for held in (self._live, self._durable))
        self.pending = [
            change._replace(data=_flip_bit(change.data, pos - change.pos, bit))
            if isinstance(change, SectorWrite)
            else change
            for change in self.pending
        ]

    def copy(self) -> FileNode:
        """Copy with an own pending list; the bytes are shared until either is written."""
        node = FileNode(self.durable, self.modified_ms)
        node._live, node.pending, node.pending_size = self.live, self.pending.copy(), self.pending_size
        return node


class DirNode:
    __slots__ = ("durable", "live", "modified_ms", "pending")

    def __init__(self, modified_ms: int) -> None:
        self.durable: dict[str, Node] = {}
        self.live: dict[str, Node] = {}
        self.pending: list[NameChange] = []
        self.modified_ms = modified_ms

    def change(self, change: NameChange) -> None:
        apply_name_change(self.live, change)
        self.pending.append(change)

    def sync(self) -> None:
        if self.pending:
            self.durable = self.live.copy()
            self.pending.clear()


Node: TypeAlias = FileNode | DirNode


def apply_changes(content: bytearray, changes: Iterable[FileChange]) -> None:
    """Apply the surviving changes in order, by rules 1 to 3."""
    size = len(content)  # what is beyond it is on the platter but not in the file
    for change in changes:
        if isinstance(change, SectorWrite):
            stop = change.pos + len(change.data)
            if stop > len(content):
                content.extend(bytes(stop - len(content)))
            content[change.pos : stop] = change.data
        else:
            if change.size < size:
                del content[change.size :]
            size = change.size
    del content[size:]
    content.extend(bytes(size - len(content)))


def apply_name_change(entries: dict[str, Node], change: NameChange) -> None:
    """Apply one change of names."""
    if isinstance(change, Link):
        entries[change.name] = change.node
    elif isinstance(change, Unlink):
        del entries[change.name]
    else:
        entries[change.new] = entries.pop(change.old)


def walk_tree(node: DirNode, path: str = "") -> Iterator[tuple[str, Node]]:
    """Iterate over the live tree below a directory, names sorted, a directory before its contents."""
    for name in sorted(node.live):
        child = node.live[name]
        yield path + name, child
        if isinstance(child, DirNode):
            yield from walk_tree(child, f"{path}{name}/")


def copy_tree(root: DirNode) -> DirNode:
    """Copy a tree with its pending operations, sharing nothing that can change."""
    copies: dict[Node, Node] = {}

    def copy(node: Node) -> Node:
        if node in copies:
            return copies[node]
        if isinstance(node, FileNode):
            copies[node] = node.copy()
            return copies[node]
        new = copies[node] = DirNode(node.modified_ms)
        new.durable = {name: copy(child) for name, child in node.durable.items()}
        new.live = {name: copy(child) for name, child in node.live.items()}
        new.pending = [
            change._replace(node=copy(change.node)) if isinstance(change, Link) else change for change in node.pending
        ]
        return new

    new_root = copy(root)
    assert isinstance(new_root, DirNode)
    return new_root


def _mutable(content: bytes | bytearray) -> bytearray:
    """Return bytes that may be changed in place; copies only shared ones."""
    return content if isinstance(content, bytearray) else bytearray(content)


def _flip_bit(content: bytes | bytearray, pos: int, bit: int) -> bytes:
    if not 0 <= pos < len(content):
        return bytes(content)
    return bytes(content[:pos]) + bytes([content[pos] ^ 1 << bit]) + bytes(content[pos + 1 :])
