"""Every error a caller can see, and the three things a caller asks about it:
what happened (`code`), may I retry (`retryable`), was it written (`written`).

Error
├── Refused            the request was wrong; sending it again will not help; nothing was written
│   ├── BadInput         an argument that no log could accept
│   ├── OutOfRange       a seq outside what the log holds; carries the valid range
│   ├── SeqMissing       a seq inside the range whose record was compacted away
│   ├── TooLarge         a record over its byte ceiling
│   ├── BatchTooLarge    more records or seqs in one call than are taken
│   ├── TopicFull        a write that would pass the cap of a topic that keeps its records
│   ├── GapFound         records that a reader asked for were lost to a cap or to their age
│   ├── StreamBroken     a streamed record broke off or ran past its ceiling
│   ├── Truncated        records that a follower had read were removed by a truncate
│   ├── UnexpectedSeq    the next seq is not the one the caller expected
│   ├── CursorConflict   a group of consumers is not where the caller thought, or would go where it cannot
│   ├── BatchConflict    a numbered batch that is not the one its writer wrote, or comes after later ones
│   ├── NotFound         no such log, topic, partition or file
│   │   ├── TopicNotFound
│   │   ├── RecordNotFound
│   │   ├── GroupNotFound
│   │   ├── RouterNotFound
│   │   ├── ChannelNotFound
│   │   └── BackupNotFound
│   ├── NotAQueue        a topic that is a log was asked for jobs
│   ├── NotEmpty         a topic that was to be dropped only if it was empty
│   ├── AlreadyExists    the name is taken
│   │   ├── TopicExists    by a topic that does not fit what was asked for
│   │   └── AlreadyMember  of a channel
│   ├── RouterCycle      a router that would lead records in a circle; carries it
│   ├── Forbidden        this user may not do that
│   │   ├── NotMember      because it is no member of the channel
│   │   └── Unauthorized   because the server does not know the key, or needs one
│   ├── Unsupported      a server of another version, without this operation
│   ├── ChannelFull      a channel with as many members as it may have
│   ├── WrongType        a call for channels of another type
│   ├── NotPersistent    a channel that keeps no messages was asked for some
│   ├── Rejected         the hook of this engine did not accept a payload
│   ├── NewerFormat      the bytes were written by a newer version
│   ├── ReadOnly         this log was opened for reading
│   ├── WrongStore       a segment store that belongs to another database
│   ├── Closed           this log was closed
│   └── Forked           this handle was opened by another process, of which this one is a fork
├── Unavailable        nothing was written; try again later
│   ├── Locked           another process is the writer of this directory
│   ├── Busy             a streamed record is being written to this log
│   ├── Throttled        a limit of the whole engine is reached; carries which
│   ├── FifoFull         a fifo channel that holds as many messages as it may
│   ├── FifoEmpty        a fifo channel with nothing to pop
│   ├── HookFailed       the hook of this engine broke off
│   ├── StoreUnavailable a segment store does not answer, or not in time
│   │   └── StoreDenied    it refuses the credentials, or there is no such bucket
│   ├── DiskFull         the device is full; the write was rolled back
│   └── WriteFailed      the device refused the bytes; the write was rolled back
├── WriteCancelled     the cause of a CancelledError: the write had begun and was finished first
├── InDoubt            it is unknown whether it was written; retry with the same key
├── NotAllWritten      a producer stopped: some of the records that it took were not written, or may not have been
└── Damaged            do not trust this log without looking at it first
    ├── Corrupt          bytes on disk disagree with their checksum or their layout
    ├── UnknownLayout    files of a layout, or a variant of one, that is not understood; nothing was changed
    ├── BackupIncomplete a backup that is being made, or was interrupted
    ├── CursorLost       the read position of a fifo channel is unknown; its owner clears it
    ├── ChannelOffline   a channel whose metadata cannot be read
    └── Latched          a sync or a write failed, so the page cache can no longer be trusted
"""

from __future__ import annotations

from typing import Any, ClassVar


class Error(Exception):
    """Base of everything raised on purpose. Catch this, never Exception."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    written: bool | None = False  # None: unknown. A class has a default, an error may override it
    acked: range = range(0)  # seqs of the same call that were written before the error
    is_of_repetition: bool = False  # of a client: the request was sent before, its response was lost; it may be done


class Refused(Error):
    code = "refused"


class BadInput(Refused):
    code = "bad_input"


class OutOfRange(Refused):
    code = "out_of_range"

    def __init__(self, log: str, *, asked: int, lowest: int, highest: int) -> None:
        held = f"it holds [{lowest}, {highest})" if highest > lowest else f"it is empty, next is {highest}"
        super().__init__(f"{log}: seq {asked} is out of range, {held}; ask for a seq inside it")
        self.log, self.asked, self.lowest, self.highest = log, asked, lowest, highest


class SeqMissing(Refused):
    code = "seq_missing"

    def __init__(self, log: str, *, asked: int, next_seq: int) -> None:
        super().__init__(
            f"{log}: seq {asked} was compacted away or never filled; the next record is at or after {next_seq}"
        )
        self.log, self.asked, self.next_seq = log, asked, next_seq


class TooLarge(Refused):
    code = "too_large"

    def __init__(
        self, what: str, *, size: int, limit: int, unit: str = "bytes", next_step: str = "send it in parts"
    ) -> None:
        super().__init__(f"{what} is {size} {unit}, the limit is {limit}; nothing was written, {next_step}")
        self.size, self.limit = size, limit


class BatchTooLarge(Refused):
    code = "batch_too_large"

    def __init__(self, what: str, *, count: int, limit: int) -> None:
        super().__init__(f"{count} {what} in one call, the limit is {limit}; nothing was written, send them in parts")
        self.count, self.limit = count, limit


class TopicFull(Refused):
    code = "topic_full"

    def __init__(self, topic: str, *, cap_records: int, cap_bytes: int, head_seq: int, earliest_seq: int) -> None:
        caps = [f"{cap} {unit}" for cap, unit in ((cap_records, "records"), (cap_bytes, "bytes")) if cap]
        super().__init__(
            f"{topic} is full: it keeps at most {' and '.join(caps)} and refuses what does not fit; nothing was "
            "written, delete or ack records, or raise the cap"
        )
        self.topic, self.cap_records, self.cap_bytes = topic, cap_records, cap_bytes
        self.head_seq, self.earliest_seq = head_seq, earliest_seq


class GapFound(Refused):
    code = "gap"

    def __init__(self, topic: str, gap: tuple[int, int, str, int, int, int]) -> None:
        self.gap_from, self.gap_to, self.reason, self.missed_estimate, self.earliest_seq, self.head_seq = gap
        lost = (
            "the topic was deleted and made again, its seqs are other records now"
            if self.reason == "recreated"
            else f"seqs {self.gap_from} to {self.gap_to} are lost ({self.reason})"
        )
        super().__init__(
            f"{topic}: {lost}; nothing was written, read on with from_seq={self.earliest_seq - 1} if you can do without"
        )
        self.topic, self.gap = topic, gap


class StreamBroken(Refused):
    code = "stream_broken"


class Truncated(Refused):
    code = "truncated"

    def __init__(self, log: str, *, asked: int, seq: int) -> None:
        super().__init__(
            f"{log}: records from seq {seq} on were removed by a truncate, and this reader had read up to seq "
            f"{asked - 1}; nothing was written, discard what it read from {seq} on and read on from there"
        )
        self.log, self.asked, self.seq = log, asked, seq


class UnexpectedSeq(Refused):
    code = "unexpected_seq"

    def __init__(self, log: str, *, expected: int, actual: int) -> None:
        super().__init__(
            f"{log}: expected to write seq {expected} but the next one is {actual}; nothing was written, "
            f"read from {min(expected, actual)} and decide again"
        )
        self.log, self.expected, self.actual = log, expected, actual


class CursorConflict(Refused):
    code = "cursor_conflict"

    def __init__(self, topic: str, group: str, *, seq: int, position: int, head_seq: int, reason: str) -> None:
        super().__init__(
            f"{topic}: group {group!r} cannot go to {seq}: {reason}; nothing was changed, look where it is and decide "
            "again"
        )
        self.topic, self.group, self.seq, self.position, self.head_seq = topic, group, seq, position, head_seq


class BatchConflict(Refused):
    code = "batch_conflict"

    def __init__(self, topic: str, writer: str, *, number: int, newest: int, reason: str) -> None:
        super().__init__(
            f"{topic}: batch {number} of writer {writer!r} {reason}; nothing was written. Was its checkpoint deleted "
            "or restored? There are three ways to continue: restore the checkpoint of this topic, and it continues "
            f"after batch {newest}; or let it write under another name (option query), and its records are added to "
            "the topic; or drop the topic, and it is written again"
        )
        self.topic, self.writer, self.number, self.newest = topic, writer, number, newest


class NotFound(Refused):
    code = "not_found"


class TopicNotFound(NotFound):
    code = "topic_not_found"

    def __init__(self, topic: str) -> None:
        super().__init__(f"there is no topic {topic!r}; nothing was done, create it or look at the name again")
        self.topic = topic


class RecordNotFound(NotFound):
    code = "record_not_found"

    def __init__(self, topic: str, *, seq: int, earliest_seq: int, head_seq: int) -> None:
        held = f"its records are {earliest_seq} to {head_seq}" if earliest_seq <= head_seq else "it has no records"
        super().__init__(
            f"topic {topic!r} has no record {seq}: {held}, and those that were deleted are not there any more; nothing "
            "was done, read the topic to see which there are"
        )
        self.topic, self.seq, self.earliest_seq, self.head_seq = topic, seq, earliest_seq, head_seq


class GroupNotFound(NotFound):
    code = "group_not_found"

    def __init__(self, topic: str, group: str) -> None:
        super().__init__(
            f"topic {topic!r} has no group {group!r}; nothing was done, commit to create it or look at the name again"
        )
        self.topic, self.group = topic, group


class NotAQueue(Refused):
    code = "not_a_queue"

    def __init__(self, topic: str) -> None:
        super().__init__(
            f"{topic} is a log and has no jobs to claim; nothing was done, read it, or make a queue under another name"
        )
        self.topic = topic


class RouterNotFound(NotFound):
    code = "router_not_found"

    def __init__(self, router: str) -> None:
        super().__init__(f"there is no router {router!r}; nothing was done, make it or look at the name again")
        self.router = router


class ChannelNotFound(NotFound):
    code = "channel_not_found"

    def __init__(self, channel: str) -> None:
        super().__init__(f"there is no channel {channel}; nothing was done, join it to make it")
        self.channel = channel


class BackupNotFound(NotFound):
    code = "backup_not_found"

    def __init__(self, target: str, backup_id: str | None) -> None:
        what = "no backup" if backup_id is None else f"no backup {backup_id[:80]!r}"
        super().__init__(f"there is {what} in {target}; nothing was done, see `tidelog backup list`")
        self.target, self.backup_id = target, backup_id


class NotEmpty(Refused):
    code = "topic_not_empty"

    def __init__(self, topic: str, *, count: int) -> None:
        super().__init__(f"{topic} holds {count} records; nothing was dropped, drop it without if_empty")
        self.topic, self.count = topic, count


class AlreadyExists(Refused):
    code = "already_exists"


class TopicExists(AlreadyExists):
    code = "topic_exists_incompatible"

    def __init__(self, topic: str, *, reason: str, detail: dict[str, str] | None = None) -> None:
        super().__init__(
            f"topic {topic!r} exists and does not fit: {reason}; nothing was changed, "
            "use it as it is or choose another name"
        )
        self.topic, self.reason = topic, reason
        self.detail = detail or {}  # machine-readable: the existing and the requested values


class RouterCycle(Refused):
    code = "router_cycle"

    def __init__(self, router: str, cycle: list[str]) -> None:
        super().__init__(
            f"router {router!r} would lead records in a circle: {' > '.join(cycle)}; nothing was made, lead it "
            "elsewhere or allow the cycle"
        )
        self.router, self.cycle = router, cycle


class AlreadyMember(AlreadyExists):
    code = "user_in_channel"

    def __init__(self, channel: str, user: str) -> None:
        super().__init__(f"{user} is in {channel} already; nothing was changed")
        self.channel, self.user = channel, user


class Forbidden(Refused):
    code = "forbidden"


class NotMember(Forbidden):
    code = "not_a_member"

    def __init__(self, channel: str, user: str) -> None:
        super().__init__(f"{user} is not in {channel}; nothing was done, join it first")
        self.channel, self.user = channel, user


class Unauthorized(Forbidden):
    code = "unauthorized"


class Unsupported(Refused):
    code = "unsupported"


class ChannelFull(Refused):
    code = "channel_full"

    def __init__(self, channel: str, *, limit: int) -> None:
        super().__init__(f"{channel} has all the {limit} members it may have; nothing was changed, raise max_clients")
        self.channel, self.limit = channel, limit


class WrongType(Refused):
    code = "wrong_type"

    def __init__(self, channel: str, *, type: str, wanted: str) -> None:
        super().__init__(f"{channel} is a {type} channel and this call is for {wanted} ones; nothing was done")
        self.channel, self.type, self.wanted = channel, type, wanted


class NotPersistent(Refused):
    code = "persistence_not_enabled"

    def __init__(self, channel: str) -> None:
        super().__init__(f"{channel} keeps no messages; nothing was done, its owner can configure it to persist")
        self.channel = channel


class Rejected(Refused):
    code = "rejected"


class NewerFormat(Refused):
    code = "newer_format"

    def __init__(self, what: str, *, found: int, known: int) -> None:
        super().__init__(
            f"{what} has format version {found}, this version of tidelog knows {known}; "
            "nothing was changed, upgrade tidelog to read it"
        )
        self.found, self.known = found, known


class ReadOnly(Refused):
    code = "read_only"


class WrongStore(Refused):
    code = "wrong_store"

    def __init__(self, store: str, reason: str, *, step: str) -> None:
        super().__init__(f"the segment store {store} {reason}; nothing was changed, {step}")
        self.store = store


class Closed(Refused):
    code = "closed"


class Forked(Refused):
    code = "forked"

    def __init__(self, what: str, *, pid: int) -> None:
        super().__init__(
            f"{what} was opened by process {pid}, of which this process is a fork; nothing was written, and the files "
            "are as that process left them. Open it after the fork, or open it here again with read_only, or let the "
            "process that opened it write"
        )
        self.what, self.pid = what, pid


class Unavailable(Error):
    code, retryable = "unavailable", True


class Locked(Unavailable):
    """`pid`: the process that holds the lock, `server`: the address it serves the directory at; None: unknown."""

    code = "locked"

    def __init__(self, message: str, *, pid: int | None = None, server: str | None = None) -> None:
        super().__init__(message)
        self.pid, self.server = pid, server


class Busy(Unavailable):
    code = "busy"


class Throttled(Unavailable):
    code = "throttled"

    def __init__(self, limit: str, *, max: int, used: int, asked: int) -> None:
        super().__init__(
            f"{limit}: {used} of {max} are in use and {asked} more were asked for; nothing was written, "
            "free some or raise the limit, then retry"
        )
        self.limit, self.max, self.used, self.asked = limit, max, used, asked


class FifoFull(Unavailable):
    code = "queue_full"

    def __init__(self, channel: str, *, limit: int) -> None:
        super().__init__(
            f"{channel} holds the {limit} messages it may; nothing was written, retry when some are popped"
        )
        self.channel, self.limit = channel, limit


class FifoEmpty(Unavailable):
    code = "queue_empty"

    def __init__(self, channel: str) -> None:
        super().__init__(f"{channel} has nothing to pop; nothing was changed, retry when something was pushed")
        self.channel = channel


class HookFailed(Unavailable):
    code = "hook_failed"


class StoreUnavailable(Unavailable):
    code = "store_unavailable"

    def __init__(
        self,
        store: str,
        reason: str,
        *,
        undone: str = "nothing was changed",
        step: str | None = None,
        kind: str = "segment store",
    ) -> None:
        super().__init__(
            f"the {kind} {store} cannot be used: {reason}; {undone}, "
            f"{step or 'check the network and the store, then retry'}"
        )
        self.store, self.reason = store, reason


class StoreDenied(StoreUnavailable):
    code = "store_denied"


class DiskFull(Unavailable):
    code = "disk_full"


class WriteFailed(Unavailable):
    code = "write_failed"


class WriteCancelled(Error):
    """The outcome of a cancelled call: `error.__cause__` of the `asyncio.CancelledError`. `result` is what the call
    would have returned, `acked` the seqs that it wrote."""

    code, written = "write_cancelled", True

    def __init__(self, log: str, *, result: object) -> None:
        super().__init__(f"{log}: the call was cancelled after its write had begun; it was finished, do not repeat it")
        self.log, self.result = log, result
        if isinstance(result, range):
            self.acked = result


class InDoubt(Error):
    code, retryable, written = "in_doubt", True, None


class NotAllWritten(Error):
    """A producer stopped. `count_written` records were written before, in order; `records` were not; `in_doubt` may
    have been. `__cause__` is the error that stopped it."""

    code = "not_all_written"

    def __init__(self, topic: str, *, count_written: int, records: list[Any], in_doubt: list[Any], reason: str) -> None:
        doubt = f" and of {len(in_doubt)} it is unknown (`in_doubt`)" if in_doubt else ""
        super().__init__(
            f"the producer of {topic} stopped: {reason}. Of its records {count_written} were written, {len(records)} "
            f"were not (`records`){doubt}; send those that were not written with another producer"
        )
        self.topic, self.count_written, self.records, self.in_doubt = topic, count_written, records, in_doubt
        self.written = None if in_doubt else False


class Damaged(Error):
    code = "damaged"
    written: bool | None = None


class Corrupt(Damaged):
    code = "corrupt"
    seq: int | None = None  # first seq that cannot be read
    resume: int | None = None  # first seq after the damage

    def __init__(self, where: str, *, pos: int, reason: str, next_step: str | None = None) -> None:
        step = next_step or "`tidelog check` (topics) or `tidelog log verify` (a log) shows all of it"
        super().__init__(f"{where} at byte {pos}: {reason}; {step}")
        self.where, self.pos, self.reason = where, pos, reason


class UnknownLayout(Damaged):
    code = "unknown_layout"
    written = False


class BackupIncomplete(Damaged):
    code = "backup_incomplete"
    written = False

    def __init__(self, target: str, backup_id: str) -> None:
        super().__init__(
            f"backup {backup_id} in {target} is not whole: it is being made, or was interrupted; nothing was done, "
            "choose another one of `tidelog backup list`"
        )
        self.target, self.backup_id = target, backup_id


class CursorLost(Damaged):
    code = "cursor_recovery_required"

    def __init__(self, channel: str, *, reason: str) -> None:
        super().__init__(
            f"{channel}: the next message is unknown, {reason}; nothing was changed, its owner clears it, or "
            "restore cursor.bin and open again"
        )
        self.channel, self.reason = channel, reason


class ChannelOffline(Damaged):
    code = "channel_offline"

    def __init__(self, channel: str, *, reason: str) -> None:
        super().__init__(f"{channel} is offline since it was restored: {reason}")
        self.channel, self.reason = channel, reason


class Latched(Damaged):
    code = "latched"
