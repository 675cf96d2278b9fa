"""Write-once guarantees: idempotency keys, and batches numbered by their producer.

The owner's lock guards all of it.

A key is stored in the WAL before the records that were written under it (`WriteKey`), in the same commit, and from the
next checkpoint on in the manifest's row of the topic. So after a restart it is known if and only if its records
survived, for the rest of its window by the wall clock. Keys of ephemeral topics do not survive, like their records.

A producer is a name that persists across restarts, such as that of a streaming query. The query id distinguishes two
queries with one name: Spark keeps it in the checkpoint. A restarted query repeats at most its newest batch, whose
records may have changed at the source since; the first write counts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from tidelog.clock import Clock
from tidelog.engine.manifest import WriterRow
from tidelog.engine.results import Appended
from tidelog.errors import BadInput, BatchConflict
from tidelog.formats.control_frames import NumberedBatch

P = TypeVar("P")  # what a second caller waits for
T = TypeVar("T")  # the outcome it gets

IDEMPOTENCY_KEYS_MAX: Final = 1 << 18  # per topic: two minutes of 2,000 keyed writes a second, 126 MB
FORGET_KEYS_MAX: Final = 64  # per call: no write pays for a burst two minutes ago


class PendingWrite(NamedTuple, Generic[P]):
    """The write of this key is not acknowledged yet."""

    future: P


class AckedWrite(NamedTuple, Generic[T]):
    """The write of this key was acknowledged."""

    outcome: T
    at_ms: int
    is_persistent: bool = True  # its records survive the process


class IdempotencyWindow(Generic[P, T]):
    """Idempotency keys of one topic: a repeated write gets the first one's answer. Every call is bounded work.

                      begin                      complete
        (unknown) ───────────▶ PendingWrite(future) ──────────▶ AckedWrite(outcome, at_ms)
            ▲                        │                                 │
            └──────── abort ─────────┘                                 │
            └───────────────── now − at_ms > window ───────────────────┘

    While the first write is pending, a second one with its key waits on the same future and shares its outcome. A
    failed write is forgotten, so that a retry may succeed. Contents are not compared: the key alone decides. At most
    `IDEMPOTENCY_KEYS_MAX` keys are known, those of the newest writes.

    Times come from a monotonic clock: a lookup is decided by the key's own time, but keys are forgotten oldest write
    first.
    """

    def __init__(self) -> None:
        self._pending: dict[str, P] = {}
        # Not a dict: finding its first key walks over all entries deleted from its front.
        self._done: OrderedDict[str, AckedWrite[T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pending) + len(self._done)

    def lookup(self, key: str, now_ms: int, window_ms: int) -> PendingWrite[P] | AckedWrite[T] | None:
        """Return the earlier write of this key; None: there is none within the window."""
        if key in self._pending:
            return PendingWrite(self._pending[key])
        done = self._done.get(key)
        return done if done is not None and now_ms - done.at_ms <= window_ms else None

    def begin(self, key: str, future: P) -> None:
        """Register a write under this key, after a lookup that found nothing."""
        assert key not in self._pending, "another write of this key is pending"
        self._done.pop(key, None)  # its window is over
        self._pending[key] = future

    def complete(self, key: str, outcome: T, now_ms: int, *, persistent: bool = True) -> None:
        """The write was acknowledged; its window starts at `now_ms`."""
        self._pending.pop(key, None)
        self._done[key] = AckedWrite(outcome, now_ms, persistent)
        self._done.move_to_end(key)
        if len(self._done) > IDEMPOTENCY_KEYS_MAX:
            self._done.popitem(last=False)

    def persistent_keys(self) -> list[tuple[str, AckedWrite[T]]]:
        """Return every acknowledged key whose records survive the process, oldest first. A copy, for use without the
        lock."""
        return [each for each in self._done.items() if each[1].is_persistent]

    def forget_writes(self, is_forgotten: Callable[[T], bool]) -> int:
        """Forget the keys of acknowledged writes for which this is true; return how many."""
        keys = [key for key, done in self._done.items() if is_forgotten(done.outcome)]
        for key in keys:
            del self._done[key]
        return len(keys)

    def abort(self, key: str) -> None:
        """The pending write failed: the next one with this key is new."""
        self._pending.pop(key, None)

    def forget_expired(self, now_ms: int, window_ms: int, count_max: int = FORGET_KEYS_MAX) -> int:
        """Forget up to `count_max` keys whose window is over, oldest first; return how many.

        Called with every write that brings a key, so keys are forgotten faster than they are added.
        """
        count = 0
        while count < count_max and self._done:
            key = next(iter(self._done))
            if now_ms - self._done[key].at_ms <= window_ms:
                break
            del self._done[key]
            count += 1
        return count


# ── across a restart ────────────────────────────────────────────────────────────────────────────────


def encode_keys(
    keys: Iterable[tuple[str, AckedWrite[Appended]]], head: int, clock: Clock, window_ms: int
) -> tuple[tuple[str, int, int, int], ...]:
    """Encode keys for a manifest that holds records up to `head`: key, first seq, last seq, wall-clock time of the ack.

    Keys of later records are stored in the WAL.
    """
    now_ms, offset_ms = clock.monotonic_ms(), clock.now_us() // 1000 - clock.monotonic_ms()
    return tuple(
        (key, done.outcome.first_seq, done.outcome.last_seq, max(done.at_ms + offset_ms, 0))
        for key, done in keys
        if done.outcome.last_seq <= head and now_ms - done.at_ms <= window_ms
    )


def restore_keys(
    window: IdempotencyWindow[P, Appended], rows: Iterable[tuple[str, int, int, int]], clock: Clock
) -> None:
    """Add keys that a restart found, with their age by the wall clock: 0 where the clock went back."""
    now_ms, wall_ms = clock.monotonic_ms(), clock.now_us() // 1000
    for key, first, last, acked_ms in rows:
        window.complete(key, Appended(first, last, last), now_ms - max(wall_ms - acked_ms, 0))


BATCHES_KEPT: Final = 256
SINGLE_BATCH_WRITERS_KEPT: Final = 16
PRODUCERS_MAX: Final = 1024
SINGLE_BATCH_PREFIX: Final = "once:"  # prefix of the name of a producer that writes one batch
_NAME_BYTES_MAX: Final = 1024
_QUERY_ID_BYTES_MAX: Final = 128
_NUMBER_MAX: Final = (1 << 63) - 1
_U64_LIMIT: Final = 1 << 64


class BatchRange(NamedTuple):
    """Where one batch is stored, and its checksum."""

    first: int
    last: int
    sum: tuple[int, int]
    query_id: str = ""  # "": unknown


ProducerBatches: TypeAlias = dict[str, dict[int, BatchRange]]  # by producer, then by number, ascending


class ProducerState(Generic[P]):
    """What a topic remembers of its writers: keys, numbered batches, and batches on their way to the WAL."""

    __slots__ = ("batches", "keys", "pending")

    def __init__(self) -> None:
        self.keys: IdempotencyWindow[P, Appended] = IdempotencyWindow()
        self.batches: ProducerBatches = {}
        self.pending: dict[str, P] = {}  # by producer


def find_written_batch(
    numbers: ProducerBatches, topic: str, writer: str, number: int, total: tuple[int, int], query_id: str = ""
) -> BatchRange | None:
    """Return the batch if it was written before; None if it is new. Raises BatchConflict where it can be neither.

        query id     number            sum         result
        another      any               any         refused: the checkpoint was deleted or replaced
        the same     the newest        any         a replay: the range of the first write
        any          known             the same    a replay
        any          known             another     refused: the batch was written with other records
        any          below a known one             refused: not written, later ones were; a checkpoint was set back
        any          above all                     new

    Without a query id, on either side, only the sum decides. The last `BATCHES_KEPT` batches of a producer are known;
    an older one counts as below.
    """
    batches = numbers.get(writer)
    if not batches:
        return None
    known, newest = batches.get(number), next(reversed(batches))
    known_query_id = batches[newest].query_id
    if known_query_id and query_id and known_query_id != query_id:
        reason = (
            f"comes from the query {query_id}, and the batches up to {newest} were written by the query "
            f"{known_query_id}: its checkpoint was deleted or replaced, or two queries have this name"
        )
        raise BatchConflict(topic, writer, number=number, newest=newest, reason=reason)
    if known is None and number > newest:
        return None
    if known is not None and (
        known.sum == total or (number == newest and known_query_id and known_query_id == query_id)
    ):
        return known
    reason = (
        f"was not written before, and batch {newest} was"
        if known is None
        else f"was written before, at seqs {known.first} to {known.last}, with other records"
    )
    raise BatchConflict(topic, writer, number=number, newest=newest, reason=reason)


def check_producer_batch(
    numbers: ProducerBatches, writer: object, number: object, total: object, query_id: object = ""
) -> None:
    """Raise BadInput for invalid arguments, and for a new producer above `PRODUCERS_MAX`."""
    if not isinstance(query_id, str) or len(query_id.encode("utf-8", "surrogatepass")) > _QUERY_ID_BYTES_MAX:
        raise BadInput(
            f"a query id is text of at most {_QUERY_ID_BYTES_MAX} bytes, not {query_id!r:.200}; nothing was written"
        )
    if not isinstance(writer, str) or not 0 < len(writer.encode("utf-8", "surrogatepass")) <= _NAME_BYTES_MAX:
        raise BadInput(f"a writer name is text of 1 to {_NAME_BYTES_MAX} bytes, not {writer!r:.80}; nothing was done")
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
    """Record a written batch. Called by the committer and by replay, which may repeat it.

    A producer of a single batch (`SINGLE_BATCH_PREFIX`) is forgotten after the next `SINGLE_BATCH_WRITERS_KEPT`: its
    retries come within moments.
    """
    batches = numbers.pop(body.writer, {})
    known_query_id = batches[next(reversed(batches))].query_id if batches else ""
    batches[body.number] = BatchRange(body.first, body.last, body.sum, body.query_id or known_query_id)
    kept = sorted(batches)[-BATCHES_KEPT:]
    numbers[body.writer] = {number: batches[number] for number in kept}
    single = [name for name in numbers if name.startswith(SINGLE_BATCH_PREFIX)]
    for name in single[:-SINGLE_BATCH_WRITERS_KEPT]:
        del numbers[name]


def encode_producers(numbers: ProducerBatches, head: int) -> tuple[WriterRow, ...]:
    """Encode batches for a manifest that holds records up to `head`; later ones are stored in the WAL."""
    rows = []
    for writer, batches in numbers.items():
        encoded = tuple(
            (number, batch.first, batch.last, *batch.sum) for number, batch in batches.items() if batch.last <= head
        )
        if encoded:
            rows.append(WriterRow(writer, encoded, batches[encoded[-1][0]].query_id))
    return tuple(rows)


def decode_producers(rows: Iterable[WriterRow]) -> ProducerBatches:
    return {
        row.writer: {
            number: BatchRange(first, last, (high, low), row.query_id) for number, first, last, high, low in row.batches
        }
        for row in rows
    }
