"""What opening an engine found and did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

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
    """What opening found and did. Printed by the command line, asserted by tests.

    Bytes of the WAL that are not replayed are one of two. `cut`: the end of a group, above the last position that a
    mark or a snapshot says was synced. An unfinished write, as far as the bytes tell: a record that was synced after
    the last mark, and damaged before the next start, looks the same. `damage` with `lost`: below that position.
    Acknowledged records were there, or may have been, and what else was in the WAL is served.
    """

    snapshot: int = 0
    topics: int = 0
    frames: int = 0  # replayed from the WAL
    cut: list[str] = field(default_factory=list)  # ends of WAL groups that no sync is known to have covered
    damage: list[str] = field(default_factory=list)  # something acknowledged may be lost
    lost_seqs: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # topic → records lost in the WAL, by seq
    rebuilt: list[str] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)  # files that hold what was cut or lost, unchanged
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
            *(f"{topic}: lost seqs {_ranges(found)}" for topic, found in self.lost_seqs.items()),
            *(f"rebuilt {what}" for what in self.rebuilt),
            *(f"swept {what}" for what in self.swept),
            *(f"kept the bytes in {what}" for what in self.quarantined),
            *(f"skipped a snapshot: {what}" for what in self.snapshots_skipped),
            *(f"{topic}: {count} reserved seqs became holes" for topic, count in self.padded.items()),
        ]


def _ranges(found: list[tuple[int, int]]) -> str:
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in found)
