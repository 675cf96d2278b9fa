"""[shell] Commands that only look: cat, inspect, verify. Nothing on disk changes, whatever they find."""

from __future__ import annotations

from argparse import Namespace
from base64 import b64encode
from collections.abc import Iterable, Iterator
from itertools import repeat

import msgspec
import numpy as np

from tidelog.cli.opening import codec_there
from tidelog.cli.render import (
    SEGMENT_TITLES,
    Screen,
    bytes_,
    damage_fields,
    damage_line,
    moment,
    report_fields,
    segment_fields,
    segment_row,
    several,
    span,
)
from tidelog.commitlog import SegmentedLog
from tidelog.commitlog import inspect as look_at
from tidelog.commitlog import verify as check
from tidelog.disk.posix import PosixDisk
from tidelog.formats.rows import Rows, Span, values

_JSON = msgspec.json.Encoder()


# ── cat ───────────────────────────────────────────────────────────────────────────────────────────


def cat(args: Namespace, screen: Screen) -> int:
    """Print records, a few megabytes at a time."""
    codec = codec_there(PosixDisk(), args.dir, args.codec)
    # Every record is checked as it is read, so a layout that checks all of them at open need not.
    with SegmentedLog.open(args.dir, codec, read_only=True, verify_on_open=False) as log:
        for rows in limited(log.batches(args.first, skip_damage=args.skip_damage), args.limit):
            if args.json:
                screen.data(json_lines(rows))
            else:
                screen.data(b"\n".join([*values(rows.buf, rows.data), b""]))
        if log.damage_skipped:
            screen.say(f"passed over {several(log.damage_skipped, 'damaged place')}; see tidelog log verify")
    return 0


def limited(batches: Iterable[Rows], limit: int | None) -> Iterator[Rows]:
    """The first `limit` records; stops reading once it has them."""
    left = limit
    for rows in batches if limit != 0 else ():
        if left is not None and left <= len(rows):
            yield rows.part(0, left)
            return
        yield rows
        left = left if left is None else left - len(rows)


def json_lines(rows: Rows) -> bytes:
    """One JSON object a record. Bytes that are not UTF-8 go as base64 under another name, so none are lost."""
    times = np.datetime_as_string(rows.ts_us.astype("datetime64[us]"), timezone="UTC").tolist()
    lines = []
    columns = zip(
        rows.seq.tolist(),
        rows.ts_us.tolist(),
        times,
        values(rows.buf, rows.data),
        *(_column(rows, span) for span in (rows.node, rows.tag, rows.meta)),
        strict=False,
    )
    for seq, ts_us, time, data, node, tag, meta in columns:
        line: dict[str, object] = {"seq": seq, "ts": time if ts_us else None}
        _put(line, "data", data)
        for name, value in (("node", node), ("tag", tag), ("meta", meta)):
            if value:
                _put(line, name, value)
        lines.append(line)
    return bytes(_JSON.encode_lines(lines))


def _column(rows: Rows, span: Span | None) -> Iterable[bytes]:
    return repeat(b"") if span is None else values(rows.buf, span)


def _put(line: dict[str, object], name: str, value: bytes) -> None:
    try:
        line[name] = value.decode()
    except UnicodeDecodeError:
        line[f"{name}_base64"] = b64encode(value).decode()


# ── inspect ───────────────────────────────────────────────────────────────────────────────────────


def inspect(args: Namespace, screen: Screen) -> int:
    """Say what lies in a directory, without reading the data of sealed segments."""
    codec = codec_there(PosixDisk(), args.dir, args.codec)
    with SegmentedLog.open(args.dir, codec, read_only=True) as log:
        infos = look_at(log)
        first_us = min((info.first_us for info in infos if info.first_us), default=None)
        last_us = max((info.last_us for info in infos if info.last_us), default=None)
        fields = {
            "path": log.path,
            "codec": codec,
            "lowest": log.lowest,
            "highest": log.highest,
            "seqs": len(log),
            "bytes": log.size,
            "first_ts": moment(first_us),
            "last_ts": moment(last_us),
            "segments": [segment_fields(info) for info in infos],
            "recovery": report_fields(log.report),
        }
        counted = f"{several(len(infos), 'segment')}, {span(log.lowest, log.highest)}, {bytes_(log.size)}"
        said = log.report.lines()
    screen.answer(fields, f"{args.dir}: a {codec} log, {counted}")
    if screen.json:
        return 0
    if first_us:
        print(f"written from {moment(first_us)} to {moment(last_us)}")
    screen.table(SEGMENT_TITLES, [segment_row(info) for info in infos])
    print("recovery has nothing to do" if not said else "the next open for writing finds this (repair does it now):")
    for line in said:
        print(f"  {line}")
    return 0


# ── verify ────────────────────────────────────────────────────────────────────────────────────────


def verify(args: Namespace, screen: Screen) -> int:
    """Hold every byte against every checksum and rule; 1 where something is damaged."""
    codec = codec_there(PosixDisk(), args.dir, args.codec)
    with screen.bar(f"verifying {args.dir}", total=1) as bar:
        verdict = check(args.dir, codec, progress=bar)
    damage = sorted(verdict.damage, key=lambda damage: (damage.fault.seq, damage.fault.pos))
    fields = {
        "ok": verdict.ok,
        "path": args.dir,
        "codec": codec,
        "segments": verdict.segments,
        "records": verdict.records,
        "bytes": verdict.bytes,
        "damage": [damage_fields(each) for each in damage],
        "notes": verdict.notes,
    }
    counted = f"{several(verdict.records, 'record')} in {several(verdict.segments, 'segment')}, {bytes_(verdict.bytes)}"
    lines = [f"note: {note}" for note in verdict.notes]
    if verdict.ok:
        screen.answer(fields, f"{args.dir}: no damage, {counted} ({codec})", *lines)
        return 0
    first, *others = [damage_line(each) for each in damage]
    screen.answer(
        fields,
        f"{args.dir}: damage in {first}",
        *(f"  and in {other}" for other in others),
        *lines,
        f"the records around it can be read: tidelog log cat {args.dir} --skip-damage",
    )
    return 1
