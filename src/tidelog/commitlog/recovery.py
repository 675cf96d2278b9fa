"""[shell] Disk → open log. The one module that is shell and policy at once, because what is found decides what is done.

Rules, in order of authority:
  1. Bytes that may hold an acked record are never dropped: what is cut and is not plainly a torn
     last record goes to `quarantine/` first, and the report says so.
  2. The last segment is the active one: it is scanned whole and cut at the first bad record.
  3. A sealed segment is never changed. Damage in it is reported, and everything else is served.
  4. Files that can be derived are rebuilt beside the old ones and renamed into place.
  5. Temporaries and half-removed segments are swept; names we do not know are left alone.
  6. Files whose layout is not understood are an error (UnknownLayout) before anything is changed. The end of an
     active segment that another program wrote is cut only where it is plainly an unfinished write, or on request.

With `writable=False` nothing on disk changes: cuts are logical, rebuilt indexes live in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from tidelog.commitlog.codec import Codec, Fault, Recovered
from tidelog.commitlog.segment import Active, Files, Sealed, birth_us, map_file
from tidelog.commitlog.swap import settle
from tidelog.disk.atomic import read_all, remove_if_there, replace
from tidelog.disk.latch import Latch
from tidelog.disk.seam import File, Mode, join
from tidelog.errors import Damaged, Unavailable, UnknownLayout
from tidelog.formats.rows import Rows, Stop
from tidelog.types import Buffer

QUARANTINE = "quarantine"
_READ_TRIES = 8
_TEMPORARIES = frozenset((".cleaner_checkpoint.tmp", ".consumer_offsets.tmp", ".next_seq.tmp"))


class Damage(NamedTuple):
    """A fault and the file it lies in."""

    file: str
    fault: Fault


@dataclass(slots=True)
class Report:
    """What opening the log found and did. Printed by the command line, asserted by tests."""

    segments: int = 0
    cut_bytes: int = 0
    cut_reason: str = ""
    rebuilt: list[str] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    cut_suspect: bool = False  # what was cut may be more than one unfinished write: records may lie behind the bad one
    unexplained: bool = False  # what would be cut may be records of another program; a reader is told at the end
    notes: list[str] = field(default_factory=list)  # what is unusual and harmless, and stays as it is

    @property
    def clean(self) -> bool:
        """Nothing had to be done and nothing is wrong."""
        return not (self.cut_bytes or self.rebuilt or self.swept or self.quarantined or self.damage)

    def lines(self) -> list[str]:
        """The report in words, one finding a line."""
        said = []
        if self.cut_bytes:
            said.append(f"cut {self.cut_bytes} bytes of an unfinished write ({self.cut_reason})")
        said += self.notes
        said += [f"rebuilt {name}" for name in self.rebuilt]
        said += [f"swept {name}" for name in self.swept]
        said += [f"kept the cut bytes in {name}" for name in self.quarantined]
        said += [
            f"damage in {file} at byte {fault.pos}, seqs {fault.seq} to {fault.resume - 1}: {fault.reason}"
            for file, fault in self.damage
        ]
        return said


class Found(NamedTuple):
    sealed: list[Sealed]
    active: Active | None
    report: Report


def survey(codec: Codec, names: Sequence[str]) -> tuple[list[int], dict[int, set[str]]]:
    """Bases of the segments among these names, and which files each has ("" is the data file)."""
    parts: dict[int, set[str]] = {}
    for name in names:
        if (known := codec.base_of(name)) is not None:
            parts.setdefault(known[0], set()).add(known[1])
    # A layout whose index is the truth has a segment where it has an index; the others where there is data.
    leader = codec.side_suffixes[0] if 0 in codec.truths else ""
    bases = sorted(base for base, has in parts.items() if leader in has)
    # Segments are removed from either end, data first. An index alone in the middle is no half-done removal: its data
    # was lost, and the segment stays in the list to say so.
    lost = [base for base, has in parts.items() if bases and bases[0] < base < bases[-1] and leader not in has and has]
    return sorted([*bases, *lost]), parts


def recover(files: Files, latch: Latch, *, writable: bool, verify: bool, repair: bool = False) -> Found:
    """Everything that can be served, and a report of what was done about the rest. `repair` also cuts an end that
    nothing explains."""
    if writable:
        _detect(files)
        return _recover(files, latch, writable=True, verify=verify, repair=repair)
    for _ in range(_READ_TRIES):
        _detect(files)
        before, _parts = survey(files.codec, files.disk.names(files.directory))
        found = _recover(files, latch, writable=False, verify=verify, repair=False)
        after, _parts = survey(files.codec, files.disk.names(files.directory))
        if set(before) <= set(after):
            return found
        # The writer dropped a segment while we looked: what we saw of it is not damage.
        if found.active is not None:
            found.active.close()
        for base in before:
            files.forget(base)
    raise Unavailable(f"{files.directory} changes faster than it can be opened; nothing was changed, try again")


def _detect(files: Files) -> None:
    """Let the codec tell the variant of its layout from the files. Nothing is changed."""

    def read(name: str) -> Buffer | None:
        return map_file(files.disk, join(files.directory, name))

    try:
        files.codec.detect(files.disk.names(files.directory), read)
    except UnknownLayout as error:
        raise UnknownLayout(f"{files.directory}: {error}") from None


def _recover(files: Files, latch: Latch, *, writable: bool, verify: bool, repair: bool) -> Found:
    report = Report()
    names = files.disk.names(files.directory)
    bases, parts = survey(files.codec, names)
    if writable and bases and not repair and files.codec.is_foreign(parts[bases[-1]]):
        _refuse_unexplained(files, bases[-1])
    if writable and (settled := settle(files, bases)):
        report.rebuilt += settled
        names = files.disk.names(files.directory)
        bases, parts = survey(files.codec, names)
    if writable:
        _sweep(files, names, bases, parts, report)
    sealed = []
    for base, stop in pairwise(bases):
        sealed.append(_open_sealed(files, base, stop, report, writable=writable, verify=verify))
    active = open_active(files, latch, bases[-1], report, writable=writable) if bases else None
    if writable:
        # Names that a killed process created or removed may still wait for the disk; from here on acks hang on them.
        files.disk.sync_dir(files.directory)
    report.segments = len(bases)
    return Found(sealed, active, report)


def _refuse_unexplained(files: Files, base: int) -> None:
    """Raise before anything is changed where the end of another program's active segment would have to be cut, and is
    not plainly an unfinished write."""
    content = map_file(files.disk, files.data(base)) or b""
    found = files.codec.recover(content, _read_sides(files, base), base)
    if found.unexplained:
        error = Damaged(
            f"{files.data(base)}: {len(content) - found.end} bytes from byte {found.end} on (seq {found.next_seq}) are "
            f"not readable records ({found.reason}) and not plainly an unfinished write; nothing was changed. "
            "`tidelog log repair` cuts them and keeps them in quarantine; `tidelog log restore` copies the records "
            "before them"
        )
        error.written = False
        raise error


def _sweep(
    files: Files, names: Sequence[str], bases: Sequence[int], parts: dict[int, set[str]], report: Report
) -> None:
    disk, codec, directory = files.disk, files.codec, files.directory
    for name in names:
        if not codec.is_temporary(name) and name not in _TEMPORARIES:
            continue
        remove_if_there(disk, join(directory, name))
        report.swept.append(name)
    for base in sorted(set(parts) - set(bases)):
        for suffix in sorted(parts[base]):
            name = codec.side_name(base, suffix) if suffix else codec.data_name(base)
            path = join(directory, name)
            if not suffix and (content := read_all(disk, path)):
                # Data whose index is gone cannot be read back by this layout, but it is not ours to destroy.
                report.quarantined.append(_quarantine(files, f"{name}.orphan", content))
            remove_if_there(disk, path)
            report.swept.append(name)
    if report.swept:
        disk.sync_dir(directory)


def _quarantine(files: Files, name: str, content: Buffer) -> str:
    directory = join(files.directory, QUARANTINE)
    files.disk.make_dir(directory)
    replace(files.disk, join(directory, name), content)
    return f"{QUARANTINE}/{name}"


def _read_sides(files: Files, base: int) -> list[bytes | None]:
    return [read_all(files.disk, files.side(base, suffix)) for suffix in files.codec.side_suffixes]


def rebuild_sides(files: Files, base: int, found: Recovered, report: Report | None = None) -> None:
    """Write the side files that a scan says this segment must have: beside the old ones, then renamed over."""
    codec = files.codec
    for number, (suffix, content) in enumerate(zip(codec.side_suffixes, found.sides, strict=True)):
        path = files.side(base, suffix)
        have = read_all(files.disk, path)
        if have is None and number in codec.truths and number > 0:
            continue  # an optional side-car that this log never had
        if have == content:
            continue
        replace(files.disk, path, content, temporary=f"{path}.rebuilding")
        if report is not None:
            report.rebuilt.append(codec.side_name(base, suffix))
    files.forget(base)


def _open_sealed(files: Files, base: int, stop: int, report: Report, *, writable: bool, verify: bool) -> Sealed:
    codec, disk = files.codec, files.disk
    stat = disk.stat(files.data(base))
    extra = read_all(disk, files.side(base, codec.extra_suffix)) if codec.extra_suffix else None
    sides = [disk.stat(files.side(base, suffix)) for suffix in codec.side_suffixes]
    segment = Sealed(files, base, stop, stat.size if stat else 0, sum(side.size for side in sides if side), extra)
    if stat is None:
        report.damage.append(Damage(codec.data_name(base), Fault(base, stop, 0, "the data file is missing")))
        return segment
    index_fault, tail_fault = codec.sealed_fault(segment.shape())
    if verify and index_fault is None and 0 not in codec.truths:
        index_fault = _index_mismatch(segment)
    if index_fault is not None and 0 not in codec.truths:
        found = codec.recover(map_file(disk, files.data(base)) or b"", _read_sides(files, base), base)
        if found.stop is Stop.END:
            found = found._replace(sides=codec.fill(found.sides, base, stop, found.end))
        if writable:
            rebuild_sides(files, base, found, report)
        else:
            segment.override = found.sides
            report.rebuilt.append(f"{codec.side_name(base, codec.side_suffixes[0])} (in memory)")
        if found.stop is Stop.END:
            if writable and codec.extra_suffix:
                segment.extra = codec.seal(segment.shape())
                if segment.extra is not None:
                    replace(disk, files.side(base, codec.extra_suffix), segment.extra)
                    report.rebuilt.append(codec.side_name(base, codec.extra_suffix))
            tail_fault = None
        else:
            tail_fault = Fault(found.next_seq, stop, found.end, found.reason)
            segment.extra = None
    elif index_fault is not None:
        report.damage.append(Damage(codec.side_name(base, codec.side_suffixes[0]), Fault(base, stop, 0, index_fault)))
    if tail_fault is not None:
        report.damage.append(Damage(codec.data_name(base), tail_fault))
    elif verify:
        report.damage += [Damage(codec.data_name(base), fault) for fault in faults_of(segment)[0]]
    return segment


def expected_sides(segment: Sealed) -> tuple[bytes, ...] | None:
    """What the derivable side files of a sealed segment must hold, byte for byte; None where the data is damaged."""
    shape, codec = segment.shape(), segment.files.codec
    have = [None if side is None else bytes(side) for side in shape.sides]
    found = codec.recover(shape.data.fetch(0, shape.data.size), have, segment.base)
    return None if found.stop is not Stop.END else codec.fill(found.sides, segment.base, segment.stop, found.end)


def refresh(segment: Sealed) -> bool:
    """Forget what a reader has mapped of a segment and take it as it is on disk now; False where it is gone."""
    files, base = segment.files, segment.base
    files.forget(base)
    stat = files.disk.stat(files.all_of(base)[0])
    if stat is None:
        return False
    if segment.override is None and files.codec.extra_suffix:
        segment.extra = read_all(files.disk, files.side(base, files.codec.extra_suffix))
    segment.verified = set()
    return True


def reload(segment: Sealed) -> None:
    """Look again at a segment whose files were being changed when the disk failed: what its data is now decides, and
    its sides are made in memory."""
    files, base = segment.files, segment.base
    files.forget(base)
    data = map_file(files.disk, files.data(base)) or memoryview(b"")
    have = _read_sides(files, base)
    found = files.codec.recover(data, have, base)
    segment.override = files.codec.fill(found.sides, base, segment.stop, found.end)
    segment.size, segment.extra = len(data), None
    segment.verified = set()
    segment.forget_times()


def _index_mismatch(segment: Sealed) -> str | None:
    expected = expected_sides(segment)
    if expected is None or segment.shape().index == expected[0]:
        return None
    return "the index is not what its data gives"


def faults_of(segment: Sealed, look: Callable[[Rows], None] | None = None) -> tuple[list[Fault], int]:
    """Read a whole sealed segment: every place that cannot be read, and how many records can. `look` sees them all."""
    shape, codec = segment.shape(), segment.files.codec
    seq, found, records = segment.base, [], 0
    while seq < segment.stop:
        chunk = codec.read(shape, seq, segment.stop, 8 << 20)
        records += len(chunk.rows)
        if look is not None:
            look(chunk.rows)
        if chunk.fault is not None:
            found.append(chunk.fault)
            seq = max(chunk.fault.resume, seq + 1)
        else:
            assert chunk.next_seq > seq, "a read moves on"
            seq = chunk.next_seq
    return found, records


def open_active(files: Files, latch: Latch, base: int, report: Report, *, writable: bool) -> Active:
    codec, disk = files.codec, files.disk
    mode: Mode = "write" if writable else "read"
    if disk.stat(files.data(base)) is None:
        if not writable:
            raise Damaged(f"{files.data(base)} is missing; nothing was changed, repair the log or restore it")
        disk.open(files.data(base), "create").close()
        disk.sync_dir(files.directory)
        report.rebuilt.append(codec.data_name(base))
    data = disk.open(files.data(base), mode)
    try:
        content = data.read(0, data.size())
        have = _read_sides(files, base)
        found = codec.recover(content, have, base)
        if len(content) > found.end:
            report.cut_bytes += len(content) - found.end
            report.cut_reason = found.reason or "bytes behind the last record"
            report.cut_suspect = found.stop is Stop.BAD and any(content[found.end :])
            report.unexplained = found.unexplained
        report.notes += [f"{codec.data_name(base)}: {note}" for note in found.notes]
        if writable:
            _mend(files, base, data, content, have, found, report)
        sides: list[File | None] = []
        for suffix in codec.side_suffixes:
            path = files.side(base, suffix)
            sides.append(disk.open(path, mode) if disk.stat(path) is not None else None)
    except BaseException:
        data.close()
        raise
    report.damage += [Damage(codec.data_name(base), fault) for fault in found.faults]
    born = birth_us(files, base) or found.first_ts_us
    stat = disk.stat(files.data(base))
    touched = found.last_ts_us or (stat.modified_ms * 1000 if stat else born)
    return Active(
        files,
        latch,
        base,
        found,
        data=data,
        sides=sides,
        born_us=born,
        last_write_us=touched,
    )


def _mend(
    files: Files,
    base: int,
    data: File,
    content: bytes,
    have: Sequence[bytes | None],
    found: Recovered,
    report: Report,
) -> None:
    codec, disk = files.codec, files.disk
    # The footer: a crash before the next segment, and this one goes on growing. A side that is not kept up: what is
    # appended now would lie behind its end and be taken for torn by whoever keeps it up again.
    stale = (*codec.stale_suffixes, *([codec.extra_suffix] if codec.extra_suffix else []))
    removed = [remove_if_there(disk, files.side(base, suffix)) for suffix in stale]
    if any(removed):
        disk.sync_dir(files.directory)
    cut = content[found.end :]
    if cut:
        if report.cut_suspect:
            name = f"{codec.data_name(base)}.{found.end}"
            report.quarantined.append(_quarantine(files, name, cut))
            if 0 in codec.truths and have[0]:
                # The cut bytes mean nothing without what the index said of them.
                index = f"{codec.side_name(base, codec.side_suffixes[0])}.{found.end}"
                report.quarantined.append(_quarantine(files, index, have[0]))
        data.cut(found.end)
    # Not only after a cut: bytes that a crashed process wrote may still wait for the disk, and from here on
    # they count as recovered.
    data.sync()
    for number, (suffix, content_, old) in enumerate(zip(codec.side_suffixes, found.sides, have, strict=True)):
        if old is not None and old[: len(content_)] == content_ and not any(old[len(content_) :]):
            if len(old) > len(content_) and not (codec.reserve_bytes and number == 0):
                _cut_file(files, files.side(base, suffix), len(content_))
                report.rebuilt.append(codec.side_name(base, suffix))
            elif number in codec.truths:
                _sync_file(files, files.side(base, suffix))
            continue
        path = files.side(base, suffix)
        if old is not None and codec.late_index and number == 0 and content_.startswith(old):
            _write_rest(files, path, content_, len(old))  # as a process that was killed leaves it
            continue
        replace(disk, path, content_, temporary=f"{path}.rebuilding")
        report.rebuilt.append(codec.side_name(base, suffix))


def _write_rest(files: Files, path: str, content: bytes, pos: int) -> None:
    file = files.disk.open(path, "write")
    try:
        file.write(pos, memoryview(content)[pos:])
    finally:
        file.close()


def _cut_file(files: Files, path: str, size: int) -> None:
    file = files.disk.open(path, "write")
    try:
        file.cut(size)
        file.sync()
    finally:
        file.close()


def _sync_file(files: Files, path: str) -> None:
    file = files.disk.open(path, "write")
    try:
        file.sync()
    finally:
        file.close()
