"""[policy] Batches that their writer numbers, each written once whatever is repeated.

    query id     number            sum         verdict
    another      any               any         refused: the checkpoint was deleted or replaced
    the same     the newest        any         a replay: the range it was given then
    any          known             the same    a replay
    any          known             another     refused: the batch was written with other records
    any          below a known one             refused: not written, later ones were; a checkpoint was set back
    any          above all                     new

A writer is a name that goes on across restarts, such as that of a streaming query. The query id tells two queries of
one name apart: Spark keeps it in the checkpoint. A query that is restarted repeats at most its newest batch, whose
records may have changed at the source since; the first write counts. Without a query id, on either side, only the sum
decides.

The last `KEPT` batches of a writer are known; one that is older counts as below. What a writer of one batch (`ONCE`)
has written is forgotten after the next `KEPT_ONCE`: its repetitions come within moments.
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
_QUERY_ID_BYTES_MAX: Final = 128
_NUMBER_MAX: Final = (1 << 63) - 1
_WORD: Final = 1 << 64


class Written(NamedTuple):
    """One batch: where it lies and what is in it."""

    first: int
    last: int
    sum: tuple[int, int]
    query_id: str = ""  # "": not known


Numbers: TypeAlias = dict[str, dict[int, Written]]  # by writer, then by number, rising


def known(
    numbers: Numbers, topic: str, writer: str, number: int, total: tuple[int, int], query_id: str = ""
) -> Written | None:
    """The batch, if it was written before; None: it is new. BatchConflict where it can be neither."""
    batches = numbers.get(writer)
    if not batches:
        return None
    found, newest = batches.get(number), next(reversed(batches))
    before = batches[newest].query_id
    if before and query_id and before != query_id:
        reason = (
            f"comes from the query {query_id}, and the batches up to {newest} were written by the query {before}: its "
            "checkpoint was deleted or replaced, or two queries have this name"
        )
        raise BatchConflict(topic, writer, number=number, newest=newest, reason=reason)
    if found is None and number > newest:
        return None
    if found is not None and (found.sum == total or (number == newest and before and before == query_id)):
        return found
    reason = (
        f"was not written before, and batch {newest} was"
        if found is None
        else f"was written before, at seqs {found.first} to {found.last}, with other records"
    )
    raise BatchConflict(topic, writer, number=number, newest=newest, reason=reason)


def check(numbers: Numbers, writer: object, number: object, total: object, query_id: object = "") -> None:
    """Refuse what names no batch, and one more writer than are kept."""
    if not isinstance(query_id, str) or len(query_id.encode("utf-8", "surrogatepass")) > _QUERY_ID_BYTES_MAX:
        raise BadInput(
            f"a query id is text of at most {_QUERY_ID_BYTES_MAX} bytes, not {query_id!r:.200}; nothing was written"
        )
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
    before = batches[next(reversed(batches))].query_id if batches else ""
    batches[body.number] = Written(body.first, body.last, body.sum, body.query_id or before)
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
            found.append(WriterRow(writer, told, batches[told[-1][0]].query_id))
    return tuple(found)


def of_rows(given: Iterable[WriterRow]) -> Numbers:
    return {
        row.writer: {
            number: Written(first, last, (high, low), row.query_id) for number, first, last, high, low in row.batches
        }
        for row in given
    }
