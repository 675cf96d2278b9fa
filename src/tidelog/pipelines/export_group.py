"""The consumer group of an export: retention holds what the table does not have, and `tidelog group` shows the lag.

The position of an export is in its table. The group follows it: it is set when an export begins and after each commit.
A process that dies in between leaves the group where it was before the commit, so more than needed is held until the
next run."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Final

from tidelog.addresses import Location
from tidelog.client.database import open_location
from tidelog.errors import BadInput

HOLD_BYTES: Final = 1 << 30
_one_opens_a_directory = Lock()  # exports of several topics run in threads, and a directory has one writer


@dataclass(frozen=True)
class ExportGroup:
    location: Location
    topic: str
    name: str
    hold_bytes: int = HOLD_BYTES

    def __post_init__(self) -> None:
        if self.location.is_object_store:
            raise BadInput(
                f"{self.location.address} is an object store, which has no groups to move; nothing was written, name "
                "the server or the directory of the topic"
            )

    def begin(self, next_seq: int) -> None:
        """Create the group with its hold, or set both, at the position of the table."""
        with _one_opens_a_directory, open_location(self.location) as log:
            group = log.topic(self.topic, create=False).group(self.name)
            group.hold(self.hold_bytes)
            group.reset(max(next_seq - 1, 0))

    def move(self, next_seq: int) -> None:
        """Set the group to the position of the table."""
        with _one_opens_a_directory, open_location(self.location) as log:
            log.topic(self.topic, create=False).group(self.name).reset(max(next_seq - 1, 0))
