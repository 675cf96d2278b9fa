"""`tidelog queue …`: the commands, what each takes, and the help that teaches them. What they do lies in queue_run;
`tidelog worker` has a module of its own."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import TYPE_CHECKING

from tidelog.cli import queue_run
from tidelog.cli.command import Run, command, group
from tidelog.cli.options import age_ms, count, moment_us, positive, seqs

if TYPE_CHECKING:
    from tidelog.cli.command import Commands

_ABOUT = """\
A queue is a topic whose records are jobs. Whoever claims one holds a lease on it: ack and it is gone, nack
and it comes back, do neither and it comes back when the lease ends. A job is done at least once.

DIR is a directory that no server has open; with --server URL (and --key) the queues of a server are meant.
  deliveries   how often a job was handed out; after max_deliveries it goes to the dead_letter topic
  priority     higher goes first; --at and --delay keep a job back until its time
Settings are those of the topic: tidelog topic config DIR QUEUE lease_ms=30s max_deliveries=5 dead_letter=dead

exit codes: 0 done, 1 damage, 2 refused or failed, 130 interrupted
"""

_START = """\
start here:
  $ printf 'one\\ntwo\\n' | tidelog queue put data jobs
  $ tidelog queue ls data
  $ tidelog worker data jobs --once -- cat
  $ tidelog queue history data jobs
"""


def add(commands: Commands) -> None:
    """Add the `queue` group to the command line."""
    verbs = group(commands, "queue", short="jobs: put, claim, ack, what happened to them", about=_ABOUT, start=_START)
    _add_looks(verbs)
    _add_put(verbs)
    _add_claims(verbs)
    _add_afterwards(verbs)


def add_places(made: ArgumentParser, what: str = "QUEUE") -> None:
    """Where the queue is."""
    made.add_argument("places", nargs="+", metavar=f"[DIR] {what}")
    add_server(made)


def add_server(made: ArgumentParser) -> None:
    made.add_argument("--server", metavar="URL", help="the queues of a server, as http://127.0.0.1:4000; no DIR then")
    made.add_argument("--key", help="a key of that server, where it asks for one")


def _of_queue(
    verbs: Commands, name: str, run: Run, *, short: str, about: str, examples: str, what: str = "QUEUE"
) -> ArgumentParser:
    made = command(verbs, name, run, short=short, about=about, examples=examples)
    add_places(made, what)
    return made


def _add_looks(verbs: Commands) -> None:
    made = command(
        verbs,
        "ls",
        queue_run.ls,
        short="list queues",
        about="List queues: how many jobs can be claimed, how many are in flight, how many went to the dead letters.\n"
        "Reads only; a writer may be at work, and what it has leased in memory is not seen from outside.",
        examples="tidelog queue ls data\ntidelog queue ls --server http://127.0.0.1:4000 --prefix mail.",
    )
    made.add_argument("dir", nargs="?", metavar="DIR")
    made.add_argument("--prefix", default="", metavar="P", help="only queues whose name begins so")
    add_server(made)
    _of_queue(
        verbs,
        "show",
        queue_run.show,
        short="show one queue: what it holds and how it hands it out",
        about="Show what a queue holds, how long its leases are, and what becomes of jobs that fail. Reads only.",
        examples="tidelog queue show data jobs",
    )


def _add_put(verbs: Commands) -> None:
    made = _of_queue(
        verbs,
        "put",
        queue_run.put,
        short="put jobs from standard input",
        about="Put each line of standard input as one job: as bytes, or with --json-lines as the JSON value it holds.\n"
        "The queue is made where there is none, and so is a directory.",
        examples="printf 'one\\ntwo\\n' | tidelog queue put data jobs\n"
        """echo '{"to": "a@b.c"}' | tidelog queue put data mail --json-lines --delay 10m --priority 5""",
    )
    made.add_argument("--json-lines", action="store_true", help="each line is a JSON value; empty lines are left out")
    made.add_argument("--batch", type=positive, default=1000, metavar="N", help="lines in one write at most (1000)")
    made.add_argument("--tag", help="what to delete or redrive the jobs by later")
    made.add_argument("--delay", type=age_ms, dest="delay_ms", metavar="AGE", help="not before so long: 30s, 10m, 2h")
    made.add_argument(
        "--at", type=moment_us, dest="at_us", metavar="MOMENT", help="not before then: 2026-01-31T12:00:00Z"
    )
    made.add_argument("--priority", type=int, default=0, metavar="N", help="-1000 to 1000; higher goes first (0)")


def _add_claims(verbs: Commands) -> None:
    made = _of_queue(
        verbs,
        "claim",
        queue_run.claim,
        short="claim jobs and print them, one JSON object a line",
        about="Lease jobs to a node and print them, one JSON object a line: seq, lease_id, deadline_ms, data …\n"
        "In a directory leases outlive the command only where the queue has leases_durable=true.",
        examples="tidelog queue claim data jobs --node me --max 10\n"
        "tidelog queue claim jobs --server http://127.0.0.1:4000 --node me --lease 5m",
    )
    _add_node(made)
    made.add_argument("--max", type=positive, default=1, metavar="N", help="this many at most (1)")
    made.add_argument("--lease", type=age_ms, dest="lease_ms", metavar="AGE", help="how long; the queue's lease_ms")
    for name, run, short, about in (
        ("ack", queue_run.ack, "jobs are done: remove them", "Remove jobs that the node holds; they never come back."),
        (
            "nack",
            queue_run.nack,
            "give jobs back",
            "Give jobs back that the node holds: others may claim them, at once or after --delay.",
        ),
    ):
        made = _of_queue(
            verbs,
            name,
            run,
            short=short,
            about=f"{about} What it does not\nhold, or not under the lease that is named, is skipped.",
            examples=f"tidelog queue {name} data jobs --node me --seqs 3,5\n"
            f"tidelog queue {name} data jobs --node me --seqs 3 --leases lease_1f",
        )
        _add_node(made)
        made.add_argument("--seqs", type=seqs, required=True, metavar="A,B", help="the jobs")
        made.add_argument(
            "--leases",
            type=lambda text: text.split(","),
            dest="lease_ids",
            metavar="A,B",
            help="their lease ids, one for each: a lease that was lost meanwhile is skipped",
        )
        if name == "nack":
            made.add_argument("--delay", type=age_ms, dest="delay_ms", metavar="AGE", help="not before so long: 30s")


def _add_node(made: ArgumentParser) -> None:
    made.add_argument("--node", required=True, help="who holds the leases")


def _add_afterwards(verbs: Commands) -> None:
    made = _of_queue(
        verbs,
        "history",
        queue_run.history,
        short="what happened to the jobs of a queue",
        about="Print every step of every job, oldest first: enqueued, claimed, extended, nacked, expired, released,\n"
        "acked, dead_lettered, redriven. The newest 100,000 steps are kept.",
        examples="tidelog queue history data jobs\ntidelog queue history data jobs --from 500 --limit 100 --json",
    )
    made.add_argument(
        "--from",
        type=count,
        dest="first",
        default=0,
        metavar="N",
        help="the last step you have: what comes behind it is printed (0: from the first)",
    )
    made.add_argument("--limit", type=positive, default=1000, metavar="N", help="this many steps at most (1000)")
    made = _of_queue(
        verbs,
        "redrive",
        queue_run.redrive,
        short="put dead letters back into their queues",
        about="Put the records of a dead-letter topic back into the queues they came from, or into --to, and delete\n"
        "them there. A crash in the middle may put some back twice and loses none.",
        examples="tidelog queue redrive data dead --limit 10\n"
        "tidelog queue redrive data dead --match 'mail-*' --to mail --rate 50",
        what="TOPIC",
    )
    made.add_argument("--to", metavar="QUEUE", help="this queue, wherever they came from")
    made.add_argument("--match", metavar="TAG", help="records with this tag; with a * at its end, that begin so")
    made.add_argument("--limit", type=positive, metavar="N", help="this many at most")
    made.add_argument("--rate", type=positive, metavar="N", help="this many a second at most")
