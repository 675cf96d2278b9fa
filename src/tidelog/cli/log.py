"""`tidelog log …`: commands on one segmented log.

`cat`, `inspect` and `verify` change nothing on disk. `append`, `repair`, `seal`, `truncate`, `retain` and `compact`
change a log and print their result after it is closed, so the result is durable under every sync policy. `convert` and
`restore` make a new log and only read the first. Only `append` creates a missing log: a mistyped path must not become
an empty log, and a log must not get a second one of another layout beside it.

Compaction keys on the command line:

    rule         key                                        tombstone
    tag          the tag                                    the data is empty
    json:FIELD   that field of the JSON object in the data  every other field is null, or there is none
    prefix:SEP   the bytes before the first SEP             no bytes after that SEP

A record to which the rule does not apply (no tag, no such field or null, not JSON, no SEP, no bytes before it) has no
key and is always kept. Two JSON numbers are one key only when their text is the same; strings are compared decoded.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from tidelog import commitlog
from tidelog.addresses import check_path
from tidelog.cli import log_root
from tidelog.cli.command import (
    CommandFunction,
    Commands,
    add_command,
    add_group,
    add_line_options,
    parse_age_ms,
    parse_bytes,
    parse_columns,
    parse_count,
    parse_hex,
    parse_moment_us,
    parse_positive_size,
    parse_size,
)
from tidelog.cli.render import (
    SEGMENT_TITLES,
    Screen,
    bytes_field,
    damage_fields,
    damage_line,
    format_bytes,
    format_seqs,
    format_time,
    plural,
    report_fields,
    segment_fields,
    segment_row,
)
from tidelog.commitlog import SegmentedLog
from tidelog.commitlog.codecs import CODEC_NAMES, make_codec
from tidelog.commitlog.partitions import is_root
from tidelog.commitlog.recovery import detect_codec
from tidelog.config import LogConfig
from tidelog.disk.interface import Disk
from tidelog.disk.posix import PosixDisk
from tidelog.errors import BadInput, NotFound, TooLarge
from tidelog.formats.rows import Rows, Span, copy_values
from tidelog.types import Record


def existing_codec(disk: Disk, path: str, requested: str | None) -> str:
    """Return the codec of the log in `path`. NotFound: there is none; BadInput: it is not the requested one."""
    names = _list_names(disk, path)
    if names is None:
        raise NotFound(f"there is no log at {path}; nothing was changed, check the path")
    codec = _codec_of_names(disk, path, names, requested)
    if codec is None:
        hint = "name one of its partitions, see tidelog log topics" if is_root(disk, path) else "check the path"
        raise NotFound(f"{path} holds no log; nothing was changed, {hint}")
    return codec


def codec_to_write(disk: Disk, path: str, requested: str | None) -> str:
    """Return the codec to append with: that of the log in `path`, or the requested one for a new log, or tide."""
    return _codec_of_names(disk, path, _list_names(disk, path) or [], requested) or requested or "tide"


def _list_names(disk: Disk, path: str) -> list[str] | None:
    check_path(path)
    try:
        return disk.list_dir(path)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise BadInput(f"{path} is a file, a log is a directory; nothing was changed, check the path") from None


def _codec_of_names(disk: Disk, path: str, names: list[str], requested: str | None) -> str | None:
    detected = detect_codec(disk, path, names)
    if detected is not None:
        if requested not in (None, detected):
            raise BadInput(
                f"{path} holds a {detected} log, not a {requested} one; nothing was changed, leave --codec out"
            )
        return detected
    fitting = [
        name
        for name in CODEC_NAMES
        if any(make_codec(name, LogConfig()).parse_file_name(file) is not None for file in names)
    ]
    if not fitting or requested in fitting:
        return requested if fitting else None
    raise BadInput(f"{path} may hold a log of {' or '.join(fitting)}; nothing was changed, choose with --codec")


_JSON_ENCODER = msgspec.json.Encoder()


def _unverified(args: Namespace, codec: str) -> bool:
    """Whether to read without checksums; BadInput where the layout has no unknown ones."""
    if args.unverified and codec != "laminar":
        raise BadInput(f"--unverified is for laminar stores, this is a {codec} log; nothing was changed, leave it out")
    return bool(args.unverified)


def _variant(args: Namespace, codec: str) -> dict[str, Any]:
    """The variant of the layout that the command line names; BadInput where the layout has none."""
    settings = {}
    for name, owner, value in (
        ("header_bytes", "rustlog", args.header_bytes),
        ("index_width", "laminar", args.index_width),
    ):
        if value is not None:
            if codec != owner:
                option = name.replace("_", "-")
                raise BadInput(f"--{option} is for {owner} logs, not for {codec}; nothing was changed, leave it out")
            settings[name] = value
    return settings


def _add_variant_options(parser: ArgumentParser) -> None:
    for option, values, text in (
        ("--header-bytes", (12, 20), "of a new rustlog log: 12 as the RustLog program writes, 20 with a time (20)"),
        ("--index-width", (4, 8), "of a new laminar log: bytes of an index, u32 or u64 (4)"),
    ):
        parser.add_argument(option, type=int, choices=values, help=text)


# ── cat ───────────────────────────────────────────────────────────────────────────────────────────


def cat(args: Namespace, screen: Screen) -> int:
    """Print records, a few megabytes at a time."""
    codec = existing_codec(PosixDisk(), args.dir, args.codec)
    # Every record is checked when it is read: no need to check all of them at open.
    with SegmentedLog.open(
        args.dir, codec, read_only=True, verify_on_open=False, unverified=_unverified(args, codec)
    ) as log:
        for rows in limit_records(log.batches(args.first, skip_damage=args.skip_damage), args.limit):
            if args.json:
                screen.write_data(encode_json_lines(rows))
            else:
                screen.write_data(b"\n".join([*copy_values(rows.buf, rows.data), b""]))
        if log.damage_skipped:
            screen.print_note(f"skipped {plural(log.damage_skipped, 'damaged place')}; see tidelog log verify")
    return 0


def limit_records(batches: Iterable[Rows], limit: int | None) -> Iterator[Rows]:
    """Yield the first `limit` records, and read no further."""
    left = limit
    for rows in batches if limit != 0 else ():
        if left is not None and left <= len(rows):
            yield rows.slice(0, left)
            return
        yield rows
        left = left if left is None else left - len(rows)


def encode_json_lines(rows: Rows) -> bytes:
    """Encode one JSON object per record."""
    times = np.datetime_as_string(rows.ts_us.astype("datetime64[us]"), timezone="UTC").tolist()
    lines = []
    columns = zip(
        rows.seq.tolist(),
        rows.ts_us.tolist(),
        times,
        copy_values(rows.buf, rows.data),
        *(_column_values(rows, span) for span in (rows.node, rows.tag, rows.meta)),
        strict=False,
    )
    for seq, ts_us, time, data, node, tag, meta in columns:
        line: dict[str, object] = {"seq": seq, "ts": time if ts_us else None, **bytes_field("data", data)}
        for name, value in (("node", node), ("tag", tag), ("meta", meta)):
            if value:
                line |= bytes_field(name, value)
        lines.append(line)
    return bytes(_JSON_ENCODER.encode_lines(lines))


def _column_values(rows: Rows, span: Span | None) -> Iterable[bytes]:
    return repeat(b"") if span is None else copy_values(rows.buf, span)


# ── inspect ───────────────────────────────────────────────────────────────────────────────────────


def inspect(args: Namespace, screen: Screen) -> int:
    """Show the segments of a log, without reading the data of sealed ones."""
    codec = existing_codec(PosixDisk(), args.dir, args.codec)
    with SegmentedLog.open(args.dir, codec, read_only=True, unverified=_unverified(args, codec)) as log:
        infos = commitlog.inspect(log)
        first_us = min((info.first_us for info in infos if info.first_us), default=None)
        last_us = max((info.last_us for info in infos if info.last_us), default=None)
        fields = {
            "path": log.path,
            "codec": codec,
            "lowest": log.lowest,
            "highest": log.highest,
            "seqs": len(log),
            "bytes": log.size,
            "first_ts": format_time(first_us),
            "last_ts": format_time(last_us),
            "segments": [segment_fields(info) for info in infos],
            "recovery": report_fields(log.report),
        }
        counted = f"{plural(len(infos), 'segment')}, {format_seqs(log.lowest, log.highest)}, {format_bytes(log.size)}"
        findings = log.report.lines()
    written = [f"written from {format_time(first_us)} to {format_time(last_us)}"] if first_us else []
    recovery = "recovery has nothing to do"
    if findings:
        recovery = "the next open for writing finds this (repair does it now):"
    screen.print_result(
        fields,
        f"{args.dir}: a {codec} log, {counted}",
        *written,
        titles=SEGMENT_TITLES,
        rows=[segment_row(info) for info in infos],
        after=[recovery, *(f"  {line}" for line in findings)],
    )
    return 0


# ── verify ────────────────────────────────────────────────────────────────────────────────────────


def verify(args: Namespace, screen: Screen) -> int:
    """Check every checksum and rule; return 1 where something is damaged."""
    codec = existing_codec(PosixDisk(), args.dir, args.codec)
    with screen.progress_bar(f"verifying {args.dir}", total=1) as bar:
        result = commitlog.verify(args.dir, codec, progress=bar, unverified=_unverified(args, codec))
    damage = sorted(result.damage, key=lambda damage: (damage.fault.seq, damage.fault.pos))
    fields = {
        "ok": result.ok,
        "path": args.dir,
        "codec": codec,
        "segments": result.segments,
        "records": result.records,
        "bytes": result.bytes,
        "damage": [damage_fields(each) for each in damage],
        "notes": result.notes,
    }
    counted = (
        f"{plural(result.records, 'record')} in {plural(result.segments, 'segment')}, {format_bytes(result.bytes)}"
    )
    lines = [f"note: {note}" for note in result.notes]
    if result.ok:
        screen.print_result(fields, f"{args.dir}: no damage, {counted} ({codec})", *lines)
        return 0
    first, *others = [damage_line(each) for each in damage]
    screen.print_result(
        fields,
        f"{args.dir}: damage in {first}",
        *(f"  and in {other}" for other in others),
        *lines,
        f"the records around it can be read: tidelog log cat {args.dir} --skip-damage",
    )
    return 1


def convert(args: Namespace, screen: Screen) -> int:
    """Write a log again in another codec's layout."""
    codec = existing_codec(PosixDisk(), args.source, args.codec)
    with (
        SegmentedLog.open(args.source, codec, read_only=True, unverified=_unverified(args, codec)) as log,
        _report_if_incomplete(args.destination, screen),
        screen.progress_bar(f"converting {args.source}", total=len(log)) as bar,
    ):
        copy = commitlog.convert(
            log,
            args.destination,
            args.to,
            renumber=args.renumber,
            drop=args.drop,
            clamp_times=args.clamp_times,
            progress=bar,
            **_variant(args, args.to),
        )
        copy.close()
    screen.print_result(
        {
            "path": args.destination,
            "codec": args.to,
            "lowest": copy.lowest,
            "highest": copy.highest,
            "seqs": len(copy),
            "bytes": copy.size,
        },
        f"{args.destination}: a {args.to} log, {format_seqs(copy.lowest, copy.highest)}, {format_bytes(copy.size)}",
    )
    return 0


def restore(args: Namespace, screen: Screen) -> int:
    """Copy a log as it was at a seq or a time."""
    codec = existing_codec(PosixDisk(), args.source, args.codec)
    with (
        SegmentedLog.open(args.source, codec, read_only=True) as log,
        _report_if_incomplete(args.destination, screen),
        screen.progress_bar(f"restoring {args.source}", total=1) as bar,
    ):
        result = commitlog.restore(log, args.destination, to_seq=args.to_offset, to_time_us=args.to_time, progress=bar)
        left_out = log.highest - result.highest
    screen.print_result(
        {
            "path": result.path,
            "codec": codec,
            "lowest": result.lowest,
            "highest": result.highest,
            "bytes": result.bytes,
            "left_out": left_out,
        },
        f"{result.path}: a {codec} log, {format_seqs(result.lowest, result.highest)}, {format_bytes(result.bytes)}; "
        f"{plural(left_out, 'later seq')} left out",
    )
    return 0


@contextmanager
def _report_if_incomplete(path: str, screen: Screen) -> Iterator[None]:
    """Set the hint about an incomplete directory where the block fails after it began to fill a new one."""
    before = _has_content(path)
    failed = True
    try:
        yield
        failed = False
    finally:
        if failed and not before and _has_content(path):
            screen.unfinished_hint = f"{path} is incomplete; remove it before you try again"


def _has_content(path: str) -> bool:
    disk = PosixDisk()
    stat = disk.stat(path)
    return stat is not None and (not stat.is_dir or bool(disk.list_dir(path)))


_OBJECT_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STRING_DECODER = msgspec.json.Decoder(str)


class KeyRule(NamedTuple):
    name: str
    key: Callable[[Record], bytes | None]
    is_tombstone: Callable[[Record], bool]
    required_column: str | None = None  # the column it reads, where not every layout can store it


def parse_key_rule(text: str) -> KeyRule:
    """Parse `tag`, `json:FIELD` or `prefix:SEP`."""
    kind, _, rest = text.partition(":")
    if text == "tag":
        return KeyRule(text, lambda record: record.tag or None, lambda record: not record.data, "tag")
    if kind == "json" and rest:
        return _json_field_rule(text, rest)
    if kind == "prefix" and rest:
        return _prefix_rule(text, parse_bytes(rest))
    raise ArgumentTypeError(f"{text!r} is no key; write tag, json:FIELD or prefix:SEP")


def _prefix_rule(name: str, separator: bytes) -> KeyRule:
    def key(record: Record) -> bytes | None:
        before, matched, _ = record.data.partition(separator)
        return before if matched and before else None

    return KeyRule(name, key, lambda record: not record.data.partition(separator)[2])


def _json_field_rule(name: str, field: str) -> KeyRule:
    def key(record: Record) -> bytes | None:
        value = _json_fields(record.data).get(field, b"null")
        return None if value == b"null" else _normalize_key(value)

    def is_tombstone(record: Record) -> bool:
        return all(value == b"null" for other, value in _json_fields(record.data).items() if other != field)

    return KeyRule(name, key, is_tombstone)


def _json_fields(data: bytes) -> dict[str, bytes]:
    """Return the fields of a JSON object, each value as its bytes; empty where the data is no JSON object."""
    try:
        return {name: bytes(value).strip() for name, value in _OBJECT_DECODER.decode(data).items()}
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}


def _normalize_key(value: bytes) -> bytes | None:
    if not value.startswith(b'"'):
        return value
    try:
        # With the first quote, so that "7" and 7 are two keys.
        return b'"' + _STRING_DECODER.decode(value).encode()
    except (msgspec.DecodeError, UnicodeError):
        return None


_READ_CHUNK_BYTES = 1 << 20


def _open_log(args: Namespace, screen: Screen) -> SegmentedLog:
    """Open an existing log for writing and print the repairs of recovery."""
    codec = existing_codec(PosixDisk(), args.dir, args.codec)
    log = SegmentedLog.open(args.dir, codec)
    _print_recovery(log, screen)
    return log


def _print_recovery(log: SegmentedLog, screen: Screen) -> None:
    for line in log.report.lines():
        screen.print_note(f"recovery: {line}")


# ── append ────────────────────────────────────────────────────────────────────────────────────────


class ByteSource(Protocol):
    def read1(self, size: int, /) -> bytes: ...


def stdin_source() -> ByteSource:
    return sys.stdin.buffer  # type: ignore[return-value]  # a BufferedReader, which typeshed does not say


def append(args: Namespace, screen: Screen) -> int:
    """Write standard input: a record a line, or one record with --stream."""
    source = stdin_source()
    codec = codec_to_write(PosixDisk(), args.dir, args.codec)
    config = LogConfig(sync=args.sync, segment_bytes_max=args.segment_bytes, **_variant(args, codec))
    with SegmentedLog.open(args.dir, codec, config=config) as log:
        _print_recovery(log, screen)
        first = log.highest
        try:
            if args.stream:
                chunks = iter(lambda: source.read1(_READ_CHUNK_BYTES), b"")
                log.append_stream(chunks, node=args.node, tag=args.tag, meta=args.meta, expected=args.expect)
            else:
                _append_lines(args, screen, log, source)
        finally:
            # Also right after an error: this process is the only writer, and closing cuts uncommitted bytes.
            screen.acked = range(first, log.highest)
    if args.acks and not args.stream:
        screen.print_note(describe_written(screen.acked))
    else:
        screen.print_result(acked_fields(screen.acked), describe_written(screen.acked))
    return 0


def _append_lines(args: Namespace, screen: Screen, log: SegmentedLog, source: ByteSource) -> None:
    first, expected = log.highest, args.expect
    line_bytes_max = args.segment_bytes + args.segment_bytes // 2
    with screen.progress_bar(f"appending to {args.dir}") as bar:
        for batch in read_lines(source, args.batch, line_bytes_max):
            seqs = log.append_many(batch, node=args.node, tag=args.tag, meta=args.meta, expected=expected)
            expected = None
            if args.acks:
                screen.print_result(acked_fields(seqs), format_seqs(seqs.start, seqs.stop))
                screen.flush()
            elif not sys.stdin.isatty():  # a bar would write over what a person types
                bar(seqs.stop - first, None)
    if expected is not None:
        log.append_many([], expected=expected)  # there were no lines; check the expected seq all the same


def read_lines(source: ByteSource, batch: int, line_bytes_max: int) -> Iterator[list[bytes]]:
    """Yield lines without their newlines, at most `batch` at a time, and none later than the source delivers it: a
    slow source gets acks line by line, a fast one by the batch. The last line needs no newline."""
    pieces: list[bytes] = []
    pending_bytes = 0  # of a line without its end
    while chunk := source.read1(_READ_CHUNK_BYTES):
        if b"\n" not in chunk:
            pieces.append(chunk)
            pending_bytes += len(chunk)
            if pending_bytes > line_bytes_max:
                raise TooLarge("a line of standard input", size=pending_bytes, limit=line_bytes_max)
            continue
        *lines, rest = b"".join([*pieces, chunk]).split(b"\n")
        for first in range(0, len(lines), batch):
            yield lines[first : first + batch]
        pieces, pending_bytes = [rest] if rest else [], len(rest)
    if pending_bytes:
        yield [b"".join(pieces)]


def acked_fields(acked: range) -> dict[str, int | None]:
    first, last = (acked.start, acked.stop - 1) if acked else (None, None)
    return {"first": first, "last": last, "records": len(acked), "next_seq": acked.stop}


def describe_written(acked: range) -> str:
    if not acked:
        return f"nothing was written, the next seq is {acked.stop}"
    return f"wrote {plural(len(acked), 'record')}, {format_seqs(acked.start, acked.stop)}"


# ── repair, seal, truncate ────────────────────────────────────────────────────────────────────────


def repair(args: Namespace, screen: Screen) -> int:
    """Open for writing, which recovers, and check everything; return 1 where damage remains."""
    codec = existing_codec(PosixDisk(), args.dir, args.codec)
    with SegmentedLog.open(args.dir, codec, verify_on_open=True, repair=True) as log:
        report, seqs = log.report, format_seqs(log.lowest, log.highest)
    ok = not report.damage
    state = "was whole" if report.clean else "is whole now" if ok else "still has damage"
    screen.print_result(
        {"ok": ok, "path": args.dir, "codec": codec, **report_fields(report)},
        f"{args.dir} {state}: {seqs} ({codec})",
        *(f"  {line}" for line in report.lines()),
    )
    return 0 if ok else 1


def seal(args: Namespace, screen: Screen) -> int:
    """Make the active segment immutable and start another."""
    with _open_log(args, screen) as log:
        active = log.segments[-1]
        sealed = log.seal()
    screen.print_result(
        {"sealed": sealed, "first": active.start if sealed else None, "last": active.stop - 1 if sealed else None},
        f"sealed {format_seqs(active.start, active.stop)}"
        if sealed
        else "nothing to seal: the active segment is empty",
    )
    return 0


def truncate(args: Namespace, screen: Screen) -> int:
    """Remove every record from a seq on."""
    with _open_log(args, screen) as log:
        removed = log.truncate(args.to)
    screen.print_result(
        {"forgotten": removed, "first": args.to, "last": args.to + removed - 1, "next_seq": args.to},
        f"removed {format_seqs(args.to, args.to + removed)}; the next seq is {args.to}",
    )
    return 0


# ── retain, compact ───────────────────────────────────────────────────────────────────────────────


def retain(args: Namespace, screen: Screen) -> int:
    """Drop the oldest sealed segments past an age or a size."""
    if args.keep_ms is None and args.keep_bytes is None:
        raise BadInput("no limit is given; nothing was dropped, give --keep, --keep-ms or --keep-bytes")
    if is_root(PosixDisk(), args.dir):
        return log_root.retain(args, screen)
    if args.topic is not None:
        raise BadInput("--topic is for a root of partitions; nothing was dropped, leave it out")
    with _open_log(args, screen) as log:
        done = log.retain(keep_ms=args.keep_ms, keep_bytes=args.keep_bytes, high_watermark=args.high_watermark)
    dropped = (
        f"dropped {plural(done.segments, 'segment')} ({plural(done.records, 'seq')}, {format_bytes(done.bytes)})"
        if done.segments
        else "dropped nothing"
    )
    screen.print_result(
        {
            "segments": done.segments,
            "records": done.records,
            "bytes": done.bytes,
            "lowest": done.lowest,
            "because": done.reason,
        },
        f"{dropped}; the log starts at seq {done.lowest}: {done.reason}",
    )
    return 0


def compact(args: Namespace, screen: Screen) -> int:
    """Keep the newest record of every key in the sealed segments."""
    rule: KeyRule = args.key
    codec = existing_codec(PosixDisk(), args.dir, args.codec)
    if rule.required_column and rule.required_column not in make_codec(codec, LogConfig()).supported_columns:
        raise BadInput(
            f"{args.dir}: the {codec} layout has no {rule.required_column}; nothing was dropped, use json:FIELD or "
            "prefix:SEP"
        )
    with _open_log(args, screen) as log, screen.progress_bar(f"compacting {args.dir}", total=1) as bar:
        screen.unfinished_hint = "compacted segments stay and nothing else changed, run it again to continue"
        tombstone = rule.is_tombstone if args.tombstones else None
        done = log.compact(rule.key, is_tombstone=tombstone, progress=bar)
        active = log.segments[-1]
    screen.print_result(
        {
            "segments": done.segments,
            "dropped": done.dropped,
            "kept": done.kept,
            "bytes_before": done.bytes_before,
            "bytes_after": done.bytes_after,
            "resumed_at": done.resumed_at,
            "unsealed": len(active),
        },
        f"dropped {plural(done.dropped, 'record')} and kept {done.kept:,}; "
        f"{plural(done.segments, 'segment')} rewritten, {format_bytes(done.bytes_before)} -> "
        f"{format_bytes(done.bytes_after)}",
    )
    if active:
        screen.print_note(
            f"{format_seqs(active.start, active.stop)} are in the active segment, which is never compacted; "
            f"tidelog log seal {args.dir} closes it"
        )
    return 0


_DESCRIPTION = """\
A log is a directory of numbered records that grows at its end. Every record has a seq,
assigned once. Four layouts (codecs) are understood: tide, Tidelog's own; rustlog; laminar; narwhal.
The codec of an existing log is recognised by its files.

exit codes: 0 done, 1 damage, 2 refused or failed, 130 interrupted
"""

_FIRST_STEPS = """\
start here:
  $ printf 'hello\\nworld\\n' | tidelog log append events
  $ tidelog log cat events --json
  $ tidelog log inspect events
"""


def add(commands: Commands) -> None:
    """Add the `log` group to the command line."""
    short = "segmented logs on disk: append, read, check, repair, clean, copy"
    verbs = add_group(commands, "log", summary=short, description=_DESCRIPTION, first_steps=_FIRST_STEPS)
    _add_append(verbs)
    _add_cat(verbs)
    _add_inspections(verbs)
    _add_repairs(verbs)
    _add_retention(verbs)
    _add_copies(verbs)
    log_root.add(verbs)


def _add_log_command(
    subcommands: Commands,
    name: str,
    run: CommandFunction,
    *positionals: str,
    summary: str,
    description: str,
    example: str,
    codec: str = "",
) -> ArgumentParser:
    parser = add_command(
        subcommands, name, run, *positionals, summary=summary, description=description, examples=example
    )
    parser.add_argument("--codec", choices=CODEC_NAMES, help=codec or "the log's layout (recognised by its files)")
    if run in (cat, inspect, verify, convert):
        help_text = "read a laminar store whose hash function is unknown, without checking its records"
        parser.add_argument("--unverified", action="store_true", help=help_text)
    return parser


def _add_append(subcommands: Commands) -> None:
    parser = _add_log_command(
        subcommands,
        "append",
        append,
        "DIR",
        summary="write records from standard input",
        description="Write each line of standard input as one record, without its newline, or all of it as one record\n"
        "with --stream. A missing log is created. The seqs are printed once the records are written; --sync says\n"
        "whether they are durable then.",
        example="printf 'hello\\nworld\\n' | tidelog log append events --codec tide --sync each",
        codec="layout of a new log (tide); an existing log has its own",
    )
    parser.add_argument(
        "--sync",
        choices=("each", "batch", "interval"),
        default="batch",
        help="each: a record is on disk before the next is written. batch: a batch is, with one sync (the default). "
        "interval: the operating system has it, the disk follows within 50 ms",
    )
    add_line_options(parser)
    parser.add_argument(
        "--segment-bytes",
        type=parse_positive_size,
        default=LogConfig().segment_bytes_max,
        metavar="N",
        help="start a new segment file past this size (64m)",
    )
    parser.add_argument("--stream", action="store_true", help="one record from all of standard input, chunk by chunk")
    parser.add_argument("--acks", action="store_true", help="print the seqs of every batch as soon as it is written")
    parser.add_argument("--node", type=parse_bytes, default=b"", help="where the records come from (tide, narwhal)")
    parser.add_argument("--tag", type=parse_bytes, default=b"", help="the records' delete key (tide)")
    meta = parser.add_mutually_exclusive_group()
    meta.add_argument("--meta", type=parse_bytes, default=b"", help="the records' metadata (tide, laminar)")
    meta.add_argument("--meta-hex", type=parse_hex, dest="meta", metavar="HEX", help="the same in hex digits")
    _add_variant_options(parser)
    parser.add_argument(
        "--expect", type=parse_count, metavar="N", help="write only if the first record gets this seq; else refuse"
    )


def _add_cat(subcommands: Commands) -> None:
    parser = _add_log_command(
        subcommands,
        "cat",
        cat,
        "DIR",
        summary="print records",
        description="Print the data of every record and a newline, or with --json one object a line: seq, ts\n"
        "(null where the layout stores no time), data (data_base64 where it is not UTF-8), node, tag, meta.\n"
        "Works beside a writer, and only reads. A damaged record ends it with exit code 1.",
        example="tidelog log cat events --from 100 --limit 10 --json",
    )
    parser.add_argument("--from", type=parse_count, dest="first", metavar="N", help="the first seq (the log's first)")
    parser.add_argument("--limit", type=parse_count, metavar="N", help="this many records at most")
    parser.add_argument("--skip-damage", action="store_true", help="pass over records that cannot be read")


def _add_inspections(subcommands: Commands) -> None:
    _add_log_command(
        subcommands,
        "inspect",
        inspect,
        "DIR",
        summary="show segments, ranges, sizes and index health",
        description="Show the segments of a log: seq ranges, sizes, times, the state of every index, and the repairs\n"
        "that recovery would make. Changes nothing.",
        example="tidelog log inspect events",
    )
    _add_log_command(
        subcommands,
        "verify",
        verify,
        "DIR",
        summary="check every checksum; exit code 1 on damage",
        description="Read every byte and check every checksum and rule. Damage is named by file, byte and seqs, the\n"
        "first place first, and gives exit code 1. Notes are repaired by the next open for writing; they do not\n"
        "fail. Changes nothing.",
        example="tidelog log verify events && echo all good",
    )


def _add_repairs(subcommands: Commands) -> None:
    _add_log_command(
        subcommands,
        "repair",
        repair,
        "DIR",
        summary="recover after a crash and print the repairs",
        description="Open the log as a writer would: cut an unfinished last record, rebuild indexes, sweep "
        "temporaries.\n"
        "Bytes that may be more than an unfinished write go to quarantine/ first. Damage in sealed segments\n"
        "cannot be repaired; it is listed and gives exit code 1, and the other records are served as before.",
        example="tidelog log repair events",
    )
    _add_log_command(
        subcommands,
        "seal",
        seal,
        "DIR",
        summary="close the active segment and start another",
        description="Make the active segment immutable. Retention and compaction work on sealed segments only.",
        example="tidelog log seal events",
    )
    parser = _add_log_command(
        subcommands,
        "truncate",
        truncate,
        "DIR",
        summary="remove every record from a seq on",
        description="Remove every record from seq N on; the next record gets seq N. This cannot be undone, and there\n"
        "is no question: `tidelog log restore` makes a shorter copy instead.",
        example="tidelog log truncate events --to 100",
    )
    parser.add_argument("--to", type=parse_count, required=True, metavar="N", help="the first seq to remove")


def _add_retention(subcommands: Commands) -> None:
    parser = _add_log_command(
        subcommands,
        "compact",
        compact,
        "DIR",
        summary="keep the newest record of every key",
        description="Drop every record of the sealed segments that a later one with the same key supersedes. Seqs and "
        "times\n"
        "stay; records without a key stay. Keys:\n"
        "  tag          the record's tag\n"
        "  json:FIELD   that field of the JSON object in the data\n"
        "  prefix:SEP   the bytes before the first SEP",
        example="tidelog log compact carts --key json:cart_id",
    )
    key_help = "tag, json:FIELD or prefix:SEP"
    parser.add_argument("--key", type=parse_key_rule, required=True, metavar="KEY", help=key_help)
    parser.add_argument(
        "--tombstones",
        action="store_true",
        help="also drop a key whose newest record is empty: no data (tag), no bytes after SEP (prefix), no other "
        "field or only null ones (json)",
    )
    parser = _add_log_command(
        subcommands,
        "retain",
        retain,
        "DIR",
        summary="drop old segments by age or size",
        description="Drop the oldest sealed segments past a limit; either limit is enough. The active segment stays,\n"
        "and so do segments with uncommitted records of a consumer or past the high watermark. DIR may be a root of\n"
        "partitions, as RustLog has it: then of every partition, or of those of one --topic.",
        example="tidelog log retain events --keep 7d --keep-bytes 10g",
    )
    age = parser.add_mutually_exclusive_group()
    age.add_argument("--keep", type=parse_age_ms, dest="keep_ms", metavar="AGE", help="30s, 15m, 12h, 7d, 2w")
    age.add_argument("--keep-ms", type=parse_count, metavar="N", help="the same in milliseconds")
    parser.add_argument("--keep-bytes", type=parse_size, metavar="N", help="bytes of the whole log: 4096, 64m, 10g")
    parser.add_argument("--topic", metavar="NAME", help="of a root of partitions: only this topic")
    parser.add_argument(
        "--high-watermark", type=parse_count, metavar="N", help="keep every segment that reaches past this seq"
    )


def _add_copies(subcommands: Commands) -> None:
    parser = _add_log_command(
        subcommands,
        "convert",
        convert,
        summary="write a log again in another layout",
        description="Write every record of SRC to a new log DST in another codec's layout, seqs and times kept. "
        "Nothing is\n"
        "dropped silently: a column that the target cannot store is refused unless --drop names it, a seq that\n"
        "it cannot store unless --renumber shifts all, times that step back unless --clamp-times raises them.",
        example="tidelog log convert events events-laminar --to laminar",
        codec="layout of SRC (recognised by its files)",
    )
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("destination", metavar="DST")
    parser.add_argument("--to", choices=CODEC_NAMES, required=True, help="layout of DST")
    parser.add_argument("--renumber", action="store_true", help="start at the target's own first seq")
    _add_variant_options(parser)
    parser.add_argument(
        "--drop",
        type=parse_columns,
        default=frozenset(),
        metavar="COLUMNS",
        help="leave out node, tag, meta (node,tag)",
    )
    parser.add_argument(
        "--clamp-times", action="store_true", help="raise a time that steps back to the latest one before it"
    )
    parser = _add_log_command(
        subcommands,
        "restore",
        restore,
        summary="copy a log as it was at a seq or a time",
        description="Copy SRC into the new directory DST as it was at a point in time: every record up to and "
        "including a\n"
        "seq, or not younger than a moment. SRC is only read.",
        example="tidelog log restore events events-monday --to-time 2026-01-31T12:00:00Z",
        codec="layout of SRC (recognised by its files)",
    )
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("destination", metavar="DST")
    end = parser.add_mutually_exclusive_group(required=True)
    end.add_argument("--to-offset", type=parse_count, metavar="N", help="the last seq to keep")
    end.add_argument(
        "--to-time",
        type=parse_moment_us,
        metavar="T",
        help="ISO 8601, UTC unless it names a zone; or microseconds since 1970",
    )
