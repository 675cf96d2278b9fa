"""docs/format.md says what is true: every example, size, name and number in it is held against golden files and code.

Each check is a function from the page's text to complaints, so that the tests at the end can change one
byte, one number or one name in a copy of the text and see it caught: a page whose test cannot fail drifts.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from struct import Struct, calcsize
from typing import Any, Literal, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from tidelog.commitlog import PartitionedLog, SegmentedLog, offsets, partitions
from tidelog.commitlog.codec import Batch, Codec
from tidelog.commitlog.codecs import CODEC_NAMES as CODECS
from tidelog.commitlog.codecs import laminar, make_codec, narwhal, rustlog, tide
from tidelog.config import LogConfig
from tidelog.disk.memory import MemoryDisk
from tidelog.engine import cold_claim
from tidelog.formats import (
    backup_manifest,
    batch,
    cold_object,
    control_frames,
    frame,
    key_index,
    large_record,
    sealed_segment,
    segment_index,
    small_files,
    tag_index,
)
from tidelog.testing import ManualClock

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
GOLDEN = ROOT / "tests" / "golden"
Order: TypeAlias = Literal["little", "big"]


def none(complaints: Iterable[str]) -> None:
    found = list(complaints)
    assert not found, "\n" + "\n".join(found)


@cache
def golden(name: str) -> bytes:
    data = (GOLDEN / name).read_bytes()
    return bytes.fromhex("".join(data.decode().split())) if name.endswith(".hex") else data


# How the page is read -----------------------------------------------------------------------------------


class Table(NamedTuple):
    before: str  # the paragraph in front of it
    header: list[str]
    rows: list[list[str]]

    def row(self, name: str, *, column: int = 0) -> list[str]:
        return next(row for row in self.rows if row[column] == name)


def tables(text: str) -> list[Table]:
    found: list[Table] = []
    before = ""
    for part in re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL).split("\n\n"):
        if part.lstrip("\n").startswith("|"):
            header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.strip().splitlines()]
            found.append(Table(before, header, rows))
        before = " ".join(part.split())
    return found


def table(text: str, *header: str) -> Table:
    return next(one for one in tables(text) if one.header[: len(header)] == list(header))


def number(said: str) -> int:
    """`10 485 760`, `2^63 - 2`."""
    terms = [term.partition("^") for term in re.sub(r"(?<=\d) (?=\d)", "", said).split(" - ")]
    values: list[int] = [int(base) ** int(power or 1) for base, _, power in terms]
    return values[0] - sum(values[1:])


def spaced(value: int) -> str:
    return f"{value:_}".replace("_", " ")


# Examples -----------------------------------------------------------------------------------------------

_SOURCE = r"(?:Golden file \[(?P<golden>[^\]]+)\]\(\.\./tests/golden/(?P=golden)\)|Made by `(?P<made>[^`]+)`)"
_SIZE = r"(?:all (?P<all>\d+)|the first (?P<first>\d+) of (?P<of>\d+)) bytes"
_BLOCK = re.compile(rf"^{_SOURCE}, {_SIZE}:\n```hex (?P<order>\w+)-endian\n(?P<body>.*?)^```$", re.M | re.S)
_INLINE = re.compile(rf"^{_SOURCE}, {_SIZE},\n(?P<order>\w+)-endian: `(?P<hex>[^`]+)`\n\((?P<notes>.*)\)\.$", re.M)
_JSON = re.compile(rf"^{_SOURCE}, {_SIZE}:\n```json\n(?P<body>.*?)\n```$", re.M | re.S)
_LINE = re.compile(r" *(?P<at>\d+)  (?P<hex>[0-9a-f]+(?: [0-9a-f]+)*)  +(?P<notes>.*)")
_VALUE = re.compile(r'[^=]+ = (?:"(?P<text>.*)"|(?P<numbers>\d+(?:, \d+)*)(?:$|\D.*))')
_SUM = re.compile(r"(xxh3|crc32) of bytes (\d+) to (\d+)(?: and (\d+) to (\d+))?")


class Field(NamedTuple):
    at: int  # as the page says, or as counted where it does not say
    hex: str
    note: str


class Example(NamedTuple):
    source: str
    right: bytes  # what is really there
    whole: bool
    size: int
    order: Order
    fields: list[Field]


@cache
def committed() -> bytes:
    disk = MemoryDisk()
    disk.make_dir("log")
    offsets.ConsumerOffsets(disk, "log/.consumer_offsets").commit("billing", 3)
    with disk.open("log/.consumer_offsets").map() as view:
        return bytes(view)


# Files of ours that have no golden file; they are made here instead.
MADE: dict[str, Callable[[], bytes]] = {'offsets.commit("billing", 3)': committed}


def examples(text: str) -> Iterator[Example]:
    for found in chain(_BLOCK.finditer(text), _INLINE.finditer(text)):
        source = found["golden"] or found["made"]
        right = golden(source) if found["golden"] else MADE[source]()
        order: Order = "little" if found["order"] == "little" else "big"
        groups = found.groupdict()
        lines = [_LINE.fullmatch(line) for line in groups["body"].splitlines()] if "body" in groups else [found]
        fields: list[Field] = []
        at = 0
        for line in lines:
            assert line is not None, f"{source}: a line of the example is not `position  hex  notes`"
            pieces, notes = line["hex"].split(), line["notes"].split(" · ")
            assert len(pieces) == len(notes), f"{source}: {len(pieces)} fields and {len(notes)} notes: {line['hex']}"
            at = int(line["at"]) if "body" in groups else at
            for piece, note in zip(pieces, notes, strict=True):
                fields.append(Field(at, piece, note))
                at += len(piece) // 2
        size = int(found["all"] or found["first"])
        whole = found["all"] is not None
        assert whole or int(found["of"]) == len(right), f"{source} has {len(right)} bytes"
        yield Example(source, right, whole, size, order, fields)


def value_complaint(field: Field, buf: bytes, order: Order) -> str | None:
    """What is wrong with the note of a field that lies in `buf`; only notes that say something checkable."""
    data = bytes.fromhex(field.hex)
    if said := _VALUE.fullmatch(field.note):
        if said["text"] is not None:
            return None if said["text"].encode() == data else f"{data!r} is not {said['text']!r}"
        values = [int(value) for value in said["numbers"].split(", ")]
        width = len(data) // len(values)
        right = [int.from_bytes(data[at : at + width], order) for at in range(0, len(data), width)]
        return None if right == values else f"{field.hex} is {right}, not {values}"
    if said := _SUM.fullmatch(field.note):
        ends = [int(end) for end in said.groups()[1:] if end is not None]
        covered = b"".join(buf[lo : hi + 1] for lo, hi in zip(ends[::2], ends[1::2], strict=True))
        counted = xxh3_64_intdigest(covered) if said[1] == "xxh3" else crc32(covered)
        return None if counted == int.from_bytes(data, order) else f"{field.hex} is not the {field.note}"
    return None


def example_complaints(text: str) -> Iterator[str]:
    count = 0
    for example in examples(text):
        count += 1
        shown = bytes.fromhex("".join(field.hex for field in example.fields))
        size = len(example.right) if example.whole else example.size
        if len(shown) != example.size or shown != example.right[:size]:
            yield f"{example.source}: the example is not its first {example.size} bytes"
        at = 0
        for field in example.fields:
            if field.at != at:
                yield f"{example.source}: {field.note!r} is at byte {at}, not {field.at}"
            if complaint := value_complaint(field, shown, example.order):
                yield f"{example.source}: {field.note!r}: {complaint}"
            at += len(field.hex) // 2
    for found in _JSON.finditer(text):
        count += 1
        right = golden(found["golden"])
        if found["body"].encode() != right or len(right) != int(found["all"] or 0):
            yield f"{found['golden']}: the example is another text"
    if count != len(re.findall(r"^(?:Golden file|Made by) ", text, re.MULTILINE)):
        yield "an example is not written as the others are, so nobody checks it"
    if len(re.findall(r"^```(?:hex|json)", text, re.MULTILINE)) != count - len(_INLINE.findall(text)):
        yield "a block of bytes does not say which golden file it is from"


def body_complaints(text: str) -> Iterator[str]:
    """The bodies of control frames are examples as well, one a row."""
    kinds = set()
    for kind, file, _, body in table(text, "#", "golden file").rows:
        found = re.fullmatch(r"\[([^\]]+)\]\(\.\./tests/golden/\1\)", file)
        assert found, f"{file} is not a link to a golden file"
        buf = golden(found[1])
        framed = frame.read_frame(buf, 0, len(buf))
        assert isinstance(framed, frame.Frame)
        kinds.add(framed.kind)
        right = buf[framed.data_pos : framed.data_end].hex()
        if (int(kind), body.strip("`").replace(" ", "")) != (framed.kind, right):
            yield f"{found[1]}: type {framed.kind} and the body {right}"
        if framed.flags != frame.DURABLE or f"ts {framed.ts_ms}" not in text:
            yield f"{found[1]}: another flag or time than the page says"
    if kinds != {kind for kind in frame.FRAME_NAMES if not frame.is_record(kind)}:
        yield f"control frames without an example, or an example without a control frame: {kinds}"


# Layouts ------------------------------------------------------------------------------------------------

Layout: TypeAlias = Struct | np.dtype[Any]

LAYOUTS: dict[str, Layout] = {
    "Frame header": frame.HEADER,
    "Batch head": batch._HEAD,
    "Index entry": segment_index.ENTRY,
    "Envelope": Struct(small_files._HEADER.format + small_files._CHECKSUM.format[1:]),
    "Footer head": sealed_segment._FOOTER_HEAD,
    "Tag index head": tag_index._HEAD,
    "Key index head": key_index._HEAD,
    "Deletion vector head": sealed_segment._DELETIONS_HEAD,
    "Record sizes head": sealed_segment._SIZES_HEAD,
    "Cold object entry": cold_object._ENTRY,
    "Cold object trailer": cold_object._TRAILER,
    "Snapshot head": small_files._SNAPSHOT_HEADER,
    "Channel cursor": small_files._CURSOR,
    "rustlog record header": rustlog.HEADER,
    "rustlog short record header": rustlog._LEAD,
    "rustlog index entry": rustlog.INDEX,
    "rustlog checksum": rustlog._CRC,
    "laminar content head": laminar._UNIT[4],
    "laminar wide content head": laminar._UNIT[8],
    "laminar marker": laminar.MARKER,
    "laminar index entry": laminar.INDEX,
    "narwhal record header": narwhal.HEADER,
    "narwhal index entry": narwhal.INDEX,
    "Binary checkpoint": rustlog._BINARY,
}
_CAPTION = re.compile(
    r"\*\*(?P<name>[\w ]+)\*\*, `(?P<struct>[<>]\w+)`, (?P<size>\d+) bytes, (?P<order>little|big)-endian"
    r"(?:: (?P<fields>[^.:]+)\.)?"
)
_CODES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "bytes": "s", "zero": "sx"}


class Slot(NamedTuple):
    at: int
    size: int
    code: str  # one or more letters of `struct`


def slots(layout: Layout) -> list[Slot]:
    if isinstance(layout, np.dtype):
        parts = [layout.fields[name][:2] for name in layout.names] if layout.fields and layout.names else [(layout, 0)]
        return [Slot(at, part.itemsize, "x" if part.subdtype else _unsigned(part.itemsize)) for part, at in parts]
    found: list[Slot] = []
    at = 0
    for count, code in re.findall(r"(\d*)([a-zA-Z])", layout.format[1:]):
        size, times = (int(count or 1), 1) if code in "sx" else (calcsize(f"<{code}"), int(count or 1))
        for _ in range(times):
            found.append(Slot(at, size, code))
            at += size
    return found


def _unsigned(size: int) -> str:
    return {1: "B", 2: "H", 4: "I", 8: "Q"}[size]


def order_of(layout: Layout) -> str:
    if isinstance(layout, Struct):
        return layout.format[0]
    parts = [layout.fields[name][0] for name in layout.names] if layout.fields and layout.names else [layout]
    return next(part.str[0] for part in parts if part.str[0] in "<>")


def said_slots(text: str, caption: re.Match[str]) -> list[Slot]:
    """The fields of fixed size as the page has them: in a table behind the caption, or listed in it."""
    if caption["fields"] is None:
        rows = next(one for one in tables(text) if one.before.startswith(f"**{caption['name']}**")).rows
        return [
            Slot(int(at), int(size), _CODES[kind]) for at, size, kind, *_ in rows if at.isdigit() and size.isdigit()
        ]
    found: list[Slot] = []
    at = 0
    rest = int(caption["size"])
    for said in caption["fields"].split(", "):
        *width, kind, _ = said.split()  # `u64 base`, `4 bytes magic`, `zero padding`
        fixed = rest if kind == "zero" else calcsize(f"<{_CODES[kind]}")
        size = int(width[0]) if width else fixed
        found.append(Slot(at, size, _CODES[kind]))
        at, rest = at + size, rest - size
    return found


def layout_complaints(text: str) -> Iterator[str]:
    captions = list(_CAPTION.finditer(" ".join(text.split())))
    if sorted(caption["name"] for caption in captions) != sorted(LAYOUTS):
        yield f"layouts on the page and in the code: {sorted({c['name'] for c in captions} ^ set(LAYOUTS))}"
        return
    for caption in captions:
        name, layout = caption["name"], LAYOUTS[caption["name"]]
        right, written = slots(layout), Struct(caption["struct"])
        if written.size != int(caption["size"]):
            yield f"{name}: `{written.format}` has {written.size} bytes"
        if [slot[:2] for slot in slots(written)] != [slot[:2] for slot in right]:
            yield f"{name}: `{written.format}` puts fields elsewhere than the code"
        if not written.format[0] == order_of(layout) == {"little": "<", "big": ">"}[caption["order"]]:
            yield f"{name}: the byte order is {order_of(layout)}"
        said = said_slots(text, caption)
        if [slot[:2] for slot in said] != [slot[:2] for slot in right]:
            yield f"{name}: fields at {said}, in the code at {right}"
        elif not all(in_code.code in on_page.code for on_page, in_code in zip(said, right, strict=True)):
            yield f"{name}: types {said}, in the code {right}"


# Words, numbers and names -------------------------------------------------------------------------------


def version_complaints(text: str) -> Iterator[str]:
    right = {
        ".foot": (sealed_segment.FOOTER_MAGIC, sealed_segment.FOOTER_VERSION),
        ".tag": (tag_index.MAGIC, tag_index.VERSION),
        ".key": (key_index.MAGIC, key_index.VERSION),
        ".del": (sealed_segment.DELETIONS_MAGIC, sealed_segment.DELETIONS_VERSION),
        ".siz": (sealed_segment.SIZES_MAGIC, sealed_segment.SIZES_VERSION),
        "cold object": (cold_object.MAGIC, cold_object.VERSION),
        "meta/COLD": (cold_claim._MAGIC, cold_claim._VERSION),
        ".consumer_offsets": (offsets._MAGIC, offsets._VERSION),
        ".partitions": (partitions._MAGIC, partitions._VERSION),
        "metadata.bin": (small_files.CHANNEL_MAGIC, small_files.CHANNEL_VERSION),
        ".tidelog.manifest": (small_files.MANIFEST_MAGIC, small_files.MANIFEST_VERSION),
        "tidelog-backup": (backup_manifest.LABEL_MAGIC, backup_manifest.LABEL_VERSION),
        ".manifest": (backup_manifest.BACKUP_MAGIC, backup_manifest.BACKUP_VERSION),
        "snapshot": (small_files.SNAPSHOT_MAGIC, small_files.CHAIN_VERSION),
        "blob": (large_record.BLOB_MAGIC, large_record.BLOB_VERSION),
    }
    rows = table(text, "file", "magic", "version").rows
    said = {re.sub(r"\[`?([^`\]]+)`?\].*", r"\1", file): (m.strip("`").encode(), int(v)) for file, m, v, _ in rows}
    if said != right:
        yield f"magics and versions are {right}, not {said}"
    for magic, version in list(right.values())[:10]:
        if f"`{magic.decode()}` {version}" not in text:
            yield f"no section says that it has an envelope `{magic.decode()}` {version}"


def constant_complaints(text: str) -> Iterator[str]:
    rows = table(text, "constant", "value").rows
    pairs = [pair for row in rows for pair in (row[:2], row[2:]) if pair[0]]
    if len(pairs) < 15:
        yield "numbers are missing"
    for name, said in pairs:
        module, _, constant = name.strip("`").partition(".")
        package = "commitlog.codecs" if module in CODECS else "formats"
        right = getattr(importlib.import_module(f"tidelog.{package}.{module}"), constant)
        if number(said) != right:
            yield f"{name} is {right}, not {said}"


def pairs(said: str) -> dict[int, str]:
    """`1 this, 2 that` as a table."""
    return {int(value): name for value, name in re.findall(r"(\d+) ([A-Za-z_]+)", said)}


def word_complaints(text: str) -> Iterator[str]:
    """Types, flags, kinds, events: what a byte's value means."""
    pieces = table(text, "piece of a body")
    columns = table(text, "in this order", "size", "there when")
    frames = next(one for one in tables(text) if one.before.startswith("**Frame header**"))
    entries = next(one for one in tables(text) if one.before.startswith("**Index entry**"))
    flags = pairs(frames.row("flags", column=3)[4])
    bits = {name: int(when[len("bflags has ") :].split(";")[0]) for name, _, when in columns.rows[1:5]}
    sizes = {name: calcsize(f"<{_CODES[size.split()[0]]}") for name, size, _ in columns.rows[:5]}
    widths = [sizes["data_len"] + sum(sizes[name] for name, bit in bits.items() if flag & bit) for flag in range(16)]
    checks: list[tuple[str, object, object]] = [
        ("types", {int(row[0]): row[1] for row in table(text, "type", "name", "topic_id").rows}, frame.FRAME_NAMES),
        ("flags of a frame", flags, {getattr(frame, name): name for name in flags.values()}),
        ("all flags of a frame", sum(flags), frame.KNOWN_FLAGS),
        (
            "flags of an entry",
            list(pairs(entries.row("flags", column=3)[4])),
            [
                segment_index.HAS_TAG,
                segment_index.HAS_NODE,
                segment_index.BATCH,
                segment_index.JSON,
                segment_index.HAS_META,
                segment_index.LARGE,
                segment_index.HOLE,
            ],
        ),
        (
            "columns of a batch",
            list(bits.values()),
            [batch._HAS_TAGS, batch._HAS_NODES, batch._HAS_METAS, batch._HAS_KINDS],
        ),
        ("their widths", widths, batch._LENGTHS_WIDTH),
        (
            "kinds",
            list(pairs(columns.row("kind")[2].split("; ")[1])),
            [batch.KIND_BYTES, batch.KIND_JSON, batch.KIND_HOLE],
        ),
        (
            "bools of a router",
            pairs(pieces.row("bools of a router")[1]),
            {1 << bit: name for bit, name in enumerate(control_frames._ROUTER_BOOLS)},
        ),
        (
            "events of a lease",
            pairs(pieces.row("event of a lease")[1]),
            {event.value: event.name.lower() for event in control_frames.LeaseEvent},
        ),
        (
            "operations of a match",
            pairs(re.findall(r"\(.*\)", pieces.row("match")[1])[0]),
            {op.value: op.name.lower() for op in control_frames.MatchOp},
        ),
        (
            "a topic mark",
            tuple(re.findall(r"[a-z]+_[a-z_]+", pieces.row("topic mark")[1])),
            control_frames.TopicMark._fields,
        ),
        ("the version of a mark", f"u32 version {control_frames.CHECKPOINT_VERSION}" in text, True),
        ("members of a checkpoint", list(json.loads(golden("rustlog/idle.cleaner_checkpoint"))), _members(text)),
    ]
    yield from (f"{what}: {said} and {right}" for what, said, right in checks if said != right)


def _members(text: str) -> list[str]:
    return list(json.loads(next(_JSON.finditer(text))["body"]))


def sentence_complaints(text: str) -> Iterator[str]:
    """Numbers that stand in a sentence or in the cell of a table."""
    reserve = make_codec("narwhal", LogConfig()).index_prealloc_bytes
    unfinished = int.from_bytes(make_codec("rustlog", LogConfig()).encode_stream_header(0, 0, Batch([b""]), -1)[:4])
    sentences = [
        f"bytes after this field: {frame.FRAME_LEN_MIN} + N + M + P",
        f"The smallest frame has {frame.OVERHEAD_BYTES} bytes",
        f"frame_len below {frame.FRAME_LEN_MIN};",
        f"1 to {max(frame.FRAME_NAMES)}; 0 is never written",
        f"about {batch.FRAME_BYTES_TARGET >> 10} KiB or {batch.FRAME_RECORDS_MAX} records",
        f"bflags above {len(batch._LENGTHS_WIDTH) - 1},",
        f"is at `(s - first) × {segment_index.ENTRY_BYTES}`",
        f"bytes of `.idx`: {segment_index.ENTRY_BYTES} × (stop - first)",
        f"under one checksum; {spaced(sealed_segment.CHUNK_BYTES)}",
        f"shorter than {small_files.FILE_HEADER_BYTES} bytes",
        f"the file has {small_files.FILE_HEADER_BYTES} + body_len bytes",
        f"a version below {small_files.SNAPSHOT_VERSION},",
        f"A version above {small_files.CHAIN_VERSION} is `NewerFormat`",
        f"A CheckpointMark of a version above {control_frames.CHECKPOINT_VERSION} is `NewerFormat`",
        f"a CheckpointMark of exactly {control_frames._BARRIER_BYTES} bytes",
        f"of the data only, at most {spaced(rustlog.RECORD_BYTES_MAX)}",
        f"number 0, {rustlog.INDEX_EVERY}, {2 * rustlog.INDEX_EVERY} …",
        f"size not a multiple of {rustlog.INDEX_ENTRY_BYTES},",
        f"`{laminar.MARKER_BYTES} + (s - first) × {laminar.INDEX_ENTRY_BYTES}`",
        f"F, at most {narwhal.FROM_BYTES_MAX}",
        f"node_len over {narwhal.FROM_BYTES_MAX},",
        f"{narwhal.OVERHEAD_BYTES} bytes around a record",
        f"whenever {narwhal.INDEX_BYTES} bytes or more",
        f"size 0 or not a multiple of {narwhal.INDEX_ENTRY_BYTES},",
        f"{spaced(reserve)} bytes by default",
        f"with length {spaced(unfinished)}",
        f"more than {spaced(small_files.METADATA_BYTES_MAX)} bytes",
    ]
    flat = " ".join(text.split())
    yield from (f"the page does not say: {said}" for said in sentences if said.lower() not in flat.lower())
    if {number(said) for said in re.findall(r"(?:seq|seqs) above (2\^\d+ - \d+)", flat)} != {frame.SEQ_MAX}:
        yield f"the highest seq is {frame.SEQ_MAX}"


def names_in(cell: str, first: int, digits: str) -> list[str]:
    return [name.replace("<first>", f"{first:0{digits}d}") for name in re.findall(r"`([^`]+)`", cell)]


def alternatives(pattern: re.Pattern[str]) -> set[str]:
    """What a pattern that ends in `(this|that)` may end in."""
    return set(pattern.pattern.rpartition("(")[2].strip(")").replace("\\", "").split("|"))


def name_complaints(text: str) -> Iterator[str]:
    said = table(text, "", *CODECS)
    patterns = {
        "tide": tide._TEMPORARY_PATTERN,
        "rustlog": rustlog._TEMPORARY_PATTERN,
        "laminar": laminar._TEMPORARY_PATTERN,
        "narwhal": narwhal._TEMPORARY_PATTERN,
    }
    digits = said.row("digits of `<first>`, at least")
    for column, name in enumerate(CODECS, 1):
        codec: Codec = make_codec(name, LogConfig())
        suffixes = {*codec.side_suffixes, codec.footer_suffix, codec.created_suffix} - {None}
        for first in (7, 10**18):
            cells = [said.row(row)[column] for row in ("data", "index", "beside them", "temporaries")]
            data, index, beside, temporaries = (names_in(cell, first, digits[column]) for cell in cells)
            found = [codec.parse_file_name(file) for file in [*data, *index, *beside]]
            if data != [codec.data_name(first)] or index != [codec.side_name(first, codec.side_suffixes[0])]:
                yield f"{name}: data and index are not {data} and {index}"
            if {part[1] for part in found if part and part[0] == first} != {"", *suffixes} or None in found:
                yield f"{name}: {[*data, *index, *beside]} are not the files of a segment"
            ends = {file.removeprefix(data[0].rpartition(".")[0]) for file in temporaries}
            if not all(map(codec.is_temporary, temporaries)) or ends != alternatives(patterns[name]):
                yield f"{name}: temporaries end in {sorted(alternatives(patterns[name]))}, not in {sorted(ends)}"
        room = {word for word in said.row("a record has, besides its data")[column].split(", ") if word != "nothing"}
        facts = [
            ("first seq", int(said.row("first seq of a new log")[column]), codec.first_seq),
            ("room", room, set(codec.supported_columns)),
            ("segment", number(said.row("bytes of a segment, at most")[column]), codec.segment_bytes_limit),
            ("record", number(said.row("bytes of a record, at most")[column]), codec.record_bytes_max),
            (
                "leader",
                said.row("a segment is there when there is")[column],
                "index" if 0 in codec.authoritative_sides else "data",
            ),
        ]
        yield from (f"{name}: {what} is {right}, not {on_page}" for what, on_page, right in facts if on_page != right)


def mention_complaints(text: str) -> Iterator[str]:
    """A layout that is frozen and not on the page is one that cannot be looked up."""
    for path in sorted(GOLDEN.glob("*/*")):
        name = path.relative_to(GOLDEN).as_posix()
        if (
            path.suffix not in (".py", ".pyc")
            and path.parent.name != "http"  # the OpenAPI document is on no disk
            and path.name != "manifest.json"
            and f"(../tests/golden/{name})" not in text
        ):
            yield f"tests/golden/{name} is not on the page"


Check: TypeAlias = Callable[[str], Iterator[str]]
CHECKS: list[Check] = [
    example_complaints,
    body_complaints,
    layout_complaints,
    version_complaints,
    constant_complaints,
    word_complaints,
    sentence_complaints,
    name_complaints,
    mention_complaints,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_page_agrees_with_the_golden_files_and_the_code(check: Check) -> None:
    none(check(PAGE))


# What a log really leaves behind ------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_a_log_leaves_the_files_that_the_page_names_and_no_others(codec: str, tmp_path: Path) -> None:
    directory = tmp_path / "log"
    with SegmentedLog.open(str(directory), codec, clock=ManualClock()) as log:
        first = log.lowest
        log.append_many([b"a", b"b", b"a"])
        log.seal()
        log.append(b"c")
        log.compact(lambda record: record.data)
        log.offsets.commit("billing", 3)
    said = table(PAGE, "", *CODECS)
    column = said.header.index(codec)
    digits = said.row("digits of `<first>`, at least")[column]
    expected = {
        file
        for base in (first, first + 3)
        for row in ("data", "index", "beside them")
        for file in names_in(said.row(row)[column], base, digits)
        if not (file.endswith(".foot") and base > first)  # written when a segment is sealed
    }
    others = [name for row in table(PAGE, "name", "what it is").rows for name in re.findall(r"`(\.[^`]+)`", row[0])]
    found = {path.name for path in directory.iterdir()}
    assert found == expected | set(others)
    assert re.fullmatch(r"pid=\d+\n", (directory / ".tidelog.lock").read_text())
    assert (directory / ".consumer_offsets").read_bytes() == committed()
    assert "such as `1700000000000000`" in PAGE
    assert {path.read_text() for path in directory.glob("*.created")} <= {"1700000000000000\n"}


def test_what_recovery_cuts_is_kept_under_the_name_that_the_page_gives(tmp_path: Path) -> None:
    with SegmentedLog.open(str(tmp_path), "tide") as log:
        log.append(b"a")
    data = tmp_path / "seg-0000000000000001.data"
    good = data.read_bytes()
    bad = frame.encode(frame.APPEND, seq=2, ts_ms=0, data=b"b")
    data.write_bytes(good + bad)  # its time falls
    with SegmentedLog.open(str(tmp_path), "tide") as log:
        assert log.highest == 3, "the seq of what was cut is not given again"
    said = table(PAGE, "name", "what it is").rows[4][0].strip("`")
    name = said.replace("<data file>", data.name).replace("<pos>", str(len(good)))
    assert (tmp_path / name).read_bytes() == bad


def test_partitions_lie_where_the_page_says(tmp_path: Path) -> None:
    with PartitionedLog.open(str(tmp_path)) as logs:
        logs.create_topic("orders", 2)
        logs.append("orders", 1, b"a")
        logs.offsets.commit("billing", 1, topic="orders", partition=1)
    said = re.findall(r"`([^`]+)`", next(part for part in PAGE.split("\n\n") if part.startswith("`PartitionedLog`")))
    assert {path.name for path in tmp_path.iterdir()} <= {name.strip("/") for name in said}
    assert said[1] == "topics/<topic>/partitions/<n>/"
    assert (tmp_path / said[1].replace("<topic>", "orders").replace("<n>", "1")).is_dir()


# The checks can fail ------------------------------------------------------------------------------------


def caught(text: str, checks: Iterable[Check] = CHECKS) -> bool:
    """Whether a check says something that it does not say of the page as it is, or cannot even read the text."""
    assert text != PAGE
    try:
        return any(complaint not in said_of_the_page(check) for check in checks for complaint in check(text))
    except (AssertionError, ValueError, LookupError, StopIteration, RuntimeError, AttributeError):
        return True


@cache
def said_of_the_page(check: Check) -> frozenset[str]:
    return frozenset(check(PAGE))


def changed(span: tuple[int, int], new: str) -> str:
    return PAGE[: span[0]] + new + PAGE[span[1] :]


def example_spans() -> Iterator[tuple[int, int]]:
    for found in _BLOCK.finditer(PAGE):
        for line in re.finditer(r"^ *\d+  ((?:[0-9a-f]+ )*[0-9a-f]+)  ", found["body"], re.MULTILINE):
            yield found.start("body") + line.start(1), found.start("body") + line.end(1)
    yield from (found.span("hex") for found in _INLINE.finditer(PAGE))
    yield from (found.span(1) for found in re.finditer(r"\| `([0-9a-f ]+)` \|$", PAGE, re.MULTILINE))


def test_one_changed_byte_in_a_copy_of_the_page_is_caught_wherever_it_is() -> None:
    """Method: every field of every example, its first byte with one bit flipped."""
    count = 0
    for lo, hi in example_spans():
        for group in re.finditer(r"[0-9a-f]+", PAGE[lo:hi]):
            at = lo + group.start()
            wrong = f"{int(PAGE[at : at + 2], 16) ^ 1:02x}"
            assert caught(changed((at, at + 2), wrong), [example_complaints, body_complaints]), PAGE[at - 40 : at + 40]
            count += 1
    assert count > 200, "the examples were found"


NUMBERS = {
    "values beside an example": r"(?<= = )\d+",
    "sizes of examples": r"(?<=all )\d+(?= bytes[:,])",
    "sizes of layouts": r"(?<=, )\d+(?= bytes, (?:little|big))",
    "where a field starts": r"(?<=^\| )\d+(?= \| \d+ \| (?:u8|u16|u32|u64|bytes|zero) )",
    "how long a field is": r"(?<=\d \| )\d+(?= \| (?:u8|u16|u32|u64|bytes|zero) \| )",
    "constants": r"(?<=[A-Z]` \| )\d+(?=[ ^])",
    "segments": r"(?<=bytes of a segment, at most \| )\d+",
    "first seqs": r"(?<=first seq of a new log \| )\d+",
    "types": r"(?<=^\| )\d+(?= \| [A-Z]\w+ \| )",
}


@pytest.mark.parametrize("pattern", NUMBERS.values(), ids=NUMBERS)
def test_one_changed_number_in_a_copy_of_the_page_is_caught(pattern: str) -> None:
    found = list(re.finditer(pattern, PAGE, re.MULTILINE))
    assert found
    for one in found:
        line = PAGE[PAGE.rfind("\n", 0, one.start()) + 1 : PAGE.find("\n", one.end())]
        assert caught(changed(one.span(), str(int(one[0]) + 1))), line


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("`<IBBQQQHHI`", "`<IBBQQQHIH`"),
        ("`>IQQ`, 20 bytes, big-endian", "`<IQQ`, 20 bytes, little-endian"),
        ("| 6 | 8 | u64 | topic_id |", "| 6 | 8 | bytes | topic_id |"),
        ("u32 crc32. In", "u64 crc32. In"),
        ("`TLSF` | 1 |", "`TLSF` | 2 |"),
        ("| `SNP1` |", "| `SNP2` |"),
        ("`seg-<first>.foot` |", "`seg-<first>.footer` |"),
        ("`<first>.crc.rebuilding` ", ""),
        ("| 16 | 20 | 1 | 20 |", "| 16 | 20 | 2 | 20 |"),
        ("node, tag, meta | nothing |", "node, tag | nothing |"),
        ("4 create_dest, 8 allow_cycle", "4 allow_cycle, 8 create_dest"),
        ("255 no record", "254 no record"),
        ("8 MORE, 16 JSON |", "16 MORE, 8 JSON |"),
        ("8 JSON, 16 meta,", "8 JSON, 32 meta,"),
        ("128 hole |", "64 hole |"),
        ("| meta_len | u32 × count |", "| meta_len | u16 × count |"),
        ("earliest_seq, delete_below", "delete_below, earliest_seq"),
        ("at most 510", "at most 512"),
        ('"compaction_state": "Idle"', '"compaction_state": "idle"'),
        ("(../tests/golden/tide/log.hex)", "(../tests/golden/tide)"),
        ("Golden file [tide/append.hex]", "From [tide/append.hex]"),
        ("xxh3 of bytes 4 to 47", "xxh3 of bytes 0 to 47"),
        ("crc32 of bytes 0 to 38", "crc32 of bytes 1 to 38"),
        ('node = "n1"', 'node = "n2"'),
        ("294 924 bytes", "393 228 bytes"),
    ],
)
def test_one_changed_word_in_a_copy_of_the_page_is_caught(old: str, new: str) -> None:
    assert PAGE.count(old) >= 1
    assert caught(PAGE.replace(old, new, 1))
