"""`tidelog worker`: run a command, or Python functions, for every job of a queue.

    claim ──► the job as JSON on the command's standard input ──► exit 0: ack
                                                              └─► else:   nack, later each time

    tidelog worker app:send      the workers that `@queue.worker(…)` made in the module `app`

After the first Ctrl-C or SIGTERM running jobs finish and others are given back; the second ends running commands, which
run in sessions of their own, so a Ctrl-C at the terminal does not reach them.
"""

from __future__ import annotations

import importlib
import json
import logging
import platform
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from threading import Lock
from typing import Final

from tidelog import protocols
from tidelog.addresses import SERVER_SCHEMES, scheme_of
from tidelog.cli.command import DATABASE, Commands, add_command, parse_age_ms, parse_positive, parse_seconds, stop_event
from tidelog.cli.queue import job_fields
from tidelog.cli.render import Screen, plural
from tidelog.cli.target import open_target
from tidelog.clock import SystemClock
from tidelog.engine.queues import Job, Worker
from tidelog.errors import BadInput, Error, NotFound

_POLL_S: Final = 0.1


def add_worker(commands: Commands) -> None:
    """Add `worker` to the command line."""
    parser = add_command(
        commands,
        "worker",
        run_worker,
        DATABASE,
        "QUEUE",
        summary="run a command, or Python functions, for every job of a queue",
        description="Run a command for every job. It gets the job as JSON on standard input (seq, deliveries, data, "
        "tag,\n"
        "meta); exit code 0 acks the job, any other gives it back, to be tried again after one second, two, four\n"
        "… up to a minute. Leases are extended while a command runs. In a DIR this process is the only one that\n"
        "writes; to put jobs meanwhile, or to work from several machines, use a server.\n"
        "Ctrl-C or SIGTERM: running commands finish, other jobs are given back. Twice: commands are ended too.\n"
        "MODULE:NAME instead runs a worker that @queue.worker(...) made in a Python module; MODULE:* runs all of its\n"
        "workers, with a log on standard error.",
        examples="tidelog worker data jobs --once -- cat\n"
        "tidelog worker mail --server http://127.0.0.1:4000 --concurrency 4 -- ./send.sh --fast\n"
        "tidelog worker shop.mail:send",
    )
    parser.usage = "tidelog worker [options] [DATABASE] QUEUE -- COMMAND ... | MODULE:NAME ..."
    parser.names_no_database = _are_modules
    parser.add_argument("--concurrency", type=parse_positive, default=1, metavar="N", help="commands at a time (1)")
    parser.add_argument(
        "--lease",
        type=parse_age_ms,
        dest="lease_ms",
        metavar="AGE",
        help="how long a lease is (that of the queue)",
    )
    parser.add_argument(
        "--node", default=f"worker@{platform.node() or 'here'}"[:128], help="the node that holds the leases"
    )
    parser.add_argument("--once", action="store_true", help="end when there is nothing left to claim")
    parser.add_argument(
        "--idle", type=parse_seconds, metavar="S", help="end when there was nothing to do for so many seconds"
    )


def _are_modules(words: list[str]) -> bool:
    """Whether all words have the form MODULE:NAME."""
    return bool(words) and all(":" in word and scheme_of(word) not in SERVER_SCHEMES for word in words)


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into its own arguments and the words after `--`, the command of a worker."""
    arguments = list(argv)
    if arguments[:1] != ["worker"] or "--" not in arguments:
        return arguments, []
    separator = arguments.index("--")
    return arguments[:separator], arguments[separator + 1 :]


def run_worker(args: Namespace, screen: Screen) -> int:
    """Work until a signal, or until there is nothing to do."""
    words = args.words
    if args.others:
        return run_python_workers(args, screen)
    name = args.queue
    if not words:
        raise BadInput(
            "the command comes after --, as in: tidelog worker data jobs -- cat; Python workers are named like "
            "module:function; nothing was done"
        )
    idle_s = 0.0 if args.once else args.idle
    logging.getLogger("tidelog.worker").addHandler(logging.NullHandler())  # `on_failure` prints failures
    with open_target(args, screen, write=True) as database:
        source = WatchedQueue(database.queue(name, create=False))
        programs = JobCommands(words, screen)
        worker = Worker(
            source,
            programs.run,
            node=args.node,
            concurrency=args.concurrency,
            lease_ms=args.lease_ms,
            on_error=programs.on_failure,
        )
        with screen.progress_bar(f"working on {name}") as bar, stop_event(programs.terminate) as stopping, worker:
            while not stopping.wait(_POLL_S):
                bar(worker.stats.done, None)
                if programs.start_error is not None or _is_fatal(worker.last_error):
                    break
                if idle_s is not None and source.idle_s(worker.running) >= idle_s:
                    break
            if stopping.is_set() and worker.running:
                screen.print_note(f"finishing {plural(worker.running, 'job')}; once more ends them")
    if programs.start_error is not None:
        raise NotFound(
            f"{words[0]} cannot be run ({programs.start_error}); its jobs were given back, check the command"
        )
    if worker.last_error is not None and _is_fatal(worker.last_error):
        raise worker.last_error
    done, failed, lost = worker.stats
    screen.print_result(
        {"queue": name, "done": done, "failed": failed, "lost": lost},
        f"{plural(done, 'job')} done, {failed:,} failed"
        + (f", {lost:,} done too late: others may have had them" if lost else ""),
    )
    return 0


def run_python_workers(args: Namespace, screen: Screen) -> int:
    """Run workers of a Python module until a signal."""
    workers = [worker for name in args.others for worker in _import_workers(name)]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with ExitStack() as stack:
        stopping = stack.enter_context(stop_event())
        for worker in workers:
            stack.enter_context(worker)
        screen.print_note(f"{plural(len(workers), 'worker')} started; Ctrl-C lets running jobs finish")
        while not stopping.wait(_POLL_S):
            pass
    done, failed, lost = (sum(counts) for counts in zip(*(worker.stats for worker in workers), strict=True))
    screen.print_result(
        {"workers": len(workers), "done": done, "failed": failed, "lost": lost},
        f"{plural(done, 'job')} done, {failed:,} failed, {lost:,} done too late",
    )
    return 0


def _import_workers(name: str) -> list[Worker]:
    """Import `module:object`, or all workers of `module:*`."""
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # the current directory, as with `python -m`
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise BadInput(f"{module_name} cannot be imported: {error}; nothing was started, check the name") from error
    if attribute in ("", "*"):
        workers = [value for value in vars(module).values() if isinstance(value, Worker)]
        if not workers:
            raise BadInput(f"{module_name} has no worker; nothing was started, make one with @queue.worker(...)")
        return workers
    found = getattr(module, attribute, None)
    if not isinstance(found, Worker):
        known = ", ".join(key for key, value in vars(module).items() if isinstance(value, Worker)) or "none"
        raise BadInput(
            f"{name} is {'not there' if found is None else 'no worker'}; nothing was started, the workers of "
            f"{module_name} are: {known}"
        )
    return [found]


def _is_fatal(error: Error | None) -> bool:
    """Whether a retry cannot help."""
    return error is not None and not error.retryable


class WatchedQueue:
    """The queue of a worker, which remembers when it last had a job."""

    def __init__(self, queue: protocols.Queue) -> None:
        queue.counts()  # raises at once for a missing queue
        self._queue = queue
        self.put, self.ack, self.nack = queue.put, queue.ack, queue.nack
        self.reject, self.extend = queue.reject, queue.extend
        self._clock = SystemClock()
        self._last_busy_ms = self._clock.monotonic_ms()
        self._was_empty = False  # the last claim found nothing

    @property
    def lease_ms(self) -> int:
        return self._queue.lease_ms

    def claim(self, node: str, most: int = 1, lease_ms: int | None = None) -> Sequence[Job]:
        jobs = self._queue.claim(node, most, lease_ms)
        self._was_empty = not jobs
        if jobs:
            self._last_busy_ms = self._clock.monotonic_ms()
        return jobs

    def idle_s(self, running: int) -> float:
        """Return how long there was nothing to do; negative while there is."""
        if running or not self._was_empty:
            self._last_busy_ms = self._clock.monotonic_ms()
            return -1.0
        return (self._clock.monotonic_ms() - self._last_busy_ms) / 1000


class JobCommands:
    """The running commands, one per job."""

    def __init__(self, words: Sequence[str], screen: Screen) -> None:
        self._words, self._screen = words, screen
        self._lock = Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self.start_error: OSError | None = None  # why it cannot be run at all

    def run(self, job: Job) -> None:
        """Run the command for a job. Raises where it fails."""
        try:
            process = subprocess.Popen(self._words, stdin=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            self.start_error = error
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
            raise CommandFailed(f"exit code {code}" if code > 0 else f"signal {-code}")

    def on_failure(self, job: Job, error: BaseException) -> None:
        self._screen.print_note(f"job {job.seq}, delivery {job.deliveries}: {error}; it is tried again later")

    def terminate(self) -> None:
        """End the running commands."""
        with self._lock:
            running = list(self._running)
        for process in running:
            with suppress(ProcessLookupError):
                process.terminate()


class CommandFailed(Exception):
    """A command that failed."""
