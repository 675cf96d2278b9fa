"""[shell] What the commands of `tidelog queue` do."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from tidelog.cli.queue_door import job_fields, opened, queue_named
from tidelog.cli.render import Screen, bytes_, moment, several, span
from tidelog.cli.topic_write import parsed
from tidelog.cli.write import Source, lines
from tidelog.engine import EngineConfig
from tidelog.engine.queues import Settled, parse_lease_token
from tidelog.errors import BadInput

_LIMITS = EngineConfig()
_COUNTS = ("ready", "in_flight", "dead_lettered")


# ── ls, show ──────────────────────────────────────────────────────────────────────────────────────


def ls(args: Namespace, screen: Screen) -> int:
    """One line a queue."""
    if bool(args.dir) == bool(args.server):
        raise BadInput("queues are in a DIR or behind a --server, one of the two; nothing was done")
    with opened(args, screen, write=False) as door:
        states = [door.state(name) for name in door.names(args.prefix)]
    screen.answer({"queues": [{key: value for key, value in state.items() if key != "config"} for state in states]})
    if screen.json:
        return 0
    if states:
        titles = ("queue", "class", ">ready", ">in flight", ">dead letters", ">bytes")
        rows = [
            [
                state["queue"],
                state["config"]["durability"],
                *(f"{state[key]:,}" for key in _COUNTS),
                bytes_(state["bytes"]),
            ]
            for state in states
        ]
        screen.table(titles, rows)
    print(f"{several(len(states), 'queue')}, {several(sum(state['ready'] for state in states), 'job')} to be done")
    return 0


def show(args: Namespace, screen: Screen) -> int:
    """What a queue holds, and how it hands it out."""
    name = queue_named(args)
    with opened(args, screen, write=False) as door:
        state = door.state(name)
    config = state["config"]
    kept = "leases outlive a restart" if config["leases_durable"] else "a restart ends all leases"
    dead = (
        f"after {several(config['max_deliveries'], 'delivery').replace('deliverys', 'deliveries')} a job goes to "
        f"{config['dead_letter']}"
        if config["max_deliveries"] and config["dead_letter"]
        else "a job comes back until it is acked"
    )
    waiting = state["count"] - state["ready"] - state["in_flight"]
    screen.answer(
        state,
        f"{name}: {several(state['ready'], 'job')} to be claimed, {state['in_flight']:,} in flight, {waiting:,} not "
        f"due yet, {state['dead_lettered']:,} dead letters",
        f"class {config['durability']}, leases of {config['lease_ms'] / 1000:g} s; {kept}; {dead}",
    )
    return 0


# ── put ───────────────────────────────────────────────────────────────────────────────────────────


def put(args: Namespace, screen: Screen) -> int:
    """Write each line of standard input as a job."""
    name = queue_named(args)
    if args.delay_ms is not None and args.at_us is not None:
        raise BadInput("a job has --at or --delay, not both; nothing was written")
    args.run_at_ms = None if args.at_us is None else args.at_us // 1000
    source: Source = sys.stdin.buffer  # type: ignore[assignment]  # a BufferedReader, which typeshed does not say
    batches: Iterable[list[Any]] = lines(source, args.batch, _LIMITS.record_bytes_max)
    first, last = 0, 0
    with opened(args, screen, write=True, create=True) as door:
        door.make(name)
        for batch in parsed(batches) if args.json_lines else batches:
            put_first, last = door.put(name, batch, args)
            first = first or put_first
            screen.acked = range(first, last + 1)
    count = last - first + 1 if first else 0
    screen.acked = None
    screen.answer(
        {"queue": name, "count": count, "first_seq": first or None, "last_seq": last or None},
        f"{several(count, 'job')}: {span(first, last + 1)}" if count else "no job: standard input was empty",
    )
    return 0


# ── claim, ack, nack ──────────────────────────────────────────────────────────────────────────────


def claim(args: Namespace, screen: Screen) -> int:
    """Lease jobs and print them."""
    name = queue_named(args)
    with opened(args, screen, write=True) as door:
        found = door.claim(name, args.node, args.max, args.lease_ms)
        durable = args.server or door.state(name)["config"]["leases_durable"]
    for job in found:
        print(json.dumps(job_fields(job), ensure_ascii=False))
    screen.flush()
    screen.say(
        f"{several(len(found), 'job')} for {args.node}"
        + ("" if durable or not found else "; the leases end with this command, because leases_durable is not set")
    )
    return 0


def ack(args: Namespace, screen: Screen) -> int:
    """Jobs are done."""
    name = queue_named(args)
    with opened(args, screen, write=True) as door:
        done = door.ack(name, args.node, args.seqs, _ids(args))
    return _settled(screen, name, "acked", done)


def nack(args: Namespace, screen: Screen) -> int:
    """Jobs are given back."""
    name = queue_named(args)
    with opened(args, screen, write=True) as door:
        done = door.nack(name, args.node, args.seqs, _ids(args), args.delay_ms or 0)
    return _settled(screen, name, "nacked", done)


def _ids(args: Namespace) -> list[int | None] | None:
    if args.lease_ids is None:
        return None
    if len(args.lease_ids) != len(args.seqs):
        raise BadInput(f"{len(args.seqs)} seqs came with {len(args.lease_ids)} leases; nothing was done")
    return [parse_lease_token(token) for token in args.lease_ids]


def _settled(screen: Screen, name: str, verb: str, done: Settled) -> int:
    skipped = ", ".join(map(str, done.skipped))
    screen.answer(
        {"queue": name, verb: done.count, "skipped": done.skipped, "ready": done.ready, "in_flight": done.in_flight},
        f"{verb} {several(done.count, 'job')}"
        + (f"; not held by this node, or not under that lease: {skipped}" if skipped else ""),
        f"{done.ready:,} to be claimed, {done.in_flight:,} in flight",
    )
    return 0


# ── history, redrive ──────────────────────────────────────────────────────────────────────────────


def history(args: Namespace, screen: Screen) -> int:
    """What happened to jobs, oldest first."""
    name = queue_named(args)
    # The last steps are written down when somebody asks, so a directory is opened for writing.
    with opened(args, screen, write=True) as door:
        steps = door.history(name, args.first, args.limit)
    if screen.json:
        for step in steps:
            print(json.dumps(step))
        return 0
    rows = [
        [
            str(step["at"]),
            (moment(step["ts_ms"] * 1000) or "")[:23],
            step["event"],
            _seqs(step),
            step.get("node", ""),
            f"lease_{step['lease_id']:x}" if "lease_id" in step else "",
            str(step.get("deliveries", "")),
        ]
        for step in steps
    ]
    if rows:
        screen.table((">at", "time (UTC)", "event", ">job", "node", "lease", ">deliveries"), rows)
    screen.flush()
    more = f"; go on with --from {steps[-1]['at']}" if len(steps) == args.limit else ""
    screen.say(f"{several(len(steps), 'step')}{more}")
    return 0


def _seqs(step: dict[str, Any]) -> str:
    first, last = step.get("seq"), step.get("last_seq")
    return "" if first is None else str(first) if last in (None, first) else f"{first} to {last}"


def redrive(args: Namespace, screen: Screen) -> int:
    """Dead letters back into their queues."""
    name = queue_named(args)
    with opened(args, screen, write=True) as door:
        moved, queues, skipped = door.redrive(name, args.to, args.match, args.limit, args.rate)
    where = ", ".join(f"{number:,} to {queue}" for queue, number in queues.items())
    left = f"; {several(skipped, 'record')} left: nobody knows where they came from" if skipped else ""
    screen.answer(
        {"topic": name, "redriven": moved, "queues": queues, "skipped": skipped},
        f"{several(moved, 'record')} moved{f': {where}' if where else ''}{left}",
    )
    return 0
