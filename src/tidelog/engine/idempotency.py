"""[policy] The idempotency keys of one topic: a write that is sent again gets the first one's answer.

                  hold                    remember
    (unknown) ───────────▶ Pending(token) ──────────▶ Done(outcome, at_ms)
        ▲                        │                          │
        └──────── forget ────────┘                          │
        └───────────────── now − at_ms > window ────────────┘

While the first write is under way, a second one with its key is given its token to wait on; it
shares its fate. A write that failed is forgotten, so that sending it again may succeed. What was
written is not compared: the key alone decides.

A key lies in the WAL in front of the records that were written under it (`WriteKey`), in the same
commit, and from the next checkpoint on in the manifest's row of the topic. So after a restart it is
known if and only if its records survived, for the rest of its window by the wall clock. Records of
an ephemeral topic do not, and neither do their keys. At most `KEYS_MAX` keys of a topic are known,
those of the newest writes.

The owner's lock guards all of it. Time comes in and should be of a clock that does not go back:
whether a key is found is decided by its own time alone, but keys are forgotten oldest write first.

[policy] Batches that their writer numbers, each written once whatever is repeated.

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

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from tidelog.clock import Clock
from tidelog.engine.manifest import WriterRow
from tidelog.engine.results import Appended
from tidelog.errors import BadInput, BatchConflict
from tidelog.formats.control_frames import NumberedBatch

P = TypeVar("P")  # what a second caller waits on
T = TypeVar("T")  # what it is answered

IDEMPOTENCY_KEYS_MAX: Final = 1 << 18  # of one topic: two minutes of 2,000 keyed writes a second, about 80 MB
FORGET_KEYS_MAX: Final = 64  # keys a call forgets at most: no write pays for a burst two minutes ago


class PendingWrite(NamedTuple, Generic[P]):
    """The write of this key is under way."""

    future: P


class AckedWrite(NamedTuple, Generic[T]):
    """The write of this key was acked."""

    outcome: T
    at_ms: int
    is_persistent: bool = True  # its records outlive the process


class IdempotencyWindow(Generic[P, T]):
    """Key → what became of its write. Every call is bounded work, however many keys there are."""

    def __init__(self) -> None:
        self._pending: dict[str, P] = {}
        # Not a dict: finding its first key walks over all that were taken from its front.
        self._done: OrderedDict[str, AckedWrite[T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pending) + len(self._done)

    def lookup(self, key: str, now_ms: int, window_ms: int) -> PendingWrite[P] | AckedWrite[T] | None:
        """What is known of this key; None: the write is the first one, or the first within the window."""
        if key in self._pending:
            return PendingWrite(self._pending[key])
        done = self._done.get(key)
        return done if done is not None and now_ms - done.at_ms <= window_ms else None

    def begin(self, key: str, future: P) -> None:
        """The caller's write goes ahead under this key. Only after a lookup that found nothing."""
        assert key not in self._pending, "another write of this key is under way"
        self._done.pop(key, None)  # outlived its window
        self._pending[key] = future

    def complete(self, key: str, outcome: T, now_ms: int, *, persistent: bool = True) -> None:
        """The write was acked now; its window begins."""
        self._pending.pop(key, None)
        self._done[key] = AckedWrite(outcome, now_ms, persistent)
        self._done.move_to_end(key)
        if len(self._done) > IDEMPOTENCY_KEYS_MAX:
            self._done.popitem(last=False)

    def persistent_keys(self) -> list[tuple[str, AckedWrite[T]]]:
        """Every acked key whose records outlive the process, oldest first: a copy, for a reader without the lock."""
        return [each for each in self._done.items() if each[1].is_persistent]

    def abort(self, key: str) -> None:
        """The held write failed: the next one of this key is the first."""
        self._pending.pop(key, None)

    def forget_expired(self, now_ms: int, window_ms: int, count_max: int = FORGET_KEYS_MAX) -> int:
        """Let go of keys whose window is over, oldest first, `most` at once; return how many.

        Call it with every write that brings a key: it forgets faster than writes can remember.
        """
        count = 0
        while count < count_max and self._done:
            key = next(iter(self._done))
            if now_ms - self._done[key].at_ms <= window_ms:
                break
            del self._done[key]
            count += 1
        return count


# ── over a restart ────────────────────────────────────────────────────────────────────────────────


def encode_keys(
    kept: Iterable[tuple[str, AckedWrite[Appended]]], head: int, clock: Clock, window_ms: int
) -> tuple[tuple[str, int, int, int], ...]:
    """Keys for the manifest, which holds records up to `head`: key, first seq, last seq, and when it was acked, by the
    wall clock. A key of later records is the WAL's to tell of."""
    now_ms, ago_ms = clock.monotonic_ms(), clock.now_us() // 1000 - clock.monotonic_ms()
    return tuple(
        (key, done.outcome.first_seq, done.outcome.last_seq, max(done.at_ms + ago_ms, 0))
        for key, done in kept
        if done.outcome.last_seq <= head and now_ms - done.at_ms <= window_ms
    )


def restore_keys(
    window: IdempotencyWindow[P, Appended], found: Iterable[tuple[str, int, int, int]], clock: Clock
) -> None:
    """Remember keys that a restart found, with the age that they have by the wall clock: 0 where that went back."""
    now_ms, wall_ms = clock.monotonic_ms(), clock.now_us() // 1000
    for key, first, last, acked_ms in found:
        window.complete(key, Appended(first, last, last), now_ms - max(wall_ms - acked_ms, 0))


BATCHES_KEPT: Final = 256
SINGLE_BATCH_WRITERS_KEPT: Final = 16
PRODUCERS_MAX: Final = 1024
SINGLE_BATCH_PREFIX: Final = "once:"  # what the name of a writer of one batch begins with
_NAME_BYTES_MAX: Final = 1024
_QUERY_ID_BYTES_MAX: Final = 128
_NUMBER_MAX: Final = (1 << 63) - 1
_U64_LIMIT: Final = 1 << 64


class BatchRange(NamedTuple):
    """One batch: where it lies and what is in it."""

    first: int
    last: int
    sum: tuple[int, int]
    query_id: str = ""  # "": not known


ProducerBatches: TypeAlias = dict[str, dict[int, BatchRange]]  # by writer, then by number, rising


def find_written_batch(
    numbers: ProducerBatches, topic: str, writer: str, number: int, total: tuple[int, int], query_id: str = ""
) -> BatchRange | None:
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


def check_producer_batch(
    numbers: ProducerBatches, writer: object, number: object, total: object, query_id: object = ""
) -> None:
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
    if len(words) != 2 or not all(type(word) is int and 0 <= word < _U64_LIMIT for word in words):
        raise BadInput(f"the sum of a batch is two words of 64 bits, not {total!r:.80}; nothing was written")
    if writer not in numbers and sum(not name.startswith(SINGLE_BATCH_PREFIX) for name in numbers) >= PRODUCERS_MAX:
        raise BadInput(
            f"{PRODUCERS_MAX} writers have numbered their batches here, {writer!r:.80} is another; nothing was "
            f"written, "
            "write under a name that is known or into another topic"
        )


def record_batch(numbers: ProducerBatches, body: NumberedBatch) -> None:
    """Remember a batch that is written. Used by the committer and by replay, which may say it again."""
    batches = numbers.pop(body.writer, {})
    before = batches[next(reversed(batches))].query_id if batches else ""
    batches[body.number] = BatchRange(body.first, body.last, body.sum, body.query_id or before)
    kept = sorted(batches)[-BATCHES_KEPT:]
    numbers[body.writer] = {number: batches[number] for number in kept}
    once = [name for name in numbers if name.startswith(SINGLE_BATCH_PREFIX)]
    for name in once[:-SINGLE_BATCH_WRITERS_KEPT]:
        del numbers[name]


def encode_producers(numbers: ProducerBatches, head: int) -> tuple[WriterRow, ...]:
    """For the manifest, which holds records up to `head`: a batch behind it is the WAL's to tell of."""
    found = []
    for writer, batches in numbers.items():
        told = tuple(
            (number, each.first, each.last, *each.sum) for number, each in batches.items() if each.last <= head
        )
        if told:
            found.append(WriterRow(writer, told, batches[told[-1][0]].query_id))
    return tuple(found)


def decode_producers(given: Iterable[WriterRow]) -> ProducerBatches:
    return {
        row.writer: {
            number: BatchRange(first, last, (high, low), row.query_id) for number, first, last, high, low in row.batches
        }
        for row in given
    }
