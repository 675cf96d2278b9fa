"""[shell] Everything that lies under channels/, held against everything that vouches for it. Changes nothing.

    metadata.bin         its own checksum, the layout, and that it lies where its name says
    <base>.log .idx      every message against its checksum, the index against the messages
    cursor.bin           of a fifo channel: its checksum, and that it lies inside what the log holds
    deleted, no metadata a note: the next start removes it

A writer may go on: what looks damaged is looked at again, and what was removed since is not held against it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

from tidelog.channels.metrics import Metrics
from tidelog.channels.store import CURSOR, DIRECTORY, METADATA, ChannelStore
from tidelog.clock import SystemClock
from tidelog.commitlog import verify
from tidelog.disk.atomic import read_all
from tidelog.disk.posix import PosixDisk
from tidelog.disk.seam import Disk, join
from tidelog.engine.check import Finding
from tidelog.errors import Corrupt, Error
from tidelog.formats import log_manifest
from tidelog.formats.channel import Meta, decode_cursor

_LOOKS: Final = 3


class Looked(NamedTuple):
    """What was found in some channels, and how much of them there is."""

    findings: tuple[Finding, ...]
    channels: int
    messages: int
    bytes: int


class ChannelCheck:
    """Iterate for the findings; how much was looked at is known after the loop. `only`: in these channels."""

    def __init__(self, root: str, *, disk: Disk | None = None, only: Collection[str] | None = None) -> None:
        self._only = only
        self._disk = disk or PosixDisk()
        self._store = ChannelStore(self._disk, root.rstrip("/") or "/", Metrics(SystemClock()))
        self.channels = self.messages = self.bytes = 0
        self._seen = (0, 0)  # messages and bytes of the last look at one channel

    def __iter__(self) -> Iterator[Finding]:
        live = self.live()
        if self._only is None:
            yield from self.leftovers(live)
        for name in live if self._only is None else self._only:
            yield from self._settled(name)
            self.channels += 1
            self.messages, self.bytes = self.messages + self._seen[0], self.bytes + self._seen[1]

    def live(self) -> list[str]:
        """The names of the directories that hold channels."""
        return list(self._store.listed(sweep=False).live)

    def leftovers(self, live: Collection[str]) -> Iterator[Finding]:
        for name in self._names():
            if name not in live:
                yield Finding("leftover", _inside(name), None, "of a channel that ended, or was never made", False)

    def _names(self) -> list[str]:
        """Directories that could be channels'."""
        if self._disk.stat(self._store.root) is None:
            return []
        return [name for name in self._disk.names(self._store.root) if self._store.is_ours(name)]

    def _settled(self, name: str) -> list[Finding]:
        """What is found twice alike, or is no damage."""
        before: list[Finding] | None = None
        for _ in range(_LOOKS):
            found = list(self._looked(name))
            if found == before or not any(finding.damage for finding in found):
                return found
            if not self._store.is_live(name):
                return []  # it ended meanwhile
            before = found
        return before or []

    def _looked(self, name: str) -> Iterator[Finding]:
        self._seen = (0, 0)
        try:
            meta = self._store.load(name)
        except Error as error:
            pos, said = (error.pos, error.reason) if isinstance(error, Corrupt) else (None, str(error))
            yield Finding("channel", _inside(name, METADATA), pos, said)
            return
        bounds = (1, 1)
        directory = self._store.directory(name)
        if any(file.endswith((".log", log_manifest.NAME)) for file in self._disk.names(directory)):
            try:
                verdict = verify(directory, "narwhal", disk=self._disk)
            except Error as error:
                yield Finding("messages", _inside(name), None, str(error), topic=meta.handler)
                return
            self._seen = (verdict.records, verdict.bytes)
            bounds = (verdict.first, verdict.stop)
            for file, fault in verdict.damage:
                lost = range(fault.seq, max(fault.resume, fault.seq))
                yield Finding("messages", _inside(name, file), fault.pos, fault.reason, True, meta.handler, lost)
            for note in verdict.notes:
                yield Finding("messages", _inside(name), None, note, False, meta.handler)
        if meta.config.type == "fifo":
            yield from self._cursor(name, meta, *bounds)

    def _cursor(self, name: str, meta: Meta, first: int, stop: int) -> Iterator[Finding]:
        content = read_all(self._disk, join(self._store.directory(name), CURSOR))
        found = None if content is None else decode_cursor(content)
        if content is None:
            said = "it is missing"
        elif found is None:
            said = "it is damaged"
        elif not first <= found <= stop:
            said = f"it says {found}, and the log holds [{first}, {stop})"
        else:
            return
        said += "; its owner clears the channel, or restore it"
        yield Finding("cursor", _inside(name, CURSOR), None, said, topic=meta.handler)


def looked(root: str, names: Collection[str]) -> Looked:
    """Examine these channels, for who shares the work out. What ended since it was listed is not held against it."""
    check = ChannelCheck(root, only=names)
    findings = tuple(check)
    return Looked(findings, check.channels, check.messages, check.bytes)


def _inside(name: str, file: str = "") -> str:
    return f"{DIRECTORY}/{name}" + (f"/{file}" if file else "")
