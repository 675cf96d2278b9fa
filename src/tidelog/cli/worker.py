"""[shell] `tidelog worker`: a command for every job of a queue.

    claim ──► the job as JSON on the command's standard input ──► exit 0: ack
                                                              └─► else:   nack, later each time

The first Ctrl-C or SIGTERM lets the commands that run finish and gives back the rest; the second ends them. Commands
run in sessions of their own, so a Ctrl-C at the terminal does not reach them.
"""

from __future__ import annotations

import json
import platform
import signal
import subprocess
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, Final

from tidelog.cli.command import command
from tidelog.cli.options import age_ms, positive, seconds
from tidelog.cli.queue import add_places
from tidelog.cli.queue_door import Door, job_fields, opened, queue_named
from tidelog.cli.render import Screen, several
from tidelog.clock import SystemClock
from tidelog.engine.queues import Extended, Job, Settled, Worker
from tidelog.errors import BadInput, Error, NotFound

if TYPE_CHECKING:
    from tidelog.cli.command import Commands

_LOOK_S: Final = 0.1
_LEASE_MS: Final = 30_000


def add(commands: Commands) -> None:
    """Add `worker` to the command line."""
    made = command(
        commands,
        "worker",
        run,
        short="run a command for every job of a queue",
        about="Run a command for every job. It gets the job as JSON on standard input (seq, deliveries, data, tag,\n"
        "meta); exit code 0 acks the job, any other gives it back, to be tried again after one second, two, four\n"
        "… up to a minute. Leases are extended while a command runs. In a DIR this process is the only one that\n"
        "writes; to put jobs meanwhile, or to work from several machines, use a server.\n"
        "Ctrl-C or SIGTERM: what runs is finished, the rest is given back. Twice: what runs is ended too.",
        examples="tidelog worker data jobs --once -- cat\n"
        "tidelog worker mail --server http://127.0.0.1:4000 --concurrency 4 -- ./send.sh --fast",
    )
    add_places(made)
    made.usage = "tidelog worker [-h] [options] [DIR] QUEUE -- COMMAND ..."
    made.add_argument("--concurrency", type=positive, default=1, metavar="N", help="commands at a time (1)")
    made.add_argument(
        "--lease", type=age_ms, dest="lease_ms", default=_LEASE_MS, metavar="AGE", help="how long a lease is (30s)"
    )
    made.add_argument("--node", default=f"worker@{platform.node() or 'here'}"[:128], help="who holds the leases")
    made.add_argument("--once", action="store_true", help="end when there is nothing left to claim")
    made.add_argument("--idle", type=seconds, metavar="S", help="end when there was nothing to do for so many seconds")


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line, and the words of the command behind `--`, which are nobody's options but its own."""
    given = list(argv)
    if given[:1] != ["worker"] or "--" not in given:
        return given, []
    at = given.index("--")
    return given[:at], given[at + 1 :]


def run(args: Namespace, screen: Screen) -> int:
    """Work until told to stop, or until there is nothing to do."""
    name, words = queue_named(args), args.words
    if not words:
        raise BadInput("what is to be run stands behind --, as in: tidelog worker data jobs -- cat; nothing was done")
    idle_s = 0.0 if args.once else args.idle
    with opened(args, screen, write=True) as door:
        door.state(name)  # a queue that is not there is told at once
        programs = Programs(words, screen)
        source = Watched(door, name)
        worker = Worker(
            source,
            programs.run,
            node=args.node,
            concurrency=args.concurrency,
            lease_ms=args.lease_ms,
            on_error=programs.failed,
        )
        with screen.bar(f"working on {name}") as bar, _signals(screen, worker, programs) as told, worker:
            while not told.wait(_LOOK_S):
                bar(worker.tally.done, None)
                if programs.missing is not None or _is_fatal(worker.trouble):
                    break
                if idle_s is not None and source.idle_s(worker.running) >= idle_s:
                    break
    if programs.missing is not None:
        raise NotFound(f"{words[0]} cannot be run ({programs.missing}); its jobs were given back, check the command")
    if worker.trouble is not None and _is_fatal(worker.trouble):
        raise worker.trouble
    done, failed, lost = worker.tally
    screen.answer(
        {"queue": name, "done": done, "failed": failed, "lost": lost},
        f"{several(done, 'job')} done, {failed:,} failed"
        + (f", {lost:,} done too late: others may have had them" if lost else ""),
    )
    return 0


def _is_fatal(trouble: Error | None) -> bool:
    """What trying again does not mend."""
    return trouble is not None and not trouble.retryable


class Watched:
    """A queue as a worker needs it, which remembers when there was last something to do."""

    def __init__(self, door: Door, name: str) -> None:
        self._door, self._name = door, name
        self._clock = SystemClock()
        self._busy_ms = self._clock.monotonic_ms()
        self._empty = False  # the last claim found nothing

    def claim(self, node: str, most: int = 1, lease_ms: int | None = None) -> Sequence[Job]:
        found = self._door.claim(self._name, node, most, lease_ms)
        self._empty = not found
        if found:
            self._busy_ms = self._clock.monotonic_ms()
        return found

    def ack(self, node: str, seqs: Sequence[Job], /) -> Settled:
        return self._door.ack(self._name, node, seqs, None)

    def nack(self, node: str, seqs: Sequence[Job], /, *, delay_ms: int = 0) -> Settled:
        return self._door.nack(self._name, node, seqs, None, delay_ms)

    def extend(self, node: str, seqs: Sequence[Job], /, *, lease_ms: int) -> Extended:
        return self._door.extend(self._name, node, seqs, lease_ms)

    def idle_s(self, running: int) -> float:
        """For how long there was nothing to do; below zero while there is."""
        if running or not self._empty:
            self._busy_ms = self._clock.monotonic_ms()
            return -1.0
        return (self._clock.monotonic_ms() - self._busy_ms) / 1000


class Programs:
    """The commands that run, one a job."""

    def __init__(self, words: Sequence[str], screen: Screen) -> None:
        self._words, self._screen = words, screen
        self._lock = Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self.missing: OSError | None = None  # why it cannot be run at all

    def run(self, job: Job) -> None:
        """Run the command for a job. Raises where it did not end well."""
        try:
            process = subprocess.Popen(self._words, stdin=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            self.missing = error
            raise
        with self._lock:
            self._running.add(process)
        try:
            process.communicate(json.dumps(job_fields(job), ensure_ascii=False).encode() + b"\n")
        finally:
            with self._lock:
                self._running.discard(process)
        if process.returncode:
            code = process.returncode
            raise Failed(f"exit code {code}" if code > 0 else f"signal {-code}")

    def failed(self, job: Job, error: BaseException) -> None:
        self._screen.say(f"job {job.seq}, delivery {job.deliveries}: {error}; it is tried again later")

    def end(self) -> None:
        """End what runs."""
        with self._lock:
            running = list(self._running)
        for process in running:
            with suppress(ProcessLookupError):
                process.terminate()


class Failed(Exception):
    """A command that did not end well."""


@contextmanager
def _signals(screen: Screen, worker: Worker, programs: Programs) -> Iterator[Event]:
    """An event that is set when somebody wants this to end."""
    told = Event()

    def hear(*_: object) -> None:
        if told.is_set():
            programs.end()
            return
        told.set()
        if worker.running:
            screen.say(f"finishing {several(worker.running, 'job')}; once more ends them")

    before: dict[signal.Signals, Callable[..., Any] | int | None] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, hear)
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
