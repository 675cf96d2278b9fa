"""Calls of one queue and its history. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa

from tidelog.api_types import CLAIM_JOBS_MAX, SETTLE_SEQS_MAX
from tidelog.client.core import REQUEST_TIMEOUT_S, Call, Request, ServerUnreachable
from tidelog.client.events import ServerEvent
from tidelog.client.topic_calls import TopicCalls
from tidelog.client.wire import OpenRecord, encode_json, encode_records, parse_data
from tidelog.engine import Appended, RedriveResult
from tidelog.engine.batch_encoder import check_int
from tidelog.engine.queues import AckResult, ExtendResult, Job, QueueCounts
from tidelog.engine.queues.dead_letter import describe_failure
from tidelog.engine.queues.history import TABLE_SCHEMA, rows_to_table
from tidelog.engine.queues.jobs import PRIORITY_MAX, TIME_MS_MAX, lease_token, parse_lease_token
from tidelog.engine.queues.queue import JobsOrSeqs, parse_schedule, split_jobs
from tidelog.errors import BadInput, Error, NotAQueue, TopicNotFound, Unavailable
from tidelog.formats.frame import SEQ_MAX
from tidelog.times import Duration, Seconds, Time, duration_ms, seconds

_HISTORY_PAGE_STEPS: Final = 10_000
_SILENT_STREAMS_MAX: Final = 3  # in a row
_FULL_WAIT_S: Final = 1.0  # for the job that follows an ack
Ids = Sequence[int | None] | None


class QueueCalls:
    """The calls of the queue `name`."""

    def __init__(self, name: str, open_record: OpenRecord | None = None) -> None:
        self.name, self._open_record = name, open_record
        self.topic = TopicCalls(name, open_record)

    def _post(self, verb: str, body: Mapping[str, Any]) -> Call[dict[str, Any]]:
        return (yield Request("POST", self.topic.path(verb), encode_json(body), retry_safe=True)).json()

    def work_path(self) -> str:
        """The path of the stream of jobs."""
        return f"{self.topic.path()}/work"

    def follow_jobs(self, timeout: Seconds | None, lost: Callable[[str], ServerUnreachable]) -> JobCursor:
        return JobCursor(self, seconds("timeout", timeout), lost)

    def work_query(self, node: str, most: int, lease_ms: Duration | None) -> dict[str, object]:
        """The query of the stream of jobs."""
        lease_ms = None if lease_ms is None else duration_ms("lease_ms", lease_ms)
        return {"node": node, "max": most, "lease_ms": lease_ms, "notify_idle": True}

    def put(
        self,
        records: object,
        *,
        tag: str | Sequence[str | None] | None = None,
        node: str | Sequence[str | None] | None = None,
        meta: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        key: str | None = None,
        run_at_ms: Time | None = None,
        delay_ms: Duration | None = None,
        priority: int = 0,
    ) -> Call[Appended]:
        check_int("a priority", priority, -PRIORITY_MAX, PRIORITY_MAX)
        due_ms, wait_ms = parse_schedule(run_at_ms, delay_ms)
        schedule = {"run_at_ms": due_ms, "delay_ms": wait_ms or None, "priority": priority or None}
        extra = {name: value for name, value in schedule.items() if value is not None}
        return (yield from self.topic.write(encode_records(records, tag=tag, node=node, meta=meta, extra=extra), key))

    def claim(self, node: str, most: int = 1, lease_ms: Duration | None = None) -> Call[list[Job]]:
        check_int("most", most, 1, SEQ_MAX)
        if lease_ms is not None:
            lease_ms = duration_ms("lease_ms", lease_ms)
            check_int("lease_ms", lease_ms, 0, TIME_MS_MAX)
        jobs: list[Job] = []
        while len(jobs) < most:
            wanted = min(most - len(jobs), CLAIM_JOBS_MAX)
            claimed = (yield from self._post("/claim", {"node": node, "max": wanted, "lease_ms": lease_ms}))["claimed"]
            jobs += [self.parse_job(job) for job in claimed]
            if len(claimed) < wanted:
                break
        return jobs

    def parse_job(self, fields: Mapping[str, Any]) -> Job:
        lease_id = parse_lease_token(fields["lease_id"])
        assert lease_id is not None, "a claim names its leases"
        data = parse_data(fields, self._open_record)
        return Job(
            fields["$seq"],
            lease_id,
            fields["deadline"],
            fields["$ts"],
            fields["deliveries"],
            data,
            fields.get("$tag"),
            fields.get("meta"),
        )

    def ack(self, node: str, seqs: JobsOrSeqs, lease_ids: Ids = None) -> Call[AckResult]:
        return (yield from self._settle("ack", "acked", node, seqs, lease_ids))

    def nack(
        self,
        node: str,
        seqs: JobsOrSeqs,
        lease_ids: Ids = None,
        delay_ms: Duration = 0,
        *,
        error: BaseException | str | None = None,
    ) -> Call[AckResult]:
        delay_ms = duration_ms("delay_ms", delay_ms)
        check_int("delay_ms", delay_ms, 0, SEQ_MAX)
        more = {"delay_ms": delay_ms, "error": _error_fields(error)}
        return (yield from self._settle("nack", "nacked", node, seqs, lease_ids, **more))

    def reject(
        self, node: str, seqs: JobsOrSeqs, lease_ids: Ids = None, *, error: BaseException | str | None = None
    ) -> Call[AckResult]:
        return (yield from self._settle("reject", "rejected", node, seqs, lease_ids, error=_error_fields(error)))

    def _settle(
        self, verb: str, done: str, node: str, jobs: JobsOrSeqs, lease_ids: Ids, **more: object
    ) -> Call[AckResult]:
        count, skipped = 0, list[int]()
        ready = in_flight = 0
        for part in _parts_of(*split_jobs(jobs, lease_ids)):
            result = yield from self._post(f"/{verb}", {"node": node, **part, **more})
            count, ready, in_flight = count + result[done], result["ready"], result["in_flight"]
            skipped += result["skipped"]
        return AckResult(count, skipped, ready, in_flight)

    def extend(self, node: str, seqs: JobsOrSeqs, lease_ids: Ids = None, *, lease_ms: Duration) -> Call[ExtendResult]:
        lease_ms = duration_ms("lease_ms", lease_ms)
        check_int("lease_ms", lease_ms, 0, SEQ_MAX)
        count, skipped, deadlines = 0, list[int](), dict[int, int]()
        for part in _parts_of(*split_jobs(seqs, lease_ids)):
            result = yield from self._post("/extend", {"node": node, **part, "lease_ms": lease_ms})
            count += result["extended"]
            skipped += result["skipped"]
            deadlines |= {int(seq): deadline_ms for seq, deadline_ms in result["deadlines"].items()}
        return ExtendResult(count, skipped, deadlines)

    def counts(self) -> Call[QueueCounts]:
        state = (yield Request("GET", self.topic.path("?touch=false"), retry_safe=True)).json()
        if state["type"] != "queue":
            raise NotAQueue(self.name)
        return QueueCounts(**state["queue"])

    def redrive(
        self, *, to: str | None = None, match: object = None, rate: float | None = None, limit: int | None = None
    ) -> Call[RedriveResult]:
        return (yield from self.topic.redrive(to=to, match=match, rate=rate, limit=limit))

    def read_history(self, from_seq: int = 0, limit: int = 256) -> Call[list[dict[str, Any]]]:
        path = self.topic.path("/history")
        steps: list[dict[str, Any]] = []
        while len(steps) < limit:
            query = {"from_seq": from_seq, "limit": min(limit - len(steps), _HISTORY_PAGE_STEPS)}
            page = (yield Request("GET", path, query=query, retry_safe=True)).json()["events"]
            steps += page
            if not page:
                break
            from_seq = page[-1]["at"]
        return steps

    def history_table(self) -> Call[pa.Table]:
        tables = [TABLE_SCHEMA.empty_table()]
        from_seq = 0
        while page := (yield from self.read_history(from_seq, _HISTORY_PAGE_STEPS)):
            tables.append(rows_to_table([msgspec.json.encode(step) for step in page]))
            from_seq = page[-1]["at"]
        return pa.concat_tables(tables)


def _error_fields(error: BaseException | str | None) -> dict[str, str] | None:
    if error is None:
        return None
    failure = describe_failure(error, 0)
    return {"message": failure.error, "type": failure.error_type}


def _parts_of(seqs: Sequence[int], lease_ids: Ids) -> list[dict[str, Any]]:
    """The seqs and lease tokens of jobs, in parts that the server accepts; one part where there are none."""
    if lease_ids is not None and len(lease_ids) not in (0, len(seqs)):
        raise BadInput(f"{len(lease_ids)} lease ids were given for {len(seqs)} seqs; nothing was done")
    tokens = ["" if each is None else lease_token(each) for each in lease_ids or ()]
    starts = range(0, max(len(seqs), 1), SETTLE_SEQS_MAX)
    return [
        {
            "seqs": seqs[start : start + SETTLE_SEQS_MAX],
            **({"lease_ids": tokens[start : start + SETTLE_SEQS_MAX]} if any(tokens) else {}),
        }
        for start in starts
    ]


class JobCursor:
    """What a stream of jobs says, how long to wait for it, and whether to open another one when it was lost. No I/O.

    A timeout counts from the moment at which the server says that it has no job: jobs that are there arrive first.
    """

    def __init__(self, calls: QueueCalls, timeout_s: float | None, lost: Callable[[str], ServerUnreachable]) -> None:
        self._calls, self._timeout_s, self._lost = calls, timeout_s, lost
        self._least_s = REQUEST_TIMEOUT_S  # the least time to wait for the next event
        self._silent_streams = 0  # that were lost before their first event

    @property
    def wait_s(self) -> float | None:
        """How long to wait for the next event; the loop ends where none arrives."""
        return None if self._timeout_s is None else max(self._timeout_s, self._least_s)

    def accept(self, event: ServerEvent) -> Job | None:
        """Return the job of an event. Raises ServerUnreachable where the stream ends, and the error of the queue."""
        self._silent_streams = 0
        self._least_s = {"idle": 0.0, "full": _FULL_WAIT_S}.get(event.kind, REQUEST_TIMEOUT_S)
        if event.kind == "job":
            return self._calls.parse_job(event.data)
        if event.kind == "error":
            code, message = event.data.get("code"), str(event.data.get("error"))
            if code == 409:
                raise _queue_is_gone(self._calls.name, message)
            if code == "server_shutting_down":
                raise self._lost(message)
            if code != 429:  # that is the warning of a slow reader
                raise Unavailable(message)
        return None

    def on_lost(self, error: ServerUnreachable) -> None:
        """A stream was lost: its leases have ended. Raises where no stream stays."""
        self._silent_streams, self._least_s = self._silent_streams + 1, REQUEST_TIMEOUT_S
        if self._silent_streams > _SILENT_STREAMS_MAX:
            raise error


def _queue_is_gone(name: str, message: str) -> Error:
    error: Error = NotAQueue(name) if "is a log" in message else TopicNotFound(name)
    error.args = (message,)
    return error
