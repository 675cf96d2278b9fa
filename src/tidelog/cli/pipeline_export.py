"""[shell] `tidelog pipeline export`: once, or on and on until it is told to stop.

SIGTERM ends it between two commits. Ctrl-C is Spark's while a job runs: it ends the job, and the next run does
that commit again from its beginning.
"""

from __future__ import annotations

import signal
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

from tidelog.cli.render import Screen, bytes_, several, span


@contextmanager
def _told_to_stop() -> Iterator[Event]:
    """An event that is set by Ctrl-C or SIGTERM while the block runs. A second Ctrl-C is what it always was."""
    told = Event()

    def hear(number: int, _: Any) -> None:
        told.set()
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def export(args: Namespace, screen: Screen) -> int:
    from tidelog import pipelines

    sizes = pipelines.Sizes(args.file_bytes, args.file_age, max(args.commit_bytes, args.file_bytes))
    with screen.bar(f"exporting {args.topic}", total=1) as bar, _told_to_stop() as told:
        done = pipelines.export(
            args.where,
            args.topic,
            args.table,
            format=args.format,
            key=args.key,
            schema=args.schema,
            infer=args.infer,
            bad=args.bad,
            on_gap=args.on_gap,
            sizes=sizes,
            pause=None if args.once else lambda idle: told.wait(args.every / 1000 if idle else 0),
            master=args.master,
            progress=bar,
        )
    fields = {**done._asdict(), "hash": f"{done.hash:016x}", "table": args.table}
    wrote = f"{several(done.rows, 'row')} in {several(done.files, 'file')}, {several(done.commits, 'commit')}"
    screen.answer(fields, f"{args.table}: {wrote}; it stands for {args.topic} up to seq {done.stop - 1}")
    if done.commits and not screen.json:
        screen.table(
            ("", ""),
            [
                ("range", span(done.first, done.stop)),
                ("rows", f"{done.rows:,}"),
                ("in quarantine", f"{done.quarantined:,}"),
                ("files", f"{done.files:,}, of {bytes_(done.smallest)} to {bytes_(done.largest)}"),
                ("bytes", bytes_(done.bytes)),
                ("hash", f"{done.hash:016x}"),
            ],
        )
    return 0
