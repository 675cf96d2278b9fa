"""Crash images: every tree that a restart could find after a power cut at one instant.

Pending operations of the whole disk are numbered in the order they were issued, so one choice of survivors is one
integer, bit i for operation i:

    bit      0        1        2        3        4         5
             link a   size a   a@0      size a   a@512     move a -> b
    mask     1        1        0        1        1         0

Some operations form a *log* (the sizes of one file, the names of one directory)
of which a prefix survives; the pieces of writes survive in any combination.

Inodes of a simulated disk, which keep durable, pending and live state apart.

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

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, pairwise, product
from random import Random
from typing import Literal, NamedTuple, TypeAlias, get_args

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


Policy: TypeAlias = Literal[
    "none",  # only synced operations
    "all",  # every issued operation
    "prefixes",  # the first n operations, for every n
    "all_but_one",  # all but one operation and the later ones of its log
    "only_one",  # one operation and the earlier ones of its log
    "torn_last",  # the last write torn at each sector, with its whole size and with its size cut as well
    "random",  # sixteen draws
    "directories",  # every prefix of each directory's log, every pair for two; with all data and with none
]
ALL_POLICIES: tuple[Policy, ...] = get_args(Policy)
RANDOM_DRAWS = 16

_LabelledMasks: TypeAlias = Iterator[tuple[str, int]]
LabelByMask: TypeAlias = dict[int, str]  # mask of survivors, and how it was chosen
_TreeKey: TypeAlias = bytes | frozenset[tuple[str, "_TreeKey"]]


class _PendingChange(NamedTuple):
    node: Node
    change: FileChange | NameChange
    description: str


class _FileAtCrash:
    """A file at this instant: its durable bytes, its pending changes, and a cache of its contents."""

    def __init__(self, node: FileNode) -> None:
        self._contents = {0: node.durable}
        self._changes: list[tuple[int, FileChange]] = []
        self._mask = 0
        self.modified_ms = node.modified_ms

    def add(self, bit: int, change: FileChange) -> None:
        self._changes.append((bit, change))
        self._mask |= bit

    def surviving(self, mask: int) -> bytes:
        mask &= self._mask
        found = self._contents.get(mask)
        if found is None:
            content = bytearray(self._contents[0])
            apply_changes(content, (change for bit, change in self._changes if mask & bit))
            found = self._contents[mask] = bytes(content)
        return found


class _DirAtCrash:
    """A directory at this instant."""

    def __init__(self, node: DirNode) -> None:
        self._durable = node.durable  # a sync puts another in its place and leaves this one as it is
        self._changes: list[tuple[int, NameChange]] = []
        self.modified_ms = node.modified_ms

    def add(self, bit: int, change: NameChange) -> None:
        self._changes.append((bit, change))

    def surviving(self, mask: int) -> dict[str, Node]:
        if not self._changes:
            return self._durable
        entries = self._durable.copy()
        for bit, change in self._changes:
            if mask & bit:
                apply_name_change(entries, change)
        return entries


class CrashPoint:
    """A snapshot of a disk: later operations do not change its images.

    `advisory_files` are names of files that only prove what others contain. Choices that differ only in the bytes of
    these are one choice.
    """

    def __init__(self, root: DirNode, advisory_files: frozenset[str] = frozenset()) -> None:
        self._root = root
        nodes: dict[Node, str] = {}
        _collect_nodes(root, "", nodes)
        self._files = {node: _FileAtCrash(node) for node in nodes if isinstance(node, FileNode)}
        self._dirs = {node: _DirAtCrash(node) for node in nodes if isinstance(node, DirNode)}
        self._pending = sorted(
            (
                _PendingChange(node, change, _describe_change(change, path))
                for node, path in nodes.items()
                for change in node.pending
            ),
            key=lambda pending: pending.change.serial,
        )
        self._data_mask = 0  # the mask of all pieces
        self._advisory_mask = 0  # the mask of all changes of advisory files
        self._name_logs: dict[Node, list[int]] = {}  # the numbers of a log's operations
        self._size_logs: dict[Node, list[int]] = {}
        for number, (node, change, _) in enumerate(self._pending):
            if isinstance(change, SectorWrite):
                self._data_mask |= 1 << number
            else:
                logs = self._size_logs if isinstance(change, Resize) else self._name_logs
                logs.setdefault(node, []).append(number)
            if isinstance(change, SectorWrite | Resize):
                assert isinstance(node, FileNode)
                self._files[node].add(1 << number, change)
                if nodes[node].rpartition("/")[2] in advisory_files:
                    self._advisory_mask |= 1 << number
            else:
                assert isinstance(node, DirNode)
                self._dirs[node].add(1 << number, change)
        # What surely survives if an operation does, and what is lost with it: its log up to, or from, itself.
        self._required_masks = [1 << number for number in range(len(self._pending))]
        self._dependent_masks = self._required_masks.copy()
        for log in (*self._size_logs.values(), *self._name_logs.values()):
            for before, number in pairwise(log):
                self._required_masks[number] |= self._required_masks[before]
            for number, after in pairwise(reversed(log)):
                self._dependent_masks[after] |= self._dependent_masks[number]

    @property
    def full_mask(self) -> int:
        """The mask under which every issued operation survives."""
        return (1 << len(self._pending)) - 1

    def choices(self, policies: Iterable[Policy], random: Random, limit: int | None = None) -> LabelByMask:
        """Return the masks of a policy, each once. Over `limit` a sample is drawn, always with the two extremes."""
        found: LabelByMask = {}
        known: set[int] = set()
        for policy in policies:
            for label, mask in _POLICIES[policy](self, random):
                if mask | self._advisory_mask not in known or mask == self.full_mask:
                    known.add(mask | self._advisory_mask)
                    found.setdefault(mask, label)
        if limit is None or len(found) <= limit:
            return found
        extremes = [mask for mask in (0, self.full_mask) if mask in found][:limit]
        rest = [mask for mask in found if mask not in extremes]
        kept = {*extremes, *random.sample(rest, limit - len(extremes))}
        return {mask: label for mask, label in found.items() if mask in kept}

    def random_mask(self, random: Random) -> int:
        """Draw survivors at random: any subset of the pieces, any prefix of every log."""
        mask = random.getrandbits(len(self._pending) + 1) & self._data_mask
        for log in (*self._size_logs.values(), *self._name_logs.values()):
            mask |= self._log_prefix(log, random.randint(0, len(log)))
        return mask

    def trees(self, choices: LabelByMask) -> Iterator[tuple[str, DirNode]]:
        """Yield the tree of each mask; equal trees once, under the first label."""
        seen: set[_TreeKey] = set()
        for mask, label in choices.items():
            tree, key = self._build(self._root, mask, {})
            if key not in seen:
                seen.add(key)
                yield label, tree

    def tree(self, mask: int) -> DirNode:
        """Build the tree that a restart finds when these operations survive."""
        return self._build(self._root, mask, {})[0]

    def _build(self, node: DirNode, mask: int, files: dict[FileNode, FileNode]) -> tuple[DirNode, _TreeKey]:
        """`files`: those that were built, for files with two names."""
        held = self._dirs[node]
        built = DirNode(held.modified_ms)
        keys: list[tuple[str, _TreeKey]] = []
        for name, child in held.surviving(mask).items():
            if isinstance(child, FileNode):
                file = self._files[child]
                content = file.surviving(mask)
                if child not in files:
                    files[child] = FileNode(content, file.modified_ms)
                built.live[name] = files[child]
                keys.append((name, content))
            else:
                built.live[name], key = self._build(child, mask, files)
                keys.append((name, key))
        built.durable = built.live.copy()
        # Bytes remember their hash and images share most of them, so this costs little more than the walk.
        return built, frozenset(keys)

    def _log_prefix(self, log: list[int], count: int) -> int:
        return self._required_masks[log[count - 1]] if count else 0

    def _none(self, _: Random) -> _LabelledMasks:
        yield "none", 0

    def _all(self, _: Random) -> _LabelledMasks:
        yield "all", self.full_mask

    def _prefixes(self, _: Random) -> _LabelledMasks:
        yield f"prefixes 0/{len(self._pending)}", 0
        for count, pending in enumerate(self._pending, 1):
            yield f"prefixes {count}/{len(self._pending)}, up to {pending.description}", (1 << count) - 1

    def _all_but_one(self, _: Random) -> _LabelledMasks:
        for pending, lost in zip(self._pending, self._dependent_masks, strict=True):
            yield f"all_but_one, not {pending.description}", self.full_mask ^ lost

    def _only_one(self, _: Random) -> _LabelledMasks:
        for pending, kept in zip(self._pending, self._required_masks, strict=True):
            yield f"only_one, {pending.description}", kept

    def _torn_last(self, _: Random) -> _LabelledMasks:
        changes = [(number, change) for number, (_, change, _) in enumerate(self._pending)]
        pieces = [(number, change) for number, change in changes if isinstance(change, SectorWrite)]
        last = max((piece.write for _, piece in pieces), default=0)
        pieces = [(number, piece) for number, piece in pieces if piece.write == last]
        sizes = [(number, size) for number, size in changes if isinstance(size, Resize) and size.write == last]
        lost = sum(1 << number for number, _ in pieces)
        for number, piece in pieces:
            yield f"torn_last at byte {piece.pos}, size kept", self.full_mask ^ lost
            beyond = [at for at, size in sizes if size.size > piece.pos]
            if beyond:
                sizes_lost = self._dependent_masks[beyond[0]]
                yield f"torn_last at byte {piece.pos}, size cut", self.full_mask ^ lost ^ sizes_lost
            lost ^= 1 << number

    def _random(self, random: Random) -> _LabelledMasks:
        for number in range(1, RANDOM_DRAWS + 1):
            yield f"random {number}/{RANDOM_DRAWS}", self.random_mask(random)

    def _directories(self, _: Random) -> _LabelledMasks:
        logs = list(self._name_logs.values())
        logs += [[] for _ in range(2 - len(logs))]
        names = sum(self._log_prefix(log, len(log)) for log in logs)
        for data, kept in (("all", self.full_mask ^ names), ("none", 0)):
            for one, other in combinations(logs, 2):
                others = names ^ self._log_prefix(one, len(one)) ^ self._log_prefix(other, len(other))
                for count, count_other in product(range(len(one) + 1), range(len(other) + 1)):
                    label = f"directories {count}/{len(one)} and {count_other}/{len(other)}, {data} data"
                    yield label, kept | others | self._log_prefix(one, count) | self._log_prefix(other, count_other)


_POLICIES: dict[Policy, Callable[[CrashPoint, Random], _LabelledMasks]] = {
    "none": CrashPoint._none,
    "all": CrashPoint._all,
    "prefixes": CrashPoint._prefixes,
    "all_but_one": CrashPoint._all_but_one,
    "only_one": CrashPoint._only_one,
    "torn_last": CrashPoint._torn_last,
    "random": CrashPoint._random,
    "directories": CrashPoint._directories,
}


def _collect_nodes(node: Node, path: str, nodes: dict[Node, str]) -> None:
    """Return every inode that an image can contain, with a path as its label."""
    if node in nodes:
        return
    nodes[node] = path
    if isinstance(node, DirNode):
        links = ((change.name, change.node) for change in node.pending if isinstance(change, Link))
        for name, child in (*node.durable.items(), *links):
            _collect_nodes(child, f"{path}/{name}" if path else name, nodes)


def _describe_change(change: FileChange | NameChange, path: str) -> str:
    """Describe a pending operation for the label of an image."""
    if isinstance(change, SectorWrite):
        return f"{path}@{change.pos}+{len(change.data)}"
    if isinstance(change, Resize):
        return f"size {change.size} of {path}"
    if isinstance(change, Move):
        return f"move {change.old} -> {change.new} in {path or '.'}"
    return f"{type(change).__name__.lower()} {change.name} in {path or '.'}"
