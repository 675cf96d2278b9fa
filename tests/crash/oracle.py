"""What a crashed log may and must hold. Shares no code with the library it judges."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Oracle:
    """`must`: acked under a durable policy and not taken away since. `may`: every value a seq was ever offered,
    unless it was taken away for good. What survives lies between the two."""

    must: dict[int, bytes] = field(default_factory=dict)
    may: dict[int, set[bytes]] = field(default_factory=dict)
    next_min: int = 0  # numbering never falls below this
    whole: list[range] = field(default_factory=list)  # batches that are there in full or not at all

    def on_write_started(self, seq: int, data: bytes) -> None:
        """Said before a write: from now on the record may be there."""
        self.may.setdefault(seq, set()).add(data)

    def on_acked(self, seqs: Iterable[int], datas: Iterable[bytes]) -> None:
        """Said after a durable ack: from now on it must be."""
        for seq, data in zip(seqs, datas, strict=True):
            self.must[seq] = data
            self.may[seq] = {data}
            self.next_min = max(self.next_min, seq + 1)

    def on_removal_started(self, seqs: Iterable[int]) -> None:
        """Said before a removal: these may be there or not."""
        for seq in list(seqs):
            self.must.pop(seq, None)

    def on_removed(self, seqs: Iterable[int]) -> None:
        """Said after a removal: these must be gone."""
        for seq in list(seqs):
            self.must.pop(seq, None)
            self.may.pop(seq, None)

    def on_truncate_started(self, mark: int) -> None:
        self.whole = []
        self.on_removal_started(seq for seq in self.may if seq >= mark)
        self.next_min = min(self.next_min, mark)

    def on_truncated(self, mark: int) -> None:
        self.on_removed(seq for seq in self.may if seq >= mark)
        self.whole = []  # a batch that was cut in two is no longer one

    def judge(self, survivors: dict[int, bytes], next_seq: int) -> str | None:
        """What is wrong with these survivors, or None."""
        for seq, data in self.must.items():
            if seq not in survivors:
                return f"seq {seq} was acked and is lost"
            if survivors[seq] != data:
                return f"seq {seq} was acked as {data[:20]!r} and reads {survivors[seq][:20]!r}"
        for seq, data in survivors.items():
            if data not in self.may.get(seq, ()):
                return f"seq {seq} reads {data[:20]!r}, which nobody wrote there"
        for batch in self.whole:
            there = [seq for seq in batch if seq in survivors]
            known = [seq for seq in batch if seq in self.may]
            if there and len(there) < len(known):
                return f"of the batch {batch.start} to {batch.stop - 1} only {there} survived"
        if next_seq < self.next_min:
            return f"the next seq is {next_seq}, but {self.next_min - 1} was handed out already"
        return None
