"""`tidelog queue …`: commands on the queues of a directory or of a server.

tidelog queue … DIR QUEUE               this process is the writer, or a reader beside one
tidelog queue … QUEUE --server URL      the server is the writer, and the command a client
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from typing import Any

import msgspec

from tidelog import protocols
from tidelog.cli.command import (
    DATABASE,
    CommandFunction,
    CommandParser,
    Commands,
    add_command,
    add_group,
    add_line_options,
    parse_age_ms,
    parse_count,
    parse_moment_us,
    parse_positive,
    parse_seqs,
)
from tidelog.cli.log import read_lines, stdin_source
from tidelog.cli.render import Screen, bytes_field, format_bytes, format_seqs, format_time, plural
from tidelog.cli.target import open_target
from tidelog.cli.topic import parse_json_lines
from tidelog.engine import EngineConfig
from tidelog.engine.queues import AckResult, Job, parse_lease_token
from tidelog.engine.queues.jobs import PRIORITY_KEY, RUN_AT_KEY
from tidelog.errors import BadInput


def _queue_fields(queue: protocols.Queue, name: str) -> dict[str, Any]:
    state, counts = queue.topic.state(), queue.counts()
    return {
        "queue": name,
        **counts._asdict(),
        "count": state.count,
        "bytes": state.bytes,
        "head_seq": state.head_seq,
        "config": msgspec.json.decode(state.config.to_json()),
    }


def job_fields(job: Job) -> dict[str, Any]:
    """The JSON of a job, printed by `claim` and read by the command of a worker."""
    data = bytes_field("data", job.data) if isinstance(job.data, bytes) else {"data": job.data}
    meta = {key: value for key, value in (job.meta or {}).items() if key not in (RUN_AT_KEY, PRIORITY_KEY)}
    return {
        "seq": job.seq,
        "lease_id": job.lease_token,
        "deadline_ms": job.deadline_ms,
        "ts_ms": job.ts_ms,
        "deliveries": job.deliveries,
        **data,
        **({} if job.tag is None else {"tag": job.tag}),
        **({"meta": meta} if meta else {}),
    }


_ENGINE_LIMITS = EngineConfig()
_COUNT_FIELDS = ("ready", "in_flight", "dead_lettered")


# ── ls, show ──────────────────────────────────────────────────────────────────────────────────────


def ls(args: Namespace, screen: Screen) -> int:
    """One line a queue."""
    with open_target(args, screen, write=False) as database:
        names = [state.topic for state in database.topics(args.prefix) if state.config.type == "queue"]
        states = [_queue_fields(database.queue(name, create=False), name) for name in names]
    rows = [
        [
            state["queue"],
            state["config"]["durability"],
            *(f"{state[key]:,}" for key in _COUNT_FIELDS),
            format_bytes(state["bytes"]),
        ]
        for state in states
    ]
    screen.print_result(
        {"queues": [{key: value for key, value in state.items() if key != "config"} for state in states]},
        titles=("queue", "class", ">ready", ">in flight", ">dead letters", ">bytes"),
        rows=rows,
        after=[f"{plural(len(states), 'queue')}, {plural(sum(state['ready'] for state in states), 'job')} to be done"],
    )
    return 0


def show(args: Namespace, screen: Screen) -> int:
    """Show the jobs and the lease settings of a queue."""
    name = args.queue
    with open_target(args, screen, write=False) as database:
        state = _queue_fields(database.queue(name, create=False), name)
    config = state["config"]
    leases = "leases outlive a restart" if config["leases_durable"] else "a restart ends all leases"
    dead_letters = (
        f"after {plural(config['max_deliveries'], 'delivery').replace('deliverys', 'deliveries')} a job goes to "
        f"{config['dead_letter']}"
        if config["max_deliveries"] and config["dead_letter"]
        else "a job comes back until it is acked"
    )
    waiting = state["count"] - state["ready"] - state["in_flight"]
    screen.print_result(
        state,
        f"{name}: {plural(state['ready'], 'job')} to be claimed, {state['in_flight']:,} in flight, {waiting:,} not "
        f"due yet, {state['dead_lettered']:,} dead letters",
        f"class {config['durability']}, leases of {config['lease_ms'] / 1000:g} s; {leases}; {dead_letters}",
    )
    return 0


# ── put ───────────────────────────────────────────────────────────────────────────────────────────


def put(args: Namespace, screen: Screen) -> int:
    """Write each line of standard input as a job."""
    name = args.queue
    if args.delay_ms is not None and args.at_us is not None:
        raise BadInput("a job has --at or --delay, not both; nothing was written")
    run_at_ms = None if args.at_us is None else args.at_us // 1000
    batches: Iterable[list[Any]] = read_lines(stdin_source(), args.batch, _ENGINE_LIMITS.record_bytes_max)
    first, last = 0, 0
    with open_target(args, screen, write=True, create=True) as database:
        queue = database.queue(name)
        for batch in parse_json_lines(batches) if args.json_lines else batches:
            done = queue.put(batch, tag=args.tag, delay_ms=args.delay_ms, run_at_ms=run_at_ms, priority=args.priority)
            first, last = first or done.first_seq, done.last_seq
            screen.acked = range(first, last + 1)
    count = last - first + 1 if first else 0
    screen.acked = None
    screen.print_result(
        {"queue": name, "count": count, "first_seq": first or None, "last_seq": last or None},
        f"{plural(count, 'job')}: {format_seqs(first, last + 1)}" if count else "no job: standard input was empty",
    )
    return 0


# ── claim, ack, nack ──────────────────────────────────────────────────────────────────────────────


def claim(args: Namespace, screen: Screen) -> int:
    """Lease jobs and print them."""
    name = args.queue
    with open_target(args, screen, write=True) as database:
        queue = database.queue(name, create=False)
        jobs = queue.claim(args.node, args.max, args.lease_ms)
        durable = args.server or queue.topic.state().config.leases_durable
    for job in jobs:
        print(json.dumps(job_fields(job), ensure_ascii=False))
    screen.flush()
    screen.print_note(
        f"{plural(len(jobs), 'job')} for {args.node}"
        + ("" if durable or not jobs else "; the leases end with this command, because leases_durable is not set")
    )
    return 0


def ack(args: Namespace, screen: Screen) -> int:
    """Ack jobs."""
    name = args.queue
    with open_target(args, screen, write=True) as database:
        done = database.queue(name, create=False).ack(args.node, args.seqs, _lease_ids(args))
    return _print_settled(screen, name, "acked", done)


def nack(args: Namespace, screen: Screen) -> int:
    """Nack jobs."""
    name = args.queue
    with open_target(args, screen, write=True) as database:
        done = database.queue(name, create=False).nack(args.node, args.seqs, _lease_ids(args), args.delay_ms or 0)
    return _print_settled(screen, name, "nacked", done)


def _lease_ids(args: Namespace) -> list[int | None] | None:
    if args.lease_ids is None:
        return None
    if len(args.lease_ids) != len(args.seqs):
        raise BadInput(f"{len(args.seqs)} seqs came with {len(args.lease_ids)} leases; nothing was done")
    return [parse_lease_token(token) for token in args.lease_ids]


def _print_settled(screen: Screen, name: str, verb: str, result: AckResult) -> int:
    skipped = ", ".join(map(str, result.skipped))
    screen.print_result(
        {
            "queue": name,
            verb: result.count,
            "skipped": result.skipped,
            "ready": result.ready,
            "in_flight": result.in_flight,
        },
        f"{verb} {plural(result.count, 'job')}"
        + (f"; not held by this node, or not under that lease: {skipped}" if skipped else ""),
        f"{result.ready:,} to be claimed, {result.in_flight:,} in flight",
    )
    return 0


# ── history, redrive ──────────────────────────────────────────────────────────────────────────────


def history(args: Namespace, screen: Screen) -> int:
    """Print the history of jobs, oldest first."""
    name = args.queue
    # Reading the history writes its last steps, so a directory is opened for writing.
    with open_target(args, screen, write=True) as database:
        steps = database.queue(name, create=False).history().read(args.first, args.limit)
    if screen.json:
        for step in steps:
            print(json.dumps(step))
        return 0
    rows = [
        [
            str(step["at"]),
            (format_time(step["ts_ms"] * 1000) or "")[:23],
            step["event"],
            _format_job_seqs(step),
            step.get("node", ""),
            f"lease_{step['lease_id']:x}" if "lease_id" in step else "",
            str(step.get("deliveries", "")),
        ]
        for step in steps
    ]
    if rows:
        screen.print_table((">at", "time (UTC)", "event", ">job", "node", "lease", ">deliveries"), rows)
    screen.flush()
    more = f"; go on with --from {steps[-1]['at']}" if len(steps) == args.limit else ""
    screen.print_note(f"{plural(len(steps), 'step')}{more}")
    return 0


def _format_job_seqs(step: dict[str, Any]) -> str:
    first, last = step.get("seq"), step.get("last_seq")
    return "" if first is None else str(first) if last in (None, first) else f"{first} to {last}"


def redrive(args: Namespace, screen: Screen) -> int:
    """Move dead letters back into their queues."""
    name = args.topic
    with open_target(args, screen, write=True) as database:
        moved, queues, skipped = database.topic(name, create=False).redrive(
            to=args.to, match=args.match, limit=args.limit, rate=args.rate
        )
    where = ", ".join(f"{number:,} to {queue}" for queue, number in queues.items())
    left = f"; {plural(skipped, 'record')} left: their queue is unknown" if skipped else ""
    screen.print_result(
        {"topic": name, "redriven": moved, "queues": queues, "skipped": skipped},
        f"{plural(moved, 'record')} moved{f': {where}' if where else ''}{left}",
    )
    return 0


_DESCRIPTION = """\
A queue is a topic whose records are jobs. A claim gives a node a lease on a job. An ack removes the job; a
nack, or the end of the lease, makes it ready again. Every job is delivered at least once.

DATABASE is a directory that no server has open, or the URL of a server (with --key where it asks for one).
  deliveries   how often a job was handed out; after max_deliveries it goes to the dead_letter topic
  priority     higher goes first; --at and --delay keep a job back until its time
Settings are those of the topic: tidelog topic config DIR QUEUE lease_ms=30s max_deliveries=5 dead_letter=dead

exit codes: 0 done, 1 damage, 2 refused or failed, 130 interrupted
"""

_FIRST_STEPS = """\
start here:
  $ printf 'one\\ntwo\\n' | tidelog queue put data jobs
  $ tidelog queue ls data
  $ tidelog worker data jobs --once -- cat
  $ tidelog queue history data jobs
"""


def add(commands: Commands) -> None:
    """Add the `queue` group to the command line."""
    verbs = add_group(
        commands,
        "queue",
        summary="jobs: put, claim, ack, what happened to them",
        description=_DESCRIPTION,
        first_steps=_FIRST_STEPS,
    )
    _add_lists(verbs)
    _add_put(verbs)
    _add_claims(verbs)
    _add_history(verbs)


def _add_queue_command(
    subcommands: Commands,
    name: str,
    run: CommandFunction,
    *,
    summary: str,
    description: str,
    examples: str,
    metavar: str = "QUEUE",
) -> CommandParser:
    return add_command(
        subcommands, name, run, DATABASE, metavar, summary=summary, description=description, examples=examples
    )


def _add_lists(subcommands: Commands) -> None:
    parser = add_command(
        subcommands,
        "ls",
        ls,
        DATABASE,
        summary="list queues",
        description="List queues: how many jobs can be claimed, how many are in flight, how many went to the dead "
        "letters.\n"
        "Reads only; a writer may be at work, and what it has leased in memory is not seen from outside.",
        examples="tidelog queue ls data\ntidelog queue ls --server http://127.0.0.1:4000 --prefix mail.",
    )
    parser.add_argument("--prefix", default="", metavar="P", help="only queues whose name begins so")
    _add_queue_command(
        subcommands,
        "show",
        show,
        summary="show one queue: its jobs, leases and dead letters",
        description="Show the jobs of a queue, how long its leases are, and where failing jobs go. Reads only.",
        examples="tidelog queue show data jobs",
    )


def _add_put(subcommands: Commands) -> None:
    parser = _add_queue_command(
        subcommands,
        "put",
        put,
        summary="put jobs from standard input",
        description="Put each line of standard input as one job: as bytes, or with --json-lines as the JSON value it "
        "holds.\n"
        "The queue is made where there is none, and so is a directory.",
        examples="printf 'one\\ntwo\\n' | tidelog queue put data jobs\n"
        """echo '{"to": "a@b.c"}' | tidelog queue put data mail --json-lines --delay 10m --priority 5""",
    )
    parser.add_argument("--json-lines", action="store_true", help="each line is a JSON value; empty lines are left out")
    add_line_options(parser)
    parser.add_argument("--tag", help="what to delete or redrive the jobs by later")
    parser.add_argument(
        "--delay", type=parse_age_ms, dest="delay_ms", metavar="AGE", help="not before so long: 30s, 10m, 2h"
    )
    parser.add_argument(
        "--at", type=parse_moment_us, dest="at_us", metavar="MOMENT", help="not before then: 2026-01-31T12:00:00Z"
    )
    parser.add_argument("--priority", type=int, default=0, metavar="N", help="-1000 to 1000; higher goes first (0)")


def _add_claims(subcommands: Commands) -> None:
    parser = _add_queue_command(
        subcommands,
        "claim",
        claim,
        summary="claim jobs and print them, one JSON object a line",
        description="Lease jobs to a node and print them, one JSON object a line: seq, lease_id, deadline_ms, data …\n"
        "In a directory leases outlive the command only where the queue has leases_durable=true.",
        examples="tidelog queue claim data jobs --node me --max 10\n"
        "tidelog queue claim jobs --server http://127.0.0.1:4000 --node me --lease 5m",
    )
    _add_node(parser)
    parser.add_argument("--max", type=parse_positive, default=1, metavar="N", help="this many at most (1)")
    parser.add_argument(
        "--lease", type=parse_age_ms, dest="lease_ms", metavar="AGE", help="how long; the queue's lease_ms"
    )
    for name, run, short, about in (
        ("ack", ack, "jobs are done: remove them", "Remove jobs that the node holds; they never come back."),
        (
            "nack",
            nack,
            "give jobs back",
            "Give jobs back that the node holds: others may claim them, at once or after --delay.",
        ),
    ):
        parser = _add_queue_command(
            subcommands,
            name,
            run,
            summary=short,
            description=f"{about} What it does not\nhold, or not under the lease that is named, is skipped.",
            examples=f"tidelog queue {name} data jobs --node me --seqs 3,5\n"
            f"tidelog queue {name} data jobs --node me --seqs 3 --leases lease_1f",
        )
        _add_node(parser)
        parser.add_argument("--seqs", type=parse_seqs, required=True, metavar="A,B", help="the jobs")
        parser.add_argument(
            "--leases",
            type=lambda text: text.split(","),
            dest="lease_ids",
            metavar="A,B",
            help="their lease ids, one for each: a lease that was lost meanwhile is skipped",
        )
        if name == "nack":
            parser.add_argument(
                "--delay", type=parse_age_ms, dest="delay_ms", metavar="AGE", help="not before so long: 30s"
            )


def _add_node(parser: ArgumentParser) -> None:
    parser.add_argument("--node", required=True, help="who holds the leases")


def _add_history(subcommands: Commands) -> None:
    parser = _add_queue_command(
        subcommands,
        "history",
        history,
        summary="what happened to the jobs of a queue",
        description="Print every step of every job, oldest first: enqueued, claimed, extended, nacked, expired, "
        "released,\n"
        "acked, dead_lettered, redriven. The newest 100,000 steps are kept.",
        examples="tidelog queue history data jobs\ntidelog queue history data jobs --from 500 --limit 100 --json",
    )
    parser.add_argument(
        "--from",
        type=parse_count,
        dest="first",
        default=0,
        metavar="N",
        help="the last step you have: later ones are printed (0: from the first)",
    )
    parser.add_argument(
        "--limit", type=parse_positive, default=1000, metavar="N", help="this many steps at most (1000)"
    )
    parser = _add_queue_command(
        subcommands,
        "redrive",
        redrive,
        summary="put dead letters back into their queues",
        description="Put the records of a dead-letter topic back into the queues they came from, or into --to, and "
        "delete\n"
        "them there. A crash in the middle may put some back twice and loses none.",
        examples="tidelog queue redrive data dead --limit 10\n"
        "tidelog queue redrive data dead --match 'mail-*' --to mail --rate 50",
        metavar="TOPIC",
    )
    parser.add_argument("--to", metavar="QUEUE", help="this queue, wherever they came from")
    parser.add_argument("--match", metavar="TAG", help="records with this tag; with a * at its end, that begin so")
    parser.add_argument("--limit", type=parse_positive, metavar="N", help="this many at most")
    parser.add_argument("--rate", type=parse_positive, metavar="N", help="this many a second at most")
