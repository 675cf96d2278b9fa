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

from tidelog.commitlog.codec import Codec, Fault, RecoveredSegment, Salvage
from tidelog.commitlog.codecs import guess_codec, rustlog_layout
from tidelog.commitlog.segment import ActiveSegment, LogFiles, SealedSegment, created_us, finish_replacements, map_file
from tidelog.disk.durability import WriteLatch, read_file, remove_if_exists, replace_file
from tidelog.disk.interface import Disk, File, Mode, join
from tidelog.errors import Corrupt, Damaged, Error, Unavailable, UnknownLayout
from tidelog.formats import log_manifest
from tidelog.formats.log_manifest import UNKNOWN, Entry, LogManifest
from tidelog.formats.rows import Rows, ScanStop
from tidelog.types import Buffer

QUARANTINE_DIR = "quarantine"
_READ_ATTEMPTS_MAX = 64
_OFFSETS_FILE = ".consumer_offsets"
_TEMPORARIES = frozenset(
    (".cleaner_checkpoint.tmp", f"{_OFFSETS_FILE}.tmp", ".next_seq.tmp", f"{log_manifest.NAME}.tmp")
)
_LOST_SEGMENT_MARGIN_SEQS = 1 << 20  # above what the files of a lost segment tell, where no manifest says more
_RECORDS_PER_INDEX_BYTE_MAX = 16  # at most, in a sparse index
_READ_CHUNK_BYTES = 8 << 20  # of one read while a whole segment is verified


class Damage(NamedTuple):
    """A fault and the file it lies in."""

    file: str
    fault: Fault


@dataclass(slots=True)
class RecoveryReport:
    """What opening the log found and did. Printed by the command line, asserted by tests."""

    segments: int = 0
    cut_bytes: int = 0
    cut_reason: str = ""
    rebuilt: list[str] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    next_seq_floor: int = 0  # seqs below this one lie in what was cut and are not given again
    cut_suspect: bool = False  # what was cut may be more than one unfinished write: records may lie behind the bad one
    has_unexplained_tail: bool = (
        False  # what would be cut may be records of another program; a reader is told at the end
    )
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
            f"damage in {file} at byte {fault.pos}{fault.seqs_text}: {fault.reason}" for file, fault in self.damage
        ]
        return said


class DirectorySnapshot(NamedTuple):
    """What tells one state of a directory from another: its names, and the manifest, which every step replaces."""

    names: tuple[str, ...]
    manifest: bytes | None


class RecoveredLog(NamedTuple):
    sealed: list[SealedSegment]
    active: ActiveSegment | None
    report: RecoveryReport
    manifest: LogManifest | None = None
    next_base: int | None = None  # where numbering goes on; None: where the active segment ends, or a new log begins


def load_manifest(disk: Disk, directory: str) -> LogManifest | None:
    """The manifest of the log in this directory; None where there is none: a log of another program or of an older
    version. Corrupt or NewerFormat where it cannot be read."""
    path = join(directory, log_manifest.NAME)
    content = read_file(disk, path)
    return None if content is None else log_manifest.decode(content, path)


def detect_codec(disk: Disk, directory: str, names: Sequence[str]) -> str | None:
    """The codec that wrote this directory: its manifest says it, or the names of its files do."""
    with suppress(Corrupt):
        if log_manifest.NAME in names and (found := load_manifest(disk, directory)) is not None:
            return found.codec
    return guess_codec(names)


def read_directory(files: LogFiles) -> DirectorySnapshot:
    """The directory as it is now."""
    names = tuple(files.disk.list_dir(files.directory))
    return DirectorySnapshot(names, read_file(files.disk, join(files.directory, log_manifest.NAME)))


class SegmentListing(NamedTuple):
    bases: list[int]  # of the segments that there are, or that something proves to have been
    suffixes_by_base: dict[int, set[str]]  # which files each has; "" is the data file
    leftovers: list[int]  # files without a segment: of a birth or a removal that was interrupted


def list_segments(files: LogFiles, names: Sequence[str], manifest: LogManifest | None) -> SegmentListing:
    """Tell segments from what an interrupted step left behind.

    What the manifest names is a segment, whether its files are there or not, and what it says is being removed is
    none. Another segment whose files are all empty never held a record. Any other was written by a program that keeps
    no manifest, or its data was lost: a side file that says something is evidence.
    """
    codec = files.codec
    parts: dict[int, set[str]] = {}
    for name in names:
        if (known := codec.parse_file_name(name)) is not None:
            parts.setdefault(known[0], set()).add(known[1])
    named = _named_bases(manifest)
    going = set(manifest.removing) if manifest is not None else set()
    # A layout whose index is the truth has a segment where it has an index; the others where there is data.
    leader = codec.side_suffixes[0] if 0 in codec.authoritative_sides else ""
    bases = set(named)
    for base in set(parts) - named - going:
        if manifest is None:
            counts = leader in parts[base] or _has_content(files, base, parts[base])
        else:
            dropped = leader not in parts[base] and "" not in parts[base] and base < min(named, default=0)
            counts = not dropped and _has_content(files, base, parts[base])
        if counts:
            bases.add(base)
    return SegmentListing(sorted(bases), parts, sorted(set(parts) - bases))


def _named_bases(manifest: LogManifest | None) -> set[int]:
    if manifest is None:
        return set()
    return {entry.base for entry in (*manifest.segments, *([manifest.active] if manifest.active else []))}


def _has_content(files: LogFiles, base: int, suffixes: set[str]) -> bool:
    """Whether any file of a segment but that of its birth holds more than preallocated zeros."""
    paths = [
        files.side_path(base, suffix) if suffix else files.data_path(base)
        for suffix in suffixes - {files.codec.created_suffix}
    ]
    return any(any(read_file(files.disk, path) or b"") for path in paths)


def recover_log(
    files: LogFiles, latch: WriteLatch, *, writable: bool, verify: bool, repair: bool = False
) -> RecoveredLog:
    """Everything that can be served, and a report of what was done about the rest. `repair` also cuts an end that
    nothing explains."""
    if writable:
        _detect_layout(files)
        return _recover_once(files, latch, writable=True, verify=verify, repair=repair)
    return recover_for_reading(files, latch, verify=verify)[0]


def recover_for_reading(files: LogFiles, latch: WriteLatch, *, verify: bool) -> tuple[RecoveredLog, DirectorySnapshot]:
    """`recover` for a reader, beside a writer that may be in the middle of anything. What looks wrong is believed only
    if the directory did not change while it was looked at."""
    for _ in range(_READ_ATTEMPTS_MAX):
        before = read_directory(files)
        found: RecoveredLog | None = None
        try:
            _detect_layout(files)
            found = _recover_once(files, latch, writable=False, verify=verify, repair=False)
        except (OSError, Error):
            if read_directory(files) == before:
                raise
        else:
            after = read_directory(files)
            if after == before:
                return found, after
            gone = _snapshot_bases(files, before) - _snapshot_bases(files, after)
            if not (gone or found.report.damage or found.report.cut_suspect):
                return found, before  # not as it is now: whoever meets damage later looks again
        if found is not None:
            if found.active is not None:
                found.active.close()
            for base in (segment.base for segment in found.sealed):
                files.drop_cached(base)
    raise Unavailable(f"{files.directory} changes faster than it can be opened; nothing was changed, try again")


def _snapshot_bases(files: LogFiles, snapshot: DirectorySnapshot) -> set[int]:
    return {known[0] for name in snapshot.names if (known := files.codec.parse_file_name(name)) is not None}


def _detect_layout(files: LogFiles) -> None:
    """Let the codec tell the variant of its layout from the files. Nothing is changed."""

    def read(name: str) -> Buffer | None:
        return map_file(files.disk, join(files.directory, name))

    try:
        files.codec.detect_layout(files.disk.list_dir(files.directory), read)
    except UnknownLayout as error:
        raise UnknownLayout(f"{files.directory}: {error}") from None


def _recover_once(files: LogFiles, latch: WriteLatch, *, writable: bool, verify: bool, repair: bool) -> RecoveredLog:
    report = RecoveryReport()
    manifest = _load_manifest_or_report(files, report, writable=writable)
    names = files.disk.list_dir(files.directory)
    found = list_segments(files, names, manifest)
    if writable and found.bases and not repair:
        last = found.bases[-1]
        if last in found.suffixes_by_base and files.codec.is_foreign(found.suffixes_by_base[last]):
            _check_tail_explained(files, last)
    if writable and (settled := finish_replacements(files, found.bases)):
        report.rebuilt += settled
        names = files.disk.list_dir(files.directory)
        found = list_segments(files, names, manifest)
    if writable:
        _remove_leftovers(files, names, found, report)
    sealed: list[SealedSegment] = []
    named = _named_bases(manifest)
    entries = {} if manifest is None else {entry.base: entry for entry in manifest.segments}
    if manifest is not None and manifest.active is not None:
        entries[manifest.active.base] = manifest.active
    for base, stop in pairwise(found.bases):
        hole: SealedSegment | None = None
        if stop not in named:
            # A first look changes nothing: an index that is filled up to the next segment would hide what is lost.
            first = _open_sealed(files, base, stop, entries.get(base), RecoveryReport(), writable=False, verify=False)
            hole = _find_missing_seqs(files, first, report)
            files.drop_cached(base)
            stop = first.stop
            if first.lost_reason and hole is first:
                sealed.append(first)
                continue
        sealed.append(_open_sealed(files, base, stop, entries.get(base), report, writable=writable, verify=verify))
        if hole is not None:
            sealed.append(hole)
    active, next_base = None, None
    if found.bases:
        active, retired, next_base = _open_last_segment(
            files, latch, found.bases[-1], manifest, report, writable=writable
        )
        if retired is not None:
            sealed.append(retired)
    if manifest is not None and manifest.offsets and files.disk.stat(join(files.directory, _OFFSETS_FILE)) is None:
        reason = "the file is missing: how far consumers had come is lost"
        report.damage.append(Damage(_OFFSETS_FILE, Fault(0, 0, 0, reason)))
    if writable:
        # Names that a killed process created or removed may still wait for the disk; from here on acks hang on them.
        files.disk.sync_dir(files.directory)
    report.segments = len(found.bases)
    return RecoveredLog(sealed, active, report, manifest, next_base)


def _check_tail_explained(files: LogFiles, base: int) -> None:
    """Raise before anything is changed where the end of another program's active segment would have to be cut, and is
    not plainly an unfinished write."""
    content = map_file(files.disk, files.data_path(base)) or b""
    found = files.codec.recover(content, _read_sides(files, base), base)
    if found.has_unexplained_tail:
        error = Damaged(
            f"{files.data_path(base)}: {len(content) - found.end} bytes from byte {found.end} on (seq "
            f"{found.next_seq}) are "
            f"not readable records ({found.reason}) and not plainly an unfinished write; nothing was changed. "
            "`tidelog log repair` cuts them and keeps them in quarantine; `tidelog log restore` copies the records "
            "before them"
        )
        error.written = False
        raise error


def _load_manifest_or_report(files: LogFiles, report: RecoveryReport, *, writable: bool) -> LogManifest | None:
    """The manifest, or None and a report where it is damaged. It is kept in quarantine before a new one is written."""
    try:
        return load_manifest(files.disk, files.directory)
    except Corrupt as error:
        reason = f"{error.reason}; whether segment files were lost is known only as far as the others prove it"
        report.damage.append(Damage(log_manifest.NAME, Fault(0, 0, error.pos, reason)))
        if writable:
            path = join(files.directory, log_manifest.NAME)
            report.quarantined.append(_quarantine(files, log_manifest.NAME, read_file(files.disk, path) or b""))
        return None


def _find_missing_seqs(files: LogFiles, segment: SealedSegment, report: RecoveryReport) -> SealedSegment | None:
    """Without a manifest: seqs between the end of a segment and the beginning of the next that no file holds.
    Compaction explains them where its checkpoint has come that far; otherwise files were lost."""
    if segment.salvage is not None or segment.lost_reason:
        return None
    reach, stop = files.codec.end_seq(segment.content()), segment.stop
    if segment.rebuilt_sides is not None:
        content = map_file(files.disk, files.data_path(segment.base)) or b""
        reach = files.codec.recover(content, _read_sides(files, segment.base), segment.base).next_seq
    if reach >= stop:
        return None
    text = read_file(files.disk, join(files.directory, rustlog_layout.CLEANER_CHECKPOINT_NAME))
    with suppress(Corrupt):
        if text is not None and rustlog_layout.decode_cleaner_checkpoint(text).last_cleaned_seq >= stop:
            return None
    reason = "no file holds these records and nothing says that they were removed"
    report.damage.append(Damage(files.codec.data_name(reach), Fault(reach, stop, 0, reason)))
    if reach == segment.base:
        segment.lost_reason = reason
        return segment
    segment.stop = reach
    return SealedSegment(files, reach, stop, 0, 0, lost_reason=reason)


def _remove_leftovers(files: LogFiles, names: Sequence[str], listing: SegmentListing, report: RecoveryReport) -> None:
    """Remove what interrupted steps left. `_recover` syncs the directory at its end; names that a power cut brings back
    before that are swept again."""
    disk, codec, directory = files.disk, files.codec, files.directory
    for name in names:
        if not codec.is_temporary(name) and name not in _TEMPORARIES:
            continue
        remove_if_exists(disk, join(directory, name))
        report.swept.append(name)
    for base in listing.leftovers:
        for suffix in sorted(listing.suffixes_by_base[base]):
            name = codec.side_name(base, suffix) if suffix else codec.data_name(base)
            remove_if_exists(disk, join(directory, name))
            report.swept.append(name)


def _quarantine(files: LogFiles, name: str, content: Buffer) -> str:
    directory = join(files.directory, QUARANTINE_DIR)
    files.disk.make_dir(directory)
    replace_file(files.disk, join(directory, name), content)
    return f"{QUARANTINE_DIR}/{name}"


def _read_sides(files: LogFiles, base: int) -> list[bytes | None]:
    return [read_file(files.disk, files.side_read_path(base, suffix)) for suffix in files.codec.side_suffixes]


def rebuild_sides(
    files: LogFiles, base: int, recovered: RecoveredSegment, report: RecoveryReport | None = None
) -> None:
    """Write the side files that a scan says this segment must have: beside the old ones, then renamed over."""
    codec = files.codec
    for number, (suffix, content) in enumerate(zip(codec.side_suffixes, recovered.sides, strict=True)):
        if number in codec.authoritative_sides:
            continue  # nothing else says what it says
        path = files.side_path(base, suffix)
        if read_file(files.disk, path) == content:
            continue
        replace_file(files.disk, path, content, temporary=f"{path}.rebuilding")
        if report is not None:
            report.rebuilt.append(codec.side_name(base, suffix))
    files.drop_cached(base)


def _open_sealed(
    files: LogFiles, base: int, stop: int, entry: Entry | None, report: RecoveryReport, *, writable: bool, verify: bool
) -> SealedSegment:
    codec, disk = files.codec, files.disk
    stat = disk.stat(files.data_path(base))
    extra = read_file(disk, files.side_path(base, codec.footer_suffix)) if codec.footer_suffix else None
    sides = [disk.stat(files.side_read_path(base, suffix)) for suffix in codec.side_suffixes]
    segment = SealedSegment(
        files, base, stop, stat.size if stat else 0, sum(side.size for side in sides if side), extra
    )
    segment.authoritative_side_bits = sum(
        1 << n for n, side in enumerate(sides) if side is not None and n in codec.authoritative_sides
    )
    segment.complete_bytes = segment.size if stat is not None else UNKNOWN
    if entry is not None:
        segment.complete_bytes, segment.authoritative_side_bits = entry.data_bytes, entry.sides
    if entry is not None and stat is not None:
        _report_missing_sides(segment, [side is not None for side in sides], report)
    if stat is None and segment.complete_bytes != 0:
        segment.lost_reason = "the data file is missing"
        report.damage.append(Damage(codec.data_name(base), Fault(base, stop, 0, segment.lost_reason)))
        return segment
    index_fault, tail_fault = codec.check_sealed(segment.content())
    if verify and index_fault is None and 0 not in codec.authoritative_sides:
        index_fault = _index_mismatch(segment)
    if 0 in codec.authoritative_sides:
        if index_fault is not None or tail_fault is not None or segment.size < segment.complete_bytes:
            name = codec.side_name(base, codec.side_suffixes[0])
            _salvage_segment(segment, report, name)
            _report_contradiction(segment, tail_fault or Fault(base, base, 0, index_fault or ""), report, name)
    elif segment.size < segment.complete_bytes or (tail_fault is not None and codec.footer_suffix):
        _salvage_segment(segment, report)
        if tail_fault is not None:
            _report_contradiction(segment, tail_fault, report, codec.data_name(base))
    elif index_fault is not None or tail_fault is not None:
        _rebuild_index(segment, report, writable=writable)
    if segment.salvage is None and verify:
        report.damage += [Damage(codec.data_name(base), fault) for fault in find_segment_faults(segment)[0]]
    return segment


def _report_missing_sides(segment: SealedSegment, present: Sequence[bool], report: RecoveryReport) -> None:
    """Report side files that a segment had and that nothing can give back. Its records are served, unchecked."""
    codec = segment.files.codec
    for number, (suffix, is_there) in enumerate(zip(codec.side_suffixes, present, strict=True)):
        if (
            number > 0
            and segment.authoritative_side_bits >> number & 1
            and not is_there
            and number in codec.authoritative_sides
        ):
            reason = "the file is missing: what it says of the records cannot be checked any more"
            report.damage.append(
                Damage(codec.side_name(segment.base, suffix), Fault(segment.base, segment.base, 0, reason))
            )


def _salvage_segment(segment: SealedSegment, report: RecoveryReport, file: str | None = None) -> None:
    """Find by the records alone what can be read of a segment, and report exactly what cannot."""
    segment.salvage = segment.read_salvage(segment.content())
    name = file or segment.files.codec.data_name(segment.base)
    report.damage += [Damage(name, fault) for fault in segment.salvage.faults]


def _report_contradiction(segment: SealedSegment, fault: Fault, report: RecoveryReport, file: str) -> None:
    """Report files that contradict each other although every record that is there can be read. Where a footer says that
    there was more data, the rest of the segment is lost."""
    found = segment.salvage
    if found is None or found.faults:
        return
    lost = fault._replace(seq=segment.base, resume=segment.base)
    if segment.files.codec.footer_suffix:
        after = int(found.rows.seq[-1]) + 1 if len(found.rows) else segment.base
        lost = fault._replace(seq=after, resume=max(segment.stop, after))
        segment.salvage = Salvage(found.rows, [lost])
    report.damage.append(Damage(file, lost))


def _rebuild_index(segment: SealedSegment, report: RecoveryReport, *, writable: bool) -> None:
    """Make the index of a sealed segment again from its data. Where the data is damaged nothing is written: an index
    that leaves records out would hide that they were there."""
    files, base = segment.files, segment.base
    codec, disk = files.codec, files.disk
    have = _read_sides(files, base)
    found = codec.recover(map_file(disk, files.data_path(base)) or b"", have, base)
    if found.stop is not ScanStop.END:
        _salvage_segment(segment, report)
        return
    found = found._replace(sides=codec.fill_holes(found.sides, base, segment.stop, found.end))
    if not writable:
        kept = [side if number in codec.authoritative_sides else None for number, side in enumerate(have)]
        segment.rebuilt_sides = tuple(
            old if old is not None else new for old, new in zip(kept, found.sides, strict=True)
        )
        report.rebuilt.append(f"{codec.side_name(base, codec.side_suffixes[0])} (in memory)")
        return
    rebuild_sides(files, base, found, report)
    if codec.footer_suffix:
        segment.footer = codec.build_footer(segment.content())
        if segment.footer is not None:
            replace_file(disk, files.side_path(base, codec.footer_suffix), segment.footer)
            report.rebuilt.append(codec.side_name(base, codec.footer_suffix))


def expected_sides(segment: SealedSegment) -> tuple[bytes, ...] | None:
    """What the derivable side files of a sealed segment must hold, byte for byte; None where the data is damaged."""
    shape, codec = segment.content(), segment.files.codec
    have = [None if side is None else bytes(side) for side in shape.sides]
    found = codec.recover(shape.data.fetch(0, shape.data.size), have, segment.base)
    return (
        None if found.stop is not ScanStop.END else codec.fill_holes(found.sides, segment.base, segment.stop, found.end)
    )


def reload_segment(segment: SealedSegment) -> None:
    """Look again at a segment whose files were being changed when the disk failed: what its data is now decides, and
    its sides are made in memory."""
    files, base = segment.files, segment.base
    files.drop_cached(base)
    data = map_file(files.disk, files.data_path(base)) or memoryview(b"")
    have = _read_sides(files, base)
    found = files.codec.recover(data, have, base)
    segment.rebuilt_sides = files.codec.fill_holes(found.sides, base, segment.stop, found.end)
    segment.size, segment.footer = len(data), None
    segment.reset()


def _index_mismatch(segment: SealedSegment) -> str | None:
    expected = expected_sides(segment)
    if expected is None or segment.content().index == expected[0]:
        return None
    return "the index is not what its data gives"


def find_segment_faults(
    segment: SealedSegment, on_rows: Callable[[Rows], None] | None = None
) -> tuple[list[Fault], int]:
    """Read a whole sealed segment: every place that cannot be read, and how many records can. `look` sees them all."""
    shape = segment.content()
    seq, found, records = segment.base, [], 0
    while seq < segment.stop:
        chunk = segment.read(shape, seq, segment.stop, _READ_CHUNK_BYTES)
        records += len(chunk.rows)
        if on_rows is not None:
            on_rows(chunk.rows)
        after = chunk.next_seq
        if chunk.fault is not None:
            found.append(chunk.fault)
            after = chunk.fault.resume
        assert after > seq, "a read moves on"
        seq = after
    if segment.salvage is not None:
        found += [fault for fault in segment.salvage.faults if fault.resume <= fault.seq]
    return found, records


def _open_last_segment(
    files: LogFiles,
    latch: WriteLatch,
    base: int,
    manifest: LogManifest | None,
    report: RecoveryReport,
    *,
    writable: bool,
) -> tuple[ActiveSegment | None, SealedSegment | None, int | None]:
    """The last segment: as the active one, or, where records of it are lost, as a sealed one with damage, and where
    the numbering then goes on. Nothing of a damaged one is cut, and no seq that may have been acked is given again."""
    codec, disk = files.codec, files.disk
    known = manifest.active if manifest is not None else None
    if known is not None and known.base != base:
        known = None
    data = disk.stat(files.data_path(base))
    sides = [disk.stat(files.side_read_path(base, suffix)) for suffix in codec.side_suffixes]
    has_records = known is None or known.data_bytes > 0 or not (manifest and manifest.clean)
    if has_records and (data is None or (sides[0] is None and 0 in codec.authoritative_sides)):
        empty = known is None and not _has_content(files, base, {"", *codec.side_suffixes})
        if not empty:
            stop = _seq_above(files, base, manifest if known is not None else None)
            what = codec.data_name(base) if data is None else codec.side_name(base, codec.side_suffixes[0])
            exact = known is not None and manifest is not None and manifest.clean
            reason = (
                "the file is missing" if exact else "the file is missing; how many of these were written is unknown"
            )
            lost = SealedSegment(files, base, stop, data.size if data else 0, 0, lost_reason=reason)
            lost.authoritative_side_bits = known.sides if known is not None else 0
            report.damage.append(Damage(what, Fault(base, stop, 0, reason)))
            return None, lost, stop
    scan: ActiveScan | None = None
    if known is not None and manifest is not None and (data is not None or known.data_bytes):
        scan = _scan_active(files, base)
        retired = _seal_damaged_active(files, known, manifest, scan, report)
        if retired is not None:
            return None, retired, retired.stop
    if data is None and not writable:
        return None, None, base
    active = open_active(files, latch, base, report, writable=writable, scan=scan)
    return active, None, report.next_seq_floor or None


def _seq_above(files: LogFiles, base: int, manifest: LogManifest | None) -> int:
    """A seq above all that a lost segment may have held."""
    if manifest is not None:
        return max(manifest.reserved, manifest.next_seq, base + 1)
    sides = [files.disk.stat(files.side_path(base, suffix)) for suffix in files.codec.side_suffixes]
    data = files.disk.stat(files.data_path(base))
    each = 1 if 0 in files.codec.authoritative_sides else _RECORDS_PER_INDEX_BYTE_MAX
    return (
        base + _LOST_SEGMENT_MARGIN_SEQS + sum(side.size * each for side in sides if side) + (data.size if data else 0)
    )


class ActiveScan(NamedTuple):
    """The last segment, read once: its bytes, its sides, and what they were found to be."""

    content: bytes
    sides: list[bytes | None]
    found: RecoveredSegment


def _scan_active(files: LogFiles, base: int) -> ActiveScan:
    content, sides = read_file(files.disk, files.data_path(base)) or b"", _read_sides(files, base)
    return ActiveScan(content, sides, files.codec.recover(content, sides, base))


def _seal_damaged_active(
    files: LogFiles, entry: Entry, manifest: LogManifest, scan: ActiveScan, report: RecoveryReport
) -> SealedSegment | None:
    """The active segment as a sealed one, if records of it that were durable are damaged or gone."""
    codec, base = files.codec, entry.base
    content, have, found = scan
    lacks = any(entry.sides >> n & 1 and side is None for n, side in enumerate(have) if n in codec.authoritative_sides)
    short = found.end < entry.data_bytes or (manifest.clean and found.next_seq < manifest.next_seq)
    if not (lacks or short):
        return None
    stop = _seq_above(files, base, manifest)
    size = sum(len(side) for side in have if side is not None)
    segment = SealedSegment(
        files, base, stop, len(content), size, complete_bytes=entry.data_bytes, authoritative_side_bits=entry.sides
    )
    _report_missing_sides(segment, [side is not None for side in have], report)
    _salvage_segment(segment, report)
    return segment


def open_active(
    files: LogFiles,
    latch: WriteLatch,
    base: int,
    report: RecoveryReport,
    *,
    writable: bool,
    scan: ActiveScan | None = None,
) -> ActiveSegment:
    codec, disk = files.codec, files.disk
    mode: Mode = "write" if writable else "read"
    if disk.stat(files.data_path(base)) is None:
        if not writable:
            raise Damaged(f"{files.data_path(base)} is missing; nothing was changed, repair the log or restore it")
        disk.open(files.data_path(base), "create").close()
        disk.sync_dir(files.directory)
        report.rebuilt.append(codec.data_name(base))
    data = disk.open(files.data_path(base), mode)
    try:
        content, have, found = scan or _scan_active(files, base)
        if len(content) > found.end:
            report.cut_bytes += len(content) - found.end
            report.cut_reason = found.reason or "bytes behind the last record"
            report.cut_suspect = found.stop is ScanStop.BAD and any(content[found.end :])
            report.has_unexplained_tail = found.has_unexplained_tail
        report.notes += [f"{codec.data_name(base)}: {note}" for note in found.notes]
        if len(content) > found.end:
            _search_cut_bytes(codec, content, have, base, found, report)
        if writable:
            _repair_active(files, base, data, content, have, found, report)
        sides: list[File | None] = []
        for suffix in codec.side_suffixes:
            path = files.side_read_path(base, suffix)
            sides.append(disk.open(path, mode) if disk.stat(path) is not None else None)
    except BaseException:
        data.close()
        raise
    report.damage += [Damage(codec.data_name(base), fault) for fault in found.faults]
    born = created_us(files, base) or found.first_ts_us
    stat = disk.stat(files.data_path(base))
    touched = found.last_ts_us or (stat.modified_ms * 1000 if stat else born)
    return ActiveSegment(
        files,
        latch,
        base,
        found,
        data=data,
        sides=sides,
        created_us=born,
        last_write_us=touched,
    )


def _search_cut_bytes(
    codec: Codec,
    content: bytes,
    sides: Sequence[bytes | None],
    base: int,
    recovered: RecoveredSegment,
    report: RecoveryReport,
) -> None:
    """Look for good records in what is about to be cut. After a bad one they may have been acked: then it is no
    unfinished write, and their seqs are not given again."""
    rows, faults = codec.salvage(content, sides, base, recovered.next_seq + len(content))
    bad = min((fault.pos for fault in faults if fault.pos >= recovered.end), default=len(content))
    if len(rows) and int(rows.frame_pos[-1]) > bad:
        report.cut_suspect = True
    if report.cut_suspect and len(rows) and int(rows.seq[-1]) >= recovered.next_seq:
        report.next_seq_floor = int(rows.seq[-1]) + 1


def _repair_active(
    files: LogFiles,
    base: int,
    data: File,
    content: bytes,
    sides: Sequence[bytes | None],
    recovered: RecoveredSegment,
    report: RecoveryReport,
) -> None:
    codec, disk = files.codec, files.disk
    # The footer: a crash before the next segment, and this one goes on growing. A side that is not kept up: what is
    # appended now would lie behind its end and be taken for torn by whoever keeps it up again.
    stale = (*codec.stale_suffixes, *([codec.footer_suffix] if codec.footer_suffix else []))
    removed = [remove_if_exists(disk, files.side_path(base, suffix)) for suffix in stale]
    if any(removed):
        disk.sync_dir(files.directory)
    cut = content[recovered.end :]
    if cut:
        if report.cut_suspect:
            name = f"{codec.data_name(base)}.{recovered.end}"
            report.quarantined.append(_quarantine(files, name, cut))
            if 0 in codec.authoritative_sides and sides[0]:
                # The cut bytes mean nothing without what the index said of them.
                index = f"{codec.side_name(base, codec.side_suffixes[0])}.{recovered.end}"
                report.quarantined.append(_quarantine(files, index, sides[0]))
        data.truncate(recovered.end)
    # Not only after a cut: bytes that a crashed process wrote may still wait for the disk, and from here on
    # they count as recovered.
    data.sync()
    for number, (suffix, content_, old) in enumerate(zip(codec.side_suffixes, recovered.sides, sides, strict=True)):
        if old is not None and old[: len(content_)] == content_ and not any(old[len(content_) :]):
            if len(old) > len(content_) and not (codec.index_prealloc_bytes and number == 0):
                _truncate_file(files, files.side_path(base, suffix), len(content_))
                report.rebuilt.append(codec.side_name(base, suffix))
            elif number in codec.authoritative_sides:
                _sync_file(files, files.side_path(base, suffix))
            continue
        path = files.side_path(base, suffix)
        if old is not None and codec.writes_index_on_seal and number == 0 and content_.startswith(old):
            _append_rest(files, path, content_, len(old))  # as a process that was killed leaves it
            continue
        replace_file(disk, path, content_, temporary=f"{path}.rebuilding")
        report.rebuilt.append(codec.side_name(base, suffix))


def _append_rest(files: LogFiles, path: str, content: bytes, pos: int) -> None:
    file = files.disk.open(path, "write")
    try:
        file.write(pos, memoryview(content)[pos:])
    finally:
        file.close()


def _truncate_file(files: LogFiles, path: str, size: int) -> None:
    file = files.disk.open(path, "write")
    try:
        file.truncate(size)
        file.sync()
    finally:
        file.close()


def _sync_file(files: LogFiles, path: str) -> None:
    file = files.disk.open(path, "write")
    try:
        file.sync()
    finally:
        file.close()
