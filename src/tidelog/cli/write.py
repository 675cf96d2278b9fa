"""[shell] Commands that change a log: append, repair, seal, truncate, retain, compact.

Only append makes a log where there is none. An answer is printed after the log is closed, so
what it says is on disk, whatever the sync policy was.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Protocol

from tidelog.cli.keys import Rule
from tidelog.cli.opening import codec_there, codec_to_write
from tidelog.cli.render import Screen, bytes_, report_fields, several, span
from tidelog.commitlog import LogConfig, SegmentedLog
from tidelog.commitlog.codecs import codec_named
from tidelog.disk.posix import PosixDisk
from tidelog.errors import BadInput, TooLarge

_READ_BYTES = 1 << 20


def _open(args: Namespace, screen: Screen) -> SegmentedLog:
    """The log that is there, for writing; what recovery did is remarked on."""
    codec = codec_there(PosixDisk(), args.dir, args.codec)
    log = SegmentedLog.open(args.dir, codec)
    _remark(log, screen)
    return log


def _remark(log: SegmentedLog, screen: Screen) -> None:
    for line in log.report.lines():
        screen.say(f"recovery: {line}")


# ── append ────────────────────────────────────────────────────────────────────────────────────────


class Source(Protocol):
    def read1(self, size: int, /) -> bytes: ...


def append(args: Namespace, screen: Screen) -> int:
    """Write standard input: a record a line, or one record with --stream."""
    source: Source = sys.stdin.buffer  # type: ignore[assignment]  # a BufferedReader, which typeshed does not say
    codec = codec_to_write(PosixDisk(), args.dir, args.codec)
    config = LogConfig(sync=args.sync, segment_bytes_max=args.segment_bytes)
    with SegmentedLog.open(args.dir, codec, config=config) as log:
        _remark(log, screen)
        first = log.highest
        try:
            if args.stream:
                chunks = iter(lambda: source.read1(_READ_BYTES), b"")
                log.append_stream(chunks, node=args.node, tag=args.tag, expected=args.expect)
            else:
                _append_lines(args, screen, log, source)
        finally:
            # Right also when this ends early: one writer holds the directory, so all of these are ours, and
            # closing cuts back whatever was written without being published.
            screen.acked = range(first, log.highest)
    if args.acks and not args.stream:
        screen.say(written(screen.acked))
    else:
        screen.answer(acked_fields(screen.acked), written(screen.acked))
    return 0


def _append_lines(args: Namespace, screen: Screen, log: SegmentedLog, source: Source) -> None:
    first, expected = log.highest, args.expect
    ceiling = args.segment_bytes + args.segment_bytes // 2
    with screen.bar(f"appending to {args.dir}") as bar:
        for batch in lines(source, args.batch, ceiling):
            seqs = log.append_many(batch, node=args.node, tag=args.tag, expected=expected)
            expected = None
            if args.acks:
                screen.answer(acked_fields(seqs), span(seqs.start, seqs.stop))
                screen.flush()
            elif not sys.stdin.isatty():  # a bar would write over what a person types
                bar(seqs.stop - first, None)
    if expected is not None:
        log.append_many([], expected=expected)  # no lines came; the expectation is held against the log all the same


def lines(source: Source, batch: int, ceiling: int) -> Iterator[list[bytes]]:
    """Lines without their newlines, up to `batch` at a time, none held back while the source has nothing more: a
    slow source gets its acks line by line, a fast one by the batch. The last line needs no newline."""
    pieces: list[bytes] = []
    held = 0  # bytes of a line whose end has not come yet
    while chunk := source.read1(_READ_BYTES):
        if b"\n" not in chunk:
            pieces.append(chunk)
            held += len(chunk)
            if held > ceiling:
                raise TooLarge("a line of standard input", size=held, limit=ceiling)
            continue
        *whole, rest = b"".join([*pieces, chunk]).split(b"\n")
        for at in range(0, len(whole), batch):
            yield whole[at : at + batch]
        pieces, held = [rest] if rest else [], len(rest)
    if held:
        yield [b"".join(pieces)]


def acked_fields(acked: range) -> dict[str, int | None]:
    first, last = (acked.start, acked.stop - 1) if acked else (None, None)
    return {"first": first, "last": last, "records": len(acked), "next_seq": acked.stop}


def written(acked: range) -> str:
    if not acked:
        return f"nothing was written, the next seq is {acked.stop}"
    return f"wrote {several(len(acked), 'record')}, {span(acked.start, acked.stop)}"


# ── repair, seal, truncate ────────────────────────────────────────────────────────────────────────


def repair(args: Namespace, screen: Screen) -> int:
    """Open for writing, which recovers, and check everything; 1 where damage remains that nobody can mend."""
    codec = codec_there(PosixDisk(), args.dir, args.codec)
    with SegmentedLog.open(args.dir, codec, verify_on_open=True, repair=True) as log:
        report, held = log.report, span(log.lowest, log.highest)
    ok = not report.damage
    state = "was whole" if report.clean else "is whole now" if ok else "still has damage"
    screen.answer(
        {"ok": ok, "path": args.dir, "codec": codec, **report_fields(report)},
        f"{args.dir} {state}: {held} ({codec})",
        *(f"  {line}" for line in report.lines()),
    )
    return 0 if ok else 1


def seal(args: Namespace, screen: Screen) -> int:
    """Make the active segment immutable and start another."""
    with _open(args, screen) as log:
        active = log.segments[-1]
        sealed = log.seal()
    screen.answer(
        {"sealed": sealed, "first": active.start if sealed else None, "last": active.stop - 1 if sealed else None},
        f"sealed {span(active.start, active.stop)}" if sealed else "nothing to seal: the active segment is empty",
    )
    return 0


def truncate(args: Namespace, screen: Screen) -> int:
    """Forget every record from a seq on."""
    with _open(args, screen) as log:
        forgotten = log.truncate(args.to)
    screen.answer(
        {"forgotten": forgotten, "first": args.to, "last": args.to + forgotten - 1, "next_seq": args.to},
        f"forgot {span(args.to, args.to + forgotten)}; the next seq is {args.to}",
    )
    return 0


# ── retain, compact ───────────────────────────────────────────────────────────────────────────────


def retain(args: Namespace, screen: Screen) -> int:
    """Drop the oldest sealed segments past an age or a size."""
    if args.keep_ms is None and args.keep_bytes is None:
        raise BadInput("nothing says what to keep; nothing was dropped, give --keep, --keep-ms or --keep-bytes")
    with _open(args, screen) as log:
        done = log.retain(keep_ms=args.keep_ms, keep_bytes=args.keep_bytes, high_watermark=args.high_watermark)
    dropped = (
        f"dropped {several(done.segments, 'segment')} ({several(done.records, 'seq')}, {bytes_(done.bytes)})"
        if done.segments
        else "dropped nothing"
    )
    screen.answer(
        {
            "segments": done.segments,
            "records": done.records,
            "bytes": done.bytes,
            "lowest": done.lowest,
            "because": done.because,
        },
        f"{dropped}; the log starts at seq {done.lowest}: {done.because}",
    )
    return 0


def compact(args: Namespace, screen: Screen) -> int:
    """Keep the newest record of every key in the sealed segments."""
    rule: Rule = args.key
    codec = codec_there(PosixDisk(), args.dir, args.codec)
    if rule.needs and rule.needs not in codec_named(codec, LogConfig()).room:
        raise BadInput(
            f"{args.dir}: the {codec} layout has no {rule.needs}; nothing was dropped, use json:FIELD or prefix:SEP"
        )
    with _open(args, screen) as log, screen.bar(f"compacting {args.dir}", total=1) as bar:
        screen.unfinished = "what was compacted stays so and nothing else changed, run it again to go on"
        tombstone = rule.is_tombstone if args.tombstones else None
        done = log.compact(rule.key, is_tombstone=tombstone, progress=bar)
        active = log.segments[-1]
    screen.answer(
        {
            "segments": done.segments,
            "dropped": done.dropped,
            "kept": done.kept,
            "bytes_before": done.bytes_before,
            "bytes_after": done.bytes_after,
            "resumed_at": done.resumed_at,
            "unsealed": len(active),
        },
        f"dropped {several(done.dropped, 'record')} and kept {done.kept:,}; "
        f"{several(done.segments, 'segment')} written anew, {bytes_(done.bytes_before)} -> {bytes_(done.bytes_after)}",
    )
    if active:
        screen.say(
            f"{span(active.start, active.stop)} lie in the active segment, which is never compacted; "
            f"tidelog log seal {args.dir} closes it"
        )
    return 0
