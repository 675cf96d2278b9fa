"""What opening an engine found and did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

from tidelog.wal import Replay, WalFile

Kind: TypeAlias = (  # what an examination finds something about
    Literal["snapshot", "wal", "data", "index", "footer", "tags", "deletions", "counts", "start", "leftover"]
    | Literal["channel", "messages", "cursor"]  # of channels, which `channels/check.py` looks at
)
Progress = Callable[[str, int, int], None]  # what, how much of it is done, of how much
READING: Final = "reading the WAL"
REPLAYING: Final = "replaying topics"
PASSES: Final = (READING, REPLAYING)  # of an opening, in their order: all that is told of


@dataclass(slots=True)
class Report:
    """What opening found and did. Printed by the command line, asserted by tests."""

    snapshot: int = 0
    topics: int = 0
    frames: int = 0  # replayed from the WAL
    cut: list[str] = field(default_factory=list)  # unfinished writes: nothing acknowledged was lost with them
    damage: list[str] = field(default_factory=list)  # something acknowledged may be lost
    rebuilt: list[str] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    snapshots_skipped: list[str] = field(default_factory=list)
    lost: bool = False  # part of the damage is in the WAL: a writer opens only when that is accepted
    padded: dict[str, int] = field(default_factory=dict)  # topic → seqs that were reserved and are holes now
    troubles: list[str] = field(default_factory=list)  # what background work ran into since, the last hundred

    @property
    def clean(self) -> bool:
        """Nothing had to be done and nothing is wrong."""
        return not (self.cut or self.damage or self.rebuilt or self.quarantined or self.snapshots_skipped)

    def trouble(self, error: Exception) -> None:
        """Background work ran into this, and will try again."""
        self.troubles.append(str(error))
        del self.troubles[:-100]

    def lines(self) -> list[str]:
        """The report in words, one finding a line."""
        return [
            *(f"cut an unfinished write: {what}" for what in self.cut),
            *(f"damage: {what}" for what in self.damage),
            *(f"rebuilt {what}" for what in self.rebuilt),
            *(f"swept {what}" for what in self.swept),
            *(f"kept the cut bytes in {what}" for what in self.quarantined),
            *(f"skipped a snapshot: {what}" for what in self.snapshots_skipped),
            *(f"{topic}: {count} reserved seqs became holes" for topic, count in self.padded.items()),
        ]


class Group(NamedTuple):
    key: str
    replay: Replay
    files: list[WalFile]
