"""[policy] Batches that their writer numbers, each written once whatever is repeated.

    number       sum         verdict
    known        the same    a replay: the range it was given then
    known        another     refused: the batch was written with other records
    below a known one        refused: it was never written, and later ones were; a checkpoint was set back
    above all                new

A writer is whoever goes on under one name: a streaming query, across its restarts. Its last `KEPT` batches are known;
one that is older counts as below. What a writer of one batch (`ONCE`) has written is forgotten after the next
`KEPT_ONCE`: its repetitions come within moments.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple, TypeAlias

from tidelog.engine.manifest import WriterRow
from tidelog.errors import BadInput, BatchConflict
from tidelog.formats.bodies import NumberedBatch

KEPT: Final = 256
KEPT_ONCE: Final = 16
WRITERS_MAX: Final = 1024
ONCE: Final = "once:"  # what the name of a writer of one batch begins with
_NAME_BYTES_MAX: Final = 1024
_NUMBER_MAX: Final = (1 << 63) - 1
_WORD: Final = 1 << 64


class Written(NamedTuple):
    """One batch: where it lies and what is in it."""

    first: int
    last: int
    sum: tuple[int, int]


Numbers: TypeAlias = dict[str, dict[int, Written]]  # by writer, then by number, rising


def known(numbers: Numbers, topic: str, writer: str, number: int, total: tuple[int, int]) -> Written | None:
    """The batch, if it was written before; None: it is new. BatchConflict where it can be neither."""
    batches = numbers.get(writer)
    if not batches:
        return None
    found, newest = batches.get(number), next(reversed(batches))
    if found is None and number > newest:
        return None
    if found is not None and found.sum == total:
        return found
    reason = (
        f"was not written before, and batch {newest} was"
        if found is None
        else f"was written before, at seqs {found.first} to {found.last}, with other records"
    )
    raise BatchConflict(topic, writer, number=number, newest=newest, reason=reason)


def check(numbers: Numbers, writer: object, number: object, total: object) -> None:
    """Refuse what names no batch, and one more writer than are kept."""
    if not isinstance(writer, str) or not 0 < len(writer.encode("utf-8", "surrogatepass")) <= _NAME_BYTES_MAX:
        raise BadInput(
            f"a writer is named by text of 1 to {_NAME_BYTES_MAX} bytes, not {writer!r:.80}; nothing was done"
        )
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= _NUMBER_MAX:
        raise BadInput(f"a batch has a whole number from 0, not {number!r:.80}; nothing was written")
    words = total if isinstance(total, tuple) else ()
    if len(words) != 2 or not all(type(word) is int and 0 <= word < _WORD for word in words):
        raise BadInput(f"the sum of a batch is two words of 64 bits, not {total!r:.80}; nothing was written")
    if writer not in numbers and sum(not name.startswith(ONCE) for name in numbers) >= WRITERS_MAX:
        raise BadInput(
            f"{WRITERS_MAX} writers have numbered their batches here, {writer!r:.80} is another; nothing was written, "
            "write under a name that is known or into another topic"
        )


def apply(numbers: Numbers, body: NumberedBatch) -> None:
    """Remember a batch that is written. Used by the committer and by replay, which may say it again."""
    batches = numbers.pop(body.writer, {})
    batches[body.number] = Written(body.first, body.last, body.sum)
    kept = sorted(batches)[-KEPT:]
    numbers[body.writer] = {number: batches[number] for number in kept}
    once = [name for name in numbers if name.startswith(ONCE)]
    for name in once[:-KEPT_ONCE]:
        del numbers[name]


def rows(numbers: Numbers, head: int) -> tuple[WriterRow, ...]:
    """For the manifest, which holds records up to `head`: a batch behind it is the WAL's to tell of."""
    found = []
    for writer, batches in numbers.items():
        told = tuple(
            (number, each.first, each.last, *each.sum) for number, each in batches.items() if each.last <= head
        )
        if told:
            found.append(WriterRow(writer, told))
    return tuple(found)


def of_rows(given: Iterable[WriterRow]) -> Numbers:
    return {
        row.writer: {number: Written(first, last, (high, low)) for number, first, last, high, low in row.batches}
        for row in given
    }
