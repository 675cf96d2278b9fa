"""[shell] Disk → open log. The one module that is shell and policy at once, because what is found decides what is done.

Rules, in order of authority:
  1. Bytes that may hold an acked record are never dropped: what is cut and is not plainly a torn
     last record goes to `quarantine/` first, and the report says so.
  2. The last segment is the active one: it is scanned whole and cut at the first bad record, unless that was durable
     (the manifest knows how far): then it is left as it is, becomes a sealed one, and the log goes on in a new one.
  3. A sealed segment is never changed. Damage in it is reported, and everything else is served.
  4. Files that can be derived are rebuilt beside the old ones and renamed into place.
  5. Temporaries and segments whose removal was announced in the manifest are swept; unknown names are left alone.
     A segment that the manifest names, or that a side file proves, and whose files are gone is damage: it stays in the
     list, its seqs raise Corrupt, and they are never given again.
  6. Files whose layout is not understood are an error (UnknownLayout) before anything is changed. The end of an
     active segment that another program wrote is cut only where it is plainly an unfinished write, or on request.

With `writable=False` nothing on disk changes: cuts are logical, rebuilt indexes live in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from tidelog.commitlog.codec import Codec, Fault, Recovered, Salvage
from tidelog.commitlog.codecs import guess
from tidelog.commitlog.segment import Active, Files, Sealed, birth_us, map_file
from tidelog.commitlog.swap import settle
from tidelog.disk.atomic import read_all, remove_if_there, replace
from tidelog.disk.latch import Latch
from tidelog.disk.seam import Disk, File, Mode, join
from tidelog.errors import Corrupt, Damaged, Error, Unavailable, UnknownLayout
from tidelog.formats import checkpoint, log_manifest
from tidelog.formats.log_manifest import UNKNOWN, Entry, LogManifest
from tidelog.formats.rows import Rows, Stop
from tidelog.types import Buffer

QUARANTINE = "quarantine"
_READ_TRIES = 64
_OFFSETS = ".consumer_offsets"
_TEMPORARIES = frozenset((".cleaner_checkpoint.tmp", f"{_OFFSETS}.tmp", ".next_seq.tmp", f"{log_manifest.NAME}.tmp"))
_MARGIN_SEQS = 1 << 20  # above what the files of a lost segment tell, where no manifest says more
_RECORDS_AN_INDEX_BYTE = 16  # at most, in a sparse index
_CHUNK_BYTES = 8 << 20  # of one read while a whole segment is verified


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
    next_floor: int = 0  # seqs below this one lie in what was cut and are not given again
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
        said += [f"damage in {file} at byte {fault.pos}{fault.seqs}: {fault.reason}" for file, fault in self.damage]
        return said


class Seen(NamedTuple):
    """What tells one state of a directory from another: its names, and the manifest, which every step replaces."""

    names: tuple[str, ...]
    manifest: bytes | None


class Found(NamedTuple):
    sealed: list[Sealed]
    active: Active | None
    report: Report
    manifest: LogManifest | None = None
    next_base: int | None = None  # where numbering goes on; None: where the active segment ends, or a new log begins


def load_manifest(disk: Disk, directory: str) -> LogManifest | None:
    """The manifest of the log in this directory; None where there is none: a log of another program or of an older
    version. Corrupt or NewerFormat where it cannot be read."""
    path = join(directory, log_manifest.NAME)
    content = read_all(disk, path)
    return None if content is None else log_manifest.decode(content, path)


def codec_of(disk: Disk, directory: str, names: Sequence[str]) -> str | None:
    """The codec that wrote this directory: its manifest says it, or the names of its files do."""
    with suppress(Corrupt):
        if log_manifest.NAME in names and (found := load_manifest(disk, directory)) is not None:
            return found.codec
    return guess(names)


def look(files: Files) -> Seen:
    """The directory as it is now."""
    names = tuple(files.disk.names(files.directory))
    return Seen(names, read_all(files.disk, join(files.directory, log_manifest.NAME)))


class Survey(NamedTuple):
    bases: list[int]  # of the segments that there are, or that something proves to have been
    parts: dict[int, set[str]]  # which files each has; "" is the data file
    leftovers: list[int]  # files without a segment: of a birth or a removal that was interrupted


def survey(files: Files, names: Sequence[str], manifest: LogManifest | None) -> Survey:
    """Tell segments from what an interrupted step left behind.

    What the manifest names is a segment, whether its files are there or not, and what it says is being removed is
    none. Another segment whose files are all empty never held a record. Any other was written by a program that keeps
    no manifest, or its data was lost: a side file that says something is evidence.
    """
    codec = files.codec
    parts: dict[int, set[str]] = {}
    for name in names:
        if (known := codec.base_of(name)) is not None:
            parts.setdefault(known[0], set()).add(known[1])
    named = _named(manifest)
    going = set(manifest.removing) if manifest is not None else set()
    # A layout whose index is the truth has a segment where it has an index; the others where there is data.
    leader = codec.side_suffixes[0] if 0 in codec.truths else ""
    bases = set(named)
    for base in set(parts) - named - going:
        if manifest is None:
            counts = leader in parts[base] or _says_something(files, base, parts[base])
        else:
            dropped = leader not in parts[base] and "" not in parts[base] and base < min(named, default=0)
            counts = not dropped and _says_something(files, base, parts[base])
        if counts:
            bases.add(base)
    return Survey(sorted(bases), parts, sorted(set(parts) - bases))


def _named(manifest: LogManifest | None) -> set[int]:
    if manifest is None:
        return set()
    return {entry.base for entry in (*manifest.segments, *([manifest.active] if manifest.active else []))}


def _says_something(files: Files, base: int, has: set[str]) -> bool:
    """Whether any file of a segment but that of its birth holds more than preallocated zeros."""
    paths = [files.side(base, suffix) if suffix else files.data(base) for suffix in has - {files.codec.birth_suffix}]
    return any(any(read_all(files.disk, path) or b"") for path in paths)


def recover(files: Files, latch: Latch, *, writable: bool, verify: bool, repair: bool = False) -> Found:
    """Everything that can be served, and a report of what was done about the rest. `repair` also cuts an end that
    nothing explains."""
    if writable:
        _detect(files)
        return _recover(files, latch, writable=True, verify=verify, repair=repair)
    return recover_beside(files, latch, verify=verify)[0]


def recover_beside(files: Files, latch: Latch, *, verify: bool) -> tuple[Found, Seen]:
    """`recover` for a reader, beside a writer that may be in the middle of anything. What looks wrong is believed only
    if the directory did not change while it was looked at."""
    for _ in range(_READ_TRIES):
        before = look(files)
        found: Found | None = None
        try:
            _detect(files)
            found = _recover(files, latch, writable=False, verify=verify, repair=False)
        except (OSError, Error):
            if look(files) == before:
                raise
        else:
            after = look(files)
            if after == before:
                return found, after
            gone = _bases(files, before) - _bases(files, after)
            if not (gone or found.report.damage or found.report.cut_suspect):
                return found, before  # not as it is now: whoever meets damage later looks again
        if found is not None:
            if found.active is not None:
                found.active.close()
            for base in (segment.base for segment in found.sealed):
                files.forget(base)
    raise Unavailable(f"{files.directory} changes faster than it can be opened; nothing was changed, try again")


def _bases(files: Files, seen: Seen) -> set[int]:
    return {known[0] for name in seen.names if (known := files.codec.base_of(name)) is not None}


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
    manifest = _manifest(files, report, writable=writable)
    names = files.disk.names(files.directory)
    found = survey(files, names, manifest)
    if writable and found.bases and not repair:
        last = found.bases[-1]
        if last in found.parts and files.codec.is_foreign(found.parts[last]):
            _refuse_unexplained(files, last)
    if writable and (settled := settle(files, found.bases)):
        report.rebuilt += settled
        names = files.disk.names(files.directory)
        found = survey(files, names, manifest)
    if writable:
        _sweep(files, names, found, report)
    sealed: list[Sealed] = []
    named = _named(manifest)
    entries = {} if manifest is None else {entry.base: entry for entry in manifest.segments}
    if manifest is not None and manifest.active is not None:
        entries[manifest.active.base] = manifest.active
    for base, stop in pairwise(found.bases):
        hole: Sealed | None = None
        if stop not in named:
            # A first look changes nothing: an index that is filled up to the next segment would hide what is lost.
            first = _open_sealed(files, base, stop, entries.get(base), Report(), writable=False, verify=False)
            hole = _unexplained(files, first, report)
            files.forget(base)
            stop = first.stop
            if first.lost and hole is first:
                sealed.append(first)
                continue
        sealed.append(_open_sealed(files, base, stop, entries.get(base), report, writable=writable, verify=verify))
        if hole is not None:
            sealed.append(hole)
    active, next_base = None, None
    if found.bases:
        active, retired, next_base = _open_last(files, latch, found.bases[-1], manifest, report, writable=writable)
        if retired is not None:
            sealed.append(retired)
    if manifest is not None and manifest.offsets and files.disk.stat(join(files.directory, _OFFSETS)) is None:
        reason = "the file is missing: how far consumers had come is lost"
        report.damage.append(Damage(_OFFSETS, Fault(0, 0, 0, reason)))
    if writable:
        # Names that a killed process created or removed may still wait for the disk; from here on acks hang on them.
        files.disk.sync_dir(files.directory)
    report.segments = len(found.bases)
    return Found(sealed, active, report, manifest, next_base)


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


def _manifest(files: Files, report: Report, *, writable: bool) -> LogManifest | None:
    """The manifest, or None and a report where it is damaged. It is kept in quarantine before a new one is written."""
    try:
        return load_manifest(files.disk, files.directory)
    except Corrupt as error:
        reason = f"{error.reason}; whether segment files were lost is known only as far as the others prove it"
        report.damage.append(Damage(log_manifest.NAME, Fault(0, 0, error.pos, reason)))
        if writable:
            path = join(files.directory, log_manifest.NAME)
            report.quarantined.append(_quarantine(files, log_manifest.NAME, read_all(files.disk, path) or b""))
        return None


def _unexplained(files: Files, segment: Sealed, report: Report) -> Sealed | None:
    """Without a manifest: seqs between the end of a segment and the beginning of the next that no file holds.
    Compaction explains them where its checkpoint has come that far; otherwise files were lost."""
    if segment.salvage is not None or segment.lost:
        return None
    reach, stop = files.codec.reach(segment.shape()), segment.stop
    if segment.override is not None:
        content = map_file(files.disk, files.data(segment.base)) or b""
        reach = files.codec.recover(content, _read_sides(files, segment.base), segment.base).next_seq
    if reach >= stop:
        return None
    text = read_all(files.disk, join(files.directory, checkpoint.NAME))
    with suppress(Corrupt):
        if text is not None and checkpoint.decode(text).last_cleaned_seq >= stop:
            return None
    reason = "no file holds these records and nothing says that they were removed"
    report.damage.append(Damage(files.codec.data_name(reach), Fault(reach, stop, 0, reason)))
    if reach == segment.base:
        segment.lost = reason
        return segment
    segment.stop = reach
    return Sealed(files, reach, stop, 0, 0, lost=reason)


def _sweep(files: Files, names: Sequence[str], found: Survey, report: Report) -> None:
    """Remove what interrupted steps left. `_recover` syncs the directory at its end; names that a power cut brings back
    before that are swept again."""
    disk, codec, directory = files.disk, files.codec, files.directory
    for name in names:
        if not codec.is_temporary(name) and name not in _TEMPORARIES:
            continue
        remove_if_there(disk, join(directory, name))
        report.swept.append(name)
    for base in found.leftovers:
        for suffix in sorted(found.parts[base]):
            name = codec.side_name(base, suffix) if suffix else codec.data_name(base)
            remove_if_there(disk, join(directory, name))
            report.swept.append(name)


def _quarantine(files: Files, name: str, content: Buffer) -> str:
    directory = join(files.directory, QUARANTINE)
    files.disk.make_dir(directory)
    replace(files.disk, join(directory, name), content)
    return f"{QUARANTINE}/{name}"


def _read_sides(files: Files, base: int) -> list[bytes | None]:
    return [read_all(files.disk, files.side_source(base, suffix)) for suffix in files.codec.side_suffixes]


def rebuild_sides(files: Files, base: int, found: Recovered, report: Report | None = None) -> None:
    """Write the side files that a scan says this segment must have: beside the old ones, then renamed over."""
    codec = files.codec
    for number, (suffix, content) in enumerate(zip(codec.side_suffixes, found.sides, strict=True)):
        if number in codec.truths:
            continue  # nothing else says what it says
        path = files.side(base, suffix)
        if read_all(files.disk, path) == content:
            continue
        replace(files.disk, path, content, temporary=f"{path}.rebuilding")
        if report is not None:
            report.rebuilt.append(codec.side_name(base, suffix))
    files.forget(base)


def _open_sealed(
    files: Files, base: int, stop: int, entry: Entry | None, report: Report, *, writable: bool, verify: bool
) -> Sealed:
    codec, disk = files.codec, files.disk
    stat = disk.stat(files.data(base))
    extra = read_all(disk, files.side(base, codec.extra_suffix)) if codec.extra_suffix else None
    sides = [disk.stat(files.side_source(base, suffix)) for suffix in codec.side_suffixes]
    segment = Sealed(files, base, stop, stat.size if stat else 0, sum(side.size for side in sides if side), extra)
    segment.truth_sides = sum(1 << n for n, side in enumerate(sides) if side is not None and n in codec.truths)
    segment.sealed_bytes = segment.size if stat is not None else UNKNOWN
    if entry is not None:
        segment.sealed_bytes, segment.truth_sides = entry.data_bytes, entry.sides
    if entry is not None and stat is not None:
        _miss_truths(segment, [side is not None for side in sides], report)
    if stat is None and segment.sealed_bytes != 0:
        segment.lost = "the data file is missing"
        report.damage.append(Damage(codec.data_name(base), Fault(base, stop, 0, segment.lost)))
        return segment
    index_fault, tail_fault = codec.sealed_fault(segment.shape())
    if verify and index_fault is None and 0 not in codec.truths:
        index_fault = _index_mismatch(segment)
    if 0 in codec.truths:
        if index_fault is not None or tail_fault is not None or segment.size < segment.sealed_bytes:
            name = codec.side_name(base, codec.side_suffixes[0])
            _salvage(segment, report, name)
            _contradiction(segment, tail_fault or Fault(base, base, 0, index_fault or ""), report, name)
    elif segment.size < segment.sealed_bytes or (tail_fault is not None and codec.extra_suffix):
        _salvage(segment, report)
        if tail_fault is not None:
            _contradiction(segment, tail_fault, report, codec.data_name(base))
    elif index_fault is not None or tail_fault is not None:
        _reindex(segment, report, writable=writable)
    if segment.salvage is None and verify:
        report.damage += [Damage(codec.data_name(base), fault) for fault in faults_of(segment)[0]]
    return segment


def _miss_truths(segment: Sealed, there: Sequence[bool], report: Report) -> None:
    """Report side files that a segment had and that nothing can give back. Its records are served, unchecked."""
    codec = segment.files.codec
    for number, (suffix, is_there) in enumerate(zip(codec.side_suffixes, there, strict=True)):
        if number > 0 and segment.truth_sides >> number & 1 and not is_there and number in codec.truths:
            reason = "the file is missing: what it says of the records cannot be checked any more"
            report.damage.append(
                Damage(codec.side_name(segment.base, suffix), Fault(segment.base, segment.base, 0, reason))
            )


def _salvage(segment: Sealed, report: Report, file: str | None = None) -> None:
    """Find by the records alone what can be read of a segment, and report exactly what cannot."""
    segment.salvage = segment.examine(segment.shape())
    name = file or segment.files.codec.data_name(segment.base)
    report.damage += [Damage(name, fault) for fault in segment.salvage.faults]


def _contradiction(segment: Sealed, fault: Fault, report: Report, file: str) -> None:
    """Report files that contradict each other although every record that is there can be read. Where a footer says that
    there was more data, the rest of the segment is lost."""
    found = segment.salvage
    if found is None or found.faults:
        return
    lost = fault._replace(seq=segment.base, resume=segment.base)
    if segment.files.codec.extra_suffix:
        after = int(found.rows.seq[-1]) + 1 if len(found.rows) else segment.base
        lost = fault._replace(seq=after, resume=max(segment.stop, after))
        segment.salvage = Salvage(found.rows, [lost])
    report.damage.append(Damage(file, lost))


def _reindex(segment: Sealed, report: Report, *, writable: bool) -> None:
    """Make the index of a sealed segment again from its data. Where the data is damaged nothing is written: an index
    that leaves records out would hide that they were there."""
    files, base = segment.files, segment.base
    codec, disk = files.codec, files.disk
    have = _read_sides(files, base)
    found = codec.recover(map_file(disk, files.data(base)) or b"", have, base)
    if found.stop is not Stop.END:
        _salvage(segment, report)
        return
    found = found._replace(sides=codec.fill(found.sides, base, segment.stop, found.end))
    if not writable:
        kept = [side if number in codec.truths else None for number, side in enumerate(have)]
        segment.override = tuple(old if old is not None else new for old, new in zip(kept, found.sides, strict=True))
        report.rebuilt.append(f"{codec.side_name(base, codec.side_suffixes[0])} (in memory)")
        return
    rebuild_sides(files, base, found, report)
    if codec.extra_suffix:
        segment.extra = codec.seal(segment.shape())
        if segment.extra is not None:
            replace(disk, files.side(base, codec.extra_suffix), segment.extra)
            report.rebuilt.append(codec.side_name(base, codec.extra_suffix))


def expected_sides(segment: Sealed) -> tuple[bytes, ...] | None:
    """What the derivable side files of a sealed segment must hold, byte for byte; None where the data is damaged."""
    shape, codec = segment.shape(), segment.files.codec
    have = [None if side is None else bytes(side) for side in shape.sides]
    found = codec.recover(shape.data.fetch(0, shape.data.size), have, segment.base)
    return None if found.stop is not Stop.END else codec.fill(found.sides, segment.base, segment.stop, found.end)


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
    segment.forget()


def _index_mismatch(segment: Sealed) -> str | None:
    expected = expected_sides(segment)
    if expected is None or segment.shape().index == expected[0]:
        return None
    return "the index is not what its data gives"


def faults_of(segment: Sealed, look: Callable[[Rows], None] | None = None) -> tuple[list[Fault], int]:
    """Read a whole sealed segment: every place that cannot be read, and how many records can. `look` sees them all."""
    shape = segment.shape()
    seq, found, records = segment.base, [], 0
    while seq < segment.stop:
        chunk = segment.read(shape, seq, segment.stop, _CHUNK_BYTES)
        records += len(chunk.rows)
        if look is not None:
            look(chunk.rows)
        after = chunk.next_seq
        if chunk.fault is not None:
            found.append(chunk.fault)
            after = chunk.fault.resume
        assert after > seq, "a read moves on"
        seq = after
    if segment.salvage is not None:
        found += [fault for fault in segment.salvage.faults if fault.resume <= fault.seq]
    return found, records


def _open_last(
    files: Files, latch: Latch, base: int, manifest: LogManifest | None, report: Report, *, writable: bool
) -> tuple[Active | None, Sealed | None, int | None]:
    """The last segment: as the active one, or, where records of it are lost, as a sealed one with damage, and where
    the numbering then goes on. Nothing of a damaged one is cut, and no seq that may have been acked is given again."""
    codec, disk = files.codec, files.disk
    known = manifest.active if manifest is not None else None
    if known is not None and known.base != base:
        known = None
    data = disk.stat(files.data(base))
    sides = [disk.stat(files.side_source(base, suffix)) for suffix in codec.side_suffixes]
    has_records = known is None or known.data_bytes > 0 or not (manifest and manifest.clean)
    if has_records and (data is None or (sides[0] is None and 0 in codec.truths)):
        empty = known is None and not _says_something(files, base, {"", *codec.side_suffixes})
        if not empty:
            stop = _above(files, base, manifest if known is not None else None)
            what = codec.data_name(base) if data is None else codec.side_name(base, codec.side_suffixes[0])
            exact = known is not None and manifest is not None and manifest.clean
            reason = (
                "the file is missing" if exact else "the file is missing; how many of these were written is unknown"
            )
            lost = Sealed(files, base, stop, data.size if data else 0, 0, lost=reason)
            lost.truth_sides = known.sides if known is not None else 0
            report.damage.append(Damage(what, Fault(base, stop, 0, reason)))
            return None, lost, stop
    scan: Scan | None = None
    if known is not None and manifest is not None and (data is not None or known.data_bytes):
        scan = _scan(files, base)
        retired = _retire(files, known, manifest, scan, report)
        if retired is not None:
            return None, retired, retired.stop
    if data is None and not writable:
        return None, None, base
    active = open_active(files, latch, base, report, writable=writable, scan=scan)
    return active, None, report.next_floor or None


def _above(files: Files, base: int, manifest: LogManifest | None) -> int:
    """A seq above all that a lost segment may have held."""
    if manifest is not None:
        return max(manifest.reserved, manifest.next_seq, base + 1)
    sides = [files.disk.stat(files.side(base, suffix)) for suffix in files.codec.side_suffixes]
    data = files.disk.stat(files.data(base))
    each = 1 if 0 in files.codec.truths else _RECORDS_AN_INDEX_BYTE
    return base + _MARGIN_SEQS + sum(side.size * each for side in sides if side) + (data.size if data else 0)


class Scan(NamedTuple):
    """The last segment, read once: its bytes, its sides, and what they were found to be."""

    content: bytes
    sides: list[bytes | None]
    found: Recovered


def _scan(files: Files, base: int) -> Scan:
    content, sides = read_all(files.disk, files.data(base)) or b"", _read_sides(files, base)
    return Scan(content, sides, files.codec.recover(content, sides, base))


def _retire(files: Files, known: Entry, manifest: LogManifest, scan: Scan, report: Report) -> Sealed | None:
    """The active segment as a sealed one, if records of it that were durable are damaged or gone."""
    codec, base = files.codec, known.base
    content, have, found = scan
    lacks = any(known.sides >> n & 1 and side is None for n, side in enumerate(have) if n in codec.truths)
    short = found.end < known.data_bytes or (manifest.clean and found.next_seq < manifest.next_seq)
    if not (lacks or short):
        return None
    stop = _above(files, base, manifest)
    size = sum(len(side) for side in have if side is not None)
    segment = Sealed(files, base, stop, len(content), size, sealed_bytes=known.data_bytes, truth_sides=known.sides)
    _miss_truths(segment, [side is not None for side in have], report)
    _salvage(segment, report)
    return segment


def open_active(
    files: Files, latch: Latch, base: int, report: Report, *, writable: bool, scan: Scan | None = None
) -> Active:
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
        content, have, found = scan or _scan(files, base)
        if len(content) > found.end:
            report.cut_bytes += len(content) - found.end
            report.cut_reason = found.reason or "bytes behind the last record"
            report.cut_suspect = found.stop is Stop.BAD and any(content[found.end :])
            report.unexplained = found.unexplained
        report.notes += [f"{codec.data_name(base)}: {note}" for note in found.notes]
        if len(content) > found.end:
            _look_past_the_end(codec, content, have, base, found, report)
        if writable:
            _mend(files, base, data, content, have, found, report)
        sides: list[File | None] = []
        for suffix in codec.side_suffixes:
            path = files.side_source(base, suffix)
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


def _look_past_the_end(
    codec: Codec, content: bytes, have: Sequence[bytes | None], base: int, found: Recovered, report: Report
) -> None:
    """Look for good records in what is about to be cut. After a bad one they may have been acked: then it is no
    unfinished write, and their seqs are not given again."""
    rows, faults = codec.salvage(content, have, base, found.next_seq + len(content))
    bad = min((fault.pos for fault in faults if fault.pos >= found.end), default=len(content))
    if len(rows) and int(rows.at[-1]) > bad:
        report.cut_suspect = True
    if report.cut_suspect and len(rows) and int(rows.seq[-1]) >= found.next_seq:
        report.next_floor = int(rows.seq[-1]) + 1


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
